"""Marks functional copies that may be writes into their first argument.

AOTAutograd turns ``x[i] = v`` into ``select_scatter(x, v, 0, i)`` and a final ``copy_(x, result)``: a copy of all of x, twice.
The write may go straight into the storage of x when nothing reads the old contents afterwards. The marks, which
`kgen.lowering.mutation` names, say which; lowering then moves only what changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node

from kgen.capture.notes import DONATED
from kgen.capture.operators import is_view
from kgen.lowering.accumulate import accumulate
from kgen.lowering.mutation import INPLACE, INPLACE_BASES, WRITE_BACK
from kgen.lowering.repeats import drop_repeats
from kgen.lowering.stacked_gradients import stack_gradients

# Functional operators whose result is their first argument with some elements changed.
_WRITES = (
    "select_scatter",
    "slice_scatter",
    "diagonal_scatter",
    "as_strided_scatter",
    "index_put",
    "_unsafe_index_put",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "index_reduce",
    "index_add",
    "index_copy",
    "index_fill",
    "put",
    "_unsafe_masked_index_put_accumulate",
)
WRITES = frozenset(f"aten::{name}" for name in _WRITES)
# Names of the operators that give this stage something to do, besides repeated calls.
SUBJECTS = frozenset(
    [
        *_WRITES,
        "embedding_dense_backward",  # of `accumulate`
        "auto_functionalized_v2",
        "cond",  # which may write into operands, as `donated` notes
        "scan",
        "while_loop",
        "triton_kernel_wrapper_functional",
    ]
)
# A scatter of a whole region, and the view that reads the same region.
INVERSE = {
    "aten::select_scatter": "aten::select",
    "aten::slice_scatter": "aten::slice",
    "aten::diagonal_scatter": "aten::diagonal",
}


def reinplace(gm: GraphModule) -> GraphModule:
    """Marks the writes of the graph that may go to existing storage, after dropping repeated computations, stacking gradients
    of single indices, and turning sums with a sparse gradient into writes."""
    drop_repeats(gm)
    stack_gradients(gm)
    accumulate(gm)
    order = {node: k for k, node in enumerate(gm.graph.nodes)}
    storages: dict[Node, _Storage] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and _name(node) in WRITES and INPLACE not in node.meta:
            _try(node, storages, order)
        elif _is_mutable_call(node):
            _try_bases(node, storages, order)
        _place(node, storages)
    return gm


@dataclass(slots=True)
class _Storage:
    """The nodes that share one storage: its owner, its views, and the results of writes into it."""

    owner: Node
    members: list[Node] = field(default_factory=list)


def _place(node: Node, storages: dict[Node, _Storage]) -> None:
    """Joins the storage that the node's result lives in."""
    source = _shares(node)
    found = storages.get(source) if source is not None else None
    storage = storages[node] = found or _Storage(node)
    storage.members.append(node)


def _shares(node: Node) -> Node | None:
    """The argument whose storage the result of the node is in."""
    if node.op != "call_function":
        return None
    source: Any = node.args[0] if node.args else None
    if _is_getitem(node):
        if _is_mutable_call(source):
            return _written_base(source, node.args[1])
        return source if is_view(source.target) else None
    return source if INPLACE in node.meta or is_view(node.target) else None


def _try(node: Node, storages: dict[Node, _Storage], order: dict[Node, int]) -> None:
    storage = storages.get(node.args[0])  # type: ignore[arg-type]
    backs = list(_write_backs(node))
    allowed = {node, *backs}
    if storage is None or not _dead_after(storage, order[node], allowed, order):
        return
    for write in allowed:
        write.meta[INPLACE] = storage.owner
    for write in backs:
        write.meta[WRITE_BACK] = True


def _dead_after(storage: _Storage, at: int, allowed: set[Node], order: dict[Node, int]) -> bool:
    """Whether nothing but `allowed` reads the storage from position `at` on, and its owner lets it be overwritten."""
    owner = storage.owner
    if owner.op == "get_attr" or (owner.op == "placeholder" and not _copied_back(owner, at, order)):
        return False
    storage.members = [m for m in storage.members if m is owner or any(order[u] >= at for u in m.users)]
    return not any(
        order[user] > at and user not in allowed and not _is_copy_to(user, owner) and not _asks_size(user, member)
        for member in storage.members
        for user in member.users
    )


# ---- mutable custom operators ---------------------------------------------------------------------------------------


_TRITON_KERNEL = "triton_kernel_wrapper_functional"


def _is_mutable_call(node: Any) -> bool:
    if DONATED in getattr(node, "meta", ()):
        return True
    return getattr(node, "op", "") == "call_function" and _target(node) in ("auto_functionalized_v2", _TRITON_KERNEL)


def _target(node: Node) -> str:
    return getattr(node.target, "__name__", "")


def _bases(node: Node) -> list[Node]:
    """The tensors that the operator, or a user's Triton kernel, writes to."""
    if DONATED in node.meta:
        return [_operands(node)[position] for position in node.meta[DONATED].values()]
    if _target(node) != _TRITON_KERNEL:
        return list(node.kwargs["_all_bases"])  # type: ignore[arg-type]
    given: Any = node.kwargs
    return list(dict.fromkeys(given["kwargs"][name] for name in given["tensors_to_clone"]))


def _operands(node: Node) -> Any:
    """What a higher-order operator may write into."""
    return node.args[{"cond": 3, "scan": 1}.get(_target(node), 2)]


def _try_bases(node: Node, storages: dict[Node, _Storage], order: dict[Node, int]) -> None:
    bases = _bases(node)
    owners = [storages[base].owner for base in bases]
    if DONATED in node.meta:  # its other operands are read while it writes
        owners = [storages[base].owner for base in node.all_input_nodes if base in storages]
    node.meta[INPLACE_BASES] = {
        base: owner
        for base, owner in ((base, storages[base].owner) for base in bases)
        if owners.count(owner) == 1 and _dead_after(storages[base], order[node], {node}, order)
    }


def _written_base(call: Node, position: Any) -> Node | None:
    """The base that a result of the call is the new version of: they stand after the operator's own results, or have the
    names of a Triton kernel's arguments."""
    base: Any = None
    if DONATED in call.meta:
        found = call.meta[DONATED].get(position)
        base = None if found is None else _operands(call)[found]
    elif _target(call) == _TRITON_KERNEL:
        base = call.kwargs["kwargs"][position]  # type: ignore[index]
    else:
        first = max(len(call.args[0]._schema.returns), 1)  # type: ignore[union-attr]
        base = _bases(call)[position - first] if position >= first else None
    return base if base in call.meta.get(INPLACE_BASES, {}) else None


# ---- regions --------------------------------------------------------------------------------------------------------


def _write_backs(node: Node) -> Iterator[Node]:
    """The scatters that put the changed view back into the tensor it is a view of, innermost first."""
    result, view = node, node.args[0]
    while isinstance(view, Node) and view.op == "call_function" and view.args:
        parent = view.args[0]
        back = next((u for u in result.users if _puts_back(u, result, view)), None)
        if back is None or not isinstance(parent, Node):
            return
        yield back
        result, view = back, parent


def _puts_back(user: Node, result: Node, view: Node) -> bool:
    if INVERSE.get(_name(user)) != _name(view) or len(user.args) < 2 or user.args[1] is not result:
        return False
    return user.args[0] is view.args[0] and _parameters(user, 2) == _parameters(view, 1)


def _parameters(node: Node, first: int) -> dict[str, Any]:
    """Arguments from position `first` on, by name and with defaults."""
    arguments = node.target._schema.arguments[first:]  # type: ignore[union-attr]
    values = {a.name: a.default_value if a.has_default_value() else None for a in arguments}
    values.update(zip((a.name for a in arguments), node.args[first:], strict=False))
    values.update(node.kwargs)
    if values.get("end") is not None and isinstance(values["end"], int) and values["end"] >= 1 << 62:
        values["end"] = None
    if "start" in values and values["start"] is None:
        values["start"] = 0
    return values


def _copied_back(owner: Node, position: int, order: dict[Node, int]) -> bool:
    """Whether the graph overwrites this input later on, so that its old contents are lost anyway."""
    return any(_is_copy_to(user, owner) and order[user] > position for user in owner.users)


def _is_copy_to(user: Node, owner: Node) -> bool:
    return _name(user) == "aten::copy_" and user.args[0] is owner and user.args[1] is not owner


def _asks_size(user: Node, member: Node) -> bool:
    """Whether a call needs no elements of its argument."""
    if _name(user) == "aten::copy" and user.args[0] is member and user.args[1] is not member:
        return True  # all of them are replaced
    return _name(user) in ("aten::sym_size", "aten::sym_stride", "aten::sym_storage_offset", "aten::sym_numel")


def _is_getitem(node: Node) -> bool:
    return node.op == "call_function" and _target(node) == "getitem"


def _name(node: Any) -> str:
    schema = getattr(getattr(node, "target", None), "_schema", None)
    return schema.name if schema is not None else ""
