"""Scans of few long rows, shared among the programs of a GPU: right in the interpreter, and which are left in one program."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.device import Gpu
from kgen.ir.index import Sizes
from kgen.ir.plan import Kernel, Tiling, members
from kgen.scheduler import Options, choose_tiles
from kgen.scheduler.transforms import split_scan
from tests.kernels import plans


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_scan, "MIN_CHUNK", 16)
    monkeypatch.setattr(split_scan, "SHORTEST", 16)
    monkeypatch.setattr(split_scan, "MOST_SHARES", 40)


def lovasz(errors: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Statistics of a row beside its scan, and a scan that reads them."""
    e, order = torch.sort(errors, descending=True)
    g = labels[order].float()
    total = g.sum()
    return e, 1 - (total - g.cumsum(0)) / (total + (1 - g).cumsum(0))


def runs(key: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """How long the run of each number is, and the run of each element in another order: updates beside the scan."""
    number = F.pad((key[1:] != key[:-1]).long(), (1, 0)).cumsum(0)
    length = torch.zeros(len(key)).index_add(0, number, torch.ones(len(key)))
    return length, torch.empty_like(number).scatter(0, order, number)


def likelihood(risk: Tensor, seen: Tensor) -> Tensor:
    return -((risk - torch.logcumsumexp(risk, 0)) * (seen > 0)).sum() / (seen > 0).sum()


def infinite(length: int, more: float = math.inf) -> Tensor:
    """Long runs of -inf, one other special number, and finite ones behind it."""
    x = torch.full((length,), -math.inf)
    x[length // 3 : length // 2] = torch.randn(length // 2 - length // 3)
    x[length - 40] = more
    x[length - 9 :] = 1.0
    return x


CASES: dict[str, tuple[Callable[..., object], list[Tensor]]] = {
    "whole shares": (lambda x: x.cumsum(0), [torch.randn(512)]),
    "a ragged last share": (lambda x: x.cumsum(0), [torch.randn(517)]),
    "few rows": (lambda x: (x * 2 + 1).cumsum(1), [torch.randn(3, 401)]),
    "columns": (lambda x: x.cumsum(0), [torch.randn(401, 2)]),
    "from behind": (lambda x: x.flip(0).cumsum(0).flip(0), [torch.randn(300)]),
    "products": (lambda x: (1 + x / 100).cumprod(0), [torch.randn(300)]),
    "16 bits": (lambda x: x.cumsum(0), [torch.randn(600).bfloat16()]),
    "counts": (lambda x: (x > 0).cumsum(0), [torch.randn(600)]),
    "a mask": (lambda x: torch.where((x / 100).cumsum(0) < 0.05, x, 0.0), [torch.randn(600)]),
    "two scans and a sum": (
        lambda x, y: ((x * y).cumsum(0), (x + y).cumsum(0), (x * y).sum()), [torch.randn(600), torch.randn(600)],
    ),
    "sums and their reader": (lovasz, [torch.rand(40000), torch.randint(0, 2, (40000,))]),
    "logarithms of sums": (lambda x: x.logcumsumexp(0), [torch.randn(517)]),
    "infinities": (lambda x: x.logcumsumexp(0), [infinite(513)]),
    "logarithms from behind": (lambda x: (x * 2).flip(0).logcumsumexp(0).flip(0), [torch.randn(600)]),
    "extremes and their positions": (lambda x: (x.cummax(0), x.cummin(0)), [torch.randn(3, 517).t().contiguous()]),
    "equal extremes": (lambda x: (x.cummax(0), x.cummin(0)), [torch.randint(0, 3, (517,))]),
    "extremes among NaNs": (lambda x: (x.cummax(0), x.cummin(0)), [infinite(517, math.nan)]),
    "sums of what a scan makes": (lambda x: ((x.cumsum(0) * x).sum(), x.amax(), x.sum()), [torch.randn(517)]),
    "a likelihood": (likelihood, [torch.randn(600), torch.randint(0, 2, (600,))]),
    "a scan and its maximum": (lambda x: (x.cumsum(1), x.cumsum(1).amax(1) + x.sum(1)), [torch.randn(2, 600)]),
    "numbers of runs": (runs, [torch.randint(0, 40, (517,)).sort().values, torch.randperm(517)]),
    "positions of ones": (lambda x: ((x > 0).long().cumsum(0) - 1) * (x > 0), [torch.randn(600)]),
}  # fmt: skip


@pytest.fixture
def totals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were split."""
    found: list[str] = []
    run = split_scan._Split.run
    monkeypatch.setattr(split_scan._Split, "run", lambda self: found.append(self.kernel.name) or run(self))
    return found


@pytest.mark.interpret
@pytest.mark.cpu
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_eager(name: str, totals: list[str]) -> None:
    fn, args = CASES[name]
    torch._dynamo.reset()
    step = torch.compile(fn, backend="kgen", fullgraph=True, options={"gpu_interpreter": True, "cache": False})
    got, want = step(*args), fn(*args)
    assert totals
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.interpret
@pytest.mark.cpu
def test_a_row_scanned_in_place(totals: list[str]) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        y.copy_((x + 1).cumsum(0))
        return x.cumsum_(0) + y

    torch._dynamo.reset()
    step = torch.compile(fn, backend="kgen", fullgraph=True, options={"gpu_interpreter": True, "cache": False})
    x, y = torch.randn(500), torch.randn(500)
    ours, theirs = (x.clone(), y.clone()), (x.clone(), y.clone())
    torch.testing.assert_close((step(*ours), *ours), (fn(*theirs), *theirs))
    assert totals


@pytest.mark.interpret
@pytest.mark.cpu
def test_a_row_of_any_length(totals: list[str]) -> None:
    """Shares are as many as for the first row; each is as long as it has to be, and the last ones may be empty."""

    def fn(x: Tensor) -> Tensor:
        return (x * 2).cumsum(0) + 1

    torch._dynamo.reset()
    options = {"gpu_interpreter": True, "cache": False}
    step = torch.compile(fn, backend="kgen", fullgraph=True, dynamic=True, options=options)
    for length in (517, 900, 30):
        x = torch.randn(length)
        torch.testing.assert_close(step(x), fn(x))
    assert totals


def kernels(fn: Callable[..., object], *args: Tensor) -> list[Kernel]:
    plan = plans(fn, *args, options=Options(gpu_everywhere=True)).forward
    return [one for step in plan.kernels for one in members(step)]


def test_three_kernels() -> None:
    """Totals of the shares, their scan, and the shares: nothing in between is as long as the row."""
    first, so_far, last = kernels(lambda x: torch.relu(x).cumsum(0) * 2, torch.randn(4096))
    assert [s.kind for s in first.statements if s.inner] == ["reduction"]
    assert [s.kind for s in so_far.statements if s.inner] == ["scan"]
    assert [s.kind for s in last.statements if s.kind == "scan"] == ["scan"]
    [share, *_] = first.outer
    assert share.extent == so_far.inner[0].extent == last.outer[0].extent


def test_sums_of_what_a_scan_makes_join_in_a_fourth_kernel() -> None:
    first, so_far, share, last = kernels(lambda x: (x.logcumsumexp(0) * x).sum(), torch.randn(4096))
    assert [s.kind for s in first.statements] == ["scan", "pointwise"]
    last_point = first.statements[1].mask  # others would store where it does, in any order
    assert last_point is not None
    assert last_point.variables() == {first.inner[0]}
    assert [s.kind for s in so_far.statements] == ["scan"]
    assert [s.kind for s in share.statements if s.kind != "pointwise"] == ["scan", "reduction"]
    assert [s.kind for s in last.statements if s.inner] == ["reduction"]
    assert not any(s.stored[0] for s in share.statements if s.kind == "scan")  # nobody reads the scan in memory


def test_shares_of_points_that_cost_much_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_scan, "MIN_CHUNK", 4096)
    shares = [k.outer[0].extent.as_int() for k in kernels(lambda x: x.logcumsumexp(0), torch.randn(30001)) if k.outer]
    plain = [k.outer[0].extent.as_int() for k in kernels(lambda x: x.cumsum(0), torch.randn(30001)) if k.outer]
    assert min(shares) > max(plain)


def tiling_of(fn: Callable[..., object]) -> Tiling:
    plan = plans(fn, torch.randn(9000, 256), options=Options(gpu_everywhere=True)).forward
    [kernel] = plan.kernels
    assert isinstance(kernel, Kernel)
    return choose_tiles(kernel, plan.graph, Sizes({}), Gpu())


def test_a_scan_of_heavy_joins_has_more_warps() -> None:
    heavy, plain = tiling_of(lambda x: x.logcumsumexp(1)), tiling_of(lambda x: x.cumsum(1))
    assert heavy.blocks.warps > plain.blocks.warps


def test_rows_read_backwards_are_rows() -> None:
    forth, back = tiling_of(lambda x: x.cumprod(1)), tiling_of(lambda x: x.flip(1).cumprod(1))
    assert forth.blocks == back.blocks


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (lambda x: x.cumsum(1), (9000, 32)),  # programs enough
        (lambda x: x.cumsum(0), (48,)),  # too short
        (lambda x: x.cumsum(0).cumsum(0), (4096,)),  # the totals of the second one need the first one
    ],
    ids=["rows", "short", "a scan of a scan"],
)
def test_left_in_one_program(fn: Callable[..., object], shape: tuple[int, ...], totals: list[str]) -> None:
    assert kernels(fn, torch.randn(shape))
    assert not totals
