"""Gradients of attention on Hopper GPUs by warps with parts of their own, in Gluon: one warp issues the TMA loads, and each of
two or three warp groups has a tile of rows, whose sums it keeps in registers. After Shah and others, FlashAttention-3
(arXiv:2407.08608).

One template makes the gradients of queries and of keys, one that of values. Both have one Jinja file, which makes the gradients
of keys and of values together where one launch is asked for both: scores are then computed once for them. No sum is made by
atomic additions, and each has one order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr
from kgen.ir.program import MatrixSizes
from kgen.templates.attention_programs import GRADIENT, GRADIENT_OF_VALUES
from kgen.templates.base import KernelTemplate, Resources
from kgen.templates.contract import Config, knob, operand, result, template
from kgen.templates.problem import Problem, memoised
from kgen.templates.slots import PartSlots
from kgen.templates.triton.codegen.gluon_steps import why_whole
from kgen.templates.triton.codegen.runs import runs_of
from kgen.templates.triton.codegen.tma_layout import tma_accesses
from kgen.templates.triton.kernels import attention_estimate
from kgen.templates.triton.kernels.attention import heads_together, padded_length
from kgen.templates.triton.kernels.hopper import refuse_device, refuse_epilogue, refuse_halves
from kgen.templates.triton.kernels.matmul_tma import BARRIERS

# Rows of a warp group's tile: those that its four warps multiply at once.
ROWS, WARPS = 64, 4
# Elements of a head above which sums of a tile's rows leave no registers.
LONGEST_HEAD = 128
# Registers of a thread that multiplies, and of one that loads, by the number of warp groups that multiply.
REGISTERS = {2: (240, 24), 3: (160, 32)}
# Registers of a thread besides those of tiles, and bytes of numbers of a column.
OTHER_REGISTERS, NUMBERS = 32, 8
# Columns of a tile, warp groups that multiply, stages, and whether they are pipelined, by the longest head that they are for.
CONFIGS = {
    64: ((64, 2, 4, True), (128, 2, 3, True), (64, 3, 4, True), (64, 2, 4, False), (128, 2, 3, False), (64, 3, 4, False)),
    128: ((64, 2, 4, True), (64, 2, 3, True), (64, 2, 4, False), (64, 2, 3, False), (128, 2, 2, False), (64, 3, 3, False)),
}
# Share of the peak rate of dots of tiles that are made, by the longest head: of queries or keys, of values, and of keys and
# values together (H200, 2026-11-26).
DOTS = {"gradient": {64: 0.5, 128: 0.72}, "values": {64: 0.45, 128: 0.6}, "both": {64: 0.48, 128: 0.73}}
# How much longer others take than the best ones, by columns, groups, and whether they are pipelined; with three stages; and
# seconds of a launch.
LONGER = {(64, 2, True): 1.0, (128, 2, False): 1.02, (64, 2, False): 1.02, (64, 3, False): 1.05}
OTHERS, THREE_STAGES, LAUNCH = 1.1, 1.01, 4e-6
# Elementary operations of a function that was faster here than by pointers: ALiBi's slopes have 41, a softcap 50 or more.
MOST_WORK = 45
# The pairs of operands of which each contraction is, rows and columns, in the order of the contractions.
PAIRS = (("Q", "K"), ("G", "V"))


@dataclass(frozen=True, slots=True)
class Facts:
    """`rows` of a program, the `gradient` and the one of `values` among its problems, that of `queries` where it is made with
    those of keys and of values. Sums are multiplied by `factor` at last.
    A `guarded` mask says nothing of a batch where some numbers are not 0. Of it, and of one that numbers in memory bound,
    tiles are left out `by_batch`. Programs begin with the last rows if those have most tiles. Then warps and registers of those
    beside the first group."""

    rows: int
    gradient: int | None
    values: int | None
    factor: float
    guarded: bool
    by_batch: bool
    last_first: bool
    warps: list[int]
    registers: list[int]
    queries: int | None = None

    def of_gradient(self, parts: Sequence[PartSlots]) -> PartSlots | None:
        return None if self.gradient is None else parts[self.gradient]

    def of_values(self, parts: Sequence[PartSlots]) -> PartSlots | None:
        return None if self.values is None else parts[self.values]

    def of_queries(self, parts: Sequence[PartSlots]) -> PartSlots | None:
        return None if self.queries is None else parts[self.queries]

    def placed(self, last_edge: int) -> list[str]:
        """The variables that say where a program is, if they are found before warps part: what a guard says is looked up in
        memory, and so are bounds of masks, and the number of a program that others wait for."""
        found = ["b", "first", *(f"edge{k}" for k in range(last_edge + 1))]
        if self.queries is None:
            return found if self.by_batch else []
        return [*found, "edge_holds"] if self.guarded else found


class _WarpSpecialized(KernelTemplate):
    """What both templates have in common."""

    language, joins = "gluon", "parts"
    grouped: ClassVar = 2
    reductions: ClassVar = frozenset()
    longest: ClassVar = {"d": LONGEST_HEAD, "v": LONGEST_HEAD}

    def refuse(self, problem: Problem) -> str | None:
        return (
            refuse_device(problem)
            or refuse_halves(problem, "columns")
            or self._refuse_function(problem)
            or refuse_epilogue(problem)
        )

    def _refuse_function(self, problem: Problem) -> str | None:
        """Why the function between contractions cannot be had in two parts, or its result be multiplied by none of them."""
        return None

    def refuse_grouped(self, problems: Sequence[Problem]) -> str | None:
        pair = _pair(problems)
        if pair is None:
            return "it makes a gradient of keys or queries together with one of values, and no others"
        return _why_apart(*pair)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        boxed = any(one.written for one in tma_accesses(problem, "O"))
        lengths = {f"BLOCK_{axis.upper()}": padded_length(problem.size(axis)) for axis in self.longest}
        for columns, programs, stages, pipelined in CONFIGS[_longest(problem)]:
            yield {
                "BLOCK_M": ROWS, "BLOCK_N": columns, **lengths, "GROUP": heads_together(problem), "WARPS": WARPS,
                "PROGRAMS": programs, "STAGES": stages, "PIPELINED": pipelined, "TMA_STORE": boxed,
            }  # fmt: skip

    def resources(self, problem: Problem, config: Config) -> Resources:
        if any(padded_length(problem.size(axis)) != config.get(f"BLOCK_{axis.upper()}") for axis in self.longest):
            return Resources(shared=problem.device.shared + 1)
        return _resources([problem], config)

    def seconds(self, problem: Problem, config: Config) -> float:
        return _seconds([problem], config)

    def grid(self, problem: Problem, config: Config) -> Expr:
        return problem.extent("b") * ix.ceildiv(problem.extent("m"), config.PROGRAMS * config.BLOCK_M)

    def grid_of_parts(self, problems: Sequence[Problem], config: Config) -> Expr:
        return self.grid(problems[0], config)

    def resources_of_parts(self, problems: Sequence[Problem], config: Config) -> Resources:
        return _resources(problems, config)

    def seconds_of_parts(self, problems: Sequence[Problem], config: Config) -> float:
        return _seconds(problems, config)

    def facts(self, problems: Sequence[Problem], config: Config) -> Facts:
        numbers = {_is_of_values(one): k for k, one in enumerate(problems)}
        gradient, values = (numbers.get(of_values) for of_values in (False, True))
        multiplying, loading = REGISTERS[config.PROGRAMS]
        others = config.PROGRAMS - 1
        factor = 1.0 if gradient is None else _last_factor(problems[gradient])
        return Facts(
            config.PROGRAMS * config.BLOCK_M, gradient, values, factor,
            values is not None and _is_guarded(problems[values]),
            _by_batch(problems[0 if values is None else values]), _last_first(problems[0], config),
            [config.WARPS] * others + [1], [multiplying] * others + [loading],
        )  # fmt: skip

    def is_measured(self, sizes: MatrixSizes, arch: int) -> bool:
        return attention_estimate.is_measured(sizes, arch)

    def uncalibrated(self, problem: Problem) -> str | None:
        longest = max(padded_length(problem.size(axis)) for axis in "dv")
        return attention_estimate.unmeasured(problem, longest) or _unmeasured_function(problem)


@template(
    implements=GRADIENT, device="cuda", source="attention_backward_warp_specialized.py.jinja",
    name="triton_attention_backward_warp_specialized",
)  # fmt: skip
class WarpSpecializedGradient(_WarpSpecialized):
    """O[b, m, e] = sum over n of dscores(Q[b, m, :] K[b, n, :], G[b, m, :] V[b, n, :]) R[b, n, e], where R is K or V."""

    Q, K = operand("b", "m", "d", access="tma"), operand("b", "n", "d", access="tma")
    G, V = operand("b", "m", "v", access="tma"), operand("b", "n", "v", access="tma")
    R, O = operand("b", "n", "e", access="tma"), result("b", "m", "e", access="tma")  # noqa: E741
    BLOCK_M, BLOCK_N = knob(64), knob(64, 128)
    BLOCK_D, BLOCK_V, BLOCK_E = knob(64, 16, 32, 128), knob(64, 16, 32, 128), knob(64, 16, 32, 128)
    GROUP, WARPS, STAGES = knob(1, 2, 4, 8, 16, 32, 64), knob(4), knob(2, 3, 4)
    PROGRAMS = knob(2, 3)  # warp groups that multiply
    PIPELINED, TMA_STORE = knob(True, False), knob(True, False)
    longest: ClassVar = {"d": LONGEST_HEAD, "v": LONGEST_HEAD, "e": LONGEST_HEAD}
    partner = "triton_attention_backward_values_warp_specialized"

    def _refuse_function(self, problem: Problem) -> str | None:
        number = _weighted(problem)
        if number is None:
            return "its last operand is none of those that it multiplies by columns"
        return why_whole(problem, "dscores", number)


@template(
    implements=GRADIENT_OF_VALUES, device="cuda", source="attention_backward_warp_specialized.py.jinja",
    name="triton_attention_backward_values_warp_specialized",
)  # fmt: skip
class WarpSpecializedGradientOfValues(_WarpSpecialized):
    """O[b, m, v] = sum over n of weights(Q[b, m, :] K[b, n, :]) V[b, n, v]."""

    Q, K = operand("b", "m", "d", access="tma"), operand("b", "n", "d", access="tma")
    V, O = operand("b", "n", "v", access="tma"), result("b", "m", "v", access="tma")  # noqa: E741
    BLOCK_M, BLOCK_N = knob(64), knob(64, 128)
    BLOCK_D, BLOCK_V = knob(64, 16, 32, 128), knob(64, 16, 32, 128)
    GROUP, WARPS, STAGES = knob(1, 2, 4, 8, 16, 32, 64), knob(4), knob(2, 3, 4)
    PROGRAMS = knob(2, 3)  # warp groups that multiply
    PIPELINED, TMA_STORE = knob(True, False), knob(True, False)

    def _refuse_function(self, problem: Problem) -> str | None:
        return why_whole(problem, "weights", 0)


def _is_of_values(problem: Problem) -> bool:
    return "R" not in problem.inputs


@memoised
def _weighted(problem: Problem) -> int | None:
    """The number of the contraction of which weights are made: sums are of the columns that it multiplies."""
    found = (k for k, (_, read) in reversed(list(enumerate(PAIRS))) if problem.inputs["R"].is_array_of(problem.inputs[read]))
    return next(found, None)


def _pair(problems: Sequence[Problem]) -> tuple[Problem, Problem] | None:
    """A gradient of keys or queries, and one of values."""
    gradients, values = ([one for one in problems if _is_of_values(one) == wanted] for wanted in (False, True))
    return (gradients[0], values[0]) if len(gradients) == len(values) == 1 else None


def _why_apart(gradient: Problem, values: Problem) -> str | None:
    """Why two gradients do not read the same, tile by tile; None if they do."""
    number = _weighted(gradient)
    assert number is not None
    wanted = zip("QKV", (*PAIRS[number], PAIRS[1 - number][1]), strict=True)
    if not all(values.inputs[own].is_array_of(gradient.inputs[other]) for own, other in wanted):
        return "they multiply other operands"
    one, other = (_made(problem) for problem in (gradient, values))
    return None if one == other else "their masks leave out other tiles"


def _made(problem: Problem) -> tuple[object, ...]:
    """The runs of tiles, as a program of some rows sees them."""
    config = problem.template.config(BLOCK_M=ROWS, BLOCK_N=ROWS)
    runs = runs_of(problem, _step(problem), config, 0, _by_batch(problem))
    loaded = () if runs.known is None else tuple(runs.known.loaded)
    return runs.all, tuple(runs.edges(ix.size("row").expr())), loaded


def _unmeasured_function(problem: Problem) -> str | None:
    """Why nobody has measured that kernels by pointers are slower with a function of scores."""
    value = problem.middles[_step(problem)].function(masked=False)
    rows, columns = (frozenset(problem.loops[axis]) for axis in "mn")
    offsets = [ix.free_atoms(load.attr[1][0]) for load in vs.loads([value])]
    if vs.total_cost([value]) > MOST_WORK or any(rows & found and columns & found for found in offsets):
        return "no GPU has found it faster on functions of much work, or that read a number for each score"
    return None


def _is_guarded(problem: Problem) -> bool:
    """Whether a mask says nothing of a batch where some numbers are not 0."""
    return bool(problem.middles[_step(problem)].guards)


@memoised
def _by_batch(problem: Problem) -> bool:
    """Whether which tiles are left out depends on numbers in memory."""
    config = problem.template.config(BLOCK_M=ROWS, BLOCK_N=ROWS)
    known = runs_of(problem, _step(problem), config, 0, True).known
    return _is_guarded(problem) or (known is not None and bool(known.loaded))


def _step(problem: Problem) -> str:
    """The step whose result is multiplied last."""
    return "weights" if _is_of_values(problem) else "dscores"


def _last_factor(problem: Problem) -> float:
    """What the sums of scores' gradients are multiplied by in place of these. In float16 it keeps them in range."""
    return 1.0 if problem.inputs["R"].dtype is torch.float16 else problem.middles["dscores"].factor


def _last_first(problem: Problem, config: Config) -> bool:
    """Whether the last rows have more tiles than the first ones."""
    rows = config.PROGRAMS * config.BLOCK_M
    runs, last = runs_of(problem, _step(problem), config, rows, _by_batch(problem)), max(0, problem.size("m") - rows)
    loaded = () if runs.known is None else runs.known.loaded.values()

    def count(first: int) -> int:
        """Of the tiles that a program may make, whatever is in memory."""
        begin, *_, end = runs.edges(ix.constant(first))
        least, most = (dict[Atom, Expr](dict.fromkeys(loaded, bound)) for bound in (ix.ZERO, runs.length))
        return problem.sizes.of(ix.substitute(end, most)) - problem.sizes.of(ix.substitute(begin, least))

    return count(last) > count(0)


def _longest(problem: Problem) -> int:
    """Elements of a head's longer side, as configurations are chosen by."""
    return next(most for most in CONFIGS if max(problem.size("d"), problem.size("v")) <= most)


def _resources(problems: Sequence[Problem], config: Config) -> Resources:
    """Operands of rows once, those of columns for each stage; sums, elements of both contractions, and what is multiplied."""
    size, rows = problems[0].main_dtype.itemsize, config.PROGRAMS * config.BLOCK_M
    heads = config.BLOCK_D + config.BLOCK_V
    alone = all(map(_is_of_values, problems))
    shared = (rows * (config.BLOCK_D if alone else heads) + config.STAGES * config.BLOCK_N * heads) * size
    shared += config.STAGES * config.BLOCK_N * NUMBERS
    sums = sum(config.BLOCK_V if _is_of_values(one) else config.BLOCK_E for one in problems)
    tiles = config.BLOCK_N * (1.5 if alone else 2.5 if config.PIPELINED else 2.0)
    registers = OTHER_REGISTERS + int(config.BLOCK_M * (sums + tiles)) // (32 * config.WARPS)
    multiplying, _ = REGISTERS[config.PROGRAMS]
    return Resources(shared + 2 * BARRIERS, registers if registers <= multiplying else problems[0].device.registers + 1)


def of_program(config: Config) -> Config:
    """The configuration with the rows of all warp groups of a program."""
    return Config(tuple((name, config.PROGRAMS * ROWS if name == "BLOCK_M" else value) for name, value in config.values))


def _seconds(problems: Sequence[Problem], config: Config) -> float:
    """Dots of tiles that are made, or memory. Together with a gradient, that of values has one contraction of its own."""
    gradients, first = [one for one in problems if not _is_of_values(one)], problems[0]
    kind = "both" if len(problems) > 1 else "gradient" if gradients else "values"
    flops = sum(one.flops / (2 if gradients and _is_of_values(one) else 1) for one in problems)
    rows = of_program(config)
    longer = LONGER.get((config.BLOCK_N, config.PROGRAMS, bool(config.PIPELINED)), OTHERS) * (
        THREE_STAGES if config.STAGES == 3 else 1
    )
    dots = DOTS[kind][_longest(first)] / longer
    moved = sum(first.bytes_read(name) for name in first.inputs) + sum(one.epilogue_bytes for one in problems)
    tiles = math.ceil(first.size("m") / rows.BLOCK_M)
    made = tiles * rows.BLOCK_M / first.size("m")  # those past the end are made, too
    share = made * attention_estimate.made_share(first, rows, _step(first))
    idle = attention_estimate.idle_factor(first, first.size("b") * tiles)
    return LAUNCH + max(idle * share * flops / first.rate / dots, moved / first.device.bandwidth)
