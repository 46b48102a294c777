"""Attention on GPUs by pointers: scores of a tile of queries and all keys, a softmax that is corrected as they come, and the
values weighted by it, in one kernel. For compute capability 8.0 and newer; after Dao, FlashAttention-2 (arXiv:2307.08691).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.program import MatrixSizes
from kgen.templates import calibration
from kgen.templates.attention_programs import ATTENTION, MULTIPLIED_ATTENTION
from kgen.templates.base import KernelTemplate, Resources
from kgen.templates.contract import Config, knob, operand, result, template
from kgen.templates.problem import Problem, memoised, memoised_at_sizes
from kgen.templates.triton.kernels import attention_estimate, estimate

# Types that the matrix units multiply, from a compute capability on.
TYPES, LEAST_ARCH = (torch.float16, torch.bfloat16, torch.float32), 80
# The shortest side of a tile that is multiplied, and the longest head.
SHORTEST, LONGEST = 16, 256
HOPPER = 90
# Bytes of keys and values that heads running side by side may have: as much of the L2 cache as is left by everything else.
SHARED_BY_HEADS, MOST_HEADS = 16 << 20, 64

# Tiles of queries and of keys, warps and stages, by the longest head that they are for: of 16-bit floats, of float32 rounded to
# TF32, and of float32 multiplied exactly, by other units.
HALVES = {
    64: ((128, 128, 8, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3), (64, 128, 4, 3), (64, 32, 4, 4)),
    128: ((128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 8, 2), (64, 32, 4, 3)),
    256: ((128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 2), (64, 32, 4, 2), (64, 64, 8, 2), (32, 32, 4, 2)),
}
ROUNDED = {
    64: ((128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 3)),
    128: ((128, 32, 8, 2), (64, 32, 4, 2)),
    256: ((32, 32, 4, 2), (64, 32, 8, 2)),
}
EXACT = {
    64: ((64, 32, 8, 2), (32, 32, 4, 2)),
    128: ((32, 32, 8, 2), (16, 32, 4, 2)),
    256: ((32, 32, 8, 2),),
}
# The same of few queries.
FEW = {
    64: ((16, 128, 4, 3), (16, 64, 4, 4), (32, 64, 4, 3)),
    128: ((16, 64, 4, 3), (16, 128, 4, 2), (32, 64, 4, 2)),
    256: ((16, 64, 4, 2), (16, 32, 4, 3), (32, 32, 4, 2)),
}
# 32-bit registers of a thread besides those of tiles, and more of them where queries are there (ptxas of CUDA 12.8, compute
# capability 8.0 and 9.0), and threads of a warp.
OTHER_REGISTERS, COPIES, WARP = 72, 16, 32
# What kernels take of the estimate: by the keys of a tile, with no more than one tile on its way, and with as many rows and
# elements of a head as `LARGE` (H100, 2026-11-25, bench.gpu_attention: 33 kernels, bfloat16; standard deviation of the
# logarithm .14, but those of a window take 1.7 times as long).
BY_KEYS, ONE_STAGE, LARGE, OF_LARGE = {32: 1.12, 64: 0.97, 128: 1.15}, 1.15, 128, 1.15
# And by the slot's operations for a score, of which several programs hide more than counted, but no more than to this share of
# the time (softcap with ALiBi: .73).
SLOT, LEAST_OF_SLOT = 130, 0.73
# What operations that multiply weights take of the estimate, if random numbers are made by blocks (H200, 2026-11-29,
# decision 0050: five shapes in bfloat16, heads of 64 and 128).
MULTIPLIED = 0.85
# And what tiles of so many rows and keys take longer then, where heads are of 128 (H200, 2026-11-30, six shapes in bfloat16).
OF_SQUARE, SQUARE = 1.15, (64, 64, 128)
# What one tile of scores takes a program from the arrival of its keys to the sums: seconds, seconds for each byte of keys and
# values, those of TF32, and how many times longer it takes with no tile on its way (H200, 2026-12-01,
# bench.attention_calibration: 38 shapes, docs/decisions/0056-attention-of-few-rows-or-keys.md).
CHAIN, OF_BYTES, OF_ROUNDED, UNSTAGED = 0.35e-6, 0.018e-9, 0.032e-9, 1.2
# Padded heads that were measured, and the fewest keys. Of 32 elements the estimate is too high: 1,024 keys of 512 heads took
# .67 of it (H200, 2026-11-29: 234 us, where Inductor's matmuls and softmax take 1,317). Longer heads in TF32 take longer than
# the library's matmuls and a softmax (128 elements: 869 us, 796), if there are not few rows.
MEASURED, KEYS = (16, 32, 64, 128, 256), 16
ROUNDED_HEADS, ROUNDED_OF_FEW = (16, 32, 64), (16, 32, 64, 128)
# Rows of a tile that a warp of the matrix units has, and rows from which a Hopper GPU multiplies out of shared memory.
ROWS_OF_WARP, ASYNCHRONOUS = 16, 64
# Bytes of shared memory through which warps join what they have of a row.
SCRATCH = 3072


@dataclass(frozen=True, slots=True)
class Facts:
    """Where the parts of a head begin, and how long they are: of queries and keys, and of values. Scores are
    multiplied by `factor`, and by `scale` for powers of two."""

    d: tuple[tuple[int, int], ...]
    v: tuple[tuple[int, int], ...]
    factor: float

    @property
    def scale(self) -> float:
        return self.factor * math.log2(math.e)


class _Attention(KernelTemplate):
    Q, K, V, O = operand("b", "m", "d"), operand("b", "n", "d"), operand("b", "n", "v"), result("b", "m", "v")  # noqa: E741
    L = result("b", "m")
    BLOCK_M, BLOCK_N = knob(64, 128, 32, 16), knob(64, 128, 32)
    BLOCK_D, BLOCK_V = knob(64, 16, 32, 128, 256), knob(64, 16, 32, 128, 256)
    GROUP, WARPS, STAGES = knob(1, 2, 4, 8, 16, 32, 64), knob(4, 8), knob(3, 2, 4)
    longest: ClassVar = {"d": LONGEST, "v": LONGEST}

    def refuse(self, problem: Problem) -> str | None:
        return refuse(problem)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        lengths = {f"BLOCK_{axis.upper()}": padded_length(problem.size(axis)) for axis in "dv"}
        for m, n, warps, stages in _tiles(problem):
            yield {
                "BLOCK_M": m, "BLOCK_N": n, **lengths, "GROUP": heads_together(problem), "WARPS": warps, "STAGES": stages,
            }  # fmt: skip

    def resources(self, problem: Problem, config: Config) -> Resources:
        if not suits(problem, config):
            return Resources(shared=problem.device.shared + 1)
        return Resources(shared(problem, config), registers(problem, config))

    def facts(self, problems: Sequence[Problem], config: Config) -> Facts:
        [problem] = problems
        return Facts(parts_of(problem, "d"), parts_of(problem, "v"), problem.middles["scores"].factor)

    def seconds(self, problem: Problem, config: Config) -> float:
        return _seconds(self.resources(problem, config), problem, config, _chain(problem, config))

    def is_measured(self, sizes: MatrixSizes, arch: int) -> bool:
        return attention_estimate.is_measured(sizes, arch, MEASURED, KEYS)

    def uncalibrated(self, problem: Problem) -> str | None:
        head = max(padded_length(problem.size(axis)) for axis in "dv")
        if not calibration.is_rounded_on_hopper(problem):
            return calibration.of_half_on_hopper(problem) or attention_estimate.unmeasured_sizes(
                problem, head, MEASURED, 1, KEYS
            )
        if problem.has_library_call:
            return "the library's call for it rounds no float32 numbers"
        few = problem.size("m") <= attention_estimate.FEW_ROWS
        return attention_estimate.unmeasured_sizes(problem, head, ROUNDED_OF_FEW if few else ROUNDED_HEADS, 1, KEYS)


@template(implements=ATTENTION, device="cuda", source="attention.py.jinja", name="triton_attention")
class Attention(_Attention):
    """O[b, m, v] = sum over n of softmax(scores(Q[b, m, :] K[b, n, :]))[n] V[b, n, v]."""


@template(implements=MULTIPLIED_ATTENTION, device="cuda", source="attention.py.jinja", name="triton_attention_multiplied")
class MultipliedAttention(_Attention):
    """The same with weights that are multiplied by a function of indices and of memory, as dropout does."""

    def seconds(self, problem: Problem, config: Config) -> float:
        longer = MULTIPLIED * (OF_LARGE if config.BLOCK_M >= LARGE else 1.0)
        multiplying = attention_estimate.step_seconds(problem, config, "multiplied")
        square = (config.BLOCK_M, config.BLOCK_N, config.BLOCK_D) == SQUARE
        usual = _seconds(self.resources(problem, config), problem, config, 0.0)  # what multiplies hides what tiles wait for
        return (OF_SQUARE if square else 1.0) * (usual + longer * multiplying)

    def is_measured(self, sizes: MatrixSizes, arch: int) -> bool:
        return attention_estimate.is_measured(sizes, arch)

    def uncalibrated(self, problem: Problem) -> str | None:
        function, inner = problem.middles["multiplied"].function(), frozenset((*problem.loops["m"], *problem.loops["n"]))
        if any(inner & load.variables() for load in vs.loads([function])):
            return "no GPU has measured weights that a tensor multiplies"
        if not all(estimate.made_by_blocks(problem, one) for one in vs.topological([function]) if one.op in ops.RANDOM):
            return "no GPU has measured random numbers that do not share blocks"
        return attention_estimate.unmeasured(problem, max(padded_length(problem.size(axis)) for axis in "dv"))


def refuse(problem: Problem) -> str | None:
    """Why numbers, or a device, are none for templates by pointers."""
    kinds = {one.dtype for one in problem.inputs.values()}
    if not kinds <= set(TYPES):
        return f"it multiplies {', '.join(map(str, TYPES))}"
    if problem.device.arch < LEAST_ARCH:
        return f"it needs compute capability {LEAST_ARCH / 10}"
    return None


def _tiles(problem: Problem) -> Iterator[tuple[int, int, int, int]]:
    head = next(most for most in HALVES if max(problem.size("d"), problem.size("v")) <= most)
    tables = EXACT if problem.exact_float32 else ROUNDED if problem.main_dtype.itemsize > 2 else HALVES
    few = problem.size("m") <= 2 * SHORTEST
    yield from FEW[head] if few else ()
    yield from (row for row in tables[head] if not few or row[0] <= ASYNCHRONOUS)


def _seconds(needs: Resources, problem: Problem, config: Config, chain: float) -> float:
    """The time of a kernel whose programs need so much; one alone takes `chain` seconds for a tile of scores at least."""
    widths = _width(problem, "d"), _width(problem, "v")
    longer = BY_KEYS[config.BLOCK_N] * (ONE_STAGE if config.STAGES == 2 else 1.0)
    longer *= OF_LARGE if min(config.BLOCK_M, config.BLOCK_D) >= LARGE else 1.0
    longer *= max(LEAST_OF_SLOT, 1 - attention_estimate.slot_work(problem, config, filled=True) / SLOT)
    return longer * attention_estimate.seconds(problem, config, needs, widths, filled=True, chain=chain)


def _chain(problem: Problem, config: Config) -> float:
    """Seconds of one tile of scores in a program, whatever the other ones do."""
    size = config.BLOCK_N * (_width(problem, "d") + _width(problem, "v")) * problem.inputs["K"].dtype.itemsize
    return (CHAIN + size * (OF_ROUNDED if problem.tf32 else OF_BYTES)) * (UNSTAGED if config.STAGES == 2 else 1.0)


def padded_length(length: int) -> int:
    """The power of two that a head's elements fit in."""
    return max(SHORTEST, 1 << (length - 1).bit_length())


def suits(problem: Problem, config: Config) -> bool:
    """Whether a head is one tile, whichever problem the configuration was made for."""
    return all(padded_length(problem.size(axis)) == config.get(f"BLOCK_{axis.upper()}") for axis in "dv")


def _is_asynchronous(problem: Problem, config: Config) -> bool:
    """Whether the GPU multiplies out of shared memory while the program goes on."""
    return problem.device.arch // 10 == HOPPER // 10 and config.BLOCK_M >= ASYNCHRONOUS and not problem.exact_float32


def _width(problem: Problem, axis: str) -> int:
    """Elements of a head's parts, those past its end included."""
    return sum(length for _, length in parts_of(problem, axis))


def shared(problem: Problem, config: Config) -> int:
    """Queries, keys and values of each stage, those tiles that a score's function reads, and weights that go from one warp to
    others. Keys and values that are computed are there once more."""
    asynchronous = _is_asynchronous(problem, config)
    stages = config.STAGES if asynchronous else config.STAGES - 1
    total = config.BLOCK_M * _width(problem, "d") * problem.inputs["Q"].dtype.itemsize
    for name, axis in (("K", "d"), ("V", "v")):
        one = problem.inputs[name]
        total += config.BLOCK_N * _width(problem, axis) * one.dtype.itemsize * (stages + (one.load is None))
    area = config.BLOCK_M * config.BLOCK_N
    exchanged = not asynchronous or config.WARPS * ROWS_OF_WARP > config.BLOCK_M
    total += area * problem.inputs["V"].dtype.itemsize if exchanged else 0
    return total + area * _bytes_of_slot(problem) * stages + SCRATCH


def registers(problem: Problem, config: Config) -> int:
    """Of a thread: scores, weights, sums, and, where a GPU multiplies out of registers, queries."""
    area, kind = config.BLOCK_M * config.BLOCK_N, problem.inputs["V"].dtype.itemsize
    read = _bytes_of_slot(problem)
    tiles = 4 * config.BLOCK_M * _width(problem, "v") + area * (4 + kind + (read + 4 if read else 0))
    if problem.exact_float32:
        return OTHER_REGISTERS + tiles // (4 * WARP * config.WARPS)
    if not _is_asynchronous(problem, config):
        tiles += config.BLOCK_M * _width(problem, "d") * problem.inputs["Q"].dtype.itemsize
        return OTHER_REGISTERS + COPIES + tiles // (4 * WARP * config.WARPS)
    return OTHER_REGISTERS + tiles // (4 * WARP * config.WARPS)


@memoised
def _bytes_of_slot(problem: Problem) -> int:
    """Bytes of the tensors that the functions of a score and of a weight read for each score of its own."""
    functions = [middle.function() for middle in problem.middles.values()]
    rows, columns = frozenset(problem.loops["m"]), frozenset(problem.loops["n"])
    loads = {load: ix.free_atoms(load.attr[1][0]) for load in vs.loads(functions)}
    return sum(load.attr[2].itemsize for load, atoms in loads.items() if rows & atoms and columns & atoms)


def parts_of(problem: Problem, axis: str) -> tuple[tuple[int, int], ...]:
    """A head in one part, or in two where that wastes less: 96 is 64 and 32. What reduces a row of results needs all of it."""
    length = problem.size(axis)
    whole = padded_length(length)
    first = whole // 2
    second = padded_length(length - first) if length > first else whole
    if first < SHORTEST or first + second >= whole or (axis == "v" and problem.reduces_tiles):
        return ((0, whole),)
    return (0, first), (first, second)


@memoised_at_sizes
def heads_together(problem: Problem) -> int:
    """How many heads run side by side, a power of two: neighbours may share keys and values."""
    each = (problem.bytes_read("K") + problem.bytes_read("V")) / problem.size("b")
    count = max(1, min(MOST_HEADS, problem.size("b"), int(SHARED_BY_HEADS // max(1, each))))
    return 1 << (count.bit_length() - 1)
