"""Depthwise convolutions on GPUs, each channel with filters of its own: without matrix units, and with each element of an image
loaded once for several positions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Expr, Var
from kgen.templates.base import KernelTemplate, Resources
from kgen.templates.contract import Config, contraction, knob, operand, result, template
from kgen.templates.problem import Problem, memoised
from kgen.templates.triton.kernels import conv_estimate
from kgen.templates.triton.kernels.conv import power_of_two
from kgen.templates.triton.kernels.matmul import refuse_empty
from kgen.templates.windows import grid_of, over_coordinates

# Channels and strips of a tile, and warps: of channels that lie side by side, and of others; and the positions of a strip.
BESIDE = ((32, 8, 4), (64, 8, 4), (64, 16, 4), (64, 4, 4), (128, 4, 4), (32, 16, 4), (16, 32, 4))
APART = ((1, 128, 4), (1, 256, 4), (1, 512, 4), (1, 64, 2))
ROWS = (8, 4, 2, 1)
# Channels of the narrowest of these tiles, but for images of fewer.
LEAST_CHANNELS = 16
# Positions that 32 bits count, with what tiles have past the last one.
MOST_POSITIONS = 2**31 - 2**20
# Taps and coordinates of a column that are written out: the most of all columns, and of one.
MOST_UNROLLED, MOST_COORDINATES = 96, 40
# Positions along the first dimension of the windows, of up to so many taps and of more: of fewer, strips overlap more.
FEWER_TAPS = 25
LEAST_MEASURED, LEAST_OF_MORE_TAPS = 7, 14
# Registers of a thread for each coordinate of an element, with bounds and without, and besides. Compilers take .6 to 1.5 of it.
BOUNDED, UNBOUNDED, OTHER_REGISTERS = 2.0, 0.5, 16


@dataclass(frozen=True, slots=True)
class Window:
    """The first dimension of the windows: its loop of positions, and how many coordinates a position is from the next. All
    loops of positions, `inward`: the last one moves through memory in the smallest steps."""

    positions: Var
    step: int
    inward: tuple[Var, ...]


@dataclass(frozen=True, slots=True)
class Digit:
    """A loop as a digit of a strip's number: ``number // divisor % extent``, and what a step of it adds to the position."""

    divisor: int
    extent: int
    weight: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What the Jinja file is told of the first dimension of the windows. A strip is `rows` positions along it, of `length`;
    `block` is the digit of strips along it, `digits` are the others. They meet `taps` of its own, for each of the `inner_taps`
    of the other dimensions, which are written out if `unrolled`."""

    rows: int
    length: int
    step: int
    block: Digit
    digits: tuple[Digit, ...]
    taps: int
    inner_taps: int
    unrolled: bool

    @property
    def strips(self) -> int:
        """Strips of all images."""
        return math.prod(digit.extent for digit in (self.block, *self.digits))

    @property
    def coordinates(self) -> int:
        return (self.rows - 1) * self.step + self.taps

    @property
    def last(self) -> int:
        """Where the last strip begins."""
        return self.length - self.rows

    def behind(self, row: int) -> int:
        """How far a row of a strip is from its first one, in positions."""
        return row * self.block.weight

    def met(self, place: int) -> list[tuple[int, int]]:
        """The rows that a coordinate meets, each with the tap."""
        return [(row, tap) for row in range(self.rows) for tap in range(self.taps) if row * self.step + tap == place]


@template(
    implements=contraction("g,m+t,c", "g,t,c,n -> g,m,n"), device="cuda", source="conv_depthwise.py.jinja",
    name="triton_conv_depthwise",
)  # fmt: skip
class DepthwiseConv(KernelTemplate):
    """Y[g, m, n] = sum over taps t of X[g, m + t] F[g, t, n], of each channel g."""

    X, F, Y = operand("g", "m+t", "c", access="predicated"), operand("g", "t", "c", "n"), result("g", "m", "n")
    BLOCK_G, BLOCK_M = knob(1, 2, 4, 8, 16, 32, 64, 128), knob(128, 4, 8, 16, 32, 64, 256, 512)
    ROWS, WARPS, STAGES = knob(*ROWS), knob(4, 2), knob(2)
    longest: ClassVar = {"c": 1}
    # strips are no tiles of neighbours that an epilogue could reduce
    reductions: ClassVar = frozenset()

    def refuse(self, problem: Problem) -> str | None:
        if any(problem.extent(axis).as_int() is None for axis in problem.loops):
            return "its tiles are for sizes that are known"
        if problem.size("m") > MOST_POSITIONS:
            return f"it counts {MOST_POSITIONS:,} positions at most"
        if window_of(problem) is None:
            return "positions and taps do not come to coordinates along the first dimension of its windows"
        return refuse_empty(problem)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        most = max(1, power_of_two(problem.size("g")))
        few = ((most, 128 // most, 4), (most, 256 // most, 4))
        beside = few if most < LEAST_CHANNELS else tuple(tile for tile in BESIDE if tile[0] <= most)
        for g, m, warps in beside if conv_estimate.are_channels_beside(problem) else APART:
            for rows in ROWS:
                if _fits(problem, rows):
                    yield {"BLOCK_G": g, "BLOCK_M": m, "ROWS": rows, "WARPS": warps}

    def resources(self, problem: Problem, config: Config) -> Resources:
        return Resources(0, _registers(problem, config))

    def grid(self, problem: Problem, config: Config) -> Expr:
        return (
            problem.tiles("g", config.BLOCK_G)
            * problem.extent("n")
            * math.ceil(_facts(problem, config).strips / config.BLOCK_M)
        )

    def facts(self, problems: Sequence[Problem], config: Config) -> Facts:
        [problem] = problems
        return _facts(problem, config)

    def seconds(self, problem: Problem, config: Config) -> float:
        facts = _facts(problem, config)
        strips = conv_estimate.Strips(facts.strips, facts.taps, facts.coordinates)
        return conv_estimate.depthwise(problem, config, strips, _registers(problem, config))

    def uncalibrated(self, problem: Problem) -> str | None:
        found = window_of(problem)
        least = LEAST_MEASURED if problem.size("t") <= FEWER_TAPS else LEAST_OF_MORE_TAPS
        if found is not None and _extent(found.positions) < least:
            return f"no GPU has measured it on images of fewer than {least} rows"
        return conv_estimate.depthwise_unmeasured(problem)


@memoised
def window_of(problem: Problem) -> Window | None:
    """The first dimension of the windows, if the image depends on its positions and taps by coordinates alone: an element for
    one position and a tap is then one for a neighbour and another tap."""
    image, loops = problem.inputs["X"], problem.loops["m"]
    taps = problem.loops["t"]
    if not taps or image.loops["t"] != taps or image.loops["m"] != loops:
        return None
    for position in loops:
        grid = grid_of(position, taps[0], problem.steps)
        variables = image.value.variables()
        known = position in variables and taps[0] in variables and grid.dilation == 1
        if known and over_coordinates(image.value, grid) is not None:
            return Window(position, grid.step, _inward(problem))
    return None


def _inward(problem: Problem) -> tuple[Var, ...]:
    """The loops of positions, in the order of the image in memory: where channels have one filter, they are such
    loops as well, and may be the innermost."""
    image, loops = problem.inputs["X"], problem.loops["m"]
    [index, *_] = [load.attr[1][0] for load in vs.loads([image.value])]
    steps = {v: ix.stride_of(index, v) for v in loops}
    if any(step is None or step.as_int() is None for step in steps.values()):
        return loops
    return tuple(sorted(loops, key=lambda v: -abs(problem.sizes.of(steps[v] or ix.ZERO))))


def _extent(loop: Var) -> int:
    length = loop.extent.as_int()
    assert length is not None
    return length


def _product(loops: Sequence[Var]) -> int:
    return math.prod(map(_extent, loops))


def _taps(problem: Problem) -> tuple[int, int]:
    """Those along the first dimension of the windows, and of the other dimensions."""
    first, *others = problem.loops["t"]
    return _extent(first), _product(others)


def _facts(problem: Problem, config: Config) -> Facts:
    found = window_of(problem)
    assert found is not None
    (taps, inner), rows, loops = _taps(problem), config.ROWS, problem.loops["m"]
    digits: dict[Var, Digit] = {}
    divisor = 1
    for v in reversed(found.inward):
        extent = -(-_extent(v) // rows) if v is found.positions else _extent(v)
        digits[v] = Digit(divisor, extent, _product(loops[loops.index(v) + 1 :]))
        divisor *= extent
    coordinates = (rows - 1) * found.step + taps
    return Facts(
        rows, _extent(found.positions), found.step, digits.pop(found.positions), tuple(digits.values()), taps, inner,
        inner * (taps + coordinates) <= MOST_UNROLLED,
    )  # fmt: skip


def _registers(problem: Problem, config: Config) -> int:
    """Registers of a thread: sums of its elements, and what it loads for them."""
    facts, words = _facts(problem, config), problem.accumulator.itemsize // 4 or 1
    each = max(1, config.BLOCK_G * config.BLOCK_M // (config.WARPS * 32)) * words
    each_coordinate = BOUNDED if conv_estimate.has_bounds(problem) else UNBOUNDED
    return int(each * (config.ROWS + each_coordinate * facts.coordinates)) + OTHER_REGISTERS


def _fits(problem: Problem, rows: int) -> bool:
    """Whether the dimension has so many positions, and few enough coordinates are written out."""
    found = window_of(problem)
    return (
        found is not None
        and rows <= _extent(found.positions)
        and (rows - 1) * found.step + _taps(problem)[0] <= MOST_COORDINATES
    )
