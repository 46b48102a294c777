"""Loop kernels in Triton: the templates for points, rows, scans and rows with column sums, and what fills their slots."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass

from kgen.ir import index as ix
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.plan import Blocks, Tiling
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.rendered.kernel_call import KernelCall
from kgen.templates.contract import Config, knob, template
from kgen.templates.loop_contract import LoopKernel, LoopProblem, LoopTemplate, loops
from kgen.templates.loop_slots import SectionSlot, TritonColumns, TritonPoints, TritonRows
from kgen.templates.render import canonical_text, clean, lines, render_slots, source_lines
from kgen.templates.triton.codegen.backwards import in_order_of_memory
from kgen.templates.triton.codegen.emit import RUN, Emitter, Section
from kgen.templates.triton.codegen.launch import aligned, compile_options
from kgen.templates.triton.codegen.table import TRITON_TYPES

# Lines of all steps of a loop that are written one after the other.
MOST_LINES = 256
# Knobs that are no constants of the kernel: the launch has them.
OF_LAUNCH = ("WARPS", "STAGES")


@template(implements=loops("pointwise"), device="cuda", source="pointwise.py.jinja", name="triton_pointwise")
class Pointwise(LoopKernel):
    """Each program computes a tile of independent points."""

    XBLOCK, YBLOCK = knob(128, 256, 512, 1024), knob(16, 32, 64)
    WARPS = knob(1, 2, 4, 8)


@template(implements=loops("reduction"), device="cuda", source="reduction.py.jinja", name="triton_reduction")
class Reduction(LoopKernel):
    """Each program reduces XBLOCK rows, which registers hold or which it walks in steps of RBLOCK."""

    XBLOCK, RBLOCK = knob(1, 2, 4, 8, 16, 32), knob(512, 1024, 2048, 4096)
    WARPS, STAGES = knob(1, 2, 4, 8, 16), knob(1, 2, 3)


@template(implements=loops("scan"), device="cuda", source="scan.py.jinja", name="triton_scan")
class Scan(Reduction):
    """Each program scans XBLOCK rows in order."""


@template(implements=loops("column_reduction"), device="cuda", source="columns.py.jinja", name="triton_columns")
class ColumnReduction(LoopKernel):
    """Each program reduces a share of the rows, XBLOCK at a time, and keeps sums of all columns."""

    XBLOCK, WARPS, STAGES = knob(1, 2, 4, 8), knob(2, 4, 8, 16), knob(1, 2, 3)


def render_kernel(problem: LoopProblem, template: LoopTemplate, config: Config, name: str) -> KernelCall:
    """The Triton function of one kernel."""
    [given], graph = problem.under(config).tilings, problem.graph
    tiling, backwards = in_order_of_memory(given)
    emitter = Emitter(tiling, graph, problem.exact)
    emitter.backwards = backwards
    emitted = _Emitted(*emitter.run(), emitter.finish_columns(), emitter.fixed.lines)
    frame = _frame(tiling, emitter)
    sections = _sections(emitted.sections, frame, tiling, emitter)
    sizes = tuple(emitter.sizes)
    parameters = (*(f"p_{clean(b)}" for b in emitter.pointers), *map(clean, sizes))
    head = FunctionHead(name, _comments(tiling), parameters, _constants(tiling, config))
    slots = _slots(problem.kind, head, frame, emitted, sections)
    text = render_slots(template.source, "cuda", slots, config, problem)
    names = frozenset(emitter.made_names | {clean(s) for s in sizes})
    types = [TRITON_TYPES[graph.buffers[b].dtype].pointer for b in emitter.pointers] + ["i64"] * len(sizes)
    launch = TritonKernel(
        name, text, canonical_text(text.replace(name, "kernel"), names), tuple(types),
        tuple(aligned(graph.buffers[b]) for b in emitter.pointers) + (False,) * len(sizes),
        tiling.blocks.warps, tiling.blocks.stages, compile_options(emitter.checks),
    )  # fmt: skip
    return KernelCall(name, tuple(emitter.pointers), sizes, _grid(tiling), launch)


@dataclass(frozen=True, slots=True)
class FunctionHead:
    """Opens a Triton function, with what has to stand before it."""

    name: str
    comments: tuple[str, ...]
    parameters: tuple[str, ...]
    constants: tuple[tuple[str, object], ...] = ()

    def __call__(self) -> str:
        return f"{self.imports()}\n{self.open()}"

    def imports(self) -> str:
        """What stands before all functions."""
        comments = "\n# ".join(self.comments)
        library = "from kgen.templates.triton.device import library as lib"
        return f"# {comments}\nimport triton\nimport triton.language as tl\n{library}"

    def function(self) -> str:
        """The first lines of the function."""
        constants = [f"    {name}: tl.constexpr = {value}" for name, value in self.constants]
        return lines(["@triton.jit", f"def {self.name}({', '.join(self.parameters)}):", *constants])

    def open(self) -> str:
        """The text that opens the kernel. Every kernel waits for the one before, so it may be launched early."""
        return f"{self.function()}\n    lib.wait_for_previous()"

    def end(self) -> str:
        """Nothing closes a Triton function."""
        return ""


@dataclass(frozen=True, slots=True)
class _Emitted:
    """The statements of a kernel. What lasts over all blocks of rows begins in `sums`, and `ends` store it."""

    body: list[str]
    sections: list[Section]
    ends: list[str]
    sums: list[str]


@dataclass(frozen=True, slots=True)
class _Frame:
    """What stands around a kernel's statements. `row` is empty where rows are walked; `length` is that of a row."""

    indices: list[str]
    row: list[str]
    length: str
    share: str
    blocks: str


def _frame(tiling: Tiling, emitter: Emitter) -> _Frame:
    inner = tiling.kernel.inner
    indices = program_axes(tiling, emitter)
    row = _inner_axis(tiling, emitter) if inner and tiling.persistent else []
    length = emitter.text(ix.product(v.extent for v in inner))
    share = tiling.kernel.share
    if share is None:
        return _Frame(indices, row, length, "", "")
    rows = emitter.text(ix.product(v.extent for v in tiling.x))
    program = "tl.program_id(0)" + (".to(tl.int64)" if tiling.wide else "")
    blocks = f"{share.name} * XBLOCK, {rows}, {share.extent} * XBLOCK, num_stages={tiling.blocks.stages}"
    return _Frame(indices, row, length, f"{share.name} = {program}", blocks)


def row_passes(sections: list[Section], tiling: Tiling, emitter: Emitter) -> tuple[list[str], list[str]]:
    """The variables along rows that registers hold, and all walks over the rows as one text; neither of loops over points."""
    frame = _frame(tiling, emitter)
    passes = _sections(sections, frame, tiling, emitter)
    texts = [text for one in passes for text in (one.before, one.loop, one.after) if text]
    return frame.row, [line for text in texts for line in text.split("\n")]


def _sections(sections: list[Section], frame: _Frame, tiling: Tiling, emitter: Emitter) -> tuple[SectionSlot, ...]:
    return tuple(_section(one, _inner_axis(tiling, emitter) if one.body else [], frame, tiling) for one in sections)


def _section(section: Section, axis: list[str], frame: _Frame, tiling: Tiling) -> SectionSlot:
    before = ["tl.debug_barrier()", *section.before] if section.barrier else section.before
    loop = section.body
    if section.body and not tiling.persistent:
        inside = [f"    {line}" for line in (*axis, *section.body)]
        steps = "tl.static_range" if _is_written_out(tiling, len(inside)) else "range"
        loop = [f"for start in {steps}(0, {frame.length}, RBLOCK):", *inside]
    return SectionSlot(lines(before), lines(loop), lines(section.body), lines(section.after))


def _is_written_out(tiling: Tiling, lines: int) -> bool:
    """Whether the compiler writes the steps one after the other: of few short steps the loads need not wait for each other, and
    a point's loop variables are numbers."""
    length = ix.product(v.extent for v in tiling.kernel.inner).as_int() or 0
    return tiling.blocks.r == 1 and length > 0 and length * lines <= MOST_LINES


def _slots(kind: str, head: FunctionHead, frame: _Frame, emitted: _Emitted, sections: tuple[SectionSlot, ...]) -> TritonPoints:
    indices, body, row = lines(frame.indices), lines(emitted.body), lines(frame.row)
    if kind == "pointwise":
        return TritonPoints(head, indices, body)
    if kind == "column_reduction":
        sums, ends = lines(emitted.sums), lines(emitted.ends)
        return TritonColumns(head, indices, body, row, sections, frame.share, frame.blocks, sums, ends)
    return TritonRows(head, indices, body, row, sections)


def _constants(tiling: Tiling, config: Config) -> tuple[tuple[str, object], ...]:
    """The lengths of the tile's axes, and the author's own knobs."""
    blocks = {"XBLOCK": tiling.blocks.x, "YBLOCK": tiling.blocks.y, "RBLOCK": tiling.blocks.r}
    there = {"XBLOCK": True, "YBLOCK": bool(tiling.y), "RBLOCK": bool(tiling.kernel.inner)}
    own = ((name, value) for name, value in config.values if name not in (*blocks, *OF_LAUNCH))
    return (*((name, value) for name, value in blocks.items() if there[name]), *own)


def _grid(tiling: Tiling) -> tuple[Expr, Expr, Expr]:
    if tiling.kernel.share is not None:
        return tiling.kernel.share.extent, ix.ONE, ix.ONE
    x = ix.ceildiv(ix.product(v.extent for v in tiling.x), tiling.blocks.x)
    y = ix.ceildiv(ix.product(v.extent for v in tiling.y), tiling.blocks.y)
    return x * y, ix.ONE, ix.ONE


def program_axes(tiling: Tiling, emitter: Emitter, number: str = "tl.program_id(0)") -> list[str]:
    """The indices along its axes of the tile of program `number`, the masks of their ends, and the loop variables."""
    program = f"{number}.to(tl.int64)" if tiling.wide else number
    if tiling.kernel.share is not None:
        return _axis("x", tiling.x, "start", "[:, None]", tiling, emitter)
    if not tiling.y:
        tail = "[:, None]" if tiling.kernel.inner else ""
        return _axis("x", tiling.x, f"{program} * XBLOCK", tail, tiling, emitter)
    count = emitter.text(ix.ceildiv(ix.product(v.extent for v in tiling.x), tiling.blocks.x))
    lines = [f"program = {program}"]
    lines += _axis("y", tiling.y, f"program // ({count}) * YBLOCK", "[:, None]", tiling, emitter)
    return lines + _axis("x", tiling.x, f"program % ({count}) * XBLOCK", "[None, :]", tiling, emitter)


def _inner_axis(tiling: Tiling, emitter: Emitter) -> list[str]:
    start = "0" if tiling.persistent else "start"
    return [*_axis("r", tiling.kernel.inner, start, "[None, :]", tiling, emitter), *_runs(start, tiling, emitter)]


def _runs(start: str, tiling: Tiling, emitter: Emitter) -> list[str]:
    """The first points of runs along a row, where something is loaded once for each."""
    if not emitter.run_variables:
        return []
    begin, wide = "" if start == "0" else f"{start} + ", ".to(tl.int64)" if tiling.wide else ""
    made = [f"ri_run = {begin}tl.arange(0, RBLOCK // {RUN}){wide}[None, :] * {RUN}"]
    if "r" in emitter.masked():
        made.append(f"in_r_run = ri_run < {emitter.text(ix.product(v.extent for v in tiling.kernel.inner))}")
    return [*made, *_loop_variables("ri_run", tiling.kernel.inner, emitter.run_variables, "_run", emitter)]


# The most points that a load takes at a time, of a byte each. A mask that ends inside of a vector makes all loads scalars. With
# neighbours in one thread these would be a vector apart from thread to thread: a thread has as many as are masked together.
VECTOR, WORD = 16, 4


def _axis(letter: str, loops: tuple[Var, ...], start: str, tail: str, tiling: Tiling, emitter: Emitter) -> list[str]:
    index = f"{letter}i"
    begin = "" if start == "0" else f"{start} + "
    wide = ".to(tl.int64)" if tiling.wide and letter == "r" else ""  # program axes begin with a wide number
    lines = [f"{index} = {begin}tl.arange(0, {letter.upper()}BLOCK){wide}{tail}"]
    if letter in emitter.masked():
        length = ix.product(v.extent for v in loops)
        if not tail and (together := math.gcd(length.as_int() or VECTOR, VECTOR)) < VECTOR:
            points = max(together, _points_of_a_word(tiling.blocks))
            # or each of the runs were one that begins where a program does, and rows of 17 were stored as if they were aligned
            lines.append(f"{index} = tl.max_contiguous(tl.multiple_of({index}, {points}), {points})")
        lines.append(f"in_{letter} = {index} < {emitter.text(length)}")
    return lines + _loop_variables(index, loops, emitter.variables, "", emitter)


def _points_of_a_word(blocks: Blocks) -> int:
    """Neighbours that are as near as a word is long, by the vector's points that a thread has."""
    return max(1, blocks.x // (32 * blocks.warps) // (VECTOR // WORD))


def _loop_variables(index: str, loops: tuple[Var, ...], named: Container[Atom], suffix: str, emitter: Emitter) -> list[str]:
    """The loops' variables that some text names, from their common index."""
    lines, divisor = [], ix.ONE
    for v in reversed(loops):
        if v in named:
            quotient = index if divisor == 1 else f"({index} // ({emitter.text(divisor)}))"
            rest = "" if v is loops[0] else f" % ({emitter.text(v.extent)})"
            lines.append(f"{v.name}{suffix} = {quotient}{rest}")
        divisor = divisor * v.extent
    return lines


def _comments(tiling: Tiling) -> tuple[str, ...]:
    return (*source_lines(tiling.kernel.origins), loop_line(tiling))


def loop_line(tiling: Tiling) -> str:
    """The tiling, for people."""

    def loops(items: tuple[Var, ...]) -> str:
        return " ".join(f"{v.name}<{v.extent}" for v in items) or "-"

    inner = tiling.kernel.inner
    rows = f" | r {loops(inner)}{' in registers' if tiling.persistent else ''}" if inner else ""
    return f"x {loops(tiling.x)}{f' | y {loops(tiling.y)}' if tiling.y else ''}{rows}"
