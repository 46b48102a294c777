"""The loops of a program with a softmax, by what they are to it; and loops that become rows.

q[h, d], k[h // 4, n, d]      ->      q[4 o + i, d], k[o, n, d]: a batch o with rows i, which share what they read
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.program import Contract, Program, Softmax

# More neighbours than that do not become rows.
MOST_ROWS = 256


@dataclass(frozen=True, slots=True)
class Layout:
    """A program whose one softmax goes along the loop `over`, and is read by its last step. `loops` are those of each axis,
    `batch_axis` the one that all operands have, `row_axis` that of the softmax' rows."""

    node: ir.Operation
    program: Program
    softmax: Softmax
    loops: Mapping[str, tuple[Var, ...]]
    batch_axis: str
    row_axis: str

    @staticmethod
    def of(node: ir.Operation) -> Layout | None:
        """None where a program is no such one, or has several loops along the softmax."""
        program = node.program
        softmaxes = [] if program is None else [step for step in program.steps if isinstance(step, Softmax)]
        loops = _loops(node)
        if program is None or len(softmaxes) != 1 or loops is None or len(node.outs) != 1:
            return None
        [softmax] = softmaxes
        last = program.steps[-1]
        shared = [a for a in softmax.rows if all(a in axes for axes in program.operands)]
        rows = [a for a in softmax.rows if a not in shared]
        read = isinstance(last, Contract) and softmax.name in last.reads and program.reduced(last) == (softmax.over,)
        if not read or len(shared) != 1 or len(rows) != 1 or len(loops[softmax.over]) != 1:
            return None
        return Layout(node, program, softmax, loops, shared[0], rows[0])

    @property
    def over(self) -> Var:
        [loop] = self.loops[self.softmax.over]
        return loop

    @property
    def batch(self) -> tuple[Var, ...]:
        return self.loops[self.batch_axis]

    @property
    def rows(self) -> tuple[Var, ...]:
        return self.loops[self.row_axis]

    def axes_with(self, part: Var, step: Var) -> tuple[tuple[str, Expr], ...]:
        """The axes where parts are one more loop of the batch, with a step along each in the place of the softmax' loop."""
        loops = {**self.loops, self.batch_axis: (part, *self.batch), self.softmax.over: (step,)}
        return _axes(loops)


def packed(layout: Layout) -> Layout:
    """The program with as many neighbours along a loop of the batch as rows as can be; the same where there are none."""
    shared = [
        value for value, axes in zip(layout.node.operands, layout.program.operands, strict=False)
        if layout.row_axis not in axes
    ]  # fmt: skip
    for loop in reversed(layout.batch):
        for count in _divisors(loop.extent):
            outer, inner = ix.var(f"{loop.name}_outer", ix.floordiv(loop.extent, count)), ix.var(f"{loop.name}_inner", count)
            mapping: dict[Atom, Expr] = {loop: outer.expr() * count + inner.expr()}
            if all(inner not in value.variables() for value in vs.substitute_all(shared, mapping)):
                return _with_rows(layout, loop, outer, inner, mapping)
    return layout


def _with_rows(layout: Layout, loop: Var, outer: Var, inner: Var, mapping: Mapping[Atom, Expr]) -> Layout:
    node = layout.node
    batch = tuple(outer if v is loop else v for v in layout.batch)
    loops = {**layout.loops, layout.batch_axis: batch, layout.row_axis: (inner, *layout.rows)}
    seconds = tuple(
        replace(one, value=vs.substitute(one.value, mapping), index=tuple(ix.substitute(e, mapping) for e in one.index))
        for one in node.seconds
    )
    out_vars = tuple(new for v in node.out_vars for new in ((outer, inner) if v is loop else (v,)))
    operands = tuple(vs.substitute_all(list(node.operands), mapping))
    made = replace(node, out_vars=out_vars, operands=operands, axes=_axes(loops), seconds=seconds, stored=())
    return replace(layout, node=made, loops=loops)


def _divisors(extent: Expr) -> Iterator[int]:
    """What certainly divides a length, from the largest on."""
    factor = math.gcd(*(coefficient for _, coefficient in extent.terms))
    yield from (n for n in range(min(factor, MOST_ROWS), 1, -1) if factor % n == 0)


def _loops(node: ir.Operation) -> dict[str, tuple[Var, ...]] | None:
    """The loops of each axis, outermost first; None where an axis is not their number."""
    found: dict[str, tuple[Var, ...]] = {}
    for axis, place in node.axes:
        atoms = ix.free_atoms(place)
        own = tuple(v for v in (*node.out_vars, *node.inner) if v in atoms)
        if ix.position_in(own) is not place:
            return None
        found[axis] = own
    return found


def _axes(loops: Mapping[str, tuple[Var, ...]]) -> tuple[tuple[str, Expr], ...]:
    return tuple((axis, ix.position_in(own)) for axis, own in loops.items())


__all__ = ["Layout", "packed"]
