"""What `regenerate` will do: base, yours and new compared, one step per file, nothing written.

A new project takes the same way, with nothing as base and nothing on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any

from scaffold.disk import Disk, Found, dressed, same
from scaffold.errors import AnswerError, ScaffoldError
from scaffold.manifest import Owner
from scaffold.merge import Merged, has_markers, merge
from scaffold.merge_env import merge_env
from scaffold.merge_python import Broken, merge_python
from scaffold.merge_toml import merge_toml, set_values
from scaffold.render import File, Tree
from scaffold.state import BASE, STATE, Record, State, digest, text_of

ASIDE = ".scaffold-new"


class Action(StrEnum):
    """What happens to one file."""

    CREATE = "create"
    UPDATE = "update"
    MERGE = "merge"
    CONFLICT = "conflict"
    DELETE = "delete"
    KEEP = "keep"
    GONE = "gone"  # deleted by the person, and stays so
    SAME = "same"


@dataclass(frozen=True)
class Step:
    """What happens to the generated file `path` and why; a `problem` needs the person."""

    path: str
    action: Action
    note: str = ""
    problem: bool = False
    at: str = ""  # where it is, if the person moved it


@dataclass(frozen=True)
class Plan:
    """All steps, the files to write (None: to delete) by path on disk, and the state after it."""

    steps: tuple[Step, ...]
    writes: Mapping[str, File | None]
    state: State
    disk: Disk

    @property
    def problems(self) -> list[Step]:
        """The steps that need the person; with any of them the exit code is 1."""
        return [step for step in self.steps if step.problem]


Follow = Callable[[str, str], bool]
"""Whether the file generated at the first path is now the one at the second."""


def compare(
    old: State,
    disk: Disk,
    tree: Tree,
    *,
    version: str,
    answers: Mapping[str, Any],
    settings: Mapping[str, Any],
    restore: Collection[str] = (),
    follow: Follow = lambda path, at: False,
) -> Plan:
    """The plan that takes a project from its last generated files to `tree`.

    `version`, `answers` and `settings` are what made `tree`. Files in `restore` come back though
    the person deleted them.

    Raises:
        ScaffoldError: markers of an earlier conflict are still there.
        AnswerError: a path in `restore` cannot be restored.
    """
    for path in restore:
        if path not in tree:
            raise AnswerError(f"--restore {path}: these answers generate no such file.")
        at = home(path, old.files.get(path), disk)
        if disk.found(at):
            raise AnswerError(f"--restore {path}: {at} is there; delete it first to get it anew.")
    if marked := unresolved_markers(old, disk):
        raise ScaffoldError(
            f"conflict markers are left in {', '.join(marked)}; resolve them, then run this again."
        )
    planner = _Planner(old, disk, tree, frozenset(restore), follow)
    for path, found in disk.seen_as.items():  # what a migration moved arrives, whatever comes of it
        file = File(found.content, Owner.MERGE, found.executable) if found else None
        planner.writes[path] = file
    for path in sorted({*old.files, *tree}):
        planner.plan(path)
    state = State(version, answers, settings, planner.records)
    planner.store(state)
    return Plan(tuple(planner.steps), planner.writes, state, disk)


def unresolved_markers(state: State, disk: Disk) -> list[str]:
    """The files in which an earlier merge left conflict markers that are still there."""
    marked = []
    for path, record in state.files.items():
        at = home(path, record, disk)
        found = disk.found(at)
        if found and _takes_markers(path) and has_markers(text_of(found.content) or ""):
            marked.append(at)
    return marked


def _takes_markers(path: str) -> bool:
    """Only what people read first may hold markers: never what a job or a parser reads."""
    return path.endswith((".py", ".md")) and not path.startswith("launch/")


@dataclass
class _Planner:
    """One pass over all paths; what it decides is in `steps`, `writes` and `records`."""

    old: State
    disk: Disk
    tree: Tree
    restore: frozenset[str]
    follow: Follow
    steps: list[Step] = field(default_factory=list)
    writes: dict[str, File | None] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)

    def plan(self, path: str) -> None:
        """Decide about one generated file, wanted until now, from now on, or both."""
        record, new = self.old.files.get(path), self.tree.get(path)
        at = home(path, record, self.disk)
        yours = self.disk.found(at)
        if yours is None and record and new and path not in self.restore:
            moved = self._moved_to(path, record)
            if moved and not self._followed(path, record, new, moved):
                return
            if moved:
                at, yours = moved, self.disk.found(moved)
        if yours is not None and (owner := self._taken(yours.at, at, path)):
            yours = Found(foreign=f"is {owner} under another name")
        if new is None:
            assert record is not None
            self._unwanted(path, at, record, yours)
        elif yours is None:
            self._absent(path, record, new)
        else:
            self.records[path] = Record.of(new, moved=at if at != path else None)
            self._present(path, at, record, yours, new)

    def store(self, state: State) -> None:
        """Plan the writes inside `.scaffold/`, the state last."""
        stored = state.tree()
        for base in self.disk.below(BASE):
            if base not in stored:
                self.writes[base] = None
        for path, file in stored.items():
            found = self.disk.found(path)
            if found is None or found.content != file.content:
                self.writes[path] = file
        if STATE in self.writes:
            self.writes[STATE] = self.writes.pop(STATE)

    def _say(
        self, path: str, action: Action, note: str = "", *, problem: bool = False, at: str = ""
    ) -> None:
        self.steps.append(Step(path, action, note, problem, at if at != path else ""))

    def _taken(self, real: str, at: str, path: str) -> str:
        """The other generated file that the one on disk is: moved here, or linked to from here."""
        for other, record in {**self.old.files, **self.records}.items():
            if other != path and record.moved == real != "":
                return other
        return real if real != at and real in {*self.old.files, *self.tree} else ""

    def _absent(self, path: str, record: Record | None, new: File) -> None:
        """Nothing on disk: write it, unless the person deleted it."""
        if record and not record.off and path not in self.restore and new.owner != Owner.ANSWERS:
            self._say(path, Action.GONE, f"you deleted it; --restore {path} brings it back")
            self.records[path] = record  # the base stays too: it may turn out to have moved
            return
        self._check_way(path)
        self.records[path] = Record.of(new)
        self.writes[path] = new
        self._say(path, Action.CREATE)

    def _check_way(self, path: str) -> None:
        """Refuse where a file stands in the way of a folder that is needed."""
        for parent in PurePosixPath(path).parents:
            here = self.disk.root / parent
            if here.exists() and not here.is_dir():
                raise ScaffoldError(
                    f"{parent} is no folder, but {path} belongs there; move it away."
                )

    def _unwanted(self, path: str, at: str, record: Record, yours: Found | None) -> None:
        """The answers no longer generate it: delete it, unless the person edited it."""
        if yours is None:
            return
        if _is_base(record, yours) and yours.executable == record.executable:
            self.writes[yours.at] = None
            self._say(path, Action.DELETE, "no longer generated", at=at)
        else:
            if record.base is not None and self._pending(at, record.base):
                # Never taken over: should it be wanted again, it is offered again.
                self.writes[at + ASIDE] = None
            else:
                self.records[path] = replace(record, off=True, moved=at if at != path else None)
            self._say(path, Action.KEEP, "no longer generated, but you changed it", at=at)

    def _present(self, path: str, at: str, record: Record | None, yours: Found, new: File) -> None:
        """It is on disk and wanted: the heart of the table."""
        base = record.base if record else None
        if new.owner == Owner.ONCE:
            if record:
                self.records[path] = replace(record, off=False)
            self._say(path, Action.SAME)
        elif new.owner == Owner.ANSWERS and not yours.foreign:
            self._answers(path, base or b"", yours, new)
        elif yours.foreign:
            if base is not None and same(base, new.content):
                self._say(path, Action.KEEP, yours.foreign)
            else:
                self._aside(path, at, new, yours.foreign)
        elif same(yours.content, new.content):
            self._write(at, record, yours, yours.content, new)
            self._clear(at, base)
            if base is not None and same(base, new.content):
                self._say(path, Action.SAME, at=at)
            else:
                self._say(path, Action.KEEP, "it is as wanted already", at=at)
        elif record is None:
            self._aside(path, at, new, "is yours, and was not generated")
        elif _is_base(record, yours):
            text = text_of(new.content)
            content = new.content if text is None else dressed(text, yours.content)
            self._write(at, record, yours, content, new)
            self._clear(at, base)
            self._say(path, Action.UPDATE, at=at)
        elif base is None:
            self._aside(path, at, new, "differs, and what was last generated is lost or changed")
        elif same(base, new.content):
            self._write(at, record, yours, yours.content, new)
            if self.disk.found(at + ASIDE):
                self._say(path, Action.KEEP, f"{at}{ASIDE} awaits you", problem=True, at=at)
            else:
                self._say(path, Action.KEEP, "you changed it", at=at)
        else:
            self._merge(path, at, record, yours, new)

    def _answers(self, path: str, base: bytes, yours: Found, new: File) -> None:
        mine = text_of(yours.content)
        try:
            if mine is None:
                raise ValueError
            text = set_values(text_of(base) or "", mine, text_of(new.content) or "")
        except ValueError:
            return self._aside(path, path, new, "is not valid TOML")
        self._write(path, None, yours, dressed(text, yours.content), new)
        self._say(path, Action.UPDATE if path in self.writes else Action.SAME)

    def _merge(self, path: str, at: str, record: Record, yours: Found, new: File) -> None:
        """Both sides changed it."""
        assert record.base is not None
        base, mine, text = (text_of(c) for c in (record.base, yours.content, new.content))
        if base is None or mine is None or text is None:
            return self._aside(path, at, new, "is no text, and both sides changed it")
        if self.disk.found(at + ASIDE):
            return self._aside(path, at, new, f"still awaits what {at}{ASIDE} brought")
        if path.endswith(".toml"):
            try:
                keys = merge_toml(base, mine, text)
            except ValueError:
                return self._aside(path, at, new, "is not valid TOML")
            self._write(at, record, yours, dressed(keys.text, yours.content), new)
            if keys.conflicts:
                note = f"both sides changed {', '.join(keys.conflicts)}: yours stays"
                return self._say(path, Action.CONFLICT, note, problem=True, at=at)
            return self._say(path, Action.MERGE, at=at)
        try:
            if path.endswith(".py"):
                pyproject = self.disk.found("pyproject.toml")
                settings = text_of(pyproject.content) if pyproject else None
                merged = merge_python(base, mine, text, settings or "")
            else:
                merged = merge(base, mine, text)
        except Broken as error:
            return self._aside(path, at, new, str(error))
        if merged.conflicts and path.endswith(".env"):
            variables = merge_env(base, mine, text)
            merged = merged if variables is None else Merged(variables, 0)
        if merged.conflicts and not _takes_markers(path):
            return self._aside(path, at, new, "conflicts with what is new")
        self._write(at, record, yours, dressed(merged.text, yours.content), new)
        if merged.conflicts:
            places = "a place" if merged.conflicts == 1 else f"{merged.conflicts} places"
            self._say(path, Action.CONFLICT, f"markers in {places}", problem=True, at=at)
        else:
            self._say(path, Action.MERGE, at=at)

    def _write(
        self, at: str, record: Record | None, yours: Found, content: bytes, new: File
    ) -> None:
        """Plan to replace the file on disk, its executable bit merged as well, if that changes it."""
        executable = yours.executable
        if record and yours.executable == record.executable:
            executable = new.executable
        now = self.disk.actual(yours.at)
        if now is None or (content, executable) != (now.content, now.executable):
            self.writes[yours.at] = File(content, new.owner, executable)

    def _aside(self, path: str, at: str, new: File, why: str) -> None:
        """Keep the person's file and put the new one beside it."""
        beside = at + ASIDE
        record, found = self.old.files.get(path), self.disk.found(beside)
        if found and found.foreign:
            # Nowhere to put it: the base stays what it was, so that it is offered again.
            self.records.pop(path)
            if record:
                self.records[path] = record
            return self._say(path, Action.CONFLICT, f"{why}; left alone", problem=True, at=at)
        if found is None or (record and record.base and self._pending(at, record.base)):
            self.writes[beside] = new
        elif not same(found.content, new.content):
            raise ScaffoldError(
                f"{beside} is in the way: take over from it what you want, delete it, run again."
            )
        self._say(path, Action.CONFLICT, f"{why}; the new one is {beside}", problem=True, at=at)

    def _pending(self, at: str, base: bytes) -> bool:
        """Whether an earlier conflict's new file still lies beside, as it was written."""
        found = self.disk.found(at + ASIDE)
        return found is not None and not found.foreign and same(found.content, base)

    def _clear(self, at: str, base: bytes | None) -> None:
        """Take away a new file that was left beside and is no longer needed."""
        if base is not None and self._pending(at, base):
            self.writes[at + ASIDE] = None

    def _moved_to(self, path: str, record: Record) -> str | None:
        """Where a file that is missing seems to be now."""
        if record.base is None or record.off:
            return None
        records = {**self.old.files, **self.records}
        known = {*self.tree, *records, *(other.moved for other in records.values())}
        return self.disk.moved_to(path, record.base, known)

    def _followed(self, path: str, record: Record, new: File, moved: str) -> bool:
        """Whether the person wants a moved file merged at its new place; if not, say what is."""
        news = record.base is None or not same(record.base, new.content)
        if news and self.follow(path, moved):
            return True
        note = f"seems to be {moved} now"
        note += "; --follow-renames merges what is new into it" if news else ""
        self._say(path, Action.GONE, note, problem=news)
        self.records[path] = record  # the base stays, for when it is followed
        return False


def home(path: str, record: Record | None, disk: Disk) -> str:
    """Where a generated file is, as far as the state knows."""
    if record is None or record.moved is None:
        return path
    return path if disk.found(path) and not disk.found(record.moved) else record.moved


def _is_base(record: Record, yours: Found) -> bool:
    """Whether a file on disk is what was last generated; the hash alone can prove it."""
    if yours.foreign:
        return False
    if record.base is None:
        return digest(yours.content) == record.sha256
    return same(record.base, yours.content)
