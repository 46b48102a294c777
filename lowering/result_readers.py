"""Who reads the results of the operator that is lowered."""

from __future__ import annotations

import operator

from torch.fx import Node

from kgen.lowering.builder import Builder

__all__ = ["readers", "reads"]


def readers(b: Builder, position: int) -> list[Node]:
    """The nodes that read one of its results."""
    users = list(b.current.users)
    if not isinstance(b.current.meta.get("val"), tuple | list):
        return users
    taken = [user for user in users if user.target is operator.getitem and user.args[1] == position]
    return [reader for one in taken for reader in one.users]


def reads(b: Builder, position: int) -> bool:
    """Whether somebody reads one of its results; the only one is taken to be read."""
    return not isinstance(b.current.meta.get("val"), tuple | list) or bool(readers(b, position))
