"""Every entry of the op table: traced as AOTAutograd traces it, lowered, evaluated on the IR, and compared with eager."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._functorch.aot_autograd import aot_function

from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.verify import verify
from kgen.lowering import LoweringContext, lower
from kgen.reference.evaluate import evaluate_graph
from tests.op_table import TABLE, Args, Case, Entry, assert_agrees, cases, f32, i64
from tests.slow import slow_but

OUR_TABLE = "kgen"


def decompositions(kind: str) -> dict[Any, Any]:
    """What the operators are taken apart with: torch's core set, kgen's own table, or nothing (native rules only)."""
    if kind == "core":
        return torch._decomp.core_aten_decompositions()
    if kind == "none":
        return {}
    from kgen.capture.decompositions import TABLE

    return TABLE


def lowered(fn: Callable[..., Any], kind: str, graphs: list[ir.Graph], dynamic: bool = False) -> Callable[..., Any]:
    """`fn` traced on its first arguments, lowered, and run by the evaluator; the graph is appended to `graphs`."""

    def compile_graph(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        placeholders = [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
        env = next((v.fake_mode.shape_env for v in placeholders if hasattr(v, "fake_mode")), None)
        graph = verify(lower(gm, LoweringContext(shape_env=env)), "lower")
        graphs.append(graph)
        return lambda *args: evaluate_graph(graph, args)

    options: dict[str, Any] = {
        "decompositions": decompositions(kind),
        "keep_inference_input_mutations": True,
        "dynamic": dynamic,
    }
    return aot_function(fn, compile_graph, **options)


def externs(graph: ir.Graph) -> list[str]:
    return [str(n.target) for n in graph.nodes if isinstance(n, ir.Extern)]


def check(case: Case, kind: str = OUR_TABLE, dynamic: bool = False) -> None:
    """All samples in one graph: tracing takes longer than everything else."""
    samples, graphs = case.samples(), []

    def every(*inputs: Args) -> list[Any]:
        return [case.fn(*args) for args in inputs]

    with torch.no_grad():
        results = lowered(every, kind, graphs, dynamic)(*samples)
        for args, got in zip(samples, results, strict=True):
            assert_agrees(case.fn, args, got, case.fn(*args), case.entry.tolerance)
    if not case.entry.extern:
        found = [name for graph in graphs for name in externs(graph)]
        assert found == [], f"externs: {found}"


# A type of each kind, and the first one of an operator that admits none of these. Native kernels are tried in each type.
TELLING = {f32, torch.bfloat16, i64, torch.bool}


def _telling(case: Case) -> bool:
    return case.dtype in TELLING or not TELLING & {*case.entry.dtypes}


@pytest.mark.parametrize("case", slow_but(_telling, cases(TABLE)), ids=str)
def test_agrees_with_eager(case: Case) -> None:
    check(case)


def _named(names: str) -> list[Case]:
    return [c for c in cases(TABLE, dtypes=(f32,)) if c.entry.name in names.split()]


# Composite operators with a rule of ours, which a decomposition table may hide.
NATIVE = (
    "gelu gelu_tanh silu mish elu leaky_relu hardtanh hardsigmoid hardswish softplus softshrink hardshrink threshold prelu"
    " softmax softmax_first softmax_to_float log_softmax layer_norm layer_norm_plain group_norm rms_norm batch_norm"
    " batch_norm_training instance_norm tril eye linspace arange full fmax fmin lerp addcmul addcdiv sinc entr ndtr logit xlogy"
    " xlog1py logaddexp logaddexp2 heaviside nan_to_num float_power ldexp ldexp_whole var_mean_last std_all logsumexp aminmax"
    " nansum_all norm_3_last count_nonzero_last floor_divide clamp_tensor where masked_fill isfinite isposinf"
)


@pytest.mark.every(3)
@pytest.mark.parametrize("case", _named(NATIVE), ids=str)
def test_native_rules_agree_with_eager(case: Case) -> None:
    check(case, "none")


DYNAMIC = "add where sum_last var_all softmax layer_norm rms_norm batch_norm_training cumsum argmax_all arange tril"


@pytest.mark.parametrize("case", _named(DYNAMIC), ids=str)
def test_symbolic_sizes(case: Case) -> None:
    check(case, dynamic=True)


@pytest.mark.every(3)
@pytest.mark.parametrize("case", _named(DYNAMIC + " group_norm"), ids=str)
def test_symbolic_sizes_in_native_rules(case: Case) -> None:
    check(case, "none", dynamic=True)


def test_one_exponential_in_softmax() -> None:
    """The native rule stores exp(x - max) for the sum and the quotient."""
    graphs: list[ir.Graph] = []
    with torch.no_grad():
        lowered(lambda x: x.softmax(-1), "none", graphs)(torch.randn(3, 5))
    assert sum(v.op == "exp" for n in graphs[0].nodes for v in _values(n)) == 1


def _values(node: ir.Node) -> list[Any]:
    from kgen.ir.values import topological

    return topological(ir.roots(node))


def test_mean_divides_after_the_sum() -> None:
    x = torch.full((1, 3000), 1e36)
    graphs: list[ir.Graph] = []
    with torch.no_grad():
        assert torch.equal(lowered(lambda x: x.mean(-1), "kgen", graphs)(x), x.mean(-1))


def test_16_bit_sum_accumulates_in_float32() -> None:
    x = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    with torch.no_grad():
        assert lowered(lambda x: x.sum(-1), "kgen", [])(x).item() == 4096


def test_refused_arguments_become_externs() -> None:
    entry = Entry("nextafter_narrow", torch.nextafter, lambda m: [(m(3), m(3))], (torch.bfloat16,), extern=True)
    graphs: list[ir.Graph] = []
    with torch.no_grad():
        args = next(iter(cases([entry]))).samples()[0]
        torch.testing.assert_close(lowered(entry.fn, "kgen", graphs)(*args), entry.fn(*args))
    assert externs(graphs[0]) == ["aten.nextafter.default"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_exponents_may_be_larger_than_those_of_a_power(dtype: torch.dtype) -> None:
    """2^130 is no float32 number, and 1e-30 times as much is; the result has the type of what is scaled."""
    most = torch.finfo(dtype).max
    x = torch.tensor([1 / most, most, 1.0, -0.0, math.nan, math.inf], dtype=dtype).repeat(5, 1)
    exponents = torch.tensor([0, 5, 20, 130, 2000])
    with torch.no_grad():
        for exponent in (exponents, -exponents.to(torch.int32)):
            expected = torch.ldexp(x, exponent[:, None])
            got = lowered(torch.ldexp, "kgen", [])(x, exponent[:, None])
            torch.testing.assert_close(got, expected, rtol=0, atol=torch.finfo(dtype).tiny, equal_nan=True)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("sizes", [(3,), ()])
@pytest.mark.parametrize("exponent", [torch.bfloat16, torch.float32, torch.float64])
def test_float_exponents_without_dimensions_are_as_wide_as_what_they_scale(
    exponent: torch.dtype, sizes: tuple[int, ...], wide: bool
) -> None:
    """One of 0 dimensions has no say in the type, so that the power must not be rounded to that of the exponent."""
    x = torch.full(sizes, 1.7, dtype=torch.float64 if wide else torch.float32)
    by = torch.tensor(0.3, dtype=exponent)
    expected = torch.ldexp(x, by)
    with torch.no_grad():
        got = lowered(torch.ldexp, "kgen", [])(x, by)
    torch.testing.assert_close(got, expected, rtol=1e-14 if wide else 4e-3, atol=0)


def test_whole_numbers_times_a_power_have_the_type_that_tracing_says() -> None:
    x, by = torch.arange(5), torch.tensor(0.3, dtype=torch.bfloat16)
    with torch.no_grad():
        got = lowered(torch.ldexp, "kgen", [])(x, by)
    torch.testing.assert_close(got, torch.ldexp(x, by), rtol=4e-3, atol=0, check_dtype=False)


@pytest.mark.parametrize(("sizes", "traced"), [((1,), (1,)), ((5, 1), (5, 1)), ((1, 5, 1), (1, 5, 1)), ((4, 1), (1, 4, 1))])
def test_sizes_of_one_are_as_tracing_has_them(sizes: tuple[int, ...], traced: tuple[int, ...]) -> None:
    """Torch 2.11 traces a norm along a dimension of size 1, counted from the end, as if that dimension stayed."""
    x = torch.randn(sizes)
    graph = torch.fx.symbolic_trace(lambda x: torch.ops.aten.linalg_vector_norm.default(x, 1, [-1]) + 1).graph
    [placeholder, norm, added] = list(graph.nodes)[:3]
    placeholder.meta["val"], norm.meta["val"], added.meta["val"] = x, torch.empty(traced), torch.empty(traced)
    added.target = torch.ops.aten.add.Tensor
    made = lower(torch.fx.GraphModule({}, graph), LoweringContext(shape_env=None))
    [got] = evaluate_graph(verify(made, "lower"), [x])
    assert torch.equal(got, x.abs().reshape(traced) + 1)


def test_integers_wrap() -> None:
    x = torch.tensor([2**62, 3, -5], dtype=i64)
    with torch.no_grad():
        assert torch.equal(lowered(lambda x: x**3 + x * x, "kgen", [])(x), x**3 + x * x)


@pytest.mark.parametrize("order", [3, 0.5])
def test_a_norm_takes_powers_as_they_are_cheapest(order: float) -> None:
    """A power of any exponent takes a hundred operations for each element, a cube two."""
    graphs: list[ir.Graph] = []
    x = torch.randn(7, 40)
    with torch.no_grad():
        found = lowered(lambda x: torch.linalg.vector_norm(x, order, 1), "kgen", graphs)(x)
    torch.testing.assert_close(found, torch.linalg.vector_norm(x, order, 1))
    [reduction] = [node for node in graphs[0].nodes if isinstance(node, ir.Reduction)]
    assert not any(value.op == "pow" for value in vs.topological([reduction.value]))


@pytest.mark.parametrize("exponent", range(4, 9))
def test_small_whole_powers_are_multiplications(exponent: int) -> None:
    """Each may be off by half a unit in the last place, and a power of any exponent takes sixty operations."""
    x = torch.cat([torch.randn(400) * 3, torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-30, 1e30])])
    graphs: list[ir.Graph] = []
    with torch.no_grad():
        got = lowered(lambda x: x**exponent, "kgen", graphs)(x)
    [node] = [node for node in graphs[0].nodes if isinstance(node, ir.Pointwise)]
    assert {value.op for value in vs.topological([node.value])} == {"load", "mul"}
    torch.testing.assert_close(got, (x.double() ** exponent).float(), rtol=exponent / 2 * 2**-23, atol=1e-37, equal_nan=True)


def test_numbers_that_vmap_converts() -> None:
    """In a vmap of a vmap, torch converts the numbers of the program as if they were tensors."""
    graphs: list[ir.Graph] = []
    x = torch.randn(6, 4)
    function = torch.vmap(torch.vmap(lambda s: s * 2 + s.sin() / 3.5), in_dims=1)
    with torch.no_grad():
        torch.testing.assert_close(lowered(function, "kgen", graphs)(x), function(x))
    assert all(isinstance(node, ir.Pointwise) for node in graphs[0].nodes)
