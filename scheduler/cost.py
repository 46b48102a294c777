"""What a fusion is worth: memory traffic at the size hints, and when saving it would cost more elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from kgen import ir
from kgen.index import Var
from kgen.plan import MAX_PERSISTENT
from kgen.scheduler.items import Item, Members
from kgen.sizes import Sizes
from kgen.verdict import Reason

# Outer points that a kernel of independent points keeps at least: lanes and threads both live on them.
MIN_POINTS = 512
# Bounds of one kernel: beyond these the compiler spills registers and its time grows.
MAX_ITEMS = 64
MAX_COST = 2500
MAX_BUFFERS = 96


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a kind of device draws its lines. A row of more than `long_row` points is worth sharing among threads when there
    are fewer than `min_rows`; what a later section needs is computed again below a cost of `recompute`, else kept in a row
    of at most `max_row` points."""

    long_row: int
    min_rows: int
    recompute: int
    max_row: int


LIMITS = {
    "cpp": Limits(long_row=32768, min_rows=4, recompute=10, max_row=32768),  # 128 KiB of float32: half an L2 slice
    # a row is held by registers, and arithmetic is cheap; a row shared by programs needs a launch for each walk
    "triton": Limits(long_row=MAX_PERSISTENT, min_rows=64, recompute=60, max_row=MAX_PERSISTENT),
}


def unprofitable(
    sizes: Sizes, a: Members, b: Members, outer: tuple[Var, ...], inner: tuple[Var, ...], limits: Limits
) -> Reason | None:
    """Why the joint kernel would be worse although it moves less memory."""
    if len(a.items) + len(b.items) > MAX_ITEMS or a.cost + b.cost > MAX_COST:
        return Reason.TOO_LARGE
    if len(a.reads) + len(b.reads) + len(a.made) + len(b.made) > 2 * MAX_BUFFERS:
        return Reason.TOO_LARGE
    if (
        inner
        and sizes.points(inner) > limits.long_row
        and sizes.points(outer) < limits.min_rows
        and _revisits(a.joined(b).items)
    ):
        return Reason.PARALLELISM
    if inner and sizes.points(outer) < MIN_POINTS and sizes.points(inner) > MIN_POINTS and not _ordered(a, b):
        return Reason.PARALLELISM  # as two kernels all points are independent
    return None


def _ordered(a: Members, b: Members) -> bool:
    """Whether inner loops must run in order at all."""
    return any(not isinstance(item.node, ir.Pointwise) for m in (a, b) for item in m.items)


def _revisits(items: list[Item]) -> bool:
    """Whether some item at inner level needs a reduction's finished result, so that the row is walked again."""
    finished: set[str] = set()
    for item in items:
        if item.inner and any(r.buffer in finished for r in item.reads):
            return True
        if item.reduces or any(r.buffer in finished for r in item.reads):
            finished.update(item.outs)
    return False
