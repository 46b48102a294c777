"""Elements of operands and results: for C++ loops that an author writes himself, one point at a time or a vector of neighbours.

A vector's points are those of one C++ variable, which a `vector_loop` of the author's counts. There `L` is the number of lanes
and `w` says which of them are real. All other indices are one number for all lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.plan import Kernel, Nest, Statement
from kgen.templates.cpp.codegen.emit import Emitter
from kgen.templates.cpp.codegen.epilogue_loops import EpilogueLoops, digits
from kgen.templates.cpp.codegen.table import CPP_TYPES
from kgen.templates.problem import Input

# Names that a vector loop gives to what an element asks for.
OF_LOOP = ("L", "w")


@dataclass(frozen=True, slots=True)
class Point:
    """Indices of an author's, one for each axis of an operand or a result: names of C++ variables, numbers, or expressions in
    parentheses. `lanes` is the one that a vector loop counts, "" where there is none."""

    axes: tuple[str, ...]
    indices: tuple[str, ...]
    lanes: str

    def why_not(self) -> str | None:
        """What is wrong with the indices."""
        if len(self.indices) != len(self.axes):
            return f"{len(self.indices)} indices for the axes {', '.join(self.axes)}"
        if not self.lanes:
            return None
        if self.lanes not in self.indices:
            return f"lanes={self.lanes!r} is none of the indices {', '.join(self.indices)}"
        mixed = next((one for one in self.indices if one != self.lanes and self.lanes in _words(one)), None)
        if mixed is not None:
            return f"index {mixed} differs from lane to lane: of a vector only the index {self.lanes} itself does"
        return None


@dataclass(frozen=True, slots=True)
class Elements:
    """Writes them for one function."""

    loops: EpilogueLoops

    def load(self, one: Input, name: str, at: Point) -> list[str]:
        """Statements that make `name` an operand's element, in its own type, with its prologue."""
        mapping, vector = self._at(at, one.loops)
        value = vs.substitute(vs.cast(one.value, one.dtype), mapping)
        emitter = self._emitter(vector)
        found = emitter.emit(value)
        if vector is not None and not emitter.varies(value):
            found = f"splat<L>({found})"
        self._note(emitter, at)
        return [f"const auto {name} = [&]() KGEN_INLINE {{", *_indented([*emitter.lines, f"return {found};"]), "}();"]

    def store(self, names: Sequence[str], at: Point) -> list[str]:
        """The epilogue of one element of each result, in the order of these, or of a vector of elements."""
        problem = self.loops.problem
        outs = [out for s in problem.mains for out in s.outs]
        if len(names) != len(outs):
            raise ValueError(f"{len(names)} names, where one call stores {len(outs)} results")
        mapping, vector = self._at(at, problem.loops)
        if vector is not None and vector.extent == 1:  # what does not depend on the lanes is written once
            vector = None
        moved = tuple(replace(s.substituted(mapping), inner=False, section=-1) for s in problem.epilogue)
        emitter = self._emitter(vector, moved)
        lines = []
        for out, name in zip(outs, names, strict=True):
            emitter.locals[out] = made = f"made_{name}"
            kind = CPP_TYPES[problem.graph.buffers[out].dtype].compute
            own = f"coerce<value_t<{kind}, L>>(cast_<{kind}>({name}))"
            lines.append(f"const auto {made} = {own if vector is not None else f'cast_<{kind}>(first_lane({name}))'};")
        head, _ = emitter.run()
        self._note(emitter, at, [emitter.locals[out] for out in outs])
        return ["{", *_indented([*lines, *emitter.task.lines, *head]), "}"]

    def _at(self, at: Point, loops: Mapping[str, tuple[Var, ...]]) -> tuple[dict[Atom, Expr], Var | None]:
        """The loops of all axes at the point, and the one of a vector's lanes."""
        why_not = at.why_not()
        if why_not is not None:
            raise ValueError(why_not)
        self.loops.variables.update(at.indices)
        extents = [self.loops.problem.extent(axis) for axis, own in zip(at.axes, at.indices, strict=True) if own == at.lanes]
        vector = ix.var(at.lanes, extents[0]) if at.lanes else None
        mapping: dict[Atom, Expr] = {}
        for axis, index in zip(at.axes, at.indices, strict=True):
            own = ix.size(index).expr() if vector is None or index != at.lanes else vector.expr()
            mapping |= digits(loops[axis], own)
        return mapping, vector

    def _emitter(self, vector: Var | None, statements: tuple[Statement, ...] = ()) -> Emitter:
        problem = self.loops.problem
        kernel = Kernel("element", () if vector is None else (vector,), (), 0, statements)
        return Emitter(Nest(kernel, vector, problem.device.lanes), problem.graph)

    def _note(self, emitter: Emitter, at: Point, made: Sequence[str] = ()) -> None:
        """What the function has to have; no index is a name that stands for something else around the element."""
        self.loops.note(emitter, frozenset())
        taken = emitter.made_names.union(made, OF_LOOP if at.lanes else ())
        hidden = next((index for index in at.indices if not taken.isdisjoint(_words(index))), None)
        if hidden is not None:
            raise ValueError(f"an index called {hidden} is hidden by a generated name")


def _words(text: str) -> list[str]:
    """The names and numbers in an expression of an author's."""
    return "".join(c if c.isalnum() or c == "_" else " " for c in text).split()


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


__all__ = ["Elements", "Point"]
