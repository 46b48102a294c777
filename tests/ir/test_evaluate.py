"""The evaluator against torch itself: each node kind, masks, versions, symbolic sizes, random numbers, both policies."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kgen import errors
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import ExprLike, Var
from kgen.ir.values import Value
from kgen.ir.verify import verify
from kgen.reference.evaluate import EXACT, FAST, Policy, evaluate_graph, evaluate_value
from kgen.reference.evaluate_reduction import reduce, scan
from kgen.reference.evaluate_value import philox

F16, BF16, F32, F64, I32, I64, U8, BOOL = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool,
)  # fmt: skip
CPU = torch.device("cpu")


def axes(*extents: ExprLike, prefix: str = "i") -> tuple[Var, ...]:
    return tuple(ix.var(f"{prefix}{k}", n) for k, n in enumerate(extents))


def load(name: str, *index: Any, dtype: torch.dtype = F32, mask: Value | None = None) -> Value:
    return vs.load(name, tuple(map(ix.as_expr, index)), dtype, mask)


class Made:
    """A graph under construction, for tests: buffers by name, nodes in order."""

    def __init__(self) -> None:
        self.graph = ir.Graph("test")

    def input(self, name: str, dtype: torch.dtype, *sizes: ExprLike) -> None:
        exprs = tuple(map(ix.as_expr, sizes))
        self.graph.buffers[name] = ir.Buffer(name, dtype, CPU, exprs, ix.contiguous_strides(exprs), kind="input")
        self.graph.inputs.append(ir.GraphInput(name))

    def buffer(self, name: str, dtype: torch.dtype, *sizes: ExprLike, **more: Any) -> str:
        self.graph.buffers[name] = ir.Buffer(name, dtype, CPU, tuple(map(ix.as_expr, sizes)), **more)
        return name

    def version(self, new: str, old: str) -> str:
        before = self.graph.buffers[old]
        return self.buffer(new, before.dtype, *before.sizes, strides=before.strides, alias_of=old)

    def whole(self, name: str) -> ir.TensorArg:
        buffer = self.graph.buffers[name]
        variables = axes(*buffer.sizes)
        return ir.TensorArg(name, variables, tuple(v.expr() for v in variables), buffer.dtype)

    def run(self, inputs: list[Any], *outputs: Any, policy: Policy = FAST) -> Any:
        self.graph.outputs = [self.whole(o) if isinstance(o, str) else o for o in outputs]
        verify(self.graph, "test")
        found = evaluate_graph(self.graph, inputs, policy=policy)
        return found[0] if len(found) == 1 else found


# ---- values ---------------------------------------------------------------------------------------------------------


def test_a_value_over_its_points() -> None:
    i, j = axes(3, 4)
    x, b = torch.randn(3, 4), torch.randn(4)
    value = vs.call("mul", vs.call("add", load("x", i, j), load("b", j)), vs.const(0.5, F32))
    torch.testing.assert_close(evaluate_value(value, (i, j), {"x": x, "b": b}), (x + b) * 0.5)
    turned = evaluate_value(value, (j, i), {"x": x, "b": b})
    torch.testing.assert_close(turned, ((x + b) * 0.5).t())


def test_views_are_index_maps() -> None:
    x = torch.randn(4, 6)
    a, b, c = axes(2, 3, 4)
    flat = a.expr() * 12 + b.expr() * 4 + c.expr()
    value = load("x", flat // 6, flat % 6)
    torch.testing.assert_close(evaluate_value(value, (a, b, c), {"x": x}), x.reshape(2, 3, 4))
    flipped = load("x", ix.constant(3) - a.expr(), b)
    torch.testing.assert_close(evaluate_value(flipped, (a, b), {"x": x}), x.flip(0)[:2, :3])


def test_masked_lanes_touch_nothing_and_give_zero() -> None:
    (i,) = axes(6)
    x = torch.tensor([1.0, 2.0, 3.0])
    inside = vs.compare("lt", i.expr(), ix.constant(3))
    bare = load("x", i, mask=inside)
    assert evaluate_value(bare, (i,), {"x": x}).tolist() == [1, 2, 3, 0, 0, 0]
    padded = vs.masked(inside, load("x", i), vs.const(-1, F32))
    assert evaluate_value(padded, (i,), {"x": x}).tolist() == [1, 2, 3, -1, -1, -1]
    nothing = load("x", i, mask=vs.const(False, BOOL))
    assert evaluate_value(nothing, (i,), {"x": torch.empty(0)}).tolist() == [0] * 6


def test_an_unmasked_lane_out_of_bounds_is_an_error() -> None:
    (i,) = axes(6)
    with pytest.raises(IndexError, match="index 3 is out of bounds for dimension 0 of x with size 3"):
        evaluate_value(load("x", i), (i,), {"x": torch.zeros(3)})
    with pytest.raises(IndexError, match="index -1 is out of bounds"):
        evaluate_value(load("x", i.expr() - 1), (i,), {"x": torch.zeros(6)})


def test_an_empty_space_reads_nothing() -> None:
    i, j = axes(0, 4)
    assert evaluate_value(load("x", j, dtype=F64), (i, j), {"x": torch.zeros(2, dtype=F64)}).shape == (0, 4)


def test_gather_through_data() -> None:
    i, j = axes(4, 3)
    table, x = torch.tensor([2, -1, 0, 4]), torch.randn(5, 3)
    row = vs.indirect(load("table", i, dtype=I64), ix.constant(5))
    torch.testing.assert_close(evaluate_value(load("x", row, j), (i, j), {"x": x, "table": table}), x[table])
    with pytest.raises(IndexError):
        evaluate_value(load("x", row, j), (i, j), {"x": x, "table": table + 3})


def test_gather_through_gathered_data() -> None:
    (i,) = axes(4)
    first, second, x = torch.tensor([3, 2, 1, 0]), torch.tensor([1, 0, 1, 2]), torch.randn(3)
    inner = vs.indirect(load("first", i, dtype=I64), ix.constant(4))
    outer = vs.indirect(load("second", inner, dtype=I64), ix.constant(3))
    found = evaluate_value(load("x", outer), (i,), {"first": first, "second": second, "x": x})
    torch.testing.assert_close(found, x[second[first]])


def test_symbolic_extents_and_indices() -> None:
    s = ix.size("s", 1, 99)
    (i,) = axes(s.expr())
    value = vs.cast(vs.index_value(ix.maximum(s.expr() - 1 - i.expr(), ix.constant(2)) // 2), F32)
    assert evaluate_value(value, (i,), {}, {s: 5}).tolist() == [2, 1, 1, 1, 1]


@pytest.mark.parametrize("dtype", [BF16, F16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_narrow_floats_widen_exactly_and_round_where_asked(dtype: torch.dtype) -> None:
    (i,) = axes(64)
    x = torch.randn(64).to(dtype)
    raw = load("x", i, dtype=dtype)
    value = vs.call("mul", raw, vs.const(1 / 3, F32))
    assert torch.equal(evaluate_value(value, (i,), {"x": x}), x.float() * torch.tensor(1 / 3))
    rounded = evaluate_value(vs.cast(value, dtype), (i,), {"x": x})
    assert torch.equal(rounded, (x.float() * torch.tensor(1 / 3)).to(dtype).float())
    assert torch.equal(evaluate_value(vs.cast(value, dtype), (i,), {"x": x}, policy=EXACT).to(dtype), rounded.to(dtype))


def test_casts_and_bitcasts() -> None:
    (i,) = axes(5)
    x = torch.tensor([1.9, -1.9, 0.0, 3.5, -0.0])
    assert evaluate_value(vs.cast(load("x", i), I32), (i,), {"x": x}).tolist() == [1, -1, 0, 3, 0]
    assert evaluate_value(vs.cast(load("x", i), BOOL), (i,), {"x": x}).tolist() == [True, True, False, True, False]
    bits = vs.bitcast(load("x", i), I32)
    for policy in (FAST, EXACT):
        assert torch.equal(evaluate_value(bits, (i,), {"x": x}, policy=policy), x.view(I32))
        back = evaluate_value(vs.bitcast(bits, F32), (i,), {"x": x}, policy=policy)
        assert torch.equal(back.float(), x)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_wide_unsigned_arithmetic_wraps(dtype: torch.dtype) -> None:
    (i,) = axes(2)
    largest = torch.iinfo(dtype).max
    x = torch.tensor([largest, 5]).to(dtype) if dtype is not torch.uint64 else torch.tensor([largest, 5], dtype=dtype)
    value = vs.call("add", load("x", i, dtype=dtype), vs.const(2, dtype))
    assert evaluate_value(value, (i,), {"x": x}).tolist() == [1, 7]
    less = vs.call("lt", load("x", i, dtype=dtype), vs.const(6, dtype))
    assert evaluate_value(less, (i,), {"x": x}).tolist() == [False, True]


def test_float64_policy_is_nearly_exact() -> None:
    (i,) = axes(1000)
    x = torch.rand(1000) + 0.5
    value = vs.call("log", vs.call("exp", vs.call("sqrt", load("x", i))))
    exact = evaluate_value(value, (i,), {"x": x}, policy=EXACT)
    assert exact.dtype is F64
    assert (exact - x.double().sqrt()).abs().max() < 1e-14
    step = vs.call("nextafter", load("x", i), vs.const(math.inf, F32))
    assert torch.equal(evaluate_value(step, (i,), {"x": x}, policy=EXACT).float(), x.nextafter(torch.tensor(math.inf)))


def test_a_thousand_steps_are_a_thousand_operations() -> None:
    (i,) = axes(3)
    y = load("x", i)
    for _ in range(1000):
        y = vs.call("mul", vs.call("add", y, y), vs.const(0.5, F32))
    x = torch.randn(3)
    torch.testing.assert_close(evaluate_value(y, (i,), {"x": x}), x)


# ---- random numbers -------------------------------------------------------------------------------------------------


def _philox_by_hand(seed: int, counter: int) -> list[int]:
    """The algorithm once more, on Python integers."""
    key, count = [seed & 0xFFFFFFFF, seed >> 32], [counter & 0xFFFFFFFF, counter >> 32, 0, 0]
    for _ in range(10):
        a, b = count[0] * 0xD2511F53, count[2] * 0xCD9E8D57
        count = [(b >> 32) ^ count[1] ^ key[0], b & 0xFFFFFFFF, (a >> 32) ^ count[3] ^ key[1], a & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return count


def test_philox() -> None:
    zero = torch.zeros(1, dtype=I64)
    # the known answer of the authors' implementation for an all-zero key and counter
    assert [int(w) for w in philox(zero, zero)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    generator = np.random.default_rng(0)
    pairs = generator.integers(0, 2**63, size=(20, 2))
    for seed, counter in pairs.tolist():
        assert [int(w) for w in philox(torch.tensor([seed]), torch.tensor([counter]))] == _philox_by_hand(seed, counter)
    negative = philox(torch.tensor([-1]), torch.tensor([-2]))
    assert [int(w) for w in negative] == _philox_by_hand(2**64 - 1, 2**64 - 2)


def test_random_values_depend_on_seed_and_counter_only() -> None:
    i, j = axes(200, 50)
    seed = {"seed": torch.tensor([12345])}
    counter = vs.index_value(i.expr() * 50 + j.expr())
    uniform = evaluate_value(vs.random("rand", load("seed", 0, dtype=I64), counter), (i, j), seed)
    turned = evaluate_value(vs.random("rand", load("seed", 0, dtype=I64), counter), (j, i), seed)
    assert torch.equal(uniform, turned.t())
    assert uniform.dtype is F32
    assert 0 <= uniform.min() < uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.02
    normal = evaluate_value(vs.random("randn", load("seed", 0, dtype=I64), counter), (i, j), seed)
    assert abs(normal.mean()) < 0.05
    assert abs(normal.std() - 1) < 0.05
    bits = evaluate_value(vs.random("randbits", load("seed", 0, dtype=I64), counter), (i, j), seed)
    assert bits.dtype is I64
    assert bits.unique().numel() == 10000
    for i in range(4, 8):  # the elements of block 1, for bits of the blocks 2 and 3
        words, place = _philox_by_hand(12345, 1), i % 4
        assert uniform.flatten()[i] == (words[place] >> 8) * 2.0**-24
        low, high = (w >> 8 for w in words[place // 2 * 2 :][:2])
        turn = (math.sin if i % 2 else math.cos)(2 * math.pi * high * 2.0**-24)
        exact = math.sqrt(-2 * math.log((low + 1) * 2.0**-24)) * turn
        torch.testing.assert_close(float(normal.flatten()[i]), exact, rtol=1e-5, atol=1e-6)
        words, place = _philox_by_hand(12345, i // 2), i % 2
        assert int(bits.flatten()[i]) % 2**64 == words[2 * place] | words[2 * place + 1] << 32


def test_neighbouring_random_numbers_are_independent() -> None:
    (i,) = axes(40000)
    seed = {"seed": torch.tensor([99])}
    for kind, mean, deviation in (("rand", 0.5, 1 / math.sqrt(12)), ("randn", 0.0, 1.0)):
        x = evaluate_value(vs.random(kind, load("seed", 0, dtype=I64), vs.index_value(i.expr())), (i,), seed).double()
        z = ((x - mean) / deviation).reshape(-1, 4)
        torch.testing.assert_close(z.mean(0), torch.zeros(4).double(), rtol=0, atol=0.05)
        for numbers in (z, z.square()):  # squares: cosine and sine of one angle
            torch.testing.assert_close(torch.corrcoef(numbers.T), torch.eye(4).double(), rtol=0, atol=0.05)


# ---- reductions and scans -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", list(ops.REDUCTIONS))
def test_reductions_run_on_every_admitted_dtype(op: str) -> None:
    for dtype in ops.admitted(ops.REDUCTIONS[op].admits):
        x = torch.tensor([[1, 2, 0], [3, 1, 1]]).to(dtype)
        results = reduce(op, x)
        assert len(results) == ops.REDUCTIONS[op].outputs
        assert all(r.shape == (2,) for r in results)
        assert results[0].dtype == dtype
        empty = reduce(op, x[:, :0])
        assert [r.shape for r in empty] == [(2,)] * len(results)


def test_integer_sums_wrap_in_their_own_dtype() -> None:
    assert reduce("sum", torch.tensor([200, 100], dtype=U8))[0].tolist() == 44
    assert reduce("bitxor", torch.tensor([5, 3], dtype=I32))[0].item() == 6


def test_extremes_prefer_nan_and_the_first_of_equals() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0], [math.nan, 5.0, math.nan], [-math.inf] * 3])
    value, place = reduce("argmax", x)
    assert place.tolist() == [1, 0, 0]
    assert value[0] == 3
    assert value[1].isnan()
    assert reduce("argmin", torch.tensor([2, 1, 1]))[1].item() == 1
    assert reduce("argmax", torch.tensor([False, True, True]))[1].item() == 1
    assert reduce("max", x)[0].isnan().tolist() == [False, True, False]
    huge = torch.tensor([2**63 + 1, 2**63, 1], dtype=torch.uint64)
    assert reduce("argmin", huge)[1].item() == 2
    assert reduce("argmax", huge)[1].item() == 0


def test_welford() -> None:
    x = torch.randn(4, 100) + 1000
    mean, m2 = reduce("welford", x)
    variance, expected = torch.var_mean(x, -1)
    torch.testing.assert_close(mean, expected)
    torch.testing.assert_close(m2 / 99, variance)


@pytest.mark.parametrize("op", [op for op in ops.SCANS if op not in ops.ROW_ORDERS])
def test_scans_follow_torch(op: str) -> None:
    x = torch.tensor([[1.0, 1.0, 3.0, 2.0, 3.0], [2.0, math.nan, 1.0, math.nan, 5.0]])
    expected = {
        "sum": lambda: [x.cumsum(1)], "prod": lambda: [x.cumprod(1)], "max": lambda: [x.cummax(1).values],
        "min": lambda: [x.cummin(1).values], "argmax": lambda: list(x.cummax(1)), "argmin": lambda: list(x.cummin(1)),
        "logaddexp": lambda: [torch.logcumsumexp(x, 1)],
    }[op]()  # fmt: skip
    for found, wanted in zip(scan(op, x, 1), expected, strict=True):
        torch.testing.assert_close(found, wanted, equal_nan=True)
    assert scan("sum", torch.tensor([200, 100], dtype=U8), 0)[0].tolist() == [200, 44]
    assert scan("sum", torch.tensor([7, 9], dtype=torch.uint32), 0)[0].tolist() == [7, 16]


def test_rows_in_order() -> None:
    x = torch.tensor([[3, 1, 3, -2], [0, 0, 0, 0]])
    assert scan("sort", x, 1)[0].tolist() == [[-2, 1, 3, 3], [0, 0, 0, 0]]
    assert scan("stable_sort", x, 1)[1].tolist() == [[3, 1, 0, 2], [0, 1, 2, 3]]
    assert scan("sort", x, 0)[0].tolist() == [[0, 0, 0, -2], [3, 1, 3, 0]]


# ---- graphs ---------------------------------------------------------------------------------------------------------


def softmax_graph(dtype: torch.dtype) -> Made:
    m = Made()
    s = ix.size("s", 1, 1 << 40)
    m.input("x", dtype, s.expr(), 10)
    (i, j), (r,) = axes(s.expr(), 10), axes(10, prefix="r")
    m.buffer("top", F32, s.expr())
    m.buffer("total", F32, s.expr())
    m.buffer("out", dtype, s.expr(), 10)
    shifted = {v: vs.call("exp", vs.call("sub", load("x", i, v, dtype=dtype), load("top", i))) for v in (j, r)}
    m.graph.nodes = [
        ir.Reduction(("top",), (i,), (r,), "max", load("x", i, r, dtype=dtype)),
        ir.Reduction(("total",), (i,), (r,), "sum", shifted[r]),
        ir.Pointwise("out", (i, j), vs.call("truediv", shifted[j], load("total", i))),
    ]
    return m


@pytest.mark.parametrize("policy", [FAST, EXACT])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_softmax_of_symbolic_rows(dtype: torch.dtype, policy: Policy) -> None:
    x = torch.randn(7, 10).to(dtype)
    out = softmax_graph(dtype).run([x], "out", policy=policy)
    assert out.dtype is dtype
    torch.testing.assert_close(out, x.softmax(-1))
    assert softmax_graph(dtype).run([x[:0]], "out", policy=policy).shape == (0, 10)


def test_flexible_layouts_follow_their_hint() -> None:
    m = Made()
    m.input("x", F32, 3, 4)
    i, j = axes(3, 4)
    m.buffer("out", F32, 3, 4, hint=(1, 0))
    m.graph.nodes = [ir.Pointwise("out", (i, j), load("x", i, j))]
    out = m.run([torch.randn(3, 4)], "out")
    assert out.stride() == (1, 3)


def test_any_layout_of_the_input_is_read_rightly() -> None:
    m = softmax_graph(F32)
    x = torch.randn(10, 5).t()
    torch.testing.assert_close(m.run([x], "out"), x.softmax(-1))


def test_a_mutated_input_changes_for_real() -> None:
    m = Made()
    m.input("x", F32, 4, 3)
    m.version("x_v1", "x")
    m.buffer("before", F32, 4, 3)
    i, j = axes(4, 3)
    plus = vs.call("add", load("x", i, j), vs.const(1, F32))
    m.graph.nodes = [
        ir.Pointwise("before", (i, j), load("x", i, j)),
        ir.Scatter("x_v1", "x", (i, j), (i.expr(), j.expr()), plus),
    ]
    base = torch.randn(4, 6)
    x = base[:, ::2]
    old, whole = x.clone(), base.clone()
    before, after = m.run([x], "before", "x_v1")
    torch.testing.assert_close(before, old)
    torch.testing.assert_close(x, old + 1)
    assert after.data_ptr() == x.data_ptr()
    assert after.stride() == x.stride()
    torch.testing.assert_close(base[:, 1::2], whole[:, 1::2])


def test_reinterpretations_share_the_storage() -> None:
    m = Made()
    m.input("x", F32, 4, 3)
    m.version("x_v1", "x")
    m.buffer("flat", F32, 12, strides=(ix.ONE,), alias_of="x_v1")
    m.buffer("bits", I32, 5, strides=(ix.constant(2),), offset=1, alias_of="x_v1")
    i, j = axes(4, 3)
    m.graph.nodes = [ir.Scatter("x_v1", "x", (j,), (ix.constant(1), j.expr()), vs.const(7.0, F32))]
    base = torch.zeros(13)
    x = base[1:].view(4, 3)
    flat, bits = m.run([x], "flat", "bits")
    assert flat.tolist() == [0, 0, 0, 7, 7, 7, 0, 0, 0, 0, 0, 0]
    assert flat.data_ptr() == x.data_ptr()
    assert bits.tolist() == x.flatten().view(I32)[1::2][:5].tolist()
    assert i.extent == 4


def scatter_graph(mode: str, dtype: torch.dtype, points: int, masked: bool = False) -> Made:
    m = Made()
    m.input("x", dtype, 5)
    m.input("where", I64, points)
    m.input("y", dtype, points)
    m.version("out", "x")
    (i,) = axes(points)
    at = vs.indirect(load("where", i, dtype=I64), ix.constant(5))
    mask = vs.compare("lt", i.expr(), ix.constant(2)) if masked else None
    m.graph.nodes = [ir.Scatter("out", "x", (i,), (at,), load("y", i, dtype=dtype), mode, mask)]
    return m


def test_the_last_write_wins() -> None:
    where = torch.tensor([1, 3, 1, 1, 4])
    out = scatter_graph("set", F32, 5).run([torch.zeros(5), where, torch.arange(5.0)], "out")
    assert out.tolist() == [0, 3, 0, 1, 4]


def test_masked_writes_do_not_happen() -> None:
    where = torch.tensor([1, 3, 1, 1, 400])
    out = scatter_graph("set", F32, 5, masked=True).run([torch.zeros(5), where, torch.arange(1.0, 6)], "out")
    assert out.tolist() == [0, 1, 0, 2, 0]


def test_writes_out_of_bounds_are_errors() -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        scatter_graph("set", F32, 1).run([torch.zeros(5), torch.tensor([5]), torch.ones(1)], "out")


def test_accumulation_is_in_order() -> None:
    big = torch.tensor([1e8, 1.0, -1e8, 1.0])
    assert scatter_graph("add", F32, 4).run([torch.zeros(5), torch.zeros(4, dtype=I64), big], "out")[0] == 1.0
    many = torch.ones(600).to(BF16)
    out = scatter_graph("add", BF16, 600).run([torch.zeros(5, dtype=BF16), torch.zeros(600, dtype=I64), many], "out")
    assert out[0] == 256  # each addition rounds, and bfloat16 has no 257


@pytest.mark.parametrize(("mode", "reduction"), [("mul", "prod"), ("max", "amax"), ("min", "amin"), ("add", "sum")])
@pytest.mark.parametrize("dtype", [F32, I64])
def test_scatter_modes_follow_torch(mode: str, reduction: str, dtype: torch.dtype) -> None:
    x, y = torch.randn(5).mul(4).to(dtype), torch.randn(20).mul(4).to(dtype)
    where = torch.randint(0, 5, (20,))
    expected = x.clone().scatter_reduce_(0, where, y, reduction)
    torch.testing.assert_close(scatter_graph(mode, dtype, 20).run([x, where, y], "out"), expected)


def test_a_scatter_into_a_scalar() -> None:
    m = Made()
    m.input("x", F32)
    m.version("out", "x")
    (i,) = axes(3)
    m.graph.nodes = [ir.Scatter("out", "x", (i,), (), vs.cast(vs.index_value(i.expr()), F32), "add")]
    assert m.run([torch.tensor(10.0)], "out") == 13


def matmul_graph(target: Any = torch.ops.aten.mm.default) -> Made:
    m = Made()
    n, k = ix.size("n", 1, 999), ix.size("k", 1, 999)
    m.input("a", F32, 6, k.expr())
    m.input("b", F32, k.expr(), n.expr())
    m.buffer("c", F32, 6, n.expr(), strides=(n.expr(), ix.ONE))
    i, j, r = ix.var("m", 6), ix.var("n", n.expr()), ix.var("k", k.expr())
    call = ir.Extern(("c",), target, (m.whole("a"), m.whole("b")))
    m.graph.nodes = [ir.Contraction("c", (i, j), (r,), load("a", i, r), load("b", r, j), call, operands=F32)]
    return m


@pytest.mark.parametrize("policy", [FAST, EXACT])
def test_contractions_by_definition_and_by_library(policy: Policy) -> None:
    a, b = torch.randn(6, 5), torch.randn(5, 6)
    torch.testing.assert_close(matmul_graph().run([a, b], "c", policy=policy), a @ b)
    wrong = matmul_graph(lambda x, y: torch.mm(x, y) + 1)
    with pytest.raises(errors.InvalidIR, match=r"its sum of products differs from .* by 1"):
        wrong.run([a, b], "c", policy=policy)


def test_operands_of_a_contraction_may_be_computed() -> None:
    m = matmul_graph()
    node = m.graph.nodes[0]
    lhs = vs.call("mul", node.lhs, vs.const(2, F32))
    m.graph.nodes = [ir.Contraction("c", node.out_vars, node.reduced, lhs, vs.const(1.0, F32), node.vendor, operands=F32)]
    a, b = torch.randn(6, 5), torch.randn(5, 4)
    found = m.run([a, b], "c", policy=Policy(check_vendor=False))
    torch.testing.assert_close(found, (2 * a).sum(1, keepdim=True).expand(6, 4))


def test_a_bias_makes_the_library_call_the_definition() -> None:
    m = matmul_graph()
    n = m.graph.buffers["b"].sizes[1]
    m.input("bias", F32, n)
    node = m.graph.nodes[0]
    call = ir.Extern(("c",), torch.ops.aten.addmm.default, (m.whole("bias"), *node.vendor.args), (("alpha", 2),))
    m.graph.nodes = [ir.Contraction("c", node.out_vars, node.reduced, node.lhs, node.rhs, call)]
    a, b, bias = torch.randn(6, 5), torch.randn(5, 4), torch.randn(4)
    torch.testing.assert_close(m.run([a, b, bias], "c"), bias + 2 * (a @ b))


def test_an_empty_contraction_has_its_addend() -> None:
    m = matmul_graph()
    m.input("bias", F32, 6)
    node = m.graph.nodes[0]
    m.graph.nodes = [replace(node, vendor=None, addend=load("bias", node.out_vars[1]))]
    bias = torch.randn(6)
    torch.testing.assert_close(m.run([torch.empty(6, 0), torch.empty(0, 6), bias], "c"), bias.expand(6, 6))


def test_attention_is_its_operator() -> None:
    m = Made()
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    for name in "qkv":
        m.input(name, F32, 1, 2, 4, 8)
    m.buffer("out", F32, 1, 2, 4, 8)
    target = torch.nn.functional.scaled_dot_product_attention
    m.graph.nodes = [ir.Attention(ir.Extern(("out",), target, tuple(map(m.whole, "qkv"))))]
    torch.testing.assert_close(m.run([q, k, v], "out"), target(q, k, v))


# ---- externs --------------------------------------------------------------------------------------------------------


def test_an_extern_on_views_and_lists() -> None:
    m = Made()
    m.input("x", F32, 4, 6)
    (i, j) = axes(6, 2)
    columns = ir.TensorArg("x", (i, j), (j.expr() * 2 + 1, i.expr()), F32)
    m.buffer("out", F32, 6, 4)
    m.graph.nodes = [ir.Extern(("out",), torch.ops.aten.cat.default, ((columns, columns), ix.ONE))]
    x = torch.randn(4, 6)
    torch.testing.assert_close(m.run([x], "out"), torch.cat([x.t()[:, 1::2]] * 2, 1))


def test_an_extern_that_mutates_a_view() -> None:
    m = Made()
    m.input("x", F32, 4, 6)
    m.version("x_v1", "x")
    (j,) = axes(6)
    row = ir.TensorArg("x", (j,), (ix.constant(2), j.expr()), F32)
    m.graph.nodes = [ir.Extern((None,), torch.ops.aten.relu_.default, (row,), mutates=(("x", "x_v1"),))]
    x = -torch.rand(4, 6)
    m.run([x], "x_v1")
    assert x[2].eq(0).all()
    assert x[1].lt(0).all()


def test_results_that_define_sizes() -> None:
    m = Made()
    m.input("x", F32, 6)
    u = ix.size("u0", 0, 99)
    m.buffer("found", I64, u.expr(), 1)
    m.buffer("doubled", I64, u.expr())
    (i,) = axes(u.expr())
    value = vs.call("mul", load("found", i, 0, dtype=I64), vs.const(2, I64))
    m.graph.nodes = [
        ir.Extern(("found",), torch.ops.aten.nonzero.default, (m.whole("x"),), binds=((u, 0, 0),)),
        ir.Pointwise("doubled", (i,), value),
    ]
    doubled, count = m.run([torch.tensor([1.0, 0, 0, 2, 3, 0])], "doubled", u.expr() + 1)
    assert doubled.tolist() == [0, 6, 8]
    assert count == 4


def test_a_number_that_a_call_defines() -> None:
    m = Made()
    m.input("x", I64)
    u = ix.size("u0", 0, 99)
    m.graph.nodes = [ir.Extern((None,), torch.ops.aten.item.default, (m.whole("x"),), binds=((u, 0, -1),))]
    assert m.run([torch.tensor(7)], u.expr() * 3) == 21


def test_a_result_that_is_its_argument_gets_a_storage_of_its_own() -> None:
    m = Made()
    m.input("x", F32, 4)
    m.buffer("same", F32, 4)
    m.graph.nodes = [ir.Extern(("same",), torch.ops.aten.alias.default, (m.whole("x"),))]
    x = torch.randn(4)
    out = m.run([x], "same")
    assert torch.equal(out, x)
    assert out.data_ptr() != x.data_ptr()


def test_a_library_call_without_float64_still_runs() -> None:
    def only_float32(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not F32:
            raise RuntimeError("no kernel")
        return x + 1

    m = Made()
    m.input("x", F32, 4)
    m.buffer("y", F32, 4)
    m.graph.nodes = [ir.Extern(("y",), only_float32, (m.whole("x"),))]
    assert m.run([torch.ones(4)], "y", policy=EXACT).tolist() == [2.0] * 4


# ---- inputs and outputs ---------------------------------------------------------------------------------------------


def test_outputs_may_be_views() -> None:
    m = Made()
    m.input("x", F32, 4, 6)
    i, j = axes(6, 4)
    turned = ir.TensorArg("x", (i, j), (j.expr(), i.expr()), F32)
    joined = ir.TensorArg("x", axes(24), ix.delinearize(axes(24)[0].expr(), [4, 6]), F32)
    x = torch.randn(4, 6)
    a, b, n, nothing = m.run([x], turned, joined, 3, None)
    assert a.data_ptr() == x.data_ptr()
    assert a.stride() == (1, 6)
    assert b.data_ptr() == x.data_ptr()
    torch.testing.assert_close(b, x.flatten())
    assert (n, nothing) == (3, None)


def test_inputs_bind_symbols_in_any_form() -> None:
    m = Made()
    s, t, u = ix.size("s", 1, 999), ix.size("t", 1, 999), ix.size("u", 0, 999)
    m.input("x", F32, s.expr() * t.expr(), t.expr() * 2 + 1)
    m.graph.inputs.append(ir.GraphInput(symbol=u))
    m.graph.inputs.append(ir.GraphInput(expr=u.expr() * 2 + s.expr()))
    m.graph.inputs.append(ir.GraphInput())
    assert m.run([torch.zeros(12, 7), 5, 14, "ignored"], s.expr(), t.expr(), u.expr()) == [4, 3, 5]


def test_a_stride_binds_its_symbol() -> None:
    m = Made()
    s = ix.size("s", 1, 999)
    m.buffer("x", F32, 2, 3, strides=(s.expr(), ix.ONE), kind="input")
    m.graph.inputs.append(ir.GraphInput("x"))
    assert m.run([torch.zeros(2, 9)[:, :3]], s.expr()) == 9


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "0 arguments in all"),
        ([3], "type int"),
        ([torch.zeros(3, 10, dtype=F64)], r"float64\[3, 10\]"),
        ([torch.zeros(3)], r"float32\[3\]"),
        ([torch.zeros(3, 11)], "a size of 11"),
    ],
)
def test_inputs_of_another_graph_are_refused(inputs: list[Any], message: str) -> None:
    with pytest.raises(errors.InputMismatch, match=message):
        softmax_graph(F32).run(inputs, "out")


def test_reading_what_nobody_wrote_shows() -> None:
    m = softmax_graph(F32)
    del m.graph.nodes[0]
    with pytest.raises(errors.InvalidIR, match="read before it is defined"):
        evaluate_graph(m.graph, [torch.zeros(3, 10)])


def test_constants_are_inputs_of_the_graph_itself() -> None:
    m = Made()
    m.input("x", F32, 3)
    m.buffer("c", F32, 3, kind="constant")
    m.graph.constants["c"] = torch.tensor([1.0, 2.0, 3.0])
    m.buffer("out", F32, 3)
    (i,) = axes(3)
    m.graph.nodes = [ir.Pointwise("out", (i,), vs.call("add", load("x", i), load("c", i)))]
    assert m.run([torch.ones(3)], "out").tolist() == [2, 3, 4]


def test_float64_intermediates_do_not_round() -> None:
    m = Made()
    m.input("x", F32, 3)
    m.buffer("tiny", F32, 3)
    m.buffer("back", F32, 3)
    (i,) = axes(3)
    m.graph.nodes = [
        ir.Pointwise("tiny", (i,), vs.call("add", load("x", i), vs.const(2.0**-30, F32))),
        ir.Pointwise("back", (i,), vs.call("sub", load("tiny", i), load("x", i))),
    ]
    x = torch.ones(3)
    assert m.run([x], "back").tolist() == [0.0] * 3
    exact = m.run([x], "back", policy=EXACT)
    assert exact.dtype is F32
    assert exact.tolist() == [2.0**-30] * 3
