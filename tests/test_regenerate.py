"""The commands for an existing project: regenerate, status, undo, adopt."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers import Result, accepted, environment, files, label, scaffold
from scaffold import apply, catalog, migrations, state
from scaffold.answers import Answers
from scaffold.disk import Disk
from scaffold.migrations import Migration
from scaffold.plan import compare
from scaffold.render import Tree, render

Make = Callable[..., Path]


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is slow, and nothing here cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@functools.cache
def rendered(answers: Answers) -> Tree:
    return render(answers)


SHAPES = [a for a in accepted(nodes=2) if a.precision == "bf16"]
"""Every accepted model, data and strategy, on two nodes so that each strategy has its place."""


def changed(one: Tree, other: Tree) -> set[str]:
    return {path for path in {*one, *other} if one.get(path) != other.get(path)}


def project_files(project: Path) -> dict[str, bytes]:
    """All but what is of this copy alone."""
    return {p: c for p, c in files(project).items() if not p.startswith(".scaffold/local/")}


def touched(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    return {path for path in {*before, *after} if before.get(path) != after.get(path)}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path} has no {old!r}"
    path.write_text(text.replace(old, new, 1))


def regenerate(project: Path, *arguments: str, code: int = 0) -> Result:
    result = scaffold("regenerate", project, *arguments)
    assert result.code == code, (result.out, result.err)
    return result


# What an answer may touch


TOPOLOGY = {"nodes": 3, "gpus_per_node": 4, "backend": "gloo"}


@pytest.mark.parametrize("answers", SHAPES, ids=label)
def test_a_topology_change_touches_launch_and_the_answers_alone(answers: Answers) -> None:
    for key, value in TOPOLOGY.items():
        paths = changed(rendered(answers), rendered(replace(answers, **{key: value})))
        assert "scaffold.toml" in paths
        assert all(p == "scaffold.toml" or p.startswith("launch/") for p in paths), paths


def strategy_pairs() -> Iterator[Any]:
    for one, other in itertools.combinations(SHAPES, 2):
        if replace(one, strategy=other.strategy) == other:
            yield pytest.param(one, other, id=f"{label(one)}-{other.strategy}")


@pytest.mark.parametrize(("one", "other"), list(strategy_pairs()))
def test_a_strategy_change_touches_what_belongs_to_it_alone(one: Answers, other: Answers) -> None:
    trees = rendered(one), rendered(other)
    assert changed(*trees) == {"README.md", "config.toml", "demo/parallel.py", "scaffold.toml"}
    before, after = (tomllib.loads(tree["config.toml"].content.decode()) for tree in trees)
    assert before.pop("parallel") != after.pop("parallel")
    assert before == after


def pairs(key: str) -> Iterator[Any]:
    """Accepted answers that differ in `key` alone, and in the batch that goes with the model."""
    for one, other in itertools.combinations(SHAPES, 2):
        changes = {key: getattr(other, key), "global_batch_size": other.global_batch_size}
        if replace(one, **changes) == other:
            yield pytest.param(one, other, id=f"{label(one)}-{getattr(other, key)}")


DATA_FILES = {"README.md", "config.toml", "demo/data.py", "pyproject.toml", "tests/tiny.py"}


@pytest.mark.parametrize(("one", "other"), list(pairs("data")))
def test_a_change_of_data_touches_what_belongs_to_it_alone(one: Answers, other: Answers) -> None:
    trees = rendered(one), rendered(other)
    text = {"prepare.py"} if "text" in (one.data, other.data) else set()
    assert changed(*trees) == DATA_FILES | text | {"scaffold.toml"}
    before, after = (tomllib.loads(tree["config.toml"].content.decode()) for tree in trees)
    for key in ("workers", "val_fraction"):
        assert before["data"][key] == after["data"][key]
    for table in ("run", "model", "train", "checkpoint", "parallel"):
        assert before[table] == after[table]


@pytest.mark.parametrize(("one", "other"), list(pairs("model")))
def test_a_change_of_model_touches_what_belongs_to_it_alone(one: Answers, other: Answers) -> None:
    trees = rendered(one), rendered(other)
    task = catalog.MODELS[one.model].task, catalog.MODELS[other.model].task
    data = {"demo/data.py"} if task[0] != task[1] else set()
    files = (DATA_FILES - {"demo/data.py"}) | data | {"demo/model.py", "scaffold.toml"}
    assert changed(*trees) == files
    before, after = (tomllib.loads(tree["config.toml"].content.decode()) for tree in trees)
    for table in ("run", "checkpoint", "parallel", *(["data"] if task[0] == task[1] else [])):
        assert before[table] == after[table]
    own = {"global_batch_size", "micro_batch_size", "lr", "steps"}
    for key in before["train"].keys() - own:
        assert before["train"][key] == after["train"][key]


ONE_APART = [*strategy_pairs(), *pairs("data"), *pairs("model")]


@pytest.mark.parametrize("edited", [0, 1], ids=["half", "other half"])
@pytest.mark.parametrize(("one", "other"), ONE_APART)
def test_no_edit_is_lost_whichever_answer_changes(
    one: Answers, other: Answers, edited: int, tmp_path: Path
) -> None:
    """Two lines in every second file: the others become what is new, these keep both lines."""
    if edited:
        one, other = other, one
    project = tmp_path / "demo"
    chosen = {"answers": one.structure(), "settings": one.settings()}
    apply.create(project, rendered(one), version="0.1.0", **chosen)
    mine = sorted(path for path in rendered(one) if path != "scaffold.toml")[edited::2]
    for path in mine:
        text = (project / path).read_text()
        (project / path).write_text(f"# top of {path}\n{text}# end of {path}\n")
    wanted = {"answers": other.structure(), "settings": other.settings()}
    plan = compare(state.read(project), Disk(project), rendered(other), version="0.1.0", **wanted)
    apply.regenerate(project, plan)
    after = files(project)
    for path in mine:
        for line in (f"# top of {path}", f"# end of {path}"):
            assert line in after[path].decode().splitlines(), path
    for path, file in rendered(other).items():
        if path not in mine:
            assert after[path] == file.content, path
    for step in plan.steps:
        marked = b"<<<<<<< yours" in after.get(step.path, b"")
        assert not marked or (step.problem and step.path.endswith((".py", ".md")))
    for path in ("config.toml", "pyproject.toml", "scaffold.toml"):
        tomllib.loads(after[path].decode())


def test_an_unedited_project_becomes_what_a_new_one_would_be(
    make_project: Make, tmp_path: Path
) -> None:
    project = make_project("demo", model="mlp", nodes=2)
    for number, answers in enumerate(SHAPES):
        if number % 3 == 0:  # a walk through all of them changes several answers at a time
            flags = [
                *("--model", answers.model, "--data", answers.data, "--strategy", answers.strategy),
                *("--nodes", "2", "--backend", ["auto", "gloo"][number % 2]),
            ]
            regenerate(project, *flags)
            assert (
                scaffold("new", "demo", "--output-dir", tmp_path / "fresh", "--yes", *flags).code
                == 0
            )
            assert project_files(project) == project_files(tmp_path / "fresh/demo")
            shutil.rmtree(tmp_path / "fresh")


# The commands


def test_nodes_by_flag(make_project: Make) -> None:
    project = make_project()
    edit(project / "train.py", "import ", "# mine\nimport ")
    before = project_files(project)
    result = regenerate(project, "--nodes", "4")
    paths = touched(before, project_files(project))
    assert {p for p in paths if not p.startswith(".scaffold/")} == {
        "launch/topology.env",
        "scaffold.toml",
    }
    assert "nodes              1 → 4" in result.out
    assert "you changed it" in result.out
    assert "before: 1 node × 2 GPUs, 24 micro-batches a step in 12 rounds, 0% idle" in result.out
    assert "now:    4 nodes × 2 GPUs, 24 micro-batches a step in 3 rounds, 0% idle" in result.out
    assert "python -m pytest" in result.out.splitlines()[-1]


def test_nodes_by_editing_the_answers_whose_comments_survive(make_project: Make) -> None:
    project = make_project()
    edit(project / "scaffold.toml", "nodes = 1", "nodes = 3   # until spring")
    edit(project / "scaffold.toml", "# Where it runs", "# Our cluster. Where it runs")
    text = (project / "scaffold.toml").read_text()
    assert "not yet followed" in scaffold("status", project).out
    regenerate(project)
    assert (project / "scaffold.toml").read_text() == text
    assert "NNODES:=3" in (project / "launch/topology.env").read_text()
    regenerate(project, "--nodes", "1")
    assert (project / "scaffold.toml").read_text() == text.replace("nodes = 3", "nodes = 1")


def test_a_conflict_exits_1_and_is_to_be_resolved_first(make_project: Make) -> None:
    project = make_project()
    parallel = project / "demo/parallel.py"
    first = parallel.read_text().splitlines()[0]
    edit(parallel, first, '"""My own strategy."""')
    result = regenerate(project, "--strategy", "fsdp", code=1)
    assert "! conflict" in result.out
    assert '<<<<<<< yours\n"""My own strategy."""\n||||||| last generated\n' in parallel.read_text()
    assert (
        json.loads((project / ".scaffold/state.json").read_text())["answers"]["strategy"] == "fsdp"
    )
    status = scaffold("status", project)
    assert (status.code, "unresolved     demo/parallel.py" in status.out) == (1, True)
    before = project_files(project)
    assert "markers are left in demo/parallel.py" in regenerate(project, "--nodes", "2", code=1).err
    assert project_files(project) == before
    assert scaffold("undo", project).code == 0
    assert parallel.read_text().startswith('"""My own strategy."""')
    regenerate(project, "--nodes", "2")


def test_a_dry_run_says_what_would_be_and_writes_nothing(make_project: Make) -> None:
    project = make_project()
    edit(project / "config.toml", "steps = ", "steps = 9")
    before = files(project)
    arguments = ("--nodes", "2", "--strategy", "fsdp", "--json", "--diff")
    dry = json.loads(regenerate(project, *arguments, "--dry-run").out)
    assert files(project) == before
    assert "Dry run: nothing was written." in regenerate(project, "--nodes", "2", "--dry-run").out
    done = json.loads(regenerate(project, *arguments).out)
    assert (dry.pop("written"), done.pop("written")) == (False, True)
    assert {k: v for k, v in dry.items() if k != "topology"} == (
        {k: v for k, v in done.items() if k != "topology"}
    )
    assert dry["topology"] == done["topology"]
    assert dry["answers"]["strategy"] == {"before": "ddp", "after": "fsdp"}
    assert '+: "${NNODES:=2}"' in dry["diffs"]["launch/topology.env"]
    actions = {entry["path"]: entry["action"] for entry in dry["files"]}
    assert (actions["config.toml"], actions["demo/parallel.py"]) == ("merge", "update")


def test_nothing_to_do_is_said_and_undo_still_has_the_last_change(make_project: Make) -> None:
    project = make_project()
    regenerate(project, "--nodes", "2")
    result = regenerate(project)
    assert "are as they should be" in result.out
    assert "undo" not in result.out
    assert "launch/topology.env" in scaffold("undo", project).out
    assert "NNODES:=1" in (project / "launch/topology.env").read_text()
    again = scaffold("undo", project)
    assert (again.code, "nothing to undo" in again.err) == (2, True)


def test_undo_after_an_edit_needs_force(make_project: Make) -> None:
    project = make_project()
    regenerate(project, "--nodes", "2")
    edit(project / "launch/topology.env", "NNODES:=2", "NNODES:=7")
    refused = scaffold("undo", project)
    assert (refused.code, "launch/topology.env" in refused.err) == (1, True)
    assert scaffold("undo", project, "--force").code == 0
    assert "NNODES:=1" in (project / "launch/topology.env").read_text()


def test_deleted_and_moved_files(make_project: Make) -> None:
    project = make_project()
    (project / "export.py").unlink()
    (project / "demo/parallel.py").rename(project / "demo/spread.py")
    out = scaffold("status", project).out
    assert "deleted        export.py\n" in out
    assert "seems to be demo/spread.py now" in out
    result = regenerate(project, "--strategy", "fsdp", code=1)
    assert "--follow-renames" in result.out
    assert not (project / "demo/parallel.py").exists()
    result = regenerate(project, "--follow-renames", "--restore", "export.py")
    assert "demo/parallel.py (now demo/spread.py)" in result.out
    assert "fully_shard" in (project / "demo/spread.py").read_text()
    assert (project / "export.py").exists()
    assert "moved          demo/parallel.py" in scaffold("status", project).out
    assert regenerate(project, "--restore", "nonsense.py", code=2).err.startswith(
        "Error: --restore"
    )


def test_a_moved_file_is_asked_about_on_a_terminal(make_project: Make) -> None:
    pexpect = pytest.importorskip("pexpect")
    project = make_project()
    (project / "demo/parallel.py").rename(project / "demo/spread.py")
    for answer, code, merged in (("n", 1, False), ("y", 0, True)):
        child = pexpect.spawn(
            sys.executable,
            ["-m", "scaffold", "regenerate", str(project), "--strategy", "fsdp"],
            env=environment(TERM="dumb"),
            encoding="utf-8",
            timeout=60,
        )
        child.expect(r"demo/parallel.py seems to be demo/spread.py now. Merge .*\[Y/n\]: ")
        child.sendline(answer)
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == code
        assert ("fully_shard" in (project / "demo/spread.py").read_text()) == merged


def test_runs_go_on_or_not(make_project: Make) -> None:
    project = make_project()
    for step in (100, 20000):
        (project / f"runs/default/checkpoints/step_{step:08d}").mkdir(parents=True)
    (project / "runs/default/checkpoints/.unfinished_step_00030000").mkdir()
    result = regenerate(project, "--nodes", "5", "--gpus-per-node", "7", "--dry-run")
    assert "runs/default resumes at its last checkpoint, step 20000." in result.out
    assert "31% idle" in result.out
    result = regenerate(project, "--model", "mlp", "--dry-run", "--json")
    (run,) = json.loads(result.out)["runs"]
    assert (run["step"], run["resumes"]) == (20000, False)
    result = regenerate(project, "--data", "text", "--dry-run")
    assert "cannot resume: the data is another" in result.out


def test_the_batch_that_counts_is_that_of_config_toml(make_project: Make) -> None:
    project = make_project()
    edit(project / "config.toml", "micro_batch_size = 4", "micro_batch_size = 96")
    result = regenerate(project, "--nodes", "4", "--dry-run")
    assert "1 micro-batch" in result.out
    assert "88% idle" in result.out
    assert "train.micro_batch_size = 12 in config.toml would idle less" in result.out


def test_settings_follow_the_model_and_the_data(make_project: Make, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    project = make_project(
        model="mlp", data="csv", data_path=str(tmp_path / "t.csv"), precision="fp32"
    )
    (tmp_path / "t.csv").unlink()  # as on another machine
    regenerate(project, "--nodes", "2")
    state = project / ".scaffold/state.json"
    assert json.loads(state.read_text())["settings"]["data-path"] == str(tmp_path / "t.csv")
    regenerate(project, "--model", "gpt", "--data", "synthetic")
    assert json.loads(state.read_text())["settings"] == {
        "precision": "fp32",
        "global-batch-size": catalog.MODELS["gpt"].global_batch_size,
        "data-path": "",
    }


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "demo"', 'name = "other"', 'put name = "demo" back'),
        ("nodes = 1", "nodes = 0", "out of range"),
        ("nodes = 1", "nodes = = 1", "not valid TOML"),
        ("nodes = 1", "nodse = 1", "did you mean nodes?"),
        ("nodes = 1", 'nodes = 1\nprecision = "fp32"', "set it in config.toml"),
        ('strategy = "ddp"', 'strategy = "hsdp"', "needs 2 or more nodes"),
    ],
)
def test_answers_that_cannot_work_change_nothing(
    old: str, new: str, message: str, make_project: Make
) -> None:
    project = make_project()
    edit(project / "scaffold.toml", old, new)
    before = project_files(project)
    assert message in regenerate(project, code=2).err
    assert project_files(project) == before


def test_an_answer_missing_from_the_file_stays_what_it_was(make_project: Make) -> None:
    project = make_project(backend="gloo")
    edit(project / "scaffold.toml", 'backend = "gloo"', "#")
    regenerate(project)
    assert tomllib.loads((project / "scaffold.toml").read_text())["backend"] == "gloo"
    (project / "scaffold.toml").unlink()
    regenerate(project, "--nodes", "2")
    answers = tomllib.loads((project / "scaffold.toml").read_text())
    assert (answers["backend"], answers["nodes"]) == ("gloo", 2)


def test_the_launcher_that_is_always_there_stays(make_project: Make) -> None:
    project = make_project()
    regenerate(project, "--launcher", "torchrun")
    assert "always there" in regenerate(project, "--no-launcher", "torchrun", code=2).err
    assert "'slrm' is not offered" in regenerate(project, "--no-launcher", "slrm", code=2).err


def test_a_launcher_comes_and_goes_and_what_its_owner_wrote_stays(make_project: Make) -> None:
    project = make_project()
    site, hosts = project / "launch" / "site.env", project / "launch" / "hosts.txt"
    edit(site, "# module load cuda/12.8", "module load cuda/13.0")
    mine, before = site.read_bytes(), project_files(project)
    regenerate(project, "--launcher", "slurm", "--launcher", "ssh")
    after = project_files(project)
    new = {f"launch/{n}" for n in "slurm.sbatch submit.sh sweep.sh ssh.sh hosts.txt".split()}
    assert {*after} - {*before} == new | {f".scaffold/base/{path}.base" for path in new}
    assert {
        p for p in touched(before, after) if p.split("/")[0] not in ("launch", ".scaffold")
    } == {"scaffold.toml"}
    assert os.access(project / "launch" / "submit.sh", os.X_OK)
    assert "## Slurm" in (project / "launch" / "README.md").read_text()
    hosts.write_text("gpu1\ngpu2\n")
    regenerate(project, "--launcher", "mpirun", "--nodes", "3")  # hosts.txt is of both
    out = regenerate(project, "--no-launcher", "slurm", "--no-launcher", "ssh").out
    assert not (project / "launch" / "ssh.sh").exists()
    assert not (project / "launch" / "slurm.sbatch").exists()
    assert hosts.read_text() == "gpu1\ngpu2\n"
    out = regenerate(project, "--no-launcher", "mpirun").out
    assert hosts.read_text() == "gpu1\ngpu2\n", out
    assert "hosts.txt" in out
    assert site.read_bytes() == mine
    assert not list(project.rglob("*.scaffold-new"))


def test_a_file_of_the_persons_own_is_in_the_way_only_while_the_answer_wants_its_name(
    make_project: Make,
) -> None:
    project = make_project(data="synthetic")
    (project / "prepare.py").write_text("print('mine')\n")
    for _ in range(2):
        regenerate(project, "--data", "text", code=1)
        assert (project / "prepare.py.scaffold-new").exists()
        regenerate(project, "--data", "synthetic")
        assert not (project / "prepare.py.scaffold-new").exists()
        assert (project / "prepare.py").read_text() == "print('mine')\n"
        assert "prepare.py" not in scaffold("status", project).out


def test_a_folder_that_is_no_project_is_refused_untouched(tmp_path: Path) -> None:
    for command in ("regenerate", "undo", "status", "adopt"):
        result = scaffold(command, tmp_path)
        assert result.code == 2, command
        assert not list(tmp_path.iterdir())
    assert scaffold("regenerate", tmp_path / "missing").code == 2


# Versions


def set_state(project: Path, **changes: Any) -> None:
    path = project / ".scaffold/state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_project_of_a_newer_scaffold_is_refused(make_project: Make) -> None:
    project = make_project()
    for change in ({"version": "99.0.0"}, {"schema": 2}):
        set_state(project, **{"version": "0.1.0", "schema": 1, **change})
        before = project_files(project)
        for command in ("regenerate", "status", "undo"):
            result = scaffold(command, project)
            assert (result.code, "made by a newer scaffold" in result.err) == (2, True)
        assert project_files(project) == before


def test_a_damaged_state_is_said(make_project: Make) -> None:
    project = make_project()
    (project / ".scaffold/state.json").write_text("{")
    assert "is damaged" in regenerate(project, code=1).err
    set_state_text = json.dumps(
        {
            "schema": 1,
            "version": "0.1.0",
            "answers": {},
            "settings": {},
            "files": {"../x": {"sha256": "", "owner": "merge", "mode": "644"}},
        }
    )
    (project / ".scaffold/state.json").write_text(set_state_text)
    assert "leads out of the project" in regenerate(project, code=1).err


def test_an_older_project_is_upgraded_and_its_names_follow(
    make_project: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 0.0.9 called an answer `gpus`, a backend `automatic`, and a file `launch/cluster.env`."""
    project = make_project()
    state = json.loads((project / ".scaffold/state.json").read_text())
    state["version"] = "0.0.9"
    state["answers"]["gpus"] = state["answers"].pop("gpus-per-node")
    state["answers"]["backend"] = "automatic"
    state["files"]["launch/cluster.env"] = state["files"].pop("launch/topology.env")
    (project / ".scaffold/state.json").write_text(json.dumps(state))
    for folder, suffix in (("launch", ""), (".scaffold/base/launch", ".base")):
        (project / folder / f"topology.env{suffix}").rename(
            project / folder / f"cluster.env{suffix}"
        )
    edit(project / "launch/cluster.env", "MASTER_PORT:=", "MASTER_PORT:=29600")
    edit(project / "scaffold.toml", "gpus-per-node = 2", "gpus = 2  # the old box")
    edit(project / "scaffold.toml", 'backend = "auto"', 'backend = "automatic"')
    old = project_files(project)
    migration = Migration(
        "0.1.0",
        answers={"gpus": "gpus-per-node"},
        values={("backend", "automatic"): "auto"},
        files={"launch/cluster.env": "launch/topology.env"},
    )
    monkeypatch.setattr(migrations, "MIGRATIONS", (migration,))
    result = regenerate(project, "--nodes", "2")
    assert "Made by scaffold 0.0.9, now 0.1.0." in result.out
    assert not (project / "launch/cluster.env").exists()
    assert not (project / ".scaffold/base/launch/cluster.env.base").exists()
    environment = (project / "launch/topology.env").read_text()
    assert "NNODES:=2" in environment
    assert "MASTER_PORT:=29600" in environment
    answers = (project / "scaffold.toml").read_text()
    assert "gpus-per-node = 2  # the old box" in answers
    assert 'backend = "auto"' in answers
    assert scaffold("undo", project).code == 0
    assert project_files(project) == old
    regenerate(project)  # and with nothing else to change
    assert (project / "launch/topology.env").exists()
    assert not regenerate(project, "--json").out.count('"problem": true')


def test_new_templates_against_the_stored_base_are_an_upgrade(make_project: Make) -> None:
    """The stored base is not what this version renders: its difference reaches the edited file."""
    project = make_project()
    text = (project / "train.py").read_text()
    older = text.replace(
        "from __future__ import annotations\n", "from __future__ import annotations  # old\n"
    )
    for path in ("train.py", ".scaffold/base/train.py.base"):
        (project / path).write_text(older)
    state = json.loads((project / ".scaffold/state.json").read_text())
    from scaffold.state import digest

    state["files"]["train.py"]["sha256"] = digest(older.encode())
    set_state(project, files=state["files"], version="0.0.9")
    (project / "train.py").write_text(older + "\n# mine\n")
    regenerate(project)
    assert (project / "train.py").read_text() == text + "\n# mine\n"


# A lost base, a lost folder


@pytest.mark.parametrize("damage", ["missing", "tampered"])
def test_a_lost_base_is_rebuilt_by_the_same_version(damage: str, make_project: Make) -> None:
    project = make_project()
    base = project / ".scaffold/base/config.toml.base"
    base.unlink() if damage == "missing" else base.write_text("nonsense")
    edit(project / "config.toml", "lr = ", "lr = 5")
    assert "base lost" in scaffold("status", project).out
    regenerate(project, "--strategy", "fsdp")
    config = tomllib.loads((project / "config.toml").read_text())
    assert config["train"]["lr"] > 0.01
    assert "reshard_after_forward" in config["parallel"]
    assert base.read_bytes() == render_of(project)["config.toml"].content


def render_of(project: Path) -> Tree:
    state = json.loads((project / ".scaffold/state.json").read_text())
    return rendered(Answers.of({**state["answers"], **state["settings"]}))


def test_a_base_that_another_version_made_is_not_guessed(make_project: Make) -> None:
    project = make_project()
    (project / ".scaffold/base/config.toml.base").unlink()
    set_state(project, version="0.0.9")
    edit(project / "config.toml", "lr = ", "lr = 5")
    mine = (project / "config.toml").read_text()
    result = regenerate(project, "--strategy", "fsdp", code=1)
    assert "what was last generated is lost" in result.out
    assert (project / "config.toml").read_text() == mine
    assert "reshard" in (project / "config.toml.scaffold-new").read_text()


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"model": "bert"}, "'bert' is not offered"),
        ({"nodes": "two"}, "'two' is not a whole number"),
    ],
)
def test_a_state_with_answers_of_nowhere_is_said_before_anything_is_written(
    answers: dict[str, Any], message: str, make_project: Make
) -> None:
    project = make_project()
    path = project / ".scaffold/state.json"
    known = json.loads(path.read_text())
    set_state(project, answers={**known["answers"], **answers})
    before = project_files(project)
    assert message in regenerate(project, "--nodes", "2", code=1).err
    assert project_files(project) == before


def test_a_merge_of_two_branches_that_both_regenerated_can_be_ended(make_project: Make) -> None:
    """Git leaves markers in the state; with one side of `.scaffold/` whole it goes on."""
    project = make_project()
    regenerate(project, "--nodes", "3")
    edit(project / "launch/topology.env", "MASTER_PORT:=", "MASTER_PORT:=29600")
    path = project / ".scaffold/state.json"
    ours = path.read_text()
    both = '<<<<<<< HEAD\n    "nodes": 3,\n=======\n    "nodes": 2,\n>>>>>>> other'
    path.write_text(ours.replace('    "nodes": 3,', both))
    assert "git checkout --ours .scaffold" in regenerate(project, code=1).err
    path.write_text(ours)
    edit(project / "scaffold.toml", "nodes = 3", "nodes = 2")
    regenerate(project)
    text = (project / "launch/topology.env").read_text()
    assert "NNODES:=2" in text
    assert "MASTER_PORT:=29600" in text


@pytest.mark.parametrize("folder", [apply.UNDO, apply.STAGED])
def test_a_damaged_journal_is_said(folder: str, make_project: Make) -> None:
    project = make_project()
    regenerate(project, "--nodes", "2")
    (project / apply.UNDO).rename(project / folder)
    (project / folder / "journal.json").write_text("{")
    before = project_files(project)
    result = scaffold("undo", project)
    assert (result.code, "is damaged" in result.err) == (1, True)
    assert project_files(project) == before


def test_status_is_shown_where_the_answers_cannot_be_read(make_project: Make) -> None:
    project = make_project()
    (project / "export.py").unlink()
    edit(project / "scaffold.toml", "nodes = 1", "nodes = 2.5")
    result = scaffold("status", project)
    assert "deleted        export.py" in result.out
    assert (result.code, "'2.5' is not a whole number" in result.err) == (2, True)


def test_adopt_knows_the_name_though_the_folder_has_another(make_project: Make) -> None:
    project = make_project("my-demo")
    whole = files(project)
    shutil.rmtree(project / ".scaffold")
    (project / "scaffold.toml").unlink()
    project = project.rename(project.with_name("my copy"))
    assert scaffold("adopt", project).code == 0
    assert project_files(project) == whole
    shutil.rmtree(project / ".scaffold")
    for path in ("scaffold.toml", "pyproject.toml"):
        (project / path).unlink()
    assert 'Give it as name = "..." in scaffold.toml.' in scaffold("adopt", project).err


def test_adopt_takes_a_project_in_whose_folder_was_lost(make_project: Make) -> None:
    project = make_project(nodes=2, strategy="fsdp")
    whole = project_files(project)
    shutil.rmtree(project / ".scaffold")
    assert "adopt" in regenerate(project, code=2).err
    assert scaffold("adopt", project).code == 0
    assert project_files(project) == whole
    assert scaffold("adopt", project).code == 2
    shutil.rmtree(project / ".scaffold")
    edit(project / "train.py", "import ", "# mine\nimport ")
    mine = (project / "train.py").read_text()
    assert scaffold("adopt", project).code == 1
    assert (project / "train.py").read_text() == mine
    assert (project / "train.py.scaffold-new").read_bytes() == whole["train.py"]
    (project / "train.py.scaffold-new").unlink()
    regenerate(project, "--nodes", "3")
    assert (project / "train.py").read_text() == mine


# Other machines


def test_a_checkout_with_other_line_ends_is_no_edit(make_project: Make) -> None:
    project = make_project()
    for path in files(project):
        here = project / path
        here.write_bytes(here.read_bytes().replace(b"\n", b"\r\n"))
    result = regenerate(project, "--strategy", "fsdp", "--nodes", "2")
    assert "you changed it" not in result.out
    for path in ("README.md", "demo/parallel.py", "config.toml", "train.py"):
        content = (project / path).read_bytes()
        assert content.count(b"\r\n") == content.count(b"\n"), path


def test_a_cut_off_regenerate_is_taken_back_first(make_project: Make) -> None:
    project = make_project()
    whole = project_files(project)
    regenerate(project, "--nodes", "2")
    staged = project / apply.STAGED
    (project / apply.UNDO).rename(staged)  # as if cut off just before the state
    shutil.copy(staged / "old/.scaffold/state.json", project / ".scaffold/state.json")
    status = scaffold("status", project)
    assert (status.code, "cut off" in status.out) == (1, True)
    assert "cut off" in regenerate(project, "--dry-run", code=1).err
    shutil.copytree(project, project.with_name("other"))
    assert "taken back first" in regenerate(project, "--nodes", "4").err
    assert "NNODES:=4" in (project / "launch/topology.env").read_text()
    assert "taken back" in scaffold("undo", project.with_name("other")).out
    assert project_files(project.with_name("other")) == whole
