"""Typed answers, and their two homes: `scaffold.toml` (structure) and the state (settings)."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from scaffold import catalog, questions
from scaffold.errors import AnswerError
from scaffold.questions import Question, Values

STRUCTURE = (
    "name",
    "model",
    "data",
    "nodes",
    "gpus-per-node",
    "strategy",
    "launcher",
    "backend",
)
SETTINGS = ("precision", "global-batch-size", "data-path")


@dataclass(frozen=True)
class Answers:
    """What the person chose, complete and checked.

    Structure is kept in `scaffold.toml` and followed by `regenerate`. Settings (`precision`,
    `global_batch_size`, `data_path`) only seed `config.toml` and live there afterwards; they are
    remembered so that the files can be rendered again.
    """

    name: str
    model: str = "gpt"
    data: str = "synthetic"
    nodes: int = 1
    gpus_per_node: int = 2
    strategy: str = "ddp"
    launcher: tuple[str, ...] = ("torchrun",)
    backend: str = "auto"
    precision: str = "bf16"
    global_batch_size: int = 0  # 0: the model's own, filled in below
    data_path: str = ""

    def __post_init__(self) -> None:
        if not self.global_batch_size:
            default = catalog.MODELS[self.model].global_batch_size
            object.__setattr__(self, "global_batch_size", default)

    @property
    def package(self) -> str:
        """The importable package inside the project's folder."""
        return self.name.replace("-", "_")

    def structure(self) -> dict[str, Any]:
        """The answers that `scaffold.toml` holds, keyed as there."""
        return self._pick(STRUCTURE)

    def settings(self) -> dict[str, Any]:
        """The answers that only seed `config.toml`, keyed as their flags."""
        return self._pick(SETTINGS)

    def _pick(self, keys: tuple[str, ...]) -> dict[str, Any]:
        values = {key: getattr(self, key.replace("-", "_")) for key in keys}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Answers:
        """Answers from a mapping keyed as the flags (values already checked)."""
        fields = {key.replace("-", "_"): value for key, value in values.items()}
        fields["launcher"] = tuple(fields.get("launcher", ("torchrun",)))
        return cls(**fields)


Ask = Callable[[Question, Values], Any]
"""Puts one question to a person, given the answers so far."""


def read(path: Path) -> dict[str, Any]:
    """The answers in a TOML file, parsed one by one; relative paths start at its folder."""
    try:
        return parse(path.read_bytes(), path)
    except OSError as error:
        raise AnswerError(f"cannot read {path}: {error.strerror or error}.")


def parse(content: bytes, path: Path) -> dict[str, Any]:
    """The same from the bytes of such a file; `path` is for the messages and relative paths."""
    try:
        table = tomllib.loads(content.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise AnswerError(f"{path} is not valid TOML: {error}.")
    given = {}
    for key, raw in table.items():
        if key == "name":  # so that a project's own scaffold.toml can be passed
            continue
        if key not in questions.BY_KEY:
            close = get_close_matches(key.replace("_", "-"), questions.BY_KEY, n=1)
            hint = f"did you mean {close[0]}?" if close else "`scaffold options` lists the keys."
            raise AnswerError(f"{path}: {questions.show(key)} is no answer; {hint}")
        try:
            given[key] = questions.BY_KEY[key].parse(raw, path.resolve().parent)
        except AnswerError as error:
            raise AnswerError(f"{path}: {error.message.removeprefix('--')}")
    return given


def complete(name: str, given: Values, ask: Ask | None = None) -> tuple[Answers, set[str]]:
    """Complete answers, and the keys that took their defaults.

    Open questions are put to `ask` where there is one, else they take their defaults. What does
    not go together is refused.
    """
    known = dict(given)
    _refuse(known)
    if known.get("data-path") and "data" not in known and not ask:
        kinds = questions.either(name for name, data in catalog.DATA.items() if data.path)
        raise AnswerError(f"--data-path alone does not say what is there; add --data {kinds}.")
    defaulted = set()
    for question in questions.QUESTIONS:
        if question.key in known or not questions.applies(question, known):
            continue
        if ask and question.asked and _open(question, known):
            known[question.key] = ask(question, known)
        else:
            known[question.key] = questions.default(question, known)
            defaulted.add(question.key)
        _refuse(known)
    return Answers.of({"name": name, **known}), defaulted


def _open(question: Question, known: Values) -> bool:
    """Whether there is anything to choose."""
    return not question.choices or len(questions.allowed(question, known)) > 1


def _refuse(known: Values) -> None:
    if why := questions.problem(known):
        raise AnswerError(why)
