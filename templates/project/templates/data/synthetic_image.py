"""Images that are computed, not read: something to learn before your own data is there.

Each class is a direction, and an image of it is a wave in that direction, shifted at random, in a
random colour, under noise: no pixel alone tells the class.
"""

import math
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
    samples: int = 10_000  # images, held-out ones included
    image_size: int = 16  # pixels along each side
    classes: int = 8  # classes to tell apart
    noise: float = 0.5  # standard deviation of the noise; the waves' is 0.7
    seed: int = 0  # another seed, other images
    val_fraction: float = 0.1  # part of the images that is held out for evaluation
    workers: int = 2  # processes that load data, for each rank


class Waves(Dataset):
    """Images `first` to `first + length`, each computed from its index: (image (3, H, W), class)."""

    def __init__(self, config: DataConfig, first: int, length: int) -> None:
        self.config, self.first, self.length = config, first, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        config = self.config
        random = np.random.default_rng((config.seed, self.first + index))
        label = int(random.integers(config.classes))
        direction = math.pi * label / config.classes
        place = np.arange(config.image_size) * (2 * math.pi * 3 / config.image_size)  # three waves
        across, down = place * math.cos(direction), place * math.sin(direction)
        wave = np.sin(across + down[:, None] + random.uniform(0, 2 * math.pi))
        colour = random.uniform(0.5, 1.5, size=(3, 1, 1))
        noise = random.normal(scale=config.noise, size=(3, *wave.shape))
        return torch.from_numpy((colour * wave + noise).astype(np.float32)), label


class Data(NamedTuple):
    train: Waves
    val: Waves
    sizes: dict[str, int]
    identity: str  # changes when the data does


def build(config: DataConfig, project: Path) -> Data:
    """The training images and the held-out images, alike but none the same."""
    if config.path:
        raise UserError("data.path is set, but this data set is synthetic and reads nothing")
    if config.samples < 2 or config.image_size < 1 or config.classes < 2:
        raise UserError("data.samples and data.classes start at 2, data.image_size at 1")
    # Images are independent of each other, so the last ones are as good a choice as any.
    val = min(max(1, round(config.samples * config.val_fraction)), config.samples - 1)
    train = config.samples - val
    return Data(
        Waves(config, 0, train),
        Waves(config, train, val),
        {"channels": 3, "image_size": config.image_size, "classes": config.classes},
        f"synthetic images, seed {config.seed}: {train} + {val} of {config.image_size} pixels, "
        f"{config.classes} classes, noise {config.noise}",
    )
