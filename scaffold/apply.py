"""Write a plan so that a crash, Ctrl-C or a full disk leaves the old project or the new one.

Everything new and a copy of everything old is first put into `.scaffold/local/staged/`, with a
journal that is written last. Then each file is moved to its place, the state last, and the folder
becomes `.scaffold/local/undo/`. Whoever comes next and finds a journal under `staged/` puts the old
files back: all that a reverted file needs is there, and moving files needs no space on the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scaffold.disk import Disk
from scaffold.errors import AnswerError, ScaffoldError
from scaffold.plan import Plan, compare
from scaffold.render import Tree
from scaffold.state import FOLDER, State

LOCAL = f"{FOLDER}/local"  # of this copy alone, never committed
STAGED, UNDO = f"{LOCAL}/staged", f"{LOCAL}/undo"
JOURNAL = "journal.json"


def create(
    target: Path,
    tree: Tree,
    *,
    version: str,
    answers: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> None:
    """Write a new project, `.scaffold/` included, beside the target and rename it: all or nothing.

    `answers` and `settings` are what `Answers.structure()` and `Answers.settings()` give. The
    target must not exist or be an empty folder.
    """
    if target.is_dir():
        if any(target.iterdir()):
            raise AnswerError(f"{target} exists and is not empty; choose another name or folder.")
    elif target.exists() or target.is_symlink():
        raise AnswerError(f"{target} exists and is no folder; choose another name or folder.")
    target = target.resolve()
    # Beside the target, so that the rename stays on one file system.
    scratch = target.parent / f".{target.name}.scaffold-{secrets.token_hex(4)}"
    nothing = State(version, answers, settings)
    plan = compare(
        nothing, Disk(scratch), tree, version=version, answers=answers, settings=settings
    )
    try:
        for path, file in plan.writes.items():
            assert file is not None
            write(scratch / path, file.content, file.executable)
        os.rename(scratch, target)
    except OSError as error:
        raise ScaffoldError(
            f"cannot write {target}: {error.strerror or error}; nothing was left behind."
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write(path: Path, content: bytes, executable: bool = False, like: Path | None = None) -> None:
    """Write one file with its folders.

    Permissions are those of `like` where there is such a file, but for the executable bit.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    mode = stat.S_IMODE((like if like and like.exists() else path).stat().st_mode)
    # Whoever may read it may run it, as chmod +x under a umask does.
    path.chmod(mode | (mode & 0o444) >> 2 if executable else mode & ~0o111)


@contextlib.contextmanager
def locked(project: Path) -> Iterator[None]:
    """Keep a second regenerate or undo out of the project; the lock dies with the process."""
    import fcntl  # not on Windows, where `new` works all the same

    local = project / LOCAL
    try:
        local.mkdir(parents=True, exist_ok=True)
        (local / ".gitignore").write_text("*\n")
        stream = (local / "lock").open("w")
    except OSError as error:
        raise ScaffoldError(f"cannot write into {local}: {error.strerror}; nothing was changed.")
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ScaffoldError(f"another scaffold is at work in {project}; wait until it is done.")
        yield


def regenerate(project: Path, plan: Plan) -> None:
    """Make the planned changes: all of them, or none. Call it under `locked`, after `recover`."""
    if not plan.writes:
        return
    try:
        journal = _stage(project, plan)
        for entry in journal.entries:
            _place(journal.folder / "new" / entry.path, project, entry)
    except BaseException as error:
        with contextlib.suppress(OSError):
            if staged := _journal(project / STAGED):
                _put_back(project, staged, over_edits=False)
            shutil.rmtree(project / STAGED, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        pending = (project / STAGED / JOURNAL).exists()
        outcome = "`scaffold undo` puts back what was changed" if pending else "nothing was changed"
        where = error.filename2 or error.filename or project
        raise ScaffoldError(f"cannot write {where}: {error.strerror or error}; {outcome}.")
    with contextlib.suppress(OSError):  # it is done; whoever comes next can tidy up
        _sync(*{(project / entry.path).parent for entry in journal.entries})
        recover(project)


def recover(project: Path) -> bool:
    """Bring a regenerate or undo that was cut off to its end; whether one was put back.

    Files that a person edited since stay as they are: the next merge takes care of them.
    """
    journal = _journal(project / STAGED)
    if journal is None:
        shutil.rmtree(project / STAGED, ignore_errors=True)
        return False
    last = journal.entries[-1]
    if _mark(project / last.path) == last.new:
        shutil.rmtree(project / UNDO, ignore_errors=True)
        os.rename(project / STAGED, project / UNDO)
        return False
    _put_back(project, journal, over_edits=False)
    return True


def interrupted(project: Path) -> bool:
    """Whether a regenerate or undo was cut off and `recover` is needed."""
    return (project / STAGED / JOURNAL).exists()


def undo(project: Path, *, over_edits: bool = False) -> list[str]:
    """Put back what the last regenerate changed and return the paths. Call it under `locked`.

    Raises:
        AnswerError: there is nothing to undo.
        ScaffoldError: files were edited since, and `over_edits` was not given.
    """
    journal = _journal(project / UNDO)
    if journal is None:
        raise AnswerError(
            f"nothing to undo in {project}: no regenerate since it was made or undone."
        )
    edited = [e.path for e in journal.entries if _mark(project / e.path) not in (e.old, e.new)]
    if edited and not over_edits:
        raise ScaffoldError(
            f"you edited {', '.join(edited)} since; `scaffold undo --force` would lose that."
        )
    # From here on whoever finds it goes on with putting back.
    shutil.rmtree(project / STAGED, ignore_errors=True)
    os.rename(project / UNDO, project / STAGED)
    _put_back(project, replace(journal, folder=project / STAGED), over_edits=over_edits)
    return [entry.path for entry in journal.entries]


@dataclass(frozen=True)
class _Entry:
    """One file of a journal, before and after as `_mark` gives it."""

    path: str
    old: str
    new: str


@dataclass(frozen=True)
class _Journal:
    """What a regenerate changes; `made` are the folders that it made."""

    folder: Path
    entries: list[_Entry]
    made: list[str]


def _journal(folder: Path) -> _Journal | None:
    """The journal in a folder; None where staging never got so far."""
    try:
        data = json.loads((folder / JOURNAL).read_text("utf-8"))
        return _Journal(folder, [_Entry(**entry) for entry in data["entries"]], data["made"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ScaffoldError(
            f"{folder / JOURNAL} is damaged ({error!r}): take from {folder / 'old'} what you miss, "
            f"delete {folder}, run this again."
        ) from None


def _stage(project: Path, plan: Plan) -> _Journal:
    """Everything that is needed to go forth or back, on disk; its journal makes it count."""
    folder, now = project / STAGED, Disk(project)
    entries, made = [], set()
    for path, file in plan.writes.items():
        if now.actual(path) != plan.disk.actual(path):
            raise ScaffoldError(f"{path} changed meanwhile; nothing was changed, run this again.")
        here = project / path
        if file is None and not here.exists():
            continue
        if here.exists():
            copy = folder / "old" / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(here, copy)
            _sync(copy)
        if file is not None:
            write(folder / "new" / path, file.content, file.executable, like=here)
            _sync(folder / "new" / path)
        entries.append(_Entry(path, _mark(here), _mark(folder / "new" / path)))
        made |= {str(f.relative_to(project)) for f in here.parents if not f.exists()}
    journal = _Journal(folder, entries, sorted(made))
    data = {"entries": [asdict(entry) for entry in entries], "made": journal.made}
    write(folder / f"{JOURNAL}.part", json.dumps(data).encode())
    _sync(folder / f"{JOURNAL}.part")
    os.replace(folder / f"{JOURNAL}.part", folder / JOURNAL)
    _sync(folder)
    return journal


def _place(staged: Path, project: Path, entry: _Entry) -> None:
    """Move one staged file to its place, or delete what has none; empty folders go too."""
    here = project / entry.path
    if entry.new:
        here.parent.mkdir(parents=True, exist_ok=True)
        os.replace(staged, here)
        return
    here.unlink()
    for parent in here.parents:
        if parent == project or any(parent.iterdir()):
            break
        parent.rmdir()


def _put_back(project: Path, journal: _Journal, *, over_edits: bool) -> None:
    """Make every file what it was, the last one changed first; doing it twice does no harm."""
    for entry in reversed(journal.entries):
        here = project / entry.path
        mark = _mark(here)
        if mark == entry.old or (mark != entry.new and not over_edits):
            continue
        if entry.old:
            here.parent.mkdir(parents=True, exist_ok=True)
            os.replace(journal.folder / "old" / entry.path, here)
        else:
            here.unlink()
    for made in sorted(journal.made, reverse=True):
        with contextlib.suppress(OSError):  # not empty, or gone
            (project / made).rmdir()
    shutil.rmtree(journal.folder, ignore_errors=True)


def _mark(path: Path) -> str:
    """A hash of a file's content with its permissions; empty where there is no file."""
    try:
        content, mode = path.read_bytes(), stat.S_IMODE(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return f"{hashlib.sha256(content).hexdigest()} {mode:o}"


def _sync(*paths: Path) -> None:
    """Make what was written or renamed there survive a power cut."""
    for path in paths:
        if path.exists():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
