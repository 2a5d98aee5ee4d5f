"""Scores a run's newest checkpoint on the held-out samples: `python evaluate.py --run.dir runs/default`.

`--run.resume PATH` scores another checkpoint, or an export. Any number of ranks gives the same score.
"""

import json
import sys
from datetime import timedelta

from images_vit_hsdp import data, distributed
from images_vit_hsdp.checkpoint import load_weights, newest
from images_vit_hsdp.config import PROJECT, load_for_run
from images_vit_hsdp.distributed import RANK, agreed
from images_vit_hsdp.metrics import evaluate
from images_vit_hsdp.parallel import Parallel
from images_vit_hsdp.sampler import EvaluationSampler, make_loader


def main() -> int:
    config = load_for_run(sys.argv[1:])
    device = distributed.start(timedelta(minutes=config.run.timeout_minutes))
    with agreed():
        _, val_set, sizes, _ = data.build(config.data, PROJECT)
        parallel = Parallel(config, device)
        model = parallel.build(sizes)
    load_weights(model, newest(config))
    sampler = EvaluationSampler(
        len(val_set), config.train.micro_batch_size, *parallel.data_parallel()
    )
    loader = make_loader(val_set, sampler, config.data.workers, device)
    result = evaluate(model, loader, parallel, device)
    if RANK == 0:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    distributed.run(main)
