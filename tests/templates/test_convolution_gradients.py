"""Templates compute convolutions, transposed ones and their gradients: natively and in Triton's interpreter, against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import kgen
from kgen.counters import counters
from kgen.only import only
from kgen.templates.contract import Config
from tests.convolution_problems import Problem, drawn
from tests.slow import slow_but

Pick = Callable[[list[Config]], Config]
MATMUL, CHANNELS, ROWS = "cpp_matmul", "cpp_conv_direct", "cpp_conv_contiguous"
GEMM, DIRECT, WEIGHT = "triton_conv", "triton_conv_direct", "triton_conv_weight"
TOGETHER = 8  # problems of one graph: most of the time goes into compilers


def library_calls() -> int:
    return sum(counters.snapshot("extern.").values())


def run(problems: Sequence[Problem], name: str, pick: Pick) -> int:
    """By the template wherever it takes a problem. The number of library calls that are left."""
    torch._dynamo.reset()
    args = [problem.args() for problem in problems]

    def all_of_them(args: list[list[Tensor]]) -> list[tuple[Tensor, ...]]:
        return [problem.all_of_it(*own) for problem, own in zip(problems, args, strict=True)]

    before = library_calls()
    with only(name, pick), torch.no_grad(), kgen.config.override(cache=False, gpu_interpreter=name.startswith("triton")):
        got = torch.compile(all_of_them, backend="kgen", fullgraph=True)(args)
    for problem, found, own in zip(problems, got, args, strict=True):
        problem.assert_right(found, *own)
        problem.assert_in_eager_layout(found, *own)
    return library_calls() - before


@pytest.mark.cpu
@pytest.mark.parametrize("first", slow_but(lambda n: n < 40, range(0, 304, TOGETHER)))
def test_random_problems_natively(first: int) -> None:
    problems = [drawn(seed) for seed in range(first, first + TOGETHER)]
    left = run(problems, MATMUL, lambda found: found[first // TOGETHER * 7 % len(found)])
    assert (left > 0) == any(problem.batch == 0 for problem in problems)  # of which no tile is made
