"""Functions of matmuls' rows, on small numbers, and what they are held against."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kgen.ir.plan import Schedule
from kgen.scheduler import Options
from tests.kernels import plans
from tests.matmuls import compiled

GPU = Options(gpu_everywhere=True)


def r(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*sizes) / 4).to(dtype)


def wide(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.double() if tree.is_floating_point() else tree
    return type(tree)(wide(t) for t in tree) if isinstance(tree, list | tuple) else tree


def near(got: Any, wanted: Any, tolerance: float) -> None:
    for one, other in zip(*([t if isinstance(t, list | tuple) else (t,) for t in (got, wanted)]), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def check(f: Callable[..., Any], *args: Any, tolerance: float = 2e-5, dynamic: bool | None = None) -> None:
    """Against eager in float64."""
    torch._dynamo.reset()
    near(compiled(f, *args, dynamic=dynamic), f(*wide(args)), tolerance)


def plan_of(f: Callable[..., Any], *args: Any, options: Options = GPU) -> Schedule:
    return plans(f, *args, options=options).forward


def softmax(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return (torch.bmm(q, k.mT) * 0.125).masked_fill(mask, -math.inf).softmax(-1)


def rms_norm(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
    y = x @ w
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * g
