"""Tiles whose rows are of one batch: what differs by the batch is one number, or one row, in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.ir import index as ix
from kgen.ir.index import Var
from kgen.templates.contract import Config
from kgen.templates.triton.codegen import tile
from kgen.templates.triton.codegen.tile import uniform_loops
from tests.matmuls import compiled, error, forced

TEMPLATES = (
    "triton_matmul",
    "triton_matmul_tiles",
    "triton_matmul_persistent",
    "triton_matmul_b_resident",
)
bf = torch.bfloat16


def r(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(bf)


def scaled(x: Tensor, s: Tensor, w: Tensor) -> Tensor:
    return F.linear(x * torch.sigmoid(s)[:, None], w)


def modulated(x: Tensor, s: Tensor, w: Tensor) -> Tensor:
    return F.linear(torch.relu(x) * (1 + s[:, None]), w) * torch.sigmoid(s[:, None, :1])


def gated(x: Tensor, s: Tensor, w: Tensor) -> Tensor:
    """The batch differs in the epilogue."""
    return torch.relu(F.linear(x, w) * torch.tanh(s[:, :1])[:, None])


def by_heads(x: Tensor, s: Tensor, w: Tensor) -> Tensor:
    """The columns are of heads, each of which has a number of its own."""
    heads = F.linear(torch.relu(x), w).unflatten(-1, (2, -1))
    return heads * torch.sigmoid(s[0, :2, None])


FUNCTIONS: dict[str, Callable[..., Tensor]] = {"scaled": scaled, "modulated": modulated, "gated": gated, "by heads": by_heads}


def arguments(batches: int, rows: int, features: int = 48, columns: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    return r(batches, rows, features), r(batches, features), r(columns, features)


def extents(*numbers: int) -> tuple[Var, ...]:
    return tuple(ix.var(f"x{k}", number) for k, number in enumerate(numbers))


@pytest.mark.parametrize(
    ("numbers", "block", "uniform"),
    [
        ((4, 64), 64, 1),
        ((4, 64), 16, 1),
        ((4, 64), 128, 0),
        ((4, 96), 64, 0),
        ((3, 4, 16), 64, 1),
        ((3, 4, 16), 16, 2),
        ((3, 4, 12), 16, 1),
        ((64,), 16, 0),
    ],
)
def test_loops_that_have_one_index_in_a_tile(numbers: tuple[int, ...], block: int, uniform: int) -> None:
    loops = extents(*numbers)
    assert uniform_loops(loops, block) == loops[:uniform]


@pytest.mark.every(3)
@pytest.mark.interpret
@pytest.mark.parametrize("rows", [64, 128, 40])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_agrees_with_eager(template: str, name: str, rows: int) -> None:
    """Rows of a batch that tiles divide, and others."""
    fn, args = FUNCTIONS[name], arguments(3, rows)
    with forced(template, _shortest) as made:
        got = compiled(fn, *args)
    assert error(got, fn(*(a.double() for a in args))) < 1e-2
    assert made.matmuls


@pytest.mark.interpret
@pytest.mark.parametrize("rows", [16, 5])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_few_rows(name: str, rows: int) -> None:
    fn, args = FUNCTIONS[name], arguments(2, rows)
    with forced("triton_matmul_sliced_k") as made:
        got = compiled(fn, *args)
    assert error(got, fn(*(a.double() for a in args))) < 1e-2
    assert made.matmuls


@pytest.mark.interpret
@pytest.mark.parametrize("rows", [64, 40])
def test_a_function_of_the_batch_is_computed_for_one_row(rows: int) -> None:
    with forced("triton_matmul", _shortest, runs=False) as made:
        compiled(scaled, *arguments(3, rows))
    [kernel] = made.matmuls
    divided = bool(re.search(r"x0\w* = \(\(tile_m \* BLOCK_M\) // \d+\)", kernel.source))
    assert divided == (rows == 64)


def test_joined_loops_do_not_assign_to_what_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a loop of the template, its variable would be of 32 bits at first, and of 64 then."""
    monkeypatch.setattr(tile, "is_wide", lambda problem: True)
    weights, values = r(2, 4, 64, 8), r(2, 8, 4, 16)
    with forced("triton_matmul_b_resident", runs=False) as made:
        compiled(lambda w, v: w @ v.permute(0, 2, 1, 3), weights, values)
    [kernel] = made.matmuls
    assert [line.strip() for line in kernel.source.splitlines() if re.match(r"\s+b = ", line)] == [
        "b = tl.program_id(0) // shares"
    ]


def _shortest(configs: Sequence[Config]) -> list[Config]:
    """The configuration with the fewest rows and columns in a tile."""
    return sorted(configs, key=lambda c: (c.BLOCK_M, c.BLOCK_N))[:1]
