"""Spreads the scans of few long rows over the programs of a GPU: totals of shares first, then a scan of these, then the shares.

Reduce, then scan (Merrill and Grimshaw, Parallel scan for stream architectures, 2009): every element is read twice, and no
program waits for another one. The order of combination is fixed by the plan, so results repeat from run to run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from kgen.device import Gpu
from kgen.ir import index as ix
from kgen.ir import joins, ops
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Sizes
from kgen.ir.plan import Kernel, Statement, Step
from kgen.ir.values import Value
from kgen.scheduler.analysis.memory import root
from kgen.scheduler.protocol import Forming, Transform
from kgen.scheduler.selection.memo import for_equal
from kgen.scheduler.tiling.tiles import HEAVY, WALKING_WARPS, choose_tiles, cost_of_a_point, power_of_two
from kgen.scheduler.transforms.ragged_shares import padded, stored_inside
from kgen.scheduler.transforms.split_reduction import MOST_SHARES, WARPS

# Points that a program scans at least: with fewer, launches take longer than the scan. Of heavy points fewer.
MIN_CHUNK = 4096
# Points of a row in a share at least.
SHORTEST = 256
# Shares from which two more launches are worth while.
FEWEST_SHARES = 4
# A point of a scan is joined so many times: in its thread, between threads and warps, and with what came before.
JOINS_OF_A_POINT = 8


class SplitScan(Transform):
    """Shares few long rows that are scanned among the programs of a GPU."""

    name = "split scan"

    def form(self, steps: list[Step], forming: Forming) -> list[Step]:
        """Kernels that reduce as well have what only reduces split by `SplitReduction`."""
        graph, gpu = forming.draft.graph, forming.draft.options.gpu
        out: list[Step] = []
        for step in steps:
            if isinstance(step, Kernel) and step.target == "triton":
                out += split_scan(step, graph, forming.sizes, gpu)
            else:
                out.append(step)
        return out


def split_scan(kernel: Kernel, graph: ir.Graph, sizes: Sizes, gpu: Gpu) -> Iterable[Kernel]:
    """The kernel itself, or three or four that do its work; new buffers for totals are added to the graph."""
    if not may_split(kernel) or _writes_over_reads(kernel, graph):
        return (kernel,)
    tiling = for_equal(("tiles", gpu), kernel, graph, lambda: choose_tiles(kernel, graph, sizes, gpu))
    programs = max(1, -(-sizes.points(tiling.x) // tiling.blocks.x))
    work = sizes.points(kernel.outer) * sizes.points(kernel.inner) // programs
    longest = sizes.points(kernel.inner) // SHORTEST
    chunk = MIN_CHUNK // max(1, _cost_of_a_point(kernel) // HEAVY)
    most = min(gpu.compute_units * WARPS // min(tiling.blocks.warps, WALKING_WARPS) // programs, MOST_SHARES)
    shares = min(most, work // chunk, longest)
    return (kernel,) if shares < FEWEST_SHARES else _Split(kernel, graph, *_in_full_tiles(kernel, shares, most)).run()


def _in_full_tiles(kernel: Kernel, shares: int, most: int) -> tuple[int, Expr]:
    """The shares and the points of each. Of a row of known length some more, of a power of two: the rest of a tile would
    compute nothing, and each share begins at a vector."""
    extent = kernel.inner[0].extent
    length = extent.as_int()
    if length is None:
        return shares, ix.ceildiv(extent, shares)
    chunk = power_of_two(-(-length // shares) + 1) // 2
    if -(-length // chunk) > most:
        chunk = -(-length // shares)
    return -(-length // chunk), ix.constant(chunk)


def _cost_of_a_point(kernel: Kernel) -> int:
    scans = [s for s in kernel.statements if s.kind == "scan"]
    return cost_of_a_point(kernel) + JOINS_OF_A_POINT * sum(joins.cost(s.op, s.value.dtype) for s in scans)


def may_split(kernel: Kernel) -> bool:
    """Whether the kernel walks one loop, and all that it does there is scans, reductions, updates in any order, and stores
    point by point."""
    inner = [s for s in kernel.statements if s.inner]
    scans = [s for s in inner if s.kind == "scan"]
    if kernel.sections != 1 or kernel.rows or kernel.contracts or len(kernel.inner) != 1 or not scans:
        return False
    if any(s.op in ops.ROW_ORDERS for s in scans):
        return False
    if any(s.mask is not None or not (s.kind in ("scan", "pointwise") or _is_joined(s) or _is_update(s)) for s in inner):
        return False
    behind = _behind(inner)
    if any(_read(s) & behind for s in scans):
        return False  # a scan of scans: totals would need the first ones' results
    outer = [s for s in kernel.statements if not s.inner]
    points = behind - {o for s in inner if s.kind == "reduction" for o in s.outs}
    return all(s.kind == "pointwise" and s.mask is None for s in outer) and not any(_read(s) & points for s in outer)


def _is_joined(s: Statement) -> bool:
    return s.kind == "reduction" and s.op in ops.JOINED and len(s.outs) == 1


def _is_update(s: Statement) -> bool:
    return s.kind == "scatter" and s.rank is None


def _writes_over_reads(kernel: Kernel, graph: ir.Graph) -> bool:
    """Whether a later one of the kernels would read what an earlier one has stored over: what is stored in front of the scans
    is not where the kernel reads. Nor is what is updated, nor anything where its rows' values come from, if a fourth kernel
    needs these."""
    behind = _behind([s for s in kernel.statements if s.inner])
    made = {o for s in kernel.statements for o in s.outs}
    stored = {o for s in kernel.statements for o, kept in zip(s.outs, s.stored, strict=True) if kept}
    inner = {root(graph, name) for s in kernel.statements if s.inner for name in _read(s) - made}
    outer = {root(graph, name) for s in kernel.statements if not s.inner for name in _read(s) - made}
    early = stored if _reduces_behind(kernel, behind) else stored - behind
    updated = {o for s in kernel.statements if s.kind == "scatter" for o in s.outs}
    return any(root(graph, name) in inner | outer for name in (stored - behind) | updated) or any(
        root(graph, name) in outer for name in early
    )


def _reduces_behind(kernel: Kernel, behind: set[str]) -> bool:
    return any(s.kind == "reduction" and set(s.outs) <= behind for s in kernel.statements)


def _behind(inner: Sequence[Statement]) -> set[str]:
    """What scans make, and what is computed of it."""
    found: set[str] = set()
    for s in inner:
        if s.kind == "scan" or _read(s) & found:
            found |= set(s.outs)
    return found


def _read(s: Statement) -> set[str]:
    return {load.attr[0] for load in vs.loads(s.roots)}


def _used(statements: Sequence[Statement]) -> tuple[Statement, ...]:
    """Those that store something, and those that these read."""
    found: list[Statement] = []
    wanted: set[str] = set()
    for s in reversed(statements):
        if any(s.stored) or wanted & set(s.outs):
            found.append(s)
            wanted |= _read(s)
    return tuple(reversed(found))


class _Split:
    """Cuts the inner loop into so many shares."""

    def __init__(self, kernel: Kernel, graph: ir.Graph, shares: int, chunk: Expr) -> None:
        self.kernel, self.graph = kernel, graph
        [self.loop] = kernel.inner
        self.shares, self.chunk = shares, chunk
        self.share, self.step = ix.var("share", shares), ix.var("step", self.chunk)
        at = self.share.expr() * self.chunk + self.step.expr()
        self.place: dict[Atom, Expr] = {self.loop: at}
        exact = self.chunk * shares is self.loop.extent
        self.inside: Value | None = None if exact else vs.compare("lt", at, self.loop.extent)
        self.row = tuple(v.expr() for v in kernel.outer)
        self.inner = [s for s in kernel.statements if s.inner]
        self.behind = _behind(self.inner)
        self.totals: list[Statement] = []
        self.so_far: list[Statement] = []
        self.last: list[Statement] = []
        self.reductions: list[Statement] = []  # of the partial results of shares

    def run(self) -> Iterator[Kernel]:
        """The totals of each share, the totals of all shares so far, the shares from there; and the reductions of what these
        make, if there are any."""
        kernel = self.kernel
        head = tuple(s for s in kernel.statements if not s.inner and s.section < 0)
        unstored = tuple(replace(s, stored=(False,) * len(s.outs)) for s in head)
        after = tuple(s for s in kernel.statements if not s.inner and s.section >= 0)
        for s in self.inner:
            self._take(s)
        shared = replace(kernel, outer=(self.share, *kernel.outer), inner=(self.step,))
        of_shares = replace(kernel, inner=(self.share,))
        yield replace(shared, name=f"{kernel.name}_total", statements=_used([*unstored, *self.totals]))
        reduces = _reduces_behind(kernel, self.behind)
        middle = () if reduces else (*self.reductions, *after)
        yield replace(of_shares, name=f"{kernel.name}_so_far", statements=(*head, *self.so_far, *middle))
        name = f"{kernel.name}_share" if reduces else kernel.name
        yield replace(shared, name=name, statements=_used([*unstored, *self.last]))
        if reduces:
            yield replace(of_shares, statements=_used([*unstored, *self.reductions, *after]))

    def _take(self, s: Statement) -> None:
        """Gives each kernel its part of an inner statement."""
        is_behind = set(s.outs) <= self.behind
        if s.kind == "scan":
            self._take_scan(s)
        elif s.kind == "reduction":
            [partial] = self._buffers(s, "partial")
            (self.last if is_behind else self.totals).append(self._total(s, partial))
            self.reductions.append(replace(s, value=self._load(partial, self.share.expr()), section=0))
        elif is_behind or s.kind == "scatter":
            self.last.append(self._moved(s))
        else:
            self.totals.append(self._moved(s))
            if not all(s.stored):
                self.last.append(replace(self._moved(s), stored=(False,) * len(s.outs)))

    def _take_scan(self, s: Statement) -> None:
        totals, so_far = self._buffers(s, "total"), self._buffers(s, "so_far")
        # of others the total is the last point of the share's scan
        self.totals += [self._total(s, totals[0])] if s.op in ops.JOINED else self._last_points(s, totals)
        self.so_far.append(self._so_far(s, totals, so_far))
        self.last += self._share(s, so_far)

    def _moved(self, s: Statement) -> Statement:
        """The statement over a share. Past the end nothing is read or stored."""
        return stored_inside(s.substituted(self.place), self.inside)

    def _padded(self, s: Statement) -> Value:
        """What is reduced or scanned; past the end, what changes nothing."""
        return padded(vs.substitute(s.value, self.place), s.op, self.inside)

    def _total(self, s: Statement, name: str) -> Statement:
        """The reduction of a share."""
        return Statement("reduction", (name,), self._padded(s), (self.share.expr(), *self.row), True, 0, (True,), s.op)

    def _last_points(self, s: Statement, totals: Sequence[str]) -> Iterator[Statement]:
        """The scan of a share, of which only the last point is stored: there may be no reduction by the scan's operation, and
        among equals a reduction finds another position."""
        scanned = self._scan_of_share(s)
        yield scanned
        at_end = vs.compare("ge", self.step.expr(), self.chunk - 1)
        for name, value in zip(totals, self._points(scanned), strict=True):
            store = (self.share.expr(), *self.row)
            yield Statement("pointwise", (name,), value, store, True, 0, (True,), mask=at_end)

    def _so_far(self, s: Statement, totals: Sequence[str], names: Sequence[str]) -> Statement:
        """The scan of the totals, which ends with each share."""
        value, *positions = (self._load(total, self.share.expr()) for total in totals)
        rank = ix.indirect(positions[0], self.loop.extent).expr() if positions else None
        store = (self.share.expr(), *self.row)
        stored = (True,) * len(names)
        return Statement("scan", tuple(names), value, store, True, 0, stored, s.op, axis=self.share, rank=rank)

    def _scan_of_share(self, s: Statement) -> Statement:
        """The scan of a share alone, in registers."""
        moved = s.substituted(self.place)
        outs = self._locals(s)
        return replace(moved, outs=outs, value=self._padded(s), stored=(False,) * len(outs), axis=self.step)

    def _points(self, scanned: Statement) -> tuple[Value, ...]:
        return tuple(vs.load(o, scanned.store, self.graph.buffers[o].dtype) for o in scanned.outs)

    def _share(self, s: Statement, so_far: Sequence[str]) -> Iterator[Statement]:
        """The scan of a share, and what it is with all shares before."""
        scanned = self._scan_of_share(s)
        yield scanned
        has_some = vs.compare("gt", self.share.expr(), ix.ZERO)
        nothing = (ops.identity(s.op, s.value.dtype), 0)
        before = tuple(
            vs.masked(has_some, value, vs.const(number, value.dtype))
            for value, number in zip((self._load(name, self.share.expr() - 1) for name in so_far), nothing, strict=False)
        )
        values = joins.joined(s.op, before, self._points(scanned))
        for out, value, stored in zip(s.outs, values, s.stored, strict=True):
            mask = self.inside if stored else None
            yield Statement("pointwise", (out,), value, scanned.store, True, 0, (stored,), mask=mask)

    def _load(self, name: str, share: Expr) -> Value:
        return vs.load(name, (share, *self.row), self.graph.buffers[name].dtype)

    def _buffers(self, s: Statement, role: str) -> list[str]:
        """New buffers with an element for each share of each row."""
        sizes = (ix.constant(self.shares), *(v.extent for v in self.kernel.outer))
        return [self._buffer(o, dtype, role, sizes) for o, dtype in zip(s.outs, _kinds(s), strict=False)]

    def _buffer(self, source: str, dtype: torch.dtype, role: str, sizes: tuple[Expr, ...]) -> str:
        name = ir.derived(self.graph, ir.Derived(source, role))
        device = self.graph.buffers[source].device
        self.graph.buffers[name] = ir.Buffer(name, dtype, device, sizes, ix.contiguous_strides(sizes))
        return name

    def _locals(self, s: Statement) -> tuple[str, ...]:
        """Buffers of the scan's sizes that never become memory."""
        sizes = [self.graph.buffers[o].sizes for o in s.outs]
        return tuple(self._buffer(o, d, "of_share", n) for o, d, n in zip(s.outs, _kinds(s), sizes, strict=False))


def _kinds(s: Statement) -> tuple[torch.dtype, torch.dtype]:
    """The types of a scan's or a reduction's results, of which there may be one."""
    return s.value.dtype, torch.int64
