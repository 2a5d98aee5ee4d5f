"""A tiny data set and a tiny model for the tests."""

from pathlib import Path

from PIL import Image

PROJECT = Path(__file__).resolve().parent.parent


def make_data(folder: Path) -> list[str]:
    """Makes the data in `folder` where it takes files; returns the options that name it."""
    for label, shade in (("dark", 40), ("light", 200)):
        (folder / label).mkdir()
        for i in range(30):
            Image.new("RGB", (20, 20), (shade + i, shade, shade)).save(folder / label / f"{i}.png")
    return [f"--data.path={folder}", "--data.image_size=16"]


MODEL = ["--model.layers=2", "--model.width=32", "--model.heads=2"]
