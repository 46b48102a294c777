"""Attention by warps with parts of their own on a Hopper GPU: what compiles, what waits for what, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from bench.attention_smoke import CASES, Case, nothing_seen, with_log_sum_exp
from kgen.build import triton
from kgen.device import Device
from kgen.ir.plan import Kernel
from kgen.only import Only
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.scheduler import Options
from kgen.scheduler.selection.choose import chosen_problem
from kgen.templates import registry
from kgen.templates.contract import Config
from kgen.templates.problem import Problem
from tests.codegen import rendered
from tests.kernels import plans
from tests.templates.triton.test_triton_attention import alibi, causal, inputs, scored, window
from tests.warp_barriers import run

NAME = "triton_attention_warp_specialized"
f16, bf16 = torch.float16, torch.bfloat16
Function = Callable[..., Tensor | tuple[Tensor, ...]]


def problem_of(function: Function, args: Sequence[Tensor]) -> tuple[Problem, list[Config]]:
    """As the template sees it, with the configurations that fit; none where another kernel takes it."""
    seen: list[Config] = []

    def pick(configs: Sequence[Config]) -> Config:
        seen[:] = configs
        return seen[0]

    plan = plans(function, *args, options=Options(gpu_everywhere=True, only=Only(NAME, pick))).forward
    kernel = next(k for k in plan.kernels if isinstance(k, Kernel) and k.choice is not None)
    return chosen_problem(kernel, plan.graph, Device()), seen


def kernel_of(function: Function, args: Sequence[Tensor], config: Config) -> TritonKernel:
    options = Options(gpu_everywhere=True, only=Only(NAME, lambda _: config))
    plan = plans(function, *args, options=options).forward
    [kernel] = plan.kernels
    launch = rendered(kernel, plan, "kernel", options).launch
    assert isinstance(launch, TritonKernel)
    return launch


# ---- barriers -------------------------------------------------------------------------------------------------------

# A function, rows, keys, elements of a head of queries and of values.
PROTOCOLS = {
    "plain": (scored(lambda s: s), (200, 700, 64, 64)),
    "causal": (scored(causal), (500, 500, 128, 128)),
    "window": (scored(window), (400, 300, 64, 64)),
    "nothing seen": (nothing_seen, (700, 300, 64, 64)),
    "long head": (scored(causal), (260, 260, 256, 256)),
}


@pytest.mark.every(2)
@pytest.mark.none
@pytest.mark.parametrize("name", PROTOCOLS)
def test_all_warps_come_to_their_end(name: str) -> None:
    function, lengths = PROTOCOLS[name]
    args = inputs(*lengths, bf16)
    _, configs = problem_of(function, args)
    for config in configs:
        rows = config.PROGRAMS * config.BLOCK_M
        run(kernel_of(function, args, config), range(0, 6 * -(-lengths[0] // rows), 5), orders=2)


# ---- masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.none
@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("name", ["masked by a number", "causal by a number"])
def test_finite_masks_are_applied_to_all_tiles(name: str, pipelined: bool) -> None:
    """No tile is left out for such a mask, so that none may take it for granted either."""
    case = next(case for case in CASES if case.name == name)
    args = case.make("cpu")
    _, configs = problem_of(case.function, args)
    source = kernel_of(case.function, args, next(c for c in configs if pipelined == c.PIPELINED)).source
    masked = re.findall(r"tl\.where\(.*tl\.full\(\[\], -", source)
    assert len(masked) == source.count("p = ws.power_of(s,") > 0


# ---- a GPU's compiler -----------------------------------------------------------------------------------------------


@pytest.mark.ptx
@pytest.mark.slow
@pytest.mark.parametrize("head", [16, 64, 96, 128, 256])
def test_all_configurations_fit(head: int) -> None:
    """Next to nothing is spilled where three warp groups share the registers, else nothing, and no more shared memory is needed
    than the template says."""
    args = inputs(256, 300, head, head, bf16)
    problem, configs = problem_of(scored(causal), args)
    assert configs
    kernels = [kernel_of(scored(causal), args, config) for config in configs]
    for config, made in zip(configs, triton.compile_kernels(kernels, 90), strict=True):
        assert made.stack <= (64 if config.PROGRAMS > 2 else 0), config
        assert made.shared <= problem.template.resources(problem, config).shared, config


@pytest.mark.ptx
def test_exponentials_run_beside_matmuls() -> None:
    """Pipelined, those of a tile stand between the wait for its scores and the wait for the matmul of the tile before."""
    args = inputs(512, 512, 128, 128, bf16)
    _, configs = problem_of(scored(lambda s: s), args)
    config = next(c for c in configs if c.PIPELINED)
    [made] = triton.compile_kernels([kernel_of(scored(lambda s: s), args, config)], 90)
    text = triton.dumped(made.cubin, "-sass")
    assert made.stack == 0
    assert re.search(r"HGMMA\.64x128x16\.F32\.BF16 R\d+, R\d+, gdesc", text), "weights come out of registers"
    beside = [found.count("MUFU.EX2") for found in _between_waits(text)]
    assert beside
    assert all(count >= config.BLOCK_N // 2 for count in beside)


def _between_waits(text: str) -> Iterator[str]:
    """The instructions between a wait that leaves MMAs under way and the next one."""
    parts = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", text)
    return (part for pending, part in zip(parts[1::2], parts[2::2], strict=True) if pending == "1")


@pytest.mark.ptx
def test_the_log_sum_exp_compiles() -> None:
    args = inputs(256, 300, 64, 64, bf16)
    problem, configs = problem_of(with_log_sum_exp, args)
    [made] = triton.compile_kernels([kernel_of(with_log_sum_exp, args, configs[0])], 90)
    assert made.stack == 0
    assert made.shared <= problem.template.resources(problem, configs[0]).shared


@pytest.mark.ptx
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_a_gpu_checks_compiles(case: Case) -> None:
    args = [torch.empty_like(one, device="cpu") for one in case.make("meta")]
    problem, configs = problem_of(case.function, args)
    assert configs
    [made] = triton.compile_kernels([kernel_of(case.function, args, configs[0])], 90)
    assert made.shared <= problem.template.resources(problem, configs[0]).shared


# ---- what is left to others -----------------------------------------------------------------------------------------


def reason(function: Function, *args: Tensor) -> str | None:
    plan = plans(function, *args, options=Options(gpu_everywhere=True, only=Only("triton_attention", lambda c: c[0]))).forward
    kernel = next(k for k in plan.kernels if isinstance(k, Kernel) and k.choice is not None)
    problem = chosen_problem(kernel, plan.graph, Device())
    return registry.find(NAME).author.refuse(problem)


@pytest.mark.none
def test_it_says_why_not() -> None:
    args = inputs(70, 100, 64, 64, bf16)
    assert reason(scored(alibi), *args) is None
    assert "computed" in str(reason(lambda q, k, v: scored(causal)(torch.relu(q), k, v), *args))
    assert "16 bits" in str(reason(scored(causal), *inputs(70, 100, 64, 64)))
    assert "multiples of 16 bytes" in str(reason(scored(causal), *inputs(70, 100, 60, 60, bf16)))
