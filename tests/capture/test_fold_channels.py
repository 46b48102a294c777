"""Scales and shifts of channels behind a convolution become part of its frozen weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from kgen.report.record import Record, recording
from kgen.verdict import Outcome

pytestmark = pytest.mark.cpu
bf = torch.bfloat16


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


class Owner(nn.Module):
    """`fn` of an image and of the module's own tensors."""

    def __init__(self, fn: Callable[..., Any], *tensors: Tensor) -> None:
        super().__init__()
        self.fn = fn
        for k, one in enumerate(tensors):
            self.register_buffer(f"t{k}", one)

    def forward(self, x: Tensor) -> Any:
        return self.fn(x, *self.buffers())


def folded(module: nn.Module, x: Tensor, tolerance: float = 1e-5, **options: Any) -> tuple[int, Record]:
    """How many operators are folded, where the results are eager's."""
    options = {"cache": False, "freezing": True, **options}
    with torch.no_grad(), recording() as seen:
        made, wanted = torch.compile(module, backend="kgen", fullgraph=True, options=options)(x), module(x)
    assert made.stride() == wanted.stride()
    assert made.dtype == wanted.dtype
    torch.testing.assert_close(made, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))
    (one,) = seen.graphs
    assert isinstance(one, Record)
    return sum(v.outcome is Outcome.FOLDED for v in one.plan.verdicts), one


def normed(conv: nn.Module, norm: nn.Module) -> nn.Module:
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return nn.Sequential(conv, norm, nn.ReLU()).eval()


@pytest.mark.parametrize(
    ("conv", "norm", "shape"),
    [
        (lambda: nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d, (2, 4, 8, 8)),
        (lambda: nn.Conv2d(4, 8, 3, bias=False, groups=2, stride=2), nn.BatchNorm2d, (2, 4, 9, 9)),
        (lambda: nn.Conv1d(4, 8, 3), nn.BatchNorm1d, (2, 4, 8)),
    ],
    ids=["with a bias", "of groups", "1d"],
)
def test_a_batch_norm_is_folded(conv: Callable[[], nn.Module], norm: type[nn.Module], shape: Sequence[int]) -> None:
    count, record = folded(normed(conv(), norm(8)), torch.randn(*shape))
    assert count == 4
    assert record.blueprint.coverage["kernels"] <= 2


def test_a_batch_norm_in_16_bits_is_folded() -> None:
    module = normed(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)).to(bf)
    count, _ = folded(module, torch.randn(2, 4, 8, 8, dtype=bf), 3e-2)
    assert count == 4


def channels(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def two_readers(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    y = F.conv2d(x, w)
    return y * s + y


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("fn", "shape", "count"),
    [
        (lambda x, w, s: s * (F.conv2d(x, w) - s), (8, 1, 1), 2),
        (lambda x, w, s: (F.conv2d(x, w, s[:, 0, 0]) + s) / (2 + s.abs()), (8, 1, 1), 2),
        (lambda x, w, s: s - F.conv2d(x, w), (8, 1, 1), 0),
        (lambda x, w, s: s / F.conv2d(x, w).exp(), (8, 1, 1), 0),
        (lambda x, w, s: F.conv2d(x, w) * s, (6,), 0),  # along the image's width
        (lambda x, w, s: F.conv2d(x, w) * s, (1, 8, 1, 1), 1),
        (lambda x, w, s: F.conv2d(x, w) * s, (2, 8, 1, 1), 0),  # another one for each image
        (lambda x, w, s: F.conv2d(x, w) * s, (), 1),
        (lambda x, w, s: F.conv2d(x, w) * (s + x[:1, :1, :1, :1]), (8, 1, 1), 0),  # not frozen
        (two_readers, (8, 1, 1), 0),
        (lambda x, w, s: F.conv_transpose2d(x, w.transpose(0, 1)) * s, (8, 1, 1), 0),
        (lambda x, w, s: F.relu(F.conv2d(x, w)) * s, (8, 1, 1), 0),
    ],
)  # fmt: skip
def test_what_is_folded_is_a_number_for_each_channel(fn: Callable[..., Tensor], shape: Sequence[int], count: int) -> None:
    found, _ = folded(Owner(fn, channels(8, 4, 3, 3), channels(*shape)), torch.randn(2, 4, 8, 8))
    assert found == count


@pytest.mark.parametrize("how", [{"numerics": "eager"}, {"numerics": "stable"}])
def test_the_order_of_multiplications_may_be_kept(how: dict[str, str]) -> None:
    count, _ = folded(
        Owner(lambda x, w, s: F.conv2d(x, w) * s, channels(8, 4, 3, 3), channels(8, 1, 1)), torch.randn(2, 4, 8, 8), **how
    )
    assert count == 0


def test_weights_that_are_written_are_not_folded() -> None:
    def fn(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        y = F.conv2d(x, w) * s
        s.mul_(1.0)
        return y

    count, _ = folded(Owner(fn, channels(8, 4, 3, 3), channels(8, 1, 1)), torch.randn(2, 4, 8, 8))
    assert count == 0


def test_freezing_in_training_is_refused() -> None:
    module = normed(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8))
    with pytest.raises(BackendCompilerFailed, match="freezing is for inference"):
        torch.compile(module, backend="kgen", options={"freezing": True})(torch.randn(2, 4, 8, 8))


def test_statistics_of_a_batch_are_not_folded() -> None:
    module = normed(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)).train()
    with torch.no_grad(), recording() as seen:
        torch.compile(module, backend="kgen", options={"cache": False, "freezing": True})(torch.randn(2, 4, 8, 8))
    assert not [v for v in seen.graphs[0].plan.verdicts if v.outcome is Outcome.FOLDED]
