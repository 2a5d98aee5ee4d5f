"""Checkpoints: all that is needed to go on, under any strategy and on any number of ranks.

A checkpoint is a folder `step_00000100`: the tensors of model and optimizer in the sharded format of
torch.distributed.checkpoint (https://docs.pytorch.org/docs/stable/distributed.checkpoint.html), and
`state.json` with everything else. It gets this name by a rename when it is complete on all ranks.
"""

import contextlib
import hashlib
import json
import os
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

from .config import PROJECT, Config
from .distributed import RANK, UserError, agreed, from_rank_0, log, sum_over_ranks
from .run import Run

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
        self.run, self.config, self.data = run, config, data
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.folder = run.folder / "checkpoints"
        self.sharded = any(isinstance(p, DTensor) for p in model.parameters())
        self.best: dict[str, float] = {}  # step and eval_loss of the best checkpoint
        self.pending: tuple[dict[str, Any], Future[Any] | None] | None = None
        # Saving in the background needs collectives of its own, apart from those of training.
        self.group = dist.new_group(backend="gloo") if config.checkpoint.async_save else None
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
        if not self.finish():
            log.warning("the checkpoint before this one is lost")
        record = {
            "step": step,
            "samples": samples,
            "data": self.data,
            "scaler": self.scaler.state_dict(),
            "best": self.best,
            "config": self.config.to_dict(),
            "code": code_hash(),
            "torch": torch.__version__,
        }
        tensors, _ = self._tensors()
        target = self._unfinished(step)
        future, error = None, None
        if RANK == 0:
            shutil.rmtree(target, ignore_errors=True)
        dist.barrier()
        if self.sharded or RANK == 0:  # replicas are equal: under DDP rank 0 alone writes
            try:
                if self.config.checkpoint.async_save:
                    future = dcp.async_save(  # type: ignore[assignment]
                        tensors, checkpoint_id=target, process_group=self.group, no_dist=not self.sharded
                    )
                else:
                    dcp.save(tensors, checkpoint_id=target, no_dist=not self.sharded)
            except Exception as e:  # a full disk, for one: training goes on with the checkpoint before
                error = e
        self.pending = (record, future)
        return self.finish(error) if future is None and not self._is_async() else True

    def _is_async(self) -> bool:
        return self.config.checkpoint.async_save

    def written(self) -> bool:
        """Whether this rank's part of a save in the background is on disk, waiting for `finish`."""
        return self.pending is not None and (self.pending[1] is None or self.pending[1].done())

    def finish(self, error: Exception | None = None) -> bool:
        """Completes a save: the rename that makes it count, then the pruning of older ones."""
        if self.pending is None:
            return True
        (record, future), self.pending = self.pending, None
        source = self._unfinished(record["step"])
        target = self.folder / f"step_{record['step']:08d}"
        try:
            if future is not None:
                future.result()
        except Exception as e:
            error = e
        failed = sum_over_ranks(error is not None)[0]
        if not failed and RANK == 0:
            try:
                write_json(source / "state.json", record)
                old = target.with_name(f".old_{target.name}")
                if target.exists():  # of an abandoned attempt at this step
                    target.rename(old)
                source.rename(target)
                sync_folder(self.folder)
                shutil.rmtree(old, ignore_errors=True)
                self._prune()
            except OSError as e:
                error = e
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}" if error else ""
        if failed or from_rank_0(bool(error)):
            reasons: list[str] = [""] * dist.get_world_size()
            dist.all_gather_object(reasons, reason)
            log.error("step %d is not saved: %s", record["step"], next(filter(None, reasons), "unknown"))
            if RANK == 0:
                shutil.rmtree(source, ignore_errors=True)
            return False
        return True

    def _unfinished(self, step: int) -> Path:
        return self.folder / f".unfinished_step_{step:08d}"

    def _prune(self) -> None:
        found = complete(self.folder)
        for path in found[max(1, self.config.checkpoint.keep) :]:
            if path.name != f"step_{self.best.get('step', -1):08d}":
                shutil.rmtree(path, ignore_errors=True)

    def is_best(self, step: int, eval_loss: float) -> bool:
        """Notes an evaluation; True where its checkpoint is to be kept as the best so far."""
        if not self.config.checkpoint.keep_best or eval_loss >= self.best.get("eval_loss", torch.inf):
            return False
        self.best = {"step": step, "eval_loss": eval_loss}
        return True

    # Resuming

    def resume(self) -> tuple[int, int]:
        """Loads what `run.resume` asks for; returns the completed (step, samples), (0, 0) if new."""
        with agreed():
            candidates = self._candidates() if RANK == 0 else []
        for path in from_rank_0(candidates):
            with agreed():
                record = self._read(path) if RANK == 0 else {}
            record = from_rank_0(record)
            if not self._load(path):
                log.warning("%s is damaged and left alone; trying the one before it", path)
                continue
            self.scaler.load_state_dict(record["scaler"] if self.scaler.is_enabled() else {})
            self.best = record["best"]
            self._tell_changes(record, path)
            if RANK == 0 and path.parent == self.folder:
                for newer in complete(self.folder):
                    if newer > path:  # of the future that this resume abandons
                        newer.rename(newer.with_name(f"abandoned_{newer.name}"))
            return record["step"], record["samples"]
        if from_rank_0(candidates):
            raise UserError(f"no checkpoint in {self.folder} can be read; start anew with another run.name.")
        if self.config.run.init_from:
            load_weights(self.model, PROJECT / self.config.run.init_from)
        return 0, 0

    def _candidates(self) -> list[Path]:
        wanted, found = self.config.run.resume, complete(self.folder)
        if wanted == "never" and found:
            raise UserError(
                f"{self.folder} holds checkpoints, and run.resume is never: use another run.name, or resume."
            )
        if wanted in ("auto", "never"):
            return found
        if not is_complete(PROJECT / wanted):
            raise UserError(f"run.resume: {PROJECT / wanted} is no complete checkpoint (a step_... folder).")
        return [PROJECT / wanted]

    def _read(self, path: Path) -> dict[str, Any]:
        """The record of a checkpoint; UserError where it does not fit this model or this data."""
        record: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
        for key, value in self.data.items():
            if record["data"][key] != value and not self.config.run.allow_data_change:
                raise UserError(
                    f"{path.name} was trained with another {'seed' if key == 'seed' else 'data set'} "
                    f"({key} {record['data'][key]}, now {value}).\n"
                    "To go on all the same: --run.allow_data_change true"
                )
        check_shapes(self.model, path)
        return record

    def _load(self, path: Path) -> bool:
        tensors, groups = self._tensors()
        failed = False
        if self.sharded or RANK == 0:
            try:
                dcp.load(tensors, checkpoint_id=path, no_dist=not self.sharded)
            except Exception as error:
                failed = True
                log.warning("%s: %s", path.name, str(error).strip().splitlines()[-1])
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
                new = now.get(section, {}).get(key)
                if new != old and (section, key) not in {("run", "resume"), ("train", "stop_at")}:
                    log.info("changed since then: %s.%s was %r, is %r", section, key, old, new)
        if record["code"] != code_hash():
            log.info("changed since then: the project's code")


def is_complete(path: Path) -> bool:
    return (path / ".metadata").is_file() and (path / "state.json").is_file()


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in a run's `checkpoints` folder, newest first."""
    return sorted((p for p in folder.glob("step_*[0-9]") if is_complete(p)), reverse=True)


def newest(config: Config) -> Path:
    """The checkpoint that `run.resume` names, or the newest of the run; UserError if there is none."""
    if config.run.resume not in ("auto", "never"):
        return PROJECT / config.run.resume
    found: list[Path] = []
    with agreed():
        if RANK == 0 and not (found := complete(config.run_dir / "checkpoints")):
            raise UserError(f"{config.run_dir} holds no complete checkpoint: train first, or give --run.dir.")
    return from_rank_0(found)[0]


def check_shapes(model: nn.Module, path: Path) -> None:
    """Raises UserError unless the checkpoint holds every weight of `model` in its shape."""
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    for name, tensor in get_model_state_dict(model).items():
        shape = getattr(saved.get(f"model.{name}"), "size", None)
        if shape != tensor.shape:
            what = "has no" if shape is None else f"holds {tuple(shape)} as"
            raise UserError(
                f"{path} {what} {name}, and this model's is {tuple(tensor.shape)}: another model size?\n"
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
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state: Tensors = {}
    with agreed():
        if RANK == 0 and is_complete(path):
            check_shapes(model, path)
        elif RANK == 0 and not file.is_file():
            raise UserError(f"run.init_from: {path} is neither a checkpoint nor an export.")
    if from_rank_0(is_complete(path)):
        state = get_model_state_dict(model)
        sharded = any(isinstance(value, DTensor) for value in state.values())
        if sharded or RANK == 0:
            dcp.load({"model": state}, checkpoint_id=path, no_dist=not sharded)
        if not sharded:
            broadcast(state)
        set_model_state_dict(model, state)
    else:
        with agreed():
            if RANK == 0:
                state = load_file(file)
                here = {name: value.shape for name, value in get_model_state_dict(model).items()}
                there = {name: value.shape for name, value in state.items()}
                if here != there:
                    wrong = sorted(name for name in here | there if here.get(name) != there.get(name))
                    raise UserError(f"run.init_from: {file} is of another model size (see {wrong[0]}).")
        set_model_state_dict(model, state, options=options)
    log.info("the weights are those of %s", path)


def export(model: nn.Module, folder: Path, config: Config, sizes: dict[str, int]) -> None:
    """Writes `model.safetensors`, the whole weights, and the `config.json` that rebuilds the model."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)  # all ranks must reach this
    if RANK == 0:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / ".unfinished.safetensors"
        save_file({name: value.contiguous() for name, value in weights.items()}, unfinished)
        unfinished.replace(folder / "model.safetensors")
        write_json(folder / "config.json", {"model": config.to_dict()["model"], "sizes": sizes})
        log.info("exported to %s", folder / "model.safetensors")


def code_hash() -> str:
    """A hash of the project's Python files, kept to tell when a run went on with other code."""
    digest = hashlib.sha256()
    for file in sorted([*PROJECT.glob("*.py"), *Path(__file__).parent.glob("*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def write_json(path: Path, value: object) -> None:
    unfinished = path.with_name(f".unfinished_{path.name}")
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def sync_folder(path: Path) -> None:
    """Makes a rename in `path` survive a power cut, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
