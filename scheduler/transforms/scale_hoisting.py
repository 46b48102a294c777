"""Scales of a matmul's operands: factors that do not depend on what is summed over leave the sum, which is linear.

    sum over k of (x[m, k] * r[m] * g[k]) * w[k, n]   becomes   r[m] * (sum over k of (x[m, k] * g[k]) * w[k, n])

So a matmul behind an RMS norm reads plain rows, by TMA where there is one, and its epilogue multiplies by numbers
that a kernel of row statistics makes; nothing of the operand's size is written. Scales of quantised weights by output column,
of attention, and signs leave as well. A graph is rewritten before fusion, matmul by matmul.

*Which factors.* Those of a literal multiplication: through multiplications, a numerator, a sign, and conversions to wider
floats. A quotient by a value of the row is the reciprocal of that, taken once for a row. Sums of several terms are left alone:
a layer norm's mean would need column sums of the other operand.

*Rounding.* Numbers in a kernel are rounded where the program converts them, and the operand where it is stored; a scale that
leaves takes its own rounding along, so that the operand is rounded without it. That must not lose what the scale was for.
What remains is allowed to be rounded to bfloat16, whose range is that of float32: errors are relative, and no larger than
before. To float16 only numbers that it holds exactly may remain, such as elements of a tensor of that type (x * g could be
infinite where x * r * g is not), and no scale leaves a conversion to 8 bits.

*Numbers that are not finite.* A row has the same kind of result as before in all cases but one: infinities times zero, zero
times an infinite scale and NaNs end as NaN on either way, since 0 * inf is NaN before the sum and behind it; finite rows with
an infinite scale, NaN or infinite before, are infinite or NaN. Sums of float16 and of 8-bit numbers cannot exceed float32's
range without their scales either. Sums of bfloat16 and float32 can where they are beyond 1e38 unscaled, and then are infinite
(or, below 1e-38, lose digits). Sums over nothing are 0 whatever the scale, so lengths must be at least 1.

*Masks.* What is scaled under a condition stays: `where(n > 0, x / n, 0)` guards against the very scale that would leave.

With ``numerics="stable"`` or ``"eager"`` the program's order of multiplications stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.nodes import Buffer, Origin
from kgen.ir.values import Value
from kgen.scheduler.analysis.dependencies import overwritten, reads_of
from kgen.scheduler.analysis.memory import root
from kgen.scheduler.protocol import Draft, Transform
from kgen.templates.base import Request
from kgen.templates.capabilities import Capabilities
from kgen.verdict import FusionDemand, OperatorCall, Outcome, Reason, Verdict

_OPERANDS = ("left operand", "right operand")
# Scales that could leave but had better not.
_DEAR = (Reason.SCALE_SUMMED, Reason.SCALE_NEEDED, Reason.SCALE_REMAINS)


@dataclass(frozen=True, slots=True)
class Parts:
    """A value as factors: what depends on the loops that are summed over, None if nothing does, and scales that do not.
    `refusal` is why a scale stays inside of the former."""

    rest: Value | None
    scales: tuple[Value, ...] = ()
    refusal: Reason | None = None


def parts_of(root: Value, summed: frozenset[Var]) -> Parts:
    """The value taken apart."""
    found: dict[Value, Parts] = {}
    for value in vs.topological([root], through_indices=False):
        if value.dtype.is_floating_point and value.variables().isdisjoint(summed):
            found[value] = Parts(None, (value,))
        else:
            found[value] = _parts(value, [found[a] for a in value.args])
    return found[root]


def _parts(value: Value, args: Sequence[Parts]) -> Parts:
    """Of an operation that depends on what is summed over."""
    if not value.dtype.is_floating_point:
        return Parts(value)
    if value.op == "mul":
        rests = [one.rest for one in args if one.rest is not None]
        refusal = next((one.refusal for one in args if one.refusal), None)
        return Parts(_multiplied(rests), tuple(s for one in args for s in one.scales), refusal)
    if value.op == "truediv" and args[1].rest is None and args[0].rest is not None:
        below = _reciprocal(value.args[1])
        return Parts(value) if below is None else replace(args[0], scales=(*args[0].scales, below))
    if value.op == "neg":
        return replace(args[0], scales=(*args[0].scales, vs.const(-1, value.dtype)))
    if value.op in ("cast", "round_to") and args[0].rest is not None:
        return _converted(value, args[0])
    if value.op == "where":
        masked = any(one.scales and one.rest is not None for one in args[1:])
        return Parts(value, refusal=Reason.SCALE_MASKED if masked else None)
    return Parts(value)


def _multiplied(factors: Iterable[Value]) -> Value:
    return reduce(lambda a, b: vs.call("mul", a, b), factors)


def _reciprocal(value: Value) -> Value | None:
    if value.op == "const":
        return vs.const(1 / value.attr, value.dtype) if 1e-30 < abs(value.attr) < 1e30 else None
    return vs.call("truediv", vs.const(1, value.dtype), value)


def _converted(value: Value, inside: Parts) -> Parts:
    rest = inside.rest
    assert rest is not None
    if not inside.scales:
        return Parts(value, refusal=inside.refusal)
    if not rest.dtype.is_floating_point or not _fits(rest, value.attr):
        return Parts(value, refusal=Reason.SCALE_FITS)
    return Parts(vs.cast(rest, value.attr), tuple(vs.cast(s, value.dtype) for s in inside.scales), inside.refusal)


def _fits(rest: Value, kind: torch.dtype) -> bool:
    """Whether what remains without scales may be rounded to a type."""
    if kind in (torch.bfloat16, torch.float32):
        return rest.dtype is torch.float32 or _is_exact(rest, kind)
    return kind is torch.float64 or (kind is torch.float16 and _is_exact(rest, kind))


def _is_exact(value: Value, kind: torch.dtype) -> bool:
    """Whether a floating-point type has the number whatever it is."""
    if value.op == "neg":
        return _is_exact(value.args[0], kind)
    if value.op == "load":
        return value.attr[2] in (kind, *ops.NARROW_FLOATS[2:])
    if value.op == "round_to":
        return value.attr in (kind, *ops.NARROW_FLOATS[2:])
    if value.op == "cast":
        source = value.args[0].dtype
        whole = not source.is_floating_point and source is not torch.bool
        return source is torch.bool or (whole and torch.iinfo(source).max + 1 <= 2 / torch.finfo(kind).eps)
    return False


@dataclass(frozen=True, slots=True)
class _Operand:
    """An operand without its scales. `shared` counts the matmuls that would read the scaled operand from one kernel."""

    rest: Value
    scale: Value
    calls: tuple[OperatorCall, ...] = ()
    shared: int = 1


class ScaleHoisting(Transform):
    """Takes scales of operands out of the sums of contractions."""

    name = "scale hoisting"

    def apply(self, draft: Draft) -> None:
        if not draft.taken or not draft.options.prologues:
            return
        graph = replace(draft.graph, nodes=draft.before)
        options = draft.options
        scales = Scales(graph, draft.taken, options.demands, options.scales, options.capabilities(graph))
        nodes: list[ir.Node] = []
        for node in draft.nodes:
            if ir.is_contraction(node) and node.out in draft.taken:
                matmul, made = scales.without(node)
                nodes += [*made, matmul]
            else:
                nodes.append(node)
        draft.nodes = nodes
        draft.verdicts += scales.verdicts


@dataclass(slots=True)
class Scales:
    """The matmuls of a graph without their operands' scales, one after the other. `taken` are those that templates may
    compute, with these `capabilities`. What was decided is in `verdicts`; without `allowed` nothing leaves. Buffers of scales
    are added to the graph."""

    graph: ir.Graph
    taken: frozenset[str]
    demands: tuple[FusionDemand, ...] = ()
    allowed: bool = True
    capabilities: Capabilities = field(default_factory=Capabilities)
    verdicts: list[Verdict] = field(default_factory=list)
    makers: dict[str, ir.Pointwise | ir.Reduction] = field(default_factory=dict)
    readers: dict[str, list[ir.Node]] = field(default_factory=dict)
    sums: set[tuple[object, ...]] = field(default_factory=set)
    made: dict[Value, str] = field(default_factory=dict)
    dispensable: dict[str, bool] = field(default_factory=dict)  # whether nobody needs a scaled operand in memory
    kept: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)  # storages that some node writes to

    def __post_init__(self) -> None:
        self.kept = ir.visible(self.graph)
        for node in self.graph.nodes:
            if isinstance(node, ir.Pointwise | ir.Reduction):
                self.makers |= dict.fromkeys(ir.outs(node), node)
            if isinstance(node, ir.Reduction) and node.op == "sum":
                self.sums.add(_form(node.value))
            self.changed.update(root(self.graph, name) for name in overwritten(node))
            for name in reads_of(node):
                self.readers.setdefault(name, []).append(node)

    def without(self, node: ir.Contraction) -> tuple[ir.Contraction, list[ir.Node]]:
        """The matmul with the scales of its operands behind its sum, and nodes that make such scales."""
        assert node.operands is not None
        if not node.operands.is_floating_point or any(ix.lower_bound(v.extent) < 1 for v in node.reduced):
            return node, []
        operands, shared = [node.lhs, node.rhs], [0, 0]
        scales: list[Value] = []
        nodes: list[ir.Node] = []
        origin = node.origin
        for k in range(2):
            found = self._operand(node, k)
            if not isinstance(found, _Operand):
                if found is not None:
                    outcome = Outcome.UNPROFITABLE if found in _DEAR else Outcome.ILLEGAL
                    self.verdicts.append(Verdict(node.out, _OPERANDS[k], outcome, found))
                continue
            calls = (*found.calls, *node.origin.calls)
            wanted = any(d.wanted and d.between(calls, calls) for d in self.demands)
            scale, made = (found.scale, []) if wanted else self._beside_statistics(found.scale)
            if not (wanted or self.capabilities.may(node.out, Request(scale_cost=vs.total_cost([scale])))):
                self.verdicts.append(Verdict(node.out, _OPERANDS[k], Outcome.UNPROFITABLE, Reason.EXPENSIVE))
                continue
            operands[k], shared[k], nodes = found.rest, found.shared, [*nodes, *made]
            scales.append(scale)
            origin = Origin(found.calls).joined(origin)
            self.verdicts.append(Verdict(node.out, _OPERANDS[k], Outcome.FUSED, Reason.SCALE_LEAVES))
        if not scales:
            return node, []
        kind = ops.sum_dtype(node.operands)
        given = [] if node.scale is None else [node.scale]
        scale = _multiplied(vs.cast(s, kind) for s in (*given, *scales))
        lhs, rhs = operands
        origin = replace(origin, name=node.origin.name, line=node.origin.line)
        return replace(node, lhs=lhs, rhs=rhs, scale=scale, unscaled=(shared[0], shared[1]), origin=origin), nodes

    # ---- one operand --------------------------------------------------------------------------------------------------

    def _operand(self, node: ir.Contraction, k: int) -> _Operand | Reason | None:
        """An operand without its scales, or why they stay; None where it has none."""
        value = (node.lhs, node.rhs)[k]
        stored = value.attr[0] if value.op == "load" else ""
        maker = self.makers.get(stored)
        if isinstance(maker, ir.Pointwise):
            return self._stored(node, k, maker)
        return self._apart(node, value)

    def _apart(self, node: ir.Contraction, value: Value) -> _Operand | Reason | None:
        """An operand that is computed as part of the matmul."""
        assert node.operands is not None
        parts = parts_of(value, frozenset(node.reduced))
        if parts.rest is None or not parts.scales:
            return parts.refusal
        if not self.allowed:
            return Reason.SCALE_ORDER
        if not _fits(parts.rest, node.operands):
            return Reason.SCALE_FITS
        if _form(value) in self.sums:
            return Reason.SCALE_SUMMED
        kind = ops.sum_dtype(node.operands)
        return _Operand(parts.rest, _multiplied(vs.cast(s, kind) for s in parts.scales))

    def _stored(self, node: ir.Contraction, k: int, maker: ir.Pointwise) -> _Operand | Reason | None:
        """An operand that a loop makes in memory: all who read it have to do without."""
        found = self._computed(node, k, maker)
        if not isinstance(found, _Operand):
            return found
        name, readers = maker.out, self.readers[maker.out]
        if name not in self.dispensable:
            self.dispensable[name] = name not in self.kept and all(self._can_do_without(one, maker) for one in readers)
        if not self.dispensable[name]:
            return Reason.SCALE_NEEDED
        return replace(found, calls=maker.origin.calls, shared=len(readers))

    def _can_do_without(self, reader: ir.Node, maker: ir.Pointwise) -> bool:
        """Whether a node is a matmul which a template may compute from the operand without scales."""
        if not ir.is_contraction(reader) or reader.out not in self.taken or reader.operands is None:
            return False
        if any(not d.wanted and d.between(maker.origin.calls, reader.origin.calls) for d in self.demands):
            return False
        stored = reader.stored or (reader.lhs, reader.rhs)
        positions = [k for k, value in enumerate(stored) if any(load.attr[0] == maker.out for load in vs.loads([value]))]
        return bool(positions) and all(isinstance(self._computed(reader, k, maker), _Operand) for k in positions)

    def _computed(self, node: ir.Contraction, k: int, maker: ir.Pointwise) -> _Operand | Reason | None:
        """The operand as its maker computes it, if what remains of that is in memory."""
        value = (node.stored or (node.lhs, node.rhs))[k]
        if value.op != "load" or value.attr[0] != maker.out or value.args:
            return Reason.SCALE_NEEDED
        place: dict[Atom, Expr] = dict(zip(maker.vars, value.attr[1], strict=True))
        kind = self.graph.buffers[maker.out].dtype
        found = self._apart(node, vs.cast(vs.substitute(maker.value, place), kind))
        if not isinstance(found, _Operand):
            return found
        if any(root(self.graph, load.attr[0]) in self.changed for load in vs.loads([maker.value])):
            return Reason.MUTATION  # the matmul may run after that
        return found if _is_plain(found.rest, node.operands) else Reason.SCALE_REMAINS

    # ---- scales ---------------------------------------------------------------------------------------------------------

    def _beside_statistics(self, scale: Value) -> tuple[Value, list[ir.Node]]:
        """A scale that is computed from results of reductions, as a node over their loops: it joins their kernel, and epilogues
        stay short. Other scales are left as they are."""
        every = vs.loads([scale])
        loads = [load for load in every if isinstance(self.makers.get(load.attr[0]), ir.Reduction)]
        # one index into reductions of other sizes, as into a slice of the longer one, is no loop nest over both
        shapes = {(load.attr[1], self.graph.buffers[load.attr[0]].sizes) for load in loads}
        apart = any(load.args for load in loads) or len(shapes) != 1
        if scale.op == "load" or apart or any(root(self.graph, load.attr[0]) in self.changed for load in every):
            return scale, []
        index = loads[0].attr[1]
        source = self.graph.buffers[loads[0].attr[0]]
        loops = tuple(ix.var(f"s{n}", size) for n, size in enumerate(source.sizes))
        here = tuple(v.expr() for v in loops)

        def moved(load: Value) -> Value | None:
            return vs.load(load.attr[0], here, load.attr[2]) if load in loads else None

        [value] = vs.replace_loads([scale], moved)
        plain = {e.atom(): v for e, v in zip(index, here, strict=True) if isinstance(e.atom(), Var)}
        value = vs.substitute(value, plain)
        if not value.variables() <= set(loops):
            return scale, []
        nodes: list[ir.Node] = []
        if value not in self.made:
            name = self.made[value] = ir.derived(self.graph, ir.Derived(source.name, "scale", len(self.made)))
            sizes = source.sizes
            self.graph.buffers[name] = Buffer(name, scale.dtype, source.device, sizes, ix.contiguous_strides(sizes))
            nodes = [ir.Pointwise(name, loops, value, self.makers[source.name].origin)]
        return vs.load(self.made[value], index, scale.dtype), nodes


def _is_plain(value: Value, kind: torch.dtype | None) -> bool:
    return value.op == "load" and value.attr[2] == kind and not value.args


def _form(value: Value) -> tuple[object, ...]:
    """Equal for values that compute the same of the same buffers, whatever their loops: one that is summed as well is read once
    as it is."""
    return tuple((v.op, v.attr[0] if v.op == "load" else repr(v.attr)) for v in vs.by_place([value]))


__all__ = ["Parts", "ScaleHoisting", "Scales", "parts_of"]
