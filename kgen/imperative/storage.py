"""Which tensors share memory, as a question that a traced program may ask.

Dynamo knows the sizes of results while it traces, but cannot look at storages. So an operator answers in sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["shared_storages"]

_library = torch.library.Library("kgen", "FRAGMENT")
_library.define("shared_storages(Tensor[] tensors) -> Tensor[]")


def _encoded(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For each tensor one of sizes (0, position of the first tensor with its storage, elements of that storage, offset)."""
    known = dict[int, int]()
    made = []
    for position, one in enumerate(tensors):
        storage = one.untyped_storage()
        first = known.setdefault(storage._cdata, position)
        made.append(
            one.new_empty((0, first, storage.nbytes() // one.element_size(), one.storage_offset()), requires_grad=False)
        )
    return made


_library.impl("shared_storages", _encoded, "CompositeExplicitAutograd")
torch.library.register_fake("kgen::shared_storages", _encoded, lib=_library)


def shared_storages(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
    """For each tensor: the first one in its storage, how many of its elements that has room for, and its offset there."""
    found = torch.ops.kgen.shared_storages([one.detach() for one in tensors])
    return [(one.shape[1], one.shape[2], one.shape[3]) for one in found]
