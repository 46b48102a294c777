"""Convolutions in Triton: right in the interpreter for random problems and every configuration, and within a GPU's limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from bench.conv_problems import Convolution, FilterGradient, random_depthwise, random_gradient, random_problem
from kgen.build import triton
from kgen.cost import model
from kgen.device import Device
from kgen.ir.plan import Kernel
from kgen.only import Only, only
from kgen.scheduler import Options
from kgen.scheduler.selection.choose import chosen_problem
from kgen.templates import registry
from kgen.templates.contract import Config
from kgen.templates.problem import Problem
from kgen.verdict import Reason
from tests.codegen import rendered
from tests.kernels import plans

GEMM, DIRECT, WEIGHT = "triton_conv", "triton_conv_direct", "triton_conv_weight"
DEPTHWISE = "triton_conv_depthwise"
f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
TOLERANCE = {f32: 1e-5, f16: 3e-3, bf16: 2e-2}
Pick = Callable[..., Config]


def r(*shape: int, dtype: torch.dtype = f32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_right(name: str, function: Callable[..., Tensor], args: list[Tensor], pick: Pick = lambda found: found[0]) -> None:
    """By the template, as exact as numbers of the type allow, and in eager's layout."""
    torch._dynamo.reset()
    with only(name, pick), kgen.config.override(gpu_interpreter=True, cache=False):
        report = kgen.explain(function, *args, print_report=False)
        got = torch.compile(function, backend="kgen")(*args)
    taken = any(v.reason is Reason.TEMPLATE and v.detail.startswith(f"{name} ") for v in report.verdicts)
    assert taken or any("in such windows" in v.detail for v in report.verdicts), report  # one place: a matmul
    want = function(*(t.double() for t in args))
    tolerance = TOLERANCE[args[0].dtype] * max(1.0, float(want.abs().max()))
    torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance)
    assert got.stride() == function(*args).stride()


def some_config(seed: int) -> Pick:
    return lambda found: found[seed * 7 % len(found)]


@pytest.mark.every(2)
@pytest.mark.interpret
@pytest.mark.parametrize("seed", [pytest.param(n, marks=() if n < 3 else pytest.mark.slow) for n in range(150)])
@pytest.mark.parametrize("name", [GEMM, DIRECT])
def test_random_problems_are_right(name: str, seed: int) -> None:
    made = random_problem(seed, name == DIRECT)
    assert_right(name, made.function, made.make(), some_config(seed))


@pytest.mark.every(2)
@pytest.mark.interpret
@pytest.mark.parametrize("seed", [pytest.param(n, marks=() if n < 6 else pytest.mark.slow) for n in range(120)])
def test_random_depthwise_problems_are_right(seed: int) -> None:
    made = random_depthwise(seed)
    assert_right(DEPTHWISE, made.function, made.make(), some_config(seed))


@pytest.mark.interpret
@pytest.mark.parametrize("last", [True, False])
def test_one_filter_of_all_channels(last: bool) -> None:
    """Channels are positions then, and the innermost ones where they lie side by side."""
    x = r(2, 5, 9, 12)
    x = x.to(memory_format=torch.channels_last) if last else x
    assert_right(DEPTHWISE, lambda x, w: F.conv2d(x, w.expand(5, 1, 4, 4), stride=2, groups=5), [x, r(1, 1, 4, 4)])


@pytest.mark.interpret
def test_a_gradient_of_depthwise_images_is_a_convolution() -> None:
    def gradient(g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        how = [1, 1], [2, 1], [1, 1], False, [0, 0], 4, [True, False, False]
        found: Tensor = torch.ops.aten.convolution_backward(g, x, w, None, *how)[0]
        return found

    assert_right(DEPTHWISE, gradient, [r(2, 4, 11, 7), r(2, 4, 11, 7), r(4, 1, 5, 3)])


def test_a_depthwise_template_refuses_dilated_rows() -> None:
    """Neighbours of a strip then meet none of each other's coordinates."""
    made = Convolution((2, 6, 15, 9), (6, 1, 3, 3), (1, 1), (2, 1), (2, 1), 6, True, f32, 0)
    options = Options(gpu_everywhere=True, only=Only(DEPTHWISE, lambda found: found[0]))
    plan = plans(made.plain, *made.make()[:2], options=options).forward
    assert len(plan.calls) == 1
    assert any("do not come to coordinates" in v.detail for v in plan.verdicts)


@pytest.mark.interpret
@pytest.mark.parametrize("seed", [pytest.param(n, marks=() if n < 2 else pytest.mark.slow) for n in range(60)])
def test_random_gradients_of_filters_are_right(seed: int) -> None:
    made = random_gradient(seed)
    assert_right(WEIGHT, made.function, made.make(), some_config(seed))


@pytest.mark.interpret
def test_a_gradient_of_images_is_a_convolution() -> None:
    """With the filters read backwards, where they are."""
    gradient, w = r(2, 24, 6, 7), r(24, 17, 3, 2)
    assert_right(GEMM, lambda g, w: F.conv2d(g, w.flip(2, 3).transpose(0, 1), padding=(1, 1)), [gradient, w])


def test_sums_of_gradients_go_over_positions_of_all_images() -> None:
    made = FilterGradient((3, 6, 5, 4), 8, (3, 2), (1, 1), (1, 1), (1, 1))
    assert [problem_of(WEIGHT, made).size(axis) for axis in "gtkmn"] == [1, 3 * 2, 3 * 5 * 5, 6, 8]


@pytest.mark.every(2)
@pytest.mark.interpret
@pytest.mark.parametrize("split", [False, True])
def test_long_sums_are_split(split: bool) -> None:
    """The last program of a tile adds the parts up; a sum that stays whole has one launch."""
    made = FilterGradient((4, 6, 25, 24) if split else (2, 6, 5, 4), 8, (3, 2), (1, 1), (1, 1), (1, 1))
    assert_right(WEIGHT, made.function, made.make(), lambda found: next(one for one in found if (one.SPLIT > 1) == split))
    options = Options(gpu_everywhere=True, only=Only(WEIGHT, lambda found: found[0]))
    assert len(plans(made.function, *made.make(), options=options).forward.kernels) == 1 + split


# Tiles cross rows and images; what they do depends on the configuration alone.
EVERY: dict[str, Convolution | FilterGradient] = {
    GEMM: Convolution((3, 20, 5, 7), (140, 20, 3, 2), (1, 2), (1, 3), (2, 1), 1, True, bf16, 2),
    DIRECT: Convolution((2, 12, 5, 7), (24, 1, 3, 3), (1, 1), (1, 1), (1, 1), 12, True, f32, 1),
}
EVERY[WEIGHT] = FilterGradient((4, 20, 18, 20), 21, (3, 2), (1, 2), (1, 3), (2, 1), True, bf16)
EVERY[DEPTHWISE] = Convolution((2, 20, 13, 7), (20, 1, 5, 3), (1, 1), (2, 1), (1, 1), 20, True, f32, 1)
FEW_CHANNELS = Convolution((2, 3, 9, 8), (70, 3, 3, 3), (2, 2), (1, 1), (1, 1), 1, False, f32, 1)


def count(name: str, made: Convolution | FilterGradient) -> int:
    return len(list(registry.find(name).configs(problem_of(name, made))))


def problem_of(name: str, made: Convolution | FilterGradient) -> Problem:
    options = Options(gpu_everywhere=True, only=Only(name, lambda found: found[0]))
    plan = plans(made.function, *made.make(), options=options).forward
    kernel = next(step for step in plan.kernels if isinstance(step, Kernel) and step.choice is not None)
    return chosen_problem(kernel, plan.graph, options.device(plan.graph, kernel.statements[0].outs[0]))


@pytest.mark.interpret
@pytest.mark.slow
@pytest.mark.parametrize(("name", "made"), [*EVERY.items(), (DIRECT, FEW_CHANNELS)])
def test_every_configuration_is_right(name: str, made: Convolution | FilterGradient) -> None:
    for number in range(count(name, made)):
        assert_right(name, made.function, made.make(), lambda found, at=number: found[min(at, len(found) - 1)])


def test_rows_are_positions_of_all_images() -> None:
    """Taps and channels are axes of their own, whatever the number of dimensions."""
    sizes = lambda made: [problem_of(GEMM, made).size(axis) for axis in "gmtcn"]  # noqa: E731
    plain = Convolution((2, 6, 5, 4), (8, 6, 3, 2), (1, 1), (1, 1), (1, 1), 1, True, bf16, 0)
    assert sizes(plain) == [1, 2 * 5 * 5, 6, 6, 8]
    deep = Convolution((2, 6, 3, 5, 4), (8, 3, 3, 2, 2), (1, 2, 1), (1, 1, 1), (1, 1, 1), 2, False, bf16, 0)
    assert sizes(deep) == [2, 2 * 3 * 3 * 5, 12, 3, 4]


def source_of(function: Callable[..., Any], *args: Tensor) -> str:
    options = Options(gpu_everywhere=True, only=Only(GEMM, lambda found: found[0]))
    plan = plans(function, *args, options=options).forward
    return str(rendered(plan.kernels[0], plan, "kernel", options).launch.source)


def test_bounds_are_predicates_of_loads() -> None:
    """An image that no prologue changes goes to shared memory as it is: nothing is widened, and no matmul is waited for."""
    made = EVERY[GEMM]
    assert isinstance(made, Convolution)
    x, w, _, scale = made.make()
    plain = source_of(made.plain, x, w)
    assert "lib.widen" not in plain.split("acc = lib.dot")[0]
    assert "+wait" not in plain
    assert "+wait" in source_of(lambda x, w, s: made.plain(torch.relu(x * s), w), x, w, scale)


@pytest.mark.parametrize(
    ("made", "measured"),
    [
        (Convolution((8, 3, 253, 253), (3, 1, 11, 11), (1, 1), (5, 5), (1, 1), 3, False, f32, 0), 101),
        (Convolution((8, 3, 253, 253), (3, 1, 11, 11), (1, 1), (5, 5), (1, 1), 3, True, f32, 0), 161),
        (Convolution((32, 128, 56, 56), (128, 1, 3, 3), (1, 1), (1, 1), (1, 1), 128, False, bf16, 0), 125),
        (Convolution((32, 128, 56, 56), (128, 1, 3, 3), (1, 1), (1, 1), (1, 1), 128, True, bf16, 0), 26.7),
        (Convolution((24, 256, 430), (256, 1, 31), (1,), (15,), (1,), 256, False, bf16, 0), 53.0),
        (Convolution((24, 256, 430), (256, 1, 31), (1,), (15,), (1,), 256, True, bf16, 0), 71.2),
        (Convolution((16, 384, 1000), (384, 1, 9), (1,), (4,), (1,), 384, True, f32, 0), 121.2),
    ],
    ids=str,
)
def test_prices_of_the_librarys_depthwise_kernels(made: Convolution, measured: float) -> None:
    """Microseconds on an H200 (docs/decisions/0035-depthwise-convolutions-on-a-gpu.md)."""
    priced = model.vendor_seconds(problem_of(DEPTHWISE, made)) * 1e6
    assert 0.75 < priced / measured < 1.3


@pytest.mark.parametrize(
    ("taps", "step", "known"), [(5, 1, True), (31, 1, True), (3, 1, False), (33, 1, False), (15, 2, False)]
)
def test_windows_of_one_axis_that_were_measured(taps: int, step: int, known: bool) -> None:
    made = Convolution((24, 256, 430), (256, 1, taps), (step,), (taps // 2,), (1,), 256, False, bf16, 0)
    assert (registry.find(DEPTHWISE).uncalibrated(problem_of(DEPTHWISE, made)) is None) == known


def test_nobody_has_measured_them() -> None:
    for name, made in EVERY.items():
        if name == DEPTHWISE:
            continue
        assert registry.find(name).uncalibrated(problem_of(name, made))


@pytest.mark.interpret
def test_no_images_are_left_to_the_library() -> None:
    x, w = r(0, 6, 5, 5), r(8, 6, 3, 3)
    with only(GEMM, lambda found: found[0]), kgen.config.override(gpu_interpreter=True, cache=False):
        got = torch.compile(lambda x, w: F.conv2d(x, w, padding=1).relu(), backend="kgen")(x, w)
    assert got.shape == (0, 8, 5, 5)


# A convolution for each way that a kernel is made: of a GPU's usual sizes, for its compiler alone.
COMPILED: dict[str, tuple[str, Convolution | FilterGradient]] = {
    "gemm": (GEMM, Convolution((8, 64, 28, 28), (64, 64, 3, 3), (1, 1), (1, 1), (1, 1), 1, True, bf16, 1)),
    "float32": (GEMM, Convolution((8, 64, 28, 28), (64, 64, 3, 3), (2, 2), (1, 1), (1, 1), 1, True, f32, 1)),
    "computed": (GEMM, Convolution((8, 64, 28, 28), (64, 64, 3, 3), (1, 1), (1, 1), (1, 1), 1, False, f16, 3)),
    "depthwise": (DIRECT, Convolution((8, 96, 28, 28), (96, 1, 7, 7), (1, 1), (3, 3), (1, 1), 96, True, bf16, 1)),
    "strips": (DEPTHWISE, Convolution((8, 3, 64, 64), (3, 1, 11, 11), (1, 1), (5, 5), (1, 1), 3, False, f32, 1)),
    "strips_of_channels": (DEPTHWISE, Convolution((8, 96, 28, 28), (96, 1, 7, 7), (1, 1), (3, 3), (1, 1), 96, True, bf16, 1)),
    "gradient": (WEIGHT, FilterGradient((8, 64, 28, 28), 64, (3, 3), (1, 1), (1, 1), (1, 1))),
    "stem": (DIRECT, Convolution((4, 3, 64, 64), (64, 3, 7, 7), (2, 2), (3, 3), (1, 1), 1, False, bf16, 1)),
}
MOST_STACK = 64


def launches(name: str, made: Convolution | FilterGradient) -> list[Any]:
    found = []
    for number in range(count(name, made)):
        options = Options(gpu_everywhere=True, only=Only(name, lambda found, at=number: found[min(at, len(found) - 1)]))
        plan = plans(made.function, *made.make(), options=options).forward
        kernel = next(step for step in plan.kernels if isinstance(step, Kernel) and step.choice is not None)
        found.append(rendered(kernel, plan, "kernel", options).launch)
    return list(dict.fromkeys(found))


@pytest.mark.every(2)
@pytest.mark.ptx
@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k == "gemm" else pytest.mark.slow) for k in COMPILED])
def test_configurations_compile_for_gpus(kind: str, arch: int) -> None:
    """Without spilled registers, and in the shared memory that they are said to need."""
    made = launches(*COMPILED[kind])
    device = Device("cuda")
    for one, compiled in zip(made, triton.compile_kernels(made, arch), strict=True):
        config = next(line for line in one.source.splitlines() if "BLOCK_" in line)
        assert compiled.stack <= MOST_STACK, config
        assert compiled.shared <= device.shared, config
