"""What makes a call fail: indices out of range that move no address, and integers divided by zero. One graph has all forms of a
failure, each with an argument of its own, and each argument is wrong in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_graphs import run
from op_case import lowered
from torch import Tensor

from kgen.reference.evaluate import evaluate_graph

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore::UserWarning")]


def compiled(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(f, backend="kgen", fullgraph=True, dynamic=False, options={"cache": False, **options})


def each_fails(f: Callable[..., Any], good: Sequence[Tensor], bad: Sequence[Tensor], error: type[Exception], text: str) -> None:
    """`f` agrees with eager on good arguments and raises `error` with any one of the bad ones, in kernels and evaluated."""
    good = [t.clone() for t in good]  # equal arguments would be one
    compiled_f, graph = compiled(f), lowered(f, good)
    torch.testing.assert_close(compiled_f(*good), f(*good))
    for k, wrong in enumerate(bad):
        args = [*good[:k], wrong, *good[k + 1 :]]
        with pytest.raises((IndexError, RuntimeError)):
            f(*args)
        with pytest.raises(error, match=text):
            compiled_f(*args)
        with pytest.raises(error):
            evaluate_graph(graph, args)
    torch.testing.assert_close(compiled_f(*good), f(*good))  # and nothing is left broken


ONE = torch.arange(4.0).reshape(1, 4)


def _reads(*i: Tensor) -> tuple[Tensor, ...]:
    x = i[-1]
    return (
        x[i[0]],
        (x + 1).index_select(0, i[1]),
        x.gather(0, i[2][:, None].expand(3, 4)),
        F.embedding(i[3], x),
        x.expand(3, 4)[i[4]],  # of stride 0
        torch.zeros(3)[i[5]] + x[0, :3],  # a number
        torch.arange(3)[i[6]] + x[0, :3],
        F.pad(x[0], (1, 1))[i[7]],  # what a mask switches off
        x[:, :1].take(i[8]),
        x[i[9]].sum(1),
        torch.cat([x[i[10]], x.expand(3, 4) * 2]),
    )


def test_reads_that_no_index_moves() -> None:
    zeros, seven = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 7, 0])
    each_fails(_reads, [*[zeros] * 11, ONE], [seven] * 11, IndexError, "out of range")


def test_reads_of_an_input_that_repeats() -> None:
    run_f, x, last = compiled(lambda x, i: x[i] * 2), ONE.expand(3, 4), torch.tensor([0, 2, -3])
    assert torch.equal(run_f(x, last), ONE.expand(3, 4) * 2)
    for bad in (last + 1, last - 1):
        with pytest.raises(IndexError):
            run_f(x, bad)


def _writes(*i: Tensor) -> tuple[Tensor, ...]:
    x, rows = i[-2:]
    copy = x.clone()
    copy[:, i[3]] = rows[:, :3].sum(1)[None]
    return (
        x.index_add(0, i[0], rows),
        x.scatter_add(0, i[1][:, None].expand(3, 4), rows),
        torch.zeros(3, 4).scatter(1, i[2][:, None], 1.0) + x,
        copy,
    )


def test_writes_that_no_index_moves() -> None:
    zeros = torch.zeros(3, dtype=torch.int64)
    each_fails(_writes, [*[zeros] * 4, ONE, torch.ones(3, 4)], [zeros + 4] * 4, Exception, "out of range")


def test_a_write_in_place_that_no_index_moves() -> None:
    def f(x: Tensor, i: Tensor) -> None:
        x.index_add_(0, i, torch.ones(3, 4))

    x, run_f = ONE.clone(), compiled(f)
    run_f(x, torch.zeros(3, dtype=torch.int64))
    assert torch.equal(x, ONE + 3)
    with pytest.raises(IndexError):
        run_f(x, torch.tensor([0, 1, 0]))


@pytest.mark.interpret
def test_kernels_of_a_gpu_assert() -> None:
    zeros = torch.zeros(3, dtype=torch.int64)
    ran = run(_reads, *(zeros.clone() for _ in range(11)), ONE, gpu_interpreter=True)
    assert sum(text.count("device_assert") for text in ran.texts) >= 11


def _divisions(*by: Tensor) -> tuple[Tensor, ...]:
    x = torch.arange(21, dtype=torch.int32)
    return (
        x // by[0],
        x % by[1],
        torch.fmod(x, by[2]),
        torch.div(x, by[3], rounding_mode="trunc"),
        torch.where(by[4] != 0, x // by[4], 0),
        (x // by[5][13]).sum(),  # one number
        (x.view(3, 7) // by[6].view(3, 7)).sum(0),
        x[torch.arange(21) // by[7]],
        9 // by[8].to(torch.uint8),
        x.to(torch.int64) % by[9],
    )


def test_integers_divided_by_zero() -> None:
    ones = torch.ones(21, dtype=torch.int32)
    zero = ones.clone()
    zero[13] = 0
    each_fails(_divisions, [ones] * 10, [zero] * 10, RuntimeError, "ZeroDivisionError")


def _guarded(x: Tensor, y: Tensor, one: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    """No divisor is zero, and no index out of range, but those of lanes that do not count."""
    q = x // y
    return (
        q,
        x.t() % y.t().contiguous(),
        F.pad(q, (3, 2, 1, 0)),
        torch.cat([q, x, x % y], 1),
        F.max_pool2d(q.float()[None], 3, 1, 1),
        q.sum(0),
        q.sum(1),
        q.cumsum(1),
        F.pad(one[i], (1, 1)),
        torch.cat([one[i], one, one[i]], 0),
        x.index_put((i,), x[:3] // y[:3], accumulate=True),
    )


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"gpu_interpreter": True}, marks=pytest.mark.interpret)], ids=["cpu", "gpu"]
)
def test_lanes_that_do_not_count_do_not_fail(options: dict[str, Any]) -> None:
    x, y = torch.arange(5 * 21).reshape(5, 21), torch.arange(5 * 21).reshape(5, 21) % 7 + 1
    run(_guarded, x, y, ONE, torch.zeros(3, dtype=torch.int64), **options)
