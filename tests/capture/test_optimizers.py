"""Steps of torch's optimizers compiled whole: right against float64, few kernels, and no recompilation as the step moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import kgen
from kgen.capture import operators

SHAPES = [(33, 5), (7,), (64, 16), (1000,), (3, 4, 5)]
STEPS = 4
# torch's own foreach steps: with `capturable` the counters stay on the device
OPTIMIZERS: dict[str, tuple[Callable[..., optim.Optimizer], dict[str, Any], bool]] = {
    "SGD": (optim.SGD, {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}, False),
    "Adam": (optim.Adam, {"amsgrad": True}, True),
    "AdamW": (optim.AdamW, {}, True),
    "Adagrad": (optim.Adagrad, {}, False),
    "RMSprop": (optim.RMSprop, {"momentum": 0.5, "centered": True}, True),
}


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def set_gradients(tensors: Sequence[nn.Parameter], step: int) -> None:
    torch.manual_seed(100 + step)
    for tensor in tensors:
        tensor.grad = torch.randn(tensor.shape, dtype=torch.float64).to(tensor.dtype)


def run(step: Callable[[], Any], tensors: Sequence[nn.Parameter], rates: Callable[[int], Any] = lambda k: None) -> None:
    for k in range(STEPS):
        rates(k)
        set_gradients(tensors, k)
        step()


def close(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=2e-5)


def clipped(tensors: Sequence[nn.Parameter], optimizer: optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(tensors, 0.7, foreach=True)
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_right_and_compiled_once(name: str) -> None:
    kind, options, capturable = OPTIMIZERS[name]
    exact, mine = parameters(torch.float64), parameters(torch.float32)
    run(kind(exact, lr=0.05, **options).step, exact)
    optimizer = kind(mine, lr=torch.tensor(0.05), foreach=True, **options, **({"capturable": True} if capturable else {}))
    torch._dynamo.reset()
    step = torch.compile(optimizer.step, backend="kgen")
    set_gradients(mine, 0)
    step()
    set_gradients(mine, 1)
    step()  # the state exists now
    with torch.compiler.set_stance("fail_on_recompile"):
        for k in range(2, STEPS):
            set_gradients(mine, k)
            step()
    close(mine, exact)


def test_clipping_and_step_are_few_kernels() -> None:
    exact, mine = parameters(torch.float64), parameters(torch.float32)
    run(partial(clipped, exact, optim.AdamW(exact, lr=0.05)), exact)
    optimizer = optim.AdamW(mine, lr=torch.tensor(0.05), foreach=True, capturable=True)
    torch._dynamo.reset()
    run(torch.compile(partial(clipped, mine, optimizer), backend="kgen"), mine)
    close(mine, exact)
    report = kgen.explain(partial(clipped, mine, optimizer), print_report=False)
    assert not report.externs
    assert len(report.kernels) <= 6


def test_many_parts_of_one_operator_are_traced_back_a_fixed_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cat has as many nodes as the list has tensors, and each reaches as many inputs: a walk for each would be quadratic."""
    calls_made: list[int] = []
    reached = operators._reached
    monkeypatch.setattr(operators, "_reached", lambda *given: calls_made.append(1) or reached(*given))

    def count(tensors: int) -> int:
        torch._dynamo.reset()
        calls_made.clear()
        sources = [torch.randn(5 + k) for k in range(tensors)]
        torch.compile(torch.cat, backend="kgen")(sources)
        return len(calls_made)

    assert 0 < count(30) == count(3)


def test_a_moving_rate_compiles_nothing_new() -> None:
    """A rate that is a tensor is an argument like any other."""
    exact, mine = parameters(torch.float64), parameters(torch.float32)
    plain, rate = optim.AdamW(exact, lr=0.05), torch.tensor(0.05)

    def set_plain(k: int) -> None:
        plain.param_groups[0]["lr"] = 0.05 / (k + 1)

    run(plain.step, exact, set_plain)
    optimizer = optim.AdamW(mine, lr=rate, foreach=True, capturable=True)
    torch._dynamo.reset()
    step = torch.compile(optimizer.step, backend="kgen")
    for k in range(STEPS):
        rate.fill_(0.05 / (k + 1))
        set_gradients(mine, k)
        with torch.compiler.set_stance("fail_on_recompile" if k > 1 else "default"):
            step()
    close(mine, exact)
