"""The commands: parse, call, report, exit code. Heavy imports stay inside the commands."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from scaffold import __version__, questions
from scaffold.errors import AnswerError, ScaffoldError

if TYPE_CHECKING:
    from scaffold.regenerate import Change

Command = TypeVar("Command", bound=Callable[..., Any])


class AnswerType(click.ParamType):  # type: ignore[type-arg]
    """The type of an option that answers a question: checked and completed as it says."""

    name = "answer"

    def __init__(self, question: questions.Question) -> None:
        self.question = question

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The answer's value, or the reason why it is none."""
        if self.question.kind == "choices":  # given one at a time, joined by the command
            return self.question.parse([value]) and value
        return self.question.parse(value)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """The choices, or what kind of value it takes."""
        if self.question.choices:
            return "[" + "|".join(self.question.choices) + "]"
        return "PATH" if self.question.kind == "path" else "N"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The choices that fit what was given before, with their descriptions."""
        if self.question.kind == "path":
            return [CompletionItem(incomplete, type="file")]
        known = {k.replace("_", "-"): v for k, v in ctx.params.items() if v not in (None, ())}
        try:
            fits = questions.allowed(self.question, known)
        except (KeyError, TypeError):  # half-typed values of other options
            fits = dict(self.question.choices)
        items = fits.items()
        return [CompletionItem(n, help=text) for n, text in items if n.startswith(incomplete)]


def _help(question: questions.Question, defaults: bool) -> str:
    text = question.help[0].upper() + question.help[1:] + "."
    if not defaults:
        return text
    if question.choices or (question.kind == "integer" and question.key != "global-batch-size"):
        value = question.default({})
        text += f"  [default: {', '.join(value) if isinstance(value, tuple) else value}]"
    return text


def answer_options(command: Command) -> Command:
    """Add an option for every question."""
    return _options(command, questions.QUESTIONS, defaults=True)


def structure_options(command: Command) -> Command:
    """Add an option for every answer that a project follows."""
    asked = [question for question in questions.QUESTIONS if not question.setting]
    return _options(command, asked, defaults=False)


def _options(command: Command, asked: Sequence[questions.Question], *, defaults: bool) -> Command:
    for question in reversed(asked):
        command = click.option(
            question.flag,
            type=AnswerType(question),
            multiple=question.kind == "choices",
            help=_help(question, defaults),
        )(command)
    return command


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """The answers among the flags, keyed as questions."""
    given = {}
    for key, value in flags.items():
        if value not in (None, ()):
            question = questions.BY_KEY[key.replace("_", "-")]
            # Several are given one at a time; only together they are parsed.
            given[question.key] = question.parse(value) if question.kind == "choices" else value
    return given


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="scaffold", message="%(prog)s %(version)s")
def cli() -> None:
    """Write complete PyTorch distributed-training projects from a few answers.

    Completion: add `eval "$(_SCAFFOLD_COMPLETE=bash_source scaffold)"` to ~/.bashrc (or
    zsh_source to ~/.zshrc; for fish `_SCAFFOLD_COMPLETE=fish_source scaffold | source`).
    """


@cli.command()
@click.argument("name")
@answer_options
@click.option(
    "--answers",
    "answers_file",
    type=click.Path(path_type=Path),
    help="A TOML file of answers, keyed as the options; options win over it.",
)
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Where the project's folder is made; the current folder by default.",
)
@click.option("--yes", "-y", is_flag=True, help="Ask nothing: open questions take their defaults.")
@click.option("--dry-run", is_flag=True, help="Show the files and their sizes, write nothing.")
def new(
    name: str,
    answers_file: Path | None,
    output_dir: Path,
    yes: bool,
    dry_run: bool,
    **flags: Any,
) -> None:
    """Write a new project into the folder NAME.

    On a terminal the open questions are asked; elsewhere, or with --yes, they take their defaults.
    """
    from scaffold import answers, report

    questions.check_name(name)
    target = output_dir / name
    _check_target(target)
    given = {**(answers.read(answers_file) if answers_file else {}), **_given(flags)}

    interactive = not yes and sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        from scaffold import prompts

        chosen, defaulted = answers.complete(name, given, prompts.ask)
    else:
        chosen, defaulted = answers.complete(name, given)
    click.echo(f"\nAnswers\n{report.answers(chosen, defaulted)}")
    if interactive and not dry_run:
        click.echo()
        click.confirm(f"Write {_shown(target)}/?", default=True, abort=True)

    from scaffold.render import render

    tree = render(chosen)
    sizes = {path: len(file.content) for path, file in tree.items()}
    if dry_run:
        click.echo(f"\n{report.tree(_shown(target), sizes, show_sizes=True)}")
    else:
        from scaffold import apply

        apply.create(
            target,
            tree,
            version=__version__,
            answers=chosen.structure(),
            settings=chosen.settings(),
        )
        click.echo(f"\n{report.tree(_shown(target), sizes)}")
    click.echo(f"\nWhat it runs\n{report.plan(chosen)}")
    if dry_run:
        total = sum(sizes.values())
        click.echo(f"\nDry run: {len(sizes)} files, {total:,} bytes; nothing was written.")
    else:
        click.echo(f"\nNext\n{report.next_commands(_shown(target), chosen.launcher)}")


def _shown(path: Path) -> str:
    """A path for people, whatever bytes it holds."""
    return click.format_filename(path)


def _check_target(target: Path) -> None:
    """Refuse, before any question, a target that cannot become a new project."""
    try:
        if target.parent.exists() and not target.parent.is_dir():
            raise AnswerError(f"{_shown(target.parent)} is no folder; give --output-dir one.")
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            raise AnswerError(f"{_shown(target)} exists already; choose another name.")
        if target.is_dir() and any(target.iterdir()):
            raise AnswerError(
                f"{_shown(target)} exists and is not empty; choose another name or --output-dir."
            )
    except ValueError:  # a NUL byte
        raise AnswerError("--output-dir is not a valid path; give another.")


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def options(as_json: bool) -> None:
    """Show every question, its choices, defaults and which go together."""
    from scaffold import report

    click.echo(json.dumps(report.options(), indent=2) if as_json else report.options_text())


project_argument = click.argument(
    "project",
    metavar="[DIR]",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(),
)
json_option = click.option("--json", "as_json", is_flag=True, help="For programs.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Show the plan, write nothing.")
diff_option = click.option("--diff", "diffs", is_flag=True, help="Show each change line by line.")


@cli.command()
@project_argument
@structure_options
@click.option("--no-launcher", multiple=True, metavar="NAME", help="Take a launcher away.")
@click.option("--restore", multiple=True, metavar="PATH", help="Bring back a file you deleted.")
@click.option("--follow-renames", is_flag=True, help="Merge moved files at their new place.")
@dry_run_option
@diff_option
@json_option
def regenerate(
    project: Path,
    no_launcher: tuple[str, ...],
    restore: tuple[str, ...],
    follow_renames: bool,
    dry_run: bool,
    diffs: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Follow changed answers, by flags or edited in scaffold.toml; keep what you wrote.

    Exit code 1 says that files need you: they are marked ! in the report.
    """
    from scaffold import regenerate as existing
    from scaffold import state

    state.read(project)  # refuses before anything is written, the lock included
    ask = sys.stdin.isatty() and sys.stdout.isatty() and not (dry_run or as_json)

    def follow(path: str, at: str) -> bool:
        question = f"{path} seems to be {at} now. Merge what is new into it?"
        return follow_renames or (ask and click.confirm(question, default=True))

    def plan() -> Change:
        wanted = [os.path.normpath(path) for path in restore]
        return existing.prepare(
            project, _given(flags), without=no_launcher, restore=wanted, follow=follow
        )

    return _change(project, plan, dry_run, diffs, as_json)


@cli.command()
@project_argument
@structure_options
@dry_run_option
@diff_option
@json_option
def adopt(project: Path, dry_run: bool, diffs: bool, as_json: bool, **flags: Any) -> int:
    """Take in a project whose .scaffold/ was lost, or a folder of the same layout.

    Your files stay; where they differ from what is generated, that is put beside them.
    """
    from scaffold import regenerate as existing

    existing.check_adoptable(project)
    return _change(project, lambda: existing.adopt(project, _given(flags)), dry_run, diffs, as_json)


def _change(
    project: Path, plan: Callable[[], Change], dry_run: bool, diffs: bool, as_json: bool
) -> int:
    """Plan under the lock, write unless it is a dry run, report; 1 if files need the person."""
    from scaffold import apply, report_change

    if dry_run:
        if apply.interrupted(project):
            raise ScaffoldError("a regenerate was cut off here; run it again, or `scaffold undo`.")
        change = plan()
    else:
        with apply.locked(project):
            if apply.recover(project):
                click.echo("A regenerate that was cut off here is taken back first.", err=True)
            change = plan()
            apply.regenerate(project, change.plan)
    if as_json:
        data = report_change.as_data(change, written=not dry_run, diffs=diffs)
        click.echo(json.dumps(data, indent=2))
    else:
        click.echo(report_change.text(change, written=not dry_run, diffs=diffs))
        ending = "Dry run: nothing was written." if dry_run else report_change.ending(change)
        click.echo("\n" + ending if ending else "", nl=bool(ending))
    return 1 if change.plan.problems else 0


@cli.command()
@project_argument
@json_option
def status(project: Path, as_json: bool) -> int:
    """Show what you changed since it was generated, what is unresolved, which answers hold."""
    from scaffold import answers, regenerate, report_change

    found = regenerate.status(project)
    if as_json:
        click.echo(json.dumps(report_change.status_data(found), indent=2))
    else:
        wishes = project / regenerate.ANSWERS
        asked, wrong = {}, ""
        try:
            asked = answers.read(wishes) if wishes.is_file() else {}
        except AnswerError as error:
            wrong = error.message
        asked = {k: list(v) if isinstance(v, tuple) else v for k, v in asked.items()}
        click.echo(report_change.status_text(found, asked))
        if wrong:
            raise AnswerError(wrong)
    return 1 if found.unresolved or found.interrupted else 0


@cli.command()
@project_argument
@click.option("--force", is_flag=True, help="Also where you edited a file since.")
def undo(project: Path, force: bool) -> None:
    """Put back what the last regenerate changed."""
    from scaffold import apply, state

    state.read(project)  # before anything is written, the lock included
    with apply.locked(project):
        if apply.recover(project):
            click.echo("The regenerate that was cut off is taken back.")
            return
        changed = apply.undo(project, over_edits=force)
    paths = [path for path in changed if not path.startswith(f"{state.FOLDER}/")]
    click.echo("\n".join(["Put back", *(f"  {path}" for path in paths)]))


def main() -> None:
    """Run the command and exit: 0 done, 1 machine or conflict, 2 usage, 3 our bug, 130 aborted."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show
    sys.exit(run())


def run(arguments: list[str] | None = None) -> int:
    """The exit code of the command with these arguments (the process's own by default)."""
    try:
        status = cli.main(arguments, prog_name="scaffold", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "scaffold"
        click.echo(f"Error: {error.format_message()} See `{where} --help`.", err=True)
        return error.exit_code
    except click.ClickException as error:
        click.echo(f"Error: {error.format_message()}", err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("\nAborted: nothing was written.", err=True)
        return 130
    except BrokenPipeError:
        # The reader has gone; keep the interpreter from complaining when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        click.echo(f"Error: {error}", err=True)
        return 1
    except Exception as error:
        traceback.print_exc()
        click.echo(f"Error: a bug in scaffold, please report it: {error!r}", err=True)
        return 3
