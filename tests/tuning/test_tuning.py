"""max-autotune: which candidates are measured, what is kept of it, and that a look-up decides as the measurement did."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen import pipeline
from kgen.build import cpp
from kgen.config import Config
from kgen.cost import model
from kgen.cost.tuning_query import APART, TuningQuery
from kgen.counters import counters
from kgen.errors import KernelBuildFailed
from kgen.host.compiled import Blueprint
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.plan import ComboKernel, Kernel, members
from kgen.ir.verify import verify
from kgen.only import only
from kgen.report.record import Record, recording
from kgen.scheduler import Options, contraction_of
from kgen.scheduler.selection.choose import problems
from kgen.scheduler.transforms.operand_padding import possible_copies
from kgen.scheduler.transforms.subgraph_extraction import extract_subgraph
from kgen.tuning import measure as measuring
from kgen.tuning import tuner
from kgen.tuning.problem_keys import keys_of
from kgen.tuning.store import TuningFile
from kgen.tuning.tuner import candidates_of
from kgen.verdict import Outcome, Reason
from tests.kernels import plans

pytestmark = pytest.mark.cpu


def r(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


ARGS = (r(64, 96), r(128, 96), r(128))


def compiled(
    f: Callable[..., Any], *args: Tensor, file: Path, mode: str = "max-autotune-no-cudagraphs", error: float = 1e-4, **more: Any
) -> Record:
    """Compiles and checks; what became of it."""
    torch._dynamo.reset()
    options = {"mode": mode, "cache": False, "tuning_file": str(file), "tuning_seconds": 600, **more}
    with recording() as seen, torch.no_grad():
        torch.testing.assert_close(torch.compile(f, backend="kgen", options=options)(*args), f(*args), rtol=error, atol=error)
    (graph,) = seen.graphs
    assert isinstance(graph, Record)
    return graph


def measured() -> int:
    return counters.snapshot().get("tuning.measured", 0)


# ---- from measuring to a look-up --------------------------------------------------------------------------------------


def test_measured_once_then_looked_up(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = measured()
    first = compiled(layer, *ARGS, file=file)
    assert measured() >= before + 3
    (entry,) = TuningFile(file).entries()
    assert entry.measured >= 3
    assert entry.seconds > 0
    assert not math.isnan(entry.library_seconds)
    assert "gelu" in entry.key.title
    printed = capsys.readouterr().err
    assert "candidates" in printed
    assert "us of" in printed

    before = measured()
    for mode in ("max-autotune-no-cudagraphs", "default"):
        again = compiled(layer, *ARGS, file=file, mode=mode)
        assert again.units.sources == first.units.sources
    assert measured() == before
    assert "candidates" not in capsys.readouterr().err


def test_what_the_file_says_is_what_runs(file: Path) -> None:
    """Whatever the cost model thinks of it."""
    compiled(layer, *ARGS, file=file)
    contents = json.loads(file.read_text())
    row = contents["entries"][0]
    for template, config in (
        ("cpp_matmul", {"ROWS": 48, "BLOCK_M": 48, "BLOCK_N": 64, "SPLIT_K": 1, "FEW_ROWS": 0}),
        (None, {}),
    ):
        version = row["version"] if (template is None) == (row["template"] is None) else tuner._versions("cpu")[template or ""]
        row |= {"template": template, "config": config, "version": version}
        file.write_text(json.dumps(contents))
        plan = compiled(layer, *ARGS, file=file, mode="default").plan
        choices = [k.choice for k in plan.kernels if isinstance(k, Kernel) and k.choice]
        if template is None:
            assert not choices
            assert Reason.VENDOR_MEASURED in {v.reason for v in plan.verdicts if v.outcome is Outcome.EXTERN}
        else:
            assert dict(choices[0].config) == config


def test_default_mode_never_measures(file: Path) -> None:
    before = measured()
    compiled(layer, *ARGS, file=file, mode="default")
    assert measured() == before
    assert not file.exists()


def test_no_time_no_measurement(file: Path) -> None:
    before = measured()
    compiled(layer, *ARGS, file=file, tuning_seconds=0)
    assert measured() == before


def test_equal_layers_are_measured_once(file: Path) -> None:
    def two_layers(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
        return layer(layer(x, w, b), v, c)

    square = (r(64, 96), r(96, 96), r(96), r(96, 96) * 2, r(96) * 2)
    compiled(two_layers, *square, file=file)
    assert len(TuningFile(file).entries()) == 1


def projections(x: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, w, b) for w, b in zip(more[:3], more[3:], strict=True))


QKV = (r(70, 50), r(96, 50), r(32, 50), r(32, 50) * 2, r(96), r(32), r(32) * 2)


def test_matmuls_that_share_an_operand_are_measured_together_and_apart(file: Path) -> None:
    def run(mode: str) -> tuple[int, bool]:
        torch._dynamo.reset()
        options = {"mode": mode, "cache": False, "tuning_file": str(file), "tuning_seconds": 600}
        with recording() as seen, torch.no_grad():
            got = torch.compile(projections, backend="kgen", options=options)(*QKV)
        for one, other in zip(got, projections(*QKV), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        (graph,) = seen.graphs
        assert isinstance(graph, Record)
        return len(graph.plan.steps), any(isinstance(step, ComboKernel) for step in graph.plan.steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "grouped_seconds", lambda *_: 1e-9)  # so that they are joined at first
        patch.setattr(model, "vendor_seconds", lambda problem: 1e9)  # and no estimate leaves those apart to the library
        run("max-autotune-no-cudagraphs")
        grouped = next(e for e in TuningFile(file).entries() if "m2" in dict(e.key.sizes))
        assert grouped.measured >= 3
        for winner, expected in ((APART, (3, False)), (None, (3, False)), ("cpp_matmul", (1, True))):
            contents = json.loads(file.read_text())
            row = next(row for row in contents["entries"] if row and "m2" in row["sizes"])
            contents["entries"] = [row]  # what was measured of each alone depends on which way was faster
            if winner == "cpp_matmul":
                config = {"ROWS": 96, "BLOCK_M": 96, "BLOCK_N": 32, "SPLIT_K": 1, "FEW_ROWS": 0}
            row |= {
                "template": winner,
                "config": config if winner == "cpp_matmul" else {},
                "version": tuner._versions("cpu")[winner or ""],
            }
            file.write_text(json.dumps(contents))
            assert run("default") == expected


# ---- candidates that are no good --------------------------------------------------------------------------------------


@contextmanager
def cooking(**changes: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Tuners made inside have other functions to compile candidates, made of those that they would have had."""

    class Other(tuner.Tuner):
        def __init__(self, config: Config, compiler: tuner.CandidateCompiler) -> None:
            new = {name: change(getattr(compiler, name)) for name, change in changes.items()}
            super().__init__(config, replace(compiler, **new))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "Tuner", Other)
        yield


def dropped(graph: Record) -> dict[str, Reason]:
    return {v.consumer: v.reason for v in graph.plan.verdicts if v.outcome is Outcome.DROPPED}


def test_candidates_that_do_not_compile_are_dropped(file: Path) -> None:
    def broken(build: Callable[..., Any]) -> Callable[..., Any]:
        count = itertools.count()

        def building(blueprint: Blueprint) -> object:
            if next(count) == 2:
                raise KernelBuildFailed(kernel="x", source="x", how="exit 1", output="no", command="g++")
            return build(blueprint)

        return building

    with cooking(build=broken):
        graph = compiled(layer, *ARGS, file=file)
    assert list(dropped(graph).values()) == [Reason.NOT_COMPILED]
    assert len(TuningFile(file).entries()) == 1


def test_a_template_with_wrong_results_does_not_win(file: Path) -> None:
    def lying(make: Callable[..., Any]) -> Callable[..., Any]:
        def making(part: ir.Graph, only: Any, *more: Any) -> Any:
            return make(part if only is None else replace(part, nodes=[half_more(n) for n in part.nodes]), only, *more)

        return making

    def half_more(node: ir.Node) -> ir.Node:
        if not isinstance(node, ir.Pointwise):
            return node
        return replace(node, value=vs.call("mul", node.value, vs.const(1.5, node.value.dtype)))

    with cooking(make=lying):
        graph = compiled(layer, *ARGS, file=file)
    assert set(dropped(graph).values()) == {Reason.WRONG_RESULT}
    (entry,) = TuningFile(file).entries()
    assert (entry.template, entry.measured) == (None, 1)


def narrow_linear(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(F.linear(x, w))


def wide_linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).float()


def normalised_sum(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(F.linear(x, w) + 1, (w.shape[0],))


WIDE = (r(64, 96, dtype=torch.bfloat16), r(128, 96, dtype=torch.bfloat16))


@pytest.mark.parametrize("f", [wide_linear, normalised_sum])
def test_what_only_the_library_rounds_is_no_mistake(f: Callable[..., Any], file: Path) -> None:
    graph = compiled(f, *WIDE, file=file, error=0.1)
    assert dropped(graph) == {}
    (entry,) = TuningFile(file).entries()
    assert entry.measured > 1


def off_in_a_part(node: ir.Pointwise) -> vs.Value:
    """8% in an eighth of the columns."""
    return vs.where(few(node.vars[1], 16), vs.call("mul", node.value, vs.const(1.08, torch.float32)), node.value)


def off_by_a_tile(node: ir.Pointwise) -> vs.Value:
    """Sixteen rows have the results of the sixteen after them."""
    moved = vs.substitute(node.value, {node.vars[0]: node.vars[0].expr() + 16})
    return vs.where(few(node.vars[0], 16), moved, node.value)


def nothing_in_a_tile(node: ir.Pointwise) -> vs.Value:
    return vs.where(vs.call("and", *(few(v, 16) for v in node.vars)), vs.const(0.0, torch.float32), node.value)


def few(loop: ix.Var, count: int) -> vs.Value:
    return vs.compare("lt", loop.expr(), ix.constant(count))


MISTAKES = [
    (narrow_linear, off_in_a_part),
    (wide_linear, off_in_a_part),
    (wide_linear, off_by_a_tile),
    (wide_linear, nothing_in_a_tile),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(("f", "mistake"), MISTAKES)
def test_a_mistake_in_some_elements_is_seen(
    f: Callable[..., Any], mistake: Callable[[ir.Pointwise], vs.Value], file: Path
) -> None:
    def lying(make: Callable[..., Any]) -> Callable[..., Any]:
        def making(part: ir.Graph, only: Any, *more: Any) -> Any:
            nodes = [replace(n, value=mistake(n)) if only and isinstance(n, ir.Pointwise) else n for n in part.nodes]
            return make(replace(part, nodes=nodes), only, *more)

        return making

    with cooking(make=lying):
        graph = compiled(f, *WIDE, file=file, error=0.1)
    assert set(dropped(graph).values()) == {Reason.WRONG_RESULT}
    (entry,) = TuningFile(file).entries()
    assert (entry.template, entry.measured) == (None, 1)


def test_a_template_that_raises_is_dropped(file: Path) -> None:
    def raising(make: Callable[..., Any]) -> Callable[..., Any]:
        def making(part: ir.Graph, only: Any, *more: Any) -> Any:
            if only is not None:
                raise ZeroDivisionError("an author's mistake")
            return make(part, only, *more)

        return making

    with cooking(make=raising):
        graph = compiled(layer, *ARGS, file=file)
    assert set(dropped(graph).values()) == {Reason.FAILED}


def test_candidates_that_end_their_process_or_do_not_end_are_dropped(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(asked: measuring.BenchmarkJob, _: Any) -> measuring.Outcome:
        others = [n for n in asked.candidates if n != asked.reference]
        failures = {n: measuring.Failure(("crashed", "hung")[n % 2]) for n in others}
        return measuring.Outcome({asked.reference: 1e-6}, failures)

    monkeypatch.setattr(tuner, "measure", lost)
    with cooking(build=lambda _: lambda blueprint: None):
        graph = compiled(layer, *ARGS, file=file)
    assert set(dropped(graph).values()) == {Reason.CRASHED, Reason.HUNG}


def test_what_every_graph_loads_is_built_before_measuring(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that measures would wait for it, and be taken for hung on a busy machine."""
    seen: list[str] = []

    def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (seen.append(name), real(*args))[1]

    monkeypatch.setattr(cpp, "prepare", lambda **_: None)
    monkeypatch.setattr(cpp, "runtime_library", noting("runtime", cpp.runtime_library))
    monkeypatch.setattr(tuner, "measure", noting("measure", tuner.measure))
    compiled(layer, *ARGS, file=file)
    assert "measure" in seen[1:]
    assert seen[0] == "runtime"


# ---- candidates -------------------------------------------------------------------------------------------------------


GPU = Options(gpu_everywhere=True)


def question(f: Callable[..., Any], *args: Tensor, options: Options = GPU) -> tuple[TuningQuery, ir.Graph]:
    """The first matmul's, as a GPU that is not here would be asked about it, or this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "vendor_seconds", lambda problem: math.inf)
        plan = plans(f, *args, options=options).forward
    kernel = next(k for step in plan.kernels for k in members(step) if k.contracts)
    found, _ = problems(kernel, plan.graph, options.device(plan.graph, contraction_of(kernel)), None)
    return TuningQuery(kernel, [[p] for p in found]), plan.graph


def test_at_least_eight_candidates_and_the_library() -> None:
    found = candidates_of(question(layer, r(512, 1024, dtype=torch.bfloat16), r(4096, 1024).bfloat16(), r(4096).bfloat16())[0])
    assert found[0].template is None
    assert len(found) >= 9
    assert len(set(found)) == len(found)
    assert {c.template for c in found[1:]} >= {"triton_matmul_persistent", "triton_matmul_tiles"}


def test_sums_in_parts_are_candidates() -> None:
    asked, _ = question(lambda x, w: F.relu(x @ w), r(64, 8192).bfloat16(), r(8192, 64).bfloat16())
    found = candidates_of(replace(asked, parts={16: 128 * 128}))
    assert {c.parts for c in found} == {1, 16}


def test_copies_of_operands_are_candidates() -> None:
    args = [torch.empty(size, dtype=torch.bfloat16) for size in ((4096, 1001), (1001, 4099))]
    asked, graph = question(lambda x, w: F.relu(x @ w), *args, options=replace(GPU, copies=False))
    possible = possible_copies(asked.step, graph, asked.problems[0][0].device)
    assert set(possible) == {"left", "right", "both"}
    asked = replace(asked, find_copies=lambda: {name: (one.seconds, one.problems) for name, one in possible.items()})
    found = candidates_of(asked)
    assert {c.copies for c in found} == {"", *asked.copies}
    assert {c.only().copies for c in found if c.copies} == set(asked.copies)  # type: ignore[union-attr]
    assert all(c.copies in str(c) for c in found)
    assert {c.copies for c in candidates_of(asked, stable=True)} == {""}


def test_hopeless_candidates_are_not_measured() -> None:
    asked, _ = question(layer, r(4096, 1024).bfloat16(), r(4096, 1024).bfloat16(), r(4096).bfloat16())
    best = min(model.seconds(p, c) for (p,) in asked.problems for c in model.feasible(p))
    by_name = {p.template.name: p for (p,) in asked.problems}
    for one in candidates_of(asked)[1:]:
        problem = by_name[one.template or ""]
        assert model.seconds(problem, problem.template.config(**dict(one.config))) <= tuner.HOPELESS * best


# ---- subgraphs --------------------------------------------------------------------------------------------------------


def normalised(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return F.relu((x * g) @ w)


def kept(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    return y, y.relu() * 2


SUBGRAPHS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], int, int]] = {
    "epilogue": (layer, ARGS, 3, 1),
    "prologue": (normalised, (r(64, 96), r(96), r(96, 128)), 3, 1),
    "two results": (kept, (r(64, 96), r(96, 128)), 2, 2),
    "reduction on tiles": (lambda x, w: (x @ w).exp().sum(-1), (r(64, 96) * 0.1, r(96, 128)), 2, 1),
    "family": (lambda x, w, v: F.silu(x @ w) * (x @ v), (r(64, 96), r(96, 128), r(96, 128)), 3, 1),
    "picked elements": (
        lambda x, w, t: F.cross_entropy(x @ w, t, reduction="none"),
        (r(64, 96), r(96, 3000), torch.arange(64)),
        3,
        3,
    ),
    "only a part of the graph": (lambda x, w, y: (x @ w + y.exp()).softmax(-1) * y, (r(64, 96), r(96, 128), r(64, 128)), 3, 1),
}


@pytest.mark.parametrize("name", SUBGRAPHS)
def test_an_extracted_subgraph_is_what_the_kernel_computes(name: str) -> None:
    f, args, inputs, outputs = SUBGRAPHS[name]
    asked, graph = question(f, *args)
    part = extract_subgraph(graph, asked.step)
    assert part is not None
    assert (len(part.inputs), len(part.outputs)) == (inputs, outputs)
    verify(part, "extraction")


def test_what_is_added_in_place_is_not_measured() -> None:
    asked, graph = question(lambda x, w, y: y.add_(x @ w), r(64, 96), r(96, 128), r(64, 128))
    assert extract_subgraph(graph, asked.step) is None


# ---- keys -------------------------------------------------------------------------------------------------------------


def key(f: Callable[..., Any], *args: Tensor) -> Any:
    asked, graph = question(f, *args)
    return keys_of(asked.step, graph, "GPU", "fast")[0]


def test_keys_know_no_names() -> None:
    def other_names(rows: Tensor, columns: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(F.linear(rows, columns, bias))

    one = key(layer, *ARGS)
    assert one == key(other_names, *ARGS)
    assert dict(one.sizes) == {"m": 64, "n": 128, "k": 96}
    assert one.dynamic == ()
    assert one.title.startswith("addmm, gelu: float32")


OTHER: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "epilogue": (lambda x, w, b: F.relu(F.linear(x, w, b)), ARGS),
    "no epilogue": (F.linear, ARGS),
    "type": (layer, tuple(a.bfloat16() for a in ARGS)),
    "layout": (lambda x, w, b: F.gelu(x @ w + b), (ARGS[0], ARGS[1].t().contiguous(), ARGS[2])),
    "misaligned rows": (layer, (r(64, 97)[:, :96], *ARGS[1:])),
    "prologue": (lambda x, w, b: layer(x * 2, w, b), ARGS),
    "result's layout": (lambda x, w, b: layer(x, w, b).t().contiguous(), ARGS),
}


@pytest.mark.parametrize("name", OTHER)
def test_keys_tell_apart(name: str) -> None:
    assert key(*(OTHER[name][0], *OTHER[name][1])).form != key(layer, *ARGS).form


def test_sizes_are_beside_the_form() -> None:
    one, other = key(layer, *ARGS), key(layer, r(32, 96), *ARGS[1:])
    assert one.form == other.form
    assert one != other


def dynamic(rows: int) -> Tensor:
    x = r(rows, 96)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def test_dynamic_sizes_have_buckets() -> None:
    with recording() as seen, torch.no_grad():
        torch._dynamo.reset()
        torch.compile(layer, backend="kgen", options={"cache": False})(dynamic(50), *ARGS[1:])
    (graph,) = seen.graphs
    assert isinstance(graph, Record)
    (kernel,) = [k for step in graph.plan.kernels for k in members(step)]
    (symbol,) = graph.plan.graph.size_hints
    near, far = keys_of(kernel, graph.plan.graph, "CPU", "fast", [{symbol: 50}, {symbol: 700}])
    assert near.dynamic == far.dynamic == ("m",)
    assert (dict(near.sizes)["m"], dict(far.sizes)["m"]) == (64, 1024)
    assert near.form == far.form


def test_dynamic_sizes_are_measured_bucket_by_bucket(file: Path) -> None:
    """One graph for all rows, and look-ups at each length; what wins a bucket is what runs there."""
    torch._dynamo.reset()
    options = {"mode": "max-autotune-no-cudagraphs", "cache": False, "tuning_file": str(file), "tuning_seconds": 600}
    with recording() as seen, torch.no_grad():
        step = torch.compile(layer, backend="kgen", options=options)
        for rows in (50, 700, 17):
            x = dynamic(rows)
            torch.testing.assert_close(step(x, *ARGS[1:]), layer(x, *ARGS[1:]), rtol=1e-4, atol=1e-4)
    assert len(seen.graphs) == 1
    lengths = {dict(e.key.sizes)["m"] for e in TuningFile(file).entries()}
    assert lengths >= {16, 64, 1024}
    before = measured()
    with recording() as again, torch.no_grad():
        torch._dynamo.reset()
        torch.compile(layer, backend="kgen", options=options)(dynamic(300), *ARGS[1:])
    assert measured() == before
    assert [g.units.sources for g in again.graphs] == [g.units.sources for g in seen.graphs]


# ---- stable numerics --------------------------------------------------------------------------------------------------


def test_stable_candidates_have_one_order_and_no_library() -> None:
    asked, _ = question(layer, r(512, 1024).bfloat16(), r(4096, 1024).bfloat16(), r(4096).bfloat16())
    found = candidates_of(replace(asked, parts={4: 128 * 128}), stable=True)
    by_name = {p.template.name: p for (p,) in asked.problems}
    orders = {
        model.order(by_name[c.template or ""], by_name[c.template or ""].template.config(**dict(c.config))) for c in found
    }
    assert len(orders) == 1
    assert len(found) >= 8
    assert {c.parts for c in found} == {1}
    assert None not in {c.template for c in found}


SUMS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "float32": (layer, ARGS),
    "bfloat16": (layer, tuple(a.bfloat16() for a in (r(200, 700), r(300, 700), r(300)))),
    "long": (lambda x, w: F.relu(x @ w), (r(60, 3000), r(3000, 90))),
    "few rows": (lambda x, w: F.relu(x @ w), (r(4, 900), r(900, 90))),
    "family": (lambda x, w, v: F.silu(x @ w) * (x @ v), (r(64, 96), r(96, 128), r(96, 128))),
}


@pytest.mark.parametrize("name", ["float32", *(pytest.param(n, marks=pytest.mark.slow) for n in [*SUMS][1:])])
def test_one_order_means_equal_bits(name: str) -> None:
    """All configurations that a template says to have one order, forced one after the other."""
    f, args = SUMS[name]
    found: dict[Any, list[Any]] = {}
    asked, _ = question(f, *args, options=Options())
    ((problem,),) = [p for p in asked.problems if p[0].template.name == "cpp_matmul"]
    configs = [
        *model.feasible(problem),
        *(problem.template.config(ROWS=rows, BLOCK_M=48, BLOCK_N=columns, SPLIT_K=1, FEW_ROWS=few)
          for rows in (48, 96) for columns in (32, 64) for few in (0, 16)),
    ]  # fmt: skip
    for config in configs:
        torch._dynamo.reset()
        with only("cpp_matmul", lambda offered, config=config: config), torch.no_grad():
            got = torch.compile(f, backend="kgen", options={"cache": False})(*args)
        found.setdefault(model.order(problem, config), []).append(got)
    assert max(map(len, found.values())) >= 4
    for results in found.values():
        assert all(torch.equal(one, results[0]) for one in results)


def test_stable_results_do_not_depend_on_what_was_measured(file: Path) -> None:
    """Neither does the choice of the library: an entry that says so is not followed."""
    results = []
    for row in (None, {"template": None, "config": {}}, {"template": "cpp_matmul", "config": {"BLOCK_N": 32}}):
        if row is not None:
            contents = json.loads(file.read_text())
            entry = contents["entries"][0]
            entry["config"] = {**entry["config"], **row["config"]} if row["template"] else {}
            entry |= {"template": row["template"], "version": tuner._versions("cpu")[row["template"] or ""]}
            file.write_text(json.dumps(contents))
        torch._dynamo.reset()
        mode = "max-autotune-no-cudagraphs" if row is None else "default"
        options = {"mode": mode, "cache": False, "tuning_file": str(file), "numerics": "stable", "tuning_seconds": 600}
        with recording() as seen, torch.no_grad():
            results.append(torch.compile(layer, backend="kgen", options=options)(*ARGS))
        (graph,) = seen.graphs
        assert isinstance(graph, Record)
        assert not graph.plan.calls
    assert all(torch.equal(one, results[0]) for one in results)


def test_stable_candidates_are_compared_bit_by_bit(file: Path) -> None:
    """A template that is wrong about its order is found out."""

    def nearly(make: Callable[..., Any]) -> Callable[..., Any]:
        count = itertools.count()

        def making(part: ir.Graph, *how: Any) -> Any:
            first = next(count) == 0
            return make(part if first else replace(part, nodes=[nudged(n) for n in part.nodes]), *how)

        return making

    def nudged(node: ir.Node) -> ir.Node:
        if not isinstance(node, ir.Pointwise):
            return node
        return replace(node, value=vs.call("mul", node.value, vs.const(1 + 1e-6, node.value.dtype)))

    with cooking(make=nearly):
        graph = compiled(layer, *ARGS, file=file, numerics="stable")
    assert set(dropped(graph).values()) == {Reason.WRONG_RESULT}
