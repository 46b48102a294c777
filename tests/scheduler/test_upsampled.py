"""What reads images that are upsampled, or in other orders of dimensions, on a GPU: tiles, copies, and orders of loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.replay_adapter import Texts, door, rendering
from tools.replay_corpus import Case
from tools.replay_graphs import call


def texts_of(fn: Callable[..., Any], *args: Tensor, trains: bool = False) -> dict[str, Texts]:
    """What kgen makes of a function for a GPU, by the role of its graphs."""
    made: list[Texts] = []
    call(Case("upsampled", lambda: (fn, list(args)), trains=trains), "gpu", door({}), partial(rendering, made.append))
    return {one.role: one for one in made}


def turned(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="nearest").permute(0, 2, 3, 1).contiguous()


def weighted(x: Tensor, w: Tensor) -> Tensor:
    """An upsampled image's channels by a vector at each pixel."""
    return torch.einsum("bkhw,bkchw->bchw", w, F.interpolate(x, scale_factor=2).unflatten(1, (8, -1)))


def covariance(x: Tensor) -> Tensor:
    flat = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
    return flat.mT @ flat


def interpolated(x: Tensor, g: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="nearest") * g


def test_upsampled_rows_are_turned_in_tiles() -> None:
    [kernel] = texts_of(turned, torch.empty(4, 128, 64, 64))["inference"].kernels.values()
    assert "YBLOCK" in kernel


def test_an_operand_that_backward_reads_is_stored_once() -> None:
    args = torch.empty(4, 256, 40, 40, dtype=torch.bfloat16), torch.empty(4, 8, 80, 80, dtype=torch.bfloat16)
    memory = texts_of(weighted, *args, trains=True)["forward"].steps.partition("\nmemory\n")[2]
    assert sum("[25600, 8, 32]" in line or "[4, 80, 80, 8, 32]" in line for line in memory.splitlines() if "bytes" in line) == 1


def test_sums_go_along_memory_first() -> None:
    """The rows of images are split where a share begins within an image; what their index is divided by hides a stride."""
    kernels = texts_of(covariance, torch.empty(16, 128, 28, 28))["inference"].kernels.values()
    [line] = [line for text in kernels for line in text.splitlines() if line.startswith("# triton_matmul") and "y0l" in line]
    assert line.index("y0h<") < line.index("y0l<")


def test_backward_counts_the_points_of_an_interpolation_again() -> None:
    made = texts_of(interpolated, torch.empty(2, 3, 30, 31), torch.empty(2, 3, 60, 62), trains=True)
    assert "load(primals" in made["backward"].steps
    assert "load(_to_copy" not in made["backward"].steps


def test_a_gradient_of_a_linear_interpolation_gathers() -> None:
    made = texts_of(partial(F.interpolate, scale_factor=2, mode="bilinear"), torch.empty(2, 64, 32, 32), trains=True)
    [kernel] = made["backward"].kernels.values()
    assert "atomic" not in kernel
    assert len(made["forward"].kernels) == 1
