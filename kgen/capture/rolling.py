"""Loops that Dynamo has unrolled and whose iterations need each other's results, as `scan`.

The steps of an RNN, the layers of a decoder's loop: a block of operators is there once for each iteration, and reads what the
block in front of it has made. Such blocks become one body, which AOTAutograd traces once, and which is lowered, scheduled and
built once. Its gradient is a loop, too. What does not depend on carried values is done in front of the loop, for all
iterations at once, where that makes one matmul of many.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._higher_order_ops.scan import scan_op
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from kgen.capture import torch_adapter
from kgen.capture.batch_body import batched_body
from kgen.capture.batch_views import Writer
from kgen.capture.batching import changes_gradients, changes_more, too_dynamic
from kgen.capture.joins import Join, join_of, put_join
from kgen.capture.loop_body import LoopBody
from kgen.capture.loop_buffers import Buffers
from kgen.capture.regions import Refused, example, is_view_step, tensors_of
from kgen.capture.repeats import Carried, Column, Each, Inside, Lifted, Repeat, Step, find_carried, mapped
from kgen.capture.torch_adapter import is_too_large, storage_of
from kgen.verdict import Outcome, Reason, Verdict

__all__ = ["LEAST_NODES", "depended_on", "free_steps", "leaves", "renumbered", "roll_repeats"]

# A loop of fewer operators compiles fast enough as it is, and runs without a call an iteration.
LEAST_NODES = 512
# The same, on these devices, of up to so many iterations that work on points of one space alone: unrolled they are a kernel,
# which keeps in registers what iterations carry. 16 steps of cart poles took 256 us as a loop, and Inductor 33 (H200).
# A CPU's compiler takes ten seconds for them, and the loop is as fast.
UNROLLED_ON, LEAST_OF_POINTS, FEW_ITERATIONS = frozenset({"cuda"}), 1024, 32
OF_POINTS = frozenset({
    "add", "sub", "mul", "truediv", "div", "floordiv", "mod", "remainder", "pow", "neg", "abs", "sign", "square", "sqrt",
    "rsqrt", "reciprocal", "exp", "expm1", "log", "log1p", "sin", "cos", "tan", "atan2", "tanh", "sigmoid", "relu", "erf",
    "floor", "ceil", "round", "clamp", "clamp_min", "clamp_max", "minimum", "maximum", "where", "gt", "lt", "ge", "le",
    "eq", "ne", "and_", "or_", "xor", "invert", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or",
    "bitwise_not", "float", "to", "iadd", "isub", "imul", "zeros_like", "ones_like", "unbind", "getitem", "masked_fill",
})  # fmt: skip
# A loop of fewer iterations is not worth a word.
LEAST_NOTED = 8
# So many loops are looked at.
LOOPS = 16
# Tensors that are there before a loop, one for each iteration, are copied to be rows of one: at most so many bytes.
MOST_STACKED = 1 << 20


def roll_repeats(gm: GraphModule, least: int = LEAST_NODES) -> list[Verdict]:
    """Makes unrolled loops with carried values calls of `scan`, in place: those of which so many nodes are repetition."""
    verdicts, refused = list[Verdict](), set[object]()
    if too_dynamic(gm) or any(changes_gradients(node) for node in gm.graph.nodes):
        return verdicts
    for _ in range(LOOPS):
        rolled = _first_rolled(gm, least, refused, verdicts)
        if rolled is None:
            break
        verdicts.append(rolled)
    if any(one.outcome is Outcome.ROLLED for one in verdicts):
        gm.graph.lint()
        gm.recompile()
    return verdicts


def _first_rolled(gm: GraphModule, least: int, refused: set[object], verdicts: list[Verdict]) -> Verdict | None:
    """Rolls the longest loop that can be, and notes why longer ones cannot."""
    for found in find_carried(list(gm.graph.nodes)):
        nodes, names = list(found.nodes), (found.steps[0].nodes[0].name, found.steps[-1].nodes[-1].name)
        whole = nodes[0], found.count, len(found.steps)
        if whole in refused or not refused.isdisjoint(nodes):
            continue
        if (found.count - 1) * len(found.steps) < _least_of(found, least):
            if found.count >= LEAST_NOTED:
                detail = f"{found.count} iterations of {len(found.steps)} operators"
                verdicts.append(Verdict(*names, Outcome.UNPROFITABLE, Reason.SHORT_LOOP, detail=detail))
            return None
        try:
            detail = _roll(gm, found, refused)
            return Verdict(*names, Outcome.ROLLED, Reason.CARRIED_ITERATIONS, detail=detail)
        except Refused as cause:
            refused.update([whole] if found.nested else nodes)  # where loops in loops are none, their inner ones may be
            verdicts.append(Verdict(*names, Outcome.ILLEGAL, Reason.UNROLLED, detail=str(cause)))
    return None


def _least_of(found: Repeat, least: int) -> int:
    """How many nodes of a repeat have to be repetition."""
    if least != LEAST_NODES or found.count > FEW_ITERATIONS or (found.count - 1) * len(found.steps) < least:
        return least
    return LEAST_OF_POINTS if _is_of_points(found) else least


def _is_of_points(found: Repeat) -> bool:
    """Whether an iteration computes points of one space alone, where that is faster unrolled."""
    nodes = [step.nodes[0] for step in found.steps if not is_view_step(step)]
    names = {one if isinstance(one, str) else getattr(one, "__name__", "") for one in (node.target for node in nodes)}
    made = [one for node in nodes for one in tensors_of(node.meta.get("example_value"))]
    there = {one.device.type for one in made} <= UNROLLED_ON
    return there and names <= OF_POINTS and len({one.numel() for one in made if one.dim()}) == 1


def _roll(gm: GraphModule, repeat: Repeat, written: set[object]) -> str:
    """Writes the loop in front of the blocks, and erases these; `written` gets its nodes. Raises Refused, and leaves the graph
    as it was."""
    writer = Writer(gm.graph, repeat.steps[0].nodes[0])
    try:
        detail = _Loop(gm, writer, repeat).write()
        written.update(writer.made)
        return detail
    except Exception as cause:
        writer.erase()
        raise cause if isinstance(cause, Refused) else Refused(f"{type(cause).__name__}: {cause}") from cause


class _Loop:
    """A repeat on its way to a loop."""

    def __init__(self, gm: GraphModule, writer: Writer, repeat: Repeat) -> None:
        self.gm, self.writer = gm, writer
        self.inside = frozenset(repeat.nodes)
        for node in self.inside:
            if changes_more(node):
                raise Refused(f"{node.name} changes what other operators do")
        each = [one.nodes if isinstance(one, Each) else one.step.nodes for one in leaves(repeat.steps, Each | Lifted)]
        self.items = {node for node in itertools.chain(*each) if _reads_item(node)}
        self.buffers = Buffers(writer, _with_stacks(writer, repeat), {})
        self.repeat = self.buffers.repeat

    def write(self) -> str:
        """Gives what there is to say of it. Raises Refused."""
        steps = self.repeat.steps
        kept = dict.fromkeys(range(len(steps)), 0)  # of so many last iterations, the values are carried out of the loop
        for leaf in leaves(steps, Carried):
            kept[leaf.position] = max(kept[leaf.position], len(leaf.first))
        users = {k: self._users(step) for k, step in enumerate(steps) if k not in self.buffers.names and not is_view_step(step)}
        results = [k for k, found in users.items() if any(found[: self.repeat.count - kept[k]])]
        live = self._live({k for k, found in users.items() if any(found)}, results)
        free = free_steps(steps, self.buffers.touched) & live
        hoisted = self._hoisted(live, free, [k for k in results if k in free])
        dead = frozenset(range(len(steps))) - live
        body = LoopBody(self.writer, self.repeat, self.buffers, results, hoisted, dead | free if hoisted else dead)
        self._check_gradients(body, {k for k, found in users.items() if any(found)})
        self._put(body, self._call(body), users)
        more = f", {len(free)} more for all iterations at once in front of them" if hoisted else ""
        buffers = f", and write {', '.join(base.name for base in self.buffers.bases.values())} in place" if self.buffers else ""
        carried = f"{self.repeat.count} iterations of {len(body.steps)} operators that carry {len(body.carried)} values"
        return f"{carried}{buffers}{more}"

    def _live(self, needed: set[int], results: Sequence[int]) -> set[int]:
        """Positions of steps that are needed: all where some step writes, else those that a needed one depends on."""
        steps = self.repeat.steps
        live = depended_on(steps, needed)
        if len(live) < len(steps) and LoopBody(self.writer, self.repeat, self.buffers, results, {}, frozenset()).writes:
            return set(range(len(steps)))
        return live

    def _users(self, step: Step) -> list[list[Node]]:
        """Who needs the step's values outside of the loop, iteration by iteration."""
        return [[user for user in node.users if user not in self.inside] for node in step.nodes]

    def _hoisted(self, live: set[int], free: frozenset[int], wanted: Sequence[int]) -> dict[int, Node]:
        """Values of steps that depend on no carried value, of all iterations at once: if that makes larger matmuls."""
        steps, order = self.repeat.steps, {old: new for new, old in enumerate(sorted(free))}
        before = [renumbered(steps[k], order) for k in sorted(free)]
        bound = [step for k, step in enumerate(steps) if k in live and k not in free]
        needed = {one.position for one in leaves(bound, Inside | Carried)}
        results = sorted((needed & free) | set(wanted))
        written = len(self.writer.made)
        try:
            made = batched_body(self.writer, Repeat(self.repeat.count, tuple(before)), [order[k] for k in results])
        except Refused:
            made = []
        if made and any(_is_heavy(node) for node in self.writer.made[written:]):
            return dict(zip(results, made, strict=True))
        for node in reversed(self.writer.made[written:]):
            self.gm.graph.erase_node(node)
        del self.writer.made[written:]
        return {}

    def _check_gradients(self, body: LoopBody, needed: set[int]) -> None:
        """All results of `scan` want gradients if one of its operands does. Raises Refused where they did not."""
        carried = itertools.chain(*(leaf.first for leaf in body.carried))
        sources = self._sources([*body.others, *body.rows.values(), *carried, *self.buffers.bases.values()])
        wants = self.writer.has_gradients and any(one.requires_grad for node in sources for one in _tensors(node))
        if wants and not torch_adapter.has_right_scan():
            raise Refused(f"gradients of the scan of torch {torch.__version__} are wrong")
        if wants:
            self._check_kept(sources)
        for nodes in (*(self.repeat.steps[position].nodes for position in needed), self.buffers.bases.values()):
            for node in nodes:
                if any(one.requires_grad != wants and one.dtype.is_floating_point for one in _tensors(node)):
                    raise Refused(f"{node.name} wants gradients otherwise than what is computed next to it")

    def _check_kept(self, sources: set[Node]) -> None:
        """Backward may need what a buffer was in each iteration. Raises Refused where that takes too much memory."""
        given = max((_bytes(node) for node in sources), default=0)
        for base in self.buffers.bases.values():
            if is_too_large(_bytes(base) * self.repeat.count, given):
                raise Refused(f"{base.name} of all iterations would take {_bytes(base) * self.repeat.count:,} bytes")

    def _sources(self, given: Sequence[Node]) -> set[Node]:
        """What has been there before, among nodes and what these are made of: nodes that were written here say nothing."""
        written, open_, found = set(self.writer.made), list(given), set[Node]()
        while open_:
            node = open_.pop()
            if node in written:
                open_ += node.all_input_nodes
            else:
                found.add(node)
        return found

    # ---- writing -------------------------------------------------------------------------------------------------------

    def _call(self, body: LoopBody) -> Node:
        name = next(name for k in itertools.count() if not hasattr(self.gm, name := f"rolled_loop_{k}"))
        taken = set[int]()
        carried = *(leaf.first[k] for leaf, k in body.registers), *self.buffers.bases.values()
        first = [self._own(node, taken) for node in carried]
        others = [self._own(node, taken) for node in body.others]
        rows = list(body.rows.values())
        setattr(self.gm, name, body.graph)
        graph, before = self.writer.graph, self.writer.before
        with graph.inserting_before(before):
            target = self.writer.noted(graph.get_attr(name), None)
            call = graph.call_function(scan_op, (target, first, rows, tuple(others)))
        return self.writer.noted(call, None)

    def _own(self, node: Node, taken: set[int]) -> Node:
        """A tensor that is contiguous where it is carried, and shares memory with none before it: torch refuses that."""
        value = example(node)
        if storage_of(value) in taken:
            node = self.writer.method("clone", node)
        taken.add(storage_of(value))
        return node

    def _put(self, body: LoopBody, call: Node, users: dict[int, list[list[Node]]]) -> None:
        """Puts results of the loop in the place of those of its blocks, and erases these."""
        registers = list(body.registers)
        writes = self._put_buffers(call, len(registers))
        for number, position in enumerate(body.results, len(registers) + len(writes)):
            self._put_rows(position, self._result(call, number, position, rows=True), users[position])
        for number, (leaf, k) in enumerate(registers):
            node = self.repeat.steps[leaf.position].nodes[self.repeat.count - len(leaf.first) + k]
            if leaf.position not in body.results and any(user not in self.inside for user in node.users):
                self._replace(node, self._result(call, number, leaf.position, rows=False))
        self._erase(set(self.writer.made) - set(writes))

    def _put_buffers(self, call: Node, number: int) -> list[Node]:
        """Writes buffers that the loop gives, from a number on, back into those that it was given."""
        for position, base in self.buffers.names.items():
            for node in self.repeat.steps[position].nodes:
                self._replace(node, base)
        bases = enumerate(self.buffers.bases.values(), number)
        return [self.writer.method("copy_", one, self._taken(call, k, tuple(example(one).shape), one)) for k, one in bases]

    def _erase(self, written: set[Node]) -> None:
        """Erases the blocks, what has read an item for each of them, and what was written in vain."""
        for node in reversed(self.gm.graph.nodes):
            if not node.users and (node in self.inside or node in self.items or node in written):
                self.gm.graph.erase_node(node)

    def _result(self, call: Node, number: int, position: int, rows: bool) -> Node:
        node = self.repeat.steps[position].nodes[-1]
        sizes = tuple(example(node).shape)
        return self._taken(call, number, (self.repeat.count, *sizes) if rows else sizes, node)

    def _taken(self, call: Node, number: int, sizes: Sequence[int], like: Node) -> Node:
        """A result of the loop, of the type of what `like` has made."""
        with self.writer.mode, torch.no_grad():
            made = example(like).new_empty(sizes)
        with self.writer.graph.inserting_before(self.writer.before):
            return self.writer.noted(self.writer.graph.call_function(operator.getitem, (call, number)), made)

    def _put_rows(self, position: int, rows: Node, users: list[list[Node]]) -> None:
        step = self.repeat.steps[position]
        for user in dict.fromkeys(itertools.chain(*users)):
            if join_of(user, step) is not None:
                put_join(self.gm.graph, Join(position, user), rows)
        for k, node in enumerate(step.nodes):
            if any(user not in self.inside for user in node.users):
                self._replace(node, self.writer.call(operator.getitem, rows, k))

    def _replace(self, old: Node, new: Node) -> None:
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in self.inside)


# ---- steps -------------------------------------------------------------------------------------------------------------


def _tensors(node: Node) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(example(node)) if isinstance(one, torch.Tensor)]


def _bytes(node: Node) -> int:
    return sum(one.numel() * one.element_size() for one in _tensors(node))


def leaves(steps: Sequence[Step], kind: Any) -> Iterator[Any]:
    found = list[Any]()
    for step in steps:
        mapped((step.args, step.kwargs), lambda leaf: found.append(leaf) if isinstance(leaf, kind) else None)
    return iter(found)


def free_steps(steps: Sequence[Step], touched: frozenset[int]) -> frozenset[int]:
    """Positions of steps that depend on no carried value. Those `touched` read or write carried buffers."""
    bound = set(touched)
    for position, step in enumerate(steps):
        if any(isinstance(leaf, Carried) or leaf.position in bound for leaf in leaves([step], Inside | Carried)):
            bound.add(position)
    return frozenset(range(len(steps))) - bound


def depended_on(steps: Sequence[Step], needed: set[int]) -> set[int]:
    """Positions of steps that what is needed depends on, in any iteration."""
    live, open_ = set(needed), list(needed)
    while open_:
        for leaf in leaves([steps[open_.pop()]], Inside | Carried):
            if leaf.position not in live:
                live.add(leaf.position)
                open_.append(leaf.position)
    return live


def renumbered(step: Step, order: dict[int, int]) -> Step:
    def leaf(one: Any) -> Any:
        return Inside(order[one.position]) if isinstance(one, Inside) else one

    return Step(step.nodes, mapped(step.args, leaf), mapped(step.kwargs, leaf))


def _is_heavy(node: Node) -> bool:
    """Whether an operator does more than a few operations for each element."""
    return getattr(node.target, "overloadpacket", None) in flop_registry


def _reads_item(node: Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[0], Node)


# ---- tensors that are there, one for each iteration ----------------------------------------------------------------------


def _with_stacks(writer: Writer, repeat: Repeat) -> Repeat:
    """The repeat with rows of one tensor in the place of nodes that are others in each iteration. Raises Refused."""
    made = dict[tuple[Node, ...], Lifted]()
    copied = 0

    def leaf(one: Any) -> Any:
        nonlocal copied
        nodes = one.nodes if isinstance(one, Each) else _from_tuple(one)
        if nodes is None:
            return one
        if nodes not in made:
            _check_kinds(nodes)
            rows = _unbound(writer, nodes)
            copied += 0 if rows is not None else sum(map(_bytes, nodes))
            if copied > MOST_STACKED:
                raise Refused(f"{nodes[0].name} and its like would be copied to be rows of one tensor")
            made[nodes] = _rows_of(writer, nodes, rows)
        return made[nodes]

    steps = [Step(step.nodes, mapped(step.args, leaf), mapped(step.kwargs, leaf)) for step in repeat.steps]
    return replace(repeat, steps=tuple(steps))


def _from_tuple(leaf: Any) -> tuple[Node, ...] | None:
    """The nodes that read items of a tuple."""
    source = leaf.step.args[0] if isinstance(leaf, Lifted) else None
    return leaf.step.nodes if isinstance(source, Node) and not isinstance(example(source), torch.Tensor) else None


def _check_kinds(nodes: Sequence[Node]) -> None:
    """Raises Refused unless nodes are tensors of one kind."""
    values = [example(node) for node in nodes]
    if (
        not all(isinstance(one, torch.Tensor) for one in values)
        or len({(one.shape, one.dtype, one.device) for one in values}) > 1
    ):
        raise Refused(f"{nodes[0].name} and its like are no tensors of one kind")


def _rows_of(writer: Writer, nodes: tuple[Node, ...], rows: Node | None) -> Lifted:
    rows = rows or writer.call(torch.stack, list(nodes))
    found = tuple(writer.call(operator.getitem, rows, k) for k in range(len(nodes)))
    return Lifted(Step(found, (rows, Column(tuple(range(len(nodes))))), {}))


def _unbound(writer: Writer, nodes: tuple[Node, ...]) -> Node | None:
    """The tensor whose rows the nodes are, by `unbind`; None for others."""
    source = nodes[0].args[0] if nodes[0].args else None
    numbers = [node.args[1] if len(node.args) > 1 else None for node in nodes]
    unpacked = all(node.target is operator.getitem and node.args[0] is source for node in nodes)
    if not unpacked or not isinstance(source, Node) or source.target not in (torch.unbind, "unbind"):
        return None
    first = numbers[0]
    if type(first) is not int or first < 0 or numbers != list(range(first, first + len(nodes))):
        return None
    base: Any = source.args[0]
    dim = source.args[1] if len(source.args) > 1 else source.kwargs.get("dim", 0)
    return writer.call(operator.getitem, writer.method("movedim", base, dim, 0), slice(first, first + len(nodes)))
