"""A norm of concatenated channels-last maps on a GPU: the maps are read in place, by enough programs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.ir.plan import Kernel
from kgen.scheduler import Options
from kgen.scheduler.tiling.loops import GROUPS
from tests.kernels import plans


@pytest.mark.parametrize("channels", [64, 320])
def test_maps_are_read_in_place_by_many_programs(channels: int) -> None:
    def block(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.silu(F.group_norm(torch.cat([x, y], 1), 32, w, b))

    maps = [torch.empty(8, channels, 64, 64, dtype=torch.bfloat16).to(memory_format=torch.channels_last) for _ in range(2)]
    weights = [torch.empty(2 * channels, dtype=torch.bfloat16) for _ in range(2)]
    made = plans(block, *maps, *weights, options=Options(gpu_everywhere=True)).forward
    assert "cat" not in {out for step in made.kernels for s in step.statements if any(s.stored) for out in s.outs}
    assert len(made.kernels) == 3
    shares = made.kernels[0]
    assert isinstance(shares, Kernel)
    # shares are of rows of pixels: the channels of a group stay neighbours, in a tile or of programs
    loops = shares.inner if 2 * channels // 32 in GROUPS else shares.outer[-1:]
    assert 2 * channels // 32 in [v.extent.as_int() for v in loops]
