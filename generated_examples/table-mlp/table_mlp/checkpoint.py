"""Checkpoints: all that is needed to go on, under any strategy and on any number of ranks.

A checkpoint is a folder `step_00000100`: the tensors of model and optimizer in the sharded format of
torch.distributed.checkpoint (https://docs.pytorch.org/docs/stable/distributed.checkpoint.html), and
`state.json` with everything else. It gets this name by a rename when it is complete on all ranks.
"""

import hashlib
import json
import shutil
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from . import storage
from .config import PROJECT, Config
from .distributed import RANK, RESTARTED, UserError, agreed, from_rank_0, log, sum_over_ranks
from .run import Run
from .storage import FAILURES, Failure, cause

Tensors = dict[str, Any]  # nested dicts of tensors
# Under DDP rank 0 saves and loads by itself, on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")


class Checkpoints:
    """Saves, finds, resumes and prunes the checkpoints of one run. All ranks call every method.

    Args:
        data: what identifies the data: its `identity`, the `length` of the training set, the `seed`.
    """

    def __init__(
        self,
        run: Run,
        config: Config,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        data: dict[str, Any],
    ) -> None:
        self.run, self.config, self.data, self.code = run, config, data, code_hash()
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.folder = run.folder / "checkpoints"
        run.at_exit = self.finish
        self.sharded = any(isinstance(p, DTensor) for p in model.parameters())
        self.best: dict[str, float] = {}  # step and eval_loss of the best checkpoint
        self.candidate: dict[str, float] = {}  # what is the best, once it is saved
        # A save that is under way: its record, the writing in the background, what went wrong.
        self.pending: tuple[dict[str, Any], Future[Any] | None, Failure | None] | None = None
        # Saving in the background needs collectives of its own, apart from those of training.
        self.group: Any = dist.new_group(backend="gloo") if config.checkpoint.async_save else None
        if self.sharded and not run.shared:
            raise UserError(
                f"{run.folder} is not the same folder on all ranks, and each rank writes its shard there:"
                "\nput run.dir on a shared disk, or use the strategy ddp."
            )

    # Saving

    def save(self, step: int, samples: int) -> bool:
        """Writes the checkpoint after `step`; False (and a report) where that failed.

        With `checkpoint.async_save` the disk is written in the background, until `finish`.
        """
        self.finish()
        record = {
            "step": step,
            "samples": samples,
            "data": self.data,
            "scaler": self.scaler.state_dict(),
            "best": self.candidate if self.candidate.get("step") == step else self.best,
            "config": self.config.to_dict(),
            "code": self.code,
            "ranks": dist.get_world_size(),
            "torch": torch.__version__,
        }
        tensors, _ = self._tensors()
        target = self._unfinished(step)
        future: Future[Any] | None = None
        error: Failure | None = None
        if RANK == 0:
            shutil.rmtree(target, ignore_errors=True)
        dist.barrier()
        if self.sharded or RANK == 0:  # replicas are equal: under DDP rank 0 alone writes
            try:
                if self.config.checkpoint.async_save:
                    future = dcp.async_save(  # type: ignore[assignment]
                        tensors,
                        checkpoint_id=target,
                        process_group=self.group,
                        no_dist=not self.sharded,
                    )
                else:
                    dcp.save(tensors, checkpoint_id=target, no_dist=not self.sharded)
            except FAILURES as e:
                error = e  # a full disk, for one: training goes on with the checkpoint before
        self.pending = (record, future, error)
        return True if self.config.checkpoint.async_save else self.finish()

    def written(self) -> bool:
        """Whether this rank's part of a save in the background is on disk, waiting for `finish`."""
        return self.pending is not None and (self.pending[1] is None or self.pending[1].done())

    def finish(self) -> bool:
        """Completes a save: the rename that makes it count, then the pruning of older ones."""
        if self.pending is None:
            return True
        (record, future, error), self.pending = self.pending, None
        source = self._unfinished(record["step"])
        try:
            if future is not None:
                future.result()
        except FAILURES as e:
            error = e
        if not sum_over_ranks(error is not None)[0] and RANK == 0:
            try:
                storage.write(source / "state.json", json.dumps(record, indent=2))
                storage.sync_folder(source)
                target = self.folder / f"step_{record['step']:08d}"
                storage.remove(target)
                source.rename(target)
                storage.sync_folder(self.folder)
            except OSError as e:
                error = e
        errors: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, cause(error) if error else None)
        if failed := next(filter(None, errors), None):
            log.error("step %d is not saved: %s", record["step"], failed)
            if RANK == 0:
                shutil.rmtree(source, ignore_errors=True)
            return False
        self.best = record["best"]
        if RANK == 0:
            self._prune()
        return True

    def _unfinished(self, step: int) -> Path:
        return self.folder / f".unfinished_step_{step:08d}"

    def _prune(self) -> None:
        for path in storage.complete(self.folder)[max(1, self.config.checkpoint.keep) :]:
            if storage.step_of(path) != self.best.get("step"):
                storage.remove(path)

    def is_best(self, step: int, eval_loss: float) -> bool:
        """Notes an evaluation; True where its checkpoint is to be kept as the best so far."""
        if not self.config.checkpoint.keep_best:
            return False
        self.finish()  # what counts is the best that is on disk
        if not eval_loss < self.best.get("eval_loss", torch.inf):  # also where it is nan
            return False
        self.candidate = {"step": step, "eval_loss": eval_loss}
        return True

    # Resuming

    def resume(self) -> tuple[int, int]:
        """Loads what `run.resume` asks for; returns the completed (step, samples), (0, 0) if new."""
        with agreed():
            candidates = self._candidates() if RANK == 0 else []
        candidates = from_rank_0(candidates)
        with agreed():
            self._check_disk(candidates)
        for path in candidates:
            with agreed():
                record = self._read(path) if RANK == 0 else None
            record = from_rank_0(record)
            if record is None or not self._load(path):
                log.warning("%s IS DAMAGED; trying the one before it", path)
                continue
            if record["scaler"] and self.scaler.is_enabled():
                self.scaler.load_state_dict(record["scaler"])
            self.best = record["best"]
            self._tell_changes(record, path)
            if RANK == 0:
                self._set_aside(record["step"], path)
            return record["step"], record["samples"]
        if candidates:
            raise UserError(
                f"no checkpoint in {self.folder} can be read; start anew with another run.name."
            )
        if self.config.run.init_from:
            load_weights(self.model, PROJECT / self.config.run.init_from)
        return 0, 0

    def _check_disk(self, candidates: list[Path]) -> None:
        """Raises UserError where rank 0 has no shared disk, and this rank has newer checkpoints.

        In an elastic run, or with the nodes in another order, rank 0 may be another machine than before.
        """
        mine = [] if self.run.shared or RANK == 0 else storage.complete(self.folder)
        if mine and not any(
            storage.step_of(path) >= storage.step_of(mine[0]) for path in candidates
        ):
            raise UserError(
                f"rank {RANK} has {mine[0]}, and rank 0 nothing as new:\nput run.dir on a shared disk, "
                "let that machine be the first, or use another run.name."
            )

    def _candidates(self) -> list[Path]:
        """Where to go on from, the first choice first."""
        wanted, found = self.config.run.resume, storage.listed(self.folder)
        for pattern in (".unfinished_*", ".deleted_*"):  # of a launch that was killed
            for path in self.folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)
        if wanted == "auto" or (wanted == "never" and RESTARTED):
            return found
        if wanted == "never":
            if found:
                raise UserError(
                    f"{self.folder} holds checkpoints, and run.resume is never: use another run.name, or resume."
                )
            return []
        path = PROJECT / wanted
        if not storage.is_complete(path):
            raise UserError(f"run.resume: {path} is no complete checkpoint (a step_... folder).")
        # The first attempt of this launch set aside all that was newer: what is there now is its own.
        return [
            *(p for p in found if RESTARTED and storage.step_of(p) > storage.step_of(path)),
            path,
        ]

    def _set_aside(self, step: int, path: Path) -> None:
        """Renames what is newer than the checkpoint gone on from: a future that is abandoned."""
        for other in storage.listed(self.folder):
            if storage.step_of(other) >= step and other.resolve() != path.resolve():
                aside = other.with_name(f"abandoned_{other.name}")
                shutil.rmtree(aside, ignore_errors=True)
                other.rename(aside)
                log.info("%s is now %s: delete it when you like", other.name, aside)

    def _read(self, path: Path) -> dict[str, Any] | None:
        """The record of a checkpoint, None where it is damaged.

        Raises UserError where the checkpoint does not fit this model or this data.
        """
        try:
            record: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
            shapes = storage.saved_shapes(path)
        except Exception as error:  # whatever json and pickle make of half a file
            log.warning("%s: %s", path, cause(error))
            return None
        for key, value in self.data.items():
            before = record["data"].get(key)
            if before != value and not self.config.run.allow_data_change:
                raise UserError(
                    f"{path.name} was trained with another {'seed' if key == 'seed' else 'data set'} "
                    f"({key} {before}, now {value}).\n"
                    "To go on all the same: --run.allow_data_change true"
                )
        check_shapes(self.model, shapes, path)
        return record

    def _load(self, path: Path) -> bool:
        tensors, groups = self._tensors()
        failed = False
        if self.sharded or RANK == 0:
            try:
                dcp.load(tensors, checkpoint_id=path, no_dist=not self.sharded)
            except FAILURES as error:
                failed = True
                log.warning("%s: %s", path, cause(error))
        if sum_over_ranks(failed)[0]:
            return False
        if not self.sharded:
            broadcast(tensors)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=tensors["model"],
            # Learning rate and weight decay come from the config, never from the checkpoint.
            optim_state_dict={"state": tensors["optim"], "param_groups": groups},
        )
        return True

    def _tensors(self) -> tuple[Tensors, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer["state"]}, optimizer["param_groups"]

    def _tell_changes(self, record: dict[str, Any], path: Path) -> None:
        log.info("resuming from %s", path)
        now = self.config.to_dict()
        for section, values in record["config"].items():
            for key, old in values.items():
                new = now[section].get(key, old)  # [parallel] has other keys under another strategy
                if new != old and (section, key) not in {("run", "resume"), ("train", "stop_at")}:
                    log.info("changed since then: %s.%s was %r, is %r", section, key, old, new)
        if record["code"] != self.code:
            log.info("changed since then: the project's code")


def newest(config: Config) -> Path:
    """The checkpoint that `run.resume` names, or the newest of the run; UserError if there is none."""
    if config.run.resume not in ("auto", "never"):
        return PROJECT / config.run.resume
    found: list[Path] = []
    with agreed():
        if RANK == 0 and not (found := storage.complete(config.run_dir / "checkpoints")):
            raise UserError(
                f"{config.run_dir} holds no complete checkpoint: train first, or give --run.dir."
            )
    return from_rank_0(found)[0]


def check_shapes(model: nn.Module, there: dict[str, torch.Size], path: Path) -> None:
    """Raises UserError unless the weights in `path`, of the shapes `there`, are those of `model`."""
    weights: Tensors = get_model_state_dict(model)
    here = {name: tensor.shape for name, tensor in weights.items()}
    for name in here | there:
        if here.get(name) != there.get(name):
            saved, wanted = (tuple(s[name]) if name in s else "absent" for s in (there, here))
            raise UserError(
                f"{path} is of another model size: {name} is {saved} there and {wanted} in this model.\n"
                "Set [model] and [data] as they were, or start a new run with another run.name."
            )


def broadcast(tensors: Tensors) -> None:
    """Sends rank 0's tensors into those of the other ranks."""
    for value in tensors.values():
        if isinstance(value, dict):
            broadcast(value)
        elif isinstance(value, torch.Tensor):
            dist.broadcast(value, src=0)  # all ranks must reach this


def load_weights(model: nn.Module, path: Path) -> None:
    """Loads weights alone, from a checkpoint or from an export, into a model of any strategy."""
    file = path if path.suffix == ".safetensors" else path / "model.safetensors"
    state: Tensors = {}
    with agreed(), storage.readable(path):
        if RANK == 0 and storage.is_complete(path):
            check_shapes(model, storage.saved_shapes(path), path)
        elif RANK == 0:
            if not file.is_file():
                raise UserError(f"{path} is neither a checkpoint nor an export.")
            state = load_file(file)
            check_shapes(model, {name: value.shape for name, value in state.items()}, path)
    if from_rank_0(storage.is_complete(path)):
        state = get_model_state_dict(model)
        sharded = any(isinstance(value, DTensor) for value in state.values())
        with agreed(), storage.readable(path):
            if sharded or RANK == 0:
                dcp.load({"model": state}, checkpoint_id=path, no_dist=not sharded)
        if not sharded:
            broadcast(state)
        set_model_state_dict(model, state)
    else:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
    log.info("the weights are those of %s", path)


def export(model: nn.Module, folder: Path, config: Config, sizes: dict[str, int]) -> None:
    """Writes `model.safetensors`, the whole weights, and the `config.json` that rebuilds the model."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: Tensors = get_model_state_dict(model, options=options)  # all ranks must reach this
    if RANK == 0:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / ".unfinished.safetensors"
        save_file({name: value.contiguous() for name, value in weights.items()}, unfinished)
        unfinished.replace(folder / "model.safetensors")
        facts = {"model": config.to_dict()["model"], "sizes": sizes}
        storage.write(folder / "config.json", json.dumps(facts, indent=2))
        log.info("exported to %s", folder / "model.safetensors")


def code_hash() -> str:
    """A hash of the project's Python files, kept to tell when a run went on with other code."""
    digest = hashlib.sha256()
    for file in sorted([*PROJECT.glob("*.py"), *Path(__file__).parent.glob("*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()
