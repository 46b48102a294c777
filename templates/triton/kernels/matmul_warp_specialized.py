"""Matmuls on Hopper GPUs by warps with parts of their own, in Gluon: one issues the TMA loads of operands, the others
multiply. No warp that multiplies ever waits for an address, and the next tile's operands arrive during an epilogue.

The design is the producer and the cooperating consumers of CUTLASS 3 (NVIDIA, `sm90_gemm_tma_warpspecialized_cooperative`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.templates.base import Resources
from kgen.templates.contract import Config, contraction, knob, operand, result, template
from kgen.templates.problem import Problem, memoised
from kgen.templates.triton.codegen.tma_layout import TmaLayout, epilogue_tma_layout, gathers_tiles, tiles_read, tma_layout
from kgen.templates.triton.kernels import estimate
from kgen.templates.triton.kernels.matmul import DOT_TYPES, HOPPER, DotTemplate, operand_bytes, refuse_sums, sums_needs
from kgen.templates.triton.kernels.matmul_tma import BARRIERS, ROW, epilogue_subtile, epilogue_tiles, grid_of_tiles

# Sums of a thread beside which it has registers for tiles that it reads itself.
FEW_SUMS = 64
# Bytes of shared memory through which sums of operands get to the threads that store them.
TURNED = 2048
# The same, of each warp, on the way from a matmul to its rows.
IN_ROWS = 4224
# What is left of a kernel's time when no warp that multiplies works out addresses or waits for copies to be asked for.
GAIN = 0.95
# Of that where rows are stored by pointers, which one warp group does while the other one multiplies.
STORING_IN_TURN = 0.85
# And where an operand is summed, too: the tiles that take longer hold up warp groups that take turns.
SUMMING = 1.14


def refuse(problem: Problem) -> str | None:
    if problem.device.interpreted:
        return "Triton's interpreter does not run Gluon"
    if problem.device.arch // 10 != HOPPER // 10:
        return f"its multiplications are those of compute capability 9.0, not {problem.device.arch / 10}"
    if problem.operand_reductions and (found := refuse_sums(problem)):
        return found
    if problem.main_dtype not in DOT_TYPES or problem.exact_float32:
        return f"{problem.main_dtype} has no multiplication out of shared memory"
    if ix.lower_bound(problem.extent("k")) < 1 or any(problem.extent(axis) == 0 for axis in problem.loops):
        return "it may have no elements, or empty sums"
    for member in problem.members:
        for one in member.values():
            if isinstance(why := tma_layout(problem, one), str):
                return why
    if problem.main_dtype.itemsize != 2 and not all(
        problem.stride(name, "k", number) == 1 for number, member in enumerate(problem.members) for name in member
    ):
        return "only numbers of 16 bits are multiplied in any order"
    return _refuse_epilogue(problem)


def _refuse_epilogue(problem: Problem) -> str | None:
    """Why an epilogue is none for tiles whose layout is written out."""
    if any(s.kind == "scatter" for s in problem.epilogue):
        return "its epilogue scatters"
    parts = [s for s in problem.epilogue if s.kind == "partial"]
    if parts and stores_by_pointers(problem):
        return "a result of rows that are also reduced is no tile that TMA can write"
    if not all(problem.part(s).whole for s in parts):
        return "its epilogue reduces tiles in a way that layouts are not written out for"
    return None


def stores_by_pointers(problem: Problem) -> bool:
    """Whether a result is no tile that TMA can write, as where rows begin at odd addresses. Warps then store 32
    neighbours of a row at a time; as they hold a matmul, two of each of eight rows, matmuls and stores would take 2.5 times
    as long."""
    return any(written and not boxed for _, boxed, written in epilogue_tiles(problem))


def refuse_grouped(problems: Sequence[Problem]) -> str | None:
    """Why one kernel does not make several matmuls with a left operand in common: their tiles come and go through the same
    shared memory."""
    if any(len(problem.members) > 1 for problem in problems):
        return "one of them is a family"
    if len({(_tile_layout(tma_layout(problem, problem.inputs["B"])), problem.extent("k")) for problem in problems}) > 1:
        return "their right operands have different layouts"
    if any(not written for problem in problems for _, _, written in epilogue_tiles(problem)):
        return "an epilogue reads tiles"
    if any(stores_by_pointers(problem) for problem in problems):
        return "a result is no tile that TMA can write"
    if any(s.kind == "partial" for problem in problems for s in problem.epilogue):
        return "an epilogue reduces tiles"
    stored = [[_tile_layout(one) for one in _written(problem)] for problem in problems]
    if any(len(kinds) != 1 or kinds != stored[0] for kinds in stored):
        return "their results have different layouts, or there are several"
    return None


def _tile_layout(found: TmaLayout | str) -> tuple[object, ...]:
    """What shared memory for a tile has to know."""
    return (found.dtype, found.axes) if isinstance(found, TmaLayout) else (found,)


def _written(problem: Problem) -> list[TmaLayout | str]:
    """The layouts of what the epilogue writes."""
    return [
        epilogue_tma_layout(problem, "C", out, s.store[0], problem.graph.buffers[out].dtype, written=True)
        for s in problem.epilogue for out, kept in zip(s.outs, s.stored, strict=True) if kept
    ]  # fmt: skip


@memoised
def epilogue_tile_bytes(problem: Problem, prefetch: bool) -> tuple[int, int]:
    """Bytes of shared memory for each element of the epilogue's tile: of what is prefetched, and of what is written and
    takes no read tile's place. Only the first result that is written surely finds such a tile read."""
    tiles = frozenset(tiles_read(problem))
    reads: dict[tuple[str, Expr], TmaLayout] = {}
    before: list[TmaLayout] | None = None  # what has been read when the first result is written
    written: list[TmaLayout] = []
    for s in problem.epilogue:
        for load in (load for load in vs.loads(s.roots) if prefetch and load in tiles and not load.args):
            name, (offset,), dtype = load.attr
            tile = epilogue_tma_layout(problem, "C", name, offset, dtype, written=False)
            if isinstance(tile, TmaLayout):
                reads[name, offset] = tile
        for out, kept in zip(s.outs, s.stored, strict=True) if s.kind != "partial" else ():
            place = (
                epilogue_tma_layout(problem, "C", out, s.store[0], problem.graph.buffers[out].dtype, written=True)
                if kept
                else None
            )
            if isinstance(place, TmaLayout):
                before = list(reads.values()) if before is None else before
                written.append(place)
    same_layout = any((b.dtype, b.axes) == (written[0].dtype, written[0].axes) for b in before or ())
    sizes = [box.dtype.itemsize for box in written]
    return sum(box.dtype.itemsize for box in reads.values()), sum(sizes[1:] if same_layout else sizes)


# Columns of the widest multiplication. Triton writes none of 256 columns for integers.
WIDEST, WIDEST_OF_INTEGERS = 256, 128


@dataclass(frozen=True, slots=True)
class Facts:
    """What the Jinja file is told of problems and configuration. One multiplication has `widest` columns at most. `sharing`
    warp groups multiply each tile, `in_turn` have one each. Of each tile that an epilogue reads, memory has
    `epilogue_tiles_kept`. Of a step's multiplications, so many are under way while those of the step before are waited for."""

    several: bool
    compute_units: int
    itemsize: int
    widest: int
    sharing: int
    in_turn: int
    epilogue_tiles_kept: int
    multiplied: int
    multiplied_and_summed: int
    by_pointers: bool
    warps: list[int]
    registers: list[int]


def _one_group(values: Mapping[str, Any]) -> dict[str, Any]:
    """Knobs of one group of as many warps as several that share each tile."""
    return {"WARPS": values["WARPS"] * values["PROGRAMS"], "PROGRAMS": 1, "COOPERATIVE": False}


def _as_one_group(config: Config) -> Config:
    """A configuration whose groups share each tile as the resources and the estimate see it."""
    values = dict(config.values)
    return Config(tuple({**values, **_one_group(values)}.items())) if config.COOPERATIVE else config


@template(
    implements=contraction("b,m,k", "b,k,n -> b,m,n"), device="cuda", source="matmul_warp_specialized.py.jinja",
    name="triton_matmul_warp_specialized",
)  # fmt: skip
class WarpSpecializedMatmul(DotTemplate):
    """C = A B by one program for each SM, one of whose warps loads for the others."""

    A, B, C = (
        operand("b", "m", "k", access="tma", sums=True),
        operand("b", "k", "n", access="tma", many=True, sums=True),
        result("b", "m", "n", access="tma", many=True),
    )
    BLOCK_M, BLOCK_N, BLOCK_K = knob(128, 256), knob(256, 128), knob(64, 32, 128)
    GROUP, EPILOGUE_SUBTILES, PREFETCH = knob(8, 16), knob(1, 2), knob(False, True)
    WARPS, STAGES = knob(8), knob(3, 4, 5, 6)
    PROGRAMS, FLATTEN = knob(1, 2), knob(True)  # warp groups that multiply, for the estimate as good as programs
    COOPERATIVE = knob(False, True)  # whether groups have shares of each tile, or a tile each
    REGISTERS, LOADING = 232, 40  # registers of a thread that multiplies, and of one that loads
    language, joins = "gluon", "parts"

    reductions: ClassVar = frozenset(ops.REDUCTIONS) - {"welford", "argmax", "argmin"}

    def refuse(self, problem: Problem) -> str | None:
        return refuse(problem)

    def refuse_grouped(self, problems: Sequence[Problem]) -> str | None:
        return refuse_grouped(problems)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        names = ("BLOCK_M", "BLOCK_N", "WARPS", "STAGES", "EPILOGUE_SUBTILES", "PROGRAMS", "COOPERATIVE")
        reads = [boxed for _, boxed, written in epilogue_tiles(problem) if not written]
        for row in (
            (128, 256, 4, 3, 1, 2, True), (128, 256, 4, 4, 2, 2, True), (128, 256, 4, 3, 2, 2, True),
            (256, 128, 4, 3, 1, 2, True), (128, 128, 4, 6, 1, 2, True), (128, 128, 4, 5, 1, 2, True),
            (128, 128, 4, 4, 1, 2, True), (128, 128, 4, 5, 1, 2, False), (128, 128, 4, 4, 1, 2, False),
            (128, 128, 4, 5, 2, 2, False), (128, 128, 4, 3, 1, 2, False), (64, 256, 4, 4, 1, 2, False),
            (128, 128, 4, 4, 2, 2, False),
        ):  # fmt: skip
            for prefetch in (True, False) if any(reads) else (False,):
                values = dict(zip(names, row, strict=True))
                one = {**values, **_one_group(values)} if values["COOPERATIVE"] else values
                if problem.operand_reductions:  # sums of operands are stored for whole tiles
                    values = one
                # tiles that come by pointers stay in registers, of which large sums leave few; so do several that are fetched
                crowded = not all(reads) or (reads and not prefetch) or len(reads) > 1 or gathers_tiles(problem)
                if not crowded or one["BLOCK_M"] * one["BLOCK_N"] <= FEW_SUMS * 32 * one["WARPS"]:
                    yield {**values, "BLOCK_K": ROW // problem.main_dtype.itemsize, "PREFETCH": prefetch}

    def epilogue_subtile(self, problem: Problem, config: Config) -> dict[str, int]:
        """An epilogue gets a tile's columns in parts, and the rows of its warp group."""
        shares = {"m": config.BLOCK_M // config.PROGRAMS} if config.COOPERATIVE else {}
        return {**epilogue_subtile(problem, config), **shares}

    def resources(self, problem: Problem, config: Config) -> Resources:
        """All stages, and what the epilogue reads and writes: but for a result in a read tile's place, nothing is where
        something else has been."""
        config = _as_one_group(config)
        arriving, _ = operand_bytes(problem, config, config.STAGES)
        area = config.BLOCK_M * config.BLOCK_N
        read, written = epilogue_tile_bytes(problem, bool(config.PREFETCH))
        folds = config.BLOCK_N * 4 * config.WARPS * any(s.kind == "partial" for s in problem.epilogue)
        sums = len(problem.members) * area // (config.WARPS * 32)
        summing = sums_needs(problem, config)
        turned = TURNED if problem.operand_reductions else 0
        turned += IN_ROWS * config.WARPS if stores_by_pointers(problem) else 0
        own = read * area + written * area // config.EPILOGUE_SUBTILES + summing.shared + turned + folds
        return Resources(arriving + own * config.PROGRAMS + BARRIERS, sums + summing.registers + 64)

    def seconds(self, problem: Problem, config: Config) -> float:
        """Warp groups are like programs that share the memory and the registers, and what is on its way to them."""
        config = _as_one_group(config)
        shared = self.resources(problem, config).shared // config.PROGRAMS
        own = 1 + (config.STAGES - 1) // config.PROGRAMS
        per_group = Config(tuple((name, own if name == "STAGES" else value) for name, value in config.values))
        gain = GAIN * SUMMING if problem.operand_reductions else GAIN
        gain *= STORING_IN_TURN if config.PROGRAMS > 1 and stores_by_pointers(problem) else 1
        return estimate.seconds(problem, per_group, shared, self.REGISTERS // config.PROGRAMS) * gain

    def facts(self, problems: Sequence[Problem], config: Config) -> Facts:
        problem, groups = problems[0], config.PROGRAMS
        matmuls = len(problem.members)
        return Facts(
            several=len(problems) > 1,
            compute_units=problem.device.compute_units,
            itemsize=problem.main_dtype.itemsize,
            widest=WIDEST if problem.main_dtype.is_floating_point else WIDEST_OF_INTEGERS,
            sharing=groups if config.COOPERATIVE else 1,
            in_turn=1 if config.COOPERATIVE else groups,
            epilogue_tiles_kept=groups * config.EPILOGUE_SUBTILES,
            multiplied=matmuls,
            multiplied_and_summed=matmuls + len(problem.operand_reductions),
            by_pointers=stores_by_pointers(problem),
            warps=[config.WARPS] * (groups - 1) + [1],
            registers=[self.REGISTERS] * (groups - 1) + [self.LOADING],
        )

    def grid(self, problem: Problem, config: Config) -> Expr:
        return self.grid_of_parts([problem], config)

    def grid_of_parts(self, problems: Sequence[Problem], config: Config) -> Expr:
        tiles = sum((grid_of_tiles(problem, config) for problem in problems), ix.ZERO)
        return ix.minimum(tiles, problems[0].device.compute_units)
