"""What the tests of faults share: tiny runs, code that breaks them, what they trained on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from conftest import write_project
from ranks import Ranks, Result

# 54 training samples and 12 a step: 9 steps are two epochs, and step 5 straddles them.
EPOCH = 54
OPTIONS = (
    "--train.steps=9 --train.global_batch_size=12 --train.micro_batch_size=2 --train.lr=3e-3 "
    "--train.precision=fp32 --train.warmup_steps=2 --train.log_every=1 --train.eval_every=0 "
    "--data.samples=60 --data.workers=0 --model.layers=2 --model.width=32 --checkpoint.every=2"
).split()
MODELS = {"mlp": [], "gpt": "--data.context=16 --model.heads=2 --model.hidden=64".split()}
NODES = {"hsdp": 2}

# Runs train.py after the code in $BEFORE, which breaks something in it.
BROKEN = """\
import os
import runpy
from pathlib import Path

exec(os.environ["BEFORE"])
runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")
"""

# Counts the steps of a rank in STEP[0] and calls `at_step(parallel)` after each update.
STEPS = """
import demo.checkpoint, demo.parallel
from demo.distributed import RANK
STEP, hooks = [0], []
_resume, _step = demo.checkpoint.Checkpoints.resume, demo.parallel.Parallel.step
def resume(self):
    found = _resume(self)
    STEP[0] = found[0]
    return found
def step(self, *args):
    norm = _step(self, *args)
    STEP[0] += 1
    for hook in hooks:
        hook(self)
    return norm
demo.checkpoint.Checkpoints.resume, demo.parallel.Parallel.step = resume, step
"""

# Writes down the samples that the update of each step was really made of: those of the batches
# whose loss got a gradient other than zero.
RECORD = STEPS + """
import demo.data, demo.model, json
grains, index_of = [], {}
_build, _loss = demo.data.build, demo.model.loss
def build(*args):
    data = _build(*args)
    for i in range(len(data.train)):
        index_of[data.train[i][0].numpy().tobytes()] = i
    assert len(index_of) == len(data.train)
    return data
def loss(model, batch):
    value, rest = _loss(model, batch)
    if not value.requires_grad:
        return value, rest  # an evaluation
    rows, grain = [index_of[row.numpy().tobytes()] for row in batch[0]], []
    grains.append(grain)
    value.register_hook(lambda gradient: grain.extend(rows) if gradient != 0 else None)
    return value, rest
def record(parallel):
    with open(f"{os.environ['RECORD']}_{RANK}", "a") as file:
        print(json.dumps([STEP[0], *parallel.data_parallel(), grains]), file=file)
    grains.clear()
demo.data.build, demo.model.loss = build, loss
hooks.append(record)
"""


def touch_at(step: int, path: Path) -> str:
    """Code for after STEPS or RECORD: makes a file once `step` is done."""
    return f"hooks.append(lambda _: STEP[0] == {step} and Path({str(path)!r}).touch())\n"


class Trainer:
    """Trains in one run's folder: `train(2, "--train.stop_at=3", strategy="fsdp")`.

    Attributes:
        run: the run's folder.
        launches: how often it was called.
    """

    def __init__(self, ranks: Ranks, projects: Path, folder: Path) -> None:
        self.ranks, self.projects, self.folder = ranks, projects, folder
        self.run = folder / "run"
        self.launches = 0

    def project(self, strategy: str = "ddp", model: str = "mlp") -> Path:
        """The project, called `demo` whatever the answers, generated once."""
        target = self.projects / f"{model}_{strategy}" / "demo"
        if not target.exists():
            write_project(target, model=model, strategy=strategy, nodes=NODES.get(strategy, 1))
            (target / "broken.py").write_text(BROKEN)
        return target

    def __call__(
        self,
        world: int,
        *options: str,
        strategy: str = "ddp",
        model: str = "mlp",
        before: str = "",
        run: str | Path | None = None,
        env: dict[str, str] | None = None,
        script: str = "broken.py",
        **more: Any,
    ) -> Result:
        self.launches += 1
        records = self.folder / f"record_{self.launches:02}"
        return self.ranks.run(
            self.project(strategy, model),
            world,
            f"--run.dir={run or self.run}",
            *OPTIONS,
            *MODELS[model],
            *options,
            script=script,
            env={"BEFORE": before, "RECORD": str(records), **(env or {})},
            timeout=60,
            local_world=max(1, world // 2) if strategy == "hsdp" else None,
            **more,
        )

    def metrics(self, run: Path | None = None) -> list[dict[str, Any]]:
        text = ((run or self.run) / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def losses(self, run: Path | None = None) -> dict[int, float]:
        """The loss of each step; fails where a step stands there twice."""
        found = [(line["step"], line["loss"]) for line in self.metrics(run) if "loss" in line]
        assert len(dict(found)) == len(found)
        return dict(found)

    def checkpoints(self, run: Path | None = None) -> list[str]:
        return sorted(path.name for path in ((run or self.run) / "checkpoints").iterdir())

    def steps(self, run: Path | None = None) -> list[int]:
        """The steps of the checkpoints; fails where anything else lies with them."""
        return [int(name.removeprefix("step_")) for name in self.checkpoints(run)]

    def record_of(self, run: Path | None = None) -> dict[str, Any]:
        newest = self.checkpoints(run)[-1]
        path = (run or self.run) / "checkpoints" / newest / "state.json"
        return dict(json.loads(path.read_text()))

    def stream(self) -> list[int]:
        """The indices that the run's steps consist of, in order; steps done twice count once."""
        steps: dict[int, list[int]] = {}
        for launch in range(1, self.launches + 1):
            for step, indices in _launch(self.folder, f"record_{launch:02}_*"):
                assert steps.setdefault(step, indices) == indices  # also when it is done again
        assert sorted(steps) == list(range(1, len(steps) + 1))
        return [index for step in sorted(steps) for index in steps[step]]

    def assert_every_sample_once_an_epoch(self) -> None:
        stream = self.stream()
        assert len(stream) == 9 * 12
        for start in range(0, len(stream), EPOCH):
            assert sorted(stream[start : start + EPOCH]) == list(range(EPOCH))


def _launch(folder: Path, pattern: str) -> Iterator[tuple[int, list[int]]]:
    """Each step that all ranks of a launch completed, and its samples in order."""
    steps: dict[int, dict[int, list[list[int]]]] = {}
    size = 1
    for path in folder.glob(pattern):
        for line in path.read_text().splitlines():
            step, rank, size, grains = json.loads(line)
            known = steps.setdefault(step, {}).setdefault(rank, grains)
            assert known == grains  # ranks that work on the same samples
    for step, by_rank in steps.items():
        if len(by_rank) == size:
            rounds = zip_longest(*(by_rank[rank] for rank in range(size)), fillvalue=[])
            yield step, [index for turn in rounds for grain in turn for index in grain]


def cores() -> int:
    return len(os.sched_getaffinity(0))
