"""The verifier accepts a graph with every kind of node, and rejects it after each kind of damage."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kgen import errors
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.values import Value
from kgen.ir.verify import verify

F32, F64, I64, BOOL, BF16 = torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16
CPU = torch.device("cpu")
S = ix.size("s0", 1, 1 << 40)
V, W, R, K = ix.var("i0", S), ix.var("i1", 8), ix.var("r0", 8), ix.var("k", 8)
FLAT = V.expr() * 8 + W.expr()
SIZES = (S.expr(), ix.constant(8))


def load(name: str, *index: Any, dtype: torch.dtype = F32) -> Value:
    return vs.load(name, tuple(map(ix.as_expr, index or (V, W))), dtype)


def whole(name: str, dtype: torch.dtype = F32) -> ir.TensorArg:
    return ir.TensorArg(name, (V, W), (V.expr(), W.expr()), dtype)


def row(name: str) -> ir.TensorArg:
    return ir.TensorArg(name, (V,), (V.expr(),), F32)


def graph() -> ir.Graph:
    g = ir.Graph("g")
    plain = ("double", "scaled", "matmul", "sorted", "attended", "each", "running", "unwritten")
    buffers = [
        ir.Buffer("x", F32, CPU, SIZES, (ix.constant(8), ix.ONE), kind="input"),
        ir.Buffer("weight", F32, CPU, (ix.constant(8), ix.constant(8)), (ix.constant(8), ix.ONE), kind="constant"),
        *(ir.Buffer(name, F32, CPU, SIZES) for name in plain),
        ir.Buffer("total", BF16, CPU, (S.expr(),)),
        ir.Buffer("best", F32, CPU, (S.expr(),)),
        ir.Buffer("place", I64, CPU, (S.expr(),)),
        ir.Buffer("x_v1", F32, CPU, SIZES, (ix.constant(8), ix.ONE), alias_of="x"),
        ir.Buffer("flat", F32, CPU, (S.expr() * 8,), (ix.ONE,), alias_of="x"),
        ir.Buffer("flat_v1", F32, CPU, (S.expr() * 8,), (ix.ONE,), alias_of="x_v1"),
    ]
    g.buffers = {b.name: b for b in buffers}
    g.constants = {"weight": torch.zeros(8, 8)}
    g.inputs = [ir.GraphInput("x"), ir.GraphInput(symbol=S)]
    mm = ir.Extern(("matmul",), torch.ops.aten.mm.default, (whole("double"), whole_weight()))
    g.nodes = [
        ir.Pointwise("double", (V, W), vs.call("add", load("x"), load("x"))),
        ir.Reduction(("total",), (V,), (R,), "sum", load("double", V, R)),
        ir.Reduction(("best", "place"), (V,), (R,), "argmax", load("double", V, R)),
        ir.Scan(("running",), (V, W), W, "sum", load("double")),
        ir.Contraction("matmul", (V, W), (K,), load("double", V, K), load("weight", K, W), mm),
        ir.Extern(("sorted", None), torch.ops.aten.sort.default, (whole("matmul"), 1)),
        ir.Attention(ir.Extern(("attended",), "attention", (whole("sorted"),))),
        ir.Pointwise("each", (V, W), load("flat", FLAT)),
        ir.Pointwise("scaled", (V, W), load("x")),
        ir.Scatter("x_v1", "x", (V, W), (V.expr(), W.expr()), vs.call("mul", load("x"), load("total", V, dtype=BF16))),
    ]
    g.outputs = [whole("x_v1"), row("flat_v1"), S.expr() * 2, None, 3]
    return g


def whole_weight() -> ir.TensorArg:
    rows = ix.var("i0", 8)
    return ir.TensorArg("weight", (rows, W), (rows.expr(), W.expr()), F32)


def test_a_sound_graph_passes() -> None:
    verify(graph(), "test")


def made(op: str, args: tuple[Value, ...], dtype: torch.dtype, attr: Any = None) -> Value:
    """A value without the checks of its constructor."""
    return vs._make(op, args, attr, dtype)


def pointwise(value: Value) -> Callable[[ir.Graph], None]:
    def damage(g: ir.Graph) -> None:
        g.nodes[0] = ir.Pointwise("double", (V, W), value)

    return damage


def node(position: int, **changes: Any) -> Callable[[ir.Graph], None]:
    def damage(g: ir.Graph) -> None:
        g.nodes[position] = replace(g.nodes[position], **changes)

    return damage


def buffer(at: str, **changes: Any) -> Callable[[ir.Graph], None]:
    def damage(g: ir.Graph) -> None:
        g.buffers[at] = replace(g.buffers[at], **changes)

    return damage


def move(position: int, to: int) -> Callable[[ir.Graph], None]:
    return lambda g: g.nodes.insert(to, g.nodes.pop(position))


def append(*nodes: Any) -> Callable[[ir.Graph], None]:
    return lambda g: g.nodes.extend(nodes)


def output(result: Any) -> Callable[[ir.Graph], None]:
    return lambda g: g.outputs.append(result)


def drop(position: int) -> Callable[[ir.Graph], None]:
    return lambda g: g.nodes.__delitem__(position)


OTHER = ix.var("other", 8)
UNBOUND = ix.size("u0", 0, 99)
X = load("x")
FLAG = vs.call("lt", X, X)

DAMAGE: dict[str, tuple[Callable[[ir.Graph], None], str]] = {
    # order and versions
    "read before definition": (move(0, 3), "reads double before it is defined"),
    "a read of a buffer nobody defines": (drop(0), "reads double before it is defined"),
    "a read of a missing buffer": (pointwise(load("ghost")), "buffer ghost does not exist"),
    "a read of an old version": (append(ir.Pointwise("each", (V, W), X)), "reads x after a mutation"),
    "a reader moved behind the mutation": (move(0, 9), "before it is defined|after a mutation"),
    "an old alias read after the mutation": (output(row("flat")), "reads flat after a mutation"),
    "an old version returned": (output(whole("x")), "reads x after a mutation"),
    "an undefined output": (output(whole("unwritten")), "reads unwritten before it is defined"),
    "defined twice": (append(ir.Pointwise("double", (V, W), load("scaled"))), "double is defined twice"),
    "an input defined by a node": (append(ir.Pointwise("x", (V, W), load("scaled"))), "cannot be defined by a node"),
    "a loop that writes an alias": (buffer("double", alias_of="x"), "only a Scatter may write it"),
    "a version of another storage": (buffer("x_v1", alias_of=None), "does not share the storage of x"),
    "an alias of itself": (buffer("x", alias_of="x_v1"), "an alias of itself"),
    "an alias of nothing": (buffer("flat", alias_of="ghost"), "alias of ghost, which does not exist"),
    "a wrong name": (buffer("double", name="twice"), "named twice"),
    "an input twice": (lambda g: g.inputs.append(ir.GraphInput("x")), "is an input twice"),
    "a constant of another shape": (lambda g: g.constants.update(weight=torch.zeros(8, 9)), "its constant is"),
    # dtypes
    "unequal arguments": (pointwise(made("add", (X, load("x", V, W, dtype=F64)), F32)), "loads x as|arguments have dtypes"),
    "an operation that does not admit its dtype": (pointwise(made("and", (X, X), BOOL)), "does not admit torch.float32"),
    "a wrong result dtype": (pointwise(made("add", (X, X), F64)), "gives torch.float32, is marked torch.float64"),
    "a condition that is not bool": (pointwise(made("where", (X, X, X), F32)), "its condition is torch.float32"),
    "too few arguments": (pointwise(made("add", (X,), F32)), "takes 2 values, has 1"),
    "an unknown operation": (pointwise(made("frobnicate", (X,), F32)), "is not an operation"),
    "a load of the wrong dtype": (pointwise(vs.cast(load("x", dtype=F64), F32)), "loads x as torch.float64"),
    "a mask that is not bool": (pointwise(made("load", (X,), F32, X.attr)), "its mask has dtypes"),
    "a literal of the wrong kind": (pointwise(made("const", (), F32, 1)), "not a literal of torch.float32"),
    "a cast to a wrong type": (pointwise(made("cast", (FLAG,), F32, F64)), "casts to torch.float64, is marked torch.float32"),
    "a cast to a storage dtype": (pointwise(made("cast", (X,), BF16, BF16)), "not a compute dtype"),
    "a rounding of float64": (pointwise(made("round_to", (load("x"),), F32, F64)), "rounds"),
    "a bitcast of another width": (pointwise(made("bitcast", (FLAG,), F32, F32)), "reinterprets"),
    "a float seed": (pointwise(made("rand", (X, X), F32)), "int64 is needed"),
    "an index that is not int64": (pointwise(made("index", (), F32, V.expr())), "an index is int64"),
    "a store of another dtype": (pointwise(FLAG), "stores torch.bool values into float32"),
    "a reduction that does not admit its dtype": (node(1, op="any"), "any does not admit torch.float32"),
    "positions that are not int64": (buffer("place", dtype=torch.int32), "stores torch.int64 values into int32"),
    "factors of two dtypes": (node(4, rhs=vs.cast(load("weight", K, W), F64)), "multiplies torch.float32 by torch.float64"),
    "a mask of a scatter that is not bool": (node(9, mask=X), "its mask is not bool"),
    # indices and variables
    "too few indices": (pointwise(load("x", V)), "1 indices into x, which has 2 dimensions"),
    "a variable of another loop": (pointwise(load("x", V, OTHER)), "uses other < 8, which is not one of its loop variables"),
    "an index value of another loop": (pointwise(vs.cast(vs.index_value(OTHER.expr()), F32)), "not one of its loop variables"),
    "a static index past the end": (pointwise(load("x", V, W.expr() + 1)), "leaves dimension 1"),
    "a symbolic index past the end": (pointwise(load("x", V.expr() + 1, W)), "leaves dimension 0"),
    "a negative index": (pointwise(load("x", V, W.expr() - 1)), "leaves dimension 1"),
    "a view past the end": (output(ir.TensorArg("scaled", (V,), (V.expr(), ix.constant(8)), F32)), "leaves dimension 1"),
    "a write past the end": (node(9, index=(V.expr(), W.expr() + 1)), "leaves dimension 1"),
    "a scatter that reads what it overwrites": (
        node(9, value=load("x", V, ix.constant(7) - W.expr())),
        "reads x at .* while it writes it",
    ),
    "equal loop variables": (node(0, vars=(V, ix.var("i0", 8))), "not distinct"),
    "loops of another size": (buffer("double", sizes=(S.expr(), ix.constant(9))), "double has sizes"),
    "loops of another rank": (node(0, vars=(V, W, OTHER)), "double has sizes"),
    "an unbound size": (node(0, vars=(ix.var("i0", UNBOUND), W)), "size symbol u0 is not bound yet"),
    "an unbound size returned": (output(UNBOUND.expr()), "size symbol u0 is not bound yet"),
    "an unbound size in a call": (node(5, args=(whole("matmul"), UNBOUND.expr())), "size symbol u0 is not bound yet"),
    "results of different sizes": (buffer("place", sizes=(ix.ZERO,), dtype=I64), "place has sizes"),
    "a library call with other results": (
        node(4, vendor=ir.Extern(("sorted",), "mm", (whole("double"),))),
        "its library call defines",
    ),
    "a hint that is no order": (buffer("double", hint=(0, 0)), "does not order its dimensions"),
    "a scan with too many results": (node(3, outs=("running", "place")), "sum gives 1 results, not 2"),
    "something that is no node": (append(ir.Origin()), "unknown kind of node Origin"),
}


@pytest.mark.parametrize("name", list(DAMAGE))
def test_damage_is_found(name: str) -> None:
    damage, message = DAMAGE[name]
    g = graph()
    damage(g)
    with pytest.raises(errors.InvalidIR, match=message) as caught:
        verify(g, "damage")
    assert "after stage damage" in str(caught.value)


def test_a_masked_load_may_be_out_of_bounds() -> None:
    g = graph()
    inside = vs.compare("lt", W.expr() + 1, ix.constant(8))
    shifted = vs.masked(inside, load("x", V, W.expr() + 1), vs.const(0, F32))
    g.nodes[0] = ir.Pointwise("double", (V, W), shifted)
    verify(g, "test")


def test_a_scatter_may_read_its_target_elsewhere_when_the_places_are_disjoint() -> None:
    g = graph()
    half = ix.var("h", 4)
    value = load("x", V, half.expr() + 4)
    g.nodes[9] = ir.Scatter("x_v1", "x", (V, half), (V.expr(), half.expr()), value)
    verify(g, "test")


def test_an_empty_loop_reads_nothing() -> None:
    g = ir.Graph("empty")
    g.buffers["x"] = ir.Buffer("x", F32, CPU, (ix.ZERO,), kind="input")
    g.buffers["y"] = ir.Buffer("y", F32, CPU, (ix.ZERO,))
    g.inputs = [ir.GraphInput("x")]
    g.nodes = [ir.Pointwise("y", (ix.var("i0", 0),), vs.load("x", (ix.ZERO,), F32))]
    verify(g, "test")


def test_a_size_bound_by_a_call_is_known_afterwards() -> None:
    g = graph()
    g.buffers["found"] = ir.Buffer("found", F32, CPU, (UNBOUND.expr(),))
    g.nodes.insert(0, ir.Extern(("found",), "nonzero", (whole("x"),), binds=((UNBOUND, 0, 0),)))
    g.outputs.append(UNBOUND.expr())
    verify(g, "test")


def chain(count: int) -> ir.Graph:
    g = ir.Graph("chain")
    v = ix.var("i0", 16)
    g.buffers["b0"] = ir.Buffer("b0", F32, CPU, (ix.constant(16),), kind="input")
    g.inputs = [ir.GraphInput("b0")]
    for k in range(1, count):
        g.buffers[f"b{k}"] = ir.Buffer(f"b{k}", F32, CPU, (ix.constant(16),), alias_of=f"b{k - 1}")
        value = vs.call("add", vs.load(f"b{k - 1}", (v.expr(),), F32), vs.const(1, F32))
        g.nodes.append(ir.Scatter(f"b{k}", f"b{k - 1}", (v,), (v.expr(),), value))
    g.outputs = [ir.TensorArg(f"b{count - 1}", (v,), (v.expr(),), F32)]
    return g


def test_long_chains_of_versions_stay_linear() -> None:
    g = chain(4000)
    start = time.perf_counter()
    verify(g, "test")
    assert time.perf_counter() - start < 10  # following each chain to its root anew takes minutes
