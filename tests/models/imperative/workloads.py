"""Imperative programs of detectors and recurrent networks: loops, writes into parts of tensors, choices that depend on data.

Each takes tensors and gives tensors. `WORKLOADS` has them with arguments for a scale: 1 for tests, larger for measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["WORKLOADS", "Workload"]

KEPT = 6  # bboxes that a suppression keeps
CLASSES = 5
ANCHORS = ((1.25, 1.6), (2.0, 3.75), (4.1, 2.9))


@dataclass(frozen=True)
class Workload:
    """A program and what makes its arguments. `differentiable` says whether it has gradients in eager: the attention loop has
    none, for it overwrites caches that it has read."""

    name: str
    run: Callable[..., Any]
    arguments: Callable[[int], tuple[Tensor, ...]]
    differentiable: bool = False


# ---- bboxes -------------------------------------------------------------------------------------------------------------


def overlap(box: Tensor, bboxes: Tensor) -> Tensor:
    """Intersection over union of a box (4,) with bboxes (n, 4), as corners."""
    low, high = torch.maximum(box[:2], bboxes[:, :2]), torch.minimum(box[2:], bboxes[:, 2:])
    common = (high - low).clamp(min=0).prod(-1)
    sizes = (bboxes[:, 2:] - bboxes[:, :2]).prod(-1)
    return common / ((box[2:] - box[:2]).prod() + sizes - common + 1e-9)


def suppress(bboxes: Tensor, scores: Tensor, kept: int = KEPT) -> tuple[Tensor, Tensor]:
    """The best bboxes, each of which puts out those that overlap it by more than a half. Rows without a box are zero."""
    alive, chosen, found = scores.clone(), bboxes.new_zeros(kept, 4), scores.new_zeros(kept)
    for k in range(kept):
        best = alive.argmax()[None]
        box, score = bboxes[best][0], alive[best][0]
        chosen[k] = torch.where(score > 0, box, 0)
        found[k] = score.clamp(min=0)
        alive[overlap(box, bboxes) > 0.5] = 0
        alive[best] = 0
    return chosen, found


def corners(centres: Tensor, sizes: Tensor) -> Tensor:
    return torch.cat((centres - sizes / 2, centres + sizes / 2), -1)


def grid(height: int, width: int, like: Tensor) -> Tensor:
    """The cells' coordinates, x first: (height, width, 2)."""
    ys, xs = torch.arange(height, device=like.device), torch.arange(width, device=like.device)
    return torch.stack(torch.meshgrid(xs, ys, indexing="xy"), -1).to(like.dtype)


def yolov3(*maps: Tensor) -> tuple[Tensor, Tensor]:
    """Maps (1, anchors * (5 + classes), h, w) of three scales, decoded in place, then suppressed."""
    found = []
    for scale, one in enumerate(maps):
        height, width = one.shape[-2:]
        stride = 32 // 2**scale
        raw = one.view(len(ANCHORS), 5 + CLASSES, height, width).permute(0, 2, 3, 1).contiguous()
        raw[..., :2] = (raw[..., :2].sigmoid() + grid(height, width, raw)) * stride
        for a, (w, h) in enumerate(ANCHORS):
            raw[a, ..., 2] = raw[a, ..., 2].exp() * w * stride
            raw[a, ..., 3] = raw[a, ..., 3].exp() * h * stride
        raw[..., 4:] = raw[..., 4:].sigmoid()
        found.append(raw.view(-1, 5 + CLASSES))
    rows = torch.cat(found)
    scores = rows[:, 4] * rows[:, 5:].amax(-1)
    return suppress(corners(rows[:, :2], rows[:, 2:4]), scores)


def ssd(locations: Tensor, confidences: Tensor, priors: Tensor) -> tuple[Tensor, Tensor]:
    """Offsets (n, 4) from priors (n, 4), and confidences (n, 1 + classes), the first of which is the background's."""
    bboxes = torch.empty_like(locations)
    bboxes[:, :2] = priors[:, :2] + locations[:, :2] * 0.1 * priors[:, 2:]
    bboxes[:, 2:] = priors[:, 2:] * torch.exp(locations[:, 2:] * 0.2)
    bboxes[:, :2] -= bboxes[:, 2:] / 2
    bboxes[:, 2:] += bboxes[:, :2]
    scores = confidences.softmax(-1)
    kept = [suppress(bboxes, torch.where(scores[:, c] > 0.2, scores[:, c], 0), 2) for c in range(1, CLASSES + 1)]
    return torch.stack([box for box, _ in kept]), torch.stack([score for _, score in kept])


def yolact(bboxes: Tensor, scores: Tensor, coefficients: Tensor, prototypes: Tensor) -> tuple[Tensor, Tensor]:
    """Masks of the bboxes (n, 4) that a suppression of all pairs leaves: of prototypes (h, w, k) by coefficients (n, k), each
    cut to its box."""
    order = scores.argsort(descending=True)[:KEPT]
    bboxes, scores, coefficients = bboxes[order], scores[order], coefficients[order]
    overlaps = torch.stack([overlap(bboxes[k], bboxes) for k in range(KEPT)]).triu(1)
    scores = torch.where(overlaps.amax(0) < 0.5, scores, 0)
    masks = (prototypes @ coefficients.tanh().t()).sigmoid()
    height, width = masks.shape[:2]
    at = grid(height, width, masks)
    for k in range(KEPT):
        inside = ((at >= bboxes[k, :2]) & (at < bboxes[k, 2:])).all(-1)
        masks[..., k] = torch.where(inside, masks[..., k], 0)
    return masks > 0.5, scores


def fcos(*levels: Tensor) -> tuple[Tensor, Tensor]:
    """Levels (4 + 1 + classes, h, w): distances to the edges, centredness and classes at each point."""
    bboxes, scores = [], []
    for number, level in enumerate(levels):
        stride = 8 * 2**number
        height, width = level.shape[1:]
        points = (grid(height, width, level) * stride + stride // 2).view(-1, 2)
        edges = (level[:4].exp() * stride).flatten(1).t()
        box = torch.empty_like(edges)
        box[:, 0], box[:, 1] = points[:, 0] - edges[:, 0], points[:, 1] - edges[:, 1]
        box[:, 2], box[:, 3] = points[:, 0] + edges[:, 2], points[:, 1] + edges[:, 3]
        bboxes.append(box.clamp(0, 128))
        scores.append((level[4].sigmoid() * level[5:].sigmoid().amax(0)).sqrt().flatten())
    return suppress(torch.cat(bboxes), torch.cat(scores))


# ---- recurrences -------------------------------------------------------------------------------------------------------


def nas_rnn(inputs: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """Inputs (steps, batch, n); a cell that a search for architectures has found, with eight pairs of terms."""
    n = inputs.shape[-1]
    state, memory = inputs.new_zeros(inputs.shape[1:]), inputs.new_zeros(inputs.shape[1:])
    out = torch.empty_like(inputs)
    for t in range(inputs.shape[0]):
        a, b = (inputs[t] @ w).split(n, -1), (state @ u).split(n, -1)
        first = [torch.sigmoid(a[0] + b[0]), torch.relu(a[1] + b[1]), torch.sigmoid(a[2] + b[2]), torch.relu(a[3] * b[3])]
        first += [torch.tanh(a[4] + b[4]), torch.sigmoid(a[5] + b[5]), torch.tanh(a[6] + b[6]), torch.sigmoid(a[7] + b[7])]
        second = [torch.tanh(first[0] * first[1]), torch.tanh(first[2] + first[3])]
        second += [torch.tanh(first[4] * first[5]), torch.sigmoid(first[6] + first[7])]
        memory = torch.tanh(second[0] + memory) * second[1]
        state = torch.tanh(memory * torch.tanh(second[2] + second[3]))
        out[t] = state
    return out


def lstm_cell(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, -1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def lstm(inputs: Tensor, w: Tensor, u: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs (steps, batch, n); all states, and the last cell."""
    state, cell = inputs.new_zeros(inputs.shape[1:]), inputs.new_zeros(inputs.shape[1:])
    states = []
    for t in range(inputs.shape[0]):
        state, cell = lstm_cell(inputs[t] @ w + state @ u + bias, cell)
        states.append(state)
    return torch.stack(states), cell


def seq2seq(encoded: Tensor, embedding: Tensor, w: Tensor, u: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Encoded (batch, length, n); at each step the token with the largest logit is the next one's input."""
    batch, length, n = encoded.shape
    state, cell = encoded.mean(1), encoded.new_zeros(batch, n)
    token = torch.zeros(batch, dtype=torch.int64, device=encoded.device)
    tokens = torch.zeros(batch, length, dtype=torch.int64, device=encoded.device)
    logits = encoded.new_zeros(batch, length, head.shape[-1])
    for t in range(length):
        weights = torch.softmax((encoded @ state[:, :, None])[..., 0] / n**0.5, -1)
        context = (weights[:, None] @ encoded)[:, 0]
        state, cell = lstm_cell((embedding[token] + context) @ w + state @ u, cell)
        logits[:, t] = state @ head
        token = logits[:, t].argmax(-1)
        tokens[:, t] = token
    return tokens, logits


def attention(x: Tensor, w: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """A decoder that writes each position's key and value into caches (length, n), and reads those up to it."""
    length, n = x.shape
    keys, values, out = keys.clone(), values.clone(), torch.empty_like(x)
    positions = torch.arange(length, device=x.device)
    for t in range(length):
        q, k, v = (x[t] @ w).split(n)
        keys[t], values[t] = k, v
        scores = torch.where(positions <= t, keys @ q / n**0.5, float("-inf"))
        out[t] = F.softmax(scores, -1) @ values + x[t]
    return out


# ---- all of them -------------------------------------------------------------------------------------------------------


def _normal(*size: int, scale: float = 1.0) -> Tensor:
    return torch.randn(size, generator=_generator(*size)) * scale


def _generator(*size: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum((k + 1) * one for k, one in enumerate(size)))


def _bboxes(count: int) -> Tensor:
    low = torch.rand(count, 2, generator=_generator(count, 2)) * 6
    return torch.cat((low, low + 1 + torch.rand(count, 2, generator=_generator(count, 3)) * 6), -1)


def _yolov3(s: int) -> tuple[Tensor, ...]:
    return tuple(_normal(1, len(ANCHORS) * (5 + CLASSES), 2 * s * 2**k, 2 * s * 2**k) for k in range(3))


def _ssd(s: int) -> tuple[Tensor, ...]:
    return _normal(24 * s, 4), _normal(24 * s, 1 + CLASSES, scale=2), _bboxes(24 * s)


def _yolact(s: int) -> tuple[Tensor, ...]:
    count = 12 * s
    return _bboxes(count), _normal(count).sigmoid(), _normal(count, 8), _normal(9 * s, 10 * s, 8)


def _fcos(s: int) -> tuple[Tensor, ...]:
    return tuple(_normal(5 + CLASSES, size, size) for size in (8 * s, 4 * s, 2 * s))


def _nas_rnn(s: int) -> tuple[Tensor, ...]:
    n = 8 * s
    return _normal(5 * s, 3, n), _normal(n, 8 * n, scale=n**-0.5), _normal(n, 8 * n, scale=n**-0.5).flip(0)


def _lstm(s: int) -> tuple[Tensor, ...]:
    n = 8 * s
    return _normal(5 * s, 3, n), _normal(n, 4 * n, scale=n**-0.5), _normal(n, 4 * n, scale=n**-0.5).flip(0), _normal(4 * n)


def _seq2seq(s: int) -> tuple[Tensor, ...]:
    n, words = 8 * s, 11 * s
    return (
        _normal(3, 5 * s, n), _normal(words, n), _normal(n, 4 * n, scale=n**-0.5), _normal(n, 4 * n, scale=n**-0.5).flip(0),
        _normal(n, words),
    )  # fmt: skip


def _attention(s: int) -> tuple[Tensor, ...]:
    n, length = 8 * s, 6 * s
    return _normal(length, n), _normal(n, 3 * n, scale=n**-0.5), torch.zeros(length, n), torch.zeros(length, n)


WORKLOADS = (
    Workload("yolov3", yolov3, _yolov3),
    Workload("ssd", ssd, _ssd),
    Workload("yolact", yolact, _yolact),
    Workload("fcos", fcos, _fcos),
    Workload("nas_rnn", nas_rnn, _nas_rnn, differentiable=True),
    Workload("lstm", lstm, _lstm, differentiable=True),
    Workload("seq2seq", seq2seq, _seq2seq),
    Workload("attention", attention, _attention),
)
