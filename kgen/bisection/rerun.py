"""What a script that repeats a fault calls: it compiles the part by torch.compile and compares it with eager."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kgen.bisection.compare import first_difference
from kgen.bisection.copies import RandomState, copied

__all__ = ["INPUTS", "rerun"]

INPUTS = "inputs.pt"  # beside the script


def rerun(part: torch.nn.Module, script: str, options: Mapping[str, Any]) -> None:
    """Runs `part` on the inputs beside `script`, in eager and compiled. Exits with 1 where they differ; errors are raised."""
    kept = torch.load(Path(script).with_name(INPUTS), weights_only=True)
    for name, value in kept["constants"].items():
        part.register_buffer(name, value, persistent=False)
    inputs, state = kept["inputs"], RandomState(kept["random"])
    eager = _called(part, inputs, state)
    got = _called(torch.compile(part, backend="kgen", options=dict(options), fullgraph=True), inputs, state)
    text = first_difference(torch.fx.symbolic_trace(part), inputs, got, eager, state)
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
