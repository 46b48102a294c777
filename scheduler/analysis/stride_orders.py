"""The order of strides of tensors that nobody outside sees, where eager's is not that of who makes and reads them.

A residual stream that begins as a permuted view, such as ``conv(x).flatten(2).transpose(1, 2)``, keeps the order of its strides
in eager through every sum that it takes part in, while all matmuls and norms on its way have the last axis innermost: each
kernel would read or write one of the two with a stride. Here each such tensor takes the order, its own or row-major, in which
more bytes of the other tensors are in step with it; tensors are looked at again while their neighbours change.

Orders of images are left as they are where a contraction reads windows: `kgen/capture/layouts.py` has chosen them. Elsewhere a
tensor of four dimensions with the second one innermost is no image. Such is a bias of scores that was looked up by positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Sizes, Var
from kgen.scheduler.analysis.items import Access

# Rounds in which a choice travels along chains of tensors that depend on each other.
ROUNDS = 8
# Loads that are looked at to see what a table's additions come from.
MOST_LOADS = 64


def choose_orders(graph: ir.Graph, on_gpu: Callable[[ir.Buffer], bool]) -> None:
    """Gives buffers with flexible layouts the order of strides that suits their neighbours; hints are all that changes. Then
    results of matmuls `on_gpu` have other strides."""
    _choose_hints(graph)
    _turn_results(graph, on_gpu)
    _turn_tables(graph, on_gpu)


def _choose_hints(graph: ir.Graph) -> None:
    images = bool(ir.windowed(graph))
    flexible = {name for name, buffer in graph.buffers.items() if buffer.strides is None and _is_permuted(buffer, images)}
    if not flexible:
        return
    nodes = [one for one in map(_Node, graph.nodes) if not flexible.isdisjoint(a.buffer for a in one.accesses)]
    touching = {name: [one for one in nodes if any(a.buffer == name for a in one.accesses)] for name in flexible}
    names = [name for name in graph.buffers if name in flexible]  # in program order
    for _ in range(ROUNDS):
        if not [name for name in names if _reordered(graph, name, touching[name])]:
            return


def _turn_results(graph: ir.Graph, on_gpu: Callable[[ir.Buffer], bool]) -> None:
    """Turns the result of a matmul whose readers go along its rows, as the gradient of `k.transpose(-1, -2)`: it writes columns
    as fast, where a kernel that reads them may not. What a library call or a template reads stays as it is, and what any reader
    would rather have so (H200, bench.untuned: axial rotary's step took 270 us with a result turned that one of three
    wants turned, and 218 as it was; blocks by rolls 267 and 354)."""
    made = {node.out for node in graph.nodes if ir.is_contraction(node) and _is_turned_for_free(node)}
    names = {name for name in made if _is_turnable(graph.buffers[name]) and on_gpu(graph.buffers[name])}
    names -= {name for node in graph.nodes for name in _whole(node)} if names else names
    names -= ir.visible(graph) if names else names
    nodes = [one for one in map(_Node, graph.nodes) if not names.isdisjoint(one.reads)] if names else []
    for name in sorted(names):
        buffer = graph.buffers[name]
        before, after = (_bytes_in_step(graph, name, nodes, one) for one in (buffer, _turned(buffer)))
        gains = before != after and all(a <= b for a, b in zip(before, after, strict=True))
        graph.buffers[name] = _turned(buffer) if gains else buffer


def _turn_tables(graph: ir.Graph, on_gpu: Callable[[ir.Buffer], bool]) -> None:
    """Gives tables that a kernel adds to the order of what is added. A warp then adds to elements side by side: additions to a
    sector for each thread take as long as all of them to one take together."""
    tables = [node for node in graph.nodes if isinstance(node, ir.Scatter) and node.mode == "add"]
    if not tables:
        return
    called = {name for node in graph.nodes for name in _called(node)}
    made = {node.out: node for node in graph.nodes if isinstance(node, ir.Pointwise)}
    for node in tables:
        table = graph.buffers[node.target]
        rows = table.hint in (None, tuple(range(len(table.sizes)))) and _is_turnable(replace(table, hint=None))
        if not rows or not on_gpu(table) or {node.target, node.out} & called or not ir.is_hidden_table(graph, node):
            continue
        last = _fastest(graph, node, made)
        if last is not None and last != len(table.sizes) - 1:
            order = (*(k for k in range(len(table.sizes)) if k != last), last)
            strides = ir.dense_strides(replace(table, strides=None, hint=order))
            for name in (node.target, node.out):
                graph.buffers[name] = replace(graph.buffers[name], strides=strides)


def _fastest(graph: ir.Graph, node: ir.Scatter, made: Mapping[str, ir.Pointwise]) -> int | None:
    """The dimension of a table along which most of what is added to it is contiguous. What kernels have `made` counts as what
    they made it of."""
    sizes, moved = Sizes(graph.size_hints), dict[Var, int]()
    pending, seen = vs.loads(ir.roots(node)), set[vs.Value]()
    while pending:
        load = pending.pop()
        name, index, _ = load.attr
        if load in seen or len(seen) > MOST_LOADS:
            continue
        seen.add(load)
        maker = made.get(name)
        if maker is not None:
            positions: dict[ix.Atom, ix.Expr] = dict(zip(maker.vars, index, strict=True))
            pending += vs.loads([vs.substitute(maker.value, positions)])
        elif (found := _innermost(graph, Access(name, index))) is not None:
            moved[found] = moved.get(found, 0) + sizes.bytes(graph.buffers[name])
    fastest = max(moved, key=lambda v: moved[v], default=None)
    return next((k for k, e in enumerate(node.index) if fastest is not None and e.atom() is fastest), None)


def _bytes_in_step(graph: ir.Graph, name: str, nodes: Sequence[_Node], buffer: ir.Buffer) -> list[int]:
    """Of each node that reads `name`, if it is that buffer."""
    graph.buffers[name] = buffer
    sizes = Sizes(graph.size_hints)
    return [one.bytes_in_step(graph, name, sizes) for one in nodes if name in one.reads]


def _turned(buffer: ir.Buffer) -> ir.Buffer:
    *batch, rows, columns = range(len(buffer.sizes))
    turned = replace(buffer, strides=None, hint=(*batch, columns, rows))
    return replace(turned, strides=ir.dense_strides(turned))


def _is_turned_for_free(node: ir.Contraction) -> bool:
    """Whether the library's call writes its result in either order without a copy."""
    call = None if node.windowed else node.vendor
    return call is not None and getattr(call.target, "overloadpacket", None) in (torch.ops.aten.mm, torch.ops.aten.bmm)


def _is_turnable(buffer: ir.Buffer) -> bool:
    """Whether a buffer is rows, one after the other, of some length and number."""
    free = buffer.hint is None and buffer.alias_of is None and buffer.kind == "intermediate" and not buffer.offset
    dense = buffer.strides is None or buffer.strides == ix.contiguous_strides(buffer.sizes)
    return free and dense and all(size != 1 for size in buffer.sizes[-2:])


def _whole(node: ir.Node) -> Iterator[str]:
    """The buffers that a library call or a template reads as they are."""
    if ir.is_template_node(node):
        yield from (load.attr[0] for load in vs.loads(ir.roots(node)))
    yield from _called(node)


def _called(node: ir.Node) -> Iterator[str]:
    """Those that a library call reads."""
    call = node if isinstance(node, ir.Extern) else getattr(node, "vendor", None)
    if call is not None:
        yield from (arg.buffer for arg in ir.tensor_args((call.args, call.kwargs)))


def _is_permuted(buffer: ir.Buffer, images: bool) -> bool:
    """Whether it prefers an order besides row-major and, where there are `images`, theirs."""
    rows = tuple(range(len(buffer.sizes)))
    kept = (rows, (0, *rows[2:], 1) if len(rows) > 3 else rows) if images else (rows,)
    return buffer.hint is not None and buffer.hint not in kept and buffer.alias_of is None


class _Node:
    """What a node reads and writes element by element."""

    def __init__(self, node: ir.Node) -> None:
        self.accesses = list(_accesses(node))
        self.reads = {load.attr[0] for load in vs.loads(ir.roots(node))}
        rows = node.rvars if isinstance(node, ir.Reduction) else ()
        self.row: Var | None = rows[0] if len(rows) == 1 else None  # a reduction of rows wants their elements side by side

    def bytes_in_step(self, graph: ir.Graph, name: str, sizes: Sizes) -> int:
        """Of the other tensors, or of its own where rows are reduced, what goes along the same loop as `name`."""
        own = {loop for a in self.accesses if a.buffer == name and (loop := _innermost(graph, a)) is not None}
        others = {a.buffer for a in self.accesses if a.buffer != name and _innermost(graph, a) in own}
        found = sum(sizes.bytes(graph.buffers[other]) for other in others)
        return found + (sizes.bytes(graph.buffers[name]) if self.row in own else 0)


def _accesses(node: ir.Node) -> Iterator[Access]:
    if isinstance(node, ir.Pointwise):
        yield Access(node.out, tuple(v.expr() for v in node.vars))
    elif ir.is_contraction(node):
        yield Access(node.out, tuple(v.expr() for v in node.out_vars))
    for load in vs.loads(ir.roots(node)):
        yield Access(load.attr[0], load.attr[1])


def _innermost(graph: ir.Graph, access: Access) -> Var | None:
    """The loop along which an access goes from one element to the next one in memory."""
    linear = ix.linearize(access.index, ir.dense_strides(graph.buffers[access.buffer]))
    loops = [a for a in ix.free_atoms(linear) if isinstance(a, Var)]
    return next((v for v in loops if ix.stride_of(linear, v) == 1), None)


def _reordered(graph: ir.Graph, name: str, nodes: Sequence[_Node]) -> bool:
    """Whether the buffer has another order now. Where both are as good, eager's stays."""
    before = graph.buffers[name]
    sizes = Sizes(graph.size_hints)
    found: list[tuple[int, ir.Buffer]] = []
    for one in (before, replace(before, hint=None)):
        graph.buffers[name] = one
        found.append((sum(node.bytes_in_step(graph, name, sizes) for node in nodes), one))
    (old, _), (new, turned) = found
    graph.buffers[name] = turned if new > old else before
    return new > old


__all__ = ["choose_orders"]
