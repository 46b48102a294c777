"""Values that all readers convert to one narrower type: words that are packed into bytes, sums that are rounded.

    before   y: int64 = f(x);   a = uint8(y[i]);   b = g(uint8(y[j]))
    after    y: uint8 = uint8(f(x));   a = y[i];   b = g(y[j])

A reader converts what it reads, for that costs nothing. So what is stored has the wide type, whose bytes a GPU moves. A
reduction keeps its type, and a value behind it, which its kernel makes, has the narrower one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.values import Value
from kgen.lowering.short_axes import Reader, kept_whole

CONVERSIONS = ("cast", "round_to")
# Fewer elements take a launch's time, whatever is stored.
LARGE = 1 << 20
OPERANDS = ("lhs", "rhs", "scale", "addend")


def store_narrow(graph: ir.Graph, fresh: Callable[[str], str], on_gpu: Callable[[torch.device], bool]) -> None:
    """Gives such values the narrower type. Where a result has it at all points, the others read the result."""
    large = {name for name, buffer in graph.buffers.items() if _is_large(buffer) and on_gpu(buffer.device)}
    if large:
        _Narrowing(graph, large, fresh).run()


def _is_large(buffer: ir.Buffer) -> bool:
    return buffer.dtype.itemsize > 1 and math.prod(size.as_int() or 0 for size in buffer.sizes) >= LARGE


class _Narrowing:
    def __init__(self, graph: ir.Graph, names: set[str], fresh: Callable[[str], str]) -> None:
        self.graph, self.names, self.kept, self.fresh = graph, names, _kept(graph), fresh
        self.behind: dict[int, ir.Pointwise] = {}  # what stands behind a node
        self.moved: set[int] = set()  # where that stood before
        known: dict[str, str] = {}
        aliases = (buffer for buffer in graph.buffers.values() if buffer.alias_of is not None)
        self.written = {ir.storage_owner(graph.buffers, buffer.name, known) for buffer in aliases}
        self.readers: dict[str, list[int]] = defaultdict(list)
        for number, node in enumerate(graph.nodes):
            for name in ir.reads(node):
                self.readers[name].append(number)

    def run(self) -> None:
        for number, node in enumerate(self.graph.nodes):
            name = ir.outs(node)[0] if isinstance(node, ir.Pointwise | ir.Reduction) and len(ir.outs(node)) == 1 else None
            if (
                name is not None
                and number not in self.moved
                and self._is_hidden(name)
                and (dtype := self._narrower(name)) is not None
            ):
                self._narrow(number, name, dtype)
        order = ((node, self.behind.get(k)) for k, node in enumerate(self.graph.nodes) if k not in self.moved)
        self.graph.nodes = [one for pair in order for one in pair if one is not None]

    def _is_hidden(self, name: str) -> bool:
        """Whether only kernels see the value."""
        buffer = self.graph.buffers[name]
        plain = buffer.kind == "intermediate" and buffer.alias_of is None and not buffer.parts
        return plain and name in self.names and name not in self.kept

    def _narrower(self, name: str) -> torch.dtype | None:
        """The one type of fewer bytes that all readers want."""
        found = {dtype for number in self.readers[name] for dtype in _wanted(self.graph.nodes[number], name)}
        dtype = found.pop() if len(found) == 1 else None
        return dtype if dtype is not None and dtype.itemsize < self.graph.buffers[name].dtype.itemsize else None

    def _narrow(self, number: int, name: str, dtype: torch.dtype) -> None:
        node, readers = self.graph.nodes[number], self.readers[name]
        result = next((k for k in readers if self._is_result(self.graph.nodes[k], name, dtype)), None)
        if result is not None:
            made = self.behind[number] = cast(ir.Pointwise, self.graph.nodes[result])  # it reads nothing else
            self.moved.add(result)
            self._read([k for k in readers if k != result], name, made.out, dtype)
        elif isinstance(node, ir.Reduction):
            self._read(readers, name, self._put_behind(number, node, dtype), dtype)
        else:
            assert isinstance(node, ir.Pointwise)
            self.graph.buffers[name] = replace(self.graph.buffers[name], dtype=dtype)
            self.graph.nodes[number] = replace(node, value=vs.cast(node.value, dtype))
            self._read(readers, name, name, dtype)

    def _put_behind(self, number: int, node: ir.Reduction, dtype: torch.dtype) -> str:
        """A value of the narrower type for what a reduction makes."""
        [old] = node.outs
        name = self.fresh(f"{old}_narrow")
        self.graph.buffers[name] = replace(self.graph.buffers[old], name=name, dtype=dtype)
        own = vs.load(old, [v.expr() for v in node.vars], self.graph.buffers[old].dtype)
        self.behind[number] = ir.Pointwise(name, node.vars, vs.cast(own, dtype), node.origin)
        return name

    def _is_result(self, reader: ir.Node, name: str, dtype: torch.dtype) -> bool:
        """Whether a reader makes the value in the narrower type, and nobody writes there."""
        if not isinstance(reader, ir.Pointwise) or self.graph.buffers[reader.out].dtype != dtype:
            return False
        own = vs.load(name, [v.expr() for v in reader.vars], self.graph.buffers[name].dtype)
        owner = ir.storage_owner(self.graph.buffers, reader.out, {})
        return reader.value is vs.cast(own, dtype) and owner not in self.written

    def _read(self, readers: Iterable[int], old: str, new: str, dtype: torch.dtype) -> None:
        """Has readers load the narrower value."""

        def narrower(load: Value) -> Value | None:
            name, index, _ = load.attr
            return vs.load(new, index, dtype, load.args[0] if load.args else None) if name == old else None

        for number in readers:
            node = self.graph.nodes[number]
            if isinstance(node, ir.Contraction):
                given = [field for field in OPERANDS if getattr(node, field) is not None]
                found = vs.replace_loads([getattr(node, field) for field in given], narrower)
                changed: dict[str, Any] = dict(zip(given, found, strict=True))
                self.graph.nodes[number] = replace(node, **changed)
            else:
                assert isinstance(node, Reader)
                self.graph.nodes[number] = replace(node, value=vs.replace_loads([node.value], narrower)[0])
            if new != old:
                self.readers[new].append(number)


def _kept(graph: ir.Graph) -> set[str]:
    """`kept_whole`, but for what contractions alone read by loads: a library call that may take their place reads the rest."""
    contractions = [node for node in graph.nodes if isinstance(node, ir.Contraction)]
    others = kept_whole(replace(graph, nodes=[node for node in graph.nodes if not isinstance(node, ir.Contraction)]))
    calls = {name for node in contractions for call in (node.vendor, node.fused) if call is not None for name in ir.reads(call)}
    stored = {load.attr[0] for node in contractions for load in vs.loads(node.stored)}
    shared = {name for node in contractions if node.shared_call is not None for name in ir.reads(node)}
    return others | calls | stored | shared


def _wanted(node: ir.Node, name: str) -> Iterator[torch.dtype | None]:
    """The types that the node converts what it loads to; None where it has another use for it."""
    roots = ir.roots(node)
    if any(root.op == "load" and root.attr[0] == name for root in roots):
        yield None
    for value in vs.topological(roots):
        through = [atom.value for e in vs.index_exprs(value) for atom in ix.indirects(e)]
        if any(one.op == "load" and one.attr[0] == name for one in through):
            yield None
        if any(arg.op == "load" and arg.attr[0] == name for arg in value.args):
            yield value.attr if value.op in CONVERSIONS else None
