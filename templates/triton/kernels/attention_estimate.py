"""What attention takes on a GPU, tile by tile of scores: dots on the matrix units, exponentials and the rest of the softmax
on the others, and memory. Templates multiply it by what they were found to take (H100, 2026-11-25, bench.gpu_attention).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kgen.device import L2_RATE
from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.program import MatrixSizes
from kgen.templates import calibration
from kgen.templates.base import Resources
from kgen.templates.contract import Config
from kgen.templates.problem import Problem, memoised, memoised_at_sizes
from kgen.templates.triton.codegen.runs import Run, runs_of
from kgen.templates.triton.kernels import estimate

# Cycles a second; exponentials and additions of one SM in a cycle.
CLOCK, EXPONENTIALS, ADDITIONS = 1.7e9, 16, 128
# Additions for each score besides what its slot needs: the maximum, the exponential's argument, the sum, the conversion.
SOFTMAX = 5
# Share of the peak rate of dots; of those of float32 numbers that other units make, and of TF32; and rows below which a Hopper
# GPU multiplies registers.
DOTS, EXACT, ROUNDED, ASYNCHRONOUS = 0.75, 0.5, 0.3, 64
# How much of the shorter of dots and softmax does not happen during the other, by the warps on an SM.
BESIDE = {4: 1.0, 8: 0.6, 12: 0.45, 16: 0.4}
# How much longer a program takes for each other one on its SM, if nothing but waiting sets the time; and the share of the time
# that programs of one tile take, which correct nothing (H200, 2026-12-01, bench.attention_calibration).
CROWDED, ALONE = 0.3, 0.75
# Tiles of rows at which the tiles of scores are counted.
SAMPLES = 8
HOPPER = 90
# What was measured: padded heads, and the fewest rows of queries, and keys.
MEASURED, FEWEST = (64, 128), 128
# Few rows, of which the scheduler makes parts (H100, 2026-11-25, bench.gpu_decode: .92 to 1.0 of a copy's rate): keys of a part
# at least, programs on an SM, and seconds of the kernel that joins parts.
FEW_ROWS, SHORTEST_PART, SIDE_BY_SIDE, JOINING = 16, 256, 2, 2.0e-6


@dataclass(frozen=True, slots=True)
class Counts:
    """Tiles of scores of an average tile of rows, and of the longest: those that ask for the mask, and those that do not."""

    masked: float
    whole: float
    longest: float


def unmeasured(problem: Problem, head: int, measured: tuple[int, ...] = MEASURED, fewest: int = FEWEST) -> str | None:
    """Why nothing is known of a problem with heads padded to so many elements, of which `measured` were, on `fewest` rows and
    keys and more."""
    unlike = calibration.of_half_on_hopper(problem)
    return unlike if unlike is not None else unmeasured_sizes(problem, head, measured, fewest, fewest)


def unmeasured_sizes(problem: Problem, head: int, measured: tuple[int, ...], rows: int, keys: int) -> str | None:
    """The same of a type of numbers that was measured, on so many rows and keys at least."""
    if head not in measured or problem.size("m") < rows or problem.size("n") < keys:
        least = f"fewer than {rows} rows, or {keys} keys" if rows != keys else f"fewer than {rows} rows or keys"
        return f"no GPU has measured it on other heads than {measured}, or on {least}"
    if any(one.load is None and vs.loads([one.value]) for one in problem.inputs.values()):  # numbers cost nothing
        return "no GPU has measured it on operands that are computed"
    return None


def is_measured(sizes: MatrixSizes, arch: int, measured: tuple[int, ...] = MEASURED, fewest: int = FEWEST) -> bool:
    """The same of a program that is no problem yet, with operands in memory."""
    numbers = calibration.is_half_on_hopper(sizes.dtype, arch)
    return numbers and sizes.others <= set(measured) and min(sizes.rows, sizes.columns) >= fewest


def seconds(
    problem: Problem, config: Config, needs: Resources, widths: tuple[int, int], filled: bool = False, chain: float = 0.0
) -> float:
    """The time of a kernel whose programs need so much, with heads as wide as `widths` of queries and of values. Where `filled`
    it makes no tile that is masked by a finite number. A program alone takes `chain` seconds for a tile at least."""
    device, counts = problem.device, _counts(problem, config, filled)
    multiprocessors = device.compute_units
    rows, parts = math.ceil(problem.size("m") / config.BLOCK_M), _parts(problem)
    programs = problem.size("b") * rows * parts
    threads = config.WARPS * 32
    limit = min(
        estimate.SHARED // (needs.shared + estimate.RESERVED), estimate.REGISTERS // (min(255, needs.registers) * threads)
    )
    together = max(1, min(limit, math.ceil(programs / multiprocessors)))
    masked, whole = (_tile(problem, config, widths, together, slot) for slot in _slot_costs(problem, filled))
    tiles = (counts.masked + counts.whole) / parts
    each = (counts.masked * masked + counts.whole * whole) / parts
    longest = counts.longest / parts * max(masked, whole)
    covered = (config.STAGES - 1) * max(masked, whole) * together
    each *= max(1.0, estimate.LATENCY / covered) if covered else 2.0
    loaded = tiles * config.BLOCK_N * sum(widths) * problem.inputs["K"].dtype.itemsize
    program = max(each, loaded / L2_RATE) + estimate.START
    waves = programs / multiprocessors
    busy = max(math.ceil(waves) * program if longest <= each else waves * program + longest / 2, longest * together)
    if chain:
        alone = tiles * chain * (1 + CROWDED * (together - 1)) + estimate.START
        busy = max(busy, math.ceil(waves / together) * alone) * (ALONE if counts.masked + counts.whole <= 1 else 1.0)
    moved = sum(problem.bytes_read(name) for name in problem.inputs) + problem.epilogue_bytes
    streaming = moved / device.bandwidth / estimate.STREAM_RATE
    start = estimate.LAUNCH + estimate.LATENCY + (JOINING if parts > 1 else 0.0)
    return start + max(busy, streaming) + estimate.APART * min(busy, streaming)


def _parts(problem: Problem) -> int:
    """Of the keys of few rows, which the scheduler makes where a GPU would not be busy."""
    if problem.size("m") > FEW_ROWS:
        return 1
    wanted = SIDE_BY_SIDE * problem.device.compute_units // problem.size("b")
    return max(1, min(wanted, problem.size("n") // SHORTEST_PART))


def _tile(problem: Problem, config: Config, widths: tuple[int, int], together: int, slot: int) -> float:
    """Seconds of one tile of scores on an SM, with so many operations of the slot for each."""
    area = config.BLOCK_M * config.BLOCK_N
    low = config.BLOCK_M < ASYNCHRONOUS and problem.device.arch >= HOPPER
    share = EXACT if problem.exact_float32 else ROUNDED if problem.tf32 else estimate.LOW_RATE if low else DOTS
    dots = 2 * area * sum(widths) / (problem.rate / problem.device.compute_units) / share
    adds = area * (SOFTMAX + slot) + config.BLOCK_M * widths[1]
    powers, others = area / (EXPONENTIALS * CLOCK), adds / (ADDITIONS * CLOCK)
    softmax = max(powers, others) + min(powers, others) / 2
    beside = BESIDE[min(16, max(4, together * config.WARPS // 4 * 4))]
    return max(dots, softmax) + beside * min(dots, softmax)


def idle_factor(problem: Problem, programs: int) -> float:
    """How many times longer so many programs take than as many as there are SMs, one each at least."""
    return max(1.0, problem.device.compute_units / programs)


def slot_work(problem: Problem, config: Config, filled: bool = False) -> float:
    """Elementary operations of the slot for a score, of all tiles' scores on average; `filled` as in `seconds`."""
    counts = _counts(problem, config, filled)
    of_masked, of_whole = _slot_costs(problem, filled)
    return (counts.masked * of_masked + counts.whole * of_whole) / max(counts.masked + counts.whole, 1e-9)


def step_seconds(problem: Problem, config: Config, step: str) -> float:
    """The time of a step's operations for each score that is made, if nothing else happens beside them."""
    counts, tiles = _counts(problem, config, False), math.ceil(problem.size("m") / config.BLOCK_M)
    made = problem.size("b") * tiles * (counts.masked + counts.whole) * config.BLOCK_M * config.BLOCK_N
    return made * _cost(problem, step) / (ADDITIONS * CLOCK * problem.device.compute_units)


@memoised
def _cost(problem: Problem, step: str) -> int:
    """Elementary operations of a step for each of its results."""
    return vs.total_cost([problem.middles[step].function()])


@memoised
def _slot_costs(problem: Problem, filled: bool) -> tuple[int, int]:
    """Elementary operations of what a slot makes of a score, in a masked tile and in a whole one; `filled` as in `seconds`."""
    middle = problem.middles["scores"]
    masked, whole = (middle.function(scaled=False, masked=kind, filled=filled) for kind in (True, False))
    return vs.total_cost([masked]), vs.total_cost([whole])


def made_share(problem: Problem, config: Config, step: str) -> float:
    """The share of a step's tiles that are made: of a causal mask about one half."""
    counts = _counts(problem, config, False, step)
    return min(1.0, (counts.masked + counts.whole) / math.ceil(problem.size("n") / config.BLOCK_N))


@memoised_at_sizes
def _counts(problem: Problem, config: Config, filled: bool, step: str = "scores") -> Counts:
    """At some tiles of rows, the tiles of scores that are made; where `filled`, without those of a finite number."""
    runs, rows = runs_of(problem, step, config, filled=filled), math.ceil(problem.size("m") / config.BLOCK_M)
    sampled = sorted({k * (rows - 1) // max(1, min(SAMPLES, rows) - 1) for k in range(min(SAMPLES, rows))})
    found: list[tuple[float, float]] = []
    for tile in sampled:
        edges = [problem.sizes.of(edge) for edge in runs.edges(ix.constant(tile * config.BLOCK_M))]
        found.append((_tiles(runs.all, edges, config, whole=False), _tiles(runs.all, edges, config, whole=True)))
    count = len(found)
    return Counts(sum(a for a, _ in found) / count, sum(b for _, b in found) / count, max(a + b for a, b in found))


def _tiles(runs: tuple[Run, ...], edges: list[int], config: Config, whole: bool) -> float:
    made = (r for r in runs if r.whole == whole and not r.rest)
    return sum(max(0, math.ceil((edges[r.last] - edges[r.first]) / config.BLOCK_N)) for r in made)
