"""Copies that library calls need of their operands: one for all orders of dimensions, which sums read as well."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from op_case import check
from torch import Tensor

from kgen.ir import values as vs
from kgen.ir.nodes import Graph, Pointwise, Reduction

CALLS = frozenset({"aten.mm.default"})
TURNED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda x, w: x[0] @ (w[0] * 2).t(),
    "addmm": lambda x, w: torch.addmm(x[0, :, 0, None], x[0], (w[0] * 2).t()),
    "bmm": lambda x, w: torch.bmm(x, (w * 2).transpose(1, 2)),
    "baddbmm": lambda x, w: torch.baddbmm(x[:, :, :1], x, (w * 2).transpose(1, 2)),
}


def heads(g: Tensor) -> Tensor:
    """Rows of all heads, as the gradient of a projection: no view."""
    return g.transpose(1, 2).reshape(-1, g.shape[1] * g.shape[3])


def gradients(g: Tensor, w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    rows = heads(g)
    return rows @ w, rows.t() @ x, rows.sum(0)


def copies(graph: Graph) -> list[str]:
    return [node.out for node in graph.nodes if isinstance(node, Pointwise)]


def test_two_calls_and_a_sum_read_one_copy() -> None:
    graph = check(gradients, [torch.randn(2, 3, 5, 4), torch.randn(12, 6), torch.randn(10, 7)], externs=CALLS)
    [copy] = copies(graph)
    [total] = [node for node in graph.nodes if isinstance(node, Reduction)]
    assert {load.attr[0] for load in vs.loads([total.value])} == {copy}


SINGLE: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "a column": lambda x, h: _summed((x * 2)[:, 1:2], h),
    "one number": lambda x, h: _summed((x[0, 0] * 2).expand(len(h), 1), h),
    "rounded": lambda x, h: _summed(x[0, 0].bfloat16().expand(len(h), 1), h.bfloat16()),
    "batches of columns": lambda x, h: (torch.bmm((x * 2)[None, :, :1].mT, h[None]), (x * 2)[None, :, :1].sum(1)),
}


def _summed(column: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a linear layer with one result: of its weights and of its bias."""
    return column.t() @ h, column.sum(0), column.sum(1)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", SINGLE)
def test_sums_of_a_column_read_its_copy_in_its_order(name: str, dynamic: bool) -> None:
    """The copy has the row that the call reads, with the same elements and its dimension of length 1 in front."""
    run = torch.compile(SINGLE[name], backend="kgen", fullgraph=True, dynamic=dynamic, options={"verify": True, "strict": True})
    args = torch.randn(5, 3), torch.randn(5, 4)
    tolerance = {"atol": 1e-2, "rtol": 1e-2} if name == "rounded" else {}
    torch.testing.assert_close(run(*args), SINGLE[name](*args), **tolerance)


def test_other_elements_are_another_copy() -> None:
    """The same sizes, and the same tensor in another order of its rows."""

    def f(g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return heads(g) @ w, heads(g.flip(0)) @ w

    assert len(copies(check(f, [torch.randn(2, 3, 5, 4), torch.randn(12, 6)], externs=CALLS))) == 2


def test_what_is_written_in_between_is_copied_again() -> None:
    def f(g: Tensor, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = heads(g) @ w
        g.add_(1)
        rows = heads(g)
        return first, rows.t() @ x, rows.sum(0)

    check(f, [torch.randn(2, 3, 5, 4), torch.randn(12, 6), torch.randn(10, 7)], externs=CALLS)


def test_a_computed_operand_is_computed_for_a_sum() -> None:
    """A template may take the matmul and compute its operand: then there is no copy."""

    def f(g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        rows = (g * g).relu()
        return rows @ w, rows.sum(0)

    graph = check(f, [torch.randn(10, 12), torch.randn(12, 6)], externs=CALLS)
    [total] = [node for node in graph.nodes if isinstance(node, Reduction)]
    assert {load.attr[0] for load in vs.loads([total.value])}.isdisjoint(copies(graph))


@pytest.mark.parametrize("name", TURNED)
def test_a_computed_weight_is_stored_in_the_order_of_eager(name: str) -> None:
    """Its transpose is a view: stored as such, all that it is computed of would be read with strides."""
    graph = check(TURNED[name], [torch.randn(3, 7, 12), torch.randn(3, 10, 12)], externs=frozenset({f"aten.{name}.default"}))
    [copy] = copies(graph)
    assert [size.as_int() for size in graph.buffers[copy].sizes][-2:] == [10, 12]


def test_a_computed_operand_that_is_saved_too_is_stored_in_the_order_of_eager() -> None:
    """As the mask that sends tokens to experts, of which the gradient has need."""

    def f(p: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = (p > 0).float().permute(1, 2, 0)
        return mask.reshape(1, 12, 10) @ x, mask

    graph = check(f, [torch.randn(10, 3, 4), torch.randn(1, 10, 6)], externs=frozenset({"aten.bmm.default"}))
    for name in copies(graph):
        assert next(size for size in graph.buffers[name].sizes if size.as_int() != 1).as_int() == 10


def test_what_eager_has_made_contiguous_is_stored_so() -> None:
    graph = check(lambda x, w: x @ (w * 2).t().contiguous(), [torch.randn(7, 12), torch.randn(10, 12)], externs=CALLS)
    [copy] = copies(graph)
    assert [size.as_int() for size in graph.buffers[copy].sizes] == [12, 10]


SAVED: dict[str, tuple[Callable[..., tuple[Tensor, ...]], list[Tensor], str]] = {
    "matmul": (lambda x, w: ((x * 2).relu(), (x * 2).relu() @ w), [torch.randn(5, 6), torch.randn(6, 7)], "mm"),
    "batches": (
        lambda x, w: ((x * 2).relu().transpose(1, 2), torch.bmm(w, (x * 2).relu())),
        [torch.randn(2, 5, 6), torch.randn(2, 7, 5)],
        "bmm",
    ),
    "heads": (lambda x, w: _heads_saved(x, w, lambda c: c), [torch.randn(2, 5, 3, 4), torch.randn(6, 4, 7)], "bmm"),
    "heads as batches": (
        lambda x, w: _heads_saved(x, w, lambda c: c.flatten(0, 1).mT),
        [torch.randn(2, 5, 3, 4), torch.randn(6, 4, 7)],
        "bmm",
    ),
    "rows of heads": (
        lambda x, w: ((c := (x * 2).relu().transpose(1, 2).contiguous()), c.view(10, 12) @ w),
        [torch.randn(2, 3, 5, 4), torch.randn(12, 7)],
        "mm",
    ),
    "row of an image": (
        lambda x, w: ((x * 2).relu(), torch.conv2d((x * 2).relu().unsqueeze(2), w)),
        [torch.randn(2, 3, 9), torch.randn(4, 3, 1, 2)],
        "convolution",
    ),
    "copy of an input": (
        lambda x, w: (x.clone(memory_format=torch.channels_last), torch.conv2d(x.clone(memory_format=torch.channels_last), w)),
        [torch.randn(2, 3, 5, 6), torch.randn(4, 3, 2, 2)],
        "convolution",
    ),
}


def _heads_saved(x: Tensor, w: Tensor, view: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Heads that are copied for a matmul of batches, which have two dimensions of theirs in one, as einsum writes it."""
    c = (x * 2).relu().transpose(1, 2).contiguous()
    return view(c), torch.bmm(c.flatten(0, 1), w)


@pytest.mark.parametrize("name", SAVED)
def test_what_a_call_has_stored_is_the_result_that_is_saved(name: str) -> None:
    """Activations that a library's matmul or convolution reads are saved for their gradients: one buffer."""
    function, args, operator = SAVED[name]
    graph = check(function, args, externs=frozenset({f"aten.{operator}.default"}))
    [copy] = copies(graph)
    result = graph.buffers[graph.outputs[0].buffer]
    assert copy in (result.name, result.alias_of)


def test_results_of_their_own_are_not_one_buffer() -> None:
    """A caller may write one of them."""

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = (x * 2).relu()
        return y, y.clone(), y @ w

    graph = check(f, [torch.randn(5, 6), torch.randn(6, 7)], externs=CALLS)
    assert len({graph.outputs[k].buffer for k in range(2)}) == 2


def test_a_result_is_not_the_copy_from_before_a_write() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first = (x * 2).relu() @ w
        x.add_(1)
        return first, (x * 2).relu()

    check(f, [torch.randn(5, 6), torch.randn(6, 7)], externs=CALLS)


@pytest.mark.parametrize(("place", "right"), [(0, (1, 12, 4)), (1, (10, 12, 4)), (2, (10, 1, 4))])
def test_dimensions_of_length_1_are_no_others(place: int, right: tuple[int, ...]) -> None:
    """A copy without one is read where a call's operand has one, in front of its axes or between them."""

    def f(g: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        rows = heads(g)
        return rows @ w, torch.bmm(rows.unsqueeze(place), y)

    args = [torch.randn(2, 3, 5, 4), torch.randn(12, 6), torch.randn(right)]
    assert len(copies(check(f, args, externs=CALLS | {"aten.bmm.default"}))) == 1
