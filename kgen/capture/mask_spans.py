"""Masks of scores that only data decide, such as those of documents in one sequence, with the span of columns that they keep
for each block of rows.

    where(keep, s, -inf)   ->   where(within(keep, n >= first[m // 64] and n < last[m // 64]), s, -inf)
    where first[i] is the least, and last[i] behind the greatest, n that some row of block i keeps

What is compared follows from `keep`, so that no value changes. A template that makes scores tile by tile leaves out what is
before the first and behind the last column of its rows: it reads these numbers as it reads the lengths of sequences. They are
made anew for each call by kernels of their own, which evaluate the mask for all rows and columns of one head of those that
share it. In backward, where tiles of columns go along rows, there are such spans of rows for blocks of columns, too.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from kgen.capture import torch_adapter
from kgen.capture.operators import is_pure
from kgen.capture.recompute_scores import CONSTANTS, SAME, Calls, behind_elementwise, grows, narrowest, number_of
from kgen.ir.program import MatrixSizes

__all__ = ["BLOCK", "WITHIN", "bound_masks"]

aten, prims = torch.ops.aten, torch.ops.prims

_library = torch.library.Library("kgen", "FRAGMENT")
_library.define("within(Tensor condition, Tensor bounds) -> Tensor")
_library.impl("within", torch.logical_and, "CompositeExplicitAutograd")
WITHIN = torch.ops.kgen.within.default

# Rows, or columns, that share a span.
BLOCK = 64
# Rows and columns of scores from which on tiles may be left out in any number.
LEAST = 1024
# Multiplications of a head's scores for each evaluation of a mask, at least: an evaluation takes as long as some ten
# instructions on other units, and there have to be tiles to leave out.
LEAST_WORK = 1024


def bound_masks(gm: GraphModule, backward: bool, is_worth_it: Callable[[torch.device, MatrixSizes], bool]) -> GraphModule:
    """The graph, changed in place; `backward` says whether it is of a backward pass. `is_worth_it` is asked where there is a
    mask to which this applies."""
    worth: list[tuple[Node, int]] = []
    for node in gm.graph.nodes:
        if _is_masked(node) and (side := _kept_side(node, -math.inf)) is not None:
            sizes = _sizes_of(node, side)
            if sizes is not None and is_worth_it(node.meta["val"].device, sizes):
                worth.append((node, side))
    if not worth:
        return gm
    numbers = _numbered(gm)
    kinds = dict.fromkeys((numbers[_condition(node)], side) for node, side in worth)
    found = [(side, [node for node in numbers if _is_masked_by(node, number, side, numbers)]) for number, side in kinds]
    for side, masked in found:  # no choice is in two of them, and each rewrite gives its own another condition
        _Rewrite(gm, masked, side).run(backward)
    gm.graph.lint()
    gm.recompile()
    return gm


def _numbered(gm: GraphModule) -> dict[Node, int]:
    """A number for each node, the same for calls that compute the same: a mask may be written for each choice anew."""
    numbers: dict[Node, int] = {}
    known: dict[object, int] = {}
    for node in gm.graph.nodes:
        key: object = node
        if is_pure(node.target):
            args, kwargs = map_arg((node.args, node.kwargs), lambda one: ("node", numbers[one]))
            key = node.target, repr(args), repr(kwargs)
        numbers[node] = known.setdefault(key, len(known))
    return numbers


def _is_masked_by(node: Node, number: int, side: int, numbers: Mapping[Node, int]) -> bool:
    """Whether a call is a choice by that condition whose other branch is -inf, or 0 as in gradients."""
    if node.target is not aten.where.self or node.kwargs or numbers[_condition(node)] != number:
        return False
    kept = _kept_side(node, -math.inf)
    return side == (_kept_side(node, 0.0) if kept is None else kept)


def _is_masked(node: Node) -> bool:
    """Whether a call makes -inf of elements that a condition on data, of some matrix, does not keep."""
    if node.target is not aten.where.self or node.kwargs or not isinstance(node.args[0], Node):
        return False
    value, condition = node.meta["val"], _condition(node)
    shape = condition.meta["val"].shape
    if not value.dtype.is_floating_point or len(shape) < 1 or value.dim() < 2:
        return False
    if any(not isinstance(n, int) for n in (*value.shape, *shape)) or min(value.shape[-2:]) < LEAST:
        return False
    rows, columns = (1, *shape)[-2:]
    return columns == value.shape[-1] and rows in (1, value.shape[-2]) and _has_data(condition)


def _condition(choice: Node) -> Node:
    """The condition of a choice before it was spread over batches."""
    node = choice.args[0]
    assert isinstance(node, Node)
    while node.target is aten.expand.default and _is_spread(node):
        [node] = node.all_input_nodes
    return node


def _is_spread(node: Node) -> bool:
    """Whether an expansion leaves rows and columns as they are."""
    [source] = node.all_input_nodes
    shape, of = node.meta["val"].shape, source.meta["val"].shape
    return len(of) >= 2 and shape[-2:] == of[-2:]


def _kept_side(node: Node, number: float) -> int | None:
    """The branch of a choice whose other one is a number."""
    found = [_is_number(arg, number) for arg in node.args[1:]]
    return found.index(False) if any(found) and not all(found) else None


def _is_number(node: object, number: float) -> bool:
    if not isinstance(node, Node):
        return node == number
    while node.target in SAME and isinstance(node.args[0], Node):
        node = node.args[0]
    if node.op == "get_attr":
        made = operator.attrgetter(str(node.target))(node.graph.owning_module)
        return type(made) is torch.Tensor and made.numel() == 1 and bool(made.item() == number)
    return node.target in CONSTANTS and number_of(node) == number


def _has_data(condition: Node) -> bool:
    """Whether numbers from memory, one for each column, take part in a condition."""
    columns, seen, waiting = condition.meta["val"].shape[-1], set[Node](), [condition]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        value = node.meta.get("val")
        if node.op in ("placeholder", "get_attr") and isinstance(value, torch.Tensor) and columns in value.shape:
            return True
        waiting += node.all_input_nodes  # some have several results
    return False


def _sizes_of(node: Node, side: int) -> MatrixSizes | None:
    """Of the scores around a mask, where a contraction makes them and is worth more than the mask."""
    kept, condition = node.args[1 + side], _condition(node).meta["val"]
    made = list(_contractions(node, kept if isinstance(kept, Node) else None))
    if not made:
        return None
    rows, columns = node.meta["val"].shape[-2:]
    summed = {left.meta["val"].shape[-1] for left, _ in made}
    batches = max(left.meta["val"].numel() // (rows * left.meta["val"].shape[-1]) for left, _ in made)
    if 2 * batches * rows * columns // max(1, condition.numel()) * max(summed) < LEAST_WORK:
        return None
    return MatrixSizes(rows, columns, frozenset(summed), made[0][1])


def _contractions(masked: Node, kept: Node | None) -> Iterator[tuple[Node, torch.dtype]]:
    """Left operands of what makes the scores, and the types in which these are multiplied: of the choice itself, or, where that
    is a mask that is added, of the sum, or of a call that adds it."""
    matrix = math.prod(masked.meta["val"].shape[-2:])
    found = list(behind_elementwise([] if kept is None else [kept], matrix))
    for user in _passed_on(masked):
        if user.target is aten.add.Tensor:
            found += behind_elementwise([user], matrix)
        elif str(user.target).startswith("aten._scaled_dot_product"):
            yield user.args[0], user.args[0].meta["val"].dtype  # type: ignore[misc, union-attr]
    yield from ((one.args[-2], narrowest(one)) for one in found if grows(one))  # type: ignore[misc]


def _passed_on(node: Node) -> Iterator[Node]:
    """What reads a mask, also in another type, or spread over batches."""
    for user in node.users:
        if user.target in SAME or (user.target is aten.expand.default and _is_spread(user)):
            yield from _passed_on(user)
        else:
            yield user


class _Rewrite(Calls):
    """Says of the condition of several choices, each of which keeps the branch `side`, what it is within."""

    def __init__(self, gm: GraphModule, masked: Sequence[Node], side: int) -> None:
        super().__init__(gm.graph, masked[0])
        self.masked, self.side = masked, side

    def run(self, backward: bool) -> None:
        condition, mode = _condition(self.masked[0]), torch_adapter.fake_mode_of(self.masked[0])
        with self.graph.inserting_before(self.masked[0]), mode:
            kept = condition if self.side == 0 else self._call(aten.logical_not.default, condition)
            rows = (1, *condition.meta["val"].shape)[-2]
            bounds = self._span(kept, -1, rows)
            if backward and rows > 1:
                bounds = self._call(aten.logical_and.default, bounds, self._span(kept, -2, rows))
            kept = self._call(WITHIN, kept, bounds)
        for node in self.masked:
            with self.graph.inserting_before(node), mode:
                own = self._spread(kept, node.args[0])
            node.args = (own, *(node.args[1:] if self.side == 0 else node.args[:0:-1]))

    def _spread(self, kept: Node, like: object) -> Node:
        assert isinstance(like, Node)
        shape = like.meta["val"].shape
        return kept if kept.meta["val"].shape == shape else self._call(aten.expand.default, kept, [*shape])

    def _span(self, kept: Node, along: int, rows: int) -> Node:
        """Whether a place along an axis is not outside of the span that the block of the other axis' place keeps."""
        value = kept.meta["val"]
        length, others = value.shape[along], 1 if rows == 1 else value.shape[-3 - along]
        indices = self._call(
            prims.iota.default, length, start=0, step=1, dtype=torch.int32, device=value.device, requires_grad=False
        )
        if along == -2:
            indices = self._call(aten.unsqueeze.default, indices, 1)
        behind = self._call(aten.add.Tensor, indices, 1)
        first = self._call(aten.amin.default, self._chosen(kept, indices, length), [along])
        last = self._call(aten.amax.default, self._chosen(kept, behind, 0), [along])
        least = self._of_blocks(first, aten.amin.default, others, length, along)
        most = self._of_blocks(last, aten.amax.default, others, 0, along)
        return self._call(
            aten.logical_and.default,
            self._call(aten.ge.Tensor, indices, least),
            self._call(aten.lt.Tensor, indices, most),
        )

    def _chosen(self, kept: Node, indices: Node, otherwise: int) -> Node:
        number = self._call(aten.scalar_tensor.default, otherwise, dtype=torch.int32, device=kept.meta["val"].device)
        return self._call(aten.where.self, kept, indices, number)

    def _of_blocks(self, ends: Node, fold: object, length: int, neutral: int, along: int) -> Node:
        """What ends of rows are in each block, for each row of it."""
        if length > 1:
            batch = list(ends.meta["val"].shape[:-1])
            blocks = -(-length // BLOCK)
            if length % BLOCK:
                ends = self._call(aten.constant_pad_nd.default, ends, [0, blocks * BLOCK - length], neutral)
            ends = self._call(fold, self._call(aten.reshape.default, ends, [*batch, blocks, BLOCK]), [-1])
            ends = self._call(aten.expand.default, self._call(aten.unsqueeze.default, ends, -1), [*batch, blocks, BLOCK])
            ends = self._call(aten.reshape.default, ends, [*batch, blocks * BLOCK])
            if length % BLOCK:
                ends = self._call(aten.slice.Tensor, ends, -1, 0, length)
        return self._call(aten.unsqueeze.default, ends, along)
