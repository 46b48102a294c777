"""The C++ vector layer: every operation on every compute dtype, as scalars, as vectors and in masked tails, against the table's
references; loads, stores, conversions, accumulators, random numbers and tiles; and the instructions that all this becomes.

The drivers are small generated loops in the form that kernels have, built and loaded as kernels are.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scalar_cases import FLOAT_SPECIALS, expected, inputs_of, random_values, short, signature, specials, ulps

from kgen.build import cpp, toolchain
from kgen.ir import ops
from kgen.reference.evaluate_value import RANDOM, apply
from kgen.templates.cpp.codegen.table import CPP_OPS, CPP_STRUCTURAL, CPP_TYPES, literal

pytestmark = pytest.mark.cpu

FLOATS = (torch.float32, torch.float64)
INTEGERS = ops.admitted(ops.INTEGER)
STORED = tuple(CPP_TYPES)
WIDTHS = (1, 8, 16)
N = 1003  # leaves a tail of 11 lanes of 16 and of 3 lanes of 8

HEADER = """
#include "kgen/kernel.h"
using namespace kgen;
template <int L, class F, class R, class... P>
void each(F f, int64_t n, R* out, const P*... in) {
  const auto body = [&](int64_t i, auto w) { store(out + i, f(load<L>(in + i, w)...), w); };
  int64_t i = 0;
  for (; i + L <= n; i += L) body(i, Full<L>{});
  if constexpr (L > 1) if (i < n) body(i, Tail<L>{n - i});
}
// the main loop and the tail of a kernel, for a body that takes the first index and w
template <int L, class F>
void loop(int64_t n, F body) {
  int64_t i = 0;
  for (; i + L <= n; i += L) body(i, Full<L>{});
  if constexpr (L > 1) if (i < n) body(i, Tail<L>{n - i});
}
"""


# ---- drivers


def build(name: str, *bodies: str) -> Callable[[str], Callable[..., None]]:
    """Compiles each body as a unit; gives functions by name that take tensors (as pointers) and integers."""
    cpp.math_library()
    units = [cpp.Unit(f"{name}_{i}", HEADER + body) for i, body in enumerate(bodies)]
    libraries = [cpp.load_library(path) for path in cpp.build_units(units)]

    def find(function: str) -> Callable[..., None]:
        native = next(getattr(lib, function) for lib in libraries if hasattr(lib, function))

        def call(*args: torch.Tensor | int) -> None:
            native(*(ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_int64(a) for a in args))

        return call

    return find


def stored(dtype: torch.dtype) -> str:
    return CPP_TYPES[dtype].storage


def map_function(name: str, width: int, out: torch.dtype, inputs: tuple[torch.dtype, ...], text: str) -> str:
    """A function (out, inputs..., n) that fills `out` with `text` of the lanes a, b, c."""
    letters = "abc"[: len(inputs)]
    parameters = ", ".join(f"const {stored(d)}* p{x}" for d, x in zip(inputs, letters, strict=True))
    lanes = ", ".join(f"auto {x}" for x in letters)
    pointers = ", ".join(f"p{x}" for x in letters)
    return (
        f'extern "C" void {name}({stored(out)}* out, {parameters}, int64_t n) {{ '
        f"each<{width}>([]({lanes}) {{ return {text}; }}, n, out, {pointers}); }}\n"
    )


def widths_of(op: str, dtype: torch.dtype) -> tuple[int, ...]:
    # all widths where the number of registers differs most, else what a kernel would mostly use: compile time
    return WIDTHS if dtype in (torch.float32, torch.int64, torch.int8) and ops.OPS[op].cost < 60 and not REDUCED else (1, 16)


# Under another instruction set (KGEN_ISA) only the exact operations and the inline functions are checked again.
LIBRARY_ONLY = {n for n, row in ops.OPS.items() if row.cost >= 20}
REDUCED = "KGEN_ISA" in os.environ
DTYPES = FLOATS + INTEGERS + (torch.bool,)
TESTED_DTYPES = (torch.float32, torch.int64, torch.uint8, torch.bool) if REDUCED else DTYPES
TESTED_OPS = [n for n in ops.OPS if not (REDUCED and n in LIBRARY_ONLY)]


def dtypes_of(op: str) -> tuple[torch.dtype, ...]:
    return tuple(d for d in ops.admitted(ops.OPS[op].admits) if d in TESTED_DTYPES)


@pytest.fixture(scope="module")
def operations() -> Callable[[str], Callable[..., None]]:
    bodies = ["", "", "", ""]
    for i, op in enumerate(TESTED_OPS):
        for dtype in dtypes_of(op):
            out, inputs = signature(op, dtype)
            text = CPP_OPS[op].format("a", "b", "c")
            for width in widths_of(op, dtype):
                bodies[i % len(bodies)] += map_function(f"{op}_{short(dtype)}_{width}", width, out, inputs, text)
    return build("operations", *bodies)


# ---- operations


def test_every_operation_has_text():
    assert set(CPP_OPS) == set(ops.OPS)
    emitted = {"const", "index", "load", "assert", "step"}  # those are the emitter's own
    assert set(CPP_STRUCTURAL) == set(ops.STRUCTURAL) - emitted
    assert set(CPP_TYPES) == {*ops.COMPUTE_DTYPES, *ops.NARROW_FLOATS}
    for op, row in ops.OPS.items():
        assert len(set(re.findall(r"\{\d\}", CPP_OPS[op]))) == row.arity


# Ulps of float32 against a float64 reference. Sleef promises 1.0, and its results may round once more.
ULPS = {"exp": 1.0, "log": 1.0, "tanh": 1.5, "erf": 2.5, "sigmoid": 2.5, "sqrt": 0.5, "fma": 0.5001}
# Their references round otherwise than they should: torch takes sqrt from a library, and fma is rounded twice.
BY_ULPS = ("sqrt", "fma")


def check(op: str, got: torch.Tensor, args: tuple[torch.Tensor, ...]) -> None:
    row, dtype = ops.OPS[op], got.dtype
    want = expected(op, args)
    if not dtype.is_floating_point or (row.exact and op not in BY_ULPS):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    elif row.cost >= 60:  # the same code as torch's: only what the compiler contracts may differ
        torch.testing.assert_close(got, want, rtol=1e-4 if dtype is torch.float32 else 1e-10, atol=1e-6, equal_nan=True)
    elif dtype is torch.float32:
        assert_within(ULPS.get(op, 2.0), got, row.reference(*(a.double() for a in args)), want, args)
    else:
        assert_within(8, got, want, want, args)


def assert_within(
    limit: float, got: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor, args: tuple[torch.Tensor, ...]
) -> None:
    """Near the exact result, or what eager gives (which may flush where the exact result is subnormal)."""
    distance = torch.where(got == eager, 0.0, ulps(got, exact))
    at = int(distance.argmax())
    assert distance.max() <= limit, f"{distance.max():.2f} ulp at {[a[at].item() for a in args]}: {got[at].item()}"


# Sleef reduces arguments in one of two ways, chosen for all lanes of a register together.
BY_REGISTER = ("sin", "cos", "tan")


@pytest.mark.parametrize("op", TESTED_OPS)
def test_operation(operations, op):
    for dtype in dtypes_of(op):
        args = inputs_of(op, dtype, N)
        out_dtype, _ = signature(op, dtype)
        results = []
        for width in widths_of(op, dtype):
            got = torch.empty(N, dtype=out_dtype)
            operations(f"{op}_{short(dtype)}_{width}")(got, *args, N)
            results.append(got)
        for got in results:
            check(op, got, args)
        for got in results[1:] if op not in BY_REGISTER else []:  # a lane's result does not depend on the width
            torch.testing.assert_close(got, results[0], rtol=0, atol=0, equal_nan=True)


# ---- the inline functions of math.h, on every instruction set that this machine has

INLINE = ("exp", "log", "tanh", "erf", "sigmoid")


def million_points() -> torch.Tensor:
    """Every magnitude down to the subnormals, the range in which the functions bend, and the special values."""
    sizes = torch.cat([torch.logspace(-45, 38.5, 250_000, dtype=torch.float64).float(), torch.linspace(0, 12, 250_000)])
    return torch.cat([sizes, -sizes, torch.tensor([*FLOAT_SPECIALS, 3.9192059, 3.98, 4.0, -88.72284])])


@pytest.mark.parametrize("isa", toolchain.available())
def test_inline_functions_are_near_float64(monkeypatch, isa):
    monkeypatch.setenv("KGEN_ISA", isa)
    functions = {(op, width): f"{op}_{isa}_{width}" for op in INLINE for width in (1, 16)}
    texts = [map_function(name, width, torch.float32, (torch.float32,), f"{op}_(a)") for (op, width), name in functions.items()]
    (path,) = cpp.build_units([cpp.Unit("inline", HEADER + "".join(texts))])
    library = ctypes.CDLL(str(path))  # not through load_library: nothing here needs the library of vector math
    x = million_points()
    for (op, _), name in functions.items():
        got = torch.empty_like(x)
        getattr(library, name)(ctypes.c_void_p(got.data_ptr()), ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(len(x)))
        exact = ops.OPS[op].reference(x.double())
        assert_within(ULPS[op], got, exact, apply(op, x), (x,))
        real = ~exact.isnan()
        assert torch.equal(got.signbit()[real], exact.signbit()[real]), f"{op} loses a sign"
        if op in ("tanh", "erf"):
            assert (got.abs()[real] <= 1).all()
            assert torch.equal(got[x.abs() > 10].abs(), torch.ones(int((x.abs() > 10).sum())))


# ---- conversions

COMPUTE = (torch.float32, torch.int64, torch.uint8, torch.bool) if REDUCED else ops.COMPUTE_DTYPES


def cast_widths(source: torch.dtype, target: torch.dtype) -> tuple[int, ...]:
    return (1, 16) if {source, target} & {torch.float32, torch.bool} else (16,)


@pytest.fixture(scope="module")
def conversions() -> Callable[[str], Callable[..., None]]:
    body = ""
    for source in COMPUTE:
        for target in COMPUTE:
            text = CPP_STRUCTURAL["cast"].format("a", type=CPP_TYPES[target].compute)
            for width in cast_widths(source, target):
                body += map_function(f"cast_{short(source)}_{short(target)}_{width}", width, target, (source,), text)
    rounding = ""
    for narrow in ops.NARROW_FLOATS:
        text = CPP_STRUCTURAL["round_to"].format("a", type=stored(narrow))
        for width in WIDTHS:
            rounding += map_function(f"round_{short(narrow)}_{width}", width, torch.float32, (torch.float32,), text)
            rounding += map_function(f"narrow_{short(narrow)}_{width}", width, narrow, (torch.float32,), "a")
            rounding += map_function(f"widen_{short(narrow)}_{width}", width, torch.float32, (narrow,), "a")
    for source, target in TRUNCATIONS:
        there = CPP_STRUCTURAL["cast"].format(CPP_OPS["add"].format("a", "a"), type=CPP_TYPES[target].compute)
        text = CPP_STRUCTURAL["cast"].format(there, type=CPP_TYPES[source].compute)
        for width in WIDTHS:
            name = f"truncate_{short(source)}_{short(target)}_{width}"
            rounding += map_function(name, width, source, (source,), text)
    for source, target in BITCASTS:
        text = CPP_STRUCTURAL["bitcast"].format("a", type=CPP_TYPES[target].compute)
        rounding += map_function(f"bitcast_{short(source)}_{short(target)}", 16, target, (source,), text)
    return build("conversions", body, rounding)


TRUNCATIONS = tuple((source, target) for source in FLOATS for target in (torch.int8, torch.int32, torch.int64))
BITCASTS = ((torch.float32, torch.int32), (torch.int32, torch.float32), (torch.float64, torch.int64), (torch.uint8, torch.int8))


@pytest.mark.parametrize("source", COMPUTE, ids=short)
def test_cast(conversions, source):
    values = torch.cat([specials(source), random_values(source, N - len(specials(source)), torch.Generator().manual_seed(1))])
    for target in COMPUTE:
        a = values
        if source.is_floating_point and not target.is_floating_point and target is not torch.bool:
            # what is outside the range of the target is undefined in C++; only wrapping of small negative numbers is promised
            info = torch.iinfo(target)
            a = torch.where(a.isfinite(), a, 0).clamp(max(info.min, -100), min(info.max, 2**52))
        for width in cast_widths(source, target):
            got = torch.empty(N, dtype=target)
            conversions(f"cast_{short(source)}_{short(target)}_{width}")(got, a, N)
            want = a.long().to(target) if source.is_floating_point and target in UNSIGNED else a.to(target)
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("source", "target"), TRUNCATIONS, ids=short)
def test_an_integer_made_of_a_float_is_one_when_it_becomes_a_float_again(conversions, source, target):
    """It has no -0.0, NaN or infinity: 1 / x.long().float() showed a wrong sign."""
    a = torch.tensor([-0.25, -0.0, 0.25, 1.75, -1.75, math.nan, math.inf, -math.inf, 1e30] * 8, dtype=source)
    for width in WIDTHS:
        got = torch.empty_like(a)
        conversions(f"truncate_{short(source)}_{short(target)}_{width}")(got, a, len(a))
        assert got.isfinite().all()
        assert not got[got == 0].signbit().any()
        torch.testing.assert_close(got[:5], (a[:5] * 2).trunc() + 0.0, rtol=0, atol=0)


UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def test_cast_to_the_largest_unsigned_integers(conversions):
    if torch.uint64 not in COMPUTE:
        return
    a = torch.tensor([2.0**63, 2.0**63 + 2.0**40, 2.0**64 - 2.0**40, 2.0**62] * 16)
    for width in (1, 16):
        got = torch.empty(len(a), dtype=torch.uint64)
        conversions(f"cast_float32_uint64_{width}")(got, a, len(a))
        assert got.tolist() == [int(v) for v in a.tolist()]


@pytest.mark.parametrize("narrow", ops.NARROW_FLOATS, ids=short)
def test_narrow_floats(conversions, narrow):
    every = torch.arange(2 ** (8 * narrow.itemsize), dtype=torch.int32).to(torch.int16 if narrow.itemsize == 2 else torch.uint8)
    every = every.view(narrow)
    bits = (
        torch.randint(-(2**31), 2**31, (50000,), generator=torch.Generator().manual_seed(2)).to(torch.int32).view(torch.float32)
    )
    near = every.float()  # and halfway between neighbours, where ties go to even
    ties = (near + near.nextafter(torch.tensor(math.inf)).to(narrow).float()) / 2
    floats = torch.cat([bits, near, (near.roll(-1) + near) / 2, ties, specials(torch.float32), bits / 2.0**100])
    want = floats.to(narrow)
    codes = []
    for width in WIDTHS:
        widened = torch.empty(len(every))
        conversions(f"widen_{short(narrow)}_{width}")(widened, every, len(every))
        torch.testing.assert_close(widened, every.float(), rtol=0, atol=0, equal_nan=True)
        narrowed = torch.empty(len(floats), dtype=narrow)
        conversions(f"narrow_{short(narrow)}_{width}")(narrowed, floats, len(floats))
        torch.testing.assert_close(narrowed.float(), want.float(), rtol=0, atol=0, equal_nan=True)
        codes.append(narrowed.view(torch.int16 if narrow.itemsize == 2 else torch.uint8))
        rounded = torch.empty(len(floats))
        conversions(f"round_{short(narrow)}_{width}")(rounded, floats, len(floats))
        torch.testing.assert_close(rounded, want.float(), rtol=0, atol=0, equal_nan=True)
    if narrow is not torch.float16:  # whose instruction keeps bits of a NaN
        assert all(found.equal(codes[0]) for found in codes)


@pytest.mark.parametrize(("source", "target"), BITCASTS, ids=short)
def test_bitcast(conversions, source, target):
    a = random_values(source, N, torch.Generator().manual_seed(3))
    got = torch.empty(N, dtype=target)
    conversions(f"bitcast_{short(source)}_{short(target)}")(got, a, N)
    assert torch.equal(got.view(torch.uint8), a.view(torch.uint8))


# ---- memory

MEMORY_DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn, torch.int8, torch.float64)
MEMORY_DTYPES = MEMORY_DTYPES[:4] if REDUCED else MEMORY_DTYPES
MEMORY_WIDTHS = (1, 16) if REDUCED else WIDTHS
MEMORY = """
template <class T, int L> void memory(T** out, const T* in, const int64_t* index, const bool* mask, int64_t n) {
  loop<L>(n, [&](int64_t i, auto w) {
    const auto at = load<L>(index + i, w);
    const auto m = load<L>(mask + i, w);
    const auto v = load<L>(in + i, w);
    store(out[0] + i, load_masked<L>(in + i, m, w), w);
    store(out[1] + i, gather<L>(in, at, w), w);
    store(out[2] + i, gather_masked<L>(in, where_(m, at, int64_t(1) << 60), m, w), w);
    store(out[3] + i, load_strided<L>(in + 3 * i, 3, w), w);
    store_masked(out[4] + i, v, m, w);
    scatter(out[5], at, v, w);
    scatter_masked(out[6], where_(m, at, int64_t(1) << 60), v, m, w);
    store_strided(out[7] + 3 * i, 3, v, w);
    store(out[8] + i, gather<L>(in, int64_t(5), w), w);
    store_strided_masked(out[9] + 3 * i, 3, v, m, w);
    store(out[10] + i, load_strided<L>(in + n - 1 - i, -1, w), w);
    store(out[11] + i, load_strided_masked<L>(in + n - 1 - i, -1, m, w), w);
    store_strided(out[12] + n - 1 - i, -1, v, w);
    store_strided_masked(out[13] + n - 1 - i, -1, v, m, w);
  });
}
template <class T, int L> void combine(T** out, const T* in, const int64_t* index, int64_t n) {
  loop<L>(n, [&](int64_t i, auto w) {
    const auto at = load<L>(index + i, w);
    const auto v = load<L>(in + i, w);
    scatter_combine<Add>(out[0], at, v, w);
    scatter_combine<Mul>(out[1], at, v, w);
    scatter_combine<Max>(out[2], at, v, w);
    scatter_combine<Min>(out[3], at, v, w);
  });
}
"""


@pytest.fixture(scope="module")
def memory() -> Callable[[str], Callable[..., None]]:
    body = MEMORY
    for dtype in MEMORY_DTYPES:
        for width in MEMORY_WIDTHS:
            name, kind = f"{short(dtype)}_{width}", stored(dtype)
            pointers = f"{kind}** out, const {kind}* in, const int64_t* index"
            body += f'extern "C" void memory_{name}({pointers}, const bool* mask, int64_t n) {{ '
            body += f"memory<{kind}, {width}>(out, in, index, mask, n); }}\n"
            if dtype is not torch.bool:
                body += f'extern "C" void combine_{name}({pointers}, int64_t n) {{ '
                body += f"combine<{kind}, {width}>(out, in, index, n); }}\n"
    return build("memory", body)


def pointers(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64)


@pytest.mark.parametrize("width", MEMORY_WIDTHS)
@pytest.mark.parametrize("dtype", MEMORY_DTYPES, ids=short)
def test_memory(memory, dtype, width):
    generator = torch.Generator().manual_seed(4)
    n = 107
    data = random_values(torch.bool if dtype is torch.bool else torch.float32, 3 * n, generator)
    data = (data if dtype is torch.bool else data.clamp(-50, 50)).to(dtype)
    index = torch.randint(0, n, (n,), generator=generator)
    mask = torch.rand(n, generator=generator) < 0.6
    out = [torch.zeros(3 * n, dtype=dtype) for _ in range(14)]
    memory(f"memory_{short(dtype)}_{width}")(pointers(out), data, index, mask, n)
    raw = data.view(torch.uint8) if dtype.itemsize == 1 else data
    got = [o.view(raw.dtype) for o in out]
    zero = torch.zeros((), dtype=raw.dtype)
    first = raw[:n]
    strided = torch.zeros(3 * n, dtype=raw.dtype)
    strided[::3] = first
    where_strided = torch.zeros(3 * n, dtype=raw.dtype)
    where_strided[::3] = torch.where(mask, first, zero)
    scattered, masked = torch.zeros(3 * n, dtype=raw.dtype), torch.zeros(3 * n, dtype=raw.dtype)
    for i in range(n):
        scattered[index[i]] = first[i]
        if mask[i]:
            masked[index[i]] = first[i]
    want = [
        torch.where(mask, first, zero), first[index], torch.where(mask, first[index], zero), raw[::3],
        torch.where(mask, first, zero), scattered, masked, strided, raw[5].expand(n), where_strided,
        first.flip(0), torch.where(mask, first.flip(0), zero), first.flip(0), torch.where(mask, first, zero).flip(0),
    ]  # fmt: skip
    for number, (g, w) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(g[: len(w)], w), f"result {number}"
        assert not g[len(w) :].any(), f"result {number} was written beyond its end"


@pytest.mark.parametrize("width", MEMORY_WIDTHS)
@pytest.mark.parametrize("dtype", [d for d in MEMORY_DTYPES if d is not torch.bool], ids=short)
def test_scatter_combine(memory, dtype, width):
    n = 107
    generator = torch.Generator().manual_seed(5)
    data = torch.randint(-3, 4, (n,), generator=generator).to(dtype)
    index = torch.randint(0, 9, (n,), generator=generator)
    out = [torch.ones(n, dtype=dtype) for _ in range(4)]
    memory(f"combine_{short(dtype)}_{width}")(pointers(out), data, index, n)
    functions = (torch.add, torch.mul, torch.maximum, torch.minimum)
    for got, function in zip(out, functions, strict=True):
        want = torch.ones(n, dtype=dtype)
        wide = ops.compute_dtype(dtype)
        for i in range(n):
            want[index[i]] = function(want[index[i]].to(wide), data[i].to(wide)).to(dtype)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("width", [8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64], ids=short)
def test_a_tail_touches_no_memory_beyond_its_end(memory, dtype, width):
    """The last lanes lie at the end of a page that no readable page follows."""
    import mmap

    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    area = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    assert libc.mprotect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), 0) == 0
    try:
        n = 5
        count = n * dtype.itemsize
        data = torch.frombuffer(area, dtype=torch.uint8, count=count, offset=page - count).view(dtype)
        data.copy_(torch.ones(n))
        memory_copy = build("copy", map_function("copy", width, dtype, (dtype,), "a"))
        out = torch.zeros(n, dtype=dtype)
        memory_copy("copy")(out, data, n)  # reads up to the edge
        assert torch.equal(out, data)
        memory_copy("copy")(data, out, n)  # writes up to the edge
    finally:
        libc.mprotect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), 3)


# ---- reductions

REDUCTIONS = """
template <class T, int L> void reduce(const T* in, int64_t n, compute_t<T>* out) {
  using C = compute_t<T>;
  auto sum = splat<L>(C(0)), multiplied = splat<L>(C(1)), high = splat<L>(load<1>(in, Full<1>{})), low = high;
  ArgExtreme<C, L, true> at_high;
  ArgExtreme<C, L, false> at_low;
  loop<L>(n, [&](int64_t i, auto w) {
    const auto v = load<L>(in + i, w);
    sum = step_sum(sum, v, w);
    multiplied = step_prod(multiplied, v, w);
    high = step_max(high, v, w);
    low = step_min(low, v, w);
    at_high.step(v, iota<int64_t, L>(i), w);
    at_low.step(v, iota<int64_t, L>(i), w);
  });
  const auto h = at_high.fold();
  const auto l = at_low.fold();
  const C results[] = {fold_sum(sum), fold_prod(multiplied), fold_max(high), fold_min(low),
                       h.value, C(h.index), l.value, C(l.index)};
  for (int i = 0; i < 8; ++i) out[i] = results[i];
}
template <int L> void booleans(const bool* in, int64_t n, int64_t* out) {
  auto any = splat<L>(false), all = splat<L>(true);
  ArgExtreme<bool, L, true> high;
  ArgExtreme<bool, L, false> low;
  loop<L>(n, [&](int64_t i, auto w) {
    const auto v = load<L>(in + i, w);
    any = step_any(any, v, w);
    all = step_all(all, v, w);
    high.step(v, iota<int64_t, L>(i), w);
    low.step(v, iota<int64_t, L>(i), w);
  });
  out[0] = fold_any(any);
  out[1] = fold_all(all);
  out[2] = high.fold().index;
  out[3] = low.fold().index;
}
// rows of n, so that a tail is followed by full steps
template <class T, int L> void variance(const T* in, int64_t rows, int64_t n, compute_t<T>* out) {
  Welford<compute_t<T>, L> first, second;
  for (int64_t r = 0; r < rows; ++r) {
    loop<L>(n, [&](int64_t i, auto w) { (r % 2 ? second : first).step(load<L>(in + r * n + i, w), w); });
  }
  first.join(second);
  const auto whole = first.fold();
  out[0] = whole.mean;
  out[1] = whole.m2;
  out[2] = whole.count();
}
"""


FOLDED_DTYPES = (
    (torch.float32, torch.int64) if REDUCED else (torch.float32, torch.int64, torch.float64, torch.int32, torch.bfloat16)
)
FOLDED_FLOATS = [d for d in FOLDED_DTYPES if d.is_floating_point]
FOLDED_WIDTHS = (1, 8, 16) if REDUCED else (1, 4, 8, 16, 64)


@pytest.fixture(scope="module")
def reductions() -> Callable[[str], Callable[..., None]]:
    body = REDUCTIONS
    for width in FOLDED_WIDTHS:
        for dtype in FOLDED_DTYPES:
            name, kind, out = f"{short(dtype)}_{width}", stored(dtype), CPP_TYPES[dtype].compute
            body += f'extern "C" void reduce_{name}(const {kind}* in, int64_t n, {out}* out) {{ '
            body += f"reduce<{kind}, {width}>(in, n, out); }}\n"
            if dtype.is_floating_point:
                body += f'extern "C" void variance_{name}(const {kind}* in, int64_t rows, int64_t n, {out}* out) {{ '
                body += f"variance<{kind}, {width}>(in, rows, n, out); }}\n"
        body += (
            f'extern "C" void booleans_{width}(const bool* in, int64_t n, int64_t* out) {{ booleans<{width}>(in, n, out); }}\n'
        )
    return build("reductions", body)


@pytest.mark.parametrize("width", FOLDED_WIDTHS)
@pytest.mark.parametrize("dtype", FOLDED_DTYPES, ids=short)
def test_reduce(reductions, dtype, width):
    generator = torch.Generator().manual_seed(6)
    for n in (1, 3, width, 5 * width + 1, 331):
        x = (torch.randint(-8, 9, (n,), generator=generator)).to(dtype)
        out = torch.empty(8, dtype=ops.compute_dtype(dtype))
        reductions(f"reduce_{short(dtype)}_{width}")(x, n, out)
        wide = x.to(out.dtype)
        product = wide.prod() if out.dtype.is_floating_point else wide.prod(dtype=out.dtype)
        want = [wide.sum(dtype=out.dtype), product, wide.max(), wide.min()]
        want += [wide.max(), (wide == wide.max()).int().argmax(), wide.min(), (wide == wide.min()).int().argmax()]
        torch.testing.assert_close(out, torch.stack([w.to(out.dtype) for w in want]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("width", [1, 8, 16])
def test_extremes_propagate_nan_and_its_first_position(reductions, width):
    for x, at_high in (
        (torch.tensor([1.0, math.nan, 3.0, math.nan] * 9), 1),
        (torch.full((37,), math.nan), 0),
        (torch.tensor([0.0] * 30 + [math.nan]), 30),
    ):
        out = torch.empty(8)
        reductions(f"reduce_float32_{width}")(x, len(x), out)
        assert out[[2, 3, 4, 6]].isnan().all()
        assert out[[5, 7]].tolist() == [at_high, at_high]
    infinite = torch.full((21,), -math.inf)
    reductions(f"reduce_float32_{width}")(infinite, 21, out)
    assert out[[4, 5]].tolist() == [-math.inf, 0]


@pytest.mark.parametrize("width", FOLDED_WIDTHS)
def test_reduce_booleans(reductions, width):
    for values in ([True] * 75, [False] * 75, [True] * 70 + [False], [False] * 70 + [True]):
        x = torch.tensor(values)
        out = torch.empty(4, dtype=torch.int64)
        reductions(f"booleans_{width}")(x, len(x), out)
        assert out.tolist() == [any(values), all(values), values.index(max(values)), values.index(min(values))]


@pytest.mark.parametrize("width", FOLDED_WIDTHS)
@pytest.mark.parametrize("dtype", FOLDED_FLOATS, ids=short)
def test_welford(reductions, dtype, width):
    for rows, n in ((1, 1), (1, 300), (7, 53), (2, 2)):
        x = (torch.randn(rows, n, generator=torch.Generator().manual_seed(7)) + 100).to(dtype)
        out = torch.empty(3, dtype=ops.compute_dtype(dtype))
        reductions(f"variance_{short(dtype)}_{width}")(x, rows, n, out)
        exact = x.double()
        want = torch.stack([exact.mean(), (exact - exact.mean()).square().sum(), torch.tensor(float(rows * n)).double()])
        torch.testing.assert_close(out.double(), want, rtol=2e-5 if dtype is not torch.float64 else 1e-12, atol=1e-30)


@pytest.mark.parametrize("width", FOLDED_WIDTHS)
def test_deviations_of_large_numbers_that_leave_lanes_empty(reductions, width):
    # squared, they overflow; an empty lane's mean is as far from theirs as 0
    for rows, n in ((1, 1), (1, 3), (1, 20), (3, 5)):
        out = torch.empty(3)
        reductions(f"variance_{short(torch.float32)}_{width}")(torch.full((rows, n), 2.0**120), rows, n, out)
        assert out.tolist() == [2.0**120, 0, rows * n]


# ---- random numbers, counting, tiles

OTHERS = """
template <int L>
void random(float* uniform, float* normal, int64_t* bits, int64_t seed, int64_t first, int64_t step, int64_t n) {
  loop<L>(n, [&](int64_t i, auto w) {
    const auto counter = iota<int64_t, L>(first + i * step, step);
    store(uniform + i, rand_(seed, counter), w);
    store(normal + i, randn_(seed, counter), w);
    store(bits + i, randbits_(seed, counter), w);
  });
}
#define RANDOM(L) \
  extern "C" void random_##L(float* u, float* v, int64_t* b, int64_t seed, int64_t first, int64_t step, int64_t n) { \
    random<L>(u, v, b, seed, first, step, n); \
  }
RANDOM(1)
RANDOM(4)
RANDOM(8)
RANDOM(16)
RANDOM(32)
extern "C" void count(int32_t* a, int64_t* b) {
  store(a, iota<int32_t, 16>(5, -3), Full<16>{});
  store(b, iota<int64_t, 16>(-2), Full<16>{});
}
// mixtures of scalars and vectors
extern "C" void mixtures(float* out, const float* in) {
  const auto v = load<16>(in, Full<16>{});
  store(out, where_(lt_(v, 0.5f), 1.0f, add_(2.0f, v)), Full<16>{});
  store(out + 16, where_(true, v, 0.0f), Full<16>{});
  store(out + 32, fma_(2.0f, v, 1.0f), Full<16>{});
  store(out + 48, where_(lt_(v, 0.5f), 1.0f, 2.0f), Full<16>{});
  store(out + 64, where_(and_(lt_(v, 0.5f), true), v, 2.0f), Full<16>{});
  store(out + 80, 7.0f, Full<16>{});
}
"""
RANDOM_WIDTHS = (1, 4, 8, 16, 32)
TILE_TYPES = ("float", "uint8_t", "bfloat16", "double")[: 2 if REDUCED else 4]
TILE_WIDTHS = (16,) if REDUCED else (8, 16, 32)


@pytest.fixture(scope="module")
def others() -> Callable[[str], Callable[..., None]]:
    body = OTHERS
    for kind in TILE_TYPES:
        for width in TILE_WIDTHS:
            names = f"{kind}* to, const {kind}* from, int64_t stride, int64_t rows, int64_t cols"
            call = f"load_tile<{kind}, {width}>(from, stride, to, rows, cols)"
            back = f"store_tile<{kind}, {width}>(to, stride, from, rows, cols)"
            body += f'extern "C" void load_{kind}_{width}({names}) {{ {call}; }}\n'
            body += f'extern "C" void store_{kind}_{width}({names}) {{ {back}; }}\n'
    return build("others", body)


@pytest.mark.parametrize("step", [1, 3, -1])
@pytest.mark.parametrize("first", [1 << 40, (1 << 40) + 2, (1 << 40) + 3, -256])  # at the start of a block, within, unsigned
def test_random_numbers(others, first, step):
    n, seed = 75, -1234567890123456789
    counter = torch.arange(first, first + n * step, step)
    want = {kind: function(torch.tensor(seed), counter) for kind, function in RANDOM.items()}
    u, v, b = torch.empty(n), torch.empty(n), torch.empty(n, dtype=torch.int64)
    for width in RANDOM_WIDTHS:
        others(f"random_{width}")(u, v, b, seed, first, step, n)
        assert torch.equal(u, want["rand"])
        assert torch.equal(b, want["randbits"])
        torch.testing.assert_close(v, want["randn"], rtol=1e-5, atol=2e-6)
        if width == 1:
            scalars = v.clone()
        assert torch.equal(v, scalars)


def test_iota(others):
    a, b = torch.empty(16, dtype=torch.int32), torch.empty(16, dtype=torch.int64)
    others("count")(a, b)
    assert a.tolist() == [5 - 3 * i for i in range(16)]
    assert b.tolist() == [i - 2 for i in range(16)]


def test_scalars_and_vectors_mix(others):
    x = torch.linspace(-1, 2, 16)
    out = torch.empty(6, 16)
    others("mixtures")(out, x)
    low = x < 0.5
    want = [
        torch.where(low, 1.0, 2 + x),
        x,
        2 * x + 1,
        torch.where(low, 1.0, 2.0),
        torch.where(low, x, 2.0),
        torch.full((16,), 7.0),
    ]
    torch.testing.assert_close(out, torch.stack(want))


@pytest.mark.parametrize("width", TILE_WIDTHS)
@pytest.mark.parametrize("kind", TILE_TYPES)
def test_tiles(others, kind, width):
    dtype = {"uint8_t": torch.uint8, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64}[kind]
    matrix = torch.arange(40 * 50).remainder(199).reshape(40, 50).to(dtype)
    for rows, cols in ((width, width), (width - 1, width), (width, 3), (5, width - 2), (1, 1)):
        scratch = torch.zeros(width, width, dtype=dtype)
        others(f"load_{kind}_{width}")(scratch, matrix, 50, rows, cols)
        assert torch.equal(scratch[:cols, :rows], matrix[:rows, :cols].T)
        back = torch.zeros(40, 50, dtype=dtype)
        others(f"store_{kind}_{width}")(back, scratch, 50, rows, cols)
        want = torch.zeros(40, 50, dtype=dtype)
        want[:rows, :cols] = matrix[:rows, :cols]
        assert torch.equal(back, want)


def test_literals():
    numbers = {dtype: [False, True] if dtype is torch.bool else specials(dtype).tolist() for dtype in ops.COMPUTE_DTYPES}
    for dtype in FLOATS:
        numbers[dtype] += [1e300, 1 / 3]
    body = ""
    for dtype, some in numbers.items():
        kind = CPP_TYPES[dtype].compute
        texts = [literal(x, dtype) for x in some]
        body += "".join(f"static_assert(std::is_same_v<decltype({text}), {kind}>);\n" for text in texts)
        body += f'extern "C" void literals_{short(dtype)}({kind}* out) {{ const {kind} all[] = {{{", ".join(texts)}}}; '
        body += "__builtin_memcpy(out, all, sizeof all); }\n"
    native = build("literals", body)
    for dtype, some in numbers.items():
        got = torch.empty(len(some), dtype=dtype)
        native(f"literals_{short(dtype)}")(got)
        want = torch.tensor([x % 2**64 for x in some] if dtype is torch.uint64 else some, dtype=dtype)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


# ---- the instructions

LOOPS = """
#define LOOP(name, T, R, text) \
  extern "C" void name(R* out, const T* a, const T* b, int64_t n) { \
    for (int64_t i = 0; i < n; i += 16) { \
      const Full<16> w; \
      const auto x = load<16>(a + i, w), y = load<16>(b + i, w); \
      store(out + i, text, w); \
    } \
  }
LOOP(f32_arithmetic, float, float, mul_(add_(x, y), 2.5f))
LOOP(f32_where, float, float, where_(lt_(x, y), x, 0.0f))
LOOP(f32_compare, float, bool, and_(lt_(x, y), ge_(x, 0.0f)))
LOOP(f32_maximum, float, float, maximum_(x, y))
LOOP(f32_exp, float, float, exp_(x))
LOOP(f32_round, float, float, floor_(x))
LOOP(i64_arithmetic, int64_t, int64_t, sub_(mul_(x, y), int64_t(3)))
LOOP(i64_where, int64_t, int64_t, where_(lt_(x, y), x, y))
LOOP(i64_to_f32, int64_t, float, cast_<float>(add_(x, y)))
LOOP(bf16_arithmetic, bfloat16, bfloat16, add_(x, y))
LOOP(f16_arithmetic, half, half, add_(x, y))
LOOP(bool_and, bool, bool, and_(x, y))
LOOP(bool_to_f32, bool, float, cast_<float>(xor_(x, y)))
LOOP(u8_to_f32, uint8_t, float, mul_(cast_<float>(x), cast_<float>(y)))
LOOP(f32_to_i8, float, int8_t, cast_<int8_t>(add_(x, y)))
"""
# What each must contain on AVX-512: patterns, all of which must be found.
INSTRUCTIONS = {
    "f32_arithmetic": "vaddps.*zmm vmulps.*zmm",
    "f32_where": "vcmp.*ps",
    "f32_compare": "vcmp.*ps vmovdqu8",
    "f32_maximum": "vmaxps.*zmm",
    "f32_exp": "vfmadd.*zmm vscalefps.*zmm",
    "f32_round": "vrndscaleps.*zmm",
    "i64_arithmetic": "vpmullq.*zmm",
    "i64_where": "vpcmp.*q|vpminsq",
    "i64_to_f32": "vcvtqq2ps",
    "bf16_arithmetic": "vpmovzxwd vaddps.*zmm vpmovdw",
    "f16_arithmetic": "vcvtph2ps.*zmm vcvtps2ph",
    "bool_and": "vp.*b",
    "bool_to_f32": "zmm.*{z}",
    "u8_to_f32": "vpmovzxbd.*zmm vcvtdq2ps",
    "f32_to_i8": "vcvttps2dq.*zmm vpmovdb",
}


@pytest.fixture(scope="module")
def listings() -> dict[str, str]:
    """Function name -> its instructions."""
    if shutil.which("objdump") is None:
        pytest.skip("needs objdump")
    (path,) = cpp.build_units([cpp.Unit("loops", HEADER + LOOPS)])
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", str(path)], capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"^[0-9a-f]+ <(\w+)>:\n(.*?)(?=^\n|\Z)", text, re.MULTILINE | re.DOTALL))


@pytest.mark.skipif(toolchain.isa().name != "avx512", reason="the patterns are those of AVX-512")
@pytest.mark.parametrize("name", list(INSTRUCTIONS))
def test_loops_become_packed_instructions(listings, name):
    listing = listings[name]
    for pattern in INSTRUCTIONS[name].split():
        assert re.search(pattern, listing), f"{pattern} is missing:\n{listing}"
    assert not re.search(r"\(%[re][sb]p", listing), f"goes through the stack:\n{listing}"
    assert not re.search(r"vpextr|vpinsr|\bcall\b", listing), f"goes lane by lane:\n{listing}"
    assert len(listing.splitlines()) < 60


# ---- other instruction sets


@pytest.mark.slow
@pytest.mark.skipif(REDUCED, reason="this is the run under another instruction set")
@pytest.mark.parametrize("isa", [name for name in ("avx2", "generic") if name != toolchain.isa().name])
def test_other_instruction_sets(isa):
    """Compiles and runs the exact operations, conversions, memory and reductions for instruction sets this machine includes."""
    if isa == "avx2" and toolchain.isa().name == "generic":
        pytest.skip("this machine has no AVX2")
    environment = {**os.environ, "KGEN_ISA": isa}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", str(Path(__file__).resolve())]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:]
