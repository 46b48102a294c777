"""Kernels that find the largest elements of rows: values as eager's, positions of the first of equal elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from codegen import Row, report, run_rows
from op_case import capture
from torch import Tensor

import kgen
from kgen.errors import BadOptionValue
from kgen.lowering import LoweringContext, lower, reinplace
from kgen.reference.evaluate import evaluate_graph
from kgen.scheduler import Options, schedule

TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int8, torch.uint8)
SIZES = ((7, 64, 8), (3, 256, 64), (3, 257, 3), (2, 1000, 8), (2, 5000, 50), (4, 1, 1))


def rows(rows: int, length: int, dtype: torch.dtype) -> Tensor:
    """With many equal elements."""
    generator = torch.Generator().manual_seed(length)
    return (torch.randn(rows, length, generator=generator) * 10).round().to(dtype)


def graph_of(x: Tensor, k: int, dim: int, largest: bool, who: str = "kernels", **context: Any) -> Any:
    gm = capture(lambda x: torch.topk(x, k, dim, largest), (x,), "fake")
    return lower(reinplace(gm), LoweringContext(top_k=who, **context))


def first_of_equals(x: Tensor, k: int, dim: int, largest: bool) -> Tensor:
    return torch.sort(x.double(), dim=dim, descending=largest, stable=True).indices.narrow(dim, 0, k)


def check(x: Tensor, k: int, dim: int = -1, largest: bool = True) -> None:
    graph = graph_of(x, k, dim, largest)
    assert not any(hasattr(node, "target") and not hasattr(node, "mode") for node in graph.nodes), "a library call"
    values, positions = evaluate_graph(graph, [x])
    wanted = torch.topk(x, k, dim, largest).values
    torch.testing.assert_close(values, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(positions, first_of_equals(x, k, dim, largest))


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: str(dtype)[6:])
def test_types(dtype: torch.dtype, largest: bool) -> None:
    check(rows(5, 64, dtype), 8, largest=largest)


@pytest.mark.parametrize(("count", "length", "k"), SIZES)
def test_lengths(count: int, length: int, k: int) -> None:
    check(rows(count, length, torch.float32), k)
    check(rows(count, length, torch.float32), k, largest=False)


def test_other_dimensions() -> None:
    check(rows(6, 40, torch.float32).reshape(6, 5, 8), 3, dim=1)
    check(rows(300, 7, torch.float32), 4, dim=0, largest=False)


@pytest.mark.parametrize("length", [64, 300])
@pytest.mark.parametrize("largest", [True, False])
def test_what_is_no_number_is_the_largest(length: int, largest: bool) -> None:
    x = rows(4, length, torch.float32)
    x[0, 3] = x[0, 9] = float("nan")
    x[1], x[2, 5], x[2, 6], x[3] = float("-inf"), float("inf"), float("-inf"), 0.0
    check(x, 5, largest=largest)


@pytest.mark.parametrize(
    ("x", "k"),
    [
        (torch.randn(3, 100), 65),  # more rounds than are worth while
        (torch.randn(3, 100, dtype=torch.float64), 2),  # no rank of 32 bits
        (torch.ones(3, 100, dtype=torch.int64), 2),
        (torch.randn(3, 100), 0),
    ],
    ids=["k", "float64", "int64", "none"],
)
def test_what_the_library_keeps(x: Tensor, k: int) -> None:
    plan = schedule(graph_of(x, k, -1, True), Options())
    assert [str(call.node.target) for call in plan.calls] == ["aten.topk.default"]


def test_who_does_it_by_default() -> None:
    x = torch.randn(3, 100)
    assert not schedule(graph_of(x, 2, -1, True, "auto"), Options()).calls
    assert schedule(graph_of(x, 40, -1, True, "auto"), Options()).calls, "a partial sort is faster"
    on_gpu = Options(gpu_everywhere=True)
    for rows, length, k, is_faster in (
        (2048, 3000, 8, True), (2048, 3000, 9, False), (1023, 3000, 2, False), (2048, 2000, 9, True), (1023, 2000, 2, True)
    ):  # fmt: skip
        plan = schedule(graph_of(torch.empty(rows, length), k, -1, True, "auto", gpu_everywhere=True), on_gpu)
        assert bool(plan.calls) != is_faster, "short rows are sorted; elsewhere, where nobody has measured, the library does it"
    assert schedule(graph_of(x, 2, -1, True, "library"), Options()).calls


def test_an_unknown_choice_is_an_error() -> None:
    with pytest.raises(BadOptionValue), kgen.config.override(top_k="sort"):
        pass


@pytest.mark.parametrize(("length", "k", "most"), [(64, 8, 1), (131072, 8, 3)])
def test_a_row_is_read_once(length: int, k: int, most: int) -> None:
    """Experts of a token in one kernel; long rows in one walk, and two kernels on what is left of them."""
    options = Options(gpu_everywhere=True)
    plan = schedule(graph_of(torch.empty(1024, length), k, -1, True, gpu_everywhere=True), options)
    assert not plan.calls
    assert len(plan.kernels) <= most


def same_values(args: Any, got: Any, want: Any) -> None:
    (values, positions), (wanted, _) = got[0], want[0]
    torch.testing.assert_close(values, wanted, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(torch.gather(args[0], -1, positions), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.cpu
def test_native_kernels() -> None:
    x = rows(9, 64, torch.float32)
    x[1, 2], x[2] = float("nan"), float("-inf")
    jobs = [
        Row("experts", lambda x: torch.topk(x, 8), [(x,)], same_values),
        Row("smallest", lambda x: torch.topk(x, 3, largest=False), [(x.to(torch.bfloat16),)], same_values),
        Row("long", lambda x: torch.topk(x, 8), [(rows(3, 3001, torch.float32),)], same_values),
        Row("integers", lambda x: torch.topk(x, 5), [(rows(3, 500, torch.int32),)], same_values),
    ]
    failures = run_rows(jobs)
    assert not failures, report(failures)


@pytest.mark.interpret
@pytest.mark.parametrize(("length", "k"), [(64, 4), (700, 3)])
def test_triton_kernels(length: int, k: int) -> None:
    x = rows(5, length, torch.float32)
    x[0, 3], x[1] = float("nan"), float("-inf")
    options = {"gpu_interpreter": True, "cache": False, "top_k": "kernels"}
    compiled = torch.compile(lambda x: torch.topk(x, k), backend="kgen", options=options)
    values, positions = compiled(x)
    torch.testing.assert_close(values, torch.topk(x, k).values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(positions, first_of_equals(x, k, -1, True))


@pytest.mark.cpu
def test_gradients() -> None:
    x = torch.randn(6, 64, requires_grad=True)

    def gates(x: Tensor) -> Tensor:
        values, _ = torch.topk(x.softmax(-1), 4)
        return (values / values.sum(-1, keepdim=True)).square().sum()

    [got] = torch.autograd.grad(torch.compile(gates, backend="kgen")(x), x)
    [want] = torch.autograd.grad(gates(x), x)
    torch.testing.assert_close(got, want)
