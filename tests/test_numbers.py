"""The same numbers on any topology: the loss of every step, whatever the strategy and the ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ranks import Ranks

# The losses are float32 sums in another order: a few roundings (1.2e-7 each) apart.
ROUNDINGS = 2e-6
NODES = {"hsdp": 2, "fsdp-tp": 1}
COMMON = (
    "--train.precision=fp32 --train.log_every=1 --train.warmup_steps=1 --train.lr=3e-3 "
    "--data.val_fraction=0.2 --data.workers=0 --checkpoint.every=0 --train.eval_every=0"
).split()
# Batches of 12 = 6 micro-batches of 2, from 20 samples: 5 steps are 3 epochs and 3 batches straddle two.
BATCH = "--train.global_batch_size=12 --train.micro_batch_size=2 --train.steps=5".split()
MODELS = {
    "gpt": "--data.samples=25 --data.context=16 --model.layers=2 --model.width=32 --model.heads=4 "
    "--model.hidden=64 --model.dropout=0.1",
    "vit": "--data.image_size=16 --model.layers=2 --model.width=32 --model.heads=2 --model.dropout=0.1",
    "resnet": "--data.image_size=16",
    "mlp": "--data.samples=25 --model.width=16 --model.dropout=0.1",
}


def options(model: str, images: Path) -> list[str]:
    found = [*COMMON, *BATCH, *MODELS[model].split()]
    return found + ([f"--data.path={images}"] if model in ("vit", "resnet") else [])


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """25 noisy pictures of 2 classes, larger than the model sees: training crops and flips them."""
    folder = tmp_path_factory.mktemp("images")
    noise = np.random.default_rng(0)
    for i in range(25):
        picture = noise.integers(0, 256, (20, 20, 3), dtype=np.uint8)
        picture[:, :, i % 2] //= 3
        (folder / f"class{i % 2}").mkdir(exist_ok=True)
        Image.fromarray(picture).save(folder / f"class{i % 2}" / f"{i:02}.png")
    return folder


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The generated project for a model and a strategy, made once."""
    from conftest import write_project

    folder = tmp_path_factory.mktemp("projects")

    def make(model: str, strategy: str) -> Path:
        name = f"{model}_{strategy.replace('-', '_')}"
        if not (folder / name).exists():
            answers: dict[str, Any] = {"model": model, "strategy": strategy}
            answers["nodes"] = NODES.get(strategy, 1)
            if model in ("vit", "resnet"):
                answers["data"] = "image-folder"
            write_project(folder / name, **answers)
        return folder / name

    return make


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same(run: Path, expected: list[dict[str, Any]], tolerance: float = ROUNDINGS) -> None:
    found = metrics(run)
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.get("samples") == other.get("samples")
        assert one.get("epoch") == other.get("epoch")
        assert one.get("eval_samples") == other.get("eval_samples")
        if "loss" in one:
            assert one["loss"] == pytest.approx(other["loss"], rel=tolerance), one["step"]
            assert one["lr"] == other["lr"]
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=20 * tolerance)


RANKS = [
    *(("ddp", world) for world in (2, 3, 4, 8)),
    *(("fsdp", world) for world in (1, 2, 3, 4, 8)),
    *(("hsdp", world) for world in (4, 8)),
    *(("fsdp-tp", world) for world in (2, 4, 8)),
]


@pytest.mark.parametrize("model", MODELS)
def test_every_step_has_the_loss_of_one_rank(
    model: str,
    ranks: Ranks,
    project: Callable[[str, str], Path],
    images: Path,
    tmp_path: Path,
) -> None:
    args = options(model, images)
    result = ranks.run(project(model, "ddp"), 1, f"--run.dir={tmp_path / 'one'}", *args)
    assert result.ok, result
    expected = metrics(tmp_path / "one")
    assert expected[4]["epoch"] == 2
    assert expected[4]["samples"] == 60
    failures = []
    for strategy, world in RANKS:
        if strategy == "fsdp-tp" and model != "gpt":
            continue
        run = tmp_path / f"{strategy}-{world}"
        local = world // 2 if strategy == "hsdp" else min(world, 4)
        result = ranks.run(
            project(model, strategy), world, f"--run.dir={run}", *args, local_world=local
        )
        assert result.ok, result
        try:
            assert_same(run, expected)
        except AssertionError as error:
            failures.append(f"{strategy} on {world}: {error}")
    assert not failures, "\n".join(failures)


# Every strategy hands over to every other one, and to itself on other ranks: 12 legs of one step.
LEGS = [
    *(("ddp", 4), ("fsdp", 2), ("ddp", 3), ("hsdp", 4), ("ddp", 1), ("fsdp-tp", 2), ("ddp", 2)),
    *(("fsdp", 3), ("fsdp", 2), ("hsdp", 4), ("fsdp", 1), ("fsdp-tp", 4), ("fsdp", 4)),
    *(("hsdp", 8), ("hsdp", 4), ("fsdp-tp", 2), ("fsdp-tp", 4), ("hsdp", 4), ("ddp", 1)),
]


@pytest.mark.parametrize("model", ["gpt", "resnet"])
def test_a_run_moved_to_another_strategy_at_every_step_goes_on_as_if_nothing_had_happened(
    model: str,
    ranks: Ranks,
    project: Callable[[str, str], Path],
    images: Path,
    tmp_path: Path,
) -> None:
    legs = [leg for leg in LEGS if model == "gpt" or leg[0] != "fsdp-tp"][
        :: 1 if model == "gpt" else 2
    ]
    args = [*options(model, images), f"--train.steps={len(legs)}"]
    result = ranks.run(project(model, "ddp"), 1, f"--run.dir={tmp_path / 'one'}", *args)
    assert result.ok, result
    run = tmp_path / "moved"
    for step, (strategy, world) in enumerate(legs, start=1):
        result = ranks.run(
            project(model, strategy),
            world,
            f"--run.dir={run}",
            *args,
            f"--train.stop_at={step}",
            local_world=world // 2 if strategy == "hsdp" else world,
        )
        assert result.ok, result
    losses = [line for line in metrics(run) if "loss" in line]
    expected = [line for line in metrics(tmp_path / "one") if "loss" in line]
    assert [line["step"] for line in losses] == [line["step"] for line in expected]
    # Rounding grows from step to step: 19 updates of float32 weights.
    for one, other in zip(losses, expected, strict=True):
        assert one["samples"] == other["samples"]
        assert one["lr"] == other["lr"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5), one["step"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precisions_stay_within_one_percent_over_100_steps(
    precision: str, ranks: Ranks, project: Callable[[str, str], Path], tmp_path: Path
) -> None:
    args = [*COMMON, *MODELS["gpt"].split(), "--train.global_batch_size=8", "--train.steps=100"]
    args += [f"--train.precision={precision}", "--train.lr=1e-3", "--data.samples=200"]
    result = ranks.run(project("gpt", "ddp"), 1, f"--run.dir={tmp_path / 'one'}", *args)
    assert result.ok, result
    expected = [line for line in metrics(tmp_path / "one") if "loss" in line]
    assert expected[-1]["loss"] < 0.97 * expected[0]["loss"]  # it trains
    for strategy, world in (("ddp", 2), ("fsdp", 2), ("hsdp", 4), ("fsdp-tp", 2)):
        run = tmp_path / strategy
        local = world // 2 if strategy == "hsdp" else world
        result = ranks.run(
            project("gpt", strategy), world, f"--run.dir={run}", *args, local_world=local
        )
        assert result.ok, result
        losses = [line for line in metrics(run) if "loss" in line]
        assert [line["samples"] for line in losses] == [line["samples"] for line in expected]
        for one, other in zip(losses, expected, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=0.01), (strategy, one["step"])


def test_workers_and_prefetching_change_nothing(
    ranks: Ranks, project: Callable[[str, str], Path], images: Path, tmp_path: Path
) -> None:
    args = options("vit", images)
    for workers in (0, 2):
        run = f"--run.dir={tmp_path / str(workers)}"
        result = ranks.run(project("vit", "ddp"), 1, run, *args, f"--data.workers={workers}")
        assert result.ok, result
    assert_same(tmp_path / "2", metrics(tmp_path / "0"), tolerance=0)


def test_activation_checkpointing_changes_no_number(
    ranks: Ranks, project: Callable[[str, str], Path], images: Path, tmp_path: Path
) -> None:
    for model, strategy in (
        ("gpt", "fsdp"),
        ("gpt", "fsdp-tp"),
        ("resnet", "ddp"),
        ("resnet", "fsdp"),
    ):
        found = []
        for switch in ("false", "true"):
            run = tmp_path / f"{model}-{strategy}-{switch}"
            on = f"--train.activation_checkpointing={switch}"
            result = ranks.run(
                project(model, strategy), 2, f"--run.dir={run}", *options(model, images), on
            )
            assert result.ok, result
            found.append(metrics(run))
        assert_same(run, found[0])
        assert found[1][-1]["eval_loss"] == pytest.approx(found[0][-1]["eval_loss"], rel=1e-5)


def test_compiled_blocks_give_the_numbers_of_eager_ones(
    ranks: Ranks, project: Callable[[str, str], Path], images: Path, tmp_path: Path
) -> None:
    # Without dropout: compiled code draws other random numbers, the same ones on any ranks.
    args = [*options("gpt", images), "--model.layers=1", "--model.dropout=0", "--train.steps=2"]
    for switch in ("false", "true"):
        for strategy in ("ddp", "fsdp"):
            run = f"--run.dir={tmp_path / f'{strategy}-{switch}'}"
            on = f"--train.compile={switch}"
            result = ranks.run(project("gpt", strategy), 1, run, *args, on, timeout=300)
            assert result.ok, result
    for strategy in ("ddp", "fsdp"):
        assert_same(tmp_path / f"{strategy}-true", metrics(tmp_path / "ddp-false"), 1e-5)


def test_an_overflow_on_one_rank_skips_the_step_on_all(
    ranks: Ranks, project: Callable[[str, str], Path], tmp_path: Path
) -> None:
    for strategy, world in (("ddp", 2), ("fsdp", 2), ("hsdp", 4), ("fsdp-tp", 2)):
        broken = tmp_path / strategy.replace("-", "_") / f"gpt_{strategy.replace('-', '_')}"
        shutil.copytree(project("gpt", strategy), broken)
        file = broken / broken.name / "parallel.py"
        text = file.read_text()
        backward = "        self.scaler.scale(loss).backward()\n"
        assert backward in text
        overflow = "        if dist.get_rank() == 1 and not hasattr(self, 'broken'):\n"
        overflow += "            self.broken, loss = True, loss * torch.inf\n"
        text = text.replace(backward, overflow + backward)
        update = "        self.scaler.update()\n"
        text = text.replace(update, update + "        print('scale', self.scaler.get_scale())\n")
        file.write_text(text)
        args = [
            *COMMON,
            *BATCH,
            *MODELS["gpt"].split(),
            "--train.precision=fp16",
            "--train.steps=2",
        ]
        result = ranks.run(
            broken,
            world,
            f"--run.dir={tmp_path / 'run' / strategy}",
            *args,
            local_world=world // 2 if strategy == "hsdp" else world,
        )
        assert result.ok, result
        for output in result.outputs:
            scales = [line for line in output.splitlines() if line.startswith("scale")]
            assert scales == ["scale 512.0"] * 2, (strategy, str(result))


def test_replicas_that_start_apart_are_noticed(
    ranks: Ranks, project: Callable[[str, str], Path], images: Path, tmp_path: Path
) -> None:
    for strategy, world in (("ddp", 2), ("hsdp", 4)):
        broken = tmp_path / strategy / f"gpt_{strategy}"
        shutil.copytree(project("gpt", strategy), broken)
        file = broken / broken.name / "weights.py"
        text = file.read_text()
        seeded = "torch.manual_seed(seed_of(seed, child_name))"
        assert seeded in text
        file.write_text(text.replace(seeded, "torch.manual_seed(dist.get_rank())"))
        result = ranks.run(
            broken,
            world,
            f"--run.dir={tmp_path / 'run'}",
            *options("gpt", images),
            local_world=2,
        )
        assert not result.ok
        assert "ranks start with other values of embedding.weight" in str(result)
