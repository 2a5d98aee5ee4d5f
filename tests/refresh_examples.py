"""Write generated_examples/ anew: `python -m tests.refresh_examples`, from the repository's root."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
FOLDER = REPO / "generated_examples"

# Answers that show the range: each model, data set, strategy and launcher once or more.
EXAMPLES = {
    "synthetic-gpt": "",  # what `scaffold new NAME --yes` writes
    "images-resnet-ddp": "--model resnet --data image-folder --gpus-per-node 4",
    "images-vit-hsdp": "--model vit --data image-folder --strategy hsdp --nodes 2 --gpus-per-node 8 "
    "--launcher kubernetes",
    "table-mlp": "--model mlp --data csv --precision fp32 --gpus-per-node 1",
    "text-gpt-fsdp": "--model gpt --data text --strategy fsdp --nodes 4 --gpus-per-node 8 "
    "--launcher slurm",
    "text-gpt-fsdp-tp": "--model gpt --data text --strategy fsdp-tp --nodes 2 --gpus-per-node 4 "
    "--launcher ssh --launcher mpirun",
}


def write(folder: Path) -> None:
    """Every example below `folder`, by the command that a person would type."""
    for name, answers in EXAMPLES.items():
        command = [sys.executable, "-m", "scaffold", "new", name, *answers.split(), "--yes"]
        subprocess.run(
            [*command, "--output-dir", str(folder)], cwd=REPO, check=True, stdout=subprocess.DEVNULL
        )


if __name__ == "__main__":
    for old in FOLDER.glob("*/"):
        shutil.rmtree(old)
    FOLDER.mkdir(exist_ok=True)
    write(FOLDER)
    print(f"wrote {', '.join(EXAMPLES)} into {FOLDER}")
