"""Updates at indices from data in the C++ kernel of the matmul that makes them: in order, whatever the threads.

What is compared bit by bit is the same update as a loop of its own, which `forbid_fused` asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product as pairs_of
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from kgen import pipeline
from kgen.cost import model
from kgen.ir.plan import Kernel, members
from kgen.only import only
from kgen.report.record import Record, recording
from kgen.templates import registry
from kgen.templates.contract import Config
from kgen.verdict import Outcome, Reason, Verdict
from tests.matmuls import only_templates
from tests.slow import slow_but

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore::UserWarning")]

BF16 = torch.bfloat16
SCATTERS = ("aten.index_put", "aten.index_add", "aten.index_copy", "aten.scatter", "aten.scatter_add", "aten.scatter_reduce")


@pytest.fixture(autouse=True)
def templates_win(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Templates win over the library, whatever the cost model says of matmuls as small as these."""
    monkeypatch.setattr(model, "vendor_seconds", lambda problem: 1e9)
    torch._dynamo.reset()
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def r(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) / 4).to(dtype)


def indices(top: int, *shape: int) -> Tensor:
    """Many of them equal."""
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(top))


def compiled(fn: Callable[..., Any], args: Sequence[Tensor]) -> tuple[list[Tensor], list[Kernel], list[Verdict]]:
    """Results, kernels and verdicts. Rows of bfloat16 are rounded, as those are that another kernel reads."""
    torch._dynamo.reset()
    options = {"cache": False, "numerics": "eager" if args[0].dtype is BF16 else "fast"}
    with recording() as made:
        found = torch.compile(fn, backend="kgen", fullgraph=True, options=options)(*(a.clone() for a in args))
    plans = [graph.plan for graph in made.graphs if isinstance(graph, Record)]
    kernels = [kernel for plan in plans for step in plan.kernels for kernel in members(step)]
    return list(found if isinstance(found, tuple) else (found,)), kernels, [v for plan in plans for v in plan.verdicts]


def scatters(kernels: Sequence[Kernel]) -> int:
    """How many are in the kernels of matmuls."""
    return sum(s.kind == "scatter" for kernel in kernels if kernel.contracts for s in kernel.statements)


def apart(fn: Callable[..., Any], args: Sequence[Tensor]) -> list[Tensor]:
    """The results where updates are loops of their own."""
    with ExitStack() as demands:
        for matmul, update in pairs_of(("aten.mm", "aten.bmm"), SCATTERS):
            demands.enter_context(kgen.forbid_fused(matmul, update))
        found, kernels, _ = compiled(fn, args)
    assert not scatters(kernels)
    return found


def small(configs: Sequence[Config]) -> Config:
    """Many rectangles, of which each thread gets several."""
    return with_knobs(configs[0], ROWS=96, BLOCK_M=48, BLOCK_N=32)


def with_knobs(config: Config, **knobs: int) -> Config:
    return Config(tuple((name, knobs.get(name, value)) for name, value in config.values))


X_W = (r(230, 70), r(70, 150))

CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "rows added": (lambda x, w, t, i: t.index_add(0, i, x @ w), (*X_W, r(9, 150), indices(9, 230))),
    "rows of bfloat16 added": (lambda x, w, t, i: t.index_add(0, i, x @ w), tuple(
        a.to(BF16) if a.is_floating_point() else a for a in (*X_W, r(9, 150), indices(9, 230)))),
    "the last one wins": (lambda x, w, t, i: t.index_put((i,), x @ w), (*X_W, r(9, 150), indices(9, 230) - 4)),
    "rows accumulated": (lambda x, w, t, i: t.index_put((i,), F.gelu(x @ w), accumulate=True),
                         (*X_W, r(9, 150), indices(9, 230) - 9)),
    "rows copied": (lambda x, w, t, i: t.index_copy(0, i, x @ w), (*X_W, r(9, 150), indices(9, 230))),
    "a place for each element, by rows": (lambda x, w, t, i: t.scatter_add(0, i, x @ w),
                                          (*X_W, r(9, 150), indices(9, 230, 150))),
    "put by rows": (lambda x, w, t, i: t.scatter(0, i, x @ w), (*X_W, r(9, 150), indices(9, 230, 150))),
    "largest by rows": (lambda x, w, t, i: t.scatter_reduce(0, i, x @ w, "amax"), (*X_W, r(9, 150), indices(9, 230, 150))),
    "columns added": (lambda x, w, t, i: t.index_add(1, i, x @ w), (*X_W, r(230, 9), indices(9, 150))),
    "a place for each element, by columns": (lambda x, w, t, i: t.scatter_add(1, i, x @ w),
                                             (*X_W, r(230, 9), indices(9, 230, 150))),
    "rows of two dimensions": (lambda x, w, t, i: t.index_put((i,), (x @ w).view(23, 10, 150), accumulate=True),
                               (*X_W, r(9, 150), indices(9, 23, 10))),
    "rows of two dimensions, one as long as the sum": (
        lambda x, w, t, i: t.index_put((i,), (x @ w).view(23, 10, 150), accumulate=True),
        (r(230, 23), r(23, 150), r(9, 150), indices(9, 23, 10))),
    "the matmul kept": (lambda x, w, t, i: ((c := x @ w), t.index_add(0, i, c.relu())), (*X_W, r(9, 150), indices(9, 230))),
    "bias and a cast": (lambda x, w, t, i, v: t.index_add(0, i, F.silu(x @ w + v).double()),
                        (*X_W, r(9, 150).double(), indices(9, 230), r(150))),
    "two tables": (lambda x, w, t, i, u, j: (t.index_add(0, i, x @ w), u.index_put((j,), (x @ w).tanh())),
                   (*X_W, r(9, 150), indices(9, 230), r(7, 150), indices(7, 230))),
    "a family": (lambda x, w, v, t, i: t.index_add(0, i, F.silu(x @ w) * (x @ v)),
                 (*X_W, r(71, 150)[1:], r(9, 150), indices(9, 230))),
    "a table in place": (lambda x, w, t, i: t.index_add_(0, i, x @ w), (*X_W, r(9, 150), indices(9, 230))),
    "rows of batches": (lambda x, w, t, i: t.index_add(1, i, torch.bmm(x, w)),
                        (r(5, 70, 30), r(5, 30, 40), r(5, 9, 40), indices(9, 70))),
    "batches": (lambda x, w, t, i: t.index_add(0, i, torch.bmm(x, w)),
                (r(15, 70, 30), r(15, 30, 40), r(4, 70, 40), indices(4, 15))),
    "batches and rows": (lambda x, w, t, i: t.index_add(0, i, torch.bmm(x, w).flatten(0, 1)),
                         (r(15, 70, 30), r(15, 30, 40), r(9, 40), indices(9, 1050))),
    "few rows": (lambda x, w, t, i: t.index_add(0, i, x @ w), (r(7, 64), r(64, 500), r(3, 500), indices(3, 7))),
    "few rows, by columns": (lambda x, w, t, i: t.index_add(1, i, x @ w), (r(7, 64), r(64, 500), r(7, 9), indices(9, 500))),
    "few columns": (lambda x, w, t, i: t.index_add(0, i, x @ w), (r(900, 64), r(64, 7), r(9, 7), indices(9, 900))),
    "one column": (lambda x, w, t, i: t.index_add(0, i, x @ w), (r(900, 64), r(64, 1), r(9, 1), indices(9, 900))),
    "nothing to sum": (lambda x, w, t, i: t.index_add(0, i, x @ w), (r(70, 0), r(0, 50), r(9, 50), indices(9, 70))),
}  # fmt: skip
FEW = ("few rows", "few rows, by columns", "few columns", "one column")
FAST = (
    "rows added",
    "rows of two dimensions, one as long as the sum",
    "the last one wins",
    "a place for each element, by columns",
    "batches and rows",
)


@pytest.mark.parametrize("name", slow_but(lambda name: name in FAST, CASES))
def test_updates_run_in_order(name: str) -> None:
    """The rule's configuration, or, where that is more than one rectangle, many small ones."""
    fn, args = CASES[name]
    with only("cpp_matmul", (lambda configs: configs[0]) if name in FEW else small):
        wanted = apart(fn, args)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found, kernels, _ = compiled(fn, args)
            assert scatters(kernels) == (2 if name == "two tables" else 1)
            assert all(map(torch.equal, found, wanted)), f"on {threads} threads"


@pytest.mark.parametrize("name", ["rows added", "columns added"])
def test_sums_in_parts(name: str) -> None:
    """The parts of sums are made in any order, what is made of them is not."""
    fn, args = CASES[name]
    with only("cpp_matmul", lambda configs: with_knobs(small(configs), SPLIT_K=3)):
        long = (r(230, 900), r(900, 150), *args[2:])
        wanted = apart(fn, long)
        torch.set_num_threads(3)
        found, kernels, _ = compiled(fn, long)
    assert scatters(kernels) == 1
    assert torch.equal(found[0], wanted[0])


def test_the_last_row_wins() -> None:
    """What torch leaves open, and a loop in order decides."""
    x, w, i = r(96, 20), r(20, 40), indices(5, 96)
    found, kernels, _ = compiled(lambda x, w, t, i: t.index_put((i,), x @ w), (x, w, r(5, 40), i))
    assert scatters(kernels) == 1
    last = torch.stack([(i == k).nonzero().max() for k in range(5)])
    torch.testing.assert_close(found[0], (x @ w)[last])


def test_an_index_out_of_range() -> None:
    fn, (x, w, t, i) = CASES["rows added"]
    with only("cpp_matmul", small), pytest.raises(IndexError):
        compiled(fn, (x, w, t, i + 1))


def test_rows_whose_number_is_a_symbol() -> None:
    fn, (x, w, t, i) = CASES["rows added"]
    compiled_fn = torch.compile(fn, backend="kgen", fullgraph=True, dynamic=True, options={"cache": False})
    with kgen.require_fused("aten.mm", "aten.index_put"):
        for rows in (230, 9, 77):
            torch.testing.assert_close(compiled_fn(x[:rows], w, t, i[:rows]), fn(x[:rows], w, t, i[:rows]))


# ---- what stays apart -------------------------------------------------------------------------------------------------


def refusal(verdicts: Sequence[Verdict], reason: Reason) -> Verdict:
    return next(v for v in verdicts if v.reason is reason and v.detail)


def cells(x: Tensor, w: Tensor, t: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return t.index_put((i[:, None], j), x @ w, accumulate=True)


def test_updates_along_both_axes_stay_apart() -> None:
    args = (*X_W, r(9, 8), indices(9, 230), indices(8, 150))
    found, kernels, verdicts = compiled(cells, args)
    assert not scatters(kernels)
    assert any(kernel.contracts for kernel in kernels)
    verdict = refusal(verdicts, Reason.NOT_IN_ORDER)
    assert verdict.outcome is Outcome.ILLEGAL
    assert "both m and n" in verdict.detail
    torch.testing.assert_close(found[0], cells(*args), rtol=2e-5, atol=2e-5)
    with kgen.require_fused("aten.mm", "aten.index_put"), pytest.raises(Exception, match="run in order"):
        compiled(cells, args)


def test_a_template_that_keeps_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    ordered = registry.find("cpp_matmul")
    plain = replace(ordered, results={name: replace(one, ordered=False) for name, one in ordered.results.items()})
    only_templates(monkeypatch, [plain])
    fn, args = CASES["rows added"]
    _, kernels, verdicts = compiled(fn, args)
    assert not scatters(kernels)
    assert "in no order" in refusal(verdicts, Reason.NOT_IN_ORDER).detail


def test_two_tables_along_two_axes() -> None:
    """No order of the rectangles suits both."""

    def fn(x: Tensor, w: Tensor, t: Tensor, i: Tensor, u: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        return t.index_add(0, i, x @ w), u.index_add(1, j, x @ w)

    args = (*X_W, r(9, 150), indices(9, 230), r(230, 8), indices(8, 150))
    found, kernels, verdicts = compiled(fn, args)
    assert not scatters(kernels)
    assert refusal(verdicts, Reason.NOT_IN_ORDER)
    torch.testing.assert_close(found, list(fn(*args)), rtol=2e-5, atol=2e-5)


def test_threads_without_columns_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many threads could share the rows of the matmul, but not its 64 columns."""
    device = replace(pipeline.cpu_device(), compute_units=64)
    monkeypatch.setattr(pipeline, "cpu_device", lambda: device)

    def fn(x: Tensor, w: Tensor, t: Tensor, i: Tensor) -> Tensor:
        return t.index_add(0, i, x @ w)

    args = (r(4000, 64), r(64, 64), r(9, 64), indices(9, 4000))
    wanted, kernels, verdicts = compiled(fn, args)
    assert not scatters(kernels)
    verdict = refusal(verdicts, Reason.ORDER_DEAR)
    assert verdict.outcome is Outcome.UNPROFITABLE
    assert verdict.measured[0] > verdict.measured[1]
    with kgen.require_fused("aten.mm", "aten.index_put"):
        found, kernels, _ = compiled(fn, args)
    assert scatters(kernels) == 1
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
