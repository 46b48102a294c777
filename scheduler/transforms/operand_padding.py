"""Operands of matmuls on a GPU that are stored first: copies in rows that begin at lines of the cache, and what templates would
compute for every tile.

The cache hands out lines, and two of them for each line's length of such a row: tile for tile a matmul reads its operands many
times from there, and the copy reads them once. Rows that do not even begin at multiples of 16 bytes cannot be moved by TMA, or
by more than one number at a time. An operand that a kernel of the graph makes is stored in aligned rows at once, for the copy
fuses with what makes it.

    x, w with rows of 1000 and 5000 numbers of 2 bytes:  w' = w in rows of 5056;  y = x w'

A computed operand costs each tile its operators, and templates whose operands come by TMA do not take it.
Stored once, as the library call would read it, it often joins the kernel that made what it needs.

    y = gelu(rms_norm(x) w):  x' = rms_norm(x);  y = gelu(x' w)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from kgen.cost import model
from kgen.cost.tuning_query import place
from kgen.device import LINE, SECTOR, Device
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Sizes
from kgen.ir.plan import Kernel, Statement, members
from kgen.ir.values import Value
from kgen.scheduler.analysis.memo import memoised_for
from kgen.scheduler.analysis.memory import writes
from kgen.scheduler.protocol import Attempt, Candidate, Changes, Decisions, Draft, Transform
from kgen.scheduler.selection.choose import contraction_of, problems, read_by_prologue, template_seconds
from kgen.scheduler.selection.memo import contractions_by_result, for_form
from kgen.scheduler.transforms.recompute import computations, recomputed
from kgen.scheduler.transforms.split_k import parts_by_result
from kgen.templates.problem import Problem
from kgen.verdict import OperatorCall, Outcome, Reason, Verdict

# How much faster a matmul has to be estimated with its copies.
WORTH = 1.04
# The time of a copy, in passes of its bytes through the memory: it is read from there, and written to the cache.
TRIPS = 1.5
# Operands that are copied: none of them, one, or both.
NONE, LEFT, RIGHT, BOTH = "", "left", "right", "both"
_OPERANDS = {NONE: (False, False), LEFT: (True, False), RIGHT: (False, True), BOTH: (True, True)}


OPERAND_LAYOUT = "operand copies"


def copies_by_result(decisions: Decisions) -> dict[str, str]:
    """Which operands of contractions are copied or stored first; `NONE`: they were asked, and none is."""
    return decisions.settled(OPERAND_LAYOUT, str)


class OperandLayout(Transform):
    """Stores operands of contractions first. Whether one is computed comes before the question into how many parts a sum is
    split, copies for alignment behind it: the two have a row of their own in the table, and only one of them applies."""

    name = OPERAND_LAYOUT

    def settle(self, attempt: Attempt) -> Changes:
        """Which operands to copy for contractions that were not asked yet, where some are worth copying. Those of which none is
        are asked again when what they would read has come to be written for somebody else, such as a library call."""
        plan, known = attempt.plan, copies_by_result(attempt.decisions)
        if not attempt.options.copies:
            return Changes()
        again, parts = computations(plan.graph, recomputed(attempt.decisions)), parts_by_result(attempt.decisions)
        written = frozenset(out for step in plan.steps for out in writes(step))
        found: dict[Candidate, str] = {}
        for kernel in (one for step in plan.kernels for one in members(step) if one.contracts and self.concerns(one)):
            out = contraction_of(kernel)
            asked = out in known and not (known[out] == NONE and _stored_names(out, plan.graph) & written)
            chosen = None if asked or out in again or parts.get(out, 1) != 1 else _chosen_copies(kernel, attempt, written)
            if chosen is not None:
                found[Candidate(self.name, out)] = chosen
        return Changes(found) if any(found.values()) else Changes()

    def concerns(self, kernel: Kernel) -> bool:
        """Whether a kernel's operands are asked about here."""
        return True


class OperandMaterialisation(OperandLayout):
    """Applies what was chosen for any kernel, and asks about those that compute operands."""

    def apply(self, draft: Draft) -> None:
        wanted = {
            out: chosen_operands
            for out, chosen_operands in copies_by_result(draft.decisions).items()
            if chosen_operands != NONE
        }
        if not wanted:
            return
        nodes: list[ir.Node] = []
        copied: dict[str, ir.Pointwise] = {}
        for node in draft.nodes:
            if ir.is_contraction(node) and node.vendor is None and node.out in wanted:
                matmul, copies = with_copies(draft.graph, node, wanted[node.out])
                nodes += [*(copy for copy in copies if copy.out not in copied), matmul]
                copied = {copy.out: copy for copy in copies} | copied
                draft.asked.add(node.out)
            else:
                nodes.append(node)
        draft.nodes = _reading_copies_too(draft.graph, nodes, copied)

    def concerns(self, kernel: Kernel) -> bool:
        return bool(read_by_prologue(kernel))


def _reading_copies_too(graph: ir.Graph, nodes: list[ir.Node], copied: Mapping[str, ir.Pointwise]) -> list[ir.Node]:
    """The other contractions and the reductions that read what has a copy read that, if kernels make it: then nobody may need
    it as it was, and a sum of an operand still reads what its matmul reads. A copy comes before the first of its readers."""
    sources = {load.attr[0]: out for out, copy in copied.items() for load in vs.loads([copy.value])}
    sources = {source: out for source, out in sources.items() if source in _made_by_kernels(graph)}
    found: list[ir.Node] = []
    placed: set[str] = set()
    for node in nodes:
        changed = node
        if isinstance(node, ir.Reduction) and sources.keys() & ir.reads(node):
            changed = replace(node, value=_reading_any(graph, node.value, sources))
        elif ir.is_contraction(node) and node.vendor is None and sources.keys() & ir.reads(node):
            lhs, rhs = (_reading_any(graph, value, sources) for value in (node.lhs, node.rhs))
            changed = replace(node, lhs=lhs, rhs=rhs)
        before = [copied[name] for name in ir.reads(changed) if name in copied and name not in placed]
        placed.update(copy.out for copy in before)
        found += before
        if not (isinstance(node, ir.Pointwise) and copied.get(node.out) is node):
            found.append(changed)
    return found


class OperandPadding(OperandLayout):
    """Asks about all kernels that were not asked before."""

    def report(self, attempt: Attempt) -> list[Verdict]:
        made = {out for step in attempt.plan.steps for out in writes(step)}
        return verdicts_of(copies_by_result(attempt.decisions), attempt.graph, made)


def _stored_names(out: str, graph: ir.Graph) -> set[str]:
    """What a contraction would read if it computed no operand."""
    node = contractions_by_result(graph).get(out)
    return set() if node is None else {load.attr[0] for load in vs.loads(node.stored)}


def _chosen_copies(kernel: Kernel, attempt: Attempt, written: frozenset[str]) -> str | None:
    """The operands of a kernel's contraction to copy, as was measured, else by the cost model; None where that says nothing of
    the kernel as it is, which is asked about again when something else is fused with its matmul."""
    out, options = contraction_of(kernel), attempt.options
    if options.only is not None:
        return options.only.copies
    known = None if options.stable else attempt.tuning_results.get(out, {}).get(place({}))
    if known is not None:
        return known.copies
    return best_copies(kernel, attempt.graph, options.device(attempt.graph, out), not options.stable, written)


@dataclass(frozen=True, slots=True)
class Copies:
    """A matmul with some operands stored first: how templates see it, and the seconds that making them takes."""

    problems: tuple[Problem, ...]
    seconds: float


def aligned_of(graph: ir.Graph, name: str) -> str:
    """The copy of a buffer."""
    return ir.derived(graph, ir.Derived(name, model.ALIGNED_COPY))


@dataclass(frozen=True, slots=True)
class _Made:
    """An operand that is stored first: the value that reads it, a buffer to add to the graph, and seconds."""

    value: Value
    buffer: ir.Buffer | None
    seconds: float


@dataclass(frozen=True, slots=True)
class _Reading:
    """A kernel that reads copies of its operands, in a graph that has them, and the seconds that making them takes."""

    kernel: Kernel
    graph: ir.Graph
    seconds: float


def from_memory(copies: str) -> tuple[bool, bool]:
    """Which of a matmul's operands are not computed in its kernel."""
    return _OPERANDS[copies]


def with_copies(graph: ir.Graph, node: ir.Contraction, copies: str) -> tuple[ir.Contraction, list[ir.Pointwise]]:
    """The matmul with copies of its operands, and what makes these. Buffers are added to the graph."""
    operands, made = [], []
    for value, wanted in zip((node.lhs, node.rhs), _OPERANDS[copies], strict=True):
        source = _source(value, graph) if wanted else None
        if source is None:
            operands.append(value)
            continue
        copy = _aligned(graph, graph.buffers[source])
        assert copy is not None
        graph.buffers[copy.name] = copy
        loops = tuple(ix.var(f"d{k}", size) for k, size in enumerate(copy.sizes))
        origin = replace(node.origin, calls=(OperatorCall("copy"),), parameters=())
        made.append(ir.Pointwise(copy.name, loops, vs.load(source, [v.expr() for v in loops], copy.dtype), origin))
        operands.append(_reading(graph, value, source))
    return replace(node, lhs=operands[0], rhs=operands[1]), made


def possible_copies(kernel: Kernel, graph: ir.Graph, device: Device) -> dict[str, Copies]:
    """What of a kernel's operands may be copied, and what templates make of it then."""
    seen = {
        copies: (problems(one.kernel, one.graph, device, None)[0], one)
        for copies, one in _readings(kernel, graph, device).items()
    }
    return {copies: Copies(tuple(taken), one.seconds) for copies, (taken, one) in seen.items() if taken}


def _readings(kernel: Kernel, graph: ir.Graph, device: Device, written: frozenset[str] = frozenset()) -> dict[str, _Reading]:
    """The kernel with each choice of operands that may be copied; what is `written` in any case costs nothing more. Sums of
    operands that the kernel makes beside its matmul read copies as well, where `with_copies` is of what a kernel makes."""
    sums = [s for s in kernel.statements if s.kind == "contraction"]
    beside = any(s.inner for s in kernel.statements if s.kind != "contraction")
    if device.kind != "cuda" or len(sums) != 1 or sums[0].op != "sum" or len(sums[0].factors) != 1:
        return {}
    matmul = sums[0]
    operands = (matmul.value, *matmul.factors)
    sources = [_buffer(value, graph) for value in operands]
    if sources[0] is not None and sources[0] == sources[1]:
        return {}
    parts = _read_in_part(kernel, graph)
    if beside:
        parts |= {side for side, source in enumerate(sources) if source not in _made_by_kernels(graph)}
    made = [
        None if side in parts
        else _stored(side, kernel, matmul, graph, device, written) if source is None
        else _copied(source, value, graph, device)
        for side, (source, value) in enumerate(zip(sources, operands, strict=True))
    ]  # fmt: skip
    found: dict[str, _Reading] = {}
    for copies, chosen_operands in _OPERANDS.items():
        chosen = {side: one for side, one in enumerate(made) if chosen_operands[side] and one is not None}
        if copies != NONE and len(chosen) == sum(chosen_operands):
            renamed = {source: aligned_of(graph, source) for side in chosen if (source := sources[side]) is not None}
            found[copies] = _reading_copies(kernel, matmul, graph, chosen, renamed)
    return found


def _read_in_part(kernel: Kernel, graph: ir.Graph) -> set[int]:
    """The operands of which `with_copies` makes no copy, for a matmul does not read all of their buffers."""
    node = contractions_by_result(graph).get(contraction_of(kernel))
    operands = () if node is None else (node.lhs, node.rhs)
    sources = [(_buffer(value, graph), _source(value, graph)) for value in operands]
    return {side for side, (buffer, whole) in enumerate(sources) if buffer is not None and whole is None}


def best_copies(
    kernel: Kernel, graph: ir.Graph, device: Device, vendor: bool, written: frozenset[str] = frozenset()
) -> str | None:
    """The operands to copy, by the cost model; None where templates have no estimate with copies or without. `vendor`: whether
    a library call computes the matmul. Operands that are `written` in any case, such as for another library call, cost nothing
    more."""
    possible = _readings(kernel, graph, device, written)
    if not possible:
        return NONE
    own = _template_seconds(kernel, graph, device, vendor)
    now = min(own, _library_seconds(kernel, graph, device) if vendor else math.inf)
    # what takes as long to make as the whole matmul takes now is not looked at by templates
    worth = {copies: one for copies, one in possible.items() if one.seconds * WORTH < now < math.inf}
    found = {copies: _template_seconds(one.kernel, one.graph, device, vendor) + one.seconds for copies, one in worth.items()}
    if worth and math.isinf(min(own, *found.values())):
        return None
    best = min(found, key=lambda copies: found[copies], default=NONE)
    if best == NONE:
        return NONE
    margin = WORTH if possible[best].seconds else 1 / model.DOUBT["computed"]  # estimates of computed operands scatter
    return best if found[best] * margin < now else NONE


def _template_seconds(kernel: Kernel, graph: ir.Graph, device: Device, vendor: bool) -> float:
    """The time of the best template for a kernel, found once for all that are equal but for names."""
    how = ("template seconds", device, vendor)
    return for_form(how, [kernel], graph, lambda: template_seconds(problems(kernel, graph, device, None)[0], vendor))


def _library_seconds(kernel: Kernel, graph: ir.Graph, device: Device) -> float:
    """The time of the library call and the kernels around it, infinite where no template has looked at the matmul."""

    def found() -> float:
        return min((model.apart_seconds(problem) for problem in problems(kernel, graph, device, None)[0][:1]), default=math.inf)

    return for_form(("library seconds", device), [kernel], graph, found)


def verdicts_of(copies: Mapping[str, str], graph: ir.Graph, made: Collection[str]) -> list[Verdict]:
    """What is to be said of matmuls that read the copies which a plan makes."""
    verdicts: list[Verdict] = []
    for node in graph.nodes:
        if ir.is_contraction(node) and copies.get(node.out):
            sources = dict.fromkeys(load.attr[0] for load in vs.loads((node.lhs, node.rhs, *node.stored)))
            found = [name for name in sources if aligned_of(graph, name) in made]
            verdicts += [Verdict(name, node.out, Outcome.STORED, Reason.ROWS_IN_LINES) for name in found]
            for value, stored, side in zip((node.lhs, node.rhs), node.stored, from_memory(copies[node.out]), strict=False):
                names = {load.attr[0] for load in vs.loads([stored])} if side and stored is not value else set()
                verdicts += [Verdict(name, node.out, Outcome.STORED, Reason.OPERAND_STORED) for name in sorted(names & {*made})]
    return verdicts


def _source(value: Value, graph: ir.Graph) -> str | None:
    """The buffer that an operand is, element by element, if its rows are no whole lines."""
    name = _buffer(value, graph)
    if name is None:
        return None
    return name if _visits_each_once(value.attr[1], graph.buffers[name].sizes) else None


def _visits_each_once(index: vs.Index, sizes: Sequence[ix.Expr]) -> bool:
    """Whether loops go through all elements, in whatever order, such as one loop through two dimensions."""
    linear = ix.linearize(index, ix.contiguous_strides(sizes))
    left = {v: ix.stride_of(linear, v) for v in ix.free_atoms(linear) if isinstance(v, ix.Var) and v.extent != 1}
    points = ix.ONE
    while left:  # the loop whose steps are as long as all that the others have gone through
        loop = next((v for v, step in left.items() if step is points), None)
        if loop is None:
            return False
        points *= loop.extent
        del left[loop]
    return points is ix.product(sizes)


def _buffer(value: Value, graph: ir.Graph) -> str | None:
    """The buffer that an operand is read from as it is, if the rows of a copy would lie otherwise. Which of its elements are
    read is not asked: a kernel's loops need not be the matmul's."""
    if value.op != "load" or value.args:
        return None
    buffer = graph.buffers[value.attr[0]]
    return buffer.name if _is_misaligned(buffer) and _aligned(graph, buffer) is not None else None


def _is_misaligned(buffer: ir.Buffer) -> bool:
    """Whether some rows begin in the middle of a line. Short ones, of which a line has a whole number, begin and end within
    one: a copy of rows of 64 bytes would have half as many elements in each line."""
    assert buffer.strides is not None
    size, long = buffer.dtype.itemsize, [d for d, length in enumerate(buffer.sizes) if length != 1]
    steps = [buffer.strides[d] * size for d in long if buffer.strides[d] != 1]
    row = math.prod((buffer.sizes[d].as_int() or 0) * size for d in long if buffer.strides[d] == 1)
    unit = row if SECTOR <= row <= LINE and LINE % row == 0 else LINE
    return any(ix.mod(step, unit) != 0 for step in steps)


def _aligned(graph: ir.Graph, buffer: ir.Buffer) -> ir.Buffer | None:
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
    unit = LINE // buffer.dtype.itemsize
    made, step = [ix.ONE] * len(strides), ix.constant(-(-length // unit) * unit)
    for d in order[1:]:
        made[d], step = step, step * buffer.sizes[d]
    return ir.Buffer(aligned_of(graph, buffer.name), buffer.dtype, buffer.device, buffer.sizes, tuple(made))


def _reading(graph: ir.Graph, value: Value, source: str) -> Value:
    """The value with loads from the copy."""
    return _reading_any(graph, value, {source: aligned_of(graph, source)})


def _reading_any(graph: ir.Graph, value: Value, copies: Mapping[str, str]) -> Value:
    """The value with loads from copies, by the names of what these are of."""

    def renamed(load: Value) -> Value | None:
        name, index, dtype = load.attr
        return vs.load(copies[name], index, dtype, *load.args) if name in copies else None

    return vs.replace_loads([value], renamed)[0]


def _copied(source: str, value: Value, graph: ir.Graph, device: Device) -> _Made:
    """A copy. What a kernel makes is stored where it belongs, at worst a second time."""
    copy = _aligned(graph, graph.buffers[source])
    assert copy is not None
    moved = Sizes(graph.size_hints).bytes(graph.buffers[source]) / device.bandwidth / model.STREAM_RATE
    seconds = moved if source in _made_by_kernels(graph) else TRIPS * moved + model.LAUNCH[device.kind]
    return _Made(_reading(graph, value, source), copy, seconds)


def _stored(
    side: int, kernel: Kernel, matmul: Statement, graph: ir.Graph, device: Device, written: frozenset[str]
) -> _Made | None:
    """A computed operand from where the library call reads it, at the price of a kernel that does nothing else, if it is not
    `written` for somebody else. Not one that stays as large where a length of the call is small: weights of 8 bits are then
    read once, and would be written and read."""
    computed = (matmul.value, *matmul.factors)[side]
    if computed.op == "load" and not computed.args:
        return None
    if any(v.extent.as_int() is None and v not in computed.variables() for v in kernel.outer):
        return None
    out = contraction_of(kernel)
    node = contractions_by_result(graph).get(out)
    if node is None or not node.stored:
        return None
    inner = [v for v in kernel.inner if v.extent != 1]
    reduced = [v for v in node.reduced if v.extent != 1]
    if [v.extent for v in inner] != [v.extent for v in reduced] or len(matmul.store) != len(node.out_vars):
        return None
    mapping: dict[ix.Atom, ix.Expr] = dict(zip(node.out_vars, matmul.store, strict=True))
    mapping |= {v: ix.ZERO for v in node.reduced if v.extent == 1}
    mapping |= {v: own.expr() for v, own in zip(reduced, inner, strict=True)}
    value = vs.substitute(node.stored[side], mapping)
    names = {load.attr[0] for load in vs.loads([value])}
    if value is computed or len(names) != 1:
        return None
    (name,) = names
    copy = _aligned(graph, graph.buffers[name]) if _is_misaligned(graph.buffers[name]) else None
    if name in written:  # by a kernel, which writes the aligned copy as well
        again = 0 if copy is None else Sizes(graph.size_hints).bytes(graph.buffers[name])
        seconds = again / device.bandwidth / model.STREAM_RATE
    else:
        seconds = _storing_seconds(name, {load.attr[0] for load in vs.loads([computed])}, graph, device)
    return _Made(value if copy is None else _reading(graph, value, name), copy, seconds)


def _storing_seconds(name: str, read: set[str], graph: ir.Graph, device: Device) -> float:
    """The time of storing an operand: of a kernel that does nothing else, or, where kernels of the graph make all its elements,
    of what these then write besides. It is negative where they no longer store what was wider and nobody else needs."""
    sizes = Sizes(graph.size_hints)
    written = sizes.bytes(graph.buffers[name])
    large = [one for one in sorted(read - {name}) if _points(graph, one) >= _points(graph, name)]
    if not large or not _made_by_kernels(graph).issuperset(large):
        moved = written + sum(sizes.bytes(graph.buffers[one]) for one in read - {name})
        return moved / device.bandwidth / model.STREAM_RATE + model.LAUNCH[device.kind]
    spared = sum(sizes.bytes(graph.buffers[one]) for one in large if not _is_needed_beside(graph, one, name))
    return (written - spared) / device.bandwidth / model.STREAM_RATE


def _made_by_kernels(graph: ir.Graph) -> set[str]:
    """The buffers that no call makes."""
    loops = (node for node in graph.nodes if not isinstance(node, ir.Extern))
    return memoised_for(graph, "made by kernels", lambda: {out for node in loops for out in ir.outs(node)})


def _is_needed_beside(graph: ir.Graph, one: str, name: str) -> bool:
    """Whether a buffer is a result, or read by a node that neither makes buffer `name`, nor is a contraction which would read
    that, nor reduces what it reads: a reduction joins the kernel of whoever makes its elements."""
    if one in memoised_for(graph, "visible", lambda: ir.visible(graph)):
        return True
    readers = memoised_for(graph, "readers", lambda: _readers(graph)).get(one, ())
    return any(not (isinstance(node, ir.Reduction) or name in ir.outs(node) or _stores(node, name)) for node in readers)


def _readers(graph: ir.Graph) -> dict[str, list[ir.Node]]:
    """The nodes that read each buffer: found once a graph, for each matmul asks."""
    found: dict[str, list[ir.Node]] = {}
    for node in graph.nodes:
        for name in ir.reads(node):
            found.setdefault(name, []).append(node)
    return found


def _stores(node: ir.Node, name: str) -> bool:
    """Whether a contraction's stored operands read a buffer."""
    return ir.is_template_node(node) and any(load.attr[0] == name for load in vs.loads(node.stored))


def _points(graph: ir.Graph, name: str) -> int:
    return Sizes(graph.size_hints).of(ix.product(graph.buffers[name].sizes))


def _reading_copies(
    kernel: Kernel, matmul: Statement, graph: ir.Graph, made: Mapping[int, _Made], renamed: Mapping[str, str]
) -> _Reading:
    """The kernel with these operands, by their places. What it adds up beside the matmul is read under the new names, too."""
    operands = enumerate((matmul.value, *matmul.factors))
    value, factor = (made[side].value if side in made else own for side, own in operands)
    changed = replace(matmul, value=value, factors=(factor,))
    buffers = {**graph.buffers, **{one.buffer.name: one.buffer for one in made.values() if one.buffer is not None}}
    statements = (
        changed if s is matmul else replace(s, value=_reading_any(graph, s.value, renamed)) if s.inner else s
        for s in kernel.statements
    )
    reading = replace(kernel, statements=tuple(statements))
    return _Reading(reading, replace(graph, buffers=buffers), sum(one.seconds for one in made.values()))
