"""Kernels of several sections ask for the next row while they work on one, and hide the chains of reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from kgen.build import toolchain
from kgen.scheduler.tiling.loops import MAX_REGISTERS

pytestmark = pytest.mark.cpu

VECTORS = pytest.mark.skipif(toolchain.isa().name == "generic", reason="this machine has no vector registers that kgen knows")


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def gathered(table: Tensor, at: Tensor) -> Tensor:
    return torch.softmax(table[at], -1)


def masked(x: Tensor, r: Tensor) -> Tensor:
    return torch.softmax(x, -1) + r


def source_of(f: Callable[..., Any], *args: Tensor) -> str:
    torch._dynamo.reset()
    [graph] = kgen.explain(f, *args).graphs
    [kernel] = graph.kernels
    return kernel.source


def column_sums(x: Tensor) -> Tensor:
    return x.sum(0)


def body_after(source: str, text: str) -> str:
    """The lines of the vector loop in which `text` stands."""
    loops = source.split("vector_loop<L>")
    return next(part for part in loops if text in part)


@VECTORS
def test_the_section_after_the_first_asks_for_the_next_row() -> None:
    source = source_of(softmax, torch.randn(64, 1024))
    assert source.count("prefetch_lanes<L>") == 1
    assert "exp_(" in body_after(source, "prefetch_lanes")


@VECTORS
def test_what_the_last_section_reads_first_is_asked_for_by_the_first() -> None:
    source = source_of(masked, torch.randn(64, 1024), torch.randn(64, 1024))
    lines = [line for line in source.splitlines() if "prefetch_lanes" in line]
    assert [("1024 + x0*1024" in line) for line in lines if "p_arg1_1" in line] == [False]
    assert "step_max" in body_after(source, "prefetch_lanes<L>(p_arg1_1")


@VECTORS
@pytest.mark.parametrize(
    ("f", "args"),
    [
        (lambda x: x.sum(-1), (torch.randn(64, 1024),)),
        (softmax, (torch.randn(64, 32),)),
        (softmax, (torch.randn(4, 1 << 16),)),
        (lambda x: torch.softmax(x, 0), (torch.randn(64, 256),)),
        (gathered, (torch.randn(50, 1024), torch.randint(0, 50, (64,)))),
    ],
    ids=["one section", "one step", "long rows", "lanes across rows", "rows by index"],
)
def test_nothing_is_asked_for(f: Callable[..., Any], args: tuple[Tensor, ...]) -> None:
    assert "prefetch_lanes" not in source_of(f, *args)


def permuted(x: Tensor) -> Tensor:
    return x.permute(0, 2, 1, 3).contiguous()


@VECTORS
def test_short_runs_that_lie_apart_are_asked_for() -> None:
    source = source_of(permuted, torch.randn(4, 64, 8, 64))
    [line] = [line.strip() for line in source.splitlines() if "prefetch_run" in line]
    assert line == "prefetch_run(p_arg0_1 + 8192 + x0*32768 + x1*64 + x2*512, 64);"


@VECTORS
@pytest.mark.parametrize(
    ("f", "args"),
    [
        (permuted, (torch.randn(1, 8, 2, 64),)),
        (permuted, (torch.randn(2, 64, 2, 1024),)),
        (lambda x, b: x + b, (torch.randn(4, 64, 8, 64), torch.randn(4, 64, 1, 64))),
    ],
    ids=["little", "long runs", "one after the other"],
)
def test_no_run_is_asked_for(f: Callable[..., Any], args: tuple[Tensor, ...]) -> None:
    assert "prefetch_run" not in source_of(f, *args)


@VECTORS
def test_lanes_that_walk_down_columns_ask_for_later_rows() -> None:
    lanes = 4 * {"avx512": 16, "avx2": 8}[toolchain.isa().name]
    later = min(16, 4096 // (4 * lanes))
    for columns in (256, 1024):  # shared by threads along the rows, and along the columns
        source = source_of(column_sums, torch.randn(512, columns))
        assert f"prefetch_lanes<L>(p_arg0_1 + {later * columns} + x0 + y0*{columns});" in source
    assert "prefetch_" not in source_of(column_sums, torch.randn(2048, lanes))  # one row after the other


@pytest.mark.parametrize("dynamic", [False, True])
def test_sums_down_columns(dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: (x.sum(0), x.var(0), x.amax(0)), backend="kgen", dynamic=dynamic)
    for shape in ((300, 257), (1000, 130), (2, 40000)):
        x = torch.randn(shape)
        for got, want in zip(compiled(x), (x.sum(0), x.var(0), x.amax(0)), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.every(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_permuted_copies(dtype: torch.dtype, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(permuted, backend="kgen", dynamic=dynamic)
    for shape in ((3, 65, 7, 33), (1, 130, 12, 64), (2, 70, 9, 48)):
        x = torch.randint(0, 100, shape).to(dtype)
        assert torch.equal(compiled(x), permuted(x))


@pytest.mark.every(5)
@pytest.mark.parametrize("length", [65, 255, 256, 1000, 1024, 1025])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_results(length: int, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    x = torch.randn(37, length, generator=torch.Generator().manual_seed(length)).to(dtype)

    def both(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.softmax(x, -1), F.layer_norm(x, x.shape[-1:]), x.argmax(-1)

    got, want = torch.compile(both, backend="kgen", fullgraph=True)(x), both(x.double())
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    for g, w in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(g.double(), w, rtol=tolerance, atol=tolerance)
    assert torch.equal(got[2], want[2])


def test_rows_of_any_length_at_run_time() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(softmax, backend="kgen", dynamic=True)
    for rows, length in ((3, 1024), (5, 70), (2, 513), (1, 2000)):
        x = torch.randn(rows, length)
        torch.testing.assert_close(compiled(x), softmax(x))


@VECTORS
@pytest.mark.parametrize(("special", "sums"), [(float("inf"), 1.0), (float("nan"), 1.0), (1e38, 1e-30), (3.0, 0.0)])
def test_division_of_long_vectors_by_one_number(special: float, sums: float) -> None:
    """Rows of 64 lanes whose quotients overflow, or that are no numbers, take the way of true divisions."""
    torch._dynamo.reset()

    def f(x: Tensor, d: Tensor) -> Tensor:
        return x / (d + x.sum(-1, keepdim=True) * 0)

    x, d = torch.randn(5, 640), torch.full((5, 1), sums)
    x[2, 100] = special
    x[3] = 0.0
    want = f(x.double(), d.double()).float()
    got = torch.compile(f, backend="kgen", fullgraph=True)(x, d)
    torch.testing.assert_close(got, want, rtol=2e-7, atol=0, equal_nan=True)


@VECTORS
def test_a_reduction_steps_by_several_registers() -> None:
    lanes = {"avx512": 16, "avx2": 8}[toolchain.isa().name]
    assert f"constexpr int L = {MAX_REGISTERS * lanes};" in source_of(softmax, torch.randn(64, 1024))

    def many(*xs: Tensor) -> Tensor:
        total = xs[0] * 1
        for x in xs[1:]:
            total = torch.maximum(total * x, x)
        return total.sum(-1)

    assert f"constexpr int L = {2 * lanes};" in source_of(many, *(torch.randn(64, 1024) for _ in range(7)))
