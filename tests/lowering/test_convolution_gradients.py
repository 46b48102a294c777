"""Convolutions, transposed ones and their gradients in the loop IR: sums of products, evaluated and compared with float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.nodes import SharedCall
from kgen.reference.evaluate import evaluate_graph
from kgen.reference.evaluate_value import EXACT
from tests.convolution_problems import Problem, aten, drawn
from tests.op_case import check, externs_of, lowered
from tests.slow import slow_but


def graph_of(problem: Problem) -> ir.Graph:
    def everything(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        return problem.all_of_it(x, w, b, g)

    return lowered(everything, problem.args())


def contractions(graph: ir.Graph) -> list[ir.Contraction]:
    return [node for node in graph.nodes if ir.is_contraction(node)]


@pytest.mark.parametrize("seed", slow_but(lambda n: n < 30, range(300)))
def test_all_gradients_are_sums_of_products(seed: int) -> None:
    """The evaluator compares each with its own library call as well."""
    problem = drawn(seed)
    args = problem.args()
    with torch.no_grad():
        graph = graph_of(problem)
        assert not externs_of(graph)
        assert len(contractions(graph)) == 3
        problem.assert_right(tuple(evaluate_graph(graph, args, policy=EXACT)), *args)


EVEN = Problem((8, 12), (4, 3), (2, 3), (1, 0), (1, 2), channels=3, made=2)


def image_gradient(problem: Problem) -> ir.Contraction:
    return contractions(graph_of(problem))[1]


def taps_of(problem: Problem) -> list[int | None]:
    return [v.extent.as_int() for v in image_gradient(problem).reduced[1:]]


def test_strides_leave_out_taps_that_meet_no_position() -> None:
    """Where each phase has as many points; else every tap is asked whether it meets one."""
    assert taps_of(EVEN) == [2, 1]
    assert taps_of(replace(EVEN, lengths=(9, 12))) == [4, 1]
    assert taps_of(replace(EVEN, dilation=(2, 3))) == [4, 3]  # strides and dilations have a factor in common
    assert taps_of(replace(EVEN, stride=(1, 1))) == [4, 3]


def test_a_gradient_of_stride_1_is_a_convolution_of_the_filters_read_backwards() -> None:
    node = image_gradient(replace(EVEN, stride=(1, 1)))
    [load] = [value for value in (node.rhs,) if value.op == "load"]
    steps = [ix.stride_of(e, v) for e, v in zip(load.attr[1][2:], node.reduced[1:], strict=True)]
    assert steps == [-ix.ONE, -ix.ONE]


def test_gradients_that_nobody_reads_are_not_made() -> None:
    def of_filters(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> Tensor:
        return aten.convolution_backward(g, x, w, [2], *EVEN.how, [True, True, True])[1]

    graph = lowered(of_filters, EVEN.args())
    [node] = contractions(graph)
    assert node.vendor is not None
    assert len(graph.nodes) == 1
    assert node.vendor.args[-1] == (False, True, False)


def gradients_of(problem: Problem) -> Callable[..., tuple[Tensor, ...]]:
    how = problem.how

    def gradients(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        return aten.convolution_backward(g, x, w, None, *how, [True, True, False])[:2]  # type: ignore[no-any-return]

    return gradients


def test_sizes_may_be_symbols() -> None:
    for problem in (EVEN, replace(EVEN, transposed=True), replace(EVEN, stride=(1, 1), groups=2)):
        x, w, _, g = problem.args()
        graph = check(gradients_of(problem), [x, w, g], tracing="symbolic")
        assert len(contractions(graph)) == 2


def test_a_shared_call_computes_what_is_asked_of_it() -> None:
    node = image_gradient(EVEN)
    assert isinstance(node.shared_call, SharedCall)
    image, _, bias = node.shared_call.call.outs
    some = node.shared_call.giving((bias, image))
    assert some.outs == (image, None, bias)
    assert some.args[-1] == (True, False, True)
    assert some.args[:-1] == node.shared_call.call.args[:-1]
