"""Which names a block of statements reads, assigns, and may write into."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kgen.imperative.exits import same_scope

__all__ = [
    "Aliases",
    "assigned",
    "is_method",
    "loaded",
    "only_updated",
    "path_of",
    "roots",
    "updated",
    "written",
    "written_parts",
]

# Attributes that are views of the tensor that they are read from.
_VIEWS = frozenset(("H", "T", "data", "imag", "mH", "mT", "real"))
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def loaded(*nodes: ast.AST) -> frozenset[str]:
    """Names that are read, by functions inside, too; what `x += 1` changes is read."""
    found = set[str]()
    for node in nodes:
        for one in ast.walk(node):
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load):
                found.add(one.id)
            elif isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Name):
                found.add(one.target.id)
    return frozenset(found)


def _scope(node: ast.AST) -> Iterator[ast.AST]:
    """The node and what assigns in its scope: comprehensions have variables of their own."""
    yield node
    if isinstance(node, ast.Lambda | _COMPREHENSIONS):
        yield from (one for one in ast.walk(node) if isinstance(one, ast.NamedExpr))
    elif not isinstance(node, ast.FunctionDef | ast.ClassDef):
        for child in ast.iter_child_nodes(node):
            yield from _scope(child)


def assigned(*nodes: ast.AST) -> frozenset[str]:
    """Names that are bound."""
    found = set[str]()
    for node in nodes:
        for one in _scope(node):
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store | ast.Del):
                found.add(one.id)
            elif isinstance(one, ast.FunctionDef | ast.ClassDef):
                found.add(one.name)
            elif isinstance(one, ast.alias):
                found.add((one.asname or one.name).partition(".")[0])
            elif isinstance(one, ast.NamedExpr) and isinstance(one.target, ast.Name):
                found.add(one.target.id)
    return frozenset(found)


def updated(*nodes: ast.AST) -> frozenset[str]:
    """Names with `x += 1`, which writes into a tensor and binds anything else."""
    found = (one.target for node in nodes for one in same_scope(node) if isinstance(one, ast.AugAssign))
    return frozenset(one.id for one in found if isinstance(one, ast.Name))


def only_updated(*nodes: ast.AST) -> frozenset[str]:
    """Names that nothing but `x += 1` binds."""
    other = set[str]()
    for node in nodes:
        for one in same_scope(node):
            targets = [one.target] if isinstance(one, ast.AugAssign) else []
            other.update(
                a.id for a in ast.iter_child_nodes(one) if isinstance(a, ast.Name) and a not in targets and _is_bound(a)
            )
    return updated(*nodes) - other


def _is_bound(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


# ---- memory ------------------------------------------------------------------------------------------------------------


def path_of(node: ast.AST) -> str | None:
    """`a`, `self.b` or `self.b.c`; None for other expressions. Views of a tensor by attribute count as the tensor."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        below = path_of(node.value)
        return below if below is None or node.attr in _VIEWS else f"{below}.{node.attr}"
    return None


def roots(node: ast.AST) -> frozenset[str]:
    """Paths of what the value of an expression may share memory with."""
    path = path_of(node)
    if path is not None:
        return frozenset((path,))
    if isinstance(node, ast.Subscript | ast.Starred | ast.Attribute):
        return roots(node.value)
    if isinstance(node, ast.NamedExpr):
        return roots(node.value)
    if isinstance(node, ast.IfExp):
        return roots(node.body) | roots(node.orelse)
    if isinstance(node, ast.Tuple | ast.List):
        return _any(node.elts)
    return _roots_of_call(node) if isinstance(node, ast.Call) else frozenset()


def _roots_of_call(node: ast.Call) -> frozenset[str]:
    """Of its arguments, and of what a method is called on; a function's own path does not count."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if _makes_memory(name):
        return frozenset()
    given = _any([*node.args, *(one.value for one in node.keywords)])
    if not isinstance(node.func, ast.Attribute):
        return given
    return given | (roots(node.func.value) if is_method(node.func) else frozenset())


@functools.cache
def _makes_memory(name: str) -> bool:
    """Whether an operator has this name, none of whose results are views of its arguments."""
    found = getattr(torch.ops.aten, name, None) if name else None
    if found is None or name.startswith("_"):
        return False
    schemas = [getattr(found, overload)._schema for overload in found.overloads()]
    return not any(one.alias_info is not None for schema in schemas if not _is_out(schema) for one in schema.returns)


def _is_out(schema: Any) -> bool:
    return any(one.is_out for one in schema.arguments)


def is_method(func: ast.Attribute) -> bool:
    """Whether this looks like a method of a tensor, not a function of a module: `torch.sin`, `torch.nn.functional.relu`."""
    base = func.value
    while isinstance(base, ast.Attribute):
        base = base.value
    return not (isinstance(base, ast.Name) and base.id in ("torch", "F", "nn", "math", "np", "functional"))


def _any(nodes: Iterable[ast.AST]) -> frozenset[str]:
    return frozenset[str]().union(*map(roots, nodes))


def written(*nodes: ast.AST) -> frozenset[str]:
    """Paths of tensors that statements write into: `b[i] = v`, `x += 1`, `b[i].add_(v)`, `torch.sin(x, out=y)`."""
    found = frozenset[str]()
    for node in nodes:
        for one in same_scope(node):
            found |= _written_by(one)
    return found


def _written_by(node: ast.AST) -> frozenset[str]:
    if isinstance(node, ast.AugAssign):
        return roots(node.target.value if isinstance(node.target, ast.Subscript) else node.target)
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return roots(node.value)
    return _any(written_parts(node)) if isinstance(node, ast.Call) else frozenset()


def written_parts(node: ast.Call) -> list[ast.expr]:
    """What a call writes into: `out=`, and what a method or a function in place is called on."""
    outs = [one.value for one in node.keywords if one.arg == "out"]
    name = node.func.attr if isinstance(node.func, ast.Attribute) else path_of(node.func) or ""
    if not name.endswith("_") or name.endswith("__"):
        return outs
    if isinstance(node.func, ast.Attribute) and is_method(node.func):
        return [*outs, node.func.value]
    return [*outs, *node.args[:1]]


@dataclass(slots=True)
class Aliases:
    """Names that some assignment of a function may make views of others."""

    sources: dict[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, body: Sequence[ast.stmt]) -> Aliases:
        made = cls()
        for stmt in body:
            for node in same_scope(stmt):
                made._assignment(node)
        return made

    def _assignment(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._pair(target, node.value)
        elif isinstance(node, ast.NamedExpr) or (isinstance(node, ast.AnnAssign) and node.value is not None):
            self._pair(node.target, node.value)  # type: ignore[arg-type]
        elif isinstance(node, ast.For):
            self._pair(node.target, node.iter)

    def _pair(self, target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            parts = value.elts if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts) else None
            for k, one in enumerate(target.elts):
                self._pair(one, parts[k] if parts else value)
        elif (path := path_of(target)) is not None:
            self.sources[path] = self.sources.get(path, frozenset()) | roots(value)

    def closure(self, paths: frozenset[str], through: frozenset[str] | None = None) -> frozenset[str]:
        """The paths, and all that they may be views of; by way of the names in `through` alone, if that is given."""
        found, pending = set(paths), list(paths)
        while pending:
            path = pending.pop()
            allowed = through is None or path.partition(".")[0] in through
            new = (self.sources.get(path, frozenset()) if allowed else frozenset()) - found
            found |= new
            pending += new
        return frozenset(found)
