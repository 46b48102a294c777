"""Iterations of compiled bodies that the native runtime steps through: memory of carried values and of rows, errors, operators
of the library and Python functions in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capture.test_rolling import compiled, flat, tensors

pytestmark = pytest.mark.cpu

STEPS = 70  # more than iterations between two looks for signals


def swapped(x: Tensor, w: Tensor) -> Any:
    a, b = x[0] * 1, x[1] * 1
    for t in range(STEPS):
        a, b = torch.sin(b + x[t]), a
    return a, b


def handed_on(x: Tensor, w: Tensor) -> Any:
    a, b, c = x[0] * 1, x[1] * 1, x[2] * 1
    rows = []
    for t in range(STEPS):
        a, b, c = torch.sin(c + x[t]), a, b
        rows.append(b + c)
    return torch.stack(rows), a, b, c


def library(x: Tensor, w: Tensor) -> Any:
    h, rows, sizes = x[0] * 1, [], []
    for t in range(STEPS):
        q = torch.linalg.matrix_exp(h * 0.1)
        h = torch.tanh(q @ w * 0.1 + x[t])
        rows.append(q)
        sizes.append(h.sum())
    return torch.stack(rows), torch.stack(sizes), h


def carried_and_row(x: Tensor, w: Tensor) -> Any:
    h, rows = x[0] * 1, []
    for t in range(STEPS):
        h = torch.tanh(h @ w * 0.1 + x[t])
        rows.append(h)
    return torch.stack(rows), h


def parts_of_rows(x: Tensor, w: Tensor) -> Any:
    """Rows of another layout than the contiguous one that the body is compiled for."""
    wide = x @ torch.cat([w, w], 1)
    h = x[0] * 1
    for t in range(STEPS):
        left, right = wide[t].chunk(2, -1)
        h = torch.sin(h * left + right * 0.5 + x[t].mT)
    return h


PROGRAMS = (swapped, handed_on, library, carried_and_row, parts_of_rows)


@pytest.mark.every(2)
@pytest.mark.parametrize("width", [3, 16, 32])  # rows that are not aligned, and such that are
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_results(f: Callable[..., Any], width: int) -> None:
    args = tensors((STEPS, width, width), (width, width))
    got, counted = compiled(f, args, "on", gradients=False)
    assert counted["extern.scan"] == 1
    for one, other in zip(got, flat(f(*(arg.float() for arg in args))), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_what_a_call_has_given_stays() -> None:
    """Memory of carried values is used again within a loop, and by no later one."""
    x, w = (one.float() for one in tensors((STEPS, 16, 16), (16, 16)))
    run = torch.compile(carried_and_row, backend="kgen", options={"loop_rolling": "on", "strict": True})
    with torch.no_grad():
        first = run(x, w)
        kept = [one.clone() for one in first]
        run(x * 2, w)
    torch.testing.assert_close(list(first), kept, rtol=0, atol=0)


def test_arguments_stay() -> None:
    """Where all that is carried goes on as it is, no result shares memory with an argument."""
    x, w = (one.float() for one in tensors((STEPS, 16, 16), (16, 16)))
    before = [x.clone(), w.clone()]
    compiled(handed_on, [x, w], "on", gradients=False)
    torch.testing.assert_close([x, w], before, rtol=0, atol=0)


@pytest.mark.parametrize("at", [0, 1, 40])
def test_indices_out_of_range(at: int) -> None:
    """An error of any iteration is eager's, and the process goes on."""
    offsets = torch.zeros(STEPS, dtype=torch.int64)
    offsets[at] = 99

    def f(table: Tensor, offsets: Tensor) -> Tensor:
        h = table[0] * 1
        for t in range(STEPS):
            h = torch.sin(h + table[offsets[t]])
        return h

    run = torch.compile(f, backend="kgen", options={"loop_rolling": "on", "strict": True})
    table = torch.ones(5, 16)
    with torch.no_grad():
        with pytest.raises(IndexError):
            run(table, offsets)
        offsets[at] = 0
        torch.testing.assert_close(run(table, offsets), f(table, offsets))


def test_python_functions_in_a_body() -> None:
    seen = []

    @torch.library.custom_op("kgen_tests::noted_sin", mutates_args=())
    def noted_sin(x: Tensor) -> Tensor:
        seen.append(float(x.sum()))
        return x.sin()

    @noted_sin.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def f(x: Tensor, w: Tensor) -> Any:
        h, rows = x[0] * 1, []
        for t in range(STEPS):
            h = noted_sin(h @ w * 0.1 + x[t]) * 1.5
            rows.append(h)
        return h, torch.stack(rows)

    args = [one.float() for one in tensors((STEPS, 8, 8), (8, 8))]
    want = f(*args)
    count = len(seen)
    got, _ = compiled(f, args, "on", gradients=False)
    assert len(seen) == 2 * count == 2 * STEPS
    torch.testing.assert_close(got, list(want), rtol=1e-4, atol=1e-5)
