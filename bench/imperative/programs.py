"""Imperative programs to measure: those of `tests/models/imperative/workloads.py`, small loops, loops that data decide, LSTMs.

Each takes tensors and gives tensors, and changes no argument: calls can be repeated, and recorded as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.models.imperative.workloads import ANCHORS, WORKLOADS, lstm

__all__ = ["PROGRAMS", "Program"]

Make = Callable[[int], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Program:
    """A function and what makes its arguments, by scale.

    `data_decides`: tensors decide what runs, so kgen takes it by `control_flow`. `counts`: the last argument, in turn, of a
    function that is compiled for any; a call is all of them. `library` makes what eager is, where it is not the function."""

    name: str
    run: Callable[..., Any]
    arguments: Make
    data_decides: bool = False
    counts: Sequence[int] = ()
    library: Callable[[Sequence[Tensor]], Callable[..., Any]] | None = None


def normal(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(len(size) + sum(size)))


def uniform(*size: int) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(len(size) + sum(size)))


# ---- loops whose trip count is known --------------------------------------------------------------------------------------


def add_to_rows(b: Tensor) -> Tensor:
    b = b.clone()
    for i in range(b.shape[0]):
        b[i] = b[i] + 1
    return b


def two_halves(b: Tensor) -> Tensor:
    b, half = b.clone(), b.shape[0] // 2
    for i in range(half):
        b[i] = b[i] + 1
    for i in range(half, 2 * half):
        b[i] *= 2
    return b


def columns(b: Tensor) -> Tensor:
    b = b.clone()
    for i in range(b.shape[1]):
        b[:, i] = b[:, i] * 2 + i
    return b


def loop_in_loop(b: Tensor) -> Tensor:
    b = b.clone()
    for i in range(b.shape[0]):
        for j in range(b.shape[1]):
            b[i, j] = b[i, j] * 2 + 1
    return b


def three_loops(b: Tensor) -> Tensor:
    b = b.clone()
    for i in range(b.shape[0]):
        for j in range(b.shape[1]):
            for k in range(b.shape[2]):
                b[i, j, k] = b[i, j, k] * (k + 1) + j
    return b


def lower_triangle(b: Tensor) -> Tensor:
    out = torch.zeros_like(b)
    for i in range(b.shape[0]):
        out[i, : i + 1] = b[i, : i + 1] * 2
    return out


def channel_swap(image: Tensor) -> Tensor:
    out = image.clone()
    for i in range(3):
        out[..., i] = image[..., 2 - i]
    return out


def normalised(image: Tensor) -> Tensor:
    out, means = torch.empty_like(image), image.new_full((3,), 0.5)
    for i in range(3):
        out[..., i] = (image[..., 2 - i] - means[i]) / (i + 1)
    return out


def causal_mask(b: Tensor) -> Tensor:
    mask = torch.zeros(b.shape, dtype=torch.bool, device=b.device)
    at = torch.arange(b.shape[1], device=b.device)
    for i in range(b.shape[0]):
        mask[i] = at <= i
    return torch.where(mask, b, 0)


def carried_rows(b: Tensor) -> Tensor:
    b = b.clone()
    for i in range(1, b.shape[0]):
        b[i] = b[i] + b[i - 1] * 0.5
    return b


def smoothed(b: Tensor) -> Tensor:
    b = b.clone()
    for i in range(1, b.shape[0] - 1):
        b[i] = (b[i - 1] + b[i] + b[i + 1]) / 3
    return b


AROUND = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j]


def life(board: Tensor) -> Tensor:
    """Forty steps of the Game of Life on a torus."""
    for _ in range(40):
        near = sum(board.roll((i, j), (0, 1)) for i, j in AROUND)
        board = ((near == 3) | ((board == 1) & (near == 2))).to(board.dtype)
    return board


def life_in_place(board: Tensor) -> Tensor:
    board = F.pad(board, (1, 1, 1, 1))
    inner = board[1:-1, 1:-1]
    height, width = board.shape
    for _ in range(40):
        near = sum(board[1 + i : height - 1 + i, 1 + j : width - 1 + j] for i, j in AROUND)
        inner.copy_((near == 3) | ((inner == 1) & (near == 2)))
    return board


def elimination(a: Tensor) -> Tensor:
    a = a + 3 * a.shape[0] * torch.eye(*a.shape, device=a.device, dtype=a.dtype)
    at = torch.arange(a.shape[0], device=a.device)
    for k in range(a.shape[0] - 1):
        factors = torch.where(at > k, a[:, k] / a[k, k], 0)
        a -= factors[:, None] * a[k]
    return a


def triangular_elimination(a: Tensor) -> Tensor:
    a = a + 3 * a.shape[0] * torch.eye(*a.shape, device=a.device, dtype=a.dtype)
    for k in range(a.shape[0] - 1):
        a[k + 1 :, k] /= a[k, k]
        a[k + 1 :, k + 1 :] -= a[k + 1 :, k, None] * a[k, k + 1 :]
    return a


def beam_steps(scores: Tensor, moves: Tensor) -> tuple[Tensor, Tensor]:
    history = torch.zeros(40, *scores.shape[:1], dtype=torch.int64, device=scores.device)
    for t in range(40):
        best = (scores.unsqueeze(2) + moves).amax(1)
        history[t] = best.argmax(1)
        scores = best - best.amax(1, keepdim=True)
    return scores, history


def key_cache(queries: Tensor, keys: Tensor) -> Tensor:
    cache, out = torch.zeros_like(keys), torch.zeros_like(queries)
    at = torch.arange(keys.shape[0], device=keys.device)
    for t in range(keys.shape[0]):
        cache[t] = keys[t]
        out[t] = torch.softmax(torch.where(at <= t, cache @ queries[t], float("-inf")), 0) @ cache
    return out


def edit_distance(one: Tensor, other: Tensor) -> Tensor:
    """Of two rows of letters; a row of the table at a time."""
    at = torch.arange(other.shape[0] + 1, device=other.device)
    row = at
    for i in range(one.shape[0]):
        changed = torch.minimum(row[1:] + 1, row[:-1] + (other != one[i]))
        row = (torch.cat((row[:1] + 1, changed)) - at).cummin(0).values + at
    return row


def box_decode(*maps: Tensor) -> Tensor:
    """Maps (1, anchors * 4, h, w) of three scales as bboxes."""
    found = []
    for scale, one in enumerate(maps):
        height, width, stride = *one.shape[-2:], 32 // 2**scale
        raw = one.view(len(ANCHORS), 4, height, width).permute(0, 2, 3, 1).contiguous()
        raw[..., 0] = (raw[..., 0].sigmoid() + torch.arange(width, device=one.device)) * stride
        raw[..., 1] = (raw[..., 1].sigmoid() + torch.arange(height, device=one.device)[:, None]) * stride
        for a, (w, h) in enumerate(ANCHORS):
            raw[a, ..., 2] = raw[a, ..., 2].exp() * w * stride
            raw[a, ..., 3] = raw[a, ..., 3].exp() * h * stride
        found.append(raw.view(-1, 4))
    return torch.cat(found)


def rnn(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    h, rows = x.new_zeros(x.shape[1:]), []
    for t in range(x.shape[0]):
        h = torch.tanh(x[t] @ w + h @ u)
        rows.append(h)
    return torch.stack(rows)


# ---- what data decide -----------------------------------------------------------------------------------------------------


def write_until_large(x: Tensor) -> tuple[Tensor, int]:
    x, steps = x.clone(), 0
    while x.sum() < 1e6:
        x[steps % 6] = x[steps % 6] * 2 + 1
        steps += 1
    return x, steps


def write_if(x: Tensor, sign: Tensor) -> Tensor:
    x = x.clone()
    if sign.sum() > 0:
        x[1] = 0
    else:
        x[:, 2].mul_(2)
    return x + 1


def suppression(scores: Tensor) -> Tensor:
    alive = torch.ones_like(scores, dtype=torch.bool)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    while alive.any():
        best = torch.where(alive, scores, -1.0).argmax()
        kept[best] = True
        alive &= (scores - scores[best]).abs() > 0.02
    return kept


def stop_at_a_sum(b: Tensor) -> tuple[Tensor, Tensor]:
    b, total = b.clone(), b.new_zeros(())
    for i in range(b.shape[0]):
        total = total + b[i].sum()
        if total > 500:
            break
        b[i] = 0
    return b, total


def bisect(low: Tensor, high: Tensor) -> Tensor:
    """Where x * x * x is 2, in each element."""
    while (high - low).amax() > 1e-5:
        middle = (low + high) / 2
        above = middle * middle * middle > 2
        high = torch.where(above, middle, high)
        low = torch.where(above, low, middle)
    return low


def add_to_first_rows(b: Tensor, n: int) -> Tensor:
    b = b.clone()
    for i in range(n):
        b[i] = b[i] + 1
    return b


# ---- all of them ----------------------------------------------------------------------------------------------------------


def _lstm_arguments(dtype: torch.dtype, scale: int) -> tuple[Tensor, ...]:
    """Inputs (steps, batch, n), weights of inputs and states, bias: 128 steps, a batch of 64, 512 features at a scale of 4."""
    n = 128 * scale
    sizes = (32 * scale, 16 * scale, n), (n, 4 * n), (4 * n, n), (4 * n,)
    x, w, u, bias = (normal(*size).to(dtype) for size in sizes)
    return x, w * n**-0.5, u.t().contiguous() * n**-0.5, bias


def _library_lstm(args: Sequence[Tensor]) -> Callable[..., Any]:
    """`torch.nn.LSTM`, which is cuDNN's on a GPU."""
    x, w, u, bias = args
    made = torch.nn.LSTM(w.shape[0], u.shape[0]).to(x.device, x.dtype)
    with torch.no_grad():
        made.weight_ih_l0.copy_(w.t())
        made.weight_hh_l0.copy_(u.t())
        made.bias_ih_l0.copy_(bias)
        made.bias_hh_l0.zero_()

    def call(x: Tensor, *_weights: Tensor) -> tuple[Tensor, Tensor]:
        states, (_last, cell) = made(x)
        return states, cell[0]

    return call


def _fixed(*size: int, make: Callable[..., Tensor] = normal) -> Make:
    return lambda _scale: (make(*size),)


_KNOWN = (
    Program("rows_1000", add_to_rows, _fixed(1000, 256)),
    Program("rows_100", add_to_rows, _fixed(100, 256)),
    Program("rows_8", add_to_rows, _fixed(8, 256)),
    Program("two_halves", two_halves, _fixed(100, 256)),
    Program("columns", columns, _fixed(256, 64)),
    Program("loop_in_loop", loop_in_loop, _fixed(12, 12, 64)),
    Program("three_loops", three_loops, _fixed(6, 6, 6, 64)),
    Program("lower_triangle", lower_triangle, _fixed(40, 40)),
    Program("channel_swap", channel_swap, _fixed(512, 512, 3)),
    Program("normalised", normalised, _fixed(512, 512, 3)),
    Program("causal_mask", causal_mask, _fixed(100, 100)),
    Program("carried_rows", carried_rows, _fixed(100, 256)),
    Program("smoothed", smoothed, _fixed(64, 256)),
    Program("life", life, lambda _: ((uniform(128, 128) > 0.6).float(),)),
    Program("life_in_place", life_in_place, lambda _: ((uniform(128, 128) > 0.6).float(),)),
    Program("elimination", elimination, _fixed(40, 40)),
    Program("triangular_elimination", triangular_elimination, _fixed(40, 40)),
    Program("beam_steps", beam_steps, lambda _: (normal(4, 64), normal(64, 64))),
    Program("key_cache", key_cache, lambda _: (normal(32, 64), normal(32, 64))),
    Program("edit_distance", edit_distance, lambda _: ((uniform(40) * 4).long(), (uniform(41) * 4).long())),
    Program("box_decode", box_decode, lambda _: tuple(normal(1, 12, 13 * 2**k, 13 * 2**k) for k in range(3))),
    Program("rnn", rnn, lambda _: (normal(50, 32, 128), normal(128, 128) * 0.08, normal(128, 128).flip(0) * 0.08)),
)
_DECIDED = (
    Program("write_until_large", write_until_large, _fixed(6, 4, make=uniform)),
    Program("write_if", write_if, lambda _: (normal(64, 64), torch.ones(1))),
    Program("write_else", write_if, lambda _: (normal(64, 64), -torch.ones(1))),
    Program("suppression", suppression, _fixed(500, make=uniform)),
    Program("stop_at_a_sum", stop_at_a_sum, _fixed(100, 16, make=uniform)),
    Program("bisect", bisect, lambda _: (torch.zeros(1000), torch.full((1000,), 2.0))),
    Program("any_count_of_rows", add_to_first_rows, _fixed(100, 256), counts=range(2, 22)),
)
# What takes longest to compile comes first.
PROGRAMS = (
    Program("cudnn_lstm", lstm, lambda scale: _lstm_arguments(torch.float32, scale), library=_library_lstm),
    Program("cudnn_lstm_bfloat16", lstm, lambda scale: _lstm_arguments(torch.bfloat16, scale), library=_library_lstm),
    *(Program(one.name, one.run, one.arguments) for one in sorted(WORKLOADS, key=lambda one: one.name != "nas_rnn")),
    *_KNOWN,
    *(replace(one, data_decides=True) for one in _DECIDED),
)
