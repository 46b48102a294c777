"""What the FX nodes of a graph became, and which of them read a storage: what a write has to store first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import Node

from kgen.ir import values as vs
from kgen.lowering.tensor import Tensor


class NodeValues(dict[Node, Any]):
    """FX node -> what it became. Readers of a storage are found without a walk over the graph, so n writes take n steps."""

    def __init__(self) -> None:
        super().__init__()
        self._new: dict[Node, None] = {}  # nodes whose loads nobody has asked for yet
        self._readers: dict[str, dict[Node, None]] = {}

    def __setitem__(self, node: Node, item: Any) -> None:
        super().__setitem__(node, item)
        self._new[node] = None

    def take_readers(self, root: str, root_of: Callable[[str], str]) -> list[Node]:
        """The nodes that read the storage that buffer `root` owns. Each is given once for what it is now: the caller makes a
        copy for a node that is wanted later on, and what is not wanted now never will be."""
        for node in self._new:
            for name in _buffers(self[node]):
                self._readers.setdefault(root_of(name), {})[node] = None
        self._new.clear()
        return list(self._readers.pop(root, ()))


def tensors(item: Any) -> Iterator[Tensor]:
    """The tensors in what a node became."""
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, tuple | list | dict):
        for part in item.values() if isinstance(item, dict) else item:
            yield from tensors(part)


def _buffers(item: Any) -> set[str]:
    return {load.attr[0] for tensor in tensors(item) for load in vs.loads([tensor.value])}
