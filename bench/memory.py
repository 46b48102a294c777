"""Peak memory of a call in this process: resident on the CPU, allocated on a GPU."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Peak:
    """Bytes before the call (parameters, optimizer state, code) and at the highest point during it."""

    rest: int
    peak: int

    @property
    def above_rest(self) -> int:
        return self.peak - self.rest


def peak_of(call: Callable[[], Any], device: str = "cpu") -> Peak:
    """Compile first: what a compiler once used and freed must not count. Needs Linux on the CPU."""
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        rest = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return Peak(rest, torch.cuda.max_memory_allocated())
    _return_freed_memory()
    rest = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    call()
    return Peak(rest, _status("VmHWM"))


def _return_freed_memory() -> None:
    """Freed blocks that the C library holds on to would hide growth."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:  # not glibc
        return


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", _STATUS.read_text())
    return int(found.group(1)) * 1024 if found else 0
