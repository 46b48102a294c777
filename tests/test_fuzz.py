"""Random programs through the C++ back end, against eager and against the evaluator on the lowered graph.

`make fuzz` runs more of them; KGEN_FUZZ_SEED starts at another seed. A failure is reported as a program that runs alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

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
    return Row(f"seed {program.seed}", f, [args], agreement(f, program), None, oracle=True)


def agreement(f: Callable[..., Any], program: Program) -> Callable[[Sequence[Any], Any, Any], None]:
    # a rounding to bfloat16 in the middle makes errors of its size in float32 results
    close = near(f, TOLERANCE[bfloat16] if "bfloat16" in program.source() else None)

    def check(args: Sequence[Any], got: Any, want: Any) -> None:
        close(args, got, want)
        for position, (a, b) in enumerate(zip(got[0], want[0], strict=True)):
            strides = [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (a, b)]
            if b.numel() and strides[0] != strides[1]:
                raise AssertionError(f"result {position} has strides {a.stride()}, not {b.stride()}")

    return check


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
