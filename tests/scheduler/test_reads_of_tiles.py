"""Reductions of a matmul's tiles that read what other ones have made in the same kernel."""

from __future__ import annotations

import pytest
import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.plan import PART, Statement
from kgen.ir.values import Index
from kgen.scheduler.analysis.items import Item
from kgen.scheduler.kernels.steps import _partial

N, H, C = (ix.var(name, extent) for name, extent in (("n", 3), ("h", 5), ("c", 16)))
ROWS: Index = (N.expr(), H.expr())


def read(partial: Statement) -> Index:
    """Where the value of a partial reads the parts."""
    [index] = [v.attr[1] for v in vs.topological([partial.value]) if v.op == "load" and v.attr[0] == "parts"]
    return index


@pytest.mark.parametrize(
    ("kept", "reduced", "read_at", "wanted"),
    [
        ((N, H), (C,), (ix.floordiv(C.expr(), ix.constant(4)), *ROWS), (ix.var(PART, 4).expr(), *ROWS)),
        ((C,), (N, H), (ix.ZERO, *ROWS), (ix.ZERO, *ROWS)),
    ],
    ids=["the same rows: this tile's own", "down the columns: what the rows are reduced to"],
)
def test_which_part_is_read(kept: tuple[ix.Var, ...], reduced: tuple[ix.Var, ...], read_at: Index, wanted: Index) -> None:
    value = vs.call("mul", vs.load("mm", (*ROWS, C.expr()), torch.float32), vs.load("parts", read_at, torch.float32))
    node = ir.Partial(("out",), kept, reduced, "sum", value, 4, False)
    item = Item(node, 0.0, kept, reduced, value, (ix.ZERO, *(v.expr() for v in kept)))
    assert [str(e) for e in read(_partial(item, node, 0, (True,), frozenset({"parts"})))] == [str(e) for e in wanted]
