"""Arithmetic of nodes × GPUs: ranks, grains (micro-batches), rounds and the idle share."""

from __future__ import annotations

from dataclasses import dataclass

from scaffold import catalog
from scaffold.answers import Answers

LARGE_IDLE = 0.1


@dataclass(frozen=True)
class Rounds:
    """How `grains` micro-batches of a step are shared by `ranks` data-parallel ranks."""

    grains: int
    ranks: int

    @property
    def rounds(self) -> int:
        """Forward and backward passes of each rank in a step."""
        return -(-self.grains // self.ranks)

    @property
    def idle(self) -> float:
        """The share of all passes that have no micro-batch of their own, 0 to 1."""
        return 1 - self.grains / (self.rounds * self.ranks)


@dataclass(frozen=True)
class Topology:
    """Where a project runs and how a step is cut up."""

    nodes: int
    gpus_per_node: int
    global_batch_size: int
    micro_batch_size: int
    tensor_parallel: int = 1

    @classmethod
    def of(cls, answers: Answers) -> Topology:
        """The topology that these answers describe."""
        return cls(
            answers.nodes,
            answers.gpus_per_node,
            answers.global_batch_size,
            catalog.MODELS[answers.model].micro_batch_size,
            answers.gpus_per_node if answers.strategy == "fsdp-tp" else 1,
        )

    @property
    def ranks(self) -> int:
        """The world size."""
        return self.nodes * self.gpus_per_node

    @property
    def data_parallel_ranks(self) -> int:
        """Ranks that take micro-batches of their own; tensor-parallel ranks share theirs."""
        return self.ranks // self.tensor_parallel

    @property
    def grains(self) -> int:
        """Micro-batches in a step, whatever the topology."""
        return self.global_batch_size // self.micro_batch_size

    def rounds(self, ranks: int | None = None) -> Rounds:
        """The rounds on these data-parallel ranks, or on `ranks` of them."""
        return Rounds(self.grains, ranks or self.data_parallel_ranks)

    def better_micro_batch(self) -> int | None:
        """A micro-batch near the present one that idles far less; None where little is to gain."""
        if self.rounds().idle <= LARGE_IDLE:
            return None
        batch, limit = self.global_batch_size, 2 * self.micro_batch_size
        options = [
            (Rounds(batch // m, self.data_parallel_ranks).idle, -m)
            for m in range(1, min(batch, limit) + 1)
            if batch % m == 0
        ]
        idle, best = min(options)
        return -best if idle < self.rounds().idle / 2 else None
