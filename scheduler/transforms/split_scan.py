"""Spreads the scans of few long rows over the programs of a GPU: totals of shares first, then a scan of these, then the shares.

Reduce, then scan (Merrill and Grimshaw, Parallel scan for stream architectures, 2009): every element is read twice, and no
program waits for another one. The order of combination is fixed by the plan, so results repeat from run to run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kgen.device import Gpu
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Sizes
from kgen.ir.plan import Kernel, Statement, Step
from kgen.ir.values import Value
from kgen.scheduler.analysis.memory import root
from kgen.scheduler.protocol import Forming, Transform
from kgen.scheduler.selection.memo import for_equal
from kgen.scheduler.tiling.tiles import choose_tiles
from kgen.scheduler.transforms.ragged_shares import padded, stored_inside
from kgen.scheduler.transforms.split_reduction import MOST_SHARES, WARPS

# Points that a program scans at least: with fewer, launches take longer than the scan.
MIN_CHUNK = 4096
# Points of a row in a share at least, where a program has several rows.
SHORTEST = 256
# Shares from which two more launches are worth while.
FEWEST_SHARES = 4
# How totals go on from share to share. Positions of extremes are not among them: of these, a scan has a pair for each point.
FOLLOWING = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}


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
    """The kernel itself, or three that do its work; new buffers for totals are added to the graph."""
    if not may_split(kernel) or _writes_over_reads(kernel, graph):
        return (kernel,)
    tiling = for_equal(("tiles", gpu), kernel, graph, lambda: choose_tiles(kernel, graph, sizes, gpu))
    programs = max(1, -(-sizes.points(tiling.x) // tiling.blocks.x))
    work = sizes.points(kernel.outer) * sizes.points(kernel.inner) // programs
    longest = sizes.points(kernel.inner) // SHORTEST
    shares = min(gpu.compute_units * WARPS // tiling.blocks.warps // programs, work // MIN_CHUNK, longest, MOST_SHARES)
    return (kernel,) if shares < FEWEST_SHARES else _Split(kernel, graph, shares).run()


def may_split(kernel: Kernel) -> bool:
    """Whether the kernel walks one loop, and all that it does there is scans, sums of what these do not make, and stores
    point by point."""
    inner = [s for s in kernel.statements if s.inner]
    scans = [s for s in inner if s.kind == "scan"]
    if kernel.sections != 1 or kernel.rows or kernel.contracts or len(kernel.inner) != 1 or not scans:
        return False
    if any(s.op not in FOLLOWING or len(s.outs) > 1 or s.mask is not None for s in scans):
        return False
    behind = _behind(inner)
    for s in inner:
        plain = s.kind == "pointwise" or (s.kind == "reduction" and s.op in FOLLOWING and len(s.outs) == 1)
        if s.kind != "scan" and (not plain or s.mask is not None or (s.kind == "reduction" and set(s.outs) <= behind)):
            return False
    if any(s.kind == "scan" and _read(s) & behind for s in inner):
        return False  # a scan of scans: totals would need the first ones' results
    outer = [s for s in kernel.statements if not s.inner]
    return all(s.kind == "pointwise" and s.mask is None for s in outer) and not any(_read(s) & behind for s in outer)


def _writes_over_reads(kernel: Kernel, graph: ir.Graph) -> bool:
    """Whether what is stored in front of the scans is where the kernel reads, which it would do again behind that."""
    made = {o for s in kernel.statements for o in s.outs}
    read = {root(graph, name) for s in kernel.statements for name in _read(s) - made}
    first = {o for s in kernel.statements for o, kept in zip(s.outs, s.stored, strict=True) if kept}
    return any(root(graph, name) in read for name in first - _behind([s for s in kernel.statements if s.inner]))


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

    def __init__(self, kernel: Kernel, graph: ir.Graph, shares: int) -> None:
        self.kernel, self.graph = kernel, graph
        [self.loop] = kernel.inner
        self.shares = shares
        self.chunk = ix.ceildiv(self.loop.extent, shares)
        self.share, self.step = ix.var("share", shares), ix.var("step", self.chunk)
        at = self.share.expr() * self.chunk + self.step.expr()
        self.place: dict[Atom, Expr] = {self.loop: at}
        exact = self.chunk * shares is self.loop.extent
        self.inside: Value | None = None if exact else vs.compare("lt", at, self.loop.extent)
        self.row = tuple(v.expr() for v in kernel.outer)
        self.inner = [s for s in kernel.statements if s.inner]
        self.behind = _behind(self.inner)

    def run(self) -> tuple[Kernel, Kernel, Kernel]:
        """(totals of each share, the totals of all shares so far, the shares from there)."""
        kernel = self.kernel
        head = tuple(s for s in kernel.statements if not s.inner and s.section < 0)
        unstored = tuple(replace(s, stored=(False,) * len(s.outs)) for s in head)
        after = tuple(s for s in kernel.statements if not s.inner and s.section >= 0)
        totals: list[Statement] = []
        joined: list[Statement] = []
        last: list[Statement] = []
        for s in self.inner:
            if s.kind == "scan":
                total = self._buffer(s, "total")
                totals.append(self._total(s, total))
                so_far = self._buffer(s, "so_far")
                joined.append(self._so_far(s, total, so_far))
                last += self._share(s, so_far)
            elif s.kind == "reduction":
                total = self._buffer(s, "partial")
                totals.append(self._total(s, total))
                joined.append(replace(s, value=self._load(total, self.share.expr()), section=0))
            elif set(s.outs) <= self.behind:
                last.append(self._moved(s))
            else:
                totals.append(self._moved(s))
                if not all(s.stored):
                    last.append(replace(self._moved(s), stored=(False,) * len(s.outs)))
        shared = replace(kernel, outer=(self.share, *kernel.outer), inner=(self.step,))
        return (
            replace(shared, name=f"{kernel.name}_total", statements=_used([*unstored, *totals])),
            replace(kernel, name=f"{kernel.name}_so_far", inner=(self.share,), statements=(*head, *joined, *after)),
            replace(shared, statements=_used([*unstored, *last])),
        )

    def _moved(self, s: Statement) -> Statement:
        """The statement over a share. Past the end nothing is read or stored."""
        return stored_inside(s.substituted(self.place), self.inside)

    def _padded(self, s: Statement) -> Value:
        """What is reduced or scanned; past the end, what changes nothing."""
        return padded(vs.substitute(s.value, self.place), s.op, self.inside)

    def _total(self, s: Statement, name: str) -> Statement:
        """The reduction of a share."""
        return Statement("reduction", (name,), self._padded(s), (self.share.expr(), *self.row), True, 0, (True,), s.op)

    def _so_far(self, s: Statement, total: str, name: str) -> Statement:
        """The scan of the totals, which ends with each share."""
        value = self._load(total, self.share.expr())
        store = (self.share.expr(), *self.row)
        return Statement("scan", (name,), value, store, True, 0, (True,), s.op, axis=self.share)

    def _share(self, s: Statement, so_far: str) -> list[Statement]:
        """The scan of a share, and what it is with all shares before."""
        own = self._local(s)
        scanned = replace(s, outs=(own,), value=self._padded(s), store=self._at(s), stored=(False,), axis=self.step)
        first = vs.const(ops.identity(s.op, s.value.dtype), s.value.dtype)
        has_some = vs.compare("gt", self.share.expr(), ix.ZERO)
        before = vs.masked(has_some, self._load(so_far, self.share.expr() - 1), first)
        value = vs.call(FOLLOWING[s.op], before, vs.load(own, self._at(s), s.value.dtype))
        mask = self.inside if any(s.stored) else None
        return [scanned, Statement("pointwise", s.outs, value, self._at(s), True, 0, s.stored, mask=mask)]

    def _at(self, s: Statement) -> tuple[Expr, ...]:
        memo: dict[Expr, Expr] = {}
        return tuple(ix.substitute(e, self.place, memo) for e in s.store)

    def _load(self, name: str, share: Expr) -> Value:
        return vs.load(name, (share, *self.row), self.graph.buffers[name].dtype)

    def _buffer(self, s: Statement, role: str) -> str:
        """A new buffer with an element for each share of each row."""
        sizes = (ix.constant(self.shares), *(v.extent for v in self.kernel.outer))
        name = ir.derived(self.graph, ir.Derived(s.outs[0], role))
        device = self.graph.buffers[s.outs[0]].device
        self.graph.buffers[name] = ir.Buffer(name, s.value.dtype, device, sizes, ix.contiguous_strides(sizes))
        return name

    def _local(self, s: Statement) -> str:
        """A buffer of the scan's sizes that never becomes memory."""
        old = self.graph.buffers[s.outs[0]]
        name = ir.derived(self.graph, ir.Derived(s.outs[0], "of_share"))
        self.graph.buffers[name] = replace(old, name=name, dtype=s.value.dtype)
        return name
