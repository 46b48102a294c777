"""What the Jinja file of a loop kernel's template sees: slots, as text with lines of its own or as small records.

A slot of one name means the same in C++ and Triton:

- ``{{ kernel() }}`` opens the kernel, with its parameters and constants, ``{{ kernel.end() }}`` closes it;
- ``{{ body }}`` are the statements of a point, or of a row before its first section;
- ``{% for section in sections %}``: the walks over a row, in order. ``{{ section.before }}`` declares accumulators,
  ``{{ section.loop }}`` is ``{{ section.body }}`` inside of its loops, ``{{ section.after }}`` uses what was accumulated;
- ``{% for form in forms %}``: of a multi-tensor kernel, the functions that its members share;
- ``config``, ``problem`` and the knobs under their own names.

What has to be written around them is a language's own: `TritonPoints` and its kin for Triton, `CppPoints` and its kin for C++.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

KINDS = ("pointwise", "reduction", "scan", "column_reduction", "multi_tensor", "packing")


class Head(Protocol):
    """``{{ kernel() }}`` and ``{{ kernel.end() }}``."""

    def __call__(self) -> str:
        """The text that opens the kernel."""

    def end(self) -> str:
        """The text that closes it."""


@dataclass(frozen=True, slots=True)
class SectionSlot:
    """One walk over a row. `loop` is `body` in its loops, or `body` itself where registers hold the row."""

    before: str
    loop: str
    body: str
    after: str


# ---- Triton ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TritonPoints:
    """`indices` define the loop variables and masks of the program's tile."""

    kernel: Head
    indices: str
    body: str


@dataclass(frozen=True, slots=True)
class TritonRows(TritonPoints):
    """`row` defines the variables along a row that registers hold; it is empty where sections walk the row."""

    row: str
    sections: tuple[SectionSlot, ...]


@dataclass(frozen=True, slots=True)
class TritonColumns(TritonRows):
    """Each program takes a `share` of the rows, the blocks that begin at ``start in tl.range({{ blocks }})``; `indices` are
    those of a block. `sums` begin before the blocks, `ends` store them after."""

    share: str
    blocks: str
    sums: str
    ends: str


@dataclass(frozen=True, slots=True)
class TritonForm:
    """A function that members share. `pointers` are further names of its parameters."""

    loops: str
    head: str
    pointers: str
    indices: str
    body: str


class HeadOfForms(Head, Protocol):
    """The functions of the forms stand between ``{{ kernel.imports() }}`` and ``{{ kernel.open() }}``."""

    def imports(self) -> str:
        """What stands before all functions."""

    def open(self) -> str:
        """The text that opens the kernel after them."""


@dataclass(frozen=True, slots=True)
class TritonForms:
    """`calls` leads the program of number `program` to its member's function."""

    kernel: HeadOfForms
    forms: tuple[TritonForm, ...]
    calls: str


# ---- C++ ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VectorLoop:
    """The loop whose points are lanes, from `lo` to `hi` in a task."""

    name: str
    extent: str
    lo: str
    hi: str


@dataclass(frozen=True, slots=True)
class TileLoop:
    """A loop that runs in strips of at most `length`, from `lo` to `hi` in a task; `begin` names the first point."""

    name: str
    begin: str
    lo: str
    hi: str
    length: int


@dataclass(frozen=True, slots=True)
class TurnedSlot:
    """A tile that is transposed in registers: its name, element type, first pointer, and stride from lane to lane."""

    name: str
    type: str
    first: str
    stride: str


@dataclass(frozen=True, slots=True)
class Tasks:
    """The loops outside of a row, or of all points. Threads share `count` tasks, at least `grain` each; `indices` are the
    statements that make loop variables of the number `task`, `advance` goes on to the next one. Where a task has one variable,
    `counter` is its name and `indices` are empty. `before` stands outside of the vector loop. Where only the vector loop is
    left, the kernel is `flat`, and threads share its points. Of `few` tasks one thread does all, as their number says when the
    code is made. The vector loop is there for each value of `conditions`; `derived` are statements that follow from these."""

    flat: bool
    count: str
    grain: int
    counter: str
    indices: str
    advance: str
    before: str
    vector: VectorLoop | None
    tile: TileLoop | None
    turned: tuple[TurnedSlot, ...]
    walked: tuple[tuple[str, str], ...]
    few: bool
    conditions: tuple[str, ...] = ()
    derived: str = ""


@dataclass(frozen=True, slots=True)
class CppPoints:
    kernel: Head
    tasks: Tasks
    body: str


@dataclass(frozen=True, slots=True)
class ShareSlot:
    """Rows are shared out among `count` sets of column sums, which begin with `zeros`."""

    name: str
    count: int
    grain: int
    zeros: str


@dataclass(frozen=True, slots=True)
class OneStep:
    """The lanes hold a full row: their loop variable is 0, and `width` declares how many there are."""

    name: str
    width: str


@dataclass(frozen=True, slots=True)
class RowSplit:
    """Threads share each row, `extent` long, in multiples of `step`: `declare` their partial results, reduce `loop` from
    `before`, `keep` what they have, and one thread runs `join`."""

    declare: str
    extent: str
    step: int
    before: str
    loop: str
    keep: str
    join: str
    after: str


@dataclass(frozen=True, slots=True)
class CppRows(CppPoints):
    """`rows` declare buffers of a row in a thread's memory. `vertical`: lanes are outer points."""

    sections: tuple[SectionSlot, ...]
    rows: str
    vertical: bool
    split: RowSplit | None
    share: ShareSlot | None
    one_step: OneStep | None


@dataclass(frozen=True, slots=True)
class ScanSplit:
    """Threads share each row and walk it twice: `total_loop` finds their shares' totals, `loop` scans from the total before."""

    declare: str
    extent: str
    step: int
    total_before: str
    total_loop: str
    totals: tuple[tuple[str, str], ...]
    running: tuple[str, ...]
    loop: str
    after: str


@dataclass(frozen=True, slots=True)
class CppScans(CppRows):
    scan_split: ScanSplit | None


@dataclass(frozen=True, slots=True)
class CppForm:
    """A body that members share, as a function `name` of their pointers and sizes; `parameters` reads these."""

    number: int
    name: str
    loops: str
    parameters: str
    lanes: int
    tasks: Tasks
    body: str


@dataclass(frozen=True, slots=True)
class CppForms:
    """`rows` are the members of the table, each with up to `width` sizes; `constant`: none of them is a symbol."""

    kernel: Head
    forms: tuple[CppForm, ...]
    rows: tuple[str, ...]
    width: int
    constant: bool
    grain: int


@dataclass(frozen=True, slots=True)
class CppPacking:
    """An operand of `batches` times `rows` by `columns` elements of type `source`, packed for contractions with one of type
    `other` into `room` bytes. `first` is the first element of batch `b`."""

    kernel: Head
    source: str
    other: str
    batches: int
    rows: int
    columns: int
    first: str
    strides: str
    room: int


Slots = TritonPoints | TritonForms | CppPoints | CppForms | CppPacking
SLOTS: dict[tuple[str, str], type[Slots]] = {
    ("cuda", "pointwise"): TritonPoints,
    ("cuda", "reduction"): TritonRows,
    ("cuda", "scan"): TritonRows,
    ("cuda", "column_reduction"): TritonColumns,
    ("cuda", "multi_tensor"): TritonForms,
    ("cpu", "pointwise"): CppPoints,
    ("cpu", "reduction"): CppRows,
    ("cpu", "scan"): CppScans,
    ("cpu", "column_reduction"): CppRows,
    ("cpu", "multi_tensor"): CppForms,
    ("cpu", "packing"): CppPacking,
}
# Slots without which a kernel would compute less than it has to, and compile all the same.
NEEDED: dict[tuple[str, str], tuple[str, ...]] = {
    ("cuda", "pointwise"): ("body",),
    ("cuda", "reduction"): ("body", "sections"),
    ("cuda", "scan"): ("body", "sections"),
    ("cuda", "column_reduction"): ("share", "blocks", "sums", "body", "sections", "ends"),
    ("cuda", "multi_tensor"): ("forms", "calls"),
    ("cpu", "pointwise"): ("body",),
    ("cpu", "reduction"): ("body", "sections"),
    ("cpu", "scan"): ("body", "sections"),
    ("cpu", "column_reduction"): ("share", "body", "sections"),
    ("cpu", "multi_tensor"): ("forms", "rows"),
    ("cpu", "packing"): ("source", "other", "first", "strides"),
}
# Names besides the slots and the knobs.
GIVEN = frozenset({"config", "problem"})


def slot_names(device: str, kind: str) -> frozenset[str]:
    """The names that a Jinja file may use, but for knobs; none where the device has no such kernels."""
    slots = SLOTS.get((device, kind))
    return frozenset() if slots is None else GIVEN | {one.name for one in fields(slots)}
