"""Reductions of a matmul that run on its tiles: what becomes parts, what is joined where, and what must stay apart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from kgen import errors
from kgen.build import triton
from kgen.cost import model
from kgen.ir.index import Sizes
from kgen.ir.plan import Kernel, Schedule, members
from kgen.only import only
from kgen.report.record import recording
from kgen.scheduler import Options
from kgen.scheduler.transforms import tile_partials
from kgen.templates.contract import Config
from kgen.verdict import FusionDemand, Outcome, Reason
from tests.full_row_cases import GPU, plan_of, r, wide
from tests.matmuls import forced
from tests.slow import slow_but

pytestmark = [pytest.mark.interpret, pytest.mark.cpu, pytest.mark.filterwarnings("ignore::UserWarning")]

OPTIONS = {"gpu_interpreter": True, "cache": False}
CPP, CPP_OPTIONS = Options(), {"cache": False}


@pytest.fixture(autouse=True)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The tile that templates choose: small ones, so that small matmuls have several. Templates win over the library."""
    m, n = wanted = getattr(request, "param", (32, 32))
    monkeypatch.setattr(model, "vendor_seconds", lambda problem: 1e9)
    monkeypatch.setattr(model, "seconds", lambda problem, config: abs(config.BLOCK_M - m) + abs(config.BLOCK_N - n))
    return wanted


def compiled(f: Callable[..., Any], *args: Any, options: dict[str, Any] = OPTIONS) -> Any:
    torch._dynamo.reset()
    return torch.compile(f, backend="kgen", fullgraph=True, options=options)(*args)


def check(f: Callable[..., Any], *args: Any, tolerance: float = 1e-5, options: dict[str, Any] = OPTIONS) -> None:
    """Against eager in float64."""
    got, wanted = compiled(f, *args, options=options), f(*wide(args))
    for one, other in zip(*([t if isinstance(t, tuple) else (t,) for t in (got, wanted)]), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def kernels(plan: Schedule) -> list[Kernel]:
    assert not plan.calls
    return [k for step in plan.kernels for k in members(step)]


def parts(plan: Schedule) -> list[str]:
    """The partial reductions on tiles, all of them in matmuls' kernels."""
    found = [(k, s) for k in kernels(plan) for s in k.statements if s.kind == "partial"]
    assert all(k.contracts and s.block > 0 for k, s in found)
    return [s.op for _, s in found]


def largest(plan: Schedule) -> int:
    """Elements of the largest buffer that the kernels write."""
    sizes = Sizes(plan.graph.size_hints)
    stored = {o for k in kernels(plan) for s in k.statements for o, kept in zip(s.outs, s.stored, strict=True) if kept}
    return max(sizes.bytes(plan.graph.buffers[o]) // plan.graph.buffers[o].dtype.itemsize for o in stored)


@dataclass(frozen=True)
class Case:
    """`kernels` are those of the whole function, `ops` the partial reductions among them."""

    f: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    ops: tuple[str, ...]
    kernels: int = 2
    stored: bool = False  # whether the matmul, or what is made of each of its elements, is needed itself
    demand: tuple[str, str] | None = None  # of what would be left to the kernel that reads the rows again

    @property
    def demands(self) -> tuple[FusionDemand, ...]:
        return () if self.demand is None else (FusionDemand(*self.demand, True),)


def rows(dtype: torch.dtype = torch.float32, m: int = 70, n: int = 90, k: int = 40) -> Callable[[], tuple[Any, ...]]:
    return lambda: (r(m, k, dtype=dtype), r(k, n, dtype=dtype))


LANGUAGES = pytest.mark.parametrize("options", [pytest.param(OPTIONS, id="triton"), pytest.param(CPP_OPTIONS, id="cpp")])
CASES = {
    "sum_of_exp": Case(lambda x, w: (x @ w).exp().sum(-1), rows(), ("sum",)),
    "max": Case(lambda x, w: (x @ w).amax(-1), rows(), ("max",)),
    "min_kept": Case(lambda x, w: (x @ w).amin(-1, keepdim=True), rows(), ("min",)),
    "product": Case(lambda x, w: (1 + (x @ w) / 100).prod(-1), rows(), ("prod",)),
    "any": Case(lambda x, w: (x @ w > 1.5).any(-1), rows(), ("any",)),
    "all": Case(lambda x, w: (x @ w > -1.5).all(0), rows(), ("any",)),  # torch turns it into not any
    "log_sum_exp": Case(lambda x, w: torch.logsumexp(x @ w, -1), rows(), ("max", "sum")),
    "argmax": Case(lambda x, w: (x @ w).argmax(-1), rows(), ("argmax",)),
    "min_and_place": Case(lambda x, w: tuple((x @ w).min(0)), rows(), ("argmin",)),
    "squares": Case(lambda x, w, b: F.linear(x, w, b).square().sum(-1), lambda: (r(70, 40), r(90, 40), r(90)), ("sum",)),
    "norm": Case(lambda x, w: torch.linalg.vector_norm(x @ w, dim=-1), rows(), ("sum",)),
    "variance": Case(lambda x, w: torch.var_mean(x @ w, -1), rows(), ("welford",)),
    "columns": Case(lambda x, w: F.gelu(x @ w).sum(0), rows(), ("sum",)),
    "columns_of_3d": Case(lambda x, w: F.gelu(F.linear(x, w)).sum((0, 1)), lambda: (r(3, 35, 40), r(90, 40)), ("sum",)),
    "loss": Case(lambda x, w, y: (x @ w - y).square().mean(), lambda: (*rows()(), r(70, 90)), ("sum",)),
    "mean_max": Case(lambda x, w: (x @ w).amax(), rows(), ("max",)),
    "batch": Case(lambda x, w: torch.bmm(x, w).amax(-1), lambda: (r(3, 70, 40), r(3, 40, 90)), ("max",)),
    "batch_rows": Case(lambda x, w: torch.bmm(x, w).logsumexp(1), lambda: (r(3, 70, 40), r(3, 40, 90)), ("max", "sum")),
    "batch_all": Case(lambda x, w: torch.bmm(x, w).logsumexp((1, 2)), lambda: (r(3, 70, 40), r(3, 40, 90)), ("max", "sum")),
    "batch_summed": Case(lambda x, w: torch.bmm(x, w).sum((0, 2)), lambda: (r(3, 70, 40), r(3, 40, 90)), ("sum",)),
    "heads_in_tile": Case(lambda x, w: (x @ w).view(70, 12, 8).square().sum(-1), rows(n=96), ("sum",)),
    "heads_of_tiles": Case(lambda x, w: (x @ w).view(70, 2, 64).amax(-1), rows(n=128), ("max",)),
    "heads_argmax": Case(lambda x, w: (x @ w).view(70, 2, 64).argmax(-1), rows(n=128), ("argmax",)),
    "heads_log_sum_exp": Case(lambda x, w: (x @ w).view(70, 12, 8).logsumexp(-1), rows(n=96), ("max", "sum")),
    "heads_variance": Case(lambda x, w: torch.var((x @ w).view(70, 12, 8), -1), rows(n=96), ("welford",)),
    "transposed": Case(
        lambda x, w: (x.t() @ w.t()).square().sum(-1), lambda: (r(40, 70), r(90, 40)), ("sum",),
    ),
    "result_transposed": Case(lambda x, w: ((x @ w).t() * 2).amax(0), rows(), ("max",)),
    "kept": Case(lambda x, w: (lambda y: (y, y.sum(-1)))(F.relu(x @ w)), rows(), ("sum",), stored=True),
    "kept_transposed": Case(
        lambda x, w: (lambda y: (y.t().contiguous(), y.amax(-1)))(x @ w), rows(), ("max",), stored=True
    ),
    "residual": Case(
        lambda x, w, y: (lambda h: (h, h.square().sum(-1)))(x @ w + y), lambda: (*rows()(), r(70, 90)), ("sum",), stored=True
    ),
    "rms_norm": Case(
        lambda x, w, b, g: F.rms_norm(F.linear(x, w, b), (1100,), g),  # longer than a tile that holds full rows
        lambda: (r(2, 35, 40), r(1100, 40), r(1100), r(1100)), ("sum",), 3, True, ("aten.addmm", "aten.mean"),
    ),
    "layer_norm": Case(
        lambda x, w: F.layer_norm(F.linear(x, w), (1100,)), lambda: (r(70, 40), r(1100, 40)), ("welford",), 3, True,
        ("aten.mm", "aten.var_mean"),
    ),
    "followed": Case(lambda x, w, b: torch.rsqrt((x @ w).square().mean(-1) + b) * 3, lambda: (*rows()(), r(70)), ("sum",)),
    "both_ways": Case(lambda x, w: (lambda y: (y.sum(0), y.amax(1)))(x @ w), rows(), ("sum", "max"), 3),
    "one_column": Case(lambda x, w: (x @ w).sum(0), rows(n=1), ("sum",)),
    "one_row": Case(lambda x, w: (x @ w).amax(-1), rows(m=1), ("max",)),
    "primes": Case(lambda x, w: torch.logsumexp(x @ w, -1), rows(m=61, n=127, k=31), ("max", "sum")),
    "whole_tiles": Case(lambda x, w: torch.logsumexp(x @ w, -1), rows(m=64, n=96, k=32), ("max", "sum")),
    "bfloat16": Case(lambda x, w: torch.logsumexp((x @ w).float(), -1), rows(torch.bfloat16), ("max", "sum")),
}  # fmt: skip


# Of the cases, those that are compiled for a CPU each time.
TELLING = (
    "any", "log_sum_exp", "argmax", "min_and_place", "norm", "variance", "columns", "batch_rows", "heads_in_tile",
    "heads_log_sum_exp", "kept_transposed", "rms_norm", "layer_norm",
)  # fmt: skip


@pytest.mark.every(5)
@pytest.mark.parametrize("options", [pytest.param(GPU, id="triton"), pytest.param(CPP, id="cpp")])
@pytest.mark.parametrize("name", CASES)
def test_plans(name: str, options: Options) -> None:
    case = CASES[name]
    plan = plan_of(case.f, *case.inputs(), options=replace(options, demands=case.demands))
    assert len(plan.kernels) == case.kernels
    assert tuple(sorted(parts(plan))) == tuple(sorted(case.ops))
    x, w = case.inputs()[:2]
    elements = x.numel() * w.numel() // 40**2 if w.shape[0] == 40 or 40 in w.shape else None
    if elements is not None and x.dim() == 2:
        assert (largest(plan) >= elements) == case.stored


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("name", "options"),
    slow_but(lambda name, options: options is OPTIONS or name in TELLING, itertools.product(CASES, (OPTIONS, CPP_OPTIONS))),
    ids=lambda value: {id(OPTIONS): "triton", id(CPP_OPTIONS): "cpp"}.get(id(value)),
)
def test_values(name: str, options: dict[str, Any]) -> None:
    case = CASES[name]
    with nullcontext() if case.demand is None else kgen.require_fused(*case.demand):
        check(case.f, *case.inputs(), tolerance=2e-2 if name == "bfloat16" else 2e-5, options=options)


@pytest.mark.parametrize("isa", [pytest.param("avx2", marks=pytest.mark.slow), "generic"])
@pytest.mark.parametrize(
    "name",
    slow_but(
        lambda name: name in ("log_sum_exp", "columns"), ["log_sum_exp", "argmax", "columns", "min_and_place", "heads_in_tile"]
    ),
)
def test_values_with_other_instructions(name: str, isa: str) -> None:
    check(CASES[name].f, *CASES[name].inputs(), tolerance=2e-5, options={**CPP_OPTIONS, "isa": isa})


@pytest.mark.parametrize(
    "name",
    slow_but(
        lambda name: name == "argmax", ("log_sum_exp", "argmax", "columns", "min_and_place", "variance", "both_ways", "kept")
    ),
)
@pytest.mark.parametrize("shape", [(1, 300, 40), (9, 300, 40), (300, 3, 40), (300, 200, 1100), (0, 30, 40), (30, 40, 0)])
def test_values_of_few_rows_and_long_sums(name: str, shape: tuple[int, int, int]) -> None:
    """A few rows or columns go other ways through the engine, and so do sums of so many terms by several threads."""
    m, n, k = shape
    if 0 in (m, n) and name in ("log_sum_exp", "argmax", "min_and_place", "both_ways"):
        pytest.skip("eager has no extreme of nothing")
    check(CASES[name].f, r(m, k), r(k, n) / max(1, k) ** 0.5, tolerance=1e-4, options=CPP_OPTIONS)


def test_rows_that_are_read_again_are_reduced_then() -> None:
    """A normalisation holds each row in registers: sums made on tiles would save no traffic, and cost a launch."""
    for name in ("rms_norm", "layer_norm"):
        plan = plan_of(CASES[name].f, *CASES[name].inputs())
        assert (len(plan.kernels), parts(plan)) == (2, [])


@pytest.mark.every(4)
@pytest.mark.parametrize("tiles", [(32, 32), (64, 32), (32, 64), (128, 128), (16, 128)], indirect=True)
@pytest.mark.parametrize("name", ["log_sum_exp", "argmax", "columns", "heads_in_tile", "variance", "batch_all"])
def test_tiles_of_any_shape(name: str, tiles: tuple[int, int]) -> None:
    case = CASES[name]
    plan = plan_of(case.f, *case.inputs())
    axis = {"columns": 0}.get(name, 1)
    blocks = {s.block for k in kernels(plan) for s in k.statements if s.kind == "partial"}
    assert blocks == ({8} if name == "heads_in_tile" else {tiles[axis]})
    check(case.f, *case.inputs(), tolerance=2e-5)


@pytest.mark.every(3)
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("name", ["log_sum_exp", "argmax", "columns", "heads_in_tile", "loss"])
@pytest.mark.parametrize("template", ["triton_matmul_persistent", "triton_matmul_tiles"])
def test_templates_whose_epilogues_get_tiles_in_parts(name: str, template: str) -> None:
    def smallest(configs: Sequence[Config]) -> Sequence[Config]:
        return sorted((c for c in configs if c.EPILOGUE_SUBTILES > 1), key=lambda c: c.BLOCK_M * c.BLOCK_N)[:1]

    m, n = 136, 264
    args = [r(m, 40), r(40, n), *([r(m, n)] if name == "loss" else [])]
    f = CASES[name].f
    if name == "heads_in_tile":
        f, args[1] = (lambda x, w: (x @ w).view(m, 32, 8).square().sum(-1)), r(40, 256)
    with forced(template, smallest) as made:
        check(f, *args, tolerance=2e-5)
    [matmul] = made.matmuls
    assert "_parts" in matmul.source


def test_matmuls_with_an_operand_in_common() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return (F.silu(x @ w) * (x @ v)).square().sum(-1)

    args = (r(70, 40), r(40, 90), r(40, 90))
    plan = plan_of(f, *args)
    assert parts(plan) == ["sum"]
    assert len(plan.kernels) == 2
    check(f, *args)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("template", ["triton_matmul", "triton_matmul_persistent"])
def test_kernels_compile_for_a_gpu(template: str) -> None:
    cases = [CASES[name].f for name in ("log_sum_exp", "argmax", "variance")]
    with forced(template, lambda configs: [c for c in configs if c.BLOCK_N == 128][:1], runs=False) as made:
        for f in cases:
            compiled(f, r(200, 64, dtype=torch.float16), r(64, 264, dtype=torch.float16))
    assert len(made.matmuls) == len(cases)
    for kernel in triton.compile_kernels(made.kernels, 90):
        assert kernel.stack == 0


# ---- special values -------------------------------------------------------------------------------------------------


def masked_log_sum_exp(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
    return torch.logsumexp(x @ w + mask, -1)


@LANGUAGES
def test_log_sum_exp_of_infinities(options: dict[str, Any]) -> None:
    mask = torch.zeros(8, 90)
    mask[0, :32] = -math.inf  # a tile with nothing in it
    mask[1] = -math.inf
    mask[2, 40] = math.inf
    mask[3, 5] = math.nan
    mask[4, :80] = -math.inf
    mask[5] = -1e30
    mask[6, 3:] = -200.0
    check(masked_log_sum_exp, r(8, 40), r(40, 90), mask, options=options)


@LANGUAGES
def test_places_of_nans_and_equals(options: dict[str, Any]) -> None:
    x, w = torch.ones(6, 4), torch.zeros(4, 90)
    w[:, [40, 70]] = 1.0  # equal in two tiles: the first one counts
    mask = torch.zeros(6, 90)
    mask[1, 33] = mask[1, 80] = math.nan
    mask[2] = -math.inf
    mask[3, 89] = math.inf
    for f in (lambda x, w, mask: (x @ w + mask).argmax(-1), lambda x, w, mask: (x @ w + mask).argmin(-1)):
        assert torch.equal(compiled(f, x, w, mask, options=options), f(x, w, mask))


@LANGUAGES
def test_padding_does_not_count(options: dict[str, Any]) -> None:
    """Past the end of the axis the tile holds zeros, and what the epilogue makes of them."""
    check(lambda x, w: ((x @ w) + 5).sum(-1), r(33, 8), r(8, 33), options=options)
    check(lambda x, w: (-1 - (x @ w).square()).amax(-1), r(33, 8), r(8, 33), options=options)
    check(lambda x, w: (3 + (x @ w)).prod(0), r(33, 8), r(8, 33), tolerance=1e-4, options=options)


@LANGUAGES
def test_results_repeat(options: dict[str, Any]) -> None:
    args = (r(130, 40), r(40, 200))
    f = CASES["log_sum_exp"].f
    assert torch.equal(compiled(f, *args, options=options), compiled(f, *args, options=options))


def test_results_do_not_depend_on_threads() -> None:
    threads = torch.get_num_threads()
    for name, shape in itertools.product(("log_sum_exp", "columns"), ((130, 200, 40), (9, 2000, 300))):
        m, n, k = shape
        args, found = (r(m, k), r(k, n)), []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(compiled(CASES[name].f, *args, options=CPP_OPTIONS))
        torch.set_num_threads(threads)
        assert all(torch.equal(found[0], one) for one in found)


# ---- picked elements ------------------------------------------------------------------------------------------------


def cross_entropy(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), target)


def targets(rows: int, classes: int) -> Tensor:
    return torch.randint(0, classes, (rows,))


def loss(x: Tensor, w: Tensor, target: Tensor, **how: Any) -> Tensor:
    """Of logits in 16 bits, as a language model has them."""
    return F.cross_entropy(F.linear(x, w).float(), target, **how)


def log_probabilities(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.log_softmax(F.linear(x, w), -1).gather(-1, target[..., None])[..., 0]


def capped(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(30 * torch.tanh(F.linear(x, w) / 30), target)


def ignored(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return loss(x, w, target.where(target % 3 > 0, -100))


def maximum_and_sum(x: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w).float()
    top = y.amax(-1, keepdim=True)
    return top, (y - top).exp().sum(-1)


half = torch.bfloat16
# What is computed, of how many rows and columns in which type, and in how many kernels.
PICKING: dict[str, tuple[Callable[..., Any], tuple[int, ...], torch.dtype, int]] = {
    "mean": (loss, (37, 1003), half, 3),
    "sum": (lambda *args: loss(*args, reduction="sum"), (37, 1003), half, 3),
    "each": (lambda *args: loss(*args, reduction="none"), (37, 1003), half, 2),
    "ignored": (ignored, (37, 1003), half, 4),
    "ignored_index": (lambda *args: loss(*args, ignore_index=7, reduction="none"), (70, 90), half, 2),
    "exact": (cross_entropy, (70, 90), torch.float32, 3),
    "one_tile": (cross_entropy, (70, 20), torch.float32, 2),
    "log_probabilities": (log_probabilities, (70, 90), torch.float32, 2),
    "log_probabilities_of_a_batch": (log_probabilities, (2, 35, 90), torch.float32, 2),
    "capped": (capped, (70, 90), torch.float32, 3),
}


@pytest.mark.every(3)
@LANGUAGES
@pytest.mark.parametrize("name", slow_but(lambda name: name in ("mean", "ignored", "one_tile", "capped"), PICKING))
def test_a_cross_entropy_stores_no_logits(name: str, options: dict[str, Any]) -> None:
    f, (*rows, columns), dtype, count = PICKING[name]
    args = (r(*rows, 40, dtype=dtype), r(columns, 40, dtype=dtype), torch.randint(0, columns, rows))
    plan = plan_of(f, *args, options=CPP if options is CPP_OPTIONS else GPU)
    assert sorted(parts(plan)) == ["max", "sum", "sum"]
    assert sum(len(members(step)) for step in plan.kernels) == count  # small ones may share a launch
    assert largest(plan) <= math.prod(rows) * -(-columns // 32)
    check(f, *args, tolerance=2e-2 if dtype is half else 1e-5, options=options)


@LANGUAGES
def test_the_sums_of_a_softmax_alone(options: dict[str, Any]) -> None:
    args = (r(37, 40, dtype=half), r(1003, 40, dtype=half), targets(37, 1003))
    plan = plan_of(maximum_and_sum, *args, options=CPP if options is CPP_OPTIONS else GPU)
    assert set(parts(plan)) == {"max", "sum"}
    assert (len(plan.kernels), largest(plan)) == (2, 37 * 32)
    check(maximum_and_sum, *args, tolerance=2e-2, options=options)


@LANGUAGES
def test_a_pick_of_each_column(options: dict[str, Any]) -> None:
    def f(x: Tensor, w: Tensor, row: Tensor) -> Tensor:
        y = x @ w
        return y.amax(0) - y.gather(0, row[None])[0]

    args = (r(70, 40), r(40, 90), targets(90, 70))
    assert sorted(parts(plan_of(f, *args))) == ["max", "sum"]
    check(f, *args, options=options)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("template", ["triton_matmul_persistent", "triton_matmul_tiles"])
def test_a_cross_entropy_of_tiles_in_parts(template: str) -> None:
    def smallest(configs: Sequence[Config]) -> Sequence[Config]:
        return sorted((c for c in configs if c.EPILOGUE_SUBTILES > 1), key=lambda c: c.BLOCK_M * c.BLOCK_N)[:1]

    with forced(template, smallest) as made:
        check(cross_entropy, r(136, 40), r(264, 40), targets(136, 264))
    assert "_parts" in made.matmuls[0].source


@pytest.mark.ptx
def test_a_cross_entropy_waits_for_no_memory() -> None:
    """The main loop has all of its stages, which an assertion in the epilogue would take from it, and nothing is spilled."""

    def persistent(configs: Sequence[Config]) -> Sequence[Config]:
        return [c for c in configs if (c.BLOCK_M, c.BLOCK_N, c.STAGES, c.FLATTEN) == (128, 256, 4, True)][:1]

    with forced("triton_matmul_persistent", persistent, runs=False) as made:
        compiled(loss, r(512, 1024, dtype=half), r(8192, 1024, dtype=half), targets(512, 8192))
    (found,) = triton.compile_kernels(made.matmuls, 90)
    assert found.shared > 4 * (128 + 256) * 64 * 2
    assert found.stack == 0


def test_one_kernel_joins_the_parts_of_long_rows() -> None:
    """They are neighbours in memory: a warp holds a row of them, so that neither the maximum nor the sum needs a second one."""
    plan = plan_of(lambda x, w: torch.logsumexp(x @ w, -1), r(1024, 16), r(16, 8192))
    assert sorted(parts(plan)) == ["max", "sum"]
    assert len(plan.kernels) == 2


def test_a_pick_of_what_tiles_find_out_is_made_afterwards() -> None:
    """Where the index of what is picked waits for the rows' maxima, the matmul is stored."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return y.gather(1, y.argmax(-1, keepdim=True))

    assert largest(apart(f, r(70, 40), r(40, 90))) == 70 * 90


def test_a_cross_entropy_of_a_square_of_logits() -> None:
    """The mean over the rows and the search for a row's target have loops of one length: they must stay two loops."""
    args = (r(32, 40), r(32, 40), targets(32, 32))
    assert sorted(parts(plan_of(cross_entropy, *args))) == ["max", "sum", "sum"]
    check(cross_entropy, *args)


def test_a_cross_entropy_of_each_row_ignores_targets() -> None:
    target = targets(70, 90)
    target[::3] = -100
    check(lambda x, w, t: F.cross_entropy(F.linear(x, w), t, reduction="none"), r(70, 40), r(90, 40), target)


@pytest.mark.every(3)
@LANGUAGES
@pytest.mark.parametrize("scalar", [cross_entropy, capped])
def test_a_cross_entropy_with_gradients(scalar: Callable[..., Tensor], options: dict[str, Any]) -> None:
    def f(x: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        found = scalar(x, w, target)
        return found, *torch.autograd.grad(found, (x, w))

    x, w, target = r(70, 40).requires_grad_(), r(90, 40).requires_grad_(), targets(70, 90)
    torch._dynamo.reset()
    found = torch.compile(scalar, backend="kgen", options=options)(x, w, target)
    got = (found, *torch.autograd.grad(found, (x, w)))
    torch.testing.assert_close(got, f(x, w, target), rtol=1e-4, atol=1e-5)


def test_what_is_picked_from_a_stored_matmul_is_read_from_memory() -> None:
    def f(x: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y, y.gather(1, target[:, None])

    args = (r(70, 40), r(40, 90), targets(70, 90))
    assert not parts(plan_of(f, *args))
    check(f, *args)


def picked(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    y = x @ w
    return y.amax(-1) - y.gather(1, target[:, None])[:, 0]


@pytest.mark.parametrize("columns", [90, 20])  # of several tiles, and of one
def test_a_picked_index_is_checked(columns: int) -> None:
    """Where the parts are joined, as in eager an assertion: on each tile it would keep the matmul's loop from being
    pipelined."""
    args = (r(70, 40), r(40, columns), targets(70, columns))
    assert sorted(parts(plan_of(picked, *args))) == ["max", "sum"]
    for options in (OPTIONS, CPP_OPTIONS):
        check(picked, *args, options=options)
    with recording() as recorder:
        compiled(picked, *args)
    matmul, joining = (call.launch for graph in recorder.graphs for call in graph.units.calls.values())
    assert "device_assert" not in matmul.source
    assert "device_assert" in joining.source
    assert f"< {columns})" in joining.source


@pytest.mark.parametrize("columns", [90, 20])
@pytest.mark.parametrize("wrong", ["behind", "before", "far"])
def test_a_picked_index_out_of_range_raises(columns: int, wrong: str) -> None:
    """In C++; Triton's interpreter knows no assertions."""
    args = (r(70, 40), r(40, columns), targets(70, columns))
    args[2][41] = {"behind": columns, "before": -1, "far": 2**32 + 5}[wrong]
    with pytest.raises(IndexError, match="out of range"):
        compiled(picked, *args, options=CPP_OPTIONS)


@LANGUAGES
def test_what_is_not_picked_is_not_seen(options: dict[str, Any]) -> None:
    """Infinities and NaNs in other columns of the same tile."""

    def f(x: Tensor, w: Tensor, mask: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w + mask
        return y.amin(-1), y.gather(1, target[:, None])

    mask = torch.zeros(8, 90)
    mask[0, 3], mask[1, 80], mask[2, :40], mask[3, 40:] = math.inf, math.nan, -math.inf, math.nan
    target = torch.tensor([4, 79, 41, 39, 0, 31, 32, 89])
    assert sorted(parts(plan_of(f, r(8, 40), r(40, 90), mask, target))) == ["min", "sum"]
    check(f, r(8, 40), r(40, 90), mask, target, options=options)


def test_exponentials_below_the_maximum_of_their_tile_are_the_hardwares() -> None:
    """Where these are less exact than eager's they are next to nothing; others stay as they are."""

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y.logsumexp(-1), y.exp().sum(0)

    with recording() as recorder:
        compiled(f, r(70, 40), r(40, 90))
    [matmul] = [s for g in recorder.graphs for c in g.units.calls.values() if "ACCUMULATOR" in (s := c.launch.source)]
    assert (matmul.count("lib.fast_exp("), matmul.count("lib.exp(")) == (1, 1)


@pytest.mark.parametrize("narrow", [True, False])
def test_what_eager_rounds_before_it_is_added_up_may_be_the_hardwares(narrow: bool) -> None:
    """The gradient behind an activation, and that of a bias: its terms are of 16 bits in eager, or of 32."""

    def f(dy: Tensor, w: Tensor, saved: Tensor) -> tuple[Tensor, Tensor]:
        d = torch.ops.aten.gelu_backward(dy @ w, saved)
        return d, d.sum(0)

    args = [r(*sizes, dtype=half if narrow else torch.float32) for sizes in ((70, 40), (40, 90), (70, 90))]
    with recording() as recorder:
        compiled(f, *args)
    [matmul] = [s for g in recorder.graphs for c in g.units.calls.values() if "ACCUMULATOR" in (s := c.launch.source)]
    assert "fold_sum" in matmul
    assert ("lib.fast_erf(" in matmul, "lib.erf(" in matmul) == (narrow, not narrow)
    check(f, *args, tolerance=5e-3 if narrow else 1e-5)  # half a unit of bfloat16's last place is 4e-3


@LANGUAGES
def test_a_matmul_is_rounded_as_eager_rounds_it(options: dict[str, Any]) -> None:
    """Sums of whole numbers are exact, and above 256 not all of them are numbers of 16 bits. A conversion that the program asks
    for rounds first, whatever the numerics."""

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = F.linear(x, w).float()
        return y.amax(-1), y.sum(-1), (y * 2).sum(0)

    x, w = (torch.randint(-12, 13, sizes).to(half) for sizes in ((70, 40), (90, 40)))
    for numerics in ("eager", "fast"):
        rounded = compiled(f, x, w, options={**options, "numerics": numerics})
        assert all(torch.equal(got, want) for got, want in zip(rounded, f(x, w), strict=True))


# ---- dynamic shapes -------------------------------------------------------------------------------------------------


def test_a_cross_entropy_of_dynamic_sizes_stores_no_logits() -> None:
    with recording() as recorder:
        torch._dynamo.reset()
        g = torch.compile(cross_entropy, backend="kgen", dynamic=True, fullgraph=True, options=OPTIONS)
        for m, n in ((70, 90), (33, 257), (31, 3)):
            args = (r(m, 40), r(n, 40), targets(m, n))
            torch.testing.assert_close(g(*args), cross_entropy(*args), rtol=1e-4, atol=1e-5)
    [graph] = recorder.graphs
    assert sorted(parts(graph.plan)) == ["max", "sum", "sum"]
    assert largest(graph.plan) <= 4 * 128  # decided as if there were 128 rows and 128 columns


@pytest.mark.every(3)
@LANGUAGES
@pytest.mark.parametrize("name", ["log_sum_exp", "argmax", "columns", "variance", "loss"])
def test_dynamic_sizes(name: str, options: dict[str, Any]) -> None:
    case = CASES[name]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    g = torch.compile(case.f, backend="kgen", dynamic=True, fullgraph=True, options=options)
    for m, n in ((70, 90), (33, 257), (32, 64), (5, 3)):
        args = (r(m, 40), r(40, n), *([r(m, n)] if name == "loss" else []))
        torch.testing.assert_close(g(*args), case.f(*args), rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# ---- what stays apart -----------------------------------------------------------------------------------------------


def refusals(plan: Schedule) -> set[Reason]:
    return {v.reason for v in plan.verdicts if v.outcome in (Outcome.ILLEGAL, Outcome.UNPROFITABLE)}


def apart(f: Callable[..., Any], *args: Any) -> Schedule:
    """The plan of a function whose matmul reduces no tiles, but that is right all the same."""
    plan = plan_of(f, *args)
    assert not parts(plan)
    check(f, *args)
    return plan


def test_runs_that_are_no_power_of_two_stay_apart() -> None:
    assert refusals(apart(lambda x, w: (x @ w).view(70, 4, 24).sum(-1), r(70, 40), r(40, 96)))


def test_strided_runs_stay_apart() -> None:
    apart(lambda x, w: (x @ w).view(70, 8, 12).sum(1), r(70, 40), r(40, 96))


def test_a_slice_of_the_columns_stays_apart() -> None:
    apart(lambda x, w: (x @ w)[:, 3:35].sum(-1), r(70, 40), r(40, 96))


def test_a_softmax_stays_apart_whose_rows_fit_in_registers_but_in_no_tile() -> None:
    plan = apart(lambda x, w: (x @ w).softmax(-1), r(70, 40), r(40, 1100))
    assert len(kernels(plan)) == 2


def test_a_reduction_of_the_batch_stays_apart() -> None:
    apart(lambda x, w: torch.bmm(x, w).sum(0), r(3, 70, 40), r(3, 40, 90))


def test_a_reduction_that_a_third_kernel_separates_stays_apart() -> None:
    """Its bias is the sort of sums of the same matmul: no tile can wait for that."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return (y + y.sum(-1).sort().values[:, None]).amax(-1)

    x, w = r(70, 40), r(40, 90)
    plan = plan_of(f, x, w)
    assert [s.op for step in plan.kernels for k in members(step) for s in k.statements if s.kind == "partial"] == ["sum"]
    check(f, x, w)


def test_rounds_that_read_several_elements_are_computed_again_by_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinkhorn's rounds of short rows behind a matmul: each round reads four elements of the one before."""
    asked: list[int] = []
    unfolded = tile_partials.Search._unfolded
    monkeypatch.setattr(tile_partials.Search, "_unfolded", lambda *args: asked.append(1) or unfolded(*args))

    def rounds(streams: Tensor, mixes: Tensor) -> Tensor:
        m = (F.rms_norm(streams.flatten(1), (512,)) @ mixes).view(-1, 4, 4)
        m = (m - m.amax((1, 2), keepdim=True)).exp()
        for _ in range(5):
            m = m / (m.sum(-1, keepdim=True) + 1e-6)
            m = m / (m.sum(-2, keepdim=True) + 1e-6)
        return m @ streams

    plan_of(rounds, r(4096, 4, 128), r(512, 16))
    assert 0 < len(asked) < 1000  # 4 ** 5 and more without a memo


def test_places_counted_in_another_order_than_the_tiles_stay_apart() -> None:
    """What is stored makes the loops run by the second digit first: the first of two equal places is in a later tile then."""

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y.view(70, 8, 12).transpose(1, 2).contiguous(), y.argmax(-1)

    w = r(40, 96)
    w[:, 50] = w[:, 3] = 9.0
    plan = plan_of(f, r(70, 40).abs(), w)
    assert not parts(plan)
    assert Reason.NOT_IN_TILES in refusals(plan)
    x = r(70, 40).abs()
    assert torch.equal(compiled(f, x, w)[1], f(x, w)[1])


def test_the_library_keeps_a_matmul_that_it_computes_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "vendor_seconds", lambda problem: -1.0)
    plan = plan_of(CASES["sum_of_exp"].f, *CASES["sum_of_exp"].inputs())
    assert len(plan.calls) == 1
    assert len(plan.kernels) == 1
    assert all(s.kind != "partial" for k in plan.kernels for s in k.statements)


def test_demands() -> None:
    f, args = CASES["sum_of_exp"].f, CASES["sum_of_exp"].inputs()
    with kgen.require_fused("aten.mm", "aten.sum"):
        compiled(f, *args)
    with kgen.forbid_fused("aten.mm", "aten.sum"):
        assert torch.allclose(compiled(f, *args), f(*args), rtol=1e-4)
    with pytest.raises(Exception, match="must be fused") as raised, kgen.require_fused("aten.bmm", "aten.sum"):
        compiled(lambda x, w: torch.bmm(x, w).sum(0), r(3, 70, 40), r(3, 40, 90))
    assert errors.FusionRequired.__name__ in repr(raised.value) or "FusionRequired" in str(raised.value)


def test_verdicts_say_that_tiles_reduce() -> None:
    plan = plan_of(CASES["log_sum_exp"].f, *CASES["log_sum_exp"].inputs())
    fused = [v for v in plan.verdicts if v.outcome is Outcome.FUSED and v.reason is Reason.TILE_PARTIALS]
    assert [v.producer for v in fused] == ["mm", "mm"]


@pytest.mark.interpret
def test_a_run_whose_length_the_call_knows_is_no_part() -> None:
    """A part of an axis, for all that is known when the kernel is made: nothing divided by its length then."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(x @ w[..., 2:-3], 2, 1)

    x, w = torch.randn(16, 96), torch.randn(96, 1).expand(96, 22)
    with only("triton_matmul", lambda configs: configs[0]):
        got = torch.compile(f, backend="kgen", dynamic=True, options={"cache": False, "gpu_interpreter": True})(x, w)
    torch.testing.assert_close(got, f(x, w), rtol=1e-4, atol=1e-4)
