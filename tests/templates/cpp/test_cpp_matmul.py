"""The C++ matmul: dtypes, layouts, odd sizes, blockings and threads against float64, each result stored once.

A unit has up to four entry points: both operands in memory, two in which functions compute them (twice the value in memory),
and several matmuls with one left operand.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen.build import cpp, toolchain
from kgen.templates.cpp.codegen.engine import objects
from kgen.templates.cpp.codegen.table import CPP_TYPES
from kgen.templates.cpp.kernels.blocking import FEW_OF_SHORT, FEW_ROWS, SHORT_SUM, choose_blocking

pytestmark = pytest.mark.cpu

SOURCE = """
#include "kgen/kernel.h"
#include "kgen/matmul.h"
KGEN_MATMUL({a}, {b})
using namespace kgen;
using TA = {a};
using TB = {b};
using TC = {c};

template <class T, Along A>
auto doubled(Strided<T> from, Flag& wrong) {{
  return filled<T, A>([from, &wrong](int64_t i0, int64_t ni, int64_t k0, int64_t nk, T* to, int64_t ld) {{
    if (ni < 1 || nk < 1 || ld < (A == Along::k ? nk : ni) || uintptr_t(to) % 64 || ld * sizeof(T) % 64) wrong.raise(1);
    for (int64_t i = 0; i < ni; ++i) {{
      for (int64_t k = 0; k < nk; ++k) {{
        const auto value = load<1>(from.data + (i0 + i) * from.i_stride + (k0 + k) * from.k_stride, one);
        store(to + (A == Along::k ? i * ld + k : k * ld + i), add_(value, value), one);
      }}
    }}
  }});
}}

struct Problem {{
  const TA* a;
  const TB* b;
  TC* out;
  uint8_t* stored;
  int64_t m, n, k, a_i, a_k, b_i, b_k, threads, rows, tile_rows, tile_columns, parts, few_rows, whole;
}};

template <class Combine>
void store_rectangle(TC* out, uint8_t* stored, int64_t n, int64_t rows, int64_t columns, Combine combine) {{
  for (int64_t r = 0; r < rows; ++r, out += n, stored += n) {{
    vector_loop<16>(0, columns, [&](int64_t j, auto w) KGEN_INLINE {{ store(out + j, combine(r, j, w), w); }});
    for (int64_t j = 0; j < columns; ++j) ++stored[j];
  }}
}}

Blocking how(const Problem& p) {{ return {{p.rows, p.tile_rows, p.tile_columns, int(p.parts), p.few_rows, p.whole != 0}}; }}

template <class A, class B>
void multiply(const Problem& p, const A& a, const B& b) {{
  const auto finish = [&](int64_t m0, int64_t n0, int64_t rows, int64_t columns, const auto* tile, int64_t ld) {{
    const int64_t at = m0 * p.n + n0;
    const bool begins = m0 % p.tile_rows == 0 && n0 % p.tile_columns == 0;
    const bool ends = rows == smaller(p.tile_rows, p.m - m0) && columns == smaller(p.tile_columns, p.n - n0);
    if (p.whole && !(begins && ends)) ++p.stored[at];
    store_rectangle(p.out + at, p.stored + at, p.n, rows, columns, [&](int64_t r, int64_t j, auto w) KGEN_INLINE {{
      return load<16>(tile + r * ld + j, w);
    }});
  }};
  matmul(int(p.threads), p.m, p.k, how(p), a, columns(p.n, finish, b));
}}
"""
ENTRIES = {
    "in_memory": """
extern "C" int in_memory(const Problem* p) {{
  multiply(*p, Strided<TA>{{p->a, p->a_i, p->a_k}}, Strided<TB>{{p->b, p->b_i, p->b_k}});
  return 0;
}}
""",
    "computed_k_i": """
extern "C" int computed_k_i(const Problem* p) {{
  Flag wrong;
  multiply(*p, doubled<TA, Along::k>({{p->a, p->a_i, p->a_k}}, wrong), doubled<TB, Along::i>({{p->b, p->b_i, p->b_k}}, wrong));
  return wrong.raised;
}}
""",
    "computed_i_k": """
extern "C" int computed_i_k(const Problem* p) {{
  Flag wrong;
  multiply(*p, doubled<TA, Along::i>({{p->a, p->a_i, p->a_k}}, wrong), doubled<TB, Along::k>({{p->b, p->b_i, p->b_k}}, wrong));
  return wrong.raised;
}}
""",
    # The left half of a b, then a b - 2 a b' where b' has the columns of b in reverse: three matmuls in one call.
    "several": """
extern "C" int several(const Problem* p) {{
  Flag wrong;
  const Strided<TA> a{{p->a, p->a_i, p->a_k}};
  const Strided<TB> b{{p->b, p->b_i, p->b_k}};
  const auto reversed = doubled<TB, Along::k>({{p->b + (p->n - 1) * p->b_i, -p->b_i, p->b_k}}, wrong);
  const int64_t half = (p->n + 1) / 2, skipped = p->m * half;
  const auto narrow = [&](int64_t m0, int64_t n0, int64_t rows, int64_t columns, const auto* tile, int64_t ld) {{
    const int64_t at = m0 * half + n0;
    store_rectangle(p->out + at, p->stored + at, half, rows, columns, [&](int64_t r, int64_t j, auto w) KGEN_INLINE {{
      return load<16>(tile + r * ld + j, w);
    }});
  }};
  const auto joint = [&](int64_t m0, int64_t n0, int64_t rows, int64_t columns, const auto* one, const auto* two, int64_t ld) {{
    const int64_t at = skipped + m0 * p->n + n0;
    store_rectangle(p->out + at, p->stored + at, p->n, rows, columns, [&](int64_t r, int64_t j, auto w) KGEN_INLINE {{
      return sub_(load<16>(one + r * ld + j, w), load<16>(two + r * ld + j, w));
    }});
  }};
  matmul(int(p->threads), p->m, p->k, how(*p), a, columns(half, narrow, b), columns(p->n, joint, b, reversed));
  return wrong.raised;
}}
""",
}
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
I8, U8, I32, I64 = torch.int8, torch.uint8, torch.int32, torch.int64
# left, right, result; the last three are mixtures
DTYPES = [
    (F32, F32, F32), (BF16, BF16, F32), (F64, F64, F64), (F16, F16, F32), (I8, I8, I32), (U8, I8, I32), (I32, I32, I32),
    (I64, I64, I64), (F32, BF16, F32), (F64, F32, F64), (F16, BF16, BF16),
]  # fmt: skip
SIZES = [
    (0, 3, 5), (3, 0, 5), (3, 5, 0), (1, 1, 1), (1, 7, 1), (2, 1, 3), (5, 17, 31), (13, 33, 65), (16, 64, 512), (17, 37, 513),
    (61, 97, 127), (101, 163, 577), (45, 50, 2100),
]  # fmt: skip
FEW_SIZES = [(1, 1), (1, 700), (2, 513), (3, 95), (4, 1030), (7, 64), (8, 2051), (9, 259), (16, 300), (1, 9001), (2, 5003)]
FEW_COLUMNS = [157, 101, 49, 1, 97, 2]


@dataclass
class Blocking:
    rows: int = 512
    tile_rows: int = 512
    tile_columns: int = 128
    parts: int = 1
    few_rows: int = 0
    whole: bool = False


# The defaults, and cuts that leave several parts in every direction.
BLOCKINGS = [Blocking(), Blocking(96, 48, 32, 1), Blocking(48, 96, 64, 2), Blocking(192, 48, 96, 3)]


class Problem(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("a", "b", "out", "stored")]
        + [(name, ctypes.c_int64) for name in ("m", "n", "k", "a_i", "a_k", "b_i", "b_k", "threads")]
        + [(name, ctypes.c_int64) for name in ("rows", "tile_rows", "tile_columns", "parts", "few_rows", "whole")]
    )  # fmt: skip


@dataclass
class Case:
    a: Tensor  # m by k
    b: Tensor  # k by n
    out: torch.dtype
    blocking: Blocking = field(default_factory=Blocking)
    threads: int = 2
    entry: str = "in_memory"

    def __str__(self) -> str:
        operands = f"{tuple(self.a.shape)}{self.a.stride()} x {tuple(self.b.shape)}{self.b.stride()}"
        return f"{self.a.dtype} {self.b.dtype} {operands} {self.blocking} {self.threads} threads {self.entry}"


def entries_of(dtypes: tuple[torch.dtype, ...]) -> tuple[str, ...]:
    """Those that a library has: computed operands and several matmuls differ in no line by dtype, and compiling takes long."""
    return tuple(ENTRIES) if dtypes in DTYPES[:2] else ("in_memory",)


def library(dtypes: tuple[torch.dtype, ...]) -> ctypes.CDLL:
    return _library(dtypes, toolchain.isa())


@functools.cache
def _library(dtypes: tuple[torch.dtype, ...], _: toolchain.Isa) -> ctypes.CDLL:
    a, b, c = (CPP_TYPES[d].storage for d in dtypes)
    text = SOURCE + "".join(ENTRIES[name] for name in entries_of(dtypes))
    return cpp.load_library(cpp.build_unit("matmul", text.format(a=a, b=b, c=c), objects=objects(a, b)))


def run(case: Case) -> Tensor:
    """The result, computed into poisoned memory; asserts that each element was stored once."""
    (m, k), n = case.a.shape, case.b.shape[1]
    shape = (m * ((n + 1) // 2 + n),) if case.entry == "several" else (m, n)
    out = torch.full(shape, 113, dtype=case.out)
    stored = torch.zeros(shape, dtype=torch.uint8)
    pointers = (t.data_ptr() for t in (case.a, case.b, out, stored))
    strides = (*case.a.stride(), case.b.stride(1), case.b.stride(0))
    how = case.blocking
    problem = Problem(
        *pointers,
        m,
        n,
        k,
        *strides,
        case.threads,
        how.rows,
        how.tile_rows,
        how.tile_columns,
        how.parts,
        how.few_rows,
        how.whole,
    )
    native = getattr(library((case.a.dtype, case.b.dtype, case.out)), case.entry)
    assert native(ctypes.byref(problem)) == 0, f"{case}: a block to fill is wrong"
    assert bool((stored == 1).all()), f"{case}: stored {stored.unique().tolist()} times"
    return out


def check(case: Case) -> None:
    got = run(case)
    if not case.out.is_floating_point:
        assert torch.equal(got, wanted(case, case.out)), str(case)
        return
    # rounding grows with the terms of a sum: 16 units for blocked sums, and half a unit of the result for a narrow one
    unit = 16 * torch.finfo(F64 if case.out == F64 else F32).eps + torch.finfo(case.out).eps / 2
    size = wanted(replace(case, a=case.a.abs(), b=case.b.abs()), F64, sign=1)
    worst = ((got.double() - wanted(case, F64)).abs() / (size + 1e-30)).max().item() if got.numel() else 0.0
    assert worst <= unit, f"{case}: off by {worst}, more than {unit}"


def wanted(case: Case, dtype: torch.dtype, sign: int = -1) -> Tensor:
    """What the case's entry computes; what is doubled is doubled in its dtype, where 8-bit integers may wrap."""
    computed = "computed" in case.entry
    a, b = (((t * 2) if computed else t).to(dtype) for t in (case.a, case.b))
    if case.entry != "several":
        return a @ b
    reverse = (case.b * 2).to(dtype).flip(1)
    return torch.cat([(a @ b[:, : (b.shape[1] + 1) // 2]).flatten(), (a @ b + sign * (a @ reverse)).flatten()])


def values(m: int, n: int, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(m, n).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(max(info.min, -1000), min(info.max, 1000) + 1, (m, n), dtype=dtype)


def transposed(m: int, n: int, dtype: torch.dtype) -> Tensor:
    return values(n, m, dtype).t()


def padded(m: int, n: int, dtype: torch.dtype) -> Tensor:
    """Rows with gaps, from an offset."""
    return values(m + 1, n + 3, dtype)[1:, 2 : n + 2]


def every_other(m: int, n: int, dtype: torch.dtype) -> Tensor:
    return values(2 * m, 3 * n, dtype)[::2, ::3]


def one_row(m: int, n: int, dtype: torch.dtype) -> Tensor:
    return values(1, n, dtype).expand(m, n)


def one_column(m: int, n: int, dtype: torch.dtype) -> Tensor:
    return values(m, 1, dtype).expand(m, n)


LAYOUTS = (values, transposed, padded, every_other, one_row, one_column)


def cases(dtypes: tuple[torch.dtype, ...]) -> Iterator[Case]:
    """Every size, layout, blocking, number of threads and entry; not all of their matmuls."""
    left, right, out = dtypes
    entries = entries_of(dtypes)
    turn = itertools.count()
    for (m, n, k), a, b, entry in itertools.product(SIZES, LAYOUTS[:2], LAYOUTS[:2], entries):
        i = next(turn)
        yield Case(a(m, k, left), b(k, n, right), out, BLOCKINGS[i // 3 % 4], threads=1 + (i % 5 == 0), entry=entry)
    for (m, k), (b, n), entry in itertools.product(FEW_SIZES, zip(LAYOUTS, FEW_COLUMNS, strict=True), entries):
        i = next(turn)
        if i % 2 == 0:
            yield Case(LAYOUTS[m % 2](m, k, left), b(k, n, right), out, Blocking(few_rows=16), 1 + (m in (1, 8)), entry)
        else:  # a few columns
            yield Case(b(n, k, left), LAYOUTS[m % 2](k, m, right), out, Blocking(few_rows=16), 1 + (m in (1, 8)), entry)
    for a, b in zip(LAYOUTS, (*LAYOUTS[2:], *LAYOUTS[:2]), strict=True):
        for blocking in BLOCKINGS[:2]:
            yield Case(a(29, 97, left), b(97, 67, right), out, blocking, threads=1)


def targets() -> Iterator[Any]:
    """All dtypes under the best instruction set, those that differ in code under the others. Each is a compilation, so that
    only one for each unit of multiplication is among the fast tests."""
    fast = (*DTYPES[:3], DTYPES[5])
    best, *others = toolchain.available()
    for isa, dtypes in [(best, d) for d in DTYPES] + [(isa, d) for isa in others for d in (*DTYPES[:3], DTYPES[4])]:
        marks = () if dtypes in (fast if isa == best else DTYPES[:1]) else pytest.mark.slow
        yield pytest.param(isa, dtypes, marks=marks, id="_".join(map(str, (isa, *dtypes))))


@pytest.mark.parametrize(("isa", "dtypes"), targets())
def test_matmuls_agree_with_float64(monkeypatch: pytest.MonkeyPatch, isa: str, dtypes: tuple[torch.dtype, ...]) -> None:
    monkeypatch.setenv("KGEN_ISA", isa)
    torch.manual_seed(0)
    for case in cases(dtypes):
        check(case)


WITHOUT = [(2, (BF16, BF16, F32)), (2, (U8, I8, I32)), (0, (BF16, BF16, F32)), (0, (U8, I8, I32))]


@pytest.mark.slow
@pytest.mark.skipif(not toolchain._dot_flags(), reason="this machine has no dot products of narrow types")
@pytest.mark.parametrize(("kept", "dtypes"), WITHOUT)
def test_matmuls_without_some_instructions(monkeypatch: pytest.MonkeyPatch, kept: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """Machines with AVX-512 but not all of what this one has: none of it, or no AMX."""
    monkeypatch.setattr(toolchain, "_DOT", toolchain._DOT[:kept])
    torch.manual_seed(0)
    for case in cases(dtypes):
        check(case)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtypes", DTYPES[:2])
def test_whole_rectangles(dtypes: tuple[torch.dtype, ...], threads: int) -> None:
    """What reduces a rectangle counts on where it begins and ends: with few rows or columns, and where k is cut, too."""
    torch.manual_seed(0)
    left, right, out = dtypes
    for m, n, k in ((1, 700, 64), (9, 333, 100), (700, 3, 64), (301, 517, 77), (130, 70, 2000)):
        for rows, tile_rows, tile_columns in ((96, 48, 32), (144, 96, 64), (528, 528, 128)):
            blocking = Blocking(rows, tile_rows, tile_columns, 1 + k // 1000, 16, whole=True)
            check(Case(values(m, k, left), transposed(k, n, right), out, blocking, threads))


@pytest.mark.every(3)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_a_panel_of_which_a_register_is_enough(dtypes: tuple[torch.dtype, ...], threads: int) -> None:
    """Columns end in the first register of a panel, or reach its second one."""
    torch.manual_seed(0)
    left, right, out = dtypes
    for m, n, k in ((61, 16, 16), (61, 17, 40), (100, 48, 300), (49, 40, 77), (130, 8, 33)):
        blocking = Blocking(96, 48, 64, 1 + k // 200, 0)
        check(Case(values(m, k, left), transposed(k, n, right), out, blocking, threads))


def test_chosen_blockings() -> None:
    for m, n, k in itertools.product((1, 16, 17, 1000, 100_000), (1, 50, 4096), (0, 1, 4096, 10**6)):
        how = choose_blocking((m, n, k), F32, "avx512", threads=8)
        few = FEW_OF_SHORT if n < m and k <= SHORT_SUM else FEW_ROWS
        assert how.few_rows == (FEW_ROWS if min(m, n) <= few else 0)
        assert how.rows % 48 == how.tile_rows % 48 == how.tile_columns % 32 == 0
        assert 48 <= how.tile_rows <= how.rows
        assert how.rows * max(k, 1) * 4 <= 8 << 20 or how.rows == 48
        assert how.tile_rows * how.tile_columns * 4 <= 576 << 10
    grouped = choose_blocking((1024, 4096, 1024), F32, "avx512", threads=2, rights=2)
    assert 2 * grouped.tile_rows * grouped.tile_columns * 4 <= 576 << 10
    assert choose_blocking((64, 64, 65536), F32, "avx512", threads=8).parts > 1
    assert choose_blocking((1024, 1024, 1024), F32, "avx512", threads=2).parts == 1


def test_sums_in_parts_where_columns_lie_as_they_are() -> None:
    """Parts of a sum begin where what is multiplied at a time does, and some of them may be empty."""
    torch.manual_seed(0)
    for m, parts in itertools.product((17, 37, 96, 97), (2, 3, 7)):
        for dtype in (F32, BF16):
            a, b = values(m, 2300, dtype), transposed(2300, 130, dtype)
            check(Case(a, b, F32, Blocking(96, 96, 96, parts), threads=2))


@pytest.mark.parametrize("parts", [1, 3])
def test_results_do_not_depend_on_threads(parts: int) -> None:
    torch.manual_seed(0)
    a, b = values(37, 2000, F32), transposed(2000, 300, F32)
    blocking = Blocking(48, 48, 64, parts)
    first = run(Case(a, b, F32, blocking, threads=1))
    for threads in (2, 3, 2, 3):
        assert torch.equal(first, run(Case(a, b, F32, blocking, threads=threads)))


def test_unused_memory_does_not_matter() -> None:
    """Padding multiplies what earlier matmuls left behind: here infinities and NaN."""
    for dtype in (F32, BF16):
        bad = torch.full((70, 700), float("nan"), dtype=dtype)
        run(Case(bad, bad.t(), F32))
        check(Case(values(17, 333, dtype), values(333, 45, dtype), F32))
        check(Case(transposed(17, 333, dtype), transposed(333, 45, dtype), F32))


# ---- nothing outside the operands is read ---------------------------------------------------------------------------


def test_nothing_outside_the_operands_is_read() -> None:
    """Operands between pages that nobody may touch, in a process of its own: what fails dies."""
    for dtypes in GUARDED:
        library(dtypes)
    command = [sys.executable, __file__]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout.splitlines() or ["nothing"])[-1] + done.stderr[-2000:]
    assert done.stdout.endswith("all done\n")


GUARDED = ((F32, F32, F32), (BF16, BF16, F32), (U8, I8, I32), (F64, F64, F64))


def guarded(m: int, n: int, dtype: torch.dtype, at_end: bool) -> Tensor:
    """An m by n tensor that begins or ends where memory does."""
    page = mmap.PAGESIZE
    size = m * n * dtype.itemsize
    whole = (size + page - 1) // page * page
    memory = mmap.mmap(-1, whole + 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for guard in (start, start + page + whole):
        assert protect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0
    offset = page + (whole - size if at_end else 0)
    return torch.frombuffer(memory, dtype=dtype, count=m * n, offset=offset).view(m, n).copy_(values(m, n, dtype))


def run_guarded() -> None:
    for dtypes, size, at_end in itertools.product(GUARDED, ((1, 1, 1), (3, 35, 67), (19, 50, 259)), (False, True)):
        m, n, k = size
        for left, right in itertools.product((False, True), repeat=2):
            a = guarded(m, k, dtypes[0], at_end) if left else guarded(k, m, dtypes[0], at_end).t()
            b = guarded(k, n, dtypes[1], at_end) if right else guarded(n, k, dtypes[1], at_end).t()
            case = Case(a, b, dtypes[2])
            print(case, flush=True)
            check(case)
            check(replace(case, blocking=Blocking(few_rows=16)))
    print("all done")


def test_a_process_that_may_not_use_tiles() -> None:
    """Code for AMX where Linux refuses it: what a signal saves would not fit on the process' own stack for signals."""
    library((BF16, BF16, F32))
    command = [sys.executable, __file__, "untiled"]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("all done\n"), done.stdout + done.stderr[-2000:]


def run_untiled() -> None:
    class Stack(ctypes.Structure):
        _fields_ = (("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))

    libc, memory = ctypes.CDLL(None), ctypes.create_string_buffer(8192)
    assert libc.sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 8192)), None) == 0
    request, tiles = 0x1023, 18
    assert "amx-bf16" not in str(toolchain.isa().flags) or libc.syscall(158, request, tiles) != 0
    for m, n, k in ((61, 97, 127), (33, 32, 700), (16, 5, 64)):
        for blocking in (Blocking(), Blocking(96, 48, 32, 2, 16)):
            check(Case(values(m, k, BF16), transposed(k, n, BF16), F32, blocking, threads=1))
            check(Case(transposed(m, k, BF16), values(k, n, BF16), F32, blocking, threads=1))
    print("all done")


if __name__ == "__main__":
    run_untiled() if "untiled" in sys.argv else run_guarded()
