"""A tiny data set and a tiny model for the tests."""

import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


def make_data(folder: Path) -> list[str]:
    """Makes the data in `folder` where it takes files; returns the options that name it."""
    options = [f"--data.path={folder}", "--data.context=16", "--data.val_fraction=0.5"]
    words = "".join(f"{i} times {i} is {i * i}. " for i in range(2000))
    (folder / "squares.txt").write_text(words, encoding="utf-8")
    subprocess.run([sys.executable, "prepare.py", *options], cwd=PROJECT, check=True)
    return options


MODEL = ["--model.layers=2", "--model.width=32", "--model.heads=2", "--model.hidden=64"]
