"""Custom operators that write to their arguments: sizes that only their results define, lists of tensors, and clones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop

pytestmark = pytest.mark.cpu


@torch.library.custom_op("kgen_mutable_operators::drain", mutates_args=("counter",))
def drain(counter: Tensor) -> Tensor:
    """As many rows as the counter says, which then is 0."""
    rows = torch.arange(float(counter[0]) * 3).reshape(-1, 3)
    counter.zero_()
    return rows


@drain.register_fake
def _(counter: Tensor) -> Tensor:
    return torch.empty(torch.library.get_ctx().new_dynamic_size(), 3)


@torch.library.custom_op("kgen_mutable_operators::scale_all", mutates_args=("parts",))
def scale_all(parts: list[Tensor], by: float) -> None:
    for part in parts:
        part.mul_(by)


@torch.library.custom_op("kgen_mutable_operators::add_above", mutates_args=("x",))
def add_above(x: Tensor, rows: Tensor) -> None:
    """Row by row, so that `rows` must not be `x`."""
    for i in range(len(x) - 1):
        x[i + 1] += rows[i]


@pytest.fixture(autouse=True, params=[True, False], ids=["bases", "arguments"])
def functional_form(request: pytest.FixtureRequest) -> Iterator[None]:
    """Torch has two functional forms of a mutable operator: with views of base tensors, and with the arguments themselves."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(enable_auto_functionalized_v2=request.param):
        yield
    torch._dynamo.reset()


def check(function: Callable[..., Any], x: Tensor) -> None:
    wanted, written = x.clone(), x.clone()
    compiled = torch.compile(function, backend="kgen", fullgraph=True, options={"cache": False, "verify": True})
    torch.testing.assert_close(compiled(written), function(wanted))
    torch.testing.assert_close(written, wanted)


@pytest.mark.parametrize("count", [3, 0])
def test_a_mutable_operator_defines_sizes(count: int) -> None:
    def function(counter: Tensor) -> tuple[Tensor, Tensor]:
        rows = drain(counter)
        return rows * 2 + rows.shape[0], counter + 1

    check(function, torch.tensor([count, 7]))


def test_a_mutable_operator_writes_a_list() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        scale_all([y[0], y[1]], 3.0)
        scale_all([x[1], x[0]], 0.5)
        return y + x

    check(function, torch.arange(6.0).reshape(2, 3))


def test_a_clone_of_what_is_written_is_no_alias() -> None:
    """A clone is lazy: it is the memory that it is made of, which the operator would write while it reads it."""

    def function(x: Tensor) -> Tensor:
        y = x @ x
        add_above(y, y.t().clone().t())
        add_above(y[1:], y[:-1].clone())
        return y

    check(function, torch.arange(9.0).reshape(3, 3))


def test_a_body_that_writes_one_operand_and_reads_its_clone() -> None:
    def body(i: Tensor, y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return i + 1, y.index_copy(0, (i + 1)[None], rows.index_select(0, i[None]) + 1), rows.clone()

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x @ x
        return while_loop(lambda i, *_: i < 2, body, (torch.tensor(0), y, y.clone()))

    check(function, torch.arange(9.0).reshape(3, 3))
