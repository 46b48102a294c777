"""An aten graph as bytes, for another process or a later time. torch's pickler of graphs is private; 2.11 to 2.13 have it."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["NotPackable", "packed", "signature", "unpacked"]


class NotPackable(Exception):
    """Raised by `packed`: the graph has sizes without numbers, or holds what cannot be pickled."""


def packed(gm: GraphModule) -> bytes:
    """The graph with its notes and the sizes, types and strides of its values. Raises NotPackable."""
    if any(_is_symbolic(node.meta.get("val")) for node in gm.graph.nodes):
        raise NotPackable("its sizes are not numbers")
    try:
        return GraphPickler.dumps(gm, Options(ops_filter=None))
    except Exception as cause:
        raise NotPackable(f"{type(cause).__name__}: {cause}") from cause


def unpacked(data: bytes) -> GraphModule:
    """The graph again. Its values belong to a fake mode of their own: what is learnt of them reaches nobody's guards."""
    found = GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))
    assert isinstance(found, GraphModule)
    found.recompile()
    return found


def signature(gm: GraphModule) -> str:
    """The calls of the graph and of those inside it, with the types, sizes, strides and devices of their values. Equal in every
    process, as `packed` is not, and without the values of constants."""
    graphs = [(name, module.graph) for name, module in gm.named_modules() if isinstance(module, GraphModule)]
    return "\n".join(
        f"{name} {node.format_node()} {_described(node.meta.get('val'))}" for name, graph in graphs for node in graph.nodes
    )


def _described(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_described, value))})"
    if isinstance(value, torch.Tensor):
        strides = tuple(value.stride()) if value.layout == torch.strided else value.layout
        return f"{value.dtype} {tuple(value.shape)} {strides} {value.device}"
    return str(value)


def _is_symbolic(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_is_symbolic, value))
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout == torch.strided else ()
        return any(isinstance(n, torch.SymInt) for n in (*value.shape, *strides))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
