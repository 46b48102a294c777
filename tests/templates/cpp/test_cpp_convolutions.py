"""Convolutions on CPUs: direct templates and windows in the matmul engine, against float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from kgen.only import only
from kgen.templates import registry
from kgen.testing import cases, check_template
from kgen.verdict import Reason

CHANNELS, ROWS, MATMUL = "cpp_conv_direct", "cpp_conv_contiguous", "cpp_matmul"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
pytestmark = pytest.mark.cpu


@dataclass(frozen=True)
class Problem:
    """One convolution: channels of a group, groups, and results of a group; a number for each dimension of the image."""

    lengths: tuple[int, ...]
    taps: tuple[int, ...]
    stride: tuple[int, ...] | int = 1
    padding: tuple[int, ...] | int = 0
    dilation: tuple[int, ...] | int = 1
    batch: int = 2
    channels: int = 1
    groups: int = 1
    made: int = 1
    channels_last: bool = True
    dtype: torch.dtype = torch.float32

    def args(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(sum(self.lengths))
        outer = self.groups * self.made
        shapes = ((self.batch, self.groups * self.channels, *self.lengths), (outer, self.channels, *self.taps), (outer,))
        made = [torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes]
        formats = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
        return [made[0].to(memory_format=formats[self.channels_last * (len(self.lengths) - 1)]), *made[1:]]

    def run(self, x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        """With work before and after the convolution."""
        call = (F.conv1d, F.conv2d, F.conv3d)[len(self.lengths) - 1]
        how: dict[str, Any] = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        return torch.relu(call(torch.relu(x * 0.5 + 0.1), w, bias, groups=self.groups, **how)) + 0.25


PROBLEMS = {
    "3x3": Problem((13, 17), (3, 3), padding=1, groups=70),
    "tiles across rows": Problem((5, 75), (3, 3), padding=1, groups=70),
    "steps": Problem((20, 23), (3, 5), (2, 3), (1, 2), groups=17),
    "dilated": Problem((14, 19), (3, 3), 1, (4, 2), (3, 2), groups=5),
    "stride above taps": Problem((20, 20), (2, 2), (4, 3), groups=40),
    "equal stride and dilation": Problem((20, 20), (3, 3), 2, 2, 2, groups=5),
    "padding above taps": Problem((7, 9), (2, 3), 1, (3, 4), groups=5),
    "one wide": Problem((1, 20), (3, 3), padding=1, groups=17),
    "multiplier": Problem((9, 12), (3, 3), padding=1, groups=7, made=3),
    "few channels": Problem((15, 21), (3, 3), 2, 1, channels=3, made=20),
    "grouped": Problem((9, 11), (3, 2), 1, 1, channels=2, groups=3, made=2),
    "causal": Problem((37,), (4,), padding=3, groups=9),
    "three dimensions": Problem((5, 6, 9), (3, 2, 3), (2, 1, 1), (1, 0, 1), groups=5),
    "nine taps": Problem((12, 30), (2, 9), 1, 4, groups=3),
}


def check(problem: Problem, name: str, pick: int = 0, taken: bool = True) -> None:
    torch._dynamo.reset()
    args = problem.args()
    with only(name, lambda configs: configs[min(pick, len(configs) - 1)]), torch.no_grad():
        report = kgen.explain(problem.run, *args, print_report=False)
        got = torch.compile(problem.run, backend="kgen")(*args)
    chosen = [v for v in report.verdicts if v.reason is Reason.TEMPLATE]
    assert not taken or (len(chosen) == 1 and len(report.kernels) == 1), report
    want = problem.run(*(a.double() for a in args))
    tolerance = TOLERANCE[problem.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", PROBLEMS)
def test_direct_convolutions_of_channels(kind):
    check(PROBLEMS[kind], CHANNELS)


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", PROBLEMS)
def test_direct_convolutions_along_contiguous_images(kind):
    check(replace(PROBLEMS[kind], channels_last=False), ROWS)


@pytest.mark.parametrize("name", [CHANNELS, ROWS])
def test_direct_convolutions_of_bfloat16_in_the_other_layout(name):
    check(replace(PROBLEMS["steps"], channels_last=name == ROWS, dtype=torch.bfloat16), name, pick=3)


WINDOWS = {  # blocks of the engine begin and end in the middle of rows, images and taps
    "3x3": Problem((9, 14), (3, 3), padding=1, channels=40, made=33),
    "steps": Problem((20, 11), (3, 2), (2, 3), (1, 2), (1, 2), channels=33, made=16),
    "grouped": Problem((9, 8), (3, 3), padding=1, channels=16, groups=3, made=17),
    "deep": Problem((6, 7), (3, 3), padding=2, channels=70, made=20),
    "three dimensions": Problem((4, 5, 6), (2, 3, 2), 1, 1, channels=9, made=20),
    "patches": Problem((18, 15), (3, 3), 3, channels=24, made=20),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("kind", WINDOWS)
def test_the_engine_packs_windows(kind, channels_last):
    check(replace(WINDOWS[kind], channels_last=channels_last), MATMUL)


def test_lanes_do_not_jump_between_the_runs_of_patches(tmp_path):
    """Without bounds a block needs no runs, but its lanes would each divide to find their row of a patch."""
    problem = WINDOWS["patches"]
    torch._dynamo.reset()
    options = {"cache": False, "debug": str(tmp_path)}
    with only(MATMUL, lambda configs: configs[0]), torch.no_grad():
        torch.compile(problem.run, backend="kgen", options=options)(*problem.args())
    [text] = [path.read_text() for path in tmp_path.rglob("kernels.cpp")]
    assert "matmul(" in text
    assert "gather" not in text


def test_images_of_no_batch():
    for name in (CHANNELS, ROWS, MATMUL):
        check(replace(PROBLEMS["3x3"], batch=0), name, taken=False)


def test_what_depends_on_more_than_coordinates_is_no_direct_convolution():
    """Neither the stride nor the dilation is 1: between coordinates of one position lie some of no position."""
    problem = Problem((20, 20), (3, 3), 2, 2, 3, groups=5)
    with only(CHANNELS, lambda configs: configs[0]), kgen.config.override(cache=False):
        report = kgen.explain(problem.run, *problem.args(), print_report=False)
    assert "not on their coordinates alone" in str(report.verdicts), report.verdicts


def test_a_template_that_nobody_measured_is_not_taken_by_default():
    measured = replace(PROBLEMS["3x3"], lengths=(56, 56), groups=96)
    for problem in (replace(measured, taps=(7, 7), padding=3), replace(measured, stride=2)):
        report = kgen.explain(problem.run, *problem.args(), print_report=False)
        assert not [v for v in report.verdicts if v.reason is Reason.TEMPLATE], report


@pytest.mark.slow  # test_templates_conformance.py has some problems of each template
@pytest.mark.parametrize("name", [CHANNELS, ROWS])
def test_conformance(name):
    template = registry.find(name)
    some = [case for case in cases(template) if case.name in ("gelu", "plus a tile", "times a row", "several outputs")]
    check_template(template, problems=some, configs=1, device="cpu")


def drawn(number: int, many: bool) -> Problem | None:
    """A random convolution; of `many` channels for the engine."""
    rng = random.Random(number)
    rank = rng.choice([1, 2, 2, 3])
    taps, stride, dilation, lengths = (
        tuple(rng.choice(values) for _ in range(rank))
        for values in ([1, 2, 3, 3, 5], [1, 1, 2, 3, 4], [1, 1, 2, 3], [1, 3, 7, 14, 20, 37] if rank < 3 else [1, 3, 6, 9])
    )
    padding = tuple(rng.choice([0, 1, t // 2, t, t + 1]) for t in taps)
    if any(n + 2 * p < d * (t - 1) + 1 for n, p, d, t in zip(lengths, padding, dilation, taps, strict=True)):
        return None
    channels, groups, made = (
        ([1, 3, 8, 16, 33], [1, 1, 2, 3], [1, 5, 16, 40]) if many else ([1, 1, 2, 3], [1, 5, 17, 40], [1, 2, 3])
    )
    return Problem(
        lengths, taps, stride, padding, dilation, rng.choice([1, 2, 3]), rng.choice(channels), rng.choice(groups),
        rng.choice(made), rng.random() < 0.5, rng.choice([torch.float32, torch.float32, torch.bfloat16]),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [CHANNELS, ROWS, MATMUL])
@pytest.mark.parametrize("number", range(60))
def test_random_convolutions(number, name):
    problem = drawn(number, name == MATMUL)
    if problem is not None:
        check(problem, name, pick=number % 4, taken=False)
