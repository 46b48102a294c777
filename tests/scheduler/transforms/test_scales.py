"""Scales of operands that leave a matmul's sum: what is launched and read, values, what stays inside and why."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from matmuls import compiled, error, forced
from torch import Tensor

import kgen
from kgen.cost import model
from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.plan import Kernel, Schedule, members
from kgen.scheduler import Options
from kgen.scheduler.selection.choose import problems
from kgen.scheduler.transforms.scale_hoisting import parts_of
from kgen.verdict import FusionDemand, Reason
from tests.kernels import plans
from tests.slow import slow_but

bf, h, f8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
BACK_ENDS = {"cpp": Options(), "triton": Options(gpu_everywhere=True)}
OPTIONS = {"cpp": {"cache": False}, "triton": {"cache": False, "gpu_interpreter": True}}
UNITS = {torch.float32: 2e-6, bf: 8e-3, h: 1e-3}
LEAVES, NEEDED = Reason.SCALE_LEAVES, Reason.SCALE_NEEDED


def r(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


pytestmark = pytest.mark.usefixtures("templates_win")


def rms(x: Tensor, g: Tensor | None = None) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), g)


def in_float32(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
    """As models write it: rounded before the weight, and after."""
    wide = x.float()
    return (g * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)) @ w


def gated(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(rms(x) @ w) * (rms(x) @ v)


def scales(plan: Schedule) -> set[tuple[str, Reason]]:
    """What became of operands' scales."""
    wanted = [reason for reason in Reason if reason.name.startswith("SCALE")]
    return {(v.consumer.split()[0], v.reason) for v in plan.verdicts if v.reason in wanted}


def operands(plan: Schedule) -> set[tuple[str, ...]]:
    """The operations of the matmuls' operands."""
    mains = [s for k in plan.kernels for one in members(k) for s in one.statements if s.kind == "contraction"]
    values = [value for s in mains for value in (s.value, *s.factors)]
    return {tuple(v.op for v in vs.topological([value]) if v.op not in ("load", "const")) for value in values}


# What is computed, from what, its kernels, and whether operands are then read as they are.
def cases(kind: torch.dtype) -> dict[str, tuple[Callable[..., Any], list[Tensor], int, bool]]:
    x, w, v = r(70, 48, dtype=kind), r(48, 64, dtype=kind), r(48, 64, dtype=kind) + 1
    row, column, g = r(70, dtype=kind).abs() + 1, r(64, dtype=kind), r(48, dtype=kind)
    bytes_ = r(48, 64).mul(50).to(torch.int8)
    heads = r(6, 35, 48, dtype=kind)
    return {
        "rms norm": (lambda x, w: rms(x) @ w, [x, w], 2, True),
        "rms norm with weight": (lambda x, w, g: rms(x, g) @ w, [x, w, g], 2, False),
        "rms norm in float32": (in_float32, [x, w, g], 2, False),
        "of three dimensions": (lambda x, w, b: F.gelu(F.linear(rms(x), w.t(), b)), [heads, w, column], 2, True),
        "gate and up": (gated, [x, w, v], 2, True),
        "rows": (lambda x, w, s: torch.relu((x * s[:, None]) @ w), [x, w, row], 1, True),
        "rows and columns": (lambda x, w, s, t: (x * s[:, None]) @ (w * t), [x, w, row, column], 1, True),
        "quotient": (lambda x, w, s: (x / s[:, None]) @ w, [x, w, row], 1, True),
        "share of a row": (lambda x, w: (x / x.sum(-1, keepdim=True)) @ w, [x.abs(), w], 2, True),
        "unit rows": (lambda x, w: F.normalize(x, dim=-1) @ w, [x, w], 2, True),
        "number": (lambda x, w: (x * 0.3) @ w, [x, w], 1, True),
        "quotient by a number": (lambda x, w: (x / 3) @ w, [x, w], 1, True),
        "sign": (lambda x, w: -x @ w, [x, w], 1, True),
        "number in a tensor": (lambda x, w, s: (x * s) @ w, [x, w, row[0]], 1, True),
        "batch": (lambda q, k, s: (q * s) @ k.mT, [heads, heads, heads[:, :1, :1]], 1, True),
        "bias and alpha": (lambda x, w, s, b: torch.addmm(b, x * s[:, None], w, alpha=2), [x, w, row, column], 1, True),
        "bytes by column": (lambda x, w, s: x @ (w.to(x.dtype) * s), [x, bytes_, column], 1, False),
        "summed as well": (lambda x, w, s: ((x * s[:, None]) @ w).float().exp().sum(-1), [x * 0.1, w * 0.1, row], 2, True),
    }  # fmt: skip


every = cache(cases)


TELLING = ("rms norm", "rms norm with weight", "gate and up", "share of a row", "bytes by column")


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("name", slow_but(lambda name: name in TELLING, every(bf)))
def test_kernels(name: str, back_end: str) -> None:
    fn, args, kernels, plain = every(bf)[name]
    plan = plans(fn, *args, options=BACK_ENDS[back_end]).forward
    assert (len(plan.kernels), len(plan.calls)) == (kernels, 0)
    assert any(reason is LEAVES for _, reason in scales(plan))
    assert (operands(plan) == {()}) == plain


@pytest.mark.every(2)
@pytest.mark.cpu
@pytest.mark.interpret
@pytest.mark.parametrize("kind", UNITS, ids=lambda kind: str(kind).removeprefix("torch."))
@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_values(back_end: str, kind: torch.dtype) -> None:
    """As near to float64 as eager is, and near to separate kernels."""
    wide = {name: case for name, case in every(kind).items() if kind is bf or name in TELLING}
    for name, (fn, args, _, _) in wide.items():
        torch._dynamo.reset()
        got = torch.compile(fn, backend="kgen", fullgraph=True, options=OPTIONS[back_end])(*args)
        want = fn(*(a.double() if a.is_floating_point() else a for a in args))
        assert error(got, want) < max(UNITS[kind], 1.5 * error(fn(*args), want)), name
        if name in TELLING:
            apart = {**OPTIONS[back_end], "prologues": False}
            torch._dynamo.reset()
            assert error(got, torch.compile(fn, backend="kgen", options=apart)(*args)) < 2 * UNITS[kind], name


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_statistics_make_the_scale(back_end: str) -> None:
    """The epilogue reads the reciprocal of the deviation, not what that is made of, and nothing else is stored before."""
    plan = plans(gated, r(70, 48, dtype=bf), *[r(48, 64, dtype=bf)] * 2, options=BACK_ENDS[back_end]).forward
    statistics, matmul = plan.kernels
    assert isinstance(matmul, Kernel)
    stored = [o for s in statistics.statements for o, kept in zip(s.outs, s.stored, strict=True) if kept]
    assert [len(plan.graph.buffers[name].sizes) for name in stored] == [1]
    assert not {v.op for s in matmul.statements for v in vs.topological(s.roots)} & {"rsqrt", "truediv"}


# ---- what stays inside -----------------------------------------------------------------------------------------------------


def inside(reason: Reason, fn: Callable[..., Any], *args: Tensor, options: Options | None = None) -> Schedule:
    plan = plans(fn, *args, options=options).forward
    assert {why for _, why in scales(plan)} == {reason}
    return plan


def test_under_a_condition() -> None:
    """The condition guards against the scale: without rows of zero length nothing is divided by 0."""

    def safe(x: Tensor, w: Tensor, n: Tensor) -> Tensor:
        return torch.where(n > 0, x / n, 0) @ w

    inside(Reason.SCALE_MASKED, safe, r(70, 48), r(48, 64), r(70, 1))
    x, n = r(6, 48), torch.tensor([[1.0], [0.0], [2.0], [0.0], [3.0], [1.0]])
    found = torch.compile(safe, backend="kgen", options=OPTIONS["cpp"])(x, r(48, 64), n)
    torch.testing.assert_close(found, safe(x, r(48, 64), n))


def test_padded() -> None:
    """A scale that is read only inside of the padding depends on what is summed over."""
    plan = plans(lambda x, w, s: F.pad(x * s[:, None], (0, 3)) @ w, r(70, 45), r(48, 64), r(70)).forward
    assert not scales(plan)
    assert any("where" in one for one in operands(plan))


def test_range_of_float16() -> None:
    """x * g may be infinite where x * r * g is not; elements of a float16 tensor are what they are."""
    x, w, g = r(70, 48, dtype=h), r(48, 64, dtype=h), r(48, dtype=h)
    inside(Reason.SCALE_FITS, lambda x, w, g: rms(x, g) @ w, x, w, g)
    inside(Reason.SCALE_FITS, lambda x, w, s: (x * s).to(h) @ w, x.float(), w, r(70, 1))
    inside(LEAVES, lambda x, w: rms(x) @ w, x, w)
    huge = torch.full((4, 48), 6e4, dtype=h)
    found = torch.compile(lambda x, w: rms(x) @ w, backend="kgen", options=OPTIONS["cpp"])(huge, w)
    assert error(found, rms(huge.double()) @ w.double()) < UNITS[h]


def test_quantised() -> None:
    """What is rounded to 8 bits is rounded with its scale; a scale behind that leaves."""
    x, w, s = r(70, 48, dtype=bf), r(48, 64, dtype=bf), r(70, 1).abs() + 1
    inside(Reason.SCALE_FITS, lambda x, w, s: (x / s).to(f8).to(bf) @ w, x, w, s)
    plan = inside(LEAVES, lambda x, w, s: ((x / s).to(f8).to(bf) * s.to(bf)) @ w, x, w, s)
    assert any("truediv" in one for one in operands(plan))


def test_needed_in_memory() -> None:
    """Whoever returns it, or adds it to something, has to have it; it is then read as it is."""
    x, w = r(70, 48), r(48, 64)
    plan = inside(NEEDED, lambda x, w: (rms(x) @ w, rms(x)), x, w)
    assert operands(plan) == {()}
    inside(NEEDED, lambda x, w, y: (rms(x) @ w, torch.exp(rms(x) + y)), x, w, x)


@pytest.mark.cpu
def test_overwritten_before_the_matmul() -> None:
    """What the second matmul would read instead of the normalised rows is no longer there when its weights are."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        x = torch.sin(x)
        y = rms(x)
        first = y @ w
        x[:4] = 1
        return first, y @ (w + x[:64]), x

    x, w = r(70, 64), r(64, 64)
    found = torch.compile(fn, backend="kgen", options=OPTIONS["cpp"])(x, w)
    for one, other in zip(found, fn(x.double(), w.double()), strict=True):
        assert error(one, other) < 2e-6


def test_what_remains_is_stored_once() -> None:
    """Of several matmuls, none computes again what is left."""
    x, w, g = r(70, 48), r(48, 64), r(48)
    plan = inside(Reason.SCALE_REMAINS, lambda x, w, v, g: (rms(x, g) @ w, rms(x, g) @ v), x, w, w + 1, g)
    assert operands(plan) == {()}


def test_summed_as_well() -> None:
    """The gradient of a bias is a sum of the very operand, and rides on its matmul."""
    plan = inside(Reason.SCALE_SUMMED, lambda dy, x: ((dy * 3).t() @ x, (dy * 3).sum(0)), r(70, 64), r(70, 48))
    assert len(plan.kernels) == 1


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("numerics", ["stable", "eager"])
def test_numerics(numerics: str, back_end: str) -> None:
    """The program's own order: the operand is rounded with its scale."""
    inside(
        Reason.SCALE_ORDER, lambda x, w: rms(x) @ w, r(70, 48), r(48, 64), options=replace(BACK_ENDS[back_end], scales=False)
    )
    fn, (x, w) = (lambda x, w: (x * 0.3) @ w), (r(70, 48, dtype=bf), torch.eye(48, dtype=bf))
    found = torch.compile(fn, backend="kgen", options={**OPTIONS[back_end], "numerics": numerics})(x, w)
    assert torch.equal(found, (x.float() * 0.3).to(bf))


def test_sums_over_nothing() -> None:
    """They are 0, whatever the scale."""
    fn = lambda x, w, s: (x * s[:, None]) @ w  # noqa: E731
    plan = plans(fn, r(70, 0), r(0, 64), r(70)).forward
    assert not scales(plan)


def test_layer_norms_stay() -> None:
    """A mean that is taken off first is no factor."""
    plan = plans(lambda x, w: F.layer_norm(x, (48,)) @ w, r(70, 48), r(48, 64)).forward
    assert ("left", LEAVES) in scales(plan)
    assert any("sub" in one for one in operands(plan))


def test_parts() -> None:
    """Multiplications are taken apart, sums are not; of equal values there is one."""
    m, k = ix.var("m", 8), ix.var("k", 8)
    x = vs.load("x", (m.expr(), k.expr()), torch.float32)
    s = vs.load("s", (m.expr(),), torch.float32)
    inside = frozenset([k])
    both = vs.call("mul", vs.call("mul", s, x), vs.call("add", x, s))
    assert parts_of(both, inside).rest is vs.call("mul", x, vs.call("add", x, s))
    assert parts_of(both, inside).scales == (s,)
    assert parts_of(s, inside).rest is None
    assert parts_of(vs.call("truediv", s, x), inside).scales == ()


# ---- numbers that are not finite -------------------------------------------------------------------------------------------


def test_not_finite() -> None:
    """Rows are finite where eager's are; those with NaNs are NaN."""
    x, w, s = r(7, 48), r(48, 64), torch.tensor([0.0, float("inf"), float("nan"), 2.0, 0.0, 1.0, 1.0])
    x[4, 3], x[5, 0], x[6, 1] = float("inf"), float("nan"), float("-inf")

    def fn(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return (x * s[:, None]) @ w

    found, want = torch.compile(fn, backend="kgen", options=OPTIONS["cpp"])(x, w, s), fn(x, w, s)
    assert torch.equal(found.isfinite(), want.isfinite())
    same = torch.tensor([0, 2, 3, 4, 5, 6])  # finite numbers times infinity, added up, may be infinite
    torch.testing.assert_close(found[same], want[same], equal_nan=True)
    zeros = torch.zeros(3, 48)
    quotient = torch.compile(lambda x, w: (x / x.norm(dim=-1, keepdim=True)) @ w, backend="kgen", options=OPTIONS["cpp"])
    assert quotient(zeros, w).isnan().all()


# ---- demands, sizes, gradients, costs ----------------------------------------------------------------------------------------


def test_demands() -> None:
    x, w = r(70, 48, dtype=bf), r(48, 64, dtype=bf)

    def made(wanted: bool) -> Schedule:
        demands = (FusionDemand("aten.rsqrt", "aten.mm", wanted),)
        return plans(lambda x, w: rms(x) @ w, x, w, options=Options(demands=demands)).forward

    together, apart = made(True), made(False)
    matmul = next(k for k in together.kernels if k.contracts)
    assert "rsqrt" in {v.op for s in matmul.statements for v in vs.topological(s.roots)}
    assert operands(apart) == {()}
    assert not any(reason is LEAVES for _, reason in scales(apart))


@pytest.mark.cpu
@pytest.mark.interpret
@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_dynamic_rows(back_end: str) -> None:
    run = torch.compile(lambda x, w: rms(x) @ w, backend="kgen", dynamic=True, options=OPTIONS[back_end])
    for rows in (33, 70, 5):
        assert error(run(r(rows, 48), r(48, 64)), rms(r(rows, 48)) @ r(48, 64)) < 2e-6


@pytest.mark.cpu
def test_gradients() -> None:
    def loss(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return (F.silu(rms(x, g) @ w) * (rms(x, g) @ v)).square().sum()

    given = [r(70, 48), r(48, 64), r(48, 64) + 1, r(48)]
    found, want = ([t.clone().to(kind).requires_grad_() for t in given] for kind in (torch.float32, torch.float64))
    torch.compile(loss, backend="kgen", options=OPTIONS["cpp"])(*found).backward()
    loss(*want).backward()
    for one, other in zip(found, want, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert error(one.grad, other.grad) < 1e-5


def test_the_library_needs_the_scaled_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is estimated with the kernel that makes it, of which several matmuls have a share."""
    monkeypatch.undo()
    x, w = r(256, 256, dtype=bf), r(256, 256, dtype=bf)
    gpu = BACK_ENDS["triton"]

    def library(fn: Callable[..., Any]) -> float:
        with monkeypatch.context() as patch:
            patch.setattr(model, "vendor_seconds", lambda problem: 1e9)
            plan = plans(fn, x, w, options=replace(gpu, grouped=False)).forward
        kernel = next(k for step in plan.kernels for k in members(step) if k.contracts)
        assert isinstance(kernel, Kernel)
        device = gpu.device(plan.graph, kernel.statements[-1].outs[0])
        return model.apart_seconds(next(p for p in problems(kernel, plan.graph, device, None)[0]))

    bare = library(lambda x, w: x @ w)
    one, several = library(lambda x, w: rms(x) @ w), library(lambda x, w: (rms(x) @ w, rms(x) @ w.t()))
    assert one - bare == pytest.approx(2 * (several - bare), rel=1e-2)
    assert one - bare > model.LAUNCH["cuda"]


@pytest.mark.cpu
def test_explained(capsys: pytest.CaptureFixture[str]) -> None:
    kgen.explain(lambda x, w, s: (rms(x) @ w, torch.where(s > 0, x / s, 0) @ w), r(70, 48), r(48, 64), r(70, 1))
    text = " ".join(capsys.readouterr().out.split())
    assert f"1 x fused because {LEAVES.value}" in text
    assert f"left operand illegal: {Reason.SCALE_MASKED.value}" in text


# ---- on a GPU ----------------------------------------------------------------------------------------------------------------


@pytest.mark.interpret
@pytest.mark.cpu
@pytest.mark.parametrize("template", ["triton_matmul_tiles", "triton_matmul"])
def test_operands_by_tma(template: str) -> None:
    """Rows are fetched by TMA, where a norm in front of them would have to pass through registers."""
    x, w = r(72, 64, dtype=bf), r(64, 136, dtype=bf)
    with forced(template) as made:
        found = compiled(lambda x, w: F.gelu(rms(x) @ w), x, w)
        assert error(found, F.gelu(rms(x.double()) @ w.double())) < UNITS[bf]
    (kernel,) = made.matmuls
    main = kernel.source[kernel.source.index("for ") : kernel.source.index("dot(")]
    assert not re.search(r"rsqrt|scale", main)
    if template == "triton_matmul_tiles":
        assert sum("descriptor" in line or ".load([" in line for line in main.splitlines()) >= 2
