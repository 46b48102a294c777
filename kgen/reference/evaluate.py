"""Runs a loop-IR graph node by node with plain torch operations: the oracle that every compiled graph is compared with.

Storages are real: an input is the caller's tensor, a mutation changes it, and versions and reinterpretations of a buffer
(`Buffer.alias_of`) share its storage. A buffer whose layout is still flexible gets the dense one that its hint prefers.
Every new storage starts as NaN (floats), so that a read of something never written shows.

A float scatter with `add` rounds to the buffer's dtype after each point, in row-major order, which is what a loop over the
points does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Union

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from kgen import errors
from kgen.ir import functions
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Expr, Size, Var
from kgen.ir.nodes import Buffer, Graph, TensorArg
from kgen.ir.program import Program
from kgen.ir.values import Value, loads
from kgen.reference.evaluate_program import ProgramSteps
from kgen.reference.evaluate_reduction import reduce, scan
from kgen.reference.evaluate_value import EXACT, FAST, Points, Policy, Tensor, apply, evaluate_value, int_of

__all__ = ["EXACT", "FAST", "Policy", "evaluate_graph", "evaluate_value"]

Result = Union[Tensor, int, float, bool, torch.SymInt, None]


def evaluate_graph(graph: Graph, inputs: Sequence[Any], *, policy: Policy = FAST) -> list[Any]:
    """The outputs of `graph` for `inputs` (in the order of ``graph.inputs``): tensors and Python numbers.

    Inputs that the graph mutates are changed. Raises InputMismatch for inputs the graph was not made for, IndexError for a
    read or write outside a buffer, InvalidIR for a graph that contradicts itself.
    """
    with torch.no_grad():
        machine = _Machine(graph, policy)
        machine.bind(inputs)
        for node in graph.nodes:
            machine.run(node)
        return [machine.output(result) for result in graph.outputs]


class _Machine:
    """The state of one evaluation: the tensor behind every defined buffer, and the value of every size symbol."""

    def __init__(self, graph: Graph, policy: Policy) -> None:
        self.graph, self.policy = graph, policy
        self.sizes: dict[Size, int] = {}
        self.tensors: dict[str, Tensor] = {}
        self.arguments: Sequence[Any] = ()
        self.widened = _widened(graph) if policy.float64 else frozenset()

    # ---- inputs -----------------------------------------------------------------------------------------------------

    def bind(self, inputs: Sequence[Any]) -> None:
        if len(inputs) != len(self.graph.inputs):
            actual, expected = f"{len(inputs)} arguments in all", f"{len(self.graph.inputs)}"
            raise errors.InputMismatch(position=len(inputs), actual=actual, expected=expected)
        self.arguments = inputs
        equations: list[tuple[Expr, int, int]] = []
        for position, (declared, actual) in enumerate(zip(self.graph.inputs, inputs, strict=True)):
            expr = declared.expr if declared.expr is not None or declared.symbol is None else declared.symbol.expr()
            if declared.buffer is not None:
                equations += self._bind_tensor(position, self.graph.buffers[declared.buffer], actual)
            elif expr is not None:
                equations.append((expr, int(actual), position))
        self._solve(equations)
        for name, constant in self.graph.constants.items():
            self.tensors[name] = constant.detach().to(self.graph.buffers[name].device)

    def _bind_tensor(self, position: int, buffer: Buffer, actual: Any) -> list[tuple[Expr, int, int]]:
        wanted = f"{_short(buffer.dtype)}[{', '.join(map(str, buffer.sizes))}]"
        if not isinstance(actual, Tensor):
            raise errors.InputMismatch(position=position, actual=f"type {type(actual).__name__}", expected=wanted)
        if actual.dtype != buffer.dtype or actual.dim() != len(buffer.sizes):
            found = f"{_short(actual.dtype)}{list(actual.shape)}"
            raise errors.InputMismatch(position=position, actual=found, expected=wanted)
        self.tensors[buffer.name] = actual.detach()
        equations = [(e, n, position) for e, n in zip(buffer.sizes, actual.shape, strict=True)]
        if buffer.strides is None or actual.layout != torch.strided:
            return equations
        # strides define symbols of their own, but those of a dimension of size 1 or 0 are whatever they are
        free = ((e, n, -1) for e, n, s in zip(buffer.strides, actual.stride(), actual.shape, strict=True) if s > 1)
        return equations + [item for item in free if item[0].as_int() is None]

    def _solve(self, equations: list[tuple[Expr, int, int]]) -> None:
        """Gives each symbol its value, those that stand alone first; then checks sizes (position -1: nothing to check)."""
        for expr, number, _ in equations:
            atom = expr.atom()
            if isinstance(atom, Size):
                self.sizes.setdefault(atom, number)
        for expr, number, _ in equations:
            unknown = [a for a in ix.free_atoms(expr) if isinstance(a, Size) and a not in self.sizes]
            if len(unknown) == 1:
                self._solve_linear(expr, unknown[0], number)
        self._derive()
        for expr, number, position in equations:
            if position >= 0 and all(a in self.sizes for a in ix.free_atoms(expr)) and int_of(expr, self.sizes) != number:
                expected = f"{expr} = {int_of(expr, self.sizes)}"
                raise errors.InputMismatch(position=position, actual=f"a size of {number}", expected=expected)

    def _derive(self) -> None:
        """Computes the derived symbols whose own symbols are known by now."""
        for symbol, definition in self.graph.derived.items():
            if symbol not in self.sizes and all(a in self.sizes for a in ix.free_atoms(definition) if isinstance(a, Size)):
                self.sizes[symbol] = int_of(definition, self.sizes)

    def _solve_linear(self, expr: Expr, unknown: Size, number: int) -> None:
        at_zero, at_one = (int_of(expr, {**self.sizes, unknown: n}) for n in (0, 1))
        slope = at_one - at_zero
        if slope and (number - at_zero) % slope == 0:
            guess = (number - at_zero) // slope
            if int_of(expr, {**self.sizes, unknown: guess}) == number:
                self.sizes[unknown] = guess

    # ---- buffers ----------------------------------------------------------------------------------------------------

    def ints(self, exprs: Iterable[Expr]) -> list[int]:
        return [int_of(e, self.sizes) for e in exprs]

    def read(self, name: str) -> Tensor:
        """The tensor behind a buffer, with the buffer's logical shape."""
        if name not in self.tensors:
            if self.graph.buffers[name].alias_of is None:
                raise errors.InvalidIR(stage="evaluate", node=name, problem="is read before it is defined")
            self.tensors[name] = self._alias(self.graph.buffers[name])
        return self.tensors[name]

    def define(self, name: str) -> Tensor:
        """Makes the buffer's storage, or its view of an older one, ready to be written."""
        buffer = self.graph.buffers[name]
        if buffer.is_part and buffer.alias_of not in self.tensors:  # the first of the parts
            self.define(ir.owner(self.graph, name))
        self.tensors[name] = self._allocate(buffer) if buffer.alias_of is None else self._alias(buffer)
        return self.tensors[name]

    def _allocate(self, buffer: Buffer) -> Tensor:
        sizes = self.ints(buffer.sizes)
        strides = self.ints(buffer.strides) if buffer.strides is not None else _dense(sizes, buffer.hint)
        offset = int_of(buffer.offset, self.sizes)
        length = 0 if 0 in sizes else offset + 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        dtype = torch.float64 if buffer.name in self.widened else buffer.dtype
        storage = torch.empty(length, dtype=dtype)
        if dtype.is_floating_point and dtype.itemsize > 1:
            storage.fill_(torch.nan)
        return storage.as_strided(sizes, strides, offset)

    def _alias(self, buffer: Buffer) -> Tensor:
        assert buffer.alias_of is not None
        base = self.read(buffer.alias_of)
        dtype = base.dtype if buffer.name in self.widened else buffer.dtype
        sizes = self.ints(buffer.sizes)
        older = self.graph.buffers[buffer.alias_of]
        if list(base.shape) == sizes and buffer.strides == older.strides and buffer.offset == older.offset:
            return base if base.dtype == dtype else base.view(dtype)
        root = self.read(_root(self.graph, buffer.name))
        strides = self.ints(buffer.strides) if buffer.strides is not None else _dense(sizes, buffer.hint)
        start = root.storage_offset() * root.itemsize // dtype.itemsize + int_of(buffer.offset, self.sizes)
        return torch.empty(0, dtype=dtype).set_(root.untyped_storage(), start, sizes, strides)

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def run(self, node: ir.Node) -> None:
        _RUN[type(node)](self, node)

    def points(self, variables: Sequence[Var], values: Iterable[Value] = ()) -> Points:
        env = {v.attr[0]: self.read(v.attr[0]) for v in loads(values)}
        return Points(variables, env, self.sizes, self.policy)

    def compute(self, variables: Sequence[Var], value: Value) -> Tensor:
        points = self.points(variables, [value])
        return points.value(value).expand(points.extents)

    def store(self, name: str, value: Tensor) -> None:
        out = self.define(name)
        if list(out.shape) != list(value.shape):
            problem = f"has sizes {list(out.shape)}, but the loop that defines it runs over {list(value.shape)}"
            raise errors.InvalidIR(stage="evaluate", node=name, problem=problem)
        out.copy_(value)

    def pointwise(self, node: ir.Pointwise) -> None:
        self.store(node.out, self.compute(node.vars, node.value))

    def reduction(self, node: ir.Reduction) -> None:
        values = self.compute((*node.vars, *node.rvars), node.value)
        kept = values.shape[: len(node.vars)]
        count = int(np.prod(values.shape[len(node.vars) :], dtype=np.int64))
        for name, result in zip(node.outs, reduce(node.op, values.reshape(*kept, count)), strict=True):
            self.store(name, result)

    def scan(self, node: ir.Scan) -> None:
        values = self.compute(node.vars, node.value)
        for name, result in zip(node.outs, scan(node.op, values, node.vars.index(node.axis)), strict=True):
            self.store(name, result)

    def scatter(self, node: ir.Scatter) -> None:
        points = self.points(node.vars, ir.roots(node))
        target = self.read(node.target)
        if not points.empty:
            self._scatter_points(node, points, target)
        self.tensors[node.out] = self._alias(self.graph.buffers[node.out])

    def _scatter_points(self, node: ir.Scatter, points: Points, target: Tensor) -> None:
        def flat(lanes: Tensor) -> Tensor:
            return lanes.expand(points.extents).reshape(-1)

        value = flat(points.value(node.value))
        lanes = [flat(points.index(e)) for e in node.index]
        if node.mask is not None:
            active = flat(points.value(node.mask))
            value, lanes = value[active], [lane[active] for lane in lanes]
        for dim, (lane, extent) in enumerate(zip(lanes, target.shape, strict=True)):
            if bool(((lane < 0) | (lane >= extent)).any()):
                raise IndexError(f"a write to dimension {dim} of {node.out}, which has size {extent}, is out of bounds")
        position = torch.zeros(value.shape[0], dtype=torch.int64)
        for lane, extent in zip(lanes, target.shape, strict=True):
            position = position * extent + lane
        rounds = _turns(position.numpy())
        # the k-th write to an element goes with the k-th writes to all others: order matters within an element only
        for turn in [rounds.max(initial=-1)] if node.mode == "set" else range(rounds.max(initial=-1) + 1):
            chosen = torch.from_numpy(_last_writes(position.numpy()) if node.mode == "set" else rounds == turn)
            where = tuple(lane[chosen] for lane in lanes)
            new = value[chosen]
            if node.mode != "set":
                old = target[where] if where else target.reshape(1)
                new = apply(_COMBINE[node.mode], old.to(new.dtype), new)
            if where:
                target[where] = new.to(target.dtype)
            elif new.numel():
                target.copy_(new.reshape(()))

    def contraction(self, node: ir.Contraction) -> None:
        if node.operands is None:
            assert node.vendor is not None
            self.extern(node.vendor)
            return
        self.store(node.out, self._contract(node))
        if node.vendor is not None and self.policy.check_vendor:
            operands = ir.tensor_args((node.vendor.args, tuple(v for _, v in node.vendor.kwargs)))
            if all(a.buffer in self.tensors for a in operands):
                self._check_vendor(node, node.vendor, self.tensors[node.out])

    def _contract(self, node: ir.Contraction) -> Tensor:
        """The sum of products. An operand keeps size 1 on axes that it does not depend on, so the terms are never stored."""
        variables = (*node.out_vars, *node.reduced)
        points = self.points(variables, [node.lhs, node.rhs])
        kept, count = len(node.out_vars), len(variables)
        if points.empty:  # a sum of nothing still has its addend
            nothing = torch.zeros(points.extents[:kept], dtype=points.value(node.lhs).dtype)
            return self._finished(node, nothing) if nothing.numel() else nothing
        assert node.operands is not None
        lhs, rhs = (points.value(vs.cast(v, node.operands)) for v in (node.lhs, node.rhs))
        if lhs.dtype.itemsize == 1 or not lhs.dtype.is_floating_point:  # torch multiplies no 8-bit floats
            wide = torch.float32 if lhs.dtype.is_floating_point else torch.int64
            lhs, rhs = lhs.to(wide), rhs.to(wide)
        # a reduced axis that neither operand depends on still counts its points
        full = [points.extents[k] if k >= kept else 1 for k in range(count)]
        lhs = lhs.expand([max(a, b) for a, b in zip(lhs.shape, full, strict=True)])
        axes = list(range(count))
        total = torch.einsum(lhs, axes, rhs, axes, axes[:kept]).expand(points.extents[:kept])
        return self._finished(node, total)

    def _finished(self, node: ir.Contraction, total: Tensor) -> Tensor:
        """The sum with its scale and its addend."""
        points = self.points(node.out_vars, [v for v in (node.scale, node.addend) if v is not None])
        if node.scale is not None:
            total = total * points.value(node.scale)
        return total if node.addend is None else total + points.value(node.addend)

    def _check_vendor(self, node: ir.Contraction, vendor: ir.Extern, ours: Tensor) -> None:
        theirs = self._call(vendor)[vendor.outs.index(node.out)]
        tolerance = _VENDOR_TOLERANCE.get(ours.dtype if self.policy.float64 else theirs.dtype, 1e-3)
        scale = float(theirs.double().abs().nan_to_num(0, 0, 0).max()) if theirs.numel() else 0.0
        if not torch.allclose(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance * scale, equal_nan=True):
            error = float((ours.double() - theirs.double()).abs().max())
            problem = f"its sum of products differs from {vendor.target} by {error:g}"
            raise errors.InvalidIR(stage="evaluate", node=node.out, problem=problem)

    # ---- externs ----------------------------------------------------------------------------------------------------

    def extern(self, node: ir.Extern) -> None:
        results = self._call(node)
        for symbol, position, dimension in node.binds:
            found = results[position]
            if dimension < 0:
                self.sizes[symbol] = functions.float_bits(found) if isinstance(found, float) else int(found)
            else:
                self.sizes[symbol] = found.shape[dimension]
        self._derive()
        owned = {t.untyped_storage().data_ptr() for t in self.tensors.values() if t.layout == torch.strided}
        for name, result in zip(node.outs, results, strict=False):
            if name is not None:
                self._place(name, result, owned)
        for _, new in node.mutates:
            self.tensors[new] = self._alias(self.graph.buffers[new])

    def operation(self, node: ir.Operation) -> None:
        if node.program is not None:
            self._run_program(node, node.program)
            return
        assert node.vendor is not None
        self.extern(node.vendor)

    def _run_program(self, node: ir.Operation, program: Program) -> None:
        """Each step over all loops of the node, with size 1 along those that it does not depend on."""
        variables = (*node.out_vars, *node.inner)
        points = self.points(variables, node.operands)
        count = len(program.operands)
        if points.empty:
            nothing = torch.zeros(points.extents[: len(node.out_vars)], dtype=points.policy.real(torch.float32))
            self.store(ir.outs(node)[0], nothing)
            for one in node.seconds:
                self.define(one.out).fill_(-torch.inf)
            return
        steps = ProgramSteps(program, {a: [variables.index(v) for v in _loops_of(e)] for a, e in node.axes}, points.extents)
        values = zip(node.operands[:count], node.dtypes, strict=False)
        operands = [points.value(vs.cast(value, dtype)) for value, dtype in values]
        slots = dict(zip((step.name for step in program.middles), node.operands[count:], strict=True))

        def middle(name: str, made: Mapping[str, Tensor]) -> Tensor:
            found = Points(variables, {**points.env, **made}, self.sizes, self.policy)
            return found.value(slots[name])

        result, seconds = steps.run(operands, middle, dict(node.arguments).get("safe", False))
        kept = len(node.out_vars)
        self.store(ir.outs(node)[0], result.reshape(result.shape[:kept]).expand(points.extents[:kept]))
        for one in node.seconds:
            self._second(one, variables, seconds[one.step])

    def _second(self, one: ir.Second, variables: Sequence[Var], made: Tensor) -> None:
        """Stores a second result of a program's step at all points: those of one row are equal."""
        points = self.points(variables, [one.value])
        points.env = {**points.env, one.step: made}
        lanes = (points.value(one.value), *map(points.index, one.index))
        value, *index = (lane.expand(points.extents).reshape(-1) for lane in lanes)
        stored = self.define(one.out)
        stored[tuple(index)] = value.to(stored.dtype)

    def attention(self, node: ir.Attention) -> None:
        self.extern(node.vendor)

    def _call(self, node: ir.Extern) -> list[Any]:
        wide = bool(self.widened) and not node.mutates
        try:
            result = self._call_with(node, wide)
        except (RuntimeError, TypeError):
            if not wide:
                raise
            result = self._call_with(node, False)  # a library call without float64
        return tree_leaves(result)

    def _call_with(self, node: ir.Extern, wide: bool) -> Any:
        def argument(item: Any) -> Any:
            if isinstance(item, TensorArg):
                view = self.view(item)
                if view.dtype is torch.float32 and wide:
                    return view.double()
                return view if wide else _narrowed(view, item.dtype)
            if isinstance(item, Expr | ir.Number):
                return self.number(item)
            if isinstance(item, list | tuple):
                return [argument(part) for part in item]
            return item

        return node.target(*(argument(a) for a in node.args), **{k: argument(v) for k, v in node.kwargs})

    def _place(self, name: str, result: Tensor, owned: set[int]) -> None:
        """Takes a library call's result as the buffer, copied when the layout is another or the storage not its own."""
        buffer = self.graph.buffers[name]
        if buffer.alias_of is not None:
            self.tensors[name] = self._alias(buffer)
            return
        if list(result.shape) != self.ints(buffer.sizes):
            problem = f"the call returned {list(result.shape)} for {list(buffer.sizes)}"
            raise errors.InvalidIR(stage="evaluate", node=name, problem=problem)
        if result.layout != torch.strided:
            self.tensors[name] = result
            return
        dtype = torch.float64 if name in self.widened else buffer.dtype
        shared = bool(result.numel()) and result.untyped_storage().data_ptr() in owned
        fixed = buffer.strides is not None and self.ints(buffer.strides) != list(result.stride())
        if fixed and not any(s == 0 and n > 1 for s, n in zip(self.ints(buffer.strides or ()), result.shape, strict=True)):
            self.define(name).copy_(result)
        else:
            self.tensors[name] = result.clone().to(dtype) if shared else result.to(dtype)

    # ---- views and outputs ------------------------------------------------------------------------------------------

    def view(self, arg: TensorArg) -> Tensor:
        """The tensor ``buffer[index(vars)]``, sharing the buffer's storage whenever strides can say it."""
        base = self.read(arg.buffer)
        if base.layout != torch.strided:
            return base
        extents = [int_of(v.extent, self.sizes) for v in arg.vars]
        if base.numel() and 0 not in extents:
            lanes = self._lanes(arg, base)
            start = int(lanes.reshape(-1)[0])
            steps = [int(lanes.select(k, 1).reshape(-1)[0]) - start if n > 1 else 1 for k, n in enumerate(extents)]
            shared = base.as_strided(extents, steps, start) if all(s >= 0 for s in steps) else None
            if shared is None or not torch.equal(lanes, _offsets(extents, steps, start)):
                shared = torch.empty(0, dtype=base.dtype).set_(base.untyped_storage())[lanes.reshape(-1)].reshape(extents)
        elif 0 in extents:
            shared = base.new_empty(extents)
        else:
            raise IndexError(f"a view of {arg.buffer}, which is empty, reads {extents}")
        return shared if base.dtype in (arg.dtype, torch.float64) else shared.view(arg.dtype)

    def _lanes(self, arg: TensorArg, base: Tensor) -> Tensor:
        """The storage position of every element of a view."""
        points = self.points(arg.vars)
        total = torch.full(points.extents, int(base.storage_offset()), dtype=torch.int64)
        for dim, expr in enumerate(arg.index):
            lane = points.index(expr)
            if bool(((lane < 0) | (lane >= base.shape[dim])).any()):
                raise IndexError(f"a view of {arg.buffer} leaves dimension {dim}, which has size {base.shape[dim]}")
            total = total + lane * base.stride(dim)
        return total

    def output(self, result: Any) -> Result:
        if isinstance(result, TensorArg):
            return _narrowed(self.view(result), result.dtype)
        if isinstance(result, ir.ArgumentMultiple):
            return self.arguments[result.position] * result.factor
        return self.number(result) if isinstance(result, Expr | ir.Number) else result

    def number(self, item: Expr | ir.Number) -> int | float | bool:
        if isinstance(item, Expr):
            return int_of(item, self.sizes)
        found = int_of(item.expr, self.sizes)
        return functions.float_of(found) if item.kind == "float" else bool(found)


_RUN: dict[type, Callable[[_Machine, Any], None]] = {
    ir.Pointwise: _Machine.pointwise, ir.Reduction: _Machine.reduction, ir.Scan: _Machine.scan, ir.Scatter: _Machine.scatter,
    ir.Contraction: _Machine.contraction, ir.Attention: _Machine.attention,
    ir.Operation: _Machine.operation, ir.Extern: _Machine.extern,
}  # fmt: skip

_COMBINE = {"add": "add", "mul": "mul", "max": "maximum", "min": "minimum"}
_VENDOR_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 4e-2, torch.float16: 1e-2}


def _loops_of(expr: Expr) -> list[Var]:
    return [a for a in sorted(ix.free_atoms(expr), key=lambda a: a.order) if isinstance(a, Var)]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _root(graph: Graph, name: str) -> str:
    """The buffer at the end of the `alias_of` chain."""
    while (older := graph.buffers[name].alias_of) is not None:
        name = older
    return name


def _widened(graph: Graph) -> frozenset[str]:
    """Float32 intermediates that can live in float64: no other dtype and no library call that mutates sees their storage."""
    groups: dict[str, list[Buffer]] = {}
    for buffer in graph.buffers.values():
        groups.setdefault(_root(graph, buffer.name), []).append(buffer)
    calls = [c for n in graph.nodes if (c := ir.call_of(n)) is not None]
    mutated = {_root(graph, old) for call in calls if isinstance(call, ir.Extern) for old, _ in call.mutates}
    wide = (
        members
        for root, members in groups.items()
        if root not in mutated and graph.buffers[root].kind == "intermediate" and all(b.dtype is torch.float32 for b in members)
    )
    return frozenset(b.name for members in wide for b in members)


def _dense(sizes: Sequence[int], hint: Sequence[int] | None) -> list[int]:
    """Packed strides, the dimensions from outermost to innermost as `hint` orders them."""
    strides, total = [1] * len(sizes), 1
    for dim in reversed(hint if hint is not None else range(len(sizes))):
        strides[dim] = total
        total *= max(1, sizes[dim])
    return strides


def _offsets(extents: Sequence[int], steps: Sequence[int], start: int) -> Tensor:
    total = torch.full(list(extents), start, dtype=torch.int64)
    for dim, (extent, step) in enumerate(zip(extents, steps, strict=True)):
        shape = [1] * len(extents)
        shape[dim] = extent
        total = total + torch.arange(extent).reshape(shape) * step
    return total


def _turns(position: Any) -> Any:
    """For each write, how many earlier ones went to the same element."""
    order = np.argsort(position, kind="stable")
    ranked = position[order]
    first = np.concatenate([[True], ranked[1:] != ranked[:-1]]) if len(ranked) else np.zeros(0, dtype=bool)
    starts = np.maximum.accumulate(np.where(first, np.arange(len(ranked)), 0))
    rounds = np.empty(len(ranked), dtype=np.int64)
    rounds[order] = np.arange(len(ranked)) - starts
    return rounds


def _last_writes(position: Any) -> Any:
    """Which writes are the last to their element."""
    rounds = _turns(position[::-1].copy())
    return np.ascontiguousarray(rounds[::-1] == 0)
