"""Calls a case without data, and turns a graph that was traced on a CPU into one of a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from tools.replay_corpus import Case

Rewrite = Callable[[GraphModule], GraphModule]
Rendering = Callable[[Rewrite], AbstractContextManager[None]]
GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


class OnCpu(TorchFunctionMode):
    """Tensors are made on the CPU, whatever device is named."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **({**kwargs, "device": CPU} if "device" in kwargs else kwargs))


def call(case: Case, device: str, door: Callable[..., Any], rendering: Rendering) -> None:
    """Calls the compiled function, and where the case trains its backward, on tensors without data.

    They are always a CPU's: torch made for CPUs cannot copy to a GPU that is not there, nor ask it for gradients. The graphs
    that come of it are moved to the GPU as a whole."""
    torch.manual_seed(0)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(case.trains):
        with OnCpu():
            fn, args = case.build()
        if case.trains:
            args = tree_map_only(torch.Tensor, _requiring_gradients, args)
        with rendering(for_gpu if device == "gpu" else copy.copy):
            made = torch.compile(fn, backend=door, dynamic=case.dynamic)(*args)
            if case.trains:
                _backward(made)


def _requiring_gradients(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _backward(made: Any) -> None:
    outputs = [t for t in tree_leaves(made) if isinstance(t, torch.Tensor) and t.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])


def for_gpu(gm: GraphModule) -> GraphModule:
    """The graph with everything on a GPU."""
    graph = Graph()
    moved: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        made = moved[node] = graph.node_copy(node, moved.__getitem__)
        made.args, made.kwargs = (map_aggregate(arguments, _place) for arguments in (made.args, made.kwargs))  # type: ignore
        made.meta = {name: tree_map_only(FakeTensor, _on_gpu, v) if name == "val" else v for name, v in node.meta.items()}
    return GraphModule(gm, graph)


def _place(argument: Any) -> Any:
    return GPU if argument == CPU and isinstance(argument, torch.device) else argument


def _on_gpu(value: FakeTensor) -> torch.Tensor:
    with value.fake_mode:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=GPU)
