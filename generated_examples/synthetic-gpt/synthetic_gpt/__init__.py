"""What train.py, evaluate.py and export.py are made of; start reading at train.py."""

import sys
from importlib.metadata import version

if tuple(map(int, version("torch").split(".")[:2])) < (2, 13):
    sys.exit(f"error: torch {version('torch')} is too old, this project needs 2.13 or newer")
