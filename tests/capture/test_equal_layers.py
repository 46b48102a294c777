"""Equal layers of Dynamo's graph as calls of one body: results and gradients are eager's, whatever layers do."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch.fx import GraphModule
from torch.nn import functional as F

import kgen
from kgen.backend import kgen_backend
from kgen.capture import equal_layers
from kgen.capture.equal_layers import share_layers
from kgen.counters import counters
from kgen.verdict import Outcome, Reason, Verdict

N = 6


class Rewriting:
    """A backend that shares layers, and runs what AOTAutograd makes of the graph in eager."""

    def __init__(self, layouts: bool = False) -> None:
        self.layouts = layouts
        self.verdicts: list[Verdict] = []
        self.calls = 0

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.verdicts = share_layers(gm, self.layouts)
        self.calls = sum(node.target is invoke_subgraph for node in gm.graph.nodes)
        return kgen_backend(gm, inputs, options={"fallback": ("all",), "cache": False})

    @property
    def why(self) -> str:
        """What the only refusal says."""
        (verdict,) = self.verdicts
        assert (verdict.outcome, verdict.reason) == (Outcome.ILLEGAL, Reason.LAYERS_DIFFER)
        return verdict.detail


def same(f: Callable[..., Any], *args: Tensor, layouts: bool = False, **options: Any) -> Rewriting:
    """Checks results, what has become of the arguments, and gradients, against eager."""
    torch._dynamo.reset()
    backend = Rewriting(layouts)
    mine, others = ([arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args] for _ in range(2))
    torch.manual_seed(0)
    got = torch.compile(f, backend=backend, fullgraph=True, **options)(*mine)
    torch.manual_seed(0)
    want = f(*others)
    torch.testing.assert_close((got, mine), (want, others), rtol=1e-9, atol=1e-9)
    if any(one.requires_grad for one in _leaves(want)):
        torch.testing.assert_close(_gradients(got, mine), _gradients(want, others), rtol=1e-9, atol=1e-9)
    return backend


def _leaves(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def _gradients(results: Any, args: Sequence[Tensor]) -> list[Any]:
    loss = sum((one * one.cos()).sum() for one in _leaves(results) if one.requires_grad)
    wanted = [arg for arg in args if arg.requires_grad]
    return list(torch.autograd.grad(loss, wanted, allow_unused=True))  # type: ignore[arg-type]


def tensors(layers: int, *, grad: bool = True, first: bool = True) -> list[Tensor]:
    """An input, and two weights for each layer."""
    torch.manual_seed(layers)
    x = torch.randn(4, N, dtype=torch.float64, requires_grad=grad and first)
    return [x, *(torch.randn(N, N, dtype=torch.float64).div(3).requires_grad_(grad) for _ in range(2 * layers))]


def layer(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Eight calls."""
    h = F.layer_norm(x, (N,))
    h = F.gelu(h @ w)
    h = torch.tanh(h) * 2 + h.sin()
    return x + h @ v


def chained(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, *weights: Tensor) -> Tensor:
        for w, v in zip(weights[::2], weights[1::2], strict=True):
            x = f(x, w, v)
        return x.sin()

    return run


# ---- what is shared ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("layers", [3, 7])
def test_equal_layers(layers: int, grad: bool) -> None:
    assert same(chained(layer), *tensors(layers, grad=grad)).calls == layers


def test_two_layers_are_no_repeat() -> None:
    assert not same(chained(layer), *tensors(2)).calls


def test_a_few_operators_are_no_layer() -> None:
    assert not same(chained(lambda x, w, v: torch.tanh(x @ w @ v)), *tensors(4)).verdicts


def test_layers_share_weights() -> None:
    x, w, v, a, b = tensors(2)
    run = chained(layer)
    assert same(lambda x, w, v, a, b: run(x, w, v, a, b, w, v, b, a), x, w, v, a, b).calls == 4


def test_one_tensor_for_two_operands() -> None:
    x, w, v, a, b = tensors(2)
    run = chained(layer)
    assert "share memory" in same(lambda x, w, v, a, b: run(x, w, v, a, b, w, v, b, b), x, w, v, a, b).why


def test_operands_that_are_views_of_one_tensor() -> None:
    x, w = tensors(1)[:2]
    run = chained(layer)
    assert "share memory" in same(lambda x, w: run(x, *(part for _ in range(4) for part in (w, w.t()))), x, w).why


def test_frozen_layers_are_functions_of_their_own() -> None:
    args = tensors(7)
    args[7] = args[7].detach()
    backend = same(chained(layer), *args)
    assert (backend.calls, len(backend.verdicts)) == (6, 2)


def test_an_input_without_a_gradient() -> None:
    assert same(chained(layer), *tensors(5, first=False)).calls == 4


def test_every_layer_s_result_is_needed() -> None:
    def f(x: Tensor, *weights: Tensor) -> Any:
        found = []
        for w, v in zip(weights[::2], weights[1::2], strict=True):
            x = layer(x, w, v)
            found.append(x)
        return tuple(found)

    assert same(f, *tensors(4)).calls == 4


def test_a_result_that_nobody_differentiates() -> None:
    def f(x: Tensor, *weights: Tensor) -> Any:
        largest = []
        for w, v in zip(weights[::2], weights[1::2], strict=True):
            x = layer(x, w, v)
            largest.append(x.argmax(-1))
        return x, torch.stack(largest)

    assert same(f, *tensors(4)).calls == 4


def test_a_result_of_the_layer_before_the_last() -> None:
    def f(x: Tensor, *weights: Tensor) -> Tensor:
        before = x * 2
        for w, v in zip(weights[::2], weights[1::2], strict=True):
            x, before = layer(x, w, v) - before, x
        return x

    assert same(f, *tensors(5)).calls >= 3


def test_two_kinds_of_layers() -> None:
    def f(x: Tensor, *weights: Tensor) -> Tensor:
        x = chained(layer)(x, *weights[:8])
        return chained(lambda x, w, v: layer(x.square(), v, w))(x, *weights[8:])

    backend = same(f, *tensors(8))
    assert (backend.calls, len(backend.verdicts)) == (8, 2)


def test_writes_into_a_layer_s_own_tensors() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        h = F.layer_norm(x, (N,)) @ w
        h[1].add_(h[0])
        return x + (h * 3).mul_(0.5).cos() @ v.add(1)

    assert same(chained(f), *tensors(4)).calls == 4


def test_writes_into_results_behind_the_layers() -> None:
    def f(x: Tensor, *weights: Tensor) -> Any:
        found = []
        for w, v in zip(weights[::2], weights[1::2], strict=True):
            x = layer(x, w, v)
            found.append(x)
        found[0].add_(1)
        found[-1][0] = found[0][1] * 3
        return tuple(found)

    assert same(f, *tensors(4, grad=False)).calls == 4


def test_results_of_several_tensors() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        a, b = (F.layer_norm(x, (N,)) @ w).chunk(2, -1)
        return x + torch.cat((a.sigmoid() * b, b.tanh()), -1) @ v

    assert same(chained(f), *tensors(4)).calls == 4


def test_no_dropout() -> None:
    f = chained(lambda x, w, v: F.dropout(layer(x, w, v), 0.5, training=False))
    assert same(f, *tensors(4)).calls == 4


def test_attention_without_dropout() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        h = (F.layer_norm(x, (N,)) @ w).view(1, 2, 4, 3)
        h = F.scaled_dot_product_attention(h, h.sin(), h.cos(), dropout_p=0.0)
        return x + h.reshape(4, N) @ v.tanh()

    assert same(chained(f), *tensors(4)).calls == 4


def test_the_norm_of_a_batch_for_inference() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return layer(F.batch_norm(x, w[0].detach(), w[1].detach().abs(), training=False), w, v)

    assert same(chained(f), *tensors(4)).calls == 4


# ---- what is not -------------------------------------------------------------------------------------------------------


def test_dropout_draws() -> None:
    f = chained(lambda x, w, v: F.dropout(layer(x, w, v), 0.5))
    torch._dynamo.reset()
    backend = Rewriting()
    torch.compile(f, backend=backend, fullgraph=True)(*tensors(4))
    assert "random numbers" in backend.why


def test_other_constants() -> None:
    def f(x: Tensor, *weights: Tensor) -> Tensor:
        for k, (w, v) in enumerate(zip(weights[::2], weights[1::2], strict=True)):
            x = layer(x, w, v) * (k + 1)
        return x

    assert "other constants" in same(f, *tensors(4)).why


def test_equal_numbers_of_other_types() -> None:
    def f(x: Tensor, *weights: Tensor) -> Tensor:
        for k, (w, v) in enumerate(zip(weights[::2], weights[1::2], strict=True)):
            x = layer(x, w, v).mul(2 if k % 2 else 2.0)
        return x

    assert not same(f, *tensors(4)).calls


def test_statistics_of_a_batch() -> None:
    def f(x: Tensor, *weights: Tensor) -> Tensor:
        means, variances = weights[0].detach().clone(), weights[0].detach().abs()
        for k, (w, v) in enumerate(zip(weights[2::2], weights[3::2], strict=True)):
            x = layer(F.batch_norm(x, means[k], variances[k], training=True), w, v)
        return x + means.sum() + variances.sum()

    assert not same(f, *tensors(5)).calls


def test_statistics_in_inputs() -> None:
    def f(x: Tensor, *weights: Tensor) -> Tensor:
        for w, v, mean in zip(weights[::3], weights[1::3], weights[2::3], strict=True):
            x = layer(F.batch_norm(x, mean[0], mean[1], training=True), w, v)
        return x

    args = tensors(6, grad=False)
    assert not same(f, *args).calls


def test_writes_into_an_operand() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        w.add_(1)
        return layer(x, w, v)

    assert "writes into what the block is given" in same(chained(f), *tensors(4, grad=False)).why


def test_writes_into_an_operand_s_view() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        x = layer(x, w, v)
        w[0].t().mul_(2)
        return x

    assert "writes into what the block is given" in same(chained(f), *tensors(4, grad=False)).why


def test_results_that_share_memory() -> None:
    def f(x: Tensor, *weights: Tensor) -> Any:
        found = []
        for w, v in zip(weights[::2], weights[1::2], strict=True):
            x = layer(x, w, v)
            found.append(x.t())
        found[0].add_(1)
        return x, *found

    assert "shares memory" in same(f, *tensors(4, grad=False)).why


def test_a_result_that_is_part_of_an_operand() -> None:
    def f(x: Tensor, *weights: Tensor) -> Any:
        parts = []
        for w, v in zip(weights[::2], weights[1::2], strict=True):
            parts.append(w[1:3])
            x = layer(x, w, v)
        parts[0].zero_()
        return x, *parts

    assert "shares memory" in same(f, *tensors(4, grad=False)).why


def test_sizes_that_are_symbols() -> None:
    assert not same(chained(layer), *tensors(4), dynamic=True).calls


def test_autocast() -> None:
    def f(x: Tensor, *weights: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return chained(layer)(x, *weights)

    torch._dynamo.reset()
    backend, args = Rewriting(), [one.float() for one in tensors(4, grad=False)]
    torch.testing.assert_close(torch.compile(f, backend=backend)(*args), f(*args), rtol=1e-2, atol=1e-2)
    assert not backend.calls


def test_parts_without_gradients() -> None:
    def f(x: Tensor, *weights: Tensor) -> Tensor:
        with torch.no_grad():
            y = chained(layer)(x, *weights[:8])
        return chained(layer)(y, *weights[8:])

    assert not same(f, *tensors(8)).calls


def test_detached_in_a_layer() -> None:
    same(chained(lambda x, w, v: layer(x, w, v) - x.detach()), *tensors(4))


def test_a_convolution_s_strides_depend_on_its_surroundings() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return layer(F.conv1d(x[None], w[:4, :4, None])[0], w, v)

    assert "strides are chosen" in same(chained(f), *tensors(4), layouts=True).why
    assert same(chained(f), *tensors(4)).calls == 4


def test_branches_in_a_layer() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (layer(x, w, v),))

    assert not same(chained(f), *tensors(4, grad=False)).calls


def test_one_layer_is_wired_otherwise() -> None:
    def f(x: Tensor, *weights: Tensor) -> Tensor:
        for k, (w, v) in enumerate(zip(weights[::2], weights[1::2], strict=True)):
            y = layer(x, w, v)
            x = x - y if k == 4 else y - x
        return x

    assert same(f, *tensors(9)).calls >= 3


# ---- any layers --------------------------------------------------------------------------------------------------------

UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.sin, torch.tanh, lambda x: x * 0.5, lambda x: x.t().contiguous().t(), lambda x: F.layer_norm(x, (N,)), torch.relu,
    lambda x: x.clone().mul_(0.7), lambda x: x.flip(0), lambda x: x[:, torch.arange(N)],
]  # fmt: skip


def program(seed: int) -> Callable[..., Any]:
    """Layers of random operators. Some of them read an earlier layer's tensors, write in place, or are returned."""
    rng = random.Random(seed)
    recipe = [(rng.choice(UNARY), rng.randrange(4), rng.random() < 0.3) for _ in range(rng.randint(5, 9))]
    odd, at, collects, writes = rng.random() < 0.3, rng.randrange(5), rng.random() < 0.4, rng.random() < 0.2

    def f(x: Tensor, *weights: Tensor) -> Any:
        values, found = [x, x * 0.3], []
        for k, (w, v) in enumerate(zip(weights[::2], weights[1::2], strict=True)):
            for unary, back, multiplies in recipe:
                made = unary(values[-1 - back % len(values)])
                values.append(made @ w if multiplies else made + values[-2])
            values.append(torch.tanh(values[-1] @ v) + (values[-3].cos() if odd and k == at else values[-3].sin()))
            values = values[-4:]
            if collects:
                found.append(values[-1])
        if writes:
            values[-1].mul_(2)
        return values[-1], *found

    return f


@pytest.mark.parametrize("seed", range(4))
def test_random_layers(seed: int) -> None:
    same(program(seed), *tensors(6, grad=seed % 2 == 0))


def test_an_operand_has_no_gradient_where_its_result_is_dropped() -> None:
    """The last layer has only one result that is needed. A body gives zeros for the operands of the others, eager nothing."""
    assert same(program(52), *tensors(6)).calls == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16, 300))
def test_more_random_layers(seed: int) -> None:
    same(program(seed), *tensors(6, grad=seed % 2 == 0))


def test_random_layers_are_shared() -> None:
    assert sum(same(program(seed), *tensors(6, grad=False)).calls > 0 for seed in range(6)) >= 3


# ---- through all stages ------------------------------------------------------------------------------------------------


def compiled(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    counters.reset()
    return torch.compile(f, backend="kgen", fullgraph=True, options={"layer_sharing": "on", "strict": True, **options})


@pytest.mark.usefixtures("fresh_graphs")
def test_a_layer_is_compiled_once() -> None:
    args = tensors(5)
    run = compiled(chained(layer))
    torch.testing.assert_close(run(*args), chained(layer)(*args))
    torch.testing.assert_close(_gradients(run(*args), args), _gradients(chained(layer)(*args), args))
    assert (counters["lowered"], counters["extern.invoke_subgraph"]) == (4, 0)  # the body and what follows, in two directions


def test_explain_says_what_is_shared() -> None:
    torch._dynamo.reset()
    with kgen.config.override(layer_sharing="on"):
        found = kgen.explain(chained(layer), *tensors(4, grad=False))
    (verdict,) = [one for one in found.verdicts if one.reason is Reason.EQUAL_LAYERS]
    assert verdict.outcome is Outcome.SHARED
    assert "4 calls of one body" in verdict.detail


@pytest.mark.parametrize("options", [{"layer_sharing": "off"}, {"freezing": True}, {"mode": "reduce-overhead"}], ids=str)
def test_whole_graphs_stay_whole(options: dict[str, Any]) -> None:
    with torch.no_grad():
        compiled(chained(layer), fallback=("all",), **options)(*tensors(4, grad=False))
    assert counters["extern.invoke_subgraph"] == 0


# ---- by default --------------------------------------------------------------------------------------------------------


def explained(f: Callable[..., Any], args: Sequence[Tensor], **options: Any) -> list[Verdict]:
    """What is said of equal layers where nobody has asked for them."""
    torch._dynamo.reset()
    counters.reset()
    with kgen.config.override(strict=True, **options):
        found = kgen.explain(f, *args, print_report=False).verdicts
    notes = (one for one in found if one.reason in (Reason.EQUAL_LAYERS, Reason.SMALL_LAYERS, Reason.LAYERS_DIFFER))
    return list({(one.reason, one.detail): one for one in notes}.values())  # forward and backward say the same


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of any size are worth a call."""
    monkeypatch.setattr(equal_layers, "LEAST_WORK", (0, 0))


@pytest.mark.parametrize("grad", [False, True])
def test_small_layers_are_compiled_one_by_one(grad: bool) -> None:
    (verdict,) = explained(chained(layer), tensors(7, grad=grad))
    assert (verdict.outcome, verdict.reason) == (Outcome.UNPROFITABLE, Reason.SMALL_LAYERS)
    assert "7 layers of 576 floating-point operations" in verdict.detail  # two matmuls of 4 x 6 by 6 x 6


@pytest.mark.usefixtures("any_size", "fresh_graphs")
def test_large_layers_are_shared() -> None:
    args = tensors(7)
    (verdict,) = explained(chained(layer), args)
    assert verdict.outcome is Outcome.SHARED
    torch._dynamo.reset()
    run = torch.compile(chained(layer), backend="kgen", fullgraph=True, options={"strict": True})
    torch.testing.assert_close(run(*args), chained(layer)(*args))
    torch.testing.assert_close(_gradients(run(*args), args), _gradients(chained(layer)(*args), args))


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize(("layers", "options"), [(5, {}), (7, {"layer_sharing": "off"}), (7, {"freezing": True})], ids=str)
def test_nothing_is_said_where_nothing_can_be_shared(layers: int, options: dict[str, Any]) -> None:
    with torch.no_grad():
        assert not explained(chained(layer), tensors(layers, grad=False), **options)


@pytest.mark.usefixtures("any_size")
def test_a_graph_that_stays_whole_has_its_layers() -> None:
    def f(x: Tensor, *weights: Tensor) -> Tensor:
        weights[0].add_(1)
        return chained(layer)(x, *weights[2:])

    args = tensors(8, grad=False)
    (verdict,) = explained(f, [one.clone() for one in args])
    assert (verdict.reason, "nodes of one graph" in verdict.detail) == (Reason.SMALL_LAYERS, True)
    assert counters["extern.invoke_subgraph"] == 0
    torch._dynamo.reset()
    mine, others = ([one.clone() for one in args] for _ in range(2))
    got = torch.compile(f, backend="kgen", options={"strict": True})(*mine)
    torch.testing.assert_close((got, mine), (f(*others), others))


@pytest.mark.usefixtures("any_size")
def test_layers_that_differ_are_no_news_to_who_has_not_asked() -> None:
    assert not explained(chained(lambda x, w, v: F.dropout(layer(x, w, v), 0.5)), tensors(7))


@pytest.mark.usefixtures("any_size")
def test_demands_are_about_the_whole_graph() -> None:
    with kgen.require_fused("aten.sin", "aten.cos"), torch.no_grad():
        assert not explained(lambda x, *weights: chained(layer)(x, *weights).cos(), tensors(7, grad=False))
