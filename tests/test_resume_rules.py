"""What goes on from where: the rules of a run's folder, its lock, and what a changed config may do."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.torch import load_file

import parts
from faults import MODELS, OPTIONS, RECORD, STEPS, Trainer, touch_at
from ranks import Ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("projects")


@pytest.fixture(scope="module")
def whole(ranks: Ranks, projects: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A finished run of nine steps that keeps every checkpoint."""
    train = Trainer(ranks, projects, tmp_path_factory.mktemp("whole"))
    result = train(2, "--checkpoint.keep=9", "--checkpoint.every=1")
    assert result.ok, result
    return train


@pytest.fixture
def train(ranks: Ranks, projects: Path, tmp_path: Path) -> Trainer:
    return Trainer(ranks, projects, tmp_path)


@pytest.fixture
def at_4(train: Trainer, whole: Trainer) -> Trainer:
    """A run that was stopped after step 4 and has the checkpoints of steps 3 and 4."""
    shutil.copytree(whole.run, train.run)
    for path in (train.run / "checkpoints").iterdir():
        if path.name not in ("step_00000003", "step_00000004"):
            shutil.rmtree(path)
    shutil.rmtree(train.run / "export")
    return train


def same(train: Trainer, whole: Trainer) -> None:
    """Fails unless the run's losses are those of the run that was never interrupted."""
    assert train.losses() == pytest.approx(whole.losses(), rel=1e-5)


# Where a run goes on


def test_a_finished_run_says_so_and_has_its_export(train: Trainer, whole: Trainer) -> None:
    shutil.copytree(whole.run, train.run)
    shutil.rmtree(train.run / "export")  # as after a crash between the last checkpoint and it
    result = train(1)
    assert result.ok, result
    assert "already at 9 of 9" in result.outputs[0]
    new, old = (load_file(run / "export" / "model.safetensors") for run in (train.run, whole.run))
    assert all(value.equal(old[name]) for name, value in new.items())
    same(train, whole)
    assert "already at 9 of 5" in train(2, "--train.stop_at=5").outputs[0]


def test_a_resumed_run_repeats_no_line_of_the_metrics(at_4: Trainer, whole: Trainer) -> None:
    with (at_4.run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo{"step": 4, "loss": 1.0}\n{"step": 10, "loss": 2')
    result = at_4(1)
    assert result.ok, result
    assert f"resuming from {at_4.run}/checkpoints/step_00000004\n" in result.outputs[0]
    same(at_4, whole)
    assert [line["step"] for line in at_4.metrics() if "eval_loss" in line] == [9]


def test_never_refuses_a_folder_with_checkpoints(at_4: Trainer, whole: Trainer) -> None:
    result = at_4(2, "--run.resume=never")
    assert result.codes == [1, 1]
    assert "holds checkpoints, and run.resume is never: use another run.name" in result.outputs[0]
    assert at_4.steps() == [3, 4]
    # But a restart by torchrun or a requeue by Slurm finds checkpoints of its own.
    assert at_4(1, "--run.resume=never", env={"TORCHELASTIC_RESTART_COUNT": "1"}).ok
    same(at_4, whole)


def test_a_path_resumes_from_there_and_what_came_after_is_out_of_the_way(
    at_4: Trainer, whole: Trainer
) -> None:
    path = f"--run.resume={at_4.run}/checkpoints/step_00000003"
    for _ in range(2):  # twice: then there is already something out of the way
        result = at_4(2, path, "--train.stop_at=5", "--checkpoint.every=1", "--checkpoint.keep=3")
        assert result.ok, result
        assert "step_00000004 is now" in result.outputs[0]
        assert [x for x in at_4.checkpoints() if not x.startswith("abandoned")] == [
            f"step_0000000{step}" for step in (3, 4, 5)
        ]
    env = {"SLURM_RESTART_COUNT": "1"}  # requeued, it goes on from what it has saved since
    result = at_4(1, path, "--train.stop_at=6", env=env)
    assert "resuming from " in result.outputs[0]
    assert "step_00000005\n" in result.outputs[0]
    assert at_4(1).ok
    same(at_4, whole)


def test_a_crash_after_resuming_from_a_path_does_not_bring_the_old_future_back(
    at_4: Trainer, whole: Trainer
) -> None:
    crash = STEPS + "hooks.append(lambda _: os._exit(9))"
    assert at_4(1, f"--run.resume={at_4.run}/checkpoints/step_00000003", before=crash).codes == [9]
    result = at_4(2)
    assert f"resuming from {at_4.run}/checkpoints/step_00000003\n" in result.outputs[0]
    same(at_4, whole)


def test_the_checkpoint_of_another_run_resumes_in_a_folder_that_has_its_own(
    at_4: Trainer, whole: Trainer
) -> None:
    elsewhere = f"{whole.run}/checkpoints/step_00000002"
    crash = STEPS + "hooks.append(lambda _: STEP[0] == 6 and os._exit(9))"
    assert at_4(1, f"--run.resume={elsewhere}", before=crash).codes == [9]
    assert "step_00000004" in at_4.checkpoints()
    for count, saved in (("1", 4), ("2", 6)):  # torchrun starts it again
        env = {"TORCHELASTIC_RESTART_COUNT": count}
        result = at_4(2, f"--run.resume={elsewhere}", f"--train.stop_at={saved + 2}", env=env)
        assert result.ok, result
        assert f"resuming from {at_4.run}/checkpoints/step_0000000{saved}\n" in result.outputs[0]
    losses = at_4.losses()
    assert losses == pytest.approx({s: whole.losses()[s] for s in losses}, rel=1e-5)


@pytest.mark.parametrize("wrong", ["nowhere", "runs/default/export", "."])
def test_a_path_without_a_checkpoint_is_an_error(train: Trainer, wrong: str) -> None:
    result = train(1, f"--run.resume={wrong}")
    assert result.codes == [1]
    assert "is no complete checkpoint (a step_... folder)" in result.outputs[0]
    assert "Traceback" not in result.outputs[0]


# What may change in between


@pytest.mark.parametrize(
    ("option", "strategy"),
    [
        ("--model.width=48", "ddp"),
        ("--model.layers=1", "ddp"),
        ("--model.layers=3", "fsdp"),
        ("--model.layers=1", "fsdp"),
    ],
)
def test_another_model_size_is_refused_with_the_reason(
    at_4: Trainer, option: str, strategy: str
) -> None:
    result = at_4(2, option, strategy=strategy)
    assert result.codes == [1, 1]
    assert "step_00000004 is of another model size: " in result.outputs[0]
    assert "Traceback" not in str(result)
    assert str(result).count("error: ") == 1
    assert at_4.steps() == [3, 4]


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--data.samples=50", "another data set (length 54, now 45)"),
        ("--data.seed=1", "another data set (identity "),
        ("--run.seed=1", "another seed (seed 0, now 1)"),
    ],
)
def test_other_data_or_another_seed_needs_a_word(at_4: Trainer, option: str, reason: str) -> None:
    result = at_4(2, option)
    assert result.codes == [1, 1]
    assert reason.split(" (")[0] in result.outputs[0]
    assert "--run.allow_data_change true" in result.outputs[0]
    result = at_4(2, option, "--run.allow_data_change=true")
    assert result.ok, result
    assert list(at_4.losses()) == list(range(1, 10))
    assert [line["samples"] for line in at_4.metrics() if "loss" in line][-1] == 9 * 12
    result = at_4(1, option, "--train.steps=10")  # from now on this is its data
    assert result.ok, result


def test_hyperparameters_are_those_of_the_config_and_what_changed_is_told(
    at_4: Trainer, whole: Trainer
) -> None:
    changed = {
        "lr": "0.1",
        "weight_decay": "0.5",
        "steps": "8",
        "micro_batch_size": "3",
        "precision": "bf16",
    }
    see = STEPS + "hooks.append(lambda p: print('DECAY', demo.decay()))\n"
    see += """
import demo.weights
make = demo.weights.make_optimizer
def make_optimizer(*args):
    optimizer = make(*args)
    demo.decay = lambda: sorted(group["weight_decay"] for group in optimizer.param_groups)
    return optimizer
demo.weights.make_optimizer = make_optimizer
"""
    result = at_4(1, *(f"--train.{key}={value}" for key, value in changed.items()), before=see)
    assert result.ok, result
    for key, value in changed.items():
        line = next(x for x in result.outputs[0].splitlines() if f"train.{key} was" in x)
        assert line.startswith("changed since then: ")
        assert line.strip("'").endswith(f"is {value}") or line.endswith(f"is '{value}'")
    assert "train.grad_clip was" not in result.outputs[0]
    assert "DECAY [0.0, 0.5]" in result.outputs[0]
    lines = [line for line in at_4.metrics() if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["lr"] == pytest.approx(0.01)  # a tenth of lr at the last step
    assert [line["loss"] for line in lines[:4]] == [whole.losses()[s] for s in range(1, 5)]
    assert [line["samples"] for line in lines] == list(range(12, 97, 12))


def test_another_micro_batch_goes_on_with_the_same_samples(train: Trainer) -> None:
    assert train(2, "--train.stop_at=4", before=RECORD).ok
    assert train(3, "--train.micro_batch_size=1", before=RECORD).ok
    train.assert_every_sample_once_an_epoch()


def test_another_global_batch_goes_on_from_the_samples_already_taken(train: Trainer) -> None:
    assert train(2, "--train.stop_at=3", before=RECORD).ok
    batch = ["--train.global_batch_size=18", "--train.steps=7"]
    assert train(1, *batch, before=RECORD).ok
    stream = train.stream()
    assert len(stream) == 3 * 12 + 4 * 18 == 2 * 54
    assert sorted(stream[:54]) == sorted(stream[54:]) == list(range(54))
    assert [line["samples"] for line in train.metrics() if "loss" in line][2:5] == [36, 54, 72]


@pytest.mark.parametrize("source", ["checkpoint", "export", "file"])
@pytest.mark.parametrize(("strategy", "world"), [("ddp", 2), ("fsdp", 3)])
def test_init_from_takes_the_weights_alone(
    train: Trainer, whole: Trainer, source: str, strategy: str, world: int
) -> None:
    path = {
        "checkpoint": whole.run / "checkpoints" / "step_00000009",
        "export": whole.run / "export",
        "file": whole.run / "export" / "model.safetensors",
    }[source]
    still = ["--train.lr=1e-30", "--train.weight_decay=0", "--train.steps=2"]
    result = train(world, *still, f"--run.init_from={path}", strategy=strategy)
    assert result.ok, result
    assert "the weights are those of" in result.outputs[0]
    assert [line["samples"] for line in train.metrics() if "loss" in line] == [12, 24]
    new, old = (load_file(run / "export" / "model.safetensors") for run in (train.run, whole.run))
    assert all(value.equal(old[name]) for name, value in new.items())
    result = train(1, *still, f"--run.init_from={path}")
    assert "already at 2 of 2" in result.outputs[0]  # its own checkpoints come first


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--run.init_from=nowhere", "is neither a checkpoint nor an export"),
        ("--run.init_from={0}/export --model.width=48", "is of another model size"),
        ("--run.init_from={0}/checkpoints/step_00000009 --model.layers=1", "another model size"),
        ("--run.init_from={0}/half.safetensors", "cannot be read"),
        ("--run.init_from={0}/half", "cannot be read"),
    ],
)
def test_what_init_from_cannot_use_is_an_error_of_a_line(
    train: Trainer, whole: Trainer, option: str, reason: str
) -> None:
    exported = (whole.run / "export" / "model.safetensors").read_bytes()
    (whole.run / "half.safetensors").write_bytes(exported[: len(exported) // 2])
    half = whole.run / "half"
    if not half.exists():
        shutil.copytree(whole.run / "checkpoints" / "step_00000009", half)
        os.truncate(half / "__0_0.distcp", 1000)
    result = train(2, *option.format(whole.run).split())
    assert result.codes == [1, 1]
    assert reason in result.outputs[0]
    assert "Traceback" not in str(result)
    assert str(result).count("error: ") == 1


# The lock


@contextlib.contextmanager
def beating(lock: Path) -> Iterator[None]:
    """Its owner lives."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.2):
            os.utime(lock)

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        yield
    finally:
        done.set()
        heart.join()


def test_a_second_launch_is_kept_out_and_a_dead_one_s_lock_taken_over(train: Trainer) -> None:
    here, go_on = train.folder / "here", train.folder / "go_on"
    wait = f"import time; hooks.append(lambda _: [time.sleep(0.1) for _ in range(600) if not Path({str(go_on)!r}).exists()])"
    before = STEPS + touch_at(1, here) + wait
    script = train.project() / "broken.py"
    command = [sys.executable, str(script), f"--run.dir={train.run}", *OPTIONS, *MODELS["mlp"]]
    env = {**os.environ, "BEFORE": before, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not here.exists():
            assert first.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        second = {"SLURM_JOB_ID": "7"}  # also from within the same allocation
        for env in ({}, second):
            result = train(2, env=env)
            assert result.codes == [1, 1]
            assert "error: another launch is writing to" in result.outputs[0]
            assert f"(host {socket.gethostname()}, process {first.pid})" in result.outputs[0]
            assert (train.run / "lock").exists()
        first.send_signal(signal.SIGKILL)
    finally:
        first.kill()
        first.wait()
    result = train(2)
    assert result.ok, result
    assert not list(train.run.glob("lock*"))


@pytest.mark.parametrize("content", ["", "[]", '{"host": "HOST", "pid": PID, "started": "1"}'])
def test_a_lock_that_says_nothing_of_a_live_process_is_taken_over_when_it_is_old(
    train: Trainer, content: str
) -> None:
    train.run.mkdir()
    lock = train.run / "lock"
    text = content.replace("HOST", socket.gethostname()).replace("PID", str(os.getpid()))
    lock.write_text(text)
    with beating(lock):
        result = train(1, "--train.steps=1")
    assert result.codes == [1]
    assert "another launch is writing" in result.outputs[0]
    # It was seen not long ago, and then no more: watched until its time is up.
    os.utime(lock, (time.time() - 57,) * 2)
    start = time.monotonic()
    assert train(1, "--train.steps=1").ok
    assert time.monotonic() - start > 3
    assert not lock.exists()


def test_the_lock_of_a_process_whose_number_another_one_has_now_is_taken_over(
    train: Trainer,
) -> None:
    crash = STEPS + "hooks.append(lambda _: os._exit(9))"
    assert train(1, "--train.steps=2", before=crash).codes == [9]
    lock = train.run / "lock"
    lock.write_text(json.dumps(json.loads(lock.read_text()) | {"pid": os.getpid()}))
    assert train(1, "--train.steps=2").ok


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of a generated project."""
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    parts.load("mlp", "synthetic_tabular")
    return importlib.import_module("parts_mlp_synthetic_tabular.run")


def takes(run: ModuleType, lock: Path) -> bool:
    """Whether a launch gets the lock; a refused one leaves it as it was."""
    before, mine = lock.read_text(), run.Lock(lock)
    try:
        mine.acquire()
    except run.UserError:
        assert lock.read_text() == before
        return False
    finally:
        assert [path.name for path in lock.parent.glob("lock*")] == ["lock"]
    assert json.loads(lock.read_text()) == mine.me
    mine.release()
    return True


def test_launches_of_one_process_number_that_await_a_lock_do_not_disturb_each_other(
    run: ModuleType, tmp_path: Path
) -> None:
    """In containers they are alike. The first gives up while the second still watches the lock."""
    lock, refused = tmp_path / "lock", []
    lock.write_text('{"host": "another"}')

    def launch() -> None:
        with pytest.raises(run.UserError, match="host another"):
            run.Lock(lock).acquire()
        refused.append(True)

    first, second = (threading.Thread(target=launch) for _ in range(2))
    first.start()
    time.sleep(0.2)
    os.utime(lock)
    second.start()
    first.join()
    while second.is_alive():
        time.sleep(0.6)
        os.utime(lock)
    assert refused == [True, True]
    assert lock.read_text() == '{"host": "another"}'


@pytest.mark.parametrize(
    ("launch", "start"),
    [
        ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
        ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ],
)
def test_a_later_start_of_a_launch_goes_on_at_once_and_a_second_one_beside_it_is_kept_out(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: str, start: str
) -> None:
    """Such as two steps of one Slurm job, each on a node of its own."""
    lock = tmp_path / "lock"
    monkeypatch.setenv(launch, "7")

    def owned(count: str) -> None:
        monkeypatch.setenv(start, count)
        lock.write_text(json.dumps(run.Lock(lock).me | {"host": "another"}))

    owned("9")
    with beating(lock):
        assert not takes(run, lock)
        monkeypatch.setenv(start, "8")
        assert not takes(run, lock)
    begun = time.monotonic()
    os.utime(lock, (time.time() - 3 * run.HEARTBEAT,) * 2)  # it missed two
    assert takes(run, lock)
    owned("9")
    monkeypatch.setenv(start, "10")
    assert takes(run, lock)
    assert time.monotonic() - begun < run.HEARTBEAT


def test_the_lock_of_another_host_of_the_same_name_is_not_judged_by_its_process_number(
    run: ModuleType, tmp_path: Path
) -> None:
    """The first process namespace of each has the same number, but they booted on their own."""
    if os.geteuid():
        pytest.skip("needs root, to mount")
    lock, boot = tmp_path / "lock", tmp_path / "boot_id"
    boot.write_text("another\n")
    mount = f"mount --make-rprivate / && mount --bind {boot} /proc/sys/kernel/random/boot_id"
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            assert ctypes.CDLL(None).unshare(0x00020000) == 0  # CLONE_NEWNS
            subprocess.run(mount, shell=True, check=True)
            run.Lock(lock).acquire()
        os._exit(0)
    os.waitpid(child, 0)
    assert json.loads(lock.read_text())["pid"] == child
    with beating(lock):
        assert not takes(run, lock)


def test_a_signal_that_was_ignored_when_training_began_stays_so(train: Trainer) -> None:
    """As nohup's: the run outlives the terminal."""
    before = STEPS + """
import signal
for number in (signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
    hooks.append(lambda _, number=number: os.kill(os.getpid(), number))
"""
    result = train(1, "--train.steps=2", before=before)
    assert result.ok, result
    assert train.steps() == [2]


# Disks that the ranks do not share

# Gives each rank a run's folder of its own, as nodes without a shared disk have.
OWN_DISK = """
import sys
sys.argv = [option.replace("@", os.environ["RANK"]) for option in sys.argv]
"""


def test_without_a_shared_disk_ddp_trains_and_resumes_through_rank_0(
    train: Trainer, whole: Trainer
) -> None:
    run = f"{train.folder}/disk@/run"
    for option in ("--train.stop_at=4", "--train.stop_at=6", "--train.steps=9"):
        result = train(2, option, run=run, before=OWN_DISK)
        assert result.ok, result
    on = [train.folder / f"disk{rank}" / "run" for rank in range(2)]
    assert train.losses(on[0]) == pytest.approx(whole.losses(), rel=1e-5)
    assert f"resuming from {on[0]}/checkpoints/step_00000006" in result.outputs[0]
    assert train.steps(on[0]) == [8, 9]
    assert not (on[1] / "checkpoints").exists()
    assert (on[1] / "logs" / "rank_1.log").exists()
    # The nodes in another order: rank 0 would begin anew, without a word.
    swapped = OWN_DISK.replace('os.environ["RANK"]', 'str(1 - int(os.environ["RANK"]))')
    result = train(2, run=run, before=swapped)
    assert result.codes == [1, 1], result
    assert f"rank 1 has {on[0]}/checkpoints/step_00000009, and rank 0 nothing" in result.outputs[0]
    assert train.steps(on[0]) == [8, 9]


def test_without_a_shared_disk_fsdp_is_refused_with_the_reason(train: Trainer) -> None:
    run = f"{train.folder}/disk@/run"
    result = train(2, run=run, before=OWN_DISK, strategy="fsdp")
    assert result.codes == [1, 1]
    assert (
        "is not the same folder on all ranks, and each rank writes its shard" in result.outputs[0]
    )
    assert "put run.dir on a shared disk, or use the strategy ddp" in result.outputs[0]
    assert not (train.folder / "disk0" / "run" / "lock").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--train.lr=1.0", "train.lr is 1.0 on rank 1 and 0.003 on rank 0:"),
        ("--model.width=64", "model.width is 64 on rank 1 and 32 on rank 0:"),
        (
            "--data.samples=50",
            "identity is synthetic table, seed 0: 45 + 5 x 16, 4 classes on rank 1 and ",
        ),
    ],
)
def test_ranks_with_other_options_or_data_are_told_apart_before_they_train(
    train: Trainer, option: str, message: str
) -> None:
    before = f"import sys; sys.argv += [{option!r}] * int(os.environ['RANK'])"
    result = train(2, before=before)
    assert result.codes == [1, 1]
    assert f"error: {message}" in result.outputs[0]
    assert str(result).count("error: ") == 1
    assert "Traceback" not in str(result)
