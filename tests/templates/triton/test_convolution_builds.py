"""Convolutions, transposed ones and gradients of layers compile for GPUs: no register is spilled, and shared memory is no more
than a GPU has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen.build import triton
from kgen.device import Device, Gpu
from kgen.ir.plan import Kernel
from kgen.only import Only
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.scheduler import Options
from kgen.templates.contract import Config
from tests.codegen import rendered
from tests.convolution_problems import Problem
from tests.kernels import plans

GEMM, DIRECT, WEIGHT = "triton_conv", "triton_conv_direct", "triton_conv_weight"
MOST_STACK = 80  # a few registers
aten = torch.ops.aten
ONE = (1, 1)
PLAIN = Problem((56, 56), (3, 3), ONE, ONE, ONE, 16, 64, made=64, channels_last=True, dtype=torch.bfloat16)
LAYERS = {
    "ResNet": PLAIN,
    "ResNet, stride 2": replace(PLAIN, channels=128, made=128, stride=(2, 2)),
    "stem": replace(PLAIN, lengths=(224, 224), taps=(7, 7), stride=(2, 2), padding=(3, 3), batch=8, channels=3),
    "ConvNeXt": replace(PLAIN, taps=(7, 7), padding=(3, 3), batch=8, channels=1, groups=96, made=1),
    "U-Net": replace(PLAIN, lengths=(32, 32), batch=4, channels=320, made=320),
    "transposed": replace(PLAIN, lengths=(32, 32), taps=(4, 4), stride=(2, 2), batch=8, channels=256, transposed=True),
    "uneven": replace(PLAIN, lengths=(28, 28), stride=(2, 2), batch=8, channels=128, transposed=True, extra=ONE),
    "dilated": replace(PLAIN, lengths=(28, 28), padding=(2, 2), dilation=(2, 2), batch=8, channels=256, made=256),
    "groups": replace(PLAIN, lengths=(28, 28), batch=8, channels=8, groups=32, made=8),
    "deep": replace(
        PLAIN, lengths=(8, 28, 28), taps=(3,) * 3, stride=(2,) * 3, padding=(1,) * 3, dilation=(1,) * 3, batch=2, made=128
    ),
    "float32": replace(PLAIN, lengths=(28, 28), batch=8, dtype=torch.float32),
    "contiguous": replace(PLAIN, lengths=(28, 28), stride=(2, 2), batch=8, made=128, channels_last=False),
}
Graph = Callable[..., Any]


def result(problem: Problem) -> Graph:
    return lambda x, w, b, g: torch.relu(aten.convolution(x, w, b, *problem.how))


def of_image(problem: Problem) -> Graph:
    def f(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> Tensor:
        made: Tensor = aten.convolution_backward(g.relu(), x, w, list(b.shape), *problem.how, [True, False, False])[0]
        return made

    return f


def of_filters(problem: Problem) -> Graph:
    return lambda x, w, b, g: aten.convolution_backward(g.relu(), x, w, list(b.shape), *problem.how, [False, True, True])[1:]


KINDS = {"result": (result, (GEMM, DIRECT)), "image": (of_image, (GEMM, DIRECT)), "filters": (of_filters, (WEIGHT,))}
GPUS = {80: Gpu(arch=80, compute_units=108, shared=166_912), 90: Gpu(arch=90)}


def launches(template: str, graph: Graph, args: list[Tensor], gpu: Gpu, most: int) -> Iterator[TritonKernel]:
    """The kernels of a template's first configurations, and of all where there are fewer; none where it does not take it."""
    counts = [1]
    number = 0
    while number < min(counts[-1], most):

        def pick(found: Any, at: int = number) -> Any:
            counts.append(len(found))
            return found[min(at, len(found) - 1)]

        options = Options(gpu_everywhere=True, gpu=gpu, only=Only(template, pick))
        plan = plans(graph, *args, options=options).forward
        kernels = (step for step in plan.kernels if isinstance(step, Kernel))
        for kernel in (one for one in kernels if one.choice is not None and one.choice.template == template):
            yield rendered(kernel, plan, "kernel", options).launch
        number += 1


def assert_compiles(name: str, kind: str, arch: int, most: int) -> None:
    make, templates = KINDS[kind]
    problem = LAYERS[name]
    args = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype) for a in problem.args()]
    gpu, count = GPUS[arch], 0
    for template in templates:
        made = list(dict.fromkeys(launches(template, make(problem), args, gpu, most)))
        count += len(made)
        for one, compiled in zip(made, triton.compile_kernels(made, arch), strict=True):
            config = [line for line in one.source.splitlines() if "constexpr" in line]
            assert compiled.stack <= MOST_STACK, config
            assert compiled.shared <= Device("cuda").shared, config
    assert count, f"no template takes {name}"


@pytest.mark.ptx
@pytest.mark.parametrize(
    ("name", "kind", "arch"), [("ResNet, stride 2", "image", 90), ("transposed", "result", 80), ("ResNet", "filters", 80)]
)
def test_a_configuration_compiles(name: str, kind: str, arch: int) -> None:
    assert_compiles(name, kind, arch, 1)


@pytest.mark.ptx
def test_one_channel_a_program_compiles() -> None:
    """Of the two that a depthwise convolution makes of each channel: the tile of its weights is one number."""
    problem = Problem((30, 30), (3, 3), ONE, ONE, ONE, 2, 1, groups=256, made=2, channels_last=True, dtype=torch.float16)
    single = {"BLOCK_G": 1, "BLOCK_N": 1, "BLOCK_M": 256}

    def pick(found: Sequence[Config]) -> Config:
        return next(one for one in found if single.items() <= dict(one.values).items())

    options = Options(gpu_everywhere=True, gpu=GPUS[90], only=Only(DIRECT, pick))
    plan = plans(result(problem), *problem.args(), options=options).forward
    [kernel] = [step for step in plan.kernels if isinstance(step, Kernel) and step.choice is not None]
    triton.compile_kernels([rendered(kernel, plan, "kernel", options).launch], 90)


@pytest.mark.slow
@pytest.mark.ptx
@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_configurations_of_layers_compile(name: str, kind: str, arch: int) -> None:
    """All of a few, some of the others."""
    assert_compiles(name, kind, arch, 32 if name in ("ResNet", "transposed") else 3)
