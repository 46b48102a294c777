"""Graphs in which most of a program stands: the verdict names what is in its way, and the user's line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from kgen.device import Device
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.program import Program
from kgen.scheduler import Options
from kgen.scheduler.transforms import recognition
from kgen.scheduler.transforms.graph_reader import Reader
from kgen.scheduler.transforms.recognition import MOST_CANDIDATES, recognised
from kgen.templates import registry
from kgen.verdict import FusionDemand, Outcome, Reason, Verdict
from tests.kernels import plans
from tests.op_case import lowered
from tests.scheduler.transforms.test_programs import ATTENTION, LAYERS, TEMPLATES, inputs, r, written_out

OPTIONS = Options(cpu=Device("cpu", isa="generic"))


def near(f: Callable[..., object], *args: Tensor, program: Program = ATTENTION) -> list[Verdict]:
    found: list[Verdict] = []

    def call(*tensors: Tensor) -> object:
        return f(*tensors)

    assert recognised(lowered(call, args or inputs()), [program], found) == []
    return found


def scanned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).cumsum(-1).softmax(-1) @ v


def scanned_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1).cumsum(-1) @ v


def sorted_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).sort(-1).values.softmax(-1) @ v


def less_the_mean(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    return (s - s.mean(-1, keepdim=True)).softmax(-1) @ v


def scaled_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1) * v[..., :1].mT) @ v


def over_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-2) @ v


def adjacent_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    return (s + s.roll(1, -1)).softmax(-1) @ v


def scores_kept(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = q @ k.mT
    return s.softmax(-1) @ v, s


def weights_summed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = (q @ k.mT).softmax(-1)
    return p @ v, p.sum(0)


def in_float64(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).double().softmax(-1).to(v.dtype) @ v


def plus_a_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.baddbmm(v[:, 0, :1], (q[:, 0] @ k[:, 0].mT).softmax(-1), v[:, 0])


NEAR = {
    scanned: (Reason.NOT_ELEMENTWISE, "aten.cumsum"),
    scanned_weights: (Reason.NOT_ELEMENTWISE, "aten.cumsum"),
    sorted_scores: (Reason.EXTERN_CALL, "aten.sort"),
    less_the_mean: (Reason.NOT_ELEMENTWISE, "aten.mean"),
    scaled_weights: (Reason.NOT_SOFTMAX, "mul of the weights"),
    over_rows: (Reason.NOT_SOFTMAX, "aten.sum"),
    adjacent_scores: (Reason.INDEX_MISMATCH, "aten.bmm"),
    scores_kept: (Reason.NEEDED, ""),
    weights_summed: (Reason.NEEDED, "aten.sum"),
    in_float64: (Reason.STEP_TYPES, "cast of the weights"),
    plus_a_bias: (Reason.STEP_TYPES, "aten.baddbmm"),
}


@pytest.mark.parametrize("f", NEAR, ids=lambda f: f.__name__)
def test_the_operator_in_the_way_is_named(f):
    reason, blocker = NEAR[f]
    [verdict] = near(f)
    assert (verdict.outcome, verdict.reason) == (Outcome.ILLEGAL, reason)
    assert verdict.detail.startswith(blocker), verdict
    assert verdict.change


def test_loops_of_no_axis_are_named():
    def of_batches(x: Tensor, w: Tensor, w2: Tensor) -> Tensor:
        return torch.relu(x @ w) @ w2

    [verdict] = near(of_batches, r(3, 7, 10), r(3, 10, 30), r(3, 30, 5), program=LAYERS)
    assert verdict.reason is Reason.SPACE_MISMATCH


def summed(x: Tensor, first: Tensor, last: Tensor) -> Tensor:
    return torch.relu(sum(x @ w for w in first)) @ last


def test_a_step_is_looked_for_among_few_contractions():
    def of(number: int) -> list[Tensor]:
        return [r(7, 10), r(number, 10, 30), r(30, 5)]

    found: list[Verdict] = []
    [place] = recognised(lowered(summed, of(MOST_CANDIDATES)), [LAYERS], found)
    assert len(place.operation.replaces) > 1
    assert found == []
    [verdict] = near(summed, *of(MOST_CANDIDATES + 1), program=LAYERS)
    assert verdict.reason is Reason.MANY_STEPS


def residual(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    for first, last in zip(w, v, strict=True):
        x = x + torch.relu(x @ first) @ last
    return x


def test_the_search_grows_no_faster_than_the_number_of_layers(monkeypatch: pytest.MonkeyPatch):
    """The sum along residual connections reads every layer's result, through which the search could go on to all others."""
    tried: list[object] = []
    search = recognition._Search._with
    monkeypatch.setattr(recognition._Search, "_with", lambda *args: tried.append(args) or search(*args))

    def tries(layers: int) -> int:
        tried.clear()
        recognised(lowered(residual, [r(4, 8), r(layers, 8, 8), r(layers, 8, 8)]), [LAYERS, ATTENTION])
        return len(tried)

    assert 0 < tries(24) < 2.5 * tries(12)


def without_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.relu(q @ k.mT) @ v


def of_an_input(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q[:, :, :, :12].softmax(-1) @ k[:, :, :12]


def one_after_the_other(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT) @ F.softmax(v, -1)


@pytest.mark.parametrize("f", [without_softmax, of_an_input, one_after_the_other], ids=lambda f: f.__name__)
def test_nothing_is_said_of_what_is_far_from_it(f):
    assert near(f) == []


@pytest.fixture
def registered():
    registry.add(TEMPLATES["plain_attention_cpp"])
    yield
    registry.remove("plain_attention_cpp")


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("change", "reason"), [
    ({"stable": True}, Reason.STABLE_ORDER),
    ({"scales": False}, Reason.SCALE_ORDER),
    ({"demands": (FusionDemand("aten.bmm", "aten.exp", wanted=False),)}, Reason.FORBIDDEN),
])  # fmt: skip
def test_what_the_user_asked_for_keeps_it_apart(change, reason):
    plan = plans(written_out, *inputs(), options=replace(OPTIONS, **change)).forward
    assert [v.outcome for v in plan.verdicts if v.reason is reason and not v.consumer] == [Outcome.UNPROFITABLE]
    assert all(step.choice is None or step.choice.template != "plain_attention_cpp" for step in plan.kernels)


@pytest.mark.cpu
@pytest.mark.usefixtures("registered")
def test_explain_says_what_is_in_the_way_and_where(capsys):
    with kgen.config.override(cache=False):
        kgen.explain(scanned, *inputs())
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count(Reason.NOT_ELEMENTWISE.value) == 1
    assert f"illegal: {Reason.NOT_ELEMENTWISE.value} (aten.cumsum.default at test_near_programs.py:" in printed
    assert ".cumsum(-1)" in printed
    assert "to change it: move that operator" in printed


def smoothed(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """What moving averages leave, of which each reads 25 elements of the one before it."""
    scores = x @ w
    for _ in range(4):
        scores = scores - F.avg_pool1d(scores, 25, 1, 12)
    return scores @ v


def test_averages_of_averages_are_not_inlined():
    graph = lowered(smoothed, [r(3, 7, 10), r(3, 10, 60), r(3, 60, 5)])
    reader, taken = Reader.of(graph), [node for node in graph.nodes if isinstance(node, ir.Pointwise)]
    assert max(len(vs.loads([node.value])) for node in taken) >= 25
    assert max(len(vs.loads([reader.inlined(node.value)])) for node in taken) <= 100
