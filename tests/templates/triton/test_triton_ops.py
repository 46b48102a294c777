"""Triton's scalar operations, conversions, reductions, scans and random numbers against the references of the one table: in the
interpreter, natively on a GPU, and compiled for two GPUs that need not be there."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mpmath
import pytest
import torch
import triton
import triton.language as tl
import triton_kernels as kernels
from scalar_cases import expected, inputs_of, random_values, short, specials, ulps, where
from triton_kernels import COLUMNS, ROWS, TILE, Run

from kgen.ir import ops
from kgen.reference.evaluate_reduction import reduce, scan
from kgen.reference.evaluate_value import RANDOM
from kgen.templates.triton.codegen import interpret
from kgen.templates.triton.codegen.table import (
    FAST_OPS,
    REDUCE,
    SCAN,
    STRUCTURAL,
    TRITON_OPS,
    TRITON_TYPES,
    literal,
    scatter_atomic,
)
from kgen.templates.triton.device import library

N = 1024
DTYPES = ops.COMPUTE_DTYPES


@pytest.fixture(params=[pytest.param("interpret", marks=pytest.mark.interpret), pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    return kernels.interpreted(tmp_path) if request.param == "interpret" else kernels.on_gpu(tmp_path)


def near(got: torch.Tensor, want: torch.Tensor, rtol: float = 0, atol: float = 0) -> None:
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)


# ---- the table


def test_every_operation_has_text_or_is_a_library_call():
    assert set(TRITON_OPS) | ops.CPU_ONLY == set(ops.OPS)
    assert not set(TRITON_OPS) & ops.CPU_ONLY
    assert set(STRUCTURAL) == set(ops.STRUCTURAL) - {"const", "index", "load", "assert", "step"}  # those are the emitter's own
    assert set(TRITON_TYPES) == {*ops.COMPUTE_DTYPES, *ops.NARROW_FLOATS}
    assert set(REDUCE) == set(ops.REDUCTIONS)
    assert set(SCAN) == set(ops.SCANS)
    for op, text in TRITON_OPS.items():
        assert len(set(re.findall(r"\{\d\}", text))) == ops.OPS[op].arity


def test_the_library_imports_no_torch():
    code = "import sys, kgen.templates.triton.device.library; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_atomics_exist_for_what_the_hardware_has():
    assert scatter_atomic("add", torch.float32) == 'tl.atomic_add({0}, {1}, mask={2}, sem="relaxed")'
    assert scatter_atomic("mul", torch.float32) is None
    assert scatter_atomic("max", torch.int64) is not None
    assert scatter_atomic("max", torch.float32) is None  # would lose NaN
    assert scatter_atomic("add", torch.int8) is None


# ---- operations

# Ulps of float32 against a float64 reference; the CUDA programming guide promises as much of most of the functions.
ULPS = {"sqrt": 0.5, "fma": 0.5001, "reciprocal": 0.5, "tan": 4.0, "pow": 8.0}


def check(op: str, got: torch.Tensor, args: tuple[torch.Tensor, ...]) -> None:
    row, dtype = ops.OPS[op], got.dtype
    want = expected(op, args)
    if op in ("floordiv", "truncdiv", "remainder", "fmod") and not dtype.is_floating_point:
        got = where(args[1] == 0, want, got)  # unspecified
    if op == "truediv" and dtype is torch.float32:  # where no remainder is exact, a quotient may be off by its last bit
        may = (args[0].abs() < 2.0**-100) & (ulps(got, want) <= 1)
        got = torch.where(may, want, got)
    if not dtype.is_floating_point or (row.exact and op not in ("sqrt", "fma")):
        near(got, want)
    elif row.cost >= 60:
        if dtype is torch.float32:  # eager's own overflow earlier than their results, and lose digits of large arguments
            want = row.reference(*(a.double() for a in args)).float()
        near(got, want, 1e-4 if dtype is torch.float32 else 1e-10, 1e-6)
    else:
        exact = row.reference(*(a.double() for a in args)) if dtype is torch.float32 else want
        limit = ULPS.get(op, 4.0) if dtype is torch.float32 else 8.0
        tiny = torch.finfo(dtype).smallest_normal  # libdevice flushes what is smaller to zero
        flushed = (got - exact).abs() <= tiny
        distance = torch.where((got == want) | flushed, 0.0, ulps(got, exact))
        at = int(distance.argmax())
        assert distance[at] <= limit, f"{distance[at]:.2f} ulp at {[a[at].item() for a in args]}: {got[at].item()}"


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_operations(run, dtype):
    kernel, names = kernels.operations(dtype)
    args = {op: inputs_of(op, dtype, N) for op in names}
    results = run(kernel, [x for op in names for x in args[op]], [N] * len(names))
    wrong = []
    for op, got in zip(names, results, strict=True):
        try:
            check(op, got, args[op])
        except AssertionError as error:
            wrong.append(f"{op}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_literals(run, dtype):
    numbers = specials(dtype).tolist()
    (got,) = run(kernels.literals(dtype, numbers), [], [32])
    got = got[: len(numbers)]
    want = torch.tensor(numbers, dtype=dtype)
    near(got, want)
    if dtype.is_floating_point:
        assert torch.equal(got.signbit()[~want.isnan()], want.signbit()[~want.isnan()])


def test_a_literal_beyond_float32_is_infinite():
    assert literal(1e300, torch.float32) == 'tl.full([], float("inf"), tl.float32)'


def around(*points: float, width: float = 1e-3) -> torch.Tensor:
    """float32 numbers next to each point and a little farther off."""
    near_by = torch.cat([torch.arange(-4, 5) * 2.0**-22, torch.linspace(-width, width, 9)]).double()
    return torch.cat([(p + max(abs(p), 1) * near_by).float() for p in points])


SPREAD = torch.cat([torch.logspace(-6, 1.5, 60), torch.linspace(0.1, 80, 60)])
# Zeros, poles, and where a formula changes; the references are mpmath's.
HARD: dict[str, tuple[Any, torch.Tensor]] = {
    "digamma": (mpmath.digamma, torch.cat([around(1.4616321449683622, -0.504083, -1.573498, -2, -7, -31, 10, 1e-3), SPREAD])),
    "lgamma": (
        lambda x: -mpmath.log(abs(mpmath.rgamma(x))),
        torch.cat([around(1, 2, -2.4570247, -2.7476826, -3.1435808, -8, 1e-3), SPREAD]),
    ),
    "bessel_j0": (lambda x: mpmath.besselj(0, x), torch.cat([around(2.404825557695773, 5.520078, 62.048469, 8), SPREAD])),
    "bessel_j1": (lambda x: mpmath.besselj(1, x), torch.cat([around(3.8317059702075125, 7.015586, -10.173468, 8), SPREAD])),
    "bessel_y0": (lambda x: mpmath.bessely(0, x), torch.cat([around(0.8935769662791675, 3.9576784, 60.477, 8), SPREAD])),
    "bessel_y1": (lambda x: mpmath.bessely(1, x), torch.cat([around(2.197141326031017, 5.4296813, 62.048, 8), SPREAD])),
    "i0": (lambda x: mpmath.besseli(0, x), torch.cat([around(7.75, 8), SPREAD])),
    "i1": (lambda x: mpmath.besseli(1, x), torch.cat([around(7.75, 8), -SPREAD])),
    "i0e": (lambda x: mpmath.besseli(0, x) * mpmath.exp(-abs(x)), torch.cat([around(8, 30, -30), SPREAD, SPREAD * 1e4])),
    "i1e": (lambda x: mpmath.besseli(1, x) * mpmath.exp(-abs(x)), torch.cat([around(8, 30, -30), -SPREAD, SPREAD * 1e4])),
    "log_ndtr": (lambda x: mpmath.log(mpmath.ncdf(x)), torch.cat([around(-1, 0, 3), SPREAD[SPREAD < 12], -SPREAD])),
    "ndtri": (lambda x: mpmath.sqrt(2) * mpmath.erfinv(2 * x - 1), around(0.5, 0.99, 0.135335, width=1e-2)),
    "spherical_bessel_j0": (mpmath.sinc, torch.cat([around(0.5, math.pi, 2 * math.pi), SPREAD])),
}


def test_special_functions_next_to_zeros_and_poles(run, request):
    interpreted = request.node.callspec.params["run"] == "interpret"
    kernel = kernels.Kernel("hard", 128)
    inputs = [torch.cat([x, x.new_ones(-len(x) % 128)]) for _, x in HARD.values()]
    inputs = [torch.cat([x, x.new_ones(512 - len(x))]) for x in inputs]
    for op in HARD:
        kernel.store(torch.float32, kernel.bind(TRITON_OPS[op].format(kernel.load(torch.float32))))
    wrong = []
    with mpmath.workdps(40):
        for (op, (reference, _)), x, got in zip(HARD.items(), inputs, run(kernel, inputs, [512] * len(HARD)), strict=True):
            want = torch.tensor([_number(reference, v) for v in x.tolist()], dtype=torch.float64)
            distance = ulps(got, want)
            if interpreted and op.startswith("bessel"):  # torch's own, in place of libdevice's, are off by 1e-6 around 5
                distance[(x.abs() > 2) & (x.abs() < 20)] = 0
            at = int(distance.argmax())
            if distance[at] > 4:
                wrong.append(f"{op}: {distance[at]:.1f} ulp at {x[at].item()}: {got[at].item()}, not {want[at].item()}")
    assert not wrong, "\n".join(wrong)


POSITIVE = torch.cat(
    [around(1, 2, 1.4616321449683622, 0.5, 6, 8, 1e-3), torch.logspace(-37, 30, 200), torch.linspace(0.01, 12, 1600)]
)
ENDS = torch.tensor([0.0, -0.0, math.inf, math.nan, 1e-40, 3e38])


@pytest.mark.parametrize("op", ["digamma", "lgamma"])
def test_special_functions_of_positive_numbers(run, op):
    """A tile without a negative number is computed in float32."""
    x = torch.cat([POSITIVE[POSITIVE > 0], ENDS])
    x = torch.cat([x, x.new_ones(2048 - len(x))])
    kernel = kernels.Kernel("positive", 128)
    kernel.store(torch.float32, kernel.bind(TRITON_OPS[op].format(kernel.load(torch.float32))))
    (got,) = run(kernel, [x], [2048])
    number = int((POSITIVE > 0).sum())
    with mpmath.workdps(40):
        want = torch.tensor([_number(HARD[op][0], v) for v in x[:number].tolist()], dtype=torch.float64)
    assert ulps(got[:number], want).max() <= 3.5
    near(got[number:], ops.OPS[op].reference(x[number:].double()).float())


def test_powers_of_float32(run):
    """Bases of all sizes, and near 1 with large exponents; numbers that are subnormal or overflow; whole exponents of negative
    bases; ends. The last one's power is the largest number: it may not overflow."""
    made = torch.Generator().manual_seed(0)
    spread = torch.rand(2, 4, 2048, generator=made, dtype=torch.float64) * 2 - 1
    a = torch.cat([(spread[0, 0] * 126).exp2(), 1 + spread[0, 1] * 0.3, 1 + spread[0, 2] * 1e-3, -((spread[0, 3] * 9).exp2())])
    b = torch.cat([spread[1, 0], spread[1, 1] * 200, spread[1, 2] * 5e4, (spread[1, 3] * 12).round()])
    ends = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-42, -1e-42, 2.5, -2.5, 3.0, 0.5, -3.0, 1e30, 1e-30]
    pairs = torch.tensor([*itertools.product(ends, ends), (torch.finfo(torch.float32).max, 1.0)]).double()
    a, b = (
        torch.cat([x, end, x.new_ones(-(len(x) + len(end)) % 128)]).float() for x, end in ((a, pairs[:, 0]), (b, pairs[:, 1]))
    )
    kernel = kernels.Kernel("powers", 128)
    kernel.store(torch.float32, kernel.bind(TRITON_OPS["pow"].format(kernel.load(torch.float32), kernel.load(torch.float32))))
    (got,) = run(kernel, [a, b], [len(a)])
    want = a.double() ** b.double()
    wrong = (got.isnan() != want.isnan()) | (ulps(got, want) > 6) & ((got - want).abs() > torch.finfo(torch.float32).tiny)
    assert not wrong.any(), [(a[k].item(), b[k].item(), got[k].item(), want[k].item()) for k in wrong.nonzero()[:8, 0]]
    negative = (a < 0) | (a == 0) & a.signbit()
    assert torch.equal(got.signbit()[negative & ~want.isnan()], want.signbit()[negative & ~want.isnan()])


# Functions that are next to a multiple of x, and that multiple.
SLOPES = {
    **dict.fromkeys(["sin", "tan", "asin", "atan", "sinh", "tanh", "asinh", "atanh", "expm1", "log1p"], 1.0),
    "erfinv": math.sqrt(math.pi) / 2,
}


def test_functions_of_subnormal_numbers(run):
    """Eager has sin(x) / x = 1 there. What libdevice flushes to zero would make it 0."""
    x = torch.tensor([1e-45, -1e-45, 3e-39, -3e-39, 1.17e-38, 1.18e-38, 2.3e-38, 2.4e-38, 0.0, -0.0]).repeat(13)[:128]
    kernel = kernels.Kernel("subnormal", 128)
    for op in SLOPES:
        kernel.store(torch.float32, kernel.bind(TRITON_OPS[op].format(kernel.load(torch.float32))))
    kernel.store(torch.float32, kernel.bind(TRITON_OPS["hypot"].format(*(kernel.load(torch.float32) for _ in range(2)))))
    count = len(SLOPES) + 1
    *results, distance = run(kernel, [x] * (count + 1), [128] * count)
    for (op, slope), got in zip(SLOPES.items(), results, strict=True):
        torch.testing.assert_close(
            got, (x.double() * slope).float(), rtol=1e-6, atol=1.5e-45, msg=lambda m, op=op: f"{op}: {m}"
        )
        assert torch.equal(got.signbit(), x.signbit()), op
    near(distance, (x.double().abs() * math.sqrt(2)).float(), 1e-6, 1.5e-45)


def test_the_scaled_error_function_of_large_numbers(run):
    """It is subnormal from 4e37 on."""
    x = torch.logspace(0, 38.5, 128)
    kernel = kernels.Kernel("scaled", 128)
    kernel.store(torch.float32, kernel.bind(TRITON_OPS["erfcx"].format(kernel.load(torch.float32))))
    (got,) = run(kernel, [x], [128])
    near(got, torch.special.erfcx(x.double()).float(), 1e-6, 1.5e-45)


# Of the hardware's functions: the arguments, and an error of float32 that each may have there, in units of 2^-23.
FAST: dict[str, tuple[torch.Tensor, Any]] = {
    "exp": (torch.linspace(-86, 88, 500), lambda x: 2 + x.abs()),
    "sigmoid": (torch.linspace(-80, 80, 500), lambda x: 4 + x.abs()),
    "tanh": (torch.linspace(-40, 40, 500), lambda x: 8 + 2 / x.abs()),
}


@pytest.mark.parametrize("op", FAST)
def test_fast_functions(run, op):
    x, allowed = FAST[op]
    x = torch.cat([x, torch.tensor([-math.inf, math.inf, math.nan])])
    x = torch.cat([x, x.new_ones(512 - len(x))])
    kernel = kernels.Kernel("fast", 128)
    kernel.store(torch.float32, kernel.bind(FAST_OPS[op].format(kernel.load(torch.float32))))
    (got,) = run(kernel, [x], [512])
    want = ops.OPS[op].reference(x.double())
    error = (got.double() / want - 1).abs()[:500]
    assert (error <= allowed(x[:500]) * 2**-23).all()
    near(got[500:].double(), want[500:], 1e-6)


def _number(reference: Any, x: float) -> float:
    try:
        return float(reference(mpmath.mpf(x)))
    except ValueError:  # a pole
        return math.nan


# ---- conversions


@pytest.mark.parametrize("source", DTYPES, ids=short)
def test_casts(run, source):
    values = torch.cat([specials(source), random_values(source, N, torch.Generator().manual_seed(1))])[:N]
    args = []
    for target in DTYPES:
        a = values
        if source.is_floating_point and not target.is_floating_point and target is not torch.bool:
            # what is outside the range of the target is undefined; torch's CUDA kernels wrap negative numbers in the small
            # unsigned ones
            info = torch.iinfo(target)
            low = 0 if target is torch.uint64 else max(info.min, -100)
            a = torch.where(a.isfinite(), a, 0).clamp(low, min(info.max // 2, 2**52))
        args.append(a)
    results = run(kernels.casts(source, DTYPES), args, [N] * len(DTYPES))
    for target, a, got in zip(DTYPES, args, results, strict=True):
        wraps = source.is_floating_point and target in (torch.uint8, torch.uint16, torch.uint32)
        near(got, a.long().to(target) if wraps else a.to(target))


@pytest.mark.every(2)
@pytest.mark.parametrize("narrow", ops.NARROW_FLOATS, ids=short)
def test_narrow_floats(run, narrow):
    bits = torch.int16 if narrow.itemsize == 2 else torch.uint8
    every = torch.arange(2 ** (8 * narrow.itemsize), dtype=torch.int32).to(bits).view(narrow)
    every = torch.where(every.float().isfinite(), every.float(), 0).to(narrow)
    x = every.float()
    generator = torch.Generator().manual_seed(2)
    anything = torch.randint(-(2**31), 2**31, (2**14,), generator=generator).to(torch.int32).view(torch.float32)
    ties = (x + x.roll(1)) / 2  # neighbours in the order of their bits: ties go to even
    floats = torch.cat([x, ties, anything, ties.nextafter(torch.tensor(math.inf)), specials(torch.float32)])
    floats = torch.cat([floats, floats[: -len(floats) % 128]])
    loaded = every.float().repeat(len(floats) // len(every) + 1)[: len(floats)].to(narrow)
    rounded, stored, widened = run(kernels.narrow_floats(narrow), [floats, loaded], [len(floats)] * 3)
    near(rounded, floats.to(narrow).float())
    near(stored.float(), floats.to(narrow).float())
    near(widened, loaded.float())


def test_where_float8_e4m3fn_overflows_is_torchs_choice(run):
    """The other choice than this torch's is tested too: which one it is depends on the release."""
    kernel = kernels.Kernel("overflow", 128)
    x = kernel.load(torch.float32)
    for saturate in (True, False):
        kernel.store(torch.float8_e4m3fn, kernel.bind(f"lib.narrow({x}, tl.float8e4nv, saturate={saturate})"))
    floats = torch.tensor([447.0, 464.0, 464.001, 1e30, -465.0, math.inf, -math.inf, math.nan] * 16)
    largest, nothing = run(kernel, [floats], [len(floats)] * 2)
    if torch.tensor(1000.0).to(torch.float8_e4m3fn).float().isfinite():  # in the interpreter the conversion is torch's own
        assert largest[:8].float().nan_to_num(0).tolist() == [448, 448, 448, 448, -448, 448, -448, 0]
    assert nothing[:8].float().nan_to_num(0).tolist() == [448, 448, 0, 0, 0, 0, 0, 0]


def few_elements() -> kernels.Kernel:
    """What takes several elements at a time, of a tile that has one."""
    kernel = kernels.Kernel("few_elements", 1)
    x, byte, half = kernel.load(torch.float32), kernel.load(torch.int8), kernel.load(torch.bfloat16)
    kernel.store(torch.float32, kernel.bind(f"lib.rounded_to_bfloat16({x})"))
    for to in (torch.float32, torch.float16, torch.bfloat16):
        kernel.store(to, kernel.bind(f"lib.float_of_byte({byte}.to(tl.int8), {TRITON_TYPES[to].storage})"))
    narrow = kernel.bind(f"{half}.to(tl.bfloat16)")
    kernel.store(torch.bfloat16, kernel.bind(f"lib.multiply_halves({narrow}, {narrow})"))
    kernel.store(torch.bfloat16, kernel.bind(f"lib.to_halves({x}, tl.bfloat16)"))
    kernel.store(torch.int32, kernel.bind(f"lib.bits_of_bytes({byte}.to(tl.int8), 4, 15).to(tl.int32)"))
    bits = kernel.bind(f"lib.bits_of_bytes({byte}.to(tl.int8), 0, 127)")
    kernel.store(torch.bfloat16, kernel.bind(f"lib.small_number({bits}, tl.bfloat16, 8)"))
    return kernel


def test_few_elements(run):
    x, byte = torch.tensor([1.2345, -7.89]), torch.tensor([-128, 77], dtype=torch.int8)
    half = x.bfloat16()
    rounded, *floats, product, stored, high, small = run(few_elements(), [x, byte, half], [2] * 8)
    near(rounded, half.float())
    near(stored, half)
    near(high, (byte >> 4 & 15).int())
    near(small, ((byte & 127).float() - 8).bfloat16())
    for one in floats:
        near(one.float(), byte.float())
    near(product, half * half)


def packed_numbers(dtype: torch.dtype) -> kernels.Kernel:
    kernel = kernels.Kernel("packed_numbers", 128)
    byte, x = kernel.load(torch.uint8), kernel.load(torch.float32)
    to = TRITON_TYPES[dtype].storage
    for shift, mask, less in SMALL_NUMBERS:
        bits = kernel.bind(f"lib.bits_of_bytes({byte}.to(tl.uint8), {shift}, {mask})")
        kernel.store(dtype, kernel.bind(f"lib.small_number({bits}, {to}, {less})"))
    kernel.store(dtype, kernel.bind(f"lib.to_halves({x}, {to})"))
    return kernel


SMALL_NUMBERS = ((0, 15, 8), (4, 15, 0), (2, 3, 1), (1, 127, 128), (0, 127, -127), (3, 31, 17))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=short)
def test_numbers_of_few_bits(run, dtype):
    """All bytes, and numbers that are less than 2^7 or 2^10: exact in types that have no more digits."""
    byte = torch.arange(256).to(torch.uint8)
    x = torch.randn(256, generator=torch.Generator().manual_seed(1)) * 100
    *small, rounded = run(packed_numbers(dtype), [byte, x], [256] * (len(SMALL_NUMBERS) + 1))
    near(rounded, x.to(dtype))
    for (shift, mask, less), got in zip(SMALL_NUMBERS, small, strict=True):
        assert torch.equal(got.int(), (byte >> shift & mask).int() - less)


BITCASTS = (
    (torch.float32, torch.int32), (torch.int32, torch.float32), (torch.float64, torch.int64), (torch.uint8, torch.int8),
    (torch.float32, torch.uint32), (torch.int64, torch.float64),
)  # fmt: skip


def test_bitcasts(run):
    args = [random_values(source, N, torch.Generator().manual_seed(3)) for source, _ in BITCASTS]
    for a, got in zip(args, run(kernels.bitcasts(BITCASTS), args, [N] * len(BITCASTS)), strict=True):
        assert torch.equal(got.view(torch.uint8), a.view(torch.uint8))


# ---- random numbers


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, -(2**63)])
def test_random_numbers(run, seed):
    seeds = torch.tensor([seed])
    low, high = torch.arange(N // 2), torch.randint(-(2**63), 2**63 - 1, (N // 2,))
    counters = torch.cat([low, high])
    rand, randn, randbits = run(kernels.random_numbers(), [seeds, counters], [N] * 3)
    assert torch.equal(rand, RANDOM["rand"](seeds, counters))
    assert torch.equal(randbits, RANDOM["randbits"](seeds, counters))
    near(randn, RANDOM["randn"](seeds, counters), 1e-5, 1e-6)


# ---- reductions and scans


def rows(dtype: torch.dtype, columns: int, finite: bool) -> torch.Tensor:
    """Rows of random numbers, of ties, of one value, of extremes, and of NaNs here and there."""
    generator = torch.Generator().manual_seed(4)
    x = random_values(dtype, ROWS * columns, generator).reshape(ROWS, columns)
    x[1] = torch.randint(0, 3, (columns,), generator=generator).to(dtype)
    x[2] = ops.identity("max", dtype)
    x[3] = torch.tensor(ops.identity("min", dtype), dtype=dtype)  # as a number torch takes no large uint64
    if dtype.is_floating_point:
        x = x.clamp(-8, 8)  # multiplications stay finite
        x[4, 50], x[4, 40], x[5, 3], x[6] = math.nan, math.nan, -math.nan, math.nan
        if not finite:
            x[2], x[3], x[7, 11] = -math.inf, math.inf, math.inf
    return x


REDUCTIONS = [(op, d) for op, row in ops.REDUCTIONS.items() for d in DTYPES if d in ops.admitted(row.admits)]


@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS, ids=short)
def test_reduction(run, op, dtype):
    x = rows(dtype, COLUMNS, finite=op in ("welford", "prod"))
    kernel = kernels.reduction(op, dtype)
    for got, want in zip(run(kernel, [x], [ROWS] * len(kernel.outputs)), reduce(op, x), strict=True):
        loose = got.is_floating_point() and op in ("sum", "prod", "welford")
        near(got, want, 1e-4 if loose else 0, 1e-3 if loose else 0)


SCANS = [(op, d) for op in ops.SCANS for d in DTYPES if kernels.scans(op, d)]


@pytest.mark.parametrize(("op", "dtype"), SCANS, ids=short)
def test_scan(run, op, dtype):
    x = rows(dtype, 2 * TILE, finite=op == "prod")
    want = scan(op, x, 1)
    results = run(kernels.scan(op, dtype), [x, *(w[:, TILE - 1].contiguous() for w in want)], [ROWS * TILE] * len(want) * 2)
    for k, whole in enumerate(want):
        got = torch.cat([results[k].reshape(ROWS, TILE), results[len(want) + k].reshape(ROWS, TILE)], 1)
        loose = got.is_floating_point() and op in ("sum", "prod", "logaddexp")
        near(got, whole, 1e-4 if loose else 0, 1e-3 if loose else 0)


SORTS = [(op, d, *bits) for op in ops.ROW_ORDERS for d in DTYPES if kernels.sorts(d) for bits in kernels.BITS]


@pytest.mark.parametrize(("op", "dtype", "low", "lanes"), SORTS, ids=short)
def test_sort(run, op, dtype, low, lanes):
    x = torch.randint(-20, 20, (ROWS, TILE), generator=torch.Generator().manual_seed(2)).to(dtype)
    x[0, 3], x[0, 5] = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    want = scan(op, x, 1)
    results = run(kernels.sort(op, dtype, low, lanes), [x], [ROWS * TILE] * len(want))
    for got, whole in zip(results, want, strict=True):
        assert torch.equal(got.reshape(ROWS, TILE), whole)


SCATTERS = [(mode, d) for mode in ("add", "mul", "max", "min") for d in TRITON_TYPES if scatter_atomic(mode, d)]


@pytest.mark.parametrize(("mode", "dtype"), SCATTERS, ids=short)
def test_scatter(run, mode, dtype):
    generator = torch.Generator().manual_seed(5)
    place = torch.randint(
        -1, 128, (128,), generator=generator
    )  # collisions, places without a value, and values without a place
    values = torch.randint(0, 50, (128,), generator=generator).to(dtype)
    (got,) = run(kernels.scatter(mode, dtype), [place, values], [128])
    kept = place >= 0
    reduce_mode = {"add": "sum", "max": "amax", "min": "amin"}[mode]
    want = torch.zeros(128, dtype=torch.int64).scatter_reduce(0, place[kept], values.long()[kept], reduce_mode)
    near(got, want.to(dtype))


@pytest.mark.interpret
def test_kernels_given_as_text_run_interpreted():
    source = """
import triton
import triton.language as tl
from kgen.templates.triton.device import library as lib

@triton.jit
def kernel(x, y):
    i = tl.arange(0, 8)
    tl.store(y + i, lib.exp(tl.load(x + i)) + tl.sum(tl.load(x + i), 0))
"""
    x, y = torch.rand(8), torch.empty(8)
    with interpret.patched():
        names: dict[str, Any] = {}
        exec(source, names)
        names["kernel"][(1,)](x, y)
    near(y, x.exp() + x.sum(), 1e-6)


@pytest.mark.interpret
def test_what_is_patched_comes_back_after_an_error():
    before = library.exp, tl.sum, tl.core.load, triton.knobs.runtime.interpret
    with interpret.patched():
        assert sys.modules[library.__name__] is not library
    with pytest.raises(ZeroDivisionError), interpret.patched():
        raise ZeroDivisionError
    from kgen.templates.triton.device import library as after

    assert after is sys.modules[library.__name__] is library
    assert (after.exp, tl.sum, tl.core.load, triton.knobs.runtime.interpret) == before


# ---- compiled for GPUs that are not here


@pytest.mark.ptx
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_every_kernel_compiles(tmp_path, dtype, capability):
    for kernel in kernels.every_kernel(dtype):
        elementwise = kernel.lanes == 128
        if elementwise or capability == 90 or dtype is torch.float32:  # folds differ less between GPUs than their time is worth
            kernel.compile(tmp_path, capability)


@pytest.mark.ptx
@pytest.mark.parametrize("capability", [80, 90])
def test_conversions_random_numbers_and_scatters_compile(tmp_path, capability):
    kernels.bitcasts(BITCASTS).compile(tmp_path, capability)
    kernels.random_numbers().compile(tmp_path, capability)
    few_elements().compile(tmp_path, capability)
    for mode, dtype in SCATTERS:
        kernels.scatter(mode, dtype).compile(tmp_path, capability)
    for narrow in ops.NARROW_FLOATS:
        if capability >= 90 or narrow is not torch.float8_e4m3fn:  # Triton has this format from sm_89 on
            kernels.narrow_floats(narrow).compile(tmp_path, capability)


@pytest.mark.ptx
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=short)
def test_arithmetic_rounds_once(tmp_path, dtype):
    """No approximate division or root, no flushing of subnormals, no contraction of multiplications and additions, but in the
    assembly of `device/rounded.py`, whose results test_rounded.py compares."""
    kernel = kernels.Kernel("arithmetic", 128)
    for op in ("truediv", "truncdiv", "reciprocal", "sqrt", "neg", "maximum", "minimum", "nextafter", "copysign"):
        args = [kernel.load(dtype) for _ in range(ops.OPS[op].arity)]
        kernel.store(ops.result_dtype(op, (dtype,)), kernel.bind(TRITON_OPS[op].format(*args)))
    product = kernel.bind(TRITON_OPS["mul"].format(kernel.load(dtype), kernel.load(dtype)))
    kernel.store(dtype, kernel.bind(TRITON_OPS["add"].format(product, kernel.load(dtype))))
    ptx = kernel.compile(tmp_path, 90)
    plain = re.sub(r"// begin inline asm.*?// end inline asm", "", ptx, flags=re.DOTALL)
    assert not re.search(r"\.approx|\.ftz|\.full|\bfma\.", plain.replace("cvt.rzi.ftz", ""))
    assert "div.rn" in ptx
    assert "sqrt.rn" in ptx
