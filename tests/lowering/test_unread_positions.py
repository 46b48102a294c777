"""Extremes along a dimension whose positions nobody reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels import plans


def values(x: Tensor) -> Tensor:
    return x.max(-1).values * 2


def least(x: Tensor) -> Tensor:
    return torch.min(x * 3, 0).values


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    found = x.max(-1)
    return found.values, found.indices


def position(x: Tensor) -> Tensor:
    return x.argmax(-1)


def truth(x: Tensor) -> Tensor:
    return (x > 0).max(-1).values


def made() -> Tensor:
    x = torch.randn(40, 70)
    x[3, 5] = float("nan")
    x[4] = float("-inf")
    return x


@pytest.mark.parametrize(
    ("fn", "op"), [(values, "max"), (least, "min"), (both, "argmax"), (position, "argmax"), (truth, "argmax")]
)
def test_only_what_is_read_is_found(fn: Callable[..., object], op: str) -> None:
    statements = (s for kernel in plans(fn, made()).forward.kernels for s in kernel.statements)
    assert {s.op for s in statements if s.kind == "reduction"} == {op}


@pytest.mark.cpu
@pytest.mark.parametrize("fn", [values, least, both, truth])
def test_values(fn: Callable[..., object]) -> None:
    x = made()
    torch.testing.assert_close(torch.compile(fn, backend="kgen", fullgraph=True)(x), fn(x), equal_nan=True)


@pytest.mark.interpret
@pytest.mark.parametrize("fn", [values, least])
def test_on_a_gpu(fn: Callable[..., object]) -> None:
    x = made()
    options = {"gpu_interpreter": True, "cache": False}
    torch.testing.assert_close(torch.compile(fn, backend="kgen", options=options)(x), fn(x), equal_nan=True)


@pytest.mark.cpu
def test_a_gradient_reads_the_position() -> None:
    x = made().nan_to_num(0.0, neginf=-1.0).requires_grad_()
    torch.compile(values, backend="kgen")(x).sum().backward()
    wanted = x.detach().clone().requires_grad_()
    values(wanted).sum().backward()
    torch.testing.assert_close(x.grad, wanted.grad)
