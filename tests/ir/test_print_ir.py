"""The printed form is what a person reads in debug folders: stable names, no addresses, one operation a line."""

from __future__ import annotations

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.printer import print_graph, print_node, print_value
from kgen.verdict import OperatorCall

F32, I64 = torch.float32, torch.int64
CPU = torch.device("cpu")


HALF = ir.Origin((OperatorCall("aten.add"),), "half", "model.py:12 y = x * 0.5")


def example() -> ir.Graph:
    s0 = ix.size("s0", 1, 1 << 40)
    sizes = (s0.expr(), ix.constant(512))
    i, j, r = ix.var("i0", s0), ix.var("i1", 512), ix.var("r0", 512)
    x = vs.load("x", (i.expr(), j.expr()), F32)
    half = vs.call("mul", x, vs.const(0.5, F32))
    row = vs.indirect(vs.load("rows", (i.expr(),), I64), s0.expr(), wrap=False)
    graph = ir.Graph("example")
    for buffer in (
        ir.Buffer("x", F32, CPU, sizes, (ix.constant(512), ix.ONE), kind="input"),
        ir.Buffer("rows", I64, CPU, (s0.expr(),), (ix.ONE,), kind="input"),
        ir.Buffer("half", F32, CPU, sizes),
        ir.Buffer("total", F32, CPU, (s0.expr(),)),
        ir.Buffer("half_v1", F32, CPU, sizes, alias_of="half"),
    ):
        graph.buffers[buffer.name] = buffer
    graph.inputs = [ir.GraphInput("x", static=True), ir.GraphInput("rows"), ir.GraphInput(symbol=s0), ir.GraphInput()]
    loaded = vs.load("half", (i.expr(), r.expr()), F32)
    graph.nodes = [
        ir.Pointwise("half", (i, j), vs.call("add", half, half), HALF),
        ir.Reduction(("total",), (i,), (r,), "sum", loaded),
        ir.Scatter("half_v1", "half", (i, j), (row, j.expr()), x, "add", vs.compare("lt", j.expr(), s0.expr())),
    ]
    graph.outputs = [ir.TensorArg("total", (i,), (i.expr(),), F32), s0.expr() * 2, None]
    return graph


EXPECTED = """\
graph example
  input x: f32[s0, 512] strides [512, 1]  # static
  input rows: i64[s0] strides [1]
  input s0
  input _
  half: f32[s0, 512] = pointwise(i0 < s0, i1 < 512)   # aten.add  model.py:12 y = x * 0.5
    t0 = load(x, i0, i1)
    t1 = mul t0, 0.5
    t2 = add t1, t1
    store t2
  total: f32[s0] = sum(i0 < s0 | r0 < 512)
    t0 = load(half, i0, r0)
    reduce t0
  half_v1: f32[s0, 512] in half = scatter add into half(i0 < s0, i1 < 512)
    t0 = load(x, i0, i1)
    t1 = load(rows, i0)
    t2 = lt (i1), (s0)
    store t0 at [[t1], i1] if t2
  return total, 2*s0, None
"""


def test_the_printed_graph() -> None:
    assert print_graph(example()) == EXPECTED


def test_nothing_depends_on_what_was_built_before() -> None:
    graph = example()
    before = print_graph(graph)
    for k in range(50):
        vs.call("add", vs.load(f"other{k}", (), F32), vs.const(float(k), F32))
    assert print_graph(example()) == before


def test_values() -> None:
    i = ix.var("i", 6)
    x = vs.load("x", (i.expr(),), torch.bfloat16, vs.load("m", (i.expr(),), torch.bool))
    value = vs.cast(vs.call("add", x, vs.const(0.1, F32)), torch.bfloat16)
    assert print_value(value).split("\n") == [
        "t0 = load(m, i)", "t1 = load(x, i) if t0", "t2 = add t1, 0.1", "t3 = round_to t2 to bf16",
    ]  # fmt: skip
    assert print_value(vs.const(0.1, F32)) == "0.1"
    assert print_value(vs.const(3, torch.uint8)) == "3:u8"
    assert print_value(vs.index_value(i.expr() * 2)) == "(2*i)"


def test_a_load_at_a_computed_index() -> None:
    i = ix.var("i", 6)
    inner = vs.indirect(vs.load("t", (i.expr(),), I64), ix.constant(8), wrap=False)
    value = vs.load("x", (ix.floordiv(inner * 3, 2) + ix.mod(i, 4), ix.minimum(inner, i)), F32)
    assert print_value(value).split("\n") == ["t0 = load(t, i)", "t1 = load(x, (3*[t0] // 2) + (i % 4), min([t0], i))"]


def test_every_kind_of_node_prints() -> None:
    i, k = ix.var("i", 6), ix.var("k", 3)
    graph = ir.Graph("kinds")
    for name in ("x", "y", "a", "b", "c", "d", "e", "x_v1"):
        graph.buffers[name] = ir.Buffer(name, F32, CPU, (ix.constant(6),), alias_of="x" if name == "x_v1" else None)
    whole = ir.TensorArg("x", (i,), (i.expr(),), F32)
    flipped = ir.TensorArg("y", (k,), (k.expr() * 2,), F32)
    call = ir.Extern(("c",), torch.ops.aten.mm.default, (whole, flipped), (("n", (1, ix.constant(2))),), reason="no template")
    mutation = ir.Extern((None,), torch.ops.aten.relu_.default, (whole,), (), (("x", "x_v1"),), effect=True)
    one = ir.Pointwise("a", (i,), vs.load("x", (i.expr(),), F32))
    lines = {
        "extern": print_node(call, graph),
        "mutation": print_node(mutation, graph),
        "attention": print_node(ir.Attention(call), graph),
        "scan": print_node(ir.Scan(("b",), (i,), i, "sum", one.value), graph),
        "contraction": print_node(ir.Contraction("c", (i,), (k,), one.value, vs.load("y", (k.expr(),), F32), call), graph),
    }
    assert lines["extern"] == "c: f32[6] = extern aten::mm(x, y[2*k for k < 3], n=[1, 2]) [no template]"
    assert lines["mutation"] == "_ = extern aten::relu_(x) (x -> x_v1: f32[6] in x; effect) [no lowering]"
    assert lines["attention"].startswith("c: f32[6] = attention aten::mm(")
    assert lines["scan"].startswith("b: f32[6] = scan sum along i(i < 6)")
    assert lines["contraction"].endswith("  sum t0 * t1")
