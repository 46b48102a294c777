"""The gradient of logits in runs of columns: against float64, what forward saves, and what stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from kgen.capture import chunked_logits

ROWS, DEPTH, COLUMNS = 48, 16, 320
LOGITS = ROWS * COLUMNS  # no other tensor has as many elements
pytestmark = pytest.mark.cpu
Loss = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs, of which the last one is shorter."""
    monkeypatch.setattr(chunked_logits, "COLUMNS", 110)
    monkeypatch.setattr(chunked_logits, "UNIT", 1000)


def r(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def targets() -> Tensor:
    found = torch.randint(0, COLUMNS, (ROWS,), generator=torch.Generator().manual_seed(0))
    found[3] = -100
    return found


def plain(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x @ w.t(), t)


def biased(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w, b), t)


def of_batches(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """As language models write it: sequences, a float32 loss of 16-bit logits."""
    logits = F.linear(x.view(2, ROWS // 2, DEPTH), w).float()
    return F.cross_entropy(logits.view(-1, COLUMNS), t.view(-1))


def matrix_of_columns(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x @ w.t().contiguous(), t, reduction="sum")


def for_each_row(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return (F.cross_entropy(F.linear(x, w, b), t, reduction="none") * torch.arange(ROWS)).sum()


def capped(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(5 * torch.tanh(x @ w.t() / 5), t)


def smoothed(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w, b), t, label_smoothing=0.1)


LOSSES = [
    biased,
    of_batches,
    *(pytest.param(one, marks=pytest.mark.slow) for one in (plain, matrix_of_columns, for_each_row, capped)),
]  # fmt: skip


def trained(loss: Loss, dtype: torch.dtype, device: Any = None) -> tuple[list[Tensor], list[int], float]:
    """The gradients, the numbers of elements that forward saves, and the loss."""
    leaves = [one.to(dtype).requires_grad_() for one in (r(ROWS, DEPTH), r(COLUMNS, DEPTH) / 4, r(COLUMNS, seed=1))]
    saved: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = loss(*leaves, targets())
    made.backward()
    return [torch.zeros(0) if one.grad is None else one.grad for one in leaves], saved, float(made.detach())


def compiled(loss: Loss) -> Loss:
    torch._dynamo.reset()
    return torch.compile(loss, backend="kgen", options={"chunked_logits": "on", "cache": False})


def rewritten(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a graph was changed, for each graph."""
    found: list[bool] = []
    run = chunked_logits._Rewrite.run
    monkeypatch.setattr(chunked_logits._Rewrite, "run", lambda self: (found.append(True), run(self))[1])
    return found


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_right_and_no_logits_are_saved(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = rewritten(monkeypatch)
    gradients, saved, value = trained(compiled(loss), torch.float32)
    exact, _, wanted = trained(loss, torch.float64)
    assert changed
    assert max(saved) < LOGITS
    assert abs(value - wanted) < 1e-4 * abs(wanted)
    for got, want in zip(gradients, exact, strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-4, atol=1e-5)


def test_sixteen_bits_are_added_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worse than eager: its own error is the measure."""
    changed = rewritten(monkeypatch)
    gradients, saved, _ = trained(compiled(of_batches), torch.bfloat16)
    eager, *_ = trained(of_batches, torch.bfloat16)
    exact, *_ = trained(of_batches, torch.float64)
    assert changed
    assert max(saved) < LOGITS
    for got, other, want in zip(gradients, eager, exact, strict=True):
        if want.numel():
            error, usual = ((one.double() - want).norm() / want.norm() for one in (got, other))
            assert error < 1.5 * usual + 1e-3


def returned(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """A penalty of columns' sums: the gradient has numbers of the columns that are made of all rows."""
    logits = F.linear(x, w, b)
    return F.cross_entropy(logits, t) + logits.logsumexp(0).sum()


def multiplied(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """The logits are an operand of another matmul, whose gradient reads them."""
    logits = F.linear(x, w, b)
    return F.cross_entropy(logits, t) + (logits @ logits.t()).sum()


@pytest.mark.parametrize("loss", [returned, *(pytest.param(one, marks=pytest.mark.slow) for one in (multiplied, smoothed))])
def test_other_uses_are_right(loss: Loss) -> None:
    """In runs or not."""
    gradients, _, _ = trained(compiled(loss), torch.float32)
    exact, *_ = trained(loss, torch.float64)
    for got, want in zip(gradients, exact, strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-3, atol=1e-4)


def with_maximum(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """Its gradient goes where logits are equal to the maximum."""
    logits = F.linear(x, w, b)
    return F.cross_entropy(logits, t) + logits.max()


def test_logits_are_not_compared_with_what_was_made_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made again, a maximum may have other bits."""
    changed = rewritten(monkeypatch)
    test_other_uses_are_right(with_maximum)
    assert not changed


def test_small_logits_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = rewritten(monkeypatch)
    torch._dynamo.reset()
    trained(torch.compile(plain, backend="kgen", options={"cache": False}), torch.float32)
    assert not changed


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("templates", [True, False])
def test_runs_keep_one_run_in_memory(dtype: torch.dtype, templates: bool, request: pytest.FixtureRequest) -> None:
    """The plan of the backward graph: neither does one launch make the logits of several runs, for all that their other operand
    is one, nor do parts of the rows' gradient wait for each other, nor is one kernel all that reads logits."""
    if templates:
        request.getfixturevalue("templates_win")
    x, w = (torch.empty(rows, 64, dtype=dtype, requires_grad=True) for rows in (512, 8000))
    t = torch.zeros(512, dtype=torch.int64)
    peaks = {}
    for how in ("on", "off"):
        torch._dynamo.reset()
        with kgen.config.override(chunked_logits=how, cache=False, templates=templates):
            report = kgen.explain(lambda x, w, t: F.cross_entropy(x @ w.t(), t), x, w, t, print_report=False)
        peaks[how] = {graph.role: graph.peak_memory for graph in report.graphs}
    logits, results = dtype.itemsize * 512 * 8000, dtype.itemsize * (512 + 8000) * 64
    assert peaks["off"]["backward"] > logits
    assert peaks["on"]["backward"] - results < logits / (8 if templates and dtype is torch.float32 else 3)
    assert not templates or peaks["on"]["forward"] < logits / 10
