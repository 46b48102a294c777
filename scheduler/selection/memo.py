"""Contractions that differ in nothing but names, as those of equal layers do: what was found for one of them holds for all.

The search over configurations, at ten lengths where sizes are dynamic, would otherwise be repeated for each layer, and at each
attempt at a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from kgen.cost import model
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.plan import Kernel, Statement
from kgen.ir.values import Value
from kgen.scheduler.analysis.memo import is_remembering, once
from kgen.scheduler.selection.size_buckets import Best
from kgen.templates.contract import Config
from kgen.templates.problem import Problem
from kgen.templates.problem import once as known_once


def layouts(kernel: Kernel, graph: ir.Graph) -> Hashable:
    """The buffers of a kernel. Another attempt at a schedule may have cut another part of a tensor, or padded its rows
    otherwise, under the name that an equal kernel has for it."""
    touched = {load.attr[0] for s in kernel.statements for load in vs.loads(s.roots)}
    touched.update(name for s in kernel.statements for name in (*s.outs, s.target) if name is not None)
    return frozenset(graph.buffers[name] for name in touched if name in graph.buffers)


def remembered(problems: Sequence[Problem], how: Hashable, find: Callable[[], Best | None]) -> Best | None:
    """What `find` returns for a product, or several in one kernel, as templates see them, or returned for one like it. `how` is
    what else it depends on."""
    if not problems or not is_remembering():
        return find()
    key = ("best", how, problems[0].device, tuple((problem.template.name, _form(problem)) for problem in problems))
    found = once(key, find)
    if found is None:
        return None
    return replace(found, problem=next(p for p in problems if p.template is found.problem.template))


def prices(problem: Problem) -> Sequence[tuple[Config, float]]:
    """The configurations that the device can run and their estimated seconds: worked out once for problems that are alike."""
    if not is_remembering():
        return _prices(problem)
    key = ("prices", problem.device, problem.template.name, _form(problem), frozenset(problem.sizes.hints.items()))
    return once(key, lambda: _prices(problem))


def _prices(problem: Problem) -> Sequence[tuple[Config, float]]:
    return [(config, model.seconds(problem, config)) for config in model.feasible(problem)]


@known_once
def _form(problem: Problem) -> Hashable:
    """Equal for kernels that are equal but for the names of buffers. What reads a buffer to find an index keeps its name."""
    names: dict[str, str] = {}
    statements = problem.kernel.statements

    def named(buffer: str) -> str:
        return names.setdefault(buffer, f"b{len(names)}")

    def renamed(load: Value) -> Value:
        buffer, index, dtype = load.attr
        return vs.load(named(buffer), index, dtype, load.args[0] if load.args else None)

    def anonymous(s: Statement) -> Statement:
        masks = [] if s.mask is None else [s.mask]
        value, *rest = vs.replace_loads([s.value, *masks, *s.factors], renamed)
        mask = rest.pop(0) if masks else None
        outs, target = tuple(map(named, s.outs)), None if s.target is None else named(s.target)
        arguments = tuple((name, repr(argument)) for name, argument in s.arguments)
        return replace(s, outs=outs, target=target, value=value, mask=mask, factors=tuple(rest), arguments=arguments)

    for value in vs.by_place(root for s in statements for root in s.roots):  # the order in which they were made may differ
        if value.op == "load":
            named(value.attr[0])
    form = tuple(map(anonymous, statements))
    graph, constant = problem.graph, problem.graph.frozen
    buffers = [graph.buffers[name] for name in names if name in graph.buffers]
    frozen = tuple(name in constant for name in names)  # such operands are packed once, which costs a call nothing
    plain = tuple(replace(b, name="", alias_of=b.alias_of and names.get(b.alias_of, b.alias_of), parts=()) for b in buffers)
    return form, plain, frozen, problem.kernel.outer, problem.kernel.inner
