"""Matmuls with what comes before and after them: the list that templates are measured on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bench.patterns import outputs_of

bf16, f32, i8, f8 = torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn
Function = Callable[..., Any]


@dataclass(frozen=True)
class Given:
    """An argument: its shape, its type, and the scale of its numbers; indices are below `top`, and in order if they are to
    be `rising`."""

    shape: tuple[int, ...]
    dtype: torch.dtype = bf16
    scale: float = 1.0
    top: int = 0
    rising: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def make(self, device: str | torch.device, seed: int = 0) -> Tensor:
        if str(device) == "meta":
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        generator = torch.Generator(device).manual_seed(seed)
        if self.top:
            made = torch.randint(0, self.top, self.shape, generator=generator, device=device, dtype=self.dtype)
            return made.sort().values if self.rising else made
        if self.dtype is i8:
            return torch.randint(-127, 128, self.shape, generator=generator, device=device, dtype=i8)
        if self.dtype is torch.bool:
            return torch.rand(self.shape, generator=generator, device=device) < 0.2
        return (torch.randn(self.shape, generator=generator, device=device) * self.scale).to(self.dtype)

    def shrunk(self, by: int) -> Given:
        return replace(self, shape=tuple(shorter(n, by) for n in self.shape), top=self.top and shorter(self.top, by))


def shorter(length: int, by: int) -> int:
    """A length for trying things out: equal ones stay equal, what 16 divides is still so, odd ones stay odd."""
    if length <= 64:
        return length
    return max(16, round(length / by / 16) * 16) + length % 2


@dataclass(frozen=True)
class Matmul:
    """`library` is the best that cuBLAS and separate kernels do, where that is not eager; `bare` the cuBLAS matmuls alone,
    where they take the arguments as they are; `exact` computes in float32 what `fn` does, where `fn` itself does not when its
    arguments are float32."""

    number: str
    title: str
    fn: Function
    inputs: tuple[Given, ...]
    library: Function | None = None
    exact: Function | None = None
    tf32: bool = False
    bare: Function | None = None

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.inputs)

    @property
    def flops(self) -> int:
        """Of the matmuls; what comes before and after is left out."""
        with FlopCounterMode(display=False) as counter:
            self.fn(*self.make("meta"))
        return counter.get_total_flops()

    @property
    def fewest_bytes(self) -> int:
        """Every argument read once and every result written once."""
        return self.nbytes + sum(one.nbytes for one in outputs_of(self.fn(*self.make("meta"))))

    @property
    def rate(self) -> str:
        """The kind of arithmetic, whose speed bounds it."""
        return "float8" if any(one.dtype is f8 for one in self.inputs) else "tf32" if self.tf32 else "bfloat16"

    def shrunk(self, by: int) -> Matmul:
        """The same with lengths divided by about `by`."""
        return self if by == 1 else replace(self, inputs=tuple(one.shrunk(by) for one in self.inputs))

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


def norm_gelu(x: Tensor, g: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return gelu(F.linear(F.rms_norm(x, (x.shape[-1],), g), w, b))


def gated_residual(x: Tensor, y: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return F.linear(F.silu(x) * y, w) + r


def exp_sum(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).exp().sum(-1)


def linear_cross_entropy(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), target)


def dequantised(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, w.to(s.dtype) * s.unsqueeze(1))


def halves(w: Tensor, dim: int) -> Tensor:
    """The numbers of 4 bits in bytes, of which each holds two neighbours along `dim`."""
    return torch.stack(((w & 15).to(i8) - 8, (w >> 4).to(i8) - 8), dim + 1).flatten(dim, dim + 1)


def dequantised_groups(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    """Two numbers in a byte, neighbours along the sum, and a scale for each row and group along the sum."""
    groups = halves(w, 1).unflatten(1, (s.shape[1], -1))
    return F.linear(x, (groups.to(s.dtype) * s.unsqueeze(2)).flatten(1))


def dequantised_columns(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    """The same with the other layout of the weights."""
    groups = halves(w, 0).unflatten(0, (s.shape[0], -1))
    return x @ (groups.to(s.dtype) * s.unsqueeze(1)).flatten(0, 1)


def silu_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.linear(x, w, b))


def silu_matmul(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
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


def matmul_norm(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return F.layer_norm(x @ w + r, (w.shape[1],))


def relu_linear(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(F.linear(x, w))


def relu_matmul(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w)


def wide_linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).float()


def times(x: Tensor, w: Tensor, *_: Tensor) -> Tensor:
    return x @ w


def times_rows(x: Tensor, w: Tensor, *_: Tensor) -> Tensor:
    return x @ w.t()


def times_both(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return x @ w.t(), x @ v.t()


def times_three(x: Tensor, u: Tensor, v: Tensor, w: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x @ u.t(), x @ v.t(), x @ w.t()


def normless(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


def scaled(x: Tensor, w: Tensor, s: Tensor, t: Tensor) -> Tensor:
    return gelu(torch._scaled_mm(x, w.t(), s, t, out_dtype=bf16, use_fast_accum=True))


def scaled_exactly(x: Tensor, w: Tensor, s: Tensor, t: Tensor) -> Tensor:
    return gelu(F.linear(x, w) * s * t)


def matmul_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b, x, w)


def _linear(number: str, title: str, fn: Function, m: int, k: int, n: int, *more: Given, **how: Any) -> Matmul:
    return Matmul(number, title, fn, (Given((m, k)), weight(n, k, inner=k), Given((n,)), *more), bare=times_rows, **how)


G = Given
MATMULS: tuple[Matmul, ...] = (
    _linear("1", "gelu(x w + b) 4096x4096x16384", gelu_linear, 4096, 4096, 16384, library=gelu_library),
    _linear("2", "x w + b + r 4096^3", linear_residual, 4096, 4096, 4096, G((4096, 4096))),
    Matmul("3", "relu(x w)^2 3000x1000x5000", squared_relu, (G((3000, 1000)), weight(1000, 5000, inner=1000)), bare=times),
    Matmul(
        "4", "silu(x w1) * (x w3) 4096x4096x11008", gate_up,
        (G((4096, 4096)), weight(11008, 4096, inner=4096), weight(11008, 4096, inner=4096)), bare=times_both,
    ),
    Matmul(
        "5", "rms_norm then linear 4096^3", norm_linear,
        (G((4096, 4096)), G((4096,)), weight(4096, 4096, inner=4096)), bare=normless,
    ),
    Matmul("6", "exp(x w).sum(-1) 8192x2048x8192", exp_sum, (G((8192, 2048)), weight(2048, 8192, inner=2048)), bare=times),
    Matmul(
        "7", "linear + cross-entropy 4096x4096x32000", linear_cross_entropy,
        (G((4096, 4096)), weight(32000, 4096, inner=4096), G((4096,), torch.int64, top=32000)), bare=times_rows,
    ),
    Matmul(
        "8", "int8 weights dequantised 16x8192x8192", dequantised,
        (G((16, 8192)), G((8192, 8192), i8), G((8192,), scale=1e-4)),
    ),
    _linear("9", "silu(x w + b) 1x8192x8192", silu_linear, 1, 8192, 8192),
    Matmul(
        "10", "gate/up 8x4096x11008", gate_up,
        (G((8, 4096)), weight(11008, 4096, inner=4096), weight(11008, 4096, inner=4096)), bare=times_both,
    ),
    Matmul(
        "11", "q/k/v with bias 2048x4096x(4096, 1024, 1024)", qkv,
        (G((2048, 4096)), *(weight(n, 4096, inner=4096) for n in (4096, 1024, 1024)), *(G((n,)) for n in (4096, 1024, 1024))),
        bare=times_three,
    ),
    _linear("12", "gelu(x w + b) 512x4096x4096", gelu_linear, 512, 4096, 4096, library=gelu_library),
    _linear("13", "gelu(x w + b) 2048x1024x4096", gelu_linear, 2048, 1024, 4096, library=gelu_library),
    Matmul(
        "14", "(dy w) * gelu'(saved) 4096x16384x4096", gelu_gradient,
        (G((4096, 16384)), weight(16384, 4096, inner=16384), G((4096, 4096))), bare=times,
    ),
    Matmul(
        "15", "dy^T x and dy.sum(0) 4096^3", weight_gradients, (G((4096, 4096)), weight(4096, 4096, inner=4096)),
        bare=lambda dy, x: dy.t() @ x,
    ),
    Matmul(
        "16", "softmax(mask(q k^T * s)) 64x1024x64x1024", scores,
        (G((64, 1024, 64)), G((64, 1024, 64)), G((1024, 1024), torch.bool)), bare=lambda q, k, mask: q @ k.transpose(1, 2),
    ),
    Matmul(
        "17", "bmm + bias + residual 32x512x1024x1024", batched,
        (G((32, 512, 1024)), weight(32, 1024, 1024, inner=1024), G((1024,)), G((32, 512, 1024))), bare=times,
    ),
    Matmul(
        "18", "layer_norm(x w + r) 8192x1024x1024", matmul_norm,
        (G((8192, 1024)), weight(1024, 1024, inner=1024), G((8192, 1024))), bare=times,
    ),
    Matmul(
        "19", "relu(x w) fp32 with TF32 4096x1024x4096", relu_linear,
        (G((4096, 1024), f32), weight(4096, 1024, inner=1024, dtype=f32)), tf32=True, bare=times_rows,
    ),
    Matmul("20", "x w to fp32 4096x768x50257", wide_linear, (G((4096, 768)), weight(50257, 768, inner=768)), bare=times_rows),
    Matmul(
        "21", "gelu(scaled fp8 mm) 4096x4096x8192", scaled,
        (G((4096, 4096), f8), G((8192, 4096), f8), G((), f32, 1 / 64), G((), f32)), exact=scaled_exactly,
        bare=lambda x, w, s, t: torch._scaled_mm(x, w.t(), s, t, out_dtype=bf16, use_fast_accum=True),
    ),
    Matmul(
        "22", "x w + b 256x32768x256", matmul_bias, (G((256, 32768)), weight(32768, 256, inner=32768), G((256,))), bare=times,
    ),
)  # fmt: skip
# The same matmuls with the other layout of the weights, narrower weights, and rows of odd lengths.
MORE: tuple[Matmul, ...] = (
    Matmul(
        "8half", "int4 weights dequantised 16x8192x8192, groups of 128", dequantised_groups,
        (G((16, 8192)), G((8192, 4096), torch.uint8, top=256), G((8192, 64), scale=1e-3)),
    ),
    Matmul(
        "8halfkn", "int4 weights dequantised 16x8192x8192, groups of 128, w by columns", dequantised_columns,
        (G((16, 8192)), G((4096, 8192), torch.uint8, top=256), G((64, 8192), scale=1e-3)),
    ),
    Matmul(
        "9half", "int4 weights dequantised 1x8192x8192, groups of 128", dequantised_groups,
        (G((1, 8192)), G((8192, 4096), torch.uint8, top=256), G((8192, 64), scale=1e-3)),
    ),
    Matmul(
        "12kn", "gelu(x w + b) 512x4096x4096, w by columns", lambda x, w, b: gelu(torch.addmm(b, x, w)),
        (G((512, 4096)), weight(4096, 4096, inner=4096), G((4096,))), bare=times,
    ),
    Matmul(
        "9kn", "silu(x w + b) 1x8192x8192, w by columns", silu_matmul,
        (G((1, 8192)), weight(8192, 8192, inner=8192), G((8192,))), bare=times,
    ),
    Matmul(
        "1kn", "gelu(x w + b) 4096x4096x16384, w by columns", lambda x, w, b: gelu(torch.addmm(b, x, w)),
        (G((4096, 4096)), weight(4096, 16384, inner=4096), G((16384,))), bare=times,
    ),
    Matmul(
        "5gelu", "gelu(rms_norm(x) w + b) 4096x4096x16384", norm_gelu,
        (G((4096, 4096)), G((4096,)), weight(16384, 4096, inner=4096), G((16384,))),
        bare=lambda x, g, w, b: x @ w.t(),
    ),
    Matmul(
        "5gate", "silu(x) * y, linear, + r 4096x11008x4096", gated_residual,
        (G((4096, 11008)), G((4096, 11008)), weight(4096, 11008, inner=11008), G((4096, 4096))),
        bare=lambda x, y, w, r: x @ w.t(),
    ),
    Matmul("odd", "relu(x w) 4096x1001x4096", relu_matmul, (G((4096, 1001)), weight(1001, 4096, inner=1001)), bare=times),
    Matmul("oddall", "relu(x w) 2047x2047x2047", relu_matmul, (G((2047, 2047)), weight(2047, 2047, inner=2047)), bare=times),
    Matmul(
        "oddrows", "relu(x w^T) 4096x1001x4096", relu_linear, (G((4096, 1001)), weight(4096, 1001, inner=1001)), bare=times_rows
    ),
    Matmul("20kn", "relu(x w) 4096x768x50257", relu_matmul, (G((4096, 768)), weight(768, 50257, inner=768)), bare=times),
)  # fmt: skip
BY_NUMBER = {one.number: one for one in (*MATMULS, *MORE)}
