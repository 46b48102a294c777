"""Which kernels an error is about, which operators these compute, and what can run instead (docs/failures.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import GraphModule

from kgen import failures, only
from kgen.build import cpp
from kgen.build.unit import PRELUDE, UnitPlan
from kgen.capture.operators import computing_nodes, operator_name
from kgen.config import Config
from kgen.errors import ConfigurationFailed, InternalError, KernelBuildFailed, KernelSpills, KernelTooLarge, TritonBuildFailed
from kgen.failures import Failure, KernelsFailed
from kgen.ir.plan import Choice, Launch, Packing, Schedule, members, variants
from kgen.unusable import Unusable
from kgen.verdict import Reason

__all__ = ["StepFailed", "failure_of", "say_what_failed"]

Work = tuple[GraphModule, Schedule]


class StepFailed(Exception):
    """A step cannot be rendered."""

    def __init__(self, step: Launch | Packing, cause: Exception) -> None:
        super().__init__(f"{step.name}: {type(cause).__name__}: {cause}")
        self.step, self.cause = step, cause


def say_what_failed(
    failure: InternalError,
    work: Work,
    units: UnitPlan,
    config: Config,
    unfit_with: Callable[[Launch, str], tuple[Unusable, ...]],
) -> None:
    """Raises ConfigurationFailed or KernelsFailed where something else can compute what the kernels do that `failure` is about.

    A configuration that needs more shared memory or registers than there are, is no error: what a template says of its needs is
    what it foresees. Everything else is one. `unfit_with` gets a step, and why it cannot run. It says what is unusable for its
    problem: its configuration, and those of the next ones that cannot run either."""
    if isinstance(failure, KernelTooLarge | KernelSpills) and only.current() is None:
        _raise_unfit([failure, *failure.details.get("others", ())], work[1], units, unfit_with)
    if failures.is_strict(config):
        return
    found = [
        failure_of(_steps_of(symbol, work[1], units), cause, _source(cause, symbol, units), work)
        for symbol, cause in _broken_kernels(failure, units).items()
    ]
    if found:
        raise KernelsFailed(found) from failure


def _raise_unfit(
    found: Sequence[InternalError], plan: Schedule, units: UnitPlan, unfit_with: Callable[[Launch, str], tuple[Unusable, ...]]
) -> None:
    """Raises ConfigurationFailed for all kernels that do not fit and have a configuration: each alone would cost an attempt."""
    unfit: list[Unusable] = []
    for one in found:
        steps = (step for step in _steps_of(one.details["kernel"], plan, units) if not isinstance(step, Packing))
        step = next((step for step in steps if _choice(step) is not None), None)
        if step is not None:
            unfit += unfit_with(step, one.text)
    if unfit:
        raise ConfigurationFailed(choice=unfit[0].choice, why=unfit[0].why, found=tuple(unfit)) from found[0]


def _broken_kernels(failure: InternalError, units: UnitPlan) -> dict[str, InternalError]:
    """The errors of kernels by their symbols. The functions of a C++ unit are compiled one by one; where the compiler fails on
    the unit as a whole only, all of them count as broken."""
    name = failure.details.get("kernel")
    if name is None:
        return {}
    if not isinstance(failure, KernelBuildFailed):
        return {name: failure}
    [text] = [one.source for one in units.sources if one.name == name]
    inside = {symbol: function for symbol, function in units.functions.items() if function in text}
    broken = cpp.broken_units([cpp.Unit(symbol, PRELUDE + function) for symbol, function in inside.items()])
    return dict(broken) or dict.fromkeys(inside, failure)


def _steps_of(symbol: str, plan: Schedule, units: UnitPlan) -> list[Launch | Packing]:
    """The steps that one kernel was made for: equal ones share it."""
    steps = [*(one for step in plan.kernels for one in variants(step)), *plan.packings]
    return [one for one in steps if units.calls[one.name].symbol == symbol]


def _choice(step: Launch | Packing) -> Choice | None:
    return None if isinstance(step, Packing) else members(step)[0].choice


def _source(cause: InternalError, symbol: str, units: UnitPlan) -> str:
    """The file with the kernel's text; the compilers have kept it."""
    if "source" in cause.details:
        return str(cause.details["source"])
    launch = next((call.launch for call in units.calls.values() if call.symbol == symbol), None)
    return "" if launch is None else failures.keep_source(launch.name, launch.source, ".py")


def failure_of(steps: Sequence[Launch | Packing], cause: Exception, source: str, work: Work) -> Failure:
    """The failure of some steps' kernel, and what can run instead: another configuration of its template, or library calls."""
    gm, plan = work
    names = ", ".join(dict.fromkeys(step.name for step in steps))
    origins = [origin for step in steps if not isinstance(step, Packing) for origin in step.origins]
    choice = next(filter(None, map(_choice, steps)), None)
    nodes = computing_nodes(gm, plan.graph, origins)
    built = isinstance(cause, KernelBuildFailed | TritonBuildFailed)
    return Failure(
        f"kernel {names}" + (f" of {choice}" if choice is not None else ""),
        failures.reason_of(cause),
        "PyTorch's own operators run" if choice is None else "another configuration, or the library, takes over",
        Reason.NOT_COMPILED if built else Reason.FAILED if isinstance(cause, InternalError) else Reason.INTERNAL_ERROR,
        tuple(dict.fromkeys(operator_name(n.target) for n in nodes)),
        next((o.line for o in origins if o.line), ""),
        source,
        frozenset(n.name for n in nodes) if choice is None else frozenset(),
        choice=choice,
    )
