"""Every combination that scaffold accepts generates a project that trains, evaluates and exports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import write_project
from helpers import accepted
from ranks import Ranks
from scaffold import catalog

TINY = {
    "gpt": "--model.layers=1 --model.width=32 --model.heads=2 --model.hidden=64",
    "vit": "--model.layers=1 --model.width=32 --model.heads=2 --data.image_size=16",
    "resnet": "--data.image_size=8",  # fp16 convolutions are 100 times slower on a CPU
    "mlp": "--model.layers=1 --model.width=16",
}
SHAPES = sorted({(a.model, a.data, a.strategy, a.nodes) for a in accepted()})


def make_data(kind: str, folder: Path) -> list[str]:
    """A tiny data set in `folder`, and the options that name it."""
    if kind == "csv":
        rows = [f"{i % 7},{i % 5},{'even' if i % 2 == 0 else 'odd'}" for i in range(40)]
        (folder / "table.csv").write_text("a,b,target\n" + "\n".join(rows) + "\n")
        return [f"--data.path={folder / 'table.csv'}"]
    if kind == "image-folder":
        from PIL import Image

        for i in range(40):
            (folder / f"class{i % 2}").mkdir(exist_ok=True)
            colour = (40 + 150 * (i % 2), 3 * i, 100)
            Image.new("RGB", (20, 20), colour).save(folder / f"class{i % 2}" / f"{i}.png")
        return [f"--data.path={folder}"]
    if kind == "text":
        (folder / "squares.txt").write_text(
            "".join(f"{i} squared is {i * i}. " for i in range(300))
        )
        return [f"--data.path={folder}", "--data.context=16", "--data.val_fraction=0.3"]
    return ["--data.samples=40"]


@pytest.mark.parametrize(
    ("model", "data", "strategy", "nodes"), SHAPES, ids=lambda value: str(value)
)
def test_every_accepted_combination_trains_three_steps(
    model: str, data: str, strategy: str, nodes: int, ranks: Ranks, tmp_path: Path
) -> None:
    project = write_project(
        tmp_path / "demo", model=model, data=data, strategy=strategy, nodes=nodes
    )
    files = tmp_path / "files"
    files.mkdir()
    options = [*make_data(data, files), *TINY[model].split()]
    options += "--data.workers=0 --train.steps=3 --train.log_every=1 --train.eval_every=0".split()
    options += "--train.global_batch_size=4 --train.micro_batch_size=2".split()
    if data == "text":
        assert ranks.run(project, 1, *options, script="prepare.py").ok
    losses: dict[str, list[float]] = {}
    for precision in catalog.PRECISIONS:
        run = tmp_path / precision
        result = ranks.run(
            project,
            2,
            f"--run.dir={run}",
            f"--train.precision={precision}",
            *options,
            local_world=2 // nodes,
        )
        assert result.ok, result
        lines: list[dict[str, Any]] = [
            json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
        ]
        losses[precision] = [line["loss"] for line in lines if "loss" in line]
        assert len(losses[precision]) == 3
        assert lines[-1]["eval_samples"] > 0
        assert (run / "export" / "model.safetensors").is_file()
        assert (run / "checkpoints" / "step_00000003" / "state.json").is_file()
    for precision, found in losses.items():
        # resnet on micro-batches of 2 turns a rounding into more, through its BatchNorm.
        tolerance = 0.05 if model == "resnet" else 0.01
        assert found == pytest.approx(losses["fp32"], rel=tolerance), precision


def test_every_weight_moves_at_the_first_step(
    ranks: Ranks, make_project: Callable[..., Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    for model in catalog.MODELS:
        for strategy in ("ddp", "fsdp"):
            project = make_project(f"{model}_{strategy}", model=model, strategy=strategy)
            options = [*TINY[model].split(), "--data.samples=40", "--data.workers=0"]
            options += "--train.precision=fp32 --train.global_batch_size=4".split()
            options += "--train.micro_batch_size=2 --train.warmup_steps=1 --train.steps=3".split()
            weights = []
            for steps in (1, 2):
                run = tmp_path / f"{model}-{strategy}-{steps}"
                args = [f"--run.dir={run}", f"--train.stop_at={steps}", *options]
                result = ranks.run(project, 2, *args)
                assert result.ok, result
                weights.append(load_file(run / "export" / "model.safetensors"))
            for name, value in weights[0].items():
                if value.is_floating_point() and "running" not in name:
                    assert not value.equal(weights[1][name]), f"{model} {strategy}: {name}"
