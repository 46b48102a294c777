"""Circular padding as concatenations of slices, one a padded dimension.

torch writes it as copies into new memory: the middle, then each border from what is written by then. That is a kernel for each,
and more passes over the tensor in its gradient. A concatenation fuses with its producer and its consumer.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kgen.capture.batch_views import Writer
from kgen.capture.regions import Refused

__all__ = ["concatenate_circular_pads"]

aten = torch.ops.aten

PADS: frozenset[Any] = frozenset({torch.nn.functional.pad, torch._C._nn.pad})
END = sys.maxsize


def concatenate_circular_pads(gm: GraphModule) -> None:
    """Writes circular pads as concatenations, in place. Their results have eager's strides."""
    found = [(node, pads) for node in gm.graph.nodes if node.target in PADS and (pads := _pads(*node.args, **node.kwargs))]
    for node, pads in found:
        with contextlib.suppress(Refused):
            node.replace_all_uses_with(_concatenated(Writer(gm.graph, node), node.args[0], pads))
            gm.graph.erase_node(node)
    if found:
        gm.graph.lint()
        gm.recompile()


def _pads(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> list[tuple[int, int]]:  # noqa: A002  torch's name
    """Elements before and after, of the last dimension first. Empty where it is another pad, or crops as well."""
    if mode != "circular" or not isinstance(input, Node) or not all(type(n) is int and n >= 0 for n in pad) or not any(pad):
        return []
    return list(zip(pad[::2], pad[1::2], strict=True))


def _concatenated(writer: Writer, made: Node, pads: Sequence[tuple[int, int]]) -> Node:
    """Raises Refused, and leaves the graph as it was."""
    try:
        for k, (before, after) in enumerate(pads):
            if not before and not after:
                continue
            dim = -1 - k
            parts = [writer.call(aten.slice.Tensor, made, dim, -before, END)] if before else []
            parts.append(made)
            if after:
                parts.append(writer.call(aten.slice.Tensor, made, dim, 0, after))
            made = writer.call(torch.cat, parts, dim)
        return writer.method("contiguous", made)  # a concatenation keeps a memory format that the pad does not
    except Refused:
        writer.erase()
        raise
