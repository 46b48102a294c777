"""`kgen.explain`: compiles a function afresh and says what became of it, as data and as text."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial, reduce
from typing import Any, TextIO

import torch
from torch._dynamo import utils as dynamo_utils
from torch.utils._pytree import tree_leaves

from kgen.backend import kgen_backend
from kgen.commands.explain_text import plain, sections, summary, write
from kgen.failures import verdicts
from kgen.ir.index import Var
from kgen.ir.nodes import Origin
from kgen.ir.plan import Call, ComboKernel, Launch, members, variants
from kgen.report import traffic
from kgen.report.debug import print_step
from kgen.report.graph_report import ExternReport, GraphBreak, GraphReport, KernelReport, Refusal, StepReport
from kgen.report.record import EagerRecord, Record, Recorder, recording
from kgen.report.steps import Steps, step_bytes
from kgen.report.times import kernel_times
from kgen.verdict import REFUSED, Verdict

__all__ = ["Explanation", "ExternReport", "GraphBreak", "GraphReport", "KernelReport", "explain", "watching"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What kgen made of a function.

    `bytes_moved` is the memory traffic of one call: each kernel reads every distinct region of a buffer once and writes what it
    stores, and library calls read their operands and write their results. `bytes_minimal` is the least that any fusion could
    move around the same library calls: inputs, constants and library results that kernels read are read once; outputs, changes
    to inputs and operands of library calls are written once; library calls move their operands and results. All at the
    sizes of the example inputs (`kgen.report.traffic` has the exact rules).
    """

    graphs: tuple[GraphReport, ...]
    graph_breaks: tuple[GraphBreak, ...] = ()

    def __repr__(self) -> str:
        return f"<kgen report: {summary(self.graphs, self.graph_breaks)}>"

    def __str__(self) -> str:
        """What `print` writes, without its last line break."""
        return "\n".join(plain(sections(self.graphs, self.graph_breaks))).strip("\n")

    def _repr_html_(self) -> str:
        """The page of `to_html` in a frame of its own, for notebooks."""
        from kgen.report.page import framed  # noqa: PLC0415  where a page is wanted

        return framed(self.to_html())

    @property
    def kernels(self) -> tuple[KernelReport, ...]:
        return tuple(k for g in self.graphs for k in g.kernels)

    @property
    def externs(self) -> tuple[ExternReport, ...]:
        return tuple(e for g in self.graphs for e in g.externs)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return tuple(v for g in self.graphs for v in g.verdicts)

    @property
    def bytes_moved(self) -> int:
        return sum(g.bytes_moved for g in self.graphs)

    @property
    def bytes_minimal(self) -> int:
        return sum(g.bytes_minimal for g in self.graphs)

    @property
    def peak_memory(self) -> int:
        """The largest of the graphs' peaks: they do not run at the same time."""
        return max((g.peak_memory for g in self.graphs), default=0)

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """What keeps something apart, in all graphs, the most bytes lost first."""
        return tuple(sorted((one for g in self.graphs for one in g.refusals), key=lambda one: -one.bytes_lost))

    def print(self, file: TextIO | None = None, *, top: int | None = None) -> None:
        """Writes the report to `file` (default: standard output); in tables with colours when that is a terminal and the
        package rich is installed. `top` is how many refusals there are, and kernels of each graph: ten at most without it, and
        fewer where the report would be longer than a screen or two."""
        write(sections(self.graphs, self.graph_breaks, top), file or sys.stdout)

    def why(self, one: str, other: str = "") -> tuple[Verdict, ...]:
        """The verdicts about a name, or about two: of a kernel, an operator's result or its module, as in the report."""
        return tuple(v for v in self.verdicts if _is_about(v, one) and (not other or _is_about(v, other)))

    def to_html(self) -> str:
        """The report as one page that needs nothing else: kernels as a graph, their verdicts, IR and code, and a search."""
        from kgen.report.page import page  # noqa: PLC0415  where a page is wanted

        return page(self.graphs, self.graph_breaks)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready data."""
        graphs = [
            {
                **{name: getattr(g, name) for name in ("name", "role", "bytes_moved", "bytes_minimal", "peak_memory")},
                "kernels": [asdict(k) for k in g.kernels],
                "externs": [asdict(e) for e in g.externs],
                "verdicts": [v.to_dict() for v in g.verdicts],
                "refusals": [{**r.verdict.to_dict(), "bytes_lost": r.bytes_lost} for r in g.refusals],
                "steps": [asdict(s) for s in g.steps],
            }
            for g in self.graphs
        ]
        totals = {name: getattr(self, name) for name in ("bytes_moved", "bytes_minimal", "peak_memory")}
        return {"graphs": graphs, "graph_breaks": [asdict(b) for b in self.graph_breaks], **totals}


# ---- compiling afresh -------------------------------------------------------------------------------------------------


def _is_about(verdict: Verdict, name: str) -> bool:
    """Whether a name is one of the verdict's, or of a module that has one of its operators inside."""
    names = (verdict.producer, verdict.consumer, *verdict.kernels)
    return name in names or any(path == name or path.startswith(f"{name}.") for path in verdict.paths)


def explain(f: Callable[..., Any], *args: Any, print_report: bool = True, top: int | None = None, **kwargs: Any) -> Explanation:
    """Compiles ``f(*args, **kwargs)`` with kgen and reports on every graph; prints the report unless `print_report` is False,
    with `top` refusals and kernels of each graph (see `Explanation.print`).

    `f` is a function, method or module, compiled already or not; what is compiled already stays as it is. It runs once, and its
    backward too when results require gradients (no `.grad` is touched). Whatever else `f` changes, it changes. Use
    `kgen.config.override` around the call for a mode or options."""
    f = getattr(f, "_torchdynamo_orig_callable", getattr(f, "_orig_mod", f))
    with watching() as seen, torch.random.fork_rng(devices=[]):
        # with a cache, AOTAutograd would hand back code without lowering anything: there would be nothing to report
        backend = partial(kgen_backend, options={"cache": False})
        _run_backward(torch.compile(_fresh(f), backend=backend)(*args, **kwargs))
    report = seen.report()
    if print_report:
        report.print(top=top)
    return report


@dataclass(slots=True)
class Watch:
    """An open recording; `report` says what was compiled so far."""

    recorder: Recorder
    first_break: int

    def report(self) -> Explanation:
        return Explanation(tuple(map(_graph_report, self.recorder.graphs)), _graph_breaks(self.first_break))


@contextmanager
def watching() -> Iterator[Watch]:
    """Watches every kgen compilation started inside. Graphs that come from AOTAutograd's cache were compiled earlier and do not
    show: switch it off with ``kgen.config.override(cache=False)``."""
    with recording() as recorder:
        yield Watch(recorder, len(dynamo_utils.graph_break_reasons))


def _fresh(f: Callable[..., Any]) -> Any:
    """The same function with a code object of its own. Dynamo keeps what it compiles by code object: like this nothing
    compiled earlier is found, and nothing made here is left to later calls, or counts against their recompile limit."""
    if isinstance(f, types.MethodType):
        return types.MethodType(_fresh(f.__func__), f.__self__)
    if not isinstance(f, types.FunctionType):

        def call(*args: Any, **kwargs: Any) -> Any:
            return f(*args, **kwargs)

        return _fresh(call)
    made = types.FunctionType(f.__code__.replace(), f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    made.__kwdefaults__, made.__dict__, made.__module__ = f.__kwdefaults__, dict(f.__dict__), f.__module__
    return made


def _run_backward(results: Any) -> None:
    """Runs the backward for its compilation's sake: gradients are computed and dropped, so that no leaf's `.grad` changes."""
    outputs = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    leaves = _leaves([t.grad_fn for t in outputs])
    if outputs and leaves:
        torch.autograd.grad(outputs, leaves, [torch.ones_like(t) for t in outputs], retain_graph=True, allow_unused=True)


def _leaves(functions: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    stack, seen = list(functions), set(functions)
    while stack:
        function = stack.pop()
        if hasattr(function, "variable"):  # where gradients of a leaf would be accumulated
            found.append(function.variable)
        for below, _ in function.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                stack.append(below)
    return found


# ---- reading records --------------------------------------------------------------------------------------------------


def _graph_breaks(first: int) -> tuple[GraphBreak, ...]:
    found = []
    for entry in dynamo_utils.graph_break_reasons[first:]:
        frame = entry.user_stack[-1] if entry.user_stack else None
        line = f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} {frame.line or ''}".rstrip() if frame else ""
        text = entry.reason.strip().splitlines()
        found.append(GraphBreak(text[0] if text else "unknown", line))
    return tuple(dict.fromkeys(found))  # Dynamo meets a break once while inlining and once in the function's own frame


def _graph_report(record: Record | EagerRecord) -> GraphReport:
    if isinstance(record, EagerRecord):
        calls = {n.removeprefix("extern."): c for n, c in record.coverage.items() if n.startswith("extern.")}
        failures = record.info.failures
        reason = "the graph could not be compiled" if failures else "options={'fallback': 'all'} runs everything in eager"
        eager = tuple(ExternReport(record.info.name, op, reason, count, (), 0) for op, count in calls.items())
        return GraphReport(record.info.name, record.info.role, (), eager, tuple(verdicts(failures)), 0, 0, 0)
    plan, decided = record.plan, tuple(record.plan.final_verdicts())
    steps = Steps(plan)
    return GraphReport(
        record.info.name, record.info.role, tuple(_kernel_report(k, record) for k in plan.kernels), _extern_reports(record),
        decided, traffic.bytes_moved(plan), traffic.bytes_minimal(plan), traffic.peak_memory(plan), _refusals(decided, steps),
        _step_reports(steps),
    )  # fmt: skip


def _refusals(decided: Sequence[Verdict], steps: Steps) -> tuple[Refusal, ...]:
    kinds = {one.name: one.operators[-1] for step in steps.plan.kernels for one in step.origins if one.operators}

    def refusal(v: Verdict) -> Refusal:
        return Refusal(v, steps.bytes_lost(v), (kinds.get(v.producer, v.producer), kinds.get(v.consumer, v.consumer)))

    refused = {str(v): refusal(v) for v in decided if v.outcome in REFUSED}
    return tuple(sorted(refused.values(), key=lambda one: -one.bytes_lost))


def _step_reports(steps: Steps) -> tuple[StepReport, ...]:
    rows = zip(steps.names, steps.plan.steps, steps.needed(), strict=True)
    return tuple(
        StepReport(name, not isinstance(step, Call), step_bytes(step, steps.plan), after) for name, step, after in rows
    )


def _kernel_report(kernel: Launch, record: Record) -> KernelReport:
    moved = traffic.kernel_traffic(kernel, record.plan)
    operators = tuple(dict.fromkeys(op for o in kernel.origins for op in o.operators))
    lines = tuple(dict.fromkeys(o.line for o in kernel.origins if o.line))
    calls = dict.fromkeys(record.units.calls[one.name].symbol for one in variants(kernel))
    source = "\n".join(_source(symbol, record) for symbol in calls)
    outer, inner, sections = _shape(kernel)
    made_of, times = reduce(Origin.joined, kernel.origins, Origin()), kernel_times(kernel, record.plan, record.options)
    return KernelReport(
        record.info.name, kernel.name, operators, lines, outer, inner, sections, moved.read, moved.written, source,
        _by_size(kernel), made_of.modules, tuple(map(str, made_of.calls)), tuple(path for _, path in made_of.parameters),
        times.estimate, times.floor, print_step(kernel), tuple(dict.fromkeys(o.name for o in kernel.origins if o.name)),
    )  # fmt: skip


def _source(symbol: str, record: Record) -> str:
    """The text of a kernel by the name that the host has for it."""
    launch = next((call.launch for call in record.units.calls.values() if call.launch and call.symbol == symbol), None)
    return function_source([one.source for one in record.units.sources], symbol) if launch is None else launch.source


def _by_size(kernel: Launch) -> tuple[tuple[str, str], ...]:
    table = members(kernel)[0].by_size
    return () if table is None else table.rows


def _shape(kernel: Launch) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...], int]:
    """Outer loops, inner loops, sections. A batch's outer loop is the one over its members."""
    if isinstance(kernel, ComboKernel):
        return (("member", str(len(kernel.members))),), (), 0
    return _loops(kernel.outer), _loops(kernel.inner), kernel.sections


def _loops(loops: tuple[Var, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((v.name, str(v.extent)) for v in loops)


def _extern_reports(record: Record) -> tuple[ExternReport, ...]:
    groups: dict[tuple[str, str], list[Call]] = {}
    for call in record.plan.calls:
        groups.setdefault((str(call.node.target), call.node.reason), []).append(call)
    return tuple(
        ExternReport(
            record.info.name, operator, reason, len(calls), _lines(calls),
            sum(traffic.call_traffic(c, record.plan).total for c in calls),
            reduce(Origin.joined, (c.node.origin for c in calls), Origin()).modules,
        )
        for (operator, reason), calls in groups.items()
    )  # fmt: skip


def _lines(calls: Sequence[Call]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(c.node.origin.line for c in calls if c.node.origin.line))


def function_source(units: Sequence[str], symbol: str) -> str:
    """The text of one generated function, its comments included, for people to read."""
    for text in units:
        lines = text.splitlines()
        at = next((k for k, line in enumerate(lines) if line.startswith('extern "C"') and f" {symbol}(" in line), None)
        if at is None:
            continue
        first = at
        while first > 0 and lines[first - 1].startswith("//"):
            first -= 1
        last = next(k for k in range(at, len(lines)) if lines[k] == "}")
        return "\n".join(lines[first : last + 1]) + "\n"
    return ""
