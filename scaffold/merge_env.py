"""Three-way merge of files of shell assignments, variable by variable.

In such a file neighbouring lines are edited by different people, which a line merge takes for a
conflict.
"""

from __future__ import annotations

import re

from scaffold.merge import lines_of

_ASSIGNMENT = re.compile(r'\s*(?:: "\$\{(?P<default>\w+):?=|(?:export\s+)?(?P<plain>\w+)=)')


def merge_env(base: str, yours: str, new: str) -> str | None:
    """`yours` with the variables that changed from `base` to `new`; None where both changed one."""
    was, mine, wanted = (_variables(text) for text in (base, yours, new))
    if was is None or mine is None or wanted is None:
        return None
    merged = []
    for line in lines_of(yours):
        name = _name(line)
        if name and was.get(name) != wanted.get(name) != line:
            if was.get(name) != line:
                return None
            line = wanted.get(name, "")
        merged.append(line)
    for name, line in wanted.items():
        if name not in mine and was.get(name) != line:
            if name in was:
                return None  # removed by you, changed since
            merged += ["\n"] * bool(merged and not merged[-1].endswith("\n")) + [line]
    return "".join(merged)


def _name(line: str) -> str | None:
    found = _ASSIGNMENT.match(line)
    return found and (found["default"] or found["plain"])


def _variables(text: str) -> dict[str, str] | None:
    """The line of each variable; None if one is assigned twice."""
    named = [(name, line) for line in lines_of(text) if (name := _name(line))]
    return dict(named) if len(dict(named)) == len(named) else None
