"""Long rows that programs of a GPU take in steps: how long steps are, and which of a step's numbers a thread adds up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kgen.device import Gpu
from kgen.ir.index import Sizes
from kgen.ir.plan import Tiling
from kgen.scheduler import choose_tiles
from tests.rendering import texts_of_a_gpu
from tests.scheduler.selection.test_safe_choices import planned

ROWS, ALIGNED, ODD = 8192, 30720, 30522

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "maxima": lambda x: x.float().amax(-1),
    "positions": lambda x: x.float().argmax(-1),
    "exponentials": lambda x: torch.logsumexp(x.float(), -1),
}


def tiling_of(name: str, rows: int, columns: int) -> Tiling:
    plan = planned(FUNCTIONS[name], torch.empty(rows, columns, dtype=torch.bfloat16))
    return choose_tiles(plan.kernels[0], plan.graph, Sizes({}), Gpu())


@pytest.mark.parametrize(
    ("name", "columns", "step"),
    [
        ("maxima", ALIGNED, 8192), ("maxima", ODD, 2048), ("positions", ALIGNED, 1024), ("positions", ODD, 1024),
        ("exponentials", ALIGNED, 4096), ("exponentials", ODD, 4096),
    ],
)  # fmt: skip
def test_steps_of_many_rows(name: str, columns: int, step: int) -> None:
    """Programs of an SM have loads on their way for each other: short steps leave them registers."""
    tiling = tiling_of(name, ROWS, columns)
    assert (tiling.blocks.x, tiling.blocks.r, tiling.blocks.warps) == (1, step, 8)


def test_positions_in_few_rows_take_long_steps() -> None:
    blocks = tiling_of("positions", 100, 20_000).blocks
    assert blocks.r > 4 * 32 * blocks.warps


@pytest.mark.parametrize(("columns", "apart"), [(ALIGNED, False), (ODD, True)])
def test_a_thread_adds_up_what_it_loads(columns: int, apart: bool) -> None:
    made = texts_of_a_gpu(FUNCTIONS["exponentials"], torch.empty(ROWS, columns, dtype=torch.bfloat16))
    [text] = made.kernels.values()
    assert ("lib.step_rescaled_apart(" in text) == apart
    assert "lib.step_rescaled" in text


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_values_of_odd_rows(dtype: torch.dtype) -> None:
    x = torch.randn(140, 17_411, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[3], x[4, 7], x[5, 9] = -torch.inf, torch.inf, torch.nan

    def rows(x: Tensor) -> tuple[Tensor, ...]:
        return (*(f(x) for f in FUNCTIONS.values()), x.float().log_softmax(-1))

    step = torch.compile(rows, backend="kgen", options={"gpu_interpreter": True, "strict": True, "cache": False})
    for got, want in zip(step(x), rows(x), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)
