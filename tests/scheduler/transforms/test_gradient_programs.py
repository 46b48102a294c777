"""Programs with elementwise steps of several contractions: how they are declared, recognised in gradients, and evaluated."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kgen import contraction, elementwise, errors, program, softmax
from kgen.ir import nodes as ir
from kgen.ir.program import Elementwise, Program
from kgen.ir.verify import verify
from kgen.reference.evaluate import evaluate_graph
from kgen.scheduler.transforms.graph_reader import Reader
from kgen.scheduler.transforms.program_ends import may_end
from kgen.scheduler.transforms.recognition import Recognised, applied, lasting, recognised
from kgen.verdict import Reason, Verdict
from tests.op_case import lowered

GRADIENT = program(
    scores=contraction("b,m,d", "b,n,d -> b,m,n"),
    dweights=contraction("b,m,v", "b,n,v -> b,m,n"),
    dscores=elementwise("scores", "dweights"),
    out=contraction("dscores", "b,n,e -> b,m,e"),
)
WEIGHTED = program(
    scores=contraction("b,m,d", "b,n,d -> b,m,n"),
    weights=elementwise("scores"),
    out=contraction("weights", "b,n,v -> b,m,v"),
)
assert GRADIENT.program is not None
assert WEIGHTED.program is not None
PROGRAMS: list[Program] = [GRADIENT.program.canonical, WEIGHTED.program.canonical]
BOTH = {
    "scores": contraction("b,m,d", "b,n,d -> b,m,n"), "dweights": contraction("b,m,v", "b,n,v -> b,m,n"),
    "dscores": elementwise("scores", "dweights"),
}  # fmt: skip
OF_ENTRIES = program(**BOTH, out=contraction("dscores", "b,m,n,c -> b,c"))
OVER_BATCHES = program(
    scores=contraction("b,r,m,d", "b,r,n,d -> b,r,m,n"),
    dweights=contraction("b,r,m,v", "b,r,n,v -> b,r,m,n"),
    dscores=elementwise("scores", "dweights"),
    out=contraction("dscores", "b,r -> b,m,n"),
)
SUMMING = [one.program.canonical for one in (OVER_BATCHES, OF_ENTRIES) if one.program is not None]
LEFT = {"s": contraction("m,d", "n,d -> m,n")}


# ---- declarations ---------------------------------------------------------------------------------------------------


def test_an_elementwise_step_has_the_slot_of_the_contractions_that_it_reads() -> None:
    assert GRADIENT.middles == ("dscores",)
    assert GRADIENT.steps == ("scores", "dweights", "dscores")
    found = PROGRAMS[0]
    step = found.steps[2]
    assert isinstance(step, Elementwise)
    assert found.elements(step) == ("step0", "step1")
    assert GRADIENT.operator != WEIGHTED.operator
    other = program(
        x=contraction("a,i,k", "a,j,k -> a,i,j"), y=contraction("a,i,l", "a,j,l -> a,i,j"), z=elementwise("x", "y"),
        o=contraction("z", "a,j,q -> a,i,q"),
    )  # fmt: skip
    assert other.operator == GRADIENT.operator


def test_elementwise_steps_may_share_a_contraction() -> None:
    both = program(**LEFT, p=elementwise("s"), q=elementwise("s"), o=contraction("p", "q -> m"))
    assert both.middles == ("p", "q")


BAD = {
    "unknown": (lambda: program(p=elementwise("s"), o=contraction("p", "n,v -> m,v")), "no earlier contraction is called s"),
    "of nothing": (lambda: program(**LEFT, p=elementwise(), o=contraction("s", "n,v -> m,v")), "elementwise of nothing"),
    "of a softmax and a contraction": (
        lambda: program(
            **LEFT, w=softmax("s", over="n"), t=contraction("m,e", "n,e -> m,n"), p=elementwise("t", "w"),
            o=contraction("p", "n,v -> m,v"),
        ),
        "no earlier contraction is called w",
    ),
    "other axes": (
        lambda: program(**LEFT, t=contraction("n,d", "m,d -> n,m"), p=elementwise("s", "t"), o=contraction("p", "n,v -> m,v")),
        "over the same axes",
    ),
    "twice": (lambda: program(**LEFT, p=elementwise("s", "s"), o=contraction("p", "n,v -> m,v")), "distinct"),
    "read by a contraction as well": (
        lambda: program(**LEFT, p=elementwise("s"), o=contraction("p", "s -> m")), "which another step has read",
    ),
    "last": (lambda: program(**LEFT, p=elementwise("s")), "the last step"),
}  # fmt: skip


@pytest.mark.parametrize("how", BAD)
def test_steps_that_do_not_hold_together_are_refused(how: str) -> None:
    make, message = BAD[how]
    with pytest.raises(errors.BadTemplate, match=message):
        make()


# ---- recognition ----------------------------------------------------------------------------------------------------


def r(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def causal(s: Tensor) -> Tensor:
    rows, columns = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
    return s.masked_fill(columns > rows, -math.inf)


def recomputing(score: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """The gradients that autograd finds, of weights that are computed again from the saved log-sum-exp."""

    def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
        raw = q @ k.mT
        with torch.enable_grad():
            s, back = torch.func.vjp(score, raw)
        weights = torch.exp(s - lse[..., None])
        [ds] = back(weights * (g @ v.mT - delta[..., None]))
        return ds @ k, ds.mT @ q, weights.mT @ g

    return function


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda s: s * 0.25,
    "causal": lambda s: causal(s * 0.25),
    "softcap": lambda s: causal(3 * torch.tanh(s / 3)),
    "squared": lambda s: s * s * 0.01 - s.sigmoid(),
}


def inputs() -> list[Tensor]:
    q, k, v, g = r(2, 3, 20, 16), r(2, 3, 30, 16), r(2, 3, 30, 8), r(2, 3, 20, 8)
    return [q, k, v, g, r(2, 3, 20) + 4, r(2, 3, 20)]


def found_in(function: Callable[..., object], args: list[Tensor], near: list[Verdict]) -> tuple[ir.Graph, list[Recognised]]:
    graph = lowered(function, args)
    return graph, recognised(graph, PROGRAMS, near)


@pytest.mark.parametrize("name", SCORES)
def test_three_gradients_share_scores_that_nobody_stores(name: str) -> None:
    function, args, near = recomputing(SCORES[name]), inputs(), list[Verdict]()
    graph, found = found_in(function, args, near)
    assert sorted(one.operation.operator for one in found) == sorted([GRADIENT.operator] * 2 + [WEIGHTED.operator])
    assert not near
    after = verify(applied(graph, *found), "recognition")
    assert all(isinstance(node, ir.Operation) for node in after.nodes), after.nodes
    for got, want in zip(evaluate_graph(after, args), function(*(t.double() for t in args)), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_a_gradient_that_somebody_reads_is_stored() -> None:
    """As for a sum that is no template's."""

    def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
        weights = torch.exp(q @ k.mT * 0.25 - lse[..., None])
        ds = weights * (g @ v.mT - delta[..., None])
        return ds @ k, ds.mT @ q, weights.mT @ g, ds.sum(0)

    near: list[Verdict] = []
    _, found = found_in(function, inputs(), near)
    assert not found
    assert len(near) == 3
    assert {one.reason for one in near} == {Reason.NEEDED}


def assert_same(graph: ir.Graph, found: list[Recognised], args: list[Tensor], function: Callable[..., object]) -> list[ir.Node]:
    """The nodes with programs in their places, which compute what they did."""
    after = verify(applied(graph, *found), "recognition")
    want = function(*(t.double() if t.is_floating_point() else t for t in args))
    wanted = want if isinstance(want, tuple) else (want,)
    for got, right in zip(evaluate_graph(after, args), wanted, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-4)
    return after.nodes


def test_a_row_sum_of_what_is_recomputed_is_a_program_too() -> None:
    """Without delta the sum over a row of weights times their gradients comes first."""

    def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        weights = torch.exp(q @ k.mT * 0.25 - lse[..., None])
        dweights = g @ v.mT
        return (weights * (dweights - (dweights * weights).sum(-1, keepdim=True))) @ k

    near: list[Verdict] = []
    graph, found = found_in(function, inputs(), near)
    assert [one.operation.operator for one in found] == [GRADIENT.operator] * 2
    assert not near
    assert all(isinstance(node, ir.Operation) for node in assert_same(graph, found, inputs(), function))


# ---- sums -----------------------------------------------------------------------------------------------------------


def scores_gradient(q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.exp(q @ k.mT * 0.25 - lse[..., None])
    ds = weights * (g @ v.mT - delta[..., None])
    return ds, ds @ k


def of_rows(*args: Tensor) -> tuple[Tensor, ...]:
    ds, dq = scores_gradient(*args)
    return dq, ds.sum(-1)


def of_columns(*args: Tensor) -> tuple[Tensor, ...]:
    """As of a bias for each key that heads share."""
    ds, dq = scores_gradient(*args)
    return dq, ds.sum((1, 2))


def of_slopes(*args: Tensor) -> tuple[Tensor, ...]:
    """Two sums, one behind the other."""
    ds, dq = scores_gradient(*args)
    distance = torch.arange(ds.shape[-1]) - torch.arange(ds.shape[-2])[:, None]
    return dq, (ds.sum(0) * distance).sum((-1, -2))


def of_batches(*args: Tensor) -> tuple[Tensor, ...]:
    ds, dq = scores_gradient(*args)
    return dq, ds.sum(0)


def of_table(*args: Tensor) -> tuple[Tensor, ...]:
    ds, dq = scores_gradient(*args)
    entry = (torch.arange(ds.shape[-1]) - torch.arange(ds.shape[-2])[:, None]).clamp(-3, 4) + 3
    made = torch.ops.aten.embedding_dense_backward(ds.sum(0).permute(1, 2, 0), entry, 8, -1, False)
    return dq, made


SUMS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], str]] = {
    "rows": (of_rows, GRADIENT.operator), "columns": (of_columns, GRADIENT.operator), "slopes": (of_slopes, GRADIENT.operator),
    "batches": (of_batches, OVER_BATCHES.operator), "table": (of_table, OF_ENTRIES.operator),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_scores_gradients_are_programs(name: str) -> None:
    function, operator = SUMS[name]
    graph, near = lowered(function, inputs()), list[Verdict]()
    found = recognised(graph, [*PROGRAMS, *SUMMING], near)
    assert not near
    nodes = assert_same(graph, found, inputs(), function)
    made = [node.operator for node in nodes if isinstance(node, ir.Operation)]
    assert sorted(made) == sorted([GRADIENT.operator, operator])
    assert not any(ir.is_contraction(node) for node in nodes)


def test_a_sum_that_is_squared_before_it_is_summed_again_is_stored_first() -> None:
    def function(*args: Tensor) -> tuple[Tensor, ...]:
        ds, dq = scores_gradient(*args)
        return dq, ds.sum(0).square().sum((-1, -2))

    graph = lowered(function, inputs())
    found = recognised(graph, [*PROGRAMS, *SUMMING])
    made = [node.operator for node in assert_same(graph, found, inputs(), function) if isinstance(node, ir.Operation)]
    assert sorted(made) == sorted([GRADIENT.operator, OVER_BATCHES.operator])


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_programs_without_other_gradients_as_well(name: str) -> None:
    """As where one is measured, which replaces nodes that make the same."""
    function, operator = SUMS[name]

    def alone(*args: Tensor) -> Tensor:
        return function(*args)[1]

    graph = lowered(alone, inputs())
    [*_, place] = recognised(graph, [*PROGRAMS, *SUMMING])
    assert place.operation.operator == operator
    assert_same(graph, [place], inputs(), alone)
    graph.nodes = list(place.operation.replaces)
    graph.buffers |= {one.name: one for one in (place.split.buffers if place.split else ())}
    [*_, again] = recognised(graph, [*PROGRAMS, *SUMMING])
    assert again.name == place.name
    assert again.operation.operator == operator


def windows_table(*args: Tensor) -> tuple[Tensor, ...]:
    """The bias of windows, which are the batches: few elements, and an entry of a table for each."""
    ds, dq = scores_gradient(*args)
    entry = (torch.arange(ds.shape[-1]) - torch.arange(ds.shape[-2])[:, None]) % 7
    return dq, torch.ops.aten.embedding_dense_backward(ds.sum(0).permute(1, 2, 0), entry, 7, -1, False)


@pytest.mark.parametrize("function", [of_batches, windows_table])
def test_a_sum_of_few_elements_over_many_batches_is_made_of_parts(function: Callable[..., tuple[Tensor, ...]]) -> None:
    """Whatever is made of it, such as a table: that has a sum for each entry of each batch otherwise."""
    args = [r(48, 2, 9, 4), r(48, 2, 7, 4), r(48, 2, 7, 5), r(48, 2, 9, 5), r(48, 2, 9), r(48, 2, 9)]
    graph = lowered(function, args)
    found = recognised(graph, [*PROGRAMS, *SUMMING])
    nodes = assert_same(graph, found, args, function)
    made = [node.operator for node in nodes if isinstance(node, ir.Operation)]
    assert sorted(made) == sorted([GRADIENT.operator, OVER_BATCHES.operator])
    [split] = [one.split for one in found if one.split is not None]
    assert split.buffers[0].sizes[0].as_int() == 16


def test_a_table_of_many_entries_has_no_sum_for_each() -> None:
    def function(*args: Tensor) -> tuple[Tensor, ...]:
        ds, dq = scores_gradient(*args)
        entry = torch.arange(ds.shape[-1]) * 20 + torch.arange(ds.shape[-2])[:, None]
        return dq, torch.ops.aten.embedding_dense_backward(ds.sum(0).permute(1, 2, 0), entry, 600, -1, False)

    graph = lowered(function, inputs())
    found = recognised(graph, [*PROGRAMS, *SUMMING])
    nodes = assert_same(graph, found, inputs(), function)
    assert any(isinstance(node, ir.Scatter) for node in nodes)
    assert OF_ENTRIES.operator not in [node.operator for node in nodes if isinstance(node, ir.Operation)]


def test_rows_that_are_padding_are_in_no_entry() -> None:
    """And what is added to a table that is not zeros is added to that."""

    def function(*args: Tensor) -> tuple[Tensor, ...]:
        *args, table = args
        ds, dq = scores_gradient(*args)
        entry = (torch.arange(ds.shape[-1]) + torch.arange(ds.shape[-2])[:, None]) % 7
        made = torch.ops.aten.embedding_dense_backward(ds.sum(0).permute(1, 2, 0), entry, 7, 2, False)
        flat = ds.sum(0).permute(1, 2, 0).flatten(0, 1)
        return dq, made, table.index_add(0, entry.flatten(), flat)

    args = [*inputs(), r(7, 3)]
    graph = lowered(function, args)
    found = recognised(graph, [*PROGRAMS, *SUMMING])
    nodes = assert_same(graph, found, args, function)
    made = [node.operator for node in nodes if isinstance(node, ir.Operation)]
    assert sorted(made) == sorted([GRADIENT.operator, OF_ENTRIES.operator, OF_ENTRIES.operator])


def test_an_entry_outside_of_a_table_is_found() -> None:
    def function(*args: Tensor) -> tuple[Tensor, ...]:
        *args, entry = args
        ds, dq = scores_gradient(*args)
        return dq, torch.ops.aten.embedding_dense_backward(ds.sum(0).permute(1, 2, 0), entry, 8, -1, False)

    args = [*inputs(), torch.full((20, 30), 9)]
    graph = lowered(function, args)
    made = applied(graph, *recognised(graph, [*PROGRAMS, *SUMMING]))
    assert OF_ENTRIES.operator in [node.operator for node in made.nodes if isinstance(node, ir.Operation)]
    with pytest.raises(IndexError):
        evaluate_graph(made, args)


def test_gradients_that_read_two_elements_of_the_scores_are_none() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        s = q @ k.mT
        return (torch.exp(s - lse[..., None]) * (g @ v.mT) * s.flip(-1)) @ k

    _, found = found_in(function, inputs(), [])
    assert not any(one.operation.operator == GRADIENT.operator for one in found)


# ---- what is needed anyway ------------------------------------------------------------------------------------------


def lasting_in(f: Callable[..., object], *args: Tensor, programs: list[Program] = PROGRAMS) -> tuple[int, int]:
    """Contractions of a graph that somebody needs whatever programs stand, and all of them."""
    graph = lowered(f, args)
    found = lasting(graph, Reader.of(graph), may_end(graph, programs))
    every = {node.out for node in graph.nodes if ir.is_contraction(node)}
    assert found <= every
    return len(found), len(every)


def test_what_leads_to_a_result_or_a_scan_lasts() -> None:
    x, w = torch.randn(2, 8, 8), torch.randn(2, 8, 8)
    assert lasting_in(lambda x, w: (x @ w).relu() @ w, x, w) == (1, 2)  # the result itself
    assert lasting_in(lambda x, w: ((y := x @ w).relu() @ w, y.exp()), x, w) == (2, 2)
    assert lasting_in(lambda x, w: ((y := x @ w).relu() @ w, (y + 1).cumsum(-1).sum(0)), x, w) == (2, 2)


def test_what_leads_to_the_end_of_a_program_may_go() -> None:
    """A sum is one, where a program of several contractions ends in a sum."""
    x, w = torch.randn(2, 8, 8), torch.randn(2, 8, 8)

    def summed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y.relu() @ w, y.exp().sum(-1)

    assert lasting_in(summed, x, w) == (2, 2)
    assert lasting_in(summed, x, w, programs=[*PROGRAMS, *SUMMING]) == (1, 2)


def test_one_of_many_pairs_is_looked_at() -> None:
    """A sum of contractions that is needed itself: all pairs of these were tried, and the verdict was the same."""
    tried = []

    def takes(operation: ir.Operation, out: str) -> bool:
        tried.append(out)
        return True

    def f(q: Tensor, k: Tensor, v: Tensor, kept: bool) -> tuple[Tensor, ...]:
        s = sum((q * n) @ (k + n).mT for n in range(1, 5))
        return (s @ v, s) if kept else (s @ v,)

    q, k, v = (torch.randn(2, 8, 8) for _ in range(3))
    near: list[Verdict] = []
    assert recognised(lowered(lambda q, k, v: f(q, k, v, True), (q, k, v)), PROGRAMS, near, takes) == []
    assert [one.reason for one in near if one.reason is Reason.NEEDED] == [Reason.NEEDED]
    few = len(tried)
    tried.clear()
    assert len(recognised(lowered(lambda q, k, v: f(q, k, v, False), (q, k, v)), PROGRAMS, None, takes)) == 1
    assert few <= len(PROGRAMS) < len(tried)
