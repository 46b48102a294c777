"""`kgen.explain`: what it compiles, what it reports, and what it leaves alone."""

from __future__ import annotations

import io
import json
import threading

import pytest
import torch
import torch.nn.functional as F

import kgen
from kgen.commands.explain import function_source, watching
from kgen.only import only
from kgen.report.graph_report import bytes_text
from kgen.report.record import recording
from kgen.verdict import CHANGES, Outcome, Reason, Verdict

pytestmark = pytest.mark.cpu


def block(x, w):
    return F.layer_norm(torch.relu(x @ w), (16,))


@pytest.fixture
def args():
    return torch.randn(8, 16), torch.randn(16, 16)


def test_a_report_names_kernels_calls_and_decisions(args, capsys):
    with kgen.config.override(templates=False):
        report = kgen.explain(block, *args)
    [graph] = report.graphs
    assert graph.role == "inference"
    [kernel] = report.kernels
    assert {"aten.relu.default", "aten.var_mean.correction"} <= set(kernel.operators)
    assert any("test_explain.py" in line and "layer_norm" in line for line in kernel.lines)
    assert kernel.outer
    assert kernel.inner
    assert (kernel.bytes_read, kernel.bytes_written) == (512, 512)
    assert kernel.source.startswith("//")
    assert kernel.source.endswith("}\n")
    [extern] = report.externs
    assert str(extern) == "aten.mm.default x 1: contraction without a template"
    assert {Outcome.FUSED, Outcome.EXTERN} <= {v.outcome for v in report.verdicts}
    assert Reason.EXTERN_CALL in {v.reason for v in report.verdicts}
    assert report.graph_breaks == ()
    assert report.bytes_moved == report.bytes_minimal == 1024 + (512 + 1024 + 512)
    assert report.peak_memory >= 1024
    printed = capsys.readouterr().out
    for text in (
        "1 graph, 1 kernel, 1 library call, 0 graph breaks",
        "aten.mm.default",
        "contraction without a template",
        "relu",
    ):
        assert text in printed


def test_print_goes_to_a_file_and_dicts_are_json(args, capsys):
    report = kgen.explain(block, *args, print_report=False)
    assert capsys.readouterr().out == ""
    out = io.StringIO()
    report.print(file=out)
    assert "\x1b" not in out.getvalue()
    assert "moves" in out.getvalue()
    data = json.loads(json.dumps(report.to_dict()))
    assert data["bytes_moved"] == report.bytes_moved
    assert [k["name"] for g in data["graphs"] for k in g["kernels"]] == [k.name for k in report.kernels]
    assert data["graphs"][0]["verdicts"][0]["because"]


def test_the_kernel_and_the_call_that_feeds_it_have_one_verdict(args):
    with kgen.config.override(templates=False):
        report = kgen.explain(block, *args, print_report=False)
    [apart] = [v for v in report.to_dict()["graphs"][0]["verdicts"] if v["kernels"]]
    call, kernel = apart["kernels"]
    assert call.startswith("aten.mm.default")
    assert kernel == report.kernels[0].name
    assert apart["reason"] == "EXTERN_CALL"


def test_a_terminal_gets_tables(args, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    kgen.explain(block, *args, print_report=False).print(file=out)
    assert "\x1b[" in out.getvalue()


def test_backward_is_compiled_and_no_gradient_touched(args):
    x, w = args[0], args[1].requires_grad_()
    report = kgen.explain(block, x, w, print_report=False)
    assert [g.role for g in report.graphs] == ["forward", "backward"]
    assert w.grad is None
    assert all(g.kernels for g in report.graphs)


def test_gradients_of_a_graph_that_goes_on_outside(args):
    leaf = torch.randn(8, 16, requires_grad=True)
    x = leaf * 2
    report = kgen.explain(block, x, args[1], print_report=False)
    assert [g.role for g in report.graphs] == ["forward", "backward"]
    x.sum().backward()  # the user's own graph is still whole
    assert leaf.grad is not None


def test_modules_methods_and_compiled_functions(args):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(16, 4)

        def forward(self, x):
            return self.linear(x).tanh()

    model = Model()
    for f in (model, model.forward, torch.compile(model, backend="eager"), kgen.compile(model.forward)):
        report = kgen.explain(f, args[0], print_report=False)
        assert [g.role for g in report.graphs] == ["forward", "backward"]
    assert all(p.grad is None for p in model.parameters())


def test_it_compiles_every_time_and_keeps_what_was_compiled(args):
    compiled = torch.compile(block, backend="kgen", options={"cache": False})
    compiled(*args)
    with recording() as seen:
        first = kgen.explain(block, *args, print_report=False)
        second = kgen.explain(block, *args, print_report=False)
        assert len(seen.graphs) == 2
        compiled(*args)
        assert len(seen.graphs) == 2
    assert [k.source for k in first.kernels] == [k.source for k in second.kernels]


def test_random_numbers_are_as_before(args):
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    kgen.explain(lambda x: F.dropout(x, 0.5), args[0], print_report=False)
    assert torch.equal(torch.rand(3), expected)


def test_graph_breaks_are_listed_once():
    def broken(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y.relu()

    report = kgen.explain(broken, torch.randn(4), print_report=False)
    assert len(report.graphs) == 2
    [found] = report.graph_breaks
    assert "graph_break()" in found.line
    assert "test_explain.py" in str(found)


def test_operators_without_lowering_are_listed():
    report = kgen.explain(lambda x: torch.linalg.cholesky_ex(x).L + 1, torch.eye(4), print_report=False)
    [extern] = report.externs
    assert "linalg_cholesky_ex" in extern.operator
    assert (extern.calls, extern.reason) == (1, "no lowering")
    assert "test_explain.py" in extern.lines[0]


def test_inlined_operators_show_and_views_do_not():
    [kernel] = kgen.explain(lambda x: x.t().relu().view(-1, 4).sum(1).neg(), torch.randn(8, 8).t(), print_report=False).kernels
    assert kernel.operators == ("aten.relu.default", "aten.sum.dim_IntList", "aten.neg.default")


def test_an_operand_made_for_a_call_is_not_the_call(args):
    def f(x, w):
        return x.exp() @ w

    with kgen.config.override(templates=False):
        [kernel] = kgen.explain(f, *args, print_report=False).kernels
    assert kernel.operators == ("aten.exp.default",)


def test_an_operand_that_a_template_computes_is_part_of_the_matmul(args):
    def f(x, w):
        return x.exp() @ w

    with only("cpp_matmul", lambda configs: configs[0]):
        [kernel] = kgen.explain(f, *args, print_report=False).kernels
    assert kernel.operators == ("aten.exp.default", "aten.mm.default")


def test_demands_hold_for_inlined_operators(args):
    library = kgen.config.override(templates=False)
    with pytest.raises(Exception, match="must be fused"), kgen.require_fused("aten.relu", "aten.mm"), library:
        kgen.explain(block, *args, print_report=False)
    with kgen.require_fused("aten.relu", "aten.mm"):  # on the tiles of a template's matmul, the variance's parts with it
        kgen.explain(block, *args, print_report=False)
    with kgen.require_fused("aten.relu", "aten.var_mean"):
        kgen.explain(block, *args, print_report=False)


def test_why_two_loops_stay_apart_and_what_would_change_it():
    report = kgen.explain(lambda x: x.sum(0) + x.sum(1), torch.randn(8, 8), print_report=False)
    refused = [v for v in report.verdicts if v.outcome in (Outcome.ILLEGAL, Outcome.UNPROFITABLE)]
    assert all(v.change or v.reason in (Reason.NO_SAVING,) for v in refused)
    fused = kgen.explain(lambda x: x.exp().sum(0), torch.randn(8, 8), print_report=False)
    assert len(fused.kernels) == 1


def test_symbolic_sizes_show_in_loops():
    x = torch.randn(24, 16)
    torch._dynamo.mark_dynamic(x, 0)
    [kernel] = kgen.explain(lambda x: torch.softmax(x, -1), x, print_report=False).kernels
    assert "s" in dict(kernel.outer)["x0"]
    assert kernel.bytes_read == 24 * 16 * 4


def test_inner_compilations_count_too(args):
    inner = torch._dynamo.disable(torch.compile(lambda x: x.cos() + 1, backend="kgen", options={"cache": False}))
    report = kgen.explain(lambda x: inner(x.sin()).tan(), args[0], print_report=False)
    assert sum("aten.cos.default" in k.operators for k in report.kernels) <= 1
    assert any("aten.sin.default" in k.operators for k in report.kernels)
    assert any("aten.tan.default" in k.operators for k in report.kernels)


def test_recordings_nest(args):
    with recording() as outer:
        with watching() as inner:
            torch.compile(lambda x: x.sin(), backend="kgen", options={"cache": False})(args[0])
        torch.compile(lambda x: x.cos(), backend="kgen", options={"cache": False})(args[0])
        assert len(inner.report().graphs) == 1
    assert len(outer.graphs) == 2
    torch.compile(lambda x: x.tan(), backend="kgen", options={"cache": False})(args[0])
    assert len(outer.graphs) == 2


def test_a_backward_compiled_in_another_thread_is_heard(args):
    """As in autograd's threads for other devices: they run with an empty context."""
    x = args[0].requires_grad_()
    with watching() as seen:
        y = torch.compile(lambda x: (x.sin() * x).sum(), backend="kgen", options={"cache": False})(x)
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
        assert [g.role for g in seen.report().graphs] == ["forward", "backward"]


def test_a_graph_in_eager_is_reported_as_such():
    x = torch.randn(4, 4)
    with kgen.config.override(fallback=("all",)):
        [graph] = kgen.explain(lambda x: x @ x @ x, x, print_report=False).graphs
    [extern] = graph.externs
    assert str(extern).startswith("aten.mm.default x 2: options")
    assert (graph.role, graph.kernels, graph.verdicts) == ("inference", (), ())


def test_bytes_text():
    assert [bytes_text(n) for n in (0, 999, 1000, 1_500_000, 2 * 10**9)] == ["0 B", "999 B", "1 kB", "1.5 MB", "2 GB"]


def test_function_source_of_a_missing_symbol():
    assert function_source(["// a\n"], "k0") == ""


# ---- names, texts and ranks --------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ln, self.up, self.down = torch.nn.LayerNorm(16), torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.ln(x))))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def net():
    return kgen.explain(Net(), torch.randn(8, 16), print_report=False)


def test_kernels_say_which_modules_and_parameters_they_are_of(net):
    up = [k for k in net.graphs[0].kernels if "aten.gelu.default" in k.operators]
    assert [k.modules for k in up] == [("layers.0.up", "layers.0"), ("layers.1.up", "layers.1")]
    assert {"layers.0.up.weight", "layers.0.up.bias"} <= set(up[0].parameters)
    assert "aten.addmm#2 in layers.1.up" in up[1].calls
    assert "// in layers.0.up, layers.0" in up[0].source
    assert "layers.0.up.weight" in up[0].source
    backward = [k for k in net.graphs[1].kernels if "aten.gelu_backward.default" in k.operators]
    assert any("layers.1" in " ".join(k.modules) for k in backward)


def test_verdicts_say_where_it_was(net):
    found = [v for v in net.verdicts if "layers.1.up" in v.paths]
    assert found
    assert any("[layers.1.up]" in str(v) for v in found)
    assert found[0].to_dict()["paths"] == list(found[0].paths)
    assert set(net.why("layers.1.up")) >= set(found)
    assert set(net.why("layers.1")) >= set(found)
    assert net.why("layers.1.u") == ()
    assert all("layers.1" in "".join(v.paths) for v in net.why("layers.1.up", "layers.1"))


def test_refusals_are_ranked_by_bytes(net):
    lost = [one.bytes_lost for one in net.refusals]
    assert lost == sorted(lost, reverse=True)
    assert lost[0] > 0
    assert all(one.change for one in net.refusals)
    assert {str(one.verdict) for one in net.refusals} == {
        str(v) for v in net.verdicts if v.outcome in (Outcome.ILLEGAL, Outcome.UNPROFITABLE)
    }


def test_what_two_kernels_lose_is_what_is_between_them():
    def chain(x):
        return (x.sum(1) * 2).sum()

    def kept(x):
        rows = x.sum(1)
        return rows, (rows * 2).sum()

    with kgen.config.override(fusion=False):
        alone, read_again = (kgen.explain(f, torch.randn(500, 40), print_report=False).refusals for f in (chain, kept))
    assert alone[0].bytes_lost == 2 * 500 * 4  # written and read, by nobody else
    assert read_again[0].bytes_lost == 500 * 4  # the result is written whatever reads it


# Outcomes of these are no refusals: there is nothing to change.
TAKEN = {
    "SHARED_DATA", "EPILOGUE", "TILE_PARTIALS", "ROWS", "OUTPUT_SPLIT", "CONCAT_SPLIT", "BROADCAST_BACK", "HORIZONTAL",
    "BLOCKS_OF_ROWS", "COLUMN_SUMS", "OPERAND_REDUCTION", "CHEAP", "ROW_IN_CACHE", "LIBRARY_FUSES", "INDEPENDENT",
    "SAME_OPERAND", "FEW_TILES", "SEQUENCE", "ONE_REPLAY", "TEMPLATE", "RECOMPUTE_CHEAP", "SCALE_LEAVES", "ROWS_IN_LINES",
    "FROZEN_ALONE", "LIBRARY_PREFERS", "INDEPENDENT_ITERATIONS", "EQUAL_LAYERS", "CARRIED_ITERATIONS",
    "BOTH_BRANCHES", "LOOPS_MEASURED",
}  # fmt: skip


def test_every_refusal_says_what_would_change_it():
    assert {reason.name for reason in set(Reason) - set(CHANGES)} == TAKEN
    assert all(not text.startswith("none") for text in CHANGES.values())


def test_one_line_two_forms_and_a_page(net):
    assert " ".join(str(net).partition("\n\n")[0].split()) == repr(net).removeprefix("<kgen report: ").removesuffix(">")
    out = io.StringIO()
    net.print(file=out)
    assert out.getvalue().strip("\n") == str(net)
    html = net._repr_html_()
    assert html.startswith("<iframe")
    assert "srcdoc=" in html


def test_equal_layers_are_one_line(net):
    text = str(net)
    assert "2 x  addmm, gelu" in text
    assert "layers.*.up" in text


def test_top_lists_more_or_less(net):
    def shown(top):
        out = io.StringIO()
        net.print(file=out, top=top)
        return out.getvalue().count("to change it:")

    assert shown(1) == 1
    assert shown(3) == 3
    assert shown(1000) > 10


def test_times_are_no_less_than_the_floor(net):
    assert all(k.seconds >= k.floor > 0 for k in net.kernels)
    assert net.graphs[0].seconds == sum(k.seconds for k in net.graphs[0].kernels)


def test_steps_need_earlier_ones(net):
    for graph in net.graphs:
        assert [s.name for s in graph.steps if s.is_kernel] == [k.name for k in graph.kernels]
        assert all(before < number for number, step in enumerate(graph.steps) for before, _ in step.after)
        assert sum(s.bytes for s in graph.steps) == graph.bytes_moved
    assert any(step.after for step in net.graphs[0].steps)


def test_verdicts_without_paths_read_as_before():
    verdict = Verdict("mm", "add", Outcome.FUSED, Reason.EPILOGUE)
    assert str(verdict) == f"mm + add: fused, because {Reason.EPILOGUE.value}"
    assert verdict.named({}) is verdict
    assert str(verdict.named({"mm": "head"})).startswith("mm [head] + add: fused")
