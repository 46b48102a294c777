"""Which values of a kernel must be as exact as eager's float32, and which end in 16 bits, or vanish where they are not, so
that the hardware's functions do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.plan import Statement
from kgen.ir.values import Value

# What turns a number into something that a last bit can change altogether.
_DECIDES = ("eq", "ne", "lt", "le", "gt", "ge", "floor", "ceil", "trunc", "round", "floordiv", "truncdiv", "remainder", "fmod")
# Floats that no arithmetic has made of others.
_AS_THEY_ARE = ("load", "const", "step", "where", "neg", "abs", "minimum", "maximum")


def exact_values(statements: Sequence[Statement], graph: ir.Graph) -> set[Value]:
    """The values that reach something wider than a 16-bit float, a decision, or an index, and no tensor of 16-bit floats on
    their way, in which eager would have rounded them."""
    found: set[Value] = set()
    wanted: set[str] = set()
    maxima = {s.outs[0]: s.value for s in statements if s.kind == "partial" and s.op == "max"}
    for s in reversed(statements):
        roots = [v for root in s.roots for v in vs.topological([root]) if _decides(v)]
        stored = any(kept and not _is_narrow(graph, o) for o, kept in zip(s.outs, s.stored, strict=True))
        if stored or not wanted.isdisjoint(s.outs) or s.kind == "scatter":
            roots.append(s.value)
        if s.kind == "contraction":
            roots += _exact_factors(s)
        else:
            roots += s.roots[1:]  # masks, and values inside of indices
        closure = vs.topological(roots)
        found.update(set(closure).difference(_fading(s, maxima)))
        wanted.update(load.attr[0] for load in closure if load.op == "load" and not _is_narrow(graph, load.attr[0]))
    return found


def are_arithmetic(values: Iterable[Value]) -> bool:
    """Whether any of these is a float of which a multiplication that is rounded together with an addition might be part. What
    is compared may be a position, or a number as it is in memory."""
    return any(value.dtype.is_floating_point and value.op not in _AS_THEY_ARE for value in values)


def _exact_factors(s: Statement) -> list[Value]:
    """The factors of a contraction that are more than 16 bits; of a program with factors of 16 bits only, not the functions
    between its steps either: what comes of them is multiplied in 16 bits."""
    factors = list(zip((s.value, *s.factors), s.operands, strict=True))
    narrow = all(dtype in ops.NARROW_FLOATS for value, dtype in factors if not _is_of_step(value))
    return [
        value for value, dtype in factors if dtype not in ops.NARROW_FLOATS and not (narrow and _is_of_step(value))
    ]  # fmt: skip


def _is_of_step(value: Value) -> bool:
    return any(v.op == "step" for v in vs.topological([value]))


def _fading(s: Statement, maxima: Mapping[str, Value]) -> tuple[Value, ...]:
    """The exponentials in a sum over a tile from which its maximum was subtracted: far from the maximum, where the hardware's
    relative error grows, they vanish."""
    if s.kind != "partial" or s.op != "sum":
        return ()
    factors = s.value.args if s.value.op == "mul" else (s.value,)
    below = [f for f in factors if f.op == "exp" and f.args[0].op == "sub"]
    return tuple(
        f for f in below if any(maxima.get(load.attr[0]) is f.args[0].args[0] for load in vs.loads([f.args[0].args[1]]))
    )


def _is_narrow(graph: ir.Graph, name: str) -> bool:
    made = graph.buffers.get(name)
    return made is not None and made.dtype in ops.NARROW_FLOATS


def _decides(value: Value) -> bool:
    if value.op == "cast":
        return not value.dtype.is_floating_point
    return value.op in _DECIDES
