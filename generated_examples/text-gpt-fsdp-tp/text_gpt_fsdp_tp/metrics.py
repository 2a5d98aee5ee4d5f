"""What a run reports: metrics.jsonl, TensorBoard and a progress bar on rank 0; the evaluation."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from .distributed import RANK, in_step, log, sum_over_ranks, to_device
from .model import score
from .parallel import Parallel
from .sampler import EvaluationSampler
from .storage import write


class Metrics:
    """Writes on rank 0, and does nothing on the others.

    Args:
        step: the completed steps; later lines in `metrics.jsonl`, which a resume repeats, are dropped.
        steps: where the progress bar ends.
    """

    def __init__(self, folder: Path, step: int, steps: int) -> None:
        self.enabled = RANK == 0
        if not self.enabled:
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and for rank 0 alone

        path = folder / "metrics.jsonl"
        kept = [line for line in _lines(path) if _step(line) <= step]
        write(path, "".join(kept))
        self.file = path.open("a", encoding="utf-8", buffering=1)  # a line reaches the disk at once
        self.writer = SummaryWriter(folder / "tensorboard", purge_step=step + 1)
        self.bar = tqdm(total=steps, initial=step, disable=None, unit="step", dynamic_ncols=True)

    def log(self, values: dict[str, Any]) -> None:
        """Adds a line: `step` and what was measured there."""
        if not self.enabled:
            return
        try:
            self.file.write(json.dumps(values) + "\n")
            for name, value in values.items():
                if name != "step":
                    self.writer.add_scalar(name, value, values["step"])
        except OSError as error:  # training is worth more than its report
            log.warning("the metrics of step %d are not all written: %s", values["step"], error)
        self.bar.update(values["step"] - self.bar.n)
        tqdm.write("  ".join(f"{name} {_short(value)}" for name, value in values.items()))

    def close(self) -> None:
        if self.enabled:
            for part in (self.file, self.writer, self.bar):
                with contextlib.suppress(OSError):
                    part.close()


def _lines(path: Path) -> list[str]:
    return (
        path.read_text(encoding="utf-8", errors="replace").splitlines(True) if path.exists() else []
    )


def _step(line: str) -> float:
    """The step of a line of metrics; infinity for half a line, which a crash can leave."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("}\n") else math.inf
    except (ValueError, KeyError):
        return math.inf


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: DataLoader, parallel: Parallel, device: torch.device
) -> dict[str, float]:
    """Scores `model` on every held-out sample once, on any number of ranks."""
    sampler = loader.batch_sampler
    assert isinstance(sampler, EvaluationSampler)
    totals: dict[str, Any] = {}  # sums on the device: reading one waits for the GPU
    model.eval()
    for turn, batch in enumerate(in_step(loader)):
        with parallel.autocast():  # under FSDP all ranks must reach this, with a batch or without
            scores = score(model, to_device(batch, device))
        scores["samples"] = torch.tensor(len(batch[0]))
        for name, value in scores.items():
            totals[name] = totals.get(name, 0) + value.double() * sampler.has_batch(turn)
    model.train()
    sums = dict(zip(totals, sum_over_ranks(*map(float, totals.values())), strict=True))
    replicas = sum_over_ranks(1.0)[0] / sampler.size  # ranks that saw the same samples
    result = {
        "eval_loss": sums["loss"] / sums["count"],
        "eval_samples": round(sums["samples"] / replicas),
    }
    if "correct" in sums:
        result["eval_accuracy"] = sums["correct"] / sums["count"]
    return result
