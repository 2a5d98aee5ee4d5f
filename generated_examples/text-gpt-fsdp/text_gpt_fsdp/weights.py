"""What the weights are, whatever the strategy: first values, equal replicas, averaged statistics."""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from .distributed import UserError
from .sampler import seed_of

Initialise = Callable[[str, nn.Module], None]


def without_memory(build: Callable[..., nn.Module], *arguments: object) -> nn.Module:
    """The model that `build` makes, on the meta device; UserError where its config makes no sense."""
    try:
        with torch.device("meta"):
            return build(*arguments)
    except ValueError as error:
        raise UserError(str(error)) from error


@torch.no_grad()
def materialise(
    module: nn.Module, name: str, device: torch.device, seed: int, initialise: Initialise
) -> None:
    """Gives what is still on the meta device in `module` memory on `device` and its first values.

    Each submodule is seeded by its own name, so its values depend neither on the order of creation
    nor on the number of ranks. What is materialised already (a sharded block) is left alone.
    """
    for child_name, child in module.named_modules(prefix=name):
        own = [*child.parameters(recurse=False), *child.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in own):
            child.to_empty(device=device, recurse=False)  # uninitialised memory until the next line
            torch.manual_seed(seed_of(seed, child_name))
            initialise(child_name, child)


def check_replicas(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Raises RuntimeError unless the ranks of `group` start with the same weights.

    Replicas that differ train on without an error, and each reports another model's loss.
    """
    mine = torch.stack([_local(p).double().sum() for p in model.parameters()])
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group)
    names = [name for name, _ in model.named_parameters()]
    for place in (low != high).nonzero().flatten().tolist():
        raise RuntimeError(
            f"ranks start with other values of {names[place]}: is their code the same?"
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a shard of a DTensor


def checkpoint_activations(block: nn.Module) -> None:
    """Makes `block` recompute its activations in the backward pass instead of keeping them."""
    forward = block.forward
    # The second pass must not count into BatchNorm's running statistics again.
    frozen = contextlib.nullcontext if not batch_norms(block) else lambda: frozen_statistics(block)

    def recompute(*args: torch.Tensor) -> torch.Tensor:
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), frozen()),
        )

    block.forward = recompute  # type: ignore[method-assign]


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    return [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


@contextlib.contextmanager
def frozen_statistics(model: nn.Module, frozen: bool = True) -> Iterator[None]:
    """Puts BatchNorm's running statistics back on leaving: for a pass that must not count."""
    buffers = [b for norm in batch_norms(model) for b in norm.buffers()] if frozen else []
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:  # a recomputation is ended by an exception as soon as it has what it needs
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


@torch.no_grad()
def average_statistics(model: nn.Module, grains: int) -> None:
    """Makes BatchNorm's running statistics the same on every rank, before they are used or saved.

    Each rank counts by the `grains` it runs per step: one that runs none has nothing to say.
    """
    for norm in batch_norms(model):
        for buffer in (norm.running_mean, norm.running_var):
            assert buffer is not None
            weighted = torch.cat([buffer.float() * grains, buffer.new_full((1,), grains)])
            dist.all_reduce(weighted)  # all ranks must reach this
            buffer.copy_(weighted[:-1] / weighted[-1])


def make_optimizer(model: nn.Module, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW, with weight decay on matrices and none on norms and biases."""
    groups: dict[float, list[nn.Parameter]] = {weight_decay: [], 0.0: []}
    for parameter in model.parameters():
        groups[weight_decay if parameter.dim() >= 2 else 0.0].append(parameter)
    return torch.optim.AdamW(
        [{"params": params, "weight_decay": decay} for decay, params in groups.items() if params],
        betas=(0.9, 0.95),
        fused=True,  # one kernel for all parameters; the loop sets the learning rate
    )
