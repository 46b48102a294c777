"""The contract with AOTAutograd, with every operator in eager (`fallback="all"`): what capture alone must get right."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

import kgen
from kgen import backend
from kgen.backend import kgen_backend
from kgen.capture import torch_adapter
from kgen.capture.aot_cache import NotSerializable
from kgen.capture.eager_graph import EagerGraph
from kgen.capture.rng import KINDS, _philox
from kgen.capture.torch_adapter import GraphInfo
from kgen.config import Config
from kgen.counters import counters
from kgen.reference.evaluate_value import RANDOM

pytestmark = pytest.mark.none

EAGER = {"fallback": "all", "cache": False}


def compiled(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=kgen_backend, options={**EAGER, **settings.pop("options", {})}, **settings)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[GraphModule, GraphInfo]]:
    """The graphs that reach the back end."""
    graphs: list[tuple[GraphModule, GraphInfo]] = []
    run_eagerly = backend.run_eagerly

    def look(gm: GraphModule, info: GraphInfo, config: Config) -> Any:
        graphs.append((gm, info))
        return run_eagerly(gm, info, config)

    monkeypatch.setattr(backend, "run_eagerly", look)
    return graphs


def same(actual: Any, expected: Any) -> None:
    """Equal values, shapes and strides."""
    actual, expected = torch.utils._pytree.tree_leaves(actual), torch.utils._pytree.tree_leaves(expected)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        if isinstance(e, Tensor):
            torch.testing.assert_close(a, e)
            assert a.stride() == e.stride()
        else:
            assert (type(a), a) == (type(e), e)


def check(function: Callable[..., Any], *inputs: Any) -> None:
    """Twice forward, and backward when an input wants gradients, on copies of the inputs; mutated inputs are compared too."""
    run = compiled(function, fullgraph=True)
    for _ in range(2):
        results = []
        for call in (function, run):
            given = [copied(x) for x in inputs]
            torch.manual_seed(3)
            out = call(*given)
            leaves = [o for o in torch.utils._pytree.tree_leaves(out) if isinstance(o, Tensor) and o.requires_grad]
            if leaves:
                sum((o.float() * torch.arange(1, o.numel() + 1).reshape(o.shape)).sum() for o in leaves).backward()
            results.append((out, given, [x.grad for x in given if isinstance(x, Tensor)]))
        same(results[1], results[0])


def copied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if 0 in value.stride():
        return value  # an expanded tensor cannot be written to; nothing mutates it
    whole = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return whole.copy_(value.detach()).requires_grad_(value.requires_grad)


def leaf(*sizes: int) -> Tensor:
    return torch.randn(*sizes, requires_grad=True)


# ---- inference ---------------------------------------------------------------------------------------------------------


def test_outputs_that_are_inputs_views_and_each_other() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        return x, x.t(), x[1:], y, y.view(-1), y

    check(f, torch.randn(3, 4))
    x = torch.randn(3, 4)
    out = compiled(f)(x)
    assert out[0] is x
    assert out[1].data_ptr() == x.data_ptr()
    assert out[4].data_ptr() == out[3].data_ptr()
    assert out[5] is out[3]


def test_input_mutation() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        x[0] = 7.0
        y.t().mul_(2.0)
        return x * y

    check(f, torch.randn(3, 3), torch.randn(3, 3))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_backward_reads_what_stood_in_a_counter_when_forward_read_it(dtype: torch.dtype) -> None:
    def f(x: Tensor, n: Tensor) -> Tensor:
        with torch.no_grad():
            n.add_(1)
        y = x.sin() + n  # backward computes it again
        with torch.no_grad():
            n.mul_(3)
        return y.cos() + n

    def gradient(call: Callable[..., Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        x, n = x.clone().requires_grad_(), torch.zeros((), dtype=dtype)
        call(x, n).sum().backward()
        assert x.grad is not None
        return x.grad, n

    x = torch.randn(7, dtype=torch.float64)
    same(gradient(compiled(f), x), gradient(f, x))


def test_statistics_that_no_gradient_needs_are_not_copied(seen: list[Any]) -> None:
    norm = nn.BatchNorm1d(3)
    compiled(norm)(torch.randn(4, 3)).sum().backward()
    forward = next(gm for gm, info in seen if info.role == "forward")
    assert not forward.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)


def test_inference_mutations_stay_in_the_graph(seen: list[Any]) -> None:
    def f(x: Tensor) -> Tensor:
        return x.add_(1).sum()

    with torch.no_grad():
        compiled(f)(torch.zeros(4))
    gm, info = seen[0]
    assert info.role == "inference"
    assert gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)


def test_mutation_through_two_views_of_one_storage() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return x + y

    run = compiled(f)
    for call in (f, run):
        base = torch.arange(6.0)
        torch.testing.assert_close(call(base[:4], base[2:]), torch.tensor([4.0, 8.0, 8.0, 11.0]))


def test_strides_of_outputs() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x + 1, functional.conv2d(x, torch.ones(2, 3, 1, 1)), x.permute(0, 2, 3, 1).contiguous(), x.sum(1)

    check(f, torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    check(f, torch.randn(2, 3, 4, 5))


def test_non_contiguous_inputs_of_many_kinds() -> None:
    def f(*xs: Tensor) -> list[Tensor]:
        return [x * 2 for x in xs]

    base = torch.randn(4, 6, 8)
    check(f, base.transpose(0, 2), base[:, ::2], base[1], base[..., 3], torch.randn(1, 5).expand(3, 5), torch.randn(0, 3))


def test_results_that_are_not_tensors() -> None:
    def f(x: Tensor, n: int, s: str) -> tuple[Any, ...]:
        return x + n, n + 1, None, s, x.shape[0], torch.tensor(2.0) * x

    check(f, torch.randn(3), 4, "a")


def test_static_inputs_are_parameters_and_buffers(seen: list[Any]) -> None:
    m = nn.BatchNorm1d(4)
    compiled(m)(torch.randn(8, 4)).sum().backward()
    (forward, info), (_, backward) = seen
    assert (info.role, backward.role) == ("forward", "backward")
    names = [n.name for n in forward.graph.find_nodes(op="placeholder")]
    sizes = [forward.graph.find_nodes(op="placeholder")[i].meta["val"].shape for i in info.static_inputs]
    assert len(info.static_inputs) == len(names) - 1
    assert torch.Size([8, 4]) not in sizes


# ---- training ----------------------------------------------------------------------------------------------------------


def test_training() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = functional.gelu(x @ w)
        return functional.layer_norm(h, (5,)), h.t()

    check(f, leaf(4, 3), leaf(3, 5))


def test_training_with_mutation_aliases_and_views() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        y.mul_(2.0)
        z = x * y
        return z, z[1:], y, z.exp()

    check(f, leaf(3, 4), torch.randn(3, 4))


def test_batch_norm_updates_its_buffers() -> None:
    torch.manual_seed(0)
    a, b = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    run = compiled(b)
    for _ in range(3):
        x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
        same(run(x), a(x))
    same(dict(b.named_buffers()), dict(a.named_buffers()))
    a.eval(), b.eval()
    same(run(x), a(x))


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 5)
            self.head = nn.Linear(5, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return functional.cross_entropy(self.head(self.embed(ids).tanh()), ids)

    torch.manual_seed(0)
    m = Tied()
    ids = torch.randint(7, (6,))
    gradients = []
    for call in (m, compiled(m)):
        m.zero_grad()
        call(ids).backward()
        gradients.append(m.embed.weight.grad.clone())
    same(gradients[1], gradients[0])


def test_retain_graph_and_two_forwards_before_backward() -> None:
    run = compiled(lambda x: (x * x).sin())
    x, y = leaf(5), leaf(5)
    a, b = run(x), run(y)
    b.sum().backward()
    a.sum().backward(retain_graph=True)
    a.sum().backward()
    same(x.grad, 2 * (2 * x * (x * x).cos()).detach())
    same(y.grad, (2 * y * (y * y).cos()).detach())


def test_no_grad_and_grad_are_two_graphs(seen: list[Any]) -> None:
    run = compiled(lambda x: x.sin())
    x = leaf(4)
    with torch.no_grad():
        assert not run(x).requires_grad
    run(x).sum().backward()
    assert [info.role for _, info in seen] == ["inference", "forward", "backward"]


def test_boxed_calls_free_saved_tensors() -> None:
    """The list of arguments is emptied, so that what backward needs dies while it runs."""
    graph = EagerGraph(torch.fx.symbolic_trace(lambda x: (torch.sin(x),)), ())
    args = [torch.ones(2)]
    graph(args)
    assert args == []


# ---- symbolic sizes ----------------------------------------------------------------------------------------------------


def test_dynamic_sizes_compile_twice(seen: list[Any]) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return functional.softmax((x @ w).view(-1), 0) * x.shape[0]

    run = compiled(f)
    for n in (3, 5, 9, 12):
        x, w = leaf(n, 4), leaf(4, 6)
        y = run(x, w)
        same(y, f(x, w))
        y.square().sum().backward()
        got, x.grad = x.grad, None
        f(x, w).square().sum().backward()
        same(got, x.grad)
    assert [info.role for _, info in seen].count("forward") == 2
    assert [info.role for _, info in seen].count("backward") == 2


def test_marked_dynamic_compiles_once_and_saves_sizes(seen: list[Any]) -> None:
    def f(x: Tensor) -> Tensor:
        return (x.t().sin() @ x).mean(0) * x.shape[1]

    run = compiled(f)
    for n in (3, 8, 5):
        x = leaf(2, n)
        torch._dynamo.mark_dynamic(x, 1)
        y = run(x)
        same(y, f(x))
        y.sum().backward()
        got, x.grad = x.grad, None
        f(x).sum().backward()
        torch.testing.assert_close(got, x.grad)
    roles = [info.role for _, info in seen]
    assert (roles.count("forward"), roles.count("backward")) == (1, 1)
    bw = next(gm for gm, info in seen if info.role == "backward")
    assert any(isinstance(n.meta["val"], torch.SymInt) for n in bw.graph.find_nodes(op="placeholder"))
    assert all(info.shape_env is not None for _, info in seen)


def test_symbolic_results() -> None:
    run = compiled(lambda x: (x + 1, x.shape[0] * 2, x.numel()), dynamic=True)
    for n in (4, 7):
        out = run(torch.zeros(n, 3))
        assert out[1:] == (2 * n, 3 * n)


def test_sizes_that_depend_on_data() -> None:
    run = compiled(lambda x: x[x > 0].sum() + x.nonzero().shape[0])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        x = torch.randn(20)
        same(run(x), x[x > 0].sum() + 20)


# ---- layouts of saved tensors ------------------------------------------------------------------------------------------


class Transposing(EagerGraph):
    """A back end that keeps matrices saved for backward in the other order."""

    def __init__(self, gm: GraphModule, info: GraphInfo) -> None:
        strides = list(torch_adapter.output_strides(gm))
        values = torch_adapter.output_values(gm)
        placeholders = set(gm.graph.find_nodes(op="placeholder"))
        results = gm.graph.output_node().args[0]
        free = [i for i, v in enumerate(values) if i not in info.user_visible and isinstance(v, Tensor) and v.dim() == 2]
        self.turned = [i for i in free if results[i] not in placeholders]
        for i in self.turned:
            strides[i] = (1, values[i].shape[0])
        super().__init__(gm, tuple(strides))

    def __call__(self, args: list[Any]) -> Any:
        out = list(super().__call__(args))
        for i in self.turned:
            out[i] = out[i].t().contiguous().t()
        return out


def test_backward_gets_the_strides_that_forward_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    turned, strides = [], []
    run_eagerly = backend.run_eagerly

    def stage(gm: GraphModule, info: GraphInfo, config: Config) -> Any:
        if info.role != "forward":
            strides.extend(n.meta["val"].stride() for n in gm.graph.find_nodes(op="placeholder"))
            return run_eagerly(gm, info, config)
        graph = Transposing(gm, info)
        turned.extend(graph.turned)
        return graph

    monkeypatch.setattr(backend, "run_eagerly", stage)

    def f(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).view(-1).exp().view(3, 4) @ w.t()).sin()

    check(f, leaf(3, 5), leaf(5, 4))
    assert turned
    assert (1, 3) in strides


# ---- what is saved for backward -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_divided_by_its_norm_is_computed_again(seen: list[Any], dtype: torch.dtype) -> None:
    """Backward gets the operand and the norms of its rows, and no second tensor as large as the operand."""
    x, w = (torch.randn(6, 40, dtype=dtype, requires_grad=True) for _ in range(2))
    loss = compiled(lambda x, w: (functional.normalize(x, dim=-1) * w).sum(-1))(x, w)
    torch.autograd.grad(loss.sum(), (x, w))
    _, bw = (gm for gm, _ in seen)
    large = [n.name for n in bw.graph.find_nodes(op="placeholder") if n.meta["val"].numel() == x.numel()]
    assert len(large) == 2, large
    assert all(name.startswith("primals") for name in large)


def test_what_is_stacked_is_computed_again(seen: list[Any]) -> None:
    """Backward of a log-sum-exp of two stacked tensors gets what they are made of, not them or their exponentials."""
    x, y = leaf(6, 40), torch.randn(6, 40)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        s, t = functional.log_softmax(x / 0.9, -1), functional.log_softmax(y / 0.9, -1)
        mixture = torch.logsumexp(torch.stack([s - 0.1, t - 2.3]), 0)
        return ((s.exp() * (s - mixture)).sum(-1) + (t.exp() * (t - mixture)).sum(-1)).sum()

    compiled(loss)(x, y).backward()
    _, bw = (gm for gm, _ in seen)
    large = [n.name for n in bw.graph.find_nodes(op="placeholder") if n.meta["val"].numel() >= x.numel()]
    assert large == ["primals_1", "primals_2"], large


@pytest.mark.parametrize("name", ["cat", "flip", "roll", "embedding", "unfold", "repeat"])
def test_what_is_only_read_elsewhere_is_computed_again(seen: list[Any], name: str) -> None:
    """What moves elements is not saved: backward reads what it moves."""
    moves: dict[str, Callable[[Tensor], Tensor]] = {
        "cat": lambda x: torch.cat([x, x * 2], -1),
        "flip": lambda x: x.flip(-1),
        "roll": lambda x: x.roll(2, -1),
        "embedding": lambda x: functional.embedding(torch.arange(6).repeat(4), x),
        "unfold": lambda x: x.unfold(-1, 4, 2),
        "repeat": lambda x: x.repeat(3, 2),
    }
    x = leaf(6, 40)
    wanted = torch.autograd.grad((moves[name](x).sin() ** 2).sum(), x)
    got = torch.autograd.grad((compiled(lambda x: moves[name](x).sin() ** 2)(x)).sum(), x)
    torch.testing.assert_close(got, wanted)
    _, bw = (gm for gm, _ in seen)
    given = [n.name for n in bw.graph.find_nodes(op="placeholder") if n.meta["val"].is_floating_point()]
    assert given == ["primals_1", "tangents_1"]


def test_the_partitioner_forgets_norms_again() -> None:
    from torch._functorch import partitioners

    before = partitioners.get_default_op_list

    def fail() -> None:
        with torch_adapter._more_fuses():
            assert torch.ops.aten.linalg_vector_norm in partitioners.get_default_op_list().fusible_ops
            raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        fail()
    assert partitioners.get_default_op_list is before


# ---- random numbers ----------------------------------------------------------------------------------------------------


def test_dropout_saves_seeds_not_masks(seen: list[Any]) -> None:
    run = compiled(lambda x: functional.dropout(functional.dropout(x, 0.5).sin(), 0.25))
    x = leaf(64, 64)
    torch.manual_seed(1)
    y = run(x)
    y.sum().backward()
    assert 0.3 < (y != 0).float().mean() < 0.45
    assert torch.equal(y != 0, x.grad != 0)
    torch.manual_seed(1)
    assert torch.equal(run(x), y)
    assert not torch.equal(run(x), y)
    forward, bw = (gm for gm, _ in seen)
    assert len(forward.graph.find_nodes(op="call_function", target=torch.ops.kgen.seeds.default)) == 1
    assert not bw.graph.find_nodes(op="call_function", target=torch.ops.kgen.seeds.default)
    assert len(bw.graph.find_nodes(op="call_function", target=torch.ops.kgen.rand.default)) == 2
    saved = [n.meta["val"] for n in bw.graph.find_nodes(op="placeholder")]
    assert torch.bool not in [v.dtype for v in saved]
    assert [v.shape for v in saved if v.dtype == torch.int64] == [torch.Size([2])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("rate", [0.002, 0.01, 0.1])
def test_dropout_drops_as_often_as_said(rate: float, dtype: torch.dtype) -> None:
    """Of numbers with few bits as well, whose own random numbers have few values."""
    x = torch.ones(1 << 20, dtype=dtype, requires_grad=True)
    torch.manual_seed(2)
    y = compiled(lambda x: functional.dropout(x, rate))(x)
    y.sum().backward()
    dropped = int((y == 0).sum())
    expected = rate * x.numel()
    assert abs(dropped - expected) < 5 * expected**0.5
    assert torch.equal(y != 0, x.grad != 0)
    assert y.max() == (torch.ones(1, dtype=dtype) * (1 / (1 - rate))).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_small_chances_are_as_likely_as_they_are_large(dtype: torch.dtype) -> None:
    n = 1 << 20
    with torch.no_grad():
        made = compiled(lambda x: torch.rand_like(x) + 0)(torch.empty(n, dtype=dtype))
    assert made.max() < 1
    for chance in (0.002, 0.01, 0.1):
        assert abs(int((made.double() < chance).sum()) - chance * n) < 5 * (chance * n) ** 0.5 + 0.002 * chance * n
    assert abs(made.double().mean() - 0.5) < 0.002


def test_distributions(seen: list[Any]) -> None:
    n = 4000

    def f(x: Tensor) -> dict[str, Tensor]:
        return {
            "rand": torch.rand(n),
            "rand64": torch.rand(n, dtype=torch.float64),
            "rand16": torch.rand(n, dtype=torch.bfloat16),
            "randn": torch.randn(n),
            "randint": torch.randint(2, 9, (n,)),
            "bernoulli": torch.bernoulli(torch.full((n,), 0.3)),
            "uniform": torch.empty(n).uniform_(2, 3),
            "normal": torch.empty(n).normal_(1, 2),
            "exponential": torch.empty(n).exponential_(2.0),
            "geometric": torch.empty(n).geometric_(0.25),
            "like": torch.rand_like(x),
        }

    x = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    with torch.no_grad():
        out, eager = compiled(f)(x), f(x)
    mean = {"randint": 5.0, "bernoulli": 0.3, "uniform": 2.5, "normal": 1.0, "exponential": 0.5, "geometric": 4.0, "randn": 0.0}
    for name, t in out.items():
        assert (t.dtype, t.stride()) == (eager[name].dtype, eager[name].stride())
        assert abs(t.double().mean() - mean.get(name, 0.5)) < 0.25
        assert name[:4] != "rand" or t.max() < (9 if name == "randint" else 1 if name != "randn" else 9)
    left = {str(node.target) for node in seen[0][0].graph.nodes}
    assert not left & {"aten.rand.default", "aten.randn.default", "aten.bernoulli.default", "aten.rand_like.default"}


def test_philox_known_answers() -> None:
    """From the Random123 distribution's kat_vectors, philox4x32 with 10 rounds."""
    zero = _philox(torch.tensor(0), torch.tensor([0]))
    assert [hex(int(r)) for r in zero] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


@pytest.mark.parametrize("kind", list(KINDS))
def test_reference_of_random_numbers(kind: str) -> None:
    """What runs in eager is what the evaluator, and so every kernel, computes."""
    seeds = torch.tensor([3, -(2**62) - 5])
    made = torch.ops.kgen.rand([5, 7], seeds, 1, kind, KINDS[kind])
    want = RANDOM[kind](seeds[1], torch.arange(35)).reshape(5, 7)
    torch.testing.assert_close(made, want, rtol=1e-5 if kind == "randn" else 0, atol=1e-6 if kind == "randn" else 0)


# ---- operators that order or contain others ----------------------------------------------------------------------------


def test_higher_order_operators() -> None:
    def f(flag: Tensor, x: Tensor) -> Tensor:
        return torch.cond(flag, lambda x: x.sin(), lambda x: x.cos() + 1, (x,)) * 2

    check(f, torch.tensor(True), torch.randn(4))
    check(f, torch.tensor(False), torch.randn(4))


def test_effects_run_in_order(capfd: pytest.CaptureFixture[str], seen: list[Any]) -> None:
    def f(x: Tensor) -> Tensor:
        torch.ops.aten._print("one")
        y = x + 1
        torch.ops.aten._print("two")
        return y

    with torch.no_grad():
        compiled(f)(torch.zeros(2))
    assert capfd.readouterr().out.split() == ["one", "two"]
    assert all(isinstance(n.meta["val"], Tensor) for n in seen[0][0].graph.find_nodes(op="placeholder"))


def test_checkpointed_regions() -> None:
    from torch.utils.checkpoint import checkpoint

    def f(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(lambda a: functional.dropout((a @ w).sin(), 0.5), x, use_reentrant=False)

    run = compiled(f)
    x, w = leaf(16, 8), leaf(8, 8)
    y = run(x, w)
    y.sum().backward()
    mask = (y != 0).float() * 2
    torch.testing.assert_close(w.grad, x.detach().t() @ (mask * (x @ w).cos()).detach())


# ---- the doors, counters, and the cache --------------------------------------------------------------------------------


def test_both_doors_and_the_decorator() -> None:
    x = torch.randn(3)
    same(torch.compile(torch.sin, backend="kgen", options=EAGER)(x), x.sin())
    same(kgen.compile(torch.sin, options=EAGER, mode="max-autotune")(x), x.sin())

    @kgen.compile(options=EAGER, fullgraph=True)
    def f(x: Tensor) -> Tensor:
        return x.sin()

    same(f(x), x.sin())


def test_coverage_counts_externs() -> None:
    kgen.coverage_reset()
    compiled(lambda x: x.sin() @ x)(torch.randn(3, 3))
    report = kgen.coverage()
    assert report["externs"] == {"aten.sin.default": 1, "aten.mm.default": 1}
    assert (report["extern_calls"], report["graphs"], report["kernels"], report["aot_traces"]) == (2, 1, 0, 1)
    kgen.coverage_reset()
    assert kgen.coverage()["graphs"] == 0


@pytest.fixture
def cached(fresh_graphs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    kgen.coverage_reset()


def train(**options: Any) -> dict[str, int]:
    """Compiles and trains a small function as a new process would, and says what was counted."""
    torch._dynamo.reset()
    counters.reset()
    x = torch.arange(12.0).reshape(3, 4).requires_grad_()
    run = torch.compile(lambda x: (x.sin() @ x.t()).relu(), backend=kgen_backend, options={"fallback": "all", **options})
    run(x).sum().backward()
    expected = torch.arange(12.0).reshape(3, 4).requires_grad_()
    (expected.sin() @ expected.t()).relu().sum().backward()
    same(x.grad, expected.grad)
    return {name: counters[name] for name in ("aot_trace", "aot_cache_hit", "graphs")}


def test_second_compilation_skips_aot(cached: None, tmp_path: Path) -> None:
    assert train() == {"aot_trace": 1, "aot_cache_hit": 0, "graphs": 2}
    assert train() == {"aot_trace": 0, "aot_cache_hit": 1, "graphs": 2}
    assert train(debug=str(tmp_path / "debug"))["aot_trace"] == 1  # the debug folder is written while compiling
    assert not torch._functorch.config.bundled_autograd_cache


def test_what_changes_code_misses_the_cache(cached: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    train()
    assert train(numerics="eager")["aot_trace"] == 1
    assert train(cache=False)["aot_trace"] == 1
    monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path / "other"))
    assert train()["aot_trace"] == 1


def test_a_graph_that_cannot_be_stored_still_works(cached: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: EagerGraph) -> bytes:
        raise NotSerializable("no")

    monkeypatch.setattr(EagerGraph, "serialize", refuse)
    assert train()["aot_trace"] == 1
    assert train()["aot_trace"] == 1


def test_a_damaged_entry_is_compiled_again(cached: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(data: bytes) -> Any:
        raise OSError("damaged")

    train()
    with monkeypatch.context() as patch:
        patch.setattr(EagerGraph, "deserialize", fail)
        assert train()["aot_trace"] == 1
    assert train()["aot_cache_hit"] == 1


def test_a_loaded_graph_still_draws_random_numbers(cached: None) -> None:
    def f(x: Tensor) -> Tensor:
        return x + torch.rand(1000) + torch.arange(1000)

    for hits in (0, 1):
        torch._dynamo.reset()
        counters.reset()
        run = torch.compile(f, backend=kgen_backend, options={"fallback": "all"})
        with torch.no_grad():
            torch.manual_seed(5)
            results = [run(torch.zeros(1000)) for _ in range(2)]
        assert counters["aot_cache_hit"] == hits
        assert not torch.equal(*results)
        torch.manual_seed(5)
        assert torch.equal(run(torch.zeros(1000)), results[0])


SCRIPT = """
    import json, torch, kgen
    from kgen.counters import counters

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4))
    run = kgen.compile(model, options={"fallback": "all"})
    for n in (3, 5, 7):
        x = torch.randn(n, 8, requires_grad=True)
        run(x).sum().backward()
        assert x.grad.shape == x.shape
    with torch.no_grad():
        run(torch.randn(3, 8))
    print(json.dumps({n: counters[n] for n in ("aot_trace", "aot_cache_hit")}))
"""


def test_inductors_back_ends_come_back_after_a_failure() -> None:
    """While kgen's key is made there are none, whatever Inductor has registered in this process."""
    from torch._inductor import codecache

    before, seen = codecache.custom_backend_passes, []

    def fail() -> None:
        with torch_adapter._without_inductor_back_ends():
            seen.append(codecache.custom_backend_passes)
            raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        fail()
    assert seen == [{}]
    assert codecache.custom_backend_passes is before


@pytest.mark.slow
def test_second_process_skips_aot(cached: None) -> None:
    """Static, dynamic and inference graphs, guards and random numbers included."""
    results = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, check=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
    assert results == [{"aot_trace": 3, "aot_cache_hit": 0}, {"aot_trace": 0, "aot_cache_hit": 3}]
