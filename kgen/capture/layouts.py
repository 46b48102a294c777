"""Memory layouts for a whole graph: channels last or contiguous (channels first), for each tensor by a minimum cut.

Convolutions prefer a layout. What stands between them (elementwise operators, norms, poolings, joins, upsamplings) computes as
well in either one and hands on the one it gets. Inputs have theirs, results of the graph keep eager's, and an operator of which
nothing is known here gets its operands as they were traced. Where two of these disagree stands a copy.

Each tensor is a node of a flow network: on the source's side if its channels are last. A preference is an edge to a terminal,
with the cost of the other layout. A copy is a node between a tensor and all who read it in the other layout, so it costs once
however many they are. The least cut has the least cost. Its edges are linear in those of the graph.

The rewritten graph says what it means: copies are calls of `aten.clone`, and each node's `meta["val"]` has the strides chosen.
A library call's operands and results follow from these (`kgen/lowering/layout.py`); for kernels they are a preference.

torch has convolutions along one dimension put their channels first, by a copy. So where they are to be last on a GPU, it is
called with images of one row.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from kgen.capture.as_strided import replace_as_strided
from kgen.capture.freeze import constants
from kgen.capture.min_cut import INFINITE, SINK, SOURCE, min_cut
from kgen.capture.notes import NOTES, note
from kgen.capture.operators import operator_name, owner_of
from kgen.capture.torch_adapter import fake_result
from kgen.verdict import Outcome, Reason, Verdict

__all__ = ["choose_layouts"]

aten = torch.ops.aten

# Where convolutions have their images, their weight and the number of groups among the arguments.
_IMAGES: dict[Any, tuple[int, ...]] = {aten.convolution.default: (0,), aten.convolution_backward.default: (0, 1)}
_WEIGHT: dict[Any, int] = {aten.convolution.default: 1, aten.convolution_backward.default: 2}
_GROUPS: dict[Any, int] = {aten.convolution.default: 8, aten.convolution_backward.default: 9}
# Where forward convolutions have steps and dilation, and whether they are transposed.
_SPACING, _TRANSPOSED = (3, 5), 6
# Operators that compute as well in either layout, besides those that torch tags as pointwise.
_EITHER = frozenset(
    f"aten::{name}"
    for name in (
        "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "_to_copy", "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d", "adaptive_max_pool2d", "amax", "amin", "avg_pool2d", "avg_pool2d_backward", "avg_pool3d",
        "avg_pool3d_backward", "cat", "clone", "constant_pad_nd", "full_like", "index", "max_pool2d_with_indices",
        "max_pool2d_with_indices_backward", "max_pool3d_with_indices", "max_pool3d_with_indices_backward", "mean",
        "native_group_norm", "native_group_norm_backward", "ones_like", "sum", "upsample_nearest2d", "upsample_nearest3d",
        "var", "var_mean", "zeros_like",
    )
)  # fmt: skip
# Views with as many dimensions, for which any strides will do: their results lie as their sources do.
_VIEWS = frozenset(
    f"aten::{name}" for name in ("alias", "detach", "permute", "slice", "split", "split_with_sizes", "transpose")
)
# These see memory and no tensor.
_MEMORY = ("aten::as_strided", "aten::set_", "aten::resize", "aten::_reshape_alias")
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
# Dimensions of images with positions along one of them.
_LINES = 3
# Where they have their row when they have one.
_ROW = 2
# Where convolutions have numbers for each dimension among the arguments, and what an image's only row has there.
_PER_DIMENSION: dict[Any, Mapping[int, int]] = {
    aten.convolution.default: {3: 1, 4: 0, 5: 1, 7: 0},
    aten.convolution_backward.default: {4: 1, 5: 0, 6: 1, 8: 0},
}


class Costs(Protocol):
    """Costs in bytes moved (`kgen/cost/layouts.py`)."""

    def copy(self, value: torch.Tensor) -> int: ...

    def wants_channels_last(self, image: torch.Tensor) -> bool: ...

    def channels_first(
        self, images: Sequence[torch.Tensor], weight: torch.Tensor, groups: int, transposed: bool, gaps: bool
    ) -> int: ...


def choose_layouts(gm: GraphModule, costs: Costs, frozen: frozenset[str] = frozenset()) -> GraphModule:
    """The graph with layouts chosen: a copy, or itself where nothing changes. `frozen` are the names of inputs of which copies
    are made once."""
    convolutions = [node for node in gm.graph.nodes if node.target in _IMAGES]
    if not convolutions:
        return gm
    if not all(map(_is_known, gm.graph.nodes)):
        return _noted(gm, {n.name: _verdict(n, Outcome.LAYOUT_KEPT, Reason.SYMBOLIC) for n in convolutions})
    given, gm = gm, replace_as_strided(gm)
    if any(_name(node).startswith(_MEMORY) for node in gm.graph.nodes):
        return given
    convolutions = [node for node in gm.graph.nodes if node.target in _IMAGES]
    network = _Network(gm, costs, constants(gm, frozen))
    last = network.channels_last()
    decided = {n.name: one for n in convolutions if (one := network.verdict(n, last)) is not None}
    if all((tensor in last) == network.is_last[tensor] for tensor in network.tensors):
        return _noted(given, decided)
    return _noted(_Rewriting(network, last).run(), decided)


def _noted(gm: GraphModule, verdicts: Mapping[str, Verdict]) -> GraphModule:
    for node in gm.graph.nodes:
        if node.name in verdicts:
            note(node, verdicts[node.name])
    return gm


def _verdict(node: Node, outcome: Outcome, reason: Reason, reader: str = "") -> Verdict:
    return Verdict(node.name, reader, outcome, reason, detail=_described(node))


def _described(node: Node) -> str:
    return operator_name(node.target) if node.op == "call_function" else node.op


# ---- the network --------------------------------------------------------------------------------------------------------

# The dimensions of a tensor that are an image's: number, channels, and the others in order.
Roles = tuple[int, ...]


class _Network:
    """`tensors` are the nodes of the graph that have a choice, or whose layout matters to one; views and parts of a result have
    the choice of the node that made it (`made_by`)."""

    def __init__(self, gm: GraphModule, costs: Costs, constants: frozenset[Node]) -> None:
        self.gm, self.costs, self.constants = gm, costs, constants
        self.roles = _roles(gm, costs)
        self.made_by: dict[Node, Node] = {}
        self.is_last: dict[Node, bool] = {}  # as traced
        self._find_tensors()
        self.tensors = [node for node in self.made_by if self.made_by[node] is node]
        self.pinned = set(self._pinned())

    def _find_tensors(self) -> None:
        for node in (one for one in self.gm.graph.nodes if one in self.roles):
            if _is_part(node) and node.args[0] in self.made_by:
                self.made_by[node] = self.made_by[node.args[0]]
                self.is_last[node] = self.is_last[node.args[0]]
            elif (last := self._traced(node)) is not None:
                self.made_by[node], self.is_last[node] = node, last

    def _traced(self, node: Node) -> bool | None:
        """Whether a node's channels are last as traced; None where its layout is neither or both, or nobody stores it. Of
        several results, those that have both say nothing: gradients of filters with one tap, or for one channel."""
        if node.op == "call_function" and not node.all_input_nodes:
            return None
        roles = self.roles[node]
        found = {_layout(value, roles) for value in _images(node, roles) if not _has_both(value, roles)}
        return found.pop() if len(found) == 1 else None

    def _pinned(self) -> Iterator[Node]:
        """Tensors that stay as traced: inputs, what operators without a choice make, what is written, and what several results
        of the graph are views of, or one with strides that no copy has."""
        results = self.gm.graph.output_node().all_input_nodes
        count = Counter(map(owner_of, results))
        shared = {owner for owner, times in count.items() if times > 1}
        yield from (self.made_by[one] for one in results if one in self.made_by and not _is_whole(one.meta["val"]))
        for node in self.gm.graph.nodes:
            if node in self.made_by and (not self.has_choice(node) or owner_of(node) in shared):
                yield self.made_by[node]
            if _may_write(node):
                yield from (self.made_by[one] for one in node.all_input_nodes if one in self.made_by)

    def has_choice(self, node: Node) -> bool:
        """Whether an operator computes in either layout. Of images that have none, or both, the library decides by strides that
        do not matter."""
        if _is_part(node):
            return node.args[0] in self.made_by
        if node.target in _IMAGES:
            return node in self.made_by and all(node.args[k] in self.made_by for k in _IMAGES[node.target])
        return _computes_either(node) or (_is_copy(node) and self._may_reorder(node))

    def _may_reorder(self, node: Node) -> bool:
        """Whether a copy that the program asks for in one layout could be asked for in the other one as well: who needs that of
        the program demands it."""
        return len(self.roles[node]) in _FORMATS and self.roles[node] == tuple(range(len(self.roles[node])))

    def channels_last(self) -> frozenset[Node]:
        """The tensors that a least cut has with channels last."""
        number = {tensor: k for k, tensor in enumerate(self.tensors, 2)}
        edges = list(self._edges(number))
        count = 1 + max((end for edge in edges for end in edge[:2]), default=SINK)
        side = min_cut(count, edges)
        return frozenset(tensor for tensor in self.tensors if number[tensor] in side)

    def _edges(self, number: dict[Node, int]) -> Iterator[tuple[int, int, int]]:
        for tensor in self.tensors:
            own, kept = number[tensor], INFINITE if tensor in self.pinned else 1  # of equals, the one as traced
            yield (SOURCE, own, kept) if self.is_last[tensor] else (own, SINK, kept)
            if tensor.target in _IMAGES and tensor not in self.pinned:
                yield SOURCE, own, self._channels_first(tensor)
        following = len(number) + 2
        readers = self._readers(number)
        for tensor, ends in readers.items():
            first, last, cost = following, following + 1, self._copy(tensor)
            yield number[tensor], first, cost
            yield last, number[tensor], cost
            for end in ends:
                yield first, end, INFINITE
                yield end, last, INFINITE
            following += 2

    def _readers(self, number: dict[Node, int]) -> dict[Node, dict[int, None]]:
        """The ends of edges to what reads a tensor: other tensors, or the terminal that stands for the layout it demands."""
        found: dict[Node, dict[int, None]] = {}
        for node in self.gm.graph.nodes:
            for source in node.all_input_nodes:
                if source in self.made_by and not _is_part(node):
                    reader = self.reader(node, source)
                    if reader is not None:
                        end = number[reader] if isinstance(reader, Node) else SOURCE if reader else SINK
                        found.setdefault(self.made_by[source], {})[end] = None
        return found

    def reader(self, node: Node, source: Node) -> Node | bool | None:
        """The tensor whose layout a node wants the source to have; whether it wants channels last; None if it does not mind."""
        if _is_part(source) and all(_has_both(value, self.roles[source]) for value in _images(source, self.roles[source])):
            return None
        if node in self.made_by and self.has_choice(node):
            return self.made_by[node]
        reads_any = _is_copy(node) or (_computes_either(node) and self._is_small(node))
        return None if reads_any else self.is_last[source]

    def _is_small(self, node: Node) -> bool:
        """Whether results have any layout: rows, or one number for each channel or for each point."""
        roles = self.roles.get(node, ())
        return all(one.dim() < 2 or (one.dim() == len(roles) and _has_one_axis(one, roles)) for one in _values(node))

    def _copy(self, tensor: Node) -> int:
        return 1 if tensor in self.constants else sum(map(self.costs.copy, _images(tensor, self.roles[tensor])))

    def _channels_first(self, node: Node) -> int:
        images = [node.args[k].meta["val"] for k in _IMAGES[node.target]]  # type: ignore[union-attr]
        made = node.meta["val"]
        images += [made] if isinstance(made, torch.Tensor) else [one for one in made[:1] if one is not None]
        weight, groups = node.args[_WEIGHT[node.target]].meta["val"], node.args[_GROUPS[node.target]]  # type: ignore[union-attr]
        transposed = node.target is aten.convolution.default and bool(node.args[_TRANSPOSED])
        gaps = transposed and all(max(node.args[k]) > 1 for k in _SPACING)  # type: ignore[arg-type]
        return self.costs.channels_first(images, weight, groups, transposed, gaps)  # type: ignore[arg-type]

    def verdict(self, node: Node, last: frozenset[Node]) -> Verdict | None:
        """What is decided of a convolution that changes, or might have."""
        if node not in self.made_by or self.is_last[node] or self._channels_first(node) == 0:
            return None
        if node in last:
            return _verdict(node, Outcome.CHANNELS_LAST, Reason.LIBRARY_PREFERS)
        return _verdict(node, Outcome.LAYOUT_KEPT, Reason.COPIES_DEAR)


def _roles(gm: GraphModule, costs: Costs) -> dict[Node, Roles]:
    """The roles of dimensions, from convolutions on through operators that keep them, both ways. torch keeps convolutions along
    one dimension from channels that happen to be last, so they are only where the library may want that."""
    found: dict[Node, Roles] = {}
    pending: list[tuple[Node, Roles]] = []
    for node in gm.graph.nodes:
        if node.target in _IMAGES:
            weight = node.args[_WEIGHT[node.target]]
            rank = _rank(weight)
            has_rows = rank == _LINES and _may_have_rows(weight) and costs.wants_channels_last(weight.meta["val"])
            has_layouts = rank in _FORMATS or has_rows
            pending += [(one, tuple(range(rank))) for one in (node, *_tensors_of(node)) if has_layouts]
    while pending:
        node, roles = pending.pop()
        if node not in found and _rank(node) == len(roles):
            found[node] = roles
            pending += _adjacent(node, roles)
    return found


def _may_have_rows(weight: Node) -> bool:
    """Whether convolutions along one dimension may be called with images of one row: nobody has measured them on a CPU."""
    return bool(weight.meta["val"].is_cuda)


def _tensors_of(node: Node) -> Iterator[Node]:
    yield from (node.args[k] for k in (*_IMAGES[node.target], _WEIGHT[node.target]))  # type: ignore[misc]


def _adjacent(node: Node, roles: Roles) -> Iterator[tuple[Node, Roles]]:
    if _passes_on(node):
        order = _permuted(node)
        inner = roles if order is None else tuple(order[k] for k in roles)
        yield from ((one, inner) for one in node.all_input_nodes)
    for user in node.users:
        if _passes_on(user):
            order = _permuted(user)
            yield user, roles if order is None else tuple(order.index(k) for k in roles)


def _permuted(node: Node) -> list[int] | None:
    """Which dimension of its source each of a permuting view's is."""
    if _name(node) == "aten::permute":
        return [k % _rank(node) for k in node.args[1]]  # type: ignore[union-attr, operator, misc]
    if _name(node) == "aten::transpose":
        order = list(range(_rank(node)))
        a, b = node.args[1:3]
        order[a], order[b] = order[b], order[a]  # type: ignore[index]
        return order
    return None


# ---- the rewritten graph --------------------------------------------------------------------------------------------------


class _Rewriting:
    """A copy of the graph with copies of tensors where layouts disagree."""

    def __init__(self, network: _Network, last: frozenset[Node]) -> None:
        self.network, self.last = network, last
        self.graph = Graph()
        self.made: dict[Node, Node] = {}
        self.copies: dict[tuple[Node, bool], Node] = {}

    def run(self) -> GraphModule:
        for node in self.network.gm.graph.nodes:
            operands = {one: self._operand(node, one) for one in node.all_input_nodes}
            if self._is_lifted(node):
                self.made[node] = self._lifted(node, operands)
                continue
            made = self.made[node] = self.graph.node_copy(node, operands.__getitem__)
            if _is_copy(node) and node in self.network.made_by and self._is_last(node) != self.network.is_last[node]:
                made.kwargs = {**made.kwargs, "memory_format": self._format(node, self._is_last(node))}
                made.meta["val"] = fake_result(made)
                continue
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                continue  # bodies, which have no value, are of operands in the layouts that they were traced with
            changed = any(operands[one].meta["val"] is not one.meta["val"] for one in operands)
            if changed and node in self.network.made_by:
                self._settle(node)
        return GraphModule(self.network.gm, self.graph)

    def _is_lifted(self, node: Node) -> bool:
        """Whether a convolution along one dimension is called with images of one row, whose channels are last."""
        return node.target in _IMAGES and node in self.last and len(self.network.roles[node]) == _LINES

    def _lifted(self, node: Node, operands: Mapping[Node, Node]) -> Node:
        args: list[Any] = list(node.args)
        for k in (*_IMAGES[node.target], _WEIGHT[node.target]):
            args[k] = self._call(node, aten.unsqueeze.default, operands[args[k]], _ROW)
        for k, neutral in _PER_DIMENSION[node.target].items():
            args[k] = [neutral, *args[k]]
        args = [operands.get(one, one) if isinstance(one, Node) else one for one in args]
        made = self._call(node, node.target, *args)
        if NOTES in node.meta:
            made.meta[NOTES] = node.meta[NOTES]
        return made if node.target is aten.convolution_backward.default else self._lowered(made, node)

    def _lowered(self, made: Node, of: Node) -> Node:
        """Without its row. A view gives dimensions of length 1 eager's strides, where both layouts are the same."""
        return self._call(of, aten.view.default, made, [n for k, n in enumerate(made.meta["val"].shape) if k != _ROW])

    def _operand(self, node: Node, source: Node) -> Node:
        """What stands for the source as an argument of a node."""
        if source not in self.network.made_by or _is_part(node) or _is_copy(node):
            return self.made[source]
        reader = self.network.reader(node, source)
        wanted = reader in self.last if isinstance(reader, Node) else reader
        if wanted is None or self._has_layout(source, wanted):
            return self.made[source]
        if (source, wanted) not in self.copies:
            self.copies[source, wanted] = self._copy(source, wanted, node.name)
        return self.copies[source, wanted]

    def _settle(self, node: Node) -> None:
        """Has a node whose operands have changed say what it makes of them. Where that is not in the layout chosen (it is that
        of an operand, say, with neither layout) stands a copy, which for kernels is none."""
        made = self.made[node]
        if node.target is operator.getitem:
            made.meta["val"] = made.args[0].meta["val"][node.args[1]]  # type: ignore[union-attr]
            if self._is_lifted(node.args[0]):  # type: ignore[arg-type]
                self.made[node] = self._lowered(made, node)
            return
        made.meta["val"] = self._with_lone_strides(fake_result(made), node)
        tensor, roles = made.meta["val"], self.network.roles[node]
        if (
            isinstance(tensor, torch.Tensor)
            and not _is_part(node)
            and _layout(tensor, roles) not in (None, self._is_last(node))
        ):
            self.made[node] = self._clone(made, node, self._is_last(node))

    def _with_lone_strides(self, results: Any, node: Node) -> Any:
        """Of several results, those in both layouts keep the strides that dimensions of length 1 have in eager."""
        if not isinstance(results, tuple | list):
            return results
        roles, before = self.network.roles[node], node.meta["val"]
        pairs = zip(results, before, strict=True)
        return tuple(
            old if isinstance(new, torch.Tensor) and new.dim() == len(roles) and _has_both(new, roles) else new
            for new, old in pairs
        )

    def _has_layout(self, source: Node, last: bool) -> bool:
        value = self.made[source].meta["val"]
        if not isinstance(value, torch.Tensor):
            return self._is_last(source) == last
        if value is source.meta["val"]:
            return self.network.is_last[source] == last
        return _is_ordered(value, _order(self.network.roles[source], last))

    def _is_last(self, node: Node) -> bool:
        return self.network.made_by[node] in self.last

    def _copy(self, source: Node, last: bool, reader: str) -> Node:
        made = self._clone(self.made[source], source, last)
        reason = Reason.EAGER_STRIDES if last == self.network.is_last[source] else Reason.LIBRARY_PREFERS
        note(made, _verdict(source, Outcome.COPIED, reason, reader))
        return made

    def _clone(self, source: Node, of: Node, last: bool) -> Node:
        """A copy of a node of the new graph, which stands for `of`, with its dimensions in the order of images meanwhile."""
        roles = self.network.roles[of]
        if len(roles) not in _FORMATS:
            return self._ordered(source, of, _order(roles, last))
        form = self._format(of, last)
        plain = roles == tuple(range(len(roles)))
        made = source if plain else self._call(of, aten.permute.default, source, list(roles))
        made = self._call(of, aten.clone.default, made, memory_format=form)
        return made if plain else self._call(of, aten.permute.default, made, [roles.index(k) for k in range(len(roles))])

    def _ordered(self, source: Node, of: Node, order: Roles) -> Node:
        """A copy with its dimensions in an order that has no name."""
        made = self._call(of, aten.permute.default, source, list(order))
        made = self._call(of, aten.clone.default, made, memory_format=torch.contiguous_format)
        return self._call(of, aten.permute.default, made, [order.index(k) for k in range(len(order))])

    def _format(self, of: Node, last: bool) -> torch.memory_format:
        return _FORMATS[len(self.network.roles[of])] if last else torch.contiguous_format

    def _call(self, of: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        made = self.graph.call_function(target, args, kwargs)
        made.meta = {name: value for name, value in of.meta.items() if name != NOTES}
        made.meta["val"] = fake_result(made)
        return made


# ---- nodes ----------------------------------------------------------------------------------------------------------------


def _name(node: Node) -> str:
    return str(getattr(getattr(node.target, "_schema", None), "name", ""))


def _is_part(node: Node) -> bool:
    """Whether the node is a view of its first argument, or one of its results."""
    return node.target is operator.getitem or _name(node) in _VIEWS


def _is_copy(node: Node) -> bool:
    """Whether the node is a copy in a layout that the program asks for."""
    return _name(node) in ("aten::clone", "aten::_to_copy") and "memory_format" in node.kwargs


def _computes_either(node: Node) -> bool:
    """Whether loops compute the node in any layout."""
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable or "memory_format" in node.kwargs:
        return False
    return _name(node) in _EITHER or torch.Tag.pointwise in node.target.tags


def _may_write(node: Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return not isinstance(node.target, OpOverload) or node.target._schema.is_mutable


def _values(node: Node) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return [one for one in leaves if isinstance(one, torch.Tensor) and one.layout == torch.strided]


def _rank(node: Node) -> int:
    """Of a node's tensor, or of the first one of its results that is there."""
    return next((one.dim() for one in _values(node)), -1)


def _has_one_axis(value: torch.Tensor, roles: Roles) -> bool:
    """Whether an image has one channel, or one point."""
    channels, *points = (value.shape[k] for k in roles[1:])
    return channels == 1 or math.prod(points) == 1


def _passes_on(node: Node) -> bool:
    """Whether dimensions of the result are those of the operands."""
    return _is_part(node) or _is_copy(node) or _computes_either(node)


def _is_known(node: Node) -> bool:
    """Whether all sizes and strides are numbers."""
    return all(isinstance(n, int) for one in _values(node) for n in (*one.shape, *one.stride()))


def _images(node: Node, roles: Roles) -> list[torch.Tensor]:
    return [one for one in _values(node) if one.dim() == len(roles)]


def _order(roles: Roles, last: bool) -> Roles:
    """Dimensions from the outermost to the innermost one."""
    return (roles[0], *roles[2:], roles[1]) if last else roles


def _layout(value: torch.Tensor, roles: Roles) -> bool | None:
    """Whether a tensor has its channels last; None where it has neither layout, or both."""
    first, last = (_is_ordered(value, _order(roles, one)) for one in (False, True))
    return None if first == last else last


def _has_both(value: torch.Tensor, roles: Roles) -> bool:
    """Whether a tensor is the same memory in both layouts."""
    return all(_is_ordered(value, _order(roles, one)) for one in (False, True))


def _is_whole(value: Any) -> bool:
    """Whether a tensor is all of its memory."""
    if not isinstance(value, torch.Tensor):
        return True
    return value.storage_offset() == 0 and value.untyped_storage().nbytes() == value.numel() * value.element_size()


def _is_ordered(value: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether strides grow from the last dimension of an order to its first, with no element in two places."""
    span = 1
    for dim in reversed(order):
        if value.shape[dim] != 1:
            if value.stride(dim) < span:
                return False
            span = value.stride(dim) * value.shape[dim]
    return True
