"""Writes docs/ir.md, the reference of the loop IR, from the IR's own docstrings and tables.

python -m tools.ir_docs            # writes it
python -m tools.ir_docs --check    # 1 where it is not what the docstrings say
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from kgen.ir import ops

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "ir.md"
MODULES = ("nodes", "program", "values", "index", "functions", "ops", "plan", "verify", "printer")
HEAD = """# The loop IR

`python -m tools.ir_docs` writes this file from the docstrings in `kgen/ir/`. Edit those. `tests/ir/test_ir_docs.py` compares.

The IR has four parts. Nodes are loops and calls. A node holds *values*: scalar operations on elements. A value's addresses are
*index expressions*. The scheduler adds a *plan*: kernels and calls in order.
"""


def text() -> str:
    """The whole document."""
    sections = [*map(_module, MODULES), _scalar_operations(), _reductions()]
    return "\n\n".join([HEAD.strip(), *sections]) + "\n"


# ---- docstrings --------------------------------------------------------------------------------------------------------


def _module(name: str) -> str:
    tree = ast.parse((ROOT / "kgen" / "ir" / f"{name}.py").read_text())
    parts = [f"## `kgen/ir/{name}.py`", _prose(ast.get_docstring(tree) or "")]
    parts += [_class(node) for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    functions = list(_functions(tree.body))
    if functions:
        parts.append("\n".join(["Functions:", "", *functions]))
    return "\n\n".join(filter(None, parts))


def _class(node: ast.ClassDef) -> str:
    parts = [f"### {node.name}", _prose(ast.get_docstring(node) or "")]
    fields = [f"    {ast.unparse(one)}" for one in node.body if isinstance(one, ast.AnnAssign)]
    members = list(_functions(node.body))
    return "\n\n".join(filter(None, [*parts, "\n".join(fields), "\n".join(members)]))


def _functions(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Those with docstrings, a line each."""
    for node in body:
        doc = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if isinstance(node, ast.FunctionDef) and doc and not node.name.startswith("_"):
            yield f"- `{node.name}({_arguments(node.args)})`: {_one_line(doc)}"


def _arguments(given: ast.arguments) -> str:
    names = [one.arg for one in (*given.posonlyargs, *given.args) if one.arg not in ("self", "cls")]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    return ", ".join(names + [one.arg for one in given.kwonlyargs])


def _prose(doc: str) -> str:
    """A docstring as Markdown: its underlined titles in bold, its literals in single backticks."""
    return re.sub(r"^(\w[^\n]*)\n-+$", r"**\1**\n", _literals(doc), flags=re.MULTILINE)


def _one_line(doc: str) -> str:
    return " ".join(_literals(doc).split())


def _literals(doc: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", doc, flags=re.DOTALL)


# ---- tables ------------------------------------------------------------------------------------------------------------


def _scalar_operations() -> str:
    rows = [
        f"| `{one.name}` | {one.arity} | {one.admits} | {_result(one.result)} | {one.cost} | {'yes' if one.exact else 'no'} |"
        for one in ops.OPS.values()
    ]
    head = ["| operation | arguments | takes | gives | cost | exact |", "|---|---:|---|---|---:|---|"]
    note = "*Cost* is in additions. *Exact* is no where a vector library may differ from the reference by an ulp or more."
    return "\n".join(["## All scalar operations", "", note, "", *head, *rows])


def _result(result: object) -> str:
    return f"its {result} argument's type" if isinstance(result, str) else str(result).removeprefix("torch.")


def _reductions() -> str:
    rows = [
        f"| `{one.name}` | {f'`{one.combine}`' if one.combine else 'an own accumulator'} | {one.admits} | {one.outputs} |"
        for one in ops.REDUCTIONS.values()
    ]
    head = ["| reduction | joins two results by | takes | results |", "|---|---|---|---:|"]
    return "\n".join(["## All reductions", "", *head, *rows, "", f"Scans: {', '.join(f'`{one}`' for one in ops.SCANS)}."])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args(arguments).check:
        return int(not DOCUMENT.exists() or DOCUMENT.read_text() != text())
    DOCUMENT.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
