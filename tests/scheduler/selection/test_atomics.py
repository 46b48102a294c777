"""What atomic operations of a GPU cost that meet."""

from __future__ import annotations

import pytest
import torch

from kgen.cost.atomics import LINE_RATE, MOST_LINES, atomics_seconds
from kgen.ir.plan import Kernel
from kgen.report.times import kernel_times
from kgen.scheduler import Options
from kgen.scheduler.transforms import scatter_copies
from tests.kernels import Plans, plans

OPTIONS = Options(gpu_everywhere=True)


@pytest.fixture(autouse=True)
def one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copies, which exist because of what is asked here."""
    monkeypatch.setattr(scatter_copies, "WORTH", 1.0)


def gathered(rows: int, columns: int) -> Plans:
    """The gradient of an embedding of so many rows, for 4096 tokens."""
    tokens, gradient = torch.zeros(4096, dtype=torch.long), torch.ones(4096, columns)
    return plans(lambda i, g: torch.zeros(rows, columns).index_add(0, i, g), tokens, gradient, options=OPTIONS)


def updating(made: Plans) -> float:
    plan = made.forward
    kernels = [kernel for kernel in plan.kernels if isinstance(kernel, Kernel)]
    return max(atomics_seconds(one, plan.graph, OPTIONS.device(plan.graph, one.statements[0].outs[0])) for one in kernels)


def test_atomics_on_few_lines_wait_for_each_other() -> None:
    """A table of 64 numbers is two lines of the cache, one of many numbers as many as are updated at a time. An instruction
    updates the neighbours of a row in a line together."""
    assert updating(gathered(4, 16)) == pytest.approx(4096 / (2 * LINE_RATE))
    assert updating(gathered(4096, 16)) == pytest.approx(4096 / (MOST_LINES * LINE_RATE))
    assert updating(gathered(1, 1)) == pytest.approx(4096 / LINE_RATE)


def test_a_slice_written_at_known_places_does_not_wait() -> None:
    made = plans(lambda x, g: torch.slice_scatter(x, g, 0, 2, 6), torch.ones(8, 16), torch.ones(4, 16), options=OPTIONS)
    assert updating(made) == 0


def test_reports_count_atomics_that_meet() -> None:
    """Memory traffic alone would say little: the table stays in the cache."""
    made = gathered(1, 4)
    plan = made.forward
    times = [kernel_times(kernel, plan, OPTIONS) for kernel in plan.kernels]
    assert max(one.estimate for one in times) > 4096 / LINE_RATE


def test_a_cpu_has_no_atomics() -> None:
    made = plans(lambda i, g: torch.zeros(4, 16).index_add(0, i, g), torch.zeros(4096, dtype=torch.long), torch.ones(4096, 16))
    plan = made.forward
    for kernel in plan.kernels:
        assert isinstance(kernel, Kernel)
        assert atomics_seconds(kernel, plan.graph, Options().device(plan.graph, kernel.statements[0].outs[0])) == 0
