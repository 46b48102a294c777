"""`check_template`: every problem under several configurations, by the template alone, on memory that shows what it forgets."""

from __future__ import annotations

import math
import random
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed

from kgen import errors
from kgen.backend import kgen_backend
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.index import Sizes
from kgen.ir.plan import Schedule, address, members
from kgen.only import Pick, only
from kgen.option_names import near
from kgen.report.record import EagerRecord, Recorder, recording
from kgen.templates import registry
from kgen.templates.contract import Config, Template
from kgen.testing.case import Case, make
from kgen.testing.cases import DTYPES, cases, cases_of_dtype, large, plain
from kgen.testing.compare import Difference, compare, in_eager, in_float64
from kgen.testing.report import Outcome, Report, Result
from kgen.tuning.progress import counting
from kgen.verdict import Outcome as Decision
from kgen.verdict import Reason as Why

__all__ = ["check_template"]


def check_template(  # noqa: PLR0913  one keyword a question, all with defaults
    template: Any,
    *,
    device: str | None = None,
    problems: Iterable[Case] | None = None,
    only: str | Sequence[str] = (),
    configs: int = 3,
    seconds: float | None = None,
    seed: int = 0,
    raises: bool = True,
) -> Report:
    """Checks a template (the decorated class, its name, or a Template) and reports on every problem.

    Problems are `cases(...)` in the first type that the template takes and fewer in all others, or `problems`. Each is
    compiled with this template and no other, under up to `configs` of the configurations on offer: the first, the one with the
    smallest tiles, then random ones (`seed`). `only` takes those whose text has one of these, such as ``"epilogue 'gelu'"``;
    after `seconds` no further one begins. Templates for "cuda" run on a GPU where there is one, else in Triton's interpreter;
    `device` decides. A result is right when it agrees with the same function of float64. A terminal shows how far it is.

    Raises TemplateCheckFailed for the first problem with a wrong result or an error, and when the template takes none at all,
    unless `raises` is False."""
    found = _template(template)
    checker = _Checker(found, _device(found, device), configs, seed)
    texts = (only,) if isinstance(only, str) else only

    def wanted(case: Case) -> bool:
        return not texts or any(text in str(case) for text in texts)

    given = _problems(checker, wanted) if problems is None else filter(wanted, problems)
    report = _checked(checker, given, seconds)
    if raises:
        report.raise_if_failed()
    return report


def single_problems(
    template: Any, dtypes: Sequence[str], only: Sequence[str], options: Mapping[str, Any]
) -> Iterator[tuple[str, Callable[[], str]]]:
    """By its text each problem in these types, and what checks it alone. That raises TemplateCheckFailed, and returns why the
    template refuses the problem, or nothing. `options` are those of `check_template`."""
    found = _template(template)
    for dtype in (getattr(torch, name) for name in dtypes):
        for case in (plain(found, dtype), *cases(found, dtype)):
            if not only or any(text in str(case) for text in only):
                yield str(case), partial(_check_alone, found, case, options)


def _check_alone(template: Template, case: Case, options: Mapping[str, Any]) -> str:
    report = check_template(template, problems=[case], raises=False, **options)
    if report.failed or not report.refused:
        report.raise_if_failed()
        return ""
    return report.refused[0].reason


def _checked(checker: _Checker, problems: Iterable[Case], seconds: float | None) -> Report:
    """One after the other, while there is time."""
    results: list[Result] = []
    until = math.inf if seconds is None else time.monotonic() + seconds
    stopped = None
    with counting(f"checking {checker.template.name} ({checker.where})") as note:
        for case in problems:
            if time.monotonic() > until:
                stopped = case
                break
            note(f"{len([r for r in results if r.outcome is Outcome.FAILED])} failed, {case}")
            results += checker.check(case)
    return Report(checker.template.name, checker.where, tuple(results), checker.options, stopped)


def _template(given: Any) -> Template:
    if isinstance(given, Template):
        return given
    if isinstance(given, str):
        return registry.find(given)
    found = next((t for t in registry.every() if isinstance(given, type) and type(t.author) is given), None)
    if found is None:
        names = [t.name for t in registry.every()]
        raise errors.UnknownTemplate(template=given, near=near(str(given), names), valid=", ".join(names))
    return found


def _device(template: Template, asked: str | None) -> torch.device:
    return torch.device(asked or ("cuda" if template.device == "cuda" and torch.cuda.is_available() else "cpu"))


def _problems(checker: _Checker, wanted: Callable[[Case], bool]) -> Iterator[Case]:
    """Everything in the first type that the template takes; in the others only what depends on the type."""
    template, first = checker.template, True
    for dtype in DTYPES:
        case = plain(template, dtype)
        more = [
            *cases_of_dtype(template, dtype),
            *(() if checker.interpreted else large(template, dtype)),
            *(cases(template, dtype) if first else ()),
        ]
        chosen = [one for one in more if wanted(one)]
        if wanted(case):
            yield case
        if chosen and checker.takes(case):
            first = False
            yield from chosen


@dataclass(slots=True)
class _Checker:
    template: Template
    device: torch.device
    configs: int
    seed: int
    last: tuple[Case, Outcome] | None = None  # the problem before

    @property
    def interpreted(self) -> bool:
        return self.template.device == "cuda" and self.device.type == "cpu"

    @property
    def where(self) -> str:
        return "interpreter" if self.interpreted else str(self.device)

    @property
    def options(self) -> str:
        """What differs from the defaults, as it is written behind other arguments."""
        given = (
            ("device", str(self.device), str(_device(self.template, None))),
            ("configs", self.configs, 3),
            ("seed", self.seed, 0),
        )
        return "".join(f", {name}={value!r}" for name, value, default in given if value != default)

    def takes(self, case: Case) -> bool:
        """Whether the template does not refuse a problem, the one before or another."""
        if self.last is not None and self.last[0] is case:
            return self.last[1] is not Outcome.REFUSED
        return self._run(case, lambda configs: configs[0]).outcome is not Outcome.REFUSED

    def check(self, case: Case) -> list[Result]:
        """The problem under each configuration; once where it is refused."""
        offered: list[Config] = []

        def first(configs: Sequence[Config]) -> Config:
            offered[:] = configs
            return configs[0]

        results = [self._run(case, first)]
        if results[0].outcome is not Outcome.REFUSED:
            results += [self._run(case, _where_offered(config)) for config in self._others(case, offered)]
        self.last = case, results[-1].outcome
        return results

    def _others(self, case: Case, offered: Sequence[Config]) -> list[Config]:
        """Besides the first: the one with the smallest tiles, and some of the rest: of a problem that is repeated the same."""
        rest = sorted(offered[1:], key=_volume)
        chosen = rest[:1] + random.Random(f"{self.seed} {case}").sample(rest[1:], max(0, min(self.configs - 2, len(rest) - 1)))
        return chosen[: self.configs - 1]

    def _run(self, case: Case, pick: Pick) -> Result:
        """One compilation and one call. Whatever goes wrong in either is the result."""
        generator = torch.Generator().manual_seed(self.seed)
        guarded = [make(spec, self.device, generator) for spec in case.inputs]
        inputs = [h.tensor for h in guarded]
        run = _Run(case)
        try:
            eager = in_eager(case, inputs)
        except (NotImplementedError, IndexError, RuntimeError, ValueError) as cause:  # of no elements, or of such a type
            return run.refused_because(f"the operator itself does not take it: {cause}")
        try:
            reference = in_float64(case, inputs)
        except Exception as cause:  # noqa: BLE001  the author's function may raise anything
            return run.failed(f"its reference raises {type(cause).__name__}: {cause}")
        if case.reference is not None:
            found = compare(eager, eager, reference, inputs, own_errors=0.0)
            if found.problem:
                return run.failed(f"the operator itself disagrees with its reference: {found.problem}")
        with recording() as recorder, only(self.template.name, run.noting(pick)):
            try:
                got = self._compiled(case)(*inputs)
            except Exception as cause:  # noqa: BLE001  any error is what the check is for
                return run.stopped(cause)
        run = replace(run, plans=_plans(recorder))
        if not run.ran(self.template.name):
            return run.refused(self.template.name)
        if any(h.damaged for h in guarded):
            return run.failed("it wrote to its inputs, or to memory next to them")
        return run.compared(compare(got, eager, reference, inputs))

    def _compiled(self, case: Case) -> Callable[..., Any]:
        backend = partial(kgen_backend, options={"cache": False, "poison": True, "gpu_interpreter": self.interpreted})
        # neither: Dynamo would make symbols of sizes that differed between two problems
        return torch.compile(_own(case.function), backend=backend, dynamic=case.dynamic)


def _where_offered(config: Config) -> Pick:
    """A problem may be compiled to several of the template's kernels, and each of them has configurations of its own."""
    return lambda configs: config if config in configs else configs[0]


def _volume(config: Config) -> int:
    """Points of a tile."""
    return math.prod(v for name, v in config.values if name.startswith("BLOCK_") and isinstance(v, int))


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a code object of its own: what Dynamo compiled for another problem must not be found, nor count."""

    def call(*args: Any) -> Any:
        return function(*args)

    return types.FunctionType(call.__code__.replace(), call.__globals__, "problem", None, call.__closure__)


def _plans(recorder: Recorder) -> tuple[Schedule, ...]:
    return tuple(graph.plan for graph in recorder.graphs if not isinstance(graph, EagerRecord))


@dataclass(slots=True)
class _Run:
    """One run while it is not known how it ends."""

    case: Case
    plans: tuple[Schedule, ...] = ()
    picked: list[Config] = field(default_factory=list)

    def noting(self, pick: Pick) -> Pick:
        def picking(configs: Sequence[Config]) -> Config:
            self.picked.append(pick(configs))
            return self.picked[-1]

        return picking

    def ran(self, template: str) -> bool:
        kernels = (kernel for plan in self.plans for step in plan.kernels for kernel in members(step))
        return any(kernel.choice is not None and kernel.choice.template == template for kernel in kernels)

    def failed(self, reason: str, cause: BaseException | None = None) -> Result:
        return self._result(Outcome.FAILED, reason=reason, cause=cause)

    def stopped(self, cause: Exception) -> Result:
        """By an error; kernels that spill, or have too little shared memory, are not run by anybody."""
        inner = cause.inner_exception if isinstance(cause, BackendCompilerFailed) else cause
        if isinstance(inner, errors.KernelSpills | errors.KernelTooLarge):
            return self._result(Outcome.SPILLED, reason=str(inner))
        return self.failed(_text_of(inner), cause)

    def refused(self, template: str) -> Result:
        """The scheduler's reason for leaving the matmul to the library."""
        verdicts = [v for plan in self.plans for v in plan.verdicts]
        verdicts = [v for v in verdicts if v.reason is Why.NO_TEMPLATE] or [v for v in verdicts if v.outcome is Decision.EXTERN]
        reasons = dict.fromkeys(v.detail.removeprefix(f"{template}: ") or v.reason.value for v in verdicts)
        return self.refused_because("; ".join(reasons) or "there is no matmul in the graph")

    def refused_because(self, reason: str) -> Result:
        return self._result(Outcome.REFUSED, reason=reason)

    def compared(self, difference: Difference) -> Result:
        outcome = Outcome.FAILED if difference.problem else Outcome.PASSED
        error, tolerance = difference.error, difference.tolerance
        return self._result(outcome, error=error, tolerance=tolerance, reason=difference.problem)

    def _result(self, outcome: Outcome, **more: Any) -> Result:
        config = str(self.picked[-1]) if self.picked and outcome is not Outcome.REFUSED else ""
        kernels = sum(len(plan.kernels) for plan in self.plans)
        calls = sum(len(plan.calls) for plan in self.plans)
        stored = any(map(_stores_matmul, self.plans))
        return Result(self.case, config, outcome, kernels=kernels, calls=calls, stored=stored, **more)


def _text_of(error: BaseException) -> str:
    """An error with the notes of where it was raised: those of Triton's interpreter are of a line of the template."""
    causes, inner = [error], error.__cause__
    while inner is not None:
        causes.append(inner)
        inner = inner.__cause__
    notes = [note for one in causes for note in getattr(one, "__notes__", ()) if "in the template" in note]
    return "; ".join([f"{type(error).__name__}: {error}", *dict.fromkeys(notes)])


def _stores_matmul(plan: Schedule) -> bool:
    """Whether a kernel leaves something as large as the matmul to another one, in memory that the caller does not see."""
    graph, sizes = plan.graph, Sizes(plan.graph.seen_sizes)
    matmuls = [graph.buffers[s.outs[0]] for step in plan.kernels for s in step.statements if s.kind == "contraction"]
    smallest = min((sizes.of(ix.product(b.sizes)) for b in matmuls), default=0)
    outer = [o.buffer for o in graph.outputs if isinstance(o, ir.TensorArg)] + [i.buffer for i in graph.inputs if i.buffer]
    visible = {address(graph, name)[0] for name in outer}
    stored = {o for step in plan.kernels for s in step.statements for o, kept in zip(s.outs, s.stored, strict=True) if kept}
    hidden = [graph.buffers[o] for o in stored if address(graph, o)[0] not in visible]
    return any(sizes.of(ix.product(b.sizes)) >= smallest for b in hidden)
