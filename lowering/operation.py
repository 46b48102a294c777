"""Operators that templates implement: the call of the operator, with its operands as values over the template's named axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.index import Var
from kgen.lowering import fallback
from kgen.lowering.builder import Builder
from kgen.lowering.contraction import loaded
from kgen.lowering.tensor import Tensor, at


@dataclass(frozen=True, slots=True)
class OperatorAxes:
    """The named axes of an operator's tensors, in the order of its schema, and of all its results."""

    operands: tuple[tuple[str, ...], ...]
    result: tuple[str, ...]


def lower_operator(b: Builder, ways: Sequence[OperatorAxes], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The call as an `ir.Operation` over the first axes that its tensors have, or as a plain library call where they have none
    of these."""
    names = [a.name for a in b.current.target._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tensors = [v for v in given.values() if isinstance(v, Tensor)]
    numbers = tuple((name, v) for name, v in given.items() if isinstance(v, bool | int | float | str))
    axes, loops = _first_that_fits(ways, tensors)
    if isinstance(loops, str) or len(tensors) + len(numbers) != sum(v is not None for v in given.values()):
        return fallback.extern(
            b, b.current, args, kwargs, loops if isinstance(loops, str) else "arguments that no template takes"
        )
    inner = tuple(v for axis, v in loops.items() if axis not in axes.result)
    where = [tuple(loops[a].expr() for a in operand) for operand in axes.operands]
    values = tuple(at(t, place) for t, place in zip(tensors, where, strict=True))

    def wrap(call: ir.Extern) -> ir.Node:
        passed = {**dict(zip(names, call.args, strict=False)), **dict(call.kwargs)}.values()
        stored = [arg for arg in passed if isinstance(arg, ir.TensorArg)]
        return ir.Operation(
            call.outs, tuple(loops[a] for a in axes.result), inner, values, tuple(t.dtype for t in tensors),
            tuple((axis, v.expr()) for axis, v in loops.items()), b.current.target._schema.name, numbers, call, b.origin,
            tuple(map(loaded, stored, where)) if len(stored) == len(where) else (),
            kinds=tuple(r.dtype for r in results),
        )  # fmt: skip

    results = _tensors(b.current.meta.get("val"))
    sizes = [tuple(loops[a].extent for a in axes.result)]
    fits = results and all(b.symbols.sizes(r.shape) in sizes for r in results)
    reason = "no template takes it" if fits else "its results do not have the axes that its template says"
    return fallback.extern(b, b.current, args, kwargs, reason, wrap if fits else None)


def _tensors(value: Any) -> list[torch.Tensor]:
    items = value if isinstance(value, list | tuple) else [value]
    return [v for v in items if isinstance(v, torch.Tensor)]


def _first_that_fits(ways: Sequence[OperatorAxes], tensors: list[Tensor]) -> tuple[OperatorAxes, dict[str, Var] | str]:
    """The first axes that the tensors have, with a loop for each; of none the last ones, with the reason why not."""
    tried = [(axes, _loops(axes, tensors)) for axes in ways]
    return next((one for one in tried if not isinstance(one[1], str)), tried[-1])


def _loops(axes: OperatorAxes, tensors: list[Tensor]) -> dict[str, Var] | str:
    """A loop for each axis, or why the tensors do not have these axes."""
    if len(tensors) != len(axes.operands):
        return f"{len(tensors)} tensors, where its template has {len(axes.operands)}"
    loops: dict[str, Var] = {}
    for tensor, names in zip(tensors, axes.operands, strict=True):
        if tensor.rank != len(names):
            return f"a tensor of rank {tensor.rank}, where its template has the axes {', '.join(names)}"
        for name, size in zip(names, tensor.sizes, strict=True):
            if loops.setdefault(name, ix.var(name, size)).extent is not size:
                return f"axis {name} of two lengths"
    return loops if all(a in loops for a in axes.result) else "a result with an axis that no operand has"
