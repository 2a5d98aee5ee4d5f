"""Every question, defined once: its prompt, flag, default, help, choices and check.

The command line, the prompts, the answers file and `scaffold options` all read this table.
"""

from __future__ import annotations

import difflib
import keyword
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaffold import catalog
from scaffold.errors import AnswerError

Values = Mapping[str, Any]
"""Answers so far, keyed as the flags."""

MAX_COUNT = 100_000


@dataclass(frozen=True)
class Question:
    """One question; `kind` is `choice`, `choices` (several), `integer` or `path`."""

    key: str
    prompt: str
    help: str
    kind: str
    default: Callable[[Values], Any]
    choices: Mapping[str, str] = field(default_factory=dict)
    asked: bool = True
    setting: bool = False  # only seeds config.toml; never kept in scaffold.toml

    @property
    def flag(self) -> str:
        """The option of `scaffold new` that answers it."""
        return f"--{self.key}"

    def parse(self, raw: Any, base: Path | None = None) -> Any:
        """The typed value of what was typed, passed or read; relative paths start at `base`."""
        if self.kind == "integer":
            return _integer(self, raw)
        if self.kind == "path":
            return _path(self, raw, base or Path.cwd())
        if self.kind == "choices":
            return _several(self, raw)
        return _one(self, raw)


def either(names: Iterable[str]) -> str:
    """`a, b or c`."""
    *head, last = names
    return f"{', '.join(head)} or {last}" if head else last


def _one(question: Question, raw: Any) -> str:
    if isinstance(raw, str) and raw in question.choices:
        return raw
    close = difflib.get_close_matches(str(raw).lower(), question.choices, n=1)
    raise AnswerError(
        f"{question.flag}: {show(raw)!r} is not offered; use {either(question.choices)}."
        + (f" Did you mean {close[0]}?" if close else "")
    )


def _several(question: Question, raw: Any) -> tuple[str, ...]:
    names = re.split(r"[,\s]+", raw.strip()) if isinstance(raw, str) else raw
    if not isinstance(names, list | tuple):
        raise AnswerError(f"{question.flag}: {show(raw)} is not a list of names.")
    chosen = {_one(question, name) for name in names if name != ""}
    # The default is always among them, and the order never depends on the person's.
    chosen |= set(question.default({}))
    return tuple(name for name in question.choices if name in chosen)


def _integer(question: Question, raw: Any) -> int:
    text = str(raw).strip()
    # Not int(): it takes True, 1.5, 1_000, other scripts' digits and endless ones.
    if isinstance(raw, bool | float) or not re.fullmatch(r"[0-9]{1,9}", text):
        raise AnswerError(f"{question.flag}: {show(raw)!r} is not a whole number; use 1 or more.")
    value = int(text)
    if not 1 <= value <= MAX_COUNT:
        raise AnswerError(f"{question.flag}: {value} is out of range; use 1 to {MAX_COUNT}.")
    return value


def _path(question: Question, raw: Any, base: Path) -> str:
    if not isinstance(raw, str):
        raise AnswerError(f"{question.flag}: {show(raw)} is not a path in quotes.")
    if not raw:
        return ""
    path = os.path.abspath(base / raw)
    if not os.path.exists(path) and raw.startswith("~"):
        path = os.path.abspath(os.path.expanduser(raw))
    try:
        # By its bytes: in the C locale Python shows the bytes of a UTF-8 name as surrogates.
        text = os.fsencode(path).decode("utf-8")
    except UnicodeError:
        raise AnswerError(
            f"{question.flag}: {show(raw)} is not valid UTF-8; rename it or use a symbolic link."
        )
    if not os.path.exists(path):
        raise AnswerError(f"{question.flag}: {show(path)} does not exist; give one that does.")
    return text


def show(raw: Any) -> str:
    """What was given, on one line, printable and not endless."""
    text = ascii(raw) if isinstance(raw, str) and not raw.isprintable() else str(raw)
    return text if len(text) <= 120 else text[:117] + "..."


QUESTIONS = (
    Question(
        "model",
        "Model",
        "the model to train",
        "choice",
        lambda known: "gpt",
        {name: model.help for name, model in catalog.MODELS.items()},
    ),
    Question(
        "data",
        "Data",
        "what it is trained on",
        "choice",
        lambda known: "synthetic",
        {name: data.help for name, data in catalog.DATA.items()},
    ),
    Question(
        "data-path",
        "Path of the data",
        "where the data is; empty: set data.path in config.toml later",
        "path",
        lambda known: "",
        setting=True,
    ),
    Question(
        "nodes",
        "Nodes (machines)",
        "machines that train together",
        "integer",
        lambda known: 1,
    ),
    Question(
        "gpus-per-node",
        "GPUs per node",
        "ranks on each machine; on a CPU as many ranks run there",
        "integer",
        lambda known: 2,
    ),
    Question(
        "strategy",
        "Strategy",
        "how the model is spread over the ranks",
        "choice",
        lambda known: "ddp",
        {name: strategy.help for name, strategy in catalog.STRATEGIES.items()},
    ),
    Question(
        "launcher",
        "Where will it run?",
        "what the launch/ folder holds scripts for; one or more",
        "choices",
        lambda known: ("torchrun",),
        catalog.LAUNCHERS,
    ),
    Question(
        "backend",
        "Backend",
        "what the ranks talk through",
        "choice",
        lambda known: "auto",
        catalog.BACKENDS,
        asked=False,
    ),
    Question(
        "precision",
        "Precision",
        "number format of the computation",
        "choice",
        lambda known: "bf16",
        catalog.PRECISIONS,
        asked=False,
        setting=True,
    ),
    Question(
        "global-batch-size",
        "Global batch size",
        "samples per optimizer step over all ranks; default by model",
        "integer",
        lambda known: catalog.MODELS[known["model"]].global_batch_size,
        asked=False,
        setting=True,
    ),
)

BY_KEY = {question.key: question for question in QUESTIONS}


# What goes together: each rule says why its answers do not, and what would.


def _data_fits_model(model: str, data: str) -> str | None:
    task = catalog.MODELS[model].task
    if task in catalog.DATA[data].tasks:
        return None
    fits = [name for name, entry in catalog.DATA.items() if task in entry.tasks]
    others = [n for n, entry in catalog.MODELS.items() if entry.task in catalog.DATA[data].tasks]
    return (
        f"{model} cannot train on --data {data}; use --data {either(fits)}, "
        f"or --model {either(others)}."
    )


def _strategy_fits_model(model: str, strategy: str) -> str | None:
    entry = catalog.STRATEGIES[strategy]
    if not entry.models or model in entry.models:
        return None
    return (
        f"--strategy {strategy} does not work for {model}, only for {either(entry.models)}; "
        f"use --strategy {entry.instead}."
    )


def _strategy_fits_nodes(nodes: int, strategy: str) -> str | None:
    entry = catalog.STRATEGIES[strategy]
    if nodes >= entry.min_nodes:
        return None
    return (
        f"--strategy {strategy} needs {entry.min_nodes} or more nodes; on {nodes} use "
        f"--strategy {entry.instead}, or add --nodes {entry.min_nodes}."
    )


def _heads_fit_node(model: str, gpus: int, strategy: str) -> str | None:
    heads = catalog.MODELS[model].heads
    if strategy != "fsdp-tp" or not heads or heads % gpus == 0:
        return None
    fits = either(str(n) for n in range(1, heads + 1) if heads % n == 0)
    return (
        f"--strategy fsdp-tp deals the {heads} attention heads of {model} out to the GPUs of a "
        f"node, and {gpus} cannot share them evenly; use --gpus-per-node {fits}, or "
        f"--strategy fsdp."
    )


def _batch_fits_model(model: str, batch: int) -> str | None:
    micro = catalog.MODELS[model].micro_batch_size
    if batch % micro == 0:
        return None
    below, above = batch // micro * micro, -(-batch // micro) * micro
    return (
        f"--global-batch-size {batch} is not a multiple of the micro-batch of {model}, {micro}; "
        f"use {either(str(n) for n in (below, above) if n)}."
    )


def _path_fits_data(data: str, path: str) -> str | None:
    if not path:
        return None
    if not catalog.DATA[data].path:
        return f"--data {data} takes no --data-path; leave it out, or choose other data."
    if data == "image-folder" and not os.path.isdir(path.encode()):
        return f"--data-path: {show(path)} is no folder; image-folder wants one of class folders."
    return None


def _backend_fits_launcher(launcher: tuple[str, ...], backend: str) -> str | None:
    if backend != "mpi" or "mpirun" in launcher:
        return None
    return (
        "--backend mpi works only between ranks that mpirun starts; add --launcher mpirun, or use "
        "--backend auto."
    )


RULES: tuple[tuple[tuple[str, ...], Callable[..., str | None]], ...] = (
    (("model", "data"), _data_fits_model),
    (("model", "strategy"), _strategy_fits_model),
    (("nodes", "strategy"), _strategy_fits_nodes),
    (("model", "gpus-per-node", "strategy"), _heads_fit_node),
    (("model", "global-batch-size"), _batch_fits_model),
    (("data", "data-path"), _path_fits_data),
    (("launcher", "backend"), _backend_fits_launcher),
)


def problem(values: Values) -> str | None:
    """Why these answers (all, or those known so far) do not go together; None if they do."""
    for keys, rule in RULES:
        if all(key in values for key in keys) and (why := rule(*(values[key] for key in keys))):
            return why
    return None


def applies(question: Question, known: Values) -> bool:
    """Whether the question makes sense after the answers so far."""
    return question.key != "data-path" or bool(catalog.DATA[known["data"]].path)


def allowed(question: Question, known: Values) -> dict[str, str]:
    """The choices that go with the answers so far, with their descriptions."""
    fits = question.choices.items()
    return {name: text for name, text in fits if not problem({**known, question.key: name})}


def default(question: Question, known: Values) -> Any:
    """The default, or the first choice that fits where the answers so far rule it out."""
    value = question.default(known)
    if question.kind == "choice":
        fits = allowed(question, known)
        if value not in fits:
            return next(iter(fits), value)
    return value


# The name: of the folder, and with underscores of the package inside it.

_NAME = re.compile(r"[A-Za-z](?:[A-Za-z0-9_-]{0,62}[A-Za-z0-9])?")

# Imported by a generated project or its tools, or standing beside the package in its folder.
_TAKEN = frozenset("""
    torch torchvision torchaudio torchgen functorch triton numpy scipy sklearn pandas PIL yaml
    jsonargparse safetensors tensorboard tensorflow tqdm pytest hypothesis setuptools pip wheel
    pkg_resources hatchling typing_extensions google grpc markdown werkzeug absl packaging sympy
    networkx jinja2 fsspec filelock mpmath transformers datasets accelerate deepspeed lightning
    nvidia cuda matplotlib requests click rich black mypy ruff isympy jax keras cookiecutter
    scaffold train evaluate export prepare config test tests launch preflight preflight_node
    preflight_rank runs data build dist conftest
    """.split())
_DEVICES = {"con", "prn", "aux", "nul"} | {f"{d}{i}" for d in ("com", "lpt") for i in range(1, 10)}


def check_name(name: str) -> str:
    """The name, if it makes a safe folder and an importable package that hides no other module."""
    if not _NAME.fullmatch(name):
        tidy = re.sub(r"[^A-Za-z0-9_-]+", "-", name.encode("ascii", "ignore").decode())
        tidy = re.sub(r"^[^A-Za-z]+|[^A-Za-z0-9]+$", "", tidy)[:40].rstrip("-_")
        example = tidy if _NAME.fullmatch(tidy) else "my-project"
        raise AnswerError(
            f"NAME {show(name)!r} cannot be a folder and a package: use 1 to 64 letters, digits, "
            f"- and _, starting with a letter and ending with a letter or digit, such as {example}."
        )
    package = name.replace("-", "_")
    if keyword.iskeyword(package):
        raise AnswerError(f"NAME {name} is a Python keyword; use another, such as {name}-project.")
    lowered = package.lower()
    # Compared without case, because some file systems do.
    if lowered in {known.lower() for known in _TAKEN | sys.stdlib_module_names | _DEVICES}:
        raise AnswerError(
            f"NAME {name} would hide a module or folder called {lowered}; use another, such as "
            f"{name}-project."
        )
    return name
