"""What shares a kernel with a convolution: counts of steps, natively and in Triton's interpreter against float64, and in the
plans of a GPU's graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from bench import convs
from bench.conv_problems import channels_last
from kgen.capture.decompositions import TABLE
from kgen.ir.plan import Kernel, Schedule
from kgen.only import Only, only
from kgen.report.record import recording
from kgen.templates.contract import Config
from kgen.verdict import Reason

Function = Callable[..., Any]
bf16 = torch.bfloat16
CPU = "cpp_matmul", ("cpp_conv_direct", "cpp_conv_contiguous")
GEMM, DIRECT, MATMUL = "triton_conv", "triton_conv_direct", "triton_matmul"


def first(found: Sequence[Config]) -> Config:
    return found[0]


def third(found: Sequence[Config]) -> Config:
    return found[2 % len(found)]


def widest(found: Sequence[Config]) -> Config:
    """Few programs: the interpreter takes as long for a small tile as for a large one."""
    return max(found, key=lambda config: (getattr(config, "BLOCK_N", 1), getattr(config, "BLOCK_M", 1)))


@dataclass(frozen=True)
class Case:
    """`shapes` are those of the arguments of a small call. Steps of a plan for a GPU, by `templates`, and of one for a CPU.
    Operands that `copies` names are stored before contractions read them."""

    fn: Function
    shapes: tuple[tuple[int, ...], ...]
    gpu: int = 1
    cpu: int = 1
    copies: str = ""
    templates: tuple[str, ...] = (GEMM, DIRECT, MATMUL)

    def make(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        made = (torch.randn(s, generator=torch.Generator().manual_seed(k + sum(s))) for k, s in enumerate(self.shapes))
        return [channels_last(one.to(dtype)) if one.dim() > 2 else one.to(dtype) for one in made]


def folded_norm(x: Tensor, w: Tensor, mean: Tensor, var: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    return convs.conv_bn_relu(x, w, mean, var.abs() + 0.5, gain, shift)


def shifted(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Zeros of the padding stay zeros: what is added is not added to them."""
    return F.conv2d(F.relu(x + b[:, None, None]), w, padding=1)


def padded(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(F.pad(x, (0, 1, 2, 1)), w, stride=2)


def padded_with_ones(x: Tensor, w: Tensor) -> Tensor:
    """Two paddings: ones that the convolution reads, and zeros around them."""
    return F.conv2d(F.pad(x, (1, 1, 1, 1), value=1.0), w, padding=1)


def cast(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x.to(torch.float32), w.to(torch.float32), padding=1)


IMAGE, FILTERS, ROW = (2, 16, 9, 7), (24, 16, 3, 3), (24,)
OUT = (2, 24, 9, 7)
CASES: dict[str, Case] = {
    "batch norm, relu": Case(folded_norm, (IMAGE, FILTERS, ROW, ROW, ROW, ROW)),
    "bias, residual, relu": Case(convs.conv_bias_residual_relu, (IMAGE, FILTERS, ROW, OUT)),
    "concat": Case(convs.conv_of_concat, (IMAGE, (24, 40, 3, 3), OUT, ROW)),
    "nearest upsample": Case(convs.upsampled_conv, (IMAGE, FILTERS, ROW)),
    "pad": Case(padded, (IMAGE, FILTERS)),
    "pad with ones": Case(padded_with_ones, (IMAGE, FILTERS), gpu=2, cpu=2),  # dear for each tap: it is stored
    "bias, relu before": Case(shifted, (IMAGE, FILTERS, (16,))),
    "cast": Case(cast, (IMAGE, FILTERS)),
    "silu of group norm": Case(
        convs.group_norm_silu_conv, ((2, 64, 8, 8), (24, 64, 3, 3), ROW, (2, 24, 8, 8), (64,), (64,)), gpu=2, cpu=2
    ),
    # on a CPU the statistics of the norm are a kernel of their own
    "ConvNeXt block": Case(
        convs.convnext_block, (IMAGE, (16, 1, 7, 7), (16,), (16,), (16,), (64, 16), (16, 64), (16,)), gpu=3, cpu=4,
        copies="left",
    ),
}  # fmt: skip


def compiled(case: Case, pick: Callable[[Sequence[Config]], Config], on_gpu: bool) -> Schedule:
    """The plan of a call by templates, whose results are right."""
    torch._dynamo.reset()
    args = case.make()
    template, also = (case.templates[0], case.templates[1:]) if on_gpu else CPU
    copies = case.copies if on_gpu else ""
    options = kgen.config.override(cache=False, gpu_interpreter=on_gpu)
    with torch.no_grad(), recording() as seen, options, only(template, pick, copies=copies, also=also):
        got = torch.compile(case.fn, backend="kgen", fullgraph=True)(*args)
    want, eager = case.fn(*(a.double() for a in args)), case.fn(*args)
    for one, exact, same in zip(*map(torch.utils._pytree.tree_leaves, (got, want, eager)), strict=True):
        tolerance = 2e-5 * max(1.0, float(exact.abs().max()))
        torch.testing.assert_close(one.double(), exact.double(), rtol=0, atol=tolerance)
        assert one.stride() == same.stride()
    [graph] = seen.graphs
    plan: Schedule = graph.plan
    return plan


@pytest.mark.every(2)
@pytest.mark.cpu
@pytest.mark.parametrize("name", CASES)
def test_it_is_right_natively(name: str) -> None:
    case = CASES[name]
    plan = compiled(case, third, on_gpu=False)
    assert not plan.calls
    assert len(plan.steps) == case.cpu


@pytest.mark.every(2)
@pytest.mark.interpret
@pytest.mark.parametrize(
    "name", [*list(CASES)[:-2], pytest.param("silu of group norm", marks=pytest.mark.slow), "ConvNeXt block"]
)
def test_it_is_right_in_the_interpreter(name: str) -> None:
    case = CASES[name]
    plan = compiled(case, widest, on_gpu=True)
    assert not plan.calls
    assert len(plan.steps) == case.gpu


def planned(case: Case, batch: int, side: int) -> Schedule:
    """The plan of a GPU's graph in bfloat16, of so many images of so many positions in each direction."""
    args = case.make(bf16)
    images = args[0].shape[0]
    args = [channels_last(torch.empty(batch, a.shape[1], side, side, dtype=bf16)) if len(a) == images else a for a in args]
    only_these = Only(case.templates[0], first, copies=case.copies, also=case.templates[1:])
    options = replace(options_for(gpu=True), only=only_these)
    made: list[Schedule] = []

    def keep(gm: Any, _: Any) -> Any:
        with _disable_current_modes():  # reading constants needs real tensors
            made.append(plan_of(gm, options))
        return gm

    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        aot_function(case.fn, keep, decompositions=TABLE, keep_inference_input_mutations=True)(*args)
    [plan] = made
    return plan


@pytest.mark.parametrize("name", CASES)
def test_plans_of_a_gpu_have_few_steps(name: str) -> None:
    case = CASES[name]
    plan = planned(case, 16, 16)
    assert all(isinstance(step, Kernel) for step in plan.steps)
    assert len(plan.steps) == case.gpu


# ---- sums beside the result -------------------------------------------------------------------------------------------------


def batch_norm(x: Tensor, w: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    return F.relu(F.batch_norm(F.conv2d(x, w, padding=1), None, None, gain, shift, True))


def group_norm(x: Tensor, w: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    return F.silu(F.group_norm(F.conv2d(x, w, padding=1), 4, gain, shift))


def average(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(F.relu(F.conv2d(x, w, b, padding=1)), 1)


def largest(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = F.conv2d(x, w, b, padding=1)
    return y, y.amax((0, 2, 3))


def layer_norm(x: Tensor, w: Tensor, b: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    y = F.conv2d(x, w, b, padding=1, groups=x.shape[1]).permute(0, 2, 3, 1)
    return F.gelu(F.layer_norm(y, (y.shape[-1],), gain, shift))


SQUARE = (3, 16, 8, 8)
SUMS: dict[str, Case] = {
    "batch norm": Case(batch_norm, ((5, 16, 8, 8), FILTERS, ROW, ROW), gpu=3, templates=(GEMM,)),
    "batch norm of few positions": Case(batch_norm, ((2, 16, 3, 7), FILTERS, ROW, ROW), templates=(GEMM,)),
    "group norm": Case(group_norm, (SQUARE, FILTERS, ROW, ROW), gpu=3, templates=(GEMM,)),
    "global average pooling": Case(average, (SQUARE, FILTERS, ROW), gpu=2, templates=(GEMM,)),
    "largest of a channel": Case(largest, ((5, 16, 8, 8), FILTERS, ROW), gpu=2, templates=(GEMM,)),
    "layer norm of channels": Case(layer_norm, (IMAGE, (16, 1, 3, 3), (16,), (16,), (16,)), templates=(DIRECT,)),
}


@pytest.mark.every(2)
@pytest.mark.interpret
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_the_result_are_made_with_it(name: str) -> None:
    """Tiles make parts of sums over positions, which a kernel joins; a tile of all that is summed needs no other kernel."""
    case = SUMS[name]
    plan = compiled(case, widest, on_gpu=True)
    found = {v.reason for v in plan.verdicts}
    assert found & {Reason.TILE_PARTIALS, Reason.ROWS}
    assert len(plan.steps) == case.gpu


@pytest.mark.every(2)
@pytest.mark.cpu
@pytest.mark.parametrize("name", SUMS)
def test_sums_are_right_natively(name: str) -> None:
    plan = compiled(SUMS[name], third, on_gpu=False)
    assert not plan.calls


@pytest.mark.cpu
def test_a_cpu_sums_channels_over_the_positions_of_a_tile() -> None:
    plan = compiled(SUMS["batch norm of few positions"], first, on_gpu=False)
    assert Reason.TILE_PARTIALS in {v.reason for v in plan.verdicts}


def test_sums_over_positions_that_tiles_cut_elsewhere_stay_apart() -> None:
    """Images of 81 positions begin anywhere in tiles of a power of two."""
    case = replace(SUMS["global average pooling"], shapes=((3, 16, 9, 9), FILTERS, ROW))
    plan = planned(case, 3, 9)
    assert any(v.reason is Reason.NOT_IN_TILES for v in plan.verdicts)


def test_statistics_of_images_and_channels_in_one_loop_stay_apart() -> None:
    """An instance norm joins both: to templates each channel of each image would be a group of its own."""
    fn: Function = lambda x, w: F.instance_norm(F.conv2d(x, w, padding=1))  # noqa: E731
    plan = planned(Case(fn, (SQUARE, FILTERS)), 3, 8)
    assert not {v.reason for v in plan.verdicts} & {Reason.TILE_PARTIALS, Reason.ROWS}
