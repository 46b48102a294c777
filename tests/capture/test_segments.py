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

from kgen import backend
from kgen.capture import segments, torch_adapter
from kgen.capture.segments import Segment, Segmented, segments_of
from kgen.config import Config
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
@pytest.mark.parametrize(("sharing", "segmented"), [("auto", False), ("on", True)])
def test_graphs_for_a_gpu_have_segments_only_where_asked(
    sharing: str, segmented: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in: the tensors are a CPU's, and capture takes them for a GPU's."""
    monkeypatch.setattr(torch_adapter, "uses_cuda", lambda _: True)
    found = list[int]()
    monkeypatch.setattr(segments, "segments_of", lambda _: found.append(1) or [])
    monkeypatch.setattr(backend, "_calls_bodies", lambda _: True)
    backend._segments(GraphModule({}, Graph()), Config(layer_sharing=sharing))
    assert bool(found) == segmented


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


# ---- one node of autograd ----------------------------------------------------------------------------------------------


def stacked(x: Tensor, *weights: Tensor) -> Tensor:
    for w in weights:
        x = layer(x, w)
    return x.sin()


def compiled(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(f, backend="kgen", fullgraph=True, options=OPTIONS | options)


def nodes_of(result: Tensor) -> list[str]:
    """Names of the nodes of autograd behind a result, but for those of leaves."""
    found, left = list[str](), [result.grad_fn]
    while left:
        node = left.pop()
        if node is not None and "AccumulateGrad" not in node.name():
            found.append(node.name())
            left += [one for one, _ in node.next_functions]
    return found


def test_all_calls_are_one_node() -> None:
    result = compiled(stacked)(*tensors(5))
    assert nodes_of(result) == ["_RunBackward"]


def test_a_view_of_an_argument_has_nodes_apart() -> None:
    """AOTAutograd makes such a result anew around the call."""

    def f(x: Tensor, *weights: Tensor) -> Any:
        return stacked(x, *weights), weights[0][1:]

    args = tensors(5)
    same(f, args)
    result, view = compiled(f)(*args)
    assert len(nodes_of(result)) > 1
    assert view.data_ptr() == args[1][1:].data_ptr()


def test_a_graph_that_is_kept_has_gradients_twice_and_else_not() -> None:
    args = tensors(4)
    result = compiled(stacked)(*args).sum()
    (first,) = torch.autograd.grad(result, args[1:2], retain_graph=True)
    (second,) = torch.autograd.grad(result, args[1:2])
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(result, args[1:2])


def test_there_are_no_second_gradients() -> None:
    args = tensors(4)
    (got,) = torch.autograd.grad(compiled(stacked)(*args).sum(), args[1:2], create_graph=True)
    (want,) = torch.autograd.grad(stacked(*args).sum(), args[1:2])
    torch.testing.assert_close(got, want)
    with pytest.raises(RuntimeError, match="double backward"):
        got.sum().backward()


def test_a_result_that_nobody_differentiates_gives_its_layers_nothing() -> None:
    def f(x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        return stacked(x, *weights[:3]), stacked(x, *weights[3:])

    args = tensors(6)
    got = torch.autograd.grad(compiled(f)(*args)[0].sum(), args[1:], allow_unused=True)
    want = torch.autograd.grad(f(*args)[0].sum(), args[1:], allow_unused=True)
    assert [one is None for one in got] == [one is None for one in want]
    torch.testing.assert_close([one for one in got if one is not None], [one for one in want if one is not None])


def test_results_without_gradients() -> None:
    def f(x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        y = stacked(x, *weights)
        return y, y.argmax(-1)

    args = tensors(4)
    same(f, args)
    assert [one.requires_grad for one in compiled(f)(*args)] == [True, False]


def test_tangents_with_other_strides() -> None:
    args = tensors(4)
    tangent = torch.randn(N, 4, dtype=torch.float64).t()
    got = torch.autograd.grad(compiled(stacked)(*args), args[1:], tangent)
    torch.testing.assert_close(got, torch.autograd.grad(stacked(*args), args[1:], tangent))
    expanded = torch.ones((), dtype=torch.float64).expand(4, N)
    got = torch.autograd.grad(compiled(stacked)(*args), args[1:], expanded)
    torch.testing.assert_close(got, torch.autograd.grad(stacked(*args), args[1:], expanded))


def test_saved_tensors_go_through_hooks() -> None:
    args, packed = tensors(4), list[Tensor]()
    run = compiled(stacked)
    run(*args)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: packed.append(one) or one.clone(), lambda one: one):
        result = run(*args)
    assert packed
    got = torch.autograd.grad(result.sum(), args[1:])
    torch.testing.assert_close(got, torch.autograd.grad(stacked(*args).sum(), args[1:]))


def test_saved_tensors_are_let_go_in_backward() -> None:
    args = tensors(4)
    result = compiled(stacked)(*args)
    saved = [weakref.ref(one) for one in result.grad_fn.saved_tensors if not any(one is arg for arg in args)]
    result.sum().backward()
    gc.collect()
    assert saved
    assert not [one for one in saved if one() is not None]


def test_a_checkpoint_around_calls() -> None:
    args = tensors(4)
    run = compiled(stacked)
    result = torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False)
    got = torch.autograd.grad(result.sum(), args[1:])
    torch.testing.assert_close(got, torch.autograd.grad(stacked(*args).sum(), args[1:]))


def test_weights_that_are_replaced() -> None:
    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList(tensors(4)[1:])

        def forward(self, x: Tensor) -> Tensor:
            return stacked(x, *self.weights)

    module, x = Layers(), tensors(4)[0]
    run = compiled(module)
    run(x).sum().backward()
    module.weights[1] = torch.nn.Parameter(torch.randn(N, N, dtype=torch.float64))
    module.load_state_dict({name: one * 0.5 for name, one in module.state_dict().items()})
    module.zero_grad()
    run(x).sum().backward()
    got = [one.grad for one in module.parameters()]
    torch.testing.assert_close(got, list(torch.autograd.grad(module(x).sum(), list(module.parameters()))))


def test_hooks_of_weights_and_of_results() -> None:
    args, seen = tensors(4), list[str]()
    args[2].register_hook(lambda one: seen.append("weight") or one * 2)
    result = compiled(stacked)(*args)
    result.register_hook(lambda one: seen.append("result") or one * 3)
    result.sum().backward()
    assert seen == ["result", "weight"]
    (want,) = torch.autograd.grad(3 * stacked(*args).sum(), args[3:4])
    torch.testing.assert_close(args[3].grad, want)


def test_autocast_outside() -> None:
    args = [one.detach().float().requires_grad_(one.requires_grad) for one in tensors(4)]
    run = compiled(stacked)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = run(*args), stacked(*args)
        gradients = torch.autograd.grad(got.sum(), args[1:])
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(gradients, torch.autograd.grad(want.sum(), args[1:]), rtol=5e-2, atol=5e-2)


def test_batches_of_tangents_are_refused_as_by_autograd() -> None:
    args = tensors(4)
    result = compiled(stacked)(*args)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.autograd.grad(result, args[1:], torch.ones(2, 4, N, dtype=torch.float64), is_grads_batched=True)


def test_autograd_that_is_compiled() -> None:
    args = tensors(4)
    run = compiled(stacked)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        run(*args).sum().backward()
    want = torch.autograd.grad(stacked(*args).sum(), args[1:])
    torch.testing.assert_close([one.grad for one in args[1:]], list(want))


def test_backward_alone_is_compiled() -> None:
    args = tensors(4)
    result = compiled(stacked)(*args).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        result.backward()
    want = torch.autograd.grad(stacked(*args).sum(), args[1:])
    torch.testing.assert_close([one.grad for one in args[1:]], list(want))


@pytest.mark.usefixtures("fresh_graphs")
def test_graphs_of_segments_come_from_the_cache() -> None:
    args = tensors(4)
    want = torch.autograd.grad(compiled(stacked)(*args).sum(), args[1:])
    hits = counters["aot_cache_hit"]
    result = compiled(stacked)(*args)
    assert counters["aot_cache_hit"] > hits
    assert nodes_of(result) == ["_RunBackward"]
    torch.testing.assert_close(torch.autograd.grad(result.sum(), args[1:]), want)
