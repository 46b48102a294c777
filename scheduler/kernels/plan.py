"""From a draft of a graph to a plan: each node becomes a group, fusion makes larger ones, and these become steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kgen import errors
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.index import Sizes
from kgen.ir.plan import Kernel, Schedule, Step
from kgen.ir.verify import defined_once
from kgen.scheduler.analysis.dependencies import edges, needed, topological
from kgen.scheduler.analysis.items import Group, Members, accumulators, make_item
from kgen.scheduler.analysis.memo import memoised, memoised_for
from kgen.scheduler.fusion import cost
from kgen.scheduler.fusion.combo_kernels import batch
from kgen.scheduler.fusion.contraction_groups import items_of
from kgen.scheduler.fusion.fuse import Fuser
from kgen.scheduler.fusion.pairs import Pairs
from kgen.scheduler.fusion.sequences import in_sequence
from kgen.scheduler.kernels.steps import distinct_names, local_buffers, steps_of, storage_shared
from kgen.scheduler.protocol import Draft, Forming
from kgen.scheduler.selection.choose import demanded
from kgen.verdict import FusionDemand

__all__ = ["plan_of"]

# Nodes that a transform puts in one place, at most: so far is looked forward for one that has its place already.
LOOKAHEAD = 64


def plan_of(draft: Draft) -> Schedule:
    """The plan of a draft, without a memory plan. Of the draft's nodes, those stay whose results somebody needs."""
    if len(draft.nodes) > 1:  # a graph's only node makes its result
        draft.nodes = needed(draft.graph, draft.nodes)
    fuser, options = _fuser_of(draft), draft.options
    groups = fuser.run() if len(fuser.groups) > 1 or options.demands else fuser.groups
    forming = Forming(draft, fuser.sizes, fuser.outputs | storage_shared(fuser.graph), fuser.verdicts)
    fused = steps_of(fuser, groups, forming.kept, options)
    pairs = Pairs(fuser, len(fuser.verdicts), [step.name for step in fused if isinstance(step, Kernel)])
    steps = _formed(fused, forming, fuser)
    plan = Schedule(draft.graph, steps, [*fuser.verdicts, *draft.verdicts])
    plan.settle = pairs.settled
    plan.local = local_buffers(steps)
    plan.call_results = frozenset(o for group in groups if isinstance(group.call, ir.Extern) for o in ir.outs(group.call))
    return plan


def _formed(steps: list[Step], forming: Forming, fuser: Fuser) -> list[Step]:
    """The steps of fused groups, with what moves between kernels, and with independent kernels gathered."""
    options = forming.draft.options
    for one in forming.draft.transforms if options.fusion else ():
        steps = one.form(steps, forming)
    _raise_unmet(fuser.unmet, steps)
    steps = distinct_names(steps)
    if len(steps) < 2 or not options.fusion or not options.horizontal_fusion:
        return steps
    steps = batch(steps, fuser.graph, options, fuser.verdicts)
    return in_sequence(steps, fuser.graph, options.demands, fuser.verdicts)


def _raise_unmet(unmet: Iterable[tuple[FusionDemand, errors.FusionRequired]], steps: Sequence[Step]) -> None:
    """Raises for what the user wants in one kernel and has not got, now that all that moves into kernels has moved."""
    for demand, missing in unmet:
        if not any(isinstance(step, Kernel) and demanded(step, (demand,)) for step in steps):
            raise missing


# ---- groups of one node -----------------------------------------------------------------------------------------------


def _fuser_of(draft: Draft) -> Fuser:
    """What fuses the draft's nodes: each is a group of its own."""
    graph, options = replace(draft.graph, nodes=draft.nodes), draft.options
    after, order = _ordered(graph)
    position = {node: k for k, node in enumerate(order)}
    program_order = _program_order(graph, [graph.nodes[n] for n in order])
    groups = [_group(graph, graph.nodes[n], k, program_order[k]) for k, n in enumerate(order)]
    outputs = frozenset(o.buffer for o in graph.outputs if isinstance(o, ir.TensorArg))
    limits = {device: cost.LIMITS[options.target(device)] for device in {g.device for g in groups}}
    unordered = frozenset(device for device in limits if options.target(device) == "triton")
    fuser = Fuser(
        graph, groups, Sizes(graph.size_hints), outputs, limits, options.fusion, options.demands, draft.single,
        options.horizontal_fusion, draft.full_row_buffers, unordered, options.capabilities(graph), draft.apart,
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
        group.outer, group.inner, group.members = memoised_for(
            node, ("members", place), lambda: memoised((node, place), lambda: _members(graph, node, place))
        )
        group.device = str(graph.buffers[ir.outs(node)[0]].device)
    return group


def _members(graph: ir.Graph, node: ir.Node, position: float) -> tuple[tuple[ix.Var, ...], tuple[ix.Var, ...], Members]:
    """The items of one node, and the loops that they are written over. Fusion makes others of them and changes none."""
    assert not ir.is_call(node)
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
