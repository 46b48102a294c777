"""What belongs to rows and takes long is computed for rows, and not for each of their elements, whoever reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen.ir import nodes as ir
from kgen.lowering import LoweringContext, graph, lower
from kgen.reference.evaluate import evaluate_graph
from tests.op_case import capture, flat


@pytest.fixture(autouse=True)
def little_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "DEAR_WORK", 20_000)


def hashes(tokens: Tensor, a: Tensor) -> Tensor:
    """Rolling hashes of three tokens, mixed by as many maps as `a` has."""
    mixed = tokens[:, 2:]
    for k in range(2):
        mixed = (mixed * 1000003 + tokens[:, k : k - 2]) % 65521 % 8191
    return ((mixed[:, :, None] * a) % 65521).amin(1)


def cheap(x: Tensor, a: Tensor) -> Tensor:
    return ((x * 3 + 1)[:, :, None] * a).amin(1)


def stored(fn: Callable[..., Any], args: list[Tensor], gpu: bool = True) -> int:
    """Pointwise nodes of the graph, whose results are checked."""
    made = lower(capture(fn, tuple(args), "fake"), LoweringContext(gpu_everywhere=gpu))
    for got, want in zip(flat(evaluate_graph(made, args)), flat(fn(*args)), strict=True):
        torch.testing.assert_close(got, want)
    return sum(isinstance(node, ir.Pointwise) for node in made.nodes)


def test_dear_values_of_rows_are_stored_on_a_gpu() -> None:
    args = [torch.arange(80).view(4, 20) * 7919 % 50257, torch.arange(1, 33) * 31]
    assert stored(hashes, args) == stored(hashes, args, gpu=False) + 1
    assert stored(cheap, args) == stored(cheap, args, gpu=False)


def test_few_elements_compute_them_again() -> None:
    args = [torch.arange(80).view(4, 20) * 7919 % 50257, torch.arange(1, 9) * 31]
    assert stored(hashes, args) == stored(hashes, args, gpu=False)


def pulls(x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Forces between pairs of points, added up over either of the two: three numbers of a pair share what is dear."""
    apart = x[:, None] - x[None]
    near = torch.exp(-(apart.square().sum(-1) + 0.1).sqrt()) * torch.tanh(a[:, None] * a)
    of_pairs = near[..., None] * apart
    return of_pairs.sum(0), of_pairs.sum(1)


def test_few_numbers_of_a_row_are_made_of_it_by_each_reader() -> None:
    """With rows in memory, nothing of three times their size is stored."""
    args = [torch.randn(20, 3), torch.randn(20)]
    made = lower(capture(pulls, tuple(args), "fake"), LoweringContext(gpu_everywhere=True))
    sizes = [one.sizes for one in made.buffers.values() if one.kind == "intermediate"]
    assert max(len(size) for size in sizes) == 2
    for got, want in zip(flat(evaluate_graph(made, args)), flat(pulls(*args)), strict=True):
        torch.testing.assert_close(got, want)
