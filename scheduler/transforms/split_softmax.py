"""Splits the softmax of programs with few rows, as Flash-Decoding does: each part of the axis has its own maximum and sum.
A generated reduction joins the parts and runs the epilogue. Two launches, and always the same order of addition.

    out[b, m, v] = f(sum over n of softmax(s[b, m, n]) v[b, n, v])
    part[p, b, m, v], l[p, b, m] = the same of n = p * chunk + j, and its log-sum-exp
    w[p, b, m] = exp(l[p, b, m] - max over p of l[p, b, m])
    out[b, m, v] = f(sum over p of w[p, b, m] part[p, b, m, v] / sum over p of w[p, b, m])

Loops of the batch that operands without rows repeat along become rows before (`program_axes.py:packed`): a tile of rows reads
these operands once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Expr, Sizes, Var
from kgen.ir.plan import Kernel
from kgen.ir.values import Value
from kgen.scheduler.protocol import Attempt, Candidate, Changes, Draft, Transform
from kgen.scheduler.selection.choose import contraction_of
from kgen.scheduler.transforms.accumulators import make_accumulators
from kgen.scheduler.transforms.program_axes import Layout, packed
from kgen.verdict import Outcome, Verdict

SPLIT_SOFTMAX = "split softmax"
# Rows up to which a program has few, rows of a tile of a template, and programs that an SM runs side by side.
FEW, TILE, SIDE_BY_SIDE = 16, 64, 2
# The shortest part, and what parts are a multiple of where they do not divide the axis: pages and tiles of templates do.
SHORTEST, ROUND, MOST = 256, 128, 128
# A share of the time above the best that fewer parts may cost.
SLACK = 1.1


@dataclass(frozen=True, slots=True)
class Split:
    """The setting: into how many parts the axis of the softmax is split, and whether a loop of the batch becomes rows."""

    parts: int
    packs: bool

    @property
    def is_needed(self) -> bool:
        return self.parts > 1 or self.packs


class SplitSoftmax(Transform):
    """Splits programs of templates that would leave SMs or threads idle."""

    name = SPLIT_SOFTMAX

    def apply(self, draft: Draft) -> None:
        wanted = {out: how for out, how in draft.decisions.settled(SPLIT_SOFTMAX, Split).items() if how.is_needed}
        if wanted:
            draft.nodes = [one for node in draft.nodes for one in _applied(draft, node, wanted)]

    def settle(self, attempt: Attempt) -> Changes:
        """Programs that were not asked yet, where some are worth it. Selection was asked before: templates have them."""
        found = {Candidate(self.name, out): how for out, how in _wanted(attempt)}
        return Changes(found) if any(how.is_needed for how in found.values()) else Changes()

    def objections(self, kernel: Kernel, chosen: Kernel | Verdict, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        """What no template has in parts stays whole."""
        source = ir.source_in(attempt.graph, contraction_of(kernel), SPLIT_SOFTMAX)
        if isinstance(chosen, Kernel) or source is None:
            return {}
        return {Candidate(self.name, source): replace(chosen, producer=source, outcome=Outcome.UNPROFITABLE)}


def _applied(draft: Draft, node: ir.Node, wanted: Mapping[str, Split]) -> Sequence[ir.Node]:
    if not isinstance(node, ir.Operation) or node.program is None or node.vendor is not None or ir.outs(node)[0] not in wanted:
        return (node,)
    source, layout = ir.outs(node)[0], Layout.of(node)
    how = wanted[source]
    assert layout is not None
    if how.packs:
        layout = packed(layout)
    made, joining = cut(draft.graph, node, layout, how.parts) if how.parts > 1 else _gathered(draft.graph, node, layout.node)
    make_accumulators(draft.graph, made)
    out = ir.outs(made)[0]
    draft.measured_as[out] = source
    draft.without_library.add(out)
    draft.asked.add(out)
    return (made, *joining)


def _wanted(attempt: Attempt) -> Iterator[tuple[str, Split]]:
    plan, options, decisions = attempt.plan, attempt.options, attempt.decisions
    known, sizes = decisions.settled(SPLIT_SOFTMAX, Split), Sizes(plan.graph.size_hints)
    kernels = {contraction_of(step): step for step in plan.steps if isinstance(step, Kernel) and step.contracts}
    for node in attempt.draft.nodes:
        if not isinstance(node, ir.Operation) or node.vendor is not None or ir.outs(node)[0] not in kernels:
            continue
        out, layout = ir.outs(node)[0], Layout.of(node)
        asked = out in known or out in attempt.draft.measured_as or not decisions.is_open(SPLIT_SOFTMAX, out)
        if asked or layout is None or not _may_split(kernels[out], sizes.points(layout.rows)):
            continue
        more = packed(layout)
        device = options.device(plan.graph, out)
        slots = device.compute_units * (SIDE_BY_SIDE if device.kind == "cuda" else 1)
        parts = best_parts(more, sizes, slots) if options.only is None else options.only.parts
        parts = 1 if node.seconds else parts
        yield out, Split(parts, more is not layout)


def _may_split(kernel: Kernel, rows: int) -> bool:
    """Whether a program has few rows, and a kernel of its own without reductions of its tiles."""
    single = sum(s.kind == "contraction" for s in kernel.statements) == 1
    return rows <= FEW and single and not any(s.kind == "partial" for s in kernel.statements)


def best_parts(layout: Layout, sizes: Sizes, slots: int) -> int:
    """The number of parts with which `slots` programs at a time are done first. Of numbers that are about as good, those that
    divide the axis count, and of these the smallest."""
    tiles = sizes.points(layout.batch) * -(-sizes.points(layout.rows) // TILE)
    length = sizes.of(layout.over.extent)
    most = min(MOST, length // SHORTEST)
    costs = {parts: -(-tiles * parts // slots) / parts for parts in range(1, most + 1)}
    least = min(costs.values(), default=0.0)
    good = [parts for parts, cost in costs.items() if cost <= SLACK * least]
    even = [parts for parts in good if layout.over.extent.as_int() is not None and not length % (parts * ROUND)]
    return next(iter(even or good), 1)


# ---- what it becomes ------------------------------------------------------------------------------------------------


def _gathered(graph: ir.Graph, node: ir.Operation, made: ir.Operation) -> tuple[ir.Operation, list[ir.Node]]:
    """The program with other loops, and what stores its elements where they were stored."""
    name = _buffer(graph, node, SPLIT_SOFTMAX, made.out_vars)
    out = ir.outs(node)[0]
    value = vs.load(name, _place(made, node), graph.buffers[name].dtype)
    whole = graph.buffers[out]
    stored = ir.Pointwise(out, node.out_vars, vs.cast(value, ops.compute_dtype(whole.dtype)), node.origin)
    return replace(made, outs=(name,), stored=(), replaces=()), [stored]


def cut(graph: ir.Graph, node: ir.Operation, layout: Layout, parts: int) -> tuple[ir.Operation, list[ir.Node]]:
    """The program of the parts; what joins these. Buffers are added to the graph."""
    made, over = layout.node, layout.over
    chunk, even = _chunk(over.extent, parts)
    part, step = ix.var("part", parts), ix.var("step", chunk)
    place = part.expr() * chunk + step.expr()
    name = _buffer(graph, node, SPLIT_SOFTMAX, (part, *made.out_vars))
    rows = tuple(v for v in made.out_vars if v in {*layout.batch, *layout.rows})
    lse = _buffer(graph, node, "log-sum-exp of parts", (part, *rows))
    kind = graph.buffers[lse].dtype
    second = ir.Second(layout.softmax.name, lse, vs.step_result(layout.softmax.name, kind), _exprs((part, *rows)))
    partial = replace(
        made, outs=(name,), out_vars=(part, *made.out_vars), inner=tuple(step if v is over else v for v in made.inner),
        operands=_in_parts(layout, place, even), axes=layout.axes_with(part, step), arguments=(("safe", True),), vendor=None,
        stored=(), replaces=(), seconds=(second,),
    )  # fmt: skip
    at = dict(zip(_exprs(made.out_vars), _place(made, node), strict=True))
    lse_load = vs.load(lse, (part.expr(), *(at[v.expr()] for v in rows)), kind)
    made_load = vs.load(name, (part.expr(), *_place(made, node)), graph.buffers[name].dtype)
    return partial, _joined(graph, node, part, lse_load, made_load)


def _joined(graph: ir.Graph, node: ir.Operation, part: Var, lse: Value, made: Value) -> list[ir.Node]:
    """The reductions over the parts. Each point of the result works out the weights of its row: there are few parts."""
    row, kind = _exprs(node.out_vars), made.dtype
    names = {role: _buffer(graph, node, role, node.out_vars) for role in ("top of parts", "weight of parts", "sum of parts")}
    top, weight, total = (vs.load(name, row, kind) for name in names.values())
    power = vs.call("exp", vs.call("sub", lse, top))
    each = {
        "top of parts": ("max", lse),
        "weight of parts": ("sum", power),
        "sum of parts": ("sum", vs.call("mul", power, made)),
    }
    nodes: list[ir.Node] = [
        ir.Reduction((names[role],), node.out_vars, (part,), op, value, node.origin) for role, (op, value) in each.items()
    ]
    value = vs.call("truediv", total, weight)
    if dict(node.arguments).get("safe"):
        value = vs.where(vs.call("eq", top, vs.const(-math.inf, kind)), vs.const(0, kind), value)
    out = ir.outs(node)[0]
    value = vs.cast(value, ops.compute_dtype(graph.buffers[out].dtype))
    return [*nodes, ir.Pointwise(out, node.out_vars, value, node.origin)]


def _chunk(length: Expr, parts: int) -> tuple[Expr, bool]:
    """The length of a part, and whether that divides the axis."""
    whole = length.as_int()
    if whole is not None and whole % parts == 0:
        return ix.constant(whole // parts), True
    return ix.ceildiv(ix.ceildiv(length, parts), ROUND) * ROUND, False


def _in_parts(layout: Layout, place: Expr, even: bool) -> tuple[Value, ...]:
    """Operands and functions in slots with the place in the axis in the place of its loop. Past its end scores are -inf, and
    operands those of the last place: it is multiplied by 0 there, as eager may multiply it."""
    made, over, program = layout.node, layout.over, layout.program
    count = len(program.operands)
    last = place if even else ix.minimum(place, over.extent - 1)
    found = list(vs.substitute_all(list(made.operands[:count]), {over: last}))
    inside = vs.const(True, torch.bool) if even else vs.compare("lt", place, over.extent)
    for step, value in zip(program.middles, vs.substitute_all(list(made.operands[count:]), {over: place}), strict=True):
        found.append(value if even or layout.softmax.over not in step.axes else _inside(value, inside))
    return tuple(found)


def _inside(value: Value, inside: Value) -> Value:
    """A score, or -inf past the end of the axis. Loads that do not go along the axis, such as those of lengths, stay as they
    are: templates look for them in masks."""
    free = {load for load in vs.loads([value]) if load.variables().isdisjoint(inside.variables())}
    return vs.where(inside, vs.guard_loads(value, inside, free), vs.const(-math.inf, value.dtype))


def _buffer(graph: ir.Graph, node: ir.Operation, role: str, loops: Sequence[Var]) -> str:
    """A new buffer over loops, in the type in which the result is computed."""
    source = ir.outs(node)[0]
    whole, name = graph.buffers[source], ir.derived(graph, ir.Derived(source, role))
    sizes = tuple(v.extent for v in loops)
    graph.buffers[name] = ir.Buffer(name, ops.compute_dtype(whole.dtype), whole.device, sizes, ix.contiguous_strides(sizes))
    return name


def _place(made: ir.Operation, node: ir.Operation) -> tuple[Expr, ...]:
    """Where an element of the node is in what was `made` with a loop that became two."""
    found: list[Expr] = []
    loops = list(made.out_vars)
    for v in node.out_vars:
        first = loops.pop(0)
        if first is v:
            found.append(v.expr())
        else:
            second = loops.pop(0)
            found += [ix.floordiv(v.expr(), second.extent), ix.mod(v.expr(), second.extent)]
    return tuple(found)


def _exprs(loops: Sequence[Var]) -> tuple[Expr, ...]:
    return tuple(v.expr() for v in loops)


__all__ = ["SPLIT_SOFTMAX", "Split", "SplitSoftmax", "best_parts", "cut"]
