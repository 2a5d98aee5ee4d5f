"""Whatever people do to a project and its answers, in any order: nothing they wrote is lost."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scaffold import apply, state
from scaffold.errors import ScaffoldError
from scaffold.manifest import Owner
from scaffold.merge import has_markers
from scaffold.plan import ASIDE
from scaffold.render import Tree
from trees import Project, tree

MINE = "of mine"  # stands in every line that the person writes


@dataclass(frozen=True)
class Wish:
    """The answers of a made-up generator."""

    nodes: int = 1
    strategy: str = "ddp"
    slurm: bool = False


def generated(wish: Wish) -> Tree:
    """A small project with a file of each kind; answers change lines, files and a mode."""
    code = [f"step_{i}()" for i in range(8)]
    model = [*code[:4], f"wrap('{wish.strategy}')", *code[4:]]
    files: dict[str, str | bytes] = {
        "train.py": "\n".join([f"run_{i}()" for i in range(10)]) + "\n",
        "demo/parallel.py": "\n".join(model) + "\n",
        "README.md": f"# demo\n\nAbout it.\n\nIt is {wish.strategy}.\n\nThe end.\n",
        "config.toml": f'[train]\nsteps = 10\nlr = 0.1\n\n[parallel]\nkind = "{wish.strategy}"\n',
        "scaffold.toml": f'nodes = {wish.nodes}\nstrategy = "{wish.strategy}"\n',
        "launch/local.sh": f"set -e\na\nb\nrun {wish.nodes}\nc\nd\n",
        "launch/topology.env": f"NNODES={wish.nodes}\nPORT=1\n",
        "launch/site.env": "# yours\n",
        "logo.bin": b"\0" + wish.strategy.encode(),
    }
    if wish.slurm:
        files["launch/slurm.sh"] = f"#SBATCH\n--nodes={wish.nodes}\none\ntwo\nthree\n"
    return tree(files, ("launch/local.sh",) if wish.nodes < 3 else ())


WISHES = st.builds(Wish, st.integers(1, 4), st.sampled_from(["ddp", "fsdp", "hsdp"]), st.booleans())
PLACES = st.floats(0, 1, exclude_max=True)


class Regenerating(RuleBasedStateMachine):
    """A person, an editor, and `scaffold regenerate`."""

    @initialize(wish=WISHES)
    def new(self, wish: Wish) -> None:
        self.scratch = tempfile.mkdtemp()
        self.fsync = mock.patch.object(os, "fsync", return_value=None)
        self.fsync.start()
        self.count = 0
        self.wish = wish
        self.before: dict[str, Any] | None = None
        self.project = Project(Path(self.scratch) / "p")
        apply.create(self.project.root, generated(wish), **self.facts(wish))

    def teardown(self) -> None:
        if hasattr(self, "scratch"):
            self.fsync.stop()
            shutil.rmtree(self.scratch)

    @staticmethod
    def facts(wish: Wish) -> dict[str, Any]:
        return {"version": "0.1.0", "answers": {"nodes": wish.nodes}, "settings": {}}

    def files(self) -> list[str]:
        return sorted(
            path
            for path, (kind, _, _) in self.project.snapshot().items()
            if kind == "file" and not path.startswith(".scaffold/")
        )

    def some(self, place: float) -> Path:
        """One of the project's files."""
        files = self.files()
        return self.project.root / files[int(place * len(files))]

    def mine(self) -> Counter[bytes]:
        """Every line of the person's that is in the project now."""
        lines: Counter[bytes] = Counter()
        for path in self.files():
            for line in (self.project.root / path).read_bytes().splitlines():
                if MINE.encode() in line:
                    lines[line.strip()] += 1
        return lines

    def fresh_line(self, path: Path) -> bytes:
        self.count += 1
        if path.suffix == ".toml":
            return f'key_{self.count} = "{MINE}"'.encode()
        return f"{'# ' * (path.suffix != '.md')}line {self.count} {MINE}".encode()

    # What people do

    @rule(place=PLACES, at=PLACES, kind=st.sampled_from(["insert", "replace", "delete", "append"]))
    def edit(self, place: float, at: float, kind: str) -> None:
        path = self.some(place)
        content = path.read_bytes()
        end = b"\r\n" if b"\r\n" in content else b"\n"
        lines = content.split(end)
        index = int(at * len(lines))
        line = self.fresh_line(path)
        if kind == "insert":
            lines.insert(index, line)
        elif kind == "append":
            lines += [line]
        else:
            lines[index : index + 1] = [line] if kind == "replace" else []
        path.write_bytes(end.join(lines))

    @precondition(lambda self: len(self.files()) > 1)
    @rule(place=PLACES)
    def delete(self, place: float) -> None:
        self.some(place).unlink()

    @rule(place=PLACES, folder=st.sampled_from(["", "src/", "launch/"]))
    def move(self, place: float, folder: str) -> None:
        path = self.some(place)
        target = self.project.root / f"{folder}moved_{path.name}"
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            path.rename(target)

    @rule(place=PLACES)
    def change_mode(self, place: float) -> None:
        path = self.some(place)
        path.chmod(path.stat().st_mode ^ 0o100)

    @rule(place=PLACES)
    def change_line_ends(self, place: float) -> None:
        path = self.some(place)
        if b"\0" not in path.read_bytes() and b"\r" not in path.read_bytes():
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))

    @rule(place=PLACES)
    def make_binary(self, place: float) -> None:
        path = self.some(place)
        path.write_bytes(b"\0\xff\n" + self.fresh_line(path))

    @rule(name=st.sampled_from(["launch/slurm.sh", "notes.md", "src/extra.py", "train.py"]))
    def make_a_file(self, name: str) -> None:
        path = self.project.root / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(self.fresh_line(path) + b"\n")

    @rule(place=PLACES)
    def lose_a_base(self, place: float) -> None:
        bases = sorted((self.project.root / state.BASE).rglob("*.base"))
        if bases:
            bases[int(place * len(bases))].unlink()

    @rule()
    def resolve(self) -> None:
        """Take both sides of each conflict, and what lies beside for dealt with."""
        for path in map(self.project.root.joinpath, self.files()):
            if path.name.endswith(ASIDE):
                path.unlink()
            elif has_markers(path.read_bytes().decode("utf-8", "replace")):
                lines = path.read_bytes().splitlines(keepends=True)
                path.write_bytes(
                    b"".join(
                        x for x in lines if x[:7] not in (b"<" * 7, b"|" * 7, b"=" * 7, b">" * 7)
                    )
                )

    # What scaffold does

    @rule(wish=WISHES, follow=st.booleans(), restore=st.booleans())
    def regenerate(self, wish: Wish, follow: bool, restore: bool) -> None:
        new, old = generated(wish), state.read(self.project.root)
        before, mine = self.project.snapshot(), self.mine()
        untouched = {
            path
            for path, record in old.files.items()
            if record.base is not None
            and before.get(path, ("", b"", 0))[:2] == ("file", record.base)
            and bool(before[path][2] & 0o100) == record.executable
        }
        missing = [
            path
            for path in new
            if restore and not {path, path in old.files and old.files[path].moved} & before.keys()
        ]
        try:
            plan = self.project.regenerate(
                new, **self.facts(wish), restore=missing, follow=lambda path, at: follow
            )
        except ScaffoldError:
            assert self.project.snapshot() == before
            return
        after = self.project.snapshot()
        self.wish = wish
        if plan.writes:
            self.before = before
        assert not mine - self.mine(), "a line of the person's is lost"
        for path in untouched:
            if path not in new:
                assert path not in after
            elif new[path].owner == Owner.ONCE:
                assert after[path] == before[path]
            else:
                assert after[path][1] == new[path].content, path
                assert bool(after[path][2] & 0o100) == new[path].executable, path
        for path in missing:
            assert after[path][1] == new[path].content
        unedited = {
            record.moved or path
            for path, record in old.files.items()
            if record.sha256 == state.digest(before.get(record.moved or path, ("", b"", 0))[1])
        }
        for path in before.keys() - after.keys() - unedited:
            gone = before[path][0] == "folder" or path.endswith(ASIDE)
            assert gone or path.startswith(".scaffold/"), f"{path} is gone"
        waiting = [
            path
            for path in self.files()
            if (path.endswith(ASIDE) and path.removesuffix(ASIDE) in new)
            or (path in new and path.endswith((".py", ".md")) and has_markers(self.lossy(path)))
        ]
        fresh = [path for path in waiting if after[path] != before.get(path)]
        assert bool(plan.problems) >= bool(fresh), fresh
        again = state.read(self.project.root)
        assert again.answers == {"nodes": wish.nodes}
        if not plan.problems:
            assert self.project.plan(new, **self.facts(wish)).writes == {}

    def lossy(self, path: str) -> str:
        return (self.project.root / path).read_bytes().decode("utf-8", "replace")

    @precondition(lambda self: self.before is not None)
    @rule()
    def undo_at_once(self) -> None:
        """Only straight after a regenerate; what came between is told by the refusal."""
        try:
            self.project.undo()
        except ScaffoldError:
            self.project.undo(over_edits=True)
        self.before = None

    @rule(wish=WISHES)
    def regenerate_and_undo(self, wish: Wish) -> None:
        before = self.project.snapshot()
        try:
            plan = self.project.regenerate(generated(wish), **self.facts(wish))
        except ScaffoldError:
            assert self.project.snapshot() == before
            return
        if plan.writes:
            self.project.undo()
            self.before = None
        assert self.project.snapshot() == before

    @invariant()
    def the_state_can_be_read(self) -> None:
        if hasattr(self, "project"):
            state.read(self.project.root)


TestRegenerating = Regenerating.TestCase
TestRegenerating.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
