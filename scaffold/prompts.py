"""Questions on a terminal: descriptions beside the choices, each answer checked as it is typed."""

from __future__ import annotations

from typing import Any

import click

from scaffold import questions
from scaffold.errors import AnswerError
from scaffold.questions import Question, Values


def ask(question: Question, known: Values) -> Any:
    """The person's answer; asked again, with the reason, until it can work."""
    choices = questions.allowed(question, known)
    default = questions.default(question, known)
    click.echo()
    if question.choices:
        width = max(map(len, choices))
        click.echo(f"{question.prompt}: {question.help}")
        for number, (name, text) in enumerate(choices.items(), 1):
            click.echo(f"  {number}  {name:<{width}}  {text}")

    def named(word: str) -> str:
        chosen = word.isdigit() and 1 <= int(word) <= len(choices)
        return list(choices)[int(word) - 1] if chosen else word

    def check(raw: str) -> Any:
        if question.kind == "choices":
            raw = ",".join(map(named, raw.replace(",", " ").split()))
        elif question.choices:
            raw = named(raw)
        try:
            value = question.parse(raw)
            if why := questions.problem({**known, question.key: value}):
                raise AnswerError(why)
        except AnswerError as error:
            raise click.UsageError(error.message)
        return value

    text, shown = question.prompt.rstrip("?"), default
    if question.kind == "path":
        text, shown = _path_prompt(known), ""
    elif question.kind == "choices":
        shown = ", ".join(default)
    return click.prompt(text, default=shown, value_proc=check, show_default=bool(shown))


def _path_prompt(known: Values) -> str:
    from scaffold.catalog import DATA

    what = DATA[known["data"]].path
    empty = (
        "Python's own documentation" if known["data"] == "text" else "say so in config.toml later"
    )
    return f"Path of the {what} (Enter: {empty})"
