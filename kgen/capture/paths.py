"""Names in the user's modules: ``layers.3.mlp.up.weight`` for what AOTAutograd calls ``primals_14``.

Dynamo says where each input of its graph came from, as a chain of `Source` objects (an attribute of an item of an attribute of
a local variable), and which modules were entered for each node. AOTAutograd says of each input of its graphs which one of
Dynamo's it is. It keeps the modules of a node, in backward those of the node that it is the gradient of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch._functorch._aot_autograd.descriptors import BufferAOTInput, ParamAOTInput, PlainAOTInput, SubclassGetAttrAOTInput
from torch.fx import GraphModule, Node

__all__ = ["NO_PATHS", "Paths", "paths_in", "paths_of"]

# What a module keeps its children and tensors in: no part of a path.
_CONTAINERS = ("_modules", "_parameters", "_buffers")


@dataclass(frozen=True, slots=True)
class Paths:
    """The path of each input of Dynamo's graph, in order, and what stands for each module that none of the others holds: its
    name as Dynamo writes it, and the first part of paths below it ("" where there is one such module)."""

    inputs: tuple[str, ...] = ()
    roots: tuple[tuple[str, str], ...] = ()


NO_PATHS = Paths()


@dataclass(frozen=True, slots=True)
class _Place:
    """A source: the variable at its root, what Dynamo calls that, whether it is a module, and the way from there."""

    root: str
    written: str
    is_module: bool
    parts: tuple[str, ...]


def paths_of(gm: GraphModule) -> Paths:
    """The paths of Dynamo's graph."""
    sources = [_place(_source(node)) for node in gm.graph.find_nodes(op="placeholder")]
    modules = dict.fromkeys((one.written, one.root) for one in sources if one is not None and one.is_module)
    roots = tuple((written, "" if len(modules) == 1 else name) for written, name in modules)
    return Paths(tuple(_path(one, dict(roots)) for one in sources), roots)


def _source(node: Node) -> Any:
    return getattr(node.meta.get("grapharg"), "source", None)


def _place(source: Any) -> _Place | None:
    """None for what no variable leads to, such as a size."""
    steps: list[str] = []
    while (base := getattr(source, "base", None)) is not None:
        steps += filter(None, (_member(source),))
        source = base
    root = getattr(source, "local_name", None) or getattr(source, "global_name", None)
    if not isinstance(root, str):
        return None
    written = source.name() if callable(source.name) else source.name  # a method before torch 2.13
    is_module = bool(steps) and steps[-1] in _CONTAINERS
    return _Place(root, written, is_module, tuple(step for step in reversed(steps) if step not in _CONTAINERS))


def _member(source: Any) -> str:
    """What a step of the chain adds; "" for one that only says of what kind the object is."""
    for field in ("member", "index", "idx"):
        value = getattr(source, field, None)
        if isinstance(value, str | int):
            return str(value)
    return ""


def _path(place: _Place | None, roots: Mapping[str, str]) -> str:
    if place is None:
        return ""
    first = roots.get(place.written, place.root)
    return ".".join(filter(None, (first, *place.parts)))


# ---- of AOTAutograd's graphs -------------------------------------------------------------------------------------------


def _input_path(node: Node, paths: Paths) -> str:
    """The path of an input; "" for what the user has no name for, such as a tensor saved for backward."""
    described = node.meta.get("desc")
    while isinstance(described, SubclassGetAttrAOTInput):  # what a tensor subclass is made of
        described = described.base
    if isinstance(described, ParamAOTInput | BufferAOTInput):
        return described.target
    if isinstance(described, PlainAOTInput) and described.idx < len(paths.inputs):
        return paths.inputs[described.idx]
    return ""


def _module_path(node: Node, paths: Paths) -> str:
    """The path of the innermost module whose call the node is a part of, or is the gradient of."""
    entered = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    written, kind = next(reversed(entered.values()), ("", None))
    for root, first in paths.roots:
        if written == root:
            return first or getattr(kind, "__name__", "")
        if written.startswith(f"{root}."):
            return ".".join(filter(None, (first, written[len(root) + 1 :])))
    return written


def paths_in(gm: GraphModule, paths: Paths) -> dict[str, str]:
    """By names of nodes, those paths that there are."""
    found = {node.name: _node_path(node, paths) for node in gm.graph.nodes}
    return {name: path for name, path in found.items() if path}


def _node_path(node: Node, paths: Paths) -> str:
    return _input_path(node, paths) if node.op == "placeholder" else _module_path(node, paths)
