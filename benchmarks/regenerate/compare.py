"""What copier, cruft and scaffold do to edited projects when an answer changes, and how long it takes.

Run by hand, in an environment that has scaffold's own dependencies:

    python benchmarks/regenerate/compare.py [--turns 9]

Installs copier and cruft from PyPI into build/regenerate-env, makes the same template for each out of
what scaffold generates, plays the same situations, and prints two Markdown tables.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from scaffold.answers import Answers  # noqa: E402
from scaffold.render import File, render  # noqa: E402

Values = Mapping[str, str]

START = {"nodes": "1", "strategy": "ddp", "data": "text"}
OTHER = {"nodes": "2", "strategy": "fsdp", "data": "synthetic"}
GIT = {
    **{f"GIT_{who}_NAME": "Ada" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "ada@example.org" for who in ("AUTHOR", "COMMITTER")},
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=9, help="measurements of each tool")
    parser.add_argument("-v", action="store_true", help="also what the tools print")
    turns = parser.parse_args().turns
    bin_folder = install(REPO / "build" / "regenerate-env")
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        os.environ.update(GIT, HOME=str(place), OMP_NUM_THREADS="1")
        tools = [Copier(place, bin_folder), Cruft(place, bin_folder), Scaffold(place, bin_folder)]
        for tool in tools:
            tool.prepare()
        print(f"| situation | {' | '.join(tool.version() for tool in tools)} |")
        print("|---|" + "---|" * len(tools))
        for situation in SITUATIONS:
            cells = [play(situation, tool) for tool in tools]
            print(f"| {situation.title} | {' | '.join(cells)} |", flush=True)
        print()
        measure(tools, turns)


def install(folder: Path) -> Path:
    """The folder of programs of an environment of their own."""
    if not (folder / "bin" / "cruft").exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", "copier", "cruft"]
        subprocess.run(pip, check=True)
    return folder / "bin"


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
    )


def must(*command: object, cwd: Path) -> None:
    done = run(*command, cwd=cwd)
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stdout}{done.stderr}")


def commit(project: Path) -> None:
    must("git", "add", "-A", cwd=project)
    must("git", "commit", "-q", "--allow-empty", "-m", "mine", cwd=project)


# --- the tools ----------------------------------------------------------------------------------


class Tool:
    """One generator with its template and a pristine project, in a folder of its own."""

    name: str
    answers_file: str
    program: tuple[object, ...]

    def __init__(self, place: Path, bin_folder: Path) -> None:
        self.place, self.bin_folder = place / self.name, bin_folder
        self.template, self.pristine = self.place / "template", self.place / "demo"
        self.place.mkdir()

    def prepare(self) -> None:
        """Makes the template and a project of it, committed to git."""
        self.make_template()
        self.generate()
        must("git", "init", "-q", "-b", "main", cwd=self.pristine)
        commit(self.pristine)

    def version(self) -> str:
        raise NotImplementedError

    def make_template(self) -> None:
        raise NotImplementedError

    def generate(self) -> None:
        raise NotImplementedError

    def update(self, project: Path, changes: Values) -> subprocess.CompletedProcess[str]:
        """Asks for other answers, or with none for what the answers file says."""
        raise NotImplementedError

    def answers(self, project: Path) -> dict[str, str]:
        """What the answers file says now."""
        raise NotImplementedError

    def pip_version(self) -> str:
        code = f"from importlib.metadata import version; print(version('{self.name}'))"
        done = run(self.bin_folder / "python", "-c", code, cwd=self.place)
        return f"{self.name} {done.stdout.strip()}"


class Copier(Tool):
    name, answers_file = "copier", ".copier-answers.yml"

    def version(self) -> str:
        return self.pip_version()

    def make_template(self) -> None:
        write_template(self.template, "")
        questions = "".join(f"{k}:\n  type: str\n  default: '{v}'\n" for k, v in START.items())
        (self.template / "copier.yml").write_text(f"_templates_suffix: ''\n{questions}")
        answers = "{{ _copier_answers|to_nice_yaml }}"
        (self.template / "{{ _copier_conf.answers_file }}").write_text(answers)
        must("git", "init", "-q", "-b", "main", cwd=self.template)
        commit(self.template)
        must("git", "tag", "1.0.0", cwd=self.template)

    def generate(self) -> None:
        copier = self.bin_folder / "copier"
        must(copier, "copy", "-q", "--defaults", self.template, self.pristine, cwd=self.place)

    def update(self, project: Path, changes: Values) -> subprocess.CompletedProcess[str]:
        data = [word for key, value in changes.items() for word in ("-d", f"{key}={value}")]
        return run(self.bin_folder / "copier", "update", "--defaults", *data, cwd=project)

    def answers(self, project: Path) -> dict[str, str]:
        lines = (project / self.answers_file).read_text().splitlines()
        pairs = [line.partition(": ") for line in lines if ": " in line]
        return {key: value.strip("'") for key, _, value in pairs if key in START}


class Cruft(Tool):
    name, answers_file = "cruft", ".cruft.json"

    def version(self) -> str:
        return self.pip_version()

    def make_template(self) -> None:
        write_template(self.template / "{{cookiecutter.slug}}", "cookiecutter.")
        (self.template / "cookiecutter.json").write_text(json.dumps({"slug": "demo", **START}))
        must("git", "init", "-q", "-b", "main", cwd=self.template)
        commit(self.template)

    def generate(self) -> None:
        must(self.bin_folder / "cruft", "create", "-y", self.template, cwd=self.place)

    def update(self, project: Path, changes: Values) -> subprocess.CompletedProcess[str]:
        data = ["--variables-to-update", json.dumps(dict(changes))] if changes else []
        return run(self.bin_folder / "cruft", "update", "-y", *data, cwd=project)

    def answers(self, project: Path) -> dict[str, str]:
        context = json.loads((project / self.answers_file).read_text())["context"]["cookiecutter"]
        return {key: context[key] for key in START}


class Scaffold(Tool):
    name, answers_file = "scaffold", "scaffold.toml"

    def version(self) -> str:
        return "scaffold"

    def make_template(self) -> None:
        os.environ["PYTHONPATH"] = str(REPO)

    def generate(self) -> None:
        flags = [word for key, value in START.items() for word in (f"--{key}", value)]
        must(sys.executable, "-m", "scaffold", "new", "demo", "--yes", *flags, cwd=self.place)

    def update(self, project: Path, changes: Values) -> subprocess.CompletedProcess[str]:
        flags = [word for key, value in changes.items() for word in (f"--{key}", value)]
        return run(sys.executable, "-m", "scaffold", "regenerate", *flags, cwd=project)

    def answers(self, project: Path) -> dict[str, str]:
        lines = (project / self.answers_file).read_text().splitlines()
        pairs = [line.partition(" = ") for line in lines]
        return {key: value.split("#")[0].strip(' "') for key, _, value in pairs if key in START}


def write_template(folder: Path, prefix: str) -> None:
    """A Jinja template with the files that scaffold generates for every mixture of the answers."""
    keys = list(START)
    trees: dict[tuple[str, ...], Mapping[str, File]] = {}
    for choice in itertools.product(*((START[key], OTHER[key]) for key in keys)):
        values = dict(zip(keys, choice, strict=True))
        trees[choice] = render(
            Answers.of({"name": "demo", "model": "gpt", **values, "nodes": int(values["nodes"])})
        )
    for path in sorted({path for tree in trees.values() for path in tree} - {"scaffold.toml"}):
        text, name = _conditional(path, trees, keys, prefix)
        here = folder / Path(path).parent / name
        here.parent.mkdir(parents=True, exist_ok=True)
        here.write_text(text)
        executable = any(path in tree and tree[path].executable for tree in trees.values())
        here.chmod(0o755 if executable else 0o644)


def _conditional(
    path: str, trees: Mapping[tuple[str, ...], Mapping[str, File]], keys: list[str], prefix: str
) -> tuple[str, str]:
    """The text of one template file, and its name: empty where the answers want no such file."""
    by_text: dict[str | None, list[tuple[str, ...]]] = {}
    for choice, tree in trees.items():
        content = tree[path].content.decode() if path in tree else None
        by_text.setdefault(content, []).append(choice)
    text, name = "", Path(path).name
    for position, (content, choices) in enumerate(by_text.items()):
        tests = (
            " and ".join(f"{prefix}{k} == '{v}'" for k, v in zip(keys, choice, strict=True))
            for choice in choices
        )
        condition = " or ".join(f"({test})" for test in tests)
        if content is None:
            (key,) = (k for n, k in enumerate(keys) if len({choice[n] for choice in choices}) == 1)
            off = choices[0][keys.index(key)]
            name = f"{{% if {prefix}{key} != '{off}' %}}{name}{{% endif %}}"
        elif len(by_text) == 1:
            text = f"{{% raw %}}{content}{{% endraw %}}"
        else:
            word = "elif" if position and text else "if"
            text += f"{{% {word} {condition} %}}{{% raw %}}{content}{{% endraw %}}"
    return text + "{% endif %}" * (len(by_text) > 1), name


# --- the situations -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Situation:
    """An edit, the answers that change, and what should be true afterwards."""

    title: str
    edit: Callable[[Path], None]
    changes: Values
    mine: tuple[str, bytes] | None = None  # a file, and bytes of the person's that belong there
    gone: str = ""  # a file that the person deleted
    news: tuple[str, bytes] | None = None  # a file, and bytes that the new answers bring
    git: bool = True
    commit: bool = True
    by_hand: bool = False  # the answers are changed in their file


def swap(project: Path, path: str, old: str, new: str) -> None:
    here = project / path
    text = here.read_text()
    assert old in text, (path, old)
    here.write_text(text.replace(old, new, 1))


MARK = "# Ada was here"


def edit_first_line(project: Path) -> None:
    text = (project / "demo/parallel.py").read_text()
    (project / "demo/parallel.py").write_text(
        f'"""My strategy."""  {MARK}\n' + text.split("\n", 1)[1]
    )


def edit_nnodes(project: Path) -> None:
    swap(project, "launch/topology.env", "NNODES:=1}", "NNODES:=3}")


def edit_neighbour(project: Path) -> None:
    swap(project, "launch/topology.env", "GPUS_PER_NODE:=2}", "GPUS_PER_NODE:=7}")


def edit_train(project: Path) -> None:
    swap(project, "train.py", "import math\n", f"import math  {MARK}\n")


def edit_prepare(project: Path) -> None:
    swap(project, "prepare.py", "import ", f"{MARK}\nimport ")


def move(project: Path) -> None:
    text = (project / "demo/parallel.py").read_text()
    (project / "demo/spread.py").write_text(f"{text}\n\n{MARK}\n")
    (project / "demo/parallel.py").unlink()


def remove(project: Path) -> None:
    (project / "README.md").unlink()


def crlf(project: Path) -> None:
    swap(project, "config.toml", "seed = 0 ", "seed = 7 ")
    content = (project / "config.toml").read_bytes()
    (project / "config.toml").write_bytes(content.replace(b"\n", b"\r\n"))


def binary(project: Path) -> None:
    """As a Windows shell's `>` writes it; git takes it for a binary file."""
    (project / "README.md").write_text("My own words.\n", encoding="utf-16")


NODES, STRATEGY = {"nodes": "2"}, {"strategy": "fsdp"}
NEW_NODES = ("launch/topology.env", b"NNODES:=2}")
NEW_STRATEGY = ("demo/parallel.py", b"fully_shard(")
MINE = MARK.encode()

SITUATIONS = (
    Situation(
        "a line edited, and changed by the answer too (Python)",
        edit_first_line,
        STRATEGY,
        ("demo/parallel.py", MINE),
        news=NEW_STRATEGY,
    ),
    Situation(
        "the same in a file that jobs read (`topology.env`)",
        edit_nnodes,
        NODES,
        ("launch/topology.env", b"NNODES:=3}"),
        news=("launch/topology.env", b"NNODES:=2}"),
    ),
    Situation(
        "the line beside it edited",
        edit_neighbour,
        NODES,
        ("launch/topology.env", b"GPUS_PER_NODE:=7}"),
        news=NEW_NODES,
    ),
    Situation(
        "a project that is not in git",
        edit_train,
        NODES,
        ("train.py", MINE),
        news=NEW_NODES,
        git=False,
    ),
    Situation(
        "not in git, and an edited line changes too",
        edit_nnodes,
        NODES,
        ("launch/topology.env", b"NNODES:=3}"),
        news=NEW_NODES,
        git=False,
    ),
    Situation(
        "an edit not yet committed",
        edit_train,
        NODES,
        ("train.py", MINE),
        news=NEW_NODES,
        commit=False,
    ),
    Situation(
        "a file renamed and edited, then its content changes",
        move,
        STRATEGY,
        ("demo/spread.py", MINE),
        news=("demo/spread.py", b"fully_shard("),
    ),
    Situation(
        "a file edited, then switched off by the answer",
        edit_prepare,
        {"data": "synthetic"},
        ("prepare.py", MINE),
    ),
    Situation("a file deleted, then its content changes", remove, STRATEGY, gone="README.md"),
    Situation(
        "a file saved with CRLF, with an edit elsewhere in it",
        crlf,
        STRATEGY,
        ("config.toml", b"seed = 7"),
        news=("config.toml", b"reshard"),
    ),
    Situation(
        "a file replaced by a binary, the template's unchanged",
        binary,
        NODES,
        ("README.md", "own".encode("utf-16-le")),
        news=NEW_NODES,
    ),
    Situation(
        "the answers file edited by hand",
        edit_train,
        NODES,
        ("train.py", MINE),
        news=NEW_NODES,
        by_hand=True,
    ),
)


def play(situation: Situation, tool: Tool) -> str:
    """What came of it, in words."""
    project = tool.place / "played" / "demo"
    shutil.rmtree(project, ignore_errors=True)
    shutil.copytree(tool.pristine, project, symlinks=True)
    situation.edit(project)
    changes = situation.changes
    if situation.by_hand:
        here = project / tool.answers_file
        text = here.read_text()
        for line in text.splitlines(keepends=True):
            if "nodes" in line and "per-node" not in line and "#" not in line:
                text = text.replace(line, line.replace("1", changes["nodes"]))
        here.write_text(text)
        assert tool.answers(project)["nodes"] == changes["nodes"]
        changes = {}
    if not situation.git:
        shutil.rmtree(project / ".git")
    elif situation.commit:
        commit(project)
    before = snapshot(project)
    done = tool.update(project, changes)
    note = judged(situation, tool, project, before)
    if "-v" in sys.argv:
        print(situation.title, tool.name, done.stdout, done.stderr, file=sys.stderr)
    # A second command, where a moved file is named but not touched before one says so.
    if tool.name == "scaffold" and "--follow-renames" in done.stdout:
        done_2 = run(
            sys.executable, "-m", "scaffold", "regenerate", "--follow-renames", cwd=project
        )
        first = f"named, asks for `--follow-renames`, exit {done.returncode}"
        return f"{first}; then {judged(situation, tool, project, before)}, exit {done_2.returncode}"
    return f"{note}, exit {done.returncode}"


def snapshot(project: Path) -> dict[str, bytes]:
    return {
        path.relative_to(project).as_posix(): path.read_bytes()
        for path in sorted(project.rglob("*"))
        if path.is_file() and not {".git", "local", ".scaffold"} & {*path.parts}
    }


def judged(situation: Situation, tool: Tool, project: Path, before: dict[str, bytes]) -> str:
    after = snapshot(project)
    wanted = {**START, **situation.changes}
    if after == before and (situation.by_hand or tool.answers(project) != wanted):
        return "**nothing happens**" if situation.by_hand else "refused"
    words = []
    marked = [path for path, content in after.items() if b"<<<<<<< " in content]
    beside = [path for path in after if path.endswith((".scaffold-new", ".rej"))]
    if situation.mine:
        path, mine = situation.mine
        if mine not in after.get(path, b""):
            words.append("**your edit is lost**" if path in after else "**your file is deleted**")
        elif not marked and not beside:
            words.append("kept")
    if situation.gone:
        words.append("comes back" if situation.gone in after else "stays deleted")
    if marked:
        jobs = any(not path.endswith((".py", ".md")) for path in marked)
        words.append(f"markers in {'**' if jobs else ''}{', '.join(marked)}{'**' if jobs else ''}")
    if beside:
        what = "hunks rejected" if beside[0].endswith(".rej") else "kept, new one beside"
        words.append(f"{what}: {', '.join(beside)}")
    if situation.news and not marked and not beside:
        path, news = situation.news
        if news in after.get(path, b""):
            words.append("new values arrive")
        else:
            words.append("**new values do not arrive**")
    if beside and any(path.endswith(".rej") for path in beside):
        words.append("**answers claim it is applied**" * (tool.answers(project) == wanted))
    ends = {path: after[path].count(b"\r\n") / max(1, after[path].count(b"\n")) for path in after}
    if "CRLF" in situation.title and 0 < ends["config.toml"] < 1:
        words.append("**line ends mixed**")
    elif "CRLF" in situation.title and ends["config.toml"] == 0:
        words.append("line ends rewritten")
    return ", ".join(word for word in words if word)


# --- the time -----------------------------------------------------------------------------------


def measure(tools: list[Tool], turns: int) -> None:
    """Prints how long an update of an edited project takes, the tools in turns."""
    case = replace(SITUATIONS[0], edit=edit_train, changes={**NODES, **STRATEGY})
    times: dict[str, list[tuple[float, float]]] = {tool.name: [] for tool in tools}
    for _ in range(turns + 1):
        for tool in tools:
            project = tool.place / "timed" / "demo"
            shutil.rmtree(project, ignore_errors=True)
            shutil.copytree(tool.pristine, project, symlinks=True)
            case.edit(project)
            commit(project)
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            done = tool.update(project, case.changes)
            wall = time.perf_counter() - start
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            assert done.returncode == 0, done.stdout + done.stderr
            assert NEW_NODES[1] in (project / NEW_NODES[0]).read_bytes()
            times[tool.name].append((wall, cpu))
    medians = {
        name: tuple(statistics.median(column) for column in zip(*taken[1:], strict=True))
        for name, taken in times.items()  # the first turn fills caches
    }
    print(f"| median of {turns}, in turns | wall | CPU | wall ÷ copier's | CPU ÷ copier's |")
    print("|---|---|---|---|---|")
    base = medians["copier"]
    for name, (wall, cpu) in medians.items():
        ratios = f"{wall / base[0]:.2f} | {cpu / base[1]:.2f}"
        print(f"| {name} | {wall:.2f} s | {cpu:.2f} s | {ratios} |")


if __name__ == "__main__":
    main()
