"""Whole graphs through the Triton back end, in its interpreter: templates, walks, masks and index arithmetic against eager."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen import near, options_for, rendered
from gpu_graphs import GRAPHS, Maker, Ran, run, short_rows, short_shares, wide_indices

from kgen.backend import kgen_backend
from tests.kernels import plans
from tests.slow import slow_but

pytestmark = [pytest.mark.interpret, pytest.mark.cpu, pytest.mark.filterwarnings("ignore::UserWarning")]


def interpreted(name: str, **how: Any) -> Ran:
    graph = GRAPHS[name]
    with short_rows() if graph.short else nullcontext():
        return run(graph.fn, *graph.inputs(Maker()), backward=graph.backward, gpu_interpreter=True, **how)


@pytest.mark.parametrize("name", slow_but(lambda name: name not in ("long_loss", "mixed_dtypes", "depthwise_filters"), GRAPHS))
def test_graphs(name: str) -> None:
    ran, graph = interpreted(name), GRAPHS[name]
    assert graph.kinds <= ran.kinds
    if graph.loops is not None:
        assert ran.loops == graph.loops


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["softmax", "statistics", "columns", "arg_reductions"])
def test_rows_that_two_kernels_share(name: str) -> None:
    """The reductions of `GRAPHS` again, cut in shares of 16 points, the last one ragged. Those of statistics, which have
    a mean, must be equal: they are 7 of 11."""
    graph = GRAPHS[name]
    with short_shares():
        ran = run(graph.fn, *graph.inputs(Maker()), gpu_interpreter=True)
    assert ("partial" in ran.kinds) == (name != "softmax")


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "name", ["chain", "transposed", "gathers", "softmax", "arg_reductions", "long_softmax", "long_arg_reductions", "long_scans"]
)
def test_wide_indices(name: str) -> None:
    with wide_indices():
        ran = interpreted(name)
    assert all(".to(tl.int64)" in text for text in ran.texts)


INFINITE = torch.tensor(
    [
        [1.0, 2, 3],
        [math.inf, 1, 2],
        [-math.inf, -math.inf, -math.inf],
        [math.inf, -math.inf, 0],
        [math.nan, 1, 2],
        [math.inf, math.nan, 0],
        [-math.inf, 0, 1],
    ]
)


@pytest.mark.every(3)
@pytest.mark.parametrize("options", [{}, {"gpu_interpreter": True}], ids=["cpu", "gpu"])
@pytest.mark.parametrize("long", [False, True], ids=["rows", "loop"])
def test_sums_of_exponentials_of_infinite_numbers(options: dict[str, Any], long: bool) -> None:
    """Also where a full row, or a whole step of a walk, is infinite."""
    x = INFINITE.repeat_interleave(20, 1)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            x.logsumexp(1),
            x.logsumexp((0, 1), True),
            x[:3].logsumexp(0),
            x.softmax(1),
            x.log_softmax(1),
            x[:, :0].logsumexp(1),
        )

    with short_rows() if long else nullcontext():
        got = torch.compile(f, backend="kgen", options={"cache": False, **options})(x)
    torch.testing.assert_close(got, f(x), equal_nan=True)


# ---- sizes that are not numbers -------------------------------------------------------------------------------------

DYNAMIC: dict[str, Callable[..., Any]] = {
    "points": lambda x: (x * 2 + x.mean()).relu(),
    "plane": lambda x: x + x.t().contiguous().t().flip(0),
    "rows": lambda x: (x.softmax(-1), x.sum(0), *torch.var_mean(x, 1)),
    "arg_reductions": lambda x: (x.argmax(1), x.argmin(), *x.max(0)),
    "scans": lambda x: (x.cumsum(1), x.cumsum(0)),
    "concatenation": lambda x: torch.cat([x, x.exp(), x[:, 1:]], 1),
    "indices": lambda x: (
        x[torch.arange(x.shape[0] - 1, -1, -1)],
        x.new_zeros(x.shape[0]).index_add(0, torch.arange(2), x[0, :2]),
    ),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", DYNAMIC)
def test_one_graph_for_many_sizes(name: str) -> None:
    fn, counts = DYNAMIC[name], CompileCounter()
    compiled = torch.compile(fn, backend=counts, dynamic=True, fullgraph=True)
    for shape in ((5, 33), (2, 7), (64, 128), (3, 1100)):
        x = Maker()(*shape)
        near(fn)((x,), [compiled(x), x], [fn(x), x])
    assert counts.graphs == 1


class CompileCounter:
    """The back end, in the interpreter, and how many graphs it was given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, gm: Any, inputs: Any) -> Any:
        self.graphs += 1
        return kgen_backend(gm, inputs, options={"gpu_interpreter": True, "cache": False})


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_inputs_are_changed_and_others_left_alone() -> None:
    x, v = Maker()(6, 8), Maker()(8)
    room = torch.zeros(10, 12)
    view = room[2:8, 3:11].copy_(x)

    def f(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        x.mul_(2).add_(v)
        x[2] = x[3] + v
        return x.sum(0)

    want = f(x, v)
    got = torch.compile(f, backend="kgen", options={"gpu_interpreter": True, "cache": False})(view, v)
    torch.testing.assert_close((got, view), (want, x))
    view.zero_()
    assert not room.any()


def test_what_has_no_elements_is_not_read() -> None:
    """It may have no address: a reduction of nothing is a kernel all the same."""
    texts = run(lambda x: (x.sum(1), x.reshape(-1).cumsum(0)), Maker()(3, 0), gpu_interpreter=True).texts
    assert texts
    assert not any("tl.load(p_x" in text or "tl.load(p_arg0" in text for text in texts)


def test_a_loop_without_points_takes_nothing_along() -> None:
    """What has no elements is made of each element of what has some."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2 - 1
        return y[..., :0] * y, y

    x = torch.randn(2, 8, 1)
    options = {"cache": False, "gpu_interpreter": True, "poison": True}
    found = torch.compile(f, backend="kgen", fullgraph=True, options=options)(x)
    torch.testing.assert_close(found, f(x))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (1,), (1, 1), ()], ids=str)
def test_empty_and_tiny(shape: tuple[int, ...]) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat = x.reshape(-1)
        return x + 1, x.sum(), x.prod(), (x > 0).all(), flat.cumsum(0), torch.cat([flat, flat]), flat.mean(), x.flatten()[:0]

    run(f, Maker()(*shape), gpu_interpreter=True)


def test_training_with_dropout() -> None:
    """The backward draws the same mask; results repeat for one seed and differ for another."""
    layer = torch.nn.Sequential(torch.nn.Linear(9, 16), torch.nn.GELU(), torch.nn.Dropout(0.4), torch.nn.LayerNorm(16))
    step = torch.compile(lambda x: layer(x).square().sum(), backend="kgen", options={"gpu_interpreter": True, "cache": False})
    x = Maker()(12, 9)

    def gradients_of(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        layer.zero_grad()
        step(x).backward()
        return [p.grad.clone() for p in layer.parameters() if p.grad is not None]

    first, again, other = gradients_of(0), gradients_of(0), gradients_of(1)
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))

    def masked(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.4, True)

    leaf = torch.ones(50, 20, requires_grad=True)
    out = torch.compile(masked, backend="kgen", options={"gpu_interpreter": True, "cache": False})(leaf)
    out.sum().backward()
    assert torch.equal(leaf.grad, out)
    assert 0.5 < (out > 0).float().mean() < 0.7


def test_an_update_beside_wider_loops_happens_once() -> None:
    """They share what they read, and a kernel: in it the update has fewer loops."""
    make = Maker()

    def f(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return z.index_add(0, i, x) - 0.25, x.t() * y

    assert (
        len(run(f, make(1, 101), make(1, 101), make(1, 101), torch.zeros(1, dtype=torch.int64), gpu_interpreter=True).texts) < 4
    )


def test_indices_are_compared_and_converted_in_32_bits() -> None:
    """64 bits take twice the registers. A sum of positions has the type of its result."""

    def compared(x: torch.Tensor) -> torch.Tensor:
        i = torch.arange(x.shape[1])
        return torch.where(i[:, None] - i >= 2, x, -x) * (i[:, None] + i)

    def summed(x: torch.Tensor) -> torch.Tensor:
        i = torch.arange(x.shape[1])
        return torch.where(x > 0, i, -i).sum(1)

    x = Maker()(37, 37)
    for fn, is_wide in ((compared, False), (summed, True)):
        [text] = run(fn, x, gpu_interpreter=True).texts
        assert ("tl.int64" in text) == is_wide


def test_positions_may_need_more_bits_than_offsets() -> None:
    """Of 17 steps of 10**9, of which the offsets in memory are below 17."""
    make = Maker()

    def steps() -> torch.Tensor:
        return torch.arange(0, 17 * 10**9, 10**9)

    def added(x: torch.Tensor) -> torch.Tensor:
        return x.double() + torch.arange(0, 17 << 30, 1 << 30)

    run(steps, gpu_interpreter=True)
    run(added, make(17), gpu_interpreter=True)
    run(lambda x: (x > 0) & (torch.arange(0, 17 * 10**9, 10**9) > 10**10), make(17), gpu_interpreter=True)


def made_in_rows(seeds: torch.Tensor) -> torch.Tensor:
    return (torch.ops.kgen.rand([70000, 70000], seeds, 0, "rand", torch.float32) > 0.5).any(-1)


def place_of_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x[:, None] + y).argmax()


@pytest.mark.parametrize("fn", [made_in_rows, place_of_sum])
def test_positions_past_32_bits(fn: Callable[..., torch.Tensor]) -> None:
    """Nothing in memory has as many elements."""
    args = {
        made_in_rows: [torch.zeros(1, dtype=torch.int64)], place_of_sum: [torch.zeros(70000), torch.zeros(70000)]
    }  # fmt: skip
    options = options_for(True)
    plan = plans(fn, *args[fn], options=options).forward
    calls = [rendered(kernel, plan, f"k{n}", options) for n, kernel in enumerate(plan.kernels)]
    assert "*70000 + tl.cast(" in calls[0].launch.source


def grouped_softmax(x: torch.Tensor) -> torch.Tensor:
    return F.pixel_shuffle(x, 2).softmax(-1)


def test_rows_of_a_group_share_a_running_maximum() -> None:
    """Neighbouring pixels were channels, which lie along the axis of rows: a softmax of both is that of the group."""
    x = Maker()(2, 64, 8, 8).contiguous(memory_format=torch.channels_last)
    x[0, 3, 2, 2], x[1, :4], x[1, 20, 1, 1], x[1, 40] = math.inf, -math.inf, math.nan, -math.inf
    [text] = run(grouped_softmax, x, gpu_interpreter=True).texts
    assert "join_group_rescaled" in text
