"""Operands of a GPU library's matmuls whose rows begin in the middle of its loads: it reads copies whose rows do not.

    before   c = mm(x[:, 1:], w)        rows of 701 numbers of 2 bytes, read from the second one on
    after    x' = x[:, 1:] in rows of 704;  c = mm(x', w)

The call reads a copy where that takes less time than it saves. Where rows themselves are no whole number of loads, a copy is of
no use: the library chooses its kernels by the lengths of rows as well as by where they begin (H200, 2026-11-28: rows of 197,
845 and 2,050 numbers).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kgen.cost import model
from kgen.device import LINE, Device
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Sizes
from kgen.scheduler.analysis.memo import memoised_for
from kgen.scheduler.protocol import Attempt, Candidate, Changes, Draft, Transform
from kgen.verdict import OperatorCall, Outcome, Reason, Verdict

# Which arguments of a call are the operands of a matmul.
OPERANDS: dict[object, tuple[int, ...]] = {
    torch.ops.aten.mm: (0, 1),
    torch.ops.aten.bmm: (0, 1),
    torch.ops.aten.addmm: (1, 2),
    torch.ops.aten.baddbmm: (1, 2),
    torch.ops.aten._addmm_activation: (1, 2),
}
# Bytes of a load, and those of a row that begins at cache lines.
LOAD, LINES_OF_ROW = 16, 8 * LINE
# How much faster a call has to be estimated with its copies, and the time of a copy by itself in passes of its bytes.
WORTH, TRIPS = 1.1, 1.5
# The role of such copies.
COPY = "library_strides"
# The setting of a call: the positions of its arguments that are copied.
Positions = tuple[int, ...]


class LibraryStrides(Transform):
    """Gives the library's matmuls copies of operands whose rows begin in the middle of its loads."""

    name = "library strides"

    def settle(self, attempt: Attempt) -> Changes:
        known = attempt.decisions.settled(self.name, tuple)
        graph, options = attempt.graph, attempt.options
        asked = [node for node in _calls(attempt.draft) if node.out not in known] if options.copies else []
        asked = [node for node in asked if _is_concerned(node, graph, lambda out: options.device(graph, out))]
        found = {
            Candidate(self.name, node.out): chosen_positions(graph, node, options.device(graph, node.out)) for node in asked
        }
        return Changes(found) if any(found.values()) else Changes()

    def apply(self, draft: Draft) -> None:
        known: Mapping[str, Positions] = draft.decisions.settled(self.name, tuple)
        nodes: list[ir.Node] = []
        made: set[str] = set()
        for node in draft.nodes:
            positions = known.get(node.out, ()) if ir.is_contraction(node) and node.vendor is not None else ()
            if positions and ir.is_contraction(node):
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
    """How a call reads an operand: rows begin and end at multiples of so many bytes, at most a LOAD, and would in a copy. The
    library reads a copy of its own where no dimension has its elements side by side."""

    aligned: int
    in_copy: int
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
    long = [(step, length) for step, length in zip(steps, lengths, strict=True) if length > 1]
    size, row = buffer.dtype.itemsize, min(long, default=(1, 1))[1]
    in_copy = math.gcd(LOAD, row * size)
    if all(step != 1 for step, _ in long[-2:]) and len(long) > 1:
        return _Matrix(math.gcd(LOAD, lengths[-1] * size), in_copy, True)
    return _Matrix(math.gcd(in_copy, *(step * size for step in (start, *(step for step, _ in long)) if step != 1)), in_copy)


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
    rate = device.rate(kind) * model.ALIGNED_SHARE_OF_HALVES[aligned] * model.LIBRARY_RATE["cuda"]
    compute = 2 * sizes.points((*node.out_vars, *node.reduced)) / rate
    moved = sizes.points(node.out_vars) + sum(sizes.points(arg.vars) for _, arg in operands(node.vendor))
    streaming = moved * kind.itemsize / device.bandwidth / model.STREAM_RATE / model.STREAMED_SHARE[aligned]
    return max(compute, streaming)


def _is_concerned(node: ir.Node, graph: ir.Graph, device: Callable[[str], Device]) -> bool:
    """Whether a node is a matmul of 16-bit numbers that a GPU's library may compute."""
    if not ir.is_contraction(node) or not is_matmul(node) or device(node.out).kind != "cuda":
        return False
    kind = graph.buffers[node.out].dtype
    same = all(arg.dtype is kind for _, arg in operands(node.vendor))
    return same and kind.is_floating_point and kind.itemsize == model.HALF


def chosen_positions(graph: ir.Graph, node: ir.Contraction, device: Device) -> Positions:
    """The operands of a call that it had better read from copies, by their positions."""
    found = {k: (one, arg) for k, arg in operands(node.vendor) if (one := _matrix(arg, graph)) is not None}
    result = _result_aligned(node, graph)
    if len(found) < len(operands(node.vendor)) or result is None:
        return ()
    copied = {k: arg for k, (one, arg) in found.items() if one.is_copied or one.aligned < one.in_copy}
    if not all(_may_copy(arg, graph) for arg in copied.values()):
        return ()
    own = sum(_copy_seconds(arg, graph, device, False) for one, arg in found.values() if one.is_copied)
    now = own + _seconds(node, graph, device, min(result, *(one.aligned for one, _ in found.values())))
    copying = sum(_copy_seconds(arg, graph, device, True) for arg in copied.values())
    then = copying + _seconds(node, graph, device, min(result, *(one.in_copy for one, _ in found.values())))
    return tuple(copied) if then * WORTH < now else ()


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
