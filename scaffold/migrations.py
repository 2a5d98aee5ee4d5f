"""What changed its name between versions of scaffold, so that an older project can follow.

An upgrade is the same merge as a changed answer. Only names need a word: an answer that is called
otherwise now, or a generated file that has another path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from scaffold.disk import Disk
from scaffold.state import State, release, text_of

ANSWERS = "scaffold.toml"


@dataclass(frozen=True)
class Migration:
    """The names that are new in `version`: each mapping is from the old to the new one."""

    version: str
    answers: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[tuple[str, Any], Any] = field(default_factory=dict)  # (answer, value) to value
    files: Mapping[str, str] = field(default_factory=dict)


MIGRATIONS: tuple[Migration, ...] = ()
"""In the order of their versions. Nothing has changed its name yet."""


def migrate(state: State, disk: Disk) -> State:
    """The state as this version names things; `disk` shows moved files at their new place.

    Nothing is written: what `disk` shows otherwise than it is becomes part of the plan.
    """
    for migration in MIGRATIONS:
        if release(migration.version) > release(state.version):
            answers, settings = (_renamed(migration, t) for t in (state.answers, state.settings))
            files = {
                migration.files.get(path, path): record for path, record in state.files.items()
            }
            state = replace(state, answers=answers, settings=settings, files=files)
            for old, new in migration.files.items():
                _show_moved(disk, old, new)
            _show_renamed(disk, migration)
    return state


def _renamed(migration: Migration, table: Mapping[str, Any]) -> dict[str, Any]:
    named = {migration.answers.get(key, key): value for key, value in table.items()}
    return {
        key: value if isinstance(value, list) else migration.values.get((key, value), value)
        for key, value in named.items()
    }


def _show_moved(disk: Disk, old: str, new: str) -> None:
    found = disk.found(old)
    if found and not found.foreign and disk.found(new) is None:
        disk.seen_as[old] = None
        disk.seen_as[new] = replace(found, at=new)


def _show_renamed(disk: Disk, migration: Migration) -> None:
    """The answers file with its new names, comments and order as they are."""
    found = disk.found(ANSWERS)
    text = text_of(found.content) if found else None
    if found is None or text is None:
        return
    for old, new in migration.answers.items():
        text = re.sub(rf"(?m)^{re.escape(old)}(?=\s*=)", new, text)
    for (key, value), now in migration.values.items():
        text = re.sub(
            rf'(?m)^({re.escape(key)}\s*=\s*)"{re.escape(str(value))}"', rf'\1"{now}"', text
        )
    disk.seen_as[ANSWERS] = replace(found, content=text.encode())
