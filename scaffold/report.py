"""What people read: the answers, the tree, what will run, what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from scaffold import catalog, questions
from scaffold.answers import Answers
from scaffold.topology import Topology


def answers(chosen: Answers, defaulted: Iterable[str]) -> str:
    """A line per answer; defaults are marked."""
    values = {**chosen.structure(), **chosen.settings()}
    if not catalog.DATA[chosen.data].path:
        values.pop("data-path")
    lines = []
    for key, value in values.items():
        shown = ", ".join(value) if isinstance(value, list) else questions.show(value)
        mark = "  (default)" if key in defaulted else ""
        lines.append(f"  {key:<17}  {shown or '(none)'}{mark}")
    return "\n".join(lines)


def tree(root: str, sizes: Mapping[str, int], show_sizes: bool = False) -> str:
    """A picture of the folders and files, as `tree` draws it."""
    nested: dict[str, Any] = {}
    for path, size in sizes.items():
        *folders, name = path.split("/")
        node = nested
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = size
    lines = [f"{root}/"]

    def draw(node: dict[str, Any], indent: str) -> None:
        # Folders last, so that what stands at the top is read first.
        entries = sorted(node.items(), key=lambda item: (isinstance(item[1], dict), item[0]))
        for position, (name, child) in enumerate(entries, 1):
            last = position == len(entries)
            folder = isinstance(child, dict)
            line = f"{indent}{'└── ' if last else '├── '}{name}{'/' if folder else ''}"
            lines.append(line if folder or not show_sizes else f"{line:<44}{child:>8,} bytes")
            if folder:
                draw(child, indent + ("    " if last else "│   "))

    draw(nested, "")
    return "\n".join(lines)


def count(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`, `2 batches`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def plan(chosen: Answers) -> str:
    """In plain words what a launch runs, here and on other numbers of ranks."""
    topology = Topology.of(chosen)
    here = topology.rounds()
    lines = [
        f"  {count(topology.nodes, 'node')} × {count(topology.gpus_per_node, 'GPU')} = "
        f"{count(topology.ranks, 'rank')}, {chosen.strategy}. Without GPUs the ranks run on the CPU.",
        f"  A step is {count(topology.global_batch_size, 'sample')}: "
        f"{topology.grains} micro-batches of {topology.micro_batch_size}, on any number of ranks.",
    ]
    sharing = f"  {count(here.ranks, 'rank')} "
    if topology.tensor_parallel > 1:
        lines.append(
            f"  The {topology.tensor_parallel} ranks of a node work on one micro-batch together: "
            f"{count(here.ranks, 'group')}."
        )
        sharing = f"  {count(here.ranks, 'group')} "
    verb = "runs" if here.ranks == 1 else "run"
    lines.append(f"{sharing}{verb} {count(here.rounds, 'round')} a step, {here.idle:.0%} idle.")
    if better := topology.better_micro_batch():
        lines.append(f"  train.micro_batch_size = {better} in config.toml would idle less.")
    others = sorted({1, 2, 3, 4, 8, 16, 32, here.ranks})
    rows = [("ranks", others), ("rounds", [topology.rounds(n).rounds for n in others])]
    for title, numbers in rows:
        lines.append(f"    {title:<7}" + "".join(f"{n:>6}" for n in numbers))
    lines.append("    idle   " + "".join(f"{topology.rounds(n).idle:>6.0%}" for n in others))
    return "\n".join(lines)


def next_commands(folder: str, launchers: Iterable[str] = ()) -> str:
    """The commands that lead from here to a first trained model, and then to the clusters."""
    commands = [
        f"cd {shlex.quote(folder)}",
        "python -m pip install -e '.[test]'",
        "bash launch/local.sh",
    ]
    if clusters := [name for name in launchers if name != "torchrun"]:
        commands.append(f"less launch/README.md    # {', '.join(clusters)}")
    return "\n".join(f"  {command}" for command in commands)


def options() -> dict[str, Any]:
    """Every question with its choices and defaults, and which answers go together."""
    listed = []
    for question in questions.QUESTIONS:
        entry: dict[str, Any] = {
            "key": question.key,
            "flag": question.flag,
            "kind": question.kind,
            "prompt": question.prompt,
            "help": question.help,
            "asked": question.asked,
            "kept_in": "config.toml" if question.setting else "scaffold.toml",
        }
        if question.choices:
            entry["choices"] = dict(question.choices)
        if question.key == "global-batch-size":
            entry["default"] = {n: m.global_batch_size for n, m in catalog.MODELS.items()}
        else:
            value = question.default({})
            entry["default"] = list(value) if isinstance(value, tuple) else value
        listed.append(entry)
    together = {
        model: {
            "data": list(questions.allowed(questions.BY_KEY["data"], {"model": model})),
            "strategy": list(
                questions.allowed(questions.BY_KEY["strategy"], {"model": model, "nodes": 2})
            ),
            "global_batch_size_multiple_of": entry.micro_batch_size,
        }
        for model, entry in catalog.MODELS.items()
    }
    nodes = {name: entry.min_nodes for name, entry in catalog.STRATEGIES.items()}
    return {"questions": listed, "models": together, "strategy_min_nodes": nodes}


def options_text() -> str:
    """The same as `options`, as a table."""
    data = options()
    lines = []
    for entry in data["questions"]:
        value = entry["default"]
        shown = ", ".join(value) if isinstance(value, list) else value
        if isinstance(value, dict):
            shown = ", ".join(f"{name} {number}" for name, number in value.items())
        notes = [f"default {shown}"] if shown != "" else []
        notes += [] if entry["asked"] else ["not asked"]
        lines.append(f"{entry['flag']}  {entry['help']} ({'; '.join(notes) or 'default none'})")
        for name, text in entry.get("choices", {}).items():
            lines.append(f"    {name:<14}{text}")
    lines += ["", "What goes together"]
    for model, fits in data["models"].items():
        lines.append(
            f"    {model:<8}data {', '.join(fits['data'])}; strategy {', '.join(fits['strategy'])}; "
            f"global batch a multiple of {fits['global_batch_size_multiple_of']}"
        )
    for name, minimum in data["strategy_min_nodes"].items():
        if minimum > 1:
            lines.append(f"    {name} needs {minimum} or more nodes")
    return "\n".join(lines)
