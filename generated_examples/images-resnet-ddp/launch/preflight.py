"""Looks for what would fail or hang, within a minute: `bash launch/local.sh --preflight [--json]`.

Every launch script starts this once on each node, with the topology in the environment and the
options of train.py. Node 0 listens on MASTER_PORT, asks all nodes one question after the other and
prints what it found, the failed checks first. Another node speaks only where it cannot reach node 0.
Exit status 1 where a check failed.
"""

import contextlib
import itertools
import json
import os
import queue
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import preflight_node as given
from preflight_node import Channel, Facts, Node, Problem, join, listen, now, resolve, serve


class Survey:
    """Node 0's questions to all nodes, and what it makes of the answers."""

    def __init__(self) -> None:
        self.stage = "resolving MASTER_ADDR"
        self.checks: list[Facts] = []
        self.channels: dict[int, Channel] = {}
        self.hellos: dict[int, Facts] = {}
        self.facts: dict[int, Facts] = {}
        self.ranks: list[Facts] = []
        self.bandwidth: list[Facts] = []

    @property
    def ok(self) -> bool:
        return all(check["status"] != "fail" for check in self.checks)

    def name(self, node: int) -> str:
        return f"node {node} ({self.hellos[node]['host']})"

    def add(self, of: str | int, check: str, bad: str | bool, fact: str, remedy: str = "") -> None:
        """Adds a check: `bad` is "warn" where it may go well all the same, or whether it failed."""
        status = "fail" if bad is True else bad or "ok"
        message = f"{fact}: {remedy}" if bad and remedy else fact
        where = self.name(of) if isinstance(of, int) else of
        self.checks.append({"name": check, "status": status, "where": where, "message": message})

    def same(self, check: str, values: dict[int, str], bad: str | bool, remedy: str) -> None:
        """Adds a check that all nodes have the same value; `bad` is what it is where they do not."""
        if found := grouped((value, self.name(node)) for node, value in values.items()):
            fact = "; ".join(f"{value} on {names}" for value, names in found.items())
            self.add("all nodes", check, len(found) > 1 and bad, fact, remedy)

    def ask(self, check: str, until: float, **more: Any) -> dict[int, Any]:
        """What each node answers; one that does not is a failed check, and is asked no more."""
        self.stage = check
        for channel in self.channels.values():
            with contextlib.suppress(OSError):  # receiving says why
                channel.send({"do": check, "with": more})
        answers = {}
        for node, channel in list(self.channels.items()):
            try:
                answer = channel.receive(until)
                answers[node] = answer["answer"]
            except KeyError:
                self.add(node, check, True, answer["error"])
            except OSError as error:
                what = f"no answer about {check} ({error})"
                self.add(node, "network", True, what, "is it cut off, or does a disk hang there?")
                del self.channels[node]
        return answers

    def meet(self, server: socket.socket, own: Channel, hello: Facts) -> None:
        """Waits for the other nodes on MASTER_PORT."""
        self.stage, self.channels, self.hellos = "meeting", {0: own}, {0: hello}
        came: queue.SimpleQueue[tuple[Channel, Facts]] = queue.SimpleQueue()

        def hear(connection: socket.socket) -> None:
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # a passer-by
                channel = Channel(connection)
                said = channel.receive(given.MEET_BY)
                theirs = {name: said[name] for name in hello}
                came.put((channel, theirs | {"off": said["time"] - time.time()}))

        refusals = 0
        server.settimeout(0.05)
        while len(self.channels) + refusals < given.NODES and now() < given.MEET_BY:
            with contextlib.suppress(OSError):  # a thread each: some who connect say nothing
                threading.Thread(target=hear, args=server.accept()[:1], daemon=True).start()
            while not came.empty():
                channel, theirs = came.get()
                node, host, refused = theirs["node"], theirs["host"], ""
                if len({"", theirs["launch"], hello["launch"]}) > 2:
                    refused = f"{host} is of another launch, with the same MASTER_PORT"
                elif theirs["nodes"] != given.NNODES:
                    refused = f"NNODES is {given.NNODES} on node 0 and {theirs['nodes']} on {host}"
                elif node in self.channels:
                    refused = f"both {self.hellos[node]['host']} and {host} have NODE_RANK={node}"
                else:
                    self.channels[node], self.hellos[node] = channel, theirs
                with contextlib.suppress(OSError):  # gone already: the first question shows it
                    channel.send({"refused": refused})
                if refused:
                    refusals += 1
                    self.add(host, "nodes", True, refused, "number the nodes from 0, each once")
        self.channels = dict(sorted(self.channels.items()))
        server.close()  # the ranks will need the port
        few = refusals > 0 or len(self.channels) < given.LEAST
        for node in sorted(set(range(given.NODES)) - set(self.channels)):
            fact = f"did not come within {given.MEET_BY - given.START:.0f} s"
            remedy = f"is it started, with NODE_RANK={node}? What did it print?"
            self.add(f"node {node}", "nodes", few or "warn", fact, remedy)
        self.add("all nodes", "nodes", False, f"{len(self.channels)} of {given.NODES} are here")

    def run(self) -> None:
        """All questions; the ranks come last, and only where nothing has failed before."""
        self.facts = self.ask("machine", given.LOOK_BY + 2, seconds=given.LOOK_BY - now())
        for node, facts in self.facts.items():
            for rank in facts["ranks"]:
                rank.pop("said", "")
                self.ranks.append({"host": self.hellos[node]["host"], **rank})
            self.limits(node, facts)
            self.machine(node, facts)
        self.compare()
        self.network()
        if all("run_dir" in self.facts.get(node, {}) for node in {0, *self.channels}):
            self.storage()
        if self.ok and len(self.channels) == given.NODES:
            self.measure()
        elif self.ok:
            self.add("all nodes", "all-reduce", "warn", "not measured: a node is missing")

    def machine(self, node: int, facts: Facts) -> None:
        """What is wrong with one machine by itself."""
        add, ranks = partial(self.add, node), facts["ranks"]
        for error, who in errors(ranks).items():
            add("ranks", True, f"{who} of {facts['executable']}: {error}")
        if errors(ranks):
            return
        for name in ("options", "data"):
            bad, problem = facts.get(f"{name}_problem", (False, "fine"))
            add(name, bad, " ".join(problem.split()))
        off = self.hellos[node].get("off", 0.0)  # people and programs compare times of logs
        add("clock", abs(off) > 2 and "warn", f"{off:+.1f} s from node 0's", "start chrony")
        problem = self.hellos[node]["interface"]
        there = " ".join(f"{name}={has}" for name, has in facts["interfaces"].items())
        add("interface", bool(problem), problem or "as asked for", f"choose one of {there}")

        n, gpus, gpu = len(ranks), ranks[0]["gpus"], ranks[0]["device"] != "cpu"
        fact = f"{n} rank(s), {gpus} GPU(s), backend {facts['backend']}"
        add("devices", gpu and gpus < n, fact, f"NPROC_PER_NODE can be {gpus}")
        for rank in ranks:
            used = rank.get("used", 0)
            fact = f"rank {rank['rank']}: {size(used)} of its GPU are in use"
            add("devices", used > 2e9 and "warn", fact, "end what else runs there")

    def limits(self, node: int, facts: Facts) -> None:
        """Cores, memory, open files of one machine: what its ranks need is guessed."""
        add, n = partial(self.add, node), len(facts["ranks"])
        gpu = any(rank.get("device", "cpu") != "cpu" for rank in facts["ranks"])
        workers, cores = facts.get("workers", 0), facts["cores"]
        few = cores < n * (1 + (gpu and workers > 0)) and "warn"
        fact = f"{cores} core(s) for {n} rank(s) with {workers} loader(s) each"
        add("cores", few, fact, "ask for more (--cpus-per-task)")

        # On a CPU weights, gradients and Adam's two moments of 4 bytes each; to GPUs weights pass by.
        needed = 6e8 * n + facts.get("parameters", 0) * (4 if gpu else 16)
        fact = f"{size(facts['memory'])}, about {size(needed)} needed"
        low = facts["memory"] < needed
        add("memory", low and "warn", fact, "raise the limit (--mem), or start fewer ranks")
        if (space := facts["space"]) >= 0:  # torch maps more than it uses, and GPUs all there is
            add("limits", "warn", f"address space of {size(space)}", "ulimit -v unlimited")
        if facts["infiniband"] and facts["locked"] >= 0:
            add("limits", "warn", f"locked memory {size(facts['locked'])}", "ulimit -l unlimited")
        low = 0 <= facts["files"] < max(4096, 4 * n * given.NODES)
        add("limits", low and "warn", f"{facts['files']} open files", "ulimit -n 65536")
        if (shm := facts["shm"]) is not None:
            low = shm < 1e9 and (gpu or workers > 0)
            remedy = "loaders and nccl crash without: docker run --shm-size=8g, or --data.workers 0"
            add("/dev/shm", low and "warn", f"{size(shm)} free", remedy)

    def compare(self) -> None:
        """What must be the same on all nodes."""
        facts = {node: f for node, f in self.facts.items() if "code" in f}
        for name in ("python", "torch", "nccl", "backend"):
            bad = "warn" if name == "python" else True
            self.same(name, {n: f[name] for n, f in facts.items()}, bad, "have one for all nodes")
        ranks = {n: f"{len(f['ranks'])} rank(s)" for n, f in facts.items()}
        self.same("ranks", ranks, True, "start as many on each node")
        gpus = {n: f"{f['ranks'][0]['gpus']} GPU(s)" for n, f in facts.items()}
        self.same("devices", gpus, "warn", "is one broken, or hidden?")
        code = {n: f"{f['commit'] or 'no commit'} (code {f['code'][:8]})" for n, f in facts.items()}
        differ = len({f["code"] for f in facts.values()}) > 1
        self.same("code", code, differ or "warn", "bring all nodes to one commit")
        options = {n: f["options"] for n, f in facts.items() if "options" in f}
        for name in sorted({name for values in options.values() for name in values}):
            values = {n: f"{name} = {has[name]}" for n, has in options.items() if name in has}
            if len(set(values.values())) > 1:
                self.same("options", values, True, "give all the same config.toml and options")

    def network(self) -> None:
        """Connections between every two nodes, on ports that nobody knows beforehand."""
        if any(hello["interface"] for hello in self.hellos.values()):
            return
        targets = {n: (self.hellos[n]["address"], self.hellos[n]["port"]) for n in self.channels}
        answers = self.ask("firewall", now() + 10, targets=targets)
        blocked = grouped(
            (f"no connection to {self.name(int(target))}: {why}", self.name(node))
            for node, reasons in answers.items()
            for target, why in reasons.items()
        )
        remedy = "between the nodes all ports must be open, not MASTER_PORT alone"
        for what, names in [*blocked.items()][:8] or [("each reaches each", "all nodes")]:
            self.add(names, "firewall", bool(blocked), what, remedy)
        if len(blocked) > 8:
            self.add("all nodes", "firewall", True, f"{len(blocked)} nodes are cut off")

    def storage(self) -> None:
        """Is the run's folder writable, the same for all nodes, and large enough?"""
        found, facts = self.ask("run.dir", now() + 8, nonce=time.time_ns()), self.facts[0]
        for node, folder in found.items():
            self.add(node, "run.dir", "problem" in folder, folder.get("problem", "writable"))
        if "probe" not in found.get(0, {}):
            return
        seen = self.ask("shared folder", now() + 5, name=found[0]["probe"])
        self.ask("clean-up", now() + 5)  # all of them, before one removes a folder
        blind = some([self.name(node) for node, sees in seen.items() if not sees])
        bad = bool(blind) and (facts["sharded"] or "warn")
        remedy = "put it on a shared disk" + ("" if bad is True else ", or look for logs on each")
        fact = f"run.dir is {'not ' if blind else ''}the folder of node 0"
        self.add(blind or "all nodes", "shared folder", bad, fact, remedy)
        # Weights and Adam's two moments, 4 bytes each; the newest is written before the oldest goes.
        checkpoint, free = facts["parameters"] * 12, found[0]["free"]
        low = free < checkpoint or (free < checkpoint * (facts["keep"] + 1) and "warn")
        fact = f"{size(free)} free (quotas are not seen), a checkpoint takes {size(checkpoint)}"
        remedy = f"make room, or lower checkpoint.keep, {facts['keep']} now"
        self.add(0, "space", bool(checkpoint) and low, fact, remedy)

    def measure(self) -> None:
        """All-reduce over all ranks, transfer between nodes, and the speed of each rank."""
        until = given.MEASURE_BY
        answers = self.ask("all-reduce", until + 2, seconds=until - now())
        results = list(itertools.chain(*answers.values()))
        failed = [result for result in results if "error" in result]
        causes = [result for result in failed if not result.get("peer")] or failed
        for error, who in [*errors(causes).items()][:8]:
            first = next(result for result in causes if result["error"] == error)
            check, bad = first.get("check", "all-reduce"), first.get("bad", True)
            remedy = "" if "check" in first else "on GPUs NCCL_DEBUG=INFO tells more"
            self.add(who, check, bad, error, remedy)
            print(f"rank {first['rank']}:", *first.get("said", []), sep="\n  ", file=sys.stderr)
        if failed or not self.ok:
            return
        typical = statistics.median_low(result["seconds"] for result in results)
        for rank, result in zip(self.ranks, results, strict=True):
            where = f"rank {rank['rank']} ({rank['host']})"
            self.add(where, "all-reduce", result["wrong"] > 0, f"{result['wrong']} wrong sums")
            rank["seconds"], times = result["seconds"], result["seconds"] / typical
            fact = f"takes {times:.1f} times as long as others for the same work"
            self.add(where, "speed", times > 1.5 and "warn", fact, "is it busy, hot or shared?")
            self.bandwidth += result["links"]
        best = max((link["gb_per_s"] for link in self.bandwidth[1:]), default=0.0)
        for link in self.bandwidth[1:]:  # between two nodes
            slow, fact = link["gb_per_s"] < best / 2 and "warn", f"{link['gb_per_s']:.2f} GB/s"
            self.add(link["between"], "bandwidth", slow, fact, "less than half of the best")

    def show(self, as_json: bool) -> None:
        """Prints what was found, the failed checks first."""
        order = ("fail", "warn", "ok")
        checks = sorted(self.checks, key=lambda check: order.index(check["status"]))
        facts = [{"node": n, **self.hellos[n], **f} for n, f in self.facts.items()]
        nodes = [{k: v for k, v in f.items() if k not in ("options", "ranks")} for f in facts]
        found = {"ok": self.ok, "checks": checks, "nodes": nodes, "ranks": self.ranks}
        found["bandwidth"] = self.bandwidth
        try:
            print(json.dumps(found) if as_json else report(found), flush=True)
        except BrokenPipeError:  # | head
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def report(found: Facts) -> str:
    """What people read: what is not well, tables, and what is."""
    checks, nodes = found["checks"], found["nodes"]
    bad = [check for check in checks if check["status"] != "ok"]
    lines = ["{status:4}  {name}, {where}: {message}".format(**check) for check in bad]
    lines += table("node host address python torch nccl commit cores memory shm files", nodes)
    lines += table("rank host device memory seconds", found["ranks"])
    lines += table("between gb_per_s", found["bandwidth"])
    fine = sorted({check["name"] for check in checks} - {check["name"] for check in bad})
    lines += ["", f"ok    {', '.join(fine)}"] if fine else []
    failed = sum(check["status"] == "fail" for check in bad)
    end = "all is well" + (f" but for {len(bad)} warning(s)" if bad else "")
    return "\n".join([*lines, f"preflight: {f'{failed} failed' if failed else end}"])


def some(names: list[str]) -> str:
    """The names, or the first of very many."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Who has each value, the rarest value first."""
    found: dict[str, list[str]] = {}
    for value, name in pairs:
        found.setdefault(value, []).append(name)
    rarest_first = sorted(found.items(), key=lambda item: len(item[1]))
    return {value: some(names) for value, names in rarest_first}


def errors(ranks: list[Facts]) -> dict[str, str]:
    return grouped((rank["error"], f"rank {rank['rank']}") for rank in ranks if "error" in rank)


def size(number: float) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"


def table(columns: str, rows: list[Facts]) -> list[str]:
    """Rows under a heading, each column as wide as it needs."""

    def text(name: str, value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.3f}"
        value = size(value) if value and name in ("memory", "shm") else value
        return "-" if value in (None, "") else str(value)

    names = columns.split()
    lines = [names, *([text(name, row.get(name)) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    told = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return ["", *told] if rows else []


def lead(survey: Survey, node: Node, server: socket.socket) -> None:
    """Node 0: it asks, and it is a node like any other besides."""
    ours, theirs = map(Channel, socket.socketpair())
    threading.Thread(target=serve, args=(theirs, node.handlers), daemon=True).start()
    try:
        survey.meet(server, ours, node.hello)
        if node.elsewhere:
            remedy = "does another node have NODE_RANK=0?"
            survey.add(0, "name", "warn", node.elsewhere, remedy)
        survey.run()
    finally:
        for channel in survey.channels.values():
            with contextlib.suppress(OSError):
                channel.send({"do": "end", "ok": survey.ok})


def main(options: list[str]) -> int:
    as_json = "--json" in options
    options = [option for option in options if option != "--json"]
    survey, me, ok = Survey(), f"node {given.NODE} ({socket.gethostname()})", True
    node: Node | None = None

    def give_up() -> None:
        survey.add(me, "time", True, f"not done after a minute, but at '{survey.stage}'")
        try:
            survey.show(as_json)
            for rank in node.ranks if node else []:
                rank.process.kill()
        finally:
            os._exit(1)

    alarm = threading.Timer(given.END - now(), give_up)
    alarm.daemon = True
    alarm.start()
    try:
        family, address = resolve()
        server = listen(family, given.PORT) if given.NODE == 0 else None
        node = Node(family, address)
        if server:
            node.start_ranks(server.getsockname()[1], options)
            lead(survey, node, server)
        else:
            survey.stage = "joining node 0"
            channel = join(address, node.hello, node.source)
            survey.stage = "answering node 0"
            node.start_ranks(given.PORT, options)
            ok = serve(channel, node.handlers)
    except Problem as problem:
        survey.add(me, problem.args[0], True, *problem.args[1:])
    except OSError as error:
        survey.add(me, "network", True, f"lost node 0 ({error})", "see what it printed")
    finally:
        if node:
            node.end()
    if given.NODE == 0 or survey.checks:
        survey.show(as_json)
    elif not ok:
        print(f"preflight: {me}: node 0 says what is wrong", file=sys.stderr)
    return 0 if ok and survey.ok else 1


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(1))
    sys.exit(main(sys.argv[1:]))
