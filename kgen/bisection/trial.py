"""One trial: a part of a graph through the stages and, beside it, in eager."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from kgen import backend
from kgen import config as configuration
from kgen.bisection.compare import first_difference, run_eagerly
from kgen.bisection.copies import RandomState, copied
from kgen.bisection.part import Part
from kgen.capture.aot_cache import CompiledGraph
from kgen.capture.torch_adapter import GraphInfo, copied_graph, output_values
from kgen.config import Config
from kgen.errors import KgenError

__all__ = ["Trial", "Wrong", "error_text", "fresh", "info_of", "trial_config"]

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Wrong:
    """How a graph is wrong: its compilation, or its call, raises an error of this class; or, without one, what differs."""

    text: str
    error: str = ""

    def is_like(self, other: Wrong) -> bool:
        """Whether both are the same fault, as far as can be told."""
        return self.error == other.error


def error_text(cause: Exception) -> str:
    """An error in one line."""
    text = cause.text if isinstance(cause, KgenError) else str(cause)
    return f"{type(cause).__name__}: {text.strip().partition(chr(10))[0]}"


@dataclass(frozen=True, slots=True)
class Trial:
    """Compares a part with eager under a configuration. Random numbers begin with the same state in both."""

    config: Config
    state: RandomState

    def wrong(self, part: Part) -> Wrong | None:
        """What is wrong with the part, if anything is."""
        try:
            compiled = self.compiled(part)
            got = self._called(compiled, part)
        except Exception as cause:  # noqa: BLE001  of any stage, or of the call
            return Wrong(error_text(cause), type(cause).__name__)
        text = first_difference(part.gm, part.inputs, got, self.eager(part), self.state)
        return Wrong(text) if text else None

    def compiled(self, part: Part) -> CompiledGraph:
        """The part through all stages."""
        return backend.compile_again(fresh(part.gm), info_of(part), self.config)

    def eager(self, part: Part) -> list[Any]:
        """Results of the part in eager, then its arguments after the call."""
        given = copied(part.inputs)
        self.state.restore()
        return [*run_eagerly(part.gm, given), *given]

    def _called(self, compiled: CompiledGraph, part: Part) -> list[Any]:
        given = copied(part.inputs)
        self.state.restore()
        with torch.no_grad():
            return [*compiled(list(given)), *given]


def trial_config(config: Config) -> Config:
    """The configuration of trials: errors raise, nothing comes from a cache of graphs, and no call is recorded or frozen."""
    return replace(configuration.of_bodies(config), cache=False, strict=True, debug=None, tuning="before")


def fresh(gm: GraphModule) -> GraphModule:
    """A copy for stages to change."""
    return GraphModule(gm, copied_graph(gm))


def info_of(part: Part) -> GraphInfo:
    """A part is a graph for inference, whose results have eager's strides."""
    results: Sequence[Any] = output_values(part.gm)
    return GraphInfo(
        f"part{next(_numbers)}", "inference", frozenset(), frozenset(range(len(results))), shape_env=part.shape_env
    )
