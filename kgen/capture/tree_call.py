"""Calls of higher-order operators, whose arguments and results are trees with dictionaries, as functions of flat lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

__all__ = ["TreeCall"]


@dataclass(frozen=True, slots=True)
class TreeCall:
    """``target(*args, **kwargs)``, called with the leaves of (args, kwargs) and returning those of the result, None included.
    `name` is what reports call it."""

    target: Callable[..., Any]
    spec: TreeSpec
    name: str
    numbered: Any = field(init=False, repr=False, compare=False)  # the tree with the numbers of its leaves, if it is plain

    def __post_init__(self) -> None:
        numbered = tree_unflatten(range(self.spec.num_leaves), self.spec)
        object.__setattr__(self, "numbered", numbered if _is_plain(numbered) else None)

    def __call__(self, *leaves: Any) -> list[Any]:
        tree = tree_unflatten(leaves, self.spec) if self.numbered is None else _filled(self.numbered, leaves)
        return _flat(self.target(*tree[0], **tree[1]))

    def __str__(self) -> str:
        return self.name


def _is_plain(numbered: Any) -> bool:
    if type(numbered) is int:
        return True
    return type(numbered) in (tuple, list, dict) and all(map(_is_plain, _items(numbered)))


def _items(tree: Any) -> Iterable[Any]:
    return tree.values() if isinstance(tree, dict) else tree


def _filled(numbered: Any, leaves: Sequence[Any]) -> Any:
    """A plain tree, several times faster than by `tree_unflatten`: each call needs one."""
    kind = type(numbered)
    if kind is int:
        return leaves[numbered]
    if kind is tuple:
        return tuple([_filled(one, leaves) for one in numbered])
    if kind is list:
        return [_filled(one, leaves) for one in numbered]
    return {name: _filled(one, leaves) for name, one in numbered.items()}


def _flat(result: Any) -> list[Any]:
    if type(result) in (tuple, list) and all(one is None or isinstance(one, torch.Tensor) for one in result):
        return list(result)
    return tree_leaves(result)
