"""What is to blame for a wrong call of a graph of Dynamo's: a pass in front of the aten graphs, or how these are captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kgen.backend import kgen_backend
from kgen.bisection.calls import WrongCall, difference_of_calls
from kgen.bisection.copies import RandomState, copied
from kgen.bisection.part import Part, values_of
from kgen.bisection.script import options_of
from kgen.bisection.search import Smallest, smallest
from kgen.bisection.trial import Wrong, error_text, trial_config
from kgen.config import Config

__all__ = ["CallTrial", "PassToBlame", "pass_to_blame", "smallest_call"]

Options = Mapping[str, Any]

# Options that leave out a pass: the stage that it belongs to, and how a call is right then.
_PASSES: tuple[tuple[Options, str, str], ...] = (
    ({"loop_batching": False}, "rewrite", "where unrolled loops are not made batches"),
    ({"loop_rolling": "off"}, "rewrite", "where unrolled loops stay unrolled"),
    ({"layer_sharing": "off"}, "rewrite", "where equal layers are compiled one by one"),
    ({"recompute_scores": "off"}, "capture", "where backward reads the softmax of the forward graph"),
    ({"chunked_logits": "off"}, "capture", "where gradients of logits are made at once"),
    ({"layouts": "off"}, "capture", "where tensors keep their layouts"),
    ({"numerics": "eager"}, "capture", "with eager's roundings"),
    ({"fallback": ("all",)}, "lower", "where every operator of the aten graphs runs in eager"),
)


@dataclass(frozen=True, slots=True)
class CallTrial:
    """Compiles a part of Dynamo's graph by torch.compile, and compares a call with eager, with `gradients` of all inputs."""

    config: Config
    state: RandomState
    gradients: bool

    def wrong(self, part: Part) -> Wrong | None:
        """What is wrong with the part, if anything is."""
        torch._dynamo.reset()
        before = copied(part.inputs)
        for value in before:
            if self.gradients and isinstance(value, torch.Tensor) and value.is_floating_point():
                value.requires_grad_()
        compiled = torch.compile(part.gm, backend=partial(kgen_backend, options=options_of(self.config)), fullgraph=True)
        try:
            text = difference_of_calls(part.gm, compiled, before, self.state)
        except Exception as cause:  # noqa: BLE001  of a part that cannot run by itself, or of kgen
            return Wrong(error_text(cause), type(cause).__name__)
        return Wrong(text) if text else None


@dataclass(frozen=True, slots=True)
class PassToBlame:
    """The stage whose work is wrong, how that is known, and options that each make the part right."""

    stage: str
    why: str
    right_with: tuple[Options, ...]


def smallest_call(call: WrongCall, trials: int, progress: Callable[[int, int], None]) -> tuple[Smallest | None, CallTrial]:
    """The smallest part of Dynamo's graph that is wrong by itself, and what tried it. No part where only the whole is wrong."""
    needs = any(isinstance(value, torch.Tensor) and value.requires_grad for value in call.inputs)
    trial = CallTrial(trial_config(call.config), call.state, needs)
    call.state.restore()
    values = values_of(call.gm, copied(call.inputs))
    return smallest(call.gm, values, Wrong(call.text), trial, trials, progress), trial


def pass_to_blame(part: Part, trial: CallTrial) -> PassToBlame:
    """Which pass makes the part wrong."""
    clues = list(_clues(part, trial))
    for options, stage, how in clues:
        if "fallback" not in options:
            return PassToBlame(stage, f"the call is right {how}", tuple(one[0] for one in clues))
    if clues:
        return PassToBlame(clues[0][1], f"the call is right {clues[0][2]}", (clues[0][0],))
    return PassToBlame(
        "capture", "no option that leaves out a pass makes the call right: its trace by AOTAutograd is wrong", ()
    )


def _clues(part: Part, trial: CallTrial) -> Iterator[tuple[Options, str, str]]:
    for options, stage, how in _PASSES:
        changes = any(getattr(trial.config, name) != value for name, value in options.items())
        if changes and replace(trial, config=replace(trial.config, **options)).wrong(part) is None:
            yield options, stage, how
