"""Masks found in functions of scores: where an element is 0, and under which numbers; what is left where the mask holds."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.values import Value
from kgen.templates import masks
from kgen.templates.middle import Middle

f32 = torch.float32
M, N = ix.var("m", 9), ix.var("n", 9)
LOOPS = {"m": (M,), "n": (N,)}
S, T = vs.step_result("s", f32), vs.step_result("t", f32)
KEPT = vs.call("le", vs.index_value(N.expr()), vs.index_value(M.expr()))
OTHER = vs.call("lt", vs.index_value(N.expr()), vs.const(5, torch.int64))
SUM = vs.call("add", vs.load("table", (N.expr(),), torch.int64), vs.const(3, torch.int64))


def c(number: float) -> Value:
    return vs.const(number, f32)


def row(name: str, of: ix.Var = M) -> Value:
    return vs.load(name, (of.expr(),), f32)


def minus(a: Value, b: Value) -> Value:
    return vs.call("sub", a, b)


def times(a: Value, b: Value) -> Value:
    return vs.call("mul", a, b)


def weight(score: Value) -> Value:
    """As backward computes it again."""
    return vs.call("exp", vs.call("minimum", minus(score, row("lse")), c(0)))


MASKED, FILLED = vs.where(KEPT, S, c(-math.inf)), vs.where(KEPT, times(S, c(0.5)), c(-1e4))
GRADIENT = minus(T, row("delta"))
# A value, how many guards its mask has; None: it has no mask.
FORMS: dict[str, tuple[Value, int | None]] = {
    "branch": (vs.where(KEPT, S, c(0)), 0),
    "other branch": (vs.where(vs.call("not", KEPT), c(0), S), 0),
    "two branches": (vs.where(KEPT, vs.where(OTHER, S, c(0)), c(0)), 0),
    "rounded": (vs.cast(vs.where(KEPT, S, c(0)), torch.bfloat16), 0),
    "scaled": (times(c(-0.25), vs.where(KEPT, S, c(0))), 0),
    "with a derivative": (times(vs.where(KEPT, T, c(0)), minus(c(1), times(vs.call("tanh", S), vs.call("tanh", S)))), 0),
    "weight": (weight(MASKED), 1),
    "filled weight": (weight(FILLED), 1),
    "weight of a sum": (weight(vs.call("add", S, vs.where(KEPT, c(0), c(-math.inf)))), 1),
    "gradient of a score": (times(weight(MASKED), GRADIENT), 1),
    "difference": (minus(times(weight(FILLED), T), times(weight(FILLED), row("delta"))), 1),
    "masked again": (vs.where(KEPT, times(weight(FILLED), GRADIENT), c(0)), 0),
    "of other rows": (weight(vs.where(KEPT, minus(S, row("shift", N)), c(-1e4))), 1),
    "nothing": (S, None),
    "power of a power": (times(vs.where(KEPT, T, c(0)), vs.call("exp", S)), None),
    "inverse": (vs.call("truediv", vs.where(KEPT, T, c(0)), S), None),
    "one side of a sum": (vs.call("add", vs.where(KEPT, T, c(0)), S), None),
    "two conditions": (minus(vs.where(KEPT, T, c(0)), vs.where(OTHER, S, c(0))), None),
    "of sums of indices": (weight(vs.call("add", S, vs.cast(SUM, f32))), None),
    "by scores": (weight(vs.call("add", S, vs.where(KEPT, c(0), c(-1e4)))), None),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_where_a_value_is_zero(name: str) -> None:
    value, guards = FORMS[name]
    middle = Middle(("m", "n"), ("s", "t"), value, None, "n", LOOPS)
    assert (None if middle.mask is None else len(middle.guards)) == guards
    if middle.mask is None:
        return
    for m, n, s, lse in itertools.product(range(0, 9, 2), range(0, 9, 3), (-3.0, 2.0), (0.5, -math.inf, -1e4)):
        at = {"s": s, "t": 1.5, "lse": lse, "delta": 0.25, "shift": 0.0}
        holds = all(number(guard, m, n, at) == 0 for guard in middle.guards)
        if number(middle.mask, m, n, at):
            same = number(middle.unmasked, m, n, at), number(value, m, n, at)
            assert same[0] == same[1] or all(map(math.isnan, same))
        elif holds:
            assert number(value, m, n, at) == 0
        else:
            assert lse != 0.5


def number(value: Value, m: int, n: int, at: dict[str, float]) -> float:
    """A value at one place, by the folding of constants."""
    value = vs.substitute(value, {M: ix.constant(m), N: ix.constant(n)})
    value = vs.replace_steps(value, lambda leaf: c(at[leaf.attr]))
    [value] = vs.replace_loads([value], lambda load: c(at[load.attr[0]]))
    done: dict[Value, float] = {}
    for one in vs.topological([value]):
        done[one] = folded(one, [done[arg] for arg in one.args])
    return done[value]


def folded(value: Value, args: list[float]) -> float:
    from kgen.ir import ops

    if value.op in ("const", "index"):
        return float(value.attr if value.op == "const" else value.attr.as_int())
    if value.op in ("round_to", "cast"):
        return float(torch.tensor(args[0]).to(value.attr if value.op == "round_to" else value.dtype))
    kinds = [arg.dtype for arg in value.args]
    return float(ops.OPS[value.op].reference(*(torch.tensor(a).to(k) for a, k in zip(args, kinds, strict=True))))


def test_guards_belong_to_rows_or_to_columns() -> None:
    rows = Middle(("m", "n"), ("s",), weight(MASKED), None, "n", LOOPS)
    columns = Middle(("n", "m"), ("s",), weight(MASKED), None, "m", LOOPS)
    assert (rows.guard_axis, columns.guard_axis) == ("m", "m")
    both = times(weight(MASKED), c(1.0)), vs.call("exp", minus(MASKED, minus(row("lse"), row("more", N))))
    assert Middle(("m", "n"), ("s",), both[0], None, "n", LOOPS).mask is not None
    assert Middle(("m", "n"), ("s",), both[1], None, "n", LOOPS).mask is None


@pytest.mark.parametrize(
    ("value", "fill"),
    [
        (FILLED, -1e4), (times(FILLED, c(2.0)), -1e4), (vs.where(KEPT, c(7.0), S), 7.0), (MASKED, None), (S, None),
        (vs.call("add", FILLED, row("bias")), None), (vs.call("tanh", FILLED), None),
    ],
)  # fmt: skip
def test_the_number_that_masked_scores_are(value: Value, fill: float | None) -> None:
    found = Middle(("m", "n"), ("s",), value, "n", None, LOOPS).fill
    assert (None if found is None else found.number) == fill


def test_parts_of_a_condition_decide_branches() -> None:
    condition = vs.call("and", KEPT, vs.call("not", OTHER))
    value = vs.call("add", vs.where(KEPT, S, c(1)), vs.where(OTHER, c(2), T))
    assert masks.assuming(value, condition) is vs.call("add", S, T)
    assert masks.assuming(value, vs.call("or", KEPT, OTHER)) is value
