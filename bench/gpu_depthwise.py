"""Depthwise convolutions and their gradients on a GPU: the library, torch's own kernels, Inductor, kgen and its template.

python -m bench.gpu_depthwise                                # all, about four minutes
python -m bench.gpu_depthwise --only "ssim" --most 12        # more configurations of the template
python -m bench.gpu_depthwise --device cpu --shrink 16       # tries the command out

All contenders of a problem take turns (`bench/gpu_timing.py`). Errors are relative, by norms, against float64. TF32 is off.
`beside` means channels that lie side by side.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.contenders import copy_of
from bench.conv_problems import bf16, channels_last, f16, f32
from bench.gpu_runs import Runner, prepared
from bench.gpu_timing import timed
from kgen.only import only
from kgen.templates.contract import Config

aten = torch.ops.aten
TEMPLATE = "triton_conv_depthwise"
LIBRARY, NATIVE, INDUCTOR, KGEN = "library", "native", "inductor", "kgen"


@dataclass(frozen=True)
class Depthwise:
    """`of` is what is computed: "result", or the gradient of the "image" or the "filters"."""

    name: str
    image: tuple[int, ...]
    taps: tuple[int, ...]
    stride: int = 1
    beside: bool = False
    dtype: torch.dtype = f32
    of: str = "result"
    padded: bool = True
    one_filter: bool = False
    peers: tuple[str, ...] = (LIBRARY, NATIVE, KGEN)

    def shrunk(self, by: int) -> Depthwise:
        batch, channels, *sizes = self.image
        return replace(self, image=(max(1, batch // by), channels, *(max(12, n // by) for n in sizes)))

    @property
    def how(self) -> tuple[Any, ...]:
        rank = len(self.taps)
        padding = [n // 2 if self.padded else 0 for n in self.taps]
        return [self.stride] * rank, padding, [1] * rank, False, [0] * rank, self.image[1]

    def filters(self, w: Tensor) -> Tensor:
        return w.expand(self.image[1], *w.shape[1:]) if self.one_filter else w

    def function(self, x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        w = self.filters(w)
        if self.of == "result":
            found: Tensor = aten.convolution(x, w, None, *self.how)
            return found
        mask = [self.of == "image", self.of == "filters", False]
        made: Tensor = aten.convolution_backward(g, x, w, None, *self.how, mask)[mask.index(True)]
        return made

    def make(self, device: str, seed: int) -> list[Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        draw = partial(torch.randn, generator=generator, device=device)
        x, w = draw(self.image).to(self.dtype), draw(1 if self.one_filter else self.image[1], 1, *self.taps).to(self.dtype)
        g = torch.empty_like(aten.convolution(x, self.filters(w), None, *self.how)).normal_(generator=generator)
        return [channels_last(x), w, channels_last(g)] if self.beside else [x, w, g]


ALL = (LIBRARY, NATIVE, INDUCTOR, KGEN)
LATE, EARLY = (32, 480, 14, 14), (32, 128, 56, 56)
PROBLEMS = (
    Depthwise("ssim", (8, 3, 253, 253), (11, 11), peers=ALL),
    Depthwise("ssim, image", (8, 3, 253, 253), (11, 11), of="image", peers=ALL),
    Depthwise("ssim, beside", (8, 3, 253, 253), (11, 11), beside=True),
    Depthwise("blur pool", (16, 65, 130, 130), (4, 4), 2, dtype=f16, padded=False, one_filter=True, peers=ALL),
    Depthwise("blur pool, beside", (16, 65, 130, 130), (4, 4), 2, True, f16, padded=False, one_filter=True),
    Depthwise("3x3", EARLY, (3, 3), dtype=bf16),
    Depthwise("3x3, beside", EARLY, (3, 3), beside=True, dtype=bf16),
    Depthwise("3x3 float32", EARLY, (3, 3)),
    Depthwise("3x3 float32, beside", EARLY, (3, 3), beside=True),
    Depthwise("3x3 stride 2, beside", EARLY, (3, 3), 2, True, bf16),
    Depthwise("5x5, beside", EARLY, (5, 5), beside=True, dtype=bf16),
    Depthwise("5x5 late", LATE, (5, 5), dtype=bf16),
    Depthwise("5x5 late, beside", LATE, (5, 5), beside=True, dtype=bf16),
    Depthwise("7x7", (32, 96, 56, 56), (7, 7), dtype=bf16),
    Depthwise("7x7, beside", (32, 96, 56, 56), (7, 7), beside=True, dtype=bf16),
    Depthwise("7x7 image, beside", (32, 96, 56, 56), (7, 7), beside=True, dtype=bf16, of="image"),
    Depthwise("7 taps along rows, beside", (8, 2048, 4096), (7,), beside=True, dtype=bf16, peers=(KGEN,)),
    Depthwise("31 taps of sound", (24, 256, 430), (31,), dtype=bf16),
    Depthwise("31 taps of sound, beside", (24, 256, 430), (31,), beside=True, dtype=bf16),
    Depthwise("31 taps image, beside", (24, 256, 430), (31,), beside=True, dtype=bf16, of="image"),
    Depthwise("15 taps of sound", (12, 512, 510), (15,), dtype=bf16),
    Depthwise("15 taps of sound, beside", (12, 512, 510), (15,), beside=True, dtype=bf16),
    Depthwise("9 taps float32, beside", (16, 384, 1000), (9,), beside=True),
    Depthwise("5 taps of text", (8, 1024, 2048), (5,), dtype=bf16),
    Depthwise("3 taps of text, beside", (8, 1024, 2048), (3,), beside=True, dtype=bf16),
    Depthwise("11x11 filters", (8, 3, 253, 253), (11, 11), of="filters"),
    Depthwise("3x3 float32 filters, beside", EARLY, (3, 3), beside=True, of="filters"),
    Depthwise("7x7 float32 filters, beside", (32, 96, 56, 56), (7, 7), beside=True, of="filters"),
)
BY_NAME = {problem.name: problem for problem in PROBLEMS}


def compiled(problem: Depthwise, backend: str, **how: Any) -> Callable[..., Any]:
    def function(*args: Tensor) -> Tensor:
        return problem.function(*args)

    return torch.compile(copy_of(function), backend=backend, fullgraph=True, **how)


def with_kgen(problem: Depthwise, device: str) -> Callable[..., Any]:
    return compiled(problem, "kgen", options={"cache": False, "gpu_interpreter": device == "cpu"})


def runner_of(name: str, problem: Depthwise, device: str) -> Runner:
    context: AbstractContextManager[Any] = nullcontext()
    if name == LIBRARY:
        return Runner(lambda: problem.function, context)
    if name == NATIVE:
        return Runner(lambda: without_library(problem), context)
    return Runner(partial(with_kgen, problem, device) if name == KGEN else partial(compiled, problem, name), context)


def without_library(problem: Depthwise) -> Callable[..., Tensor]:
    def run(*args: Tensor) -> Tensor:
        with torch.backends.cudnn.flags(enabled=False):
            return problem.function(*args)

    return run


def candidates(problem: Depthwise, args: list[Tensor], most: int) -> dict[str, Config]:
    """Configurations of the template, the likely fastest first, each with another number of channels or of neighbours."""
    seen: list[Config] = []

    def pick(found: Sequence[Config]) -> Config:
        seen[:] = found
        return seen[0]

    torch._dynamo.reset()
    with only(TEMPLATE, pick):
        with_kgen(problem, args[0].device.type)(*args)
    kinds = {(one.BLOCK_G, one.ROWS): one for one in reversed(seen)}
    chosen = [one for one in seen if kinds[one.BLOCK_G, one.ROWS] is one][:most]
    return {f"{one.BLOCK_G}x{one.BLOCK_M}, {one.ROWS} rows, {one.WARPS} warps": one for one in chosen}


def measure(problem: Depthwise, options: argparse.Namespace) -> None:
    device = options.device
    torch._dynamo.reset()
    sets = [problem.make(device, seed) for seed in range(2)]
    want = problem.function(*(a.double() for a in sets[0]))
    runners = {name: runner_of(name, problem, device) for name in problem.peers if name in options.contenders}
    if problem.of != "filters":
        for name, config in candidates(problem, sets[0], options.most).items():
            context = only(TEMPLATE, lambda _, own=config: own)
            runners[name] = Runner(partial(with_kgen, problem, device), context, TEMPLATE)
    failed: dict[str, str] = {}
    row = timed(prepared(runners, sets, want, failed, True), options.seconds, device == "cuda")["results"]
    shown = (f"{name} {one['seconds'] * 1e6:.1f} ({one['error']:.0e})" for name, one in row.items())
    chosen = "; ".join(row[KGEN]["chosen"]) if KGEN in row else ""
    print(f"{problem.name}: {' | '.join(shown)} | kgen chose {chosen[:110]}", *failed.items(), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(BY_NAME), default=list(BY_NAME))
    parser.add_argument("--contenders", nargs="+", choices=ALL, default=ALL)
    parser.add_argument("--most", type=int, default=4, help="configurations of the template")
    parser.add_argument("--seconds", type=float, default=0.3, help="of measuring, for each problem")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shrink", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.backends.cudnn.allow_tf32 = False
    with torch.no_grad(), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        for name in options.only:
            measure(BY_NAME[name].shrunk(options.shrink) if options.shrink > 1 else BY_NAME[name], options)


if __name__ == "__main__":
    main()
