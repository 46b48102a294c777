"""Convolutions on Hopper GPUs as implicit GEMMs by warps with parts of their own, in Gluon: one issues TMA loads, the others
multiply. A tile has a box of positions and a block of output channels. For each filter tap and block of channels TMA brings the
box that the tap has moved, with zeros where the image has ended. The pipeline is that of `matmul_warp_specialized.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kgen.ir import index as ix
from kgen.ir.index import Expr
from kgen.templates.base import KernelTemplate, Resources
from kgen.templates.contract import Config, contraction, knob, operand, result, template
from kgen.templates.problem import Problem, memoised
from kgen.templates.triton.codegen.tma_box import BoxLayout, BoxOrder, epilogue_tiles_of, operand_box, powers
from kgen.templates.triton.codegen.tma_layout import TmaLayout, gathers_tiles, tiles_read, tma_layout
from kgen.templates.triton.kernels import conv_estimate
from kgen.templates.triton.kernels.hopper import refuse_device
from kgen.templates.triton.kernels.matmul_tma import BARRIERS, ROW

# Rows and output channels of a tile, stages, parts of a tile for its epilogue, and whether two warp groups share each tile.
TILES = (
    (128, 256, 3, 1, True), (128, 256, 4, 2, True), (256, 128, 3, 1, True), (256, 128, 4, 2, True), (128, 128, 6, 1, True),
    (128, 128, 4, 1, False), (128, 128, 5, 2, False), (128, 64, 6, 1, False), (256, 64, 4, 1, True), (64, 256, 4, 1, False),
    (64, 128, 6, 1, False), (64, 64, 6, 1, False),
)  # fmt: skip
# Warps of a group, groups that multiply, and registers of a thread that multiplies and of one that loads.
WARPS, GROUPS, REGISTERS, LOADING = 4, 2, 232, 40
# Sums of a thread beside which it has registers for tiles that it reads itself, and registers besides sums.
FEW_SUMS, OTHER_REGISTERS = 64, 64
# Channels of the smallest block: those of one multiplication, and output channels of the narrowest tile.
LEAST_CHANNELS, NARROWEST = 16, 64
# Shapes of a tile that are tried for each of its sizes; the most dimensions of positions.
FEW_SHAPES, DIMENSIONS = 2, 4
BOX_KNOBS = tuple(f"BOX_{k}" for k in range(DIMENSIONS))


@dataclass(frozen=True, slots=True)
class Facts:
    """What the Jinja file is told: `tiles` along the positions, warp groups that share each tile or have one each, tiles that
    memory has of what the epilogue reads, and what warps beside the first group have."""

    tiles: int
    compute_units: int
    itemsize: int
    sharing: int
    in_turn: int
    epilogue_tiles_kept: int
    warps: list[int]
    registers: list[int]


@template(
    implements=contraction("g,m+t,c", "g,t,c,n -> g,m,n"), device="cuda", source="conv_warp_specialized.py.jinja",
    name="triton_conv_warp_specialized",
)  # fmt: skip
class WarpSpecializedConv(KernelTemplate):
    """Y[g, m, n] = sum over taps t and channels c of X[g, m + t, c] F[g, t, c, n], of each group g."""

    X, F, Y = (
        operand("g", "m+t", "c", access="tma"),
        operand("g", "t", "c", "n", access="tma"),
        result("g", "m", "n", access="tma"),
    )
    BLOCK_M, BLOCK_N, BLOCK_C = knob(128, 256, 64), knob(256, 128, 64), knob(64, 32, 16)
    # indices of each loop of m that a box has, those of the last loop first
    BOX_0, BOX_1, BOX_2, BOX_3 = (knob(*powers(256)) for _ in range(DIMENSIONS))
    GROUP, EPILOGUE_SUBTILES, PREFETCH = knob(8), knob(1, 2), knob(False, True)
    WARPS, STAGES, PROGRAMS = knob(WARPS), knob(3, 4, 5, 6), knob(GROUPS)
    COOPERATIVE = knob(True, False)
    language = "gluon"
    reductions: ClassVar = frozenset()

    def refuse(self, problem: Problem) -> str | None:
        return refuse_device(problem) or _refuse_sizes(problem) or _refuse_operands(problem) or _refuse_epilogue(problem)

    def tile_shapes(self, problem: Problem, config: Config) -> dict[str, tuple[int, ...]]:
        return {"m": tuple(config.get(name) for name in reversed(BOX_KNOBS[: len(problem.loops["m"])]))}

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        depth = min(ROW // problem.main_dtype.itemsize, max(LEAST_CHANNELS, _power_of_two(problem.size("c"))))
        widest = max(NARROWEST, _power_of_two(problem.size("n")))
        reads = _tiles_read(problem)
        for rows, columns, stages, subtiles, sharing in TILES:
            threads = 32 * WARPS * (GROUPS if sharing else 1)
            crowded = reads is None or len(reads) > 1  # what is read by pointers, or of several, stays in registers
            if columns > widest or (crowded and rows * columns > FEW_SUMS * threads):
                continue
            for box in shapes_of(problem, rows):
                yield {
                    "BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_C": depth, "STAGES": stages, "EPILOGUE_SUBTILES": subtiles,
                    "PREFETCH": bool(reads), "COOPERATIVE": sharing, **dict(zip(BOX_KNOBS, reversed(box), strict=False)),
                }  # fmt: skip

    def epilogue_subtile(self, problem: Problem, config: Config) -> dict[str, int]:
        """An epilogue gets a tile's columns in parts, and the rows of its warp group."""
        sharing = config.PROGRAMS if config.COOPERATIVE else 1
        return {"m": config.BLOCK_M // sharing, "n": config.BLOCK_N // config.EPILOGUE_SUBTILES}

    def resources(self, problem: Problem, config: Config) -> Resources:
        """All stages, and what the epilogue reads and writes."""
        stage = (config.BLOCK_M + config.BLOCK_N) * config.BLOCK_C * problem.main_dtype.itemsize
        groups = 1 if config.COOPERATIVE else config.PROGRAMS
        area = config.BLOCK_M * config.BLOCK_N * groups
        read, written = epilogue_bytes(problem, bool(config.PREFETCH))
        own = read * area + written * area // config.EPILOGUE_SUBTILES
        threads = 32 * config.WARPS * (config.PROGRAMS if config.COOPERATIVE else 1)
        registers = config.BLOCK_M * config.BLOCK_N // threads + OTHER_REGISTERS
        return Resources(config.STAGES * stage + own + BARRIERS, registers)

    def grid(self, problem: Problem, config: Config) -> Expr:
        tiles = problem.extent("g") * self._tiles(problem, config) * problem.tiles("n", config.BLOCK_N)
        return ix.minimum(tiles, problem.device.compute_units)

    def facts(self, problems: Sequence[Problem], config: Config) -> Facts:
        [problem] = problems
        groups, sharing = config.PROGRAMS, bool(config.COOPERATIVE)
        return Facts(
            tiles=self._tiles(problem, config),
            compute_units=problem.device.compute_units,
            itemsize=problem.main_dtype.itemsize,
            sharing=groups if sharing else 1,
            in_turn=1 if sharing else groups,
            epilogue_tiles_kept=groups * config.EPILOGUE_SUBTILES,
            warps=[config.WARPS] * (groups - 1) + [1],
            registers=[REGISTERS] * (groups - 1) + [LOADING],
        )

    def seconds(self, problem: Problem, config: Config) -> float:
        return conv_estimate.warp_specialized(problem, config, self._tiles(problem, config))

    def uncalibrated(self, problem: Problem) -> str | None:
        return conv_estimate.warp_specialized_unmeasured(problem)

    def _tiles(self, problem: Problem, config: Config) -> int:
        """Tiles along the positions."""
        return math.prod(BoxOrder(problem.loops["m"], self.tile_shapes(problem, config)["m"]).counts)


@memoised
def shapes_of(problem: Problem, rows: int) -> list[tuple[int, ...]]:
    """The shapes of tiles with so many positions, of which the fewest are needed; of equal ones, those that taps move over the
    least of the image."""
    loops, layout = problem.loops["m"], operand_box(problem, "X", "m", "c")
    assert isinstance(layout, BoxLayout), layout
    reach = {side.moves: (side.step, sum(_last(v) * step for v, step in side.taps)) for side in layout.dimensions}
    ranked: list[tuple[int, int, tuple[int, ...]]] = []
    for box in (box for box in itertools.product(powers(rows), repeat=len(loops)) if math.prod(box) == rows):
        lengths = dict(zip(loops, box, strict=True))
        if not isinstance(layout.map(lengths, LEAST_CHANNELS), str):
            halo = math.prod((n - 1) * reach[v][0] + 1 + reach[v][1] for v, n in lengths.items())
            ranked.append((math.prod(BoxOrder(loops, box).counts), halo, box))
    return [box for *_, box in sorted(ranked)[:FEW_SHAPES]]


def epilogue_bytes(problem: Problem, prefetch: bool) -> tuple[int, int]:
    """Bytes of shared memory for each element of the epilogue's tile: of what is prefetched, and of what is written unless it
    takes the memory of a tile that has been read."""
    free: list[torch.dtype] = []
    read = written = 0
    for one in epilogue_tiles_of(problem, "Y"):
        dtype = one.layout.dtype
        if not one.written:
            free += [dtype] if prefetch else []
            read += dtype.itemsize if prefetch else 0
        elif dtype in free:
            free.remove(dtype)
        else:
            written += dtype.itemsize
    return read, written


def _tiles_read(problem: Problem) -> list[object] | None:
    """The tiles that an epilogue reads; None where TMA does not move all of them."""
    boxed = {(one.buffer, one.offset): one for one in epilogue_tiles_of(problem, "Y") if not one.written}
    found = [boxed.get((load.attr[0], load.attr[1][0])) for load in tiles_read(problem)]
    by_pointers = None in found or any(load.args for load in tiles_read(problem)) or gathers_tiles(problem)
    return None if by_pointers else list(dict.fromkeys(found))


def _refuse_sizes(problem: Problem) -> str | None:
    if any(problem.extent(axis).as_int() is None for axis in problem.loops):
        return "its tiles are for sizes that are known"
    if any(problem.extent(axis) == 0 for axis in problem.loops):
        return "it may have no elements, or empty sums"
    if not 1 <= len(problem.loops["m"]) <= DIMENSIONS:
        return "its positions are a single one, or have too many dimensions"
    return None


def _refuse_operands(problem: Problem) -> str | None:
    kinds = {one.dtype for one in problem.inputs.values()}
    if len(kinds) > 1 or not kinds <= {torch.float16, torch.bfloat16} or problem.accumulator is not torch.float32:
        return "it multiplies numbers of 16 bits, all of one type"
    if isinstance(why := operand_box(problem, "X", "m", "c"), str):
        return why
    filters = tma_layout(problem, problem.inputs["F"])
    if not isinstance(filters, TmaLayout):
        return filters
    if not any(shapes_of(problem, rows) for rows, *_ in TILES):
        return "its steps are too large for TMA"
    return None


def _refuse_epilogue(problem: Problem) -> str | None:
    """Why an epilogue is none for tiles of positions, which TMA stores."""
    if any(s.kind in ("scatter", "partial") for s in problem.epilogue):
        return "its epilogue scatters, or reduces tiles"
    boxed = {one.buffer for one in epilogue_tiles_of(problem, "Y") if one.written}
    kept = [out for s in problem.epilogue for out, stored in zip(s.outs, s.stored, strict=True) if stored]
    missing = next((out for out in kept if out not in boxed), None)
    return None if missing is None else f"TMA cannot store {missing}, whose channels are not side by side, or not aligned"


def _power_of_two(length: int) -> int:
    return 1 << (length - 1).bit_length()


def _last(v: ix.Var) -> int:
    """The last index of a loop."""
    extent = v.extent.as_int()
    assert extent is not None
    return extent - 1
