"""The strategy: HSDP. The ranks of a group (a node) shard the model, and the groups are replicas.

The frequent messages, which gather weights, stay inside a node; between nodes only gradients travel.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from .distributed import LOCAL_WORLD_SIZE, check_group_size, compute_dtype
from .model import blocks, initialise
from .model import build as build_model
from .weights import (
    batch_norms,
    check_replicas,
    checkpoint_activations,
    materialise,
    without_memory,
)

if TYPE_CHECKING:
    from .config import Config


@dataclass
class ParallelConfig:
    shard_size: int = 0  # ranks that share the weights; 0: those of one node
    reshard_after_forward: bool = (
        True  # false: faster, but a block's weights stay until its backward
    )


class Parallel:
    """How the model is spread over the ranks; the training loop knows no more than these methods."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        self.dtype = compute_dtype(config.train.precision, device)
        # fp16 gradients underflow unless the loss is scaled up; the scaler is idle otherwise. It starts
        # low and grows: an overflow at the start would skip a step on some numbers of ranks only.
        self.scaler = torch.amp.GradScaler(
            device.type, init_scale=2.0**10, enabled=self.dtype == torch.float16
        )
        shard_size = config.parallel.shard_size or LOCAL_WORLD_SIZE
        check_group_size("parallel.shard_size", shard_size)
        replicas = dist.get_world_size() // shard_size
        self.mesh = init_device_mesh(
            device.type, (replicas, shard_size), mesh_dim_names=("replicate", "shard")
        )

    def data_parallel(self) -> tuple[int, int]:
        """This rank's place among the ranks that see different samples, and their number."""
        return dist.get_rank(), dist.get_world_size()

    def build(self, sizes: dict[str, int]) -> nn.Module:
        """The model on this rank's device, its first weights the same on any number of ranks.

        One block at a time gets memory, values and shards, so no rank ever holds the whole model.
        """
        config = self.config
        model = without_memory(build_model, config.model, sizes)
        for name, block in blocks(model):
            materialise(block, name, self.device, config.run.seed, initialise)
            if config.train.compile:
                # In place, so that no name in a checkpoint changes. Batches have two sizes at most.
                block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
            if config.train.activation_checkpointing:
                checkpoint_activations(block)
            self._shard(block)
        materialise(model, "", self.device, config.run.seed, initialise)
        self._shard(model)  # the root last: it takes what is left, embeddings, norms and the head
        check_replicas(model, self.mesh["replicate"].get_group())
        return model

    def _shard(self, module: nn.Module) -> None:
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        if self.dtype != torch.float32:
            # BatchNorm's statistics need float32, so each is a unit of its own.
            full = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=self.dtype)
            for norm in batch_norms(module):
                if not isinstance(norm, FSDPModule):
                    fully_shard(norm, mesh=self.mesh, mp_policy=full)
        reshard = self.config.parallel.reshard_after_forward
        fully_shard(module, mesh=self.mesh, mp_policy=policy, reshard_after_forward=reshard)

    def autocast(self) -> AbstractContextManager[object]:
        """Nothing to do: the policy given to `fully_shard` casts weights and inputs."""
        return contextlib.nullcontext()

    def sync(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Around a micro-batch, forward pass included: only the `last` of a step sends gradients."""
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last)  # read by the forward pass, so set before it
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()

    def clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """The norm of the whole gradient, which is scaled down to `max_norm` (0: only measured)."""
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or torch.inf)
        # All ranks must reach this: it sums over them.
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float
    ) -> torch.Tensor:
        """Clips, updates the weights, clears the gradients; returns the gradient's norm."""
        self.scaler.unscale_(optimizer)  # before clipping: the norm must be the true one
        norm = self.clip(model, max_norm)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()
        return norm
