"""Attention as models write it, forward and backward, through the compilers of GPUs that are not here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex_module
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from kgen.build import triton
from kgen.capture import mask_spans
from kgen.capture.mask_spans import bound_masks
from kgen.cost import model
from kgen.ir.plan import Choice, ComboKernel, Launch, Schedule, members
from kgen.only import Only
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.scheduler.selection.choose import chosen_problem
from tests.attention_gradients import r
from tests.attention_plans import GPU, training_plans
from tests.attention_spellings import documents, gpt2, softcap, window
from tests.codegen import options_for, rendered
from tests.templates.triton.test_triton_attention import ARCHES, causal, scored

LENGTH = 512
WITH_PRODUCERS = (
    "triton_attention_backward_warp_specialized",
    "triton_attention_backward_values_warp_specialized",
)
HOPPER = Only("triton_attention_warp_specialized", lambda configs: configs[0], also=WITH_PRODUCERS)
# Bytes of a thread's registers that may go to memory: a window's gradient of the values takes 8 on compute capability 8.0.
SPILLED = 8


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = flex_attention(q, k, v, lambda s, b, h, m, n: 20 * torch.tanh(s / 20) - 0.1 * (m - n).abs())
    assert isinstance(out, Tensor)
    return out


def ids() -> Tensor:
    return (torch.arange(LENGTH) // 100).expand(1, -1).contiguous()


PATTERNS: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Tensor]]]] = {
    "causal": (scored(causal), list),
    "GPT-2": (gpt2, list),
    "window": (window, list),
    "softcap": (softcap, list),
    "documents": (documents, lambda: [ids()]),
    "flex": (flex, list),
}


def attention_of(plan: Schedule) -> list[Launch]:
    """The launches of a plan with a template of attention."""
    return [one for one in plan.kernels if "attention" in str(members(one)[0].choice)]


def compiled(launches: list[tuple[Schedule, Launch]], arch: int) -> None:
    """With the first configuration that fits the GPU: nothing is spilled, and shared memory is what the template says."""
    made = [_configured(plan, one, arch) for plan, one in launches]
    kernels = [
        rendered(one, plan, "kernel", options_for(True, GPU)).launch for (plan, _), (one, _) in zip(launches, made, strict=True)
    ]
    for one, (_, shared) in zip(
        triton.compile_kernels([k for k in kernels if isinstance(k, TritonKernel)], arch), made, strict=True
    ):
        assert one.stack <= SPILLED
        assert one.shared <= shared


def _configured(plan: Schedule, launch: Launch, arch: int) -> tuple[Launch, int]:
    """A launch, and the bytes of shared memory that its template asks for."""
    problems = [chosen_problem(one, plan.graph, ARCHES[arch]) for one in members(launch)]
    config = next(c for c in model.feasible(problems[0]) if all(model.fits(one, c) for one in problems))
    shared = max(one.template.resources(one, config).shared for one in problems)
    pairs = zip(members(launch), problems, strict=True)
    parts = tuple(replace(one, choice=Choice(problem.template.name, config.values)) for one, problem in pairs)
    return (replace(launch, members=parts) if isinstance(launch, ComboKernel) else parts[0]), shared


def plans_of(name: str, head: int, **how: Any) -> list[tuple[Schedule, Launch]]:
    function, more = PATTERNS[name]
    operands = [r(1, 2, LENGTH, head, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    return [(plan, one) for plan in training_plans(function, *operands, *more(), **how) for one in attention_of(plan)]


@pytest.mark.ptx
def test_forward_and_gradients_in_one_launch_compile() -> None:
    """Of a finite mask, whose tiles are left out by what is found at run time, with a log-sum-exp."""
    launches = plans_of("GPT-2", 64)
    assert [len(members(one)) for _, one in launches] == [1, 1, 2]
    compiled([launches[0], launches[2]], 90)


@pytest.mark.ptx
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("name", PATTERNS)
def test_training_compiles(name: str, head: int, arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)  # torch asks for a GPU here
    launches = plans_of(name, head)
    assert [len(members(one)) for _, one in launches] == [1, 1, 2]
    compiled(launches, arch)


@pytest.mark.ptx
@pytest.mark.parametrize(("only", "head"), [(GPU, 64), (GPU, 128), (HOPPER, 64)], ids=["portable", "long", "Hopper"])
def test_spans_of_masks_compile(only: Only, head: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of documents: each program reads where its tiles begin and end, forward and in gradients."""
    monkeypatch.setattr(mask_spans, "LEAST", 256)
    monkeypatch.setattr(mask_spans, "LEAST_WORK", 0)
    launches = plans_of("documents", head, only=only, after_split=lambda gm: bound_masks(gm, True, lambda *_: True))
    assert sorted(len(members(one)) for _, one in launches) == [1, 1, 2]
    for plan, one in launches:
        made, _ = _configured(plan, one, 90)
        source = rendered(made, plan, "kernel", options_for(True, only)).launch.source
        assert re.search(r"edge_loaded\d", source)
    compiled(launches, 90)


@pytest.mark.ptx
def test_scores_that_are_compared_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first half of a function keeps for the second one may be a truth value, in masked tiles and in whole ones."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)  # torch asks for a GPU here
    most = torch.arange(2, dtype=torch.int32)

    def bounded(s: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return torch.where(s <= most[b], torch.where(m >= n, s, -math.inf), -math.inf)

    operands = [r(2, 2, LENGTH, 64, dtype=torch.float16).requires_grad_() for _ in range(3)]
    plans = training_plans(lambda q, k, v: flex_attention(q, k, v, bounded), *operands, only=HOPPER)
    compiled([(plan, one) for plan in plans for one in attention_of(plan)], 90)
