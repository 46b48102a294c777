"""Hash-consed values: identity, folding, substitution and masks, and that nothing grows or recurses with depth."""

from __future__ import annotations

import math
import pickle
import time

import pytest
import torch

from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.values import Value

F32, F64, I64, I32, U8, BOOL = torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool
V, J = ix.var("i", 6), ix.var("j", 4)


def load(name: str = "x", *index: ix.ExprLike, dtype: torch.dtype = F32) -> Value:
    return vs.load(name, tuple(map(ix.as_expr, index or (V,))), dtype)


def test_equal_values_are_one_object() -> None:
    x = load()
    assert load() is x
    assert vs.call("add", x, x) is vs.call("add", load(), load())
    assert vs.call("add", x, x) is not vs.call("mul", x, x)


def test_literals_keep_what_equality_would_lose() -> None:
    assert vs.const(0.0, F32) is not vs.const(-0.0, F32)
    assert vs.const(1, I64) is not vs.const(1.0, F64)
    assert vs.const(True, BOOL) is not vs.const(1, I64)
    assert vs.const(math.nan, F32) is vs.const(math.nan, F32)


def test_literals_convert_as_in_torch() -> None:
    assert vs.const(300, U8).attr == 44
    assert vs.const(-1, U8).attr == 255
    assert vs.const(2**63, I64).attr == -(2**63)
    assert vs.const(2.7, I64).attr == 2
    assert vs.const(0.1, torch.bfloat16).dtype is F32


def test_a_float32_literal_has_the_digits_of_float32() -> None:
    assert vs.cast(vs.const(0.1, F32), F64).attr == torch.tensor(0.1, dtype=F32).item()
    assert vs.const(1e300, F32).attr == math.inf
    assert vs.const(-1e300, F32).attr == -math.inf


def chain(steps: int) -> Value:
    y = load("x", V, J)
    for _ in range(steps):
        y = vs.call("add", y, y)
    return y


def test_a_chain_of_doublings_stays_linear() -> None:
    y = chain(1000)
    assert len(vs.topological([y])) == 1001
    assert vs.total_cost([y]) == 1001
    start = time.perf_counter()
    moved = vs.substitute(y, {V: J.expr() + 1, J: V.expr() - 1})
    assert len(vs.topological([moved])) == 1001
    assert vs.loads([moved])[0].attr[1] == (J.expr() + 1, V.expr() - 1)
    guarded = vs.masked(vs.compare("lt", V.expr(), ix.constant(3)), y, vs.const(0, F32))
    assert len(vs.topological([guarded])) < 1010
    assert time.perf_counter() - start < 5  # a walk that revisits shared values would need 2**1000 steps


def test_deep_values_survive_pickle() -> None:
    y = chain(3000)
    assert pickle.loads(pickle.dumps(y)) is y


def test_pickle_through_indirect_indices() -> None:
    row = vs.indirect(load("table", dtype=I64), ix.constant(10))
    value = vs.call("add", load("x", row, J), vs.const(0.5, F32))
    assert pickle.loads(pickle.dumps(value)) is value


def test_substitution_reaches_indices_inside_indices() -> None:
    row = vs.indirect(load("table", V, dtype=I64), ix.constant(10), wrap=False)
    moved = vs.substitute(load("x", row), {V: J.expr()})
    assert moved is load("x", vs.indirect(load("table", J, dtype=I64), ix.constant(10), wrap=False))


def test_substitution_is_simultaneous() -> None:
    assert vs.substitute(load("x", V, J), {V: J.expr(), J: V.expr()}) is load("x", J, V)


def test_an_index_from_data_decides_no_comparison() -> None:
    """Its range is what a check makes sure of, and such a comparison may be that check."""
    row = vs.indirect(load("table", dtype=I64), ix.constant(10), wrap=False)
    for limit in (10, 0):
        assert vs.call("lt", vs.index_value(row), vs.const(limit, I64)).op == "lt"
        assert vs.call("le", vs.index_value(row - limit), vs.const(0, I64)).op == "le"


def test_free_atoms_look_behind_indirect_indices() -> None:
    row = vs.indirect(load("table", V, dtype=I64), ix.constant(10), wrap=False)
    assert {V, J} <= load("x", row, J).free_atoms()
    assert V not in load("x", J).free_atoms()


@pytest.mark.parametrize("op", sorted(ops.OPS))
def test_rebuild_is_the_identity(op: str) -> None:
    row = ops.OPS[op]
    dtype = ops.admitted(row.admits)[0]
    args = [load(f"a{k}", dtype=dtype) for k in range(row.arity)]
    if op == "where":
        args[0] = load("c", dtype=BOOL)
    value = vs.call(op, *args)
    assert vs.rebuild(value, value.args, value.attr) is value
    assert value.dtype == ops.result_dtype(op, tuple(a.dtype for a in args))


def test_folding_keeps_nan_and_signed_zero() -> None:
    x = load()
    zero, one = vs.const(0.0, F32), vs.const(1.0, F32)
    assert vs.call("mul", x, one) is x
    assert vs.call("truediv", x, one) is x
    assert vs.call("mul", x, zero).op == "mul"  # NaN and infinity stay NaN
    assert vs.call("add", x, zero).op == "add"  # -0.0 + 0.0 is 0.0
    n = load("n", dtype=I64)
    assert vs.call("add", n, vs.const(0, I64)) is n


def test_logic_folds() -> None:
    c = load("c", dtype=BOOL)
    true, false = vs.const(True, BOOL), vs.const(False, BOOL)
    assert vs.call("and", true, c) is c
    assert vs.call("and", c, false) is false
    assert vs.call("or", c, true) is true
    assert vs.call("or", false, c) is c
    assert vs.where(true, load("a"), load("b")) is load("a")
    assert vs.where(c, load("a"), load("a")) is load("a")


def test_arity_is_checked() -> None:
    with pytest.raises(TypeError, match="takes 2 values"):
        vs.call("add", load())


def test_casts() -> None:
    x = load("x", dtype=torch.bfloat16)
    assert x.dtype is F32
    assert vs.cast(x, torch.bfloat16) is x  # widened exactly, so rounding again changes nothing
    rounded = vs.cast(load("x", dtype=F32), torch.float16)
    assert (rounded.op, rounded.dtype) == ("round_to", F32)
    assert vs.cast(rounded, torch.float16) is rounded
    assert vs.cast(vs.const(2.5, F32), I64) is vs.const(2, I64)
    assert vs.cast(vs.const(math.nan, F32), I64).op == "cast"
    assert vs.cast(load(), F32) is load()


def test_compare_decides_what_ranges_decide() -> None:
    i = V.expr()
    true, false = vs.const(True, BOOL), vs.const(False, BOOL)
    for op, decided in (("lt", true), ("le", true), ("gt", false), ("ge", false)):
        assert vs.compare(op, i, ix.constant(6)) is decided
    assert vs.compare("le", i, ix.constant(5)) is true
    assert vs.compare("ge", i, ix.ZERO) is true
    assert vs.compare("lt", i, ix.constant(5)).op == "lt"


def test_shorter_loops_decide_comparisons_and_drop_masks() -> None:
    """Of a value that selects among parts, each run of the loop keeps its own part alone."""
    below = vs.compare("lt", V.expr(), ix.constant(4))
    value = vs.where(below, vs.guard_loads(load("x", V), below), load("y", V))
    first, second = (vs.substitute(value, {V: ix.var("i", length).expr() + start}) for start, length in ((0, 4), (4, 2)))
    assert first is load("x", ix.var("i", 4))
    assert second is load("y", ix.var("i", 2).expr() + 4)
    size = ix.size("s0", 2)
    long = ix.var("i", size.expr() + 3)
    at = vs.compare("lt", long.expr(), size.expr())
    assert at.op == "lt"
    assert vs.substitute(at, {long: ix.var("i", 3).expr() + size.expr()}) is vs.const(False, BOOL)
    assert vs.call("le", vs.index_value(V.expr()), vs.const(5, I64)) is vs.const(True, BOOL)


def test_index_values_become_literals_and_data() -> None:
    assert vs.index_value(ix.constant(3)) is vs.const(3, I64)
    table = load("table", dtype=I64)
    assert vs.index_value(ix.indirect(table, 5).expr()) is table
    assert vs.index_value(V.expr(), I32).op == "cast"


def test_indirect_wraps_negative_numbers_once() -> None:
    table = load("table", dtype=I64)
    wrapped = vs.indirect(table, ix.constant(10)).atom()
    assert isinstance(wrapped, ix.Indirect)
    assert wrapped.value.op == "where"
    assert vs.indirect(vs.const(-1, I64), ix.constant(10)) is ix.constant(9)
    assert vs.indirect(vs.index_value(V.expr()), ix.constant(6)) is V.expr()


def test_masked_guards_every_load_but_those_of_the_mask() -> None:
    inside = vs.compare("lt", V.expr(), ix.constant(3))
    value = vs.masked(inside, vs.call("add", load("x"), load("y")), vs.const(0, F32))
    assert value.op == "where"
    assert all(v.args == (inside,) for v in vs.loads([value]))

    data = vs.call("gt", load("m"), vs.const(0, F32))
    value = vs.masked(data, vs.call("add", load("x"), load("m")), vs.const(0, F32))
    masks = {v.attr[0]: v.args for v in vs.loads([value])}
    assert masks == {"x": (data,), "m": ()}


def test_masks_nest() -> None:
    outer, inner = (vs.compare("lt", a.expr(), ix.constant(3)) for a in (V, J))
    body = vs.masked(inner, load("x", V, J), vs.const(0, F32))
    value = vs.masked(outer, body, vs.const(0, F32))
    (loaded,) = vs.loads([value])
    assert loaded.args == (vs.call("and", inner, outer),)


def test_masked_by_a_literal_disappears() -> None:
    x = load()
    assert vs.masked(vs.const(True, BOOL), x, vs.const(0, F32)) is x
    assert vs.masked(vs.const(False, BOOL), x, vs.const(0, F32)) is vs.const(0, F32)


def test_replace_loads_inlines_a_producer_inside_indices_too() -> None:
    producer = vs.call("add", load("n", dtype=I64), vs.const(1, I64))
    consumer = load("x", vs.indirect(load("t", dtype=I64), ix.constant(10), wrap=False))
    (inlined,) = vs.replace_loads([consumer], lambda v: producer if v.attr[0] == "t" else None)
    assert {v.attr[0] for v in vs.loads([inlined])} == {"x", "n"}


def test_order_is_deterministic() -> None:
    a, b = load("a"), load("b")
    value = vs.call("sub", vs.call("mul", a, b), vs.call("mul", b, a))
    order = vs.topological([value])
    assert order == vs.topological([value])
    assert all(order.index(arg) < order.index(v) for v in order for arg in v.args)


def test_substitution_leaves_what_does_not_change() -> None:
    apart, inside = vs.call("exp", load("y", J)), load("picks", V, dtype=I64)
    gathered = vs.load("table", (ix.indirect(inside, 9).expr(), J.expr()), F32)
    both = vs.call("add", vs.call("mul", load(), apart), gathered)
    [found] = vs.substitute_all([both], {V: J.expr()})
    assert apart in vs.topological([found])
    picked = vs.load("table", (ix.indirect(load("picks", J, dtype=I64), 9).expr(), J.expr()), F32)
    assert found is vs.call("add", vs.call("mul", load("x", J), apart), picked)
    assert vs.substitute_all([both, apart], {ix.var("other", 6): J.expr()}) == [both, apart]


def test_replacement_reaches_indices_from_data_and_masks() -> None:
    inside, kept = load("picks", V, dtype=I64), vs.call("gt", load("m"), vs.const(0, F32))
    gathered = vs.load("table", (ix.indirect(inside, 9).expr(),), F32, kept)
    other = vs.call("exp", load("y"))
    names = {"picks": "picks_1", "m": "m_1"}

    def renamed(one: Value) -> Value | None:
        name, index, dtype = one.attr
        return vs.load(names[name], index, dtype, *one.args) if name in names else None

    [found] = vs.replace_loads([vs.call("add", gathered, other)], renamed)
    assert {one.attr[0] for one in vs.loads([found])} == {"picks_1", "m_1", "table", "y"}
    assert other in found.args
    assert vs.replace_loads([other], renamed) == [other]


def test_loops_of_a_value_are_its_own() -> None:
    value = vs.call("add", load("x", V), load("y", J))
    assert value.variables() == value.variables() == {V, J}
    assert vs.substitute(value, {V: J.expr()}).variables() == {J}
