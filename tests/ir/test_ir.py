"""IR constructors refuse what makes no sense, and the questions about nodes answer it."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.nodes import Buffer, Contraction, Extern, Origin, Pointwise, Reduction, Scan, Scatter, TensorArg
from kgen.verdict import OperatorCall

F32 = torch.float32
CPU = torch.device("cpu")
V, J = ix.var("i", 6), ix.var("j", 4)
X = vs.load("x", (V.expr(), J.expr()), F32)
SIZES = (ix.constant(6), ix.constant(4))


def whole(name: str) -> TensorArg:
    return TensorArg(name, (V, J), (V.expr(), J.expr()), F32)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Buffer("b", F32, CPU, SIZES, (ix.ONE,)), "1 strides for 2 sizes"),
        (lambda: Buffer("b", F32, CPU, SIZES, kind="odd"), "unknown kind odd"),
        (lambda: Reduction(("b",), (V,), (J,), "median", X), "unknown reduction median"),
        (lambda: Reduction(("b",), (V,), (J,), "welford", X), "welford has 2 results, got 1"),
        (lambda: Scan(("b",), (V,), V, "any", X), "unknown scan any"),
        (lambda: Scan(("b",), (V,), J, "sum", X), "scan axis j is not a loop variable"),
        (lambda: Scatter("b", "x", (V, J), (V.expr(), J.expr()), X, "xor"), "unknown scatter mode xor"),
    ],
)
def test_constructors_check(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_nodes_are_frozen_and_pickle() -> None:
    node = Pointwise("out", (V, J), X, Origin((OperatorCall("aten.add"),), "out", "model.py:3 x + 1"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        node.out = "other"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(node)) == node


def test_reads_and_outs() -> None:
    row = vs.indirect(vs.load("t", (V.expr(),), torch.int64), ix.constant(6))
    scatter = Scatter("x_v1", "x", (V, J), (row, J.expr()), vs.load("y", (V.expr(), J.expr()), F32))
    assert ir.outs(scatter) == ("x_v1",)
    assert set(ir.reads(scatter)) == {"x", "y", "t"}
    call = Extern(("a", None), "op", (whole("x"), (whole("y"), 3)), (("w", whole("z")),), mutates=(("y", "y_v1"),))
    assert ir.outs(call) == ("a", "y_v1")
    assert set(ir.reads(call)) == {"x", "y", "z"}


def test_a_contraction_reads_what_its_library_call_reads() -> None:
    bias = TensorArg("bias", (J,), (J.expr(),), F32)
    k = ix.var("k", 3)
    lhs, rhs = vs.load("x", (V.expr(), k.expr()), F32), vs.load("y", (k.expr(), J.expr()), F32)
    node = Contraction("out", (V, J), (k,), lhs, rhs, Extern(("out",), "addmm", (bias, whole("x"), whole("y"))))
    assert set(ir.reads(node)) == {"x", "y", "bias"}


def test_origins_join_without_repetition() -> None:
    add, mul, exp = OperatorCall("aten.add", "a"), OperatorCall("aten.mul", "b"), OperatorCall("aten.exp", "b")
    a = Origin((add, mul), "", "f.py:1", (("x", "w"),))
    joined = a.joined(Origin((mul, exp), "exp", "f.py:2", (("x", "w"), ("y", "b"))))
    assert joined == Origin((add, mul, exp), "exp", "f.py:1", (("x", "w"), ("y", "b")))
    assert joined.operators == ("aten.add", "aten.mul", "aten.exp")
    assert joined.modules == ("a", "b")


def test_iteration() -> None:
    assert ir.iteration(Reduction(("b",), (V,), (J,), "sum", X)) == ((V,), (J,))
    assert ir.iteration(Pointwise("b", (V, J), X)) == ((V, J), ())
