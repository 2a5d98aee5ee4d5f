"""A run survives: kills, signals, crashes while saving, damaged checkpoints, full disks, bad ranks."""

from __future__ import annotations

import importlib
import json
import random
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import parts
from faults import RECORD, STEPS, Trainer, cores, touch_at
from ranks import Ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("projects")


@pytest.fixture
def train(ranks: Ranks, projects: Path, tmp_path: Path) -> Trainer:
    return Trainer(ranks, projects, tmp_path)


# Kills and signals


@pytest.mark.parametrize("seed", range(3))
def test_a_kill_at_any_step_repeats_and_loses_no_sample(train: Trainer, seed: int) -> None:
    step = random.Random(seed).randint(1, 8)
    flag = train.folder / "now"
    first, then = [("ddp", 3), ("fsdp", 2), ("ddp", 2)][seed], [
        ("ddp", 2),
        ("ddp", 1),
        ("fsdp", 3),
    ][seed]
    before = RECORD + touch_at(step, flag)
    result = train(first[1], strategy=first[0], before=before, kill=(signal.SIGKILL, str(flag), -1))
    assert result.codes == [-signal.SIGKILL] * first[1], result
    result = train(then[1], strategy=then[0], before=RECORD)
    assert result.ok, result
    train.assert_every_sample_once_an_epoch()


@pytest.mark.parametrize(
    ("number", "rank"),
    [(signal.SIGTERM, -1), (signal.SIGINT, 0), (signal.SIGHUP, -1), (signal.SIGUSR1, 1)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_stop_signal_to_any_rank_saves_and_exits_75(
    train: Trainer, number: signal.Signals, rank: int
) -> None:
    flag = train.folder / "now"
    before = RECORD + touch_at(3, flag)
    result = train(2, "--checkpoint.every=0", before=before, kill=(number, str(flag), rank))
    assert result.codes == [75, 75], result
    (saved,) = train.steps()
    assert saved >= 3
    assert f"step {saved} is saved" in result.outputs[0]
    result = train(3, before=RECORD)
    assert result.ok, result
    train.assert_every_sample_once_an_epoch()


def test_resuming_under_any_strategy_on_any_ranks_repeats_and_loses_no_sample(
    train: Trainer,
) -> None:
    for leg in "ddp 2 1, fsdp 3 3, hsdp 4 4, ddp 3 5, fsdp-tp 2 7, fsdp 1 8, ddp 1 9".split(", "):
        strategy, world, step = leg.split()
        stop = f"--train.stop_at={step}"
        result = train(int(world), stop, strategy=strategy, model="gpt", before=RECORD)
        assert result.ok, result
    train.assert_every_sample_once_an_epoch()


@pytest.mark.skipif(cores() < 2, reason="a loader has at most a worker per core")
@pytest.mark.parametrize("moment", ["training", "birth of a worker", "evaluation"])
def test_loader_workers_outlive_a_signal_to_all_processes(train: Trainer, moment: str) -> None:
    everyone = "signal, os.killpg(0, signal.SIGTERM)"  # torchrun and Slurm reach the workers too
    before = {
        "training": f"hooks.append(lambda _: STEP[0] == 3 and ({everyone}))",
        "birth of a worker": f"""
import multiprocessing.process
start = multiprocessing.process.BaseProcess.start
multiprocessing.process.BaseProcess.start = lambda self: (start(self), {everyone})
""",
        "evaluation": f"""
import demo.model
score = demo.model.score
demo.model.score = lambda *a: ({everyone}, score(*a))[-1]
""",
    }[moment]
    workers = ["--data.workers=2", "--train.eval_every=4"]
    result = train(1, *workers, before=RECORD + "import signal\n" + before)
    assert result.codes == [75], result
    saved = train.record_of()["step"]
    assert saved >= {"training": 4, "birth of a worker": 1, "evaluation": 5}[moment]
    result = train(1, *workers, before=RECORD)
    assert result.ok, result
    train.assert_every_sample_once_an_epoch()


# Crashes while saving

# Copies the run's folder before each call that changes a checkpoint: what a crash there leaves.
SNAPSHOTS = """
import demo.checkpoint, io, shutil, sys, threading
from demo.distributed import RANK
copy, taken, busy = shutil.copytree, [0], threading.Lock()
def snapshot():
    with busy:
        hook[0] = False
        taken[0] += 1
        copy(os.environ["RUN"], f"{os.environ['RECORD']}_{RANK}_{taken[0]:02}")
        hook[0] = True
def watch(event, arguments):
    changes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if hook[0] and (changes or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir")):
        if any("step_" in str(a) or "state.json" in str(a) for a in arguments) or event == "os.rmdir":
            snapshot()
hook = [False]
sys.addaudithook(watch)
_save, _finish = demo.checkpoint.Checkpoints.save, demo.checkpoint.Checkpoints.finish
def save(self, step, samples):
    self.finish()  # of the one before
    hook[0] = step == 4
    return _save(self, step, samples)
def finish(self):
    saving = self.pending is not None
    done = _finish(self)
    if saving and hook[0]:
        if RANK == 0:  # another rank may be here while rank 0 still removes the checkpoint before
            snapshot()
        hook[0] = False
    return done
demo.checkpoint.Checkpoints.save, demo.checkpoint.Checkpoints.finish = save, finish
"""


@pytest.mark.parametrize(
    ("strategy", "world", "more"),
    [("ddp", 1, []), ("fsdp", 2, []), ("ddp", 1, ["--checkpoint.async_save=true"])],
    ids=["ddp", "fsdp", "async"],
)
def test_a_crash_at_any_point_of_saving_leaves_a_run_that_resumes(
    train: Trainer, strategy: str, world: int, more: list[str]
) -> None:
    options = ["--checkpoint.keep=1", "--train.stop_at=5", *more]
    env = {"RUN": str(train.run)}
    result = train(world, *options, strategy=strategy, before=SNAPSHOTS, env=env)
    assert result.ok, result
    expected = train.losses()
    seen, resumed = set(), []
    snapshots = sorted(train.folder.glob("record_01_*"))
    for snapshot in snapshots:
        found = {
            p.relative_to(snapshot): p.read_bytes()
            for p in (snapshot / "checkpoints").rglob("*")
            if p.is_file()
        }
        if (key := tuple(sorted(found.items()))) in seen:
            continue
        seen.add(key)
        result = train(1, *options, run=snapshot)
        assert result.ok, f"{snapshot.name}: {sorted(found)}\n{result}"
        assert "DAMAGED" not in result.outputs[0], f"{snapshot.name}: {sorted(found)}\n{result}"
        (line,) = [x for x in result.outputs[0].splitlines() if x.startswith("resuming from")]
        resumed.append(int(line[-1]))
        assert train.losses(snapshot) == pytest.approx(expected, rel=1e-5)
        assert train.steps(snapshot) == [5]  # and nothing unfinished lies about
    assert set(resumed) == {2, 4}
    assert len(resumed) > 6, [path.name for path in snapshots]


def test_a_crash_before_the_first_checkpoint_starts_anew(train: Trainer) -> None:
    crash = STEPS + """
import demo.storage
demo.storage.sync_folder = lambda *_: os._exit(9)
"""
    assert train(2, before=crash).codes == [9, 1]
    assert train.checkpoints() == [".unfinished_step_00000002"]
    result = train(2)
    assert result.ok, result
    assert "resuming" not in result.outputs[0]
    assert list(train.losses()) == list(range(1, 10))
    assert train.steps() == [8, 9]


# Damaged checkpoints


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def delete(path: Path) -> None:
    path.unlink()


@pytest.fixture(scope="module")
def saved(ranks: Ranks, projects: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A run under each of ddp and fsdp with the checkpoints of steps 2 and 4."""
    train = Trainer(ranks, projects, tmp_path_factory.mktemp("saved"))
    for strategy in ("ddp", "fsdp"):
        result = train(2, "--train.stop_at=4", strategy=strategy, run=train.folder / strategy)
        assert result.ok, result
    return train


@pytest.mark.parametrize(
    ("strategy", "damage", "file"),
    [
        ("ddp", halve, "__0_0.distcp"),
        ("ddp", empty, "__0_0.distcp"),
        ("ddp", delete, "__0_0.distcp"),
        ("ddp", halve, ".metadata"),
        ("ddp", delete, ".metadata"),
        ("ddp", empty, "state.json"),
        ("fsdp", halve, "__1_0.distcp"),
        ("fsdp", empty, ".metadata"),
        ("fsdp", halve, "state.json"),
        ("fsdp", delete, "state.json"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_instead_of_a_damaged_checkpoint_the_one_before_is_used_and_that_is_said(
    train: Trainer, saved: Trainer, strategy: str, damage: Callable[[Path], None], file: str
) -> None:
    shutil.copytree(saved.folder / strategy, train.run)
    damage(train.run / "checkpoints" / "step_00000004" / file)
    result = train(2, "--train.stop_at=5", strategy=strategy)
    assert result.ok, result
    assert "step_00000004 IS DAMAGED" in result.outputs[0]
    assert "resuming from" in result.outputs[0]
    assert train.losses()[4] == pytest.approx(saved.losses(saved.folder / strategy)[4], rel=1e-5)
    assert train.checkpoints() == ["abandoned_step_00000004", "step_00000004", "step_00000005"]


def test_where_no_checkpoint_can_be_read_nothing_is_trained_or_deleted(
    train: Trainer, saved: Trainer
) -> None:
    shutil.copytree(saved.folder / "ddp", train.run)
    for path in train.run.glob("checkpoints/*/__0_0.distcp"):
        halve(path)
    before = sorted(train.run.rglob("*.distcp"))
    result = train(2)
    assert result.codes == [1, 1]
    assert "error: no checkpoint in" in result.outputs[0]
    assert sorted(train.run.rglob("*.distcp")) == before


# Full disks

# Fills the disk for the save after step 4 and frees it again for that after step 6.
FULL = """
import demo.checkpoint
ballast = Path(os.environ["BALLAST"])
_save = demo.checkpoint.Checkpoints.save
def save(self, step, samples):
    self.finish()
    if RANK == 0 and step == 4:
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1024))
    if RANK == 0 and step == 6:
        ballast.unlink()
    return _save(self, step, samples)
demo.checkpoint.Checkpoints.save = save
"""
FULL = "import contextlib\nfrom demo.distributed import RANK\n" + FULL


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of half a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("in_background", ["false", "true"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    train: Trainer, small_disk: Path, strategy: str, in_background: str
) -> None:
    options = ["--train.stop_at=7", f"--checkpoint.async_save={in_background}"]
    run, env = small_disk / "run", {"BALLAST": str(small_disk / "ballast")}
    result = train(2, *options, strategy=strategy, before=FULL, env=env, run=run)
    assert result.ok, result
    (line,) = [x for x in result.outputs[0].splitlines() if "step 4 is not saved" in x]
    assert "No space left" in line or "file write failed" in line, line
    assert "Traceback" not in str(result)
    assert train.steps(run) == [6, 7]
    assert f"resuming from {run}/checkpoints/step_00000007" in train(1, run=run).outputs[0]


# From step 4 on no file can grow past what is there by then.
NO_ROOM = """
import demo.checkpoint, resource
_save = demo.checkpoint.Checkpoints.save
def save(self, step, samples):
    if step >= 4:
        self.finish()  # what was saved before, maybe still in the background
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY))
    return _save(self, step, samples)
demo.checkpoint.Checkpoints.save = save
"""


@pytest.mark.parametrize("in_background", ["false", "true"])
def test_where_the_last_checkpoint_cannot_be_saved_the_run_fails_and_keeps_the_good_one(
    train: Trainer, in_background: str
) -> None:
    background = f"--checkpoint.async_save={in_background}"
    result = train(2, "--train.stop_at=5", background, before=NO_ROOM)
    assert result.codes == [1, 1], result
    assert "step 4 is not saved" in result.outputs[0]
    assert "error: the last checkpoint (step 5) could not be saved" in result.outputs[0]
    assert train.steps() == [2]
    result = train(2, background)
    assert result.ok, result
    assert list(train.losses()) == list(range(1, 10))


# What is kept

# Evaluations come to these losses, step after step.
SCORES = """
import demo.metrics
from demo.distributed import RANK
demo.metrics.evaluate = lambda *_: {"eval_loss": scores.pop(0), "eval_samples": 6}
scores = """
BEST = ["--train.eval_every=1", "--checkpoint.every=1", "--checkpoint.keep_best=true"]


@pytest.mark.parametrize("in_background", ["false", "true"])
def test_the_newest_and_the_best_are_kept_and_a_worse_one_after_a_resume_is_not_the_best(
    train: Trainer, in_background: str
) -> None:
    options = [*BEST, f"--checkpoint.async_save={in_background}"]
    assert train(2, *options, "--train.stop_at=6", before=SCORES + "[3, 1, 2, 2, 2, 2]").ok
    assert train.steps() == [2, 5, 6]
    assert train(1, *options, "--train.stop_at=8", before=SCORES + "[1.5, float('nan')]").ok
    assert train.steps() == [2, 7, 8]
    assert train(2, *options, before=SCORES + "[0.5]").ok
    assert train.steps() == [8, 9]
    assert train.record_of()["best"] == {"step": 9, "eval_loss": 0.5}


def test_the_best_stays_when_a_better_one_cannot_be_saved(train: Trainer) -> None:
    before = NO_ROOM + "import os\n" + SCORES + "[3, 1, 2, 0.5, 0.4]"
    room = "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)"
    before = before.replace("if step >= 4:", f"{room}\n    if step == 4:")
    result = train(1, *BEST, "--train.stop_at=5", "--checkpoint.keep=1", before=before)
    assert "step 4 is not saved" in result.outputs[0], result
    assert train.steps() == [5]
    assert train.record_of()["best"] == {"step": 5, "eval_loss": 0.4}
    result = train(1, *BEST, "--train.stop_at=6", "--checkpoint.keep=1", before=SCORES + "[3]")
    assert train.steps() == [5, 6]


def whole(checkpoint: Path, file: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by name."""
    with warnings.catch_warnings(action="ignore"):
        dcp_to_torch_save(checkpoint, file)
    found: dict[str, torch.Tensor] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}", inner)
        else:
            found[prefix] = value

    walk("", torch.load(file, weights_only=True))
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_save_in_the_background_holds_what_a_save_in_the_foreground_does(
    train: Trainer, strategy: str
) -> None:
    slow = """
import time
fsync = os.fsync
os.fsync = lambda file: (time.sleep(0.2), fsync(file))[1]  # training goes on meanwhile
"""
    options = ["--checkpoint.keep=9", "--train.stop_at=5"]
    for run, more in {"sync": [], "async": ["--checkpoint.async_save=true"]}.items():
        result = train(2, *options, *more, strategy=strategy, before=slow, run=train.folder / run)
        assert result.ok, result
        assert train.steps(train.folder / run) == [2, 4, 5]
    for step in (2, 4, 5):
        one, other = (
            whole(train.folder / run / f"checkpoints/step_{step:08}", train.folder / "file")
            for run in ("sync", "async")
        )
        assert len(one) > 10
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[name])), name


# Ranks that fail


def bad_loss(kind: str, rank: int, call: int) -> str:
    """Code that spoils the loss of one rank in its micro-batch `call`."""
    return f"""
import demo.model
from demo.distributed import RANK
_loss, calls = demo.model.loss, [0]
def loss(model, batch):
    value, rest = _loss(model, batch)
    calls[0] += 1
    if RANK == {rank} and calls[0] == {call}:
        {kind}
    return value, rest
demo.model.loss = loss
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_exception_on_one_rank_ends_all_and_the_others_add_a_line(
    train: Trainer, strategy: str
) -> None:
    before = bad_loss("raise ValueError('this is the cause')", rank=1, call=8)
    start = time.monotonic()
    result = train(3, strategy=strategy, before=before)
    assert time.monotonic() - start < 30
    assert result.codes == [1, 1, 1]
    assert result.outputs[1].startswith("[rank 1] Traceback")
    assert result.outputs[1].endswith("error: rank 1 failed: ValueError: this is the cause\n")
    for rank in (0, 2):
        (line,) = [x for x in result.outputs[rank].splitlines() if x.startswith("[rank")]
        assert line.startswith(f"[rank {rank}] stopped: another rank is gone (")
        assert "Traceback" not in result.outputs[rank]
        assert not result.outputs[rank].splitlines()[-1].startswith("error")
    logs = [(train.run / "logs" / f"rank_{rank}.log").read_text() for rank in range(3)]
    said = [next(x for x in log.splitlines() if "[rank" in x)[:23] for log in logs]
    assert min(said) == said[1]  # each line starts with the time
    assert train.steps() == [2]
    assert not (train.run / "lock").exists()


def test_every_node_tells_the_traceback_of_the_rank_that_failed_first(train: Trainer) -> None:
    """Through the run's folder, where the nodes share it: whichever launcher reads which node."""
    control = train.folder / "control"
    for rank in range(2):
        (control / str(rank)).mkdir(parents=True)
    a_node_each = f"os.environ['SCAFFOLD_CONTROL'] = '{control}/' + os.environ['RANK']\n"
    before = a_node_each + bad_loss("raise ValueError('this is the cause')", rank=1, call=8)
    assert train(2, before=before).codes == [1, 1]
    told = [(control / str(rank) / "error").read_text() for rank in range(2)]
    assert told[0] == told[1] == (train.run / "logs" / "error.txt").read_text()
    assert told[0].startswith("Traceback (most recent call last):\n")
    assert told[0].splitlines()[-1] == "error: rank 1 failed: ValueError: this is the cause"
    assert (control / "0" / "run").read_text() == str(train.run)
    (control / "0" / "error").unlink()
    (control / "1" / "error").unlink()
    assert train(2, before=a_node_each).ok  # the next launch forgets it
    assert not (train.run / "logs" / "error.txt").exists()
    before = a_node_each + bad_loss("os.kill(os.getpid(), 9)", rank=1, call=4)
    train.run = train.folder / "killed"
    assert train(2, before=before).codes == [1, -9]
    told = (control / "0" / "error").read_text()
    assert told.startswith("error: rank 0 lost the other ranks: ")
    assert told.endswith("-9 is often memory run out)\n")


def test_what_fails_before_the_ranks_have_met_is_not_blamed_on_another_rank(train: Trainer) -> None:
    result = train(2, env={"GLOO_SOCKET_IFNAME": "nosuch0"})
    assert result.codes == [1, 1], result
    assert "another rank is gone" not in str(result)
    assert "Unable to find address for: nosuch0" in result.outputs[0].splitlines()[-1]


def test_a_failure_of_nccl_itself_is_not_blamed_on_another_rank() -> None:
    parts.load("mlp", "synthetic_tabular")
    distributed = importlib.import_module("parts_mlp_synthetic_tabular.distributed")
    for text, of_a_peer in {
        "NCCL error, invalid usage: Duplicate GPU detected : rank 1 and rank 0": False,
        "NCCL error, unhandled system error: Error while creating shared memory segment": False,
        "NCCL error, remote process exited or there was a network error": True,
        "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:41414": True,
    }.items():
        assert distributed.is_peer_failure(dist.DistBackendError(text)) == of_a_peer, text


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("where", ["train", "val"])
def test_a_broken_sample_on_one_rank_is_one_clear_error_and_all_ranks_exit_alike(
    train: Trainer, where: str, workers: int
) -> None:
    if workers > 1 and cores() < 2:
        pytest.skip("a loader has at most a worker per core")
    before = f"""
import demo.data
from demo.distributed import UserError
_build = demo.data.build
class Broken:
    def __init__(self, data): self.data = data
    def __len__(self): return len(self.data)
    def __getitem__(self, i):
        if i == 3:
            raise UserError("sample 3 cannot be read: file.csv")
        return self.data[i]
def build(*args):
    data = _build(*args)
    return data._replace({where}=Broken(data.{where}))
demo.data.build = build
"""
    options = ["--train.eval_every=3", f"--data.workers={workers}"]
    result = train(2, *options, before=before, strategy="fsdp")
    assert result.codes == [1, 1], result
    assert "Traceback" not in str(result)
    assert str(result).count("error: sample 3 cannot be read: file.csv\n") == 1, result
    control = train.folder / "control"
    control.mkdir()
    result = train(2, *options, before=before, env={"SCAFFOLD_CONTROL": str(control)})
    assert result.codes == [0, 0], result  # to torchrun nothing failed: the launch script exits 1
    assert (control / "error").read_text() == "error: sample 3 cannot be read: file.csv\n"


@pytest.mark.parametrize("log_every", [1, 5])
@pytest.mark.parametrize(
    "kind", ["value = value * float('nan')", "value.register_hook(lambda g: g * float('inf'))"]
)
def test_a_loss_or_gradient_of_nan_stops_all_ranks_before_it_is_saved(
    train: Trainer, kind: str, log_every: int
) -> None:
    before = bad_loss(kind, rank=1, call=3 * 2 + 1)  # the first of three micro-batches of step 3
    options = [
        f"--train.log_every={log_every}",
        f"--checkpoint.every={log_every}",
        "--train.lr=4e-4",
    ]
    result = train(2, *options, "--checkpoint.async_save=true", before=before)
    assert result.codes == [1, 1], result
    assert "Traceback" not in str(result)
    what, where = ("loss", " on rank 1") if "value = " in kind else ("gradient", "")
    message = f"error: the {what} became nan or inf at step 3{where} (learning rate 0.000"
    assert message in result.outputs[0], result
    assert not (train.run / "checkpoints").exists() or train.steps() == [1, 2]
    assert (log_every == 1) == (train.run / "checkpoints").exists()
    assert all(loss == loss for loss in train.losses().values())


# Half precision


def test_the_state_of_the_fp16_scaler_is_resumed(train: Trainer) -> None:
    fp16 = ["--train.precision=fp16", "--checkpoint.every=1"]
    assert train(1, "--train.stop_at=1").ok
    result = train(2, *fp16, "--train.stop_at=2")  # from a checkpoint that has none
    assert result.ok, result
    path = train.run / "checkpoints" / "step_00000002" / "state.json"
    record = json.loads(path.read_text())
    assert record["scaler"]["scale"] > 1
    record["scaler"] |= {"scale": 48.0, "_growth_tracker": 7}
    path.write_text(json.dumps(record))
    result = train(1, *fp16, "--train.stop_at=3", strategy="fsdp")
    assert result.ok, result
    scaler = train.record_of()["scaler"]
    assert (scaler["scale"], scaler["_growth_tracker"]) == (48.0, 8)
