"""Which stage makes a small part wrong, in which kernel, and which options avoid it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from kgen.lowering.graph import rule_of
from kgen.reference.evaluate import evaluate_graph
from kgen.report.record import Record, recording

__all__ = ["CLUES", "Cause", "KernelOfPart", "cause_of", "cause_of_death", "kernel_of_part", "operators_of"]

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Clue:
    """Options that leave something out. Where they help, `stage` is to blame: the result is right `how`."""

    options: Options
    stage: str
    how: str

    def counts(self, kernels: Sequence[KernelOfPart]) -> bool:
        """Where no kernel has a template, a graph without templates may have other kernels for another reason."""
        return "templates" not in self.options or any(kernel.template != "loops" for kernel in kernels)


# From what is most telling to what is least.
CLUES = (
    _Clue({"templates": False}, "render", "without templates"),
    _Clue({"prologues": False}, "schedule", "where templates read their operands from memory"),
    _Clue({"operand_padding": False}, "schedule", "where templates read their operands as they lie"),
    _Clue({"horizontal_fusion": False}, "schedule", "without launches that kernels share"),
    _Clue({"fusion": False}, "schedule", "without fusion"),
    _Clue({"inlining": False}, "lower", "with a loop for each operator"),
    _Clue({"fusion": False, "inlining": False}, "schedule", "with a kernel for each operator"),
    _Clue({"loop_reordering": False}, "schedule", "with loops in the operators' order"),
    _Clue({"early_launch": False}, "render", "where each kernel waits for the one before"),
    _Clue({"isa": "generic"}, "render", "without this machine's vector instructions"),
    _Clue({"numerics": "eager"}, "render", "with eager's roundings"),
)


# Where each trial that fails costs a process.
_FEW_CLUES = tuple(one for one in CLUES if {"templates", "inlining", "isa"} & one.options.keys())


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
    right_with: tuple[Options, ...]


def cause_of(part: Part, wrong: Wrong, trial: Trial) -> Cause:
    """What is to blame for a part that is wrong."""
    kernels = _kernels(part, trial)
    clues = list(_clues(part, trial))
    stage, why = _raising(part, trial) if wrong.error else _differing(part, trial, clues, kernels)
    right_with = (*(clue.options for clue in clues), *_fallbacks(part, trial))
    return Cause(stage, why, tuple(_rules(part)), kernels, right_with)


def cause_of_death(part: Part, trial: Trial, compiling: bool) -> Cause:
    """What is to blame for a part that ends its process, or never ends. `trial` tries in another process."""
    kernels = () if compiling else _kernels(part, trial)
    clues = [one for one in _clues(part, trial, _FEW_CLUES) if one.counts(kernels)]
    stage, why = (
        (clues[0].stage, f"it ends well {clues[0].how}") if clues else ("build" if compiling else "call", "no option helps")
    )
    right_with = (*(clue.options for clue in clues), *_fallbacks(part, trial))
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
    return tuple(kernel_of_part(kernel) for one in records for step in one.plan.kernels for kernel in members(step))


def kernel_of_part(kernel: Kernel) -> KernelOfPart:
    """A kernel's name, template and operators."""
    operators = dict.fromkeys(name for origin in kernel.origins for name in origin.operators)
    return KernelOfPart(kernel.name, "loops" if kernel.choice is None else str(kernel.choice), tuple(operators))


def _rules(part: Part) -> Iterator[str]:
    """Where the rules of the part's operators are."""
    for operator in operators_of(part):
        rule = rule_of(RULES, operator)
        if rule is not None:
            yield f"{operator}: {rule.__module__}.{getattr(rule, '__qualname__', type(rule).__qualname__)}"


# ---- which options help -------------------------------------------------------------------------------------------------


def _clues(part: Part, trial: Trial, clues: Sequence[_Clue] = CLUES) -> Iterator[_Clue]:
    for clue in clues:
        if _changes(trial, clue.options) and _is_right(part, trial, clue.options):
            yield clue


def _changes(trial: Trial, options: Options) -> bool:
    return any(getattr(trial.config, name) != value for name, value in options.items())


def _fallbacks(part: Part, trial: Trial) -> Iterator[Options]:
    """Each operator that makes the part right when it runs in eager."""
    for operator in operators_of(part):
        if _is_right(part, trial, {"fallback": (*trial.config.fallback, operator)}):
            yield {"fallback": operator}


def _is_right(part: Part, trial: Trial, options: Options) -> bool:
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


def _differing(part: Part, trial: Trial, clues: Sequence[_Clue], kernels: tuple[KernelOfPart, ...]) -> tuple[str, str]:
    text = _lowered_difference(part, trial)
    if text:
        return "lower", f"the loop IR is wrong before it is scheduled: {text}"
    checked = "the loop IR is right" if text == "" else "the loop IR could not be evaluated"
    for clue in clues:
        if clue.counts(kernels):
            return clue.stage, f"{checked}, and so is the result {clue.how}"
    return "render", f"{checked}, and no option that leaves out a decision makes the result right"


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
