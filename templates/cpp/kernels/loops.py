"""From a loop nest to C++ text: fills the slots of the `pointwise`, `reduction` and `scan` templates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Expr, Var
from kgen.ir.plan import TILE, Kernel, Nest, Statement
from kgen.ir.sizes import Sizes
from kgen.ir.values import total_cost
from kgen.templates.cpp.codegen.emit import STRIP, Emitter, Section
from kgen.templates.cpp.codegen.prefetch import pointed_prefetches, prefetches, run_prefetches
from kgen.templates.cpp.codegen.table import CPP_TYPES
from kgen.templates.render import clean, render

FOLDER = Path(__file__).parent

# Waking a thread costs some microseconds: a share of work below this many elementary operations is not worth one.
WAKE = 131072
# A vector outer loop longer than this is cut into tasks, so that threads can share it.
BLOCK = 4096
# Rows longer than this, when there are too few to share, are themselves split among threads.
SPLIT_ROW = 16384
# Steps of a sum before its total is put aside: rounding errors grow with the length of a chain of additions.
SUM_BLOCK = 256


@dataclass(frozen=True, slots=True)
class CppKernel:
    """Rendered text and the calling convention: buffers in pointer order, size symbols in integer order. `names` are the
    identifiers that the text made up."""

    name: str
    text: str
    buffers: tuple[str, ...]
    sizes: tuple[str, ...]
    names: frozenset[str]


def render_kernel(nest: Nest, graph: ir.Graph, name: str) -> CppKernel:
    """The C++ function of one loop nest."""
    sizes = Sizes(graph.size_hints)
    emitter = Emitter(nest, graph)
    body, sections = emitter.run()
    split = _splits(nest, sections, sizes)
    slots = _slots(nest, emitter, body, sections, sizes, split)
    slots.name = name
    slots.scan_split = _scan_split_slot(sections[0], nest, emitter, graph) if _splits_scan(nest, sections, sizes) else None
    slots.comments = _comments(nest)
    slots.pointers = pointer_slots(emitter)
    slots.sizes = list(emitter.sizes)
    slots.checks = emitter.includes_check
    text = render(FOLDER, _template(nest.kernel), k=slots)
    parts = {f"parts_{n}" for n in (*emitter.accumulators, *emitter.runnings)}
    names = emitter.made_names | parts | {f"whole_{n}" for n in emitter.accumulators} | set(emitter.sizes)
    return CppKernel(name, text, tuple(emitter.pointers), tuple(emitter.sizes), frozenset(names))


def pointer_slots(emitter: Emitter) -> list[SimpleNamespace]:
    types = {b: CPP_TYPES[emitter.graph.buffers[b].dtype].storage for b in emitter.pointers}
    return [SimpleNamespace(name=f"p_{clean(b)}", type=kind) for b, kind in types.items()]


def point_slots(nest: Nest, emitter: Emitter, sizes: Sizes) -> SimpleNamespace:
    """What a nest without inner loops fills in, to be run from one task to another. A flat one has a task for each vector."""
    body, _ = emitter.run()
    slots = _slots(nest, emitter, body, [], sizes, False)
    if slots.flat:
        assert nest.vector is not None
        slots.task_count = ix.ceildiv(nest.vector.extent, nest.lanes)
    slots.point_cost = _point_cost(nest)
    slots.loops = loops_line(nest)
    return slots


def _template(kernel: Kernel) -> str:
    if any(s.kind == "scan" and s.inner for s in kernel.statements):
        return "scan.cpp.jinja"
    return "reduction.cpp.jinja" if kernel.inner else "pointwise.cpp.jinja"


def _slots(
    nest: Nest, emitter: Emitter, body: list[str], sections: list[Section], sizes: Sizes, split: bool
) -> SimpleNamespace:
    """Everything a template asks for."""
    loops = [v for v in nest.kernel.outer if v is not nest.vector and v is not nest.tile]
    vector_outer = nest.vertical
    flat = vector_outer and not loops and not nest.kernel.inner and nest.tile is None
    text = _Text(emitter)
    blocks, block = _blocks(nest, sizes) if vector_outer and not flat else (ix.ONE, None)
    strips = ix.ONE if nest.tile is None else ix.ceildiv(nest.tile.extent, TILE)
    tasks = ix.product(v.extent for v in loops) * strips * blocks
    slots = SimpleNamespace(
        lanes=nest.lanes, flat=flat, vertical=vector_outer, body=body, split=None, task_body=emitter.task.lines
    )
    slots.tasks, slots.task_count = text(tasks), tasks
    digits = [(v.name, v.extent) for v in loops]
    digits += [("strip", strips)] if nest.tile is not None else []
    digits += [("block", blocks)] if block is not None else []
    slots.counter = digits[0][0] if len(digits) == 1 else "task"
    slots.decode = _decode(digits, text)
    slots.advance = _advance(digits, text)
    slots.tile = None if nest.tile is None else _tile_slot(nest.tile, text)
    slots.turned, slots.walked = list(emitter.turned.values()), list(emitter.walked.values())
    slots.vector = _vector_slot(nest, block, text) if vector_outer else None
    slots.grain = _grain(nest, sizes, flat, tasks)
    slots.share = None if nest.kernel.share is None else _share_slot(nest, emitter, sizes, slots)
    slots.rows = [
        f"Row<{_row_type(emitter, b)}> hold_{row}({_row_size(nest, text)}); auto* const {row} = hold_{row}.data;"
        for b, row in emitter.rows.items()
    ]
    slots.one_step = _one_step_slot(nest) if nest.one_step else None
    before, inside = pointed_prefetches(nest, emitter, sizes)
    if not flat:
        slots.task_body = [*slots.task_body, *run_prefetches(nest, emitter, sizes), *before]
    slots.body = [*inside.pop(-1, ()), *body]  # of a nest of points, which has no sections
    for asked in (prefetches(nest, emitter, sizes), inside):
        for number, lines in asked.items():
            sections[number].body = [*lines, *sections[number].body]
    slots.sections = [_section_slot(s, nest, text) for s in sections]
    if split:
        slots.split = _split_slot(sections[0], nest, emitter, text)
    return slots


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


def _tile_slot(tile: Var, text: _Text) -> SimpleNamespace:
    end = f"minimum_(strip * {TILE} + {TILE}, int64_t({text(tile.extent)}))"
    return SimpleNamespace(name=tile.name, begin=STRIP, lo=f"strip * {TILE}", hi=end, length=TILE)


def _decode(digits: list[tuple[str, Expr]], text: _Text) -> list[str]:
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


def _advance(digits: list[tuple[str, Expr]], text: _Text) -> str:
    """The statement that goes on to the next task: divisions for every task would cost more than short rows do."""
    step = ""
    if len(digits) < 2:
        return step
    for k, (name, extent) in enumerate(digits):
        step = f"if (++{name} == {text(extent)}) {{ {name} = 0; {step} }}" if k else f"++{name};"
    return step


def _vector_slot(nest: Nest, block: int | None, text: _Text) -> SimpleNamespace:
    assert nest.vector is not None
    extent = text(nest.vector.extent)
    if block is None:
        return SimpleNamespace(name=nest.vector.name, extent=extent, lo="0", hi=extent)
    return SimpleNamespace(
        name=nest.vector.name,
        extent=extent,
        lo=f"block * {block}",
        hi=f"minimum_(block * {block} + {block}, int64_t({extent}))",
    )


def _share_slot(nest: Nest, emitter: Emitter, sizes: Sizes, slots: SimpleNamespace) -> SimpleNamespace:
    """How rows are shared out, and what begins with zeros for each share."""
    kernel = nest.kernel
    assert kernel.share is not None
    count = sizes.of(kernel.share.extent)
    columns = ix.product(v.extent for v in kernel.inner)
    text = _Text(emitter)
    grain = -(-slots.grain * count // max(1, sizes.of(slots.task_count)))
    begins = [
        (emitter._pointer(s.outs[0]), text(kernel.share.expr() * columns)) for s in kernel.statements if s.kind == "column"
    ]
    zeros = [f"__builtin_memset({sums} + {first}, 0, sizeof(*{sums}) * ({text(columns)}));" for sums, first in begins]
    return SimpleNamespace(name=kernel.share.name, count=count, grain=grain, zeros=zeros)


def _grain(nest: Nest, sizes: Sizes, flat: bool, tasks: Expr) -> int:
    """Tasks (or elements, when flat) per thread that make waking it worthwhile."""
    per_point = _point_cost(nest)
    points = sizes.points(nest.kernel.outer) * sizes.points(nest.kernel.inner)
    per_task = max(1, points * per_point // max(1, points if flat else sizes.of(tasks)))
    return max(1, WAKE // per_task)


def _point_cost(nest: Nest) -> int:
    return max(1, sum(total_cost([s.value]) for s in nest.kernel.statements))


def _row_type(emitter: Emitter, buffer: str) -> str:
    return CPP_TYPES[emitter.graph.buffers[buffer].dtype].storage


def _row_size(nest: Nest, text: _Text) -> str:
    count = ix.product(v.extent for v in nest.kernel.inner)
    return text(count * nest.lanes if nest.vertical else count)


def _one_step_slot(nest: Nest) -> SimpleNamespace:
    assert nest.vector is not None
    extent = nest.vector.extent.as_int()
    return SimpleNamespace(name=nest.vector.name, width="Full<L> w{}" if extent == nest.lanes else f"Tail<L> w{{{extent}}}")


def _section_slot(section: Section, nest: Nest, text: _Text) -> SimpleNamespace:
    loops, closes = ([], []) if nest.one_step else _inner_loops(nest, text, section.sums)
    return SimpleNamespace(before=section.before, body=section.body, after=section.after, loops=loops, closes=closes)


def _inner_loops(nest: Nest, text: _Text, sums: Mapping[str, str], share: Var | None = None) -> tuple[list[str], list[str]]:
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
    return loops, closes


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


def _split_slot(section: Section, nest: Nest, emitter: Emitter, text: _Text) -> SimpleNamespace:
    """Accumulators become one partial result a thread; joining them in thread order keeps the result deterministic."""
    share = nest.kernel.inner[0]
    accumulators = [
        (line, line.split(" = ")[0].split()[-1] if " = " in line else line.rstrip(";").split()[-1])
        for line in section.before
        if _is_accumulator(line)
    ]
    kept = [line for line in section.before if not _is_accumulator(line)]
    loops, closes = _inner_loops(nest, text, section.sums, share)
    declare, keep, join = list(kept), [], []
    for line, name in accumulators:
        start = line.split(" = ", 1)[1].rstrip(";") if " = " in line else f"{line.rsplit(' ', 1)[0]}{{}}"
        declare.append(f"Partials parts_{name}(threads, {start});")
        keep.append(f"parts_{name}.data[part] = {name};")
    for line, name in accumulators:
        join.append(line)
        operation = _join_call(name, nest, emitter)
        join.append(f"for (int part = 0; part < threads; ++part) {operation}")
    step = nest.lanes if share is nest.vector else 1
    return SimpleNamespace(
        declare=declare, extent=text(share.extent), step=step, before=[line for line, _ in accumulators], loops=loops,
        closes=closes, section=section.body, keep=keep, join=join, after=section.after,
    )  # fmt: skip


def _splits_scan(nest: Nest, sections: list[Section], sizes: Sizes) -> bool:
    """Whether threads should share each scanned row: one section of scans along the lanes that do not need each other. Products
    of floats are left whole: a share's own product can over- or underflow where the running product does not."""
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


def _scan_split_slot(section: Section, nest: Nest, emitter: Emitter, graph: ir.Graph) -> SimpleNamespace:
    """The row is walked twice: each thread scans its share for the total alone, then again from the total before it."""
    text = _Text(emitter)
    kernel = nest.kernel
    first = Emitter(replace(nest, kernel=replace(kernel, statements=_for_totals(kernel.statements))), graph)
    _, (totals,) = first.run()
    assert len(first.runnings) == len(emitter.runnings)
    emitter.made_names |= first.made_names
    share = kernel.inner[0]
    loops, closes = _inner_loops(nest, text, {}, share)
    return SimpleNamespace(
        extent=text(share.extent), step=nest.lanes if share is nest.vector else 1, loops=loops, closes=closes,
        declare=section.before, body=section.body, after=section.after, running=emitter.runnings,
        totals=totals, totals_running=list(zip(first.runnings, emitter.runnings, strict=True)),
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


def _comments(nest: Nest) -> list[str]:
    """Provenance: operators, the user's lines, and the loops chosen."""
    return [*source_lines(nest.kernel.origins), loops_line(nest)]


def source_lines(origins: Iterable[ir.Origin]) -> list[str]:
    """The operators, then the user's lines."""
    origins = tuple(origins)
    names = dict.fromkeys(op for o in origins for op in o.operators)
    lines = [", ".join(names), *list(dict.fromkeys(o.line for o in origins if o.line))[:8]]
    return [line.replace("\n", " ").replace("\\", "/") for line in lines]


def loops_line(nest: Nest) -> str:
    outer, inner = (" ".join(f"{v.name}<{v.extent}" for v in loops) or "-" for loops in (nest.kernel.outer, nest.kernel.inner))
    return f"outer {outer} | inner {inner} | lanes: {nest.vector.name if nest.vector else 'none'} x {nest.lanes}"
