"""From a tiling to a Triton kernel: fills the slots of the `pointwise`, `reduction` and `scan` templates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from kgen.build.gpu_kernel import TritonKernel
from kgen.build.unit import canonical_text
from kgen.host.assemble import KernelCall
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.index import Expr, Var
from kgen.ir.plan import Kernel, Tiling
from kgen.templates.render import clean, render
from kgen.templates.triton.codegen.emit import Emitter
from kgen.templates.triton.codegen.table import TRITON_TYPES

FOLDER = Path(__file__).parent
# Alignment, in bytes, of what torch allocates and of what the host makes sure of for inputs.
ALIGNMENT = 16
# The compile option of kernels that may be launched while the kernel before still runs.
EARLY = ("launch_pdl", True)


def render_kernel(tiling: Tiling, graph: ir.Graph, name: str, exact: bool = False) -> KernelCall:
    """The Triton function of one tiling; `exact` as for `Emitter`."""
    emitter = Emitter(tiling, graph, exact)
    body, sections = emitter.run()
    ends = emitter.finish_columns()
    slots = _slots(tiling, emitter)
    slots.fixed, slots.ends = emitter.fixed.lines, ends
    slots.name, slots.body = name, body
    slots.comments = _comments(tiling)
    slots.sections = [
        SimpleNamespace(
            before=s.before, body=s.body, after=s.after, barrier=s.barrier,
            inner=_inner_axis(tiling, emitter) if s.body else [],
        )
        for s in sections
    ]  # fmt: skip
    sizes = tuple(emitter.sizes)
    slots.parameters = [f"p_{clean(b)}" for b in emitter.pointers] + [clean(s) for s in sizes]
    text = render(FOLDER, _template(tiling.kernel), k=slots)
    names = frozenset(emitter.made_names | {clean(s) for s in sizes})
    types = [TRITON_TYPES[graph.buffers[b].dtype].pointer for b in emitter.pointers] + ["i64"] * len(sizes)
    launch = TritonKernel(
        name, text, canonical_text(text.replace(name, "kernel"), names), tuple(types),
        tuple(aligned(graph.buffers[b]) for b in emitter.pointers) + (False,) * len(sizes),
        tiling.blocks.warps, tiling.blocks.stages, compile_options(emitter.checks),
    )  # fmt: skip
    return KernelCall(name, tuple(emitter.pointers), sizes, _grid(tiling), launch)


def _template(kernel: Kernel) -> str:
    if kernel.share is not None:
        return "columns.py.jinja"
    if any(s.kind == "scan" for s in kernel.statements):
        return "scan.py.jinja"
    return "reduction.py.jinja" if kernel.inner else "pointwise.py.jinja"


def compile_options(checks: bool, contracts: bool = False) -> tuple[tuple[str, object], ...]:
    """For Triton's compiler; `checks`: the kernel traps where an index is out of range; `contracts`: a*b+c may be rounded once,
    where eager rounds twice. All kernels wait for the one before (`lib.wait_for_previous`), so they may be launched early."""
    plain = (("enable_fp_fusion", contracts), EARLY)
    return (*plain, ("debug", True), ("sanitize_overflow", False)) if checks else plain


def launched_in_turn(kernel: TritonKernel) -> TritonKernel:
    """The kernel, launched when the one before has ended."""
    return replace(kernel, options=tuple(one for one in kernel.options if one != EARLY))


def aligned(buffer: ir.Buffer) -> bool:
    """Whether the first element lies at a multiple of ALIGNMENT: an own storage does, the host sees to inputs."""
    offset = buffer.offset if isinstance(buffer.offset, int) else buffer.offset.as_int()
    return offset is not None and offset * buffer.dtype.itemsize % ALIGNMENT == 0


def _grid(tiling: Tiling) -> tuple[Expr, Expr, Expr]:
    if tiling.kernel.share is not None:
        return tiling.kernel.share.extent, ix.ONE, ix.ONE
    x = ix.ceildiv(ix.product(v.extent for v in tiling.x), tiling.blocks.x)
    y = ix.ceildiv(ix.product(v.extent for v in tiling.y), tiling.blocks.y)
    return x * y, ix.ONE, ix.ONE


def _slots(tiling: Tiling, emitter: Emitter) -> SimpleNamespace:
    blocks = [("XBLOCK", tiling.blocks.x)]
    if tiling.y:
        blocks.append(("YBLOCK", tiling.blocks.y))
    if tiling.kernel.inner:
        blocks.append(("RBLOCK", tiling.blocks.r))
    slots = SimpleNamespace(blocks=blocks, axes=program_axes(tiling, emitter), persistent=tiling.persistent)
    slots.inner = _inner_axis(tiling, emitter) if tiling.kernel.inner and tiling.persistent else []
    slots.length = emitter.text(ix.product(v.extent for v in tiling.kernel.inner))
    share = tiling.kernel.share
    if share is not None:
        rows = emitter.text(ix.product(v.extent for v in tiling.x))
        slots.share, slots.program = share.name, "tl.program_id(0)" + (".to(tl.int64)" if tiling.wide else "")
        slots.range = f"{share.name} * XBLOCK, {rows}, {share.extent} * XBLOCK, num_stages={tiling.blocks.stages}"
    return slots


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
    return _axis("r", tiling.kernel.inner, start, "[None, :]", tiling, emitter)


def _axis(letter: str, loops: tuple[Var, ...], start: str, tail: str, tiling: Tiling, emitter: Emitter) -> list[str]:
    index = f"{letter}i"
    begin = "" if start == "0" else f"{start} + "
    wide = ".to(tl.int64)" if tiling.wide and letter == "r" else ""  # program axes begin with a wide number
    lines = [f"{index} = {begin}tl.arange(0, {letter.upper()}BLOCK){wide}{tail}"]
    if letter in emitter.masked():
        lines.append(f"in_{letter} = {index} < {emitter.text(ix.product(v.extent for v in loops))}")
    divisor = ix.ONE
    for v in reversed(loops):
        if v in emitter.variables:
            quotient = index if divisor == 1 else f"({index} // ({emitter.text(divisor)}))"
            rest = "" if v is loops[0] else f" % ({emitter.text(v.extent)})"
            lines.append(f"{v.name} = {quotient}{rest}")
        divisor = divisor * v.extent
    return lines


def _comments(tiling: Tiling) -> list[str]:
    return [*source_lines(tiling.kernel.origins), loop_line(tiling)]


def source_lines(origins: tuple[ir.Origin, ...]) -> list[str]:
    """Operators and the user's lines."""
    lines = [", ".join(dict.fromkeys(op for o in origins for op in o.operators))]
    lines += list(dict.fromkeys(o.line for o in origins if o.line))[:8]
    return [line.replace("\n", " ") for line in lines]


def loop_line(tiling: Tiling) -> str:
    """The tiling, for people."""

    def loops(items: tuple[Var, ...]) -> str:
        return " ".join(f"{v.name}<{v.extent}" for v in items) or "-"

    inner = tiling.kernel.inner
    rows = f" | r {loops(inner)}{' in registers' if tiling.persistent else ''}" if inner else ""
    return f"x {loops(tiling.x)}{f' | y {loops(tiling.y)}' if tiling.y else ''}{rows}"
