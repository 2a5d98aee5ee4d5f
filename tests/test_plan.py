"""The table of regenerate: base, yours and new of one file, and what happens then."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from scaffold.errors import AnswerError, ScaffoldError
from scaffold.plan import Action
from trees import Content, Project, step, tree

ABC = "a\nb\nc\nd\ne\n"
YOURS_A = "A\nb\nc\nd\ne\n"
NEW_E = "a\nb\nc\nd\nE\n"
BOTH = "A\nb\nc\nd\nE\n"
NEW_A = "new\nb\nc\nd\ne\n"

OK, PROBLEM = False, True

# path, base, yours, new → action, text afterwards, whether a person is needed
TABLE: dict[str, tuple[str, Content, Content, Content, Action, Content, bool]] = {
    "created": ("a.py", None, None, ABC, Action.CREATE, ABC, OK),
    "equal is adopted": ("a.py", None, ABC, ABC, Action.KEEP, ABC, OK),
    "yours was there first": ("a.py", None, YOURS_A, ABC, Action.CONFLICT, YOURS_A, PROBLEM),
    "nothing changed": ("a.py", ABC, ABC, ABC, Action.SAME, ABC, OK),
    "unedited is updated": ("a.py", ABC, ABC, NEW_E, Action.UPDATE, NEW_E, OK),
    "edited is kept": ("a.py", ABC, YOURS_A, ABC, Action.KEEP, YOURS_A, OK),
    "already so": ("a.py", ABC, NEW_E, NEW_E, Action.KEEP, NEW_E, OK),
    "merged": ("a.py", ABC, YOURS_A, NEW_E, Action.MERGE, BOTH, OK),
    "deleted stays deleted": ("a.py", ABC, None, ABC, Action.GONE, None, OK),
    "deleted stays deleted though new": ("a.py", ABC, None, NEW_E, Action.GONE, None, OK),
    "unwanted is deleted": ("a.py", ABC, ABC, None, Action.DELETE, None, OK),
    "unwanted but edited is kept": ("a.py", ABC, YOURS_A, None, Action.KEEP, YOURS_A, OK),
    "tool file merged": ("launch/a.sh", ABC, YOURS_A, NEW_E, Action.MERGE, BOTH, OK),
    "tool file in conflict": (
        "launch/a.sh",
        ABC,
        YOURS_A,
        NEW_A,
        Action.CONFLICT,
        YOURS_A,
        PROBLEM,
    ),
    "python a job reads": ("launch/a.py", ABC, YOURS_A, NEW_A, Action.CONFLICT, YOURS_A, PROBLEM),
    "no markers in text": (".gitignore", ABC, YOURS_A, NEW_A, Action.CONFLICT, YOURS_A, PROBLEM),
    "once is never touched": ("launch/site.env", ABC, ABC, NEW_E, Action.SAME, ABC, OK),
    "once edited": ("launch/site.env", ABC, YOURS_A, NEW_A, Action.SAME, YOURS_A, OK),
    "once created": ("launch/site.env", None, None, ABC, Action.CREATE, ABC, OK),
    "once was yours": ("launch/site.env", None, YOURS_A, ABC, Action.SAME, YOURS_A, OK),
    "binary updated": ("a.bin", b"\0a", b"\0a", b"\0b", Action.UPDATE, b"\0b", OK),
    "binary replaced by you": ("a.bin", b"\0a", b"\0mine", b"\0a", Action.KEEP, b"\0mine", OK),
    "binary on both": ("a.bin", b"\0a", b"\0mine", b"\0b", Action.CONFLICT, b"\0mine", PROBLEM),
    "not UTF-8": ("a.py", ABC, b"\xff\n", NEW_E, Action.CONFLICT, b"\xff\n", PROBLEM),
    "crlf counts as unedited": (
        *("a.py", ABC, ABC.replace("\n", "\r\n"), NEW_E),
        *(Action.UPDATE, NEW_E.replace("\n", "\r\n"), OK),
    ),
    "crlf is merged and kept": (
        *("a.py", ABC, YOURS_A.replace("\n", "\r\n"), NEW_E),
        *(Action.MERGE, BOTH.replace("\n", "\r\n"), OK),
    ),
    "byte order mark stays": (
        "a.py",
        ABC,
        "\ufeff" + YOURS_A,
        NEW_E,
        Action.MERGE,
        "\ufeff" + BOTH,
        OK,
    ),
    "toml by keys": (
        *(
            "config.toml",
            "lr = 1\nsteps = 5\n",
            "lr = 2  # mine\nsteps = 5\n",
            "lr = 1\nsteps = 9\n",
        ),
        *(Action.MERGE, "lr = 2  # mine\nsteps = 9\n", OK),
    ),
    "toml key on both": (
        *("config.toml", "lr = 1\nsteps = 5\n", "lr = 2\nsteps = 5\n", "lr = 3\nsteps = 9\n"),
        *(Action.CONFLICT, "lr = 2\nsteps = 9\n", PROBLEM),
    ),
    "toml broken by you": (
        *("config.toml", "lr = 1\n", "lr = = 2\n", "lr = 3\n"),
        *(Action.CONFLICT, "lr = = 2\n", PROBLEM),
    ),
    "answers in place": (
        *("scaffold.toml", "nodes = 1\n", "# why\nnodes = 1  # mine\n", "nodes = 4\n"),
        *(Action.UPDATE, "# why\nnodes = 4  # mine\n", OK),
    ),
    "answers deleted": (
        "scaffold.toml",
        "nodes = 1\n",
        None,
        "nodes = 4\n",
        Action.CREATE,
        "nodes = 4\n",
        OK,
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_table(name: str, tmp_path: Path) -> None:
    path, base, yours, new, action, after, problem = TABLE[name]
    project = Project.made(tmp_path / "p", {path: base, "other.py": "x = 1\n"})
    if yours != base:
        project.edit({path: yours})
    plan = project.regenerate(tree({path: new, "other.py": "x = 1\n"}))
    assert (step(plan, path).action, step(plan, path).problem) == (action, problem)
    here = project.root / path
    assert (here.read_bytes() if here.exists() else None) == (
        after.encode() if isinstance(after, str) else after
    )
    beside = here.with_name(here.name + ".scaffold-new")
    in_place = action != Action.CONFLICT or (path.endswith("toml") and "broken" not in name)
    assert beside.exists() != in_place
    if not in_place and new is not None:
        assert beside.read_bytes() == (new.encode() if isinstance(new, str) else new)


def test_conflict_is_marked_in_python_and_the_next_run_refused(tmp_path: Path) -> None:
    project = Project.made(tmp_path / "p", {"a.py": ABC, "README.md": ABC})
    project.edit({"a.py": YOURS_A, "README.md": YOURS_A})
    plan = project.regenerate(tree({"a.py": NEW_A, "README.md": NEW_A}))
    marked = "<<<<<<< yours\nA\n||||||| last generated\na\n=======\nnew\n>>>>>>> new\nb\nc\nd\ne\n"
    assert project.text("a.py") == project.text("README.md") == marked
    assert [(s.action, s.problem) for s in plan.steps] == [(Action.CONFLICT, True)] * 2
    with pytest.raises(ScaffoldError, match=r"markers are left in README.md, a.py"):
        project.plan(tree({"a.py": NEW_A, "README.md": NEW_A}))
    project.edit({"a.py": BOTH, "README.md": NEW_A})
    plan = project.regenerate(tree({"a.py": NEW_A, "README.md": NEW_A}))
    assert [(s.path, s.action) for s in plan.steps] == [
        ("README.md", Action.SAME),
        ("a.py", Action.KEEP),
    ]


def test_a_reformatted_file_is_merged_in_its_own_style(tmp_path: Path) -> None:
    style = "[tool.black]\nline-length = 38\n"
    base = "def f(alpha, beta, gamma):\n    return alpha + beta + gamma + 100000\n"
    yours = (
        "def f(alpha, beta, gamma):\n    return (\n        alpha + beta + gamma + 100000\n    )\n"
        "\n\ndef mine():\n    pass\n"
    )
    new = base.replace("100000", "200000")
    project = Project.made(tmp_path / "p", {"a.py": base, "pyproject.toml": ""})
    project.edit({"a.py": yours, "pyproject.toml": style})
    plan = project.regenerate(tree({"a.py": new, "pyproject.toml": ""}))
    assert step(plan, "a.py").action == Action.MERGE
    assert project.text("a.py") == yours.replace("100000", "200000")


def test_a_file_in_no_known_style_is_never_reformatted(tmp_path: Path) -> None:
    base, yours = "x = 1 \n", "x   =   [1,2]\n"
    project = Project.made(tmp_path / "p", {"a.py": base, "pyproject.toml": ""})
    project.edit({"a.py": yours})
    plan = project.regenerate(tree({"a.py": "x = 2\n", "pyproject.toml": ""}))
    assert step(plan, "a.py").action == Action.CONFLICT
    assert yours in project.text("a.py")


def test_merge_that_breaks_python_is_kept_out(tmp_path: Path) -> None:
    # Each side alone is fine; together an `if` loses its body.
    base = "if a:\n    one()\n    #\n    #\n    two()\nend()\n"
    yours = "if a:\n    #\n    #\n    two()\nend()\n"
    new = "if a:\n    one()\n    #\n    #\nend()\n"
    project = Project.made(tmp_path / "p", {"a.py": base})
    project.edit({"a.py": yours})
    plan = project.regenerate(tree({"a.py": new}))
    assert step(plan, "a.py").note.startswith("would not compile when merged")
    assert project.text("a.py") == yours
    assert project.text("a.py.scaffold-new") == new


def test_deleted_comes_back_when_asked(tmp_path: Path) -> None:
    project = Project.made(tmp_path / "p", {"a.py": ABC})
    project.edit({"a.py": None})
    assert step(project.regenerate(tree({"a.py": NEW_E})), "a.py").action == Action.GONE
    assert step(project.regenerate(tree({"a.py": NEW_A})), "a.py").action == Action.GONE
    project.regenerate(tree({"a.py": NEW_A}), restore=["a.py"])
    assert project.text("a.py") == NEW_A
    with pytest.raises(AnswerError, match="delete it first"):
        project.plan(tree({"a.py": NEW_A}), restore=["a.py"])
    with pytest.raises(AnswerError, match="generate no such file"):
        project.plan(tree({"a.py": NEW_A}), restore=["b.py"])


def test_moved_file_is_merged_at_its_new_place_and_remembered(tmp_path: Path) -> None:
    project = Project.made(tmp_path / "p", {"train.py": ABC, "other.py": "zzz\n"})
    project.edit({"train.py": None, "main.py": YOURS_A})
    plan = project.regenerate(tree({"train.py": NEW_E, "other.py": "zzz\n"}))
    assert (step(plan, "train.py").action, step(plan, "train.py").problem) == (Action.GONE, True)
    assert "main.py" in step(plan, "train.py").note
    assert project.text("main.py") == YOURS_A
    plan = project.regenerate(
        tree({"train.py": NEW_E, "other.py": "zzz\n"}), follow=lambda path, at: True
    )
    assert (step(plan, "train.py").action, step(plan, "train.py").at) == (Action.MERGE, "main.py")
    assert project.text("main.py") == BOTH
    plan = project.regenerate(tree({"train.py": NEW_E.replace("c", "C"), "other.py": "zzz\n"}))
    assert project.text("main.py") == BOTH.replace("c", "C")
    assert not (project.root / "train.py").exists()
    project.edit({"main.py": None, "train.py": BOTH.replace("c", "C")})  # moved back
    plan = project.regenerate(tree({"train.py": ABC, "other.py": "zzz\n"}))
    assert (step(plan, "train.py").at, project.text("train.py")) == ("", YOURS_A)


def test_a_file_unlike_the_missing_one_is_not_taken_for_it(tmp_path: Path) -> None:
    project = Project.made(tmp_path / "p", {"train.py": ABC})
    project.edit({"train.py": None, "main.py": "a\nb\nx\ny\nz\n"})
    plan = project.regenerate(tree({"train.py": NEW_E}), follow=lambda path, at: True)
    assert step(plan, "train.py").note == "you deleted it; --restore train.py brings it back"


def test_switched_off_and_on_again_keeps_the_edit_mergeable(tmp_path: Path) -> None:
    project = Project.made(tmp_path / "p", {"launch/x.sh": ABC, "launch/y.sh": ABC})
    project.edit({"launch/x.sh": YOURS_A})
    plan = project.regenerate(tree({}))
    assert [s.action for s in plan.steps] == [Action.KEEP, Action.DELETE]
    assert not (project.root / "launch/y.sh").exists()
    plan = project.regenerate(tree({"launch/x.sh": NEW_E, "launch/y.sh": NEW_E}))
    assert [s.action for s in plan.steps] == [Action.MERGE, Action.CREATE]
    assert project.text("launch/x.sh") == BOTH
    assert project.text("launch/y.sh") == NEW_E


def test_what_lies_beside_is_refreshed_until_it_is_dealt_with(tmp_path: Path) -> None:
    path, beside = "launch/a.sh", "launch/a.sh.scaffold-new"
    project = Project.made(tmp_path / "p", {path: ABC})
    project.edit({path: YOURS_A})
    project.regenerate(tree({path: NEW_A}))
    assert project.text(beside) == NEW_A
    # Not dealt with: a merge against it would make its change look declined.
    plan = project.regenerate(tree({path: NEW_A + "f\n"}))
    assert step(plan, path).problem
    assert (project.text(path), project.text(beside)) == (YOURS_A, NEW_A + "f\n")
    assert step(project.regenerate(tree({path: NEW_A + "f\n"})), path).problem
    project.edit({beside: "edited\n"})
    with pytest.raises(ScaffoldError, match="in the way"):
        project.plan(tree({path: NEW_A}))
    project.edit({beside: None})
    assert not step(project.regenerate(tree({path: NEW_A + "f\n"})), path).problem
    plan = project.regenerate(tree({path: NEW_A.replace("c", "C") + "f\n"}))
    assert (step(plan, path).action, project.text(path)) == (Action.MERGE, "A\nb\nC\nd\ne\n")


def test_taking_the_new_one_over_clears_it_away(tmp_path: Path) -> None:
    path, beside = "launch/a.sh", "launch/a.sh.scaffold-new"
    project = Project.made(tmp_path / "p", {path: ABC})
    project.edit({path: YOURS_A})
    project.regenerate(tree({path: NEW_A}))
    project.edit({path: NEW_A})
    project.regenerate(tree({path: NEW_A}))
    assert not (project.root / beside).exists()


@pytest.mark.parametrize(
    ("base", "yours", "new", "after"),
    [(0, 0, 1, 1), (1, 1, 0, 0), (1, 0, 1, 0), (0, 1, 0, 1), (0, 1, 1, 1)],
)
def test_executable_bit_is_merged(
    base: int, yours: int, new: int, after: int, tmp_path: Path
) -> None:
    path = "launch/a.sh"
    project = Project.made(tmp_path / "p", {path: ABC}, *[path] * base)
    (project.root / path).chmod(0o740 if yours else 0o640)
    project.regenerate(tree({path: NEW_E}, (path,) * new))
    mode = stat.S_IMODE((project.root / path).stat().st_mode)
    assert bool(mode & 0o100) == bool(after)
    assert mode & 0o666 == 0o640
    assert project.text(path) == NEW_E


def test_a_changed_bit_alone_keeps_a_file_from_being_deleted(tmp_path: Path) -> None:
    project = Project.made(tmp_path / "p", {"launch/a.sh": ABC})
    (project.root / "launch/a.sh").chmod(0o755)
    assert step(project.regenerate(tree({})), "launch/a.sh").action == Action.KEEP
    assert (project.root / "launch/a.sh").exists()


def test_links_out_of_the_project_are_left_alone(tmp_path: Path) -> None:
    project = Project.made(tmp_path / "p", {"a.py": ABC, "launch/b.sh": ABC, "launch/c.sh": ABC})
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("a.py", "b.sh", "c.sh"):
        (outside / name).write_text(ABC)
    (project.root / "a.py").unlink()
    (project.root / "a.py").symlink_to(outside / "a.py")
    for name in ("b.sh", "c.sh"):
        (project.root / "launch" / name).unlink()
    (project.root / "launch").rmdir()
    (project.root / "launch").symlink_to(outside)
    new = tree({"a.py": NEW_E, "launch/b.sh": NEW_E, "launch/new.sh": ABC})
    for _ in range(2):  # said each time, until it can be done
        plan = project.regenerate(new)
        assert {s.path for s in plan.problems} >= {"launch/b.sh", "launch/new.sh"}
        assert sorted(p.name for p in outside.iterdir()) == ["a.py", "b.sh", "c.sh"]
        assert {p.read_text() for p in outside.iterdir()} == {ABC}
    assert project.text("a.py.scaffold-new") == NEW_E
    assert (project.root / "a.py").is_symlink()


def test_a_link_inside_the_project_is_written_through(tmp_path: Path) -> None:
    project = Project.made(tmp_path / "p", {"a.py": ABC, "b.py": ABC})
    project.edit({"a.py": None, "src/a.py": YOURS_A})
    (project.root / "a.py").symlink_to("src/a.py")
    project.edit({"b.py": None})
    (project.root / "b.py").symlink_to("src/a.py")
    plan = project.regenerate(tree({"a.py": NEW_E, "b.py": ABC}))
    assert (project.root / "a.py").is_symlink()
    assert project.text("src/a.py") == BOTH
    assert not plan.problems


def test_a_link_to_another_generated_file_is_not_merged_twice(tmp_path: Path) -> None:
    project = Project.made(tmp_path / "p", {"a.py": ABC, "b.py": ABC})
    project.edit({"b.py": None})
    (project.root / "b.py").symlink_to("a.py")
    plan = project.regenerate(tree({"a.py": NEW_E, "b.py": NEW_A}))
    assert project.text("a.py") == NEW_E
    assert step(plan, "b.py").note.startswith("is a.py under another name")
    assert project.text("b.py.scaffold-new") == NEW_A


def test_a_folder_or_a_file_in_the_way(tmp_path: Path) -> None:
    project = Project.made(tmp_path / "p", {"a.py": ABC})
    (project.root / "b.py").mkdir()
    plan = project.regenerate(tree({"a.py": ABC, "b.py": ABC}))
    assert step(plan, "b.py").note.startswith("is a folder")
    assert project.text("b.py.scaffold-new") == ABC
    project.edit({"launch": "a file\n"})
    with pytest.raises(ScaffoldError, match="launch is no folder"):
        project.plan(tree({"a.py": ABC, "b.py": ABC, "launch/x.sh": ABC}))


@pytest.mark.parametrize("damage", ["missing", "tampered"])
def test_lost_base_overwrites_nothing_it_cannot_prove(damage: str, tmp_path: Path) -> None:
    files = {"same.py": ABC, "edited.py": ABC, "was.py": ABC}
    project = Project.made(tmp_path / "p", files)
    for name in files:
        base = project.root / f".scaffold/base/{name}.base"
        base.unlink() if damage == "missing" else base.write_text("nonsense\n")
    project.edit({"edited.py": YOURS_A})
    new = tree({"same.py": NEW_E, "edited.py": NEW_E, "was.py": ABC})
    plan = project.regenerate(new)
    assert project.text("same.py") == NEW_E  # its hash proves that nobody edited it
    assert project.text("edited.py") == YOURS_A
    assert project.text("edited.py.scaffold-new") == NEW_E
    assert [s.path for s in plan.problems] == ["edited.py"]
    assert "lost or changed" in plan.problems[0].note
    assert project.text(".scaffold/base/edited.py.base") == NEW_E


@pytest.mark.parametrize("ends", ["\r\n", "  \n"])
def test_base_with_other_line_ends_or_trailing_blanks_is_intact(ends: str, tmp_path: Path) -> None:
    project = Project.made(tmp_path / "p", {"a.py": ABC})
    project.edit({".scaffold/base/a.py.base": ABC.replace("\n", ends), "a.py": YOURS_A})
    if ends == "\r\n":
        assert step(project.regenerate(tree({"a.py": NEW_E})), "a.py").action == Action.MERGE
        assert project.text("a.py") == BOTH
    else:
        assert "lost" not in step(project.regenerate(tree({"a.py": NEW_E})), "a.py").note


def test_planning_writes_nothing(tmp_path: Path) -> None:
    project = Project.made(tmp_path / "p", {"a.py": ABC, "b.py": ABC})
    project.edit({"a.py": YOURS_A})
    before = project.snapshot()
    project.plan(tree({"a.py": NEW_A, "c.py": ABC}))
    assert project.snapshot() == before
    assert not os.path.exists(project.root / ".scaffold/local")


def test_regenerating_twice_changes_nothing_more(tmp_path: Path) -> None:
    project = Project.made(tmp_path / "p", {"a.py": ABC, "b.py": ABC, "launch/c.sh": ABC})
    project.edit({"a.py": YOURS_A})
    new = tree({"a.py": NEW_E, "launch/c.sh": NEW_E, "d.py": ABC})
    project.regenerate(new)
    assert project.plan(new).writes == {}
