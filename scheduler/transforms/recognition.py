"""Recognises programs of templates in the loop IR: contractions, what is between them, and the softmax that joins them, however
they were written.

    bmm     = contraction(q, k)                      out = operation(q, k, v, score(step0))
    where   = pointwise(mask, bmm * scale)
    amax    = max(where)
    exp     = pointwise(exp(where - amax))      ->
    sum     = sum(exp)
    out     = contraction(exp / sum, v)

The search begins at a contraction and goes backwards along the steps of a program (`kgen/ir/program.py`). Elementwise nodes on
the way are inlined, through any view, so that one value says what the contraction multiplies; values are interned, so what a
reduction reduces is the same computation if it is the same value. Nothing here knows what a program is for.

A program takes the place of its last contraction only where nobody else needs what its other contractions make: the point is
that these are never stored. What was rounded to 16 bits between two nodes is not rounded in a kernel, as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.plan import Kernel
from kgen.ir.program import Axes, Contract, Program, Ref, Softmax
from kgen.ir.values import Value
from kgen.scheduler.analysis.dependencies import edges, needed, topological
from kgen.scheduler.analysis.memo import memoised_for
from kgen.scheduler.options import Options
from kgen.scheduler.protocol import Attempt, Candidate, Draft, Transform
from kgen.scheduler.selection.choose import contractions_of
from kgen.scheduler.selection.size_buckets import forget_first_sizes
from kgen.scheduler.transforms.graph_reader import COMPUTATIONS, Reader
from kgen.scheduler.transforms.near_programs import Miss, nearest
from kgen.scheduler.transforms.second_results import Rows, Shared, rewritten, shared
from kgen.templates import registry
from kgen.verdict import FusionDemand, Outcome, Reason, Verdict

PROGRAM = "program"


@dataclass(frozen=True, slots=True)
class Recognised:
    """A place where a program stands: the node that may take the place of whoever makes `out`. What it makes besides is
    `shared`."""

    out: str
    operation: ir.Operation
    shared: tuple[Shared, ...] = ()


class Recognition(Transform):
    """Puts operations in the place of the nodes that mean a program of some template. Whoever makes one keeps these nodes: what
    no template takes is made of them."""

    name = PROGRAM

    def prepare(self, graph: ir.Graph, options: Options) -> None:
        """Calls that mean programs depend on sizes as contractions do."""
        if programs_for(graph, options):
            forget_first_sizes(graph, [meant for meant in map(ir.meaning_of, graph.nodes) if meant is not None])

    def apply(self, draft: Draft) -> None:
        found = _search(draft.graph, draft.options)
        draft.verdicts += found.refused
        open_ = [place for place in found.standing if draft.decisions.is_open(PROGRAM, place.out)]
        if open_:
            draft.graph = applied(draft.graph, *open_)
            draft.nodes = draft.graph.nodes

    def unmeasured(self, candidate: Candidate, verdict: Verdict) -> Iterable[str]:
        return (candidate.target,)


class Untaken(Transform):
    """Gives up programs that no template takes and no call computes. Whatever else is in their kernels goes first: this
    transform is asked last."""

    name = "untaken program"

    def objections(self, kernel: Kernel, chosen: Kernel | Verdict, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        matmuls = contractions_of(kernel)
        if isinstance(chosen, Kernel) or len(matmuls) > 1:
            return {}
        made = [n for n in attempt.graph.nodes if isinstance(n, ir.Operation) and n.vendor is None]
        why = replace(chosen, outcome=Outcome.ILLEGAL if chosen.reason is Reason.NO_TEMPLATE else Outcome.UNPROFITABLE)
        return {Candidate(PROGRAM, out): why for out in matmuls if any(out in ir.outs(node) for node in made)}


def programs_for(graph: ir.Graph, options: Options) -> list[Program]:
    """The programs that templates implement on the devices of a graph, and that may stand there."""
    return [] if _order(options) is not None else _registered(graph, options)


def _registered(graph: ir.Graph, options: Options) -> list[Program]:
    """A graph in which no program can end loads no templates."""
    wanted = options.templates and options.programs and options.fusion
    ends = any(ir.is_contraction(node) or ir.meaning_of(node) is not None for node in graph.nodes)
    if not (wanted and ends) or not registry.programs():
        return []
    kinds = {options.device(graph, name).kind for name in graph.buffers}
    return [program for kind in sorted(kinds) for program in registry.programs(kind)]


def _order(options: Options) -> Reason | None:
    """Why programs may not stand anywhere: their templates divide behind a sum, and add up in the order of their tiles."""
    if options.stable:
        return Reason.STABLE_ORDER
    return None if options.scales else Reason.SCALE_ORDER


@dataclass(frozen=True, slots=True)
class _Found:
    """Programs that may stand where they were recognised, and why others may not."""

    standing: list[Recognised]
    refused: list[Verdict]


def _search(graph: ir.Graph, options: Options) -> _Found:
    """Programs are looked for once: attempts begin with the same list of nodes."""
    return memoised_for(graph.nodes, PROGRAM, lambda: _searched(graph, options))


def _searched(graph: ir.Graph, options: Options) -> _Found:
    """With nothing that the user wants apart."""
    found, order = _Found([], []), _order(options)
    for place in recognised(graph, _registered(graph, options), found.refused):
        apart = Reason.FORBIDDEN if _is_forbidden(place.operation.origin.operators, options.demands) else order
        if apart is None:
            found.standing.append(place)
        else:
            found.refused.append(Verdict(place.out, "", Outcome.UNPROFITABLE, apart))
    return found


def _is_forbidden(operators: Sequence[str], demands: Iterable[FusionDemand]) -> bool:
    return any(not demand.wanted and demand.between(operators, operators) for demand in demands)


def recognised(graph: ir.Graph, programs: Iterable[Program], near: list[Verdict] | None = None) -> list[Recognised]:
    """The places in a graph where one of the programs (in canonical form, the first that fits) stands, in program order. One
    may be a step of another: when that is applied, nobody reads the one any more, and it goes. `near` gets why it
    stands nowhere else, where most of it does."""
    programs = list(programs)
    if not programs:
        return []
    reader = Reader.of(graph)
    found: list[Recognised] = []
    for node in graph.nodes:
        one, meant = None, ir.meaning_of(node)
        if meant is not None:
            known = any(meant.operator == program.key for program in programs)
            one = Recognised(ir.outs(meant)[0], meant) if known else None
        elif ir.is_contraction(node):
            missed: list[Miss] = []
            fitting = (_in_place(_Search(graph, reader, program, missed), node) for program in programs)
            one = next((place for place in fitting if place is not None), None)
            if one is None and near is not None:
                near += nearest(missed)
        found += [one] if one is not None else []
    return found


def applied(graph: ir.Graph, *recognised: Recognised) -> ir.Graph:
    """The graph, with buffers of its own, with operations in the place of the nodes that they stand for. Those that somebody
    else reads stay."""
    made = {place.out: place.operation for place in recognised}
    both = [one for place in recognised for one in place.shared]
    gone = frozenset[str]().union(*(one.gone for one in both))
    nodes = [next((made[out] for out in ir.outs(n) if out in made), n) for n in graph.nodes if gone.isdisjoint(ir.outs(n))]
    buffers = {**graph.buffers, **{one.buffer.name: one.buffer for one in both}}
    if both:
        nodes = [rewritten(n, [one.readers.get(next(iter(ir.outs(n)), ""), {}) for one in both]) for n in nodes]
    found = replace(graph, nodes=needed(graph, nodes, COMPUTATIONS), buffers=buffers)
    if both:  # who reads a second result may have come before the last contraction
        found.nodes = [found.nodes[k] for k in topological(edges(found), graph.name)]
    return found


def _in_place(search: _Search, node: ir.Contraction) -> Recognised | None:
    """The program whose last step the contraction is."""
    reader = search.reader
    for match in search.last(node) if node.operands is not None else ():
        operation = _operation(node, search.program, match)
        both = () if operation is None else search.shared(match, operation)
        gone = [] if operation is None else reader.only_for({node.out: operation, **search.instead(both, operation)})
        why = _objection(reader, node, operation, gone, match)
        if operation is not None and why is None:
            gone.sort(key=lambda one: reader.positions[ir.outs(one)[0]])
            origin = reduce(ir.Origin.joined, (one.origin for one in gone), ir.Origin()).joined(node.origin)
            named = replace(origin, name=node.origin.name, line=node.origin.line)
            replaces = (*gone, node, *(made for one in both for made in one.made))
            seconds = tuple(second for one in both for second in one.seconds)
            return Recognised(node.out, replace(operation, origin=named, replaces=replaces, seconds=seconds), both)
        search.miss(match, node, why)
    return None


def _objection(
    reader: Reader, node: ir.Contraction, operation: ir.Operation | None, gone: Sequence[ir.Node], match: _Match
) -> tuple[Reason, ir.Node | None] | None:
    """Why the operation may not take the place of its nodes, and which node is in its way."""
    if node.scale is not None or node.addend is not None or not _is_plain(node):
        return Reason.STEP_TYPES, node
    if operation is None:
        return Reason.SPACE_MISMATCH, node
    kept = sorted(match.inside.difference(*map(ir.outs, gone)))
    if kept:
        other = reader.other_reader(kept[0], node, operation)
        between = other is not None and not set(ir.outs(other)).isdisjoint(ir.reads(operation))
        return Reason.NOT_ELEMENTWISE if between else Reason.NEEDED, other
    return None if reader.is_current(ir.reads(operation), node.out) else (Reason.MUTATION, None)


def _is_plain(node: ir.Contraction) -> bool:
    """Whether it is a sum of products of floating-point numbers, and rounded only where it is stored."""
    return node.operands is not None and node.operands.is_floating_point and node.operands.itemsize > 1 and node.rounded is None


# ---- steps ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Match:
    """What was found of a program that ends in a contraction: operands with their types, functions in slots, the loops that
    each step sums over, results of the contractions in front of the last one, and whether rows that are masked as a whole give
    zeros."""

    end: ir.Contraction
    operands: Mapping[int, tuple[Value, torch.dtype]] = field(default_factory=dict)
    slots: Mapping[str, Value] = field(default_factory=dict)
    sums: Mapping[str, tuple[Var, ...]] = field(default_factory=dict)
    inside: frozenset[str] = frozenset()
    safe: bool = False
    rows: tuple[Rows, ...] = ()


@dataclass(frozen=True, slots=True)
class _Search:
    """Goes backwards along the steps of one program. `misses` say where it went no further."""

    graph: ir.Graph
    reader: Reader
    program: Program
    misses: list[Miss]

    def shared(self, match: _Match, operation: ir.Operation) -> tuple[Shared, ...]:
        """The second results of steps that others read, of which the operation needs nothing."""
        wanted = {step.name for step in self.program.seconds}
        found = (shared(self.graph, self.reader, rows) for rows in match.rows if rows.step in wanted)
        both = tuple(one for one in found if one is not None)
        needs = self.reader.leading(operation)
        outs = [out for one in both for out in (*one.readers, *one.gone)]
        return both if all(id(self.reader.makers[out]) not in needs for out in outs) else ()

    def instead(self, both: Iterable[Shared], operation: ir.Operation) -> dict[str, ir.Node]:
        """What stands in the place of those who read second results, by what they make."""
        changes: dict[str, list[Mapping[Value, Value]]] = {}
        for one in both:
            for out, new in one.readers.items():
                changes.setdefault(out, []).append(new)
        found: dict[str, ir.Node] = {out: rewritten(self.reader.makers[out], new) for out, new in changes.items()}
        return found | {out: operation for one in both for out in one.gone}

    def miss(self, match: _Match, node: ir.Contraction, why: tuple[Reason, ir.Node | None] | None) -> None:
        """Notes what is in the way of a program of which all steps were found."""
        assert why is not None
        self.misses.append(Miss(self.reader, match.end, len(self.program.steps), reason=why[0], blocker=why[1]))

    def last(self, node: ir.Contraction) -> Iterator[_Match]:
        step = self.program.steps[-1]
        assert isinstance(step, Contract)
        return self._contraction(step, node, {}, _Match(node, sums={step.name: node.reduced}))

    def _contraction(
        self, step: Contract, node: ir.Contraction, mapping: Mapping[Atom, Expr], match: _Match
    ) -> Iterator[_Match]:
        """A step that a node computes, whose loops are given by those of the last one, with its factors in either order."""
        values = vs.substitute_all([node.lhs, node.rhs], mapping)
        for left, right in (values, values[::-1]):
            for found in self._factor(step.left, left, node, step, match):
                yield from self._factor(step.right, right, node, step, found)

    def _factor(self, ref: Ref, value: Value, node: ir.Contraction, reader: Contract, match: _Match) -> Iterator[_Match]:
        if isinstance(ref, int):
            assert node.operands is not None
            yield replace(match, operands={**match.operands, ref: (value, node.operands)})
            return
        step, value = self.program.step(ref), self.reader.inlined(value)
        if isinstance(step, Contract):
            yield from self._middle(step, value, match)
            return
        along, before = match.sums[reader.name], self.program.step(step.of)
        filled = ix.lower_bound(ix.product(v.extent for v in along)) >= 1  # weights of nothing are no sum of nothing
        if not filled or self.program.reduced(reader) != (step.over,) or not isinstance(before, Contract):
            return
        weights = self.reader.weights(value, along)
        if weights is None:
            self.misses.append(Miss(self.reader, match.end, len(match.slots), value, along))
        else:
            rows = Rows(step.name, weights.of, weights.total, tuple(along))
            yield from self._middle(before, weights.of, replace(match, safe=weights.safe, rows=(*match.rows, rows)))

    def _middle(self, step: Contract, value: Value, match: _Match) -> Iterator[_Match]:
        """A function of one contraction's element."""
        found = False
        for load in vs.loads([value]):
            node = self.reader.makers.get(load.attr[0])
            if node is not None and ir.is_contraction(node) and _is_plain(node) and not load.args:
                found = True
                yield from self._with(step, node, load, value, match)
        if not found:
            self.misses.append(Miss(self.reader, match.end, len(match.slots) + 1, value))

    def _with(self, step: Contract, node: ir.Contraction, load: Value, value: Value, match: _Match) -> Iterator[_Match]:
        own = {v: ix.var(f"{step.name}_{v.name}", v.extent) for v in node.reduced}
        mapping: dict[Atom, Expr] = dict(zip(node.out_vars, load.attr[1], strict=True))
        made = vs.step_result(step.name, load.dtype)
        for factor, op in ((node.scale, "mul"), (node.addend, "add")):
            if factor is not None:
                made = vs.call(op, made, vs.cast(vs.substitute(factor, mapping), made.dtype))
        [function] = vs.replace_loads([value], lambda one: made if one is load else None)
        if any(one.attr[0] == node.out for one in vs.loads([function])):  # it reads other elements as well
            reached = len(match.slots) + 2
            self.misses.append(Miss(self.reader, match.end, reached, reason=Reason.INDEX_MISMATCH, blocker=node))
            return
        inside = replace(
            match, slots={**match.slots, step.name: function}, sums={**match.sums, step.name: tuple(own.values())},
            inside=match.inside | {node.out},
        )  # fmt: skip
        yield from self._contraction(step, node, {**mapping, **{v: w.expr() for v, w in own.items()}}, inside)


# ---- the operation --------------------------------------------------------------------------------------------------


def _operation(node: ir.Contraction, program: Program, match: _Match) -> ir.Operation | None:
    """The node, if each loop is of some axis and each value depends on loops of its own axes alone."""
    values = [match.operands[k][0] for k in range(len(program.operands))]
    loops = _loops(node, program, match, values)
    if loops is None:
        return None
    slots = [match.slots[step.name] for step in program.middles]
    wanted = [*program.operands, *(step.axes for step in program.middles)]
    if not all(_is_over(value, loops, axes) for value, axes in zip((*values, *slots), wanted, strict=True)):
        return None
    kinds = [match.operands[k][1] for k in range(len(program.operands))]
    axes = tuple((axis, ix.position_in(own)) for axis, own in loops.items())
    inner = tuple(v for step in reversed(program.steps) if isinstance(step, Contract) for v in match.sums[step.name])
    arguments = (("safe", match.safe),) if any(isinstance(step, Softmax) for step in program.steps) else ()
    return ir.Operation(
        (node.out,), node.out_vars, inner, (*values, *slots), (*kinds, *(slot.dtype for slot in slots)), axes, program.key,
        arguments, None, node.origin, program=program,
    )  # fmt: skip


def _is_over(value: Value, loops: Mapping[str, tuple[Var, ...]], axes: Axes) -> bool:
    return value.variables() <= {v for axis in axes for v in loops[axis]}


def _loops(
    node: ir.Contraction, program: Program, match: _Match, operands: Sequence[Value]
) -> dict[str, tuple[Var, ...]] | None:
    """The loops of each axis: of the result, or summed over by the step that does so; in all operands that know the loop, and
    in as few others as can be."""
    summed = {axis: step.name for step in program.steps if isinstance(step, Contract) for axis in program.reduced(step)}
    loops: dict[str, list[Var]] = {axis: [] for axis in program.axes}
    sites = [(v, "") for v in node.out_vars] + [(v, name) for name, own in match.sums.items() for v in own]
    for v, step in sites:
        needed = {k for k, value in enumerate(operands) if v in value.variables()}
        inside = {a: {k for k, axes in enumerate(program.operands) if a in axes} for a in program.axes}
        fitting = [a for a in program.axes if inside[a] >= needed and summed.get(a, "") == step]
        if not fitting:
            return None
        loops[min(fitting, key=lambda a: len(inside[a]))].append(v)
    return {axis: tuple(own) for axis, own in loops.items()}


__all__ = ["Recognised", "Recognition", "Untaken", "applied", "recognised"]
