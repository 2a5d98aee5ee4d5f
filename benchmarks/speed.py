"""Compares a step of a generated project with one of a hand-written loop (usual.py), in turns.

The machine's noise hits both alike; the ratio of the medians is what counts.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
from conftest import write_project  # noqa: E402
from ranks import Ranks  # noqa: E402

TURNS, RANKS = 5, 2
OPTIONS = (
    "--train.steps=60 --train.global_batch_size=32 --train.micro_batch_size=4 --train.precision=fp32 "
    "--train.eval_every=0 --train.log_every=10 --checkpoint.every=1000 --data.samples=2000 --data.workers=0"
).split()


def step_time(run: Path) -> float:
    """The median time of a step, without the first ten."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(
        line["step_s"] for line in lines if line["step"] > 10 and "step_s" in line
    )


def measure(folder: Path) -> None:
    project = write_project(folder / "demo")
    by_hand = folder / "by_hand"
    by_hand.mkdir()
    shutil.copy(HERE / "usual.py", by_hand / "train.py")
    # The same number of micro-batches a step on both sides.
    text = (by_hand / "train.py").read_text().replace("// 4\n", f"// {RANKS}\n")
    (by_hand / "train.py").write_text(text)
    times: dict[str, list[float]] = {"generated": [], "by hand": []}
    with Ranks() as ranks:
        for turn in range(TURNS):
            for name, place, first in (
                ("generated", project, []),
                ("by hand", by_hand, [str(project)]),
            ):
                run = folder / f"{name}-{turn}"
                result = ranks.run(place, RANKS, *first, f"--run.dir={run}", *OPTIONS, timeout=600)
                assert result.ok, result
                times[name].append(step_time(run))
                print(f"{name}: {times[name][-1]:.4f} s a step", flush=True)
    ratio = statistics.median(times["generated"]) / statistics.median(times["by hand"])
    print(f"generated / by hand: {ratio:.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        measure(Path(scratch))
