"""Matmuls that estimates of templates were never compared with measurements on: windows, which the library computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.cost import model
from kgen.ir import values as vs
from kgen.ir.plan import Schedule, members
from kgen.only import only
from kgen.report.record import Record, recording
from kgen.scheduler import Options
from kgen.verdict import FusionDemand, Reason
from tests.kernels import plans

OPTIONS = {"cpp": Options(), "triton": Options(gpu_everywhere=True)}
TEMPLATES = {"cpp": "cpp_matmul", "triton": "triton_matmul"}
IN_ONE_KERNEL = FusionDemand("aten.convolution", "aten.relu", True)

pytestmark = pytest.mark.parametrize("back_end", OPTIONS)


@pytest.fixture(autouse=True)
def slow_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the estimates alone, templates would win."""
    monkeypatch.setattr(model, "vendor_seconds", lambda problem: 1e9)


def r(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def convolution(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, w, padding=1))


IMAGE = (r(2, 8, 10, 10), r(16, 8, 3, 3))
WINDOWS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "convolution": (convolution, IMAGE),
    "without padding": (lambda x, w: F.relu(F.conv2d(x, w)), IMAGE),
    "along one dimension": (lambda x, w: F.relu(F.conv1d(x, w, stride=2)), (r(2, 8, 40), r(16, 8, 3))),
    "unfolded rows": (lambda x, w: F.relu(x.unfold(1, 32, 1).reshape(-1, 32) @ w), (r(4, 63), r(32, 16))),
}
PACKED = torch.zeros(48, 32, dtype=torch.uint8), r(48, 2)


def unpacked(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """Two numbers in a byte, and a scale for each 32 of them: bytes and scales are the same for neighbours."""
    w = torch.stack((packed & 15, packed >> 4), -1).flatten(1).unflatten(1, (-1, 32))
    return F.relu(F.linear(x, ((w.to(x.dtype) - 8) * scale[..., None]).flatten(1)))


MATRICES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "matmul": (lambda x, w: F.relu(x @ w), (r(64, 32), r(32, 48))),
    "a slice of columns": (lambda x, w: F.relu(x[:, 3:35] @ w[:, ::2]), (r(64, 40), r(32, 96))),
    "gathered rows": (lambda x, w, i: F.relu(x[i] @ w), (r(90, 32), r(32, 48), torch.arange(64))),
    "numbers of 4 bits": (unpacked, (r(8, 64), *PACKED)),
    "numbers of 4 bits, one row": (unpacked, (r(1, 64), *PACKED)),
    "one tap": (lambda x, w: F.relu(F.conv2d(x, w)), (IMAGE[0].to(memory_format=torch.channels_last), r(16, 8, 1, 1))),
}


def matmuls(plan: Schedule) -> int:
    """Kernels of matmuls that templates compute."""
    return sum(one.contracts for step in plan.kernels for one in members(step))


def uncalibrated(plan: Schedule) -> list[str | None]:
    return [v.detail for v in plan.verdicts if v.reason is Reason.UNCALIBRATED]


@pytest.mark.parametrize("name", WINDOWS)
def test_the_library_has_matmuls_of_windows(name: str, back_end: str) -> None:
    f, args = WINDOWS[name]
    plan = plans(f, *args, options=OPTIONS[back_end]).forward
    (why,) = uncalibrated(plan)
    assert why is not None
    assert any(one in why for one in ("no matrix in memory", "no GPU has measured it", "slower than the library"))
    assert not matmuls(plan)
    assert len(plan.calls) == 1


@pytest.mark.parametrize("name", MATRICES)
def test_matrices_are_no_windows(name: str, back_end: str) -> None:
    f, args = MATRICES[name]
    plan = plans(f, *args, options=OPTIONS[back_end]).forward
    assert not uncalibrated(plan)
    assert matmuls(plan) == 1
    assert not plan.calls


@pytest.mark.parametrize("last_axis", [False, True])
def test_computed_operands_with_gaps_in_memory(last_axis: bool, back_end: str) -> None:
    """Powers of complex numbers: every other number along k, which is the last axis of the left operand's tiles alone."""

    def power(z: Tensor) -> Tensor:
        return z[..., 0].square() + z[..., 1].square()

    x, z = r(64, 32), r(48, 32, 2)
    plan = plans(
        lambda x, z: F.relu(power(z) @ x.t() if last_axis else x @ power(z).t()), x, z, options=OPTIONS[back_end]
    ).forward
    (kernel,) = (step for step in plan.kernels if any(one.contracts for one in members(step)))
    computed = any(load.attr[0] == "arg1_1" for one in members(kernel) for s in one.statements for load in vs.loads(s.roots))
    assert computed == (last_axis or back_end == "cpp")


@pytest.mark.parametrize("how", [{"demands": (IN_ONE_KERNEL,)}, {"stable": True}], ids=["demanded", "stable"])
def test_who_asks_gets_a_template(how: dict[str, Any], back_end: str) -> None:
    options = Options(gpu_everywhere=back_end == "triton", **how)
    plan = plans(convolution, *IMAGE, options=options).forward
    assert (len(plan.kernels), len(plan.calls), matmuls(plan)) == (1, 0, 1)
    assert not uncalibrated(plan)


@pytest.mark.cpu
@pytest.mark.interpret
@pytest.mark.parametrize("forced", [False, True], ids=["the library", "a template"])
def test_results(forced: bool, back_end: str) -> None:
    options = {"cache": False, "gpu_interpreter": back_end == "triton"}
    with (
        recording() as seen,
        only(TEMPLATES[back_end], lambda configs: configs[0]) if forced else nullcontext(),
        torch.no_grad(),
    ):
        found = torch.compile(convolution, backend="kgen", fullgraph=True, options=options)(*IMAGE)
    torch.testing.assert_close(found, convolution(*IMAGE), rtol=1e-5, atol=1e-5)
    (graph,) = seen.graphs
    assert isinstance(graph, Record)
    assert (matmuls(graph.plan), len(graph.plan.calls)) == (forced, not forced)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize(("length", "between"), [(60, False), (57, True)])
def test_computed_operands_in_tf32_of_rows_between_loads(length: int, between: bool, back_end: str) -> None:
    plan = plans(lambda x, w: F.relu(x) @ w, r(64, length), r(length, 48), options=OPTIONS[back_end]).forward
    kernels = [step for step in plan.kernels if any(one.contracts for one in members(step))]
    computed = [load for k in kernels for one in members(k) for s in one.statements for load in vs.loads(s.roots)]
    assert ("arg0_1" in {load.attr[0] for load in computed}) == (not between or back_end == "cpp")
