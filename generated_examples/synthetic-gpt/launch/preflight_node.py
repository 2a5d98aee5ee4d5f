"""One machine of a preflight: how it finds node 0, and what it answers to the questions of preflight.py.

Plain Python, so that it can say that torch does not import. The ranks, preflight_rank.py, are
processes of their own, started as torchrun would: a node can kill one that hangs.
"""

import contextlib
import errno
import fcntl
import glob
import ipaddress
import json
import os
import platform
import re
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
get = os.environ.get
NNODES = get("NNODES") or "1"
LEAST, NODES = (int(n) for n in (NNODES.split(":") * 2)[:2])  # an elastic run has MIN:MAX nodes
NODE = int(get("NODE_RANK") or 0)
RANKS = int(get("NPROC_PER_NODE") or 1)  # on each node
HOST = get("MASTER_ADDR") or ("127.0.0.1" if NODES == 1 else "")
PORT = int(get("MASTER_PORT") or (0 if NODES == 1 else 29500))  # 0: any free one
INTERFACE = get("NETWORK_INTERFACE") or get("GLOO_SOCKET_IFNAME") or ""

now = time.monotonic
START = now()
MEET_BY = START + min(25.0, float(get("NODE_WAIT") or 25))  # then all nodes must have come,
LOOK_BY = START + 42.0  # and all ranks have imported torch, which a network disk can make slow
MEASURE_BY = START + 53.0  # and all ranks have measured
END = START + 57.0  # whatever hangs (a disk, a name server), this process does not outlive it

Facts = dict[str, Any]
CAUSE = r"(?!frame #).*(what\(\)|NCCL WARN|Error)"  # in what a rank that died has said


class Problem(Exception):
    """What keeps this node from taking part: the check that failed, what is wrong, what is right."""


class Channel:
    """JSON messages, a line each, over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.rest = connection, b""
        # Between machines: one that is cut off shows within 15 s, although nothing is sent.
        if connection.family != socket.AF_UNIX and sys.platform == "linux":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 12_000)  # ms

    def send(self, message: Facts) -> None:
        self.socket.settimeout(5)
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, until: float) -> Facts:
        """The next message; an OSError where none comes in time, or the other end is gone."""
        while b"\n" not in self.rest:
            self.socket.settimeout(max(0.01, until - now()))
            received = self.socket.recv(1 << 16)
            if not received:
                raise ConnectionError("the other end is gone")
            self.rest += received
        line, _, self.rest = self.rest.partition(b"\n")
        message: Facts = json.loads(line)
        return message


def serve(channel: Channel, handlers: dict[str, Callable[..., Any]]) -> bool:
    """Answers questions until told the end; returns whether all was well."""
    while (question := channel.receive(END))["do"] != "end":
        try:
            answer = {"answer": handlers[question["do"]](**question["with"])}
        except Exception as error:  # a failed check for who asked
            answer = {"error": one_line(error)}
        channel.send(answer)
    return bool(question["ok"])


def one_line(error: BaseException) -> str:
    text = re.sub(r"^\[\S+:\d+\] ", "", str(error))  # gloo begins with a line of its source
    return f"{type(error).__name__}: {text.partition(chr(10))[0][:300]}"


# --- the network ----------------------------------------------------------------------------------


def resolve() -> tuple[int, str]:
    """Family and address of node 0; where it has several, the one that this machine prefers."""
    while True:
        try:
            found = socket.getaddrinfo(HOST, PORT, type=socket.SOCK_STREAM)[0]
            break
        except (OSError, UnicodeError) as error:
            what = f"MASTER_ADDR={HOST} cannot be resolved here ({error})"
        if now() > MEET_BY:  # until then: in Kubernetes a name appears when its pod does
            raise Problem("name", what, "give node 0's address, or make its name known here")
        time.sleep(0.5)
    address = str(found[4][0])
    if NODES > 1 and is_loopback(address) and get("SCAFFOLD_ALLOW_LOOPBACK") != "1":
        what = f"MASTER_ADDR={HOST} is {address} here, this machine itself"
        raise Problem("name", what, "give the address of node 0 that all reach, or mend /etc/hosts")
    return found[0], address


def is_loopback(host: str) -> bool:
    try:
        address = str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        return True  # a name without an address serves no better
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def listen(family: int, port: int) -> socket.socket:
    if both := socket.has_dualstack_ipv6():  # others may know this machine by its other address
        family = socket.AF_INET6
    try:
        return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = f"is taken by {port_owner(port)}" if taken else f"cannot be used ({error.strerror})"
        raise Problem("port", f"port {port} here {why}", "end that, or set another MASTER_PORT")


def port_owner(port: int) -> str:
    """The process that has a TCP port of this machine."""
    inodes = set()
    for table in glob.glob("/proc/net/tcp*"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # of another user, or gone by now
            if os.readlink(link) in inodes:
                pid = link.split("/")[2]
                command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ")
                return f"process {pid} ({command.decode(errors='replace').strip()[:80]})"
    return "a process of another user"


def connect(address: str, port: int, source: str = "") -> socket.socket:
    return socket.create_connection((address, port), 4, (source, 0) if source else None)


def reason(error: OSError, address: str, port: int) -> str:
    """Why a connection failed: silence is told apart by what another port of the machine does."""
    if isinstance(error, ConnectionRefusedError):
        return "refused, nothing listens there"
    if not isinstance(error, TimeoutError):
        return str(error.strerror)
    try:
        socket.create_connection((address, 1), 2).close()
    except ConnectionRefusedError:
        return f"no answer, but other ports answer: a firewall drops what goes to port {port}"
    except OSError:
        pass
    return "no answer, nor on another port: a wrong address, a machine that is down, a firewall"


def join(address: str, hello: Facts, source: str) -> Channel:
    """The line to node 0, which has taken this node in."""
    what, told = f"node 0 at MASTER_ADDR={HOST} ({address}) port {PORT}", ""
    while True:
        try:
            channel = Channel(connect(HOST, PORT, source))
            break
        except OSError as error:
            why, refused = reason(error, HOST, PORT), isinstance(error, ConnectionRefusedError)
        if source and not refused:  # else node 0's machine says no: the interface leads there
            with contextlib.suppress(OSError):
                channel = Channel(connect(HOST, PORT))
                hello["interface"] = f"{INTERFACE} ({source}) does not lead to node 0: {why}"
                break
        if now() > MEET_BY:
            remedy = f"is it started, within {MEET_BY - START:.0f} s of this? Is that its address?"
            raise Problem("network", f"{what}: {why}", remedy)
        if why != told and now() - START > 3:
            print(f"preflight: waiting for {what}: {why}", file=sys.stderr)
            told = why
        time.sleep(0.5)
    try:
        channel.send({**hello, "time": time.time()})
        problem = channel.receive(now() + 15)["refused"]
    except (OSError, ValueError, TypeError, KeyError):
        raise Problem("port", f"what answers for {what} is no preflight", "end it there")
    if problem:
        raise Problem("nodes", problem, "number the nodes from 0, each once")
    return channel


# --- the machine ----------------------------------------------------------------------------------


def interfaces() -> dict[str, str]:
    """The network interfaces of this machine and their IPv4 addresses ("" where there is none)."""
    found = {name: "" for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in found:
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe, 0x8915, request)  # SIOCGIFADDR
                found[name] = socket.inet_ntoa(reply[20:24])
    return found


def absent_interface(present: list[str]) -> str:
    """The variable that asks for an interface which this machine does not have, or ""."""
    for variable in ("NETWORK_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value, nccl = get(variable) or "", variable.startswith("NCCL")
        names = [n for n in value.removeprefix("=").split(",") if n and not value.startswith("^")]
        prefix = nccl and not value.startswith("=")  # eth stands for eth0
        there = [any(h.startswith(n) if prefix else h == n for h in present) for n in names]
        if names and not (any if nccl else all)(there):  # nccl takes any of them
            return f"{variable}={value} is not on this machine"
    return ""


def own_address(family: int, toward: str) -> str:
    """The address that this machine sends from; nothing is sent."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((toward, 9))
        except OSError as error:
            raise Problem("network", f"no way from here to {HOST} ({toward})", str(error.strerror))
        return str(probe.getsockname()[0])


def memory() -> int:
    """The bytes of memory that processes here may use: the machine's, or their cgroup's limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    cgroups = Path("/proc/self/cgroup")  # Linux has it
    for line in cgroups.read_text().splitlines() if cgroups.exists() else []:
        _, kind, path = line.split(":", 2)
        if kind in ("", "memory"):  # version 2, version 1
            here = Path(f"/sys/fs/cgroup/{kind}{path}")
            for folder in (here, *here.parents):
                with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                    name = "memory.limit_in_bytes" if kind else "memory.max"
                    limits.append(int((folder / name).read_text()))
    return min(limits)


def commit() -> str:
    """Of the project, with a + where files differ from it; without the lock that all would want."""
    command = ["git", "-C", str(PROJECT), "--no-optional-locks", "status", "--porcelain=2"]
    command += ["--branch", "--untracked-files=no", "."]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
        lines = done.stdout.splitlines()  # "# branch.oid 1234…", then the files
        found = "".join(line.split()[2][:10] for line in lines if line.startswith("# branch.oid"))
        return found + "+" * any(line[0] != "#" for line in lines)
    return ""


class Rank:
    """A process in a rank's place, which has torch and the project's package."""

    def __init__(self, local: int, environment: dict[str, str], options: list[str]) -> None:
        self.number = NODE * RANKS + local
        ours, theirs = socket.socketpair()
        self.channel, self.output = Channel(ours), tempfile.TemporaryFile()
        script, descriptor = Path(__file__).with_name("preflight_rank.py"), theirs.fileno()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, script, str(descriptor), *options],
                env={**environment, "RANK": str(self.number), "LOCAL_RANK": str(local)},
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=self.output,
            )

    def answer(self, until: float, late: str) -> Facts:
        """What it answers, or under "error" why it does not; `late` is why it does not in time."""
        try:
            answer = self.channel.receive(until)
            answer = answer.get("answer", answer)
        except TimeoutError:
            answer = {"error": late}
        except OSError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(2)
            answer = {"error": ""}
        if "error" not in answer:
            return answer
        output = self.output.fileno()  # where it may still be writing
        tail = os.pread(output, 1 << 16, max(0, os.fstat(output).st_size - (1 << 16)))
        said = tail.decode(errors="replace").strip().splitlines() or ["nothing said"]
        causes = [line for line in said if re.match(CAUSE, line)] or said
        status = self.process.returncode
        end = {None: "it does not end", -9: "killed: memory?"}.get(status, f"exit status {status}")
        error = answer["error"] or f"{causes[-1].strip()[:300]} ({end})"
        return {**answer, "error": error, "said": said[-20:]}

    def end(self) -> None:
        self.process.kill()  # it has nothing to save
        self.process.wait()
        self.output.close()
        self.channel.socket.close()


class Node:
    """This machine's part: it answers what node 0 asks."""

    def __init__(self, family: int, address: str) -> None:
        self.interfaces, own = interfaces(), own_address(family, address)
        where = f"MASTER_ADDR={HOST} is {address}, and this machine is {own}"
        self.elsewhere = where if own != address else ""
        asked = self.interfaces.get(INTERFACE.split(",")[0], "")
        self.source = asked if family == socket.AF_INET else ""
        self.listener = listen(family, 0)  # all it is for is that others can connect to it
        threading.Thread(target=self.greet, daemon=True).start()
        self.hello: Facts = {
            "node": NODE,
            "nodes": NNODES,
            "launch": get("RDZV_ID") or get("SLURM_JOB_ID") or "",
            "host": socket.gethostname(),
            "address": self.source or own,
            "port": self.listener.getsockname()[1],
            "interface": absent_interface(list(self.interfaces)),
        }
        self.ranks: list[Rank] = []
        self.run_dir, self.probe = PROJECT, PROJECT / ".preflight"
        self.made: list[Path] = []  # folders, to be removed
        self.handlers: dict[str, Callable[..., Any]] = {
            "machine": self.facts,
            "firewall": self.reach,
            "run.dir": self.folder,
            "shared folder": lambda name: (self.run_dir / name).exists(),
            "clean-up": self.forget,
            "all-reduce": self.measure,
        }

    def greet(self) -> None:
        with contextlib.suppress(OSError):  # closed: the end
            while True:
                self.listener.accept()[0].close()

    def start_ranks(self, port: int, options: list[str]) -> None:
        env = {**os.environ, "MASTER_ADDR": HOST, "MASTER_PORT": str(port)}
        env |= {"WORLD_SIZE": str(NODES * RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
        env["PYTHONPATH"] = f"{PROJECT}:{get('PYTHONPATH') or ''}".rstrip(":")
        leading = [name for name, has in self.interfaces.items() if has == self.hello["address"]]
        chosen = get("NETWORK_INTERFACE") or ""
        if NODES > 1 and (chosen or leading):  # as choose_interface of common.sh has it
            env.setdefault("GLOO_SOCKET_IFNAME", chosen or leading[0])
            if chosen or is_loopback(socket.gethostname()):
                env.setdefault("NCCL_SOCKET_IFNAME", chosen or leading[0])
        env.setdefault("NCCL_DEBUG", "WARN")  # else nccl does not say what ails it
        self.ranks = [Rank(local, env, options) for local in range(RANKS)]

    def ask_ranks(self, do: str, seconds: float, late: str) -> list[Facts]:
        until = now() + seconds
        for rank in self.ranks:
            with contextlib.suppress(OSError):  # its answer says why
                rank.channel.send({"do": do, "with": {}})
        return [{"rank": rank.number, **rank.answer(until, late)} for rank in self.ranks]

    def facts(self, seconds: float) -> Facts:
        """This machine and its ranks; what the first of them says about the project is the node's."""
        affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
        shm = os.statvfs("/dev/shm") if os.path.exists("/dev/shm") else None
        late = f"torch and the project did not import within {now() + seconds - START:.0f} s"
        ranks = self.ask_ranks("facts", seconds, late)
        project = ranks[0].pop("project", {})
        self.run_dir = Path(project.get("run_dir", PROJECT))
        return {
            "python": platform.python_version(),
            "executable": sys.executable,
            "backend": get("BACKEND") or "auto",
            "commit": commit(),
            "cores": len(affinity(0)) if affinity else os.cpu_count(),
            "memory": memory(),
            "shm": shm and shm.f_bavail * shm.f_frsize,
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "space": resource.getrlimit(resource.RLIMIT_AS)[0],
            "locked": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            "infiniband": bool(glob.glob("/sys/class/infiniband/*")),
            "interfaces": self.interfaces,
            **project,
            "ranks": ranks,
        }

    def measure(self, seconds: float) -> list[Facts]:
        return self.ask_ranks("measure", seconds, "no answer in time, it hangs or is very slow")

    def reach(self, targets: dict[str, tuple[str, int]]) -> dict[str, str]:
        """The nodes that no connection can be made to from here, and why."""

        def attempt(target: tuple[str, int]) -> str:
            try:
                connect(*target, self.source).close()
            except OSError as error:
                return reason(error, *target)
            return ""

        targets.pop(str(NODE))
        with ThreadPoolExecutor(len(targets) or 1) as pool:  # all at once: silence takes 6 s
            reasons = zip(targets, pool.map(attempt, targets.values()), strict=True)
        return {node: why for node, why in reasons if why}

    def folder(self, nonce: str) -> Facts:
        """Makes the run's folder, as training would, and a file in it for the others to see."""
        folder = self.run_dir
        self.probe = folder / f".preflight-{nonce}-{NODE}"
        try:
            self.made = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            self.probe.write_bytes(bytes(4096))
            disk = os.statvfs(folder)
        except OSError as error:
            return {"problem": f"{error.filename or folder}: {error.strerror}"}
        return {"probe": self.probe.name, "free": disk.f_bavail * disk.f_frsize}

    def forget(self) -> None:
        with contextlib.suppress(OSError):
            self.probe.unlink()

    def end(self) -> None:
        """Leaves nothing behind."""
        for rank in self.ranks:
            rank.end()
        self.forget()
        for folder in self.made:
            with contextlib.suppress(OSError):  # in use, or gone already
                folder.rmdir()
        self.listener.close()
