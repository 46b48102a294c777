"""The operator with which a graph checks an index that only data decide: `aten._assert_scalar` raises RuntimeError, eager
IndexError."""

from __future__ import annotations

import torch

__all__ = ["check_index"]

_library = torch.library.Library("kgen", "FRAGMENT")
_library.define("check_index(SymInt inside, str message) -> ()")


def _check_index(inside: int, message: str) -> None:
    if not inside:
        raise IndexError(message)


_library.impl("check_index", _check_index, "CompositeExplicitAutograd")

check_index = torch.ops.kgen.check_index.default
