"""A tiny data set and a tiny model for the tests."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


def make_data(folder: Path) -> list[str]:
    """Makes the data in `folder` where it takes files; returns the options that name it."""
    return ["--data.samples=60", "--data.context=16"]


MODEL = ["--model.layers=2", "--model.width=32", "--model.heads=2", "--model.hidden=64"]
