"""Finds one loop space for two groups: which variable of one is which of the other, given two accesses to one buffer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kgen.ir import index as ix
from kgen.ir.index import Expr, Var
from kgen.ir.values import Index
from kgen.scheduler.analysis.items import Group, Mapping
from kgen.scheduler.analysis.memo import memoised
from kgen.verdict import Reason


@dataclass(frozen=True, slots=True)
class Space:
    """The merged loops and how each group's variables read in terms of them. `a_inner`/`b_inner`: whether that group's plain
    pointwise items run at every inner point (else once per outer point)."""

    outer: tuple[Var, ...]
    inner: tuple[Var, ...]
    map_a: Mapping
    map_b: Mapping
    a_inner: bool
    b_inner: bool


def identity_space(a: Group, b: Group) -> Space | Reason:
    """Joins groups of equal extents position by position (horizontal fusion of groups that share no plain access)."""
    if [v.extent for v in a.outer] != [v.extent for v in b.outer] or [v.extent for v in a.inner] != [v.extent for v in b.inner]:
        return Reason.SPACE_MISMATCH
    return _canonical(
        a.outer, a.inner, {}, dict(zip(b.outer + b.inner, _exprs(a.outer + a.inner), strict=True)), bool(a.inner), bool(b.inner)
    )


def same_points(a: Group, b: Group) -> Space | Reason:
    """Joins a group that has inner loops with one of independent points, position by position of the outer loops: of two that
    read a matmul through one reshape, neither access is plain."""
    if bool(a.inner) == bool(b.inner) or [v.extent for v in a.outer] != [v.extent for v in b.outer]:
        return Reason.SPACE_MISMATCH
    mapping: Mapping = dict(zip(b.outer, _exprs(a.outer), strict=True))
    return _canonical(a.outer, a.inner or b.inner, {}, mapping, bool(a.inner), bool(b.inner))


def align(a: Group, b: Group, index_a: Index, index_b: Index) -> Space | Reason:
    """The space in which `a` and `b` touch the same element ``buffer[index_a] == buffer[index_b]`` at the same point. It
    depends on loops and indices only, on which group is larger and on whether points have an order: equal layers have the
    same ones."""
    more, in_order = len(a.items) - len(b.items), _in_order(a, b)
    key = ("aligned", a.outer, a.inner, b.outer, b.inner, index_a, index_b, more >= 0, more > 0, in_order)
    return memoised(key, lambda: _aligned(a, b, index_a, index_b))


def _aligned(a: Group, b: Group, index_a: Index, index_b: Index) -> Space | Reason:
    mirror = _mirror(index_a, index_b, b.outer)
    if mirror:
        return _then_mirrored(align(a, b, index_a, _substituted(index_b, mirror)), mirror)
    mirror = _mirror(index_b, index_a, a.outer)
    if mirror:
        return _flipped(_then_mirrored(_flipped(align(a, b, _substituted(index_a, mirror), index_b)), mirror))
    matched = _match(index_a, index_b)
    if matched is None:
        return Reason.INDEX_MISMATCH
    pairs, a_exprs, b_exprs = matched
    if a_exprs:
        return _adapt(a, b, {**a_exprs, **{p: c.expr() for p, c in pairs}})
    if b_exprs:
        return _flipped(_adapt(b, a, {**b_exprs, **{c: p.expr() for p, c in pairs}}))
    return _join(a, b, pairs)


def in_rows(a: Group, b: Group, index_a: Index, index_b: Index) -> Space | Reason:
    """The space of a matmul in which points of the other group, one for each row of the matmul, touch the same element."""
    if not a.inner:
        return _flipped(in_rows(b, a, index_b, index_a)) if b.inner else Reason.SPACE_MISMATCH
    matched = _match(index_a, index_b)
    if matched is None or matched[1] or matched[2]:
        return Reason.INDEX_MISMATCH
    mapping: Mapping = {c: p.expr() for p, c in matched[0] if p in a.outer}
    mapping |= {v: ix.ZERO for v in b.outer if v.extent == 1}
    if b.inner or any(v not in mapping for v in b.outer):
        return Reason.SPACE_MISMATCH
    return _canonical(a.outer, a.inner, {}, mapping, True, False)


def _mirror(plain: Index, other: Index, loops: tuple[Var, ...]) -> Mapping:
    """Independent loops that `other` walks from their end where `plain` walks forward (a flip is in between), each as the
    expression of itself that turns it around."""
    turned: Mapping = {}
    for v in loops:
        uses = [k for k, e in enumerate(other) if v in ix.free_atoms(e)]
        if len(uses) != 1 or other[uses[0]].atom() is not None or not isinstance(plain[uses[0]].atom(), Var):
            continue
        back = v.extent - ix.ONE - v.expr()
        if other[uses[0]] is back:
            turned[v] = back
    return turned


def _then_mirrored(space: Space | Reason, mirror: Mapping) -> Space | Reason:
    """The space with loops of `b` turned around, where `b` was aligned as if it had been written so."""
    return space if isinstance(space, Reason) else replace(space, map_b=_then(mirror, space.map_b))


def _substituted(index: Index, mapping: Mapping) -> Index:
    memo: dict[Expr, Expr] = {}
    return tuple(ix.substitute(e, mapping, memo) for e in index)


def _match(index_a: Index, index_b: Index) -> tuple[list[tuple[Var, Var]], Mapping, Mapping] | None:
    """Position by position: variables of a and b that are each other, variables of a that b's access computes, variables of b
    that a's computes (one side only). None when the accesses do not determine each other."""
    pairs: list[tuple[Var, Var]] = []
    a_exprs: Mapping = {}
    b_exprs: Mapping = {}
    for left, right in zip(index_a, index_b, strict=True):
        p, c = left.atom(), right.atom()
        if isinstance(p, Var) and isinstance(c, Var):
            if p.extent is not c.extent:
                return None
            pairs.append((p, c))
        elif isinstance(p, Var) and right.as_int() is None:
            a_exprs[p] = right
        elif isinstance(c, Var) and left.as_int() is None:
            b_exprs[c] = left
        elif left is not right or left.as_int() is None:
            return None
    repeated = len({p for p, _ in pairs}) != len(pairs) or len({c for _, c in pairs}) != len(pairs)
    return None if repeated or (a_exprs and b_exprs) else (pairs, a_exprs, b_exprs)


def _flipped(space: Space | Reason) -> Space | Reason:
    """The same space with the sides exchanged."""
    if isinstance(space, Reason):
        return space
    return Space(space.outer, space.inner, space.map_b, space.map_a, space.b_inner, space.a_inner)


def _join(a: Group, b: Group, pairs: list[tuple[Var, Var]]) -> Space | Reason:
    """Accesses that are plain variables on both sides."""
    to_b = dict(pairs)
    to_a = {c: p for p, c in pairs}
    if not a.inner and not b.inner:
        return _join_flat(a, b, to_a, to_b)
    if a.inner and b.inner:
        if len(b.items) > len(a.items):
            return _flipped(_join_nested(b, a, to_b, to_a))
        return _join_nested(a, b, to_a, to_b)
    if b.inner:
        return _flipped(_join_into(b, a, to_b))
    return _join_into(a, b, to_a)


def _join_flat(a: Group, b: Group, to_a: dict[Var, Var], to_b: dict[Var, Var]) -> Space | Reason:
    rest_a = [v for v in a.outer if v not in to_b and v.extent != 1]
    rest_b = [v for v in b.outer if v not in to_a and v.extent != 1]
    if rest_a and rest_b:
        return Reason.SPACE_MISMATCH
    # of two equal spaces the larger group's stays: its items need no rewriting then
    keep_a = bool(rest_a) or (not rest_b and len(a.items) >= len(b.items))
    big, small, names = (a, b, to_a) if keep_a else (b, a, to_b)
    rest = rest_a or rest_b
    outer = tuple(v for v in big.outer if v not in rest)
    mapping: Mapping = {v: names[v].expr() for v in small.outer if v in names}
    mapping.update({v: ix.ZERO for v in small.outer if v not in names})
    inner = tuple(rest)
    if big is b:
        return _canonical(outer, inner, mapping, {}, False, bool(inner))
    return _canonical(outer, inner, {}, mapping, bool(inner), False)


def _join_nested(a: Group, b: Group, to_a: dict[Var, Var], to_b: dict[Var, Var]) -> Space | Reason:
    """Both have inner loops: outer loops must pair up, and so must inner ones."""
    for p, c in to_b.items():
        if (p in a.outer) != (c in b.outer) and p.extent != 1:
            return Reason.REDUCED_AXES_DIFFER
    if any(v not in to_b and v.extent != 1 for v in a.outer) or any(v not in to_a and v.extent != 1 for v in b.outer):
        return Reason.SPACE_MISMATCH
    mapping: Mapping = {c: p.expr() for c, p in to_a.items()}
    mapping.update({v: ix.ZERO for v in b.outer if v not in to_a})
    rest_a = [v for v in a.inner if v not in to_b]
    rest_b = [v for v in b.inner if v not in to_a]
    joined = _join_inner(rest_a, rest_b, _in_order(a, b))
    if joined is None:
        return Reason.REDUCED_AXES_DIFFER
    new_inner, extra_a, extra_b = joined
    inner = tuple(v for v in a.inner if v in to_b) + new_inner
    return _canonical(a.outer, inner, extra_a, {**mapping, **extra_b}, True, True)


def _join_into(a: Group, b: Group, to_a: dict[Var, Var]) -> Space | Reason:
    """`a` has inner loops, `b` is flat: it runs per outer point, or at every inner point."""
    matched = set(to_a.values())
    if any(v not in matched and v.extent != 1 for v in a.outer):
        return Reason.SPACE_MISMATCH
    mapping: Mapping = {c: p.expr() for c, p in to_a.items()}
    rest_b = [v for v in b.outer if v not in to_a and v.extent != 1]
    mapping.update({v: ix.ZERO for v in b.outer if v not in to_a and v.extent == 1})
    inner_matched = [v for v in a.inner if v in matched and v.extent != 1]
    rest_a = [v for v in a.inner if v not in matched and v.extent != 1]
    if not rest_b:
        if inner_matched and rest_a:
            return Reason.SPACE_MISMATCH
        return _canonical(a.outer, a.inner, {}, mapping, True, bool(inner_matched))
    joined = _join_inner(rest_a, rest_b, _in_order(a, b))
    if joined is None:
        return Reason.REDUCED_AXES_DIFFER
    new_inner, extra_a, extra_b = joined
    inner = tuple(inner_matched) + new_inner
    extra_a = {**extra_a, **{v: ix.ZERO for v in a.inner if v.extent == 1}}
    return _canonical(a.outer, inner, extra_a, {**mapping, **extra_b}, True, True)


def _join_inner(rest_a: list[Var], rest_b: list[Var], in_order: bool) -> tuple[tuple[Var, ...], Mapping, Mapping] | None:
    """Pairs unmatched inner variables in order, or, where that has no meaning, those of equal extents: a sum over two axes of
    what is then transposed. When only their numbers of points agree, both become digits of the finer shape."""
    rest_a, rest_b = [v for v in rest_a if v.extent != 1], [v for v in rest_b if v.extent != 1]
    if not in_order:
        rest_b = _reordered(rest_b, [v.extent for v in rest_a])
    if [v.extent for v in rest_a] == [v.extent for v in rest_b]:
        return tuple(rest_a), {}, {c: p.expr() for c, p in zip(rest_b, rest_a, strict=True)}
    if ix.product(v.extent for v in rest_a) is not ix.product(v.extent for v in rest_b) or not rest_a or not rest_b:
        return None
    fine, coarse = (rest_a, rest_b) if len(rest_a) > len(rest_b) else (rest_b, rest_a)
    fresh = tuple(ix.var(f"f{k}", v.extent) for k, v in enumerate(fine))
    linear = ix.position_in(fresh)
    to_fine: Mapping = dict(zip(fine, _exprs(fresh), strict=True))
    to_coarse: Mapping = dict(zip(coarse, ix.delinearize(linear, [v.extent for v in coarse]), strict=True))
    return (fresh, to_fine, to_coarse) if fine is rest_a else (fresh, to_coarse, to_fine)


def _in_order(a: Group, b: Group) -> bool:
    return a.members.in_order or b.members.in_order


def _reordered(loops: list[Var], extents: list[Expr]) -> list[Var]:
    """The loops in the order of these extents, or as they are where they have others."""
    left, found = list(loops), list[Var]()
    for extent in extents:
        v = next((v for v in left if v.extent is extent), None)
        if v is None:
            return loops
        left.remove(v)
        found.append(v)
    return loops if left else found


def _adapt(a: Group, b: Group, exprs: Mapping) -> Space | Reason:
    """`a`'s variables become expressions of `b`'s (a reshape is between them): legal when that is a bijection."""
    wanted = [v for v in a.outer if v.extent != 1]
    if any(v not in exprs for v in wanted):
        return _split(a, b, exprs)
    linear = ix.linearize([exprs[v] for v in wanted], ix.contiguous_strides(v.extent for v in wanted))
    numel = ix.product(v.extent for v in wanted)
    mapping: Mapping = {v: exprs.get(v, ix.ZERO) for v in a.outer}
    if any(v in exprs for v in a.inner):
        rows = _row_loops(a.inner, exprs, b)
        rest = tuple(v for v in b.outer if v not in rows)
        if not rows or not _dense(linear, rest, numel):
            return _split(a, b, exprs)
        mapping |= {v: exprs.get(v, ix.ZERO) for v in a.inner}
        return _canonical(rest, rows + tuple(v for v in b.inner if v.extent == 1), mapping, {}, True, True)
    if _dense(linear, b.outer, numel):
        if not a.inner:
            return _canonical(b.outer, b.inner, mapping, {}, False, bool(b.inner))
        if not b.inner:
            return _canonical(b.outer, a.inner, mapping, {}, True, False)
        joined = _join_inner(list(a.inner), list(b.inner), _in_order(a, b))
        if joined is None:
            return Reason.REDUCED_AXES_DIFFER
        inner, extra_a, extra_b = joined
        return _canonical(b.outer, inner, {**mapping, **extra_a}, extra_b, True, True)
    if not a.inner and b.inner and _dense(linear, b.outer + b.inner, numel):
        return _canonical(b.outer, b.inner, mapping, {}, True, True)
    return _split(a, b, exprs)


def _row_loops(inner: tuple[Var, ...], exprs: Mapping, b: Group) -> tuple[Var, ...]:
    """The loops of `b` that are the inner loops of the other group, those of its rows: all inner ones, or some of a group of
    independent points. Nothing where some inner loop is none of them."""
    loops = [exprs[v].atom() if v in exprs else None for v in inner if v.extent != 1]
    found = tuple(v for v in loops if isinstance(v, Var) and v in (b.inner or b.outer))
    all_inner = not b.inner or set(found) == {v for v in b.inner if v.extent != 1}
    return found if all_inner and len(found) == len(loops) == len(set(found)) else ()


def _split(a: Group, b: Group, exprs: Mapping) -> Space | Reason:
    """Splits `b`'s variables where the access divides them (``c // 4`` makes two loops of ``c``), then aligns again."""
    cuts: Mapping = {}
    new: list[Var] = []
    for v in b.outer:
        divisor = _divisor(v, exprs.values())
        if divisor is None or b.inner:
            new.append(v)
            continue
        high = ix.var(f"{v.name}h", ix.floordiv(v.extent, divisor))
        low = ix.var(f"{v.name}l", divisor)
        cuts[v] = high.expr() * divisor + low.expr()
        new += [high, low]
    if not cuts:
        return Reason.INDEX_MISMATCH
    memo: dict[Expr, Expr] = {}
    split = Group(b.serial, tuple(new), ())
    keys = list(exprs)
    space = align(a, split, tuple(v.expr() for v in keys), tuple(ix.substitute(exprs[v], cuts, memo) for v in keys))
    if isinstance(space, Reason):
        return space
    memo = {}
    whole: Mapping = {v: ix.substitute(cuts[v] if v in cuts else v.expr(), space.map_b, memo) for v in b.outer}
    return Space(space.outer, space.inner, space.map_a, whole, space.a_inner, space.b_inner)


def _divisor(v: Var, exprs: object) -> Expr | None:
    """The divisor by which some expression splits `v` evenly, if any."""
    for expr in exprs:  # type: ignore[attr-defined]
        for mono, _ in expr.terms:
            for atom in mono:
                if isinstance(atom, ix.FloorDiv | ix.Mod) and atom.num is v.expr() and ix.mod(v.extent, atom.den) is ix.ZERO:
                    return atom.den
    return None


def _dense(linear: Expr, loops: tuple[Var, ...], numel: Expr) -> bool:
    """Whether `linear` counts 0..numel-1 exactly once as the loops run: strides are those of a packed array."""
    strides = {v: ix.stride_of(linear, v) for v in loops if v.extent != 1}
    if any(s is None or not s.terms for s in strides.values()):
        return False
    rebuilt = ix.linearize([v.expr() for v in strides], [s for s in strides.values() if s is not None])
    if rebuilt is not linear:
        return False
    span = ix.ONE
    left = dict(strides)
    while left:
        found = next((v for v, s in left.items() if s is span), None)
        if found is None:
            return False
        del left[found]
        span = span * found.extent
    return span is numel


def _exprs(loops: tuple[Var, ...] | list[Var]) -> list[Expr]:
    return [v.expr() for v in loops]


def _canonical(
    outer: tuple[Var, ...], inner: tuple[Var, ...], map_a: Mapping, map_b: Mapping, a_inner: bool, b_inner: bool
) -> Space:
    """Renames the merged loops to x0, x1, ... and y0, y1, ..., dropping loops of one iteration."""
    rename: Mapping = {}
    kept: tuple[list[Var], list[Var]] = ([], [])
    for letter, loops, out in (("x", outer, kept[0]), ("y", inner, kept[1])):
        for v in loops:
            if v.extent == 1:
                rename[v] = ix.ZERO
                continue
            fresh = ix.var(f"{letter}{len(out)}", v.extent)
            out.append(fresh)
            rename[v] = fresh.expr()
    return Space(tuple(kept[0]), tuple(kept[1]), _then(map_a, rename), _then(map_b, rename), a_inner, b_inner)


def _then(first: Mapping, second: Mapping) -> Mapping:
    memo: dict[Expr, Expr] = {}
    out = {v: ix.substitute(e, second, memo) for v, e in first.items()}
    return {**{v: e for v, e in second.items() if v not in out}, **out}
