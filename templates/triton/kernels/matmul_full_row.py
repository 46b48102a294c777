"""Matmuls on Hopper GPUs whose epilogue reads full rows of up to 1024 columns, by warp groups that take turns, in
Gluon: the scores of a sequence, of which a softmax is stored.

The right operand stays in shared memory, as in `BResidentMatmul`, and one warp issues the TMA loads of everything else. Each of
two warp groups has full rows in its registers: one multiplies while the other one's epilogue runs, in turn, or both would
wait for the same units all the time. With rows of so many columns a tile has 16 of them, for which only the instructions that
multiply registers are made; the right operand is in shared memory in such an order that each thread gets neighbours of a row,
eight at a time. Results leave by TMA where there is memory for it: warps that store wait for the memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.templates.base import Resources
from kgen.templates.contract import Config, contraction, knob, operand, result, template
from kgen.templates.problem import Problem, memoised
from kgen.templates.triton.codegen.tma_layout import epilogue_tma_layout, tiles_read, tma_layout
from kgen.templates.triton.kernels import estimate
from kgen.templates.triton.kernels.matmul import HOPPER, MatrixTemplate, refuse_empty
from kgen.templates.triton.kernels.matmul_b_resident import grid_of_programs, is_one_tile, tiles_per_program
from kgen.templates.triton.kernels.matmul_tma import BARRIERS, epilogue_tiles
from kgen.templates.triton.kernels.matmul_warp_specialized import epilogue_tile_bytes

# Rows of a tile and warps of a group, by the columns of a tile: 64 sums a thread.
ROWS = {1024: ((16, 8),), 512: ((32, 8), (16, 4))}
SHORTEST = min(ROWS)
# Bytes of a number in registers.
KEPT = 4
# Columns of the result that a warp has in a chunk of the right operand: four times eight neighbours.
SHARE = 32
# Elements of the right operand along k in shared memory, or twice as many, and the fewest of its rows at a time.
STEP, MIN_CHUNK = 64, 32


@dataclass(frozen=True, slots=True)
class Facts:
    """What the Jinja file is told of the configuration: `chunk` rows of the right operand come at a time."""

    chunk: int
    warps: list[int]
    registers: list[int]


@template(
    implements=contraction("b,m,k", "b,n,k -> b,m,n"),
    device="cuda",
    source="matmul_full_row.py.jinja",
    name="triton_matmul_full_row",
)
class FullRowMatmul(MatrixTemplate):
    """C[b, m, n] = sum over k of A[b, m, k] B[b, n, k], full rows in the registers of a warp group, all of a matrix B in
    shared memory."""

    A, B, C = (
        operand("b", "m", "k", access="tma"),
        operand("b", "n", "k", access="tma"),
        result("b", "m", "n", access="shared"),
    )
    BLOCK_M, BLOCK_N, BLOCK_K = knob(16, 32), knob(1024, 512), knob(64, 128)
    TILES, PREFETCH = knob(1), knob(True, False)
    WARPS, STAGES = knob(8, 4), knob(3, 2)
    PROGRAMS, TMA_STORE = knob(2), knob(True, False)  # warp groups; whether results leave by TMA
    language, LOADING = "gluon", 24  # registers of a thread that loads
    longest: ClassVar = {"n": 1024, "k": 128}
    reductions: ClassVar = frozenset(ops.REDUCTIONS) - {"argmax", "argmin"}

    def refuse(self, problem: Problem) -> str | None:
        if problem.device.interpreted:
            return "Triton's interpreter does not run Gluon"
        if problem.device.arch // 10 != HOPPER // 10:
            return f"it is made for compute capability 9.0, not {problem.device.arch / 10}"
        if problem.main_dtype not in (torch.bfloat16, torch.float16):
            return f"its instructions multiply 16-bit floats, not {problem.main_dtype}"
        return refuse_empty(problem) or _refuse_operands(problem) or _refuse_epilogue(problem)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        n, k = (1 << (problem.size(axis) - 1).bit_length() for axis in "nk")
        reads, _ = epilogue_tile_bytes(problem, True)
        for m, warps in ROWS[max(n, SHORTEST)]:
            for count in tiles_per_program(problem, m):
                for stages, sent in ((3, True), (2, False)) if sent_bytes(problem) else ((2, False),):
                    yield {
                        "BLOCK_M": m, "BLOCK_N": max(n, SHORTEST), "BLOCK_K": 2 * STEP if k > STEP else STEP, "TILES": count,
                        "PREFETCH": reads > 0, "WARPS": warps, "STAGES": stages, "TMA_STORE": sent,
                    }  # fmt: skip

    def resources(self, problem: Problem, config: Config) -> Resources:
        if not is_one_tile(problem, config):
            return Resources(shared=problem.device.shared + 1)
        area, size = config.BLOCK_M * config.BLOCK_N, problem.main_dtype.itemsize
        tiles = (config.BLOCK_N + config.STAGES * config.BLOCK_M) * config.BLOCK_K * size
        read, _ = epilogue_tile_bytes(problem, bool(config.PREFETCH))
        epilogue_tile = read * config.STAGES + sent_bytes(problem) * config.TMA_STORE
        folds = 8 * config.BLOCK_M * config.WARPS * any(s.kind == "partial" for s in problem.epilogue)
        registers = int(area // (config.WARPS * 32) * (1 + kept_bytes(problem) / KEPT)) + 56
        if registers > self.registers(config):  # of this thread, not of the device
            return Resources(shared=problem.device.shared + 1)
        return Resources(tiles + epilogue_tile * area + folds * config.PROGRAMS + BARRIERS, registers)

    def order(self, problem: Problem, config: Config) -> Hashable:
        return False  # that of all fragments of matmuls

    def grid(self, problem: Problem, config: Config) -> Expr:
        return grid_of_programs(problem, config)

    def facts(self, problems: Sequence[Problem], config: Config) -> Facts:
        others = config.PROGRAMS - 1
        registers = [self.registers(config)] * others + [self.LOADING]
        return Facts(SHARE * config.WARPS, [config.WARPS] * others + [1], registers)

    def registers(self, config: Config) -> int:
        """Of a thread that multiplies: what the warp that loads, and three that do nothing, leave."""
        return (estimate.REGISTERS - 4 * 32 * self.LOADING) // (config.PROGRAMS * config.WARPS * 32) // 8 * 8

    def seconds(self, problem: Problem, config: Config) -> float:
        return estimate.rows(problem, config)


@memoised
def kept_bytes(problem: Problem) -> int:
    """Bytes for each element of a tile that threads keep besides one number, while rows are reduced: what is known before, and
    needed afterwards. Of ``p * (g - (p * g).sum(-1))`` those are p and p g; of a softmax with a bias, its argument alone."""
    folds = [k for k, s in enumerate(problem.epilogue) if s.kind == "partial"]
    return max((_across(problem, k) - KEPT for k in folds), default=0)


def _across(problem: Problem, fold: int) -> int:
    known = frozenset(vs.topological([root for s in problem.epilogue[: fold + 1] for root in s.roots]))
    later = [root for s in problem.epilogue[fold + 1 :] for root in s.roots]
    found: set[vs.Value] = set()
    while later:
        value = later.pop()
        if value not in known:
            later += value.args
        elif _varies(problem, value):
            found.add(value)
    return sum(_size(value) for value in found)


def _varies(problem: Problem, value: vs.Value) -> bool:
    """Whether a value is another one in each column."""
    columns = frozenset(problem.loops["n"])
    return any(columns & ix.free_atoms(load.attr[1][0]) for load in vs.loads([value]))


def _size(value: vs.Value) -> int:
    """Bytes of a value in registers; what is read is kept as it was read."""
    source = value.args[0] if value.op == "cast" and value.args[0].op == "load" else value
    return min(KEPT, source.dtype.itemsize)


def sent_bytes(problem: Problem) -> int:
    """Bytes for each element of a tile of what an epilogue may store by TMA."""
    return sum(size for size, boxed, written in epilogue_tiles(problem) if boxed and written)


def _refuse_operands(problem: Problem) -> str | None:
    for one in problem.inputs.values():
        if isinstance(found := tma_layout(problem, one), str):
            return found
        if found.axes[-1] != "k":
            return f"{one.name} is not contiguous along the sum"
        if one.name == "B" and isinstance(why := found.by_eights(MIN_CHUNK, STEP), str):
            return why
    return None


def _refuse_epilogue(problem: Problem) -> str | None:
    """Why an epilogue is none for tiles whose layout is written out."""
    if any(s.kind == "scatter" for s in problem.epilogue):
        return "its epilogue scatters"
    read = [
        (load, epilogue_tma_layout(problem, "C", load.attr[0], load.attr[1][0], load.attr[2], False))
        for load in tiles_read(problem)
    ]
    # as many columns are no side of a box
    if any(isinstance(found, str) or (found.axes[-1] != "n" and not load.args) for load, found in read):
        return "its epilogue reads a tile that TMA cannot load"
    if any(v.dtype is torch.float64 for s in problem.epilogue for v in vs.topological(s.roots)):
        return "threads have no registers for rows of float64"
    parts = [s for s in problem.epilogue if s.kind == "partial"]
    if any(not problem.part(s).is_row(s.block) or problem.part(s).axis != "n" for s in parts):
        return "its epilogue reduces tiles in a way that layouts are not written out for"
    return None
