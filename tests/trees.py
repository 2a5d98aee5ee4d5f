"""Small projects of texts: what was generated, what the person made of it, what is generated now."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaffold import apply, state
from scaffold.disk import Disk
from scaffold.manifest import Owner
from scaffold.plan import Plan, Step, compare
from scaffold.render import File, Tree

Content = str | bytes | None


def owner_of(path: str) -> Owner:
    """Owners as the manifest gives them, by the names that the tests use."""
    if path == "scaffold.toml":
        return Owner.ANSWERS
    if path == "launch/site.env":
        return Owner.ONCE
    return Owner.TOOL if path.startswith("launch/") else Owner.MERGE


def tree(files: Mapping[str, Content], executable: tuple[str, ...] = ()) -> Tree:
    """Rendered files."""
    return {
        path: File(_bytes(content), owner_of(path), path in executable)
        for path, content in sorted(files.items())
        if content is not None
    }


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


@dataclass
class Project:
    """A project on disk: made of `base`, then edited."""

    root: Path
    facts: dict[str, Any] = field(
        default_factory=lambda: {"version": "0.1.0", "answers": {"nodes": 1}, "settings": {}}
    )

    @classmethod
    def made(cls, root: Path, base: Mapping[str, Content], *executable: str) -> Project:
        """A project as `new` writes it."""
        project = cls(root)
        apply.create(root, tree(base, executable), **project.facts)
        return project

    def edit(self, files: Mapping[str, Content]) -> None:
        """Write or (None) delete files."""
        for path, content in files.items():
            here = self.root / path
            if content is None:
                here.unlink()
            else:
                here.parent.mkdir(parents=True, exist_ok=True)
                here.write_bytes(_bytes(content))

    def plan(self, new: Tree, **options: Any) -> Plan:
        """What a regenerate to this tree would do."""
        old = state.read(self.root)
        return compare(old, Disk(self.root), new, **{**self.facts, **options})

    def regenerate(self, new: Tree, **options: Any) -> Plan:
        """What the command does, without its words."""
        with apply.locked(self.root):
            apply.recover(self.root)
            plan = self.plan(new, **options)
            apply.regenerate(self.root, plan)
        return plan

    def undo(self, **options: Any) -> list[str]:
        """What `scaffold undo` does."""
        with apply.locked(self.root):
            apply.recover(self.root)
            return apply.undo(self.root, **options)

    def text(self, path: str) -> str:
        """A file's text with its own line ends."""
        return (self.root / path).read_bytes().decode()

    def snapshot(self) -> dict[str, tuple[str, bytes, int]]:
        """Everything but what is of this copy alone: kind, content and permissions by path."""
        found = {}
        for folder, folders, names in os.walk(self.root):
            folders[:] = [f for f in folders if Path(folder, f) != self.root / apply.LOCAL]
            for name in [*names, *folders]:
                here = Path(folder) / name
                path = here.relative_to(self.root).as_posix()
                if here.is_symlink():
                    found[path] = ("link", os.readlink(here).encode(), 0)
                elif here.is_dir():
                    found[path] = ("folder", b"", here.stat().st_mode)
                else:
                    found[path] = ("file", here.read_bytes(), here.stat().st_mode)
        return found


def step(plan: Plan, path: str) -> Step:
    """The one step about a path."""
    (found,) = [step for step in plan.steps if step.path == path]
    return found
