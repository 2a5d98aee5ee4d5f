"""The strategy: tensor parallel inside a group of ranks (a node), FSDP over the groups.

The ranks of a group see the same samples and each computes a slice of every large matrix.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from .distributed import LOCAL_WORLD_SIZE, check_group_size, compute_dtype
from .model import TENSOR_PARALLEL, blocks, initialise
from .model import build as build_model
from .weights import checkpoint_activations, materialise, without_memory

# Both are about speed alone, and come once a rank: the logits are a view that nothing writes to, and
# the gradient's norm is summed over one dimension of the mesh after the other.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

if TYPE_CHECKING:
    from .config import Config


@dataclass
class ParallelConfig:
    tp_size: int = 0  # ranks that split a matrix; 0: those of one node
    reshard_after_forward: bool = (
        True  # false: faster, but a block's weights stay until its backward
    )


class Replicated(ParallelStyle):
    """Keeps the whole weights of a module on every rank of the group, as DTensors like the split ones."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(module: nn.Module, inputs: tuple[torch.Tensor, ...], mesh: DeviceMesh) -> object:
            return tuple(
                DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs
            )

        def leave(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
            return output.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)  # type: ignore[arg-type]


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
        tp_size = config.parallel.tp_size or LOCAL_WORLD_SIZE
        check_group_size("parallel.tp_size", tp_size)
        mesh = (dist.get_world_size() // tp_size, tp_size)
        self.mesh = init_device_mesh(device.type, mesh, mesh_dim_names=("shard", "tensor"))

    def data_parallel(self) -> tuple[int, int]:
        """This rank's place among the ranks that see different samples, and their number."""
        return self.mesh["shard"].get_local_rank(), self.mesh["shard"].size()

    def build(self, sizes: dict[str, int]) -> nn.Module:
        """The model on this rank's device, its first weights the same on any number of ranks.

        One block at a time gets memory, values and shards, so no rank ever holds the whole model.
        """
        config = self.config
        model = without_memory(build_model, config.model, sizes)
        for name, block in blocks(model):
            materialise(block, name, self.device, config.run.seed, initialise)
            parallelize_module(block, self.mesh["tensor"], self._plan(block))
            if config.train.compile:
                # In place, so that no name in a checkpoint changes. Batches have two sizes at most.
                block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
            if config.train.activation_checkpointing:
                checkpoint_activations(block)
            self._shard(block)
        materialise(model, "", self.device, config.run.seed, initialise)
        parallelize_module(model, self.mesh["tensor"], self._plan(model))
        self._shard(model)  # the root last: it takes what is left, embeddings, norms and the head
        return model

    def _plan(self, module: nn.Module) -> dict[str, ParallelStyle]:
        """How the ranks of a group split each submodule of `module` that holds weights.

        What the model does not split is replicated, so that every weight lies on one mesh and the
        norm of the whole gradient can be taken.
        """
        styles = {"column": ColwiseParallel, "row": RowwiseParallel}
        plan: dict[str, ParallelStyle] = {}
        for name, child in module.named_modules():
            own = list(child.parameters(recurse=False))
            if own and not any(isinstance(parameter, DTensor) for parameter in own):
                style = styles.get(TENSOR_PARALLEL.get(name.split(".")[-1], ""))
                plan[name] = style() if style else Replicated()
        return plan

    def _shard(self, module: nn.Module) -> None:
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        reshard = self.config.parallel.reshard_after_forward
        mesh = self.mesh["shard"]
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)

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
