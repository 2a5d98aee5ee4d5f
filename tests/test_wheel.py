"""The wheel: holds every template, and works from another folder once installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from helpers import REPO, TEMPLATE, files, scaffold

pytest.importorskip("hatchling")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=REPO, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_whole_template_and_nothing_else(wheel: Path) -> None:
    prefix = "scaffold/templates/project/"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    shipped = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    own = {
        path.relative_to(TEMPLATE).as_posix()
        for path in TEMPLATE.rglob("*")
        if path.is_file() and "cache" not in str(path.relative_to(TEMPLATE)).lower()
    }
    assert {name for name in shipped if "cache" not in name.lower()} == own
    others = {name.split("/")[0] for name in names}
    assert others == {"scaffold", "torch_scaffold-0.1.0.dist-info"}


def test_an_installed_wheel_generates_the_same_project_anywhere(
    wheel: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    with zipfile.ZipFile(wheel) as archive:  # a wheel of pure Python is installed by unpacking it
        archive.extractall(site)
    # The dependencies come from the environment that runs the tests: no network is needed.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    python = str(environment / "bin" / "python")
    where = "import scaffold.render as r; print(r.__file__, r.template_dir())"
    paths = subprocess.run(
        [python, "-c", where], cwd=tmp_path, env=clean, capture_output=True, text=True, check=True
    ).stdout.split()
    assert all(path.startswith(str(site)) for path in paths)
    out = tmp_path / "somewhere else"
    out.mkdir()
    subprocess.run(
        [python, "-m", "scaffold", "new", "demo", "--yes"],
        cwd=out,
        env=clean,
        check=True,
        capture_output=True,
        timeout=60,
    )
    assert os.access(out / "demo" / "launch" / "local.sh", os.X_OK)
    assert scaffold("new", "demo", "--yes", "--output-dir", tmp_path / "here").code == 0
    assert files(out / "demo") == files(tmp_path / "here" / "demo")


def test_the_metadata_pins_no_torch_and_names_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read("torch_scaffold-0.1.0.dist-info/METADATA").decode()
        entry_points = archive.read("torch_scaffold-0.1.0.dist-info/entry_points.txt").decode()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    assert not any("==" in line.split(";")[0] for line in required)
    core = {re.split("[<>~ ]", line.split()[1])[0] for line in required if ";" not in line}
    assert core == {"click", "cookiecutter", "black", "tomlkit"}
    assert "scaffold = scaffold.cli:main" in entry_points


def test_the_generated_pyproject_names_its_package_alone() -> None:
    from scaffold.answers import Answers
    from scaffold.render import render

    table = tomllib.loads(render(Answers("a-b"))["pyproject.toml"].content.decode())
    assert table["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["a_b"]
    for model, wanted in (("gpt", False), ("mlp", False), ("vit", True), ("resnet", True)):
        made = render(Answers("demo", model=model))["pyproject.toml"].content.decode()
        requirements = tomllib.loads(made)["project"]["dependencies"]
        assert ("torchvision" in requirements) == wanted
        assert "torch>=2.13" in requirements


def test_a_generated_project_builds_after_a_run_left_folders(tmp_path: Path) -> None:
    assert scaffold("new", "my-project", "--yes", "--output-dir", tmp_path).code == 0
    project = tmp_path / "my-project"
    for folder in ("runs/default", "data/prepared", "logs"):
        (project / folder).mkdir(parents=True)
        (project / folder / "x.py").write_text("")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "w")]
    subprocess.run(command, cwd=project, check=True, capture_output=True, timeout=60)
    (built,) = (tmp_path / "w").glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        folders = {name.split("/")[0] for name in archive.namelist()}
    assert folders == {"my_project", "my_project-0.1.0.dist-info"}


def test_git_keeps_the_stored_base_and_the_packages_own_folders(tmp_path: Path) -> None:
    assert scaffold("new", "demo", "--yes", "--output-dir", tmp_path).code == 0
    project = tmp_path / "demo"
    for path in ("runs/default/metrics.jsonl", "data/prepared/x.bin", "demo/runs/mine.py"):
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text("x")
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    listed = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard"],
        cwd=project,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    generated = {
        path for path in files(project) if not path.startswith((".git/", "runs/", "data/"))
    }
    assert set(listed) == generated
    assert ".scaffold/state.json" in listed
    assert "demo/runs/mine.py" in listed
