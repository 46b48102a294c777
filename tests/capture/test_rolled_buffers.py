"""Unrolled loops that write into tensors from in front of them, as `scan` with carried buffers, against eager in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kgen
from kgen.host import loops
from kgen.verdict import Reason
from tests.capture.test_rolling import compiled, flat, refused, rolled, same, tensors

T = 9
SIZES = ((T + 2, 3, 4), (T + 2, 3, 4))


# ---- what becomes a loop -----------------------------------------------------------------------------------------------


def rows(x: Tensor, b: Tensor) -> Any:
    b = b * 1
    for t in range(1, T):
        b[t] = torch.tanh(b[t - 1] + x[t])
    return b


def downwards(x: Tensor, b: Tensor) -> Any:
    b = b * 1
    for t in reversed(range(T)):
        b[t] = torch.tanh(b[t + 1] * x[t])
    return b.sum(0)


def columns_of(x: Tensor, b: Tensor) -> Any:
    b = b.transpose(0, 2).contiguous()
    for t in range(2, T):
        b[:, :, t] = torch.sin(b[:, :, t - 1] - b[:, :, t - 2] * x[t].t())
    return b


def windows(x: Tensor, b: Tensor) -> Any:
    b = b * 1
    for t in range(T):
        b[t : t + 2, 1:] = b[t + 1 : t + 3, :2] * 0.5 + b[0:2, :2] + x[t : t + 2, 1:]
    return b


def stencil(x: Tensor, b: Tensor) -> Any:
    b = b * 1
    for t in range(1, T):
        b[t] = (b[t - 1] + b[t] + b[t + 1]) / 3 + x[0]
    return b, b[2]


def whole(x: Tensor, b: Tensor) -> Any:
    b, h = b[0] * 2, x[0]
    for t in range(1, T):
        h = torch.tanh(h + x[t])
        b += h
    return b, h


def in_views(x: Tensor, b: Tensor) -> Any:
    b = b * 1
    for t in range(1, T):
        row = b[t]
        row += b[t - 1]
        part = row[1:].t()
        part.mul_(row[0, :, None])
        b[t] *= x[t]
        row.sub_(part.sum())
    return b


def diagonal(x: Tensor, b: Tensor) -> Any:
    b = torch.cat((b.flatten(1), x.flatten(1)), 1)[:, : T + 1] * 1
    for t in range(1, T):
        b[t, t] = b[t - 1, t - 1] + b[t, t + 1] * b[t - 1, t]
    return b


def blocks(x: Tensor, b: Tensor) -> Any:
    b = torch.cat((b.flatten(1), x.flatten(1)), 1)[:, : T + 2] * 1
    for t in range(1, T):
        b[t : t + 2, t - 1 : t + 1] = b[t - 1 : t + 1, t : t + 2] * 0.5 + b[t : t + 2, t - 1 : t + 1]
    return b


def elimination(x: Tensor, _b: Tensor) -> Any:
    a = torch.cat((x.flatten(1)[:T, :T], x.flatten(1)[:T, T:]), 1) + torch.eye(T, T + 3, dtype=x.dtype) * 9
    at = torch.arange(T)
    for k in range(T):
        factors = torch.where(at > k, a[:, k] / a[k, k], 0)
        a -= factors[:, None] * a[k]
    return a


def two_buffers(x: Tensor, b: Tensor) -> Any:
    b, c = b * 1, torch.zeros_like(b)
    for t in range(1, T):
        c[t] = b[t - 1] + c[t - 1]
        b[t] = torch.sin(c[t] * x[t])
    return b, c


def state_and_rows(x: Tensor, b: Tensor) -> Any:
    b, h = b * 1, x[0]
    for t in range(T):
        h = torch.tanh(h * x[t] + b[t])
        b[t + 1] = h
    return b, h


def numbers(x: Tensor, b: Tensor) -> Any:
    b = b * 1
    for t in range(1, T):
        b[t] = b[t - 1] * t * 0.2 + x[t]
        b[t, 0] = 0.5 * t
        b[t, 1] = 2
    return b


DIFFERENTIABLE = (rows, windows, blocks, state_and_rows, numbers)
# In eager, a view that backward needs is overwritten.
OTHERS = (downwards, columns_of, stencil, whole, in_views, diagonal, elimination, two_buffers)


@pytest.mark.every(3)
@pytest.mark.parametrize("f", [*DIFFERENTIABLE, *OTHERS], ids=lambda f: f.__name__)
def test_loops(f: Callable[..., Any]) -> None:
    found = rolled(f, *tensors(*SIZES), gradients=f in DIFFERENTIABLE)
    assert "in place" in found.verdicts[-1].detail


def suppression(x: Tensor, b: Tensor) -> Any:
    scores, alive, kept = x.flatten(), x.flatten() * 1, b.new_zeros(T)
    for t in range(T):
        best = alive.argmax()[None]
        kept[t] = alive[best][0]
        alive[(scores - scores[best]).abs() < 0.1] = -9
        alive[best] = -9
    return kept


def life(x: Tensor, b: Tensor) -> Any:
    board = (torch.cat((x, b), 2).flatten(1) > 0).to(x.dtype)
    for _ in range(T):
        inner = board[1:-1, 1:-1]
        near = sum(board[1 + i : board.shape[0] - 1 + i, 1 + j : board.shape[1] - 1 + j] for i, j in NEAR)
        inner.copy_((near == 3) | ((inner == 1) & (near == 2)))
    return board


NEAR = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j]


def whole_board(x: Tensor, b: Tensor) -> Any:
    board = (torch.cat((x, b), 2).flatten(1) > 0).to(x.dtype)
    for _ in range(T):
        near = sum(board.roll((i, j), (0, 1)) for i, j in NEAR)
        board.copy_((near == 3) | ((board == 1) & (near == 2)))
    return board


def edit_distance(x: Tensor, b: Tensor) -> Any:
    one, other = (x.flatten()[:7] > 0), (b.flatten()[:6] > 0)
    d = torch.zeros(8, 7)
    d[:, 0], d[0] = torch.arange(8), torch.arange(7)
    for i in range(1, 8):
        for j in range(1, 7):
            changed = d[i - 1, j - 1] + (one[i - 1] != other[j - 1])
            d[i, j] = torch.minimum(torch.minimum(d[i - 1, j] + 1, d[i, j - 1] + 1), changed)
    return d[7, 6] * 1, d


def edit_distance_by_rows(x: Tensor, b: Tensor) -> Any:
    one, other, at = (x.flatten()[:T] > 0), (b.flatten()[:6] > 0), torch.arange(7)
    d = torch.zeros(T + 1, 7, dtype=torch.int64)
    d[:, 0], d[0] = torch.arange(T + 1), at
    for i in range(1, T + 1):
        changed = torch.minimum(d[i - 1, 1:] + 1, d[i - 1, :-1] + (other != one[i - 1]))
        d[i] = (torch.cat((d[i, :1], changed)) - at).cummin(0).values + at
    return d


def grid(x: Tensor, b: Tensor) -> Any:
    u = torch.cat((x, b), 2).flatten(1)[:8, :8] * 1
    for i in range(1, 7):
        for j in range(1, 7):
            u[i, j] = (u[i - 1, j] + u[i, j - 1] + u[i, j + 1] + u[i + 1, j]) * 0.25 + x[i, 0, 0]
    return u


def caches(x: Tensor, b: Tensor) -> Any:
    keys, values, out = b.flatten(1) * 1, b.flatten(1) * 1, x.flatten(1) * 0
    at = torch.arange(x.shape[0])
    for t in range(T):
        keys[t], values[t] = x[t].flatten() * 2, x[t].flatten() + 1
        scores = torch.where(at <= t, keys @ x[t].flatten(), float("-inf"))
        out[t] = torch.softmax(scores, 0) @ values
    return out, keys


ALGORITHMS = (suppression, life, whole_board, edit_distance, edit_distance_by_rows, grid, caches)


@pytest.mark.every(2)
@pytest.mark.parametrize("f", ALGORITHMS, ids=lambda f: f.__name__)
def test_algorithms(f: Callable[..., Any]) -> None:
    assert "in place" in rolled(f, *tensors(*SIZES), gradients=False).verdicts[-1].detail


def test_nodes_of_a_loop_in_a_loop_do_not_grow() -> None:
    def f(u: Tensor) -> Tensor:
        for i in range(1, u.shape[0]):
            for j in range(u.shape[1]):
                u[i, j] = torch.sin(u[i - 1, j] + u[i, j])
        return u

    counts = {same(f, *tensors((n, n + 1)), gradients=False).after for n in (5, 8, 12)}
    assert len(counts) == 1


def test_gradients_through_views_that_are_copied() -> None:
    """Where backward needs rows, eager wants copies of them: a buffer is written again."""

    def f(x: Tensor, b: Tensor) -> Any:
        b = b * 1
        for t in range(1, T):
            b[t] = b[t - 1].clone() * x[t] + b[t + 1].clone() * b[t].clone()
        return b

    rolled(f, *tensors(*SIZES))


# ---- what stays unrolled -----------------------------------------------------------------------------------------------


def test_parts_of_other_sizes() -> None:
    def f(x: Tensor, b: Tensor) -> Any:
        a = x.flatten(1)[:T, :T] + torch.eye(T, dtype=x.dtype) * 9
        for k in range(T - 1):
            a[k + 1 :, k] /= a[k, k]
            a[k + 1 :, k + 1 :] -= a[k + 1 :, k, None] * a[k, k + 1 :]
        return a

    refused(f, "parts of other sizes", *tensors(*SIZES), gradients=False)


def test_memory_that_has_two_names() -> None:
    def f(x: Tensor, b: Tensor) -> Any:
        b = b * 1
        rows = b[1:]
        for t in range(1, T):
            b[t] = torch.tanh(rows[t] + x[t])
        return b

    refused(f, "shares memory with", *tensors(*SIZES), gradients=False)


def test_layouts_that_are_not_contiguous() -> None:
    def f(x: Tensor, b: Tensor) -> Any:
        b = (b * 1).transpose(1, 2)
        for t in range(1, T):
            b[t] = torch.tanh(b[t - 1] + x[t].t())
        return b

    refused(f, "no contiguous tensor", *tensors(*SIZES), gradients=False)


def test_parts_that_are_carried_or_needed() -> None:
    def carried(x: Tensor, b: Tensor) -> Any:
        b, last = b * 1, b[0]
        for t in range(1, T):
            last, b[t] = b[t], last + x[t]
        return b, last

    def first(x: Tensor, b: Tensor) -> Any:
        b = b * 1
        h = b[1]
        for t in range(1, T):
            b[t] = h + x[t]
            h = torch.sin(h * 2)
        return b, h

    refused(carried, "carried, or needed behind", *tensors(*SIZES), gradients=False)
    refused(first, "shares memory with", *tensors(*SIZES), gradients=False)


def test_memory_for_backward() -> None:
    def f(x: Tensor, b: Tensor) -> Any:
        b = b.repeat(1, 100, 100)
        for t in range(1, T):
            b[t] = torch.tanh(b[t - 1] + x[t, 0, 0])
        return b.sum()

    refused(f, "bytes", *tensors(*SIZES))
    rolled(f, *tensors(*SIZES), gradients=False)


# ---- drawn programs ----------------------------------------------------------------------------------------------------

ROWS, WIDTH = 8, 5
Place = tuple[Any, ...]


def _place(pick: random.Random, nested: bool) -> Callable[[int, int], Place]:
    """An index of a matrix, which gives a row or a part of one, with numbers that advance."""
    a, b = pick.randint(0, 2), pick.randint(0, 2)
    kind = pick.choice(("row", "part", "block", "still", "point") if not nested else ("row", "point", "across", "still"))
    return {
        "row": lambda i, j: (i + a,),
        "part": lambda i, j: (i + a, slice(b, b + 2)),
        "block": lambda i, j: (slice(i + a, i + a + 2), slice(b, None, 2)),
        "still": lambda i, j: (a, slice(b, b + 3)),
        "point": lambda i, j: (i + a, j + b) if nested else (i + a, b),
        "across": lambda i, j: (slice(a, a + 3), j + b),
    }[kind]


def drawn(seed: int) -> Callable[..., Any]:
    """A loop, or a loop in a loop, over one to three buffers that are read, written, and changed through views."""
    pick = random.Random(seed)
    nested, count = pick.random() < 0.3, pick.randint(1, 3)
    kinds = ("assign", "assign", "add", "through", "mask", "whole", "number", "carry")
    body = [
        (pick.choice(kinds), pick.randrange(count), pick.randrange(count), _place(pick, nested), _place(pick, nested))
        for _ in range(pick.randint(1, 4))
    ]
    late, every = pick.random() < 0.3, pick.random() < 0.3

    def f(x: Tensor, *given: Tensor) -> Any:
        buffers, h, rows = [one * 1 for one in given[:count]], x[0, 0] * 1, []
        steps = [(i, j) for i in range(4) for j in range(3)] if nested else [(t, 0) for t in range(ROWS - 3)]
        for i, j in steps:
            for kind, to, source, there, here in body:
                h = _statement(kind, buffers[to], buffers[source], there(i, j), here(i, j), x[i], h, i)
            rows.append(h)
        return buffers, h, torch.stack(rows) if every else None, buffers[0][2] if late else None

    return f


def _statement(kind: str, to: Tensor, source: Tensor, there: Place, here: Place, row: Tensor, h: Tensor, i: int) -> Tensor:
    value = torch.tanh(source[here].sum() + row[0] * h)
    if kind == "assign":
        to[there] = value
    elif kind == "add":
        to[there] += value
    elif kind == "through":
        part = to[there]
        part.mul_(0.5)
        part.unsqueeze(0)[0].add_(value)
    elif kind == "mask":
        to[source > h] = 0.25
    elif kind == "whole":
        to.mul_(value)
    elif kind == "number":
        to[there] = i * 0.125
    return torch.sin(h + value) if kind == "carry" else h


def check_drawn(seed: int) -> int:
    found = same(drawn(seed), *tensors((ROWS, WIDTH), *[(ROWS, WIDTH)] * 3), gradients=False)
    return found.loops


@pytest.mark.every(2)
@pytest.mark.parametrize("seed", range(5))
def test_drawn_programs(seed: int) -> None:
    check_drawn(seed)


def test_most_drawn_programs_are_loops() -> None:
    assert sum(check_drawn(seed) > 0 for seed in range(20, 24)) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_many_drawn_programs(seed: int) -> None:
    check_drawn(seed)


# ---- through kgen ------------------------------------------------------------------------------------------------------


THROUGH_KGEN = (rows, in_views, blocks, elimination, two_buffers, state_and_rows, suppression, life, edit_distance, caches)


@pytest.mark.every(2)
@pytest.mark.cpu
@pytest.mark.parametrize("f", THROUGH_KGEN, ids=lambda f: f.__name__)
def test_results(f: Callable[..., Any]) -> None:
    args = tensors(*SIZES)
    got, counted = compiled(f, args, "on", gradients=False)
    assert counted["extern.scan"] == 1
    torch.testing.assert_close([one.double() for one in got], [one.double() for one in flat(f(*args))], rtol=1e-4, atol=1e-5)


@pytest.mark.cpu
@pytest.mark.parametrize("f", [rows, windows, numbers], ids=lambda f: f.__name__)
def test_gradients(f: Callable[..., Any]) -> None:
    args = tensors(*SIZES)
    got, counted = compiled(f, args, "on", gradients=True)
    wanted = [one.clone().requires_grad_() for one in args]
    results = f(*wanted)
    loss = sum((one * (k + 1)).sin().sum() for k, one in enumerate(flat(results)))
    want = [*flat(results), *torch.autograd.grad(loss, wanted)]  # type: ignore[arg-type]
    assert counted["extern.scan"] == 2
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.cpu
def test_iterations_write_into_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """No iteration copies the buffer, and the loop writes into the caller's."""

    def f(x: Tensor, b: Tensor) -> Tensor:
        row = b[1]
        for t in range(1, T):
            b[t] = torch.tanh(b[t - 1] + x[t])
        return row + 1

    kept = list[tuple[bool, ...]]()

    def spy(*args: Any) -> Any:
        kept.append(args[4])
        return scan(*args)

    scan = loops.scan
    monkeypatch.setattr(loops, "scan", spy)
    x, b = (one.float() for one in tensors(*SIZES))
    other, address = b.clone(), b.data_ptr()
    got, counted = compiled(f, [x, b], "on", gradients=False)
    torch.testing.assert_close(got, [f(x, other)])
    torch.testing.assert_close(b, other)
    assert kept == [(True,)]
    assert b.data_ptr() == address
    assert counted["kernels"] <= 4


@pytest.mark.cpu
def test_explain() -> None:
    with torch.no_grad(), kgen.config.override(loop_rolling="on"):
        text = " ".join(str(kgen.explain(rows, *(one.float() for one in tensors(*SIZES)))).split())
    assert Reason.CARRIED_ITERATIONS.value in text
    assert "write b in place" in text
