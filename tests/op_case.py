"""One operator under test: a function, its inputs, and the way from it through lowering to the evaluator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from kgen.capture.decompositions import TABLE
from kgen.ir import nodes as ir
from kgen.ir.verify import verify
from kgen.lowering import LoweringContext, lower, reinplace
from kgen.reference.evaluate import evaluate_graph

FLOATS = (torch.float32, torch.bfloat16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
ANY = (*FLOATS, *INTEGERS, torch.bool)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Case:
    """`make_inputs` gives one argument list for a dtype; `symbolic` also runs the case with all sizes symbolic; `externs` are
    the operators that may stay library calls."""

    name: str
    fn: Callable[..., Any]
    make_inputs: Callable[[torch.dtype], Sequence[Any]]
    dtypes: Sequence[torch.dtype] = FLOATS
    symbolic: bool = False
    externs: frozenset[str] = frozenset()


def capture(fn: Callable[..., Any], inputs: Sequence[Any], tracing: str = "fake", functionalize: bool = True) -> GraphModule:
    """The functional aten graph of `fn` with kgen's decompositions."""
    traced = torch.func.functionalize(fn, remove="mutations") if functionalize else fn
    gm = make_fx(traced, tracing_mode=tracing, decomposition_table=TABLE)(*inputs)
    gm.graph.eliminate_dead_code()
    return gm


def shape_env_of(gm: GraphModule) -> Any:
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and getattr(value, "fake_mode", None) is not None:
            return value.fake_mode.shape_env
    return None


def lowered(fn: Callable[..., Any], inputs: Sequence[Any], tracing: str = "fake", functionalize: bool = True) -> ir.Graph:
    gm = reinplace(capture(fn, inputs, tracing, functionalize))
    return verify(lower(gm, LoweringContext(shape_env=shape_env_of(gm))), "lower")


def externs_of(graph: ir.Graph) -> set[str]:
    return {str(n.target) for n in graph.nodes if isinstance(n, ir.Extern)}


def check(
    fn: Callable[..., Any], inputs: Sequence[Any], tracing: str = "fake", externs: frozenset[str] = frozenset()
) -> ir.Graph:
    """Lowers and evaluates `fn` and compares results and mutated inputs with eager's."""
    ours = [i.clone() if isinstance(i, torch.Tensor) else i for i in inputs]
    theirs = [i.clone() if isinstance(i, torch.Tensor) else i for i in inputs]
    graph = lowered(fn, inputs, tracing)
    left = {e for e in externs_of(graph) if e.split(".")[1] not in externs}
    assert not left, f"library calls: {left}"
    expected = flat(fn(*theirs))
    actual = evaluate_graph(graph, [i for i in ours if isinstance(i, torch.Tensor | int)])
    assert len(expected) == len(actual)
    for got, want in zip([*actual, *ours], [*expected, *theirs], strict=True):
        if isinstance(want, torch.Tensor):
            same(got, want)
    return graph


def flat(result: Any) -> list[Any]:
    return [r for part in result for r in flat(part)] if isinstance(result, tuple | list) else [result]


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE.get(want.dtype, 0)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Reproducible data of any dtype."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 9, shape, generator=generator).to(dtype)
