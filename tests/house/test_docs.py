"""docs/templates is true: its snippets run, and what it names and quotes is in the code.

A comment before each snippet says what becomes of it: ``from: path`` is a part of that file, ``file: name`` is written to a
folder before anything runs, ``run`` is run, all of them in order and in one namespace. Expressions in tables are compiled.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kgen import verdict
from kgen.cost import model
from kgen.ir.plan import Schedule
from kgen.scheduler import Options
from kgen.templates import registry
from kgen.templates.base import PUBLIC, KernelTemplate
from kgen.templates.loop_contract import LoopProblem
from kgen.templates.problem import Problem
from tests.kernels import plans

ROOT = Path(__file__).resolve().parents[2]
# In the order in which a reader meets them: snippets share one namespace.
DOCUMENTS = [ROOT / "docs" / "templates" / name for name in ("tutorial.md", "reference.md", "gluon.md")]
TEXT = "\n".join(document.read_text() for document in DOCUMENTS)
SNIPPET = re.compile(r"^<!-- (from|file|run)(?:: (\S+))? -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SNIPPETS = [
    (m[1], m[2], m[3], (document, text[: m.start(3)].count("\n")))
    for document in DOCUMENTS
    for text in (document.read_text(),)
    for m in SNIPPET.finditer(text)
]
# What the scheduler, templates and their checks say: where the quotations come from.
SOURCES = [path for folder in ("templates", "lowering", "kgen/testing") for path in sorted((ROOT / folder).rglob("*.py"))] + [
    ROOT / name
    for name in ("kgen/errors.py", "kgen/verdict.py", "scheduler/selection/choose.py", "scheduler/fusion/grouped_matmuls.py")
]


def strings(path: Path) -> list[str]:
    """The strings of a file as they read, with an ellipsis for what is put into them."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.sub(r"\{\w+(![rs])?\}", "…", node.value))
    return found


def section(title: str) -> str:
    return TEXT.partition(f"\n### {title}\n")[2].partition("\n### ")[0]


def first_column(title: str) -> list[str]:
    return [row.split(" | ")[0] for row in re.findall(r"^\| (.*) \|$", section(title), re.MULTILINE)[1:]]


def test_every_snippet_says_what_becomes_of_it() -> None:
    assert len(SNIPPETS) == len(re.findall(r"^```\w+$", TEXT, re.MULTILINE))
    assert {kind for kind, *_ in SNIPPETS} == {"from", "file", "run"}


@pytest.mark.parametrize(("path", "code"), [(path, code) for kind, path, code, _ in SNIPPETS if kind == "from"])
def test_parts_of_examples_are_in_the_examples(path: str, code: str) -> None:
    assert code in (ROOT / path).read_text()


def test_the_readme_shows_a_part_of_the_example() -> None:
    section = (ROOT / "README.md").read_text().partition("\n## A kernel of your own\n")[2].partition("\n## ")[0]
    shown = textwrap.dedent("".join(re.findall(r"^    .*\n", section, re.MULTILINE)))
    assert shown
    assert shown in (ROOT / "examples" / "new_template.py").read_text()


@pytest.mark.cpu
@pytest.mark.interpret
def test_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for kind, name, code, _ in SNIPPETS:
        if kind == "file":
            (tmp_path / name).write_text(code)
    before = set(registry.names())
    names: dict[str, Any] = {"__name__": "docs"}
    try:
        for kind, _, code, (document, line) in SNIPPETS:
            if kind == "run":
                exec(compile("\n" * line + code, str(document), "exec"), names)
    finally:
        for template in set(registry.names()) - before:
            registry.remove(template)
        for module in ("gated", "plain", "points", "rows", "rows_cpu"):
            sys.modules.pop(module, None)
    printed = capsys.readouterr().out
    for line in re.findall(r"^    (\d graph, .*)$", TEXT, re.MULTILINE):
        assert line in printed
    assert "0 failed" in printed


def test_paths_and_names_exist() -> None:
    paths = re.findall(r"`((?:kgen|scheduler|templates|tests|examples)/[\w./]+)(?::(\w+))?`", TEXT)
    assert paths
    for path, name in paths:
        assert (ROOT / path).is_file(), path
        assert not name or re.search(rf"^(class|def) {name}\b", (ROOT / path).read_text(), re.MULTILINE), name


def test_facts_of_a_problem_exist() -> None:
    named = set(re.findall(r"problem\.(\w+)", TEXT)) - {"py"}
    known = {name for name, _ in inspect.getmembers(Problem)} | set(re.findall(r"self\.(\w+)", inspect.getsource(Problem)))
    assert named
    assert named <= known | {one.name for one in fields(LoopProblem)}


@pytest.mark.parametrize(("title", "callables"), [("What the class may declare", False), ("What the class may define", True)])
def test_the_tables_have_all_of_the_base_class(title: str, callables: bool) -> None:
    named = {re.match(r"`(\w+)", row)[1] for row in first_column(title)}  # type: ignore[index]
    assert named == {name for name in PUBLIC if callable(getattr(KernelTemplate, name)) == callables}


def test_signatures_and_defaults_are_those_of_the_base_class() -> None:
    for row in first_column("What the class may define"):
        name, parameters = re.match(r"`(\w+)\((.*)\)`", row).groups()  # type: ignore[union-attr]
        assert list(inspect.signature(getattr(KernelTemplate, name)).parameters) == parameters.split(", ")
    for name, default in re.findall(r"^\| `(\w+)` \| .* \| (\d+) \|$", section("What the class may declare"), re.MULTILINE):
        assert getattr(KernelTemplate, name) == int(default)


@pytest.mark.parametrize("title", ["What is refused, and why", "Messages"])
def test_quoted_messages_are_those_of_the_code(title: str) -> None:
    messages = [text.replace("'…'", "…") for path in SOURCES for text in strings(path)]
    quoted = re.findall(r'"([^"]+)"', re.sub(r"\s+", " ", section(title)))
    assert len(quoted) > 5
    for text in quoted:
        assert any(text in one for one in messages), text


# ---- what fuses, and what does not ----------------------------------------------------------------------------------


def rows(title: str) -> list[list[str]]:
    """The cells of the tables of a section, without the heads."""
    found = re.findall(r"^\| (.*) \|$", section(title).replace("| | ", "| - | "), re.MULTILINE)
    return [row.split(" | ") for row in found if not row.endswith(("kernels", "for example", "because"))]


def planned(code: str, monkeypatch: pytest.MonkeyPatch) -> Schedule:
    """The plan of an expression on a GPU, where templates win over the library."""
    monkeypatch.setattr(model, "vendor_seconds", lambda problem: 1e9)
    tensors = {name: torch.randn(*sizes) for name, sizes in SIZES.items()}
    tensors["i"], tensors["q"] = torch.arange(70), torch.zeros(40, 90, dtype=torch.int8)
    used = [name for name in tensors if re.search(rf"\b{name}\b", code)]
    f = eval(f"lambda {', '.join(used)}: {code}", {"torch": torch, "F": F})
    with torch.no_grad():
        return plans(f, *(tensors[name] for name in used), options=Options(gpu_everywhere=True)).forward


SIZES = {"x": (70, 40), "y": (70, 40), "w": (40, 90), "v": (40, 90), "r": (70, 90)}
FUSED = [(code, row[-1]) for row in rows("What fusion gives you") for code in re.findall("`([^`]+)`", row[1])]
APART = [
    (code, row[0].strip('"')) for row in rows("What is refused, and why") for code in re.findall("`([^`]*@[^`]*)`", row[1])
]


@pytest.mark.parametrize(("code", "count"), FUSED, ids=lambda text: text)
def test_what_fusion_gives(code: str, count: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(code, monkeypatch)
    assert (len(plan.kernels), plan.calls) == (int(count), [])


@pytest.mark.parametrize(("code", "reason"), APART, ids=lambda text: text)
def test_what_is_refused(code: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(code, monkeypatch)
    assert reason in {v.reason.value for v in plan.verdicts}
    assert len(plan.kernels) > 1


def test_tables_of_expressions_are_read() -> None:
    assert len(FUSED) > 12
    assert len(APART) > 5
    assert {row[0].strip('"') for row in rows("What is refused, and why")} <= {reason.value for reason in verdict.Reason}
