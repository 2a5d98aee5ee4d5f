"""The project as it is on disk, and what counts as the same file."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from scaffold.errors import ScaffoldError
from scaffold.state import text_of

LARGEST = 1_000_000  # bytes; no generated file that someone moved is larger
MOVED = 0.6  # share of equal lines from which a file counts as moved
OUTPUTS = {"runs", "node_modules", "build", "dist", "__pycache__", "venv", "site-packages"}


@dataclass(frozen=True)
class Found:
    """A file as it is on disk; `foreign` says why it cannot be compared and is left alone."""

    content: bytes = b""
    executable: bool = False
    at: str = ""  # its path in the project, with links resolved
    foreign: str = ""


class Disk:
    """The project's files as they are now; each is read once.

    `seen_as` replaces what `found` tells of a path, for files that a migration moves or rewrites.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.seen_as: dict[str, Found | None] = {}
        self._found: dict[str, Found | None] = {}
        self._lines: dict[str, Counter[str]] = {}

    def found(self, path: str) -> Found | None:
        """The file at this path, None where there is nothing."""
        return self.seen_as[path] if path in self.seen_as else self.actual(path)

    def actual(self, path: str) -> Found | None:
        """The file that really is there before any migration."""
        if path not in self._found:
            self._found[path] = self._read(path)
        return self._found[path]

    def _read(self, path: str) -> Found | None:
        here = self.root / path
        real = Path(os.path.realpath(here))
        root = Path(os.path.realpath(self.root))
        if not real.is_relative_to(root):
            return Found(foreign="is a link that leads out of the project")
        try:
            mode = here.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return Found(foreign="is a broken link") if here.is_symlink() else None
        except OSError as error:  # such as a link to itself
            return Found(foreign=f"cannot be read ({error.strerror})")
        if not stat.S_ISREG(mode):
            return Found(foreign="is a folder" if stat.S_ISDIR(mode) else "is no regular file")
        try:
            content = here.read_bytes()
        except OSError as error:
            raise ScaffoldError(f"cannot read {here}: {error.strerror}; nothing was changed.")
        return Found(content, bool(mode & stat.S_IXUSR), real.relative_to(root).as_posix())

    def below(self, folder: str) -> list[str]:
        """Every file below a folder of the project."""
        files = sorted(p for p in (self.root / folder).rglob("*") if not p.is_dir())
        return [path.relative_to(self.root).as_posix() for path in files]

    def moved_to(self, path: str, content: bytes, known: Container[str | None]) -> str | None:
        """The file, none of the `known`, that most looks like the missing one.

        At least 60 % of the lines that say anything must be equal, in any order.
        """
        wanted = _lines(content)
        best: tuple[float, bool, str] | None = None
        for other in self._others(PurePosixPath(path).suffix) if wanted else ():
            if other not in known:
                if other not in self._lines:
                    found = self.found(other)
                    self._lines[other] = _lines(found.content if found else b"")
                lines = self._lines[other]
                share = (wanted & lines).total() / max(wanted.total(), lines.total())
                named = PurePosixPath(other).name == PurePosixPath(path).name
                if share >= MOVED and (best is None or (share, named) > best[:2]):
                    best = share, named, other
        return best[2] if best else None

    def _others(self, suffix: str) -> Iterator[str]:
        """Text-sized files with this suffix outside hidden and output folders."""
        for folder, folders, names in os.walk(self.root):
            folders[:] = sorted(f for f in folders if f not in OUTPUTS and not f.startswith("."))
            for name in sorted(names):
                path = Path(folder) / name
                if path.suffix != suffix or path.is_symlink() or not path.is_file():
                    continue
                if path.stat().st_size <= LARGEST:
                    yield path.relative_to(self.root).as_posix()


def _lines(content: bytes) -> Counter[str]:
    """The lines of a text that say anything, counted."""
    text = text_of(content) or ""
    return Counter(line for raw in text.split("\n") if (line := raw.strip()))


def same(one: bytes, other: bytes) -> bool:
    """Whether two files are equal, line ends and a byte order mark aside."""
    if one == other:
        return True
    texts = text_of(one), text_of(other)
    return texts[0] is not None and texts[0] == texts[1]


def dressed(text: str, like: bytes) -> bytes:
    """Text as bytes with the line ends and the byte order mark of the file it replaces."""
    if like.count(b"\r\n") * 2 > like.count(b"\n"):
        text = text.replace("\n", "\r\n")
    return (b"\xef\xbb\xbf" if like.startswith(b"\xef\xbb\xbf") else b"") + text.encode()
