"""Model and data parts as a generated project holds them, importable from the tests."""

from __future__ import annotations

import functools
import importlib
import math
import shutil
import sys
import tempfile
import zlib
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

PROJECT = Path(__file__).parents[1] / "templates" / "project"
PARTS = PROJECT / "templates"
PACKAGE = PROJECT / "{{cookiecutter.project_slug}}" / "{{cookiecutter.package}}"
MODELS = ("mlp", "resnet", "vit", "gpt")
DATA = ("csv", "image_folder", "text", "synthetic_tabular", "synthetic_image", "synthetic_text")

_home = tempfile.TemporaryDirectory(prefix="parts-")


class Parts(NamedTuple):
    model: ModuleType
    data: ModuleType
    UserError: type[Exception]


@functools.cache
def load(model: str, data: str) -> Parts:
    """The modules `model` and `data` of a package that holds these two parts."""
    name = f"parts_{model}_{data}"
    package = Path(_home.name) / name
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PARTS / "model" / f"{model}.py", package / "model.py")
    shutil.copy(PARTS / "data" / f"{data}.py", package / "data.py")
    if _home.name not in sys.path:
        sys.path.append(_home.name)
    importlib.invalidate_caches()
    modules = [importlib.import_module(f"{name}.{m}") for m in ("model", "data", "distributed")]
    return Parts(modules[0], modules[1], modules[2].UserError)


def materialise(part: ModuleType, model: nn.Module, seed: int = 0) -> nn.Module:
    """Gives a model on the meta device its first values, as generated projects do.

    Memory is poisoned first: what `initialise` leaves out shows.
    """
    with torch.no_grad():
        for name, module in model.named_modules():
            module.to_empty(device="cpu", recurse=False)
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.fill_(math.nan if tensor.is_floating_point() else -12345)
            torch.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            part.initialise(name, module)
    return model


def new_model(
    part: ModuleType, sizes: dict[str, int], seed: int = 0, **config: object
) -> nn.Module:
    with torch.device("meta"):
        model = part.build(part.ModelConfig(**config), sizes)
    return materialise(part, model, seed)


def batch_of(data: Dataset, indices: list[int]) -> list[torch.Tensor]:
    return default_collate([data[index] for index in indices])


def train(
    part: ModuleType, model: nn.Module, data: Dataset, steps: int, batch_size: int, lr: float
) -> list[float]:
    """The mean loss of each step of a plain training loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    order = torch.Generator().manual_seed(0)
    losses = []
    model.train()
    for step in range(steps):
        warm = min(1.0, (step + 1) / 10)
        optimizer.param_groups[0]["lr"] = lr * warm * (1 - step / steps)
        indices = torch.randint(len(data), (batch_size,), generator=order)  # type: ignore[arg-type]
        batch = batch_of(data, indices.tolist())
        total, count = part.loss(model, batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append((total / count).item())
    return losses


def evaluate(
    part: ModuleType, model: nn.Module, data: Dataset, limit: int = 10**9
) -> dict[str, float]:
    """The mean of each score over the samples of `data`, or the first `limit` of them."""
    model.eval()
    n = min(len(data), limit)  # type: ignore[arg-type]
    sums: dict[str, float] = {}
    for start in range(0, n, 64):
        batch = batch_of(data, list(range(start, min(start + 64, n))))
        for name, value in part.score(model, batch).items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return {name: value / sums["count"] for name, value in sums.items() if name != "count"}
