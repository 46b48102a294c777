"""Early exits as structure: no `break`, `continue` or inner `return` is left.

What follows an `if` that may exit moves into its branches. A `break` becomes a flag that the loop's condition reads. A `return`
in a loop becomes a flag, a value and a `break`.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Sequence

from kgen import errors

__all__ = ["RESULT", "STOP", "Exits", "is_generated", "refuse", "same_scope"]

Statements = list[ast.stmt]
Refuse = Callable[[ast.AST, str], errors.NotConvertible]

_PREFIX = "__kgen_"
RESULT, RETURNED, STOP = f"{_PREFIX}result", f"{_PREFIX}returned", f"{_PREFIX}stop"
_LOOPS = ast.For | ast.While
_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef


def is_generated(name: str) -> bool:
    """Whether a name is none of the user's."""
    return name.startswith(_PREFIX)


def refuse(filename: str, function: str) -> Refuse:
    """Makes errors about nodes of a function."""

    def made(node: ast.AST, problem: str) -> errors.NotConvertible:
        return errors.NotConvertible(function=function, file=filename, line=getattr(node, "lineno", 0), problem=problem)

    return made


def same_scope(node: ast.AST) -> Iterator[ast.AST]:
    """The node and what is below it, without the bodies of other functions."""
    yield node
    if not isinstance(node, _SCOPES):
        for child in ast.iter_child_nodes(node):
            yield from same_scope(child)


def _exits(stmt: ast.stmt) -> bool:
    """Whether the statement may leave the block that it stands in."""
    if isinstance(stmt, ast.Break | ast.Continue | ast.Return):
        return True
    if isinstance(stmt, _LOOPS):
        return any(isinstance(node, ast.Return) for node in same_scope(stmt))
    return any(_exits(child) for child in ast.iter_child_nodes(stmt) if isinstance(child, ast.stmt))


def _breaks(stmt: ast.stmt) -> bool:
    """Whether the statement may end the loop that it stands in."""
    if isinstance(stmt, ast.Break | ast.Return):
        return True
    if isinstance(stmt, _LOOPS):
        return _exits(stmt)
    return any(_breaks(child) for child in ast.iter_child_nodes(stmt) if isinstance(child, ast.stmt))


def _assign(name: str, value: ast.expr, like: ast.AST) -> ast.stmt:
    return ast.fix_missing_locations(ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), like))


class Exits:
    """Rewrites the statements of one function."""

    def __init__(self, refused: Refuse) -> None:
        self.refused = refused
        self.loops = 0

    def function(self, body: Statements) -> Statements:
        """A body that ends in its only `return`."""
        last = ast.copy_location(ast.Return(ast.Constant(None)), body[-1])
        made = self._block([*body, last], None)
        end = ast.copy_location(ast.Return(ast.Name(RESULT, ast.Load())), body[-1])
        return [*made, ast.fix_missing_locations(end)]

    def _block(self, body: Sequence[ast.stmt], stop: str | None) -> Statements:
        """A block without exits; `stop` is the flag of the loop that it stands in."""
        made: Statements = []
        for position, stmt in enumerate(body):
            rest = body[position + 1 :]
            if isinstance(stmt, ast.Return):
                return [*made, *self._return(stmt, stop)]
            if isinstance(stmt, ast.Continue):
                return [*made, ast.copy_location(ast.Pass(), stmt)]
            if isinstance(stmt, ast.Break):
                return [*made, _assign(str(stop), ast.Constant(True), stmt)]
            if isinstance(stmt, _LOOPS):
                leaves = _exits(stmt)
                made += self._loop(stmt)
                if leaves:
                    return [*made, *self._block([self._return_again(stmt, stop), *rest], stop)]
            elif isinstance(stmt, ast.If) and _exits(stmt):
                return [*made, self._if(stmt, rest, stop)]
            else:
                made.append(self._other(stmt, stop))
        return made

    def _return(self, stmt: ast.Return, stop: str | None) -> Statements:
        value = _assign(RESULT, stmt.value or ast.Constant(None), stmt)
        if stop is None:
            return [value]
        return [value, _assign(RETURNED, ast.Constant(True), stmt), _assign(stop, ast.Constant(True), stmt)]

    def _return_again(self, loop: ast.stmt, stop: str | None) -> ast.stmt:
        """What stands behind a loop that may have returned."""
        left: ast.stmt = ast.Break() if stop is not None else ast.Return(ast.Name(RESULT, ast.Load()))
        made = ast.If(ast.Name(RETURNED, ast.Load()), [left], [])
        return ast.fix_missing_locations(ast.copy_location(made, loop))

    def _if(self, stmt: ast.If, rest: Sequence[ast.stmt], stop: str | None) -> ast.stmt:
        then = self._block([*stmt.body, *copy.deepcopy(list(rest))], stop)
        orelse = self._block([*stmt.orelse, *rest], stop)
        empty: Statements = [ast.copy_location(ast.Pass(), stmt)]
        return ast.copy_location(ast.If(stmt.test, then or empty, orelse), stmt)

    def _loop(self, stmt: ast.For | ast.While) -> Statements:
        """The loop with its flags, if some exit needs them."""
        if stmt.orelse:
            raise self.refused(
                stmt.orelse[0], "a loop has an `else` part; set a flag before `break` and test it behind the loop"
            )
        stop = f"{STOP}_{self.loops}"
        self.loops += 1
        flags: Statements = []
        if any(_breaks(one) for one in stmt.body):
            flags.append(_assign(stop, ast.Constant(False), stmt))
        if _exits(stmt):
            flags.append(_assign(RETURNED, ast.Constant(False), stmt))
        if flags:
            setattr(stmt, STOP, stop)
        stmt.body = self._block(stmt.body, stop) or [ast.copy_location(ast.Pass(), stmt)]
        return [*flags, stmt]

    def _other(self, stmt: ast.stmt, stop: str | None) -> ast.stmt:
        if _exits(stmt) and not isinstance(stmt, ast.If):
            raise self.refused(stmt, f"`{type(stmt).__name__.lower()}` contains an early exit; move the exit out of it")
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(stmt, name, None)
            if inner and isinstance(inner, list) and not isinstance(stmt, _SCOPES):
                setattr(stmt, name, self._block(inner, stop))
        return stmt
