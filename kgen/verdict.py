"""Decisions as data. Every choice of the scheduler is a `Verdict`: who, what, why, and what would change it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache

from kgen import errors


class Outcome(Enum):
    FUSED = "fused"
    ILLEGAL = "illegal"
    UNPROFITABLE = "unprofitable"
    RECOMPUTED = "recomputed"
    STORED = "stored"
    EXTERN = "extern"
    CHOSEN = "chosen"
    BATCHED = "batched"
    SHARED = "compiled once"
    ROLLED = "a loop again"
    RECORDED = "recorded as a CUDA graph"
    FROZEN = "computed once"
    NOT_FROZEN = "not frozen"
    PACKED = "packed once"
    NOT_PACKED = "packed at each call"
    DROPPED = "dropped"
    REPLACED = "replaced"
    NOT_RECORDED = "not recorded as a CUDA graph"
    FOLDED = "folded into the weights"
    CHANNELS_LAST = "computed with channels last"
    LAYOUT_KEPT = "layout kept"
    COPIED = "copied to another layout"


REFUSED = (Outcome.ILLEGAL, Outcome.UNPROFITABLE)


class Reason(Enum):
    """Why. The text completes 'because ...'; `CHANGES` says what would turn the verdict."""

    SHARED_DATA = "they share data at the same index"
    EPILOGUE = "the consumer runs on the result while it is in registers"
    TILE_PARTIALS = "each tile of the matmul reduces its part, and a small kernel joins the parts"
    ROWS = "each tile of the matmul holds full rows, which are reduced and read again in registers"
    OUTPUT_SPLIT = "the consumer reads parts of the matmul's result together, and one kernel makes them as matmuls of their own"
    CONCAT_SPLIT = "its elements are a slice of a tensor that is joined of several, and stored there where they are made"
    SHORT_RUNS = "slices of a few neighbours each would have several kernels write every sector of memory"
    BROADCAST_BACK = "the consumer revisits the reduced row while it is in cache"
    HORIZONTAL = "they read the same data in one pass"
    BLOCKS_OF_ROWS = "the rows of one are in registers while the other reduces blocks of them"
    COLUMN_SUMS = "the rows of one are in registers while the columns of the other are summed, program by program"
    OPERAND_REDUCTION = "the kernel of the matmul has every element of that operand in hand, and adds them up as well"
    INDEX_MISMATCH = "the consumer reads other elements than the producer has just written"
    SPACE_MISMATCH = "their loops cover different index spaces"
    REDUCED_AXES_DIFFER = "they reduce over different axes"
    CYCLE = "a third kernel is on a path between them"
    SEARCH_LIMIT = "proving that no third kernel is between them takes too long"
    MUTATION = "one overwrites data that the other reads or makes at other indices"
    PART = "the producer fills a part of what the consumer needs all of"
    SCATTER_RESULT = "a scatter's result is complete only after all of its writes"
    EXTERN_CALL = "one of them is a library call"
    DEVICE = "they run on different devices"
    EMPTY_LOOP = "an inner loop of one may have no points, and a GPU would not run what the other has outside of it"
    NOT_TRIED = "fusion tries kernels that only read the same data with those next to them in program order, and not these two"
    NO_SAVING = "no memory traffic would be saved"
    PARALLELISM = "too few rows would be left to share among the threads"
    ROW_VALUES = "each thread of a row would compute again what belongs to the row, which takes longer than a kernel for it"
    COLUMNS = "a second walk down long columns would find nothing of the first one in cache"
    LAYOUT_CONFLICT = "their fast axes differ, so one of them would walk memory with strides"
    TOO_LARGE = "the joined loop would have too many operations or operands"
    SWITCHED_OFF = "fusion is switched off in the options"
    HORIZONTAL_OFF = "only horizontal fusion would share that kernel, and it is switched off in the options"
    CHEAP = "computing it again costs less than a trip through memory"
    EXPENSIVE = "computing it again costs more than a trip through memory"
    ROW_IN_CACHE = "one row fits in cache and is kept there"
    NO_LOWERING = "the operator has no lowering"
    LIBRARY = "a library call computes it"
    LIBRARY_FUSES = "one library call computes both"
    LIBRARY_JOINS = "one library call gives both results, and no template takes either"
    FORBIDDEN = "forbid_fused asked for it"
    INDEPENDENT = "neither needs the other, and one kernel can run the loops of both"
    SAME_OPERAND = "they are matmuls with an operand in common, and one kernel can make both"
    FEW_TILES = "they are small matmuls that need nothing of each other, and one launch leaves fewer SMs idle"
    MORE_MEMORY = "what one kernel made of both would wait in memory, and raise the most that the graph has there"
    BOTH_IN_MEMORY = "each reads much that is made for it alone, and one kernel would need all of it in memory at a time"
    SEQUENCE = "the second has work for one program of a GPU alone, which may as well run the first before"
    SYMBOLIC = "sizes are symbols, and a batch on a GPU has its programs counted when it is compiled"
    ONE_REPLAY = "all of its launches then cost as much as one"
    NOT_ONE_GPU = "it does not run on one GPU alone"
    NOTHING_RUNS = "it launches nothing"
    FEW_LAUNCHES = "a replay would cost the host more than its few launches"
    TEMPLATE = "a template computes it, with what is fused"
    VENDOR_FASTER = "the library call and separate kernels are estimated to be faster"
    BARE = "a template computes the contraction alone faster than the library, and kernels of their own what follows it"
    UNCALIBRATED = "nobody has measured templates on contractions of this kind: the library call and separate kernels take it"
    VENDOR_MEASURED = "the library call and separate kernels were measured to be faster"
    LOOPS_MEASURED = "other loops or tiles than those by rule were measured to be faster"
    NOT_COMPILED = "its kernel does not compile"
    FAILED = "it cannot run"
    INTERNAL_ERROR = "kgen has an error in it"
    WRONG_RESULT = "its results are not those of the library"
    CRASHED = "it ended the process that measured it"
    HUNG = "it did not end"
    NO_TEMPLATE = "no template takes it"
    NOT_ELEMENTWISE = "between two steps of a template's program stands an operator that is not elementwise"
    NOT_SOFTMAX = "what this contraction multiplies has a softmax in it, but is none along the axis that is summed over"
    STEP_TYPES = "steps of a template's program are of one floating-point type, and nothing is added or rounded in between"
    TWO_MATMULS = "both are matmuls, and no template makes them in one kernel"
    NOT_EPILOGUE = "the consumer has loops of its own, so that a tile of the matmul does not hold what it needs"
    NOT_PROLOGUE = "the matmul needs all of its operand, stored or computed as part of the matmul"
    NOT_IN_ORDER = "updates that may hit one element have to run in order, and the tiles of the matmul come in another one"
    ORDER_DEAR = "in the order of its updates few threads can share the matmul: a kernel of their own is estimated to be faster"
    NOT_IN_TILES = "the tiles of the matmul do not hold whole runs of what is reduced"
    NOT_WHOLE = "no tile of the matmul holds the full rows that are reduced and read again"
    RECOMPUTE_CHEAP = "computing the matmul a second time takes less than a trip of its result through memory"
    RECOMPUTE_DEAR = "computing the matmul a second time takes longer than a trip of its result through memory"
    MANY_STEPS = "an operand is made of more matmuls than are tried as the step before it"
    NEEDED = "something else needs the matmul in memory"
    CHAINED_REDUCTIONS = "one reduction of its rows waits for another, so that the matmul would be computed more than twice"
    SCALE_LEAVES = "its scale does not depend on what is summed over, and the epilogue multiplies by it"
    SCALE_MASKED = "a condition guards the result of the scale, which might not be finite where it does not hold"
    SCALE_FITS = "without the scale it might be beyond the range of the type to which it is rounded"
    SCALE_ORDER = "numerics asks for the program's own order of multiplications"
    SCALE_SUMMED = "the scaled operand itself is summed as well"
    SCALE_NEEDED = "something else needs the scaled operand in memory"
    SCALE_REMAINS = "what is left of it without the scale would still have to be computed"
    UNEQUAL = "two computations of the matmul may differ in the last bit, and what is made of them may then differ by more"
    UNKNOWN_SIZES = "sizes are symbols, and how often it is best computed depends on them"
    ROWS_IN_LINES = "its rows begin in the middle of lines of the cache, and the matmul reads a copy in which they do not"
    OPERAND_STORED = (
        "the matmul reads it as the library would: computing it for every tile takes longer, or no fast template does"
    )
    NO_OPERAND_REDUCTION = "no template of the matmul adds up that operand as well"
    APART_FASTER = "a kernel of its own for the sum is estimated to be faster"
    STABLE_ORDER = "numerics='stable' keeps the order of additions, which would depend on the matmul's tile"
    HOST_DECIDES = "a step in between needs the host: a Python function, or a size that depends on data"
    FROZEN_ALONE = "it depends on frozen tensors alone"
    LARGER = "its result is larger than what it is made of, and would be read instead"
    RETURNED = "it is a result of the graph, which its owner may change"
    WRITTEN = "the graph writes that tensor, or may"
    FROZEN_OPERAND = "that operand is a frozen tensor"
    UNPACKED_BETTER = "reading it unpacked is no slower, or takes less memory"
    LIBRARY_PREFERS = "the library is faster with channels last, by more than copies take"
    COPIES_DEAR = "copies to channels last would take as long as they save, or longer"
    EAGER_STRIDES = "its strides have to be eager's there"
    INDEPENDENT_ITERATIONS = "no iteration of the loop touches what another one writes"
    BOTH_BRANCHES = "both branches take less time than to find out which one is wanted"
    ITERATIONS = "the iterations of the loop cannot run as one batch"
    CARRIED_ITERATIONS = "the iterations of the loop are one function of what the one before has made"
    UNROLLED = "the iterations of the loop cannot be calls of one body"
    SHORT_LOOP = "the loop compiles fast enough unrolled, and runs without a call an iteration"
    EQUAL_LAYERS = "the blocks are one function of different tensors"
    LAYERS_DIFFER = "the blocks cannot be calls of one function"
    SMALL_LAYERS = "calls of one function would take longer than the blocks by themselves"
    MUTATED_INPUT = "it writes an input that may have another address at the next call"


CHANGES: dict[Reason, str] = {
    Reason.INTERNAL_ERROR: "report it with the file that was kept",
    Reason.NOT_COMPILED: "report it with the compiler's message",
    Reason.FAILED: "report it; meanwhile options={'fallback': '<operator>'} runs one operator in eager",
    Reason.WRONG_RESULT: "report it; kgen.testing.check_template finds the smallest case",
    Reason.CRASHED: "report it with the template and its configuration",
    Reason.HUNG: "report it with the template and its configuration",
    Reason.ROW_VALUES: "spread a row's values over fewer elements, or compute them with fewer operations",
    Reason.SHORT_RUNS: "join longer slices, or join along another axis",
    Reason.PART: "compute the consumer of each part, and join the results",
    Reason.SCATTER_RESULT: "gather where the values are read, instead of scattering where they are made",
    Reason.DEVICE: "move both to one device",
    Reason.EMPTY_LOOP: "compile with dynamic=False, so that the inner axis is known to have points",
    Reason.NOT_TRIED: "put the two next to each other in the program",
    Reason.NO_SAVING: "accept two kernels: one kernel would take as long",
    Reason.TOO_LARGE: "compile its parts apart, or return a value in the middle",
    Reason.EXPENSIVE: "require_fused computes it there all the same",
    Reason.LIBRARY: "set mode='max-autotune', which measures templates against the library",
    Reason.LIBRARY_JOINS: "set mode='max-autotune', which measures templates against the library",
    Reason.FORBIDDEN: "leave out the forbid_fused",
    Reason.BOTH_IN_MEMORY: "accept two kernels, which need less memory and share little",
    Reason.MORE_MEMORY: "accept two kernels, which need less memory, or use a smaller batch",
    Reason.NOTHING_RUNS: "accept it: there is nothing to record",
    Reason.VENDOR_FASTER: "set mode='max-autotune', which measures instead of estimating",
    Reason.BARE: "set mode='max-autotune', which measures instead of estimating, or require_fused",
    Reason.UNCALIBRATED: "set mode='max-autotune', which measures templates on this machine",
    Reason.VENDOR_MEASURED: "accept the library's kernel: a template was slower here",
    Reason.NO_TEMPLATE: "write a template for it (docs/templates/tutorial.md)",
    Reason.TWO_MATMULS: "write a template that is a program of both (docs/templates/reference.md)",
    Reason.NOT_EPILOGUE: "make what follows the matmul elementwise",
    Reason.NOT_PROLOGUE: "make what comes before the matmul elementwise, or accept a stored operand",
    Reason.NOT_IN_TILES: "reduce along rows of the matmul's result",
    Reason.NOT_WHOLE: "use fewer columns, so that a tile holds a full row",
    Reason.RECOMPUTE_DEAR: "accept that the matmul's result is stored",
    Reason.CHAINED_REDUCTIONS: "make the reductions independent: sums and sums of squares instead of sums of differences",
    Reason.SCALE_MASKED: "apply the mask before the scale, or to the matmul's result",
    Reason.SCALE_FITS: "give the operand a type with a wider range",
    Reason.SCALE_ORDER: "set options={'numerics': 'fast'}",
    Reason.SCALE_SUMMED: "sum the operand before it is scaled",
    Reason.SCALE_NEEDED: "read the operand without its scale elsewhere, too",
    Reason.SCALE_REMAINS: "multiply the matmul's result by the scale",
    Reason.UNEQUAL: "accept that the matmul's result is stored",
    Reason.OPERAND_STORED: "require_fused of that operand and the matmul, or mode='max-autotune'",
    Reason.NO_OPERAND_REDUCTION: "accept a kernel of its own for the sum",
    Reason.APART_FASTER: "set mode='max-autotune', which measures instead of estimating",
    Reason.LARGER: "accept that it is computed at each call",
    Reason.RETURNED: "return a copy of it",
    Reason.WRITTEN: "write out of place",
    Reason.FROZEN_OPERAND: "accept it: frozen tensors need no packing at each call",
    Reason.UNPACKED_BETTER: "accept that it is read as it is",
    Reason.INDEX_MISMATCH: "write the consumer so that it reads the element the producer makes, or accept two kernels",
    Reason.SPACE_MISMATCH: "give both the same shape",
    Reason.REDUCED_AXES_DIFFER: "reduce over the same axes",
    Reason.NOT_ELEMENTWISE: "move that operator in front of the first contraction, or behind the last one",
    Reason.NOT_SOFTMAX: "normalise along the axis that is summed over, and multiply by the weights as they are",
    Reason.STEP_TYPES: "keep one floating-point type from the first contraction to the last one",
    Reason.MANY_STEPS: "accept separate kernels: a sum along residual connections is needed elsewhere, too",
    Reason.NEEDED: "return or read something else, or compute that outside of the compiled region",
    Reason.STABLE_ORDER: "set options={'numerics': 'fast'}",
    Reason.CYCLE: "move the operation between them before the producer or after the consumer",
    Reason.SEARCH_LIMIT: "compile a smaller region",
    Reason.MUTATION: "write out of place",
    Reason.PARALLELISM: "use more rows",
    Reason.COLUMNS: "reduce over the contiguous axis",
    Reason.LAYOUT_CONFLICT: "give the tensors the same memory format",
    Reason.SWITCHED_OFF: "set options={'fusion': True}",
    Reason.HORIZONTAL_OFF: "set options={'horizontal_fusion': True}",
    Reason.NOT_IN_ORDER: "let the places of the updates depend on rows or on columns of the matmul, not on both",
    Reason.ORDER_DEAR: "use fewer threads, or require_fused",
    Reason.EXTERN_CALL: "write a template for the library call (docs/templates/tutorial.md)",
    Reason.SYMBOLIC: "compile with dynamic=False, or mark the dimensions static",
    Reason.UNKNOWN_SIZES: "compile with dynamic=False, or mark the dimensions static",
    Reason.NO_LOWERING: "use another operator, or write a template for this one (docs/templates/tutorial.md)",
    Reason.NOT_ONE_GPU: "move all tensors to one GPU, or compile the parts apart",
    Reason.FEW_LAUNCHES: "compile more in one graph",
    Reason.HOST_DECIDES: "leave that step out of the compiled region",
    Reason.COPIES_DEAR: "give the model and its inputs memory_format=torch.channels_last, or set options={'freezing': True}",
    Reason.EAGER_STRIDES: "give the model and its inputs memory_format=torch.channels_last",
    Reason.LAYERS_DIFFER: "give the layers the same constants, sizes and strides; write and draw outside of them",
    Reason.SMALL_LAYERS: "set options={'layer_sharing': 'on'}, for a shorter compilation",
    Reason.SHORT_LOOP: "set options={'loop_rolling': 'on'}",
    Reason.UNROLLED: "give iterations the same operators and sizes; write, draw and count outside of the loop",
    Reason.ITERATIONS: "index tensors by the number of the iteration alone, and write what no other iteration needs",
    Reason.MUTATED_INPUT: "return the new value, or make the tensor a parameter or buffer of a module",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One decision. `bytes_saved` is memory traffic at the size hints; `measured` are times in microseconds, if any. `kernels`
    are two steps of the plan that touch one buffer: it says why they stay apart, and is the only one that names both.
    `paths` are where producer and consumer are in the user's modules, where that is known."""

    producer: str
    consumer: str
    outcome: Outcome
    reason: Reason
    bytes_saved: int = 0
    detail: str = ""
    measured: tuple[float, ...] = ()
    kernels: tuple[str, ...] = ()
    paths: tuple[str, str] = ("", "")

    def named(self, paths: Mapping[str, str]) -> Verdict:
        """The verdict with the paths of its nodes."""
        found = paths.get(self.producer, ""), paths.get(self.consumer, "")
        return replace(self, paths=found) if any(found) else self

    @property
    def parties(self) -> tuple[str, ...]:
        """Producer and consumer with their paths: ``mm_4 [layers.1.mlp.up]``."""
        pairs = zip((self.producer, self.consumer), self.paths, strict=True)
        return tuple(f"{name} [{path}]" if path else name for name, path in pairs if name)

    @property
    def change(self) -> str:
        return CHANGES.get(self.reason, "")

    def to_dict(self) -> dict[str, object]:
        """The verdict as JSON-ready data."""
        return {
            "producer": self.producer, "consumer": self.consumer, "outcome": self.outcome.value, "reason": self.reason.name,
            "because": self.reason.value, "kernels": list(self.kernels),
            "paths": list(self.paths),
            "bytes_saved": self.bytes_saved, "detail": self.detail, "measured": list(self.measured), "change": self.change,
        }  # fmt: skip

    def __str__(self) -> str:
        saved = f", saves {self.bytes_saved:,} bytes" if self.bytes_saved else ""
        detail = f" ({self.detail})" if self.detail else ""
        return f"{' + '.join(self.parties)}: {self.outcome.value}, because {self.reason.value}{detail}{saved}"


# ---- what users demand of fusion ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One call of an operator in a graph: the path of the module that made it, the user's line (``file.py:12 code``), and which
    of the graph's calls of this operator it is, from 0, whatever their overloads."""

    operator: str
    module: str = ""
    line: str = ""
    number: int = 0

    @property
    def packet(self) -> str:
        """The operator's name without its overload."""
        return self.operator.rpartition(".")[0] or self.operator

    def __str__(self) -> str:
        place = self.module or self.line.partition(" ")[0]
        return f"{self.packet}#{self.number}{f' in {place}' if place else ''}"


@dataclass(frozen=True, slots=True)
class CallName:
    """What a user calls operators by: ``aten.mm``, or one of its calls: ``aten.mm@layers.3.mlp`` (a module and what is in it),
    ``aten.mm@model.py:12`` (a line), ``aten.mm#2`` (a number, as `kgen.explain` shows it). ``@layers.3.mlp`` is all of them."""

    operator: str = ""
    place: str = ""
    number: int | None = None

    @property
    def is_instance(self) -> bool:
        """Whether it tells calls of one operator apart."""
        return bool(self.place) or self.number is not None

    def names(self, call: OperatorCall) -> bool:
        """Whether it is a name of this call."""
        if self.operator not in ("", call.operator, call.packet) or self.number not in (None, call.number):
            return False
        return not self.place or _is_in(call.module, self.place, ".") or _is_in(call.line, self.place, " ")

    def among(self, calls: Iterable[OperatorCall]) -> bool:
        """Whether it names one of them."""
        return any(map(self.names, calls))


def _is_in(text: str, start: str, end: str) -> bool:
    return text == start or text.startswith(start + end)


@lru_cache(maxsize=256)
def call_name(text: str) -> CallName:
    """The parts of a name. Raises BadCallName."""
    operator, at, place = text.partition("@")
    operator, hash_sign, number = operator.partition("#")
    if (at and not place) or not (operator or place) or (hash_sign and (at or not number.isdecimal())):
        raise errors.BadCallName(name=text)
    return CallName(operator, place, int(number) if hash_sign else None)


@dataclass(slots=True, eq=False)
class _Seen:
    """Which of a demand's names were names of something in the graphs compiled so far, and what else there was."""

    graphs: int = 0
    found: set[str] = field(default_factory=set)
    calls: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FusionDemand:
    """What a user asked of the scheduler: operators, by name, that must, or must not, share a kernel."""

    producer: str
    consumer: str
    wanted: bool
    seen: _Seen = field(default_factory=_Seen, compare=False, repr=False)

    @property
    def first(self) -> CallName:
        return call_name(self.producer)

    @property
    def second(self) -> CallName:
        return call_name(self.consumer)

    @property
    def door(self) -> str:
        """The function that asks for it."""
        return "require_fused" if self.wanted else "forbid_fused"

    def between(self, some: Sequence[OperatorCall], others: Sequence[OperatorCall]) -> bool:
        """Whether it is about a call among each: of `aten.mm.default`, it may say `aten.mm`."""
        one, two = self.first, self.second
        return (one.among(some) and two.among(others)) or (one.among(others) and two.among(some))

    def names(self, calls: Sequence[OperatorCall]) -> bool:
        """Whether it is about any of the calls."""
        return self.first.among(calls) or self.second.among(calls)

    def look_at(self, calls: Sequence[OperatorCall]) -> None:
        """Notes which names a graph with these calls has."""
        self.seen.graphs += 1
        for text in (self.producer, self.consumer):
            name = call_name(text)
            if name.among(calls):
                self.seen.found.add(text)
            self.seen.calls.update((str(call), None) for call in calls if name.operator in (call.operator, call.packet))

    def check(self) -> None:
        """Raises NothingNamed where the graphs had no call of a name. To forbid what does not occur asks for nothing, but one
        call that is not there was meant to be another one. Warns where there were no graphs: steps of a loop may each stand
        under a demand, but whoever asks about a function that was compiled before learns nothing."""
        if not self.seen.graphs:
            warnings.warn(NOTHING_COMPILED.format(door=self.door), errors.NothingCompiledWarning, stacklevel=5)
        for text in (self.producer, self.consumer):
            if self.seen.graphs and text not in self.seen.found and (self.wanted or call_name(text).is_instance):
                known = [one for one in self.seen.calls if one.startswith(f"{call_name(text).operator}#")]
                raise errors.NothingNamed(where=self.door, name=text, known=_listed(known) or "another operator")


NOTHING_COMPILED = (
    "kgen: {door} has looked at nothing, for no graph was compiled inside. What was compiled before is not looked at again:"
    " enter the block before the first call, or call torch._dynamo.reset()"
)
# Calls that an error lists.
_LISTED = 8


def _listed(calls: Sequence[str]) -> str:
    more = f" and {len(calls) - _LISTED} more" if len(calls) > _LISTED else ""
    return ", ".join(calls[:_LISTED]) + more


# What `require_fused` and `forbid_fused` say of the graphs that are compiled now.
DEMANDS: ContextVar[tuple[FusionDemand, ...]] = ContextVar("kgen_fusion_demands", default=())


@contextmanager
def require_fused(producer: str, consumer: str) -> Iterator[None]:
    """Graphs compiled inside must run operators `producer` and `consumer` in one kernel, or raise `errors.FusionRequired` with
    the reason why not. An operator is ``"aten.mm"``; one call of it is ``"aten.mm@layers.3.mlp"`` (in that module),
    ``"aten.mm@model.py:12"`` (on that line) or ``"aten.mm#2"`` (the number that `kgen.explain` shows).

    Raises BadCallName, UnknownOperator, and NothingNamed at the end, where no graph had such a call."""
    with _demanded(FusionDemand(producer, consumer, True)):
        yield


@contextmanager
def forbid_fused(producer: str, consumer: str) -> Iterator[None]:
    """Graphs compiled inside keep the two operators in separate kernels. Names and errors are those of `require_fused`; an
    operator that no graph has is no error."""
    with _demanded(FusionDemand(producer, consumer, False)):
        yield


@contextmanager
def _demanded(demand: FusionDemand) -> Iterator[None]:
    call_name(demand.producer), call_name(demand.consumer)
    token = DEMANDS.set((*DEMANDS.get(), demand))
    try:
        yield
    finally:
        DEMANDS.reset(token)
    demand.check()
