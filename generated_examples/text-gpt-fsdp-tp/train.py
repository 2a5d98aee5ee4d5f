"""Trains the model: `bash launch/local.sh`, or `python train.py` for one rank. Read this first."""

import math
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from text_gpt_fsdp_tp import data, distributed
from text_gpt_fsdp_tp.checkpoint import Checkpoints, export
from text_gpt_fsdp_tp.config import PROJECT, Config, TrainConfig, load, write
from text_gpt_fsdp_tp.distributed import (
    UserError,
    agreed,
    check_same,
    log,
    sum_over_ranks,
    to_device,
)
from text_gpt_fsdp_tp.metrics import Metrics, evaluate
from text_gpt_fsdp_tp.model import count, loss
from text_gpt_fsdp_tp.parallel import Parallel
from text_gpt_fsdp_tp.run import Run, StopSignal
from text_gpt_fsdp_tp.sampler import EvaluationSampler, GrainSampler, make_loader, seed_of
from text_gpt_fsdp_tp.weights import average_statistics, frozen_statistics, make_optimizer


def main() -> int:
    config = load(sys.argv[1:])
    stop = StopSignal()
    device = distributed.start(timedelta(minutes=config.run.timeout_minutes))
    with Run(config.run_dir) as run:
        return train(config, device, run, stop)


def train(config: Config, device: torch.device, run: Run, stop: StopSignal) -> int:
    """Trains up to the last step, or until told to stop; returns the exit status."""
    options, seed = config.train, config.run.seed
    with agreed():
        train_set, val_set, sizes, identity = data.build(config.data, PROJECT)
    facts = {"identity": identity, "length": len(train_set), "seed": seed}
    check_same(config.numbers() | facts)
    with agreed():
        parallel = Parallel(config, device)
        model = parallel.build(sizes)
    # After sharding: an optimizer that holds the parameters of before would move nothing.
    optimizer = make_optimizer(model, options.weight_decay)
    checkpoints = Checkpoints(run, config, model, optimizer, parallel.scaler, facts)
    step, samples = checkpoints.resume()
    last_step = min(options.stop_at or options.steps, options.steps)
    if step >= last_step:
        log.info("already at %d of %d", step, last_step)
        export(model, run.folder / "export", config, sizes)  # a crash may have come in between
        return 0
    write(config, run.folder / "config.toml")

    rank, size = parallel.data_parallel()
    replicas = dist.get_world_size() // size  # ranks that see the same samples
    batch_size, micro_batch_size = options.global_batch_size, options.micro_batch_size
    sampler = GrainSampler(train_set, batch_size, micro_batch_size, rank, size, seed, last_step)
    sampler.set_step(step, samples)
    micro_batches = iter(make_loader(train_set, sampler, config.data.workers, device))
    val_sampler = EvaluationSampler(len(val_set), micro_batch_size, rank, size)
    val_loader = make_loader(val_set, val_sampler, config.data.workers, device)
    log.info("%s", sampler.describe())
    log.info("%d samples to train on, %d held out; device %s", len(train_set), len(val_set), device)

    metrics = Metrics(run.folder, step, options.steps)
    first_bad = torch.full((), torch.inf, device=device)  # the first step that came to nan or inf
    scaled = parallel.scaler.is_enabled()  # the scaler skips a step whose gradient is nan or inf
    logged_at, logged_step, saved_at = time.perf_counter(), step, time.perf_counter()
    told, tokens = 0.0, 0.0
    model.train()
    while step < last_step and not told:
        # The whole step's micro-batches come first: the loss is divided by the number of targets in
        # the global batch, which all ranks must know before the first backward pass.
        batches, error = take(micro_batches, sampler.rounds)
        mine = sum(count(batch) for k, batch in enumerate(batches) if sampler.has_grain(k))
        minutes = (time.perf_counter() - saved_at) / 60
        timed = distributed.RANK == 0 and 0 < config.checkpoint.every_minutes <= minutes
        # One small message a step, over the CPU: all ranks must stop, save and fail at the same step.
        targets, told, due, written, failed = sum_over_ranks(
            mine / replicas, bool(stop), timed, checkpoints.written(), error is not None
        )
        if failed:
            with agreed():
                if error is not None:
                    raise error
        step += 1
        lr = learning_rate(step, options)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss_sum = torch.zeros((), device=device)
        for k, batch in enumerate(batches):
            torch.manual_seed(seed_of(seed, "grain", step, sampler.grain(k)))
            # Without a grain of its own a rank runs one with weight 0, to keep in step.
            counts = sampler.has_grain(k)
            with (
                parallel.sync(model, last=k == len(batches) - 1),
                frozen_statistics(model, not counts),
            ):
                with parallel.autocast():
                    value, _ = loss(model, to_device(batch, device))
                # `size` undoes the strategy's averaging over the data-parallel ranks.
                parallel.backward(value * (counts * size / targets))
            loss_sum += value.detach() * counts
        grad_norm = parallel.step(model, optimizer, options.grad_clip)
        # A bad gradient is everyone's. It counts as half a step later than the loss of the rank it is from.
        bad = torch.where(loss_sum.isfinite(), step + 0.5, float(step))
        fine = loss_sum.isfinite() & (grad_norm.isfinite() | scaled)
        first_bad = torch.where(fine, first_bad, first_bad.minimum(bad))
        first_sample = samples
        samples += batch_size
        tokens += targets

        if written == dist.get_world_size():
            checkpoints.finish()
        last = step == last_step or bool(told)
        # Who was told to stop may have seconds left, and needs them to save.
        evaluating = step == last_step or (is_every(options.eval_every, step) and not told)
        saving = last or bool(due) or is_every(config.checkpoint.every, step)
        if last or evaluating or saving or is_every(options.log_every, step):
            dist.all_reduce(loss_sum)  # all ranks must reach this
            mean = loss_sum.item() / replicas / targets
            if not math.isfinite(mean) or not (math.isfinite(grad_norm.item()) or scaled):
                stop_at_bad_loss(first_bad, lr)
            now = time.perf_counter()
            seconds, logged_at = now - logged_at, now
            values = {
                "step": step,
                "epoch": first_sample // len(train_set),
                "loss": mean,
                "lr": lr,
                "grad_norm": grad_norm.item(),
                "samples": samples,
                "samples_per_s": (step - logged_step) * batch_size / seconds,
                "step_s": seconds / (step - logged_step),
            }
            if "vocab_size" in sizes:
                values["tokens_per_s"] = tokens / seconds
            metrics.log(values)
            logged_step, tokens = step, 0.0
        if evaluating or saving:
            average_statistics(model, sum(sampler.has_grain(k) for k in range(sampler.rounds)))
        if evaluating:
            result = evaluate(model, val_loader, parallel, device)
            metrics.log({"step": step, **result})
            saving |= checkpoints.is_best(step, result["eval_loss"])
        if saving:
            saved = checkpoints.save(step, samples)
            saved_at = time.perf_counter()
        if evaluating or saving:
            logged_at += time.perf_counter() - now  # neither counts into the speed of training
    saved = checkpoints.finish() and saved
    metrics.close()
    if not saved:
        raise UserError(f"the last checkpoint (step {step}) could not be saved; see above.")
    if told and step < last_step:
        log.info("told to stop: step %d is saved, the same command goes on from it", step)
        return distributed.preempted()
    export(model, run.folder / "export", config, sizes)
    return 0


def is_every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0


def learning_rate(step: int, options: TrainConfig) -> float:
    """A linear warm-up, then half a cosine down to a tenth of `lr` at the last step."""
    if step <= options.warmup_steps:
        return options.lr * step / options.warmup_steps
    progress = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    return options.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress))))


def take(micro_batches: Iterator[Any], n: int) -> tuple[list[Any], UserError | None]:
    """The next n micro-batches, or the mistake in the data that one of them met."""
    try:
        return [next(micro_batches) for _ in range(n)], None
    except UserError as error:
        return [], error


def stop_at_bad_loss(first_bad: torch.Tensor, lr: float) -> None:
    """Ends the run on all ranks, before a checkpoint of ruined weights can be written."""
    firsts: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(firsts, first_bad.item())  # all ranks must reach this
    first = min(firsts)
    what, where = (
        ("loss", f" on rank {firsts.index(first)}") if first % 1 == 0 else ("gradient", "")
    )
    raise UserError(
        f"the {what} became nan or inf at step {first // 1:.0f}{where} "
        f"(learning rate {lr:.3g}); nothing was saved since.\n"
        "Try a lower train.lr, a longer train.warmup_steps, or --train.precision fp32."
    )


if __name__ == "__main__":
    distributed.run(main)
