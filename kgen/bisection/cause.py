"""Which stage makes a small part wrong, in which kernel, and which options avoid it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kgen import backend
from kgen.bisection.compare import first_difference
from kgen.bisection.copies import copied
from kgen.bisection.part import Part
from kgen.bisection.trial import Trial, Wrong, fresh, info_of
from kgen.capture.operators import operator_name
from kgen.ir.plan import Kernel, members
from kgen.lowering.families import RULES
from kgen.lowering.table import rule_of
from kgen.reference.evaluate import evaluate_graph
from kgen.report.record import Record, recording

__all__ = ["Cause", "KernelOfPart", "cause_of", "operators_of"]

# Options that leave one thing out each, in the order in which a graph meets it.
_SWITCHES: tuple[tuple[str, Any], ...] = (
    ("inlining", False), ("templates", False), ("prologues", False), ("horizontal_fusion", False), ("operand_padding", False),
    ("fusion", False), ("loop_reordering", False), ("early_launch", False), ("numerics", "eager"), ("isa", "generic"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelOfPart:
    """A kernel of the part: its name, what made its text (a template with its configuration, or loops), and its operators."""

    name: str
    template: str
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cause:
    """`stage` is the first one whose work is wrong, `why` says how that is known. `rules` are the functions that lower the
    part's operators, `right_with` options that each make it right, and `kernels` those that the part becomes."""

    stage: str
    why: str
    rules: tuple[str, ...]
    kernels: tuple[KernelOfPart, ...]
    right_with: tuple[tuple[str, Any], ...]


def cause_of(part: Part, wrong: Wrong, trial: Trial) -> Cause:
    """What is to blame for a part that is wrong."""
    kernels = _kernels(part, trial)
    right_with = tuple(_options_that_help(part, trial))
    stage, why = _raising(part, trial) if wrong.error else _differing(part, trial, dict(right_with), kernels)
    return Cause(stage, why, tuple(_rules(part)), kernels, right_with)


def operators_of(part: Part) -> tuple[str, ...]:
    """The part's operators, each once, in order."""
    return tuple(dict.fromkeys(operator_name(node.target) for node in part.calls))


# ---- kernels ------------------------------------------------------------------------------------------------------------


def _kernels(part: Part, trial: Trial) -> tuple[KernelOfPart, ...]:
    """None where the part does not compile."""
    with recording() as recorder:
        try:
            trial.compiled(part)
        except Exception:  # noqa: BLE001  the part is known to be wrong
            return ()
    records = [one for one in recorder.graphs if isinstance(one, Record)]
    return tuple(_kernel(kernel) for one in records for step in one.plan.kernels for kernel in members(step))


def _kernel(kernel: Kernel) -> KernelOfPart:
    operators = dict.fromkeys(name for origin in kernel.origins for name in origin.operators)
    return KernelOfPart(kernel.name, "loops" if kernel.choice is None else str(kernel.choice), tuple(operators))


def _rules(part: Part) -> Iterator[str]:
    """Where the rules of the part's operators are."""
    for operator in operators_of(part):
        rule = rule_of(RULES, operator)
        if rule is not None:
            yield f"{operator}: {rule.__module__}.{getattr(rule, '__qualname__', type(rule).__qualname__)}"


# ---- which options help -------------------------------------------------------------------------------------------------


def _options_that_help(part: Part, trial: Trial) -> Iterator[tuple[str, Any]]:
    for name, value in _SWITCHES:
        if getattr(trial.config, name) != value and _is_right(part, trial, {name: value}):
            yield name, value
    for operator in operators_of(part):
        if _is_right(part, trial, {"fallback": (*trial.config.fallback, operator)}):
            yield "fallback", operator


def _is_right(part: Part, trial: Trial, options: Mapping[str, Any]) -> bool:
    return replace(trial, config=replace(trial.config, **options)).wrong(part) is None


# ---- which stage --------------------------------------------------------------------------------------------------------


def _raising(part: Part, trial: Trial) -> tuple[str, str]:
    """The stage that raises."""
    work: Any = fresh(part.gm)
    info = info_of(part)
    for stage in backend.STAGES:
        try:
            work = stage(work, info, trial.config)
        except Exception:  # noqa: BLE001  which one it is, is the question
            return stage.__name__, "it raises the error"
    return "call", "all stages pass, and the call raises the error"


def _differing(
    part: Part, trial: Trial, right_with: Mapping[str, Any], kernels: tuple[KernelOfPart, ...]
) -> tuple[str, str]:
    text = _lowered_difference(part, trial)
    if text:
        return "lower", f"the loop IR is wrong before it is scheduled: {text}"
    checked = "the loop IR is right" if text == "" else "the loop IR could not be evaluated"
    for option, stage, why in _CLUES:
        if option in right_with and (option != "templates" or any(k.template != "loops" for k in kernels)):
            return stage, f"{checked}, and so is the result {why}"
    return "render", f"{checked}, and no option that leaves out a decision makes the result right"


# What an option that helps says: the stage, and how.
_CLUES = (
    ("templates", "render", "without templates"),
    ("fusion", "schedule", "without fusion"),
    ("horizontal_fusion", "schedule", "without launches that kernels share"),
    ("inlining", "lower", "with a loop for each operator"),
    ("loop_reordering", "schedule", "with loops in the operator's order"),
    ("isa", "render", "without this machine's vector instructions"),
)


def _lowered_difference(part: Part, trial: Trial) -> str | None:
    """How the evaluated loop IR differs from eager; None where it cannot be evaluated."""
    given = copied(part.inputs)
    work: Any = fresh(part.gm)
    try:
        for stage in backend.STAGES[: backend.STAGES.index(backend.lower) + 1]:
            work = stage(work, info_of(part), trial.config)
        trial.state.restore()
        got = [*evaluate_graph(work[1], given), *given]
    except Exception:  # noqa: BLE001  calls of Python functions, or an operator without a reference
        return None
    return first_difference(part.gm, part.inputs, got, trial.eager(part), trial.state)
