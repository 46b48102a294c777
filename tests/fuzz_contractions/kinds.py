"""The kinds of contractions: how sizes are drawn, what the operands are, and the call that users write.

`call` gets a problem, the operands, and what else the kind reads. It takes float64 as well, so that it is its own reference;
where torch's operator does not, `exact` computes the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from .problem import Problem
from .tensors import Spec

Sizes = dict[str, int]
Options = dict[str, tuple[int, ...]]
Shapes = tuple[tuple[int, ...], tuple[int, ...]]

FLOATS = ("bfloat16", "bfloat16", "float16", "float32")
# Lengths that are no multiples of tiles, those that are, and those of real layers.
ODD = (1, 2, 3, 5, 7, 13, 17, 24, 31, 33, 48, 61, 67, 96, 101, 131, 197, 257)
EVEN = (8, 16, 32, 64, 128, 256, 512)
REAL = (1000, 1024, 1031, 1536, 2048, 2053, 3072, 4096)
CHANNELS = (3, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512)
EXTENTS = (5, 7, 14, 15, 28, 30, 33, 56, 57, 112)


@dataclass(frozen=True)
class Limits:
    """Elements of a tensor, multiplications of a problem, and lengths to draw from. Small ones are for the interpreter."""

    elements: float = 2e7
    multiplications: float = 1.2e11
    small: bool = False

    def length(self, rng: random.Random) -> int:
        if self.small:
            return rng.choice((1, 3, 8, 16, 17, 33, 40, 64, 67))
        return rng.choice(rng.choice((ODD, EVEN, EVEN, REAL)))

    def channels(self, rng: random.Random) -> int:
        return rng.choice((3, 8, 16, 24, 32) if self.small else CHANNELS)

    def place(self, rng: random.Random, rank: int) -> int:
        if self.small:
            return rng.choice((3, 5, 7, 9) if rank > 1 else (5, 17, 33))
        return rng.choice(EXTENTS if rank < 3 else EXTENTS[:6])


# For the interpreter, and for operand tiles alone.
SMALL, LAYERS = Limits(2e4, 3e6, small=True), Limits(1e6, 6e7)


def _no_extras(_p: Problem) -> tuple[Spec, ...]:
    return ()


@dataclass(frozen=True)
class Kind:
    """`weight` is how often it is drawn. `column` is the dimension of the result, and `right_column` that of the right operand,
    which they have in common; `channel` is the left operand's dimension that is summed over, or the nearest to it. Those of
    each operand are drawn from `layouts`. `families`: several right operands may share the left one."""

    name: str
    draw: Callable[[random.Random, Limits], tuple[Sizes, Options]]
    shapes: Callable[[Problem], Shapes]
    depth: Callable[[Problem], int]
    call: Callable[..., torch.Tensor]
    exact: Callable[..., torch.Tensor] | None = None
    extras: Callable[[Problem], tuple[Spec, ...]] = _no_extras
    weight: int = 4
    dtypes: tuple[str, ...] = FLOATS
    column: int = -1
    right_column: int = -1
    channel: int = -1
    layouts: tuple[tuple[str, ...], tuple[str, ...]] = (
        ("contiguous", "contiguous", "transposed", "sliced", "padded", "offset"),
        ("contiguous", "contiguous", "transposed", "transposed", "sliced", "padded", "offset"),
    )
    families: bool = True
    plain: bool = False  # neither prologues nor any epilogue but those for integers

    def reference(self, problem: Problem, *operands: torch.Tensor) -> torch.Tensor:
        return (self.exact or self.call)(problem, *operands)

    def multiplications(self, problem: Problem) -> float:
        """Multiplications."""
        return float(math.prod(self.result(problem)) * self.depth(problem))

    def result(self, problem: Problem) -> tuple[int, ...]:
        left, right = (torch.empty(shape, device="meta", dtype=torch.float64) for shape in self.shapes(problem))
        extras = [torch.empty(s.shape, device="meta", dtype=torch.float64) for s in self.extras(problem)]
        return tuple(self.reference(problem, left, right, *extras).shape)


# ---- matrices ---------------------------------------------------------------------------------------------------------


def _lengths(names: str) -> Callable[[random.Random, Limits], tuple[Sizes, Options]]:
    def draw(rng: random.Random, limits: Limits) -> tuple[Sizes, Options]:
        found = {name: rng.choice((1, 2, 3, 8)) if name in "bh" else limits.length(rng) for name in names}
        if "k" in found and found["k"] == 1 and rng.random() < 0.8:
            found["k"] = 64
        return found, {}

    return draw


def _few_rows(rng: random.Random, limits: Limits) -> tuple[Sizes, Options]:
    sizes, options = _lengths("mkn")(rng, limits)
    return {**sizes, "m": rng.choice((1, 1, 2, 5, 8, 13, 16, 31))}, options


def _of(names: str) -> Callable[[Problem], tuple[int, ...]]:
    return lambda p: tuple(p.size(name) for name in names)


def _pair(left: str, right: str) -> Callable[[Problem], Shapes]:
    return lambda p: (_of(left)(p), _of(right)(p))


def _depth(names: str) -> Callable[[Problem], int]:
    return lambda p: math.prod(_of(names)(p))


def _einsum(equation: str, weight: int = 1) -> Kind:
    inputs, _, result = equation.partition("->")
    left, right = inputs.split(",")
    summed = "".join(dict.fromkeys(c for c in left + right if c not in result))
    own = next((c for c in right if c not in left and c in result), right[-1])
    return Kind(
        f"einsum {equation}", _lengths("".join(dict.fromkeys(left + right))), _pair(left, right), _depth(summed),
        lambda p, a, b: torch.einsum(equation, a, b), weight=weight, column=result.index(own) - len(result),
        right_column=right.index(own), families=False,
    )  # fmt: skip


def _added(p: Problem) -> tuple[Spec, ...]:
    return (Spec((p.size("n"),) if p.seed % 3 else (p.size("m"), p.size("n")), p.torch_dtype),)


def _added_to_batch(p: Problem) -> tuple[Spec, ...]:
    return (Spec((p.size("b"), p.size("m"), p.size("n")) if p.seed % 2 else (1, 1, p.size("n")), p.torch_dtype),)


# ---- numbers of 8 bits ------------------------------------------------------------------------------------------------


def _multiples_of_16(rng: random.Random, limits: Limits) -> tuple[Sizes, Options]:
    sizes, _ = _lengths("mkn")(rng, limits)
    rounded = {name: max(16, length // 16 * 16) for name, length in sizes.items() if name != "m"}
    by_row = (rng.randrange(2),)
    return {"m": max(17, sizes["m"]), **rounded}, {"by_row": by_row}


def _scales(p: Problem) -> tuple[Spec, ...]:
    m, n = (p.size("m"), p.size("n")) if p.option("by_row")[0] else (1, 1)
    return Spec((m, 1), torch.float32, scale=0.5), Spec((1, n), torch.float32, scale=0.5)


def _scaled_mm(_p: Problem, a: torch.Tensor, b: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch._scaled_mm(a, b, left, right, out_dtype=torch.bfloat16, use_fast_accum=True)


# ---- convolutions -----------------------------------------------------------------------------------------------------


def _convolution_draw(rank: int, how: str) -> Callable[[random.Random, Limits], tuple[Sizes, Options]]:
    def draw(rng: random.Random, limits: Limits) -> tuple[Sizes, Options]:
        c, groups = limits.channels(rng), 1
        o = rng.choice((c, c, limits.channels(rng)))
        if how == "depthwise":
            o, groups = c * rng.choice((1, 1, 2)), c
        elif how == "grouped":
            groups = rng.choice((2, 4))
            c, o = (max(groups, n // groups * groups) for n in (c, o))
        batch = (1, 2, 3) if limits.small else (1, 2, 4, 16)
        sizes = {"n": rng.choice(batch), "c": c, "o": o}
        first = limits.place(rng, rank)
        spatial = [first if rng.random() < 0.6 else limits.place(rng, rank) for _ in range(rank)]
        sizes |= {f"s{k}": length for k, length in enumerate(spatial)}
        taps = rng.choice((1, 3, 3, 3, 5, 7 if rank < 3 else 2))
        kernel = tuple(taps if rng.random() < 0.8 else rng.choice((1, 2, 3)) for _ in range(rank))
        same = rng.random() < 0.6
        dilation = tuple(rng.choice((1, 1, 1, 2)) for _ in range(rank))
        padding = tuple(d * (t - 1) // 2 if same else rng.choice((0, 0, 1, 2)) for t, d in zip(kernel, dilation, strict=True))
        stride = tuple([rng.choice((1, 1, 1, 2, 3 if rank < 3 else 2))] * rank)
        bias = (rng.randrange(2),)
        return sizes, {
            "kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation, "groups": (groups,), "bias": bias
        }  # fmt: skip

    return draw


def _rank(p: Problem) -> int:
    return len(p.option("kernel"))


def _convolution_shapes(p: Problem) -> Shapes:
    groups = p.option("groups")[0]
    spatial = tuple(p.size(f"s{k}") for k in range(_rank(p)))
    return (p.size("n"), p.size("c"), *spatial), (p.size("o"), p.size("c") // groups, *p.option("kernel"))


def _transposed_shapes(p: Problem) -> Shapes:
    left, (o, c, *kernel) = _convolution_shapes(p)
    groups = p.option("groups")[0]
    return left, (c * groups, o // groups, *kernel)


def _bias(p: Problem) -> tuple[Spec, ...]:
    return (Spec((p.size("o"),), p.torch_dtype),) if p.option("bias")[0] else ()


def _convolve(p: Problem, a: torch.Tensor, b: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
    call: Any = (F.conv1d, F.conv2d, F.conv3d)[_rank(p) - 1]
    found: torch.Tensor = call(
        a, b, bias[0] if bias else None, p.option("stride"), p.option("padding"), p.option("dilation"), p.option("groups")[0]
    )
    return found


def _convolve_transposed(p: Problem, a: torch.Tensor, b: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
    call: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[_rank(p) - 1]
    found: torch.Tensor = call(a, b, bias[0] if bias else None, p.option("stride"), p.option("padding"))
    return found


def _convolution(rank: int, how: str = "", weight: int = 2) -> Kind:
    name = " ".join(filter(None, [how, f"conv{rank}d"]))
    transposed = how == "transposed"
    return Kind(
        name, _convolution_draw(rank, how), _transposed_shapes if transposed else _convolution_shapes,
        lambda p: math.prod(p.option("kernel")) * p.size("c") // p.option("groups")[0],
        _convolve_transposed if transposed else _convolve, extras=_bias, weight=weight, column=1,
        right_column=1 if transposed else 0, channel=1,
        layouts=(("contiguous", "channels_last", "channels_last", "offset", "sliced"), ("contiguous", "channels_last")),
        families=not how,
    )  # fmt: skip


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("mm", _lengths("mkn"), _pair("mk", "kn"), _depth("k"), lambda p, a, b: a @ b, weight=8),
        Kind("linear", _lengths("mkn"), _pair("mk", "nk"), _depth("k"), lambda p, a, b: F.linear(a, b), weight=6,
             right_column=0),
        Kind("few rows", _few_rows, _pair("mk", "kn"), _depth("k"), lambda p, a, b: a @ b, weight=3),
        Kind("addmm", _lengths("mkn"), _pair("mk", "kn"), _depth("k"),
             lambda p, a, b, v: torch.addmm(v, a, b, beta=0.5, alpha=2), extras=_added),
        Kind("bmm", _lengths("bmkn"), _pair("bmk", "bkn"), _depth("k"), lambda p, a, b: a @ b, weight=5),
        Kind("baddbmm", _lengths("bmkn"), _pair("bmk", "bkn"), _depth("k"),
             lambda p, a, b, v: torch.baddbmm(v, a, b), extras=_added_to_batch, weight=2, families=False),
        Kind("batch times matrix", _lengths("bmkn"), _pair("bmk", "kn"), _depth("k"), lambda p, a, b: a @ b, weight=3),
        _einsum("mk,mn->kn", 2), _einsum("mk,nk->nm"), _einsum("bmk,bmn->kn", 2), _einsum("bmk,kn->bnm"),
        _einsum("bhmk,bhnk->bhmn", 2), _einsum("bmk,hkn->bhmn"), _einsum("bmhk,bnhk->bhmn", 2),
        Kind("int8 mm", _multiples_of_16, _pair("mk", "kn"), _depth("k"), lambda p, a, b: torch._int_mm(a, b),
             lambda p, a, b: a @ b, dtypes=("int8",), layouts=(("contiguous",), ("contiguous", "transposed")),
             families=False, plain=True),
        Kind("scaled mm", _multiples_of_16, _pair("mk", "kn"), _depth("k"), _scaled_mm,
             lambda p, a, b, left, right: a @ b * left * right, _scales, dtypes=("float8_e4m3fn",),
             layouts=(("contiguous",), ("transposed",)), families=False, plain=True),
        _convolution(1), _convolution(2, weight=14), _convolution(3, weight=3),
        _convolution(1, "depthwise", 1), _convolution(2, "depthwise", 4), _convolution(3, "depthwise", 1),
        _convolution(2, "grouped", 3), _convolution(1, "grouped", 1), _convolution(2, "transposed", 1),
    )
}  # fmt: skip
