"""Operands that are stored first, whose rows begin in the middle of lines of the cache or which matmuls would compute: when
that is done, and what is launched."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels import plans
from matmuls import error
from torch import Tensor

import kgen
from kgen import pipeline
from kgen.cost.tuning_query import TuningResult
from kgen.host.interpret import Interpreted
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.plan import Kernel, Schedule, members
from kgen.only import Only, only
from kgen.report.record import Record, recording
from kgen.scheduler import Gpu, Options
from kgen.scheduler.selection import choose
from kgen.scheduler.selection.choose import contraction_of
from kgen.scheduler.transforms.operand_padding import BOTH, LEFT, RIGHT, aligned_of, possible_copies
from kgen.verdict import Reason

pytestmark = [pytest.mark.interpret, pytest.mark.cpu]
h = torch.float16
GPU = Options(gpu_everywhere=True, gpu=Gpu(arch=90))


def r(*shape: int, dtype: torch.dtype = h) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def e(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype)


def run(fn: Callable[..., Any], *args: Any, dynamic: tuple[int, ...] = ()) -> tuple[Any, Schedule]:
    """The result, and the plan; `dynamic` has a dimension of each of the first arguments."""
    torch._dynamo.reset()
    for one, dim in zip(args, dynamic, strict=False):
        torch._dynamo.mark_dynamic(one, dim)
    with recording() as recorder:
        step = torch.compile(fn, backend="kgen", fullgraph=True, options={"gpu_interpreter": True, "cache": False})
        got = step(*args)
    [graph] = recorder.graphs
    assert isinstance(graph, Record)
    return got, graph.plan


def plan_of(fn: Callable[..., Any], *args: Any, options: Options = GPU) -> Schedule:
    return plans(fn, *args, options=options).forward


def copies_in(plan: Schedule) -> list[ir.Buffer]:
    """The copies that the plan's kernels make."""
    made = {out for k in plan.kernels for one in members(k) for s in one.statements for out in s.outs}
    copies = {name for name, what in plan.graph.provenance.items() if what.role == "aligned"}
    return [buffer for name, buffer in plan.graph.buffers.items() if name in made & copies]


def loads_of(kernel: Kernel) -> list[tuple[Any, ...]]:
    return [load.attr for s in kernel.statements for load in vs.loads(s.roots)]


def rows_of(buffer: ir.Buffer) -> list[int]:
    """The strides in bytes but those of neighbours."""
    assert buffer.strides is not None
    strides = [s.as_int() for s, size in zip(buffer.strides, buffer.sizes, strict=True) if size != 1]
    return [s * buffer.dtype.itemsize for s in strides if s is not None and s != 1]


CASES: dict[str, tuple[Callable[..., Tensor], list[Tensor], str]] = {
    "odd_sum": (lambda x, w: F.relu(x @ w), [r(33, 71), r(71, 64)], LEFT),
    "odd_columns": (lambda x, w: (x @ w).float(), [r(32, 64), r(64, 71)], RIGHT),
    "both": (lambda x, w, b: F.gelu(x @ w + b), [r(33, 71), r(71, 35), r(35)], BOTH),
    "weights_by_rows": (lambda x, w: F.linear(x, w) * 2, [r(33, 71), r(50, 71)], BOTH),
    "left_transposed": (lambda x, w: x.t() @ w, [r(71, 33), r(71, 50)], BOTH),
    "batch": (lambda x, w: torch.bmm(x, w) + 1, [r(3, 17, 40), r(3, 40, 23)], BOTH),
}


@pytest.mark.parametrize("name", CASES)
def test_matmuls_of_copies_are_right(name: str) -> None:
    fn, args, copies = CASES[name]
    with only("triton_matmul", lambda configs: configs[0], copies=copies):
        got, plan = run(fn, *args)
    assert error(got, fn(*(a.double() for a in args))) < 2e-3
    made = copies_in(plan)
    assert len(made) == (2 if copies == BOTH else 1)
    assert all(row % 128 == 0 for buffer in made for row in rows_of(buffer))
    decided = [v for v in plan.verdicts if v.reason is Reason.ROWS_IN_LINES]
    assert [aligned_of(plan.graph, v.producer) for v in decided] == [buffer.name for buffer in made]


def test_short_rows_within_lines_are_read_where_they_are() -> None:
    """Rows of 64 bytes at multiples of 64: a copy of them has a line for each."""
    f: Callable[..., Tensor] = lambda x, w: F.relu(torch.bmm(x.transpose(0, 1), w))  # noqa: E731
    for length, offered in ((32, set()), (48, {LEFT, RIGHT, BOTH})):
        args = e(512, 6, length), e(6, length, length)
        plan = plan_of(f, *args, options=replace(GPU, only=Only("triton_matmul", lambda found: found[0])))
        [kernel] = (step for step in plan.kernels if isinstance(step, Kernel) and step.contracts)
        assert set(possible_copies(kernel, plan.graph, GPU.device(plan.graph, contraction_of(kernel)))) == offered


def test_nothing_is_copied_for_no_rows() -> None:
    with only("triton_matmul", lambda configs: configs[0], copies=LEFT):
        got, plan = run(lambda x, w: F.relu(x @ w), r(0, 71), r(71, 64))
    assert got.shape == (0, 64)
    assert not copies_in(plan)


def test_a_dynamic_number_of_rows() -> None:
    with only("triton_matmul", lambda configs: configs[0], copies=LEFT):
        x, w = r(33, 71), r(71, 64)
        got, plan = run(lambda x, w: F.relu(x @ w), x, w, dynamic=(0,))
    assert error(got, F.relu(x.double() @ w.double())) < 2e-3
    assert [row % 128 for buffer in copies_in(plan) for row in rows_of(buffer)] == [0]


def test_rows_of_a_length_that_only_the_call_knows_are_not_copied() -> None:
    with only("triton_matmul", lambda configs: configs[0], copies=LEFT):
        x, w = r(33, 71), r(71, 64)
        got, plan = run(lambda x, w: F.relu(x @ w), x, w, dynamic=(1, 0))
    assert error(got, F.relu(x.double() @ w.double())) < 2e-3
    assert not copies_in(plan)


def test_a_part_of_a_tensor_is_read_where_it_is() -> None:
    with only("triton_matmul", lambda configs: configs[0], copies=LEFT):
        x, w = r(33, 71), r(65, 64)
        got, plan = run(lambda x, w: x[:, :65] @ w, x, w)
    assert error(got, x[:, :65].double() @ w.double()) < 2e-3
    assert not copies_in(plan)


def test_copies_of_parts_are_not_on_offer() -> None:
    """A matmul with one of several matrices was priced as if it read a copy of that one, and then read no copy."""
    f: Callable[..., Tensor] = lambda x, v: F.relu(x @ v[1])  # noqa: E731
    plan = plan_of(f, e(512, 711), e(3, 711, 513), options=replace(GPU, only=Only("triton_matmul", lambda found: found[0])))
    [kernel] = (step for step in plan.kernels if isinstance(step, Kernel) and step.contracts)
    assert set(possible_copies(kernel, plan.graph, GPU.device(plan.graph, contraction_of(kernel)))) == {LEFT}


def test_what_a_kernel_makes_is_stored_in_aligned_rows_at_once() -> None:
    x, w = r(33, 71), r(71, 64)
    with only("triton_matmul", lambda configs: configs[0], copies=LEFT):
        got, plan = run(lambda x, w: F.gelu(F.gelu(F.gelu(x))) @ w, x, w)  # too much to be done again for every tile
    assert error(got, F.gelu(F.gelu(F.gelu(x.double()))) @ w.double()) < 2e-3
    assert len(plan.kernels) == 2
    assert len(copies_in(plan)) == 1


def test_one_copy_for_several_matmuls() -> None:
    x, w, v = r(33, 71), r(71, 64), r(71, 32)

    def fn(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return F.relu(x @ w), torch.tanh(x @ v)

    with only("triton_matmul", lambda configs: configs[0], copies=LEFT):
        got, plan = run(fn, x, w, v)
    for one, want in zip(got, fn(x.double(), w.double(), v.double()), strict=True):
        assert error(one, want) < 2e-3
    assert len(copies_in(plan)) == 1


def test_all_matmuls_and_sums_read_the_copy_of_what_a_kernel_makes() -> None:
    """A gradient of odd rows: both of its matmuls and a bias's sum read the copy, and nobody needs it as it was."""
    x, w, g = e(8000, 512), e(5001, 512), e(8000, 5001, dtype=torch.float32)

    def gradients(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        d = (g - g.exp() * g.sum(-1, keepdim=True)).to(torch.bfloat16)
        return d @ w, d.t() @ x, d.sum(0)

    plan = plan_of(gradients, x, w, g)
    [copy] = copies_in(plan)
    readers = [k for step in plan.kernels for k in members(step) if copy.name in {i[0] for i in loads_of(k)}]
    assert sum(k.contracts for k in readers) == 2
    kernels = [k for step in plan.kernels for k in members(step)]
    stored = {o for k in kernels for s in k.statements for o, kept in zip(s.outs, s.stored, strict=True) if kept}
    assert copy.name in stored
    assert plan.graph.provenance[copy.name].source not in stored


def test_sums_beside_matmuls_of_copies_are_right() -> None:
    x, g = r(40, 24), r(40, 71)

    def gradients(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        d = F.gelu(F.gelu(F.gelu(g)))
        return d.t() @ x, d.sum(0)

    with only("triton_matmul", lambda configs: configs[0], copies=LEFT):
        got, plan = run(gradients, x, g)
    for one, want in zip(got, gradients(x.double(), g.double()), strict=True):
        assert error(one, want) < 2e-3
    assert len(copies_in(plan)) == 1


def test_a_written_operand_is_copied_as_it_was_read() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first = F.relu(x @ w)
        x.mul_(2)
        return first, F.relu(x @ w)

    x, w = r(33, 71), r(71, 64)
    want = fn(x.double(), w.double())
    with only("triton_matmul", lambda configs: configs[0], copies=LEFT):
        got, _ = run(fn, x.clone(), w)
    for one, expected in zip(got, want, strict=True):
        assert error(one, expected) < 2e-3


def normed(x: Tensor, g: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(F.rms_norm(x, (x.shape[-1],), g), w, b))


def gated(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return torch.relu((F.silu(x) * y) @ w)


def scaled_right(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return torch.relu(x @ (w * s[:, None] + 1))


# The last ones are also stored in rows that begin at lines.
COMPUTED: dict[str, tuple[Callable[..., Tensor], list[Tensor], str, bool]] = {
    "norm": (normed, [r(33, 64), r(64), r(48, 64), r(48)], LEFT, False),
    "points": (gated, [r(33, 64), r(33, 64), r(64, 48)], LEFT, False),
    "transposed": (lambda x, y, w: torch.relu((F.silu(x) * y).t() @ w), [r(64, 64), r(64, 64), r(64, 48)], LEFT, False),
    "batch": (lambda x, y, w: torch.bmm(F.silu(x) * y, w) + 1, [r(3, 17, 64), r(3, 17, 64), r(3, 64, 24)], LEFT, False),
    "right": (scaled_right, [r(33, 64), r(64, 64), r(64)], RIGHT, False),
    "points_in_odd_rows": (gated, [r(33, 71), r(33, 71), r(71, 48)], LEFT, True),
    "right_of_copied_left": (scaled_right, [r(33, 71), r(71, 48), r(71)], BOTH, True),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_matmuls_of_what_is_computed_first_are_right(name: str) -> None:
    fn, args, copies, padded = COMPUTED[name]
    with only("triton_matmul", lambda configs: configs[0]):
        got, plan = run(fn, *args)
    assert not [v for v in plan.verdicts if v.reason is Reason.OPERAND_STORED]
    with only("triton_matmul", lambda configs: configs[0], copies=copies):
        got, plan = run(fn, *args)
    assert error(got, fn(*(a.double() for a in args))) < 2e-3
    assert len(plan.kernels) == 2  # what is stored first is made together
    assert len([v for v in plan.verdicts if v.reason is Reason.OPERAND_STORED]) == (not padded)
    assert bool(copies_in(plan)) == padded
    [matmul] = [one for step in plan.kernels for one in members(step) if one.contracts]
    [sums] = [s for s in matmul.statements if s.kind == "contraction"]
    assert all(value.op == "load" for value in (sums.value, *sums.factors))


def test_what_is_computed_by_demand_stays_so() -> None:
    x, y, w = r(33, 64), r(33, 64), r(64, 48)
    with kgen.require_fused("aten.mul", "aten.mm"), only("triton_matmul", lambda configs: configs[0], copies=LEFT):
        got, plan = run(gated, x, y, w)
    assert error(got, gated(x.double(), y.double(), w.double())) < 2e-3
    assert len(plan.kernels) == 1
    assert not [v for v in plan.verdicts if v.reason is Reason.OPERAND_STORED]


# ---- when copies are made -----------------------------------------------------------------------------------------------


def relu_matmul(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(x @ w)


def test_where_they_are_worth_it() -> None:
    assert len(copies_in(plan_of(relu_matmul, e(4096, 1001), e(1001, 4096)))) == 1
    assert len(copies_in(plan_of(relu_matmul, e(4096, 768), e(768, 50257)))) == 1


@pytest.mark.parametrize(
    "args",
    [
        (e(4096, 1024), e(1024, 4096)),  # rows of whole lines
        (e(16, 77), e(77, 64)),  # less work than a launch
    ],
    ids=["aligned", "small"],
)
def test_where_they_are_not(args: tuple[Tensor, Tensor]) -> None:
    assert not copies_in(plan_of(relu_matmul, *args))


def test_what_is_computed_first_where_a_faster_template_reads_it() -> None:
    """TMA cannot fetch what has to be computed; for few rows nothing is gained."""
    weights = e(4096), e(16384, 4096), e(16384)
    plan = plan_of(normed, e(4096, 4096), *weights)
    [matmul] = [k for k in plan.kernels if isinstance(k, Kernel) and k.contracts]
    assert matmul.choice is not None
    assert matmul.choice.template == "triton_matmul_warp_specialized"
    assert len(plan.kernels) == 2
    assert not plan.calls
    few = plan_of(normed, e(16, 4096), *weights)
    for one, count in ((plan, 1), (few, 0)):
        assert len([v for v in one.verdicts if v.reason is Reason.OPERAND_STORED]) == count
    assert not [
        v for v in plan_of(normed, e(4096, 4096), *weights, options=replace(GPU, copies=False)).verdicts
        if v.reason is Reason.OPERAND_STORED
    ]  # fmt: skip


def dynamic_plan(monkeypatch: pytest.MonkeyPatch, fn: Callable[..., Tensor], *args: Tensor) -> Schedule:
    """For a GPU that is not here, with a number of rows that the call says."""
    monkeypatch.setattr(pipeline, "scheduler_options", lambda graph, config: GPU)
    monkeypatch.setattr(Interpreted, "__call__", lambda self, *args: ())
    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(args[0], 0)
    with recording() as recorder, torch.no_grad():
        torch.compile(fn, backend="kgen", options={"gpu_interpreter": True, "cache": False})(*args)
    [graph] = recorder.graphs
    assert isinstance(graph, Record)
    return graph.plan


def both_gradients(dz: Tensor, z: Tensor, g: Tensor, x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Of a 1x1 convolution, between what is left of a norm's gradient and an activation's."""
    dy = ((dz.float() - z.float() * g) * g).to(dz.dtype)
    windows = ([0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    dx, dw, _ = torch.ops.aten.convolution_backward(dy, x, w, *windows, [True, True, False])
    return torch.where(x <= 0, 0, dx + r), dw


def test_what_is_stored_for_a_library_call_is_read_by_a_template() -> None:
    """The library computes `dw`, as turns out after it was asked whether `dx` had better read its operand from memory."""
    thin, wide = (e(32, channels, 56, 56).to(memory_format=torch.channels_last) for channels in (128, 256))
    weight = e(128, 256, 1, 1).to(memory_format=torch.channels_last)
    plan = plan_of(both_gradients, thin, thin, e(128, 1, 1), wide, weight, wide)
    [matmul] = [kernel for step in plan.kernels for kernel in members(step) if kernel.contracts]
    assert len(list(vs.loads([matmul.statements[0].value]))) == 1
    assert Reason.OPERAND_STORED in {verdict.reason for verdict in plan.verdicts if verdict.consumer == "convolution_backward"}


def logits_gradients(dy: Tensor, w: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Of a layer norm's rows too, which both passes over the rows of `dy w` need."""
    outs = torch.ops.aten.native_layer_norm_backward(dy @ w, x, [x.shape[1]], mean, rstd, g, g, [True, True, True])
    return *outs, dy.t() @ x


def test_operands_are_asked_about_again_when_no_template_took_the_kernel_that_was_asked() -> None:
    """Tiles of full rows have no estimate for sums over a vocabulary: without them, the matmul is asked again."""
    columns = (e(4096, 1, dtype=torch.float32), e(4096, 1, dtype=torch.float32), e(768))
    plan = plan_of(logits_gradients, e(4096, 50257), e(50257, 768), e(4096, 768), *columns)
    [copy] = copies_in(plan)
    read = [v.consumer for v in plan.verdicts if v.reason is Reason.ROWS_IN_LINES]
    assert len(read) == 2, f"{copy.name} is read by {read}"


def test_for_any_number_of_rows_only_what_has_rows_is_computed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights would be dequantised in memory for the few rows of the next call, too."""

    def dequantised(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return torch.relu(F.linear(x, w.to(torch.bfloat16)) * s)

    rows, weights = torch.zeros(4096, 1024, dtype=torch.bfloat16), torch.zeros(4096, 1024, dtype=torch.bfloat16)
    scale = torch.ones(4096, dtype=torch.bfloat16)
    plan = dynamic_plan(monkeypatch, dequantised, rows, weights.to(torch.int8), scale)
    assert not [v for v in plan.verdicts if v.reason is Reason.OPERAND_STORED]
    plan = dynamic_plan(monkeypatch, normed, rows, scale[:1024], weights, scale)
    matmuls = [s for step in plan.kernels for k in members(step) for s in k.statements if s.kind == "contraction"]
    assert all(s.value.op == "load" for s in matmuls), "a template, like the library, reads what is normed from memory"


def test_equal_layers_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates look at as many matmuls in six layers as in three."""
    looked_at: list[str] = []
    look = choose._problems

    def counted(kernel: Kernel, *args: Any) -> Any:
        looked_at.append(kernel.name)
        return look(kernel, *args)

    def layers(x: Tensor, g: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = x + F.rms_norm(x, (1024,), g) @ w
        return x

    def count(n: int) -> int:
        looked_at.clear()
        plan_of(layers, e(4096, 1024), e(1024), *(e(1024, 1024) for _ in range(n)))
        return len(looked_at)

    monkeypatch.setattr(choose, "_problems", counted)
    assert 0 < count(6) == count(3)


def test_they_can_be_switched_off() -> None:
    assert not copies_in(plan_of(relu_matmul, e(4096, 1001), e(1001, 4096), options=replace(GPU, copies=False)))


def test_none_on_a_cpu() -> None:
    assert not copies_in(plan_of(relu_matmul, e(4096, 1001), e(1001, 4096), options=Options()))


def test_what_was_measured_decides() -> None:
    class Measured:
        is_worth_asking = True

        def __init__(self, copies: str) -> None:
            self.copies = copies
            self.asked = 0

        def tuning_results(self, questions: Any, graph: ir.Graph) -> Any:
            self.asked += len(questions)
            return {q.step.name: {frozenset(): self._tuning_result(q)} for q in questions}

        def _tuning_result(self, question: Any) -> TuningResult:
            _, [problem, *_] = question.copies[RIGHT]
            config = next(iter(problem.template.configs(problem)))
            return TuningResult(problem.template.name, config.values, 1, 1e-6, 1e-3, self.copies)

        def verdicts(self) -> list[Any]:
            return []

    for copies in ("", RIGHT):
        oracle = Measured(copies)
        plan = plan_of(relu_matmul, e(4096, 768), e(768, 50257), options=replace(GPU, oracle=oracle))
        assert len(copies_in(plan)) == (copies == RIGHT)
        assert oracle.asked == 1
        [matmul] = [k for k in plan.kernels if isinstance(k, Kernel) and k.contracts]
        assert matmul.choice is not None


# ---- on a GPU -----------------------------------------------------------------------------------------------------------


NATIVE: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "odd_sum": (relu_matmul, [(1000, 1001), (1001, 1024)]),
    "odd_columns": (lambda x, w: (x @ w).float(), [(512, 768), (768, 5025)]),
    "all_odd": (lambda x, w, b: F.gelu(x @ w + b), [(1031, 1033), (1033, 1037), (1037,)]),
    "lines_only": (lambda x, w: F.relu(x @ w) ** 2, [(3000, 1000), (1000, 5000)]),
    "gradient": (lambda g, x: g.t() @ x, [(2049, 1001), (2049, 1003)]),
    "batch": (lambda x, w: torch.bmm(x, w) + 1, [(16, 500, 72), (16, 72, 500)]),
    "normed": (normed, [(1000, 512), (512,), (1024, 512), (1024,)]),
    "gated": (gated, [(1000, 512), (1000, 512), (512, 1024)]),
    "made_here": (lambda x, w: F.gelu(F.gelu(F.gelu(x))) @ w, [(1000, 1001), (1001, 1024)]),
    "horizontal_fusion": (lambda x, w, v: F.relu(x @ w) + torch.tanh(x @ v), [(1000, 1001), (1001, 1024), (1001, 1024)]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("template", ["triton_matmul", "triton_matmul_persistent", "triton_matmul_warp_specialized", None])
@pytest.mark.parametrize("name", NATIVE)
def test_right_on_a_gpu(name: str, template: str | None) -> None:
    fn, shapes = NATIVE[name]
    args = [r(*shape, dtype=torch.bfloat16).cuda() for shape in shapes]
    torch._dynamo.reset()
    forced = only(template, lambda configs: configs[0], copies=BOTH) if template else nullcontext()
    with forced:
        got = torch.compile(fn, backend="kgen", options={"cache": False, "poison": True})(*args)
    assert error(got, fn(*(a.double() for a in args))) < 1e-2
