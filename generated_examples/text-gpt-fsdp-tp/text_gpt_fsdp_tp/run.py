"""A run's folder: who may write to it, whether all ranks see it, and when to stop."""

import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from . import distributed
from .distributed import CONTROL, UserError, agreed, from_rank_0, sum_over_ranks

HEARTBEAT = 10.0  # seconds between two signs of life in the lock
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class StopSignal:
    """Whether this rank was told to stop: by a signal, or by the launch script's control folder."""

    def __init__(self) -> None:
        self.raised = False
        for number in STOP_SIGNALS:
            # What nohup or a shell's & ignores stays ignored; the launch script's are so for torchrun.
            if CONTROL or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._raise)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        # A second Ctrl-C means now. Others may well come twice: from Slurm, and through torchrun.
        if self.raised and number == signal.SIGINT and CONTROL is None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.raised = True

    def __bool__(self) -> bool:
        if CONTROL is None or self.raised:
            return self.raised
        return (CONTROL / "stop").exists() or not CONTROL.exists()  # the script is gone: stop too


@contextlib.contextmanager
def no_stop_signals() -> Iterator[None]:
    """Holds the stop signals back; a process that is started in here never gets one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Run:
    """The run's folder, locked while this context is open.

    Attributes:
        folder: where the run writes.
        shared: whether every rank sees the same folder.
        at_exit: called when all ranks leave together, finished or with the same UserError.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = Lock(folder / "lock")
        self.at_exit: Callable[[], object] = lambda: None

    def __enter__(self) -> "Run":
        nonce = from_rank_0(uuid.uuid4().hex)
        probe = self.folder / f".shared-{nonce}"
        logs = self.folder / "logs"
        try:
            with agreed():
                try:
                    logs.mkdir(parents=True, exist_ok=True)
                    if distributed.RANK == 0:
                        self.lock.acquire()
                        (logs / "error.txt").unlink(missing_ok=True)  # of an earlier launch
                        probe.touch()
                    log_file = logs / f"rank_{distributed.RANK}.log"
                    to_file = logging.FileHandler(log_file, encoding="utf-8")
                except OSError as error:
                    raise UserError(f"the run's folder cannot be written: {error}") from None
            self.shared = sum_over_ranks(probe.exists())[0] == distributed.WORLD_SIZE
        except BaseException:
            self.lock.release()
            raise
        to_file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        distributed.log.addHandler(to_file)
        logging.raiseExceptions = False  # a full disk is told once, not with each line of the log
        if distributed.RANK == 0:
            probe.unlink(missing_ok=True)
        distributed.error_file = logs / "error.txt"
        if CONTROL and distributed.LOCAL_RANK == 0:
            (CONTROL / "run").write_text(str(self.folder.resolve()), encoding="utf-8")
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None or kind is UserError:
                self.at_exit()
        finally:
            self.lock.release()


class Lock:
    """Keeps a second launch out of a run's folder; a lock whose owner is dead is taken over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stopped = threading.Event()
        # A requeue by Slurm or a restart by torchrun is the same launch, with a higher count.
        launch, count = os.environ.get("SLURM_JOB_ID", ""), "SLURM_RESTART_COUNT"
        if not launch:
            launch, count = os.environ.get("TORCHELASTIC_RUN_ID", ""), "TORCHELASTIC_RESTART_COUNT"
        pid = os.getpid()
        self.me: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": pid,
            "started": _started(pid),
            "space": _pid_space(),
            "launch": "" if launch == "none" else launch,
            "start": os.environ.get(count, "").zfill(9),  # as text, which compares with any other
        }

    def acquire(self) -> None:
        """Raises UserError while another launch holds the lock."""
        # Not of the process number: those of containers are much alike.
        ours = self.path.with_name(f"lock.{uuid.uuid4().hex}")
        ours.write_text(json.dumps(self.me), encoding="utf-8")
        try:
            if self.path.exists() and self._is_dead(self._owner(), ours):
                self.path.unlink(missing_ok=True)
            try:
                os.link(ours, self.path)  # of two launches at once only one succeeds
            except FileExistsError:
                owner = self._owner()
                raise UserError(
                    f"another launch is writing to {self.path.parent} (host {owner['host']}, "
                    f"process {owner['pid']}).\nWait for it, stop it, or use another --run.name."
                )
            except OSError:  # a file system without links: nearly as good
                ours.replace(self.path)
        finally:
            ours.unlink(missing_ok=True)
        threading.Thread(target=self._beat, daemon=True).start()

    def _owner(self) -> dict[str, Any]:
        unknown = dict.fromkeys(self.me, "unknown")
        with contextlib.suppress(OSError, ValueError, TypeError):
            return unknown | json.loads(self.path.read_text(encoding="utf-8"))
        return unknown

    def _is_dead(self, owner: dict[str, Any], ours: Path) -> bool:
        if all(owner[key] == self.me[key] for key in ("host", "space")):
            return _started(owner["pid"]) != owner["started"]
        patience = 6 * HEARTBEAT
        if owner["launch"] and owner["launch"] == self.me["launch"]:
            if str(owner["start"]) < self.me["start"]:
                return True
            patience = 2.5 * HEARTBEAT  # restarted elsewhere, or a second step of the Slurm job
        # By its heartbeat, on the disk's clock, since those of two hosts may differ.
        last = _touched(self.path)
        while last and _touched(self.path) == last:
            os.utime(ours)
            if _touched(ours) - last > patience:
                return True
            time.sleep(0.5)
        return False

    def _beat(self) -> None:
        while not self.stopped.wait(HEARTBEAT):
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def release(self) -> None:
        self.stopped.set()
        if self._owner() == self.me:
            self.path.unlink(missing_ok=True)


def _touched(path: Path) -> float:
    """When the file was last written, 0 if it is gone; of an unopened one a disk may say what was."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime
    return 0.0


def _started(pid: int) -> str:
    """When a process of this host started, which a later one of its number did not; "" if gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        with contextlib.suppress(PermissionError):
            os.kill(pid, 0)  # macOS; signal 0 only asks
        return "running"
    return ""


def _pid_space() -> str:
    """Where process numbers hold: containers on one host each have their own."""
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
        space += Path("/proc/sys/kernel/random/boot_id").read_text()  # all hosts' first is alike
    return space
