"""Windows: gradients of `unfold`, where each element gathers from those that hold it, and how many elements they load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.ir import values as vs
from kgen.ir.plan import members
from tests.kernels import plans


def bilateral(x: Tensor) -> Tensor:
    p = F.pad(x, (1, 1, 1, 1), mode="reflect").unfold(2, 3, 1).unfold(3, 3, 1).flatten(-2)
    w = torch.exp(-((p - x.unsqueeze(-1)) ** 2))
    return (w * p).sum(-1) / w.sum(-1)


def gradient(fn: object, x: Tensor) -> Tensor:
    torch._dynamo.reset()
    x = x.clone().requires_grad_()
    made = fn(x)  # type: ignore[operator]
    weights = torch.arange(made.numel(), dtype=torch.float64).cos().bfloat16().view(made.shape)
    return torch.autograd.grad((made * weights.to(made.dtype)).sum(), x)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "dim", "size", "step"),
    [((40,), 0, 7, 1), ((40,), 0, 7, 3), ((40,), 0, 4, 4), ((40,), 0, 3, 5), ((3, 33, 2), 1, 16, 8), ((5, 9), -1, 9, 1),
     ((4, 300), 1, 200, 1), ((4, 6), 0, 1, 1)],
)  # fmt: skip
def test_gradients(shape: tuple[int, ...], dim: int, size: int, step: int, dtype: torch.dtype) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.unfold(dim, size, step).sin() * 2

    x = torch.randn(shape, dtype=dtype)
    got, want = gradient(torch.compile(fn, backend="kgen", fullgraph=True), x), gradient(fn, x.double())
    limit = {torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(got.double(), want, rtol=limit, atol=limit * 10)


def test_windows_of_windows() -> None:
    x = torch.rand(2, 3, 12, 11)
    got, want = gradient(torch.compile(bilateral, backend="kgen", fullgraph=True), x), gradient(bilateral, x.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_nothing_is_updated_in_memory() -> None:
    made = plans(bilateral, torch.rand(2, 3, 12, 11, requires_grad=True), backward=True)
    kernels = [one for plan in made.schedules for step in plan.kernels for one in members(step)]
    assert not any(s.kind == "scatter" for one in kernels for s in one.statements)


FOLDS: dict[str, tuple[tuple[int, ...], tuple[int, int], dict[str, Any]]] = {
    "overlapping": ((2, 27, 30), (10, 3), {"kernel_size": 3, "padding": 1}),
    "steps": ((2, 147, 9), (12, 13), {"kernel_size": 7, "stride": 4, "padding": 2}),
    "gaps": ((2, 8, 12), (8, 11), {"kernel_size": 2, "stride": 3}),
    "dilated": ((2, 18, 56), (10, 9), {"kernel_size": 3, "dilation": 2, "padding": 1}),
    "dilated steps": ((2, 12, 30), (10, 11), {"kernel_size": (2, 3), "dilation": (3, 2), "stride": (2, 2), "padding": (2, 1)}),
    "no batch": ((12, 20), (5, 7), {"kernel_size": (2, 3)}),
    "large": ((1, 121, 16), (14, 14), {"kernel_size": 11}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FOLDS)
def test_folded_columns(name: str, dtype: torch.dtype) -> None:
    shape, image, options = FOLDS[name]
    torch._dynamo.reset()
    x = torch.randn(shape, dtype=dtype)
    got = torch.compile(lambda x: F.fold(x * 2, image, **options), backend="kgen", fullgraph=True)(x)
    limit = 2e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), F.fold(x.double() * 2, image, **options), rtol=limit, atol=2 * limit)


@pytest.mark.parametrize("name", ["overlapping", "dilated steps"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradient_of_columns(name: str, dynamic: bool) -> None:
    _, image, options = FOLDS[name]

    def fn(x: Tensor) -> Tensor:
        return F.unfold(x.sin(), **options).exp()

    x = torch.randn(2, 3, *image)
    got = gradient(torch.compile(fn, backend="kgen", fullgraph=True, dynamic=dynamic), x)
    torch.testing.assert_close(got.double(), gradient(fn, x.double()), rtol=1e-4, atol=1e-4)


def test_columns_are_not_added_in_memory() -> None:
    made = plans(lambda x: F.unfold(x.sin(), 3, padding=1), torch.rand(2, 3, 12, 11, requires_grad=True), backward=True)
    assert len(made.schedules[1].kernels) == 1
    kernels = [one for plan in made.schedules for step in plan.kernels for one in members(step)]
    assert not any(s.kind == "scatter" for one in kernels for s in one.statements)


def test_any_length() -> None:
    def fn(x: Tensor) -> Tensor:
        return (x.unfold(0, 5, 2) ** 2).exp()

    torch._dynamo.reset()
    step = torch.compile(fn, backend="kgen", fullgraph=True, dynamic=True)
    for length in (17, 30, 6):
        x = torch.rand(length, dtype=torch.float64, requires_grad=True)
        [got] = torch.autograd.grad(step(x).sum(), x)
        [want] = torch.autograd.grad(fn(x).sum(), x)
        torch.testing.assert_close(got, want)


def opened(x: Tensor) -> Tensor:
    return -F.max_pool2d(-F.max_pool2d(x, 3, 1, 1), 3, 1, 1)


@pytest.mark.parametrize(
    ("fn", "kernels"),
    [(opened, 2), (lambda x: F.max_pool2d(torch.relu(x) + 1, 3, 2, 1), 1), (lambda x: F.max_pool2d(x * x[:1], 3, 1, 1), 1)],
    ids=["windows of windows", "a window of one tensor", "a window of two tensors"],
)
def test_loads_of_windows_do_not_multiply(fn: Callable[[Tensor], Tensor], kernels: int) -> None:
    plan = plans(fn, torch.randn(2, 3, 32, 32)).forward
    assert len(plan.kernels) == kernels
    assert all(len(vs.loads(s.roots)) <= 18 for step in plan.kernels for k in members(step) for s in k.statements)


def test_a_pool_of_a_pool_is_stored_between() -> None:
    """Each window of the second one would compute nine of the first one."""

    def of_a_pool(x: Tensor) -> Tensor:
        return F.max_pool2d(F.max_pool2d(x, 3, 1, 1) * 0.5, 3, 1, 1)

    def scaled(x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(x * 2 + 1), 3, 2, 1)

    x = torch.randn(2, 3, 40, 41)
    assert [len(plans(fn, x).forward.kernels) for fn in (of_a_pool, scaled)] == [2, 1]
    torch.testing.assert_close(torch.compile(of_a_pool, backend="kgen", fullgraph=True)(x), of_a_pool(x))
