"""A machine dies in the middle of a run of two: the other one goes on alone, as if it always had."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ranks import Ranks

OPTIONS = (
    "--train.precision=fp32 --train.log_every=1 --train.warmup_steps=1 --train.steps=60 "
    "--train.global_batch_size=12 --train.micro_batch_size=2 --checkpoint.every=5 --train.eval_every=0 "
    "--data.samples=50 --data.context=16 --data.workers=0 --model.layers=2 --model.width=32 "
    "--model.heads=2 --model.hidden=64 --model.dropout=0.1"
).split()


def losses(run: Path) -> dict[int, dict[str, Any]]:
    """The lines of metrics.jsonl by step, evaluations left out."""
    file = run / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return {line["step"]: line for line in lines if "loss" in line}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_of_two_machines_shrinks_to_one(
    strategy: str, ranks: Ranks, make_project: Callable[..., Path], tmp_path: Path
) -> None:
    project = make_project(strategy=strategy)
    still, run = tmp_path / "still", tmp_path / "run"
    result = ranks.run(project, 1, f"--run.dir={still}", *OPTIONS)
    assert result.ok, result

    # Slow steps leave time to see the run and to kill a machine in the middle of it.
    train = project / "train.py"
    text = train.read_text()
    assert "        step += 1\n" in text
    train.write_text(
        text.replace("        step += 1\n", "        step += 1\n        time.sleep(0.1)\n")
    )
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"]
    command += ["--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    command += ["--rdzv-id=shrink", "--monitor-interval=0.5"]
    command += ["--rdzv-conf=last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=3"]
    command += ["--", "train.py", f"--run.dir={run}", *OPTIONS]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = []
    try:
        for node in range(2):
            with (tmp_path / f"node{node}.log").open("w") as log:
                agents.append(
                    subprocess.Popen(
                        command,
                        cwd=project,
                        env=env,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
            time.sleep(1)  # the first one holds the rendezvous, and stays
        end = time.monotonic() + 120
        while len(losses(run)) < 12:
            assert time.monotonic() < end, said(tmp_path)
            assert agents[0].poll() is None, said(tmp_path)
            time.sleep(0.1)
        children = Path(f"/proc/{agents[1].pid}/task/{agents[1].pid}/children").read_text().split()
        for pid in (agents[1].pid, *map(int, children)):
            os.kill(pid, signal.SIGKILL)
        assert agents[0].wait(timeout=150) == 0, said(tmp_path)
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()
                agent.wait(timeout=60)
    output = said(tmp_path)
    for world in (2, 1):
        assert f"by {world} data-parallel rank(s)" in output, output
    found, expected = losses(run), losses(still)
    assert list(found) == list(range(1, 61))
    for step, line in expected.items():
        assert found[step]["samples"] == line["samples"]
        assert found[step]["loss"] == pytest.approx(line["loss"], rel=1e-5), step


def said(folder: Path) -> str:
    return "\n".join(file.read_text() for file in sorted(folder.glob("node*.log")))
