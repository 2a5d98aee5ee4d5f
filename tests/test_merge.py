"""Merges: golden cases as files, and the line merge against git's."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaffold.merge import BASE, MIDDLE, NEW, YOURS, changes_between, has_markers, lines_of, merge
from trees import Project, step, tree

CASES = Path(__file__).parent / "cases" / "merge"
PATHS = {
    "python": "train.py",
    "shell": "launch/local.sh",
    "env": "launch/topology.env",
    "toml": "config.toml",
    "markdown": "README.md",
    "ignore": ".gitignore",
}


@pytest.mark.parametrize("case", sorted(path.name for path in CASES.iterdir()))
def test_golden(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case is a folder: base, yours, new, expected; its name says the kind and the verdict.

    `SCAFFOLD_GOLDEN=write` writes `expected` anew; read the difference before you commit it.
    """
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    sides = {name: (CASES / case / name).read_bytes() for name in ("base", "yours", "new")}
    path = PATHS[case.split("-")[0]]
    settings = CASES / case / "pyproject"
    more = {"pyproject.toml": settings.read_text() if settings.exists() else ""}
    project = Project.made(tmp_path / "p", {path: sides["base"], **more})
    project.edit({path: sides["yours"]})
    done = step(project.regenerate(tree({path: sides["new"], **more})), path)
    after = (project.root / path).read_bytes()
    beside = project.root / f"{path}.scaffold-new"
    if os.environ.get("SCAFFOLD_GOLDEN") == "write":
        (CASES / case / "expected").write_bytes(after)
    assert after == (CASES / case / "expected").read_bytes()
    assert done.problem == case.endswith("-conflict")
    assert has_markers(after.decode()) <= (path in ("train.py", "README.md"))
    if beside.exists():
        assert (after, beside.read_bytes()) == (sides["yours"], sides["new"])
    if done.problem:
        assert has_markers(after.decode()) or beside.exists() or "yours stays" in done.note


def edited(rng: random.Random, lines: list[str], words: list[str]) -> list[str]:
    """Some lines inserted, deleted, replaced or moved."""
    lines = list(lines)
    for _ in range(rng.randint(0, 5)):
        at, size = rng.randint(0, len(lines)), rng.randint(1, 3)
        fresh = [rng.choice(words) for _ in range(size)]
        kind = rng.choice(["insert", "delete", "replace", "move"])
        cut = lines[at : at + size]
        if kind != "insert":
            del lines[at : at + size]
        if kind in ("insert", "replace"):
            lines[at:at] = fresh
        elif kind == "move":
            to = rng.randint(0, len(lines))
            lines[to:to] = cut
    return lines


def random_cases(count: int) -> Iterator[tuple[str, str, str]]:
    """Base and two sides; few different lines make many ways to tell what changed."""
    for seed in range(count):
        rng = random.Random(seed)
        words = [f"line {i}\n" for i in range(rng.choice([3, 8, 30, 300]))]
        words += ["\n"] * rng.choice([0, len(words) // 4])
        base = [rng.choice(words) for _ in range(rng.randint(0, 50))]
        start = edited(rng, base, words) if rng.random() < 0.3 else base  # the same edits in both
        sides = ["".join(edited(rng, start, words)) for _ in range(2)]
        yours, new = (side[: len(side) - (rng.random() < 0.1)] for side in sides)
        yield "".join(base), yours, new


def test_the_line_merge_is_that_of_git(tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("yours", "base", "new")]
    labels = ["-L", "yours", "-L", "last generated", "-L", "new"]
    conflicts = 0
    for base, yours, new in random_cases(2000):
        for name, text in zip(names, (yours, base, new), strict=True):
            Path(name).write_text(text)
        git = subprocess.run(
            ["git", "merge-file", "-p", "--diff3", *labels, *names], capture_output=True, text=True
        )
        ours = merge(base, yours, new)
        assert (ours.conflicts, ours.text) == (git.returncode, git.stdout), (base, yours, new)
        conflicts += ours.conflicts > 0
    assert 500 < conflicts < 1500


TEXTS = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "\n", "  d\n"]), max_size=12).map("".join)


@given(TEXTS, TEXTS)
def test_a_side_that_changed_nothing_yields_to_the_other(base: str, other: str) -> None:
    assert merge(base, base, other).text == other
    assert merge(base, other, base).text == other
    assert merge(base, other, other) == merge(base, other, base)


@given(TEXTS, TEXTS, TEXTS)
def test_no_line_of_yours_is_lost(base: str, yours: str, new: str) -> None:
    merged = merge(base, yours, new)
    mirrored = merge(base, new, yours)
    assert merged.conflicts == mirrored.conflicts
    kept = set(lines_of(merged.text))
    assert set(lines_of(yours)) - set(lines_of(base)) <= kept
    assert has_markers(merged.text) == bool(merged.conflicts)


@given(TEXTS, TEXTS)
def test_the_difference_turns_one_text_into_the_other(one: str, two: str) -> None:
    a, b = lines_of(one), lines_of(two)
    made, done = [], 0
    for change in changes_between(a, b):
        made += a[done : change.start] + b[change.there : change.there_end]
        done = change.end
    assert made + a[done:] == b


def test_only_our_own_markers_count() -> None:
    for marker in (YOURS, BASE, NEW):
        assert has_markers(f"text\n{marker}\n")
    assert not has_markers(f"heading\n{MIDDLE}\n<<<<<<< HEAD\n")
