"""Operators that run in eager: counted externs on materialised operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.fx import Node

from kgen import errors, ir, ops
from kgen import index as ix
from kgen import values as vs
from kgen.index import Expr
from kgen.lowering.builder import Builder
from kgen.lowering.layout import as_traced
from kgen.lowering.table import operator_name
from kgen.lowering.tensor import Tensor, symbolic_float
from kgen.values import Value


class Refused(Exception):
    """Raised by a rule for arguments it does not cover; the operator then runs in eager with this reason."""


def unsupported(node: Node) -> str:
    """Why no kernel can do the node's work whatever its operator: complex numbers, sparse layouts, another device."""
    for value in _values(node):
        if value.device.type not in ("cpu", "cuda"):
            return f"device {value.device.type}"
        if value.dtype.is_complex or (
            value.dtype.is_floating_point and value.dtype.itemsize < 2 and not _known_float8(value.dtype)
        ):
            return f"dtype {str(value.dtype).removeprefix('torch.')}"
        if value.layout != torch.strided:
            return f"layout {value.layout}"
        if value.is_quantized or value.dtype.itemsize == 0:
            return "quantized tensor"
    return ""


def refuse_on_gpu(graph: ir.Graph, nodes: Iterable[ir.Node], known: set[Value]) -> None:
    """Raises Refused if the nodes need what kernels on a GPU cannot do. `known` collects the values that passed."""
    for node in nodes:
        if isinstance(node, ir.Scatter) and node.mode != "set":
            dtype = graph.buffers[node.out].dtype
            if dtype not in ops.GPU_ATOMICS.get(node.mode, ()):
                raise Refused(f"no atomic {node.mode} of {str(dtype).removeprefix('torch.')} on a GPU")
        refuse_values_on_gpu(ir.roots(node), known)


def refuse_values_on_gpu(roots: Iterable[Value], known: set[Value]) -> None:
    """`refuse_on_gpu` for values that are no loops yet."""
    pending = [v for v in roots if v not in known]
    while pending:
        value = pending.pop()
        if value in known:
            continue
        if value.op in ops.CPU_ONLY:
            raise Refused(f"{value.op} is not computed on a GPU")
        known.add(value)
        pending.extend(vs.children(value))


def _known_float8(dtype: torch.dtype) -> bool:
    return dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def _values(node: Node) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            for item in value:
                visit(item)

    visit(node.meta.get("val"))
    for source in node.all_input_nodes:
        visit(source.meta.get("val"))
    return found


def extern(
    builder: Builder,
    node: Node,
    args: Any,
    kwargs: Mapping[str, Any],
    reason: str,
    wrap: Callable[[ir.Extern], ir.Node] | None = None,
) -> Any:
    """Adds the node as a call of its own operator. `wrap` turns the call into a richer node (`ir.Attention`, ...)."""
    if not isinstance(node.target, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        raise errors.MissingLowering(
            operator=operator_name(node.target), cause="not a torch operator", line=builder.origin.line
        )
    value = node.meta.get("val")
    symbols = builder.symbols
    flat = list(value) if isinstance(value, list | tuple) else [value]
    used = _used_results(node, len(flat)) if isinstance(value, list | tuple) else [True]
    specs: list[Any] = []
    for item, wanted in zip(flat, used, strict=True):
        if isinstance(item, torch.Tensor) and wanted:
            strides = symbols.sizes(item.stride()) if item.layout == torch.strided else None
            specs.append((symbols.sizes(item.shape), item.dtype, item.device, strides))
        else:
            specs.append(None)
    args, kwargs = as_traced(builder, node, args, kwargs)
    mutates = _mutations(builder, node, args, kwargs)
    binds = _bindings(node, flat, symbols)
    results = list(builder.extern(node.target, args, kwargs, specs, reason, mutates, _has_effect(node), wrap, binds))
    for position, item in enumerate(flat):
        if isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool):
            results[position] = symbolic(symbols, item)
    if not isinstance(value, list | tuple):
        return results[0] if results else None
    return tuple(results)


def symbolic(symbols: Any, value: Any) -> Any:
    """A SymInt or SymBool as an `Expr`; a SymFloat as a float where it is known, else as a weak tensor."""
    if not isinstance(value, torch.SymFloat):
        return symbols.expr(value)
    bits = symbols.float_bits(value)
    literal = bits.as_int()
    return symbolic_float(bits) if literal is None else ix.float_of(literal)


def _used_results(node: Node, count: int) -> list[bool]:
    used = [False] * count
    for user in node.users:
        if getattr(user.target, "__name__", "") == "getitem" and isinstance(user.args[1], int):
            used[user.args[1]] = True
        else:
            return [True] * count
    return used


def _mutations(builder: Builder, node: Node, args: Any, kwargs: Mapping[str, Any]) -> list[tuple[str, str]]:
    """New versions for the arguments that the operator's schema says it writes."""
    schema = getattr(node.target, "_schema", None)
    pairs: list[tuple[str, str]] = []
    if schema is None or not schema.is_mutable:
        return pairs
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, Tensor):
                name = builder.operand(tensor).buffer
                pairs.append((name, builder.new_version(name).name))
    return pairs


def _bindings(node: Node, flat: list[Any], symbols: Any) -> list[tuple[ix.Size, int, int]]:
    """Size symbols that only the call's results define: (symbol, result, dimension); dimension -1 is a number itself."""
    if "unbacked_bindings" not in node.meta or not node.meta["unbacked_bindings"]:
        return []
    found: list[tuple[ix.Size, int, int]] = []
    seen: set[ix.Size] = set()
    for position, item in enumerate(flat):
        pairs: list[tuple[int, Any]] = list(enumerate(item.shape)) if isinstance(item, torch.Tensor) else [(-1, item)]
        for dimension, extent in pairs:
            if not isinstance(extent, torch.SymInt | torch.SymFloat | torch.SymBool):
                continue
            atom = (symbols.float_bits if isinstance(extent, torch.SymFloat) else symbols.expr)(extent).atom()
            if isinstance(atom, ix.Size) and atom not in seen:
                seen.add(atom)
                found.append((atom, position, dimension))
    return found


def _has_effect(node: Node) -> bool:
    """Whether the call must run even if nobody reads its results."""
    return bool(node.is_impure()) or not node.users


def fresh_expr(value: Expr | int) -> Expr:
    return ix.as_expr(value)
