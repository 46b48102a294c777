"""Matmuls of few rows on GPUs, whose weights are computed from smaller numbers: most of the time goes to reading
these, the rest to making floats of them.

The warps of a program share its columns of the result, and each takes a slice of the sum for itself (sliced-K in NVIDIA's
"Efficient GEMM in CUDA"). So many warps make weights while few programs read the same rows, which the L2 cache does not give
for nothing: 16 rows of 16 bits are as many bytes as 32 columns of 8. The tile is multiplied turned over, for matrix units take
16 rows of a left operand and 8 columns of a right one, and what is computed is best in as few registers as can be.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Any, ClassVar

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.templates.base import Resources
from kgen.templates.contract import Config, contraction, knob, operand, result, template
from kgen.templates.problem import Problem, memoised
from kgen.templates.triton.kernels import estimate
from kgen.templates.triton.kernels.matmul import MIN_BLOCK, MatrixTemplate, operand_bytes, refuse_dot, refuse_empty

# Rows of a tile; more would take as many multiplications as a tile of 64 in the other direction.
MOST_ROWS = 32
# Columns, bytes of a column along k in a step, slices, and stages.
TABLE = (
    (32, 256, 4, 6), (32, 512, 4, 4), (64, 512, 4, 4), (64, 256, 4, 6), (32, 512, 8, 4), (64, 512, 8, 4), (16, 512, 4, 3),
    (16, 256, 4, 4), (32, 256, 2, 5),
)  # fmt: skip
# Measured on an H200 against the estimate, which knows no slices: where weights are computed in the registers where they are
# multiplied; where operands are read as they are; where computed ones get there through shared memory, as several of one byte
# do, and as rows do (H200, 2026-11-27: 1.3 to 2.2); and where an SM has one program, which waits for its warps at every step.
COMPUTED, READ, ELSEWHERE, ALONE = 0.97, 1.08, 1.8, 1.25
# And of operands that no asynchronous copy brings (H100, 2026-11-27, bench.untuned: 18.6 us where 8.1 had been expected, 5.8
# where 7.6).
NARROW = 1.3
# Of all places for a second program, those that have to be taken.
FILLED = 0.9


@template(
    implements=contraction("b,m,k", "b,n,k -> b,n,m"), device="cuda", source="matmul_sliced_k.py.jinja",
    name="triton_matmul_sliced_k",
)  # fmt: skip
class SlicedKMatmul(MatrixTemplate):
    """C[b, m, n] = sum over k of A[b, m, k] B[b, k, n] for few rows of A, each warp a slice of the sum."""

    A, B, C = operand("b", "m", "k"), operand("b", "n", "k", many=True), result("b", "n", "m", many=True)
    BLOCK_M, BLOCK_N, BLOCK_K = knob(16, 32), knob(32, 64, 16, 128), knob(256, 512, 128, 64)
    SLICED_K, WARPS, STAGES = knob(4, 8, 2), knob(4, 8, 2), knob(4, 3, 5, 6)
    longest: ClassVar = {"m": MOST_ROWS}
    joins = "program"

    def refuse(self, problem: Problem) -> str | None:
        if problem.exact_float32:
            return "no matrix unit multiplies float32 numbers exactly"
        return refuse_empty(problem) or refuse_dot(problem)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        rows = MIN_BLOCK if problem.size("m") <= MIN_BLOCK else MOST_ROWS
        sizes = [load.attr[2].itemsize for load in vs.loads([problem.members[0]["B"].value])]
        size = min([problem.main_dtype.itemsize, *sizes])
        for n, k, shares, stages in TABLE:
            yield {
                "BLOCK_M": rows, "BLOCK_N": n, "BLOCK_K": k // size, "SLICED_K": shares, "WARPS": shares, "STAGES": stages,
            }  # fmt: skip

    def resources(self, problem: Problem, config: Config) -> Resources:
        """The slices' results meet at the end. What is computed is in the registers where it is multiplied, if it was read so;
        else it goes there through shared memory. Neighbours along n are turned in registers."""
        count, area = len(problem.members), config.BLOCK_M * config.BLOCK_N
        staged, written = operand_bytes(problem, config, config.STAGES - 1)
        made = 0 if _in_place(problem) else config.BLOCK_N * config.BLOCK_K // 2
        halves = 2 if count == 1 else 1  # several matmuls' tiles are turned number by number: they spilled 4 KB otherwise
        turned = count * config.BLOCK_N * config.BLOCK_K // halves if problem.contiguous("B") == "n" else 0
        ragged = any((problem.extent(a).as_int() or 1) % block for a, block in (("n", config.BLOCK_N), ("k", config.BLOCK_K)))
        shared = max(staged + (written if ragged or made else 0), 4 * area * config.SLICED_K) + 1024
        return Resources(shared, (count * area * config.SLICED_K + made + turned) // (config.WARPS * 32) + 96)

    def order(self, problem: Problem, config: Config) -> Hashable:
        return config.BLOCK_K, config.SLICED_K, config.WARPS

    def seconds(self, problem: Problem, config: Config) -> float:
        needs = self.resources(problem, config)
        return estimate.seconds(problem, config, needs.shared, needs.registers) * _factor(problem, config)


def _factor(problem: Problem, config: Config) -> float:
    kind = READ if not _computes(problem) else COMPUTED if _in_place(problem) else ELSEWHERE
    programs = math.prod(problem.size(axis) for axis in ("b", "n")) / config.BLOCK_N
    kind *= NARROW if estimate.passes_registers(problem) else 1.0
    return kind * (ALONE if programs < 2 * problem.device.compute_units * FILLED else 1.0)


@memoised
def _computes(problem: Problem) -> bool:
    return any(one.load is None for member in problem.members for one in member.values())


@memoised
def _in_place(problem: Problem) -> bool:
    """Whether what is computed, if anything is, is made of numbers that lie one behind the other along the sum: then a warp
    reads those that it multiplies."""
    for member in problem.members:
        for one in (one for one in member.values() if one.load is None):
            if one.name == "A" or len(one.loops["k"]) != 1:
                return False
            [k], columns = one.loops["k"], frozenset(one.loops["n"])
            offsets = [load.attr[1][0] for load in vs.loads([one.value])]
            tiles = [offset for offset in offsets if k in (atoms := ix.free_atoms(offset)) and columns & atoms]
            looked_up = any(isinstance(atom, ix.Indirect) for offset in offsets for atom in ix.free_atoms(offset))
            if not tiles or looked_up or any(ix.stride_of(offset, k) != 1 for offset in tiles):
                return False
    return True
