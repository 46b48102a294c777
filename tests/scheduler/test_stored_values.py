"""What jumps is decided by numbers as eager stores them: positions in sorted rows, comparisons, first extremes, conversions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore::UserWarning")]

BACK_ENDS = pytest.mark.parametrize(
    "options", [{}, pytest.param({"gpu_interpreter": True}, marks=pytest.mark.interpret)], ids=["cpu", "gpu"]
)
KINDS = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
)  # fmt: skip
WIDE = 2**24  # the first integer whose successor is no float32
WIDEST = 2**53  # the same of float64
NUMBERS = (-3, 0, 1, 2, 3, 100, 127, 255, 300, WIDE, WIDE + 1, WIDE + 2, WIDEST, WIDEST + 1)


def agree(f: Any, args: list[Any], options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    got = torch.compile(f, backend="kgen", fullgraph=True, options={"cache": False, **options})(*args)
    for k, (a, b) in enumerate(zip(got, f(*args), strict=True)):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), f"result {k}: {a.tolist()}, eager {b.tolist()}"


def _numbers(dtype: torch.dtype) -> Tensor:
    """Sorted, some of them on either side of what other types round to."""
    if dtype.is_floating_point:
        top = min(torch.finfo(dtype).max, WIDEST + 2.0)
        large = [n for n in (100.0, WIDE, WIDE + 2.0, WIDEST) if n <= top]
        return torch.tensor([-1.5, 0.0, 1.0, 1.003, 2.0, 2.5, *large]).to(dtype)
    info = torch.iinfo(dtype)
    return torch.tensor([n for n in NUMBERS if info.min <= n <= info.max], dtype=dtype)


def _found(*args: Tensor) -> list[Tensor]:
    """Each pair of a row and numbers in one of the ways to search, all of them in turn."""
    out = []
    for k, (row, x) in enumerate(zip(args[::2], args[1::2], strict=True)):
        downward = torch.arange(row.numel() - 1, -1, -1)
        out += [
            lambda row=row, x=x: torch.searchsorted(row, x),
            lambda row=row, x=x: torch.bucketize(x, row, right=True, out_int32=True),
            lambda row=row, x=x, s=downward: torch.searchsorted(row.flip(0), x, sorter=s, side="right"),
            lambda row=row, x=x: torch.searchsorted(row, x[2]),
        ][k % 4 :][:1]
    return [search() for search in out]


@pytest.mark.every(3)
@BACK_ENDS
@pytest.mark.parametrize("part", range(2))
def test_a_search_for_numbers_of_one_type_in_rows_of_another(part: int, options: dict[str, Any]) -> None:
    pairs = list(itertools.product(KINDS, KINDS))[part::2]
    agree(_found, [_numbers(kind) for pair in pairs for kind in pair], options)


def test_a_search_for_literals() -> None:
    def f(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> list[Tensor]:
        return [
            torch.searchsorted(a, 1.5), torch.searchsorted(b, 1.003), torch.searchsorted(c, 2), torch.searchsorted(d, 0.1),
            torch.bucketize(2, c), torch.bucketize(1.5, a, right=True),
        ]  # fmt: skip

    row = torch.tensor([1, 2, 3])
    agree(f, [row, row.bfloat16(), row.float(), row.double() / 10], {})


@pytest.mark.every(3)
@BACK_ENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_rounded_before_they_decide(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Many of them are equal only once they are rounded; half are stored by the same kernel, or read from memory."""

    def f(x: Tensor, y: Tensor) -> list[Tensor]:
        m = x * 1.1
        top = m.amax(-1, keepdim=True)
        return [
            torch.searchsorted(m.sort(-1)[0], m), torch.bucketize(m[0], (x[0] * 1.1).sort()[0]), m == top, m >= top,
            m == y, (m == top).sum(-1), m.argmax(-1), m.min(0)[1], m.cummax(1)[1], m.long(), m.floor(), (x / 3).bool(),
            (x * 60000).isinf(), m.argmax(-1, keepdim=True) == (m == top).to(torch.int8).argmax(-1, keepdim=True),
        ]  # fmt: skip

    x = (torch.randn(20, 130, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    x[0, :3] = torch.tensor([6e-8, 1e-7, 0.0]).to(dtype)
    agree(f, [x, (x * 1.1).float()], options)


@pytest.mark.every(3)
@BACK_ENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_type_is_made_of_stored_numbers(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """The 16-bit number is stored as well, or not."""

    def f(x: Tensor, y: Tensor) -> list[Tensor]:
        m, n = x * 1.1, x * y
        wide = m.float()
        return [
            wide == m,
            wide,
            (x * 60000).double().isinf(),
            n,
            n.float() == n,
            n.float().amax(0) == n,
        ]

    x, y = torch.randn(2, 9, 37, generator=torch.Generator().manual_seed(1)).to(dtype)
    agree(f, [x, y], options)


@BACK_ENDS
def test_a_search_in_rows_with_nans(options: dict[str, Any]) -> None:
    """Such rows are not sorted: each order of steps finds another position, and torch's is the bisection's."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(n, generator=generator) for n in (0, 1, 2, 3, 7, 8, 9, 31)]
    rows = [row.masked_fill(torch.rand(row.shape, generator=generator) < 0.2, torch.nan) for row in rows]
    wanted = torch.cat([*rows, torch.tensor([torch.inf, -torch.inf])])

    def f(x: Tensor, *rows: Tensor) -> list[Tensor]:
        return [torch.searchsorted(row, x, right=right) for row in rows for right in (False, True)]

    agree(f, [wanted, *rows], options)
