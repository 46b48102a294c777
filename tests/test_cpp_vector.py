"""The C++ vector layer: every operation on every compute dtype, as scalars, as vectors and in masked tails, against the table's
references; loads, stores, conversions, accumulators, random numbers and tiles; and the instructions that all this becomes.

The drivers are small generated loops in the form that kernels have, built and loaded as kernels are.
"""

from __future__ import annotations

import ctypes
import functools
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

from kgen import ops
from kgen.build import cpp, toolchain
from kgen.evaluate_value import RANDOM, apply, philox
from kgen.templates.cpp.table import CPP_OPS, CPP_STRUCTURAL, CPP_TYPES, literal

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


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


def signature(op: str, dtype: torch.dtype) -> tuple[torch.dtype, tuple[torch.dtype, ...]]:
    row = ops.OPS[op]
    inputs = (torch.bool, dtype, dtype) if op == "where" else (dtype,) * row.arity
    return ops.result_dtype(op, inputs), inputs


def widths_of(op: str, dtype: torch.dtype) -> tuple[int, ...]:
    # all widths where the number of registers differs most, else what a kernel would mostly use: compile time
    return WIDTHS if dtype in (torch.float32, torch.int64, torch.int8) and ops.OPS[op].cost < 60 else (1, 16)


# Under another instruction set (KGEN_ISA) only the exact operations and the inline functions are checked again.
LIBRARY_ONLY = {n for n, row in ops.OPS.items() if row.cost >= 20}
REDUCED = "KGEN_ISA" in os.environ
DTYPES = FLOATS + INTEGERS + (torch.bool,)
TESTED_DTYPES = (torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool) if REDUCED else DTYPES
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


# ---- inputs

FLOAT_SPECIALS = [
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, 1e-45, -1e-45, 1e-40, 1.1754944e-38, 3.4028235e38, -3.4028235e38, math.inf,
    -math.inf, math.nan, 88.7, -87.4, -103.0, 89.5, 0.625, 1e-10, 12345.678,
]  # fmt: skip


def specials(dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.tensor([True, False])
    if dtype.is_floating_point:
        return torch.tensor(FLOAT_SPECIALS, dtype=dtype)
    info = torch.iinfo(dtype)
    some = [info.min, info.min + 1, info.max, info.max - 1, info.max // 2, 0, 1, 2, 3, 7, 100]
    if info.min < 0:
        some += [-1, -2, -7]
    return torch.tensor(some, dtype=dtype)


def random_values(dtype: torch.dtype, count: int, generator: torch.Generator) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(count, generator=generator) < 0.5
    if dtype.is_floating_point:
        scale = 10 ** torch.empty(count).uniform_(-4, 2, generator=generator)
        return (torch.randn(count, generator=generator) * scale).to(dtype)
    small = torch.randint(0, 20, (count,), generator=generator)
    bits = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    return torch.where(torch.rand(count, generator=generator) < 0.5, small, bits).to(torch.int64).to(dtype)


def inputs_of(op: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """N elements: all pairs of special values first, as many as fit, then random ones."""
    generator = torch.Generator().manual_seed(len(op))
    arity = ops.OPS[op].arity
    special = specials(dtype)
    pairs = torch.cartesian_prod(special, special)[: N - 300]
    first = pairs[:, 0] if arity > 1 else special
    rest = N - len(first)
    a = torch.cat([first, random_values(dtype, rest, generator)])
    b = torch.cat([pairs[:, 1], random_values(dtype, N - len(pairs), generator)])
    c = random_values(dtype, N, generator)
    if "polynomial" in op:
        b = torch.arange(N).remainder(8).to(dtype)
    if op == "polygamma":
        b = torch.full((N,), 2, dtype=dtype)
    if op in ("igamma", "igammac", "zeta", "polygamma"):
        a, b = a.abs().clamp(0.01, 50), b.abs().clamp(0.01, 50)
    if op in ("shl", "shr") and dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch has no reference for more
        b = b.to(torch.int64).remainder(8 * dtype.itemsize).to(dtype)
    if op == "where":
        return random_values(torch.bool, N, generator), a, c
    return (a, b, c)[:arity]


# ---- operations


def test_every_operation_has_text():
    assert set(CPP_OPS) == set(ops.OPS)
    assert set(CPP_STRUCTURAL) == set(ops.STRUCTURAL) - {"const", "index", "load"}  # those are the emitter's own
    assert set(CPP_TYPES) == {*ops.COMPUTE_DTYPES, *ops.NARROW_FLOATS}
    for op, row in ops.OPS.items():
        assert len(set(re.findall(r"\{\d\}", CPP_OPS[op]))) == row.arity


def divided(op: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Integer division with what torch refuses: by zero gives zero, the smallest integer by -1 wraps."""
    low = torch.iinfo(a.dtype).min
    zero = b == 0
    wraps = (a == low) & (b == b.new_tensor(-1)) if low < 0 else torch.zeros_like(zero)
    result = apply(op, a, torch.where(zero | wraps, torch.ones_like(b), b))
    result = torch.where(zero, torch.zeros_like(a), result)
    return torch.where(wraps, a if op in ("floordiv", "truncdiv") else torch.zeros_like(a), result)


def expected(op: str, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    if op in ("floordiv", "truncdiv", "remainder", "fmod") and not args[0].is_floating_point():
        return divided(op, *args)
    return apply(op, *args)


def ulps(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Distance from a float64 result in units in the last place of `got`'s dtype; 0 where both are NaN or the same infinity."""
    near = want.to(got.dtype)
    below = torch.nextafter(near, torch.zeros_like(near))
    spacing = torch.where(near == 0, torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps, (near - below).abs())
    distance = (got.double() - want).abs() / spacing.double()
    same = (got == near) | (got.isnan() & near.isnan())
    return torch.where(same & (near.isinf() | near.isnan() | (distance > 1e30) | distance.isnan()), 0.0, distance).nan_to_num(1e30)


# Ulps of float32 against a float64 reference. Sleef promises 1.0, and its results may round once more.
ULPS = {"exp": 1.0, "log": 1.0, "tanh": 1.5, "erf": 1.5, "sigmoid": 2.5}


def check(op: str, got: torch.Tensor, args: tuple[torch.Tensor, ...]) -> None:
    row, dtype = ops.OPS[op], got.dtype
    want = expected(op, args)
    if not dtype.is_floating_point or row.exact:
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    elif row.cost >= 60:  # the same code as torch's: only what the compiler contracts may differ
        torch.testing.assert_close(got, want, rtol=1e-4 if dtype is torch.float32 else 1e-10, atol=1e-6, equal_nan=True)
    elif dtype is torch.float32:
        worst = ulps(got, row.reference(*(a.double() for a in args)))
        at = int(worst.argmax())
        assert worst.max() <= ULPS.get(op, 2.0), f"{worst.max():.2f} ulp at {[a[at].item() for a in args]}: {got[at].item()}"
    else:
        worst = ulps(got, want)
        at = int(worst.argmax())
        assert worst.max() <= 8, f"{worst.max():.2f} ulp at {[a[at].item() for a in args]}: {got[at].item()}"


@pytest.mark.parametrize("op", TESTED_OPS)
def test_operation(operations, op):
    for dtype in dtypes_of(op):
        args = inputs_of(op, dtype)
        out_dtype, _ = signature(op, dtype)
        results = []
        for width in widths_of(op, dtype):
            got = torch.empty(N, dtype=out_dtype)
            operations(f"{op}_{short(dtype)}_{width}")(got, *args, N)
            results.append(got)
        for got in results:
            check(op, got, args)
        for got in results[1:]:  # a lane's result does not depend on the width
            torch.testing.assert_close(got, results[0], rtol=0, atol=0, equal_nan=True)
