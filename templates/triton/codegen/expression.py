"""Index expressions as Triton text: integer arithmetic on tiles, in 32 bits unless the emitter asks for 64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kgen.ir import index as ix
from kgen.ir.index import Atom, Expr

_INFIX = {"shl": "<<", "shr": ">>", "and": "&", "or": "|", "xor": "^", "lt": "<", "le": "<=", "eq": "=="}


@dataclass(frozen=True, slots=True)
class IndexText:
    """Prints expressions. `name` gives the text of a loop variable or a size, `indirect` that of a value inside an index."""

    name: Callable[[Atom], str]
    indirect: Callable[[ix.Indirect], str]

    def __call__(self, expr: Expr) -> str:
        if not expr.terms:
            return "0"
        return " + ".join(self._term(mono, coef) for mono, coef in expr.terms).replace("+ -", "- ")

    def _term(self, mono: tuple[Atom, ...], coef: int) -> str:
        if not mono:
            return str(coef)
        body = "*".join(self._atom(a) for a in mono)
        return body if coef == 1 else f"-{body}" if coef == -1 else f"{body}*{coef}"

    def _atom(self, atom: Atom) -> str:
        if isinstance(atom, ix.FloorDiv | ix.Mod):
            num, den = self(atom.num), self(atom.den)
            if ix.known_nonnegative(atom.num):
                return f"(({num}) {'//' if isinstance(atom, ix.FloorDiv) else '%'} ({den}))"
            # Triton divides towards zero
            return f"lib.index_{'div' if isinstance(atom, ix.FloorDiv) else 'mod'}({num}, {den})"
        if isinstance(atom, ix.Apply):
            return self._apply(atom, [self(a) for a in atom.args])
        if isinstance(atom, ix.Indirect):
            return self.indirect(atom)
        return self.name(atom)

    def _apply(self, atom: ix.Apply, args: list[str]) -> str:
        if atom.fn in ("lt", "le", "eq"):
            return f"(({args[0]}) {_INFIX[atom.fn]} ({args[1]})).to(tl.int32)"
        if atom.fn in _INFIX:
            return f"(({args[0]}) {_INFIX[atom.fn]} ({args[1]}))"
        if atom.fn == "select":
            return f"tl.where(({args[0]}) != 0, {args[1]}, {args[2]})"
        if atom.fn == "pow":
            return f"lib.index_pow({args[0]}, {args[1]})"
        return f"tl.{atom.fn}imum({args[0]}, {args[1]})"
