"""What a graph for inference computes again, kgen computes once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels import plans
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import kgen
from kgen.ir.plan import Schedule
from kgen.lowering.repeats import drop_repeats

pytestmark = pytest.mark.cpu


def r(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def same(f: Callable[..., Any], *args: Tensor) -> Any:
    """The results, which are eager's."""
    torch._dynamo.reset()
    mine, others = ([a.clone() for a in args] for _ in range(2))
    with torch.no_grad():
        got, want = torch.compile(f, backend="kgen", fullgraph=True)(*mine), f(*others)
    for one, other in zip((*got, *mine), (*want, *others), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)
    return got


def matmuls(plan: Schedule) -> int:
    return sum(s.kind == "contraction" for kernel in plan.kernels for s in kernel.statements) + len(plan.calls)


def test_matmuls() -> None:
    f = lambda x, w, v: (torch.relu(x @ w), torch.tanh(x @ w) @ v)  # noqa: E731
    args = r(64, 32), r(32, 48), r(48, 16)
    assert matmuls(plans(f, *args).forward) == 2
    same(f, *args)


def test_what_is_made_of_repeats_is_one_too() -> None:
    def layer(x: Tensor, steps: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[0], dtype=torch.float32), steps)
        return x * torch.cat((angles, angles), 1).cos()

    f = lambda x, y, steps: (layer(x, steps).sum(), layer(y, steps).sum())  # noqa: E731
    gm = make_fx(f)(r(16, 8), r(16, 8), r(4))
    drop_repeats(gm)
    names = [node.name for node in gm.graph.nodes]
    assert [sum(name.startswith(kind) for name in names) for kind in ("arange", "cat", "cos", "sum")] == [1, 1, 1, 2]
    same(f, r(16, 8), r(16, 8), r(4))


def test_results_are_tensors_of_their_own() -> None:
    f = lambda x: (x.exp(), x.exp(), x.exp() + 1, x.t(), x.t())  # noqa: E731
    first, second, *_ = same(f, r(5, 7))
    assert first.data_ptr() != second.data_ptr()


def test_a_result_and_what_is_made_of_its_equal() -> None:
    """One call is enough, whichever of both comes first."""
    for f in (lambda x, w: (x @ w, torch.relu(x @ w)), lambda x, w: (torch.relu(x @ w), x @ w)):
        assert matmuls(plans(f, r(64, 32), r(32, 48)).forward) == 1
        same(f, r(64, 32), r(32, 48))
    first, second, third = same(lambda x: (x.exp().view(-1), x.exp().view(-1), x.exp()), r(5, 7))
    assert len({t.data_ptr() for t in (first, second, third)}) == 3


def test_memory_written_in_between() -> None:
    graph = torch.fx.Graph()
    a, b = (graph.placeholder(name) for name in "ab")
    sums = []
    for _ in range(2):
        sums += [graph.call_function(torch.ops.aten.sum.default, (a,)) for _ in range(2)]
        graph.call_function(torch.ops.aten.copy_.default, (a, b))
    total = graph.call_function(torch.ops.aten.stack.default, (sums,))
    graph.output((total,))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(())
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    drop_repeats(gm)
    [made] = [node for node in gm.graph.nodes if node.target is torch.ops.aten.stack.default]
    first, second, third, last = made.args[0]
    assert first is second
    assert third is last
    assert first is not third


def test_numbers_that_compare_equal_are_not_merged() -> None:
    f = lambda x, i: (  # noqa: E731
        torch.reciprocal(torch.clamp(x * 0, max=0.0) * 0.0), torch.where(x > 0, 0.0, x), torch.where(x > 0, -0.0, x),
        1 / torch.where(x > 0, 0.0, x), 1 / torch.where(x > 0, -0.0, x), i + 1, i + 1.0, i + True,
    )  # fmt: skip
    got = same(f, r(50).abs() + 1, torch.arange(5))
    assert set(got[3].tolist()) == {math.inf}
    assert set(got[4].tolist()) == {-math.inf}
    assert [t.dtype for t in got[5:]] == [torch.int64, torch.float32, torch.int64]


def test_random_numbers_are_drawn_anew() -> None:
    first, second = torch.compile(lambda: (torch.rand(50) + 1, torch.rand(50) + 1), backend="kgen")()
    assert not torch.equal(first, second)


def test_writes_in_between() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        before = x.sum(0)
        x.add_(1)
        y, z = x.clone(), x.clone()
        y.mul_(2)
        return before, x.sum(0), y, z * 1, x.exp() + y

    same(f, r(6, 5))


def test_writes_of_an_operator_in_between() -> None:
    torch._dynamo.reset()
    with torch.library._scoped_library("kgen_repeats", "DEF") as library:
        library.define("bump(Tensor(a!) x) -> ()")

        def bump(x: Tensor) -> None:
            x.add_(1)

        library.impl("bump", bump, "CPU")
        library.impl("bump", lambda x: None, "Meta")

        def f(x: Tensor) -> tuple[Tensor, ...]:
            before = x.sum(0)
            torch.ops.kgen_repeats.bump(x)
            middle = x.sum(0)
            torch.ops.kgen_repeats.bump(x)
            return before, middle, x.sum(0)

        same(f, r(6, 5))


def test_sizes_known_at_run_time() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        same(lambda x: (x.nonzero().sum(), (x.nonzero() + 1).sum()), (r(20) > 0).float())


def test_eager_for_an_operator() -> None:
    with kgen.config.override(fallback=("aten.mm",)):
        same(lambda x, w: ((x @ w).relu(), (x @ w).tanh()), r(6, 5), r(5, 7))
