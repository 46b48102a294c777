"""Index expressions as C++ text: plain 64-bit arithmetic for scalars, function calls on vectors of lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kgen.ir import index as ix
from kgen.ir.index import Atom, Expr, Var


@dataclass(slots=True)
class IndexText:
    """Prints expressions. `vector` is the loop whose lanes are one value each; `indirect` gives the C++ name of a value that
    stands inside an index, and whether it is a vector."""

    vector: Var | None
    lanes: int
    indirect: Callable[[ix.Indirect], tuple[str, bool]]

    def depends(self, expr: Expr) -> bool:
        """Whether the expression differs between lanes."""
        if self.vector is None:
            return False
        return any(
            atom is self.vector or (isinstance(atom, ix.Indirect) and self.indirect(atom)[1]) for atom in _in_order(expr)
        )

    def scalar(self, expr: Expr) -> str:
        """The expression at the first lane."""
        if not expr.terms:
            return "0"
        return " + ".join(self._term(mono, coef) for mono, coef in expr.terms).replace("+ -", "- ")

    def _term(self, mono: tuple[Atom, ...], coef: int) -> str:
        if not mono:
            return str(coef)
        body = "*".join(self._atom(a) for a in mono)
        return (
            body
            if coef == 1
            else f"-{body}"
            if coef == -1
            else f"{body}*{coef}"
            if abs(coef) < 2**31
            else f"{body}*INT64_C({coef})"
        )

    def _atom(self, atom: Atom) -> str:
        if isinstance(atom, ix.FloorDiv | ix.Mod):
            plain = ix.known_nonnegative(atom.num)
            operator = "/" if isinstance(atom, ix.FloorDiv) else "%"
            num, den = self.scalar(atom.num), self.scalar(atom.den)
            name = "floordiv_" if isinstance(atom, ix.FloorDiv) else "remainder_"
            return f"(({num}) {operator} ({den}))" if plain else f"{name}(int64_t({num}), int64_t({den}))"
        if isinstance(atom, ix.Apply):
            return self._apply(atom, [self.scalar(a) for a in atom.args])
        if isinstance(atom, ix.Indirect):
            return self.indirect(atom)[0]
        return str(atom)

    def _apply(self, atom: ix.Apply, args: list[str]) -> str:
        infix = {"shl": "<<", "shr": ">>", "and": "&", "or": "|", "xor": "^", "lt": "<", "le": "<=", "eq": "=="}
        if atom.fn in infix:
            return f"int64_t(({args[0]}) {infix[atom.fn]} ({args[1]}))"
        if atom.fn == "select":
            return f"(({args[0]}) ? ({args[1]}) : ({args[2]}))"
        if atom.fn == "pow":
            return f"ipow({args[0]}, {args[1]})"
        return f"{atom.fn}imum_(int64_t({args[0]}), int64_t({args[1]}))"

    def vectorized(self, expr: Expr) -> str:
        """One 64-bit integer a lane."""
        if not self.depends(expr):
            return f"int64_t({self.scalar(expr)})"
        stride = self.stride(expr)
        if stride is not None:
            return f"iota<int64_t, L>({self.scalar(expr)}, {self.scalar(stride)})"
        parts = [self._vector_term(mono, coef) for mono, coef in expr.terms]
        text = parts[0]
        for part in parts[1:]:
            text = f"add_({text}, {part})"
        return text

    def stride(self, expr: Expr) -> Expr | None:
        """From lane to lane; None outside of the lanes, and where the lanes do not walk evenly."""
        return None if self.vector is None or self._lane_indirect(expr) else ix.stride_of(expr, self.vector)

    def _lane_indirect(self, expr: Expr) -> bool:
        """Whether an index read from data, another one for each lane, takes part."""
        return any(isinstance(a, ix.Indirect) and self.indirect(a)[1] for a in _in_order(expr))

    def _vector_term(self, mono: tuple[Atom, ...], coef: int) -> str:
        text = f"int64_t({coef})" if coef != 1 or not mono else ""
        for atom in mono:
            factor = self._vector_atom(atom)
            text = f"mul_({text}, {factor})" if text else factor
        return text

    def _vector_atom(self, atom: Atom) -> str:
        if not self.depends(ix.as_expr(atom)):
            return f"int64_t({self._atom(atom)})"
        if atom is self.vector:
            return f"iota<int64_t, L>({atom}, 1)"
        if isinstance(atom, ix.Indirect):
            return self.indirect(atom)[0]
        if isinstance(atom, ix.FloorDiv | ix.Mod):
            den = atom.den.as_int()
            if den is not None and den > 0 and den & (den - 1) == 0:  # machines have no division of integer lanes
                shift, rest = f"shr_({{}}, int64_t({den.bit_length() - 1}))", f"bitand_({{}}, int64_t({den - 1}))"
                return (shift if isinstance(atom, ix.FloorDiv) else rest).format(self.vectorized(atom.num))
            if den is not None and 0 < den < 2**31 and atom.num.bounds()[0] >= 0 and atom.num.bounds()[1] < 2**31:
                name = "index_quotient" if isinstance(atom, ix.FloorDiv) else "index_rest"
                return f"{name}<{den}>({self.vectorized(atom.num)})"
            name = "floordiv_" if isinstance(atom, ix.FloorDiv) else "remainder_"
            return f"{name}({self.vectorized(atom.num)}, {self.vectorized(atom.den)})"
        assert isinstance(atom, ix.Apply)
        args = [self.vectorized(a) for a in atom.args]
        names = {
            "min": "minimum_",
            "max": "maximum_",
            "shl": "shl_",
            "shr": "shr_",
            "and": "bitand_",
            "or": "bitor_",
            "xor": "bitxor_",
        }
        if atom.fn in names:
            return f"{names[atom.fn]}({args[0]}, {args[1]})"
        if atom.fn == "select":
            return f"where_(ne_({args[0]}, int64_t(0)), {args[1]}, {args[2]})"
        return f"cast_<int64_t>({atom.fn}_({args[0]}, {args[1]}))"


def _in_order(expr: Expr) -> list[Atom]:
    """A set's own order differs from process to process, and printing an indirect index emits code."""
    return sorted(ix.free_atoms(expr), key=lambda atom: atom.order)
