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
from pathlib import Path
from types import FrameType

from . import distributed
from .distributed import CONTROL, UserError, agreed, from_rank_0, sum_over_ranks

HEARTBEAT = 10.0  # seconds between two signs of life in the lock
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class StopSignal:
    """Whether this rank was told to stop: by a signal, or by the launch script's control folder."""

    def __init__(self) -> None:
        self.raised = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._raise)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.raised and CONTROL is None:  # a second Ctrl-C means now
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.raised = True

    def __bool__(self) -> bool:
        if CONTROL is None or self.raised:
            return self.raised
        return (CONTROL / "stop").exists() or not CONTROL.exists()  # the script is gone: stop too


def ignore_stop_signals(worker: int = 0) -> None:
    """For DataLoader workers: torchrun signals them too, and their death would take the rank along."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class Run:
    """The run's folder, locked while this context is open.

    Attributes:
        folder: where the run writes.
        shared: whether every rank sees the same folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = Lock(folder / "lock")

    def __enter__(self) -> "Run":
        nonce = from_rank_0(uuid.uuid4().hex)
        probe = self.folder / f".shared-{nonce}"
        with agreed():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                if distributed.RANK == 0:
                    self.lock.acquire()
                    probe.touch()
            except OSError as error:
                raise UserError(f"the run's folder cannot be written: {error}") from None
        seen = sum_over_ranks(probe.exists())[0]
        self.shared = seen == distributed.WORLD_SIZE
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        to_file = logging.FileHandler(logs / f"rank_{distributed.RANK}.log", encoding="utf-8")
        to_file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        distributed.log.addHandler(to_file)
        if distributed.RANK == 0:
            probe.unlink(missing_ok=True)
        return self

    def __exit__(self, *error: object) -> None:
        self.lock.release()


class Lock:
    """Keeps a second launch out of a run's folder; a lock whose owner is dead is taken over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stopped = threading.Event()
        # A restart by torchrun or a requeue by Slurm is the same launch: it may go on at once.
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        launch = os.environ.get("SLURM_JOB_ID") or ("" if run_id == "none" else run_id)
        self.me = {"host": socket.gethostname(), "pid": os.getpid(), "launch": launch}

    def acquire(self) -> None:
        """Raises UserError while another launch holds the lock."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            owner = json.loads(self.path.read_text(encoding="utf-8"))
            if not self._is_dead(owner):
                raise UserError(
                    f"another launch is writing to {self.path.parent} (host {owner['host']}, "
                    f"process {owner['pid']}).\nWait for it, stop it, or use another --run.name."
                )
        ours = self.path.with_name(f"lock.{os.getpid()}")
        ours.write_text(json.dumps(self.me), encoding="utf-8")
        ours.replace(self.path)
        threading.Thread(target=self._beat, daemon=True).start()

    def _is_dead(self, owner: dict[str, object]) -> bool:
        if owner["launch"] and owner["launch"] == self.me["launch"]:
            return True
        if owner["host"] == self.me["host"]:
            return not Path("/proc", str(owner["pid"])).exists() if Path("/proc/self").exists() else False
        return time.time() - self.path.stat().st_mtime > 6 * HEARTBEAT

    def _beat(self) -> None:
        while not self.stopped.wait(HEARTBEAT):
            with contextlib.suppress(OSError):
                self.path.touch()

    def release(self) -> None:
        self.stopped.set()
        with contextlib.suppress(OSError, ValueError):
            if json.loads(self.path.read_text(encoding="utf-8")) == self.me:
                self.path.unlink()
