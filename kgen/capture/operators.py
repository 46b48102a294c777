"""What torch's operators are called, and what they do beside computing their results."""

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
# Views where the strides allow it, else copies.
_MAY_COPY = frozenset(f"aten::{n}" for n in ("contiguous", "flatten", "reshape", "reshape_as", "to", "type_as"))
# Views whose schemas do not say so, for autograd's sake.
_UNANNOTATED = frozenset(f"aten::{n}" for n in ("_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"))


def is_pure(target: Any) -> bool:
    """Whether an operator of torch's makes its results of its arguments alone, and does nothing else."""
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims") or target._schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and not target._schema.name.startswith(_EMPTY)


def is_view(target: Any) -> bool:
    """Whether the operator's result may share the storage of its first argument, without a write to it."""
    schema = getattr(target, "_schema", None)
    return schema is not None and (schema.name in _UNANNOTATED or bool(getattr(target, "is_view", False)))


def owner_of(node: Any) -> Any:
    """The FX node at the root of a chain of views: in eager, the tensor that owns the storage of `node`."""
    while (source := _viewed(node)) is not None:
        node = source
    return node


def _viewed(node: Any) -> Any | None:
    """The argument in whose storage the node's result lies."""
    if node.op != "call_function" or not node.args:
        return None
    target, source = node.target, node.args[0]
    if getattr(target, "__name__", "") == "getitem" and is_view(getattr(source, "target", None)):
        return source.args[0]
    name = getattr(getattr(target, "_schema", None), "name", "")
    shares = is_view(target) and (name not in _MAY_COPY or _same_storage(node, source))
    return source if shares or name == "aten::copy_" else None


def _same_storage(node: Any, source: Any) -> bool:
    """Whether tracing found the two in one storage."""
    pair = node.meta.get("val"), source.meta.get("val")
    if not all(isinstance(value, torch.Tensor) and value.layout == torch.strided for value in pair):
        return False
    mine, below = (value.untyped_storage()._cdata for value in pair)
    return bool(mine == below)


def operator_name(target: Any) -> str:
    """``aten.add.Tensor`` for an OpOverload; the qualified Python name for anything else."""
    namespace = getattr(target, "namespace", None)
    if namespace and hasattr(target, "_overloadname"):
        packet = target._schema.name.split("::")[1]
        return f"{namespace}.{packet}.{target._overloadname}"
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', str(target))}"
