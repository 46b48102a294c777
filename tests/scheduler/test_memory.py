"""The most memory that a plan needs at one time: what one launch may not make early, and what runs as early as it can."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.report.traffic import peak_memory
from kgen.scheduler import Options
from kgen.scheduler.analysis import memory
from kgen.scheduler.analysis.memory import LiveBytes, is_less
from kgen.verdict import Reason
from tests.kernels import plans
from tests.scheduler.selection.test_safe_choices import planned

MATRIX = 4 * 1024 * 4096


def in_turn(x: Tensor, v: Tensor, *ws: Tensor) -> list[Tensor]:
    return [(x @ w).relu() @ v for w in ws]


@pytest.mark.usefixtures("templates_win")
@pytest.mark.parametrize("gpu", [False, True])
def test_memory_forbids_what_would_wait_there(gpu: bool) -> None:
    """Each of the first matmuls makes 16 MB for the second one behind it: made together, all would be there at once."""
    shapes = [(1024, 256), (4096, 64), *[(256, 4096)] * 4]
    options = Options(gpu_everywhere=gpu, programs=False)
    plan = plans(in_turn, *(torch.empty(*shape) for shape in shapes), options=options).forward
    assert gpu or any(v.reason is Reason.MORE_MEMORY for v in plan.verdicts)
    assert peak_memory(plan) < 2 * MATRIX


def joined(x: Tensor, v: Tensor, *ws: Tensor) -> Tensor:
    """Parts of a concatenation are copied where the graph ends, unless what makes them stores them there."""
    return torch.cat([(x @ w).exp().t() @ v for w in ws])


def test_what_is_stored_at_the_end_may_run_early() -> None:
    """In the order of their last nodes all the matmuls that make parts would run at the end, and hold on to what they read."""
    plan = planned(joined, *(torch.empty(*shape) for shape in [(1024, 256), (1024, 64), *[(256, 4096)] * 6]), gpu=False)
    assert peak_memory(plan) < 2.5 * MATRIX


def test_live_bytes_are_the_peak_of_the_plan() -> None:
    plan = planned(in_turn, *(torch.empty(*shape) for shape in [(1024, 256), (4096, 64), *[(256, 4096)] * 2]), gpu=False)
    live = LiveBytes(plan.graph, plan.steps)
    assert live.peak == peak_memory(plan)
    assert not is_less(live, live)


def scaled(rows: Tensor, *matrices: Tensor) -> list[Tensor]:
    """Each scales what a library has made by one small tensor."""
    return [torch.sort(m, 0).values * rows for m in matrices]


def test_what_shares_little_stays_apart() -> None:
    """One kernel of all would save four of 4 MB a row of numbers, and need each of them at a time."""
    shapes = [(1024, 1), *[(1024, 1024)] * 4]
    plan = planned(scaled, *(torch.empty(*shape) for shape in shapes), gpu=False)
    assert any(v.reason is Reason.BOTH_IN_MEMORY for v in plan.verdicts)


@pytest.mark.parametrize("gpu", [True, False])
def test_running_sums_are_stored_as_eager_has_them(gpu: bool) -> None:
    """They are made in float64; kernels that find them in memory read float32."""

    def f(x: Tensor) -> Tensor:
        total = F.pad(x.cumsum(1), (1, 0))
        return total[:, 3:] - total[:, :-3]

    plan = planned(f, torch.empty(30, 500), gpu=gpu)
    stored = [buffer for name, buffer in plan.graph.buffers.items() if name not in plan.local]
    assert len(stored) > 2
    assert {buffer.dtype for buffer in stored} == {torch.float32}


def several(x: Tensor) -> list[Tensor]:
    return [(x * k).sin() for k in range(1, 9)]


def test_what_statements_read_is_found_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unrolled loop is a kernel of hundreds of buffers: each pair of them was looked at anew, which took a minute."""
    [kernel] = planned(several, torch.empty(4096)).kernels
    maker = memory._Maker(kernel)
    seen: list[int] = []
    found = memory._accesses
    monkeypatch.setattr(memory, "_accesses", lambda statements: seen.append(1) or found(statements))
    for s in kernel.statements:
        assert not memory._read_before(maker, "nothing", s)
    assert len(seen) == len(kernel.statements)
