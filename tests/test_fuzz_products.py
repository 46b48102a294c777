"""Random programs around matrix products, each by one template: C++ natively, Triton in its interpreter, or natively on a GPU.

KGEN_FUZZ_EXAMPLES says how many programs, KGEN_FUZZ_SEED the first one; `python -m tests.fuzz_products` runs more.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
from fuzz_products import CPU_TEMPLATES, GPU_TEMPLATES, grow, needed, run, smaller

FIRST = int(os.environ.get("KGEN_FUZZ_SEED", "0"))
# Programs of a test, and all for a machine without a GPU: those that run each time, and the others.
BATCH = 10
ALWAYS = 40
ALL = int(os.environ.get("KGEN_FUZZ_EXAMPLES", "300"))

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def batches() -> list[Any]:
    """A quarter of the programs is compiled C++, whose compiler takes its time."""
    found = []
    for first in range(0, max(ALL, ALWAYS), BATCH):
        native = first // BATCH % 4 == 3
        templates, needs = (CPU_TEMPLATES, pytest.mark.cpu) if native else (GPU_TEMPLATES, pytest.mark.interpret)
        marks = [needs, *([pytest.mark.slow] if first >= ALWAYS else [])]
        seeds = range(FIRST + first, FIRST + first + BATCH)
        found.append(pytest.param(seeds, templates, marks=marks, id=f"{seeds.start}-{seeds.stop - 1}"))
    return found


def assert_right(seeds: Sequence[int], device: str, templates: Sequence[str]) -> None:
    ran = [run(seed, device, templates) for seed in seeds]
    failed = [one for one in ran if one[2].error]
    if failed:
        program, how, outcome = failed[0]
        names = ", ".join(str(p.seed) for p, *_ in failed)
        small = smaller(program, how)
        text = f"{outcome.error}\n\n{small.source()}"
        pytest.fail(f"seeds {names} fail; the first one, made smaller: {how}: {text}", pytrace=False)
    taken = sum(outcome.taken > 0 for *_, outcome in ran)
    assert 2 * taken >= len(ran), f"templates took products of {taken} of {len(ran)} programs only"


@pytest.mark.parametrize(("seeds", "templates"), batches())
def test_fuzz_products(seeds: range, templates: Sequence[str]) -> None:
    assert_right(seeds, "cpu", templates)


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(FIRST, FIRST + 40, BATCH))
def test_fuzz_products_on_a_gpu(first: int) -> None:
    assert_right(range(first, first + BATCH), "cuda", GPU_TEMPLATES)


@pytest.mark.parametrize("template", ["cpp_matmul", "triton_matmul_tiles", "triton_matvec"])
def test_programs_are_reproducible(template: str) -> None:
    assert [grow(seed, template) for seed in range(5)] == [grow(seed, template) for seed in range(5)]
    for seed in range(5):
        program = grow(seed, template)
        f, args = program.load()
        f(*args)
        assert needed(program) == program
