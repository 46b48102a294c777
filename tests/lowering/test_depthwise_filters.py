"""Gradients of depthwise filters on a GPU: reductions of the image times the gradient, taps side by side in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen import gradients, options_for, plan_of
from torch import Tensor
from torch._functorch.aot_autograd import aot_function
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

import kgen
from kgen.capture.decompositions import TABLE
from kgen.ir.plan import Call, Kernel, Schedule
from kgen.lowering import convolution
from kgen.report.record import recording
from kgen.scheduler.analysis.memory import reads
from kgen.verdict import Outcome, Reason
from tests.convolution_problems import Problem, aten, drawn
from tests.matmuls import compiled, error
from tests.scheduler.selection.test_safe_choices import planned
from tests.slow import slow_but

bf16 = torch.bfloat16


@pytest.fixture
def short_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few points they have."""
    monkeypatch.setattr(convolution, "LEAST_POINTS", 1)


def of_filters(padding: int, stride: int = 1) -> Callable[..., Tensor]:
    def gradient(g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        n = w.dim() - 2
        how = [stride] * n, [padding] * n, [1] * n, False, [0] * n, x.shape[1], [False, True, False]
        found: Tensor = aten.convolution_backward(g, x, w, None, *how)[1]
        return found

    return gradient


def args_of(channels: int, lengths: tuple[int, ...], taps: tuple[int, ...], batch: int = 4, last: bool = True) -> list[Tensor]:
    """The gradient of a result, one point shorter along dimensions of four taps, the image and the filters."""
    made = tuple(n - (t % 2 == 0) for n, t in zip(lengths, taps, strict=True))
    sizes = [(batch, *own, channels) if last else (batch, channels, *own) for own in (made, lengths)]
    g, x = (torch.randn(size).to(bf16) for size in sizes)
    moved = (g.movedim(-1, 1), x.movedim(-1, 1)) if last else (g, x)
    return [*moved, torch.randn(channels, 1, *taps).to(bf16)]


def kernels_of(plan: Schedule) -> list[Kernel]:
    assert all(isinstance(step, Kernel) for step in plan.steps)
    return plan.kernels


def sums(kernel: Kernel) -> int:
    return sum(s.kind == "reduction" for s in kernel.statements)


@pytest.mark.parametrize("last", [True, False], ids=["channels_last", "contiguous"])
@pytest.mark.parametrize(
    ("lengths", "taps", "padding"),
    [((1500,), (4,), 1), ((56, 56), (3, 3), 1), ((28, 28), (5, 5), 2), ((28, 28), (7, 7), 3), ((8, 9, 10), (3, 3, 3), 1)],
    ids=str,
)
def test_all_taps_along_a_dimension_are_in_one_kernel(
    lengths: tuple[int, ...], taps: tuple[int, ...], padding: int, last: bool
) -> None:
    """And one more where the sums are split, which adds the parts in order."""
    plan = planned(of_filters(padding), *args_of(96, lengths, taps, 16, last))
    if last and len(taps) == 2:  # the library is faster
        assert any(isinstance(step, Call) or step.contracts for step in plan.steps)
        return
    first, *rest = kernels_of(plan)
    assert {"arg0_1", "arg1_1"} <= reads(first)
    assert len(rest) <= 1
    assert all(sums(kernel) == taps[-1] and not kernel.contracts for kernel in (first, *rest))


def of_long_filters() -> list[Tensor]:
    return args_of(64, (64, 64), (9, 9))


def of_few_points() -> list[Tensor]:
    return args_of(16, (4, 4), (3, 3))


def of_dense_filters() -> list[Tensor]:
    g, x, _ = args_of(64, (64, 64), (3, 3))
    return [g, x, torch.empty(64, 64, 3, 3, dtype=bf16)]


def test_of_other_filters_the_library_has_the_gradient() -> None:
    for args, padding in ((of_long_filters(), 4), (of_few_points(), 1)):
        plan = planned(of_filters(padding), *args)
        assert any(isinstance(step, Call) or step.contracts for step in plan.steps)


def test_on_a_cpu_it_is_a_contraction() -> None:
    plan = planned(of_filters(1), *(a.float() for a in args_of(64, (32, 32), (3, 3))), gpu=False)
    assert any(isinstance(step, Call) or step.contracts for step in plan.steps)


def test_dense_filters_stay_a_contraction() -> None:
    g, x, w = of_dense_filters()

    def gradient(g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        found: Tensor = aten.convolution_backward(
            g, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False]
        )[1]
        return found

    assert any(isinstance(step, Call) or step.contracts for step in planned(gradient, g, x, w).steps)


def backward_plan(fn: Callable[..., Any], *args: Tensor) -> Schedule:
    """The schedule of the backward graph on tensors without data."""
    plans: list[Schedule] = []

    def keep(gm: Any, _: Any) -> Any:
        with _disable_current_modes():  # reading constants needs real tensors
            plans.append(plan_of(gm, options_for(gpu=True)))
        return gm

    compiled = aot_function(fn, keep, decompositions=TABLE, keep_inference_input_mutations=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        gradients(compiled)(*args)
    return plans[-1]


def causal(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Mamba's, of a sequence whose channels are last."""
    x = x.transpose(1, 2)
    return F.silu(F.conv1d(x, w, b, padding=3, groups=x.shape[1])[..., : x.shape[-1]]).transpose(1, 2)


def causal_first(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.conv1d(x, w, b, padding=3, groups=x.shape[1])[..., : x.shape[-1]])


@pytest.mark.parametrize(("fn", "sizes"), [(causal, (8, 2048, 1536)), (causal_first, (8, 1536, 2048))])
def test_a_causal_convolution_has_no_call_backward(fn: Callable[..., Tensor], sizes: tuple[int, ...]) -> None:
    """The gradient of the bias is summed in the same kernel. Autograd puts the gradient of a slice in order; here its channels
    lie as those of the image do, for the templates of both gradients."""
    x, w, b = torch.empty(sizes, dtype=bf16), torch.empty(1536, 1, 4, dtype=bf16), torch.empty(1536, dtype=bf16)
    plan = backward_plan(fn, x, w, b)
    assert 5 in [sums(kernel) for kernel in kernels_of(plan)]
    assert [v for v in plan.verdicts if v.outcome is Outcome.FUSED and v.reason is Reason.HORIZONTAL]


@pytest.mark.interpret
@pytest.mark.usefixtures("short_sums")
@pytest.mark.parametrize("fn", [causal, pytest.param(causal_first, marks=pytest.mark.slow)])
def test_values_of_a_causal_convolution(fn: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    sizes = (2, 21, 12) if fn is causal else (2, 12, 21)
    given = torch.randn(sizes), torch.randn(12, 1, 4), torch.randn(12)
    got = gradients(torch.compile(fn, backend="kgen", options={"gpu_interpreter": True, "cache": False}))(*given)
    for one, want in zip(got, gradients(fn)(*(a.double() for a in given)), strict=True):
        assert error(one, want) < 1e-5


KINDS = {
    "ragged": (Problem((37,), (4,), (1,), (3,), (1,), groups=20), 4),
    "multiples": (Problem((9, 11), (3, 2), (2, 1), (1, 2), (1, 2), groups=6, made=3), 2),
    "wide_steps": (Problem((17, 12), (2, 5), (5, 3), (4, 6), (3, 1), groups=7), 5),
    "one_row": (Problem((12, 12), (5, 1), (1, 1), (2, 0), (1, 1), groups=16), 5),
    "transposed": (Problem((7, 6), (3, 3), (2, 2), (1, 1), (1, 1), groups=8, transposed=True, extra=(1, 0)), 3),
    "volumes": (Problem((4, 5, 6), (2, 3, 3), (1, 2, 1), (1, 1, 1), (1, 1, 1), groups=4, dtype=bf16), 3),
    "no_images": (Problem((5, 6), (3, 3), (1, 1), (1, 1), (1, 1), batch=0, groups=4), 3),
    "halves": (Problem((11, 9), (3, 7), (1, 1), (1, 3), (1, 1), groups=5, dtype=bf16), 7),
}


@pytest.mark.interpret
@pytest.mark.usefixtures("short_sums")
@pytest.mark.parametrize("kind", slow_but(lambda kind: kind in ("multiples", "transposed", "halves"), KINDS))
def test_values(kind: str) -> None:
    problem, count = KINDS[kind]
    torch._dynamo.reset()
    args = problem.args()

    def gradient(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        found: Tensor = aten.convolution_backward(g, x, w, None, *problem.how, [False, True, False])[1]
        return found

    x, w, _, g = args
    with recording() as seen, torch.no_grad(), kgen.config.override(cache=False, gpu_interpreter=True):
        got = torch.compile(gradient, backend="kgen", fullgraph=True)(x, w, g)
    want = gradient(*(a.double() for a in (x, w, g)))
    assert error(got, want) < (1e-6 if problem.dtype == torch.float32 else 1e-2)
    [graph] = seen.graphs
    assert problem.batch == 0 or sums(kernels_of(graph.plan)[0]) == count


@pytest.mark.every(2)
@pytest.mark.interpret
@pytest.mark.usefixtures("short_sums")
@pytest.mark.parametrize("first", slow_but(lambda n: n == 0, range(0, 96, 4)))
def test_random_problems(first: int) -> None:
    """With the gradients of images and biases beside them."""
    torch._dynamo.reset()
    problems = [depthwise(drawn(5000 + seed)) for seed in range(first, first + 4)]
    args = [problem.args() for problem in problems]

    def all_of_them(args: list[list[Tensor]]) -> list[tuple[Tensor, ...]]:
        return [problem.all_of_it(*own) for problem, own in zip(problems, args, strict=True)]

    with torch.no_grad(), kgen.config.override(cache=False, gpu_interpreter=True):
        got = torch.compile(all_of_them, backend="kgen", fullgraph=True)(args)
    for problem, found, own in zip(problems, got, args, strict=True):
        problem.assert_right(found, *own)
        problem.assert_in_eager_layout(found, *own)


def depthwise(problem: Problem) -> Problem:
    """The problem with one channel in each group, or one result of each channel."""
    groups = max(2, problem.groups)
    if problem.transposed:
        return replace(problem, made=1, groups=groups, channels=min(problem.channels, 3))
    return replace(problem, channels=1, groups=groups, made=min(problem.made, 3))


@pytest.mark.interpret
@pytest.mark.usefixtures("short_sums")
def test_sizes_may_be_symbols() -> None:
    torch._dynamo.reset()
    run = torch.compile(of_filters(1), backend="kgen", dynamic=True, options={"gpu_interpreter": True, "cache": False})
    for batch, side in ((2, 9), (3, 12)):
        args = [a.float() for a in args_of(8, (side, side + 1), (3, 3), batch)]
        assert error(run(*args), of_filters(1)(*(a.double() for a in args))) < 1e-5


@pytest.mark.interpret
@pytest.mark.usefixtures("short_sums")
def test_an_activation_before_it_is_computed_in_it() -> None:
    """A cheap one of the gradient; the image is read once for each tap."""

    def gradient(g: Tensor, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return of_filters(0)(torch.where(y > 0, g, 0), x, w)

    g, y, x, w = torch.randn(2, 6, 30), torch.randn(2, 6, 30), torch.randn(2, 6, 32), torch.randn(6, 1, 3)
    [kernel] = kernels_of(planned(gradient, *(torch.empty(a.shape) for a in (g, x, y, w))))
    assert len(kernel.statements) == 3
    assert error(compiled(gradient, g, x, y, w), gradient(*(a.double() for a in (g, x, y, w)))) < 1e-5


def attention_of_convolutions(x: Tensor, w: Tensor) -> Tensor:
    """Primer's: a causal convolution of three taps over projected queries, which are keys and values here as well."""
    q = F.conv1d(F.pad(x, (2, 0)), w, groups=x.shape[1]).view(x.shape[0], -1, 64, x.shape[2]).mT
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def test_short_convolutions_of_queries_leave_the_attention_one_kernel() -> None:
    """As arithmetic in float32 of the operands they kept it from being recognised: the library multiplied in float32."""
    args = torch.empty(4, 768, 1024, dtype=torch.bfloat16), torch.empty(768, 1, 3, dtype=torch.bfloat16)
    plan = planned(attention_of_convolutions, *args)
    assert not plan.calls
    assert [k.choice.template for k in plan.kernels if isinstance(k, Kernel) and k.choice] == ["triton_attention"]
