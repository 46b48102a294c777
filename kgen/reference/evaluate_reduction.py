"""Reductions and scans of whole tensors with plain torch operations: the reference for `ops.REDUCTIONS` and `ops.SCANS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from kgen.ir import ops
from kgen.reference.evaluate_value import WIDE_UNSIGNED, Tensor


def reduce(op: str, values: Tensor) -> list[Tensor]:
    """The results of a reduction of `ops.REDUCTIONS` over the last dimension; its identity where that is empty."""
    if op == "welford":
        return _welford(values)
    if op in ("argmax", "argmin"):
        return _extreme(op, values)
    if values.shape[-1] == 0:
        return [_identity(op, values)]
    if op in _REDUCE and values.dtype not in WIDE_UNSIGNED:
        return [_REDUCE[op](values)]
    found = values.numpy()
    return [torch.from_numpy(np.array(_NUMPY_REDUCE[op].reduce(found, axis=-1, dtype=found.dtype)))]


_REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(-1, dtype=x.dtype), "prod": lambda x: x.prod(-1, dtype=x.dtype), "max": lambda x: x.amax(-1),
    "min": lambda x: x.amin(-1), "any": lambda x: x.any(-1), "all": lambda x: x.all(-1),
}  # fmt: skip

_NUMPY_REDUCE: Mapping[str, Any] = {
    "sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "bitxor": np.bitwise_xor,
}  # fmt: skip


def _identity(op: str, values: Tensor) -> Tensor:
    return torch.tensor(ops.identity(op, values.dtype), dtype=values.dtype).expand(values.shape[:-1])


def _welford(values: Tensor) -> list[Tensor]:
    if values.shape[-1] == 0:
        return [torch.zeros(values.shape[:-1], dtype=values.dtype) for _ in range(2)]
    mean = values.mean(-1)
    return [mean, (values - mean.unsqueeze(-1)).square().sum(-1)]


def _ordered(values: Tensor) -> Tensor:
    """The same order in a dtype whose comparisons torch has."""
    if values.dtype is torch.uint64:
        return values.view(torch.int64) ^ torch.iinfo(torch.int64).min
    return values if values.dtype.is_floating_point else values.to(torch.int64)


def _take(values: Tensor, place: Tensor, dim: int) -> Tensor:
    """torch.gather, through a signed dtype of the same width where torch has no kernel."""
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(values.dtype, values.dtype)
    return values.contiguous().view(signed).gather(dim, place).view(values.dtype)


def _extreme(op: str, values: Tensor) -> list[Tensor]:
    """(value, first position); the first NaN wins."""
    if values.shape[-1] == 0:
        return [_identity(op, values), torch.zeros(values.shape[:-1], dtype=torch.int64)]
    keys = _ordered(values)
    best = (keys.amax(-1) if op == "argmax" else keys.amin(-1)).unsqueeze(-1)
    hits = (keys == best) | (keys.isnan() & best.isnan())
    place = torch.where(hits, torch.arange(values.shape[-1]), values.shape[-1]).amin(-1)
    return [_take(values, place.unsqueeze(-1), -1).squeeze(-1), place]


def scan(op: str, values: Tensor, dim: int) -> list[Tensor]:
    """The results of an inclusive scan of `ops.SCANS` along `dim`."""
    if op in ops.ROW_ORDERS:
        return list(torch.sort(values, dim=dim, stable=True))[: 2 if op in ops.WITH_POSITIONS else 1]
    if op in ("argmax", "argmin"):
        keys = _ordered(values)
        place = (torch.cummax if op == "argmax" else torch.cummin)(keys, dim).indices
        return [_take(values, place, dim), place]
    if values.dtype in WIDE_UNSIGNED:
        found = values.numpy()
        return [torch.from_numpy(np.array(_NUMPY_REDUCE[op].accumulate(found, axis=dim, dtype=found.dtype)))]
    return [_SCAN[op](values, dim)]


_SCAN: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda x, dim: x.cumsum(dim, dtype=x.dtype), "prod": lambda x, dim: x.cumprod(dim, dtype=x.dtype),
    "max": lambda x, dim: x.cummax(dim).values, "min": lambda x, dim: x.cummin(dim).values,
    "logaddexp": torch.logcumsumexp,
}  # fmt: skip
