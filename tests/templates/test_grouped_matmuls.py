"""Grouped matmuls, `torch._grouped_mm`: on CPUs, in Triton's interpreter, and offline, with work before and after them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from kgen.build import triton
from kgen.device import Device
from kgen.only import Only, only
from kgen.scheduler import Options
from kgen.verdict import Reason
from tests.codegen import rendered
from tests.kernels import plans

ROWS, WEIGHTS = "grouped_matmul", "grouped_matmul_weight"
BOTH = [pytest.param("cpp", marks=pytest.mark.cpu), pytest.param("triton", marks=pytest.mark.interpret)]
# Ends of groups among so many rows: empty groups, groups of no whole tile, rows behind the last one, none at all.
GROUPS = [((3, 3, 35, 70), 70), ((0, 16, 48, 64), 90), ((0, 0, 0, 0), 24), ((33,), 33), ((2, 4, 6, 8, 8, 30, 31, 37, 64), 64)]


def r(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(torch.bfloat16)


def ends(*stops: int) -> Tensor:
    return torch.tensor(stops, dtype=torch.int32)


def grouped(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """In float64, with zeros behind the last group; of two matrices, what the sum over each group makes."""
    stops = [0, *offs.tolist()]
    runs = [slice(begin, end) for begin, end in itertools.pairwise(stops)]
    if w.dim() == 2:
        return torch.stack([x.double()[:, run] @ w.double()[run] for run in runs])
    parts = [x.double()[run] @ matrix for run, matrix in zip(runs, w.double(), strict=True)]
    return torch.cat([*parts, torch.zeros(len(x) - stops[-1], w.shape[-1], dtype=torch.double)])


def compiled(language: str, kind: str, f: Callable[..., Any], *args: Tensor, kernels: int = 1) -> Any:
    """What the template makes of it, in so many kernels and no library call."""
    torch._dynamo.reset()
    how = kgen.config.override(gpu_interpreter=language == "triton", cache=False)
    with only(f"{language}_{kind}", lambda found: found[-1], also=(f"{language}_matmul",)), how:
        report = kgen.explain(f, *args, print_report=False)
        got = torch.compile(f, backend="kgen")(*args)
    assert (len(report.kernels), len(report.externs)) == (kernels, 0), report
    return got


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-2 * max(1.0, float(want.abs().max())))


@pytest.mark.every(3)
@pytest.mark.parametrize("language", BOTH)
@pytest.mark.parametrize(("stops", "rows"), [*GROUPS[:2], *(pytest.param(*one, marks=pytest.mark.slow) for one in GROUPS[2:])])
def test_rows_of_groups(language: str, stops: tuple[int, ...], rows: int) -> None:
    x, w, offs = r(rows, 48), r(len(stops), 48, 40), ends(*stops)
    got = compiled(language, ROWS, lambda x, w, o: torch._grouped_mm(x, w, offs=o), x, w, offs)
    close(got, grouped(x, w, offs))


@pytest.mark.every(3)
@pytest.mark.parametrize("language", BOTH)
@pytest.mark.parametrize(("stops", "rows"), GROUPS[:2])
def test_sums_over_groups(language: str, stops: tuple[int, ...], rows: int) -> None:
    """The gradient of the matrices: an empty group has zeros, and what is behind the last group is in no sum."""
    x, dy, offs = r(rows, 48), r(rows, 40), ends(*stops)
    x[stops[-1] :] = float("nan")
    got = compiled(language, WEIGHTS, lambda x, dy, o: torch._grouped_mm(x.t(), dy, offs=o), x, dy, offs)
    close(got, grouped(x.t(), dy, offs))


@pytest.mark.parametrize("language", BOTH)
def test_tokens_are_gathered_and_results_weighted_in_the_kernel(language: str) -> None:
    def f(x: Tensor, w: Tensor, offs: Tensor, token: Tensor, weight: Tensor) -> Tensor:
        return torch._grouped_mm(x[token] * 2, w, offs=offs) * weight[:, None]

    x, w, offs = r(30, 48), r(4, 48, 40), ends(3, 3, 35, 64)
    token, weight = torch.randint(0, 30, (70,), generator=torch.Generator().manual_seed(0)), r(70)
    got = compiled(language, ROWS, f, x, w, offs, token, weight)
    close(got, grouped(x[token] * 2, w, offs) * weight.double()[:, None])


@pytest.mark.parametrize("language", BOTH)
def test_gated_units_are_one_kernel(language: str) -> None:
    """Two grouped matmuls of the same rows are a family: one main loop with two accumulators."""

    def f(x: Tensor, w: Tensor, v: Tensor, offs: Tensor) -> Tensor:
        return F.silu(torch._grouped_mm(x, w, offs=offs)) * torch._grouped_mm(x, v, offs=offs)

    x, w, v, offs = r(70, 48), r(4, 48, 40), r(4, 48, 40) / 2, ends(3, 3, 35, 64)
    got = compiled(language, ROWS, f, x, w, v, offs)
    close(got, F.silu(grouped(x, w, offs)) * grouped(x, v, offs))


@pytest.mark.parametrize("language", BOTH)
def test_other_groups_are_no_family(language: str) -> None:
    def f(x: Tensor, w: Tensor, v: Tensor, offs: Tensor, others: Tensor) -> Tensor:
        return torch._grouped_mm(x, w, offs=offs) * torch._grouped_mm(x, v, offs=others)

    x, w, v, offs, others = r(70, 48), r(4, 48, 40), r(4, 48, 40) / 2, ends(3, 3, 35, 64), ends(20, 30, 40, 70)
    got = compiled(language, ROWS, f, x, w, v, offs, others, kernels=2)
    close(got, grouped(x, w, offs) * grouped(x, v, others))


@pytest.mark.parametrize("language", BOTH)
def test_both_gradients_are_templates(language: str) -> None:
    offs, dy = ends(3, 3, 35, 64), r(64, 40)
    own, other = ([t.clone().requires_grad_() for t in (r(64, 48), r(4, 48, 40))] for _ in range(2))
    torch._dynamo.reset()
    how = kgen.config.override(gpu_interpreter=language == "triton", cache=False)
    with only(f"{language}_{ROWS}", lambda found: found[-1], also=(f"{language}_{WEIGHTS}",)), how:
        made = torch.compile(lambda x, w, o: torch._grouped_mm(x, w, offs=o), backend="kgen")(*own, offs)
        made.backward(dy)
    exact = [t.detach().double().requires_grad_() for t in other]
    grouped(*exact, offs).backward(dy.double())
    for t, want in zip(own, exact, strict=True):
        assert t.grad is not None
        assert want.grad is not None
        close(t.grad, want.grad)


@pytest.mark.parametrize("gpu", [False, True])
def test_the_library_is_the_default(gpu: bool) -> None:
    """Nobody has measured these templates: a call of aten, unless one is demanded."""
    x, w, offs = r(70, 48), r(4, 48, 40), ends(3, 3, 35, 70)
    with kgen.config.override(gpu_interpreter=gpu, cache=False):
        report = kgen.explain(lambda x, w, o: torch.relu(torch._grouped_mm(x, w, offs=o)), x, w, offs, print_report=False)
    assert [call.operator for call in report.externs] == ["aten._grouped_mm.default"]
    assert any(v.reason is Reason.UNCALIBRATED for v in report.verdicts)


def test_other_ranks_are_library_calls() -> None:
    """Three dimensions times two: no template has these axes."""
    w, x, offs = r(4, 40, 48), r(64, 48).t(), ends(3, 3, 35, 64)
    with kgen.config.override(cache=False):
        f = torch.compile(lambda w, x, o: torch._grouped_mm(w, x, offs=o), backend="kgen")
        torch.testing.assert_close(f(w, x, offs), torch._grouped_mm(w, x, offs=offs))


@pytest.mark.every(2)
@pytest.mark.ptx
@pytest.mark.parametrize("arch", [90, 80])
def test_configurations_compile_for_gpus(arch: int) -> None:
    """The first and the last of each template: no spilled registers, and shared memory that the device has."""
    x, w, offs, dy = torch.empty(512, 256, dtype=torch.bfloat16), r(8, 256, 512), ends(*range(64, 513, 64)), r(512, 512)
    made = []
    for name, f, args in (
        (ROWS, lambda x, w, o: torch._grouped_mm(x, w, offs=o).relu(), (x, w, offs)),
        (WEIGHTS, lambda x, dy, o: torch._grouped_mm(x.t(), dy, offs=o), (x, dy, offs)),
    ):
        for place in (0, -1):
            options = Options(gpu_everywhere=True, only=Only(f"triton_{name}", lambda found, k=place: found[k]))
            plan = plans(f, *args, options=options).forward
            made.append(rendered(plan.kernels[0], plan, "kernel", options).launch)
    for compiled in triton.compile_kernels(made, arch):
        assert compiled.stack <= 64
        assert compiled.shared <= Device("cuda").shared
