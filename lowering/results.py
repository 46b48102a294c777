"""Graph results: each in the storage, at the offset and with the strides that it has in eager.

A result that is a view in eager is the same view of the tensor that owns its storage, so two results share elements where
eager's do, and a write to one of them shows in the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kgen.capture.operators import owner_of
from kgen.ir import index as ix
from kgen.ir.index import Expr
from kgen.ir.nodes import Buffer, Origin, Sizes, TensorArg, dense_strides
from kgen.lowering.builder import Builder, is_dense, is_storable, stride_order
from kgen.lowering.layout import covers, fix_strides, store_with
from kgen.lowering.mutation import newest, plain_load, root_of
from kgen.lowering.tensor import Tensor, axes, indices


def owners_of_results(gm: GraphModule) -> frozenset[Node]:
    """The computed nodes in whose storage results lie. A write must leave their contents alone although nothing after it
    reads them: a result may be a view that was made before."""
    (output,) = gm.graph.find_nodes(op="output")
    owners = (owner_of(node) for node in output.all_input_nodes)
    return frozenset(node for node in owners if node.op == "call_function")


@dataclass(slots=True)
class Results:
    """Places the results of one graph, in order. `in_inputs` are positions of results that a caller gets as views of an input,
    whatever storage tracing shows, `flexible` those of results that may have any dense layout."""

    builder: Builder
    in_inputs: frozenset[int]
    flexible: frozenset[int]
    origin_of: Callable[[Node], Origin]
    owners: dict[str, Node] = field(default_factory=dict)  # storages that are results already -> whose they are in eager
    placed: dict[Node, TensorArg] = field(default_factory=dict)  # a node returned twice is one tensor
    targets: dict[Node, Any] = field(default_factory=dict)  # owner -> what it is copied to; None where it is to nothing

    def place(self, result: Node, position: int) -> TensorArg:
        if position in self.in_inputs:
            return self._in_input(result) or self._once(result)
        if position in self.flexible and result not in self.placed and (found := self._with_any_strides(result)) is not None:
            self.placed[result] = found
        return self._once(result)

    def _once(self, result: Node) -> TensorArg:
        if result not in self.placed:
            self.placed[result] = self._placed(result)
        return self.placed[result]

    def _with_any_strides(self, result: Node) -> TensorArg | None:
        """The result in a buffer whose layout stays open. None where it is a view, or its elements are not dense in eager."""
        tensor = self.builder.env.get(result)
        if owner_of(result) is not result or result.op == "placeholder" or not isinstance(tensor, Tensor):
            return None
        value = result.meta["val"]
        if not _is_strided(value) or not is_dense(tensor.sizes, wanted := self._geometry(result)[1]):
            return None
        if plain_load(tensor) is None:
            self._begin(result, wanted)
            tensor = self.builder.env[result] = self._stored(tensor)
        view, buffers = self.builder.as_view(tensor), self.builder.graph.buffers
        if view is None or not covers(buffers[view.buffer], view) or not self._may_share(view, result):
            return None
        buffers[view.buffer] = replace(buffers[view.buffer], hint=stride_order(wanted, tensor.sizes))
        return view

    def _placed(self, result: Node) -> TensorArg:
        owner = owner_of(result)
        whole = self._storage(owner)
        if whole is None:
            return self._copied(result)
        return whole if owner is result else self._window(result, owner, whole) or self._copied(result)

    def _in_input(self, result: Node) -> TensorArg | None:
        """The result in the input that its owner is copied to at the end of the graph. None where there is no such input."""
        owner = owner_of(result)
        if owner not in self.targets:
            self.targets[owner] = next((user.args[0] for user in owner.users if _is_copy_of(user, owner)), None)
        target = self.targets[owner]
        if not isinstance(target, Node) or target.op != "placeholder" or not self._same_layout(target, owner):
            return None
        whole = self._storage(target)
        return None if whole is None else self._window(result, owner, whole)

    def _same_layout(self, one: Node, other: Node) -> bool:
        a, b = one.meta["val"], other.meta["val"]
        return a.dtype == b.dtype and self._geometry(one)[:2] == self._geometry(other)[:2]

    # ---- storages ---------------------------------------------------------------------------------------------------

    def _storage(self, owner: Node) -> TensorArg | None:
        """The tensor with eager's strides from the first element of its buffer on. None where that cannot be had."""
        tensor, value = self.builder.env.get(owner), owner.meta.get("val")
        if not isinstance(tensor, Tensor) or not _is_strided(value):
            return None
        wanted = self._geometry(owner)[1]
        existing = self._existing(owner, tensor, wanted)
        if existing is not None or owner.op == "placeholder":
            return existing
        if not is_storable(tensor.sizes, wanted, self.builder.symbols) or any(s == 0 for s in wanted):
            return None
        self._begin(owner, wanted)
        stored = self.builder.env[owner] = self.builder.copy(tensor)
        name = stored.value.attr[0]
        self.builder.freeze(name, wanted)
        self.owners[name] = owner
        return self.builder.as_view(stored)

    def _existing(self, owner: Node, tensor: Tensor, wanted: Sizes) -> TensorArg | None:
        """The buffer that the tensor is in already, when it covers that and has, or can get, eager's strides."""
        if owner.op == "placeholder":
            name = plain_load(tensor)
            if name is None:
                return None
            tensor = self.builder.load(self.builder.graph.buffers[newest(self.builder, name)])
        view = self._fitting(tensor, owner, wanted)
        if view is None:
            return None
        buffer = self.builder.freeze(view.buffer)
        covers = ix.product(buffer.sizes) is tensor.numel() and _start(view, buffer) is ix.as_expr(buffer.offset)
        return view if covers else None

    def _fitting(self, tensor: Tensor, owner: Node, wanted: Sizes | None) -> TensorArg | None:
        """The tensor where it is in memory, or the copy that a library call has of it: what is saved for a gradient need not be
        stored again. A view of an input is of that alone."""
        copies = self.builder.stored_copies(tensor) if owner.op != "placeholder" else ()
        views = (self.builder.as_view(one) for one in (tensor, *copies))
        return next((v for v in views if v is not None and self._fits(v, owner, wanted)), None)

    def _fits(self, view: TensorArg, owner: Node, wanted: Sizes | None) -> bool:
        return self._may_share(view, owner) and fix_strides(self.builder, view, wanted)

    def _stored(self, tensor: Tensor) -> Tensor:
        """The tensor in the copy that a library call has of it, or in a new buffer."""
        return next(self.builder.stored_copies(tensor), None) or self.builder.copy(tensor)

    def _may_share(self, view: TensorArg, owner: Node) -> bool:
        """Whether a result may be the storage of an input or of an earlier result: only where it is in eager too. Lowering
        makes no copy for `clone`, and the reinplace stage computes in an input's storage."""
        root = root_of(self.builder, view.buffer)
        kind = self.builder.graph.buffers[root].kind
        if kind != "intermediate":
            return kind == "input" and owner.op == "placeholder"
        return self.owners.setdefault(root, owner) is owner

    def _copied(self, result: Node) -> TensorArg:
        """The result in a buffer of its own, with eager's strides where they can be had."""
        wanted = self._geometry(result)[1] if _is_strided(result.meta["val"]) else None
        tensor = self.builder.env[result]
        view = self._fitting(tensor, owner_of(result), wanted)
        if view is not None:
            self.builder.freeze(view.buffer)
            return view
        self._begin(result, wanted)
        stored = self.builder.env[result] = store_with(tensor, wanted, self.builder.copy, self.builder)
        name = stored.value.attr[0]
        self.owners[name] = owner_of(result)
        self.builder.freeze(name)
        arg = self.builder.as_view(stored)
        assert arg is not None
        return arg

    def _begin(self, node: Node, strides: Sizes | None) -> None:
        """What is stored from now on is the node's."""
        self.builder.origin, self.builder.result_strides = self.origin_of(node), strides

    # ---- views ------------------------------------------------------------------------------------------------------

    def _geometry(self, node: Node) -> tuple[Sizes, Sizes, Expr]:
        """Sizes, strides and offset into the storage in eager."""
        value, symbols = node.meta["val"], self.builder.symbols
        return symbols.sizes(value.shape), symbols.sizes(value.stride()), symbols.expr(value.storage_offset())

    def _window(self, result: Node, owner: Node, whole: TensorArg) -> TensorArg | None:
        """The result as a view of its owner, which is `whole`. None where a flag says that elements are to be conjugated or
        negated: no geometry tells."""
        value, base = result.meta["val"], self.builder.graph.buffers[whole.buffer]
        if not _is_strided(value) or value.is_conj() or value.is_neg():
            return None
        sizes, strides, offset = self._geometry(result)
        start = _scaled(self._geometry(owner)[2], base.dtype, value.dtype)
        offset = _scaled(ix.as_expr(base.offset), base.dtype, value.dtype) + offset - start
        made = Buffer(base.name, value.dtype, base.device, sizes, strides, offset)
        return self._as_lowered(result, whole, made) or self._alias(base, made)

    def _as_lowered(self, result: Node, whole: TensorArg, wanted: Buffer) -> TensorArg | None:
        """The view as lowering has it, where that is the same: the scheduler knows more of it than of an alias."""
        tensor = self.builder.env[result]
        view = self.builder.as_view(tensor) if isinstance(tensor, Tensor) else None
        if view is None or view.buffer != whole.buffer or view.dtype != wanted.dtype or wanted.strides is None:
            return None
        buffer = self.builder.graph.buffers[view.buffer]
        linear = ix.linearize(view.index, dense_strides(buffer), buffer.offset)
        same = all(v.extent == 1 or ix.stride_of(linear, v) is s for v, s in zip(view.vars, wanted.strides, strict=True))
        return view if same and _start(view, buffer) is wanted.offset else None

    def _alias(self, base: Buffer, view: Buffer) -> TensorArg:
        name = self.builder.fresh(base.name)
        self.builder.graph.buffers[name] = Buffer(
            name, view.dtype, view.device, view.sizes, view.strides, view.offset, alias_of=base.name
        )
        return TensorArg(name, axes(view.sizes), indices(view.sizes), view.dtype)


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _is_copy_of(user: Node, source: Node) -> bool:
    schema = getattr(user.target, "_schema", None)
    return schema is not None and schema.name == "aten::copy_" and user.args[1] is source


def _start(view: TensorArg, buffer: Buffer) -> Expr:
    """Where the view's first element is in the storage."""
    first: dict[ix.Atom, Expr] = dict.fromkeys(view.vars, ix.ZERO)
    return ix.substitute(ix.linearize(view.index, dense_strides(buffer), buffer.offset), first)


def _scaled(offset: Expr, old: torch.dtype, new: torch.dtype) -> Expr:
    """An offset in elements of one type, in elements of another."""
    return offset if old == new else ix.floordiv(offset * old.itemsize, new.itemsize)
