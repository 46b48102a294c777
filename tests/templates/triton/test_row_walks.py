"""Rows that are walked several times on a GPU: what the L2 cache is told, and what is the same along runs of a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.build import triton
from kgen.device import Gpu
from kgen.ir.index import Sizes
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.scheduler import choose_tiles
from tests.gpu_graphs import run, short_rows
from tests.rendering import gpu_call
from tests.scheduler.selection.test_safe_choices import planned


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x, 2, w, b)


def logsumexp(x: Tensor) -> Tensor:
    return torch.logsumexp(x, -1)


def images(pixels: int, channels: int = 8) -> tuple[Tensor, ...]:
    return torch.randn(64, channels, pixels), torch.randn(channels), torch.randn(channels)


def kernel_of(fn: Callable[..., Any], *args: Tensor) -> TritonKernel:
    plan = planned(fn, *args)
    [step] = plan.kernels
    launch = gpu_call(choose_tiles(step, plan.graph, Sizes({}), Gpu()), plan.graph).launch
    assert launch is not None
    return launch


def lines(text: str, *words: str) -> list[str]:
    return [line for line in text.split("\n") if all(word in line for word in words)]


# ---- the L2 cache ---------------------------------------------------------------------------------------------------


def test_a_row_stays_in_the_cache_until_its_last_walk() -> None:
    source = kernel_of(softmax, torch.empty(512, 1 << 18)).source
    first, last = lines(source, "tl.load(")
    [stored] = lines(source, "tl.store(")
    assert 'eviction_policy="evict_last"' in first
    assert 'eviction_policy="evict_first"' in last
    assert 'eviction_policy="evict_first"' in stored


@pytest.mark.parametrize(
    ("fn", "args"),
    [(logsumexp, (torch.empty(512, 1 << 18),)), (softmax, (torch.empty(512, 1024),)), (softmax, (torch.empty(1 << 12, 4, 9),))],
    ids=["one walk", "in registers", "short"],
)
def test_what_is_read_once_says_nothing(fn: Callable[..., Any], args: tuple[Tensor, ...]) -> None:
    assert "eviction_policy" not in kernel_of(fn, *args).source


def test_a_weight_of_all_rows_says_nothing() -> None:
    source = kernel_of(lambda x, w: F.rms_norm(x, x.shape[-1:], w), torch.empty(512, 1 << 17), torch.empty(1 << 17)).source
    assert [("eviction_policy" in line) for line in lines(source, "tl.load(")] == [True, True, False]


# ---- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pixels", "runs"), [(12544, 2), (12540, 0)], ids=["whole", "ragged"])
def test_what_belongs_to_runs_is_loaded_once_for_each(pixels: int, runs: int) -> None:
    """A channel's weight in all of its pixels, where no eight neighbours are of two channels."""
    source = kernel_of(group_norm, *images(pixels)).source
    assert len(lines(source, "lib.to_points(tl.load(")) == runs
    assert len(lines(source, "tl.load(")) == 4


@pytest.mark.interpret
@pytest.mark.parametrize("pixels", [40, 24, 36])
def test_values(pixels: int) -> None:
    """Steps of 16 points end within a channel, and the last one beyond the row."""
    with short_rows():
        ran = run(group_norm, torch.randn(3, 6, pixels), torch.randn(6), torch.randn(6), gpu_interpreter=True)
    assert ran.loops == 2


@pytest.mark.ptx
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    ("fn", "args"), [(softmax, (torch.empty(512, 1 << 18, dtype=torch.bfloat16),)), (group_norm, images(12544))],
    ids=["softmax", "group_norm"],
)  # fmt: skip
def test_compiled(fn: Callable[..., Any], args: tuple[Tensor, ...], arch: int) -> None:
    [made] = triton.compile_kernels([kernel_of(fn, *args)], arch)
    assert made.stack == 0
