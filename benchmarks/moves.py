"""Draws moves.png: a run that changes ranks and strategy on the way, and one that never moved.

Real runs through `scaffold regenerate` and `launch/local.sh`; the usual recipe makes the same moves.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
STEPS = 120
OPTIONS = (
    f"--train.steps={STEPS} --train.global_batch_size=48 --train.micro_batch_size=2 --train.log_every=1 "
    "--train.eval_every=0 --train.precision=fp32 --train.lr=3e-3 --train.warmup_steps=10 "
    "--checkpoint.every=5 --data.context=64 --data.workers=0 --model.layers=2 --model.width=64 "
    "--model.heads=4 --model.hidden=192 --model.dropout=0.1"
).split()
# Until which step, on how many ranks, with which strategy; the first leg is killed on its way.
LEGS = [
    (33, 4, ["--strategy", "ddp", "--nodes", "1"], True),
    (60, 2, ["--strategy", "fsdp", "--nodes", "1"], False),
    (90, 3, ["--strategy", "ddp", "--nodes", "1"], False),
    (STEPS, 8, ["--strategy", "hsdp", "--nodes", "2"], False),
]


def losses(run: Path) -> dict[int, float]:
    """The loss of each step; of a step that was run twice, as it was the second time."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def launch(command: list[str], run: Path, until: int, kill: bool, env: dict[str, str]) -> None:
    """Runs a leg; with `kill` it is killed a few steps after its last checkpoint, mid-flight."""
    process = subprocess.Popen(command, env=env, start_new_session=True)
    while kill and process.poll() is None:
        if (run / "metrics.jsonl").exists() and max(losses(run), default=0) >= until:
            subprocess.run(["pkill", "-KILL", "-f", str(run)], check=False)
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.05)
    status = process.wait()
    assert kill or status == 0, f"{command} ended with {status}"


def measure(folder: Path) -> None:
    scaffold = [sys.executable, "-m", "scaffold"]
    new = ["new", "demo", "--data", "text", "--yes", "--output-dir", str(folder)]
    subprocess.run([*scaffold, *new], check=True, stdout=subprocess.DEVNULL)
    project = folder / "demo"
    local = ["bash", str(project / "launch" / "local.sh")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "BACKEND": "gloo"}
    runs = {name: folder / name for name in ("still", "moved", "usual", "usual still")}

    def ours(run: Path, until: int, world: int, kill: bool, *more: str) -> None:
        command = [*local, f"--run.dir={run}", *OPTIONS, *more]
        command += [] if kill else [f"--train.stop_at={until}"]
        launch(command, run, until, kill, {**env, "NPROC_PER_NODE": str(world)})

    def usual(run: Path, until: int, world: int, kill: bool) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={world}", "--", str(HERE / "usual.py"), str(project)]
        command += [f"--run.dir={run}", *OPTIONS] + ([] if kill else [f"--train.stop_at={until}"])
        launch(command, run, until, kill, env)

    ours(runs["still"], STEPS, 1, False)
    usual(runs["usual still"], STEPS, 4, False)
    for until, world, answers, kill in LEGS:
        command = [*scaffold, "regenerate", str(project), *answers]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        shard = ["--parallel.shard_size=4"] if "hsdp" in answers else []
        ours(runs["moved"], until, world, kill, *shard)
        usual(runs["usual"], until, world, kill)

    found = {name: losses(run) for name, run in runs.items()}
    apart = {
        pair: max(abs(found[pair][step] / found[other][step] - 1) for step in found[other])
        for pair, other in (("moved", "still"), ("usual", "usual still"))
    }
    print(json.dumps(apart))
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for axis, still, moved, title in (
        (axes[0], "still", "moved", "a generated project"),
        (axes[1], "usual still", "usual", "the usual recipe"),
    ):
        axis.plot(
            *zip(*found[still].items(), strict=False),
            color="0.75",
            linewidth=5,
            label="never moved",
        )
        axis.plot(
            *zip(*found[moved].items(), strict=False), color="tab:red", linewidth=1.2, label="moved"
        )
        axis.set(title=f"{title}: at most {apart[moved]:.1g} apart", xlabel="step")
        for at, text in (
            (0, "4 ranks\nDDP"),
            (30, "2 ranks\nFSDP"),
            (60, "3 ranks\nDDP"),
            (90, "8 ranks\nHSDP"),
        ):
            axis.axvline(at, color="0.85", linewidth=0.8, zorder=0)
            axis.text(
                at + 1, 0.97, text, transform=axis.get_xaxis_transform(), va="top", fontsize=8
            )
        axis.legend(loc="lower left")
    axes[0].set_ylabel("loss (nats per byte)")
    figure.savefig(HERE / "moves.png", dpi=110)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        measure(Path(scratch))
