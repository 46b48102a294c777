"""Copies of arguments that a graph may write into, and the state of random numbers: two runs have to begin with the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

__all__ = ["RandomState", "copied"]


def copied(values: Sequence[Any]) -> list[Any]:
    """The values, tensors copied. Tensors that share memory share it in the copy, with the same strides and offsets."""
    storages: dict[int, torch.UntypedStorage] = {}
    return [_copied(value, storages) for value in values]


def _copied(value: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if value.layout != torch.strided or value.is_conj() or value.is_neg():
        return value.clone()
    storage = value.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = storage.clone()
    made = torch.empty(0, dtype=value.dtype, device=value.device)
    return made.set_(storages[storage._cdata], value.storage_offset(), value.shape, value.stride())


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of torch's default generators."""

    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...] = ()

    @classmethod
    def now(cls) -> Self:
        return cls(torch.get_rng_state(), tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ())

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
