"""Scalar values: a hash-consed DAG that says how one element of a tensor is computed.

A lowering calls the functions here as if it computed numbers; what it gets is an interned `Value`, so shared subexpressions
exist once however often they are used, and equality is identity.  No Python closure is kept: substituting indices into a
value (what a view does) is a memoised walk without recursion, so a chain of a thousand operations costs a thousand steps.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir.index import Atom, Expr, Var

Index = tuple[Expr, ...]


class Value:
    """One scalar operation applied to other values. Make with the functions of this module, never directly."""

    __slots__ = (
        "__weakref__",
        "_atoms",
        "_below",
        "_key",
        "_loads",
        "_order",
        "_variables",
        "_walk",
        "args",
        "attr",
        "dtype",
        "op",
    )
    op: str
    args: tuple[Value, ...]
    attr: Any
    dtype: torch.dtype
    _atoms: frozenset[Atom] | None
    _below: tuple[Value, ...] | None
    _key: tuple[Any, ...]
    _loads: tuple[Value, ...] | None
    _order: tuple[Any, ...] | None
    _variables: frozenset[Var] | None
    _walk: tuple[Value, ...] | None

    def __repr__(self) -> str:
        return f"%{_digest(self.order)}"

    @property
    def order(self) -> tuple[Any, ...]:
        """A place among values: by structure, then by the buffers that are read. It depends on neither the process nor what was
        compiled before, and structure comes first so that equal layers have equal kernels."""
        if self._order is None:
            self._order = _order_of(self)
        return self._order

    def __reduce__(self) -> Any:
        # flat, because pickle follows arguments by recursion and a chain of a thousand operations overflows its stack
        order = topological([self], through_indices=False)
        place = {value: k for k, value in enumerate(order)}
        return (_unpack, ([(v.op, tuple(place[a] for a in v.args), v.attr, v.dtype) for v in order],))

    def free_atoms(self) -> frozenset[Atom]:
        """All loop variables, sizes and indirect integers that the value depends on, those behind indirect indices included."""
        if self._atoms is None:
            found = {a for v in topological([self]) for e in index_exprs(v) for a in ix.free_atoms(e)}
            self._atoms = frozenset(found)
        return self._atoms

    def variables(self) -> frozenset[Var]:
        """The loop variables among them."""
        if self._variables is None:
            self._variables = frozenset([a for a in self.free_atoms() if isinstance(a, Var)])
        return self._variables


def _unpack(rows: list[tuple[str, tuple[int, ...], Any, torch.dtype]]) -> Value:
    made: list[Value] = []
    for op, args, attr, dtype in rows:
        made.append(_make(op, tuple(made[a] for a in args), attr, dtype))
    return made[-1]


_table: dict[tuple[Any, ...], Value] = {}


def clear_table() -> None:
    """Forget interned values. Only between compilations."""
    _table.clear()


def _make(op: str, args: tuple[Value, ...], attr: Any, dtype: torch.dtype) -> Value:
    # 0.0 == -0.0, 1 == True == 1.0 and nan != nan: key constants by their text so that each stays itself
    key = (op, args, repr(attr) if op == "const" else attr, dtype)
    found = _table.get(key)
    if found is None:
        made = Value()
        made.op, made.args, made.attr, made.dtype = op, args, attr, dtype
        made._key = key
        made._atoms = made._below = made._loads = made._order = made._variables = made._walk = None
        found = _table.setdefault(key, made)
    return found


def const(number: Any, dtype: torch.dtype) -> Value:
    """A literal, converted to `dtype` as torch converts a Python scalar."""
    dtype = ops.compute_dtype(dtype)
    if dtype is torch.bool:
        number = bool(number)
    elif dtype.is_floating_point:
        number = float(number)
        if dtype is torch.float32:  # or folding would see digits that the number does not have at run time
            number = _nearest_float32(number)
    else:
        info = torch.iinfo(dtype)
        span = info.max - info.min + 1
        number = (int(number) - info.min) % span + info.min
    return _make("const", (), number, dtype)


def _nearest_float32(number: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", number))[0])
    except OverflowError:  # rounds to an infinity
        return math.copysign(math.inf, number)


def index_value(expr: Expr, dtype: torch.dtype = torch.int64) -> Value:
    """An index expression as a number."""
    literal = expr.as_int()
    if literal is not None:
        return const(literal, dtype)
    atom = expr.atom()
    if isinstance(atom, ix.Indirect) and atom.value.dtype == dtype:
        return atom.value
    return cast(_make("index", (), expr, torch.int64), dtype)


def load(buffer: str, indices: Iterable[Expr], dtype: torch.dtype, mask: Value | None = None) -> Value:
    """Reads one element; `dtype` is the buffer's, the result has its compute dtype. See ops.STRUCTURAL for masks."""
    attr = (buffer, tuple(indices), dtype)
    masks = () if mask is None or (mask.op == "const" and mask.attr) else (mask,)
    return _make("load", masks, attr, ops.compute_dtype(dtype))


def call(op: str, *args: Value) -> Value:
    """Applies an operation of `ops.OPS`, folding what is free to fold."""
    row = ops.OPS[op]
    if len(args) != row.arity:
        raise TypeError(f"{op} takes {row.arity} values, got {len(args)}")
    folded = _fold(op, args)
    if folded is not None:
        return folded
    return _make(op, args, None, ops.result_dtype(op, tuple(a.dtype for a in args)))


def _fold(op: str, args: tuple[Value, ...]) -> Value | None:
    """Simplifications that hold for every input, NaN and signed zero included."""
    simplify = _SIMPLIFIERS.get(op)
    return _fold_literals(op, args) if simplify is None else simplify(*args)


def _fold_literals(op: str, args: tuple[Value, ...]) -> Value | None:
    if op not in _LITERAL_FOLDS or any(a.op != "const" for a in args):
        return None
    return const(_LITERAL_FOLDS[op](*(a.attr for a in args)), ops.result_dtype(op, tuple(a.dtype for a in args)))


def _is_literal(value: Value, number: int) -> bool:
    return value.op == "const" and bool(value.attr == number)


def _simplify_where(cond: Value, yes: Value, no: Value) -> Value | None:
    if cond.op == "const":
        return yes if cond.attr else no
    return yes if yes is no else None


def _simplify_and(a: Value, b: Value) -> Value | None:
    for literal, other in ((a, b), (b, a)):
        if literal.op == "const":
            return other if literal.attr else literal
    return a if a is b else None


def _simplify_or(a: Value, b: Value) -> Value | None:
    for literal, other in ((a, b), (b, a)):
        if literal.op == "const":
            return literal if literal.attr else other
    return a if a is b else None


def _simplify_mul(a: Value, b: Value) -> Value | None:
    if _is_literal(a, 1):
        return b
    return a if _is_literal(b, 1) else None


def _simplify_plus_zero(a: Value, b: Value) -> Value | None:
    # in floats -0.0 + 0.0 is 0.0
    return a if _is_literal(b, 0) and not a.dtype.is_floating_point else None


def _simplify_truediv(a: Value, b: Value) -> Value | None:
    return a if _is_literal(b, 1) else None


def _simplify_lt(a: Value, b: Value) -> Value | None:
    return _fold_literals("lt", (a, b)) or _below_by_range(a, b, 0)


def _simplify_le(a: Value, b: Value) -> Value | None:
    return _fold_literals("le", (a, b)) or _below_by_range(a, b, 1)


def _below_by_range(a: Value, b: Value, more: int) -> Value | None:
    """Whether ``a < b + more``, if these are indices whose ranges say so, as they may once the loops have become shorter. The
    range of an index from data is what a check makes sure of: it decides nothing, for this may be that check."""
    if a.op != "index" or (b.op != "index" and not (b.op == "const" and b.dtype is torch.int64)):
        return None
    bound = (ix.constant(b.attr) if b.op == "const" else b.attr) + more
    if ix.indirects(a.attr) or ix.indirects(bound):
        return None
    if ix.known_less(a.attr, bound):
        return const(True, torch.bool)
    return const(False, torch.bool) if ix.known_less(bound - 1, a.attr) else None


_SIMPLIFIERS: dict[str, Callable[..., Value | None]] = {
    "where": _simplify_where, "and": _simplify_and, "or": _simplify_or, "mul": _simplify_mul, "add": _simplify_plus_zero,
    "sub": _simplify_plus_zero, "truediv": _simplify_truediv, "lt": _simplify_lt, "le": _simplify_le,
}  # fmt: skip
_LITERAL_FOLDS: dict[str, Callable[..., Any]] = {
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "not": lambda a: not a, "neg": lambda a: -a,
}  # fmt: skip


def cast(value: Value, dtype: torch.dtype) -> Value:
    """Conversion between compute dtypes; to a 16-bit float it rounds to that format and stays float32."""
    if dtype in ops.NARROW_FLOATS:
        value = cast(value, torch.float32)
        if value.op == "round_to" and value.attr == dtype:
            return value
        if value.op == "load" and value.attr[2] == dtype:
            return value  # widened exactly from that very format
        if value.op == "cast" and _holds(dtype, value.args[0].dtype):
            return value
        return _make("round_to", (value,), dtype, torch.float32)
    if value.dtype == dtype:
        return value
    if value.op == "const":
        number = value.attr
        if dtype.is_floating_point or dtype is torch.bool or not isinstance(number, float) or abs(number) < 2**63:
            return const(number, dtype)
    return _make("cast", (value,), dtype, dtype)


def as_stored(value: Value, dtype: torch.dtype) -> Value:
    """`cast` to a 16-bit float for what compares numbers as memory has them. A load keeps its rounding: in one kernel with what
    is stored there, it is the number before it was rounded."""
    if value.op == "load" and value.attr[2] == dtype:
        return _make("round_to", (value,), dtype, torch.float32)
    return cast(value, dtype)


def is_stored(value: Value, is_given: Callable[[str], bool]) -> bool:
    """Whether a `round_to` has nothing to do: it is of a load from a buffer that `is_given`, which no kernel makes."""
    (source,) = value.args
    return source.op == "load" and source.attr[2] == value.attr and is_given(source.attr[0])


def _holds(dtype: torch.dtype, whole: torch.dtype) -> bool:
    """Whether a floating-point format has every number of an integer type."""
    if whole is torch.bool:
        return True
    return not whole.is_floating_point and torch.iinfo(whole).max + 1 <= 2 / torch.finfo(dtype).eps


def bitcast(value: Value, dtype: torch.dtype) -> Value:
    return value if value.dtype == dtype else _make("bitcast", (value,), dtype, dtype)


def step_result(step: str, dtype: torch.dtype) -> Value:
    """The element that a step of a program has made at this point, before its slot: a leaf of an `ir.Operation` only."""
    return _make("step", (), step, ops.compute_dtype(dtype))


def where(cond: Value, yes: Value, no: Value) -> Value:
    return call("where", cond, yes, no)


def random(kind: str, seed: Value, counter: Value) -> Value:
    """`kind` is rand, randn (float32) or randbits (int64); the counter is the logical linear index of the element."""
    return _make(kind, (seed, counter), None, torch.int64 if kind == "randbits" else torch.float32)


def compare(op: str, a: Expr, b: Expr) -> Value:
    """A comparison of index expressions, decided now when their ranges allow it. `op` is lt, le, ge or gt."""
    if op in ("ge", "gt"):
        return call("not", compare("lt" if op == "ge" else "le", a, b))
    bound = b if op == "lt" else b + 1
    if ix.known_less(a, bound):
        return const(True, torch.bool)
    if ix.known_less(bound - 1, a):
        return const(False, torch.bool)
    return call(op, index_value(a), index_value(b))


def indirect(value: Value, extent: Expr, wrap: bool = True, inside: bool = False) -> Expr:
    """An index computed from data. With `wrap`, negative values count from the end, as in torch's indexing. An `inside` one is
    known to be in ``[0, extent)``."""
    value = _as_index(cast(value, torch.int64))
    if value.op == "index":
        lo, _ = value.attr.bounds()
        if lo >= 0 and ix.known_less(value.attr, extent):
            return value.attr
    if value.op == "const" and extent.as_int() is not None and -extent.as_int() <= value.attr < extent.as_int():  # type: ignore[operator]
        return ix.constant(value.attr % extent.as_int() if wrap else value.attr)
    if wrap and not inside:
        value = where(call("lt", value, const(0, torch.int64)), call("add", value, index_value(extent)), value)
    return ix.indirect(value, extent, inside).expr()


def _as_index(value: Value) -> Value:
    """What an index is divided into by a positive number, as an index: pages, and places in these."""
    if value.op not in ("floordiv", "remainder") or value.dtype is not torch.int64:
        return value
    divided, by = _as_index(value.args[0]), value.args[1]
    if divided.op != "index" or by.op != "const" or by.attr <= 0:
        return value
    return index_value(ix.floordiv(divided.attr, by.attr) if value.op == "floordiv" else ix.mod(divided.attr, by.attr))


def asserted(value: Value, condition: Value, failure: str) -> Value:
    """`value`, where `condition` holds at every point that uses it; else the call fails. `failure` is a word of
    `ops.FAILURES`."""
    if condition.op == "const" and condition.attr:
        return value
    return _make("assert", (value, condition), failure, value.dtype)


def index_inside(value: Value, extent: Expr) -> Value:
    """Whether an index computed from data is in ``[0, extent)``."""
    above = call("ge", value, const(0, torch.int64))
    return call("and", above, call("lt", value, index_value(extent)))


def masked(cond: Value, body: Value, other: Value) -> Value:
    """``body`` where `cond` holds, else `other`; loads of `body` touch no memory where it does not hold."""
    if cond.op == "const":
        return body if cond.attr else other
    return where(cond, guard_loads(body, cond), other)


# ---- walking --------------------------------------------------------------------------------------------------------


# The longest walk that a value keeps, and the most loads: walks of every part of a long chain would be as many values as its
# length squared.
KEPT_WALK = 256


def children(value: Value) -> Iterator[Value]:
    """Arguments, and the values inside indirect indices."""
    yield from value.args
    for expr in index_exprs(value):
        for atom in ix.indirects(expr):
            yield atom.value


def index_exprs(value: Value) -> tuple[Expr, ...]:
    if value.op == "load":
        return value.attr[1]
    return (value.attr,) if value.op == "index" else ()


def topological(roots: Iterable[Value], through_indices: bool = True) -> list[Value]:
    """Every value reachable from `roots`, arguments first, each once, in a deterministic order. Without `through_indices`
    the values inside indirect indices are left out."""
    if not through_indices:
        return _walked(roots, _arguments)
    out: list[Value] = []
    done: set[Value] = set()
    for root in roots:
        if root not in done:
            walk = _walk(root)
            out += [value for value in walk if value not in done] if done else walk
            done.update(walk)
    return out


def _walk(root: Value) -> Sequence[Value]:
    """The values below one, itself last."""
    if root._walk is not None:
        return root._walk
    found = _walked([root], _below)
    if len(found) <= KEPT_WALK:
        root._walk = tuple(found)
    return found


def _walked(roots: Iterable[Value], below: Callable[[Value], tuple[Value, ...]]) -> list[Value]:
    done: set[Value] = set()
    out: list[Value] = []
    for root in roots:
        stack = [root]
        while stack:
            value = stack[-1]
            if value in done:
                stack.pop()
                continue
            waiting = [child for child in below(value) if child not in done]
            if waiting:  # the value is met again when all of them are done
                stack += waiting
                continue
            stack.pop()
            done.add(value)
            out.append(value)
    return out


def _below(value: Value) -> tuple[Value, ...]:
    """The children, the last one first: a walk takes them from the end. Not by age: a value that a graph before had as well is
    older than its neighbours, and kernels' texts would depend on what was compiled before."""
    if value._below is None:
        value._below = tuple(children(value))[::-1]
    return value._below


def _arguments(value: Value) -> tuple[Value, ...]:
    return value.args[::-1]


def _order_of(root: Value) -> tuple[Any, ...]:
    walk = topological([root])
    number = {value: k for k, value in enumerate(walk)}
    buffers: dict[str, int] = {}
    rows = [(v.op, [number[a] for a in v.args], _attribute(v, number, buffers), str(v.dtype)) for v in walk]
    ranges = sorted({_range(atom) for v in walk for e in index_exprs(v) for atom in ix.free_atoms(e)})
    return _digest((rows, ranges)), tuple((len(name), name) for name in buffers)


def _attribute(value: Value, number: Mapping[Value, int], buffers: dict[str, int]) -> str:
    """What an operation has besides arguments, with numbers in place of values and of buffers."""
    if value.op not in ("load", "index"):
        return repr(value.attr)
    texts = [str(e) for e in index_exprs(value)]
    for e in index_exprs(value):
        for atom in ix.indirects(e):
            texts = [text.replace(str(atom), f"[{number[atom.value]}]") for text in texts]
    whole = (buffers.setdefault(value.attr[0], len(buffers)), str(value.attr[2])) if value.op == "load" else ()
    return f"{texts} {whole}"


def _range(atom: Atom) -> str:
    """An atom with its range, which its text leaves out."""
    if isinstance(atom, Var):
        return f"{atom} < {atom.extent}"
    return f"{atom.lo} <= {atom} <= {atom.hi}" if isinstance(atom, ix.Size) else ""


def _digest(data: object) -> str:
    return hashlib.sha256(repr(data).encode()).hexdigest()[:16]


def by_place(roots: Iterable[Value]) -> Iterator[Value]:
    """Every value once, users before their arguments, the values inside indirect indices left out."""
    seen: set[Value] = set()
    pending = [*roots]
    while pending:
        value = pending.pop()
        if value not in seen:
            seen.add(value)
            yield value
            pending += value.args


def loads(roots: Iterable[Value]) -> list[Value]:
    found: dict[Value, None] = {}
    for root in roots:
        found.update(dict.fromkeys(_loads(root)))
    return list(found)


def _loads(root: Value) -> tuple[Value, ...]:
    """The loads below one value."""
    if root._loads is not None:
        return root._loads
    found = tuple([value for value in _walk(root) if value.op == "load"])
    if len(found) <= KEPT_WALK:
        root._loads = found
    return found


def over(value: Value, groups: Iterable[Iterable[Var]]) -> Hashable:
    """Equal for values that are the same array over these loops, in groups such as the axes of an operand. Loops that the value
    names are compared as they are, those along which it repeats by how long they are."""
    used = value.variables()
    return value, tuple(tuple(v if v in used else v.extent for v in group) for group in groups)


def total_cost(roots: Iterable[Value], beyond: Mapping[str, int] | None = None) -> int:
    """Elementary operations; `beyond` has what some cost besides, on one device. What is read twice is computed once."""
    beyond = beyond or {}
    return sum(ops.cost(v.op) + beyond.get(v.op, 0) for v in topological(roots))


def rewrite(
    roots: Iterable[Value], visit: Callable[[Value, tuple[Value, ...], Callable[[Value], Value]], Value]
) -> dict[Value, Value]:
    """Rebuilds the DAG bottom up. `visit(value, new_args, lookup)` gives the replacement; `lookup` maps values that stand
    inside indirect indices. Returns old -> new for everything reachable."""
    new: dict[Value, Value] = {}
    for value in topological(roots):
        new[value] = visit(value, tuple([new[a] for a in value.args]), new.__getitem__)
    return new


def rebuild(value: Value, args: tuple[Value, ...], attr: Any) -> Value:
    """The same operation with other arguments, folded again."""
    if value.op in ops.OPS:
        return call(value.op, *args)
    if value.op == "index":
        return index_value(attr, value.dtype)
    if value.op == "cast":
        return cast(args[0], attr)
    if value.op == "assert":
        return asserted(args[0], args[1], attr)
    return _make(value.op, args, attr, value.dtype)


def with_parts(value: Value, parts: Mapping[Value, Value]) -> Value:
    """The value with others in the place of parts of it; what an index is made of stays."""

    def visit(old: Value, args: tuple[Value, ...], _: Any) -> Value:
        return parts.get(old) or (old if args == old.args else rebuild(old, args, old.attr))

    return rewrite([value], visit)[value]


def memory_dtype(value: Value) -> torch.dtype:
    """The type of what is loaded, if a value is that, which is wider in a kernel; else its own."""
    found: torch.dtype = value.attr[2] if value.op == "load" else value.dtype
    return found


def without_bounds(value: Value) -> Value:
    """The value with each condition in the place of itself and of what it is said to be within."""
    if all(part.op != "within" for part in topological([value])):
        return value

    def visit(old: Value, args: tuple[Value, ...], _: object) -> Value:
        return args[0] if old.op == "within" else old if args == old.args else rebuild(old, args, old.attr)

    return rewrite([value], visit)[value]


def substitute(value: Value, mapping: Mapping[Atom, Expr], memo: dict[Value, Value] | None = None) -> Value:
    """Replaces loop variables by index expressions everywhere, in indirect indices too."""
    return substitute_all([value], mapping)[0]


def substitute_all(roots: list[Value], mapping: Mapping[Atom, Expr]) -> list[Value]:
    """`substitute` for several roots at once, sharing the walk."""
    if not mapping or all(a.expr() is e for a, e in mapping.items()):
        return list(roots)
    memo: dict[Expr, Expr] = {}
    new: dict[Value, Value] = {}  # without those that stay

    def lookup(value: Value) -> Value:
        return new.get(value, value)

    for value in topological(roots):
        if value.op == "load":
            buffer, indices, dtype = value.attr
            at = tuple([ix.substitute(e, mapping, memo, lookup) for e in indices])
            if at != indices or not new.keys().isdisjoint(value.args):
                new[value] = load(buffer, at, dtype, new.get(value.args[0], value.args[0]) if value.args else None)
        elif value.op == "index":
            moved = ix.substitute(value.attr, mapping, memo, lookup)
            if moved is not value.attr:
                new[value] = index_value(moved, value.dtype)
        elif not new.keys().isdisjoint(value.args):
            new[value] = rebuild(value, tuple(map(lookup, value.args)), value.attr)
    return [new.get(r, r) for r in roots]


def replace_loads(roots: list[Value], replace: Callable[[Value], Value | None]) -> list[Value]:
    """Replaces loads by other values (inlining a producer, reading a local instead of memory). None keeps a load."""
    return _replaced(roots, ("load",), replace)


def replace_steps(value: Value, replace: Callable[[Value], Value]) -> Value:
    """Replaces what steps of a program have made."""
    return _replaced([value], ("step",), replace)[0]


def _replaced(roots: list[Value], kinds: Container[str], replace: Callable[[Value], Value | None]) -> list[Value]:
    """Replaces operations of some `kinds`, whose arguments are replaced already. None keeps one."""
    memo: dict[Expr, Expr] = {}
    new: dict[Value, Value] = {}  # without those that stay

    def lookup(value: Value) -> Value:
        return new.get(value, value)

    for value in topological(roots):
        op, made = value.op, value
        if new and not new.keys().isdisjoint(_below(value)):
            args = tuple(map(lookup, value.args))
            if op == "load":
                buffer, indices, dtype = value.attr
                moved = tuple([ix.substitute(e, {}, memo, lookup) for e in indices])
                made = load(buffer, moved, dtype, args[0] if args else None)
            else:
                attr = ix.substitute(value.attr, {}, memo, lookup) if op == "index" else value.attr
                made = index_value(attr, value.dtype) if op == "index" else rebuild(value, args, attr)
        made = (replace(made) if made.op in kinds else None) or made
        if made is not value:
            new[value] = made
    return [new.get(r, r) for r in roots]


def guard_loads(value: Value, mask: Value, free: Container[Value] = ()) -> Value:
    """Adds `mask` to every load of the value (see ops.STRUCTURAL) but those that are `free`. Nor does an assertion say
    anything where the mask is false, nor is an index from data checked there."""

    def add(loaded: Value) -> Value:
        if loaded.op == "index":
            return _guarded_index(loaded, mask)
        if loaded.op == "assert":
            return asserted(loaded.args[0], call("or", call("not", mask), loaded.args[1]), loaded.attr)
        old = loaded.args[0] if loaded.args else None
        both = mask if old is None else call("and", old, mask)
        return _make("load", (both,), loaded.attr, loaded.dtype)

    # loads inside the mask itself must stay as they are: they are not reachable from `value` unless shared, and a shared
    # load guarded by a mask that depends on it would be a cycle
    inside = set(topological([mask]))
    return _replaced([value], ("load", "assert", "index"), lambda v: None if v in inside or v in free else add(v))[0]


def _guarded_index(value: Value, mask: Value) -> Value:
    """An integer computed from indices. Those from data are 0 where the mask is false: no load with a mask checks them."""
    found: Mapping[Atom, Expr] = {
        atom: ix.indirect(where(mask, atom.value, const(0, atom.value.dtype)), atom.size, atom.inside).expr()
        for atom in ix.indirects(value.attr)
    }
    return index_value(ix.substitute(value.attr, found), value.dtype) if found else value
