"""A decoder-only transformer as language models are built today.

Pre-norm with RMSNorm, rotary positions (https://arxiv.org/abs/2104.09864), a SwiGLU perceptron
(https://arxiv.org/abs/2002.05202) and no biases.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # tokens (batch, time), next tokens (batch, time)
IGNORE = -100  # a target that does not count: padding

# How tensor parallelism splits the matrices of a block, by name: by their outputs, then by their
# inputs, so that a pair of them needs one message. What is not here is whole on every rank.
TENSOR_PARALLEL = {
    **dict.fromkeys(("wq", "wk", "wv", "w1", "w3"), "column"),
    **dict.fromkeys(("wo", "w2"), "row"),
}


@dataclass
class ModelConfig:
    layers: int = 4  # transformer blocks
    width: int = 128  # features of each token
    heads: int = 8  # attention heads; width / heads must be even
    hidden: int = 384  # hidden width of each block's perceptron; about 8/3 of width is usual
    dropout: float = 0.0  # of the embedding and of each residual branch's output
    tied: bool = True  # the output layer uses the embedding's weights


class Linear(nn.Linear):
    """A linear layer without bias that knows the standard deviation its weights start with.

    `initialise` sees one module at a time: what it must know stands in the module.
    """

    def __init__(self, inputs: int, outputs: int, scale: float = 1.0) -> None:
        super().__init__(inputs, outputs, bias=False)
        # Outputs as large as inputs. GPT-2's fixed 0.02 is this for a width of 2500; a small model
        # would start with next to no attention and take long to find it.
        self.std = scale * inputs**-0.5


def rotate(x: Tensor) -> Tensor:
    """`x` (batch, heads, time, head_dim) with each pair of features turned by its token's position.

    The dot product of two rotated vectors depends on their distance alone. Computed from scratch,
    always in float32: a table would be one more buffer to keep out of bfloat16, and costs more to
    carry through sharding and compilation than these few angles cost to compute.
    """
    half = x.shape[-1] // 2
    step = torch.arange(half, device=x.device, dtype=torch.float32)
    time = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    angle = time[:, None] * 10_000 ** (-step / half)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal multi-head self-attention of (batch, time, width)."""

    def __init__(self, config: ModelConfig, residual_scale: float) -> None:
        super().__init__()
        self.head_dim = config.width // config.heads
        self.wq = Linear(config.width, config.width)
        self.wk = Linear(config.width, config.width)
        self.wv = Linear(config.width, config.width)
        self.wo = Linear(config.width, config.width, residual_scale)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, heads, time, head_dim). The number of heads is left to view(): under tensor
        # parallelism a rank's projections hold only some of them.
        q, k, v = (
            project(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: the values `w3(x)`, gated by `silu(w1(x))`, projected back by `w2`."""

    def __init__(self, config: ModelConfig, residual_scale: float) -> None:
        super().__init__()
        self.w1 = Linear(config.width, config.hidden)
        self.w3 = Linear(config.width, config.hidden)
        self.w2 = Linear(config.hidden, config.width, residual_scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One transformer block: attention, then a perceptron, each added to what came in."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # Each block adds two branches: scaled down, their sum starts no larger than one of them.
        residual_scale = (2 * config.layers) ** -0.5
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config, residual_scale)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.mlp = MLP(config, residual_scale)
        # Dropout only here and after the embedding, where tensor-parallel ranks hold the same
        # values: inside a branch each would drop out its own.
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Embedding(nn.Embedding):
    """Tokens in, vectors out; vectors in, logits out: with tied weights it is the output layer too.

    Tied by using the weights twice, not by a second name for them: one parameter to initialise,
    shard, save and export.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) if x.is_floating_point() else super().forward(x)


class GPT(nn.Module):
    """Tokens (batch, time) in, logits (batch, time, vocab_size) of each next token out."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.embedding = Embedding(vocab_size, config.width)
        self.scale = config.width**0.5
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = None if config.tied else Linear(config.width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        # The weights start small, so that the logits do where they are tied; scaled up, as in Gemma,
        # what goes in is nearly as large as what the first branches add to it.
        x = self.dropout(self.embedding(tokens) * self.scale)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.embedding(x) if self.head is None else self.head(x)


def build(config: ModelConfig, sizes: dict[str, int]) -> nn.Module:
    """The model for tokens below `sizes["vocab_size"]`; any length of context will do."""
    if config.heads < 1 or config.width % (2 * config.heads):
        raise ValueError(
            f"model.width = {config.width} must be a multiple of twice model.heads = "
            f"{config.heads}: rotary positions turn pairs of features"
        )
    if not 0 <= config.dropout < 1:
        raise ValueError(f"model.dropout = {config.dropout} must be at least 0 and less than 1")
    return GPT(config, sizes["vocab_size"])


def initialise(name: str, module: nn.Module) -> None:
    """Set the parameters and buffers that `module` holds itself, not those of its children.

    The model is built without memory and materialised module by module, each from a seed made of
    its `name`: so the same weights arise however many ranks share them.
    """
    if isinstance(module, Linear):
        nn.init.normal_(module.weight, std=module.std)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, nn.RMSNorm):
        module.reset_parameters()
    elif [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        raise NotImplementedError(f"initialise() in model.py does not know {name}: {type(module)}")


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The units of sharding, activation checkpointing and compilation: (qualified name, module)."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Block)]


def count(batch: Batch) -> int:
    """How many real tokens this batch predicts; the loss is a mean over them."""
    return int((batch[1] != IGNORE).sum())


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The sum of the losses and the number of real tokens, both without dimensions.

    Sums, not means: only the loop knows how many tokens the whole global batch has.
    """
    tokens, targets = batch
    logits = model(tokens).float()  # sums of losses need float32, whatever the model computes in
    total = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return total, (targets != IGNORE).sum()


@torch.no_grad()
def score(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Sums for evaluation: `loss` and `count`."""
    total, tokens = loss(model, batch)
    return {"loss": total, "count": tokens}
