"""Tiles that TMA moves: from the index of a load or a store to a TMA descriptor.

A descriptor knows where its tensor ends, so a box that reaches past an end needs no mask: what is beyond reads as zero, and
is not written. It wants one contiguous dimension, and everything else at multiples of 16 bytes. A batch is a dimension of its
own, so that the last tile of a matrix never touches the next matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.values import Value
from kgen.rendered.tensor_map import MAX_RANK, TensorMap
from kgen.templates.problem import Input, Problem, memoised
from kgen.templates.triton.codegen.launch import ALIGNMENT, aligned
from kgen.templates.triton.codegen.table import TRITON_TYPES

# The longest side of a box; a contiguous one may be longer, for the compiler cuts it.
MAX_SIDE = 256
# Of what epilogues read and write through the engine. Bytes are only read so: by pointers, a warp would touch eight lines of
# the cache for 64 of them.
WRITTEN_TYPES = (torch.bfloat16, torch.float16, torch.float32)
READ_TYPES = (*WRITTEN_TYPES, torch.bool, torch.uint8, torch.int8)
# A bool has no descriptor: it is read as the byte that it is.
_BYTE = "u8"
# Elements that a descriptor may have along a dimension, as a kernel counts them.
MAX_SIZE = 2**31 - 1
# Neighbours in a row of a matmul's fragment that a thread has, when rows of the right operand come `by_eights`.
THREAD_ELEMENTS = 8


@dataclass(frozen=True, slots=True)
class TmaLayout:
    """How a tile's tensor is laid out in memory: for each dimension of its descriptor, outermost first, the axis, the loop
    (None: its length is 1), and elements from one index to the next. The last two are the sides of a tile, the others have one
    index. Operands that are multiplied as TF32 are `rounded` to it."""

    buffer: str
    dtype: torch.dtype
    axes: tuple[str, ...]
    loops: tuple[Var | None, ...]
    strides: tuple[Expr, ...]
    offset: Expr
    rounded: bool = False

    def sizes(self) -> tuple[Expr, ...]:
        return tuple(ix.ONE if v is None else v.extent for v in self.loops)

    def map(self, lengths: Mapping[str, int]) -> TensorMap | None:
        """The descriptor for tiles of these lengths along their axes, unless its box would be too large."""
        rows, columns = (lengths[axis] for axis in self.axes[-2:])
        if rows > MAX_SIDE or columns * self.dtype.itemsize < ALIGNMENT:
            return None
        block = (*(1 for _ in self.axes[:-2]), rows, columns)
        kind = _BYTE if self.dtype is torch.bool else TRITON_TYPES[self.dtype].pointer.removeprefix("*")
        return TensorMap(self.buffer, kind, block, self.sizes(), self.strides, self.offset, rounded=self.rounded)

    def by_eights(self, rows: int, columns: int) -> ByEights | str:
        """How chunks of as many rows of a matrix of fixed size come to shared memory in another order, or why they cannot.

        A thread that multiplies registers gets two neighbours in a row of the result, and of what the right operand's next
        eight rows give the next two. With the first pairs of all groups of eight rows in front, then the second ones and so on,
        eight neighbours are one thread's."""
        count, row = self.sizes()[-2].as_int(), self.strides[-2]
        if count is None or count % THREAD_ELEMENTS:
            return f"{self.axes[-2]} is no multiple of {THREAD_ELEMENTS}"
        outer = list(range(len(self.axes) - 2))
        # matrices that lie one behind the other have their rows in one dimension
        behind = next((d for d in outer if self.strides[d] == row * count), None) if len(outer) + 4 > MAX_RANK else None
        outer = [d for d in outer if d != behind]
        if len(outer) + 4 > MAX_RANK:
            return f"it has more than {MAX_RANK} dimensions in groups of {THREAD_ELEMENTS} rows"
        groups = ix.constant(count // THREAD_ELEMENTS) * (ix.ONE if behind is None else self.sizes()[behind])
        pairs, two = ix.constant(THREAD_ELEMENTS // 2), ix.constant(2)
        made = TensorMap(
            self.buffer, TRITON_TYPES[self.dtype].pointer.removeprefix("*"),
            (*(1 for _ in outer), THREAD_ELEMENTS // 2, rows // THREAD_ELEMENTS, 2, columns),
            (*(self.sizes()[d] for d in outer), pairs, groups, two, self.sizes()[-1]),
            (*(self.strides[d] for d in outer), row * 2, row * THREAD_ELEMENTS, row, self.strides[-1]), self.offset,
            rounded=self.rounded,
        )  # fmt: skip
        return ByEights(made, behind, count // THREAD_ELEMENTS)


@dataclass(frozen=True, slots=True)
class ByEights:
    """A descriptor of `TmaLayout.by_eights`. Dimension `behind` of the box is one with its rows, of whose groups of eight each
    matrix has as many."""

    map: TensorMap
    behind: int | None
    groups: int

    def begin(self, origin: Sequence[str], chunk: str) -> list[str]:
        """Where a chunk begins, from where its matrix does along each dimension that is no side."""
        outer = [place for d, place in enumerate(origin) if d != self.behind]
        matrix = "" if self.behind is None else f"{origin[self.behind]} * {self.groups} + "
        return [*outer, "0", f"{matrix}{chunk} * {self.map.block[-3]}", "0", "0"]


@memoised
def tma_layout(problem: Problem, one: Input) -> TmaLayout | str:
    """How TMA fetches an operand, or why that cannot be done."""
    if one.load is None:
        return f"{one.name} is computed"
    found = _lying(problem, one.name, one.load.attr, tuple((axis, one.loops[axis]) for axis in one.axes))
    if isinstance(found, str) or found.dtype is not torch.float32:
        return found
    return replace(found, rounded=problem.tf32)


@memoised
def by_tma(problem: Problem, one: Input) -> bool:
    """Whether a template's operand comes by TMA."""
    return problem.template.operands[one.name].access == "tma" and isinstance(tma_layout(problem, one), TmaLayout)


def in_registers(problem: Problem, one: Input) -> bool:
    """Whether an operand's tile comes to registers before it is multiplied: it is computed, or becomes TF32 there."""
    return problem.copied(one) is None or (problem.rounds and not by_tma(problem, one))


@memoised
def epilogue_tma_layout(
    problem: Problem, result: str, buffer: str, offset: Expr, dtype: torch.dtype, written: bool
) -> TmaLayout | str:
    """How an epilogue may move what it reads or writes for each element of a result, or why it goes by pointers."""
    if dtype not in (WRITTEN_TYPES if written else READ_TYPES):
        return f"elements of {buffer} are {dtype}"
    axes = problem.template.results[result].axes
    found = _lying(problem, buffer, (buffer, (offset,), dtype), tuple((axis, problem.loops[axis]) for axis in axes))
    return (rows_end(buffer, dtype, found.sizes()[-1]) or found) if written and isinstance(found, TmaLayout) else found


def rows_end(buffer: str, dtype: torch.dtype, length: Expr) -> str | None:
    """Why TMA must not write rows of so many elements: it stores whole units of 16 bytes, and what a row's last one reaches
    beyond the row is somebody else's where the buffer is a slice of another."""
    return None if _multiple(length, dtype) else f"rows of {buffer} do not end at multiples of {ALIGNMENT} bytes"


@dataclass(frozen=True, slots=True)
class Access:
    """A tile in memory that an epilogue reads or writes for each tile of a result: where, and how TMA may move it."""

    buffer: str
    offset: Expr
    written: bool
    tma_layout: TmaLayout


@memoised
def tma_accesses(problem: Problem, result: str) -> tuple[Access, ...]:
    """What an epilogue may read and write by TMA, each access once, in the order in which it does."""
    made = {out for s in problem.kernel.statements for out in s.outs}
    found: dict[Access, None] = {}
    for s in problem.epilogue:
        loads = (load.attr for load in vs.loads(s.roots) if not load.args and load.attr[0] not in made)
        tiles = [(name, offset, dtype, False) for name, (offset, *_), dtype in loads]
        if s.kind not in ("partial", "scatter"):
            kept = (out for out, stored in zip(s.outs, s.stored, strict=True) if stored)
            tiles += [(out, s.store[0], problem.graph.buffers[out].dtype, True) for out in kept]
        for name, offset, dtype, written in tiles:
            if isinstance(lying := epilogue_tma_layout(problem, result, name, offset, dtype, written), TmaLayout):
                found[Access(name, offset, written, lying)] = None
    return tuple(found)


@memoised
def tiles_read(problem: Problem) -> tuple[Value, ...]:
    """The loads of an epilogue that read a tile from memory: what varies along both of its sides."""
    rows, columns = frozenset(problem.loops["m"]), frozenset(problem.loops["n"])
    made = {o for s in problem.kernel.statements for o in s.outs}
    every = vs.loads([root for s in problem.epilogue for root in s.roots])
    read = ((load, ix.free_atoms(load.attr[1][0])) for load in every if load.attr[0] not in made)
    return tuple(load for load, atoms in read if atoms & rows and atoms & columns)


@memoised
def gathers_tiles(problem: Problem) -> bool:
    """Whether an epilogue reads a tile at indices from data: each thread holds the addresses of its rows as well."""
    rows, columns = frozenset(problem.loops["m"]), frozenset(problem.loops["n"])
    for load in vs.loads([root for s in problem.epilogue for root in s.roots]):
        offset = load.attr[1][0]
        read = frozenset(ix.free_atoms(offset))
        by_data = frozenset(
            atom
            for one in ix.indirects(offset)
            for value in vs.topological([one.value])
            for index in vs.index_exprs(value)
            for atom in ix.free_atoms(index)
        )
        if by_data & (rows | columns) and (read | by_data) & rows and (read | by_data) & columns:
            return True
    return False


def _lying(
    problem: Problem, name: str, access: tuple[str, tuple[Expr], torch.dtype], loops: tuple[tuple[str, tuple[Var, ...]], ...]
) -> TmaLayout | str:
    """The layout of the tensor that an access reads by the loops of its axes; `name` is for people."""
    buffer, (offset,), dtype = access
    if any(isinstance(a, ix.Indirect) for a in ix.free_atoms(offset)):
        return f"{name} is read through indices"
    tile_axes = [(axis, own) for axis, own in loops if problem.template.block(axis)]
    if len(tile_axes) != 2 or any(len(own) > 1 for _, own in tile_axes):
        return f"a tile of {name} is no box in memory"
    found: list[tuple[str, Var | None]] = [(axis, v) for axis, own in loops if (axis, own) not in tile_axes for v in own]
    found += [(axis, own[0] if own else None) for axis, own in tile_axes]
    strides = [ix.ZERO if v is None else ix.stride_of(offset, v) for _, v in found]
    start: dict[Atom, Expr] = {v: ix.ZERO for _, v in found if v is not None}
    base = ix.substitute(offset, start)
    rows = [(axis, v, s) for (axis, v), s in zip(found, strides, strict=True) if s is not None]
    if len(rows) < len(found) or not _multiple(base, dtype) or not aligned(problem.graph.buffers[buffer]):
        return f"{name} does not begin at a multiple of {ALIGNMENT} bytes"
    return _ordered(problem, name, TmaLayout(buffer, dtype, (), (), (), base), rows)


def _ordered(problem: Problem, name: str, made: TmaLayout, rows: list[tuple[str, Var | None, Expr]]) -> TmaLayout | str:
    """The dimensions in order, the contiguous one last."""
    dtype = made.dtype
    outer, tile_axes = [row for row in rows[:-2] if row[2] != 0], rows[-2:]
    if tile_axes[1][2] != 1:
        tile_axes = tile_axes[::-1]
    if tile_axes[1][2] != 1:
        return f"{name} is contiguous along none of its sides"
    if tile_axes[0][1] is None:  # a single row: any stride will do
        whole = ix.ceildiv(problem.extent(tile_axes[1][0]) * dtype.itemsize, ALIGNMENT) * (ALIGNMENT // dtype.itemsize)
        tile_axes[0] = (tile_axes[0][0], None, whole)
    ordered = [*outer, *tile_axes]
    if len(ordered) > MAX_RANK:
        return f"{name} has more than {MAX_RANK} dimensions"
    if not all(_multiple(s, dtype) and ix.lower_bound(s) > 0 for _, _, s in ordered[:-1]):
        return f"rows of {name} do not begin at multiples of {ALIGNMENT} bytes"
    axes, loops, strides = zip(*ordered, strict=True)
    made = replace(made, axes=axes, loops=loops, strides=strides)
    if any(size.bounds()[1] > MAX_SIZE and size.as_int() is not None for size in made.sizes()):
        return f"{name} is too long for a descriptor"
    return made


def _multiple(count: Expr, dtype: torch.dtype) -> bool:
    return ix.mod(count * dtype.itemsize, ALIGNMENT) == 0
