"""Matmuls on GPUs by pointers: of any layout and any type that the matrix units have, and of one row."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.templates import calibration
from kgen.templates.base import KernelTemplate, Resources
from kgen.templates.contract import Config, contraction, knob, operand, result, template
from kgen.templates.problem import Input, Problem, memoised
from kgen.templates.triton.codegen.packed import adjacent_count
from kgen.templates.triton.codegen.tma_layout import by_tma
from kgen.templates.triton.kernels import estimate

# Operand types that the matrix units multiply.
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DOT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int8, *FLOAT8)
FLOAT8_ARCH = 89
MIN_BLOCK = 16
# Bytes along k of what the matrix units multiply in one step.
SHORTEST_STEP = 32
MIN_STAGES = 2
# Columns of ones that tiles are multiplied by to add up their rows, as in `templates/triton/device/matmul.py`.
ONES = 16
# Tiles, steps along k, warps and stages where a tile holds full rows, by its columns: about 128 sums a thread at most, which
# leave registers for an epilogue.
WIDE = {
    256: ((64, 256, 64, 8, 4), (32, 256, 64, 4, 4), (16, 256, 64, 4, 4)),
    512: ((64, 512, 64, 8, 3), (64, 512, 32, 8, 4), (32, 512, 64, 8, 3), (16, 512, 64, 4, 3)),
    1024: ((32, 1024, 32, 8, 2), (32, 1024, 32, 16, 2), (32, 1024, 32, 16, 3), (16, 1024, 32, 8, 3)),
}
# Points of the largest tile for which exact matmuls of float32 numbers have registers enough.
LARGEST_EXACT = 128 * 128
# Elements along k of the shortest tiles of few rows.
SHORTEST_ROW = 128
# Rows of a tile from which a Hopper GPU multiplies out of shared memory, and does not wait for it.
ASYNCHRONOUS, HOPPER = 64, 90


def order_of_dots(problem: Problem, config: Config) -> Hashable:
    """Which instruction multiplies: each adds up its terms in steps along k, one after the other, whatever the tile. Of
    8-bit floats, partial sums are rounded on the way, tile by tile."""
    if problem.main_dtype in FLOAT8:
        return config.values
    return problem.device.arch >= HOPPER and config.BLOCK_M >= ASYNCHRONOUS and config.WARPS % 4 == 0


# How much longer than its estimate it takes to ask for every tile of many rows by pointers (H100, 2026-11-24, bench.regret:
# geomean of 131 configurations).
BY_POINTERS = 1.05
# And how much longer tiles of fewer rows take that compute an operand, of matrices that have more: they multiply out of
# registers, and operands pass through shared memory on their way there (H100, 2026-11-26, bench.regret: 26 times of gradients
# between batch norms, 1.1 to 2.9).
LOW_COMPUTED = 1.75


def useful_stages(problem: Problem, block: int, stages: int) -> int:
    """As many of `stages` as there are steps of `block` along k, and one more. Others only keep shared memory from further
    programs: a gradient of ResNet-50 with two steps took 197 us with four stages, 147 with three (H200, 2026-11-26)."""
    length = problem.extent("k").as_int()
    return stages if length is None else min(stages, max(MIN_STAGES, -(-length // block) + 1))


def block_of_row(problem: Problem) -> int:
    """Columns of a tile that holds full rows, where the epilogue needs that; else 0."""
    row = problem.whole.get("n", 0)
    return 1 << (row - 1).bit_length() if row else 0


def operand_bytes(problem: Problem, config: Config, stages: int) -> tuple[int, int]:
    """Shared memory of the operands' tiles: of those on their way, and of those that are written there again before they are
    multiplied, for which a stage less is on its way, but for those that are read as they are in a flattened loop. The latter
    are the computed ones, and those of float32 that are not contiguous along k, for the matrix units turn tiles of 16 bits
    only, that become TF32 in registers, or are multiplied exactly, by other units."""
    staged = copied = 0
    for one in operand_tiles(problem):
        area = math.prod(config.get(block) for block in one.blocks)
        if one.direct:
            staged += area * one.itemsize * stages
            continue
        waiting = config.STAGES - (one.computed or not config.get("FLATTEN"))
        staged += area * waiting * one.bytes_read // one.packed
        copied += area * one.itemsize
    return staged, copied


@dataclass(frozen=True, slots=True)
class OperandTile:
    """What decides how much shared memory an operand's tile needs: the knobs that are its sides, the bytes of an element, and
    those that are read for `packed` of them, whether it is computed, and whether it is multiplied as it is read."""

    blocks: tuple[str, ...]
    itemsize: int
    bytes_read: int
    packed: int
    computed: bool
    direct: bool


@memoised
def operand_tiles(problem: Problem) -> list[OperandTile]:
    """Of each operand, those that contractions have in common once."""
    found: list[OperandTile] = []
    for number, member in enumerate(problem.members):
        for one in member.values():
            if number and not problem.template.operands[one.name].many:
                continue
            axes = [axis for axis in one.axes if problem.template.block(axis)]
            blocks = tuple(problem.template.block(axis) or "" for axis in axes)
            rounded = problem.tf32 and by_tma(problem, one)
            fast = one.dtype is not torch.float32 or (rounded and problem.stride(one.name, "k", number) == 1)
            computed, read = one.load is None, sum(load.attr[2].itemsize for load in _tiles(one, axes))
            packed = max(adjacent_count(one.value, one.loops[axis]) for axis in axes) if computed else 1
            found.append(OperandTile(blocks, one.dtype.itemsize, read, max(1, packed), computed, fast and not computed))
    return found


def _tiles(one: Input, tile_axes: list[str]) -> list[vs.Value]:
    """What an operand reads a tile of: itself where it is no computation, whatever it repeats along, else what varies along
    both sides."""
    if one.load is not None:
        return [one.value]
    loops = [frozenset(one.loops[axis]) for axis in tile_axes]
    atoms = {load: ix.free_atoms(load.attr[1][0]) for load in vs.loads([one.value])}
    return [load for load, found in atoms.items() if all(own & found for own in loops)]


def sums_needs(problem: Problem, config: Config) -> Resources:
    """What sums of operands need besides: each a tile of ones, and as many columns of sums."""
    ones = config.BLOCK_K * ONES * problem.main_dtype.itemsize * len(problem.operand_reductions)
    results = problem.template.implements.results[0]
    own = [next(a for a in problem.operand_axes(one.operand) if a in results) for one in problem.operand_reductions]
    sums = sum(config.get(problem.template.block(axis) or "") * ONES for axis in own)
    return Resources(ones, sums // (config.WARPS * 32))


def refuse_sums(problem: Problem) -> str | None:
    """Why the matrix units cannot add up an operand: what they multiply by ones has to stay what it is."""
    if problem.tf32:
        return "TF32 would round what is added up"
    return "partial sums of 8-bit floats are rounded on the way" if problem.main_dtype in FLOAT8 else None


def refuse_empty(problem: Problem) -> str | None:
    """Why a template leaves a matmul without elements, or of empty sums, to others."""
    return "it has no elements" if any(problem.extent(axis) == 0 for axis in problem.loops) else None


def refuse_dot(problem: Problem) -> str | None:
    """Why the matrix units cannot compute a matmul, or an operand reduction."""
    if problem.main_dtype not in DOT_TYPES:
        return f"no matrix unit multiplies {problem.main_dtype}"
    if problem.main_dtype in FLOAT8 and problem.device.arch < FLOAT8_ARCH:
        return f"8-bit floats need compute capability {FLOAT8_ARCH / 10}"
    return refuse_sums(problem) if problem.operand_reductions else None


class MatrixTemplate(KernelTemplate):
    """Of matrices: what estimates were compared with measurements on is one thing for all of them."""

    def uncalibrated(self, problem: Problem) -> str | None:
        return calibration.of_matrices(problem)


class DotTemplate(MatrixTemplate):
    """On the matrix units, in the order in which their instructions add."""

    def refuse(self, problem: Problem) -> str | None:
        return refuse_dot(problem)

    def order(self, problem: Problem, config: Config) -> Hashable:
        return order_of_dots(problem, config)


@template(implements=contraction("b,m,k", "b,k,n -> b,m,n"), device="cuda", source="matmul.py.jinja", name="triton_matmul")
class Matmul(DotTemplate):
    """C[b, m, n] = sum over k of A[b, m, k] B[b, k, n], any layout, by pointers and masks."""

    A, B, C = (
        operand("b", "m", "k", sums=True),
        operand("b", "k", "n", many=True, sums=True),
        result("b", "m", "n", many=True),
    )
    BLOCK_M, BLOCK_N, BLOCK_K = knob(128, 64, 32, 16, 256), knob(128, 64, 32, 16, 256, 512, 1024), knob(64, 32, 128)
    GROUP, WARPS, STAGES = knob(8), knob(4, 8, 16), knob(3, 4, 2)
    joins = "program"

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        wide = 2 if problem.main_dtype.itemsize > 2 else 1
        largest = LARGEST_EXACT if problem.exact_float32 else math.inf  # operands pass through registers, which are few then
        if problem.size("m") <= MIN_BLOCK:
            yield from _few_rows(problem, wide)
        for m, n, k, warps, stages in (
            *WIDE.get(block_of_row(problem), ()),
            (128, 256, 64, 8, 3), (128, 128, 64, 8, 3), (128, 128, 64, 4, 3), (128, 64, 64, 4, 4), (64, 128, 64, 4, 4),
            (64, 64, 64, 4, 4), (32, 64, 64, 4, 4), (64, 32, 64, 4, 4), (16, 64, 128, 4, 4), (16, 128, 64, 4, 4),
            (32, 32, 64, 2, 4),
        ):  # fmt: skip
            if m * n <= largest or n == block_of_row(problem):
                stages = useful_stages(problem, k // wide, stages)
                yield {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k // wide, "WARPS": warps, "STAGES": stages}

    def resources(self, problem: Problem, config: Config) -> Resources:
        count = len(problem.members)
        area = config.BLOCK_M * config.BLOCK_N
        # The asynchronous MMAs of tiles from 64 rows on hold every stage; the result's way out begins when all are free.
        stages = config.STAGES if config.BLOCK_M >= ASYNCHRONOUS else max(1, config.STAGES - 1)
        sums = sums_needs(problem, config)
        shared = max(sum(operand_bytes(problem, config, stages)) + sums.shared, 4 * area) + 1024
        return Resources(shared, count * area // (config.WARPS * 32) + sums.registers + 64)

    def seconds(self, problem: Problem, config: Config) -> float:
        needs = self.resources(problem, config)
        return _longer(problem, config) * estimate.seconds(problem, config, needs.shared, needs.registers)


def _longer(problem: Problem, config: Config) -> float:
    """What tiles by pointers take of their estimate."""
    if config.BLOCK_M >= ASYNCHRONOUS:
        return BY_POINTERS
    return LOW_COMPUTED if problem.size("m") >= ASYNCHRONOUS and _computes_operands(problem) else 1.0


@memoised
def _computes_operands(problem: Problem) -> bool:
    return any(one.load is None for member in problem.members for one in member.values())


@memoised
def _along(problem: Problem) -> str | None:
    """The axis along which neighbours of B are neighbours in memory, or along which most of what it is made of has them."""
    one = problem.inputs["B"]
    if one.load is not None:
        return problem.contiguous("B")
    for load in sorted(_tiles(one, ["k", "n"]), key=lambda load: -load.attr[2].itemsize):
        steps = {axis: _step(load, one.loops[axis]) for axis in ("k", "n")}
        found = next((axis for axis, step in steps.items() if step == 1), None)
        if found is not None:
            return found
    return None


def _step(load: vs.Value, loops: Sequence[ix.Var]) -> ix.Expr | None:
    """How far apart neighbours along the last loop are in memory that reads several elements."""
    index = load.attr[1][0]
    return next((ix.stride_of(index, v) for v in reversed(loops) if v in ix.free_atoms(index)), None)


def _few_rows(problem: Problem, wide: int) -> Iterator[dict[str, Any]]:
    """The matrix is read once, and nothing else counts: enough programs, long runs of memory, and many bytes on their way."""
    rows: tuple[tuple[int, ...], ...]
    rows = ((16, 32, 256, 4, 4), (16, 32, 128, 4, 4), (16, 64, 128, 4, 4), (16, 16, 256, 4, 4), (16, 32, 512, 4, 3))
    if _along(problem) == "n":
        rows = ((16, 64, 128, 4, 5), (16, 128, 64, 4, 5), (16, 64, 64, 4, 6), (16, 32, 128, 4, 4))
    longest = 2 * problem.size("k")
    for m, n, k, warps, stages in rows:
        if k // wide < longest or k == SHORTEST_ROW:  # of others more than half is beyond the sum
            yield {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k // wide, "WARPS": warps, "STAGES": stages}


@template(implements=contraction("b,m,k", "b,k,n -> b,m,n"), device="cuda", source="matvec.py.jinja", name="triton_matvec")
class Matvec(MatrixTemplate):
    """One row of A times B: as fast as B is read."""

    A, B, C = operand("b", "m", "k"), operand("b", "k", "n", many=True), result("b", "m", "n", many=True)
    BLOCK_M, BLOCK_N, BLOCK_K = knob(1), knob(1, 4, 32, 64), knob(2048, 1024, 256, 128)
    longest: ClassVar = {"m": 1}
    WARPS, STAGES = knob(4, 8), knob(1)
    joins = "program"

    def refuse(self, problem: Problem) -> str | None:
        return refuse_empty(problem)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        rows = ((1, 2048, 4), (4, 1024, 4), (8, 256, 4), (1, 512, 4))
        if _along(problem) == "n":
            rows = ((64, 128, 8), (32, 256, 8), (64, 64, 4), (32, 128, 4))
        for n, k, warps in rows:
            yield {"BLOCK_N": n, "BLOCK_K": k, "WARPS": warps}

    def resources(self, problem: Problem, config: Config) -> Resources:
        sums = len(problem.members) * config.BLOCK_N * config.BLOCK_K // (config.WARPS * 32)
        return Resources(4 * config.BLOCK_N * config.WARPS * 32, 3 * sums + 32)

    def seconds(self, problem: Problem, config: Config) -> float:
        return estimate.streamed(problem, config)
