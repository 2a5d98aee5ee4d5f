"""What several tests need: every accepted combination, the command, a parser per file type."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaffold import catalog, cli, questions
from scaffold.answers import Answers

REPO = Path(__file__).resolve().parent.parent
TEMPLATE = REPO / "templates" / "project"
LAYOUT = TEMPLATE / "{{cookiecutter.project_slug}}"
PARTS = TEMPLATE / "templates"


def accepted(**fixed: Any) -> Iterator[Answers]:
    """Every combination of model, data, strategy and precision that scaffold accepts."""
    keys = ("model", "data", "strategy", "precision")
    offers = (catalog.MODELS, catalog.DATA, catalog.STRATEGIES, catalog.PRECISIONS)
    for choice in itertools.product(*offers):
        values = dict(zip(keys, choice, strict=True))
        values["nodes"] = catalog.STRATEGIES[values["strategy"]].min_nodes
        values.update(fixed)
        if not questions.problem(values):
            yield Answers.of({"name": "demo", **values})


def label(answers: Answers) -> str:
    """A test id."""
    return f"{answers.model}-{answers.data}-{answers.strategy}-{answers.precision}"


@dataclass(frozen=True)
class Result:
    """What a command in this process came to."""

    code: int
    out: str
    err: str


def scaffold(*arguments: str | Path) -> Result:
    """The `scaffold` command in this process: fast."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run([str(argument) for argument in arguments])
    return Result(code, out.getvalue(), err.getvalue())


def environment(**changes: str) -> dict[str, str]:
    """The environment of a subprocess that finds scaffold in this checkout."""
    return {**os.environ, "PYTHONPATH": str(REPO), **changes}


def scaffold_process(
    *arguments: str | Path, cwd: Path, env: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """The `scaffold` command as a process of its own: for exit codes and environments."""
    return subprocess.run(
        [sys.executable, "-m", "scaffold", *map(str, arguments)],
        cwd=cwd,
        env=env or environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def parse(path: str, content: bytes) -> None:
    """Fail unless the file is well-formed for the language its name says."""
    text = content.decode("utf-8")
    assert "\r" not in text, path
    if path.endswith(".py"):
        compile(text, path, "exec")
    elif path.endswith(".toml"):
        tomllib.loads(text)
    elif path.endswith((".sh", ".env")):
        subprocess.run(["bash", "-n"], input=content, check=True, timeout=30)


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its relative path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
