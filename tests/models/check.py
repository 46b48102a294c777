"""Runs a model in eager, in float64 and compiled, forward and backward, and says how far the results are apart.

The error of a compiled model may be a small multiple of eager's own, both against eager in float64.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.catalogue import Arguments, Model

Run = Callable[..., Any]
Results = dict[str, Tensor]
# A compiled model may be this much less exact than eager, plus some units in the last place of the largest element. A unit of
# a 16-bit type is so large that two of them are all that does not hide mistakes.
FACTOR, UNITS, NARROW_UNITS = 4.0, 24.0, 2.0
# Gradients that cancel out, such as that of a key's bias, are nothing but rounding: errors count beside the largest gradient.
NOTHING = 1e-2


@dataclass(frozen=True)
class Errors:
    """Of one result: the largest difference from float64, eager's, and what was allowed; relative to the largest element."""

    name: str
    error: float
    eager: float
    allowed: float

    @property
    def wrong(self) -> bool:
        return not self.error <= self.allowed  # NaN is wrong


def outputs(value: Any, name: str = "out") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a result, with names."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from outputs(one, f"{name}.{key}")
    elif isinstance(value, tuple | list):
        for k, one in enumerate(value):
            yield from outputs(one, f"{name}.{k}")


def loss_of(results: Results) -> Tensor:
    """A weighted mean of the differentiable results: a plain sum has no gradient through a softmax."""
    total = torch.zeros((), dtype=torch.float64)
    for one in results.values():
        if one.requires_grad:
            weights = torch.linspace(0.5, 1.5, one.numel(), dtype=one.dtype, device=one.device).view(one.shape)
            total = total.to(one.device) + (one * weights).double().mean() * 8
    return total


def cast(arguments: Arguments, dtype: torch.dtype, device: str = "cpu") -> Arguments:
    return {k: v.to(device, dtype if v.is_floating_point() else v.dtype) for k, v in arguments.items()}


def run(
    call: Run,
    module: nn.Module,
    arguments: Arguments,
    train: bool,
    autocast: AbstractContextManager[Any] | None = None,
) -> Results:
    """Outputs, and in training gradients of parameters and buffers after the step. `call` computes what `module` does."""
    module.train(train)
    module.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(train), autocast or contextlib.nullcontext():
        found = dict(outputs(call(**arguments)))
    if train:
        loss_of(found).backward()
        found |= {f"gradient of {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
        found |= {f"buffer {name}": b.clone() for name, b in module.named_buffers()}
    return {name: value.detach() for name, value in found.items()}


def errors(got: Results, eager: Results, exact: Results) -> list[Errors]:
    """For each result; names, shapes and dtypes must be eager's."""
    assert got.keys() == eager.keys()
    most = max((float(v.abs().max()) for k, v in exact.items() if k.startswith("gradient") and v.numel()), default=0.0)
    return [_error(k, got[k], eager[k], exact[k], most * NOTHING if k.startswith("gradient") else 0.0) for k in eager]


def _error(name: str, got: Tensor, eager: Tensor, exact: Tensor, least: float) -> Errors:
    assert (got.shape, got.dtype) == (eager.shape, eager.dtype), name
    if not eager.is_floating_point():
        return Errors(name, float((got != eager).any()), 0.0, 0.0)
    infinite = ~exact.isfinite() & (exact.sign() == got.double().sign()) & ~got.isfinite()
    scale = float(exact.masked_fill(infinite, 0).abs().max()) if exact.numel() else 0.0
    scale = max(scale, least) or 1.0
    ours, theirs = (float(_distance(one, exact, infinite)) / scale for one in (got, eager))
    units = UNITS if got.dtype.itemsize > 2 else NARROW_UNITS
    return Errors(name, ours, theirs, FACTOR * theirs + units * torch.finfo(got.dtype).eps)


def _distance(a: Tensor, exact: Tensor, infinite: Tensor) -> Tensor:
    return (a.double() - exact.double()).masked_fill(infinite, 0).abs().max() if a.numel() else torch.zeros(())


@dataclass
class Subject:
    """A model in three copies: compiled, eager, and in float64."""

    model: Model
    size: str
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    amp: bool = False

    def __post_init__(self) -> None:
        made = self.model.module(self.size)
        self.exact = copy.deepcopy(made).to(self.device, torch.float64)
        self.eager = made.to(self.device, torch.float32 if self.amp else self.dtype)
        if hasattr(self.exact, "config"):  # torch's grouped matmul has no float64
            self.exact.config._experts_implementation = "eager"
        self.exact.load_state_dict(self.eager.state_dict())  # the rounded weights
        self.ours = copy.deepcopy(self.eager)

    def arguments(self, batch: int = 0, length: int = 0) -> Arguments:
        return cast(self.model.inputs(self.size, batch, length), torch.float32 if self.amp else self.dtype, self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, self.dtype) if self.amp else contextlib.nullcontext()

    def check(self, call: Run, train: bool, batch: int = 0, length: int = 0) -> list[Errors]:
        """The errors of one call."""
        arguments = self.arguments(batch, length)
        got = run(call, self.ours, arguments, train, self.autocast())
        eager = run(self.eager, self.eager, arguments, train, self.autocast())
        exact = run(self.exact, self.exact, cast(arguments, torch.float64, self.device), train)
        return errors(got, eager, exact)


def worst(found: list[Errors]) -> str:
    """What is wrong, the largest excess first; empty where nothing is."""
    wrong = sorted((e for e in found if e.wrong), key=lambda e: -e.error / max(e.allowed, 1e-30))
    return "; ".join(f"{e.name}: error {e.error:.3g}, eager's {e.eager:.3g}, allowed {e.allowed:.3g}" for e in wrong[:4])


def graph_breaks() -> int:
    """Those that Dynamo has counted since its counters were reset."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def breaks_without_kgen(subject: Subject, train: bool) -> tuple[int, int]:
    """Graph breaks and graphs where every operator runs in eager behind AOTAutograd."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = copy.deepcopy(subject.eager)
    run(torch.compile(module, backend="aot_eager"), module, subject.arguments(), train, subject.autocast())
    counted = graph_breaks(), torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return counted
