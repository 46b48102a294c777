"""The operators of aten graphs: their names, what they do beside computing their results, where the user's modules call them,
and which of them a loop computes.

A loop node computes its own operator, and those that lowering wrote into its value instead of storing. Kernel names, headers
and `explain` show them, and `require_fused` and `forbid_fused` look for them: without the inlined ones, a relu in front of a
reduction would be in no kernel at all.

Dynamo says where each input of its graph came from, as a chain of `Source` objects (an attribute of an item of an attribute of
a local variable), and which modules were entered for each node. AOTAutograd says of each input of its graphs which one of
Dynamo's it is. It keeps the modules of a node, in backward those of the node that it is the gradient of. So
``layers.3.mlp.up.weight`` is the name of what AOTAutograd calls ``primals_14``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import BufferAOTInput, ParamAOTInput, PlainAOTInput, SubclassGetAttrAOTInput
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from kgen.errors import UnknownOperator
from kgen.ir import nodes as ir
from kgen.ir.nodes import Origin
from kgen.option_names import near
from kgen.verdict import DEMANDS, OperatorCall

# Arguments of these types say by their values whether two calls are equal; so do floats but for the sign of a zero.
PLAIN = (int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
# Operators whose results hold whatever was in memory.
_EMPTY = (
    "aten::empty",
    "aten::_empty",
    "prims::empty",
    "aten::new_empty",
    "aten::resize",
    "aten::rand",
    "aten::bernoulli",
    "aten::multinomial",
    "aten::normal",
)
# Views where the strides allow it, else copies.
_MAY_COPY = frozenset(f"aten::{n}" for n in ("contiguous", "flatten", "reshape", "reshape_as", "to", "type_as"))
# Views whose schemas do not say so, for autograd's sake.
_UNANNOTATED = frozenset(f"aten::{n}" for n in ("_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"))
# What a module keeps its children and tensors in: no part of a path.
_CONTAINERS = ("_modules", "_parameters", "_buffers")


def check_names(where: str, names: Iterable[str]) -> None:
    """Raises UnknownOperator for a name that torch.ops does not have, with or without an overload (``aten.mm``)."""
    for name in names:
        if not _exists(name):
            known = {one.partition(".")[0].replace("::", ".") for one in torch._C._dispatch_get_all_op_names()}
            raise UnknownOperator(where=where, operator=name, near=near(name, known))


def _exists(name: str) -> bool:
    found: Any = torch.ops
    for part in name.split(".") if "." in name else ("higher_order", name):
        found = getattr(found, part, None)
    return found is not None


def is_pure(target: Any) -> bool:
    """Whether an operator of torch's makes its results of its arguments alone, and does nothing else."""
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims") or target._schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and not target._schema.name.startswith(_EMPTY)


def is_view(target: Any) -> bool:
    """Whether the operator's result may share the storage of its first argument, without a write to it."""
    schema = getattr(target, "_schema", None)
    return schema is not None and (schema.name in _UNANNOTATED or bool(getattr(target, "is_view", False)))


def owner_of(node: Any) -> Any:
    """The FX node at the root of a chain of views: in eager, the tensor that owns the storage of `node`."""
    while (source := _viewed(node)) is not None:
        node = source
    return node


def _viewed(node: Any) -> Any | None:
    """The argument in whose storage the node's result is."""
    if node.op != "call_function" or not node.args:
        return None
    target, source = node.target, node.args[0]
    if getattr(target, "__name__", "") == "getitem" and is_view(getattr(source, "target", None)):
        return source.args[0]
    name = getattr(getattr(target, "_schema", None), "name", "")
    shares = is_view(target) and (name not in _MAY_COPY or _same_storage(node, source))
    return source if shares or name == "aten::copy_" else None


def _same_storage(node: Any, source: Any) -> bool:
    """Whether tracing found the two in one storage."""
    pair = node.meta.get("val"), source.meta.get("val")
    if not all(isinstance(value, torch.Tensor) and value.layout == torch.strided for value in pair):
        return False
    mine, below = (value.untyped_storage()._cdata for value in pair)
    return bool(mine == below)


def put_in_place(new: Node, old: Node) -> None:
    """Gives a call the readers and the notes of another one, which is erased."""
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def operator_name(target: Any) -> str:
    """``aten.add.Tensor`` for an OpOverload; the qualified Python name for anything else."""
    namespace = getattr(target, "namespace", None)
    if namespace and hasattr(target, "_overloadname"):
        packet = target._schema.name.split("::")[1]
        return f"{namespace}.{packet}.{target._overloadname}"
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', str(target))}"


# ---- origins -------------------------------------------------------------------------------------------------------------


# In a node's meta: which call it is.
_CALL = "kgen_call"


def name_calls(gm: GraphModule, paths: Mapping[str, str]) -> None:
    """Notes at each call of an operator which one it is; `paths` has those of modules, by names of nodes. What users demand of
    fusion is told of all calls."""
    numbers: Counter[str] = Counter()
    made = []
    for node in gm.graph.nodes:
        if node.op == "call_function":
            name = operator_name(node.target)
            packet = name.rpartition(".")[0]
            node.meta[_CALL] = OperatorCall(name, paths.get(node.name, ""), source_line(node), numbers[packet])
            numbers[packet] += 1
            made.append(node.meta[_CALL])
    for demand in DEMANDS.get():
        demand.look_at(made)


def call_of(node: Node) -> OperatorCall:
    """Which call of an operator the node is."""
    noted = node.meta.get(_CALL)
    return noted if isinstance(noted, OperatorCall) else OperatorCall(operator_name(node.target), line=source_line(node))


def origin_of(node: Node) -> Origin:
    """What a node of the graph is to kernels and reports."""
    if node.op != "call_function":
        return Origin((), node.name, source_line(node))
    call = call_of(node)
    return Origin((call,), node.name, call.line)


def source_line(node: Node) -> str:
    """The user's line that the node came from, as ``file:line code``."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.strip().splitlines()]
    for at, line in reversed(list(enumerate(lines))):
        if line.startswith("File "):
            parts = line.split(",")
            file = parts[0].removeprefix("File ").strip('"').rsplit("/", 1)[-1]
            number = parts[1].strip().removeprefix("line ") if len(parts) > 1 else "?"
            code = lines[at + 1] if at + 1 < len(lines) else ""
            return f"{file}:{number} {code}"
    return ""


def trace_origins(gm: GraphModule, graph: ir.Graph) -> ir.Graph:
    """Completes the origins of `graph`'s loop nodes, lowered from `gm`, in program order."""
    nodes = {n.name: n for n in gm.graph.nodes}
    order = {n: k for k, n in enumerate(gm.graph.nodes)}
    stored = {nodes[n.origin.name] for n in graph.nodes if n.origin.name in nodes}
    calls = {n.origin.name for n in graph.nodes if not isinstance(n, _LOOPS)}
    read: dict[Node, tuple[tuple[str, str], ...]] = {}
    reached: dict[Node, dict[Node, None]] = {}  # hundreds of nodes come of one foreach operator, which reaches as many
    done: dict[Node, tuple[OperatorCall, ...]] = {}
    for position, node in enumerate(graph.nodes):
        source = nodes.get(node.origin.name)
        if source is None:
            continue
        if source not in reached:
            reached[source] = _reached(source, stored)
            read[source] = _parameters(reached[source], graph.paths)
        if not isinstance(node, _LOOPS):
            graph.nodes[position] = replace(node, origin=replace(node.origin, parameters=read[source]))
            continue
        if source not in done:
            found = _inlined(reached[source])
            if source.name not in calls or not found:  # a loop that only prepares a call's operand does not do the call
                found.add(source)
            done[source] = tuple(call_of(n) for n in sorted(found, key=order.__getitem__) if n.op == "call_function")
        graph.nodes[position] = replace(node, origin=replace(node.origin, calls=done[source], parameters=read[source]))
    return graph


_LOOPS = (ir.Pointwise, ir.Reduction, ir.Scan, ir.Scatter)


def _parameters(reached: Iterable[Node], paths: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The inputs with a path among what a node of the loop IR reads."""
    return tuple((one.name, paths[one.name]) for one in reached if one.op == "placeholder" and one.name in paths)


def computing_nodes(gm: GraphModule, graph: ir.Graph, origins: Iterable[ir.Origin]) -> list[Node]:
    """The calls of `gm` that kernels with these origins compute, in program order, without views: library calls could compute
    the rest instead."""
    nodes = {n.name: n for n in gm.graph.nodes}
    stored = {nodes[n.origin.name] for n in graph.nodes if n.origin.name in nodes}
    found: set[Node] = set()
    for origin in origins:
        source = nodes.get(origin.name)
        if source is not None:
            found |= _inlined(_reached(source, stored))
            # not where a loop only prepares the operand of a call
            found.update([source] if operator_name(source.target) in origin.operators else [])
    return [n for n in gm.graph.nodes if n in found and isinstance(n.target, torch._ops.OpOverload) and not is_view(n.target)]


def _inlined(reached: Iterable[Node]) -> set[Node]:
    """The operators among what a node reaches, views and constants left out."""
    return {
        node
        for node in reached
        if isinstance(node.target, torch._ops.OpOverload) and node.all_input_nodes and not is_view(node.target)
    }


def _reached(source: Node, stored: set[Node]) -> dict[Node, None]:
    """What is between `source` and the stored values that it reads, inputs of the graph included."""
    found: dict[Node, None] = {}
    stack = source.all_input_nodes[::-1]
    while stack:
        node = stack.pop()
        if node is not source and node not in found and node not in stored:
            found[node] = None
            stack += node.all_input_nodes[::-1]
    return found


_QUANTISED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


_RESIZES = "inductor::resize_storage_bytes_"


def makes_quantised(gm: GraphModule) -> bool:
    """Whether a call of the graph makes a tensor of a quantised type. Tracing takes it for a tensor of floats, so nothing that
    is known of it, or of what is computed of it, is true."""
    given = (value for n in gm.graph.nodes if n.op == "call_function" for value in (*n.args, *n.kwargs.values()))
    return any(isinstance(value, torch.dtype) and value in _QUANTISED for value in given)


def resizes_storage(gm: GraphModule) -> bool:
    """Whether a call of the graph frees or makes the memory of a tensor, as sharded training does with weights. Its schema says
    that it writes nothing, so nothing says which readers have to run before it, and addresses do not stay what they were."""
    return any(getattr(n.target, "_schema", None) is not None and n.target._schema.name == _RESIZES for n in gm.graph.nodes)


# ---- names in the user's modules -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Paths:
    """The path of each input of Dynamo's graph, in order, and what stands for each module that none of the others holds: its
    name as Dynamo writes it, and the first part of paths below it ("" where there is one such module)."""

    inputs: tuple[str, ...] = ()
    roots: tuple[tuple[str, str], ...] = ()


NO_PATHS = Paths()


@dataclass(frozen=True, slots=True)
class _Place:
    """A source: the variable at its root, what Dynamo calls that, whether it is a module, and the way from there."""

    root: str
    written: str
    is_module: bool
    parts: tuple[str, ...]


def paths_of(gm: GraphModule) -> Paths:
    """The paths of Dynamo's graph."""
    sources = [_place(_source(node)) for node in gm.graph.find_nodes(op="placeholder")]
    modules = dict.fromkeys((one.written, one.root) for one in sources if one is not None and one.is_module)
    roots = tuple((written, "" if len(modules) == 1 else name) for written, name in modules)
    return Paths(tuple(_path(one, dict(roots)) for one in sources), roots)


def _source(node: Node) -> Any:
    return getattr(node.meta.get("grapharg"), "source", None)


def _place(source: Any) -> _Place | None:
    """None for what no variable leads to, such as a size."""
    steps: list[str] = []
    while (base := getattr(source, "base", None)) is not None:
        steps += filter(None, (_member(source),))
        source = base
    root = getattr(source, "local_name", None) or getattr(source, "global_name", None)
    if not isinstance(root, str):
        return None
    written = source.name() if callable(source.name) else source.name  # a method before torch 2.13
    is_module = bool(steps) and steps[-1] in _CONTAINERS
    return _Place(root, written, is_module, tuple(step for step in reversed(steps) if step not in _CONTAINERS))


def _member(source: Any) -> str:
    """What a step of the chain adds; "" for one that only says of what kind the object is."""
    for field in ("member", "index", "idx"):
        value = getattr(source, field, None)
        if isinstance(value, str | int):
            return str(value)
    return ""


def _path(place: _Place | None, roots: Mapping[str, str]) -> str:
    if place is None:
        return ""
    first = roots.get(place.written, place.root)
    return ".".join(filter(None, (first, *place.parts)))


def _input_path(node: Node, paths: Paths) -> str:
    """The path of an input; "" for what the user has no name for, such as a tensor saved for backward."""
    described = node.meta.get("desc")
    while isinstance(described, SubclassGetAttrAOTInput):  # what a tensor subclass is made of
        described = described.base
    if isinstance(described, ParamAOTInput | BufferAOTInput):
        return described.target
    if isinstance(described, PlainAOTInput) and described.idx < len(paths.inputs):
        return paths.inputs[described.idx]
    return ""


def _module_path(node: Node, paths: Paths) -> str:
    """The path of the innermost module whose call the node is a part of, or is the gradient of."""
    entered = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    written, kind = next(reversed(entered.values()), ("", None))
    for root, first in paths.roots:
        if written == root:
            return first or getattr(kind, "__name__", "")
        if written.startswith(f"{root}."):
            return ".".join(filter(None, (first, written[len(root) + 1 :])))
    return written


def paths_in(gm: GraphModule, paths: Paths) -> dict[str, str]:
    """By names of nodes, those paths that there are."""
    found = {node.name: _node_path(node, paths) for node in gm.graph.nodes}
    return {name: path for name, path in found.items() if path}


def _node_path(node: Node, paths: Paths) -> str:
    return _input_path(node, paths) if node.op == "placeholder" else _module_path(node, paths)
