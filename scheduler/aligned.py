"""Operands of products in rows that begin in the middle of lines of a GPU's cache, copied first into rows that do not.

The cache hands out lines, and two of them for each line's length of such a row: tile for tile a product reads its operands many
times from there, and the copy reads them once. Rows that do not even begin at multiples of 16 bytes cannot be moved by the copy
engine, or by more than one number at a time. An operand that a kernel of the graph makes is stored in aligned rows at once, for
the copy fuses with what makes it.

    x, w with rows of 1000 and 5000 numbers of 2 bytes:  w' = w in rows of 5056;  y = x w'
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from kgen import index as ix
from kgen import ir
from kgen import values as vs
from kgen.plan import Kernel, Statement
from kgen.scheduler.choose import problems
from kgen.sizes import Sizes
from kgen.templates.problem import Device, Problem
from kgen.tuning import model
from kgen.values import Value
from kgen.verdict import Outcome, Reason, Verdict

# How much faster a product has to be estimated with its copies.
WORTH = 1.04
# The time of a copy, in passes of its bytes through the memory: it is read from there, and written to the cache.
TRIPS = 1.5
# Operands that are copied: none of them, one, or both.
NONE, LEFT, RIGHT, BOTH = "", "left", "right", "both"
_SIDES = {NONE: (False, False), LEFT: (True, False), RIGHT: (False, True), BOTH: (True, True)}


@dataclass(frozen=True, slots=True)
class Copies:
    """A product with copies of some operands: how templates see it, and the seconds of the copies."""

    problems: tuple[Problem, ...]
    seconds: float


def aligned_of(name: str) -> str:
    """The copy of a buffer."""
    return f"{name}_aligned"


def with_copies(graph: ir.Graph, node: ir.Contraction, copies: str) -> tuple[ir.Contraction, list[ir.Pointwise]]:
    """The product with copies of its operands, and what makes these. Buffers are added to the graph."""
    operands, made = [], []
    for value, wanted in zip((node.lhs, node.rhs), _SIDES[copies], strict=True):
        source = _source(value, graph) if wanted else None
        if source is None:
            operands.append(value)
            continue
        copy = _aligned(graph.buffers[source])
        assert copy is not None
        graph.buffers[copy.name] = copy
        loops = tuple(ix.var(f"d{k}", size) for k, size in enumerate(copy.sizes))
        origin = replace(node.origin, operators=("copy",))
        made.append(ir.Pointwise(copy.name, loops, vs.load(source, [v.expr() for v in loops], copy.dtype), origin))
        operands.append(_reading(value, source))
    return replace(node, lhs=operands[0], rhs=operands[1]), made


def possible_copies(kernel: Kernel, graph: ir.Graph, device: Device) -> dict[str, Copies]:
    """What of a kernel's operands may be copied, and what templates make of it then. Sums of operands that the kernel makes
    beside its product need these as they are."""
    sums = [s for s in kernel.statements if s.kind == "contraction"]
    beside = any(s.inner for s in kernel.statements if s.kind != "contraction")
    if device.kind != "cuda" or beside or len(sums) != 1 or sums[0].op != "sum" or len(sums[0].factors) != 1:
        return {}
    sources = [_buffer(value, graph) for value in (sums[0].value, *sums[0].factors)]
    if not any(sources) or sources[0] == sources[1]:
        return {}
    found: dict[str, Copies] = {}
    for copies, sides in _SIDES.items():
        wanted = [name for name, side in zip(sources, sides, strict=True) if side and name is not None]
        if copies == NONE or len(wanted) < sum(sides):
            continue
        taken = _problems(kernel, sums[0], graph, device, wanted)
        if taken:
            found[copies] = Copies(tuple(taken), _seconds(wanted, graph, device))
    return found


def best_copies(kernel: Kernel, graph: ir.Graph, device: Device, vendor: bool) -> str:
    """The operands to copy, by the cost model. `vendor`: whether a library call computes the product."""
    possible = possible_copies(kernel, graph, device)
    if not possible:
        return NONE
    now = model.least_seconds(problems(kernel, graph, device, None)[0], vendor)
    found = {copies: model.least_seconds(one.problems, vendor=False) + one.seconds for copies, one in possible.items()}
    best = min(found, key=lambda copies: found[copies])
    return best if found[best] * WORTH < now < math.inf else NONE


def said(copies: Mapping[str, str], graph: ir.Graph, made: Collection[str]) -> list[Verdict]:
    """What is to be said of products that read the copies which a plan makes."""
    verdicts: list[Verdict] = []
    for node in graph.nodes:
        if isinstance(node, ir.Contraction) and copies.get(node.out):
            sources = dict.fromkeys(load.attr[0] for load in vs.loads((node.lhs, node.rhs, *node.stored)))
            found = [name for name in sources if aligned_of(name) in made]
            verdicts += [Verdict(name, node.out, Outcome.STORED, Reason.ROWS_IN_LINES) for name in found]
    return verdicts


def _source(value: Value, graph: ir.Graph) -> str | None:
    """The buffer that an operand is, element by element, if its rows are no whole lines."""
    name = _buffer(value, graph)
    if name is None:
        return None
    pairs = [(e.atom(), size) for e, size in zip(value.attr[1], graph.buffers[name].sizes, strict=True) if size != 1]
    whole = all(isinstance(v, ix.Var) and v.extent == size for v, size in pairs)
    return name if whole and len({v for v, _ in pairs}) == len(pairs) else None


def _buffer(value: Value, graph: ir.Graph) -> str | None:
    """The buffer that an operand is read from as it is, if the rows of a copy would lie otherwise. Which of its elements are
    read is not asked: a kernel's loops need not be the product's."""
    if value.op != "load" or value.args:
        return None
    buffer = graph.buffers[value.attr[0]]
    return buffer.name if _straddles(buffer) and _aligned(buffer) is not None else None


def _straddles(buffer: ir.Buffer) -> bool:
    """Whether some rows begin in the middle of a line."""
    assert buffer.strides is not None
    steps = [stride for stride, size in zip(buffer.strides, buffer.sizes, strict=True) if size != 1 and stride != 1]
    return any(ix.mod(stride * buffer.dtype.itemsize, model.LINE) != 0 for stride in steps)


def _aligned(buffer: ir.Buffer) -> ir.Buffer | None:
    """A buffer for the copy, in rows of whole lines; None where rows have a length that only the call knows, or no element has
    a neighbour."""
    strides = buffer.strides
    assert strides is not None
    long = [d for d, size in enumerate(buffer.sizes) if size != 1]
    rows = [d for d in long if strides[d] == 1]
    length = buffer.sizes[rows[0]].as_int() if len(rows) == 1 else None
    if length is None or len(long) < 2 or any(strides[d] == 0 for d in long):
        return None
    sizes = Sizes({})
    order = sorted(long, key=lambda d: sizes.of(strides[d]))
    if order[0] != rows[0]:
        return None
    unit = model.LINE // buffer.dtype.itemsize
    made, step = [ix.ONE] * len(strides), ix.constant(-(-length // unit) * unit)
    for d in order[1:]:
        made[d], step = step, step * buffer.sizes[d]
    return ir.Buffer(aligned_of(buffer.name), buffer.dtype, buffer.device, buffer.sizes, tuple(made))


def _reading(value: Value, source: str) -> Value:
    """The value with loads from the copy."""

    def renamed(load: Value) -> Value | None:
        name, index, dtype = load.attr
        return vs.load(aligned_of(name), index, dtype, *load.args) if name == source else None

    return vs.replace_loads([value], renamed)[0]


def _problems(kernel: Kernel, product: Statement, graph: ir.Graph, device: Device, sources: list[str]) -> list[Problem]:
    """What templates would make of the kernel with copies of these operands."""
    changed = product
    buffers = dict(graph.buffers)
    for name in sources:
        value, factor = (_reading(one, name) for one in (changed.value, *changed.factors))
        changed = replace(changed, value=value, factors=(factor,))
        copy = _aligned(graph.buffers[name])
        assert copy is not None
        buffers[copy.name] = copy
    reading = replace(kernel, statements=tuple(changed if s is product else s for s in kernel.statements))
    return problems(reading, replace(graph, buffers=buffers), device, None)[0]


def _seconds(sources: Iterable[str], graph: ir.Graph, device: Device) -> float:
    """Of the copies. What a kernel makes is stored where it belongs, at worst a second time."""
    sizes, total = Sizes(graph.size_hints), 0.0
    made = {out for node in graph.nodes if not isinstance(node, ir.Extern) for out in ir.outs(node)}
    for name in sources:
        moved = sizes.bytes(graph.buffers[name]) / device.bandwidth / model.STREAM_RATE
        total += moved if name in made else TRIPS * moved + model.LAUNCH[device.kind]
    return total
