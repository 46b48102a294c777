"""Spreads the maximum and the sum of exponentials of few long rows over the programs of a GPU, in one walk.

Each share of a row finds its own maximum and the sum of exponentials below it; a second kernel joins the shares: the sum of a
share is rescaled to the maximum of the row (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). A share
that is -inf throughout sums up zeros: the row's maximum may be finite. Exponentials that later kernels read are computed there
again, since no share knows them. The order of combination is fixed by the plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kgen.device import Gpu
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Sizes, Var
from kgen.ir.plan import Kernel, Statement, Step
from kgen.ir.values import Value
from kgen.scheduler.analysis.memory import reads
from kgen.scheduler.transforms.column_reduction import placed
from kgen.scheduler.transforms.ragged_shares import padded

# As `split_reduction`: points of a share at least, and warps that an SM runs at once. A share that registers hold is read once.
MIN_CHUNK, MAX_CHUNK, WARPS, SHARE_WARPS = 4096, 16384, 64, 8


@dataclass(frozen=True, slots=True)
class _Pair:
    """The kernels of a maximum and of the sum, the statements of both, and those of the second one's exponentials. All are over
    the loops of the first kernel."""

    first: Kernel
    second: Kernel
    top: Statement
    total: Statement
    powers: tuple[Statement, ...]
    after: tuple[Statement, ...]  # of both kernels, once a row


def split_online_softmax(steps: Sequence[Step], graph: ir.Graph, sizes: Sizes, gpu: Gpu, kept: frozenset[str]) -> list[Step]:
    """The steps with such pairs of kernels replaced; buffers for partial results are added to the graph."""
    out = list(steps)
    for at in range(1, len(out)):
        first, second = out[at - 1], out[at]
        pair = _pair(first, second) if isinstance(first, Kernel) and isinstance(second, Kernel) else None
        if pair is None:
            continue
        shares = _shares(pair.first, sizes, gpu)
        rest = _with_powers(out[at + 1 :], pair, kept) if shares else None
        if shares and rest is not None:
            out[at - 1 :] = [*_Split(pair, graph, shares).run(), *rest]
    return out


def _shares(kernel: Kernel, sizes: Sizes, gpu: Gpu) -> int:
    """Into how many shares a row is cut, equal ones where a number divides its length; 0: it is not."""
    rows, length = sizes.points(kernel.outer), kernel.inner[0].extent.as_int()
    if length is None:
        return 0
    wanted = min(gpu.compute_units * WARPS // SHARE_WARPS // max(1, rows), length // MIN_CHUNK)
    found = [n for n in range(wanted, 1, -1) if length % n == 0 and length // n <= MAX_CHUNK]
    if not found and wanted > 1 and -(-length // wanted) <= MAX_CHUNK:
        return wanted  # the last share ends early
    return found[0] if found else 0


# ---- recognition ----------------------------------------------------------------------------------------------------


def _pair(first: Kernel, second: Kernel) -> _Pair | None:
    tops, totals = _folds(first, "max"), _folds(second, "sum")
    if tops is None or totals is None:
        return None
    down, along = placed(second.outer, first.outer) if first.outer else {}, placed(second.inner, first.inner)
    if down is None or along is None or (second.outer and not first.outer):
        return None
    moved = [s.substituted({**down, **along}) for s in second.statements]
    total = next(s for s in moved if s.kind == "reduction")
    powers = tuple(s for s in moved if s.inner and s.kind == "pointwise")
    if any(s.inner and s.kind == "pointwise" for s in first.statements):
        return None
    value = _written_out(total.value, powers)
    if not _is_rescalable(value, tops):
        return None
    after = [s for s in (*first.statements, *moved) if not s.inner]
    return _Pair(first, second, tops, replace(total, value=value), powers, tuple(after))


def _folds(kernel: Kernel, op: str) -> Statement | None:
    """The only reduction of a kernel with one walk over one loop, and points before and after it; None of others."""
    plain = kernel.target == "triton" and kernel.sections == 1 and len(kernel.inner) == 1 and not kernel.rows
    if not plain or kernel.contracts or kernel.share is not None:
        return None
    folds = [s for s in kernel.statements if s.kind == "reduction"]
    points = all(s.kind == "pointwise" and s.mask is None for s in kernel.statements if s.kind != "reduction")
    late = all(s.inner or s.section >= 0 for s in kernel.statements)
    return folds[0] if points and late and len(folds) == 1 and folds[0].op == op else None


def _written_out(value: Value, powers: tuple[Statement, ...]) -> Value:
    """The value with what its own walk computes written out."""
    made = {s.outs[0]: s.value for s in powers}
    return vs.replace_loads([value], lambda load: made.get(load.attr[0]))[0]


def _is_rescalable(value: Value, top: Statement) -> bool:
    """Whether it is ``exp(x - m)``, m the maximum of all x: then a sum of it can change to another m."""
    if value.op != "exp" or value.args[0].op != "sub":
        return False
    exponent, subtracted = value.args[0].args
    mine = subtracted.op == "load" and subtracted.attr[:2] == (top.outs[0], top.store) and not subtracted.args
    return mine and exponent is top.value and not any(load.attr[0] == top.outs[0] for load in vs.loads([exponent]))


def _with_powers(steps: list[Step], pair: _Pair, kept: frozenset[str]) -> list[Step] | None:
    """Later steps, which compute stored exponentials themselves; None where one cannot."""
    stored = {s.outs[0]: s for s in pair.powers if any(s.stored)}
    made: list[Step] = []
    for step in steps:
        needed = reads(step) & stored.keys()
        if needed and (not isinstance(step, Kernel) or step.target != "triton" or step.contracts):
            return None
        made.append(_computing(step, stored) if needed and isinstance(step, Kernel) else step)
    known = all(len(s.outs) == 1 and s.value.dtype.itemsize >= 4 and _mapping(s, s.store) is not None for s in stored.values())
    return made if known and not kept & stored.keys() and not any(reads(s) & stored.keys() for s in made) else None


def _computing(kernel: Kernel, stored: dict[str, Statement]) -> Kernel:
    def value_of(load: Value) -> Value | None:
        source = stored.get(load.attr[0])
        mapping = None if source is None or load.args else _mapping(source, load.attr[1])
        return None if source is None or mapping is None else vs.substitute(source.value, mapping)

    statements = tuple(replace(s, value=vs.replace_loads([s.value], value_of)[0]) for s in kernel.statements)
    return replace(kernel, statements=statements)


def _mapping(source: Statement, index: Sequence[Expr]) -> dict[Atom, Expr] | None:
    """The loops of a statement at which it makes the element at an index."""
    found: dict[Atom, Expr] = {}
    for place, wanted in zip(source.store, index, strict=True):
        atom = place.atom()
        if not isinstance(atom, Var) or atom in found:
            return None
        found[atom] = wanted
    return found


# ---- the two kernels ------------------------------------------------------------------------------------------------


class _Split:
    def __init__(self, pair: _Pair, graph: ir.Graph, shares: int) -> None:
        self.pair, self.graph = pair, graph
        [loop] = pair.first.inner
        self.share, self.step = ix.var("share", shares), ix.var("step", ix.ceildiv(loop.extent, shares))
        at = self.share.expr() * self.step.extent + self.step.expr()
        self.place: dict[Atom, Expr] = {loop: at}
        equal = self.step.extent * shares is loop.extent
        self.inside = None if equal else vs.compare("lt", at, loop.extent)
        self.row = (self.share.expr(), *(v.expr() for v in pair.first.outer))

    def run(self) -> tuple[Kernel, Kernel]:
        """(the maximum and the sum of each share, what joins them)."""
        pair = self.pair
        top, total = (self._partial(s) for s in (pair.top, pair.total))
        maximum, sum_ = (vs.load(b, self.row, s.value.dtype) for b, s in ((top, pair.top), (total, pair.total)))
        base = vs.where(vs.call("eq", maximum, vs.const(-math.inf, maximum.dtype)), vs.const(0.0, maximum.dtype), maximum)
        whole = vs.load(pair.top.outs[0], pair.top.store, maximum.dtype)
        first = [
            self._fold(pair.top, self._exponent(), top, 0),
            self._fold(pair.total, vs.call("exp", vs.call("sub", self._exponent(), base)), total, 1),
        ]
        scaled = vs.call("mul", sum_, vs.call("exp", vs.call("sub", maximum, whole)))
        second = [replace(pair.top, value=maximum, section=0), replace(pair.total, value=scaled, section=1)]
        partial = replace(
            pair.first, name=f"{pair.first.name}_partial", outer=(self.share, *pair.first.outer), inner=(self.step,),
            sections=2, statements=tuple(first), origins=self._origins(),
        )  # fmt: skip
        final = replace(
            pair.first, inner=(self.share,), sections=2, origins=self._origins(),
            statements=(*second, *(replace(s, section=1) for s in pair.after)),
        )  # fmt: skip
        return partial, final

    def _exponent(self) -> Value:
        """Past the end of a row it is -inf, and its exponential nothing."""
        return padded(vs.substitute(self.pair.top.value, self.place), "max", self.inside)

    def _origins(self) -> tuple[ir.Origin, ...]:
        return tuple(dict.fromkeys((*self.pair.first.origins, *self.pair.second.origins)))

    def _fold(self, s: Statement, value: Value, out: str, section: int) -> Statement:
        return replace(s, outs=(out,), value=value, store=self.row, stored=(True,), section=section)

    def _partial(self, s: Statement) -> str:
        sizes = (self.share.extent, *(v.extent for v in self.pair.first.outer))
        name = ir.derived(self.graph, ir.Derived(s.outs[0], "partial"))
        device = self.graph.buffers[s.outs[0]].device
        self.graph.buffers[name] = ir.Buffer(name, s.value.dtype, device, sizes, ix.contiguous_strides(sizes))
        return name
