"""Steps of decoding that write to their caches, in the interpreter: right against float64, in two parts."""

from __future__ import annotations

import pytest

from bench.gpu_decode import Case, _checked, paged_and_updated, updated

CASES = (
    pytest.param(Case("dense", updated, (2, 4, 2, 3, 128, 16), new=True), marks=pytest.mark.slow, id="dense"),
    pytest.param(Case("paged", paged_and_updated, (2, 4, 2, 1, 64, 16), page=16, new=True), id="paged"),
)


@pytest.mark.interpret
@pytest.mark.parametrize("case", CASES)
def test_steps_that_write_to_their_caches_are_right(case: Case) -> None:
    assert _checked(case, 2)(lambda configs: configs[0]) == ""
