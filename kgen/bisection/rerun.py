"""What a script that repeats a fault calls: it compiles the part by torch.compile and compares it with eager."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kgen.bisection.calls import difference_of_calls
from kgen.bisection.compare import first_difference
from kgen.bisection.copies import RandomState, copied
from kgen.bisection.timing import timed

__all__ = ["INPUTS", "rerun", "rerun_call", "rerun_with_gradients", "time"]

INPUTS = "inputs.pt"  # beside the script


def rerun(part: torch.nn.Module, script: str, options: Mapping[str, Any]) -> None:
    """Runs `part` on the inputs beside `script`, in eager and compiled. Exits with 1 where they differ; errors are raised."""
    inputs, state = _kept(part, script)
    eager = _called(part, inputs, state)
    got = _called(torch.compile(part, backend="kgen", options=dict(options), fullgraph=True), inputs, state)
    _end(first_difference(torch.fx.symbolic_trace(part), inputs, got, eager, state))


def rerun_call(part: torch.nn.Module, script: str, options: Mapping[str, Any]) -> None:
    """`rerun` of a part of Dynamo's graph."""
    inputs, state = _kept(part, script)
    compiled = torch.compile(part, backend="kgen", options=dict(options), fullgraph=True)
    _end(difference_of_calls(torch.fx.symbolic_trace(part), compiled, inputs, state) or "")


def rerun_with_gradients(part: torch.nn.Module, script: str, options: Mapping[str, Any]) -> None:
    """`rerun_call`, with gradients of all inputs."""
    inputs, state = _kept(part, script)
    for value in inputs:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.requires_grad_()
    compiled = torch.compile(part, backend="kgen", options=dict(options), fullgraph=True)
    _end(difference_of_calls(torch.fx.symbolic_trace(part), compiled, inputs, state) or "")


def time(part: torch.nn.Module, script: str, options: Mapping[str, Any]) -> None:
    """Times `part` on the inputs beside `script`, compiled and in eager in turn. Exits with 1 where eager is faster."""
    inputs, _ = _kept(part, script)
    compiled = torch.compile(part, backend="kgen", options=dict(options), fullgraph=True)
    with torch.no_grad():
        found = timed(partial(compiled, *inputs), partial(part, *inputs))
    _say(f"{'SLOWER' if found.is_slower else 'no slower'}: {found}")
    if found.is_slower:
        raise SystemExit(1)


def _kept(part: torch.nn.Module, script: str) -> tuple[list[Any], RandomState]:
    """The inputs beside the script, and the state of random numbers. The part gets its constants."""
    kept = torch.load(Path(script).with_name(INPUTS), weights_only=True)
    for name, value in kept["constants"].items():
        part.register_buffer(name, value, persistent=False)
    return kept["inputs"], RandomState(kept["random"])


def _end(text: str) -> None:
    _say(f"WRONG: {text}" if text else "right: the compiled part agrees with eager")
    if text:
        raise SystemExit(1)


def _called(part: Any, inputs: list[Any], state: RandomState) -> list[Any]:
    """Results, then arguments after the call."""
    given = copied(inputs)
    state.restore()
    with torch.no_grad():
        return [*part(*given), *given]


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201  a script's output
