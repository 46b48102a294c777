"""Whether results are wrong, or as far from eager's as rounding takes them.

Eager is no exact reference: it rounds after each operator. So where results differ, the graph runs once more in float64. What
is as close to that as eager is, or nearly, is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

from kgen.bisection.copies import RandomState, copied
from kgen.report.script_checks import TOLERANCE, difference

__all__ = ["Wide", "first_difference", "first_that_differs", "run_eagerly", "widened"]

# How many times as far from float64 as eager's results may be.
_MARGIN = 4.0


def run_eagerly(gm: GraphModule, args: Sequence[Any]) -> list[Any]:
    """The results of an aten graph, operator by operator. It changes the arguments that the graph writes into."""
    with torch.no_grad():
        return list(Interpreter(gm).run(*args))


def first_difference(
    gm: GraphModule, before: Sequence[Any], got: Sequence[Any], eager: Sequence[Any], state: RandomState
) -> str:
    """What is wrong with `got`, or an empty text. Both lists are results, then arguments after the call; `before` are arguments
    before it, and `state` is that of random numbers."""
    found, results = first_that_differs(got, eager, lambda: _exact(gm, before, state)), len(got) - len(before)
    if found is None:
        return ""
    what = f"result {found}" if found < results else f"argument {found - results} after the call"
    return f"{what} {difference(got[found], eager[found])}"


def first_that_differs(got: Sequence[Any], eager: Sequence[Any], exact: Callable[[], Sequence[Any] | None]) -> int | None:
    """The position of the first value that is wrong. `exact` gives all of them in float64; None where it cannot."""
    suspects = [k for k, (a, b) in enumerate(zip(got, eager, strict=True)) if difference(a, b)]
    if not suspects:
        return None
    wide = exact()
    return next((k for k in suspects if wide is None or not _is_rounding(got[k], eager[k], wide[k])), None)


def _is_rounding(got: Any, eager: Any, exact: Any) -> bool:
    """Whether a result is about as far from float64 as eager's."""
    if not all(isinstance(t, torch.Tensor) and t.is_floating_point() and t.shape == got.shape for t in (got, eager, exact)):
        return False
    mine, eagers = ((t.double() - exact.double()).abs() for t in (got, eager))
    if mine.isnan().ne(eagers.isnan()).any():
        return False
    scale = exact.double().abs().nan_to_num(posinf=0.0).max()
    limit = _MARGIN * eagers.nan_to_num(posinf=0.0).max() + TOLERANCE.get(got.dtype, 0.1) * scale
    return bool(mine.nan_to_num(posinf=0.0).max() <= limit)


def _exact(gm: GraphModule, before: Sequence[Any], state: RandomState) -> list[Any] | None:
    """Results, then arguments after the call, in float64 where the graph runs so."""
    after = RandomState.now()
    state.restore()
    given = [widened(value) for value in copied(before)]
    try:
        with torch.no_grad():
            return [*Wide(gm).run(*given), *given]
    except (RuntimeError, TypeError, AssertionError):  # an operator with a dtype of its own
        return None
    finally:
        after.restore()


class Wide(Interpreter):
    """Runs a graph in float64."""

    def run_node(self, n: Node) -> Any:
        made = super().run_node(n)
        return map_aggregate(made, widened)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not torch.ops.kgen.rand.default:
            kwargs = {name: torch.float64 if _narrow(value) else value for name, value in kwargs.items()}
        return super().call_function(target, args, kwargs)


def _narrow(dtype: Any) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def widened(value: Any) -> Any:
    """A tensor of floats in float64."""
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
