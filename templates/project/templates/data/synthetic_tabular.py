"""A table that is computed, not read: something to learn before your own data is there.

Each class has two centres in space, and a row is a noisy point around one of them: no straight
line separates the classes, a small network does so nearly without error.
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
    samples: int = 20_000  # rows, held-out ones included
    features: int = 16  # columns
    classes: int = 4  # classes to tell apart
    seed: int = 0  # another seed, another table
    val_fraction: float = 0.1  # part of the rows that is held out for evaluation
    workers: int = 2  # processes that load data, for each rank


class Points(Dataset):
    """Rows `first` to `first + length`, each computed from its index: (features (F,), class)."""

    def __init__(self, config: DataConfig, first: int, length: int) -> None:
        self.config, self.first, self.length = config, first, length
        centres = (config.classes, 2, config.features)
        self.centres = np.random.default_rng(config.seed).normal(size=centres)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        random = np.random.default_rng((self.config.seed, self.first + index))
        label, centre = int(random.integers(self.config.classes)), random.integers(2)
        row = self.centres[label, centre] + random.normal(size=self.config.features)
        return torch.from_numpy(row.astype(np.float32)), label


class Data(NamedTuple):
    train: Points
    val: Points
    sizes: dict[str, int]
    identity: str  # changes when the data does


def build(config: DataConfig, project: Path) -> Data:
    """The training rows and the held-out rows, alike but none the same."""
    if config.path:
        raise UserError("data.path is set, but this data set is synthetic and reads nothing")
    if config.samples < 2 or config.features < 1 or config.classes < 2:
        raise UserError("data.samples and data.classes start at 2, data.features at 1")
    # Rows are independent of each other, so the last ones are as good a choice as any.
    val = min(max(1, round(config.samples * config.val_fraction)), config.samples - 1)
    train = config.samples - val
    return Data(
        Points(config, 0, train),
        Points(config, train, val),
        {"features": config.features, "outputs": config.classes},
        f"synthetic table, seed {config.seed}: {train} + {val} x {config.features}, "
        f"{config.classes} classes",
    )
