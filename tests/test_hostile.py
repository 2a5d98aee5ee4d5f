"""Free-text answers never end up executed, never leave the target, and round-trip."""

from __future__ import annotations

import os
import subprocess
import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from helpers import environment, files, parse, scaffold
from scaffold.answers import Answers
from scaffold.render import render, toml_string

SPICE = st.sampled_from(
    [
        '"', "'", '"""', "'''", "$(touch PWNED)", "`touch PWNED`", "${HOME}", "\n", "\r\n", "\\",
        "{{ 7*7 }}", "{% if %}", "{#", "#}", "%s", "{0}", "../", "..", "~", " ", "\t", "#", "=", "]",
        ";touch PWNED;", "|", "&", "<", ">", "*", "!", "é", "李", "🙂", "\u202e", "\u2028", "\x7f",
        "\x1b[31m", "\x01", "-", "--yes", "\\u0041", "\\N{BULLET}", "__import__('os')",
    ]
)  # fmt: skip
TEXT = st.lists(st.one_of(SPICE, st.text(max_size=8)), max_size=6).map("".join)


def check_project(project: Path) -> None:
    """Every file parses with its own parser, and sourcing the launch settings runs nothing."""
    for path, content in files(project).items():
        if not path.startswith(".scaffold/"):
            parse(path, content)
    subprocess.run(
        ["bash", "-c", ". launch/topology.env"], cwd=project, check=True, env=environment()
    )


@given(text=TEXT)
@example(text="a\"b'c$(touch PWNED)`touch PWNED`\n%{{x}}")
@settings(max_examples=25)
def test_any_path_round_trips_through_config_toml(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(os.path.realpath(folder))
        data = root / "data"
        data.mkdir()
        assume("/" not in text and "\0" not in text and text not in ("", ".", ".."))
        try:
            (data / text).write_text("a,b\n1,2\n")
        except (OSError, UnicodeEncodeError):
            assume(False)
        out = root / "out"
        result = scaffold(
            "new", "demo", "--yes", "--data", "csv", "--output-dir", out,
            f"--data-path={data / text}",
        )  # fmt: skip
        assert result.code == 0, result.err
        config = tomllib.loads((out / "demo" / "config.toml").read_text("utf-8"))
        assert config["data"]["path"] == str(data / text)
        check_project(out / "demo")
        # Through a file of answers too.
        answers = root / "answers.toml"
        answers.write_text(
            f'data = "csv"\ndata-path = {toml_string(str(data / text))}\n', "utf-8", newline=""
        )
        assert scaffold("new", "demo", "--answers", answers, "--output-dir", root / "o2").code == 0
        assert files(root / "o2" / "demo") == files(out / "demo")
        assert {path.name for path in root.iterdir()} == {"data", "out", "o2", "answers.toml"}
        assert [path.name for path in data.iterdir()] == [text]


@given(name=TEXT)
@settings(max_examples=80)
def test_any_name_is_refused_or_makes_a_clean_project_in_its_folder(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        assume("\0" not in name)
        result = scaffold("new", "--yes", "--output-dir", root, "--", name)
        assert result.code in (0, 2), result.err
        if result.code == 2:
            assert not list(root.iterdir())
            assert len(result.err.strip().splitlines()) == 1
        else:
            assert [path.name for path in root.iterdir()] == [name]
            check_project(root / name)


@given(value=TEXT)
@settings(max_examples=20)
@pytest.mark.parametrize(
    "flag",
    ["model", "data", "nodes", "gpus-per-node", "strategy", "launcher", "backend", "precision"],
)
def test_any_other_value_is_refused(flag: str, value: str) -> None:
    assume("\0" not in value and not value.strip().isdigit() and value.strip())
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        result = scaffold("new", "demo", "--yes", "--output-dir", root, f"--{flag}={value}")
        assert result.code == 2
        assert len(result.err.strip().splitlines()) == 1
        assert not list(root.iterdir())


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_a_toml_string_reads_back_as_it_was(text: str) -> None:
    line = toml_string(text)
    assert "\n" not in line
    assert tomllib.loads(f"x = {line}")["x"] == text


def test_a_very_long_path_is_fine(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*(["x" * 200] * 15))
    os.makedirs(deep)
    tree = render(Answers("demo", model="mlp", data="csv", data_path=str(deep)))
    assert tomllib.loads(tree["config.toml"].content.decode())["data"]["path"] == str(deep)
    result = scaffold("new", "demo", "--yes", "--output-dir", tmp_path, f"--data-path={'y' * 9000}")
    assert result.code == 2
    assert len(result.err) < 500


def test_markup_in_an_answer_is_not_rendered_again(tmp_path: Path) -> None:
    data = tmp_path / "{{ cookiecutter.model }}{% raw %}.csv"
    data.write_text("a,b\n1,2\n")
    tree = render(Answers("demo", model="mlp", data="csv", data_path=str(data)))
    assert tomllib.loads(tree["config.toml"].content.decode())["data"]["path"] == str(data)
