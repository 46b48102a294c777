"""Cases of the view, indexing, scatter, concatenation and pooling families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from op_case import ANY, FLOATS, INTEGERS, Case, tensor

_aten = torch.ops.aten
NUMBERS = (*FLOATS, *INTEGERS)


def ints(*values: int, shape: Sequence[int] | None = None) -> torch.Tensor:
    made = torch.tensor(values, dtype=torch.int64)
    return made if shape is None else made.reshape(shape)


def one(*shape: int) -> Callable[[torch.dtype], list[Any]]:
    return lambda dtype: [tensor(dtype, *shape)]


def with_(*shape: int, extra: Sequence[Any] = ()) -> Callable[[torch.dtype], list[Any]]:
    return lambda dtype: [tensor(dtype, *shape), *extra]


def two(first: Sequence[int], second: Sequence[int], *extra: Any) -> Callable[[torch.dtype], list[Any]]:
    return lambda dtype: [tensor(dtype, *first), tensor(dtype, *second), *extra]


def turned(*shape: int) -> Callable[[torch.dtype], list[Any]]:
    return lambda dtype: [tensor(dtype, *shape).transpose(0, -1)]


VIEWS = [
    Case("view", lambda x: x.view(6, 4) + x.view(6, 4), one(2, 3, 4), ANY[:4], True),
    Case("view_minus_one", lambda x: x.view(-1, 4), one(2, 3, 4), ANY, True),
    Case("reshape_turned", lambda x: x.reshape(-1), turned(3, 5), ANY[:3], True),
    Case("permute", lambda x: x.permute(2, 0, -2), one(2, 3, 4), ANY[:3], True),
    Case("transpose", lambda x: x.transpose(-1, 0) * 1, one(2, 3, 4), ANY[:3]),
    Case("t_1d", lambda x: x.t() + 0, one(3), ANY[:1]),
    Case("squeeze", lambda x: (x.squeeze(), x.squeeze(1), x.squeeze((0, 1)), x.squeeze(-1)), one(1, 1, 4), ANY[:1]),
    Case("unsqueeze", lambda x: (x.unsqueeze(0), x.unsqueeze(-1)), one(3, 4), ANY[:1]),
    Case("expand", lambda x: x.expand(5, -1, 4) + 1, one(3, 1), ANY[:1], True),
    Case("slice", lambda x: (x[1:], x[:-1], x[::2], x[-2:, 1:3], x[5:], x[2:1]), one(5, 4), ANY, False),
    Case("slice_symbolic", lambda x: (x[1:], x[:-1], x[::2]), one(5, 4), ANY[:1], True),
    Case("select", lambda x: (x[0], x[-1], x[:, 2]), one(5, 4), ANY[:1], True),
    Case("split", lambda x: (*x.split(2), *x.split([1, 3], 1), *x.chunk(3)), one(5, 4), ANY[:1], True),
    Case("unbind", lambda x: x.unbind(1), one(5, 3), ANY[:1]),
    Case("flip", lambda x: (x.flip(0), x.flip(0, -1)), one(5, 3), ANY, True),
    Case("roll", lambda x: (x.roll(2), x.roll(-1, 0), x.roll((1, 7), (0, 1))), one(5, 3), ANY[:2], True),
    Case("roll_empty", lambda x: x.roll(2, 0), one(0, 3), ANY[:1]),
    Case("rot90", lambda x: (x.rot90(), x.rot90(2), x.rot90(3), x.rot90(-1)), one(5, 3), ANY[:1]),
    Case(
        "diagonal", lambda x: (x.diagonal(), x.diagonal(1, 0, 2), x.diagonal(-2, -1, 1), x.diagonal(9)), one(4, 3, 5), ANY[:1]
    ),
    Case("unfold", lambda x: (x.unfold(0, 2, 1), x.unfold(-1, 3, 2)), one(5, 7), ANY[:1], True),
    Case("as_strided", lambda x: (x.as_strided((2, 3), (1, 2)), x.as_strided((3,), (4,), 1)), one(3, 5), ANY[:1]),
    Case("as_strided_computed", lambda x: (x + 1).as_strided((2, 3), (1, 2), 2), one(3, 5), ANY[:1]),
    Case("as_strided_turned", lambda x: x.as_strided((2, 3), (1, 2), 2), turned(3, 5), ANY[:1]),
    Case("as_strided_slice", lambda x: x.as_strided((2, 3), (1, 2)), lambda d: [tensor(d, 6, 8)[1:5, ::2]], ANY[:1]),
    Case("as_strided_of_view", lambda x: x[1:].as_strided((2, 3), (1, 2)), one(4, 5), ANY[:1]),
    Case("repeat", lambda x: (x.repeat(2, 3), x.repeat(2, 1, 1), x.tile(2)), one(2, 3), ANY[:2], True),
    Case("narrow", lambda x: (x.narrow(0, 1, 2), x.narrow(-1, -2, 1)), one(4, 3), ANY[:1]),
    Case("movedim", lambda x: x.movedim(0, -1) + 1, one(4, 3, 2), ANY[:1]),
    Case("bits", lambda x: x.view(torch.int32) ^ 1, one(4, 3), (torch.float32,)),
    Case("bits_narrow", lambda x: x.view(torch.int16) ^ 1, one(4, 3), (torch.bfloat16,)),
    Case("from_bits", lambda x: (x + 1).to(torch.int16).view(torch.bfloat16), one(4, 3), (torch.int64,)),
    Case("view_of_view", lambda x: x.view(4, 6).transpose(0, 1).reshape(3, 8)[1] + 1, one(2, 3, 4), ANY[:1]),
]

INDEXING = [
    Case("index", lambda x, i: x[i] + x[:, i].sum(), with_(5, 4, extra=[ints(0, 3, -1, 2, 2)]), ANY[:1]),
    Case("index_one", lambda x, i: x[i], with_(5, 4, extra=[ints(0, 3, -1, -5)]), ANY, True),
    Case("index_two", lambda x, i, j: x[i, j], with_(5, 4, 2, extra=[ints(0, 3, -1), ints(2, 0, 1)]), ANY[:2], True),
    Case("index_broadcast", lambda x, i, j: x[i[:, None], j], with_(5, 4, 2, extra=[ints(0, 3), ints(2, 0, 1)]), ANY[:1]),
    Case("index_apart", lambda x, i, j: x[i, :, j], with_(5, 4, 3, extra=[ints(0, 3), ints(2, 0)]), ANY[:1], True),
    Case("index_middle", lambda x, i, j: x[:, i, j], with_(5, 4, 3, extra=[ints(0, 3), ints(2, 0)]), ANY[:1]),
    Case("index_computed", lambda x, i: (x * 2 + x.exp())[i % 3], with_(5, 4, extra=[ints(0, 3, 7, 8, 5, 3)]), FLOATS),
    Case("index_empty", lambda x, i: x[i], lambda d: [tensor(d, 5, 4), torch.zeros(0, dtype=torch.int64)], ANY[:1]),
    Case("index_int32", lambda x, i: x[i], with_(5, 4, extra=[ints(0, 3).int()]), ANY[:1]),
    Case("index_0d", lambda x, i: torch.ops.aten.index(x, [i]), with_(5, 4, extra=[torch.tensor(3)]), ANY[:1]),
    Case(
        "gather", lambda x, i: (x.gather(0, i), x.gather(-1, i)), with_(3, 3, extra=[ints(0, 2, 1, 1, shape=(2, 2))]), ANY, True
    ),
    Case("gather_0d", lambda x, i: x.gather(0, i), with_(extra=[torch.tensor(0)]), ANY[:1]),
    Case(
        "index_select", lambda x, i: (x.index_select(0, i), x.index_select(1, i)), with_(4, 3, extra=[ints(0, 2, 2)]), ANY, True
    ),
    Case(
        "embedding",
        lambda x, i: F.embedding(i, x, padding_idx=1),
        with_(7, 4, extra=[ints(0, 6, 1, 3, shape=(2, 2))]),
        FLOATS,
        True,
    ),
    Case("take", lambda x, i: x.take(i), with_(4, 3, extra=[ints(0, 11, -1, 5, shape=(2, 2))]), ANY[:2], True),
    Case("take_along_dim", lambda x, i: x.take_along_dim(i, 1), with_(2, 3, extra=[ints(0, 2, shape=(2, 1))]), ANY[:1]),
    Case("one_hot", lambda i: F.one_hot(i, 5), lambda d: [ints(0, 4, 2)], (torch.int64,)),
    Case(
        "searchsorted",
        lambda s, x: (torch.searchsorted(s, x), torch.searchsorted(s, x, right=True)),
        lambda d: [tensor(d, 2, 7).sort(-1)[0], tensor(d, 2, 5)],
        NUMBERS,
    ),
    Case(
        "bucketize",
        lambda x, s: (torch.bucketize(x, s), torch.bucketize(x, s, right=True, out_int32=True)),
        lambda d: [tensor(d, 3, 4), tensor(d, 8).sort()[0]],
        NUMBERS,
    ),
    Case("triu_tril", lambda x: (x.triu(), x.tril(-1), x.triu(2)), one(2, 4, 3), ANY, True),
    Case("masked_fill", lambda x: x.masked_fill(x > 0, 1), one(4, 3), NUMBERS),
    Case(
        "masked_scatter",
        lambda x, m, s: x.masked_scatter(m, s),
        lambda d: [tensor(d, 3, 4), tensor(torch.bool, 3, 4), tensor(d, 12)],
        NUMBERS[:2],
    ),
    Case("select_scatter", lambda x, s: (x.select_scatter(s, 0, 1), x.select_scatter(s, 0, -1)), two((4, 3), (3,)), ANY, True),
    Case("slice_scatter", lambda x, s: x.slice_scatter(s, 0, 1, 5, 2), two((6, 3), (2, 3)), ANY, True),
    Case("slice_scatter_end", lambda x, s: x.slice_scatter(s, 1, -2), two((6, 3), (6, 2)), ANY[:1]),
    Case("diagonal_scatter", lambda x, s: x.diagonal_scatter(s, 1), two((4, 3), (2,)), ANY[:2]),
    Case("diagonal_scatter_below", lambda x, s: x.diagonal_scatter(s, -1, 1, 0), two((4, 3), (2,)), ANY[:1]),
    Case("as_strided_scatter", lambda x, s: x.as_strided_scatter(s, (2, 2), (1, 3), 1), two((4, 3), (2, 2)), ANY[:1]),
]


def _idx() -> torch.Tensor:
    return ints(0, 2, 2, 1, 0, 2, shape=(2, 3))


def _reduced(how: str, include_self: bool) -> Callable[..., Any]:
    return lambda x, v: x.scatter_reduce(0, _idx(), v, how, include_self=include_self)


def _index_reduced(how: str) -> Callable[..., Any]:
    return lambda x, v: x.index_reduce(0, ints(0, 2, 2), v, how, include_self=False)


def _max_grad(k: int, s: int, p: int) -> Callable[..., Any]:
    def fn(x: torch.Tensor) -> torch.Tensor:
        value, lanes = _aten.max_pool2d_with_indices(x, [k, k], [s, s], [p, p])
        return _aten.max_pool2d_with_indices_backward(value * 2, x, [k, k], [s, s], [p, p], [1, 1], False, lanes)

    return fn


def _avg_grad(k: int, s: int, p: int, include: bool) -> Callable[..., Any]:
    return lambda g, x: _aten.avg_pool2d_backward(g, x, [k, k], [s, s], [p, p], False, include, None)


def _interpolate(mode: str, size: tuple[int, ...]) -> Callable[..., Any]:
    return lambda x: F.interpolate(x, size, mode=mode)


def _into_one(reduced: Sequence[int], dim: int) -> Callable[..., Any]:
    """Accumulation into a dimension of size 1 of a value that neither differs along it nor is stored before: every lane of a
    vector adds the same number to the same place."""

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        total = x.sum(reduced, keepdim=True).to(x.dtype)
        values, base = total.expand_as(x), total + 1
        base = base.expand(*(1 if d == dim else n for d, n in enumerate(x.shape)))
        lanes = torch.zeros(x.shape[dim], dtype=torch.int64)
        index = torch.zeros(x.shape, dtype=torch.int64)
        at = [lanes if d == dim else None for d in range(x.dim())]
        reductions = ("sum", "prod", "amax", "amin", *(["mean"] if x.dtype.is_floating_point else []))
        return [
            base.scatter_add(dim, index, values),
            base.index_add(dim, lanes, values, alpha=2),
            _aten.index_put(base, at, values, True),
            *(
                base.scatter_reduce(dim, index, values, how, include_self=itself)
                for how in reductions
                for itself in (True, False)
            ),
        ]

    return fn


def _small(*shape: int) -> Callable[[torch.dtype], list[Any]]:
    """Multiplications of many of them are exact."""
    return lambda dtype: [tensor(torch.float32, *shape).sign().to(dtype)]


SCATTER = [
    *[
        Case(f"scatter_into_one_{dim}", _into_one(reduced, dim), _small(2, 3, 21), (torch.float32, torch.float64, torch.int64))
        for reduced, dim in (((2,), 2), ((1,), 1), ((0, 1, 2), 0), ((0, 2), 2))
    ],
    Case("index_put", lambda x, v: x.index_put((ints(0, 2),), v), two((4, 3), (2, 3)), ANY),
    Case("index_put_add", lambda x, v: x.index_put((ints(0, 2, 0),), v, True), two((4, 3), (3, 3)), ANY),
    Case("index_put_two", lambda x, v: x.index_put((ints(0, -1), ints(1, 2)), v), two((4, 3, 2), (2,)), ANY[:1]),
    Case("index_put_none", lambda x, v: torch.ops.aten.index_put(x, [None, ints(0, -1)], v), two((4, 3), (4, 2)), ANY[:1]),
    Case("index_put_mask", lambda x, v: x.index_put((x > 0,), v), two((4, 3), ()), NUMBERS),
    Case("index_put_mask_row", lambda x, v: x.index_put((x[:, 0] > 0,), v), two((4, 3), (3,)), FLOATS),
    Case("scatter", lambda x, v: (x.scatter(0, _idx(), v), x.scatter(1, _idx(), 1)), two((3, 4), (2, 3)), ANY[:3]),
    Case("scatter_once", lambda x, v: x.scatter(0, ints(2, 0, shape=(2, 1)), v), two((3, 4), (2, 3)), ANY),
    Case("scatter_0d", lambda x, v: x.scatter(0, torch.tensor(0), v), two((), ()), ANY[:1]),
    Case(
        "scatter_reduce_op",
        lambda x, v: (x.scatter(0, _idx(), v, reduce="add"), x.scatter(0, _idx(), v, reduce="multiply")),
        two((3, 4), (2, 3)),
        FLOATS[:1],
    ),
    Case("scatter_add", lambda x, v: x.scatter_add(0, _idx(), v), two((3, 4), (2, 3)), ANY, True),
    *[
        Case(f"scatter_reduce_{how}_{self_}", _reduced(how, self_), two((3, 4), (2, 3)), (*FLOATS, torch.int64))
        for how in ("sum", "prod", "mean", "amax", "amin")
        for self_ in (True, False)
    ],
    *[
        Case(f"index_reduce_{how}", _index_reduced(how), two((4, 3), (3, 3)), FLOATS)
        for how in ("prod", "mean", "amax", "amin")
    ],
    Case("index_add", lambda x, v: x.index_add(0, ints(0, 2, 2), v, alpha=2), two((4, 3), (3, 3)), NUMBERS),
    Case("index_copy", lambda x, v: x.index_copy(0, ints(0, 2, 3), v), two((4, 3), (3, 3)), ANY),
    Case("index_fill", lambda x: x.index_fill(1, ints(0, -1), 1), one(4, 3), ANY),
    Case("put", lambda x, v: (x.put(ints(0, 5, -1), v), x.put(ints(0, 5, 0), v, True)), two((4, 3), (3,)), FLOATS),
    Case(
        "embedding_grad", lambda g: torch.ops.aten.embedding_dense_backward(g, ints(0, 2, 2, 1), 4, 1, False), one(4, 5), FLOATS
    ),
    Case(
        "embedding_grad_scaled",
        lambda g: torch.ops.aten.embedding_dense_backward(g, ints(0, 2, 2, 1), 4, -1, True),
        one(4, 5),
        FLOATS,
    ),
]

CONCAT = [
    Case("cat", lambda x, y: (torch.cat([x, y]), torch.cat([x, y, x + 1], -1)), two((3, 4), (3, 4)), NUMBERS, True),
    Case("cat_many", lambda x: torch.cat([x + k for k in range(7)], 1), one(3, 2), NUMBERS),
    Case("cat_empty", lambda x, y: torch.cat([x, y, x]), two((3, 4), (0,)), ANY[:1]),
    Case("cat_mixed", lambda x, y: torch.cat([x, y.int()]), two((3,), (2,)), NUMBERS),
    Case("stack", lambda x, y: (torch.stack([x, y]), torch.stack([x, y], -1)), two((3, 4), (3, 4)), ANY, True),
    Case("stack_0d", lambda x, y: torch.stack([x, y]), two((), ()), ANY[:1]),
    Case("pad", lambda x: (F.pad(x, (1, 2)), F.pad(x, (0, -1, 2, 1), value=3), F.pad(x, (-1, -1))), one(3, 4), NUMBERS, True),
    Case("pad_relu", lambda x: F.pad(x.exp(), (1, 1, 1, 1)), one(2, 3, 4), FLOATS),
    Case("pad_reflect", lambda x: F.pad(x, (1, 2), mode="reflect"), one(2, 3, 4), FLOATS, True),
    Case("pad_replicate", lambda x: F.pad(x, (1, 2, 3, 0), mode="replicate"), one(2, 3, 4), FLOATS, True),
    Case(
        "pad_replicate_grad",
        lambda g, x: torch.ops.aten.replication_pad2d_backward(g, x, [1, 2, 3, 0]),
        two((1, 2, 6, 7), (1, 2, 3, 4)),
        FLOATS,
    ),
    Case("pad_reflect_grad", lambda g, x: torch.ops.aten.reflection_pad1d_backward(g, x, [1, 2]), two((2, 7), (2, 4)), FLOATS),
    Case("repeat_interleave", lambda x: (x.repeat_interleave(3), x.repeat_interleave(2, 1)), one(3, 4), ANY, True),
    Case("repeat_interleave_tensor", lambda x: x.repeat_interleave(ints(1, 0, 3), 0, output_size=4), one(3, 4), FLOATS),
    Case("meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="ij"), two((3,), (4,)), ANY[:1]),
]


def _infinite(dtype: torch.dtype) -> list[Any]:
    x = torch.full((1, 1, 5, 6), float("-inf"), dtype=dtype)
    x[0, 0, 4, 1] = float("nan")
    x[0, 0, 4, 2] = float("nan")
    return [x]


POOLING = [
    Case("max_pool2d", lambda x: F.max_pool2d(x, 2), one(2, 3, 5, 6), (*FLOATS, torch.int64), True),
    Case("max_pool2d_indices", lambda x: F.max_pool2d(x, 3, 2, 1, 1, True, True), one(2, 3, 6, 7), FLOATS),
    Case("max_pool2d_infinite", lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), _infinite, FLOATS[:1]),
    Case("max_pool2d_dilated", lambda x: F.max_pool2d(x, (2, 3), 1, (1, 0), 2, return_indices=True), one(3, 6, 7), FLOATS[:1]),
    Case("max_pool2d_large", lambda x: F.max_pool2d(x, 7, 2, 3, return_indices=True), one(1, 2, 15, 12), FLOATS),
    Case("max_pool1d", lambda x: F.max_pool1d(x, 3, 2, 1), one(2, 3, 9), FLOATS),
    Case("max_pool3d", lambda x: F.max_pool3d(x, 2, 2, 1, return_indices=True), one(1, 2, 4, 5, 6), FLOATS[:1]),
    *[
        Case(f"max_pool2d_grad_{k}_{s}", _max_grad(k, s, p), one(1, 2, 9, 8), (torch.float32, torch.float64))
        for k, s, p in ((2, 2, 0), (3, 2, 1), (7, 1, 3))
    ],
    Case("avg_pool2d", lambda x: F.avg_pool2d(x, 2), one(2, 3, 5, 6), FLOATS, True),
    Case(
        "avg_pool2d_padded",
        lambda x: (
            F.avg_pool2d(x, 3, 2, 1, True),
            F.avg_pool2d(x, 3, 2, 1, True, False),
            F.avg_pool2d(x, (3, 2), 1, 1, divisor_override=5),
        ),
        one(2, 3, 6, 7),
        FLOATS,
    ),
    Case("avg_pool2d_large", lambda x: F.avg_pool2d(x, 7, 1, 3), one(1, 2, 9, 8), FLOATS),
    Case("avg_pool1d", lambda x: F.avg_pool1d(x, 3, 2, 1), one(2, 3, 9), FLOATS),
    Case("avg_pool3d", lambda x: F.avg_pool3d(x, 2, 2, 1), one(1, 2, 4, 5, 6), FLOATS[:1]),
    *[
        Case(f"avg_pool2d_grad_{k}_{s}_{include}", _avg_grad(k, s, p, include), two((1, 2, o1, o2), (1, 2, 9, 8)), FLOATS)
        for k, s, p, o1, o2 in ((2, 2, 0, 4, 4), (3, 2, 1, 5, 4), (7, 1, 3, 9, 8))
        for include in (True, False)
    ],
    Case(
        "adaptive_avg_pool2d",
        lambda x: (F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x, (3, 5)), F.adaptive_avg_pool2d(x, (9, 2))),
        one(2, 3, 7, 8),
        FLOATS,
    ),
    Case("adaptive_avg_pool2d_one", lambda x: F.adaptive_avg_pool2d(x, 1), one(2, 3, 7, 8), FLOATS, True),
    Case("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 3), one(2, 3, 7), FLOATS),
    Case("adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x, (2, 1, 3)), one(2, 3, 4, 5, 6), FLOATS[:1]),
    *[
        Case(f"adaptive_avg_grad_{o}", _aten._adaptive_avg_pool2d_backward.default, two((1, 2, *o), (1, 2, 7, 8)), FLOATS)
        for o in ((1, 1), (3, 5), (9, 2), (7, 4))
    ],
    Case("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, (3, 5), return_indices=True), one(2, 3, 7, 8), FLOATS),
    Case("adaptive_max_pool1d", lambda x: F.adaptive_max_pool1d(x, 3, return_indices=True), one(2, 3, 7), FLOATS),
    Case("adaptive_max_pool3d", lambda x: F.adaptive_max_pool3d(x, 2, return_indices=True), one(1, 3, 5, 4, 6), FLOATS[:1]),
    Case(
        "adaptive_max_grad",
        lambda x: _aten.adaptive_max_pool2d_backward(*(lambda o: (o[0], x, o[1]))(_aten.adaptive_max_pool2d(x, [3, 5]))),
        one(2, 3, 7, 8),
        FLOATS,
    ),
    Case("max_unpool2d", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), one(1, 2, 6, 8), FLOATS),
    *[
        Case(f"interpolate_{mode}_{size}", _interpolate(mode, size), one(1, 2, 5, 6), FLOATS[:1])
        for mode in ("nearest", "bilinear", "bicubic", "nearest-exact")
        for size in ((10, 12), (7, 4), (5, 18))
    ],
    Case("interpolate_linear", lambda x: F.interpolate(x, 9, mode="linear", align_corners=True), one(1, 2, 5), FLOATS[:1]),
    Case("interpolate_scale", lambda x: F.interpolate(x, scale_factor=1.7), one(1, 2, 5, 6), FLOATS[:1]),
    Case("nearest_grad", lambda g: _aten.upsample_nearest2d_backward(g, [10, 9], [1, 2, 5, 6]), one(1, 2, 10, 9), FLOATS[:1]),
    Case("unfold_fold", lambda x: F.fold(F.unfold(x, 2, padding=1), (5, 6), 2, padding=1), one(1, 2, 5, 6), FLOATS[:1]),
    Case("pixel_shuffle", lambda x: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2)), one(1, 4, 4, 6), ANY[:1], True),
    Case("grid_sample", lambda x, g: F.grid_sample(x, g, align_corners=False), two((1, 2, 5, 6), (1, 3, 4, 2)), FLOATS[:1]),
]

CASES: dict[str, list[Case]] = {"views": VIEWS, "indexing": INDEXING, "scatter": SCATTER, "concat": CONCAT, "pooling": POOLING}
