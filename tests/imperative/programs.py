"""Imperative tensor programs, each with arguments: what `kgen.control_flow` is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Arguments = Callable[[], tuple[Any, ...]]

# The function, its arguments, and whether gradients of its floating-point arguments are compared, too.
PROGRAMS: dict[str, tuple[Callable[..., Any], Arguments, bool]] = {}


def program(arguments: Arguments, gradients: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def put(function: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[function.__name__] = (function, arguments, gradients)
        return function

    return put


def rows(*sizes: int) -> Tensor:
    return torch.rand(*sizes, dtype=torch.float64)


@program(lambda: (rows(8, 4), 8))
def few_rows(b, n):
    for i in range(n):
        b[i] = b[i] + 1
    return b


@program(lambda: (rows(100, 4), 100))
def many_rows(b, n):
    for i in range(n):
        b[i] = b[i] * i
    return b


@program(lambda: (rows(1000, 4),))
def static_rows(b):
    for i in range(1000):
        b[i] = b[i] + 1
    return b


@program(lambda: (rows(200, 4),))
def two_halves(b):
    half = b.shape[0] // 2
    for i in range(half):
        b[i] = b[i] + 1
    for i in range(half, 2 * half):
        b[i] *= 2
    return b


@program(lambda: (rows(100, 4),))
def carried_rows(b):
    for i in range(1, b.shape[0]):
        b[i] = b[i] + b[i - 1] * 0.5
    return b


@program(lambda: ((rows(12, 12) > 0.5).long(), 80))
def game_of_life(board, steps):
    for _ in range(steps):
        padded = torch.nn.functional.pad(board, (1, 1, 1, 1))
        around = sum(padded[1 + i : 13 + i, 1 + j : 13 + j] for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j)
        board[:] = ((around == 3) | ((board == 1) & (around == 2))).long()
    return board


@program(lambda: (rows(100),))
def stencil(x):
    for i in range(1, x.shape[0] - 1):
        x[i] = (x[i - 1] + x[i] + x[i + 1]) / 3
    return x


@program(lambda: (rows(80, 80) + 80 * torch.eye(80, dtype=torch.float64),))
def elimination(a):
    for k in range(a.shape[0] - 1):
        factor = a[:, k] / a[k, k]
        below = torch.arange(a.shape[0]) > k
        a -= torch.where(below, factor, 0.0)[:, None] * a[k]
    return a


@program(lambda: (rows(4, 16), rows(16, 16), 70))
def beam_step(scores, moves, n):
    history = torch.zeros(n, 4, dtype=torch.int64)
    for t in range(n):
        best = (scores.unsqueeze(2) + moves).amax(1)
        history[t] = best.argmax(1)
        scores = best - best.amax(1, keepdim=True)
    return scores, history


@program(lambda: (rows(90, 8), rows(90, 8), 90))
def key_cache(queries, keys, n):
    cache = torch.zeros(90, 8, dtype=torch.float64)
    out = torch.zeros(90, 8, dtype=torch.float64)
    for t in range(n):
        cache[t] = keys[t]
        seen = torch.arange(90) <= t
        scores = torch.where(seen, cache @ queries[t], -torch.inf)
        out[t] = torch.softmax(scores, 0) @ cache
    return out


@program(lambda: (70,))
def causal_mask(n):
    mask = torch.zeros(70, 70, dtype=torch.bool)
    for i in range(n):
        mask[i] = torch.arange(70) <= i
    return mask


@program(lambda: (rows(6, 4),))
def until_large(x):
    steps = 0
    while x.sum() < 100:
        x[steps % 6] = x[steps % 6] * 2 + 1
        steps += 1
    return x, steps


@program(lambda: (rows(6, 4), torch.tensor(1.0)))
def write_if(x, sign):
    if sign > 0:
        x[1] = 0
    else:
        x[:, 2].mul_(2)
    return x + 1


@program(lambda: (rows(6, 4), torch.tensor(-1.0)))
def write_else(x, sign):
    if sign > 0:
        x[1] = 0
    else:
        x[:, 2].mul_(2)
    return x + 1


@program(lambda: (rows(5, 6), 5, 6))
def nested(b, n, m):
    for i in range(n):
        for j in range(m):
            if b[i, j] > 0.5:
                b[i, j] = b[i, j] - i
            else:
                b[i, j] += j
    return b


@program(lambda: (rows(100, 4), 100))
def breaks(b, n):
    total = torch.zeros((), dtype=torch.float64)
    for i in range(n):
        total = total + b[i].sum()
        if total > 20:
            break
        b[i] = 0
    return b, total


@program(lambda: (rows(100, 4), 100))
def continues(b, n):
    for i in range(n):
        if b[i, 0] > 0.5:
            continue
        b[i] = b[i] + 1
    return b


@program(lambda: (rows(100), 100))
def first_large(x, n):
    for i in range(n):
        if x[i] > 0.9:
            return x[i] * 2, x + 1
    return x.sum(), x


@program(lambda: (rows(100), 0))
def no_trips(x, n):
    y = x + 1
    for i in range(n):
        y[i] = 0
    return y


@program(lambda: (rows(10, 4),))
def views_of_views(b):
    while b.sum() < 100:
        half = b[2:8]
        inner = half[1:3].t()
        inner[0] += 1
        half[0].mul_(2).add_(1)
    return b


@program(lambda: (rows(80, 4),))
def outer_view(b):
    top = b[:40]
    for i in range(top.shape[0], 2 * top.shape[0]):
        top[i - 40] = b[i] + 1
        b[i] = top[i - 40] * 2
    return b, top


@program(lambda: (rows(50),))
def suppression(scores):
    alive = torch.ones(50, dtype=torch.bool)
    kept = torch.zeros(50, dtype=torch.bool)
    while alive.any():
        best = torch.where(alive, scores, -1.0).argmax()
        kept[best] = True
        alive &= (scores - scores[best]).abs() > 0.05
    return kept


@program(lambda: (rows(7, 5),))
def chosen(x):
    largest = x[0]
    for row in x:
        largest = row if row.sum() > largest.sum() else largest
    return largest


@program(lambda: (rows(90, 6), rows(6, 6), 90), gradients=True)
def recurrent(x, w, n):
    h = torch.zeros(6, dtype=torch.float64)
    for t in range(n):
        h = torch.tanh(h @ w + x[t])
    return h


@program(lambda: (rows(6, 4),), gradients=True)
def branch_gradient(x):
    y = x * 2
    if x.sum() > 0:
        y[1] = x[0] * 3
    else:
        y += x
    return y.sin()


@program(lambda: (rows(90, 6), 90), gradients=True)
def row_gradient(x, n):
    y = x.sin()
    for i in range(n):
        y[i] = x[i] * x[i] + i
    return y


@program(lambda: (torch.tensor(97),))
def collatz(n):
    count = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        count += 1
    return count


@program(lambda: (rows(30), rows(30), 30))
def dot_until(a, b, n):
    total = 0.0
    i = 0
    while i < n and total < 3:
        total = total + a[i] * b[i]
        i += 1
    return total, i


@program(lambda: (rows(5, 3) - 0.5, 5), gradients=True)
def bound_in_both_branches(x, n):
    made = torch.zeros_like(x)
    for i in range(n):
        if x[i].sum() > 0:
            y = x[i] * 2
            y = y.cos()
        else:
            y = -x[i]
        made[i] = y
    return made


@program(lambda: (rows(90, 3) - 0.5, rows(90, 3), 90))
def bound_in_branches_of_branches(x, b, n):
    for i in range(n):
        if x[i].sum() > 0:
            if x[i, 0] > 0:
                z = x[i] * 2
                y = z + 1
            else:
                y = x[i].sin()
        else:
            y = -x[i]
        b[i] = y
    return b


@program(lambda: (rows(12), 12))
def insertion_sort(x, n):
    for i in range(1, n):
        key = x[i].clone()
        j = i - 1
        while j >= 0 and x[j] > key:
            x[j + 1] = x[j]
            j -= 1
        x[j + 1] = key
    return x


@program(lambda: (rows(5),))
def counted_in_a_loop(x):
    total = torch.zeros((), dtype=torch.float64)
    while total < 10:
        j = 0
        while j < 4 and x[j] < 3:
            before = j
            j += 1
            x[before] = x[before] + j
        total = total + x.sum() + 1
    return x, total


@program(lambda: (torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0], dtype=torch.float64),))
def two_insertions(x):
    for i in range(1, 3):
        key = x[i].clone()
        j = i - 1
        while j >= 0 and x[j] > key:
            x[j + 1] = x[j]
            j = j - 1
        x[j + 1] = key
    return x


@program(lambda: (rows(6, 5), torch.zeros((), dtype=torch.int64)))
def writes_through_views(b, i):
    while i < 4:
        b[i].mul_(2).sub_(b[0])
        b[i][1] = b[i, 2] * 2
        b[i][2:][0] += 1
        b[i][0].add_(b[0, 1])
        torch.relu_(b[i])
        torch.add(b[0], b[i], out=b[i + 1])
        b[i][1] *= 3
        i = i + 1
    return b


@program(lambda: (rows(6, 5), torch.zeros((), dtype=torch.int64)))
def names_of_views(b, i):
    total = b[0] * 0
    best = b[0].clone()
    while i < 4:
        row = b[i]
        b[i] = row + 1
        total = total + b[i]
        if b[i].sum() > best.sum():
            best = b[i].clone()
        i = i + 1
    return b, total, best


@program(lambda: (rows(4, 6), rows(6, 4), rows(4)))
def turned(x, y, r):
    v = x.t().contiguous().t().t()
    i = torch.zeros((), dtype=torch.int64)
    while i < v.shape[0] and r[0] < 2:
        v[i] = y[i] + r
        i = i + 1
    return v


@program(lambda: (rows(66, 4), rows(4)))
def one_column(x, r):
    for i in range(x.shape[0]):
        x[i, 3] = (r * 2).sum()
    return x


@program(lambda: (rows(66, 4), rows(4)))
def several_targets(b, y):
    n, i = 0, torch.zeros((), dtype=torch.int64)
    for k in range(b.shape[0]):
        b[k], y = y, b[k] + 1
    while i < 6:
        b[i], *(b[i, 1], n), i = y, b[i, 0] * 2, n + 1, i + 1
    return b, y, n
