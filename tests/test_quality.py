"""Generated projects as their owners' tools see them: linter, formatter, type checker, shellcheck."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from helpers import accepted, label
from scaffold.answers import Answers
from scaffold.render import render

SHELLCHECK = shutil.which("shellcheck", path=Path(sys.executable).parent) or shutil.which(
    "shellcheck"
)


def write(answers: Iterable[Answers], folder: Path) -> Path:
    """Projects side by side, one folder each."""
    for chosen in answers:
        for path, file in render(chosen).items():
            target = folder / label(chosen) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.content)
    return folder


def run(*command: str | Path, cwd: Path) -> None:
    """Fail with the tool's own words."""
    result = subprocess.run(
        [*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(accepted(precision="bf16"), tmp_path_factory.mktemp("projects"))


def test_every_project_passes_the_linter_with_its_own_settings(projects: Path) -> None:
    run(sys.executable, "-m", "ruff", "check", "--no-cache", ".", cwd=projects)


def test_every_project_is_formatted(projects: Path) -> None:
    for project in sorted(projects.iterdir())[:4]:
        run(sys.executable, "-m", "black", "-q", "--check", ".", cwd=project)


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
def test_every_script_passes_shellcheck(projects: Path) -> None:
    project = sorted(projects.iterdir())[0]
    scripts = [*sorted((project / "launch").glob("*.sh")), project / "launch" / "topology.env"]
    assert SHELLCHECK
    run(SHELLCHECK, "-x", *scripts, cwd=project)


@pytest.mark.slow
def test_projects_pass_the_type_checker(tmp_path: Path) -> None:
    covering = [  # each model, data set and strategy once
        Answers("demo", strategy="ddp"),
        Answers("demo", data="text", strategy="fsdp-tp"),
        Answers("demo", model="vit", data="image-folder", strategy="fsdp"),
        Answers("demo", model="resnet", strategy="hsdp", nodes=2),
        Answers("demo", model="mlp", data="csv"),
        Answers("demo", model="mlp"),
    ]
    write(covering, tmp_path)
    cache = tmp_path / "cache"  # so that torch is read once
    for answers in covering:
        command = ["mypy", "--no-error-summary", "--cache-dir", str(cache), "."]
        run(sys.executable, "-m", *command, cwd=tmp_path / label(answers))
