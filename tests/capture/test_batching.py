"""Loops that Dynamo has unrolled, as batches: the rewritten graph run by itself, in eager."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from kgen.capture.accesses import Access, Span, access_of, conflicts
from kgen.capture.batching import batch_repeats
from kgen.verdict import Outcome, Reason, Verdict

N = 8


class Rewriting:
    """A backend that runs rewritten graphs as they are."""

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []
        self.nodes = 0

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.verdicts = batch_repeats(gm)
        self.nodes = sum(node.op.startswith("call") for node in gm.graph.nodes)
        return gm.forward

    @property
    def batches(self) -> int:
        return sum(one.outcome is Outcome.BATCHED for one in self.verdicts)


def tensors(*sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(len(sizes))
    return [(torch.randn(size, dtype=torch.float64) * 4).to(dtype) for size in sizes]


def same(f: Callable[..., Any], *args: Tensor) -> Rewriting:
    """Checks results, and what has become of the arguments, against eager."""
    torch._dynamo.reset()
    backend = Rewriting()
    mine, others = ([arg.clone() for arg in args] for _ in range(2))
    got, want = torch.compile(f, backend=backend, fullgraph=True)(*mine), f(*others)
    torch.testing.assert_close((got, mine), (want, others), rtol=1e-12, atol=1e-12)
    return backend


# ---- what becomes a batch ----------------------------------------------------------------------------------------------


def rows(b: Tensor) -> Tensor:
    for i in range(N):
        b[i] = b[i] + 1
    return b


def columns(b: Tensor) -> None:
    for i in range(N):
        b[:, i] = b[:, i] * 2 + i


def tiles(b: Tensor) -> None:
    for i in range(4):
        b[2 * i : 2 * i + 2].mul_(3)


def parted_tiles(b: Tensor) -> None:
    for i in range(3):
        b[3 * i : 3 * i + 2] *= 3


def windows(b: Tensor) -> Tensor:
    out = b.new_zeros(6, 3)
    for i in range(6):
        out[i] = b[i : i + 3, 0]
    return out


def strided(b: Tensor) -> None:
    for i in range(4):
        b[2 * i] = b[2 * i + 1] * 2


def halves(b: Tensor) -> None:
    for i in range(N):
        b[i] = b[i] + 1 if i < N // 2 else b[i] * 2


def from_the_other_half(b: Tensor) -> None:
    for i in range(N // 2):
        b[i] = b[i + N // 2] * 2


def channel_swap(b: Tensor) -> Tensor:
    out = b.clone()
    for i in range(3):
        out[..., i] = b[..., 2 - i]
    return out


def elimination(b: Tensor) -> None:
    for i in range(1, N):
        b[i] = b[i] - b[0] * b[i, 0]


def loop_in_loop(b: Tensor) -> None:
    for i in range(N):
        for j in range(N):
            b[i, j] = b[i, j] * 2 + 1


def carried_inside(b: Tensor) -> None:
    for i in range(N):
        row = b[i]
        for j in range(3):
            row[j + 1] = row[j] * 2


def enumerated(b: Tensor) -> Tensor:
    out = torch.empty_like(b)
    for i, row in enumerate(b):
        out[i] = row * i + 0.5 * i
    return out


def joined(b: Tensor) -> tuple[Tensor, Tensor]:
    columns = torch.cat([b[:, i : i + 1] * 2 for i in range(N)], 1)
    return torch.stack([b[i].sin().sum() for i in range(N)]), columns


def diagonal(b: Tensor) -> None:
    for i in range(6):
        b[i, i + 1] = b[i + 1, i] + 1


def in_place(b: Tensor) -> None:
    for i in range(N):
        b[i] += 1
        b[i, 1:3] -= 2
        b[i, 0] = 7


def backwards(b: Tensor) -> None:
    for i in range(N - 1, -1, -1):
        b[i] = b[i].cumsum(0)


def written_backwards(b: Tensor) -> Tensor:
    out = b.new_zeros(N, N)
    for i in range(N):
        out[-1 - i] = b[i] * 2
    return out


def methods(b: Tensor) -> None:
    for i in range(N):
        b.select(0, i).relu_()
        b.narrow(0, i, 1).add_(i)


def matmuls(b: Tensor) -> Tensor:
    out = b.new_empty(N, 4, 4)
    for i in range(N):
        out[i] = b[i].view(4, 2) @ b[i].view(2, 4)
    return out


def views_of_views(b: Tensor) -> None:
    for i in range(4):
        b[1:][i][2:6] = b[1:][i][0]


def several_results(b: Tensor) -> None:
    for i in range(N):
        values, where = torch.topk(b[i], 3)
        b[i, :3] = values + where
        b[i, -1] = b[i, :-1].max()


def negative(b: Tensor) -> None:
    for i in range(1, 5):
        b[-i] = b[-i] * i


BATCHES = [
    rows, columns, tiles, parted_tiles, windows, strided, from_the_other_half, channel_swap, elimination, diagonal, in_place,
    backwards, written_backwards, methods, matmuls, enumerated, negative, several_results,
]  # fmt: skip


@pytest.mark.every(3)
@pytest.mark.parametrize("f", BATCHES, ids=lambda f: f.__name__)
def test_one_batch(f: Callable[..., Any]) -> None:
    assert same(f, *tensors((N, N))).batches == 1


@pytest.mark.parametrize(("f", "batches"), [(halves, 2), (joined, 2), (loop_in_loop, N + 1), (carried_inside, 1)])
def test_more_batches(f: Callable[..., Any], batches: int) -> None:
    assert same(f, *tensors((N, N))).batches == batches


def test_columns_of_a_fresh_tensor_with_gradients() -> None:
    """Each column is a view. Torch refuses writes into views that it made before their tensor had a gradient."""

    def f(b: Tensor) -> Tensor:
        out = b.new_zeros(N, 2)
        for i in range(N):
            out[i, 0] = b[i, 0] * 2
            out[i, 1] = b[i, 1] + b[i, 0]
        return out

    gradients = []
    for run in (f, torch.compile(f, backend="kgen", fullgraph=True, options={"cache": False, "fallback": "all"})):
        b = torch.arange(float(N * N)).reshape(N, N).requires_grad_()
        gradients += torch.autograd.grad(run(b).pow(2).sum(), b)
    torch.testing.assert_close(*gradients)


@pytest.mark.every(3)
@pytest.mark.parametrize("f", [*BATCHES, halves, joined, loop_in_loop, carried_inside], ids=lambda f: f.__name__)
def test_gradients(f: Callable[..., Any]) -> None:
    if f in (elimination, methods, several_results):
        pytest.skip("eager has no gradient: what it would need is overwritten")

    def loss(x: Tensor, w: Tensor) -> Tensor:
        b = x * w
        made = f(b)
        return sum((one.square().sum() for one in (made if isinstance(made, tuple) else (made,)) if one is not None), b.sum())

    torch._dynamo.reset()
    backend, args = Rewriting(), [one.requires_grad_() for one in tensors((N, N), (N, N))]
    got = torch.autograd.grad(torch.compile(loss, backend=backend, fullgraph=True)(*args), args)
    torch.testing.assert_close(got, torch.autograd.grad(loss(*args), args), rtol=1e-12, atol=1e-12)
    assert backend.batches


def test_any_count_is_a_graph_of_one_size() -> None:
    def f(b: Tensor) -> None:
        for i in range(b.shape[0]):
            b[i] = b[i] + 1

    assert len({same(f, torch.randn(n, 3)).nodes for n in (5, 50)}) == 1


# ---- what does not -----------------------------------------------------------------------------------------------------


def carried(b: Tensor) -> None:
    for i in range(1, N):
        b[i] = b[i] + b[i - 1]


def reversed_in_place(b: Tensor) -> None:
    for i in range(N):
        b[i] = b[N - 1 - i] + 0


def all_of_it(b: Tensor) -> None:
    for i in range(N):
        b[i] = b[i] + b.sum()


def by_another_view(b: Tensor) -> None:
    other = b.t()
    for i in range(N):
        b[i] = other[i] + 1


def one_place(b: Tensor) -> None:
    for i in range(N):
        b[0] = b[0] * 2 + b[i]


def overlapping(b: Tensor) -> None:
    for i in range(N - 2):
        b[i : i + 2].mul_(2)


def written_in_both_directions(b: Tensor) -> Tensor:
    out = b.new_zeros(2 * N, N)
    for i in range(N):
        out[i] = b[i]
        out[-1 - i] = b[i] * 2
    return out


def written_backwards_and_joined(b: Tensor) -> Tensor:
    out, made = b.new_zeros(N, N), []
    for i in range(N):
        out[-1 - i] = b[i]
        made.append(b[i] * 2)
    return torch.stack(made) + out


def later_in_each_row(b: Tensor) -> Tensor:
    """No two windows share an element, but along one dimension they overlap: torch functionalizes no writes into those."""
    out = b.new_zeros(N, 2 * N)
    for i in range(N):
        out[i, i : i + N] = b[i]
    return out


def rows_and_columns(b: Tensor) -> None:
    for i in range(N):
        b[i] += 1
        b[:, i] *= 2


def broadcast(b: Tensor) -> Tensor:
    out, wide = b.clone(), b[:1].expand(N, N)
    for i in range(N):
        out[i] = wide[i] * 2
        b[0] = out[i]
    return out


def accumulated(b: Tensor) -> Tensor:
    total = b.new_zeros(N)
    for i in range(N):
        total += b[i]
    return total


def single_values(b: Tensor) -> list[Tensor]:
    return [b[i] * 2 for i in range(N)]


@pytest.mark.parametrize(
    "f",
    [
        carried, reversed_in_place, all_of_it, by_another_view, one_place, overlapping, later_in_each_row, rows_and_columns,
        broadcast, accumulated, single_values, written_in_both_directions, written_backwards_and_joined,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_no_batch(f: Callable[..., Any]) -> None:
    assert not same(f, *tensors((N, N))).batches


def test_windows_that_overlap_along_a_dimension() -> None:
    """They are read in a batch, and written one after the other: read for a result, so that functionalization runs."""

    def f(b: Tensor) -> Tensor:
        out = b.new_zeros(N, 3 * N)
        for i in range(N):
            out[i, i : i + 2 * N : 2] = b[i]
        return torch.stack([out[i, i : i + 2 * N] for i in range(N)])

    torch._dynamo.reset()
    (b,) = tensors((N, N))
    torch.testing.assert_close(torch.compile(f, backend="kgen", fullgraph=True)(b), f(b))


def test_random_numbers_are_drawn_in_order() -> None:
    def f(b: Tensor) -> None:
        for i in range(N):
            b[i] = b[i] + torch.rand_like(b[i])

    backend = Rewriting()
    torch.compile(f, backend=backend, fullgraph=True)(torch.zeros(N, N))
    assert not backend.batches


def test_rounding_of_numbers() -> None:
    """Numbers that bfloat16 does not hold would be rounded once more, on their way through a tensor."""

    def f(b: Tensor) -> None:
        for i in range(N):
            b[i] = b[i] * (i + 1000)

    assert not same(f, *tensors((N, N), dtype=torch.bfloat16)).batches
    assert same(f, *tensors((N, N), dtype=torch.float32)).batches == 1


def test_types_of_numbers() -> None:
    def f(b: Tensor) -> Tensor:
        out = torch.empty(N)
        for i in range(N):
            out[i] = b[i, 0] * (i * 0.5)
        return out

    same(f, torch.arange(64).view(N, N))
    same(f, torch.arange(64, dtype=torch.int32).view(N, N))


def test_sizes_that_change_in_place() -> None:
    def f(b: Tensor) -> Tensor:
        out = b.clone()
        for i in range(4):
            out[i] = out[i] + 1
        return out.t_()

    assert not same(f, *tensors((4, 6))).batches


def test_autocast() -> None:
    def f(b: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.stack([b[i] @ b for i in range(N)])

    assert not same(f, *tensors((N, N), dtype=torch.float32)).verdicts


def test_arguments_that_share_memory() -> None:
    def f(b: Tensor, other: Tensor) -> None:
        for i in range(4):
            b[i] = other[i] + 1

    torch._dynamo.reset()
    backend, mine, exact = Rewriting(), torch.randn(6, 6), torch.empty(6, 6)
    exact.copy_(mine)
    torch.compile(f, backend=backend, fullgraph=True)(mine[1:], mine[:-1])
    f(exact[1:], exact[:-1])
    torch.testing.assert_close(mine, exact)
    assert not backend.batches


def test_a_join_into_a_tensor_of_the_caller() -> None:
    def f(b: Tensor, out: Tensor) -> Tensor:
        return torch.stack([b[i] * 2 for i in range(N)], out=out)

    assert not same(f, *tensors((N, 3), (N, 3))).batches


def test_under_vmap() -> None:
    def f(b: Tensor) -> Tensor:
        def one(row: Tensor) -> Tensor:
            return torch.stack([row[i] * 2 for i in range(N)])

        return torch.vmap(one)(b)

    assert not same(f, *tensors((N, N))).batches


def test_a_refusal_says_why() -> None:
    (verdict,) = same(carried, *tensors((N, N))).verdicts
    assert (verdict.outcome, verdict.reason) == (Outcome.ILLEGAL, Reason.ITERATIONS)
    assert "other iterations need" in verdict.detail


def test_a_batch_says_why() -> None:
    def f(b: Tensor) -> Tensor:
        b = b.clone()
        for i in range(N):
            b[i] = b[i] + 1
        return b

    (verdict,) = same(f, *tensors((N, N))).verdicts
    assert (verdict.outcome, verdict.reason) == (Outcome.BATCHED, Reason.INDEPENDENT_ITERATIONS)


# ---- accesses ----------------------------------------------------------------------------------------------------------


def test_accesses() -> None:
    assert access_of((8, 4), [[0, 2, 4]]) == Access((Span(0, 2, 1, kept=False), Span(0, 0, 4)))
    assert access_of((8, 4), [[Ellipsis] * 2, [-1, -2]]) == Access((Span(0, 0, 8), Span(3, -1, 1, kept=False)))
    assert access_of((8,), [[0, 2, 3]]) is access_of((8,), [[8, 9]]) is access_of((8,), [[None, None]]) is None
    assert access_of((8,), [[slice(0, 2), slice(2, 3)]]) is None


def test_conflicts_are_those_of_the_elements() -> None:
    """Against all elements of all pairs of iterations."""
    draw, found = random.Random(0), {True: 0, False: 0}
    for _ in range(3000):
        count = draw.randint(2, 5)
        one, other = (_drawn(draw, count) for _ in range(2))
        meet = any(_elements(one, k) & _elements(other, m) for k in range(count) for m in range(count) if k != m)
        claimed = conflicts(Access((one,)), Access((other,)), count)
        assert claimed or not meet
        found[claimed == meet] += 1
    assert found[True] > 8 * found[False]


def _drawn(draw: random.Random, count: int) -> Span:
    advance = draw.randint(-3, 3)
    return Span(draw.randint(0, 12) + max(0, -advance * count), advance, draw.randint(1, 3), draw.randint(1, 3))


def _elements(span: Span, iteration: int) -> set[int]:
    return {span.first(iteration) + span.step * t for t in range(span.length)}


# ---- at random ---------------------------------------------------------------------------------------------------------


def _entry(draw: random.Random, kinds: str) -> Callable[[int], Any]:
    kind, by, at = draw.choice(kinds), draw.choice((1, 1, 1, 1, 2)), draw.randint(0, 2)
    if kind == "b":
        return lambda i: 6 - i
    if kind == "i":
        return lambda i: at + by * i
    if kind == "w":
        return lambda i: slice(at + 2 * i, at + 2 * i + by)
    return lambda i: at if kind == "c" else slice(at, at + 3)


def _program(seed: int) -> Callable[..., None]:
    """A loop of two statements whose indices are drawn, into two of three tensors."""
    draw = random.Random(seed)
    count = draw.randint(3, 4)
    index = [[_entry(draw, first), _entry(draw, "sscw")][: draw.randint(1, 2)] for first in ("iw", "iw", "iibsw", "iibsw")]
    names = [draw.choice(which) for which in ("0", "0011", "012222", "012222")]
    kinds = [draw.choice(("set", "set", "add", "relu")) for _ in range(2)]

    def program(*args: Tensor) -> None:
        for i in range(count):
            for kind, target, source in zip(kinds, (0, 1), (2, 3), strict=True):
                there = tuple(entry(i) for entry in index[target])
                value = args[int(names[source])][tuple(entry(i) for entry in index[source])]
                number = value.sum() * 0.5 + i
                if kind == "set":
                    args[int(names[target])][there] = number
                elif kind == "add":
                    args[int(names[target])][there].add_(number)
                else:
                    args[int(names[target])][there].relu_()

    return program


def test_programs_at_random() -> None:
    batches = sum(same(_program(seed), *tensors(*[(12, 12)] * 3)).batches for seed in range(16))
    assert batches > 4
