"""Integer index expressions: an interned polynomial form with floor-division and modulo atoms.

An `Expr` is ``sum(coefficient * monomial)``; a monomial is a sorted tuple of atoms.  Atoms are loop variables (`Var`),
size symbols (`Size`), `FloorDiv`, `Mod`, `Apply` (min, max, ...) and `Indirect` (an integer read from memory).  For static
sizes the form is affine in the loop variables; a symbolic stride is a monomial such as ``s0*i1``.

Everything is interned, so equality is identity and every analysis is memoised on the object.  Variables carry their extent
and size symbols their range, so simplification needs no context.  All divisions are floor divisions by positive divisors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Union

from kgen.ir.functions import FOLD

if TYPE_CHECKING:
    import torch

__all__ = [
    "Apply", "Atom", "Expr", "FloorDiv", "GUESS", "Indirect", "Mod", "Size", "Sizes", "Stored", "Var", "ZERO", "ONE",
    "as_expr", "ceildiv", "constant", "evaluate", "floordiv", "free_atoms", "is_static", "maximum", "minimum", "mod",
    "product", "size", "stride_of", "substitute", "var", "with_derived",
]  # fmt: skip

_INF = 1 << 62


class Atom:
    """Base of everything that can stand in a monomial. Interned by `key`; ordered for a stable normal form."""

    __slots__ = ("__weakref__", "_expr", "_range", "key", "order")
    key: tuple[Any, ...]
    order: tuple[Any, ...]
    _expr: Expr | None
    _range: tuple[int, int] | None

    def expr(self) -> Expr:
        if self._expr is None:
            self._expr = _make({(self,): 1})
        return self._expr

    def __repr__(self) -> str:
        return str(self)

    def __reduce__(self) -> Any:
        return (_rebuild_atom, (type(self).__name__, self.key))


class Var(Atom):
    """A loop variable running over ``0 <= name < extent``."""

    __slots__ = ("extent", "name")
    name: str
    extent: Expr

    def expr(self) -> Expr:
        """The variable as an expression: zero when it has one value only, so that size-1 dimensions vanish from indices."""
        return ZERO if self.extent == 1 else super().expr()

    def __str__(self) -> str:
        return self.name


class Size(Atom):
    """A size known only at run time, ``lo <= name <= hi``."""

    __slots__ = ("hi", "lo", "name")
    name: str
    lo: int
    hi: int

    def __str__(self) -> str:
        return self.name


class FloorDiv(Atom):
    __slots__ = ("den", "num")
    num: Expr
    den: Expr

    def __str__(self) -> str:
        return f"({self.num} // {self.den})"


class Mod(Atom):
    __slots__ = ("den", "num")
    num: Expr
    den: Expr

    def __str__(self) -> str:
        return f"({self.num} % {self.den})"


class Apply(Atom):
    """An integer function of expressions that has no polynomial form: ``min``, ``max``, ``pow``, ``shl``, ``shr``, ..."""

    __slots__ = ("args", "fn")
    fn: str
    args: tuple[Expr, ...]

    def __str__(self) -> str:
        return f"{self.fn}({', '.join(map(str, self.args))})"


class Indirect(Atom):
    """An integer that a `Value` computes at run time, already wrapped into ``0 <= value < size``. One that is `inside` whatever
    the data, as its own arithmetic says, is not checked."""

    __slots__ = ("inside", "size", "value")
    value: Any
    size: Expr
    inside: bool

    def __str__(self) -> str:
        return f"[{self.value}]"


class Expr:
    """An interned polynomial over atoms. Build with operators; compare with ``is`` or ``==`` (the same thing)."""

    __slots__ = ("__weakref__", "_atoms", "_bounds", "_indirect", "_joins", "_upper", "terms")
    terms: tuple[tuple[tuple[Atom, ...], int], ...]
    _bounds: tuple[int, int] | None
    _atoms: frozenset[Atom] | None
    _indirect: tuple[Indirect, ...] | None
    _joins: bool  # whether some atom is a remainder, which a division may complete
    _upper: Expr | None

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return self.as_int() == other
        return self is other

    def __add__(self, other: ExprLike) -> Expr:
        other = other if isinstance(other, Expr) else as_expr(other)
        if not other.terms:
            return self
        if not self.terms:
            return other
        key = (self, other)
        hit = _sums.get(key)
        if hit is None:
            table = dict(self.terms)
            for mono, coef in other.terms:
                table[mono] = table.get(mono, 0) + coef
            hit = _sums[key] = _make(_join_divmod(table) if self._joins or other._joins else table)
        return hit

    __radd__ = __add__

    def __neg__(self) -> Expr:
        return self * -1

    def __sub__(self, other: ExprLike) -> Expr:
        return self + as_expr(other) * -1

    def __rsub__(self, other: ExprLike) -> Expr:
        return as_expr(other) - self

    def __mul__(self, other: ExprLike) -> Expr:
        other = other if isinstance(other, Expr) else as_expr(other)
        key = (self, other)
        hit = _multiplied.get(key)
        if hit is None:
            table: dict[tuple[Atom, ...], int] = {}
            for mono_a, coef_a in self.terms:
                for mono_b, coef_b in other.terms:
                    mono = tuple(sorted(mono_a + mono_b, key=_order)) if mono_a and mono_b else mono_a or mono_b
                    table[mono] = table.get(mono, 0) + coef_a * coef_b
            hit = _multiplied[key] = _make(_join_divmod(table))
        return hit

    __rmul__ = __mul__

    def __floordiv__(self, other: ExprLike) -> Expr:
        return floordiv(self, as_expr(other))

    def __mod__(self, other: ExprLike) -> Expr:
        return mod(self, as_expr(other))

    def as_int(self) -> int | None:
        """The value when it is a constant, else None."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and not self.terms[0][0]:
            return self.terms[0][1]
        return None

    def constant_term(self) -> int:
        """What is added to the terms that have atoms."""
        return next((number for atoms, number in self.terms if not atoms), 0)

    def atom(self) -> Atom | None:
        """The atom when the expression is exactly one atom, else None."""
        if len(self.terms) == 1 and self.terms[0][1] == 1 and len(self.terms[0][0]) == 1:
            return self.terms[0][0][0]
        return None

    def bounds(self) -> tuple[int, int]:
        """Inclusive numeric bounds; +-2**62 stands for unknown."""
        if self._bounds is None:
            self._bounds = _expr_bounds(self)
        return self._bounds

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        parts = []
        for mono, coef in self.terms:
            body = "*".join(map(str, mono))
            parts.append(str(coef) if not mono else body if coef == 1 else f"{coef}*{body}")
        return " + ".join(parts)

    def __repr__(self) -> str:
        return str(self)

    def __reduce__(self) -> Any:
        return (_rebuild_expr, (self.terms,))


ExprLike = Union[Expr, int]

_exprs: dict[tuple[Any, ...], Expr] = {}
_atoms: dict[tuple[Any, ...], Atom] = {}
_sums: dict[tuple[Expr, Expr], Expr] = {}
_multiplied: dict[tuple[Expr, Expr], Expr] = {}
_of_factors: dict[tuple[ExprLike, ...], Expr] = {}
_substituted: dict[tuple[Expr | None, ...], Expr] = {}
_divmods: dict[tuple[Expr, Expr], tuple[Expr, Expr]] = {}
_strides: dict[tuple[Expr, Var | Size], Expr | None] = {}


def clear_tables() -> None:
    """Forget interned expressions. Only safe between compilations; live expressions would lose their identity."""
    for table in (_exprs, _atoms, _sums, _multiplied, _of_factors, _substituted, _divmods, _strides):
        table.clear()


def _order(atom: Atom) -> tuple[Any, ...]:
    return atom.order


def _by_atoms(term: tuple[tuple[Atom, ...], int]) -> tuple[tuple[Any, ...], ...]:
    return tuple(atom.order for atom in term[0])


def _make(table: Mapping[tuple[Atom, ...], int]) -> Expr:
    terms = tuple((m, c) for m, c in table.items() if c)
    if len(terms) > 1:
        terms = tuple(sorted(terms, key=_by_atoms))
    found = _exprs.get(terms)
    if found is None:
        made = Expr()
        made.terms = terms
        made._bounds = made._atoms = made._indirect = made._upper = None
        made._joins = any(isinstance(atom, Mod) for mono, _ in terms for atom in mono)
        found = _exprs.setdefault(terms, made)
    return found


_RANK = {Size: 0, Var: 1, Indirect: 2, Apply: 3, FloorDiv: 4, Mod: 5}


def _intern_atom(kind: type[Atom], order: tuple[Any, ...], **fields: Any) -> Any:
    key = tuple(fields.values())
    full = (kind, *key)
    found = _atoms.get(full)
    if found is None:
        made = kind()
        for name, value in fields.items():
            setattr(made, name, value)
        made.key = key
        made.order = (_RANK[kind], *order)
        made._expr = made._range = None
        found = _atoms.setdefault(full, made)
    return found


def _rebuild_atom(kind: str, key: tuple[Any, ...]) -> Atom:
    makers: dict[str, Callable[..., Atom]] = {
        "Var": var, "Size": size, "FloorDiv": _floordiv_atom, "Mod": _mod_atom, "Apply": _apply_atom, "Indirect": indirect,
    }  # fmt: skip
    return makers[kind](*key)


def _rebuild_expr(terms: tuple[tuple[tuple[Atom, ...], int], ...]) -> Expr:
    return _make(dict(terms))


def constant(value: int) -> Expr:
    value = int(value)
    return _exprs.get((((), value),)) or _make({(): value})


def as_expr(value: ExprLike | Atom) -> Expr:
    if isinstance(value, Expr):
        return value
    if isinstance(value, Atom):
        return value.expr()
    return constant(value)


def var(name: str, extent: ExprLike) -> Var:
    return _intern_atom(Var, (name, str(extent)), name=name, extent=as_expr(extent))


def size(name: str, lo: int = 0, hi: int = _INF) -> Size:
    return _intern_atom(Size, (name, lo, hi), name=name, lo=lo, hi=hi)


def indirect(value: Any, extent: ExprLike, inside: bool = False) -> Indirect:
    """The index atom of `value` (hashable, interned by its owner); the caller has wrapped it into ``[0, extent)``, and knows
    whether it is always `inside`."""
    # not by address or by age: the normal form must not differ from one process to the next, or with what it compiled before
    order = getattr(value, "order", (str(value),))
    return _intern_atom(Indirect, (*order, str(extent), inside), value=value, size=as_expr(extent), inside=inside)


def _floordiv_atom(num: Expr, den: Expr) -> FloorDiv:
    return _intern_atom(FloorDiv, (str(num), str(den)), num=num, den=den)


def _mod_atom(num: Expr, den: Expr) -> Mod:
    return _intern_atom(Mod, (str(num), str(den)), num=num, den=den)


def _apply_atom(fn: str, args: tuple[Expr, ...]) -> Apply:
    return _intern_atom(Apply, (fn, str(args)), fn=fn, args=args)


ZERO = constant(0)
ONE = constant(1)


def apply(fn: str, *args: ExprLike) -> Expr:
    """A function of `FUNCTIONS` or `FLOAT_FUNCTIONS`, folded when its arguments are constants."""
    exprs = tuple(map(as_expr, args))
    ints = [e.as_int() for e in exprs]
    if all(i is not None for i in ints):
        return constant(FOLD[fn](*ints))
    if fn in ("min", "max"):
        if exprs[0] is exprs[1]:
            return exprs[0]
        gap = lower_bound(exprs[1] - exprs[0])
        if gap >= 0:
            return exprs[0] if fn == "min" else exprs[1]
        gap = lower_bound(exprs[0] - exprs[1])
        if gap >= 0:
            return exprs[1] if fn == "min" else exprs[0]
    return _apply_atom(fn, exprs).expr()


def minimum(a: ExprLike, b: ExprLike) -> Expr:
    return apply("min", a, b)


def maximum(a: ExprLike, b: ExprLike) -> Expr:
    return apply("max", a, b)


def ceildiv(a: ExprLike, b: ExprLike) -> Expr:
    b = as_expr(b)
    return floordiv(as_expr(a) + b - 1, b)


def product(items: Iterable[ExprLike]) -> Expr:
    factors = tuple(items)
    hit = _of_factors.get(factors)
    if hit is None:
        total = ONE
        for item in factors:
            total = total * item
        hit = _of_factors[factors] = total
    return hit


# ---- bounds ---------------------------------------------------------------------------------------------------------


def _clip(value: int) -> int:
    return max(-_INF, min(_INF, value))


def _atom_bounds(atom: Atom) -> tuple[int, int]:
    if atom._range is None:
        atom._range = _compute_atom_bounds(atom)
    return atom._range


def _compute_atom_bounds(atom: Atom) -> tuple[int, int]:
    if isinstance(atom, Var):
        return 0, max(0, atom.extent.bounds()[1] - 1)
    if isinstance(atom, Size):
        return atom.lo, atom.hi
    if isinstance(atom, Indirect):
        return 0, max(0, atom.size.bounds()[1] - 1)
    if isinstance(atom, Mod):
        return 0, _clip(min(atom.den.bounds()[1] - 1, atom.num.bounds()[1] if atom.num.bounds()[0] >= 0 else _INF))
    if isinstance(atom, FloorDiv):
        return _floordiv_bounds(atom)
    assert isinstance(atom, Apply)
    return _apply_bounds(atom)


def _floordiv_bounds(atom: FloorDiv) -> tuple[int, int]:
    lo, hi = atom.num.bounds()
    den_lo, den_hi = (max(1, b) for b in atom.den.bounds())
    # the quotient is nearest to zero for the largest divisor
    low = lo // den_lo if lo < 0 else lo // den_hi
    high = hi // den_lo if hi >= 0 else hi // den_hi
    return (-_INF if lo <= -_INF else low), (_INF if hi >= _INF else high)


def _apply_bounds(atom: Apply) -> tuple[int, int]:
    ranges = [a.bounds() for a in atom.args]
    if atom.fn == "min":
        return min(r[0] for r in ranges), min(r[1] for r in ranges)
    if atom.fn == "max":
        return max(r[0] for r in ranges), max(r[1] for r in ranges)
    if atom.fn in ("lt", "le", "eq"):
        return 0, 1
    if atom.fn == "select":
        return min(r[0] for r in ranges[1:]), max(r[1] for r in ranges[1:])
    if atom.fn in ("pow", "shr", "and") and all(r[0] >= 0 for r in ranges):
        return 0, _INF
    return -_INF, _INF


def _expr_bounds(expr: Expr) -> tuple[int, int]:
    lo = hi = 0
    for mono, coef in expr.terms:
        term_lo, term_hi = 1, 1
        for atom in mono:
            a_lo, a_hi = _atom_bounds(atom)
            corners = [_clip(x * y) for x in (term_lo, term_hi) for y in (a_lo, a_hi)]
            term_lo, term_hi = min(corners), max(corners)
        ends = (_clip(term_lo * coef), _clip(term_hi * coef))
        lo, hi = _clip(lo + min(ends)), _clip(hi + max(ends))
    return lo, hi


def upper_expr(expr: Expr) -> Expr:
    """A symbolic upper bound over the loop variables: each variable with a non-negative coefficient at ``extent - 1``."""
    if expr._upper is not None:
        return expr._upper
    total = ZERO
    for mono, coef in expr.terms:
        term = constant(coef)
        if len(mono) > 1 and any(_atom_bounds(atom)[0] < 0 for atom in mono):
            # a factor below zero turns the order round: i * (j - 5) // 2 is largest where i is smallest
            total = total + _make({mono: coef}).bounds()[1]
            continue
        for atom in mono:
            if isinstance(atom, Var):
                term = term * ((atom.extent - 1) if coef > 0 else ZERO)
            elif isinstance(atom, Indirect):
                term = term * ((atom.size - 1) if coef > 0 else ZERO)
            elif isinstance(atom, Mod) and _has_loops(atom):
                term = term * ((atom.den - 1) if coef > 0 else ZERO)
            elif isinstance(atom, FloorDiv) and _has_loops(atom) and atom.num.bounds()[0] >= 0:
                term = term * (floordiv(upper_expr(atom.num), atom.den) if coef > 0 else ZERO)
            else:
                term = term * atom.expr()
        total = total + term
    expr._upper = total
    return total


def _has_loops(atom: Atom) -> bool:
    return any(isinstance(a, Var | Indirect) for a in free_atoms(atom.expr()))


def lower_bound(expr: Expr) -> int:
    return expr.bounds()[0]


def known_less(a: ExprLike, b: ExprLike) -> bool:
    """True when ``a < b`` holds for all values of loop variables and sizes."""
    a, b = as_expr(a), as_expr(b)
    if a.bounds()[1] < b.bounds()[0]:
        return True
    return lower_bound(b - 1 - upper_expr(a)) >= 0


def disjoint(a: Iterable[Expr], b: Iterable[Expr]) -> bool:
    """Whether two indices can never name one element, each at any point of its own loops."""
    return any(_never_equal(x, y) for x, y in zip(a, b, strict=True))


def _never_equal(a: Expr, b: Expr) -> bool:
    """By their ranges, or by what both leave over when they are divided by the gcd of all steps."""
    if any(isinstance(atom, Indirect) for e in (a, b) for atom in free_atoms(e)):
        return False
    (a_lo, a_hi), (b_lo, b_hi) = a.bounds(), b.bounds()
    if a_hi < b_lo or b_hi < a_lo:
        return True
    step = math.gcd(*(coef for e in (a, b) for mono, coef in e.terms if mono))
    distance = sum(coef for mono, coef in a.terms if not mono) - sum(coef for mono, coef in b.terms if not mono)
    return distance != 0 if step == 0 else distance % step != 0


def known_nonnegative(a: Expr) -> bool:
    return a.bounds()[0] >= 0


# ---- division -------------------------------------------------------------------------------------------------------


def _divide_term(
    mono: tuple[Atom, ...], coef: int, den_mono: tuple[Atom, ...], den_coef: int
) -> tuple[tuple[Atom, ...], int] | None:
    if coef % den_coef:
        return None
    rest = list(mono)
    for atom in den_mono:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest), coef // den_coef


def _split(num: Expr, den_mono: tuple[Atom, ...], den_coef: int) -> tuple[Expr, Expr]:
    """``num == den * quotient + rest`` where the quotient takes the terms that `den` divides exactly."""
    quotient: dict[tuple[Atom, ...], int] = {}
    rest: dict[tuple[Atom, ...], int] = {}
    for mono, coef in num.terms:
        got = _divide_term(mono, coef, den_mono, den_coef)
        if got is not None:
            quotient[got[0]] = quotient.get(got[0], 0) + got[1]
        elif not mono and not den_mono:  # a constant: 7 // 4 -> 1, rest 3
            quotient[()] = quotient.get((), 0) + coef // den_coef
            rest[()] = coef % den_coef
        else:
            rest[mono] = coef
    return _make(_join_divmod(quotient)), _make(_join_divmod(rest))


def _gcds(num: Expr, den_coef: int) -> list[int]:
    """Divisors of `den_coef` that some coefficient of `num` shares, largest first: candidates for pulling out a factor."""
    return sorted({math.gcd(coef, den_coef) for _, coef in num.terms} - {1, den_coef}, reverse=True)


def _divmod(num: Expr, den: Expr) -> tuple[Expr, Expr]:
    key = (num, den)
    hit = _divmods.get(key)
    if hit is None:
        hit = _divmods[key] = _compute_divmod(num, den)
    return hit


def _compute_divmod(num: Expr, den: Expr) -> tuple[Expr, Expr]:
    known = _divmod_known(num, den)
    if known is not None:
        return known
    if (around := _without_remainders(num, den)) is not num:
        return _divmod_of_one(num, den)[0], _divmod(around, den)[1]
    return _divmod_of_one(num, den)


def _without_remainders(num: Expr, den: Expr) -> Expr:
    """A number with the same remainder: ``(x % 6 + y) % 3 == (x + y) % 3``. What may be negative stays as it is."""
    if not any(isinstance(atom, Mod) for mono, _ in num.terms for atom in mono):
        return num
    found = num
    for mono, coef in num.terms:
        atom = mono[0] if len(mono) == 1 else None
        if isinstance(atom, Mod) and _divmod(atom.den, den)[1] is ZERO:
            found = found + (atom.num - atom.expr()) * coef
    return found if known_nonnegative(found) else num


def _divmod_of_one(num: Expr, den: Expr) -> tuple[Expr, Expr]:
    if len(den.terms) != 1:
        return _floordiv_atom(num, den).expr(), _mod_atom(num, den).expr()
    den_mono, den_coef = den.terms[0]
    quotient, rest = _split(num, den_mono, den_coef)
    if _is_remainder(rest, den):
        return quotient, rest
    reduced = _divmod_by_factor(rest, den_mono, den_coef)
    if reduced is not None:
        return quotient + reduced[0], reduced[1]
    if quotient.terms and not known_nonnegative(rest):
        # keep the whole numerator when the rest may be negative: floor semantics still hold, but the atom stays readable
        quotient, rest = ZERO, num
    more, remainder = _divmod_atom(rest, den)
    return quotient + more, remainder


def _divmod_known(num: Expr, den: Expr) -> tuple[Expr, Expr] | None:
    """The division when numbers or ranges alone decide it."""
    a, b = num.as_int(), den.as_int()
    if b == 1:
        return num, ZERO
    if b == 0:
        raise ZeroDivisionError(f"index expression {num} divided by zero")
    if a is not None and b is not None:
        return constant(a // b), constant(a % b)
    if known_nonnegative(num) and known_less(num, den):
        return ZERO, num
    return None


def _is_remainder(rest: Expr, den: ExprLike) -> bool:
    """Whether ``0 <= rest < den`` always holds."""
    return not rest.terms or (known_nonnegative(rest) and known_less(rest, den))


def _divmod_by_factor(rest: Expr, den_mono: tuple[Atom, ...], den_coef: int) -> tuple[Expr, Expr] | None:
    """``(g*A + r) // (g*d) == A // d`` and ``% == g*(A % d) + r`` when ``0 <= r < g``: the division without the factor g."""
    for g in _gcds(rest, den_coef):
        big, small = _split(rest, (), g)
        if big.terms and _is_remainder(small, g):
            quotient, remainder = _divmod(big, _make({den_mono: den_coef // g}))
            return quotient, remainder * g + small
    return None


def _divmod_atom(num: Expr, den: Expr) -> tuple[Expr, Expr]:
    """Division of what nothing else simplifies, by one term: a division or remainder inside it may still merge with it."""
    atom = num.atom()
    if isinstance(atom, FloorDiv):  # (x // a) // b
        return floordiv(atom.num, atom.den * den), _mod_atom(num, den).expr()
    if isinstance(atom, Mod):
        parts, rest = _split(atom.den, *den.terms[0])
        if rest is ZERO:  # (x % (k*d)) // d == (x // d) % k, and (x % (k*d)) % d
            return mod(floordiv(atom.num, den), parts), mod(atom.num, den)
    return _floordiv_atom(num, den).expr(), _mod_atom(num, den).expr()


def floordiv(num: ExprLike, den: ExprLike) -> Expr:
    """Floor division by a positive divisor, simplified with the ranges of the variables."""
    return _divmod(as_expr(num), as_expr(den))[0]


def mod(num: ExprLike, den: ExprLike) -> Expr:
    """Remainder of floor division: ``0 <= result < den``."""
    return _divmod(as_expr(num), as_expr(den))[1]


def _join_divmod(table: dict[tuple[Atom, ...], int]) -> dict[tuple[Atom, ...], int]:
    """Rewrites ``c*b*(e // b) + c*(e % b)`` to ``c*e``, which is what makes reshape-of-reshape the identity; neighbouring
    digits of a number become one."""
    mods = [(mono, atom) for mono in table for atom in mono if isinstance(atom, Mod)]
    for mono, atom in mods:
        coef = table.get(mono, 0)
        if not coef:
            continue
        others = list(mono)
        others.remove(atom)
        rest = _make({tuple(others): coef})
        partner = (rest * atom.den * floordiv(atom.num, atom.den)).terms
        if partner and all(table.get(m, 0) == c for m, c in partner):
            for m, _ in partner:
                del table[m]
            del table[mono]
            for extra, c in (rest * atom.num).terms:
                table[extra] = table.get(extra, 0) + c
            return _join_divmod(table)
        digit = next(((m, k) for m, k in mods if k.num is floordiv(atom.num, atom.den)), None)
        if digit is not None and _take_digit(table, rest, mono, atom, digit[1]):
            return _join_divmod(table)
    return table


def _take_digit(table: dict[tuple[Atom, ...], int], rest: Expr, mono: tuple[Atom, ...], low: Mod, high: Mod) -> bool:
    """Rewrites ``c*b*((e // b) % k) + c*(e % b)`` to ``c*(e % (b*k))``, where the first is there as well."""
    partner = (rest * low.den * high.expr()).terms
    if not partner or any(table.get(m, 0) != c for m, c in partner):
        return False
    for m in (mono, *(m for m, _ in partner)):
        del table[m]
    for extra, c in (rest * mod(low.num, low.den * high.den)).terms:
        table[extra] = table.get(extra, 0) + c
    return True


# ---- questions ------------------------------------------------------------------------------------------------------


def free_atoms(expr: Expr) -> frozenset[Atom]:
    """All `Var`, `Size` and `Indirect` atoms in the expression, looking inside divisions but not inside indirect values."""
    if expr._atoms is None:
        found: set[Atom] = set()
        for mono, _ in expr.terms:
            for atom in mono:
                if isinstance(atom, FloorDiv | Mod):
                    found |= free_atoms(atom.num) | free_atoms(atom.den)
                elif isinstance(atom, Apply):
                    for arg in atom.args:
                        found |= free_atoms(arg)
                else:
                    found.add(atom)
        expr._atoms = frozenset(found)
    return expr._atoms


def indirects(expr: Expr) -> tuple[Indirect, ...]:
    """The integers from memory in the expression, in order, those inside divisions included."""
    if expr._indirect is None:
        found = [atom for atom in free_atoms(expr) if isinstance(atom, Indirect)]
        expr._indirect = tuple(sorted(found, key=_order))
    return expr._indirect


def within(expr: Expr, room: int) -> bool:
    """Whether the expression, and all that is divided or compared inside it, is known to lie in ``[-room, room]``."""
    low, high = expr.bounds()
    parts = (part for mono, _ in expr.terms for atom in mono for part in _parts(atom))
    return -room <= low and high <= room and all(within(part, room) for part in parts)


def _parts(atom: Atom) -> tuple[Expr, ...]:
    if isinstance(atom, FloorDiv | Mod):
        return atom.num, atom.den
    return atom.args if isinstance(atom, Apply) else ()


def as_factor(expr: Expr, of: Expr) -> int | None:
    """The integer `k` for which ``expr == k * of`` whatever the sizes; None where there is none."""
    if not of.terms or not expr.terms:
        return None if expr.terms else 0
    factor, rest = divmod(expr.terms[0][1], of.terms[0][1])
    return factor if rest == 0 and of * factor is expr else None


def is_static(expr: Expr) -> bool:
    return expr.as_int() is not None


def stride_of(expr: Expr, variable: Var | Size) -> Expr | None:
    """The coefficient of `variable` when the expression is affine in it, else None (it sits inside a division, a power, or
    the value of an indirect index)."""
    key = (expr, variable)
    if key not in _strides:
        _strides[key] = _stride(expr, variable)
    return _strides[key]


def _stride(expr: Expr, variable: Var | Size) -> Expr | None:
    total = ZERO
    for mono, coef in expr.terms:
        count = mono.count(variable)
        if count == 1:
            rest = list(mono)
            rest.remove(variable)
            total = total + _make({tuple(rest): coef})
        elif count > 1:
            return None
        for atom in mono:
            if atom is not variable and _varies(atom, variable):
                return None
    return total


def _varies(atom: Atom, variable: Var | Size) -> bool:
    """Whether an atom other than `variable` itself depends on it. The owner of an indirect value may tell, else it may."""
    if isinstance(atom, Indirect):
        depends = getattr(atom.value, "free_atoms", None)
        return depends is None or variable in depends()
    return isinstance(atom, FloorDiv | Mod | Apply) and any(
        a is variable or (isinstance(a, Indirect) and _varies(a, variable)) for a in free_atoms(atom.expr())
    )


def substitute(
    expr: Expr,
    mapping: Mapping[Atom, Expr],
    memo: dict[Expr, Expr] | None = None,
    map_value: Callable[[Any], Any] | None = None,
) -> Expr:
    """Replaces variables, sizes and indirect integers by expressions; `map_value` rewrites the values inside `Indirect` atoms.
    Pass one `memo` per mapping."""
    if map_value is None or not (indirects(expr) if expr._indirect is None else expr._indirect):
        return _substitute_known(expr, mapping)
    memo = {} if memo is None else memo
    hit = memo.get(expr)
    if hit is not None:
        return hit
    return _substitute(expr, mapping, memo, map_value)


def _substitute_known(expr: Expr, mapping: Mapping[Atom, Expr]) -> Expr:
    """The result depends on what the expression's own atoms become: equal layers ask for the same ones."""
    atoms = free_atoms(expr) if expr._atoms is None else expr._atoms
    if atoms.isdisjoint(mapping):
        return expr
    key = (expr, *map(mapping.get, atoms))
    hit = _substituted.get(key)
    if hit is None:
        hit = _substituted[key] = _substitute(expr, mapping, {}, None)
    return hit


def _substitute(
    expr: Expr, mapping: Mapping[Atom, Expr], memo: dict[Expr, Expr], map_value: Callable[[Any], Any] | None
) -> Expr:
    total = ZERO
    for mono, coef in expr.terms:
        term = constant(coef)
        for atom in mono:
            term = term * _substitute_atom(atom, mapping, memo, map_value)
        total = total + term
    memo[expr] = total
    return total


def _substitute_atom(
    atom: Atom, mapping: Mapping[Atom, Expr], memo: dict[Expr, Expr], map_value: Callable[[Any], Any] | None
) -> Expr:
    replaced = mapping.get(atom)
    if replaced is not None:
        return replaced
    if isinstance(atom, FloorDiv | Mod):
        num, den = substitute(atom.num, mapping, memo, map_value), substitute(atom.den, mapping, memo, map_value)
        return floordiv(num, den) if isinstance(atom, FloorDiv) else mod(num, den)
    if isinstance(atom, Apply):
        return apply(atom.fn, *(substitute(a, mapping, memo, map_value) for a in atom.args))
    if isinstance(atom, Indirect) and map_value is not None:
        return indirect(map_value(atom.value), atom.size, atom.inside).expr()
    return atom.expr()


def evaluate(expr: Expr, env: Callable[[Atom], Any]) -> Any:
    """Computes the expression with Python or array arithmetic; `env` gives the value of a `Var`, `Size` or `Indirect`."""
    total: Any = 0
    for mono, coef in expr.terms:
        term: Any = coef
        for atom in mono:
            term = term * _evaluate_atom(atom, env)
        total = total + term
    return total


def _evaluate_atom(atom: Atom, env: Callable[[Atom], Any]) -> Any:
    if isinstance(atom, FloorDiv):
        return evaluate(atom.num, env) // evaluate(atom.den, env)
    if isinstance(atom, Mod):
        return evaluate(atom.num, env) % evaluate(atom.den, env)
    if isinstance(atom, Apply):
        return FOLD[atom.fn](*(evaluate(a, env) for a in atom.args))
    return env(atom)


def linearize(indices: Iterable[Expr], strides: Iterable[ExprLike], offset: ExprLike = 0) -> Expr:
    """The storage offset in elements of a logical index under the given strides."""
    total = as_expr(offset)
    for index, stride in zip(indices, strides, strict=True):
        total = total + index * stride
    return total


def contiguous_strides(sizes: Iterable[ExprLike]) -> tuple[Expr, ...]:
    """Row-major strides; a size below one counts as one, as in torch."""
    strides: list[Expr] = []
    total = ONE
    for extent in reversed([as_expr(s) for s in sizes]):
        strides.append(total)
        total = total * (ONE if extent == 0 else extent)
    return tuple(reversed(strides))


def position_in(loops: Iterable[Var]) -> Expr:
    """The row-major position of a point of the loops."""
    loops = list(loops)
    return linearize([v.expr() for v in loops], contiguous_strides(v.extent for v in loops))


def delinearize(offset: Expr, sizes: Iterable[ExprLike]) -> tuple[Expr, ...]:
    """The logical index of a row-major linear `offset` that is known to lie inside an array of ``sizes``."""
    out: list[Expr] = []
    exprs = [as_expr(s) for s in sizes]
    for position in range(len(exprs) - 1, -1, -1):
        if position == 0:
            out.append(offset)
        else:
            extent = exprs[position]
            out.append(mod(offset, extent) if extent != 0 else ZERO)
            offset = floordiv(offset, extent) if extent != 0 else ZERO
    return tuple(reversed(out))


# ---- sizes as numbers -------------------------------------------------------------------------------------------------


# For a size of which nothing is known.
GUESS = 64


class Stored(Protocol):
    """What has elements of one type in memory, such as a buffer."""

    @property
    def sizes(self) -> tuple[Expr, ...]:
        """How many there are along each dimension."""

    @property
    def dtype(self) -> torch.dtype:
        """Their type."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Evaluates sizes at the hints of the graph's symbols."""

    hints: dict[Size, int]

    def of(self, expr: Expr) -> int:
        literal = expr.as_int()
        return literal if literal is not None else int(evaluate(expr, self._value))

    def _value(self, atom: Atom) -> int:
        if isinstance(atom, Size):
            return self.hints.get(atom, GUESS)
        return self.of(atom.extent) // 2 if isinstance(atom, Var) else 0

    def points(self, loops: Iterable[Var]) -> int:
        return self.of(product(v.extent for v in loops))

    def bytes(self, buffer: Stored) -> int:
        return self.of(product(buffer.sizes)) * buffer.dtype.itemsize


def with_derived(sizes: Mapping[Size, int], derived: Mapping[Size, Expr]) -> dict[Size, int]:
    """The sizes with those that are functions of them, each of which is defined by ones before it."""
    found = dict(sizes)
    for size, definition in derived.items():
        try:
            found[size] = Sizes(found).of(definition)
        except (ArithmeticError, ValueError):  # sizes that nobody gave need not make sense
            found[size] = GUESS
    return found
