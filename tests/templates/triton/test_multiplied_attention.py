"""Attention in Triton whose weights something multiplies before they weigh values, such as dropout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from kgen.build import triton
from kgen.only import Only, only
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.scheduler.transforms.recognition import recognised
from kgen.templates import registry
from kgen.templates.attention_programs import ATTENTION, MULTIPLIED_ATTENTION
from kgen.testing import check_template
from kgen.testing.cases import cases, plain
from kgen.verdict import Reason
from tests.codegen import options_for, rendered
from tests.kernels import plans
from tests.op_case import lowered
from tests.rendering import texts_of_a_gpu
from tests.templates.triton.test_triton_attention import ARCHES, TOLERANCE, causal, r

NAME = "triton_attention_multiplied"
Multiply = Callable[..., Tensor]


def attention(multiply: Multiply, score: Multiply = lambda s: s) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        return multiply(score(q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), *more) @ v

    return function


def kept(w: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, w / 0.9, 0)


MULTIPLIED: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Tensor]]]] = {
    "kept": (attention(kept), lambda: [r(2, 3, 20, 40) > -1]),
    "kept, times": (attention(lambda w, m: w * m * 1.25, causal), lambda: [r(2, 3, 20, 40) > -1]),
    "gate of heads": (attention(lambda w, g: w * g[:, None, None]), lambda: [r(3)]),
    "every third": (attention(lambda w: w * (torch.arange(40) % 3 == 0) * 3), list),
    "divided rows": (attention(lambda w, g: w / (1 + g.abs())), lambda: [r(20, 1)]),
}


def short(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [r(2, 3, 20, 24, dtype=dtype), r(2, 3, 40, 24, dtype=dtype), r(2, 3, 40, 16, dtype=dtype)]


def with_template(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    torch._dynamo.reset()
    with only(NAME, lambda configs: configs[0]), kgen.config.override(gpu_interpreter=True, cache=False):
        report = kgen.explain(function, *args, print_report=False)
        assert any(v.reason is Reason.TEMPLATE and v.detail.startswith(NAME) for v in report.verdicts), report
        torch.manual_seed(7)
        return torch.compile(function, backend="kgen")(*args)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MULTIPLIED)
def test_it_is_right(name: str, dtype: torch.dtype) -> None:
    function, more = MULTIPLIED[name]
    args = [*short(dtype), *(t.to(dtype) if t.is_floating_point() else t for t in more())]
    want = function(*(t.double() if t.is_floating_point() else t for t in args))
    torch.testing.assert_close(with_template(function, *args).double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.interpret
def test_dropout_keeps_what_other_kernels_keep() -> None:
    function, args = attention(lambda w: F.dropout(w, 0.3)), short()
    got = with_template(function, *args)
    torch._dynamo.reset()
    torch.manual_seed(7)
    torch.testing.assert_close(got, torch.compile(function, backend="kgen")(*args))


@pytest.mark.interpret
def test_a_row_that_is_masked_as_a_whole_follows_eager() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropped: Tensor) -> Tensor:
        weights = (q @ k.mT).masked_fill(mask, -torch.inf).softmax(-1)
        return torch.where(dropped, 0, weights) @ v

    mask = r(20, 40) > 0
    mask[3] = True
    args = [*short(), mask, (r(2, 3, 20, 40) > 0.5).index_fill(2, torch.tensor([3]), value=False)]
    torch.testing.assert_close(with_template(function, *args), function(*args), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.interpret
@pytest.mark.parametrize("spelling", ["where", "times"])
def test_gradients_are_right(spelling: str) -> None:
    """Backward computes weights again, of the log-sum-exp that the template stores, and reads what forward kept."""
    multiply = {"where": kept, "times": lambda w, m: w * m / 0.9}[spelling]
    mask = r(2, 3, 20, 40) > -1

    def gradients(compiled: bool, dtype: torch.dtype) -> list[Tensor]:
        args = [t.to(dtype).requires_grad_() for t in short()]
        function = attention(multiply)
        torch._dynamo.reset()
        made = torch.compile(function, backend="kgen") if compiled else function
        return list(torch.autograd.grad(made(*args, mask).square().sum(), args))

    with only(NAME, lambda configs: configs[0]), kgen.config.override(gpu_interpreter=True, cache=False):
        got = gradients(True, torch.float32)
    for mine, theirs in zip(got, gradients(False, torch.float64), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", ARCHES)
def test_it_compiles(arch: int) -> None:
    args = [*short(torch.bfloat16), r(2, 3, 20, 40) > -1]
    options = options_for(True, Only(NAME, lambda configs: configs[0]))
    plan = plans(attention(kept), *args, options=options).forward
    [kernel] = [k for k in plan.kernels if NAME in str(getattr(k, "choice", ""))]
    made = rendered(kernel, plan, "kernel", options).launch
    assert isinstance(made, TritonKernel)
    triton.compile_kernels([made], arch)


@pytest.mark.interpret
@pytest.mark.slow
def test_it_conforms() -> None:
    template = registry.find(NAME)
    some = [plain(template, torch.bfloat16), *list(cases(template))[5::17]]
    report = check_template(template, problems=some, configs=1, device="cpu")
    assert not report.failed, str(report)


def recognised_as(function: Callable[..., Tensor], *more: Tensor) -> list[str]:
    graph = lowered(function, [r(3, 7, 10), r(3, 12, 10), r(3, 12, 5), *more])
    programs = [ATTENTION.program, MULTIPLIED_ATTENTION.program]
    return [place.operation.operator for place in recognised(graph, programs, [])]


def test_only_weights_that_are_multiplied_are_this_program() -> None:
    assert recognised_as(attention(lambda w: w)) == [ATTENTION.program.key]
    assert recognised_as(attention(kept), r(3, 7, 12) > 0) == [MULTIPLIED_ATTENTION.program.key]


OTHERS: dict[str, Multiply] = {
    "plus": lambda w, x: w + x,
    "squared": lambda w, x: w * w,
    "exponential": lambda w, x: (w * x).exp(),
    "another number": lambda w, x: torch.where(x > 0, w, 0.5),
    "divisor": lambda w, x: x / w,
}


@pytest.mark.parametrize("multiply", OTHERS.values(), ids=OTHERS)
def test_what_is_no_multiple_is_none(multiply: Multiply) -> None:
    assert recognised_as(attention(multiply), r(3, 7, 12)) == []


def test_what_a_contraction_makes_multiplies_nothing() -> None:
    def gated(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return ((q @ k.mT).softmax(-1) * (w @ k.mT).sigmoid()) @ v

    assert recognised_as(gated, r(3, 7, 10)) == []


@pytest.mark.parametrize("shape", [(2, 16, 2048, 128), (64, 8, 128, 128), (4, 12, 1024, 64)], ids=str)
def test_dropout_is_part_of_the_kernel_in_the_default_mode(shape: tuple[int, ...]) -> None:
    """Separate kernels wait for random numbers, too. Of heads of 128, tiles of 64 rows and 32 keys were the fastest."""
    args = [torch.empty(shape, dtype=torch.bfloat16) for _ in range(3)]
    made = texts_of_a_gpu(attention(lambda w: F.dropout(w, 0.1)), *args)
    [step] = [line for line in made.steps.splitlines() if NAME in line]
    assert f"BLOCK_N={32 if shape[-1] == 128 else 64}" in step
