"""Values along an axis of few points that readers read one by one: how many kernels, what stays one buffer, and values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kgen
from kgen.ir.plan import members
from tests.kernels import plans


def spread(v: Tensor) -> Tensor:
    v = (v | (v << 16)) & 0x030000FF
    v = (v | (v << 8)) & 0x0300F00F
    return (v | (v << 4)) & 0x030C30C3


def morton(points: Tensor) -> Tensor:
    x = (points.sigmoid() * 1023).to(torch.int64)
    return spread(x[:, 0]) | (spread(x[:, 1]) << 1) | (spread(x[:, 2]) << 2)


def hamming(codes: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    v = queries[:, None] ^ codes[None]
    v = v - ((v >> 1) & 0x5555555555555555)
    v = (v & 0x3333333333333333) + ((v >> 2) & 0x3333333333333333)
    v = (v + (v >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((v * 0x0101010101010101) >> 56).sum(-1).min(1)


def eight_levels(x: Tensor, levels: Tensor) -> Tensor:
    """Distances to levels, each of which several readers take."""
    d = ((x[..., None] - levels) ** 2 * x[..., None].sigmoid()).unbind(-1)
    return d[1].minimum(d[2]).minimum(d[5]).minimum(d[6]) - d[0].minimum(d[3]).minimum(d[4]).minimum(d[7]) + d[4] * d[1]


def luminance(x: Tensor) -> Tensor:
    """Of colours in front, two steps of which each is read again."""
    y = torch.where(x > 0.04, ((x.abs() + 0.055) / 1.055) ** 2.4, x / 12.92)
    z = torch.tanh(y) * y.exp() + y.sigmoid()
    r, g, b = z.unbind(0)
    return 0.2 * r * g + 0.7 * g * b + 0.07 * b * r


def first_only(x: Tensor) -> Tensor:
    y = torch.tanh(x) * x.exp() + x.sigmoid()
    return y[:, 0] * y[:, 0].tanh()


def summed(x: Tensor) -> Tensor:
    y = torch.tanh(x) * x.exp() + x.sigmoid()
    return (y[:, 0] * y[:, 1]).sum() + y[:, 1].cumsum(0)


CASES: dict[str, tuple[Callable[..., object], list[Tensor], int]] = {
    "morton": (morton, [torch.randn(1000, 3, dtype=torch.float64)], 1),
    "hamming": (hamming, [torch.randint(-(2**62), 2**62, (300, 2)), torch.randint(-(2**62), 2**62, (50, 2))], 2),
    "luminance": (luminance, [torch.rand(3, 40, 50, dtype=torch.float64)], 1),
    "eight levels": (eight_levels, [torch.rand(3, 40, dtype=torch.float64), torch.randn(8, dtype=torch.float64)], 1),
    "first only": (first_only, [torch.randn(500, 4, dtype=torch.float64)], 1),
    "summed": (summed, [torch.randn(500, 2, dtype=torch.float64)], 2),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_kernels(name: str) -> None:
    fn, args, count = CASES[name]
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(fn, backend="kgen", fullgraph=True)(*args), fn(*args))
    assert sum(len(members(step)) for step in plans(fn, *args).forward.kernels) <= count


def test_random_numbers_are_those_of_their_points() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.rand_like(x) + x.exp()
        return y[:, 0] * y[:, 1].exp(), y

    def apart(x: Tensor) -> Tensor:
        y = torch.rand_like(x) + x.exp()
        return y[:, 0] * y[:, 1].exp()

    x = torch.randn(100, 2, dtype=torch.float64)
    torch.manual_seed(1)
    both, y = torch.compile(fn, backend="kgen", fullgraph=True)(x)
    torch.manual_seed(1)
    torch.testing.assert_close(torch.compile(apart, backend="kgen", fullgraph=True)(x), both)
    torch.testing.assert_close(both, y[:, 0] * y[:, 1].exp())


def result_too(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sigmoid() * x.exp() + x
    return y, y[:, 0] * y[:, 1].exp()


def by_data(x: Tensor, i: Tensor) -> Tensor:
    y = x.sigmoid() * x.exp() + x
    return y[:, 0] * y.gather(1, i)[:, 0].exp()


def of_a_matmul(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).sigmoid()
    y = y * y.exp() + y
    return y[:, 0] * y[:, 1].exp()


def written_again(x: Tensor) -> Tensor:
    y = x.sigmoid() * x.exp() + x
    y[:, 0] += 1
    return y[:, 0] * y[:, 1].exp()


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (result_too, [torch.randn(100, 2, dtype=torch.float64)]),
        (by_data, [torch.randn(100, 2, dtype=torch.float64), torch.randint(0, 2, (100, 1))]),
        (of_a_matmul, [torch.randn(64, 32, dtype=torch.float64), torch.randn(32, 2, dtype=torch.float64)]),
        (written_again, [torch.randn(100, 2, dtype=torch.float64)]),
    ],
)
def test_what_may_stay_one_buffer_is_right(fn: Callable[..., object], args: list[Tensor]) -> None:
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(fn, backend="kgen", fullgraph=True)(*args), fn(*args))


def test_any_number_of_rows() -> None:
    torch._dynamo.reset()
    step = torch.compile(morton, backend="kgen", fullgraph=True, dynamic=True)
    for rows in (7, 100, 1):
        x = torch.randn(rows, 3, dtype=torch.float64)
        torch.testing.assert_close(step(x), morton(x))
    assert kgen.coverage()
