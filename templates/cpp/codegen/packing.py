"""Right operands that are the same at each call: packed once into the words that the engine's main loop reads, in its order.

`templates/cpp/include/kgen/pack.h` has the layout (`pack_column`), which depends on the instruction set: a kernel and the
function that packs for it are compiled together. Here is the rule by which it pays; `kernels/packing.py` writes the function.

What it weighs, as measured on an AMD Zen 5 with AVX-512 and its bfloat16 dot products (4096 columns of 4096, float32 and
bfloat16):

- packing at each call costs as much as multiplying about 16 rows: 32 rows took 1.7 times as long as packed before, 64 rows 1.3
  times and 512 rows 1.05 times;
- one or two rows read columns as fast where they lie, 8 rows half as fast;
- numbers that are widened (8 bits to 16, halves to floats) make twice as much to read: four rows are slower for it, 8 faster;
- of a few rows in AMX tiles nothing was measured: they stay as they are.
"""

from __future__ import annotations

import torch

from kgen.ir import index as ix
from kgen.ir.plan import Packing
from kgen.templates.problem import Problem

__all__ = ["packing_of", "why_not"]

# Rows above which packing at each call is little beside the matmuls. Up to so many, columns are as well read where they lie:
# of any numbers, of those that packing widens, and of those that AMX multiplies.
MOST_ROWS, FEW_ROWS, FEW_WIDENED_ROWS, FEW_TILED_ROWS = 512, 2, 4, 16
# Whatever the instruction set: columns of a panel, and words along k that are packed at a time.
COLUMNS, DEPTH = 32, 16


def why_not(problem: Problem, name: str, number: int = 0) -> str | None:
    """Why a frozen operand is not packed, or None."""
    one = problem.members[number][name]
    own, summed = problem.operand_axes(name)
    batch = [v for axis in one.axes if axis not in (own, summed) for v in one.loops[axis] if v in one.value.variables()]
    lengths = [problem.extent(own), problem.extent(summed), *(v.extent for v in batch)]
    if any(n.as_int() is None for n in lengths) or _numbers(problem, name, number) is None:
        return "its sizes or strides are symbols"
    if len(batch) > 1:
        return "its batches are several loops"
    if min(problem.size(own), problem.size(summed)) < COLUMNS:
        return f"it has less than {COLUMNS} columns or numbers to a column"
    return _by_rows(problem, _rows(problem, name), one.dtype)


def _by_rows(problem: Problem, rows: str, kind: torch.dtype) -> str | None:
    """Why packing does not pay for the rows that there are, or may be."""
    word, elements = _word(problem)
    if word.itemsize > elements * kind.itemsize and ix.lower_bound(problem.extent(rows)) <= FEW_WIDENED_ROWS:
        return "packed it is twice as large, and a few rows take as long as reading it"
    if not problem.static(rows):
        return None
    few = FEW_TILED_ROWS if problem.device.in_tiles(kind) else FEW_ROWS
    if problem.size(rows) <= few:
        return f"with {problem.size(rows)} rows it is read as fast unpacked"
    return f"with {problem.size(rows)} rows packing takes little of the time" if problem.size(rows) > MOST_ROWS else None


def packing_of(problem: Problem, name: str, number: int) -> Packing:
    """The packing, still without a name, of an operand for which nothing speaks against it."""
    own, summed = problem.operand_axes(name)
    one, numbers = problem.members[number][name], _numbers(problem, name, number)
    assert numbers is not None
    assert one.load is not None
    offset, batches, *strides = numbers
    n, k = problem.size(own), problem.size(summed)
    dtype, elements = _word(problem)
    words = -(-k // elements)
    count = batches[0] * -(-n // COLUMNS) * COLUMNS * -(-words // DEPTH) * DEPTH
    steps = (batches[1], strides[0], strides[1])
    return Packing("", one.load.attr[0], offset, (batches[0], n, k), steps, problem.main_dtype, dtype, count)


def _rows(problem: Problem, name: str) -> str:
    """The axis of the other operand's rows."""
    other = next(a for a in problem.inputs if a != name)
    return problem.operand_axes(other)[0]


def _numbers(problem: Problem, name: str, number: int) -> tuple[int, tuple[int, int], int, int] | None:
    """Where the operand begins, how many batches it has and how far apart they are, and its strides along its own axis and the
    summed one; None where one of them is no number."""
    one = problem.members[number][name]
    assert one.load is not None
    operand_axes = problem.operand_axes(name)
    offset = one.load.attr[1][0]
    batch = [v for axis in one.axes if axis not in operand_axes for v in one.loops[axis] if v in one.value.variables()]
    strides = [problem.stride(name, axis, number) for axis in operand_axes]
    steps = [ix.stride_of(offset, v) for v in batch[:1]] or [ix.ZERO]
    counts = [v.extent for v in batch[:1]] or [ix.ONE]
    start = ix.substitute(offset, {v: ix.ZERO for axis in one.axes for v in one.loops[axis]})
    found = [None if e is None else e.as_int() for e in (start, *counts, *steps, *strides)]
    if None in found:
        return None
    first, count, step, own, summed = (int(e or 0) for e in found)
    return first, (count, step), own, summed


def _word(problem: Problem) -> tuple[torch.dtype, int]:
    """A type as wide as the engine's words, and how many elements each holds (microkernel.h, unit_t)."""
    kind = problem.main_dtype
    if kind in (torch.int8, torch.uint8):
        return torch.int32, 2
    if kind is torch.bfloat16 and problem.device.narrow > 1:
        return torch.int32, 2
    return (torch.float64 if kind is torch.float64 else torch.float32), 1
