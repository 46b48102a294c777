"""Matmuls of few rows whose warps share the sum, and weights of 8 bits that become floats without a conversion."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from slow import slow_but
from torch import Tensor

from kgen.build import triton
from kgen.ir.plan import members
from kgen.only import only
from kgen.scheduler import Gpu, Options
from kgen.templates import registry
from tests.kernels import plans
from tests.matmuls import compiled, error, forced

NAME = "triton_matmul_sliced_k"
# Bytes of shared memory that a program may have.
SHARED = {80: 166912, 90: 232448}
bf, h = torch.bfloat16, torch.float16
KINDS = [(weights, floats) for weights in (torch.int8, torch.uint8) for floats in (bf, h)]


def r(*shape: int, dtype: torch.dtype = bf) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def q(*shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def linear(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, w.to(s.dtype) * s.unsqueeze(1))


def block(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
    return F.gelu(linear(x, w, s) + b)


def gate_up(x: Tensor, w: Tensor, v: Tensor, s: Tensor) -> Tensor:
    return F.silu(linear(x, w, s)) * linear(x, v, s)


def numbers(count: int, beside: Tensor) -> Tensor:
    return torch.arange(count, device=beside.device)


Case = tuple[Callable[..., Tensor], tuple[Tensor, ...]]
CASES: dict[str, Case] = {
    "linear": (linear, (r(16, 200), q(72, 200), r(72) * 0.01)),
    "bias and activation": (block, (r(5, 200), q(72, 200), r(72) * 0.01, r(72))),
    "gate and up": (gate_up, (r(3, 200), q(72, 200), q(73, 200)[:72], r(72) * 0.01)),
    "more rows": (linear, (r(27, 200), q(72, 200), r(72) * 0.01)),
    "columns first": (lambda x, w: x @ w.to(bf), (r(8, 200), q(200, 72))),
    "as they are": (lambda x, w: torch.relu(x @ w), (r(8, 200), r(200, 72))),
    "batch": (lambda x, w: torch.bmm(x, w.to(bf)), (r(3, 4, 120), q(3, 120, 40))),
    "in halves": (lambda x, w: x @ w.to(h), (r(8, 200, dtype=h), q(200, 72, dtype=torch.uint8))),
    "made of nothing": (
        lambda x: torch.relu(x @ (numbers(72, x)[None] * numbers(200, x)[:, None] % 7).to(bf)),
        (r(8, 200),),
    ),
    "rows looked up": (lambda x, w, i: x @ (w[i].to(bf) * 2), (r(8, 200), q(300, 72), torch.arange(200) * 7 % 300)),
    "scaled in float32": (lambda x, w, s: x @ (w.float() * s).to(bf), (r(8, 200), q(200, 72), r(72).float())),
}


@pytest.mark.interpret
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_eager(name: str) -> None:
    fn, args = CASES[name]
    with forced(NAME) as made:
        got = compiled(fn, *args)
    assert error(got, fn(*(a.double() if a.is_floating_point() and name == "as they are" else a for a in args))) < 1e-2
    assert len(made.kernels) == len(made.matmuls) == 1


@pytest.mark.interpret
def test_long_matrices_are_the_rows_of_others() -> None:
    """Whichever of the operands is short, it is the one with few rows."""
    with forced(NAME) as made:
        x, w = r(72, 200), r(200, 6)
        assert error(compiled(torch.mm, x, w), x @ w) < 1e-2
    assert "m x1<6" in made.matmuls[0].source


@pytest.mark.every(5)
@pytest.mark.ptx
@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("name", CASES)
def test_they_compile(name: str, arch: int) -> None:
    """Within the memory that they ask for, without a stack, and without the conversion that makes 16 floats in a cycle."""
    fn, args = CASES[name]
    with forced(NAME, lambda configs: configs[:1], runs=False) as made:
        compiled(fn, *args)
    [kernel] = triton.compile_kernels(made.matmuls, arch)
    assert kernel.stack == 0
    assert kernel.shared <= made.needs[0].shared
    assert name == "made of nothing" or not re.search(r"\bI2F", triton.dumped(kernel.cubin, "-sass"))


LONG: dict[str, Case] = {
    "linear": (linear, (r(16, 2048), q(1024, 2048), r(1024))),
    "odd lengths": (gate_up, (r(16, 1040), q(1000, 1040), q(1001, 1040)[:1000], r(1000))),
    "columns first": (lambda x, w: x @ w.to(bf), (r(32, 2048), q(2048, 1024))),
    "rows computed": (lambda x, g, w: (x * g).to(bf) @ w.to(bf).t(), (r(16, 2048).float(), r(2048).float(), q(1024, 2048))),
    "halves of bytes": (lambda x, w: x @ torch.stack((w & 15, w >> 4), 2).flatten(1).to(bf).t(), (r(16, 2048), q(1024, 1024))),
}


@pytest.mark.every(2)
@pytest.mark.ptx
@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("name", slow_but(lambda name: name == "linear", LONG))
def test_every_configuration_fits(name: str, arch: int) -> None:
    """Sums of several steps, so that all stages are there."""
    fn, args = LONG[name]
    with forced(NAME, list, runs=False) as made:
        compiled(fn, *args)
    on_offer = [(c, needs) for c, needs in zip(made.configs, made.needs, strict=True) if needs.shared <= SHARED[arch]]
    assert on_offer
    for config, needs in on_offer:
        with forced(NAME, lambda _, config=config: [config], runs=False) as one:
            compiled(fn, *args)
        [kernel] = triton.compile_kernels(one.matmuls, arch)
        assert kernel.shared <= needs.shared, config
        assert kernel.stack <= 16 or name == "columns first", config


@pytest.mark.parametrize("weights", [torch.int8, bf])
def test_where_weights_are_computed_it_is_the_choice(weights: torch.dtype) -> None:
    """By the estimate: with weights as they are, templates that multiply whole sums are faster, or the library."""
    x, w, s = torch.empty(16, 8192, dtype=bf), torch.empty(8192, 8192, dtype=weights), torch.empty(8192, dtype=bf)
    fn = linear if weights is torch.int8 else lambda x, w, s: torch.relu(F.linear(x, w) + s)
    plan = plans(fn, x, w, s, options=Options(gpu_everywhere=True, gpu=Gpu(arch=90))).forward
    choices = [members(step)[0].choice for step in plan.kernels]
    assert (NAME in [choice.template for choice in choices if choice is not None]) == (weights is torch.int8)


def test_exact_matmuls_are_left_to_others() -> None:
    assert NAME in {t.name for t in registry.every("cuda")}
    with forced(NAME) as made:
        compiled(torch.mm, r(8, 96, dtype=torch.float32), r(96, 72, dtype=torch.float32))
    assert not made.matmuls


@pytest.mark.gpu
@pytest.mark.parametrize(("weights", "floats"), KINDS)
def test_all_bytes_on_a_gpu(weights: torch.dtype, floats: torch.dtype) -> None:
    """Every byte, as it is and scaled, against eager: bit for bit."""
    eye = torch.eye(256, dtype=floats, device="cuda")
    bytes_ = torch.arange(256, device="cuda").to(torch.uint8).view(weights)
    w = bytes_.repeat(256, 1).contiguous()
    scales = torch.randn(256, device="cuda").to(floats)
    torch._dynamo.reset()
    for fn in (lambda a, w, s: a @ w.to(floats), lambda a, w, s: a @ (w.to(floats) * s), lambda a, w, s: w.float() * 3):
        got = torch.compile(fn, backend="kgen", options={"cache": False})(eye, w, scales)
        assert torch.equal(got, fn(eye, w, scales))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_eager_on_a_gpu(name: str) -> None:
    fn, args = CASES[name]
    args = tuple(a.cuda() for a in args)
    torch._dynamo.reset()
    with only(NAME, lambda configs: configs[0]):
        got = torch.compile(fn, backend="kgen", fullgraph=True, options={"cache": False, "poison": True})(*args)
    assert error(got, fn(*args)) < 1e-2
