"""One element picked from each row of a matmul, by an index from data, as a reduction of the row: a cross-entropy then needs
no row of logits in memory, for its maximum and its sum are reduced on the matmul's tiles, and so is what it picks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Indirect, Var
from kgen.ir.values import Value

_PICKED = "for"


@dataclass(frozen=True, slots=True)
class MaskedGathers:
    """The nodes of a graph, those that pick among them, and at which column each of these does so, by its result: an
    expression of its own rows. To work it out is to check it, which a pick itself does not: a check on every tile would keep
    a matmul's main loop from being pipelined."""

    nodes: list[ir.Node] = field(default_factory=list)
    columns: dict[str, Expr] = field(default_factory=dict)


def with_masked_gathers(graph: ir.Graph, nodes: Sequence[ir.Node], buffers: frozenset[str]) -> MaskedGathers:
    """The nodes with each ``load(buffer, i, [index])`` replaced by the sum over j of what stands at ``j == index``. Whoever
    makes something else of a pick has to check the index. Buffers of what was picked are added to the graph."""
    gathers = MaskedGathers()
    for node in nodes:
        if isinstance(node, ir.Pointwise | ir.Reduction) and _looks_up(node, buffers):
            _pick_for(graph, node, buffers, gathers)
        else:
            gathers.nodes.append(node)
    return gathers


def _looks_up(node: ir.Pointwise | ir.Reduction, buffers: frozenset[str]) -> bool:
    """Whether it reads one of the buffers at an index from data."""
    found = (load for load in vs.loads([node.value]) if load.attr[0] in buffers)
    return any(ix.indirects(e) for load in found for e in load.attr[1])


def gathered(graph: ir.Graph, name: str) -> ir.Pointwise | None:
    """What was picked under that name, as its reader among the graph's nodes has it: loaded by an index from data."""
    made = graph.provenance.get(name)
    if made is None or made.role != _PICKED:
        return None
    node = next((n for n in graph.nodes if ir.outs(n)[:1] == (made.reader,)), None)
    if not isinstance(node, ir.Pointwise | ir.Reduction):
        return None
    again = with_masked_gathers(replace(graph, buffers=dict(graph.buffers)), [node], frozenset([made.source]))
    for pick in again.nodes:
        if isinstance(pick, ir.Reduction) and pick.outs == (name,):
            [load] = [one for one in vs.loads([pick.value]) if one.attr[0] == made.source]
            at: dict[Atom, Expr] = {pick.rvars[0]: again.columns[name]}
            value = vs.load(made.source, [ix.substitute(e, at) for e in load.attr[1]], load.attr[2])
            return ir.Pointwise(name, pick.vars, value, pick.origin)
    return None


def checked(column: Expr, length: Expr, value: Value) -> Value:
    """The value, for a column that is one of `length`; what it is worth elsewhere is never seen, for the kernel raises."""
    inside = vs.call("lt", vs.index_value(column - length), vs.const(0, torch.int64))
    return vs.where(inside, value, vs.const(0, value.dtype))


def _pick_for(graph: ir.Graph, node: ir.Pointwise | ir.Reduction, buffers: frozenset[str], gathers: MaskedGathers) -> None:
    """Adds the picks that a node needs, and the node."""
    known = len(gathers.columns)

    def replaced(load: Value) -> Value | None:
        if load.attr[0] not in buffers:
            return None
        name = ir.derived(graph, ir.Derived(load.attr[0], _PICKED, len(gathers.columns) - known, ir.outs(node)[0]))
        return _pick(graph, load, name, node.origin, gathers)

    [value] = vs.replace_loads([node.value], replaced)
    gathers.nodes.append(replace(node, value=value))


def _pick(graph: ir.Graph, load: Value, name: str, origin: ir.Origin, gathers: MaskedGathers) -> Value | None:
    """A load of what is picked, where the load is of one element of each row."""
    source, index, kind = load.attr
    positions = [k for k, e in enumerate(index) if isinstance(e.atom(), Indirect)]
    if len(positions) != 1 or load.args:
        return None
    [at] = positions
    buffer, wanted = graph.buffers[source], vs.index_value(index[at])
    rows = _rows([e for k, e in enumerate(index) if k != at])
    lengths = [size for k, size in enumerate(buffer.sizes) if k != at]
    if rows is None or not wanted.variables() <= set(rows) or ix.product(v.extent for v in rows) is not ix.product(lengths):
        return None
    row = tuple(ix.var(f"i{k}", v.extent) for k, v in enumerate(rows))
    column = ix.var("r0", buffer.sizes[at])
    mapping: dict[Atom, Expr] = dict(zip(rows, (v.expr() for v in row), strict=True))
    everywhere = [column.expr() if k == at else ix.substitute(e, mapping) for k, e in enumerate(index)]
    short = torch.int32 if column.extent.bounds()[1] <= 2**31 else torch.int64  # as wide as the elements are
    here = vs.call("eq", vs.index_value(column.expr(), short), vs.cast(vs.substitute(wanted, mapping), short))
    found = vs.where(here, vs.load(source, everywhere, kind), vs.const(0, load.dtype))
    sizes = tuple(v.extent for v in row)
    graph.buffers[name] = ir.Buffer(name, load.dtype, buffer.device, sizes, ix.contiguous_strides(sizes))
    gathers.columns[name] = ix.substitute(index[at], mapping, {}, lambda v: vs.substitute(v, mapping))
    gathers.nodes.append(ir.Reduction((name,), row, (column,), "sum", found, origin))
    return vs.load(name, [v.expr() for v in rows], load.dtype)


def _rows(index: Sequence[Expr]) -> tuple[Var, ...] | None:
    """The loops that an index runs through, if these are all that it depends on, and no two of its numbers share one."""
    found: dict[Var, None] = {}
    for e in index:
        atoms = [a for a in ix.free_atoms(e) if not isinstance(a, ix.Size)]
        if any(not isinstance(a, Var) or a in found for a in atoms):
            return None
        found |= dict.fromkeys(sorted((a for a in atoms if isinstance(a, Var)), key=lambda v: v.name))
    return tuple(found)
