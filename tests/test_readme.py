"""The generated README: its commands work as printed, it holds no counts and names real files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import accepted
from scaffold import catalog
from scaffold.answers import Answers
from scaffold.render import render


def readme(answers: Answers) -> str:
    return render(answers)["README.md"].content.decode()


def test_it_holds_no_counts_of_nodes_or_gpus() -> None:
    assert readme(Answers("demo", nodes=7, gpus_per_node=5)) == readme(Answers("demo"))


def test_every_file_it_names_is_there_and_every_module_is_named() -> None:
    for answers in accepted(precision="bf16"):
        tree, text = render(answers), readme(answers)
        named = re.findall(r"^\| (`.*?) \|", text, re.M)
        names = {name for row in named for name in re.findall(r"`([^`]+)`", row)}
        for name in names - {"launch/", "tests/", ".scaffold/"}:
            assert name in tree or f"{answers.package}/{name}" in tree, name
        code = {p for p in tree if p.endswith(".py") and not p.startswith(("tests/", "launch/"))}
        for path in code - {f"{answers.package}/__init__.py"}:
            assert path in names or path.split("/")[-1] in names, path


@pytest.mark.slow
def test_its_commands_run_as_printed(make_project: Callable[..., Path]) -> None:
    project = make_project("my-project", model="mlp", gpus_per_node=1)
    text = (project / "README.md").read_text()
    config = (project / "config.toml").read_text()
    short = re.sub(r"^steps = \d+", "steps = 3", config, flags=re.M)
    (project / "config.toml").write_text(short)
    commands = [
        line
        for block in re.findall(r"```bash\n(.*?)```", text, re.S)
        for line in block.splitlines()
        if line and "pip install" not in line
    ]
    assert len(commands) >= 4
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    environment.pop("PYTHONPATH", None)
    for command in commands:
        result = subprocess.run(
            ["bash", "-c", command],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    assert (project / "runs/default/export/model.safetensors").is_file()


def test_the_readme_of_launch_names_the_files_that_are_there_and_no_others() -> None:
    for launcher in catalog.LAUNCHERS:
        tree = render(Answers("demo", launcher=("torchrun", launcher), nodes=3))
        text = tree["launch/README.md"].content.decode()
        there = {path.removeprefix("launch/") for path in tree if path.startswith("launch/")}
        named = {*re.findall(r"\b([\w-]+\.(?:sh|sbatch|py|yaml|env|txt)|Dockerfile)\b", text)}
        elsewhere = {"train.py", "runs.py", "sweep.txt", "prepare.py", "other-hosts.txt"}
        assert {name for name in named - there - elsewhere if "NAME" not in name} == set(), launcher
        unnamed = {"README.md", "Dockerfile.dockerignore", "preflight_node.py", "preflight_rank.py"}
        assert there - named <= unnamed, launcher
