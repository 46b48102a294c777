"""A kernel's loop bodies as C++ statements: one interpreter over values, which knows nothing of the loops around it.

The vector type is a property of each emitted value: a value that differs between lanes is a `Vec`, any other a scalar, and
the header's functions take both. A value is emitted once, in the outermost scope in which its inputs exist.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kgen import errors
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.plan import Nest, Statement
from kgen.ir.values import Value
from kgen.templates.cpp.codegen.expression import IndexText
from kgen.templates.cpp.codegen.lane_steps import steps_of
from kgen.templates.cpp.codegen.table import CPP_OPS, CPP_SCANS, CPP_SCATTER, CPP_TYPES
from kgen.templates.render import clean

# Strides that strided.h serves by whole registers.
SHUFFLED = (2, 3, 4)
# Where the part of a tile's loop begins that a task has.
STRIP = "strip_begin"


@dataclass(slots=True)
class Scope:
    """Statements of one block and the values they have named."""

    lines: list[str] = field(default_factory=list)
    names: dict[Value, str] = field(default_factory=dict)


@dataclass(slots=True)
class Section:
    """One inner loop: declarations before it, its body, and what follows it once per outer point."""

    before: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    sums: dict[str, str] = field(default_factory=dict)  # accumulators of sums that round, and what they begin with


@dataclass(frozen=True, slots=True)
class Turned:
    """A tile of lanes by points of the tile's loop, transposed before its points are computed: `first` is the text of its first
    element's pointer, `stride` that of the distance from lane to lane."""

    name: str
    type: str
    first: str
    stride: str


class Emitter:
    """Emits all statements of one nest; the template puts them into the kernel."""

    def __init__(self, nest: Nest, graph: ir.Graph) -> None:
        self.nest, self.graph = nest, graph
        self.kernel = nest.kernel
        self.inner_vars = frozenset(nest.kernel.inner)
        self.task = Scope()  # outside the vector loop, where that is an outer one
        self.outer = Scope()
        self.inner = Scope()
        self.scope = self.outer
        self.locals: dict[str, str] = {}  # buffer -> C++ name of its value at the current point
        self.inner_locals: set[str] = set()
        self.pointers: dict[str, None] = {}
        self.sizes: dict[str, None] = {}
        self.includes_check = False
        self.made_names: set[str] = set()
        self.counter = 0
        self.rows: dict[str, str] = {}
        self.guard: str | None = None  # name of the mask of the access that is being printed
        self.accumulators: dict[str, str] = {}  # C++ name -> reduction
        self.runnings: list[str] = []  # C++ names of scans along the lanes
        self.turned: dict[tuple[str, Expr], Turned] = {}
        self.walked: dict[tuple[str, Expr], tuple[str, str]] = {}  # the texts of the first row and of the distance between rows
        self._levels: dict[Value, bool] = {}
        self._varying: dict[Value, bool] = {}

    def scalar(self, expr: Expr) -> str:
        """The text of one place, outside of all loops; `lines` hold what it needs."""
        return self._index(expr).scalar(expr)

    @property
    def lines(self) -> list[str]:
        """Statements outside of all loops."""
        return [*self.task.lines, *self.outer.lines]

    # ---- driver -----------------------------------------------------------------------------------------------------

    def run(self) -> tuple[list[str], list[Section]]:
        """(statements before the first section, the sections). `task.lines` stand outside an outer vector loop."""
        by_section: dict[int, list[Statement]] = {}
        for s in self.kernel.statements:
            by_section.setdefault(s.section, []).append(s)
        for s in by_section.get(-1, ()):
            self._outer_statement(s)
        head, self.outer.lines = self.outer.lines, []
        return head, [self._section(by_section.get(number, [])) for number in range(self.kernel.sections)]

    def _section(self, statements: list[Statement]) -> Section:
        if self.nest.one_step:  # no loop, so what a section names is there for the next
            self.inner.lines = []
        else:
            self.inner, self.inner_locals = Scope(), set()
        out = Section()
        inner = [s for s in statements if s.inner]
        later: list[tuple[Statement, str]] = []
        for s in inner:
            later += self._inner_statement(s, out)
        out.body = self.inner.lines
        out.before = [*self.outer.lines, *out.before]
        self.outer.lines = []
        if not self.nest.one_step:
            for name in self.inner_locals:
                self.locals.pop(name, None)
        self.scope = self.outer
        for s, accumulator in later:
            self._finish(s, accumulator)
        for s in statements:
            if not s.inner:
                self._outer_statement(s)
        out.after, self.outer.lines = self.outer.lines, []
        return out

    def _outer_statement(self, s: Statement) -> None:
        self.scope = self.outer
        if s.kind == "scatter":
            self._scatter(s)
            return
        self._pointwise(s)

    def _inner_statement(self, s: Statement, section: Section) -> list[tuple[Statement, str]]:
        self.scope = self.inner
        if s.kind == "reduction":
            accumulator = self._fresh("acc")
            self.accumulators[accumulator] = s.op
            self._declare(s, accumulator, section.before)
            if s.op == "sum" and s.value.dtype.is_floating_point:
                section.sums[accumulator] = self._identity(s)
            self._step(s, accumulator)
            return [(s, accumulator)]
        if s.kind == "scan":
            self._scan(s, section.before)
        elif s.kind == "scatter":
            self._scatter(s)
        elif s.kind == "column":
            self._scatter_text(replace(s, op="add"), self._as_lanes(s.value), None)
        else:
            self._pointwise(s)
        return []

    # ---- statements -------------------------------------------------------------------------------------------------

    def _pointwise(self, s: Statement) -> None:
        name = self.emit(s.value)
        for out, stored in zip(s.outs, s.stored, strict=True):
            self.locals[out] = name
            if s.inner:
                self.inner_locals.add(out)
            if stored or self._is_row(out):
                self._store(out, s.store[0], name, s.value)

    def _declare(self, s: Statement, name: str, lines: list[str]) -> None:
        text = CPP_TYPES[ops.compute_dtype(s.value.dtype)].compute
        lanes = "L" if self.nest.vector is not None else "1"
        if s.op == "welford":
            lines.append(f"Welford<{text}, {lanes}> {name};")
        elif s.op in ("argmax", "argmin"):
            lines.append(f"ArgExtreme<{text}, {lanes}, {str(s.op == 'argmax').lower()}> {name};")
        else:
            lines.append(f"auto {name} = {self._identity(s)};")

    def _identity(self, s: Statement) -> str:
        number = self._literal(ops.identity(s.op, s.value.dtype), s.value.dtype)
        return f"splat<{'L' if self.nest.vector is not None else '1'}>({number})"

    def _step(self, s: Statement, name: str) -> None:
        value = self._as_lanes(s.value)
        active = self._active()
        if s.op == "welford":
            self.scope.lines.append(f"{name}.step({value}, {active});")
        elif s.op in ("argmax", "argmin"):
            assert s.rank is not None
            position = self._index(s.rank).vectorized(s.rank)
            self.scope.lines.append(f"{name}.step({value}, {position}, {active});")
        else:
            self.scope.lines.append(f"{name} = step_{s.op}({name}, {value}, {active});")

    def _finish(self, s: Statement, accumulator: str) -> None:
        """After the loop: fold the lanes (unless they are different results), name the results, store those needed."""
        fold = not self.nest.vertical and self.nest.vector is not None
        group = self.nest.group
        if s.op in ("welford", "argmax", "argmin"):
            folded = self._fresh("total")
            how = ".fold()" if fold else f".fold_groups<{group}>()" if group > 1 else ""
            self.outer.lines.append(f"const auto{'' if how else '&'} {folded} = {accumulator}{how};")
            names = [f"{folded}.mean", f"{folded}.m2"] if s.op == "welford" else self._extreme(s, folded)
        else:
            names = [self._fresh(s.op)]
            groups = f"fold_groups_{s.op}<{group}>({accumulator})" if group > 1 else accumulator
            text = f"fold_{s.op}({accumulator})" if fold else groups
            self.outer.lines.append(f"const auto {names[0]} = {text};")
        for out, name, stored in zip(s.outs, names, s.stored, strict=True):
            self.locals[out] = name
            if stored:
                self._store(out, s.store[0], name, None)

    def _extreme(self, s: Statement, name: str) -> list[str]:
        """Value and index of an ArgExtreme, which keeps bools as bytes."""
        value = f"{name}.value"
        return [f"cast_<bool>({value})" if s.value.dtype is torch.bool else value, f"{name}.index"]

    def _scan(self, s: Statement, before: list[str]) -> None:
        if self.nest.vector is not None and not self.nest.vertical:
            names = self._scan_along_lanes(s, before)
        else:
            names = self._scan_across_lanes(s, before)
        for out, name, stored in zip(s.outs, names, s.stored, strict=True):
            self.locals[out] = name
            self.inner_locals.add(out)
            if stored or self._is_row(out):
                self._store(out, s.store[0], name, None)

    def _scan_along_lanes(self, s: Statement, before: list[str]) -> list[str]:
        """Steps that give a vector of results each; names of the results."""
        running, kept = self._fresh("running"), self._fresh("scan")
        self.runnings.append(running)
        kind = CPP_TYPES[ops.compute_dtype(s.value.dtype)].compute
        value = self._as_lanes(s.value)
        if s.op in ("argmax", "argmin"):
            assert s.rank is not None
            before.append(f"RunningExtreme<{kind}, L, {str(s.op == 'argmax').lower()}> {running};")
            position = self._index(s.rank).vectorized(s.rank)
            self.scope.lines.append(f"const auto {kept} = {running}.step({value}, {position}, {self._active()});")
            return self._extreme(s, kept)
        start = -math.inf if s.op == "logaddexp" else ops.identity(s.op, s.value.dtype)
        before.append(f"Running<{CPP_SCANS[s.op]}, {kind}, L> {running}{{{self._literal(start, s.value.dtype)}}};")
        self.scope.lines.append(f"const auto {kept} = {running}.step({value}, {self._active()});")
        return [kept]

    def _scan_across_lanes(self, s: Statement, before: list[str]) -> list[str]:
        """Each lane, or a scalar, steps on its own; names of the results."""
        carry = self._fresh("carry")
        self._declare(s, carry, before) if s.op != "logaddexp" else before.append(
            f"auto {carry} = splat<{'L' if self.nest.vector is not None else '1'}>({self._literal(-math.inf, s.value.dtype)});"
        )
        value = self._as_lanes(s.value)
        if s.op in ("argmax", "argmin"):
            assert s.rank is not None
            self.scope.lines.append(f"{carry}.step_last({value}, {self._index(s.rank).vectorized(s.rank)}, {self._active()});")
            names = self._extreme(s, carry)
        elif s.op == "logaddexp":
            self.scope.lines.append(f"{carry} = logaddexp_({carry}, {value});")
            names = [carry]
        else:
            self.scope.lines.append(f"{carry} = step_{s.op}({carry}, {value}, {self._active()});")
            names = [carry]
        kept = [self._fresh("scan") for _ in names]
        self.scope.lines += [f"const auto {k} = {name};" for k, name in zip(kept, names, strict=True)]
        return kept

    def _scatter(self, s: Statement) -> None:
        value = self.emit(s.value)
        mask = None if s.mask is None else self.emit(s.mask)
        self.guard = mask
        self._scatter_text(s, value, mask)
        self.guard = None

    def _scatter_text(self, s: Statement, value: str, mask: str | None) -> None:
        pointer = self._pointer(s.outs[0])
        offset = s.store[0]
        printer = self._index(offset)
        differs = printer.depends(offset) or self.varies(s.value) or (s.mask is not None and self.varies(s.mask))
        # lanes that are all equal set an element once, but each of them combines with it
        by_lane = self._in_lanes() and (differs or s.op != "set")
        combine = "" if s.op == "set" else f"<{CPP_SCATTER[s.op]}>"
        given = f", {mask}" if mask is not None else ""
        suffix = "" if mask is None else "_masked"
        if printer.stride(offset) == 1 and (not combine or s.value.dtype is not torch.bool):
            name = "combine" if combine else "store"  # neighbouring elements: no two lanes meet
            self.scope.lines.append(
                f"{name}{suffix}{combine}({pointer} + {printer.scalar(offset)}, {value}{given}, {self._active()});"
            )
            return
        index = printer.vectorized(offset)
        if by_lane and not printer.depends(offset):
            index = f"splat<L>({index})"
        active = self._active() if by_lane else "one"
        name = "scatter_combine" if combine else "scatter"
        self.scope.lines.append(f"{name}{suffix}{combine}({pointer}, {index}, {value}{given}, {active});")

    def _store(self, out: str, offset: Expr, value: str, source: Value | None) -> None:
        pointer = self._pointer(out)
        printer = self._index(offset)
        lanes = self._in_lanes()
        if self._is_row(out):
            at = printer.scalar(offset)
            place = f"{pointer} + ({at})*L" if self.nest.vertical else f"{pointer} + {at}"
            self.scope.lines.append(f"store({place}, {value}, {self._active()});")
            return
        if not lanes or not printer.depends(offset):
            self.scope.lines.append(f"store({pointer} + {printer.scalar(offset)}, {value}, one);")
            return
        stride = printer.stride(offset)
        if stride is None:
            self.scope.lines.append(f"scatter({pointer}, {printer.vectorized(offset)}, {value}, {self._active()});")
        elif stride == 1:
            self._walked(out, offset)
            self.scope.lines.append(f"store({pointer} + {printer.scalar(offset)}, {value}, {self._active()});")
        elif stride.as_int() in SHUFFLED:
            self.scope.lines.append(f"store_every<{stride}>({pointer} + {printer.scalar(offset)}, {value}, {self._active()});")
        else:
            self.scope.lines.append(
                f"store_strided({pointer} + {printer.scalar(offset)}, {printer.scalar(stride)}, {value}, {self._active()});"
            )

    # ---- values -----------------------------------------------------------------------------------------------------

    def emit(self, root: Value) -> str:
        """The C++ name of a value in the current scope, with everything it needs emitted before."""
        for value in vs.topological([root]):
            if self._find(value) is None:
                self._emit_one(value)
        found = self._find(root)
        assert found is not None
        return found

    def _find(self, value: Value) -> str | None:
        if value.op == "load" and value.attr[0] in self.locals:
            return self.locals[value.attr[0]]
        return self._named(value, self.scope)

    def _named(self, key: Value, scope: Scope) -> str | None:
        """The name that something has in a scope or in one around it."""
        around = (self.task,) if scope is self.task else (self.task, self.outer)
        for one in around if scope is not self.inner else (*around, self.inner):
            if key in one.names:
                return one.names[key]
        return None

    def _scope_of(self, value: Value) -> Scope:
        """The outermost scope in which everything that the value needs exists."""
        if self.scope is self.inner and self._is_inner(value):
            return self.inner
        return self.task if self.nest.vertical and not self._in_vector_loop(value) else self.outer

    def _emit_one(self, value: Value) -> None:
        scope = self._scope_of(value)
        if value.op == "const":
            scope.names[value] = self._literal(value.attr, value.dtype)
            return
        saved, self.scope = self.scope, scope
        text = self._text(value)
        self.scope = saved
        name = self._fresh(self._stem(value))
        scope.lines.append(f"const auto {name} = {text};")
        scope.names[value] = name

    def _stem(self, value: Value) -> str:
        if value.op == "load":
            return "".join(c if c.isalnum() else "_" for c in value.attr[0])
        return "t"

    def _text(self, value: Value) -> str:
        if value.op == "load":
            return self._load(value)
        if value.op == "index":
            printer = self._index(value.attr)
            return printer.vectorized(value.attr) if self._in_lanes() else f"int64_t({printer.scalar(value.attr)})"
        if value.op == "truediv" and _has_exact_inverse(value.args[1]):
            return CPP_OPS["mul"].format(self.emit(value.args[0]), self._literal(1 / value.args[1].attr, value.dtype))
        if value.op == "truediv" and self._is_shared_divisor(value):
            return f"divide_by({self.emit(value.args[0])}, {self._divisor(value.args[1])})"
        args = [self.emit(a) for a in value.args]
        if value.op == "assert":
            return self._assert(value, *args)
        if value.op in ("cast", "bitcast"):
            return f"{value.op}_<{CPP_TYPES[value.attr].compute}>({args[0]})"
        if value.op == "round_to":
            kind = CPP_TYPES[value.attr].storage
            return args[0] if vs.is_stored(value, self.graph.is_given) else f"round_to_<{kind}>({args[0]})"
        if value.op in ops.RANDOM:
            return f"{value.op}_({args[0]}, {args[1]})"
        row = CPP_OPS.get(value.op)
        if row is None:
            raise errors.MissingOp(backend="cpp", op=value.op)
        return row.format(*args)

    def _assert(self, value: Value, name: str, holds: str) -> str:
        body, condition = value.args
        self.includes_check = True
        active = "w" if self._in_lanes() and self.varies(condition) else "one"
        self.scope.lines.append(f"assert_({holds}, {active}, {ops.FAILURES[value.attr]}, failed);")
        return name if not self._in_lanes() or self.varies(body) or not self.varies(condition) else f"splat<L>({name})"

    def _is_shared_divisor(self, value: Value) -> bool:
        """Whether lanes that differ are divided by one number."""
        x, by = value.args
        return value.dtype.is_floating_point and self._in_lanes() and self.varies(x) and not self.varies(by)

    def _divisor(self, value: Value) -> str:
        """The name of a divisor with its reciprocal, made where the divisor is."""
        number = self.emit(value)
        key: Any = ("divisor", value)
        scope = self._scope_of(value)
        found = self._named(key, scope)
        if found is None:
            found = scope.names[key] = self._fresh("divisor")
            scope.lines.append(f"const auto {found} = divisor({number});")
        return found

    def _load(self, value: Value) -> str:
        mask = self.emit(value.args[0]) if value.args else None
        saved, self.guard = self.guard, mask
        text = self._load_text(value, mask)
        self.guard = saved
        return text

    def _load_text(self, value: Value, mask: str | None) -> str:
        name, (offset,), _ = value.attr
        pointer = self._pointer(name)
        printer = self._index(offset)
        lanes, active = ("L", self._active()) if self._in_lanes() else ("1", "one")
        at = printer.scalar(offset)
        if self._is_row(name):
            place = f"{pointer} + ({at})*L" if self.nest.vertical else f"{pointer} + {at}"
            return f"load<{lanes}>({place}, {active})"
        if not self._in_lanes() or not printer.depends(offset):
            if mask is None:
                return f"load<1>({pointer} + {at}, one)"
            if not self._in_lanes() or not self.varies(value.args[0]):
                return f"load_masked<1>({pointer} + {at}, {mask}, one)"
            return f"load_strided_masked<L>({pointer} + {at}, 0, {mask}, {active})"
        stride = printer.stride(offset)
        given = f", {mask}" if mask is not None else ""
        suffix = "_masked" if mask is not None else ""
        if stride is None:
            return self._gather(pointer, offset, given, suffix)
        if stride == 1:
            self._walked(name, offset)
            return f"load{suffix}<L>({pointer} + {at}{given}, {active})"
        if stride.as_int() in SHUFFLED:
            return f"load_every{suffix}<{stride}, L>({pointer} + {at}{given}, {active})"
        if mask is None and self.nest.tile is not None and ix.stride_of(offset, self.nest.tile) == 1:
            return f"load<L>({self._turned(name, offset)} + ({self.nest.tile.name} - {STRIP}) * L, {active})"
        return f"load_strided{suffix}<L>({pointer} + {at}, {printer.scalar(stride)}{given}, {active})"

    def _gather(self, pointer: str, offset: Expr, given: str, suffix: str) -> str:
        """A load at indices without a stride. Where lanes mostly read neighbours, or one element, the first and the
        last lane say whether they do."""
        vector, printer = self.nest.vector, self._index(offset)
        index = printer.vectorized(offset)
        by_data = any(self.varies(atom.value) for atom in ix.indirects(offset))  # no end of the lanes is known then
        steps = None if vector is None or by_data else steps_of(offset, vector, self.nest.lanes)
        kind = "" if steps is None else steps.kind(self.nest.lanes)
        if vector is None or not kind or (given and kind == "number"):
            return f"gather{suffix}<L>({pointer}, {index}{given}, {self._active()})"
        last = ix.var(f"({vector.name} + w.n - 1)", vector.extent).expr()
        ends = f"{printer.scalar(offset)}, {printer.scalar(ix.substitute(offset, {vector: last}))}"
        return f"gather_{kind}{suffix}<L>({pointer}, {ends}, [&]() KGEN_INLINE {{ return {index}; }}{given}, {self._active()})"

    def _turned(self, buffer: str, offset: Expr) -> str:
        """The transposed tile of a load that is contiguous along the tile's loop."""
        if (buffer, offset) not in self.turned:
            stride = self._index(offset).stride(offset)
            assert stride is not None
            name, kind = self._fresh("turned"), CPP_TYPES[self.graph.buffers[buffer].dtype].storage
            self.turned[buffer, offset] = Turned(
                name, kind, self._first_of_strip(buffer, offset), self._index(offset).scalar(stride)
            )
        return self.turned[buffer, offset].name

    def _walked(self, buffer: str, offset: Expr) -> None:
        """Notes rows of a tile that are contiguous along the lanes: more than a hardware prefetcher follows."""
        stride = None if self.nest.tile is None else ix.stride_of(offset, self.nest.tile)
        if stride is not None and stride.terms:
            self.walked[buffer, offset] = (self._first_of_strip(buffer, offset), self._index(offset).scalar(stride))

    def _first_of_strip(self, buffer: str, offset: Expr) -> str:
        assert self.nest.tile is not None
        begin = ix.var(STRIP, self.nest.tile.extent).expr()
        return f"{self._pointer(buffer)} + {self._index(offset).scalar(ix.substitute(offset, {self.nest.tile: begin}))}"

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _as_lanes(self, value: Value) -> str:
        """The value as a vector even when all lanes are equal (an accumulator steps by lanes)."""
        name = self.emit(value)
        if not self._in_lanes() or self.varies(value):
            return name
        return f"splat<L>({name})"

    def _in_lanes(self) -> bool:
        """Whether the current scope runs over the vector loop."""
        if self.nest.vector is None or self.scope is self.task:
            return False
        return self.nest.vertical or self.scope is self.inner

    def _active(self) -> str:
        return "w" if self._in_lanes() else "one"

    def _is_inner(self, value: Value) -> bool:
        """Whether the value depends on an inner loop (or on something that only exists inside it)."""
        hit = self._levels.get(value)
        if hit is None:
            hit = any(self._is_inner(c) for c in vs.children(value)) or any(
                a in self.inner_vars for e in vs.index_exprs(value) for a in ix.free_atoms(e)
            )
            if value.op == "load" and value.attr[0] in self._made_inner():
                return True
            self._levels[value] = hit
        return hit

    def _in_vector_loop(self, value: Value) -> bool:
        """Whether a value of a vertical nest needs to be inside the vector loop: it differs between lanes, or is made there."""
        return self.varies(value) or self._is_inner(value)

    def _is_row(self, buffer: str) -> bool:
        return buffer in self.kernel.rows and not self.nest.one_step

    def _made_inner(self) -> set[str]:
        return {o for s in self.kernel.statements if s.inner and s.kind != "reduction" for o in s.outs}

    def varies(self, value: Value) -> bool:
        """Whether the value differs between lanes."""
        hit = self._varying.get(value)
        if hit is None:
            made = {o for s in self.kernel.statements for o in s.outs}
            if value.op == "load" and value.attr[0] in made:
                hit = self.nest.vertical or value.attr[0] in self._made_inner()
            else:
                hit = any(self.nest.vector is a for e in vs.index_exprs(value) for a in ix.free_atoms(e))
                hit = hit or any(self.varies(c) for c in vs.children(value))
            self._varying[value] = hit
        return hit

    def _index(self, expr: Expr) -> IndexText:
        for atom in sorted(ix.free_atoms(expr), key=_by_order):
            if isinstance(atom, ix.Size):
                self.sizes[atom.name] = None
            for inner in self._extents(atom):
                for a in sorted(ix.free_atoms(inner), key=_by_order):
                    if isinstance(a, ix.Size):
                        self.sizes[a.name] = None
        vector = self.nest.vector if self._in_lanes() else None
        return IndexText(vector, self.nest.lanes, self._indirect)

    def _extents(self, atom: Atom) -> tuple[Expr, ...]:
        return (atom.size,) if isinstance(atom, ix.Indirect) else ()

    def _indirect(self, atom: ix.Indirect) -> tuple[str, bool]:
        text = self.emit(atom.value) if atom.inside else self._checked(atom.value, atom.size)
        return text, self._in_lanes() and self.varies(atom.value)

    def _checked(self, value: Value, extent: Expr) -> str:
        """An index from data, checked against its extent: out of range is an error of the caller's, and must not be read."""
        self.includes_check = True
        name = self.emit(value)
        key: Any = ("checked", value, extent, self.guard)
        scope = self._scope_of(value) if self.guard is None else self.scope  # the mask may exist only here
        found = self._named(key, scope)
        if found is None:
            found = self._fresh("at")
            active = "w" if self._in_lanes() and self.varies(value) else "one"
            size = IndexText(None, 1, self._indirect).scalar(extent)
            guard = "" if self.guard is None else f"{self.guard}, "  # where the mask is false the index means nothing
            scope.lines.append(f"const auto {found} = checked_index({name}, {size}, {guard}{active}, failed);")
            scope.names[key] = found
        return found

    def _pointer(self, buffer: str) -> str:
        if self._is_row(buffer):
            self.rows.setdefault(buffer, f"row_{clean(buffer)}")
            self.made_names.update((self.rows[buffer], f"hold_{self.rows[buffer]}"))
            return self.rows[buffer]
        self.pointers[buffer] = None
        name = f"p_{clean(buffer)}"
        self.made_names.add(name)
        return name

    def _fresh(self, stem: str) -> str:
        self.counter += 1
        name = f"{stem}{self.counter}" if stem == "t" else f"{stem}_{self.counter}"
        self.made_names.add(name)
        return name

    def _literal(self, number: Any, dtype: torch.dtype) -> str:
        kind = CPP_TYPES[dtype].compute
        if dtype is torch.bool:
            return "true" if number else "false"
        if dtype.is_floating_point:
            if math.isnan(number):
                return f"std::numeric_limits<{kind}>::quiet_NaN()"
            if math.isinf(number):
                return f"{'-' if number < 0 else ''}std::numeric_limits<{kind}>::infinity()"
            return f"{kind}({float(number)!r})" if abs(float(number)) < 1e300 else f"{kind}({float(number).hex()})"
        if number == torch.iinfo(dtype).min and dtype is torch.int64:
            return "std::numeric_limits<int64_t>::min()"
        suffix = "ULL" if number > 2**63 - 1 else ""
        return f"{kind}({number}{suffix})"


def _has_exact_inverse(divisor: Value) -> bool:
    """Whether a number is a power of two, so that matmuls with its inverse are the quotients, bit by bit."""
    if divisor.op != "const" or not divisor.dtype.is_floating_point or not math.isfinite(divisor.attr):
        return False
    part, exponent = math.frexp(divisor.attr)
    return abs(part) == 0.5 and abs(exponent) < 100


def _by_order(atom: Atom) -> tuple[Any, ...]:
    """Sets of atoms are in hash order, which differs from process to process: so would the text and its key."""
    return atom.order


__all__ = ["Emitter", "Section", "Var"]
