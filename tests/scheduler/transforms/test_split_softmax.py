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
from tests.kernels import plans

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


@pytest.mark.every(3)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.cpu
def test_parts_are_joined(name, parts):
    function, more = SPELLINGS[name]
    assert_right("cpp_attention", function, [*inputs(2, 300, 4, 16), *more], parts)


@pytest.mark.every(2)
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


# ---- caches ---------------------------------------------------------------------------------------------------------


def of_pages(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Keys and values are in pages of a cache."""
    page, pages = k.shape[1], table.shape[1]
    n = torch.arange(pages * page)
    k, v = (t[table[:, n // page], n % page].transpose(1, 2) for t in (k, v))
    return of_lengths(q, k, v, lengths)


def of_whole_pages(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (t[table].flatten(1, 2).transpose(1, 2) for t in (k, v))
    return of_library_with_lengths(q, k, v, lengths)


def pages(page: int, keys: int = 512, dtype: torch.dtype = f32) -> list[Tensor]:
    count = keys // page
    table = torch.randperm(2 * count, generator=torch.Generator().manual_seed(0)).reshape(2, count)
    caches = [r(2 * count, page, 2, 32, dtype=dtype, seed=seed) for seed in range(2)]
    return [r(2, 8, 1, 32, dtype=dtype), *caches, table, torch.tensor([keys, 70])]


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("function", "page", "parts"),
    [(of_pages, 16, 3), (of_whole_pages, 64, 1), *(_slow(f, n, 2) for f in (of_pages, of_whole_pages) for n in (16, 64, 128))],
)
def test_pages_are_gathered_by_the_kernel(function, page, parts):
    assert_right("cpp_attention", function, pages(page), parts)


@pytest.mark.interpret
@pytest.mark.parametrize(("page", "parts"), [_slow(16, 2), _slow(64, 3), _slow(128, 2)])
def test_pages_are_gathered_by_the_kernel_on_gpus(page, parts):
    assert_right("triton_attention", of_pages, pages(page), parts)


def of_slice_write(q: Tensor, k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor, place: Tensor) -> Tensor:
    k[:, :, 37:38], v[:, :, 37:38] = new_k, new_v
    return of_lengths(q, k, v, place.expand(2) + 1)


def of_index_copy(q: Tensor, k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor, place: Tensor) -> Tensor:
    k.index_copy_(2, place, new_k)
    v.index_copy_(2, place, new_v)
    return of_lengths(q, k, v, place.expand(2) + 1)


@pytest.mark.cpu
@pytest.mark.parametrize("function", [of_slice_write, of_index_copy])
def test_a_cache_is_updated_in_place(function):
    """Nothing as large as the cache is allocated, and attention reads what was written."""
    q, k, v = inputs(1, 512, 4, 32)
    args = [q, k, v, r(2, 2, 1, 32), r(2, 2, 1, 32), torch.tensor([37])]
    with only("cpp_attention", lambda configs: configs[0], parts=2):
        plan = plans(function, *(a.clone() for a in args)).forward
        kept = {
            out
            for step in plan.kernels
            for s in step.statements
            for out, stored in zip(s.outs, s.stored, strict=True)
            if stored
        }
        sizes = {name: math.prod(size.as_int() or 0 for size in plan.graph.buffers[name].sizes) for name in kept}
        assert sum(size >= k.numel() for size in sizes.values()) == 2, "only the caches themselves are as large"
        torch._dynamo.reset()
        ours, theirs = [a.clone() for a in args], [a.clone() for a in args]
        got = torch.compile(function, backend="kgen")(*ours)
    torch.testing.assert_close(got, function(*theirs), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
