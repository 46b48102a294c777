"""Attention on CPUs by the C++ template: spellings, shapes and types against float64, what is skipped, and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.values import Value
from kgen.templates import registry
from kgen.templates.mask_ranges import Range, everywhere, nowhere, run_of
from kgen.testing import Case, check_template
from kgen.testing.cases import cases, cases_of_dtype, plain
from kgen.tuning.only import only
from kgen.verdict import Reason

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


def test_float64_is_refused():
    with only(NAME, lambda configs: configs[0]), kgen.config.override(cache=False):
        report = kgen.explain(written, *inputs(dtype=torch.float64), print_report=False)
    assert any("does not multiply torch.float64" in v.detail for v in report.verdicts)


# ---- masks ------------------------------------------------------------------------------------------------------------

M, N = ix.var("m", 100), ix.var("n", 200)
m, n = vs.index_value(M.expr()), vs.index_value(N.expr())


def number(value: int) -> Value:
    return vs.const(value, torch.int64)


CONDITIONS = {
    "causal": vs.call("le", n, m),
    "strictly": vs.call("lt", n, m),
    "after": vs.call("gt", n, m),
    "window": vs.call("and", vs.call("le", n, m), vs.call("lt", vs.call("sub", m, n), number(9))),
    "either": vs.call("or", vs.call("le", n, m), vs.call("lt", n, number(5))),
    "not": vs.call("not", vs.call("ge", n, m)),
    "near": vs.call("le", vs.call("abs", vs.call("sub", m, n)), number(12)),
    "blocks": vs.call("eq", vs.call("floordiv", m, number(16)), vs.call("floordiv", n, number(16))),
    "other blocks": vs.call("ne", vs.call("floordiv", m, number(16)), vs.call("floordiv", n, number(16))),
    "backwards": vs.call("lt", vs.call("neg", m), vs.call("sub", n, number(150))),
}


def holds(value: Value, at: dict[Any, int]) -> Any:
    """The value of a condition, or of a number in it, at some indices."""
    if value.op == "const":
        return value.attr
    if value.op == "index":
        return ix.evaluate(value.attr, lambda atom: at[atom])
    args = [holds(one, at) for one in value.args]
    plain: dict[str, Callable[..., Any]] = {
        "le": lambda a, b: a <= b, "lt": lambda a, b: a < b, "ge": lambda a, b: a >= b, "gt": lambda a, b: a > b,
        "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "and": lambda a, b: a and b, "or": lambda a, b: a or b,
        "not": lambda a: not a, "sub": lambda a, b: a - b, "abs": abs, "neg": lambda a: -a, "floordiv": lambda a, b: a // b,
    }  # fmt: skip
    return plain[value.op](*args)


@pytest.mark.parametrize("name", CONDITIONS)
def test_where_masks_hold_nowhere_or_everywhere(name):
    condition, found = CONDITIONS[name], set()
    for m0, n0 in ((0, 0), (0, 40), (30, 0), (64, 60), (80, 150), (32, 32), (90, 10)):
        tile = {M: Range(ix.constant(m0), ix.constant(m0 + 7)), N: Range(ix.constant(n0), ix.constant(n0 + 3))}
        inside = {holds(condition, {M: a, N: b}) for a in range(m0, m0 + 8) for b in range(n0, n0 + 4)}
        never, always = nowhere(condition, tile), everywhere(condition, tile)
        assert (never.op, always.op) == ("const", "const")
        assert not (never.attr and True in inside)
        assert not (always.attr and False in inside)
        found |= {"never"} if never.attr else set()
    assert found


def test_what_comes_from_memory_may_be_anything():
    read = vs.load("mask", (N.expr(),), torch.bool)
    ranges = {M: Range(ix.ZERO, ix.ONE), N: Range(ix.ZERO, ix.ONE)}
    assert not nowhere(read, ranges).attr
    assert not nowhere(vs.call("or", read, CONDITIONS["after"]), ranges).attr
    assert nowhere(vs.call("and", read, vs.call("gt", n, number(5))), ranges).attr


def test_rows_of_several_loops_come_round():
    outer, inner = ix.var("g", 3), ix.var("i", 10)
    for first in range(25):
        for count in range(1, 5):
            found = run_of((outer, inner), ix.constant(first), ix.constant(count))
            for loop, digits in (
                (outer, [k // 10 for k in range(first, first + count)]),
                (inner, [k % 10 for k in range(first, first + count)]),
            ):
                low, high = found[loop].low.as_int(), found[loop].high.as_int()
                assert low is not None
                assert high is not None
                assert low <= min(digits)
                assert max(digits) <= high


# ---- the conformance kit ----------------------------------------------------------------------------------------------


def some() -> list[Case]:
    template = registry.find(NAME)
    return [
        plain(template, torch.bfloat16),
        *list(cases(template))[5::31],
        *list(cases_of_dtype(template, torch.bfloat16))[3::11],
    ]


def test_the_template_conforms():
    report = check_template(registry.find(NAME), problems=some(), configs=1, device="cpu")
    assert not report.refused, str(report)


@pytest.mark.slow
def test_the_template_conforms_to_everything():
    report = check_template(registry.find(NAME), configs=2, device="cpu")
    assert len(report.refused) <= 1, str(report)
