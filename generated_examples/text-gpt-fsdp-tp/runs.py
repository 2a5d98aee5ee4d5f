#!/usr/bin/env python3
"""Every run at a glance: `python runs.py [FOLDER ...] [--json]`, by default those in runs/.

Needs no torch and no environment: any Python from 3.6 on, as login nodes have it.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

COLUMNS = ("run", "state", "step", "eval_loss", "at", "lr", "batch", "ranks", "code", "age")


def main() -> None:
    parser = argparse.ArgumentParser(description="Lists runs.")
    parser.add_argument("folders", nargs="*", type=Path, help="runs, or folders of runs")
    parser.add_argument("--json", action="store_true", help="one JSON list, with numbers")
    options = parser.parse_args()
    folders = options.folders or [Path(__file__).resolve().parent / "runs"]
    found = find(folders)
    held = held_by_slurm([job for folder in found for job in jobs(folder)])
    runs = [describe(folder, held) for folder in found]
    if options.json:
        text = json.dumps(runs, indent=2)
    elif not runs:
        text = "no runs in " + ", ".join(map(str, folders))
    else:
        rows = [COLUMNS] + [row(run) for run in runs]
        widths = [max(len(line[i]) for line in rows) for i in range(len(COLUMNS))]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in rows]
        text = "\n".join(lines)
    # A folder's name may be one that the terminal cannot show.
    print(text.encode(sys.stdout.encoding, "replace").decode(sys.stdout.encoding))


def find(folders: list) -> list:
    """The runs among these folders and right in them, the last one that wrote something first."""
    found = []
    for folder in folders:
        found += [path for path in [folder, *inside(folder)] if is_run(path)]
    return sorted(found, key=last_sign, reverse=True)


def inside(folder: Path) -> list:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []  # no folder, or one that is another user's own


def is_run(folder: Path) -> bool:
    names = ("metrics.jsonl", "checkpoints", "config.toml", "lock")
    # A project has a config.toml too. Of os.path, for those of Path raise where a path is broken.
    written = any(os.path.exists(folder / name) for name in names)
    return (written and not os.path.exists(folder / "train.py")) or bool(jobs(folder))


def last_sign(folder: Path) -> float:
    """When the run last wrote something, in seconds."""
    times = []
    for name in ("lock", "metrics.jsonl", "logs/error.txt", "config.toml", "code", "."):
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            pass  # it has none, or it went away just now
    return max(times or [0.0])


def describe(folder: Path, held: dict) -> dict:
    """What is known of a run; what is missing, broken or half-written is None."""
    checkpoint, train = newest_checkpoint(folder), resolved_config(folder).get("train", {})
    lines = metrics(folder)
    losses = [line for line in lines if "loss" in line]
    step = losses[-1]["step"] if losses else checkpoint.get("step")
    step = step if isinstance(step, int) else 0
    scores = [line for line in lines if is_number(line.get("eval_loss"))]
    best = min(scores, key=lambda line: line["eval_loss"]) if scores else {}
    run = {
        "run": os.path.basename(os.path.abspath(str(folder))),
        "folder": str(folder),
        "state": state(folder, step, train.get("steps"), held),
        "code": checkpoint["code"] if isinstance(checkpoint.get("code"), str) else None,
    }  # type: dict
    numbers = {
        "step": step,
        "steps": train.get("steps"),
        "checkpoint": checkpoint.get("step"),
        "eval_loss": best.get("eval_loss"),
        "eval_accuracy": best.get("eval_accuracy"),
        "at": best.get("step"),
        "lr": train.get("lr"),
        "batch": train.get("global_batch_size"),
        "ranks": checkpoint.get("ranks"),
        "age": time.time() - last_sign(folder),
    }
    run.update((name, value if is_number(value) else None) for name, value in numbers.items())
    return run


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and abs(value) < 1e300  # so not NaN


def state(folder: Path, step: int, steps: object, held: dict) -> str:
    """running, starting, queued, finished, failed, killed (nothing tidied up) or stopped."""
    try:
        beat = (folder / "lock").stat().st_mtime  # touched every 10 s
    except OSError:
        beat = 0.0
    if abs(time.time() - beat) < 60:  # a disk's clock may be ahead
        return "running"
    for job in jobs(folder):
        if job in held:
            return "starting" if held[job] in ("CONFIGURING", "RUNNING") else "queued"
    if isinstance(steps, int) and step >= steps and os.path.isdir(folder / "export"):
        return "finished"
    if os.path.exists(folder / "logs" / "error.txt"):
        return "failed"
    return "killed" if beat else "stopped"


def jobs(folder: Path) -> list:
    """The Slurm jobs that launch/submit.sh has given the run to: 71, or 71_2 of an array."""
    texts = [read(path).strip() for path in inside(folder / "code") if path.suffix == ".job"]
    return [text for text in texts if re.match(r"[0-9]+(_[0-9]+)?$", text)]


def held_by_slurm(jobs: list) -> dict:
    """Those of the jobs that Slurm has waiting or running, and the state of each."""
    if not jobs:
        return {}
    command = ["squeue", "--noheader", "--array", "--format=%i %T", "--jobs=" + ",".join(jobs)]
    try:
        answer = subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return {}  # no Slurm here, or it has forgotten them
    return dict(re.findall(r"(\S+) (\S+)", answer.decode()))


def newest_checkpoint(folder: Path) -> dict:
    """The record of the newest checkpoint that has one."""
    for path in reversed(inside(folder / "checkpoints")):
        record = parsed(read(path / "state.json")) if path.name.startswith("step_") else None
        if isinstance(record, dict):
            return record
    return {}


def resolved_config(folder: Path) -> dict:
    """The run's config.toml by section: the run wrote it, with a JSON value in each line."""
    sections = {"": {}}  # type: dict
    section = ""
    for line in read(folder / "config.toml").splitlines():
        if line.startswith("["):
            section = line.strip("[] ")
            sections[section] = {}
            continue
        key, _, value = line.partition(" = ")
        sections[section][key] = parsed(value)
    return sections


def metrics(folder: Path) -> list:
    """The whole lines of metrics.jsonl; the last one may be half-written."""
    lines = [parsed(text) for text in read(folder / "metrics.jsonl").splitlines()]
    return [line for line in lines if isinstance(line, dict) and isinstance(line.get("step"), int)]


def parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None  # half-written, or a person's own


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def row(run: dict) -> tuple:
    """The cells of a run's line in the table."""
    cells = dict(run)
    cells["step"] = f"{run['step']} of {run['steps'] or '?'}"
    cells["eval_loss"] = number(run["eval_loss"])
    if run["eval_accuracy"] is not None:
        cells["eval_loss"] += f" ({run['eval_accuracy']:.1%})"
    cells["lr"] = number(run["lr"])
    cells["code"] = str(run["code"])[:8] if run["code"] else None
    cells["age"] = age(run["age"])
    return tuple("-" if cells[name] is None else str(cells[name]) for name in COLUMNS)


def number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else "-"


def age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


if __name__ == "__main__":
    main()
