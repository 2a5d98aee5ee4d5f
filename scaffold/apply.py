"""Write files so that a crash, Ctrl-C or a full disk leaves the old project or the new one."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaffold.errors import AnswerError, ScaffoldError
from scaffold.render import File, Tree
from scaffold.state import Record, State


def check_target(target: Path) -> None:
    """Refuse a target of `create` that holds anything already."""
    if target.is_dir():
        if any(target.iterdir()):
            raise AnswerError(f"{target} exists and is not empty; choose another name or folder.")
    elif target.exists() or target.is_symlink():
        raise AnswerError(f"{target} exists and is no folder; choose another name or folder.")


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
    check_target(target)
    target = target.resolve()
    state = State(
        version, answers, settings, {path: Record.of(file) for path, file in tree.items()}
    )
    # Beside the target, so that the rename stays on one file system.
    scratch = target.parent / f".{target.name}.scaffold-{secrets.token_hex(4)}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for path, file in {**tree, **state.tree()}.items():
            write(scratch / path, file)
        os.rename(scratch, target)
    except OSError as error:
        raise ScaffoldError(
            f"cannot write {target}: {error.strerror or error}; nothing was left behind."
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write(path: Path, file: File) -> None:
    """Write one file with its folders, safely on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.write(file.content)
        stream.flush()
        os.fsync(stream.fileno())
    if file.executable:
        # Whoever may read it may run it, as chmod +x under a umask does.
        mode = path.stat().st_mode
        path.chmod(mode | (mode & 0o444) >> 2)
