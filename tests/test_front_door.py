"""README.md says what is true: its commands, its options, and the tests that it names."""

from __future__ import annotations

import re
import shlex

import pytest

from helpers import REPO, scaffold
from scaffold import catalog, questions

README = (REPO / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line for block in re.findall(r"```bash\n(.*?)```", README, re.S) for line in block.splitlines()
]


def test_ci_runs_the_test_command_of_the_readme() -> None:
    (command,) = [line for line in COMMANDS if "pytest" in line]
    assert (REPO / ".ci" / "run").read_text().splitlines()[-1] == command
    assert command.split(" && ")[-1] in (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_scaffold_command_it_shows_exists() -> None:
    shown = [part.strip() for line in COMMANDS for part in line.split("&&")]
    shown = [part for part in shown if part.startswith("scaffold ")]
    assert len(shown) >= 5
    for command in shown:
        _, name, *arguments = shlex.split(command, comments=True)
        usage = scaffold(name, "--help")
        assert usage.code == 0, command
        for option in arguments:
            assert not option.startswith("--") or option in usage.out, command


def test_every_test_it_names_is_there() -> None:
    tests = {path.name: path.read_text() for path in (REPO / "tests").glob("test_*.py")}
    functions = re.findall(r"^ *def (test_\w+)", "\n".join(tests.values()), re.M)
    for name in re.findall(r"`(test_\w+)`", README):
        assert functions.count(name) == 1, name
    for name in re.findall(r"`tests/(test_\w+\.py)`", README):
        assert name in tests, name


def test_every_file_it_links_is_there() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (REPO / target).exists(), target


@pytest.mark.parametrize("question", questions.QUESTIONS, ids=lambda question: question.key)
def test_its_table_holds_every_answer(question: questions.Question) -> None:
    if question.key == "name":
        return
    (row,) = [line for line in README.splitlines() if re.match(rf"\| .*`{question.flag}`", line)]
    for choice in question.choices or ():
        assert f"`{choice}`" in row, choice


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 200
    assert len(catalog.LAUNCHERS) == 1 or "not there yet" not in README
