"""Templates compute convolutions, transposed ones and gradients: natively and in Triton's interpreter, against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kgen
from kgen.counters import counters
from kgen.only import only
from kgen.report.record import recording
from kgen.templates.contract import Config
from kgen.verdict import Reason
from tests.convolution_problems import Problem, drawn, laid_out
from tests.slow import slow_but

Pick = Callable[[list[Config]], Config]
MATMUL, CHANNELS, ROWS = "cpp_matmul", "cpp_conv_direct", "cpp_conv_contiguous"
GEMM, DIRECT, WEIGHT = "triton_conv", "triton_conv_direct", "triton_conv_weight"
PER_GRAPH = 8  # problems of one graph: most of the time goes into compilers


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


@pytest.mark.every(2)
@pytest.mark.cpu
@pytest.mark.parametrize("first", slow_but(lambda n: n < 16, range(0, 304, PER_GRAPH)))
def test_random_problems_natively(first: int) -> None:
    problems = [drawn(seed) for seed in range(first, first + PER_GRAPH)]
    left = run(problems, MATMUL, lambda found: found[first // PER_GRAPH * 7 % len(found)])
    assert left == 0 or any(problem.batch == 0 for problem in problems)  # no tile is made of nothing


EXPANDED = Problem(
    (1,), (2,), (1,), (3,), (1,), batch=3, groups=3, memory=("one image", "as made", "as made", "one element")
)  # fmt: skip


@pytest.mark.cpu
def test_a_bias_gradient_of_one_element_is_not_summed_with_the_filters() -> None:
    """Its channels are an axis of the image alone: the gradient has no stride along them."""
    run([EXPANDED], MATMUL, lambda found: found[0])


@pytest.mark.cpu
@pytest.mark.parametrize("first", slow_but(lambda n: n == 0, range(0, 320, 4)))
def test_random_views_natively(first: int) -> None:
    """In the default mode: tensors with gaps, in other orders and expanded, of all floating types."""
    assert_default_is_right([laid_out(seed) for seed in range(first, first + 4)])


@pytest.mark.interpret
@pytest.mark.parametrize("first", slow_but(lambda n: n == 1000, range(1000, 1080, 4)))
def test_random_views_in_the_interpreter(first: int) -> None:
    assert_default_is_right([small(laid_out(seed)) for seed in range(first, first + 4)], gpu_interpreter=True)


def assert_default_is_right(problems: Sequence[Problem], **options: bool) -> None:
    torch._dynamo.reset()
    args = [problem.args() for problem in problems]

    def all_of_them(args: list[list[Tensor]]) -> list[tuple[Tensor, ...]]:
        return [problem.all_of_it(*own) for problem, own in zip(problems, args, strict=True)]

    with torch.no_grad(), kgen.config.override(cache=False, **options):
        got = torch.compile(all_of_them, backend="kgen", fullgraph=True)(args)
    for problem, found, own in zip(problems, got, args, strict=True):
        problem.assert_right(found, *own)
        problem.assert_in_eager_layout(found, *own)


SHORT = Problem((5, 4), (3, 2), (1, 1), (1, 1), (1, 1), batch=2, channels=6, made=24)
LONG = replace(SHORT, lengths=(16, 16))


@pytest.mark.interpret
@pytest.mark.usefixtures("exact_convolutions")
@pytest.mark.parametrize("problem", [SHORT, LONG, pytest.param(replace(LONG, groups=2), marks=pytest.mark.slow)])
def test_the_bias_gradient_is_summed_with_the_filters_gradient(problem: Problem) -> None:
    """In the kernel that has the result's gradient in hand, in as many parts as its sums."""
    split = problem.lengths == LONG.lengths
    torch._dynamo.reset()

    def pick(found: list[Config]) -> Config:
        return next(one for one in found if (one.SPLIT > 1) == split)

    def gradients(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        return problem.all_of_it(x, w, b, g)[2:]

    args = problem.args()
    with only(WEIGHT, pick), torch.no_grad(), recording() as seen, kgen.config.override(cache=False, gpu_interpreter=True):
        got = torch.compile(gradients, backend="kgen")(*args)
    [graph] = seen.graphs
    assert len(graph.plan.kernels) == 1 + split  # the counters of parts are zeroed
    assert [v for v in graph.plan.verdicts if v.reason is Reason.OPERAND_REDUCTION]
    for one, want in zip(got, problem.wanted(*args)[2:], strict=True):
        torch.testing.assert_close(one.double(), want, rtol=0, atol=1e-5 * float(want.abs().max()))


@pytest.mark.every(2)
@pytest.mark.interpret
@pytest.mark.parametrize("seed", slow_but(lambda n: n < 3, range(40)))
@pytest.mark.parametrize("name", [GEMM, WEIGHT])
def test_random_problems_in_the_interpreter(name: str, seed: int) -> None:
    run([small(drawn(1000 + seed))], name, lambda found: found[seed * 7 % len(found)])


def small(problem: Problem) -> Problem:
    """The problem with fewer channels and groups."""
    return replace(problem, channels=min(problem.channels, 5), made=min(problem.made, 5), groups=min(problem.groups, 2))


# Strides by phases and by division, groups, a dilation, a transposed one: tiles cross rows and images.
EVERY = {
    "phases": Problem((8, 6), (4, 3), (2, 2), (1, 1), (1, 1), batch=3, channels=20, made=5),
    "divided": Problem((7, 5), (3, 2), (2, 3), (3, 1), (1, 2), channels=5, made=6, groups=2, channels_last=True),
    "transposed": Problem((4, 5), (3, 4), (2, 1), (1, 2), (1, 1), channels=4, made=6, transposed=True, extra=(1, 0)),
}


@pytest.mark.slow
@pytest.mark.interpret
@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize(("name", "count"), [(GEMM, 16), (WEIGHT, 12), (DIRECT, 23)])
def test_every_configuration_in_the_interpreter(name: str, count: int, kind: str) -> None:
    for number in range(count):
        run([EVERY[kind]], name, lambda found, at=number: found[min(at, len(found) - 1)])


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize(("name", "count"), [(MATMUL, 8), (CHANNELS, 8), (ROWS, 8)])
def test_every_configuration_natively(name: str, count: int, kind: str) -> None:
    for number in range(count):
        run([EVERY[kind]], name, lambda found, at=number: found[min(at, len(found) - 1)])


DEPTHWISE = Problem((9, 12), (3, 3), (1, 1), (1, 1), (1, 1), groups=17, channels_last=True)


@pytest.mark.cpu
@pytest.mark.parametrize(("name", "last"), [(CHANNELS, True), (ROWS, False)])
def test_direct_templates_take_gradients_of_depthwise_images(name: str, last: bool) -> None:
    problem = replace(DEPTHWISE, channels_last=last)
    torch._dynamo.reset()
    args = problem.args()
    with only(name, lambda found: found[0]), torch.no_grad(), recording() as seen, kgen.config.override(cache=False):
        got = torch.compile(problem.all_of_it, backend="kgen", fullgraph=True)(*args)
    problem.assert_right(got, *args)
    [graph] = seen.graphs
    taken = [v for v in graph.plan.verdicts if v.reason is Reason.TEMPLATE and v.detail.startswith(name)]
    assert len(taken) >= 2  # the result, and the gradient of the image
