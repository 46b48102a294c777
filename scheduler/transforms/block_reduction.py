"""Reduces blocks of a row in the kernel that has the row in registers: a norm, and the scales that quantise its result.

A norm reduces a full row, the scales of a block-wise quantisation reduce 32 or 128 neighbours of it. Fusion keeps the two
apart, for their loops differ: the result would be stored, and read again. A program that holds full rows in registers reduces
blocks of them as well. What the second kernel did once a block is done at each of the block's points; the first one stores it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.plan import Kernel, Statement, Step
from kgen.scheduler.analysis.memory import has_hidden_effects, reads, root, writes
from kgen.scheduler.fusion.combo_kernels import forbids
from kgen.scheduler.protocol import Forming, Transform
from kgen.scheduler.tiling.tiles import choose_tiles, persistent
from kgen.scheduler.transforms.column_reduction import placed
from kgen.verdict import Outcome, Reason, Verdict

# Reductions of blocks, and the longest of them.
FOLDS = ("max", "min", "sum")
MAX_BLOCK = 1024

Mapping = dict[Atom, Expr]


class BlockReduction(Transform):
    """Moves kernels that reduce blocks of rows into the kernels that hold these rows."""

    name = "block reduction"

    def form(self, steps: list[Step], forming: Forming) -> list[Step]:
        mover = _Mover(list(steps), forming)
        for at, step in enumerate(steps):
            if isinstance(step, Kernel) and _reduces_blocks(step):
                mover.place(at, step)
        return [step for step in mover.steps if step is not None]


def _reduces_blocks(kernel: Kernel) -> bool:
    """Whether it only reduces runs of a power of two, and makes new buffers point by point."""
    width = ix.product(v.extent for v in kernel.inner).as_int() or 0
    if kernel.target != "triton" or kernel.contracts or kernel.share is not None or not 2 <= width <= MAX_BLOCK:
        return False
    folds = [s for s in kernel.statements if s.kind == "reduction"]
    rest = [s for s in kernel.statements if s.kind == "pointwise" and s.mask is None]
    known = all(s.op in FOLDS and len(s.outs) == 1 for s in folds)
    return bool(folds) and known and len(folds) + len(rest) == len(kernel.statements) and width & (width - 1) == 0


def _holds_rows(kernel: Kernel) -> bool:
    """Whether a program has a full row in registers, over one loop."""
    kinds = {s.kind for s in kernel.statements}
    plain = kernel.target == "triton" and not kernel.contracts and kernel.share is None and len(kernel.inner) == 1
    return plain and persistent(kernel) and "reduction" in kinds and kinds <= {"pointwise", "reduction", "block"}


@dataclass(slots=True)
class _Mover:
    steps: list[Step | None]
    forming: Forming

    @property
    def graph(self) -> ir.Graph:
        return self.forming.draft.graph

    def place(self, at: int, blocks: Kernel) -> None:
        """Moves the kernel at a place into the nearest one before that makes what it reads, if that holds its rows."""
        wanted = reads(blocks)
        for where in range(at - 1, -1, -1):
            rows = self.steps[where]
            if not isinstance(rows, Kernel) or not writes(rows) & wanted:
                continue
            if _holds_rows(rows) and (mapping := _mapping(rows, blocks)) is not None:
                self._join(where, rows, at, blocks, mapping)
            return

    def _join(self, where: int, rows: Kernel, at: int, blocks: Kernel, mapping: Mapping) -> None:
        moved = tuple(s.substituted(mapping) for s in blocks.statements)
        reason = self._refusal(where, rows, at, blocks, moved)
        joined = _joined(rows, blocks, moved)
        if reason is None and not self._in_registers(joined):
            reason = Reason.TOO_LARGE
        if reason is not None:
            outcome = Outcome.UNPROFITABLE if reason is Reason.TOO_LARGE else Outcome.ILLEGAL
            self.forming.verdicts.append(Verdict(rows.name, blocks.name, outcome, reason))
            return
        self.steps[where], self.steps[at] = joined, None
        self.steps[where] = self._without_stores(joined, writes(rows) & reads(blocks))
        self.forming.verdicts.append(Verdict(rows.name, blocks.name, Outcome.FUSED, Reason.BLOCKS_OF_ROWS))

    def _refusal(self, where: int, rows: Kernel, at: int, blocks: Kernel, moved: Iterable[Statement]) -> Reason | None:
        """The second kernel moves up to the first: what it reads must be there by then, at the same points."""
        if any(not d.wanted and forbids(d, rows, blocks) for d in self.forming.draft.options.demands):
            return Reason.FORBIDDEN
        made = {o: s.store for s in rows.statements for o in s.outs}
        for load in vs.loads(v for s in moved for v in s.roots):
            if made.get(load.attr[0], load.attr[1]) != load.attr[1]:
                return Reason.INDEX_MISMATCH
        if any(self.graph.buffers[o].alias_of is not None for s in blocks.statements for o in s.outs):
            return Reason.MUTATION
        needed = self._roots(reads(blocks))
        for step in self.steps[where + 1 : at]:
            if step is not None and (has_hidden_effects(step) or needed & self._roots(writes(step))):
                return Reason.CYCLE
        return None

    def _in_registers(self, kernel: Kernel) -> bool:
        tiling = choose_tiles(kernel, self.graph, self.forming.sizes, self.forming.draft.options.gpu)
        return tiling.persistent and tiling.group == 1 and not tiling.y

    def _without_stores(self, kernel: Kernel, passed: set[str]) -> Kernel:
        """What only the moved kernel has read stays in registers."""
        others = {name for step in self.steps if step is not None and step is not kernel for name in self._roots(reads(step))}

        def needed(name: str) -> bool:
            mine = name in passed and name not in self.forming.kept and self.graph.buffers[name].kind == "intermediate"
            return not mine or self.graph.buffers[name].alias_of is not None or root(self.graph, name) in others

        statements = tuple(
            replace(s, stored=tuple(kept and needed(o) for o, kept in zip(s.outs, s.stored, strict=True)))
            for s in kernel.statements
        )
        return replace(kernel, statements=statements)

    def _roots(self, names: Iterable[str]) -> set[str]:
        return {root(self.graph, name) for name in names}


def _mapping(rows: Kernel, blocks: Kernel) -> Mapping | None:
    """The loops of the blocks in terms of those of the rows; None where blocks are no runs of these rows."""
    count = ix.product(v.extent for v in rows.outer)
    for cut in range(len(blocks.outer), -1, -1):
        lead, tail = blocks.outer[:cut], blocks.outer[cut:]
        if ix.product(v.extent for v in lead) is not count or not tail:
            continue
        down, along = _placed(lead, rows.outer), _placed((*tail, *blocks.inner), rows.inner)
        if down is not None and along is not None:
            return {**down, **along}
    return None


def _placed(loops: tuple[Var, ...], at: tuple[Var, ...]) -> Mapping | None:
    return placed(loops, at) if loops or at else {}


def _joined(rows: Kernel, blocks: Kernel, moved: tuple[Statement, ...]) -> Kernel:
    """The kernel of rows, with a last section for the blocks: statements before the walks, then each walk and what follows."""
    width = ix.product(v.extent for v in blocks.inner).as_int()
    assert width is not None
    ordered = sorted(moved, key=lambda s: (s.section, not s.inner))
    added = tuple(_at_points(s, rows, width) for s in ordered)
    return replace(
        rows, sections=rows.sections + 1, statements=(*rows.statements, *added),
        origins=tuple(dict.fromkeys((*rows.origins, *blocks.origins))),
    )  # fmt: skip


def _at_points(s: Statement, rows: Kernel, width: int) -> Statement:
    """A statement of the second kernel at the points of a row: what there is once a block is stored by its first point."""
    [loop] = rows.inner
    first = vs.compare("eq", ix.mod(loop.expr(), width), ix.ZERO)
    by_block = s.kind == "reduction" or not s.inner
    kind = "block" if s.kind == "reduction" else s.kind
    block = width if kind == "block" else 0
    return replace(s, kind=kind, inner=True, section=rows.sections, mask=first if by_block else None, block=block)
