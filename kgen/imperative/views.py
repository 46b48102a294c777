"""Views at an index that is a tensor: in eager `b[i]` is a view, whatever i is, but a traced one is a copy.

A write to `b[i]` within one statement is put back (`kgen/imperative/indices.py:through`). A name of such a view names a copy.
That is right as long as nobody writes into it, or reads it behind a write to what it is a view of. `stale` are the other names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kgen.imperative.names import Aliases, assigned, is_method, loaded, written, written_parts

__all__ = ["innermost", "paired", "replaced", "stale", "writes_before"]


def _chain(node: ast.AST) -> Iterator[ast.AST]:
    """An expression, and what it is a view of if its methods give views."""
    while True:
        yield node
        if isinstance(node, ast.Subscript | ast.Attribute):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_method(node.func):
            node = node.func.value
        else:
            return


def innermost(node: ast.AST) -> ast.Subscript | None:
    """The `b[i]` of which `b[i].t()[0].mul_(2)` is a view."""
    return next((one for one in reversed([*_chain(node)]) if isinstance(one, ast.Subscript)), None)


def writes_before(written: ast.AST) -> list[ast.Call]:
    """The calls that write into a view before the last one does: `b[i].mul_(2)` of `b[i].mul_(2).add_(b[0])`."""
    return [one for one in _chain(written) if isinstance(one, ast.Call) and written_parts(one)]


def paired(stmt: ast.stmt) -> list[list[tuple[ast.expr, ast.expr]]]:
    """The targets of an assignment of several values, each with its own, from the left."""
    if not isinstance(stmt, ast.Assign) or not isinstance(stmt.value, ast.Tuple | ast.List):
        return []
    values, targets = stmt.value.elts, [one.elts for one in stmt.targets if isinstance(one, ast.Tuple | ast.List)]
    return [list(zip(one, values, strict=True)) for one in targets if len(one) == len(values)]


def replaced(node: ast.expr, old: ast.expr, new: ast.expr) -> ast.expr:
    """The expression with one part of it replaced."""

    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return new if node is old else self.generic_visit(node)

    made: ast.expr = Replace().visit(node)
    return made


@dataclass(frozen=True, slots=True)
class _Step:
    """A statement without those inside of it, and the loops around it."""

    parts: tuple[ast.AST, ...]
    loops: tuple[ast.AST, ...]


def _steps(body: Sequence[ast.stmt], loops: tuple[ast.AST, ...] = ()) -> Iterator[_Step]:
    for stmt in body:
        blocks = [getattr(stmt, name, []) for name in ("body", "orelse", "finalbody")]
        blocks += [one.body for one in getattr(stmt, "handlers", [])]
        inside = isinstance(stmt, ast.If | ast.For | ast.While | ast.With | ast.Try)
        around = (*loops, stmt) if isinstance(stmt, ast.For | ast.While) else loops
        inner = {id(one) for block in blocks for one in block} if inside else set()
        yield _Step(tuple(one for one in ast.iter_child_nodes(stmt) if id(one) not in inner) if inside else (stmt,), around)
        if inside:
            for block in blocks:
                yield from _steps(block, around)


def stale(body: Sequence[ast.stmt], aliases: Aliases) -> frozenset[str]:
    """Names that are written into, or read behind a write to what they are views of, as far as the source tells."""
    steps = list(_steps(body))
    names = [name for name, sources in aliases.sources.items() if sources]
    writes = [(k, aliases.closure(written(*step.parts))) for k, step in enumerate(steps)]
    writes = [(k, paths) for k, paths in writes if paths]
    reached = aliases.closure(written(*body))
    late = {name for name in names if _is_read_late(name, steps, writes, aliases)}
    return frozenset(late | (set(names) & reached))


def _is_read_late(
    name: str, steps: Sequence[_Step], writes: Sequence[tuple[int, frozenset[str]]], aliases: Aliases
) -> bool:  # fmt: skip
    own = aliases.closure(frozenset((name,)))
    bound = [k for k, step in enumerate(steps) if name in assigned(*step.parts)]
    read = [k for k, step in enumerate(steps) if name in loaded(*step.parts)]
    changed = [k for k, paths in writes if paths & own]
    within = [k for k in changed if name in _loaded_late(steps[k])]
    if any(a < w for w in within for a in bound):
        return True
    if any(a < w < r for w in changed for r in read for a in bound if not any(w < b < r for b in bound)):
        return True
    return any(_is_around(steps, w, r, bound) for w in changed for r in read)


def _loaded_late(step: _Step) -> frozenset[str]:
    """Names in values that a statement assigns behind a write to something."""
    pairs = [pairs for part in step.parts if isinstance(part, ast.stmt) for pairs in paired(part)]
    late = [value for one in pairs for k, (_, value) in enumerate(one) if written(*(target for target, _ in one[:k]))]
    return loaded(*late)


def _is_around(steps: Sequence[_Step], w: int, r: int, bound: Sequence[int]) -> bool:
    """Whether a loop goes from the write to the read, and does not bind the name in between."""
    both = [loop for loop in steps[w].loops if any(loop is one for one in steps[r].loops)]
    return any(not any(b <= r and any(loop is one for one in steps[b].loops) for b in bound) for loop in both)
