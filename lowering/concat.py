"""Joining tensors, padding them, and repeating their elements."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.values import Value
from kgen.lowering.builder import Builder
from kgen.lowering.fallback import Refused
from kgen.lowering.indexing import binary_search, gather_source
from kgen.lowering.scatter import full
from kgen.lowering.tensor import Tensor, at, convert, indices, promote, reindex, reshape
from kgen.lowering.views import Extent, axis, result_sizes, unsqueeze

# Up to this many parts are selected inside one value, which fuses with its consumers; more are written one by one.
MAX_SELECTED = 4
# And if together they cost no more elementary operations than this: each element of the whole computes all parts.
MAX_COST = 96
# The same of functions of one number.
MAX_BASIS = 8


def cat(b: Builder, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    dtype = promote(*tensors)
    rank = len(result_sizes(b))
    # torch lets a one-dimensional empty tensor stand in for an empty part of any shape
    parts = [convert(t, dtype) for t in tensors if t.rank == rank and not (t.rank == 1 and t.sizes[0] == 0)]
    k = axis(dim, rank)
    parts = [p for p in parts if p.sizes[k] != 0]
    if not parts:
        return full(b, result_sizes(b), dtype, tensors[0].device, 0)
    return joined(b, parts, k)


def joined(b: Builder, parts: Sequence[Tensor], k: int) -> Tensor:
    """Parts of one type, none of them empty, one behind the other along dimension `k`."""
    if len(parts) == 1:
        return parts[0]
    parts = _sized(parts, k)
    return _selected(parts, k) if _may_be_selected(parts) else _written(b, parts, k)


def _sized(parts: Sequence[Tensor], k: int) -> Sequence[Tensor]:
    """The parts with the same sizes along all other dimensions, numbers where some part has them: torch names the last part
    of a split by what is left, ``s // (s // 64) - 56``, which is 8 like the others."""
    first = [min((p.sizes[d] for p in parts), key=lambda size: size.as_int() is None) for d in range(parts[0].rank)]
    wanted = [(*first[:k], p.sizes[k], *first[k + 1 :]) for p in parts]
    return [p if p.sizes == sizes else reindex(p, sizes, lambda *j: j) for p, sizes in zip(parts, wanted, strict=True)]


def _may_be_selected(parts: Sequence[Tensor]) -> bool:
    return len(parts) <= MAX_SELECTED and vs.total_cost([part.value for part in parts]) <= MAX_COST


def _starts(parts: Sequence[Tensor], k: int) -> list[Expr]:
    starts = [ix.ZERO]
    for part in parts:
        starts.append(starts[-1] + part.sizes[k])
    return starts


def _selected(parts: Sequence[Tensor], k: int) -> Tensor:
    starts = _starts(parts, k)
    sizes = (*parts[0].sizes[:k], starts[-1], *parts[0].sizes[k + 1 :])
    j = indices(sizes)
    reads = [at(p, [i - start if d == k else i for d, i in enumerate(j)]) for p, start in zip(parts, starts, strict=False)]
    return Tensor(sizes, parts[0].dtype, parts[0].device, _choice(reads, j[k], starts))


def _choice(reads: Sequence[Value], place: Expr, starts: Sequence[Expr], shared: Container[Value] = ()) -> Value:
    """The value whose part `place` is in. Each reads only its own lanes, for the rest of it may lie outside of its tensor;
    loads that are `shared` are for all lanes."""
    value: Value | None = None
    for n in reversed(range(len(reads))):
        if value is None:
            inside = vs.compare("ge", place, starts[n])
            value = vs.guard_loads(reads[n], inside, shared) if inside.op != "const" else reads[n]
            continue
        inside = vs.compare("lt", place, starts[n + 1])
        mine = vs.call("and", inside, vs.compare("ge", place, starts[n]))
        value = vs.where(inside, reads[n] if mine.op == "const" else vs.guard_loads(reads[n], mine, shared), value)
    assert value is not None
    return value


def _written(b: Builder, parts: Sequence[Tensor], k: int) -> Tensor:
    """One buffer, filled by a node for each part, so that no kernel has to hold all of them."""
    starts = _starts(parts, k)
    out = b.freeze(b.buffer((*parts[0].sizes[:k], starts[-1], *parts[0].sizes[k + 1 :]), parts[0].dtype, parts[0].device).name)
    assert out.strides is not None
    names = [b.fresh(f"{out.name}_part{n}") for n in range(len(parts))]
    for name, part, start in zip(names, parts, starts, strict=False):
        offset = start * out.strides[k]
        b.graph.buffers[name] = replace(out, name=name, sizes=part.sizes, offset=offset, alias_of=out.name, is_part=True)
        b.graph.nodes.append(ir.Pointwise(name, part.axes, part.value, b.origin))
    b.graph.buffers[out.name] = replace(out, parts=tuple(names))
    return b.load(b.graph.buffers[out.name])


def stack(b: Builder, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """What all parts read at one place, as the halves of a byte do, is read once and without a mask."""
    k = dim % (tensors[0].rank + 1)
    if len(tensors) == 1 or not (_may_be_selected(tensors) or _is_basis(b, tensors)):
        return cat(b, [unsqueeze(b, t, k) for t in tensors], k)
    return chosen(tensors, k)


def _is_basis(b: Builder, tensors: Sequence[Tensor]) -> bool:
    """Whether a GPU had better choose among more tensors: cheap functions of one number, such as polynomials of it. Nodes of
    their own would store neighbours apart, to be read again by what permutes the stack. As a result of the graph it stays in
    parts, which threads exchange."""
    values = [part.value for part in tensors]
    if not b.on_gpu(tensors[0].device) or len(tensors) > MAX_BASIS or len(set(vs.loads(values))) != 1:
        return False
    if all(user.op == "output" for user in b.current.users):
        return False
    return vs.total_cost(values) <= MAX_COST


def chosen(tensors: Sequence[Tensor], k: int) -> Tensor:
    """Tensors side by side along a new dimension, as a choice at each element that is stored nowhere."""
    dtype = promote(*tensors)
    sizes = (*tensors[0].sizes[:k], ix.constant(len(tensors)), *tensors[0].sizes[k:])
    j = indices(sizes)
    reads = [at(convert(t, dtype), [*j[:k], *j[k + 1 :]]) for t in tensors]
    shared = set.intersection(*(set(vs.loads([read])) for read in reads))
    value = _choice(reads, j[k], [ix.constant(n) for n in range(len(reads) + 1)], shared)
    return Tensor(sizes, dtype, tensors[0].device, value)


# ---- padding --------------------------------------------------------------------------------------------------------


def _margins(x: Tensor, pad: Sequence[Extent]) -> list[tuple[int, Expr, Expr]]:
    """(dimension, elements before, elements after); torch lists the last dimension first."""
    return [(x.rank - 1 - n, ix.as_expr(pad[2 * n]), ix.as_expr(pad[2 * n + 1])) for n in range(len(pad) // 2)]


def constant_pad_nd(b: Builder, x: Tensor, pad: Sequence[Extent], value: Any = 0) -> Tensor:
    sizes, starts = list(x.sizes), [ix.ZERO] * x.rank
    for dim, before, after in _margins(x, pad):
        sizes[dim], starts[dim] = x.sizes[dim] + before + after, before
    place = [i - s for i, s in zip(indices(sizes), starts, strict=True)]
    inside = vs.const(True, torch.bool)
    for e, extent in zip(place, x.sizes, strict=True):
        inside = vs.call("and", inside, vs.call("and", vs.compare("ge", e, ix.ZERO), vs.compare("lt", e, extent)))
    filler = vs.const(value, x.dtype) if not isinstance(value, Expr) else vs.index_value(value, x.value.dtype)
    return Tensor(tuple(sizes), x.dtype, x.device, vs.masked(inside, at(x, place), filler))


def _padded(fold: Callable[[Expr, Expr], Expr]) -> Callable[..., Tensor]:
    """A rule for padding by elements of the tensor itself; `fold` maps a position, maybe outside, into the dimension."""

    def rule(b: Builder, x: Tensor, padding: Sequence[Extent]) -> Tensor:
        sizes, margins = list(x.sizes), {d: (p, q) for d, p, q in _margins(x, padding)}
        for dim, (before, after) in margins.items():
            sizes[dim] = x.sizes[dim] + before + after
        return reindex(
            x, sizes, lambda *j: [fold(i - margins[d][0], x.sizes[d]) if d in margins else i for d, i in enumerate(j)]
        )

    return rule


def _padded_backward(fold: Callable[[Expr, Expr], Expr]) -> Callable[..., Tensor]:
    """Its gradient: each element of the padded tensor adds to the one it was read from."""

    def rule(b: Builder, grad: Tensor, x: Tensor, padding: Sequence[Extent]) -> Tensor:
        margins = {d: p for d, p, _ in _margins(x, padding)}
        where = [fold(i - margins[d], x.sizes[d]) if d in margins else i for d, i in enumerate(grad.indices)]
        wide = ops.compute_dtype(x.dtype)
        total = b.copy(full(b, x.sizes, wide, x.device, 0))
        return convert(b.scatter(total, grad.sizes, where, grad.value, "add"), x.dtype)

    return rule


def _clamp(e: Expr, extent: Expr) -> Expr:
    return ix.minimum(ix.maximum(e, 0), extent - 1)


def _reflect(e: Expr, extent: Expr) -> Expr:
    from_start = ix.maximum(e, -e)
    return ix.minimum(from_start, (extent - 1) * 2 - from_start)


# ---- repeat_interleave ----------------------------------------------------------------------------------------------


def repeat_interleave(b: Builder, repeats: Tensor, *, output_size: Extent | None = None) -> Tensor:
    """The row that each output element comes from, when their number is known: the first whose running count exceeds it."""
    count = repeats.sizes[0].as_int()
    if output_size is None or count is None:
        raise Refused("data-dependent size")
    (ends,) = b.scan("sum", convert(repeats, torch.int64), 0)
    ends = gather_source(b, ends)
    (lane,) = indices((output_size,))

    def before(k: Value) -> Value:
        return vs.call("le", at(ends, [vs.indirect(k, ends.sizes[0], wrap=False)]), vs.index_value(lane))

    found = binary_search(count, before)
    return Tensor((ix.as_expr(output_size),), repeats.dtype, repeats.device, vs.cast(found, repeats.dtype))


def repeat_interleave_int(b: Builder, x: Tensor, repeats: Extent, dim: int | None = None, *, output_size: Any = None) -> Tensor:
    if dim is None:
        x, dim = reshape(x, (x.numel(),)), 0
    k = axis(dim, x.rank)
    sizes = list(x.sizes)
    sizes[k] = x.sizes[k] * repeats
    return reindex(x, sizes, lambda *j: [ix.floordiv(i, ix.as_expr(repeats)) if d == k else i for d, i in enumerate(j)])


RULES: dict[str, Callable[..., Any]] = {
    "aten.cat": cat,
    "aten.stack": stack,
    "aten.constant_pad_nd": constant_pad_nd,
    "aten.repeat_interleave.Tensor": repeat_interleave,
    "aten.repeat_interleave.self_int": repeat_interleave_int,
    **{f"aten.reflection_pad{n}d": _padded(_reflect) for n in (1, 2, 3)},
    **{f"aten.replication_pad{n}d": _padded(_clamp) for n in (1, 2, 3)},
    **{f"aten.reflection_pad{n}d_backward": _padded_backward(_reflect) for n in (1, 2, 3)},
    **{f"aten.replication_pad{n}d_backward": _padded_backward(_clamp) for n in (1, 2, 3)},
}
