"""A batch of loops over points as one C++ function: fills the slots of the `foreach` template."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from types import SimpleNamespace

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.index import Atom, Expr, Size
from kgen.ir.plan import Batch, Nest
from kgen.ir.sizes import Sizes
from kgen.templates.cpp.codegen.emit import Emitter
from kgen.templates.cpp.codegen.expression import IndexText
from kgen.templates.cpp.kernels.loops import FOLDER, WAKE, CppKernel, point_slots, pointer_slots, source_lines
from kgen.templates.form import Form, form_of
from kgen.templates.render import render


def render_batch(batch: Batch, nests: list[Nest], graph: ir.Graph, name: str) -> CppKernel:
    """The C++ function of a batch; `nests` are its members' loops. Each form among them is one body, and each member a row of a
    table: its form, its pointers, its tasks and its sizes."""
    bodies: dict[Hashable, _Body] = {}
    members: list[tuple[_Body, Form]] = []
    for nest in nests:
        form = form_of(nest, graph)
        if form.key not in bodies:
            bodies[form.key] = _body(form, graph, len(bodies))
        members.append((bodies[form.key], form))
    table = _Table(graph)
    rows = [table.row(body, form) for body, form in members]
    slots = SimpleNamespace(name=name, pointers=[], lanes=1, grain=WAKE, rows=rows, constant=not table.symbols)
    slots.comments = [f"independent loops: {len(members)}, bodies: {len(bodies)}", *source_lines(batch.origins)]
    slots.sizes = list(table.symbols)
    slots.checks = any(body.emitter.includes_check for body in bodies.values())
    slots.forms = [body.slots for body in bodies.values()]
    slots.width = max(1, *(len(body.emitter.sizes) for body in bodies.values()))
    names = frozenset(n for body in bodies.values() for n in body.emitter.made_names) | set(table.symbols)
    return CppKernel(name, render(FOLDER, "foreach.cpp.jinja", k=slots), tuple(table.pointers), tuple(table.symbols), names)


@dataclass(frozen=True, slots=True)
class _Body:
    """The text of one form, rendered for the first member that has it."""

    number: int
    form: Form
    emitter: Emitter
    slots: SimpleNamespace


def _body(form: Form, graph: ir.Graph, number: int) -> _Body:
    sizes = Sizes(graph.size_hints)
    hints = {symbol: sizes.of(expr) for symbol, expr in form.sizes.items()}
    emitter = Emitter(form.nest, graph)
    slots = point_slots(form.nest, emitter, Sizes({**graph.size_hints, **hints}))
    slots.name, slots.number = f"form{number}", number
    slots.pointers = pointer_slots(emitter)
    slots.sizes = list(emitter.sizes)
    return _Body(number, form, emitter, slots)


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
        # equal forms number their symbols alike, so the body's symbols are this member's as well
        values = {symbol.name: expr for symbol, expr in form.sizes.items()}
        actual: dict[Atom, Expr] = {symbol: form.sizes[symbol] for symbol in form.sizes}
        tasks = ix.substitute(body.slots.task_count, actual, {})
        points = self.sizes.of(ix.substitute(ix.product(v.extent for v in form.nest.kernel.outer), actual, {}))
        weight = max(1, points * body.slots.point_cost // max(1, self.sizes.of(tasks)))
        numbers = [values.get(name, ix.size(name).expr()) for name in body.emitter.sizes]
        return f"{{{body.number}, {first}, {self._text(tasks)}, {weight}, {{{', '.join(map(self._text, numbers))}}}}}"

    def _text(self, expr: Expr) -> str:
        self.symbols |= dict.fromkeys(a.name for a in sorted(ix.free_atoms(expr), key=lambda a: a.order) if isinstance(a, Size))
        return IndexText(None, 1, lambda v, e: ("", False)).scalar(expr)
