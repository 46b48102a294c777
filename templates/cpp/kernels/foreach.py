"""A batch of loops over points or rows as one C++ function: the template for multi-tensor kernels, and what fills its slots."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.index import Atom, Expr, Size, Sizes
from kgen.rendered.kernel_call import Rendered
from kgen.templates.contract import Config, template
from kgen.templates.cpp.codegen.emit import Emitter
from kgen.templates.cpp.codegen.expression import IndexText
from kgen.templates.cpp.kernels.loops import (
    WAKE,
    FunctionHead,
    loops_line,
    one_step_lines,
    outer_loops,
    point_cost,
    pointers_of,
    read_pointers,
    row_passes,
    task_loops,
    with_prefetches,
)
from kgen.templates.form import Form, form_of
from kgen.templates.loop_contract import LoopKernel, LoopProblem, LoopTemplate, loops
from kgen.templates.loop_slots import CppForm, CppForms
from kgen.templates.render import lines, render_slots, source_lines


@template(implements=loops("multi_tensor"), device="cpu", source="foreach.cpp.jinja", name="cpp_multi_tensor")
class MultiTensor(LoopKernel):
    """Threads share the tasks of many independent loops over points or rows."""


def render_batch(problem: LoopProblem, template: LoopTemplate, config: Config, name: str) -> Rendered:
    """The C++ function of a batch. Each form among its members' loops is one body, and each member a row of a table: its form,
    its pointers, its tasks and its sizes."""
    graph = problem.graph
    bodies: dict[Hashable, _Body] = {}
    members: list[tuple[_Body, Form]] = []
    for nest in problem.vector_loops:
        form = form_of(nest, graph)
        if form.key not in bodies:
            bodies[form.key] = _body(form, graph, len(bodies))
        members.append((bodies[form.key], form))
    table = _Table(graph)
    rows = tuple(table.row(body, form) for body, form in members)
    comments = (f"independent loops: {len(members)}, bodies: {len(bodies)}", *source_lines(problem.origins))
    checks = any(body.emitter.includes_check for body in bodies.values())
    head = FunctionHead(name, comments, (), tuple(table.symbols), 1, checks)
    width = max(1, *(len(body.emitter.sizes) for body in bodies.values()))
    slots = CppForms(head, tuple(body.slot for body in bodies.values()), rows, width, not table.symbols, WAKE)
    text = render_slots(template.source, "cpu", slots, config, problem)
    names = frozenset(n for body in bodies.values() for n in body.emitter.made_names) | set(table.symbols)
    return Rendered(text, tuple(table.pointers), tuple(table.symbols), names)


@dataclass(frozen=True, slots=True)
class _Body:
    """The text of one form, rendered for the first member that has it, with its number of tasks and the cost of a point."""

    form: Form
    emitter: Emitter
    slot: CppForm
    task_count: Expr
    point_cost: int


def _body(form: Form, graph: ir.Graph, number: int) -> _Body:
    """A flat body has a task for each vector."""
    sizes, nest = Sizes(graph.size_hints), form.nest
    hints = {symbol: sizes.of(expr) for symbol, expr in form.sizes.items()}
    emitter = Emitter(nest, graph)
    body, sections = emitter.run()
    known = Sizes({**graph.size_hints, **hints})
    outer = outer_loops(nest, known)
    tasks, body = with_prefetches(task_loops(outer, nest, emitter, known), body, sections, nest, emitter, known)
    body = [*one_step_lines(nest), *body, *row_passes(sections, nest, emitter)]
    parameters = read_pointers(pointers_of(emitter))
    parameters += [f"const int64_t {size} = sizes[{k}];" for k, size in enumerate(emitter.sizes)]
    slot = CppForm(number, f"form{number}", loops_line(nest), lines(parameters), nest.lanes, tasks, lines(body))
    if not outer.flat or nest.vector is None:
        return _Body(form, emitter, slot, outer.count, point_cost(nest))
    return _Body(form, emitter, slot, ix.ceildiv(nest.vector.extent, nest.lanes), point_cost(nest))


class _Table:
    """Rows of members, and the pointers and size symbols that the function is called with."""

    def __init__(self, graph: ir.Graph) -> None:
        self.sizes = Sizes(graph.size_hints)
        self.pointers: list[str] = []
        self.symbols: dict[str, None] = {}

    def row(self, body: _Body, form: Form) -> str:
        mine = dict(zip(body.form.buffers, form.buffers, strict=True))
        first = len(self.pointers)
        self.pointers += [mine[name] for name in body.emitter.pointers]
        # equal forms number their symbols in the same way, so the body's symbols are this member's as well
        values = {symbol.name: expr for symbol, expr in form.sizes.items()}
        actual: dict[Atom, Expr] = {symbol: form.sizes[symbol] for symbol in form.sizes}
        tasks = ix.substitute(body.task_count, actual, {})
        loops = (*form.nest.kernel.outer, *form.nest.kernel.inner)
        points = self.sizes.of(ix.substitute(ix.product(v.extent for v in loops), actual, {}))
        weight = max(1, points * body.point_cost // max(1, self.sizes.of(tasks)))
        numbers = [values.get(name, ix.size(name).expr()) for name in body.emitter.sizes]
        return f"{{{body.slot.number}, {first}, {self._text(tasks)}, {weight}, {{{', '.join(map(self._text, numbers))}}}}}"

    def _text(self, expr: Expr) -> str:
        self.symbols |= dict.fromkeys(a.name for a in sorted(ix.free_atoms(expr), key=lambda a: a.order) if isinstance(a, Size))
        return IndexText(None, 1, lambda _: ("", False)).scalar(expr)
