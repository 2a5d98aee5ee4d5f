{% include "model/" ~ cookiecutter.model ~ ".py" %}
