"""Gradients of attention in Triton: right in the interpreter against float64, in one kernel each."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import kgen
from kgen.build import triton
from kgen.cost import model
from kgen.device import Device
from kgen.only import Only, only
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.scheduler import Options
from kgen.scheduler.selection.choose import chosen_problem
from kgen.templates.contract import Config
from kgen.templates.problem import Problem
from kgen.verdict import Reason
from tests.codegen import rendered
from tests.kernels import plans

OPERANDS, VALUES = "triton_attention_backward", "triton_attention_backward_values"
f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
Score = Callable[..., Tensor]


def r(*shape: int, dtype: torch.dtype = f32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def places(s: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(s.shape[-2], device=s.device)[:, None], torch.arange(s.shape[-1], device=s.device)


def causal(s: Tensor) -> Tensor:
    rows, columns = places(s)
    return columns <= rows


def window(s: Tensor) -> Tensor:
    rows, columns = places(s)
    return (columns <= rows) & (rows - columns < 9)


def everywhere(s: Tensor) -> Tensor:
    return causal(s) | True


# A score function, with its derivative by the score.
PLAIN = (lambda s: s * 0.25, lambda s: torch.full_like(s, 0.25))
SOFTCAP = (lambda s: 3 * torch.tanh(s / 3), lambda s: 1 - torch.tanh(s / 3) ** 2)
BIASED = (lambda s, bias: s * 0.25 + bias, lambda s, bias: torch.full_like(s, 0.25))
ALIBI = (lambda s: s * 0.25 - 0.1 * (places(s)[0] - places(s)[1]).abs(), PLAIN[1])


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    lse: Tensor,
    delta: Tensor,
    *more: Tensor,
    score: tuple[Score, Score],
    mask: Score | None,
    wanted: str = "qkv",
) -> tuple[Tensor, ...]:
    """What autograd makes of attention with weights computed again, written out."""
    s = q @ k.mT
    weights = torch.exp(score[0](s, *more).float() - lse[..., None])
    weights = weights if mask is None else torch.where(mask(s), weights, 0.0)
    ds = weights * ((g @ v.mT).float() - delta[..., None]) * score[1](s, *more).float()
    ds = (ds if mask is None else torch.where(mask(s), ds, 0.0)).to(q.dtype)
    made = {"q": lambda: ds @ k, "k": lambda: ds.mT @ q, "v": lambda: weights.to(q.dtype).mT @ g}
    return tuple(made[name]() for name in wanted)


def arguments(
    score: tuple[Score, Score], mask: Score | None, lengths: tuple[int, int, int, int], dtype: torch.dtype, *more: Tensor
) -> list[Tensor]:
    rows, keys, head, values = lengths
    q, k, v, g = (
        r(2, 3, *shape, dtype=dtype, seed=n)
        for n, shape in enumerate([(rows, head), (keys, head), (keys, values), (rows, values)])
    )  # fmt: skip
    s = score[0](q.double() @ k.double().mT, *more)
    s = s if mask is None else torch.where(mask(s), s, -math.inf)
    out = s.softmax(-1) @ v.double()
    return [q, k, v, g, s.logsumexp(-1).float(), (out * g.double()).sum(-1).float(), *more]


# A score function, a mask, rows, keys, elements of a head of queries and of values.
CASES: dict[str, tuple[tuple[Score, Score], Score | None, tuple[int, int, int, int]]] = {
    "plain": (PLAIN, None, (40, 70, 16, 16)),
    "causal": (PLAIN, causal, (150, 150, 32, 32)),
    "window": (PLAIN, window, (100, 100, 16, 16)),
    "softcap": (SOFTCAP, causal, (70, 70, 40, 24)),
    "alibi": (ALIBI, causal, (70, 90, 16, 16)),
    "bias": (BIASED, None, (40, 70, 16, 16)),
    "biased and causal": (BIASED, causal, (40, 70, 16, 48)),
    "wide": (PLAIN, causal, (33, 65, 96, 64)),
    "odd": (SOFTCAP, window, (33, 65, 37, 20)),
    "few rows": (PLAIN, None, (1, 100, 32, 32)),
}
QUICK = ("causal", "odd", "biased and causal")
TOLERANCE = {f32: 2e-5, f16: 1e-2, bf16: 6e-2}


def more_of(name: str) -> list[Tensor]:
    score, _, (rows, keys, _, _) = CASES[name]
    return [r(3, rows, keys)] if score is BIASED else []


def assert_right(name: str, dtype: torch.dtype, template: str, wanted: str) -> None:
    """One kernel for each gradient, as exact as numbers of the type allow."""
    score, mask, lengths = CASES[name]
    args = arguments(score, mask, lengths, dtype, *more_of(name))
    function = partial(gradients, score=score, mask=mask, wanted=wanted)
    torch._dynamo.reset()
    with only(template, lambda configs: configs[-1]), kgen.config.override(gpu_interpreter=True, cache=False):
        report = kgen.explain(function, *args, print_report=False)
        got = torch.compile(function, backend="kgen")(*args)
    taken = [v for v in report.verdicts if v.reason is Reason.TEMPLATE and v.detail.startswith(f"{template} ")]
    assert len({v.producer for v in taken}) == len(wanted), report
    assert len(report.kernels) == len(wanted), report
    want = function(*(t.double() for t in args))
    for one, right in zip(got, want, strict=True):
        limit = TOLERANCE[dtype] * max(1.0, float(right.abs().max()))
        torch.testing.assert_close(one.double(), right, rtol=0, atol=limit)


@pytest.mark.interpret
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_gradients_of_queries_and_keys_are_right(name: str) -> None:
    assert_right(name, f32, OPERANDS, "qk")


@pytest.mark.interpret
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_gradients_of_values_are_right(name: str) -> None:
    assert_right(name, f32, VALUES, "v")


@pytest.mark.interpret
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [f16, bf16])
@pytest.mark.parametrize("name", CASES)
def test_they_are_right_in_16_bits(name: str, dtype: torch.dtype) -> None:
    assert_right(name, dtype, OPERANDS, "qk")
    assert_right(name, dtype, VALUES, "v")


# ---- on a GPU that is not here --------------------------------------------------------------------------------------

ARCHES = {80: Device(arch=80, shared=166_912, compute_units=108), 90: Device()}


def launches(template: str, wanted: str, args: list[Tensor], gpu: Device) -> tuple[Problem, dict[Config, TritonKernel]]:
    """A gradient's problem, and the kernels of the configurations that fit."""
    function = partial(gradients, score=PLAIN, mask=causal, wanted=wanted)

    def plan_with(config: Config | None) -> tuple[Any, Options]:
        options = Options(gpu_everywhere=True, only=Only(template, lambda configs: config or next(iter(configs))))
        return plans(function, *args, options=options).forward, options

    plan, _ = plan_with(None)
    [kernel] = plan.kernels
    problem = chosen_problem(kernel, plan.graph, gpu)
    made: dict[Config, TritonKernel] = {}
    for config in model.feasible(problem):
        plan, options = plan_with(config)
        launch = rendered(plan.kernels[0], plan, "kernel", options).launch
        assert isinstance(launch, TritonKernel)
        made[config] = launch
    return problem, made


@pytest.mark.ptx
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize(("template", "wanted"), [(OPERANDS, "q"), (OPERANDS, "k"), (VALUES, "v")])
def test_configurations_fit_without_spills(template: str, wanted: str, head: int, arch: int) -> None:
    args = arguments(PLAIN, causal, (256, 256, head, head), bf16)
    problem, made = launches(template, wanted, args, ARCHES[arch])
    assert made
    for config, one in zip(made, triton.compile_kernels(list(made.values()), arch), strict=True):
        assert one.stack == 0, (config, one.stack)
        assert one.shared <= problem.template.resources(problem, config).shared, (config, one.shared)
