"""Rows that are walked on a GPU: steps as long as registers allow for the sums that a thread keeps of its points."""

import re

import pytest
import torch

from tests.rendering import texts_of_a_gpu


def correlation(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Three sums of a second walk."""
    x, y = x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True)
    return (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))


def of_softmax(g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """One sum of the first walk."""
    return p * (g - (g * p).sum(-1, keepdim=True))


def tile(function, rows: int, length: int, dtype: torch.dtype) -> tuple[int, int]:
    """(points of a step, warps) of its one kernel."""
    made = texts_of_a_gpu(function, torch.empty(rows, length, dtype=dtype), torch.empty(rows, length, dtype=dtype))
    [text] = made.kernels.values()
    return int(re.findall(r"RBLOCK: tl.constexpr = (\d+)", text)[0]), int(re.findall(r"num_warps = (\d+)", made.calls)[0])


@pytest.mark.parametrize(
    ("function", "rows", "length", "dtype", "expected"),
    [
        (of_softmax, 528, 63544, torch.bfloat16, (16384, 32)),
        (correlation, 528, 63544, torch.float32, (8192, 32)),  # with 16 points a thread kept 48 sums, and spilled
        (of_softmax, 138, 243144, torch.bfloat16, (8192, 16)),  # two programs of an SM: 6 rows would have a round of their own
        (correlation, 138, 243144, torch.float32, (4096, 16)),
    ],
)
def test_steps_leave_registers_for_the_sums(function, rows, length, dtype, expected):
    assert tile(function, rows, length, dtype) == expected
