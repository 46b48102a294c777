"""Groups of a graph: one for each node to begin with, and what fusion makes of them, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.sizes import Sizes
from kgen.ir.verify import defined_once
from kgen.scheduler.analysis.dependencies import edges, topological
from kgen.scheduler.analysis.items import Group, Members, accumulators, make_item
from kgen.scheduler.analysis.memo import memoised
from kgen.scheduler.fusion import cost
from kgen.scheduler.fusion.contraction_groups import items_of
from kgen.scheduler.fusion.fuse import Fuser
from kgen.scheduler.options import Options
from kgen.verdict import Verdict

# Nodes that a transform puts in one place, at most: so far is looked forward for one that has its place already.
LOOKAHEAD = 64


@dataclass(frozen=True, slots=True)
class Constraints:
    """What fusion must keep to around contractions, by results: `single` ones share no kernel with another one, updates in
    `apart` none with any, and what `full_row_buffers` names is made in the kernel of the contraction it says."""

    single: frozenset[str] = frozenset()
    full_row_buffers: Mapping[str, str] = field(default_factory=dict)
    apart: Mapping[str, Verdict] = field(default_factory=dict)


def fuser_of(graph: ir.Graph, options: Options, around: Constraints) -> Fuser:
    """What fuses the graph's nodes: each is a group of its own."""
    after, order = _ordered(graph)
    position = {node: k for k, node in enumerate(order)}
    program_order = _program_order(graph, [graph.nodes[n] for n in order])
    groups = [_group(graph, graph.nodes[n], k, program_order[k]) for k, n in enumerate(order)]
    outputs = frozenset(o.buffer for o in graph.outputs if isinstance(o, ir.TensorArg))
    limits = {device: cost.LIMITS[options.target(device)] for device in {g.device for g in groups}}
    unordered = frozenset(device for device in limits if options.target(device) == "triton")
    fuser = Fuser(
        graph, groups, Sizes(graph.size_hints), outputs, limits, options.fusion, options.demands, around.single,
        options.horizontal_fusion, around.full_row_buffers, unordered, options.capabilities(graph), around.apart,
    )  # fmt: skip
    names = [name for node in graph.nodes for name in _defines(graph, node)]
    if len(set(names)) < len(names):
        defined_once(names, "schedule")
    for group in groups:
        for name in group.writes:
            fuser.producer[name] = group
        for name in group.reads:
            fuser.readers.setdefault(name, {})[group.serial] = group
    for n, targets in enumerate(after):
        source = groups[position[n]]
        fuser.after[source.serial] = {groups[position[t]] for t in targets}
        for target in fuser.after[source.serial]:
            fuser.before.setdefault(target.serial, set()).add(source)
    return fuser


def _ordered(graph: ir.Graph) -> tuple[list[set[int]], list[int]]:
    """The nodes that each node has to precede, and an order that respects this. A single node waits for nothing."""
    if len(graph.nodes) < 2:
        return [set() for _ in graph.nodes], list(range(len(graph.nodes)))
    after = edges(graph)
    return after, topological(after, graph.name)


def _defines(graph: ir.Graph, node: ir.Node) -> tuple[str, ...]:
    """The names that a node gives to buffers, those of what never leaves registers included."""
    return (*ir.outs(node), *(accumulators(graph, node) if ir.is_template_node(node) and node.vendor is None else ()))


def _program_order(graph: ir.Graph, nodes: Sequence[ir.Node]) -> list[float]:
    """A place in program order for each node. One that an earlier attempt had keeps its own, and new ones lie between their
    neighbours: what is known of a node's group holds as long as the node is the same."""
    known: dict[str, float] = memoised("program order", dict)
    names = [ir.outs(node)[0] if ir.outs(node) else "" for node in nodes]
    before, program_order = -1.0, list[float]()
    for k, name in enumerate(names):
        place = known.get(name, -1.0)
        if place <= before:
            follows = min(
                (known[one] for one in names[k + 1 : k + 1 + LOOKAHEAD] if known.get(one, -1.0) > before), default=before + 2
            )
            place = (before + follows) / 2
        known[name] = before = place
        program_order.append(place)
    return program_order


def _group(graph: ir.Graph, node: ir.Node, position: int, place: float) -> Group:
    group = Group(position, first=position, last=position, rank=position)
    if ir.call_of(node) is not None:
        group.call = node
    else:
        group.outer, group.inner, group.members = memoised((node, place), lambda: _members(graph, node, place))
        group.device = str(graph.buffers[ir.outs(node)[0]].device)
    return group


def _members(graph: ir.Graph, node: ir.Node, position: float) -> tuple[tuple[ix.Var, ...], tuple[ix.Var, ...], Members]:
    """The items of one node, and the loops that they are written over. Fusion makes others of them and changes none."""
    assert not isinstance(node, ir.Extern | ir.Attention)
    items = items_of(node, position, graph) if ir.is_template_node(node) else [make_item(node, position)]
    renamed: dict[ix.Atom, ix.Expr] = {}
    outer = _renamed("x", items[0].outer, renamed)
    inner = _renamed("y", items[0].inner, renamed)
    if items[0].inner and not inner:
        inner = (ix.var("y0", 1),)
    return outer, inner, Members.of([item.substituted(renamed, outer, inner if item.inner else ()) for item in items])


def _renamed(letter: str, loops: tuple[ix.Var, ...], renamed: dict[ix.Atom, ix.Expr]) -> tuple[ix.Var, ...]:
    kept: list[ix.Var] = []
    for v in loops:
        if v.extent == 1:
            renamed[v] = ix.ZERO
        else:
            kept.append(ix.var(f"{letter}{len(kept)}", v.extent))
            renamed[v] = kept[-1].expr()
    return tuple(kept)


def in_order(groups: list[Group], fuser: Fuser, early: bool = False) -> list[Group]:
    """A topological order of the fused groups, close to program order: that of their last nodes, or, `early`, of their first
    ones. A group whose last node is far behind the first one may hold on to what it reads until then."""
    if len(groups) < 2:
        return groups
    by_number = sorted(groups, key=lambda g: g.first if early else g.last)
    numbers = {g.serial: k for k, g in enumerate(by_number)}
    after = [{numbers[t.serial] for t in fuser.after.get(g.serial, ()) if t.serial in numbers} for g in by_number]
    return [by_number[k] for k in topological(after, fuser.graph.name)]
