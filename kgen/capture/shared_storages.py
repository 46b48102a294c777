"""Inputs that share a storage, in a graph that writes to inputs.

AOTAutograd makes the inputs again from their storage, at the offsets that they had while tracing, and no guard of Dynamo's
looks at these, nor at the length of a storage. A call with others would compute with wrong elements.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx import GraphModule

from kgen.errors import FallbackWarning

__all__ = ["StorageView", "SameStorages", "may_write", "shared_views"]


@dataclass(frozen=True, slots=True)
class StorageView:
    """Where an input, the one at `position`, is: the `offset` of its first element, and how many `bytes` its storage has. None
    for what the compiled graph computes with as a symbol."""

    position: int
    offset: int | None
    bytes: int | None

    def holds(self, tensor: torch.Tensor) -> bool:
        same = self.offset is None or tensor.storage_offset() == self.offset
        return same and (self.bytes is None or tensor.untyped_storage().nbytes() == self.bytes)


def shared_views(inputs: Sequence[Any]) -> tuple[StorageView, ...]:
    """Where those tensors are that share their storage with another one."""
    storages = {k: x.untyped_storage()._cdata for k, x in enumerate(inputs) if _has_storage(x)}
    count = Counter(storages.values())
    return tuple(_view(k, inputs[k]) for k, storage in storages.items() if count[storage] > 1)


def _has_storage(value: Any) -> bool:
    """Subclasses other than fake tensors have no storage of their own."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return not torch.utils._python_dispatch.is_traceable_wrapper_subclass(value)


def _view(position: int, tensor: torch.Tensor) -> StorageView:
    offset, length = tensor.storage_offset(), tensor.untyped_storage().nbytes()
    return StorageView(position, _known(offset), _known(length))


def _known(number: Any) -> int | None:
    return number if isinstance(number, int) else None


def may_write() -> bool:
    """Whether the graph that has just been traced writes to an input, as far as is known."""
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return True
    return any(one.mutates_data for one in context.fw_metadata.input_info)


@dataclass(slots=True)
class SameStorages:
    """Calls the compiled graph with inputs as it was compiled for them, and the graph in eager with others."""

    compiled: Callable[..., Any]
    gm: GraphModule
    views: tuple[StorageView, ...]
    warned: bool = field(default=False)

    def __call__(self, *args: Any) -> Any:
        if all(view.holds(args[view.position]) for view in self.views):
            return self.compiled(*args)
        if not self.warned:
            self.warned = True
            warnings.warn(
                "kgen: inputs that share a storage lie elsewhere in it than those that the graph was compiled for, so this "
                "call runs in eager\n  hint: pass copies, or views that begin at the same offset",
                FallbackWarning,
                stacklevel=2,
            )
        return self.gm(*args)
