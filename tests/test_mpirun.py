"""`launch/mpirun.sh` under Open MPI and MPICH, on this machine and over SSH on hosts.

Where only the launcher is under test a stand-in for `train.py` does as it is told; those marked `slow`
train.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import launches
from conftest import write_project
from faults import OPTIONS
from hosts import Hosts, require
from launches import Launch, eventually
from ranks import Ranks
from slurm import Slurm
from test_ssh import STEP, STRANGE, change, serve_ssh

LIMIT = 100
MPIS = ("mpirun.openmpi", "mpirun.mpich")
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

# Says what the rank was given and does what --test.RANK says.
TRAIN = """
import json, os, signal, socket, sys, time
from pathlib import Path

rank, out, control = os.environ["RANK"], Path(os.environ["OUT"]), Path(os.environ["SCAFFOLD_CONTROL"])
task = dict(a.split("=", 1) for a in sys.argv[1:] if "=" in a).get(f"--test.{rank}", "end")
seen = {"argv": sys.argv[1:], "cwd": os.getcwd(), "pid": os.getpid(), "env": dict(os.environ)}
(out / f"{rank}.tmp").write_text(json.dumps(seen))
(out / f"{rank}.tmp").rename(out / f"{rank}.json")
if task == "late":
    time.sleep(2)  # as long as the imports take
told = []
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: told.append(number))
(out / f"{rank}.ready").touch()
match task:
    case "fail":
        (control / "error").write_text("Traceback\\nerror: sample 7 is broken\\nlook at it\\n")
        sys.exit(1)
    case "die":
        os.kill(os.getpid(), signal.SIGKILL)
    case "wait" | "late":
        while not (control / "stop").exists():
            time.sleep(0.05)
        time.sleep(0.5 * int(rank))
        (out / f"{rank}.saved").touch()
        (control / "preempted").touch()
        sys.exit(0)
    case "agree":  # what all ranks know to be wrong
        (control / "error").write_text("error: no such file\\n")
        sys.exit(0)
    case "deaf":
        time.sleep(60)
if rank == "0" and "WORLD_SIZE" in os.environ:  # the others look for it
    with socket.create_server(("", int(os.environ["MASTER_PORT"]))):
        while len(list(out.glob("*.json"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.05)
sys.stdout.write(f"rank {rank} is done\\n")  # in one piece, among those of the others
"""


class Place:
    """A project, a stand-in for it, and a folder for what its ranks say."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.temporary = folder, folder / "out", folder / "tmp"
        self.temporary.mkdir()
        self.project = folder / "Jörg's $HOME & 数据" / "demo"
        write_project(self.project, model="mlp", precision="fp32", launcher=["mpirun"])
        self.stub = folder / "è stub"
        shutil.copytree(self.project, self.stub, ignore=shutil.ignore_patterns(".scaffold"))
        (self.stub / "train.py").write_text(TRAIN)
        (self.stub / "launch" / "preflight.py").write_text(TRAIN.replace("RANK", "NODE_RANK"))

    def env(self, mpi: str, **more: Any) -> dict[str, str]:
        given = {"MPIRUN": mpi, "OUT": self.out, "PASS_ENV": "OUT TMPDIR", **more}
        given["TMPDIR"] = self.temporary
        return launches.environment(**ROOT) | {k: str(v) for k, v in given.items()}

    def command(self, *options: str, stub: bool = True) -> list[str]:
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        script = (self.stub if stub else self.project) / "launch" / "mpirun.sh"
        return [os.environ.get("SCAFFOLD_TEST_BASH", "bash"), str(script), *options]

    def start(
        self, mpi: str, *options: str, stub: bool = True, **env: Any
    ) -> subprocess.Popen[str]:
        """Starts a launch on this machine in a session of its own, as a terminal's."""
        return subprocess.Popen(
            self.command(*options, stub=stub),
            env=self.env(mpi, **env),
            cwd="/",
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def end(self, process: subprocess.Popen[str]) -> Launch:
        """How it ended; none of its ranks is left."""
        try:
            out, err = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            for child in [*launches.descendants(process.pid), process.pid]:
                os.kill(child, signal.SIGKILL)
            raise
        assert eventually(self.is_idle, 10)
        assert eventually(lambda: not list(self.temporary.glob("launch.*")), 10)
        return Launch(process.returncode, out, err, 0)

    def launch(self, mpi: str, *options: str, **more: Any) -> Launch:
        with self.start(mpi, *options, **more) as process:
            return self.end(process)

    def seen(self, rank: int) -> Any:
        return json.loads((self.out / f"{rank}.json").read_text())

    def is_idle(self) -> bool:
        """Whether every rank that has started is gone."""
        pids = [json.loads(path.read_text())["pid"] for path in self.out.glob("*.json")]
        return not any(Path(f"/proc/{pid}").exists() for pid in pids)

    def wait_for(self, *ranks: int, what: str = "ready") -> None:
        assert eventually(lambda: all((self.out / f"{r}.{what}").exists() for r in ranks), 30)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"))


@pytest.fixture(params=MPIS)
def mpi(request: pytest.FixtureRequest) -> str:
    require(request.param)
    return str(request.param)


def fails(done: Launch, *words: str) -> None:
    """It failed with a line of its own, last, that has these words."""
    assert done.code == 1, done
    assert done.last_line.startswith("launch: "), done
    assert all(word in done.last_line for word in words), done


# --- what the ranks are given ---------------------------------------------------------------------


def test_every_rank_has_its_numbers_and_the_arguments(place: Place, mpi: str) -> None:
    done = place.launch(mpi, *STRANGE, NPROC_PER_NODE=3, BACKEND="gloo", GLOO_TEST="a 'b'")
    assert done.code == 0, done
    assert sorted(done.out.splitlines()) == [f"rank {rank} is done" for rank in range(3)]
    for rank in range(3):
        seen = place.seen(rank)
        assert seen["argv"] == STRANGE
        assert seen["cwd"] == str(place.stub)
        numbers = {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 3}
        expected = {name: str(number) for name, number in numbers.items()}
        expected |= {"MASTER_ADDR": "127.0.0.1", "BACKEND": "gloo", "GLOO_TEST": "a 'b'"}
        assert seen["env"].items() >= expected.items()
        assert not Path(seen["env"]["SCAFFOLD_CONTROL"]).exists()
        assert seen["env"]["MASTER_PORT"] == place.seen(0)["env"]["MASTER_PORT"]


def test_another_mpirun_command_does_as_well(place: Place, mpi: str) -> None:
    options = ["--host", "localhost:2"] if "openmpi" in mpi else []
    command = [mpi, *options, "-np", "2", *place.command("--train.lr=1")]
    done = subprocess.run(
        command, env=place.env(mpi), cwd="/", capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        env = place.seen(rank)["env"]
        assert (env["RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"]) == (str(rank), "2", "127.0.0.1")
        assert env["MASTER_PORT"] == place.seen(0)["env"]["MASTER_PORT"]
    assert done.stderr.count("rank(s) here") == 1  # one rank speaks for its node
    assert eventually(place.is_idle, 10)


def test_the_preflight_runs_once_on_a_node(place: Place, mpi: str) -> None:
    done = place.launch(mpi, "--preflight", "--test.0=fail")
    assert done.code == 1
    assert done.err.splitlines()[-2] == "launch: sample 7 is broken"
    assert sorted(path.name for path in place.out.glob("*.json")) == ["0.json"]
    expected = {"NNODES": "1", "NODE_RANK": "0", "NPROC_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1"}
    assert place.seen(0)["env"].items() >= expected.items()


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGINT", "SIGUSR1"])
def test_a_signal_lets_all_ranks_save(place: Place, mpi: str, name: str) -> None:
    with place.start(mpi, "--test.0=wait", "--test.1=late") as process:
        place.wait_for(0)
        place.wait_for(1, what="json")
        os.killpg(process.pid, signal.Signals[name])  # as a terminal does
        done = place.end(process)
    assert done.code == 75, done
    assert done.last_line == "launch: stopped after saving a checkpoint, exit status 75"
    assert (place.out / "0.saved").exists()
    assert (place.out / "1.saved").exists()


def test_a_second_signal_ends_the_ranks_at_once(place: Place, mpi: str) -> None:
    with place.start(mpi, "--test.0=deaf", "--test.1=deaf") as process:
        place.wait_for(0, 1)
        for pause in (2.3, 0):
            process.send_signal(signal.SIGTERM)
            time.sleep(pause)
        done = place.end(process)
    fails(done, "ended at once, without saving")


@pytest.mark.parametrize("other", ["deaf", "fail"])
def test_a_rank_that_fails_ends_the_others_and_its_cause_is_last(
    place: Place, mpi: str, other: str
) -> None:
    begun = time.monotonic()
    done = place.launch(mpi, f"--test.0={other}", "--test.1=fail")
    assert done.code == 1
    assert done.err.splitlines()[-2:] == ["launch: sample 7 is broken", "look at it"]
    assert time.monotonic() - begun < 20


def test_a_rank_that_is_killed_is_named(place: Place, mpi: str) -> None:
    done = place.launch(mpi, "--test.0=deaf", "--test.1=die")
    fails(done, "rank 1 on ", "was killed by signal 9", "memory")


def test_a_killed_launcher_leaves_nothing_behind(place: Place, mpi: str) -> None:
    with place.start(mpi, "--test.0=wait", "--test.1=wait") as process:
        place.wait_for(0, 1)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
        assert eventually(place.is_idle, 20)
    assert (place.out / "0.saved").exists()
    assert (place.out / "1.saved").exists()
    assert eventually(lambda: not list(place.temporary.glob("launch.*")), 10)


# --- mistakes -------------------------------------------------------------------------------------


def test_mistakes_are_one_line(place: Place, tmp_path: Path) -> None:
    require("mpirun.openmpi")
    other = tmp_path / "mpirun"
    other.write_text("#!/bin/sh\necho mpirun 1.0 of someone else\n")
    other.chmod(0o755)
    hosts, users, tools = tmp_path / "hosts.txt", tmp_path / "users.txt", tmp_path / "tools"
    hosts.write_text("node1  # the only one\n")
    users.write_text("node1\nme@node2\n")
    tools.mkdir()  # all that the script needs, but Slurm's
    for tool in ("bash", "dirname", "mktemp", "rm", "mpirun.openmpi"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"MPIRUN": "no-such-mpirun"}, ["no no-such-mpirun here", "install", "module"]),
        ({"MPIRUN": other}, ["neither Open MPI's nor", "mpirun -np 2 bash launch/mpirun.sh"]),
        ({"OMPI_ALLOW_RUN_AS_ROOT": ""}, ["root", "OMPI_ALLOW_RUN_AS_ROOT=1"]),
        ({"NNODES": 0}, ["NNODES", "'0'"]),
        ({"NNODES": "1:2"}, ["1:2", "fixed number"]),
        ({"PASS_ENV": "A-B"}, ["PASS_ENV", "'A-B'"]),
        ({"NNODES": 2}, ["launch/hosts.txt names 0 host(s)"]),
        ({"NNODES": 2, "HOSTS_FILE": hosts}, ["hosts.txt names 1 host(s)"]),
        ({"NNODES": 2, "HOSTS_FILE": users}, ["users.txt", "me@node2", "~/.ssh/config"]),
        ({"NNODES": 2, "HOSTS_FILE": "/no/such"}, ["no /no/such"]),
        ({"SLURM_JOB_ID": 7, "PATH": tools}, ["there is no scontrol here"]),
    ]
    for given, words in cases:
        done = place.launch(given.pop("MPIRUN", "mpirun.openmpi"), **given)
        fails(done, *words)
        assert not list(place.out.iterdir())


def test_ranks_that_do_not_fill_their_nodes_in_order_are_refused(place: Place) -> None:
    for numbers, words in (
        (
            {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"},
            ["rank 1 of 4 is number 0"],
        ),
        (
            {"RANK": "2", "SIZE": "3", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"},
            ["as many ranks on each"],
        ),
        (
            {"RANK": "2", "SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"},
            ["MASTER_ADDR is not set"],
        ),
        ({"RANK": "2"}, ["does not say where its ranks run"]),
    ):
        env = {f"OMPI_COMM_WORLD_{name}": number for name, number in numbers.items()}
        fails(place.launch("none", **env), *words)


# --- training -------------------------------------------------------------------------------------

SMALL = [*OPTIONS, "--train.steps=15", "--checkpoint.every=0"]


@pytest.fixture(scope="module")
def alone(place: Place, ranks: Ranks) -> dict[int, float]:
    """The losses of one rank, without MPI; a step of the project takes a tenth of a second."""
    change(place.project, f"{STEP}        time.sleep(0.1)\n")
    done = ranks.run(place.project, 1, "--run.name=alone", *SMALL)
    assert done.ok, done
    return launches.losses(place.project / "runs" / "alone")


@pytest.mark.slow
def test_a_run_that_is_stopped_under_mpirun_has_the_losses_of_one_rank(
    place: Place, alone: dict[int, float], mpi: str
) -> None:
    run, options = place.project / "runs" / mpi, [*SMALL, f"--run.name={mpi}"]
    with place.start(mpi, *options, stub=False) as process:
        assert eventually(lambda: len(launches.losses(run)) >= 2, 60)
        os.killpg(process.pid, signal.SIGINT)
        done = place.end(process)
    assert done.code == 75, done
    (step,) = launches.checkpoints(run)
    assert step == max(launches.losses(run)) < 15
    assert not (run / "lock").exists()
    done = place.launch(mpi, *options, stub=False)
    assert done.code == 0, done
    assert "by 2 data-parallel rank(s)" in done.out
    assert launches.losses(run) == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
def test_the_backend_mpi_is_refused_where_torch_lacks_it(place: Place) -> None:
    require("mpirun.openmpi")
    done = place.launch("mpirun.openmpi", stub=False, BACKEND="mpi")
    fails(done, "BACKEND=mpi needs a PyTorch built with MPI")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hosts, Path]]:
    """Two hosts that one may log in to, and the configuration of ssh for that."""
    with Hosts(2) as hosts:
        yield hosts, serve_ssh(hosts, tmp_path_factory.mktemp("ssh"))


def over_ssh(config: Path) -> dict[str, str]:
    """The settings by which Open MPI and Hydra use this configuration of ssh."""
    return {
        "OMPI_MCA_plm_rsh_agent": f"ssh -F {config}",
        "HYDRA_LAUNCHER_EXTRA_ARGS": f"-F {config}",
    }


@pytest.mark.slow
def test_hosts_over_ssh_train_one_run(
    place: Place, alone: dict[int, float], mpi: str, hosts: tuple[Hosts, Path]
) -> None:
    """Started on the first of them, whose own name stands for 127.0.1.1 there, as on Debian."""
    lab, config = hosts
    lab.names(1, f"127.0.0.1 localhost\n127.0.1.1 node1\n{lab.address(2)} node2\n")
    (place.folder / "hosts.txt").write_text("node1\nnode2\n")
    run, options = place.project / "runs" / f"hosts {mpi}", [*SMALL, f"--run.name=hosts {mpi}"]
    env = place.env(mpi, NNODES=2, NPROC_PER_NODE=1, HOSTS_FILE=place.folder / "hosts.txt")
    done = lab.run(
        1, place.command(*options, stub=False), env=env | over_ssh(config), cwd="/", timeout=LIMIT
    )
    assert done.returncode == 0, done
    assert f"rank 0 is at {lab.address(1)}:" in done.stderr
    assert "by 2 data-parallel rank(s)" in done.stdout
    assert launches.losses(run) == pytest.approx(alone, rel=1e-5)
    assert eventually(lambda: not [p for p in lab.processes(2) if "sshd" not in p], 10)


def test_in_a_slurm_job_mpirun_runs_on_its_nodes(place: Place, mpi: str, slurm: Slurm) -> None:
    command = place.command("--train.lr=1")
    env = place.env(mpi, NPROC_PER_NODE=2, NNODES=7, GPUS_PER_NODE=9)
    done = slurm.run("salloc", "-N2", *command, env=env, timeout=LIMIT)
    assert done.returncode == 0, done
    assert "4 rank(s) on 2 node(s) (node1 node2)" in done.stderr
    for rank in range(4):
        numbers = {"WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
        numbers["MASTER_ADDR"] = slurm.hosts.address(1)
        assert place.seen(rank)["env"].items() >= numbers.items()
        assert place.seen(rank)["argv"] == ["--train.lr=1"]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with Slurm(2) as slurm:
        yield slurm


def test_a_host_that_mpirun_cannot_reach_is_named(
    place: Place, mpi: str, hosts: tuple[Hosts, Path]
) -> None:
    lab, config = hosts
    (place.folder / "hosts.txt").write_text("node1\nnowhere.invalid\n")
    env = place.env(mpi, NNODES=2, HOSTS_FILE=place.folder / "hosts.txt")
    done = lab.run(0, place.command(), env=env | over_ssh(config), cwd="/", timeout=LIMIT)
    assert done.returncode == 1, done
    assert done.stderr.splitlines()[-1].startswith("launch: "), done
    assert "nowhere" in done.stderr.splitlines()[-1], done
