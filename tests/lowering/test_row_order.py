"""Rows sorted by counting: values and positions as those of eager's stable sort."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from op_case import capture
from torch import Tensor

from kgen.lowering import LoweringContext, lower, reinplace
from kgen.reference.evaluate import evaluate_graph
from kgen.scheduler import Options, schedule

TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
NAN = float("nan")


def rows(dtype: torch.dtype, *sizes: int) -> Tensor:
    """With many equal elements."""
    return (torch.randn(sizes, generator=torch.Generator().manual_seed(len(sizes))) * 4).round().to(dtype)


def graph_of(fn: Callable[[Tensor], Any], x: Tensor, who: str = "kernels", **context: Any) -> Any:
    gm = capture(lambda x: fn(x), (x,), "fake")  # noqa: PLW0108  a function of one argument
    return lower(reinplace(gm), LoweringContext(top_k=who, **context))


def calls_of(fn: Callable[[Tensor], Any], x: Tensor, who: str, **context: Any) -> list[str]:
    plan = schedule(graph_of(fn, x, who, **context), Options(gpu_everywhere=bool(context)))
    return [str(call.node.target) for call in plan.calls]


def check(fn: Callable[[Tensor], Any], x: Tensor, wanted: Callable[[Tensor], Any] | None = None) -> None:
    graph = graph_of(fn, x)
    assert not any(hasattr(node, "target") and not hasattr(node, "mode") for node in graph.nodes), "a library call"
    want = (wanted or fn)(x)
    got = evaluate_graph(graph, [x])
    for one, other in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def stable(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    return tuple(torch.sort(x, dim=dim, descending=descending, stable=True))


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: str(dtype)[6:])
def test_types(dtype: torch.dtype, descending: bool) -> None:
    check(lambda x: stable(x, -1, descending), rows(dtype, 5, 33))


@pytest.mark.parametrize("sizes", [(1,), (2,), (40,), (3, 1), (4, 2, 70)])
def test_sizes(sizes: tuple[int, ...]) -> None:
    for dim in range(len(sizes)):
        check(partial(stable, dim=dim), rows(torch.float32, *sizes))


@pytest.mark.parametrize("descending", [False, True])
def test_numbers_that_are_not_alone(descending: bool) -> None:
    """NaNs come after all numbers, infinities included, and both zeros are equal."""
    x = torch.tensor([[0.0, -0.0, NAN, float("inf"), -0.0, -NAN, 0.0, float("-inf"), 1e-45, -1e-45]])
    values, positions = evaluate_graph(graph_of(lambda x: stable(x, -1, descending), x), [x])
    want, expected = stable(x, -1, descending)
    assert torch.equal(positions, expected)
    assert torch.equal(values.signbit() | values.isnan(), want.signbit() | want.isnan())


def test_the_largest_integers() -> None:
    largest = torch.iinfo(torch.int64).max
    check(stable, torch.tensor([[largest, -largest - 1, 0, largest - 1, -1, 1]]))


def test_a_sort_without_a_promise_keeps_the_order_too() -> None:
    x = rows(torch.float32, 6, 20)
    check(lambda x: tuple(torch.sort(x, dim=0)), x, lambda x: stable(x, 0))
    check(lambda x: torch.argsort(x, dim=1, descending=True), x, lambda x: stable(x, 1, True)[1])
    check(torch.msort, x)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("length", [1, 8, 9])
def test_medians(length: int, keepdim: bool) -> None:
    """Positions of equal elements are open, so there are none."""
    x = torch.stack([torch.randperm(length).float() - 3 for _ in range(4)])
    check(lambda x: tuple(torch.median(x, 1, keepdim)), x)
    check(lambda x: tuple(torch.nanmedian(x, 0, keepdim)), x.t().contiguous())
    check(lambda x: tuple(torch.kthvalue(x, (length + 1) // 2, 1, keepdim)), x)
    check(torch.median, torch.randperm(4 * length))


def test_medians_of_rows_with_nans() -> None:
    x = torch.tensor([[3.0, NAN, 1.0, 2.0, NAN], [NAN] * 5, [5.0, 4.0, 3.0, 2.0, 1.0]])
    check(lambda x: tuple(torch.median(x, 1)), x)
    check(lambda x: torch.nanmedian(x, 1).values, x)
    check(torch.median, x)
    check(torch.nanmedian, x)


def test_who_sorts() -> None:
    """Short rows on a GPU by kernels; on a CPU, where nobody has measured them, and long rows by the library."""

    def fn(x: Tensor) -> Tensor:
        return torch.sort(x).values

    short, long = torch.empty(128, 200), torch.empty(2, 5000)
    assert calls_of(fn, short, "auto") == ["aten.sort.default"]
    assert calls_of(fn, short, "auto", gpu_everywhere=True) == []
    assert calls_of(fn, long, "auto", gpu_everywhere=True) == ["aten.sort.default"]
    assert calls_of(fn, short, "library", gpu_everywhere=True) == ["aten.sort.default"]
    windows = torch.empty(1 << 20, 9)
    assert calls_of(fn, windows, "auto", gpu_everywhere=True) == [], "any number of rows of a few elements"
    assert calls_of(fn, windows, "auto") == [], "on a CPU as well"
    assert calls_of(fn, windows, "library") == ["aten.sort.default"]
    assert calls_of(fn, short.double(), "kernels") == ["aten.sort.default"]
    assert calls_of(fn, short.double(), "auto", gpu_everywhere=True) == []


@pytest.mark.cpu
def test_native_kernels() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        ranked = x.nan_to_num().gather(1, torch.argsort(-x, stable=True)).cumsum(1)
        return *torch.sort(x * 2, stable=True), torch.median(x, 1).values, ranked

    x = rows(torch.float32, 9, 64)
    x[1, 2], x[2] = NAN, float("-inf")
    torch.testing.assert_close(torch.compile(fn, backend="kgen", options={"top_k": "kernels"})(x), fn(x), equal_nan=True)


@pytest.mark.interpret
@pytest.mark.parametrize("descending", [False, True])
def test_triton_kernels(descending: bool) -> None:
    x = rows(torch.float32, 5, 67)
    x[0, 3], x[1] = NAN, float("-inf")
    options = {"gpu_interpreter": True, "cache": False, "top_k": "kernels"}
    compiled = torch.compile(lambda x: stable(x, -1, descending), backend="kgen", options=options)
    for one, other in zip(compiled(x), stable(x, -1, descending), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.cpu
def test_gradients() -> None:
    x = torch.randn(6, 40, requires_grad=True)
    weights = torch.rand(40)
    compiled = torch.compile(lambda x: (x.sort(-1).values * weights).sum(), backend="kgen", options={"top_k": "kernels"})
    [got] = torch.autograd.grad(compiled(x), x)
    [want] = torch.autograd.grad((x.sort(-1).values * weights).sum(), x)
    torch.testing.assert_close(got, want)
