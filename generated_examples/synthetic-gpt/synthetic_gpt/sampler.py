"""The order of the samples: the same on any number of ranks, resumable at any step.

`run.seed` and the global batch size B alone decide which samples make which step. The samples form
one endless stream, a fresh shuffle of the whole data set per epoch; a step takes the next B of it.
Those B are cut into B/m *grains* of m samples (m = the micro-batch size). Rank r of D runs the grains
r, r+D, r+2D, ...: the number of ranks decides who computes a grain, never what is in it.
"""

import hashlib
import math
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from .distributed import LOCAL_WORLD_SIZE
from .run import no_stop_signals

Key = tuple[int, int]  # (epoch, index in the data set)


def seed_of(*parts: object) -> int:
    """A 63-bit seed that depends on every part, the same on every machine and in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _mix(x: np.ndarray, key: int) -> np.ndarray:
    """A 64-bit hash of each x: the finaliser of SplitMix64 (Steele et al., 2014)."""
    x = x + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(positions: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Where a shuffle of range(n), keyed by `seed`, sends each position: computed, never stored.

    A Feistel network on an a x b grid that just holds n; a result outside range(n) is sent through
    again until it falls inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    a = math.isqrt(n - 1) + 1 if n > 1 else 1
    b = -(-n // a)
    keys = [seed_of(seed, turn) for turn in range(8)]
    out = positions.astype(np.uint64)
    todo = np.arange(len(out))
    while len(todo):
        left, right = np.divmod(out[todo], np.uint64(b))
        for turn in range(0, len(keys), 2):
            left = (left + _mix(right, keys[turn])) % np.uint64(a)
            right = (right + _mix(left, keys[turn + 1])) % np.uint64(b)
        out[todo] = left * np.uint64(b) + right
        todo = todo[out[todo] >= n]
    return out.astype(np.int64)


def held_out(n: int, fraction: float) -> np.ndarray:
    """Which of n samples are kept for evaluation: (n,) bool, by a hash of the index alone.

    The same for every seed and rank; at least one sample stays on each side when n > 1.
    """
    hashes = _mix(np.arange(n, dtype=np.uint64), seed_of("held out"))
    chosen = hashes < np.uint64(min(max(fraction, 0.0), 1.0) * (2**64 - 2**11))
    if n > 1 and not chosen.any():
        chosen[hashes.argmin()] = True
    if n > 1 and chosen.all():
        chosen[hashes.argmax()] = False
    return chosen


class GrainSampler(DistributedSampler):
    """The (epoch, index) keys of this rank's grains, step after step, for `DataLoader(batch_size=m)`.

    Args:
        dataset: the training set; its length is the length of an epoch.
        rank, size: this rank's place among the data-parallel ranks.
        steps: the last step; the stream itself has no end.
    """

    def __init__(
        self,
        dataset: Dataset,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        size: int,
        seed: int,
        steps: int,
    ) -> None:
        super().__init__(dataset, num_replicas=size, rank=rank, seed=seed)
        self.length = len(dataset)  # type: ignore[arg-type]
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.grains = global_batch_size // micro_batch_size
        self.rounds = -(-self.grains // size)
        self.steps = steps
        self.set_step(0, 0)

    def set_step(self, step: int, samples: int) -> None:
        """Goes on after `step` completed steps, which took the first `samples` of the stream."""
        self.step, self.samples = step, samples

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: the stream already holds a new shuffle for every epoch."""

    def grain(self, turn: int) -> int:
        """The grain this rank runs in round `turn`: the last one again where it has none of its own."""
        return min(self.rank + turn * self.num_replicas, self.grains - 1)

    def has_grain(self, turn: int) -> bool:
        """False where this rank runs a grain only to keep in step, and must give it weight 0."""
        return self.rank + turn * self.num_replicas < self.grains

    def describe(self) -> str:
        """The batch arithmetic in plain words, with a better micro-batch size where much idles."""
        idle = 1 - self.grains / (self.rounds * self.num_replicas)
        text = (
            f"a step is {self.global_batch_size} samples: {self.grains} micro-batches of "
            f"{self.micro_batch_size}, run by {self.num_replicas} data-parallel rank(s) in "
            f"{self.rounds} round(s), {idle:.0%} idle"
        )
        fits = [
            m
            for m in range(1, self.global_batch_size // self.num_replicas + 1)
            if self.global_batch_size % (m * self.num_replicas) == 0
        ]
        if idle >= 0.1 and fits:
            best = min(fits, key=lambda m: abs(m - self.micro_batch_size))
            text += f" (none with train.micro_batch_size {best})"
        return text

    def __len__(self) -> int:
        return max(0, self.steps - self.step) * self.rounds * self.micro_batch_size

    def __iter__(self) -> Iterator[Key]:
        size = self.micro_batch_size
        starts = [self.grain(turn) * size for turn in range(self.rounds)]
        offsets = np.concatenate([np.arange(start, start + size) for start in starts])
        for done in range(self.steps - self.step):
            yield from self.keys(self.samples + done * self.global_batch_size + offsets)

    def keys(self, positions: np.ndarray) -> Iterator[Key]:
        """The key at each position of the endless stream."""
        epochs, places = np.divmod(positions, self.length)
        indices = np.empty_like(places)
        for epoch in np.unique(epochs):
            now = epochs == epoch
            indices[now] = permute(places[now], self.length, seed_of(self.seed, int(epoch)))
        return zip(epochs.tolist(), indices.tolist(), strict=True)


class EvaluationSampler(Sampler[list[Key]]):
    """Batches of keys that hold each of n samples once, over all ranks; for `batch_sampler=`.

    Every rank gets the same number of batches, since a forward pass under FSDP needs all ranks; a
    rank without a batch of its own repeats the first one, to be counted with weight 0.
    """

    def __init__(self, n: int, batch_size: int, rank: int, size: int) -> None:
        self.seed = 0  # nothing random belongs in an evaluation; if it is there, it stays the same
        self.n, self.batch_size, self.rank, self.size = n, batch_size, rank, size
        self.batches = -(-n // batch_size)

    def has_batch(self, turn: int) -> bool:
        return self.rank + turn * self.size < self.batches

    def __len__(self) -> int:
        return -(-self.batches // self.size)

    def __iter__(self) -> Iterator[list[Key]]:
        for turn in range(len(self)):
            first = (self.rank + turn * self.size if self.has_batch(turn) else 0) * self.batch_size
            yield [(0, index) for index in range(first, min(first + self.batch_size, self.n))]


class Keyed(Dataset):
    """`dataset` under (epoch, index) keys: what is random about a sample depends on its key alone."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: Key) -> Any:
        epoch, index = key
        seed = seed_of(self.seed, "sample", epoch, index)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # The CPU's generator alone: a worker must not touch the GPU.
        torch.default_generator.manual_seed(seed)
        return self.dataset[index]


class Loader(DataLoader):
    """A DataLoader whose workers live through the signals that tell a run to stop.

    torchrun, Slurm and Ctrl-C send them to every process, and a worker's death ends its rank.
    """

    def __iter__(self) -> Any:
        with no_stop_signals():
            return super().__iter__()


def make_loader(
    dataset: Dataset, sampler: GrainSampler | EvaluationSampler, workers: int, device: torch.device
) -> DataLoader:
    """A loader of the sampler's micro-batches; `workers` per rank, at most the cores there are for it."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    workers = min(workers, cores // LOCAL_WORLD_SIZE)
    order: dict[str, Any] = {"batch_sampler": sampler}
    if isinstance(sampler, GrainSampler):
        order = {"sampler": sampler, "batch_size": sampler.micro_batch_size}
    return Loader(
        Keyed(dataset, sampler.seed),
        **order,
        num_workers=workers,
        pin_memory=device.type != "cpu",
        timeout=600 if workers else 0,  # a stuck worker is an error, not a silent hang
    )
