"""How much memory traffic a schedule plans, and how much any schedule would need. Bytes at the graph's size hints.

An access moves the elements that its index reaches: the product of the extents of the loop variables in the index, those behind
an index read from memory included, and never more than the buffer. So a bias read in a loop over rows counts once, a row write
counts one row, and a gather counts what it gathers. Within a kernel each distinct region of a buffer is read once; what the
kernel itself has just made, and rows kept in cache, are not read at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.index import Expr, Sizes, Var
from kgen.ir.plan import Call, Launch, Schedule, Step
from kgen.ir.values import loads
from kgen.scheduler.analysis.memory import root, storage_size

__all__ = ["Traffic", "bytes_minimal", "bytes_moved", "call_traffic", "kernel_traffic", "peak_memory"]

Region = tuple[Any, ...]
Regions = dict[str, dict[Region, int]]  # storage -> region -> bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes read and written."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written


def kernel_traffic(kernel: Launch, plan: Schedule) -> Traffic:
    """What one run of the kernel moves."""
    count = _Counter(plan)
    return Traffic(count.total(count.collect(_reads(kernel))), count.total(count.collect(_writes(kernel))))


def call_traffic(call: Call, plan: Schedule) -> Traffic:
    """Operands read and results written; what a library call moves inside is its own affair. A mutated operand is both."""
    count = _Counter(plan)
    node = call.node
    operands = list(_operands(node))
    mutated = {old for old, _ in node.mutates}
    written = sum(count.sizes.bytes(plan.graph.buffers[out]) for out in node.outs if out is not None)
    written += count.total(count.collect((a.buffer, a.index) for a in operands if a.buffer in mutated))
    return Traffic(count.total(count.collect((a.buffer, a.index) for a in operands)), written)


def bytes_moved(plan: Schedule) -> int:
    """What one call of the graph moves: all kernels and library calls."""
    kernels = sum(kernel_traffic(k, plan).total for k in plan.kernels)
    return kernels + sum(call_traffic(c, plan).total for c in plan.calls)


def bytes_minimal(plan: Schedule) -> int:
    """A lower bound for `bytes_moved`, given the library calls: every input, constant and library result that kernels read is
    read once, everything that outlives the kernels (an output, a change to an input, an operand of a library call) is written
    once, and library calls move their operands and results. Intermediates between kernels move nothing."""
    graph, count = plan.graph, _Counter(plan)
    made = {o for k in plan.kernels for s in k.statements for o in s.outs}
    made |= {ir.owner(graph, o) for o in made if o in graph.buffers}
    defined = made | {o for c in plan.calls for o in ir.outs(c.node)}
    survivors = {root(graph, o.buffer) for o in graph.outputs if isinstance(o, ir.TensorArg)}
    survivors |= {root(graph, a.buffer) for c in plan.calls for a in _operands(c.node)}
    survivors |= {name for name, b in graph.buffers.items() if b.kind == "input"}
    reads, writes = [], []
    for kernel in plan.kernels:
        reads += [(n, i) for n, i in _reads(kernel) if _definer(graph, n, defined) not in made]
        writes += [(n, i) for n, i in _writes(kernel) if root(graph, n) in survivors]
    kernels = count.total(count.collect(reads)) + count.total(count.collect(writes))
    return kernels + sum(call_traffic(c, plan).total for c in plan.calls)


def peak_memory(plan: Schedule) -> int:
    """The most bytes that intermediates and outputs occupy at one time under the memory plan (inputs and what library calls
    take inside are not the plan's)."""
    graph, sizes = plan.graph, Sizes(plan.graph.seen_sizes)
    handed_on = set(plan.reuses.values())
    block: dict[str, int] = {}  # storage -> bytes it holds
    live = peak = 0
    for step, dead in zip(plan.steps, plan.dead_after, strict=True):
        for name in (ir.owner(graph, one) for one in _defined(step)):
            if name in block or graph.buffers[name].alias_of is not None:
                continue
            source = plan.reuses.get(name)
            block[name] = block[source] if source is not None else _storage_bytes(graph.buffers[name], sizes)
            live += 0 if source is not None else block[name]
        peak = max(peak, live)
        live -= sum(block.pop(name) for name in dead if name in block and name not in handed_on)
    return peak


# ---- regions --------------------------------------------------------------------------------------------------------


class _Counter:
    """Sizes regions of one plan's buffers."""

    def __init__(self, plan: Schedule) -> None:
        self.graph = plan.graph
        self.sizes = Sizes(plan.graph.seen_sizes)

    def collect(self, accesses: Iterable[tuple[str, tuple[Expr, ...]]]) -> Regions:
        found: Regions = {}
        for name, index in accesses:
            region, size = self.region(name, index)
            found.setdefault(root(self.graph, name), {})[region] = size
        return found

    def total(self, regions: Regions) -> int:
        return sum(min(self.capacity(name), sum(parts.values())) for name, parts in regions.items())

    def capacity(self, name: str) -> int:
        """No buffer has more to read than its elements, and an expanded one not more than its storage."""
        buffer = self.graph.buffers[name]
        whole = self.sizes.bytes(buffer)
        return whole if buffer.strides is None else min(whole, _storage_bytes(buffer, self.sizes))

    def region(self, name: str, index: tuple[Expr, ...]) -> tuple[Region, int]:
        """A key that is equal for equal regions of the buffer, whatever a kernel calls its loops, and the region's bytes.
        Two regions of one start and one size count as the same: a transposed read reaches the same elements."""
        buffer = self.graph.buffers[name]
        size = min(self.sizes.points(_variables(index)) * buffer.dtype.itemsize, self.sizes.bytes(buffer))
        if buffer.strides is None or _through_memory(index):
            return (name, index), size
        linear = ix.linearize(index, buffer.strides, buffer.offset)
        fixed = [self.sizes.of(_term(mono, coef)) for mono, coef in linear.terms if not _variables((_term(mono, coef),))]
        return (sum(fixed) * buffer.dtype.itemsize, size), size


def _term(mono: tuple[Any, ...], coef: int) -> Expr:
    return ix.product(atom.expr() for atom in mono) * coef


def _through_memory(index: tuple[Expr, ...]) -> bool:
    return any(isinstance(a, ix.Indirect) for e in index for a in ix.free_atoms(e))


def _variables(index: Iterable[Expr]) -> list[Var]:
    found: dict[Var, None] = {}
    for expr in index:
        for atom in ix.free_atoms(expr):
            for a in atom.value.free_atoms() if isinstance(atom, ix.Indirect) else (atom,):
                if isinstance(a, Var):
                    found[a] = None
    return list(found)


def _storage_bytes(buffer: ir.Buffer, sizes: Sizes) -> int:
    elements = storage_size(buffer) if buffer.strides is not None else ix.product(buffer.sizes)
    return sizes.of(elements) * buffer.dtype.itemsize


# ---- accesses -------------------------------------------------------------------------------------------------------


def _reads(kernel: Launch) -> Iterator[tuple[str, tuple[Expr, ...]]]:
    made = {o for s in kernel.statements for o in s.outs}
    for s in kernel.statements:
        for load in loads(s.roots):
            if load.attr[0] not in made:
                yield load.attr[0], load.attr[1]
        if s.kind == "scatter" and s.op != "set" and s.target is not None and s.target not in made:
            yield s.target, s.store  # combines with what is there


def _writes(kernel: Launch) -> Iterator[tuple[str, tuple[Expr, ...]]]:
    for s in kernel.statements:
        for out, stored in zip(s.outs, s.stored, strict=True):
            if stored:
                yield out, s.store


def _operands(node: ir.Extern) -> Iterator[ir.TensorArg]:
    return ir.tensor_args((node.args, tuple(v for _, v in node.kwargs)))


def _definer(graph: ir.Graph, name: str, defined: set[str]) -> str:
    """The version that gave the buffer its contents: itself, or what it is a reinterpretation of."""
    while name not in defined and (older := graph.buffers[name].alias_of) is not None:
        name = older
    return name


def _defined(step: Step) -> list[str]:
    if isinstance(step, Call):
        return [o for o in step.node.outs if o is not None]
    return [o for s in step.statements for o, stored in zip(s.outs, s.stored, strict=True) if stored]
