"""The check of attention templates has no faults of its own: its cases are theirs, and its bounds follow eager."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench import attention_backward
from bench.attention_smoke import BACKWARD, Case, bounds_of, checked, difference
from kgen.ir.plan import members
from kgen.only import Only
from kgen.scheduler import Options
from tests.kernels import plans

SMALL = replace(BACKWARD[2], sizes=(2, 2, 2, 40, 50, 16, 16))


@pytest.mark.every(5)
@pytest.mark.parametrize("template", attention_backward.TEMPLATES)
@pytest.mark.parametrize("case", BACKWARD, ids=lambda case: case.name)
def test_cases_are_the_templates(case: Case, template: str) -> None:
    if min(case.sizes[3:5]) > 500:
        case = replace(case, sizes=(*case.sizes[:3], 500, 500, *case.sizes[5:]))
    only = Only(template, lambda configs: configs[0], also=attention_backward.TEMPLATES)
    with torch.no_grad():
        plan = plans(case.of(template), *case.make("cpu"), options=Options(gpu_everywhere=True, only=only)).forward
    chosen = [one.choice.template for step in plan.kernels for one in members(step) if one.choice is not None]
    assert template in chosen


@pytest.mark.interpret
@pytest.mark.parametrize("kind", ["_values", "_table"])
def test_a_case_is_checked(kind: str) -> None:
    with torch.no_grad():
        assert checked(SMALL, f"triton_attention_backward{kind}", "cpu")(lambda found: found[0]) == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bounds_follow_eager(dtype: torch.dtype) -> None:
    """Sums that cancel are as far off as eager's are, and no farther."""
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    want = (x - x.mean(1, keepdim=True)).sum(1) + 1e-2
    eager = (x - x.mean(1, keepdim=True)).to(dtype).double().sum(1) + 1e-2
    bounds = bounds_of(eager, want)
    assert difference(eager, want, bounds) == ""
    assert "relative error" in difference(want + 3 * (eager - want) + 1e-4, want, bounds)
    spoiled = want.clone()
    spoiled[5] = torch.nan
    assert "are NaN" in difference(spoiled, want, bounds)
