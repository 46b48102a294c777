"""Masks that only data decide, with the spans of what they keep: the same results, and tiles that are left out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from kgen.capture import mask_spans
from kgen.capture.decompositions import TABLE
from kgen.capture.mask_spans import WITHIN, bound_masks
from tests.attention_plans import GPU, before_split
from tests.codegen import Row, gradients, report, run_rows

Masked = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans for few rows and columns."""
    for name, number in {"LEAST": 16, "LEAST_WORK": 0, "BLOCK": 16}.items():
        monkeypatch.setattr(mask_spans, name, number)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])


def documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Of one sequence: no row sees another document's columns, nor later ones."""
    n = torch.arange(len(ids), device=ids.device)
    keep = (ids[:, None] == ids[None, :]) & (n[:, None] >= n[None, :])
    return scores(q, k).masked_fill(~keep, -math.inf).softmax(-1) @ v


def sorted_first(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """What a condition compares is one of several results."""
    return documents(q, k, v, ids.sort().values)


def apart(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Masks of two kinds, one after the other, and one that is added."""
    n = torch.arange(len(ids), device=ids.device)
    s = torch.where(n[:, None] >= n[None, :], scores(q, k), -math.inf)
    return (s + torch.where(ids[:, None] == ids[None, :], 0.0, -math.inf)).softmax(-1) @ v


def padded(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Columns of one document for all rows."""
    return scores(q, k).masked_fill((ids != 2)[None, None, None], -math.inf).softmax(-1) @ v


def both_ways(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """A mask from memory, one for each batch."""
    return torch.where(keep[:, None], scores(q, k), -math.inf).softmax(-1) @ v


def ids_of(length: int) -> Tensor:
    return (torch.arange(length) * 7 // length).clamp(1)


def ragged(length: int) -> Tensor:
    """Each row keeps some columns of a run of its own, and itself."""
    torch.manual_seed(length)
    rows, columns = torch.arange(length)[:, None], torch.arange(length)[None]
    run = (columns >= rows - 9) & (columns < rows + torch.randint(1, 20, (2, length, 1)))
    return (run & (torch.rand(2, length, length) < 0.6)) | (rows == columns)


MASKS: dict[str, tuple[Masked, Callable[[int], Tensor]]] = {
    "documents": (documents, ids_of),
    "sorted": (sorted_first, ids_of),
    "apart": (apart, ids_of),
    "padded": (padded, ids_of),
    "both ways": (both_ways, ragged),
}


def arguments(name: str, length: int) -> list[Tensor]:
    torch.manual_seed(5)
    return [*(torch.randn(2, 3, length, 16) for _ in range(3)), MASKS[name][1](length)]


def yes(*_: object) -> bool:
    return True


def bounded(gm: GraphModule, backward: bool = False) -> GraphModule:
    return bound_masks(gm, backward, yes)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("length", [48, 75])
@pytest.mark.parametrize("name", MASKS)
def test_bounds_follow_from_what_they_bound(name: str, length: int, backward: bool) -> None:
    """In eager both conditions have to hold."""
    args = arguments(name, length)
    gm = make_fx(MASKS[name][0], TABLE, tracing_mode="fake")(*args)
    bounded(gm, backward)
    assert len([node for node in gm.graph.nodes if node.target is WITHIN]) == 1
    torch.testing.assert_close(gm(*args), MASKS[name][0](*args))


@pytest.mark.parametrize("backward", [False, True])
def test_several_masks_have_spans_of_their_own(backward: bool) -> None:
    """Two of data, and one that another choice turns round and a third adds."""

    def several(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        keep, other = ids[:, None] == ids[None, :], ids[:, None] <= ids[None, :]
        found = [torch.where(one, scores(q, k), -math.inf).softmax(-1) @ v for one in (keep, other)]
        turned = torch.where(other, -math.inf, scores(q, k)).softmax(-1).nan_to_num(0.0) @ v
        added = (scores(q, k) + torch.where(other, 0.0, -math.inf) + torch.where(keep, -math.inf, 0.0)).exp() @ v
        return *found, turned, added

    args = arguments("documents", 48)
    gm = make_fx(several, TABLE, tracing_mode="fake")(*args)
    bounded(gm, backward)
    assert len([node for node in gm.graph.nodes if node.target is WITHIN]) == 4
    for mine, other in zip(gm(*args), several(*args), strict=True):
        torch.testing.assert_close(mine, other)


def test_what_indices_alone_decide_has_no_spans() -> None:
    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = torch.arange(q.shape[-2], device=q.device)
        return torch.where(n[:, None] >= n[None, :], scores(q, k), -math.inf).softmax(-1) @ v

    gm = make_fx(causal, TABLE, tracing_mode="fake")(*arguments("documents", 48)[:3])
    assert all(node.target is not WITHIN for node in bounded(gm).graph.nodes)


@pytest.mark.interpret
@pytest.mark.parametrize("name", MASKS)
def test_tiles_are_left_out_and_results_are_right(name: str) -> None:
    """Templates of attention, forward and gradients; what is left out, they do not read."""
    function = MASKS[name][0]

    def agrees(sample: list[Tensor], got: list[list[Tensor]], _: object) -> None:
        right = gradients(function)(*(one.double() if one.is_floating_point() else one for one in sample))
        for mine, other in zip(got[0], right, strict=True):
            torch.testing.assert_close(mine.double(), other, atol=2e-5, rtol=2e-4)

    rows = [
        Row(f"{name} {length}", function, [arguments(name, length)], agrees, externs=None, backward=True,
            before_split=before_split, after_split=lambda gm: bounded(gm, backward=True))
        for length in (48, 75)
    ]  # fmt: skip
    failures = run_rows(rows, only=GPU, gpu=True)
    assert not failures, report(failures)
