"""Convolutions of few channels on CPUs, depthwise ones above all, without a matmul: by `include/kgen/direct.h`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.templates.base import KernelTemplate
from kgen.templates.contract import Config, contraction, knob, operand, result, template
from kgen.templates.problem import Problem

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Why an estimate counts for nothing.
OTHERS = "direct convolutions of this kind were not measured, or are slower than the library's"
# Positions of a row from which on channels are cut finer.
NARROW = 28
# Taps of a row that are unrolled at most.
UNROLLED = 8
# Seconds: starting the kernel. The share of the peak rate, and how many times longer it takes where adjacent lanes are
# no adjacent in memory (docs/decisions/0021-cpu-convolutions.md).
START, RATE, APART = 2e-6, 0.45, 8.0
# Sizes of what was measured: channels and positions of a row at least, and taps of a row and a column.
FEWEST_CHANNELS, FEWEST_POSITIONS, SHORT = 64, 14, 14


@dataclass(frozen=True, slots=True)
class Steps:
    """Coordinates from a position to the next one, and from a tap to the next one."""

    step: int
    dilation: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What the Jinja file is told: the windows' steps, and whether all channels of results read one image. `taps` of a row
    are unrolled; 0 are not."""

    d: Steps
    h: Steps
    w: Steps
    shared: bool
    taps: int


class _Direct(KernelTemplate):
    """What both kernels have in common."""

    reductions: ClassVar = frozenset()

    def refuse(self, problem: Problem) -> str | None:
        """Why loops over taps cannot compute a problem."""
        if problem.main_dtype not in TYPES:
            return f"it does not multiply {problem.main_dtype}"
        return next((found for name in problem.inputs if isinstance(found := problem.over_coordinates(name), str)), None)

    def facts(self, problems: Sequence[Problem], config: Config) -> Facts:
        [problem] = problems
        d, h, w = (_steps(problem, axis) for axis in "dhw")
        return Facts(d, h, w, _shares_image(problem), _unrolled(problem))


@template(
    implements=contraction("b,d+q,h+r,w+s,g,c", "q,r,s,g,c -> b,d,h,w,g"),
    device="cpu",
    source="conv_direct.cpp.jinja",
    name="cpp_conv_direct",
)
class ConvolutionOfChannels(_Direct):
    """Y[b, d, h, w, g] = sum over q, r, s, c of X[b, d + q, h + r, w + s, g, c] F[q, r, s, g, c]: vectors of adjacent g.
    Of a depthwise convolution c is empty; of one with few channels no g tells images apart."""

    X = operand("b", "d+q", "h+r", "w+s", "g", "c", access="coordinates")
    F = operand("q", "r", "s", "g", "c", access="coordinates")
    Y = result("b", "d", "h", "w", "g")
    ROWS, BLOCK_W, BLOCK_G, BLOCK_S = knob(1 << 20, 16), knob(64, 32), knob(64, 32), knob(1)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        """Rectangles that L1 holds with the rows that they read; wider ones where rows are short."""
        narrow = problem.size("w") >= NARROW
        for channels in (32, 64) if narrow else (64, 32):
            for width in (32, 64):
                yield {"BLOCK_W": width, "BLOCK_G": channels}

    def seconds(self, problem: Problem, config: Config) -> float:
        return _seconds(problem, "g")

    def uncalibrated(self, problem: Problem) -> str | None:
        """Depthwise convolutions of stride 1 with 3 by 3 or 5 by 5 taps take .5 to 1.0 of the library's time, with 7 by 7 taps
        where rows are short .66 to 1.0, with 3 by 3 and stride 2 there .43 to .73; gradients of filters .1 to .5."""
        if problem.size("g") < FEWEST_CHANNELS:
            return OTHERS
        if _is_gradient_of_filters(problem):
            return None
        short = problem.size("w") <= NARROW
        taps = (3, 5, *((7,) if short else ())) if _moves_by_one(problem) else (3,) if problem.size("w") <= SHORT else ()
        return _of_depthwise(problem, "g", taps)


@template(
    implements=contraction("b,g,c,d+q,h+r,w+s", "g,c,q,r,s -> b,g,d,h,w"),
    device="cpu",
    source="conv_direct_contiguous.cpp.jinja",
    name="cpp_conv_contiguous",
)
class ConvolutionOfRows(_Direct):
    """Y[b, g, d, h, w] = sum over c, q, r, s of X[b, g, c, d + q, h + r, w + s] F[g, c, q, r, s]: vectors of adjacent w."""

    X = operand("b", "g", "c", "d+q", "h+r", "w+s", access="coordinates")
    F = operand("g", "c", "q", "r", "s", access="coordinates")
    Y = result("b", "g", "d", "h", "w")
    BLOCK_H, BLOCK_W, BLOCK_R, BLOCK_S = knob(32, 8), knob(256, 64), knob(1), knob(1)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        for rows in (32, 8):
            for width in (256, 64):
                yield {"BLOCK_H": rows, "BLOCK_W": width}

    def seconds(self, problem: Problem, config: Config) -> float:
        return _seconds(problem, "w")

    def uncalibrated(self, problem: Problem) -> str | None:
        """Depthwise convolutions of 3 by 3 taps take .5 to .9 of the library's time. Causal ones of bfloat16 with 4 taps along
        one dimension take .82 to .84, and their gradients .6 (float32: .95 to 1.05)."""
        if _is_along_one(problem):
            return None
        return OTHERS if problem.size("w") < FEWEST_POSITIONS else _of_depthwise(problem, "w", (3,))


def _shares_image(problem: Problem) -> bool:
    """Whether all channels of results read one image."""
    image = problem.over_coordinates("X")
    assert not isinstance(image, str)
    return image.value.variables().isdisjoint(problem.loops["g"])


def _unrolled(problem: Problem) -> int:
    """Taps of a row, where these are few, and known."""
    taps = problem.extent("s").as_int()
    return taps if taps is not None and taps <= UNROLLED else 0


def _steps(problem: Problem, position: str) -> Steps:
    grid = problem.grid(position)
    return Steps(1, 1) if grid is None else Steps(grid.step, grid.dilation)


def _seconds(problem: Problem, vector: str) -> float:
    """Multiplying, or reading and writing; `vector` is the axis of adjacent lanes."""
    moved = sum(problem.bytes_read(name) for name in problem.inputs) + problem.epilogue_bytes
    compute = problem.flops / problem.device.rate(problem.accumulator) / RATE
    apart = 1.0 if _are_adjacent(problem, vector) else APART
    return START + max(compute, moved / problem.device.bandwidth) * apart


def _are_adjacent(problem: Problem, axis: str) -> bool:
    """Whether what is stored along an axis, and most of what is read, is contiguous in memory."""
    loops = problem.loops[axis]
    stores = [s.store[0] for s in problem.epilogue for kept in s.stored if kept and s.kind == "pointwise"]
    return bool(loops) and all(ix.stride_of(e, loops[-1]) == 1 for e in stores) and _reads_adjacent(problem, axis)


def _reads_adjacent(problem: Problem, axis: str) -> bool:
    """Whether most of what is read along an axis is contiguous in memory."""
    loops = problem.loops[axis]
    loads = [load.attr[1][0] for load in vs.loads([problem.inputs["X"].value]) if loops and loops[-1] in load.variables()]
    if not loads:
        return False
    step = problem.steps.get(loops[-1], 1)
    return all(ix.stride_of(e, loops[-1]) == step for e in loads)


def _moves_by_one(problem: Problem) -> bool:
    return all(problem.step(axis) == 1 for axis in ("h", "w"))


def _is_gradient_of_filters(problem: Problem) -> bool:
    """Whether results are as many taps of filters of one channel each, and sums go over the positions of images whose channels
    are adjacent in memory: of float32 numbers these were measured, by 3, 5 and 7."""
    [taps, rows, columns] = [problem.size(axis) for axis in "hrs"]
    square = taps == problem.size("w") in (3, 5, 7) and min(rows, columns) > taps
    return square and problem.main_dtype is torch.float32 and _is_depthwise(problem) and _reads_adjacent(problem, "g")


def _of_depthwise(problem: Problem, vector: str, taps: tuple[int, ...]) -> str | None:
    """What is to be said of all but depthwise convolutions of two dimensions with so many taps along either of them, whose
    adjacent along the axis of vectors are adjacent in memory: these were measured, one thread with AVX-512."""
    square = problem.size("r") == problem.size("s") in taps
    undilated = all(problem.step(axis) == 1 for axis in ("r", "s"))
    measured = problem.main_dtype in (torch.float32, torch.bfloat16)
    usual = square and undilated and measured and _is_depthwise(problem)
    return None if usual and _are_adjacent(problem, vector) else OTHERS


def _is_along_one(problem: Problem) -> bool:
    """Whether a depthwise convolution of bfloat16, or the gradient of its filters, has a few taps along one dimension, at many
    positions that are adjacent in memory."""
    few, many = sorted((problem.size("s"), problem.size("w")))
    if not (problem.size("h") == problem.size("r") == 1 and few in (3, 4) and many >= FEWEST_POSITIONS):
        return False
    measured = problem.main_dtype is torch.bfloat16 and _moves_by_one(problem) and problem.step("s") == 1
    return measured and _is_depthwise(problem) and _reads_adjacent(problem, "w")


def _is_depthwise(problem: Problem) -> bool:
    """Whether each group of a convolution of two dimensions, with sizes that are known, has one channel, and AVX-512 computes
    it."""
    alone = len(problem.loops["g"]) == 1 and problem.size("c") == 1 and not _shares_image(problem)
    flat = problem.size("q") == problem.size("d") == 1 and all(problem.static(axis) for axis in "grshw")
    return alone and flat and problem.device.isa == "avx512"
