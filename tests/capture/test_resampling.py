"""Linear resampling: its gradient is one operator, which gathers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.ir import nodes as ir
from kgen.report.record import Record, recording

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def gradient(fn: Callable[..., Tensor], x: Tensor, **options: Any) -> Record:
    """What is made of the gradient, which is that of float64. Results have eager's values and strides."""
    made, wanted, exact = (one.detach().clone().requires_grad_() for one in (x, x, x.double()))
    with recording() as seen:
        got = torch.compile(fn, backend="kgen", fullgraph=True, options={"cache": False, "strict": True}, **options)(made)
        given = torch.randn_like(got)
        got.backward(given)
    expected = fn(wanted)
    expected.backward(given)
    fn(exact).backward(given.double())
    torch.testing.assert_close(got, expected)
    assert got.stride() == expected.stride()
    assert made.grad is not None
    assert wanted.grad is not None
    assert exact.grad is not None
    assert made.grad.stride() == wanted.grad.stride()
    torch.testing.assert_close(made.grad, exact.grad.to(x.dtype), rtol=1e-5, atol=1e-5)
    found = seen.graphs[-1]
    assert isinstance(found, Record)
    return found


def linear(mode: str, **settings: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x * 1.5, mode=mode, **settings)


@pytest.mark.parametrize(
    ("shape", "settings", "kernels"),
    [
        ((2, 3, 8, 6), {"scale_factor": 2}, 1),
        ((2, 3, 8, 6), {"scale_factor": 4}, 2),
        ((1, 2, 5, 6), {"size": (9, 17)}, 1),
        ((1, 2, 9, 17), {"size": (4, 6)}, 1),
        ((1, 2, 5, 6), {"size": (10, 12), "align_corners": True}, 1),
        ((1, 2, 5, 6), {"scale_factor": (1.7, 2.3)}, 1),
        ((1, 1, 2, 3), {"scale_factor": 40}, 2),
        ((2, 3, 4, 4), {"size": (1, 1), "align_corners": True}, 1),
        ((1, 2, 5, 6), {"size": (5, 11)}, 1),
    ],
)
def test_images(shape: tuple[int, ...], settings: dict[str, Any], kernels: int) -> None:
    made = gradient(linear("bilinear", **settings), torch.randn(shape))
    assert not any(isinstance(node, ir.Scatter) for node in made.plan.graph.nodes)
    assert len(made.plan.kernels) == kernels


@pytest.mark.parametrize(("mode", "shape"), [("linear", (2, 3, 7)), ("trilinear", (1, 2, 3, 4, 5))])
def test_other_ranks(mode: str, shape: tuple[int, ...]) -> None:
    made = gradient(linear(mode, scale_factor=2), torch.randn(shape))
    assert not any(isinstance(node, ir.Scatter) for node in made.plan.graph.nodes)


def test_channels_last() -> None:
    gradient(linear("bilinear", scale_factor=2), torch.randn(2, 20, 6, 6).to(memory_format=torch.channels_last))


def test_narrow_numbers_are_rounded_at_the_end() -> None:
    x = torch.randn(2, 3, 8, 8, dtype=torch.bfloat16)
    exact, made = x.double().requires_grad_(), x.clone().requires_grad_()
    F.interpolate(exact, scale_factor=4, mode="bilinear").sum().backward()
    fn = linear("bilinear", scale_factor=4)
    torch.compile(lambda x: fn(x / 1.5), backend="kgen", options={"cache": False})(made).sum().backward()
    torch.testing.assert_close(made.grad, exact.grad.bfloat16() if exact.grad is not None else None)


def test_equal_sizes_are_a_copy() -> None:
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    with recording() as seen:
        got = torch.compile(lambda x: -F.interpolate(x, (8, 8), mode="bilinear"), backend="kgen", options={"cache": False})(x)
    assert torch.equal(got, -x)
    [forward] = [one for one in seen.graphs if isinstance(one, Record)]
    assert all(len(ir.reads(node)) <= 1 for node in forward.plan.graph.nodes)
    assert "minimum" not in str(forward.plan.graph.nodes)


def test_infinities_stay_where_numerics_are_eagers() -> None:
    x = torch.ones(1, 1, 4, 4).index_fill(2, torch.tensor(1), torch.inf)
    made = torch.compile(
        lambda x: F.interpolate(x, size=(4, 4), mode="bilinear"), backend="kgen", options={"cache": False, "numerics": "eager"}
    )(x)
    assert made[:, :, 1].isnan().all()


def test_sizes_that_change() -> None:
    fn = torch.compile(linear("bilinear", scale_factor=2), backend="kgen", dynamic=True, options={"cache": False})
    for n in (5, 7):
        made, wanted = (torch.ones(2, 3, n, n + 1, requires_grad=True) for _ in range(2))
        fn(made).sin().sum().backward()
        linear("bilinear", scale_factor=2)(wanted).sin().sum().backward()
        torch.testing.assert_close(made.grad, wanted.grad)


def test_numbers_of_images_that_change() -> None:
    fn = torch.compile(linear("bilinear", scale_factor=2), backend="kgen", options={"cache": False, "strict": True})
    for n in (2, 3, 4):
        made, wanted = (torch.ones(n, 3, 5, 6, requires_grad=True) for _ in range(2))
        fn(made).sin().sum().backward()
        linear("bilinear", scale_factor=2)(wanted).sin().sum().backward()
        torch.testing.assert_close(made.grad, wanted.grad)


def test_below_a_transform() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.func.vmap(lambda one: F.interpolate(one[None], scale_factor=2, mode="bilinear")[0].sin())(x)

    x = torch.randn(2, 3, 5, 6)
    torch.testing.assert_close(torch.compile(fn, backend="kgen", options={"cache": False})(x), fn(x))
