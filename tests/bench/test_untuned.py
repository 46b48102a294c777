"""The second to fourteenth list of untuned blocks, at small sizes on a CPU, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.gpu_timing import relative_error
from bench.untuned.__main__ import LISTS, block_call
from bench.untuned.block import Block

pytestmark = pytest.mark.cpu
NAMES = (
    "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth", "thirteenth",
    "fourteenth",
)  # fmt: skip
BLOCKS = tuple(block for name in NAMES for block in LISTS[name])
# Matmuls under autocast round to bfloat16, here and in eager.
LOOSE = {
    "autocast mlp 3000x770": 1e-2, "autocast mlp 3000x770 step": 1e-2, "autocast unit 32x128x28 step": 3e-2,
    # variances are differences of large means, here and in eager
    "structures of scales 8x256x320x11 step": 1e-3,
    "normed neurons 1280x3840": 3e-2, # matrices in bfloat16, here and in eager
}  # fmt: skip


def _results(block: Block, dtype: torch.dtype, contender: str) -> Any:
    """What the block returns or writes, and its gradients."""
    assert block.small is not None
    with torch.set_grad_enabled(block.training):
        return block_call(replace(block, inputs=block.small), contender, "cpu", dtype)()


@pytest.mark.every(53)
@pytest.mark.parametrize("block", [pytest.param(b, id=b.name) for b in BLOCKS])
def test_agrees_with_float64(block: Block) -> None:
    torch._dynamo.reset()
    exact = _results(block, torch.float64, "eager")
    assert relative_error(_results(block, torch.float32, "kgen"), exact) < LOOSE.get(block.name, 1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_third_trains(name: str) -> None:
    blocks = LISTS[name]
    assert len(blocks) >= 60
    assert 3 * sum(b.training for b in blocks) >= len(blocks)


def test_names_are_unlike() -> None:
    names = [b.name for blocks in LISTS.values() for b in blocks]
    assert len(set(names)) == len(names)
