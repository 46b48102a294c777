"""Patterns that are small programs: how they are declared, recognised in the loop IR, and computed by two plain templates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import plain_templates.attention
import plain_templates.convolution
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from kgen import contraction, errors, program, softmax
from kgen.build import triton
from kgen.device import Device
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.plan import Kernel, members
from kgen.ir.printer import print_graph, print_value
from kgen.ir.program import Program
from kgen.ir.verify import verify
from kgen.only import Only, only
from kgen.reference.evaluate import evaluate_graph
from kgen.scheduler import Options
from kgen.scheduler.selection.choose import chosen_problem
from kgen.scheduler.transforms.recognition import applied, recognised
from kgen.templates import registry
from kgen.templates.problem import Problem
from kgen.testing import Case, check_template
from kgen.testing.cases import cases, cases_of_dtype, plain
from kgen.verdict import FusionDemand, Reason
from tests.codegen import rendered
from tests.kernels import plans
from tests.op_case import lowered
from tests.template_author import load

TEMPLATES = {
    name: registry.find(name)
    for name in ("plain_attention", "plain_attention_cpp", "plain_convolution", "plain_convolution_cpp")
}
for name in TEMPLATES:  # other tests in this process must not find them
    registry.remove(name)

ATTENTION: Program = plain_templates.attention.ATTENTION.program.canonical
BACK_ENDS = [
    pytest.param("plain_attention", marks=pytest.mark.interpret),
    pytest.param("plain_attention_cpp", marks=pytest.mark.cpu),
]
CONVOLUTIONS = [
    pytest.param("plain_convolution", marks=pytest.mark.interpret),
    pytest.param("plain_convolution_cpp", marks=pytest.mark.cpu),
]


@pytest.fixture
def registered() -> Iterator[None]:
    for template in TEMPLATES.values():
        registry.add(template)
    yield
    for name in TEMPLATES:
        registry.remove(name)


def r(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


# ---- declarations ---------------------------------------------------------------------------------------------------


def test_equal_programs_have_one_key_whatever_their_names():
    other = program(s=contraction("x,q,e", "x,k,e -> x,q,k"), p=softmax("s", over="k"), o=contraction("p", "x,k,f -> x,q,f"))
    assert other.program.key == ATTENTION.key
    assert other.program.canonical == ATTENTION
    assert other.operator == plain_templates.attention.ATTENTION.operator
    turned = program(s=contraction("x,e,q", "x,k,e -> x,q,k"), p=softmax("s", over="k"), o=contraction("p", "x,k,f -> x,q,f"))
    assert turned.program.key != ATTENTION.key


BAD = {
    "unknown step": (lambda: program(s=contraction("m,d", "n,d -> m,n"), o=contraction("weights", "n,v -> m,v")), "no earlier"),
    "softmax of nothing": (lambda: program(p=softmax("s", over="n"), o=contraction("p", "n,v -> m,v")), "no earlier step s"),
    "softmax over another axis": (
        lambda: program(s=contraction("m,d", "n,d -> m,n"), p=softmax("s", over="v"), o=contraction("p", "n,v -> m,v")),
        "an axis v",
    ),
    "a step that nobody reads": (
        lambda: program(s=contraction("m,d", "n,d -> m,n"), o=contraction("m,n", "n,v -> m,v")), "needs all others",
    ),
    "a step read twice": (
        lambda: program(
            s=contraction("m,d", "n,d -> m,n"), p=softmax("s", over="n"), q=softmax("s", over="n"),
            o=contraction("p", "q -> m,n"),
        ),
        "another step has read",
    ),
    "ends in a softmax": (lambda: program(s=contraction("m,d", "n,d -> m,n"), p=softmax("s", over="n")), "the last step"),
    "window of two positions": (lambda: contraction("b,h+w", "h,k -> b,h,w,k"), "a window is"),
    "window of an operator": (lambda: kgen.operator("a::b", "b,h+r", "r,k -> b,h,k"), "no windows"),
}  # fmt: skip


@pytest.mark.parametrize("how", BAD)
def test_programs_that_do_not_hold_together_are_refused(how):
    make, message = BAD[how]
    with pytest.raises(errors.BadTemplate, match=message):
        make()


def test_a_template_has_to_apply_the_slots_of_its_program(tmp_path):
    jinja = (TEMPLATES["plain_attention"].source).read_text().replace('{{ scores.apply("s", "b", "rm", "rn") }}', "")
    (tmp_path / "attention.py.jinja").write_text(jinja)
    source = (
        (TEMPLATES["plain_attention"].source.parent / "attention.py")
        .read_text()
        .split('\n\n\n@kgen.template(implements=ATTENTION, device="cpu"')[0]
    )
    (tmp_path / "attention.py").write_text(source.replace('name="plain_attention"', 'name="forgets"'))
    with pytest.raises(errors.BadTemplate, match="never applies what is made of scores"):
        load(tmp_path / "attention.py")


# ---- recognition ----------------------------------------------------------------------------------------------------


def causal(s: Tensor) -> Tensor:
    rows, columns = torch.arange(s.shape[-2], device=s.device)[:, None], torch.arange(s.shape[-1], device=s.device)
    return s.masked_fill(columns > rows, -math.inf)


def written_out(q: Tensor, k: Tensor, v: Tensor, score: Callable[[Tensor], Tensor] = lambda s: s * 0.25) -> Tensor:
    return score(q @ k.transpose(-1, -2)).softmax(-1) @ v


def gpt2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.softmax(causal((q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])).float(), -1).type_as(q)
    return (weights @ v).transpose(1, 2).flatten(2)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.einsum("bhmd,bhnd->bhmn", q, k) * 0.3
    p = (s - s.amax(-1, keepdim=True)).exp()
    return torch.einsum("bhmn,bhnv->bhmv", p / p.sum(-1, keepdim=True), v)


def not_stable(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q @ k.mT).mul(0.1).exp()
    return (p / p.sum(-1, keepdim=True)) @ v


def of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores whose rows are keys."""
    return v.mT @ (k @ q.mT).mul(0.2).softmax(-2)


def one_matrix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return written_out(q[0, 0], k[0, 0], v[0, 0])


def few_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads of queries share those of keys."""
    k, v = (t[:, :1].expand(-1, q.shape[1], -1, -1) for t in (k, v))
    return written_out(q, k, v, causal)


def shared_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(torch.cat((q, q), 1), k, v, enable_gqa=True)


def repeated_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return written_out(torch.cat((q, q), 1), k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


def with_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores to which those of another contraction are added."""
    return ((q @ k.mT + q @ torch.ones(16, 20)) * 0.2).softmax(-1) @ v


SPELLINGS: dict[str, Callable[..., Tensor]] = {
    "written out": written_out,
    "causal": partial(written_out, score=lambda s: causal(s * 0.2)),
    "capped": partial(written_out, score=lambda s: 4 * torch.tanh(s / 4)),
    "gpt2": gpt2,
    "by hand": by_hand,
    "not stable": not_stable,
    "of keys": of_keys,
    "one matrix": one_matrix,
    "few heads": few_heads,
    "repeated heads": repeated_heads,
    "with positions": with_positions,
    "of the library": F.scaled_dot_product_attention,
    "of the library, causal": partial(F.scaled_dot_product_attention, is_causal=True, scale=0.3),
}


def inputs(values: int = 16, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [r(2, 3, 12, 16, dtype=dtype), r(2, 3, 20, 16, dtype=dtype), r(2, 3, 20, values, dtype=dtype)]


def recognised_in(f: Callable[..., Any], *args: Tensor) -> tuple[ir.Graph, list[Any]]:
    def call(*tensors: Tensor) -> Any:
        return f(*tensors)  # of as many as there are: the tracer would ask for the others

    graph = lowered(call, args)
    return graph, recognised(graph, [ATTENTION])


@pytest.mark.parametrize("values", [16, 8])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_attention_is_recognised_and_means_the_same(spelling, values):
    args = inputs(values)
    graph, found = recognised_in(SPELLINGS[spelling], *args)
    assert [type(one.operation) for one in found] == [ir.Operation], print_graph(graph)
    made = applied(graph, *found)
    before = print_graph(graph)
    verify(made, "recognition")
    left = sum(isinstance(n, ir.Contraction | ir.Reduction | ir.Attention) for n in made.nodes)
    assert left == (spelling == "with positions"), print_graph(made)
    assert print_graph(graph) == before
    for mine, theirs in zip(evaluate_graph(made, args), evaluate_graph(graph, args), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_heads_of_the_library_that_share_keys_are_recognised():
    args = inputs()
    graph, found = recognised_in(shared_heads, *args)
    assert len(found) == 1, print_graph(graph)
    torch.testing.assert_close(
        evaluate_graph(applied(graph, *found), args)[0], evaluate_graph(graph, args)[0], rtol=1e-4, atol=1e-5
    )


LAYERS = program(hidden=contraction("m,k", "k,n -> m,n"), out=contraction("hidden", "n,o -> m,o")).program.canonical


def test_programs_need_not_be_attention():
    """Two linear layers with an activation between them, a batch of which is one long axis of rows."""

    def layers(x: Tensor, w: Tensor, b: Tensor, w2: Tensor) -> Tensor:
        return F.gelu(x @ w + b) @ w2 + 1

    args = [r(3, 7, 10), r(10, 30), r(30), r(30, 5)]
    graph = lowered(layers, args)
    assert recognised(graph, [ATTENTION]) == []
    found = recognised(graph, [ATTENTION, LAYERS])
    assert [one.operation.operator for one in found] == [LAYERS.key]
    made = applied(graph, *found)
    verify(made, "recognition")
    assert sum(isinstance(n, ir.Contraction) for n in made.nodes) == 0
    torch.testing.assert_close(evaluate_graph(made, args)[0], layers(*args), rtol=1e-4, atol=1e-4)


def scores_kept(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = q @ k.mT
    return s.softmax(-1) @ v, s


def over_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-2) @ v


def another_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    p = (s - (2 * s).amax(-1, keepdim=True)).exp()
    return (p / (s - s.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)) @ v


def adjacent_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A score that reads another one."""
    s = q @ k.mT
    return (s + s.roll(1, -1)).softmax(-1) @ v


def without_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.relu(q @ k.mT) @ v


def in_float64(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).double().softmax(-1).to(v.dtype) @ v


NOT_IT = [scores_kept, over_rows, another_maximum, adjacent_keys, without_softmax, in_float64]


@pytest.mark.parametrize("f", NOT_IT, ids=lambda f: f.__name__)
def test_what_is_no_attention_is_not_recognised(f):
    assert recognised_in(f, *inputs())[1] == []


def test_operands_are_not_read_after_somebody_wrote_to_them():
    graph = recognised_in(written_out, *inputs())[0]
    name = next(one.buffer for one in graph.inputs if one.buffer is not None)
    buffer = graph.buffers[name]
    graph.buffers["newer"] = replace(buffer, name="newer", kind="intermediate", alias_of=name)
    loops = tuple(ix.var(f"w{k}", size) for k, size in enumerate(buffer.sizes))
    write = ir.Scatter("newer", name, loops, tuple(v.expr() for v in loops), vs.const(0, buffer.dtype))
    nodes = list(graph.nodes)
    last = next(k for k, n in enumerate(nodes) if isinstance(n, ir.Contraction) and k > 0)
    found = []
    for place in (last, last + 1):  # in front of the last contraction, and behind it
        graph.nodes = [*nodes[:place], write, *nodes[place:]]
        found.append(len(recognised(graph, [ATTENTION])))
    assert found == [0, 1]


def test_no_keys_are_no_attention():
    q, k, v = inputs()
    assert recognised_in(written_out, q, k[:, :, :0], v[:, :, :0])[1] == []


def test_layers_are_recognised_one_by_one():
    def layers(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            q, k, v = (x @ w).chunk(3, -1)
            x = x + written_out(q, k, v, causal)
        return x

    args = [r(2, 10, 8), r(8, 24)]
    graph, found = recognised_in(layers, *args)
    assert len(found) == 3
    made = applied(graph, *found)
    verify(made, "recognition")
    torch.testing.assert_close(evaluate_graph(made, args)[0], evaluate_graph(graph, args)[0], rtol=1e-4, atol=1e-4)


def test_graphs_without_contractions_load_no_templates(monkeypatch):
    def loaded(*_: object) -> list[Any]:
        raise AssertionError("templates are loaded")

    monkeypatch.setattr("kgen.templates.registry.programs", loaded)
    assert plans(lambda x: x.sum(-1), r(8, 9), options=Options()).forward.kernels


# ---- from end to end ------------------------------------------------------------------------------------------------


def assert_one_kernel(f: Callable[..., Any], template: str, *args: Tensor, tolerance: float = 1e-4, kernels: int = 1) -> None:
    torch._dynamo.reset()
    interpreted = TEMPLATES[template].device == "cuda"
    with only(template, lambda configs: configs[0]), kgen.config.override(gpu_interpreter=interpreted, cache=False):
        report = kgen.explain(f, *args, print_report=False)
        got = torch.compile(f, backend="kgen")(*args)
    chosen = [v for v in report.verdicts if v.reason is Reason.TEMPLATE]
    assert chosen, report
    assert all(v.detail.startswith(f"{template} ") for v in chosen), report
    assert len(report.kernels) == kernels, report
    torch.testing.assert_close(got, f(*args), rtol=tolerance, atol=tolerance, equal_nan=True)


END_TO_END = ("causal", "gpt2", "few heads", "of keys", "of the library, causal")


@pytest.mark.every(3)
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("template", BACK_ENDS)
@pytest.mark.parametrize("spelling", END_TO_END)
def test_attention_is_one_kernel(spelling, template):
    assert_one_kernel(SPELLINGS[spelling], template, *inputs())


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("template", BACK_ENDS)
def test_masks_biases_and_rows_without_keys_follow_eager(template):
    q, k, v = inputs(dtype=torch.bfloat16)
    mask = r(12, 20) > 0
    mask[3] = False  # the library gives zeros
    assert_one_kernel(F.scaled_dot_product_attention, template, q, k, v, mask, tolerance=2e-2)
    q, k, v = inputs()
    masked = partial(written_out, score=lambda s: s.masked_fill(~mask, -math.inf))  # written out they are NaN
    assert_one_kernel(masked, template, q, k, v)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("template", BACK_ENDS)
def test_everything_around_attention_is_fused(template):
    def block(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
        made = written_out(F.relu(q) * 0.5, k, v, lambda s: s * 0.2 + bias)
        return (made * torch.sigmoid(gate)).transpose(1, 2).contiguous()

    assert_one_kernel(block, template, *inputs(), r(3, 12, 20), r(2, 3, 12, 16))


@pytest.mark.usefixtures("registered")
@pytest.mark.cpu
def test_without_a_template_that_takes_it_the_nodes_stay():
    q, k, v = inputs()
    with only("matmul_cpp", lambda configs: configs[0]), kgen.config.override(cache=False):
        report = kgen.explain(written_out, q, k, v, print_report=False)
    assert any(v.reason is Reason.NO_TEMPLATE for v in report.verdicts)
    torch._dynamo.reset()
    with kgen.config.override(cache=False, numerics="stable"):
        torch.testing.assert_close(torch.compile(written_out, backend="kgen")(q, k, v), written_out(q, k, v))


@pytest.mark.usefixtures("registered")
def test_what_the_user_keeps_apart_is_no_program():
    options = Options(cpu=Device("cpu", isa="generic"), only=Only("plain_attention_cpp", lambda configs: configs[0]))
    assert len(plans(written_out, *inputs(), options=options).forward.kernels) == 1
    apart = FusionDemand("aten.bmm", "aten.exp", wanted=False)
    plan = plans(written_out, *inputs(), options=replace(options, demands=(apart,))).forward
    assert all(k.choice is None for step in plan.kernels for k in members(step))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("template", CONVOLUTIONS)
def test_a_convolution_is_one_kernel(template):
    def stem(x: Tensor, w: Tensor, b: Tensor, gain: Tensor) -> Tensor:
        return F.relu(F.conv2d(x * gain, w, b, stride=(2, 1), padding=(1, 2), dilation=(1, 2)))

    assert_one_kernel(stem, template, r(2, 5, 9, 11), r(7, 5, 3, 2), r(7), r(5, 1, 1))
    assert_one_kernel(lambda x, w: F.conv1d(x, w, padding=1), template, r(2, 5, 11), r(7, 5, 3))


@pytest.mark.usefixtures("registered")
@pytest.mark.cpu
def test_what_is_read_in_no_windows_is_refused():
    q, k, _ = inputs()
    with only("plain_convolution_cpp", lambda configs: configs[0]), kgen.config.override(cache=False):
        report = kgen.explain(lambda q, k: q @ k.mT, q, k, print_report=False)
    assert any("in such windows" in v.detail for v in report.verdicts)


# ---- the conformance kit --------------------------------------------------------------------------------------------


def some(name: str, every: int, begin: int) -> Iterator[Case]:
    template = TEMPLATES[name]
    yield plain(template, torch.bfloat16)
    yield from list(cases(template))[begin::every]
    yield from list(cases_of_dtype(template, torch.bfloat16))[begin::9]


@pytest.mark.every(3)
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("name", "every"), [
    pytest.param("plain_attention", 31, marks=pytest.mark.interpret),
    pytest.param("plain_attention_cpp", 31, marks=pytest.mark.cpu),
    pytest.param("plain_convolution", 49, marks=pytest.mark.interpret),
    pytest.param("plain_convolution_cpp", 31, marks=pytest.mark.cpu),
])  # fmt: skip
def test_plain_templates_conform(name, every):
    report = check_template(TEMPLATES[name], problems=some(name, every, 3), configs=1, device="cpu")
    assert len(report.refused) <= 1, str(report)


@pytest.mark.slow
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.cpu if t.device == "cpu" else pytest.mark.interpret) for name, t in TEMPLATES.items()
])  # fmt: skip
def test_plain_templates_conform_to_everything(name):
    report = check_template(TEMPLATES[name], configs=2, device="cpu")
    assert len(report.refused) <= 2, str(report)


# ---- what a template is told, sizes at run time, and a GPU's compiler ------------------------------------------------------

MASKS: dict[str, tuple[Callable[..., Tensor], str | None]] = {
    "where": (lambda q, k, v: written_out(q, k, v, causal), "not t"),
    "added": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), "le t"),
    "none": (written_out, None),
}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("how", MASKS)
def test_a_template_is_told_the_mask(how):
    function, condition = MASKS[how]
    options = Options(cpu=Device("cpu", isa="generic"), only=Only("plain_attention_cpp", lambda configs: configs[0]))
    plan = plans(function, *inputs(8), options=options).forward
    kernel = next(step for step in plan.kernels if isinstance(step, Kernel) and step.choice is not None)
    middle = chosen_problem(kernel, plan.graph, options.cpu).middles["scores"]
    assert (middle.axes, middle.normalised) == (("b", "m", "n"), "n")
    assert (middle.mask is None) == (condition is None)
    if condition is not None and middle.mask is not None:
        assert condition in print_value(middle.mask).splitlines()[-1]
        assert len(middle.mask.variables()) == 2


@pytest.mark.cpu
@pytest.mark.usefixtures("registered")
def test_lengths_that_are_sums_stay_one_factor():
    """Each is a difference where sizes are symbols: ``B * H`` in the author's text was ``B * 1 + s0 - s1``."""
    found = [case for case in cases(TEMPLATES["plain_convolution_cpp"]) if case.dynamic][:2]
    report = check_template(TEMPLATES["plain_convolution_cpp"], problems=found, configs=1, device="cpu")
    assert len(report.passed) == len(found), str(report)


def problem_of_convolution(x: Tensor, w: Tensor, **how: Any) -> Problem:
    """As the template in C++ sees it."""
    options = Options(cpu=Device("cpu", isa="generic"), only=Only("plain_convolution_cpp", lambda configs: configs[0]))
    plan = plans(lambda x, w: F.conv2d(x, w, **how), x, w, options=options).forward
    [kernel] = plan.kernels
    assert isinstance(kernel, Kernel)
    return chosen_problem(kernel, plan.graph, options.cpu)


@pytest.mark.usefixtures("registered")
def test_windows_have_their_axes_and_steps():
    last = torch.channels_last  # taps and channels then lie in memory as one loop
    x, w = r(2, 6, 9, 11).to(memory_format=last), r(8, 6, 3, 2).to(memory_format=last)
    problem = problem_of_convolution(x, w, stride=(2, 1), dilation=(1, 3), padding=1)
    assert [problem.size(axis) for axis in "bhwrsck"] == [2, 5, 10, 3, 2, 6, 8]
    assert [problem.step(axis) for axis in "hwrs"] == [2, 1, 1, 3]
    row = problem_of_convolution(x, w[:, :, :1])
    assert [row.size(axis) for axis in "bhwrsck"] == [18, 1, 10, 1, 2, 6, 8]


KERNELS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "plain_attention": (
        lambda q, k, v, bias: written_out(q, k, v, lambda s: causal(s * 0.1 + bias)).transpose(1, 2).contiguous(),
        tuple(t.to(torch.bfloat16) for t in (r(2, 4, 70, 32), r(2, 4, 50, 32), r(2, 4, 50, 40), r(4, 70, 50))),
    ),
    "plain_convolution": (
        lambda x, w: F.conv2d(x, w, padding=1, stride=2).relu(),
        tuple(t.to(torch.bfloat16) for t in (r(2, 32, 20, 20), r(48, 32, 3, 3))),
    ),
}


@pytest.mark.ptx
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", KERNELS)
def test_plain_templates_compile_for_a_gpu(name):
    """The interpreter lets a variable change its type in a loop."""
    function, args = KERNELS[name]
    options = Options(gpu_everywhere=True, only=Only(name, lambda configs: configs[0]))
    plan = plans(function, *args, options=options).forward
    [kernel] = plan.kernels
    launch = rendered(kernel, plan, "kernel", options).launch
    [made] = triton.compile_kernels([launch], 90)
    assert made.stack == 0
