"""Answers: names, files of answers, defaults, what goes together, and their two homes."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from helpers import accepted, files, scaffold
from scaffold import catalog, questions
from scaffold.answers import Answers, complete
from scaffold.errors import AnswerError
from scaffold.render import render

BAD_NAMES = """
.. . ~ a/b /abs 1abc -rf --help _x x_ x- é 李 class None import torch Torch TORCH test tests launch
runs data scaffold train evaluate export prepare numpy json typing site con NUL com1 torchvision
a.b a+b my,proj 'q' $(id) `id` {{x}} ; & | * ? \\ pytest tqdm
""".split()


@pytest.fixture(autouse=True)
def _cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", [*BAD_NAMES, "", " ", "a b", "x" * 65, "x" * 300, "a\nb", "a\0b"])
def test_a_name_that_is_no_safe_folder_or_package_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    result = scaffold("new", "--yes", "--", name)
    assert result.code == 2
    assert len(result.err.strip().splitlines()) == 1
    assert files(tmp_path) == {"mine": b"mine"}


@pytest.mark.parametrize(
    "name", ["demo", "My-Project_2", "x", "a-b_c", "x" * 64, "trainer", "match"]
)
def test_a_good_name_gives_a_folder_and_an_importable_package(name: str) -> None:
    assert questions.check_name(name) == name
    package = Answers(name).package
    assert package.isidentifier()
    assert f"{package}/model.py" in render(Answers(name))


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('model = "vit"\nnodes = 3\nprecision = "fp32"\n')
    assert scaffold("new", "demo", "--answers", "a.toml", "--nodes", "4").code == 0
    made = tomllib.loads((tmp_path / "demo" / "scaffold.toml").read_text())
    assert (made["model"], made["nodes"], made["gpus-per-node"]) == ("vit", 4, 2)
    config = tomllib.loads((tmp_path / "demo" / "config.toml").read_text())
    assert config["train"]["precision"] == "fp32"


def test_a_projects_own_scaffold_toml_makes_its_twin(tmp_path: Path) -> None:
    flags = ["--model", "gpt", "--strategy", "fsdp-tp", "--gpus-per-node", "4", "--backend", "gloo"]
    assert scaffold("new", "one", *flags).code == 0
    assert scaffold("new", "two", "--answers", "one/scaffold.toml").code == 0
    one, two = (
        tomllib.loads((tmp_path / name / "scaffold.toml").read_text()) for name in ("one", "two")
    )
    assert two == {**one, "name": "two"}


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('modle = "vit"', "did you mean model?"),
        ("gpus_per_node = 2", "did you mean gpus-per-node?"),
        ("xyzzy = 2", "scaffold options"),
        ("nodes = true", "whole number"),
        ("nodes = 1.5", "whole number"),
        ('nodes = "two"', "whole number"),
        ("model = 3", "not offered"),
        ("launcher = 3", "not a list"),
        ('launcher = ["condor"]', "not offered"),
        ("data-path = 3", "in quotes"),
        ('data-path = "none.csv"', "does not exist"),
        ('model = "mlp"\ndata = "text"', "cannot train"),
        ('backend = "mpi"', "add --launcher mpirun"),
        ("model = ", "not valid TOML"),
        ("[train]\nlr = 1", "no answer"),
        ("a.toml\0", "not valid TOML"),
    ],
)
def test_a_wrong_answers_file_is_refused_by_key(text: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(text)
    result = scaffold("new", "demo", "--answers", "a.toml")
    assert result.code == 2
    assert hint in result.err
    assert len(result.err.strip().splitlines()) == 1
    assert not (tmp_path / "demo").exists()


def test_an_answers_file_that_is_no_text_or_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'model = "caf\xe9"')
    for name in ("latin.toml", ".", "missing.toml"):
        assert scaffold("new", "demo", "--answers", name).code == 2


def test_a_path_in_a_file_of_answers_starts_at_that_file(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "t.csv").write_text("a,b\n1,2\n")
    (tmp_path / "sub" / "a.toml").write_text('model = "mlp"\ndata = "csv"\ndata-path = "t.csv"\n')
    assert scaffold("new", "demo", "--answers", "sub/a.toml").code == 0
    config = tomllib.loads((tmp_path / "demo" / "config.toml").read_text())
    assert config["data"]["path"] == str(tmp_path / "sub" / "t.csv")


def test_a_path_on_the_command_line_becomes_absolute_and_knows_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    question = questions.BY_KEY["data-path"]
    assert question.parse("t.csv") == str(tmp_path / "t.csv")
    assert question.parse("~/t.csv") == str(tmp_path / "t.csv")
    assert question.parse("") == ""
    with pytest.raises(AnswerError, match="does not exist"):
        question.parse("~nobody/t.csv")


def test_a_default_that_does_not_fit_gives_way_to_the_first_that_does() -> None:
    assert complete("demo", {"data": "csv"})[0].model == "mlp"
    assert complete("demo", {"data": "image-folder"})[0].model == "resnet"
    assert complete("demo", {"strategy": "fsdp-tp"})[0].model == "gpt"
    assert complete("demo", {})[0] == Answers("demo")


def test_every_default_batch_idles_nothing_on_most_rank_counts() -> None:
    for model in catalog.MODELS.values():
        grains, rest = divmod(model.global_batch_size, model.micro_batch_size)
        assert rest == 0
        assert model.global_batch_size % 48 == 0
        assert all(grains % ranks == 0 for ranks in (1, 2, 3, 4))


def test_answers_survive_their_two_homes() -> None:
    for chosen in accepted(nodes=2, backend="gloo", gpus_per_node=4):
        stored = {**chosen.structure(), **chosen.settings()}
        assert Answers.of(stored) == chosen


def test_scaffold_toml_holds_the_structure_and_no_setting() -> None:
    for chosen in accepted():
        table = tomllib.loads(render(chosen)["scaffold.toml"].content.decode())
        assert table == chosen.structure()
        assert not set(table) & set(chosen.settings())


def test_every_refused_combination_says_what_would_work() -> None:
    for model in catalog.MODELS:
        for data in catalog.DATA:
            for strategy in catalog.STRATEGIES:
                values = {"model": model, "data": data, "nodes": 1, "strategy": strategy}
                if why := questions.problem(values):
                    assert "use --" in why
                else:
                    complete("demo", values)
