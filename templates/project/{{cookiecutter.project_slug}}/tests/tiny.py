{% include "tests/data/" ~ cookiecutter.data_part ~ ".py" %}

{% include "tests/model/" ~ cookiecutter.model ~ ".py" %}
