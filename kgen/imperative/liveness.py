"""Which names are read behind a point of a function before something assigns them."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from kgen.imperative.exits import STOP
from kgen.imperative.names import assigned, loaded

__all__ = ["around", "needed"]

Names = frozenset[str]


def needed(body: Sequence[ast.stmt], live: Names) -> Names:
    """The names that statements, and what is behind them (`live`), read of what was assigned before."""
    for stmt in reversed(body):
        live = _before(stmt, live)
    return live


def _before(stmt: ast.stmt, live: Names) -> Names:
    if isinstance(stmt, ast.If):
        return needed(stmt.body, live) | needed(stmt.orelse, live) | loaded(stmt.test)
    if isinstance(stmt, ast.While):
        return live | around(stmt, live)
    if isinstance(stmt, ast.For):
        return live | around(stmt, live) | loaded(stmt.iter)
    if isinstance(stmt, ast.With | ast.Try):
        return live | loaded(stmt)
    return (live - (frozenset() if isinstance(stmt, ast.AugAssign) else assigned(stmt))) | loaded(stmt)


def around(loop: ast.For | ast.While, live: Names) -> Names:
    """The names that an iteration reads of what the one before it, or something in front of the loop, assigned."""
    bound = assigned(loop.target) if isinstance(loop, ast.For) else frozenset()
    head = loaded(loop.test) if isinstance(loop, ast.While) else frozenset()
    stop = getattr(loop, STOP, None)
    head |= frozenset((stop,)) if stop else frozenset()
    first = needed(loop.body, live | head) - bound
    return head | (needed(loop.body, live | head | first) - bound)
