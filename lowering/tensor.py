"""What a lowering rule works with: a tensor whose element is a `Value` over canonical loop variables.

Nothing here stores a closure or computes memory addresses. A view substitutes index expressions for the variables; a
tensor that lives in a buffer is just one whose value is an unmasked load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, ExprLike, Var
from kgen.ir.nodes import Number, Sizes
from kgen.ir.values import Value

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)  # those that kernels know


def axes(sizes: Iterable[ExprLike]) -> tuple[Var, ...]:
    """The canonical loop variables i0, i1, ... of a shape."""
    return tuple(ix.var(f"i{k}", s) for k, s in enumerate(sizes))


def indices(sizes: Iterable[ExprLike]) -> tuple[Expr, ...]:
    """`axes` as expressions."""
    return tuple(v.expr() for v in axes(sizes))


def is_empty(sizes: Iterable[Expr]) -> bool:
    """Whether a tensor of such a shape has no elements, whatever the symbols are."""
    return any(s == 0 for s in sizes)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor under lowering. `dtype` is torch's; `value` has its compute dtype and ranges over ``axes(sizes)``.
    `weak` marks a scalar that a Python number became (it takes no part in type promotion); the value of a weak float is
    float64, as Python's is."""

    sizes: Sizes
    dtype: torch.dtype
    device: torch.device
    value: Value
    weak: bool = False

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def axes(self) -> tuple[Var, ...]:
        return axes(self.sizes)

    @property
    def indices(self) -> tuple[Expr, ...]:
        return indices(self.sizes)

    def numel(self) -> Expr:
        return ix.product(self.sizes)

    def with_value(self, value: Value, dtype: torch.dtype | None = None) -> Tensor:
        return replace(self, value=value, dtype=dtype or self.dtype)


def symbolic_float(bits: Expr) -> Tensor:
    """A Python float computed from sizes (see `SymbolTable.float_bits`), as elementwise rules take it."""
    value = vs.bitcast(vs.index_value(bits), torch.float64)
    return Tensor((), torch.get_default_dtype(), torch.device("cpu"), value, weak=True)


def number_of(tensor: Tensor) -> Number | None:
    """What `symbolic_float` was made of; None for any other tensor."""
    value = tensor.value
    if not tensor.weak or value.op != "bitcast" or value.args[0].op != "index":
        return None
    return Number(value.args[0].attr, "float")


def at(tensor: Tensor, where: Sequence[Expr]) -> Value:
    """The element of `tensor` at a logical index."""
    if len(where) != tensor.rank:
        raise ValueError(f"index of rank {len(where)} into a tensor of rank {tensor.rank}")
    mapping: dict[Atom, Expr] = dict(zip(tensor.axes, where, strict=True))
    return vs.substitute(tensor.value, mapping)


def reindex(tensor: Tensor, sizes: Iterable[ExprLike], where: Callable[..., Sequence[Expr]]) -> Tensor:
    """A view: element ``(j0, j1, ...)`` of the result is element ``where(j0, j1, ...)`` of `tensor`."""
    new_sizes = tuple(map(ix.as_expr, sizes))
    return replace(tensor, sizes=new_sizes, value=at(tensor, tuple(where(*indices(new_sizes)))))


def broadcast(tensor: Tensor, sizes: Iterable[ExprLike]) -> Tensor:
    """torch's broadcasting: dimensions aligned on the right; a size of one repeats."""
    new_sizes = tuple(map(ix.as_expr, sizes))
    if new_sizes == tensor.sizes:
        return tensor
    lead = len(new_sizes) - tensor.rank

    def where(*index: Expr) -> Sequence[Expr]:
        return [
            ix.ZERO if old == 1 and new != 1 else i
            for old, new, i in zip(tensor.sizes, new_sizes[lead:], index[lead:], strict=True)
        ]

    return reindex(tensor, new_sizes, where)


def broadcast_sizes(*shapes: Sizes) -> Sizes:
    rank = max((len(s) for s in shapes), default=0)
    out = []
    for k in range(rank):
        extent = ix.ONE
        for shape in shapes:
            position = k - (rank - len(shape))
            if position >= 0 and shape[position] != 1:
                extent = shape[position]
        out.append(extent)
    return tuple(out)


def reshape(tensor: Tensor, sizes: Iterable[ExprLike]) -> Tensor:
    """Row-major reshape. Dimensions that both shapes share keep their own index; only the rest is split or joined."""
    new_sizes = tuple(map(ix.as_expr, sizes))
    if new_sizes == tensor.sizes:
        return tensor
    if any(s == 0 for s in new_sizes):
        return reindex(tensor, new_sizes, lambda *_: [ix.ZERO] * tensor.rank)
    return reindex(tensor, new_sizes, lambda *index: _reshaped_index(tensor.sizes, new_sizes, index))


def _reshaped_index(old: Sizes, new: Sizes, index: Sequence[Expr]) -> list[Expr]:
    """Index into `old` for an index into `new`, block by block of equal partial products."""
    out: list[Expr] = []
    i = j = 0
    while i < len(old) or j < len(new):
        start_i, start_j = i, j
        left, right = ix.ONE, ix.ONE
        while True:
            if left is right and (i > start_i or j > start_j):
                break
            if i >= len(old) and j >= len(new):
                break
            take_old = j >= len(new) or (i < len(old) and _not_larger(left, right))
            if take_old and i < len(old):
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        while i < len(old) and old[i] == 1 and left is right:
            i += 1
        while j < len(new) and new[j] == 1 and left is right:
            j += 1
        linear = ix.linearize(index[start_j:j], ix.contiguous_strides(new[start_j:j]))
        out.extend(ix.delinearize(linear, old[start_i:i]))
    return [ix.ZERO if extent == 1 else e for extent, e in zip(old, out, strict=True)]


def _not_larger(a: Expr, b: Expr) -> bool:
    """Whether to grow `a` next; any answer is right, a good one finds smaller blocks."""
    x, y = a.as_int(), b.as_int()
    if x is not None and y is not None:
        return x <= y
    return ix.lower_bound(b - a) >= 0 or (x is not None and y is None)


def rounded(tensor: Tensor) -> Tensor:
    """The tensor as eager stores it, for whatever jumps: an index, a comparison, a conversion to integers."""
    return tensor.with_value(vs.as_stored(tensor.value, tensor.dtype)) if tensor.dtype in ops.NARROW_FLOATS else tensor


def element_in(tensor: Tensor, dtype: torch.dtype) -> Value:
    """The element in the compute dtype of `dtype`: integers and bools are made of what eager has stored."""
    source = tensor if dtype.is_floating_point else rounded(tensor)
    return vs.cast(source.value, ops.compute_dtype(dtype))


def convert(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A user's cast: rounds when `dtype` is narrower than the value."""
    if tensor.dtype == dtype:
        return tensor
    target = element_in(tensor, dtype)
    if dtype in ops.NARROW_FLOATS:
        target = vs.cast(target, dtype)
    return tensor.with_value(target, dtype)


def promote(*items: Tensor | int | float | bool | complex | Expr) -> torch.dtype:
    """torch's result type: tensors with dimensions outrank 0-d tensors, which outrank Python numbers, within a category."""
    best: list[torch.dtype | None] = [None, None, None]  # by priority: dimensioned, 0-d, number
    for item in items:
        level, dtype = _priority(item)
        old = best[level]
        best[level] = dtype if old is None else torch.promote_types(old, dtype)
    result: torch.dtype | None = None
    for level, other in enumerate(best):
        if other is not None and (result is None or _category(other) > _category(result)):
            is_number = level == 2 and other.is_floating_point and result is not None
            result = torch.get_default_dtype() if is_number else other
    assert result is not None
    return result


def _priority(item: Tensor | int | float | bool | complex | Expr) -> tuple[int, torch.dtype]:
    if isinstance(item, Tensor):
        return (2 if item.weak else 0 if item.rank else 1), item.dtype
    if isinstance(item, bool):
        return 2, torch.bool
    if isinstance(item, int | Expr):
        return 2, torch.int64
    return 2, torch.complex64 if isinstance(item, complex) else torch.get_default_dtype()


def _category(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype is torch.bool else 1


def unsupported(value: torch.Tensor) -> str:
    """Why no kernel can read or make such a tensor: complex numbers, sparse layouts, another device. Empty where one can."""
    if value.device.type not in ("cpu", "cuda"):
        return f"device {value.device.type}"
    if value.dtype.is_complex or (value.dtype.is_floating_point and value.dtype.itemsize < 2 and value.dtype not in FLOAT8):
        return f"dtype {str(value.dtype).removeprefix('torch.')}"
    if value.layout != torch.strided:
        return f"layout {value.layout}"
    if value.is_quantized or value.dtype.itemsize == 0:
        return "quantized tensor"
    return ""
