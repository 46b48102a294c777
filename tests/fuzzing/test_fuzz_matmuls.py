"""Random programs around matmuls, each by one template: C++ natively, Triton in its interpreter, or natively on a GPU.

KGEN_FUZZ_EXAMPLES says how many programs, KGEN_FUZZ_SEED the first one; `python -m tests.fuzz_matmuls` runs more.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
from fuzz_graphs import Program
from fuzz_matmuls import CPU_TEMPLATES, GPU_TEMPLATES, NATIVE_TEMPLATES, How, check, grow, needed, run, smaller
from slow import slow_but

FIRST = int(os.environ.get("KGEN_FUZZ_SEED", "0"))
# Programs of a test, those that run each time, and all: once on the CPU and once on a GPU.
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
    assert 2 * taken >= len(ran), f"templates took matmuls of {taken} of {len(ran)} programs only"


@pytest.mark.every(2)
@pytest.mark.parametrize(("seeds", "templates"), batches())
def test_fuzz_matmuls(seeds: range, templates: Sequence[str]) -> None:
    assert_right(seeds, "cpu", templates)


@pytest.mark.gpu
@pytest.mark.parametrize("first", slow_but(lambda first: first < FIRST + ALWAYS, range(FIRST, FIRST + ALL, BATCH)))
def test_fuzz_matmuls_on_a_gpu(first: int) -> None:
    assert_right(range(first, first + BATCH), "cuda", NATIVE_TEMPLATES)


# ---- what the programs have found, made smaller -----------------------------------------------------------------------

DRAWS = {
    # a sum of one term has no loop, and the rows of the matmul took its place beside what makes an operand
    "sums of one term": ("v0 = torch.tanh(x0)\nv1 = torch.relu(x1.mT @ v0) + 1", ("randn(1, 101)", "randn(1, 3)")),
    # nor has one row: what makes the operand was taken for an epilogue
    "a sum of one term for one row": ("v0 = torch.tanh(x0)\nv1 = torch.relu(x1 @ v0) + 1", ("randn(1, 101)", "randn(1, 1)")),
    # the first operand does not tell that the columns, along which it repeats, are columns
    "columns all equal": (
        "v0 = torch.sigmoid(x0)\nv1 = torch.tanh(v0 @ x1.expand(33, 24)) * (v0 @ x2)",
        ("randn(96, 33)", "randn(33, 1)", "randn(33, 24)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("template", ["triton_matmul", pytest.param("cpp_matmul", marks=pytest.mark.cpu)])
def test_what_was_found(name: str, template: str) -> None:
    lines, inputs = DRAWS[name]
    program = Program(0, tuple((f"x{k}", expr) for k, expr in enumerate(inputs)), tuple(lines.split("\n")), ("v0", "v1"))
    outcome = check(program, How(template))
    assert not outcome.error
    assert outcome.taken


@pytest.mark.parametrize("template", ["cpp_matmul", "triton_matmul_tiles", "triton_matvec"])
def test_programs_are_reproducible(template: str) -> None:
    assert [grow(seed, template) for seed in range(5)] == [grow(seed, template) for seed in range(5)]
    for seed in range(5):
        program = grow(seed, template)
        f, args = program.load()
        f(*args)
        assert needed(program) == program
