"""Recognises index arithmetic inside a computed index.

Resampling and padding arrive from torch's decompositions as ``x[floor(arange(n) * scale).long()]``: index tensors that read
no memory. An index that depends on one loop variable of known extent is tabulated and fitted, so that a doubling becomes
``i // 2``, a clamped neighbour ``min(i + 1, n - 1)`` and a mirrored edge ``max(i - 1, 1 - i)``, instead of an unknown address
with a bounds check.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch

from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Expr, Var
from kgen.ir.values import Value

MAX_TABLE = 1 << 14
# Evenly spaced runs that a table may consist of: more would take more comparisons than a load takes.
MOST_RUNS = 4


def index_form(value: Value, extent: Expr, wrap: bool) -> Expr | None:
    """`value` as an index expression into a dimension of size `extent`, or None when it has no simple one."""
    limit = extent.as_int()
    if limit is None or value.op == "const":
        return None
    nodes = vs.topological([value])
    if any(v.op in ("load", "bitcast", "assert", *ops.RANDOM) for v in nodes):
        return None
    atoms = list(value.free_atoms())
    if len(atoms) != 1 or not isinstance(atoms[0], Var):
        return None
    variable = atoms[0]
    count = variable.extent.as_int()
    if count is None or not 2 <= count <= MAX_TABLE:
        return None
    table = tabulate(value, variable, count)
    if wrap:
        table = [t + limit if t < 0 else t for t in table]
    if min(table) < 0 or max(table) >= limit:
        return None
    return fit(tuple(table), variable)


def tabulate(value: Value, variable: Var, count: int) -> list[int]:
    """The value at each point of `variable`, computed with the table's reference functions."""
    lanes = torch.arange(count)
    done: dict[Value, torch.Tensor] = {}
    for v in vs.topological([value]):
        args = [done[a] for a in v.args]
        if v.op == "const":
            done[v] = torch.full((count,), v.attr, dtype=v.dtype)
        elif v.op == "index":
            done[v] = _positions(v.attr, lanes)
        elif v.op == "cast":
            done[v] = args[0].to(v.attr)
        elif v.op == "round_to":
            done[v] = args[0].to(v.attr).to(v.dtype)
        else:
            done[v] = ops.OPS[v.op].reference(*args)
    return [int(t) for t in done[value].tolist()]


def _positions(expr: Expr, lanes: torch.Tensor) -> torch.Tensor:
    """An index at each point. Its functions take numbers."""
    if _has_functions(expr):
        return torch.tensor(
            [ix.evaluate(expr, dict.fromkeys(ix.free_atoms(expr), point).__getitem__) for point in lanes.tolist()]
        )
    got = ix.evaluate(expr, lambda atom: lanes)
    return got if isinstance(got, torch.Tensor) else torch.full((len(lanes),), got)


def _has_functions(expr: Expr) -> bool:
    atoms = [atom for term, _ in expr.terms for atom in term]
    parts = [part for atom in atoms if isinstance(atom, ix.FloorDiv | ix.Mod) for part in (atom.num, atom.den)]
    return any(isinstance(atom, ix.Apply) for atom in atoms) or any(map(_has_functions, parts))


@functools.lru_cache(maxsize=1024)
def fit(table: tuple[int, ...], variable: Var) -> Expr | None:
    """An expression in `variable` with the values of `table`: linear, clamped linear, mirrored at an end or at both, beginning
    again after the end, a floor of a linear form, or a few linear runs."""
    i = variable.expr()
    for candidate in (*_linear(table, i), *_mirrored(table, i), *_floors(table, i)):
        if matches(candidate, table):
            return candidate
    return in_runs(table, i)


def in_runs(table: Sequence[int], i: Expr) -> Expr | None:
    """The table as one evenly spaced run after the other; None of too many."""
    starts = [0]
    while len(starts) <= MOST_RUNS and (end := _end_of_run(table, starts[-1])) < len(table):
        starts.append(end)
    if len(starts) > MOST_RUNS:
        return None
    found = ix.ZERO
    for start, end in reversed(list(itertools.zip_longest(starts, starts[1:]))):
        step = table[start + 1] - table[start] if start + 1 < len(table) else 0
        here = table[start] + (i - start) * step
        found = here if end is None else ix.apply("select", ix.apply("lt", i, end), here, found)
    return found


def _end_of_run(table: Sequence[int], start: int) -> int:
    steps = (after - before for before, after in itertools.pairwise(table[start:]))
    return start + 1 + sum(1 for _ in itertools.takewhile(lambda step: step == table[start + 1] - table[start], steps))


def matches(expr: Expr, table: tuple[int, ...]) -> bool:
    def point(k: int) -> int:
        return int(ix.evaluate(expr, lambda atom: k))

    return all(t == point(k) for k, t in enumerate(table))


def _linear(table: tuple[int, ...], i: Expr) -> list[Expr]:
    found: list[Expr] = []
    middle = len(table) // 2
    for at in dict.fromkeys((0, min(middle, len(table) - 2), len(table) - 2)):
        slope = table[at + 1] - table[at]
        if abs(slope) > 8:
            continue
        line = i * slope + (table[at] - slope * at)
        low, high = min(table), max(table)
        found += [line, ix.minimum(line, high), ix.maximum(line, low), ix.maximum(ix.minimum(line, high), low)]
    return found


def _mirrored(table: tuple[int, ...], i: Expr) -> list[Expr]:
    """``|i - p|``, turned around again at the largest value; and ``(i + p) % n``."""
    first, high = table[0], max(table)
    line = i - first
    either = ix.maximum(line, -line)
    back = 2 * high - line
    return [either, ix.minimum(either, back), ix.minimum(i + first, 2 * high - i - first), ix.mod(i + first, high + 1)]


def _floors(table: tuple[int, ...], i: Expr) -> list[Expr]:
    """``(i*p + c) // q`` for the ratio that the ends of the table suggest, clamped at its ends."""
    n, rise = len(table), table[-1] - table[0]
    if rise <= 0:
        return []
    found: list[Expr] = []
    low, high = min(table), max(table)
    ratios = {(high + 1, n)} | {(1, q) for q in range(2, 17)} | {(p, q) for q in (2, 3, 4) for p in range(1, 9)}
    for p, q in sorted(ratios, key=lambda r: (r[0] != 1, r)):
        if abs(rise * q - p * (n - 1)) > 4 * max(p, q):
            continue
        for c in range(-2 * q, 3 * q) if q <= 16 else (0,):
            line = ix.floordiv(i * p + c, q)
            found += [line, ix.maximum(ix.minimum(line, high), low)]
    return found
