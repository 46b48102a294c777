"""Matmuls whose epilogue reads full rows, by warp groups that take turns, in Gluon: offline, and on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen import rendered
from torch import Tensor

from kgen import pipeline
from kgen.build import triton
from kgen.host.interpret import Interpreted
from kgen.ir.plan import members
from kgen.only import Only, only
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.scheduler import Gpu, Options
from kgen.scheduler.selection.choose import chosen_problem, contraction_of
from kgen.templates import registry
from kgen.templates.contract import Config
from kgen.verdict import Reason
from tests.kernels import plans
from tests.matmuls import error

NAME = "triton_matmul_full_row"
bf, h = torch.bfloat16, torch.float16
SHARED = 232_448


def r(*shape: int, dtype: torch.dtype = bf) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def some(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) < 0.5


def scores(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((q @ k.transpose(1, 2) * 0.125).masked_fill(mask, -math.inf), -1)


def softmax(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(1, 2) * 0.1, -1)


def biased(q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(1, 2) * 0.1 + b, -1)


def normalised(x: Tensor, w: Tensor, res: Tensor) -> Tensor:
    return F.layer_norm(F.linear(x, w) + res, (w.shape[0],))


def both(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    s = (q @ k.transpose(1, 2)).float()
    return torch.softmax(s, -1), torch.logsumexp(s, -1)


def behind(q: Tensor, k: Tensor, m: Tensor, b: Tensor) -> Tensor:
    """The first reduction of a row needs nothing of what is read."""
    x = (q @ k.transpose(1, 2)).float()
    z = torch.where(m, x, b.float())
    top, other = x.amax(-1, keepdim=True), z.amax(-1, keepdim=True)
    return torch.where(m, z * top, other)


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.relu(F.linear(x, w, b))


Case = tuple[Callable[..., Any], tuple[Tensor, ...]]
CASES: dict[str, Case] = {
    "masked": (scores, (r(3, 1024, 64), r(3, 1024, 64), some(1024, 1024))),
    "row where masked": (
        lambda q, k, mask, b: torch.softmax(torch.where(mask, q @ k.transpose(1, 2), b), -1),
        (r(3, 100, 64), r(3, 512, 64), some(100, 512), r(512)),
    ),
    "mask of each batch": (scores, (r(3, 100, 64), r(3, 512, 64), some(3, 100, 512))),
    "many tiles": (softmax, (r(140, 200, 64), r(140, 1024, 64))),
    "ragged": (softmax, (r(3, 203, 40), r(3, 1000, 40))),
    "short rows": (softmax, (r(5, 77, 64), r(5, 200, 64))),
    "few columns": (softmax, (r(5, 77, 64), r(5, 8, 64))),
    "longer sums": (biased, (r(3, 100, 128), r(3, 512, 128), r(100, 512))),
    "long sums of few": (softmax, (r(3, 100, 96), r(3, 424, 96))),
    "heads side by side, ragged": (
        lambda q, k: torch.softmax(q.transpose(1, 2) @ k.permute(0, 2, 3, 1), -1), (r(2, 100, 3, 64), r(2, 200, 3, 64)),
    ),
    "ragged deviations": (normalised, (r(2049, 64), r(1000, 64), r(2049, 1000))),
    "read behind a reduction": (behind, (r(9, 1000, 64), r(9, 512, 64), some(1000, 512), r(9, 1000, 512))),
    "halves": (biased, (r(3, 100, 64, dtype=h), r(3, 512, 64, dtype=h), r(3, 100, 512, dtype=h))),
    "bias of a row": (biased, (r(3, 100, 64), r(3, 1000, 64), r(1000))),
    "two results": (both, (r(3, 100, 64), r(3, 512, 64))),
    "layer norm": (normalised, (r(2049, 64), r(1024, 64), r(2049, 1024))),
    "no reduction": (linear, (r(300, 64), r(1000, 64), r(1000))),
    "heads side by side": (
        lambda q, k: torch.softmax(q.transpose(1, 2) @ k.permute(0, 2, 3, 1), -1), (r(2, 100, 4, 64), r(2, 512, 4, 64)),
    ),
}  # fmt: skip


OPTIONS = Options(gpu_everywhere=True, gpu=Gpu(arch=90))


def offered(
    case: Case, arch: int = 90, choose: Callable[[Any], Config] = lambda configs: configs[0]
) -> tuple[Any, list[Config]]:
    """The plan with the template wherever it takes a matmul, and the configurations that there were."""
    seen: list[Config] = []

    def pick(configs: Any) -> Config:
        seen.extend(configs)
        return choose(configs)

    options = Options(gpu_everywhere=True, gpu=Gpu(arch=arch), only=Only(NAME, pick))
    return plans(case[0], *case[1], options=options).forward, list(dict.fromkeys(seen))


def step_of(plan: Any) -> Any:
    [step] = [s for s in plan.kernels if members(s)[0].choice is not None]
    return step


@pytest.mark.every(4)
@pytest.mark.ptx
@pytest.mark.parametrize("name", CASES)
def test_every_configuration_compiles_and_fits(name: str) -> None:
    _, configs = offered(CASES[name])
    assert configs
    for config in configs:
        plan, _ = offered(CASES[name], choose=lambda found, config=config: config if config in found else found[0])
        step = step_of(plan)
        problem = chosen_problem(step, plan.graph, OPTIONS.device(plan.graph, contraction_of(step)))
        [made] = triton.compile_kernels([rendered(step, plan, "kernel", OPTIONS).launch], 90)
        needs = problem.template.resources(problem, config)
        assert made.shared <= needs.shared <= SHARED, config
        assert made.stack <= 256, config


@pytest.mark.ptx
def test_symbolic_rows_and_batches_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at run time have 64 bits, places in shared memory 32."""
    q, k, mask = r(6, 203, 64), r(6, 512, 64), some(203, 512)
    for t, axes in ((q, (0, 1)), (k, (0,)), (mask, (0,))):
        torch._dynamo.mark_dynamic(t, axes)
    made: list[TritonKernel] = []

    def called(self: Interpreted, *args: Any) -> tuple[()]:
        made.append(self.kernel)
        return ()

    options = Options(gpu_everywhere=True, gpu=Gpu(arch=90), only=Only(NAME, lambda configs: configs[0]))
    monkeypatch.setattr(pipeline, "scheduler_options", lambda graph, config: options)
    monkeypatch.setattr(Interpreted, "__call__", called)
    torch._dynamo.reset()
    torch.compile(scores, backend="kgen", options={"gpu_interpreter": True, "cache": False})(q, k, mask)
    [kernel] = made
    assert "i64" in kernel.signature
    assert triton.compile_kernels([kernel], 90)


def test_a_softmax_of_scores_is_one_kernel_by_the_estimate() -> None:
    """Of rows that fill a tile; shorter ones are better off where tiles have more rows."""
    q, mask = torch.empty(64, 1024, 64, dtype=bf), torch.empty(1024, 1024, dtype=torch.bool)
    plan = plans(scores, q, q.clone(), mask, options=OPTIONS).forward
    [kernel] = plan.kernels
    assert members(kernel)[0].choice.template == NAME


@pytest.mark.parametrize(("name", "before"), [("masked", "amax_parts"), ("read behind a reduction", "amax_1_parts")])
def test_what_is_read_is_given_back_when_warps_have_needed_it(name: str, before: str) -> None:
    """A load that is on its way is not held up by a barrier: TMA overtook it."""
    plan, _ = offered(CASES[name])
    lines = rendered(step_of(plan), plan, "kernel", OPTIONS).launch.source.split("\n")
    given = next(n for n, line in enumerate(lines) if "ws.release_read(free, stage)" in line)
    assert lines[given - 1].strip().startswith(before)


def test_without_a_reduction_it_is_given_back_at_the_end() -> None:
    plan, _ = offered(CASES["no reduction"])
    lines = rendered(step_of(plan), plan, "kernel", OPTIONS).launch.source.split("\n")
    stored = max(n for n, line in enumerate(lines) if "ws.send(" in line)
    assert lines[stored + 1].strip() == "ws.release_read(free, stage)"


@pytest.mark.parametrize("read", [r(128, 128).t(), r(128, 131)[:, :128]])
def test_tiles_that_tma_cannot_move_are_read_elsewhere(read: Tensor) -> None:
    """The matmul may still be the template's, without its reductions."""
    plan, _ = offered((biased, (r(3, 128, 64), r(3, 128, 64), read)))
    step = step_of(plan)
    assert not any(s.kind == "partial" for s in members(step)[0].statements)


@pytest.mark.parametrize(
    ("case", "arch", "why"),
    [
        ((softmax, (r(2, 32, 64), r(2, 100, 64))), 90, "multiple of 8"),
        ((lambda x, w: torch.softmax(x @ w, -1), (r(32, 64), r(64, 128))), 90, "not contiguous along the sum"),
        ((softmax, (r(2, 32, 64).float(), r(2, 128, 64).float())), 90, "16-bit floats"),
        ((softmax, (r(2, 32, 64), r(2, 128, 64))), 80, "compute capability 9.0"),
        ((softmax, (r(2, 32, 192), r(2, 128, 192))), 90, "longer than 128"),
        ((softmax, (r(2, 1500, 64), r(2, 2048, 64))), 90, "longer than 1024"),
    ],
)
def test_refusals_say_why(case: Case, arch: int, why: str) -> None:
    plan, configs = offered(case, arch)
    assert not configs
    assert any(why in v.detail for v in plan.verdicts if v.reason is Reason.NO_TEMPLATE)


def test_it_is_registered() -> None:
    assert NAME in {t.name for t in registry.every("cuda")}


def as_tuple(got: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return got if isinstance(got, tuple) else (got,)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("which", [0, -1])
def test_agrees_with_eager_on_a_gpu(name: str, which: int) -> None:
    """And with itself: results that differ from run to run were read too late, or written too early."""
    fn, args = CASES[name]
    args = tuple(a.cuda() for a in args)
    wide = tuple(a.double() if a.is_floating_point() else a for a in args)
    torch._dynamo.reset()
    seen: list[Config] = []

    def pick(configs: Any) -> Config:
        seen.extend(configs)
        return list(configs)[which]

    with only(NAME, pick):
        run = torch.compile(fn, backend="kgen", fullgraph=True, options={"cache": False, "poison": True})
        got = run(*args)
    assert seen
    results = as_tuple(got)
    for one, want, eager in zip(results, as_tuple(fn(*wide)), as_tuple(fn(*args)), strict=True):
        # a user's cast rounds, here as in eager
        assert error(one, want) < max(1e-2, 1.1 * error(eager, want))
    for _ in range(50):
        again = run(*args)
        assert all(torch.equal(a, b) for a, b in zip(results, again if isinstance(again, tuple) else (again,), strict=True))
