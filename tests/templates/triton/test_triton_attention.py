"""Attention in Triton: right in the interpreter, within the limits of GPUs that are not here, and no tile too many."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from kgen.build import triton
from kgen.cost import model
from kgen.device import Device
from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.plan import Kernel
from kgen.only import Only, only
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.scheduler import Options
from kgen.scheduler.selection.choose import chosen_problem
from kgen.templates import registry
from kgen.templates.contract import Config
from kgen.templates.middle import Middle
from kgen.templates.problem import Problem
from kgen.templates.triton.codegen.runs import runs_of
from kgen.templates.triton.kernels.attention import parts_of
from kgen.testing import check_template
from kgen.testing.cases import cases, cases_of_dtype, plain
from kgen.verdict import Reason
from tests.attention_gradients import filled, shifts
from tests.codegen import rendered
from tests.kernels import plans

NAME = "triton_attention"
f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
Function = Callable[..., Tensor]


def r(*shape: int, dtype: torch.dtype = f32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, *more: Tensor, score: Function = lambda s: s) -> Tensor:
    return score(q @ k.mT / math.sqrt(q.shape[-1]), *more).softmax(-1).to(v.dtype) @ v


def places(s: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(s.shape[-2], device=s.device)[:, None], torch.arange(s.shape[-1], device=s.device)


def causal(s: Tensor) -> Tensor:
    rows, columns = places(s)
    return s.masked_fill(columns > rows, -math.inf)


def window(s: Tensor, width: int = 9) -> Tensor:
    rows, columns = places(s)
    return torch.where((columns <= rows) & (rows - columns < width), s, -math.inf)


def near(s: Tensor, width: int = 9) -> Tensor:
    rows, columns = places(s)
    return torch.where((columns - rows).abs() < width, s, -math.inf)


def prefix(s: Tensor, length: int = 40) -> Tensor:
    rows, columns = places(s)
    return torch.where((columns <= rows) | (columns < length), s, -math.inf)


def added(s: Tensor) -> Tensor:
    rows, columns = places(s)
    return s + torch.where(columns <= rows + 3, 0.0, -math.inf)


def alibi(s: Tensor) -> Tensor:
    rows, columns = places(s)
    slopes = (0.5 ** (1 + torch.arange(s.shape[-3], device=s.device)))[:, None, None].to(s.dtype)
    return causal(s - (rows - columns).abs() * slopes)


def softcap(s: Tensor) -> Tensor:
    return causal(3 * torch.tanh(s / 3))


def padded(s: Tensor, keep: Tensor) -> Tensor:
    return s.masked_fill(~keep[:, None, None, :], -math.inf)


def document(s: Tensor, ids: Tensor) -> Tensor:
    return causal(torch.where(ids[:, None] == ids[None, :], s, -math.inf))


def with_bias(s: Tensor, bias: Tensor) -> Tensor:
    return s + bias


def rotated(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[-2])[:, None] * 0.1 ** torch.arange(x.shape[-1] // 2)
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()), -1).to(
        x.dtype
    )


def gated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """With a prologue and an epilogue."""
    return (attention(F.relu(q) * 0.5, k, v, score=causal) * torch.sigmoid(gate)).transpose(1, 2).contiguous()


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Three heads of queries for each of keys."""
    k, v = (t[:, :1].repeat_interleave(3, 1) for t in (k, v))
    return attention(q, k, v, score=causal)


def inputs(rows: int, keys: int, head: int, values: int, dtype: torch.dtype = f32) -> list[Tensor]:
    return [r(2, 3, rows, head, dtype=dtype), r(2, 3, keys, head, dtype=dtype), r(2, 3, keys, values, dtype=dtype)]


def scored(score: Function) -> Function:
    return partial(attention, score=score)


# A function, rows, keys, elements of a head of queries and of values, and further tensors.
SPELLINGS: dict[str, tuple[Function, tuple[int, int, int, int], list[Tensor]]] = {
    "plain": (attention, (70, 100, 16, 16), []),
    "causal": (scored(causal), (150, 150, 32, 32), []),
    "library": (F.scaled_dot_product_attention, (64, 64, 64, 64), []),
    "window": (scored(window), (200, 200, 16, 16), []),
    "near": (scored(near), (140, 180, 16, 16), []),
    "prefix": (scored(prefix), (140, 140, 16, 16), []),
    "added": (scored(added), (130, 90, 16, 16), []),
    "alibi": (scored(alibi), (70, 70, 24, 24), []),
    "softcap": (scored(softcap), (70, 70, 16, 48), []),
    "padded": (scored(padded), (30, 70, 16, 16), [torch.arange(70) < torch.tensor([[50], [3]])]),
    "document": (scored(document), (70, 70, 16, 16), [torch.arange(70) // 20]),
    "bias": (scored(with_bias), (40, 70, 16, 16), [r(3, 40, 70)]),
    "rotary": (lambda q, k, v: attention(rotated(q), rotated(k), v), (40, 40, 32, 32), []),
    "gated": (gated, (40, 70, 16, 16), [r(2, 3, 40, 16)]),
    "grouped": (grouped, (70, 70, 16, 16), []),
    "few rows": (scored(added), (1, 200, 32, 32), []),
    "parts": (scored(causal), (40, 70, 96, 80), []),
    "odd": (attention, (33, 65, 37, 20), []),
    "long head": (attention, (20, 40, 256, 160), []),
}
QUICK = ("causal", "window", "softcap", "gated", "parts", "few rows")
TOLERANCE = {f32: 1e-5, f16: 3e-3, bf16: 2e-2}


def assert_right(name: str, dtype: torch.dtype, pick: Callable[..., Config] = lambda configs: configs[0]) -> None:
    """One kernel, as exact as numbers of the type allow."""
    function, lengths, more = SPELLINGS[name]
    args = [*inputs(*lengths, dtype), *(t.to(dtype) if t.is_floating_point() else t for t in more)]
    torch._dynamo.reset()
    with only(NAME, pick), kgen.config.override(gpu_interpreter=True, cache=False):
        report = kgen.explain(function, *args, print_report=False)
        got = torch.compile(function, backend="kgen")(*args)
    assert any(v.reason is Reason.TEMPLATE and v.detail.startswith(NAME) for v in report.verdicts), report
    want = function(*(t.double() if t.is_floating_point() else t for t in args))
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)


@pytest.mark.every(2)
@pytest.mark.interpret
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in SPELLINGS])
def test_it_is_right(name):
    assert_right(name, f32)


@pytest.mark.interpret
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [f16, bf16])
@pytest.mark.parametrize("name", SPELLINGS)
def test_it_is_right_in_16_bits(name, dtype):
    assert_right(name, dtype, lambda configs: configs[-1])


@pytest.mark.interpret
def test_rows_without_keys_follow_eager():
    """The library makes zeros of them, a softmax that is written out NaN."""
    q, k, v = inputs(20, 40, 16, 16)
    mask = r(20, 40) > 0
    mask[3] = False
    for function in (F.scaled_dot_product_attention, scored(lambda s, m: s.masked_fill(~m, -math.inf))):
        torch._dynamo.reset()
        with only(NAME, lambda configs: configs[0]), kgen.config.override(gpu_interpreter=True, cache=False):
            got = torch.compile(function, backend="kgen")(q, k, v, mask)
        torch.testing.assert_close(got, function(q, k, v, mask), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.interpret
def test_scores_that_are_masked_by_a_number_count_where_they_have_weight():
    """Row by row: a masked tile is left out only where its weights are 0."""
    q, k, v = inputs(200, 200, 16, 16)
    args = [q[:1, :1], k[:1, 1:2], v[:1, 2:], shifts(200)]
    torch._dynamo.reset()
    with only(NAME, lambda configs: configs[-1]), kgen.config.override(gpu_interpreter=True, cache=False):
        compiled = torch.compile(filled, backend="kgen")
        got = compiled(*args)
        torch.testing.assert_close(got.double(), filled(*(a.double() for a in args)), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.interpret
def test_tiles_that_are_masked_by_a_number_are_left_out():
    """What is no number behind the mask would show: 0 times NaN is NaN."""
    q, k, v = inputs(200, 200, 16, 16)
    args = [q[:1, :1], k[:1, 1:2], v[:1, 2:], torch.zeros(200)]
    f = partial(filled, fill=torch.finfo(f32).min, strict=0)
    want = f(*args)
    args[2][..., 150:, :] = math.nan
    torch._dynamo.reset()
    with only(NAME, lambda configs: configs[-1]), kgen.config.override(gpu_interpreter=True, cache=False):
        got = torch.compile(f, backend="kgen")(*args)
    torch.testing.assert_close(got[..., :120, :], want[..., :120, :], rtol=1e-5, atol=1e-5)


LOG_SUM_EXPS: dict[str, Function] = {
    "plain": lambda s: s,
    "softcap": softcap,
    "masked": lambda s: causal(s).masked_fill(torch.arange(s.shape[-2])[:, None] % 7 == 3, -math.inf),
}


def with_log_sum_exp(score: Function) -> Callable[..., tuple[Tensor, Tensor]]:
    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        s = score((q @ k.mT).to(torch.promote_types(q.dtype, f32)) * 0.3)
        return s.softmax(-1).to(v.dtype) @ v, s.logsumexp(-1)

    return both


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [f32, pytest.param(bf16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LOG_SUM_EXPS)
def test_the_log_sum_exp_of_rows(name, dtype):
    f, args = with_log_sum_exp(LOG_SUM_EXPS[name]), inputs(40, 70, 16, 16, dtype)
    torch._dynamo.reset()
    with only(NAME, lambda configs: configs[0]), kgen.config.override(gpu_interpreter=True, cache=False):
        report = kgen.explain(f, *args, print_report=False)
        got = torch.compile(f, backend="kgen")(*args)
    assert len(report.kernels) == 1, report
    for mine, theirs in zip(got, f(*(a.double() for a in args)), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)


# ---- the conformance kit --------------------------------------------------------------------------------------------


@pytest.mark.interpret
@pytest.mark.slow
def test_it_conforms():
    template = registry.find(NAME)
    some = [plain(template, bf16), *list(cases(template))[5::17], *list(cases_of_dtype(template, bf16))[2::5]]
    report = check_template(template, problems=some, configs=1, device="cpu")
    assert len(report.refused) <= 3, str(report)


# ---- which tiles are made -------------------------------------------------------------------------------------------


def problem_of(function: Function, *args: Tensor, gpu: Device | None = None) -> tuple[Problem, list[Config]]:
    """As the template sees it, with the configurations that fit."""
    seen: list[Config] = []

    def pick(configs: Any) -> Config:
        seen[:] = configs
        return seen[0]

    device = gpu or Device()
    plan = plans(function, *args, options=Options(gpu_everywhere=True, only=Only(NAME, pick))).forward
    kernel = next(k for k in plan.kernels if isinstance(k, Kernel) and k.choice is not None)
    problem = chosen_problem(kernel, plan.graph, device)
    return problem, list(model.feasible(problem))


def edges_of(problem: Problem, config: Config, row: int) -> list[int]:
    """The edges of the runs of a tile of rows, as numbers."""
    return [problem.sizes.of(edge) for edge in runs_of(problem, "scores", config).edges(ix.constant(row))]


MASKS: dict[str, tuple[Function, int]] = {  # with the runs that there are
    "causal": (causal, 2), "window": (window, 3), "near": (near, 3), "added": (added, 2), "none": (lambda s: s, 1),
    "scaled last": (lambda s: causal(s) * 0.5, 2), "prefix": (prefix, 2), "padded": (padded, 1),
    "both": (lambda s, keep: padded(causal(s), keep), 1),
}  # fmt: skip


@pytest.mark.parametrize("length", [256, 300])
@pytest.mark.parametrize("name", MASKS)
def test_tiles_that_are_masked_are_not_made_and_whole_ones_need_no_mask(name, length):
    mask, count = MASKS[name]
    more = [torch.arange(length)[None].expand(2, -1) < 200] if name in ("padded", "both") else []
    problem, configs = problem_of(scored(mask), *inputs(length, length, 16, 16), *more)
    config = next(c for c in configs if (c.BLOCK_M, c.BLOCK_N) == (64, 32))
    runs = runs_of(problem, "scores", config).all
    assert len(runs) == count + (name in ("none",) and length % 32 != 0)
    scores = mask(torch.zeros(2, 3, length, length), *more)
    kept = (scores > -math.inf).any(0).any(0)
    for row in range(0, length, 64):
        edges = edges_of(problem, config, row)
        rows = kept[row : row + 64]
        made = {n: run.whole for run in runs for n in range(edges[run.first], edges[run.last], 32)}
        assert list(made) == sorted(made), "each tile once, in order"
        for n in range(0, length, 32):
            tile = rows[:, n : n + 32]
            assert not tile.any() or n in made
            assert n not in made or not made[n] or (tile.all() and n + 32 <= length)
            if name in ("causal", "window", "near", "added"):
                assert (n in made) == bool(_padded(mask, length, row, n).any()), "no tile too many"


def _padded(mask: Function, length: int, row: int, column: int) -> Tensor:
    """The tile of scores that are kept, where rows go on past the end."""
    scores = mask(torch.zeros(length + 64, length))
    return scores[row : row + 64, column : column + 32] > -math.inf


STEP = vs.step_result("s", f32)


def c(number: float) -> vs.Value:
    return vs.const(number, f32)


KEPT = vs.call("lt", vs.index_value(ix.var("n", 9).expr()), vs.index_value(ix.var("m", 9).expr()))
FACTORS = {
    "product": (vs.call("mul", STEP, c(0.5)), 0.5, STEP),
    "quotient": (vs.call("truediv", STEP, c(4.0)), 0.25, STEP),
    "of two": (vs.call("mul", c(3.0), vs.call("mul", STEP, c(0.5))), 1.5, STEP),
    "masked": (vs.where(KEPT, vs.call("mul", STEP, c(0.5)), c(-math.inf)), 0.5, vs.where(KEPT, STEP, c(-math.inf))),
    "negative": (vs.call("mul", STEP, c(-0.5)), 1.0, None),
    "nothing": (vs.call("mul", STEP, c(0.0)), 1.0, None),
    "tiny": (vs.call("mul", STEP, c(1e-30)), 1.0, None),
    "inverse": (vs.call("truediv", c(4.0), STEP), 1.0, None),
    "masked by a number": (vs.where(KEPT, vs.call("mul", STEP, c(0.5)), c(-1e9)), 1.0, None),
    "plus a number": (vs.call("add", vs.call("mul", STEP, c(0.5)), c(1.0)), 1.0, None),
}


@pytest.mark.parametrize("name", FACTORS)
def test_a_positive_factor_is_told_apart(name):
    value, factor, rest = FACTORS[name]
    middle = Middle(("m", "n"), ("s",), value, "n")
    assert (middle.factor, middle.function(scaled=False)) == (factor, value if rest is None else rest)
    assert middle.function() is value


def source_of(dtype: torch.dtype) -> str:
    """The kernel of a function of scores with a tanh, and with a difference of indices."""
    score = lambda s: alibi(3 * torch.tanh(s / 3))  # noqa: E731
    args = inputs(64, 64, 16, 16, dtype)
    _, [config, *_] = problem_of(scored(score), *args)
    return kernel_of(scored(score), args, config).source


@pytest.mark.none
def test_functions_of_scores_are_as_exact_as_what_comes_of_them():
    """Weights that are multiplied in 16 bits do not need more than the hardware's functions; those of float32 do."""
    assert "lib.fast_tanh(" in source_of(bf16)
    assert "lib.tanh(" in source_of(f32)


@pytest.mark.none
def test_differences_of_indices_are_not_widened_before():
    text = source_of(bf16)
    assert re.search(r"= \(-?\w+_scores [+-] \w+_scores\)\.to\(tl\.int64\)", text), text


def test_heads_are_cut_where_that_wastes_less():
    wanted = {16: [16], 20: [32], 40: [32, 16], 64: [64], 72: [64, 16], 96: [64, 32], 100: [128], 160: [128, 32], 256: [256]}
    for length, parts in wanted.items():
        problem, _ = problem_of(attention, *inputs(16, 64, length, 16))
        assert [n for _, n in parts_of(problem, "d")] == parts


# ---- a GPU's compiler -----------------------------------------------------------------------------------------------

ARCHES = {80: Device(arch=80, shared=166_912, compute_units=108), 90: Device()}


# Bytes of a thread's registers that may go to memory; a kernel with more than 256 gives way to others.
SPILLED = {"bf16": 0, "tf32": 64, "exact": 192, "few rows": 0, "much of it": 64}


def kernel_of(function: Function, args: list[Tensor], config: Config) -> TritonKernel:
    options = Options(gpu_everywhere=True, only=Only(NAME, lambda configs: config))
    plan = plans(function, *args, options=options).forward
    [kernel] = plan.kernels
    launch = rendered(kernel, plan, "kernel", options).launch
    assert isinstance(launch, TritonKernel)
    return launch


@pytest.fixture
def tf32_as_it_was() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def instructions(cubin: bytes) -> str:
    return triton.dumped(cubin, "-sass")


@pytest.mark.ptx
@pytest.mark.parametrize("arch", ARCHES)
def test_matrix_units_are_fed_asynchronously(arch):
    """Of a program with a loop for whole tiles and one for the diagonal."""
    args = inputs(256, 256, 64, 64, bf16)
    problem, _ = problem_of(scored(causal), *args, gpu=ARCHES[arch])
    config = next(c for c in model.feasible(problem) if (c.BLOCK_M, c.BLOCK_N, c.WARPS) == (64, 64, 4))
    [made] = triton.compile_kernels([kernel_of(scored(causal), args, config)], arch)
    text = instructions(made.cubin)
    assert made.stack == 0
    assert re.search(r"HGMMA\.64x64" if arch == 90 else r"HMMA\.16816", text)
    assert "LDGSTS" in text, "keys and values come past registers"


@pytest.mark.ptx
@pytest.mark.parametrize("arch", ARCHES)
def test_the_log_sum_exp_compiles(arch):
    f, args = with_log_sum_exp(causal), inputs(256, 256, 64, 64, bf16)
    problem, configs = problem_of(f, *args, gpu=ARCHES[arch])
    [made] = triton.compile_kernels([kernel_of(f, args, configs[0])], arch)
    assert made.stack == 0
    assert made.shared <= problem.template.resources(problem, configs[0]).shared


@pytest.mark.ptx
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("head", [64, 96, 128, 256])
@pytest.mark.parametrize("kind", ["bf16", "tf32", "exact", "few rows", "much of it"])
@pytest.mark.usefixtures("tf32_as_it_was")
def test_all_configurations_fit(kind, head, arch):
    """Next to nothing is spilled, and no more shared memory is needed than the template says."""
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    args = inputs(16 if kind == "few rows" else 256, 256, head, head, f32 if kind in ("tf32", "exact") else bf16)
    score = causal
    if kind == "much of it":
        args.append(r(3, 256, 256, dtype=bf16))
        score = lambda s, bias: alibi(20 * torch.tanh(s / 20) + bias)  # noqa: E731
    problem, configs = problem_of(scored(score), *args, gpu=ARCHES[arch])
    assert configs
    kernels = [kernel_of(scored(score), args, config) for config in configs]
    for config, made in zip(configs, triton.compile_kernels(kernels, arch), strict=True):
        needs = problem.template.resources(problem, config)
        assert made.stack <= SPILLED[kind], (config, made.stack)
        assert made.shared <= needs.shared, config
