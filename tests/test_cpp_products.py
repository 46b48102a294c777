"""Products of compiled graphs by the C++ template: one kernel each, right, whatever shares it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.plan import Kernel
from kgen.record import Record, recording
from kgen.tuning.only import only

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


FAST = ("family_of_bfloat16", "family_of_few_rows", "many_batches", "few_columns")


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_one_kernel(name: str) -> None:
    fn, args = CASES[name]
    with recording() as made, only("cpp_matmul", lambda configs: configs[0]):
        got = torch.compile(fn, backend="kgen", fullgraph=True)(*args)
    steps = [step for graph in made.graphs if isinstance(graph, Record) for step in graph.plan.steps]
    assert [step.choice.template for step in steps if isinstance(step, Kernel) and step.choice] == ["cpp_matmul"]
    assert len(steps) == 1
    want = fn(*(a.double() for a in args))
    assert got.shape == want.shape
    error = (got.double() - want).norm() / want.norm().clamp(min=1e-30)
    assert error < (8e-3 if got.dtype is BF16 else 1e-5)
