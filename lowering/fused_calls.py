"""Library calls that compute a matmul together with what one node makes of it.

A row of `FORMS` says how the result looks as a value. It is built by the rules that lower the operators, and values are
interned: a node has that form if its value is that value, however the program wrote it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.lowering.activation import gelu, relu
from kgen.lowering.builder import Builder
from kgen.lowering.fused_convolutions import fused_convolution
from kgen.lowering.tensor import Tensor

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Form:
    """`target` with `options` computes what `rule` makes of the result of `plain`, in the operands' type, one of `dtypes`. On a
    CPU it is another function where it is `cuda_only`."""

    plain: Any
    target: Any
    options: tuple[tuple[str, Any], ...]
    rule: Callable[[Builder, Tensor], Tensor]
    dtypes: tuple[torch.dtype, ...]
    cuda_only: bool = False


def _gelu(b: Builder, x: Tensor) -> Tensor:
    return gelu(b, x, approximate="tanh")


NARROW = (torch.bfloat16, torch.float16)
# cuBLASLt's gelu is the one by tanh; on a CPU the same operator computes the one by erf.
FORMS: tuple[Form, ...] = (
    Form(aten.addmm.default, aten._addmm_activation.default, (("use_gelu", False),), relu, (*NARROW, torch.float32)),
    Form(aten.addmm.default, aten._addmm_activation.default, (("use_gelu", True),), _gelu, NARROW, cuda_only=True),
)


def note_fused_calls(b: Builder) -> None:
    """Notes with each matmul of the graph the one call that computes its only reader, if there is one. The call would stand
    where the matmul does, so all that it reads besides has to be there: of two results that are added, the later one
    adds."""
    readers: dict[str, list[ir.Pointwise]] = {}
    made = {name: place for place, node in enumerate(b.graph.nodes) for name in ir.outs(node)}
    for node in b.graph.nodes:
        if isinstance(node, ir.Pointwise):
            for name in {load.attr[0] for load in vs.loads([node.value])}:
                readers.setdefault(name, []).append(node)
    for position, node in enumerate(b.graph.nodes):
        if isinstance(node, ir.Contraction) and len(found := readers.get(node.out, [])) == 1:
            call = _fused(b, node, found[0])
            ready = call is not None and all(made.get(name, -1) < position for name in ir.reads(call))
            b.graph.nodes[position] = replace(node, fused=call if ready else None)


def _fused(b: Builder, node: ir.Contraction, reader: ir.Pointwise) -> ir.Extern | None:
    call, result, made = node.vendor, b.graph.buffers[node.out], b.graph.buffers[reader.out]
    if call is None or call.kwargs or (result.dtype, result.sizes) != (made.dtype, made.sizes):
        return None
    if node.windowed:
        return fused_convolution(b, node, reader)
    if not _adds_row(call):
        return None
    if not all(ix.known_less(ix.ZERO, v.extent) for v in node.reduced):
        return None  # torch leaves the activation out where it has nothing to add up
    element = vs.load(node.out, (v.expr() for v in reader.vars), result.dtype)
    whole = Tensor(result.sizes, result.dtype, result.device, element)
    for form in FORMS:
        fits = (
            form.plain is call.target and result.dtype in form.dtypes and (result.device.type == "cuda" or not form.cuda_only)
        )
        if fits and form.rule(b, whole).value is reader.value:
            return ir.Extern((reader.out,), form.target, call.args, form.options, reason="the library's call for both")
    return None


def _adds_row(call: ir.Extern) -> bool:
    """Whether what is added is a row of numbers, one for each column: else the library has two kernels behind its one call."""
    bias, columns = call.args[0], call.args[-1]
    if not isinstance(bias, ir.TensorArg) or not isinstance(columns, ir.TensorArg):
        return False
    return len(bias.vars) == 1 and bias.vars[0].extent is columns.vars[-1].extent
