"""Variables that are Python numbers, as far as the source tells: `j = 0`, `j = i - 1` of an index, `j += 1`.

In a loop that data end, such a number is a tensor. To add to it makes a new number all the same: what has been another name of
it, or is carried by the loop, must not change.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from kgen.imperative.exits import same_scope

__all__ = ["with_new_numbers"]


def with_new_numbers(body: Sequence[ast.stmt], arguments: frozenset[str]) -> list[ast.stmt]:
    """The statements with `j = j + 1` for `j += 1`, where j is a number."""
    rewrite = _NewNumbers(_numbers(body, arguments))
    return [rewrite.visit(stmt) for stmt in body]


class _NewNumbers(ast.NodeTransformer):
    def __init__(self, numbers: frozenset[str]) -> None:
        self.numbers = numbers

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:  # another scope
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if not isinstance(node.target, ast.Name) or node.target.id not in self.numbers:
            return node
        name = node.target.id
        value = ast.BinOp(ast.Name(name, ast.Load()), node.op, node.value)
        made = ast.Assign([ast.Name(name, ast.Store())], value)
        return ast.fix_missing_locations(ast.copy_location(made, node))


def _numbers(body: Sequence[ast.stmt], arguments: frozenset[str]) -> frozenset[str]:
    """Names whose values are all made of numbers. Of a caller's argument nothing is known."""
    nodes = [node for stmt in body for node in same_scope(stmt)]
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del)}
    known, found = dict[str, list[ast.expr]](), list[ast.AST]()
    for name, value, target in _assignments(nodes):
        known.setdefault(name, []).append(value)
        found.append(target)
    stores = [node for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)]
    others = {node.id for node in stores if not any(node is one for one in found)}
    numbers = bound - arguments - others
    while True:
        kept = {name for name in numbers if all(_is_number(value, numbers) for value in known[name])}
        if kept == numbers:
            return frozenset(kept)
        numbers = kept


def _assignments(nodes: Iterable[ast.AST]) -> Iterable[tuple[str, ast.expr, ast.AST]]:
    """Names, each with a value that it gets, and the node that binds it: one of `range` is that of its first argument."""
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value, node.targets[0]
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value, node.target
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Name) and _is_range(node.iter):
            yield node.target.id, ast.Constant(0), node.target


def _is_range(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"


def _is_number(value: ast.expr, numbers: set[str]) -> bool:
    if isinstance(value, ast.Constant):
        return type(value.value) in (int, float)
    if isinstance(value, ast.Name):
        return value.id in numbers
    if isinstance(value, ast.UnaryOp):
        return _is_number(value.operand, numbers)
    return isinstance(value, ast.BinOp) and _is_number(value.left, numbers) and _is_number(value.right, numbers)
