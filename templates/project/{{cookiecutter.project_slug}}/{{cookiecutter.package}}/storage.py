"""The folders and files of checkpoints: what is there, what is whole, and changes that a crash survives."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from .distributed import UserError

Failure = Exception | CheckpointException
FAILURES = (Exception, CheckpointException)  # the second is no Exception, so it must be named


def listed(folder: Path) -> list[Path]:
    """What has the name of a checkpoint in `folder`, newest first."""
    return sorted(folder.glob("step_*[0-9]"), key=step_of, reverse=True)


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, newest first."""
    return [path for path in listed(folder) if is_complete(path)]


def is_complete(path: Path) -> bool:
    return (path / ".metadata").is_file() and (path / "state.json").is_file()


def step_of(path: Path) -> int:
    return int("".join(filter(str.isdigit, path.name)) or 0)


def saved_shapes(path: Path) -> dict[str, torch.Size]:
    """The shape of every weight in a checkpoint."""
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {k.removeprefix("model."): v.size for k, v in saved.items() if k.startswith("model.")}  # type: ignore[union-attr]


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Makes any failure to read `path` a UserError."""
    try:
        yield
    except FAILURES as error:
        text = (
            str(error) if isinstance(error, UserError) else f"{path} cannot be read: {cause(error)}"
        )
        raise UserError(text) from None


def cause(error: BaseException) -> str:
    """An error in one line; those of checkpoints are tracebacks, whose last line is the reason."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1].strip()[:300]}" if lines else type(error).__name__


def write(path: Path, text: str) -> None:
    """Writes a file whole: a crash or a full disk leaves the one that was there before."""
    unfinished = path.with_name(f".unfinished_{path.name}")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def remove(path: Path) -> None:
    """Deletes a checkpoint; a crash on the way leaves nothing that looks like one."""
    doomed = path.with_name(f".deleted_{path.name}")
    with contextlib.suppress(OSError):
        path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Makes a rename in `path` survive a power cut, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
