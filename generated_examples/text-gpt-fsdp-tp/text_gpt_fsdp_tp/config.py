"""The typed configuration: `config.toml`, then `--section.key value` from the command line."""

import dataclasses
import json
import tomllib
from argparse import SUPPRESS
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from . import storage
from .data import DataConfig
from .distributed import RANK, UserError
from .model import ModelConfig
from .parallel import ParallelConfig

PROJECT = Path(__file__).resolve().parent.parent  # paths in the config are relative to this folder


@dataclass
class RunConfig:
    name: str = "default"  # its folder is runs/<name>
    dir: str = ""  # another folder for the run
    seed: int = 0
    resume: str = "auto"  # auto: from the newest checkpoint; never; or the path of a checkpoint
    init_from: str = ""  # a checkpoint or an export whose weights (alone) a new run starts with
    allow_data_change: bool = False  # resume although the data set or the seed changed
    timeout_minutes: float = 10.0  # how long a rank waits for the others before it gives up


@dataclass
class TrainConfig:
    steps: int = 1000
    stop_at: int = 0  # end after this step with a checkpoint; 0: at `steps`
    global_batch_size: int = 96
    micro_batch_size: int = 4
    lr: float = 1e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    grad_clip: float = 1.0  # 0: off
    precision: Literal["bf16", "fp32", "fp16"] = "bf16"
    compile: bool = False
    activation_checkpointing: bool = False
    log_every: int = 10
    eval_every: int = 100  # 0: only at the end


@dataclass
class CheckpointConfig:
    every: int = 100  # steps; 0: only at the end
    every_minutes: float = 0.0  # 0: off
    keep: int = 2
    keep_best: bool = False  # keep the checkpoint with the lowest eval_loss as well
    async_save: bool = False


@dataclass
class Config:
    run: RunConfig
    data: DataConfig
    model: ModelConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    parallel: ParallelConfig

    @property
    def run_dir(self) -> Path:
        """The folder that holds all that the run writes."""
        return PROJECT / (self.run.dir or Path("runs", self.run.name))

    def numbers(self) -> dict[str, Any]:
        """What the ranks must have in common; paths and workers may differ between nodes."""
        sections = self.to_dict()
        return {
            f"{section}.{key}": value
            for section in ("model", "train", "checkpoint", "parallel")
            for key, value in sections[section].items()
        }

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return dataclasses.asdict(self)


def load(argv: list[str], file: Path = PROJECT / "config.toml") -> Config:
    """The configuration in `file` (or `--config FILE`) with the options in `argv` over it.

    Raises UserError for a missing file, an unknown key, a wrong type or an impossible value.
    """
    parser = ArgumentParser(prog="train.py", parser_mode="toml", exit_on_error=False)
    parser.add_argument("--config", action="config", help="a TOML file in place of config.toml")
    # torch.distributed.launch and some IDEs pass it; the environment has it already.
    parser.add_argument("--local-rank", "--local_rank", type=int, help=SUPPRESS)
    sections = {field.name: field.type for field in dataclasses.fields(Config)}
    for name, section in sections.items():
        parser.add_class_arguments(section, name)  # type: ignore[arg-type]
    if not any(option.split("=")[0] == "--config" for option in argv):
        argv = ["--config", str(file), *argv]
    try:
        values: Namespace = parser.instantiate(parser.parse_args(argv))
    except ArgumentError as error:
        raise UserError(" ".join(str(error).split())) from None
    config = Config(**{name: values[name] for name in sections})
    _check(config)
    return config


def load_for_run(argv: list[str]) -> Config:
    """The configuration with the [model] and [data] of the run that `argv` names."""
    used = load(argv).run_dir / "config.toml"
    if not used.is_file():
        return load(argv)
    sections = tomllib.loads(used.read_text(encoding="utf-8"))
    options = [
        f"--{section}.{key}={value if isinstance(value, str) else json.dumps(value)}"
        for section in ("data", "model")
        for key, value in sections[section].items()
    ]
    return load([*options, *argv])


def _check(config: Config) -> None:
    """Raises UserError for numbers that cannot work, with the nearest that can."""
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    for section, values in config.to_dict().items():
        for key, value in values.items():
            if isinstance(value, (int, float)) and value < 0 and (section, key) != ("run", "seed"):
                raise UserError(f"{section}.{key} is {value}; it cannot be negative.")
    if micro < 1 or batch < 1 or config.train.steps < 1:
        raise UserError(
            "train.steps, train.global_batch_size and train.micro_batch_size start at 1."
        )
    if batch % micro:
        below, above = batch // micro * micro, (batch // micro + 1) * micro
        nearest = f"{below} or {above}" if below else str(above)
        raise UserError(
            f"train.global_batch_size {batch} is no multiple of train.micro_batch_size {micro}: use {nearest}."
        )


def write(config: Config, path: Path) -> None:
    """Leaves the configuration that holds, options included, in the run's folder (on rank 0)."""
    if RANK == 0:
        storage.write(path, to_toml(config))


def to_toml(config: Config) -> str:
    lines = []
    for section, values in config.to_dict().items():
        lines += [
            f"[{section}]",
            *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()),
            "",
        ]
    return "\n".join(lines)
