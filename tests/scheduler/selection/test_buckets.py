"""Matmuls of dynamic sizes: a few configurations in one graph, each for a range of lengths, whatever size came first."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from matmuls import error
from test_warm_start import assert_warm, process
from torch import Tensor

import kgen
from kgen.build import cpp, triton
from kgen.cost import model
from kgen.device import Device
from kgen.host import cudagraph, native
from kgen.host import program as hp
from kgen.host.compiled import HostGraph
from kgen.host.cudagraph import decide
from kgen.host.interpret import Interpreted
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.plan import BySize, Choice, Launch, members, variants
from kgen.report.record import Record, Recorder, recording
from kgen.scheduler import chosen_problem
from kgen.scheduler.selection import choose
from kgen.scheduler.selection.size_buckets import Best, buckets_of
from kgen.templates.contract import Config
from kgen.templates.problem import Problem
from kgen.templates.triton.codegen.template import MOST_STACK
from kgen.verdict import Reason
from tests.report.test_debug import run_here
from tests.scheduler.fusion.test_grouped_matmuls import qkv, weights

CPP: dict[str, Any] = {"cache": False}
TRITON: dict[str, Any] = {"cache": False, "gpu_interpreter": True}
BACK_ENDS = [
    pytest.param(CPP, marks=pytest.mark.cpu, id="cpp"),
    pytest.param(TRITON, marks=[pytest.mark.cpu, pytest.mark.interpret], id="triton"),
]
LENGTHS = (1, 3, 16, 17, 64, 100, 257, 1000)
bf = torch.bfloat16


def r(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def rows(m: int, k: int = 48, **bounds: int) -> Tensor:
    """A matrix with a dynamic number of rows."""
    x = r(m, k)
    torch._dynamo.mark_dynamic(x, 0, **bounds)
    return x


def gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x @ w + b)


def sums(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).exp().sum(-1)


def compiled(f: Callable[..., Any], options: dict[str, Any], **more: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(f, backend="kgen", fullgraph=True, options=options, **more)


@pytest.fixture(autouse=True)
def templates_win(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(model, "vendor_seconds", lambda problem: 1.0)


@pytest.fixture
def by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best tile is a quarter of the rows: each bucket has a configuration of its own."""

    def seconds(problem: Problem, config: Config) -> float:
        tile = config.BLOCK_M
        return 1e-6 * max(4 * tile / problem.size("m"), problem.size("m") / (4 * tile))

    monkeypatch.setattr(model, "seconds", seconds)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many times each GPU kernel ran."""
    counts: Counter[str] = Counter()
    call = Interpreted.__call__

    def counted(self: Interpreted, *args: Any) -> tuple[()]:
        counts[self.kernel.name] += 1
        return call(self, *args)

    monkeypatch.setattr(Interpreted, "__call__", counted)
    return counts


def graphs(recorder: Recorder) -> list[Record]:
    return [graph for graph in recorder.graphs if isinstance(graph, Record)]


def only_graph(recorder: Recorder) -> Record:
    [graph] = graphs(recorder)
    return graph


def table(graph: Record) -> BySize:
    """The choices of the graph's one matmul."""
    [found] = [members(step)[0].by_size for step in graph.plan.kernels if members(step)[0].contracts]
    assert found is not None
    return found


def pick_instructions(graph: Record) -> list[hp.Pick]:
    return [item for item in graph.blueprint.program.code if isinstance(item, hp.Pick)]


# ---- one graph for all sizes --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("by_rows")
@pytest.mark.parametrize("options", BACK_ENDS)
def test_one_compilation_for_all_lengths(options: dict[str, Any]) -> None:
    w, b = r(48, 40), r(40)
    with recording() as recorder:
        step = compiled(gelu, options)
        for m in LENGTHS[1:]:
            x = rows(m)
            torch.testing.assert_close(step(x, w, b), gelu(x, w, b), rtol=1e-5, atol=1e-5)
        step(r(1, 48), w, b)  # torch compiles one row apart
    several, one = graphs(recorder)
    assert 2 <= len(table(several).choices) <= 4
    assert not pick_instructions(one)
    assert len(pick_instructions(several)) == 1
    assert several.blueprint.coverage == {"kernels": 1}


@pytest.mark.cpu
@pytest.mark.interpret
@pytest.mark.usefixtures("by_rows")
def test_the_kernel_of_the_bucket_runs(launched: Counter[str]) -> None:
    w, b = r(48, 40), r(40)
    with recording() as recorder:
        step = compiled(gelu, TRITON)
        step(rows(7), w, b)
    found = table(only_graph(recorder))
    names = [f"k{k}_mm_add_gelu_{range_}" for k, range_ in enumerate(found.ranges)]
    limits = [limit for limit, _ in found.choices if limit is not None]
    for k, m in [(k, m) for k, limit in enumerate(limits) for m in (limit - 1, limit)] + [(len(limits), limits[-1] + 1)]:
        launched.clear()
        step(rows(m), w, b)
        assert launched == {names[k]: 1}
    assert len(graphs(recorder)) == 1


@pytest.mark.every(3)
@pytest.mark.usefixtures("by_rows")
@pytest.mark.parametrize("options", BACK_ENDS)
@pytest.mark.parametrize("dims", [{0: (0, 1)}, {0: (0,), 1: (1,)}, {0: (2,), 1: (0,)}], ids=["batch and rows", "m, n", "k"])
def test_other_dynamic_axes(dims: dict[int, tuple[int, ...]], options: dict[str, Any]) -> None:
    """Two sizes of which only the number of points counts, two axes of the result, and the sum's alone."""
    with recording() as recorder:
        step = compiled(torch.matmul, options)
        for size in (5, 30, 70, 130):
            shapes = [[6, 8, 24], [24, 40]]
            for position, dynamic in dims.items():
                for d in dynamic:
                    shapes[position][d] = size if dynamic != (0, 1) or d == 0 else size // 2 + 1
            args = [r(*shape) for shape in shapes]
            for position, dynamic in dims.items():
                for d in dynamic:
                    torch._dynamo.mark_dynamic(args[position], d)
            torch.testing.assert_close(step(*args), torch.matmul(*args), rtol=1e-4, atol=1e-4)
    assert only_graph(recorder).blueprint.coverage == {"kernels": 1}


@pytest.mark.usefixtures("by_rows")
@pytest.mark.parametrize("options", BACK_ENDS)
def test_a_length_that_is_found_on_the_way(options: dict[str, Any]) -> None:
    """The rows are counted by a call, none of them among the counts, and what picks is computed after it."""

    def f(x: Tensor, keep: Tensor, w: Tensor) -> Tensor:
        return F.relu(x[keep.nonzero()[:, 0]] @ w)

    x, w = r(600, 48), r(48, 40)
    with recording() as recorder, torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        step = compiled(f, options)
        for count in (600, 0, 1, 16, 100, 300):
            keep = torch.arange(600) < count
            torch.testing.assert_close(step(x, keep, w), f(x, keep, w), rtol=1e-5, atol=1e-5)
    assert len(pick_instructions(only_graph(recorder))) == 1


@pytest.mark.usefixtures("by_rows")
@pytest.mark.parametrize("options", BACK_ENDS)
def test_a_batch_switches_together(options: dict[str, Any]) -> None:
    more = weights((96, 32, 32), 48)
    with recording() as recorder:
        step = compiled(qkv, options)
        for m in (7, 64, 100, 257, 520):
            x = rows(m)
            for one, other in zip(step(x, *more), qkv(x, *more), strict=True):
                assert error(one, other) < 1e-5
    graph = only_graph(recorder)
    [batch] = graph.plan.kernels
    assert len(members(batch)) == 3
    assert len({one.by_size for one in members(batch)}) == 1
    assert len(pick_instructions(graph)[0].items) == len(variants(batch)) > 1


@pytest.mark.cpu
@pytest.mark.interpret
@pytest.mark.usefixtures("by_rows")
def test_parts_of_reductions_are_equal_in_all_choices() -> None:
    w = r(48, 300) * 0.1
    with recording() as recorder:
        step = compiled(sums, TRITON)
        for m in (7, 100, 1000):
            x = rows(m)
            torch.testing.assert_close(step(x, w), sums(x, w), rtol=1e-4, atol=1e-4)
    graph = only_graph(recorder)
    [matmul] = [step for step in graph.plan.kernels if members(step)[0].contracts]
    wanted = {s.outs[0]: s.block for s in matmul.statements if s.kind == "partial"}
    assert wanted
    choices = list(problems_of(matmul, graph))
    assert len(choices) > 1
    for problem, config in choices:
        assert problem.part_blocks(config) == wanted


def problems_of(step: Launch, graph: Record) -> Iterator[tuple[Problem, Config]]:
    for one in variants(step):
        problem = chosen_problem(members(one)[0], graph.plan.graph, Device("cuda"))
        choice = members(one)[0].choice
        assert choice is not None
        yield problem, problem.template.config(**dict(choice.config))


# ---- no size comes first ------------------------------------------------------------------------------------------------


def made(f: Callable[..., Any], firsts: tuple[int, ...], options: dict[str, Any], marked: bool, *more: Tensor) -> list[Any]:
    """All that depends on decisions, of the graph that is dynamic in the end."""
    with recording() as recorder:
        step = compiled(f, options)
        for m in firsts:
            step(rows(m) if marked else r(m, 48), *more)
    graph = graphs(recorder)[-1]
    steps = [(step.name, [one.by_size for one in members(step)]) for step in graph.plan.kernels]
    texts = [call.launch.source if call.launch else call.symbol for call in graph.units.calls.values()]
    verdicts = [str(v) for v in graph.plan.verdicts]
    return [steps, texts, graph.units.sources, verdicts, len(graph.plan.calls)]


@pytest.mark.every(3)
@pytest.mark.parametrize("options", BACK_ENDS)
@pytest.mark.parametrize("f", [gelu, qkv, sums], ids=["epilogue", "batch", "sums"])
def test_the_first_size_decides_nothing(f: Callable[..., Any], options: dict[str, Any]) -> None:
    more = {gelu: [r(48, 40), r(40)], qkv: weights((96, 32, 32), 48), sums: [r(48, 200)]}[f]
    few, many = (made(f, (m,), options, True, *more) for m in (7, 700))
    assert few == many
    one = f is sums or (f is qkv and options == CPP)  # parts of one length; a rule that cuts these small ones in the same way
    assert one or any(by_size is not None for _, tables in few[0] for by_size in tables)
    assert few == made(f, (7, 9), options, False, *more) == made(f, (700, 300), options, False, *more)


@pytest.mark.parametrize("options", BACK_ENDS)
@pytest.mark.parametrize("slower", [2.0, 0.1], ids=["library", "template"])
def test_the_library_is_chosen_by_all_lengths(slower: float, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that loses up to 64 rows and wins from then on, by factors of which one or the other is larger."""

    def seconds(problem: Problem) -> float:
        factor = 0.1 if problem.size("m") <= 64 else 2.0 / slower
        return factor * min(model.seconds(problem, config) for config in model.feasible(problem))

    monkeypatch.setattr(model, "vendor_seconds", seconds)
    more = [r(48, 40), r(40)]
    few, many = (made(gelu, (m,), options, True, *more) for m in (7, 700))
    assert few == many
    assert few[-1] == (slower > 1)


@pytest.mark.cpu
def test_reports_are_of_the_sizes_that_came() -> None:
    with recording() as recorder:
        compiled(gelu, CPP)(rows(7), r(48, 40), r(40))
    graph = only_graph(recorder).plan.graph
    assert list(graph.seen_sizes.values()) == [7]
    assert list(graph.size_hints.values()) != [7]


def test_several_dynamic_sizes_are_about_as_long_as_those_that_came_first() -> None:
    """The row of a softmax is as long as it was, and not one of 8 because batch, heads and rows together are 4,096."""

    def f(q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1)

    with recording() as recorder:
        compiled(f, CPP, dynamic=True)(r(3, 2, 70, 24), r(3, 2, 70, 24))
    graph = only_graph(recorder).plan.graph
    first = {size.name: n for size, n in graph.seen_sizes.items()}
    assert {size.name: n for size, n in graph.size_hints.items()} == {
        name: 1 << (n - 1).bit_length() for name, n in first.items()
    }


# ---- the table --------------------------------------------------------------------------------------------------------


def limits(length: ix.Expr, **hints: int) -> list[int | None]:
    symbols = [a for a in ix.free_atoms(length) if isinstance(a, ix.Size)]
    return [b.limit for b in buckets_of(length, ir.Graph("g", size_hints={s: hints.get(s.name, 64) for s in symbols}))]


def test_buckets_are_powers_of_two_within_the_range() -> None:
    def n(lo: int, hi: int) -> ix.Expr:
        return ix.size("n", lo, hi).expr()

    everything = 1 << 62
    assert limits(n(2, everything)) == [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, None]
    assert limits(n(2, 100)) == [16, 32, 64, None]
    assert limits(n(64, 256)) == [128, None]
    assert limits(n(2, 9)) == [None]
    assert limits(n(10_000, everything)) == [None]
    assert limits(n(2, everything) * 12)[:3] == [48, 96, 192]
    assert limits(n(2, everything) * ix.size("h", 2, everything).expr())[:3] == [16, 64, 256]


def test_the_last_bucket_ends_with_the_range() -> None:
    size = ix.size("rows", 2, 100)
    graph = ir.Graph("g", size_hints={size: 7})
    assert [bucket.hints[size] for bucket in buckets_of(size.expr(), graph)] == [16, 32, 64, 100]


def test_several_sizes_keep_their_proportions() -> None:
    batch, length = ix.size("batch", 2), ix.size("length", 2)
    graph = ir.Graph("g", size_hints={batch: 30, length: 500})
    buckets = buckets_of(batch.expr() * length.expr(), graph)
    assert [bucket.limit for bucket in buckets] == [*sorted(bucket.limit for bucket in buckets[:-1]), None]
    assert (buckets[-1].hints[batch], buckets[-1].hints[length]) == (32, 512)
    assert all(bucket.hints[length] >= 8 * bucket.hints[batch] for bucket in buckets if bucket.hints[batch] > 2)


def test_a_table_says_what_it_picks() -> None:
    small, large = Choice("one", (("TILE", 16),)), Choice("other", ())
    found = BySize(ix.size("s", 2, 99).expr(), ((16, small), (None, large)))
    assert [found.at(n) for n in (0, 16, 17)] == [small, small, large]
    assert found.ranges == ("to_16", "above_16")
    assert str(found) == "s <= 16: one TILE=16; s > 16: other"


@pytest.mark.cpu
@pytest.mark.interpret
@pytest.mark.usefixtures("by_rows")
@pytest.mark.parametrize(("bounds", "last"), [({"min": 2, "max": 100}, 64), ({"min": 100, "max": 400}, 256)])
def test_bounds_narrow_the_table(bounds: dict[str, int], last: int) -> None:
    with recording() as recorder:
        compiled(gelu, TRITON)(rows(bounds["max"] // 8 * 4, **bounds), r(48, 40), r(40))
    inside = [limit for limit, _ in table(only_graph(recorder)).choices if limit is not None]
    assert inside
    assert all(bounds["min"] < limit <= last for limit in inside)


@pytest.mark.cpu
@pytest.mark.interpret
def test_what_costs_nothing_is_one_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Winners that differ by less than what another kernel is worth."""
    calls = iter(range(10**9))
    monkeypatch.setattr(model, "seconds", lambda problem, config: 1e-6 * (1 + next(calls) % 7 * 1e-4))
    with recording() as recorder:
        compiled(gelu, TRITON)(rows(7), r(48, 40), r(40))
    assert not pick_instructions(only_graph(recorder))


@pytest.mark.cpu
@pytest.mark.interpret
def test_estimates_do_not_overrule_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration that the model thinks slow was measured to be the best of two buckets."""
    here = choose._best_here

    def measured(problems: Sequence[Problem], *more: Any) -> Best | None:
        found = here(problems, *more)
        if found is None or found.problem.size("m") not in (64, 128):
            return found
        problem = next(p for p in problems if p.template.name == "triton_matmul")
        return replace(
            found, problem=problem, config=problem.template.config(BLOCK_M=32), seconds_of_template=1e-9, measured=True
        )

    monkeypatch.setattr(choose, "_best_here", measured)
    with recording() as recorder:
        compiled(gelu, TRITON)(rows(7), r(48, 40), r(40))
    found = table(only_graph(recorder))
    assert [dict(found.at(m).config)["BLOCK_M"] == 32 for m in (32, 33, 64, 128, 129)] == [False, True, True, True, False]


@pytest.mark.cpu
def test_sizes_of_other_buckets_forget_what_was_computed() -> None:
    """Bytes are counted anew at other sizes, what is the same for all sizes only once."""
    with recording() as recorder:
        compiled(gelu, CPP)(rows(7), r(48, 40), r(40))
    graph = only_graph(recorder).plan
    [kernel] = [kernel for step in graph.kernels for kernel in members(step)]
    problem = chosen_problem(kernel, graph.graph, Device("cpu", isa="generic"))
    [symbol] = graph.graph.size_hints
    before = problem.epilogue_bytes, problem.bytes_read("A"), problem.stride("A", "m")
    other = problem.at({symbol: 2 * problem.size("m")})
    assert other.size("m") == 2 * problem.size("m")
    assert other.bytes_read("A") == 2 * before[1]
    assert other.epilogue_bytes - before[0] == before[0] - 4 * 40  # all but the bias
    assert other.stride("A", "m") == before[2]
    assert problem.epilogue_bytes == before[0]


# ---- the host -----------------------------------------------------------------------------------------------------------


def pick(limits: tuple[int, ...], *items: Any) -> hp.Program:
    spec = hp.SlotSpec(torch.float32, (1,), (1,), 0)
    return hp.Program(
        (hp.InputInt(2),), (0, 1, 0), (spec,), (hp.Alloc(0), hp.Pick(2, limits, items)), (hp.OutTensor(0),), ("a", "b", "c")
    )


KERNELS = tuple(hp.Kernel(k, (0,)) for k in range(3))


@pytest.mark.cpu
def test_the_runtime_compares_and_runs_one() -> None:
    text = "".join(f'extern "C" int {n}(void** p, const long*, int) {{ *(float*)p[0] = {k}; return 0; }}\n' for k, n in
                   enumerate("abc"))  # fmt: skip
    library = cpp.load_library(cpp.build_unit("pick_test", text, include_dirs=[]))
    run = native.load(pickle.loads(pickle.dumps(pick((16, 64), *KERNELS))), [library])
    assert [run([n])[0].item() for n in (-1, 0, 16, 17, 64, 65, 1 << 40)] == [0, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        (pick((16,), *KERNELS), "one fewer"),
        (pick((64, 16), *KERNELS), "growing limits"),
        (pick((16,), KERNELS[0], hp.PythonCall(0, ())), "one kind"),
        (pick((16,), KERNELS[0], hp.Kernel(3, (0,))), "names one of 3 kernels"),
        (pick((16,), *[hp.PythonCall(0, (), outs=(0,))] * 2), "write to what is there"),
        (pick((16,), hp.Alloc(0), hp.Alloc(0)), "write to what is there"),
        (replace(pick((16,), *KERNELS[:2]), registers=(0, 1)), "registers below 2"),
    ],
)
def test_programs_that_are_refused(program: hp.Program, problem: str) -> None:
    with pytest.raises(kgen.errors.InvalidProgram, match=problem):
        hp.verify(program)


def test_a_pick_of_launches_may_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings are kept by the integers among a graph's arguments, so each size has its own."""
    monkeypatch.setattr(cudagraph, "FEWEST", 1)
    launches = tuple(hp.Launch(k, (0,), (), (1, 1, 1)) for k in range(2))
    spec = hp.SlotSpec(torch.float32, (1,), (1,), 0, "cuda:0")
    program = replace(pick((16,), *launches), slots=(spec,), launches=("a", "b"), kernels=())
    recording, verdict = decide(program, frozenset(), "inference")
    assert recording is not None
    assert recording.replays
    assert verdict.reason is Reason.ONE_REPLAY
    calls = replace(program, code=(hp.Alloc(0), hp.Pick(2, (16,), (hp.PythonCall(0, ()), hp.PythonCall(1, ())))))
    assert decide(calls, frozenset(), "inference")[1].reason is not Reason.ONE_REPLAY


@pytest.mark.cpu
@pytest.mark.usefixtures("by_rows")
def test_a_graph_from_disk_picks_as_well() -> None:
    w, b = r(48, 40), r(40)
    with recording() as recorder:
        compiled(gelu, CPP)(rows(7), w, b)
    graph = only_graph(recorder)
    assert pick_instructions(graph)
    again = HostGraph(pickle.loads(pickle.dumps(graph.blueprint)))
    for m in LENGTHS:
        x = r(m, 48)
        given = {(48, 40): w, (40,): b, (m, 48): x}
        buffers = [graph.plan.graph.buffers[i.buffer] if i.buffer else None for i in graph.plan.graph.inputs]
        args = [m if one is None else given[tuple(s.as_int() or m for s in one.sizes)] for one in buffers]
        torch.testing.assert_close(again(args)[0], gelu(x, w, b), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.cpu
def test_a_second_process_loads_all_choices(tmp_path: Path) -> None:
    body = """
        from kgen.cost import model
        model.vendor_seconds = lambda problem: 1.0
        w, b = torch.randn(512, 512), torch.randn(512)
        run = torch.compile(lambda x: torch.relu(x @ w + b), backend="kgen", dynamic=True)
        for m in SIZES:
            x = torch.randn(m, 512)
            torch.testing.assert_close(run(x), torch.relu(x @ w + b), rtol=1e-4, atol=1e-4)
    """
    first = process(body, tmp_path, SIZES=[7])
    assert (first["lowered"], first["kernels"]) == (1, 1)
    assert_warm(process(body, tmp_path, SIZES=[3000, 100, 9]), 1)


# ---- for people ---------------------------------------------------------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.usefixtures("by_rows")
def test_explain_has_the_table_and_every_source(capsys: pytest.CaptureFixture[str]) -> None:
    report = kgen.explain(gelu, rows(7), r(48, 40), r(40))
    [kernel] = report.kernels
    assert len(kernel.by_size) > 1
    assert all(what.split("EPILOGUE_SUBTILES")[0] in kernel.source for _, what in kernel.by_size)
    printed = capsys.readouterr().out
    assert all(when in printed and what in printed for when, what in kernel.by_size)
    assert report.to_dict()["graphs"][0]["kernels"][0]["by_size"]


@pytest.mark.cpu
@pytest.mark.usefixtures("by_rows")
@pytest.mark.parametrize("m", [7, 300])
def test_the_script_of_the_debug_folder_picks(m: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled(gelu, {**CPP, "debug": str(tmp_path)})(rows(m), r(48, 40), r(40))
    [folder] = tmp_path.iterdir()
    assert f"= p.symbol({m})" in (folder / "output_code.py").read_text()
    assert "with p.pick(" in (folder / "output_code.py").read_text()
    assert re.search(r"s\d+ <= \d+: cpp_matmul", (folder / "ir_scheduled.txt").read_text())
    script = run_here(folder)
    assert any(isinstance(item, hp.Pick) for item in script.program().code)
    assert "right: all results" in capsys.readouterr().out


# ---- GPUs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.ptx
def test_all_choices_compile_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interpreted, "__call__", lambda self, *args: ())
    x, w, b = r(64, 1024, dtype=bf), r(1024, 1024, dtype=bf), r(1024, dtype=bf)
    torch._dynamo.mark_dynamic(x, 0)
    with recording() as recorder:
        compiled(gelu, TRITON)(x, w, b)
    graph = only_graph(recorder)
    assert len(table(graph).choices) > 2
    kernels = [call.launch for call in graph.units.calls.values() if call.launch is not None]
    for done in triton.compile_kernels(kernels, 90):
        assert done.cubin
        assert done.stack <= MOST_STACK


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_many_lengths_on_a_gpu(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudagraph, "FEWEST", 1)
    w, b = r(1024, 1024, dtype=bf).cuda(), r(1024, dtype=bf).cuda()
    with recording() as recorder:
        torch._dynamo.reset()
        step = torch.compile(gelu, backend="kgen", fullgraph=True, mode=mode)
        for m in (*LENGTHS[1:], 5000, 16, 1000, *LENGTHS[1:]):
            x = r(m, 1024, dtype=bf).cuda()
            torch._dynamo.mark_dynamic(x, 0)
            torch.compiler.cudagraph_mark_step_begin()
            assert error(step(x, w, b), gelu(x.float(), w.float(), b.float())) < 1e-2
    assert len(table(only_graph(recorder)).choices) > 2
