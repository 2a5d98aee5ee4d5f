"""Rendering: every accepted combination, the same bytes each time, parts that are plain files."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from helpers import LAYOUT, PARTS, TEMPLATE, accepted, environment, label, parse
from scaffold import catalog, manifest
from scaffold.answers import Answers
from scaffold.manifest import Owner
from scaffold.render import kubernetes_name, render

COMBINATIONS = list(accepted())
PART_FILES = sorted(p for p in PARTS.rglob("*") if p.suffix in (".py", ".toml", ".md"))
TEMPLATE_FILES = sorted(
    path
    for path in LAYOUT.rglob("*")
    if path.is_file() and not {"__pycache__", ".ruff_cache", ".mypy_cache"} & set(path.parts)
)


@pytest.mark.parametrize("answers", COMBINATIONS, ids=label)
def test_every_accepted_combination_renders_well_formed_files(answers: Answers) -> None:
    tree = render(answers)
    assert list(tree) == sorted(tree)
    for path, file in tree.items():
        if not path.endswith((".sh", ".env")):  # bash -n once, below
            parse(path, file.content)
        assert b"cookiecutter" not in file.content, path
    config = tomllib.loads(tree["config.toml"].content.decode())
    assert config["train"]["precision"] == answers.precision
    assert config["train"]["global_batch_size"] == answers.global_batch_size
    assert config["train"]["global_batch_size"] % config["train"]["micro_batch_size"] == 0
    assert {"run", "data", "model", "train", "checkpoint", "parallel"} == set(config)


@pytest.mark.parametrize("backend", catalog.BACKENDS)
def test_launch_files_are_well_formed_bash(backend: str) -> None:
    for path, file in render(Answers("demo", nodes=3, backend=backend)).items():
        if path.startswith("launch/"):
            parse(path, file.content)


def test_same_answers_give_the_same_bytes() -> None:
    code = (
        "import hashlib; from scaffold.answers import Answers; from scaffold.render import render\n"
        "tree = render(Answers('demo', model='vit'))\n"
        "print(hashlib.sha256(repr(tree).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=environment(PYTHONHASHSEED=seed, TZ=zone, LC_ALL=locale),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed, zone, locale in (("1", "UTC", "C"), ("2", "Asia/Tokyo", "C.UTF-8"))
    }
    assert len(digests) == 1


@pytest.mark.parametrize("answers", [a for a in COMBINATIONS if a.precision == "bf16"], ids=label)
def test_parts_arrive_byte_for_byte(answers: Answers) -> None:
    tree = render(answers)
    part = catalog.data_part(answers.model, answers.data)
    chosen = {
        "model.py": f"model/{answers.model}.py",
        "data.py": f"data/{part}.py",
        "parallel.py": f"parallel/{answers.strategy}.py",
    }
    for name, source in chosen.items():
        assert tree[f"{answers.package}/{name}"].content == (PARTS / source).read_bytes(), source
    config, readme = tree["config.toml"].content, tree["README.md"].content
    for source in (
        f"config/model/{answers.model}.toml",
        f"config/data/{part}.toml",
        f"config/parallel/{answers.strategy}.toml",
    ):
        assert (PARTS / source).read_bytes() in config, source
    for source in (f"readme/data/{part}.md", f"readme/strategy/{answers.strategy}.md"):
        assert (PARTS / source).read_bytes() in readme, source


@pytest.mark.parametrize("part", PART_FILES, ids=lambda p: p.relative_to(PARTS).as_posix())
def test_parts_are_plain_files(part: Path) -> None:
    text = part.read_bytes().decode("utf-8")
    for mark in ("{{", "{%", "{#", "\r", "\t"):
        assert mark not in text
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


def test_every_part_is_offered_and_every_offer_has_its_parts() -> None:
    data = {catalog.data_part(m, d) for m in catalog.MODELS for d in catalog.DATA}
    data &= {catalog.data_part(a.model, a.data) for a in COMBINATIONS}
    wanted = {f"model/{name}.py" for name in catalog.MODELS}
    for name in catalog.MODELS:
        wanted |= {f"config/model/{name}.toml", f"tests/model/{name}.py"}
    for name in data:
        wanted |= {f"data/{name}.py", f"config/data/{name}.toml", f"readme/data/{name}.md"}
        wanted.add(f"tests/data/{name}.py")
    for name in catalog.STRATEGIES:
        wanted |= {f"parallel/{name}.py", f"config/parallel/{name}.toml"}
        wanted |= {f"readme/strategy/{name}.md"}
    wanted |= {f"readme/launcher/{name}.md" for name in catalog.LAUNCHERS}
    assert {path.relative_to(PARTS).as_posix() for path in PART_FILES} == wanted


@pytest.mark.parametrize("path", TEMPLATE_FILES, ids=lambda p: p.relative_to(LAYOUT).as_posix())
def test_code_outside_the_parts_holds_placeholders_in_import_lines_only(path: Path) -> None:
    text = path.read_bytes().decode("utf-8")
    assert "\r" not in text
    if path.suffix != ".py":
        return
    for line in text.splitlines():
        if "{{" in line or "{%" in line or "{#" in line:
            chosen = line.startswith("{% include ") and line.endswith("%}")
            assert chosen or re.match(r"\s*(from|import) \{\{ cookiecutter\.package \}\}", line)


def test_a_project_imports_nothing_of_scaffold() -> None:
    for answers in COMBINATIONS:
        for path, file in render(answers).items():
            if not path.endswith(".py"):
                continue
            for node in ast.walk(ast.parse(file.content)):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                assert not any(name.split(".")[0] == "scaffold" for name in names), path


def test_heads_in_the_catalog_are_those_of_the_model() -> None:
    for name, model in catalog.MODELS.items():
        config = tomllib.loads((PARTS / f"config/model/{name}.toml").read_text())["model"]
        if model.heads:
            assert config["heads"] == model.heads


def test_a_topology_change_touches_launch_and_scaffold_toml_alone() -> None:
    before = render(Answers("demo", strategy="fsdp"))
    for change in ({"nodes": 4}, {"gpus_per_node": 8}, {"backend": "gloo"}):
        after = render(Answers("demo", strategy="fsdp", **change))
        changed = {path for path in {*before, *after} if before.get(path) != after.get(path)}
        assert changed == {"launch/topology.env", "scaffold.toml"}, change


def test_a_strategy_change_touches_its_part_its_config_and_the_readme_alone() -> None:
    trees = {name: render(Answers("demo", strategy=name, nodes=2)) for name in catalog.STRATEGIES}
    for name in catalog.STRATEGIES:
        changed = {path for path in trees["ddp"] if trees["ddp"][path] != trees[name].get(path)}
        if name != "ddp":
            expected = {"demo/parallel.py", "config.toml", "README.md", "scaffold.toml"}
            assert changed == expected, name
            assert list(trees[name]) == list(trees["ddp"])


# The manifest


def test_the_manifest_lists_exactly_the_files_of_the_template() -> None:
    paths = {path.relative_to(LAYOUT).as_posix() for path in TEMPLATE_FILES}
    listed = {spec.path.replace("{package}", "{{cookiecutter.package}}") for spec in manifest.SPECS}
    assert paths == listed
    assert len(listed) == len(manifest.SPECS)


def test_owners_and_executable_bits() -> None:
    tree = render(Answers("demo", launcher=tuple(catalog.LAUNCHERS)))
    for path, file in tree.items():
        assert file.executable == file.content.startswith(b"#!"), path
        if path in ("launch/site.env", "launch/hosts.txt"):
            assert file.owner is Owner.ONCE
        elif path.startswith("launch/"):
            assert file.owner is Owner.TOOL
        elif path == "scaffold.toml":
            assert file.owner is Owner.ANSWERS
        else:
            assert file.owner is Owner.MERGE


def test_files_appear_only_where_the_answers_want_them() -> None:
    assert "prepare.py" in render(Answers("demo", data="text"))
    assert "prepare.py" not in render(Answers("demo"))
    assert "prepare.py" not in render(Answers("demo", model="vit"))
    plain = {*render(Answers("demo"))}
    files = {
        "slurm": "slurm.sbatch submit.sh sweep.sh",
        "ssh": "ssh.sh hosts.txt",
        "mpirun": "mpirun.sh hosts.txt",
        "kubernetes": "kubernetes.yaml kubernetes-trainjob.yaml kubernetes-pytorchjob.yaml "
        "Dockerfile Dockerfile.dockerignore",
    }
    for launcher, names in files.items():
        tree = {*render(Answers("demo", launcher=("torchrun", launcher)))}
        assert tree - plain == {f"launch/{name}" for name in names.split()}


def test_a_change_of_topology_touches_launch_and_the_answers_alone() -> None:
    before = render(Answers("demo", nodes=2))
    for change in (
        {"nodes": 3},
        {"nodes": 2, "gpus_per_node": 8},
        {"nodes": 2, "backend": "gloo"},
        {"nodes": 2, "launcher": tuple(catalog.LAUNCHERS)},
    ):
        after = render(Answers("demo", **change))  # type: ignore[arg-type]
        changed = {p for p in {*before, *after} if before.get(p) != after.get(p)}
        assert {p for p in changed if not p.startswith("launch/")} == {"scaffold.toml"}, change
        assert not [path for path in changed if path.endswith(".py")], change


def test_a_kubernetes_name_is_a_label_whatever_the_project_is_called() -> None:
    for name in ("demo", "My_Proj--1", "a" * 64, "A" + "_" * 50 + "b", "x" * 39 + "_9"):
        assert re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", kubernetes_name(name)), name


# The plain cookiecutter command


@pytest.mark.parametrize(
    "choices",
    [
        [],
        ["model=vit", "data=image-folder", "strategy=fsdp"],
        ["model=mlp", "data=csv", "strategy=hsdp", "project_slug=my-project"],
        ["model=gpt", "data=text", "strategy=fsdp-tp"],
    ],
    ids=lambda choices: " ".join(choices) or "defaults",
)
def test_the_plain_cookiecutter_command_renders_and_compiles(
    choices: list[str], tmp_path: Path
) -> None:
    command = ["-m", "cookiecutter", str(TEMPLATE), "--no-input", "-o", str(tmp_path), *choices]
    subprocess.run(
        [sys.executable, *command], check=True, capture_output=True, timeout=60, env=os.environ
    )
    (project,) = tmp_path.iterdir()
    for path in project.rglob("*"):
        if path.is_file():
            parse(path.relative_to(project).as_posix(), path.read_bytes())
    answers = tomllib.loads((project / "scaffold.toml").read_text())
    chosen = {key: answers[key] for key in ("name", "model", "data", "strategy") if key in answers}
    tree = render(Answers(nodes=1, **chosen))
    assert (project / "config.toml").read_bytes().strip() == tree["config.toml"].content.strip()
    assert (project / "scaffold.toml").read_bytes() == tree["scaffold.toml"].content
