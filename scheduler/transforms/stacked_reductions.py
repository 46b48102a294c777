"""Many reductions to one number each that fill one vector, such as the norms of all gradients, in two kernels' time.

Every reduction is cut into the same number of shares, so that the partial results are a matrix: a row for each reduction. The
kernels of the shares become one combo kernel, and one kernel reduces the rows of the matrix into the vector.
Without this, each long row would have a finishing kernel of its own. The order of combination is fixed by the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kgen.device import Gpu
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Expr, Sizes, Var
from kgen.ir.plan import Kernel, Statement, Step
from kgen.ir.values import Value
from kgen.scheduler.fusion.combo_kernels import FOLDS

# Reductions in a vector, at least.
FEW = 4
# Points of the longest row from which on a single program is not enough, and the fewest of a share of it.
LONG, MIN_SHARE = 8192, 1024
# Programs of four warps that an SM runs side by side.
PROGRAMS_PER_SM = 16
# Shares of a reduction, and partial results of all, at most: one kernel of few programs joins them.
MOST_SHARES, MOST_PARTIALS = 2048, 1 << 15
# Shares begin at multiples of so many points where they are longer: whole vectors of memory.
ALIGNED = 16


@dataclass(frozen=True, slots=True)
class _Row:
    """A kernel that reduces all its points to one number, and computes an element of a vector from that; `place` is that of its
    step."""

    place: int
    kernel: Kernel
    reduction: Statement
    after: tuple[Statement, ...]


def split_stacked(steps: list[Step], graph: ir.Graph, sizes: Sizes, gpu: Gpu) -> dict[int, list[Kernel]]:
    """By the places of steps, the kernels that take them: reductions that fill a vector are cut into equally many shares.
    Buffers are added to the graph, and vectors that are written at once have no parts any more."""
    made: dict[int, list[Kernel]] = {}
    for vector, rows in _vectors(steps, graph).items():
        shares = _shares([sizes.points(row.kernel.inner) for row in rows], gpu)
        if shares is not None:
            made |= _Cut(rows, vector, graph, shares).run()
    return made


def _vectors(steps: Iterable[Step], graph: ir.Graph) -> dict[str, list[_Row]]:
    """The vectors of which each element is made by a reduction, all in one way, with these in order."""
    found: dict[str, dict[str, _Row]] = {}
    for place, step in enumerate(steps):
        row = _row(place, step) if isinstance(step, Kernel) and step.target == "triton" else None
        if row is not None:
            [out] = (out for s in row.after for out, stored in zip(s.outs, s.stored, strict=True) if stored)
            if graph.buffers[out].is_part:
                found.setdefault(ir.owner(graph, out), {})[out] = row
    complete = {name: rows for name, rows in found.items() if _is_filled(graph.buffers[name], rows)}
    ordered = {name: [rows[part] for part in graph.buffers[name].parts] for name, rows in complete.items()}
    return {name: rows for name, rows in ordered.items() if len({_kind(row, graph) for row in rows}) == 1}


def _is_filled(vector: ir.Buffer, rows: Mapping[str, _Row]) -> bool:
    return len(vector.sizes) == 1 and vector.sizes[0] == len(rows) == len(vector.parts) and len(rows) >= FEW


def _row(place: int, kernel: Kernel) -> _Row | None:
    """The kernel as one reduction, and what follows from its result alone."""
    first, *after = kernel.statements
    alone = not kernel.outer and kernel.inner and kernel.sections == 1 and not kernel.rows and not any(first.stored)
    if not alone or first.kind != "reduction" or first.op not in FOLDS:
        return None
    if any(v.extent.as_int() is None for v in kernel.inner):
        return None
    local = {out for s in kernel.statements for out in s.outs}
    plain = all(s.kind == "pointwise" and not s.inner and s.mask is None for s in after)
    own = all(load.attr[0] in local and not load.args for s in after for load in vs.loads(s.roots))
    stored = sum(sum(s.stored) for s in after)
    return _Row(place, kernel, first, tuple(after)) if plain and own and stored == 1 else None


def _kind(row: _Row, graph: ir.Graph) -> tuple[object, ...]:
    """Equal for rows that one kernel can finish: the results of the statements are numbered."""
    number = {out: k for k, s in enumerate((row.reduction, *row.after)) for out in s.outs}

    def numbered(load: Value) -> Value:
        return vs.load(f"result{number[load.attr[0]]}", (), load.attr[2])

    values = vs.replace_loads([s.value for s in row.after], numbered)
    types = tuple(graph.buffers[out].dtype for s in (row.reduction, *row.after) for out in s.outs)
    return row.reduction.op, row.reduction.value.dtype, types, tuple(values)


def _shares(points: Sequence[int], gpu: Gpu) -> int | None:
    """How many shares each row is cut into: so many that together they fill the GPU, and the longest row has its part of it."""
    longest = max(points)
    if longest < LONG:
        return None
    wanted = PROGRAMS_PER_SM * gpu.compute_units * longest // sum(points)
    most = min(MOST_SHARES, longest // MIN_SHARE, MOST_PARTIALS // len(points))
    shares = 1 << (max(1, min(wanted, most)).bit_length() - 1)
    return shares if shares > 1 else None


class _Cut:
    """Cuts the reductions that fill a vector."""

    def __init__(self, rows: list[_Row], vector: str, graph: ir.Graph, shares: int) -> None:
        self.rows, self.vector, self.graph, self.shares = rows, vector, graph, shares
        self.whole = ir.derived(graph, ir.Derived(vector, "partials"))
        self.share = ix.var("share", ix.constant(shares))

    def run(self) -> dict[int, list[Kernel]]:
        """By its place, what each step becomes. The last one is followed by what joins all shares."""
        parts = zip(self.rows, self._partials(), strict=True)
        made = {row.place: [self._partial(row, part)] for row, part in parts}
        made[max(made)].append(self._finish())
        return made

    def _partials(self) -> list[str]:
        """The buffer of the partial results, one part for each row."""
        first, count = self.rows[0], ix.constant(len(self.rows) * self.shares)
        device, kind = self.graph.buffers[self.vector].device, first.reduction.value.dtype
        whole = self.whole
        names = tuple(ir.derived(self.graph, ir.Derived(whole, "row", k)) for k in range(len(self.rows)))
        self.graph.buffers[whole] = ir.Buffer(whole, kind, device, (count,), (ix.ONE,), parts=names)
        for k, name in enumerate(names):
            offset = ix.constant(k * self.shares)
            self.graph.buffers[name] = ir.Buffer(
                name, kind, device, (ix.constant(self.shares),), (ix.ONE,), offset, alias_of=whole, is_part=True
            )
        return list(names)

    def _partial(self, row: _Row, part: str) -> Kernel:
        """The shares of one row. Past the end of the row a share takes what leaves its result unchanged."""
        kernel, s = row.kernel, row.reduction
        loop = self._loop(kernel.inner)
        length = _number(loop.extent)
        chunk = -(-length // self.shares)
        chunk = -(-chunk // ALIGNED) * ALIGNED if chunk > ALIGNED else chunk
        step = ix.var("step", ix.constant(chunk))
        place = self.share.expr() * chunk + step.expr()
        value = vs.substitute(s.value, {loop: place})
        if chunk * self.shares != length:
            # compared with 0: the length is then an offset, which kernels of one body may differ in
            inside = vs.call("lt", vs.index_value(place - length), vs.const(0, vs.index_value(place).dtype))
            value = vs.masked(inside, value, vs.const(ops.identity(s.op, value.dtype), value.dtype))
        inner = tuple(step if v is loop else v for v in kernel.inner)
        made = replace(s, outs=(part,), value=value, store=(self.share.expr(),), rank=None, stored=(True,))
        return replace(kernel, name=f"{kernel.name}_partial", outer=(self.share,), inner=inner, statements=(made,))

    def _loop(self, loops: Sequence[Var]) -> Var:
        """The outermost loop that has a point for each share, else the longest one."""
        wide = (v for v in loops if _number(v.extent) >= self.shares)
        return next(wide, max(loops, key=lambda v: _number(v.extent)))

    def _finish(self) -> Kernel:
        """The kernel that joins the shares of all rows and computes the vector."""
        row = self.rows[0]
        at = ix.var("row", ix.constant(len(self.rows)))
        index: tuple[Expr, ...] = (at.expr(),)
        named = {out: self._named(out) for s in (row.reduction, *row.after) for out in s.outs}

        def moved(load: Value) -> Value:
            return vs.load(named[load.attr[0]], index, load.attr[2])

        partial = vs.load(self.whole, (at.expr() * self.shares + self.share.expr(),), row.reduction.value.dtype)
        joined = replace(row.reduction, outs=(named[row.reduction.outs[0]],), value=partial, store=index, rank=None)
        values = vs.replace_loads([s.value for s in row.after], moved)
        after = (
            replace(s, outs=tuple(named[o] for o in s.outs), value=value, store=index)
            for s, value in zip(row.after, values, strict=True)
        )
        self.graph.buffers[self.vector] = replace(self.graph.buffers[self.vector], parts=())
        name, statements = f"{row.kernel.name}_shares", (joined, *after)
        return replace(row.kernel, name=name, outer=(at,), inner=(self.share,), statements=statements)

    def _named(self, out: str) -> str:
        """The vector itself, or of what stays in registers a vector of those numbers."""
        old = self.graph.buffers[out]
        if old.is_part:
            return self.vector
        name = ir.derived(self.graph, ir.Derived(out, "of_all_rows"))
        self.graph.buffers[name] = replace(old, name=name, sizes=(ix.constant(len(self.rows)),), strides=(ix.ONE,))
        return name


def _number(extent: Expr) -> int:
    known = extent.as_int()
    assert known is not None
    return known
