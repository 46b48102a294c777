"""The part of a graph that became one kernel as a graph of its own, in which candidates are measured: fused, and by the library
with separate kernels. An operation without a library call is there as the nodes that it replaces: candidates that want the
operation recognise it again."""

from __future__ import annotations

from dataclasses import replace

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr
from kgen.ir.plan import Launch
from kgen.ir.values import Value
from kgen.scheduler.analysis.items import accumulators
from kgen.scheduler.transforms.concat_split import slice_of
from kgen.scheduler.transforms.gather_reduction import gathered
from kgen.scheduler.transforms.recompute import original_of
from kgen.scheduler.transforms.split_k import whole_of
from kgen.scheduler.transforms.tile_partials import reduction_of


def extract_subgraph(graph: ir.Graph, step: Launch) -> ir.Graph | None:
    """The nodes of `graph` that became `step`, with what the library call would read of them: inputs are the buffers that they
    read, outputs those that the kernel stores. None where that is no function of its inputs, for it writes into memory that is
    there already."""
    nodes = _nodes(graph, step)
    made = {out for node in nodes for out in ir.outs(node)}
    stored = {o for s in step.statements for o, kept in zip(s.outs, s.stored, strict=True) if kept}
    results = {reduction_of(graph, name) or name for name in stored}
    buffers = [graph.buffers[name] for name in made]
    if not results <= made or any((b.alias_of and not b.is_part) or b.kind != "intermediate" for b in buffers):
        return None
    read = [name for name in dict.fromkeys(n for node in nodes for n in _reads(node)) if name not in made]
    part = ir.Graph(f"{step.name} alone", _without_parts(graph, made), nodes)
    part.provenance, part.names = dict(graph.provenance), dict(graph.names)
    part.size_hints, part.derived = dict(graph.size_hints), dict(graph.derived)
    for name in read:
        part.buffers[name] = replace(graph.buffers[name], kind="input", alias_of=None, offset=0, parts=(), is_part=False)
    part.inputs = [ir.GraphInput(expr=symbol.expr()) for symbol in graph.size_hints if symbol not in graph.derived]
    part.inputs += [ir.GraphInput(buffer=name) for name in read]
    part.outputs = [_whole(graph.buffers[name]) for name in sorted(results)]
    return part


def _without_parts(graph: ir.Graph, made: set[str]) -> dict[str, ir.Buffer]:
    """The buffers, of which those that are made and are parts of others become buffers of their own, that lie as they did."""
    kept = (b for b in graph.buffers.values() if not b.is_part or b.name in made)
    own = (replace(b, alias_of=None, offset=0, is_part=False) if b.is_part else replace(b, parts=()) for b in kept)
    return {b.name: b for b in own}


def source_of(graph: ir.Graph, name: str) -> str:
    """The buffer of which scheduling made another one, a copy or a part, or the buffer."""
    return original_of(graph, whole_of(graph, name))


def _whole(buffer: ir.Buffer) -> ir.TensorArg:
    loops = tuple(ix.var(f"d{k}", size) for k, size in enumerate(buffer.sizes))
    return ir.TensorArg(buffer.name, loops, tuple(v.expr() for v in loops), buffer.dtype)


def _nodes(graph: ir.Graph, step: Launch) -> list[ir.Node]:
    """The nodes that the step computes, in order, and those that make what the library call reads in place of a prologue."""
    made = {source_of(graph, out) for s in step.statements for out in s.outs}
    reduced = {name for name in (reduction_of(graph, one) for one in made) if name is not None}
    made |= reduced
    wanted: set[str] = set()
    nodes = list({id(one): one for node in graph.nodes for one in _originals(node, made)}.values())
    for node in nodes:
        names = {*ir.outs(node), *(accumulators(graph, node) if ir.is_template_node(node) else ())}
        if names & made:
            wanted |= names
        if ir.is_contraction(node) and node.out in wanted:
            wanted |= {load.attr[0] for load in vs.loads(node.stored)}
    kept = [node for node in nodes if wanted & set(ir.outs(node))]
    makers = {name for node in kept if ir.is_contraction(node) for name in _stored(node)} - _read(step)
    nodes = [
        n for n in kept if made & set(ir.outs(n)) or ir.is_template_node(n) or (isinstance(n, ir.Pointwise) and n.out in makers)
    ]
    nodes = [_unfolded(graph, node, made) if reduced & set(ir.outs(node)) else node for node in nodes]
    gathers = [gathered(graph, name) for name in sorted(reduced.difference(*map(ir.outs, kept)))]
    concat_parts = [slice_of(graph, name) for name in sorted(made.difference(*map(ir.outs, kept)))]
    return [*nodes, *(node for node in (*gathers, *concat_parts) if node is not None)]


def _originals(node: ir.Node, made: set[str]) -> tuple[ir.Node, ...]:
    """The node, or those that it replaces, whose results are `made` then. Operations may replace one node together."""
    replaced = ir.replaced(node)
    if replaced and not made.isdisjoint(ir.outs(node)):
        made.update(out for one in replaced for out in ir.outs(one))
    return replaced or (node,)


def _unfolded(graph: ir.Graph, node: ir.Node, made: set[str]) -> ir.Node:
    """A reduction on tiles without elements that other nodes make, as the exponentials of a softmax are: it computes them
    itself."""
    makers = {n.out: n for n in graph.nodes if isinstance(n, ir.Pointwise) and n.out not in made}

    def computed(load: Value) -> Value | None:
        source = makers.get(load.attr[0])
        if source is None or load.args or made.isdisjoint(ir.reads(source)):
            return None
        mapping: dict[Atom, Expr] = dict(zip(source.vars, load.attr[1], strict=True))
        [value] = vs.replace_loads([vs.substitute(source.value, mapping)], computed)
        return value

    if not isinstance(node, ir.Reduction):
        return node
    [value] = vs.replace_loads([node.value], computed)
    return replace(node, value=value)


def _stored(node: ir.Contraction) -> set[str]:
    return {load.attr[0] for load in vs.loads(node.stored)}


def _read(step: Launch) -> set[str]:
    """What the step reads as the library call does."""
    return {load.attr[0] for s in step.statements for load in vs.loads(s.roots)}


def _reads(node: ir.Node) -> tuple[str, ...]:
    return (*ir.reads(node), *sorted(_stored(node))) if ir.is_contraction(node) else ir.reads(node)
