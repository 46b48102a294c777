"""Who competes, and what a job is: one pattern, forward or as a training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.patterns import BY_NAME, Inputs, Pattern, outputs_of

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def _backend(name: str, mode: str | None = None) -> Compile:
    return lambda fn: torch.compile(fn, backend=name, mode=mode, fullgraph=True)


# eager-again is eager itself: how far two equal contenders lie apart is what the other ratios must be read against.
CONTENDERS: dict[str, Compile] = {
    "eager": lambda fn: fn,
    "eager-again": lambda fn: fn,
    "inductor": _backend("inductor"),
    "kgen": _backend("kgen"),
    "aot_eager": _backend("aot_eager"),
}
COMPILERS = tuple(name for name in CONTENDERS if not name.startswith("eager"))


@dataclass(frozen=True)
class Job:
    """A pattern, run forward or as forward and backward."""

    pattern: Pattern
    training: bool

    @property
    def name(self) -> str:
        return f"{self.pattern.name}{' (train)' if self.training else ''}"

    def inputs(self, megabytes: int, device: str = "cpu") -> Inputs:
        inputs = self.pattern.inputs(megabytes, device)
        if self.training:
            for tensor in self.pattern.differentiable_inputs(inputs):
                tensor.requires_grad_()
        return inputs

    def bind(self, contender: str, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
        """A call without arguments that gives the outputs, or the gradients of a training step. Compiles at its first call."""
        fn = CONTENDERS[contender](copy_of(self.pattern.fn))
        if not self.training:
            return lambda: outputs_of(fn(*inputs))
        wanted = self.pattern.differentiable_inputs(inputs)
        seeds: list[Tensor] = []

        def step() -> tuple[Tensor, ...]:
            outputs = outputs_of(fn(*inputs))
            if not seeds:
                seeds.extend(map(_seed, outputs))
            return torch.autograd.grad(outputs, wanted, seeds)

        return step

    def fewest_bytes(self, megabytes: int) -> int:
        """A training step reads the inputs again, and the outputs' gradients, and writes the inputs' gradients."""
        inputs = self.pattern.inputs(megabytes)
        outputs = outputs_of(self.pattern.fn(*inputs))
        forward = self.pattern.fewest_bytes(inputs, outputs)
        if not self.training:
            return forward
        return 2 * forward + sum(t.nbytes for t in self.pattern.differentiable_inputs(inputs))


def _seed(output: Tensor) -> Tensor:
    """An output's gradient: all positive, so that the sums over it do not cancel to rounding errors."""
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(output.shape, generator=generator) + 0.5).to(output.device, output.dtype)


def copy_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Its own code object: Dynamo keeps compiled code by code object, and contenders must not count into one limit."""
    kind = type(fn)
    return kind(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)  # type: ignore[attr-defined, call-arg]


def jobs(names: list[str], which: str = "both") -> list[Job]:
    """`names` empty means all; `which` is forward, training or both."""
    unknown = sorted(set(names) - set(BY_NAME))
    if unknown:
        raise SystemExit(f"no pattern {', '.join(unknown)}; there are: {', '.join(BY_NAME)}")
    chosen = [BY_NAME[name] for name in names or BY_NAME]
    forward = [Job(p, False) for p in chosen] if which != "training" else []
    training = [Job(p, True) for p in chosen if p.trains] if which != "forward" else []
    return forward + training


def failure(cause: BaseException) -> str:
    """One line; a compiler's error often has the reason on its second."""
    lines = [line.strip() for line in str(cause).strip().splitlines() if line.strip()]
    return f"{type(cause).__name__}: {' '.join(lines[:2])}"[:200]
