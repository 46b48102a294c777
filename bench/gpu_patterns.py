"""Memory-bound patterns for a GPU, each of 256 MB of traffic or more: what to run, on which inputs, the fewest bytes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.patterns import Inputs, Pattern

BF16 = torch.bfloat16


def _normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + turned * sin


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return ((wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)) * weight).to(x.dtype)


def _rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    wide, dy = x.float(), grad.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    unit = wide * scale
    dw = dy * weight
    dx = (dw - unit * (dw * unit).mean(-1, keepdim=True)) * scale
    return dx.to(x.dtype), (dy * unit).sum(0)


def _group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, 32, weight, bias)


def _images(channels: int = 256) -> Tensor:
    return _normal(32, channels, 112, 112, dtype=BF16).to(memory_format=torch.channels_last)


def _tokens(_: int) -> Inputs:
    return (_normal(32000, 2048, dtype=BF16), torch.randint(0, 32000, (131072,), device="cuda"))


def _gathered(inputs: Inputs, outputs: object) -> int:
    table, ids = inputs
    return 2 * ids.numel() * table.shape[1] * table.itemsize + ids.nbytes


def _causal(_: int) -> Inputs:
    return (_normal(64, 2048, 2048, dtype=BF16), torch.ones(2048, 2048, dtype=torch.bool, device="cuda").tril())


def _masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)


GPU_PATTERNS: tuple[Pattern, ...] = (
    Pattern(
        "residual_layer_norm",
        lambda _: (_normal(32768, 4096, dtype=BF16), _normal(32768, 4096, dtype=BF16), _normal(4096), _normal(4096)),
        lambda x, r, w, b: F.layer_norm((x + r).float(), (4096,), w, b).to(BF16),
    ),
    Pattern("softmax", lambda _: (_normal(4096, 32768, dtype=BF16),), lambda x: torch.softmax(x, -1)),
    Pattern(
        "cross_entropy",
        lambda _: (_normal(4096, 128256, dtype=BF16), torch.randint(0, 128256, (4096,), device="cuda")),
        lambda x, t: F.cross_entropy(x.float(), t),
    ),
    Pattern("transposed_add", lambda _: (_normal(8192, 8192), _normal(8192, 8192)), lambda x, y: x + y.t()),
    Pattern("sum_all", lambda _: (_normal(2**28),), lambda x: x.sum()),
    Pattern("column_sum", lambda _: (_normal(65536, 4096),), lambda x: x.sum(0)),
    Pattern("group_norm_cl", lambda _: (_images(), _normal(256, dtype=BF16), _normal(256, dtype=BF16)), _group_norm),
    Pattern("rms_norm", lambda _: (_normal(32768, 4096, dtype=BF16), _normal(4096)), _rms_norm),
    Pattern(
        "rms_norm_backward",
        lambda _: (_normal(32768, 4096, dtype=BF16), _normal(32768, 4096, dtype=BF16), _normal(4096)),
        _rms_norm_backward,
    ),
    Pattern(
        "dropout_residual",
        lambda _: (_normal(32768, 4096, dtype=BF16), _normal(32768, 4096, dtype=BF16)),
        lambda x, r: F.dropout(x, 0.1) + r,
        random=True,
    ),
    Pattern(
        "rotary",
        lambda _: (_normal(8, 32, 4096, 128, dtype=BF16), _normal(4096, 128, dtype=BF16), _normal(4096, 128, dtype=BF16)),
        _rotated,
    ),
    Pattern("masked_softmax", _causal, _masked_softmax),
    Pattern("argmax", lambda _: (_normal(32768, 4096),), lambda x: x.argmax(-1)),
    Pattern("cumsum", lambda _: (_normal(32768, 4096),), lambda x: x.cumsum(-1)),
    Pattern("embedding", _tokens, lambda table, ids: F.embedding(ids, table), bytes_moved=_gathered),
    Pattern(
        "int64_remainder",
        lambda _: (torch.randint(-(2**40), 2**40, (2**26,), device="cuda"),),
        lambda x: x % 1000003,
    ),
    Pattern("transposed_cast", lambda _: (_normal(8192, 16384),), lambda x: x.t().contiguous().to(BF16)),
)
