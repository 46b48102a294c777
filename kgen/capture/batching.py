"""Loops that Dynamo has unrolled, as operators on all iterations at once.

The stage `rewrite` works on Dynamo's graph, in front of AOTAutograd, which then traces a loop's body once. The iterations of
`for i in range(n): b[i] = b[i] + 1` are independent: none touches a row that another one writes. So they are one iteration over
a batch of rows. `torch.vmap` says what each operator means for a batch, and writes into views of a batch write into `b`.

Iterations are independent if no element that one of them writes is touched by another one. The schemas of the operators that
vmap has come to say what is written. What is touched is the access of an index (`kgen/capture/accesses.py`), or all of a tensor.
Whatever is not understood leaves the graph as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from kgen.capture.batch_body import Refused, batched_body
from kgen.capture.batch_views import Writer
from kgen.capture.joins import joins_of, put_join
from kgen.capture.places import runs_backwards
from kgen.capture.repeats import Refusals, Repeat, find, turned

__all__ = ["Batched", "batch_repeats"]


@dataclass(frozen=True, slots=True)
class Batched:
    """What became of a loop of `count` iterations of `length` nodes: `refusal` is None where it is a batch now."""

    first: str
    count: int
    length: int
    refusal: str | None = None


def batch_repeats(gm: GraphModule) -> list[Batched]:
    """Makes independent iterations of unrolled loops batches, in place. Loops in loops become batches from the inside."""
    verdicts, refused = list[Batched](), Refusals()
    if _too_dynamic(gm):
        return verdicts
    while (found := next(find(list(gm.graph.nodes), refused), None)) is not None:
        first, length = found.steps[0].nodes[0], len(found.steps)
        verdict = Batched(first.name, found.count, length)
        try:
            _replace(gm, found)
            verdicts.append(verdict)
        except Refused as reason:
            refused.add(found)
            verdicts.append(Batched(first.name, found.count, length, str(reason)))
    if any(one.refusal is None for one in verdicts):
        gm.graph.lint()
        gm.recompile()
    return verdicts


def _replace(gm: GraphModule, repeat: Repeat) -> None:
    """Writes the batch in front of the loop, and erases the loop. Raises Refused, and leaves the graph as it was."""
    inside, joins = list(repeat.nodes), joins_of(repeat)
    if not joins and runs_backwards(repeat):
        repeat = turned(repeat)
    writer = Writer(gm.graph, repeat.steps[0].nodes[0])
    try:
        outputs = batched_body(writer, repeat, [join.position for join in joins])
    except BaseException:
        writer.erase()
        raise
    for join, output in zip(joins, outputs, strict=True):
        put_join(gm.graph, join, output)
    for node in reversed(inside):
        if not node.users:
            gm.graph.erase_node(node)


def _too_dynamic(gm: GraphModule) -> bool:
    """Whether modes that change operators' meanings, or sizes without a value, come into it."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return True
    return any(_changes_mode(node) or not _is_static(node) for node in gm.graph.nodes)


def _changes_mode(node: Node) -> bool:
    return node.op == "call_function" and "autocast" in getattr(node.target, "__name__", "")


def _is_static(node: Node) -> bool:
    values = pytree.tree_leaves(node.meta.get("example_value"))
    sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    return not any(isinstance(one, torch.SymInt | torch.SymFloat | torch.SymBool) for one in [*values, *sizes])
