"""Spreads the reductions of few long rows over the programs of a GPU: partial results first, a second kernel joins them.

The order of combination is fixed by the plan, so results repeat from run to run. A mean and its squared deviations join by the
formula of Chan, Golub and LeVeque (1979): ``m2 = sum(m2_k) + sum(n_k (mean_k - mean)^2)``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from kgen.device import Gpu
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Sizes, Var
from kgen.ir.plan import Kernel, Statement, Step, Tiling
from kgen.ir.values import Value
from kgen.scheduler.analysis.memory import needed, reads
from kgen.scheduler.protocol import Forming, Transform
from kgen.scheduler.selection.memo import for_equal
from kgen.scheduler.tiling.lookups import cost_of_gathers
from kgen.scheduler.tiling.loops import (
    GROUP_OPS,
    GROUPS,
    continued,
    distinct_touches,
    linearized,
    ordered,
    stride_along,
    unflattened,
)
from kgen.scheduler.tiling.tiles import (
    ADJACENT,
    COLUMN_WARPS,
    COLUMNS,
    HEAVY,
    ROW_WARP,
    WALKING_WARPS,
    choose_tiles,
    cost_of_a_point,
    power_of_two,
)
from kgen.scheduler.transforms.ragged_shares import padded, stored_inside
from kgen.scheduler.transforms.split_online_softmax import split_online_softmax
from kgen.scheduler.transforms.stacked_reductions import split_stacked

# Points that a program reduces at least, so that its launch is worth while: of heavy points fewer.
MIN_CHUNK = 4096
# The same of points that gather, where there are enough for the second kernel to be worth while.
GATHERED_CHUNK = 1024
# Warps that an SM runs at once: with so many, some load at any time.
WARPS = 64
# The same of columns whose means and deviations are made in one walk: what folds them takes as long as some loads
# (docs/decisions/0048-programs-of-columns.md).
WARPS_OF_MEANS = 32
# Shares of a row, and of columns: what joins them walks all. Few columns have programs enough with many shares alone.
MOST_SHARES, MOST_SHARES_OF_COLUMNS = 512, 2048
# So many times the shares that are wanted are better than a row in one program, where no other number divides a loop; and than
# stores with a mask.
MORE_SHARES, MORE_MASKED = 8, 2
# So many times fewer shares than are wanted are too few, where a kernel more would have none to count.
TOO_FEW = 4
# Points of the last loops that a share has side by side at least: about a cache line.
LEAST_RUN = 16
# Of how much of the largest access another one has to be a part to matter.
MUCH = 4


class SplitReduction(Transform):
    """Shares few long rows of a kernel among the programs of a GPU."""

    name = "split reduction"

    def form(self, steps: list[Step], forming: Forming) -> list[Step]:
        """What adds partial sums has had its share of that."""
        kernels = (step for step in steps if isinstance(step, Kernel))
        partial = {o for step in kernels for s in step.statements if s.kind == "column" for o in s.outs}
        graph, gpu = forming.draft.graph, forming.draft.options.gpu
        steps = split_online_softmax(steps, graph, forming.sizes, gpu, forming.kept)
        stacked = split_stacked(steps, graph, forming.sizes, gpu)
        out: list[Step] = []
        for place, step in enumerate(steps):
            if place in stacked:
                out += stacked[place]
            elif isinstance(step, Kernel) and step.target == "triton" and not step.contracts and not partial & reads(step):
                out += split_reduction(step, graph, forming.sizes, gpu)
            else:
                out.append(step)
        return out


def split_reduction(kernel: Kernel, graph: ir.Graph, sizes: Sizes, gpu: Gpu) -> Iterable[Kernel]:
    """The kernel itself, or two kernels that do its work; new buffers for partial results are added to the graph."""
    if not _may_split(kernel):
        return (kernel,)
    kernel = unflattened(kernel)
    channel = _short_run(kernel, graph, sizes)
    shared = kernel if channel is None else _beside(kernel, channel)
    tiling = for_equal(("tiles", gpu), shared, graph, lambda: choose_tiles(shared, graph, sizes, gpu))
    programs = _programs(tiling, sizes)
    work = sizes.points(kernel.outer) * sizes.points(kernel.inner) // programs
    chunk = MIN_CHUNK // max(1, cost_of_a_point(kernel) // HEAVY)
    if work >= 2 * MIN_CHUNK and cost_of_gathers(kernel):
        chunk = min(chunk, GATHERED_CHUNK)
    wanted = min(_wanted(kernel, tiling, gpu) // programs, work // chunk, _most_shares(kernel, tiling))
    if wanted < 2 and channel is None:
        return (kernel,)
    apart = _points_apart(kernel, wanted) if channel is None else None
    if apart is not None:
        points, reduced = apart
        return (points, *split_reduction(reduced, graph, sizes, gpu))
    loops = _in_long_runs(shared, _by_stride(shared, graph, sizes), graph, max(1, wanted), sizes)
    for whole, first in _loops_to_cut(loops, max(1, wanted), sizes):
        loop, shares = first, _shares(kernel, first, min(max(1, wanted // sizes.points(whole)), sizes.of(first.extent)))
        if shares is None and whole:
            loop, shares = _faster_loop(kernel, loops[len(whole) + 1 :], wanted // sizes.points(whole), sizes) or (first, 1)
        elif shares is None and channel is not None:
            shares = 1
        if shares is not None and not (_counts(kernel) and channel is None and _are_few(shares, wanted, kernel)):
            return _Split(kernel, graph, whole, loop, shares, channel).run()
    rest = _shares_and_rest(kernel, wanted) if channel is None else None
    return (kernel,) if rest is None else _Split(kernel, graph, (), kernel.inner[0], rest, None).run()


def _are_few(shares: int, wanted: int, kernel: Kernel) -> bool:
    """Whether a number that divides a row leaves programs to be wished for, where the kernel that joins shares can have the
    rest of a number that does not."""
    return TOO_FEW * shares < wanted and _shares_and_rest(kernel, wanted) is not None


def _points_apart(kernel: Kernel, wanted: int) -> tuple[Kernel, Kernel] | None:
    """What a kernel adds to memory point by point, with what it stores, and what it reduces, as two kernels, where one would
    have few programs: what joins shares cannot add the rest of a row again, and no number near `wanted` divides a row whose
    points are counted. The second kernel reads what the first one stores."""
    if not _counts(kernel) or len(kernel.inner) != 1 or any(s.section < 0 for s in kernel.statements):
        return None
    shares = _shares(kernel, kernel.inner[0], wanted)
    own = [s for s in kernel.statements if s.inner and s.kind != "reduction" and (s.kind == "scatter" or any(s.stored))]
    if not any(s.kind == "scatter" for s in own) or any(s.target is not None and s.kind != "scatter" for s in own):
        return None
    if kernel.inner[0].extent.as_int() is None or (shares is not None and TOO_FEW * shares >= wanted):
        return None
    reduced = needed(kernel, [s for s in kernel.statements if not s.inner or s.kind == "reduction"], stored=own)
    points = [replace(s, inner=False, section=-1) for s in needed(kernel, own)]
    updated = {name for s in own if s.kind == "scatter" for name in (s.target, *s.outs)}
    if any(load.attr[0] in updated for s in reduced for load in vs.loads(s.roots)):
        return None
    return (
        replace(kernel, outer=(*kernel.outer, *kernel.inner), inner=(), sections=0, statements=tuple(points)),
        replace(kernel, name=f"{kernel.name}_reduced", statements=tuple(reduced)),
    )


def _shares_and_rest(kernel: Kernel, wanted: int) -> int | None:
    """The number of equal shares of a row which leaves fewest points over, where points are counted and no number divides it:
    the kernel that joins the shares reads those points. It walks them again, so nothing may have been written over them."""
    if len(kernel.inner) != 1 or any(s.kind == "scatter" or s.target is not None for s in kernel.statements):
        return None
    length = kernel.inner[0].extent.as_int()
    if length is None or any(s.inner and s.op in ("argmax", "argmin") for s in kernel.statements):
        return None
    return min(range(wanted, max(1, wanted // 2), -1), key=lambda shares: length % shares, default=None)


def _wanted(kernel: Kernel, tiling: Tiling, gpu: Gpu) -> int:
    """Programs that a GPU runs at once."""
    return gpu.compute_units * (WARPS_OF_MEANS if _are_means(kernel, tiling) else WARPS) // _warps(tiling)


def _most_shares(kernel: Kernel, tiling: Tiling) -> int:
    """Means and deviations are joined in two walks: more shares than registers hold take longer than they save."""
    return MOST_SHARES_OF_COLUMNS if _is_columns(tiling) and not _are_means(kernel, tiling) else MOST_SHARES


def _are_means(kernel: Kernel, tiling: Tiling) -> bool:
    return _is_columns(tiling) and _counts(kernel)


def _counts(kernel: Kernel) -> bool:
    """Whether it makes means and deviations: a point past the end could not be left uncounted."""
    return any(s.inner and s.op == "welford" for s in kernel.statements)


def _short_run(kernel: Kernel, graph: ir.Graph, sizes: Sizes) -> Var | None:
    """The inner loop whose points are few neighbours in memory, and an outer loop goes on behind them, as the channels of a
    group of channels-last images: programs of one group each would read parts of cache lines. Each such point has partial
    results of its own, and what joins shares joins them as well. None where a tile can join them."""
    if any(s.kind == "reduction" and s.op not in GROUP_OPS for s in kernel.statements):
        return None
    linear = linearized(kernel, graph)
    touches = list(distinct_touches(linear, graph, sizes))
    for v in kernel.inner:
        width = v.extent.as_int()
        if width is None or not 1 < width < COLUMNS or width in GROUPS:
            continue
        if sizes.points(kernel.inner) < COLUMNS * width:
            continue  # partial results would be as much as what is read
        if any(t.inner and stride_along(t.offset, v, sizes) == 1 for t in touches) and continued(linear, v, touches, sizes):
            return v
    return None


def _beside(kernel: Kernel, channel: Var) -> Kernel:
    """The loop as the fastest outer one."""
    return replace(kernel, outer=(*kernel.outer, channel), inner=tuple(v for v in kernel.inner if v is not channel))


def _loops_to_cut(loops: tuple[Var, ...], wanted: int, sizes: Sizes) -> Iterator[tuple[tuple[Var, ...], Var]]:
    """The loops each point of which is a share, or several, and the one that is cut: the first one that is long enough; or the
    first one of all, and the next one in each of its points, which may be one share. Loops of no known extent are not
    counted."""
    loop = next((v for v in loops if sizes.of(v.extent) >= wanted), None)
    if loop is not None:
        yield (), loop
    whole: list[Var] = []
    shares_each = 2 if loop is None else 1
    for v, after in itertools.pairwise(loops):
        count = sizes.points((*whole, v))
        if v.extent.as_int() is None or after.extent.as_int() is None or shares_each * count > wanted:
            break
        whole.append(v)
    rest = loops[len(whole) :]
    if whole:
        yield tuple(whole), rest[0]
    elif loop is None:
        yield (), max(rest, key=lambda v: sizes.of(v.extent))


def _by_stride(kernel: Kernel, graph: ir.Graph, sizes: Sizes) -> tuple[Var, ...]:
    """The inner loops, the one with the largest steps in memory first: shares of it are long runs of neighbours, while shares
    of neighbours, as of the channels of a group in channels-last order, have several programs read each cache line."""
    linear = linearized(kernel, graph)
    return ordered(linear, list(distinct_touches(linear, graph, sizes)), sizes).inner


def _in_long_runs(kernel: Kernel, loops: tuple[Var, ...], graph: ir.Graph, wanted: int, sizes: Sizes) -> tuple[Var, ...]:
    """The loops, with one in front that leaves each access long runs of neighbours in a share, where the first one does not:
    where images with their channels last meet others, shares of channels would have several programs read each sector."""
    linear = linearized(kernel, graph)
    touches = [t for t in distinct_touches(linear, graph, sizes) if t.inner]
    much = max((t.distinct for t in touches), default=0) // MUCH
    adjacent = {v for v in loops if any(t.distinct > much and stride_along(t.offset, v, sizes) in ADJACENT for t in touches)}
    enough = [v for v in loops if sizes.of(v.extent) >= wanted]
    if not enough or sizes.of(enough[0].extent) >= wanted * LEAST_RUN or enough[0] not in adjacent:
        return loops
    better = next((v for v in enough if v not in adjacent or sizes.of(v.extent) >= wanted * LEAST_RUN), None)
    return loops if better is None else (better, *(v for v in loops if v is not better))


def _warps(tiling: Tiling) -> int:
    """Of a share: where there are many of them, tiles need no more than the usual ones."""
    usual = max(WALKING_WARPS, tiling.blocks.x * tiling.blocks.r // ROW_WARP)
    return min(tiling.blocks.warps, COLUMN_WARPS if _is_columns(tiling) else usual)


def _is_columns(tiling: Tiling) -> bool:
    return not tiling.persistent and tiling.blocks.x > 1


def _programs(tiling: Tiling, sizes: Sizes) -> int:
    """Of a share: where there are many of them, tiles of columns are as wide as can be."""
    width = min(COLUMNS, power_of_two(sizes.of(tiling.x[-1].extent))) if _is_columns(tiling) else tiling.blocks.x
    return max(1, -(-sizes.points(tiling.x) // width))


def _may_split(kernel: Kernel) -> bool:
    """One walk of the inner space that only reduces, and stores what is there point by point."""
    inner = [s for s in kernel.statements if s.inner]
    if kernel.sections != 1 or kernel.rows or not any(s.kind == "reduction" for s in inner):
        return False
    if any(s.kind == "scatter" and s.section < 0 for s in kernel.statements):
        return False  # every share would update the memory
    return all(s.kind in ("reduction", "pointwise") or _is_update(s) for s in inner)


def _is_update(s: Statement) -> bool:
    """Whether it updates memory by operations that programs may make in any order. A value that is set is the last one's."""
    return s.kind == "scatter" and s.op != "set" and not s.in_order


def _shares(kernel: Kernel, loop: Var, wanted: int) -> int | None:
    """How many shares the loop is cut into: a number that divides it where one is near, for then nothing is masked. None where
    nothing may be masked and no number divides it."""
    exact = loop.extent.as_int()
    near = None if exact is None else _divisor(exact, range(wanted, wanted // 2, -1))
    if near is not None:
        return near
    counts = _counts(kernel)
    if not counts and not any(s.inner and s.kind == "pointwise" and any(s.stored) for s in kernel.statements):
        return wanted
    if exact is None:
        return None if counts else wanted
    most = (MORE_SHARES if counts else MORE_MASKED) * wanted
    found = _divisor(
        exact, itertools.chain(range(wanted + 1, min(exact, most) + 1), range(wanted // 2, 1, -1) if counts else ())
    )
    return found if found is not None or counts else wanted


def _faster_loop(kernel: Kernel, loops: Sequence[Var], wanted: int, sizes: Sizes) -> tuple[Var, int] | None:
    """Of the loops inside of one that no number divides, the first that is cut into runs long enough, and its shares."""
    for loop in loops:
        extent = sizes.of(loop.extent)
        shares = _shares(kernel, loop, min(wanted, extent // LEAST_RUN)) if extent >= 2 * LEAST_RUN and wanted > 1 else None
        if shares is not None and 1 < shares <= extent // LEAST_RUN:
            return loop, shares
    return None


def _divisor(extent: int, numbers: Iterable[int]) -> int | None:
    """The first of the numbers that divides the extent."""
    return next((n for n in numbers if extent % n == 0), None)


def _only(update: Statement, inside: Value) -> Statement:
    """The update where a condition holds. Elsewhere it reads nothing, and its indices from data are 0, which is always one."""

    def guarded(value: Value) -> Value:
        return vs.where(inside, vs.guard_loads(value, inside), vs.const(0, value.dtype))

    mask = inside if update.mask is None else vs.call("and", inside, vs.guard_loads(update.mask, inside))
    memo: dict[Expr, Expr] = {}
    store = tuple(ix.substitute(e, {}, memo, guarded) for e in update.store)
    return replace(update, value=vs.guard_loads(update.value, inside), store=store, mask=mask)


class _Split:
    """Cuts `loop`, one of the inner loops, into so many shares at each point of the loops `whole`. The points of `channel`, one
    more of them, have partial results of their own. Where points are counted, shares are equal: what they leave over of a row
    is read by what joins them, each point as a share by itself."""

    def __init__(
        self, kernel: Kernel, graph: ir.Graph, whole: tuple[Var, ...], loop: Var, shares: int, channel: Var | None
    ) -> None:
        self.kernel, self.graph = kernel, graph
        self.channels = () if channel is None else (channel,)
        self.length = ix.product(v.extent for v in kernel.inner)
        self.over = (loop.extent.as_int() or 0) % shares if _counts(kernel) else 0
        self.chunk = ix.floordiv(loop.extent, shares) if self.over else ix.ceildiv(loop.extent, shares)
        self.shares = shares * (ix.product(v.extent for v in whole).as_int() or 1)
        self.share, self.step = ix.var("share", self.shares), ix.var("step", self.chunk)
        rest, place = ix.floordiv(self.share.expr(), shares), ix.mod(self.share.expr(), shares) if whole else self.share.expr()
        at = place * self.chunk + self.step.expr()
        self.joined_share = ix.var("share", self.shares + self.over) if self.over else self.share
        self.is_share = vs.compare("lt", self.joined_share.expr(), ix.constant(self.shares))
        self.left_over: dict[Atom, Expr] = {loop: self.chunk * shares + self.joined_share.expr() - shares}
        exact = self.chunk * shares + self.over is loop.extent
        self.inside: Value | None = None if exact else vs.compare("lt", at, loop.extent)
        self.place: dict[Atom, Expr] = {loop: at}
        for v in reversed(whole):
            self.place[v] = ix.mod(rest, v.extent)
            rest = ix.floordiv(rest, v.extent)
        self.inner = tuple(self.step if v is loop else v for v in kernel.inner if v not in (*whole, *self.channels))
        self.row = tuple(v.expr() for v in kernel.outer)
        self.partial_at = (self.share.expr(), *self.row, *(v.expr() for v in self.channels))
        self.joined_at = (self.joined_share.expr(), *self.partial_at[1:])
        self.made: dict[str, Value] = {}

    def run(self) -> tuple[Kernel, Kernel]:
        """(partial results of each share, what joins them)."""
        kernel = self.kernel
        head = tuple(s for s in kernel.statements if not s.inner and s.section < 0)
        inner = [s for s in kernel.statements if s.inner]
        after = [s for s in kernel.statements if not s.inner and s.section >= 0]
        first: list[Statement] = [replace(s, stored=(False,) * len(s.outs)) for s in head]
        second: list[Statement] = list(head)
        joined: list[Statement] = []
        for s in inner:
            made = self._moved(s)
            joined += self._stored_over(s)
            if s.kind == "reduction":
                partial_names = tuple(self._partial(o, d) for o, d in zip(s.outs, self._kinds(s), strict=True))
                first.append(replace(made, outs=partial_names, store=self.partial_at, stored=(True,) * len(partial_names)))
                joined += self._joined(s, partial_names)
            else:
                first.append(made)
        sections = 1 + max(s.section for s in joined)
        second += [*joined, *(replace(s, section=sections - 1) for s in after)]
        partial = replace(
            kernel,
            name=f"{kernel.name}_partial",
            outer=(self.share, *kernel.outer, *self.channels),
            inner=self.inner,
            statements=tuple(first),
        )
        final = replace(kernel, inner=(self.joined_share, *self.channels), sections=sections, statements=tuple(second))
        return partial, final

    def _moved(self, s: Statement) -> Statement:
        """The statement over a share of the row. Past the end nothing is read or updated, and a reduction steps with what
        leaves it unchanged."""
        made = s.substituted(self.place)
        if s.kind == "scatter":
            return made if self.inside is None else _only(made, self.inside)
        if s.kind == "pointwise":
            return stored_inside(made, self.inside)
        if s.kind == "reduction" and s.op != "welford":
            return replace(made, value=padded(made.value, s.op, self.inside))
        return made

    def _kinds(self, s: Statement) -> Iterator[torch.dtype]:
        yield s.value.dtype
        if len(s.outs) == 2:
            yield torch.int64 if s.op in ("argmax", "argmin") else s.value.dtype

    def _partial(self, name: str, dtype: torch.dtype) -> str:
        sizes = (ix.constant(self.shares), *(v.extent for v in (*self.kernel.outer, *self.channels)))
        device = self.graph.buffers[name].device
        made = ir.Buffer(
            ir.derived(self.graph, ir.Derived(name, "partial")), dtype, device, sizes, ix.contiguous_strides(sizes)
        )
        self.graph.buffers[made.name] = made
        return made.name

    def _load(self, name: str, left_over: Value | None = None) -> Value:
        """A share's result; of a point that is left over, its own."""
        loaded = vs.load(name, self.joined_at, self.graph.buffers[name].dtype)
        return loaded if left_over is None or not self.over else vs.masked(self.is_share, loaded, left_over)

    def _stored_over(self, s: Statement) -> list[Statement]:
        """A pointwise statement at the points that are left over, which are read from memory again."""
        if not self.over or s.kind != "pointwise":
            return []
        self.made.update(dict.fromkeys(s.outs, self._computed(s.value)))
        mask = None if s.mask is None else self._computed(s.mask)
        made = replace(s, value=self._computed(s.value), mask=mask).substituted(self.left_over)
        return [replace(stored_inside(made, vs.call("not", self.is_share)), section=0)] if any(s.stored) else []

    def _computed(self, value: Value) -> Value:
        """The value by what is in memory alone."""
        return vs.replace_loads([value], lambda load: self.made.get(load.attr[0]))[0]

    def _over(self, s: Statement) -> Value | None:
        """What is reduced, at a point that is left over."""
        if not self.over:
            return None
        moved = replace(s, value=self._computed(s.value)).substituted(self.left_over).value
        return vs.guard_loads(moved, vs.call("not", self.is_share))

    def _joined(self, s: Statement, partial_names: tuple[str, ...]) -> list[Statement]:
        """The reductions over the shares that give the statement's results."""
        if s.op == "welford":
            return self._joined_welford(s, partial_names)
        rank = None
        if s.op in ("argmax", "argmin"):
            rank = ix.indirect(self._load(partial_names[1]), self.length).expr()
        return [replace(s, value=self._load(partial_names[0], self._over(s)), rank=rank, section=0)]

    def _joined_welford(self, s: Statement, partial_names: tuple[str, ...]) -> list[Statement]:
        dtype = s.value.dtype
        mean, m2 = s.outs
        total = self._local(ir.derived(self.graph, ir.Derived(mean, "total_of_shares")), dtype)
        filled = vs.cast(vs.index_value(self._filled()), dtype)
        if self.over:
            filled = vs.where(self.is_share, filled, vs.const(1, dtype))
        means = self._load(partial_names[0], self._over(s))
        weighted = vs.call("mul", means, filled)
        whole = vs.cast(vs.index_value(self.length), dtype)
        overall = vs.call("truediv", vs.load(total, self.row, dtype), whole)
        apart = vs.call("square", vs.call("sub", means, vs.load(mean, s.store, dtype)))
        spread = vs.call("add", self._load(partial_names[1], vs.const(0, dtype)), vs.call("mul", filled, apart))
        return [
            replace(s, outs=(total,), value=weighted, op="sum", section=0, stored=(False,), store=self.row),
            Statement("pointwise", (mean,), overall, s.store, False, 0, (s.stored[0],)),
            replace(s, outs=(m2,), value=spread, op="sum", section=1, stored=(s.stored[1],)),
        ]

    def _local(self, name: str, dtype: torch.dtype) -> str:
        """A buffer that never becomes memory."""
        sizes = tuple(v.extent for v in self.kernel.outer)
        device = self.graph.buffers[self.kernel.statements[0].outs[0]].device
        self.graph.buffers[name] = ir.Buffer(name, dtype, device, sizes, ix.contiguous_strides(sizes))
        return name

    def _filled(self) -> Expr:
        """Points of a share: a ragged last share is never made where they count."""
        return ix.product(v.extent for v in self.inner)
