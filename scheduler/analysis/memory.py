"""The memory plan: the layout of each buffer, when it dies, and whose memory a new one takes over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.index import Expr, Sizes
from kgen.ir.plan import Call, ComboKernel, Kernel, Launch, Schedule, Statement, Step, members
from kgen.ir.values import loads
from kgen.scheduler.analysis.memo import memoised_for


def freeze_layouts(graph: ir.Graph) -> None:
    """Gives every flexible buffer a dense layout in the order its hint prefers (eager's order)."""
    for name, buffer in graph.buffers.items():
        if buffer.strides is None:
            graph.buffers[name] = replace(buffer, strides=ir.dense_strides(buffer))


def plan_memory(schedule: Schedule) -> Schedule:
    """Fills `dead_after` and `reuses`. Outputs and inputs are never reused; a kernel's output takes over an input of the
    same kernel when that dies there, every access of both is at the same element, and the output is made of the input, which
    nothing reads afterwards (in place)."""
    graph = schedule.graph
    touched = [(reads(step), writes(step)) for step in schedule.steps]
    last: dict[str, int] = {}
    for k, (read, written) in enumerate(touched):
        for name in sorted(read | written):
            last[root(graph, name)] = k
    kept = {root(graph, o.buffer) for o in graph.outputs if isinstance(o, ir.TensorArg)}
    dead: list[list[str]] = [[] for _ in schedule.steps]
    for name, k in last.items():
        if name not in kept and graph.buffers[name].kind != "constant":
            dead[k].append(name)
    schedule.dead_after = [tuple(sorted(names)) for names in dead]
    schedule.reuses = _reuses(schedule, touched, dead, kept)
    return schedule


def root(graph: ir.Graph, name: str) -> str:
    """The buffer that owns the storage."""
    return ir.storage_owner(graph.buffers, name, {})


class LiveBytes:
    """Bytes of intermediates and results that are in memory while each step runs, in order."""

    def __init__(self, graph: ir.Graph, steps: Sequence[Step]) -> None:
        self.graph, self.sizes, self.owners = graph, Sizes(graph.size_hints), dict[str, str]()
        born: dict[str, int] = {}
        self.last: dict[str, int] = {}
        for k, step in enumerate(steps):
            written = self.roots(_writes_of(step))
            for name in written:
                born.setdefault(name, k)
            for name in written | self.roots(_reads_of(step)):
                self.last[name] = k
        kept = self.roots(o.buffer for o in graph.outputs if isinstance(o, ir.TensorArg))
        self.last |= dict.fromkeys(kept, len(steps) - 1)
        change = [0] * (len(steps) + 1)  # a value may live from the first step to the last: its steps are not walked through
        for name, first in born.items():
            size = self.bytes(name)
            change[first] += size
            change[self.last[name] + 1] -= size
        self.at = list(accumulate(change[:-1]))
        self.born = born

    def roots(self, names: Iterable[str]) -> set[str]:
        owners, buffers = self.owners, self.graph.buffers
        return {owners.get(name) or ir.storage_owner(buffers, name, owners) for name in names}

    def bytes(self, name: str) -> int:
        buffer = self.graph.buffers[name]
        return memoised_for(buffer, "bytes", lambda: self._bytes(buffer))

    def _bytes(self, buffer: ir.Buffer) -> int:
        return self.sizes.of(storage_size(buffer)) * buffer.dtype.itemsize if buffer.kind == "intermediate" else 0

    @property
    def peak(self) -> int:
        return max(self.at, default=0)

    def earlier(self, step: Step, k: int, first: int) -> list[int]:
        """The bytes from step `first` up to step `k` if the latter ran with the former: its results are there earlier, and what
        nobody reads after it may go earlier."""
        made = [name for name in self.roots(writes(step)) if self.born.get(name) == k]
        done = [name for name in self.roots(reads(step)) if self.last.get(name) == k and self.born.get(name, k) <= first]
        more, less = sum(map(self.bytes, made)), sum(map(self.bytes, done))
        return [self.at[n] + more - (less if n > first else 0) for n in range(first, k)]

    def move(self, step: Step, k: int, first: int) -> None:
        """Counts step `k` as one that runs with step `first`."""
        self.at[first:k] = self.earlier(step, k, first)


# Bytes, and the part of the peak, by which two plans differ that are not the same for memory.
LEAST_BYTES, LEAST_PART = 1 << 20, 1 / 16


def room_above(peak: int) -> int:
    """The bytes up to which a peak of memory is no worse than `peak`."""
    return peak + max(LEAST_BYTES, int(peak * LEAST_PART))


def is_less(one: LiveBytes, other: LiveBytes) -> bool:
    """Whether the first peak is lower, by what counts."""
    return room_above(one.peak) < other.peak


def storage_size(buffer: ir.Buffer) -> Expr:
    """Elements from the first to one past the last."""
    assert buffer.strides is not None
    total = ix.ONE
    for extent, stride in zip(buffer.sizes, buffer.strides, strict=True):
        if extent == 0:
            return ix.ZERO
        total = total + (extent - 1) * stride
    return total


def _kind(buffer: ir.Buffer) -> tuple[Expr, torch.device]:
    """What memory must agree in to be handed on: bytes and device."""
    return storage_size(buffer) * buffer.dtype.itemsize, buffer.device


def _reuses(
    schedule: Schedule, touched: list[tuple[set[str], set[str]]], dead: list[list[str]], kept: set[str]
) -> dict[str, str]:
    graph = schedule.graph
    aliased = _aliased_by_results(schedule)
    reuses: dict[str, str] = {}
    pool: dict[tuple[Expr, torch.device], list[str]] = {}
    born: set[str] = set()
    gone: set[str] = set()
    for k, step in enumerate(schedule.steps):
        written = {ir.owner(graph, n) for n in touched[k][1]}  # the first part takes memory for the whole
        news = [n for n in sorted(written) if _owns_new(graph, n) and n not in born]
        born.update(news)
        makers = {} if isinstance(step, Call) else _makers(graph, step)
        dying = _read_by_one(graph, step, [d for d in dead[k] if d not in aliased and d not in news])
        for name in news:
            if name not in makers:
                continue
            source = _in_place(schedule, makers[name], name, [d for d in dying if d not in gone])
            if source is None:
                free = pool.get(_kind(graph.buffers[name]), [])
                source = free.pop() if free else None
            if source is not None:
                reuses[name] = source
                gone.add(source)
        for name in dead[k]:
            if (
                name not in gone
                and graph.buffers[name].kind == "intermediate"
                and name in born
                and name not in aliased
                and not _by_call(schedule, name)
            ):
                pool.setdefault(_kind(graph.buffers[name]), []).append(name)
    return reuses


class _Maker:
    """A kernel, and what it reads, found at most one time: it may make hundreds of buffers."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    @cached_property
    def indices(self) -> dict[str, set[tuple[Expr, ...]]]:
        """Where it reads each buffer."""
        found: dict[str, set[tuple[Expr, ...]]] = {}
        for buffer, index in _accesses(self.kernel.statements):
            found.setdefault(buffer, set()).add(index)
        return found

    @cached_property
    def read(self) -> list[set[str]]:
        """What each of its statements reads."""
        return [{name for name, _ in _accesses([s])} for s in self.kernel.statements]


def _makers(graph: ir.Graph, step: Launch) -> dict[str, _Maker]:
    """Which kernel writes a buffer, or part of it."""
    return {ir.owner(graph, name): maker for maker in map(_Maker, members(step)) for name in writes(maker.kernel)}


def _read_by_one(graph: ir.Graph, step: Step, names: list[str]) -> list[str]:
    """Those of the buffers that one member of a batch reads alone: no order says when another one would."""
    if not isinstance(step, ComboKernel):
        return names
    readers = Counter(name for member in step.members for name in {root(graph, n) for n in reads(member)})
    return [name for name in names if readers[name] == 1]


def _aliased_by_results(schedule: Schedule) -> set[str]:
    """Buffers that a call's result may be a view of: they are no longer read by name, but their memory lives on."""
    found: set[str] = set()
    for call in schedule.calls:
        if may_alias(call):
            operands = ir.tensor_args((call.node.args, tuple(v for _, v in call.node.kwargs)))
            found.update(root(schedule.graph, a.buffer) for a in operands)
    return found


def may_alias(call: Call) -> bool:
    """Whether the call's results may be views of its operands."""
    schema = getattr(call.node.target, "_schema", None)
    return schema is None or any(r.alias_info is not None for r in schema.returns)


def has_hidden_effects(step: Step) -> bool:
    """Whether a call may change or alias memory under names that the plan does not know, or finds out or checks sizes."""
    return isinstance(step, Call) and bool(may_alias(step) or step.node.mutates or step.node.binds or step.node.effect)


def _by_call(schedule: Schedule, name: str) -> bool:
    return name in schedule.call_results


def _owns_new(graph: ir.Graph, name: str) -> bool:
    buffer = graph.buffers[name]
    return buffer.kind == "intermediate" and buffer.alias_of is None


def _in_place(schedule: Schedule, maker: _Maker, name: str, dying: list[str]) -> str | None:
    """A dying intermediate that the kernel reads only where, and before, it writes `name`."""
    graph, kernel = schedule.graph, maker.kernel
    new = graph.buffers[name]
    if kernel.inner:
        return None  # a section may read the row again after another one has written it
    store = next((s for s in kernel.statements if name in s.outs), None)  # a workspace has none
    if store is None or store.kind != "pointwise":
        return None
    fitting = [source for source in dying if _fits(graph.buffers[source], new) and not _by_call(schedule, source)]
    if not fitting:
        return None
    taken = {root(graph, n) for n in reads(kernel) if graph.buffers[n].alias_of is not None} | writes(kernel)
    return next(
        (
            source
            for source in fitting
            if source not in taken and maker.indices.get(source) == {store.store} and _read_before(maker, source, store)
        ),
        None,
    )


def _fits(old: ir.Buffer, new: ir.Buffer) -> bool:
    """Whether an intermediate has room for exactly the elements of the new buffer."""
    same = (old.device, old.sizes, old.strides, old.dtype) == (new.device, new.sizes, new.strides, new.dtype)
    return same and old.kind == "intermediate"


def _read_before(maker: _Maker, source: str, store: Statement) -> bool:
    """Whether no statement after `store` reads a buffer, and what is stored is made of it: an element may be read and written
    by different threads, which nothing but this dependence keeps in order."""
    statements = maker.kernel.statements
    number = next(k for k, s in enumerate(statements) if s is store)
    if any(source in names for names in maker.read[number + 1 :]):
        return False
    made = {source}  # of the source, by statements in order
    for s, names in zip(statements[: number + 1], maker.read, strict=False):
        if not made.isdisjoint(names):
            made.update(s.outs)
    return not made.isdisjoint(store.outs)


def _accesses(statements: Iterable[Statement]) -> list[tuple[str, tuple[Expr, ...]]]:
    return [(v.attr[0], v.attr[1]) for s in statements for v in loads(s.roots)]


def reads(step: Step) -> set[str]:
    return set(_reads_of(step))


def needed(kernel: Kernel, wanted: Sequence[Statement], stored: Sequence[Statement] = ()) -> list[Statement]:
    """Statements of a kernel in their order, with those that make what they read, but for what is `stored` elsewhere."""
    kept, read = set(wanted), {load.attr[0] for s in wanted for load in loads(s.roots)}
    for s in reversed(kernel.statements):
        if s not in kept and s not in stored and not read.isdisjoint(s.outs):
            kept.add(s)
            read |= {load.attr[0] for load in loads(s.roots)}
    return [s for s in kernel.statements if s in kept]


def writes(step: Step) -> set[str]:
    return set(_writes_of(step))


def _reads_of(step: Step) -> set[str]:
    """What nobody may change: it is kept."""
    return memoised_for(step, "reads", lambda: _reads(step))


def _writes_of(step: Step) -> set[str]:
    return memoised_for(step, "writes", lambda: _writes(step))


def _reads(step: Step) -> set[str]:
    if isinstance(step, Call):
        return set(ir.reads(step.node))
    made = {o for s in step.statements for o in s.outs}
    stored = {o for s in step.statements for o, kept in zip(s.outs, s.stored, strict=True) if kept}
    names = {n for n, _ in _accesses(step.statements)}
    targets = {s.target for s in step.statements if s.target is not None}
    own = {buffer for kernel in members(step) for _, buffer in kernel.workspaces}  # zeroed before
    return own | {n for n in names | targets if n not in made or n in stored}


def _writes(step: Step) -> set[str]:
    if isinstance(step, Call):
        return set(ir.outs(step.node))
    own = {buffer for kernel in members(step) for _, buffer in kernel.workspaces}
    return own | {o for s in step.statements for o, kept in zip(s.outs, s.stored, strict=True) if kept}
