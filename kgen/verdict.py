"""Decisions as data. Every choice of the scheduler is a `Verdict`: who, what, why, and what would change it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum


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
    SEQUENCE = "the second has work for one program of a GPU alone, which may as well run the first before"
    SYMBOLIC = "sizes are symbols, and a batch on a GPU has its programs counted when it is compiled"
    ONE_REPLAY = "all of its launches then cost as much as one"
    NOT_ONE_GPU = "it does not run on one GPU alone"
    NOTHING_RUNS = "it launches nothing"
    FEW_LAUNCHES = "a replay would cost the host more than its few launches"
    TEMPLATE = "a template computes it, with what is fused"
    VENDOR_FASTER = "the library call and separate kernels are estimated to be faster"
    UNCALIBRATED = "nobody has measured templates on contractions of this kind: the library call and separate kernels take it"
    VENDOR_MEASURED = "the library call and separate kernels were measured to be faster"
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
    ITERATIONS = "the iterations of the loop cannot run as one batch"
    EQUAL_LAYERS = "the blocks are one function of different tensors"
    LAYERS_DIFFER = "the blocks cannot be calls of one function"
    MUTATED_INPUT = "it writes an input that may have another address at the next call"


CHANGES: dict[Reason, str] = {
    Reason.INTERNAL_ERROR: "report it with the file that was kept",
    Reason.INDEX_MISMATCH: "write the consumer so that it reads the element the producer makes, or accept two kernels",
    Reason.SPACE_MISMATCH: "give both the same shape",
    Reason.REDUCED_AXES_DIFFER: "reduce over the same axes",
    Reason.NOT_ELEMENTWISE: "move that operator in front of the first contraction, or behind the last one",
    Reason.NOT_SOFTMAX: "normalise along the axis that is summed over, and multiply by the weights as they are",
    Reason.STEP_TYPES: "keep one floating-point type from the first contraction to the last one",
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
    Reason.EXTERN_CALL: "a template for the library call would make it fusible",
    Reason.SYMBOLIC: "compile with dynamic=False, or mark the dimensions static",
    Reason.UNKNOWN_SIZES: "compile with dynamic=False, or mark the dimensions static",
    Reason.NO_LOWERING: "none: the operator runs in eager",
    Reason.NOT_ONE_GPU: "move all tensors to one GPU, or compile the parts apart",
    Reason.FEW_LAUNCHES: "compile more in one graph",
    Reason.HOST_DECIDES: "leave that step out of the compiled region",
    Reason.COPIES_DEAR: "give the model and its inputs memory_format=torch.channels_last, or set options={'freezing': True}",
    Reason.EAGER_STRIDES: "give the model and its inputs memory_format=torch.channels_last",
    Reason.LAYERS_DIFFER: "give the layers the same constants, sizes and strides; write and draw outside of them",
    Reason.ITERATIONS: "index tensors by the number of the iteration alone, and write what no other iteration needs",
    Reason.MUTATED_INPUT: "return the new value, or make the tensor a parameter or buffer of a module",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One decision. `bytes_saved` is memory traffic at the size hints; `measured` are times in microseconds, if any. `kernels`
    are two steps of the plan that touch one buffer: it says why they stay apart, and is the only one that names both."""

    producer: str
    consumer: str
    outcome: Outcome
    reason: Reason
    bytes_saved: int = 0
    detail: str = ""
    measured: tuple[float, ...] = ()
    kernels: tuple[str, ...] = ()

    @property
    def change(self) -> str:
        return CHANGES.get(self.reason, "")

    def to_dict(self) -> dict[str, object]:
        """The verdict as JSON-ready data."""
        return {
            "producer": self.producer, "consumer": self.consumer, "outcome": self.outcome.value, "reason": self.reason.name,
            "because": self.reason.value, "kernels": list(self.kernels),
            "bytes_saved": self.bytes_saved, "detail": self.detail, "measured": list(self.measured), "change": self.change,
        }  # fmt: skip

    def __str__(self) -> str:
        saved = f", saves {self.bytes_saved:,} bytes" if self.bytes_saved else ""
        detail = f" ({self.detail})" if self.detail else ""
        parts = " + ".join(filter(None, (self.producer, self.consumer)))
        return f"{parts}: {self.outcome.value}, because {self.reason.value}{detail}{saved}"


@dataclass(frozen=True, slots=True)
class FusionDemand:
    """What a user asked of the scheduler: operator names that must, or must not, share a kernel."""

    producer: str
    consumer: str
    wanted: bool

    def between(self, some: Iterable[str], others: Iterable[str]) -> bool:
        """Whether it is about an operator of each: of `aten.mm.default`, it may say `aten.mm`."""
        one, two = _spelled(some), _spelled(others)
        return (self.producer in one and self.consumer in two) or (self.producer in two and self.consumer in one)


def _spelled(operators: Iterable[str]) -> set[str]:
    return {name for op in operators for name in (op, op.rpartition(".")[0])}


# What `require_fused` and `forbid_fused` say of the graphs that are compiled now.
DEMANDS: ContextVar[tuple[FusionDemand, ...]] = ContextVar("kgen_fusion_demands", default=())


@contextmanager
def require_fused(producer: str, consumer: str) -> Iterator[None]:
    """Graphs compiled inside must run operators `producer` and `consumer` (``"aten.mm"``) in one kernel, or raise
    `errors.FusionRequired` with the reason why not."""
    token = DEMANDS.set((*DEMANDS.get(), FusionDemand(producer, consumer, True)))
    try:
        yield
    finally:
        DEMANDS.reset(token)


@contextmanager
def forbid_fused(producer: str, consumer: str) -> Iterator[None]:
    """Graphs compiled inside keep the two operators in separate kernels."""
    token = DEMANDS.set((*DEMANDS.get(), FusionDemand(producer, consumer, False)))
    try:
        yield
    finally:
        DEMANDS.reset(token)
