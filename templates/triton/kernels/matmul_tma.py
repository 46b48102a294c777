"""Matmuls on Hopper GPUs: operands by TMA, in programs that stay on their SMs or by one for
each tile.

The configurations are those that won on an H200. A tile of 128 by 256 asks least of the L2 cache, and its epilogue runs in
parts, for the accumulator takes most of the registers. Two programs of 128 by 128 on an SM hide each other's epilogues
instead, and fill it better where there are few tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from kgen.ir import index as ix
from kgen.ir.index import Expr
from kgen.templates.base import Resources
from kgen.templates.contract import Config, contraction, knob, operand, result, template
from kgen.templates.problem import Problem, memoised, memoised_at_sizes
from kgen.templates.triton.codegen.tma_layout import TmaLayout, epilogue_tma_layout, tiles_read, tma_layout
from kgen.templates.triton.kernels import estimate
from kgen.templates.triton.kernels.matmul import (
    HOPPER,
    LARGEST_EXACT,
    DotTemplate,
    block_of_row,
    operand_bytes,
    refuse_dot,
    sums_needs,
    useful_stages,
)

PATTERN = contraction("b,m,k", "b,k,n -> b,m,n")
# Bytes of a tile along k: what TMA swizzles as one row of shared memory.
ROW = 128
# Tiles that hold full rows, by their columns, as in the table of `TilesMatmul`.
WIDE = {
    256: ((64, 256, ROW, 8, 4, 1, True), (64, 256, ROW, 8, 3, 1, True)),
    512: (
        (64, 512, ROW, 8, 3, 1, True), (64, 512, ROW, 8, 2, 1, True), (64, 512, ROW // 2, 8, 4, 1, True),
        (32, 512, ROW, 8, 3, 1, True),
    ),
    1024: ((32, 1024, ROW // 2, 8, 3, 1, True), (32, 1024, ROW // 2, 16, 3, 1, True)),
}  # fmt: skip
# How much longer exact matmuls of float32 numbers take: these pass through registers, which do not last for such tiles.
SPILLED = 10.0
# Tiles that an epilogue may read and write at once beside so many accumulators of a thread, where the loop over tiles is
# flattened: with 5, ptxas of Triton 3.6 spills 424 bytes and more on sm_90, with 4 at most 224.
MOST_TILES, MANY_SUMS = 4, 128
# Bytes of shared memory that synchronise the stages, and what is lost to alignment.
BARRIERS = 1024


def refuse(problem: Problem) -> str | None:
    """Why TMA is of no use for a matmul."""
    if problem.device.arch < HOPPER:
        return f"TMA needs compute capability 9.0, not {problem.device.arch / 10}"
    operands = [one for member in problem.members for one in member.values()]
    reasons = [found for one in operands if isinstance(found := tma_layout(problem, one), str)]
    if len(reasons) == len(operands):
        return "; ".join(reasons)
    return refuse_dot(problem)


@memoised_at_sizes
def resources(problem: Problem, config: Config) -> Resources:
    """Stages of both tiles, and what the epilogue reads and writes on its way between registers and memory. Where the loop over
    tiles is flattened the next tile's stages are filling by then; where it is not, both have one place, except that what the
    TMA still writes stays. Where an operand is written to shared memory again, and the accumulator leaves as it is, the
    stages keep their place until it has left."""
    count = len(problem.members)
    summing = sums_needs(problem, config)
    arriving, copied = operand_bytes(problem, config, config.STAGES)
    tiles = arriving + copied + summing.shared
    area = config.BLOCK_M * config.BLOCK_N // config.EPILOGUE_SUBTILES
    read, written, others = (area * size for size in staged_bytes(problem, bool(config.TMA_EPILOGUE)))
    # an accumulator as it is, in 16 bits, goes through a part of it at a time
    if config.EPILOGUE_SUBTILES == 1 and others == 2 * area:
        others = others * config.WARPS // 16
    columns = config.BLOCK_N // config.EPILOGUE_SUBTILES
    staged = read + written + max(others, bytes_of_folds(problem) * columns * config.WARPS)
    flattened = config.get("FLATTEN")
    if flattened is None:
        kept = copied and config.EPILOGUE_SUBTILES == 1 and _stored_as_it_is(problem)
        shared = max(tiles, staged, arriving + staged if kept else 0)
    else:
        shared = tiles + staged if flattened else max(tiles + written, staged)
    sums = count * config.BLOCK_M * config.BLOCK_N // (config.WARPS * 32)
    whole = flattened and config.EPILOGUE_SUBTILES == 1 and sums >= MANY_SUMS
    spilled = problem.device.registers if whole and len(epilogue_tiles(problem)) > MOST_TILES else 0
    return Resources(shared + BARRIERS, sums + summing.registers + 32 + spilled)


@memoised
def _stored_as_it_is(problem: Problem) -> bool:
    """Whether a result is the accumulator itself."""
    stored = [s for s in problem.epilogue if any(s.stored) and s.kind != "partial"]
    types = {problem.graph.buffers[s.outs[0]].dtype for s in stored if all(root.op in ("load", "cast") for root in s.roots)}
    return problem.accumulator in types


def seconds(problem: Problem, config: Config) -> float:
    needs = resources(problem, config)
    spills = SPILLED if problem.exact_float32 else 1.0
    return estimate.seconds(problem, config, needs.shared, needs.registers) * spills


def staged_bytes(problem: Problem, engine: bool) -> tuple[int, int, int]:
    """Bytes of shared memory for each element of the epilogue's tile: of what TMA reads, and of what it writes,
    each in a place of its own; and of all that goes by pointers, one after the other through the same."""
    tiles = epilogue_tiles(problem)
    moved = [(size, written) for size, boxed, written in tiles if engine and boxed]
    others = [size for size, boxed, _ in tiles if not (engine and boxed)]
    read, stored = (sum(size for size, written in moved if written is way) for way in (False, True))
    return read, stored, max(others, default=0)


@memoised
def bytes_of_folds(problem: Problem) -> int:
    """Shared memory of each column and warp where warps join what they have of a tile's columns: of the reductions, one after
    the other, the largest. A Welford reduction has a count beside its results."""
    folds = [s for s in problem.epilogue if s.kind == "partial" and problem.part(s).axis == "m"]
    return max((4 * (len(s.outs) + (s.op == "welford")) for s in folds), default=0)


@memoised
def epilogue_tiles(problem: Problem) -> tuple[tuple[int, bool, bool], ...]:
    """Of each tile that the epilogue reads or writes, the bytes of an element, whether TMA can move it, and whether
    it is written."""
    found: dict[tuple[str, Expr], bool] = {(load.attr[0], load.attr[1][0]): False for load in tiles_read(problem)}
    for s in problem.epilogue:
        if s.kind != "partial":
            found |= {(o, s.store[0]): True for o, kept in zip(s.outs, s.stored, strict=True) if kept}
    types = {name: problem.graph.buffers[name].dtype for name, _ in found}
    return tuple(
        (
            types[name].itemsize,
            isinstance(epilogue_tma_layout(problem, "C", name, offset, types[name], written), TmaLayout),
            written,
        )
        for (name, offset), written in found.items()
    )


def configurations(problem: Problem, rows: tuple[tuple[int, ...], ...], names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Configurations from a table whose third column is the tile along k in bytes. Where the engine has nothing to move in an
    epilogue, those that differ in that are one, and so are those with more stages than a tile has steps. Exact matmuls have
    registers for small tiles only."""
    largest = LARGEST_EXACT if problem.exact_float32 else math.inf
    boxed = any(can for _, can, _ in epilogue_tiles(problem))
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        values = dict(zip(names, row, strict=True))
        values["BLOCK_K"] //= problem.main_dtype.itemsize
        values["TMA_EPILOGUE"] = values["TMA_EPILOGUE"] and boxed
        if not values.get("FLATTEN"):
            values["STAGES"] = useful_stages(problem, values["BLOCK_K"], values["STAGES"])
        if values["BLOCK_M"] * values["BLOCK_N"] <= largest or values["BLOCK_N"] == block_of_row(problem):
            found.setdefault(tuple(values.values()), values)
    yield from found.values()


def epilogue_subtile(problem: Problem, config: Config) -> dict[str, int]:
    """An epilogue gets a tile's columns in parts."""
    return {"n": config.BLOCK_N // config.EPILOGUE_SUBTILES}


def grid_of_tiles(problem: Problem, config: Config) -> Expr:
    return problem.extent("b") * problem.tiles("m", config.BLOCK_M) * problem.tiles("n", config.BLOCK_N)


class TmaTemplate(DotTemplate):
    """With operands, and what the epilogue reads and writes, by TMA."""

    def refuse(self, problem: Problem) -> str | None:
        return refuse(problem)

    def resources(self, problem: Problem, config: Config) -> Resources:
        return resources(problem, config)

    def seconds(self, problem: Problem, config: Config) -> float:
        return seconds(problem, config)

    def shared_seconds(self, problem: Problem, config: Config) -> float:
        return estimate.filling(problem, config)

    def epilogue_subtile(self, problem: Problem, config: Config) -> dict[str, int]:
        return epilogue_subtile(problem, config)


@template(implements=PATTERN, device="cuda", source="matmul_persistent.py.jinja", name="triton_matmul_persistent")
class PersistentMatmul(TmaTemplate):
    """C = A B by one program for each SM, which takes tile after tile; the next tile's operands arrive during an
    epilogue."""

    A, B, C = (
        operand("b", "m", "k", access="tma"),
        operand("b", "k", "n", access="tma", many=True),
        result("b", "m", "n", access="tma", many=True),
    )
    BLOCK_M, BLOCK_N, BLOCK_K = knob(128, 256, 64), knob(256, 128, 64), knob(64, 32, 128)
    GROUP, EPILOGUE_SUBTILES, FLATTEN = knob(8, 16, 4), knob(2, 4, 1), knob(True, False)
    TMA_EPILOGUE, PROGRAMS, WARPS, STAGES = knob(True, False), knob(1, 2), knob(8, 4), knob(4, 3, 5, 6)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        names = (
            "BLOCK_M",
            "BLOCK_N",
            "BLOCK_K",
            "WARPS",
            "STAGES",
            "EPILOGUE_SUBTILES",
            "TMA_EPILOGUE",
            "FLATTEN",
            "GROUP",
            "PROGRAMS",
        )
        yield from configurations(problem, (
            (128, 256, ROW, 8, 4, 2, True, True, 8, 1), (128, 256, ROW, 8, 4, 4, True, True, 8, 1),
            (128, 256, ROW, 8, 3, 1, True, True, 8, 1), (128, 256, ROW, 8, 3, 2, True, True, 8, 1),
            (128, 256, ROW, 8, 4, 2, False, True, 8, 1), (128, 256, ROW, 8, 3, 2, False, True, 8, 1),
            (128, 256, ROW, 8, 4, 4, False, True, 8, 1), (256, 128, ROW, 8, 4, 2, True, True, 8, 1),
            (128, 256, ROW, 8, 4, 2, True, False, 8, 1), (128, 256, ROW, 8, 3, 4, True, False, 8, 1),
            (128, 128, ROW, 8, 5, 2, True, True, 8, 1), (128, 128, ROW, 4, 5, 1, True, True, 8, 1),
            (128, 128, ROW, 4, 3, 2, True, True, 8, 2), (128, 128, ROW, 4, 3, 4, True, True, 8, 2),
            (128, 128, ROW, 4, 3, 1, False, True, 8, 2), (128, 128, ROW, 4, 3, 4, False, True, 8, 2),
            (128, 256, ROW, 8, 4, 4, True, True, 16, 1),
            (128, 128, ROW, 8, 3, 1, True, False, 8, 1), (128, 128, ROW, 8, 4, 1, True, False, 8, 1),
            (128, 128, ROW, 8, 3, 1, False, False, 8, 1),
            *(((128, 256, ROW // 2, 8, 6, 2, True, True, 8, 1),) if problem.main_dtype.itemsize == 1 else ()),
        ), names)  # fmt: skip

    def grid(self, problem: Problem, config: Config) -> Expr:
        return ix.minimum(grid_of_tiles(problem, config), problem.device.compute_units * config.PROGRAMS)


@template(implements=PATTERN, device="cuda", source="matmul_tiles.py.jinja", name="triton_matmul_tiles")
class TilesMatmul(TmaTemplate):
    """C = A B by one program for each tile: for few tiles, and for epilogues that another program's matmuls hide."""

    A, B, C = (
        operand("b", "m", "k", access="tma", sums=True),
        operand("b", "k", "n", access="tma", many=True, sums=True),
        result("b", "m", "n", access="tma", many=True),
    )
    BLOCK_M, BLOCK_N, BLOCK_K = knob(128, 64, 256, 32), knob(128, 256, 64, 512, 1024), knob(64, 32, 128)
    GROUP, EPILOGUE_SUBTILES, TMA_EPILOGUE = knob(8), knob(1, 2), knob(True, False)
    WARPS, STAGES = knob(4, 8, 16), knob(3, 4, 5, 6, 2)
    joins = "program"

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "WARPS", "STAGES", "EPILOGUE_SUBTILES", "TMA_EPILOGUE")
        yield from configurations(problem, (
            (128, 128, ROW, 4, 3, 1, True), (128, 128, ROW, 4, 3, 2, True), (128, 128, ROW, 4, 6, 1, True),
            (128, 128, ROW, 8, 3, 1, True), (128, 128, ROW, 8, 6, 1, True), (128, 128, ROW, 8, 3, 1, False),
            (64, 128, ROW, 4, 4, 1, True), (64, 256, ROW, 4, 4, 1, True), (128, 128, ROW, 4, 3, 1, False),
            (128, 64, ROW, 4, 4, 1, True), (64, 64, ROW, 4, 4, 1, True), (64, 32, ROW, 4, 4, 1, True),
            (128, 256, ROW, 8, 4, 2, True), (128, 256, ROW, 8, 3, 1, True), (64, 128, 2 * ROW, 4, 3, 1, True),
            (64, 64, 2 * ROW, 4, 4, 1, True), (64, 64, 2 * ROW, 4, 6, 1, True), (64, 128, 2 * ROW, 4, 4, 1, True),
            (128, 64, 2 * ROW, 4, 4, 1, True),
            *WIDE.get(block_of_row(problem), ()),
        ), names)  # fmt: skip

    def grid(self, problem: Problem, config: Config) -> Expr:
        return grid_of_tiles(problem, config)
