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

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial, reduce

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.plan import Kernel
from kgen.ir.program import Axes, Contract, Elementwise, Program, Ref, Softmax
from kgen.ir.values import Value
from kgen.scheduler.analysis.dependencies import edges, needed, topological
from kgen.scheduler.analysis.memo import memoised_for
from kgen.scheduler.options import Options
from kgen.scheduler.protocol import Attempt, Candidate, Draft, Transform
from kgen.scheduler.selection.choose import contraction_of, contractions_of
from kgen.scheduler.selection.size_buckets import forget_first_sizes
from kgen.scheduler.transforms.graph_reader import COMPUTATIONS, Longer, Reader
from kgen.scheduler.transforms.near_programs import Miss, nearest
from kgen.scheduler.transforms.program_ends import End, SplitSum, by_preference, ends_of, may_end, one_hot
from kgen.scheduler.transforms.second_results import Rows, Shared, may_read_second, rewritten, shared
from kgen.scheduler.transforms.softmax_form import bare, factors
from kgen.templates import registry
from kgen.verdict import FusionDemand, OperatorCall, Outcome, Reason, Verdict

PROGRAM, COMPUTED = "program", "computed operands of a program"
# Contractions that a value may read for one to be looked for as a step. A sum along the residual connections of a network reads
# all of them, and trying each, with each that this reads, takes a time that grows with a power of the number of layers. Nobody
# else may need a step's result, and such sums have other readers.
MOST_CANDIDATES = 6


@dataclass(frozen=True, slots=True)
class Recognised:
    """A place where a program stands: the node that may take the place of whoever makes `out`. What it makes besides is
    `shared`. Where `split`, it makes a part of it, and other nodes the rest. Where it needs other programs beside it, so that
    nobody reads what its contractions make, `beside` are their names and its own. `from_memory` has operands read that it would
    compute, if there are such."""

    out: str
    operation: ir.Operation
    shared: tuple[Shared, ...] = ()
    split: SplitSum | None = None
    beside: frozenset[str] = frozenset()
    from_memory: ir.Operation | None = None

    @property
    def name(self) -> str:
        """By which it is decided about."""
        return ir.outs(self.operation)[0]

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """What takes the place."""
        return (self.operation,) if self.split is None else (self.operation, *self.split.rest)


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
        open_ = _with_those_beside([one for one in found.standing if draft.decisions.is_open(PROGRAM, one.name)])
        open_ = [one if draft.decisions.is_open(COMPUTED, one.name) else _from_memory(one) for one in open_]
        draft.computing = frozenset(one.name for one in open_ if one.from_memory is not None)
        if open_:
            draft.graph = applied(draft.graph, *open_)
            draft.nodes = draft.graph.nodes

    def unmeasured(self, candidate: Candidate, verdict: Verdict) -> Iterable[str]:
        return (candidate.target,)


class ComputedOperands(Transform):
    """Has operands of programs stored first where no template takes them as they are computed."""

    name = COMPUTED

    def objections(self, kernel: Kernel, chosen: Kernel | Verdict, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        out = contraction_of(kernel)
        if isinstance(chosen, Kernel) or out not in attempt.draft.computing:
            return {}
        return {Candidate(COMPUTED, out): replace(chosen, outcome=Outcome.STORED, reason=Reason.OPERAND_STORED)}


class Untaken(Transform):
    """Gives up programs that no template takes and no call computes. Whatever else is in their kernels goes first: this
    transform is asked last."""

    name = "untaken program"

    def objections(self, kernel: Kernel, chosen: Kernel | Verdict, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        matmuls = contractions_of(kernel)
        if isinstance(chosen, Kernel) or len(matmuls) > 1:
            return {}
        nodes = attempt.graph.nodes
        made = memoised_for(
            nodes, "made by programs", lambda: _made_by(n for n in nodes if isinstance(n, ir.Operation) and n.vendor is None)
        )
        why = replace(chosen, outcome=Outcome.ILLEGAL if chosen.reason is Reason.NO_TEMPLATE else Outcome.UNPROFITABLE)
        return {Candidate(PROGRAM, out): why for out in matmuls if out in made}


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
    """With nothing that the user wants apart, and nothing that is too long for all templates: two layers of a network may be
    a program, too."""
    found, order = _Found([], []), _order(options)

    def is_short(operation: ir.Operation, out: str) -> bool:
        return _is_short(operation, options.device(graph, out).kind)

    for place in recognised(graph, _registered(graph, options), found.refused, is_short):
        apart = Reason.FORBIDDEN if _is_forbidden(place.operation.origin.calls, options.demands) else order
        if apart is None:
            found.standing.append(place)
        else:
            found.refused.append(Verdict(place.out, "", Outcome.UNPROFITABLE, apart))
    return found


def _from_memory(place: Recognised) -> Recognised:
    return place if place.from_memory is None else replace(place, operation=place.from_memory, from_memory=None)


def _with_those_beside(found: Sequence[Recognised]) -> list[Recognised]:
    """The programs without those that need others, which are not there: what these need would be stored, and made again."""
    names = {one.name for one in found}
    return [one for one in found if one.beside <= names]


def _is_short(operation: ir.Operation, kind: str) -> bool:
    """Whether some template takes axes as long as these."""
    assert operation.program is not None
    sizes = {axis: ix.product(v.extent for v in ix.free_atoms(e) if isinstance(v, Var)) for axis, e in operation.axes}
    return registry.takes(kind, operation.program, {axis: size.as_int() for axis, size in sizes.items()})


def _is_forbidden(calls: Sequence[OperatorCall], demands: Iterable[FusionDemand]) -> bool:
    return any(not demand.wanted and demand.between(calls, calls) for demand in demands)


def recognised(
    graph: ir.Graph,
    programs: Iterable[Program],
    near: list[Verdict] | None = None,
    takes: Callable[[ir.Operation, str], bool] = lambda *_: True,
) -> list[Recognised]:
    """The places in a graph where one of the programs (in canonical form, the first that fits) stands, in program order, among
    those that something `takes`, in the place of who makes a buffer. One may be a step of another: when that is applied, nobody
    reads the one any more, and it goes. `near` gets why it stands nowhere else, where most of it does."""
    programs = by_preference(programs)
    if not programs:
        return []
    reader = Reader.of(graph)
    calls: list[Recognised] = []
    nodes: list[ir.Node] = []
    for node in graph.nodes:
        meant = ir.meaning_of(node)
        if meant is not None and any(meant.operator == program.key for program in programs):
            calls += [Recognised(ir.outs(meant)[0], meant)] if takes(meant, ir.outs(meant)[0]) else []
        else:
            nodes.append(node)
    finder = _Finder(graph, reader, programs, takes, lasting(graph, reader, may_end(graph, programs)), _Steps())
    made = _standing([one for node in nodes for one in finder.fittings(node)])
    if near is not None:
        standing = {one.out for one in made}
        near += [verdict for out, misses in finder.missed.items() if out not in standing for verdict in nearest(misses)]
    return sorted((*calls, *made), key=lambda one: reader.positions[one.out])


def lasting(graph: ir.Graph, reader: Reader, ends: Callable[[ir.Node], bool]) -> frozenset[str]:
    """What contractions make that somebody needs, whatever programs stand in the place of such `ends`: through other nodes, it
    leads to a result of the graph or to what no program replaces. As steps of programs they would be computed again."""
    found: set[str] = set()
    staying: set[int] = set()  # nodes that are there as they are, whatever programs stand
    for node in reversed(graph.nodes):
        outs = ir.outs(node)
        if (
            not isinstance(node, COMPUTATIONS)
            or not reader.visible.isdisjoint(outs)
            or any(id(one) in staying for out in outs for one in reader.readers.get(out, ()))
        ):
            found.update(outs if ir.is_contraction(node) else ())
            if not (ends(node) or may_read_second(node)):
                staying.add(id(node))
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class _Finder:
    """Looks for programs in a graph that something `takes`. Those with a step that is `lasting` cannot stand: where the first
    one of a place is found, the search for others ends at such steps. `missed` says why programs stand nowhere else."""

    graph: ir.Graph
    reader: Reader
    programs: Sequence[Program]
    takes: Callable[[ir.Operation, str], bool]
    lasting: frozenset[str]
    steps: _Steps
    missed: dict[str, list[Miss]] = field(default_factory=dict)

    def fittings(self, node: ir.Node) -> Iterator[_Fitting]:
        """The programs that may take the place of one node, by preference. Where it is a contraction, it notes what is
        missing."""
        misses = self.missed.setdefault(node.out, []) if ir.is_contraction(node) else []
        for program in self.programs:
            search = _Search(self.graph, self.reader, program, misses, self.steps, self.lasting)
            for end in ends_of(self.graph, self.reader, node, program):
                yield from _in_place(search, end, self.takes)


def _first_makers(recognised: Iterable[Recognised]) -> tuple[Recognised, ...]:
    """The operations, of which the first one makes a second result that several could: weights of one softmax may be multiplied
    by several matrices."""
    made: set[str] = set()
    found: list[Recognised] = []
    for place in recognised:
        own = tuple(one for one in place.shared if not made.issuperset(second.out for second in one.seconds))
        if len(own) < len(place.shared):
            left = {id(node) for one in place.shared if one not in own for node in one.made}
            replaces = tuple(node for node in place.operation.replaces if id(node) not in left)
            seconds = tuple(second for one in own for second in one.seconds)
            place = replace(place, shared=own, operation=replace(place.operation, replaces=replaces, seconds=seconds))
        made.update(second.out for one in own for second in one.seconds)
        found.append(place)
    return tuple(found)


def applied(graph: ir.Graph, *recognised: Recognised) -> ir.Graph:
    """The graph, with buffers of its own, with operations in the place of the nodes that they stand for. Those that somebody
    else reads stay."""
    recognised = _first_makers(recognised)
    made = {place.out: place.nodes for place in recognised}
    both = [one for place in recognised for one in place.shared]
    gone = frozenset[str]().union(*(one.gone for one in both))
    kept = [n for n in graph.nodes if gone.isdisjoint(ir.outs(n))]
    nodes = [one for n in kept for one in next((made[out] for out in ir.outs(n) if out in made), (n,))]
    new = [one.buffer for one in both]
    new += [buffer for place in recognised if place.split is not None for buffer in place.split.buffers]
    buffers = {**graph.buffers, **{buffer.name: buffer for buffer in new}}
    if both:
        nodes = [rewritten(n, [one.readers.get(next(iter(ir.outs(n)), ""), {}) for one in both]) for n in nodes]
    found = replace(graph, nodes=needed(graph, nodes, COMPUTATIONS), buffers=buffers)
    if both:  # who reads a second result may have come before the last contraction
        found.nodes = [found.nodes[k] for k in topological(edges(found), graph.name)]
    return found


@dataclass(frozen=True, slots=True)
class _Fitting:
    """An operation that may take the place of a contraction where nobody else needs what its other contractions make."""

    search: _Search
    end: End
    match: _Match
    operation: ir.Operation
    shared: tuple[Shared, ...]

    @property
    def out(self) -> str:
        return self.end.out

    @property
    def instead(self) -> dict[str, ir.Node]:
        return {self.out: self.operation, **(self.search.instead(self.shared, self.operation) if self.shared else {})}

    def gone_with(self, others: Sequence[_Fitting]) -> list[ir.Node]:
        """The nodes that nobody needs where it stands together with `others`."""
        instead: dict[str, ir.Node] = {}
        rest: list[ir.Node] = []
        for one in others:
            if one.shared:
                instead |= one.instead
            else:
                instead[one.end.out] = one.operation
            if one.end.split is not None:
                rest += one.end.split.rest
        return self.search.reader.only_for(instead, rest)

    def kept(self, gone: Set[str]) -> list[str]:
        """What its other contractions make and somebody else needs, where buffers are gone."""
        return sorted(self.match.inside - gone)

    def recognised(self, gone: Sequence[ir.Node]) -> Recognised:
        """With the nodes that it takes the place of, among those that are gone: others may stand for some of them, too."""
        node, reader = self.end.node, self.search.reader
        makers = {**{out: reader.makers[out] for out in self.instead}, self.out: node}
        ends = ((makers[out], reader.reads(made)) for out, made in self.instead.items())
        own = set[int]().union(*(reader.leading(end, read) for end, read in ends))
        gone = sorted((one for one in gone if id(one) in own), key=lambda one: reader.positions[ir.outs(one)[0]])
        origin = reduce(ir.Origin.joined, (one.origin for one in gone), ir.Origin()).joined(node.origin)
        named = replace(origin, name=node.origin.name, line=node.origin.line)
        replaces = (*gone, node, *(made for one in self.shared for made in one.made))
        seconds = tuple(second for one in self.shared for second in one.seconds)
        made = replace(self.operation, origin=named, replaces=replaces, seconds=seconds)
        return Recognised(self.out, made, self.shared, self.end.split, from_memory=self.search.from_memory(made, self.out))


def _in_place(search: _Search, end: End, takes: Callable[[ir.Operation, str], bool]) -> Iterator[_Fitting]:
    """The program with the contraction as its last step, once with the same contractions in front of it."""
    node, known = end.contraction, search.known
    known.clear()
    search.falling.clear()
    search.turned.clear()
    missed: list[tuple[_Match, tuple[Reason, ir.Node | None] | None]] = []
    for match in search.last(node) if node.operands is not None else ():
        if match.inside in known:
            continue
        operation = _operation(node, search.program, match)
        why = _objection(search.reader, end, operation)
        if operation is not None and why is None:
            known.add(match.inside)
            if not takes(operation, end.out):
                continue
            if match.inside.isdisjoint(search.lasting):
                yield _Fitting(search, end, match, operation, search.shared(match, operation))
            else:
                search.falling.append(match)
                _miss_of_reader(_Fitting(search, end, match, operation, ()), sorted(match.inside & search.lasting))
        else:
            missed.append((match, why))
    for match, why in missed if not known else ():  # with its factors the other way round it may fit
        search.miss(match, node, why)
    for match in search.turned if not known else ():
        search.miss(match, node, (Reason.SPACE_MISMATCH, node))


def _standing(found: Sequence[_Fitting]) -> list[Recognised]:
    """The first operation for each contraction that may stand: alone, or together with those of other contractions."""
    made: dict[str, Recognised] = {}
    for one in found:
        if one.out in made:
            continue
        gone = one.gone_with([one])
        if not one.kept(_made_by(gone)):
            made[one.out] = one.recognised(gone)
    return [*made.values(), *_together([one for one in found if one.out not in made])]


def _together(left: list[_Fitting]) -> list[Recognised]:
    """Those of which the other contractions are needed by nobody else but each other: programs may have some in common, such as
    scores in the gradients of both operands. When one does not stand, the others are looked at again; those go first that end
    in a step of another one, which may not need its result."""
    queues: dict[str, deque[_Fitting]] = {}  # those of one contraction, by preference
    for one in reversed(left):
        queues.setdefault(one.out, deque()).appendleft(one)
    while queues:
        first = [queue[0] for queue in queues.values()]
        gone = first[0].gone_with(first)
        names = _made_by(gone)
        kept = [one for one in first if not one.match.inside <= names]
        if not kept:
            made = [(one.match.inside, one.recognised(gone)) for one in first]
            return [replace(one, beside=_connected(inside, made)) for inside, one in made]
        steps = frozenset[str]().union(*[one.match.inside for one in first])
        refused = next((one for one in kept if one.out in steps), kept[0])
        _miss_of_reader(refused, refused.kept(names))
        queues[refused.out].popleft()
        if not queues[refused.out]:
            del queues[refused.out]
    return []


def _connected(inside: frozenset[str], made: Sequence[tuple[frozenset[str], Recognised]]) -> frozenset[str]:
    """The names of programs that have contractions in common with one, or with others that have: what none of them makes."""
    names = frozenset[str]()
    while True:
        more = [(other, one.name) for other, one in made if one.name not in names and not other.isdisjoint(inside)]
        if not more:
            return names
        names = names.union(name for _, name in more)
        inside = inside.union(*(other for other, _ in more))


def _made_by(nodes: Iterable[ir.Node]) -> set[str]:
    return {out for node in nodes for out in ir.outs(node)}


def _miss_of_reader(fitting: _Fitting, kept: Sequence[str]) -> None:
    """Notes who needs what a contraction makes."""
    operation, search, match = fitting.operation, fitting.search, fitting.match

    def needed_by() -> tuple[Reason, ir.Node | None]:
        other = search.reader.other_reader(kept[0], search.reader.makers[fitting.out], operation)
        between = other is not None and not set(ir.outs(other)).isdisjoint(search.reader.reads(operation))
        return Reason.NOT_ELEMENTWISE if between else Reason.NEEDED, other

    search.misses.append(Miss(search.reader, match.end, len(search.program.steps), late=needed_by))


def _objection(reader: Reader, end: End, operation: ir.Operation | None) -> tuple[Reason, ir.Node | None] | None:
    """Why the operation may not take the place of its nodes, and which node is in its way."""
    node = end.contraction
    if node.scale is not None or node.addend is not None or not _is_plain(node):
        return Reason.STEP_TYPES, node
    if operation is None:
        return Reason.SPACE_MISMATCH, node
    return None if reader.is_current(reader.reads(operation), end.out) else (Reason.MUTATION, None)


def _is_plain(node: ir.Contraction) -> bool:
    """Whether it is a sum of products of floating-point numbers, and rounded only where it is stored."""
    return node.operands is not None and node.operands.is_floating_point and node.operands.itemsize > 1 and node.rounded is None


# ---- steps ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Match:
    """What was found of a program that ends in a contraction: operands with their types; functions in slots, and the elements
    that they are functions of, by their steps; the loops that each step sums over; results of the contractions in front of the
    last one; whether rows that are masked as a whole give zeros; and the loops that a softmax of more columns stands for."""

    end: ir.Contraction
    operands: Mapping[int, tuple[Value, torch.dtype]] = field(default_factory=dict)
    slots: Mapping[str, Value] = field(default_factory=dict)
    elements: Mapping[str, Value] = field(default_factory=dict)
    sums: Mapping[str, tuple[Var, ...]] = field(default_factory=dict)
    inside: frozenset[str] = frozenset()
    safe: bool = False
    rows: tuple[Rows, ...] = ()
    longer: Mapping[Var, Longer] = field(default_factory=dict)

    @property
    def reached(self) -> int:
        """How many contractions were found in front of the last one."""
        return len(self.elements)


@dataclass(frozen=True, slots=True)
class _Steps:
    """What one step of a search makes of a contraction, whatever was found before it: searches for programs with two steps in
    front of the last one come by the same contraction in many ways."""

    apart: dict[int, tuple[ir.Contraction, ir.Contraction]] = field(default_factory=dict)
    moved: dict[Hashable, tuple[ir.Contraction, list[Value]]] = field(default_factory=dict)
    functions: dict[tuple[Value, Value, Value], Value] = field(default_factory=dict)
    memory: dict[Value, Value] = field(default_factory=dict)  # factors that are computed, as a library call reads them

    def with_factors_apart(self, node: ir.Contraction) -> ir.Contraction:
        """`_with_factors_apart`; the first of a pair keeps its address from being another node's."""
        found = self.apart.get(id(node))
        if found is None:
            found = self.apart[id(node)] = node, _with_factors_apart(node)
        return found[1]

    def factors(self, node: ir.Contraction, mapping: Mapping[Atom, Expr]) -> list[Value]:
        """The factors of a contraction with other indices in the place of its loops."""
        key = id(node), tuple(mapping.items())
        found = self.moved.get(key)
        if found is None:
            left, right, *stored = vs.substitute_all([node.lhs, node.rhs, *node.stored], mapping)
            found = self.moved[key] = node, [left, right]
            self.memory.update((one, there) for one, there in zip(found[1], stored, strict=False) if there is not one)
        return found[1]

    def function(self, value: Value, load: Value, made: Value) -> Value:
        """A value as a function of what is loaded."""
        key = value, load, made
        found = self.functions.get(key)
        if found is None:
            [found] = vs.replace_loads([value], lambda one: made if one is load else None)
            self.functions[key] = found
        return found


@dataclass(frozen=True, slots=True)
class _Search:
    """Goes backwards along the steps of one program. `misses` say where it went no further."""

    graph: ir.Graph
    reader: Reader
    program: Program
    misses: list[Miss]
    steps: _Steps
    lasting: frozenset[str] = frozenset()  # what somebody needs whatever stands
    known: set[frozenset[str]] = field(default_factory=set)  # contractions with which the program was found to stand
    falling: list[_Match] = field(default_factory=list)  # with contractions that somebody needs
    turned: list[_Match] = field(default_factory=list)  # in which all contractions were found, and a factor has no such axis

    @property
    def contractions(self) -> int:
        """Of the program."""
        return sum(isinstance(step, Contract) for step in self.program.steps)

    def shared(self, match: _Match, operation: ir.Operation) -> tuple[Shared, ...]:
        """The second results of steps that others read, of which the operation needs nothing."""
        wanted = {step.name for step in self.program.seconds}
        found = (shared(self.graph, self.reader, rows) for rows in match.rows if rows.step in wanted)
        both = tuple(one for one in found if one is not None)
        if not both:
            return ()
        needs = self.reader.leading(operation)
        outs = [out for one in both for out in (*one.readers, *one.gone)]
        return both if all(id(self.reader.makers[out]) not in needs for out in outs) else ()

    def from_memory(self, operation: ir.Operation, out: str) -> ir.Operation | None:
        """The operation with its computed operands read from where a library call would; None where that is the same."""
        count = len(self.program.operands)
        operands = [self.steps.memory.get(one, one) for one in operation.operands[:count]]
        made = replace(operation, operands=(*operands, *operation.operands[count:]))
        known = made.operands != operation.operands and self.reader.is_current(self.reader.reads(made), out)
        return made if known else None

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
        self, step: Contract, node: ir.Contraction, mapping: Mapping[Atom, Expr], match: _Match, guard: Value | None = None
    ) -> Iterator[_Match]:
        """A step that a node computes, whose loops are given by those of the last one, with its factors in either order. Where
        there is a `guard`, elements are read that do not exist without it."""
        values = [_guarded(one, guard) for one in self.steps.factors(node, mapping)]
        for left, right in map(partial(self._with_number_inside, step, node), (values, values[::-1])):
            for found in self._factor(step.left, left, node, step, match):
                yield from self._factor(step.right, right, node, step, found)

    def _with_number_inside(self, step: Contract, node: ir.Contraction, values: Sequence[Value]) -> Sequence[Value]:
        """Factors of a step, of which one is a function of other steps, and the other one 16-bit numbers times a number, in
        float32: the function has the number."""
        if node.operands is torch.float32:
            for own, other in ((0, 1), (1, 0)):
                narrow, number = _number_apart(values[own])
                apart = number != 1.0 and _narrow(narrow) is not None
                if apart and isinstance(step.reads[own], int) and self._is_function(step.reads[other]):
                    times = vs.call("mul", values[other], vs.const(number, values[other].dtype))
                    return (narrow, times) if own == 0 else (times, narrow)
        return values

    def _is_function(self, ref: Ref) -> bool:
        return isinstance(ref, str) and isinstance(self.program.step(ref), Elementwise)

    def _factor(self, ref: Ref, value: Value, node: ir.Contraction, reader: Contract, match: _Match) -> Iterator[_Match]:
        if isinstance(ref, int):
            kind = self._multiplied(value, node, reader)
            if value.op == "round_to" and value.attr is kind:  # as all operands are
                stored = self.steps.memory.get(value)
                [value] = value.args
                self.steps.memory.update({} if stored is None else {value: stored})
            if not self._may_be(ref, value, match):
                self.turned.extend([match] if match.reached + 1 == self.contractions else [])
                return
            yield replace(match, operands={**match.operands, ref: (value, kind)})
            return
        step, value = self.program.step(ref), self.reader.inlined(value)
        if isinstance(step, Elementwise) and self.program.multiplies(step):
            yield from self._multiple(step, value, reader, match)
        elif isinstance(step, Softmax):
            yield from self._weights(step, value, reader, match)
        else:
            yield from self._middle(step, value, match)

    def _multiple(self, step: Elementwise, value: Value, reader: Contract, match: _Match) -> Iterator[_Match]:
        """Weights times something that is made of no contraction: a slot may read what is in memory before the program runs."""
        softmax, along = self.program.step(step.of[0]), match.sums[reader.name]
        assert isinstance(softmax, Softmax)
        found = next((one for one in factors(value) if self.reader.weights(one.part, along) is not None), None)
        if found is None:
            return
        made = vs.step_result(softmax.name, found.part.dtype)
        function = found.times(made)
        if function is made or not self.reader.derived.isdisjoint(load.attr[0] for load in vs.loads([function])):
            return
        for one in self._weights(softmax, found.part, reader, match):
            yield replace(one, slots={**one.slots, step.name: function})

    def _weights(self, step: Softmax, value: Value, reader: Contract, match: _Match) -> Iterator[_Match]:
        along, before = match.sums[reader.name], self.program.step(step.of)
        filled = ix.lower_bound(ix.product(v.extent for v in along)) >= 1  # weights of nothing are no sum of nothing
        if not filled or self.program.reduced(reader) != (step.over,) or not isinstance(before, Contract):
            return
        weights = self.reader.weights(value, along)
        longer = self.reader.longer(value, along) if weights is None else None
        if weights is not None:
            rows = Rows(step.name, weights.of, weights.total, tuple(along))
            yield from self._middle(before, weights.of, replace(match, safe=weights.safe, rows=(*match.rows, rows)))
        elif longer is not None:
            rows = Rows(step.name, longer.weights.of, longer.weights.total, (longer.along,))
            found = replace(
                match, safe=longer.weights.safe, rows=(*match.rows, rows), sums={**match.sums, reader.name: (longer.order,)},
                longer={**match.longer, along[0]: longer},
            )  # fmt: skip
            yield from self._middle(before, longer.of, found)
        else:
            self.misses.append(Miss(self.reader, match.end, match.reached, value, along))

    def _may_be(self, operand: int, value: Value, match: _Match) -> bool:
        """Whether an operand has an axis for each loop of a value that some step sums over. Two factors are tried in either
        order, and most orders end here, before those of further steps are tried."""
        axes, loops = frozenset(self.program.operands[operand]), value.variables()
        for name, own in match.sums.items():
            if not loops.isdisjoint(own):
                step = self.program.step(name)
                if not isinstance(step, Contract) or axes.isdisjoint(self.program.reduced(step)):
                    return False
        return True

    def _multiplied(self, value: Value, node: ir.Contraction, step: Contract) -> torch.dtype:
        """The type in which an operand is multiplied. What steps before have made takes that of the 16-bit numbers with which
        it is multiplied, where the result is rounded to it as well."""
        kind = _narrow(value)
        made = any(isinstance(ref, str) for ref in step.reads)
        if kind is not None and made and node.operands is torch.float32 and self.reader.rounded_to(node.out) is kind:
            return kind
        return _multiplied(node)

    def _middle(self, step: Contract | Elementwise, value: Value, match: _Match) -> Iterator[_Match]:
        """A function of one element each of contractions, found for the steps of these one by one."""
        yield from self._elements(step, self.program.elements(step), value, match)

    def _elements(self, slot: Contract | Elementwise, steps: Sequence[str], value: Value, match: _Match) -> Iterator[_Match]:
        """The element of the first of `steps`, of those that are left; then the slot's function is complete."""
        if not steps:
            yield replace(match, slots={**match.slots, slot.name: value})
            return
        name, *others = steps
        step = self.program.step(name)
        assert isinstance(step, Contract)
        candidates = self._candidates(value, match)
        if not candidates:
            self.misses.append(Miss(self.reader, match.end, match.reached + 1, value))
        elif len(candidates) > MOST_CANDIDATES:
            self.misses.append(Miss(self.reader, match.end, match.reached + 1, reason=Reason.MANY_STEPS, blocker=match.end))
            return
        for load, node in candidates:
            for one, function in self._with(step, node, load, value, match):
                yield from self._elements(slot, others, function, one)

    def _candidates(self, value: Value, match: _Match) -> list[tuple[Value, ir.Contraction]]:
        """What a value reads of contractions, and these."""
        makers = (
            (load, self.reader.makers.get(load.attr[0])) for load in self.reader.loads(value) if not load.args or match.longer
        )
        return [(load, node) for load, node in makers if node is not None and ir.is_contraction(node) and _is_plain(node)]

    def _with(
        self, step: Contract, node: ir.Contraction, load: Value, value: Value, match: _Match
    ) -> Iterator[tuple[_Match, Value]]:
        """With the step's element being what is loaded: the match, and the function of it."""
        known = match.elements.get(step.name)
        if known is not None and known is not load:  # another step has read another element of it
            return
        if self.falling and not self.lasting.isdisjoint((node.out, *match.inside)):
            return  # it would not stand either
        if known is None and match.reached + 2 == self.contractions and match.inside | {node.out} in self.known:
            return  # with these the program was found to stand: which step has which does not matter
        node = self.steps.with_factors_apart(node)
        mapping: dict[Atom, Expr] = dict(zip(node.out_vars, load.attr[1], strict=True))
        made = vs.step_result(step.name, load.dtype)
        made = vs.where(load.args[0], made, vs.const(0, made.dtype)) if load.args else made
        for factor, op in ((node.scale, "mul"), (node.addend, "add")):
            if factor is not None:
                made = vs.call(op, made, vs.cast(vs.substitute(factor, mapping), made.dtype))
        function = self.steps.function(value, load, made)
        if any(one.attr[0] == node.out for one in vs.loads([function])):  # it reads other elements as well
            self.misses.append(Miss(self.reader, match.end, match.reached + 2, reason=Reason.INDEX_MISMATCH, blocker=node))
            return
        if known is not None:
            yield match, function
            return
        own = {v: ix.var(f"{step.name}_{v.name}", v.extent) for v in node.reduced}
        inside = replace(
            match, elements={**match.elements, step.name: load}, sums={**match.sums, step.name: tuple(own.values())},
            inside=match.inside | {node.out},
        )  # fmt: skip
        within: dict[Atom, Expr] = {**mapping, **{v: w.expr() for v, w in own.items()}}
        for one in self._contraction(step, node, within, inside, load.args[0] if load.args else None):
            yield one, function


def _guarded(value: Value, guard: Value | None) -> Value:
    """An operand that is read where a guard holds, which is about loops that it knows."""
    return value if guard is None or guard.variables().isdisjoint(value.variables()) else vs.guard_loads(value, guard)


def _lengthened(value: Value, match: _Match) -> Value:
    """An operand along the columns of a softmax that has more of them: 0 where there is no element."""
    for loop, longer in match.longer.items():
        if loop in value.variables():
            value = vs.where(longer.kept, longer.read(value, loop), vs.const(0, value.dtype))
    return value


def _with_factors_apart(node: ir.Contraction) -> ir.Contraction:
    """The contraction of the 16-bit numbers themselves where operands are these times a number, as where queries are scaled, or
    both share out a scale in float32: the sum is multiplied by it."""
    (left, by), (right, times) = ((one, 1.0) if one.op == "load" else _number_apart(bare(one)) for one in (node.lhs, node.rhs))
    if by * times == 1.0:
        return node
    wide = node.operands is torch.float32 and _narrow(left) is not None and _narrow(left) is _narrow(right)
    if not wide and not all(number == 1.0 or _narrow(one) is node.operands for one, number in ((left, by), (right, times))):
        return node
    factor = vs.const(by * times, torch.float32)
    scale = factor if node.scale is None else vs.call("mul", node.scale, factor)
    left, right = (one if number != 1.0 else own for one, number, own in ((left, by, node.lhs), (right, times, node.rhs)))
    return replace(node, lhs=left, rhs=right, scale=scale)


def _number_apart(value: Value) -> tuple[Value, float]:
    """What is multiplied by a number, and the number."""
    if value.op == "mul":
        for one, other in (value.args, value.args[::-1]):
            if other.op == "const" and isinstance(other.attr, float) and math.isfinite(other.attr) and other.attr != 0.0:
                return one, other.attr
    return value, 1.0


def _multiplied(node: ir.Contraction) -> torch.dtype:
    """The type in which operands are multiplied: the 16-bit one of which both are numbers, widened before, for what is added
    up is the same, and so is the type of sums."""
    assert node.operands is not None
    left, right = map(_narrow, (node.lhs, node.rhs))
    return left if left is not None and left is right and node.operands is torch.float32 else node.operands


def _narrow(value: Value) -> torch.dtype | None:
    """The 16-bit type of which a value is a number."""
    kind = value.attr[2] if value.op == "load" else value.attr if value.op == "round_to" else None
    return kind if kind in (torch.float16, torch.bfloat16) else None


# ---- the operation --------------------------------------------------------------------------------------------------


def _operation(node: ir.Contraction, program: Program, match: _Match) -> ir.Operation | None:
    """The node, if each loop is of some axis and each value depends on loops of its own axes alone."""
    values = [_lengthened(match.operands[k][0], match) for k in range(len(program.operands))]
    loops = _loops(node, program, match, values)
    if loops is None:
        return None
    slots = [match.slots[step.name] for step in program.middles]
    wanted = [*program.operands, *(step.axes for step in program.middles)]
    if not all(_is_over(value, loops, axes) for value, axes in zip((*values, *slots), wanted, strict=True)):
        return None
    kinds = _types(match, values)
    axes = tuple((axis, ix.position_in(own)) for axis, own in loops.items())
    inner = tuple(v for step in reversed(program.steps) if isinstance(step, Contract) for v in match.sums[step.name])
    arguments = (("safe", match.safe),) if any(isinstance(step, Softmax) for step in program.steps) else ()
    return ir.Operation(
        (node.out,), node.out_vars, inner, (*values, *slots), (*kinds, *(slot.dtype for slot in slots)), axes, program.key,
        arguments, None, node.origin, program=program,
    )  # fmt: skip


def _types(match: _Match, values: Sequence[Value]) -> list[torch.dtype]:
    """In which operands are multiplied: what is 1, or 1 here and there, in the type of the others."""
    kinds = [match.operands[k][1] for k in range(len(values))]
    exact = [value.op == "const" or one_hot(value) for value in values]
    others = [kind for kind, free in zip(kinds, exact, strict=True) if not free]
    return [others[0] if free and others else kind for kind, free in zip(kinds, exact, strict=True)]


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
    inside = {a: {k for k, axes in enumerate(program.operands) if a in axes} for a in program.axes}
    known = [(k, value.variables()) for k, value in enumerate(operands)]
    for v, step in sites:
        needed = {k for k, its in known if v in its}
        fitting = [a for a in program.axes if inside[a] >= needed and summed.get(a, "") == step]
        if not fitting:
            return None
        loops[min(fitting, key=lambda a: len(inside[a]))].append(v)
    return {axis: tuple(own) for axis, own in loops.items()}


__all__ = ["Recognised", "Recognition", "Untaken", "applied", "recognised"]
