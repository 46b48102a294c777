"""All gradients of attention in one launch on Hopper GPUs: each program has a tile of keys, whose gradients and those of values
it keeps in registers, and adds its part of the queries' gradient to memory by TMA. Scores are computed for all together, which
makes five contractions where two kernels make seven. After Shah and others, FlashAttention-3 (arXiv:2407.08608).

No sum depends on which program is faster: a tile of queries has its parts in the order of the keys. A program waits until the
one before it has added its own. It takes its number when it begins, so whoever it waits for runs already. The last one of a
tile reads the sum, and stores what the epilogue makes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Apply, Atom, Expr, FloorDiv
from kgen.ir.values import Value
from kgen.templates.attention_programs import GRADIENT, GRADIENT_OF_VALUES
from kgen.templates.base import Resources
from kgen.templates.contract import Config, template, workspace
from kgen.templates.problem import Problem, memoised
from kgen.templates.triton.codegen.runs import ROW, runs_of
from kgen.templates.triton.kernels import attention_backward_warp_specialized as apart

# Elements of a head above which sums of three gradients leave no registers, rows of a tile, and warp groups with one.
LONGEST_HEAD, ROWS, PROGRAMS = 64, 64, 2
# Stages, and whether they are pipelined.
CONFIGS = ((4, True), (4, False), (3, True))
# Registers of a thread that multiplies scores, of one that multiplies their gradients by keys, and of one that moves tiles.
REGISTERS = (208, 72, 24)
# Tiles of scores' gradients, and of sums, that are under way.
UNDER_WAY = 2
# Heads that run side by side at most, and bytes of the L2 cache that queries, their gradients and sums may have.
MOST_HEADS, SHARED_BY_HEADS = 64, 32 << 20
# Seconds, as a share of those of two launches that compute scores for themselves (H200, 2026-11-28: .78 to .83 with 384 to 4096
# queries, whatever the mask, and .98 with 197), and how much longer others take than pipelined ones and four stages.
SHARE, NOT_PIPELINED, THREE_STAGES = 0.82, 1.04, 1.01


class _Together(apart._WarpSpecialized):
    """What both templates have in common. Alone each makes another template's kernel."""

    grouped: ClassVar = 3
    longest: ClassVar = {"d": LONGEST_HEAD, "v": LONGEST_HEAD}

    def refuse_grouped(self, problems: Sequence[Problem]) -> str | None:
        found = _three(problems)
        if found is None:
            return "it makes the gradients of queries, of keys and of values together, and no others"
        keys, queries, values = found
        return apart._why_apart(keys, values) or _why_not_turned(keys, queries) or _why_out_of_order(values)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        first = next(super().configs(problem))
        own = {**first, "BLOCK_N": ROWS, "PROGRAMS": PROGRAMS, "GROUP": _heads(problem)}
        for stages, pipelined in CONFIGS:
            yield {**own, "STAGES": stages, "PIPELINED": pipelined}

    def seconds(self, problem: Problem, config: Config) -> float:
        """Alone a problem is left to the other templates."""
        return 2 * super().seconds(problem, config)

    def grid_of_parts(self, problems: Sequence[Problem], config: Config) -> Expr:
        found = _three(problems)
        return self.grid(problems[0] if found is None else found[0], config)

    def resources_of_parts(self, problems: Sequence[Problem], config: Config) -> Resources:
        found = _three(problems)
        if found is None:
            return super().resources_of_parts(problems, config)
        together = super().resources_of_parts([found[0], found[2]], config)
        size, height = problems[0].main_dtype.itemsize, PROGRAMS * ROWS
        slopes, sums = height * config.BLOCK_N * size, config.BLOCK_N * config.BLOCK_E * 4
        return replace(together, shared=together.shared + UNDER_WAY * (slopes + sums) + height * config.BLOCK_E * size)

    def seconds_of_parts(self, problems: Sequence[Problem], config: Config) -> float:
        found = _three(problems)
        if found is None:
            return super().seconds_of_parts(problems, config)
        keys, queries, values = found
        apart_from_it = apart._seconds([keys, values], config) + apart._seconds([queries], config)
        longer = (1 if config.PIPELINED else NOT_PIPELINED) * (THREE_STAGES if config.STAGES == 3 else 1)
        return SHARE * longer * apart_from_it

    def facts(self, problems: Sequence[Problem], config: Config) -> apart.Facts:
        found = _three(problems)
        if found is None:
            return super().facts(problems, config)
        keys, queries, values = (next(k for k, one in enumerate(problems) if one is part) for part in found)
        multiplying, turning, moving = REGISTERS
        return replace(
            super().facts([found[0], found[2]], config), gradient=keys, values=values, queries=queries, last_first=False,
            warps=[config.WARPS] * PROGRAMS + [1, 1], registers=[multiplying] * (PROGRAMS - 1) + [turning, moving, moving],
        )  # fmt: skip


@template(
    implements=GRADIENT, device="cuda", source="attention_backward_warp_specialized.py.jinja",
    name="triton_attention_backward_together",
)  # fmt: skip
class GradientsTogether(_Together, apart.WarpSpecializedGradient):
    """Of queries, keys and values: the first two are `GRADIENT`, with rows and columns exchanged."""

    longest: ClassVar = {"d": LONGEST_HEAD, "v": LONGEST_HEAD, "e": LONGEST_HEAD}
    partner = "triton_attention_backward_values_together"


def _tiles_of_columns(problem: Problem, config: Config) -> Expr:
    return problem.extent("b") * ix.ceildiv(problem.extent("n"), config.BLOCK_N)


@template(
    implements=GRADIENT_OF_VALUES, device="cuda", source="attention_backward_warp_specialized.py.jinja",
    name="triton_attention_backward_values_together",
)  # fmt: skip
class GradientsOfValuesTogether(_Together, apart.WarpSpecializedGradientOfValues):
    """That of values, with the memory in which the queries' gradient is added up, and counters: the programs that have begun,
    and for each tile of queries the number behind that of the last tile of keys that was added."""

    SUMS = workspace(torch.float32, lambda p, c: _tiles_of_columns(p, c) * (c.BLOCK_N * c.BLOCK_D))
    DONE = workspace(torch.int32, lambda p, c: _tiles_of_columns(p, c) + 1, zeroed=True)


def _heads(problem: Problem) -> int:
    """How many heads run side by side, a power of two: as many as the L2 cache has queries of, with their sums. Programs of one
    head wait for each other."""
    each = problem.size("n") * (problem.main_dtype.itemsize * 2 + 4) * LONGEST_HEAD
    count = max(1, min(MOST_HEADS, problem.size("b"), SHARED_BY_HEADS // each))
    return 1 << (count.bit_length() - 1)


def _three(problems: Sequence[Problem]) -> tuple[Problem, Problem, Problem] | None:
    """The gradients of keys, of queries and of values: those of keys and of values have the same rows."""
    gradients, values = ([one for one in problems if apart._is_of_values(one) == wanted] for wanted in (False, True))
    if len(gradients) != 2 or len(values) != 1:
        return None
    one, other = gradients
    keys = one if apart._why_apart(one, values[0]) is None else other
    return keys, other if keys is one else one, values[0]


def _why_not_turned(keys: Problem, queries: Problem) -> str | None:
    """Why one gradient is not of the same function and the same operands as the other, with rows and columns exchanged."""
    own, others = (apart._weighted(problem) for problem in (keys, queries))
    assert own is not None
    if others is None or any(
        _extents(keys, axis) != _extents(queries, other) for axis, other in zip("bmn", "bnm", strict=True)
    ):
        return "their batches are not the same"
    for number, other in ((own, others), (1 - own, 1 - others)):
        (row, column), (turned_row, turned_column) = apart.PAIRS[number], apart.PAIRS[other]
        same = keys.inputs[row].is_array_of(queries.inputs[turned_column])
        if not same or not keys.inputs[column].is_array_of(queries.inputs[turned_row]):
            return "they multiply other operands"
    function, turned = keys.middles["dscores"], queries.middles["dscores"]
    names = {turned.steps[other]: function.steps[number] for number, other in ((own, others), (1 - own, 1 - others))}
    if _turned(turned.value, keys, queries, names) is not function.value:
        return "their functions of scores are not the same"
    return None


def _extents(problem: Problem, axis: str) -> list[Expr]:
    return [v.extent for v in problem.loops[axis]]


def _turned(value: Value, keys: Problem, queries: Problem, names: dict[str, str]) -> Value:
    """A function of the queries' gradient, over the loops of that of keys."""
    mapping: dict[Atom, Expr] = {
        v: w.expr()
        for axis, other in zip("bmn", "bnm", strict=True)
        for v, w in zip(queries.loops[axis], keys.loops[other], strict=True)
    }

    def named(old: Value, args: tuple[Value, ...], _: object) -> Value:
        return vs.step_result(names[old.attr], old.dtype) if old.op == "step" else vs.rebuild(old, args, old.attr)

    moved = vs.substitute(value, mapping)
    return vs.rewrite([moved], named)[moved]


@memoised
def _why_out_of_order(values: Problem) -> str | None:
    """Why tiles of keys that make a tile of queries need not be one behind the other; None where they are."""
    middle = values.middles["weights"]
    if middle.guards and middle.guard_axis != middle.axes[-1]:
        return "its mask says nothing of some rows, and something of others"
    config = values.template.config(BLOCK_M=ROWS, BLOCK_N=ROWS)
    runs = runs_of(values, "weights", config, PROGRAMS * ROWS, by_batch=True)
    if runs.known is not None and runs.known.loaded:
        return "its mask depends on integers in memory"
    edges = runs.edges(ROW.expr())
    return None if _grows(edges[0]) and _grows(edges[-1]) else "later rows need not begin, or end, at later columns"


def _grows(expr: Expr) -> bool:
    """Whether an expression is no smaller in later rows."""
    terms = [(atoms, factor) for atoms, factor in expr.terms if any(map(_has_rows, atoms))]
    return all(len(atoms) == 1 and factor > 0 and _atom_grows(atoms[0]) for atoms, factor in terms)


def _has_rows(atom: Atom) -> bool:
    return ROW in ix.free_atoms(atom.expr())


def _atom_grows(atom: Atom) -> bool:
    if atom is ROW:
        return True
    if isinstance(atom, FloorDiv):
        return (atom.den.as_int() or 0) > 0 and _grows(atom.num)
    return isinstance(atom, Apply) and atom.fn in ("min", "max") and all(map(_grows, atom.args))
