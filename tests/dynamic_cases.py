"""Functions of every operator family with the shapes that one dynamic graph has to serve."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """`run` takes one tensor for each shape of a set; all sets must be served by one graph."""

    name: str
    run: Callable[..., Any]
    shapes: tuple[tuple[Shape, ...], ...]
    backward: bool = False


def cases() -> list[Case]:
    return [Case(name, run, tuple(map(_listed, shapes)), name in _BACKWARD) for name, run, *shapes in _TABLE]


def _listed(shapes: Any) -> tuple[Shape, ...]:
    return shapes if isinstance(shapes[0], tuple) else (shapes,)


def _ids(x: Tensor, high: int) -> Tensor:
    """Indices below `high` made of data."""
    return (x.abs() * 1000).long() % high


def _chain(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a = torch.sin(x) * y + 1
    b = torch.tanh(a) - x
    return a, b, torch.where(b > 0, a, b) * 2


def _attention(x: Tensor) -> Tensor:
    scores = x @ x.transpose(-1, -2) * x.shape[-1] ** -0.5
    keep = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()
    return torch.softmax(scores.masked_fill(~keep, -math.inf), -1) @ x


def _scatter_rows(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0] + 2, x.shape[1])
    out[_ids(x[:, 0], 2)] = 1.0
    return out.index_add(0, _ids(x[:, 1], x.shape[0]), x)


def _in_place(x: Tensor) -> Tensor:
    y = x * 2
    y[1:] += x[:-1]
    y[:, 0] = 5
    y.t()[1].mul_(3)
    return y


_TABLE: list[tuple[Any, ...]] = [
    # pointwise
    ("add_row", lambda x, y: x + y, ((5, 7), (7,)), ((9, 4), (4,))),
    ("add_column", lambda x, y: x * y + 1, ((5, 7), (5, 1)), ((9, 4), (9, 1))),
    ("outer", lambda x, y: x[:, None] - y, ((5,), (7,)), ((9,), (4,))),
    ("chain", _chain, ((5, 7), (5, 7)), ((9, 4), (9, 4))),
    ("add_transposed", lambda x, y: x + y.t(), ((70, 50), (50, 70)), ((40, 90), (90, 40))),
    ("gelu", lambda x: F.gelu(x + 1), (5, 7), (9, 4)),
    ("size_as_number", lambda x: x * x.shape[0] + x.shape[1], (5, 7), (9, 4)),
    ("float_of_size", lambda x: x * x.shape[1] ** -0.5 + x.shape[0] / 7, (5, 7), (9, 4)),
    # reductions
    ("sum_all", lambda x: x.sum(), (5, 7), (9, 4)),
    ("sum_rows", lambda x: x.sum(1), (5, 7), (9, 4)),
    ("sum_columns", lambda x: x.sum(0), (5, 70), (9, 40)),
    ("mean_middle", lambda x: x.mean(1), (5, 7, 6), (9, 4, 3)),
    ("var", lambda x: torch.var_mean(x, (0, 2)), (5, 7, 6), (9, 4, 3)),
    ("argmax", lambda x: x.argmax(1), (5, 7), (9, 4)),
    ("amax_amin", lambda x: (x.amax(1), x.amin(1), x.std(1)), (5, 7), (9, 4)),
    ("logsumexp", lambda x: torch.logsumexp(x, 1), (5, 7), (9, 4)),
    ("vector_norm", lambda x: torch.linalg.vector_norm(x, dim=0), (5, 7), (9, 4)),
    # normalisation
    ("softmax", lambda x: torch.softmax(x, 1), (5, 7), (9, 4)),
    ("log_softmax", lambda x: torch.log_softmax(x, 0), (5, 7), (9, 4)),
    ("layer_norm", lambda x: F.layer_norm(x, (64,), torch.ones(64), torch.ones(64)), (5, 7, 64), (9, 4, 64)),
    ("layer_norm_symbolic", lambda x: F.layer_norm(x, x.shape[1:]), (5, 7), (9, 4)),
    ("rms_norm", lambda x: F.rms_norm(x, (64,)), (5, 64), (9, 64)),
    ("group_norm", lambda x: F.group_norm(x, 3), (5, 6, 7), (9, 6, 4)),
    ("batch_norm", lambda x: F.batch_norm(x, None, None, training=True), (5, 6, 7), (9, 6, 4)),
    ("cross_entropy", lambda x: F.cross_entropy(x, _ids(x[:, 0], x.shape[1])), (5, 7), (9, 4)),
    # concatenation
    ("cat", lambda x, y: torch.cat([x, y * 2, x[:, :2]], 1), ((5, 7), (5, 3)), ((9, 4), (9, 6))),
    ("cat_rows", lambda x, y: torch.cat([x, y]) + 1, ((5, 7), (3, 7)), ((9, 4), (6, 4))),
    ("stack", lambda x: torch.stack([x, x + 1], 1), (5, 7), (9, 4)),
    ("pad", lambda x: F.pad(x, (1, 2, 3, 0), value=1.5), (5, 7), (9, 4)),
    ("reflection_pad", lambda x: F.pad(x, (2, 1), mode="reflect"), (5, 7), (9, 4)),
    ("chunk", lambda x: [c * 2 for c in x.chunk(3, -1)], (5, 12), (9, 24)),
    ("split", lambda x: [c + 1 for c in x.split([2, x.shape[1] - 2], 1)], (5, 7), (9, 4)),
    ("repeat", lambda x: x.repeat(2, 3) + 1, (5, 7), (9, 4)),
    ("repeat_interleave", lambda x: x.repeat_interleave(3, 1) + 1, (5, 7), (9, 4)),
    # views
    ("flatten", lambda x: torch.softmax(x.flatten(0, 1), 1), (5, 7, 6), (9, 4, 3)),
    ("merge_heads", lambda x: x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1) + 1, (5, 3, 7, 8), (2, 3, 4, 8)),
    ("split_heads", lambda x: x.view(x.shape[0], x.shape[1], 4, -1).transpose(1, 2) * 2, (5, 7, 32), (2, 4, 32)),
    ("quotient", lambda x: x.reshape(x.shape[0] // 2, 2, -1).sum(1), (6, 7), (10, 4)),
    ("product", lambda x: x.reshape(-1, x.shape[0] * 2) + 1, (6, 8), (10, 4)),
    ("permute", lambda x: x.permute(2, 0, 1).contiguous() + x.permute(2, 0, 1), (5, 7, 6), (9, 4, 3)),
    ("slice", lambda x: x[1:-1, ::2] * 2, (5, 7), (9, 4)),
    ("slice_size", lambda x: x[: x.shape[1] // 2] + 1, (5, 8), (9, 4)),
    ("expand", lambda x: x[:, None].expand(-1, x.shape[0], -1) * 2, (5, 7), (9, 4)),
    ("flip_roll", lambda x: x.flip(0) + x.roll(2, 1), (5, 7), (9, 4)),
    ("diagonal", lambda x: x.diagonal() * 2, (5, 7), (9, 4)),
    ("unfold", lambda x: x.unfold(1, 3, 2) * 2, (5, 7), (9, 5)),
    ("tril", lambda x: x.tril() + x.triu(1) * 2, (5, 7), (9, 4)),
    ("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2) + 1, (5, 8, 7, 6), (2, 12, 3, 9)),
    # indexing
    ("index", lambda x: x[_ids(x[:, 0], x.shape[0])] * 2, (5, 7), (9, 4)),
    ("index_select", lambda x: x.index_select(1, _ids(x[0], x.shape[1])), (5, 7), (9, 4)),
    ("gather", lambda x: x.gather(1, _ids(x, x.shape[1])), (5, 7), (9, 4)),
    ("embedding", lambda x, w: F.embedding(_ids(x, 11), w) + 1, ((5, 7), (11, 6)), ((9, 4), (11, 6))),
    ("embedding_any", lambda x, w: F.embedding(_ids(x, w.shape[0]), w), ((5, 7), (11, 6)), ((9, 4), (8, 3))),
    ("scatter", lambda x: x.scatter(1, _ids(x[:, :2], x.shape[1]), 3.0), (5, 7), (9, 4)),
    ("scatter_add", lambda x: torch.zeros_like(x).scatter_add(1, _ids(x, x.shape[1]), x), (5, 7), (9, 4)),
    ("index_put", _scatter_rows, (5, 7), (9, 4)),
    ("masked_fill", lambda x: x.masked_fill(x > 0, 2.0) + 1, (5, 7), (9, 4)),
    ("one_hot", lambda x: F.one_hot(_ids(x, 4), 4), (5, 7), (9, 4)),
    ("take_along", lambda x: torch.take_along_dim(x, x.argsort(1), 1), (5, 7), (9, 4)),
    # scans
    ("cumsum", lambda x: x.cumsum(1) * 2, (5, 7), (9, 4)),
    ("cummax", lambda x: x.cummax(0), (5, 7), (9, 4)),
    # pooling and resizing
    ("max_pool", lambda x: F.max_pool2d(x, 2), (5, 3, 8, 6), (2, 4, 10, 12)),
    ("avg_pool", lambda x: F.avg_pool2d(x, 3, 2, 1), (5, 3, 8, 6), (2, 4, 10, 12)),
    ("adaptive_pool", lambda x: F.adaptive_avg_pool2d(x, (1, 1)), (5, 3, 8, 6), (2, 4, 10, 12)),
    ("nearest", lambda x: F.interpolate(x, scale_factor=2), (5, 3, 8, 6), (2, 4, 10, 12)),
    ("bilinear", lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"), (5, 3, 8, 6), (2, 4, 10, 12)),
    ("bilinear_size", lambda x: F.interpolate(x, (x.shape[2] * 2, 9), mode="bilinear"), (5, 3, 8, 6), (2, 4, 10, 12)),
    # creation
    ("arange", lambda x: torch.arange(x.shape[0]) * 2.0 + torch.full((x.shape[0],), x.shape[1] * 0.25), (5, 7), (9, 4)),
    ("linspace", lambda x: torch.linspace(0, 1, x.shape[0]) + x[:, 0], (5, 7), (9, 4)),
    ("eye", lambda x: torch.eye(x.shape[0]) + x[:, :1], (5, 7), (9, 4)),
    # contractions
    ("linear", lambda x, w: F.relu(F.linear(x, w)), ((5, 7, 6), (8, 6)), ((9, 4, 6), (8, 6))),
    ("bmm", lambda x: torch.bmm(x, x.transpose(1, 2)) * 2, (5, 7, 6), (9, 4, 3)),
    ("addmm", lambda x, y: torch.addmm(y, x, x.t()), ((5, 7), (5,)), ((9, 4), (9,))),
    ("conv", lambda x, w: F.relu(F.conv2d(x, w, padding=1)), ((5, 3, 8, 6), (4, 3, 3, 3)), ((2, 3, 10, 12), (4, 3, 3, 3))),
    ("attention", _attention, (5, 7, 8), (9, 4, 8)),
    ("sdpa", lambda x: F.scaled_dot_product_attention(x, x, x), (5, 3, 7, 8), (2, 3, 4, 8)),
    # mutation
    ("in_place", _in_place, (5, 7), (9, 4)),
    # numbers computed from sizes
    ("ceil", lambda x: x[: math.ceil(x.shape[0] / 2)] * 2, (5, 7), (9, 4)),
    ("fraction", lambda x: x[: int(x.shape[0] * 0.6)] * 2, (5, 7), (9, 4)),
    ("extremes", lambda x: x[: max(x.shape[0] // 2, 3)] + min(x.shape[0], 100), (5, 7), (9, 4)),
    ("returned", lambda x: (x + 1, x.shape[0] * 2, x.shape[1] * 0.5, x.shape[0] > 3), (5, 7), (9, 4)),
]  # fmt: skip

_BACKWARD = {
    "add_row", "chain", "gelu", "softmax", "layer_norm", "rms_norm", "group_norm", "cross_entropy", "cat", "pad", "flatten",
    "merge_heads", "embedding", "embedding_any", "gather", "index", "scatter_add", "cumsum", "max_pool", "avg_pool",
    "bilinear", "bilinear_size", "linear", "bmm", "conv", "attention", "sdpa", "float_of_size",
}  # fmt: skip


# Where one graph does not serve both sets of shapes: Dynamo guards on divisibility, on a stride, or on a number of steps.
SPECIALISED = frozenset(("product", "take_along", "linspace"))
# More kernels than with static sizes. A chunk's last part has another extent unless the size is known to divide; groups of
# channels need a channel count that is known to be a multiple; a returned float is a tensor to torch, made by a kernel.
MORE_KERNELS = frozenset(("chunk", "group_norm", "returned"))
# Left to the library: a template of attention has to know the length of a head.
MORE_CALLS = frozenset(("sdpa",))


def inputs(shapes: Sequence[Shape], grad: bool = False) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]
