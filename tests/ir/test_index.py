"""Index expressions against plain integer arithmetic."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Size, Var

V, J, K = ix.var("i", 6), ix.var("j", 4), ix.var("k", 1)
M = ix.size("m", 1, 9)
L = ix.var("l", M.expr())  # a loop of symbolic extent
ATOMS = (V, J, K, L, M)

Meaning = Callable[[dict[Atom, int]], int]
Pair = tuple[Expr, Meaning]


def points() -> list[dict[Atom, int]]:
    """All values of the loop variables for two values of the symbol."""
    found = []
    for m in (1, 5):
        for i, j, inner in itertools.product(range(6), range(4), range(m)):
            found.append({V: i, J: j, K: 0, L: inner, M: m})
    return found


POINTS = points()


def _leaf(atom: Atom) -> Pair:
    return atom.expr(), lambda p: p[atom]


def _literal(n: int) -> Pair:
    return ix.constant(n), lambda p: n


def _binary(pair: tuple[Pair, Pair, str]) -> Pair:
    (a, fa), (b, fb), op = pair
    if op == "add":
        return a + b, lambda p: fa(p) + fb(p)
    if op == "sub":
        return a - b, lambda p: fa(p) - fb(p)
    if op == "mul":
        return a * b, lambda p: fa(p) * fb(p)
    if op == "min":
        return ix.minimum(a, b), lambda p: min(fa(p), fb(p))
    return ix.maximum(a, b), lambda p: max(fa(p), fb(p))


def _divided(pair: tuple[Pair, int | Size, bool]) -> Pair:
    (a, fa), den, quotient = pair
    if isinstance(den, Size):
        return (a // den.expr(), lambda p: fa(p) // p[den]) if quotient else (a % den.expr(), lambda p: fa(p) % p[den])
    return (a // den, lambda p: fa(p) // den) if quotient else (a % den, lambda p: fa(p) % den)


leaves = st.one_of(st.sampled_from(ATOMS).map(_leaf), st.integers(-7, 12).map(_literal))
divisors = st.one_of(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), st.just(M))
expressions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, inner, st.sampled_from(["add", "sub", "mul", "min", "max"])).map(_binary),
        st.tuples(inner, divisors, st.booleans()).map(_divided),
    ),
    max_leaves=7,
)


@settings(max_examples=250, deadline=None)
@given(expressions)
def test_simplified_expressions_keep_their_meaning_and_bounds(pair: Pair) -> None:
    expr, meaning = pair
    lo, hi = expr.bounds()
    for point in POINTS:
        expected = meaning(point)
        assert ix.evaluate(expr, point.__getitem__) == expected
        assert lo <= expected <= hi


@settings(max_examples=150, deadline=None)
@given(expressions, expressions)
def test_known_less_is_never_wrong(a: Pair, b: Pair) -> None:
    if ix.known_less(a[0], b[0]):
        assert all(a[1](p) < b[1](p) for p in POINTS)


@settings(max_examples=150, deadline=None)
@given(expressions, st.sampled_from([V, J, L]))
def test_stride_is_the_difference_between_neighbours(pair: Pair, variable: Var) -> None:
    stride = ix.stride_of(pair[0], variable)
    if stride is None:
        return
    for point in POINTS:
        nearby = {**point, variable: point[variable] + 1}
        limit = point[M] if variable is L else variable.extent.as_int()
        if nearby[variable] < limit:
            assert pair[1](nearby) - pair[1](point) == ix.evaluate(stride, point.__getitem__)


@settings(max_examples=150, deadline=None)
@given(expressions, expressions, st.sampled_from([V, J]))
def test_substitution_composes(pair: Pair, inner: Pair, variable: Var) -> None:
    # the replacement must stay within the variable's range, which simplification has already used
    bounded = ix.mod(inner[0], variable.extent)
    replaced = ix.substitute(pair[0], {variable: bounded})
    for point in POINTS[::7]:
        inside = {**point, variable: inner[1](point) % variable.extent.as_int()}
        assert ix.evaluate(replaced, point.__getitem__) == pair[1](inside)


@settings(max_examples=60, deadline=None)
@given(expressions)
def test_pickle_gives_the_same_object(pair: Pair) -> None:
    assert pickle.loads(pickle.dumps(pair[0])) is pair[0]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_linearize_then_delinearize_is_the_identity(sizes: list[int]) -> None:
    index = [ix.var(f"i{k}", n).expr() for k, n in enumerate(sizes)]
    linear = ix.linearize(index, ix.contiguous_strides(sizes))
    assert list(ix.delinearize(linear, sizes)) == index


@given(st.permutations([2, 3, 4, 5]), st.integers(1, 3))
def test_reshape_there_and_back_is_the_identity(sizes: list[int], split: int) -> None:
    joined = [sizes[0], sizes[1] * sizes[2], sizes[3]]
    index = [ix.var(f"i{k}", n).expr() for k, n in enumerate(sizes)]
    flat = ix.delinearize(ix.linearize(index, ix.contiguous_strides(sizes)), joined)
    back = ix.delinearize(ix.linearize(flat, ix.contiguous_strides(joined)), sizes)
    assert list(back) == index


def test_reshape_of_symbolic_sizes_is_the_identity() -> None:
    b, s = ix.size("b", 1, 1 << 40).expr(), ix.size("s", 1, 1 << 40).expr()
    sizes = [b, s, ix.constant(8), ix.constant(64)]
    index = [ix.var(f"i{k}", n).expr() for k, n in enumerate(sizes)]
    joined = [b * s, ix.constant(512)]
    flat = ix.delinearize(ix.linearize(index, ix.contiguous_strides(sizes)), joined)
    assert flat[1] is index[2] * 64 + index[3]
    back = ix.delinearize(ix.linearize(flat, ix.contiguous_strides(joined)), sizes)
    assert list(back) == index


def test_a_part_of_a_part_joins_with_the_whole() -> None:
    """Halves of bytes side by side, in groups of 32 of them."""
    x = ix.var("x", 4096).expr()
    byte = ix.floordiv(ix.mod(x, 32), 2)
    assert byte is ix.mod(ix.floordiv(x, 2), 16)
    assert byte + ix.floordiv(x, 32) * 16 is ix.floordiv(x, 2)
    m = M.expr()
    assert ix.floordiv(ix.mod(x, m * 8), m) is ix.mod(ix.floordiv(x, m), 8)


def test_a_remainder_within_a_remainder_is_left_out() -> None:
    """Elements of a short axis that two steps take around its end are those that one step takes."""
    x, y, m = ix.var("x", 30).expr(), ix.var("y", 5).expr(), M.expr()
    assert ix.mod(ix.mod(x + 1, 3) + 1, 3) is ix.mod(x + 2, 3)
    assert ix.mod(ix.mod(x, 6) * 2 + y, 3) is ix.mod(x * 2 + y, 3)
    assert ix.mod(ix.mod(x, m * 2) + y, m) is ix.mod(x + y, m)
    short = ix.var("short", 3).expr()
    assert ix.mod(ix.mod(short + 1, 3) + 2, 3) is short
    assert ix.mod(ix.mod(x, 4) + y, 3) is not ix.mod(x + y, 3)


def test_neighbouring_digits_join() -> None:
    whole = ix.var("whole", 512).expr()
    assert ix.mod(ix.floordiv(whole, 16), 2) * 48 + ix.mod(whole, 16) * 3 is ix.mod(whole, 32) * 3
    assert ix.floordiv(whole, 128) * 128 + ix.mod(ix.floordiv(whole, 16), 8) * 16 + ix.mod(whole, 16) is whole


def test_a_joined_loop_splits_back_to_itself() -> None:
    loop = ix.var("x", 24).expr()
    parts = ix.delinearize(loop, [2, 3, 4])
    assert ix.linearize(parts, [12, 4, 1]) is loop


def test_equality_is_identity() -> None:
    i, j = V.expr(), J.expr()
    assert (i + j) * 2 is j * 2 + 2 * i
    assert (i + 1) - 1 is i
    assert ix.var("i", 6) is V
    assert ix.constant(3) == 3


def test_a_loop_of_extent_one_is_zero() -> None:
    assert K.expr() is ix.ZERO


def test_symbolic_loops_stay_below_their_extent() -> None:
    assert ix.known_less(L, M)
    assert ix.known_less(L.expr() * 4 + J.expr(), M.expr() * 4)
    assert not ix.known_less(L.expr() + 1, M)
    assert (L.expr() * 4 + J.expr()) // 4 is L.expr()
    assert (L.expr() * 4 + J.expr()) % 4 is J.expr()


def test_a_negative_factor_does_not_make_a_bound_too_small() -> None:
    below_zero = ix.minimum(J.expr() - 5, V.expr() - 7)
    assert ix.known_less(below_zero, 0)
    assert not ix.known_less(V.expr() * below_zero, 0)  # zero where i is
    assert ix.known_less(V.expr() * below_zero, 1)


def test_division_by_zero_is_an_error() -> None:
    with pytest.raises(ZeroDivisionError):
        ix.floordiv(V, 0)


def test_stride_of_an_indirect_index_is_unknown_only_along_what_it_reads() -> None:
    table = vs.load("table", (V.expr(),), _int64())
    row = vs.indirect(table, ix.constant(100), wrap=False)
    flat = row * 4 + J.expr()
    assert ix.stride_of(flat, J) is ix.ONE
    assert ix.stride_of(flat, V) is None
    assert ix.stride_of((flat // 3) + J.expr(), V) is None


def test_the_normal_form_of_indirect_indices_follows_creation() -> None:
    first, second = (vs.indirect(vs.load(n, (V.expr(),), _int64()), ix.constant(9), wrap=False) for n in ("first", "second"))
    assert (second + first).terms[0][0][0] is first.atom()


def _int64() -> object:
    import torch

    return torch.int64


def test_other_factors_give_other_expressions() -> None:
    assert ix.product([M.expr(), 4]) is M.expr() * 4
    assert ix.product([4, M.expr()]) is ix.product([M.expr(), ix.constant(4)])
    assert ix.product([M.expr(), M.expr()]) is not ix.product([M.expr()])
    assert ix.product([ix.size("m", 1, 8).expr(), 4]) is not ix.product([M.expr(), 4])
    assert ix.product([]) is ix.ONE


def test_what_is_divided_counts_among_what_is_computed() -> None:
    i, j = (ix.var(name, 70000).expr() for name in ("i", "j"))
    inside = (i * 70000 + j) // 70001
    assert inside.bounds()[1] < 70000
    assert not ix.within(inside, 2**31)
    assert ix.within(inside, 2**33)
    assert not ix.within(ix.minimum(i * 70000, j), 2**31)
    assert ix.within(i + j - 5, 2**18)
    assert not ix.within(ix.size("any").expr(), 2**31)
