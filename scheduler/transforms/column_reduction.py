"""Lets a kernel of full rows sum columns as well: what the backward of a normalisation reads twice is then read once.

The gradient of a row needs that row alone; the gradients of weight and bias are sums of the same data down the columns. Fusion
keeps them apart, for they reduce over different axes. On a GPU the kernel of rows holds a row in registers: a program that
takes many rows, one block after the other, adds them up as they come by, and stores one partial sum for each column at its end.
On a CPU the rows are shared out as well, and a share's sums stay in a core's own cache. A second kernel adds the sums of the
programs or shares. Who adds what in which order is part of the plan, so results repeat from run to run.

What reads the sums stays with the second kernel, so that only the walk over the rows moves in the order of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kgen.device import Gpu
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Sizes, Var
from kgen.ir.plan import Kernel, Statement, Step
from kgen.ir.values import Value
from kgen.scheduler.analysis.memory import has_hidden_effects, reads, root, writes
from kgen.scheduler.fusion.combo_kernels import forbids
from kgen.scheduler.protocol import Forming, Transform
from kgen.scheduler.tiling.loops import stride_along
from kgen.scheduler.tiling.tiles import persistent, power_of_two, shares
from kgen.verdict import FusionDemand, Outcome, Reason, Verdict

# Rows are at least and at most so long, and a program has so many bytes of accumulators at most: beyond, registers spill. At
# 16,384 columns one sum spills 30 registers of a thread, for a second walk over rows of 96 KB saved. A GPU's program keeps what
# it reads of columns besides, such as weights, in half of an SM's registers: one sum and two such vectors spill 54.
MIN_COLUMNS = 32
MAX_COLUMNS = {"triton": 16384, "cpp": 8192}
MAX_REGISTER_BYTES, MAX_VECTOR_BYTES = 65536, 131072
# On a CPU: bytes of rows for each share, counted as numbers of 32 bits; how many shares there are at least (what is smaller
# stays in the cache), and at most.
SHARE_BYTES, MIN_SHARES, MAX_SHARES = 1 << 18, 16, 256

ILLEGAL = (Reason.INDEX_MISMATCH, Reason.MUTATION, Reason.CYCLE)

Mapping = dict[Atom, Expr]
Element = tuple[str, tuple[Expr, ...]]


@dataclass(frozen=True, slots=True)
class Setting:
    """What the pass needs to know besides the steps. `kept` are buffers that are memory whoever reads them."""

    graph: ir.Graph
    sizes: Sizes
    gpu: Gpu
    kept: frozenset[str]
    demands: tuple[FusionDemand, ...] = ()


class ColumnReduction(Transform):
    """Sums columns in the kernels that hold their rows."""

    name = "column reduction"

    def form(self, steps: list[Step], forming: Forming) -> list[Step]:
        options = forming.draft.options
        setting = Setting(forming.draft.graph, forming.sizes, options.gpu, forming.kept, options.demands)
        return carry_columns(steps, setting, forming.verdicts)


def carry_columns(steps: list[Step], setting: Setting, verdicts: list[Verdict]) -> list[Step]:
    """The steps with column sums moved into kernels that hold the same rows; buffers for partial sums are added to the graph.
    A sum that moved leaves the kernel that adds its partial results, with the same name."""
    run = _Carrier(setting, verdicts, [[step] for step in steps])
    for at, step in enumerate(steps):
        carries = run.entries[at][0] is not step  # then it stays, or what it carries would go with it
        if isinstance(step, Kernel) and not carries and _sums_columns(step, setting.graph):
            run.place(at, step)
    run.keep_in_registers()
    return [step for place in run.entries for step in place]


def _sums_columns(kernel: Kernel, graph: ir.Graph) -> bool:
    """One walk down the inner space that sums, and otherwise only fills new buffers point by point."""
    inner = [s for s in kernel.statements if s.inner]
    if kernel.contracts or kernel.sections != 1 or kernel.rows or not kernel.outer or kernel.share is not None:
        return False
    if any(not s.inner and s.section < 0 for s in kernel.statements):
        return False
    sums = [s for s in inner if s.kind == "reduction" and s.op == "sum"]
    new = [s for s in inner if s.kind == "pointwise" and all(graph.buffers[o].alias_of is None for o in s.outs)]
    return bool(sums) and len(sums) + len(new) == len(inner)


def _holds_rows(kernel: Kernel) -> bool:
    """Whether a program may hold full rows of the kernel. Atomic updates stay out: their order is nobody's."""
    length = ix.product(v.extent for v in kernel.inner).as_int() or 0
    if kernel.contracts or not kernel.outer or not kernel.inner or length < MIN_COLUMNS:
        return False
    if kernel.target == "cpp":
        return all(s.kind in ("pointwise", "reduction") for s in kernel.statements)
    return persistent(kernel) and all(s.kind != "scatter" for s in kernel.statements)


@dataclass(frozen=True, slots=True)
class _Moved:
    """A sum's walk over the loops of a kernel of rows: its statements, the columns they store at, and what moving it saves."""

    statements: tuple[Statement, ...]
    column: tuple[Expr, ...]
    saved: int

    @property
    def roots(self) -> list[Value]:
        return [s.value for s in self.statements]

    @property
    def sums(self) -> list[Statement]:
        return [s for s in self.statements if s.kind == "reduction"]


@dataclass(slots=True)
class _Carrier:
    setting: Setting
    verdicts: list[Verdict]
    entries: list[list[Step]]  # what became of each step
    holders: dict[str, list[int]] = field(default_factory=dict)  # buffer -> places of kernels of rows that touch it
    left: set[int] = field(default_factory=set)  # places whose sums have moved

    def __post_init__(self) -> None:
        for at, (step,) in enumerate(self.entries):
            if isinstance(step, Kernel) and _holds_rows(step):
                for name in sorted(reads(step) | writes(step)):
                    self.holders.setdefault(name, []).append(at)

    def place(self, at: int, kernel: Kernel) -> None:
        """Moves the sums of the kernel at a place into the kernel of rows where that saves most, if there is one."""
        found: list[tuple[int, int, Kernel, _Moved]] = []
        for where in sorted({p for name in reads(kernel) for p in self.holders.get(name, ())} - {at} - self.left):
            rows = self.entries[where][0]
            assert isinstance(rows, Kernel)
            moved = self._moved(rows, kernel)
            if moved is None:
                continue
            reason = self._refusal(where, rows, at, kernel, moved)
            if reason is None:
                found.append((moved.saved, where, rows, moved))
            else:
                outcome = Outcome.ILLEGAL if reason in ILLEGAL else Outcome.UNPROFITABLE
                self.verdicts.append(Verdict(rows.name, kernel.name, outcome, reason))
        if found:
            _, where, rows, moved = max(found, key=lambda f: (f[0], -f[1]))
            self._join(where, rows, at, kernel, moved)

    # ---- the walk over the rows' loops ------------------------------------------------------------------------------

    def _moved(self, rows: Kernel, kernel: Kernel) -> _Moved | None:
        """The sums' statements over the loops of the rows; None where the two touch nothing at the same point."""
        down, across = placed(kernel.inner, rows.outer), placed(kernel.outer, rows.inner)
        count = self._shares(rows)
        if down is None or across is None or kernel.target != rows.target or count == 0:
            return None
        mapping = {**down, **across}
        memo: dict[Expr, Expr] = {}
        statements = tuple(
            replace(s, value=vs.substitute(s.value, mapping), store=tuple(ix.substitute(e, mapping, memo) for e in s.store))
            for s in kernel.statements
            if s.inner
        )
        common = {load.attr[:2] for load in vs.loads(s.value for s in statements)} & _in_registers(rows)
        if not any(self._along_rows(element, rows) for element in common):
            return None
        column = tuple(across[v] for v in kernel.outer)
        register_bytes = sum(self._bytes(element) for element in common)
        sums = [s for s in statements if s.kind == "reduction"]
        partial = count * self.setting.sizes.points(rows.inner) * sum(s.value.dtype.itemsize for s in sums)
        return _Moved(statements, column, register_bytes - 2 * partial)

    def _shares(self, rows: Kernel) -> int:
        """Among how many programs, or parts of a CPU's loop, the rows are shared out; 0: they are too few."""
        count, length = self.setting.sizes.points(rows.outer), self.setting.sizes.points(rows.inner)
        if rows.target != "cpp":
            return shares(count, length, self.setting.gpu)
        found = min(count * length * 4 // SHARE_BYTES, MAX_SHARES, count)
        return found if found >= MIN_SHARES else 0

    def _along_rows(self, element: Element, rows: Kernel) -> bool:
        """Whether an access of both loops goes along memory as the inner loops run."""
        return bool(self._loops_along(element, rows))

    def _loops_along(self, element: Element, rows: Kernel) -> list[Var]:
        """The inner loops along which an access of both loops goes along memory."""
        name, index = element
        strides = self.setting.graph.buffers[name].strides
        if strides is None or not _uses(index, rows.outer):
            return []
        offset = ix.linearize(index, strides)
        inner = (v for v in rows.inner if self.setting.sizes.of(v.extent) >= MIN_COLUMNS)
        return [v for v in inner if stride_along(offset, v, self.setting.sizes) == 1]

    def _turned(self, rows: Kernel, kernel: Kernel, moved: _Moved) -> bool:
        """Whether lanes that go along the rows would add to sums that lie apart."""
        sums = ix.linearize(moved.column, ix.contiguous_strides(tuple(v.extent for v in kernel.outer)))
        common = {load.attr[:2] for load in vs.loads(moved.roots)} & _in_registers(rows)
        along = (v for element in common for v in self._loops_along(element, rows))
        return not any(stride_along(sums, v, self.setting.sizes) == 1 for v in along)

    def _is_across(self, rows: Kernel) -> bool:
        """Whether lanes along the rows, as sums of columns need them, would stride through most of what the rows move."""
        both = [e for e in _in_registers(rows) if _uses(e[1], rows.outer) and _uses(e[1], rows.inner)]
        return 2 * sum(self._bytes(e) for e in both if self._along_rows(e, rows)) < sum(map(self._bytes, both))

    def _bytes(self, element: Element) -> int:
        name, index = element
        loops = {a for e in index for a in ix.free_atoms(e) if isinstance(a, Var)}
        return self.setting.sizes.points(loops) * self.setting.graph.buffers[name].dtype.itemsize

    # ---- legality ---------------------------------------------------------------------------------------------------

    def _refusal(self, where: int, rows: Kernel, at: int, kernel: Kernel, moved: _Moved) -> Reason | None:
        if any(not d.wanted and forbids(d, rows, kernel) for d in self.setting.demands):
            return Reason.FORBIDDEN
        made = {o: s for s in rows.statements for o in s.outs}
        for load in vs.loads(moved.roots):
            maker = made.get(load.attr[0])
            if maker is not None and maker.store != load.attr[1]:
                return Reason.INDEX_MISMATCH
        walked = self._roots(load.attr[0] for load in vs.loads(moved.roots) if load.attr[0] not in made)
        if walked & self._roots(writes(rows)):
            return Reason.MUTATION
        reason = self._later(where, rows, at, kernel) if at < where else self._earlier(where, at, walked)
        if reason is not None:
            return reason
        accumulators = [*moved.sums, *(s for s in rows.statements if s.kind == "column")]
        length = self.setting.sizes.points(rows.inner)
        read = {load.attr[:2] for load in vs.loads(moved.roots)} - _in_registers(rows)
        if any(_uses(e[1], rows.inner) and _uses(e[1], rows.outer) and not self._along_rows(e, rows) for e in read):
            return Reason.LAYOUT_CONFLICT
        if rows.target == "cpp" and (self._turned(rows, kernel, moved) or self._is_across(rows)):
            return Reason.LAYOUT_CONFLICT
        if length > MAX_COLUMNS[rows.target] or length * sum(s.value.dtype.itemsize for s in accumulators) > MAX_REGISTER_BYTES:
            return Reason.TOO_LARGE
        if rows.target == "triton" and _column_bytes(rows, moved.roots, accumulators, length) > MAX_VECTOR_BYTES:
            return Reason.TOO_LARGE
        return Reason.NO_SAVING if moved.saved <= 0 else None

    def _earlier(self, where: int, at: int, walked: set[str]) -> Reason | None:
        """The walk moves up, to the rows: what it reads must be there by then, and nothing between may change it."""
        for step in self._between(where, at):
            if has_hidden_effects(step):
                return Reason.CYCLE
            if walked & self._roots(writes(step)):
                return Reason.CYCLE
        return None

    def _later(self, where: int, rows: Kernel, at: int, kernel: Kernel) -> Reason | None:
        """All of the kernel moves down: nobody before that may need what it makes, or change what it reads."""
        made, read = self._roots(writes(kernel)), self._roots(reads(kernel))
        for step in (*self._between(at, where), rows):
            if has_hidden_effects(step) or made & self._roots(reads(step)):
                return Reason.CYCLE
            if (made | read) & self._roots(writes(step)):
                return Reason.MUTATION
        return None

    def _between(self, first: int, last: int) -> Iterator[Step]:
        """The steps after one place and before another; the first place's own kernel is not between."""
        yield from self.entries[first][1:]
        for place in self.entries[first + 1 : last]:
            yield from place

    def _roots(self, names: Iterable[str]) -> set[str]:
        return {root(self.setting.graph, name) for name in names}

    # ---- joining ----------------------------------------------------------------------------------------------------

    def _join(self, where: int, rows: Kernel, at: int, kernel: Kernel, moved: _Moved) -> None:
        share = rows.share or ix.var("share", self._shares(rows))
        section = _section_of(rows, moved.roots)
        partial_names = {s.outs[0]: self._partial(s, kernel, share) for s in moved.sums}
        added = [replace(s, section=section) for s in moved.statements if s.kind != "reduction"]
        for s in moved.sums:
            store = (share.expr(), *moved.column)
            added.append(Statement("column", (partial_names[s.outs[0]],), s.value, store, True, section, (True,), s.op))
        name = rows.name if rows.share is not None else f"{rows.name}_columns"
        self.entries[where][0] = replace(
            rows, name=name, sections=max(rows.sections, section + 1), statements=(*rows.statements, *added),
            origins=tuple(dict.fromkeys((*rows.origins, *kernel.origins))), share=share,
        )  # fmt: skip
        self.left.add(at)
        last = self._last(kernel, partial_names, share)
        if at < where:
            self.entries[at].clear()
            self.entries[where].append(last)
        else:
            self.entries[at] = [last]
        self.verdicts.append(Verdict(rows.name, kernel.name, Outcome.FUSED, Reason.COLUMN_SUMS, moved.saved))

    def _partial(self, s: Statement, kernel: Kernel, share: Var) -> str:
        sizes = (share.extent, *(v.extent for v in kernel.outer))
        graph = self.setting.graph
        name = ir.derived(graph, ir.Derived(s.outs[0], "column_partial"))
        device = graph.buffers[s.outs[0]].device
        graph.buffers[name] = ir.Buffer(name, s.value.dtype, device, sizes, ix.contiguous_strides(sizes))
        return name

    def _last(self, kernel: Kernel, partial_names: dict[str, str], share: Var) -> Kernel:
        """Adds the programs' sums, and does what the kernel did with the results."""
        statements: list[Statement] = []
        for s in kernel.statements:
            if s.kind == "reduction":
                index = (share.expr(), *(v.expr() for v in kernel.outer))
                statements.append(replace(s, value=vs.load(partial_names[s.outs[0]], index, s.value.dtype), rank=None))
            elif not s.inner:
                statements.append(s)
        return replace(kernel, inner=(share,), statements=tuple(statements))

    def keep_in_registers(self) -> None:
        """What only the sums read need not be stored by a GPU's kernel of rows. On a CPU a later walk may read it again."""
        steps = [step for place in self.entries for step in place]
        readers: dict[str, int] = {}
        for step in steps:
            for name in self._roots(reads(step)):
                readers[name] = readers.get(name, 0) + 1
        for place in self.entries:
            if place and isinstance(place[0], Kernel) and place[0].share is not None and place[0].target == "triton":
                place[0] = self._unstored(place[0], readers)

    def _unstored(self, kernel: Kernel, readers: dict[str, int]) -> Kernel:
        named = {load.attr[0] for s in kernel.statements for load in vs.loads([s.value])}
        graph = self.setting.graph

        def needed(s: Statement, out: str) -> bool:
            mine = root(graph, out) in self._roots(reads(kernel))
            new = graph.buffers[out].kind == "intermediate" and s.target is None and out not in self.setting.kept
            return not (new and out in named and readers.get(root(graph, out), 0) <= mine)

        statements = tuple(
            replace(s, stored=tuple(stored and needed(s, o) for o, stored in zip(s.outs, s.stored, strict=True)))
            for s in kernel.statements
        )
        return replace(kernel, statements=statements)


def _section_of(rows: Kernel, roots: Iterable[Value]) -> int:
    """Which walk of a kernel of rows takes sums along. A GPU's rows stay in registers: sums come after all that is computed,
    statements after the last walk included. A CPU reads rows again in each walk: it is the first that has all values."""
    if rows.target != "cpp":
        return rows.sections - 1 if rows.share is not None else rows.sections
    made = {o: s for s in rows.statements for o in s.outs}
    makers = [made[load.attr[0]] for load in vs.loads(roots) if load.attr[0] in made]
    return max((s.section + (s.kind == "reduction" or not s.inner) for s in makers), default=0)


def placed(loops: tuple[Var, ...], at: tuple[Var, ...]) -> Mapping | None:
    """Loops in terms of others that count as many points in the same order; None where they do not."""
    if [v.extent for v in loops] == [v.extent for v in at]:
        return dict(zip(loops, (v.expr() for v in at), strict=True))
    if ix.product(v.extent for v in loops) is not ix.product(v.extent for v in at):
        return None
    point = ix.position_in(at)
    return dict(zip(loops, ix.delinearize(point, [v.extent for v in loops]), strict=True))


def _in_registers(rows: Kernel) -> set[Element]:
    """The elements that a program has in registers at each point: those that it reads, and those that it makes."""
    found = {load.attr[:2] for s in rows.statements for load in vs.loads([s.value])}
    return found | {(o, s.store) for s in rows.statements if s.kind != "column" for o in s.outs}


def _column_bytes(rows: Kernel, roots: Iterable[Value], accumulators: Sequence[Statement], length: int) -> int:
    """What a program keeps of columns from row to row: what it reads of them alone, and what it adds up."""
    loads = vs.loads([*(root for s in rows.statements for root in s.roots), *roots])
    read = {load.attr[:2]: load.dtype.itemsize for load in loads if not _uses(load.attr[1], rows.outer)}
    columns = [size for (_, index), size in read.items() if _uses(index, rows.inner)]
    return power_of_two(length) * sum([*columns, *(s.value.dtype.itemsize for s in accumulators)])


def _uses(index: Iterable[Expr], loops: tuple[Var, ...]) -> bool:
    return any(v in ix.free_atoms(e) for e in index for v in loops)
