"""Margin losses are eager's, where torch takes them apart into something else."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen

pytestmark = pytest.mark.cpu

NAN = float("nan")
ROWS = torch.tensor([[1.0, 0.0, 0.5, 2.0], [2.0, 1.0, 1.0, 1.0], [NAN, 0.2, 0.4, 0.1], [0.3, NAN, 0.7, 0.6]])


def check(f: Any, x: Tensor, *others: Tensor) -> None:
    torch._dynamo.reset()
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    got, want = torch.compile(f, backend="kgen", fullgraph=True, options={"cache": False})(mine, *others), f(theirs, *others)
    torch.testing.assert_close(got, want, equal_nan=True)
    for one, leaf in ((got, mine), (want, theirs)):
        (one * torch.arange(1.0, 1 + one.numel()).reshape(one.shape)).sum().backward()
        assert leaf.grad is not None
    torch.testing.assert_close(mine.grad, theirs.grad, equal_nan=True)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_margin_that_is_just_kept_and_nan_count_for_nothing(reduction: str, p: int, weighted: bool) -> None:
    weight = torch.tensor([0.5, 1.0, 2.0, 3.0]) if weighted else None
    check(partial(F.multi_margin_loss, p=p, weight=weight, reduction=reduction), ROWS, torch.tensor([0, 0, 1, 1]))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_labels_end_at_the_first_negative_one(reduction: str) -> None:
    labels = torch.tensor([[0, 1, -1, 0], [3, -1, 2, 0], [0, 3, 1, 2], [-1, 0, 0, 0]])
    loss = partial(F.multilabel_margin_loss, reduction=reduction)
    check(loss, ROWS, labels)
    check(loss, ROWS[0], labels[0])
    check(loss, ROWS, torch.tensor([[0, 0, 1, -1]] * 4))


def test_modules_and_one_row() -> None:
    check(torch.nn.MultiMarginLoss(margin=0.5), ROWS[:2], torch.tensor([3, 1]))
    check(torch.nn.MultiMarginLoss(), ROWS[0], torch.tensor(3))


def test_a_loss_over_many_rows_stores_no_table() -> None:
    x, label = torch.randn(64, 100), torch.arange(64)
    report = kgen.explain(partial(F.multi_margin_loss, reduction="none"), x, label, print_report=False)
    assert (len(report.kernels), report.externs) == (1, ())
