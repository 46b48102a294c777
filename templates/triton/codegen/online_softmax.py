"""Finds maxima that are followed by a sum of exponentials of the same values: one walk of a long row can make both."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.ir import values as vs
from kgen.ir.plan import Statement
from kgen.ir.values import Value


@dataclass(frozen=True, slots=True)
class Rescaled:
    """``sum(exp(exponent - maximum) * weight)`` where `maximum` is that of the exponent; no weight is one of 1."""

    maximum: Statement
    exponent: Value
    weight: Value | None


def rescaled_sums(statements: list[Statement]) -> tuple[list[Statement], dict[str, Rescaled]]:
    """The statements with such sums in their maximum's place, and what each is, by its result. The maximum itself is dropped:
    the sum's walk gives both."""
    within = _within(statements)
    maxima = {s.outs[0]: s for s in statements if s.kind == "reduction" and s.op == "max" and s.value.dtype.is_floating_point}
    found: dict[str, Rescaled] = {}
    place: dict[str, str] = {}  # maximum -> sum
    for s in statements:
        pair = _pair(s, maxima, within)
        if pair is None or pair.maximum.outs[0] in place or _reads_later(statements, pair):
            continue
        found[s.outs[0]] = pair
        place[pair.maximum.outs[0]] = s.outs[0]
    if not found:
        return statements, found
    sums = {s.outs[0]: s for s in statements if s.outs[0] in found}
    kept: list[Statement] = []
    for s in statements:
        if s.outs[0] in found:
            continue
        kept.append(_moved(sums[place[s.outs[0]]], s.section) if s.outs[0] in place else s)
    return _needed(kept, found), found


def _needed(statements: list[Statement], found: dict[str, Rescaled]) -> list[Statement]:
    """Without values of points that only the moved sums have read."""
    read: set[str] = set()
    kept: list[Statement] = []
    for s in reversed(statements):
        if s.kind == "pointwise" and not any(s.stored) and read.isdisjoint(s.outs):
            continue
        pair = found.get(s.outs[0])
        roots = s.roots if pair is None else (pair.exponent, *(() if pair.weight is None else (pair.weight,)))
        read.update(load.attr[0] for load in vs.loads(roots))
        kept.append(s)
    return kept[::-1]


def _moved(s: Statement, section: int) -> Statement:
    return Statement(s.kind, s.outs, s.value, s.store, s.inner, section, s.stored, s.op, s.mask, s.target, s.axis, s.rank)


def _within(statements: list[Statement]) -> dict[str, Statement]:
    """Values of points that a later statement of the same walk reads."""
    return {o: s for s in statements if s.inner and s.kind == "pointwise" for o in s.outs}


def _unfolded(s: Statement, within: dict[str, Statement]) -> Value:
    """The statement's value with what its own walk has just computed written out."""

    def replace(load: Value) -> Value | None:
        source = within.get(load.attr[0])
        return None if source is None or source.section != s.section or load.args else _unfolded(source, within)

    return vs.replace_loads([s.value], replace)[0]


def _pair(s: Statement, maxima: dict[str, Statement], within: dict[str, Statement]) -> Rescaled | None:
    if s.kind != "reduction" or s.op != "sum":
        return None
    value = _unfolded(s, within)
    factors = value.args if value.op == "mul" else (value,)
    for k, factor in enumerate(factors):
        if factor.op != "exp" or factor.args[0].op != "sub":
            continue
        exponent, subtracted = factor.args[0].args
        top = maxima.get(subtracted.attr[0]) if subtracted.op == "load" else None
        if top is None or top.section >= s.section or _unfolded(top, within) is not exponent:
            continue
        rest = [f for j, f in enumerate(factors) if j != k]
        if any(load.attr[0] == top.outs[0] for load in vs.loads(rest)):
            continue
        return Rescaled(top, exponent, rest[0] if rest else None)
    return None


def _reads_later(statements: list[Statement], pair: Rescaled) -> bool:
    """Whether the sum needs something, besides the maximum, that is only made after the maximum's walk."""
    early = {o for s in statements if s.section < pair.maximum.section or s is pair.maximum for o in s.outs}
    made = {o for s in statements for o in s.outs}
    same = {o for s in statements if s.section == pair.maximum.section and s.inner and s.kind != "reduction" for o in s.outs}
    needed = {v.attr[0] for v in vs.loads([pair.exponent, *([] if pair.weight is None else [pair.weight])])}
    return bool((needed & made) - early - same)
