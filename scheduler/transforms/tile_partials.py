"""Reductions of a matmul along its rows or columns run on the matmul's tiles: each tile stores its part of the result, and a
node of its own joins the parts. So ``exp(x @ w).sum(-1)`` and ``logsumexp(x @ w, -1)`` never store ``x @ w``.

The nodes are rewritten before fusion: a `Partial` is then fused into the matmul's epilogue like any pointwise consumer, and
what joins the parts like any reduction. One that finds no matmul's kernel makes the schedule be made anew without it. Which
part is joined when is fixed by the plan, so results repeat from run to run.

A sum of exponentials below the maximum of the same values (softmax, log-sum-exp) would need the maximum of all tiles first.
Each tile subtracts its own maximum instead, and the parts are rescaled when they are joined (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018). Means and squared deviations join by Chan, Golub and LeVeque (1979).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Sizes, Var
from kgen.ir.plan import MAX_PERSISTENT, PART, Kernel, Schedule, Statement, members
from kgen.ir.values import Index, Value
from kgen.scheduler.analysis.dependencies import reads_of
from kgen.scheduler.protocol import Attempt, Candidate, Changes, Draft, Transform
from kgen.scheduler.selection.choose import contraction_of, part_blocks
from kgen.scheduler.transforms.gather_reduction import checked, with_masked_gathers
from kgen.scheduler.transforms.offered import offered_for_rows
from kgen.templates.base import Request
from kgen.templates.capabilities import Capabilities
from kgen.verdict import FusionDemand, Outcome, Reason, Verdict

TILE_PARTIALS, FULL_ROWS = "tile partials", "full-row tiles"


@dataclass(frozen=True, slots=True)
class Tiles:
    """What earlier attempts found out about reductions on tiles. By the first buffer of their parts: how many points a part has
    (`blocks`), which is for a template's tile to say, and which reductions have to stay `apart` from their contraction.
    `demanded` say which operators the user wants to see fused, `rows` are contractions whose tiles may hold
    full rows, and `capabilities` those of the registered templates."""

    blocks: Mapping[str, int] = field(default_factory=dict)
    apart: frozenset[str] = frozenset()
    demanded: tuple[FusionDemand, ...] = ()
    rows: frozenset[str] = frozenset()
    capabilities: Capabilities = field(default_factory=Capabilities, compare=False)


def tiles_of(draft: Draft) -> Tiles:
    """What was decided about reductions on tiles so far."""
    decisions, options = draft.decisions, draft.options
    demanded = tuple(d for d in options.demands if d.wanted)
    rows = offered_for_rows(draft.graph, options) - decisions.refused(FULL_ROWS).keys()
    apart = frozenset(decisions.refused(TILE_PARTIALS))
    capabilities = options.capabilities(draft.graph)
    return Tiles(decisions.settled(TILE_PARTIALS, int), apart, demanded, rows, capabilities)


# What is said of a reduction on tiles where its kernel is not taken, by what was said of the kernel.
_UNTAKEN = {
    Reason.NO_TEMPLATE: (Outcome.ILLEGAL, Reason.NOT_IN_TILES),
    Reason.UNCALIBRATED: (Outcome.UNPROFITABLE, Reason.UNCALIBRATED),
}


class TilePartials(Transform):
    """Reduces the tiles of contractions in their kernels, and joins the parts in a kernel of their own."""

    name = TILE_PARTIALS

    def apply(self, draft: Draft) -> None:
        if draft.taken:
            draft.nodes = tile_reductions(draft.graph, draft.nodes, tiles_of(draft))

    def check(self, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        return {Candidate(self.name, part): verdict for part, verdict in alone(attempt.plan).items()}

    def settle(self, attempt: Attempt) -> Changes:
        """Points of the parts into which the chosen tiles cut what contractions reduce, where that was not known."""
        found: dict[Candidate, Hashable] = {}
        for kernel in (one for step in attempt.plan.kernels for one in members(step)):
            if any(s.block == 0 for s in tile_partials(kernel)):
                device = attempt.options.device(attempt.graph, contraction_of(kernel))
                blocks = part_blocks(kernel, attempt.graph, device)
                found |= {Candidate(self.name, part): block for part, block in blocks.items()}
        return Changes(found)

    def objections(self, kernel: Kernel, chosen: Kernel | Verdict, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        """Where no template takes the kernel with the reductions on its tiles, or no measured one, these are rejected."""
        if isinstance(chosen, Kernel) or chosen.reason not in _UNTAKEN:
            return {}
        out, (outcome, reason) = contraction_of(kernel), _UNTAKEN[chosen.reason]
        return {
            Candidate(self.name, s.outs[0]): Verdict(out, s.outs[0], outcome, reason, detail=chosen.detail)
            for s in tile_partials(kernel)
        }


@dataclass(frozen=True, slots=True)
class Traced:
    """A buffer of one element for each element of a matmul: `matmul` at `index`, in terms of the buffer's own loops."""

    matmul: str
    index: Index
    vars: tuple[Var, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """A reduction that may run on tiles: it reads `matmul`, and along one axis of it reduces over `loops`; over `rest`, the
    joining node does."""

    node: ir.Reduction
    matmul: str
    value: Value
    loops: tuple[Var, ...]
    rest: tuple[Var, ...]
    block: int
    fixed: bool
    parts: tuple[str, ...]  # buffers of the parts of its results
    maximum: Site | None = None  # of what a sum of exponentials subtracts
    exponent: Value | None = None

    @property
    def all_loops(self) -> tuple[Var, ...]:
        return (*self.node.vars, *self.loops, *self.rest)

    @property
    def extents(self) -> tuple[tuple[Expr, ...], ...]:
        """Extents of the loops that are kept, of those reduced on tiles, and of those reduced behind them. Two sites that group
        equal extents in another way reduce other points of one value."""
        groups = (self.node.vars, self.loops, self.rest)
        return tuple(tuple(v.extent for v in group) for group in groups)

    @property
    def length(self) -> Expr:
        return ix.product(v.extent for v in self.loops)

    @property
    def count(self) -> Expr:
        return ix.ceildiv(self.length, self.block)


def tile_partials(kernel: Kernel) -> tuple[Statement, ...]:
    return tuple(s for s in kernel.statements if s.kind == "partial")


def alone(plan: Schedule) -> dict[str, Verdict]:
    """Partial reductions that fusion left in kernels of their own, with the reason: these are not for tiles to compute."""
    found: dict[str, Verdict] = {}
    for kernel in plan.kernels:
        if isinstance(kernel, Kernel) and not kernel.contracts:
            for s in tile_partials(kernel):
                found[s.outs[0]] = _refusal(plan, kernel.origins[0].name)
    return found


def _refusal(plan: Schedule, name: str) -> Verdict:
    """Why fusion kept a partial reduction apart from every matmul."""
    refusals = [v for v in plan.verdicts if v.consumer == name and v.outcome in (Outcome.ILLEGAL, Outcome.UNPROFITABLE)]
    return refusals[0] if refusals else Verdict("", name, Outcome.ILLEGAL, Reason.NOT_IN_TILES)


def tile_reductions(graph: ir.Graph, nodes: list[ir.Node], tiles: Tiles) -> list[ir.Node]:
    """The nodes with reductions of matmuls cut into parts and what joins them; buffers of parts are added to the graph."""
    unpicked = Search(graph, tiles, nodes)
    each = unpicked.traced
    while True:  # to pick an element of what is in memory is better left to who needs it
        picked = with_masked_gathers(graph, nodes, frozenset(each))
        search = Search(graph, tiles, picked.nodes) if picked.columns else unpicked
        stored = {name for name, traced in each.items() if traced.matmul in search.stored}
        if not stored:
            break
        each = {name: traced for name, traced in each.items() if name not in stored}
    sites = search.worthwhile()
    out: list[ir.Node] = []
    for node in picked.nodes:
        site = sites.get(ir.outs(node)[0]) if isinstance(node, ir.Reduction) else None
        out += [node] if site is None else _Cut(graph, site, picked.columns.get(site.node.outs[0])).run()
    return out


class Search:
    """Finds the reductions of matmuls, in one walk over the nodes."""

    def __init__(self, graph: ir.Graph, tiles: Tiles, nodes: list[ir.Node]) -> None:
        self.graph, self.tiles = graph, tiles
        self.sizes = Sizes(graph.size_hints)
        self.axes: dict[str, tuple[tuple[int, ...], ...]] = {}  # matmul -> its axes that are cut into tiles, as dimensions
        self.windowed: set[str] = set()
        self.order: dict[str, int] = {}  # matmuls, with their places
        self.traced: dict[str, Traced] = {}
        self.after: dict[str, frozenset[str]] = {}  # buffer -> matmuls of which some reduction has to be complete before it
        self.made: dict[str, ir.Pointwise] = {}
        self.sites: dict[str, Site] = {}
        self.unfolded: dict[tuple[str, Value], Value] = {}  # of a reduction and a load: what is computed again
        self.revisited: set[str] = set()  # matmuls whose elements are read again when a reduction of them is complete
        self.stored: set[str] = set()  # matmuls of which something else than reductions on tiles needs each element
        for node in nodes:
            self.visit(node)
        kept = ir.visible(graph)
        self.stored |= {traced.matmul for name, traced in self.traced.items() if name in kept}

    def visit(self, node: ir.Node) -> None:
        if ir.is_contraction(node) and node.vendor is None:
            self._matmul(node)
            return
        reads = reads_of(node)
        after = frozenset().union(*(self.after.get(name, ()) for name in reads))
        read = {self.traced[name].matmul for name in reads if name in self.traced}
        if isinstance(node, ir.Reduction):
            site = self._site(node)
            if site is not None:
                self.sites[node.outs[0]] = site
            self.stored |= read - {site.matmul if site is not None else ""}
            after |= read
        if isinstance(node, ir.Pointwise):
            self.made[node.out] = node
            place = self._place(node.value)
            if place is not None and place[0] not in after:
                self.traced[node.out] = Traced(*place, node.vars)
            elif place is not None:
                self.revisited.add(place[0])
        if not isinstance(node, ir.Reduction):
            self.stored |= read - {self.traced[out].matmul for out in ir.outs(node) if out in self.traced}
        for out in ir.outs(node):
            self.after[out] = after

    def _matmul(self, node: ir.Contraction) -> None:
        self.axes[node.out] = _tiled_axes(node)
        if node.windowed:
            self.windowed.add(node.out)
        self.traced[node.out] = Traced(node.out, tuple(v.expr() for v in node.out_vars), node.out_vars)
        self.order.setdefault(node.out, len(self.order))
        self.after[node.out] = frozenset().union(*(self.after.get(name, ()) for name in reads_of(node)))

    def _place(self, value: Value) -> tuple[str, Index] | None:
        """The latest matmul that the value reads, and the element of it."""
        found: dict[str, Index] = {}
        for load in vs.loads([value]) if self.traced else ():
            traced = self.traced.get(load.attr[0])
            if traced is not None and traced.matmul not in found:
                mapping: dict[Atom, Expr] = dict(zip(traced.vars, load.attr[1], strict=True))
                found[traced.matmul] = tuple(ix.substitute(e, mapping) for e in traced.index)
        latest = max(found, key=self.order.__getitem__, default=None)
        return None if latest is None else (latest, found[latest])

    def worthwhile(self) -> dict[str, Site]:
        """Without those of a matmul whose rows are read again anyway, to be normalised say, and fit in registers then: a
        launch would be added, and a softmax's exponentials recomputed, for nothing. What the user demands is worth it."""
        idle = {
            s.matmul
            for s in self.sites.values()
            if s.matmul in self.revisited and self._fits_registers(s) and not self._demanded(s.node)
        }
        return {name: s for name, s in self.sites.items() if s.matmul not in idle}

    def _fits_registers(self, site: Site) -> bool:
        """Whether a kernel of its own may hold what is reduced. It has no program for each of a few channels that are
        neighbours: those of all positions are reduced in parts there, too, and read again."""
        if self.sizes.of(site.length) > MAX_PERSISTENT:
            return False
        place, buffer = self._place(site.value), self.graph.buffers[site.matmul]
        if place is None:  # exponentials, which read the maxima of parts
            return True
        strides = ix.contiguous_strides(buffer.sizes) if buffer.strides is None else buffer.strides
        dimensions = [k for k, e in enumerate(place[1]) if not ix.free_atoms(e).isdisjoint(site.loops)]
        return len(dimensions) == 1 or any(strides[k] == 1 for k in dimensions)

    def _demanded(self, node: ir.Reduction) -> bool:
        return any(d.names(node.origin.calls) for d in self.tiles.demanded)

    # ---- one reduction ----------------------------------------------------------------------------------------------

    def _site(self, node: ir.Reduction) -> Site | None:
        if not self.order:
            return None
        value, capabilities = self._unfolded(node, node.value), self.tiles.capabilities
        place = self._place(value)
        parts = parts_of(self.graph, node)
        if place is None or parts[0] in self.tiles.apart or not capabilities.may(place[0], Request(reduction=node.op)):
            return None
        matmul, index = place
        if any(ix.indirects(e) for e in index):
            return None
        loops = self._along(matmul, index, node)
        rest = tuple(v for v in node.rvars if v not in loops and v.extent != 1)
        if not loops or (rest and node.op in ("argmax", "argmin")):
            return None
        value, loops = self._by_dimension(value, matmul, index, loops)
        block = self.tiles.blocks.get(parts[0]) or capabilities.tile(matmul)
        site = Site(node, matmul, value, loops, rest, block, parts[0] in self.tiles.blocks, parts)
        return site if self._free(value, matmul) else self._rescaled(site)

    def _by_dimension(self, value: Value, matmul: str, index: Index, loops: tuple[Var, ...]) -> tuple[Value, tuple[Var, ...]]:
        """The value with a loop for each dimension that one loop goes through, as the matmul has: a view may have joined the
        positions of an image, and windows of positions that are divided again are no windows for templates."""
        along = [k for k, e in enumerate(index) if not ix.free_atoms(e).isdisjoint(loops)]
        if len(loops) != 1 or len(along) == 1:
            return value, loops
        sizes = self.graph.buffers[matmul].sizes
        own = tuple(ix.var(f"{loops[0].name}_{k}", sizes[k]) for k in along)
        return vs.substitute(value, {loops[0]: ix.position_in(own)}), own

    def _along(self, matmul: str, index: Index, node: ir.Reduction) -> tuple[Var, ...]:
        """The reduced loops along the last of the matmul's axes that has any, if they are runs of neighbours there: all of
        the axis, or a power of two that divides where they begin. Of an axis of several dimensions, all of the last ones."""
        found = (self._run(matmul, index, node, axis) for axis in reversed(self.axes[matmul]))
        return next((loops for loops in found if loops), ())

    def _run(self, matmul: str, index: Index, node: ir.Reduction, axis: tuple[int, ...]) -> tuple[Var, ...]:
        first = next((k for k, d in enumerate(axis) if any(v in ix.free_atoms(index[d]) for v in node.rvars)), len(axis))
        own = axis[first:]
        loops = tuple(v for v in node.rvars if v.extent != 1 and any(v in ix.free_atoms(index[d]) for d in own))
        elsewhere = [e for k, e in enumerate(index) if k not in own]
        if not loops or any(v in ix.free_atoms(e) for v in loops for e in elsewhere):
            return ()
        if matmul in self.windowed and not _are_apart(elsewhere):
            return ()
        sizes = [self.graph.buffers[matmul].sizes[d] for d in own]
        start = ix.linearize([index[d] for d in own], ix.contiguous_strides(sizes)) - ix.position_in(loops)
        length = ix.product(v.extent for v in loops)
        whole = start == 0 and length is ix.product(sizes)
        run = length.as_int() or 0
        aligned = len(axis) == 1 and run & (run - 1) == 0 and run > 1 and ix.mod(start, run) == 0
        return loops if whole or (aligned and not any(v in ix.free_atoms(start) for v in loops)) else ()

    def _unfolded(self, node: ir.Reduction, value: Value) -> Value:
        """The value with elements that wait for a reduction computed again, as far as that reduction may have been one of
        tiles, and templates compute as much again: a softmax stores its exponentials before it sums them."""

        def again(load: Value) -> Value | None:
            source = self.made.get(load.attr[0])
            if source is None or load.args or not self._waits(source.out):
                return None
            if not any(v in ix.free_atoms(e) for v in node.rvars for e in load.attr[1]):
                return None
            # by load: rounds that each read several elements of the one before would double the work with every round
            if (node.outs[0], load) not in self.unfolded:
                mapping: dict[Atom, Expr] = dict(zip(source.vars, load.attr[1], strict=True))
                self.unfolded[node.outs[0], load] = self._unfolded(node, vs.substitute(source.value, mapping))
            return self.unfolded[node.outs[0], load]

        if not any(self._waits(load.attr[0]) for load in vs.loads([value])):
            return value
        [unfolded] = vs.replace_loads([value], again)
        if unfolded is value:
            return value
        again_cost = Request(epilogue_cost=vs.total_cost([unfolded]))
        return unfolded if self.tiles.capabilities.may(node.outs[0], again_cost) else value

    def _waits(self, name: str) -> bool:
        """Whether elements that are computed point by point wait for a reduction."""
        return name in self.made and bool(self.after.get(name)) and name not in self.traced

    def _free(self, value: Value, matmul: str) -> bool:
        """Whether nothing that the value reads waits for a reduction of the matmul."""
        return all(matmul not in self.after.get(load.attr[0], ()) for load in vs.loads([value]))

    def _rescaled(self, site: Site) -> Site | None:
        """``sum(exp(e - shift) * weight)``, where e's maximum has been found in parts and `shift` is the same for a row."""
        if site.node.op != "sum":
            return None
        factors = site.value.args if site.value.op == "mul" else (site.value,)
        for k, factor in enumerate(factors):
            if factor.op != "exp" or factor.args[0].op != "sub":
                continue
            exponent, shift = factor.args[0].args
            weight = [f for j, f in enumerate(factors) if j != k]
            maximum = self._maximum(site, exponent)
            one_row = not any(v in shift.variables() for v in site.loops)
            if maximum is not None and one_row and all(self._free(v, site.matmul) for v in (exponent, *weight)):
                return Site(
                    site.node, site.matmul, weight[0] if weight else vs.const(1.0, exponent.dtype), site.loops, site.rest,
                    maximum.block, maximum.fixed, site.parts, maximum, factor.args[0],
                )  # fmt: skip
        return None

    def _maximum(self, site: Site, exponent: Value) -> Site | None:
        """The site that finds the maximum of `exponent` over just the points of `site`."""
        for other in self.sites.values():
            if other.node.op != "max" or other.matmul != site.matmul or other.extents != site.extents:
                continue
            pairs = zip(other.all_loops, site.all_loops, strict=True)
            if vs.substitute(other.value, {its: own.expr() for its, own in pairs}) is exponent:
                return other
        return None


def _tiled_axes(node: ir.Contraction) -> tuple[tuple[int, ...], ...]:
    """The dimensions along which tiles reach. In windows they are all such: where channels are groups of their own, tiles may
    hold several groups. The positions of all images are one axis as well."""
    left, right = node.lhs.variables(), node.rhs.variables()
    alone = tuple((k,) for k, v in enumerate(node.out_vars) if node.windowed or (v in left) != (v in right))
    rows = tuple(k for k, v in enumerate(node.out_vars) if v not in right)
    return (*alone, rows) if node.windowed and len(rows) > 1 else alone


def _are_apart(indices: Sequence[Expr]) -> bool:
    """Whether each loop is in one of the indices alone. One that goes through images and their channels would make each channel
    of each image a group of its own to templates, with a tile of one column."""
    found = [v for e in indices for v in ix.free_atoms(e)]
    return len(set(found)) == len(found)


_PARTS = "parts"


def parts_of(graph: ir.Graph, node: ir.Reduction) -> tuple[str, ...]:
    """The buffers of the parts of a reduction's results."""
    return tuple(ir.derived(graph, ir.Derived(out, _PARTS)) for out in node.outs)


def reduction_of(graph: ir.Graph, name: str) -> str | None:
    """The result of which a buffer holds the parts."""
    return ir.source_in(graph, name, _PARTS)


class _Cut:
    """Writes one reduction as parts, and what joins them. Of a pick, only the part with the `column` counts."""

    def __init__(self, graph: ir.Graph, site: Site, column: Expr | None) -> None:
        self.graph, self.site, self.node, self.column = graph, site, site.node, column
        self.part = ix.var(PART, site.count)
        self.row = tuple(v.expr() for v in self.node.vars)
        self.kept = (*self.node.vars, *site.rest)  # loops that a part does not reduce
        self.one = site.count == 1  # then there is nothing to join along the axis
        self.index = (ix.ZERO if self.one else self.part.expr(), *(v.expr() for v in self.kept))
        self.joined = site.rest if self.one else (self.part, *site.rest)

    def run(self) -> list[ir.Node]:
        site, node = self.site, self.node
        value = site.value
        if site.maximum is not None and site.exponent is not None:
            exponent, _ = site.exponent.args
            value = vs.call("mul", vs.call("exp", vs.call("sub", exponent, self._own_maximum(site.maximum))), value)
        kinds = [value.dtype] * len(node.outs)
        if node.op in ("argmax", "argmin"):
            kinds[1] = torch.int64
        extents = [v.extent for v in self.kept]
        *rows, step = ix.contiguous_strides([*extents, site.count])  # parts of a row are neighbours: one warp joins them
        for name, kind in zip(site.parts, kinds, strict=True):
            self._buffer(name, kind, (site.count, *extents), (step, *rows))
        partial = ir.Partial(site.parts, self.kept, site.loops, node.op, value, site.block, site.fixed, node.origin)
        return [partial, *self._joining()]

    def _buffer(self, name: str, kind: torch.dtype, sizes: Sequence[Expr], strides: Sequence[Expr]) -> None:
        device = self.graph.buffers[self.node.outs[0]].device
        self.graph.buffers[name] = ir.Buffer(name, kind, device, tuple(sizes), tuple(strides))

    def _row_buffer(self, name: str, kind: torch.dtype) -> None:
        sizes = [v.extent for v in self.node.vars]
        self._buffer(name, kind, sizes, ix.contiguous_strides(sizes))

    def _load(self, name: str, index: Index | None = None) -> Value:
        return vs.load(name, self.index if index is None else index, self.graph.buffers[name].dtype)

    def _own_maximum(self, maximum: Site) -> Value:
        """What a tile subtracts. Where all of it is minus infinity, nothing: its exponentials are zeros."""
        tile = ix.floordiv(ix.position_in(self.site.loops), self.site.block)
        top = self._load(maximum.parts[0], (tile, *self.index[1:]))
        return vs.where(vs.call("isinf", top), vs.const(0.0, top.dtype), top)

    def _reduction(self, out: str, value: Value, op: str) -> ir.Node:
        if not self.joined:
            return self._pointwise(out, value)
        return ir.Reduction((out,), self.node.vars, self.joined, op, value, self.node.origin)

    def _pointwise(self, out: str, value: Value) -> ir.Pointwise:
        return ir.Pointwise(out, self.node.vars, value, self.node.origin)

    def _joining(self) -> list[ir.Node]:
        node, site = self.node, self.site
        if self.column is not None:
            return [self._pointwise(node.outs[0], self._picked(self.column))]
        if not self.joined and len(node.outs) == 2:
            return [self._pointwise(out, self._load(name)) for out, name in zip(node.outs, site.parts, strict=True)]
        if node.op in ("argmax", "argmin"):
            return self._finishing_nodes()
        if node.op == "welford":
            return self._joining_welford()
        value = self._load(site.parts[0])
        if site.maximum is not None and site.exponent is not None:
            shift = site.exponent.args[1]
            raised = vs.call("exp", vs.call("sub", self._load(site.maximum.parts[0]), shift))
            value = vs.call("mul", raised, value)
        return [self._reduction(node.outs[0], value, node.op)]

    def _picked(self, column: Expr) -> Value:
        """The part that has the column; where there is but one, an index expression would not need the column."""
        at = ix.floordiv(column, self.site.block)
        value = self._load(self.site.parts[0], (at, *self.row))
        return checked(column, self.site.length, value) if self.one else value

    def _finishing_nodes(self) -> list[ir.Node]:
        """The first part with the extreme value, and the place that it says."""
        best, place = self.node.outs
        winner = ir.derived(self.graph, ir.Derived(place, "part"))
        self._row_buffer(winner, torch.int64)
        which = ir.Reduction(
            (best, winner), self.node.vars, self.joined, self.node.op, self._load(self.site.parts[0]), self.node.origin
        )
        at = vs.indirect(self._load(winner, self.row), self.site.count, wrap=False)
        return [which, self._pointwise(place, self._load(self.site.parts[1], (at, *self.row)))]

    def _joining_welford(self) -> list[ir.Node]:
        mean, m2 = self.node.outs
        means, squares = (self._load(name) for name in self.site.parts)
        kind, total = means.dtype, ir.derived(self.graph, ir.Derived(mean, "total"))
        self._row_buffer(total, kind)
        filled = vs.cast(vs.index_value(self._filled()), kind)
        whole = vs.cast(vs.index_value(ix.product(v.extent for v in self.node.rvars)), kind)
        overall = vs.call("truediv", self._load(total, self.row), whole)
        apart = vs.call("square", vs.call("sub", means, self._load(mean, self.row)))
        spread = vs.call("add", squares, vs.call("mul", filled, apart))
        return [
            self._reduction(total, vs.call("mul", means, filled), "sum"),
            self._pointwise(mean, overall),
            self._reduction(m2, spread, "sum"),
        ]

    def _filled(self) -> Expr:
        """Points of a part."""
        block = ix.constant(self.site.block)
        if ix.mod(self.site.length, block) == 0:
            return block
        return ix.minimum(block, self.site.length - self.part.expr() * block)


__all__ = ["Search", "Tiles", "Traced", "alone", "parts_of", "reduction_of", "tile_partials", "tile_reductions"]
