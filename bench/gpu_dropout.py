"""Dropout on a GPU where other kernels could draw its numbers: of attention's weights, behind linear layers, and alone.

python -m bench.gpu_dropout                                # all, about two minutes
python -m bench.gpu_dropout --only attention               # patterns whose names begin so
python -m bench.gpu_dropout --device cpu --shrink 16       # tries the command out

Contenders take turns (`bench/gpu_timing.py`). Each draws numbers of its own, so the error is that of 16 results' mean, against
what dropout would leave on average: about the same for all contenders.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.contenders import copy_of
from bench.gpu_runs import Runner, prepared
from bench.gpu_timing import timed

BF16 = torch.bfloat16
RATE, REPEATS = 0.1, 16
EAGER, INDUCTOR, KGEN = "eager", "inductor", "kgen"
Function = Callable[..., Any]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, rate: float = RATE) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return F.dropout((scores if mask is None else scores + mask).softmax(-1), rate) @ v


def causal_attention(q: Tensor, k: Tensor, v: Tensor, rate: float = RATE) -> Tensor:
    future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return F.dropout((q @ k.mT * q.shape[-1] ** -0.5).masked_fill(future, -torch.inf).softmax(-1), rate) @ v


def linear(x: Tensor, w: Tensor, b: Tensor, rate: float = RATE) -> Tensor:
    return F.dropout(F.linear(x, w, b), rate)


def gelu(x: Tensor, w: Tensor, b: Tensor, rate: float = RATE) -> Tensor:
    return F.dropout(F.gelu(F.linear(x, w, b)), rate)


def alone(x: Tensor, rate: float = RATE) -> Tensor:
    return F.dropout(x, rate)


@dataclass(frozen=True)
class Dropped:
    """`shapes` of normal numbers; tensors of four dimensions lie with heads behind rows, as a linear layer leaves them."""

    name: str
    function: Function
    shapes: tuple[tuple[int, ...], ...]
    training: bool = False
    padded: bool = False

    def make(self, device: str, shrink: int) -> list[Tensor]:
        shapes = [(max(1, first // shrink), *rest) for first, *rest in self.shapes]
        made = [torch.randn(shape, device=device).to(BF16) for shape in shapes]
        made = [t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() > 2 else t for t in made]
        if self.padded:
            made.append(torch.where(torch.rand(shapes[0][0], 1, 1, shapes[1][2], device=device) < 0.2, -1e4, 0.0).to(BF16))
        return [t.requires_grad_(self.training) for t in made]


def heads(batch: int, count: int, length: int, head: int) -> tuple[tuple[int, ...], ...]:
    return ((batch, count, length, head),) * 3


def layer(rows: int, into: int, out: int) -> tuple[tuple[int, ...], ...]:
    return (rows, into), (out, into), (out,)


PATTERNS = (
    Dropped("attention 4x12x1024x64", attention, heads(4, 12, 1024, 64)),
    Dropped("attention 16x12x512x64, padded", attention, heads(16, 12, 512, 64), padded=True),
    Dropped("attention 64x12x128x64, padded", attention, heads(64, 12, 128, 64), padded=True),
    Dropped("attention 4x12x2048x64, causal", causal_attention, heads(4, 12, 2048, 64)),
    Dropped("attention 2x16x2048x128", attention, heads(2, 16, 2048, 128)),
    Dropped("attention 4x12x1024x64, training", attention, heads(4, 12, 1024, 64), training=True),
    Dropped("linear 16384x1024x4096", linear, layer(16384, 1024, 4096)),
    Dropped("linear 16384x4096x1024", linear, layer(16384, 4096, 1024)),
    Dropped("linear 4096x1024x1024", linear, layer(4096, 1024, 1024)),
    Dropped("linear with gelu 16384x1024x4096", gelu, layer(16384, 1024, 4096)),
    Dropped("linear with gelu 16384x4096x1024", gelu, layer(16384, 4096, 1024)),
    Dropped("linear with gelu 8192x768x3072", gelu, layer(8192, 768, 3072)),
    Dropped("alone 16384x4096", alone, ((16384, 4096),)),
)


def step(pattern: Dropped, function: Function) -> Function:
    """A call, in training with the gradients of all that is normal."""
    if not pattern.training:
        return function

    def call(*args: Tensor) -> tuple[Tensor, ...]:
        made = function(*args)
        return made, *torch.autograd.grad(made, args, made.detach())

    return call


def contender(pattern: Dropped, name: str, device: str) -> Function:
    function = copy_of(pattern.function)
    if name == INDUCTOR:
        function = torch.compile(function)
    elif name == KGEN:
        function = torch.compile(function, backend="kgen", options={"cache": False, "gpu_interpreter": device == "cpu"})
    return step(pattern, function)


def deviation(function: Function, want: Tensor, args: Sequence[Tensor]) -> float:
    """Of the mean of several results, relative by norms."""
    total = torch.zeros_like(want)
    for _ in range(REPEATS):
        made = function(*args)
        total += (made[0] if isinstance(made, tuple) else made).detach()
    return float((total / REPEATS - want).norm() / want.norm())


def undropped(pattern: Dropped, args: Sequence[Tensor]) -> Tensor:
    """In float32."""
    made: Tensor = pattern.function(*(t.detach().float() for t in args), rate=0.0)
    return made


def measure(pattern: Dropped, options: argparse.Namespace) -> None:
    torch._dynamo.reset()
    sets = [pattern.make(options.device, options.shrink) for _ in range(2)]
    made = {name: contender(pattern, name, options.device) for name in options.contenders}
    failed: dict[str, str] = {}
    runners = {name: Runner(lambda own=own: own, nullcontext()) for name, own in made.items()}
    with torch.set_grad_enabled(pattern.training):
        want = undropped(pattern, sets[0]).detach()
        entries = prepared(runners, sets, [want, *sets[0]] if pattern.training else want, failed, True)
        errors = {entry.name: deviation(made[entry.name], want, sets[0]) for entry in entries}
        row = timed(entries, options.seconds, options.device == "cuda")["results"]
    shown = (f"{name} {one['seconds'] * 1e6:.1f} ({errors[name]:.3f})" for name, one in row.items())
    chosen = "; ".join(row[KGEN]["chosen"]) if KGEN in row else ""
    print(f"{pattern.name}: {' | '.join(shown)} | kgen chose {chosen[:150]}", *failed.items(), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="how the names of patterns begin")
    parser.add_argument("--contenders", nargs="+", choices=(EAGER, INDUCTOR, KGEN), default=(EAGER, INDUCTOR, KGEN))
    parser.add_argument("--seconds", type=float, default=0.3, help="of measuring, for each pattern")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shrink", type=int, default=1, help="divide batches and rows by this")
    options = parser.parse_args(arguments)
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        for pattern in PATTERNS:
            if pattern.name.startswith(options.only):
                measure(pattern, options)


if __name__ == "__main__":
    main()
