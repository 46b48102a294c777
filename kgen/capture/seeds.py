"""The operator that draws a graph's seeds (`kgen/capture/rng.py`). Exported programs call it without what traces graphs."""

from __future__ import annotations

import torch

__all__ = ["seeds"]

_library = torch.library.Library("kgen", "FRAGMENT")
_library.define("seeds(int count, Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def _fake_seeds(count: int, device: torch.device) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int64, device=device)


def _draw_seeds(count: int, device: torch.device) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), dtype=torch.int64, device=device)


torch.library.register_fake("kgen::seeds", _fake_seeds, lib=_library)
_library.impl("seeds", _draw_seeds, "BackendSelect")

seeds = torch.ops.kgen.seeds.default
