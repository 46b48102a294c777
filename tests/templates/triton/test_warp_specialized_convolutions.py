"""Convolutions by warps with parts of their own, in Gluon: right on numbers (`tests/warp_numbers.py`), what compiles, what is
refused. Triton's interpreter does not run these kernels."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from bench.conv_problems import Convolution, channels_last, random_boxed
from kgen.build import triton
from kgen.device import Device
from kgen.ir.plan import Kernel
from kgen.only import Only
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.rendered.tensor_map import map_rank, map_steps
from kgen.scheduler import Gpu, Options
from kgen.scheduler.selection.choose import chosen_problem
from kgen.templates import registry
from kgen.templates.contract import Config
from kgen.templates.problem import Problem
from tests import warp_numbers
from tests.codegen import rendered
from tests.kernels import plans
from tests.warp_barriers import WaitsForever
from tests.warp_numbers import on_numbers

NAME = "triton_conv_warp_specialized"
f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
Function = Callable[..., Any]


def whole(*shape: int, seed: int = 0, dtype: torch.dtype = f16) -> Tensor:
    """Numbers whose sums of products are exact: -1, 0 and 1. Channels are last in memory."""
    made = torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)
    return channels_last(made) if len(shape) > 2 else made


def residual(made: Convolution) -> Function:
    return lambda x, w, b, r, s: torch.relu(made.plain(x, w, b) + r)


def scaled_images(made: Convolution) -> Function:
    """What varies by image and channel comes by pointers, row by row."""
    return lambda x, w, b, r, s: made.plain(x, w) * s + b.view(-1, *(1 for _ in made.stride))


def two_results(made: Convolution) -> Function:
    def function(x: Tensor, w: Tensor, b: Tensor, r: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        y = made.plain(x, w, b)
        return torch.relu(y), y + r

    return function


SLOTS = {
    "plain": lambda made: lambda x, w, b, r, s: made.plain(x, w),
    "residual": residual,
    "images": scaled_images,
    "two": two_results,
}  # fmt: skip


def arguments(made: Convolution) -> list[Tensor]:
    """The image, filters, a bias, a tensor like the result, and a number for each image and channel."""
    x, w = whole(*made.image, dtype=made.dtype), whole(*made.filters, seed=1, dtype=made.dtype)
    result = made.plain(x.float(), w.float()).shape
    by_image = (result[0], result[1], *(1 for _ in made.stride))
    return [
        x, w, whole(result[1], seed=2, dtype=made.dtype), whole(*result, seed=3, dtype=made.dtype),
        whole(*by_image, seed=4, dtype=made.dtype),
    ]  # fmt: skip


def in_order(function: Function) -> Function:
    """With results as a GPU's library gives them, channels last in memory, where a CPU's would not."""

    def ordered(*args: Tensor) -> Any:
        found = function(*args)
        return tuple(map(channels_last, found)) if isinstance(found, tuple) else channels_last(found)

    return ordered


def options(pick: Callable[[Sequence[Config]], Config], compute_units: int = 3) -> Options:
    """Few SMs, so that each program has several tiles."""
    return Options(gpu_everywhere=True, gpu=Gpu(arch=90, compute_units=compute_units), only=Only(NAME, pick))


def checked(made: Convolution, slots: str, pick: Callable[[Sequence[Config]], Config], seed: int = 0) -> list[TritonKernel]:
    """The kernels that ran, whose results are exact."""
    args, function = arguments(made), SLOTS[slots](made)
    with on_numbers(options(pick), seed) as ran:
        got = kgen.compile(in_order(function), options={"gpu_interpreter": True, "cache": False})(*args)
    want = function(*(a.double() for a in args))
    for one, right in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
        assert torch.equal(one.double(), right.to(made.dtype).double()), (made, slots)
    return ran


def drawn(seed: int) -> tuple[Convolution, str]:
    """A problem, and what is in its slots. Sums stay below what bfloat16 counts to."""
    made = random_boxed(seed)
    slots = random.Random(seed).choice(list(SLOTS))
    return replace(made, dtype=f16), slots


@pytest.mark.cpu
@pytest.mark.parametrize("seed", [pytest.param(n, marks=() if n < 5 else pytest.mark.slow) for n in range(300)])
def test_random_problems_are_exact(seed: int) -> None:
    made, slots = drawn(seed)
    assert len(checked(made, slots, lambda found: found[seed * 7 % len(found)], seed)) == 1


# Images that are a part of what is in memory, or have padding of their own.
VIEWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "padded unevenly": lambda x, w: F.conv2d(F.pad(x, (1, 0, 2, 3)), w, stride=(2, 1)),
    "cut": lambda x, w: F.conv2d(F.pad(x, (-2, -3, 0, -1)), w, padding=1),
    "a part": lambda x, w: F.conv2d(x[1:, 16:40, 1:-1, 2:], w, padding=(1, 2), dilation=2),
    "every other row": lambda x, w: F.conv2d(x[:, :, ::2, 1::3], w, padding=1),
}


@pytest.mark.cpu
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_images_are_exact(name: str) -> None:
    function = VIEWS[name]
    x, w = whole(3, 40 if name == "a part" else 24, 11, 13), whole(40, 24, 3, 3, seed=1)
    with on_numbers(options(lambda found: found[0])) as ran:
        got = kgen.compile(in_order(function), options={"gpu_interpreter": True, "cache": False})(x, w)
    assert torch.equal(got.double(), function(x.double(), w.double()))
    assert len(ran) == 1


# Tiles cross rows and images, blocks of channels end early, and columns are those of several tiles.
CROSSING = Convolution((3, 72, 9, 11), (328, 72, 3, 2), (1, 2), (1, 3), (2, 1), dtype=f16)


def configurations(made: Convolution, slots: str) -> list[Config]:
    seen: list[Config] = []

    def note(found: Sequence[Config]) -> Config:
        seen[:] = found
        return found[0]

    plans(in_order(SLOTS[slots](made)), *arguments(made), options=options(note))
    return seen


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("slots", SLOTS)
def test_every_configuration_is_exact(slots: str) -> None:
    every = configurations(CROSSING, slots)
    assert {(c.COOPERATIVE, c.EPILOGUE_SUBTILES) for c in every} >= {(True, 1), (False, 1)}
    for config in every:
        assert checked(CROSSING, slots, lambda _, config=config: config)


def problem_and_kernel(function: Function, args: Sequence[Tensor], pick: Callable[[Sequence[Config]], Config]) -> Any:
    plan = plans(function, *args, options=options(pick, 132)).forward
    kernel = next(step for step in plan.kernels if isinstance(step, Kernel) and step.choice is not None)
    launch = rendered(kernel, plan, "kernel", options(pick, 132)).launch
    assert isinstance(launch, TritonKernel)
    return chosen_problem(kernel, plan.graph, Device()), launch


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("ws.release(free, (position - 1) %", "ws.release(free, position %"),
        ("ws.settle(acc, 1)", "ws.settle(acc, 4)"),
        (" + -1, ((tap) %", " + 0, ((tap) %"),
        (", ((tap) // (3))", ", ((tap) // (2))"),
        ("ws.write(map_convolution, [((tile_m * BLOCK_M) // 64)", "ws.write(map_convolution, [((tile_m * BLOCK_M) // 128)"),
        ("ws.expect(ready, stage, ", "ws.expect(ready, stage, 16 + "),
    ],
)
def test_what_is_wrong_is_seen(line: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory given back too early, an image that is moved, wrong taps, a wrong box of the result, and bytes that never come."""
    made = Convolution((4, 136, 8, 8), (64, 136, 3, 3), (1, 1), (1, 1), (1, 1), dtype=f16)
    run = warp_numbers.run

    def changed(kernel: TritonKernel, *args: Any) -> None:
        source = kernel.source.replace("kernel_", "k_")
        if line not in source:
            raise LookupError(f"{line} is not in\n{source}")
        run(replace(kernel, source=source.replace(line, instead)), *args)

    monkeypatch.setattr(warp_numbers, "run", changed)
    smallest: Callable[[Sequence[Config]], Config] = lambda found: next(c for c in found if c.BLOCK_M == c.BLOCK_N == 64)  # noqa: E731
    with pytest.raises((AssertionError, WaitsForever)):
        assert [len(checked(made, "plain", smallest, seed)) for seed in range(4)]


# ---- a GPU's compiler -----------------------------------------------------------------------------------------------

COMPILED = {
    "plain": Convolution((8, 64, 28, 28), (256, 64, 3, 3), (1, 1), (1, 1), (1, 1)),
    "residual": Convolution((8, 64, 29, 27), (256, 64, 3, 3), (2, 2), (1, 1), (1, 1)),
    "images": Convolution((8, 24, 29, 27), (72, 24, 3, 3), (1, 1), (1, 1), (2, 2), dtype=f16),
    "two": Convolution((4, 48, 9, 14, 14), (136, 48, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
}


@pytest.mark.ptx
@pytest.mark.parametrize("slots", [pytest.param(k, marks=() if k == "residual" else pytest.mark.slow) for k in COMPILED])
def test_configurations_compile(slots: str, request: pytest.FixtureRequest) -> None:
    """Nothing is spilled, and no more shared memory is needed than the template says. An image's descriptor has steps."""
    made = COMPILED[slots]
    function, args, every = in_order(SLOTS[slots](made)), arguments(made), configurations(made, slots)
    assert every
    for config in every if request.node.get_closest_marker("slow") else every[:1]:
        problem, kernel = problem_and_kernel(function, args, lambda _, config=config: config)
        [found] = triton.compile_kernels([kernel], 90)
        needs = problem.template.resources(problem, config).shared
        assert found.stack == 0, config
        assert needs - 4096 < found.shared <= needs, config
        assert (found.warps, found.early) == (12, True)
        assert "HGMMA" in triton.dumped(found.cubin, "-sass")
        steps = [map_steps(kind) for kind in kernel.signature if map_rank(kind)]
        assert any(step > 1 for one in steps for step in one) == (slots == "residual")


# ---- what is left to others -----------------------------------------------------------------------------------------


def reason(function: Function, *args: Tensor, arch: int = 90, interpreted: bool = False) -> str | None:
    """Why the template does not take what `triton_conv` takes; None where it does."""
    device = Options(
        gpu_everywhere=True, gpu=Gpu(arch=arch), interpreted=interpreted, only=Only("triton_conv", lambda found: found[0])
    )
    plan = plans(function, *args, options=device).forward
    kernel = next(k for k in plan.kernels if isinstance(k, Kernel) and k.choice is not None)
    problem = chosen_problem(kernel, plan.graph, device.device(plan.graph, kernel.statements[0].outs[0]))
    return registry.find(NAME).author.refuse(problem)


IMAGE, FILTERS = whole(2, 24, 9, 11), whole(40, 24, 3, 3)


REFUSED: dict[str, tuple[str, Function, list[Tensor]]] = {
    "prologue": ("X is computed", lambda x, w: F.conv2d(torch.relu(x), w), [IMAGE, FILTERS]),
    "padded twice": ("X is computed", lambda x, w: F.conv2d(F.pad(F.pad(x, (2, 2)), (-1, 2)), w), [IMAGE, FILTERS]),
    "padding of ones": ("X is computed", lambda x, w: F.conv2d(F.pad(x, (1, 1, 1, 1), value=1.0), w), [IMAGE, FILTERS]),
    "channels first": ("no neighbours along one loop of c", F.conv2d, [IMAGE.contiguous(), FILTERS]),
    "filters of taps": ("contiguous along none", F.conv2d, [IMAGE, FILTERS.contiguous()]),
    "odd channels": ("multiples of 16 bytes", F.conv2d, [whole(2, 20, 9, 11), whole(40, 20, 3, 3)]),
    "odd results": ("cannot store", F.conv2d, [IMAGE, whole(36, 24, 3, 3)]),
    "float32": ("16 bits", F.conv2d, [IMAGE.float(), FILTERS.float()]),
    "odd begin": ("begin at a multiple", lambda x, w: F.conv2d(x[:, 4:28], w), [whole(2, 32, 9, 11), FILTERS]),
    "large steps": ("too large for TMA", lambda x, w: F.conv1d(x, w, stride=9), [whole(1, 8, 700), whole(8, 8, 3)]),
    "statistics": (
        "reduces tiles", lambda x, w: F.conv2d(x, w).float().amax(1), [whole(2, 64, 16, 16), whole(64, 64, 3, 3)]
    ),
}  # fmt: skip


@pytest.mark.none
@pytest.mark.parametrize("name", REFUSED)
def test_it_says_why_not(name: str) -> None:
    why, function, args = REFUSED[name]
    assert why in str(reason(function, *args))


@pytest.mark.none
def test_whose_gpus_have_none() -> None:
    plain = lambda x, w: F.conv2d(x, w, padding=1)  # noqa: E731
    assert reason(plain, IMAGE, FILTERS) is None
    assert "compute capability 9.0" in str(reason(plain, IMAGE, FILTERS, arch=80))
    assert "does not run Gluon" in str(reason(plain, IMAGE, FILTERS, interpreted=True))


@pytest.mark.none
def test_nobody_has_measured_it() -> None:
    problem, _ = problem_and_kernel(lambda x, w: F.conv2d(x, w, padding=1), [IMAGE, FILTERS], lambda found: found[0])
    assert problem.uncalibrated
    assert isinstance(problem, Problem)
