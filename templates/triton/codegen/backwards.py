"""Rows of which memory is read and written from the end, as where a scan is the gradient of a scan.

    before   y[i] = x[15 - i] + ...;   scan along i
    after    y[15 - i] = x[i] + ...;   scan along i from the end

Triton takes neighbours in falling order for strangers. A thread would then load each element by itself, and a warp the elements
of as many rows.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace

from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.plan import Statement, Tiling


def in_order_of_memory(tiling: Tiling) -> tuple[Tiling, bool]:
    """The tiling with rows in the order of memory, and whether that turned them around. Registers hold the rows."""
    kernel = tiling.kernel
    if len(kernel.inner) != 1 or not tiling.persistent or not all(_has_no_order(s) for s in kernel.statements):
        return tiling, False
    [v] = kernel.inner
    made = {out for s in kernel.statements for out in s.outs}  # registers have these
    steps = [_step(offset, v) for s in kernel.statements for offset in _offsets(s, made)]
    if steps.count(-1) <= steps.count(1):
        return tiling, False
    mapping: dict[Atom, Expr] = {v: v.extent - 1 - v.expr()}
    statements = tuple(s.substituted(mapping) for s in kernel.statements)
    return replace(tiling, kernel=replace(kernel, statements=statements)), True


def _has_no_order(s: Statement) -> bool:
    return s.kind in ("pointwise", "reduction") or (s.kind == "scan" and s.op in ops.JOINED)


def _offsets(s: Statement, made: Container[str]) -> Iterator[Expr]:
    """Where the statement reads and writes memory."""
    yield from (load.attr[1][0] for load in vs.loads(s.roots) if load.attr[0] not in made)
    if any(s.stored) and s.store:
        yield s.store[0]


def _step(offset: Expr, v: Var) -> int | None:
    step = ix.stride_of(offset, v)
    return None if step is None else step.as_int()
