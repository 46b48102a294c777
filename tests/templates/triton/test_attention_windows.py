"""Attention of windows in Triton: several windows in a program, with what their scores share in front of the loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from kgen.build import triton
from kgen.device import Gpu
from kgen.only import Only, only
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.scheduler import Options
from kgen.templates import registry
from kgen.templates.contract import Config
from kgen.testing import check_template
from kgen.testing.cases import cases, cases_of_dtype, plain
from kgen.verdict import Reason
from tests.codegen import options_for, rendered
from tests.kernels import plans
from tests.templates.triton.test_triton_attention import ARCHES, TOLERANCE, causal, r, scored, with_log_sum_exp

NAME = "triton_attention_windows"
ONLY = Only(NAME, lambda configs: configs[0])
HEADS, ROWS, HEAD = 3, 9, 16
f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
Function = Callable[..., Tensor]


def windows(x: Tensor, table: Tensor, index: Tensor, mask: Tensor) -> Tensor:
    """Shifted windows, with the bias of a table of relative positions."""
    count, rows, _ = x.shape
    q, k, v = x.reshape(count, rows, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4).unbind(0)
    scores = (q * HEAD**-0.5) @ k.transpose(-2, -1) + table[index.view(-1)].view(rows, rows, -1).permute(2, 0, 1)
    scores = scores.view(count // len(mask), len(mask), HEADS, rows, rows) + mask[None, :, None]
    out = scores.view(-1, HEADS, rows, rows).softmax(-1) @ v
    return out.transpose(1, 2).reshape(count, rows, -1)


def cosine(x: Tensor, table: Tensor, index: Tensor, mask: Tensor) -> Tensor:
    """As in the second version of these networks."""
    count, rows, _ = x.shape
    q, k, v = x.reshape(count, rows, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4).unbind(0)
    scores = (
        F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * torch.clamp(table[0, :, None, None], max=4).exp()
    )
    scores = scores + 16 * torch.sigmoid(table[index.view(-1)].view(rows, rows, -1).permute(2, 0, 1))
    scores = scores.view(count // len(mask), len(mask), HEADS, rows, rows) + mask[None, :, None]
    return (scores.view(-1, HEADS, rows, rows).softmax(-1) @ v).transpose(1, 2).reshape(count, rows, -1)


def of_windows(images: int = 5, dtype: torch.dtype = f32) -> list[Tensor]:
    index = torch.arange(ROWS)[:, None] - torch.arange(ROWS) + ROWS - 1
    mask = torch.where(r(4, ROWS, ROWS) > 1, -100.0, 0.0)
    return [r(4 * images, ROWS, 3 * HEADS * HEAD).to(dtype), r(2 * ROWS - 1, HEADS).to(dtype), index, mask.to(dtype)]


def short(dtype: torch.dtype = f32) -> list[Tensor]:
    return [r(5, 2, 20, 24, dtype=dtype), r(5, 2, 40, 24, dtype=dtype), r(5, 2, 40, 40, dtype=dtype)]


PATTERNS: dict[str, tuple[Function, Callable[..., list[Tensor]]]] = {
    "windows": (windows, of_windows), "cosine": (cosine, of_windows),
    "plain": (scored(lambda s: s), short), "causal": (scored(causal), short),
    "library": (F.scaled_dot_product_attention, short),
    "of each image": (scored(lambda s, m: s + m), lambda dtype: [*short(dtype), r(5, 2, 20, 40)]),
}  # fmt: skip


def assert_right(name: str, dtype: torch.dtype, pick: Callable[..., Config]) -> None:
    function, make = PATTERNS[name]
    args = make(dtype=dtype)
    torch._dynamo.reset()
    with only(NAME, pick), kgen.config.override(gpu_interpreter=True, cache=False):
        report = kgen.explain(function, *args, print_report=False)
        got = torch.compile(function, backend="kgen")(*args)
    assert any(v.reason is Reason.TEMPLATE and v.detail.startswith(NAME) for v in report.verdicts), report
    want = function(*(t.double() if t.is_floating_point() else t for t in args))
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.interpret
@pytest.mark.parametrize("name", PATTERNS)
def test_it_is_right(name: str) -> None:
    assert_right(name, f32, lambda configs: configs[0])


@pytest.mark.interpret
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [f16, bf16])
@pytest.mark.parametrize("name", PATTERNS)
def test_it_is_right_in_16_bits(name: str, dtype: torch.dtype) -> None:
    assert_right(name, dtype, lambda configs: configs[-1])


@pytest.mark.interpret
def test_rows_without_keys_follow_eager() -> None:
    q, k, v = short()
    mask = r(20, 40) > 0
    mask[3] = False
    for function in (F.scaled_dot_product_attention, scored(lambda s, m: s.masked_fill(~m, -torch.inf))):
        torch._dynamo.reset()
        with only(NAME, lambda configs: configs[0]), kgen.config.override(gpu_interpreter=True, cache=False):
            got = torch.compile(function, backend="kgen")(q, k, v, mask)
        torch.testing.assert_close(got, function(q, k, v, mask), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.interpret
def test_the_log_sum_exp_of_rows() -> None:
    function, args = with_log_sum_exp(causal), short()
    torch._dynamo.reset()
    with only(NAME, lambda configs: configs[0]), kgen.config.override(gpu_interpreter=True, cache=False):
        got = torch.compile(function, backend="kgen")(*args)
    for mine, theirs in zip(got, function(*(a.double() for a in args)), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


def text_of(function: Function, args: list[Tensor]) -> str:
    return kernel_of(function, args).source


def kernel_of(function: Function, args: list[Tensor]) -> TritonKernel:
    options = options_for(True, ONLY)
    plan = plans(function, *args, options=options).forward
    [kernel] = [k for k in plan.kernels if NAME in str(getattr(k, "choice", ""))]
    made = rendered(kernel, plan, "kernel", options)
    assert isinstance(made.launch, TritonKernel)
    return made.launch


def test_what_windows_share_is_loaded_in_front_of_the_loop() -> None:
    before, loop = text_of(windows, of_windows(dtype=bf16)).split("for again in range")
    assert before.count("tl.load(") == 3  # an index, its entry, and the mask
    assert loop.count("tl.load(") == 3  # queries, keys and values
    assert "fixed0 = " in before
    assert ".to(tl.bfloat16)" in before  # as it is stored


def test_what_each_image_has_of_its_own_is_loaded_for_each() -> None:
    function, make = PATTERNS["of each image"]
    before, loop = text_of(function, make(dtype=bf16)).split("for again in range")
    assert "tl.load(" not in before
    assert loop.count("tl.load(") == 5  # values in two parts


def test_longer_rows_are_refused() -> None:
    plan = plans(scored(lambda s: s), r(2, 70, 16), r(2, 70, 16), r(2, 70, 16), options=options_for(True, ONLY)).forward
    assert not any(NAME in str(getattr(k, "choice", "")) for k in plan.kernels)


def library_call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, bias, False, 0.0, False, False)[0]
    return out


@pytest.mark.parametrize(("rows", "taken"), [(49, True), (40, False)])
def test_the_library_is_slower_on_many_short_batches(rows: int, taken: bool) -> None:
    """By default where a GPU has measured it: the library takes each batch by itself, and its tiles are larger."""
    args = [r(1024, 3, rows, 32, dtype=bf16) for _ in range(3)] + [r(1024, 3, rows, rows, dtype=bf16)]
    plan = plans(library_call, *args, options=Options(gpu_everywhere=True, gpu=Gpu(arch=90))).forward
    assert any(NAME in str(getattr(k, "choice", "")) for k in plan.kernels) == taken


@pytest.mark.parametrize("arch", ARCHES)
def test_it_compiles(arch: int) -> None:
    triton.compile_kernels([kernel_of(windows, of_windows(dtype=bf16))], arch)


@pytest.mark.interpret
@pytest.mark.slow
def test_it_conforms() -> None:
    template = registry.find(NAME)
    some = [plain(template, bf16), *list(cases(template))[5::17], *list(cases_of_dtype(template, bf16))[2::5]]
    report = check_template(template, problems=some, configs=1, device="cpu")
    assert not report.failed, str(report)
