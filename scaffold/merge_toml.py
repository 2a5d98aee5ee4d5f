"""Three-way merge of TOML, key by key: comments and layout stay, markers never appear."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from scaffold.merge import merge


@dataclass(frozen=True)
class MergedToml:
    """A merged text, and the keys that both sides changed: there yours was kept."""

    text: str
    conflicts: tuple[str, ...] = ()


def merge_toml(base: str, yours: str, new: str) -> MergedToml:
    """`yours` with the keys that changed from `base` to `new`; ValueError if one is not TOML."""
    try:
        sides = [tomlkit.parse(text) for text in (base, yours, new)]
        conflicts: list[str] = []
        _keys(sides[0].unwrap(), sides[1], sides[2], "", conflicts)
        text = tomlkit.dumps(sides[1])
    except TOMLKitError as error:
        raise ValueError(str(error)) from error
    return MergedToml(_by_lines(base, yours, new, text), tuple(conflicts))


def set_values(base: str, yours: str, new: str) -> str:
    """`yours` with every value of `new`; of other keys it loses those that `base` had.

    ValueError if one is not TOML.
    """
    try:
        was, document, wanted = (tomlkit.parse(text) for text in (base, yours, new))
    except TOMLKitError as error:
        raise ValueError(str(error)) from error
    for key in was.keys() - wanted.keys():
        document.pop(key, None)
    for key, value in wanted.items():
        if _plain(document.get(key)) != _plain(value):
            document[key] = value
    return _by_lines(base, yours, new, tomlkit.dumps(document))


def _by_lines(base: str, yours: str, new: str, expected: str) -> str:
    """The line merge where it says the same as `expected`: it carries new comments over too."""
    merged = merge(base, yours, new)
    try:
        if not merged.conflicts and tomlkit.parse(merged.text).unwrap() == (
            tomlkit.parse(expected).unwrap()
        ):
            return merged.text
    except TOMLKitError:
        pass
    return expected


_ABSENT = object()


def _plain(value: Any) -> Any:
    return value.unwrap() if hasattr(value, "unwrap") else value


def _keys(
    base: Mapping[str, Any],
    yours: MutableMapping[str, Any],
    new: Mapping[str, Any],
    prefix: str,
    conflicts: list[str],
) -> None:
    """Merge one table into `yours`, in place."""
    for key in [*new, *(key for key in base if key not in new)]:
        was, is_new = base.get(key, _ABSENT), _plain(new.get(key, _ABSENT))
        mine = _plain(yours.get(key, _ABSENT))
        if isinstance(mine, dict) and isinstance(is_new, dict):
            inner = was if isinstance(was, dict) else {}
            _keys(inner, yours[key], new[key], f"{prefix}{key}.", conflicts)
        elif is_new in (was, mine):
            continue
        elif mine == was:
            if is_new is _ABSENT:
                del yours[key]
            else:
                yours[key] = new[key]
        elif (both := _lists(was, mine, is_new)) is not None:
            kept = yours[key]
            for item in [item for item in mine if item not in both]:
                kept.remove(item)
            kept.extend(item for item in both if item not in mine)
        else:
            conflicts.append(prefix + key)


def _lists(base: Any, yours: Any, new: Any) -> list[Any] | None:
    """Lists of distinct plain values, such as dependencies: yours with what new adds and drops."""
    for side in (base, yours, new):
        if not isinstance(side, list) or any(isinstance(item, dict | list) for item in side):
            return None
        if any(side.count(item) > 1 for item in side):
            return None
    dropped = [item for item in base if item not in new]
    added = [item for item in new if item not in base and item not in yours]
    if any(item not in yours for item in dropped):
        return None  # changed or removed by both
    return [item for item in yours if item not in dropped] + added
