"""Is each configuration of convolution templates right on a GPU? On small and odd sizes, against float64 (`bench/smoke.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from bench import smoke
from bench.conv_problems import (
    Convolution,
    FilterGradient,
    Problem,
    bf16,
    f16,
    f32,
    random_boxed,
    random_depthwise,
    random_gradient,
    random_problem,
)
from bench.smoke import Check, Task
from kgen.only import Pick, only

# Largest error of an element against the largest number, by type: float32 may be rounded to TF32.
TOLERANCE = {bf16: 0.02, f16: 4e-3, f32: 4e-3}
DIRECT, WEIGHT, BOXED = "triton_conv_direct", "triton_conv_weight", "triton_conv_warp_specialized"
DEPTHWISE = "triton_conv_depthwise"

# Problems for all configurations: tiles cross rows and images.
GEMM_CASES = (
    Convolution((3, 72, 29, 37), (200, 72, 3, 3), (1, 1), (1, 1), (1, 1), slots=2),
    Convolution((2, 64, 32, 32), (128, 64, 3, 3), (1, 1), (1, 1), (1, 1)),
    Convolution((2, 136, 23, 31), (96, 68, 5, 2), (2, 1), (3, 4), (1, 3), groups=2, last=False, dtype=f16),
    Convolution((2, 40, 15, 17), (72, 40, 3, 3), (1, 2), (0, 5), (2, 1), dtype=f32, slots=3),
    Convolution((2, 48, 6, 14, 15), (64, 48, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
)
BOXED_CASES = (
    GEMM_CASES[0],
    GEMM_CASES[1],
    Convolution((8, 256, 56, 56), (256, 256, 3, 3), (1, 1), (1, 1), (1, 1), slots=2),
    Convolution((4, 64, 64, 64), (320, 64, 3, 3), (1, 1), (1, 1), (1, 1), slots=2),
    Convolution((5, 64, 30, 31), (304, 64, 3, 3), (2, 2), (1, 1), (1, 1), dtype=f16),
    Convolution((3, 136, 23, 29), (96, 136, 5, 2), (2, 1), (3, 4), (1, 3), slots=2),
    Convolution((2, 144, 23, 31), (96, 72, 3, 3), (1, 3), (1, 2), (2, 1), groups=2),
    Convolution((2, 72, 300), (136, 72, 4), (1,), (3,), (1,), dtype=f16),
    Convolution((2, 48, 6, 14, 15), (64, 48, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
    Convolution((2, 24, 9, 17, 15), (72, 24, 3, 3, 3), (2, 1, 2), (1, 2, 0), (1, 2, 1), dtype=f16, slots=0),
)
DIRECT_CASES = (
    Convolution((3, 96, 29, 37), (96, 1, 7, 7), (1, 1), (3, 3), (1, 1), groups=96, slots=2),
    Convolution((3, 72, 29, 37), (144, 1, 3, 3), (2, 1), (1, 4), (1, 2), groups=72, last=False, dtype=f32),
    Convolution((2, 3, 65, 70), (96, 3, 7, 7), (2, 2), (3, 3), (1, 1), last=False),
    Convolution((2, 130, 300), (130, 1, 4), (1,), (3,), (1,), groups=130, last=False, dtype=f16),
    Convolution((2, 40, 6, 14, 15), (40, 1, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), groups=40),
)
DEPTHWISE_CASES = (
    Convolution((3, 96, 29, 37), (96, 1, 7, 7), (1, 1), (3, 3), (1, 1), groups=96, slots=2),
    Convolution((3, 72, 29, 37), (144, 1, 3, 3), (2, 1), (1, 4), (1, 2), groups=72, last=False, dtype=f32),
    Convolution((2, 3, 53, 70), (3, 1, 11, 11), (1, 1), (5, 5), (1, 1), groups=3, last=False, dtype=f32),
    Convolution((2, 130, 300), (130, 1, 7), (1,), (3,), (1,), groups=130, dtype=f16),
    Convolution((2, 40, 6, 14, 15), (40, 1, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), groups=40),
)
WEIGHT_CASES = (
    FilterGradient((4, 72, 29, 37), 136, (3, 3), (1, 1), (1, 1), (1, 1)),
    FilterGradient((2, 64, 32, 33), 64, (3, 2), (2, 1), (1, 4), (1, 2), last=False, dtype=f16),
    FilterGradient((3, 40, 35, 17), 72, (3, 3), (1, 2), (0, 5), (2, 1), dtype=f32),
    FilterGradient((2, 20, 900), 33, (4,), (1,), (3,), (1,), last=False),
)
RANDOM = 30


def tasks_of(template: str, count: int = RANDOM) -> list[Task]:
    """All configurations on the problems of a template, then one each on random problems."""
    if template == DEPTHWISE:
        fixed, drawn = DEPTHWISE_CASES, [random_depthwise(seed, large=True) for seed in range(count)]
    elif template == WEIGHT:
        fixed, drawn = WEIGHT_CASES, [random_gradient(seed, large=True) for seed in range(count)]
    elif template == BOXED:
        fixed, drawn = BOXED_CASES, [random_boxed(seed, large=True) for seed in range(count)]
    else:
        few = template == DIRECT
        fixed, drawn = (DIRECT_CASES if few else GEMM_CASES), [random_problem(seed, few, large=True) for seed in range(count)]
    tasks = [Task(str(one), partial(_checked, one, template), optional=True) for one in fixed]
    return tasks + [Task(str(one), partial(_checked, one, template), 7 * k, optional=True) for k, one in enumerate(drawn)]


def check(templates: Sequence[str]) -> int:
    """Prints what is wrong, and how many checks there were of each template; the exit status."""
    return smoke.check(templates, tasks_of)


def _checked(problem: Problem, template: str) -> Check:
    args = problem.make("cuda" if torch.cuda.is_available() else "cpu")
    want = problem.function(*(one.double() for one in args))
    options = {"cache": False, "gpu_interpreter": not args[0].is_cuda}

    def call(pick: Pick) -> str:
        with only(template, pick):
            got = torch.compile(problem.function, backend="kgen", fullgraph=True, options=options)(*args)
        return _difference(got, want, args[0].dtype)

    return call


def _difference(got: Tensor, want: Tensor, dtype: torch.dtype) -> str:
    """What is wrong with a result."""
    error = (got.double() - want).abs()
    bad = (~(error <= TOLERANCE[dtype] * want.abs().max())).nonzero()  # NaN as well
    if not len(bad):
        return ""
    return f"error {float(error.max()):.1e}, {len(bad)} of {want.numel()} are far off, the first at {tuple(bad[0].tolist())}"
