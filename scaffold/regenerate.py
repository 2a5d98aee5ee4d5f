"""An existing project: the answers asked for, the plan that leads to them, what it means."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import unified_diff
from pathlib import Path
from typing import Any

from scaffold import __version__, answers, apply, migrations, questions, state
from scaffold.answers import Answers
from scaffold.disk import Disk, same
from scaffold.errors import AnswerError, ScaffoldError
from scaffold.merge import lines_of
from scaffold.plan import ASIDE, Follow, Plan, compare, home, unresolved_markers
from scaffold.render import render
from scaffold.state import FOLDER, State, text_of
from scaffold.topology import Topology

ANSWERS = "scaffold.toml"


@dataclass(frozen=True)
class Change:
    """A planned regenerate: the answers before and after, and what happens to the files."""

    project: Path
    before: Answers
    after: Answers
    plan: Plan
    version: str  # of scaffold, that made the project until now

    def answers(self) -> dict[str, tuple[Any, Any]]:
        """The answers that change, before and after."""
        before, after = self.before.structure(), self.after.structure()
        return {key: (before[key], after[key]) for key in after if before[key] != after[key]}

    def topologies(self) -> tuple[Topology, Topology]:
        """Before and after, with the batch sizes that `config.toml` has then."""
        was = self.plan.disk.actual("config.toml")
        now = self.plan.writes.get("config.toml") or was
        return (
            _topology(self.before, was.content if was else b""),
            _topology(self.after, now.content if now else b""),
        )

    def runs(self) -> list[tuple[str, int, str]]:
        """Runs with a checkpoint: name, its step, and why it would not resume (or nothing)."""
        why = ""
        if self.before.model != self.after.model:
            why = f"its weights are those of {self.before.model}; use another --run.name"
        elif self.before.data != self.after.data:
            why = "the data is another; `--run.allow_data_change true` resumes all the same"
        latest = {}
        for path in sorted(self.project.glob("runs/*/checkpoints/step_*[0-9]")):
            latest[path.parent.parent.name] = int(path.name.removeprefix("step_"))
        return [(name, step, why) for name, step in latest.items()]

    def diffs(self) -> Iterator[tuple[str, str]]:
        """A unified diff of each file of the person's that changes; none for binary files."""
        for path, file in sorted(self.plan.writes.items()):
            if path.startswith(f"{FOLDER}/"):
                continue
            was = self.plan.disk.actual(path)
            sides = (was.content if was else b""), (file.content if file else b"")
            old, new = (text_of(side) for side in sides)
            if old is None or new is None:
                yield path, f"{path}: binary\n"
            elif old != new:
                names = path if was else "/dev/null", path if file else "/dev/null"
                yield path, "".join(_diff(old, new, *names))


def _diff(old: str, new: str, before: str, after: str) -> Iterator[str]:
    for line in unified_diff(lines_of(old), lines_of(new), before, after):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _topology(chosen: Answers, config: bytes) -> Topology:
    """The topology, the batch sizes as the person has them in `config.toml`."""
    topology = Topology.of(chosen)
    try:
        train = tomllib.loads(config.decode("utf-8"))["train"]
        batch, micro = int(train["global_batch_size"]), int(train["micro_batch_size"])
    except (ValueError, KeyError, TypeError):
        return topology
    if batch < 1 or micro < 1:
        return topology
    return replace(topology, global_batch_size=batch, micro_batch_size=micro)


def prepare(
    project: Path,
    flags: Mapping[str, Any],
    *,
    without: Collection[str] = (),
    restore: Collection[str] = (),
    follow: Follow = lambda path, at: False,
) -> Change:
    """Plan what `scaffold.toml`, overridden by `flags`, asks for; `without` are launchers to drop."""
    disk = Disk(project)
    old = state.read(project)
    made_by = old.version
    old = migrations.migrate(old, disk)
    before = _answers(old.answers, old.settings)
    if old.version == __version__ and any(r.base is None for r in old.files.values()):
        old = state.rebuilt(old, render(before))
    after = _asked(before, disk, flags, without)
    # The same version wrote the bases: what equals one needs no formatting.
    bases = {record.base for record in old.files.values() if record.base and made_by == __version__}
    plan = compare(
        old,
        disk,
        render(after, formatted=bases),
        version=__version__,
        answers=after.structure(),
        settings=after.settings(),
        restore=restore,
        follow=follow,
    )
    return Change(project, before, after, plan, made_by)


def check_adoptable(project: Path) -> None:
    """Refuse a folder that needs no `adopt`, or that looks like no project."""
    if (project / state.STATE).exists():
        raise AnswerError(f"{project} has its {state.STATE}; use `scaffold regenerate`.")
    if not any((project / name).is_file() for name in (ANSWERS, "train.py")):
        raise AnswerError(f"{project} looks like no project: no {ANSWERS} and no train.py.")


def adopt(project: Path, flags: Mapping[str, Any]) -> Change:
    """Plan to take a folder of the same layout whose `.scaffold/` is lost under its wings.

    Files that are not as they would be generated stay; the generated ones are put beside them.
    """
    disk = Disk(project)
    given = {**_read(disk), **flags}
    name = _name(disk, given.pop("name", None))
    after, _ = answers.complete(name, given)
    facts: dict[str, Any] = {"answers": after.structure(), "settings": after.settings()}
    plan = compare(State(__version__, **facts), disk, render(after), version=__version__, **facts)
    return Change(project, after, after, plan, __version__)


def _name(disk: Disk, given: Any) -> str:
    """The name of a project that is adopted: as its answers give it, its packaging, or its folder."""
    if given is None:
        try:
            found = disk.found("pyproject.toml")
            given = tomllib.loads((found.content if found else b"").decode())["project"]["name"]
            if not (disk.root / given.replace("-", "_")).is_dir():
                given = None
        except (ValueError, LookupError, TypeError, AttributeError):
            given = None
    name = disk.root.resolve().name if given is None else given
    try:
        return questions.check_name(str(name))
    except AnswerError as error:
        raise AnswerError(f'{error.message} Give it as name = "..." in {ANSWERS}.')


def _answers(structure: Mapping[str, Any], settings: Mapping[str, Any]) -> Answers:
    """The answers of a state; one that this version does not know is an error, not a crash later."""
    try:
        for key, value in {**structure, **settings}.items():
            if key not in ("name", "data-path"):  # a path may well be another machine's
                questions.BY_KEY[key].parse(value)
        return Answers.of({**structure, **settings})
    except (TypeError, KeyError, AnswerError) as error:
        reason = error.message if isinstance(error, AnswerError) else repr(error)
        raise ScaffoldError(
            f"{state.STATE} has no usable answers ({reason.rstrip('.')}); "
            "take it back from version control."
        )


def _asked(
    before: Answers, disk: Disk, flags: Mapping[str, Any], without: Collection[str]
) -> Answers:
    """The answers that `scaffold.toml` and the flags ask for together."""
    found = _read(disk)
    if found.pop("name", before.name) != before.name:
        raise AnswerError(f'{ANSWERS}: a project keeps its name; put name = "{before.name}" back.')
    given = {**before.structure(), **found, **flags}
    del given["name"]
    for name in without:  # a typing mistake must not look like done
        questions.BY_KEY["launcher"].parse([name])
    # A launcher is one more, not one instead.
    launchers = {*found.get("launcher", before.launcher), *given["launcher"]} - {*without}
    given["launcher"] = questions.BY_KEY["launcher"].parse(sorted(launchers))
    if kept := [name for name in without if name in given["launcher"]]:
        raise AnswerError(f"--no-launcher {kept[0]}: it is always there; leave this out.")
    # Settings stay what they were, as far as they fit the model and the data.
    given["precision"] = before.precision
    if given["model"] == before.model:
        given["global-batch-size"] = before.global_batch_size
    after, _ = answers.complete(before.name, given)
    # Its path was checked when it was given; here it may well be another machine's.
    return replace(after, data_path=before.data_path if after.data == before.data else "")


def _read(disk: Disk) -> dict[str, Any]:
    """The answers in `scaffold.toml` as a migration shows it, and the name there."""
    found = disk.found(ANSWERS)
    if found is None or found.foreign:
        return {}
    path = disk.root / ANSWERS
    given = answers.parse(found.content, path)
    if wrong := [key for key in given if key in answers.SETTINGS]:
        raise AnswerError(f"{path}: {wrong[0]} is no answer of a project; set it in config.toml.")
    table = tomllib.loads(found.content.decode("utf-8-sig"))
    return {**given, **({"name": table["name"]} if "name" in table else {})}


@dataclass(frozen=True)
class Status:
    """What a person made of a project since it was generated."""

    version: str
    answers: Mapping[str, Any]
    files: list[tuple[str, str, str]]  # path, what it is, and a word about it
    interrupted: bool

    @property
    def unresolved(self) -> list[str]:
        """Files that wait for the person."""
        return [path for path, what, _ in self.files if what == "unresolved"]


def status(project: Path) -> Status:
    """What is edited, moved, deleted or unresolved; reads only."""
    disk = Disk(project)
    known = state.read(project)
    files = []
    for at in unresolved_markers(known, disk):
        files.append((at, "unresolved", "conflict markers"))
    for path, record in sorted(known.files.items()):
        at = home(path, record, disk)
        found = disk.found(at)
        if disk.found(at + ASIDE):
            files.append((at, "unresolved", f"{at}{ASIDE} awaits you"))
        if found is None:
            moved = record.base and disk.moved_to(path, record.base, known.files)
            files.append((path, "deleted", f"seems to be {moved} now" if moved else ""))
        elif found.foreign:
            files.append((at, "left alone", found.foreign))
        else:
            if at != path:
                files.append((path, "moved", f"to {at}"))
            if record.base is None:
                files.append((at, "base lost", "what was last generated is missing or changed"))
            elif not same(record.base, found.content):
                files.append((at, "edited", "no longer generated" if record.off else ""))
            if found.executable != record.executable:
                files.append((at, "mode", "executable" if found.executable else "not executable"))
    return Status(known.version, known.answers, files, apply.interrupted(project))
