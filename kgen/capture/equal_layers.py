"""Equal layers of Dynamo's graph as calls of one function, which is then traced, scheduled and built once.

The function is the body of `invoke_subgraph`, the operator that `torch.compiler.nested_compile_region` makes, too. It has to be
one: its results come from its operands alone, in memory of their own. So a trial run of the body, on tensors without data,
looks at every operator that PyTorch comes to: none may write into what the body is given, draw random numbers, or have sizes
that depend on data.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from kgen.capture import torch_adapter
from kgen.capture.batching import changes_gradients, changes_more, too_dynamic
from kgen.capture.equal_blocks import Blocks, bytes_of, candidates, kind_of
from kgen.capture.gradient_paths import are_together, differentiated
from kgen.capture.regions import Refused, example, tensors_of
from kgen.capture.repeats import LEAST
from kgen.capture.segments import segments_of
from kgen.capture.torch_adapter import WRITES_NOTHING, Snapshot, storage_of
from kgen.capture.trial import tried
from kgen.verdict import Outcome, Reason, Verdict

__all__ = ["share_large_layers", "share_layers"]

# A block of fewer calls is no layer: calling it would take as long as it runs.
LEAST_CALLS = 8
# Fewer layers compile fast enough one by one.
LEAST_LAYERS = 6
# Floating-point operations of a layer's forward on each thread, for inference and for training, from which on a call of it is
# less than two hundredths of its time (docs/decisions/0039-layers-shared-by-default.md).
LEAST_WORK = (32 << 20, 256 << 20)
# So many kinds of blocks are looked at.
KINDS = 16


def share_layers(gm: GraphModule, layouts: bool = False, least: int = 0) -> list[Verdict]:
    """Makes equal blocks calls of one, in place. With `layouts`, blocks with convolutions stay: what is around them chooses.
    Blocks of fewer than `least` floating-point operations stay, too."""
    verdicts, refused = list[Verdict](), set[Node]()
    if not _may_share(gm):
        return verdicts
    for _ in range(KINDS):
        blocks = next(_blocks_of(gm, refused), None)
        if blocks is None:
            break
        try:
            verdicts.append(_share(gm, blocks, layouts, least))
        except Refused as cause:
            refused.update(itertools.chain(*blocks.calls))
            verdicts.append(_refusal(blocks, str(cause)))
        except _Small as cause:
            refused.update(itertools.chain(*blocks.calls))
            verdicts.append(_unprofitable(blocks, str(cause)))
    verdicts += _nearly_equal(gm, refused)
    if any(one.outcome is Outcome.SHARED for one in verdicts):
        gm.graph.lint()
        gm.recompile()
    return verdicts


def share_large_layers(gm: GraphModule, layouts: bool = False) -> list[Verdict]:
    """Makes equal blocks calls of one where each works so long that a call of it is nothing, and all calls can be made without
    wrappers around them; otherwise leaves the graph as it was. The note on layers that differ is for who has asked."""
    blocks = next(_blocks_of(gm, set()), None) if _may_share(gm) else None
    if blocks is None or len(blocks.calls) < LEAST_LAYERS:
        return []
    if torch_adapter.uses_cuda(gm):
        return [_unprofitable(blocks, "on a GPU, calls would cost more than they save a step")]
    least = LEAST_WORK[_is_trained(gm)] * torch.get_num_threads()
    before, verdicts = Snapshot(gm), share_layers(gm, layouts, least)
    if any(one.outcome is Outcome.SHARED for one in verdicts) and not segments_of(gm):
        gm.graph = before.restored()
        gm.recompile()
        return [_unprofitable(blocks, "calls would be nodes of one graph, which compiles no sooner")]
    return [one for one in verdicts if one.outcome is not Outcome.ILLEGAL]


def _is_trained(gm: GraphModule) -> bool:
    (output,) = gm.graph.find_nodes(op="output")
    return any(one.requires_grad for node in output.all_input_nodes for one in tensors_of(node.meta.get("example_value")))


def _unprofitable(blocks: Blocks, detail: str) -> Verdict:
    return Verdict(*_names(blocks), Outcome.UNPROFITABLE, Reason.SMALL_LAYERS, detail=detail)


def _may_share(gm: GraphModule) -> bool:
    return not too_dynamic(gm) and not any(map(changes_gradients, gm.graph.nodes))


def _blocks_of(gm: GraphModule, refused: set[Node]) -> Iterator[Blocks]:
    return (one for one in candidates(gm.graph, LEAST_CALLS) if refused.isdisjoint(one.calls[0]))


def _names(blocks: Blocks) -> tuple[str, str]:
    return blocks.calls[0][0].name, blocks.calls[-1][-1].name


def _refusal(blocks: Blocks, detail: str) -> Verdict:
    return Verdict(*_names(blocks), Outcome.ILLEGAL, Reason.LAYERS_DIFFER, detail=detail)


def _nearly_equal(gm: GraphModule, refused: set[Node]) -> list[Verdict]:
    """A note on blocks that are equal but for constants."""
    for blocks in candidates(gm.graph, LEAST_CALLS, constants=False):
        rows = zip(*blocks.calls, strict=True) if refused.isdisjoint(blocks.calls[0]) else ()
        differ = next((row[0] for row in rows if len(set(map(_constants, row))) > 1), None)
        if differ is not None:
            return [_refusal(blocks, f"{differ.name} has other constants in other blocks")]
    return []


def _constants(node: Node) -> str:
    return repr([one for one in pytree.tree_leaves((node.args, node.kwargs)) if not isinstance(one, Node)])


class _Small(Exception):
    """Why layers are too small to be called."""


def _share(gm: GraphModule, blocks: Blocks, layouts: bool, least: int) -> Verdict:
    """Raises Refused or _Small, and leaves the graph as it was."""
    blocks = _with_gradients(blocks, differentiated(gm))
    names, body = _names(blocks), blocks.body()
    work = _Proof(blocks, body, layouts).check()
    if work < least:
        raise _Small(f"{len(blocks.calls)} layers of {work:,} floating-point operations each; {least:,} are worth a call")
    carried = sum(bytes_of(example(blocks.calls[0][position])) for position in blocks.results)
    _Calls(gm, blocks, body).write()
    detail = (
        f"{len(blocks.calls)} calls of one body of {len(blocks.calls[0])} operators; no kernel reaches across the seams, "
        f"so {carried:,} bytes of each call's results go through memory"
    )
    return Verdict(*names, Outcome.SHARED, Reason.EQUAL_LAYERS, detail=detail)


def _with_gradients(blocks: Blocks, found: set[Node]) -> Blocks:
    """The blocks in front of the first one of which only some results have gradients. Raises Refused."""
    apart = (k for k, block in enumerate(blocks.calls) if not are_together((block[p] for p in blocks.results), found))
    count = next(apart, len(blocks.calls))
    if count < LEAST:
        raise Refused("some results of a block have no gradient")
    return blocks if count == len(blocks.calls) else _with_gradients(Blocks(blocks.calls[:count]), found)


# ---- the proof ---------------------------------------------------------------------------------------------------------


class _Proof:
    """That a body is a function of its operands."""

    def __init__(self, blocks: Blocks, body: GraphModule, layouts: bool) -> None:
        self.blocks, self.body, self.layouts = blocks, body, layouts
        self.given = [example(column[0]) for column in blocks.operands]

    def check(self) -> int:
        """Raises Refused. Floating-point operations of the body."""
        for node in itertools.chain(*self.blocks.calls):
            example(node)
            if changes_more(node):
                raise Refused(f"{node.name} changes what other operators do")
        if not self.blocks.results:
            raise Refused("nobody needs the results")
        if not all(isinstance(one, torch.Tensor) for one in self.given):
            raise Refused("an operand is no tensor")
        self._check_operands()
        results, trial = tried(self.body, self.given, self.layouts)
        self._check_memory(results)
        return trial.work

    def _check_operands(self) -> None:
        """Operands are different tensors: a body that is traced with one tensor for two of them would read only one."""
        for given in zip(*self.blocks.operands, strict=True):
            values = [example(one) for one in given]
            if len(set(map(storage_of, values))) < len(values):
                raise Refused(f"{given[0].name} and another operand share memory in one of the blocks")

    def _check_memory(self, results: Sequence[Any]) -> None:
        """Each result has memory of its own: who writes into one of them writes into no other tensor."""
        taken = {storage_of(one) for one in self.given}
        for position, result in zip(self.blocks.results, results, strict=True):
            node = self.blocks.calls[0][position]
            if not isinstance(result, torch.Tensor):
                raise Refused(f"{node.name} is needed outside of the block, and is no tensor")
            if storage_of(result) in taken:
                raise Refused(f"{node.name} shares memory with an operand or with another result")
            taken.add(storage_of(result))
            if _sizes(result) != _sizes(example(node)):
                raise Refused(f"{node.name} has other strides without gradients")


def _sizes(value: torch.Tensor) -> Any:
    return kind_of(value.detach())


# ---- the rewrite -------------------------------------------------------------------------------------------------------


class _Calls:
    """Calls of a body in the place of blocks."""

    def __init__(self, gm: GraphModule, blocks: Blocks, body: GraphModule) -> None:
        self.gm, self.graph, self.blocks = gm, gm.graph, blocks
        self.name = next(name for k in itertools.count() if not hasattr(gm, name := f"equal_layers_{k}"))
        self.body = body
        self.made = dict[Node, Node]()

    def write(self) -> None:
        self.body.meta[WRITES_NOTHING] = True
        setattr(self.gm, self.name, self.body)
        with self.graph.inserting_before(self.blocks.calls[0][0]):
            body = self.graph.get_attr(self.name)
        for number, block in enumerate(self.blocks.calls):
            self._call(body, number, block)
        for block in reversed(self.blocks.calls):
            for node in reversed(block):
                self.graph.erase_node(node)

    def _call(self, body: Node, number: int, block: Sequence[Node]) -> None:
        """Writes the call behind the block, where all that the block reads is there."""
        given = [self.made.get(column[number], column[number]) for column in self.blocks.operands]
        results = [block[position] for position in self.blocks.results]
        with self.graph.inserting_before(block[-1].next):
            call = self.graph.call_function(invoke_subgraph, (body, self.name, *given))
            call.meta = self._meta(block[-1], tuple(one.meta["example_value"] for one in results))
            for k, old in enumerate(results):
                self._replace(old, self.graph.call_function(operator.getitem, (call, k)), set(block))

    def _replace(self, old: Node, new: Node, inside: set[Node]) -> None:
        """Puts a result in the place of a call of the block, for all but the block's own calls."""
        new.meta = self._meta(old, old.meta["example_value"])
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)
        self.made[old] = new

    @staticmethod
    def _meta(node: Node, value: Any) -> dict[str, Any]:
        return {**node.meta, "example_value": value}
