"""A multilayer perceptron for tables: classification, or regression where there is one output."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # features (batch, features), targets (batch,)


@dataclass
class ModelConfig:
    layers: int = 3  # hidden layers
    width: int = 128  # units in each hidden layer
    dropout: float = 0.1  # part of the hidden units that is zeroed in training
    norm: Literal["layer", "none"] = "layer"  # LayerNorm after each hidden linear layer, or nothing


class Layer(nn.Module):
    """A hidden layer: linear, norm, GELU, dropout."""

    def __init__(self, inputs: int, config: ModelConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, config.width)
        self.norm = nn.LayerNorm(config.width) if config.norm == "layer" else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(F.gelu(self.norm(self.linear(x))))


class MLP(nn.Module):
    """Features (batch, features) in, logits or predictions (batch, outputs) out."""

    def __init__(self, config: ModelConfig, features: int, outputs: int) -> None:
        super().__init__()
        inputs = [features] + [config.width] * (config.layers - 1)
        self.layers = nn.ModuleList(Layer(n, config) for n in inputs)
        self.head = nn.Linear(config.width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(config: ModelConfig, sizes: dict[str, int]) -> nn.Module:
    """The model for data with `sizes["features"]` columns and `sizes["outputs"]` classes (1: regression)."""
    if config.layers < 1 or config.width < 1:
        raise ValueError(
            f"model.layers = {config.layers} and model.width = {config.width} must be at least 1"
        )
    if not 0 <= config.dropout < 1:
        raise ValueError(f"model.dropout = {config.dropout} must be at least 0 and less than 1")
    return MLP(config, sizes["features"], sizes["outputs"])


def initialise(name: str, module: nn.Module) -> None:
    """Set the parameters and buffers that `module` holds itself, not those of its children.

    The model is built without memory and materialised module by module, each from a seed made of
    its `name`: so the same weights arise however many ranks share them.
    """
    if isinstance(module, (nn.Linear, nn.LayerNorm)):
        module.reset_parameters()  # PyTorch's defaults suit a small perceptron
    elif [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        raise NotImplementedError(f"initialise() in model.py does not know {name}: {type(module)}")


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The units of sharding, activation checkpointing and compilation: (qualified name, module)."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Layer)]


def count(batch: Batch) -> int:
    """How many targets this batch has; the loss is a mean over them."""
    return len(batch[1])


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The sum of the losses and the number of targets, both without dimensions.

    Sums, not means: only the loop knows how many targets the whole global batch has.
    """
    total, _ = _evaluate(model, batch)
    return total, batch[1].new_full((), len(batch[1]))


@torch.no_grad()
def score(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Sums for evaluation: `loss`, `count` and, for classification, `correct`."""
    targets = batch[1]
    total, outputs = _evaluate(model, batch)
    sums = {"loss": total, "count": targets.new_full((), len(targets))}
    if outputs.shape[-1] > 1:
        sums["correct"] = (outputs.argmax(-1) == targets).sum()
    return sums


def _evaluate(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    features, targets = batch
    outputs = model(features).float()  # sums of losses need float32, whatever the model computes in
    if outputs.shape[-1] == 1:
        return F.mse_loss(outputs.squeeze(-1), targets, reduction="sum"), outputs
    return F.cross_entropy(outputs, targets, reduction="sum"), outputs
