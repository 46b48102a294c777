"""Attention on a CPU: written out in PyTorch, and by the library's call: eager, Inductor, kgen with its template and without.

python -m bench.cpu_attention --cpu-time --json out.json
python -m bench.cpu_attention --only plain causal --dtype bfloat16 --contenders library kgen --seconds 1

All contenders of a pattern take turns. `written` is the pattern in eager, `library` the best call of
F.scaled_dot_product_attention for it, where there is one; `inductor` and `kgen` compile the pattern as it is written, and
`matmuls` is kgen without a template for attention. `--cpu-time` measures what one thread does, for a machine that others use.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from bench.contenders import copy_of
from bench.cpu_runs import compared, measured, options_of, show_geomean, show_row
from kgen.only import only

Function = Callable[..., Tensor]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CONTENDERS = ("written", "library", "library-again", "inductor", "matmuls", "kgen")
PEERS = ("library", "inductor")


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    future = _positions(k) > _positions(q)[:, None]
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(future, -math.inf).softmax(-1) @ v


def gpt2(x: Tensor, mask: Tensor) -> Tensor:
    """Heads cut out of one projection's result, the mask a buffer of the model."""
    q, k, v = (one.unflatten(-1, (-1, 64)).transpose(1, 2) for one in x.chunk(3, -1))
    scores = q @ k.mT / 8.0
    scores = torch.where(mask[: q.shape[-2], : k.shape[-2]], scores, torch.finfo(scores.dtype).min)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)


def gpt2_by_library(x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (one.unflatten(-1, (-1, 64)).transpose(1, 2) for one in x.chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


def padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """BERT's: -inf nearly, where a key is padding."""
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + (1.0 - mask) * torch.finfo(mask.dtype).min
    return scores.softmax(-1) @ v


def padded_by_library(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(1.0 - mask) * torch.finfo(mask.dtype).min)


def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    distance = _positions(k) - _positions(q)[:, None]
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + slopes[:, None, None] * distance
    return scores.masked_fill(distance > 0, -math.inf).softmax(-1) @ v


def alibi_by_library(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    distance = _positions(k) - _positions(q)[:, None]
    bias = (slopes[:, None, None] * distance).masked_fill(distance > 0, -math.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = 30 * torch.tanh(q @ k.mT / math.sqrt(q.shape[-1]) / 30)
    return scores.masked_fill(_positions(k) > _positions(q)[:, None], -math.inf).softmax(-1) @ v


def relative(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """T5's: a learnt number for each head and distance; scores are not scaled."""
    buckets = (_positions(k) - _positions(q)[:, None]).clamp(-128, 127) + 128
    return (q @ k.mT + bias[:, buckets]).softmax(-1) @ v


def relative_by_library(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    buckets = (_positions(k) - _positions(q)[:, None]).clamp(-128, 127) + 128
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None, :, buckets], scale=1.0)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Four heads of queries share one of keys."""
    return causal(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1))


def grouped_by_library(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def causal_by_library(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _positions(of: Tensor) -> Tensor:
    return torch.arange(of.shape[-2], device=of.device)


@dataclass(frozen=True)
class Pattern:
    """A function, the library's call for the same, and its arguments: random ones of these shapes, and the last one."""

    written: Function
    library: Function | None
    shapes: tuple[tuple[int, ...], ...]
    last: Callable[[torch.dtype], Tensor] | None = None

    def args(self, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        made = [torch.randn(shape, generator=generator).to(dtype) for shape in self.shapes]
        return [*made, *([] if self.last is None else [self.last(dtype)])]


def _of(batch: int, heads: int, rows: int, keys: int, size: int, few: int = 0) -> tuple[tuple[int, ...], ...]:
    return (batch, heads, rows, size), (batch, few or heads, keys, size), (batch, few or heads, keys, size)


def _triangle(dtype: torch.dtype) -> Tensor:
    return torch.ones(1024, 1024, dtype=torch.bool).tril()


def _slopes(dtype: torch.dtype) -> Tensor:
    return (2.0 ** -torch.arange(1.0, 9.0)).to(dtype)


def _padding(dtype: torch.dtype) -> Tensor:
    lengths = torch.tensor([384, 250, 300, 120])
    return (torch.arange(384) < lengths[:, None])[:, None, None, :].to(dtype)


PATTERNS: dict[str, Pattern] = {
    "plain": Pattern(plain, F.scaled_dot_product_attention, _of(1, 8, 1024, 1024, 64)),
    "causal": Pattern(causal, causal_by_library, _of(1, 8, 1024, 1024, 128)),
    "gpt2": Pattern(gpt2, gpt2_by_library, ((1, 1024, 3 * 8 * 64),), _triangle),
    "padded": Pattern(padded, padded_by_library, _of(4, 12, 384, 384, 64), _padding),
    "alibi": Pattern(alibi, alibi_by_library, _of(1, 8, 768, 768, 64), _slopes),
    "softcap": Pattern(softcap, None, _of(1, 8, 768, 768, 128)),
    "relative": Pattern(relative, relative_by_library, (*_of(2, 8, 512, 512, 64), (8, 256))),
    "grouped": Pattern(grouped, grouped_by_library, _of(1, 16, 512, 512, 128, few=4)),
    "cross": Pattern(plain, F.scaled_dot_product_attention, _of(4, 8, 100, 777, 64)),
    "decode": Pattern(plain, F.scaled_dot_product_attention, _of(4, 8, 1, 2048, 128)),
}


def calls_of(name: str, pattern: Pattern, args: Sequence[Tensor]) -> Callable[[], Tensor] | None:
    """A contender's call, compiled; None where there is none."""
    if name in ("written", "library", "library-again"):
        function = pattern.written if name == "written" else pattern.library
        return None if function is None else partial(function, *args)
    if name == "inductor":
        compiled = torch.compile(copy_of(pattern.written), fullgraph=True)
    else:
        compiled = torch.compile(copy_of(pattern.written), backend="kgen", fullgraph=True, options={"cache": False})
    return partial(compiled, *args)


def settings(name: str) -> AbstractContextManager[Any]:
    """What a contender is compiled under."""
    return only("cpp_matmul", lambda configs: configs[0]) if name == "matmuls" else nullcontext()


def measure(pattern: Pattern, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    """All contenders on one pattern."""
    torch._dynamo.reset()
    args = pattern.args(dtype)
    want = pattern.written(*(a if a.dtype is torch.bool else a.double() for a in args))
    return compared(lambda name: calls_of(name, pattern, args), settings, want, options)


def show(title: str, row: dict[str, Any], console: Console) -> None:
    show_row(title, row, console, PEERS, f"error {row['errors'].get('kgen', math.nan):.0e}")


def main() -> None:
    options = options_of(__doc__, "pattern", PATTERNS, DTYPES, CONTENDERS, CONTENDERS)
    console = Console(width=200)
    rows = measured(PATTERNS, DTYPES, measure, show, options, console)
    show_geomean(rows.values(), console, PEERS)


if __name__ == "__main__":
    main()
