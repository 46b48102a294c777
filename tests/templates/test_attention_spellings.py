"""Attention as models write it, natively on a CPU: right against float64, forward and gradients, the same in a second run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention_plans import CPU, GPU, before_split
from tests.attention_spellings import LEARNED, SPELLINGS, Spelling
from tests.codegen import Row, gradients, report, run_rows

LENGTH, SHORT, HEAD = 40, 20, 16
# Errors by norms, against float64.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


ALL = {**SPELLINGS, **{f"learned {name}": one for name, one in LEARNED.items()}}


def row(name: str, dtype: torch.dtype, length: int) -> Row:
    """Two calls on the same arguments."""
    spelling: Spelling = ALL[name]
    args = spelling.arguments(length, HEAD, dtype)
    first: list[Tensor] = []

    def agrees(sample: Sequence[Any], got: Any, _: Any) -> None:
        wide = [one.double() if one.is_floating_point() else one for one in sample]
        for number, (mine, right) in enumerate(zip(got[0], gradients(spelling.function)(*wide), strict=True)):
            error, size = float((mine.double() - right).norm()), float(right.norm())
            assert error <= TOLERANCE[dtype] * max(size, 1e-2 * math.sqrt(right.numel())), f"result {number}: {error:.3g}"
        for number, (mine, before) in enumerate(zip(got[0], first, strict=False)):
            assert torch.equal(mine, before), f"result {number} differs in a second run"
        first.extend(got[0])

    return Row(
        f"{name} {length}", spelling.function, [args, args], agrees, externs=None, backward=True, before_split=before_split
    )


@pytest.mark.cpu
def test_some_spellings_are_right() -> None:
    """Those of which no template's own tests have the form."""
    names = (
        "differential",
        "learned differential",
        "sink",
        "shifted sink",
        "grouped heads",
        "learned causal bias",
        "learned slopes",
        "learned buckets",
    )
    failures = run_rows([row(name, torch.float32, LENGTH) for name in names], only=CPU)
    assert not failures, report(failures)


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_all_spellings_are_right(dtype: torch.dtype) -> None:
    failures = run_rows([row(name, dtype, length) for name in ALL for length in (LENGTH, 150, 300)], only=CPU)
    assert not failures, report(failures)


@pytest.mark.interpret
def test_gradients_of_scores_are_summed_right_in_the_interpreter() -> None:
    names = ("learned causal bias", "learned buckets")
    failures = run_rows([row(name, torch.float32, SHORT) for name in names], only=GPU, gpu=True)
    assert not failures, report(failures)


@pytest.mark.interpret
@pytest.mark.slow
def test_spellings_are_right_in_the_interpreter() -> None:
    failures = run_rows([row(name, torch.float32, LENGTH) for name in ALL], only=GPU, gpu=True)
    assert not failures, report(failures)
