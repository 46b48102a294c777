"""Sizes and numbers that only data decide: what defines each of them, and the checks that torch left for run time.

A call that finds out a number binds it (`bindings`). What a rule computes with such a number, a slice, has sizes that are
expressions of it, for which torch has names of its own (`define`). What torch relies on after that is checked at run time,
before anything that needs the number (`check`); scheduling keeps that order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import CallMethodKey, ConvertIntKey
from torch.utils._pytree import SequenceKey, key_get, tree_flatten_with_path

from kgen.capture.check_index import check_index
from kgen.ir import index as ix
from kgen.ir.index import Expr, Size
from kgen.lowering.builder import Builder
from kgen.lowering.tensor import Tensor, reindex

KeyPath = tuple[Any, ...]


# The note on a node whose results' sizes, or numbers, have no other definition.
UNBACKED = "unbacked_bindings"


def is_binding(node: Node) -> bool:
    """Whether sizes or numbers of the node's result have no other definition."""
    return bool(node.meta.get(UNBACKED))


def note_bindings(b: Builder, node: Node) -> None:
    """Notes which sizes and numbers only the results of an operator define. Torch notes it on calls of operators, not on a
    mutable operator that it made functional, nor on those in the body of a higher-order operator."""
    if is_binding(node):
        return
    found: dict[sympy.Symbol, KeyPath] = {}
    for path, value in tree_flatten_with_path(node.meta.get("val"))[0]:
        for size, inside in _sizes_of(value):
            symbol = size.node.expr
            if isinstance(symbol, sympy.Symbol) and b.symbols.is_new(symbol):
                found.setdefault(symbol, (*path, *inside))
    if found:
        node.meta[UNBACKED] = found


def _sizes_of(value: Any) -> Iterator[tuple[torch.SymInt, KeyPath]]:
    if isinstance(value, torch.SymInt):
        yield value, ()
    elif isinstance(value, torch.Tensor):
        for dimension, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt):
                yield size, (CallMethodKey("size"), SequenceKey(dimension))


def _bound(node: Node) -> Iterator[tuple[sympy.Symbol, KeyPath]]:
    """The unbacked symbols of a result as its values name them, and where each is. Tracing anew has made other names."""
    for name, path in node.meta[UNBACKED].items():
        if path and isinstance(path[-1], ConvertIntKey):
            yield name, path[:-1]
            continue
        value = key_get(node.meta["val"], path)
        symbol = value.node.expr if isinstance(value, torch.SymInt) else None
        if isinstance(symbol, sympy.Symbol):
            yield symbol, path


def bindings(b: Builder, node: Node, flat: Sequence[Any]) -> list[tuple[Size, int, int]]:
    """Size symbols that only the call's results define: (symbol, result, dimension); dimension -1 is a number itself."""
    found: list[tuple[Size, int, int]] = []
    if not is_binding(node):
        return found
    whole = isinstance(node.meta["val"], list | tuple)
    for symbol, path in _bound(node):
        prefix, dimension = _dimension(path)
        if dimension is not None:
            position = prefix[0].idx if whole else 0
            found.append((b.symbols.measure(symbol, 0 if dimension >= 0 else -(1 << 62)), position, dimension))
    return found + _floats(b, flat)


def _floats(b: Builder, flat: Sequence[Any]) -> list[tuple[Size, int, int]]:
    atoms = [(b.symbols.float_bits(item).atom(), k) for k, item in enumerate(flat) if isinstance(item, torch.SymFloat)]
    return [(atom, position, -1) for atom, position in atoms if isinstance(atom, Size)]


def _dimension(path: KeyPath) -> tuple[KeyPath, int | None]:
    """The result that a path leads to, and which of its sizes; -1 for a number, None for strides and offsets."""
    if not any(isinstance(key, CallMethodKey) for key in path):
        return path, -1
    if len(path) >= 2 and isinstance(path[-2], CallMethodKey) and path[-2].name == "size":
        return path[:-2], path[-1].idx
    return path[:-1], None


def define(b: Builder, node: Node, result: Any) -> Any:
    """The result of a rule that binds sizes or numbers, with sizes named as torch names them."""
    if isinstance(node.meta["val"], torch.SymInt | torch.SymFloat | torch.SymBool):
        return result
    for symbol, path in _bound(node):
        prefix, dimension = _dimension(path)
        tensor = key_get(result, prefix) if dimension is not None else result
        if isinstance(tensor, Tensor) and dimension is not None and dimension >= 0:
            b.symbols.define(symbol, tensor.sizes[dimension])
        elif dimension is None and path and isinstance(path[-1], CallMethodKey):
            _define_offset(b, node, symbol)
    value = node.meta["val"]
    return _named(b, result, value) if isinstance(value, torch.Tensor) else result


def _named(b: Builder, tensor: Any, value: torch.Tensor) -> Any:
    sizes = b.symbols.sizes(value.shape)
    if not isinstance(tensor, Tensor) or sizes == tensor.sizes or len(sizes) != tensor.rank:
        return tensor
    return reindex(tensor, sizes, lambda *index: index)


def _define_offset(b: Builder, node: Node, symbol: sympy.Symbol) -> None:
    """Where a slice at a number from data begins in the storage that it is a view of."""
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    source: Any = node.args[0]
    if name not in ("aten::slice", "aten::select") or len(node.args) < 3:
        return
    below, dim = source.meta["val"], node.args[1]
    start = b.env[node.args[2]] if isinstance(node.args[2], Node) else node.args[2]
    extent, step = b.symbols.expr(below.shape[dim]), b.symbols.expr(below.stride(dim))
    first = ix.minimum(ix.maximum(wrapped(start, extent), 0), extent)
    b.symbols.define(symbol, b.symbols.expr(below.storage_offset()) + first * step)


def wrapped(index: Any, extent: Expr) -> Expr:
    """An index that may count from the end."""
    e = ix.as_expr(index)
    lo, hi = e.bounds()
    if lo >= 0:
        return e
    return e + extent if hi < 0 else ix.apply("select", ix.apply("lt", e, 0), e + extent, e)


# ---- checks ---------------------------------------------------------------------------------------------------------


def check_bound(b: Builder, node: Node) -> None:
    """The checks that torch relies on since it knows the numbers that the node binds."""
    env = b.symbols.shape_env
    if env is None:
        return
    for waiting in env.deferred_runtime_asserts.values():
        for one in waiting:
            if b.symbols.defined(one.expr):
                condition = b.symbols.check(one.expr)
                if condition is not None:
                    check(b, condition, f"Runtime assertion failed for expression {one.expr}")


def check(b: Builder, condition: Expr, message: str, operator: Any = torch.ops.aten._assert_scalar.default) -> None:
    """Raises an error at run time where the condition does not hold, before anything that needs its numbers: RuntimeError, or
    what another operator raises."""
    if condition.as_int() or condition in b.checked:
        return
    b.checked.add(condition)
    b.extern(operator, (condition, message), {}, [None], "a check at run time", effect=True)


def checked_index(b: Builder, index: Any, extent: Expr) -> Expr:
    """An index into a dimension, counted from its start. One that data decide is checked; tracing has checked others."""
    e = ix.as_expr(index)
    if b.symbols.depends_on_data(e):
        inside = ix.product([ix.apply("le", -extent, e), ix.apply("lt", e, extent)])
        check(b, inside, f"index {e} is out of range for a dimension of size {extent}", check_index)
    return wrapped(e, extent)
