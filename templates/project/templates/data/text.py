"""Text, byte by byte: tokens are bytes, so that any language and any file works untrained.

`prepare` turns UTF-8 text files into token files once, before any rank starts; `build` maps those
into memory. Reading, checking and splitting a large text takes minutes, which ranks would otherwise
spend waiting for each other in a collective until it times out.
"""

import codecs
import hashlib
import json
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from .distributed import WORLD_SIZE, UserError
from .sampler import held_out

END = 256  # the token after each document; it also stands before the first
VOCAB_SIZE = 257
IGNORE = -100  # a target that does not count
CHUNK = 8192  # tokens that are held out, or not, together
BLOCK = 1 << 20  # bytes in memory at once, whatever the size of a file
PREPARED = Path("data", "prepared")  # where the token files go
PYTHON_DOCS = PREPARED / "python-docs"  # the text that stands in where data.path is empty


@dataclass
class DataConfig:
    path: str = ""  # a folder of *.txt files at any depth (or of train/ and val/), or one text file
    context: int = 128  # tokens that the model sees at once
    val_fraction: float = 0.1  # part of the text that is held out for evaluation
    workers: int = 2  # processes that load data, for each rank


class Windows(Dataset):
    """A token file cut into windows of `context`: (tokens, next tokens), both (context,) int64.

    Every token but the first is a target exactly once; the last window is filled up with IGNORE.
    """

    def __init__(self, file: Path, context: int) -> None:
        self.file, self.context = file, context
        self.tokens = np.memmap(file, dtype=np.uint16, mode="r")

    def __reduce__(self) -> tuple[type["Windows"], tuple[Path, int]]:
        # Workers get the file's name: pickled as it is, the map would become a copy of the file.
        return Windows, (self.file, self.context)

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.context)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = torch.from_numpy(self.tokens[start : start + self.context + 1].astype(np.int64))
        missing = self.context + 1 - len(window)
        inputs = torch.nn.functional.pad(window[:-1], (0, missing), value=END)
        return inputs, torch.nn.functional.pad(window[1:], (0, missing), value=IGNORE)


class Data(NamedTuple):
    train: Windows
    val: Windows
    sizes: dict[str, int]
    identity: str  # changes when the data does


def build(config: DataConfig, project: Path) -> Data:
    """The training windows and the held-out windows of a text that `prepare` has prepared."""
    if config.context < 1:
        raise UserError(f"data.context is {config.context}; it starts at 1")
    if WORLD_SIZE == 1:
        prepare(config, project)  # by itself, since no other rank waits for it
    root = _root(config, project)
    folder = _folder(config, project, _documents(root)) if config.path or root.exists() else None
    meta = _meta(folder) if folder else None
    if folder is None or meta is None:
        raise UserError("the text is not prepared: run `python prepare.py` first")
    return Data(
        Windows(folder / "train.bin", config.context),
        Windows(folder / "val.bin", config.context),
        {"vocab_size": VOCAB_SIZE, "context": config.context},
        f"text {meta['digest']}, context {config.context}",
    )


def prepare(config: DataConfig, project: Path) -> None:
    """Write the token files of the text at `data.path`, unless they are there already.

    They appear by a single rename, in a folder named after the names, sizes and times of the text
    files: what is there is complete, and a text that changes is prepared anew.
    """
    if not config.path:
        print("data.path is empty: training on the documentation that Python itself ships")
        _write_python_docs(project / PYTHON_DOCS)
    documents = _documents(_root(config, project))
    folder = _folder(config, project, documents)
    if _meta(folder):
        return
    temporary = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        _write(documents, config.val_fraction, temporary)
        if folder.exists() and not _meta(folder):
            shutil.rmtree(folder)  # damaged
        try:
            temporary.rename(folder)
        except OSError:
            if not _meta(folder):  # else another node was quicker
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _root(config: DataConfig, project: Path) -> Path:
    return project / (Path(config.path).expanduser() if config.path else PYTHON_DOCS)


def _documents(root: Path) -> dict[str, list[Path]]:
    """The text files: under "train" and "val" where both folders exist, else under "all"."""
    if not root.exists():
        raise UserError(f"data.path: {root} does not exist")
    if (root / "train").is_dir() and (root / "val").is_dir():
        return {"train": _text_files(root / "train"), "val": _text_files(root / "val")}
    return {"all": _text_files(root)}


def _text_files(root: Path) -> list[Path]:
    """The files below `root` that hold text, in an order that is the same on every machine."""
    files = sorted(root.rglob("*.txt")) if root.is_dir() else [root]
    if not files:
        raise UserError(f"{root} holds no *.txt file")
    # Hidden files and folders are other programs' business, and seldom text.
    seen = [file for file in files if "/." not in f"/{file.relative_to(root).as_posix()}"]
    full = [file for file in seen or files if file.is_file() and file.stat().st_size]
    if not full:
        raise UserError(f"{root} is empty; UTF-8 text is expected")
    return full


def _folder(config: DataConfig, project: Path, documents: dict[str, list[Path]]) -> Path:
    """Where the token files of these documents belong; other documents, another folder."""
    root, key = _root(config, project), repr((VOCAB_SIZE, CHUNK, config.val_fraction))
    for file in (file for files in documents.values() for file in files):
        stat = file.stat()
        key += repr((file.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns))
    return project / PREPARED / hashlib.sha256(key.encode()).hexdigest()[:16]


def _meta(folder: Path) -> dict[str, Any] | None:
    """What `prepare` noted about the token files in `folder`; None if they are not as it left them."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        whole = all((folder / name).stat().st_size == size for name, size in meta["bytes"].items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return meta if whole else None


def _write(documents: dict[str, list[Path]], val_fraction: float, folder: Path) -> None:
    """Write `train.bin`, `val.bin` and last `meta.json` into `folder`, a block of text at a time."""
    digest = hashlib.sha256(repr(val_fraction).encode())
    total = sum(file.stat().st_size + 1 for files in documents.values() for file in files)
    with (
        (folder / "train.bin").open("wb") as train,
        (folder / "val.bin").open("wb") as val,
        # disable=None: no bar in a log file.
        tqdm(desc="preparing", total=total, unit="B", unit_scale=True, disable=None) as bar,
    ):
        for out in (train, val):
            out.write(np.uint16(END).tobytes())  # so that the first byte is a target as well
        for part, files in documents.items():
            digest.update(part.encode())
            tokens = sum(file.stat().st_size + 1 for file in files)
            chunk = min(CHUNK, max(1, tokens // 256))  # a short text needs small ones
            chunks = -(-tokens // chunk)
            held = held_out(chunks, val_fraction) if part == "all" else [part == "val"] * chunks
            position = 0
            for block in _tokens(files):
                digest.update(block.tobytes())
                bar.update(len(block))
                while len(block):  # up to the end of this chunk, then on in the next
                    piece = block[: chunk - position % chunk]
                    (val if held[position // chunk] else train).write(piece.tobytes())
                    position += len(piece)
                    block = block[len(piece) :]
        sizes = {"train.bin": train.tell(), "val.bin": val.tell()}
    meta = {"bytes": sizes, "digest": digest.hexdigest()[:16]}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    counts = [f"{size // 2 - 1:,}" for size in sizes.values()]
    print(f"prepared the text: {counts[0]} tokens for training, {counts[1]} held out")


def _tokens(files: list[Path]) -> Iterator[np.ndarray]:
    """The tokens of all files, uint16, a block at a time. Raises UserError for what is not UTF-8."""
    for file in files:
        decoder = codecs.getincrementaldecoder("utf-8")()  # to check: the tokens are its bytes
        size, done = file.stat().st_size, 0
        with file.open("rb") as data:
            while done < size:
                block = data.read(min(BLOCK, size - done))
                if not block:
                    raise UserError(f"{file} was cut short while it was read")
                start = done - len(decoder.getstate()[0])  # a character may straddle two blocks
                done += len(block)
                try:
                    decoder.decode(block, final=done == size)
                except UnicodeDecodeError as error:
                    where = start + error.start
                    raise UserError(f"{file} is not UTF-8 text: {error.reason} at byte {where}")
                yield np.frombuffer(block, dtype=np.uint8).astype(np.uint16)
        yield np.array([END], dtype=np.uint16)


def _write_python_docs(file: Path) -> None:
    """Write the topics of Python's `help()`, some 700 kB of English, into one text file."""
    if file.exists():
        return
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError("this Python lacks pydoc_data: set data.path to a folder of *.txt files")
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}-{uuid.uuid4().hex}")
    temporary.write_text("\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
    temporary.replace(file)
