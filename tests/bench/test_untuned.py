"""The second list of untuned blocks, at small sizes on a CPU, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bench.gpu_timing import relative_error
from bench.untuned.__main__ import LISTS
from bench.untuned.block import Block, cast

pytestmark = pytest.mark.cpu
BLOCKS = LISTS["second"]
# Matmuls under autocast round to bfloat16, here and in eager.
LOOSE = {"autocast mlp 3000x770", "autocast mlp 3000x770 step"}


def _results(block: Block, dtype: torch.dtype, compiled: bool) -> list[Tensor]:
    """What the block returns or writes, and its gradients."""
    generator = torch.Generator().manual_seed(0)
    assert block.small is not None
    args = cast(block.small(lambda *shape: torch.randn(shape, generator=generator).to(torch.bfloat16)), dtype)
    fn = torch.compile(block.fn, backend="kgen") if compiled else block.fn
    if not block.training:
        with torch.no_grad():
            made = fn(*args)
        return args if made is None else [made] if isinstance(made, Tensor) else list(made)
    args = [a.detach().requires_grad_() if a.is_floating_point() else a for a in args]
    wanted = [a for a in args if a.requires_grad]
    out = fn(*args)
    grads = torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)
    return [out.detach(), *(g for g in grads if g is not None)]


@pytest.mark.every(12)
@pytest.mark.parametrize("block", [pytest.param(b, id=b.name) for b in BLOCKS])
def test_agrees_with_float64(block: Block) -> None:
    torch._dynamo.reset()
    exact = _results(block, torch.float64, compiled=False)
    assert relative_error(_results(block, torch.float32, compiled=True), exact) < (1e-2 if block.name in LOOSE else 1e-4)


def test_a_third_trains() -> None:
    assert len(BLOCKS) >= 60
    assert 3 * sum(b.training for b in BLOCKS) >= len(BLOCKS)
    assert len({b.name for b in BLOCKS}) == len(BLOCKS)
