"""Attention on CPUs by the C++ template: spellings, shapes and types against float64, threads, and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from kgen.only import only
from kgen.templates import registry
from kgen.testing import Case, check_template
from kgen.testing.cases import cases, cases_of_dtype, plain
from kgen.verdict import Reason
from tests.attention_gradients import filled, shifts

NAME = "cpp_attention"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
pytestmark = pytest.mark.cpu


def r(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def inputs(
    rows: int = 40, keys: int = 70, size: int = 16, values: int = 0, dtype: torch.dtype = torch.float32, heads: int = 3
) -> list[Tensor]:
    shapes = ((2, heads, rows, size), (2, heads, keys, size), (2, heads, keys, values or size))
    return [r(*shape, dtype=dtype, seed=k) for k, shape in enumerate(shapes)]


def positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    m, n = positions(q, k)
    return (q @ k.mT * 0.3).masked_fill(n > m, -math.inf).softmax(-1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    m, n = positions(q, k)
    return torch.where((m - n >= 0) & (m - n < 9), q @ k.mT, -math.inf).softmax(-1) @ v


def prefix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    m, n = positions(q, k)
    return torch.where((n <= m) | (n < 5), q @ k.mT * 0.2, -math.inf).softmax(-1) @ v


def blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    m, n = positions(q, k)
    return torch.where(m // 32 == n // 32, q @ k.mT * 0.2, -math.inf).softmax(-1) @ v


def near(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    m, n = positions(q, k)
    return (q @ k.mT).masked_fill((m - n).abs() > 40, -math.inf).softmax(-1) @ v


def rows_without_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    m, n = positions(q, k)
    return torch.where((m >= 35) & (n <= m), q @ k.mT, -math.inf).softmax(-1) @ v


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (5 * torch.tanh(q @ k.mT / 5)).softmax(-1) @ v


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT * 0.25
    p = (s - s.amax(-1, keepdim=True)).exp()
    return (p / p.sum(-1, keepdim=True)) @ v


def around(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Work on every operand, and on the result."""
    made = (torch.relu(q) * 0.3 @ (k * 0.9 + 0.1).mT).softmax(-1) @ torch.tanh(v)
    return F.gelu(made + 1).transpose(1, 2).contiguous()


def rotary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def turned(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[-2])[:, None] / 10.0 ** (torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1).to(x.dtype)

    return written(turned(q), turned(k), v)


def library(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def library_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)


def shared_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)


def repeated_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(q, k[:, :1].repeat_interleave(q.shape[1], 1), v[:, :1].repeat_interleave(q.shape[1], 1))


def turned_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Operands whose neighbours in memory lie along the other axis."""
    return written(q.mT.contiguous().mT, k.mT.contiguous().mT, v.mT.contiguous().mT)


SPELLINGS = {
    f.__name__: f
    for f in (
        written, causal, window, prefix, blocks, near, rows_without_keys, softcap, by_hand, around, rotary, library,
        library_causal, shared_heads, repeated_heads, turned_keys,
    )
}  # fmt: skip


def check(f: Callable[..., Tensor], args: Sequence[Tensor], kernels: int | None = 1, **options: Any) -> None:
    torch._dynamo.reset()
    with only(NAME, lambda configs: configs[0]), kgen.config.override(cache=False, **options):
        report = kgen.explain(f, *args, print_report=False)
        got = torch.compile(f, backend="kgen")(*args)
    chosen = [v for v in report.verdicts if v.reason is Reason.TEMPLATE]
    assert len(chosen) == 1, report
    assert kernels is None or len(report.kernels) == kernels, report
    want = f(*(a.double() if a.is_floating_point() else a for a in args))
    tolerance = TOLERANCE[args[0].dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.every(3)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_are_one_kernel(spelling):
    check(SPELLINGS[spelling], inputs(), kernels=None if spelling in ("rotary", "turned_keys") else 1)


SHAPES = {  # rows, keys, size, values
    "one row": (1, 300, 64, 64),
    "three rows, odd": (3, 517, 33, 19),
    "few keys": (130, 3, 64, 16),
    "several blocks": (200, 530, 40, 70),
    "large heads": (30, 40, 256, 256),
    "larger than a block": (30, 300, 300, 20),
    "odd": (37, 41, 17, 23),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda t: str(t).removeprefix("torch."))
def test_shapes_and_types(shape, dtype):
    check(causal if "odd" in shape else written, inputs(*SHAPES[shape], dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda t: str(t).removeprefix("torch."))
def test_spellings_in_other_types(spelling, dtype):
    check(SPELLINGS[spelling], inputs(110, 300, 32, dtype=dtype), kernels=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda t: str(t).removeprefix("torch."))
def test_biases_and_masks_from_memory(dtype):
    q, k, v = inputs(dtype=dtype)
    bias, mask = r(3, 40, 70, dtype=dtype), r(2, 1, 1, 70) > -0.5
    check(
        lambda q, k, v, bias, mask: (q @ k.mT * 0.3 + bias).masked_fill(~mask, -math.inf).softmax(-1) @ v, (q, k, v, bias, mask)
    )
    check(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), (q, k, v, mask))


def test_rows_without_keys_are_as_in_the_library():
    q, k, v = inputs()
    mask = r(40, 70) > 0
    mask[3] = False
    check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), (q, k, v))


def test_numbers_that_are_none_stay_in_their_rows():
    q, k, v = inputs()
    q[0, 0, 1, 0], q[0, 1, 2, 3], k[1, 0, 69, 1] = math.nan, math.inf, math.nan
    check(written, (q, k, v))


def test_scores_that_are_infinite():
    q, k, v = inputs(40, 300)
    bias = torch.zeros(40, 300)
    bias[3, 250], bias[5, 7], bias[:, 128:200], bias[9] = math.inf, math.nan, -1e38, -math.inf
    check(lambda q, k, v, bias: (q @ k.mT + bias).softmax(-1) @ v, (q, k, v, bias))


def test_scores_that_are_masked_by_a_number_count_where_they_have_weight():
    """Row by row: a masked tile is left out only where its weights are 0."""
    check(filled, [*inputs(300, 300, heads=1), shifts(300)])


def test_tiles_that_are_masked_by_a_number_are_left_out():
    """What is no number behind the mask would show: 0 times NaN is NaN."""
    args = [*inputs(300, 300, heads=1), torch.zeros(300)]
    f = partial(filled, fill=torch.finfo(torch.float32).min, strict=0)
    want = f(*args)
    args[2][..., 200:, :] = math.nan
    torch._dynamo.reset()
    with only(NAME, lambda configs: configs[0]), kgen.config.override(cache=False):
        got = torch.compile(f, backend="kgen")(*args)
    torch.testing.assert_close(got[..., :96, :], want[..., :96, :], rtol=1e-5, atol=1e-5)


def test_scores_far_apart_and_large():
    q, k, v = inputs()
    q, k = q.round(), k.round()  # whose scores are exact
    check(lambda q, k, v: (q @ k.mT * 1000).softmax(-1) @ v, (q, k, v))
    check(lambda q, k, v: (q @ k.mT * 0.1 - 500 * torch.arange(70)).softmax(-1) @ v, (q, k, v))


def test_lengths_at_run_time():
    torch._dynamo.reset()
    with only(NAME, lambda configs: configs[0]), kgen.config.override(cache=False):
        compiled = torch.compile(causal, backend="kgen", dynamic=True)
        for rows, keys in ((20, 30), (130, 300), (2, 513)):
            args = inputs(rows, keys)
            want = causal(*(a.double() for a in args))
            torch.testing.assert_close(compiled(*args).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 3])
def test_results_do_not_depend_on_threads(threads):
    args = inputs(500, 300, heads=1)
    torch._dynamo.reset()
    with only(NAME, lambda configs: configs[0]), kgen.config.override(cache=False):
        compiled = torch.compile(causal, backend="kgen")
        want = compiled(*args)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert torch.equal(compiled(*args), want)
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("f", [causal, library_causal], ids=lambda f: f.__name__)
def test_gradients(f):
    args = [a.requires_grad_() for a in inputs()]
    want = torch.autograd.grad(f(*args).square().sum(), args)
    torch._dynamo.reset()
    with kgen.config.override(cache=False):
        compiled = torch.compile(f, backend="kgen")
        got = torch.autograd.grad(compiled(*args).square().sum(), args)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def with_log_sum_exp(score: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        s = score((q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * 0.3)
        return s.softmax(-1).to(v.dtype) @ v, s.logsumexp(-1)

    return both


def masked_rows(s: Tensor) -> Tensor:
    """Causal, and nothing is left of some rows."""
    m, n = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
    return s.masked_fill((n > m) | (m % 7 == 3), -math.inf)


LOG_SUM_EXPS = {"plain": lambda s: s, "softcap": lambda s: 5 * torch.tanh(s / 5), "masked": masked_rows}


@pytest.mark.every(4)
@pytest.mark.parametrize("lengths", [(40, 70), (3, 517), (200, 530)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda t: str(t).removeprefix("torch."))
@pytest.mark.parametrize("name", LOG_SUM_EXPS)
def test_the_log_sum_exp_of_rows(name, dtype, lengths):
    f, args = with_log_sum_exp(LOG_SUM_EXPS[name]), inputs(*lengths, dtype=dtype)
    torch._dynamo.reset()
    with only(NAME, lambda configs: configs[0]), kgen.config.override(cache=False):
        report = kgen.explain(f, *args, print_report=False)
        got = torch.compile(f, backend="kgen")(*args)
    assert len(report.kernels) == 1, report
    for mine, theirs in zip(got, f(*(a.double() for a in args)), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)


def test_float64_is_refused():
    with only(NAME, lambda configs: configs[0]), kgen.config.override(cache=False):
        report = kgen.explain(written, *inputs(dtype=torch.float64), print_report=False)
    assert any("does not multiply torch.float64" in v.detail for v in report.verdicts)


# ---- the conformance kit ----------------------------------------------------------------------------------------------


def some() -> list[Case]:
    template = registry.find(NAME)
    return [
        plain(template, torch.bfloat16),
        *list(cases(template))[5::31],
        *list(cases_of_dtype(template, torch.bfloat16))[3::11],
    ]


@pytest.mark.slow  # test_templates_conformance.py has some problems of each template
def test_the_template_conforms():
    report = check_template(registry.find(NAME), problems=some(), configs=1, device="cpu")
    assert not report.refused, str(report)


@pytest.mark.slow
def test_the_template_conforms_to_everything():
    report = check_template(registry.find(NAME), configs=2, device="cpu")
    assert len(report.refused) <= 1, str(report)
