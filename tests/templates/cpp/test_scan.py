"""Cumulative operations in C++: results against eager for every operation, dtype, length and direction; extreme floats; one row
shared by threads; and that the generated code scans along the lanes."""

from __future__ import annotations

import ctypes
import itertools
import math
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from codegen import Row, gradients, near, report, run_rows, tensors
from kernels import plans

from kgen.ir.index import Sizes
from kgen.ir.plan import Schedule
from kgen.scheduler import choose_loops
from tests.rendering import cpp_text
from tests.slow import slow_but

pytestmark = pytest.mark.cpu

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
LENGTHS = (1, 15, 16, 17, 31, 1000, 4097)
# How far results may be from those in float64, in units of the largest one; a 16-bit sum accumulates in float32.
TOLERANCE = {torch.float32: 2e-7, torch.float64: 1e-14, torch.bfloat16: 5e-3, torch.float16: 6e-4}
SCANS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "cumsum": lambda x, dim: x.cumsum(dim, dtype=x.dtype), "cumprod": lambda x, dim: x.cumprod(dim, dtype=x.dtype),
    "cummax": lambda x, dim: tuple(x.cummax(dim)), "cummin": lambda x, dim: tuple(x.cummin(dim)),
    "logcumsumexp": torch.logcumsumexp,
}  # fmt: skip


def dtypes_of(op: str) -> tuple[torch.dtype, ...]:
    return FLOATS if op == "logcumsumexp" else (*FLOATS, *INTEGERS, *((torch.bool,) if op in ("cummax", "cummin") else ()))


def function(op: str, axis: int, reverse: bool) -> Callable[[torch.Tensor], Any]:
    def run(x: torch.Tensor) -> Any:
        found = SCANS[op](x.flip(axis) if reverse else x, axis)
        return tuple(t.flip(axis) for t in found) if reverse and isinstance(found, tuple) else found

    return run


def values(op: str, dtype: torch.dtype, length: int, axis: int) -> torch.Tensor:
    """Few distinct values for extremes, so that there are ties; factors near one for running products."""
    generator = torch.Generator().manual_seed(length)
    shape = (3, length) if axis == 1 else (length, 5)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.1
    if not dtype.is_floating_point:
        return torch.randint(0, 40, shape, generator=generator).to(dtype)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if op == "cumprod":
        x = 1 + x * 0.01
    if op in ("cummax", "cummin"):
        x = (x * 2).round()
        x[0, -1] = math.inf
        x[-1, length // 2 if axis == 1 else 1] = math.nan
    return x.to(dtype)


def agrees(fn: Callable[..., Any], tolerance: float | None) -> Callable[[Sequence[Any], Any, Any], None]:
    """Equal results where nothing is rounded, else results near those in float64."""

    def compare(args: Sequence[Any], got: Any, want: Any) -> None:
        exact = tensors([fn(*(a.double() if a.is_floating_point() else a for a in args)), *args])
        for a, b, e in zip(tensors(got), tensors(want), exact, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            if tolerance is None or not b.is_floating_point():
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
            else:
                scale = max(float(e.abs().max()), 0.1)
                torch.testing.assert_close(a.double(), e.double(), rtol=0, atol=tolerance * scale)

    return compare


def row(op: str, dtype: torch.dtype, lengths: Sequence[int], axis: int, reverse: bool) -> Row:
    fn = function(op, axis, reverse)
    exact = op in ("cummax", "cummin") or not dtype.is_floating_point
    tolerance = None if exact else TOLERANCE[dtype] * {"cumsum": 1, "cumprod": 8}.get(op, 32)
    name = f"{op}-{dtype}-{lengths}-{axis}-{'back' if reverse else 'forward'}"
    samples = [[values(op, dtype, n, axis)] for n in lengths]
    return Row(name, fn, samples, agrees(fn, tolerance), dynamic=len(lengths) > 1)


def check(rows: list[Row]) -> None:
    failures = run_rows(rows)
    assert not failures, f"{len(failures)} of {len(rows)} rows fail\n{report(failures)}"


# The other two pairs of an axis and a direction run in `test_dtypes_with_symbolic_lengths`.
@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("axis", "reverse"), slow_but(lambda axis, reverse: axis == reverse, itertools.product((0, 1), (False, True)))
)
def test_lengths(axis: int, reverse: bool) -> None:
    check([row(op, torch.float32, [n], axis, reverse) for op in SCANS for n in LENGTHS])


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("axis", "reverse"), slow_but(lambda axis, reverse: axis != reverse, itertools.product((0, 1), (False, True)))
)
def test_dtypes_with_symbolic_lengths(axis: int, reverse: bool) -> None:
    lengths = [31, *(n for n in LENGTHS if n not in (1, 31))]
    check([row(op, dtype, lengths, axis, reverse) for op in SCANS for dtype in dtypes_of(op)])


# ---- several in one kernel, prologues, epilogues --------------------------------------------------------------------

X = torch.randn(37, 1003, generator=torch.Generator().manual_seed(1))
FUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "epilogue": lambda x: x.cumsum(-1) * 2 + 1,
    "prologue": lambda x: (x.exp() * 0.1).cumsum(-1),
    "constant": lambda x: torch.ones_like(x).cumsum(-1) + x,
    "several": lambda x: (x.cumsum(-1), x.cummax(-1)[0], (x * 0.01 + 1).cumprod(-1), x.logcumsumexp(-1)),
    "chained": lambda x: x.cumsum(-1).cummax(-1)[0].cumsum(-1),
    "softmax": lambda x: (x * 0.1).cumsum(-1).softmax(-1),
    "normalised": lambda x: x.softmax(-1).cumsum(-1),
    "reduced": lambda x: x.cumsum(-1).sum(-1),
    "three_axes": lambda x: x.view(37, 17, 59).cumsum(1),
    "turned_epilogue": lambda x: x.flip(-1).cumsum(-1).flip(-1) * x,
    "turned_back": lambda x: x.cumsum(-1).flip(-1),
    "turned_rows": lambda x: x.cumsum(-1).flip(0) + x,
    "positions": lambda x: x.flip(-1).cummax(-1)[1].flip(-1),
    "positions_and_kept_values": lambda x: (x.cummax(-1)[1], x.cummax(-1)[0] - x.cummax(-1)[0].amax(-1, keepdim=True)),
    "values_and_kept_positions": lambda x: (x.cummin(-1)[0], x.cummin(-1)[1] * x.sum(-1, keepdim=True)),
    "few_columns": lambda x: x[:, :3].cumsum(-1),
}


def test_fused() -> None:
    check([Row(name, fn, [[X]], near(fn)) for name, fn in FUSED.items()])


FILL = 'extern "C" void fill() { volatile char bytes[1 << 18]; for (int i = 0; i < 1 << 18; ++i) bytes[i] = -1; }'


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masks_of_two_scans_survive_a_lack_of_registers(dtype: torch.dtype, tmp_path: Path) -> None:
    """GCC 12 kept 16 bits of a mask on the stack and read 64: the other bits were what lay there."""

    def extremes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*x.cummax(1), *x.cummin(1))

    library = tmp_path / "fill.so"
    subprocess.run(["g++", "-O0", "-shared", "-fPIC", "-x", "c++", "-", "-o", library], input=FILL, text=True, check=True)
    fill = ctypes.CDLL(str(library)).fill
    run = torch.compile(extremes, backend="kgen", fullgraph=True)
    x = torch.randint(0, 3, (7, 50), generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = extremes(x)
    for _ in range(3):
        fill()
        assert all(map(torch.equal, run(x), expected))


def test_gradients() -> None:
    functions = (
        lambda x: x.cumsum(-1),
        lambda x: x.cumsum(0),
        lambda x: x.cumsum(-1).softmax(-1),
        lambda x: x.logcumsumexp(-1),
    )
    check([Row(str(k), fn, [[X]], near(gradients(fn)), backward=True) for k, fn in enumerate(functions)])


def test_the_gradient_of_a_running_sum_is_one_kernel() -> None:
    assert plans(lambda x: x.flip(-1).cumsum(-1).flip(-1), X).kernels == 1
    assert plans(lambda x: x.flip(0).cumsum(0).flip(0) + x, X).kernels == 1


# ---- extreme floats -------------------------------------------------------------------------------------------------

EXTREMES = {
    "infinities": [1.0, math.inf, 2.0, -math.inf, 1.0],
    "nan": [1.0, math.nan, 2.0, math.inf],
    "zeros": [-0.0, -0.0, 0.0, -0.0],
    "zero_before_large": [0.0, 1e30, 1e30, 1e30, 1e30],
    "large_before_small": [1e30, 1e5, 1e-30, 1e-30, 1e-30, 1e20],
    "neighbours_that_overflow": [-3e38, 3e38, 3e38, -3e38, -3e38],
    "neighbours_that_vanish": [1e20, 1e-25, 1e-22, 1e20, 1e20],
    "nothing": [-math.inf, -math.inf, -math.inf],
    "steps": [-500.0, -100.0, 50.0, 0.0, 80.0, -math.inf, 300.0],
}


def special(op: str, dtype: torch.dtype) -> torch.Tensor:
    """Each list of extremes at every distance from the start of a vector."""
    scale = {torch.float64: 1e270}.get(dtype, 1.0)
    fill = 1.0 if op == "cumprod" else -3.0 if op in ("cummax", "logcumsumexp") else 0.0
    rows = torch.full((len(EXTREMES) * 9, 53), fill, dtype=torch.float64)
    for k, numbers in enumerate(EXTREMES.values()):
        wide = [x * scale if 1e29 < abs(x) < math.inf else x / scale if 0 < abs(x) < 1e-21 else x for x in numbers]
        for at in range(9):
            rows[k * 9 + at, 2 * at : 2 * at + len(wide)] = torch.tensor(wide, dtype=torch.float64)
    return rows.to(dtype)


@pytest.mark.parametrize("op", SCANS)
def test_extreme_floats(op: str) -> None:
    def compare(_: Sequence[Any], got: Any, want: Any) -> None:
        for a, b in zip(tensors(got), tensors(want), strict=True):
            rounding = {torch.float64: 1e-13, torch.float32: 2e-6}.get(b.dtype, 1e-2) if b.is_floating_point() else 0
            torch.testing.assert_close(a, b, rtol=rounding, atol=rounding if op == "logcumsumexp" else 0, equal_nan=True)
            if b.is_floating_point():
                assert torch.equal(a.signbit() & (a == 0), b.signbit() & (b == 0)), "a zero of the other sign"

    fn = function(op, 1, False)
    check([Row(str(dtype), fn, [[special(op, dtype)]], compare) for dtype in (torch.float32, torch.float64, torch.bfloat16)])


# ---- few long rows --------------------------------------------------------------------------------------------------

LONG: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "sum": (lambda x: (x * 2).cumsum(-1).tanh(), torch.randn(100_003, generator=torch.Generator().manual_seed(2))),
    "product": (lambda x: (x * 1e-3 + 1).cumprod(-1), torch.randn(50_000, generator=torch.Generator().manual_seed(2))),
    "integers": (lambda x: (x.cumsum(-1), x.cumprod(-1)), torch.arange(-50_000, 50_001) | 1),
    "extremes": (lambda x: (*x.cummax(-1), *x.cummin(-1)), torch.arange(120_003).mul(7919).remainder(1009).view(3, -1).float()),
    "log": (lambda x: x.logcumsumexp(-1), torch.randn(2, 40_009, generator=torch.Generator().manual_seed(2))),
    "chained": (lambda x: x.cumsum(-1).cumsum(-1), torch.randn(50_000, generator=torch.Generator().manual_seed(2))),
    "back": (lambda x: x.flip(0).cumsum(0).flip(0), torch.randn(50_000, generator=torch.Generator().manual_seed(2))),
}


def test_long_rows() -> None:
    check([Row(name, fn, [[x]], near(fn)) for name, (fn, x) in LONG.items()])


@pytest.mark.parametrize("name", ["sum", "extremes", "log"])
def test_long_rows_repeat_bit_by_bit(name: str) -> None:
    fn, x = LONG[name]
    compiled = torch.compile(fn, backend="kgen")
    first = tensors([compiled(x)] if isinstance(compiled(x), torch.Tensor) else list(compiled(x)))
    for _ in range(20):
        again = compiled(x)
        for a, b in zip(first, tensors([again] if isinstance(again, torch.Tensor) else list(again)), strict=True):
            assert torch.equal(a, b)


# ---- generated code -------------------------------------------------------------------------------------------------


def text_of(plan: Schedule) -> str:
    (kernel,) = plan.kernels
    return cpp_text(choose_loops(kernel, plan.graph, Sizes(plan.graph.size_hints), 64), plan.graph)


@pytest.mark.parametrize("op", SCANS)
def test_a_contiguous_scan_runs_along_the_lanes(op: str) -> None:
    text = text_of(plans(function(op, 1, False), X).forward)
    assert re.search(r"vector_loop<L>\(0, 1003, \[&\]\(int64_t y0, auto w\)", text), text
    assert text.count("for (") == 1, text  # over the tasks


def test_a_scan_over_rows_runs_across_the_lanes() -> None:
    text = text_of(plans(lambda x: x.cumsum(0), X).forward)
    assert "Running" not in text
    assert re.search(r"vector_loop<L>\([^\n]*int64_t x0, auto w\)", text), text


def test_one_long_row_is_shared_among_threads() -> None:
    text = text_of(plans(*LONG["sum"]).forward)
    assert (text.count("parallel_shares"), text.count("tanh_")) == (2, 1), text
    # a share's own running product may vanish where the running product does not; a chain needs the first scan's results
    for name in ("product", "chained"):
        assert "parallel_shares" not in text_of(plans(*LONG[name]).forward)
