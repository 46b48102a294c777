"""Memory that templates ask for, and numbers that the host works out for them: `provide_workspaces`.

After everything else: the lengths hang on the configuration that was chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kgen.device import Device
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Expr, Size
from kgen.ir.plan import Call, ComboKernel, Kernel, Schedule, Statement, Step, variants
from kgen.scheduler.selection.choose import chosen_problem, contraction_of
from kgen.templates.contract import Workspace


def provide_workspaces(plan: Schedule, device: Callable[[str], Device]) -> None:
    """Changes the plan: kernels of templates with workspaces have their buffers, and those that are to be zero are filled by a
    kernel in front of them."""
    steps: list[Step] = []
    for step in plan.steps:
        if isinstance(step, Call):
            steps.append(step)
            continue
        fills: list[Kernel] = []
        if isinstance(step, ComboKernel):
            changed: Step = replace(step, members=tuple(_provided(one, plan, device, fills) for one in step.members))
        else:
            changed = _provided(step, plan, device, fills)
        steps += [*fills, changed]
    plan.steps = steps


def _provided(kernel: Kernel, plan: Schedule, device: Callable[[str], Device], fills: list[Kernel]) -> Kernel:
    if kernel.choice is None:
        return kernel
    problem = chosen_problem(kernel, plan.graph, device(contraction_of(kernel)))
    template = problem.template
    if not template.workspaces and not template.values:
        return kernel
    configs = [template.config(**dict(one.choice.config)) for one in variants(kernel) if isinstance(one, Kernel) and one.choice]
    symbols: dict[Expr, Size] = {}
    for value in template.values.values():
        for config in configs:
            found = ix.as_expr(value.compute(problem, config))
            if found.as_int() is None:
                symbols.setdefault(found, _symbol(plan.graph, found))
    buffers: list[tuple[str, str]] = []
    for name, one in template.workspaces.items():
        lengths = [ix.as_expr(one.length(problem, config)) for config in configs]
        if all(length == 0 for length in lengths):  # none of the configurations needs it
            continue
        buffer = _buffer(kernel, name, one, _most(plan.graph, lengths), plan.graph)
        buffers.append((name, buffer.name))
        if one.zeroed:
            fills.append(_fill(kernel, buffer))
    return replace(kernel, workspaces=tuple(buffers), host_values=tuple(symbols.items()))


def _most(graph: ir.Graph, lengths: list[Expr]) -> Expr:
    """The longest length, for a table of choices by size has one workspace."""
    longest = lengths[0]
    for one in lengths[1:]:
        longest = ix.maximum(longest, one)
    return longest if len(set(lengths)) == 1 or longest.as_int() is not None else _symbol(graph, longest).expr()


def _symbol(graph: ir.Graph, definition: Expr) -> Size:
    """A size that the host computes: the symbol of a definition that it has already, or a new one."""
    known = next((symbol for symbol, found in graph.derived.items() if found == definition), None)
    if known is not None:
        return known
    taken = {symbol.name for symbol in graph.derived}
    symbol = ix.size(next(name for k in range(len(taken) + 1) if (name := f"h{k}") not in taken))
    graph.derived = {**graph.derived, symbol: definition}
    return symbol


def _buffer(kernel: Kernel, name: str, one: Workspace, length: Expr, graph: ir.Graph) -> ir.Buffer:
    place = next(graph.buffers[out].device for s in kernel.statements for out in s.outs)
    free = ir.fresh(graph, f"{kernel.name}_{name.lower()}")
    graph.buffers[free] = ir.Buffer(free, one.dtype, place, (length,), (ix.ONE,))
    return graph.buffers[free]


def _fill(kernel: Kernel, buffer: ir.Buffer) -> Kernel:
    at = ix.var("x0", buffer.sizes[0])
    zero = Statement("pointwise", (buffer.name,), vs.const(0, buffer.dtype), (at.expr(),), False, -1, (True,))
    return Kernel(f"{buffer.name}_zeros", (at,), (), 0, (zero,), origins=kernel.origins, target=kernel.target)
