"""The strategy: DDP. Every rank holds the whole model and the ranks average their gradients."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .distributed import compute_dtype
from .model import blocks, initialise
from .model import build as build_model
from .weights import check_replicas, checkpoint_activations, materialise, without_memory

if TYPE_CHECKING:
    from .config import Config


@dataclass
class ParallelConfig:
    find_unused_parameters: bool = (
        False  # for a model that leaves some parameters out of some steps
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

    def data_parallel(self) -> tuple[int, int]:
        """This rank's place among the ranks that see different samples, and their number."""
        return dist.get_rank(), dist.get_world_size()

    def build(self, sizes: dict[str, int]) -> nn.Module:
        """The model on this rank's device, its first weights the same on any number of ranks."""
        config = self.config
        model = without_memory(build_model, config.model, sizes)
        materialise(model, "", self.device, config.run.seed, initialise)
        check_replicas(model)
        for _, block in blocks(model):
            if config.train.compile:
                # In place, so that no name in a checkpoint changes. Batches have two sizes at most.
                block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
            if config.train.activation_checkpointing:
                checkpoint_activations(block)
        return DistributedDataParallel(
            model,
            device_ids=None if self.device.type == "cpu" else [self.device.index],
            gradient_as_bucket_view=True,
            # BatchNorm's statistics are averaged before evaluation, not overwritten by rank 0's.
            forward_sync_buffers=False,
            find_unused_parameters=config.parallel.find_unused_parameters,
        )

    def autocast(self) -> AbstractContextManager[object]:
        """Runs a forward pass in the precision of the config; the weights stay in float32."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def sync(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Around a micro-batch, forward pass included: only the `last` of a step sends gradients."""
        assert isinstance(model, DistributedDataParallel)
        return contextlib.nullcontext() if last else model.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()

    def clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """The norm of the whole gradient, which is scaled down to `max_norm` (0: only measured)."""
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm or torch.inf)

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
