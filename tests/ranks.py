"""Ranks of a generated project, forked from a process that has imported torch.

A torchrun of two ranks costs 8 s of imports here; a fork costs 10 ms. Run as a program this is the
process to fork from: a request per line on stdin, an answer per line on stdout. `Ranks` starts it.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Result:
    """How a run ended: each rank's exit status and all that it printed."""

    codes: list[int]
    outputs: list[str]

    @property
    def ok(self) -> bool:
        return not any(self.codes)

    def __str__(self) -> str:
        return f"exit {self.codes}\n" + "\n".join(
            f"--- rank {i}\n{o}" for i, o in enumerate(self.outputs)
        )


class Ranks:
    """Starts ranks of generated projects; a context manager."""

    def __enter__(self) -> Ranks:
        self.server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return self

    def __exit__(self, *error: object) -> None:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.close()
        self.server.wait()
        self.server.stdout.close()

    def run(
        self,
        project: Path,
        world: int,
        *argv: str,
        script: str = "train.py",
        timeout: float = 120,
        env: dict[str, str] | None = None,
        local_world: int | None = None,
        kill: tuple[int, str, int] | None = None,
    ) -> Result:
        """Runs `script` of `project` on `world` ranks and waits for them.

        Args:
            local_world: ranks a node, for strategies that ask; by default all are on one.
            kill: (signal, path, rank): send it once `path` exists, to one rank or (-1) to all.
        """
        request = {
            "project": str(project),
            "world": world,
            "argv": list(argv),
            "script": script,
            "timeout": timeout,
            "env": env or {},
            "local_world": local_world or world,
            "kill": kill,
        }
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        answer = json.loads(self.server.stdout.readline())
        return Result(answer["codes"], answer["outputs"])


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _rank(request: dict[str, Any], rank: int, port: int, output: Path) -> None:
    """The life of one forked rank; never returns."""
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(request["world"]),
        LOCAL_RANK=str(rank % request["local_world"]),
        LOCAL_WORLD_SIZE=str(request["local_world"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        **request["env"],
    )
    os.chdir("/")
    script = Path(request["project"]) / request["script"]
    sys.argv = [str(script), *request["argv"]]
    sys.path.insert(0, request["project"])
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    port = _free_port()
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [Path(scratch) / str(rank) for rank in range(request["world"])]
        pids = []
        for rank, output in enumerate(outputs):
            pid = os.fork()
            if pid == 0:
                _rank(request, rank, port, output)
            pids.append(pid)
        codes: dict[int, int] = {}
        deadline = time.monotonic() + request["timeout"]
        kill = request["kill"]
        while len(codes) < len(pids):
            for pid in pids:
                if pid not in codes:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        codes[pid] = os.waitstatus_to_exitcode(status)
            if kill and Path(kill[1]).exists():
                for rank, pid in enumerate(pids):
                    if pid not in codes and kill[2] in (-1, rank):
                        os.kill(pid, kill[0])
                kill = None
            if time.monotonic() > deadline:
                for pid in pids:
                    if pid not in codes:
                        os.killpg(pid, signal.SIGKILL)
                deadline += 60
            time.sleep(0.01)
        return {
            "codes": [codes[pid] for pid in pids],
            "outputs": [
                path.read_text(errors="replace") if path.exists() else "" for path in outputs
            ],
        }


if __name__ == "__main__":
    # All that a project imports, once. Nothing here may start a thread: threads do not survive a fork.
    import jsonargparse  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch.distributed.elastic.multiprocessing.errors  # noqa: F401
    import tqdm  # noqa: F401

    with contextlib.suppress(ImportError):  # for images alone
        import torchvision  # noqa: F401

    for line in sys.stdin:
        answer = json.dumps(_serve(json.loads(line)))
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()
