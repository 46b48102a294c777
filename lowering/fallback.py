"""Operators that run in eager: counted externs on materialised operands."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from kgen import errors
from kgen.capture.operators import operator_name
from kgen.capture.tree_call import TreeCall
from kgen.ir import functions, ops
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.values import Value
from kgen.lowering.builder import Builder
from kgen.lowering.layout import as_traced, strides_of
from kgen.lowering.tensor import Tensor, symbolic_float
from kgen.lowering.unbacked import bindings


class Refused(Exception):
    """Raised by a rule for arguments it does not cover; the operator then runs in eager with this reason."""


def refuse_on_gpu(graph: ir.Graph, nodes: Iterable[ir.Node], known: set[Value], deterministic: bool = False) -> None:
    """Raises Refused if the nodes need what kernels on a GPU cannot do. `known` collects the values that passed. Atomic
    additions of floats come in any order, so they are nothing for a `deterministic` program."""
    for node in nodes:
        if isinstance(node, ir.Scatter) and node.mode != "set":
            dtype = graph.buffers[node.out].dtype
            if deterministic and node.mode == "add" and dtype.is_floating_point:
                raise Refused("atomic additions have no order, and the program wants deterministic algorithms")
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


def extern(
    builder: Builder,
    node: Node,
    args: Any,
    kwargs: Mapping[str, Any],
    reason: str,
    wrap: Callable[[ir.Extern], ir.Node | tuple[ir.Node, ...]] | None = None,
    written: Sequence[str] = (),
    skipped: Container[int] = (),
) -> Any:
    """Adds the node as a call of its own operator. `wrap` turns the call into a richer node (`ir.Attention`, ...), or
    into several nodes that give its results. `written` are buffers that it writes besides those which its schema names,
    `skipped` results that it does not give."""
    if not isinstance(node.target, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        raise errors.MissingLowering(
            operator=operator_name(node.target), cause="not a torch operator", line=builder.origin.line
        )
    value = node.meta.get("val")
    symbols = builder.symbols
    flat, spec = tree_flatten(value)
    used = _used_results(node, tree_unflatten(range(len(flat)), spec))
    specs: list[Any] = []
    for position, item in enumerate(flat):
        if isinstance(item, torch.Tensor) and position in used and position not in skipped:
            strides = strides_of(builder, item, node) if item.layout == torch.strided else None
            specs.append((symbols.sizes(item.shape), item.dtype, item.device, strides))
        else:
            specs.append(None)
    args, kwargs = as_traced(builder, node, args, kwargs)
    mutates = [*_mutations(builder, node, args, kwargs), *((name, builder.new_version(name).name) for name in written)]
    binds = bindings(builder, node, flat)
    target, args, kwargs = _flat_call(node.target, builder.extern_tree(args), kwargs)
    results: list[Any] = list(
        builder.extern(target, args, kwargs, specs, reason, mutates, _has_effect(node) or bool(written), wrap, binds)
    )
    for position, item in enumerate(flat):
        if isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool):
            results[position] = symbolic(symbols, item)
    return tree_unflatten(results, spec)


def _flat_call(target: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """The call; one of a higher-order operator as a call with its arguments' leaves, for these may be dictionaries."""
    if isinstance(target, torch._ops.OpOverload):
        return target, args, kwargs
    from kgen.capture import control_flow  # noqa: PLC0415  most graphs have no such operators

    leaves, spec = tree_flatten((tuple(args), kwargs))
    return TreeCall(control_flow.direct(target), spec, str(target)), leaves, {}


def symbolic(symbols: Any, value: Any) -> Any:
    """A SymInt or SymBool as an `Expr`; a SymFloat as a float where it is known, else as a weak tensor."""
    if not isinstance(value, torch.SymFloat):
        return symbols.expr(value)
    bits = symbols.float_bits(value)
    literal = bits.as_int()
    return symbolic_float(bits) if literal is None else functions.float_of(literal)


def _used_results(node: Node, positions: Any) -> set[int]:
    """The results that somebody reads, out of a tree of their positions. What is no tree is its only result."""
    if isinstance(positions, int):
        return {positions}
    used: set[int] = set()
    pending = [(node, positions)]
    while pending:
        source, tree = pending.pop()
        for user in source.users:
            if user.target is not operator.getitem or isinstance(tree, int):
                used.update(tree_leaves(tree))
            else:
                pending.append((user, tree[user.args[1]]))
                used.update([tree[user.args[1]]] if isinstance(tree[user.args[1]], int) else ())
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


def _has_effect(node: Node) -> bool:
    """Whether the call must run even if nobody reads its results."""
    return bool(node.is_impure()) or not node.users


def fresh_expr(value: Expr | int) -> Expr:
    return ix.as_expr(value)
