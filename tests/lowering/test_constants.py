"""Lists in a program on a GPU: constants of the graph there, and no copies at each call."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.rendering import texts_of_a_gpu


def looked_up(x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    table = torch.tensor([0.0, 0.5, 1.5, 3.5, 6.0], device=x.device)
    return x * table[at], table


def test_a_list_is_on_the_device_before_the_first_call() -> None:
    made = texts_of_a_gpu(looked_up, torch.empty(64, 33), torch.zeros(64, 33, dtype=torch.int64))
    assert "extern" not in made.steps
    assert "constant" in made.steps
