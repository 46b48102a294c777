"""Values that all readers convert to one narrower type: which ones a GPU's kernels store in it, and that results stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_case import capture
from torch import Tensor

from kgen.ir import nodes as ir
from kgen.lowering import LoweringContext, lower, narrow_values, reinplace
from kgen.reference.evaluate import evaluate_graph

X = torch.randint(0, 4, (64, 256, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_values, "LARGE", 100)


def shifts() -> Tensor:
    return torch.arange(0, 8, 2, dtype=torch.uint8)


def packed(x: Tensor) -> Tensor:
    """Four codes of a byte, whose sum is of int64 in torch."""
    codes = ((x.float() * 0.7).sin() * 1.5 + 1.5).round().clamp(0, 3).to(torch.uint8)
    return (codes << shifts()).sum(-1).to(torch.uint8)


def unpacked(bytes_: Tensor) -> Tensor:
    return ((bytes_[..., None] >> shifts()) & 3).flatten(-2)


def both_ways(bytes_: Tensor) -> Tensor:
    y = unpacked(bytes_).float()
    return y.softmax(0) + y.softmax(1)


def there_and_back(x: Tensor) -> Tensor:
    return both_ways(packed(x))


def multiplied(x: Tensor) -> Tensor:
    return unpacked(packed(x)).float() @ torch.ones(1024, 8)


def result_too(x: Tensor) -> tuple[Tensor, Tensor]:
    found = packed(x)
    return found, both_ways(found)


def rounded(x: Tensor) -> Tensor:
    y = (x.float() * 1.01).sum(-1)
    return y.bfloat16().sum(0) + y.bfloat16().roll(1, 1).amax(0)


def wide_too(x: Tensor) -> tuple[Tensor, Tensor]:
    y = (x << shifts()).sum(-1)
    return unpacked(y.to(torch.uint8)).float().sum(0), y.sum(0)


def two_types(x: Tensor) -> tuple[Tensor, Tensor]:
    y = (x << shifts()).sum(-1)
    return unpacked(y.to(torch.uint8)).float().sum(0), y.to(torch.int16).flip(1).sum(0)


def indexing(x: Tensor) -> Tensor:
    return torch.arange(256, dtype=torch.float32)[(x << shifts()).sum(-1)].flip(1).sum(0)


def ranks(x: Tensor) -> Tensor:
    """Positions are stored as int64, and read as words: once the search for their readers did not end."""
    return x.argsort(dim=1, stable=True).argsort(1)


def graph_of(fn: Callable[..., Any], gpu: bool = True) -> ir.Graph:
    return lower(reinplace(capture(fn, (X,), "fake")), LoweringContext(gpu_everywhere=gpu))


def wide(graph: ir.Graph) -> list[torch.dtype]:
    """The types of large values that kernels make for each other."""
    shown = {out.buffer for out in ir.tensor_args(list(graph.outputs))}
    made = [graph.buffers[node.out] for node in graph.nodes if isinstance(node, ir.Pointwise) and node.out not in shown]
    return [b.dtype for b in made if b.kind == "intermediate" and len(b.sizes) > 1]


@pytest.mark.parametrize(
    ("fn", "types"),
    [
        (there_and_back, {torch.uint8, torch.float32}),
        (result_too, {torch.float32}),
        (rounded, {torch.bfloat16}),
        (wide_too, {torch.int64}),
        (two_types, {torch.int64}),
    ],
)
def test_types(fn: Callable[..., Any], types: set[torch.dtype]) -> None:
    graph = graph_of(fn)
    assert set(wide(graph)) == types
    got, want = evaluate_graph(graph, [X]), evaluate_graph(graph_of(fn, gpu=False), [X])
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_results_are_read_by_the_others() -> None:
    graph = graph_of(result_too)
    result = next(iter(ir.tensor_args(list(graph.outputs)))).buffer
    assert any(result in ir.reads(node) for node in graph.nodes)


@pytest.mark.parametrize("fn", [multiplied, indexing, ranks])
def test_values(fn: Callable[..., Any]) -> None:
    got, want = evaluate_graph(graph_of(fn), [X]), evaluate_graph(graph_of(fn, gpu=False), [X])
    torch.testing.assert_close(got, want, rtol=0, atol=0)
