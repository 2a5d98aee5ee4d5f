"""Measures the peak memory of a rank under DDP and FSDP, on 4 ranks, where weights dominate."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from conftest import write_project
from ranks import Ranks

OPTIONS = (
    "--train.steps=2 --train.global_batch_size=4 --train.micro_batch_size=1 --train.precision=fp32 "
    "--train.eval_every=0 --data.samples=40 --data.context=8 --data.workers=0"
).split()
LARGE = "--model.layers=12 --model.width=768 --model.heads=12 --model.hidden=2048".split()
SMALL = "--model.layers=1 --model.width=32 --model.heads=2 --model.hidden=32".split()


def peak(ranks: Ranks, project: Path, options: list[str], run: Path) -> float:
    """The largest peak of resident memory over the ranks, in MiB."""
    result = ranks.run(project, 4, f"--run.dir={run}", *OPTIONS, *options, timeout=600)
    assert result.ok, result
    peaks = [
        line for out in result.outputs for line in out.splitlines() if line.startswith("peak ")
    ]
    assert len(peaks) == 4, result
    return max(float(line.split()[1]) for line in peaks) / 1024


def measure(folder: Path) -> None:
    # Freed blocks go back to the system at once, so that the peak is that of what was held.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "100000"
    found = {}
    with Ranks() as ranks:
        for strategy in ("ddp", "fsdp"):
            project = write_project(folder / f"{strategy}_demo", strategy=strategy)
            train = project / "train.py"
            # The peak is read at the end of the last step, before the last save and the export, which
            # gather the whole model on rank 0 under any strategy.
            train.write_text(
                train.read_text().replace(
                    "        last = step == last_step",
                    "        import resource\n"
                    "        if step == last_step:\n"
                    "            print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
                    "        last = step == last_step",
                )
            )
            empty = peak(ranks, project, SMALL, folder / f"{strategy}-small")
            found[strategy] = peak(ranks, project, LARGE, folder / f"{strategy}-large") - empty
            print(
                f"{strategy}: {found[strategy]:.0f} MiB a rank above that of a tiny model",
                flush=True,
            )
    print(f"fsdp / ddp: {found['fsdp'] / found['ddp']:.2f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        measure(Path(scratch))
