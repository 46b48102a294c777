"""One element picked from each row of a product, by an index from data, as a reduction of the row: a cross-entropy then needs
no row of logits in memory, for its maximum and its sum are reduced on the product's tiles, and so is what it picks."""

from __future__ import annotations

from dataclasses import replace

from kgen import index as ix
from kgen import ir
from kgen import values as vs
from kgen.index import Atom, Expr, Indirect, Var
from kgen.values import Value


def with_picks(graph: ir.Graph, nodes: list[ir.Node], products: frozenset[str]) -> list[ir.Node]:
    """The nodes with each ``load(product, i, [index])`` replaced by the sum over j of what stands at ``j == index``; that the
    index is within bounds is still checked. Buffers of what was picked are added to the graph."""
    out: list[ir.Node] = []
    for node in nodes:
        if isinstance(node, ir.Pointwise | ir.Reduction) and not products.isdisjoint(ir.reads(node)):
            out += _picked(graph, node, products)
        else:
            out.append(node)
    return out


def _picked(graph: ir.Graph, node: ir.Pointwise | ir.Reduction, products: frozenset[str]) -> list[ir.Node]:
    """The node after the picks that it needs."""
    picks: dict[Value, ir.Reduction] = {}

    def replaced(load: Value) -> Value | None:
        if load.attr[0] not in products:
            return None
        made = _pick(graph, load, f"{load.attr[0]}_for_{ir.outs(node)[0]}_{len(picks)}", node.origin)
        if made is None:
            return None
        found, pick = made
        picks[found] = pick
        return found

    [value] = vs.replace_loads([node.value], replaced)
    return [*picks.values(), replace(node, value=value)]


def _pick(graph: ir.Graph, load: Value, name: str, origin: ir.Origin) -> tuple[Value, ir.Reduction] | None:
    """A load of what is picked, and the reduction that picks it."""
    product, index, kind = load.attr
    places = [k for k, e in enumerate(index) if isinstance(e.atom(), Indirect)]
    rows = [e.atom() for k, e in enumerate(index) if k not in places]
    if len(places) != 1 or load.args or not all(isinstance(v, Var) for v in rows) or len(set(rows)) < len(rows):
        return None
    [at] = places
    buffer = graph.buffers[product]
    sizes = tuple(size for k, size in enumerate(buffer.sizes) if k != at)
    if any(v.extent is not size for v, size in zip(rows, sizes, strict=True)):
        return None
    if not vs.index_value(index[at]).variables() <= set(rows):
        return None
    row = tuple(ix.var(f"i{k}", size) for k, size in enumerate(sizes))
    column = ix.var("r0", buffer.sizes[at])
    # the node's own loops may be called r0, too: of a square product that would be the same variable
    passing = ix.var("picked", buffer.sizes[at])
    mapping: dict[Atom, Expr] = dict(zip((*rows, passing), (v.expr() for v in (*row, column)), strict=True))
    # a distance is an expression of the index, which is checked where it is worked out; the index alone would be a plain value
    distance = vs.substitute(vs.index_value(passing.expr() - index[at]), mapping)
    everywhere = [v.expr() for v in row]
    everywhere.insert(at, column.expr())
    here = vs.call("eq", distance, vs.const(0, distance.dtype))
    found = vs.where(here, vs.load(product, everywhere, kind), vs.const(0, load.dtype))
    graph.buffers[name] = ir.Buffer(name, load.dtype, buffer.device, sizes, ix.contiguous_strides(sizes))
    rest = tuple(e for k, e in enumerate(index) if k != at)
    return vs.load(name, rest, load.dtype), ir.Reduction((name,), row, (column,), "sum", found, origin)
