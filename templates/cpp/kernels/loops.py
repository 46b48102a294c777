"""Loop kernels in C++: the templates for points, rows, scans and rows with column sums, and what fills their slots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Expr, Sizes, Var
from kgen.ir.plan import TILE, Nest, Statement
from kgen.ir.values import total_cost
from kgen.rendered.kernel_call import Rendered
from kgen.templates.contract import Config, knob, template
from kgen.templates.cpp.codegen.branches import branches
from kgen.templates.cpp.codegen.constant_offsets import with_offsets_as_sizes
from kgen.templates.cpp.codegen.emit import STRIP, Emitter, Section
from kgen.templates.cpp.codegen.prefetch import pointed_prefetches, prefetches, run_prefetches
from kgen.templates.cpp.codegen.table import CPP_TYPES
from kgen.templates.loop_contract import LoopKernel, LoopProblem, LoopTemplate, loops
from kgen.templates.loop_slots import (
    CppPoints,
    CppRows,
    CppScans,
    OneStep,
    RowSplit,
    ScanSplit,
    SectionSlot,
    ShareSlot,
    Tasks,
    TileLoop,
    TurnedSlot,
    VectorLoop,
)
from kgen.templates.render import clean, lines, render_slots, source_lines

# Waking a thread costs some microseconds: a share of work below this many elementary operations is not worth one.
WAKE = 131072
# A vector outer loop longer than this is cut into tasks, so that threads can share it.
BLOCK = 4096
# Rows longer than this, when there are too few to share, are themselves split among threads.
SPLIT_ROW = 16384
# Steps of a sum before its total is put aside: rounding errors grow with the length of a chain of additions.
SUM_BLOCK = 256


class _Lanes(LoopKernel):
    """Fewer lanes are narrower vectors: less is prefetched, and short loops have less of a tail."""

    LANES = knob(4, 8, 16, 32)


@template(implements=loops("pointwise"), device="cpu", source="pointwise.cpp.jinja", name="cpp_pointwise")
class Pointwise(_Lanes):
    """Threads share independent points; LANES of them make a vector."""


@template(implements=loops("reduction"), device="cpu", source="reduction.cpp.jinja", name="cpp_reduction")
class Reduction(_Lanes):
    """Threads share rows, or each row where these are few and long."""


@template(implements=loops("scan"), device="cpu", source="scan.cpp.jinja", name="cpp_scan")
class Scan(_Lanes):
    """Threads share rows to scan, or each row where these are few and long."""


@template(implements=loops("column_reduction"), device="cpu", source="reduction.cpp.jinja", name="cpp_columns")
class ColumnReduction(_Lanes):
    """Threads share sets of rows; each set has sums of its own for all columns."""


def render_kernel(problem: LoopProblem, template: LoopTemplate, config: Config, name: str) -> Rendered:
    """The C++ function of one loop nest. A general one has its constant offsets as arguments."""
    under = problem.under(config)
    [nest] = under.vector_loops
    made = _render_nest(under, template, config, name)
    if not _has_offsets(nest):
        return made
    general, offsets = with_offsets_as_sizes(nest)

    def by_offset(name: str) -> Rendered:
        made = _render_nest(replace(under, vector_loops=(general,)), template, config, name)
        return replace(made, sizes=tuple(offsets.get(str(size), size) for size in made.sizes))

    return replace(made, general=by_offset)


def _accesses(nest: Nest) -> Iterator[Expr]:
    """The offsets of loads and stores."""
    for s in nest.kernel.statements:
        yield from s.store
        yield from (e for load in vs.loads(s.roots) for e in load.attr[1])


def _has_offsets(nest: Nest) -> bool:
    """Whether a load or store adds a constant to its offset."""
    return any(dict(place.terms).get((), 0) for place in _accesses(nest))


def _render_nest(problem: LoopProblem, template: LoopTemplate, config: Config, name: str) -> Rendered:
    [nest], graph = problem.vector_loops, problem.graph
    emitter = Emitter(nest, graph)
    slots = _slots(problem.kind, name, nest, emitter, graph)
    text = render_slots(template.source, "cpu", slots, config, problem)
    parts = {f"parts_{n}" for n in (*emitter.accumulators, *emitter.runnings)}
    names = emitter.made_names | parts | {f"whole_{n}" for n in emitter.accumulators} | set(emitter.sizes)
    return Rendered(text, tuple(emitter.pointers), tuple(emitter.sizes), frozenset(names))


def _slots(kind: str, name: str, nest: Nest, emitter: Emitter, graph: ir.Graph) -> CppPoints:
    """What a nest's template asks for. The head comes last: only the other slots know which pointers and sizes they need."""
    sizes = Sizes(graph.size_hints)
    body, sections = emitter.run()
    outer = outer_loops(nest, sizes)
    split, splits_scan = _splits(nest, sections, sizes), _splits_scan(nest, sections, sizes)
    tasks = task_loops(outer, nest, emitter, sizes)
    share = None if nest.kernel.share is None else _share_slot(nest, emitter, sizes, outer, tasks.grain)
    rows = _row_buffers(nest, emitter)
    tasks, body = with_prefetches(tasks, body, sections, nest, emitter, sizes)
    row_passes = tuple(_section_slot(s, nest, _Text(emitter)) for s in sections)
    row_split = _split_slot(sections[0], nest, emitter) if split else None
    scan_split = _scan_split_slot(sections[0], nest, emitter, graph) if splits_scan else None
    head = FunctionHead(name, _comments(nest), pointers_of(emitter), tuple(emitter.sizes), nest.lanes, emitter.includes_check)
    if kind == "pointwise":
        if any(load.args for load in vs.loads([root for s in nest.kernel.statements for root in s.roots])):
            either = branches(nest, emitter, body)
            tasks = replace(tasks, conditions=either.conditions, derived=lines(either.derived))
        return CppPoints(head, tasks, lines(body))
    step = _one_step(nest) if nest.one_step else None
    found = (head, tasks, lines(body), row_passes, lines(rows), nest.vertical, row_split, share, step)
    return CppScans(*found, scan_split) if kind == "scan" else CppRows(*found)


@dataclass(frozen=True, slots=True)
class FunctionHead:
    """Opens and closes a C++ function. `pointers` are names and element types, `checks`: it can find an index out of range."""

    name: str
    comments: tuple[str, ...]
    pointers: tuple[tuple[str, str], ...]
    sizes: tuple[str, ...]
    lanes: int
    checks: bool

    def __call__(self) -> str:
        comments = [f"// {line}" for line in self.comments]
        opened = f'extern "C" int {self.name}(void** ptrs, const int64_t* ints, int threads) {{'
        sizes = [f"  const int64_t {name} = ints[{k}];" for k, name in enumerate(self.sizes)]
        lanes = [f"  constexpr int L = {self.lanes};"] if self.lanes > 1 else []
        checks = ["  Flag failed;"] if self.checks else []
        return lines([*comments, opened, *read_pointers(self.pointers, "  "), *sizes, *lanes, *checks])

    def end(self) -> str:
        """The text that closes the function."""
        return f"  return {'failed.raised' if self.checks else '0'};\n}}"


def read_pointers(pointers: Iterable[tuple[str, str]], indent: str = "") -> list[str]:
    """Statements that read typed pointers from `ptrs`."""
    return [f"{indent}{kind}* const {name} = static_cast<{kind}*>(ptrs[{k}]);" for k, (name, kind) in enumerate(pointers)]


def pointers_of(emitter: Emitter) -> tuple[tuple[str, str], ...]:
    """The names and element types of what a kernel reads and writes."""
    return tuple((f"p_{clean(b)}", CPP_TYPES[emitter.graph.buffers[b].dtype].storage) for b in emitter.pointers)


@dataclass(frozen=True, slots=True)
class OuterLoops:
    """The loops whose points threads share: `digits` of a task's number, outermost first, and what they count to. A vector loop
    outside of rows is cut into blocks of `block` points, unless it is short."""

    flat: bool
    digits: tuple[tuple[str, Expr], ...]
    count: Expr
    block: int | None


def outer_loops(nest: Nest, sizes: Sizes) -> OuterLoops:
    """The loops outside of rows, and how a vector loop and a tiled one among them are cut."""
    loops = [v for v in nest.kernel.outer if v is not nest.vector and v is not nest.tile]
    flat = nest.vertical and not loops and not nest.kernel.inner and nest.tile is None
    blocks, block = _blocks(nest, sizes) if nest.vertical and not flat else (ix.ONE, None)
    strips = ix.ONE if nest.tile is None else ix.ceildiv(nest.tile.extent, TILE)
    digits = [(v.name, v.extent) for v in loops if v not in nest.inside]
    digits += [("strip", strips)] if nest.tile is not None else []
    digits += [("block", blocks)] if block is not None else []
    digits += [(v.name, v.extent) for v in loops if v in nest.inside]
    return OuterLoops(flat, tuple(digits), ix.product(v.extent for v in loops) * strips * blocks, block)


def task_loops(outer: OuterLoops, nest: Nest, emitter: Emitter, sizes: Sizes) -> Tasks:
    """The outer loops as text."""
    text = _Text(emitter)
    count, digits = text(outer.count), outer.digits
    decode, advance = _decode(digits, text), _advance(digits, text)
    tile = None if nest.tile is None else _tile_slot(nest.tile, text)
    turned = tuple(TurnedSlot(t.name, t.type, t.first, t.stride) for t in emitter.turned.values())
    walked = tuple(emitter.walked.values())
    vector = _vector_slot(nest, outer.block, text) if nest.vertical else None
    counter = digits[0][0] if len(digits) == 1 else "task"
    grain = _grain(nest, sizes, outer)
    shared = vector.extent if outer.flat and vector is not None else count
    few = shared.isdecimal() and int(shared) <= grain
    return Tasks(outer.flat, count, grain, counter, lines(decode), advance, "", vector, tile, turned, walked, few)


def with_prefetches(
    tasks: Tasks, body: list[str], sections: list[Section], nest: Nest, emitter: Emitter, sizes: Sizes
) -> tuple[Tasks, list[str]]:
    """The task loops and the body with what asks for memory in advance; the sections get theirs as well."""
    if tasks.flat and not any(isinstance(a, ix.Indirect) for place in _accesses(nest) for a in ix.free_atoms(place)):
        return replace(tasks, before=lines(emitter.task.lines)), body  # hardware prefetches such a run
    before, inside = pointed_prefetches(nest, emitter, sizes)
    prefetch_lines = [] if tasks.flat else [*run_prefetches(nest, emitter, sizes), *before]
    tasks = replace(tasks, before=lines([*emitter.task.lines, *prefetch_lines]))
    body = [*inside.pop(-1, ()), *body]  # of a nest of points, which has no sections
    for asked in (prefetches(nest, emitter, sizes), inside):
        for number, statements in asked.items():
            sections[number].body = [*statements, *sections[number].body]
    return tasks, body


def _row_buffers(nest: Nest, emitter: Emitter) -> list[str]:
    """Memory of a thread's own for rows that several sections read."""
    text = _Text(emitter)
    return [
        f"Row<{_row_type(emitter, b)}> hold_{row}({_row_size(nest, text)}); auto* const {row} = hold_{row}.data;"
        for b, row in emitter.rows.items()
    ]


def point_cost(nest: Nest) -> int:
    """Elementary operations of a point."""
    return max(1, sum(total_cost([s.value]) for s in nest.kernel.statements))


class _Text:
    """Prints expressions over sizes and notes the symbols that they need."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter

    def __call__(self, expr: Expr) -> str:
        return self.emitter._index(expr).scalar(expr)


def _blocks(nest: Nest, sizes: Sizes) -> tuple[Expr, int | None]:
    """How many tasks a vector outer loop is cut into, and how long each is (None: not cut)."""
    assert nest.vector is not None
    extent = nest.vector.extent
    block = max(nest.lanes, 64) if nest.kernel.inner else 16 * TILE if nest.tile is not None else BLOCK
    if sizes.of(extent) <= block:
        return ix.ONE, None
    return ix.ceildiv(extent, block), block


def _tile_slot(tile: Var, text: _Text) -> TileLoop:
    end = f"minimum_(strip * {TILE} + {TILE}, int64_t({text(tile.extent)}))"
    return TileLoop(tile.name, STRIP, f"strip * {TILE}", end, TILE)


def _decode(digits: Sequence[tuple[str, Expr]], text: _Text) -> list[str]:
    """Statements that turn the number `task` into loop variables, the last one fastest; none for a single variable, which is
    that number."""
    out: list[str] = []
    rest = "task"
    if len(digits) < 2:
        return out
    for k in range(len(digits) - 1, 0, -1):
        name, extent = digits[k]
        after = f"rest{k}"
        out.append(f"int64_t {name} = {rest} % ({text(extent)}), {after} = {rest} / ({text(extent)});")
        rest = after
    return [*out, f"int64_t {digits[0][0]} = {rest};"]


def _advance(digits: Sequence[tuple[str, Expr]], text: _Text) -> str:
    """The statement that goes on to the next task: divisions for every task would cost more than short rows do."""
    step = ""
    if len(digits) < 2:
        return step
    for k, (name, extent) in enumerate(digits):
        step = f"if (++{name} == {text(extent)}) {{ {name} = 0; {step} }}" if k else f"++{name};"
    return step


def _vector_slot(nest: Nest, block: int | None, text: _Text) -> VectorLoop:
    assert nest.vector is not None
    name, extent = nest.vector.name, text(nest.vector.extent)
    if block is None:
        return VectorLoop(name, extent, "0", extent)
    return VectorLoop(name, extent, f"block * {block}", f"minimum_(block * {block} + {block}, int64_t({extent}))")


def _share_slot(nest: Nest, emitter: Emitter, sizes: Sizes, outer: OuterLoops, grain: int) -> ShareSlot:
    """How rows are shared out, and what begins with zeros for each share; `grain` is that of rows."""
    kernel = nest.kernel
    assert kernel.share is not None
    count = sizes.of(kernel.share.extent)
    columns = ix.product(v.extent for v in kernel.inner)
    text = _Text(emitter)
    of_share = -(-grain * count // max(1, sizes.of(outer.count)))
    begins = [
        (emitter._pointer(s.outs[0]), text(kernel.share.expr() * columns)) for s in kernel.statements if s.kind == "column"
    ]
    zeros = [f"__builtin_memset({sums} + {first}, 0, sizeof(*{sums}) * ({text(columns)}));" for sums, first in begins]
    return ShareSlot(kernel.share.name, count, of_share, lines(zeros))


def _grain(nest: Nest, sizes: Sizes, outer: OuterLoops) -> int:
    """Tasks (or elements, when flat) per thread that make waking it worthwhile."""
    points = sizes.points(nest.kernel.outer) * sizes.points(nest.kernel.inner)
    per_task = max(1, points * point_cost(nest) // max(1, points if outer.flat else sizes.of(outer.count)))
    return max(1, WAKE // per_task)


def _row_type(emitter: Emitter, buffer: str) -> str:
    return CPP_TYPES[emitter.graph.buffers[buffer].dtype].storage


def _row_size(nest: Nest, text: _Text) -> str:
    count = ix.product(v.extent for v in nest.kernel.inner)
    return text(count * nest.lanes if nest.vertical else count)


def _one_step(nest: Nest) -> OneStep:
    assert nest.vector is not None
    extent = nest.vector.extent.as_int()
    return OneStep(nest.vector.name, "Full<L> w{}" if extent == nest.lanes else f"Tail<L> w{{{extent}}}")


def one_step_lines(nest: Nest) -> list[str]:
    """The vector loop's variable and width where rows are one vector; nothing where they have a loop."""
    if not nest.one_step:
        return []
    step = _one_step(nest)
    return [f"constexpr int64_t {step.name} = 0;", f"constexpr {step.width};"]


def row_passes(sections: list[Section], nest: Nest, emitter: Emitter) -> list[str]:
    """All walks over a row as one text."""
    passes = [_section_slot(one, nest, _Text(emitter)) for one in sections]
    return [text for one in passes for text in (one.before, one.loop, one.after) if text]


def _section_slot(section: Section, nest: Nest, text: _Text) -> SectionSlot:
    around = _Around((), ()) if nest.one_step else _inner_loops(nest, text, section.sums)
    return SectionSlot(lines(section.before), around.with_body(section.body), lines(section.body), lines(section.after))


@dataclass(frozen=True, slots=True)
class _Around:
    """Opening and closing lines of loops, outermost first and innermost first."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]

    def with_body(self, body: Sequence[str]) -> str:
        """The loops around their body."""
        opens = [f"{'  ' * k}{line}" for k, line in enumerate(self.opens)]
        inside = [f"{'  ' * len(self.opens)}{line}" for line in body]
        closes = [f"{'  ' * (len(self.closes) - k)}{line}" for k, line in enumerate(self.closes, 1)]
        return lines([*opens, *inside, *closes])


def _inner_loops(nest: Nest, text: _Text, sums: Mapping[str, str], share: Var | None = None) -> _Around:
    """Opening and closing lines of the inner loops; `share` is the loop that a thread runs only from `begin` to `end`. A long
    one is cut into blocks with sums of their own, so that errors do not grow with its length."""
    loops: list[str] = []
    closes: list[str] = []
    for v in nest.kernel.inner:
        lo, hi = ("begin", "end") if v is share else ("0", text(v.extent))
        block = SUM_BLOCK * (nest.lanes if v is nest.vector else 1)
        extent = v.extent.as_int()
        if sums and not loops and (extent is None or extent > 2 * block):
            starts = " ".join(f"const auto whole_{name} = {name}; {name} = {start};" for name, start in sums.items())
            loops += [f"for (int64_t block_{v.name} = {lo}; block_{v.name} < {hi}; block_{v.name} += {block}) {{", starts]
            closes += [" ".join(f"{name} = join_sum(whole_{name}, {name});" for name in sums), "}"]
            lo, hi = f"block_{v.name}", f"minimum_(block_{v.name} + {block}, int64_t({hi}))"
        if v is nest.vector:
            loops.append(f"vector_loop<L>({lo}, {hi}, [&](int64_t {v.name}, auto w) KGEN_INLINE {{")
            closes.insert(0, "});")
        else:
            loops.append(f"for (int64_t {v.name} = {lo}; {v.name} < {hi}; ++{v.name}) {{")
            closes.insert(0, "}")
    return _Around(tuple(loops), tuple(closes))


# ---- few long rows --------------------------------------------------------------------------------------------------


def _splits(nest: Nest, sections: list[Section], sizes: Sizes) -> bool:
    """Whether threads should share each row, or each set of columns that lanes reduce together: one section of reductions, few
    outer points, long rows."""
    kernel = nest.kernel
    if len(sections) != 1 or not kernel.inner or kernel.rows or kernel.share is not None:
        return False
    if any(s.inner and s.kind in ("scan", "scatter") for s in kernel.statements):
        return False
    if nest.vertical and not any(s.kind == "reduction" for s in kernel.statements):
        return False  # not few rows but one long column each
    width = nest.lanes if nest.vertical else 1
    return -(-sizes.points(kernel.outer) // width) < 8 and sizes.points(kernel.inner) * width >= SPLIT_ROW


def _split_slot(section: Section, nest: Nest, emitter: Emitter) -> RowSplit:
    """Accumulators become one partial result a thread; joining them in thread order keeps the result deterministic."""
    share, text = nest.kernel.inner[0], _Text(emitter)
    accumulators = [
        (line, line.split(" = ")[0].split()[-1] if " = " in line else line.rstrip(";").split()[-1])
        for line in section.before
        if _is_accumulator(line)
    ]
    around = _inner_loops(nest, text, section.sums, share)
    declare, keep, join = [line for line in section.before if not _is_accumulator(line)], list[str](), list[str]()
    for line, name in accumulators:
        start = line.split(" = ", 1)[1].rstrip(";") if " = " in line else f"{line.rsplit(' ', 1)[0]}{{}}"
        declare.append(f"ThreadPartials parts_{name}(threads, {start});")
        keep.append(f"parts_{name}.data[part] = {name};")
        join += [line, f"for (int part = 0; part < threads; ++part) {_join_call(name, nest, emitter)}"]
    before = [line for line, _ in accumulators]
    return RowSplit(
        lines(declare), text(share.extent), nest.lanes if share is nest.vector else 1, lines(before),
        around.with_body(section.body), lines(keep), lines(join), lines(section.after),
    )  # fmt: skip


def _splits_scan(nest: Nest, sections: list[Section], sizes: Sizes) -> bool:
    """Whether threads should share each scanned row: one section of scans along the lanes that do not need each other. Rows
    of multiplied floats are left whole: a share's own running product can over- or underflow where the running product does
    not."""
    kernel = nest.kernel
    inner = [s for s in kernel.statements if s.inner]
    scans = [s for s in inner if s.kind == "scan"]
    if len(sections) != 1 or nest.vector is None or nest.vertical or kernel.rows or not scans:
        return False
    if any(s.kind not in ("scan", "pointwise") for s in inner):
        return False
    if any(s.op == "prod" and s.value.dtype.is_floating_point for s in scans) or _depends(scans, inner):
        return False
    return sizes.points(kernel.outer) < 8 and sizes.points(kernel.inner) >= SPLIT_ROW


def _depends(scans: list[Statement], inner: list[Statement]) -> bool:
    """Whether a scan reads, perhaps through other statements, what a scan of the same row makes."""
    made: set[str] = set()
    for s in inner:
        reads = any(load.attr[0] in made for load in vs.loads([s.value]))
        if reads and s.kind == "scan":
            return True
        if reads or s.kind == "scan":
            made.update(s.outs)
    return False


def _scan_split_slot(section: Section, nest: Nest, emitter: Emitter, graph: ir.Graph) -> ScanSplit:
    """The row is walked twice: each thread scans its share for the total alone, then again from the total before it."""
    text = _Text(emitter)
    kernel = nest.kernel
    first = Emitter(replace(nest, kernel=replace(kernel, statements=_for_totals(kernel.statements))), graph)
    _, (totals,) = first.run()
    assert len(first.runnings) == len(emitter.runnings)
    emitter.made_names |= first.made_names
    share = kernel.inner[0]
    around = _inner_loops(nest, text, {}, share)
    return ScanSplit(
        lines(section.before), text(share.extent), nest.lanes if share is nest.vector else 1, lines(totals.before),
        around.with_body(totals.body), tuple(zip(first.runnings, emitter.runnings, strict=True)), tuple(emitter.runnings),
        around.with_body(section.body), lines(section.after),
    )  # fmt: skip


def _for_totals(statements: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """The scans of a kernel and what they need, without stores."""
    needed: set[str] = set()
    kept: list[Statement] = []
    for s in reversed(statements):
        if s.kind == "scan" or needed & set(s.outs):
            needed.update(load.attr[0] for load in vs.loads([s.value]))
            kept.append(replace(s, stored=(False,) * len(s.outs)))
    return tuple(reversed(kept))


def _is_accumulator(line: str) -> bool:
    return line.startswith(("auto acc_", "Welford<", "ArgExtreme<"))


def _join_call(name: str, nest: Nest, emitter: Emitter) -> str:
    op = emitter.accumulators[name]
    if op in ("welford", "argmax", "argmin"):
        return f"{name}.join(parts_{name}.data[part]);"
    return f"{name} = join_{op}({name}, parts_{name}.data[part]);"


def _comments(nest: Nest) -> tuple[str, ...]:
    """Provenance: operators, the user's lines, and the loops chosen."""
    return (*source_lines(nest.kernel.origins), loops_line(nest))


def loops_line(nest: Nest) -> str:
    outer, inner = (" ".join(f"{v.name}<{v.extent}" for v in loops) or "-" for loops in (nest.kernel.outer, nest.kernel.inner))
    return f"outer {outer} | inner {inner} | lanes: {nest.vector.name if nest.vector else 'none'} x {nest.lanes}"
