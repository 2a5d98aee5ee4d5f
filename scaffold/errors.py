"""Every failure that is meant for people: a message of one or two lines and an exit code."""

from __future__ import annotations

import click


class ScaffoldError(click.ClickException):
    """A failure with a message for people: what is wrong, then what would be right.

    Raised as such it means a conflict, a failed check or a failure of the machine: exit code 1.
    """

    exit_code = 1


class AnswerError(ScaffoldError):
    """An answer, a target or a usage that cannot work: exit code 2."""

    exit_code = 2


class InternalError(ScaffoldError):
    """A bug of scaffold's own, such as a template that does not render: exit code 3."""

    exit_code = 3
