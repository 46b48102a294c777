"""Random programs through the C++ back end, against eager and against the evaluator on the lowered graph.

`make fuzz` runs more of them; KGEN_FUZZ_SEED starts at another seed. A failure is reported as a program that runs alone.
"""

from __future__ import annotations

import os

import pytest
from codegen import Row, near, run_rows
from fuzz_graphs import Program, grow, runs, shrunk
from op_table import TOLERANCE
from torch import bfloat16

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore::UserWarning")]

EXAMPLES = int(os.environ.get("KGEN_FUZZ_EXAMPLES", "40"))
FIRST = int(os.environ.get("KGEN_FUZZ_SEED", "0"))
BATCH = 20


def row(program: Program) -> Row:
    f, args = program.load()
    # a rounding to bfloat16 in the middle makes errors of its size in float32 results
    agrees = near(f, TOLERANCE[bfloat16] if "bfloat16" in program.source() else None)
    return Row(f"seed {program.seed}", f, [args], agrees, None, strides=True, oracle=True)


@pytest.mark.parametrize("first", range(FIRST, FIRST + EXAMPLES, BATCH))
def test_fuzz(first: int) -> None:
    programs = {f"seed {seed}": grow(seed) for seed in range(first, min(first + BATCH, FIRST + EXAMPLES))}
    failures = run_rows([row(p) for p in programs.values()])
    if failures:
        name = next(iter(failures))
        small = shrunk(programs[name], lambda p: bool(run_rows([row(p)])))
        error = run_rows([row(small)]).get(f"seed {small.seed}", failures[name])
        pytest.fail(f"{', '.join(failures)} fail; the first one, made smaller: {error}\n\n{standalone(small)}", pytrace=False)


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
