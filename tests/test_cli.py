"""The commands from outside: exit codes, what they print, what they leave behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import environment, files, scaffold, scaffold_process
from scaffold import catalog, questions, render


@pytest.fixture(autouse=True)
def _cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_new_writes_the_project_and_says_what_it_runs(tmp_path: Path) -> None:
    result = scaffold("new", "demo", "--yes")
    assert (result.code, result.err) == (0, "")
    assert (tmp_path / "demo" / "train.py").is_file()
    assert "1 node × 2 GPUs = 2 ranks" in result.out
    assert "24 micro-batches of 4" in result.out
    assert "bash launch/local.sh" in result.out.split("Next\n")[1]
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_defaults_taken_without_a_terminal_are_printed() -> None:
    out = scaffold("new", "demo", "--model", "vit", "--dry-run").out
    marked = {line.split()[0] for line in out.splitlines() if line.endswith("(default)")}
    assert {"data", "nodes", "gpus-per-node", "strategy", "launcher", "backend"} <= marked
    assert "model" not in marked


def test_dry_run_shows_every_file_and_writes_nothing(tmp_path: Path) -> None:
    dry = scaffold("new", "demo", "--yes", "--dry-run")
    assert dry.code == 0
    assert not list(tmp_path.iterdir())
    scaffold("new", "demo", "--yes")
    for path, content in files(tmp_path / "demo").items():
        if not path.startswith(".scaffold/"):
            line = next(
                line for line in dry.out.splitlines() if f" {path.split('/')[-1]} " in f"{line} "
            )
            assert "bytes" in line
            if path in ("train.py", "config.toml"):
                assert f"{len(content):,} bytes" in line


def test_one_help_option_costs_no_heavy_import() -> None:
    """`--help` and completion import none of what only rendering needs."""
    code = (
        "import sys; from scaffold import cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('cookiecutter', 'black', 'rich', 'torch', 'jinja2') if m in sys.modules])"
    )
    complete = {"_SCAFFOLD_COMPLETE": "bash_complete", "COMP_CWORD": "3"}
    for arguments, extra in (
        (["--help"], {}),
        (["new", "--help"], {}),
        (["--version"], {}),
        ([], {**complete, "COMP_WORDS": "scaffold new --model g"}),
    ):
        output = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=environment(**extra),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert output.stdout.splitlines()[-1] == "[]", (arguments, output)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_offers_the_choices_that_fit(shell: str, tmp_path: Path) -> None:
    words = "scaffold new demo --model mlp --data "
    env = {"COMP_WORDS": words, "COMP_CWORD": "6" if shell != "fish" else ""}
    output = scaffold_process(
        cwd=tmp_path, env=environment(_SCAFFOLD_COMPLETE=f"{shell}_complete", **env)
    ).stdout
    assert "csv" in output
    assert "image-folder" not in output


def test_options_json_lists_every_question_with_its_choices(tmp_path: Path) -> None:
    data = json.loads(scaffold("options", "--json").out)
    assert [entry["key"] for entry in data["questions"]] == [q.key for q in questions.QUESTIONS]
    for entry in data["questions"]:
        assert {"key", "flag", "kind", "prompt", "help", "asked", "kept_in", "default"} <= set(
            entry
        )
        assert entry["flag"] == f"--{entry['key']}"
        if entry["kind"] == "choice":
            assert entry["default"] in entry["choices"]
    assert set(data["models"]) == set(catalog.MODELS)
    for model, fits in data["models"].items():
        for kind in fits["data"]:
            assert not questions.problem({"model": model, "data": kind})
        batch = catalog.MODELS[model].global_batch_size
        assert batch % fits["global_batch_size_multiple_of"] == 0
    assert data["models"]["gpt"]["strategy"] == ["ddp", "fsdp", "hsdp", "fsdp-tp"]


def test_options_as_text_names_every_flag_and_choice() -> None:
    out = scaffold("options").out
    for question in questions.QUESTIONS:
        assert question.flag in out
        assert all(choice in out for choice in question.choices)


def test_version_and_help() -> None:
    assert scaffold("--version").out == "scaffold 0.1.0\n"
    assert "_SCAFFOLD_COMPLETE" in scaffold("--help").out
    assert scaffold("new", "--help").code == 0


WRONG = [
    (["new"], "NAME"),
    (["bogus"], "bogus"),
    (["new", "demo", "--modl", "mlp"], "--modl"),
    (["new", "demo", "--model", "bert"], "use mlp, resnet, vit or gpt"),
    (["new", "demo", "--model", "resent"], "Did you mean resnet?"),
    (["new", "demo", "--model", "mlp", "--data", "text"], "use --data synthetic or csv"),
    (["new", "demo", "--model", "gpt", "--data", "csv"], "--model mlp"),
    (["new", "demo", "--strategy", "hsdp"], "use --strategy fsdp"),
    (["new", "demo", "--model", "vit", "--strategy", "fsdp-tp"], "only for gpt"),
    (["new", "demo", "--nodes", "0"], "1 to"),
    (["new", "demo", "--nodes", "-1"], "whole number"),
    (["new", "demo", "--gpus-per-node", "1.5"], "whole number"),
    (["new", "demo", "--gpus-per-node", "٣"], "whole number"),
    (["new", "demo", "--nodes", "9" * 5000], "whole number"),
    (["new", "demo", "--global-batch-size", "98"], "use 96 or 100"),
    (["new", "demo", "--global-batch-size", "3"], "use 4"),
    (["new", "demo", "--data", "synthetic", "--data-path", "."], "takes no --data-path"),
    (["new", "demo", "--data-path", "."], "add --data csv, image-folder or text"),
    (["new", "demo", "--data", "csv", "--data-path", "no/such.csv"], "does not exist"),
    (["new", "demo", "--data", "image-folder", "--data-path", __file__], "no folder"),
    (["new", "demo", "--launcher", "condor"], "torchrun"),
    (["new", "demo", "--answers", "missing.toml"], "cannot read missing.toml"),
    (["new", "demo", "--output-dir", __file__], "no folder"),
]


@pytest.mark.parametrize(
    ("arguments", "hint"), WRONG, ids=lambda v: " ".join(v)[:40] if isinstance(v, list) else ""
)
def test_what_cannot_work_is_refused_with_what_would(
    arguments: list[str], hint: str, tmp_path: Path
) -> None:
    result = scaffold(*arguments)
    assert result.code == 2
    assert hint in result.err
    assert len(result.err.strip().splitlines()) <= 2
    assert len(result.err) < 500
    assert not list(tmp_path.iterdir())


def test_a_target_that_holds_anything_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("demo", "file", "link"):
        result = scaffold("new", name, "--yes")
        assert result.code == 2
        assert "choose another name" in result.err
    assert files(tmp_path) == {"demo/mine.txt": b"mine", "file": b"mine"}
    assert not (tmp_path / "elsewhere").exists()


def test_an_empty_folder_is_a_fine_target_and_output_dir_is_made(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    assert scaffold("new", "demo", "--yes").code == 0
    assert scaffold("new", "demo", "--yes", "--output-dir", "a b/ü").code == 0
    there, here = files(tmp_path / "a b/ü/demo"), files(tmp_path / "demo")
    assert there == here
    next_lines = scaffold("new", "two", "--yes", "--output-dir", "a b/ü").out.split("Next\n")[1]
    assert "cd 'a b/ü/two'" in next_lines


def test_a_folder_that_cannot_be_written_is_an_error_of_the_machine(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    result = scaffold("new", "demo", "--yes", "--output-dir", blocked / "below")
    assert result.code in (1, 2)
    assert len(result.err.strip().splitlines()) == 1
    assert files(tmp_path) == {"blocked": b""}


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    script = 'ulimit -f 1; exec "$@"'
    for arguments in (["new", "demo", "--yes"],):
        result = subprocess.run(
            ["bash", "-c", script, "-", sys.executable, "-B", "-m", "scaffold", *arguments],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.returncode == 1, result
        assert len(result.stderr.strip().splitlines()) == 1
        assert not list(tmp_path.iterdir())


def test_a_broken_template_is_named_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "template"
    project = template / "{{cookiecutter.project_slug}}"
    project.mkdir(parents=True)
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(render, "template_dir", lambda: template)
    for content, why in (
        ("def broken(:\n", "train.py"),
        ("{{ cookiecutter.nonsense }}\n", "nonsense"),
        ("{% if %}\n", "train.py"),
        ("{% include 'model/none.py' %}\n", "model/none.py"),
    ):
        (project / "train.py").write_text(content)
        result = scaffold("new", "demo", "--yes", "--output-dir", out)
        assert result.code == 3
        assert why in result.err
        assert len(result.err.strip().splitlines()) <= 2
        assert not list(out.iterdir())


def test_a_bug_of_ours_exits_3_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(chosen: object) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(render, "render", crash)
    result = scaffold("new", "demo", "--yes")
    assert result.code == 3
    assert "a bug in scaffold" in result.err.splitlines()[-1]


def test_exit_codes_of_the_process(tmp_path: Path) -> None:
    assert scaffold_process("new", "demo", cwd=tmp_path).returncode == 0
    assert scaffold_process("new", "demo", cwd=tmp_path).returncode == 2
    assert scaffold_process("new", "class", cwd=tmp_path).returncode == 2


@pytest.mark.parametrize("locale", ["C", "POSIX", "C.UTF-8"])
def test_any_locale_gives_the_same_bytes(locale: str, tmp_path: Path) -> None:
    data = tmp_path / "Zoë 李.csv"
    data.write_text("a,b\n1,2\n")
    arguments = ["new", "demo", "--model", "mlp", "--data", "csv", "--data-path", data.name]
    assert scaffold(*arguments, "--output-dir", "here").code == 0
    env = environment(LC_ALL=locale, LANG=locale, PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    result = scaffold_process(*arguments, "--output-dir", "there", cwd=tmp_path, env=env)
    assert result.returncode == 0, result.stderr
    assert files(tmp_path / "here") == files(tmp_path / "there")


def test_bytes_that_are_no_text_are_refused_or_shown(tmp_path: Path) -> None:
    bad = b"caf\xe9"
    command = [sys.executable, "-m", "scaffold", "new"]
    for arguments in (
        [bad],
        [b"demo", b"--model", bad],
        [b"demo", b"--data", b"csv", b"--data-path", bad],
    ):
        (tmp_path / "caf\udce9").write_text("a,b\n1,2\n")
        result = subprocess.run(
            [*command, *arguments], cwd=tmp_path, env=environment(), capture_output=True, timeout=60
        )
        assert result.returncode == 2, result
        assert result.stderr.startswith(b"Error: ")
        assert [path.name for path in tmp_path.iterdir()] == ["caf\udce9"]


def test_a_reader_that_goes_away_is_no_bug(tmp_path: Path) -> None:
    pipe = f"{sys.executable} -m scaffold options | head -1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(
        ["bash", "-c", pipe], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert "Traceback" not in result.stderr
    assert result.returncode in (0, 1)


def test_nothing_is_read_from_or_written_to_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".cookiecutterrc").write_text("default_context: {model: vit, nodes: 7}\n")
    (home / "out").mkdir()
    monkeypatch.setenv("HOME", str(home))
    for variable, value in (("SCAFFOLD_MODEL", "vit"), ("MODEL", "vit"), ("NNODES", "9")):
        monkeypatch.setenv(variable, value)
    result = scaffold_process("new", "demo", "--yes", cwd=home / "out")
    assert result.returncode == 0
    assert sorted(path.name for path in home.iterdir()) == [".cookiecutterrc", "out"]
    assert "gpt  (default)" in result.stdout
