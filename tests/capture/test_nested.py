"""Jagged nested tensors: their ragged size is an argument of a compiled graph that has no value as an integer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kgen import errors
from kgen.host import program as hp
from kgen.host.native import load
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.verify import verify as verify_graph
from kgen.reference.evaluate import evaluate_graph

Function = Callable[[Tensor, Tensor], Any]

FUNCTIONS: dict[str, Function] = {
    "pointwise": lambda n, w: torch.sin(n) * 2,
    "matmul": lambda n, w: n @ w.t(),
    "linear": lambda n, w: F.relu(F.linear(n, w)),
    "layer norm": lambda n, w: F.layer_norm(n, (8,)),
    "softmax": lambda n, w: F.softmax(n, -1),
    "transposed": lambda n, w: n.transpose(1, 2) * 2,
    "padded": lambda n, w: torch.nested.to_padded_tensor(n, 0.0),
    "made in the graph": lambda n, w: torch.nested.nested_tensor_from_jagged(n.values() * 2, n.offsets()) + 1,
}
# PyTorch has no gradients of these.
REDUCTIONS: dict[str, Function] = {
    "ragged sum": lambda n, w: n.sum(1),
    "dense sum": lambda n, w: n.sum(-1),
    "ragged mean": lambda n, w: n.mean(1),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def jagged(*lengths: int, grad: bool = False) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(k, 8) for k in lengths], layout=torch.jagged, requires_grad=grad)


def parts(result: Tensor) -> list[Tensor]:
    return [result.values(), result.offsets()] if result.is_nested else [result]


@pytest.mark.every(2)
@pytest.mark.cpu
@pytest.mark.parametrize("name", [*FUNCTIONS, *REDUCTIONS])
def test_functions_of_jagged_tensors(name: str) -> None:
    """Two ragged sizes through one compiled graph."""
    function = {**FUNCTIONS, **REDUCTIONS}[name]
    run, w = torch.compile(function, backend="kgen", fullgraph=True), torch.randn(6, 8)
    for lengths in ((3, 5, 2), (4, 1, 6)):
        n = jagged(*lengths)
        torch.testing.assert_close(parts(run(n, w)), parts(function(n, w)))


@pytest.mark.every(2)
@pytest.mark.cpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_jagged_tensors(name: str) -> None:
    function, n, w = FUNCTIONS[name], jagged(3, 5, 2, grad=True), torch.randn(6, 8, requires_grad=True)

    def gradients(run: Function) -> list[Tensor]:
        loss = parts(run(n, w))[0].square().sum()
        found = torch.autograd.grad(loss, (n, w), allow_unused=True)
        return [part for grad in found if grad is not None for part in parts(grad)]

    torch.testing.assert_close(gradients(torch.compile(function, backend="kgen", fullgraph=True)), gradients(function))


@pytest.mark.cpu
@pytest.mark.parametrize("grad", [False, True])
def test_a_ragged_size_is_a_result(grad: bool) -> None:
    @torch.compile(backend="kgen", fullgraph=True)
    def run(n: Tensor) -> tuple[Tensor, int, tuple[int, ...]]:
        return n.sin(), n.size(1), n.stride()

    for lengths in ((3, 5, 2), (4, 1, 6)):
        n = jagged(*lengths, grad=grad)
        result, size, strides = run(n)
        assert size == n.size(1) == result.size(1)
        assert strides == n.stride()


def test_an_expression_as_a_multiple_of_another() -> None:
    s, t = ix.size("s").expr(), ix.size("t").expr()
    assert ix.as_factor(s * 6 + t * 4, s * 3 + t * 2) == 2
    assert ix.as_factor(ix.ZERO, s) == 0
    assert ix.as_factor(s * 3, s * 2) is ix.as_factor(s + 1, s) is ix.as_factor(s, t) is ix.as_factor(s, ix.ZERO) is None


@pytest.mark.cpu
def test_the_runtime_returns_an_argument_as_it_is() -> None:
    given = ["ab"]
    outputs = (hp.OutArgument(0, 2), hp.OutArgument(0), hp.OutArgument(1))
    results = load(hp.Program((hp.InputIgnored(), hp.InputIgnored()), (), (), (), outputs))([given, None])
    assert results == [["ab", "ab"], ["ab"], None]
    assert results[1] is given


@pytest.mark.parametrize("position", [-1, 1, 2])
def test_a_program_returns_arguments_that_it_ignores(position: int) -> None:
    program = hp.Program((hp.InputIgnored(), hp.InputInt(0)), (0,), (), (), (hp.OutArgument(position),))
    with pytest.raises(errors.InvalidProgram, match="nothing else uses"):
        hp.verify(program)


def test_a_graph_returns_arguments_that_it_ignores() -> None:
    graph = ir.Graph("g", inputs=[ir.GraphInput(expr=ix.size("s").expr(), symbol=ix.size("s").expr().atom())])
    graph.outputs = [ir.ArgumentMultiple(0, 2)]
    with pytest.raises(errors.InvalidIR, match=r"argument 0 \* 2 is not an argument that the graph leaves as it is"):
        verify_graph(graph, "test")
    graph.inputs = [ir.GraphInput()]
    verify_graph(graph, "test")
    assert evaluate_graph(graph, [21]) == [42]
