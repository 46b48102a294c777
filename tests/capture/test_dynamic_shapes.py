"""Symbolic sizes from capture to the host: one graph for many shapes, with the kernels that a static graph has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx.experimental._config
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F

from examples.gpt import GPT, TINY, random_batch
from kgen import backend, pipeline
from kgen.backend import kgen_backend
from kgen.cost import model
from kgen.counters import counters
from kgen.host import program as hp
from kgen.host.native import load
from kgen.ir import functions
from kgen.ir.plan import Schedule
from kgen.lowering import families
from tests.dynamic_cases import MORE_CALLS, MORE_KERNELS, SPECIALISED, Case, cases, inputs
from tests.opinfo.evaluated import Evaluated

stats = torch._dynamo.utils.counters


def leaves(tree: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(tree)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    dynamic = options.pop("dynamic", True)
    return torch.compile(function, backend=kgen_backend, dynamic=dynamic, fullgraph=True, options={"cache": False, **options})


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for a, e in zip(leaves(actual), leaves(expected), strict=True):
        assert type(a) is type(e)
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance * 10, equal_nan=True)
        if isinstance(e, Tensor):
            assert [n for n, size in zip(a.stride(), a.shape, strict=True) if size > 1] == [
                n for n, size in zip(e.stride(), e.shape, strict=True) if size > 1
            ]


def check_call(run: Callable[..., Any], case: Case, shapes: Sequence[tuple[int, ...]], tolerance: float = 1e-5) -> None:
    """Forward, and backward where the case wants it, against eager."""
    theirs = inputs(shapes, case.backward)
    ours = [x.detach().clone().requires_grad_(case.backward) for x in theirs]
    expected, actual = case.run(*theirs), run(*ours)
    assert_same(actual, expected, tolerance)
    if case.backward:
        for result in (expected, actual):
            sum(t.pow(2).sum() for t in leaves(result)).backward()
        assert_same([x.grad for x in ours], [x.grad for x in theirs], tolerance * 10)


# ---- every family, in the evaluator ------------------------------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Schedule]]:
    """The schedules of what is compiled, without g++. Fails when compiling adds a guard."""
    plans: list[Schedule] = []
    guards: list[int] = []

    def count_guards(work: Any, info: Any, _config: Any) -> Any:
        guards.append(len(info.shape_env.guards) if info.shape_env is not None else 0)
        return work

    def stop(work: Any, _info: Any, _config: Any) -> Evaluated:
        plans.append(work[1])
        return Evaluated(*work)

    stages = (count_guards, backend.replace_random, pipeline.reinplace, pipeline.lower, pipeline.schedule, count_guards, stop)
    monkeypatch.setattr(backend, "STAGES", stages)
    yield plans
    assert guards[::2] == guards[1::2]


def shape_of(plans: list[Schedule]) -> list[tuple[int, list[str]]]:
    return [(len(p.kernels), [str(c.node.target) for c in p.calls]) for p in plans]


@pytest.mark.every(4)
@pytest.mark.none
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_family(case: Case, planned: list[Schedule], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "vendor_seconds", lambda problem: 1.0)  # whether the library is faster is a matter of size
    check_call(compiled(case.run, dynamic=False, verify=True), case, case.shapes[0])
    static = shape_of(planned)
    planned.clear()
    torch._dynamo.reset()
    stats.clear()
    run = compiled(case.run, verify=True)
    for shapes in case.shapes:
        check_call(run, case, shapes)
    assert stats["stats"]["unique_graphs"] == (len(case.shapes) if case.name in SPECIALISED else 1)
    dynamic = shape_of(planned)[: len(static)]
    if case.name in MORE_KERNELS:
        assert [externs for _, externs in dynamic] == [externs for _, externs in static]
    elif case.name not in MORE_CALLS:
        assert dynamic == static


@pytest.mark.none
@pytest.mark.parametrize(
    ("name", "kernels"), [("softmax", 1), ("layer_norm", 1), ("cross_entropy", 2), ("chain", 1), ("add_transposed", 1)]
)
def test_kernel_counts(name: str, kernels: int, planned: list[Schedule]) -> None:
    case = next(c for c in cases() if c.name == name)
    with torch.no_grad():
        compiled(case.run)(*inputs(case.shapes[0]))
    assert len(planned[0].kernels) <= kernels


# Functions of tensors of 9 by 8 and 7 by 8 elements in which a length that is an expression happens to be 1.
ONES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "product": lambda x, y: x[:1] * torch.einsum("mk,mn->kn", y[:1], x[:1])[:, 5::3],
    "last": lambda x, y: x * x[:, 5::3],
    "first": lambda x, y: x[:, 5::3] * x,
    "rows": lambda x, y: y + x[::20],
    "expand": lambda x, y: x[:, 5::3].expand(-1, y.shape[0]) + 1,
    "copy": lambda x, y: x.clone().copy_(x[:, 5::3]),
    "in_place": lambda x, y: (x * 2).add_(x[:, 5::3]),
    "index_put": lambda x, y: x.index_put((torch.arange(3),), y[5::2]),
    "where": lambda x, y: torch.where(x > 0, x[:, 5::3], x),
    "masked_fill": lambda x, y: x.masked_fill(x[:, 5::3] > 0, 1.0),
    "softmax": lambda x, y: torch.softmax(x[:, 5::3] * x, 1),
    "mean": lambda x, y: (x[:, 5::3] * x).mean(),
    "squeeze": lambda x, y: x[:, 5::3].squeeze(1) * x[:, 1],
    "addmm": lambda x, y: torch.addmm(x[:, 5::3], x, y.t()),
    "view": lambda x, y: x.reshape(x.shape[1] // 8, -1) * torch.ones(4, 1),
    "diagonal": lambda x, y: y + x.diagonal(7),
    "unfold": lambda x, y: x.unfold(1, 6, 3) * x[:, :, None],
    "transposed": lambda x, y: x[:, 5::3].t() * y[:, :1],
    "gather": lambda x, y: x.gather(1, (x[:, 5::3] > 0).long()) * x,
    "indices": lambda x, y: x[(x[7::5] > 0).long(), torch.arange(x.shape[0])[:, None] % 8],
    "cumsum": lambda x, y: x[:, 5::3].cumsum(1) * x,
    "flip": lambda x, y: x[:, 5::3].flip(1) * x,
    "three": lambda x, y: x[None, :, :] * y[:, None, :] * x[:, 5::3],
    "returned": lambda x, y: (x[:, 5::3], x[:, 5::3] + 1, (x[:, 5::3] + 1).t(), x[:, 5::3].contiguous()),
}


@pytest.mark.every(5)
@pytest.mark.none
@pytest.mark.parametrize("name", ONES)
def test_lengths_that_happen_to_be_one(name: str, planned: list[Schedule]) -> None:
    """torch asks whether the length is 1, and repeats what has it: under that guard it is a number."""
    x, y = inputs(((9, 8), (7, 8)), False)
    assert_same(compiled(ONES[name], verify=True)(x, y), ONES[name](x, y))


@pytest.mark.none
def test_rules_give_the_lengths_of_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """A symbol is not taken for another one's length."""
    monkeypatch.setitem(families.RULES, "aten.permute", lambda b, x, dims: x)
    with pytest.raises(BackendCompilerFailed, match=r"aten\.permute\.default failed: the rule gives"):
        compiled(lambda x: x.permute(1, 0) + 1)(torch.randn(5, 7))


# ---- native code -------------------------------------------------------------------------------------------------------


def _groups() -> list[list[Case]]:
    """Cases to compile as one function: a translation unit each would take minutes."""
    plain = [c for c in cases() if c.name not in SPECIALISED and not c.backward]
    trained = [c for c in cases() if c.name not in SPECIALISED and c.backward]
    return [plain[k::3] for k in range(3)] + [trained[k::2] for k in range(2)]


@pytest.mark.every(2)
@pytest.mark.cpu
@pytest.mark.parametrize("group", _groups(), ids=lambda group: group[0].name)
def test_native(group: list[Case]) -> None:
    def together(*xs: Tensor) -> list[Any]:
        rest = iter(xs)
        return [c.run(*itertools.islice(rest, len(c.shapes[0]))) for c in group]

    both = [tuple(itertools.chain.from_iterable(c.shapes[k] for c in group)) for k in range(2)]
    whole = Case("group", together, tuple(both), group[0].backward)
    stats.clear()
    run = compiled(together)
    with torch.fx.experimental._config.patch(use_duck_shape=False):  # or sizes that happen to be equal become one symbol
        for shapes in both:
            check_call(run, whole, shapes, 1e-4)
    assert stats["stats"]["unique_graphs"] == 1


@pytest.mark.slow  # the demo's test does the same
@pytest.mark.cpu
def test_gpt_at_nine_sizes_compiles_twice() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    # the second call changes both sizes: Dynamo makes dynamic what it has seen change
    sizes = [(2, 32), (3, 17), *itertools.product((2, 3, 5), (32, 17, 24))]
    stats.clear()
    run = torch.compile(model, backend=kgen_backend, fullgraph=True, options={"cache": False})
    for batch, sequence in sizes:
        ids, targets = random_batch(TINY, "cpu", batch, sequence)
        results = []
        for call in (model, run):
            model.zero_grad()
            loss = call(ids, targets)
            loss.backward()
            results.append([loss, *(p.grad.clone() for p in model.parameters())])
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert stats["stats"]["unique_graphs"] == 2


@pytest.mark.cpu
def test_scores_of_vectors_of_any_length() -> None:
    """The sizes of scores are numbers, the length of what makes them is not: to compare both would guard on the answer."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).softmax(-1)

    stats.clear()
    run = torch.compile(f, backend=kgen_backend, dynamic=None, options={"cache": False})
    for n in (3, 4, 8, 17, 64):
        x, w = (torch.randn(*shape, requires_grad=True) for shape in ((6, n), (n, 9)))
        assert_same(torch.autograd.grad(run(x, w).pow(2).sum(), (x, w)), torch.autograd.grad(f(x, w).pow(2).sum(), (x, w)))
    assert stats["stats"]["unique_graphs"] == 2


# ---- numbers computed from sizes ---------------------------------------------------------------------------------------


@pytest.mark.cpu
def test_float_argument_of_a_library_call() -> None:
    def f(x: Tensor) -> tuple[Any, ...]:
        return torch.clamp(x, -0.1 * x.shape[0], x.shape[1] / 4), x.shape[0] * 0.5, x.shape[0] > 3, x.shape[1] // 2

    stats.clear()
    run = compiled(f, fallback="aten.clamp")
    for shape in ((5, 7), (2, 4)):
        x = torch.randn(shape)
        assert_same(run(x), f(x))
    assert stats["stats"]["unique_graphs"] == 1
    assert counters["extern.aten.clamp.default"]


@pytest.mark.cpu
def test_a_number_that_tracing_takes_as_it_is(tmp_path: Path) -> None:
    """One use of a float is a tensor's, another one a constant: AOTAutograd's cache took the graph of another constant."""

    def f(x: Tensor, n: float) -> tuple[Tensor, Tensor]:
        return x * n, torch.full((2,), n)

    run = torch.compile(f, backend="kgen", dynamic=True, options={"cache_dir": str(tmp_path)})
    for n in (3.5, 5.0, -2.25):
        assert_same(run(torch.ones(4), n), f(torch.ones(4), n))


@pytest.mark.cpu
@torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
def test_data_dependent_sizes_and_numbers() -> None:
    def f(x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        where = torch.nonzero(x > 0)
        count = n.item()
        torch._check(count >= 0)
        return (
            where * 2 + where.shape[0],
            torch.masked_select(x, x > 0).sin().sum(),
            torch.zeros(count) + count,
            x * x.sum().item(),
            torch.clamp(x, max=x.amax().item() * 0.5),
        )

    run = compiled(f)
    for size, count in ((17, 3), (9, 0)):
        x, n = torch.randn(size), torch.tensor(count)
        assert_same(run(x, n), f(x, n))


@pytest.mark.cpu
def test_generated_random_numbers_have_dynamic_sizes() -> None:
    run = compiled(lambda x: F.dropout(torch.ones_like(x), 0.5))
    for shape in ((50, 40), (30, 70)):
        dropped = run(torch.ones(shape))
        assert dropped.shape == shape
        assert 0.4 < (dropped == 0).float().mean() < 0.6


@pytest.mark.cpu
def test_host_computes_every_function_as_the_reference_does() -> None:
    integers = {"ftrunc", "ffloor", "fceil", "fround", "flt", "fle", "feq"}
    registers = [functions.float_bits(0.625), functions.float_bits(2.5), 7]
    wanted, computes, outputs = [], [], []
    for fn in sorted(functions.FLOAT_FUNCTIONS):
        first = 2 if fn == "float" else 0
        result = functions.evaluate_function(fn, [registers[first], registers[1]])
        wanted.append(result if fn in integers else functions.float_of(result))
        computes.append(hp.Compute(len(registers), fn, first, 1 if fn in functions.BINARY_FLOAT_FUNCTIONS else first))
        outputs.append(hp.OutInt(len(registers), "int" if fn in integers else "float"))
        registers.append(0)
    found = load(hp.Program((), tuple(registers), (), (), tuple(outputs), computes=tuple(computes)))([])
    assert found == pytest.approx(wanted, rel=1e-15)


# ---- the cache of whole graphs -----------------------------------------------------------------------------------------


@pytest.mark.cpu
def test_cached_graph_serves_other_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # where AOTAutograd keeps its entries, ours too

    def f(x: Tensor) -> Tensor:
        return torch.softmax(x.reshape(-1, x.shape[0] * 2) + 1, 1)

    def call(*shape: int) -> tuple[int, int]:
        """(hits, graphs lowered) of a process that starts with this size."""
        torch._dynamo.reset()
        before = counters["aot_cache_hit"], counters["lowered"]
        x = torch.randn(shape)
        assert_same(torch.compile(f, backend=kgen_backend, dynamic=True)(x), f(x))
        return counters["aot_cache_hit"] - before[0], counters["lowered"] - before[1]

    assert call(6, 8) == (0, 1)
    assert call(6, 8) == (1, 0)
    assert call(10, 16) == (1, 0)  # another size under the same guards
    assert call(6, 2) == (0, 1)  # the rows of the result are one: a guard of the first graph fails
    assert call(10, 16) == (1, 0)


def _numbers_of_sizes(x: Tensor) -> tuple[Any, ...]:
    n, m = x.shape
    return (
        x * round(n / 2 * 123.4567, 1), x + round(m / 7, 3), torch.add(x, x, alpha=round(n / 3, 1)),
        x + n % -4, x + n // -4, x + n % (3 - m), x + n // (3 - m), x * (n * 0.5 % 2), x * abs(3 - n), x * abs(3.5 - n),
        x * math.asinh(n), round(m / 7, 2), x.new_zeros(abs(n - m) + 1),
    )  # fmt: skip


@pytest.mark.cpu
def test_functions_of_sizes_are_pythons() -> None:
    run = torch.compile(_numbers_of_sizes, backend=kgen_backend, dynamic=True)
    for shape in ((9, 7), (11, 6), (14, 30)):
        x = torch.randn(shape)
        assert_same(run(x), _numbers_of_sizes(x))


@pytest.mark.cpu
def test_decimals_are_rounded_as_python_rounds() -> None:
    cases = [
        (2.675, 2), (0.5, 0), (1.5, 0), (25.0, -1), (35.0, -1), (-25.0, -1), (1e300, 3), (1234.5, -5), (6000.0, -4), (0.15, 1),
        (-0.04, 1), (5e-324, 323), (math.inf, 2), (123456789.123456, 4),
    ]  # fmt: skip
    registers = [functions.float_bits(float(number)) for case in cases for number in case] + [0] * len(cases)
    made = range(2 * len(cases), 3 * len(cases))
    computes = tuple(hp.Compute(out, "frounddec", 2 * k, 2 * k + 1) for k, out in enumerate(made))
    outputs = tuple(hp.OutInt(out, "float") for out in made)
    assert load(hp.Program((), tuple(registers), (), (), outputs, computes=computes))([]) == [round(*case) for case in cases]


# ---- layouts ------------------------------------------------------------------------------------------------------------


def test_result_keeps_gaps_that_only_run_time_knows() -> None:
    def on_diagonal(x: Tensor) -> Tensor:
        return x.diagonal_scatter(x.diagonal() * 2)

    run = compiled(on_diagonal)
    for shape in [(2, 3, 5), (4, 6, 7)]:
        x = torch.randn(shape)[..., 1:4]
        assert_same(run(x), on_diagonal(x))
    graphs = stats["stats"]["unique_graphs"]
    other = torch.randn(3, 4, 9)[..., 1:5]
    assert_same(run(other), on_diagonal(other))
    assert stats["stats"]["unique_graphs"] == graphs
    overlapping = torch.randn(40).as_strided((2, 3, 3), (6, 2, 1))
    torch.testing.assert_close(run(overlapping)[0, 1], overlapping[0, 1])  # a guard keeps it from the graph with gaps
    assert stats["stats"]["unique_graphs"] == graphs + 1


@pytest.mark.cpu
def test_views_of_a_result_whose_size_gets_a_closer_range_meanwhile() -> None:
    """Asking torch for strides adds guards while kgen lowers. A size is the same one before and after them."""
    image = torch.randn(2, 4, 14, 11)[:, 1:, 1:, 1::2]
    weight, bias, residual = torch.randn(9, 1, 5, 3), torch.randn(9), torch.randn(2, 9, 11, 3)

    def views(image: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> tuple[Tensor, ...]:
        y = F.conv2d(image, weight, bias, padding=(1, 0), groups=3) + residual
        return y[:, ::2], y[..., -1], y

    for given in (bias, None):
        actual = compiled(views, strict=True)(image, weight, given, residual)
        assert_same(actual, views(image, weight, given, residual))
        assert len({tensor.untyped_storage().data_ptr() for tensor in actual}) == 1
        torch._dynamo.reset()


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["addmm", "baddbmm"])
def test_numbers_that_scale_a_matmul_are_symbols(name: str) -> None:
    """One graph serves all of them. Eager does not read what it would multiply by 0."""
    lead = (2,) if name == "baddbmm" else ()
    bias, x, y = torch.randn(*lead, 4, 5), torch.randn(*lead, 4, 3), torch.randn(*lead, 3, 5)
    function = getattr(torch, name)
    compiled = torch.compile(function, backend="kgen", fullgraph=True, dynamic=True)
    for alpha, beta in ((2, 3), (5, 7), (4, 0), (0.5, 2.5)):
        added = torch.full_like(bias, torch.nan) if beta == 0 else bias
        wanted = function(added, x, y, alpha=alpha, beta=beta)
        torch.testing.assert_close(compiled(added, x, y, alpha=alpha, beta=beta), wanted)
