"""A project that a person has made their own follows other answers, and trains as it did before."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import files, scaffold
from launches import Launch, environment, launch, losses, new, result, started
from ranks import Ranks

Edits = dict[str, tuple[tuple[str, str], ...]]

CONFIG = (
    ("log_every = 10\n", "log_every = 1\n"),
    ("precision = ", 'precision = "fp32"  # no bf16 here; was '),
    ("warmup_steps = 20 ", "warmup_steps = 1 "),
    ("every = 100                 # steps; 0: only at the end", "every = 0"),
    ("eval_every = 100 ", "eval_every = 0 "),
    ("workers = 2 ", "workers = 0 "),
)
LOOP = (
    ("import math\n", "import math\nimport os\n"),
    (
        "    model.train()\n    while",
        '    log.info("%d parameters; job %s", sum(p.numel() for p in model.parameters()), '
        'os.environ.get("SLURM_JOB_ID", "-"))\n    model.train()\n    while',
    ),
    (
        '                "grad_norm": grad_norm.item(),\n',
        '                "grad_norm": grad_norm.item(),\n'
        '                "perplexity": math.exp(min(mean, 20.0)),\n',
    ),
    ("(0.1 + 0.45 * (1 +", "(0.5 * (1 +"),  # the schedule falls to zero
)
SIZES = {
    "gpt": "layers=2 width=32 heads=4 hidden=64",
    "vit": "layers=1 width=32 heads=2",
    "resnet": "",
    "mlp": "layers=2 width=16",
}
DATA = {
    "gpt": "samples=25 context=16",
    "vit": "samples=60 image_size=8",
    "resnet": "samples=60 image_size=16",
    "mlp": "samples=60",
}
TRAIN = "steps=6 global_batch_size=12 micro_batch_size=2 lr=3e-3"
MODELS: dict[str, tuple[tuple[str, str], ...]] = {
    "gpt": (
        ("F.silu(self.w1(x))", "F.gelu(self.w1(x))"),
        (
            "        self.scale = config.width**0.5\n",
            "        self.scale = config.width**0.5\n"
            "        self.embedding_norm = nn.RMSNorm(config.width, eps=1e-5)\n",
        ),
        (
            "x = self.dropout(self.embedding(tokens) * self.scale)",
            "x = self.dropout(self.embedding_norm(self.embedding(tokens) * self.scale))",
        ),
    ),
    "vit": (("nn.GELU()", "nn.SiLU()"), ("self.norm(x).mean(1)", "self.norm(x).amax(1)")),
    "resnet": (('nonlinearity="relu"', 'nonlinearity="leaky_relu"'),),
    "mlp": (("F.gelu(", "F.silu("),),
}


def edit(path: Path, *changes: tuple[str, str]) -> None:
    text = path.read_text()
    for old, wanted in changes:
        assert text.count(old) == 1, f"{path} has {old!r} {text.count(old)} times"
        text = text.replace(old, wanted)
    path.write_text(text)


def make_mine(project: Path, model: str) -> None:
    """Edits that people make: their model, their loop, their sizes, a file and a note of their own."""
    edit(project / project.name / "model.py", *MODELS[model])
    edit(project / "train.py", *LOOP)
    edit(project / "config.toml", *CONFIG)
    train = TRAIN.replace("size=12", "size=4") if model == "resnet" else TRAIN  # slow on a CPU
    for table, settings in (("model", SIZES[model]), ("data", DATA[model]), ("train", train)):
        for setting in settings.split():
            set_value(project / "config.toml", table, *setting.split("="))
    edit(
        project / "README.md",
        ("## Run it here\n", "Ask Ada before you use the big box.\n\n## Run it here\n"),
    )
    (project / "notes.md").write_text("The first try diverged.\n")


def set_value(path: Path, table: str, key: str, value: str) -> None:
    """Sets one number in a TOML file, the rest of its line as it was."""
    lines, inside = path.read_text().split("\n"), False
    for number, line in enumerate(lines):
        inside = line == f"[{table}]" or (inside and not line.startswith("["))
        if inside and line.startswith(f"{key} = "):
            lines[number] = f"{key} = {value}  #{line.partition('#')[2]}"
            break
    else:
        raise AssertionError(f"{path} has no {table}.{key}")
    path.write_text("\n".join(lines))


def assert_still_mine(project: Path, model: str) -> None:
    edited: Edits = {f"{project.name}/model.py": MODELS[model], "train.py": LOOP}
    for path, changes in edited.items():
        for _, wanted in changes:
            assert wanted in (project / path).read_text(), path
    config = tomllib.loads((project / "config.toml").read_text())
    assert config["train"]["steps"] == 6
    assert config["train"]["precision"] == "fp32"
    assert "Ask Ada before" in (project / "README.md").read_text()
    assert (project / "notes.md").read_text() == "The first try diverged.\n"


def regenerate(project: Path, *flags: str) -> str:
    done = scaffold("regenerate", project, *flags)
    assert done.code == 0, done.out + done.err
    return done.out


def generated(project: Path) -> dict[str, bytes]:
    """What regenerate is about: neither runs nor caches nor what is of this copy alone."""
    outside = ("runs/", ".scaffold/local/", ".pytest_cache/")
    return {
        path: content
        for path, content in files(project).items()
        if not path.startswith(outside) and "__pycache__" not in path
    }


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


@pytest.mark.slow
def test_an_edited_project_moves_from_ddp_on_one_machine_to_fsdp_on_two(
    tmp_path: Path, ranks: Ranks
) -> None:
    """Generate, edit, train, regenerate, train on through both nodes: the losses of no move."""
    project = new(tmp_path, "story", "--model", "gpt", "--nodes", "1", "--gpus-per-node", "2")
    make_mine(project, "gpt")
    unmoved = shutil.copytree(project, tmp_path / "unmoved" / "story")
    done = ranks.run(unmoved, 2)
    assert done.ok, done
    expected = losses(unmoved / "runs" / "default")
    assert list(expected) == [1, 2, 3, 4, 5, 6]

    first = launch(project / "launch" / "local.sh", "--train.stop_at", "3")
    assert first.code == 0, first
    assert "2 rank(s) here" in first.err
    assert " parameters; job -" in first.out
    edited = {path: (project / path).read_bytes() for path in ("train.py", "story/model.py")}

    report = regenerate(project, "--nodes", "2", "--strategy", "fsdp")
    assert "strategy           ddp → fsdp" in report
    assert "runs/default resumes at its last checkpoint, step 3." in report
    assert_still_mine(project, "gpt")
    for path, content in edited.items():
        assert (project / path).read_bytes() == content
    assert "fully_shard" in (project / "story" / "parallel.py").read_text()

    node = project / "launch" / "node.sh"
    both = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "SCAFFOLD_ALLOW_LOOPBACK": "1"}
    with started(node, env=environment(NODE_RANK="1", **both)) as other:
        zero = launch(node, env=environment(NODE_RANK="0", **both))
        out, err = other.communicate(timeout=60)
    assert zero.code == 0, zero
    assert other.returncode == 0, Launch(other.returncode, out, err, 0)
    assert "run by 4 " in zero.out
    assert "resuming from " in zero.out
    assert losses(project / "runs" / "default") == pytest.approx(expected, rel=1e-5)
    found, wanted = result(project / "runs" / "default"), result(unmoved / "runs" / "default")
    assert found["eval_samples"] == wanted["eval_samples"]
    assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-5)


WALK = {
    "ddp": "--backend gloo",
    "fsdp": "--strategy fsdp",
    "hsdp": "--nodes 2 --strategy hsdp --backend auto",
    "fsdp-tp": "--nodes 1 --gpus-per-node 4 --strategy fsdp-tp",
    "back": "--nodes 1 --gpus-per-node 2 --strategy ddp --backend auto",
}
STOPS = {
    "gpt": [*WALK],
    "vit": ["hsdp", "back"],
    "resnet": ["fsdp", "back"],
    "mlp": ["fsdp", "back"],
}


@pytest.mark.parametrize("model", MODELS)
def test_an_edited_project_trains_as_before_whatever_the_answers_become(
    model: str, make_project: Callable[..., Path], ranks: Ranks, tmp_path: Path
) -> None:
    """There and back: each stop has the losses of the first, the last one its files too."""
    project = make_project(model=model)
    make_mine(project, model)
    began = generated(project)
    done = ranks.run(project, 2, f"--run.dir={tmp_path / 'before'}")
    assert done.ok, done
    expected = losses(tmp_path / "before")
    assert len(expected) == 6
    for stop in STOPS[model]:
        regenerate(project, *WALK[stop].split())
        assert_still_mine(project, model)
        if stop == "back":
            assert generated(project) == began
            break
        run = tmp_path / stop
        local = 1 if stop == "hsdp" else 2
        done = ranks.run(project, 2, f"--run.dir={run}", local_world=local)
        assert done.ok, (stop, done)
        assert losses(run) == pytest.approx(expected, rel=1e-5), stop


@pytest.mark.slow
def test_after_a_clean_regenerate_an_edited_project_passes_its_own_tests(
    make_project: Callable[..., Path],
) -> None:
    """The command that every regenerate ends with, for real."""
    project = make_project(model="mlp")
    make_mine(project, "mlp")
    report = regenerate(project, "--nodes", "2", "--strategy", "fsdp", "--backend", "gloo")
    assert report.rstrip().endswith("python -m pytest -q")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=project,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
