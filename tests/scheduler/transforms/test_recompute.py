"""Matmuls that are recomputed, so that nobody stores them: values, what is launched, what is kept in memory, and what may
only be computed once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from kgen.build import triton
from kgen.capture.decompositions import TABLE
from kgen.cost import model
from kgen.host.interpret import Interpreted
from kgen.ir.index import Sizes
from kgen.ir.plan import Kernel, Schedule, members
from kgen.lowering import LoweringContext, lower, reinplace
from kgen.report.record import recording
from kgen.scheduler import Options, schedule
from kgen.scheduler.protocol import Attempt
from kgen.scheduler.transforms import recompute_trial
from kgen.scheduler.transforms.recompute import Around
from kgen.scheduler.transforms.subgraph_extraction import extract_subgraph
from kgen.verdict import FusionDemand, Outcome, Reason
from tests.codegen import gradients
from tests.full_row_cases import GPU, check, near, plan_of, r, rms_norm, softmax, wide
from tests.matmuls import compiled
from tests.slow import slow_but

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore::UserWarning")]


MUCH_FASTER = recompute_trial.ESTIMATED


@pytest.fixture(autouse=True)
def _trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates count as much as measurements: what is tested is matmuls recomputed, not how rarely they are."""
    monkeypatch.setattr(recompute_trial, "ESTIMATED", recompute_trial.SURE)


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates win over the library, and matmuls are cheap to compute."""
    seconds = recompute_trial._seconds

    def priced(attempt: Attempt, around: Around, steps: recompute_trial._Steps) -> float:
        return seconds(attempt, around, steps) * (1e-3 if first_kernels(attempt.plan) else 1.0)

    monkeypatch.setattr(model, "vendor_seconds", lambda problem: 1e9)
    monkeypatch.setattr(recompute_trial, "_least", lambda *args: 0.0)
    monkeypatch.setattr(recompute_trial, "_seconds", priced)


def kernels(plan: Schedule) -> list[Kernel]:
    return [k for step in plan.kernels for k in members(step)]


def first_kernels(plan: Schedule) -> list[Kernel]:
    """Those that compute matmuls only to reduce them."""
    made = [(k, out) for k in kernels(plan) if k.contracts for s in k.statements for out in s.outs]
    return [k for k, out in made if out.endswith("_first_sum")]


def matmuls(plan: Schedule) -> int:
    return sum(k.contracts for k in kernels(plan))


def largest(plan: Schedule) -> list[str]:
    """What is stored in memory with as many elements as the largest of it."""
    sizes = Sizes(plan.graph.size_hints)
    stored = {o for k in kernels(plan) for s in k.statements for o, kept in zip(s.outs, s.stored, strict=True) if kept}
    numbers = {o: sizes.bytes(plan.graph.buffers[o]) // plan.graph.buffers[o].dtype.itemsize for o in stored}
    return sorted(o for o, number in numbers.items() if number == max(numbers.values()))


def reasons(plan: Schedule) -> set[Reason]:
    return {v.reason for v in plan.verdicts if v.outcome in (Outcome.STORED, Outcome.RECOMPUTED)}


def causal(q: Tensor, k: Tensor) -> Tensor:
    y = q @ k.mT
    return y.masked_fill(torch.ones(y.shape[-2:], dtype=torch.bool).triu(1), -math.inf).softmax(-1)


def by_heads(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
    y = (x @ w).view(x.shape[0], -1, 64)
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * g


@dataclass(frozen=True)
class Case:
    """`inputs` by the length of a row."""

    f: Callable[..., Any]
    inputs: Callable[[int], tuple[Any, ...]]


def matmul(n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return r(21, 24, dtype=dtype), r(24, n, dtype=dtype)


half = torch.bfloat16
CASES = {
    "softmax": Case(softmax, lambda n: (r(2, 21, 24), r(2, n, 24), r(21, n) > 0.1)),
    "causal": Case(causal, lambda n: (r(2, n, 24), r(2, n, 24))),
    "log_softmax": Case(lambda x, w, b: F.log_softmax(x @ w + b, -1), lambda n: (*matmul(n), r(n))),
    "layer_norm": Case(
        lambda x, w, y, g, b: F.layer_norm(x @ w + y, w.shape[1:], g, b),
        lambda n: (*matmul(n), r(21, n), r(n), r(n)),
    ),
    "rms_norm": Case(rms_norm, lambda n: (*matmul(n), r(n))),
    "means": Case(lambda x, w: (lambda y: y - y.mean(-1, keepdim=True))(x @ w), matmul),
    "columns": Case(lambda x, w: (lambda y: y - y.mean(0))(x @ w), matmul),
    "three_dimensions": Case(
        lambda x, w, b: F.layer_norm(F.linear(x, w, b), w.shape[:1]), lambda n: (r(3, 7, 24), r(n, 24), r(n))
    ),
    "all_but_the_largest": Case(
        lambda x, w: (lambda y: torch.where(torch.arange(y.shape[1]) == y.argmax(-1, keepdim=True), 0, y))(x @ w), matmul
    ),
    "statistics_kept": Case(
        lambda x, w: torch.ops.aten.native_layer_norm(x @ w, w.shape[1:], None, None, 1e-5), matmul
    ),
    "log_sum_exp_kept": Case(lambda x, w: (lambda y: (torch.logsumexp(y, -1), y.softmax(-1)))(x @ w), matmul),
    "result_transposed": Case(lambda x, w: (x @ w).softmax(-1).t().contiguous(), matmul),
    "activation_after": Case(lambda x, w, g: F.silu(rms_norm(x, w, g)) + 1, lambda n: (*matmul(n), r(n))),
    "activation_before": Case(lambda x, w: F.gelu(x @ w).softmax(-1), matmul),
    "bfloat16": Case(softmax, lambda n: (r(2, 21, 24, dtype=half), r(2, n, 24, dtype=half), r(21, n) > 0.1)),
    "converted": Case(
        lambda x, w: (x @ w).float().softmax(-1), lambda n: (r(21, 24, dtype=half), r(24, n, dtype=half))
    ),
    "two_at_once": Case(
        lambda x, w, v: ((x @ w).softmax(-1), F.layer_norm(x @ v, v.shape[1:])), lambda n: (*matmul(n), r(24, n)),
    ),
    "one_after_the_other": Case(
        lambda x, w, v: ((x @ w).softmax(-1) @ v).softmax(-1), lambda n: (*matmul(n), r(n, 70))
    ),
    "backward_of_softmax": Case(
        lambda dy, v, p: (lambda g: (g - (g * p).sum(-1, keepdim=True)) * p)(dy @ v), lambda n: (*matmul(n), r(21, n))
    ),
}  # fmt: skip
TWO = ("two_at_once", "one_after_the_other")
LENGTHS = [*((name, n) for name in CASES for n in (33, 260)), ("softmax", 1100), ("layer_norm", 1100)]


@pytest.mark.every(3)
@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize(("name", "n"), LENGTHS[1:])
def test_plans(name: str, n: int) -> None:
    """Two kernels of each matmul and one that joins what the first has reduced; but for the result, nothing as large as the
    matmul is stored."""
    case = CASES[name]
    plan = plan_of(case.f, *case.inputs(n))
    assert not plan.calls
    count = 2 if name in TWO else 1
    assert (len(first_kernels(plan)), matmuls(plan)) == (count, 2 * count)
    assert len(plan.kernels) == (3 * count if name != "two_at_once" else len(plan.kernels))
    results = {getattr(o, "buffer", "") for o in plan.graph.outputs}
    assert name == "one_after_the_other" or set(largest(plan)) <= results
    assert Reason.RECOMPUTE_CHEAP in reasons(plan)


@pytest.mark.every(3)
@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize(("name", "n"), slow_but(lambda name, n: n == 33 or name in ("softmax", "layer_norm"), LENGTHS))
def test_values(name: str, n: int) -> None:
    check(CASES[name].f, *CASES[name].inputs(n), tolerance=2e-2 if name in ("bfloat16", "converted") else 5e-5)


@pytest.mark.usefixtures("cheap")
def test_heads() -> None:
    args = (r(21, 24), r(24, 256), r(64))
    plan = plan_of(by_heads, *args)
    assert (len(first_kernels(plan)), matmuls(plan)) == (1, 2)
    check(by_heads, *args)


@pytest.mark.usefixtures("cheap")
def test_rows_without_anything_in_them() -> None:
    mask = torch.zeros(40, 300, dtype=torch.bool)
    mask[3] = True
    mask[4, 1:] = True
    mask[:, 128:] = True
    check(softmax, r(2, 40, 24), r(2, 300, 24), mask)
    x, w = matmul(300)
    x[5, 3], x[6, 3] = math.inf, math.nan
    for name in ("log_softmax", "layer_norm"):
        f, (_, _, *rest) = CASES[name].f, CASES[name].inputs(300)
        check(f, x, w, *rest)


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("sizes", [(0, 40, 30), (20, 0, 30), (1, 40, 30), (20, 40, 1), (20, 1, 30)])
def test_short_axes(sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    check(lambda x, w: (x @ w).softmax(-1), r(m, k), r(k, n))


@pytest.mark.usefixtures("cheap")
def test_a_dropped_element_is_dropped_in_both() -> None:
    """Random numbers are functions of their place: what the second computation drops was not in the first one's sum."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = F.dropout(x @ w, 0.5)
        return y / (1 + y.square().sum(-1, keepdim=True))

    args = matmul(300)
    with recording() as recorder:
        got = compiled(f, *args)
    assert [len(first_kernels(graph.plan)) for graph in recorder.graphs] == [1]
    y = 2 * torch.where(got == 0, 0, args[0] @ args[1])
    near(got, y / (1 + y.square().sum(-1, keepdim=True)), 1e-5)


@pytest.mark.every(2)
@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "layer_norm", "rms_norm"])
def test_gradients(name: str) -> None:
    inputs = [a.requires_grad_() if a.is_floating_point() else a for a in CASES[name].inputs(300)]
    torch._dynamo.reset()
    fast = torch.compile(CASES[name].f, backend="kgen", options={"gpu_interpreter": True, "cache": False})
    got = gradients(fast)(*inputs)
    doubles = [a.detach().double().requires_grad_() if a.is_floating_point() else a for a in inputs]
    near(got, gradients(CASES[name].f)(*doubles), 1e-4)


# ---- what is computed once ------------------------------------------------------------------------------------------------

NOT_RECOMPUTED: dict[str, tuple[Callable[..., Any], Reason | None]] = {
    "matmul kept": (lambda x, w: (lambda y: (y, y.softmax(-1)))(x @ w), Reason.NEEDED),
    "elements kept": (lambda x, w: (lambda y: (y, F.layer_norm(y, w.shape[1:])))(F.gelu(x @ w)), Reason.NEEDED),
    "read by a matmul": (lambda x, w: (lambda y: (y @ w.t(), y.softmax(-1)))(x @ w), Reason.NEEDED),
    "read by a scan": (lambda x, w: (lambda y: y.softmax(-1) + y.cumsum(-1))(x @ w), Reason.NEEDED),
    "compared with its row": (lambda x, w: (lambda y: y == y.amax(-1, keepdim=True))(x @ w), Reason.UNEQUAL),
    "distance to its row": (
        lambda x, w: (lambda y: (y.amax(-1, keepdim=True) - y).sqrt())(x @ w), Reason.UNEQUAL,
    ),
    "logarithm of what is left": (lambda x, w: torch.log(1 - (x @ w).softmax(-1)), Reason.UNEQUAL),
    "sign of a difference": (lambda x, w: (lambda y: y - y.amax(-1, keepdim=True))(x @ w).relu().ceil(), Reason.UNEQUAL),
    "to integers": (
        lambda x, w: (lambda y: y / y.abs().amax(-1, keepdim=True) * 127)(x @ w).to(torch.int8), Reason.UNEQUAL,
    ),
    "rounded before": (lambda x, w: (x @ w).to(half).float().softmax(-1), Reason.UNEQUAL),
    "chosen by a comparison": (lambda x, w: (lambda y: y.where(y > 0, -math.inf).softmax(-1))(x @ w), Reason.UNEQUAL),
    "normalised twice": (lambda x, w: F.layer_norm(x @ w, w.shape[1:]).softmax(-1), Reason.CHAINED_REDUCTIONS),
    "deviations": (
        lambda x, w: (lambda y: y / (y - y.mean(-1, keepdim=True)).abs().sum(-1, keepdim=True))(x @ w),
        Reason.CHAINED_REDUCTIONS,
    ),
    "gated": (lambda x, w: (F.silu(x @ w) * (x @ (w + 1))).softmax(-1), Reason.TWO_MATMULS),
    "reduced only": (lambda x, w: (x @ w).logsumexp(-1), None),
    "not reduced": (lambda x, w: F.gelu(x @ w), None),
    "another row": (lambda x, w: (lambda y: y - y.amax(-1, keepdim=True).flip(0))(x @ w), None),
    "elements of another row": (lambda x, w: (lambda y: y.flip(0) - y.amax(-1, keepdim=True))(x @ w), None),
}  # fmt: skip


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("name", NOT_RECOMPUTED)
def test_what_is_computed_once(name: str) -> None:
    f, reason = NOT_RECOMPUTED[name]
    args = matmul(260)
    plan = plan_of(f, *args)
    if reason is not None or "reduced" in name:
        assert not first_kernels(plan)
    assert reason is None or reason in reasons(plan)
    if reason is not Reason.UNEQUAL:  # results may differ by more than a bit from those in float64
        check(f, *args, tolerance=1e-3)


@pytest.mark.usefixtures("cheap")
def test_stable_results_depend_on_no_tile() -> None:
    assert not first_kernels(plan_of(rms_norm, *matmul(300), r(300), options=replace(GPU, stable=True)))


@pytest.mark.usefixtures("cheap")
def test_rounding_as_eager_does_is_done_once() -> None:
    with recording() as recorder:
        options = {"gpu_interpreter": True, "cache": False, "numerics": "eager"}
        torch.compile(rms_norm, backend="kgen", options=options)(*matmul(300, half), r(300, dtype=half))
    assert not any(first_kernels(graph.plan) for graph in recorder.graphs)


@pytest.mark.usefixtures("cheap")
def test_switches() -> None:
    for off in ({"recompute": False}, {"fusion": False}, {"templates": False}, {"gpu_everywhere": False}):
        assert not first_kernels(plan_of(rms_norm, *matmul(300), r(300), options=replace(GPU, **off)))


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("wanted", [True, False])
def test_demands_are_left_as_they_are(wanted: bool) -> None:
    demands = (FusionDemand("aten.mm", "aten.mean", wanted),)
    assert not first_kernels(plan_of(rms_norm, *matmul(100), r(100), options=replace(GPU, demands=demands)))


@pytest.mark.usefixtures("cheap")
def test_sizes_that_the_call_knows() -> None:
    f = torch.compile(rms_norm, backend="kgen", dynamic=True, options={"gpu_interpreter": True, "cache": False})
    torch._dynamo.reset()
    for m in (21, 7):
        args = (r(m, 24), r(24, 300), r(300))
        near(f(*args), rms_norm(*wide(args)), 2e-5)


@pytest.mark.usefixtures("cheap")
def test_what_no_template_takes_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole parts of a run that is no power of two are in no tile."""
    args = (r(21, 24), r(24, 36 * 20), r(36))
    f = lambda x, w, g: (lambda y: y * y.square().mean(-1, keepdim=True) * g)((x @ w).view(21, 20, 36))  # noqa: E731
    assert not first_kernels(plan_of(f, *args))
    check(f, *args)


def test_a_trial_that_is_lost_leaves_the_plan_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full rows in a tile have buffers of the same names as parts of them."""
    monkeypatch.setattr(model, "vendor_seconds", lambda problem: 1e9)
    monkeypatch.setattr(recompute_trial, "_least", lambda *args: 0.0)
    args = CASES["softmax"].inputs(100)
    tried, untried = (plan_of(softmax, *args, options=replace(GPU, recompute=on)) for on in (True, False))
    assert Reason.RECOMPUTE_DEAR in reasons(tried)
    assert [(s.outs, s.stored) for k in kernels(tried) for s in k.statements] == [
        (s.outs, s.stored) for k in kernels(untried) for s in k.statements
    ]
    names = {out for k in kernels(tried) for s in k.statements for out in s.outs}
    assert all(tried.graph.buffers[name] == untried.graph.buffers[name] for name in names)
    check(softmax, *args)


@pytest.mark.usefixtures("cheap")
def test_each_matmul_is_judged_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def priced(attempt: Attempt, around: Around, steps: recompute_trial._Steps) -> float:
        recompute = 1.0 if around.node.out == "mm" else 9.0
        return recompute if first_kernels(attempt.plan) else 5.0

    monkeypatch.setattr(recompute_trial, "_seconds", priced)
    case = CASES["two_at_once"]
    plan = plan_of(case.f, *case.inputs(260))
    assert len(first_kernels(plan)) == 1
    decided = {v.producer: v.reason for v in plan.verdicts if v.reason in (Reason.RECOMPUTE_CHEAP, Reason.RECOMPUTE_DEAR)}
    assert decided == {"mm": Reason.RECOMPUTE_CHEAP, "mm_1": Reason.RECOMPUTE_DEAR}
    check(case.f, *case.inputs(260), tolerance=5e-5)


# ---- measured -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cheap")
def test_each_computation_is_measured_as_what_it_is() -> None:
    """The first one as a function of the operands to the reductions, the second as one of operands and reductions."""
    plan = plan_of(softmax, *CASES["softmax"].inputs(1100))
    first, again = [k for k in kernels(plan) if k.contracts]
    part = extract_subgraph(plan.graph, first)
    assert part is not None
    operands = {i.buffer for i in plan.graph.inputs}
    assert {i.buffer for i in part.inputs} == operands
    assert {o.buffer for o in part.outputs} == {"amax", "sum_1"}
    measured = schedule(replace(part, buffers=dict(part.buffers)), replace(GPU, recompute=False))
    assert [s.op for k in kernels(measured) if k.contracts for s in k.statements if s.kind == "partial"] == ["max", "sum"]
    part = extract_subgraph(plan.graph, again)
    assert part is not None
    assert {i.buffer for i in part.inputs} == operands | {"amax", "sum_1"}


# ---- for a GPU that is not here -------------------------------------------------------------------------------------------


def scores(k: int, n: int = 1024) -> Schedule:
    """Of a softmax on an H200, without tensors."""
    mode = FakeTensorMode()
    sizes = (((64, n, k), half), ((64, n, k), half), ((n, n), torch.bool))
    device = torch.device("cuda:0")
    args = [FakeTensor(mode, torch.empty(size, dtype=dtype, device="meta"), device) for size, dtype in sizes]
    with mode:
        gm = make_fx(softmax, decomposition_table=TABLE)(*args)
    return schedule(lower(reinplace(gm), LoweringContext()), Options())


def test_the_estimate_computes_short_sums_twice() -> None:
    """Where rows of 2048 scores are sums of 64 terms each, but not where of 4096; shorter ones fit in a tile."""
    plan = scores(64, 2048)
    assert (len(first_kernels(plan)), len(plan.kernels), len(plan.calls)) == (1, 3, 0)
    assert all(k.choice.template.startswith("triton_matmul_") for k in kernels(plan) if k.contracts)
    [decided] = [v for v in plan.verdicts if v.reason is Reason.RECOMPUTE_CHEAP]
    assert 200 < decided.measured[0] < 400 < decided.measured[1]
    plan = scores(4096)
    assert not first_kernels(plan)
    assert any(v.reason is Reason.RECOMPUTE_DEAR for v in plan.verdicts)


def test_an_estimate_has_to_be_far_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of this matmul is a tenth better; one of shorter rows was once, and wrong."""
    monkeypatch.setattr(recompute_trial, "ESTIMATED", MUCH_FASTER)
    plan = scores(64, 2048)
    assert not first_kernels(plan)
    [decided] = [v for v in plan.verdicts if v.reason is Reason.RECOMPUTE_DEAR]
    assert decided.measured[0] < decided.measured[1]


def test_there_is_no_trial_without_anything_to_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute_trial, "judged", lambda *args: pytest.fail("it was tried"))
    scores(4096)
    plan_of(lambda x, w: F.gelu(x @ w), r(300, 64), r(64, 300))
    plan_of(lambda x, w: (x @ w).logsumexp(-1), r(300, 64), r(64, 300))


def test_without_measurements_what_wins_too_little_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two computations take a lower bound at least: where that is too little for an estimate, no trial can win."""
    monkeypatch.setattr(recompute_trial, "ESTIMATED", MUCH_FASTER)
    monkeypatch.setattr(recompute_trial, "_seconds", lambda *args: 1.0)
    monkeypatch.setattr(recompute_trial, "_least", lambda *args: 1 / MUCH_FASTER)
    monkeypatch.setattr(recompute_trial, "judged", lambda *args: pytest.fail("it was tried"))
    plan = scores(64, 2048)
    assert any(v.reason is Reason.RECOMPUTE_DEAR for v in plan.verdicts)


@dataclass
class Asked:
    """Knows measured times, or none."""

    is_worth_asking: bool = True


def test_what_may_be_measured_is_tried_where_it_may_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute_trial, "ESTIMATED", MUCH_FASTER)
    oracle = Asked()
    assert recompute_trial._faster(Options()) == MUCH_FASTER
    assert recompute_trial._faster(Options(oracle=cast("Any", oracle))) == recompute_trial.SURE
    oracle.is_worth_asking = False
    assert recompute_trial._faster(Options(oracle=cast("Any", oracle))) == MUCH_FASTER


@pytest.mark.ptx
def test_both_kernels_compile_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(Interpreted, "__call__", lambda self, *args: (made.append(self.kernel), ())[1])
    torch._dynamo.reset()
    compiled(softmax, *(torch.empty(64, 2048, 64, dtype=half) for _ in range(2)), torch.empty(2048, 2048, dtype=torch.bool))
    assert len(made) == 3
    for kernel, built in zip(made, triton.compile_kernels(made, 90), strict=True):
        assert built.stack == 0
        assert ("map_" in kernel.source) == ("ACCUMULATOR" in kernel.source)
