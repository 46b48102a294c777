"""The registers of a host program: which holds which size, and how those that no input gives are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kgen import errors
from kgen.host import program as hp
from kgen.ir import index as ix
from kgen.ir.index import Atom, Expr, Size

__all__ = ["Registers"]


@dataclass(slots=True)
class Registers:
    """Hands out registers; an expression is computed once, before the code when all of its sizes are known by then.
    `derived` defines the size symbols that are functions of others, `late` are the registers that code defines."""

    derived: Mapping[Size, Expr]
    values: list[int] = field(default_factory=list)
    known: dict[Expr, int] = field(default_factory=dict)
    computes: list[hp.Compute] = field(default_factory=list)
    late: set[int] = field(default_factory=set)

    def fresh(self, value: int = 0) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def literal(self, value: int) -> int:
        expr = ix.constant(value)
        if expr not in self.known:
            self.known[expr] = self.fresh(value)
        return self.known[expr]

    def of(self, expr: Expr | int, code: list[hp.Instruction] | None = None) -> int:
        expr = ix.as_expr(expr)
        found = self.known.get(expr)
        if found is not None:
            return found
        literal = expr.as_int()
        if literal is not None:
            return self.literal(literal)
        made = self._compute(expr, code)
        self.known[expr] = made
        return made

    def _compute(self, expr: Expr, code: list[hp.Instruction] | None) -> int:
        total: int | None = None
        for mono, coef in expr.terms:
            term: int | None = self.literal(coef) if coef != 1 or not mono else None
            for atom in mono:
                factor = self._atom(atom, code)
                term = factor if term is None else self._emit("mul", (term, factor), code)
            assert term is not None
            total = term if total is None else self._emit("add", (total, term), code)
        assert total is not None
        return total

    def _atom(self, atom: Atom, code: list[hp.Instruction] | None) -> int:
        expr = atom.expr()
        if expr in self.known:
            return self.known[expr]
        if isinstance(atom, ix.FloorDiv | ix.Mod):
            made = self._emit(
                "floordiv" if isinstance(atom, ix.FloorDiv) else "mod", (self.of(atom.num, code), self.of(atom.den, code)), code
            )
        elif isinstance(atom, ix.Apply):
            args = tuple(self.of(a, code) for a in atom.args)
            made = self._emit(atom.fn, args if len(args) > 1 else args * 2, code)
        elif isinstance(atom, Size) and atom in self.derived:
            made = self.of(self.derived[atom], code)
        else:
            raise errors.InvalidIR(stage="host", node=str(atom), problem="a size that no input and no call defines")
        self.known[expr] = made
        return made

    def _emit(self, op: str, args: tuple[int, ...], code: list[hp.Instruction] | None) -> int:
        dst = self.fresh()
        item = hp.Compute(dst, op, *args)
        if code is not None and any(a in self.late for a in args):
            self.late.add(dst)
            code.append(item)
        else:
            self.computes.append(item)
        return dst
