"""Bodies that are called often are graphs of their own; results, gradients and what has none are eager's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from kgen.capture.segments import Segment, Segmented, segments_of
from kgen.counters import counters

N = 6
OPTIONS = {"strict": True}


@torch.compiler.nested_compile_region
def layer(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w) + x


@torch.compiler.nested_compile_region
def pair(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tanh(x @ w), x * v.sum()


def tensors(count: int, grad: bool = True) -> list[Tensor]:
    torch.manual_seed(count)
    x = torch.randn(4, N, dtype=torch.float64)
    return [x, *(torch.randn(N, N, dtype=torch.float64).div(3).requires_grad_(grad) for _ in range(count))]


def same(f: Callable[..., Any], args: Sequence[Tensor]) -> None:
    """Results and gradients are those of eager, and None where they are there."""
    torch._dynamo.reset()
    counters.reset()
    mine, others = ([arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args] for _ in range(2))
    got, want = torch.compile(f, backend="kgen", fullgraph=True, options=OPTIONS)(*mine), f(*others)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(mine, others, rtol=1e-9, atol=1e-9)
    if any(arg.requires_grad for arg in args):
        found = [_gradients(results, given) for results, given in ((got, mine), (want, others))]
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def _gradients(results: Any, args: Sequence[Tensor]) -> list[Any]:
    leaves = [results] if isinstance(results, Tensor) else [one for one in results if isinstance(one, Tensor)]
    loss = torch.stack([(one * one.cos()).sum() for one in leaves if one.requires_grad]).sum()
    return list(torch.autograd.grad(loss, [arg for arg in args if arg.requires_grad], allow_unused=True))


def is_segmented() -> bool:
    return counters["extern.invoke_subgraph"] == 0


@pytest.mark.usefixtures("fresh_graphs")
@pytest.mark.parametrize("grad", [False, True])
def test_calls_with_something_in_front_and_behind(grad: bool) -> None:
    def f(x: Tensor, *weights: Tensor) -> Any:
        x = x.cos() @ weights[0]
        for w in weights:
            x = layer(x, w)
        return x.sin(), None, x.sum()

    same(f, tensors(5, grad))
    assert is_segmented()
    # what is in front, the body for the first input, which may have no gradient of its own, and what is behind
    assert counters["lowered"] == (6 if grad else 3)


@pytest.mark.usefixtures("fresh_graphs")
def test_an_input_without_gradient_makes_another_function() -> None:
    def f(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = layer(x, w)
        return x

    same(f, tensors(5))
    assert is_segmented()
    assert counters["lowered"] == 4


def test_a_shared_weight_has_the_sum_of_its_gradients() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(4):
            x = layer(x, w)
        return x @ w

    same(f, tensors(1))
    assert is_segmented()


def test_results_that_share_memory_with_arguments() -> None:
    def f(x: Tensor, *weights: Tensor) -> Any:
        y = x
        for w in weights:
            y = layer(y, w)
        return y.t(), x[1:], x, y

    same(f, tensors(4))
    assert is_segmented()


@pytest.mark.parametrize("grad", [False, True])
def test_what_writes_into_an_argument_stays_in_one_graph(grad: bool) -> None:
    def f(x: Tensor, b: Tensor, *weights: Tensor) -> Tensor:
        b.add_(1)
        for w in weights:
            x = layer(x, w)
        b.mul_(2)
        return x * b

    x, *weights = tensors(4, grad)
    same(f, [x, torch.ones(4, N, dtype=torch.float64), *weights])
    assert not is_segmented()


def test_what_draws_random_numbers_stays_in_one_graph() -> None:
    def f(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = layer(x, w)
        return x + torch.rand_like(x) * 0

    same(f, tensors(4, grad=False))
    assert not is_segmented()


def test_a_result_that_nothing_differentiates_stays_in_one_graph() -> None:
    """A compiled body would give zeros for the operands of the second result in the last call."""

    def f(x: Tensor, *weights: Tensor) -> Tensor:
        y = x
        for w, v in zip(weights[::2], weights[1::2], strict=True):
            x, y = pair(x + y.detach() * 0, w, v)
        return x

    args = tensors(8)
    torch._dynamo.reset()
    counters.reset()
    torch.compile(f, backend="kgen", fullgraph=True, options=OPTIONS)(*args)
    assert not is_segmented()


def test_values_are_let_go_behind_their_last_use() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    first, second, third = (graph.call_function(torch.sin, (x,), name=name) for name in ("a", "b", "c"))
    with FakeTensorMode():
        for node in (x, first, second, third):
            node.meta["example_value"] = torch.empty(2)
    graph.output((third,))
    module = GraphModule(torch.nn.Module(), graph)
    made: list[Any] = []
    alive: list[int] = []

    def compiled(_module: GraphModule, _inputs: Sequence[Tensor]) -> Callable[..., Any]:
        def run(value: Tensor) -> tuple[Tensor]:
            result = value.sin()
            made.append(weakref.ref(result))
            gc.collect()
            alive.append(sum(one() is not None for one in made))
            return (result,)

        return run

    steps = [Segment(other.name, module, (one,), (other,)) for one, other in ((x, first), (first, second), (second, third))]
    value = torch.ones(2)
    (result,) = Segmented(module, steps, compiled)(value)
    torch.testing.assert_close(result, value.sin().sin().sin())
    assert alive == [1, 2, 2]


def test_two_calls_stay_in_one_graph() -> None:
    found = []

    def backend(gm: GraphModule, _inputs: Sequence[Any]) -> Any:
        found.append(segments_of(gm))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda x, w: layer(layer(x, w), w), backend=backend)(*tensors(1, grad=False))
    assert found == [[]]
