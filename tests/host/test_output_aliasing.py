"""Results share storage with each other and with inputs where eager's do, at eager's offsets and with eager's strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen.report.record import recording

pytestmark = pytest.mark.cpu
Make = Callable[[], tuple[Tensor, ...]]


def matrix() -> tuple[Tensor, ...]:
    return (torch.randn(4, 6),)


def with_gradient() -> tuple[Tensor, ...]:
    return (torch.randn(4, 6, requires_grad=True), torch.randn(4, 6))


def channels_last() -> tuple[Tensor, ...]:
    return (torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),)


def row_and_column() -> tuple[Tensor, ...]:
    m = torch.arange(24.0).view(4, 6)
    return m[2], m[:, 3]


def as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.view(4, 3, 2) + 1)


def write_row(x: Tensor) -> Tensor:
    y = x + 1
    y[1].mul_(3)
    return y


def written(x: Tensor) -> Any:
    x.add_(1)
    return x[1], x.view(-1)


def written_slice(x: Tensor) -> Any:
    part = x[:, 1:3]
    part.add_(1)
    return part, x, x * 2


# Functions of y = x + 1: what they return shares its storage.
OF_SUM: dict[str, Callable[[Tensor], Any]] = {
    "whole and view": lambda y: (y, y.view(-1)),
    "view and whole": lambda y: (y.view(-1), y),
    "two parts": lambda y: (y[1], y[:, 2]),
    "one part": lambda y: y[2:, 1],
    "transposed": lambda y: (y, y.t(), y.t()[1:3]),
    "expanded": lambda y: (y[:, :1].expand(4, 5), y),
    "detached": lambda y: (y, y.detach()),
    "twice": lambda y: (y, y),
    "split": lambda y: y.split(2),
    "unbind": lambda y: y.unbind(1),
    "one chunk": lambda y: (y.chunk(2, 1)[1], y.chunk(2, 1)[0] * 3),
    "clone": lambda y: (y, y.clone(), y[1:].clone()),
    "copies of views": lambda y: (y.t(), y.t().contiguous(), y.t().reshape(-1)),
    "diagonal": lambda y: (y.diagonal(1), y),
    "as_strided": lambda y: (y.as_strided((3, 3), (2, 1), 4), y),
    "windows": lambda y: y.unfold(1, 3, 2),
    "empty views": lambda y: (y, y[2:2], y[4:]),
    "other types": lambda y: (y, y.view(torch.int32)[1], y.view(torch.bfloat16)[2]),
    "nested": lambda y: (y.view(2, 2, 6)[1].t(), y.view(2, 2, 6)[0, 1]),
    "computed from it": lambda y: ((y * 2).sum(), y[0], y[:, 0]),
}
CASES: dict[str, tuple[Callable[..., Any], Make]] = {
    **{name: (lambda x, f=f: f(x + 1), matrix) for name, f in OF_SUM.items()},
    **{f"{name}, gradients": (lambda x, w, f=f: f(x * w), with_gradient) for name, f in OF_SUM.items()},
    "of a matmul": (lambda x: [(y := x @ x.t()), y.t(), y[1:3, 2:]], matrix),
    "of a reduction": (lambda x: [(y := x.sum(0)), y.view(2, 3), y[1:]], matrix),
    "of a join": (lambda x: torch.cat([x, x * 2])[5:], matrix),
    "of a constant": (lambda x: [(y := torch.zeros(4, 6)), y[1], x + y], matrix),
    "of two results": (lambda x: [*(found := x.topk(2)), found[0][1], found[1].t()], matrix),
    "of channels last": (lambda x: [(y := x * 2), y.permute(0, 2, 3, 1)[1], y[0, 1]], channels_last),
    "of complex numbers": (lambda x: [(z := as_complex(x)), torch.view_as_real(z)[0], z.real, z[1:]], matrix),
    "complex of real": (lambda x: [(y := x.view(4, 3, 2) + 1), torch.view_as_complex(y)], matrix),
    "bytes of booleans": (lambda x: [(y := x > 0), y.view(torch.uint8)], matrix),
    "of inputs": (lambda x: (x.view(-1), x[1], x.t(), x, x + 1), matrix),
    "of a strided input": (lambda x: [x.t()[1:], (y := x + 1).t(), y[1]], lambda: (torch.randn(4, 12)[:, 2:8],)),
    "of a written input": (written, matrix),
    "of a written slice": (written_slice, matrix),
    "of a written result": (lambda x: [(y := write_row(x))[1], y], matrix),
    "row and column": (lambda r, c: (r.add_(1), c.mul_(2)), row_and_column),
    "beside gradients": (lambda x, w: [x * w, (s := w * 2)[1], s.t(), (d := (x * w).detach())[1], d], with_gradient),
}


def flat(found: Any) -> list[Tensor]:
    return list(found) if isinstance(found, tuple | list) else [found]


def layouts(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Geometry of each tensor, and the first one that shares its storage."""
    first: dict[int, int] = {}
    return [
        (
            t.dtype, tuple(t.shape), t.stride(), t.storage_offset(), t.requires_grad,
            first.setdefault(t.untyped_storage().data_ptr(), k),
        )
        for k, t in enumerate(tensors)
    ]  # fmt: skip


def both(f: Callable[..., Any], make: Make, **settings: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Arguments and results, in eager and compiled."""
    found = []
    for call in (f, torch.compile(f, backend="kgen", fullgraph=True, **settings)):
        torch.manual_seed(0)
        args = make()
        found.append([*args, *flat(call(*args))])
    return found[0], found[1]


def check(f: Callable[..., Any], make: Make, **settings: Any) -> None:
    eager, compiled = both(f, make, **settings)
    assert layouts(compiled) == layouts(eager)
    torch.testing.assert_close(compiled, eager, equal_nan=True)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CASES)
def test_results_are_laid_out_as_in_eager(name: str) -> None:
    check(*CASES[name])


DYNAMIC = ["two parts", "as_strided", "one part", "other types", "of inputs", "row and column", "of channels last"]


@pytest.mark.parametrize("name", DYNAMIC)
def test_results_of_symbolic_sizes(name: str) -> None:
    check(*CASES[name], dynamic=True)


def test_a_write_to_a_result_shows_in_its_view() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return y, y.view(-1)

    y, view = torch.compile(f, backend="kgen")(torch.randn(3, 4))
    y.fill_(7)
    assert (view == 7).all()


def test_a_view_of_a_written_input_is_not_copied() -> None:
    """Its storage is the input's, so nothing is stored for it."""

    def f(x: Tensor) -> Tensor:
        x.add_(1)
        return x[1]

    with recording() as record:
        check(f, matrix)
    (plan,) = [graph.plan for graph in record.graphs]
    assert len(plan.steps) == 1


def test_an_alias_through_a_library_call_is_not_overwritten() -> None:
    """`view_as_complex` is a call whose result stays in the storage of its operand."""

    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.view(4, 3, 2) + 1
        z = torch.view_as_complex(y)
        y = y.clone()
        y[1] = 5
        return z * 2, y, z.abs()

    check(f, matrix)


def test_a_call_gets_the_strides_that_it_demands() -> None:
    """The sine is stored for several readers, and the copy with another layout is not computed before the call."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        turned = y.transpose(0, 1).contiguous()
        return torch.view_as_complex(turned) * 2, turned.view(torch.float64), y.sum(), y

    check(f, lambda: (torch.randn(2, 6),))


def test_nothing_comes_of_adaptive_pooling_to_no_windows() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        pools = torch.nn.functional.adaptive_avg_pool2d, torch.nn.functional.adaptive_max_pool2d
        return tuple(pool(x, size) for pool in pools for size in ((0, 0), (0, 3), (3, 0)))

    check(f, lambda: (torch.randn(2, 3, 8, 7),))


def test_sparse_gradient_of_an_embedding() -> None:
    index, found = torch.tensor([1, 3, 3]), []
    for backend in ("eager", "kgen"):
        torch.manual_seed(0)
        table = torch.nn.Embedding(10, 4, sparse=True)
        torch.compile(lambda i, table=table: table(i) * 2, backend=backend)(index).sum().backward()
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        found.append(table.weight.grad.to_dense())
    torch.testing.assert_close(found[0], found[1])
