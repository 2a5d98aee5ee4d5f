"""torchvision's residual networks (He et al. 2015, https://arxiv.org/abs/1512.03385)."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

Batch = tuple[Tensor, Tensor]  # images (batch, channels, height, width), classes (batch,)


@dataclass
class ModelConfig:
    name: Literal["resnet18", "resnet34", "resnet50"] = "resnet18"  # which of torchvision's
    stem: Literal["auto", "imagenet", "small"] = "auto"  # auto: small for images up to 64 pixels
    zero_init_residual: bool = True  # every residual block starts as the identity


class LastNorm(nn.BatchNorm2d):
    """The last norm of a residual branch, starting at zero so that its block starts as the identity.

    A class of its own, because `initialise` sees one module at a time and must recognise it.
    """


def build(config: ModelConfig, sizes: dict[str, int]) -> nn.Module:
    """The network for images of `sizes["channels"]` and `sizes["image_size"]`, `sizes["classes"]`.

    The ImageNet stem (7x7 convolution of stride 2, max-pooling) shrinks an image fourfold before
    the first block and leaves little of a small one; the small stem (3x3, stride 1) keeps its size.
    """
    small = config.stem == "small" or (config.stem == "auto" and sizes["image_size"] <= 64)
    model = torchvision.models.get_model(config.name, weights=None, num_classes=sizes["classes"])
    kernel, stride = (3, 1) if small else (7, 2)
    model.conv1 = nn.Conv2d(sizes["channels"], 64, kernel, stride, padding=kernel // 2, bias=False)
    if small:
        model.maxpool = nn.Identity()
    if config.zero_init_residual:
        for block in model.modules():
            if isinstance(block, BasicBlock):
                block.bn2 = LastNorm(block.bn2.num_features)
            elif isinstance(block, Bottleneck):
                block.bn3 = LastNorm(block.bn3.num_features)
    return model


def initialise(name: str, module: nn.Module) -> None:
    """Set the parameters and buffers that `module` holds itself, as torchvision does.

    The model is built without memory and materialised module by module, each from a seed made of
    its `name`: so the same weights arise however many ranks share them.
    """
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(module, (nn.BatchNorm2d, nn.Linear)):
        module.reset_parameters()  # running statistics included
        if isinstance(module, LastNorm):
            nn.init.zeros_(module.weight)
    elif [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        raise NotImplementedError(f"initialise() in model.py does not know {name}: {type(module)}")


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The units of sharding, activation checkpointing and compilation: (qualified name, module)."""
    kinds = (BasicBlock, Bottleneck)
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]


def count(batch: Batch) -> int:
    """How many targets this batch has; the loss is a mean over them."""
    return len(batch[1])


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The sum of the losses and the number of targets, both without dimensions.

    Sums, not means: only the loop knows how many targets the whole global batch has.
    """
    images, targets = batch
    logits = model(images).float()  # sums of losses need float32, whatever the model computes in
    return F.cross_entropy(logits, targets, reduction="sum"), targets.new_full((), len(targets))


@torch.no_grad()
def score(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Sums for evaluation: `loss`, `count` and `correct`."""
    images, targets = batch
    logits = model(images).float()
    return {
        "loss": F.cross_entropy(logits, targets, reduction="sum"),
        "count": targets.new_full((), len(targets)),
        "correct": (logits.argmax(-1) == targets).sum(),
    }
