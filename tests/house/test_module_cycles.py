"""No module of kgen imports itself through others. import-linter sees packages; this sees the modules in them."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# An author's base class, its problem, its declaration and the registry name each other's types, for type checkers alone. The
# set may only shrink.
NAMED_BY_EACH_OTHER = {f"kgen.templates.{name}" for name in ("base", "contract", "loop_contract", "problem", "registry")}


def modules() -> dict[str, Path]:
    """Files by the names that they are imported under."""
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    found = {}
    for package, folder in folders.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


def imported(tree: ast.AST, typed: bool) -> Iterator[str]:
    """What may be modules among the names that a file imports, in its functions too; `typed`: for type checkers too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif typed or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from imported(node, typed)


def graph(typed: bool) -> dict[str, set[str]]:
    """The modules that each module imports. An import of a module is none of its package, which only re-exports."""
    paths = modules()
    packages = {name for name, path in paths.items() if path.stem == "__init__"}
    known = paths.keys() - packages
    return {name: set(imported(ast.parse(paths[name].read_text()), typed)) & (known - {name}) for name in known}


def in_cycles(imports: Mapping[str, set[str]]) -> set[str]:
    """What is left without modules that import nothing of it, or that nothing of it imports."""
    left = set(imports)
    while True:
        used = {name for one in left for name in imports[one]}
        kept = {name for name in left if name in used and imports[name] & left}
        if kept == left:
            return left
        left = kept


def test_cycles_are_found() -> None:
    assert in_cycles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == {"b", "c"}
    tree = ast.parse("if TYPE_CHECKING:\n    from kgen import a\ndef f():\n    from kgen import b\n")
    assert set(imported(tree, False)) == {"kgen", "kgen.b"}
    assert set(imported(tree, True)) == {"kgen", "kgen.a", "kgen.b"}


def test_no_module_imports_itself_through_others() -> None:
    assert in_cycles(graph(typed=False)) == set()


def test_types_name_each_other_in_one_place_only() -> None:
    assert in_cycles(graph(typed=True)) == NAMED_BY_EACH_OTHER
