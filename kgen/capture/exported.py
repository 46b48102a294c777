"""A module as torch.export traces it, for `kgen.export`: one inference graph, and how it is called.

AOTAutograd traces the exported graph once more, with kgen's decompositions, as it does with Dynamo's graphs. What it does
around a compiled graph at each call is not saved with it. For a traced program that is one thing: results that are inputs or
views of inputs are made of these. `ExportedCall` says which they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.exc import UserError as TorchUserError
from torch._dynamo.source import LocalSource
from torch._functorch._aot_autograd.schemas import OutputType, ViewAndMutationMeta
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.export import ExportedProgram, export
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Node
from torch.fx.experimental import _config as shape_config
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import treespec_dumps

from kgen.capture import torch_adapter
from kgen.capture.aot_cache import CompiledGraph
from kgen.capture.torch_adapter import Compile, GraphInfo, JointPass, copied_graph
from kgen.errors import NotExportable
from kgen.rendered.exported_call import Argument, Constant, ExportedCall, Result, Weight

__all__ = ["Exported", "compile_exported", "traced"]

_WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True, slots=True)
class Exported:
    """The compiled graph of a program, how it is called, and the module's tensors by name."""

    graph: CompiledGraph
    call: ExportedCall
    weights: dict[str, torch.Tensor]


def traced(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any) -> ExportedProgram:
    """What torch.export makes of a module. Raises torch's own errors."""
    with torch.no_grad():
        try:
            with _any_size():
                return export(module, args, dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False)
        except TorchUserError:  # a module that asks whether a size is 1, or one that cannot be exported anyway
            return export(module, args, dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False)


def _any_size() -> AbstractContextManager[object]:
    """Tracing that takes nothing for granted of dynamic sizes: without it, none of them could be 0 or 1."""
    return shape_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]


def compile_exported(program: ExportedProgram, compile_graph: Compile, joint_pass: JointPass) -> Exported:
    """Compiles the program's graph. Raises NotExportable."""
    gm = GraphModule(program.graph_module, copied_graph(program.graph_module))
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    inputs, constants = _inputs(program, placeholders)
    given = _tensors_only(gm, placeholders, constants)
    results = _computed_only(gm, program)
    symbols = _symbols(inputs, given)
    with _any_size():
        made = _compiled(gm, given, compile_graph, joint_pass)
    placed = _placed(results, made.metadata, len(given))
    written = [info.mutates_data for info in made.metadata.input_info]
    ordered = tuple(_described(one, *rest) for one, *rest in zip(inputs, given, written, [symbols] * len(given), strict=True))
    call = ExportedCall(
        _dumped(program.call_spec.in_spec), _dumped(program.call_spec.out_spec), ordered, constants, placed,
        _conditions(given, symbols), tuple((name, meaning) for name, meaning in symbols.values()),
    )  # fmt: skip
    return Exported(made.graph, call, _weights(program, ordered))


def _dumped(spec: Any) -> str:
    try:
        return treespec_dumps(spec)
    except Exception as cause:
        raise NotExportable(reason=f"a structure of its arguments or results cannot be written down: {cause}") from cause


# ---- arguments ---------------------------------------------------------------------------------------------------------


def _inputs(program: ExportedProgram, placeholders: Sequence[Node]) -> tuple[list[Weight | Constant], tuple[Constant, ...]]:
    """What each argument of the graph is, tensors of the caller's as constants without a value yet, and the constants."""
    inputs: list[Weight | Constant] = []
    constants: list[Constant] = []
    position = 0
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        value = node.meta.get("val")
        if spec.kind in _WEIGHTS:
            inputs.append(Weight(str(spec.target)))
        elif spec.kind is not InputKind.USER_INPUT:
            raise NotExportable(reason=f"its argument {node.name} is of kind {spec.kind.name}")
        elif isinstance(value, torch.Tensor):
            inputs.append(Constant(position, node.name, None))
        elif isinstance(value, _PLAIN):
            constants.append(Constant(position, node.name, value))
        else:
            raise NotExportable(reason=f"its argument {node.name} is a {type(value).__name__}")
        position += spec.kind is InputKind.USER_INPUT
    return inputs, tuple(constants)


def _tensors_only(gm: GraphModule, placeholders: Sequence[Node], constants: Sequence[Constant]) -> list[torch.Tensor]:
    """The example of each argument, once those that are constants have left the graph. A dense one keeps its layout; of others
    the elements are taken to be in order."""
    names = {one.name for one in constants}
    given: list[torch.Tensor] = []
    for node in placeholders:
        value = node.meta["val"]
        if node.name in names:
            node.replace_all_uses_with(value)
            gm.graph.erase_node(node)
        elif value.layout != torch.strided:
            raise NotExportable(reason=f"its argument {node.name} is a tensor of layout {value.layout}")
        else:
            given.append(value if _is_dense(value) else _in_order(value))
    return given


def _order(value: torch.Tensor) -> tuple[int, ...]:
    """The dimensions from the one with the largest stride in the example on."""
    strides = [torch_adapter.hint(stride) or 0 for stride in value.stride()]
    return tuple(sorted(range(value.dim()), key=lambda dim: -strides[dim]))


def _is_dense(value: torch.Tensor) -> bool:
    expected: Any = 1
    for dim in reversed(_order(value)):
        if not _equal(value.shape[dim], 1) and not _equal(value.stride(dim), expected):
            return False
        expected = expected * value.shape[dim]
    return True


def _equal(a: Any, b: Any) -> bool:
    """Whether two sizes are equal whatever the symbols are."""
    return statically_known_true(a == b)


def _in_order(value: torch.Tensor) -> torch.Tensor:
    mode = detect_fake_mode([value])
    assert mode is not None
    with mode:
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def _described(
    one: Weight | Constant, value: torch.Tensor, written: bool, symbols: Mapping[Any, tuple[str, str]]
) -> Weight | Argument:
    if isinstance(one, Weight):
        return one
    fixed = tuple(None if isinstance(n, torch.SymInt) else int(n) for n in value.shape)
    names = tuple(symbols[_symbol(n)][0] if _symbol(n) is not None else None for n in value.shape)
    return Argument(one.position, one.name, value.dtype, value.device.type, fixed, names, _order(value), written)


def _symbol(size: Any) -> Any | None:
    """The symbol that a size is; None for a number or something computed."""
    return size.node.expr if isinstance(size, torch.SymInt) and size.node.expr.is_symbol else None


def _free_symbols(size: Any) -> set[Any]:
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


# ---- results -----------------------------------------------------------------------------------------------------------


def _computed_only(gm: GraphModule, program: ExportedProgram) -> list[int | Constant]:
    """Makes the graph return what it computes. For each leaf of the results: its position there, or the constant that it is."""
    for spec in program.graph_signature.output_specs:
        if spec.kind is not OutputKind.USER_OUTPUT:
            raise NotExportable(reason=f"its result {spec.arg.name} is of kind {spec.kind.name}")
    (output,) = gm.graph.find_nodes(op="output")
    kept: list[Node] = []
    results: list[int | Constant] = []
    for position, one in enumerate(output.args[0]):
        if isinstance(one, Node):
            results.append(len(kept))
            kept.append(one)
        elif isinstance(one, _PLAIN):
            results.append(Constant(position, "", one))
        else:
            raise NotExportable(reason=f"its result {position} is a {type(one).__name__}")
    output.args = (tuple(kept),)
    gm.recompile()
    return results


def _placed(results: Sequence[int | Constant], metadata: ViewAndMutationMeta, count: int) -> tuple[Result | Constant, ...]:
    return tuple(one if isinstance(one, Constant) else _result(one, metadata.output_info[one], count) for one in results)


def _result(position: int, output: Any, count: int) -> Result:
    """Raises NotExportable for a result that AOTAutograd makes in a way that is not saved."""
    if output.output_type in (OutputType.is_input, OutputType.alias_of_input):
        assert output.base_idx is not None
        assert output.base_idx < count
        return Result(position, output.base_idx, output.output_type is OutputType.is_input)
    return Result(position)


# ---- the graph ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Made:
    graph: CompiledGraph
    metadata: ViewAndMutationMeta


def _compiled(gm: GraphModule, given: Sequence[torch.Tensor], compile_graph: Compile, joint_pass: JointPass) -> _Made:
    """What AOTAutograd asks to be compiled. Raises NotExportable where that is not all of the program."""
    made: list[_Made] = []

    def keep(traced_graph: GraphModule, info: GraphInfo) -> CompiledGraph:
        graph = compile_graph(traced_graph, info)
        context = TracingContext.get()
        assert context.fw_metadata is not None
        made.append(_Made(graph, context.fw_metadata))
        return graph

    mode = detect_fake_mode(given)
    if mode is not None and mode.shape_env is not None:
        mode.shape_env.frozen = False  # what is found out of sizes from here on is a condition, too
    with torch.no_grad(), tracing(TracingContext(mode)):
        torch_adapter.capture(gm, given, keep, joint_pass, None)
    if len(made) != 1 or not _is_whole(made[0].metadata):
        raise NotExportable(reason="it changes its arguments in a way that its graph does not have, or holds tensor subclasses")
    return made[0]


def _is_whole(metadata: ViewAndMutationMeta) -> bool:
    return metadata.num_mutated_inp_runtime_indices == 0 and not metadata.tokens and _is_plain(metadata)


def _is_plain(metadata: ViewAndMutationMeta) -> bool:
    return not any(hasattr(one, "attrs") for one in (*metadata.subclass_inp_meta, *metadata.subclass_fw_graph_out_meta))


def _weights(program: ExportedProgram, inputs: Sequence[Weight | Argument]) -> dict[str, torch.Tensor]:
    """The module's tensors that the graph gets, without gradients."""
    tensors = {**program.constants, **program.state_dict}
    return {one.name: tensors[one.name].detach() for one in inputs if isinstance(one, Weight)}


# ---- sizes -------------------------------------------------------------------------------------------------------------


def _symbols(inputs: Sequence[Weight | Constant], given: Sequence[torch.Tensor]) -> dict[Any, tuple[str, str]]:
    """A name for each symbol, and what it is: the first dimension that has it. Raises NotExportable where none has."""
    found: dict[Any, tuple[str, str]] = {}
    for one, value in zip(inputs, given, strict=True):
        for dim, size in enumerate(value.shape):
            if _symbol(size) is not None:
                found.setdefault(_symbol(size), (f"s{len(found)}", f"{one.name}.shape[{dim}]"))
    used = {symbol for value in given for size in value.shape for symbol in _free_symbols(size)}
    if not used <= found.keys():
        raise NotExportable(reason="no dimension of an argument is the size that others are computed from")
    return found


def _conditions(given: Sequence[torch.Tensor], symbols: Mapping[Any, tuple[str, str]]) -> tuple[str, ...]:
    """What tracing and compiling took for granted of the sizes, as Python expressions."""
    sizes = {_symbol(size): size for value in given for size in value.shape if _symbol(size) is not None}
    if not sizes:
        return ()
    mode = detect_fake_mode(given)
    assert mode is not None
    environment = mode.shape_env
    assert environment is not None
    ordered = [sizes[symbol] for symbol in symbols]
    sources = [LocalSource(name) for name, _ in symbols.values()]
    return tuple(dict.fromkeys(environment.produce_guards(ordered, sources, ignore_static=True)))
