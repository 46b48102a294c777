"""Prints loop IR as readable, deterministic SSA text, for people: no stage reads it back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Apply, Atom, Expr, FloorDiv, Indirect, Mod, Var, free_atoms
from kgen.ir.nodes import Buffer, Extern, Graph, TensorArg
from kgen.ir.values import Value

_SHORT = {
    torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64", torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8", torch.uint16: "u16", torch.uint32: "u32", torch.uint64: "u64", torch.bool: "bool",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """``f32``, ``i64``, ``bf16``, ...; torch's own name for a dtype without a short one."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def print_graph(graph: Graph) -> str:
    """The whole graph: inputs, constants, nodes in order, outputs."""
    lines = [f"graph {graph.name}"]
    for declared in graph.inputs:
        if declared.buffer is not None:
            static = "  # static" if declared.static else ""
            lines.append(f"  input {declared.buffer}: {_type(graph.buffers[declared.buffer])}{static}")
        else:
            number = declared.expr if declared.expr is not None else declared.symbol
            lines.append(f"  input {'_' if number is None else number}")
    lines += [f"  constant {name}: {_type(graph.buffers[name])}" for name in graph.constants]
    lines += [f"  {symbol} = {definition}" for symbol, definition in graph.derived.items()]
    lines += [_indent(print_node(node, graph)) for node in graph.nodes]
    lines.append(f"  return {', '.join(_argument(result) for result in graph.outputs)}")
    return "\n".join(lines) + "\n"


def print_node(node: ir.Node, graph: Graph) -> str:
    """One node, without a trailing newline: a head that says what it defines and over what, then its body."""
    return _PRINT[type(node)](node, graph)


def print_value(value: Value) -> str:
    """The operations of a value in SSA form, one a line; the last line is the value itself."""
    body = _Body([value])
    in_place = [] if body.name(value) == body.last else [body.name(value)]
    return "\n".join(body.lines + in_place)


class _Body:
    """Names for the values below some roots, and the lines that define them. Literals and plain indices stand in place."""

    def __init__(self, roots: Iterable[Value]) -> None:
        self.names: dict[Value, str] = {}
        self.lines: list[str] = []
        self.last = ""
        for value in vs.topological(roots):
            if value.op == "const":
                self.names[value] = _literal(value)
            elif value.op == "index":
                self.names[value] = f"({self.expr(value.attr)})"
            else:
                self.last = self.names[value] = f"t{len(self.lines)}"
                self.lines.append(f"{self.last} = {self._operation(value)}")

    def name(self, value: Value) -> str:
        return self.names[value]

    def _operation(self, value: Value) -> str:
        args = ", ".join(self.names[a] for a in value.args)
        if value.op == "load":
            buffer, index, _ = value.attr
            mask = f" if {args}" if args else ""
            return f"load({', '.join([buffer, *map(self.expr, index)])}){mask}"
        if value.op == "step":
            return f"what {value.attr} has made"
        if value.op in ("cast", "bitcast", "round_to"):
            return f"{value.op} {args} to {dtype_name(value.attr)}"
        return f"{value.op} {args}"

    def expr(self, expr: Expr) -> str:
        """As ``str(expr)``, but an integer read from data is shown by the name of its value."""
        if not any(isinstance(atom, Indirect) for atom in free_atoms(expr)):
            return str(expr)
        parts = []
        for mono, coef in expr.terms:
            factors = [self._atom(atom) for atom in mono]
            parts.append("*".join(([str(coef)] if coef != 1 or not factors else []) + factors))
        return " + ".join(parts)

    def _atom(self, atom: Atom) -> str:
        if isinstance(atom, Indirect):
            return f"[{self.names[atom.value]}]"
        if isinstance(atom, FloorDiv | Mod):
            return f"({self.expr(atom.num)} {'//' if isinstance(atom, FloorDiv) else '%'} {self.expr(atom.den)})"
        if isinstance(atom, Apply):
            return f"{atom.fn}({', '.join(map(self.expr, atom.args))})"
        return str(atom)


def _literal(value: Value) -> str:
    """The shortest text that names the number; its dtype only where the text alone would mislead."""
    if value.dtype is torch.float32:
        return str(np.float32(value.attr))
    if value.dtype in (torch.float64, torch.int64, torch.bool):
        return repr(value.attr)
    return f"{value.attr!r}:{dtype_name(value.dtype)}"


# ---- heads ----------------------------------------------------------------------------------------------------------


def _type(buffer: Buffer) -> str:
    text = f"{dtype_name(buffer.dtype)}[{', '.join(map(str, buffer.sizes))}]"
    if buffer.strides is not None:
        text += f" strides [{', '.join(map(str, buffer.strides))}]"
    if str(buffer.offset) != "0":
        text += f" offset {buffer.offset}"
    return text if buffer.alias_of is None else f"{text} in {buffer.alias_of}"


def _loops(variables: Sequence[Var]) -> str:
    return ", ".join(f"{v} < {v.extent}" for v in variables)


def _defined(names: Iterable[str | None], graph: Graph) -> str:
    return ", ".join("_" if name is None else f"{name}: {_type(graph.buffers[name])}" for name in names)


def _origin(origin: ir.Origin) -> str:
    parts = [", ".join(origin.operators), origin.line]
    text = "  ".join(part for part in parts if part)
    return f"   # {text}" if text else ""


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.split("\n"))


def _with_body(head: str, body: _Body, *last: str) -> str:
    return "\n".join([head, *(f"  {line}" for line in (*body.lines, *last))])


def _pointwise(node: ir.Pointwise, graph: Graph) -> str:
    body = _Body([node.value])
    head = f"{_defined([node.out], graph)} = pointwise({_loops(node.vars)}){_origin(node.origin)}"
    return _with_body(head, body, f"store {body.name(node.value)}")


def _reduction(node: ir.Reduction, graph: Graph) -> str:
    body = _Body([node.value])
    loops = " | ".join(part for part in (_loops(node.vars), _loops(node.rvars)))
    head = f"{_defined(node.outs, graph)} = {node.op}({loops}){_origin(node.origin)}"
    return _with_body(head, body, f"reduce {body.name(node.value)}")


def _scan(node: ir.Scan, graph: Graph) -> str:
    body = _Body([node.value])
    head = f"{_defined(node.outs, graph)} = scan {node.op} along {node.axis}({_loops(node.vars)}){_origin(node.origin)}"
    return _with_body(head, body, f"scan {body.name(node.value)}")


def _scatter(node: ir.Scatter, graph: Graph) -> str:
    body = _Body(ir.roots(node))
    head = f"{_defined([node.out], graph)} = scatter {node.mode} into {node.target}({_loops(node.vars)}){_origin(node.origin)}"
    mask = "" if node.mask is None else f" if {body.name(node.mask)}"
    return _with_body(head, body, f"store {body.name(node.value)} at [{', '.join(map(body.expr, node.index))}]{mask}")


def _contraction(node: ir.Contraction, graph: Graph) -> str:
    body = _Body(ir.roots(node))
    loops = f"{_loops(node.out_vars)} | {_loops(node.reduced)}"
    call = "" if node.vendor is None else f" as {_call(node.vendor)}"
    if node.fused is not None:
        call += f", {node.fused.outs[0]} as {_call(node.fused)}"
    head = f"{_defined([node.out], graph)} = contraction({loops}){call}{_origin(node.origin)}"
    scale = "" if node.scale is None else f"{body.name(node.scale)} * "
    addend = "" if node.addend is None else f" + {body.name(node.addend)}"
    return _with_body(head, body, f"{scale}sum {body.name(node.lhs)} * {body.name(node.rhs)}{addend}")


def _operation(node: ir.Operation, graph: Graph) -> str:
    body = _Body(node.operands)
    loops = f"{_loops(node.out_vars)} | {_loops(node.inner)}"
    call = "" if node.vendor is None else f" as {_call(node.vendor)}"
    head = f"{_defined(ir.outs(node), graph)} = {node.operator}({loops}){call}{_origin(node.origin)}"
    return _with_body(head, body, f"of {', '.join(body.name(v) for v in node.operands)}")


def _attention(node: ir.Attention, graph: Graph) -> str:
    head = f"{_defined(node.vendor.outs, graph)} = attention {_call(node.vendor)}{_origin(node.origin)}"
    return head if node.meaning is None else f"{head}\n  means {node.meaning.operator}"


def _extern(node: Extern, graph: Graph) -> str:
    left = _defined(node.outs, graph) or "()"
    notes = [f"{old} -> {_defined([new], graph)}" for old, new in node.mutates]
    notes += [f"{symbol} = result {position} dimension {dim}" for symbol, position, dim in node.binds]
    notes += ["effect"] if node.effect else []
    suffix = f" ({'; '.join(notes)})" if notes else ""
    return f"{left} = extern {_call(node)}{suffix}{_origin(node.origin)} [{node.reason}]"


def _call(node: Extern) -> str:
    args = [_argument(arg) for arg in node.args] + [f"{name}={_argument(arg)}" for name, arg in node.kwargs]
    name = getattr(node.target, "name", None)
    return f"{name() if callable(name) else getattr(node.target, '__name__', node.target)}({', '.join(args)})"


def _argument(arg: Any) -> str:
    if isinstance(arg, TensorArg):
        plain = all(e is v.expr() for e, v in zip(arg.index, arg.vars, strict=False)) and len(arg.index) == len(arg.vars)
        if plain:
            return arg.buffer
        return f"{arg.buffer}[{', '.join(map(str, arg.index))} for {_loops(arg.vars) or 'one point'}]"
    if isinstance(arg, list | tuple):
        return f"[{', '.join(_argument(item) for item in arg)}]"
    if isinstance(arg, ir.Number):
        return f"{arg.kind}({arg.expr})"
    if isinstance(arg, torch.fx.GraphModule):
        return "<graph module>"
    return str(arg)


_PRINT: dict[type, Callable[[Any, Graph], str]] = {
    ir.Pointwise: _pointwise, ir.Reduction: _reduction, ir.Scan: _scan, ir.Scatter: _scatter, ir.Contraction: _contraction,
    ir.Operation: _operation,
    ir.Attention: _attention, ir.Extern: _extern,
}  # fmt: skip
