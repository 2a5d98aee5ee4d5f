{% include "data/" ~ cookiecutter.data_part ~ ".py" %}
