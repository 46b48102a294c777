"""Log-sum-exps as second results of programs: how they are declared, found in graphs, and stored by the program's kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kgen
from kgen import contraction, errors, program, softmax
from kgen.ir import nodes as ir
from kgen.ir.printer import print_graph
from kgen.ir.verify import verify
from kgen.only import only
from kgen.reference.evaluate import evaluate_graph
from kgen.scheduler.transforms.recognition import Recognised, applied, recognised
from kgen.templates import registry
from kgen.testing import Case, check_template
from kgen.testing.cases import cases
from kgen.verdict import Reason
from tests.op_case import lowered
from tests.scheduler.transforms.test_programs import ATTENTION, BACK_ENDS, SPELLINGS, TEMPLATES, causal, inputs, r
from tests.template_author import load

WITHOUT = program(
    scores=contraction("b,m,d", "b,n,d -> b,m,n"),
    weights=softmax("scores", over="n"),
    out=contraction("weights", "b,n,v -> b,m,v"),
).program.canonical


@pytest.fixture
def registered():
    for template in TEMPLATES.values():
        registry.add(template)
    yield
    for name in TEMPLATES:
        registry.remove(name)


# ---- declarations ---------------------------------------------------------------------------------------------------


def test_programs_with_and_without_a_second_result_are_equal():
    assert ATTENTION.key == WITHOUT.key
    assert [step.rows for step in ATTENTION.seconds] == [("a", "b")]
    assert WITHOUT.seconds == ()


@pytest.mark.usefixtures("registered")
def test_graphs_are_searched_for_what_some_template_stores():
    [found] = [one for one in registry.programs("cpu") if one.key == ATTENTION.key]
    assert found.seconds


def test_a_template_has_to_store_what_it_declares(tmp_path):
    folder = TEMPLATES["plain_attention"].source.parent
    text = (folder / "attention.py.jinja").read_text()
    (tmp_path / "attention.py.jinja").write_text(text[: text.index("{% if L.")] + text[text.index("{% if weights.") :])
    source = (folder / "attention.py").read_text().split('\n\n\n@kgen.template(implements=ATTENTION, device="cpu"')[0]
    (tmp_path / "attention.py").write_text(source.replace('name="plain_attention"', 'name="forgets"'))
    with pytest.raises(errors.BadTemplate, match="never stores L, the log-sum-exp of weights"):
        load(tmp_path / "attention.py")


# ---- recognition ----------------------------------------------------------------------------------------------------


def searched(f: Callable[..., Any], *args: Tensor) -> tuple[ir.Graph, list[Recognised]]:
    def call(*tensors: Tensor) -> Any:
        return f(*tensors)

    graph = lowered(call, args)
    return graph, recognised(graph, [ATTENTION])


def of_torch(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = causal(q @ k.mT * 0.3)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = q @ k.mT * 0.3
    top = s.amax(-1, keepdim=True)
    p = (s - top).exp()
    total = p.sum(-1, keepdim=True)
    return (p / total) @ v, (top + total.log()).squeeze(-1)


def not_stable(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = (q @ k.mT * 0.1).exp()
    return (p / p.sum(-1, keepdim=True)) @ v, p.sum(-1).log()


def made_of_it(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Elementwise work and a reduction."""
    s = q @ k.mT
    lse = s.logsumexp(-1)
    return s.softmax(-1) @ v, lse * 1.5 + 1, (lse**2).sum(-1)


def before_the_values(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = q @ k.mT
    lse = s.logsumexp(-1).exp()
    return s.softmax(-1) @ (v * 2).relu(), lse


def of_one_matrix(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return of_torch(q[0, 0], k[0, 0], v[0, 0])


def of_the_result(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Both results meet again behind the kernel."""
    s = q @ k.mT
    return (s.softmax(-1) @ v) * s.logsumexp(-1, keepdim=True)


def kept_axis(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """It has a further axis of one element."""
    s = q @ k.mT
    top = s.amax(-1, keepdim=True)
    lse = top + (s - top).exp().sum(-1, keepdim=True).log()
    return s.softmax(-1) @ v, lse * 2


FOUND = [of_torch, by_hand, not_stable, made_of_it, before_the_values, of_one_matrix, of_the_result, kept_axis]


def results(graph: ir.Graph, args: list[Tensor]) -> list[Tensor]:
    return list(evaluate_graph(graph, args))


@pytest.mark.parametrize("f", FOUND, ids=lambda f: f.__name__)
def test_whoever_reads_it_reads_what_the_program_makes(f):
    args = inputs()
    graph, found = searched(f, *args)
    before = print_graph(graph)
    assert [len(one.operation.seconds) for one in found] == [1], before
    made = applied(graph, *found)
    verify(made, "recognition")
    assert not any(isinstance(n, ir.Contraction) for n in made.nodes), print_graph(made)
    assert print_graph(graph) == before
    for mine, theirs in zip(results(made, args), results(graph, args), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_nobody_reads_it():
    [found] = searched(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *inputs())[1]
    assert found.operation.seconds == ()


def of_the_library(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=0.3)


@pytest.mark.parametrize("masked", [False, True])
def test_the_library_s_log_sum_exp_is_one(masked):
    mask = r(12, 20).masked_fill(r(12, 20) > 0, -math.inf)
    mask[3] = -math.inf
    args = [*inputs(), *([mask] if masked else [])]
    graph, found = searched(of_the_library, *args)
    assert [len(one.operation.seconds) for one in found] == [1], print_graph(graph)
    made = applied(graph, *found)
    verify(made, "recognition")
    assert [type(node) for node in made.nodes] == [ir.Operation]
    made.nodes = [ir.replace(made.nodes[0], vendor=None)]
    for mine, theirs in zip(results(made, args), of_the_library(*args), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def of_other_scores(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = q @ k.mT
    return s.softmax(-1) @ v, (2 * s).logsumexp(-1)


def of_columns(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = q @ k.mT
    return s.softmax(-1) @ v, s.logsumexp(-2)


def needed_by_the_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q[:, :, :, :16] @ k[:, :, :12].mT
    return s.softmax(-1) @ (v[:, :, :12] + s.logsumexp(-1, keepdim=True))


def maximum_kept(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = q @ k.mT
    return s.softmax(-1) @ v, s.amax(-1)


NOT_IT = [of_other_scores, of_columns, needed_by_the_values, maximum_kept]


@pytest.mark.parametrize("f", NOT_IT, ids=lambda f: f.__name__)
def test_what_is_no_log_sum_exp_of_these_rows_keeps_the_scores(f):
    graph, found = searched(f, *inputs())
    assert found == [], print_graph(graph)


def test_a_template_that_does_not_store_it_is_not_asked_to():
    graph, _ = searched(of_torch, *inputs())
    near: list[Any] = []
    assert recognised(graph, [WITHOUT], near) == []
    assert [verdict.reason for verdict in near] == [Reason.NEEDED]


# ---- kernels --------------------------------------------------------------------------------------------------------


def check_kernels(f: Callable[..., Any], template: str, args: list[Tensor], kernels: int) -> None:
    torch._dynamo.reset()
    interpreted = TEMPLATES[template].device == "cuda"
    with only(template, lambda configs: configs[0]), kgen.config.override(gpu_interpreter=interpreted, cache=False):
        report = kgen.explain(f, *args, print_report=False)
        got = torch.compile(f, backend="kgen")(*args)
    assert len(report.kernels) == kernels, report
    for mine, theirs in zip(got, f(*args), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


def first_masked(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    s = (q @ k.mT).masked_fill(torch.arange(q.shape[-2])[:, None] == 0, -math.inf)
    top = s.amax(-1)
    return s.softmax(-1) @ v, s.logsumexp(-1), top + (s - top[..., None]).exp().sum(-1).log()


def moved(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    made, lse = of_torch(q, k, v)
    return made.transpose(1, 2).flatten(2).relu(), lse


@pytest.mark.every(3)
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("template", BACK_ENDS)
@pytest.mark.parametrize(
    ("f", "kernels"), [(of_torch, 1), (made_of_it, 2), (moved, 1), (first_masked, 1), (of_the_result, 2), (kept_axis, 1)]
)
def test_one_kernel_makes_both(f, kernels, template):
    check_kernels(f, template, inputs(), kernels)


@pytest.mark.usefixtures("registered")
@pytest.mark.cpu
def test_the_library_s_backward_reads_it():
    call = SPELLINGS["of the library, causal"]
    args = [t.requires_grad_() for t in inputs()]
    want = torch.autograd.grad(call(*args).square().sum(), args)
    torch._dynamo.reset()
    with only("plain_attention_cpp", lambda configs: configs[0]), kgen.config.override(cache=False):
        report = kgen.explain(call, *args, print_report=False)
        got = torch.autograd.grad(torch.compile(call, backend="kgen")(*args).square().sum(), args)
    assert len(report.graphs[0].kernels) == 1, report
    assert any("plain_attention_cpp" in v.detail for v in report.verdicts), report
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


# ---- the conformance kit --------------------------------------------------------------------------------------------


def both(name: str) -> list[Case]:
    return [case for case in cases(TEMPLATES[name]) if case.kind == "second result"]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("template", BACK_ENDS)
def test_the_kit_checks_second_results(template):
    found = both(template)
    assert len(found) >= 6
    some = found[:: 2 if template.endswith("cpp") else 4]
    report = check_template(TEMPLATES[template], problems=some, configs=1, device="cpu")
    assert not report.refused, str(report)
