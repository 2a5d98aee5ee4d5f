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
import signal
import socket
import statistics
import sys
import threading
import time
import uuid
from functools import partial
from typing import Any

from preflight_node import (
    END,
    HOST,
    LEAST,
    LOOK_BY,
    MEASURE_BY,
    MEET_BY,
    NNODES,
    NODE,
    NODES,
    PORT,
    PROJECT,
    Channel,
    Facts,
    Node,
    Problem,
    join,
    listen,
    now,
    resolve,
    serve,
)


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

    def add(
        self, where: str | int, check: str, bad: str | bool, fact: str, remedy: str = ""
    ) -> None:
        """Adds a check: `bad` is "warn" where it may go well all the same, or whether it failed."""
        status = "fail" if bad is True else bad or "ok"
        message = f"{fact}: {remedy}" if bad and remedy else fact
        where = self.name(where) if isinstance(where, int) else where
        self.checks.append({"name": check, "status": status, "where": where, "message": message})

    def same(self, check: str, values: dict[int, str], bad: str | bool, remedy: str) -> None:
        """Adds a check that all nodes have the same value; `bad` is what it is where they do not."""
        nodes: dict[str, list[str]] = {}
        for node, value in values.items():
            nodes.setdefault(value, []).append(self.name(node))
        if nodes:
            found = "; ".join(f"{value} on {', '.join(names)}" for value, names in nodes.items())
            self.add("all nodes", check, len(nodes) > 1 and bad, found, remedy)

    def ask(self, do: str, until: float, only: int | None = None, **more: Any) -> dict[int, Any]:
        """What each node answers; one that does not is a failed check, and is asked no more."""
        self.stage = do
        asked = {node: c for node, c in self.channels.items() if only in (None, node)}
        for channel in asked.values():
            with contextlib.suppress(OSError):  # receiving says why
                channel.send({"do": do, "with": more})
        answers = {}
        for node, channel in asked.items():
            try:
                answer = channel.receive(until)
                answers[node] = answer["answer"]
            except KeyError:
                self.add(node, do, True, answer["error"])
            except OSError as error:
                what = f"no answer to '{do}' ({error})"
                self.add(node, "network", True, what, "is it cut off, or does a disk hang there?")
                del self.channels[node]
        return answers

    def meet(self, server: socket.socket, own: Channel, hello: Facts) -> None:
        """Waits for the other nodes on MASTER_PORT."""
        self.stage, self.channels, self.hellos = "meeting", {0: own}, {0: hello}
        refusals = 0
        while len(self.channels) + refusals < NODES and now() < MEET_BY:
            server.settimeout(max(0.01, MEET_BY - now()))
            try:
                channel = Channel(server.accept()[0])
                theirs = channel.receive(now() + 3)
                node, host, refused = int(theirs["node"]), str(theirs["host"]), ""
                if theirs["nodes"] != NNODES:
                    refused = f"NNODES is {NNODES} on node 0 and {theirs['nodes']} on {host}"
                elif node in self.channels:
                    refused = f"both {self.hellos[node]['host']} and {host} have NODE_RANK={node}"
                channel.send({"refused": refused})
            except (OSError, ValueError, TypeError, KeyError):
                continue  # a passer-by, such as a port scanner
            if refused:
                refusals += 1
                self.add(host, "nodes", True, refused, "number the nodes from 0, each once")
            else:
                self.channels[node], self.hellos[node] = channel, theirs
        self.channels = dict(sorted(self.channels.items()))
        server.close()  # the ranks will need the port
        missing = sorted(set(range(NODES)) - set(self.channels))
        few = refusals > 0 or len(self.channels) < LEAST
        for node in missing:
            remedy = f"is it started, with NODE_RANK={node}? What did it print?"
            self.add(f"node {node}", "nodes", few or "warn", "did not come", remedy)
        if not missing:
            self.add("all nodes", "nodes", False, f"{NODES} of {NODES} are here")

    def run(self) -> None:
        """All questions; the ranks come last, and only where nothing has failed before."""
        self.facts = self.ask("facts", LOOK_BY + 2, seconds=LOOK_BY - now())
        for node, facts in self.facts.items():
            self.ranks += [{"host": self.hellos[node]["host"], **rank} for rank in facts["ranks"]]
            self.machine(node, facts)
        self.compare()
        self.clocks()
        self.network()
        if all("run_dir" in self.facts.get(node, {}) for node in {0, *self.channels}):
            self.storage()
        if self.ok and len(self.channels) == NODES:
            self.measure()

    def machine(self, node: int, facts: Facts) -> None:
        """What is wrong with one machine by itself."""
        add, ranks = partial(self.add, node), facts["ranks"]
        errors = [rank["error"] for rank in ranks if "error" in rank]
        if errors:
            add("ranks", True, errors[0], f"look at {facts['executable']}")
            return self.limits(node, facts, len(ranks), False)
        for name in ("options", "data"):
            # What is not prepared yet may be by the time that training starts.
            later = name == "data" and (PROJECT / "prepare.py").exists()
            problem = " ".join(facts.get(f"{name}_problem", "").split())
            add(name, problem and ("warn" if later else True), problem or "fine")
        problem = self.hellos[node]["interface"]
        there = " ".join(f"{name}={has}" for name, has in facts["interfaces"].items())
        add("interface", bool(problem), problem or "as asked for", f"choose one of {there}")

        n, gpus, gpu = len(ranks), ranks[0]["gpus"], ranks[0]["device"] != "cpu"
        fact = f"{n} rank(s), {gpus} GPU(s), backend {facts['backend']}"
        add("devices", gpu and gpus < n, fact, f"NPROC_PER_NODE can be {gpus}")
        idle = not gpu and facts["nvidia"] > 0 and "warn"
        add("devices", idle, fact, "there are NVIDIA GPUs here, and they are left idle")
        for rank in ranks:
            used = rank.get("used", 0)
            fact = f"rank {rank['rank']}: {size(used)} of its GPU are in use"
            add("devices", used > 2e9 and "warn", fact, "end what else runs there")
        self.limits(node, facts, n, gpu)

    def limits(self, node: int, facts: Facts, n: int, gpu: bool) -> None:
        """Cores, memory, open files of one machine, against what its n ranks need."""
        add = partial(self.add, node)
        workers, cores = facts.get("workers", 0), facts["cores"]
        few = cores < n * (1 + (gpu and workers > 0)) and "warn"
        fact = f"{cores} core(s) for {n} rank(s) with {workers} loader(s) each"
        add("cores", few, fact, "ask for more (--cpus-per-task)")

        # On a CPU weights, gradients and Adam's two moments of 4 bytes each; to GPUs weights pass by.
        share = facts.get("parameters", 0) * (4 if gpu else 16)
        share /= n * NODES if facts.get("sharded") else 1
        needed, memory, space = n * (6e8 + share), facts["memory"], facts["space"]
        fact = f"{size(memory)}, about {size(needed)} needed"
        add("memory", memory < needed, fact, "raise the limit (--mem), or start fewer ranks")
        if space >= 0:  # torch maps more memory than it uses, and GPUs take more than there is
            low = gpu or space < 4e9 + share
            add("limits", low, f"address space of {size(space)}", "ulimit -v unlimited")
        if facts["infiniband"] and facts["locked"] >= 0:
            add("limits", "warn", f"locked memory {size(facts['locked'])}", "ulimit -l unlimited")

        files, needed = facts["files"], 128 + 2 * n * NODES + 32 * workers
        low = files >= 0 and (files < needed or (files < 4096 and "warn"))
        add("limits", low, f"{files} open files, {needed:.0f} needed at least", "ulimit -n 65536")
        # nccl's buffers between the ranks of a node, and three batches of each loader.
        needed = n * (6e7 * (gpu and n > 1) + workers * 3 * facts.get("batch_bytes", 0))
        if (shm := facts["shm"]) is not None:
            low = shm < needed or (workers > 0 and shm < 1e9 and "warn")
            fact = f"{size(shm)} free, {size(needed)} needed at least"
            add("/dev/shm", low, fact, "docker run --shm-size=8g, or --data.workers 0")

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
            values = {n: f"{name} = {values.get(name)}" for n, values in options.items()}
            if len(set(values.values())) > 1:
                self.same("options", values, True, "give all the same config.toml and options")

    def clocks(self) -> None:
        """The clocks against node 0's: people and programs compare times of logs and files."""
        for node in list(self.channels):
            began = time.time()
            for there in self.ask("clock", now() + 3, only=node).values():
                took = time.time() - began
                off = there - began - took / 2
                fact = f"{off:+.1f} s from node 0's"
                self.add(node, "clock", abs(off) > 2 + took and "warn", fact, "start chrony")

    def network(self) -> None:
        """Connections between every two nodes, on ports that nobody knows beforehand."""
        if any(hello["interface"] for hello in self.hellos.values()):
            return
        blocked: dict[str, list[str]] = {}
        targets = {n: (self.hellos[n]["address"], self.hellos[n]["port"]) for n in self.channels}
        for node, reasons in self.ask("reach", now() + 10, targets=targets).items():
            for target, why in reasons.items():
                what = f"no connection to {self.name(int(target))}: {why}"
                blocked.setdefault(what, []).append(self.name(node))
        for what, nodes in blocked.items():
            remedy = "between the nodes all ports must be open, not MASTER_PORT alone"
            self.add(", ".join(nodes), "firewall", True, what, remedy)
        if not blocked:
            self.add("all nodes", "firewall", False, "each reaches each")

    def storage(self) -> None:
        """Is the run's folder writable, the same for all nodes, and large enough?"""
        found, facts = self.ask("folder", now() + 8, nonce=uuid.uuid4().hex), self.facts[0]
        for node, folder in found.items():
            self.add(node, "run.dir", "problem" in folder, folder.get("problem", "writable"))
        if "probe" not in found.get(0, {}):
            return
        seen = self.ask("look", now() + 5, name=found[0]["probe"])
        self.ask("forget", now() + 5)
        blind = ", ".join(self.name(node) for node, sees in seen.items() if not sees)
        bad = bool(blind) and (facts["sharded"] or "warn")
        remedy = "put it on a shared disk" + ("" if bad is True else ", or look for logs on each")
        fact = f"run.dir is {'not ' if blind else ''}the folder of node 0"
        self.add(blind or "all nodes", "shared folder", bad, fact, remedy)
        if not facts["parameters"]:
            return
        # Weights and Adam's two moments, 4 bytes each; the newest is written before the oldest goes.
        checkpoint, more = facts["parameters"] * 12, max(1, facts["keep"] + 1 - found[0]["saved"])
        fact = f"{size(found[0]['free'])} free for {more} checkpoint(s) of {size(checkpoint)}"
        low = found[0]["free"] < more * checkpoint
        self.add(0, "space", low, fact, "make room, or lower checkpoint.keep")

    def measure(self) -> None:
        """All-reduce over all ranks, transfer between nodes, and the speed of each rank."""
        answers = self.ask("measure", MEASURE_BY + 2, seconds=MEASURE_BY - now())
        results = list(itertools.chain(*answers.values()))
        failed = [result for result in results if "error" in result]
        causes = [result for result in failed if not result.get("peer")] or failed
        for error, group in itertools.groupby(causes, key=lambda result: result["error"]):
            where = f"rank {', '.join(str(result['rank']) for result in group)}"
            self.add(where, "all-reduce", True, error, "on GPUs NCCL_DEBUG=INFO tells more")
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
        for link in self.bandwidth:
            alike = [other["gb_per_s"] for other in self.bandwidth if other["kind"] == link["kind"]]
            slow = link["gb_per_s"] < statistics.median(alike) / 2 and "warn"
            fact = f"{link['gb_per_s']:.2f} GB/s"
            self.add(link["between"], "bandwidth", slow, fact, "less than half of what others have")

    def show(self, as_json: bool) -> None:
        """Prints what was found, the failed checks first."""
        order = ("fail", "warn", "ok")
        checks = sorted(self.checks, key=lambda check: order.index(check["status"]))
        facts = [{"node": n, **self.hellos[n], **f} for n, f in self.facts.items()]
        nodes = [{k: v for k, v in f.items() if k not in ("options", "ranks")} for f in facts]
        if as_json:
            found = {"ok": self.ok, "checks": checks, "nodes": nodes, "ranks": self.ranks}
            print(json.dumps({**found, "bandwidth": self.bandwidth}), flush=True)
            return
        for check in checks:
            if check["status"] != "ok":
                print("{status:4}  {name}, {where}: {message}".format(**check))
        table("node host address python torch nccl commit cores memory shm files", nodes)
        table("rank host device memory seconds", self.ranks)
        table("between gb_per_s", self.bandwidth)
        bad = {check["name"] for check in checks if check["status"] != "ok"}
        fine = dict.fromkeys(check["name"] for check in checks if check["name"] not in bad)
        print(f"\nok    {', '.join(fine)}" if fine else "")
        failed = sum(check["status"] == "fail" for check in checks)
        warned = sum(check["status"] == "warn" for check in checks)
        well = "all is well" + (f" but for {warned} warning(s)" if warned else "")
        print(f"preflight: {failed} failed" if failed else f"preflight: {well}", flush=True)


def size(number: float) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"


def table(columns: str, rows: list[Facts]) -> None:
    """Prints rows under a heading, each column as wide as it needs."""

    def text(name: str, value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.3f}"
        value = size(value) if value and name in ("memory", "shm") else value
        return "-" if value in (None, "") else str(value)

    if rows:
        names = columns.split()
        lines = [names, *([text(name, row.get(name)) for name in names] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        print()
        for line in lines:
            print("  ".join(map(str.ljust, line, widths)).rstrip())


def lead(survey: Survey, node: Node, server: socket.socket) -> None:
    """Node 0: it asks, and it is a node like any other besides."""
    ours, theirs = map(Channel, socket.socketpair())
    threading.Thread(target=serve, args=(theirs, node.handlers), daemon=True).start()
    try:
        survey.meet(server, ours, node.hello)
        if node.elsewhere:
            what = f"MASTER_ADDR={HOST} is {node.elsewhere}"
            survey.add(0, "name", "warn", what, "does another node have NODE_RANK=0?")
        survey.run()
    finally:
        for channel in survey.channels.values():
            with contextlib.suppress(OSError):
                channel.send({"do": "end", "ok": survey.ok})


def main(options: list[str]) -> int:
    as_json = "--json" in options
    options = [option for option in options if option != "--json"]
    survey, me, ok = Survey(), f"node {NODE} ({socket.gethostname()})", True
    node: Node | None = None

    def give_up() -> None:
        survey.add(me, "time", True, f"not done after a minute, but at '{survey.stage}'")
        survey.show(as_json)
        for rank in node.ranks if node else []:
            rank.process.kill()
        os._exit(1)

    alarm = threading.Timer(END - now(), give_up)
    alarm.daemon = True
    alarm.start()
    try:
        family, address = resolve()
        server = listen(family, PORT) if NODE == 0 else None
        node = Node(family, address)
        if server:
            node.start_ranks(server.getsockname()[1], options)
            lead(survey, node, server)
        else:
            survey.stage = "joining node 0"
            channel = join(address, node.hello, node.source)
            survey.stage = "answering node 0"
            node.start_ranks(PORT, options)
            ok = serve(channel, node.handlers)
    except Problem as problem:
        survey.add(me, problem.args[0], True, *problem.args[1:])
    except OSError as error:
        survey.add(me, "network", True, f"lost node 0 ({error})", "see what it printed")
    finally:
        if node:
            node.end()
    if NODE == 0 or survey.checks:
        survey.show(as_json)
    elif not ok:
        print(f"preflight: {me}: node 0 says what is wrong", file=sys.stderr)
    return 0 if ok and survey.ok else 1


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(1))
    sys.exit(main(sys.argv[1:]))
