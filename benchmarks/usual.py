"""The usual recipe, for contrast: what most tutorials write, with a generated project's model and data.

A plain DistributedSampler, a batch size per rank, the mean of means, a resume at the start of the
epoch. Run by torchrun with a generated project's folder in front of train.py's options.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, sys.argv[1])
import demo.model
from demo import data
from demo.config import PROJECT, load


def main() -> None:
    config = load(sys.argv[2:])
    options = config.train
    dist.init_process_group("gloo")
    torch.manual_seed(config.run.seed)
    train_set, _, sizes, _ = data.build(config.data, PROJECT)
    model = demo.model.build(config.model, sizes)
    for name, module in model.named_modules():
        demo.model.initialise(name, module)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=options.lr, betas=(0.9, 0.95), fused=True)
    step, epoch = 0, 0
    folder = config.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    saved = folder / "latest.pt"
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, epoch = state["step"], state["epoch"]
    sampler = DistributedSampler(train_set, seed=config.run.seed)
    # The batch size of a rank is what a person set when there were four of them.
    accumulate = options.global_batch_size // options.micro_batch_size // 4
    loader = DataLoader(train_set, batch_size=options.micro_batch_size, sampler=sampler)
    last = min(options.stop_at or options.steps, options.steps)
    while step < last:
        sampler.set_epoch(epoch)
        batches = iter(loader)
        for _ in range(len(loader) // accumulate):
            start = time.perf_counter()
            step += 1
            warm = min(1.0, step / options.warmup_steps)
            progress = max(0, step - options.warmup_steps) / (options.steps - options.warmup_steps)
            for group in optimizer.param_groups:
                group["lr"] = options.lr * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
            total = torch.zeros(())
            for k in range(accumulate):
                batch = next(batches)
                ddp.require_backward_grad_sync = k == accumulate - 1
                value, count = demo.model.loss(ddp, batch)
                (value / count / accumulate).backward()
                total += value.detach() / count / accumulate
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), options.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                line = {"step": step, "loss": total.item() / dist.get_world_size()}
                line["step_s"] = time.perf_counter() - start
                with (folder / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
                if step % config.checkpoint.every == 0 or step == last:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({**state, "step": step, "epoch": epoch}, saved.with_suffix(".tmp"))
                    os.replace(saved.with_suffix(".tmp"), saved)
            if step == last:
                break
        epoch += 1
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
