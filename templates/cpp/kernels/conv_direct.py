"""Convolutions of few channels on CPUs, depthwise ones above all, without a matmul: by `include/kgen/direct.h`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kgen.templates.base import KernelTemplate
from kgen.templates.contract import Config, contraction, knob, operand, result, template
from kgen.templates.problem import Problem

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Taps of a row that are unrolled at most.
UNROLLED = 8
# Seconds: starting the kernel.
START = 2e-6


@dataclass(frozen=True, slots=True)
class Steps:
    """Places from a position to the next one, and from a tap to the next one."""

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


@template(
    implements=contraction("b,d+q,h+r,w+s,g,c", "q,r,s,g,c -> b,d,h,w,g"),
    device="cpu",
    source="conv_direct.cpp.jinja",
    name="cpp_conv_direct",
)
class ConvolutionOfChannels(KernelTemplate):
    """Y[b, d, h, w, g] = sum over q, r, s, c of X[b, d + q, h + r, w + s, g, c] F[q, r, s, g, c]: vectors of neighbouring g.
    Of a depthwise convolution c is empty; of one with few channels no g tells images apart."""

    X = operand("b", "d+q", "h+r", "w+s", "g", "c", access="places")
    F = operand("q", "r", "s", "g", "c", access="places")
    Y = result("b", "d", "h", "w", "g")
    ROWS, BLOCK_W, BLOCK_G, BLOCK_S = knob(1 << 20, 16), knob(64, 32), knob(64, 32), knob(1)

    def refuse(self, problem: Problem) -> str | None:
        return _refuse(problem)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        for channels in (64, 32):
            for width in (64, 32):
                yield {"BLOCK_W": width, "BLOCK_G": channels}

    def seconds(self, problem: Problem, config: Config) -> float:
        return START + problem.flops / problem.device.rate(torch.float32)

    def facts(self, problems: Sequence[Problem], config: Config) -> Facts:
        return _facts(problems[0])


@template(
    implements=contraction("b,g,c,d+q,h+r,w+s", "g,c,q,r,s -> b,g,d,h,w"),
    device="cpu",
    source="conv_rows.cpp.jinja",
    name="cpp_conv_rows",
)
class ConvolutionOfRows(KernelTemplate):
    """Y[b, g, d, h, w] = sum over c, q, r, s of X[b, g, c, d + q, h + r, w + s] F[g, c, q, r, s]: vectors of neighbouring w."""

    X = operand("b", "g", "c", "d+q", "h+r", "w+s", access="places")
    F = operand("g", "c", "q", "r", "s", access="places")
    Y = result("b", "g", "d", "h", "w")
    BLOCK_H, BLOCK_W, BLOCK_R, BLOCK_S = knob(32, 8), knob(256, 64), knob(1), knob(1)

    def refuse(self, problem: Problem) -> str | None:
        return _refuse(problem)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        for rows in (32, 8):
            for width in (256, 64):
                yield {"BLOCK_H": rows, "BLOCK_W": width}

    def seconds(self, problem: Problem, config: Config) -> float:
        return START + problem.flops / problem.device.rate(torch.float32)

    def facts(self, problems: Sequence[Problem], config: Config) -> Facts:
        return _facts(problems[0])


def _refuse(problem: Problem) -> str | None:
    """Why loops over taps cannot compute a problem."""
    if problem.main_dtype not in TYPES:
        return f"it does not multiply {problem.main_dtype}"
    return next((found for name in problem.inputs if isinstance(found := problem.over_places(name), str)), None)


def _facts(problem: Problem) -> Facts:
    image = problem.over_places("X")
    assert not isinstance(image, str)
    shared = image.value.variables().isdisjoint(problem.loops["g"])
    return Facts(*(_steps(problem, axis) for axis in "dhw"), shared, _unrolled(problem))


def _unrolled(problem: Problem) -> int:
    """Taps of a row, where these are few, and known."""
    taps = problem.extent("s").as_int()
    return taps if taps is not None and taps <= UNROLLED else 0


def _steps(problem: Problem, position: str) -> Steps:
    grid = problem.grid(position)
    return Steps(1, 1) if grid is None else Steps(grid.step, grid.dilation)
