"""A real Slurm on one machine: slurmctld on the head, a slurmd on each host, all in one folder."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import launches
from hosts import Hosts, require

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
PATH = f"/usr/sbin:/sbin:{os.environ.get('PATH', '')}"
ACTIVE = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED"}

# Short intervals, so that what takes a cluster minutes takes seconds here. Requeued jobs wait until
# their credential has expired. A job in `urgent` takes the nodes of one in `low`, which has `grace`
# seconds to save, and of one in `brief`, which has none.
CONF = """\
ClusterName=test
SlurmctldHost=head({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool/%n
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=2,requeue_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
UnkillableStepTimeout=15
MinJobAge=600
SlurmctldTimeout=30
SlurmdTimeout=10
MessageTimeout=5
SlurmdParameters=config_overrides
GresTypes=gpu
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=brief Nodes=ALL MaxTime=INFINITE PriorityTier=1 GraceTime=0
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """`nodes` hosts with `cpus` cores and two GPUs each (by name only), and their controller.

    Attributes:
        hosts: the hosts; the controller and those who submit are on `hosts.head`, 0.
        folder: all that the cluster writes.
    """

    def __init__(self, nodes: int = 2, cpus: int = 2) -> None:
        require(*TOOLS)
        self.nodes, self.cpus = nodes, cpus
        self.hosts = Hosts(nodes)
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.env = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}

    def __enter__(self) -> Slurm:
        try:
            self.hosts.__enter__()
            self._configure()
            munge = self.folder / "munge"
            options = [f"--{name}={munge / name}" for name in ("socket", "pid-file", "log-file")]
            options += [f"--seed-file={munge / 'seed'}", f"--key-file={munge / 'key'}"]
            self._daemon(0, "munged", "--force", *options)
            self._daemon(0, "slurmctld", "-c")
            for node in range(1, self.nodes + 1):
                self.boot(node)
            self.await_nodes()
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
        self.hosts.__exit__(kind, error, trace)
        shutil.rmtree(self.folder, ignore_errors=True)

    def boot(self, node: int) -> None:
        """Starts the daemon of a node."""
        self._daemon(node, "slurmd")

    def await_nodes(self) -> None:
        """Returns when all nodes are free."""

        def free() -> bool:
            states = self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%t").stdout.split()
            for node in range(1, self.nodes + 1):
                if "drain" in states[node - 1 : node]:  # a process there did not end in time
                    name = f"NodeName={self.hosts.name(node)}"
                    self.run("scontrol", "update", name, "State=RESUME")
            return len(states) == self.nodes and set(states) == {"idle"}

        assert launches.eventually(free, 60), self.run("sinfo").stdout + self._logs()

    def run(
        self,
        *argv: str | Path,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the head, where one logs in."""
        tmp = {"TMPDIR": str(self.folder / "tmp")}  # what killed jobs leave goes with the cluster
        env = tmp | (env or launches.environment()) | self.env
        return self.hosts.run(0, ["env", "-C", cwd or self.folder, *argv], env=env, **options)

    def sbatch(
        self, *argv: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> str:
        """Submits a job and returns its number."""
        done = self.run("sbatch", "--parsable", *argv, env=env, cwd=cwd)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says of a job: JobState, ExitCode, Restarts, …"""
        text = self.run("scontrol", "show", "job", "-o", job).stdout
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def await_state(self, job: str, *states: str, timeout: float = 120) -> dict[str, str]:
        """The job, once its state is one of `states`."""
        assert launches.eventually(
            lambda: self.job(job).get("JobState", "") in states, timeout
        ), f"{self.job(job)}\n{self.log(job)}\n{self._logs()}"
        return self.job(job)

    def await_end(self, job: str, timeout: float = 120) -> dict[str, str]:
        """The job, once it has ended for good; cancels it where that takes too long."""
        end = time.monotonic() + timeout
        while (found := self.job(job)).get("JobState", "PENDING") in ACTIVE:
            if time.monotonic() > end:
                self.run("scancel", job)
                raise AssertionError(f"{found}\n{self.log(job)}\n{self._logs()}")
            time.sleep(0.2)
        return found

    def log(self, job: str) -> str:
        """What the job has printed."""
        text = self.run("scontrol", "show", "job", "-o", job).stdout
        path = re.search(r"StdOut=(.*?) (?:Power|\w+=)", text + " Power=")
        with contextlib.suppress(OSError):
            return Path(path[1].strip()).read_text(encoding="utf-8") if path else ""
        return ""

    def left(self, *words: str) -> list[str]:
        """The command lines with all of `words` that run on any host."""
        found = []
        for host in range(self.nodes + 1):
            found += [line for line in self.hosts.processes(host) if all(w in line for w in words)]
        return found

    def _configure(self) -> None:
        for name in ("munge", "state", "spool", "tmp"):
            (self.folder / name).mkdir()
        for node in range(1, self.nodes + 1):
            (self.folder / "spool" / self.hosts.name(node)).mkdir()
        munge = self.folder / "munge"
        munge.chmod(0o755)
        self.folder.chmod(0o755)
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o400)
        conf = CONF.format(head=self.hosts.address(0), folder=self.folder)
        for node in range(1, self.nodes + 1):
            conf += (
                f"NodeName={self.hosts.name(node)} NodeAddr={self.hosts.address(node)} "
                f"CPUs={self.cpus} RealMemory=4000 Gres=gpu:2 State=UNKNOWN\n"
            )
        (self.folder / "slurm.conf").write_text(conf)
        for number in range(2):
            os.mknod(self.folder / f"gpu{number}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-1]\n")

    def _daemon(self, host: int, *argv: str) -> None:
        done = self.hosts.run(
            host,
            list(argv),
            env={**os.environ, **self.env},
            stdout=subprocess.DEVNULL,
            capture_output=False,
        )
        assert done.returncode == 0, f"{argv}: {done.returncode}\n{self._logs()}"

    def _logs(self) -> str:
        tails = [
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:])
            for path in sorted(self.folder.glob("*.log"))
        ]
        return "\n".join(tails)


if __name__ == "__main__":  # a shell on the head of a cluster, to look at one
    with Slurm() as cluster:
        sys.exit(
            subprocess.run(
                cluster.hosts.command(0, ["bash"]), env=os.environ | cluster.env
            ).returncode
        )
