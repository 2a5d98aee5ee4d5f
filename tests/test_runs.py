"""`runs.py`: every run of a project at a glance, on a login node's Python too."""

from __future__ import annotations

import ast
import json
import os
import pwd
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import faults
from ranks import Ranks
from scaffold.render import template_dir

SCRIPT = template_dir() / "{{cookiecutter.project_slug}}" / "runs.py"


def listed(*folders: Path, python: str = sys.executable, env: dict[str, str] | None = None) -> Any:
    done = subprocess.run(
        [python, SCRIPT, "--json", *folders], env=env, text=True, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    return {run["run"]: run for run in found}


def table(*folders: Path) -> list[str]:
    env = os.environ | {"PYTHONIOENCODING": "ascii:strict"}
    argv = [sys.executable, SCRIPT, *folders]
    done = subprocess.run(argv, env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real runs: finished, stopped, failed."""
    folder = tmp_path_factory.mktemp("runs")
    trainer = faults.Trainer(ranks, tmp_path_factory.mktemp("projects"), folder)
    evaluated = "--train.eval_every=3"
    assert trainer(2, evaluated, run=folder / "finished").ok
    assert trainer(1, "--train.stop_at=4", "--train.lr=0.5e-3", run=folder / "stopped").ok
    crash = faults.STEPS + "hooks.append(lambda _: 1 / (5 - STEP[0]))"
    assert trainer(1, run=folder / "failed", before=crash).codes == [1]
    killed = faults.STEPS + "hooks.append(lambda _: STEP[0] == 5 and os._exit(9))"
    assert trainer(1, run=folder / "killed", before=killed).codes == [9]
    return folder


def test_each_run_has_its_state_step_score_and_what_it_was_run_with(runs: Path) -> None:
    old = time.time() - 100
    os.utime(runs / "killed" / "lock", (old, old))
    found = listed(runs)
    assert {name: run["state"] for name, run in found.items()} == {
        "finished": "finished",
        "stopped": "stopped",
        "failed": "failed",
        "killed": "killed",
    }
    run = found["finished"]
    lines = [json.loads(x) for x in (runs / "finished" / "metrics.jsonl").read_text().splitlines()]
    best = min((x for x in lines if "eval_loss" in x), key=lambda x: x["eval_loss"])
    assert (run["step"], run["steps"], run["checkpoint"]) == (9, 9, 9)
    assert (run["eval_loss"], run["at"]) == (best["eval_loss"], best["step"])
    assert (run["lr"], run["batch"], run["ranks"]) == (3e-3, 12, 2)
    assert found["stopped"]["lr"] == 0.5e-3
    assert (found["stopped"]["step"], found["stopped"]["steps"]) == (4, 9)
    record = json.loads(next((runs / "finished").glob("checkpoints/*9/state.json")).read_text())
    assert run["code"] == record["code"]
    header, *rows = table(runs)
    assert header.split()[:3] == ["run", "state", "step"]
    assert len(rows) == 4
    assert [row for row in rows if row.startswith("stopped ") and " 4 of 9 " in row]
    os.utime(runs / "killed" / "lock")
    assert listed(runs)["killed"]["state"] == "running"  # a fresh heartbeat


def test_a_run_that_slurm_holds_is_queued_or_starting(runs: Path, tmp_path: Path) -> None:
    job = tmp_path / "waiting" / "code" / "20260101-000000-1.job"
    job.parent.mkdir(parents=True)
    job.write_text("71\n")
    (tmp_path / "bin").mkdir()
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text(
        "#!/bin/sh\necho >>$0.asked\n"
        "case $* in *--jobs=71) echo 71 PENDING;; *=74) echo 74 RUNNING;; *) exit 1;; esac\n"
    )
    squeue.chmod(0o755)
    env = os.environ | {"PATH": f"{squeue.parent}:{os.environ['PATH']}"}
    for number, state in (("71", "queued"), ("72", "stopped"), ("74", "starting")):
        job.write_text(number + "\n")
        assert listed(tmp_path / "waiting", env=env)["waiting"]["state"] == state
    asked = squeue.with_name("squeue.asked")
    asked.unlink()
    assert len(listed(runs, env=env)) == 4
    assert not asked.exists()  # of no job there is nothing to ask


def test_broken_and_half_written_files_break_nothing(runs: Path, tmp_path: Path) -> None:
    names = ("metrics.jsonl", "config.toml", "lock", "logs/error.txt", "code/x.job")
    no_numbers = (
        b'{"step": 1, "loss": NaN, "eval_loss": NaN, "code": NaN, "ranks": 1%s}\n' % (b"0" * 400),
        b'{"step": 2, "loss": 1e999, "eval_loss": 0.5, "eval_accuracy": "x"}\n',
        b"[train]\nlr = NaN\nsteps = [1]\nglobal_batch_size = -Infinity\n",
    )
    contents = (b"", b"\xff\xfe", b"[1]\n{", b"[train]\nlr = x\n= 3\n", b"[" * 10**5)
    for number, content in enumerate((*contents, *no_numbers, b"".join(no_numbers))):
        for name in (*names, "checkpoints/step_00000003/state.json"):
            path = tmp_path / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        os.utime(path.parents[2] / "lock", (time.time() + 1000,) * 2)
    (tmp_path / "dangling").symlink_to("nowhere")
    # A path that cannot be looked at, also by root, whom no permission stops.
    (tmp_path / "unseen").symlink_to("x" * 300)
    for name in ("train.py", "lock", "code", "checkpoints", "export", "logs"):
        path = tmp_path / f"no {name}" / name
        path.parent.mkdir()
        path.symlink_to("x" * 300)
        (path.parent / "metrics.jsonl").write_text('{"step": 9, "loss": 1}\n')
        (path.parent / "config.toml").write_text("[train]\nsteps = 9\n")
    os.mkdir(os.fsencode(tmp_path) + b"/\xff\xc3\xa9")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xc3\xa9"), "metrics.jsonl").touch()
    (tmp_path / "a file").touch()
    whole = (runs / "finished" / "metrics.jsonl").read_bytes()
    for cut in range(1, 200, 7):
        folder = tmp_path / f"cut{cut}"
        folder.mkdir()
        (folder / "metrics.jsonl").write_bytes(whole[:-cut])
    here = tmp_path / "0" / "logs" / ".."
    found, count = listed(here, tmp_path), 9 + 6 + 1 + len(range(1, 200, 7))
    assert len(found) == count
    assert len(table(tmp_path)) == 1 + count
    assert {found[str(number)]["state"] for number in range(9)} == {"failed"}
    assert (found["8"]["eval_loss"], found["8"]["at"]) == (0.5, 2)
    assert found["8"]["lr"] is found["8"]["eval_accuracy"] is None


def test_no_runs_is_said(tmp_path: Path) -> None:
    assert table(tmp_path) == [f"no runs in {tmp_path}"]
    for name in ("none", "x" * 300):
        assert table(tmp_path / name) == [f"no runs in {tmp_path / name}"]


def works(python: str) -> bool:
    return subprocess.run([python, "-c", ""], capture_output=True).returncode == 0


def test_it_runs_on_the_python_of_old_login_nodes(runs: Path) -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))
    named = [shutil.which(f"python3.{minor}") for minor in (6, 7, 8, 9)]
    installed = Path(pwd.getpwuid(os.getuid()).pw_dir, ".pyenv/versions").glob(
        "3.[6-9].*/bin/python"
    )
    olds = [python for python in [*named, *map(str, installed)] if python and works(python)]
    if not olds:
        pytest.skip("no older Python here")
    for python in olds:
        assert listed(runs, python=python).keys() == listed(runs).keys()
