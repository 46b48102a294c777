"""Calls of higher-order operators, whose arguments and results are trees with dictionaries, as functions of flat lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

__all__ = ["TreeCall"]


@dataclass(frozen=True, slots=True)
class TreeCall:
    """``target(*args, **kwargs)``, called with the leaves of (args, kwargs) and returning those of the result, None included.
    `name` is what reports call it."""

    target: Callable[..., Any]
    spec: TreeSpec
    name: str

    def __call__(self, *leaves: Any) -> list[Any]:
        tree: tuple[tuple[Any, ...], Mapping[str, Any]] = tree_unflatten(leaves, self.spec)
        args, kwargs = tree
        return tree_leaves(self.target(*args, **kwargs))

    def __str__(self) -> str:
        return self.name
