"""Gradients of attention in Triton: right in the interpreter against float64, those of queries and keys in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import kgen
from kgen.build import triton
from kgen.cost import model
from kgen.device import Device
from kgen.ir.plan import ComboKernel, Kernel, members
from kgen.only import Only, only
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.scheduler import Options
from kgen.scheduler.selection.choose import chosen_problem
from kgen.templates.contract import Config
from kgen.templates.problem import Problem
from kgen.verdict import Reason
from tests.attention_gradients import (
    CASES,
    PLAIN,
    Score,
    arguments,
    bf16,
    by_lengths,
    by_lengths_of_queries,
    causal,
    f16,
    f32,
    gradients,
    more_of,
)  # fmt: skip
from tests.attention_plans import training_plans
from tests.attention_spellings import SPELLINGS
from tests.codegen import rendered
from tests.kernels import plans
from tests.rendering import texts_of_a_gpu

OPERANDS, VALUES = "triton_attention_backward", "triton_attention_backward_values"
SCORES, TABLE = "triton_attention_backward_scores", "triton_attention_backward_table"
QUICK = ("causal", "odd", "biased and causal")
TOLERANCE = {f32: 2e-5, f16: 1e-2, bf16: 6e-2}


def assert_right(name: str, dtype: torch.dtype, template: str, wanted: str) -> None:
    """One kernel of a template, as exact as numbers of the type allow."""
    score, mask, lengths = CASES[name]
    args = arguments(score, mask, lengths, dtype, *more_of(name))
    function = partial(gradients, score=score, mask=mask, wanted=wanted)
    torch._dynamo.reset()
    with only(template, lambda configs: configs[-1]), kgen.config.override(gpu_interpreter=True, cache=False):
        report = kgen.explain(function, *args, print_report=False)
        got = torch.compile(function, backend="kgen")(*args)
    taken = [v for v in report.verdicts if v.reason is Reason.TEMPLATE and v.detail.startswith(f"{template} ")]
    assert len({v.producer for v in taken}) == len(wanted), report
    assert len(report.kernels) == 1, report
    want = function(*(t.double() if t.is_floating_point() else t for t in args))
    for one, right in zip(got, want, strict=True):
        limit = TOLERANCE[dtype] * max(1.0, float(right.abs().max()))
        torch.testing.assert_close(one.double(), right, rtol=0, atol=limit)


@pytest.mark.every(2)
@pytest.mark.interpret
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_gradients_of_queries_and_keys_are_right(name: str) -> None:
    assert_right(name, f32, OPERANDS, "qk")


@pytest.mark.every(2)
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


@pytest.mark.parametrize(("template", "mask", "wanted"), [(OPERANDS, by_lengths, "q"), (VALUES, by_lengths_of_queries, "v")])
def test_runs_of_tiles_depend_on_the_batch(template: str, mask: Score, wanted: str) -> None:
    """Edges are worked out from a length in memory."""
    args = arguments(PLAIN, mask, (128, 128, 32, 32), f32, torch.tensor([100, 20]))
    _, made = launches(template, wanted, args, ARCHES[90], mask)
    assert all(" = tl.load(" in one.source.split("edge_loaded0")[0] for one in made.values())
    assert all("edge1 = tl.cast(" in one.source and "edge_loaded0" in one.source for one in made.values())


def launches(
    template: str, wanted: str | tuple[str, ...], args: list[Tensor], gpu: Device, mask: Score = causal
) -> tuple[Problem, dict[Config, TritonKernel]]:
    """A gradient's problem, and the kernels of the configurations that fit. Others are beside it."""
    function = partial(gradients, score=PLAIN, mask=mask, wanted=wanted)

    def plan_with(config: Config | None) -> tuple[Any, Options, Kernel]:
        def pick(configs: Sequence[Config]) -> Config:
            return config if config in configs else next(iter(configs))

        others = tuple(one for one in (OPERANDS, VALUES, SCORES, TABLE) if one != template)
        options = Options(gpu_everywhere=True, only=Only(template, pick, also=others))
        plan = plans(function, *args, options=options).forward
        own = [k for step in plan.kernels for k in members(step) if k.choice is not None and k.choice.template == template]
        return plan, options, min(own, key=lambda k: chosen_problem(k, plan.graph, gpu).flops)  # a sum, where there is one

    plan, _, kernel = plan_with(None)
    problem = chosen_problem(kernel, plan.graph, gpu)
    made: dict[Config, TritonKernel] = {}
    for config in model.feasible(problem):
        plan, options, kernel = plan_with(config)
        launch = rendered(kernel, plan, "kernel", options).launch
        assert isinstance(launch, TritonKernel)
        made[config] = launch
    return problem, made


@pytest.mark.parametrize(("dtype", "factor"), [(bf16, True), (f16, False)])
def test_sums_are_multiplied_in_place_of_scores(dtype: torch.dtype, factor: bool) -> None:
    """By the last factor, which keeps numbers of float16 in range where they are. What the sum is of, which is an operand of
    the scores as well, is read once, gradients of scores are rounded once and weights never, and multiplications are rounded
    together with what is added to them."""
    one = gradients_in_one_launch(dtype)
    for part in one.source.split("@triton.jit")[1:3]:
        loops = part.split("for n0 in")[1:]
        assert ("acc *= 0.25" in part) == factor
        assert all("r = v" in loop for loop in loops)
        assert all("lib.approximate_exp2(" in loop for loop in loops)
        assert all(loop.count("tl.load(") == 4 for loop in loops)  # two tiles, and two numbers of each row
        assert all(loop.count("lib.rounded_to") + loop.count("lib.round_to") == (not factor) for loop in loops)
    assert ("enable_fp_fusion", True) in one.options
    assert ("enable_fp_fusion", False) in gradients_in_one_launch(f32).options


def gradients_in_one_launch(dtype: torch.dtype) -> TritonKernel:
    """Those of queries and of keys, of attention with a prefix."""
    spelling = SPELLINGS["prefix"]
    args = [one.requires_grad_() for one in spelling.arguments(96, 16, dtype)]
    _, backward = training_plans(spelling.function, *args)
    [step] = [one for one in backward.kernels if isinstance(one, ComboKernel)]
    launch = rendered(step, backward, "kernel", Options(gpu_everywhere=True)).launch
    assert isinstance(launch, TritonKernel)
    return launch


@pytest.mark.ptx
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (OPERANDS, "q"), (OPERANDS, "k"), (VALUES, "v"), (OPERANDS, ("q", "rows")), (SCORES, ("q", "batches")),
        (TABLE, ("q", "table")),
    ],
)  # fmt: skip
def test_configurations_fit_without_spills(template: str, wanted: str | tuple[str, ...], head: int, arch: int) -> None:
    assert_fits(template, wanted, arguments(PLAIN, causal, (256, 256, head, head), bf16), arch)


def assert_fits(template: str, wanted: str | tuple[str, ...], args: list[Tensor], arch: int, most: int = 0) -> None:
    """Configurations keep no more than `most` bytes of a thread's registers in memory."""
    problem, made = launches(template, wanted, args, ARCHES[arch])
    assert made
    for config, one in zip(made, triton.compile_kernels(list(made.values()), arch), strict=True):
        assert one.stack <= most, (config, one.stack)
        assert one.shared <= problem.template.resources(problem, config).shared, (config, one.shared)


@pytest.mark.ptx
@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "wanted"), [(OPERANDS, "q"), (VALUES, "v"), (SCORES, ("q", "batches")), (TABLE, ("q", "table"))]
)
def test_exact_float32_fits_without_spills(template: str, wanted: str | tuple[str, ...]) -> None:
    """Both operands of such a contraction are in registers. Tiles as large as those of 16 bits had 2 to 12 KiB of a thread's
    in memory."""
    assert_fits(template, wanted, arguments(PLAIN, causal, (256, 256, 64, 64), f32), 90, most=64)


# ---- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "length", "taken"), [(512, 32768, False), (32768, 512, True)])
def test_few_rows_of_long_sums_are_two_matmuls(rows: int, length: int, taken: bool) -> None:
    """The gradient of a weight behind an activation: eight programs would make all of it."""

    def function(g: torch.Tensor, w: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return ((w @ g.t()) * torch.sigmoid(y)) @ x

    g, x = (torch.empty(length, 64, dtype=bf16) for _ in range(2))
    made = texts_of_a_gpu(function, g, torch.empty(rows, 64, dtype=bf16), torch.empty(rows, length, dtype=bf16), x)
    assert (VALUES in made.steps) is taken
