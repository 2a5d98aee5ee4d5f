"""A tiny data set and a tiny model for the tests."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


def make_data(folder: Path) -> list[str]:
    """Makes the data in `folder` where it takes files; returns the options that name it."""
    rows = [f"{i % 7},{i % 5},{'even' if i % 2 == 0 else 'odd'}" for i in range(60)]
    (folder / "table.csv").write_text("a,b,label\n" + "\n".join(rows) + "\n", encoding="utf-8")
    return [
        f"--data.path={folder / 'table.csv'}",
        "--data.target=label",
        "--data.task=classification",
    ]


MODEL = ["--model.layers=2", "--model.width=16"]
