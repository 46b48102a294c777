"""The fuzzer of attention: that it draws the same for a seed, runs kernels, and finds what it is for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from fuzz_attention import PORTABLE, TOLERANCE, checked, difference, strides, tasks_of

from kgen.templates.contract import Config
from tests.attention_configurations import Configuration, drawn_large

f32 = torch.float32
SMALL = Configuration(
    7, 1, (2, 1), (33, 40), (16, 16), f32, "bias", "window", "least", "where", upcast=False, transposed=False, learnt=True
)


def test_a_seed_always_draws_the_same() -> None:
    assert [str(task.title) for task in tasks_of(PORTABLE, range(4))] == [str(drawn_large(seed)) for seed in range(4)]
    assert [task.number for task in tasks_of(PORTABLE, range(4))] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("off", "found"), [(0.0, ""), (1e-6, ""), (1e-3, "relative error"), (math.nan, "are NaN and should not")]
)
def test_differences_are_told(off: float, found: str) -> None:
    want = torch.linspace(1, 2, 12, dtype=torch.float64).view(3, 4)
    eager = want.float()
    got = eager.clone()
    got[1, 2] += off
    assert found in difference(0, got, want, eager, TOLERANCE[f32]) if found else not difference(0, got, want, eager, 1e-5)


def test_a_missing_nan_and_another_type_are_told() -> None:
    want = torch.tensor([1.0, math.nan], dtype=torch.float64)
    assert "1 are not and should" in difference(1, torch.ones(2), want, want.float(), 1e-5)
    assert "float16" in difference(0, torch.ones(2).half(), torch.ones(2).double(), torch.ones(2), 1e-5)


def test_strides_of_one_element_say_nothing() -> None:
    assert strides(torch.zeros(3, 1, 4)) == strides(torch.zeros(3, 4))


@pytest.mark.interpret
def test_a_configuration_is_checked_with_its_gradients() -> None:
    seen: list[int] = []

    def pick(found: Sequence[Config]) -> Config:
        seen.append(len(found))
        return found[-1]

    assert checked(SMALL, PORTABLE, "cpu")(pick) == ""
    assert seen
    changed = replace(SMALL, fill=-30.0)
    assert changed.function(*changed.arguments()).isfinite().all()
