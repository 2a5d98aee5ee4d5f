"""Which files a project has, when it has them, who owns them and which are executable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from scaffold.answers import Answers


class Owner(StrEnum):
    """Who may change a generated file, and so what `regenerate` does with it."""

    TOOL = "tool"  # launch scripts: read by jobs, so a conflict never writes into them
    MERGE = "merge"  # code, config, README: both sides edit, merged line by line or key by key
    ONCE = "once"  # written once, the person's own from then on
    ANSWERS = "answers"  # scaffold.toml: values are set in place, comments stay


def _always(answers: Answers) -> bool:
    return True


def _text(answers: Answers) -> bool:
    return answers.data == "text"


def _with(*launchers: str) -> Callable[[Answers], bool]:
    return lambda answers: any(launcher in answers.launcher for launcher in launchers)


@dataclass(frozen=True)
class FileSpec:
    """One file of a generated project; `{package}` in its path stands for the package."""

    path: str
    owner: Owner = Owner.MERGE
    executable: bool = False
    when: Callable[[Answers], bool] = _always


SPECS = (
    FileSpec(".gitattributes"),
    FileSpec(".gitignore"),
    FileSpec("README.md"),
    FileSpec("config.toml"),
    FileSpec("evaluate.py"),
    FileSpec("export.py"),
    FileSpec("launch/Dockerfile", Owner.TOOL, when=_with("kubernetes")),
    FileSpec("launch/Dockerfile.dockerignore", Owner.TOOL, when=_with("kubernetes")),
    FileSpec("launch/README.md", Owner.TOOL),
    FileSpec("launch/common.sh", Owner.TOOL),
    FileSpec("launch/hosts.txt", Owner.ONCE, when=_with("ssh", "mpirun")),
    FileSpec("launch/kubernetes-pytorchjob.yaml", Owner.TOOL, when=_with("kubernetes")),
    FileSpec("launch/kubernetes-trainjob.yaml", Owner.TOOL, when=_with("kubernetes")),
    FileSpec("launch/kubernetes.yaml", Owner.TOOL, when=_with("kubernetes")),
    FileSpec("launch/local.sh", Owner.TOOL, executable=True),
    FileSpec("launch/mpirun.sh", Owner.TOOL, executable=True, when=_with("mpirun")),
    FileSpec("launch/node.sh", Owner.TOOL, executable=True),
    FileSpec("launch/preflight.py", Owner.TOOL),
    FileSpec("launch/preflight_node.py", Owner.TOOL),
    FileSpec("launch/preflight_rank.py", Owner.TOOL),
    FileSpec("launch/settings.sh", Owner.TOOL),
    FileSpec("launch/site.env", Owner.ONCE),
    FileSpec("launch/slurm.sbatch", Owner.TOOL, executable=True, when=_with("slurm")),
    FileSpec("launch/ssh.sh", Owner.TOOL, executable=True, when=_with("ssh")),
    FileSpec("launch/submit.sh", Owner.TOOL, executable=True, when=_with("slurm")),
    FileSpec("launch/sweep.sh", Owner.TOOL, executable=True, when=_with("slurm")),
    FileSpec("launch/topology.env", Owner.TOOL),
    FileSpec("prepare.py", when=_text),
    FileSpec("pyproject.toml"),
    FileSpec("runs.py", executable=True),
    FileSpec("scaffold.toml", Owner.ANSWERS),
    FileSpec("tests/test_training.py"),
    FileSpec("tests/tiny.py"),
    FileSpec("train.py"),
    FileSpec("{package}/__init__.py"),
    FileSpec("{package}/checkpoint.py"),
    FileSpec("{package}/config.py"),
    FileSpec("{package}/data.py"),
    FileSpec("{package}/distributed.py"),
    FileSpec("{package}/metrics.py"),
    FileSpec("{package}/model.py"),
    FileSpec("{package}/parallel.py"),
    FileSpec("{package}/run.py"),
    FileSpec("{package}/sampler.py"),
    FileSpec("{package}/storage.py"),
    FileSpec("{package}/weights.py"),
)


def path_of(spec: FileSpec, answers: Answers) -> str:
    """The path of a file in the project, relative to its folder."""
    return spec.path.replace("{package}", answers.package)


def specs(answers: Answers) -> dict[str, FileSpec]:
    """Every path that may stand in this project, wanted by its answers or not."""
    return {path_of(spec, answers): spec for spec in SPECS}
