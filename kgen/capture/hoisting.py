"""Matmuls that the iterations of a loop need nobody's results for, as one matmul in front of the loop.

A recurrent net multiplies the inputs of each step with one matrix. Its other matmul needs the state, so the iterations are no
batch, and a loop that stays unrolled would read the matrix once a step.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kgen.capture.batch_body import batched_body
from kgen.capture.batch_views import Writer
from kgen.capture.batching import changes_gradients, changes_more, too_dynamic
from kgen.capture.loop_buffers import Buffers
from kgen.capture.regions import Refused, example
from kgen.capture.repeats import LEAST, Each, Repeat, find_carried
from kgen.capture.rolling import depended_on, free_steps, leaves, renumbered
from kgen.capture.torch_adapter import storage_of
from kgen.verdict import Outcome, Reason, Verdict

__all__ = ["has_repeated_matmuls", "hoist_matmuls"]

MATMULS: frozenset[Any] = frozenset(
    {
        operator.matmul, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.nn.functional.linear, torch._C._nn.linear,
        "matmul", "mm", "bmm",
    }
)  # fmt: skip
# So many loops are looked at.
LOOPS = 16
# Elements from which on a matrix is read once instead of in each iteration. Below, both matmuls of an iteration and what is
# made of them are one kernel on a GPU, and a matmul in front leaves three launches of it (H200, 2026-11-26, bench.imperative:
# 50 steps with a matrix of 2^14 elements took 254 us, and 877 with the matmul in front; 128 steps with 2^20, 2,501 and 965).
LARGE = {"cuda": 1 << 18}


def has_repeated_matmuls(gm: GraphModule) -> bool:
    """Whether several matmuls have an operand in common."""
    found = Counter(arg for node in gm.graph.nodes if _is_matmul(node) for arg in dict.fromkeys(node.args))
    return max(found.values(), default=0) >= LEAST


def hoist_matmuls(gm: GraphModule) -> list[Verdict]:
    """Writes matmuls of all iterations in front of their loops, in place."""
    verdicts, seen, known = list[Verdict](), set[Node](), dict[Hashable, list[int]]()
    if too_dynamic(gm) or any(changes_gradients(node) or changes_more(node) for node in gm.graph.nodes):
        return verdicts
    for found in find_carried(list(gm.graph.nodes))[:LOOPS]:
        nodes = list(found.nodes)
        if not seen.isdisjoint(nodes):
            continue
        with contextlib.suppress(Refused):
            verdicts.append(_verdict(found, _hoisted(gm, found, known)))
            seen.update(nodes)
    if verdicts:
        gm.graph.lint()
        gm.recompile()
    return verdicts


def _verdict(repeat: Repeat, matmuls: Sequence[int]) -> Verdict:
    first = repeat.steps[matmuls[0]].nodes
    detail = f"{len(matmuls)} matmuls of each of {repeat.count} iterations, in front of the loop"
    return Verdict(first[0].name, first[-1].name, Outcome.BATCHED, Reason.INDEPENDENT_ITERATIONS, detail=detail)


def _hoisted(gm: GraphModule, repeat: Repeat, known: dict[Hashable, list[int]]) -> list[int]:
    """Positions of the matmuls that are in front of the loop now. Raises Refused, and leaves the graph as it was."""
    writer = Writer(gm.graph, repeat.steps[0].nodes[0])
    try:
        matmuls, steps = _free_matmuls(writer, repeat, known)
        rows = _batches(writer, repeat, matmuls, steps)
        _check_layouts(repeat, matmuls, rows)
    except Exception as cause:
        writer.erase()
        raise cause if isinstance(cause, Refused) else Refused(f"{type(cause).__name__}: {cause}") from cause
    for position, row in zip(matmuls, rows, strict=True):
        for old, new in zip(repeat.steps[position].nodes, row, strict=True):
            old.replace_all_uses_with(new)
    for node in reversed([repeat.steps[k].nodes[i] for i in range(repeat.count) for k in sorted(steps)]):
        if not node.users and node.target is not operator.setitem:
            gm.graph.erase_node(node)
    return matmuls


def _batches(writer: Writer, repeat: Repeat, matmuls: Sequence[int], steps: set[int]) -> list[list[Node]]:
    """The results of all iterations, for each of the matmuls."""
    order = {old: new for new, old in enumerate(sorted(steps))}
    body = Repeat(repeat.count, tuple(renumbered(repeat.steps[k], order) for k in sorted(steps)), repeat.nested)
    batches = batched_body(writer, body, [order[k] for k in matmuls])
    return [[writer.call(operator.getitem, batch, k) for k in range(repeat.count)] for batch in batches]


def _free_matmuls(writer: Writer, repeat: Repeat, known: dict[Hashable, list[int]]) -> tuple[list[int], set[int]]:
    """Positions of matmuls that depend on no carried value, and of all steps that these depend on. Raises Refused."""
    refused = Refused("no matmul of a large matrix depends on no carried value")
    if not _large_matmuls(repeat, frozenset()):  # else all steps are run, to find out what they write
        raise refused
    buffers = Buffers(writer, repeat, known)
    found, needed = list[int](), set[int]()
    for position in _large_matmuls(repeat, buffers.touched):
        below = depended_on(repeat.steps, {position})
        steps = [repeat.steps[k] for k in below]
        nodes = [one for step in steps for node in step.nodes for one in (node, *node.all_input_nodes)]
        if buffers.changed.isdisjoint(itertools.chain(*map(_storages, nodes))) and not any(leaves(steps, Each)):
            found.append(position)
            needed |= below
    if not found:
        raise refused
    return found, needed


def _large_matmuls(repeat: Repeat, touched: frozenset[int]) -> list[int]:
    """Positions of matmuls of a large matrix that depend on no carried value. Steps that are `touched` do."""
    nodes = ((position, repeat.steps[position].nodes) for position in sorted(free_steps(repeat.steps, touched)))
    return [position for position, own in nodes if _is_matmul(own[0]) and _reads_large(own)]


def _check_layouts(repeat: Repeat, matmuls: Sequence[int], rows: Sequence[Sequence[Node]]) -> None:
    """What reads a matmul may want its strides. Raises Refused for other ones."""
    for position, row in zip(matmuls, rows, strict=True):
        wanted, got = example(repeat.steps[position].nodes[0]), example(row[0])
        if (wanted.shape, wanted.stride(), wanted.dtype) != (got.shape, got.stride(), got.dtype):
            raise Refused(f"{row[0].name} has another layout in a batch")


def _reads_large(nodes: Sequence[Node]) -> bool:
    """Whether what all iterations of a matmul read is large enough to be read once."""
    common = set(nodes[0].all_input_nodes).intersection(*(node.all_input_nodes for node in nodes[1:]))
    values = [value for value in map(example, common) if isinstance(value, torch.Tensor)]
    return any(value.numel() >= LARGE.get(value.device.type, 0) for value in values)


def _is_matmul(node: Node) -> bool:
    return node.op.startswith("call") and node.target in MATMULS


def _storages(node: Node) -> frozenset[int]:
    value = example(node)
    return frozenset({storage_of(value)}) if isinstance(value, torch.Tensor) else frozenset()
