"""Recurrences that are unrolled: their steps are one kernel on a GPU, whatever slices they read."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kgen.ir.plan import Kernel
from kgen.scheduler.fusion import cost
from kgen.templates.render import canonical_text
from kgen.templates.triton.kernels import loops
from tests.gpu_graphs import run
from tests.matmuls import compiled
from tests.scheduler.selection.test_safe_choices import planned


def recurrence(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """RWKV's, which carries three values."""
    top, total, weight, out = torch.full_like(w, -9.0), torch.zeros_like(w), torch.zeros_like(w), []
    for t in range(k.shape[1]):
        p = torch.maximum(top, k[:, t])
        a, b = torch.exp(top - p), torch.exp(k[:, t] - p)
        total, weight, top = a * total + b * v[:, t], a * weight + b, p
        out.append(total / weight)
    return torch.stack(out, 1)


def stacked_recurrence(k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """RWKV's as it is written: what a step gives reads the state before it, and a stack at the end holds all of them."""
    total, weight, top, out = torch.zeros_like(w), torch.zeros_like(w), torch.full_like(w, -9.0), []
    for t in range(k.shape[1]):
        p = torch.maximum(top, u + k[:, t])
        a, b = torch.exp(top - p), torch.exp(u + k[:, t] - p)
        out.append((a * total + b * v[:, t]) / (a * weight + b))
        p = torch.maximum(top - 0.1, k[:, t])
        a, b = torch.exp(top - 0.1 - p), torch.exp(k[:, t] - p)
        total, weight, top = a * total + b * v[:, t], a * weight + b, p
    return torch.stack(out, 1)


def in_place(x: Tensor) -> Tensor:
    """Each step writes what the next one reads, of the same tensor."""
    for t in range(1, x.shape[1]):
        x[:, t] = torch.sin(x[:, t - 1]) + x[:, t]
    return x


def arguments(steps: int, columns: int = 1000) -> list[Tensor]:
    return [torch.randn(8, steps, columns), torch.randn(8, steps, columns), torch.randn(8, columns)]


def test_a_recurrence_is_one_kernel() -> None:
    [kernel] = planned(recurrence, *arguments(30)).kernels
    assert isinstance(kernel, Kernel)
    assert len(kernel.statements) > cost.MAX_ITEMS


def test_parts_of_a_stack_stand_where_their_step_is() -> None:
    """At the end of the program they would need the state of all steps at the same time."""
    [kernel] = planned(stacked_recurrence, *arguments(40), torch.randn(1000)).kernels
    assert isinstance(kernel, Kernel)
    order = [s.outs[0] for s in kernel.statements if any(s.stored)]
    steps = [k for k, s in enumerate(kernel.statements) if any(s.stored)]
    assert order == sorted(order, key=lambda name: (len(name), name))
    assert max(b - a for a, b in itertools.pairwise(steps)) < 16


@pytest.mark.interpret
def test_loads_are_prefetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """No load passes a store: without that each step would wait for its own."""
    texts: list[str] = []
    monkeypatch.setattr(loops, "canonical_text", lambda text, names: texts.append(text) or canonical_text(text, names))
    compiled(recurrence, *arguments(30, 40))
    [text] = (text for text in texts if "tl.store" in text)
    assert text[: text.index("tl.store")].count("tl.load(") > 30


@pytest.mark.interpret
def test_what_many_steps_write_in_place_is_read_after_it() -> None:
    x = torch.rand(30, 90)
    want = in_place(x.clone())
    torch.testing.assert_close(compiled(in_place, x), want)


def test_what_needs_many_values_at_a_time_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "MAX_LIVE", 4)
    assert len(planned(recurrence, *arguments(31)).kernels) > 1


@pytest.mark.interpret
def test_values() -> None:
    run(recurrence, *arguments(20, 40), gpu_interpreter=True)
    run(stacked_recurrence, *arguments(40, 40), torch.randn(40), gpu_interpreter=True)


def beside_each_other(x: Tensor, at: Tensor, other: Tensor) -> tuple[Tensor, ...]:
    """Between two updates a sum reads the same tensor, and joins an earlier one."""
    zeros = torch.zeros(x.shape[0], 100, device=x.device)
    sums = x.sum(1)
    first = zeros.scatter_add(1, at, x)
    sums = (x * 2).sum(1) + sums
    return first, zeros.scatter_add(1, other, x), sums


def test_readers_that_become_neighbours_are_tried() -> None:
    x, at = torch.randn(64, 20000), torch.randint(0, 100, (64, 20000))
    plan = planned(beside_each_other, x, at, at.flip(1))
    assert [sum(s.kind == "scatter" for s in k.statements) for k in plan.kernels if isinstance(k, Kernel)].count(2) == 1
