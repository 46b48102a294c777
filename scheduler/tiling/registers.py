"""How many registers a point of a kernel takes: what a GPU's thread or a vector loop's step has of several points at a time, it
has so many times over."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from kgen.ir import values as vs
from kgen.ir.index import Var
from kgen.ir.plan import Kernel, Statement
from kgen.ir.values import Value

# Bytes of a register.
REGISTER = 4


def registers_of_a_point(kernel: Kernel) -> int:
    """Registers that hold the values of one inner point at the same time, as statements are computed one after the other:
    those that differ from inner point to inner point, each from where it is computed to its last use. Without inner loops, of
    one point."""
    by_section: dict[int, list[Statement]] = {}
    for s in kernel.statements:
        if s.inner or not kernel.inner:
            by_section.setdefault(s.section, []).append(s)
    inner = frozenset(kernel.inner or kernel.outer)
    return max((_most_registers(one, lambda v: not inner.isdisjoint(v.variables())) for one in by_section.values()), default=0)


def registers_of_a_row(kernel: Kernel) -> int:
    """Registers that hold the values of one outer point at the same time: those that its inner points share."""
    outer, inner = frozenset(kernel.outer), frozenset(kernel.inner)
    order = sorted(kernel.statements, key=lambda s: (s.section, not s.inner))
    return _most_registers(order, lambda v: inner.isdisjoint(v.variables()) and not outer.isdisjoint(v.variables()))


def registers_of_a_lane(kernel: Kernel, lane: Var) -> int:
    """Registers that hold the values of one point of the loop `lane` at the same time, wherever they are computed."""
    order = sorted(kernel.statements, key=lambda s: (s.section, not s.inner))
    return _most_registers(order, lambda v: lane in v.variables())


def _most_registers(statements: Sequence[Statement], counts: Callable[[Value], bool]) -> int:
    """What the values that count take when most of them are alive. A buffer that an earlier statement made is that statement's
    value."""
    made: dict[str, Value] = {}
    computed: list[Value] = []
    last_use: dict[Value, int] = {}
    for s in statements:
        for value in vs.topological(s.roots):
            value = _resolved(value, made)
            if value in last_use or value.op in ("const", "index"):
                continue
            for used in vs.children(value):
                _mark(last_use, _resolved(used, made), len(computed))
            if counts(value):
                last_use[value] = len(computed)
                computed.append(value)
        for root in s.roots:
            _mark(last_use, _resolved(root, made), len(computed))
        made |= dict.fromkeys(s.outs, _resolved(s.value, made))
    return math.ceil(_peak(computed, last_use) / REGISTER)


def _mark(last_use: dict[Value, int], value: Value, at: int) -> None:
    if value in last_use:
        last_use[value] = at


def _peak(computed: Iterable[Value], last_use: dict[Value, int]) -> int:
    """The largest sum of the sizes of values that are between their computation and their last use."""
    ended: dict[int, int] = {}
    alive = most = 0
    for at, value in enumerate(computed):
        alive += value.dtype.itemsize
        ended[last_use[value]] = ended.get(last_use[value], 0) + value.dtype.itemsize
        most = max(most, alive)
        alive -= ended.pop(at, 0)
    return most


def _resolved(value: Value, made: dict[str, Value]) -> Value:
    return made.get(value.attr[0], value) if value.op == "load" else value
