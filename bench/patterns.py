"""Memory-bound patterns as users write them: what to run, on which inputs, and the fewest bytes it can move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Pattern:
    """`make(n)` gives inputs of about n MB; `fn(*inputs)` a tensor or a tuple of tensors.

    `trains`: floating inputs of index `differentiable` (all floating ones when None) get gradients in the training step.
    `bytes_moved(inputs, outputs)` overrides the sum of inputs and outputs where not all of an input is read.
    `random`: outputs cannot be compared with eager's. `mutates`: an input changes at each call.
    """

    name: str
    make: Callable[[int], Inputs]
    fn: Callable[..., Any]
    trains: bool = False
    differentiable: tuple[int, ...] | None = None
    bytes_moved: Callable[[Inputs, Sequence[Tensor]], int] | None = None
    random: bool = False
    mutates: bool = False

    def inputs(self, megabytes: int, device: str = "cpu") -> Inputs:
        """The same values at every call."""
        torch.manual_seed(0)
        return tuple(value.to(device) for value in self.make(megabytes))

    def fewest_bytes(self, inputs: Inputs, outputs: Sequence[Tensor]) -> int:
        """Of the forward: each input read once, each output written once."""
        if self.bytes_moved:
            return self.bytes_moved(inputs, outputs)
        return sum(t.nbytes for t in inputs) + sum(t.nbytes for t in outputs)

    def differentiable_inputs(self, inputs: Inputs) -> list[Tensor]:
        chosen = range(len(inputs)) if self.differentiable is None else self.differentiable
        return [inputs[i] for i in chosen if inputs[i].is_floating_point()]


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _rows(width: int, dtype: torch.dtype = torch.float32) -> Callable[[int], Inputs]:
    """One tensor (rows, width)."""
    return lambda n: (_random(_count(n, width, dtype), width, dtype=dtype),)


def _count(megabytes: int, width: int, dtype: torch.dtype = torch.float32) -> int:
    return max(2, megabytes * 2**20 // (width * dtype.itemsize))


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(*shape).to(dtype)
    if dtype is torch.bool:
        return torch.rand(*shape) < 0.5
    info = torch.iinfo(dtype)
    return torch.randint(max(info.min, -1000), min(info.max, 1000), shape, dtype=dtype)


# ---- the functions, as a model would have them -----------------------------------------------------------------------


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1)


def log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, dim=-1)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def gelu_chain(x: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh") * scale + x


def residual_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.layer_norm(total, total.shape[-1:], weight, bias), total


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


def transposed_add(x: Tensor, y: Tensor) -> Tensor:
    return x + y.t()


def permuted_copy(x: Tensor) -> Tensor:
    return x.permute(0, 2, 1, 3).contiguous()


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, 8, weight, bias)


def batch_norm_inference(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, mean, variance, weight, bias, training=False))


def embedding_norm(ids: Tensor, table: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(F.embedding(ids, table), table.shape[-1:], weight, bias)


def where_bool(mask: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(mask & (x > 0), x * 2, y - 1)


def int64_index_arithmetic(x: Tensor) -> Tensor:
    row = torch.arange(x.shape[0], device=x.device)[:, None]
    return (x * 31 + row) % 1021 + torch.div(x, 7, rounding_mode="floor")


def half_gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


def float64_reduction(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(-1), (x * x).mean(-1)


def uint8_normalise(pixels: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    return (pixels.float() / 255 - mean[:, None, None]) / deviation[:, None, None]


def int8_dequantise(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (x.float() - zero[:, None]) * scale[:, None]


def outer_variance(x: Tensor) -> Tensor:
    return x.var(0)


def bias_gradient(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    through = gradient * (x > 0)
    return through, through.sum(0)


def cumulative_sum(x: Tensor) -> Tensor:
    return torch.cumsum(x, dim=-1)


def row_argmax(x: Tensor) -> Tensor:
    return x.argmax(-1)


def max_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, stride=2, padding=1)


def bilinear_upsample(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


def strided_slice(x: Tensor) -> Tensor:
    return x[:, ::2] * 2 + x[:, 1::2]


def narrow_rows(x: Tensor) -> Tensor:
    return torch.softmax(x * 2 + 1, dim=-1)


def scatter_add(target: Tensor, index: Tensor, source: Tensor) -> Tensor:
    return target.scatter_add(0, index, source)


def dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.1, training=True) * 2


def adam_step(parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: Tensor) -> Tensor:
    step += 1
    mean.lerp_(gradient, 0.1)
    square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    rate = 1e-3 / (1 - 0.9**step)
    deviation = square.sqrt() / (1 - 0.999**step).sqrt() + 1e-8
    parameter.sub_(rate * mean / deviation)
    return step


# ---- inputs and byte counts that take more than a line -------------------------------------------------------------------


def _norm_inputs(width: int, parameters: int, tensors: int = 1) -> Callable[[int], Inputs]:
    """`tensors` of (rows, width), then `parameters` of (width,)."""

    def make(n: int) -> Inputs:
        rows = _count(n, width * tensors)
        return (*(_random(rows, width) for _ in range(tensors)), *(_random(width) for _ in range(parameters)))

    return make


def _square(tensors: int) -> Callable[[int], Inputs]:
    def make(n: int) -> Inputs:
        side = int((n * 2**20 / 4 / tensors) ** 0.5)
        return tuple(_random(side, side) for _ in range(tensors))

    return make


def _images(channels: int, side: int, *vectors: str, channels_last: bool = False) -> Callable[[int], Inputs]:
    """One image batch (count, channels, side, side) and vectors (channels,), "positive" ones for variances."""

    def make(n: int) -> Inputs:
        images = _random(max(1, _count(n, channels * side * side) - 1), channels, side, side)
        if channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return (images, *(torch.rand(channels) + 0.5 if kind == "positive" else _random(channels) for kind in vectors))

    return make


def _embedding_inputs(n: int) -> Inputs:
    width, vocabulary = 512, 10000
    return torch.randint(vocabulary, (_count(n, width),)), _random(vocabulary, width), _random(width), _random(width)


def _embedding_bytes(inputs: Inputs, outputs: Sequence[Tensor]) -> int:
    """Only the rows that are looked up, each once."""
    ids, table, *rest = inputs
    read = int(ids.unique().numel()) * table.shape[1] * table.itemsize
    return ids.nbytes + read + sum(t.nbytes for t in (*rest, *outputs))


def _cross_entropy_inputs(n: int) -> Inputs:
    classes = 16384
    rows = _count(n, classes)
    return _random(rows, classes), torch.randint(classes, (rows,))


def _where_inputs(n: int) -> Inputs:
    rows = _count(n, 2 * 1024)
    return _random(rows, 1024, dtype=torch.bool), _random(rows, 1024), _random(rows, 1024)


def _pixels(n: int) -> Inputs:
    shape = (max(1, n * 2**20 // 5 // (3 * 256 * 256)), 3, 256, 256)
    return torch.randint(0, 256, shape, dtype=torch.uint8), torch.rand(3), torch.rand(3) + 0.5


def _quantised(n: int) -> Inputs:
    rows = max(2, n * 2**20 // 5 // 1024)
    return _random(rows, 1024, dtype=torch.int8), torch.rand(rows), torch.rand(rows)


def _scatter_inputs(n: int) -> Inputs:
    rows, width = _count(n, 64), 64
    targets = max(2, rows // 4)
    index = torch.randint(targets, (rows, 1)).expand(rows, width).contiguous()
    return _random(targets, width), index, _random(rows, width)


def _adam_inputs(n: int) -> Inputs:
    count = n * 2**20 // 16
    return _random(count), _random(count), torch.zeros(count), torch.zeros(count), torch.zeros(())


def _adam_bytes(inputs: Inputs, outputs: Sequence[Tensor]) -> int:
    """Four are read, three of them written."""
    return sum(t.nbytes for t in inputs[:4]) + sum(t.nbytes for t in (inputs[0], inputs[2], inputs[3]))


def _permuted_inputs(n: int) -> Inputs:
    return (_random(max(1, n * 2**20 // 4 // (256 * 8 * 64)), 256, 8, 64),)


PATTERNS: tuple[Pattern, ...] = (
    Pattern("softmax", _rows(1024), softmax, trains=True),
    Pattern("log_softmax", _rows(1024), log_softmax, trains=True),
    Pattern("layer_norm", _norm_inputs(1024, 2), layer_norm, trains=True),
    Pattern("rms_norm", _norm_inputs(1024, 1), rms_norm, trains=True),
    Pattern("gelu_chain", _norm_inputs(1024, 2), gelu_chain, trains=True),
    Pattern("residual_norm", _norm_inputs(1024, 2, tensors=2), residual_norm, trains=True),
    Pattern("cross_entropy", _cross_entropy_inputs, cross_entropy, trains=True),
    Pattern("transposed_add", _square(2), transposed_add),
    Pattern("permuted_copy", _permuted_inputs, permuted_copy),
    Pattern("group_norm_channels_last", _images(64, 56, "", "", channels_last=True), group_norm, trains=True),
    Pattern("batch_norm_inference", _images(64, 56, "", "positive", "", ""), batch_norm_inference),
    Pattern("embedding_norm", _embedding_inputs, embedding_norm, trains=True, bytes_moved=_embedding_bytes),
    Pattern("where_bool", _where_inputs, where_bool, trains=True),
    Pattern("int64_index", lambda n: (_random(_count(n, 1024, torch.int64), 1024, dtype=torch.int64),), int64_index_arithmetic),
    Pattern("bf16_softmax", _rows(1024, torch.bfloat16), softmax, trains=True),
    Pattern("fp16_gelu", _rows(1024, torch.float16), half_gelu, trains=True),
    Pattern("float64_reduction", _rows(1024, torch.float64), float64_reduction, trains=True),
    Pattern("uint8_normalise", _pixels, uint8_normalise),
    Pattern("int8_dequantise", _quantised, int8_dequantise),
    Pattern("outer_variance", _rows(1024), outer_variance, trains=True),
    Pattern("bias_gradient", _norm_inputs(1024, 0, tensors=2), bias_gradient),
    Pattern("cumsum", _rows(1024), cumulative_sum, trains=True),
    Pattern("argmax", _rows(1024), row_argmax),
    Pattern("max_pool", _images(64, 56), max_pool, trains=True),
    Pattern("bilinear_upsample", lambda n: _images(32, 28)(max(1, n // 4)), bilinear_upsample, trains=True),
    Pattern("strided_slice", _rows(1024), strided_slice, trains=True),
    Pattern("narrow_rows", _rows(31), narrow_rows, trains=True),
    Pattern("scatter_add", _scatter_inputs, scatter_add, trains=True),
    Pattern("dropout", _rows(1024), dropout, trains=True, random=True),
    Pattern("adam_step", _adam_inputs, adam_step, bytes_moved=_adam_bytes, mutates=True),
)

BY_NAME = {pattern.name: pattern for pattern in PATTERNS}
