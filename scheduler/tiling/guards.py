"""Leaves out masks of loads that a GPU kernel is better off without.

A load with a mask that differs between points has an address of its own at each of them, and is a load of the full tile. Where
its element belongs to fewer axes of the tile, as a scalar whose gradient fills a corner of a matrix, one load for all points is
cheaper, and so is all that is made of it alone. Three scalars under masks took most of the 92 us of a kernel over
2000 x 2000 elements (H100, 2026-11-28).
"""

from __future__ import annotations

from dataclasses import replace

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Expr, Var
from kgen.ir.plan import Statement, Tiling
from kgen.ir.values import Value


def without_needless_guards(tiling: Tiling, graph: ir.Graph) -> Tiling:
    """The tiling with loads without masks, where all points may load and fewer loads are enough. Values stay the same."""
    kernel = tiling.kernel
    axes = {v: name for name, loops in (("x", tiling.x), ("y", tiling.y), ("r", kernel.inner)) for v in loops}
    roots = [root for s in kernel.statements for root in s.roots]
    made = {out for s in kernel.statements for out in s.outs}
    masked = (load for load in vs.loads(roots) if load.args and load.attr[0] not in made)
    shared = {load for load in masked if _is_shared(load, graph.buffers[load.attr[0]], axes)}
    if not shared:
        return tiling
    statements = tuple(_mapped(s, shared) for s in kernel.statements)
    return replace(tiling, kernel=replace(kernel, statements=statements))


def _is_shared(load: Value, buffer: ir.Buffer, axes: dict[Var, str]) -> bool:
    """Whether the mask differs along axes along which the element does not."""
    (offset,) = load.attr[1]
    if ix.indirects(offset):
        return False

    def along(variables: frozenset[Var]) -> set[str]:
        return {axes[v] for v in variables if v in axes}

    differs = along(load.args[0].variables()) - along(frozenset(a for a in ix.free_atoms(offset) if isinstance(a, Var)))
    return bool(differs) and _is_inside(buffer, offset)


def _is_inside(buffer: ir.Buffer, offset: Expr) -> bool:
    """Whether each point's offset is one of the buffer's: then any of them may load."""
    if buffer.strides is None:
        return False
    last = ix.ZERO
    for size, stride in zip(buffer.sizes, buffer.strides, strict=True):
        last = last + (size - 1) * stride
    low, high, end = *offset.bounds(), last.as_int()
    return end is not None and low >= 0 and high <= end and all(size != 0 for size in buffer.sizes)


def _mapped(s: Statement, shared: set[Value]) -> Statement:
    return replace(s, value=_unguarded(s.value, shared), mask=None if s.mask is None else _unguarded(s.mask, shared))


def _unguarded(root: Value, shared: set[Value]) -> Value:
    """The value with no mask on loads of `shared`: inside of a selection by a part of its mask, that part says nothing; where
    some part is left, 0 takes the element's place."""
    known = set(shared)

    def visit(value: Value, args: tuple[Value, ...], _: object) -> Value:
        if value.op in ("load", "index"):
            return value
        made = value if args == value.args else vs.rebuild(value, args, value.attr)
        if made.op != "where":
            return made
        cond, yes, no = made.args
        return vs.where(cond, _assuming(yes, cond, known), _assuming(no, vs.call("not", cond), known))

    return vs.replace_loads([vs.rewrite([root], visit)[root]], lambda load: _selected(load) if load in known else None)[0]


def _assuming(value: Value, condition: Value, known: set[Value]) -> Value:
    """The value where the condition holds: masks of `known` loads without it. What they become is known, too."""
    holds = set(_parts(condition))

    def weaker(load: Value) -> Value | None:
        if load not in known or not load.args or holds.isdisjoint(_parts(load.args[0])):
            return None
        mask = _all_of([part for part in _parts(load.args[0]) if part not in holds])
        buffer, index, dtype = load.attr
        made = vs.load(buffer, index, dtype, mask)
        known.add(made)
        return made

    return vs.replace_loads([value], weaker)[0]


def _selected(load: Value) -> Value:
    buffer, index, dtype = load.attr
    plain = vs.load(buffer, index, dtype)
    return vs.where(load.args[0], plain, vs.const(0, load.dtype)) if load.args else plain


def _parts(mask: Value) -> list[Value]:
    """The conditions that all have to hold."""
    return [part for one in mask.args for part in _parts(one)] if mask.op == "and" else [mask]


def _all_of(parts: list[Value]) -> Value | None:
    mask = None
    for part in parts:
        mask = part if mask is None else vs.call("and", mask, part)
    return mask
