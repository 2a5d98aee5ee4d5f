"""A vision transformer (Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929).

Pre-norm blocks over square patches, a learned position for each, and the mean over the patches in
place of a class token (https://arxiv.org/abs/2205.01580).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # images (batch, channels, height, width), classes (batch,)


@dataclass
class ModelConfig:
    patch_size: int = 4  # pixels along a patch's side; must divide the image size (16 suits 224)
    layers: int = 4  # transformer blocks
    width: int = 128  # features of each patch
    heads: int = 4  # attention heads; must divide width
    mlp_ratio: int = 4  # hidden width of a block's perceptron, in widths
    dropout: float = 0.0  # of the embedding and of each residual branch's output


class Attention(nn.Module):
    """Multi-head self-attention of (batch, patches, width) over all patches."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, patches, 3 * width) -> three of (batch, heads, patches, width / heads)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One transformer block: attention, then a perceptron, each added to what came in."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.mlp_ratio * config.width
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, hidden), nn.GELU(), nn.Linear(hidden, config.width)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class ViT(nn.Module):
    """Images (batch, channels, height, width) in, logits (batch, classes) out."""

    def __init__(self, config: ModelConfig, channels: int, image_size: int, classes: int) -> None:
        super().__init__()
        # A convolution that steps by whole patches is one linear layer applied to each patch.
        self.patches = nn.Conv2d(channels, config.width, config.patch_size, config.patch_size)
        self.position = nn.Parameter(
            torch.empty(1, (image_size // config.patch_size) ** 2, config.width)
        )
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)  # (batch, patches, width)
        x = self.dropout(x + self.position)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


def build(config: ModelConfig, sizes: dict[str, int]) -> nn.Module:
    """The model for images of `sizes["channels"]` and `sizes["image_size"]`, `sizes["classes"]`."""
    if config.patch_size < 1 or sizes["image_size"] % config.patch_size:
        raise ValueError(
            f"model.patch_size = {config.patch_size} does not divide the image size "
            f"{sizes['image_size']}; change it or data.image_size"
        )
    if config.heads < 1 or config.width % config.heads:
        raise ValueError(f"model.heads = {config.heads} does not divide model.width {config.width}")
    if not 0 <= config.dropout < 1:
        raise ValueError(f"model.dropout = {config.dropout} must be at least 0 and less than 1")
    return ViT(config, sizes["channels"], sizes["image_size"], sizes["classes"])


def initialise(name: str, module: nn.Module) -> None:
    """Set the parameters and buffers that `module` holds itself, not those of its children.

    The model is built without memory and materialised module by module, each from a seed made of
    its `name`: so the same weights arise however many ranks share them.
    """
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
        nn.init.zeros_(module.bias)
    elif isinstance(module, (nn.Conv2d, nn.LayerNorm)):
        module.reset_parameters()
    elif isinstance(module, ViT):
        # As large as the patches' own features. The customary 0.02 leaves a small model blind to
        # positions for many steps.
        nn.init.normal_(module.position, std=0.5)
    elif [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        raise NotImplementedError(f"initialise() in model.py does not know {name}: {type(module)}")


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The units of sharding, activation checkpointing and compilation: (qualified name, module)."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Block)]


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
