"""What the cost model would pick for a GPU's matmuls, by times that were measured once and are kept in a file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import cost_model
from bench.matmuls import BY_NUMBER
from bench.measure import geomean
from kgen.cost import model
from kgen.device import Device
from kgen.ir.plan import Kernel
from kgen.only import Only
from kgen.scheduler import Gpu, Options
from kgen.scheduler.selection.choose import contraction_of, problems
from kgen.templates.problem import Problem
from tests.kernels import plans

MEASURED: dict[str, Any] = json.loads(cost_model.MEASURED.read_text())


def estimates(number: str) -> dict[str, float]:
    return {c.name: c.seconds for c in cost_model.candidates(BY_NUMBER[number], MEASURED[number])}


def config(**knobs: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in knobs.items())


# The first kernel that is asked about in 18 has full-row tiles of 1024, which persistent programs refuse: their measured times
# are of the kernel that is made when these are given up, and no longer stand beside those of the others.
OTHER_KERNELS = {"18"}


def test_regret() -> None:
    """Of what was measured, the favourite costs little more than the best."""
    found: dict[str, float] = {}
    for number, rows in MEASURED.items():
        known = [c for c in cost_model.candidates(BY_NUMBER[number], rows) if not math.isnan(c.measured)]
        favourite = min(known, key=lambda c: c.seconds)
        found[number] = favourite.measured / min(c.measured for c in known)
    assert len(found) == len(MEASURED)
    compared = {number: regret for number, regret in found.items() if number not in OTHER_KERNELS}
    assert max(compared.values()) < 1.1, compared
    assert geomean(list(compared.values())) < 1.02


def test_one_step_hides_no_loads() -> None:
    """Sums of 64 are one step: small tiles wait for it each time, unless a program has the next tile's on their way. Measured,
    with four stages: 61.9 and 43.2 us."""
    matmul = replace(BY_NUMBER["16"], fn=lambda q, k, mask: q @ k.transpose(1, 2))
    found = {c.name: c.seconds for c in cost_model.candidates(matmul, {})}
    small = found["triton_matmul " + config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, GROUP=8, WARPS=4, STAGES=2)]
    knobs = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP": 8, "EPILOGUE_SUBTILES": 2}
    flat, loop = (
        found[
            "triton_matmul_persistent "
            + config(**knobs, FLATTEN=flatten, TMA_EPILOGUE=True, PROGRAMS=1, WARPS=8, STAGES=stages)
        ]
        for flatten, stages in ((True, 4), (False, 2))  # one step needs no more than two, but for those of the next tile
    )
    assert small > flat
    assert loop > flat


def test_a_program_waits_for_stores_to_rows_of_odd_length() -> None:
    """A second program on the SM does not hide them, and parts of a row share more lines. Measured: 638 and 914 us."""
    found = estimates("20")
    knobs = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP": 8}
    one, two = (
        found[
            "triton_matmul_persistent "
            + config(
                **knobs, EPILOGUE_SUBTILES=parts, FLATTEN=True, TMA_EPILOGUE=False, PROGRAMS=programs, WARPS=4, STAGES=stages
            )
        ]
        for parts, programs, stages in ((1, 1, 5), (4, 2, 3))
    )
    assert one < two


@pytest.mark.parametrize("number", ["1", "12", "13"])
def test_the_library_with_its_activation(number: str) -> None:
    """Estimated within a tenth of what it took, and no slower than the fastest templates with warps that are all compared, as
    measured."""
    found = {c.name: c for c in cost_model.candidates(BY_NUMBER[number], MEASURED[number])}
    library = found["library"]
    assert library.measured == pytest.approx(MEASURED[number]["library"]["vendor"] * 1e-6)
    assert library.seconds == pytest.approx(library.measured, rel=0.1)
    assert library.seconds < 1.05 * min(c.seconds for name, c in found.items() if "specialized" not in name)


def test_a_cpu_without_instructions_for_short_floats_has_a_slow_library_for_them() -> None:
    """A fourth of the rate of float32, which is about that of the template there."""
    slow = Device("cpu", 0, 2, 0, 0, "avx512", 16, 280e9, 1.0, 20e9)
    args = [torch.randn(1024, 1024, dtype=torch.bfloat16) for _ in range(2)]
    plan = plans(lambda x, w: torch.relu(x @ w), *args, options=Options(cpu=slow)).forward
    [kernel] = plan.kernels
    assert kernel.contracts
    theirs = [model.vendor_seconds(problems(kernel, plan.graph, cpu, None)[0][0]) for cpu in (slow, replace(slow, narrow=2.0))]
    assert 3 < theirs[0] / theirs[1] < 4.5


def problem_of(f: Callable[..., Tensor], *args: Tensor, template: str) -> Problem:
    """The one matmul of a function, as a template sees it."""
    options = Options(gpu_everywhere=True, gpu=Gpu(arch=90), only=Only(template, lambda found: found[0]))
    plan = plans(f, *args, options=options).forward
    [kernel] = (step for step in plan.kernels if isinstance(step, Kernel) and step.contracts)
    found, _ = problems(kernel, plan.graph, options.device(plan.graph, contraction_of(kernel)), options.only)
    [problem] = found
    return problem


def seconds_of(f: Callable[..., Tensor], *args: Tensor, template: str = "triton_matmul", **knobs: int) -> float:
    """The estimate for the one matmul of a function with a configuration."""
    problem = problem_of(f, *args, template=template)
    return model.seconds(problem, problem.template.config(**knobs))


TILE = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP": 8, "WARPS": 4, "STAGES": 4}


def e(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def test_rows_without_asynchronous_copies() -> None:
    """Rows of odd lengths of 16-bit numbers pass through registers, step by step. Measured: .5 to 1.25 us a step more."""
    odd, even = (seconds_of(torch.matmul, e(1024, k), e(k, 256), **TILE) for k in (4097, 4104))
    assert odd > even + 4096 // 64 * 0.2e-6


def test_masks_of_odd_lengths_make_loads_narrow() -> None:
    """Each load asks the mask for each of its elements, in whatever rows these are."""
    odd, even = (seconds_of(lambda x, w, n=n: x @ w[:, :n], e(1024, 4096), e(4096, 1024), **TILE) for n in (1023, 1016))
    assert odd > even + 4096 // 64 * 0.2e-6


def test_exact_numbers_meet_at_banks() -> None:
    """Threads along n read a tile whose neighbours are along k. Measured: 2.8 us for a step that multiplies for .5."""
    knobs = TILE | {"BLOCK_M": 16}
    x, w = e(300, 384, dtype=torch.float32), e(384, 300, dtype=torch.float32)
    turned, straight = (
        seconds_of(f, x, y, **knobs) for f, y in ((lambda x, w: x @ w.t(), e(300, 384, dtype=w.dtype)), (torch.matmul, w))
    )
    assert turned > 3 * straight


def test_exact_functions_take_longer() -> None:
    """A tanh that ends in 16 bits is a few instructions, one in float32 a branch for each number."""
    x, w = e(4096, 512), e(512, 512)
    exact, fast = (seconds_of(f, x, w, **TILE) for f in (lambda x, w: (x @ w).float().tanh(), lambda x, w: (x @ w).tanh()))
    assert exact > 1.5 * fast


def test_a_row_that_is_computed_is_computed_by_each_program() -> None:
    """Measured: one token's SwiGLU in front of 14336 x 4096, 55 us with a program for each column, 35 with fewer programs."""
    row, matrix = e(1, 2 * 14336), e(14336, 4096)

    def swiglu(x: Tensor, w: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up @ w

    single, several = ({"BLOCK_M": 1, "BLOCK_N": n, "BLOCK_K": 1024, "WARPS": 4} for n in (1, 4))
    computed, shared = (seconds_of(swiglu, row, matrix, template="triton_matvec", **knobs) for knobs in (single, several))
    assert computed > 1.2 * shared
    plain = seconds_of(torch.matmul, row[:, :14336], matrix, template="triton_matvec", **single)
    assert plain < 1.05 * shared


def test_kernels_in_one_launch_wait_for_the_zeros_of_each_other() -> None:
    """TMA fills up tiles of 64 rows for 16. Measured: q, k and v of 4,096, 1,024 and 1,024 columns 22.9 us, by tiles of 16 rows
    17.2 (H200, 2026-11-28, bench.regret)."""

    def linear(columns: int) -> Problem:
        return problem_of(torch.nn.functional.linear, e(16, 4096), e(columns, 4096), template="triton_matmul_tiles")

    several = [linear(columns) for columns in (4096, 1024, 1024)]
    knobs = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP": 8, "EPILOGUE_SUBTILES": 1, "TMA_EPILOGUE": True}
    config = several[0].template.config(**knobs, WARPS=4, STAGES=6)
    assert 19e-6 < model.grouped_seconds(several, config) < 26e-6


def test_what_differs_by_the_batch_alone_is_computed_for_one_row() -> None:
    """Where tiles divide the rows of a batch."""

    def scaled(x: Tensor, s: Tensor, w: Tensor) -> Tensor:
        return (x * torch.sigmoid(s)[:, None]) @ w

    divided, other = (seconds_of(scaled, e(b, n, 256), e(b, 256), e(256, 64), **TILE) for b, n in ((128, 832), (104, 1024)))
    assert divided == pytest.approx(other, rel=0.01)
    across = seconds_of(scaled, e(128, 840, 256), e(128, 256), e(256, 64), **TILE)
    assert across > 1.1 * divided


def test_of_a_table_an_epilogue_reads_the_rows_that_are_chosen() -> None:
    """The whole table made the doubt of what is read no finite number."""

    def gated(x: Tensor, w: Tensor, table: Tensor, at: Tensor) -> Tensor:
        return torch.erf(x @ w) * table[at]

    problem = problem_of(gated, e(2, 512), e(512, 64), e(100000, 64), e(2, dtype=torch.int64), template="triton_matmul")
    assert problem.epilogue_bytes - problem.stored_bytes == 2 * 64 * 2 + 2 * 8
    assert 0 < model.vendor_seconds(problem) < 1e-3


def library_seconds(m: int, k: int, n: int, dtype: torch.dtype = torch.float16) -> float:
    """The estimate for the library's matmul."""
    options = Options(gpu_everywhere=True, gpu=Gpu(arch=90), only=Only("triton_matmul", lambda found: found[0]))
    plan = plans(torch.matmul, e(m, k, dtype=dtype), e(k, n, dtype=dtype), options=options).forward
    [kernel] = (step for step in plan.kernels if isinstance(step, Kernel) and step.contracts)
    device = options.device(plan.graph, contraction_of(kernel))
    return model.apart_seconds(problems(kernel, plan.graph, device, options.only)[0][0])


def test_the_library_cuts_short_sums_of_rows_of_odd_lengths() -> None:
    """Measured: 4.2 us for the parts of 4,095 x 845 x 128, and none of sums of 128."""
    assert library_seconds(4095, 845, 128) - library_seconds(4095, 848, 128) > 4e-6
    assert library_seconds(4095, 129, 128) - library_seconds(4095, 136, 128) < 4e-6


@pytest.mark.parametrize(
    ("sizes", "measured"), [((3000, 770, 2310), 67e-6), ((3000, 1000, 500), 26e-6), ((1500, 700, 1200), 19e-6)]
)
def test_the_library_with_rows_of_half_a_load(sizes: tuple[int, int, int], measured: float) -> None:
    """On an H100."""
    assert library_seconds(*sizes) == pytest.approx(measured, rel=0.3)
