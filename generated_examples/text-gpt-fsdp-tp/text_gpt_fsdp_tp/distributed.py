"""Ranks, device and process group: what the launcher decided, read in one place."""

import contextlib
import gc
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

# torchrun sets these; without it `python train.py` is a run of one rank.
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
LOCAL_WORLD_SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
# A folder that a launch script shares with its ranks, because torchrun passes on neither a signal
# nor an exit status: `stop` goes in, `run`, `preempted` and `error` come out.
CONTROL = Path(os.environ["SCAFFOLD_CONTROL"]) if "SCAFFOLD_CONTROL" in os.environ else None

# Whether torchrun or Slurm started this launch again after a failure.
RESTARTED = any(int(os.environ.get(f"{by}_RESTART_COUNT") or 0) for by in ("TORCHELASTIC", "SLURM"))

PREEMPTED = 75  # EX_TEMPFAIL: try again

# Of the run, once it is this launch's: where the first rank that fails says why.
error_file: Path | None = None

T = TypeVar("T")
log = logging.getLogger("train")  # rank 0 speaks; what the others say stands in their log files


class UserError(Exception):
    """A mistake in the data, the config or the launch: its one or two lines say what to do."""


def start(timeout: timedelta) -> torch.device:
    """Joins the process group and returns this rank's device.

    `BACKEND` (environment) is `auto`, `nccl`, `gloo` or `mpi`; `auto` takes the accelerator's own
    backend, or gloo on the CPU. No collective waits longer than `timeout` for a missing rank.
    Raises UserError where backend and machine do not fit.
    """
    if CONTROL and LOCAL_RANK == 0:
        for outcome in ("error", "preempted"):  # of an attempt before torchrun's restart
            (CONTROL / outcome).unlink(missing_ok=True)
    backend = os.environ.get("BACKEND") or "auto"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if backend == "mpi" and not dist.is_mpi_available():
        raise UserError(
            "BACKEND=mpi needs a PyTorch built with MPI; this one is not: use gloo or nccl."
        )
    if backend == "nccl" and (accelerator is None or accelerator.type != "cuda"):
        raise UserError(
            "BACKEND=nccl needs NVIDIA or AMD GPUs, and torch sees none: use BACKEND=gloo."
        )
    device = torch.device("cpu")
    if accelerator is not None and backend not in ("gloo", "mpi"):
        present = torch.accelerator.device_count()
        if present < LOCAL_WORLD_SIZE:  # said by all ranks of the node: none waits for another
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
            raise UserError(
                f"{LOCAL_WORLD_SIZE} ranks on a node with {present} GPUs (CUDA_VISIBLE_DEVICES {visible}).\n"
                f"Start at most {present} ranks on this node: NPROC_PER_NODE={present}"
            )
        device = torch.device(accelerator.type, LOCAL_RANK)
        torch.accelerator.set_device_index(LOCAL_RANK)
    if backend == "auto":
        backend = "gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device)
    if device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{backend}"  # gloo carries the ranks' small CPU messages
    alone = "RANK" not in os.environ and backend != "mpi"
    dist.init_process_group(
        backend,
        timeout=timeout,
        # Tells nccl this rank's device before its first collective.
        device_id=None if device.type == "cpu" else device,
        store=dist.HashStore() if alone else None,  # alone it needs no port
        rank=0 if alone else -1,
        world_size=1 if alone else -1,
    )
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones)  # the first collective shows at once whether the network carries data
    if int(ones) != dist.get_world_size():
        raise RuntimeError(f"all-reduce over {dist.get_world_size()} ranks counted {int(ones)}")
    return device


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of the forward pass; UserError where the device cannot compute in it."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    if device.type == "cuda" and precision == "bf16":
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            name = torch.cuda.get_device_name(device)
            raise UserError(f"{name} has no bf16: use --train.precision fp16 (or fp32).")
    if device.type == "cpu" and precision == "fp16":
        log.warning("fp16 on a CPU is very slow (up to 100 times); bf16 and fp32 are not")
    return dtype


def check_group_size(key: str, size: int) -> None:
    """Raises UserError unless the ranks can be cut into groups of `size`."""
    if WORLD_SIZE % size:
        fits = [n for n in range(1, WORLD_SIZE + 1) if WORLD_SIZE % n == 0]
        raise UserError(
            f"{key} is {size}, which does not divide {WORLD_SIZE} ranks: use one of {fits}."
        )


def sum_over_ranks(*values: float) -> list[float]:
    """The sum of each value over all ranks: one small message, no wait for the GPU."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)  # all ranks must reach this
    return total.tolist()


def to_device(batch: Iterable[torch.Tensor], device: torch.device) -> Any:
    """The tensors of a batch on `device`; from pinned memory they travel while the GPU computes."""
    return tuple(tensor.to(device, non_blocking=True) for tensor in batch)


def from_rank_0(value: T) -> T:
    """Rank 0's `value`, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)  # all ranks must reach this
    return box[0]


@contextlib.contextmanager
def agreed() -> Iterator[None]:
    """A UserError of any rank in this block becomes the same UserError on every rank.

    So nobody is left waiting in a collective for a rank whose disk lacks a file.
    """
    error: str | None = None
    try:
        yield
    except UserError as e:  # from a loader's worker it comes wrapped in the worker's traceback
        error = str(e).split("UserError: ")[-1].strip()
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)  # all ranks must reach this
    if first := next((e for e in errors if e), None):
        raise UserError(first)


def check_same(facts: dict[str, object]) -> None:
    """Raises UserError where the facts of some rank are not those of rank 0."""
    theirs = from_rank_0(facts)
    with agreed():
        for name, value in facts.items():
            if value != theirs.get(name):
                raise UserError(
                    f"{name} is {value} on rank {RANK} and {theirs.get(name)} on rank 0:\n"
                    "give all nodes the same options, config.toml and data."
                )


def in_step(items: Iterable[T]) -> Iterator[T]:
    """The items, of which every rank has as many; a UserError that one meets is raised by all."""
    iterator, item, error = iter(items), None, None
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        except UserError as e:
            error = e
        if sum_over_ranks(error is not None)[0]:
            with agreed():
                if error is not None:
                    raise error
        yield item  # type: ignore[misc]


def run(main: Callable[[], int]) -> None:
    """Runs `main`, shuts down and exits with its status; an error is told by the rank that made it.

    Nothing after an error is a collective: the other ranks may never come, and their waiting would
    bury the cause. The launcher ends them.
    """
    sys.stdout, sys.stderr = Unbreakable(sys.stdout), Unbreakable(sys.stderr)  # type: ignore[assignment]
    console = logging.StreamHandler(sys.stdout)
    console.setLevel(logging.INFO if RANK == 0 else logging.CRITICAL)
    log.setLevel(logging.INFO)
    log.addHandler(console)
    try:
        status = record(main)()  # so that torchrun's report names the error too
    except UserError as error:
        report(str(error), once=True)
        # All ranks end alike, so to torchrun this is no crash to restart: the script exits 1.
        leave(0 if CONTROL else 1)
    except Exception as error:
        # What fails before the group stands is this rank's own affair: a wrong interface, a taken port.
        if dist.is_initialized() and is_peer_failure(error):
            time.sleep(5)  # the rank that failed speaks first
            log.critical("[rank %d] stopped: another rank is gone (%s)", RANK, one_line(error))
            if CONTROL:
                report(f"rank {RANK} lost the other ranks: {one_line(error)}", peer=True)
        else:
            details = traceback.format_exc()
            for line in details.splitlines():
                log.critical("[rank %d] %s", RANK, line)
            report(f"rank {RANK} failed: {type(error).__name__}: {one_line(error)}", details)
        leave(1)
    gc.collect()  # a DDP model that is alive at interpreter exit can abort a finished run
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(status)


def leave(status: int) -> NoReturn:
    """Ends this process at once: after an error, the clean-up of workers and groups may never end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Unbreakable:
    """A stream whose reader may go: a closed terminal or a dead `tee` must not take the run along."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        return self._try(self.stream.write, text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, method: Callable[..., Any], *arguments: str) -> Any:
        try:
            return method(*arguments)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            return method(*arguments)


def report(message: str, details: str = "", once: bool = False, peer: bool = False) -> None:
    """Leaves the cause of a failure with the run and the launch script, or on stderr without one.

    `details`, a traceback, come before the message. `once`: every rank has the same message, so one a
    node is enough. `peer`: some other rank failed, and what it left with the run, where this node sees
    that, is the cause.
    """
    text = f"{details}error: {message}\n"
    if error_file is not None:
        with contextlib.suppress(OSError):
            if peer and error_file.exists():
                text = error_file.read_text(encoding="utf-8")
            else:
                _first(error_file, text)
    if CONTROL is not None:
        _first(CONTROL / "error", text)
    elif not once or LOCAL_RANK == 0:
        print(f"error: {message}", file=sys.stderr)


def _first(path: Path, text: str) -> None:
    """Writes the file unless it is there: the first to fail is the cause."""
    with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
        file.write(text)


def preempted() -> int:
    """The exit status of a run that was told to stop and has saved: 75, by way of the launch script."""
    if CONTROL is None:
        return PREEMPTED
    with contextlib.suppress(OSError):  # gone where the launch script was killed
        (CONTROL / "preempted").touch()  # torchrun would turn a status of 75 into 1
    return 0


def is_peer_failure(error: Exception) -> bool:
    """Whether `error` only says that some other rank went away."""
    text = str(error)
    if isinstance(error, dist.DistBackendError):  # nccl's own failures come as this too
        return "gloo" in text or "remote process exited" in text
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in text)


def one_line(error: BaseException) -> str:
    text = (str(error).splitlines() or [""])[0][:300]
    if "connectFullMesh" in text:
        return f"{text} (the ranks met, but cannot reach each other: are all ports between the nodes open?)"
    if "onnection " in text:  # closed or reset by a process that ended without a word
        text += " (if no rank says why, its exitcode above or on another node may: -9 is often memory run out)"
    return text
