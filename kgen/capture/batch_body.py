"""One iteration of a loop, traced over a batch of iterations, with the proof that this means the same."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from kgen.capture.accesses import conflicts, whole
from kgen.capture.batch_views import Writer, batch_view
from kgen.capture.regions import Refused, Region, Regions, example, index_of, tensors_of
from kgen.capture.repeats import Column, Inside, Lifted, Repeat, Step, mapped
from kgen.capture.torch_adapter import batching_rules_only, is_too_large, storage_of

__all__ = ["Refused", "batched_body", "counted", "moves", "numbers"]

aten = torch.ops.aten

# Functions that take a tensor of one element where they take a number, and mean the same.
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
_NAMES = ("add", "sub", "mul", "div", "truediv", "true_divide", "iadd", "isub", "imul", "where", *_COMPARED)
_METHODS = ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_", "fill_", *_COMPARED)
# What the batch of an inner loop has of these.
_TRACED = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
ARITHMETIC: frozenset[Any] = frozenset(
    [*(getattr(module, name) for module in (operator, torch) for name in _NAMES if hasattr(module, name)), *_METHODS, *_TRACED]
)
# It takes a number that the batch of an inner loop has where iterations are single elements.
_MAKES_TENSOR = aten.scalar_tensor.default
# Types to which any number of the program is rounded as it would be on its way through float64 or int64.
WIDE = (torch.float32, torch.float64, torch.int64)
# Operators with gradients, besides views, elementwise and core ones.
KEEP_GRADIENTS = frozenset(
    {
        aten.copy_.default,
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.zero_.default,
        aten._unsafe_view.default,
        aten.baddbmm.default,
    }
)


def batched_body(writer: Writer, repeat: Repeat, results: Sequence[int]) -> list[Node]:
    """Writes the operators of all iterations. Gives what the steps at positions `results` make, with iterations in front.

    Raises Refused."""
    _check_steps(repeat)
    regions = Regions(repeat)
    _check_sizes(repeat, regions)
    body = _Body(writer, repeat, regions)
    traced = body.traced(results)
    written = _Written(traced, body)
    if not written.storages and not results:
        raise Refused("nothing is written or joined")
    body.check_aliases(written.storages)
    written.check_independent(regions)
    if body.differentiable:
        _check_gradients(traced)
        written.check_leaves(regions)
    return _copied(writer, traced, list(body.inputs.values()))


def _is_write(step: Step) -> bool:
    return step.nodes[0].target is operator.setitem


# ---- what the loop is made of ------------------------------------------------------------------------------------------


def _check_steps(repeat: Repeat) -> None:
    for step in repeat.steps:
        first = step.nodes[0]
        if isinstance(first.target, torch._ops.HigherOrderOperator):
            raise Refused(f"{first.name} is a higher-order operator")
        if not _is_write(step):
            kinds = [_kinds(example(node)) for node in step.nodes]
            if not kinds[0] or None in kinds[0] or any(kind != kinds[0] for kind in kinds):
                raise Refused(f"{first.name} gives no tensors, or others in other iterations")


def _kinds(value: Any) -> list[tuple[Any, ...] | None]:
    leaves = [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
    return [_kind(one) for one in leaves]


def _kind(value: Any) -> tuple[Any, ...] | None:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return value.shape, value.stride(), value.dtype, value.device


def _check_sizes(repeat: Repeat, regions: Regions) -> None:
    """A loop may be there in order to keep what it computes small."""
    bases = dict.fromkeys(region.base for region in regions.touched)  # many regions may be of one tuple of many tensors
    outside = max((one.numel() * one.element_size() for base in bases for one in tensors_of(example(base))), default=0)
    for step in repeat.steps:
        made = 0 if _is_write(step) else max(one.numel() * one.element_size() for one in tensors_of(example(step.nodes[0])))
        if is_too_large(made * repeat.count, outside):
            raise Refused(f"{step.nodes[0].name} of all iterations would take {made * repeat.count:,} bytes")


def _rounds_equally(column: Column, dtype: torch.dtype) -> bool:
    """Whether numbers are rounded to the type in one step, so that it does not matter that they come from tensors."""
    if dtype in WIDE:
        return True
    return dtype != torch.bool and torch.tensor(column.values).to(dtype).to(torch.float64).tolist() == list(column.values)


def numbers(writer: Writer, column: Column, step: Step) -> Node:
    """Numbers of a step's arithmetic as a tensor with iterations as its dimension. Raises Refused."""
    first = step.nodes[0]
    known = [example(first)] if not _is_write(step) else [example(step.args[0])] if isinstance(step.args[0], Node) else []
    known += [one for node in first.all_input_nodes for one in tensors_of(example(node))]
    if first.target not in (*ARITHMETIC, operator.setitem, _MAKES_TENSOR) or not known:
        raise Refused(f"{first.name} has numbers that differ, and is no arithmetic")
    if not all(_rounds_equally(column, one.dtype) for one in known if one.dtype != torch.bool):
        raise Refused(f"{first.name} has numbers that its type does not hold")
    return counted(writer, column, known[0].device)


def counted(writer: Writer, column: Column, device: torch.device) -> Node:
    """The numbers of all iterations: int64, float64 for floats."""
    (m, outer, step), first = column.rhythm, column.values[0]
    if any(one != first + (outer * (k // m) + step * (k % m) if m else k * step) for k, one in enumerate(column.values)):
        raise Refused("numbers advance by no constant step")
    node = writer.call(torch.arange, len(column.values), device=device)
    if m:
        over = writer.method("mul", writer.method("div", node, m, rounding_mode="floor"), outer)
        within = writer.method("mul", writer.method("remainder", node, m), step)
        return writer.method("add", writer.method("add", over, first), within)
    if isinstance(step, float):
        node = writer.method("to", node, torch.float64)
    return writer.method("add", writer.method("mul", node, step), first)


# ---- tracing -----------------------------------------------------------------------------------------------------------


class _Body:
    """One iteration as a function of what the loop reads and writes."""

    def __init__(self, writer: Writer, repeat: Repeat, regions: Regions) -> None:
        self.writer, self.repeat, self.regions = writer, repeat, regions
        self.inputs = dict[Any, Node]()
        self.batched = dict[Any, bool]()
        self.views = dict[int, Any]()
        self.seen = list[tuple[int, int]]()
        for position, step in enumerate(repeat.steps):
            self._note_inputs(position, step)

    @property
    def differentiable(self) -> bool:
        """Whether something may want the gradient of what the loop makes."""
        return self.writer.has_gradients and any(
            one.requires_grad for node in self.inputs.values() for one in tensors_of(example(node))
        )

    def region_of(self, number: int) -> Region | None:
        """What the input of this number is a view of; None for numbers."""
        key = list(self.inputs)[number]
        if isinstance(key, Region):
            return key
        return Region(key, whole(example(key).shape)) if isinstance(key, Node) else None

    def _note_inputs(self, position: int, step: Step) -> None:
        region = self.regions.of.get(position)
        if region is not None and moves(step):
            self.views[position] = self._view(region)
            trees: Any = step.args[2:] if _is_write(step) else ()
        else:
            trees = (step.args, step.kwargs)
        mapped(trees, lambda leaf: self._note(leaf, step))

    def _note(self, leaf: Any, step: Step) -> None:
        if isinstance(leaf, Node):
            if not isinstance(example(leaf), torch.Tensor):
                raise Refused(f"{leaf.name} is no tensor")
            self._add(leaf, lambda: leaf, False)
        elif isinstance(leaf, Lifted):
            self._view(self.regions.lifted(leaf))
        elif isinstance(leaf, Column):
            self._numbers(leaf, step)

    def _add(self, key: Any, make: Any, batched: bool) -> Any:
        if key not in self.inputs:
            self.inputs[key] = make()
            self.batched[key] = batched
        return key

    def _view(self, region: Region) -> Any:
        return self._add(region, lambda: batch_view(self.writer, region.base, region.access, self.repeat.count), True)

    def _numbers(self, column: Column, step: Step) -> None:
        """Numbers of a step's arithmetic as a tensor."""
        self._add(column, lambda: numbers(self.writer, column, step), True)

    def traced(self, results: Sequence[int]) -> GraphModule:
        """The body over all iterations, as a graph of the inputs."""
        if not any(self.batched.values()):
            raise Refused("iterations do not differ")
        dims = tuple(0 if batched else None for batched in self.batched.values())
        over_all = torch.vmap(lambda *values: self._run(values, results), in_dims=dims, randomness="error")
        values = [example(node) for node in self.inputs.values()]
        node = next(iter(self.inputs.values()))
        try:
            with batching_rules_only(), self.writer.mode, torch.no_grad():
                return make_fx(over_all, _allow_non_fake_inputs=True)(*values)
        except Refused:
            raise
        except Exception as cause:
            raise Refused(f"{node.name}: {cause}") from cause

    def _run(self, values: Sequence[Any], results: Sequence[int]) -> tuple[Any, ...]:
        known = dict(zip(self.inputs, values, strict=True))
        made = dict[int, Any]()
        self.seen.clear()
        for position, step in enumerate(self.repeat.steps):
            made[position] = self._step(position, step, known, made)
            if not _is_write(step):
                self._compare(step, made[position])
        return tuple(made[position] for position in results)

    def _step(self, position: int, step: Step, known: dict[Any, Any], made: dict[int, Any]) -> Any:
        def value(leaf: Any) -> Any:
            if isinstance(leaf, Inside):
                return made[leaf.position]
            if isinstance(leaf, Lifted):
                return known[self.regions.lifted(leaf)]
            return known[leaf] if isinstance(leaf, Node | Column) else leaf

        first = step.nodes[0]
        if position in self.views:
            view = known[self.views[position]]
            return _assign(view, mapped(step.args[2], value)) if _is_write(step) else view
        args, kwargs = mapped(step.args, value), mapped(step.kwargs, value)
        if _is_write(step) and position in self.regions.of:
            return _assign(operator.getitem(args[0], args[1]), args[2])
        if first.target is _MAKES_TENSOR and isinstance(args[0], torch.Tensor):
            return args[0].to(example(first).dtype)
        if first.op == "call_method":
            return getattr(args[0], str(first.target))(*args[1:], **kwargs)
        return first.target(*args, **kwargs)  # type: ignore[operator]

    # ---- is it the same? -----------------------------------------------------------------------------------------------

    def _compare(self, step: Step, value: Any) -> None:
        """One iteration of the batch has the sizes and types that Dynamo saw."""
        wanted, got = tensors_of(example(step.nodes[0])), tensors_of(value)
        if [(one.shape, one.dtype, one.device) for one in wanted] != [(one.shape, one.dtype, one.device) for one in got]:
            raise Refused(f"{step.nodes[0].name} has another type or other sizes in a batch")
        self.seen += [(storage_of(one), storage_of(_whole_batch(other))) for one, other in zip(wanted, got, strict=True)]

    def check_aliases(self, written: frozenset[int]) -> None:
        """What shares memory with something written does so in the batch, and nothing else does. Raises Refused."""
        pairs = [*self.seen, *(2 * (storage_of(example(region.base)),) for region in self.regions.touched)]
        partners = {(one, other) for one, other in pairs if other in written}
        originals = {one for one, _ in partners}
        if len(originals) < len(partners) or len({other for _, other in partners}) < len(partners):
            raise Refused("what is written shares memory otherwise in a batch")
        if any(one in originals and other not in written for one, other in pairs):
            raise Refused("a copy of what is written is read in a batch")


def moves(step: Step) -> bool:
    """Whether a step's index says that iterations differ."""
    found = []
    base, index = index_of(step) or (None, ())
    mapped(index, lambda leaf: found.append(isinstance(leaf, Column)))
    return isinstance(base, Lifted) or any(found)


def _whole_batch(value: torch.Tensor) -> torch.Tensor:
    batched = torch._C._functorch.is_batchedtensor(value)
    return torch._C._functorch.get_unwrapped(value) if batched else value


def _assign(view: torch.Tensor, value: Any) -> None:
    """Writes into all of a view, as an assignment to an index would."""
    if isinstance(value, torch.Tensor):
        view[...] = value
    else:
        view.fill_(value)


# ---- legality ----------------------------------------------------------------------------------------------------------


class _Written:
    """What a traced body writes."""

    def __init__(self, traced: GraphModule, body: _Body) -> None:
        self.numbers = {node: k for k, node in enumerate(traced.graph.find_nodes(op="placeholder"))}
        self.body = body
        self.nodes = [node for call in traced.graph.nodes for node in _written_by(call)]
        self.storages = frozenset(storage_of(node.meta["val"]) for node in self.nodes)

    def check_independent(self, regions: Regions) -> None:
        """No iteration touches what another one writes. Raises Refused."""
        for node in self.nodes:
            for region in self._regions(node, regions):
                if not _is_dense(example(region.base)):
                    raise Refused(f"{region.base.name} has elements that share memory")
                copied = self.body.inputs.get(region)
                if copied is not None and storage_of(example(copied)) != storage_of(example(region.base)):
                    raise Refused(f"a copy of {region.base.name} would be written: iterations run backwards")
                if any(span.overlaps for span in region.access.spans):
                    # Nothing need be written by two iterations, but torch functionalizes no write into such a view.
                    raise Refused(f"parts of {region.base.name} are written that overlap along one dimension")
                for other in regions.touched:
                    if self._may_meet(region, other):
                        raise Refused(f"iterations write parts of {region.base.name} that other iterations need")

    def check_leaves(self, regions: Regions) -> None:
        """No two views are written of a tensor that has no gradient yet: torch writes into none that it made before the tensor
        got one. Raises Refused."""
        written = list(dict.fromkeys(region for node in self.nodes for region in self._regions(node, regions)))
        fresh = [region.base for region in written if not _was_differentiable(region.base)]
        for base in fresh:
            if fresh.count(base) > 1 and example(base).is_floating_point():
                raise Refused(f"parts of {base.name} are written, which may get a gradient in between")

    def _regions(self, node: Node, regions: Regions) -> list[Region]:
        """What is written outside of the loop by way of a traced node."""
        storage = storage_of(node.meta["val"])
        while node.op != "placeholder":
            sources = [one for one in node.all_input_nodes if storage in map(storage_of, tensors_of(one.meta.get("val")))]
            if len(sources) != 1:
                return [region for region in regions.touched if storage_of(example(region.base)) == storage]
            node = sources[0]
        region = self.body.region_of(self.numbers[node])
        return [] if region is None else [region]

    def _may_meet(self, region: Region, other: Region) -> bool:
        if storage_of(example(region.base)) != storage_of(example(other.base)):
            return False
        return region.base is not other.base or conflicts(region.access, other.access, self.body.repeat.count)


def _written_by(call: Node) -> Iterator[Node]:
    """The arguments that a traced call writes. Raises Refused where its schema does not say."""
    if call.op != "call_function":
        if call.op == "get_attr":
            raise Refused("it makes a constant")
        return
    if call.target is operator.getitem:
        return
    if not isinstance(call.target, torch._ops.OpOverload):
        raise Refused(f"{call.target} is no operator of PyTorch")
    for position, argument in enumerate(call.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = call.args[position] if position < len(call.args) else call.kwargs.get(argument.name)
            yield from (one for one in pytree.tree_leaves(given) if isinstance(one, Node))


def _is_dense(value: torch.Tensor) -> bool:
    """Whether no two elements share memory, as far as strides tell."""
    reached = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride < reached:
            return False
        reached = max(reached, stride * (size - 1) + reached) if size > 1 else reached
    return True


def _check_gradients(traced: GraphModule) -> None:
    """Operators that PyTorch has chosen without regard to gradients may have none."""
    for node in traced.graph.nodes:
        if node.op == "call_function" and not _keeps_gradients(node.target):
            raise Refused(f"{node.target} may have no gradient")


def _keeps_gradients(target: Any) -> bool:
    if target is aten.detach.default:
        return False
    if target is operator.getitem:  # one of several results
        return True
    return target in KEEP_GRADIENTS or target.is_view or torch.Tag.core in target.tags or torch.Tag.pointwise in target.tags


def _was_differentiable(node: Node) -> bool:
    """Whether a tensor had a gradient when it was made. Example values are those of the end."""
    called = getattr(node.target, "__name__", str(node.target))
    if called == "detach" or called.startswith("new_") or called.endswith("_like"):
        return False
    return any(one.requires_grad for source in node.all_input_nodes for one in tensors_of(example(source)))


# ---- the result --------------------------------------------------------------------------------------------------------


def _copied(writer: Writer, traced: GraphModule, inputs: list[Node]) -> list[Node]:
    known = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in traced.graph.nodes:
        if node.op == "call_function":
            known[node] = writer.copy(node, known)
    outputs = traced.graph.output_node().args[0]
    return [known[one] for one in outputs]  # type: ignore[union-attr]
