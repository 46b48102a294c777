"""Values of which a reader takes few elements, at positions from data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.replay_adapter import Texts, door, rendering
from tools.replay_corpus import Case
from tools.replay_graphs import call


def forward_of(fn: Callable[..., Any], *args: Tensor) -> Texts:
    """What kgen makes of a training step's forward pass for a GPU."""
    made: list[Texts] = []

    def render(one: Texts) -> None:
        made.append(one)

    call(Case("few", lambda: (fn, list(args)), trains=True), "gpu", door({}), lambda *given: rendering(render, *given))
    return next(one for one in made if one.role == "forward")


def stored(made: Texts, shape: str) -> int:
    memory = made.steps.partition("\nmemory\n")[2]
    return sum(shape in line and "intermediate" in line for line in memory.splitlines())


def upsampled(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.interpolate(x, scale_factor=4, mode="bilinear"), labels)


def scaled(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((x / 30).tanh() * 30, labels)


def kept(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    y = (x / 30).tanh() * 30
    return F.cross_entropy(y, labels), y


def half_of(x: Tensor, labels: Tensor) -> Tensor:
    """Of an eighth of the elements, at least, each would be computed again."""
    y = x.sigmoid() * 3
    return y.amax(-1).sum() + y.gather(1, labels[:, None].expand(-1, 64)).sum()


def test_labels_take_few_elements() -> None:
    x, labels = torch.empty(2, 19, 64, 64, dtype=torch.bfloat16), torch.zeros(2, 256, 256, dtype=torch.int64)
    assert stored(forward_of(upsampled, x, labels), "[2, 19, 256, 256]") == 0


def test_what_others_see_is_read() -> None:
    x, labels = torch.empty(2048, 4096), torch.zeros(2048, dtype=torch.int64)
    assert stored(forward_of(scaled, x, labels), "[2048, 4096]") == 0
    assert stored(forward_of(kept, x, labels), "[2048, 4096]") == 1


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", [upsampled, scaled, half_of])
def test_values(fn: Callable[..., Tensor], dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    image = fn is upsampled
    x = torch.randn((2, 19, 4, 6) if image else (16, 128), dtype=dtype)
    labels = torch.randint(0, 19, (2, 16, 24) if image else (16,))
    labels[0] = -100 if fn is not half_of else 0
    made, wanted, exact = x.clone().requires_grad_(), x.clone().requires_grad_(), x.double().requires_grad_()
    options = {"gpu_interpreter": True, "strict": True, "cache": False}
    got, expected = torch.compile(fn, backend="kgen", options=options)(made, labels), fn(wanted, labels)
    torch.testing.assert_close(got, expected)
    got.backward()
    expected.backward()
    fn(exact, labels).backward()
    assert made.grad is not None
    assert wanted.grad is not None
    assert exact.grad is not None
    error, eagers = (float((one.double() - exact.grad).abs().max()) for one in (made.grad, wanted.grad))
    assert error <= 2 * eagers + 1e-6
