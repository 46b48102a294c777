"""Concatenations of many parts of which an elementwise operator alone reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from kernels import plans
from torch import Tensor

from kgen.ir import nodes as ir

LENGTHS = (3, 5, 3, 4, 5, 6, 2, 8)


def parts(lengths: Sequence[int] = LENGTHS, width: int = 32) -> list[Tensor]:
    return [torch.randn(n, width, generator=torch.Generator().manual_seed(k)) for k, n in enumerate(lengths)]


def differences(*x: Tensor) -> Tensor:
    return torch.cat(x[1:]) - torch.cat(x[:-1])


def uneven(*x: Tensor) -> Tensor:
    """The bounds of one are not those of the other one."""
    return torch.cat(x) - torch.cat(x[::-1])


def across(*x: Tensor) -> Tensor:
    return torch.cat([one[:2] for one in x], 1).sin() + 1


def short_runs(*x: Tensor) -> Tensor:
    """A run is a few bytes in memory."""
    return torch.cat([one.T for one in x], 1).sin() + 1


def halves(*x: Tensor) -> Tensor:
    return torch.cat([one.half() for one in x]).float().exp()


def of_sums(*x: Tensor) -> Tensor:
    """Each part is made by a kernel of its own."""
    return torch.relu(torch.cat([one.sum(0, keepdim=True).expand(4, -1) for one in x]) - 1)


def scaled(*x: Tensor) -> Tensor:
    y = torch.cat(x)
    return y * x[0][0] + y.abs()


EVEN = [4] * 12


def wholes(f: Callable[..., Any], *args: Tensor) -> list[bool]:
    """Of each buffer that is written in parts, whether it is the result."""
    graph = plans(f, *args).forward.graph
    results = {one.buffer for one in ir.tensor_args(list(graph.outputs))}
    return [one.name in results for one in graph.buffers.values() if one.parts]


def _name(value: Any) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(
    ("f", "lengths"),
    [(differences, EVEN), (uneven, LENGTHS), (across, LENGTHS), (scaled, LENGTHS), (halves, LENGTHS)],
    ids=_name,
)
def test_no_concatenation_is_stored(f: Callable[..., Any], lengths: Sequence[int]) -> None:
    assert wholes(f, *parts(lengths)) == [True]


def test_a_kernel_reads_the_tensors() -> None:
    assert len(plans(differences, *parts(EVEN)).forward.kernels) == 1


def returned(*x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.cat(x)
    return y, y.exp()


def summed(*x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.cat(x)
    return y.exp(), y.sum(0)


def turned(*x: Tensor) -> Tensor:
    """An element of the result is made of two, in different parts."""
    y = torch.cat(x)
    return y + y.flip(0)


def beside_a_sum(w: Tensor, *x: Tensor) -> Tensor:
    """The kernel that makes the sum makes all of it."""
    return torch.cat(x) * w.sum(0)


def widened(*x: Tensor) -> Tensor:
    """What would be stored in place of the concatenation has more bytes."""
    y = torch.cat([one.half() for one in x]).float().exp()
    return y.sum(0) / y.amax(0)


@pytest.mark.parametrize(
    ("f", "other"), [(returned, True), (summed, False), (turned, False), (widened, False), (short_runs, False)], ids=_name
)
def test_one_that_is_needed_is_stored(f: Callable[..., Any], other: bool) -> None:
    assert wholes(f, *parts()) == [other]


def test_one_beside_what_a_kernel_makes_is_stored() -> None:
    assert wholes(beside_a_sum, torch.randn(64, 32), *parts()) == [False]


@pytest.mark.parametrize(
    "f", [differences, uneven, across, short_runs, halves, of_sums, scaled, turned, summed], ids=lambda f: f.__name__
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.cpu, id="cpp"),
        pytest.param({"gpu_interpreter": True}, marks=[pytest.mark.cpu, pytest.mark.interpret], id="triton"),
    ],
)
def test_values_are_those_of_eager(f: Callable[..., Any], options: dict[str, Any]) -> None:
    args = parts(EVEN if f is differences else LENGTHS)
    torch._dynamo.reset()
    got = torch.compile(f, backend="kgen", options={"cache": False, "strict": True, **options})(*args)
    torch.testing.assert_close(got, f(*args), rtol=1e-3 if f is halves else 1e-5, atol=1e-5)
