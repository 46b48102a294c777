"""Indices with numbers that only data decide, as views and as writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

__all__ = ["back", "is_copy", "item", "part", "put", "through"]

# Indices below are numbers that the program's text gives; nothing is known of those that a loop counts.
_KNOWN = 1 << 40


def part(start: Any, stop: Any, step: Any) -> slice:
    """`start:stop:step` in an index."""
    return slice(start, stop, step)


def item(x: Any, index: Any) -> Any:
    """`x[index]`."""
    steps = _steps(x, index)
    if steps is None:
        return x[index]
    view, dim = x, 0
    for one in steps:
        if isinstance(one, torch.Tensor):
            view = view.index_select(dim, _wrapped(one, view.shape[dim])).squeeze(dim)
        else:
            view, dim = _step(view, dim, one)
    return view


def put(x: Any, index: Any, value: Any) -> None:
    """`x[index] = value`."""
    steps = _steps(x, index)
    if steps is None:
        x[index] = value
        return
    view, dim = x, 0
    spots: list[Any] = []
    for one in steps:
        if isinstance(one, torch.Tensor):
            spots.append((dim, _wrapped(one, view.shape[dim])))
            dim += 1
        else:
            view, dim = _step(view, dim, one)
    if not spots:
        _write(view, value)
        return
    _write_at(view, spots, value)


def is_copy(x: Any, index: Any) -> bool:
    """Whether `x[index]` is a view in eager, and a copy here."""
    steps = _steps(x, index)
    return steps is not None and any([isinstance(one, torch.Tensor) for one in steps])


def through(x: Any, index: Any, write: Callable[[Any, Any], Any], outer: Callable[[Any], Any] | None = None) -> Any:
    """What `write` gives for `x[index]`, which it writes into, in several steps maybe: each goes through a function that makes
    the others see it. `outer` is that of a view which x is in turn."""
    view = item(x, index)

    def seen(made: Any) -> Any:
        back(x, index, view)
        return made if outer is None else outer(made)

    return seen(write(view, seen))


def back(x: Any, index: Any, view: Any) -> None:
    """Writes a view into what it is a view of, where it is a copy of that."""
    if is_copy(x, index):
        put(x, index, view)


def _step(view: torch.Tensor, dim: int, one: Any) -> tuple[torch.Tensor, int]:
    """One part of an index, for dimension `dim`; gives the dimension that the next part is for."""
    if isinstance(one, int):
        return torch.select(view, dim, one), dim
    if one is None:
        return view.unsqueeze(dim), dim + 1
    whole = one.start is None and one.stop is None and one.step is None
    return (view if whole else view[(*[slice(None)] * dim, one)]), dim + 1


def _write(view: torch.Tensor, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        view.copy_(value)
    else:
        view.fill_(value)


def _write_at(view: torch.Tensor, spots: list[Any], value: Any) -> None:
    """A write at indices that are tensors, in a view that still has their dimensions."""
    sizes = [size for k, size in enumerate(view.shape) if k not in [dim for dim, _ in spots]]
    given = value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=view.dtype, device=view.device)
    given = given.to(view.dtype).expand(sizes)
    for dim, _ in spots:
        given = given.unsqueeze(dim)
    if len(spots) == 1:
        view.index_copy_(spots[0][0], spots[0][1], given)
        return
    spread = [torch.arange(size, device=view.device) for size in view.shape]
    for dim, place in spots:
        spread[dim] = place
    view.index_put_(tuple(torch.meshgrid(*spread, indexing="ij")), given)


def _wrapped(index: torch.Tensor, size: int) -> torch.Tensor:
    """An index that may count from the end, as a tensor of one."""
    index = index.reshape(1).to(torch.int64)
    return torch.where(index < 0, index + size, index)


def _steps(x: Any, index: Any) -> list[Any] | None:
    """The parts of an index, one for each dimension, if data decide some of them; None for all that PyTorch does itself."""
    if not isinstance(x, torch.Tensor):
        return None
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all([_is_simple(one) for one in parts]) or all([_is_static(one) for one in parts]):
        return None
    used = len([one for one in parts if one is not None and one is not Ellipsis])
    rest = [slice(None)] * (x.dim() - used)
    if not any([one is Ellipsis for one in parts]):
        return [*parts, *rest]
    made: list[Any] = []
    for one in parts:
        made = [*made, *rest] if one is Ellipsis else [*made, one]
    return made


def _is_simple(one: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dim() == 0 and one.dtype not in (torch.bool, torch.uint8) and not one.is_floating_point()
    return one is None or one is Ellipsis or isinstance(one, slice) or (isinstance(one, int) and not isinstance(one, bool))


def _is_static(one: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return False
    if isinstance(one, int):
        return statically_known_true(one < _KNOWN) and statically_known_true(one > -_KNOWN)
    return True
