"""Writes a run's newest checkpoint as one safetensors file: `python export.py --run.dir runs/default`.

`--run.resume PATH` takes another checkpoint. A finished run has its export already.
"""

import sys
from datetime import timedelta

from images_resnet_ddp import data, distributed
from images_resnet_ddp.checkpoint import export, load_weights, newest
from images_resnet_ddp.config import PROJECT, load_for_run
from images_resnet_ddp.distributed import agreed
from images_resnet_ddp.parallel import Parallel


def main() -> int:
    config = load_for_run(sys.argv[1:])
    device = distributed.start(timedelta(minutes=config.run.timeout_minutes))
    with agreed():
        sizes = data.build(config.data, PROJECT).sizes
        model = Parallel(config, device).build(sizes)
    load_weights(model, newest(config))
    export(model, config.run_dir / "export", config, sizes)
    return 0


if __name__ == "__main__":
    distributed.run(main)
