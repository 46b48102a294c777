"""Matmuls that a consumer reads in parts, as gated units do: one kernel makes these as matmuls with a common epilogue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from matmuls import error
from torch import Tensor

import kgen
from kgen import errors
from kgen.commands.explain import watching
from kgen.cost import model
from kgen.ir.plan import Kernel
from kgen.ir.verify import verify
from kgen.scheduler import Options
from kgen.scheduler.protocol import Candidate, Changes, Decisions
from kgen.scheduler.transforms.subgraph_extraction import extract_subgraph
from kgen.verdict import Outcome, Reason, Verdict
from tests.kernels import plans
from tests.slow import slow_but

BACK_ENDS = {
    "cpp": pytest.param({"cache": False}, marks=pytest.mark.cpu, id="cpp"),
    "triton": pytest.param(
        {"cache": False, "gpu_interpreter": True}, marks=[pytest.mark.cpu, pytest.mark.interpret], id="triton"
    ),
}


def r(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.5).to(dtype)


def gated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    gate, up = F.linear(x, w, b).chunk(2, -1)
    return F.silu(gate) * up


def three(x: Tensor, w: Tensor) -> Tensor:
    a, b, c = (x @ w).split(24, -1)
    return a * b.sigmoid() + c


def with_a_hole(x: Tensor, w: Tensor) -> Tensor:
    c = x @ w
    return c[:, :24] * c[:, 48:].tanh()


def rows(x: Tensor, w: Tensor) -> Tensor:
    c = x @ w
    return c[:35] * c[35:]


def batches(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    a, b = torch.bmm(x, w).chunk(2, -1)
    return torch.where(a > 0, a, b) * s


def later(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Two consumers, one of which reads one part alone."""
    a, b = (x @ w).chunk(2, -1)
    return F.gelu(a) * b + y, b * 2


def heads(x: Tensor, w: Tensor) -> Tensor:
    """A rotation of halves of the full row, not of each head's."""
    a, b = (x @ w).view(70, 2, 36).unbind(1)
    return a * 0.3 - b


def of_columns(x: Tensor, w: Tensor) -> Tensor:
    a, b = (x.t() @ w.t()).chunk(2, -1)
    return torch.maximum(a, b)


CASES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "gated": (gated, [r(70, 40), r(72, 40), r(72)]),
    "gated_bf16": (gated, [r(70, 40, dtype=torch.bfloat16), r(72, 40, dtype=torch.bfloat16), r(72, dtype=torch.bfloat16)]),
    "odd": (gated, [r(69, 41), r(66, 41), r(66)]),
    "glu": (lambda x, w: F.glu(x @ w), [r(70, 40), r(40, 72)]),
    "three": (three, [r(70, 40), r(40, 72)]),
    "with_a_hole": (with_a_hole, [r(70, 40), r(40, 72)]),
    "rows": (rows, [r(70, 40), r(40, 72)]),
    "batches": (batches, [r(3, 70, 40), r(3, 40, 72), r(36)]),
    "later": (later, [r(70, 40), r(40, 72), r(70, 36)]),
    "heads": (heads, [r(70, 40), r(40, 72)]),
    "of_columns": (of_columns, [r(40, 70), r(72, 40)]),
    "one_row": (lambda x, w: F.glu(x @ w), [r(1, 40), r(40, 72)]),
}


def compiled(fn: Callable[..., Any], *args: Tensor, **options: Any) -> tuple[Any, list[Verdict]]:
    torch._dynamo.reset()
    with watching() as seen:
        got = torch.compile(fn, backend="kgen", fullgraph=True, options=options)(*args)
    return got, list(seen.report().verdicts)


def near(got: Any, fn: Callable[..., Any], args: list[Tensor]) -> None:
    got, wanted = (x if isinstance(x, tuple) else (x,) for x in (got, fn(*(a.double() for a in args))))
    for one, other in zip(got, wanted, strict=True):
        assert one.shape == other.shape
        assert error(one, other) < (6e-3 if args[0].dtype.itemsize == 2 else 1e-6)


@pytest.mark.every(3)
@pytest.mark.usefixtures("templates_win")
@pytest.mark.parametrize("options", BACK_ENDS.values())
@pytest.mark.parametrize("name", slow_but(lambda name: name not in ("odd", "glu", "later", "with_a_hole"), CASES))
def test_one_kernel_makes_the_parts(name: str, options: dict[str, Any]) -> None:
    fn, args = CASES[name]
    got, verdicts = compiled(fn, *args, **options)
    near(got, fn, args)
    assert [v.outcome for v in verdicts if v.reason is Reason.OUTPUT_SPLIT] == [Outcome.FUSED]
    plan = planned(fn, args)
    assert (len(plan.kernels), plan.calls) == (1, [])


def planned(fn: Callable[..., Any], args: list[Tensor]) -> Any:
    return plans(fn, *args, options=Options(gpu_everywhere=True)).forward


@pytest.mark.usefixtures("templates_win")
@pytest.mark.parametrize("options", BACK_ENDS.values())
def test_rounded_in_between_as_eager_does(options: dict[str, Any]) -> None:
    args = [r(70, 40).bfloat16(), r(72, 40).bfloat16(), r(72).bfloat16()]
    got, verdicts = compiled(gated, *args, numerics="eager", **options)
    assert any(v.reason is Reason.OUTPUT_SPLIT for v in verdicts)
    assert error(got, gated(*args)) < 4e-3


@pytest.mark.usefixtures("templates_win")
@pytest.mark.parametrize("options", BACK_ENDS.values())
def test_a_number_of_rows_that_only_the_call_knows(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    step = torch.compile(gated, backend="kgen", fullgraph=True, options=options)
    w, b = r(72, 40), r(72)
    for count in (70, 33, 5):
        x = r(count, 40)
        torch._dynamo.mark_dynamic(x, 0)
        near(step(x, w, b), gated, [x, w, b])


@pytest.mark.usefixtures("templates_win")
@pytest.mark.parametrize("options", BACK_ENDS.values())
def test_gradients(options: dict[str, Any]) -> None:
    """The matmul is saved for the backward, so it stays whole."""
    args = [t.requires_grad_() for t in (r(70, 40), r(72, 40), r(72))]
    got, _ = compiled(gated, *args, **options)
    wanted = gated(*args)
    ours = torch.autograd.grad(got.square().sum(), args)
    theirs = torch.autograd.grad(wanted.square().sum(), args)
    for one, other in zip(ours, theirs, strict=True):
        assert error(one, other) < 1e-5


@pytest.mark.cpu
@pytest.mark.usefixtures("templates_win")
def test_parts_beside_another_matmul() -> None:
    """The backward's matmuls share an operand, and one of them is read in parts: attempts at a schedule went on forever."""

    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return torch.stack([torch.cat([x, x.relu()]) @ w, torch.tanh(torch.cat([x, x.relu()]) @ v)])

    bf16 = torch.bfloat16
    args = [t.requires_grad_() for t in (r(32, 4, dtype=bf16), r(4, 32, dtype=bf16), r(4, 32, dtype=bf16))]
    torch._dynamo.reset()
    got = torch.autograd.grad(torch.compile(f, backend="kgen", options={"cache": False})(*args).float().sum(), args)
    want = torch.autograd.grad(f(*(a.float() for a in args)).sum(), args)
    assert all(error(one, other) < 1e-2 for one, other in zip(got, want, strict=True))


def test_attempts_that_find_out_nothing_end() -> None:
    matmul = Candidate("template", "mm")
    found = Changes(rejected={matmul: Verdict("mm", "", Outcome.STORED, Reason.NO_TEMPLATE)})
    known = Decisions().after(found)
    assert not known.is_open("template", "mm")
    with pytest.raises(errors.NoProgress, match="template of mm"):
        known.after(found)
    with pytest.raises(errors.NoProgress, match="nothing"):
        known.after(Changes())


def returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    c = x @ w
    return F.glu(c), c


def reduced(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    c = x @ w
    return F.glu(c), c.sum(0)


WHOLE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "returned": returned,
    "reduced": reduced,
    "overlapping": lambda x, w: (x @ w)[:, :-1] - (x @ w)[:, 1:],
    "four": lambda x, w: sum((x @ w).chunk(4, -1), start=torch.zeros(1)),
    "unequal": lambda x, w: (x @ w)[:, :30].sum(-1, keepdim=True).relu() * (x @ w)[:, 30:],
    "apart": lambda x, w: tuple(t.relu() for t in (x @ w).chunk(2, -1)),
    "by_index": lambda x, w: (x @ w)[:, (w[0, :36] > 0).long()] * (x @ w)[:, 36:],
    "interleaved": lambda x, w: (x @ w)[:, ::2] * (x @ w)[:, 1::2],
}


@pytest.mark.every(3)
@pytest.mark.usefixtures("templates_win")
@pytest.mark.parametrize("options", BACK_ENDS.values())
@pytest.mark.parametrize("name", WHOLE)
def test_matmuls_that_stay_whole(name: str, options: dict[str, Any]) -> None:
    args = [r(70, 40), r(40, 72)]
    got, verdicts = compiled(WHOLE[name], *args, **options)
    assert not any(v.reason is Reason.OUTPUT_SPLIT for v in verdicts)
    near(got, WHOLE[name], args)


@pytest.mark.parametrize("options", BACK_ENDS.values())
def test_the_library_gets_the_matmul_whole(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "vendor_seconds", lambda problem: 0.0)
    got, verdicts = compiled(gated, *CASES["gated"][1], **options)
    near(got, *CASES["gated"])
    assert any(v.outcome is Outcome.UNPROFITABLE and v.reason is Reason.VENDOR_FASTER for v in verdicts)
    plan = planned(*CASES["gated"])
    assert (len(plan.kernels), len(plan.calls)) == (1, 1)


@pytest.mark.usefixtures("templates_win")
@pytest.mark.parametrize("options", BACK_ENDS.values())
def test_what_is_forbidden_stays_apart(options: dict[str, Any]) -> None:
    with kgen.forbid_fused("aten.mm", "aten.mul"), kgen.forbid_fused("aten.addmm", "aten.mul"):
        got, verdicts = compiled(gated, *CASES["gated"][1], **options)
    near(got, *CASES["gated"])
    assert not any(v.reason is Reason.OUTPUT_SPLIT for v in verdicts)


@pytest.mark.usefixtures("templates_win")
def test_what_is_measured_is_the_whole_matmul_and_its_consumer() -> None:
    plan = planned(*CASES["gated"])
    (step,) = plan.kernels
    assert isinstance(step, Kernel)
    part = extract_subgraph(plan.graph, step)
    assert part is not None
    verify(part, "subgraph")
    assert sum(node.vendor is not None for node in part.nodes if hasattr(node, "vendor")) == 1
    assert len(part.outputs) == 1
