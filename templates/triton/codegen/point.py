"""Values and independent statements as Triton text: one interpreter over the IR, which knows nothing of the loops around it.

A value has the axes along which it differs: it is emitted as a tile of that shape and broadcast where it meets a larger one.
What the axes are, their tiles and their masks, is the business of whoever derives from this: the generic kernels
(`emit.Emitter`), and the slots of templates (`tile.TileEmitter`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kgen import errors
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr
from kgen.ir.plan import Statement
from kgen.ir.values import Value
from kgen.templates.render import clean
from kgen.templates.triton.codegen.expression import IndexText
from kgen.templates.triton.codegen.table import (
    FAST_OPS,
    NARROW,
    STRUCTURAL,
    TRITON_OPS,
    TRITON_TYPES,
    WIDEN,
    division_by_number,
    division_by_power,
    literal,
    scatter_atomic,
)

Axes = frozenset[str]
NONE: Axes = frozenset()
# Sums of indices that are smaller are computed in 32 bits.
NARROW_INDEX = 2**30
# The largest number of 32 bits.
INT32 = 2**31 - 1
# What is the same of indices of 32 bits as of 64.
_TAKE_NARROW = frozenset(("lt", "le", "gt", "ge", "eq", "ne", "cast"))
# What a kernel says of a failure of `ops.FAILURES`.
_FAILURES = {"index": "index out of range", "division": "an integer divided by zero"}


@dataclass(slots=True)
class Scope:
    """Statements of one block and the values they have named."""

    lines: list[str] = field(default_factory=list)
    names: dict[Any, str] = field(default_factory=dict)


class PointEmitter:
    """Emits values and statements of independent points. `exact` are values that the hardware's approximations are not good
    enough for; `wide`: offsets need 64 bits."""

    order = ""  # the letters of the axes, as masks list them
    wide = False
    suffix = ""  # of loop variables and masks

    def __init__(self, graph: ir.Graph, exact: set[Value]) -> None:
        self.graph, self.exact = graph, exact
        self.axis_of: dict[Atom, str] = {}
        self.outer = Scope()
        self.inner = self.fixed = self.scope = self.outer
        self.locals: dict[str, tuple[str, Axes]] = {}
        self.inner_locals: set[str] = set()
        self.pointers: dict[str, None] = {}
        self.sizes: dict[str, None] = {}
        self.variables: set[Atom] = set()  # loop variables that some text names
        self.made_names: set[str] = set()
        self.checks = False
        self.counter = 0
        self.guard: tuple[str, Axes] | None = None  # mask of the access that is being printed
        self.level: Axes = NONE
        self._axes: dict[Value, Axes] = {}
        self.text = IndexText(self._variable, self._indirect)
        self._wide_text = IndexText(lambda v: _widened(self._variable(v)), lambda atom: _widened(self._indirect(atom)))

    # ---- what the axes are ------------------------------------------------------------------------------------------

    def masked(self) -> Axes:
        """Axes whose last tile reaches past the end."""
        raise NotImplementedError

    def _shape(self, axes: Axes) -> str:
        """The shape of a tile that differs along `axes`, as Triton text."""
        raise NotImplementedError

    def _shared_random(self, value: Value) -> str | None:
        """A cheaper form of a random number, with gaps for its arguments, where neighbours are made together."""
        return None

    # ---- statements ----------------------------------------------------------------------------------------------------------

    def _pointwise(self, s: Statement) -> None:
        name = self.emit(s.value)
        guard = None if s.mask is None else (self.emit(s.mask), self.axes(s.mask))
        for out, stored in zip(s.outs, s.stored, strict=True):
            self._define(out, name, self.axes(s.value), s.inner)
            if stored:
                made = self.emit(self._before_rounding(s.value, out))
                saved, self.guard = self.guard, guard or self.guard
                self._store(out, s.store[0], made, self.axes(s.value))
                self.guard = saved

    def _before_rounding(self, value: Value, out: str) -> Value:
        """What is given to a store, which rounds to the buffer's type itself."""
        rounds = value.op == "round_to" and value.attr == self.graph.buffers[out].dtype
        return value.args[0] if rounds else value

    def _define(self, out: str, name: str, axes: Axes, inner: bool) -> None:
        self.locals[out] = (name, axes)
        if inner:
            self.inner_locals.add(out)

    def _store(self, out: str, offset: Expr, name: str, axes: Axes | None = None) -> None:
        """Stores a value that differs along `axes`, by default along all of the level."""
        at = self._place(out, offset, self.level)
        value = self._narrowed(name, self.graph.buffers[out].dtype)
        self._line(f"tl.store({at}, {value}{self._mask_argument(self.level)}{self._store_caching(out)})")

    def _narrowed(self, name: str, dtype: torch.dtype) -> str:
        """A value as what is in memory."""
        return name if ops.compute_dtype(dtype) == dtype else NARROW.format(name, type=TRITON_TYPES[dtype].storage)

    def _scatter(self, s: Statement) -> None:
        name = self.emit(s.value)
        guard = None if s.mask is None else (self.emit(s.mask), self.axes(s.mask))
        saved, self.guard = self.guard, guard
        at = self._place(s.outs[0], s.store[0], self.level)
        mask = self._mask_argument(self.level)
        self.guard = saved
        dtype = self.graph.buffers[s.outs[0]].dtype
        if s.op == "set":
            self._line(f"tl.store({at}, {self._narrowed(name, dtype)}{mask})")
            return
        row = scatter_atomic(s.op, dtype)
        if row is None:
            raise errors.MissingOp(backend="triton", op=f"scatter {s.op} of {dtype}")
        value = f"{name}.to({TRITON_TYPES[dtype].storage})"
        if self.axes(s.value) != self.level:
            value = f"{value} + tl.zeros({self._shape(self.level)}, {TRITON_TYPES[dtype].storage})"
        self._line(row.format(at, value, mask.removeprefix(", ") or "None"))

    def _tile(self, value: Value) -> str:
        """The value as a tile of the whole level."""
        name = self.emit(value)
        return name if self.axes(value) == self.level else f"tl.broadcast_to({name}, {self._shape(self.level)})"

    # ---- values --------------------------------------------------------------------------------------------------------------

    def emit(self, root: Value) -> str:
        """The name of a value in the current scope, with everything it needs emitted before."""
        found = self._find(root)
        if found is None:  # or every operation would walk again all that its arguments are made of
            for value in vs.topological([root]):
                if self._find(value) is None and (value is root or _index_of(value) is None):  # indices: where one is wanted
                    self._emit_one(value)
            found = self._find(root)
        assert found is not None
        return found

    def _find(self, value: Value) -> str | None:
        made = self._made(value)
        if made is not None:
            return made[0]
        for scope in (self.outer, self.fixed):
            if value in scope.names:
                return scope.names[value]
        return self.inner.names.get(value) if self.scope is self.inner else None

    def _made(self, value: Value) -> tuple[str, Axes] | None:
        """The name and the axes of what another statement, or a step of the template's, has made."""
        if value.op == "step":
            return self.locals[value.attr]
        return self.locals.get(value.attr[0]) if value.op == "load" else None

    def _scope_of(self, axes: Axes) -> Scope:
        if "x" not in axes and self.fixed is not self.outer:
            return self.fixed
        return self.scope if "r" in axes else self.outer

    def _emit_one(self, value: Value) -> None:
        scope = self._scope_of(self.axes(value))
        if value.op == "const":
            scope.names[value] = literal(value.attr, value.dtype)
            return
        saved, self.scope = self.scope, scope
        text = self._value_text(value)
        self.scope = saved
        name = self._fresh(clean(value.attr[0]) if value.op == "load" else "t")
        scope.lines.append(f"{name} = {text}")
        scope.names[value] = name

    def _value_text(self, value: Value) -> str:
        if value.op == "load":
            return self._load(value)
        place = _index_of(value)
        if place is not None:
            return f"({self._number(place)}).to(tl.int64)"
        narrow = _narrow_operands(value) if value.op in _TAKE_NARROW else None
        args = [self.emit(a) for a in value.args] if narrow is None else [f"({self._number(e)})" for e in narrow]
        if value.op == "assert":
            return self._assert(value, *args)
        if value.op in ops.RANDOM and not self.axes(value.args[0]):
            shared = self._shared_random(value)
            if shared is not None:
                return shared.format(*args)
        if value.op in STRUCTURAL:
            return self._structural(value, *args)
        return self._division(value, args[0]) or self._operation(value, args)

    def _number(self, expr: Expr) -> str:
        """The text of an index that becomes a number: it may need 64 bits in a kernel whose offsets take 32, as the position of
        an element in rows that are only summed."""
        return self.text(expr) if self.wide or ix.within(expr, INT32) else self._wide_text(expr)

    def _operation(self, value: Value, args: Sequence[str]) -> str:
        fast = value.op in FAST_OPS and value.dtype is torch.float32 and value not in self.exact
        row = FAST_OPS[value.op] if fast else TRITON_OPS.get(value.op)
        if row is None:
            raise errors.MissingOp(backend="triton", op=value.op)
        return row.format(*args)

    def _division(self, value: Value, dividend: str) -> str | None:
        """The text of a division that is a multiplication, or begins with one."""
        if value.op != "truediv" or value.dtype not in (torch.float32, torch.float64):
            return None
        divisor, exact = value.args[1], value in self.exact
        if value.dtype is torch.float64:
            return division_by_power(dividend, float(divisor.attr)) if divisor.op == "const" else None
        if divisor.op == "const":
            return division_by_number(dividend, float(divisor.attr), exact)
        return None if exact or self.axes(divisor) >= self.axes(value) else f"{dividend} * {self._reciprocal(divisor)}"

    def _structural(self, value: Value, *args: str) -> str:
        if value.op == "round_to" and vs.is_stored(value, self.graph.is_given):
            return args[0]
        kind = TRITON_TYPES[value.attr] if value.op in ("cast", "round_to", "bitcast") else None
        target = "" if kind is None else kind.storage if value.op == "round_to" else kind.compute
        return STRUCTURAL[value.op].format(*args, type=target)

    def _reciprocal(self, value: Value) -> str:
        """One over a divisor that many points share, made where the divisor is."""
        key = ("reciprocal", value)
        scope = self._scope_of(self.axes(value))
        for one in (self.outer, scope):
            if key in one.names:
                return one.names[key]
        name = scope.names[key] = self._fresh("reciprocal")
        scope.lines.append(f"{name} = 1.0 / {self.emit(value)}")
        return name

    def _load(self, value: Value) -> str:
        name, (offset,), dtype = value.attr
        axes = self._expr_axes(offset)
        saved = self.guard
        self.guard = (self.emit(value.args[0]), self.axes(value.args[0])) if value.args else None
        level = axes | (self.guard[1] if self.guard else NONE)
        wide = ops.compute_dtype(dtype)
        if any(extent == 0 for extent in self.graph.buffers[name].sizes):  # what has no elements may have no address
            self.guard = saved
            return f"tl.full({self._shape(level)}, 0, {TRITON_TYPES[wide].compute})"
        mask = self._mask_argument(level)
        zero = "0.0" if dtype.is_floating_point and dtype.itemsize == 1 else "0"  # Triton makes no 8-bit float of an integer
        other = f", other={zero}" if self.guard else ""
        text = f"tl.load({self._place(name, offset, level)}{mask}{other}{self._load_caching(value)})"
        self.guard = saved
        return text if wide == dtype else WIDEN.format(text, type=TRITON_TYPES[wide].compute)

    def _load_caching(self, value: Value) -> str:
        """What the L2 cache is told of a load, as a further argument."""
        return ""

    def _store_caching(self, out: str) -> str:
        """What it is told of what is stored."""
        return ""

    # ---- addresses and masks -------------------------------------------------------------------------------------------------

    def _place(self, buffer: str, offset: Expr, level: Axes) -> str:
        """The pointers of a tile: an offset that lacks an axis of the level is broadcast along it."""
        at = self._offset_text(offset)
        if level - self._expr_axes(offset):
            at = f"{at} + tl.zeros({self._shape(level)}, tl.int32)"
        return f"{self._pointer(buffer)} + ({self._coalesced(at, buffer, offset)})"

    def _coalesced(self, at: str, buffer: str, offset: Expr) -> str:
        """The text of a tile's offsets, with what helps neighbouring threads to read neighbouring elements."""
        return at

    def _offset_text(self, offset: Expr) -> str:
        return self.text(offset)

    def _mask_argument(self, level: Axes) -> str:
        parts = [self.inside(axis) for axis in self.order if axis in level and axis in self.masked()]
        if self.guard is not None:
            parts.append(self.guard[0])
        return f", {' & '.join(parts)}" if parts else ""

    def inside(self, axis: str) -> str:
        """The mask of the points before the end of an axis."""
        return f"in_{axis}{self.suffix}"

    def _variable(self, atom: Atom) -> str:
        if isinstance(atom, ix.Size):
            self.sizes[atom.name] = None
            return clean(atom.name)
        self.variables.add(atom)
        assert isinstance(atom, ix.Var)
        return atom.name + self.suffix

    def _indirect(self, atom: ix.Indirect) -> str:
        """An index from data: out of range is an error of the caller's, as in eager a trap of the device. One that is inside by
        its own arithmetic is not checked."""
        value, extent = atom.value, atom.size
        name = self.emit(value)
        key = ("checked", atom, self.guard)
        axes = self.axes(value) | (self.guard[1] if self.guard else NONE)
        scope = self._scope_of(axes)
        found = scope.names.get(key) or self.outer.names.get(key)
        if found is None:
            found = self._fresh("at")
            lines = scope.lines
            inside = f"({name} >= 0) & ({name} < {self.text(extent)})"
            outside = [*self._outside(axes), *([f"~{self.guard[0]}"] if self.guard else [])]
            if not atom.inside:
                lines.append(self._checked(" | ".join([f"({inside})", *outside]), "index"))
            lines.append(f"{found} = {name}" + ("" if self.wide else ".to(tl.int32)"))
            scope.names[key] = found
        return found

    def _assert(self, value: Value, name: str, holds: str) -> str:
        body, condition = (self.axes(a) for a in value.args)
        self._line(self._checked(" | ".join([holds, *self._outside(condition)]), value.attr))
        return name if condition <= body else f"tl.broadcast_to({name}, {self._shape(self.axes(value))})"

    def _outside(self, axes: Axes) -> list[str]:
        """Masks of the points past the ends of axes."""
        return [f"~{self.inside(axis)}" for axis in self.order if axis in axes and axis in self.masked()]

    def _checked(self, condition: str, failure: str) -> str:
        """A statement that ends the kernel where a condition does not hold."""
        self.checks = True
        return f'tl.device_assert({condition}, "{_FAILURES[failure]}")'

    # ---- axes ----------------------------------------------------------------------------------------------------------------

    def axes(self, value: Value) -> Axes:
        """The axes along which a value differs."""
        for v in () if value in self._axes else vs.topological([value]):
            if v not in self._axes:
                made = self._made(v)
                if made is not None:
                    self._axes[v] = made[1]
                    continue
                found = NONE.union(*(self._axes[c] for c in vs.children(v))) if v.args or vs.index_exprs(v) else NONE
                for e in vs.index_exprs(v):
                    found |= {self.axis_of[a] for a in ix.free_atoms(e) if a in self.axis_of}
                self._axes[v] = found
        return self._axes[value]

    def _expr_axes(self, expr: Expr) -> Axes:
        found: set[str] = set()
        for atom in ix.free_atoms(expr):
            if atom in self.axis_of:
                found.add(self.axis_of[atom])
            elif isinstance(atom, ix.Indirect):
                found |= self.axes(atom.value)
        return frozenset(found)

    # ---- names ---------------------------------------------------------------------------------------------------------------

    def _line(self, text: str) -> None:
        self.scope.lines.append(text)

    def _bind(self, stem: str, text: str) -> str:
        name = self._fresh(stem)
        self._line(f"{name} = {text}")
        return name

    def _pointer(self, buffer: str) -> str:
        self.pointers[buffer] = None
        name = f"p_{clean(buffer)}"
        self.made_names.add(name)
        return name

    def _fresh(self, stem: str) -> str:
        self.counter += 1
        name = f"{stem}{self.counter}" if stem == "t" else f"{stem}_{self.counter}"
        self.made_names.add(name)
        return name


def _widened(text: str) -> str:
    return f"tl.cast({text}, tl.int64)"


def _index_of(value: Value) -> Expr | None:
    """A number that is an index, or a sum or difference of indices, as an expression that needs 32 bits: before it is widened
    it takes half of the registers, and tiles of scores have many."""
    found = _sum_of_indices(value)
    if found is None or value.op == "index":
        return found
    return found if all(abs(bound) < NARROW_INDEX for bound in found.bounds()) else None


def _narrow_operands(value: Value) -> list[Expr] | None:
    """The operands as expressions, where these are indices, or one and a number, for which 32 bits are enough."""
    found = [ix.constant(a.attr) if a.op == "const" and a.dtype is torch.int64 else _index_of(a) for a in value.args]
    narrow = [e for e in found if e is not None and all(abs(bound) < NARROW_INDEX for bound in e.bounds())]
    return narrow if len(narrow) == len(found) and any(e.as_int() is None for e in narrow) else None


def _sum_of_indices(value: Value) -> Expr | None:
    if value.op == "index":
        return value.attr if value.dtype is torch.int64 else None
    if value.op not in ("add", "sub") or value.dtype is not torch.int64:
        return None
    left, right = map(_sum_of_indices, value.args)
    if left is None or right is None:
        return None
    return left + right if value.op == "add" else left - right
