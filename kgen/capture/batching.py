"""Loops that Dynamo has unrolled, as operators on all iterations at once.

The stage `rewrite` works on Dynamo's graph, in front of AOTAutograd, which then traces a loop's body once. The iterations of
`for i in range(n): b[i] = b[i] + 1` are independent: none touches a row that another one writes. So they are one iteration over
a batch of rows. `torch.vmap` says what each operator means for a batch, and writes into views of a batch write into `b`.

Iterations are independent if no element that one of them writes is touched by another one. The operators that vmap has come to
say in their schemas what is written. What is touched is the access of an index (`kgen/capture/accesses.py`), or all of a
tensor. Whatever is not understood leaves the graph as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from kgen.capture.batch_body import Refused, batched_body
from kgen.capture.batch_views import Writer
from kgen.capture.joins import Join, joins_of, put_join
from kgen.capture.regions import is_view_step, runs_backwards
from kgen.capture.repeats import Repeat, Search, turned
from kgen.verdict import Outcome, Reason, Verdict

__all__ = ["RESHAPES_IN_PLACE", "batch_repeats", "changes_gradients", "changes_more", "too_dynamic"]

RESHAPES_IN_PLACE = frozenset(
    (
        "as_strided_",
        "detach_",
        "resize_",
        "resize_as_",
        "set_",
        "squeeze_",
        "swapaxes_",
        "swapdims_",
        "t_",
        "transpose_",
        "unsqueeze_",
    )
)


def batch_repeats(gm: GraphModule, search: Search | None = None) -> list[Verdict]:
    """Makes independent iterations of unrolled loops batches, in place. Loops in loops become batches from the inside."""
    verdicts, search = list[Verdict](), search or Search(gm)
    if too_dynamic(gm):
        return verdicts
    while _batch_first(gm, search, verdicts):
        search = Search(gm, search.refused)
    if any(one.outcome is Outcome.BATCHED for one in verdicts):
        gm.graph.lint()
        gm.recompile()
    return verdicts


def _batch_first(gm: GraphModule, search: Search, verdicts: list[Verdict]) -> bool:
    """Makes the first loop that can be one a batch, with all others whose blocks are as long, and says whether there was one.

    The others come first: three of twelve inner loops that are batches already would be taken for three outer iterations."""
    length = 0
    for found in search:
        if length and len(found.steps) != length:
            return True
        names = found.steps[0].nodes[0].name, found.steps[-1].nodes[found.count - 1].name
        try:
            joins = joins_of(found)
            replaced = _replace(gm, found, joins)
        except Refused as reason:
            verdicts.append(Verdict(*names, Outcome.ILLEGAL, Reason.ITERATIONS, detail=str(reason)))
            replaced = False
        if replaced:
            detail = f"{found.count} iterations of {len(found.steps)} operators"
            verdicts.append(Verdict(*names, Outcome.BATCHED, Reason.INDEPENDENT_ITERATIONS, detail=detail))
            length = len(found.steps)
            if joins:
                return True  # what follows reads nodes that the search has not seen
            search.refused.erased.update(found.nodes)
        else:
            search.refused.add(found)
    return length > 0


def _replace(gm: GraphModule, repeat: Repeat, joins: Sequence[Join]) -> bool:
    """Writes the batch in front of the loop, and erases the loop. Gives False where all that the loop does is to view tensors.

    Raises Refused, and leaves the graph as it was."""
    if all(is_view_step(step) for step in repeat.steps):
        return False
    inside = list(repeat.nodes)
    if not joins and runs_backwards(repeat):
        repeat = turned(repeat)
    writer = Writer(gm.graph, repeat.steps[0].nodes[0])
    try:
        outputs = batched_body(writer, repeat, [join.position for join in joins])
    except Exception as cause:
        writer.erase()
        raise cause if isinstance(cause, Refused) else Refused(f"{type(cause).__name__}: {cause}") from cause
    for join, output in zip(joins, outputs, strict=True):
        put_join(gm.graph, join, output)
    for node in reversed(inside):
        if not node.users:
            gm.graph.erase_node(node)
    return True


def too_dynamic(gm: GraphModule) -> bool:
    """Whether modes that change operators' meanings, or sizes without a value, come into it."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return True
    return any(changes_more(node) or not _is_static(node) for node in gm.graph.nodes)


def changes_more(node: Node) -> bool:
    """Whether a node changes what operators mean, or sizes of a tensor that was there: example values are those of the end."""
    target = getattr(node.target, "overloadpacket", node.target)
    method = target if isinstance(target, str) else getattr(target, "__name__", "")
    return node.op.startswith("call") and (target is _enter_autocast or method in RESHAPES_IN_PLACE)


def changes_gradients(node: Node) -> bool:
    """Whether a node changes whether gradients are wanted: a body is traced at another time."""
    return node.op == "call_function" and "grad_enabled" in str(node.target)


def _is_static(node: Node) -> bool:
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor):
        return not value._has_symbolic_sizes_strides
    return value is None or not any(map(_is_symbolic, pytree.tree_leaves(value)))


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value._has_symbolic_sizes_strides)
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
