"""Writing: a new project whole or not at all, a regenerate old or new, whatever cuts it off."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scaffold import apply, state
from scaffold.errors import AnswerError, ScaffoldError
from trees import Project, tree

BASE = {
    "a.py": "a\nb\nc\n",
    "gone.py": "x\n",
    "launch/deep/run.sh": "run\n",
    "scaffold.toml": "nodes = 1\n",
}
EDITS = {"a.py": "a\nb\nmine\n"}
NEW = {
    "a.py": "A\nb\nc\n",
    "launch/run.sh": "run 2\n",
    "new/folder/b.py": "b\n",
    "scaffold.toml": "nodes = 2\n",
}
CALLS = ("open", "replace", "rename", "unlink", "rmdir", "mkdir", "fsync", "chmod")


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is slow, and nothing here cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project with an edit; a regenerate creates, updates, merges and deletes files."""
    made = Project.made(tmp_path / "p", BASE, "launch/deep/run.sh")
    made.edit(EDITS)
    (made.root / "a.py").chmod(0o640)
    return made


def regenerate(project: Project) -> None:
    project.regenerate(tree(NEW, ("launch/run.sh",)), answers={"nodes": 2})


def every_call(action: Callable[[int], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Patches that count each call that changes the disk and let `action` see its number."""

    def patched(monkeypatch: pytest.MonkeyPatch) -> None:
        count = 0

        def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR):
                    return real(*args, **kwargs)
                count += 1
                action(count)
                return real(*args, **kwargs)

            return call

        for name in CALLS:
            monkeypatch.setattr(os, name, counting(name, getattr(os, name)))
        real_open = Path.open

        def path_open(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if "w" in mode:
                count += 1
                action(count)
            return real_open(self, mode, *args, **kwargs)

        monkeypatch.setattr(Path, "open", path_open)

    return patched


def kill_at(number: int) -> Callable[[int], None]:
    """Ends the process, as SIGKILL does, at the call with this number."""

    def action(count: int) -> None:
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return action


def killed(number: int, work: Callable[[], Any]) -> bool:
    """Do it in a forked process that dies of SIGKILL at this call; whether it came to that."""
    child = os.fork()
    if child == 0:
        try:
            every_call(kill_at(number))(pytest.MonkeyPatch())
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def copies(project: Project, tmp_path: Path) -> Iterator[tuple[int, Project]]:
    """Fresh copies of a project, numbered from 1."""
    for number in range(1, 1000):
        yield number, Project(shutil.copytree(project.root, tmp_path / f"copy{number}"))


def test_killed_at_any_write_it_is_old_or_new_after_the_next_command(
    project: Project, tmp_path: Path
) -> None:
    old = project.snapshot()
    done = Project(shutil.copytree(project.root, tmp_path / "done"))
    regenerate(done)
    new = done.snapshot()
    reverted = 0
    for number, copy in copies(project, tmp_path):
        if not killed(number, partial(regenerate, copy)):
            break
        again = Project(shutil.copytree(copy.root, tmp_path / f"again{number}"))
        with apply.locked(copy.root):
            reverted += apply.recover(copy.root)
        assert copy.snapshot() in (old, new), number
        assert state.read(copy.root).answers == {"nodes": 2 if copy.snapshot() == new else 1}
        if copy.snapshot() == new:
            copy.undo()
            assert copy.snapshot() == old
        regenerate(again)
        assert again.snapshot() == new, number
        again.undo() if copy.snapshot() == old and again.snapshot() != old else None
        assert again.snapshot() == old, number
    assert reverted > 5
    assert number > 40


def test_undo_killed_at_any_write_is_finished_by_the_next_command(
    project: Project, tmp_path: Path
) -> None:
    old = project.snapshot()
    regenerate(project)
    new = project.snapshot()
    for number, copy in copies(project, tmp_path):
        if not killed(number, copy.undo):
            break
        with apply.locked(copy.root):
            apply.recover(copy.root)
        if copy.snapshot() != old:
            assert copy.snapshot() == new, number
            copy.undo()
        assert copy.snapshot() == old, number
    assert number > 10


@pytest.mark.parametrize("for_good", [False, True])
def test_full_disk_at_any_write_leaves_the_old_project(
    for_good: bool, project: Project, tmp_path: Path
) -> None:
    old = project.snapshot()
    for number, copy in copies(project, tmp_path):
        failed = []

        def full(count: int, number: int = number, failed: list[int] = failed) -> None:
            if count == number or (for_good and count > number):
                failed.append(count)
                raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.MonkeyPatch.context() as patch:
            every_call(full)(patch)
            try:
                regenerate(copy)
                done = True
            except ScaffoldError as error:
                done, message = False, error.message
        if not failed:
            break
        assert done or "No space left" in message
        with apply.locked(copy.root):
            apply.recover(copy.root)
        assert state.read(copy.root).answers == {"nodes": 2 if done else 1}
        if done:  # only tidying up was left
            copy.undo()
        assert copy.snapshot() == old, number
    assert number > 30


def test_interrupted_by_the_person_nothing_changes(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = project.snapshot()
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        if str(target).endswith("state.json"):
            monkeypatch.setattr(os, "replace", real)
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        regenerate(project)
    assert project.snapshot() == old


def test_an_edit_between_a_crash_and_the_next_command_is_kept(
    project: Project, tmp_path: Path
) -> None:
    for number in range(40, 1000):  # until some files are new and some are not
        trial = Project(shutil.copytree(project.root, tmp_path / f"trial{number}"))
        assert killed(number, partial(regenerate, trial))
        if (trial.root / "launch/run.sh").exists():
            break
    project = trial
    assert project.text("a.py") == "A\nb\nmine\n"
    project.edit({"a.py": "A\nb\nmine\nmore\n"})
    regenerate(project)
    assert project.text("a.py") == "A\nb\nmine\nmore\n"
    assert project.text("new/folder/b.py") == "b\n"


def test_undo_is_exact_and_works_once(project: Project) -> None:
    old = project.snapshot()
    times = {p: (project.root / p).stat().st_mtime_ns for p in old if "base" not in p}
    regenerate(project)
    assert project.snapshot() != old
    paths = project.undo()
    assert {"a.py", "gone.py", "new/folder/b.py", "scaffold.toml"} <= set(paths)
    assert project.snapshot() == old
    assert (project.root / "a.py").stat().st_mtime_ns == times["a.py"]
    with pytest.raises(AnswerError, match="nothing to undo"):
        project.undo()


def test_undo_refuses_where_a_file_was_edited_since_unless_told(project: Project) -> None:
    old = project.snapshot()
    regenerate(project)
    project.edit({"a.py": "later\n"})
    after = project.snapshot()
    with pytest.raises(ScaffoldError, match=r"edited a\.py since"):
        project.undo()
    assert project.snapshot() == after
    project.undo(over_edits=True)
    assert project.snapshot() == old


def test_two_at_once_are_refused(project: Project) -> None:
    at_work = pytest.raises(ScaffoldError, match="another scaffold is at work")
    with apply.locked(project.root), at_work:
        regenerate(project)
    regenerate(project)


def test_a_dead_process_leaves_no_lock(project: Project) -> None:
    with apply.locked(project.root):
        pass
    with (project.root / apply.LOCAL / "lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
    regenerate(project)


def test_a_file_that_changes_after_planning_stops_everything(project: Project) -> None:
    old_plan = project.plan(tree(NEW))
    project.edit({"a.py": "saved meanwhile\n"})
    before = project.snapshot()
    with apply.locked(project.root), pytest.raises(ScaffoldError, match="changed meanwhile"):
        apply.regenerate(project.root, old_plan)
    assert project.snapshot() == before


def test_what_belongs_to_this_copy_is_not_committed(project: Project) -> None:
    regenerate(project)
    assert (project.root / ".scaffold/local/.gitignore").read_text() == "*\n"


def test_new_is_whole_or_nothing(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"version": "0.1.0", "answers": {}, "settings": {}}
    for number in range(1, 1000):

        failed = []

        def full(count: int, number: int = number, failed: list[int] = failed) -> None:
            if count == number:
                failed.append(count)
                raise OSError(errno.ENOSPC, "No space left on device")

        parent = tmp_path / f"at{number}"
        parent.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            every_call(full)(patch)
            try:
                apply.create(parent / "p", tree(BASE), **facts)
                if not failed:
                    break
                shutil.rmtree(parent / "p")
            except ScaffoldError:
                pass
        assert failed
        assert not (parent / "p").exists()
        # What could not be removed on the way is at least hidden.
        assert all(left.name.startswith(".p.scaffold-") for left in parent.iterdir())
    assert number > 20


def test_new_takes_an_empty_folder_and_refuses_a_full_one(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"version": "0.1.0", "answers": {}, "settings": {}}
    (tmp_path / "p").mkdir()
    apply.create(tmp_path / "p", tree(BASE), **facts)
    assert (tmp_path / "p/a.py").read_text() == BASE["a.py"]
    with pytest.raises(AnswerError, match="not empty"):
        apply.create(tmp_path / "p", tree(BASE), **facts)
    (tmp_path / "file").touch()
    with pytest.raises(AnswerError, match="no folder"):
        apply.create(tmp_path / "file", tree(BASE), **facts)


def test_state_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    one, two = (Project.made(tmp_path / name, BASE) for name in ("one", "two"))
    assert one.text(".scaffold/state.json") == two.text(".scaffold/state.json")
    assert "\r" not in one.text(".scaffold/state.json")
