"""Backward graphs make the gradient of logits in runs of columns, so that neither logits nor their gradient are in memory.

Logits are the result of a matmul x w that is larger than x and w, as those of a language model are. Where backward makes their
gradient G element by element, from the logits, from numbers of each row and of each column, and reads it in matmuls and sums
alone, forward saves the numbers of the rows, and backward does for each run of columns c:

    logits[:, c] = x w[:, c]          again
    G[:, c]                           element by element
    dx += G[:, c] w[:, c].t()         added up in float32 at least
    dw[:, c] = x.t() G[:, c]          done

So backward computes one matmul more than it would with logits from memory, and what it has in memory is one run. A column of dw
is one sum, as it is without runs; dx is a sum of as many sums as there are runs.

Logits that are made again need not have the bits that they had: a matmul of few columns may add up in another order. So
nothing may jump where these differ, as ``logits == logits.amax(-1)`` would in the gradient of a maximum.

`_Gradient` says what is asked for: whatever else reads or makes G leaves the graph as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from kgen.capture import torch_adapter
from kgen.capture.smooth import all_behind, is_smooth
from kgen.capture.tangents import of_tangents

__all__ = ["chunk_logits"]

aten = torch.ops.aten

SAME = {aten.alias.default, aten.clone.default, aten._to_copy.default, aten.detach.default}
VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
TRANSPOSED = {aten.permute.default, aten.t.default, aten.transpose.int}
# Columns of a run are a multiple of this, where there are as many.
UNIT = 128
# Columns of a run that keep a GPU busy, and the most runs.
COLUMNS, MOST_RUNS = 2048, 32


def chunk_logits(gm: GraphModule, is_worth_it: Callable[[int], bool]) -> GraphModule:
    """The joint graph, before it is split. `is_worth_it` is asked for the bytes of logits to which this applies."""
    backward = of_tangents(gm)
    candidates = [node for node in gm.graph.nodes if node not in backward and _is_matmul(node) and is_worth_it(_bytes(node))]
    done = [_in_runs(gm, node, backward) for node in candidates]
    if any(done):
        gm.graph.eliminate_dead_code()
        gm.graph.lint()
        gm.recompile()
    return gm


def _in_runs(gm: GraphModule, logits: Node, backward: set[Node]) -> bool:
    """Makes the gradient of some logits in runs, where that is possible."""
    found = _gradient_of(logits, backward)
    if found is not None:
        _Rewrite(gm.graph, found, backward).run()
    return found is not None


# ---- what is looked for ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Matmul:
    """A contraction of the gradient G of logits, or its sum over rows. `other` is what G is multiplied by."""

    node: Node
    gradient: Node
    kind: str  # "rows": G other, "columns": G.t() other, "turned": other G, "sum": of the rows of G
    other: Node | None = None


@dataclass(frozen=True, slots=True)
class _Gradient:
    """Logits, of so many rows and columns, and all that reads their gradient, in order."""

    logits: Node
    rows: int
    columns: int
    readers: tuple[_Matmul, ...]


def _gradient_of(logits: Node, backward: set[Node]) -> _Gradient | None:
    rows, columns = logits.meta["val"].shape
    large = _Elements(logits, rows, columns)
    reading = [
        node for node in sorted(all_behind([logits])) if node in backward and any(map(large.holds, node.all_input_nodes))
    ]
    readers: list[_Matmul] = []
    for node in reading:
        if large.holds(node):
            continue
        if large.is_row_number(node) and not large.touches_logits(node.all_input_nodes):
            continue  # made of what is no logit: it may stay as it is
        found = _reader(node, large)
        if found is None:
            return None
        readers += found
    outside = [one for reader in readers for one in (reader.gradient, reader.other) if one is not None]
    if not readers or not all(large.can_make(reader.gradient) for reader in readers):
        return None
    first = min(reader.node for reader in readers)
    known = all(large.holds(one) or _is_before(one, first) for one in outside)
    return _Gradient(logits, rows, columns, tuple(readers)) if known else None


def _reader(node: Node, large: _Elements) -> list[_Matmul] | None:
    """How a node reads G; None where in no way that runs of columns know. A transpose is read by matmuls."""
    if _is_transpose(node):
        found = [_reader_of_transpose(user, node) for user in node.users]
        return None if None in found else [one for one in found if one is not None]
    if _is_sum_of_rows(node):
        return [_Matmul(node, _args(node)[0], "sum")]
    if node.target is aten.mm.default:
        left, right = _args(node)
        if large.holds(left) and not large.holds(right) and not _is_transpose_of_large(right, large):
            return [_Matmul(node, left, "rows", right)]
        if large.holds(right) and not large.holds(left) and not _is_transpose_of_large(left, large):
            return [_Matmul(node, right, "turned", left)]
    return None


def _reader_of_transpose(user: Node, transpose: Node) -> _Matmul | None:
    if user.target is not aten.mm.default or _args(user)[0] is not transpose or _args(user)[1] is transpose:
        return None
    return _Matmul(user, _args(transpose)[0], "columns", _args(user)[1])


def _is_transpose_of_large(node: Node, large: _Elements) -> bool:
    return _is_transpose(node) and large.holds(_args(node)[0])


def _is_transpose(node: Node) -> bool:
    """Whether a node is the transpose of a matrix."""
    if node.target not in TRANSPOSED or node.meta["val"].dim() != 2:
        return False
    axes = _args(node)[1] if node.target is aten.permute.default else _args(node)[1:]
    return not axes or [axis % 2 for axis in axes] == [1, 0] or (node.target is aten.transpose.int and len(set(axes)) == 2)


def _is_sum_of_rows(node: Node) -> bool:
    """Whether a node is the sum of a matrix over its rows."""
    if node.target is not aten.sum.dim_IntList or node.kwargs:
        return False
    value, axes = _args(node)[0].meta["val"], _args(node)[1]
    return value.dim() == 2 and [axis % 2 for axis in axes or ()] == [0]


def _is_matmul(node: Node) -> bool:
    """Whether a node is a matmul that makes more than it reads, with a number for each column added at most."""
    if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs or not _is_static(node):
        return False
    *added, left, right = _args(node)
    bias = all(one.meta["val"].shape == node.meta["val"].shape[1:] for one in added)
    return bias and all(_elements(node) > _elements(one) for one in (left, right))


def _is_before(node: Node, place: Node) -> bool:
    """Whether a node is made before another one, or is a view of what is."""
    if node < place:
        return True
    return node.target in TRANSPOSED | VIEWS and _is_before(_args(node)[0], place)


def _is_static(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)


def _shape(node: Node) -> tuple[int, ...]:
    """Empty where sizes are known at run time only, and of what is no tensor."""
    return tuple(node.meta["val"].shape) if _is_static(node) else ()


def _args(node: Node) -> tuple[Any, ...]:
    return node.args


def _elements(node: Node) -> int:
    value = node.meta.get("val")
    return math.prod(value.shape) if isinstance(value, torch.Tensor) else 0


def _bytes(node: Node) -> int:
    return _elements(node) * int(node.meta["val"].dtype.itemsize)


@dataclass(slots=True)
class _Elements:
    """What of a graph has one element for each logit, and which of it can be made for a run of columns alone."""

    logits: Node
    rows: int
    columns: int
    known: dict[Node, bool] = field(default_factory=dict)
    behind: set[Node] = field(default_factory=set)

    def holds(self, node: Node) -> bool:
        """Whether a node has an element for each logit, in order."""
        if node is self.logits:
            return True
        shape = _shape(node)
        return len(shape) > 1 and shape[-1] == self.columns and math.prod(shape[:-1]) == self.rows and not _is_transpose(node)

    def is_row_number(self, node: Node) -> bool:
        """Whether a node has a number for each row, along a last axis of length 1."""
        shape = _shape(node)
        return len(shape) > 1 and shape[-1] == 1 and math.prod(shape) == self.rows

    def is_column_number(self, node: Node) -> bool:
        shape = _shape(node)
        return len(shape) > 0 and shape[-1] == self.columns == math.prod(shape)

    def is_number(self, node: Node) -> bool:
        return _is_static(node) and _elements(node) == 1

    def can_make(self, node: Node) -> bool:
        """Whether the elements of a run of columns can be made of no others."""
        if node not in self.known:
            self.known[node] = False  # of what depends on itself nothing is known
            self.known[node] = self._can_make(node)
        return self.known[node]

    def _can_make(self, node: Node) -> bool:
        if node is self.logits:
            return True
        if node.op != "call_function" or not self.holds(node):
            return False
        if node.target is aten.full_like.default:
            return isinstance(node.args[1], int | float)
        if node.target is aten.scatter.value:
            return self._can_scatter(node)
        if node.target in VIEWS:
            return self._can_read(_args(node)[0])
        pointwise = node.target in SAME or torch.Tag.pointwise in getattr(node.target, "tags", ())
        return pointwise and all(map(self._can_read, node.all_input_nodes)) and (is_smooth(node) or not self._mixes(node))

    def _mixes(self, node: Node) -> bool:
        """Whether elements are made of the logits and of what forward has made of these, such as maxima of rows. Two such
        numbers may be equal, and no longer be where only one is made again."""
        seen, waiting, read, kept = set[Node](), [node], False, False
        while waiting:
            one = waiting.pop()
            if one in seen:
                continue
            seen.add(one)
            if one is self.logits:
                read = True
            elif self.holds(one):
                waiting += one.all_input_nodes
            else:
                kept = kept or one in self._of_logits()
        return read and kept

    def _of_logits(self) -> set[Node]:
        self.behind = self.behind or all_behind([self.logits])
        return self.behind

    def _can_read(self, node: Node) -> bool:
        if self.holds(node):
            return self.can_make(node)
        return self.is_row_number(node) or self.is_column_number(node) or self.is_number(node)

    def _can_scatter(self, node: Node) -> bool:
        base, axis, index, number = _args(node)
        last = axis % base.meta["val"].dim() == base.meta["val"].dim() - 1
        return last and self.is_row_number(index) and self.can_make(base) and isinstance(number, int | float)

    def touches_logits(self, nodes: Iterable[Node]) -> bool:
        """Whether elements are made of the logits, and not of their sizes alone."""
        seen, waiting = set[Node](), list(nodes)
        while waiting:
            node = waiting.pop()
            if node is self.logits or self.is_row_number(node):
                if node is self.logits:
                    return True
                continue
            if node not in seen and self.holds(node) and node.target is not aten.full_like.default:
                waiting += node.all_input_nodes
            seen.add(node)
        return False


# ---- the rewrite -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    """Columns from `begin` up to `end`, and what was made for them."""

    begin: int
    end: int
    made: dict[Node, Node] = field(default_factory=dict)


class _Rewrite:
    """Makes the gradient of one matrix of logits in runs."""

    def __init__(self, graph: torch.fx.Graph, found: _Gradient, backward: set[Node]) -> None:
        self.graph, self.found, self.backward = graph, found, backward
        self.elements = _Elements(found.logits, found.rows, found.columns)
        self.early: dict[Node, Node] = {}

    def run(self) -> None:
        first = min(reader.node for reader in self.found.readers)
        parts: dict[Node, list[Node]] = {reader.node: [] for reader in self.found.readers}
        with self.graph.inserting_before(first):
            for run in self._runs():
                for reader in self.found.readers:
                    self._add(reader, run, parts[reader.node])
            for reader in self.found.readers:
                reader.node.replace_all_uses_with(self._whole(reader, parts[reader.node]))
        for node in [one for one in self.graph.nodes if one.target is aten.full_like.default]:
            self._forget_operand(node)

    def _forget_operand(self, node: Node) -> None:
        """Makes of ``full_like(x, 0)`` what does not need the elements of x: sums of rows may still read it."""
        if self.elements.holds(node) and self.elements.can_make(node):
            value = node.meta["val"]
            with self.graph.inserting_before(node):
                made = self._call(aten.full.default, list(value.shape), node.args[1], dtype=value.dtype, device=value.device)
            node.replace_all_uses_with(made)

    def _runs(self) -> Iterator[_Run]:
        count = min(MOST_RUNS, max(2, self._count()))
        length = -(-self.found.columns // count)
        length = -(-length // UNIT) * UNIT if length > UNIT else length
        for begin in range(0, self.found.columns, length):
            yield _Run(begin, min(begin + length, self.found.columns))

    def _count(self) -> int:
        """How many runs. Where sums are wider than what is multiplied, those of all runs are in memory until the last one is
        there, so that there is least where both take as much: runs, and sums of runs."""
        count = self.found.columns / COLUMNS
        if self.found.logits.meta["val"].dtype.itemsize < 4:
            depth = _args(self.found.logits)[-1].meta["val"].shape[0]
            count = min(count, math.sqrt(self.found.columns / max(1, depth)))
        return round(count)

    def _add(self, reader: _Matmul, run: _Run, parts: list[Node]) -> None:
        """Adds what a run makes for a reader to its parts: of the gradient of rows there is one, the sum so far."""
        gradient = self._of_run(reader.gradient, run)
        if reader.kind == "rows":
            assert reader.other is not None
            parts[:] = [self._added(parts, gradient, self._cut(self._before(reader.other), 0, run))]
        elif reader.kind == "sum":
            parts.append(self._call(aten.sum.dim_IntList, gradient, [0], *_args(reader.node)[2:3]))
        else:
            assert reader.other is not None
            other = self._before(reader.other)
            pair = (
                (self._call(aten.permute.default, gradient, [1, 0]), other) if reader.kind == "columns" else (other, gradient)
            )
            parts.append(self._call(aten.mm.default, *pair))

    def _whole(self, reader: _Matmul, parts: Sequence[Node]) -> Node:
        value = reader.node.meta["val"]
        if reader.kind == "rows":
            return parts[0] if value.dtype is parts[0].meta["val"].dtype else self._cast(parts[0], value.dtype)
        axis = 0 if reader.kind == "columns" else value.dim() - 1
        return self._call(aten.cat.default, list(parts), axis)

    def _added(self, parts: Sequence[Node], left: Node, right: Node) -> Node:
        """The sum so far, in float32 at least, with another matmul."""
        if left.meta["val"].dtype.itemsize >= 4:
            return self._call(aten.addmm.default, *parts, left, right) if parts else self._call(aten.mm.default, left, right)
        made = self._cast(self._call(aten.mm.default, left, right), torch.float32)
        return self._call(aten.add.Tensor, *parts, made) if parts else made

    def _cast(self, node: Node, dtype: torch.dtype) -> Node:
        return self._call(aten._to_copy.default, node, dtype=dtype)

    def _before(self, node: Node) -> Node:
        """The node, or a copy of views that are made too late."""
        first = min(reader.node for reader in self.found.readers)
        if node < first or node in self.early.values():
            return node
        if node not in self.early:
            source = self._before(_args(node)[0])
            self.early[node] = self._call(node.target, source, *_args(node)[1:])
        return self.early[node]

    # ---- elements of a run ----

    def _of_run(self, node: Node, run: _Run) -> Node:
        """The elements that a node has in a run of columns, as a matrix. Nothing recurses deeper than a gradient is long."""
        if node not in run.made:
            run.made[node] = self._made(node, run)
        return run.made[node]

    def _made(self, node: Node, run: _Run) -> Node:
        args = _args(node)
        if node is self.found.logits:
            *bias, left, right = args
            return self._call(node.target, *(self._cut(b, 0, run) for b in bias), left, self._cut(right, 1, run))
        if node.target is aten.full_like.default:
            return self._full(args[1], node, run)
        if node.target is aten.scatter.value:
            return self._scattered(node, run)
        if node.target in VIEWS:
            return self._read(args[0], run)
        return self._call(node.target, *self._each(args, run), **self._kept(node.kwargs))

    def _kept(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in kwargs.items() if name != "memory_format"}

    def _each(self, args: Sequence[Any], run: _Run) -> tuple[Any, ...]:
        return tuple(self._read(one, run) if isinstance(one, Node) else one for one in args)

    def _read(self, node: Node, run: _Run) -> Node:
        """An operand of what is made for a run: elements of the run, or what broadcasts to them."""
        if self.elements.holds(node):
            return self._of_run(node, run)
        if node in run.made:
            return run.made[node]
        made = node
        if self.elements.is_row_number(node):
            made = self._shaped(node, [self.found.rows, 1])
        elif self.elements.is_column_number(node):
            made = self._cut(self._shaped(node, [self.found.columns]), 0, run)
        elif node.meta["val"].dim() > 1:
            made = self._shaped(node, [1])
        run.made[node] = made
        return made

    def _shaped(self, node: Node, shape: list[int]) -> Node:
        return node if list(node.meta["val"].shape) == shape else self._call(aten.reshape.default, node, shape)

    def _full(self, number: float, like: Node, run: _Run) -> Node:
        value = like.meta["val"]
        return self._call(
            aten.full.default, [self.found.rows, run.end - run.begin], number, dtype=value.dtype, device=value.device
        )

    def _scattered(self, node: Node, run: _Run) -> Node:
        """A number at one column of each row, where the run has that column."""
        base, _, index, number = _args(node)
        value = node.meta["val"]
        columns = self._call(aten.arange.start, run.begin, run.end, dtype=torch.int64, device=value.device)
        hit = self._call(aten.eq.Tensor, self._read(index, run), columns)
        one = self._call(aten.full.default, [], number, dtype=value.dtype, device=value.device)
        return self._call(aten.where.self, hit, one, self._of_run(base, run))

    def _cut(self, node: Node, axis: int, run: _Run) -> Node:
        return self._call(aten.slice.Tensor, node, axis, run.begin, run.end)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        made = self.graph.call_function(target, args, kwargs)
        like = self.found.readers[0].node.meta
        made.meta = {k: v for k, v in like.items() if k not in ("val", "tensor_meta", "eager_input_vals", "recompute")}
        made.meta["val"] = torch_adapter.fake_result(made)
        if self.backward.isdisjoint(made.all_input_nodes):
            made.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        else:
            self.backward.add(made)
        self._save(made)
        return made

    def _save(self, made: Node) -> None:
        """What runs read of the rows of logits is saved: nothing else could make it without the logits."""
        for node in made.all_input_nodes:
            if self.elements.is_row_number(node) and node not in self.backward and "recompute" not in node.meta:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
