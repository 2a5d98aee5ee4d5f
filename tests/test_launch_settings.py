"""What a launch takes from site.env, from a cluster's controller and from its own options."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from hosts import Hosts, require
from test_launch_scripts import (
    agent,
    environment,
    executable,
    fails,
    free_port,
    option,
    project,
    run,
    started,
)

SHOW = """
import os, pathlib, sys
names = sys.argv[1].split(",")
text = "".join(f"{name}={os.environ.get(name)}\\n" for name in names)
pathlib.Path(os.environ["OUT"], "shown").write_text(f"{sys.argv[2:]}\\n{text}")
"""


def site(project: Path, text: str, name: str = "") -> None:
    """Appends to the site's file, as its owner does."""
    path = project / "launch" / f"site{name}.env"
    path.write_text(f"{path.read_text() if path.exists() else ''}\n{text}\n")


def shown(environment: dict[str, str]) -> str:
    return Path(environment["OUT"], "shown").read_text()


# --- site.env -------------------------------------------------------------------------------------


def test_an_activated_environment_is_used_though_its_script_is_sloppy(
    project: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    executable(tmp_path / "venv/bin/python", f'STUB_PYTHON=site exec "{sys.executable}" "$@"')
    # Unset variables and failing commands are usual in what modules and conda run.
    site(
        project,
        f'activate() {{ [ -z "$NO_SUCH_VARIABLE" ]; false; export VIRTUAL_ENV="{tmp_path}/venv"; }}',
    )
    done = run(project / "launch" / "local.sh", environment)
    assert done.returncode == 0, done.stderr
    assert agent(environment)["python"] == "site"


def test_an_environment_that_cannot_be_activated_is_one_line(
    project: Path, environment: dict[str, str]
) -> None:
    site(project, "activate() { return 1; }")
    done = run(project / "launch" / "local.sh", environment)
    fails(done, "activate() of launch/site.env failed")
    assert done.stderr.count("\n") == 1


def test_sites_lie_side_by_side(project: Path, environment: dict[str, str]) -> None:
    site(project, ': "${NPROC_PER_NODE:=5}"')
    site(project, ': "${NPROC_PER_NODE:=7}"', ".far-away_2")
    script = project / "launch" / "local.sh"
    for shell, options, count in (
        ({}, [], "5"),
        ({}, ["--site", "far-away_2"], "7"),
        ({}, ["--train.lr=1", "--site", "far-away_2"], "7"),
        ({}, ["--site=far-away_2"], "7"),
        ({"SITE": "far-away_2"}, [], "7"),
        ({"SITE": "far-away_2", "NPROC_PER_NODE": "1"}, [], "1"),  # the environment wins
    ):
        done = run(script, environment | shell, *options)
        assert done.returncode == 0, done.stderr
        assert option(environment, "--nproc-per-node") == count
        words = list(agent(environment)["argv"])  # type: ignore[call-overload]
        rest = [word for word in options if word.startswith("--train")]
        assert words[words.index("--") + 1 :] == ["train.py", *rest]
    fails(run(script, environment, "--site", "mars"), "no launch/site.mars.env", "copy")
    fails(run(script, environment, "--site", "../../x"), "SITE must be a name")
    fails(run(script, environment, "--site"), "--site needs a name")


def test_a_project_without_site_env_trains(project: Path, environment: dict[str, str]) -> None:
    (project / "launch" / "site.env").unlink()
    assert run(project / "launch" / "local.sh", environment).returncode == 0


def test_everything_python_runs_in_the_container(
    project: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    container = executable(
        tmp_path / "c o" / "run",
        f'echo "$2" >>"{tmp_path}/calls"; [ "$1" = "an image" ] || exit 9\n'
        f'shift; STUB_PYTHON=container exec "$@"',
    )
    site(project, f'CONTAINER=("{container}" "an image")')
    (project / "prepare.py").touch()
    done = run(project / "launch" / "local.sh", environment)
    assert done.returncode == 0, done.stderr
    assert agent(environment)["python"] == "container"
    assert (tmp_path / "calls").read_text().split() == [
        "python3"
    ] * 3  # a look, prepare.py, torchrun
    site(project, "CONTAINER=(no-such-runtime exec)")
    fails(run(project / "launch" / "local.sh", environment), "no-such-runtime cannot be run")


def test_a_container_that_does_not_see_the_launchs_folder_is_one_line(
    project: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    require("unshare")
    inside = 'mount -t tmpfs tmpfs "$TMPDIR" && exec "$@"'  # a container with a /tmp of its own
    container = executable(
        tmp_path / "run", f"exec unshare --map-root-user --mount bash -c '{inside}' - \"$@\""
    )
    site(project, f'CONTAINER=("{container}")')
    done = run(project / "launch" / "local.sh", environment)
    fails(done, "the container does not see", environment["TMPDIR"], "bind")
    assert done.stderr.count("\n") == 1


def test_site_env_does_not_see_the_options_and_cannot_lose_them(
    project: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "activate").write_text('echo "$#" >"$OUT/count"; set -- lost\n')
    site(project, f'. "{tmp_path}/activate"')
    done = run(project / "launch" / "local.sh", environment, "--train.lr", "1 e")
    assert done.returncode == 0, done.stderr
    assert Path(environment["OUT"], "count").read_text() == "0\n"
    assert list(agent(environment)["argv"])[-3:] == ["train.py", "--train.lr", "1 e"]  # type: ignore[call-overload]


def test_a_site_env_that_bash_cannot_read_ends_the_launch(
    project: Path, environment: dict[str, str]
) -> None:
    site(project, 'X="')
    fails(run(project / "launch" / "local.sh", environment), "launch/site.env is no valid Bash")


def test_runs_go_to_the_disk_for_them_each_projects_to_a_folder_of_its_own(
    project: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    disk, script = tmp_path / "big disk", project / "launch" / "local.sh"
    env = environment | {"RUNS_DISK": str(disk)}
    for _ in range(2):
        assert run(script, env).returncode == 0
        assert (project / "runs").resolve().parent == disk
    twin = tmp_path / "another" / project.name
    shutil.copytree(project, twin, ignore=shutil.ignore_patterns("runs"))
    assert run(twin / "launch" / "local.sh", env).returncode == 0
    assert (twin / "runs").resolve() != (project / "runs").resolve()
    shutil.rmtree(disk)
    fails(run(script, environment), "runs is a link to", str(disk), "gone")
    (project / "runs").unlink()
    (project / "runs").mkdir()  # runs that are here already stay
    assert run(script, env).returncode == 0
    assert not (project / "runs").is_symlink()
    (project / "runs").rmdir()
    fails(run(script, env | {"RUNS_DISK": "/proc/x"}), "RUNS_DISK=/proc/x cannot be written")
    # The variable of that name is the cluster's, and its disk is often emptied.
    assert run(script, environment | {"SCRATCH": str(disk)}).returncode == 0
    assert not (project / "runs").exists()


def test_offline_reaches_every_library(project: Path, environment: dict[str, str]) -> None:
    names = "HF_HUB_OFFLINE,HF_DATASETS_OFFLINE,TRANSFORMERS_OFFLINE,WANDB_MODE"
    (project / "prepare.py").write_text(SHOW)
    script = project / "launch" / "local.sh"
    assert run(script, environment | {"OFFLINE": "1"}, names).returncode == 0
    assert shown(environment).splitlines()[1:] == [
        "HF_HUB_OFFLINE=1",
        "HF_DATASETS_OFFLINE=1",
        "TRANSFORMERS_OFFLINE=1",
        "WANDB_MODE=offline",
    ]
    assert run(script, environment, names).returncode == 0
    assert "HF_HUB_OFFLINE=None" in shown(environment)


# --- what a controller or another launch left in the environment ----------------------------------


@pytest.fixture
def node(environment: dict[str, str]) -> dict[str, str]:
    """The environment of one of two nodes, which are on this machine."""
    return environment | {"BACKEND": "gloo", "SCAFFOLD_ALLOW_LOOPBACK": "1"}


def test_the_numbers_of_pods_are_not_those_of_ranks(
    project: Path, node: dict[str, str], environment: dict[str, str]
) -> None:
    """Kubeflow's RANK and WORLD_SIZE count pods; what prepare.py takes for its own must be gone."""
    (project / "prepare.py").write_text(SHOW)
    port = free_port()
    kubeflow = {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "3"}
    kubeflow |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port, "PET_MAX_RESTARTS": "9"}
    pods = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    names = "RANK,WORLD_SIZE,LOCAL_RANK,LOCAL_WORLD_SIZE,PET_NNODES,PET_MAX_RESTARTS"
    done = run(project / "launch" / "node.sh", node | kubeflow | pods, names)
    assert done.returncode == 0, done.stderr
    assert [line.endswith("=None") for line in shown(environment).splitlines()[1:]] == [True] * 6
    asked = {n: option(environment, f"--{n}") for n in ("nnodes", "node-rank", "nproc-per-node")}
    assert asked == {"nnodes": "1", "node-rank": "0", "nproc-per-node": "3"}
    assert option(environment, "--master-port") == port
    assert option(environment, "--max-restarts") == "0"


def test_a_pod_of_a_job_is_the_node_of_its_index(
    project: Path, node: dict[str, str], environment: dict[str, str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pod = {"NNODES": "2", "JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "127.0.0.1"}
        pod |= {"MASTER_PORT": str(server.getsockname()[1]), "PET_NPROC_PER_NODE": "auto"}
        done = run(project / "launch" / "node.sh", node | pod)
    assert done.returncode == 0, done.stderr
    assert option(environment, "--node-rank") == "1"


def test_in_kubernetes_a_name_may_appear_late_but_not_for_ever(
    project: Path, node: dict[str, str]
) -> None:
    pod = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "no-such-pod.invalid"}
    inside = pod | {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "NODE_WAIT": "2"}
    done = run(project / "launch" / "node.sh", node | inside, limit=30)
    fails(done, "no-such-pod.invalid cannot be resolved")


# --- elastic runs ---------------------------------------------------------------------------------


def test_a_range_of_nodes_is_an_elastic_run(
    project: Path, node: dict[str, str], environment: dict[str, str]
) -> None:
    topology = project / "launch" / "topology.env"
    topology.write_text(topology.read_text().replace("NNODES:=1}", "NNODES:=1:3}"))
    elastic = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    elastic |= {"MASTER_PORT": free_port(), "RDZV_CONF": "last_call_timeout=2"}
    done = run(project / "launch" / "node.sh", node | elastic)
    assert done.returncode == 0, done.stderr
    asked = agent(environment)
    names = [str(word).partition("=")[0] for word in asked["argv"]]
    assert option(environment, "--nnodes") == "1:3"
    assert option(environment, "--rdzv-backend") == "c10d"
    assert option(environment, "--rdzv-conf") == "is_host=1,last_call_timeout=2"
    assert option(environment, "--max-restarts") == "3"
    assert asked["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    # One style of rendezvous, never both.
    assert not {"--node-rank", "--master-addr", "--master-port"} & {*names}


def test_ranks_that_may_restart_meet_where_they_find_each_other_again(
    project: Path, node: dict[str, str], environment: dict[str, str]
) -> None:
    """A static rendezvous would lead them to where their peers were before."""
    two = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MAX_RESTARTS": "2"}
    done = run(project / "launch" / "node.sh", node | two | {"MASTER_PORT": free_port()})
    assert done.returncode == 0, done.stderr
    asked = {n: option(environment, f"--{n}") for n in ("nnodes", "rdzv-backend", "max-restarts")}
    assert asked == {"nnodes": "2", "rdzv-backend": "c10d", "max-restarts": "2"}
    assert agent(environment)["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_an_interface_without_an_address_gives_none_to_an_elastic_run(
    project: Path, node: dict[str, str], environment: dict[str, str]
) -> None:
    elastic = {"NNODES": "1:2", "NODE_RANK": "0", "MASTER_ADDR": "10.77.0.1"}
    with Hosts(1) as hosts:
        assert hosts.run(1, ["ip", "link", "add", "ib0", "type", "bridge"]).returncode == 0
        for interface, address in (("eth0", "10.77.0.1"), ("ib0", None)):
            env = node | elastic | {"NETWORK_INTERFACE": interface}
            done = hosts.run(1, ["bash", project / "launch" / "node.sh"], env=env)
            assert done.returncode == 0, done.stderr
            assert option(environment, "--local-addr") == address
            assert agent(environment)["NCCL_SOCKET_IFNAME"] == interface
            assert "is no address of this machine" not in done.stderr
        env = node | elastic | {"MASTER_ADDR": "10.77.0.254"}  # of another machine
        done = hosts.run(1, ["bash", project / "launch" / "node.sh"], env=env)
        assert "MASTER_ADDR=10.77.0.254 (10.77.0.254) is no address of this machine" in done.stderr


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ("3:2", ["the most of NNODES", "at least 3", "'2'"]),
        ("0:2", ["the least of NNODES", "'0'"]),
        ("2:", ["the most of NNODES", "''"]),
        ("1:2:3", ["the most of NNODES", "'2:3'"]),
        ("$(touch x)", ["NNODES", "whole number"]),
    ],
)
def test_a_bad_range_of_nodes_is_one_line(
    project: Path, node: dict[str, str], nodes: str, words: list[str]
) -> None:
    env = node | {"NNODES": nodes, "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    done = run(project / "launch" / "node.sh", env)
    fails(done, *words)
    assert done.stderr.count("\n") == 1


def test_fewer_gpus_than_the_other_nodes_have_is_an_error(
    project: Path, node: dict[str, str], environment: dict[str, str]
) -> None:
    one = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "BACKEND": "auto"}
    one |= {"FAKE_GPUS": "1", "MASTER_PORT": free_port()}
    script = project / "launch" / "node.sh"
    fails(run(script, node | one), "torch sees 1 GPU(s)", "not 2", "GPUS_PER_NODE=1")
    assert run(script, node | one | {"NPROC_PER_NODE": "1"}).returncode == 0  # as told
    alone = node | one | {"NNODES": "1", "GPUS_PER_NODE": "2", "MASTER_PORT": free_port()}
    fails(run(script, alone | {"NEEDS_GPUS": "2"}), "torch sees 1 GPU(s)", "not 2")  # as in a job
    none = alone | {"FAKE_GPUS": "0"}
    for asked in ({"NEEDS_GPUS": "2"}, {"BACKEND": "nccl"}):  # in a job, and as a pod has it
        fails(run(script, none | asked), "sees no GPU", "BACKEND=gloo")
    assert run(script, none).returncode == 0


# --- the control folder ---------------------------------------------------------------------------


def test_a_launcher_on_the_node_reads_what_came_of_it(
    project: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    control = tmp_path / "control"
    env = environment | {"STUB": "wait", "SCAFFOLD_CONTROL": str(control), "PREEMPTED_STATUS": "0"}
    with started(project / "launch" / "local.sh", env) as launch:
        while not Path(environment["OUT"], "agent.json").exists():
            assert launch.poll() is None
        launch.terminate()
        launch.communicate(timeout=10)
    assert launch.returncode == 0
    assert (control / "preempted").exists()


def test_under_a_scheduler_a_second_signal_takes_nothing_from_the_time_to_save(
    project: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """Slurm sends TERM once more and then waits: it ends the job itself when that is over."""
    env = environment | {"STUB": "deaf", "SCAFFOLD_CONTROL": str(tmp_path / "control")}
    with started(project / "launch" / "local.sh", env | {"PREEMPTED_STATUS": "0"}) as launch:
        while not Path(environment["OUT"], "workers").exists():
            assert launch.poll() is None
        launch.terminate()
        time.sleep(2.5)
        launch.terminate()
        time.sleep(0.5)
        assert launch.poll() is None
        launch.send_signal(signal.SIGQUIT)
        _, errors = launch.communicate(timeout=10)
    assert errors.splitlines()[-1].startswith("launch: ended at once, without saving")


# --- the preflight --------------------------------------------------------------------------------


@pytest.mark.parametrize(("shell", "options"), [({}, ["--preflight"]), ({"PREFLIGHT": "1"}, [])])
def test_the_preflight_runs_once_a_node_and_no_rank_starts(
    project: Path,
    node: dict[str, str],
    environment: dict[str, str],
    shell: dict[str, str],
    options: list[str],
) -> None:
    (project / "launch" / "preflight.py").write_text(SHOW + "\nsys.exit(3)\n")
    names = "NNODES,NODE_RANK,NPROC_PER_NODE,MASTER_ADDR,MASTER_PORT,BACKEND"
    two = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "no-such-host.invalid"} | shell
    done = run(project / "launch" / "node.sh", node | two, names, *options, "--json")
    assert done.returncode == 3, done.stderr
    assert shown(environment).splitlines() == [
        "['--json']",
        "NNODES=2",
        "NODE_RANK=1",
        f"NPROC_PER_NODE={min(2, len(os.sched_getaffinity(0)))}",
        "MASTER_ADDR=no-such-host.invalid",
        "MASTER_PORT=29500",
        "BACKEND=gloo",
    ]
    done = run(project / "launch" / "local.sh", node | shell, names, *options)
    assert done.returncode == 3
    assert "NNODES=1\n" in shown(environment)
    assert not Path(environment["OUT"], "agent.json").exists()
