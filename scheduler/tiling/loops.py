"""Chooses the loop nest of a kernel: order, collapsing, and which loop becomes vector lanes.

The model counts, for every access, the bytes it moves and the stride it has along a loop: stride one is a vector load,
stride zero a splat, anything else one memory operation a lane (`GATHER` times dearer). The loop with the lowest total
becomes the vector loop, at whatever level it stands; the others are ordered by falling stride and adjacent ones that walk
memory as one are collapsed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Sizes, Var
from kgen.ir.plan import TILE, Kernel, Nest
from kgen.ir.values import Value
from kgen.scheduler.tiling.registers import registers_of_a_lane

GATHER = 6.0
SPLAT = 0.25
# Lanes that read neighbours but at the ends of a loop: the first and the last one say which it is.
RUN = 1.5
# Registers that one value takes at most: of a machine's 16 or 32, some are left for the other values.
MAX_REGISTERS = 4
# Registers that the values of a step need at the same time, at most, before it has fewer lanes. A few more than there are go
# through the first cache. Sorting networks of five to nine int64 or float32 needed 23 to 45 for one register a value: with four
# g++ took 35 to 115 s, with one 4 s.
MOST_ALIVE = 32
# More loads in one section leave values of so many registers no room. Nor do more vectors of indices, which are twice as wide.
# The gradient of rotary positions, with 13 such loads, took a third of the time with one register, and g++ a fifth.
MANY_LOADS = 4
# Lanes that may share a result, and reductions that join lanes within groups.
GROUPS = (2, 4, 8, 16, 32)
# Neighbours of a short run, and how many times as much has to lie in longer ones that these go inside.
SHORT_RUN, FAR_MORE = 4, 16
MAX_TURNS = 8  # loops are split at most so often
GROUP_OPS = ("sum", "prod", "max", "min", "welford")
# Tasks that outer loops must leave for the threads before another outer loop may become lanes.
MIN_TASKS = 8
# Columns of a task whose lanes are an outer loop, points of a kernel that are worth several threads, and how many times longer
# one thread takes, at most: lanes that gather take longer than that (37 columns of 300,001 rows on two threads, 38 ms and 102).
COLUMNS, WORTH_THREADS, MOST_WAITING = 64, 1 << 18, 3.0
# Registers of so many bytes have instructions that gather, by indices of 64 bits as many lanes as fill a register. Where that
# misses the cache, twice as many lanes a step took 1.1 to 2.5 times as long on an AMD EPYC.
GATHERING = 64
# Points that a vector loop has at least after it was split: of a run of memory, and of neighbouring columns, which are whole
# cache lines.
MIN_LANES, MIN_COLUMNS = 8, 32
# Points that read one element, and the next, at most: an image is upsampled by as much.
MOST_REPEATS = 8
SCAN_ALONG = 1.3  # a scan along the lanes needs a step for each doubling of their distance; across them it needs one


def choose_loops(kernel: Kernel, graph: ir.Graph, sizes: Sizes, register_bytes: int, reorder: bool = True) -> Nest:
    """The loop nest for a machine with vector registers of `register_bytes` (0: no vectors)."""
    kernel = linearized(kernel, graph)
    if reorder and register_bytes:
        kernel = _in_dimensions(_split_by_remainders(kernel, graph, sizes), graph, sizes)
    touches = list(distinct_touches(kernel, graph, sizes))
    if reorder:
        kernel = ordered(kernel, touches, sizes)
    kernel = collapsed(kernel)
    touches = list(distinct_touches(kernel, graph, sizes))
    chosen = _vector_loop(kernel, touches, sizes) if register_bytes else None
    if chosen is None:
        return Nest(kernel, None, 1)
    vector, group = chosen.loop, 1
    if reorder and kernel.share is None and (joined := grouped(kernel, vector, touches, sizes)) is not None:
        group = sizes.of(vector.extent)
        kernel, vector = joined
        touches = list(distinct_touches(kernel, graph, sizes))
    inside = kernel.outer[kernel.outer.index(vector) + 1 :] if vector in kernel.outer and reorder else ()
    if vector in kernel.outer:
        kernel = replace(kernel, outer=(*(v for v in kernel.outer if v is not vector), vector))
    else:
        kernel = replace(kernel, inner=(*(v for v in kernel.inner if v is not vector), vector))
    one = _scattered(touches, vector, sizes) > MANY_LOADS
    lanes = _lanes(kernel, vector, sizes, register_bytes, most=1 if one else MAX_REGISTERS)
    lanes = max(lanes, group)
    tile = _tile_loop(kernel, vector, touches, sizes) if reorder else None
    return Nest(kernel, vector if lanes > 1 else None, lanes, tile, group, inside if tile is None else ())


# ---- linear offsets -------------------------------------------------------------------------------------------------


def linearized(kernel: Kernel, graph: ir.Graph) -> Kernel:
    """Replaces logical indices by offsets under the buffers' strides; a row buffer is indexed by the inner loops alone."""
    rows = set(kernel.rows)
    made_inner = {o for s in kernel.statements if s.inner and s.kind != "reduction" for o in s.outs}
    row_index = ix.position_in(kernel.inner)
    memo: dict[Expr, Expr] = {}

    def offset(name: str, index: tuple[Expr, ...]) -> Expr:
        if name in rows and name in made_inner:
            return row_index
        strides = graph.buffers[name].strides
        assert strides is not None
        return ix.linearize(index, strides)

    def visit(value: Value, args: tuple[Value, ...], lookup: object) -> Value:
        if value.op == "load":
            name, index, dtype = value.attr
            moved = tuple(ix.substitute(e, {}, memo, lookup) for e in index)  # type: ignore[arg-type]
            return vs.load(name, (offset(name, moved),), dtype, args[0] if args else None)
        if value.op == "index":
            return vs.index_value(ix.substitute(value.attr, {}, memo, lookup), value.dtype)  # type: ignore[arg-type]
        return value if args == value.args else vs.rebuild(value, args, value.attr)

    statements = []
    for s in kernel.statements:
        new = vs.rewrite(s.roots, visit)
        store = tuple(ix.substitute(e, {}, memo, new.__getitem__) for e in s.store)
        mask = None if s.mask is None else new[s.mask]
        factors = tuple(new[v] for v in s.factors)
        rank = None if s.rank is None else ix.substitute(s.rank, {}, memo, new.get)
        statements.append(
            replace(s, value=new[s.value], store=(offset(s.outs[0], store),), mask=mask, rank=rank, factors=factors)
        )
    return replace(kernel, statements=tuple(statements))


# ---- what memory the loops touch ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Touch:
    """One access: its buffer, its offset there, the bytes it moves over all points of its loops, and those that are not the
    same ones again."""

    buffer: str
    offset: Expr
    bytes: int
    distinct: int
    inner: bool
    store: bool


def distinct_touches(kernel: Kernel, graph: ir.Graph, sizes: Sizes) -> Iterator[Touch]:
    outer_points = sizes.points(kernel.outer)
    inner_points = outer_points * sizes.points(kernel.inner)
    made = {o for s in kernel.statements for o in s.outs}
    for s in kernel.statements:
        points = inner_points if s.inner else outer_points
        seen = set()
        for load in vs.loads(s.roots):
            if load.attr in seen or (load.attr[0] in made and load.attr[0] not in kernel.rows):
                continue
            seen.add(load.attr)
            offset, size = load.attr[1][0], load.attr[2].itemsize
            yield Touch(load.attr[0], offset, points * size, _distinct(offset, kernel, sizes) * size, s.inner, False)
        store_points = outer_points if s.kind == "reduction" else points
        for out, stored in zip(s.outs, s.stored, strict=True):
            if stored:
                size = graph.buffers[out].dtype.itemsize
                distinct = _distinct(s.store[0], kernel, sizes) * size
                yield Touch(out, s.store[0], store_points * size, distinct, s.inner and s.kind != "reduction", True)


def _distinct(offset: Expr, kernel: Kernel, sizes: Sizes) -> int:
    """Points of the loops that the offset depends on."""
    used = ix.free_atoms(offset)
    through = {v for a in used if isinstance(a, ix.Indirect) for v in a.value.free_atoms()}
    return sizes.points(v for v in (*kernel.outer, *kernel.inner) if v in used or v in through)


def stride_along(offset: Expr, v: Var, sizes: Sizes) -> int | None:
    """Stride along a loop at the hints; None where the offset is not affine in it (also through an indirect index)."""
    if through_data(offset, v):
        return None
    stride = ix.stride_of(offset, v)
    return None if stride is None else sizes.of(stride)


def usual_stride(offset: Expr, v: Var, sizes: Sizes) -> int | None:
    """`stride_along`; of an offset that is clamped, mirrored or begins again at the ends of a loop, the stride between them."""
    exact = stride_along(offset, v, sizes)
    if exact is not None or any(isinstance(atom, ix.Indirect) for atom in ix.free_atoms(offset)):
        return exact
    first, second = _steps(offset, v, sizes, 2)
    return first if first == second else None


def runs_along(offset: Expr, v: Var, sizes: Sizes) -> bool:
    """Whether neighbours along a loop read neighbours, or several of them one element, as of a row that is upsampled."""
    stride = usual_stride(offset, v, sizes)
    if stride is not None or any(isinstance(atom, ix.Indirect) for atom in ix.free_atoms(offset)):
        return stride == 1
    return set(_steps(offset, v, sizes, MOST_REPEATS)) == {0, 1}


def usual_steps(offset: Expr, v: Var, sizes: Sizes) -> list[int]:
    """How far apart neighbours along a loop are in its middle, point by point; nothing where data decide."""
    return [] if any(isinstance(atom, ix.Indirect) for atom in ix.free_atoms(offset)) else [
        abs(step) for step in _steps(offset, v, sizes, MOST_REPEATS)
    ]  # fmt: skip


def _steps(offset: Expr, v: Var, sizes: Sizes, count: int) -> list[int]:
    """What the offset grows by from the middle of a loop on, point by point."""
    middle = sizes.of(v.extent) // 2

    def at(k: int) -> int:
        return int(ix.evaluate(offset, lambda atom: middle + k if atom is v else _middle_of(atom, sizes)))

    offsets = [at(k) for k in range(count + 1)]
    return [after - before for before, after in itertools.pairwise(offsets)]


def _middle_of(atom: Atom, sizes: Sizes) -> int:
    return sizes.of(atom.extent) // 2 if isinstance(atom, Var) else sizes.of(atom.expr())


def through_data(offset: Expr, v: Var) -> bool:
    """Whether an index that is read from data, or computed from it, depends on a loop."""
    return any(isinstance(atom, ix.Indirect) and v in atom.value.free_atoms() for atom in ix.free_atoms(offset))


# ---- order ----------------------------------------------------------------------------------------------------------


def ordered(kernel: Kernel, touches: list[Touch], sizes: Sizes) -> Kernel:
    """Outer loops by falling stride of what moves most bytes, stores first. Inner loops too, unless their order is meaning. Of
    equal ones the loop goes outside along which more comes from places that data gives: a row of a table is a run."""

    def jumps(v: Var) -> int:
        return sum(t.distinct for t in touches if through_data(t.offset, v))

    def weight(v: Var) -> tuple[float, int]:
        return mean_stride(v), jumps(v)

    def mean_stride(v: Var) -> float:
        total, norm = 0.0, 0.0
        for t in touches:
            # of a sum's loops the contiguous one goes inside, whatever a division hides of the strides of others
            stride = (usual_stride if v in kernel.inner else stride_along)(t.offset, v, sizes)
            if stride:
                share = t.distinct * (2.0 if t.store else 1.0)
                total += share * _log2(abs(stride))
                norm += share
        return total / norm if norm else -1.0

    outer = _with_long_runs(tuple(sorted(kernel.outer, key=weight, reverse=True)), touches, sizes)
    fixed = any(s.kind in ("scan", "scatter", "block") for s in kernel.statements)
    inner = kernel.inner if fixed or kernel.rows else tuple(sorted(kernel.inner, key=weight, reverse=True))
    return replace(kernel, outer=outer, inner=inner)


def _with_long_runs(loops: tuple[Var, ...], touches: list[Touch], sizes: Sizes) -> tuple[Var, ...]:
    """The loops with a short last one before the one in front of it, where that has far more side by side in memory: three
    coordinates of each point are nothing beside all pairs of points."""

    def beside(v: Var) -> int:
        return sum(t.distinct for t in touches if stride_along(t.offset, v, sizes) in (1, -1))

    if len(loops) < 2 or sizes.of(loops[-1].extent) > SHORT_RUN:
        return loops
    most = max(sum(t.distinct for t in touches) // 2, FAR_MORE * beside(loops[-1]))
    return (*loops[:-2], loops[-1], loops[-2]) if beside(loops[-2]) > most else loops


def _log2(x: int) -> float:
    return float(x.bit_length())


# ---- collapsing -----------------------------------------------------------------------------------------------------


def collapsed(kernel: Kernel) -> Kernel:
    """Joins adjacent loops of one level whose every use walks as one loop would."""
    exprs = _all_exprs(kernel)
    scans = any(s.kind == "scan" for s in kernel.statements)
    mapping: dict[Atom, Expr] = {}
    outer = _join_adjacent(kernel.outer, exprs, mapping, "x")
    inner = kernel.inner if scans else _join_adjacent(kernel.inner, exprs, mapping, "y")
    if not mapping:
        return kernel
    statements = tuple(s.substituted(mapping) for s in kernel.statements)
    return replace(kernel, outer=outer, inner=inner, statements=statements)


def collapsed_apart(kernel: Kernel) -> Kernel:
    """Joins outer loops whose every use walks as one loop would, although other ones stand between them, as channels do between
    the rows and columns of an image that is turned: the joined loop has the place of the last one. Points of a kernel without
    inner loops have no order."""
    exprs = _all_exprs(kernel)
    for low in reversed(kernel.outer):
        above = kernel.outer[: kernel.outer.index(low)]
        high = next((v for v in reversed(above) if all(_is_one_loop(e, v, low) for e in exprs)), None)
        if high is not None:
            last = kernel.outer.index(low)
            loops = [v for v in above if v is not high]
            return collapsed_apart(collapsed(replace(kernel, outer=(*loops, high, *kernel.outer[last:]))))
    return kernel


def _all_exprs(kernel: Kernel, bounds: bool = True) -> list[Expr]:
    """Without `bounds` not those of what conditions are said to be within."""
    found: dict[Expr, None] = {}
    for s in kernel.statements:
        values = vs.topological(s.roots)
        if not bounds and any(value.op == "within" for value in values):
            values = vs.topological(map(vs.without_bounds, s.roots))
        for value in values:
            for e in vs.index_exprs(value):
                found[e] = None
        ranked = [s.rank] if s.rank is not None and (s.op in ("argmax", "argmin") or s.in_order) else []
        for e in (*s.store, *ranked, *(e for _, e in s.axes)):
            found[e] = None
    return list(found)


def _join_adjacent(loops: tuple[Var, ...], exprs: list[Expr], mapping: dict[Atom, Expr], letter: str) -> tuple[Var, ...]:
    """Merges runs of loops; `mapping` gets each old variable in terms of the merged one."""
    if not loops:
        return loops
    runs: list[list[Var]] = [[loops[0]]]
    for v in loops[1:]:
        if all(_is_one_loop(e, runs[-1][-1], v) for e in exprs):
            runs[-1].append(v)
        else:
            runs.append([v])
    if all(len(r) == 1 for r in runs):
        return loops
    out = []
    for k, run in enumerate(runs):
        if len(run) == 1:
            out.append(run[0])
            continue
        merged = ix.var(f"{letter}{letter}{k}", ix.product(v.extent for v in run))
        out.append(merged)
        for v in run[:-1]:
            mapping[v] = ix.ZERO
        mapping[run[-1]] = merged.expr()
    return tuple(out)


def _is_one_loop(expr: Expr, high: Var, low: Var) -> bool:
    atoms = ix.free_atoms(expr)
    if any(isinstance(a, ix.Indirect) and {high, low} & a.value.free_atoms() for a in atoms):
        return all(
            _is_one_loop(e, high, low)
            for a in atoms
            if isinstance(a, ix.Indirect)
            for v in vs.topological([a.value])
            for e in vs.index_exprs(v)
        ) and _linear_walk(expr, high, low)
    return _linear_walk(expr, high, low)


def _linear_walk(expr: Expr, high: Var, low: Var) -> bool:
    a, b = ix.stride_of(expr, high), ix.stride_of(expr, low)
    return a is not None and b is not None and a is b * low.extent


# ---- loops that walk in turns -----------------------------------------------------------------------------------------


def _split_by_remainders(kernel: Kernel, graph: ir.Graph, sizes: Sizes) -> Kernel:
    """Splits an outer loop v into k v' + r where memory is addressed through v // k (windows that overlap, interleaved slices):
    along v' every access has one stride, and what depends on r alone is decided outside of it."""
    mapping: dict[Atom, Expr] = {}
    outer: list[Var] = []
    touches = list(distinct_touches(kernel, graph, sizes))
    for v in kernel.outer:
        period = math.lcm(*(_turns(t.offset, v) for t in touches)) if touches else 1
        extent = v.extent.as_int()
        if period == 1 or period > MAX_TURNS or extent is None or extent % period or extent < 2 * period:
            outer.append(v)
            continue
        low, high = ix.var(f"{v.name}r", period), ix.var(f"{v.name}q", extent // period)
        mapping[v] = high.expr() * period + low.expr()
        outer += [low, high]
    if not mapping:
        return kernel
    statements = tuple(s.substituted(mapping) for s in kernel.statements)
    return replace(kernel, outer=tuple(outer), statements=statements)


def _turns(offset: Expr, v: Var) -> int:
    """The k for which the offset has a stride along v' in v = k v' + r: 1 if it has one along v, or for no k."""
    found = 1
    if ix.stride_of(offset, v) is None:
        for atom in {a for mono, _ in offset.terms for a in mono}:
            if isinstance(atom, ix.FloorDiv | ix.Mod):
                step = ix.stride_of(atom.num, v)
                by, den = None if step is None else step.as_int(), atom.den.as_int()
                if by and den:
                    found = math.lcm(found, den // math.gcd(den, by))
    return found


def unflattened(kernel: Kernel) -> Kernel:
    """Splits loops that stand for several dimensions at once: where indices hold v // k and v % k, v = k v' + r, and each of
    the two walks evenly. Reshapes between loops leave such indices."""
    if any(s.kind == "scan" for s in kernel.statements):
        return kernel
    for step in _splits(kernel):
        kernel = step.kernel
    return kernel


@dataclass(frozen=True, slots=True)
class _Split:
    """A kernel of which loops were split, and what these are in terms of their parts."""

    kernel: Kernel
    parts: Mapping[Atom, Expr]


def _splits(kernel: Kernel, shifted: bool = False) -> Iterator[_Split]:
    """The kernel after each step of `unflattened`; with `shifted` also where indices hold ``(v // k + n) % m``."""
    for _ in range(MAX_TURNS):
        exprs = _all_exprs(kernel, bounds=False)
        outer, inner, mapping = unflattened_loops(kernel.outer, kernel.inner, _with_numerators(exprs) if shifted else exprs)
        if not mapping:
            return
        statements = tuple(s.substituted(mapping) for s in kernel.statements)
        kernel = replace(kernel, outer=outer, inner=inner, statements=statements)
        yield _Split(kernel, mapping)


def _with_numerators(exprs: list[Expr]) -> list[Expr]:
    """The expressions, and what is divided in them."""
    found = list(exprs)
    for e in found:
        found += [a.num for mono, _ in e.terms for a in mono if isinstance(a, ix.FloorDiv | ix.Mod) and a.num.atom() is None]
    return found


def unflattened_loops(
    outer: tuple[Var, ...], inner: tuple[Var, ...], exprs: list[Expr]
) -> tuple[tuple[Var, ...], tuple[Var, ...], dict[Atom, Expr]]:
    """One step of `unflattened`: the loops, and what each that was split is in terms of its parts."""
    mapping: dict[Atom, Expr] = {}
    apart = [tuple(part for v in loops for part in _parts(v, exprs, mapping)) for loops in (outer, inner)]
    return apart[0], apart[1], mapping


def _parts(v: Var, exprs: list[Expr], mapping: dict[Atom, Expr]) -> tuple[Var, ...]:
    """The loops that v falls into at the largest k, or v itself."""
    extent = v.extent.as_int()
    divisors = {
        atom.den.as_int() or 0
        for e in exprs
        for mono, _ in e.terms
        for atom in mono
        if isinstance(atom, ix.FloorDiv | ix.Mod) and atom.num is v.expr()
    }
    fitting = [k for k in divisors if extent is not None and 1 < k < extent and extent % k == 0]
    if extent is None or not fitting:
        return (v,)
    k = max(fitting)
    high, low = ix.var(f"{v.name}h", extent // k), ix.var(f"{v.name}l", k)
    mapping[v] = high.expr() * k + low.expr()
    return high, low


def _in_dimensions(kernel: Kernel, graph: ir.Graph, sizes: Sizes) -> Kernel:
    """Splits loops as `unflattened` does where lanes then cost less: a group's scale is a number for all its lanes, not a
    division and a gather for each. Lanes go on along the same memory: elsewhere each would be in a page of its own."""
    if kernel.share is not None or any(s.kind == "scan" for s in kernel.statements):
        return kernel
    steps = list(_splits(kernel, shifted=True))
    if not steps:
        return kernel
    apart = steps[-1].kernel
    whole, split = (_vector_loop(k, list(distinct_touches(k, graph, sizes)), sizes) for k in (kernel, apart))
    if whole is None or split is None or split.cost >= whole.cost:
        return kernel
    place = whole.loop.expr()
    for step in steps:
        place = ix.substitute(place, step.parts)
    columns = split.loop in apart.outer and kernel.inner
    is_long = sizes.of(split.loop.extent) >= (MIN_COLUMNS if columns else MIN_LANES)
    return apart if is_long and ix.stride_of(place, split.loop) is ix.ONE else kernel


# ---- grouped channels -----------------------------------------------------------------------------------------------


def grouped(kernel: Kernel, vector: Var, touches: list[Touch], sizes: Sizes) -> tuple[Kernel, Var] | None:
    """Joins a short inner loop with the outer one that goes on where it ends, as the channels and groups of a normalisation of
    channels-last images do: whole registers of neighbouring channels are reduced over the pixels, then lanes within groups."""
    width = vector.extent.as_int()
    if vector not in kernel.inner or len(kernel.inner) < 2 or kernel.rows or width not in GROUPS:
        return None
    if any(s.kind in ("scan", "scatter") or (s.kind == "reduction" and s.op not in GROUP_OPS) for s in kernel.statements):
        return None
    high = continued(kernel, vector, touches, sizes, MIN_TASKS)
    if high is None:
        return None
    made, merged = _one_loop(kernel, high, vector)
    outer = tuple(merged if u is high else u for u in kernel.outer)
    return replace(made, outer=outer, inner=tuple(u for u in kernel.inner if u is not vector)), merged


def continued(kernel: Kernel, low: Var, touches: list[Touch], sizes: Sizes, least: int = 1) -> Var | None:
    """The outer loop that most bytes go on along where `low` ends, so that both are one run of neighbours; None unless the
    other outer loops have `least` points."""
    moved = sum(t.distinct for t in touches)
    for v in kernel.outer:
        along = sum(t.distinct for t in touches if _is_one_loop(t.offset, v, low) and stride_along(t.offset, low, sizes) == 1)
        if v is not low and 2 * along > moved and sizes.points(u for u in kernel.outer if u is not v) >= least:
            return v
    return None


def _one_loop(kernel: Kernel, high: Var, low: Var) -> tuple[Kernel, Var]:
    """The statements over one loop in place of two; the caller puts it where they were."""
    merged = ix.var(f"{high.name}{low.name}", high.extent * low.extent)
    mapping: dict[Atom, Expr] = {high: ix.floordiv(merged.expr(), low.extent), low: ix.mod(merged.expr(), low.extent)}
    return replace(kernel, statements=tuple(s.substituted(mapping) for s in kernel.statements)), merged


def rejoined(kernel: Kernel, touches: list[Touch], sizes: Sizes) -> Kernel:
    """Joins the last two outer loops where most bytes walk them as one run, although some index, as that of a group of
    channels, depends on one of them alone: neighbouring threads then have neighbours, past the ends of groups too."""
    if len(kernel.outer) < 2:
        return kernel
    *others, high, low = kernel.outer
    if continued(kernel, low, touches, sizes) is not high:
        return kernel
    made, merged = _one_loop(kernel, high, low)
    return replace(made, outer=(*others, merged))


# ---- the vector loop ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Lanes:
    """A loop whose points are lanes, and what all accesses cost then."""

    loop: Var
    cost: float


def _vector_loop(kernel: Kernel, touches: list[Touch], sizes: Sizes) -> _Lanes | None:
    candidates = [*(kernel.outer if kernel.share is None else ()), *_inner_candidates(kernel)]
    best: tuple[float, int, Var] | None = None
    for rank, v in enumerate(candidates):
        if sizes.of(v.extent) < 2:
            continue
        score = _lane_cost(v, kernel, touches, sizes)
        if best is None or (score, -rank) < best[:2]:
            best = (score, -rank, v)
    return None if best is None else _Lanes(best[2], best[0])


def _tile_loop(kernel: Kernel, vector: Var, touches: list[Touch], sizes: Sizes) -> Var | None:
    """An outer loop along which a load is contiguous that walks with a stride along the vector loop (a transposed input)."""
    if kernel.inner or vector not in kernel.outer or sizes.of(vector.extent) < 2 * TILE:
        return None
    for touch in touches:
        stride = stride_along(touch.offset, vector, sizes)
        if touch.store or stride is None or abs(stride) <= 1:
            continue
        for v in kernel.outer:
            if v is not vector and stride_along(touch.offset, v, sizes) == 1 and sizes.of(v.extent) >= 2 * TILE:
                return v
    return None


def _inner_candidates(kernel: Kernel) -> list[Var]:
    """Inner loops that may become lanes: for a scan or an ordered scatter only the last one, since lanes run in order."""
    if any(s.kind in ("scan", "scatter") for s in kernel.statements) or kernel.rows:
        return list(kernel.inner[-1:])
    return list(kernel.inner)


def _lane_cost(v: Var, kernel: Kernel, touches: list[Touch], sizes: Sizes) -> float:
    inner_loop = v in kernel.inner
    extent = sizes.of(v.extent)
    total = 0.0
    for t in touches:
        if inner_loop and not t.inner:
            total += t.bytes * GATHER  # outer statements stay scalar when the lanes are an inner loop
            continue
        if t.inner and _is_outside(t, kernel):  # loaded in front of the inner loops
            t = replace(t, bytes=t.bytes // max(1, sizes.points(kernel.inner)))
        stride = stride_along(t.offset, v, sizes)
        factor = SPLAT if stride == 0 else 1.0 if stride in (1, -1) else GATHER
        if stride is not None and stride > 1 and stride * 4 <= 32:
            factor = 3.0
        elif stride is None and not t.store and _is_run(t.offset, v, sizes):
            factor = RUN
        total += t.bytes * factor * (1.5 if t.store and factor > 1.0 else 1.0)
    if inner_loop and any(s.kind == "scan" for s in kernel.statements):
        total *= SCAN_ALONG
    if not inner_loop and kernel.sections > 1:
        total *= _waiting(v, kernel, sizes)
    if not inner_loop and kernel.inner and kernel.sections:
        total *= 1.05  # equal otherwise: a reduction along the lanes touches fewer rows at once
    return total * (1.0 + 8.0 / max(extent, 1))


def _is_run(offset: Expr, v: Var, sizes: Sizes) -> bool:
    """Whether points of a loop read neighbours, but where one index is clamped, mirrored, or begins again."""
    moving = [atom for mono, _ in offset.terms for atom in mono if v in ix.free_atoms(atom.expr())]
    return len(moving) == 1 and usual_stride(offset, v, sizes) == 1


def _waiting(v: Var, kernel: Kernel, sizes: Sizes) -> float:
    """How many times longer rows take that are read again, so not shared, where lanes over `v` leave few tasks of columns."""
    columns = sizes.points(kernel.outer)
    tasks = columns // max(1, sizes.of(v.extent)) * -(-sizes.of(v.extent) // COLUMNS)
    few = tasks < MIN_TASKS and columns * sizes.points(kernel.inner) >= WORTH_THREADS
    return min(MOST_WAITING, MIN_TASKS / max(1, tasks)) if few else 1.0


def _is_outside(touch: Touch, kernel: Kernel) -> bool:
    """Whether a load is the same at all inner points."""
    return not touch.store and not any(v in ix.free_atoms(touch.offset) or through_data(touch.offset, v) for v in kernel.inner)


def _scattered(touches: list[Touch], vector: Var, sizes: Sizes) -> int:
    """How many loads take a vector of indices of 64 bits, and mostly a mask: lanes read neither one element, nor adjacent
    ones, nor with a fixed stride."""

    def scatters(offset: Expr) -> bool:
        if stride_along(offset, vector, sizes) is not None or runs_along(offset, vector, sizes):
            return False
        return usual_stride(offset, vector, sizes) != 0

    return sum(not t.store and scatters(t.offset) for t in touches)


def _lanes(kernel: Kernel, vector: Var, sizes: Sizes, register_bytes: int, most: int = MAX_REGISTERS) -> int:
    """Lanes for the mix of widths: a register of the commonest wide type, several registers for wider ones. A step takes
    at most `most` registers."""
    wide = narrow = single = 0
    random = False
    for s in kernel.statements:
        for v in vs.topological([s.value]):
            random = random or v.op in ops.RANDOM
            if v.op in ("const", "index") or (v.op == "load" and not _uses(v, vector)):
                continue
            size = 1 if v.dtype is torch.bool else v.dtype.itemsize
            wide, narrow, single = wide + (size == 8), narrow + (size in (2, 4)), single + (size == 1)
    lanes = register_bytes // 8 if wide > narrow else register_bytes // 4 if narrow or wide else register_bytes // 2
    of_blocks = 2 * lanes if random else 0  # as many elements as one register of Philox blocks serves
    if vector in kernel.outer and kernel.inner:
        # Long parts of the rows that the inner loops walk across, and independent accumulators.
        lanes *= _without_spills(kernel, vector, lanes * 4 / register_bytes, most)
    elif vector in kernel.inner:
        lanes *= min(most, _registers(kernel, vector, lanes, sizes))
    if register_bytes == GATHERING and not random and _gathers(kernel, vector):
        lanes = min(lanes, register_bytes // 8)
    lanes = max(lanes, of_blocks)
    literal = vector.extent.as_int()
    limit = literal if literal is not None else 1 << 30
    while lanes > 4 and lanes // 2 >= limit:
        lanes //= 2
    return min(max(lanes, 4), 64)  # a `Vec` has at least four lanes, in two registers if need be


def _without_spills(kernel: Kernel, vector: Var, of_a_value: float, most: int) -> int:
    """At most so many registers of lanes that the values of a step need few more registers than there are: with many more, a
    compiler takes minutes, and each value goes through memory."""
    alive = registers_of_a_lane(kernel, vector) * of_a_value
    while most > 1 and most * alive > MOST_ALIVE:
        most //= 2
    return most


def _gathers(kernel: Kernel, vector: Var) -> bool:
    """Whether lanes read elements that data point to."""
    loads = vs.loads([root for s in kernel.statements for root in s.roots])
    return any(through_data(e, vector) for load in loads for e in load.attr[1])


def _registers(kernel: Kernel, vector: Var, lanes: int, sizes: Sizes) -> int:
    """How many registers of lanes a step of a horizontal loop takes. Short rows fit into one step and stay in registers; in
    long ones the chain from step to step of a reduction is hidden by several that are independent."""
    literal = vector.extent.as_int()
    if kernel.inner != (vector,):
        return 1
    if literal is not None and lanes < literal <= MAX_REGISTERS * lanes:
        return 2 if literal <= 2 * lanes else MAX_REGISTERS
    reduced = any(s.inner and s.kind == "reduction" for s in kernel.statements)
    if sizes.of(vector.extent) < 2 * MAX_REGISTERS * lanes or not reduced:
        return 1
    return MAX_REGISTERS if _most_loads(kernel) <= MANY_LOADS else 2


def _most_loads(kernel: Kernel) -> int:
    """How many loads one section of inner loops has at most: about so many values live at once."""
    by_section: dict[int, set[Value]] = {}
    for s in kernel.statements:
        if s.inner:
            by_section.setdefault(s.section, set()).update(vs.loads(s.roots))
    return max(map(len, by_section.values()), default=0)


def _uses(value: Value, v: Var) -> bool:
    return any(v in ix.free_atoms(e) for e in vs.index_exprs(value))
