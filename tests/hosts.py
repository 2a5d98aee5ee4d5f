"""Hosts on one machine, for what crosses a network: namespaces with a cable each, on one switch.

A host has its own network, host name, /etc/hosts and process numbers; all share the machine's disk.
It is as real as a machine to whatever runs on it, and gone with its first process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

import launches

# The first process of a host: collects orphans, and ends only when it is killed.
INIT = "trap : TERM INT HUP; while :; do sleep 3600 & wait; done"


def require(*tools: str) -> None:
    """Skips the test where a tool is missing; fails it where `.ci/run` has promised them all."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if missing := [tool for tool in tools if not shutil.which(tool, path=path)]:
        unavailable(f"not installed: {', '.join(missing)}")


def unavailable(why: str) -> None:
    if os.environ.get("SCAFFOLD_TEST_SERVICES") == "required":
        pytest.fail(why)
    pytest.skip(why)


class Hosts:
    """`count` hosts called node1, node2, …, and host 0, `head`, which has the switch.

    Skips the test where namespaces cannot be made.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.holders: dict[int, subprocess.Popen[str]] = {}
        self.pids: dict[int, int] = {}  # of each host's first process, as this machine numbers it
        self.etc = Path(tempfile.mkdtemp(prefix="hosts-"))

    def __enter__(self) -> Hosts:
        require("unshare", "nsenter", "ip")
        try:
            for i in range(self.count + 1):
                self._boot(i)
            self._ip(0, "link add sw0 type bridge")
            self._ip(0, f"addr add {self.address(0)}/24 dev sw0")
            self._ip(0, "link set sw0 up")
            for i in range(1, self.count + 1):
                self._ip(0, f"link add port{i} type veth peer name eth0 netns {self.pids[i]}")
                self._ip(0, f"link set port{i} master sw0 up")
                self._ip(i, f"addr add {self.address(i)}/24 dev eth0")
                self._ip(i, "link set eth0 up")
            return self
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for i in self.holders:
            self.kill(i)
        shutil.rmtree(self.etc, ignore_errors=True)

    def name(self, i: int) -> str:
        return f"node{i}" if i else "head"

    def address(self, i: int) -> str:
        return f"10.77.0.{i or 254}"

    def command(self, i: int, argv: list[Any]) -> list[str]:
        """The command line that runs `argv` as host i."""
        inside = ["nsenter", "-t", str(self.pids[i]), "-n", "-u", "-m", "-p", "--"]
        return [*inside, *map(str, argv)]

    def run(self, i: int, argv: list[Any], **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs `argv` on host i to its end."""
        options = {"timeout": 120, "capture_output": True, "text": True} | options
        return subprocess.run(self.command(i, argv), **{"stdin": subprocess.DEVNULL, **options})

    def start(self, i: int, argv: list[Any], **options: Any) -> subprocess.Popen[str]:
        """Starts `argv` on host i, its output in one pipe; `signal` reaches it, `kill` ends it."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(
            self.command(i, argv), **{"stdin": subprocess.DEVNULL, **pipes, **options}
        )

    def signal(self, process: subprocess.Popen[str], number: signal.Signals) -> None:
        """Signals what `start` started (its own process only waits for it)."""
        for child in launches.descendants(process.pid)[:1]:
            os.kill(child, number)

    def processes(self, i: int) -> list[str]:
        """The command lines of what runs on host i, but its first process and this look at it."""
        look = ["ps", "-ww", "-e", "-o", "pid=,ppid=,stat=,args="]
        rows = [line.split(None, 3) for line in self.run(i, look).stdout.splitlines()]
        return [
            row[3]
            for row in rows
            if row[0] != "1"
            and not row[2].startswith("Z")
            and row[3] != "sleep 3600"
            and row[3] != " ".join(look)
        ]

    def kill(self, i: int) -> None:
        """The host is gone, with all that ran on it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids.get(i, self.holders[i].pid), signal.SIGKILL)
        with self.holders[i] as holder:
            holder.kill()

    def cut(self, i: int) -> None:
        """Pulls the cable of host i."""
        self._ip(0, f"link set port{i} down")

    def join(self, i: int) -> None:
        """Plugs the cable of host i in again."""
        self._ip(0, f"link set port{i} up")

    def dead_end(self, i: int) -> str:
        """Gives host i an interface that leads nowhere, as Docker does; returns its address."""
        for words in ("link add docker0 type bridge", "addr add 172.17.0.1/16 dev docker0"):
            self._ip(i, words)
        self._ip(i, "link set docker0 up")
        return "172.17.0.1"

    def names(self, i: int, text: str) -> None:
        """Gives host i another /etc/hosts."""
        (self.etc / self.name(i)).write_text(text)

    def filter(self, i: int, rule: str) -> None:
        """Drops what reaches host i and fits an nft match, such as `tcp dport 29500`."""
        for words in (
            ["add", "table", "inet", "f"],
            ["add", "chain", "inet", "f", "in", "{ type filter hook input priority 0 ; }"],
            ["add", "rule", "inet", "f", "in", *rule.split(), "drop"],
        ):
            done = self.run(i, ["nft", *words])
            assert done.returncode == 0, done.stderr

    def _boot(self, i: int) -> None:
        flags = ["--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self.holders[i] = subprocess.Popen(
            ["unshare", *flags, "bash", "-c", INIT],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        end = time.monotonic() + 10
        while not (below := launches.descendants(self.holders[i].pid)):
            if self.holders[i].poll() is not None:
                assert self.holders[i].stderr
                unavailable(f"no namespaces here: {self.holders[i].stderr.read().strip()}")
            assert time.monotonic() < end
            time.sleep(0.01)
        self.pids[i] = below[0]
        everyone = range(1, self.count + 1)
        table = "".join(f"{self.address(j)} {self.name(j)}\n" for j in [*everyone, 0])
        self.names(i, f"127.0.0.1 localhost\n{table}")
        while True:  # until unshare has mounted the host's own /proc
            done = self.run(i, ["cat", "/proc/1/cmdline"])
            if done.stdout.startswith("bash\0-c"):
                break
            assert time.monotonic() < end, done.stderr
            time.sleep(0.01)
        for setup in (
            ["hostname", self.name(i)],
            ["mount", "--bind", self.etc / self.name(i), "/etc/hosts"],
            ["ip", "link", "set", "lo", "up"],
        ):
            done = self.run(i, setup)
            if done.returncode:
                unavailable(f"no hosts here: {' '.join(map(str, setup))}: {done.stderr.strip()}")

    def _ip(self, i: int, words: str) -> None:
        # From this machine's processes, since the numbers of the hosts' are in its terms.
        inside = ["nsenter", "-t", str(self.pids[i]), "-n", "ip", *words.split()]
        subprocess.run(inside, check=True, capture_output=True)
