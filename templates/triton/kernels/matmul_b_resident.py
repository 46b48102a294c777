"""Matmuls on GPUs whose right operand fits in shared memory: queries times the keys of a sequence, and whatever has few
columns and a short sum.

A program loads that operand once and walks down its share of the rows, so its reads of the L2 cache, which limit a tile that is
wide and low, are those of the left operand alone. A tile has all columns of the result: epilogues that reduce full rows and
read them again, a softmax say, run on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.templates.base import Resources
from kgen.templates.contract import Config, contraction, knob, operand, result, template
from kgen.templates.problem import Problem, memoised
from kgen.templates.triton.codegen.tma_layout import tiles_read
from kgen.templates.triton.kernels import estimate
from kgen.templates.triton.kernels.matmul import MIN_BLOCK, SHORTEST_STEP, DotTemplate, operand_tiles, refuse_dot, refuse_empty

# Rows of a tile and warps, by the columns of a tile: up to 128 sums a thread, which leaves registers for an epilogue.
ROWS = {
    1024: ((32, 8), (16, 8)),
    512: ((64, 8), (32, 8), (32, 4), (16, 4)),
    256: ((64, 4), (128, 8), (64, 8), (32, 4), (16, 4)),
    128: ((128, 4), (64, 4), (128, 8), (32, 4), (16, 4)),
}
# Rounds of programs: an SM that has one program at a time waits for none with the first.
ROUNDS = (1, 2)


def tiles_per_program(problem: Problem, rows: int) -> list[int]:
    """Tiles of as many rows that a program takes one after the other, for each number of rounds."""
    tiles = -(-problem.size("m") // rows)
    shares = {max(1, rounds * problem.device.compute_units // problem.size("b")) for rounds in ROUNDS}
    return sorted({-(-tiles // min(tiles, share)) for share in shares})


def grid_of_programs(problem: Problem, config: Config) -> Expr:
    return problem.extent("b") * problem.tiles("m", config.BLOCK_M * config.TILES)


def is_one_tile(problem: Problem, config: Config) -> bool:
    """Whether a tile is all of the right operand, whichever problem the configuration was made for."""
    return problem.size("n") <= config.BLOCK_N and problem.size("k") <= config.BLOCK_K


@template(
    implements=contraction("b,m,k", "b,k,n -> b,m,n"), device="cuda", source="matmul_b_resident.py.jinja",
    name="triton_matmul_b_resident",
)  # fmt: skip
class BResidentMatmul(DotTemplate):
    """C[b, m, n] = sum over k of A[b, m, k] B[b, k, n], all of a matrix B in shared memory."""

    A, B, C = operand("b", "m", "k"), operand("b", "k", "n", many=True), result("b", "m", "n", many=True)
    BLOCK_M, BLOCK_N, BLOCK_K = knob(64, 32, 16, 128), knob(64, 128, 256, 512, 1024, 16, 32), knob(64, 16, 32, 128, 256)
    TILES, WARPS, STAGES = knob(1), knob(4, 8, 16), knob(2, 3)
    joins = "program"
    longest: ClassVar = {"n": 1024, "k": 256}

    def refuse(self, problem: Problem) -> str | None:
        return refuse_empty(problem) or refuse_dot(problem)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        shortest = {"n": MIN_BLOCK, "k": max(MIN_BLOCK, SHORTEST_STEP // problem.main_dtype.itemsize)}
        n, k = (max(length, 1 << (problem.size(axis) - 1).bit_length()) for axis, length in shortest.items())
        for m, warps in ROWS[max(n, 128)]:
            for count in tiles_per_program(problem, m):
                yield {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "TILES": count, "WARPS": warps}

    def resources(self, problem: Problem, config: Config) -> Resources:
        """The result is on its way out, and what an epilogue reads on its way in, one after the other."""
        if not is_one_tile(problem, config):
            return Resources(shared=problem.device.shared + 1)
        count, size = len(problem.members), problem.main_dtype.itemsize
        tiles = count * config.BLOCK_N * config.BLOCK_K * size + _left_bytes(problem, config)
        area = config.BLOCK_M * config.BLOCK_N
        return Resources(tiles + _staged_bytes(problem) * area + 1024, count * area // (config.WARPS * 32) + 64)

    def grid(self, problem: Problem, config: Config) -> Expr:
        return grid_of_programs(problem, config)

    def seconds(self, problem: Problem, config: Config) -> float:
        needs = self.resources(problem, config)
        return estimate.b_resident(problem, config, needs.shared, needs.registers)


def _left_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of the left operand's tiles on their way. A computed one is written there again, in front of the matmul:
    what it is computed from has a stage less."""
    one = next(own for own in operand_tiles(problem) if "BLOCK_M" in own.blocks)
    area = config.BLOCK_M * config.BLOCK_K
    if not one.computed:
        return area * config.STAGES * one.itemsize
    return area * ((config.STAGES - 1) * one.bytes_read + one.itemsize)


@memoised
def _staged_bytes(problem: Problem) -> int:
    """Bytes of an element on its way to or from memory: as the accumulator has it, unless all are narrow, and neighbours in
    memory are neighbours in a row."""
    rows, columns = frozenset(problem.loops["m"]), problem.loops["n"]
    read = frozenset(tiles_read(problem))
    for s in problem.epilogue:
        tiles = [(load.attr[1][0], load.attr[2]) for load in vs.loads(s.roots) if load in read]
        tiles += [(s.store[0], problem.graph.buffers[o].dtype) for o, kept in zip(s.outs, s.stored, strict=True) if kept]
        for offset, dtype in tiles if s.kind != "partial" else ():
            atoms = ix.free_atoms(offset)
            if rows & atoms and atoms & set(columns) and (dtype.itemsize > 2 or ix.stride_of(offset, columns[-1]) != 1):
                return 4
    return 2
