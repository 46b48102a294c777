"""The operator that draws a graph's seeds (`kgen/capture/rng.py`). Exported programs call it without what traces graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

__all__ = ["drawn_on_cpu", "seeds"]

_library = torch.library.Library("kgen", "FRAGMENT")
_library.define("seeds(int count, Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def _fake_seeds(count: int, device: torch.device) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int64, device=device)


# Where seeds are drawn, and where they then are, for who compares a GPU's results with the CPU's; None: where they are asked.
_drawn: ContextVar[tuple[str, str | None] | None] = ContextVar("kgen_seeds_drawn", default=None)


@contextmanager
def drawn_on_cpu(stay: bool) -> Iterator[None]:
    """Seeds inside are those of the CPU's generator, whatever device asks for them; they `stay` there, or are moved."""
    token = _drawn.set(("cpu", "cpu" if stay else None))
    try:
        yield
    finally:
        _drawn.reset(token)


def _draw_seeds(count: int, device: torch.device) -> torch.Tensor:
    where, to = _drawn.get() or (device, None)
    return torch.randint(-(2**63), 2**63 - 1, (count,), dtype=torch.int64, device=where).to(to or device)


torch.library.register_fake("kgen::seeds", _fake_seeds, lib=_library)
_library.impl("seeds", _draw_seeds, "BackendSelect")

seeds = torch.ops.kgen.seeds.default
