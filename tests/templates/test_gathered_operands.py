"""Matmuls whose operands begin at an index from data: a token's row of an embedding, the weights of one expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from back_ends import BACK_ENDS, r
from torch import Tensor

import kgen

pytestmark = pytest.mark.usefixtures("templates_win")


def at(*indices: int) -> Tensor:
    return torch.tensor(indices)


def token(table: Tensor, w: Tensor, i: Tensor) -> Tensor:
    return F.linear(F.embedding(i, table), w).relu()


def expert(x: Tensor, w: Tensor, i: Tensor) -> Tensor:
    return x @ w[i][0]


def experts(x: Tensor, w: Tensor, i: Tensor) -> Tensor:
    return torch.bmm(x[i], w[i])


def two_indices(x: Tensor, w: Tensor, i: Tensor) -> Tensor:
    return x[i, i] @ w[i, i * 2][0]


def epilogue(x: Tensor, w: Tensor, i: Tensor) -> Tensor:
    return x[0] @ w[0] + w[i, 0]


CASES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "token": (token, [r(10, 64), r(32, 64), at(3)]),
    "the last token": (token, [r(10, 64), r(32, 64), at(-1 % 10)]),
    "expert": (expert, [r(8, 64), r(4, 64, 32), at(2)]),
    "expert of both": (experts, [r(4, 8, 64), r(4, 64, 32), at(1)]),
    "experts": (experts, [r(4, 8, 64), r(4, 64, 32), at(2, 0, 3)]),
    "two indices": (two_indices, [r(3, 3, 64), r(3, 5, 64, 32), at(2)]),
    "epilogue": (epilogue, [r(4, 8, 64), r(4, 64, 32), at(2)]),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("options", BACK_ENDS.values())
@pytest.mark.parametrize("name", CASES)
def test_one_index(name: str, options: dict[str, Any]) -> None:
    fn, args = CASES[name]
    kgen.coverage_reset()
    found = torch.compile(fn, backend="kgen", fullgraph=True, options=options)(*args)
    assert kgen.coverage()["extern_calls"] == 0
    torch.testing.assert_close(found, fn(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.cpu
@pytest.mark.parametrize("fn", [token, expert, experts])
def test_out_of_range(fn: Callable[..., Any]) -> None:
    x, w = (r(10, 64), r(32, 64)) if fn is token else (r(4, 8, 64), r(4, 64, 32)) if fn is experts else (r(8, 64), r(4, 64, 32))
    step = torch.compile(fn, backend="kgen", fullgraph=True, options={"cache": False})
    torch.testing.assert_close(step(x, w, at(1)), fn(x, w, at(1)), rtol=1e-4, atol=1e-4)
    with pytest.raises(IndexError):
        step(x, w, at(10))
