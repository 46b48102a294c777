"""Which values of a kernel must be as exact as eager's float32, and which end in 16 bits, where the hardware's functions do."""

from __future__ import annotations

from collections.abc import Sequence

from kgen import ir, ops
from kgen import values as vs
from kgen.plan import Statement
from kgen.values import Value

# What turns a number into something that a last bit can change altogether.
_DECIDES = ("eq", "ne", "lt", "le", "gt", "ge", "floor", "ceil", "trunc", "round", "floordiv", "truncdiv", "remainder", "fmod")


def exact_values(statements: Sequence[Statement], graph: ir.Graph) -> set[Value]:
    """The values that reach something wider than a 16-bit float, a decision, or an index."""
    found: set[Value] = set()
    wanted: set[str] = set()
    for s in reversed(statements):
        roots = [v for root in s.roots for v in vs.topological([root]) if _decides(v)]
        stored = any(kept and not _is_narrow(graph, o) for o, kept in zip(s.outs, s.stored, strict=True))
        if stored or not wanted.isdisjoint(s.outs) or s.kind == "scatter":
            roots.append(s.value)
        if s.kind == "contraction":
            factors = zip((s.value, *s.factors), s.operands, strict=True)
            roots += [value for value, dtype in factors if dtype not in ops.NARROW_FLOATS]
        else:
            roots += s.roots[1:]  # masks, and values inside of indices
        closure = vs.topological(roots)
        found.update(closure)
        wanted.update(load.attr[0] for load in closure if load.op == "load")
    return found


def _is_narrow(graph: ir.Graph, name: str) -> bool:
    return graph.buffers[name].dtype in ops.NARROW_FLOATS


def _decides(value: Value) -> bool:
    if value.op == "cast":
        return not value.dtype.is_floating_point
    return value.op in _DECIDES
