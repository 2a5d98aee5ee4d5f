"""`launch/ssh.sh` on hosts with a real sshd each.

Where only the launcher is under test, `launch/node.sh` is a stand-in that does as it is told, so that a
launch takes a second; those marked `slow` train.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import launches
from conftest import write_project
from faults import OPTIONS
from hosts import Hosts, require
from launches import eventually
from ranks import Ranks

LIMIT = 100  # seconds; no launch here takes half as long

# Stands in for the launch of a node: says what it was given and does what --test.NODE_RANK says.
NODE = """
import json, os, signal, sys, time
from pathlib import Path

rank, out = os.environ["NODE_RANK"], Path(os.environ["OUT"])
task = dict(a.split("=", 1) for a in sys.argv[1:] if "=" in a).get(f"--test.{rank}", "end")
seen = {"argv": sys.argv[1:], "cwd": os.getcwd(), "stdin": sys.stdin.read(), "env": dict(os.environ)}
(out / "tmp").mkdir(exist_ok=True)
(out / "tmp" / rank).write_text(json.dumps(seen))

def stop(number, frame):
    name = signal.Signals(number).name
    with (out / f"signals{rank}").open("a") as file:
        print(name, file=file)
    if number == signal.SIGQUIT:
        print("launch: ended at once, without saving", file=sys.stderr)
        os._exit(1)
    if task != "deaf":
        time.sleep(0.3)
        os._exit(75)

for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGQUIT):
    signal.signal(number, stop)
(out / "tmp" / rank).rename(out / f"{rank}.json")
print("launch: here", file=sys.stderr, flush=True)
match task:
    case "fail":
        sys.exit("some details\\nerror: sample 7 is broken\\nlook at it")
    case "suffer":
        time.sleep(0.5)
        sys.exit("error: rank 1 lost the other ranks: Connection closed by peer")
    case "wait" | "deaf":
        while True:
            time.sleep(0.1)
print("done")
"""


class Lab:
    """Three hosts with an sshd each, a project, and a stand-in for it."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.config = serve_ssh(hosts, folder)
        self.out, self.temporary = folder / "out", folder / "tmp"
        self.temporary.mkdir()
        self.project = folder / "Jörg's $HOME & 数据" / "demo"
        self.stub = folder / "stub"
        write_project(self.project, model="mlp", precision="fp32", launcher=["ssh"])
        shutil.copytree(self.project, self.stub, ignore=shutil.ignore_patterns(".scaffold"))
        (self.stub / "node.py").write_text(NODE)
        (self.stub / "launch" / "node.sh").write_text(f'exec "{sys.executable}" node.py "$@"\n')

    def env(self, **more: Any) -> dict[str, str]:
        """The environment of a launch over two hosts."""
        given = {"SSH": f"ssh -F {self.config}", "NNODES": 2}
        given |= {"OUT": self.out, "TMPDIR": self.temporary, "PASS_ENV": "OUT TMPDIR"}
        return launches.environment(NPROC_PER_NODE="1") | {
            name: str(value) for name, value in (given | more).items()
        }

    def start(
        self,
        *options: str,
        names: str | None = "node1\nnode2\n",
        on: int = 0,
        project: Path | None = None,
        **env: Any,
    ) -> subprocess.Popen[str]:
        """Starts a launch on host `on`, in a session of its own as a terminal's."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        script = (project or self.stub) / "launch" / "ssh.sh"
        command = ["setsid", *BASH, script]
        if names is not None:
            (self.folder / "hosts.txt").write_text(names)
            command.append(f"--hosts={self.folder}/hosts.txt")
        command += options
        return self.hosts.start(on, command, env=self.env(**env), stderr=subprocess.PIPE, cwd="/")

    def launch(self, *options: str, **more: Any) -> launches.Launch:
        """Runs a launch to its end; nothing of it is left anywhere."""
        with self.start(*options, **more) as process:
            return self.end(process)

    def end(self, process: subprocess.Popen[str]) -> launches.Launch:
        try:
            out, err = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(leader(process), signal.SIGKILL)
            raise
        assert self.idle(), self.running()
        assert not list(self.temporary.glob("launch.*"))
        return launches.Launch(process.returncode, out, err, 0)

    def idle(self) -> bool:
        """Whether the hosts come to rest: nothing runs but the listening sshd."""
        return eventually(lambda: not self.running(), 10)

    def running(self) -> list[str]:
        every = [line for i in range(4) for line in self.hosts.processes(i)]
        return [line for line in every if "sshd -f" not in line]

    def seen(self, rank: int) -> Any:
        return json.loads((self.out / f"{rank}.json").read_text())

    def signals(self, rank: int) -> list[str]:
        path = self.out / f"signals{rank}"
        return path.read_text().split() if path.exists() else []

    def wait_for(self, *ranks: int) -> None:
        """Until these nodes have started."""
        assert eventually(lambda: all((self.out / f"{rank}.json").exists() for rank in ranks), 20)


BASH = [os.environ.get("SCAFFOLD_TEST_BASH", "bash")]


def serve_ssh(hosts: Hosts, folder: Path) -> Path:
    """Starts an sshd on each host; returns the config of a client that may log in to them."""
    require("ssh", "sshd", "ssh-keygen")
    for key in ("host_key", "id"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(make, check=True)
    passwd(folder / "passwd", folder, "bash")
    for i in range(1, hosts.count + 1):
        settings = folder / f"sshd{i}.conf"
        settings.write_text(
            f"ListenAddress {hosts.address(i)}\nHostKey {folder}/host_key\nPidFile none\n"
            f"AuthorizedKeysFile {folder}/id.pub\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        )
        for command in (
            ["mount", "--bind", folder / "passwd", "/etc/passwd"],
            ["mount", "-t", "tmpfs", "tmpfs", "/run"],
            ["mkdir", "-m", "755", "/run/sshd"],
            [shutil.which("sshd", path="/usr/sbin:/usr/local/sbin"), "-f", settings],
        ):
            done = hosts.run(i, command)
            assert done.returncode == 0, done.stderr
    config = folder / "ssh_config"
    config.write_text(
        f"User root\nIdentityFile {folder}/id\nIdentitiesOnly yes\n"
        f"StrictHostKeyChecking accept-new\nUserKnownHostsFile {folder}/known_hosts\n"
    )
    return config


def passwd(path: Path, home: Path, shell: str) -> None:
    """Writes the list of users: this one's home and login shell are these."""
    others = Path("/etc/passwd").read_text().partition("\n")[2]
    path.write_text(f"root:x:0:0:root:{home}:{shutil.which(shell)}\n{others}")


def leader(process: subprocess.Popen[str]) -> int:
    """The process of ssh.sh, which leads a session of its own."""
    assert eventually(lambda: len(launches.descendants(process.pid)) > 0, 10)
    return launches.descendants(process.pid)[0]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Hosts(3) as hosts:
        yield Lab(hosts, tmp_path_factory.mktemp("lab"))


def fails(done: launches.Launch, *words: str) -> None:
    """It failed with one line of its own, last, that has these words."""
    assert done.code == 1, done
    assert done.last_line.startswith("launch: "), done
    assert all(word in done.last_line for word in words), done


# --- what reaches the hosts -----------------------------------------------------------------------

STRANGE = [
    "--a=it's",
    'b "b"',
    "$HOME `id` $(id)",
    "\\ \\\\ !x",
    "é 数 \t",
    "",
    "*",
    "~",
    "two\nlines\n",
]


@pytest.mark.parametrize("shell", ["bash", "dash", "zsh", "tcsh"])
def test_every_argument_arrives_whatever_the_login_shell(lab: Lab, shell: str) -> None:
    require(shell)
    users = lab.folder / shell
    passwd(users, lab.folder, shell)
    lab.hosts.run(2, ["mount", "--bind", users, "/etc/passwd"])
    try:
        done = lab.launch(*STRANGE, PASS_ENV="OUT X", X="x'\n y ")
    finally:
        lab.hosts.run(2, ["umount", "/etc/passwd"])
    assert done.code == 0, done
    for rank in (0, 1):
        seen = lab.seen(rank)
        assert seen["argv"] == STRANGE
        assert seen["cwd"] == str(lab.stub)
        assert seen["stdin"] == ""
        assert seen["env"]["X"] == "x'\n y "
    assert re.search(r"^\[node1\] done$", done.out, re.M)
    assert re.search(r"^\[node2\] launch: here$", done.err, re.M)


def test_what_is_set_for_the_launch_reaches_every_node(lab: Lab) -> None:
    given = {"GPUS_PER_NODE": "3", "NPROC_PER_NODE": "2", "BACKEND": "gloo", "OFFLINE": "1"}
    given |= {"NETWORK_INTERFACE": "eth0", "MAX_RESTARTS": "2", "PYTHON": "/x y/python"}
    given |= {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "3"}
    (lab.stub / "launch" / "site.far.env").touch()
    done = lab.launch("--site", "far", "--preflight", "--train.lr=1", UNASKED="x", **given)
    assert done.code == 0, done
    for rank in (0, 1):
        env = lab.seen(rank)["env"]
        shared = {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": lab.hosts.address(1)}
        shared |= {"SITE": "far", "PREFLIGHT": "1"}
        assert env.items() >= (given | shared).items()
        assert 20000 <= int(env["MASTER_PORT"]) < 30000
        assert "UNASKED" not in env
        assert lab.seen(rank)["argv"] == ["--train.lr=1"]
    assert lab.seen(0)["env"]["MASTER_PORT"] == lab.seen(1)["env"]["MASTER_PORT"]
    chosen = {"MASTER_ADDR": "10.9.9.9", "MASTER_PORT": "12345"}
    assert lab.launch(**chosen).code == 0
    assert lab.seen(1)["env"].items() >= chosen.items()
    assert "SITE" not in lab.seen(1)["env"]


def test_a_preflight_prints_what_node_0_found(lab: Lab) -> None:
    done = lab.launch("--preflight", "--json")
    assert done.code == 0, done
    assert sorted(done.out.splitlines()) == ["[node2] done", "done"]
    done = lab.launch("--preflight", "--test.0=suffer")
    fails(done, "the preflight has failed")


def test_the_project_lies_elsewhere_on_the_hosts(lab: Lab) -> None:
    elsewhere = lab.folder / "è l'se $where" / "stub"
    shutil.copytree(lab.stub, elsewhere)
    done = lab.launch(REMOTE_DIR=elsewhere)
    assert done.code == 0, done
    assert lab.seen(1)["cwd"] == str(elsewhere)
    (lab.folder / "at home").symlink_to(elsewhere)  # folders that are not absolute start at home
    for folder in ("at home", "~/at home"):
        done = lab.launch(REMOTE_DIR=folder)
        assert done.code == 0, done
    # Said in site.env, where a hosts file that is not absolute lies in the project's folder.
    site = lab.stub / "launch" / "site.moon.env"
    site.write_text(f"REMOTE_DIR={shlex.quote(str(elsewhere))} HOSTS_FILE='launch/of the moon'\n")
    shutil.copy(site, elsewhere / "launch")
    (lab.stub / "launch" / "of the moon").write_text("node2\nnode3\n")
    done = lab.launch("--site", "moon", names=None)
    assert done.code == 0, done
    assert lab.seen(1)["cwd"] == str(elsewhere)
    assert "2 host(s): node2 node3;" in done.err


def test_hosts_are_taken_in_order_as_many_as_there_are_nodes(lab: Lab) -> None:
    done = lab.launch(names="# mine\n\nnode3\n  root@node1  # second\r\nnode2")
    assert done.code == 0, done
    assert "the first of the 3 hosts" in done.err
    assert lab.seen(0)["env"]["MASTER_ADDR"] == lab.hosts.address(3)
    assert re.search(r"^\[node1\] done$", done.out, re.M)
    assert "node2" not in done.out
    done = lab.launch(
        names="localhost\n", on=1, NNODES=1, SSH=f"{lab.env()['SSH']} -o Hostname=node1"
    )
    assert done.code == 0, done
    for names, words in {
        "node1\n": ["NNODES is 2", "names 1 host", "NNODES=1"],
        "": ["names no host"],
        "node1 slots=8\nnode2\n": ["one [user@]host a line", "node1 slots=8"],
        "node1\nnode1\n": ["node1 twice"],
        "-oProxyCommand=x\nnode1\n": ["-oProxyCommand=x", "no host name"],
    }.items():
        done = lab.launch(names=names)
        fails(done, "hosts.txt", *words)
        assert done.err.count("\n") == 1


def test_mistakes_in_settings_are_one_line(lab: Lab) -> None:
    for env, words in (
        ({"NNODES": "two"}, ["NNODES", "'two'"]),
        ({"NNODES": "0"}, ["NNODES", "'0'"]),
        ({"NNODES": "1:"}, ["NNODES", "'1:'"]),
        ({"PASS_ENV": "A 1B"}, ["PASS_ENV", "'A 1B'"]),
        ({"SITE": "mars"}, ["no launch/site.mars.env"]),
        ({"SSH": "no-such-ssh"}, ["no no-such-ssh here"]),
    ):
        done = lab.launch(**env)
        fails(done, *words)
        assert done.err.count("\n") == 1
    fails(lab.launch("--hosts", "/no/such"), "no /no/such", "[user@]host")
    fails(lab.launch("--site"), "--site needs a name")


# --- hosts that cannot take part: said before anything runs -----------------------------------------


def starts_nothing(lab: Lab) -> None:
    """No node's launch was begun."""
    assert not list(lab.out.iterdir())


def test_a_host_that_cannot_be_logged_in_to_is_named_and_nothing_starts(lab: Lab) -> None:
    ssh = lab.env()["SSH"]
    done = lab.launch(names="node1\nnowhere.invalid\n")
    fails(done, "nowhere.invalid: cannot log in", "resolve")
    assert done.err.count("\n") == 1
    starts_nothing(lab)
    done = lab.launch(SSH=f"{ssh} -p 23")
    fails(done, "cannot log in", "port 23: Connection refused")
    assert {line[8:13] for line in done.err.splitlines()} == {"node1", "node2"}
    stranger = lab.folder / "stranger"
    if not stranger.exists():
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(stranger)]
        subprocess.run(make, check=True)
    config = lab.folder / "other_config"
    config.write_text(lab.config.read_text().replace(f"{lab.folder}/id", str(stranger)))
    done = lab.launch(SSH=f"ssh -F {config}")
    fails(done, "cannot log in", "Permission denied", "ssh-copy-id node")
    lab.hosts.cut(2)
    try:
        done = lab.launch(SSH=f"{ssh} -o ConnectTimeout=2")
    finally:
        lab.hosts.join(2)
    fails(done, "node2: cannot log in", "port 22")
    assert done.err.count("\n") == 1
    starts_nothing(lab)


def test_a_host_with_another_key_than_known_is_named(lab: Lab) -> None:
    config = lab.folder / "strict_config"
    known = lab.folder / "strict_known"
    text = lab.config.read_text().replace("accept-new", "yes")
    config.write_text(text.replace(f"{lab.folder}/known_hosts", str(known)))
    known.touch()
    done = lab.launch(SSH=f"ssh -F {config}")
    fails(done, "cannot log in", "Host key verification failed", "ssh node")
    other = (lab.folder / "id.pub").read_text().split()[:2]
    known.write_text(f"node1 {' '.join(other)}\nnode2 {' '.join(other)}\n")
    done = lab.launch(SSH=f"ssh -F {config}")
    fails(done, "cannot log in", "Host key verification failed", "ssh node")
    starts_nothing(lab)


def test_a_host_without_the_project_or_with_other_code_is_named(lab: Lab) -> None:
    for project, words in (
        (lab.folder / "empty", [f"no project in {lab.stub}", "REMOTE_DIR"]),
        (lab.folder / "older", ["is another than here on: node2 -"]),
    ):
        if project.name == "older":
            shutil.copytree(lab.stub, project)
            (project / "demo" / "model.py").write_text("# other\n")
        project.mkdir(exist_ok=True)
        lab.hosts.run(2, ["mount", "--bind", project, lab.stub])
        try:
            done = lab.launch()
        finally:
            lab.hosts.run(2, ["umount", lab.stub])
        fails(done, "node2", *words)
        assert "node1" not in done.err
        starts_nothing(lab)
    fails(lab.launch(REMOTE_DIR="/no such/folder"), "no project in /no such/folder")


def test_a_name_that_other_hosts_do_not_know_or_take_for_themselves_is_one_line(lab: Lab) -> None:
    config = lab.folder / "alias_config"
    config.write_text(
        f"Host first\n  ProxyCommand nc node1 22\n  HostKeyAlias node1\nHost *\n{lab.config.read_text()}"
    )
    config.write_text(
        config.read_text().replace("nc node1 22", f"{sys.executable} {lab.folder}/nc.py")
    )
    (lab.folder / "nc.py").write_text(RELAY)
    done = lab.launch(names="first\nnode2\n", SSH=f"ssh -F {config}")
    fails(done, "node2 does not know node 0 by its name, first", "MASTER_ADDR")
    assert lab.launch(names="first\nnode2\n", SSH=f"ssh -F {config}", MASTER_ADDR="node1").code == 0
    config.write_text(f"Host first\n  Hostname node1\nHost *\n{lab.config.read_text()}")
    assert lab.launch(names="first\nnode2\n", SSH=f"ssh -F {config}").code == 0
    assert lab.seen(1)["env"]["MASTER_ADDR"] == lab.hosts.address(1)

    config.write_text(
        f"Match host localhost\n  ProxyCommand {sys.executable} {lab.folder}/nc.py\n  HostKeyAlias node1\nHost *\n{lab.config.read_text()}"
    )
    done = lab.launch(names="localhost\nnode2\n", SSH=f"ssh -F {config}")
    fails(done, "localhost is node2 itself there (127.0.0.1)", "MASTER_ADDR")
    starts_nothing(lab)


# Connects stdin and stdout with node1's sshd.
RELAY = """
import os, socket, threading
server = socket.create_connection(("node1", 22))
def send():
    while data := os.read(0, 65536):
        server.sendall(data)
    server.shutdown(socket.SHUT_WR)
threading.Thread(target=send, daemon=True).start()
while data := server.recv(65536):
    os.write(1, data)
"""


# --- ends -----------------------------------------------------------------------------------------


def test_when_a_node_fails_the_others_are_ended_and_its_cause_is_said_last(lab: Lab) -> None:
    begun = time.monotonic()
    done = lab.launch("--test.1=fail", "--test.0=suffer")
    assert done.code == 1
    assert done.err.splitlines()[-2:] == ["launch: node2: sample 7 is broken", "look at it"]
    assert "[node2] some details" in done.err
    assert time.monotonic() - begun < 10

    done = lab.launch("--test.0=suffer", "--test.1=fail")  # the same, whoever ends first
    assert done.err.splitlines()[-2] == "launch: node2: sample 7 is broken"

    begun = time.monotonic()
    done = lab.launch("--test.0=fail", "--test.1=deaf")
    assert done.err.splitlines()[-2:] == ["launch: node1: sample 7 is broken", "look at it"]
    assert lab.signals(1) == ["SIGQUIT"]
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_stops_all_nodes(lab: Lab, name: str) -> None:
    with lab.start("--test.0=wait", "--test.1=wait") as process:
        lab.wait_for(0, 1)
        os.killpg(leader(process), signal.Signals[name])  # as a terminal does, to ssh too
        done = lab.end(process)
    assert done.code == 75, done
    assert done.last_line == "launch: stopped after saving a checkpoint, exit status 75"
    assert lab.signals(0) == lab.signals(1) == [name]


def test_a_second_signal_ends_the_nodes_at_once(lab: Lab) -> None:
    with lab.start("--test.0=deaf", "--test.1=deaf") as process:
        lab.wait_for(0, 1)
        for pause in (0.2, 2.2, 0):  # what comes within two seconds is the same signal, by two ways
            os.kill(leader(process), signal.SIGTERM)
            time.sleep(pause)
        done = lab.end(process)
    fails(done, "ended at once, without saving")
    assert lab.signals(0) == lab.signals(1) == ["SIGTERM", "SIGQUIT"]


def test_a_signal_before_anything_has_started_ends_the_launch(lab: Lab) -> None:
    lab.hosts.cut(2)
    try:
        with lab.start() as process:
            time.sleep(1)
            os.killpg(leader(process), signal.SIGINT)
            done = lab.end(process)
    finally:
        lab.hosts.join(2)
    fails(done, "ended by SIGINT before training began")
    starts_nothing(lab)


@pytest.mark.parametrize("group", [False, True])
def test_a_killed_launcher_leaves_nothing_behind(lab: Lab, group: bool) -> None:
    with lab.start("--test.0=wait", "--test.1=wait") as process:
        lab.wait_for(0, 1)
        (os.killpg if group else os.kill)(leader(process), signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
        assert lab.idle(), lab.running()
        process.communicate()
    assert lab.signals(0) == lab.signals(1) == ["SIGTERM"]
    assert not list(lab.temporary.glob("launch.*"))


def test_a_reader_that_has_gone_does_not_stop_a_launch(lab: Lab) -> None:
    with lab.start("--test.0=wait", "--test.1=wait") as process:
        for pipe in (process.stdout, process.stderr):
            assert pipe
            pipe.close()
        lab.wait_for(0, 1)
        os.kill(leader(process), signal.SIGTERM)
        assert process.wait(20) == 75
    assert lab.idle()


def test_when_a_connection_is_lost_the_other_nodes_save_and_stop(lab: Lab) -> None:
    ssh = f"{lab.env()['SSH']} -o ServerAliveInterval=1"
    with lab.start("--test.0=wait", "--test.1=wait", SSH=ssh) as process:
        lab.wait_for(0, 1)
        lab.hosts.cut(2)
        try:
            _, err = process.communicate(timeout=LIMIT)
        finally:
            lab.hosts.join(2)
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("launch: node2: the connection is lost (Timeout"), err
    assert lab.signals(0) == ["SIGTERM"]
    assert eventually(lambda: not lab.running(), 90)  # it hears nothing for a minute
    assert lab.signals(1) == ["SIGTERM"]


def test_an_elastic_run_goes_on_without_a_node(lab: Lab) -> None:
    with lab.start("--test.0=wait", "--test.1=fail", NNODES="1:2") as process:
        lab.wait_for(0, 1)
        time.sleep(2)
        os.kill(leader(process), signal.SIGTERM)
        done = lab.end(process)
    assert done.code == 75, done
    assert "node2: sample 7 is broken" in done.err
    assert "the others go on" in done.err
    done = lab.launch(names="node1\nnowhere.invalid\n", NNODES="1:2")
    assert done.code == 0, done
    assert "nowhere.invalid: cannot log in" in done.err
    assert "1 host(s): node1;" in done.err
    done = lab.launch("--test.0=fail", names="node1\nnowhere.invalid\n", NNODES="1:2")
    assert done.code == 1, done
    assert done.err.endswith("launch: node1: sample 7 is broken\nlook at it\n"), done
    fails(
        lab.launch(names="nowhere.invalid\nnode1\n", NNODES="1:2"), "nowhere.invalid: cannot log in"
    )


# --- training ---------------------------------------------------------------------------------------

TRAIN = [*OPTIONS, "--train.steps=15", "--checkpoint.every=0", "--run.name=over hosts"]
STEP = "        step += 1\n"
BREAK = """\
        if distributed.RANK == 1 and step == 3:
            raise ValueError("sample 7 is broken")
"""


@pytest.fixture(scope="module")
def slow(lab: Lab) -> Path:
    """The project; a step of it takes a tenth of a second."""
    change(lab.project, f"{STEP}        time.sleep(0.1)\n")
    return lab.project


def change(project: Path, code: str) -> None:
    """Puts other code where a step of `train.py` begins."""
    train = project / "train.py"
    text = train.read_text()
    assert text.count(STEP) == 1
    train.write_text(text.replace(STEP, code))


@pytest.mark.slow
def test_a_run_that_is_stopped_and_killed_on_two_and_three_hosts_has_the_losses_of_one(
    lab: Lab, slow: Path, ranks: Ranks
) -> None:
    """Ctrl-C on two hosts; a killed launcher on three, one of which it is on; then from a copy."""
    run = slow / "runs" / "over hosts"
    with lab.start(*TRAIN, project=slow) as process:
        assert eventually(lambda: len(launches.losses(run)) >= 2, 60)
        os.killpg(leader(process), signal.SIGINT)
        done = lab.end(process)
    assert done.code == 75, done
    assert "[node1] launch: node 0 of 2 (node1)" in done.err
    assert "[node2] launch: node 1 of 2 (node2)" in done.err
    (first,) = launches.checkpoints(run)
    assert first == max(launches.losses(run)) < 10

    names = "node2\nnode3\nnode1\n"
    with lab.start(*TRAIN, names=names, on=2, project=slow, NNODES=3) as process:
        assert eventually(lambda: max(launches.losses(run)) >= first + 2, 90)
        os.kill(leader(process), signal.SIGKILL)
        out, err = process.communicate(timeout=30)
    assert eventually(lambda: not lab.running(), 60), lab.running()
    assert "by 3 data-parallel rank(s)" in out, err
    second = launches.checkpoints(run)[-1]
    assert second == max(launches.losses(run)) < 15

    elsewhere = lab.folder / "else where" / "demo"
    shutil.copytree(slow, elsewhere, ignore=shutil.ignore_patterns("runs"))
    done = lab.launch(f"--run.dir={run}", *TRAIN, project=slow, REMOTE_DIR=elsewhere)
    assert done.code == 0, done
    assert f"[node1] step {second + 1} " in done.out
    alone = ranks.run(slow, 1, *TRAIN, "--run.name=alone")
    assert alone.ok, alone
    assert launches.losses(run) == pytest.approx(launches.losses(slow / "runs/alone"), rel=1e-5)


@pytest.mark.slow
def test_a_rank_that_fails_is_named_last_with_its_cause(lab: Lab, slow: Path) -> None:
    broken = lab.folder / "broken" / "demo"
    shutil.copytree(slow, broken, ignore=shutil.ignore_patterns("runs"))
    change(broken, STEP + BREAK)
    done = lab.launch(*TRAIN, project=broken)
    fails(done, "node2: rank 1 failed: ValueError: sample 7 is broken")
    assert "Traceback" in done.err


@pytest.mark.slow
def test_a_cable_that_is_pulled_in_the_middle_ends_the_launch_in_time(lab: Lab, slow: Path) -> None:
    run, ssh = slow / "runs" / "cut", f"{lab.env()['SSH']} -o ServerAliveInterval=1"
    options = [*TRAIN, "--run.name=cut", "--run.timeout_minutes=0.15", "--train.steps=500"]
    with lab.start(*options, project=slow, SSH=ssh) as process:
        assert eventually(lambda: len(launches.losses(run)) >= 2, 60)
        lab.hosts.cut(2)
        try:
            begun = time.monotonic()
            _, err = process.communicate(timeout=LIMIT)
            assert time.monotonic() - begun < 45
        finally:
            lab.hosts.join(2)
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("launch: node2: the connection is lost (Timeout"), err
    assert eventually(lambda: not lab.running(), 90), lab.running()
