"""Writes into storage that exists: `copy_` on graph inputs, scatters that the reinplace stage turned into in-place writes, and
mutable custom operators.

A buffer's new *version* shares the storage of the old one, so nothing may read the old version afterwards. Values are lazy:
before a write, every value that still reads the storage and has consumers left is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map_only

from kgen.capture.operators import operator_name, owner_of
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Expr, Indirect
from kgen.ir.values import Value
from kgen.lowering import fallback
from kgen.lowering.builder import Builder
from kgen.lowering.checks import checked_write
from kgen.lowering.layout import placed
from kgen.lowering.pointwise import Operand, as_tensor
from kgen.lowering.tensor import Tensor, axes, broadcast, convert, indices, reindex
from kgen.lowering.unbacked import bindings
from kgen.lowering.views import dense, slice_dim, slice_length, slice_start, storage_index

# Set by the reinplace stage on a node whose first argument's storage it may overwrite: the FX node that owns the storage.
INPLACE = "kgen_inplace"
# Set as well where the result is already in place: the scatter of a changed view into the tensor it is a view of.
WRITE_BACK = "kgen_write_back"
# The same for a mutable custom operator: FX node of a tensor that it may write in place -> the node that owns its storage.
INPLACE_BASES = "kgen_inplace_bases"


@dataclass(frozen=True, slots=True)
class Write:
    """Elements to change: over a loop space of shape `sizes`, the `value` for the logical index `where`, as in `ir.Scatter`."""

    sizes: ir.Sizes
    where: Sequence[Expr]
    value: Value
    mode: str = "set"
    mask: Value | None = None


def write(b: Builder, base: Tensor, change: Write) -> Tensor:
    """`base` with the change: in place where that is allowed, else in a copy."""
    done = write_in_place(b, base, change)
    return done if done is not None else write_to(b, b.copy(base), change)


def write_to(b: Builder, fresh: Tensor, change: Write) -> Tensor:
    """The change to a buffer made for it."""
    return b.scatter(fresh, change.sizes, change.where, change.value, change.mode, change.mask)


def write_in_place(b: Builder, base: Tensor, change: Write) -> Tensor | None:
    """The change as a scatter into the storage of `base`, or None when that storage must keep its contents. A change of no
    elements makes no new version: the write of an empty view into its tensor would not find that it was changed in place."""
    if any(size == ix.ZERO for size in change.sizes):
        return base
    name = _writable(b, base, b.current.meta.get(INPLACE))
    if name is None:
        return None
    _settle_readers(b, name)
    return _overwrite(b, name, base, change)


def _writable(b: Builder, base: Tensor, owner: Node | None) -> str | None:
    name = plain_load(base)
    if owner is None or name is None:
        return None
    name = newest(b, name)
    if not _has_own_elements(base, b.graph.buffers[name]):
        return None  # a lazy repetition: one element of storage is several of the tensor
    root = root_of(b, name)
    kind = b.graph.buffers[root].kind
    if kind == "constant" or (kind == "input" and (owner.op != "placeholder" or root != _buffer_of(b, owner))):
        return None  # a lazy clone of an input reads the input itself
    return name


def _has_own_elements(view: Tensor, buffer: ir.Buffer) -> bool:
    """Whether each element of the view provably is another one of the buffer."""
    linear = ix.linearize(view.value.attr[1], ix.contiguous_strides(buffer.sizes))
    return are_digits((ix.stride_of(linear, v), v.extent) for v in view.axes)


def are_digits(axes_of_view: Iterable[tuple[Expr | None, Expr]]) -> bool:
    """Whether strides and sizes provably are those of mixed-radix digits, so that no two elements share a place."""
    digits = [(stride, extent) for stride, extent in axes_of_view if extent != 1]
    left = [(-stride if stride.bounds()[1] < 0 else stride, extent) for stride, extent in digits if stride is not None]
    span = ix.ONE
    while left:
        found = next((d for d in left if all(ix.known_nonnegative(o - d[0]) for o, _ in left)), None)
        if found is None or not ix.known_nonnegative(found[0] - span):
            return False
        left.remove(found)
        span = found[0] * found[1]
    return all(stride is not None for stride, _ in digits)


def _buffer_of(b: Builder, owner: Node) -> str | None:
    tensor = b.env.get(owner)
    name = plain_load(tensor) if isinstance(tensor, Tensor) else None
    return root_of(b, name) if name is not None else None


def _overwrite(b: Builder, name: str, base: Tensor, change: Write) -> Tensor:
    """The scatter node. A value or mask that reads other elements of the storage it is written to is stored first."""
    where_of: dict[ix.Atom, Expr] = dict(zip(base.axes, change.where, strict=True))
    index = tuple(_stored_indirects(b, name, ix.substitute(e, where_of), change.sizes) for e in base.value.attr[1])
    mask = change.mask
    access = vs.load(name, index, base.dtype)
    value = checked_write(b.graph, change.value, change.where, access, mask)
    if _overlaps(b, name, value, index):
        narrow = change.mode == "set" and ops.compute_dtype(base.dtype) == value.dtype
        value = _stored(b, change.sizes, value, base.dtype if narrow else value.dtype)
    if mask is not None and _overlaps(b, name, mask, index):
        mask = _stored(b, change.sizes, mask, mask.dtype)
    new = b.new_version(name)
    b.graph.nodes.append(ir.Scatter(new.name, name, axes(change.sizes), index, value, change.mode, mask, b.origin))
    return base.with_value(vs.load(new.name, base.value.attr[1], base.dtype))


def _stored(b: Builder, space: ir.Sizes, value: Value, dtype: torch.dtype) -> Value:
    device = b.current.meta["val"].device
    return b.copy(Tensor(space, dtype, device, value)).value


def _stored_indirects(b: Builder, name: str, expr: Expr, space: ir.Sizes) -> Expr:
    mapping: dict[ix.Atom, Expr] = {}
    for atom in ix.free_atoms(expr):
        if isinstance(atom, Indirect) and _reads_storage(b, name, atom.value):
            mapping[atom] = ix.indirect(_stored(b, space, atom.value, atom.value.dtype), atom.size, atom.inside).expr()
    return ix.substitute(expr, mapping) if mapping else expr


def _overlaps(b: Builder, name: str, value: Value, index: tuple[Expr, ...]) -> bool:
    """Whether the value reads an element of the storage other than the one it is written to."""
    root = root_of(b, name)
    repeats = any(isinstance(a, Indirect) for e in index for a in ix.free_atoms(e))
    for load in vs.loads([value]):
        source = load.attr[0]
        if root_of(b, source) != root or (source == name and load.attr[1] == index and not repeats):
            continue
        if source != name or repeats or not ix.disjoint(load.attr[1], index):
            return True
    return False


# ---- versions -------------------------------------------------------------------------------------------------------


def plain_load(tensor: Tensor) -> str | None:
    """The buffer that the tensor is a view of, or None when it is computed."""
    value = tensor.value
    if value.op != "load" or value.args or value.attr[2] != tensor.dtype:
        return None
    if any(isinstance(a, Indirect) for e in value.attr[1] for a in ix.free_atoms(e)):
        return None
    return value.attr[0]


def root_of(b: Builder, name: str) -> str:
    """The buffer that owns the storage."""
    return ir.storage_owner(b.graph.buffers, name, b.roots)


def newest(b: Builder, name: str) -> str:
    while name in b.versions:
        name = b.versions[name]
    return name


def at_newest(b: Builder, tensor: Tensor) -> Tensor:
    """The same view of the buffer's newest version."""
    name = plain_load(tensor)
    if name is None or newest(b, name) == name:
        return tensor
    return tensor.with_value(vs.load(newest(b, name), tensor.value.attr[1], tensor.dtype))


def written_back(b: Builder, base: Tensor, region: Value, src: Tensor) -> Tensor | None:
    """The result of a scatter of `src` into the part of `base` that `region` reads, when it is there already."""
    if region is not src.value:
        return None
    current = at_newest(b, base)
    return current if current is base or WRITE_BACK in b.current.meta else None


# ---- pending readers ------------------------------------------------------------------------------------------------


def _settle_readers(b: Builder, name: str) -> None:
    """Stores what reads the storage of `name` and is still wanted after the current node, in its present state."""
    env = b.env
    for node in env.take_readers(root_of(b, name), partial(root_of, b)):
        if _wanted_later(node, b.current) or node in b.owners:
            env[node] = _copied(b, env[node], name)


def _copied(b: Builder, item: Any, name: str) -> Any:
    if isinstance(item, dict):
        return {key: _copied(b, i, name) for key, i in item.items()}
    if isinstance(item, tuple | list):
        return type(item)(_copied(b, i, name) for i in item)
    return b.copy(item) if isinstance(item, Tensor) and _reads_storage(b, name, item.value) else item


def _reads_storage(b: Builder, name: str, value: Value) -> bool:
    root = root_of(b, name)
    return any(root_of(b, v.attr[0]) == root for v in vs.loads([value]))


def _wanted_later(node: Node, current: Node) -> bool:
    return any(user > current and not _overwrites(user, node) for user in node.users)


def _overwrites(user: Node, node: Node) -> bool:
    """Whether `user` takes `node` only as the place to write to."""
    if user.args and user.args[0] is node and node not in user.args[1:] and node not in user.kwargs.values():
        return WRITE_BACK in user.meta or operator_name(user.target) in ("aten.copy_.default", "aten.copy.default")
    return False


# ---- rules ----------------------------------------------------------------------------------------------------------


def copy_(b: Builder, x: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """Overwrites a graph input; nothing to do where the result was computed in its storage."""
    name = plain_load(x)
    if name is None:
        raise fallback.Refused("copy_ to a computed tensor")
    new = broadcast(convert(src, x.dtype), x.sizes)
    current = at_newest(b, x)
    if new.value is not current.value:
        name = newest(b, name)
        _settle_readers(b, name)
        current = _overwrite(b, name, current, Write(x.sizes, indices(x.sizes), new.value))
    b.env[b.current.args[0]] = current
    return current


def copy(b: Builder, x: Tensor, src: Operand, non_blocking: bool = False) -> Tensor:
    """Functional `copy_`: the value of `src`, which may be a number, with the shape and dtype of `x`."""
    return broadcast(convert(as_tensor(src, x.device), x.dtype), x.sizes)


def auto_functionalized(b: Builder, op: Any, **kwargs: Any) -> tuple[Any, ...]:
    """A mutable custom operator made functional: the call itself, on copies of what it writes that must keep its contents."""
    given = {a.name: kwargs.get(a.name) for a in _written(op)}
    written = {name: tree_map_only(Tensor, partial(_base, b), value) for name, value in given.items() if value is not None}
    results = _call_mutable(b, op, {**kwargs, **written}, written)
    return (*results, *(tree_map_only(Tensor, partial(at_newest, b), written.get(name)) for name in given))


def auto_functionalized_v2(b: Builder, op: Any, _all_bases: Sequence[Tensor], **kwargs: Any) -> tuple[Any, ...]:
    """As above, with the written arguments given as views of base tensors."""
    nodes = b.current.kwargs["_all_bases"]
    bases = [_base(b, base, node) for base, node in zip(_all_bases, nodes, strict=True)]
    plain = {k: v for k, v in kwargs.items() if not k.startswith("_")}
    views: dict[str, Any] = {}
    for argument in _written(op):
        if f"_{argument.name}_length" in kwargs:
            raise fallback.Refused("a mutable operator that writes a list of tensors")
        base_index = kwargs.get(f"_{argument.name}_base_index")
        views[argument.name] = (
            None if base_index is None else _view_of(b, bases[base_index], nodes[base_index], argument.name, kwargs)
        )
    results = _call_mutable(b, op, {**plain, **views}, {k: v for k, v in views.items() if v is not None})
    return (*results, *(at_newest(b, base) for base in bases))


def _base(b: Builder, base: Tensor, node: Node | None = None) -> Tensor:
    """The tensor for an operator to write to: the old one where the reinplace stage found its contents dead."""
    found = base_in_place(b, base, node)
    return b.copy(base) if found is None else found


def base_in_place(b: Builder, base: Tensor, node: Node | None) -> Tensor | None:
    """The tensor itself where the reinplace stage found that an operator may write to it; its other readers are settled."""
    name = _writable(b, base, b.current.meta.get(INPLACE_BASES, {}).get(node))
    if name is None or _has_clone(b, name, node):
        return None
    _settle_readers(b, name)
    return at_newest(b, base)


def _has_clone(b: Builder, name: str, base: Node | None) -> bool:
    """Whether the operator takes a clone of its base as well: clones are lazy, so that it would read what it writes."""
    others = [b.env.get(one) for one in b.current.all_input_nodes if owner_of(one) is not owner_of(base)]
    read = [plain_load(one) for one in others if isinstance(one, Tensor)]
    return any(one is not None and root_of(b, one) == root_of(b, name) for one in read)


def _view_of(b: Builder, base: Tensor, node: Node, name: str, kwargs: dict[str, Any]) -> Tensor:
    """The written argument as a view of the copied base, from what torch recorded of it."""
    if kwargs.get(f"_{name}_alias") or (f"_{name}_slice_dim" not in kwargs and f"_{name}_size" not in kwargs):
        return base
    dim = kwargs.get(f"_{name}_slice_dim")
    if dim is not None:
        start = slice_start(kwargs[f"_{name}_slice_start"], base.sizes[dim])
        return slice_dim(base, dim, start, slice_length(start, kwargs[f"_{name}_slice_end"], 1, base.sizes[dim]))
    value = node.meta["val"]
    strides, offset = b.symbols.sizes(value.stride()), b.symbols.expr(value.storage_offset())
    if not dense(base.sizes, strides):
        raise fallback.Refused("a mutable operator that writes a view of a tensor that is not dense")
    start = ix.as_expr(kwargs[f"_{name}_storage_offset"]) - offset
    steps = kwargs[f"_{name}_stride"]
    return reindex(base, kwargs[f"_{name}_size"], lambda *j: storage_index(ix.linearize(j, steps, start), base.sizes, strides))


def _written(op: Any) -> list[Any]:
    return [a for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def _name(tensor: Tensor) -> str:
    name = plain_load(tensor)
    assert name is not None
    return name


def _call_mutable(b: Builder, op: Any, kwargs: dict[str, Any], written: dict[str, Any]) -> list[Any]:
    names = list(dict.fromkeys(_name(t) for t in tree_leaves(written) if isinstance(t, Tensor)))
    order = [a.name for a in op._schema.arguments]
    sources = b.current.kwargs
    given = {k: kwargs[k] if k in written else placed(b, sources.get(k), kwargs[k], b.current) for k in order if k in kwargs}
    tree = {k: b.extern_tree(value) for k, value in given.items()}
    value = b.current.meta["val"]
    returned = list(value)[: len(op._schema.returns)] if isinstance(value, tuple | list) else []
    specs = [
        (b.symbols.sizes(v.shape), v.dtype, v.device, b.symbols.sizes(v.stride())) if hasattr(v, "stride") else None
        for v in returned
    ]
    binds = bindings(b, b.current, returned)
    pairs = [(n, b.new_version(n).name) for n in names]
    positional = [a.name for a in op._schema.arguments if not a.kwarg_only and a.name in tree]
    rest = {k: v for k, v in tree.items() if k not in positional}
    made = b.extern(op, [tree[k] for k in positional], rest, specs, "mutable operator", pairs, effect=True, binds=binds)
    return list(made) if op._schema.returns else [None]


RULES: dict[str, Callable[..., Any]] = {
    "aten.copy_": copy_,
    "aten.copy": copy,
    "torch.ops.higher_order.auto_functionalized": auto_functionalized,
    "torch.ops.higher_order.auto_functionalized_v2": auto_functionalized_v2,
}
