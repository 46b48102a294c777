"""docs/architecture.md is true: what it names exists, and its walk is the one that a relu takes."""

from __future__ import annotations

import ast
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from kgen import backend

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "architecture.md"
NAME = re.compile(r"`([\w/]+\.py):([\w.]+)`")
PATH = re.compile(r"`((?:kgen|lowering|scheduler|templates|tests|docs)/[\w./]*)`")


def walk() -> list[tuple[str, str]]:
    """(file, qualified name) in the order of the section."""
    text = DOCUMENT.read_text()
    section = text.partition("\n## Follow one relu\n")[2]
    assert section
    return list(dict.fromkeys(NAME.findall(section)))


def defined(path: Path) -> set[str]:
    """Qualified names of the functions and classes in a file."""
    found: set[str] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + child.name)
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(path.read_text()), "")
    return found


@pytest.mark.parametrize(("file", "name"), sorted(set(NAME.findall(DOCUMENT.read_text()))))
def test_what_the_document_names_exists(file, name):
    assert (ROOT / file).is_file()
    assert name in defined(ROOT / file)


def test_the_paths_of_the_document_exist():
    for path in PATH.findall(DOCUMENT.read_text()):
        assert (ROOT / path).exists(), path


def test_the_table_lists_the_stages_in_order():
    table = DOCUMENT.read_text().partition("\n## The stages\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \|", table, re.MULTILINE)
    assert rows == ["stage", "capture", *(stage.__name__ for stage in backend.STAGES)]


def entered(action) -> list[tuple[str, str]]:
    """The functions of this repository that `action` enters, each once, in order of first entry."""
    found: dict[tuple[str, str], None] = {}

    def note(frame, event, _arg):
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            path = Path(frame.f_code.co_filename).relative_to(ROOT).as_posix()
            found[path, frame.f_code.co_qualname] = None

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return list(found)


@pytest.mark.cpu
def test_a_relu_goes_the_way_of_the_walk():
    door = partial(backend.kgen_backend, options={"cache": False})

    @torch.compile(backend=door)
    def f(x):
        return torch.relu(x)

    x = torch.randn(8, 1000)
    order = {name: position for position, name in enumerate(entered(lambda: f(x)))}
    names = walk()
    assert not [f"{file}:{name}" for file, name in names if (file, name) not in order]
    positions = [order[name] for name in names]
    late = [names[k] for k in range(1, len(names)) if positions[k] < positions[k - 1]]
    assert not late, f"entered earlier than the walk says: {late}"
    assert torch.equal(f(x), x.relu())
