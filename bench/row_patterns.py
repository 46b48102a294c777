"""Patterns of rows: norms, softmax and losses, top-k, quantisation, random numbers, gathers and scatters, as models have them.

A pattern has 256 MB of traffic or more where its sizes are free. `shrunk` divides the number of rows, so that a CPU can try the
same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.patterns import outputs_of

BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64
FP8 = torch.float8_e4m3fn
LARGEST = 448.0
EXPONENTS = getattr(torch, "float8_e8m0fnu", None)
Function = Callable[..., Any]


@dataclass(frozen=True)
class Given:
    """An input: normal numbers, or integers below `below`. `kept` dimensions, counted from the front, are never shrunk."""

    shape: tuple[int, ...]
    dtype: torch.dtype = BF16
    below: int = 0
    kept: tuple[int, ...] = ()
    channels_last: bool = False
    learnt: bool = True

    def make(self, device: str, seed: int) -> Tensor:
        generator = torch.Generator(device=device).manual_seed(seed)
        if self.below:
            return torch.randint(self.below, self.shape, generator=generator, device=device, dtype=self.dtype)
        made = torch.randn(self.shape, generator=generator, device=device).to(self.dtype)
        return made.to(memory_format=torch.channels_last) if self.channels_last else made


@dataclass(frozen=True)
class Pattern:
    """`written(*inputs)` is one tensor or several. A pattern that `trains` is timed with its backward pass. `moved` gives the
    fewest bytes of the forward pass where that is not all inputs and outputs."""

    name: str
    written: Function
    inputs: tuple[Given, ...]
    trains: bool = False
    quick: bool = False
    random: bool = False
    compared: int | None = None  # results that have to equal eager's: which of equal elements top-k finds is open
    moved: Callable[[Sequence[Tensor], Sequence[Tensor]], int] | None = None

    def make(self, device: str, seed: int = 0) -> list[Tensor]:
        return [given.make(device, 100 * seed + k) for k, given in enumerate(self.inputs)]

    def shrunk(self, by: int) -> Pattern:
        """The same pattern with the rows of its large inputs divided by about `by`."""
        return self if by == 1 else replace(self, inputs=tuple(_fewer(given, by) for given in self.inputs))

    def learnt(self, args: Sequence[Tensor]) -> list[Tensor]:
        """The arguments that get gradients."""
        return [a for a, given in zip(args, self.inputs, strict=True) if a.is_floating_point() and given.learnt]

    def fewest_bytes(self, args: Sequence[Tensor], results: Sequence[Tensor]) -> int:
        """A training step reads the inputs and the results' gradients again, and writes the inputs' gradients."""
        outputs = results[: len(results) - len(self.learnt(args))] if self.trains else results
        forward = self.moved(args, outputs) if self.moved else _bytes(args) + _bytes(outputs)
        if not self.trains:
            return forward
        return 2 * forward + _bytes(results[len(outputs) :])


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def _fewer(given: Given, by: int) -> Given:
    """One-dimensional floating inputs are weights of channels or columns, which stay."""
    if 0 in given.kept or (len(given.shape) == 1 and not given.below):
        return given
    return replace(given, shape=(max(2, given.shape[0] // by), *given.shape[1:]))


@torch.compiler.disable
def _gradient(made: Tensor) -> Tensor:
    """All positive, so that sums over it do not cancel."""
    if not made.dim():
        return torch.ones_like(made)
    return torch.linspace(0.5, 1.5, made.shape[-1], device=made.device).to(made.dtype).expand_as(made)


def trained(function: Function, pattern: Pattern) -> Function:
    """The results of a function and the gradients of its learnt arguments. Gradients of results are real memory, as a model's
    are."""
    gradients: list[Tensor] = []

    def call(*args: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            own = [
                a.detach().requires_grad_(a.is_floating_point() and given.learnt)
                for a, given in zip(args, pattern.inputs, strict=True)
            ]
            made = outputs_of(function(*own))
            if not gradients:
                gradients.extend(_gradient(one).contiguous() for one in made)
            found = torch.autograd.grad(made, [a for a in own if a.requires_grad], gradients)
        return (*(one.detach() for one in made), *found)

    return call


# ---- norms ----------------------------------------------------------------------------------------------------------


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def residual_layer_norm(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    total = x + r
    return F.layer_norm(total, x.shape[-1:], w, b), total


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w)


def written_rms_norm(x: Tensor, w: Tensor) -> Tensor:
    """As models of the Llama family write it."""
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def dropped_layer_norm(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    total = F.dropout(x, 0.1) + r
    return F.layer_norm(total, x.shape[-1:], w, b), total


def group_norm_silu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 32, w, b))


def batch_norm_relu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, w, b, training=True))


def batch_norm_residual(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, w, b, training=True) + r)


def _affine(columns: int, dtype: torch.dtype = BF16, count: int = 2) -> tuple[Given, ...]:
    return (Given((columns,), dtype),) * count


def _rows(rows: int, columns: int, count: int = 1, dtype: torch.dtype = BF16) -> tuple[Given, ...]:
    return (Given((rows, columns), dtype),) * count


def _image(images: int, channels: int, size: int, channels_last: bool) -> Given:
    return Given((images, channels, size, size), channels_last=channels_last)


NORMS = (
    Pattern("residual layer_norm, 4k", residual_layer_norm, (*_rows(16384, 4096, 2), *_affine(4096)), quick=True),
    Pattern("rms_norm, 16k", rms_norm, (*_rows(16384, 16384), *_affine(16384, count=1))),
    Pattern("dropout + residual layer_norm, 4k", dropped_layer_norm, (*_rows(16384, 4096, 2), *_affine(4096)), random=True),
    Pattern("group_norm + silu", group_norm_silu, (_image(32, 256, 112, False), *_affine(256)), quick=True),
    Pattern("group_norm + silu, channels last", group_norm_silu, (_image(32, 256, 112, True), *_affine(256)), quick=True),
    Pattern("batch_norm + relu", batch_norm_relu, (_image(64, 256, 56, False), *_affine(256))),
    Pattern("train layer_norm, 1k", layer_norm, (*_rows(65536, 1024), *_affine(1024)), trains=True),
    Pattern("train layer_norm, 8k", layer_norm, (*_rows(16384, 8192), *_affine(8192)), trains=True),
    Pattern("train rms_norm, 4k", rms_norm, (*_rows(16384, 4096), *_affine(4096, count=1)), trains=True, quick=True),
    Pattern("train rms_norm, 16k", rms_norm, (*_rows(16384, 16384), *_affine(16384, count=1)), trains=True, quick=True),
    Pattern("train written rms_norm, 8k", written_rms_norm, (*_rows(16384, 8192), *_affine(8192, count=1)), trains=True),
    Pattern("train dropout + residual layer_norm, 4k", dropped_layer_norm, (*_rows(16384, 4096, 2), *_affine(4096)),
            trains=True, random=True),
    Pattern("train group_norm + silu", group_norm_silu, (_image(32, 256, 112, False), *_affine(256)), trains=True, quick=True),
    Pattern("train group_norm + silu, channels last", group_norm_silu, (_image(32, 256, 112, True), *_affine(256)),
            trains=True),
    Pattern("train batch_norm + residual + relu", batch_norm_residual,
            (_image(64, 256, 56, False), _image(64, 256, 56, False), *_affine(256)), trains=True),
    Pattern("train batch_norm + relu, channels last", batch_norm_relu, (_image(64, 256, 56, True), *_affine(256)), trains=True),
)  # fmt: skip

# ---- softmax and losses ---------------------------------------------------------------------------------------------


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


def smoothed_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target, label_smoothing=0.1, ignore_index=3)


def weighted_cross_entropy(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target, weight, ignore_index=3)


def _loss(rows: int, columns: int, *more: Given) -> tuple[Given, ...]:
    return (Given((rows, columns)), Given((rows,), I64, below=columns), *more)


LOSSES = (
    Pattern("softmax, 1k", softmax, _rows(131072, 1024)),
    Pattern("softmax, 32k", softmax, _rows(4096, 32768), quick=True),
    Pattern("log_softmax, 16 rows of 256k", log_softmax, (Given((16, 262144), F32, kept=(0,)),)),
    Pattern("softmax, 256k", softmax, _rows(512, 262144), quick=True),
    Pattern("cross_entropy, 128k", cross_entropy, _loss(4096, 128256), quick=True),
    Pattern("smoothed cross_entropy, 32k", smoothed_cross_entropy, _loss(8192, 32000)),
    Pattern("weighted cross_entropy, 32k", weighted_cross_entropy, _loss(8192, 32000, Given((32000,), F32, learnt=False))),
    Pattern("train softmax, 4k", softmax, _rows(32768, 4096), trains=True),
    Pattern("train cross_entropy, 128k", cross_entropy, _loss(2048, 128256), trains=True, quick=True),
    Pattern("train smoothed cross_entropy, 32k", smoothed_cross_entropy, _loss(8192, 32000), trains=True),
)

# ---- top-k ----------------------------------------------------------------------------------------------------------


def largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, positions = torch.topk(x, k)
    return values, positions


def gating(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Experts of a token, and their weights."""
    values, experts = torch.topk(logits.float(), k)
    return torch.softmax(values, -1), experts


def gating_of_softmax(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, experts = torch.topk(torch.softmax(logits.float(), -1), k)
    return values / values.sum(-1, keepdim=True), experts


TOP = (
    Pattern("top 8 of 128k", partial(largest, k=8), (Given((1024, 131072), BF16),), compared=1, quick=True),
    Pattern("top 50 of 128k", partial(largest, k=50), (Given((1024, 131072), BF16),), compared=1),
    Pattern("top 8 of 64 experts", partial(gating, k=8), (Given((1 << 20, 64), F32),), compared=1, quick=True),
    Pattern("top 2 of the softmax of 8 experts", partial(gating_of_softmax, k=2), (Given((1 << 22, 8), F32),), compared=1),
)

# ---- quantisation ---------------------------------------------------------------------------------------------------


def quantised(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Float8 numbers and a scale for each `block` of a row."""
    parts = x.float().unflatten(-1, (-1, block))
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (parts / scale).to(FP8).flatten(-2), scale.squeeze(-1)


def quantised_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return torch.round(wide / scale).clamp(-128, 127).to(torch.int8), scale


def quantised_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scale = wide.abs().amax().clamp(min=1e-12) / LARGEST
    return (wide / scale).to(FP8), scale


def mx_quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP8: a power of two for each 32 elements of a row."""
    parts = x.float().unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(parts.abs().amax(-1, keepdim=True).clamp(min=2.0**-126))) - 8
    scaled = (parts * torch.exp2(-exponent)).clamp(-LARGEST, LARGEST)
    return scaled.to(FP8).flatten(-2), (exponent.squeeze(-1) + 127).to(torch.uint8)


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def after(first: Function, then: Function) -> Function:
    def both(*args: Tensor) -> Any:
        return then(first(*args))

    return both


def by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantised(x, x.shape[-1])


def by_128(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantised(x, 128)


_NORM = (*_rows(32768, 4096), *_affine(4096, count=1))
QUANTISED = (
    Pattern("rms_norm to fp8 by row", after(rms_norm, by_row), _NORM, quick=True),
    Pattern("rms_norm to fp8 by 128", after(rms_norm, by_128), _NORM),
    Pattern("rms_norm to int8 by row", after(rms_norm, quantised_int8), _NORM),
    Pattern("swiglu to fp8 by row", after(swiglu, by_row), _rows(16384, 16384), quick=True),
    Pattern("swiglu to fp8 by 128", after(swiglu, by_128), _rows(16384, 16384)),
    Pattern("swiglu to mxfp8", after(swiglu, mx_quantised), _rows(16384, 16384)),
    Pattern("silu to fp8 by tensor", after(F.silu, quantised_tensor), _rows(16384, 8192)),
)

# ---- random numbers, gathers, scatters ------------------------------------------------------------------------------


def dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.1)


def bernoulli(x: Tensor) -> Tensor:
    return torch.bernoulli(x.sigmoid())


def embedding(table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, table)


def embedding_bag(table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding_bag(ids, table, mode="mean")


def index_add(base: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    return base.index_add(0, ids, rows)


def segment_sum(lengths: Tensor, rows: Tensor, segments: int) -> Tensor:
    return torch.zeros(segments, rows.shape[1], device=rows.device, dtype=rows.dtype).index_add(0, lengths, rows)


def _gathered(args: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    return 2 * _bytes(results) + args[1].nbytes


def _bagged(args: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    table, ids = args
    return ids.numel() * table.shape[1] * table.itemsize + ids.nbytes + _bytes(results)


GATHERS = (
    Pattern("dropout", dropout, _rows(32768, 4096), random=True, quick=True),
    Pattern("bernoulli", bernoulli, _rows(32768, 4096), random=True),
    Pattern("embedding", embedding, (Given((32000, 2048), kept=(0,)), Given((65536,), I64, below=32000)), moved=_gathered),
    Pattern("embedding_bag", embedding_bag, (Given((1 << 20, 128), F32, kept=(0,)), Given((16384, 64), I64, below=1 << 20)),
            moved=_bagged),
    Pattern("train embedding", embedding, (Given((32000, 2048), kept=(0,)), Given((65536,), I64, below=32000)), trains=True,
            moved=_gathered, quick=True),
    Pattern("train embedding of 64 rows", embedding, (Given((64, 1024), kept=(0,)), Given((131072,), I64, below=64)),
            trains=True, moved=_gathered),
    Pattern("index_add, few collisions", index_add,
            (Given((262144, 256), F32, kept=(0,)), Given((131072,), I64, below=262144), Given((131072, 256), F32))),
    Pattern("index_add, many collisions", index_add,
            (Given((64, 256), F32, kept=(0,)), Given((262144,), I64, below=64), Given((262144, 256), F32)), quick=True),
    Pattern("segment sum", partial(segment_sum, segments=4096),
            (Given((262144,), I64, below=4096), Given((262144, 256), F32))),
)  # fmt: skip

BY_NAME: dict[str, Pattern] = {one.name: one for one in (*NORMS, *LOSSES, *TOP, *QUANTISED, *GATHERS)}
