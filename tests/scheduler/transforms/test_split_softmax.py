"""Attention of few rows: heads that share keys become rows of one tile, and the softmax is split into parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from kgen.only import only

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
TOLERANCE = {f32: 1e-5, f16: 3e-3, bf16: 2e-2}
TEMPLATES = [
    pytest.param("cpp_attention", marks=pytest.mark.cpu),
    pytest.param("triton_attention", marks=pytest.mark.interpret),
]
Function = Callable[..., Tensor]


def r(*shape: int, dtype: torch.dtype = f32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def inputs(rows: int, keys: int, shared: int, head: int = 64, values: int = 0, dtype: torch.dtype = f32) -> list[Tensor]:
    """Two batches of two heads of keys, which `shared` heads of queries have in common."""
    shapes = ((2, 2 * shared, rows, head), (2, 2, keys, head), (2, 2, keys, values or head))
    return [r(*shape, dtype=dtype, seed=k) for k, shape in enumerate(shapes)]


def written(q: Tensor, k: Tensor, v: Tensor, score: Callable[[Tensor], Tensor] = lambda s: s) -> Tensor:
    shared = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(shared, 1) for t in (k, v))
    return score(q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1).to(v.dtype) @ v


def causal(s: Tensor) -> Tensor:
    m, n = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
    return s.masked_fill(n > m + (s.shape[-1] - s.shape[-2]), -math.inf)


def of_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return written(q, k, v, causal)


def of_softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return written(q, k, v, lambda s: causal(20 * torch.tanh(s / 20)))


def of_library(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def of_lengths(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """The second batch may have no keys at all."""
    inside = torch.arange(k.shape[-2]) < lengths[:, None, None, None]
    return written(q, k, v, lambda s: s.masked_fill(~inside, -math.inf))


def of_library_with_lengths(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    inside = torch.arange(k.shape[-2]) < lengths[:, None, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=inside, enable_gqa=True)


def of_epilogue(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(written(q * 0.5, k, v, causal)).transpose(1, 2).reshape(q.shape[0], q.shape[2], -1) * 2


def assert_right(template: str, function: Function, args: list[Tensor], parts: int, kernels: int = 0) -> None:
    """As many kernels as it takes, and as exact as the type allows."""
    torch._dynamo.reset()
    interpreted = template.startswith("triton")
    with (
        only(template, lambda configs: configs[0], parts=parts),
        kgen.config.override(gpu_interpreter=interpreted, cache=False),
    ):
        report = kgen.explain(function, *args, print_report=False)
        got = torch.compile(function, backend="kgen")(*args)
    assert len(report.kernels) == (kernels or (2 if parts > 1 else 1)), report
    want = function(*(t.double() if t.is_floating_point() else t for t in args))
    accuracy = TOLERANCE[args[0].dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=accuracy, atol=accuracy, equal_nan=True)


SPELLINGS: dict[str, tuple[Function, list[Tensor]]] = {
    "causal": (of_causal, []),
    "softcap": (of_softcap, []),
    "library": (of_library, []),
    "lengths": (of_lengths, [torch.tensor([70, 1])]),
    "no keys": (of_lengths, [torch.tensor([300, 0])]),
    "library without keys": (of_library_with_lengths, [torch.tensor([300, 0])]),
    "epilogue": (of_epilogue, []),
}


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.cpu
def test_parts_are_joined(name, parts):
    function, more = SPELLINGS[name]
    assert_right("cpp_attention", function, [*inputs(2, 300, 4, 16), *more], parts)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("name", "parts"), [("softcap", 1), ("no keys", 3), *(_slow(name, 3) for name in SPELLINGS if name != "no keys")]
)
def test_parts_are_joined_on_gpus(name, parts):
    function, more = SPELLINGS[name]
    assert_right("triton_attention", function, [*inputs(2, 300, 4, 16), *more], parts)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("dtype", [f32, bf16, f16])
@pytest.mark.parametrize("head", [(64, 64), (96, 80), (128, 128)])
@pytest.mark.parametrize("keys", [17, 1000])
@pytest.mark.parametrize("rows", [1, 2, 4, 16])
@pytest.mark.parametrize("shared", [1, 8])
@pytest.mark.parametrize("template", TEMPLATES)
def test_all_shapes(template, shared, rows, keys, head, dtype, parts):
    assert_right(template, of_softcap, inputs(rows, keys, shared, *head, dtype), parts)


@pytest.mark.cpu
def test_one_key():
    q, k, v = inputs(1, 1, 8, 16)
    torch.testing.assert_close(torch.compile(of_library, backend="kgen")(q, k, v), of_library(q, k, v))
