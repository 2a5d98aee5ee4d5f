"""One rank of a preflight: preflight.py starts it as torchrun would, asks, and kills it at the end."""

import contextlib
import ctypes
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from preflight_node import END, NODE, NODES, PROJECT, RANKS, Channel, Facts, now, one_line, serve

from text_gpt_fsdp_tp import data, distributed, model, parallel
from text_gpt_fsdp_tp.checkpoint import code_hash
from text_gpt_fsdp_tp.config import load
from text_gpt_fsdp_tp.distributed import LOCAL_RANK, UserError
from text_gpt_fsdp_tp.weights import without_memory

PATIENCE = timedelta(seconds=15)  # for the other ranks


def facts() -> Facts:
    """This rank's device and, from the first rank of a node, all about the project there."""
    found: Facts = {"device": "cpu", "gpus": 0}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and os.environ.get("BACKEND") not in ("gloo", "mpi"):
        found = {"device": "absent", "gpus": torch.accelerator.device_count()}
        if LOCAL_RANK < found["gpus"]:
            module = torch.get_device_module(accelerator)
            free, total = module.mem_get_info(LOCAL_RANK)
            found |= {"device": module.get_device_name(LOCAL_RANK)}
            found |= {"memory": total, "used": total - free}
    return found if LOCAL_RANK else {**found, "project": project()}


def nccl_version() -> str:
    """What is loaded; torch itself only tells what it was built with."""
    version = ctypes.c_int()
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    major, rest = divmod(version.value, 10000)
    return f"{major}.{rest // 100}.{rest % 100}" if major else "none"


def project() -> Facts:
    """What must be the same on all nodes, and how much the run needs."""
    found: Facts = {"torch": str(torch.__version__), "nccl": nccl_version(), "code": code_hash()}
    try:
        config = load(sys.argv[2:])
    except UserError as error:
        return {**found, "options_problem": (True, str(error))}
    found["options"] = {**config.numbers(), "run.seed": config.run.seed}
    found |= {"run_dir": str(config.run_dir), "keep": config.checkpoint.keep, "parameters": 0}
    found |= {"workers": config.data.workers, "sharded": hasattr(parallel, "fully_shard")}
    # What is not prepared yet may be by the time that training starts.
    problem, bad = "data_problem", "warn" if (PROJECT / "prepare.py").exists() else True

    def late(*_: object) -> None:
        nonlocal bad
        bad = "warn"  # large, or on a slow disk
        raise UserError("not opened within 10 s: neither it nor the size of the model is known")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(10)
    try:
        train_set, _, sizes, identity = data.build(config.data, PROJECT)
        train_set[0]  # can it be read?
        signal.alarm(0)
        found["options"] |= {"the data": identity, "its length": len(train_set)}
        problem, bad = "options_problem", True
        network = without_memory(model.build, config.model, sizes)
        found["parameters"] = sum(weight.numel() for weight in network.parameters())
    except UserError as error:
        signal.alarm(0)
        found[problem] = (bad, str(error))
    return found


def measure() -> Facts:
    """This rank's part in the measurements, in step with all others; or what went wrong."""
    if os.environ.get("BACKEND") == "mpi" and dist.is_mpi_available():
        return {"error": "not measured: ranks of mpi are started by mpirun alone", "bad": "warn"}
    try:
        device = distributed.start(PATIENCE)
        parallel.Parallel(load(sys.argv[2:]), device)  # do the ranks divide into its groups?
        return measurements(device)
    except UserError as error:
        return {"error": str(error), "check": "ranks"}
    except Exception as error:
        return {"error": one_line(error), "peer": distributed.is_peer_failure(error)}


def measurements(device: torch.device) -> Facts:
    """Wrong sums, seconds for a fixed computation, GB/s over all ranks and between nodes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    length, side = (1 << 20, 512) if device.type == "cpu" else (1 << 24, 4096)
    numbers = torch.arange(length, device=device).float() % 97
    sums = numbers * (rank % 8 + 1)
    dist.all_reduce(sums)  # exact in float32
    wrong = int((sums != numbers * sum(r % 8 + 1 for r in range(world))).sum())
    sums.zero_()  # so that it does not grow

    square = torch.ones(side, side, device=device)
    timed = partial(best, device)
    seconds = timed(lambda: [torch.mm(square, square) for _ in range(8)])
    links: list[Facts] = []  # each is told once, by its first rank
    if world > 1:
        took = timed(lambda: dist.all_reduce(sums))
        sent = sums.nbytes * 2 * (world - 1) / world  # by each rank, around a ring
        links += [{"between": "all ranks", "gb_per_s": sent / took / 1e9}] * (rank == 0)
    part, other = sums[: length // 4 // RANKS], numbers[: length // 4 // RANKS]
    for a, b in pairs():  # all ranks of two nodes: each may have a network card of its own
        if NODE in (a, b):
            took = timed(partial(exchange, part, other, rank + (a + b - 2 * NODE) * RANKS))
            speed = part.nbytes * RANKS / took / 1e9
            links += [{"between": f"nodes {a}, {b}", "gb_per_s": speed}] * (rank == a * RANKS)
    return {"wrong": wrong, "seconds": seconds, "links": links}


def exchange(mine: torch.Tensor, theirs: torch.Tensor, peer: int) -> None:
    """Sends as much as it receives; as one batch, for which nccl needs no other rank."""
    both = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def best(device: torch.device, task: Callable[[], object]) -> float:
    """Seconds that the fastest of five takes: what else runs on a machine comes and goes."""
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        task()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def pairs() -> list[tuple[int, int]]:
    """Every two nodes; of more than 8 each with the next, so ordered that few wait for others."""
    if NODES <= 8:
        return list(itertools.combinations(range(NODES), 2))
    return sorted(((n, n + 1) for n in range(NODES - 1)), key=lambda pair: pair[0] % 2)


if __name__ == "__main__":
    threading.Timer(END - now(), os._exit, [1]).start()
    with contextlib.suppress(OSError):
        serve(Channel(socket.socket(fileno=int(sys.argv[1]))), {"facts": facts, "measure": measure})
    os._exit(0)  # nothing is to be saved, and taking a process group down can hang
