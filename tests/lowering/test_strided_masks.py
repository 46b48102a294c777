"""What many elements of a contraction's result share is read along rows on a GPU: from a copy, where it is stored otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kgen.ir import nodes as ir
from kgen.lowering import LoweringContext, builder, graph, lower
from kgen.reference.evaluate import evaluate_graph
from tests.op_case import capture, flat

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def little_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "LARGE", 64)
    monkeypatch.setattr(builder, "LEAST_COPIED", 64)


def batch_innermost(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """A mask as XLNet has it: rows, columns, batches."""
    return (q @ k.mT) * 0.5 - 1e30 * mask.permute(2, 0, 1)[:, None]


def along_rows(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT) + mask.reshape(4, 1, 32, 32)


def of_no_contraction(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return q.repeat(1, 1, 1, 4) + mask.permute(2, 0, 1)[:, None]


def for_each_element(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return (q[:, 0] @ k[:, 0].mT) + mask.permute(2, 0, 1)


def copies(fn: Function, gpu: bool = True) -> int:
    """Pointwise nodes that store what they load, in a graph whose results are checked."""
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(*shape, generator=generator) for shape in ((4, 8, 32, 8), (4, 8, 32, 8), (32, 32, 4))]
    made = lower(capture(fn, tuple(args), "fake"), LoweringContext(gpu_everywhere=gpu))
    for got, want in zip(flat(evaluate_graph(made, args)), flat(fn(*args)), strict=True):
        torch.testing.assert_close(got, want)
    return sum(isinstance(node, ir.Pointwise) and node.value.op == "load" for node in made.nodes)


def test_it_is_copied_on_a_gpu() -> None:
    assert copies(batch_innermost) == copies(batch_innermost, gpu=False) + 1


@pytest.mark.parametrize("fn", [along_rows, of_no_contraction, for_each_element])
def test_it_is_read_where_it_is(fn: Function) -> None:
    """In rows; by elementwise operators, whose tiles have two axes; and for one element each."""
    assert copies(fn) == copies(fn, gpu=False)
