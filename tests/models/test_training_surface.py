"""What training scripts do around a compiled model: each against eager, with the same code.

Fast tests run lowered graphs in the evaluator; the slow ones are the same in C++."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kgen import backend
from tests.opinfo import evaluated

aten = torch.ops.aten
Compile = Callable[[Any], Any]


@pytest.fixture(
    params=[
        pytest.param("evaluator", marks=pytest.mark.none),
        pytest.param("cpp", marks=[pytest.mark.cpu, pytest.mark.slow]),
    ]
)
def kgen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Compile:
    """torch.compile with this back end."""
    if request.param == "evaluator":
        monkeypatch.setattr(backend, "STAGES", evaluated.STAGES)
    return functools.partial(torch.compile, backend="kgen", options={"cache": False})


class Block(nn.Module):
    """An attention and an MLP over float[n, length, 8]; `around` calls its two halves."""

    def __init__(self, around: Callable[..., Tensor] = lambda f, x: f(x)) -> None:
        super().__init__()
        self.around = around
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(torch.softmax(q @ k.mT * 0.35, -1) @ v)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.around(self.attend, x)
        return x + self.around(lambda y: self.mlp(self.norm(y)), x)


def block(around: Callable[..., Tensor] | None = None) -> Block:
    torch.manual_seed(0)
    return Block() if around is None else Block(around)


def data(n: int = 3) -> Tensor:
    return torch.randn(n, 5, 8, generator=torch.Generator().manual_seed(n))


def step(call: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    """The loss and all gradients."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    loss = call(x).square().mean()
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def save_matmuls(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    saved = op in (aten.mm.default, aten.addmm.default, aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {
    "not_reentrant": functools.partial(checkpoint, use_reentrant=False),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "selective": functools.partial(
        checkpoint, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, save_matmuls)
    ),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_activation_checkpointing(kind: str, kgen: Compile) -> None:
    checkpointed, plain = block(CHECKPOINTS[kind]), block()
    same(step(kgen(checkpointed), checkpointed, data()), step(plain, plain, data()))


# ---- torch.func -----------------------------------------------------------------------------------------------------------


def energy(w: Tensor, x: Tensor) -> Tensor:
    return (torch.tanh(x @ w).softmax(-1).log() * x).sum()


TRANSFORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "grad": torch.func.grad(energy),
    "vmap_of_grad": lambda w, x: torch.func.vmap(torch.func.grad(energy), (None, 0))(w, x[:, None]),
    "jvp": lambda w, x: torch.func.jvp(lambda v: energy(v, x), (w,), (w.cos(),)),
    "vjp": lambda w, x: torch.func.vjp(lambda v: torch.tanh(x @ v), w)[1](x.sin()),
    "jacrev": lambda w, x: torch.func.jacrev(lambda v: torch.tanh(x @ v).sum(0))(w),
    "double_grad": torch.func.grad(lambda w, x: torch.func.grad(energy)(w, x).square().sum()),
    "hessian": lambda w, x: torch.func.hessian(lambda v: energy(v, x))(w[:, 0].diag()),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transforms(name: str, kgen: Compile) -> None:
    f = TRANSFORMS[name]
    w, x = torch.randn(4, 4), torch.randn(6, 4)
    same(kgen(f)(w, x), f(w, x))


def test_gradient_penalty(kgen: Compile) -> None:
    """A gradient of a gradient, for parameters: the inner one is part of the graph."""
    mine, plain = block(), block()

    def penalty(module: nn.Module, x: Tensor) -> Tensor:
        inner = torch.func.grad(lambda y: module(y).sum())(x)
        return (inner.square().sum(-1) - 1).square().mean()

    def gradients(call: Callable[..., Tensor], module: nn.Module) -> list[Tensor]:
        return list(torch.autograd.grad(call(module, data()), list(module.parameters()), allow_unused=True))

    same(gradients(kgen(penalty), mine), gradients(penalty, plain))


def test_double_backward_through_a_compiled_model_is_an_error(kgen: Compile) -> None:
    """As with every back end behind AOTAutograd: never a silently wrong gradient."""
    module = block()
    x = data().requires_grad_()
    [first] = torch.autograd.grad(kgen(module)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        first.sum().backward()


# ---- loops around a model ---------------------------------------------------------------------------------------------------


def test_compiled_autograd(kgen: Compile) -> None:
    module, plain = block(), block()
    with torch._dynamo.compiled_autograd._enable(kgen):
        got = step(kgen(module), module, data())
    same(got, step(plain, plain, data()))


def test_hooks(kgen: Compile) -> None:
    """On a tensor inside of the graph, on a module, on a parameter, and after gradients have been accumulated."""

    def trained(compiled: bool) -> list[Any]:
        module, seen = block(), []
        module.mlp[0].register_forward_hook(lambda _m, _args, out: out * 2)
        module.out.weight.register_hook(lambda g: g * 3)
        module.norm.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))

        def f(x: Tensor) -> Tensor:
            y = module(x)
            if y.requires_grad:
                y.register_hook(lambda g: g.clamp(-0.01, 0.01))
            return y

        found = step(kgen(f) if compiled else f, module, data())
        return [*found, torch.tensor(seen)]

    same(trained(True), trained(False))


def test_gradient_accumulation(kgen: Compile) -> None:
    def accumulated(compiled: bool) -> list[Tensor]:
        module = block()
        call = kgen(module) if compiled else module
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            for n in (3, 3, 3):
                (call(data(n) * 1.5).square().mean() / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in module.parameters()]

    same(accumulated(True), accumulated(False))


def test_threads_call_one_model(kgen: Compile) -> None:
    module = block().eval()
    compiled = kgen(module)
    inputs = [torch.randn(3, 5, 8) for _ in range(4)]
    results: dict[int, list[Tensor]] = {}
    with torch.no_grad():
        compiled(inputs[0])

    def calls(k: int) -> None:
        with torch.no_grad():
            results[k] = [compiled(inputs[k]) for _ in range(5)]

    threads = [threading.Thread(target=calls, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        for k, x in enumerate(inputs):
            for got in results[k]:
                same(got, module(x))


# ---- weights change after compiling -----------------------------------------------------------------------------------------


def load(module: nn.Module) -> None:
    torch.manual_seed(5)
    module.load_state_dict({k: torch.randn_like(v) for k, v in module.state_dict().items()})


def replaced(module: nn.Module) -> None:
    torch.manual_seed(6)
    module.out.weight = nn.Parameter(torch.randn(8, 8))
    module.mlp[0] = nn.Linear(8, 16)


def through_data(module: nn.Module) -> None:
    module.qkv.weight.data = module.qkv.weight.data.t().contiguous().t() * 2


def frozen(module: nn.Module) -> None:
    module.norm.requires_grad_(False)


@pytest.mark.every(2)
@pytest.mark.parametrize("change", [load, replaced, through_data, frozen], ids=lambda f: f.__name__)
def test_weights_changed_after_compiling(change: Callable[[nn.Module], None], kgen: Compile) -> None:
    module, plain = block(), block()
    compiled = kgen(module)
    for _ in range(2):
        with torch.no_grad():
            same(compiled(data()), plain(data()))
        got, expected = (call(data()).square().mean() for call in (compiled, plain))
        same([got, *_gradients(got, module)], [expected, *_gradients(expected, plain)])
        change(module)
        change(plain)


def _gradients(loss: Tensor, module: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [p for p in module.parameters() if p.requires_grad]))


def test_copies_and_state_of_a_compiled_model(kgen: Compile) -> None:
    module = block()
    compiled = kgen(module)
    with torch.no_grad():
        expected = compiled(data())
        copied = copy.deepcopy(compiled)
        same(copied(data()), expected)
        load(module)
        same(copied(data()), expected)
        same(compiled(data()), module(data()))
    assert [k.removeprefix("_orig_mod.") for k in compiled.state_dict()] == list(module.state_dict())
    fresh = block()
    fresh.load_state_dict({k.removeprefix("_orig_mod."): v for k, v in compiled.state_dict().items()})
    with torch.no_grad():
        same(F.relu(fresh(data())), F.relu(compiled(data())))
