"""Attention of many configurations, forward and backward, against float64: natively on a CPU, and in the interpreter."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.attention_configurations import Configuration, drawn
from tests.attention_plans import CPU, GPU
from tests.codegen import report, run_rows

# All configurations, those of the fast suite, and how many are compiled together.
COUNT, QUICK, AT_ONCE = 400, range(400, 405), 20
PLAIN = Configuration(
    1000, 2, (2, 1), (40, 70), (16, 16), torch.float32, "scaled", "strict", -30.0, "where", upcast=False, transposed=False
)
# Masks whose guards are not 0 for some rows: these look at all tiles after all.
GUARDED = [
    PLAIN,
    replace(PLAIN, seed=1001, score="softcap", fill=-math.inf, lengths=(70, 70), heads=(2, 2)),
    replace(PLAIN, seed=1002, mask="window", fill="least", spelling="masked_fill", lengths=(70, 70), sizes=(24, 8)),
]
# Long rows of slopes: a slope that backward reads is rounded, so that forward has to round it as well.
SLOPED = replace(PLAIN, seed=1012, batch=1, heads=(1, 1), lengths=(64, 900), dtype=torch.bfloat16, score="slopes", mask="none")
# A sum over heads that share keys, of a gradient with one column.
SHARED = drawn(89)
# Rows of which a tile, or all, is masked by a number so large that a multiple of it differs from itself by powers of two.
FILLED = [
    replace(PLAIN, seed=1003, batch=1, lengths=(64, 130), dtype=torch.bfloat16, mask="window", fill="least"),
    replace(PLAIN, seed=1004, batch=1, lengths=(64, 130), mask="window", fill=-1e30, spelling="masked_fill"),
    replace(PLAIN, seed=1005, batch=1, lengths=(64, 70), dtype=torch.bfloat16, fill="least", spelling="add"),
]


def check(configurations: list[Configuration], gpu: bool = False) -> None:
    failures = run_rows([one.row() for one in configurations], only=GPU if gpu else CPU, gpu=gpu)
    assert not failures, report(failures)


@pytest.mark.cpu
def test_some_configurations() -> None:
    check([*GUARDED, *FILLED, SLOPED, SHARED, *map(drawn, QUICK)])


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, COUNT, AT_ONCE))
def test_all_configurations(first: int) -> None:
    check([drawn(seed) for seed in range(first, first + AT_ONCE)])


@pytest.mark.interpret
def test_guards_in_the_interpreter() -> None:
    check(GUARDED[:2], gpu=True)


@pytest.mark.interpret
def test_rows_filled_with_large_numbers_in_the_interpreter() -> None:
    check(FILLED, gpu=True)


@pytest.mark.interpret
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, COUNT, 8 * AT_ONCE))
def test_a_sample_in_the_interpreter(first: int) -> None:
    """Small ones: the interpreter takes seconds for each tile."""
    found = [drawn(seed) for seed in range(first, first + 8 * AT_ONCE)]
    check([one for one in found if one.batch * one.heads[0] * math.prod(one.lengths) < 4000][:AT_ONCE], gpu=True)
