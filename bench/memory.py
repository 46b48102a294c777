"""Peak memory of a call in this process: resident on the CPU, allocated on a GPU.

``python -m bench.memory [--device cuda] [--only NAME]`` prints what training steps need in eager, by Inductor, and by kgen,
above what is there before them and apart from gradients; and what kgen's plans of the graphs say.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kgen

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


# ---- training steps --------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """A linear layer with cross-entropy, as the end of a language model."""

    def __init__(self, depth: int, columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(depth, columns, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x), target)


class Block(nn.Module):
    """A pre-norm layer with causal attention and a gated MLP, and the mean square of what it makes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = (
            nn.Linear(*size) for size in ((width, 4 * width), (width, 4 * width), (4 * width, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        y = self.norms[1](x)
        return (x + self.down(F.silu(self.gate(y)) * self.up(y))).square().mean()


@dataclass(frozen=True)
class Step:
    """A training step: a module that makes a loss, and its arguments."""

    module: Callable[[], nn.Module]
    args: Callable[[], Sequence[Tensor]]


# Sizes for a CPU, and for a GPU.
STEPS = {
    "cpu": {
        "linear + cross-entropy 1280x512x32000": Step(
            lambda: Head(512, 32000), lambda: (torch.randn(1280, 512), torch.randint(0, 32000, (1280,)))
        ),
        "layer 4x512x512": Step(lambda: Block(512, 8), lambda: (torch.randn(4, 512, 512),)),
    },
    "cuda": {
        "linear + cross-entropy 4096x2048x32000": Step(
            lambda: Head(2048, 32000), lambda: (torch.randn(4096, 2048), torch.randint(0, 32000, (4096,)))
        ),
        "layer 8x2048x2048": Step(lambda: Block(2048, 16), lambda: (torch.randn(8, 2048, 2048),)),
    },
}
CONTENDERS = {"eager": None, "inductor": "inductor", "kgen": "kgen"}
MEGABYTE = 1e6


def peak_of_step(step: Step, contender: str, device: str, **options: Any) -> int:
    """Bytes of forward and backward above what is there before them, apart from gradients."""
    torch._dynamo.reset()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    module = step.module().to(device, dtype)
    args = [arg.to(device, dtype) if arg.is_floating_point() else arg.to(device) for arg in step.args()]
    backend = CONTENDERS[contender]
    run = module if backend is None else torch.compile(module, backend=backend, options=options or None)

    def call() -> None:
        run(*args).backward()

    call()  # compiles, and makes the gradients, which stay
    return peak_of(call, device).above_rest


def planned_peaks(step: Step) -> dict[str, int]:
    """What kgen's plans of a step's graphs need, by role, on a CPU."""
    torch._dynamo.reset()
    report = kgen.explain(step.module(), *step.args(), print_report=False)
    return {graph.role: graph.peak_memory for graph in report.graphs}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", help="steps whose names contain this")
    given = parser.parse_args(arguments)
    for name, step in STEPS[given.device].items():
        if given.only in name:
            found = {one: peak_of_step(step, one, given.device) / MEGABYTE for one in CONTENDERS}
            print(name, *(f"{one} {peak:.1f} MB" for one, peak in found.items()), sep="  ")
            if given.device == "cpu":
                plans = ", ".join(f"{role} {peak / MEGABYTE:.1f} MB" for role, peak in planned_peaks(step).items())
                print(f"  plans of kgen: {plans}")


if __name__ == "__main__":
    main()
