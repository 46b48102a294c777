"""The options of both back ends as parameters of a test, and random arguments that depend on their shapes alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

BACK_ENDS = {
    "cpp": pytest.param({"cache": False}, marks=pytest.mark.cpu, id="cpp"),
    "triton": pytest.param(
        {"cache": False, "gpu_interpreter": True}, marks=[pytest.mark.cpu, pytest.mark.interpret], id="triton"
    ),
}


def r(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
