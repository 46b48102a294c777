"""Lists in a program on a GPU: constants of the graph there, and no copies at each call."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tools.replay_adapter import Texts, door, rendering
from tools.replay_corpus import Case
from tools.replay_graphs import call


def looked_up(x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    table = torch.tensor([0.0, 0.5, 1.5, 3.5, 6.0], device=x.device)
    return x * table[at], table


def test_a_list_is_on_the_device_before_the_first_call() -> None:
    made: list[Texts] = []
    case = Case("looked up", lambda: (looked_up, [torch.empty(64, 33), torch.zeros(64, 33, dtype=torch.int64)]))
    call(case, "gpu", door({}), partial(rendering, made.append))
    assert "extern" not in made[0].steps
    assert "constant" in made[0].steps
