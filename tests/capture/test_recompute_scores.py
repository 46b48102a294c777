"""Joint graphs of attention: what forward saves for backward, gradients against float64, and what is left as it is."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import default_partition, make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

import kgen
from kgen import backend, contraction, program
from kgen import softmax as softmax_of
from kgen.capture import torch_adapter
from kgen.capture.decompositions import TABLE
from kgen.capture.recompute_scores import recompute_scores
from kgen.config import Config
from kgen.ir.program import MatrixSizes
from kgen.only import only
from kgen.templates import registry

# Its name in the package is that of its function.
recompute_scores_module = importlib.import_module("kgen.capture.recompute_scores")
B, H, M, N, D = 2, 2, 24, 40, 4
MATRIX = M * N  # of scores; no other tensor has as many elements
pytestmark = pytest.mark.cpu
Function = Callable[..., Tensor]


def r(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def positions() -> tuple[Tensor, Tensor]:
    return torch.arange(M)[:, None], torch.arange(N)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


def gpt2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, columns = positions()
    s = scores(q, k)
    return torch.where(columns <= rows + 3, s, torch.finfo(s.dtype).min).softmax(-1) @ v


def bert(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (scores(q, k) + (1.0 - keep.to(q.dtype)) * -10000.0).softmax(-1) @ v


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, columns = positions()
    slopes = 2.0 ** -torch.arange(1, H + 1).to(q.dtype)[:, None, None]
    return (scores(q, k) + slopes * (columns - rows)).masked_fill(columns > rows, -math.inf).softmax(-1) @ v


def t5(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """The bias has a gradient."""
    rows, columns = positions()
    bias = F.embedding((columns - rows).clamp(-5, 5) + 5, table).permute(2, 0, 1)
    return (q @ k.mT + bias).softmax(-1) @ v


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (5 * torch.tanh(scores(q, k) / 5)).softmax(-1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, columns = positions()
    return scores(q, k).masked_fill((columns - rows).abs() >= 9, -math.inf).softmax(-1) @ v


def shared_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k[:, :1].repeat_interleave(H, 1), v[:, :1].repeat_interleave(H, 1))


def expanded_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k[:, :1].expand(-1, H, -1, -1), v[:, :1].expand(-1, H, -1, -1))


def one_matrix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q[0, 0], k[0, 0], v[0, 0])


def by_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.aten._scaled_dot_product_attention_math(q, k, v)[0]


def by_math_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, mask)[0]


def projected(x: Tensor, y: Tensor, *weights: Tensor) -> Tensor:
    """Cross attention of a layer."""
    q, k, v = (one @ w for one, w in zip((x, y, y), weights[:3], strict=True))
    return (plain(q, k, v).transpose(1, 2).flatten(2) @ weights[3]).relu()


def float32_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return s.softmax(-1, dtype=torch.promote_types(s.dtype, torch.float32)).to(v.dtype) @ v


QKV = [r(B, H, M, D), r(B, H, N, D, seed=1), r(B, H, N, D, seed=2)]
SPELLINGS: dict[str, tuple[Function, list[Tensor]]] = {
    "plain": (plain, []),
    "gpt2": (gpt2, []),
    "bert": (bert, [torch.arange(N) < torch.tensor([[30], [N]])[:, :, None, None]]),
    "alibi": (alibi, []),
    "t5": (t5, [r(11, H)]),
    "softcap": (softcap, []),
    "window": (window, []),
    "shared heads": (shared_heads, []),
    "expanded heads": (expanded_heads, []),
    "one matrix": (one_matrix, []),
    "decomposed": (by_math, []),
    "float32 softmax": (float32_softmax, []),
}


class Split:
    """What the partitioner has made of joint graphs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forward: list[GraphModule] = []
        self.backward: list[GraphModule] = []
        self.results: list[int] = []
        split = torch_adapter.min_cut_rematerialization_partition

        def noted(graph: GraphModule, inputs: Any, **settings: Any) -> tuple[GraphModule, GraphModule]:
            made = split(graph, inputs, **settings)
            self.forward.append(made[0])
            self.backward.append(made[1])
            self.results.append(settings["num_fwd_outputs"])
            return made

        monkeypatch.setattr(torch_adapter, "min_cut_rematerialization_partition", noted)

    def saved(self) -> dict[str, int]:
        """Elements of each tensor that forward makes for backward."""
        [results] = self.forward[-1].graph.output_node().args
        saved = [node for node in results[self.results[-1] :] if node.op != "placeholder"]
        return {node.name: node.meta["val"].numel() for node in saved if isinstance(node.meta["val"], Tensor)}

    def sums_of_scores(self) -> list[Any]:
        """Backward's sums of matrices along the last axis."""
        sums = self.backward[-1].graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
        return [n for n in sums if n.args[1] == [-1] and n.args[0].meta["val"].numel() >= MATRIX]


@pytest.fixture
def split(monkeypatch):
    return Split(monkeypatch)


def gradients(f: Function, args: list[Tensor], switch: str | None = "on") -> list[Tensor]:
    """Of everything that has any; in eager without a switch."""
    args = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
    if switch is None:
        made = f(*args)
    else:
        torch._dynamo.reset()
        with kgen.config.override(cache=False, recompute_scores=switch):
            made = torch.compile(f, backend="kgen")(*args)
    weights = r(*made.shape, seed=7).to(made.dtype)
    return list(torch.autograd.grad((made * weights).sum(), [a for a in args if a.requires_grad]))


def assert_close(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    for mine, theirs in zip(got, want, strict=True):
        scale = max(1.0, float(theirs.nan_to_num().abs().max()))
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def wide(args: list[Tensor]) -> list[Tensor]:
    return [a.double() if a.is_floating_point() else a for a in args]


@pytest.mark.every(2)
@pytest.mark.parametrize("name", SPELLINGS)
def test_no_matrix_of_scores_is_saved(name, split):
    f, more = SPELLINGS[name]
    got = gradients(f, [*QKV, *more])
    assert split.saved()
    assert max(split.saved().values()) < MATRIX, split.saved()
    assert_close(got, gradients(f, wide([*QKV, *more]), None), 1e-5)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["gpt2", "alibi", "softcap", "decomposed", "float32 softmax"])
def test_in_bfloat16(name, split):
    f, more = SPELLINGS[name]
    args = [a.bfloat16() for a in QKV]
    got = gradients(f, [*args, *more])
    assert max(split.saved().values()) < MATRIX, split.saved()
    assert_close(got, gradients(f, wide([*args, *more]), None), 4e-2)


def largest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return torch.where(s < s.topk(5).values[..., -1:], -math.inf, s).softmax(-1) @ v


def above_mean(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return (s + torch.where(s > s.mean(-1, keepdim=True), 0.0, -math.inf)).softmax(-1) @ v


@pytest.mark.parametrize("f", [largest, above_mean])
def test_scores_are_not_compared_again(f, split):
    """With the fifth largest of the first computation: by last bits, a row would lose a score, or have one more."""
    got = gradients(f, QKV)
    comparisons = (torch.ops.aten.lt.Tensor, torch.ops.aten.gt.Tensor)
    assert not [node for node in split.backward[-1].graph.nodes if node.target in comparisons]
    assert_close(got, gradients(f, wide(QKV), None), 1e-5)


def test_row_sums_are_not_of_a_quantised_result(split):
    """Forward's result has 8 bits. The sum of it times the gradient is of what it was before."""

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain(q, k, v).to(torch.float8_e4m3fn).float()

    got = gradients(f, QKV)
    assert not split.sums_of_scores()
    assert_close(got, gradients(f, wide(QKV), None), 1e-5)


def test_forward_is_one_kernel_that_stores_the_log_sum_exp(split):
    args = [a.clone().requires_grad_() for a in QKV]
    torch._dynamo.reset()
    with only("cpp_attention", lambda configs: configs[0]), kgen.config.override(cache=False, recompute_scores="on"):
        report = kgen.explain(window, *args, print_report=False)
    assert len(report.graphs[0].kernels) == 1, report
    assert any("cpp_attention" in v.detail for v in report.verdicts), report


def test_rows_without_keys():
    """Zeros in the library's softmax, NaN in others; where a large number stands for a mask, all keys weigh the same."""
    mask = r(M, N) > -0.5
    mask[5] = False
    assert_close(gradients(by_math_masked, [*QKV, mask]), gradients(by_math_masked, wide([*QKV, mask]), None), 1e-5)
    for number in (-math.inf, -65504.0, -1e6, -1e8, -1e9, torch.finfo(torch.float32).min):
        f = lambda q, k, v, mask, number=number: scores(q, k).masked_fill(~mask, number).softmax(-1) @ v  # noqa: E731
        added = lambda q, k, v, mask, n=number: (scores(q, k) + torch.where(mask, 0.0, n)).softmax(-1) @ v  # noqa: E731
        assert_close(gradients(f, [*QKV, mask]), gradients(f, wide([*QKV, mask]), None), 1e-5)
        if number < -1e8 or math.isinf(number):  # of others the log-sum-exp of scores and mask keeps some digits
            assert_close(gradients(added, [*QKV, mask]), gradients(added, [*QKV, mask], None), 1e-5)


def with_table(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    return (scores(q, k) + table).softmax(-1) @ v


def with_factors(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    return (scores(q, k) * table).softmax(-1) @ v


def far_apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k) * 2.0**30).softmax(-1) @ v


BOUNDED: list[tuple[Function, bool]] = [
    (plain, False), (window, False), (softcap, False), (with_factors, False), (with_table, True), (gpt2, True),
    (far_apart, True),
]  # fmt: skip


@pytest.mark.parametrize(("f", "bounded"), BOUNDED)
def test_weights_are_bounded_where_numbers_may_stand_for_infinity(f, bounded, split):
    more = [r(M, N)] if f in (with_table, with_factors) else []
    gradients(f, [*QKV, *more])
    calls = [node.target for node in split.backward[-1].graph.nodes]
    assert torch.ops.aten.exp.default in calls
    assert (torch.ops.aten.minimum.default in calls) == bounded


def rounded_by_itself(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The rounding is the program's own."""
    weights = scores(q, k).float().softmax(-1).bfloat16().float()
    return (weights * weights) @ v.float()


def roundings(split: Split) -> int:
    """Matrices that backward rounds to bfloat16 and then widens."""
    casts = split.backward[-1].graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    found = 0
    for node in casts:
        made = node.args[0]
        while made.target in (torch.ops.aten.alias.default, torch.ops.aten.view.default):
            made = made.args[0]
        large = node.meta["val"].dtype is torch.float32 and node.meta["val"].numel() >= MATRIX
        found += large and made in casts and made.meta["val"].dtype is torch.bfloat16
    return found


def test_gradients_read_weights_before_they_were_rounded(split):
    """Eager has saved 16 bits of them. What a program rounds stays rounded, and so does all with eager's numerics."""
    args = [a.bfloat16() for a in QKV]
    for f in (plain, rounded_by_itself):
        errors = []
        for numerics, expected in (("fast", int(f is not plain)), ("eager", 1)):
            with kgen.config.override(numerics=numerics):
                got = gradients(f, args)
            assert (roundings(split) > 0) == bool(expected)
            want = gradients(f, wide(args), None) if f is plain else gradients(f, args, None)
            errors.append(
                sum(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(got, want, strict=True))
            )
        assert errors[0] < (errors[1] if f is plain else 4e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout(dtype, split):
    """Gradients are those of the mask that forward has used: with values of ones, rows of results are sums of weights."""

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(scores(q, k).softmax(-1), 0.3) @ v

    q, k = (a.to(dtype) for a in QKV[:2])
    eye = torch.eye(N, dtype=dtype).expand(B, H, N, N).contiguous().requires_grad_()
    q.requires_grad_()
    k.requires_grad_()
    torch._dynamo.reset()
    with kgen.config.override(cache=False, recompute_scores="on"):
        made = torch.compile(f, backend="kgen")(q, k, eye)  # the weights themselves
    weights = r(*made.shape, seed=7).to(dtype)
    got = torch.autograd.grad((made * weights).sum(), (q, k, eye))
    kept = (made.detach() != 0).double() / 0.7
    wq, wk, we = (a.detach().double().requires_grad_() for a in (q, k, eye))
    want = (scores(wq, wk).softmax(-1) * kept) @ we
    expected = torch.autograd.grad((want * weights.double()).sum(), (wq, wk, we))
    assert_close(list(got), list(expected), 1e-5 if dtype is torch.float32 else 4e-2)


def test_dropout_saves_nothing_large(split):
    f = lambda q, k, v: F.dropout(scores(q, k).softmax(-1), 0.3) @ v  # noqa: E731
    gradients(f, QKV)
    assert max(split.saved().values()) < MATRIX, split.saved()
    assert not split.sums_of_scores()


def test_on_a_gpu_dropout_saves_what_it_keeps(split, monkeypatch):
    """Each kernel of backward would draw all random numbers again."""
    monkeypatch.setattr(torch_adapter, "is_cuda", lambda _: True)
    gradients(lambda q, k, v: F.dropout(scores(q, k).softmax(-1), 0.3) @ v, QKV)
    assert [name for name, size in split.saved().items() if size >= MATRIX] == ["ge"]


@pytest.mark.every(2)
@pytest.mark.parametrize("name", SPELLINGS)
def test_backward_adds_up_no_scores_along_keys(name, split):
    f, more = SPELLINGS[name]
    gradients(f, [*QKV, *more])
    assert not split.sums_of_scores()


def test_a_layer_of_cross_attention(split):
    x, y = r(B, M, 4), r(B, N, 4)
    weights = [r(H, 4, D, seed=k) * 0.3 for k in range(3)]
    f = lambda x, y, *w: projected(x[:, None], y[:, None], *w)  # noqa: E731
    args = [x, y, *weights, r(H * D, 8) * 0.3]
    got = gradients(f, args)
    assert max(split.saved().values()) < MATRIX, split.saved()
    assert_close(got, gradients(f, wide(args), None), 1e-5)


# ---- what is left as it is ------------------------------------------------------------------------------------------


def with_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Somebody else reads the weights, which are in memory then."""
    weights = scores(q, k).softmax(-1)
    return weights @ v + weights.sum(-2)[..., :1, None]


def of_few_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores are no more than what they were made of."""
    return scores(q[..., :1], k[..., :1])[..., :2].softmax(-1) @ v[..., :2, :]


def of_no_contraction(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).relu().cumsum(-1).softmax(-1) @ v


def over_batches(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No contraction reduces the axis of the softmax."""
    return scores(q, k).softmax(1) @ v


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Its gradient is another one: it goes through the maximum and the sum."""
    s = scores(q, k)
    power = (s - s.amax(-1, keepdim=True)).exp()
    return (power / power.sum(-1, keepdim=True)) @ v


@pytest.mark.every(2)
@pytest.mark.parametrize("f", [with_weights, of_few_scores, of_no_contraction, over_batches, by_hand])
def test_others_are_left_alone(f, split):
    got = gradients(f, QKV)
    one = str(split.forward[-1].graph)
    gradients(f, QKV, "off")
    assert str(split.forward[-1].graph) == one
    assert_close(got, gradients(f, wide(QKV), None), 1e-4)


def test_it_needs_templates_of_both_directions(monkeypatch):
    """By default, and in the default mode those whose estimates are known to be right."""
    device = torch.device("cpu")
    softmax = program(
        s=contraction("b,m,d", "b,n,d -> b,m,n"), p=softmax_of("s", over="n", logsumexp=True),
        o=contraction("p", "b,n,v -> b,m,v"),
    ).program  # fmt: skip
    meeting = program(
        s=contraction("m,d", "d,n -> m,n"), t=contraction("n,e", "e,l -> n,l"), o=contraction("s", "t -> m,l"),
    ).program  # fmt: skip
    for found, wanted in (([], False), ([softmax], False), ([meeting], False), ([softmax, meeting], True)):
        monkeypatch.setattr(registry, "calibrated_programs", lambda *_, found=found: found)
        monkeypatch.setattr(registry, "programs", lambda _, found=found: found)
        for mode in ("default", "max-autotune"):
            assert backend._takes_both(Config(mode=mode), device) == wanted
    assert not backend._takes_both(Config(fusion=False), device)
    assert backend._takes_both(Config(recompute_scores="on"), device)
    assert not backend._takes_both(Config(templates=False), device)


def test_it_needs_sizes_that_templates_were_measured_on():
    """On a GPU some sizes have been measured, and others have not. Of few rows there is the softmax alone, and no gradient."""
    known = MatrixSizes(1024, 1024, frozenset({64}), torch.bfloat16)
    for change, arch, wanted in (
        ({}, 90, 4), ({"others": frozenset({64, 128})}, 90, 4), ({"others": frozenset({72})}, 90, 0), ({"rows": 16}, 90, 1),
        ({"columns": 8}, 90, 0), ({"dtype": torch.float32}, 90, 0), ({}, 80, 0),
    ):  # fmt: skip
        found = registry.calibrated_programs("cuda", replace(known, **change), arch)
        assert len({one.key for one in found}) == wanted, change
    [sizes] = seen_sizes(scores_of_heads)
    assert sizes == MatrixSizes(96, 96, frozenset({16}), torch.bfloat16)


def scores_of_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(((q @ k.mT) * 0.25).float(), -1).to(q.dtype) @ v


def in_eager(gm: GraphModule, _: Any) -> Any:
    return make_boxed_func(gm.forward)


def seen_sizes(fn: Callable[..., Tensor]) -> list[MatrixSizes]:
    """The sizes of the matrices that might be computed again."""
    seen: list[MatrixSizes] = []

    def ask(_: torch.device, sizes: MatrixSizes) -> bool:
        seen.append(sizes)
        return False

    args = [torch.randn(2, 3, 96, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    backend = aot_autograd(
        fw_compiler=in_eager, bw_compiler=in_eager, decompositions=TABLE,
        partition_fn=lambda gm, inputs, **how: default_partition(recompute_scores(gm, ask), inputs, **how),
    )  # fmt: skip
    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(*args).sum().backward()
    return seen


def differential(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights of two softmaxes meet before the values."""
    return (scores(q, k).softmax(-1) - 0.3 * scores(q.flip(-1), k).softmax(-1)) @ v


def test_two_softmaxes_before_one_contraction(split):
    got = gradients(differential, QKV)
    assert max(split.saved().values()) < MATRIX, split.saved()
    assert_close(got, gradients(differential, wide(QKV), None), 1e-5)


def in_a_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two layers with one mask."""
    rows, columns = positions()
    mask = columns > rows + 3
    for _ in range(2):
        q = q + scores(q, k).masked_fill(mask, -math.inf).softmax(-1) @ v
    return q


def test_layers_share_a_mask(split):
    got = gradients(in_a_row, QKV)
    assert max(split.saved().values()) < MATRIX, split.saved()
    assert_close(got, gradients(in_a_row, wide(QKV), None), 1e-5)


def test_what_is_behind_a_layer_is_looked_at_for_the_first_one_alone(split, monkeypatch):
    """Twelve layers each looked at all behind them, for each call that makes its scores."""
    looked = Counter[str]()
    is_pure = recompute_scores_module._is_pure

    def counted(node: Any) -> bool:
        looked[node.name] += 1
        return is_pure(node)

    monkeypatch.setattr(recompute_scores_module, "_is_pure", counted)
    gradients(in_a_row, QKV)
    assert set(looked.values()) == {1}


SEVERAL: dict[str, Function] = {
    "values": lambda q, k, v: scores(q, k).softmax(-1) @ v + scores(q, k).softmax(-1) @ (v * 2),
    "detached": lambda q, k, v: (w := scores(q, k).softmax(-1)) @ v + w.detach() @ v,
    "some": lambda q, k, v: torch.cat([(w := scores(q, k).softmax(-1)) @ v, w @ v[..., :8]], -1),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_one_softmax_of_several_contractions(name):
    """Each of their kernels could store the log-sum-exp: one does."""
    assert_close(gradients(SEVERAL[name], QKV), gradients(SEVERAL[name], wide(QKV), None), 1e-5)


def test_sums_of_everything_are_no_softmax():
    """A sum over all axes that keeps them."""
    f = lambda q, k, v: ((p := scores(q, k).exp()) / p.sum((0, 1, 2, 3), keepdim=True)) @ v  # noqa: E731
    assert_close(gradients(f, QKV), gradients(f, wide(QKV), None), 1e-5)
