"""Builds an `ir.Graph`: the interface that lowering rules use to make nodes, and to say with which strides they are stored."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from kgen.capture.symbols import SymbolTable
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Expr, ExprLike
from kgen.ir.nodes import Buffer, Origin, Sizes, TensorArg
from kgen.ir.ranges import Range, range_of
from kgen.ir.values import Value
from kgen.lowering.few_terms import LEAST_REDUCED, are_affordable, are_cheap, are_few, are_last, are_parts, combined
from kgen.lowering.tensor import Tensor, at, axes, indices, is_empty, number_of, reshape, rounded

# Up to so many elements rounds of maxima beat the library's partial sort on a CPU; and on a GPU, of so many rows or more
# (docs/decisions/0032-rows-on-a-gpu.md: others have not been measured).
FASTER_TOP = 16
FASTER_TOP_ON_GPU, MEASURED_ROWS = 8, 1024
# A GPU compares so many pairs of elements in some 5 us; a library's sort of short rows has launches of 10 to 25 us.
MOST_PAIRS = 1 << 23
# Rows that kernels sort however many there are: the library has threads for 32 elements of each of them.
SHORT_ROW = 16
# Rows that kernels sort where they must: a tensor of this many elements squared is never stored, only counted.
MOST_FORCED = 1024
# Rows that a program of a GPU sorts in its registers.
MOST_SORTED = 4096
# Elements between neighbours of a row from which on a GPU had better read them from a copy with these side by side, elements of
# such a row, and of all: fewer stay in its caches.
APART, SHORTEST_RUN, LEAST_COPIED = 4, 32, 1 << 15
# Operands with more dimensions are not looked for in other orders of these.
MOST_ORDERED = 4
# Results with more dimensions are not looked for with some of these as one.
MOST_JOINED = 6


class Builder:
    """Collects buffers and nodes while a graph is walked.

    `current` is the FX node under lowering, `origin` its provenance; `result_strides` is eager's layout of its first result,
    a preference for the buffers made meanwhile. `numerics` is the rounding policy.
    """

    def __init__(self, name: str, numerics: str = "fast") -> None:
        self.graph = ir.Graph(name)
        self.numerics = numerics
        self.origin = Origin()
        self.current: Any = None
        self.symbols: Any = None  # the graph's SymbolTable
        self.env = NodeValues()
        self.owners: frozenset[Any] = frozenset()  # computed FX nodes in whose storage eager has results of the graph
        self.roots: dict[str, str] = {}  # buffer -> the one that owns its storage, as far as asked for
        self.result_strides: Sizes | None = None
        self.top_k = "auto"
        self.gpu_everywhere = False
        self.versions: dict[str, str] = {}
        self.stored: dict[str, Value] = {}  # buffer -> the element that it was made of, over its axes
        self.placed: dict[tuple[Tensor, Sizes], Tensor] = {}  # operands stored with strides of their own
        self.copies: dict[Tensor, str] = {}  # of operands that are no views of buffers, without dimensions of length 1
        self.orders: dict[Tensor, tuple[int, ...]] = {}  # of dimensions, in which eager has operands
        self.placed_copies: dict[Tensor, list[Tensor]] = {}  # of operands whose strides a call demands, without such dimensions
        self.copied_sizes: set[tuple[torch.dtype, frozenset[tuple[Expr, int]]]] = set()
        self.gathered: dict[Tensor, Tensor] = {}  # what is read at computed positions, as it was stored
        self.turned: dict[str, Tensor] = {}  # buffer -> itself, read from a copy with another order of dimensions
        self.sorted_along: dict[str, int] = {}  # sorted rows, and what is made of them point by point -> their dimension
        self.checked: set[Expr] = set()  # conditions that calls check at run time
        self.literals: set[str] = set()  # constants that the graph makes, which no caller can write into
        self._taken: dict[str, int] = {}

    def finds_top(self, device: torch.device, k: int, rows: Expr) -> bool:
        """Whether kernels find the `k` largest elements of rows, by default where they are known to be faster."""
        if self.top_k != "auto":
            return self.top_k == "kernels"
        if not self.on_gpu(device):
            return k <= FASTER_TOP
        return k <= FASTER_TOP_ON_GPU and (rows.as_int() or 0) >= MEASURED_ROWS

    def ranks_rows(self, device: torch.device, length: int, elements: Expr) -> bool:
        """Whether kernels sort rows by comparing all pairs of their elements: by default where a library's launches take longer
        than that."""
        if self.top_k == "library":
            return False
        pairs = length * (elements.as_int() or 0)
        return (self.on_gpu(device) and pairs > 0 and (pairs <= MOST_PAIRS or length <= SHORT_ROW)) or (
            self.top_k == "kernels" and 0 < length <= MOST_FORCED
        )

    def sorts_rows(self, device: torch.device, length: int) -> bool:
        """Whether kernels sort rows that a program of a GPU holds in full."""
        return self.top_k != "library" and self.on_gpu(device) and 1 < length <= MOST_SORTED

    def sorts_in_registers(self) -> bool:
        """Whether kernels sort rows of a few elements by comparisons of their own: on a CPU one thread takes 2% to 77% of the
        library's time (docs/decisions/0045-rows-sorted-in-registers.md)."""
        return self.top_k != "library"

    def on_gpu(self, device: torch.device) -> bool:
        """Whether kernels on a device's tensors run on a GPU."""
        return self.gpu_everywhere or device.type != "cpu"

    # ---- names and buffers ------------------------------------------------------------------------------------------

    def fresh(self, stem: str) -> str:
        base, _, last = stem.rpartition("_v")
        stem = base if base and last.isdigit() and stem in self.graph.buffers else stem
        while True:
            count = self._taken.get(stem, -1) + 1
            self._taken[stem] = count
            name = stem if count == 0 else f"{stem}_v{count}"
            if name not in self.graph.buffers:
                return name

    def stem(self) -> str:
        return self.origin.name or "buf"

    def buffer(self, sizes: Iterable[ExprLike], dtype: torch.dtype, device: torch.device, stem: str | None = None) -> Buffer:
        """A new buffer with a flexible layout that prefers eager's stride order when the shape is that of the result."""
        exprs = tuple(map(ix.as_expr, sizes))
        made = Buffer(self.fresh(stem or self.stem()), dtype, device, exprs, hint=self._hint(exprs))
        self.graph.buffers[made.name] = made
        return made

    def _hint(self, sizes: Sizes) -> tuple[int, ...] | None:
        strides = self.result_strides
        if strides is None or len(strides) != len(sizes):
            return None
        return stride_order(strides, sizes)

    def new_version(self, target: str) -> Buffer:
        """The buffer that `target`'s storage becomes after a mutation."""
        old = self.graph.buffers[target]
        strides = old.strides or ir.dense_strides(old)
        if old.strides is None:
            self.graph.buffers[target] = old = replace(old, strides=strides)
        made = replace(old, name=self.fresh(target), alias_of=target, kind="intermediate", parts=())
        self.graph.buffers[made.name] = made
        self.versions[target] = made.name
        return made

    def freeze(self, name: str, strides: Sizes | None = None) -> Buffer:
        """Fixes a flexible layout, by default to the dense one its hint prefers."""
        old = self.graph.buffers[name]
        if old.strides is None:
            old = self.graph.buffers[name] = replace(old, strides=strides or ir.dense_strides(old))
        return old

    def load(self, buffer: Buffer) -> Tensor:
        """The tensor that a buffer holds."""
        return Tensor(buffer.sizes, buffer.dtype, buffer.device, vs.load(buffer.name, indices(buffer.sizes), buffer.dtype))

    def constant_on(self, tensor: Tensor, device: torch.device) -> Tensor | None:
        """A list in the program as a constant on another device, which is copied there before the first call. None of what
        is no whole list."""
        name = whole_buffer_name(self.graph, tensor)
        value = self.graph.constants[name] if name in self.literals else None
        if name is None or value is None or not value.is_contiguous():
            return None
        there = (n for n, t in self.graph.constants.items() if t is value and self.graph.buffers[n].device == device)
        copy = next(there, None)
        if copy is None:
            copy = self.fresh(name)
            self.graph.buffers[copy] = replace(self.graph.buffers[name], name=copy, device=device)
            self.graph.constants[copy] = value
            self.literals.add(copy)
        return self.load(self.graph.buffers[copy])

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def realize(self, tensor: Tensor, stem: str | None = None) -> Tensor:
        """Stores a tensor in a buffer of its own and returns the tensor that reads it; a plain whole-buffer load stays."""
        if is_whole_buffer(self.graph, tensor):
            return tensor
        return self.copy(tensor, stem)

    def stored_once(self, tensor: Tensor) -> Tensor:
        """`realize` for a tensor that is only read there: its readers share the buffer."""
        if tensor not in self.gathered:
            self.gathered[tensor] = self.realize(tensor)
        return self.gathered[tensor]

    def reduce(
        self, op: str, tensor: Tensor, dims: Sequence[int], keepdim: bool = False, dtypes: Sequence[torch.dtype] | None = None
    ) -> tuple[Tensor, ...]:
        """Reduces `tensor` over `dims`. `dtypes` are those of the results (default: the tensor's; int64 for indices).
        Float results of 16-bit input should be asked for in the dtype the user sees: accumulation is float32 anyway."""
        if op in ("argmax", "argmin"):
            tensor = rounded(tensor)  # the first of equals is the first of those that eager has stored
        tensor = self._as_copied(tensor)
        rank = tensor.rank
        reduced = sorted({d % rank for d in dims}) if rank else []
        kept = [k for k in range(rank) if k not in reduced]
        row = ops.REDUCTIONS[op]
        out_vars = axes(tensor.sizes[k] for k in kept)
        rvars = tuple(ix.var(f"r{n}", tensor.sizes[k]) for n, k in enumerate(reduced))
        place: list[Expr] = [ix.ZERO] * rank
        for v, k in zip(out_vars, kept, strict=True):
            place[k] = v.expr()
        for v, k in zip(rvars, reduced, strict=True):
            place[k] = v.expr()
        body = vs.substitute(tensor.value, dict(zip(tensor.axes, place, strict=True)))
        sizes = tuple(tensor.sizes[k] for k in kept)
        kinds = list(dtypes) if dtypes else [tensor.dtype] * row.outputs
        if not dtypes and op in ("argmax", "argmin"):
            kinds[1] = torch.int64
        if is_empty(tensor.sizes):
            nothing = self._of_nothing(op, tensor.device, sizes, kinds)
            return tuple(self._keep_dims(t, tensor.sizes, reduced) if keepdim else t for t in nothing)
        if all(v.extent == 1 for v in rvars):
            single = self._reduced_one(op, tensor, sizes, body, kinds)
            return tuple(self._keep_dims(t, tensor.sizes, reduced) if keepdim else t for t in single)
        combine = ops.REDUCTIONS[op].combine
        if combine is not None and are_few(sizes, rvars, points=LEAST_REDUCED):
            near = are_last(reduced, rank) and are_affordable(rvars, body)
            written = combined(combine, rvars, body)
            if near or are_parts(body, written):
                made = Tensor(sizes, kinds[0], tensor.device, vs.cast(written, ops.compute_dtype(kinds[0])))
                made = made if near and are_cheap(rvars, body) and are_few(sizes, rvars) else self.realize(made)
                return (self._keep_dims(made, tensor.sizes, reduced) if keepdim else made,)
        outs = [self.buffer(sizes, d, tensor.device) for d in kinds]
        self.graph.nodes.append(ir.Reduction(tuple(o.name for o in outs), out_vars, rvars, op, body, self.origin))
        results = [self.load(o) for o in outs]
        if not keepdim:
            return tuple(results)
        return tuple(self._keep_dims(r, tensor.sizes, reduced) for r in results)

    def _of_nothing(self, op: str, device: torch.device, sizes: Sizes, kinds: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
        """A reduction (or scan) over no elements, without a loop: what an invariant of an empty loop loads is nowhere."""
        return tuple(
            Tensor(sizes, kind, device, vs.const(ops.identity(op, kind) if k == 0 else 0, ops.compute_dtype(kind)))
            for k, kind in enumerate(kinds)
        )

    def _reduced_one(
        self, op: str, tensor: Tensor, sizes: Sizes, body: Value, kinds: Sequence[torch.dtype]
    ) -> tuple[Tensor, ...]:
        """A reduction (or scan) over one element is that element: extremes lie at 0, deviations are 0 (NaN of a NaN)."""
        results = [body]
        if op == "welford":
            results.append(vs.call("sub", body, body))
        elif op in ops.WITH_POSITIONS:
            results.append(vs.const(0, torch.int64))
        return tuple(
            Tensor(sizes, kind, tensor.device, vs.cast(value, ops.compute_dtype(kind)))
            for value, kind in zip(results, kinds, strict=True)
        )

    def _keep_dims(self, tensor: Tensor, sizes: Sizes, reduced: Sequence[int]) -> Tensor:
        full = tuple(ix.ONE if k in reduced else s for k, s in enumerate(sizes))
        where = [i for k, i in enumerate(indices(full)) if k not in reduced]
        value = vs.substitute(tensor.value, dict(zip(tensor.axes, where, strict=True)))
        return replace(tensor, sizes=full, value=value)

    def scan(self, op: str, tensor: Tensor, dim: int, dtypes: Sequence[torch.dtype] | None = None) -> tuple[Tensor, ...]:
        """Inclusive scan along `dim`; results as for `reduce`."""
        outputs = 2 if op in ops.WITH_POSITIONS else 1
        tensor = rounded(tensor) if outputs == 2 else tensor
        kinds = list(dtypes) if dtypes else [tensor.dtype, torch.int64][:outputs]
        if is_empty(tensor.sizes):
            return self._of_nothing("sum", tensor.device, tensor.sizes, kinds)
        if tensor.sizes[dim % tensor.rank] == 1:
            return self._reduced_one(op, tensor, tensor.sizes, tensor.value, kinds)
        outs = [self.buffer(tensor.sizes, d, tensor.device) for d in kinds]
        axis = tensor.axes[dim % tensor.rank]
        self.graph.nodes.append(ir.Scan(tuple(o.name for o in outs), tensor.axes, axis, op, tensor.value, self.origin))
        if op in ops.ROW_ORDERS or self.of_sorted_rows(tensor) == dim % tensor.rank:
            self.sorted_along.update((o.name, dim % tensor.rank) for o in outs)
        return tuple(self.load(o) for o in outs)

    def of_sorted_rows(self, tensor: Tensor) -> int | None:
        """The dimension along which rows are sorted that the tensor is made of, point by point; None where there are none, or
        several."""
        loads = (load.attr for load in vs.loads([tensor.value]) if load.attr[0] in self.sorted_along)
        found = {self.sorted_along[name] if index == tensor.indices else None for name, index, _ in loads}
        return found.pop() if len(found) == 1 else None

    def scatter(
        self,
        target: Tensor,
        sizes: Iterable[ExprLike],
        index: Sequence[Expr],
        value: Value,
        mode: str = "set",
        mask: Value | None = None,
    ) -> Tensor:
        """Writes `value` (over ``axes(sizes)``) into `target` at `index`, in place. `target` must be a whole buffer (use
        `realize` or `copy` first) whose old contents nobody reads afterwards; returns the new version."""
        name = whole_buffer_name(self.graph, target)
        if name is None:
            raise ValueError("scatter needs a target that owns its buffer")
        new = self.new_version(name)
        loops = axes(sizes)
        if is_empty(v.extent for v in loops):
            index, value, mask = [ix.ZERO] * len(index), _anything(value), None
        self.graph.nodes.append(ir.Scatter(new.name, name, loops, tuple(index), value, mode, mask, self.origin))
        return self.load(new)

    def copy(self, tensor: Tensor, stem: str | None = None) -> Tensor:
        """A fresh buffer with the contents of `tensor`."""
        out = self.buffer(tensor.sizes, tensor.dtype, tensor.device, stem)
        value = _anything(tensor.value) if is_empty(tensor.sizes) else self._along_rows(tensor)
        self.graph.nodes.append(ir.Pointwise(out.name, tensor.axes, value, self.origin))
        self.stored[out.name] = value
        rows = self.of_sorted_rows(tensor) if self.sorted_along else None
        if rows is not None:
            self.sorted_along[out.name] = rows
        return self.load(out)

    def made_of(self, tensor: Tensor) -> Value:
        """The element of a tensor, also where it has been stored as it is, for what would rather compute it again. What it was
        made of has to be there still."""
        value = tensor.value
        is_whole = value.op == "load" and not value.args and value.attr[1] == tensor.indices
        if not is_whole or ops.compute_dtype(tensor.dtype) != tensor.dtype:
            return value
        made = self.stored.get(value.attr[0], value)
        return value if any(load.attr[0] in self.versions for load in vs.loads([made])) else made

    def range_of(self, tensor: Tensor) -> Range:
        """What its arithmetic says of the elements of a tensor of whole numbers, through what was stored on the way."""
        return range_of(tensor.value, self._stored_value)

    def _stored_value(self, load: Value) -> Value | None:
        """What was stored where a value is read, at the same index; None where that is unknown, or memory has changed."""
        name, index, _ = load.attr
        made = self.stored.get(name)
        if made is None or load.args or any(one.attr[0] in self.versions for one in (load, *vs.loads([made]))):
            return None
        return vs.substitute(made, dict(zip(axes(self.graph.buffers[name].sizes), index, strict=True)))

    def mutate(self, target: str, tensor: Tensor) -> Tensor:
        """``copy_``: overwrites buffer `target` (its newest version) with `tensor`, and returns the new version."""
        new = self.new_version(target)
        where = indices(new.sizes)
        value = _anything(tensor.value) if is_empty(new.sizes) else tensor.value
        self.graph.nodes.append(ir.Scatter(new.name, target, axes(new.sizes), where, value, "set", None, self.origin))
        return self.load(new)

    # ---- externs ----------------------------------------------------------------------------------------------------

    def operand(self, tensor: Tensor) -> TensorArg:
        """A tensor as an argument of a library call: a strided view of a buffer, copied only when it is not one, and once for
        all orders of its dimensions: two gradients of a linear layer read the same matrix, one of them transposed."""
        view = self.as_view(tensor)
        if view is None:
            order = self.orders.get(tensor)
            copy = self.copied(tensor, range(tensor.rank)) if order is None else self.copied_matrices(tensor, order)
            view = self.as_view(copy)
        assert view is not None
        return view

    def copied_matrices(self, tensor: Tensor, order: Sequence[int]) -> Tensor:
        """``copied``, of an operand of a matmul: batches that have the same matrix are one, as a view with stride 0 has it."""
        if tensor.rank != 3 or is_empty(tensor.sizes) or tensor.axes[0] in tensor.value.variables():
            return self.copied(tensor, order)
        one = replace(tensor, sizes=(ix.ONE, *tensor.sizes[1:]))
        return replace(self.copied(one, order), sizes=tensor.sizes)

    def _as_copied(self, tensor: Tensor) -> Tensor:
        """The tensor, read from the copy that was made of it for a call, if it is elements of memory in another order: the
        gradient of a bias then reads what those of the weights read, and nobody may need the original."""
        name = self._copy_of(tensor) if _is_element(tensor.value) else None
        return tensor if name is None else self._view_of(name, tensor, range(tensor.rank))

    def _copy_of(self, tensor: Tensor) -> str | None:
        """The buffer with a copy that nobody has written since."""
        name = self.copies.get(_without_ones(tensor))
        return name if name is not None and self.versions.get(name, name) == name else None

    def drop_nodes(self, mark: int) -> None:
        """Forgets the nodes from number `mark` on, and the copies that they make."""
        gone = {out for node in self.graph.nodes[mark:] for out in ir.outs(node)}
        del self.graph.nodes[mark:]
        self.copies = {tensor: name for tensor, name in self.copies.items() if name not in gone}
        for whole, found in self.placed_copies.items():
            self.placed_copies[whole] = [stored for stored in found if gone.isdisjoint(_read_by(stored))]
        self.gathered = {source: made for source, made in self.gathered.items() if gone.isdisjoint(_read_by(made))}
        self.placed = {key: made for key, made in self.placed.items() if gone.isdisjoint(_read_by(made))}
        self.turned = {source: made for source, made in self.turned.items() if gone.isdisjoint(_read_by(made))}

    def copied(self, tensor: Tensor, order: Sequence[int]) -> Tensor:
        """The tensor as a view of a copy: one made for another call, or a new one with the dimensions in this order."""
        found = next(self._from_copies(tensor), None)
        if found is not None:
            return found
        turned = _permuted(tensor, order)
        name = self.copies[_without_ones(turned)] = self.stored_operand(turned).value.attr[0]
        self.copied_sizes.add(_kind_of_sizes(turned))
        return self._view_of(name, tensor, order)

    def note_placed(self, tensor: Tensor, stored: Tensor) -> None:
        """Notes that a call has the tensor in memory, with strides that it demands."""
        self.placed_copies.setdefault(_without_ones(tensor), []).append(_without_ones(stored))
        self.copied_sizes.add(_kind_of_sizes(tensor))

    def stored_copies(self, tensor: Tensor) -> Iterator[Tensor]:
        """The tensor, read from each of the copies that calls have of it, with its dimensions in any order, or some as one."""
        yield from self._in_any_order(tensor)
        whole = _without_ones(tensor)
        for sizes in () if is_empty(whole.sizes) else _joined(whole.sizes):
            if _kind_of_sizes(replace(whole, sizes=sizes)) in self.copied_sizes:
                for found in self._in_any_order(reshape(whole, sizes)):
                    yield _with_ones(tensor, reshape(found, whole.sizes).value)

    def _in_any_order(self, tensor: Tensor) -> Iterator[Tensor]:
        yield from self._from_copies(tensor)
        for whole, order in self._orders(tensor):
            for stored in self.placed_copies.get(_permuted(whole, order), ()):
                if all(self.versions.get(name, name) == name for name in _read_by(stored)):
                    yield _with_ones(tensor, at(stored, [whole.indices[k] for k in order]))

    def _from_copies(self, tensor: Tensor) -> Iterator[Tensor]:
        for whole, order in self._orders(tensor):
            name = self._copy_of(_permuted(whole, order))
            if name is not None:
                yield _with_ones(tensor, self._view_of(name, whole, order).value)

    def _orders(self, tensor: Tensor) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """The tensor without dimensions of length 1, and the orders of the others in which a copy may have them."""
        whole = _without_ones(tensor)
        if whole.rank <= MOST_ORDERED and _kind_of_sizes(tensor) in self.copied_sizes:
            yield from ((whole, order) for order in itertools.permutations(range(whole.rank)))

    def _view_of(self, name: str, tensor: Tensor, order: Sequence[int]) -> Tensor:
        """The tensor, read from a buffer that has its dimensions in this order, but for those of length 1."""
        longer = iter([tensor.indices[k] for k in order if tensor.sizes[k] != 1])
        index = [ix.ZERO if size == 1 else next(longer) for size in self.graph.buffers[name].sizes]
        return replace(tensor, value=vs.load(name, index, tensor.dtype))

    def with_rows(self, tensor: Tensor) -> Tensor:
        """The tensor with neighbours along its last dimension side by side in memory: read from a copy of the buffer that it is
        elements of, which later readers of that buffer may share, or from a copy of its own."""
        order = self._rows_last(tensor)
        if order is None:
            return self.copied(tensor, range(tensor.rank))
        name, index, _ = tensor.value.attr
        made = self.turned[name] = self.copied(self.load(self.graph.buffers[name]), order)
        return replace(tensor, value=at(made, index))

    def read_along_rows(self, tensor: Tensor, most: int) -> Tensor:
        """The tensor, with loads of buffers of up to so many elements from copies with neighbours of a row side by side, where
        they are so far apart that a copy is worth it. What kernels make is in the order of its readers anyway."""
        if not tensor.rank or (tensor.sizes[-1].as_int() or 0) < SHORTEST_RUN:
            return tensor
        copied: dict[Value, Value] = {}
        for load in vs.loads([tensor.value]):
            name, index, dtype = load.attr
            step = self._step(name, index, tensor.axes[-1])
            apart = 0 if step is None else abs(step.as_int() or 0)
            buffer = self.graph.buffers[name]
            size = 0 if buffer.kind == "intermediate" else ix.product(buffer.sizes).as_int() or 0
            if name not in self.turned and apart >= APART and LEAST_COPIED <= size <= most and not load.args:
                copied[load] = self.with_rows(replace(tensor, value=load, dtype=dtype)).value
        return replace(tensor, value=vs.replace_loads([self._along_rows(tensor)], copied.get)[0])

    def _rows_last(self, tensor: Tensor) -> tuple[int, ...] | None:
        """Of a tensor that is elements of a buffer no larger than itself: its dimensions, the tensor's last one last."""
        value = tensor.value
        if value.op != "load" or value.args or value.attr[2] != tensor.dtype:
            return None
        name, index, _ = value.attr
        last, buffer = tensor.axes[-1], self.graph.buffers[name]
        along = [k for k, e in enumerate(index) if last in ix.free_atoms(e)]
        size, most = ix.product(buffer.sizes).as_int(), tensor.numel().as_int()
        if len(along) != 1 or index[along[0]] is not last.expr() or size is None or most is None or size > most:
            return None
        return (*(k for k in range(len(index)) if k != along[0]), along[0])

    def _along_rows(self, tensor: Tensor) -> Value:
        """The tensor's element, read from copies in which neighbours along the last dimension are side by side."""
        if not self.turned or not tensor.rank:
            return tensor.value

        def turned(load: Value) -> Value | None:
            made = self.turned.get(load.attr[0])
            if made is None:
                return None
            read = at(made, load.attr[1])
            copy, index, _ = read.attr
            if self.versions.get(copy, copy) != copy or self._step(copy, index, tensor.axes[-1]) != 1:
                return None
            return vs.guard_loads(read, load.args[0]) if load.args else read

        return vs.replace_loads([tensor.value], turned)[0]

    def _step(self, name: str, index: Sequence[Expr], loop: ix.Var) -> Expr | None:
        buffer = self.graph.buffers[name]
        return ix.stride_of(ix.linearize(index, buffer.strides or ir.dense_strides(buffer)), loop)

    def stored_operand(self, tensor: Tensor) -> Tensor:
        """A buffer for an operand: its operators are those that computed it, not the call that wants it."""
        caller = self.origin
        self.origin = Origin((), caller.name, caller.line)
        stored = self.copy(tensor, f"{caller.name or 'call'}_arg")
        self.origin = caller
        return stored

    def as_view(self, tensor: Tensor) -> TensorArg | None:
        """The tensor as a strided view of an existing buffer, or None. May fix that buffer's layout to make it one."""
        value = tensor.value
        if value.op != "load" or value.args or ops.compute_dtype(tensor.dtype) != value.dtype or value.attr[2] != tensor.dtype:
            return None
        name, index, _ = value.attr
        if any(isinstance(a, ix.Indirect) for e in index for a in ix.free_atoms(e)):
            return None
        arg = TensorArg(name, tensor.axes, index, tensor.dtype)
        if all(_is_forward(ix.stride_of(e, v)) for e in index for v in tensor.axes):
            return arg
        buffer = self.graph.buffers[name]
        linear = ix.linearize(index, buffer.strides or ir.dense_strides(buffer))
        if all(_is_forward(ix.stride_of(linear, v)) for v in tensor.axes):
            self.freeze(name)
            return arg
        return None

    def extern(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        results: Sequence[tuple[Sizes, torch.dtype, torch.device, Sizes | None] | None],
        reason: str,
        mutates: Sequence[tuple[str, str]] = (),
        effect: bool = False,
        wrap: Any = None,
        binds: Sequence[tuple[Any, int, int]] = (),
    ) -> tuple[Tensor | None, ...]:
        """Adds a library call. `results` gives (sizes, dtype, device, strides) of each result, None for one nobody reads; a
        sparse one has no strides.
        `wrap` makes another node of the call (`ir.Attention`, or a partial of `ir.Contraction`), or several nodes."""
        made: list[Buffer | None] = []
        for spec in results:
            if spec is None:
                made.append(None)
                continue
            sizes, dtype, device, strides = spec
            buffer = Buffer(self.fresh(self.stem()), dtype, device, sizes, strides)
            self.graph.buffers[buffer.name] = buffer
            made.append(buffer)
        call = ir.Extern(
            tuple(b.name if b else None for b in made), target, self.extern_tree(args),
            tuple((k, self.extern_tree(v)) for k, v in kwargs.items()),
            tuple(mutates), tuple(binds), effect, reason, self.origin,
        )  # fmt: skip
        self._note_views(call)
        wrapped = wrap(call) if wrap else call
        self.graph.nodes += wrapped if isinstance(wrapped, tuple) else (wrapped,)
        return tuple(self.load(b) if b else None for b in made)

    def _note_views(self, call: ir.Extern) -> None:
        """Results that may be views read the storage of what they view: a write to it has to come after its readers."""
        for below in ir.viewed(call)[:1]:
            root = ir.storage_owner(self.graph.buffers, below, self.roots)
            self.roots.update((out, root) for out in call.outs if out is not None)

    def extern_tree(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return number_of(tree) or self.operand(tree)
        if isinstance(tree, list | tuple):
            return tuple(self.extern_tree(item) for item in tree)
        return tree


# ---- strides ------------------------------------------------------------------------------------------------------------


def _is_forward(stride: Expr | None) -> bool:
    """Whether a tensor may have this stride: torch has no negative ones, so a flipped array is a copy."""
    return stride is not None and ix.known_nonnegative(stride)


def stride_order(strides: Sizes, sizes: Sizes) -> tuple[int, ...]:
    """Dimensions from the largest stride to the smallest; unknown comparisons keep the row-major order."""

    def weight(k: int) -> tuple[int, int]:
        if sizes[k] == 1 or strides[k] == 0:
            return (-1, -k)
        literal = strides[k].as_int()
        return (literal if literal is not None else _symbolic_weight(strides[k]), -k)

    order = sorted((k for k in range(len(sizes)) if weight(k)[0] >= 0), key=weight, reverse=True)
    for k in range(len(sizes)):  # size-1 and broadcast dimensions stay where row-major order has them
        if k not in order:
            order.insert(min(k, len(order)), k)
    return tuple(order)


def _symbolic_weight(expr: Expr) -> int:
    """Orders symbolic strides by a large sample value of every size symbol: a small one would put a stride of `s` rows behind
    that of a row, as 0 does where a size may be 0."""
    return int(ix.evaluate(expr, lambda atom: min(getattr(atom, "hi", 2), 1009)))


def is_storable(sizes: Sizes, strides: Sizes, symbols: SymbolTable) -> bool:
    """Whether a buffer may have these strides: no two elements in one place but along dimensions of stride 0. Strides that are
    symbols may tell by a guard: nothing else says that the rows of a slice are as far apart as they are long."""
    kept = without(sizes, [k for k, s in enumerate(strides) if s == 0])
    return is_dense(kept, strides) or _has_gaps(kept, strides, symbols)


def without(sizes: Sizes, repeated: list[int]) -> Sizes:
    """The sizes with one element along some dimensions."""
    return tuple(ix.ONE if k in repeated else s for k, s in enumerate(sizes))


def is_dense(sizes: Sizes, strides: Sizes) -> bool:
    """Whether some order of the dimensions makes the strides those of a packed array. In torch's a dimension of no elements
    counts as one of one element, which symbolic strides show."""
    dims = [k for k, s in enumerate(sizes) if s != 1]
    total = of_torch = ix.ONE
    left = set(dims)
    while left:
        found = next((k for k in sorted(left, reverse=True) if strides[k] is total or strides[k] is of_torch), None)
        if found is None:
            return any(sizes[k] == 0 for k in dims)
        left.remove(found)
        total, of_torch = total * sizes[found], of_torch * ix.maximum(1, sizes[found])
    return True


def _has_gaps(sizes: Sizes, strides: Sizes, symbols: SymbolTable) -> bool:
    """Whether the strides are those of a part of a larger array, with no element in two places."""
    span, gaps = ix.ONE, []
    for k in reversed(stride_order(strides, sizes)):
        if sizes[k] != 1:
            gaps.append(strides[k] - span)
            span = span + strides[k] * (sizes[k] - 1)
    return symbols.ensure_nonnegative(gaps)


def is_whole_buffer(graph: ir.Graph, tensor: Tensor) -> bool:
    return whole_buffer_name(graph, tensor) is not None


def whole_buffer_name(graph: ir.Graph, tensor: Tensor) -> str | None:
    """The buffer that the tensor is, element for element, or None."""
    value = tensor.value
    if value.op != "load" or value.args or value.attr[2] != tensor.dtype:
        return None
    buffer = graph.buffers[value.attr[0]]
    same = buffer.sizes == tensor.sizes and all(e is i for e, i in zip(value.attr[1], tensor.indices, strict=True))
    return buffer.name if same else None


# ---- what nodes became -----------------------------------------------------------------------------------------------


class NodeValues(dict[Node, Any]):
    """FX node -> what it became. Readers of a storage are found without a walk over the graph, so n writes take n steps."""

    def __init__(self) -> None:
        super().__init__()
        self._new: dict[Node, None] = {}  # nodes whose loads nobody has asked for yet
        self._readers: dict[str, dict[Node, None]] = {}

    def __setitem__(self, node: Node, item: Any) -> None:
        super().__setitem__(node, item)
        self._new[node] = None

    def take_readers(self, root: str, root_of: Callable[[str], str]) -> list[Node]:
        """The nodes that read the storage that buffer `root` owns. Each is given once for what it is now: the caller makes a
        copy for a node that is wanted later on, and what is not wanted now never will be."""
        for node in self._new:
            for name in _buffers(self[node]):
                self._readers.setdefault(root_of(name), {})[node] = None
        self._new.clear()
        return list(self._readers.pop(root, ()))


def tensors(item: Any) -> Iterator[Tensor]:
    """The tensors in what a node became."""
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, tuple | list | dict):
        for part in item.values() if isinstance(item, dict) else item:
            yield from tensors(part)


def _anything(value: Value) -> Value:
    """A constant for the body of an empty loop: code may read in front of the loop what `value` reads, which is nowhere."""
    return vs.const(0, value.dtype)


def _is_element(value: Value) -> bool:
    """Whether it is an element of memory, rounded or not, maybe times a number."""
    while value.op in ("round_to", "cast", "mul"):
        value, *numbers = sorted(value.args, key=lambda one: one.op == "const")
        if any(one.op != "const" for one in numbers):
            return False
    return value.op == "load"


def _permuted(tensor: Tensor, order: Sequence[int]) -> Tensor:
    sizes = tuple(tensor.sizes[k] for k in order)
    turned: dict[ix.Atom, Expr] = {tensor.axes[k]: v.expr() for k, v in zip(order, axes(sizes), strict=True)}
    return replace(tensor, sizes=sizes, value=vs.substitute(tensor.value, turned))


def _without_ones(tensor: Tensor) -> Tensor:
    """The tensor without its dimensions of length 1."""
    longer = [k for k, size in enumerate(tensor.sizes) if size != 1]
    return tensor if len(longer) == tensor.rank else _permuted(tensor, longer)


def _with_ones(tensor: Tensor, value: Value) -> Tensor:
    """The tensor with the value that it has without its dimensions of length 1."""
    longer = [k for k, size in enumerate(tensor.sizes) if size != 1]
    own = zip(axes(tensor.sizes[k] for k in longer), longer, strict=True)
    return replace(tensor, value=vs.substitute(value, {v: tensor.indices[k] for v, k in own}))


def _joined(sizes: Sizes) -> Iterator[Sizes]:
    """The sizes of views that have adjacent dimensions as one, in all ways."""
    if not 2 <= len(sizes) <= MOST_JOINED:
        return
    for cuts in itertools.product((False, True), repeat=len(sizes) - 1):
        if all(cuts):
            continue
        found = [sizes[0]]
        for cut, size in zip(cuts, sizes[1:], strict=True):
            found = [*found, size] if cut else [*found[:-1], found[-1] * size]
        yield tuple(found)


def _kind_of_sizes(tensor: Tensor) -> tuple[torch.dtype, frozenset[tuple[Expr, int]]]:
    """What a tensor has in common with its copies, whatever the order of their dimensions."""
    return tensor.dtype, frozenset(Counter(size for size in tensor.sizes if size != 1).items())


def _read_by(tensor: Tensor) -> set[str]:
    return {load.attr[0] for load in vs.loads([tensor.value])}


def _buffers(item: Any) -> set[str]:
    return {name for tensor in tensors(item) for name in _read_by(tensor)}
