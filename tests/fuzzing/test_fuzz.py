"""Random programs through the C++ back end, against eager and against the evaluator on the lowered graph.

`make fuzz` runs more of them; KGEN_FUZZ_SEED starts at another seed. A failure is reported as a program that runs alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from codegen import Row, gradients, near, run_rows
from fuzz_graphs import Program, grow, runs, shrunk
from op_table import TOLERANCE

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore::UserWarning")]

EXAMPLES = int(os.environ.get("KGEN_FUZZ_EXAMPLES", "20"))
FIRST = int(os.environ.get("KGEN_FUZZ_SEED", "0"))
BATCH = 20


def row(program: Program, backward: bool = False, dynamic: bool = False) -> Row:
    f, args = program.load()
    # a rounding in the middle makes errors of its size in results of any dtype
    coarsest = next((d for d in (torch.bfloat16, torch.float32) if str(d) in program.source()), torch.float64)
    agrees = near(gradients(f) if backward else f, TOLERANCE[coarsest])
    name = f"seed {program.seed}"
    return Row(name, f, [args], agrees, None, dynamic, backward=backward, strides=not backward, oracle=not backward)


def has_gradients(program: Program) -> bool:
    """Autograd refuses a program that overwrites what a gradient needs, and AOTAutograd goes through the gradient of
    overlapping windows in another way than eager."""
    f, args = program.load()
    if ".unfold(" in program.source():
        return False
    try:
        gradients(f)(*args)
    except RuntimeError:
        return False
    return True


def check(seeds: Iterable[int], **how: bool) -> None:
    programs = {f"seed {seed}": grow(seed) for seed in seeds}
    if how.get("backward"):
        programs = {name: program for name, program in programs.items() if has_gradients(program)}
    failures = run_rows([row(p, **how) for p in programs.values()])
    failures = {name: error for name, error in failures.items() if "modified by an inplace operation" not in error}  # AOT's
    if failures:
        name = next(iter(failures))
        small = shrunk(programs[name], lambda p: _fails(p, how))
        error = run_rows([row(small, **how)]).get(f"seed {small.seed}", failures[name])
        pytest.fail(f"{', '.join(failures)} fail; the first one, made smaller: {error}\n\n{standalone(small)}", pytrace=False)


def _fails(program: Program, how: dict[str, bool]) -> bool:
    return (not how.get("backward") or has_gradients(program)) and bool(run_rows([row(program, **how)]))


def batches(share: int = 1) -> Any:
    """Parametrises a test over its share of the seeds, some seeds a test."""
    count = max(1, EXAMPLES // share)
    seeds = [range(k, min(k + BATCH, FIRST + count)) for k in range(FIRST, FIRST + count, BATCH)]
    return pytest.mark.parametrize("seeds", seeds, ids=lambda r: f"{r.start}-{r.stop - 1}")


@batches()
def test_fuzz(seeds: range) -> None:
    check(seeds)


@batches(2)
def test_fuzz_backward(seeds: range) -> None:
    check([10_000 + seed for seed in seeds], backward=True)


@batches(2)
def test_fuzz_symbolic_sizes(seeds: range) -> None:
    check([20_000 + seed for seed in seeds], dynamic=True)


def standalone(program: Program) -> str:
    """The program as a file that shows the difference."""
    calls = ", ".join(name for name, _ in program.inputs)
    return f"""{program.source()}

want = f({", ".join(f"{name}.clone()" for name, _ in program.inputs)})
got = torch.compile(f, backend="kgen")({calls})
for a, b in zip(got, want):
    print(a.dtype, tuple(a.shape), a.stride(), b.stride(), (a.double() - b.double()).abs().max() if a.numel() else "")
"""


def test_programs_are_reproducible() -> None:
    assert grow(5) == grow(5)
    assert all(runs(grow(seed)) for seed in range(10))


def test_shrinking_keeps_the_failure() -> None:
    program = next(p for p in map(grow, range(99)) if any("tanh" in line for line in p.lines[:3]))
    small = shrunk(program, lambda p: any("tanh" in line for line in p.lines))
    assert len(small.lines) < len(program.lines)
    assert "tanh" in small.source()
    assert runs(small)
