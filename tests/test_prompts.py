"""Questions on a real terminal."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from helpers import environment, files

pexpect = pytest.importorskip("pexpect")

PROMPTS = [
    r"Model \[gpt\]: ",
    r"Data \[synthetic\]: ",
    r"Nodes \(machines\) \[1\]: ",
    r"GPUs per node \[2\]: ",
    r"Strategy \[ddp\]: ",
    r"Where will it run \[torchrun\]: ",
    r"Write demo/\? \[Y/n\]: ",
]


@pytest.fixture
def terminal(tmp_path: Path) -> Any:
    """Starts `scaffold new demo ...` on a terminal of its own."""
    started = []

    def start(*arguments: str) -> Any:
        child = pexpect.spawn(
            sys.executable,
            ["-m", "scaffold", "new", "demo", *arguments],
            cwd=str(tmp_path),
            env=environment(TERM="dumb"),
            encoding="utf-8",
            timeout=30,
        )
        started.append(child)
        return child

    yield start
    for child in started:
        child.close(force=True)


def finish(child: Any) -> int:
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus


def answers_in(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "demo" / "scaffold.toml").read_text())


def test_enter_takes_every_default(terminal: Any, tmp_path: Path) -> None:
    child = terminal()
    for prompt in PROMPTS:
        child.expect(prompt)
        child.sendline("")
    child.expect("bash launch/local.sh")
    assert finish(child) == 0
    assert answers_in(tmp_path)["model"] == "gpt"


def test_only_questions_that_apply_are_asked_with_descriptions(
    terminal: Any, tmp_path: Path
) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    child = terminal("--nodes", "2")
    child.expect(r"1  mlp +multi-layer perceptron.*Model \[gpt\]: ")
    child.sendline("1")  # by its number
    child.expect(r"csv +a CSV file.*Data \[synthetic\]: ")
    assert "image-folder" not in child.after
    child.sendline("csv")
    child.expect(r"Path of the CSV file \(Enter: .*\): ")
    child.sendline("nowhere.csv")
    child.expect("does not exist")
    child.expect("Path of the CSV file")
    child.sendline("t.csv")
    child.expect("GPUs per node")  # nodes were given
    assert "Nodes (machines)" not in child.before
    child.sendline("3")
    child.expect(r"hsdp .*Strategy \[ddp\]: ")
    assert "fsdp-tp" not in child.after  # not for tables
    child.sendline("hsdp")
    child.expect(r"2  slurm +a Slurm cluster.*Where will it run \[torchrun\]: ")
    child.sendline("2, mpi")
    child.expect("'mpi' is not offered")
    child.expect("Where will it run")
    child.sendline("2, ssh")
    child.expect(r"data-path +.*t\.csv")  # the whole, before anything is written
    child.expect("Write demo")
    assert not (tmp_path / "demo").exists()
    child.sendline("y")
    assert finish(child) == 0
    made = answers_in(tmp_path)
    assert (made["model"], made["data"], made["strategy"]) == ("mlp", "csv", "hsdp")
    assert (made["nodes"], made["gpus-per-node"]) == (2, 3)
    assert made["launcher"] == ["torchrun", "slurm", "ssh"]


def test_each_answer_is_checked_as_it_is_typed(terminal: Any) -> None:
    child = terminal()
    child.expect(PROMPTS[0])
    child.sendline("resent")
    child.expect("Did you mean resnet")
    child.expect(PROMPTS[0])
    child.sendline("gpt")
    child.expect(PROMPTS[1])
    child.sendline("csv")
    child.expect("gpt cannot train on --data csv")
    child.expect(PROMPTS[1])
    child.sendline("")
    child.expect(PROMPTS[2])
    child.sendline("zero")
    child.expect("whole number")
    child.expect(PROMPTS[2])


def test_what_is_asked_next_is_checked_against_what_was_given(
    terminal: Any, tmp_path: Path
) -> None:
    child = terminal("--model", "gpt", "--data", "synthetic", "--strategy", "hsdp")
    child.expect(PROMPTS[2])
    child.sendline("1")
    child.expect("use --strategy fsdp")
    child.expect(PROMPTS[2])
    child.sendline("2")
    child.expect(PROMPTS[3])
    child.sendline("")
    child.expect(PROMPTS[5])
    child.sendline("")
    child.expect(PROMPTS[6])
    child.sendline("")
    assert finish(child) == 0
    assert answers_in(tmp_path)["nodes"] == 2


@pytest.mark.parametrize("position", range(len(PROMPTS)))
@pytest.mark.parametrize("how", ["interrupt", "end of input"])
def test_leaving_at_any_prompt_leaves_nothing(
    terminal: Any, tmp_path: Path, position: int, how: str
) -> None:
    child = terminal()
    for prompt in PROMPTS[:position]:
        child.expect(prompt)
        child.sendline("")
    child.expect(PROMPTS[position])
    child.sendintr() if how == "interrupt" else child.sendeof()
    child.expect("Aborted")
    assert finish(child) == 130
    assert not list(tmp_path.iterdir())


def test_no_at_the_end_writes_nothing(terminal: Any, tmp_path: Path) -> None:
    child = terminal("--model", "mlp", "--data", "synthetic", "--nodes", "1", "--strategy", "ddp")
    child.expect(PROMPTS[3])
    child.sendline("")
    child.expect(PROMPTS[5])
    child.sendline("")
    child.expect(PROMPTS[6])
    child.sendline("n")
    assert finish(child) == 130
    assert not list(tmp_path.iterdir())


def test_yes_and_dry_run_never_wait(terminal: Any, tmp_path: Path) -> None:
    assert finish(terminal("--yes", "--dry-run")) == 0
    assert not list(tmp_path.iterdir())
    assert finish(terminal("--yes")) == 0
    assert files(tmp_path)
