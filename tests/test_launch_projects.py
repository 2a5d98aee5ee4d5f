"""Generated projects under their own launch scripts: several nodes, signals, kills, mistakes, places.

Everything here is the real thing, `scaffold new` and torchrun with gloo; a launch takes 10 s, so
launches are shared where one shows several things. How the scripts behave with torch replaced by
a stand-in is in `test_launch_scripts.py`, how ranks compute in the tests that fork them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import numpy as np
import pytest

from launches import (
    TIMEOUT,
    Launch,
    checkpoints,
    environment,
    eventually,
    launch,
    losses,
    new,
    rank,
    result,
    started,
)

pytestmark = pytest.mark.slow

# Small, and slow enough that a signal meets it between two steps: 240 steps of a few milliseconds.
STEPS = 240
SMALL = (
    "--data.samples 1000 --train.global_batch_size 64 --train.micro_batch_size 8 --data.workers 1 "
    f"--train.steps {STEPS} --train.warmup_steps 5 --train.log_every 1 --train.eval_every 0 "
    "--checkpoint.every 20"
).split()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose name has all that a careless script stumbles over."""
    folder = tmp_path_factory.mktemp("place") / "Jörg's $HOME & 数据"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def project(place: Path) -> Path:
    """An mlp on made-up data under ddp."""
    return new(place, "demo", "--model", "mlp", "--precision", "fp32")


@pytest.fixture(scope="module")
def uninterrupted(project: Path) -> dict[int, float]:
    """The losses of a run that nothing disturbed.

    It is started with no environment active and none named: it finds the project's `.venv`.
    """
    make_environment(project / ".venv", with_packages=True)
    env = environment(PATH="/usr/bin:/bin")
    del env["PYTHON"]
    done = launch(project / "launch" / "local.sh", "--run.name", "calm", *SMALL, env=env)
    assert done.code == 0, done
    assert f"of {project}/.venv/bin/python" in done.err
    assert "2 rank(s) here, backend gloo" in done.err
    found = losses(project / "runs" / "calm")
    assert list(found) == list(range(1, STEPS + 1))
    return found


def make_environment(folder: Path, with_packages: bool) -> None:
    """A virtual environment that borrows this one's packages, or has none."""
    venv.create(folder, symlinks=True)
    if with_packages:
        site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


# --- several nodes --------------------------------------------------------------------------------


def test_two_nodes_train_one_run_and_give_the_losses_of_one_rank(place: Path) -> None:
    """`launch/node.sh` twice, two ranks each, sharded within a node, beside `python train.py`.

    Then one node is told to stop, as by a scheduler: both save and leave, and this machine alone,
    by `launch/local.sh`, takes the run to its end.
    """
    answers = "--model mlp --strategy hsdp --nodes 2 --precision fp32"
    project = new(place, "nodes", *answers.split())
    steps = STEPS // 2
    small = [*SMALL, f"--train.steps={steps}"]
    alone = launch(project / "train.py", "--run.name", "alone", *small)
    assert alone.code == 0, alone
    expected = losses(project / "runs" / "alone")
    assert list(expected) == list(range(1, steps + 1))

    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NODE_WAIT": "120"}
    shared |= {"SCAFFOLD_ALLOW_LOOPBACK": "1"}
    node, run = project / "launch" / "node.sh", project / "runs" / "two"
    options = ["--run.name", "two", *small]
    with (
        started(node, *options, env=environment(NODE_RANK="0", **shared)) as zero,
        started(node, *options, env=environment(NODE_RANK="1", **shared)) as one,
    ):
        assert eventually(lambda: len(losses(run)) >= 8)
        one.send_signal(signal.SIGTERM)
        ends = [process.communicate(timeout=60) for process in (zero, one)]
    assert (zero.returncode, one.returncode) == (75, 75), ends
    assert "by 4 " in ends[0][0]
    assert "step" not in ends[1][0]  # rank 0 alone reports
    assert checkpoints(run)[-1] == max(losses(run)) < steps

    done = launch(project / "launch" / "local.sh", *options)
    assert done.code == 0, done
    assert losses(run) == pytest.approx(expected, rel=1e-5)
    assert result(run)["eval_samples"] == 100  # each once


# --- signals and kills ----------------------------------------------------------------------------


def test_a_run_stopped_twice_goes_on_as_if_it_never_was(
    project: Path, uninterrupted: dict[int, float]
) -> None:
    """SIGTERM; then Ctrl-C while the output goes to a reader that has died; then to the end."""
    script, run = project / "launch" / "local.sh", project / "runs" / "stopped"
    options = ["--run.name", "stopped", *SMALL, "--checkpoint.every", "0"]

    with started(script, *options) as first:
        assert eventually(lambda: len(losses(run)) >= 10)
        first.send_signal(signal.SIGTERM)
        out, err = first.communicate(timeout=60)
    assert first.returncode == 75, out + err
    assert err.splitlines()[-1] == "launch: stopped after saving a checkpoint, exit status 75"
    assert "Traceback" not in out + err
    (stopped_at,) = checkpoints(run)
    assert stopped_at == max(losses(run)) < STEPS

    reading, writing = os.pipe()
    with started(script, *options, stdout=writing, stderr=writing) as second:
        os.close(writing)
        with open(reading, "rb") as reader:
            for line in reader:
                if b"step " in line:
                    break  # as `| head` or a closed terminal
        assert eventually(lambda: max(losses(run)) >= stopped_at + 10)
        os.killpg(second.pid, signal.SIGINT)  # a terminal sends it to all
        assert second.wait(timeout=60) == 75
    assert checkpoints(run)[-1] == max(losses(run)) > stopped_at

    third = launch(script, *options)
    assert third.code == 0, third
    assert losses(run) == pytest.approx(uninterrupted, rel=1e-6)
    assert (run / "export" / "model.safetensors").exists()

    fourth = launch(script, *options)
    assert fourth.code == 0, fourth
    assert f"already at {STEPS} of {STEPS}" in fourth.out


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(
    project: Path, uninterrupted: dict[int, float]
) -> None:
    """With MAX_RESTARTS the launch starts the ranks again by itself, from the last checkpoint."""
    run, options = project / "runs" / "killed", ["--run.name", "killed", *SMALL]
    env = environment(MAX_RESTARTS="3")
    with started(project / "launch" / "local.sh", *options, env=env) as process:
        assert eventually(lambda: len(checkpoints(run)) > 0)
        victim = rank(0, process.pid)
        os.kill(victim, signal.SIGKILL)
        out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, out + err
    assert out.count("resuming from ") == 1
    assert losses(run) == pytest.approx(uninterrupted, rel=1e-6)


# --- mistakes -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images(place: Path) -> Path:
    """An image-folder project whose data set, `faces`, has one broken image."""
    from PIL import Image

    project = new(place, "images", "--model", "resnet", "--data", "image-folder")
    for kind in ("cat", "dog"):
        (project / "faces" / kind).mkdir(parents=True)
        for number in range(12):
            pixels = np.full((8, 8, 3), 10 * number, dtype=np.uint8)
            Image.fromarray(pixels).save(project / "faces" / kind / f"{number}.png")
    for number in range(3):  # so that one of them is met in training, whatever is held out
        (project / "faces" / "dog" / f"{number}.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    return project


def expect_one_line(done: Launch, *words: str) -> None:
    """Fail unless the launch failed with one readable cause, last."""
    assert done.code == 1, done
    assert done.last_line.startswith("error: "), done
    for word in words:
        assert word in done.last_line, done
    assert "Traceback" not in done.out + done.err, done


def test_code_that_cannot_be_imported_is_said_last(place: Path) -> None:
    project = new(place, "lacking", "--model", "mlp")
    model = project / "lacking" / "model.py"
    model.write_text(f"import no_such_package\n{model.read_text()}")
    done = launch(project / "launch" / "local.sh", timeout=90)
    assert done.code == 1, done
    assert re.fullmatch(
        r"error: train.py cannot be imported on \S+: ModuleNotFoundError: No module named"
        " 'no_such_package'",
        done.last_line,
    )


def test_a_missing_folder_is_one_line(images: Path) -> None:
    done = launch(images / "launch" / "local.sh", "--data.path", "nowhere", timeout=90)
    expect_one_line(done, str(images / "nowhere"))


def test_a_broken_image_is_one_line_and_no_rank_is_left_waiting(images: Path) -> None:
    options = "--data.path faces --train.global_batch_size 16 --train.micro_batch_size 4"
    options += " --data.image_size 8 --train.steps 20 --train.precision fp32"
    done = launch(images / "launch" / "local.sh", *options.split(), timeout=90)
    expect_one_line(done, str(images / "faces" / "dog"), ".png")


def test_text_where_a_number_belongs_is_one_line(place: Path) -> None:
    (place / "t.csv").write_text("a,b,target\n1,2,x\n3,many,y\n" + "4,5,x\n" * 20)
    answers = ("--model", "mlp", "--data", "csv", "--data-path", place / "t.csv")
    project = new(place, "table", *answers)
    done = launch(project / "launch" / "local.sh", timeout=90)
    expect_one_line(done, "t.csv line 3", "'b'", "'many'")


# --- places ---------------------------------------------------------------------------------------


def test_without_any_environment_it_says_in_a_line_what_is_missing(
    place: Path, tmp_path: Path
) -> None:
    project = new(place, "bare", "--model", "mlp")
    make_environment(tmp_path / "bare", with_packages=False)
    env = environment(PATH=f"{tmp_path}/bare/bin:/usr/bin:/bin")
    del env["PYTHON"]
    done = launch(project / "launch" / "local.sh", env=env)
    assert done.code == 1
    assert "has no torch" in done.last_line
    assert "pip install" in done.last_line
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_a_project_installs_after_a_run_has_left_folders(
    tool: str, project: Path, uninterrupted: dict[int, float], tmp_path: Path
) -> None:
    """`pip install -e .` and `uv sync`; the packages it needs are borrowed, so without a network."""
    assert (project / "runs" / "calm" / "checkpoints").is_dir()
    copy = shutil.copytree(
        project, tmp_path / "demo", ignore=shutil.ignore_patterns(".venv", "checkpoints")
    )
    make_environment(copy / ".venv", with_packages=True)
    python = copy / ".venv" / "bin" / "python"
    if tool == "pip":
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-e", "."]
        command += ["--no-deps", "--no-build-isolation"]
    else:  # uv would fetch gigabytes of torch anew, so it learns of no dependency
        settings = (copy / "pyproject.toml").read_text(encoding="utf-8")
        settings = re.sub(
            r"^dependencies = \[.*?^\]", "dependencies = []", settings, flags=re.M | re.S
        )
        settings = re.sub(r"^test = .*$", "test = []", settings, flags=re.M)
        (copy / "pyproject.toml").write_text(settings, encoding="utf-8")
        command = [sys.executable, "-m", "uv", "sync", "--offline", "--no-build-isolation"]
    env = environment(PIP_DISABLE_PIP_VERSION_CHECK="1")
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    where = "import demo.sampler; print(demo.sampler.__file__)"
    found = subprocess.run(
        [python, "-P", "-c", where], cwd="/", env=env, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == str(copy / "demo" / "sampler.py")
