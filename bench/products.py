"""Matrix products with what comes before and after them: the list that templates are measured on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

bf16, f32, i8, f8 = torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn
Function = Callable[..., Any]


@dataclass(frozen=True)
class Given:
    """An argument: its shape, its type, and the scale of its numbers; indices are below `top`."""

    shape: tuple[int, ...]
    dtype: torch.dtype = bf16
    scale: float = 1.0
    top: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def make(self, device: str | torch.device, seed: int = 0) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        if self.top:
            return torch.randint(0, self.top, self.shape, generator=generator, device=device, dtype=self.dtype)
        if self.dtype is i8:
            return torch.randint(-127, 128, self.shape, generator=generator, device=device, dtype=i8)
        if self.dtype is torch.bool:
            return torch.rand(self.shape, generator=generator, device=device) < 0.2
        return (torch.randn(self.shape, generator=generator, device=device) * self.scale).to(self.dtype)


@dataclass(frozen=True)
class Product:
    """`library` is the best that cuBLAS and separate kernels do, where that is not eager; `exact` computes in float32 what `fn`
    does, where `fn` itself does not when its arguments are float32."""

    number: str
    title: str
    fn: Function
    inputs: tuple[Given, ...]
    library: Function | None = None
    exact: Function | None = None
    tf32: bool = False

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.inputs)

    def make(self, device: str | torch.device, seed: int = 0) -> list[Tensor]:
        return [one.make(device, 100 * seed + k) for k, one in enumerate(self.inputs)]

    def reference(self, args: Sequence[Tensor]) -> Any:
        wide = [a.float() if a.is_floating_point() else a for a in args]
        return (self.exact or self.fn)(*wide)


def weight(*shape: int, inner: int, dtype: torch.dtype = bf16) -> Given:
    return Given(shape, dtype, inner**-0.5)


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def gelu_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return gelu(F.linear(x, w, b))


def gelu_library(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch._addmm_activation(b, x, w.t(), use_gelu=True)


def linear_residual(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.linear(x, w, b) + r


def squared_relu(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w) ** 2


def gate_up(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(F.linear(x, w)) * F.linear(x, v)


def norm_linear(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, (x.shape[-1],), g), w)


def exp_sum(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).exp().sum(-1)


def linear_cross_entropy(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), target)


def dequantised(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, w.to(s.dtype) * s.unsqueeze(1))


def silu_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.linear(x, w, b))


def silu_product(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(x @ w + b)


def qkv(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, w, b) for w, b in zip(weights[:3], weights[3:], strict=True))


def gelu_gradient(dy: Tensor, w: Tensor, saved: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten.gelu_backward(dy @ w, saved, approximate="tanh")
    return result


def weight_gradients(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return dy.t() @ x, dy.sum(0)


def scores(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((q @ k.transpose(1, 2) * 0.125).masked_fill(mask, -math.inf), -1)


def batched(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return torch.bmm(x, w) + b + r


def product_norm(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return F.layer_norm(x @ w + r, (w.shape[1],))


def relu_linear(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(F.linear(x, w))


def wide_linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).float()


def scaled(x: Tensor, w: Tensor, s: Tensor, t: Tensor) -> Tensor:
    return gelu(torch._scaled_mm(x, w.t(), s, t, out_dtype=bf16, use_fast_accum=True))


def scaled_exactly(x: Tensor, w: Tensor, s: Tensor, t: Tensor) -> Tensor:
    return gelu(F.linear(x, w) * s * t)


def product_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b, x, w)


def _linear(number: str, title: str, fn: Function, m: int, k: int, n: int, *more: Given, **how: Any) -> Product:
    return Product(number, title, fn, (Given((m, k)), weight(n, k, inner=k), Given((n,)), *more), **how)


G = Given
PRODUCTS: tuple[Product, ...] = (
    _linear("1", "gelu(x w + b) 4096x4096x16384", gelu_linear, 4096, 4096, 16384, library=gelu_library),
    _linear("2", "x w + b + r 4096^3", linear_residual, 4096, 4096, 4096, G((4096, 4096))),
    Product("3", "relu(x w)^2 3000x1000x5000", squared_relu, (G((3000, 1000)), weight(1000, 5000, inner=1000))),
    Product(
        "4", "silu(x w1) * (x w3) 4096x4096x11008", gate_up,
        (G((4096, 4096)), weight(11008, 4096, inner=4096), weight(11008, 4096, inner=4096)),
    ),
    Product("5", "rms_norm then linear 4096^3", norm_linear, (G((4096, 4096)), G((4096,)), weight(4096, 4096, inner=4096))),
    Product("6", "exp(x w).sum(-1) 8192x2048x8192", exp_sum, (G((8192, 2048)), weight(2048, 8192, inner=2048))),
    Product(
        "7", "linear + cross-entropy 4096x4096x32000", linear_cross_entropy,
        (G((4096, 4096)), weight(32000, 4096, inner=4096), G((4096,), torch.int64, top=32000)),
    ),
    Product(
        "8", "int8 weights dequantised 16x8192x8192", dequantised,
        (G((16, 8192)), G((8192, 8192), i8), G((8192,), scale=1e-4)),
    ),
    _linear("9", "silu(x w + b) 1x8192x8192", silu_linear, 1, 8192, 8192),
    Product(
        "10", "gate/up 8x4096x11008", gate_up,
        (G((8, 4096)), weight(11008, 4096, inner=4096), weight(11008, 4096, inner=4096)),
    ),
    Product(
        "11", "q/k/v with bias 2048x4096x(4096, 1024, 1024)", qkv,
        (G((2048, 4096)), *(weight(n, 4096, inner=4096) for n in (4096, 1024, 1024)), *(G((n,)) for n in (4096, 1024, 1024))),
    ),
    _linear("12", "gelu(x w + b) 512x4096x4096", gelu_linear, 512, 4096, 4096, library=gelu_library),
    _linear("13", "gelu(x w + b) 2048x1024x4096", gelu_linear, 2048, 1024, 4096, library=gelu_library),
    Product(
        "14", "(dy w) * gelu'(saved) 4096x16384x4096", gelu_gradient,
        (G((4096, 16384)), weight(16384, 4096, inner=16384), G((4096, 4096))),
    ),
    Product("15", "dy^T x and dy.sum(0) 4096^3", weight_gradients, (G((4096, 4096)), weight(4096, 4096, inner=4096))),
    Product(
        "16", "softmax(mask(q k^T * s)) 64x1024x64x1024", scores,
        (G((64, 1024, 64)), G((64, 1024, 64)), G((1024, 1024), torch.bool)),
    ),
    Product(
        "17", "bmm + bias + residual 32x512x1024x1024", batched,
        (G((32, 512, 1024)), weight(32, 1024, 1024, inner=1024), G((1024,)), G((32, 512, 1024))),
    ),
    Product(
        "18", "layer_norm(x w + r) 8192x1024x1024", product_norm,
        (G((8192, 1024)), weight(1024, 1024, inner=1024), G((8192, 1024))),
    ),
    Product(
        "19", "relu(x w) fp32 with TF32 4096x1024x4096", relu_linear,
        (G((4096, 1024), f32), weight(4096, 1024, inner=1024, dtype=f32)), tf32=True,
    ),
    Product("20", "x w to fp32 4096x768x50257", wide_linear, (G((4096, 768)), weight(50257, 768, inner=768))),
    Product(
        "21", "gelu(scaled fp8 mm) 4096x4096x8192", scaled,
        (G((4096, 4096), f8), G((8192, 4096), f8), G((), f32, 1 / 64), G((), f32)), exact=scaled_exactly,
    ),
    Product("22", "x w + b 256x32768x256", product_bias, (G((256, 32768)), weight(32768, 256, inner=32768), G((256,)))),
)  # fmt: skip
# The same products with the other layout of the weights.
MORE: tuple[Product, ...] = (
    Product(
        "12kn", "gelu(x w + b) 512x4096x4096, w by columns", lambda x, w, b: gelu(torch.addmm(b, x, w)),
        (G((512, 4096)), weight(4096, 4096, inner=4096), G((4096,))),
    ),
    Product(
        "9kn", "silu(x w + b) 1x8192x8192, w by columns", silu_product,
        (G((1, 8192)), weight(8192, 8192, inner=8192), G((8192,))),
    ),
    Product(
        "1kn", "gelu(x w + b) 4096x4096x16384, w by columns", lambda x, w, b: gelu(torch.addmm(b, x, w)),
        (G((4096, 4096)), weight(4096, 16384, inner=4096), G((16384,))),
    ),
)  # fmt: skip
BY_NUMBER = {one.number: one for one in (*PRODUCTS, *MORE)}
