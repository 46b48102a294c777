"""Calls of Dynamo's graphs, gradients included: what goes wrong in front of AOTAutograd, or in its hands, no aten graph shows.

A call runs once more in eager, and once more compiled, on copies of its arguments. Results, arguments after the call and the
gradients of both are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from kgen.bisection.compare import Wide, first_that_differs, widened
from kgen.bisection.copies import RandomState, copied
from kgen.bisection.search import Seen
from kgen.config import Config
from kgen.failures import NOT_OURS
from kgen.report.script_checks import difference
from kgen.watch import calls_watched

__all__ = [
    "FoundCall",
    "Run",
    "SeenCalls",
    "WrongCall",
    "difference_of_calls",
    "leaves",
    "run_with_gradients",
    "watching_calls",
]


@dataclass(frozen=True, slots=True)
class WrongCall:
    """A graph of Dynamo's that kgen computes wrongly, though each aten graph that it becomes agrees with its operators."""

    gm: GraphModule
    config: Config
    inputs: tuple[Any, ...]
    state: RandomState
    text: str


class FoundCall(BaseException):
    """Ends the program at the first wrong call. No `except Exception` of the program's may catch it."""

    def __init__(self, call: WrongCall) -> None:
        super().__init__(call.text)
        self.call = call


@dataclass(slots=True)
class SeenCalls:
    """Calls that were compared, and those that were not, for they draw random numbers or fail by themselves."""

    compared: int = 0
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """What a call gives: `results`, `gradients` of its inputs for made-up gradients of its results, and `given`, its arguments
    after the call."""

    results: tuple[Any, ...]
    gradients: tuple[Any, ...]
    given: tuple[Any, ...]

    @property
    def values(self) -> tuple[Any, ...]:
        return (*self.results, *self.gradients, *self.given)

    @property
    def counts(self) -> str:
        return f"{len(self.results)} results and {len(self.gradients)} gradients"

    def name(self, position: int) -> str:
        """What the value at a position of `values` is."""
        counts = (len(self.results), len(self.gradients), len(self.given))
        for count, text in zip(counts, ("result {}", "gradient of argument {}", "argument {} after the call"), strict=True):
            if position < count:
                return text.format(position)
            position -= count
        raise IndexError(position)


@contextmanager
def watching_calls(aten: Seen) -> Iterator[SeenCalls]:
    """Compares every call of a graph of Dynamo's. Raises FoundCall, from the call, at the first that is wrong. `aten` does not
    count the calls of aten graphs that this takes."""
    seen = SeenCalls()

    def watch(gm: GraphModule, config: Config, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            before = aten.calls
            _compare(gm, config, compiled, args, seen)
            aten.calls = before
            return compiled(*args)

        return call

    with calls_watched(watch):
        yield seen


def _compare(gm: GraphModule, config: Config, compiled: Callable[..., Any], args: Sequence[Any], seen: SeenCalls) -> None:
    state, before = RandomState.now(), leaves(args)
    try:
        text = difference_of_calls(gm, compiled, before, state)
    except NOT_OURS:
        text = None
    except Exception:  # noqa: BLE001  what the program itself may not raise: the real call will tell
        text = None
    finally:
        state.restore()
    if text is None:
        seen.left_out += 1
        return
    seen.compared += 1
    if text:
        raise FoundCall(WrongCall(gm, config, tuple(before), state, text))


def difference_of_calls(gm: GraphModule, compiled: Callable[..., Any], before: Sequence[Any], state: RandomState) -> str | None:
    """What of a compiled call differs from eager, or an empty text. None where the graph draws random numbers, which are other
    ones in eager."""
    state.restore()
    eager = run_with_gradients(gm, before)
    if not torch.equal(RandomState.now().cpu, state.cpu):
        return None
    got = run_with_gradients(compiled, before)
    if (len(got.results), len(got.gradients)) != (len(eager.results), len(eager.gradients)):
        return f"{got.counts}, not {eager.counts}"
    found = first_that_differs(got.values, eager.values, lambda: _exact(gm, before))
    return "" if found is None else f"{eager.name(found)} {difference(got.values[found], eager.values[found])}"


def run_with_gradients(function: Callable[..., Any], before: Sequence[Any]) -> Run:
    """Calls a function on copies of the arguments, and backward where anything needs it."""
    given = leaves(before)
    made = function(*given)
    results = tuple(made) if isinstance(made, tuple | list) else (made,)
    return Run(_detached(results), _detached(_gradients(results, given)), _detached(given))


def _gradients(results: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    ends = [one for one in results if isinstance(one, torch.Tensor) and one.requires_grad]
    wanted = [one for one in given if isinstance(one, torch.Tensor) and one.requires_grad]
    if not ends or not wanted or not torch.is_grad_enabled():
        return []
    found = iter(torch.autograd.grad(ends, wanted, list(map(_made_up, ends)), allow_unused=True))
    return [next(found) if isinstance(one, torch.Tensor) and one.requires_grad else None for one in given]


def _made_up(result: torch.Tensor) -> torch.Tensor:
    """A gradient of a result: the same numbers in each run."""
    count = torch.arange(result.numel(), dtype=torch.float64).reshape(result.shape)
    return torch.cos(count * 0.7 + 0.3).to(result.device, result.dtype)


def leaves(values: Sequence[Any]) -> list[Any]:
    """Copies of arguments that need gradients where the values do."""
    made = copied(values)
    for old, new in zip(values, made, strict=True):
        if isinstance(old, torch.Tensor) and old.requires_grad:
            new.requires_grad_()
    return made


def _detached(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in values)


def _exact(gm: GraphModule, before: Sequence[Any]) -> tuple[Any, ...] | None:
    """All values in float64 where the graph runs so."""
    wide = [widened(value).detach() if isinstance(value, torch.Tensor) else value for value in before]
    for old, new in zip(before, wide, strict=True):
        if isinstance(old, torch.Tensor) and old.requires_grad:
            new.requires_grad_()
    try:
        return run_with_gradients(Wide(gm).run, wide).values
    except (RuntimeError, TypeError, AssertionError):  # an operator with a dtype of its own
        return None
