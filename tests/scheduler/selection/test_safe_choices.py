"""The default mode's choices: the library where templates were never measured, and the side on which elementwise work runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen import options_for, plan_of
from torch import Tensor
from torch._functorch.aot_autograd import aot_function
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

import kgen
from bench.calibration import blocks
from kgen.capture.decompositions import TABLE
from kgen.cost import model
from kgen.ir import values as vs
from kgen.ir.plan import Call, Kernel, Schedule, members
from kgen.verdict import DEMANDS, Outcome, Reason


def planned(fn: Callable[..., Any], *args: Tensor, gpu: bool = True) -> Schedule:
    """The schedule of a forward graph on tensors without data."""
    plans: list[Schedule] = []

    def keep(gm: Any, _: Any) -> Any:
        with _disable_current_modes():  # reading constants needs real tensors
            plans.append(plan_of(gm, replace(options_for(gpu=gpu), demands=DEMANDS.get())))
        return gm

    compiled = aot_function(fn, keep, decompositions=TABLE, keep_inference_input_mutations=True)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        compiled(*args)
    [plan] = plans
    return plan


def t(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype)


def image(*shape: int) -> Tensor:
    return t(*shape).to(memory_format=torch.channels_last)


def matmuls(plan: Schedule) -> list[Kernel]:
    return [step for step in plan.steps if isinstance(step, Kernel) and step.contracts]


def loaded(kernel: Kernel) -> set[str]:
    """The names of what a kernel loads."""
    return {load.attr[0] for s in kernel.statements for load in vs.loads(s.roots)}


def operations(kernel: Kernel) -> set[str]:
    return {value.op for s in kernel.statements for value in vs.topological(s.roots)}


def linear_relu_linear(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
    return F.linear(F.relu(F.linear(x, w, b)), v, c)


@pytest.mark.parametrize(("m", "k", "n", "calls"), [(512, 1024, 4096, 1), (4096, 4096, 16384, 0)])
def test_an_activation_between_two_matmuls_is_the_epilogue_of_the_first(m: int, k: int, n: int, calls: int) -> None:
    """The second matmul is a library call where tiles would be few."""
    plan = planned(linear_relu_linear, t(m, k), t(n, k), t(n), t(k, n), t(k))
    first, *second = matmuls(plan)
    assert len(plan.steps) == 2
    assert (len(second), len(plan.calls)) == (1 - calls, calls)
    assert operations(first) >= {"maximum"}
    assert all("maximum" not in operations(one) for one in second)
    assert any(v.outcome is Outcome.STORED and v.reason is Reason.OPERAND_STORED for v in plan.verdicts)


def test_an_activation_that_others_need_stays_right() -> None:
    """The result before the activation is returned as well: it is stored besides."""

    def f(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y, F.relu(y) @ v

    x, w, v = torch.randn(64, 48), torch.randn(48, 80), torch.randn(80, 32)
    got = torch.compile(f, backend="kgen", options={"gpu_interpreter": True, "cache": False})(x, w, v)
    torch.testing.assert_close(got, f(x, w, v), atol=1e-3, rtol=1e-3)


def test_a_softmax_before_a_matmul_is_stored_in_16_bits() -> None:
    """And not its exponentials in float32, to be divided tile by tile in the kernel of the second matmul."""
    plan = planned(lambda q, k, v: (q @ k.transpose(-1, -2)).softmax(-1) @ v, *(t(8, 12, 1024, 64) for _ in range(3)))
    last = matmuls(plan)[-1]
    [statement] = [s for s in last.statements if s.kind == "contraction"]
    assert statement.value.op == "load"
    assert plan.graph.buffers[statement.value.attr[0]].dtype is torch.bfloat16


@pytest.mark.parametrize("gpu", [True, False])
def test_windows_go_to_the_library(gpu: bool) -> None:
    """Of such channels no GPU has measured a template."""
    x, w = (image(8, 72, 56, 56), image(64, 72, 3, 3)) if gpu else (t(2, 16, 28, 28), t(16, 16, 3, 3))
    x, w = (x, w) if gpu else (x.float(), w.float())
    plan = planned(lambda x, w: F.relu(F.conv2d(x, w, padding=1)), x, w, gpu=gpu)
    assert any(isinstance(step, Call) for step in plan.steps)
    assert [v for v in plan.verdicts if v.reason is Reason.UNCALIBRATED]
    assert not matmuls(plan)


def test_a_library_is_slow_where_rows_of_the_result_are_not_aligned() -> None:
    """Behind a norm as well, whose result is stored for it: the logits of GPT-2 take 7 times as long as a template's."""
    x, w, g = t(8, 512, 768), t(50257, 768), t(768)
    plan = planned(lambda x, w, g, r: F.linear(F.layer_norm(x + r, (768,), g), w), x, w, g, t(8, 512, 768))
    assert not plan.calls
    assert len(plan.steps) == 2


def test_windows_that_were_measured_go_to_a_template() -> None:
    plan = planned(lambda x, w: F.relu(F.conv2d(x, w, padding=1)), image(8, 64, 56, 56), image(64, 64, 3, 3))
    [kernel] = plan.kernels
    assert kernel.choice.template == "triton_conv_warp_specialized"


def pooled_stem(x: Tensor, w: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    y = F.conv2d(x, w, stride=2, padding=3) * scale[:, None, None] + shift[:, None, None]
    return F.max_pool2d(F.relu(y), 3, 2, 1)


def test_a_pool_behind_a_stem_is_a_kernel_of_its_own() -> None:
    """Its windows read what other tiles of the convolution hold. The pool computes what is between them."""
    plan = planned(pooled_stem, image(64, 3, 224, 224), image(64, 3, 7, 7), t(64), t(64))
    [convolution] = matmuls(plan)
    pool = plan.kernels[-1]
    assert pool is not convolution
    assert operations(pool) >= {"mul", "add", "gt"}
    assert any(v.outcome is Outcome.ILLEGAL and v.reason is Reason.INDEX_MISMATCH for v in plan.verdicts)


def biased(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.conv2d(x, w, b, padding=1) + r


def depthwise_norm(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    y = F.conv2d(x, w, b, padding=2, dilation=2, groups=x.shape[1]).permute(0, 2, 3, 1)
    return F.gelu(F.layer_norm(y, (y.shape[-1],)))


@pytest.mark.parametrize(("fn", "channels"), [(biased, 72), (depthwise_norm, 1)])
def test_what_reads_a_library_convolution_of_a_gpu_adds_its_bias(fn: Callable[..., Tensor], channels: int) -> None:
    """The library has a kernel of its own for it, which reads and writes the result once more. That of a CPU has not."""
    width = max(64, channels)
    args = image(8, width, 56, 56), image(width, channels, 3, 3), t(width), image(8, width, 56, 56)
    plan = planned(fn, *args)
    [call] = plan.calls
    assert call.node.args[2] is None
    assert len(plan.steps) == 2
    on_cpu = planned(fn, *(a.float() for a in args), gpu=False)
    assert all(call.node.args[2] is not None for call in on_cpu.calls)


def test_a_bias_that_is_added_later_is_added_right() -> None:
    x, w, b, r = torch.randn(2, 6, 5, 5), torch.randn(8, 6, 3, 3), torch.randn(8), torch.randn(2, 8, 5, 5)
    got = torch.compile(biased, backend="kgen", options={"gpu_interpreter": True, "cache": False})(x, w, b, r)
    torch.testing.assert_close(got, biased(x, w, b, r), atol=1e-5, rtol=1e-5)


def test_1x1_convolutions_are_matmuls() -> None:
    plan = planned(
        lambda x, w, r: F.relu(F.conv2d(x, w) + r), image(32, 256, 56, 56), image(256, 256, 1, 1), image(32, 256, 56, 56)
    )
    assert len(matmuls(plan)) == len(plan.steps) == 1


def test_a_demand_wins_over_calibration() -> None:
    with kgen.require_fused("aten.convolution", "aten.relu"):
        plan = planned(lambda x, w: F.relu(F.conv2d(x, w, padding=1)), image(8, 64, 56, 56), image(64, 64, 3, 3))
    assert len(matmuls(plan)) == 1


def test_channels_last_statistics_are_spread_over_the_gpu() -> None:
    """64 channels that are neighbours in memory are two programs: their sums are made in parts, apart from their consumers."""

    def norm(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
        return F.relu(F.batch_norm(x, None, None, g, b, True))

    plan = planned(norm, image(16, 64, 56, 56), t(64), t(64))
    assert len(plan.steps) == 3
    assert any(v.reason is Reason.PARALLELISM for v in plan.verdicts)
    assert len(planned(norm, t(4, 512, 7, 7), t(512), t(512)).steps) == 1


def gradient_of_projections(q: Tensor, k: Tensor, v: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """Of the image whose channels a 1x1 convolution makes queries, keys and values of."""
    joined = torch.stack([q * 0.3, k * 0.3, v], 1).mT.reshape(8, 1728, 8, 8)
    wanted = [True, False, False]
    return torch.ops.aten.convolution_backward(joined, x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, wanted)[0]


def test_what_nobody_has_measured_is_not_cut_into_parts() -> None:
    """No library makes parts, so a template would make them whatever it is known of."""
    plan = planned(gradient_of_projections, *(t(8, 8, 64, 72) for _ in range(3)), t(8, 576, 8, 8), t(1728, 576, 1, 1))
    assert len(plan.calls) == 1
    assert not matmuls(plan)


def causal_conv1d(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(F.conv1d(F.pad(x, (w.shape[-1] - 1, 0)), w, groups=x.shape[1]))


def causal_conv1d_of_rows(x: Tensor, w: Tensor) -> Tensor:
    """With the channels of images and results side by side."""
    return causal_conv1d(x.mT, w).mT.contiguous()


def test_a_depthwise_convolution_along_one_axis_takes_the_template_that_was_measured() -> None:
    """With channels side by side, or positions. A few taps are arithmetic, wherever channels are."""
    x = t(8, 4096, 2048)
    [kernel] = planned(causal_conv1d_of_rows, x, t(2048, 1, 7)).kernels
    assert kernel.choice is not None
    assert kernel.choice.template == "triton_conv_direct"
    copy, convolution = planned(causal_conv1d, x.mT, t(2048, 1, 7)).kernels
    assert convolution.choice is not None
    assert convolution.choice.template == "triton_conv_depthwise"  # of positions side by side, which a copy brings about
    assert "arg0_1" in loaded(copy)
    assert "arg0_1" not in loaded(convolution)
    for image in (t(8, 2048, 4096), x.mT):
        few = planned(causal_conv1d, image, t(2048, 1, 4))
        assert not few.calls
        assert not matmuls(few)


def blur(x: Tensor, w: Tensor) -> Tensor:
    """By one filter for all channels."""
    return F.conv2d(x, w.expand(x.shape[1], 1, 4, 4), stride=2, groups=x.shape[1])


def window(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=5, groups=x.shape[1])


def window_gradient(x: Tensor, w: Tensor) -> Tensor:
    how = [1, 1], [5, 5], [1, 1], False, [0, 0], x.shape[1], [True, False, False]
    found: Tensor = torch.ops.aten.convolution_backward(x, x, w, None, *how)[0]
    return found


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("fn", "sizes", "filters", "dtype"),
    [
        (blur, (16, 65, 130, 130), (1, 1, 4, 4), torch.float16),
        (window, (8, 3, 253, 253), (3, 1, 11, 11), torch.float32),
        (window_gradient, (8, 3, 253, 253), (3, 1, 11, 11), torch.float32),
    ],
)
def test_windows_along_two_axes_take_the_depthwise_template(
    fn: Callable[..., Tensor], sizes: tuple[int, ...], filters: tuple[int, ...], dtype: torch.dtype, last: bool
) -> None:
    """In any layout: on an H200 it takes .2 to .4 of the library's time."""
    x, w = torch.empty(sizes, dtype=dtype), torch.empty(filters, dtype=dtype)
    plan = planned(fn, x.to(memory_format=torch.channels_last) if last else x, w)
    [kernel] = plan.kernels
    assert not plan.calls
    assert kernel.choice is not None
    assert kernel.choice.template == "triton_conv_depthwise"


def depthwise(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=w.shape[-1] // 2, groups=x.shape[1])


def depthwise_gradient(x: Tensor, w: Tensor) -> Tensor:
    how = [1, 1], [w.shape[-1] // 2] * 2, [1, 1], False, [0, 0], x.shape[1], [True, False, False]
    found: Tensor = torch.ops.aten.convolution_backward(x, x, w, None, *how)[0]
    return found


def strided(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, stride=2, padding=w.shape[-1] // 2, groups=x.shape[1])


def convnext(x: Tensor, w: Tensor) -> Tensor:
    y = F.layer_norm(depthwise(x, w).permute(0, 2, 3, 1), x.shape[1:2])
    return F.gelu(y @ torch.ones(x.shape[1], 4 * x.shape[1], dtype=x.dtype))


@pytest.mark.parametrize(
    ("fn", "sizes", "taps", "taken"),
    [
        (depthwise, (32, 96, 56, 56), 7, True),
        (depthwise_gradient, (32, 96, 56, 56), 7, True),
        (convnext, (32, 96, 56, 56), 7, True),
        (depthwise, (32, 480, 14, 14), 5, True),
        (strided, (32, 128, 56, 56), 3, True),
        (depthwise, (32, 96, 56, 56), 9, False),
        (depthwise, (32, 1920, 7, 7), 5, True),
        (depthwise, (32, 3072, 7, 7), 7, False),
    ],
)
def test_the_depthwise_template_and_the_library_where_it_is_fast(
    fn: Callable[..., Tensor], sizes: tuple[int, ...], taps: int, taken: bool
) -> None:
    """Rows of whole loads: of the library's time it takes .3 to .95 on an H100, where it was measured. A norm of what it makes
    may not ask for another template."""
    plan = planned(fn, image(*sizes), torch.empty(sizes[1], 1, taps, taps, dtype=torch.bfloat16))
    chosen = {kernel.choice.template for kernel in plan.kernels if kernel.choice is not None}
    assert ("triton_conv_depthwise" in chosen) == taken
    assert bool(plan.calls) != taken


def test_strips_of_many_taps_leave_an_sm_warps_that_load() -> None:
    """Four strips of eight positions a thread take 150 registers: three programs of an SM would wait for their loads."""
    plan = planned(depthwise, t(16, 384, 32, 32), t(384, 1, 5, 5))
    [config] = [dict(k.choice.config) for k in plan.kernels if isinstance(k, Kernel) and k.choice]
    assert (config["BLOCK_M"], config["ROWS"]) == (256, 8)


def test_nobody_has_measured_depthwise_windows_of_doubles() -> None:
    plan = planned(window, torch.empty(2, 3, 64, 64, dtype=torch.float64), torch.empty(3, 1, 11, 11, dtype=torch.float64))
    assert len(plan.calls) == 1


def decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    inside = torch.arange(k.shape[2]) < lengths[:, None, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=inside, enable_gqa=True)


@pytest.mark.parametrize(("batch", "keys", "streams"), [(32, 8192, True), (1, 1024, False)])
def test_few_queries_take_the_template_where_keys_set_the_time(batch: int, keys: int, streams: bool) -> None:
    plan = planned(decode, t(batch, 32, 1, 128), t(batch, 8, keys, 128), t(batch, 8, keys, 128), t(batch, dtype=torch.int64))
    templates = [kernel.choice.template for kernel in plan.kernels if kernel.choice is not None]
    assert templates[:1] == (["triton_attention"] if streams else [])


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def templates_of_attention(rows: int, keys: int, head: int, dtype: torch.dtype, batch: int = 8) -> list[str]:
    plan = planned(plain_attention, t(batch, 8, rows, head, dtype=dtype), *(t(batch, 8, keys, head, dtype=dtype),) * 2)
    return [kernel.choice.template for kernel in plan.kernels if isinstance(kernel, Kernel) and kernel.choice is not None]


@pytest.mark.parametrize(
    ("batch", "rows", "keys", "head"),
    [(4, 4096, 77, 40), (12, 1, 1024, 64), (1, 4, 4096, 128), (16, 64, 4096, 64), (32, 100, 100, 32), (32, 512, 512, 16)],
)
def test_attention_of_few_rows_or_keys_is_measured(batch: int, rows: int, keys: int, head: int) -> None:
    """As a text's 77 tokens are few keys, and a token that is generated is one row; its keys are read in parts."""
    assert templates_of_attention(rows, keys, head, torch.bfloat16, batch) == ["triton_attention"]


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize(
    ("batch", "rows", "keys", "head", "taken"), [(8, 512, 512, 64, True), (128, 1, 256, 64, True), (8, 2048, 2048, 128, False)]
)
def test_attention_in_tf32_is_measured(batch: int, rows: int, keys: int, head: int, taken: bool) -> None:
    """Long heads of many rows take longer than the library's matmuls and a softmax."""
    assert (templates_of_attention(rows, keys, head, torch.float32, batch) == ["triton_attention"]) == taken


def test_attention_of_exact_float32_stays_with_the_library() -> None:
    assert "triton_attention" not in templates_of_attention(512, 512, 64, torch.float32)


@pytest.mark.usefixtures("tf32")
def test_the_librarys_attention_rounds_no_float32_numbers() -> None:
    """So that a template that rounds them does not take its place."""
    args = [t(8, 8, 512, 64, dtype=torch.float32) for _ in range(3)]
    assert len(planned(F.scaled_dot_product_attention, *args).kernels) == 0


def step_of_decoding(q: Tensor, k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor, place: Tensor) -> Tensor:
    k.index_copy_(2, place, new_k)
    v.index_copy_(2, place, new_v)
    inside = torch.arange(k.shape[2]) <= place[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=inside, enable_gqa=True)


def step_on_pages(q: Tensor, k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor, slots: Tensor, table: Tensor) -> Tensor:
    size = k.shape[2:]
    k.view(-1, *size).index_copy_(0, slots, new_k)
    v.view(-1, *size).index_copy_(0, slots, new_v)
    keys, values = (c[table].reshape(len(table), -1, *size).transpose(1, 2) for c in (k, v))
    return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_step_of_decoding_copies_no_cache(rows: int) -> None:
    """New keys and values are written where they belong, in one kernel. The attention is that of the template that was measured
    on few rows."""
    cache, new = (t(32, 8, 4096, 128) for _ in range(2)), (t(32, 8, rows, 128) for _ in range(2))
    plan = planned(step_of_decoding, t(32, 32, rows, 128), *cache, *new, t(rows, dtype=torch.int64))
    assert_no_cache_is_copied(plan)


@pytest.mark.parametrize("page", [16, 64])
def test_a_step_on_pages_gathers_no_cache(page: int) -> None:
    cache, new = (t(32 * 4096 // page, page, 8, 128) for _ in range(2)), (t(32, 8, 128) for _ in range(2))
    slots, table = t(32, dtype=torch.int64), t(32, 4096 // page, dtype=torch.int64)
    assert_no_cache_is_copied(planned(step_on_pages, t(32, 32, 1, 128), *cache, *new, slots, table))


def assert_no_cache_is_copied(plan: Schedule) -> None:
    update, attention = plan.kernels
    assert len(plan.steps) == 2
    assert all(s.kind == "scatter" or s.op == "set" for one in members(update) for s in one.statements)
    assert isinstance(attention, Kernel)
    assert attention.choice is not None
    assert attention.choice.template == "triton_attention"


def capped(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    s = 20 * torch.tanh(q @ k.mT / 20) + slopes[:, None, None] * (columns - rows)
    return torch.where(columns <= rows, s, -torch.inf).softmax(-1) @ v


def plainly_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    return torch.where(columns <= rows, q @ k.mT, -torch.inf).softmax(-1) @ v


def test_scores_that_take_much_work_go_to_the_attention_that_hides_it() -> None:
    """138 us by the portable template, 189 to 225 us by that of specialised warps; plain scores the other way round."""
    q, k, v = (t(2, 16, 2048, 128) for _ in range(3))
    [heavy] = planned(capped, q, k, v, t(16)).kernels
    [light] = planned(plainly_causal, q, k, v).kernels
    assert [one.choice.template for one in (heavy, light) if one.choice is not None] == [
        "triton_attention", "triton_attention_warp_specialized",
    ]  # fmt: skip


def test_full_rows_of_sums_over_a_vocabulary_are_not_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm's gradient behind that of logits: low and wide tiles were never measured on sums as long."""

    def f(gradient: Tensor, table: Tensor, x: Tensor) -> Tensor:
        y = (gradient @ table).float()
        return (y - x * (y * x).mean(-1, keepdim=True)).to(torch.bfloat16)

    def reduces_rows(length: int) -> bool:
        plan = planned(f, t(4096, length), t(length, 256), t(4096, 256))
        return any(s.kind == "partial" for kernel in matmuls(plan) for s in kernel.statements)

    monkeypatch.setattr(model, "vendor_seconds", lambda problem: 1.0)
    assert reduces_rows(1024)
    assert not reduces_rows(50257)


def test_matmuls_share_a_copy_of_logits_gradients_in_three_dimensions() -> None:
    """Rows begin anywhere in lines of the cache; one loop goes through the first two dimensions."""

    def f(gradient: Tensor, table: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = gradient.flatten(0, 1)
        return rows @ table, rows.t() @ x

    plan = planned(f, t(8, 512, 50257), t(50257, 768), t(4096, 768))
    copy, *others = [one for step in plan.kernels for one in members(step)]
    [made] = [out for s in copy.statements for out in s.outs]
    assert len(others) == 2
    assert all(made in {load.attr[0] for s in k.statements for load in vs.loads(s.roots)} for k in others)


def test_what_is_stored_for_a_library_call_is_not_computed_again() -> None:
    """A norm's gradient is read by the library call that makes the weights' gradient, so the image's matmul reads it, too."""
    wide, narrow, row = image(32, 240, 28, 28), image(32, 40, 28, 28), t(240)
    backward = partial(blocks.norm_conv_backward, act=F.silu)
    plan = planned(backward, wide, wide, row, row, narrow, image(240, 40, 1, 1))
    [matmul] = matmuls(plan)
    assert operations(matmul) <= {"load", "round_to"}
    assert [step for step in plan.steps if isinstance(step, Call)]


def test_a_filter_may_be_a_view_of_a_vector() -> None:
    """Its channels are those of the view that the library reads: the vector has no second dimension."""

    def f(x: Tensor, g: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, g.view(1, 1, 1, 5)), g.view(1, 1, 5, 1))

    assert planned(f, t(4, 1, 60, 61), t(5)).steps


def codebooks(x: Tensor, codes: Tensor, books: Tensor) -> Tensor:
    """Groups of eight weights are sums of entries of two tables."""
    c = codes.long()
    return F.linear(x, (books[0][c[..., 0]] + books[1][c[..., 1]]).flatten(-2))


def test_entries_of_tables_are_stored_first() -> None:
    """A program that unpacks them would read each number of an entry apart, and the next one far away."""
    plan = planned(codebooks, t(4, 4096), t(4096, 512, 2, dtype=torch.uint8), t(2, 256, 8))
    read = {load.attr[0] for kernel in matmuls(plan) for s in kernel.statements for load in vs.loads(s.roots)}
    assert read.isdisjoint(plan.graph.inputs[1:])


def gated_gradient(dy: Tensor, w: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Of the second layer of a SwiGLU MLP, through the activation."""
    dh, g = (dy @ w).float(), gate.float()
    slope = torch.sigmoid(g)
    return (dh * up * slope * (1 + g * (1 - slope))).bfloat16(), (dh * g * slope).bfloat16()


def gelu_gradient(dy: Tensor, w: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(dy @ w, x)


def test_an_epilogue_that_reads_two_large_operands_has_to_save_more() -> None:
    """Measured: Llama's gradient of SwiGLU in 880 us by a template whose estimate was 790, and in 791 us apart."""
    dy, w, h = t(4096, 4096), t(4096, 14336), t(4096, 14336)
    assert not matmuls(planned(gated_gradient, dy, w, h, h))
    assert matmuls(planned(gelu_gradient, t(6304, 768), t(768, 3072), t(6304, 3072)))


def test_float32_needs_no_aligned_rows() -> None:
    """The library's matmuls without TF32 take as long for rows that begin at any number: 203 us for 3,001 x 3,001 x 512."""
    plan = planned(lambda g, x: g @ x + g.t() @ x, t(3001, 3001, dtype=torch.float32), t(3001, 512, dtype=torch.float32))
    assert not matmuls(plan)
