"""What indices from data point to is asked for early, by reading the indices of a later row."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kgen
from kgen.build import toolchain
from kgen.templates.cpp.codegen.prefetch import MAX_BYTES, POINTED_ROWS, POINTED_STEPS

pytestmark = pytest.mark.cpu

VECTORS = pytest.mark.skipif(toolchain.isa().name == "generic", reason="this machine has no vector registers that kgen knows")
AVX512 = pytest.mark.skipif(toolchain.isa().name != "avx512", reason="only AVX-512 has gathers that kgen uses")

ROWS = MAX_BYTES // 256 + 1  # of 64 numbers: more than stays in a private cache
Function = Callable[..., Tensor]


def gather_rows(table: Tensor, at: Tensor) -> Tensor:
    return table.gather(0, at)


def gather_columns(table: Tensor, at: Tensor) -> Tensor:
    return table.gather(1, at)


def pick(table: Tensor, at: Tensor) -> Tensor:
    return table[at] * 2


def scatter(target: Tensor, at: Tensor, source: Tensor) -> Tensor:
    return target.scatter_add(0, at, source)


def add_rows(target: Tensor, at: Tensor, source: Tensor) -> Tensor:
    return target.index_add(0, at, source)


def shifted(table: Tensor, at: Tensor) -> Tensor:
    return table[(at + 1) % 100]


def both(table: Tensor, at: Tensor, other: Tensor) -> Tensor:
    return table[at + other]


def rows(*sizes: int, dtype: torch.dtype = torch.int64, top: int = ROWS) -> Tensor:
    return torch.randint(-top if dtype == torch.int16 else 0, top, sizes).to(torch.int64 if dtype == torch.int16 else dtype)


def source_of(f: Function, *args: Tensor) -> str:
    torch._dynamo.reset()
    [graph] = kgen.explain(f, *args).graphs
    return "\n".join(kernel.source for kernel in graph.kernels)


def asked(source: str) -> list[str]:
    return [line.strip() for line in source.splitlines() if "int64_t pointed" in line]


@VECTORS
def test_lanes_with_indices_of_their_own_ask_for_a_later_row() -> None:
    [line] = asked(source_of(gather_rows, torch.randn(ROWS, 64), rows(3000, 64)))
    assert line == (
        f"{{ const int64_t pointed = p_arg1_1[x1 + minimum_(int64_t({POINTED_ROWS} + x0), int64_t(2999))*64]; "
        "prefetch_lanes<L>(p_arg0_1 + pointed*64 + x1); }"
    )


@VECTORS
def test_long_rows_ask_along_the_lanes() -> None:
    [line] = asked(source_of(pick, torch.randn(ROWS * 64), rows(100_000)))
    lanes = {"avx512": 8, "avx2": 4}[toolchain.isa().name]  # of indices, which have 64 bits
    assert line == (
        f"{{ const int64_t pointed = p_arg1_1[minimum_(int64_t({POINTED_STEPS * lanes} + x0), int64_t(99999))]; "
        "prefetch_lanes<L>(p_arg0_1 + pointed); }"
    )


@VECTORS
def test_lanes_with_one_row_ask_for_the_run() -> None:
    [line] = asked(source_of(pick, torch.randn(ROWS, 64), rows(3000)))
    assert line == (
        "{ const int64_t pointed = p_arg1_1[minimum_(int64_t(16 + x0), int64_t(2999))]; "
        "prefetch_run(p_arg0_1 + pointed*64, 64); }"
    )


@VECTORS
@pytest.mark.parametrize("f", [scatter, add_rows])
def test_targets_are_asked_for(f: Function) -> None:
    at = rows(3000, 64) if f is scatter else rows(3000)
    [line] = asked(source_of(f, torch.randn(ROWS, 64), at, torch.randn(3000, 64)))
    assert "minimum_(int64_t(" in line


@VECTORS
@pytest.mark.parametrize(
    ("f", "args"),
    [
        (gather_rows, (torch.randn(ROWS // 2, 64), rows(3000, 64, top=ROWS // 2))),
        (pick, (torch.randn(ROWS, 1024), rows(3000))),
        (both, (torch.randn(ROWS * 64), rows(3000, top=ROWS // 2), rows(3000, top=ROWS // 2))),
    ],
    ids=["a small table", "long runs", "two loads"],
)
def test_nothing_is_asked_for(f: Function, args: tuple[Tensor, ...]) -> None:
    assert not asked(source_of(f, *args))


@AVX512
def test_a_step_gathers_as_many_lanes_as_a_register_has_indices() -> None:
    assert "constexpr int L = 8;" in source_of(gather_rows, torch.randn(40, 64), rows(30, 64, top=40))
    assert "constexpr int L = 16;" in source_of(pick, torch.randn(40, 64), rows(30, top=40))


@pytest.mark.every(5)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("count", [0, 1, 7, 3000])
@pytest.mark.parametrize("f", [gather_rows, gather_columns, pick, shifted, scatter, add_rows], ids=lambda f: f.__name__)
def test_results(f: Function, count: int, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(f, backend="kgen", dynamic=dynamic)
    table = torch.randn(ROWS, 64, dtype=torch.float64)
    wide = f in (gather_rows, gather_columns, scatter)
    at = rows(count, 64, top=64 if f is gather_columns else ROWS) if wide else rows(count)
    if f is gather_columns:
        table, at = torch.randn(max(count, 1), ROWS, dtype=torch.float64)[:count], rows(count, 64)
    args = (table, at, torch.randn(count, 64, dtype=torch.float64)) if f in (scatter, add_rows) else (table, at)
    for _ in range(2):
        torch.testing.assert_close(compiled(*args), f(*args))


def test_indices_before_zero() -> None:
    at = torch.randint(-ROWS, ROWS, (3000,))
    table = torch.randn(ROWS, 64)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(pick, backend="kgen")(table, at), pick(table, at))


@pytest.mark.parametrize("wrong", [ROWS, -ROWS - 1, 1 << 60])
def test_an_index_out_of_range_raises(wrong: int) -> None:
    at = rows(3000)
    at[2990] = wrong
    torch._dynamo.reset()
    with pytest.raises(IndexError, match="out of range"):
        torch.compile(pick, backend="kgen")(torch.randn(ROWS, 64), at)


@pytest.mark.parametrize("f", [gather_rows, pick], ids=lambda f: f.__name__)
def test_no_index_behind_the_last_one_is_read(f: Function) -> None:
    """The indices end where a page begins that nobody may touch."""
    sizes, page = ((16, 64), mmap.PAGESIZE) if f is gather_rows else ((1024,), mmap.PAGESIZE)
    memory = mmap.mmap(-1, 8192 + page)
    at = torch.frombuffer(memory, dtype=torch.int64, count=1024).view(sizes)
    at.copy_(rows(*sizes))
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    assert protect(ctypes.c_void_p(start + 8192), ctypes.c_size_t(page), 0) == 0
    table = torch.randn(ROWS, 64)
    torch._dynamo.reset()
    try:
        assert torch.equal(torch.compile(f, backend="kgen")(table, at), f(table, at))
    finally:
        protect(ctypes.c_void_p(start + 8192), ctypes.c_size_t(page), 3)
