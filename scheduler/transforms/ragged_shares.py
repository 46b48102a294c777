"""Values and statements of a share of a row that may end early."""

from __future__ import annotations

from dataclasses import replace

from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.plan import Statement
from kgen.ir.values import Value


def stored_inside(s: Statement, inside: Value | None) -> Statement:
    """A pointwise statement, or an update, that reads and stores nothing where a condition does not hold, if there is one."""
    if inside is None:
        return s
    kept = inside if s.mask is None else vs.call("and", inside, vs.guard_loads(s.mask, inside))
    store = tuple(ix.substitute(e, {}, {}, lambda v: vs.guard_loads(v, inside)) for e in s.store)
    return replace(s, value=vs.guard_loads(s.value, inside), store=store, mask=kept if any(s.stored) else s.mask)


def padded(value: Value, op: str, inside: Value | None) -> Value:
    """What is reduced or scanned; where a condition does not hold, if there is one, what changes nothing."""
    if inside is None:
        return value
    return vs.masked(inside, value, vs.const(ops.identity(op, value.dtype), value.dtype))
