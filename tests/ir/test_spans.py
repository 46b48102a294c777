"""Where conditions on indices hold: by interval analysis, against all points one by one; and in a template's kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kgen
from kgen.device import Device
from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Atom
from kgen.ir.plan import Kernel
from kgen.ir.spans import Holds, Known, Span, where_holds
from kgen.ir.values import Value
from kgen.only import Only, only
from kgen.reference.evaluate_value import Points, Policy
from kgen.scheduler import Options
from kgen.scheduler.selection.choose import chosen_problem
from kgen.templates import registry
from kgen.templates.middle import Middle
from tests.kernels import plans
from tests.scheduler.transforms.test_programs import TEMPLATES, causal, inputs, r, written_out

ROWS, COLUMNS = 9, 11
M, N = ix.var("m", ROWS), ix.var("n", COLUMNS)
FIRST, LAST = ix.size("m0"), ix.size("m1")
RANGES = {M: (FIRST.expr(), LAST.expr())}

SMALL = st.integers(-12, 12)
LINES = st.tuples(st.integers(-2, 2), st.integers(-3, 3), SMALL)


def line(numbers: tuple[int, int, int]) -> Value:
    m, n, c = numbers
    return vs.index_value(M.expr() * m + N.expr() * n + c, torch.int64)


def compared(op: str, a: tuple[int, int, int], b: tuple[int, int, int]) -> Value:
    return vs.call(op, line(a), line(b))


def distance(op: str, a: tuple[int, int, int], b: int, turned: bool) -> Value:
    args = (vs.call("abs", line(a)), vs.const(b, torch.int64))
    return vs.call(op, *(args[::-1] if turned else args))


def looked_up(column: bool) -> Value:
    return vs.load("kept", ((N if column else M).expr(),), torch.bool)


LEAVES = st.one_of(
    st.builds(compared, st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]), LINES, LINES),
    st.builds(distance, st.sampled_from(["lt", "le", "gt", "ge"]), LINES, SMALL, st.booleans()),
    st.builds(looked_up, st.booleans()),
    st.builds(lambda kept: vs.const(kept, torch.bool), st.booleans()),
)
CONDITIONS = st.recursive(
    LEAVES,
    lambda inside: st.one_of(
        st.builds(lambda a, b: vs.call("and", a, b), inside, inside),
        st.builds(lambda a, b: vs.call("or", a, b), inside, inside),
        st.builds(lambda a: vs.call("not", a), inside),
    ),
    max_leaves=5,
)
KEPT = torch.tensor([True, False, True, True, False, True, False, False, True, True, False])


def truth(condition: Value) -> Tensor:
    """At all points, rows first."""
    points = Points((M, N), {"kept": KEPT}, {}, Policy())
    return points.value(condition).expand(ROWS, COLUMNS)


def inside(span: Span | None, env: Mapping[Atom, int]) -> set[int]:
    if span is None:
        return set()
    begin = 0 if span.begin is None else ix.evaluate(span.begin, env.__getitem__)
    end = COLUMNS if span.end is None else ix.evaluate(span.end, env.__getitem__)
    return set(range(begin, end)) & set(range(COLUMNS))


@settings(max_examples=300, deadline=None)
@given(CONDITIONS, st.integers(0, ROWS - 1), st.integers(0, ROWS - 1))
def test_spans_agree_with_all_points(condition, one, other):
    found, there = where_holds(condition, N, RANGES), truth(condition)
    first, last = sorted((one, other))
    rows, env = there[first : last + 1], {FIRST: first, LAST: last}
    assert {n for n in range(COLUMNS) if rows[:, n].any()} <= inside(found.may, env)
    assert inside(found.must, env) <= {n for n in range(COLUMNS) if rows[:, n].all()}


def at(holds: Holds, first: int, last: int) -> tuple[set[int], set[int]]:
    env = {FIRST: first, LAST: last}
    return inside(holds.may, env), inside(holds.must, env)


def test_usual_masks_have_tight_spans():
    m, n = M.expr(), N.expr()
    below = vs.compare("le", n, m)
    window = vs.call("and", below, vs.compare("lt", m - n, ix.constant(3)))
    near = vs.call("le", vs.call("abs", vs.index_value(m - n, torch.int64)), vs.const(2, torch.int64))
    prefix = vs.call("or", below, vs.compare("lt", n, ix.constant(4)))
    assert at(where_holds(below, N, RANGES), 4, 6) == (set(range(7)), set(range(5)))
    assert at(where_holds(window, N, RANGES), 4, 6) == (set(range(2, 7)), set(range(4, 5)))
    assert at(where_holds(near, N, RANGES), 4, 6) == (set(range(2, 9)), set(range(4, 7)))
    assert at(where_holds(prefix, N, RANGES), 1, 2)[0] == set(range(4))
    assert at(where_holds(looked_up(True), N, RANGES), 1, 2) == (set(range(COLUMNS)), set())


def test_ends_may_be_in_terms_of_integers_from_memory():
    """At indices that a kernel has one of, and nowhere else."""
    batch = ix.var("b", 5)
    length, other = (vs.load("lengths", (v.expr(),), torch.int64) for v in (batch, M))
    known = Known(frozenset({batch}))
    found = where_holds(vs.call("lt", vs.index_value(N.expr() + 3 * batch.expr(), torch.int64), length), N, RANGES, known)
    [symbol] = known.loaded.values()
    env = {batch: 2, symbol: 9}
    assert inside(found.may, env) == inside(found.must, env) == set(range(3))
    assert inside(found.may, {batch: 2, symbol: -7}) == set()
    for load, where in ((other, known), (length, None)):
        assert where_holds(vs.call("lt", vs.index_value(N.expr(), torch.int64), load), N, RANGES, where).must is None


# ---- in templates ---------------------------------------------------------------------------------------------------


@pytest.fixture
def registered():
    registry.add(TEMPLATES["plain_attention_cpp"])
    yield
    registry.remove("plain_attention_cpp")


def window(s: Tensor, width: int = 5) -> Tensor:
    rows, columns = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
    return causal(s).masked_fill(rows - columns >= width, -math.inf)


def padded(s: Tensor, kept: Tensor) -> Tensor:
    return causal(s.masked_fill(~kept, -math.inf))


def later_rows_alone(s: Tensor) -> Tensor:
    """The first rows have no columns."""
    rows, columns = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
    return torch.where(columns < rows - 2, s, -math.inf)


def added(s: Tensor) -> Tensor:
    """A mask that is added, and one in front of it."""
    kept = torch.arange(s.shape[-1]) < torch.arange(s.shape[-2])[:, None] + 3
    return causal(s * 0.5) + torch.where(kept, 0.0, -math.inf)


MASKS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], tuple[int, int]]] = {
    "causal": (causal, (), (0, 7)),
    "window": (window, (), (0, 7)),
    "padded": (padded, (r(20) > 0,), (0, 7)),
    "added": (added, (), (0, 7)),
    "later rows": (later_rows_alone, (), (0, 4)),
    "none": (lambda s: s * 2, (), (0, 20)),
}


def middle_of(score: Callable[..., Tensor], more: tuple[Tensor, ...]) -> tuple[Middle, Holds]:
    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        return written_out(q, k, v, lambda s: score(s, *rest))

    options = Options(cpu=Device("cpu", isa="generic"), only=Only("plain_attention_cpp", lambda configs: configs[0]))
    plan = plans(call, *inputs(), *more, options=options).forward
    kernel = next(step for step in plan.kernels if isinstance(step, Kernel) and step.choice is not None)
    problem = chosen_problem(kernel, plan.graph, options.cpu)
    middle = problem.middles["scores"]
    return middle, middle.reach(problem.loops, FIRST.expr(), LAST.expr() - FIRST.expr() + 1)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("mask", MASKS)
def test_a_template_is_told_which_columns_a_mask_may_keep(mask):
    score, more, (begin, end) = MASKS[mask]
    _, reach = middle_of(score, more)
    env = {FIRST: 4, LAST: 6}
    assert reach.may is not None
    assert (0 if reach.may.begin is None else max(0, ix.evaluate(reach.may.begin, env.__getitem__))) == begin
    assert (20 if reach.may.end is None else ix.evaluate(reach.may.end, env.__getitem__)) == end


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("mask", MASKS)
def test_where_a_mask_holds_the_rest_of_the_function_is_left(mask):
    score, more, _ = MASKS[mask]
    middle, _ = middle_of(score, more)
    left = vs.topological([middle.unmasked])
    assert not any(v.op == "const" and v.attr == -math.inf for v in left)
    assert (middle.mask is None) == (mask == "none")


@pytest.mark.cpu
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("mask", ["window", "padded", "added", "later rows"])
def test_what_is_left_out_changes_nothing(mask):
    score, more, _ = MASKS[mask]
    q, k, v = r(2, 70, 16), r(2, 90, 16), r(2, 90, 8)
    more = tuple(r(90) > 0 for _ in more)

    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        return written_out(q, k, v, lambda s: score(s, *rest))

    torch._dynamo.reset()
    smallest = partial(min, key=lambda config: config.BLOCK_M * 100 + config.BLOCK_N)
    with only("plain_attention_cpp", smallest), kgen.config.override(cache=False):
        got = torch.compile(call, backend="kgen")(q, k, v, *more)
    torch.testing.assert_close(got, call(q, k, v, *more), rtol=1e-4, atol=1e-4, equal_nan=True)
