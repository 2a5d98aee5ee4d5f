"""What is offered: models, data sets, strategies, and the numbers each model starts with.

Adding a model means one entry here and one part in `templates/project/templates/model/`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """A model on offer, with defaults that let it learn something within a minute on a CPU."""

    help: str
    task: str
    global_batch_size: int  # a multiple of 48, so that most rank counts idle nothing
    micro_batch_size: int
    lr: str  # text, so that the config file shows it as it is written here
    steps: int
    heads: int = 0  # attention heads, which tensor parallelism deals out to the ranks of a node


@dataclass(frozen=True)
class Data:
    """A kind of data set on offer and the tasks it fits."""

    help: str
    tasks: tuple[str, ...]
    path: str = ""  # what the question for the path asks for; empty: it has no path


@dataclass(frozen=True)
class Strategy:
    """A way to spread the model over ranks, and the models it works for (all, if empty)."""

    help: str
    models: tuple[str, ...] = ()
    min_nodes: int = 1
    instead: str = "ddp"  # what to use where this one does not work


MODELS = {
    "mlp": Model("multi-layer perceptron, for tables", "tabular", 384, 16, "3e-3", 300),
    "resnet": Model("torchvision's ResNet, for images", "image", 192, 16, "1e-3", 200),
    "vit": Model("vision transformer, for images", "image", 192, 8, "1e-3", 200),
    "gpt": Model("decoder-only transformer, for text", "text", 96, 4, "1e-3", 200, heads=8),
}

DATA = {
    "synthetic": Data("made up and learnable: trains at once", ("tabular", "image", "text")),
    "csv": Data("a CSV file with a header", ("tabular",), "CSV file"),
    "image-folder": Data("a folder of images per class", ("image",), "folder of class folders"),
    "text": Data("a folder of UTF-8 text files", ("text",), "folder of text files"),
}

STRATEGIES = {
    "ddp": Strategy("every rank holds the whole model (DistributedDataParallel)"),
    "fsdp": Strategy("the model is sharded over all ranks (FSDP2)"),
    "hsdp": Strategy("sharded within a node, replicated over nodes", min_nodes=2, instead="fsdp"),
    "fsdp-tp": Strategy("tensor parallel within a node, FSDP2 over nodes", ("gpt",), 1, "fsdp"),
}

LAUNCHERS = {
    "torchrun": "this machine, and machines where you start a script on each",
    "slurm": "a Slurm cluster: jobs that go on by themselves after their time limit",
    "ssh": "machines that you can log in to, all started from one of them",
    "mpirun": "where MPI starts programs: Open MPI, MPICH",
    "kubernetes": "a Kubernetes cluster, with or without Kubeflow",
}

BACKENDS = {
    "auto": "nccl on CUDA, gloo on a CPU",
    "nccl": "NVIDIA GPUs only",
    "gloo": "CPUs, and GPUs slowly",
    "mpi": "needs a PyTorch built with MPI",
}

PRECISIONS = {
    "bf16": "bfloat16 where it is safe, float32 elsewhere",
    "fp32": "float32 throughout",
    "fp16": "float16 with loss scaling, for GPUs without bfloat16",
}


def data_part(model: str, data: str) -> str:
    """The template part that reads `data` for `model`: `synthetic` has one per task."""
    if data == "synthetic":
        return f"synthetic_{MODELS[model].task}"
    return data.replace("-", "_")
