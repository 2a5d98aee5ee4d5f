"""Three-way merge of one text, line by line, with the verdict and the text that git gives.

git is not needed for it. Lines are compared as Myers' linear-space algorithm finds them ("An O(ND)
Difference Algorithm and Its Variations", 1986, section 4b), then each run of changed lines is moved
to where git would put it: which of several equally short differences is taken decides whether two
edits touch, and so whether they conflict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

YOURS, BASE, MIDDLE, NEW = "<<<<<<< yours", "||||||| last generated", "=======", ">>>>>>> new"


@dataclass(frozen=True)
class Merged:
    """A merged text; `conflicts` counts the places that stand between markers."""

    text: str
    conflicts: int


class Change(NamedTuple):
    """Lines `start:end` of the base became lines `there:there_end` of a side."""

    start: int
    end: int
    there: int
    there_end: int


def has_markers(text: str) -> bool:
    """Whether a conflict that `merge` wrote is still unresolved in the text."""
    return any(line.rstrip() in (YOURS, BASE, NEW) for line in text.split("\n"))


def lines_of(text: str) -> list[str]:
    """Lines with their `\\n`; unlike `str.splitlines`, form feeds and the like end none."""
    lines = [line + "\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


def merge(base: str, yours: str, new: str) -> Merged:
    """What `yours` becomes when the change from `base` to `new` is made to it.

    Edits of both sides that touch or overlap conflict, unless they are the same edit.
    """
    old, sides = lines_of(base), (lines_of(yours), lines_of(new))
    merged: list[str] = []
    done = conflicts = 0
    for start, end, changes in _regions(*(changes_between(old, side) for side in sides)):
        merged += old[done:start]
        mine, theirs = (
            _replay(old, start, end, *both) for both in zip(sides, changes, strict=True)
        )
        if not changes[1]:
            merged += mine
        elif not changes[0]:
            merged += theirs
        elif mine == theirs and _ranges(changes[0]) == _ranges(changes[1]) == [(start, end)]:
            merged += mine
        else:
            conflicts += 1
            for marker, part in ((YOURS, mine), (BASE, old[start:end]), (MIDDLE, theirs)):
                merged += [marker + "\n", *part]
                if not merged[-1].endswith("\n"):
                    merged[-1] += "\n"
            merged.append(NEW + "\n")
        done = end
    return Merged("".join(merged + old[done:]), conflicts)


def _ranges(changes: list[Change]) -> list[tuple[int, int]]:
    return [(change.start, change.end) for change in changes]


def _regions(
    yours: list[Change], new: list[Change]
) -> list[tuple[int, int, tuple[list[Change], list[Change]]]]:
    """The changes of both sides, those that touch or overlap in the base put together."""
    regions: list[tuple[int, int, tuple[list[Change], list[Change]]]] = []
    for change, side in sorted([(c, 0) for c in yours] + [(c, 1) for c in new]):
        if regions and change.start <= regions[-1][1]:
            start, end, changes = regions.pop()
        else:
            start, end, changes = change.start, change.end, ([], [])
        changes[side].append(change)
        regions.append((start, max(end, change.end), changes))
    return regions


def _replay(
    old: list[str], start: int, end: int, side: list[str], changes: list[Change]
) -> list[str]:
    """Lines `start:end` of the base as one side has them."""
    lines: list[str] = []
    for change in changes:
        lines += old[start : change.start] + side[change.there : change.there_end]
        start = change.end
    return lines + old[start:end]


def changes_between(a: list[str], b: list[str]) -> list[Change]:
    """How `a` becomes `b`, as git would show it without its indent heuristic."""
    # Lines that the other side lacks are changed for certain; without them the rest is found
    # faster, and with the same choices as git's.
    in_a, in_b = set(a), set(b)
    known_a = [i for i, line in enumerate(a) if line in in_b]
    known_b = [j for j, line in enumerate(b) if line in in_a]
    changed_a, changed_b = [True] * len(a), [True] * len(b)
    for i in known_a:
        changed_a[i] = False
    for j in known_b:
        changed_b[j] = False
    common_a, common_b = [a[i] for i in known_a], [b[j] for j in known_b]
    boxes = [(0, len(common_a), 0, len(common_b))]
    while boxes:
        a0, a1, b0, b1 = boxes.pop()
        while a0 < a1 and b0 < b1 and common_a[a0] == common_b[b0]:
            a0, b0 = a0 + 1, b0 + 1
        while a0 < a1 and b0 < b1 and common_a[a1 - 1] == common_b[b1 - 1]:
            a1, b1 = a1 - 1, b1 - 1
        if a0 < a1 and b0 < b1:
            i, j = _middle(common_a, common_b, a0, a1, b0, b1)
            boxes += [(a0, i, b0, j), (i, a1, j, b1)]
        else:
            for k in known_a[a0:a1]:
                changed_a[k] = True
            for k in known_b[b0:b1]:
                changed_b[k] = True
    _slide(a, changed_a, changed_b)
    _slide(b, changed_b, changed_a)
    return _paired(changed_a, changed_b)


def _middle(
    a: Sequence[str], b: Sequence[str], a0: int, a1: int, b0: int, b1: int
) -> tuple[int, int]:
    """A point on a shortest path from (a0, b0) to (a1, b1): where searches from both ends meet.

    `forth[k]` and `back[k]` are the furthest `i` reached on diagonal `k = i - j`.
    """
    lowest, highest = a0 - b1, a1 - b0
    first, last = a0 - b0, a1 - b1
    odd = bool((first - last) % 2)
    forth, back = {first: a0}, {last: a1}
    f_low = f_high = first
    b_low = b_high = last
    while True:
        f_low, f_high = _wider(forth, f_low, f_high, lowest, highest, -1)
        for k in range(f_high, f_low - 1, -2):
            i = max(forth[k - 1] + 1, forth[k + 1])
            while i < a1 and i - k < b1 and a[i] == b[i - k]:
                i += 1
            forth[k] = i
            if odd and b_low <= k <= b_high and back[k] <= i:
                return i, i - k
        b_low, b_high = _wider(back, b_low, b_high, lowest, highest, len(a) + len(b) + 1)
        for k in range(b_high, b_low - 1, -2):
            i = min(back[k - 1], back[k + 1] - 1)
            while i > a0 and i - k > b0 and a[i - 1] == b[i - k - 1]:
                i -= 1
            back[k] = i
            if not odd and f_low <= k <= f_high and i <= forth[k]:
                return i, i - k


def _wider(
    reach: dict[int, int], low: int, high: int, lowest: int, highest: int, never: int
) -> tuple[int, int]:
    """The diagonals of the next round: one more each side, or one less at the box's border."""
    if low > lowest:
        low -= 1
        reach[low - 1] = never
    else:
        low += 1
    if high < highest:
        high += 1
        reach[high + 1] = never
    else:
        high -= 1
    return low, high


def _slide(lines: list[str], changed: list[bool], others: list[bool]) -> None:
    """Move each run of changed lines down as far as the text allows, in place.

    A run can move by a line where the line it gives up equals the one it takes. It swallows the
    runs that it meets. If on its way it stood beside a change of the other side, it goes back to
    the lowest such place, so that a replacement stays one.
    """
    beside, unchanged = set(), 0  # the other side's changes, by how many common lines come before
    for flag in others:
        if flag:
            beside.add(unchanged)
        else:
            unchanged += 1
    end = common = 0
    while end < len(lines):
        if not changed[end]:
            end, common = end + 1, common + 1
            continue
        start = end
        while end < len(lines) and changed[end]:
            end += 1
        size = 0
        while size != end - start:  # until it swallows no other run
            size = end - start
            while start > 0 and lines[start - 1] == lines[end - 1]:
                start, end, common = start - 1, end - 1, common - 1
                changed[start], changed[end] = True, False
                while start > 0 and changed[start - 1]:
                    start -= 1
            best = end if common in beside else None
            while end < len(lines) and lines[start] == lines[end]:
                changed[start], changed[end] = False, True
                start, end, common = start + 1, end + 1, common + 1
                while end < len(lines) and changed[end]:
                    end += 1
                best = end if common in beside else best
        while best is not None and end > best:
            start, end, common = start - 1, end - 1, common - 1
            changed[start], changed[end] = True, False


def _paired(changed_a: list[bool], changed_b: list[bool]) -> list[Change]:
    """Runs of changed lines on both sides as one list of changes."""
    changes = []
    i = j = 0
    while i < len(changed_a) or j < len(changed_b):
        start, there = i, j
        while i < len(changed_a) and changed_a[i]:
            i += 1
        while j < len(changed_b) and changed_b[j]:
            j += 1
        if (start, there) != (i, j):
            changes.append(Change(start, i, there, j))
        else:
            i, j = i + 1, j + 1
    return changes
