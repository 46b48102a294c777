"""Matmuls of compiled graphs by the C++ template: one kernel each, right, whatever shares it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from kgen import pipeline
from kgen.ir.plan import Kernel
from kgen.only import only
from kgen.report.record import Record, recording
from tests.slow import slow_but

pytestmark = pytest.mark.cpu

BF16 = torch.bfloat16


def r(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))).to(dtype)


def gate_up(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(F.linear(x, w)) * F.linear(x, v)


def three(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return (x @ u) * 2 - (x @ v) / 3 + torch.tanh(x @ w)


CASES: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "family": (gate_up, [r(70, 300), r(77, 300), r(78, 300)[1:]]),
    "family_of_bfloat16": (gate_up, [r(70, 300, dtype=BF16), r(77, 300, dtype=BF16), r(78, 300, dtype=BF16)[1:]]),
    "family_of_few_rows": (gate_up, [r(3, 300), r(77, 300), r(78, 300)[1:]]),
    "family_in_both_layouts": (gate_up, [r(7, 300, dtype=BF16), r(77, 300, dtype=BF16), r(300, 77, dtype=BF16).t()]),
    "family_of_three": (three, [r(40, 70), r(70, 33), r(70, 34)[:, 1:], r(33, 70).t()]),
    "family_of_batches": (lambda x, w, v: torch.bmm(x, w) * torch.bmm(x, v), [r(3, 9, 20), r(3, 20, 17), r(4, 20, 17)[1:]]),
    "family_with_a_computed_member": (lambda x, w, v: (x @ w) + (x @ v.to(x.dtype)), [r(50, 64), r(64, 40), r(64, 40).half()]),
    "many_batches": (lambda x, w: torch.relu(torch.bmm(x, w.transpose(1, 2))), [r(33, 24, 40), r(33, 17, 40)]),
    "few_large_batches": (lambda x, w: torch.relu(torch.bmm(x, w)), [r(3, 100, 120), r(3, 120, 90)]),
    "few_columns": (lambda x, w, b: torch.relu(x @ w + b), [r(500, 64), r(64, 3), r(3)]),
    "one_column": (lambda x, w, y: x.t() @ w + y, [r(300, 513), r(300, 1), r(513, 1)]),
    "tiny": (lambda x, w: x @ w * 2, [r(2, 3), r(3, 5)]),
}


def steps_of(fn: Callable[..., Tensor], args: list[Tensor]) -> tuple[list[object], Tensor]:
    """What the compiled graph does, and its result."""
    with recording() as made:
        got = torch.compile(fn, backend="kgen", fullgraph=True, options={"cache": False})(*args)
    return [step for graph in made.graphs if isinstance(graph, Record) for step in graph.plan.steps], got


def templates_in(steps: list[object]) -> list[str]:
    return [step.choice.template for step in steps if isinstance(step, Kernel) and step.choice]


FAST = ("family_of_bfloat16", "family_of_few_rows", "many_batches", "few_columns")


@pytest.mark.parametrize("name", slow_but(lambda name: name in FAST, CASES))
def test_one_kernel(name: str) -> None:
    fn, args = CASES[name]
    with only("cpp_matmul", lambda configs: configs[0]):
        steps, got = steps_of(fn, args)
    assert templates_in(steps) == ["cpp_matmul"]
    assert len(steps) == 1
    want = fn(*(a.double() for a in args))
    assert got.shape == want.shape
    error = (got.double() - want).norm() / want.norm().clamp(min=1e-30)
    assert error < (8e-3 if got.dtype is BF16 else 1e-5)


CHOICES: dict[str, tuple[Callable[..., Tensor], list[Tensor], bool]] = {
    "bare": (lambda x, w: x @ w, [r(256, 1024), r(1024, 1024)], False),
    "many_rows_and_relu": (lambda x, w: torch.relu(x @ w), [r(512, 1024), r(1024, 1024)], False),
    "small_batches": (lambda x, w: torch.relu(torch.bmm(x, w)), [r(32, 64, 64), r(32, 64, 64)], False),
    "few_rows": (lambda x, w: torch.relu(F.linear(x, w)), [r(8, 1024), r(1024, 1024)], True),
    "few_columns": (lambda x, w: torch.relu(x @ w), [r(1024, 512), r(512, 4)], True),
    "gate_and_up": (gate_up, [r(64, 1024), r(2048, 1024), r(2049, 1024)[1:]], True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOICES)
def test_the_library_keeps_what_it_does_faster(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As measured on one core of the machine whose rates these are."""
    device = replace(pipeline.cpu_device(), compute_units=1, flops=980e9, narrow=7.0, bandwidth=10e9, library=1.0)
    monkeypatch.setattr(pipeline, "cpu_device", lambda: device)
    fn, args, taken = CHOICES[name]
    steps, _ = steps_of(fn, args)
    assert templates_in(steps) == ["cpp_matmul"] * taken


def _normed(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.relu((x - shift[:, None]) * scale[:, None] + shift[:, None].exp())


COMPUTED: dict[str, tuple[Callable[..., Tensor], list[Tensor], str]] = {
    "rows": (lambda w, x, s, t: w @ _normed(x, s, t), [r(64, 48), r(48, 96), r(48), r(49)[1:]], "i"),
    "columns": (lambda w, x, s, t: w @ _normed(x.t(), s, t), [r(64, 48), r(96, 48), r(48), r(49)[1:]], "k"),
    "short_rows": (lambda w, x, s, t: w @ _normed(x, s, t), [r(64, 48), r(48, 3), r(48), r(49)[1:]], "k"),
    "gathered_rows": (lambda w, x, i: w @ (x[i] * 2), [r(64, 40), r(48, 96), torch.arange(40) % 7], "i"),
    "gathered_columns": (lambda w, x, i: w @ (x[i].t() * 2), [r(64, 40), r(48, 40), torch.arange(96) % 7], "k"),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_an_operand_is_computed_along_its_memory(name: str) -> None:
    """Vectors of weights, of which there are more, do not decide: read across its rows, the large array is read element by
    element."""
    fn, args, along = COMPUTED[name]
    with only("cpp_matmul", lambda configs: configs[0]):
        [kernel] = kgen.explain(fn, *args).kernels
        _, got = steps_of(fn, args)
    assert f"Along::{along}>" in kernel.source
    torch.testing.assert_close(got, fn(*args), atol=1e-4, rtol=1e-4)
