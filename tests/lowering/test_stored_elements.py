"""Large tensors on a GPU that several kernels read: which each of them computes again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.ir.plan import Kernel, members
from tests.scheduler.selection.test_safe_choices import planned

ROWS, LENGTH = 64, 20_000


def drawn(x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """A softmax of which few elements are read, and a sum."""
    p = torch.softmax(x.float(), -1)
    return p.gather(1, at), (p * p).sum(1)


def knots(x: Tensor, at: Tensor) -> Tensor:
    """A dear table, of which two elements a place are read."""
    d = F.softplus(x) + 0.01
    return d.gather(1, at) * d.gather(1, at + 1)


def shares(x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """A running sum of something dear, of which few elements are read again; it is a result."""
    p = torch.softmax(x.float(), -1) * 0.84 + 0.01
    return p.gather(1, at), p.cumsum(1)


def searched(x: Tensor, wanted: Tensor) -> Tensor:
    """A search of few places reads few elements."""
    return torch.searchsorted(x.exp() * 6 - 3 + x.abs(), wanted)


def spread(x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Three numbers are made of each weight."""
    w = torch.exp(x - 1)
    return w.sum(1), (w[..., None] * 2 * d).sum(1)


def hot(rows: Tensor, at: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """One number a row among zeros, made of numbers of rows alone."""
    g = torch.zeros_like(y).scatter_add(1, at, (rows * 2 - 1)[:, None])
    return (g * y).sum(0), (g - y).sum(1)


def capped(x: Tensor, at: Tensor) -> Tensor:
    """A loss that reads one of a row's logits besides the sum of their exponentials."""
    y = 30 * torch.tanh(x.float() / 30)
    return (y.logsumexp(1) - y.gather(1, at).squeeze(1)).sum()


def coded(place: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers that are made of rows alone, for masks of two types."""
    code = (place < 9000)[:, None] * torch.nn.functional.one_hot(place.clamp(max=LENGTH - 1), LENGTH) * 3
    return (code.to(torch.bfloat16) * 2).sum(0), (code * gate[:, None]).sum(1)


def shared(x: Tensor, y: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of rows, each with a number for all of its elements."""
    w = (x[:, None] - y[None]) * (torch.sqrt(3 / (s + 1)) / s)[..., None]
    return w.sum(0), w.sum(1)


def stored(fn: Callable[..., object], *args: Tensor) -> int:
    """The tensors of as many elements that are written."""
    plan = planned(fn, *args)
    kernels = [kernel for step in plan.kernels for kernel in members(step) if isinstance(kernel, Kernel)]
    written = {o for k in kernels for s in k.statements for o, kept in zip(s.outs, s.stored, strict=True) if kept}
    sizes = ([size.as_int() or 0 for size in plan.graph.buffers[name].sizes] for name in written)
    return sum(found == [ROWS, LENGTH] for found in sizes)


@pytest.mark.parametrize(
    ("fn", "args", "number"),
    [
        (drawn, lambda: (torch.empty(ROWS, LENGTH), torch.zeros(ROWS, 5, dtype=torch.long)), 0),
        (knots, lambda: (torch.empty(ROWS, LENGTH), torch.zeros(ROWS, 5, dtype=torch.long)), 0),
        (shares, lambda: (torch.empty(ROWS, LENGTH), torch.zeros(ROWS, 5, dtype=torch.long)), 1),
        (searched, lambda: (torch.empty(ROWS, LENGTH), torch.empty(ROWS, 40)), 0),
        (spread, lambda: (torch.empty(ROWS, LENGTH), torch.empty(ROWS, LENGTH, 3)), 1),
        (hot, lambda: (torch.empty(ROWS), torch.zeros(ROWS, 1, dtype=torch.long), torch.empty(ROWS, LENGTH)), 0),
        (capped, lambda: (torch.empty(ROWS, LENGTH).bfloat16(), torch.zeros(ROWS, 1, dtype=torch.long)), 0),
        (coded, lambda: (torch.zeros(ROWS, dtype=torch.long), torch.empty(ROWS)), 0),
    ],
    ids=[
        "read again",
        "a table",
        "a running sum",
        "a search",
        "read several times",
        "made of rows",
        "few are gathered",
        "codes",
    ],
)
def test_what_is_stored(fn: Callable[..., object], args: Callable[[], tuple[Tensor, ...]], number: int) -> None:
    assert stored(fn, *args()) == number


def test_what_is_dear_of_rows_is_stored_for_them() -> None:
    """Each of their elements would compute it again."""
    plan = planned(shared, torch.empty(1000, 64), torch.empty(40, 64), torch.empty(1000, 40))
    assert any(name.endswith("_row") for name in plan.graph.buffers)


def crossings(x: Tensor) -> Tensor:
    """Where lines between neighbours cross zero, along two axes: each difference has two readers in one expression."""
    n = x.shape[0] - 1
    found = []
    for d in range(2):
        a, b = x.narrow(d, 0, n), x.narrow(d, 1, n)
        found.append((a / torch.where((a - b).abs() < 1e-6, 1e-6, a - b))[:n, :n])
    return torch.stack(found)


def test_differences_of_neighbours_are_made_again() -> None:
    """They read one buffer: neighbours come from the cache, and a trip through memory would take longer."""
    [step] = planned(crossings, torch.empty(1100, 1100)).steps
    assert isinstance(step, Kernel)


def test_sums_of_two_tensors_are_stored_for_several_readers() -> None:
    x, y = torch.empty(1100, 1100), torch.empty(1100, 1100)
    plan = planned(lambda x, y: ((x * y).sum(0), (x * y)[:, 1:].exp().cumsum(1)), x, y)
    assert any(name.startswith("mul") for name, buffer in plan.graph.buffers.items() if buffer.kind == "intermediate")


def gates(x: Tensor) -> tuple[Tensor, Tensor]:
    g = torch.sigmoid(x)
    return (g * 2).sum(0), (g - 1).sum(1)


@pytest.mark.parametrize(("dtype", "count"), [(torch.bfloat16, 0), (torch.float32, 0), (torch.float64, 1)])
def test_functions_of_16_bits_are_the_hardwares(dtype: torch.dtype, count: int) -> None:
    """A few instructions: less than a trip through memory takes."""
    assert stored(gates, torch.empty(ROWS, LENGTH, dtype=dtype)) == count
