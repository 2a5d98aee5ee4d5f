"""Three-way merge of Python that knows its format and its syntax."""

from __future__ import annotations

import tomllib
import warnings
from typing import Any

from scaffold.merge import Merged, merge

LARGEST = 300_000  # characters; black takes a second for 100,000


class Broken(ValueError):
    """The merge is clean, but its result does not compile though both sides do."""


def merge_python(base: str, yours: str, new: str, pyproject: str) -> Merged:
    """The line merge; where it conflicts, that of all sides as the person's black formats them.

    `pyproject` is the text of the project's pyproject.toml. The second merge counts only if
    `yours` is in that format already, so that nobody's style is rewritten.
    """
    merged = merge(base, yours, new)
    if merged.conflicts:
        merged = _reformatted(base, yours, new, pyproject) or merged
    if not merged.conflicts and not _compiles(merged.text) and _compiles(yours) and _compiles(new):
        raise Broken("would not compile when merged")
    return merged


def _reformatted(base: str, yours: str, new: str, pyproject: str) -> Merged | None:
    import black

    if len(yours) > LARGEST:
        return None
    try:
        mode = _mode(pyproject)
        if black.format_str(yours, mode=mode) != yours:
            return None
        base, new = (black.format_str(text, mode=mode) for text in (base, new))
    except Exception:  # not Python, odd settings, a bug of black's: then the plain merge stands
        return None
    merged = merge(base, yours, new)
    return None if merged.conflicts else merged


def _mode(pyproject: str) -> Any:
    """What `[tool.black]` asks for, else black's defaults."""
    from black.const import DEFAULT_LINE_LENGTH
    from black.mode import Mode, TargetVersion

    table = tomllib.loads(pyproject).get("tool", {}).get("black", {})
    return Mode(
        target_versions={TargetVersion[name.upper()] for name in table.get("target-version", [])},
        line_length=table.get("line-length", DEFAULT_LINE_LENGTH),
        string_normalization=not table.get("skip-string-normalization", False),
        magic_trailing_comma=not table.get("skip-magic-trailing-comma", False),
        preview=table.get("preview", False),
    )


def _compiles(source: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(source, "merged", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True
