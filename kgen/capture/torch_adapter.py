"""Every private call into torch that kgen makes while capturing a graph, written for torch 2.11 to 2.13.

The contract with AOTAutograd that this file keeps:

- compiled graphs are *boxed*: they take one list and clear it, so that saved tensors die at their last use;
- the strides of forward outputs are reported through `TracingContext.output_strides`: AOTAutograd restrides the tensors that
  it saves for backward by them, and gives the backward example inputs with those strides (`_settle_strides`);
- outputs that a user sees have eager's strides, which are those that tracing computed (`GraphInfo.user_visible`);
- mutated inputs of an inference graph are written inside the graph (`keep_inference_input_mutations`);
- effect tokens are created inside the graph, not passed in: AOTAutograd's cache does not rebuild the wrapper for tokens.
"""

from __future__ import annotations

import itertools
import logging
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import get_debug_dir
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, InputMutationAOTOutput, SyntheticBaseAOTInput
from torch._functorch._aot_autograd.schemas import OutputType, SerializableAOTDispatchCompiler, SubclassCreationMeta
from torch._functorch.partitioners import OpTypes, min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._higher_order_ops.scan import ScanAutogradImpl, scan_op
from torch._logging._internal import trace_log
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import config as compiler_config
from torch.fx import GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

from kgen.capture import aot_cache, decompositions, quantised
from kgen.capture.aot_cache import CachedGraph, CompiledGraph
from kgen.capture.as_strided import replace_as_strided
from kgen.capture.freeze import Freezing
from kgen.capture.operators import NO_PATHS, Paths, paths_of
from kgen.counters import counters
from kgen.unusable import Memo

if TYPE_CHECKING:
    from kgen.failures import Failure
    from kgen.verdict import Verdict

__all__ = [
    "GraphInfo", "Snapshot", "capture", "copied_graph", "fake_like", "fake_result", "hint", "numbers_known", "output_strides",
    "output_values", "storage_of", "stride_keys", "stride_order",
]  # fmt: skip


# What is read where it is needed, as elementwise work is, and what reduces as sums do. torch's list of what fuses and may be
# computed again lacks these: Inductor has others in their place by then.
_ALSO_FUSED: OrderedSet[Callable[..., Any]] = OrderedSet([
    torch.ops.aten.stack, torch.ops.aten.cat, torch.ops.aten.flip, torch.ops.aten.roll, torch.ops.aten.repeat,
    torch.ops.aten.unfold, torch.ops.aten.diagonal, torch.ops.aten.tril,
    torch.ops.aten.split_with_sizes, torch.ops.aten.unbind, torch.ops.aten.select_scatter, torch.ops.aten.slice_scatter,
    torch.ops.aten.embedding, torch.ops.aten.index_select,
    torch.ops.aten.linalg_vector_norm, torch.ops.aten.logsumexp, torch.ops.aten.amin, torch.ops.aten.argmin,
    torch.ops.aten.all,
])  # fmt: skip
_JOINS, _FEW_JOINED = (torch.ops.aten.stack.default, torch.ops.aten.cat.default), 8


@dataclass(frozen=True, slots=True)
class GraphInfo:
    """What AOTAutograd knows about a graph besides its nodes.

    `role` is inference, forward or backward. `static_inputs` are positions of parameters and buffers: same address at every
    call. `user_visible` are positions of outputs whose strides are fixed to those in the node's meta; the others are saved
    for backward and may have any layout, as long as `CompiledGraph.output_strides` says which. `in_inputs` are positions of
    outputs that AOTAutograd gives back as inputs or as views of them. `freezing` is what was made of the inputs that are
    promised not to change. `failures` are those of earlier attempts at the graph. `rewrites` say what was made of Dynamo's
    graph. `paths` are names in the user's modules. `memo` is what an attempt at the graph leaves to the next one.
    """

    name: str
    role: str
    static_inputs: frozenset[int]
    user_visible: frozenset[int]
    shape_env: Any = None
    freezing: Freezing | None = None
    in_inputs: frozenset[int] = frozenset()
    failures: tuple[Failure, ...] = ()
    rewrites: tuple[Verdict, ...] = ()
    paths: Paths = NO_PATHS
    memo: Memo = field(default_factory=Memo, compare=False, repr=False)

    @property
    def frozen_inputs(self) -> frozenset[int]:
        """Positions of tensors that have the same elements at each call."""
        return self.freezing.inputs if self.freezing is not None else frozenset()


Compile = Callable[[GraphModule, GraphInfo], CompiledGraph]
JointPass = Callable[[GraphModule], GraphModule]


def capture(
    gm: GraphModule, example_inputs: Sequence[Any], compile_graph: Compile, joint_pass: JointPass, cache_key: Any | None
) -> Callable[..., Any]:
    """Traces Dynamo's graph with AOTAutograd and compiles what comes out.

    `joint_pass` runs on the joint graph before it is split. `cache_key` is what AOTAutograd's cache must know about kgen
    besides its version; None leaves that cache alone."""
    paths = paths_of(gm)
    of_quantisation = quantised.decompositions_of_quantisation() if quantised.MODULE in sys.modules else {}
    compilers = {
        role: SerializableAOTDispatchCompiler(CachedGraph, partial(_compile, compile_graph, role, paths))
        for role in ("forward", "backward", "inference")
    }
    trace = aot_autograd(
        fw_compiler=compilers["forward"],
        bw_compiler=compilers["backward"],
        inference_compiler=compilers["inference"],
        partition_fn=partial(_partition, joint_pass),
        decompositions={**decompositions.TABLE, **of_quantisation},
        keep_inference_input_mutations=True,
    )
    with _aot_settings(cache_key), _trusted_bodies(gm), _gradients_apart(gm):
        return trace(gm, example_inputs)


# In the meta of a body that is known to write into none of its operands.
WRITES_NOTHING = "kgen_writes_nothing"


@contextmanager
def _trusted_bodies(gm: GraphModule) -> Iterator[None]:
    """AOTAutograd traces a body once more at each of its calls, only to see that it writes into no operand. Where that is known
    of all bodies, it need not."""
    calls = gm.graph.find_nodes(op="call_function", target=invoke_subgraph)
    trusted = bool(calls) and all(getattr(gm, call.args[0].target).meta.get(WRITES_NOTHING) for call in calls)
    before = getattr(invoke_subgraph, "_supports_training_input_mutation", None)
    if before is None or not trusted:  # torch 2.11 does not look
        yield
        return
    invoke_subgraph._supports_training_input_mutation = True
    try:
        yield
    finally:
        invoke_subgraph._supports_training_input_mutation = before


@contextmanager
def _gradients_apart(gm: GraphModule) -> Iterator[None]:
    """The gradients of what a scan has carried may be parts of one tensor, as those of a `cat` are: torch's loop backward
    refuses operands that share memory. Here each part has memory of its own. So has each result of the forward's body. The
    `tanh` that a body returns and saves for its gradient is a detached copy to torch, but the decomposition of `detach`
    leaves the same tensor."""
    if not gm.graph.find_nodes(op="call_function", target=scan_op):
        yield
        return
    forward, backward = ScanAutogradImpl.call_forward, ScanAutogradImpl.call_backward

    def call_forward(self: ScanAutogradImpl) -> Any:
        _results_apart(self.hop_partitioned_graph.fw_gm)
        return forward(self)

    def call_backward(self: ScanAutogradImpl, *gradients: torch.Tensor) -> Any:
        return backward(self, *_apart(gradients))

    ScanAutogradImpl.call_forward = call_forward  # type: ignore[method-assign]
    ScanAutogradImpl.call_backward = call_backward  # type: ignore[method-assign]
    try:
        yield
    finally:
        ScanAutogradImpl.call_forward = forward  # type: ignore[method-assign]
        ScanAutogradImpl.call_backward = backward  # type: ignore[method-assign]


def _results_apart(body: GraphModule) -> None:
    """Clones the results that share memory with an operand or with a result before them."""
    output = body.graph.output_node()
    taken = {_storage(node) for node in body.graph.find_nodes(op="placeholder")} - {None}
    results = list(output.args[0])  # type: ignore[arg-type]
    for k, result in enumerate(results):
        storage = _storage(result)
        if storage in taken:
            with body.graph.inserting_before(output):
                results[k] = body.graph.call_function(torch.ops.aten.clone.default, (result,))
            results[k].meta = dict(result.meta)
        elif storage is not None:
            taken.add(storage)
    output.args = (tuple(results),)
    body.recompile()


def _storage(node: Any) -> int | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return storage_of(value) if isinstance(value, torch.Tensor) else None


def storage_of(value: torch.Tensor) -> int:
    """Equal for tensors that share memory."""
    return value.untyped_storage()._cdata


def _apart(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors; those that share memory with one before them as copies."""
    taken = set[int]()
    for one in tensors:
        storage = storage_of(one)
        yield one.clone() if storage in taken else one
        taken.add(storage)


# ---- settings ----------------------------------------------------------------------------------------------------------

_tracing: ContextVar[bool] = ContextVar("kgen_tracing", default=False)


@contextmanager
def _aot_settings(cache_key: Any | None) -> Iterator[None]:
    functorch_settings = {
        "enable_autograd_cache": cache_key is not None and functorch_config.enable_autograd_cache,
        "bundled_autograd_cache": True,
        "unlift_effect_tokens": True,
        # donated buffers would forbid backward(retain_graph=True), which eager allows
        "donated_buffer": False,
    }
    with ExitStack() as stack:
        stack.enter_context(functorch_config.patch(functorch_settings))
        if cache_key is not None:
            stack.enter_context(_without_inductor_back_ends())
            tag = compiler_config.cache_key_tag + aot_cache.entry_tag(cache_key)
            stack.enter_context(compiler_config.patch(cache_key_tag=tag))  # type: ignore[attr-defined]
        token = _tracing.set(True)
        stack.callback(_tracing.reset, token)
        yield


# What AOTAutograd's key takes from Inductor's back ends, and what it is where there are none.
_OF_BACK_ENDS: dict[str, Any] = {
    "init_backend_registration": lambda: None, "custom_backend_passes": {}, "custom_backend_codegen_configs": {},
}  # fmt: skip


@contextmanager
def _without_inductor_back_ends() -> Iterator[None]:
    """For its key, AOTAutograd imports all of Inductor's back ends and asks for their custom passes: a second of a process, for
    what no graph of kgen goes through. Without them the key is also the same whether or not Inductor has been used before."""
    module = sys.modules.get("torch._inductor.codecache")  # AOTAutograd's cache has loaded it
    names = [name for name in _OF_BACK_ENDS if hasattr(module, name)]
    if len(names) < len(_OF_BACK_ENDS):  # another torch: as it is
        yield
        return
    before = {name: getattr(module, name) for name in names}
    try:
        for name in names:
            setattr(module, name, _OF_BACK_ENDS[name])
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def _save_lazy_backward(graph: CachedGraph) -> None:
    """A backward graph is usually compiled at the first backward call, outside of `_aot_settings`. AOTAutograd saves its
    cache entry between our return and the graph's first call: the setting that says how must last until then."""
    patch = functorch_config.patch(bundled_autograd_cache=True)
    patch.__enter__()
    graph.call_first(partial(patch.__exit__, None, None, None))


# ---- compiling one graph -----------------------------------------------------------------------------------------------


def _compile(compile_graph: Compile, role: str, paths: Paths, gm: GraphModule, example_inputs: Sequence[Any]) -> CachedGraph:
    if role != "backward":
        counters.add("aot_trace")
        _donate_nothing()
    gm = _settle_strides(gm, example_inputs)
    info = replace(_graph_info(gm, role), paths=paths)
    with _disable_current_modes():  # tracing may have left its fake mode on: loading code and constants needs real tensors
        compiled = compile_graph(gm, info)
    if role != "backward":
        _report_output_strides(compiled.output_strides)
    graph = CachedGraph(compiled, tuple(_storages(gm)) if role != "backward" else ())
    if role == "backward" and not _tracing.get():
        _save_lazy_backward(graph)
    return graph


def _storages(gm: GraphModule) -> Iterator[tuple[int, int]]:
    """Positions and lengths of arguments that AOTAutograd makes of the storage of several inputs."""
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if isinstance(node.meta.get("desc"), SyntheticBaseAOTInput) and isinstance(length := node.meta["val"].shape[0], int):
            yield position, length


def _donate_nothing() -> None:
    """`donated_buffer` is off while tracing, but AOTAutograd reads it again at run time, and takes an unset list for a
    full one."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


_numbers = itertools.count()


def _graph_info(gm: GraphModule, role: str) -> GraphInfo:
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    fake_mode = detect_fake_mode([n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"])
    outputs = output_values(gm)
    visible = len(outputs)
    # a symbolic layout chosen here could be reported to AOTAutograd by its value for one size only
    if role == "forward" and metadata is not None and not any(map(_is_symbolic, outputs)):
        visible = metadata.num_forward_returns
    static = metadata.static_input_indices if metadata is not None and role != "backward" else ()
    return GraphInfo(
        name=f"graph{next(_numbers)}_{role}",
        role=role,
        static_inputs=frozenset(static),
        user_visible=frozenset(range(visible)),
        shape_env=fake_mode.shape_env if fake_mode is not None else None,
        in_inputs=frozenset(_views_of_inputs(metadata)) if metadata is not None and role != "backward" else frozenset(),
    )


def _views_of_inputs(metadata: Any) -> Iterator[int]:
    """Positions of the outputs that are in inputs in eager: AOTAutograd makes them anew from the input and our output's
    geometry. What a tensor subclass is made of is counted otherwise."""
    if any(isinstance(made, SubclassCreationMeta) for made in metadata.subclass_fw_graph_out_meta):
        return
    kinds = (OutputType.is_input, OutputType.alias_of_input)
    for position, output in enumerate(metadata.output_info, metadata.num_mutated_inp_runtime_indices):
        if output.output_type in kinds:
            yield position


def output_values(gm: GraphModule) -> list[Any]:
    """The fake tensors, SymInts or other values that a graph returns, in order."""
    (result,) = gm.graph.find_nodes(op="output")
    return [n.meta.get("val") if isinstance(n, torch.fx.Node) else n for n in result.args[0]]


def output_strides(gm: GraphModule) -> aot_cache.Strides:
    """The strides that tracing computed for each output, None for what is no strided tensor."""
    values = output_values(gm)
    return tuple(tuple(v.stride()) if isinstance(v, torch.Tensor) and v.layout == torch.strided else None for v in values)


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and any(isinstance(s, torch.SymInt) for s in (*value.shape, *_strides(value)))


def _strides(value: torch.Tensor) -> tuple[Any, ...]:
    return tuple(value.stride()) if value.layout == torch.strided else ()


def _report_output_strides(strides: aot_cache.Strides) -> None:
    context = TracingContext.try_get()
    if context is None or context.output_strides is None:
        return
    for entry in strides:
        hints = [hint(s) for s in entry or ()]
        known = [h for h in hints if h is not None]
        context.output_strides.append(None if entry is None or len(known) < len(hints) else tuple(known))


def numbers_known(gm: GraphModule) -> tuple[float, ...]:
    """The values that the symbolic floats of Dynamo's graph have while it is traced. Tracing may take one for a constant:
    Dynamo guards it then, but AOTAutograd's key does not have it."""
    values = (node.meta.get("example_value") for node in gm.graph.nodes)
    floats = (value.node for value in values if isinstance(value, torch.SymFloat))
    return tuple(float(node.hint) for node in floats if node.has_hint())


def hint(size: Any) -> int | None:
    """The value that a size had in the example inputs; None for one that depends on data."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.hint) if size.node.has_hint() else None


def _settle_strides(gm: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
    """The graph as it is for the strides its inputs will have. AOTAutograd restrides a backward's example inputs when the
    forward chose another layout for saved tensors, but leaves the graph as traced."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    same = [_same_strides(n.meta.get("val"), v) for n, v in zip(placeholders, example_inputs, strict=True)]
    if all(same):
        return gm
    gm = replace_as_strided(gm)
    kept = {n for n, one in zip(gm.graph.find_nodes(op="placeholder"), same, strict=True) if one}
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default):
        _keep_storage(gm, node, kept)
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default  # a view of the traced layout may need a copy of the real one
    fake_mode = detect_fake_mode(example_inputs)
    with _disable_current_modes():
        FakeTensorProp(gm, mode=fake_mode).propagate_dont_convert_inputs(*example_inputs)
    gm.recompile()
    return gm


def _keep_storage(gm: GraphModule, view: torch.fx.Node, kept: Set[torch.fx.Node]) -> None:
    """Has a view by strides look at memory as tracing had it, whatever the strides of what it is a view of become. The inputs
    in `kept` have theirs; where sizes are symbols, no tensor has others."""
    source = cast(torch.fx.Node, view.args[0])
    root = _viewed(source)
    value, offset = root.meta["val"], source.meta["val"].storage_offset()
    if root in kept or root.op == "get_attr" or _is_symbolic(value) or value.storage_offset() != 0:
        return
    with gm.graph.inserting_before(view):
        settings = {"dtype": value.dtype, "device": value.device}
        memory = gm.graph.call_function(torch.ops.aten.empty_strided.default, (value.shape, value.stride()), settings)
        filled = gm.graph.call_function(torch.ops.aten.copy.default, (memory, root))
    _, size, stride, *start = view.args
    view.args = (filled, size, stride, start[0] if start and start[0] is not None else offset)


def _same_strides(traced: Any, given: Any) -> bool:
    if not isinstance(traced, torch.Tensor) or not isinstance(given, torch.Tensor):
        return True
    return stride_keys(traced) == stride_keys(given)


def stride_keys(value: torch.Tensor) -> tuple[Any, ...]:
    """Strides that compare without adding a guard."""
    return tuple(s.node.expr if isinstance(s, torch.SymInt) else s for s in _strides(value))


# ---- splitting the joint graph -----------------------------------------------------------------------------------------


def _partition(
    joint_pass: JointPass, joint_graph: GraphModule, inputs: Any, **settings: Any
) -> tuple[GraphModule, GraphModule]:
    joint_graph = joint_pass(joint_graph)
    _save_compared(joint_graph)
    _copy_overwritten(joint_graph)
    with _more_fuses():
        forward, backward = min_cut_rematerialization_partition(joint_graph, inputs, **settings)
    _count_again(forward, backward)
    return forward, backward


class _MoreOps(OpTypes):
    """What many tensors are joined to is saved: what they are made of may be a long chain, such as a recurrence."""

    def is_recomputable(self, node: torch.fx.Node) -> bool:
        many = node.target in _JOINS and len(node.all_input_nodes) > _FEW_JOINED
        return super().is_recomputable(node) and not many


@contextmanager
def _more_fuses() -> Iterator[None]:
    """The partitioner takes operators for what they are here. It saves what an operator makes that it does not know, and all
    that is computed before and behind it: of a log-sum-exp of two stacked tensors 2.4 GB in float32, where backward needs the
    400 MB that these are made of (`between models` in bench.untuned). A norm is a sum that fuses with its neighbours."""
    known = partitioners.get_default_op_list

    def with_more() -> OpTypes:
        found = {field.name: getattr(known(), field.name) for field in fields(OpTypes)}
        more = {name: found[name] | _ALSO_FUSED for name in ("fusible_ops", "recomputable_ops")}
        return _MoreOps(**found | more)

    partitioners.get_default_op_list = with_more
    try:
        yield
    finally:
        partitioners.get_default_op_list = known


# What interpolations make of counts, to find the points that they read; more steps than this are no interpolation's.
_OF_COUNTS = frozenset({
    torch.ops.aten._to_copy, torch.ops.aten.add, torch.ops.aten.sub, torch.ops.aten.mul, torch.ops.aten.div,
    torch.ops.aten.floor,
    torch.ops.aten.clamp, torch.ops.aten.clamp_min, torch.ops.aten.clamp_max, torch.ops.aten.minimum, torch.ops.aten.maximum,
    torch.ops.aten.remainder, torch.ops.aten.unsqueeze, torch.ops.aten.view,
})  # fmt: skip
_MOST_STEPS = 24


def _count_again(forward: GraphModule, backward: GraphModule) -> None:
    """Backward counts again what forward has saved of that, and what is made of it point by point: numbers from memory could
    be any, and the gradient of ``x[arange(n), labels]``, or of an interpolation's nearest points, would be a scatter."""
    counted: dict[str, list[torch.fx.Node]] = {}
    for node in forward.graph.nodes:
        if (steps := _count_steps(node, counted)) is not None:
            counted[node.name] = steps
    saved = [node for node in backward.graph.find_nodes(op="placeholder") if node.name in counted]
    again: dict[torch.fx.Node, torch.fx.Node] = {}
    first = _first_call(backward)
    for node in saved:
        with backward.graph.inserting_before(first):
            for step in counted[node.name]:
                if step not in again:
                    again[step] = backward.graph.node_copy(step, again.__getitem__)
            node.replace_all_uses_with(again[counted[node.name][-1]])
    if saved:
        backward.recompile()


def _count_steps(node: torch.fx.Node, counted: dict[str, list[torch.fx.Node]]) -> list[torch.fx.Node] | None:
    """What makes a count, in order, the node last; None of other nodes. `counted` has the nodes in front of it."""
    packet, before = getattr(node.target, "overloadpacket", None), node.all_input_nodes
    if not before:
        return [node] if packet is torch.ops.aten.arange else None
    if packet not in _OF_COUNTS or any(one.name not in counted for one in before):
        return None
    steps = [*dict.fromkeys(step for one in before for step in counted[one.name]), node]
    return steps if len(steps) <= _MOST_STEPS else None


# Finite numbers from here on are no elements of tensors.
_HUGE = 2.0**20


def _save_compared(joint_graph: GraphModule) -> None:
    """Backward gets the operands of ``==`` from memory where it needs them. The gradient of amax divides by the number of
    elements that equal the maximum. Recomputed from rounded tensors, elements would equal none that forward has found. Numbers
    that only clamp have no such neighbours."""
    for node in joint_graph.graph.nodes:
        if node.target in (torch.ops.aten.eq.Tensor, torch.ops.aten.ne.Tensor):
            operands = [*map(_viewed, node.all_input_nodes)]
            for operand in operands if not any(_is_huge(joint_graph, one) for one in operands) else ():
                operand.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _is_huge(gm: GraphModule, node: torch.fx.Node) -> bool:
    """Whether a node is one number that stands for an infinity, as the lowest one of a type does."""
    while node.target in (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten._to_copy.default):
        node = node.all_input_nodes[0]
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(gm)
        with _disable_current_modes():
            numbers = [value.item()] if type(value) is torch.Tensor and value.numel() == 1 else []  # no fake one
    else:
        made = node.target in (torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default)
        numbers = [one for one in node.args if isinstance(one, int | float)] if made else []
    return any(abs(one) >= _HUGE for one in numbers)


def _copy_overwritten(joint_graph: GraphModule) -> None:
    """Backward gets a copy of an input that the graph overwrites, if it needs the old contents: autograd refuses a saved tensor
    that has changed. Eager may need no copy, where it saves a result from which the partitioner would compute nothing."""
    for node in _overwritten(joint_graph):
        with joint_graph.graph.inserting_before(_first_call(joint_graph)):
            copy = joint_graph.graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta.update(val=fake_result(copy), recompute=CheckpointPolicy.MUST_SAVE)
        node.replace_all_uses_with(copy, delete_user_cb=partial(_reads_old, node, copy))


def _overwritten(joint_graph: GraphModule) -> list[torch.fx.Node]:
    """Inputs that the graph overwrites: AOTAutograd writes some after the call, and lets the graph write others itself. Nobody
    checks the latter, which a backward that computes an intermediate result again would read with their new contents."""
    made = joint_graph.graph.output_node().meta.get("desc") or ()
    changed = {one.mutated_input for one in made if isinstance(one, InputMutationAOTOutput)}
    needed = _needed_by_gradients(joint_graph)
    inputs = joint_graph.graph.find_nodes(op="placeholder")
    return [n for n in inputs if n.meta.get("desc") in changed or (n in needed and any(_writes(u, n) for u in n.users))]


def _needed_by_gradients(joint_graph: GraphModule) -> set[torch.fx.Node]:
    output = joint_graph.graph.output_node()
    outputs = cast(Sequence[torch.fx.Node | None], output.args[0])
    made = output.meta.get("desc") or ()
    left = [n for n, one in zip(outputs, made, strict=False) if isinstance(one, GradAOTOutput) and n is not None]
    needed = set[torch.fx.Node]()
    while left:
        node = left.pop()
        if node not in needed:
            needed.add(node)
            left += node.all_input_nodes
    return needed


def _reads_old(node: torch.fx.Node, copy: torch.fx.Node, user: torch.fx.Node) -> bool:
    return user is not copy and not _writes(user, node)


def _writes(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    return user.target is torch.ops.aten.copy_.default and user.args[0] is node


def _first_call(gm: GraphModule) -> torch.fx.Node:
    return next(node for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr"))


def _viewed(node: torch.fx.Node) -> torch.fx.Node:
    """What the node is a view of, through all views."""
    while getattr(node.target, "is_view", False) and isinstance(node.args[0], torch.fx.Node):
        node = node.args[0]
    return node


def copied_graph(gm: GraphModule) -> torch.fx.Graph:
    """The same nodes with the same names; meta values are shared, the dictionaries that hold them are not."""
    return Snapshot(gm).restored()


class Snapshot:
    """A graph as it was. Taking one makes no nodes: most are taken in case a pass fails, and few do."""

    def __init__(self, gm: GraphModule) -> None:
        self._nodes = [(n, n.op, n.target, n.args, n.kwargs, n.name, n.type, n.meta.copy()) for n in gm.graph.nodes]

    def restored(self) -> torch.fx.Graph:
        """New nodes in a graph of their own, whatever has become of the old ones."""
        graph, made = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
        for node, op, target, args, kwargs, name, kind, meta in self._nodes:
            given = torch.fx.map_arg((args, kwargs), made.__getitem__)
            made[node] = new = graph.create_node(op, target, *given, name, kind)
            new.meta = meta.copy()
            if hasattr(node, "_dynamo_source"):  # AOTAutograd asks for it
                new._dynamo_source = node._dynamo_source
        return graph


# ---- writing nodes -----------------------------------------------------------------------------------------------------


def fake_result(node: torch.fx.Node) -> Any:
    """The meta value of a call that a rewrite has just written."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with detect_fake_mode(_leaves((args, kwargs))) or nullcontext():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def fake_mode_of(node: torch.fx.Node) -> AbstractContextManager[Any]:
    """The mode of the fake tensors that a node reads."""
    values = [arg.meta.get("val") for arg in node.all_input_nodes]
    return detect_fake_mode(_leaves(values)) or nullcontext()


def own_fake_mode(values: Any) -> AbstractContextManager[Any]:
    """The mode in which a tree's fake tensors were made: Dynamo's, while the current one is AOTAutograd's."""
    return next((one.fake_mode for one in _leaves(values) if isinstance(one, FakeTensor)), None) or nullcontext()


@contextmanager
def batching_rules_only() -> Iterator[None]:
    """Under vmap, operators without a batching rule raise: a batch is not made of calls one by one. Nothing is logged."""
    log, functorch = logging.getLogger("torch._subclasses.fake_tensor"), cast(Any, torch._C._functorch)
    disabled, fallback = log.disabled, functorch._is_vmap_fallback_enabled()
    log.disabled = True
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        log.disabled = disabled
        functorch._set_vmap_fallback_enabled(fallback)


# A batch makes nothing of more bytes, unless what goes into it is nearly as large: a loop may be there to save memory.
LARGEST_BATCH = 64 << 20


def is_too_large(made: int, given: int) -> bool:
    """Whether a value of all iterations is too large to be made at once, of the largest tensor that is there anyway."""
    return made > max(LARGEST_BATCH, 4 * given)


def fake_like(value: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    with detect_fake_mode([value]) or nullcontext():
        return torch.empty(tuple(sizes), dtype=dtype, device=value.device)


def debug_folder() -> str | None:
    """Where TORCH_COMPILE_DEBUG=1 keeps what a compilation leaves, in a folder of kgen's; None without it."""
    if os.environ.get("TORCH_COMPILE_DEBUG") != "1":
        return None
    return str(Path(get_debug_dir()) / "kgen")


_LOGGERS = tuple(logging.getLogger(name) for name in ("kgen", "kgen.stages", "kgen.fusion", "kgen.output_code"))


def is_traced() -> bool:
    """Whether somebody keeps torch's structured trace, or listens to one of the loggers that say what it has."""
    _, _, fusion, code = _LOGGERS
    return bool(trace_log.handlers) or fusion.isEnabledFor(logging.INFO) or code.isEnabledFor(logging.DEBUG)


def is_asked_for() -> bool:
    """Whether a trace is kept, or one of kgen's loggers was switched on by its name: then no graph comes from a cache, which
    would have nothing to show. A program that logs all that anybody says has not asked for graphs."""
    named = any(logging.NOTSET < one.level <= logging.INFO for one in _LOGGERS)
    return named or any(getattr(one, "root_dir", "") is not None for one in trace_log.handlers)


def uses_cuda(gm: GraphModule) -> bool:
    """Whether some tensor of the graph, AOTAutograd's or Dynamo's, is on a CUDA device."""
    values = (value for node in gm.graph.nodes for value in _leaves(node.meta.get("val", node.meta.get("example_value"))))
    return any(map(is_cuda, values))


def is_cuda(value: object) -> bool:
    """Whether a value is a tensor on a CUDA device."""
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def has_right_scan() -> bool:
    """Whether gradients of this torch's `scan` are right. Those of 2.11 are not: a recurrent net's weights get about half of
    theirs, without a compiler, too."""
    return bool(torch.torch_version.TorchVersion(torch.__version__) >= "2.13")


def gpu_facts(device: torch.device) -> dict[str, int]:
    """Of a CUDA device: `arch`, its compute capability as in sm_90; `compute_units`; `shared`, bytes of shared memory that a
    program can have; its `clock`, and the bytes that its `memory` moves, both a second at most."""
    found = torch.cuda.get_device_properties(device)
    return {
        "arch": found.major * 10 + found.minor,
        "compute_units": found.multi_processor_count,
        "shared": getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block),
        "clock": found.clock_rate * 1000,  # both clocks are given in kHz; memory moves data twice a cycle
        "memory": 2 * found.memory_clock_rate * 1000 * found.memory_bus_width // 8,
    }


def stride_order(value: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from outermost to innermost; row-major when strides are symbolic or overlap."""
    rows = tuple(range(value.dim()))
    strides = value.stride()
    if _is_symbolic(value) or 0 in strides:
        return rows
    return tuple(sorted(rows, key=lambda d: -strides[d]))


def _leaves(tree: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(tree)
