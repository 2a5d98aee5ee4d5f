"""Typed answers, and their two homes: `scaffold.toml` (structure) and the state (settings)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scaffold import catalog

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
