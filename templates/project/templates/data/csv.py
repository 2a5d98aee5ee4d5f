"""A table from CSV files with a header: standardised features, and a class or a number to predict.

`data.path` is a CSV file, or a folder of them with the same header. Where that folder has `train/`
and `val/`, `val/` is held out; else every row's place decides by a fixed hash.
"""

import csv
import hashlib
import math
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .distributed import UserError
from .sampler import held_out

LAYOUT = """data.path names no CSV file. One with a header and a number in every cell is expected, such as
  sepal_length,sepal_width,species
  5.1,3.5,setosa
Try --data.path iris.csv --data.target species (a target may be text)."""


@dataclass
class DataConfig:
    path: str = ""  # a CSV file, or a folder of them (with train/ and val/, if you have split it)
    target: str = "target"  # the column to predict; every other column is a feature
    task: Literal["classification", "regression"] = "classification"  # what the target is
    val_fraction: float = 0.1  # part of the rows that is held out for evaluation
    workers: int = 2  # processes that load data, for each rank


class Table(Dataset):
    """Rows of a table in memory: (features (F,) float32, class int64 or number float32)."""

    def __init__(self, features: np.ndarray, targets: np.ndarray) -> None:
        self.features, self.targets = torch.from_numpy(features), torch.from_numpy(targets)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.features[index], self.targets[index]


class Rows(NamedTuple):
    """What the files hold: feature names, features (rows, F) float64, each row's target as text."""

    columns: list[str]
    features: np.ndarray
    targets: list[str]


class Data(NamedTuple):
    train: Table
    val: Table
    sizes: dict[str, int]
    identity: str  # changes when the data does


def build(config: DataConfig, project: Path) -> Data:
    """The training rows and the held-out rows, standardised by what the training rows say."""
    if not config.path:
        raise UserError(LAYOUT)
    root = project / Path(config.path).expanduser()
    if (root / "train").is_dir() and (root / "val").is_dir():
        train, val = _read(_files(root / "train"), config), _read(_files(root / "val"), config)
        if train.columns != val.columns:
            raise UserError(f"{root}: the columns of train/ and val/ differ")
        columns, features = train.columns, np.concatenate([train.features, val.features])
        labels = train.targets + val.targets
        held = np.arange(len(labels)) >= len(train.targets)
    else:
        columns, features, labels = _read(_files(root), config)
        if len(labels) < 2:
            raise UserError(f"{root} holds a single row; training and evaluation need one each")
        held = held_out(len(labels), config.val_fraction)
    if config.task == "classification":
        targets, outputs = _classes(labels, config.target, root)
    else:
        targets, outputs = _standardised(np.array([float(label) for label in labels]), held), 1
    features = _standardised(features, held)
    digest = hashlib.sha256(repr(columns).encode())
    digest.update(features.tobytes() + targets.tobytes() + held.tobytes())
    return Data(
        Table(features[~held], targets[~held]),
        Table(features[held], targets[held]),
        {"features": len(columns), "outputs": outputs},
        f"csv {digest.hexdigest()[:16]}",
    )


def _files(root: Path) -> list[Path]:
    """The CSV files that `root` stands for, in an order that is the same on every machine."""
    files = sorted(root.glob("*.csv")) if root.is_dir() else [root]
    if not files:
        raise UserError(f"{root} holds no *.csv file")
    if not files[0].is_file():
        raise UserError(f"data.path: {root} does not exist")
    return files


def _read(files: list[Path], config: DataConfig) -> Rows:
    """The rows of all files. Raises UserError naming file, line and column of what is wrong."""
    header: list[str] = []
    numbers, targets = array("d"), list[str]()
    for file in files:
        try:
            # utf-8-sig: spreadsheets like to begin a CSV file with a byte order mark.
            with file.open(newline="", encoding="utf-8-sig") as lines:
                reader = csv.reader(lines, skipinitialspace=True)
                columns = [name.strip() for name in next(reader, [])]
                _check_header(file, columns, header or columns, config.target)
                header = columns
                at = header.index(config.target)
                for cells in reader:
                    if not cells:
                        continue  # a blank line
                    if len(cells) != len(header):
                        raise UserError(
                            f"{file} line {reader.line_num}: {len(cells)} cells, "
                            f"but the header has {len(header)}"
                        )
                    target = cells.pop(at).strip()
                    try:
                        row = list(map(float, cells))
                        if config.task == "regression":
                            row.append(float(target))
                    except ValueError:
                        row = [math.nan]
                    if not target or not all(map(math.isfinite, row)):
                        cells.insert(at, target)
                        _explain(file, reader.line_num, header, cells, config)
                    numbers.extend(row[: len(cells)])
                    targets.append(target)
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}")
        except (csv.Error, OSError) as error:
            raise UserError(f"{file} cannot be read as CSV: {error}")
    if not targets:
        raise UserError(f"{files[0]} has a header but no rows")
    features = np.frombuffer(numbers, dtype=np.float64).reshape(len(targets), -1)
    return Rows(header[:at] + header[at + 1 :], features, targets)


def _check_header(file: Path, columns: list[str], expected: list[str], target: str) -> None:
    if not columns:
        raise UserError(f"{file} is empty; a CSV file with a header is expected")
    shown = ", ".join(columns[:12]) + (", ..." if len(columns) > 12 else "")
    if columns != expected:
        raise UserError(f"{file}: its columns ({shown}) are not those of the files before it")
    if target not in columns:
        raise UserError(f"{file} line 1: no column '{target}'; set data.target to one of: {shown}")
    if len(set(columns)) < len(columns):
        raise UserError(f"{file} line 1: a column name stands there twice: {shown}")
    if len(columns) < 2:
        raise UserError(f"{file} line 1: no column beside the target '{target}' to learn from")


def _explain(
    file: Path, line: int, header: list[str], cells: list[str], config: DataConfig
) -> None:
    """Raises UserError for the first cell of this row that cannot be used."""
    for name, cell in zip(header, cells, strict=True):
        where = f"{file} line {line}, column '{name}'"
        if not cell.strip():
            raise UserError(f"{where}: the cell is empty; fill it or remove the row")
        if name == config.target and config.task == "classification":
            continue
        try:
            finite = math.isfinite(float(cell))
        except ValueError:
            raise UserError(
                f"{where}: '{cell[:40]}' is no number; encode it as one or remove the column"
            )
        if not finite:
            raise UserError(f"{where}: {cell.strip()} is not finite; fill it or remove the row")


def _classes(labels: list[str], target: str, root: Path) -> tuple[np.ndarray, int]:
    """The class of each label, (rows,) int64, and how many there are."""
    names, classes = np.unique(labels, return_inverse=True)
    if len(names) < 2:
        raise UserError(f"{root}: column '{target}' has one value only ('{names[0]}')")
    if len(names) > 20 and len(names) > len(labels) / 2:
        raise UserError(
            f"{root}: column '{target}' has {len(names)} values in {len(labels)} rows; "
            'is it a number to predict (data.task = "regression")?'
        )
    return classes.astype(np.int64), len(names)


def _standardised(values: np.ndarray, held: np.ndarray) -> np.ndarray:
    """`values` as float32, with mean 0 and deviation 1 over the rows that are not held out."""
    mean, deviation = values[~held].mean(axis=0), values[~held].std(axis=0)
    # A column that is constant but for rounding says nothing; dividing by its deviation would.
    constant = deviation <= 1e-12 * np.abs(mean)
    return ((values - mean) / np.where(constant, 1.0, deviation)).astype(np.float32)
