"""Answers in, a tree of files in memory out: through cookiecutter, then black."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scaffold
from scaffold import catalog, manifest
from scaffold.answers import Answers
from scaffold.errors import InternalError
from scaffold.manifest import Owner

LINE_LENGTH = 100


@dataclass(frozen=True)
class File:
    """A rendered file: its bytes, its owner and whether it is executable."""

    content: bytes
    owner: Owner
    executable: bool = False


Tree = dict[str, File]
"""Rendered files by their path relative to the project, `/`-separated and sorted."""


def template_dir() -> Path:
    """The cookiecutter template: inside an installed package, else beside it in a checkout."""
    package = Path(scaffold.__file__).resolve().parent
    for templates in (package / "templates", package.parent / "templates"):
        if (templates / "project" / "cookiecutter.json").is_file():
            return templates / "project"
    raise InternalError(
        f"the templates are missing beside {package}; reinstall torch-scaffold to get them back."
    )


def toml_string(text: str) -> str:
    """`text` as a quoted TOML basic string, whatever it holds."""
    # JSON's escapes are a subset of TOML's, but JSON leaves DEL alone.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def kubernetes_name(name: str) -> str:
    """A project's name as an RFC 1123 label, short enough for what controllers append to it."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-")


def context(answers: Answers) -> dict[str, Any]:
    """The variables that templates see under `cookiecutter`."""
    model = catalog.MODELS[answers.model]
    return {
        "project_slug": answers.name,
        "kubernetes_name": kubernetes_name(answers.name),
        "package": answers.package,
        "model": answers.model,
        "task": model.task,
        "data": answers.data,
        "data_part": catalog.data_part(answers.model, answers.data),
        "strategy": answers.strategy,
        "nodes": answers.nodes,
        "gpus_per_node": answers.gpus_per_node,
        "backend": answers.backend,
        "launchers": " ".join(answers.launcher),
        "launchers_toml": "[" + ", ".join(map(toml_string, answers.launcher)) + "]",
        "precision": answers.precision,
        "global_batch_size": answers.global_batch_size,
        "micro_batch_size": model.micro_batch_size,
        "lr": model.lr,
        "steps": model.steps,
        "data_path_toml": toml_string(answers.data_path),
        "version": scaffold.__version__,
        "_new_lines": "\n",  # LF, whatever the template file or the machine has
    }


def render(
    answers: Answers, template: Path | None = None, formatted: Container[bytes] = ()
) -> Tree:
    """The tree of files for these answers; nothing outside a temporary folder is written.

    What is among `formatted` is known to be as black would write it, which saves most of the time.
    """
    with tempfile.TemporaryDirectory(prefix="scaffold-") as scratch:
        _cookiecutter(template or template_dir(), context(answers), scratch)
        root = Path(scratch) / answers.name
        rendered = {
            path.relative_to(root).as_posix(): path.read_bytes()
            for path in root.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
    tree: Tree = {}
    specs = manifest.specs(answers)
    for path in sorted(rendered):
        spec = specs.get(path, manifest.FileSpec(path))
        if spec.when(answers):
            tree[path] = File(_finish(path, rendered[path], formatted), spec.owner, spec.executable)
    return tree


def _cookiecutter(template: Path, variables: dict[str, Any], output: str) -> None:
    """Render the template into `output`.

    `generate_files`, not `cookiecutter.main`: the latter lets `~/.cookiecutterrc` change answers
    and writes into the home folder.
    """
    from cookiecutter.exceptions import CookiecutterException, UndefinedVariableInTemplate
    from cookiecutter.generate import generate_files
    from jinja2 import TemplateError

    try:
        generate_files(
            str(template), {"cookiecutter": variables}, output_dir=output, accept_hooks=False
        )
    except UndefinedVariableInTemplate as error:
        raise InternalError(f"a template does not render: {error.message} {error.error.message}")
    except TemplateError as error:
        where = getattr(error, "filename", None) or getattr(error, "name", None) or "?"
        why = str(error).splitlines()[0]
        raise InternalError(f"the template {where} does not render: {why}")
    except CookiecutterException as error:
        raise InternalError(f"the template does not render: {error}")


def _finish(path: str, content: bytes, formatted: Container[bytes]) -> bytes:
    """The bytes that go to disk: UTF-8, LF, Python as black writes it."""
    try:
        text = content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InternalError(f"the template of {path} is not UTF-8: {error}")
    # An included part ends its last line, and so does the file that includes it.
    text = text.rstrip("\n") + "\n" if text.strip() else ""
    if path.endswith(".py") and text.encode() not in formatted:
        text = _black(path, text)
    return text.encode("utf-8")


def _black(path: str, source: str) -> str:
    """Python source in the one format of all projects."""
    try:
        return _format(source)
    except Exception as error:  # black's errors share no public base class
        why = str(error).splitlines()[0]
        raise InternalError(f"the template of {path} is not valid Python: {why}")


@functools.cache
def _format(source: str) -> str:
    from black import format_str
    from black.mode import Mode, TargetVersion

    mode = Mode(target_versions={TargetVersion.PY311}, line_length=LINE_LENGTH)
    return format_str(source, mode=mode)
