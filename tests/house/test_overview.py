"""The documents are true: what they name exists, and the way of a relu in docs/overview.md is the one that it takes."""

from __future__ import annotations

import ast
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from kgen import backend
from tools import draw_overview, draw_results

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "overview.md"
# Decisions are dated: what they name may be gone.
DOCUMENTS = [
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name != "decisions"),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]
NAME = re.compile(r"`([\w/]+\.py):([\w.]+)`")
PATH = re.compile(r"`((?:kgen|lowering|scheduler|templates|tests|docs|tools|bench|examples)/[\w./]*)`")
LINK = re.compile(r"\[[^]\n]*\]\(([^)#\s]*)(?:#([\w-]+))?\)")
LONGEST = {"docs/overview.md": 150, "CONTRIBUTING.md": 60}


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


@pytest.fixture(params=DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def document(request):
    return request.param


def test_what_a_document_names_exists(document):
    named = sorted(set(NAME.findall(document.read_text())))
    assert not [f"{file}:{name}" for file, name in named if not (ROOT / file).is_file() or not has(ROOT / file, name)]


def has(path: Path, name: str) -> bool:
    """Whether a file defines a function, a class, or a global of that name."""
    return name in defined(path) or re.search(rf"^{re.escape(name)}\b", path.read_text(), re.MULTILINE) is not None


def test_the_paths_of_a_document_exist(document):
    assert not [path for path in PATH.findall(document.read_text()) if not (ROOT / path).exists()]


def test_the_links_of_a_document_lead_somewhere(document):
    for path, title in LINK.findall(document.read_text()):
        if not path.startswith("http"):
            target = (document.parent / path).resolve() if path else document
            assert target.exists(), path
            assert not title or title in titles(target), f"{path}#{title}"


def titles(path: Path) -> set[str]:
    """The anchors of a document's headings."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", LONGEST)
def test_some_documents_stay_short(name):
    assert len((ROOT / name).read_text().splitlines()) <= LONGEST[name]


def test_the_figure_is_the_one_that_its_script_draws():
    assert draw_overview.main(["--check"]) == 0
    assert [one.name for one in draw_overview.STAGES] == ["rewrite", "capture", *(stage.__name__ for stage in backend.STAGES)]


def test_the_plot_of_the_readme_is_that_of_its_record() -> None:
    assert len(draw_results.measured()) == 22
    assert draw_results.main(["--check"]) == 0
    assert "docs/figures/matmuls.svg" in (ROOT / "README.md").read_text()


def test_each_stage_takes_what_the_one_before_it_makes():
    """By its annotations; mypy checks that the bodies keep to them."""
    types = [list(stage.__annotations__.values()) for stage in backend.STAGES]
    assert [taken for taken, *_ in types[1:]] == [made for *_, made in types[:-1]]
    assert not any("Any" in kind for kinds in types for kind in kinds)


def test_the_table_lists_the_stages_in_order():
    table = DOCUMENT.read_text().partition("\n## The stages\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \|", table, re.MULTILINE)
    assert rows == ["stage", "rewrite", "capture", *(stage.__name__ for stage in backend.STAGES)]


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
