"""Rows of a GPU library's matmuls begin at multiples of 16 bytes: its fast kernels load and store so many at once.

    before   y = f(x);  c = mm(y, w)        y, w: rows of 2050 and 845 numbers of 2 bytes
    after    y has rows of 2056 numbers;  w' = w in rows of 848;  c = mm(y, w')

What only kernels and such calls touch has longer rows, at no cost: operands in any case, and results of matmuls that no
template has. Of other operands, such as inputs, the call reads a copy where that takes less time than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kgen.cost import model
from kgen.device import LINE, Device, is_rounded
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Sizes
from kgen.scheduler.analysis.memo import memoised_for
from kgen.scheduler.options import Options
from kgen.scheduler.protocol import Attempt, Candidate, Changes, Draft, Transform
from kgen.verdict import OperatorCall, Outcome, Reason, Verdict

# Which arguments of a call are the operands of a matmul, and calls that write their result with any strides.
OPERANDS: dict[object, tuple[int, ...]] = {
    torch.ops.aten.mm: (0, 1),
    torch.ops.aten.bmm: (0, 1),
    torch.ops.aten.addmm: (1, 2),
    torch.ops.aten.baddbmm: (1, 2),
    torch.ops.aten._addmm_activation: (1, 2),
}
ANY_STRIDES = (torch.ops.aten.mm, torch.ops.aten.bmm)
# Bytes of a load, the fewest of a row of which longer ones waste little, and those of a row that begins at cache lines.
LOAD, SHORTEST_ROW, LINES_OF_ROW = 16, 128, 8 * LINE
# What is left of the library's rate on float32 numbers, rounded to TF32, whose rows begin elsewhere (H100, bench.untuned:
# 2,001 x 2,001 x 256 in 24 us and 16, spectra of 12,736 x 257 x 400 in 48 and 29).
UNALIGNED_TF32 = 0.55
# How much faster a call has to be estimated with its copies, and the time of a copy by itself in passes of its bytes.
WORTH, TRIPS = 1.1, 1.5
# How much longer kernels take that touch longer rows, whose points are no one loop any more.
BROKEN_LOOP = 0.3
# The role of such copies.
COPY = "library_strides"
# The setting of a call: the positions of its arguments that are copied, and RESULT where that has longer rows.
Positions = tuple[int, ...]
RESULT = -1


class LibraryStrides(Transform):
    """Gives operands and results of the library's matmuls rows that begin at multiples of 16 bytes."""

    name = "library strides"

    def prepare(self, graph: ir.Graph, options: Options) -> None:
        if options.copies:
            _lengthen_rows(graph, lambda out: options.device(graph, out))

    def settle(self, attempt: Attempt) -> Changes:
        known = attempt.decisions.settled(self.name, tuple)
        graph, options = attempt.graph, attempt.options
        asked = [node for node in _calls(attempt.draft) if node.out not in known] if options.copies else []
        asked = [node for node in asked if _is_concerned(node, graph, lambda out: options.device(graph, out))]
        longer = _with_longer_rows(graph, [node for node in graph.nodes if ir.is_contraction(node)]) if asked else {}
        found = {
            Candidate(self.name, node.out): chosen_positions(graph, node, options.device(graph, node.out), node.out in longer)
            for node in asked
        }
        return Changes(found) if any(found.values()) else Changes()

    def apply(self, draft: Draft) -> None:
        known: Mapping[str, Positions] = draft.decisions.settled(self.name, tuple)
        nodes: list[ir.Node] = []
        made: set[str] = set()
        for node in draft.nodes:
            positions = known.get(node.out, ()) if ir.is_contraction(node) and node.vendor is not None else ()
            if positions and ir.is_contraction(node):
                if RESULT in positions:
                    draft.graph.buffers[node.out] = _with_longer_rows(draft.graph, [node])[node.out]
                copies, node = _with_copies(draft.graph, node, positions)
                nodes += [copy for copy in copies.values() if copy.out not in made]
                made.update(copies)
            nodes.append(node)
        draft.nodes = nodes

    def report(self, attempt: Attempt) -> list[Verdict]:
        known: Mapping[str, Positions] = attempt.decisions.settled(self.name, tuple)
        calls = [node for node in _calls(attempt.draft) if known.get(node.out)]
        pairs = [(arg.buffer, node.out) for node in calls for k, arg in operands(node.vendor) if k in known[node.out]]
        return [Verdict(name, out, Outcome.STORED, Reason.ROWS_IN_LINES) for name, out in dict.fromkeys(pairs)]


def _calls(draft: Draft) -> list[ir.Contraction]:
    """The matmuls that the library computes, as they are without copies."""
    left = [node for node in draft.before if ir.is_contraction(node) and node.out not in draft.taken]
    return [node for node in left if is_matmul(node)]


def is_matmul(node: ir.Contraction) -> bool:
    """Whether the library's call for a contraction multiplies matrices as they are in memory."""
    return not node.windowed and node.shared_call is None and bool(operands(node.vendor))


def operands(call: ir.Extern | None) -> list[tuple[int, ir.TensorArg]]:
    """The matrices that a call multiplies, with their positions among its arguments."""
    positions = () if call is None else OPERANDS.get(getattr(call.target, "overloadpacket", None), ())
    return [(k, arg) for k in positions if call is not None and isinstance(arg := call.args[k], ir.TensorArg)]


# ---- where rows begin -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Matrix:
    """How a call reads an operand: rows begin at multiples of so many bytes, at most a LOAD. The library reads a copy of its
    own where no dimension has its elements side by side."""

    aligned: int
    is_copied: bool = False


def _steps(arg: ir.TensorArg, buffer: ir.Buffer) -> tuple[list[int], int] | None:
    """Elements from one to the next along each loop of an operand, and up to the first one; None where sizes say."""
    assert buffer.strides is not None
    linear = ix.linearize(arg.index, buffer.strides, buffer.offset)
    steps = [ix.stride_of(linear, v) for v in arg.vars]
    numbers = [None if step is None else step.as_int() for step in steps]
    if any(v.extent.as_int() is None for v in arg.vars) or None in numbers:
        return None
    rest = linear
    for v, step in zip(arg.vars, numbers, strict=True):
        rest = rest - v.expr() * (step or 0)
    start = rest.as_int()
    return None if start is None else ([step or 0 for step in numbers], start)


def _matrix(arg: ir.TensorArg, graph: ir.Graph) -> _Matrix | None:
    buffer = graph.buffers[arg.buffer]
    found = _steps(arg, buffer)
    if found is None:
        return None
    steps, start = found
    lengths = [v.extent.as_int() or 1 for v in arg.vars]
    long = [step for step, length in zip(steps, lengths, strict=True) if length > 1]
    if 1 not in long[-2:] and len(long) > 1:
        return _Matrix(math.gcd(LOAD, lengths[-1] * buffer.dtype.itemsize), True)
    return _Matrix(math.gcd(LOAD, *(step * buffer.dtype.itemsize for step in (start, *long) if step != 1)))


def _result_aligned(node: ir.Contraction, graph: ir.Graph) -> int | None:
    """The same of a call's result."""
    buffer = graph.buffers[node.out]
    steps = [s.as_int() for s, size in zip(buffer.strides or (), buffer.sizes, strict=True) if size != 1]
    if buffer.strides is None or None in steps:
        return None
    return math.gcd(LOAD, *((step or 0) * buffer.dtype.itemsize for step in steps if step != 1))


# ---- what it costs ----------------------------------------------------------------------------------------------------


def _seconds(node: ir.Contraction, graph: ir.Graph, device: Device, aligned: int) -> float:
    """The time of a call, roughly, by where the rows of its operands and result begin."""
    sizes, kind = Sizes(graph.size_hints), graph.buffers[node.out].dtype
    share = (
        model.ALIGNED_SHARE_OF_HALVES[aligned] if kind.itemsize == model.HALF else 1.0 if aligned == LOAD else UNALIGNED_TF32
    )
    compute = 2 * sizes.points((*node.out_vars, *node.reduced)) / device.rate(kind) / share / model.LIBRARY_RATE["cuda"]
    moved = sizes.points(node.out_vars) + sum(sizes.points(arg.vars) for _, arg in operands(node.vendor))
    streaming = moved * kind.itemsize / device.bandwidth / model.STREAM_RATE / model.STREAMED_SHARE[aligned]
    return max(compute, streaming)


def _is_concerned(node: ir.Node, graph: ir.Graph, device: Callable[[str], Device]) -> bool:
    """Whether a node is a matmul of 16-bit numbers or TF32 that a GPU's library may compute."""
    if not ir.is_contraction(node) or not is_matmul(node) or device(node.out).kind != "cuda":
        return False
    kind = graph.buffers[node.out].dtype
    same = all(arg.dtype is kind for _, arg in operands(node.vendor))
    return same and kind.is_floating_point and (kind.itemsize == model.HALF or is_rounded(kind))


def chosen_positions(graph: ir.Graph, node: ir.Contraction, device: Device, is_free: bool) -> Positions:
    """The operands of a call that it had better read from copies, by their positions, and its result if that `is_free` to have
    longer rows and has to."""
    found = {k: (one, arg) for k, arg in operands(node.vendor) if (one := _matrix(arg, graph)) is not None}
    result = _result_aligned(node, graph)
    if len(found) < len(operands(node.vendor)) or result is None or (result != LOAD and not is_free):
        return ()
    copied = {k: arg for k, (one, arg) in found.items() if one.is_copied or one.aligned < LOAD}
    if not all(_may_copy(arg, graph) for arg in copied.values()):
        return ()
    own = sum(_copy_seconds(arg, graph, device, False) for one, arg in found.values() if one.is_copied)
    now = own + _seconds(node, graph, device, min(result, *(one.aligned for one, _ in found.values())))
    then = _seconds(node, graph, device, LOAD) + sum(_copy_seconds(arg, graph, device, True) for arg in copied.values())
    positions = (*copied, *(() if result == LOAD else (RESULT,)))
    return positions if then * WORTH < now else ()


def _copy_seconds(arg: ir.TensorArg, graph: ir.Graph, device: Device, fuses: bool) -> float:
    """The time of a copy: what a kernel makes it writes a second time where that `fuses`."""
    sizes, buffer = Sizes(graph.size_hints), graph.buffers[arg.buffer]
    moved = sizes.points(arg.vars) * buffer.dtype.itemsize / device.bandwidth / model.STREAM_RATE
    makers = {out for node in graph.nodes if not ir.is_call(node) and not ir.is_template_node(node) for out in ir.outs(node)}
    whole = sizes.points(arg.vars) == sizes.of(ix.product(buffer.sizes))
    return moved if fuses and whole and arg.buffer in makers else TRIPS * moved + model.LAUNCH["cuda"]


# ---- copies -----------------------------------------------------------------------------------------------------------


def _may_copy(arg: ir.TensorArg, graph: ir.Graph) -> bool:
    """Whether the elements of an operand are distinct, in rows of some length."""
    found = _steps(arg, graph.buffers[arg.buffer])
    if found is None:
        return False
    steps = [step for step, v in zip(found[0], arg.vars, strict=True) if v.extent != 1]
    return len(steps) > 1 and all(step > 0 for step in steps) and len(set(steps)) == len(steps)


def _with_copies(graph: ir.Graph, node: ir.Contraction, positions: Positions) -> tuple[dict[str, ir.Pointwise], ir.Contraction]:
    """What makes the copies, by their names, and the matmul that reads them. Buffers are added to the graph."""
    assert node.vendor is not None
    found = {arg: _copy(graph, node, arg) for k, arg in operands(node.vendor) if k in positions}
    args = {arg: read for arg, (_, read) in found.items()}

    def reading(call: ir.Extern | None) -> ir.Extern | None:
        made = dict(operands(call))
        return call and replace(call, args=tuple(args.get(made[k], a) if k in made else a for k, a in enumerate(call.args)))

    copied = memoised_for(
        node, ("library strides", *args.values()), lambda: replace(node, vendor=reading(node.vendor), fused=reading(node.fused))
    )
    return {copy.out: copy for copy, _ in found.values()}, copied


def _copy(graph: ir.Graph, node: ir.Contraction, arg: ir.TensorArg) -> tuple[ir.Pointwise, ir.TensorArg]:
    """A copy of an operand with its loops in the order of its strides, and how the call reads it. Operands that are the same
    elements have one copy."""
    found = _steps(arg, graph.buffers[arg.buffer])
    assert found is not None
    steps, start = found
    order = sorted(range(len(steps)), key=lambda k: -steps[k])
    form = "_".join(str(number) for number in (start, *(n for k in order for n in (steps[k], arg.vars[k].extent.as_int()))))
    name = ir.derived(graph, ir.Derived(arg.buffer, COPY, reader=form))
    source, sizes = graph.buffers[arg.buffer], tuple(arg.vars[k].extent for k in order)
    strides = _strides(sizes, range(len(sizes)), source.dtype)
    graph.buffers[name] = ir.Buffer(name, source.dtype, source.device, sizes, strides)
    loops = {arg.vars[k]: ix.var(f"d{d}", sizes[d]) for d, k in enumerate(order)}
    index = tuple(ix.substitute(e, {v: loop.expr() for v, loop in loops.items()}, {}) for e in arg.index)
    origin = replace(node.origin, calls=(OperatorCall("copy"),), parameters=())
    copy = ir.Pointwise(name, tuple(loops.values()), vs.load(arg.buffer, index, source.dtype), origin)
    return copy, replace(arg, buffer=name, index=tuple(arg.vars[k].expr() for k in order))


def _strides(sizes: Sequence[ix.Expr], order: Sequence[int], kind: torch.dtype) -> tuple[ix.Expr, ...]:
    """Strides of dimensions in that order, in rows that begin at multiples of 16 bytes, and long ones at cache lines."""
    length = sizes[order[-1]].as_int() or 1
    unit = (LINE if length * kind.itemsize >= LINES_OF_ROW else LOAD) // kind.itemsize
    strides, step = [ix.ONE] * len(sizes), ix.constant(-(-length // unit) * unit)
    for d in reversed(order[:-1]):
        strides[d], step = step, step * sizes[d]
    return tuple(strides)


# ---- longer rows ------------------------------------------------------------------------------------------------------


def _lengthen_rows(graph: ir.Graph, device: Callable[[str], Device]) -> None:
    """Gives operands that only kernels and matmuls touch longer rows, where matmuls gain more than kernels lose."""
    matmuls = [node for node in graph.nodes if ir.is_contraction(node) and _is_concerned(node, graph, device)]
    read = {arg.buffer for node in matmuls for _, arg in operands(node.vendor)}
    for name, longer in _with_longer_rows(graph, matmuls).items() if matmuls else ():
        touching = [node for node in matmuls if name == node.out or name in {arg.buffer for _, arg in operands(node.vendor)}]
        kernels = sum(name in (*ir.outs(node), *ir.reads(node)) for node in graph.nodes if not ir.is_contraction(node))
        lost = BROKEN_LOOP * kernels * Sizes(graph.size_hints).bytes(longer) / device(name).bandwidth
        if name in read and sum(_gain(node, graph, device(name)) for node in touching) > lost:
            graph.buffers[name] = longer


def _with_longer_rows(graph: ir.Graph, matmuls: Sequence[ir.Contraction]) -> dict[str, ir.Buffer]:
    """What the matmuls make or read that may have longer rows, with these."""
    every = [node for node in graph.nodes if ir.is_contraction(node)]
    found = {name: _longer(buffer, graph, every) for name, buffer in _own(graph, matmuls).items()}
    return {name: longer for name, longer in found.items() if longer is not None}


def _gain(node: ir.Contraction, graph: ir.Graph, device: Device) -> float:
    """Seconds that a call takes less once all that it touches begins at multiples of 16 bytes."""
    read = [_matrix(arg, graph) for _, arg in operands(node.vendor)]
    known = [one.aligned for one in read if one is not None]
    made = _result_aligned(node, graph)
    if made is None or len(known) < len(read):
        return 0.0
    return _seconds(node, graph, device, min(made, *known)) - _seconds(node, graph, device, LOAD)


def _own(graph: ir.Graph, matmuls: Iterable[ir.Contraction]) -> dict[str, ir.Buffer]:
    """Buffers in memory of their own that nobody sees, made by kernels or by those of the matmuls that write any strides, and
    read by kernels and as operands of matmuls."""
    known = {node.out for node in matmuls if is_matmul(node)}
    made = {out for node in graph.nodes if _may_make(node, known) for out in ir.outs(node)}
    kept = {*ir.visible(graph), *(name for node in graph.nodes for name in _as_they_are(node))}
    kept |= {name for buffer in graph.buffers.values() if buffer.alias_of for name in (buffer.alias_of, buffer.name)}
    free = ((name, graph.buffers[name]) for name in sorted(made - kept))
    return {name: one for name, one in free if one.kind == "intermediate" and not (one.parts or one.offset)}


def _may_make(node: ir.Node, known: set[str]) -> bool:
    if isinstance(node, ir.Pointwise | ir.Reduction):
        return True
    call = node.vendor if ir.is_contraction(node) and node.out in known else None
    return call is not None and getattr(call.target, "overloadpacket", None) in ANY_STRIDES


def _as_they_are(node: ir.Node) -> Iterator[str]:
    """The buffers whose strides a node depends on: all tensors of a call but a matmul's operands, and of templates'
    operations."""
    if isinstance(node, ir.Scatter):
        yield from (node.target, node.out)
    call = ir.call_of(node)
    if ir.is_contraction(node):
        yield from (name for one in (node.vendor, node.fused) for name in _besides(one, is_matmul(node)))
        yield from ir.reads(node) if node.shared_call is not None else ()
    elif call is not None or ir.is_template_node(node):
        yield from (*ir.reads(node), *ir.outs(node), *_besides(call, False))


def _besides(call: ir.Extern | None, multiplies: bool) -> Iterator[str]:
    """What a contraction's call reads besides the operands of a matmul."""
    if call is not None:
        multiplied = dict(operands(call)) if multiplies else {}
        rest = [arg for k, arg in enumerate(call.args) if k not in multiplied]
        yield from (arg.buffer for arg in ir.tensor_args((*rest, call.kwargs)))


def _longer(buffer: ir.Buffer, graph: ir.Graph, matmuls: Iterable[ir.Contraction]) -> ir.Buffer | None:
    """The buffer with longer rows; None where they begin at multiples of 16 bytes, are short, or a call would not find the same
    elements by strides."""
    strides, lengths = [s.as_int() for s in buffer.strides or ()], [size.as_int() for size in buffer.sizes]
    if None in strides or None in lengths or len(strides) < 2 or 1 in lengths:
        return None
    order = sorted(range(len(strides)), key=lambda d: -(strides[d] or 0))
    row = (lengths[order[-1]] or 0) * buffer.dtype.itemsize
    if buffer.strides != _dense(buffer.sizes, order) or row % LOAD == 0 or row < SHORTEST_ROW:
        return None
    longer = replace(buffer, strides=_strides(buffer.sizes, order, buffer.dtype))
    read = (arg for node in matmuls for call in (node.vendor, node.fused) for _, arg in operands(call))
    return longer if all(_steps(arg, longer) for arg in read if arg.buffer == buffer.name) else None


def _dense(sizes: Sequence[ix.Expr], order: Sequence[int]) -> tuple[ix.Expr, ...]:
    strides, step = [ix.ONE] * len(sizes), ix.ONE
    for d in reversed(order):
        strides[d], step = step, step * sizes[d]
    return tuple(strides)
