"""Token sequences that are computed, not read: something to learn before your own data is there.

A sequence counts up from a random token by a stride of its own, round a circle of `vocab_size`
tokens, and now and then jumps to another token. A model soon learns which strides there are; to
predict better than that it has to attend to the tokens before, and read off the stride.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .distributed import UserError


@dataclass
class DataConfig:
    path: str = ""  # stays empty: nothing is read
    samples: int = 10_000  # sequences, held-out ones included
    context: int = 64  # tokens in each
    vocab_size: int = 64  # different tokens
    strides: int = 8  # different strides: 1, 2, ...
    noise: float = 0.1  # part of the tokens that jump: the loss cannot fall far below 10 % of ln 64
    seed: int = 0  # another seed, other sequences
    val_fraction: float = 0.1  # part of the sequences that is held out for evaluation
    workers: int = 2  # processes that load data, for each rank


class Counting(Dataset):
    """Sequences `first` to `first + length`, each computed from its index.

    An item is (tokens (context,) int64, next tokens (context,) int64).
    """

    def __init__(self, config: DataConfig, first: int, length: int) -> None:
        self.config, self.first, self.length = config, first, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        config = self.config
        random = np.random.default_rng((config.seed, self.first + index))
        jump = random.random(config.context + 1) < config.noise
        steps = np.where(
            jump,
            random.integers(config.vocab_size, size=jump.shape),
            random.integers(1, config.strides + 1),  # one stride for the whole sequence
        )
        start = random.integers(config.vocab_size)
        tokens = torch.from_numpy((start + steps.cumsum()) % config.vocab_size)
        return tokens[:-1], tokens[1:]


class Data(NamedTuple):
    train: Counting
    val: Counting
    sizes: dict[str, int]
    identity: str  # changes when the data does


def build(config: DataConfig, project: Path) -> Data:
    """The training sequences and the held-out sequences, alike but none the same."""
    if config.path:
        raise UserError("data.path is set, but this data set is synthetic and reads nothing")
    if config.samples < 2 or config.context < 1 or config.strides < 1 or config.vocab_size < 2:
        raise UserError(
            "data.samples and data.vocab_size start at 2, data.context and data.strides at 1"
        )
    # Sequences are independent of each other, so the last ones are as good a choice as any.
    val = min(max(1, round(config.samples * config.val_fraction)), config.samples - 1)
    train = config.samples - val
    return Data(
        Counting(config, 0, train),
        Counting(config, train, val),
        {"vocab_size": config.vocab_size, "context": config.context},
        f"synthetic text, seed {config.seed}: {train} + {val} x {config.context} of "
        f"{config.vocab_size} tokens, {config.strides} strides, noise {config.noise}",
    )
