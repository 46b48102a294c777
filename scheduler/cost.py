"""What a fusion is worth: memory traffic at the size hints, and when saving it would cost more elsewhere."""

from __future__ import annotations

from kgen.index import Var
from kgen.scheduler.items import Item, Members
from kgen.sizes import Sizes
from kgen.verdict import Reason

# A row longer than this (in points) is worth sharing among threads when there are fewer rows than MIN_ROWS.
LONG_ROW = 32768
MIN_ROWS = 4
# Outer points that a kernel of independent points keeps at least: lanes and threads both live on them.
MIN_POINTS = 512
# Bounds of one kernel: beyond these the compiler spills registers and its time grows.
MAX_ITEMS = 64
MAX_COST = 2500
MAX_BUFFERS = 96


def unprofitable(sizes: Sizes, a: Members, b: Members, outer: tuple[Var, ...], inner: tuple[Var, ...]) -> Reason | None:
    """Why the joint kernel would be worse although it moves less memory."""
    if len(a.items) + len(b.items) > MAX_ITEMS or a.cost + b.cost > MAX_COST:
        return Reason.TOO_LARGE
    if len(a.reads) + len(b.reads) + len(a.made) + len(b.made) > 2 * MAX_BUFFERS:
        return Reason.TOO_LARGE
    if inner and sizes.points(inner) > LONG_ROW and sizes.points(outer) < MIN_ROWS and _revisits(a.joined(b).items):
        return Reason.PARALLELISM
    few = not outer or (sizes.points(outer) < MIN_POINTS and sizes.points(inner) > MIN_POINTS)
    if inner and few and not _ordered(a, b):
        return Reason.PARALLELISM  # as two kernels all points are independent
    return None


def _ordered(a: Members, b: Members) -> bool:
    """Whether inner loops must run in order at all."""
    return any(item.in_order for m in (a, b) for item in m.items)


def _revisits(items: list[Item]) -> bool:
    """Whether some item at inner level needs a reduction's finished result, so that the row is walked again."""
    finished: set[str] = set()
    for item in items:
        if item.inner and any(r.buffer in finished for r in item.reads):
            return True
        if item.reduces or any(r.buffer in finished for r in item.reads):
            finished.update(item.outs)
    return False
