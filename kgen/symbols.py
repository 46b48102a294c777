"""The border between sympy (sizes and guards, owned by torch's ShapeEnv) and kgen's own index expressions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch

from kgen import errors
from kgen import index as ix
from kgen.index import Atom, Expr, Size


class SymbolTable:
    """Translates one graph's sympy expressions. Symbols keep their names; ranges come from the ShapeEnv when there is one."""

    def __init__(self, shape_env: Any = None) -> None:
        self.shape_env = shape_env
        self.sympy_of: dict[Size, sympy.Symbol] = {}
        self._memo: dict[sympy.Expr, Expr] = {}

    def expr(self, value: Any) -> Expr:
        """An int, SymInt, sympy expression or `Expr` as an `Expr`."""
        if isinstance(value, Expr):
            return value
        if isinstance(value, bool | int):
            return ix.constant(int(value))
        if isinstance(value, torch.SymInt | torch.SymBool):
            node = value.node
            constant = node.maybe_as_int() if isinstance(value, torch.SymInt) else node.maybe_as_bool()
            if constant is not None:
                return ix.constant(int(constant))
            value = node.expr
        return self._translate(sympy.sympify(value))

    def sizes(self, shape: Any) -> tuple[Expr, ...]:
        return tuple(self.expr(s) for s in shape)

    def hint(self, size: Size) -> int:
        """The value that the symbol had in the example inputs (unbacked symbols: a guess of 64)."""
        known = self._hints().get(self.sympy_of[size])
        return int(known) if known is not None and sympy.sympify(known).is_number else 64

    def _hints(self) -> Mapping[sympy.Symbol, Any]:
        env = self.shape_env
        return getattr(env, "backed_var_to_val", None) or getattr(env, "var_to_val", {})

    def _range(self, symbol: sympy.Symbol) -> tuple[int, int]:
        limit = 1 << 62
        found = getattr(self.shape_env, "var_to_range", {}).get(symbol) if self.shape_env is not None else None
        if found is None:
            return 0, limit
        lo, hi = found.lower, found.upper
        return (int(lo) if lo.is_Integer else -limit), (int(hi) if hi.is_Integer and hi < limit else limit)

    def _translate(self, expr: sympy.Expr) -> Expr:
        hit = self._memo.get(expr)
        if hit is None:
            replaced = self.shape_env.replace(expr) if self.shape_env is not None else expr
            hit = self._memo[expr] = self._visit(replaced)
        return hit

    def _visit(self, expr: Any) -> Expr:
        if expr.is_Integer:
            return ix.constant(int(expr))
        if expr.is_Symbol:
            lo, hi = self._range(expr)
            if lo == hi:
                return ix.constant(lo)
            size = ix.size(str(expr), lo, hi)
            self.sympy_of[size] = expr
            return size.expr()
        args = [self._visit(a) for a in expr.args if not (isinstance(a, sympy.Rational) and not a.is_Integer)]
        if isinstance(expr, sympy.Add) and len(args) == len(expr.args):
            return sum(args, ix.ZERO)
        if isinstance(expr, sympy.Mul) and len(args) == len(expr.args):
            return ix.product(args)
        if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
            return ix.product([args[0]] * int(expr.exp))
        return self._function(expr, args)

    def _function(self, expr: Any, args: list[Expr]) -> Expr:
        name = type(expr).__name__
        if name in ("FloorDiv", "CleanDiv", "IntTrueDiv"):
            return ix.floordiv(args[0], args[1])
        if name in ("Mod", "PythonMod"):
            return ix.mod(args[0], args[1])
        if name == "ModularIndexing":
            return ix.mod(ix.floordiv(args[0], args[1]), args[2])
        if name in ("Max", "Min"):
            total = args[0]
            for other in args[1:]:
                total = ix.apply(name.lower(), total, other)
            return total
        simple = {
            "PowByNatural": "pow", "LShift": "shl", "RShift": "shr", "BitwiseFn_bitwise_and": "and", "BitwiseFn_bitwise_or": "or",
            "BitwiseFn_bitwise_xor": "xor", "StrictLessThan": "lt", "LessThan": "le", "Equality": "eq", "Where": "select",
        }  # fmt: skip
        if name in simple:
            return ix.apply(simple[name], *args)
        if name in ("StrictGreaterThan", "GreaterThan"):
            return ix.apply("lt" if name.startswith("Strict") else "le", args[1], args[0])
        if name in ("CeilToInt", "FloorToInt", "TruncToInt", "ToFloat", "Identity", "RoundToInt") and len(args) == 1:
            return args[0]
        raise errors.InvalidIR(stage="capture", node=str(expr), problem=f"no integer form for sympy function {name}")


def to_sympy(expr: Expr, symbols: Mapping[Size, sympy.Symbol]) -> sympy.Expr:
    """The sympy form of an expression over sizes, for guards and messages."""
    from torch.utils._sympy.functions import FloorDiv as SympyFloorDiv
    from torch.utils._sympy.functions import Mod as SympyMod

    def visit(atom: Atom) -> sympy.Expr:
        if isinstance(atom, Size):
            return symbols[atom]
        if isinstance(atom, ix.FloorDiv):
            return SympyFloorDiv(to_sympy(atom.num, symbols), to_sympy(atom.den, symbols))
        if isinstance(atom, ix.Mod):
            return SympyMod(to_sympy(atom.num, symbols), to_sympy(atom.den, symbols))
        raise TypeError(f"{atom} has no sympy form")

    total = sympy.Integer(0)
    for mono, coef in expr.terms:
        term = sympy.Integer(coef)
        for atom in mono:
            term = term * visit(atom)
        total = total + term
    return total
