"""The border between sympy (sizes and guards, owned by torch's ShapeEnv) and kgen's own index expressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv as SympyFloorDiv
from torch.utils._sympy.functions import Mod as SympyMod

from kgen import errors
from kgen.ir import functions
from kgen.ir import index as ix
from kgen.ir.index import GUESS, Atom, Expr, Size, Sizes, with_derived


class SymbolTable:
    """Translates one graph's sympy expressions. Symbols keep their names; ranges come from the ShapeEnv when there is one.

    What has no form as an index, such as ``floor(1.5 * s0)`` or ``s0**-0.5``, becomes a *derived* symbol: `derived` says how
    the host computes it from the others."""

    def __init__(self, shape_env: Any = None) -> None:
        self.shape_env = shape_env
        self.sympy_of: dict[Size, sympy.Symbol] = {}
        self.derived: dict[Size, Expr] = {}
        self._memo: dict[sympy.Expr, Expr] = {}
        self._sizes: dict[sympy.Symbol, Size] = {}
        self._names: dict[Expr, Size] = {}
        self._found: dict[sympy.Symbol, Expr] = {}
        self._measured: dict[sympy.Symbol, Expr] = {}  # what defines an unbacked symbol, with no range from its checks

    def expr(self, value: Any) -> Expr:
        """An int, SymInt, SymBool, sympy expression or `Expr` as an `Expr`."""
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

    def float_bits(self, value: torch.SymFloat) -> Expr:
        """The bits of a float computed from sizes: a literal or a symbol (see `functions.float_bits`)."""
        return self._float_symbol(self._replaced(value.node.expr))

    def sizes(self, shape: Any) -> tuple[Expr, ...]:
        return tuple(self.expr(s) for s in shape)

    def size_hints(self) -> dict[Size, int]:
        """The values that the symbols had in the example inputs (unbacked symbols: a guess of 64)."""
        return with_derived({size: self._hint(symbol) for size, symbol in self.sympy_of.items()}, self.derived)

    def example(self, expr: Expr) -> int | None:
        """The value in the example inputs; None where that depends on data or is for the host to compute."""
        hints: dict[Size, int] = {}
        for atom in ix.free_atoms(expr):
            if not isinstance(atom, Size) or atom not in self.sympy_of or self._known(self.sympy_of[atom]) is None:
                return None
            hints[atom] = self._hint(self.sympy_of[atom])
        return Sizes(hints).of(expr)

    def ensure_nonnegative(self, exprs: Sequence[Expr]) -> bool:
        """Whether no expression is ever negative. What only the example inputs say becomes a guard, as long as guards may be
        added. An answer of no adds none."""
        conditions = [self._nonnegative(e) for e in exprs if not ix.known_nonnegative(e)]
        return None not in conditions and all(map(self._guarded, conditions))

    def ensure_positive(self, expr: Expr) -> None:
        """Leaves 0 out of ranges of sizes that make a number 0, as long as ranges may change. torch has no such guard: to it
        all sizes are positive."""
        for size in (a for a in ix.free_atoms(expr) if isinstance(a, Size) and a in self.sympy_of and not a.lo):
            env, symbol, hints = self.shape_env, self.sympy_of[size], {**self.size_hints(), size: 0}
            known = env is not None and not env.frozen and self._known(symbol) is not None and self._hint(symbol) > 0
            if known and Sizes(with_derived(hints, self.derived)).of(expr) <= 0:
                env.constrain_symbol_range(symbol, 1, size.hi)

    def _nonnegative(self, expr: Expr) -> sympy.Basic | None:
        """The condition as torch writes it; None where the example inputs do not meet it, or it has no such form."""
        example = None if self.shape_env is None else self.example(expr)
        if example is None or example < 0:
            return None
        try:
            return sympy.Ge(to_sympy(expr, self.sympy_of), 0)
        except (KeyError, TypeError):  # a derived number, or a function of numbers
            return None

    def _guarded(self, condition: sympy.Basic) -> bool:
        """A condition that holds in the example inputs. Once Dynamo has its guards, only what these imply holds."""
        if self.shape_env.frozen:
            return bool(self.shape_env._maybe_evaluate_static(condition))
        return bool(self.shape_env.evaluate_expr(condition))

    def _hint(self, symbol: sympy.Symbol) -> int:
        number = self._known(symbol)
        if number is None:
            return GUESS if symbol.is_integer else functions.float_bits(1.0)
        return int(number) if symbol.is_integer else functions.float_bits(float(number))

    def _known(self, symbol: sympy.Symbol) -> Any:
        env = self.shape_env
        name = "backed_var_to_val" if hasattr(env, "backed_var_to_val") else "var_to_val"  # torch 2.13, 2.11
        known = getattr(env, name, {}).get(symbol)
        number = sympy.sympify(known) if known is not None else None
        return None if number is None or not number.is_number else number

    def _range(self, expr: sympy.Expr) -> tuple[int, int]:
        limit = 1 << 62
        env = self.shape_env
        if env is None:
            return (0, limit) if expr.is_Symbol else (-limit, limit)
        found = env.var_to_range.get(expr) if expr.is_Symbol else env.bound_sympy(expr)
        if found is None:
            return 0, limit
        lo, hi = found.lower, found.upper
        return (int(lo) if lo.is_Integer else -limit), (int(hi) if hi.is_Integer and hi < limit else limit)

    def _is_one(self, expr: sympy.Expr) -> bool:
        """Whether the guards say so of an expression, such as ``s0//3 - 1`` where torch found out by asking that it repeats.
        Of a symbol that they say it of, torch itself makes the number. Adds no guard."""
        if self.shape_env is None or not expr.is_integer or not expr.free_symbols or expr.free_symbols & self._found.keys():
            return False
        return bool(self.shape_env._maybe_evaluate_static(sympy.Eq(expr, 1)))

    def _replaced(self, expr: sympy.Expr) -> sympy.Expr:
        return self.shape_env.replace(expr) if self.shape_env is not None else expr

    def _translate(self, expr: sympy.Expr) -> Expr:
        hit = self._memo.get(expr)
        if hit is None:
            hit = self._memo[expr] = self._visit(self._replaced(expr))
        return hit

    # ---- sizes that data decide -------------------------------------------------------------------------------------

    def depends_on_data(self, expr: Expr) -> bool:
        """Whether a number in the expression has no value in the example inputs."""
        found = [self.sympy_of[a] for a in ix.free_atoms(expr) if isinstance(a, Size) and a in self.sympy_of]
        return any(self._known(symbol) is None for symbol in found)

    def is_new(self, symbol: sympy.Symbol) -> bool:
        """Whether only data decide the symbol's value, and nothing so far has given it."""
        return self._known(symbol) is None and symbol not in self._measured and symbol not in self.sympy_of.values()

    def measure(self, symbol: sympy.Symbol, lo: int) -> Size:
        """The symbol for what a call finds out: as large as it turns out to be. The symbol itself, which has the range that
        torch's checks give it, is derived from it, so that a check reads what was found."""
        found = ix.size(f"{symbol}_found", lo, 1 << 62)
        self.define(symbol, found.expr())
        return found

    def define(self, symbol: sympy.Symbol, definition: Expr) -> None:
        """Makes an unbacked symbol derived. One that has a definition keeps it."""
        atom = self._translate(symbol).atom()
        if symbol not in self._measured and isinstance(atom, Size) and atom not in ix.free_atoms(definition):
            self.derived[atom] = definition
        self._measured.setdefault(symbol, definition)

    def check(self, condition: sympy.Basic) -> Expr | None:
        """A condition on unbacked symbols that holds for what was found, not because torch relies on it; None where it
        has other symbols than the graph."""
        known = {*self._measured, *self.sympy_of.values()}
        if not condition.free_symbols <= known:
            return None
        names = {symbol: sympy.Symbol(f"{symbol}_found", integer=True) for symbol in self._measured}
        self._found = {name: self._measured[symbol] for symbol, name in names.items()}
        return self._visit(condition.xreplace(names))

    def defined(self, condition: sympy.Basic) -> bool:
        """Whether all unbacked symbols of a condition have a definition in this graph, and there is one."""
        unbacked = {s for s in condition.free_symbols if self._known(s) is None}
        return bool(unbacked) and unbacked <= self._measured.keys()

    # ---- integers and booleans (0 or 1) -----------------------------------------------------------------------------

    def _visit(self, expr: Any) -> Expr:
        if expr in (sympy.true, sympy.false):
            return ix.constant(int(expr is sympy.true))
        if expr.is_Integer:
            return ix.constant(int(expr))
        if expr.is_Symbol:
            return self._symbol(expr)
        if self._is_one(expr):
            return ix.ONE
        name = type(expr).__name__
        if name in _ROUNDINGS:
            return self._rounded(name, expr)
        if name in _COMPARISONS:
            return self._compared(name, expr)
        if name == "Piecewise":
            return self._piecewise(expr)
        return self._arithmetic(expr, name)

    def _arithmetic(self, expr: Any, name: str) -> Expr:
        args = [self._visit(a) for a in expr.args if a.is_Integer or not a.is_number or a.is_Boolean]
        if len(args) < len(expr.args):
            raise self._unknown(expr)
        if isinstance(expr, sympy.Add):
            return sum(args, ix.ZERO)
        if isinstance(expr, sympy.Mul):
            return ix.product(args)
        if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
            return ix.product([args[0]] * int(expr.exp))
        return self._function(expr, name, args)

    def _symbol(self, expr: sympy.Symbol) -> Expr:
        if expr in self._found:
            return self._found[expr]
        lo, hi = self._range(expr)
        if lo == hi:
            return ix.constant(lo)
        # A guard that is added meanwhile may narrow the range. With another range the size would be another one, that no input
        # has: results would get other strides than in eager, or the host would not know the size.
        size = self._sizes.setdefault(expr, ix.size(str(expr), lo, hi))
        self.sympy_of[size] = expr
        return size.expr()

    def _function(self, expr: Any, name: str, args: list[Expr]) -> Expr:
        if name in ("FloorDiv", "CleanDiv"):
            return _floordiv(args[0], args[1])
        if name in ("Mod", "PythonMod"):
            return _mod(args[0], args[1])
        if name == "ModularIndexing":
            return ix.mod(ix.floordiv(args[0], args[1]), args[2])
        if name == "Abs":
            return ix.maximum(args[0], -args[0])
        if name in ("Max", "Min"):
            return reduce(ix.maximum if name == "Max" else ix.minimum, args)
        if name in ("And", "Or"):
            return reduce(ix.maximum, args) if name == "Or" else ix.product(args)
        if name == "Not":
            return ix.ONE - args[0]
        simple = {
            "PowByNatural": "pow", "LShift": "shl", "RShift": "shr", "Where": "select",
            "BitwiseFn_bitwise_and": "and", "BitwiseFn_bitwise_or": "or", "BitwiseFn_bitwise_xor": "xor",
        }  # fmt: skip
        if name in simple:
            return ix.apply(simple[name], *args)
        if name == "Identity":
            return args[0]
        raise self._unknown(expr)

    def _compared(self, name: str, expr: Any) -> Expr:
        fn, swapped, negated = _COMPARISONS[name]
        if all(a.is_integer or a.is_Boolean for a in expr.args):
            args = [self._visit(a) for a in expr.args]
            made = _compare(fn, *(args[::-1] if swapped else args))
        else:
            bits = [self._float(a) for a in expr.args]
            made = self._derive(ix.apply(f"f{fn}", *(bits[::-1] if swapped else bits)), 0, 1)
        return ix.ONE - made if negated else made

    def _piecewise(self, expr: Any) -> Expr:
        *cases, last = expr.args
        total = self._visit(last[0])
        for value, condition in reversed(cases):
            total = ix.apply("select", self._visit(condition), self._visit(value), total)
        return total

    def _rounded(self, name: str, expr: Any) -> Expr:
        """An integer near a float. The quotient of two sizes needs no float: it is exact below 2**53."""
        inner = expr.args[0]
        kind = type(inner).__name__
        if inner.is_integer or kind == "ToFloat":
            return self._visit(inner if inner.is_integer else inner.args[0])
        if kind == "IntTrueDiv" and name != "RoundToInt":
            num, den = map(self._visit, inner.args)
            if ix.known_nonnegative(num) and ix.lower_bound(den) > 0:
                return ix.ceildiv(num, den) if name == "CeilToInt" else ix.floordiv(num, den)
        return self._derive(ix.apply(_ROUNDINGS[name], self._float(inner)), *self._range(expr))

    # ---- floats, as bits --------------------------------------------------------------------------------------------

    def _float_symbol(self, expr: sympy.Expr) -> Expr:
        bits = self._float(expr)
        return bits if bits.as_int() is not None or isinstance(bits.atom(), Size) else self._derive(bits)

    def _float(self, expr: Any) -> Expr:
        if expr.is_number and expr.is_extended_real:
            return ix.constant(functions.float_bits(float(expr)))
        name = type(expr).__name__
        if (expr.is_integer or expr.is_Boolean) and not (name in _MODS and not all(a.is_integer for a in expr.args)):
            return ix.apply("float", self._visit(expr))
        if expr.is_Symbol:
            size = ix.size(str(expr), -(1 << 62), 1 << 62)
            self.sympy_of[size] = expr
            return size.expr()
        if name == "Where":
            return ix.apply("select", self._visit(expr.args[0]), *map(self._float, expr.args[1:]))
        if name in ("IntTrueDiv", "ToFloat"):
            args = [ix.apply("float", self._visit(a)) for a in expr.args]
        else:
            args = [self._float(a) for a in expr.args]
        return self._float_function(expr, name, args)

    def _float_function(self, expr: Any, name: str, args: list[Expr]) -> Expr:
        if name in ("ToFloat", "Identity"):
            return args[0]
        if name == "TruncToFloat":
            return ix.apply("float", ix.apply("ftrunc", args[0]))
        if name == "Abs":
            return ix.apply("fmax", args[0], ix.apply("fmul", args[0], ix.constant(functions.float_bits(-1.0))))
        unary = name.removeprefix("OpaqueUnaryFn_")
        named = f"f{unary}" if f"f{unary}" in functions.FLOAT_FUNCTIONS and len(args) == 1 else None
        fn = _FLOAT_FUNCTIONS.get(name, named)
        if fn is None:
            raise self._unknown(expr)
        return reduce(lambda a, b: ix.apply(fn, a, b), args) if len(args) > 1 else ix.apply(fn, *args)

    def _derive(self, definition: Expr, lo: int = -(1 << 62), hi: int = 1 << 62) -> Expr:
        """A symbol for what only the host computes."""
        if definition.as_int() is not None:
            return definition
        found = self._names.get(definition)
        if found is None:
            found = self._names[definition] = ix.size(f"d{len(self.derived)}", lo, hi)
            self.derived[found] = definition
        return found.expr()

    def _unknown(self, expr: Any) -> errors.InvalidIR:
        return errors.InvalidIR(stage="capture", node=str(expr), problem=f"no form for sympy function {type(expr).__name__}")


def _compare(fn: str, a: Expr, b: Expr) -> Expr:
    """A comparison, decided now where the ranges of the sizes allow it."""
    if fn in ("lt", "le"):
        bound = b if fn == "lt" else b + 1
        if ix.known_less(a, bound):
            return ix.ONE
        if ix.known_less(bound - 1, a):
            return ix.ZERO
    return ix.apply(fn, a, b)


def _floordiv(num: Expr, den: Expr) -> Expr:
    """Python's ``num // den``; `index.floordiv` takes positive divisors."""
    lo, hi = den.bounds()
    if lo >= 0:
        return ix.floordiv(num, den)
    if hi <= 0:
        return ix.floordiv(-num, -den)
    sign = ix.apply("select", ix.apply("lt", den, 0), -ix.ONE, ix.ONE)
    return ix.floordiv(sign * num, ix.maximum(den, -den))


def _mod(num: Expr, den: Expr) -> Expr:
    """Python's ``num % den``, which has the divisor's sign."""
    return ix.mod(num, den) if den.bounds()[0] >= 0 else num - den * _floordiv(num, den)


_MODS = ("Mod", "PythonMod")  # torch calls them integers whatever their arguments are
_ROUNDINGS = {"CeilToInt": "fceil", "FloorToInt": "ffloor", "TruncToInt": "ftrunc", "RoundToInt": "fround"}
# name -> (function, arguments swapped, result negated)
_COMPARISONS = {
    "StrictLessThan": ("lt", False, False), "LessThan": ("le", False, False), "Equality": ("eq", False, False),
    "StrictGreaterThan": ("lt", True, False), "GreaterThan": ("le", True, False), "Unequality": ("eq", False, True),
}  # fmt: skip
_FLOAT_FUNCTIONS = {
    "Add": "fadd", "Mul": "fmul", "FloatTrueDiv": "fdiv", "IntTrueDiv": "fdiv", "Pow": "fpow", "FloatPow": "fpow",
    "Max": "fmax", "Min": "fmin", "Mod": "fmod", "PythonMod": "fmod", "RoundDecimal": "frounddec",
}  # fmt: skip


def to_sympy(expr: Expr, symbols: Mapping[Size, sympy.Symbol]) -> sympy.Expr:
    """The sympy form of an expression over sizes, for guards and messages."""

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
