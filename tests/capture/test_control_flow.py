"""Higher-order operators: bodies are compiled once, and run as often as the operator says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.map import map as map_rows

from kgen.counters import counters

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("fresh_counters")]


def run(f: Callable[..., Any], *args: Tensor, **options: Any) -> Any:
    """The results, which are eager's."""
    got = torch.compile(f, backend="kgen", fullgraph=True, options={"strict": True}, **options)(*args)
    torch.testing.assert_close(got, f(*args))
    return got


def branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: torch.softmax(x @ x.t() @ x, -1) + 1, lambda x: (x.cos() * 2, x.sin())[0], (x,))


def doubled(x: Tensor) -> Any:
    return while_loop(lambda i, x: x.sum() < 100, lambda i, x: (i + 1, x * 2 + 1), (torch.tensor(0), x))


def counted(n: Tensor, x: Tensor) -> Any:
    return while_loop(lambda i, n, x: i < n, lambda i, n, x: (i + 1, n.clone(), x * 2 + 1), (torch.tensor(0), n, x))


def rnn(x: Tensor, w: Tensor) -> Any:
    def step(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + row)
        return h, h * 2

    return scan(step, x.new_zeros(x.shape[1]), x)


def columns(x: Tensor) -> Any:
    return scan(lambda total, column: (total * 0.5 + column, (total * column).sin()), x.new_zeros(x.shape[0]), x, dim=1)


def nested(x: Tensor) -> Tensor:
    def grown(x: Tensor) -> Tensor:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2 + 1), (torch.tensor(0), x))[1]

    return torch.cond(x.sum() > 0, grown, lambda x: x.cos() * 2, (x,))


@pytest.mark.every(3)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("f", [branches, nested])
def test_branches(f: Callable[..., Any], sign: int) -> None:
    run(f, sign * torch.rand(8, 8))
    assert counters["kernels"] >= 3  # the condition and both branches


def test_a_graph_takes_both_branches() -> None:
    compiled = torch.compile(branches, backend="kgen", fullgraph=True)
    for sign in (1, -1, 1):
        x = sign * torch.rand(8, 8)
        torch.testing.assert_close(compiled(x), branches(x))
    assert counters["graphs"] == 3  # with one for each branch


def test_loops_that_data_ends() -> None:
    run(doubled, torch.rand(8))
    assert counters["kernels"] >= 2


@pytest.mark.parametrize("trips", [0, 1, 5])
def test_counted_loops(trips: int) -> None:
    run(counted, torch.tensor(trips), torch.rand(8))


def test_the_caller_keeps_what_no_iteration_changes() -> None:
    x = torch.rand(8)
    result = run(counted, torch.tensor(0), x)[2]
    assert result.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("f", [rnn, columns])
def test_scans(f: Callable[..., Any]) -> None:
    run(f, *((torch.rand(6, 8), torch.rand(8, 8)) if f is rnn else (torch.rand(6, 8),)))
    assert counters["kernels"] >= 2


def test_gradients_of_a_scan() -> None:
    x = torch.rand(6, 8, requires_grad=True)
    got = torch.autograd.grad(torch.compile(columns, backend="kgen", fullgraph=True)(x)[1].sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(columns(x)[1].sum(), x))


def test_gradients_of_a_scan_that_saves_what_it_returns() -> None:
    """The gradient of tanh needs its result, which the body returns as well."""

    def f(start: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return scan(lambda h, row: ((h + row).tanh(), h * row), start, x)  # type: ignore[no-any-return]

    args = [torch.rand(8, requires_grad=True), torch.rand(6, 8, requires_grad=True)]
    total = lambda results: results[0].sum() + results[1].square().sum()  # noqa: E731
    got = torch.autograd.grad(total(torch.compile(f, backend="kgen", fullgraph=True)(*args)), args)
    torch.testing.assert_close(got, torch.autograd.grad(total(f(*args)), args))


def test_gradients_of_branches() -> None:
    x = torch.rand(6, 8, requires_grad=True)
    got = torch.autograd.grad(torch.compile(branches, backend="kgen", fullgraph=True)(x).square().sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(branches(x).square().sum(), x))


def test_a_map_is_a_batch() -> None:
    def f(x: Tensor) -> Tensor:
        return map_rows(lambda row, first: row.sin().sum() + first, x, x[0].clone())

    run(f, torch.rand(6, 8))
    assert (counters["kernels"], counters["extern.map_impl"]) == (1, 0)


@pytest.mark.parametrize("name", ["view", "transposed result", "expanded result"])
def test_a_map_has_results_of_stacked_rows(name: str) -> None:
    """Whatever strides the batch gives them: views of them see the elements that eager's views see."""
    if name == "view":
        f = lambda x, y: map_rows(lambda row, y: row * y + 1, x, y).view(-1)  # noqa: E731
        args = torch.rand(3, 5).t(), torch.rand(3)
    else:
        body = (lambda row, y: (row * y).t()) if name == "transposed result" else (lambda row, y: (row.sum(0) * y).expand(4, 3))
        f = lambda x, y: map_rows(body, x, y)  # noqa: E731
        args = torch.rand(5, 4, 3), torch.rand(3)
    got, expected = torch.compile(f, backend="kgen", fullgraph=True)(*args), f(*args)
    torch.testing.assert_close(got, expected, check_stride=True)
    assert counters["extern.map_impl"] == 0


def test_gradients_of_a_map() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return map_rows(lambda row, w: (row * w).sin(), x, w)

    args = [torch.rand(6, 8, requires_grad=True), torch.rand(8, requires_grad=True)]
    got = torch.autograd.grad(torch.compile(f, backend="kgen", fullgraph=True)(*args).sum(), args)
    torch.testing.assert_close(got, torch.autograd.grad(f(*args).sum(), args))
    assert counters["extern.map_impl"] == 0


def test_a_map_that_draws_is_none() -> None:
    f = lambda x: map_rows(lambda row, w: row + torch.rand_like(w), x, x[0].clone())  # noqa: E731
    got = torch.compile(f, backend="kgen", fullgraph=True)(torch.zeros(6, 8))
    assert len({tuple(row) for row in got.tolist()}) == 6
    assert counters["extern.map_impl"] == 1


def test_associative_scans() -> None:
    run(lambda x: associative_scan(lambda a, b: a * 0.5 + b, x, 0, combine_mode="generic"), torch.rand(8, 4))


@torch.compiler.nested_compile_region
def layer(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w) + x


@pytest.mark.usefixtures("fresh_graphs")
@pytest.mark.parametrize(("layers", "graphs", "calls"), [(2, 2, 2), (5, 1, 0)])
def test_equal_layers_are_compiled_once(layers: int, graphs: int, calls: int) -> None:
    def f(x: Tensor, weights: list[Tensor]) -> Tensor:
        for w in weights:
            x = layer(x, w)
        return x

    x, weights = torch.rand(8, 8), [torch.rand(8, 8) for _ in range(layers)]
    compiled = torch.compile(f, backend="kgen", fullgraph=True, options={"strict": True})
    torch.testing.assert_close(compiled(x, weights), f(x, weights))
    assert (counters["lowered"], counters["extern.invoke_subgraph"]) == (graphs, calls)  # many calls: the body alone


@pytest.mark.usefixtures("fresh_graphs")
def test_gradients_of_equal_layers() -> None:
    def f(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = layer(x, w)
        return x.square().sum()

    args = [torch.rand(8, 8, requires_grad=True) for _ in range(4)]
    got = torch.autograd.grad(torch.compile(f, backend="kgen", fullgraph=True)(*args), args)
    torch.testing.assert_close(got, torch.autograd.grad(f(*args), args), rtol=1e-4, atol=1e-4)
    assert counters["lowered"] == 4  # forward, backward, and the layer's part of each


def test_sizes_are_symbols() -> None:
    compiled = torch.compile(branches, backend="kgen", fullgraph=True, dynamic=True)
    for size in (4, 7, 9):
        x = torch.rand(size, 8)
        torch.testing.assert_close(compiled(x), branches(x))


def test_eager_where_asked_for() -> None:
    x = torch.rand(4, 4)
    got = torch.compile(branches, backend="kgen", fullgraph=True, options={"fallback": ("all",)})(x)
    torch.testing.assert_close(got, branches(x))
