"""Matmuls with fused work on CPUs: what `bench.cpu_matmuls` times. Nothing of kgen is imported here, so that the replay can
render the patterns with the kgen of any commit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, Parameter

from bench.matmuls import Given, gate_up, linear_residual, shorter, weight

Function = Callable[..., Any]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Positions of arguments that are no weights; of other functions the first only.
DATA = {linear_residual: (0, 3)}
# Bytes of arguments that calls go through, and the most sets of them.
COLD, MAX_SETS = 300e6, 5


def gelu_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def mm(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@dataclass(frozen=True)
class Matmul:
    """`rows` by `inner`, times one or more weights of `columns` by `inner`, and what else `fn` takes."""

    fn: Function
    rows: int
    inner: int
    columns: int

    def given(self, dtype: torch.dtype) -> list[Given]:
        x, w = Given((self.rows, self.inner), dtype), weight(self.columns, self.inner, inner=self.inner, dtype=dtype)
        bias, residual = Given((self.columns,), dtype), Given((self.rows, self.columns), dtype)
        more = {gelu_linear: [bias], gate_up: [w], linear_residual: [bias, residual], linear: [], mm: []}
        if self.fn is mm:
            w = weight(self.inner, self.columns, inner=self.inner, dtype=dtype)
        return [x, w, *more[self.fn]]

    def shrunk(self, by: int) -> Matmul:
        """The same with lengths divided by about `by`."""
        return replace(self, rows=shorter(self.rows, by), inner=shorter(self.inner, by), columns=shorter(self.columns, by))

    def sets(self, dtype: torch.dtype) -> list[list[Tensor]]:
        given = self.given(dtype)
        count = max(2, min(MAX_SETS, math.ceil(COLD / sum(one.nbytes for one in given))))
        return [[one.make("cpu", 100 * seed + k) for k, one in enumerate(given)] for seed in range(count)]


MATMULS: dict[str, Matmul] = {
    "gelu_512": Matmul(gelu_linear, 512, 1024, 4096),
    "gelu_64": Matmul(gelu_linear, 64, 4096, 4096),
    "gelu_8": Matmul(gelu_linear, 8, 4096, 4096),
    "gelu_1": Matmul(gelu_linear, 1, 4096, 11008),
    "linear_512": Matmul(linear, 512, 1024, 4096),
    "linear_64": Matmul(linear, 64, 4096, 4096),
    "linear_32": Matmul(linear, 32, 4096, 4096),
    "gate_up_64": Matmul(gate_up, 64, 1024, 4096),
    "gate_up_1": Matmul(gate_up, 1, 4096, 11008),
    "residual_512": Matmul(linear_residual, 512, 1024, 1024),
    "mm_1024": Matmul(mm, 1024, 1024, 1024),
}


class Model(Module):
    """A function with those of its arguments that are weights as parameters."""

    def __init__(self, fn: Function, args: Sequence[Tensor]) -> None:
        super().__init__()
        self.fn, self.data = fn, DATA.get(fn, (0,))
        for k, one in enumerate(args):
            if k not in self.data:
                self.register_parameter(f"weight{k}", Parameter(one, requires_grad=False))

    def forward(self, *args: Tensor) -> Tensor:
        return self.fn(*(one if k in self.data else self.get_parameter(f"weight{k}") for k, one in enumerate(args)))
