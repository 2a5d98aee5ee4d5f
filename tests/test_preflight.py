"""The preflight of generated projects: every fault is injected for real and must be named.

Hosts are namespaces with their own network; what they differ in is done to them by the kernel, by
`sitecustomize`, or by another copy of the project. Most faults end before a rank has anything to
do; faults that go well together share a launch.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conftest import write_project
from hosts import Hosts, require, unavailable
from launches import environment, eventually

pytestmark = pytest.mark.slow

MINUTE = 60.0
PORT = 29500  # node.sh's own; each test has networks of its own
RANK = "import sys\nif any('preflight_rank' in word for word in sys.orig_argv):\n    "


@dataclass(frozen=True)
class Said:
    """What a preflight came to on one node."""

    code: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found

    def named(self, check: str, status: str = "fail") -> str:
        """All that was said of a check with this status, a line each: where, and what."""
        return "\n".join(
            f"{found['where']}: {found['message']}"
            for found in self.report["checks"]
            if found["name"] == check and found["status"] == status
        )

    def __repr__(self) -> str:  # pytest's would be cut
        return f"exit {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


class Lab:
    """Hosts that fly one project's preflight: `lab(1, 2)`."""

    def __init__(self, hosts: Hosts, project: Path) -> None:
        self.hosts, self.project = hosts, project
        self.options = ["--json"]
        self.shell: dict[str, str] = {}
        self.shells: dict[int, dict[str, str]] = {}  # what one host has otherwise
        self.argv: dict[int, list[Any]] = {}

    def start(self, i: int) -> subprocess.Popen[str]:
        own = {"NNODES": str(self.hosts.count), "NODE_RANK": str(i - 1), "MASTER_ADDR": "node1"}
        own |= {"NPROC_PER_NODE": "1"} | self.shell | self.shells.get(i, {})
        argv = self.argv.get(i, ["bash", self.project / "launch" / "node.sh", "--preflight"])
        return self.hosts.start(
            i, [*argv, *self.options], env=environment(**own), stderr=subprocess.PIPE
        )

    def end(self, running: dict[int, subprocess.Popen[str]]) -> dict[int, Said]:
        said = {}
        for i, process in running.items():
            out, err = process.communicate(timeout=90)
            said[i] = Said(process.returncode, out, err)
            assert "Traceback" not in out + err, said[i]
        return said

    def __call__(self, *hosts: int) -> dict[int, Said]:
        began = time.monotonic()
        said = self.end({i: self.start(i) for i in hosts})
        assert time.monotonic() - began < MINUTE
        return said


def python_path(folder: Path, code: str) -> dict[str, str]:
    """The environment of a host where every Python runs `code` first."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("projects")


@pytest.fixture(scope="module")
def project(projects: Path) -> Path:
    """An mlp under ddp."""
    return write_project(projects / "demo", model="mlp", precision="fp32", nodes=2)


@pytest.fixture
def lab(project: Path) -> Iterator[Lab]:
    """Two hosts with that project."""
    with Hosts(2) as hosts:
        yield Lab(hosts, project)


# --- all is well ----------------------------------------------------------------------------------


def test_a_healthy_pair_passes_and_the_table_names_its_hosts_and_ranks(lab: Lab) -> None:
    lab.options = []
    lab.shell = {"NPROC_PER_NODE": "2", "NETWORK_INTERFACE": "eth0", "NCCL_SOCKET_IFNAME": "en,eth"}
    running = {2: lab.start(2)}
    assert eventually(lambda: any("preflight.py" in line for line in lab.hosts.processes(2)), 30)
    time.sleep(1)  # node 1 looks for node 0, which is not started
    said = lab.end({1: lab.start(1), **running})
    assert [node.code for node in said.values()] == [0, 0], said[1]
    assert "fail" not in said[1].out
    assert "preflight: all is well" in said[1].out
    rows = [line.split() for line in said[1].out.splitlines()]
    assert ["0", "node1", "10.77.0.1"] in [row[:3] for row in rows]
    assert ["1", "node2", "10.77.0.2"] in [row[:3] for row in rows]
    ranks = [["0", "node1"], ["1", "node1"], ["2", "node2"], ["3", "node2"]]
    assert [row[:2] for row in rows if row[2:3] == ["cpu"]] == ranks
    assert [row[:3] for row in rows if row[:1] == ["nodes"]] == [["nodes", "0,", "1"]]
    assert said[2].out == "", "node 0 speaks for all"
    assert not (lab.project / "runs").exists(), "it leaves no folder behind"
    assert lab.hosts.processes(1) == lab.hosts.processes(2) == []


def test_json_is_one_object_and_what_is_slow_is_named_in_it(project: Path, tmp_path: Path) -> None:
    slow = (
        "import time, torch; mm = torch.mm; torch.mm = lambda a, b: (time.sleep(0.1), mm(a, b))[1]"
    )
    slow += "\n    import torch.distributed as dist; send = dist.batch_isend_irecv"
    slow += "\n    dist.batch_isend_irecv = lambda both: (time.sleep(0.2), send(both))[1]"
    with Hosts(3) as hosts:
        lab = Lab(hosts, project)
        for i in (1, 2, 3):  # node 2 knows node 0 by another address than node 0 itself
            hosts._ip(i, f"addr add fd77::{i}/64 dev eth0 nodad")
        # A queue of one: whoever connects is let in, or the next one knocks in vain.
        assert hosts.run(2, ["sysctl", "-w", "net.core.somaxconn=0"]).returncode == 0
        hosts.names(3, "127.0.0.1 localhost\nfd77::1 node1\n10.77.0.3 node3\n")
        lab.shells[3] = python_path(tmp_path, RANK + slow)
        running = {1: lab.start(1)}
        assert eventually(lambda: listens(hosts, PORT), 30)
        call = f"import socket, sys, time; node = socket.create_connection(('node1', {PORT}))"
        call += "; node.send(sys.argv[1].encode()); time.sleep(60)"
        words = ("", "", "{}\n", '["node"]\n')  # some say nothing, some nonsense
        callers = [hosts.start(1, [sys.executable, "-c", call, word]) for word in words]
        said = lab.end(running | {i: lab.start(i) for i in (2, 3)})
        for process in callers:
            hosts.signal(process, signal.SIGKILL)
            process.communicate(timeout=10)
    report = said[1].report
    assert report["ok"], said[1]
    assert set(report) == {"ok", "checks", "nodes", "ranks", "bandwidth"}
    assert [node["host"] for node in report["nodes"]] == ["node1", "node2", "node3"]
    assert [rank["host"] for rank in report["ranks"]] == ["node1", "node2", "node3"]
    links = ["all ranks", "nodes 0, 1", "nodes 0, 2", "nodes 1, 2"]
    assert [link["between"] for link in report["bandwidth"]] == links
    assert all(link["gb_per_s"] > 0 for link in report["bandwidth"])
    for check in report["checks"]:
        assert set(check) == {"name", "status", "where", "message"}
    assert "rank 2 (node3)" in said[1].named("speed", "warn")
    slow_links = said[1].named("bandwidth", "warn")
    assert "nodes 0, 2" in slow_links
    assert "nodes 1, 2" in slow_links
    assert [node.code for node in said.values()] == [0, 0, 0]


def listens(hosts: Hosts, port: int) -> bool:
    """Whether something on host 1 listens on a port, over IPv4 or both."""
    tables = hosts.run(1, ["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout
    return any(f":{port:04X} {'0' * n}:0000 0A" in tables for n in (8, 32))


def test_one_machine_needs_no_other_and_no_reader(project: Path) -> None:
    shell = environment(NPROC_PER_NODE="1")
    command = ["bash", str(project / "launch" / "local.sh"), "--preflight"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command, env=shell, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=90
    )
    os.close(writer)
    assert done.returncode == 0, done.stderr
    assert "Broken" not in done.stderr


# --- the way to node 0 ----------------------------------------------------------------------------


def test_a_name_that_does_not_resolve_is_named(lab: Lab) -> None:
    lab.shell = {"MASTER_ADDR": "nowhere", "NODE_WAIT": "1"}
    said = lab(2)[2]
    assert said.code == 1
    assert "MASTER_ADDR=nowhere cannot be resolved" in said.named("name")


def test_a_name_that_is_a_loopback_address_here_is_named(lab: Lab) -> None:
    lab.hosts.names(2, "127.0.0.1 localhost\n127.0.1.1 node1\n")
    said = lab(2)[2]
    assert said.code == 1
    assert "MASTER_ADDR=node1 is 127.0.1.1 here, this machine itself" in said.named("name")


def test_a_node_0_that_is_not_started_is_named(lab: Lab) -> None:
    lab.shell = {"NODE_WAIT": "1"}
    said = lab(2)[2]
    assert said.code == 1
    assert "refused" in said.named("network")
    assert "is it started" in said.named("network")


def test_a_firewall_on_the_port_is_told_from_a_machine_that_is_down(lab: Lab) -> None:
    lab.shell = {"NODE_WAIT": "1"}
    lab.hosts.filter(1, f"tcp dport {PORT}")
    filtered = lab(2)[2]
    assert filtered.code == 1
    assert f"a firewall drops what goes to port {PORT}" in filtered.named("network")
    lab.hosts.filter(1, "ip saddr 10.77.0.2")
    swallowed = lab(2)[2]
    assert "no answer, nor on another port" in swallowed.named("network")
    lab.hosts.cut(1)
    down = lab(2)[2]
    assert down.code == 1
    assert "firewall drops" not in down.named("network")


def test_a_machine_without_a_way_to_node_0_is_named(lab: Lab) -> None:
    lab.shell = {"MASTER_ADDR": "192.0.2.1"}
    said = lab(2)[2]
    assert said.code == 1
    assert "no way from here to 192.0.2.1" in said.named("network")


def test_the_owner_of_a_taken_port_is_named_and_no_preflight_is_recognised(lab: Lab) -> None:
    server = lab.hosts.start(1, [sys.executable, "-m", "http.server", str(PORT)])
    assert eventually(lambda: listens(lab.hosts, PORT))
    said = lab(1, 2)
    assert said[1].code == said[2].code == 1
    assert f"port {PORT} here is taken by process" in said[1].named("port")
    assert f"-m http.server {PORT}" in said[1].named("port")
    assert "is no preflight" in said[2].named("port")
    lab.hosts.signal(server, signal.SIGKILL)
    server.communicate(timeout=10)


@pytest.fixture(scope="module")
def misnumbered(project: Path) -> Iterator[dict[int, Said]]:
    """Three nodes, two of them with one number."""
    with Hosts(3) as hosts:
        lab = Lab(hosts, project)
        lab.shell = {"NODE_WAIT": "5"}
        lab.shells[3] = {"NODE_RANK": "1"}
        yield lab(1, 2, 3)


def test_two_nodes_with_one_number_are_named(misnumbered: dict[int, Said]) -> None:
    named = misnumbered[1].named("nodes")
    assert "have NODE_RANK=1" in named
    assert "node2" in named
    assert "node3" in named
    assert [said.code for said in misnumbered.values()] == [1, 1, 1]
    refused = [said.named("nodes") for said in misnumbered.values() if said.out][1:]
    assert len(refused) == 1, "the one that is refused says so too"
    assert "have NODE_RANK=1" in refused[0]


def test_a_missing_node_is_named(misnumbered: dict[int, Said], lab: Lab) -> None:
    assert "node 2: did not come" in misnumbered[1].named("nodes")
    lab.shells = {1: {"NODE_WAIT": "8", "RDZV_ID": "one"}, 2: {"RDZV_ID": "other"}}
    said = lab(1, 2)
    assert [node.code for node in said.values()] == [1, 1]
    assert "node 1: did not come within 8 s" in said[1].named("nodes")
    for node in said.values():
        assert "node2 is of another launch" in node.named("nodes")


def test_an_elastic_run_may_lack_a_node(lab: Lab) -> None:
    lab.shell = {"NODE_WAIT": "1", "NNODES": "1:2"}
    said = lab(1)[1]
    assert said.code == 0, said
    assert "node 1: did not come" in said.named("nodes", "warn")
    assert "not measured" in said.named("all-reduce", "warn")


def test_another_number_of_nodes_is_named(lab: Lab) -> None:
    lab.shell, lab.shells[2] = {"NODE_WAIT": "5"}, {"NNODES": "3"}
    said = lab(1, 2)
    assert "NNODES is 2 on node 0 and 3 on node2" in said[1].named("nodes")
    assert said[2].named("nodes")


def test_node_0_on_a_machine_that_is_not_master_addr_is_named(lab: Lab) -> None:
    lab.shell = {"NODE_WAIT": "1", "NODE_RANK": "0"}
    said = lab(2)[2]
    assert said.code == 1
    assert "MASTER_ADDR=node1 is 10.77.0.1, and this machine is 10.77.0.2" in said.named(
        "name", "warn"
    )


# --- between the nodes ----------------------------------------------------------------------------


def test_an_interface_that_is_not_there_is_named(lab: Lab) -> None:
    lab.shells = {1: {"NCCL_SOCKET_IFNAME": "ib"}, 2: {"NETWORK_INTERFACE": "ib7"}}
    said = lab(1, 2)
    assert [node.code for node in said.values()] == [1, 1]
    named = said[1].named("interface")
    assert "node 0 (node1): NCCL_SOCKET_IFNAME=ib is not on this machine" in named
    assert "node 1 (node2): NETWORK_INTERFACE=ib7 is not on this machine" in named
    assert "eth0=10.77.0.2" in named


def test_an_interface_that_does_not_lead_to_node_0_is_named(lab: Lab) -> None:
    for words in ("link add docker0 type bridge", "addr add 172.17.0.1/16 dev docker0"):
        assert lab.hosts.run(2, ["ip", *words.split()]).returncode == 0
    assert lab.hosts.run(2, ["ip", "link", "set", "docker0", "up"]).returncode == 0
    lab.shells[2] = {"NETWORK_INTERFACE": "docker0"}
    said = lab(1, 2)
    assert [node.code for node in said.values()] == [1, 1]
    named = said[1].named("interface")
    assert "docker0 (172.17.0.1) does not lead to node 0" in named


def test_a_firewall_on_all_other_ports_is_named_with_the_pair_and_its_direction(lab: Lab) -> None:
    lab.hosts.filter(1, "tcp dport 32768-60999 tcp flags & (syn | ack) == syn")
    said = lab(1, 2)
    assert [node.code for node in said.values()] == [1, 1]
    named = said[1].named("firewall")
    assert named.startswith("node 1 (node2): no connection to node 0 (node1)")
    assert "not MASTER_PORT alone" in named
    assert len(named.splitlines()) == 1, "the other direction is open"


def start_measuring(lab: Lab, folder: Path) -> dict[int, subprocess.Popen[str]]:
    """Two nodes in the middle of their measurements."""
    wait = "import time, torch; from pathlib import Path; mm = torch.mm\n    "
    wait += f"torch.mm = lambda a, b: (Path({str(folder / 'there')!r}).touch(), time.sleep(0.1), mm(a, b))[2]"
    lab.shell = python_path(folder, RANK + wait)
    running = {i: lab.start(i) for i in (1, 2)}
    assert eventually((folder / "there").exists, 60)
    return running


@pytest.mark.parametrize("how", ["cut", "swallowed"])
def test_a_network_that_goes_in_the_middle_is_named_within_a_minute(
    lab: Lab, tmp_path: Path, how: str
) -> None:
    began = time.monotonic()
    running = start_measuring(lab, tmp_path)
    if how == "cut":
        lab.hosts.cut(2)
    else:
        lab.hosts.filter(2, "ip saddr 10.77.0.1")
    said = lab.end(running)
    assert time.monotonic() - began < MINUTE
    assert [node.code for node in said.values()] == [1, 1]
    assert "node 1 (node2): no answer about all-reduce" in said[1].named("network")
    assert "lost node 0" in said[2].named("network")
    assert eventually(lambda: lab.hosts.processes(1) == lab.hosts.processes(2) == [], 10)


def test_a_wrong_sum_is_named_with_its_rank(lab: Lab, tmp_path: Path) -> None:
    wrong = "import torch.distributed as dist; right = dist.all_reduce\n    "
    wrong += "dist.all_reduce = lambda t, *a, **k: (right(t, *a, **k), t[9:12].add_(1))[0]"
    env = f"\n    import os; print(os.environ['NCCL_SOCKET_IFNAME'], file=open({str(tmp_path / 'nccl')!r}, 'w'))"
    lab.shells[2] = python_path(tmp_path, RANK + wrong + env)
    lab.hosts.names(2, "127.0.0.1 localhost node2\n10.77.0.1 node1\n")
    said = lab(1, 2)
    assert [node.code for node in said.values()] == [1, 1]
    assert said[1].named("all-reduce") == "rank 1 (node2): 3 wrong sums"
    assert (tmp_path / "nccl").read_text() == "eth0\n", "as in training, where its name is loopback"


# --- what the nodes must have in common -----------------------------------------------------------


@pytest.fixture(scope="module")
def uneven(projects: Path, project: Path) -> Iterator[Said]:
    """What node 0 says of a second node that is another in nearly everything."""
    copies = [projects / "first" / "demo", projects / "second" / "demo"]
    for number, copy in enumerate(copies):
        shutil.copytree(project, copy)
        with (copy / "train.py").open("a") as file:
            file.write(f"# version {number}\n")
        git = ["git", "-c", "user.name=me", "-c", "user.email=me@example.org", "-C", str(copy)]
        for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
            subprocess.run([*git, *words], check=True, capture_output=True)
        (copy / "README.md").touch()  # git would like to note that
    indexes = {copy: (copy / ".git/index").read_bytes() for copy in copies}
    other = "import torch, platform; torch.__version__ = '2.13.7'; platform.python_version = str"
    clock = "\nimport time; now = time.time; time.time = lambda: now() + 100.5"
    with Hosts(2) as hosts:
        lab = Lab(hosts, copies[0])
        path = python_path(projects / "path", RANK + other + clock)
        lab.shells[2] = path | {"NPROC_PER_NODE": "2"}
        lab.argv[2] = ["bash", copies[1] / "launch/node.sh", "--preflight", "--train.lr=7"]
        said = lab(1, 2)
        assert [node.code for node in said.values()] == [1, 1], said[1]
        for copy, index in indexes.items():
            assert (copy / ".git/index").read_bytes() == index, "nodes may share it: none writes"
        yield said[1]


def test_another_torch_is_named(uneven: Said) -> None:
    assert "2.13.7 on node 1 (node2)" in uneven.named("torch")
    assert "on node 0 (node1)" in uneven.named("torch")


def test_another_commit_is_named(uneven: Said, projects: Path) -> None:
    for folder, node in (("first", "node 0 (node1)"), ("second", "node 1 (node2)")):
        command = ["git", "-C", str(projects / folder / "demo"), "rev-parse", "--short=10", "HEAD"]
        head = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        assert head in uneven.named("code")
        assert node in uneven.named("code")


def test_other_options_are_named(uneven: Said) -> None:
    assert "train.lr = 7.0 on node 1 (node2)" in uneven.named("options")
    assert "train.steps" not in uneven.named("options")


def test_another_number_of_ranks_is_named(uneven: Said) -> None:
    assert "1 rank(s) on node 0 (node1); 2 rank(s) on node 1 (node2)" in uneven.named("ranks")


def test_a_clock_that_is_off_is_named(uneven: Said) -> None:
    assert uneven.named("clock", "warn").startswith("node 1 (node2): +100.")


def test_a_run_folder_that_is_not_shared_is_named(uneven: Said) -> None:
    assert "node 1 (node2): run.dir is not the folder of node 0" in uneven.named(
        "shared folder", "warn"
    )


def test_failed_checks_come_first_and_the_ranks_measure_nothing(uneven: Said) -> None:
    statuses = [check["status"] for check in uneven.report["checks"]]
    assert statuses == sorted(statuses, key=["fail", "warn", "ok"].index)
    assert uneven.report["bandwidth"] == []


def test_a_sharded_run_needs_a_shared_folder(projects: Path) -> None:
    target = projects / "sharded" / "demo"
    project = write_project(target, model="mlp", precision="fp32", strategy="hsdp", nodes=2)
    (project / "runs").mkdir()
    with Hosts(2) as hosts:
        assert hosts.run(2, ["mount", "-t", "tmpfs", "none", project / "runs"]).returncode == 0
        said = Lab(hosts, project)(1, 2)
    assert [node.code for node in said.values()] == [1, 1]
    assert "node 1 (node2): run.dir is not the folder" in said[1].named("shared folder")
    assert list((project / "runs").iterdir()) == []
    misfit = alone(project, "--parallel.shard_size=3")
    assert misfit.code == 1
    assert "parallel.shard_size is 3, which does not divide 1 ranks" in misfit.named("ranks")


def test_missing_gpus_are_named(lab: Lab, tmp_path: Path) -> None:
    fake = """\
import sys
if any("preflight_rank" in word for word in sys.orig_argv):
    import os, torch
    class GPU:
        mem_get_info = staticmethod(lambda index: (70 * 10**9, 80 * 10**9))
        get_device_name = staticmethod(lambda index: "made-up GPU")
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    torch.accelerator.device_count = lambda: int(os.environ["GPUS"])
    torch.get_device_module = lambda device: GPU
"""
    lab.shell = python_path(tmp_path, fake) | {"BACKEND": "nccl"}
    for i, gpus in ((1, "1"), (2, "0")):
        lab.shells[i] = {"GPUS": gpus}
        lab.argv[i] = [sys.executable, lab.project / "launch" / "preflight.py"]
    said = lab(1, 2)
    assert said[1].named("devices") == (
        "node 1 (node2): 1 rank(s), 0 GPU(s), backend nccl: NPROC_PER_NODE can be 0"
    )
    assert "1 GPU(s) on node 0 (node1); 0 GPU(s) on node 1 (node2)" in said[1].named(
        "devices", "warn"
    )
    assert "rank 0: 10.0 GB of its GPU are in use" in said[1].named("devices", "warn")
    assert said[1].report["ranks"][0]["device"] == "made-up GPU"


# --- one machine by itself ------------------------------------------------------------------------


def alone(project: Path, *options: str, before: str = "", **shell: str) -> Said:
    """What `local.sh --preflight` says, after shell commands in a mount namespace of its own."""
    require("unshare")
    script = 'set -e\neval "$1"; shift\nexec bash "$@"'
    command = ["unshare", "--mount", "bash", "-c", script, "-", before]
    done = subprocess.run(
        [*command, str(project / "launch" / "local.sh"), "--preflight", "--json", *options],
        env=environment(**{"NPROC_PER_NODE": "1"} | shell),
        capture_output=True,
        text=True,
        timeout=90,
    )
    said = Said(done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in said.out + said.err, said
    return said


@pytest.fixture(scope="module")
def poor(project: Path) -> Said:
    """A machine that is short of everything that can be short on a good one."""
    limits = "mount -t tmpfs -o size=4k none /dev/shm; ulimit -n 150; ulimit -v 3900000"
    return alone(project, before=f"{limits}; taskset -cp 0 $$ >&2", NPROC_PER_NODE="2")


def test_little_shared_memory_is_named(poor: Said) -> None:
    assert "--shm-size" in poor.named("/dev/shm", "warn")


def test_few_open_files_are_named(poor: Said) -> None:
    assert "150 open files: ulimit -n" in poor.named("limits", "warn")


def test_little_address_space_is_named(poor: Said) -> None:
    assert "address space of 4.0 GB" in poor.named("limits", "warn")


def test_few_cores_are_named(poor: Said) -> None:
    assert "1 core(s) for 2 rank(s)" in poor.named("cores", "warn")


def test_a_memory_limit_is_named(project: Path, tmp_path: Path) -> None:
    first = Path("/sys/fs/cgroup/memory").is_dir()  # version 1 of cgroups
    root, name = ("memory", "memory.limit_in_bytes") if first else (".", "memory.max")
    group = Path("/sys/fs/cgroup", root, f"preflight-{time.time_ns()}")
    try:
        group.mkdir()
        (group / name).write_text("550000000")
    except OSError as error:
        unavailable(f"no memory limit can be set here: {error}")
    try:
        said = alone(project, before=f"echo $$ > {group}/cgroup.procs")
    finally:
        assert eventually(lambda: not (group / "cgroup.procs").read_text(), 10)
        group.rmdir()
    assert "550 MB, about 601 MB needed" in said.named("memory", "warn")


def test_a_run_folder_that_cannot_be_written_is_named(project: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in its place")
    said = alone(project, f"--run.dir={tmp_path}/file/run")
    assert said.code == 1
    assert f"{tmp_path}/file" in said.named("run.dir")
    assert (tmp_path / "file").read_text() == "in its place"


def test_too_little_space_is_named(project: Path, tmp_path: Path) -> None:
    said = alone(
        project, f"--run.dir={tmp_path}", before=f"mount -t tmpfs -o size=100k none {tmp_path}"
    )
    assert said.code == 1
    assert "a checkpoint takes" in said.named("space")


@pytest.mark.parametrize("option", ["--train.steps=many", "--model.layers=0"])
def test_a_bad_option_is_named(project: Path, option: str) -> None:
    said = alone(project, option)
    assert said.code == 1
    assert option.strip("-").split("=")[0] in said.named("options")


def test_missing_data_is_named(table: Path) -> None:
    said = alone(table, "--data.path=nowhere.csv")
    assert said.code == 1
    assert "nowhere.csv" in said.named("data")


def test_data_that_opens_slowly_is_no_failure(table: Path, tmp_path: Path) -> None:
    (tmp_path / "disk.csv").write_text("a,target\n1,2\n")
    slow = """import csv, time, signal
    alarm, fast, slow = signal.alarm, csv.reader, lambda *_, **__: time.sleep(60)
    signal.alarm = lambda s: (setattr(csv, "reader", slow if s else fast), alarm(s and 1))
"""
    path = python_path(tmp_path, RANK + slow)
    said = alone(table, f"--data.path={tmp_path}/disk.csv", **path)
    assert said.code == 0, said
    assert "not opened within 10 s" in said.named("data", "warn")


@pytest.fixture(scope="module")
def table(projects: Path) -> Path:
    return write_project(projects / "table" / "demo", model="mlp", data="csv", precision="fp32")


def test_a_torch_that_does_not_import_is_named(project: Path, tmp_path: Path) -> None:
    broken = python_path(tmp_path, RANK + "sys.modules['torch'] = None")
    said = alone(project, **broken)
    assert said.code == 1
    assert "torch" in said.named("ranks")
    assert sys.executable in said.named("ranks")


def test_ranks_that_die_are_named_with_the_cause(project: Path, tmp_path: Path) -> None:
    fate = """\
import sys
if any("preflight_rank" in word for word in sys.orig_argv):
    import os, time, torch
    def mm(a, b):
        if os.environ["RANK"] == "1":  # its line is cut, it is not
            os.close(int(sys.argv[1]))
            time.sleep(60)
        print("NCCL WARN the cause", "frame #0: c10::Error", "frame #1: main", sep="\\n", flush=True)
        os.kill(os.getpid(), 9)
    torch.mm = mm
"""
    said = alone(project, **python_path(tmp_path, fate), NPROC_PER_NODE="2")
    assert said.code == 1
    named = said.named("all-reduce")
    assert "rank 0: NCCL WARN the cause (killed: memory?)" in named
    assert "rank 1: nothing said (it does not end)" in named
    assert "frame #1: main" in said.err


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_preflight_that_is_told_to_stop_leaves_nothing(lab: Lab, name: str) -> None:
    lab.shell = {"NODE_WAIT": "20"}
    process = lab.start(1)
    assert eventually(lambda: any("_rank.py" in line for line in lab.hosts.processes(1)), 30)
    lab.hosts.signal(process, getattr(signal, name))
    process.communicate(timeout=20)
    assert process.returncode not in (0, None)
    assert eventually(lambda: lab.hosts.processes(1) == [], 10)
