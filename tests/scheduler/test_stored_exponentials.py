"""What a kernel stores in 16 bits and sums up exponentials of is read as it is stored: gradients use both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.ir import values as vs
from kgen.ir.plan import Kernel
from kgen.only import only
from tests.codegen import options_for
from tests.kernels import plans

BOTH = [
    pytest.param("triton_matmul", marks=pytest.mark.interpret),
    pytest.param("triton_matmul_tiles", marks=pytest.mark.interpret),
    pytest.param("cpp_matmul", marks=pytest.mark.cpu),
]


def r(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def cross_entropy(x: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(x @ w, torch.arange(len(x)) % w.shape[1])


def weights(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).softmax(-1) * torch.linspace(0, 1, w.shape[1])).sum()


def gradients(f: Callable[..., Tensor], *args: Tensor) -> list[Tensor]:
    own = [a.detach().clone().requires_grad_() for a in args]
    f(*own).backward()
    return [a.grad.double() for a in own if a.grad is not None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("f", [cross_entropy, weights], ids=lambda f: f.__name__)
@pytest.mark.parametrize("template", BOTH)
def test_gradients_are_as_close_as_eagers(template: str, f: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """Of logits of 20 and more, whose roundings are a part of all errors. Sums of unrounded exponentials gave 2 to 10 times
    these errors."""
    args = r(68, 24, dtype=dtype), r(24, 72, dtype=dtype)
    exact = gradients(f, *(a.double() for a in args))
    eager = gradients(f, *args)
    torch._dynamo.reset()
    with only(template, lambda configs: configs[0]):
        compiled = torch.compile(f, backend="kgen", options={"gpu_interpreter": "triton" in template, "cache": False})
        got = gradients(compiled, *args)
    for one, other, wanted in zip(got, eager, exact, strict=True):
        assert (one - wanted).norm() <= 1.2 * (other - wanted).norm()


def rounded_loads(kernel: Kernel) -> set[str]:
    values = vs.topological([root for s in kernel.statements for root in s.roots])
    return {v.args[0].attr[0] for v in values if v.op == "round_to" and v.args[0].op == "load" and v.args[0].attr[2] == v.attr}


def kernels(f: Callable[..., Any], *args: Tensor, gpu: bool) -> list[Kernel]:
    return list(plans(f, *args, options=options_for(gpu)).forward.kernels)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("width", [500, 50_000])
def test_all_readers_in_the_kernel_see_what_is_stored(width: int, gpu: bool) -> None:
    """Also what sums up no exponentials, where exponentials are results of their own in between, and where long rows make
    logits a second time."""

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        logits = x + y
        powers = (logits * 2).exp()
        return logits, powers, powers.sum(-1), logits.amax(-1), logits * logits.amax(-1, keepdim=True)

    [kernel] = kernels(f, r(64, width), r(64, width), gpu=gpu)
    [logits] = {s.outs[0] for s in kernel.statements if {v.op for v in vs.topological(s.roots)} == {"load", "add"}}
    values = [value for s in kernel.statements for value in vs.topological(s.roots) if value.op != "round_to"]
    read = [arg for value in values for arg in value.args if arg.op == "add" or (arg.op == "load" and arg.attr[0] == logits)]
    assert logits in rounded_loads(kernel)
    assert not read


@pytest.mark.parametrize("gpu", [False, True])
def test_others_stay_in_float32(gpu: bool) -> None:
    """What is not stored, sums without exponentials, and exponentials that nobody sums up."""

    def not_stored(x: Tensor, y: Tensor) -> Tensor:
        return (x + y).exp().sum(-1)

    def no_exponentials(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = x + y
        return z, z.square().sum(-1), z.exp()

    def made_of_exponentials(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = (x + y).exp()
        return z, z.sum(-1)

    for f in (not_stored, no_exponentials, made_of_exponentials):
        [kernel] = kernels(f, r(64, 500), r(64, 500), gpu=gpu)
        assert not rounded_loads(kernel)
