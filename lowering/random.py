"""Random numbers: a value of a seed and of the element's logical linear index, so no order or tiling changes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.lowering.builder import Builder
from kgen.lowering.tensor import Tensor, at, indices


def rand(b: Builder, size: Any, seeds: Tensor, index: int | Expr, kind: str, dtype: torch.dtype) -> Tensor:
    """One random number an element: uniform, normal, or bits, from seed number `index`."""
    sizes = tuple(map(ix.as_expr, size))
    seed = at(seeds, [ix.as_expr(index)])
    counter = ix.linearize(indices(sizes), ix.contiguous_strides(sizes))
    return Tensor(sizes, dtype, seeds.device, vs.random(kind, seed, vs.index_value(counter)))


RULES: dict[str, Callable[..., Any]] = {
    "kgen.rand": rand,
}
