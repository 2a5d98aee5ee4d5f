"""`launch/node.sh` on hosts with a network of their own: what it survives, and how it says why not."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import launches
from conftest import write_project
from faults import OPTIONS
from hosts import Hosts, require
from launches import eventually
from ranks import Ranks
from test_ssh import STEP, change

pytestmark = pytest.mark.slow

LIMIT = 120  # seconds; no launch here takes half as long
STEPS = 15
TRAIN = [*OPTIONS, f"--train.steps={STEPS}", "--checkpoint.every=2", "--run.timeout_minutes=0.15"]
PORT = 29500


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose steps take a tenth of a second; with a file `slow` a second."""
    folder = tmp_path_factory.mktemp("place") / "a place" / "demo"
    write_project(folder, model="mlp", precision="fp32")
    change(folder, f"{STEP}        time.sleep(1 if (PROJECT / 'slow').exists() else 0.1)\n")
    return folder


@pytest.fixture(scope="module")
def alone(project: Path, ranks: Ranks) -> dict[int, float]:
    """The losses of one rank."""
    done = ranks.run(project, 1, "--run.name=alone", *TRAIN)
    assert done.ok, done
    return launches.losses(project / "runs" / "alone")


@pytest.fixture(scope="module")
def three() -> Iterator[Hosts]:
    with Hosts(3) as hosts:
        yield hosts


@contextlib.contextmanager
def nodes(
    hosts: Hosts, project: Path, *options: str, on: Sequence[int] = (1, 2), **settings: Any
) -> Iterator[list[subprocess.Popen[str]]]:
    """`node.sh` on these hosts, started in this order."""
    given = {"NNODES": len(on), "NPROC_PER_NODE": 1, "MASTER_ADDR": hosts.address(on[0])} | settings
    processes = []
    try:
        for rank, i in enumerate(on):
            # A host that is killed leaves its temporary files.
            given |= {"NODE_RANK": rank, "TMPDIR": project.parent}
            env = {name: str(value) for name, value in given.items()}
            command = ["bash", project / "launch" / "node.sh", *options]
            processes.append(hosts.start(i, command, env=launches.environment(**env), cwd="/"))
        yield processes
    finally:
        for process in processes:
            process.kill()  # what it waits for ends with the host
            process.communicate()


def ends(processes: list[subprocess.Popen[str]], limit: float = LIMIT) -> list[tuple[int, str]]:
    """Each node's exit status and output."""
    end = time.monotonic() + limit
    outputs = [process.communicate(timeout=end - time.monotonic())[0] for process in processes]
    return [(process.returncode, out) for process, out in zip(processes, outputs, strict=True)]


def last(out: str) -> str:
    return out.splitlines()[-1]


def table(hosts: Hosts, i: int, own: str) -> str:
    """A hosts file in which host i's own name stands for another address."""
    rest = "".join(f"{hosts.address(j)} node{j}\n" for j in range(1, hosts.count + 1) if j != i)
    return f"127.0.0.1 localhost\n{own} node{i}\n{rest}"


def test_two_and_three_hosts_train_one_run_with_the_losses_of_one(
    project: Path, alone: dict[int, float], three: Hosts
) -> None:
    """Their own names stand for 127.0.1.1 there, as on Debian; then for Docker's interface."""
    run, options = project / "runs" / "hosts", ["--run.name=hosts", *TRAIN]
    for i in range(1, 4):
        three.names(i, table(three, i, "127.0.1.1"))
    with nodes(three, project, "--train.stop_at=5", *options) as processes:
        for code, out in ends(processes):
            assert code == 0, out
    assert launches.checkpoints(run)[-1] == 5
    for i in range(1, 4):
        three.names(i, table(three, i, three.dead_end(i)))
    with nodes(three, project, *options, on=(1, 2, 3)) as processes:
        zero, *others = ends(processes)
        assert [zero[0], *(code for code, _ in others)] == [0, 0, 0], (zero, others)
        assert "by 3 data-parallel rank(s)" in zero[1]
    assert launches.losses(run) == pytest.approx(alone, rel=1e-5)
    assert list(alone) == list(range(1, STEPS + 1))


def test_a_cut_cable_and_a_dead_host_are_told_in_time_and_cost_a_few_steps(
    project: Path, alone: dict[int, float], ranks: Ranks
) -> None:
    run, options = project / "runs" / "cut", ["--run.name=cut", *TRAIN]
    with Hosts(2) as hosts:
        with nodes(hosts, project, *options) as processes:
            assert eventually(lambda: 2 in launches.checkpoints(run), 60)
            hosts.cut(2)
            begun = time.monotonic()
            for code, out in ends(processes):
                assert code == 1, out
                assert re.match(
                    r"error: rank [01] lost the other ranks: .*Timed out", last(out)
                ), out
            assert time.monotonic() - begun < 60
        hosts.join(2)
        assert not hosts.processes(1) + hosts.processes(2)
        reached = launches.checkpoints(run)[-1]
        with nodes(hosts, project, *options) as processes:
            assert eventually(lambda: launches.checkpoints(run)[-1] > reached, 60)
            hosts.kill(2)
            begun = time.monotonic()
            code, out = ends(processes[:1])[0]
            assert code == 1, out
            assert last(out).startswith("error: rank 0 lost the other ranks: "), out
            assert time.monotonic() - begun < 60
    done = ranks.run(project, 1, *options)
    assert done.ok, done
    assert launches.losses(run) == pytest.approx(alone, rel=1e-5)


def test_an_elastic_run_goes_on_when_a_host_is_lost_and_when_another_comes(
    project: Path, ranks: Ranks
) -> None:
    steps = "--train.steps=60"
    assert ranks.run(project, 1, "--run.name=long", *TRAIN, steps).ok
    run, options = project / "runs" / "elastic", ["--run.name=elastic", *TRAIN, steps]
    conf = "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3"
    with (
        Hosts(3) as hosts,
        nodes(hosts, project, *options, NNODES="1:2", RDZV_CONF=conf) as processes,
    ):
        assert eventually(lambda: 4 in launches.checkpoints(run), 60)
        hosts.kill(2)
        reached = launches.checkpoints(run)[-1]
        assert eventually(lambda: launches.checkpoints(run)[-1] > reached + 2, 60)
        (project / "slow").touch()
        env = launches.environment(
            NNODES="1:2",
            NODE_RANK="1",
            MASTER_ADDR=hosts.address(1),
            RDZV_CONF=conf,
            NPROC_PER_NODE="1",
        )
        processes.append(
            hosts.start(3, ["bash", project / "launch" / "node.sh", *options], env=env)
        )
        log = run / "logs" / "rank_0.log"
        assert eventually(lambda: log.read_text().count("by 2 data-parallel") == 2, 60)
        (project / "slow").unlink()
        (code, out), _, (other, _) = ends(processes)
    assert (code, other) == (0, 0), out
    worlds = re.findall(r"by (\d) data-parallel rank\(s\)", out)
    assert worlds == ["2", "1", "2"], out
    assert launches.losses(run) == pytest.approx(launches.losses(run.parent / "long"), rel=1e-5)


# --- networks that do not work ------------------------------------------------------------------------


def test_what_is_wrong_with_node_0s_name_or_an_interface_is_one_line(
    project: Path, three: Hosts
) -> None:
    three.names(1, table(three, 1, "127.0.1.1"))
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"MASTER_ADDR": "nowhere.invalid"}, ["nowhere.invalid cannot be resolved"] * 2),
        (
            {"MASTER_ADDR": "node1"},
            ["node1 is 127.0.1.1 here, this machine itself", "refused: nothing listens there"],
        ),
        ({"MASTER_ADDR": "localhost"}, ["localhost is 127.0.0.1 here"] * 2),
        ({"NETWORK_INTERFACE": "ib0"}, ["NETWORK_INTERFACE=ib0 is not on this machine"] * 2),
        ({"MASTER_ADDR": "10.99.0.1"}, ["no way from here to MASTER_ADDR=10.99.0.1"] * 2),
    ]
    for settings, words in cases:
        begun = time.monotonic()
        with nodes(three, project, NODE_WAIT=2, **settings) as processes:
            for (code, out), word in zip(ends(processes), words, strict=True):
                assert code == 1, out
                assert last(out).startswith("launch: "), out
                assert word in last(out), out
        assert time.monotonic() - begun < 30


def test_a_firewall_is_told_in_time(project: Path) -> None:
    """One drops all that comes to node 0's port; another one leaves that alone, and drops the rest."""
    require("nft")
    every, others = ["--run.name=filtered", *TRAIN], ["--run.name=closed", *TRAIN]
    others += ["--run.timeout_minutes=0.1"]
    with Hosts(4) as hosts:
        hosts.filter(1, f"iifname eth0 tcp dport {PORT}")
        for i in (3, 4):
            hosts.filter(i, "iifname eth0 tcp dport 32768-60999 tcp flags & (syn | ack) == syn")
        begun = time.monotonic()
        with (
            nodes(hosts, project, *every, NODE_WAIT=3) as filtered,
            nodes(hosts, project, *others, on=(3, 4)) as closed,
        ):
            (zero, one), met = ends(filtered), ends(closed)
        assert time.monotonic() - begun < 100
    assert one[0] == 1
    assert "gave up on node 0" in last(one[1]), one[1]
    assert "no answer: a firewall" in last(one[1]), one[1]
    assert zero[0] == 1
    assert "have all 2 nodes started" in last(zero[1]), zero[1]
    for code, out in met:
        assert code == 1, out
        assert re.match(
            r"error: rank [01] failed: .*connectFullMesh.*are all ports between the nodes open",
            last(out),
        ), out
