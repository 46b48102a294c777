"""What torch's operators do beside computing their results."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

# Operators whose results hold whatever was in memory.
_EMPTY = (
    "aten::empty",
    "aten::_empty",
    "prims::empty",
    "aten::new_empty",
    "aten::resize",
    "aten::rand",
    "aten::bernoulli",
    "aten::multinomial",
    "aten::normal",
)


def is_pure(target: Any) -> bool:
    """Whether an operator of torch's makes its results of its arguments alone, and does nothing else."""
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims") or target._schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and not target._schema.name.startswith(_EMPTY)
