"""One rank of a preflight: preflight.py starts it as torchrun would, asks, and kills it at the end."""

import contextlib
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
from typing import Any

import torch
import torch.distributed as dist
from preflight_node import END, NODE, NODES, PROJECT, RANKS, Channel, Facts, now, one_line, serve

from table_mlp import data, distributed, model, parallel
from table_mlp.checkpoint import code_hash
from table_mlp.config import load
from table_mlp.distributed import LOCAL_RANK, UserError
from table_mlp.weights import without_memory

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


def project() -> Facts:
    """What must be the same on all nodes, and how much the run needs."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"
    found: Facts = {"torch": str(torch.__version__), "nccl": nccl, "code": code_hash()}
    try:
        config = load(sys.argv[2:])
    except UserError as error:
        return {**found, "options_problem": str(error)}
    found["options"] = {**config.numbers(), "run.seed": config.run.seed}
    found |= {"run_dir": str(config.run_dir), "keep": config.checkpoint.keep, "parameters": 0}
    found |= {"workers": config.data.workers, "sharded": hasattr(parallel, "fully_shard")}
    problem = "data_problem"
    try:
        with at_most(10):
            train_set, _, sizes, identity = data.build(config.data, PROJECT)
            found["options"] |= {"the data": identity, "its length": len(train_set)}
            sample = sum(torch.as_tensor(part).nbytes for part in train_set[0])
            found["batch_bytes"] = sample * config.train.micro_batch_size
        problem = "options_problem"
        network = without_memory(model.build, config.model, sizes)
        found["parameters"] = sum(weight.numel() for weight in network.parameters())
    except UserError as error:
        found[problem] = str(error)
    return found


@contextlib.contextmanager
def at_most(seconds: int) -> Any:
    """Ends what is in it after so many seconds: a data set may be large, and its disk slow."""

    def late(*_: object) -> None:
        raise UserError(f"not opened within {seconds} s, so nothing is known about it")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def measure() -> Facts:
    """This rank's part in the measurements, in step with all others; or what went wrong."""
    try:
        return measurements(distributed.start(PATIENCE))
    except UserError as error:
        return {"error": str(error)}
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
    links: list[Facts] = []
    if world > 1:
        took = timed(lambda: dist.all_reduce(sums))
        sent = sums.nbytes * 2 * (world - 1) / world  # by each rank, around a ring
        links.append({"kind": "all-reduce", "between": "all ranks", "gb_per_s": sent / took / 1e9})
    part, other = sums[: length // 4], numbers[: length // 4]
    for a, b in pairs():  # the first ranks of two nodes
        if rank in (a * RANKS, b * RANKS):
            took = timed(partial(exchange, part, other, (a + b - NODE) * RANKS))
            speed = part.nbytes / took / 1e9
            links.append({"kind": "exchange", "between": f"nodes {a}, {b}", "gb_per_s": speed})
    # Each link is told once, by its first rank.
    links = [link for link in links if rank == 0 or link["between"].startswith(f"nodes {NODE},")]
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
