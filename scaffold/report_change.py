"""What people and programs read about an existing project: a regenerate, its status."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaffold.plan import Action, Step
from scaffold.questions import show
from scaffold.regenerate import Change, Status
from scaffold.report import count
from scaffold.topology import Topology

WORDS = {
    Action.CREATE: ("create", "created"),
    Action.UPDATE: ("update", "updated"),
    Action.MERGE: ("merge", "merged"),
    Action.CONFLICT: ("conflict", "conflict"),
    Action.DELETE: ("delete", "deleted"),
    Action.KEEP: ("keep", "kept"),
    Action.GONE: ("deleted by you", "deleted by you"),
}


def as_data(change: Change, *, written: bool, diffs: bool) -> dict[str, Any]:
    """All that `text` says, for programs."""
    before, after = change.topologies()
    data: dict[str, Any] = {
        "project": str(change.project),
        "version": {"before": change.version, "after": change.plan.state.version},
        "written": written,
        "answers": {key: {"before": b, "after": a} for key, (b, a) in change.answers().items()},
        "files": [
            {
                "path": step.path,
                "at": step.at or step.path,
                "action": str(step.action),
                "note": step.note,
                "problem": step.problem,
            }
            for step in change.plan.steps
        ],
        "problems": len(change.plan.problems),
        "topology": {"before": _topology_data(before), "after": _topology_data(after)},
        "runs": [
            {"name": name, "step": step, "resumes": not why, "why_not": why}
            for name, step, why in change.runs()
        ],
    }
    if diffs:
        data["diffs"] = dict(change.diffs())
    return data


def _topology_data(topology: Topology) -> dict[str, Any]:
    here = topology.rounds()
    return {
        "nodes": topology.nodes,
        "gpus_per_node": topology.gpus_per_node,
        "ranks": topology.ranks,
        "data_parallel_ranks": here.ranks,
        "micro_batches": here.grains,
        "rounds": here.rounds,
        "idle": round(here.idle, 4),
        "better_micro_batch_size": topology.better_micro_batch(),
    }


def text(change: Change, *, written: bool, diffs: bool) -> str:
    """What changes, what it means for a run, what the person has to do."""
    blocks = []
    if answered := change.answers():
        lines = [
            f"  {key:<17}  {_shown(was)} → {_shown(now)}" for key, (was, now) in answered.items()
        ]
        blocks.append("Answers\n" + "\n".join(lines))
    if change.version != change.plan.state.version:
        blocks.append(f"Made by scaffold {change.version}, now {change.plan.state.version}.")
    blocks.append("Files\n" + _files(change.plan.steps, written))
    if diffs:
        blocks += [diff.rstrip("\n") for _, diff in change.diffs()]
    if meaning := _meaning(change):
        blocks.append("What it means\n" + meaning)
    return "\n\n".join(blocks)


def _shown(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else show(value)


def _files(steps: tuple[Step, ...], written: bool) -> str:
    lines = []
    for step in sorted(steps, key=lambda step: step.problem):
        if step.action != Action.SAME:
            where = f"{step.path} (now {step.at})" if step.at else step.path
            word = WORDS[step.action][written]
            note = f"  {step.note}" if step.note else ""
            lines.append(f"{'!' if step.problem else ' '} {word:<15}{where:<30}{note}".rstrip())
    same = sum(step.action == Action.SAME for step in steps)
    if same:
        lines.append(f"  {same} more {'is' if same == 1 else 'are'} as they should be.")
    return "\n".join(lines)


def _meaning(change: Change) -> str:
    """Rounds and idle share before and after, and whether runs go on; empty if neither changes."""
    lines = []
    before, after = change.topologies()
    if before != after:
        for topology, word in ((before, "before"), (after, "now")):
            here = topology.rounds()
            lines.append(
                f"  {word + ':':<8}{count(topology.nodes, 'node')} × "
                f"{count(topology.gpus_per_node, 'GPU')}, {here.grains} micro-batches a step in "
                f"{count(here.rounds, 'round')}, {here.idle:.0%} idle"
            )
        if better := after.better_micro_batch():
            lines.append(f"  train.micro_batch_size = {better} in config.toml would idle less.")
    if change.answers():
        for name, step, why in change.runs():
            goes_on = (
                f"cannot resume: {why}" if why else f"resumes at its last checkpoint, step {step}"
            )
            lines.append(f"  runs/{name} {goes_on}.")
    return "\n".join(lines)


def ending(change: Change) -> str:
    """What is left to do, and the command that proves the project still runs."""
    lines = []
    if problems := change.plan.problems:
        needs = "needs" if len(problems) == 1 else "need"
        lines.append(f"{count(len(problems), 'file')} {needs} you (marked !).")
    if change.plan.writes:
        here = change.project == Path()
        folder = "" if here else f" {shlex.quote(str(change.project))}"
        lines.append(f"`scaffold undo{folder}` takes it back. Prove that the project still runs:")
        lines.append("  " + ("" if here else f"cd{folder} && ") + "python -m pytest -q")
    return "\n".join(lines)


def status_data(status: Status) -> dict[str, Any]:
    """All that `status_text` says, for programs."""
    return {
        "version": status.version,
        "answers": dict(status.answers),
        "interrupted": status.interrupted,
        "files": [{"path": path, "state": what, "note": note} for path, what, note in status.files],
    }


def status_text(status: Status, asked: Mapping[str, Any]) -> str:
    """The answers and the version that made a project, and what a person made of it since."""
    lines = [f"Generated by scaffold {status.version} from"]
    for key, value in status.answers.items():
        wish = asked.get(key, value)
        more = "" if wish == value else f"  ({_shown(wish)} in scaffold.toml, not yet followed)"
        lines.append(f"  {key:<17}  {_shown(value)}{more}")
    lines.append("")
    for path, what, note in status.files:
        mark = "!" if what == "unresolved" else " "
        lines.append(f"{mark} {what:<15}{path:<30}{'  ' + note if note else ''}".rstrip())
    if not status.files:
        lines.append("Every file is as it was generated.")
    if status.interrupted:
        lines.append("A regenerate was cut off: the next one, or `scaffold undo`, puts it back.")
    return "\n".join(lines)
