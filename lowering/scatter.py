"""Writes at computed positions, and the reductions into them. Float accumulation runs in the order of the source's elements, as
in eager on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Size, Var
from kgen.ir.nodes import Sizes
from kgen.ir.values import Value
from kgen.lowering.builder import Builder
from kgen.lowering.fallback import Refused
from kgen.lowering.indexing import Advanced, at_least_1d, position
from kgen.lowering.mutation import Write, write, write_to
from kgen.lowering.sort_keys import rank_of, value_of_rank
from kgen.lowering.tensor import Tensor, at, axes, broadcast, convert, indices, reshape
from kgen.lowering.views import axis

Number = int | float | bool
# Operations that each element of a row may do again for the one that is written.
CHEAP = 16


def full(b: Builder, sizes: Sizes, dtype: torch.dtype, device: torch.device, number: Number) -> Tensor:
    return Tensor(sizes, dtype, device, vs.const(number, dtype))


def accumulate(b: Builder, base: Tensor, change: Write) -> Tensor:
    """Adds into `base`; for bools a sum is an `or`. Where each element is known to have one addition at most, and no memory has
    the tensor yet, as in the gradient of ``x[:, arange(n)]``, that is elementwise."""
    spread = _spread(base, change) if _is_computed(base) else None
    if spread is not None:
        inside, value = spread
        added = vs.call("or" if base.dtype is torch.bool else "add", value, base.value)  # to 0.0, too: it makes 0.0 of -0.0
        return base.with_value(vs.masked(inside, added, base.value))
    if _adds_up(b, base, change):
        return _accumulate_wide(b, base, change)
    return write(b, base, replace(change, mode="max" if base.dtype is torch.bool else "add"))


def _spread(base: Tensor, change: Write) -> tuple[Value, Value] | None:
    """Whether an element of `base` is changed, and by what, where each loop of the change goes along one dimension alone, from
    a known place on; None of other changes."""
    loops = {v for v in axes(change.sizes) if v.extent != 1}
    found: dict[Var, Expr] = {}
    inside: list[Value] = []
    for where, own, size in zip(change.where, base.indices, base.sizes, strict=True):
        atoms = ix.free_atoms(where)
        if not all(isinstance(atom, Var | Size) for atom in atoms) or not _is_inside(where, size):
            return None
        along = atoms & loops
        if not along:
            inside += [] if size == 1 else [vs.call("eq", vs.index_value(own), vs.index_value(where))]
            continue
        [loop] = along if len(along) == 1 else [None]
        if not isinstance(loop, Var) or loop in found or ix.stride_of(where, loop) != 1:
            return None
        place = found[loop] = own - (where - loop.expr())
        inside += [vs.compare("ge", place, ix.ZERO), vs.compare("lt", place, loop.extent)]
    if found.keys() != loops:
        return None
    mapping: dict[Atom, Expr] = {v: found.get(v, ix.ZERO) for v in axes(change.sizes)}
    within = functools.reduce(lambda a, b: vs.call("and", a, b), inside, vs.const(True, torch.bool))
    value = vs.substitute(vs.cast(change.value, ops.compute_dtype(base.dtype)), mapping)
    if change.mask is None:
        return within, value
    return vs.call("and", within, vs.guard_loads(vs.substitute(change.mask, mapping), within)), value


def _is_inside(index: Expr, size: Expr) -> bool:
    return ix.known_less(-1, index) and ix.known_less(index, size)


def _adds_up(b: Builder, base: Tensor, change: Write) -> bool:
    """Whether 16-bit numbers have at least as much added to them as there are of them: each sum would be rounded many times,
    and a GPU, which adds no single 16-bit number at once, would try again wherever two programs meet (111 us for a table of
    169x12 numbers, one of float32 a few; H100)."""
    if base.dtype not in ops.NARROW_FLOATS or base.dtype.itemsize != 2 or b.numerics == "eager":
        return False
    if base.value.op != "const":
        return False  # what is changed in place has no room for more
    added, elements = ix.product(change.sizes).as_int(), base.numel().as_int()
    return added is None or elements is None or added >= elements


def _accumulate_wide(b: Builder, base: Tensor, change: Write) -> Tensor:
    wide = ops.compute_dtype(base.dtype)
    total = b.copy(convert(base, wide))
    return convert(write_to(b, total, replace(change, value=vs.cast(change.value, wide), mode="add")), base.dtype)


# ---- index_put ------------------------------------------------------------------------------------------------------


def index_put(b: Builder, x: Tensor, indices_: Sequence[Tensor | None], values: Tensor, accumulate_: bool = False) -> Tensor:
    if any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in indices_):
        return _masked_put(x, indices_, values, accumulate_)
    plan = Advanced(b, x.sizes, indices_)
    sizes = plan.result_sizes() if plan.indexed else x.sizes
    values = broadcast(convert(values, x.dtype), sizes)
    change = Write(sizes, plan.source(indices(sizes)) if plan.indexed else indices(sizes), values.value)
    if (_is_zero(x) if accumulate_ else _is_computed(x)) and (rows := _loops_of_rows(x, change)) is not None:
        return _one_of_each_row(x, plan, values if _is_elementary(values) else b.realize(values), rows)
    return accumulate(b, x, change) if accumulate_ else write(b, x, change)


def _is_computed(x: Tensor) -> bool:
    """Whether no memory has the tensor yet. The kernel that fills it chooses at each element, which takes less than another
    kernel that changes one element of each row."""
    return x.value.op != "load"


def _is_zero(x: Tensor) -> bool:
    return bool(x.value.op == "const" and x.value.attr == 0)


def _loops_of_rows(x: Tensor, change: Write) -> dict[Var, int] | None:
    """The dimension that each loop of the change goes through, where every row along the remaining one has one element changed,
    as by ``x[arange(len(x)), labels]``."""
    loops = [v for v in axes(change.sizes) if v.extent != 1]
    through = {v: d for d, e in enumerate(change.where) for v in loops if e is v.expr() and v.extent is x.sizes[d]}
    return through if len(through) == len(loops) == x.rank - 1 else None


def _one_of_each_row(x: Tensor, plan: Advanced, values: Tensor, through: dict[Var, int]) -> Tensor:
    """``where(position == index, values, x)`` along the dimension that no loop goes through. Where no tensor indexes that one,
    it has one element, which is changed."""
    [dim] = set(range(x.rank)).difference(through.values())
    loops = axes(values.sizes)
    at_row = [x.indices[through[v]] if v in through else ix.ZERO for v in loops]
    if dim not in plan.tensors:
        return x.with_value(at(values, at_row))
    shared = at_row[plan.first : plan.first + len(plan.shape)]
    lane = vs.cast(at(plan.tensors[dim], shared), torch.int64)
    if plan.ranges[dim][0] < 0:
        size = vs.index_value(x.sizes[dim])
        lane = vs.where(vs.call("lt", lane, vs.const(0, torch.int64)), vs.call("add", lane, size), lane)
    lane = vs.asserted(lane, vs.index_inside(lane, x.sizes[dim]), "index")
    hit = vs.call("eq", vs.index_value(x.indices[dim]), lane)
    return x.with_value(vs.where(hit, at(values, at_row), x.value))


def _masked_put(x: Tensor, indices_: Sequence[Tensor | None], values: Tensor, accumulate_: bool) -> Tensor:
    """``x[mask] = v`` for one mask and values that do not depend on the position within it."""
    tensors = [(k, t) for k, t in enumerate(indices_) if t is not None]
    first, mask = tensors[0]
    rest = x.rank - first - mask.rank
    if len(tensors) > 1 or (values.rank > rest and any(s != 1 for s in values.sizes[: values.rank - rest])):
        raise Refused("boolean mask: the number of elements depends on data")
    inside = vs.cast(at(mask, x.indices[first : first + mask.rank]), torch.bool)
    values = reshape(values, values.sizes[max(values.rank - rest, 0) :])
    lead = x.rank - values.rank
    new = at(convert(values, x.dtype), [ix.ZERO if s == 1 else i for s, i in zip(values.sizes, x.indices[lead:], strict=True)])
    if accumulate_:
        new = vs.call("or" if x.dtype is torch.bool else "add", x.value, new)
    return x.with_value(vs.masked(inside, new, x.value))


def unsafe_masked_index_put_accumulate(
    b: Builder, x: Tensor, mask: Tensor, indices_: Sequence[Tensor | None], values: Tensor
) -> Tensor:
    plan = Advanced(b, x.sizes, indices_)
    sizes = plan.result_sizes()
    values, inside = broadcast(convert(values, x.dtype), sizes), broadcast(mask, sizes)
    return accumulate(b, x, Write(sizes, plan.source(indices(sizes)), values.value, mask=inside.value))


def put(b: Builder, x: Tensor, index: Tensor, source: Tensor, accumulate_: bool = False) -> Tensor:
    flat = reshape(x, (x.numel(),))
    where = [position(index, index.indices, flat.sizes[0], True)]
    change = Write(index.sizes, where, reshape(source, index.sizes).value)
    return reshape(accumulate(b, flat, change) if accumulate_ else write(b, flat, change), x.sizes)


# ---- scatter along a dimension --------------------------------------------------------------------------------------


class Along:
    """A scatter's geometry: the loop runs over the index tensor; 0-d tensors pass for 1-d."""

    def __init__(self, x: Tensor, dim: int, index: Tensor) -> None:
        self.x, self.index, self.dim = at_least_1d(x), at_least_1d(index), axis(dim, x.rank)
        self.sizes = self.index.sizes
        j = self.index.indices
        lane = position(self.index, j, self.x.sizes[self.dim], False)
        self.where = [lane if d == self.dim else i for d, i in enumerate(j)]

    def change(self, src: Tensor | Number | Expr, mode: str = "set") -> Write:
        return Write(self.sizes, self.where, self._value(src), mode)

    def _value(self, src: Tensor | Number | Expr) -> Value:
        if not isinstance(src, Tensor):
            return (
                vs.const(src, self.x.dtype)
                if not isinstance(src, Expr)
                else vs.index_value(src, ops.compute_dtype(self.x.dtype))
            )
        return at(convert(at_least_1d(src), self.x.dtype), self.index.indices)


def _nothing(index: Tensor) -> bool:
    """torch lets an empty index have any rank; it writes nothing."""
    return any(s == 0 for s in index.sizes)


def _shaped(out: Tensor, x: Tensor) -> Tensor:
    return reshape(out, x.sizes)


def scatter(b: Builder, x: Tensor, dim: int, index: Tensor, src: Any, *, reduce: str | None = None) -> Tensor:
    if _nothing(index):
        return x
    plan = Along(x, dim, index)
    mode = {None: "set", "add": "add", "multiply": "mul"}[reduce]
    if mode != "set" and x.dtype is torch.bool:
        mode = "max" if mode == "add" else "min"
    if mode == "set" and _is_one_hot(plan, src):
        return _shaped(_one_hot(plan, src), x)
    return _shaped(write(b, plan.x, plan.change(src, mode)), x)


def _is_one_hot(plan: Along, src: Any) -> bool:
    """One write a row into what is computed: the result needs no memory, each element knows whether it is the one."""
    return _is_computed(plan.x) and _is_one_a_row(plan) and _is_elementary(src)


def _is_one_a_row(plan: Along) -> bool:
    sizes = tuple(s for d, s in enumerate(plan.x.sizes) if d != plan.dim)
    rest = tuple(s for d, s in enumerate(plan.sizes) if d != plan.dim)
    return plan.sizes[plan.dim] == 1 and sizes == rest


def _is_elementary(src: Any) -> bool:
    """Whether each element may compute again what is written to its row: a number, or what is read with little arithmetic."""
    return not isinstance(src, Tensor) or vs.total_cost([src.value]) <= CHEAP


def _one_hot(plan: Along, src: Tensor | Number | Expr) -> Tensor:
    """``where(position == index, src, x)``: for the loss's gradient, which would otherwise fill and walk a tensor of
    logits."""
    x, dim = plan.x, plan.dim
    at_row = [ix.ZERO if d == dim else i for d, i in enumerate(x.indices)]
    lane = vs.cast(at(plan.index, at_row), torch.int64)
    lane = vs.asserted(lane, vs.index_inside(lane, x.sizes[dim]), "index")
    hit = vs.call("eq", vs.index_value(x.indices[dim]), lane)
    return x.with_value(vs.where(hit, _written(plan, src, at_row), x.value))


def _written(plan: Along, src: Tensor | Number | Expr, at_row: Sequence[Expr]) -> Value:
    """What is written to the row."""
    if isinstance(src, Tensor):
        return at(convert(at_least_1d(src), plan.x.dtype), at_row)
    return vs.const(src, plan.x.dtype) if not isinstance(src, Expr) else vs.index_value(src, ops.compute_dtype(plan.x.dtype))


def scatter_add(b: Builder, x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    if _nothing(index):
        return x
    plan = Along(x, dim, index)
    if _is_one_addition_a_row(plan, src):
        return _shaped(_one_hot(plan, src if _is_elementary(src) else b.realize(src)), x)
    return _shaped(accumulate(b, plan.x, plan.change(src)), x)


def _is_one_addition_a_row(plan: Along, src: Tensor) -> bool:
    """One addition a row to zeros, as in the gradient of `x.gather(1, label[:, None])`: a one-hot tensor as well."""
    return _is_zero(plan.x) and _is_one_a_row(plan) and src.sizes == plan.index.sizes


_MODES = {"sum": "add", "mean": "add", "prod": "mul", "amax": "max", "amin": "min"}
_IDENTITIES = {"sum": "sum", "mean": "sum", "prod": "prod", "amax": "max", "amin": "min"}


def scatter_reduce(
    b: Builder, x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    if _nothing(index):
        return x
    plan = Along(x, dim, index)
    return _shaped(_reduce_into(b, plan.x, plan.change(src), reduce, include_self), x)


def index_reduce(
    b: Builder, x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    base, change = _along_index(x, dim, index, source)
    return _shaped(_reduce_into(b, base, change, reduce, include_self), x)


def _reduce_into(b: Builder, base: Tensor, change: Write, reduce: str, include_self: bool) -> Tensor:
    """A reduction of all values that go to one element; without `include_self` the old value counts only where none goes."""
    if base.dtype is torch.bool and reduce in ("sum", "prod", "mean"):
        reduce = {"sum": "amax", "prod": "amin", "mean": "mean"}[reduce]
        if reduce == "mean":
            raise Refused("mean of bools")
    by_mode = replace(change, mode=_MODES[reduce])
    if _is_by_ranks(b, base, by_mode):
        return _by_ranks(b, base, by_mode, include_self)
    start = base
    if not include_self:
        start = write(b, base, replace(change, value=vs.const(ops.identity(_IDENTITIES[reduce], base.dtype), base.dtype)))
    total = write(b, start, by_mode)
    if reduce != "mean":
        return total
    ones = full(b, base.sizes, torch.int64, base.device, 1 if include_self else 0)
    count = write_to(b, b.copy(ones, f"{b.stem()}_count"), replace(change, value=vs.const(1, torch.int64), mode="add"))
    divisor = vs.cast(vs.call("maximum", count.value, vs.const(1, torch.int64)), total.value.dtype)
    return total.with_value(vs.call("truediv" if base.dtype.is_floating_point else "floordiv", total.value, divisor))


def _is_by_ranks(b: Builder, base: Tensor, change: Write) -> bool:
    """Whether ranks of floats are what a GPU finds the extremes of: its atomics compare integers alone. Numbers that are in
    memory before would be read and stored more often than the library does it."""
    extremes = change.mode in ("max", "min") and base.dtype.is_floating_point
    return extremes and base.value.op == "const" and b.on_gpu(base.device)


def _by_ranks(b: Builder, base: Tensor, change: Write, include_self: bool) -> Tensor:
    """NaN goes beyond all numbers, for it is the result where it is among them. Numbers are those that eager stores: a gradient
    goes to what equals the extreme."""
    wide = torch.float64 if base.dtype is torch.float64 else torch.float32

    def ranked(value: Value) -> Value:
        value = vs.as_stored(value, base.dtype) if base.dtype in ops.NARROW_FLOATS else value
        rank = rank_of(vs.cast(value, wide))
        least = vs.const(torch.iinfo(rank.dtype).min, rank.dtype)
        return rank if change.mode == "max" else vs.where(vs.call("isnan", value), least, rank)

    ranks = ranked(base.value)
    table = b.copy(base.with_value(ranks, ranks.dtype))
    if not include_self:
        table = write_to(b, table, replace(change, value=ranked(vs.const(ops.identity(change.mode, wide), wide)), mode="set"))
    total = write_to(b, table, replace(change, value=ranked(change.value)))
    return convert(total.with_value(value_of_rank(total.value), wide), base.dtype)


def _along_index(x: Tensor, dim: int, index: Tensor, source: Tensor) -> tuple[Tensor, Write]:
    """Whole slices go to the positions of a one-dimensional index."""
    base, lanes, k = at_least_1d(x), at_least_1d(index), axis(dim, x.rank)
    sizes = (*base.sizes[:k], lanes.sizes[0], *base.sizes[k + 1 :])
    j = indices(sizes)
    where = [position(lanes, [i], base.sizes[k], False) if d == k else i for d, i in enumerate(j)]
    return base, Write(sizes, where, reshape(convert(source, x.dtype), sizes).value)


def index_add(b: Builder, x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Tensor:
    base, change = _along_index(x, dim, index, source)
    if alpha != 1:
        scaled = vs.call("and" if x.dtype is torch.bool else "mul", change.value, vs.const(alpha, x.dtype))
        change = replace(change, value=scaled)
    return _shaped(accumulate(b, base, change), x)


def index_copy(b: Builder, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    base, change = _along_index(x, dim, index, source)
    return _shaped(write(b, base, change), x)


def index_fill(b: Builder, x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    filler = value if isinstance(value, Tensor) else full(b, (), x.dtype, x.device, value)
    base, lanes, k = at_least_1d(x), at_least_1d(index), axis(dim, x.rank)
    sizes = (*base.sizes[:k], lanes.sizes[0], *base.sizes[k + 1 :])
    where = [position(lanes, [i], base.sizes[k], True) if d == k else i for d, i in enumerate(indices(sizes))]
    return _shaped(write(b, base, Write(sizes, where, broadcast(convert(filler, x.dtype), sizes).value)), x)


def embedding_dense_backward(
    b: Builder, grad: Tensor, indices_: Tensor, num_weights: Any, padding_idx: Any, scale_grad_by_freq: bool
) -> Tensor:
    rows = ix.as_expr(num_weights)
    flat = reshape(indices_, (indices_.numel(),))
    width = grad.sizes[indices_.rank :]
    source = reshape(grad, (*flat.sizes, *width))
    row = position(flat, [source.indices[0]], rows, False)
    value = vs.cast(source.value, ops.compute_dtype(grad.dtype))
    counted = vs.call("ne", vs.cast(at(flat, [source.indices[0]]), torch.int64), vs.index_value(ix.as_expr(padding_idx)))
    if scale_grad_by_freq:
        zeros = b.copy(full(b, (rows,), torch.int64, grad.device, 0), f"{b.stem()}_count")
        count = b.scatter(zeros, flat.sizes, [position(flat, flat.indices, rows, False)], vs.const(1, torch.int64), "add")
        value = vs.call("truediv", value, vs.cast(at(count, [row]), value.dtype))
    mask = None if counted.op == "const" else counted
    change = Write(source.sizes, [row, *source.indices[1:]], value, mask=mask)
    return _accumulate_wide(b, full(b, (rows, *width), grad.dtype, grad.device, 0), change)


RULES: dict[str, Callable[..., Any]] = {
    "aten.index_put": index_put,
    "aten._unsafe_index_put": index_put,
    "aten._unsafe_masked_index_put_accumulate": unsafe_masked_index_put_accumulate,
    "aten.put": put,
    "aten.scatter": scatter,
    "aten.scatter_add": scatter_add,
    "aten.scatter_reduce": scatter_reduce,
    "aten.index_reduce": index_reduce,
    "aten.index_add": index_add,
    "aten.index_copy": index_copy,
    "aten.index_fill": index_fill,
    "aten.embedding_dense_backward": embedding_dense_backward,
}
