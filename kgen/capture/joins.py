"""What is made of a loop's values behind it: `torch.stack` or `torch.cat` of all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from kgen.capture.batch_views import Writer
from kgen.capture.regions import Refused, is_view_step
from kgen.capture.repeats import Repeat, Step

__all__ = ["Join", "join_of", "joins_of", "put_join"]

JOINS = (torch.stack, torch.cat, torch.concat, torch.concatenate)


@dataclass(frozen=True, slots=True)
class Join:
    """`node` joins what the step at `position` gives in all iterations."""

    position: int
    node: Node


def joins_of(repeat: Repeat) -> list[Join]:
    """Raises Refused where a value is needed otherwise behind the loop; views of what is there before it stay."""
    inside = set(repeat.nodes)
    found = []
    for position, step in enumerate(repeat.steps):
        users = dict.fromkeys(user for node in step.nodes for user in node.users if user not in inside)
        if users and not is_view_step(step):
            found += [Join(position, _checked(user, step)) for user in users]
    return found


def _checked(node: Node, step: Step) -> Node:
    if not _joins(node):
        raise Refused(f"{node.name} needs values of single iterations")
    if join_of(node, step) is None:
        raise Refused(f"{node.name} joins more than the iterations' values, or in another layout")
    return node


def _joins(node: Node) -> bool:
    values = node.args[0] if node.args else None
    return node.target in JOINS and node.kwargs.keys() <= {"dim"} and isinstance(values, list | tuple)


def join_of(node: Node, step: Step) -> Node | None:
    """The node, if it joins what the step gives in all iterations, and nothing else."""
    if not _joins(node) or tuple(node.args[0]) != step.nodes:  # type: ignore[arg-type]
        return None
    return node if node.meta["example_value"].is_contiguous() else None


def put_join(graph: Graph, join: Join, output: Node) -> None:
    """Puts a copy of a batch in the place of the join."""
    node, writer = join.node, Writer(graph, join.node)
    rank = output.meta["example_value"].dim()
    dim = int(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0))  # type: ignore[arg-type]
    stacks = node.target is torch.stack
    dim += (rank if stacks else rank - 1) if dim < 0 else 0
    made = writer.method("movedim", output, 0, dim) if dim else output
    if not stacks:
        made = writer.method("flatten", made, dim, dim + 1)
    node.replace_all_uses_with(writer.method("clone", made, memory_format=torch.contiguous_format))
    graph.erase_node(node)
