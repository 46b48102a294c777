"""One library call gives all gradients of a convolution, unless templates take some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.cost.tuning_query import Place, TuningQuery, TuningResult, place
from kgen.ir import nodes as ir
from kgen.ir.plan import Call, Kernel, Schedule, members
from kgen.only import Only
from kgen.scheduler import Options
from kgen.scheduler.selection.choose import contraction_of
from kgen.scheduler.transforms.shared_calls import shared_calls
from kgen.verdict import Outcome, Reason, Verdict
from tests.convolution_problems import Problem, aten
from tests.kernels import plans
from tests.op_case import lowered

PROBLEM = Problem((8, 8), (3, 3), (1, 1), (1, 1), (1, 1), channels=4, made=6)


def gradients(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = aten.convolution_backward(g, x, w, list(b.shape), *PROBLEM.how, [True, True, True])
    return found


def planned(fn: Callable[..., Any], options: Options | None = None) -> Schedule:
    return plans(fn, *PROBLEM.args(), options=options).forward


def calls(plan: Schedule) -> list[ir.Extern]:
    return [step.node for step in plan.steps if isinstance(step, Call) and isinstance(step.node, ir.Extern)]


@pytest.mark.parametrize("gpu", [False, True])
def test_what_nobody_has_measured_is_the_one_call_that_it_is_in_eager(gpu: bool) -> None:
    """Nothing else runs, and nothing is copied."""
    plan = planned(gradients, Options(gpu_everywhere=gpu))
    [call] = calls(plan)
    assert len(plan.steps) == 1
    assert None not in call.outs
    assert call.args[-1] == (True, True, True)
    joined = [v for v in plan.verdicts if v.reason is Reason.LIBRARY_JOINS]
    assert [(v.producer, v.consumer) for v in joined] == [(call.outs[0], call.outs[1]), (call.outs[0], call.outs[2])]
    assert all(v.outcome is Outcome.FUSED for v in joined)


def test_sums_that_cost_a_library_a_pass_stay_nodes() -> None:
    """They are one kernel with what makes what they add up."""

    def gradients_of_multiple(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        return gradients(x, w, b, g * 2)

    graph = lowered(gradients_of_multiple, PROBLEM.args())
    apart = [
        replace(node, shared_call=replace(node.shared_call, sums=False))
        if ir.is_contraction(node) and node.shared_call
        else node
        for node in graph.nodes
    ]
    for nodes, count in ((graph.nodes, 3), (apart, 2)):
        [call] = shared_calls(nodes, graph)
        assert len(call.members) == count
        assert call.call.args[-1] == (True, True, count == 3)


def test_a_training_step_has_one_call_for_its_gradients() -> None:
    x, w, b, _ = PROBLEM.args()
    tensors = [t.requires_grad_() for t in (x, w, b)]
    plan = plans(lambda x, w, b: torch.relu(F.conv2d(x, w, b, padding=1)), *tensors, backward=True).schedules[1]
    assert [call.args[-1] for call in calls(plan)] == [(True, True, True)]


class Knows:
    """Measurements by which a template is faster for one of both contractions, and the library for the other."""

    is_worth_asking = True

    def __init__(self, taken: int) -> None:
        self.taken = taken

    def tuning_results(self, questions: Sequence[TuningQuery], graph: ir.Graph) -> dict[str, dict[Place, TuningResult]]:
        outs = [node.out for node in graph.nodes if ir.is_contraction(node)]
        return {q.step.name: {place({}): _result(q, contraction_of(members(q.step)[0]) == outs[self.taken])} for q in questions}

    def verdicts(self) -> list[Verdict]:
        return []


def _result(question: TuningQuery, wins: bool) -> TuningResult:
    problem = question.problems[0][0]
    if not wins:
        return TuningResult(None, (), 1, 1e-6, 1e-6)
    return TuningResult(problem.template.name, next(problem.template.configs(problem)).values, 1, 1e-6, 1e-3)


@pytest.mark.parametrize(("taken", "mask"), [(0, (False, True, True)), (1, (True, False, True))])
def test_the_library_computes_what_a_template_leaves(taken: int, mask: tuple[bool, ...]) -> None:
    plan = planned(gradients, Options(oracle=Knows(taken)))
    [call] = calls(plan)
    assert call.args[-1] == mask
    assert tuple(out is not None for out in call.outs) == mask
    assert len([step for step in plan.steps if isinstance(step, Kernel) and step.contracts]) == 1


def test_without_a_library_call_the_bias_has_its_sum() -> None:
    """Templates take both contractions: the sum is a loop, or what one of them adds up on its way."""
    plan = planned(gradients, Options(only=Only("cpp_matmul", lambda found: found[0])))
    assert not calls(plan)
    assert len([step for step in plan.steps if isinstance(step, Kernel) and step.contracts]) == 2
    assert not [v for v in plan.verdicts if v.reason is Reason.LIBRARY_JOINS]


def test_a_sum_in_memory_of_another_buffer_is_made_by_its_own_node() -> None:
    graph = lowered(gradients, PROBLEM.args())
    image, filters, bias = graph.nodes
    [found] = shared_calls(graph.nodes, graph)
    assert found.members == tuple(out for node in (image, filters, bias) for out in ir.outs(node))
    [name] = ir.outs(bias)
    graph.buffers[name] = replace(graph.buffers[name], alias_of=ir.outs(filters)[0])
    [found] = shared_calls(graph.nodes, graph)
    assert name not in found.members
    assert found.call.args[-1] == (True, True, False)


def test_what_is_made_before_the_call_is_no_part_of_it() -> None:
    graph = lowered(gradients, PROBLEM.args())
    image, filters, bias = graph.nodes
    [found] = shared_calls([bias, image, filters], graph)
    assert found.members == (*ir.outs(image), *ir.outs(filters))
