"""Scores a run's newest checkpoint on the held-out samples: `python evaluate.py --run.dir runs/default`.

`--run.resume PATH` scores another checkpoint, or an export. Any number of ranks gives the same score.
"""

import json
import sys
from datetime import timedelta

from text_gpt_fsdp_tp import data, distributed
from text_gpt_fsdp_tp.checkpoint import load_weights, newest
from text_gpt_fsdp_tp.config import PROJECT, load_for_run
from text_gpt_fsdp_tp.distributed import RANK, agreed
from text_gpt_fsdp_tp.metrics import evaluate
from text_gpt_fsdp_tp.parallel import Parallel
from text_gpt_fsdp_tp.sampler import EvaluationSampler, make_loader


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
