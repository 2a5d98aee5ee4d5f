"""Prepare the text for training, once: `python prepare.py [the options of train.py]`.

The launch scripts and train.py run it first; where the text is prepared already, it does nothing.
"""

import sys
from pathlib import Path

from text_gpt_fsdp.config import load
from text_gpt_fsdp.data import prepare
from text_gpt_fsdp.distributed import UserError

PROJECT = Path(__file__).resolve().parent


def main() -> None:
    try:
        prepare(load(sys.argv[1:]).data, PROJECT)
    except (UserError, OSError) as error:  # OSError: a full disk, a file without read permission
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
