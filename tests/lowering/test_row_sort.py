"""Rows that a program of a GPU sorts in its registers: right for all types, in one kernel with what is around."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_case import capture
from torch import Tensor

from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.lowering import LoweringContext, lower, reinplace
from kgen.reference.evaluate import evaluate_graph
from tests.scheduler.selection.test_safe_choices import planned

TYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool,
)  # fmt: skip
NAN = float("nan")


def rows_of(dtype: torch.dtype, length: int) -> Tensor:
    """Rows with equal elements, NaNs, infinities and zeros of both signs."""
    x = (torch.randn(7, length, generator=torch.Generator().manual_seed(length)) * 3).round()
    if dtype is torch.bool:
        return x > 0
    if dtype.is_floating_point:
        x[0, 0] = x[1, 1] = NAN
        x[1, 0], x[2, 0] = math.inf, -math.inf
        x[3], x[4] = 0.0, NAN
        x[3, ::2] = -0.0
    return x.to(dtype)


def interpreted(fn: Callable[..., Any], *args: Tensor) -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, backend="kgen", options={"gpu_interpreter": True, "cache": False})(*args)


def same(got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        if one.dtype.is_floating_point:
            assert torch.equal(one.signbit() | one.isnan(), other.signbit() | other.isnan())


def graph_of(fn: Callable[..., Any], x: Tensor) -> ir.Graph:
    return lower(reinplace(capture(fn, (x,), "fake")), LoweringContext(gpu_everywhere=True))


def both_ways(x: Tensor) -> list[Tensor]:
    """Along both dimensions."""
    found: list[Tensor] = []
    for descending in (False, True):
        found += torch.sort(x, dim=-1, descending=descending, stable=True)
        found += torch.sort(x.t().contiguous(), dim=0, descending=descending, stable=True)
    return found


def elements(x: Tensor) -> list[Tensor]:
    return [x.sort(-1).values, *x.kthvalue(2, -1, keepdim=True), *x.median(-1), x.t().contiguous().median(0).values]


@pytest.mark.interpret
@pytest.mark.parametrize("length", [17, 100])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows_are_sorted_as_eager_does(dtype: torch.dtype, length: int) -> None:
    x = rows_of(dtype, length)
    same(interpreted(both_ways, x), both_ways(x))


def test_long_rows_of_wide_keys_are_for_the_library() -> None:
    for dtype, length, sorted_here in ((torch.float32, 2048, True), (torch.float32, 2049, False), (torch.bfloat16, 2049, True)):
        graph = graph_of(lambda x: tuple(torch.sort(x, stable=True)), torch.empty(5, length, dtype=dtype))
        assert any(isinstance(node, ir.Scan) and node.op in ops.ROW_ORDERS for node in graph.nodes) == sorted_here


@pytest.mark.interpret
@pytest.mark.parametrize("length", [512, 1000, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_long_rows(dtype: torch.dtype, length: int) -> None:
    x = rows_of(dtype, length)[:5]
    same(interpreted(lambda x: torch.sort(x, stable=True), x), torch.sort(x, stable=True))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_evaluator_sorts_them(dtype: torch.dtype) -> None:
    x = rows_of(dtype, 33)
    graph = graph_of(both_ways, x)
    assert any(isinstance(node, ir.Scan) and node.op in ops.ROW_ORDERS for node in graph.nodes)
    same(evaluate_graph(graph, [x]), both_ways(x))


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64], ids=str)
def test_one_element_of_a_row(dtype: torch.dtype) -> None:
    x = torch.randperm(7 * 40, generator=torch.Generator().manual_seed(1)).reshape(7, 40)
    x = x.to(dtype) if dtype is not torch.bfloat16 else (x % 40).to(dtype)
    if dtype.is_floating_point:
        x[1, 3] = NAN
    if dtype is torch.bfloat16:  # which of equal elements eager finds is open
        same([interpreted(lambda x: x.median(-1).values, x)], [x.median(-1).values])
    else:
        same(interpreted(elements, x), elements(x))


@pytest.mark.interpret
@pytest.mark.parametrize("descending", [False, True])
def test_the_largest_numbers_are_no_padding(descending: bool) -> None:
    for dtype in (torch.int64, torch.int32, torch.int8, torch.bfloat16):
        info: Any = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        x = torch.full((3, 19), info.max, dtype=dtype)
        x[1], x[2, ::3] = info.min, 0
        same(
            interpreted(lambda x: torch.sort(x, descending=descending, stable=True), x),
            torch.sort(x, descending=descending, stable=True),
        )


# ---- what they fuse with ---------------------------------------------------------------------------------------------


def sparsemax(z: Tensor) -> Tensor:
    s = torch.sort(z, dim=-1, descending=True).values
    k = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    on = 1 + k * s > s.cumsum(-1)
    tau = ((s * on).sum(-1, keepdim=True) - 1) / on.sum(-1, keepdim=True)
    return (z - tau).clamp(min=0)


def nucleus(x: Tensor) -> tuple[Tensor, Tensor]:
    s, i = (x * 2).sort(dim=-1, descending=True, stable=True)
    p = s.softmax(-1)
    return s.masked_fill(p.cumsum(-1) - p > 0.9, -math.inf).softmax(-1), i


def ranks(x: Tensor) -> Tensor:
    return x.argsort(dim=-1, stable=True).argsort(-1)


def spread(x: Tensor) -> Tensor:
    middle = x.median(-1).values
    return (x - middle[..., None]).abs().median(-1).values


def distance(x: Tensor) -> Tensor:
    return (x.sort(-1).values - (x * 2).sort(-1).values).abs().sum(-1)


def by_gather(z: Tensor) -> Tensor:
    """A sparsemax that takes one of its running sums."""
    s = torch.sort(z, dim=-1, descending=True).values
    sums = s.cumsum(-1) - 1
    k = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    n = (k * s > sums).sum(-1, keepdim=True)
    return torch.clamp(z - sums.gather(-1, n - 1) / n, min=0)


def third(x: Tensor) -> Tensor:
    return torch.quantile(x, 0.3, dim=-1)


def all_but_seven(x: Tensor) -> Tensor:
    return x.topk(x.shape[-1] - 7, dim=-1).values


FUSED = [(sparsemax, 1), (nucleus, 1), (ranks, 1), (spread, 1), (distance, 1), (by_gather, 1), (third, 1)]


@pytest.mark.parametrize(("fn", "kernels"), FUSED)
@pytest.mark.parametrize("length", [100, 1000])
def test_one_kernel_has_what_is_around(fn: Callable[..., Any], kernels: int, length: int) -> None:
    plan = planned(fn, torch.randn(8192, length))
    assert len(plan.kernels) == len(plan.steps) == kernels


@pytest.mark.interpret
@pytest.mark.parametrize("fn", [sparsemax, nucleus, ranks, spread, distance, by_gather, third, all_but_seven])
def test_values(fn: Callable[..., Any]) -> None:
    x = torch.randn(6, 100, generator=torch.Generator().manual_seed(0))
    got, want = interpreted(fn, x), fn(x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_one_element_of_each_row_is_exact(dtype: torch.dtype) -> None:
    """A negative zero, a NaN and the largest integers among them."""

    def taken(x: Tensor, at: Tensor) -> Tensor:
        return torch.sort(x, stable=True).values.gather(-1, at)

    x, at = rows_of(dtype, 20), torch.arange(7)[:, None] * 3
    same([interpreted(taken, x, at)], [taken(x, at)])


def test_an_index_from_data_is_checked() -> None:
    """No access computes an address with it."""
    at = torch.zeros(2, 1, dtype=torch.int64)
    [kernel] = planned(lambda x, at: torch.sort(x).values.gather(-1, at), torch.randn(2, 20), at).kernels
    assert any(v.op == "assert" for s in kernel.statements for v in vs.topological(s.roots))


@pytest.mark.interpret
def test_gradients() -> None:
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))

    def loss(z: Tensor) -> Tensor:
        values, at = z.sort(dim=-1, descending=True, stable=True)
        return (sparsemax(z) * values.cumsum(-1)).sum() + (values * at).sum()

    a, b = (x.clone().requires_grad_() for _ in range(2))
    interpreted(loss, a).backward()
    loss(b).backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_the_first_ranks_are_stored_alone(dtype: torch.dtype) -> None:
    """One kernel sorts, another one makes the memory."""
    plan = planned(lambda x: x.topk(50, -1).values, torch.empty(8192, 1000, dtype=dtype))
    assert not plan.calls
    assert all(
        plan.graph.buffers[out].sizes[-1] == 50 for k in plan.kernels for s in k.statements for out in s.outs if any(s.stored)
    )


@pytest.mark.parametrize(("rows", "length"), [(8192, 5000), (4, 100_000)])
def test_longer_rows_are_the_library_s(rows: int, length: int) -> None:
    plan = planned(lambda x: torch.sort(x, stable=True).values, torch.empty(rows, length))
    assert [str(call.node.target) for call in plan.calls] == ["aten.sort.stable"]


def test_few_long_rows_are_counted() -> None:
    """By the threads of all programs."""
    plan = planned(lambda x: x.sort(-1).values, torch.empty(1, 2000))
    assert not plan.calls
    assert not any(s.op in ops.ROW_ORDERS for k in plan.kernels for s in k.statements)
