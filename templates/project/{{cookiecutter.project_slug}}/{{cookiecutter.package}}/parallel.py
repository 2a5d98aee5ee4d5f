{% include "parallel/" ~ cookiecutter.strategy ~ ".py" %}
