"""Trains for real, on the CPU with gloo: `python -m pytest`. Keep these green as the project grows."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import MODEL, PROJECT, make_data

from text_gpt_fsdp.sampler import GrainSampler, permute


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """train.py's options for a run of seconds, on tiny data that the test makes."""
    return [
        *make_data(tmp_path_factory.mktemp("data")),
        *MODEL,
        "--data.workers=0",
        "--train.steps=6",
        "--train.global_batch_size=12",
        "--train.micro_batch_size=2",
        "--train.precision=fp32",
        "--train.warmup_steps=1",
        "--train.log_every=1",
    ]


def train(run: Path, ranks: int, *options: str) -> list[dict[str, Any]]:
    """Trains on `ranks` ranks and returns the losses of metrics.jsonl, evaluations left out."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(ranks), "--", "train.py", f"--run.dir={run}", *options]
    subprocess.run(command, cwd=PROJECT, check=True, timeout=300)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def test_two_ranks_and_a_resume_on_one_give_the_numbers_of_one_rank(
    options: list[str], tmp_path: Path
) -> None:
    expected = train(tmp_path / "one", 1, *options)
    train(tmp_path / "moved", 2, *options, "--train.stop_at=3")
    moved = train(tmp_path / "moved", 1, *options)
    assert [line["samples"] for line in moved] == [12, 24, 36, 48, 60, 72]
    for key in "loss", "grad_norm":
        assert [line[key] for line in moved] == pytest.approx(
            [line[key] for line in expected], rel=1e-4
        )
    assert (tmp_path / "moved" / "export" / "model.safetensors").exists()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_every_sample_is_trained_on_once_an_epoch(ranks: int) -> None:
    length, batch, micro = 30, 12, 2  # 5 steps are 2 epochs
    seen: list[tuple[int, int]] = []
    for rank in range(ranks):
        sampler = GrainSampler(range(length), batch, micro, rank, ranks, seed=0, steps=5)  # type: ignore[arg-type]
        keys = list(sampler)
        for place in range(0, len(keys), micro):
            if sampler.has_grain(place // micro % sampler.rounds):
                seen += keys[place : place + micro]
    assert sorted(seen) == [(epoch, index) for epoch in (0, 1) for index in range(length)]


def test_the_shuffle_is_one_to_one() -> None:
    for n in (1, 2, 3, 10, 1000):
        assert sorted(permute(np.arange(n), n, seed=1)) == list(range(n))
