"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ranks import Ranks
from scaffold import __version__, apply
from scaffold.answers import Answers, complete
from scaffold.render import render

# Generating a project takes longer than Hypothesis expects of an example.
settings.register_profile(
    "scaffold", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("scaffold")


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of their own, so that no test reads or writes the person's."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


def write_project(target: Path, **answers: Any) -> Path:
    """Generates a project: `write_project(folder / "demo", model="mlp", nodes=2)`."""
    given = {key.replace("_", "-"): value for key, value in answers.items()}
    chosen: Answers = complete(target.name, given)[0]
    apply.create(
        target,
        render(chosen),
        version=__version__,
        answers=chosen.structure(),
        settings=chosen.settings(),
    )
    return target


@pytest.fixture
def make_project(tmp_path: Path) -> Callable[..., Path]:
    """Generates a project in a fresh folder: `make_project("demo", model="mlp", nodes=2)`."""

    def make(name: str = "demo", folder: Path = tmp_path, **answers: Any) -> Path:
        return write_project(folder / name, **answers)

    return make


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Starts ranks of generated projects, quickly."""
    with Ranks() as started:
        yield started
