"""Gradients of attention on CPUs by the C++ templates: right against float64, one kernel each, the same at each call."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

import kgen
from kgen.only import only
from kgen.templates import registry
from kgen.testing import Case, check_template
from kgen.testing.cases import cases, plain
from kgen.verdict import Reason
from tests.attention_gradients import (
    CASES,
    PLAIN,
    arguments,
    bf16,
    by_lengths,
    by_lengths_of_queries,
    f16,
    f32,
    gradients,
    more_of,
)  # fmt: skip

OPERANDS, VALUES = "cpp_attention_backward", "cpp_attention_backward_values"
TABLE = "cpp_attention_backward_table"
TOLERANCE = {f32: 2e-5, f16: 1e-2, bf16: 4e-2}
QUICK = ("causal", "odd", "biased and causal", "few rows")
pytestmark = pytest.mark.cpu


def assert_right(name: str, dtype: torch.dtype, template: str, wanted: str) -> None:
    score, mask, lengths = CASES[name]
    args = arguments(score, mask, lengths, dtype, *more_of(name))
    function = partial(gradients, score=score, mask=mask, wanted=wanted)
    torch._dynamo.reset()
    with only(template, lambda configs: configs[-1]), kgen.config.override(cache=False):
        report = kgen.explain(function, *args, print_report=False)
        compiled = torch.compile(function, backend="kgen")
        got, again = compiled(*args), compiled(*args)
    taken = [v for v in report.verdicts if v.reason is Reason.TEMPLATE and v.detail.startswith(f"{template} ")]
    assert len({v.producer for v in taken}) == len(report.kernels) == len(wanted), report
    want = function(*(t.double() if t.is_floating_point() else t for t in args))
    for one, right, same in zip(got, want, again, strict=True):
        limit = TOLERANCE[dtype] * max(1.0, float(right.abs().max()))
        torch.testing.assert_close(one.double(), right, rtol=0, atol=limit)
        assert torch.equal(one, same)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_gradients_of_queries_and_keys_are_right(name: str) -> None:
    assert_right(name, f32, OPERANDS, "qk")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_gradients_of_values_are_right(name: str) -> None:
    assert_right(name, f32, VALUES, "v")


@pytest.mark.parametrize("dtype", [f16, bf16])
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "odd" else pytest.mark.slow) for n in CASES])
def test_they_are_right_in_16_bits(name: str, dtype: torch.dtype) -> None:
    assert_right(name, dtype, OPERANDS, "qk")
    assert_right(name, dtype, VALUES, "v")


@pytest.mark.parametrize(("template", "wanted"), [(OPERANDS, "q"), (VALUES, "v")])
def test_columns_that_a_mask_leaves_out_of_a_batch_are_not_read(template: str, wanted: str) -> None:
    """What is no number would show: 0 times NaN is NaN. Columns are keys of the one gradient, queries of the other."""
    mask, read = (by_lengths, 1) if wanted == "q" else (by_lengths_of_queries, 3)
    args = arguments(PLAIN, mask, (200, 200, 16, 16), f32, torch.tensor([150, 20]))
    args[4], args[5] = args[4].clamp(min=-100), args[5].nan_to_num()  # queries that look at no key
    function = partial(gradients, score=PLAIN, mask=mask, wanted=wanted)
    want = function(*args)
    args[read][0, :, 160:] = args[read][1, :, 32:] = math.nan
    torch._dynamo.reset()
    with only(template, lambda configs: configs[-1]), kgen.config.override(cache=False):
        got = torch.compile(function, backend="kgen")(*args)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def by_entry(q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, delta: Tensor, entry: Tensor) -> tuple[Tensor, ...]:
    """The gradients of queries, and of a table of 8 entries of which the last one is padding."""
    ds = torch.exp(q @ k.mT * 0.25 - lse[..., None]) * (g @ v.mT - delta[..., None]) * 0.25
    return ds @ k, torch.ops.aten.embedding_dense_backward(ds.sum(0).permute(1, 2, 0), entry, 8, 7, False)


def test_entries_of_a_table_come_from_memory() -> None:
    """One that the table has not is an error, as where memory is read at it."""
    args = arguments(PLAIN, None, (40, 70, 16, 16), f32)
    entry = torch.randint(0, 8, (40, 70), generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    with only(OPERANDS, lambda configs: configs[0], also=(TABLE,)), kgen.config.override(cache=False):
        report = kgen.explain(by_entry, *args, entry, print_report=False)
        compiled = torch.compile(by_entry, backend="kgen")
        got = compiled(*args, entry)
        with pytest.raises(IndexError):
            compiled(*args, entry + 9)
    assert any(v.reason is Reason.TEMPLATE and v.detail.startswith(TABLE) for v in report.verdicts), report
    for one, right in zip(got, by_entry(*(a.double() for a in args), entry), strict=True):
        torch.testing.assert_close(one.double(), right, rtol=1e-4, atol=1e-4)


# ---- the conformance kit ----------------------------------------------------------------------------------------------


def some(name: str) -> list[Case]:
    template = registry.find(name)
    return [plain(template, bf16), *list(cases(template))[3::29]]


@pytest.mark.slow  # test_templates_conformance.py has some problems of each template
@pytest.mark.parametrize("name", [OPERANDS, VALUES])
def test_the_templates_conform(name: str) -> None:
    report = check_template(registry.find(name), problems=some(name), configs=1, device="cpu")
    assert not report.refused, str(report)


@pytest.mark.parametrize("name", [OPERANDS, VALUES])
def test_sums_of_no_columns_are_zeros(name: str) -> None:
    """Blocks of none divided by zero, which ended the process."""
    report = check_template(registry.find(name), only="n=0", configs=1, device="cpu")
    assert len(report.results) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [OPERANDS, VALUES])
def test_the_templates_conform_to_everything(name: str) -> None:
    report = check_template(registry.find(name), configs=2, device="cpu")
    assert len(report.refused) <= 1, str(report)
