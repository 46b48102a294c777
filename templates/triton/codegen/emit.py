"""The bodies of the generic Triton kernels: reductions, scans and columns on the tile of a program.

A value has the axes along which it differs (`x`, `y`, `r`). A value that does not differ along `r` is computed once, outside
of the loop over the inner space.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.plan import Statement, Tiling
from kgen.ir.values import Value
from kgen.templates.triton.codegen.adjacent import runs_of_stores, side_by_side
from kgen.templates.triton.codegen.online_softmax import Rescaled, rescaled_sums
from kgen.templates.triton.codegen.point import NARROW_INDEX, Axes, PointEmitter, Scope
from kgen.templates.triton.codegen.precision import exact_values
from kgen.templates.triton.codegen.rng_blocks import of_adjacent
from kgen.templates.triton.codegen.sorting import network_arguments
from kgen.templates.triton.codegen.table import NO_INDEX, NO_NARROW_INDEX, REDUCE, SCAN, TRITON_TYPES, literal

PAIRS = ("argmax", "argmin")
# Columns that share a running maximum, or a number that they all load: as many as a thread loads of 16-bit numbers at once.
RUN = 8
# Statements of a recurrence that is written out, from which on loads are prefetched, and how many of them.
LONG_CHAIN, PREFETCHED = 64, 32


@dataclass(slots=True)
class Section:
    """One walk of the inner space: statements before it, its body, and what follows it."""

    before: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    barrier: bool = False


class Emitter(PointEmitter):
    """Emits all statements of one tiling; the template puts them into the kernel. `exact` forbids the hardware's approximations
    also where a value ends in 16 bits."""

    order = "yxr"

    def __init__(self, tiling: Tiling, graph: ir.Graph, exact: bool = False) -> None:
        kernel = tiling.kernel
        everything = (v for s in kernel.statements for v in vs.topological(s.roots))
        super().__init__(graph, set(everything) if exact else exact_values(kernel.statements, graph))
        self.tiling, self.kernel, self.wide = tiling, kernel, tiling.wide
        self.rank = 2 if kernel.inner or tiling.y else 1
        self.axis_of = {
            **dict.fromkeys(tiling.x, "x"), **dict.fromkeys(tiling.y, "y"), **dict.fromkeys(kernel.inner, "r")
        }  # fmt: skip
        self.looped = bool(kernel.inner) and not tiling.persistent
        self.inner = Scope() if self.looped else self.outer
        # what is the same for all rows stands before the loop over them, where a program has one
        self.fixed = Scope() if kernel.share is not None else self.outer
        self.backwards = False  # whether scans begin at the last point of a row
        self.columns: list[tuple[Statement, str]] = []  # with their accumulators
        self.reduced: dict[tuple[str, Value, Expr | None], list[str]] = {}  # results of folds of full rows
        self.online_softmax: dict[str, Rescaled] = {}
        self.current, self.passes = -1, dict[Value, list[int]]()  # the section under way; those that load a value of the row
        self.runs, self.run_variables = False, set[Atom]()  # whether texts are of the first points of runs, and what they name
        self._masked = self._ragged()

    # ---- driver -----------------------------------------------------------------------------------------------------

    def run(self) -> tuple[list[str], list[Section]]:
        """(statements before the first section, the sections)."""
        statements = list(self.kernel.statements)
        if self.looped:
            statements, self.online_softmax = rescaled_sums(statements)
        sections = sorted({s.section for s in statements if s.section >= 0})
        self._before_sections([s for s in statements if s.section < 0])
        head, self.outer.lines = self.outer.lines, []
        self.passes = self._passes_of_loads(statements)
        made = [self._section([s for s in statements if s.section == number]) for number in sections]
        stored: set[str] = set()
        for number, section in zip(sections, made, strict=True):
            mine = [s for s in statements if s.section == number]
            section.barrier = self.looped and bool(stored & {load.attr[0] for s in mine for load in vs.loads(s.roots)})
            stored.update(o for s in mine for o, kept in zip(s.outs, s.stored, strict=True) if kept)
        return head, made

    def _before_sections(self, statements: list[Statement]) -> None:
        coming = self._prefetchable(statements) if self.rank == 1 and len(statements) > LONG_CHAIN else None
        for run in ([s] for s in statements) if self.kernel.inner else runs_of_stores(statements, self.graph):
            if coming is not None:
                self._prefetch(coming, run)
            self._outer_statement(run[0]) if len(run) == 1 else self._store_side_by_side(run)

    def _prefetchable(self, statements: list[Statement]) -> list[Value]:
        """Loads that may be issued before the results of the statements in front of them are stored, in order."""
        written = {name for s in statements for name in (*s.outs, s.target)}
        loads = dict.fromkeys(load for s in statements for load in vs.loads(s.roots))
        return [load for load in loads if not load.args and load.attr[0] not in written and not ix.indirects(load.attr[1][0])]

    def _prefetch(self, coming: list[Value], run: Sequence[Statement]) -> None:
        """Issues the loads of the next steps: no load passes a store, so that each step would wait for memory."""
        own = {load for s in run for load in vs.loads(s.roots)}
        last = max((k for k, load in enumerate(coming) if load in own), default=-1)
        self.scope, self.level = self.outer, frozenset("x")
        for load in coming[: last + 1 + PREFETCHED]:
            self.emit(load)
        del coming[: last + 1]

    def _store_side_by_side(self, run: Sequence[Statement]) -> None:
        """One store of what follows each other in memory; of no loop over an inner space."""
        self.scope, self.level = self.outer, frozenset("yx" if self.tiling.y else "x")
        out, number = run[0].outs[0], 1 << (len(run) - 1).bit_length()
        dtype = self.graph.buffers[out].dtype
        values = [self._narrowed(self._tile(self._before_rounding(s.value, out)), dtype) for s in run]
        values += values[-1:] * (number - len(run))
        for s in run:
            self._define(s.outs[0], self.emit(s.value), self.axes(s.value), False)
        points, results = ("[:, :, None]", "[None, None, :]") if self.rank == 2 else ("[:, None]", "[None, :]")
        at = f"({self._offset_text(run[0].store[0])}){points} + tl.arange(0, {number}){results}"
        masks = [f"{self.inside(axis)}{points}" for axis in "yx" if axis in self.masked() & self.level]
        masks += [f"(tl.arange(0, {number}) < {len(run)}){results}"] if number > len(run) else []
        mask = f", {' & '.join(masks)}" if masks else ""
        self._line(f"tl.store({self._pointer(out)} + ({at}), {side_by_side(values)}{mask})")

    def _passes_of_loads(self, statements: list[Statement]) -> dict[Value, list[int]]:
        """Which sections load what of a row that is walked several times; nothing of other kernels."""
        found: dict[Value, list[int]] = {}
        if not self.looped or self.tiling.blocks.x > 1:
            return found
        inner = set(self.kernel.inner)
        for s in statements:
            pair = self.online_softmax.get(s.outs[0])
            roots = s.roots if pair is None else [pair.exponent, *([] if pair.weight is None else [pair.weight])]
            for load in vs.loads(roots) if s.inner else ():
                passes = found.setdefault(load, [])
                if inner & load.variables() and s.section not in passes:
                    passes.append(s.section)
        return {load: passes for load, passes in found.items() if len(passes) > 1}

    def _load(self, value: Value) -> str:
        """What is the same along runs of a row, as the weight of a channel in all of its pixels, is loaded once for each."""
        if not self._has_runs(value):
            return super()._load(value)
        self.runs = True
        text = super()._load(value)
        self.runs = False
        return f"lib.to_points({text}, {RUN})"

    def _has_runs(self, value: Value) -> bool:
        """Whether an element belongs to whole runs along the inner loops: it is the same along the fastest one."""
        if len(self.kernel.inner) < 2 or value.args or self.tiling.blocks.r % RUN:
            return False
        atoms, fast = ix.free_atoms(value.attr[1][0]), self.kernel.inner[-1]
        if fast in atoms or any(isinstance(atom, ix.Indirect) for atom in atoms):
            return False
        return ix.mod(fast.extent, RUN) == 0 and any(v in atoms for v in self.kernel.inner)

    def _variable(self, atom: Atom) -> str:
        if not self.runs or self.axis_of.get(atom) != "r":
            return super()._variable(atom)
        self.run_variables.add(atom)
        assert isinstance(atom, ix.Var)
        return f"{atom.name}_run"

    def _offset_text(self, offset: Expr) -> str:
        """Outer loops of an axis that an offset joins as their common index does are that index, or its quotient: Triton sees
        that neighbours are neighbours in memory, and loads and stores several at once."""
        made = []
        for letter, loops in self._axes_of_loops():
            joined = None if self.runs else _joined_loops(offset, loops)
            if joined is not None:
                number, stride = joined
                within = self.text(ix.product(v.extent for v in loops[number:]))
                index = f"{letter}i" if number == len(loops) else f"({letter}i // ({within}))"
                made.append(index if stride == 1 else f"{index}*{stride}")
                offset = offset - sum((v.expr() * (ix.stride_of(offset, v) or ix.ZERO) for v in loops[:number]), ix.ZERO)
        return " + ".join([*made, *([self.text(offset)] if offset.terms or not made else [])]).replace("+ -", "- ")

    def inside(self, axis: str) -> str:
        return "in_r_run" if self.runs and axis == "r" else super().inside(axis)

    def _load_caching(self, value: Value) -> str:
        """A row that is walked again should be in the L2 cache until its last walk."""
        passes = self.passes.get(value)
        if passes is None:
            return ""
        return f', eviction_policy="{"evict_first" if self.current == max(passes) else "evict_last"}"'

    def _store_caching(self, out: str) -> str:
        """Nor should what is stored meanwhile push it out."""
        read = any(load.attr[0] == out for s in self.kernel.statements for load in vs.loads(s.roots))
        return ', eviction_policy="evict_first"' if self.passes and "r" in self.level and not read else ""

    def _section(self, statements: list[Statement]) -> Section:
        out = Section()
        self.current = statements[0].section
        if self.looped:
            self.inner, self.inner_locals = Scope(), set()
            self._axes.clear()  # what was a name in the last walk may be a load in this one
        later: list[tuple[Statement, list[str]]] = []
        for s in statements:
            if s.inner:
                later += self._inner_statement(s, out)
        out.body = self.inner.lines
        if self.looped:
            out.before = [*self.outer.lines, *out.before]
        self.outer.lines = []
        if self.looped:
            for name in self.inner_locals:
                self.locals.pop(name, None)
        self.scope = self.outer
        for s, names in later:
            self._finish(s, names)
        for s in statements:
            if not s.inner:
                self._outer_statement(s)
        out.after, self.outer.lines = self.outer.lines, []
        return out

    def _outer_statement(self, s: Statement) -> None:
        self.scope = self.outer
        self.level = frozenset("xy") if self.tiling.y else frozenset("x")
        self._scatter(s) if s.kind == "scatter" else self._pointwise(s)

    def _inner_statement(self, s: Statement, section: Section) -> list[tuple[Statement, list[str]]]:
        """Emits the statement; a reduction is returned with the names of its accumulators."""
        self.scope = self.inner
        self.level = frozenset("xr")
        if s.kind == "reduction":
            return [(s, self._accumulate(s, section))] if self.looped else self._reduce_tile(s)
        if s.kind == "scan":
            self._scan(s, section.before)
        elif s.kind == "scatter":
            self._scatter(s)
        elif s.kind == "column":
            self._column(s)
        elif s.kind == "block":
            self._block(s)
        else:
            self._pointwise(s)
        return []

    # ---- reductions -------------------------------------------------------------------------------------------------

    def _kept(self, name: str, s: Statement) -> str:
        """The tile with points outside of the inner space replaced by what leaves the reduction unchanged."""
        if "r" not in self.masked():
            return name
        return f"tl.where(in_r, {name}, {literal(ops.identity(s.op, s.value.dtype), s.value.dtype)})"

    def _place_type(self, s: Statement) -> str:
        """Of positions: as many registers as their numbers take, or two."""
        assert s.rank is not None
        return "int32" if s.rank.bounds()[1] < NARROW_INDEX else "int64"

    def _position(self, s: Statement, kind: str = "int64") -> str:
        assert s.rank is not None
        atom = s.rank.atom()
        # what another kernel has counted is no index into memory: there is nothing to check
        position = self.emit(atom.value) if isinstance(atom, ix.Indirect) else self._number(s.rank)
        return f"tl.broadcast_to({position}, {self._shape(self.level)}).to(tl.{kind})"

    def _reduce_tile(self, s: Statement) -> list[tuple[Statement, list[str]]]:
        """A full row is in registers: fold it at once, unless that has been done."""
        known = self.reduced.get((s.op, s.value, s.rank))
        if known is not None:
            self._results(s, known)
            return []
        tile = self._bind("tile", self._kept(self._tile(s.value), s))
        if s.op in PAIRS:
            self._finish_pair(s, tile, self._position(s, self._place_type(s)))
        elif s.op == "welford":
            count = literal(1.0, s.value.dtype) + f" * ({self.text(ix.product(v.extent for v in self.kernel.inner))})"
            mean = self._bind("mean", f"tl.sum({tile}, 1)[:, None] / ({count})")
            apart = f"{tile} - {mean}"
            if "r" in self.masked():
                apart = f"tl.where(in_r, {apart}, 0)"
            apart = self._bind("apart", apart)
            m2 = self._bind("m2", f"tl.sum({apart} * {apart}, 1)[:, None]")
            self._results(s, [mean, m2])
        else:
            self._results(s, [self._bind(s.op, self._joined(s.op, REDUCE[s.op].across.format(tile, axis=1) + "[:, None]"))])
        return []

    def _joined(self, op: str, text: str) -> str:
        """The result of a row joined with those of the other rows of its group."""
        return text if self.tiling.group == 1 else f"lib.join_group_{op}({text}, {self.tiling.group})"

    def _finish_pair(self, s: Statement, tile: str, position: str) -> None:
        best, place = self._fresh("best"), self._fresh("place")
        self._line(f"{best}, {place} = {REDUCE[s.op].across.format(tile, position, axis=1)}")
        wide = "" if self._place_type(s) == "int64" else ".to(tl.int64)"
        self._results(s, [f"{best}[:, None]", f"{place}[:, None]{wide}"])

    def _accumulate(self, s: Statement, section: Section) -> list[str]:
        """Steps of accumulators that are tiles; names of the accumulators."""
        dtype, shape = TRITON_TYPES[s.value.dtype].compute, self._shape(self.level)
        start = literal(ops.identity(s.op, s.value.dtype), s.value.dtype)
        rescaled = self.online_softmax.get(s.outs[0])
        if rescaled is not None:
            return self._accumulate_rescaled(s, rescaled, section)
        value = self._tile(s.value)
        masked = "r" in self.masked()
        acc = self._fresh("acc")
        section.before.append(f"{acc} = tl.full({shape}, {start}, {dtype})")
        if s.op in PAIRS:
            place, kind = self._fresh("place"), self._place_type(s)
            nothing = NO_INDEX if kind == "int64" else NO_NARROW_INDEX
            section.before.append(f"{place} = tl.full({shape}, {nothing}, tl.{kind})")
            best, at = self._fresh("best"), self._fresh("at")
            self._line(f"{best}, {at} = {REDUCE[s.op].step.format(acc, place, value, self._position(s, kind))}")
            keep = ("tl.where(in_r, {}, {})" if masked else "{}").format
            self._line(f"{acc} = {keep(best, acc)}")
            self._line(f"{place} = {keep(at, place)}")
            return [acc, place]
        if s.op == "welford":
            return self._accumulate_welford(s, section, acc, value)
        self._line(f"{acc} = {REDUCE[s.op].step.format(acc, self._kept(value, s))}")
        return [acc]

    def _accumulate_welford(self, s: Statement, section: Section, acc: str, value: str) -> list[str]:
        """Each column of the tile has seen as many points as steps were made: one reciprocal serves all."""
        dtype, shape = TRITON_TYPES[s.value.dtype].compute, self._shape(self.level)
        m2 = self._fresh("m2")
        section.before.append(f"{m2} = tl.zeros({shape}, {dtype})")
        inverse = self._bind("inverse", f"{literal(1.0, s.value.dtype)} / (start // RBLOCK + 1)")
        step = f"lib.step_mean({acc}, {m2}, {value}, {inverse})"
        if "r" not in self.masked():
            self._line(f"{acc}, {m2} = {step}")
            return [acc, m2]
        stepped = [self._fresh("next") for _ in range(2)]
        self._line(f"{', '.join(stepped)} = {step}")
        for old, new in zip((acc, m2), stepped, strict=True):
            self._line(f"{old} = tl.where(in_r, {new}, {old})")
        return [acc, m2]

    def _accumulate_rescaled(self, s: Statement, pair: Rescaled, section: Section) -> list[str]:
        """A maximum and the sum of exponentials below it in one walk (online softmax, Milakov and Gimelshein 2018)."""
        dtype = TRITON_TYPES[s.value.dtype].compute
        width = min(RUN, self.tiling.blocks.r)
        shape = f"[XBLOCK, {self.tiling.blocks.r // width}]"
        value = self._tile(pair.exponent)
        weight = f"tl.full({self._shape(self.level)}, 1.0, {dtype})" if pair.weight is None else self._tile(pair.weight)
        top, acc = self._fresh("top"), self._fresh("acc")
        section.before += [f'{top} = tl.full({shape}, float("-inf"), {dtype})', f"{acc} = tl.zeros({shape}, {dtype})"]
        if "r" in self.masked():
            value = f'tl.where(in_r, {value}, float("-inf"))'
        step = "step_rescaled" if self._begins_at_runs(pair.exponent) else "step_rescaled_apart"
        self._line(f"{top}, {acc} = lib.{step}({top}, {acc}, {value}, {weight}, {width})")
        return [top, acc]

    def _begins_at_runs(self, value: Value) -> bool:
        """Whether neighbours that make a run are one thread's: it loads so many at a time where rows begin at multiples."""
        inner = self.kernel.inner
        rests = [load.attr[1][0] - ix.position_in(inner) for load in vs.loads([value])]
        terms = [term for rest in rests if ix.free_atoms(rest).isdisjoint(inner) for term in rest.terms]
        return all(number % RUN == 0 or any(isinstance(atom, ix.Size) for atom in atoms) for atoms, number in terms)

    def _finish(self, s: Statement, names: list[str]) -> None:
        """After the walk: fold the tiles of accumulators and store what is needed."""
        if s.outs[0] in self.online_softmax:
            top, total = self._fresh("max"), self._fresh("sum")
            self._line(f"{top}, {total} = lib.fold_rescaled({names[0]}, {names[1]}, 1)")
            pair, parts = self.online_softmax[s.outs[0]], [f"{top}[:, None]", f"{total}[:, None]"]
            if self.tiling.group > 1:
                self._line(f"{top}, {total} = lib.join_group_rescaled({', '.join(parts)}, {self.tiling.group})")
                parts = [top, total]
            self._results(pair.maximum, parts[:1])
            self._results(s, parts[1:])
        elif s.op in PAIRS:
            self._finish_pair(s, names[0], names[1])
        elif s.op == "welford":
            mean, m2, count, seen = (self._fresh(stem) for stem in ("mean", "m2", "count", "seen"))
            length = self.text(ix.product(v.extent for v in self.kernel.inner))
            dtype, shape = TRITON_TYPES[s.value.dtype].compute, self._shape(frozenset("xr"))
            self._line(f"{seen} = tl.broadcast_to(lib.points_seen({length}, RBLOCK), {shape}).to({dtype})")
            self._line(f"{mean}, {m2}, {count} = {REDUCE[s.op].across.format(*names, seen, axis=1)}")
            parts = [f"{name}[:, None]" for name in (mean, m2, count)]
            if self.tiling.group > 1:
                self._line(f"{mean}, {m2} = lib.join_group_welford({', '.join(parts)}, {self.tiling.group})")
                parts = [mean, m2]
            self._results(s, parts[:2])
        else:
            self._results(s, [self._bind(s.op, self._joined(s.op, REDUCE[s.op].across.format(names[0], axis=1) + "[:, None]"))])

    def _results(self, s: Statement, names: list[str]) -> None:
        if not self.looped:
            self.reduced[(s.op, s.value, s.rank)] = names
        level, self.level = self.level, frozenset("x")
        for out, name, stored in zip(s.outs, names, s.stored, strict=True):
            self._define(out, name, self.level, False)
            if stored:
                self._store(out, s.store[0], name)
        self.level = level

    # ---- blocks -----------------------------------------------------------------------------------------------------

    def _block(self, s: Statement) -> None:
        """The result of a run of neighbours along the row, at each of them."""
        tile = self._bind("tile", self._kept(self._tile(s.value), s))
        name = self._bind(s.op, f"lib.fold_blocks_{s.op}({tile}, {s.block})")
        guard = None if s.mask is None else (self.emit(s.mask), self.axes(s.mask))
        self._define(s.outs[0], name, self.level, True)
        if s.stored[0]:
            saved, self.guard = self.guard, guard
            self._store(s.outs[0], s.store[0], name)
            self.guard = saved

    # ---- columns ----------------------------------------------------------------------------------------------------

    def _column(self, s: Statement) -> None:
        """A step of an accumulator that outlives the block of rows. Threads keep their own points, folded at the end."""
        value, acc = self._tile(s.value), self._fresh("acc")
        start = literal(ops.identity(s.op, s.value.dtype), s.value.dtype)
        if "x" in self.masked():
            value = f"tl.where(in_x, {value}, {start})"
        kind = TRITON_TYPES[s.value.dtype].compute
        self.fixed.lines.append(f"{acc} = tl.full({self._shape(self.level)}, {start}, {kind})")
        self._line(f"{acc} = {REDUCE[s.op].step.format(acc, value)}")
        self.columns.append((s, acc))

    def finish_columns(self) -> list[str]:
        """Statements after the last block of rows: the program's share of each column's result."""
        self.scope, self.level = Scope(), frozenset("r")
        for s, acc in self.columns:
            self._store(s.outs[0], s.store[0], self._bind(s.op, f"{REDUCE[s.op].across.format(acc, axis=0)}[None, :]"))
        return self.scope.lines

    # ---- scans ------------------------------------------------------------------------------------------------------

    def _scan(self, s: Statement, before: list[str]) -> None:
        """A prefix scan of the tile; where the row is walked in steps, joined with what came before. A row that is sorted is in
        registers as a whole: what is past its end is the largest number, and comes last."""
        value = self._bind("tile", self._tile(s.value))
        if s.op in ops.ROW_ORDERS:
            assert not self.looped, "a row is sorted as a whole"
            value = self._bind("tile", self._kept(value, s))
        parts = [value, self._bind("place", self._position(s, self._scanned_place(s)))] if len(s.outs) > 1 else [value]
        names = [self._fresh("scan") for _ in parts]
        if self.backwards:
            parts, along = [self._kept(value, s)], SCAN[s.op].backwards
        else:
            along = SCAN[s.op].along
        bits = network_arguments(self.tiling, self.graph) if s.op in ops.ROW_ORDERS else ""
        self._line(f"{', '.join(names)} = {along.format(*parts, axis=1, bits=bits)}")
        if self.looped:
            dtype = TRITON_TYPES[s.value.dtype].compute
            carries = [self._fresh("carry") for _ in parts]
            start = float("-inf") if s.op == "logaddexp" else ops.identity(s.op, s.value.dtype)
            before.append(f"{carries[0]} = tl.full([XBLOCK, 1], {literal(start, s.value.dtype)}, {dtype})")
            if s.op in PAIRS:
                before.append(f"{carries[1]} = tl.full([XBLOCK, 1], 0, tl.int64)")
            joined = [self._fresh("scan") for _ in parts]
            self._line(f"{', '.join(joined)} = {SCAN[s.op].combine.format(*carries, *names)}")
            # the last point of the step: the fold of a step adds in another order, and would leave a seam
            for carry, name in zip(carries, joined, strict=True):
                self._line(f"{carry} = lib.last_column({name}, RBLOCK)")
            names = joined
        if len(names) > 1 and self._scanned_place(s) != "int64":
            names[1] = f"{names[1]}.to(tl.int64)"
        for out, name, stored in zip(s.outs, names, s.stored, strict=True):
            self._define(out, name, self.level, True)
            if stored:
                self._store(out, s.store[0], name)

    def _scanned_place(self, s: Statement) -> str:
        """Of positions: those that are sorted with their elements take as few registers as they can."""
        return self._place_type(s) if s.op in ops.ROW_ORDERS else "int64"

    # ---- the axes ------------------------------------------------------------------------------------------------------------

    def _axes_of_loops(self) -> Iterator[tuple[str, tuple[Var, ...]]]:
        yield from (("x", self.tiling.x), ("y", self.tiling.y), ("r", self.kernel.inner))

    def masked(self) -> Axes:
        """Axes whose last tile reaches past the end."""
        return self._masked

    def _ragged(self) -> Axes:
        blocks, found = self.tiling.blocks, set()
        for (axis, loops), block in zip(self._axes_of_loops(), (blocks.x, blocks.y, blocks.r), strict=True):
            extent = ix.product(v.extent for v in loops).as_int()
            if not extent or extent % block:  # of nothing, too
                found.add(axis)
        return frozenset(found)

    def _shape(self, axes: Axes) -> str:
        if self.rank == 1:
            return "[XBLOCK]"
        first, second = ("y", "x") if self.tiling.y else ("x", "r")
        return f"[{first.upper() + 'BLOCK' if first in axes else 1}, {second.upper() + 'BLOCK' if second in axes else 1}]"

    def _shared_random(self, value: Value) -> str | None:
        return of_adjacent(value, self.tiling, self.graph)


def _joined_loops(offset: Expr, loops: Sequence[Var]) -> tuple[int, int] | None:
    """How many of the loops, two at least from the outermost on, an offset joins in one index, and the stride of that."""
    strides = [ix.stride_of(offset, v) for v in loops]
    number = next((k for k, stride in enumerate(strides) if stride is None or stride == 0), len(loops))
    for k in range(number, 1, -1):
        stride = strides[k - 1]
        assert stride is not None
        known = stride.as_int()
        if known is not None and all(
            strides[j] == stride * ix.product(v.extent for v in loops[j + 1 : k]) for j in range(k - 1)
        ):
            return k, known
    return None
