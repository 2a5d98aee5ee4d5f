"""generated_examples/ holds what scaffold generates today, byte for byte."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import helpers
from refresh_examples import EXAMPLES, FOLDER, write
from scaffold import catalog


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    write(folder)
    return folder


def test_the_folder_holds_the_examples_alone() -> None:
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_what_scaffold_generates_today(name: str, fresh: Path) -> None:
    committed = {
        path: content
        for path, content in helpers.files(FOLDER / name).items()
        if "__pycache__" not in path
    }
    made = helpers.files(fresh / name)
    stale = sorted(path for path in committed | made if committed.get(path) != made.get(path))
    assert not stale, f"{name}: run `python -m tests.refresh_examples` and commit {stale}"
    for path in made:
        modes = [os.access(root / name / path, os.X_OK) for root in (FOLDER, fresh)]
        assert modes[0] == modes[1], path


def test_the_examples_show_every_model_data_set_strategy_and_launcher() -> None:
    default = "--model gpt --data synthetic --strategy ddp --launcher torchrun"
    shown = " ".join([default, *EXAMPLES.values()])
    for flag, offer in (
        ("--model", catalog.MODELS),
        ("--data", catalog.DATA),
        ("--strategy", catalog.STRATEGIES),
        ("--launcher", catalog.LAUNCHERS),
    ):
        for choice in offer:
            assert f"{flag} {choice}" in shown, choice


def test_no_example_holds_a_path_of_the_machine_that_made_it() -> None:
    here = (str(helpers.REPO), sys.prefix)
    for path, content in helpers.files(FOLDER).items():
        for place in here:
            assert place.encode() not in content, path
