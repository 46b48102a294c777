"""The cost model: what a configuration of a template takes on a device, by its roofline, and what the library would take.

All times are in seconds. The model only has to order candidates: its constants come from measurements of few problems.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence

import torch

from kgen.cost.atomics import atomics_seconds
from kgen.cost.cpu_convolutions import convolution_on_cpu
from kgen.cost.gpu_depthwise import depthwise_on_gpu, is_depthwise
from kgen.device import ADDITIONS, L2_RATE
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.program import Axes, Contract, Elementwise, Program, Softmax
from kgen.templates.contract import Config
from kgen.templates.problem import Input, Problem, memoised_at_sizes
from kgen.unusable import usable

# A launch, or waking the threads, with what it leaves idle at either end.
LAUNCH = {"cuda": 2.5e-6, "cpu": 4e-6}
# Share of the peak rate that a library reaches on large matmuls, and of the bandwidth that separate kernels reach.
LIBRARY_RATE = {"cuda": 0.87, "cpu": 1.0}
STREAM_RATE = 0.9
# What is left of that rate where a GPU's library has one call for several contractions that reads a number for each element
# between them (H200, attention with a mask in memory: 2x16x4096x128 in 840 us, 4x12x4096x64 in 807 us).
READING_SHARE = 0.4
# Rows that fill no tile of such a call, and the seconds at least that an SM takes for each batch of so few (H200, 2026-11-29:
# 12,288 heads of 49 rows of 32 with a mask took 97 us by one of its kernels, 672 by another one).
ROWS_OF_CALL, SHORT_BATCH = 64, 1e-6
# Bytes of the columns' operands that one program of such a call reads in a second at most (H200, 2026-12-01,
# bench.attention_calibration: 4,096 keys of eight heads of 128 took 53 us with four rows, 2,048 of 32 took 14 with one).
READ_BY_A_PROGRAM = 90e9
# What is left of the memory's rate in the library's matmuls of a program of few rows, and where its numbers are wider than 16
# bits (H200, 2026-12-01, bench.attention_calibration: 1,024 heads of one row took 190 us for 670 MB, 507 for 1.34 GB).
SHARE_OF_FEW = (0.85, 0.65)
# How much of the shorter of computing and streaming a GPU's library does not do during the other.
APART = 0.05
# How much longer than streaming it takes a CPU's library to bring operands into the order in which it multiplies them, where
# they are larger than so many bytes and do not lie in its caches.
PACKING, CACHED = 1.35, 2 << 20
# How much longer it takes a CPU's library with AMX, which brings operands into the order of its tiles at each call (Intel Xeon,
# 2026-11-27, bench.regret).
AMX_ORDERING = 1.5
# What is left of a CPU's library's rate on 16-bit floats where there are no instructions that multiply them.
EMULATED_SHARE = 0.25
# What is left of cuBLAS' rate where rows begin at multiples of so many bytes; only 16, 4 and 2 are measured (4 of TF32: 100 to
# 130 of some 400 TFLOP/s, with rows of 1,001 to 50,257 numbers; H200, 2026-11-30). Of exact matmuls of
# float32, all is: 3,001 x 3,001 x 512 took 203 us, 1,023 x 1,023 x 768 took 40 (H200, 2026-11-30, bench.untuned).
ALIGNED_SHARE = {16: 1.0, 8: 0.7, 4: 0.3, 2: 0.14, 1: 0.14}
# The same of 16-bit numbers, for which it has other kernels (H100, 2026-11-27, bench.untuned: 3,000 x 770 x 2,310 in 63 to
# 71 us, 3,000 x 1,000 x 500 in 22 and 26 us, 1,500 x 700 x 1,200 in 19 us).
ALIGNED_SHARE_OF_HALVES = {16: 1.0, 8: 0.2, 4: 0.22, 2: 0.14, 1: 0.14}
# The role (`ir.Derived`) of copies in rows of whole lines, which are made for templates.
ALIGNED_COPY = "aligned"
# What is left of the bandwidth there (H100, 2026-11-24, bench.regret: ViT's and Whisper's attention).
STREAMED_SHARE = {16: 1.0, 8: 0.55, 4: 0.4, 2: 0.33, 1: 0.33}
# And of that where no row of an operand or of the result has as many bytes (H200, 2026-11-26, bench.untuned: heads that are
# mixed, 2^20 rows of 12 numbers read and written in 95 us).
SHORT_ROW, SHORT_SHARE = 64, 0.25
# And where numbers have 8 bits.
BYTE_SHARE = 0.93
# Bytes of results that a GPU's L2 cache still holds when the next kernel reads them (H100, 2026-11-24, bench.regret).
L2_RESULT = 16 << 20
# What templates' estimates may be wrong by, from their residuals (H100, 2026-11-24, bench.regret: standard deviations of the
# logarithm .10 to .14 of plain matrices, .15 of epilogues, .2 of few rows, .3 of computed operands): where an operand is
# computed, tiles are reduced, one side of the result is as short as `FEW`, the epilogue has more than `HEAVY` operations, and
# elsewhere. Less of problems that take longer than `SHORT`, whose parts average out.
DOUBT = {
    "computed": 1.3,
    "computed matrices": 1.2,
    "few reduced": 1.25,
    "reduced": 1.2,
    "few": 1.15,
    "epilogue": 1.15,
    "plain": 1.05,
}
FEW, HEAVY, SHORT = 32, 12, 20e-6
# And of problems of any length, for each operand as large as the library's result that such an epilogue reads: their residuals
# do not average out (gradients of GELU, which read one, .97 to 1.24; of SwiGLU, which read two, 1.27 and, on an H200,
# 2026-11-29, 1.11 with 880 us where the library and another kernel take 791).
DOUBT_OF_READING = 1.08
# And of windows that overlap, whose residuals have the same cause for problems of one kind (H100, 2026-11-26, bench.regret).
DOUBT_OF_WINDOWS = 1.0
# Seconds that a library's convolution takes beyond the matmul that it is, and what is left of its rate where the
# channels of a tap are no whole load of so many bytes, which its matrix units want (H100, 2026-11-24, bench.regret).
CONVOLUTION, NARROW_SHARE, LOAD = 3e-6, 0.03, 16
# What is left of it on windows that templates' estimates were compared with: patches that do not overlap.
PATCH_SHARE = 0.4
# Channels of its tiles.
CHANNELS = 128
# Bytes of a 16-bit number.
HALF = 2
# Tiles of its matmuls, and their shares of the rate; and how much faster SMs are where few have one (H100, 2026-11-26,
# bench.regret: weight gradients, projections of short sequences).
LIBRARY_TILES, FASTER, LONGEST_IDLE = {(128, 128): 1.0, (128, 64): 0.85, (64, 64): 0.7}, 1.2, 1.25
# Seconds of a library's matmul for each term of its sums, where there is little else to do, and the longest sum that it does
# not split then (H100, 2026-11-26, bench.regret: classifiers, projections of few tokens).
TERM, UNSPLIT = 2.5e-9, 1280
# Seconds that it takes to add up the parts of a sum that the library cuts, for want of tiles, when it is so long; and the share
# of SMs below which tiles of 64 x 64 are too few (H200, 2026-11-30, bench.regret --kernels: it cut 256 x 1,024 x 6,272, not
# 512 x 1,024 x 6,272 and 4,096 x 128 x 4,096, which took 13.8 and 12.3 us).
CUT_SUM, LONG_SUM, CUT_BELOW = 8e-6, 4096, 0.75
# The same of 16-bit numbers whose rows begin anywhere. It has large tiles only for them, and cuts shorter sums (H100,
# 2026-11-27, bench.untuned: 4,095 x 845 x 128 took 16.6 us, and 4.2 us for the parts; it does not cut sums of 128). The parts
# of long ones occupy all SMs (1,001 x 18,724 x 320 took 101 us).
CUT_UNALIGNED, SUM_UNALIGNED = 4.2e-6, 512
# Seconds of what a tile of the library's matmuls goes through afterwards where one call does that too, and the points of such
# a tile; matmuls of the next tiles hide all but so many of these.
FUSED_TAIL, FUSED_TILE, FUSED_TAILS = 1.5e-6, 128 * 256, 5
# What functions cost in separate kernels beyond the additions that they count for elsewhere: kernels of GELU take 62 us on an
# H100 and 65 us on an H200, whose memory is half as fast again (2026-11-26, bench.regret). And those of norms with SiLU 7.3 us,
# of SiLU 4.0 us for 4.2 million numbers, of hard swish 5.0 us for 6.0 million (H200, 2026-11-27, bench.regret --kernels).
# Random numbers are made by blocks: dropout of 67 million takes 88 us (H200, 2026-11-29, decision 0050).
FUNCTIONS = {"erf": 45, "log1p": 25, "sigmoid": 28, "sqrt": 15, "reciprocal": 15, "truediv": 15, "rand": -12}
# How much longer than its operations random numbers take in a kernel of a softmax (H200, 2026-11-30, decision 0050).
RANDOM_WEIGHTS = 1.3
# Seconds from the end of a kernel's first programs to that of its last ones, when another one waits for it.
DRAIN = 2e-6
# Sums that one program of a GPU makes, column by column.
SUMS_OF_PROGRAM = 64


def feasible(problem: Problem) -> Iterator[Config]:
    """The configurations that the device can run."""
    yield from (config for config in problem.template.configs(problem) if fits(problem, config))


def fits(problem: Problem, config: Config) -> bool:
    """Whether the device can run a configuration, and the problem's reductions suit its tiles."""
    device, needs = problem.device, problem.template.resources(problem, config)
    large = needs.shared > device.shared or needs.registers > device.registers
    return not large and problem.admits(config) and usable(problem.template.name, config.values, problem.identity)


def order(problem: Problem, config: Config) -> Hashable:
    """Equal for configurations with results that are equal bit by bit: their sums, and those on their tiles, are added in one
    order."""
    sums = problem.template.author.order(problem, config)
    return sums, tuple(sorted(problem.part_blocks(config).items()))


def seconds(problem: Problem, config: Config) -> float:
    """The time of one kernel: the template's own estimate, or the roofline's."""
    own = problem.template.author.seconds(problem, config)
    joining = _joining_seconds(problem) if problem.reduces_tiles and not problem.whole else 0.0
    return max(joining + (roofline(problem) if own is None else own), _updating_seconds(problem))


@memoised_at_sizes
def _updating_seconds(problem: Problem) -> float:
    return atomics_seconds(problem.kernel, problem.graph, problem.device)


def _joining_seconds(problem: Problem) -> float:
    """The time of the kernel that joins the parts of reductions on tiles. On a GPU it waits for the last tiles, and finds what
    they stored in the L2 cache."""
    device = problem.device
    if device.kind != "cuda":
        return LAUNCH[device.kind]
    return LAUNCH[device.kind] + DRAIN + problem.stored_bytes / (2 * device.bandwidth * STREAM_RATE)


def grouped_seconds(problems: Sequence[Problem], config: Config, alone: Sequence[float] = ()) -> float:
    """The time of one kernel for several problems. Their programs fill each other's last waves; what is computed together reads
    a common operand once. `alone` are `seconds` of each, where they are known."""
    own = problems[0].template.author.seconds_of_parts(problems, config)
    if own is not None:
        return own
    first, each = problems[0], alone or [seconds(problem, config) for problem in problems]
    launch, together = LAUNCH[first.device.kind], first.template.joins == "parts"
    if together and first.device.kind == "cpu":
        common = [name for name, one in first.template.operands.items() if not one.many]
        again = sum(first.bytes_read(name) for name in common) / first.device.bandwidth
        return max(*each, sum(each) - (len(each) - 1) * (launch + again))  # no less than the longest of them alone
    counts = [problem.blocks(config) if together else problem.programs(config) for problem in problems]
    waves = [problem.sizes.of(count) / problem.device.compute_units for problem, count in zip(problems, counts, strict=True)]
    busy = sum((own - launch) * wave / max(1, math.ceil(wave)) for own, wave in zip(each, waves, strict=True))
    total = sum(waves)
    moving = sum(min(own - launch, _sharing(problem, config)) for own, problem in zip(each, problems, strict=True))
    return max(_last_end(each, waves), launch + max(moving, busy * (math.ceil(total) / total if total else 1)))


def traffic(problem: Problem) -> int:
    """Bytes that the fused kernel has to move."""
    return sum(problem.bytes_read(name) for name in problem.inputs) + problem.epilogue_bytes


def _last_end(each: Sequence[float], waves: Sequence[float]) -> float:
    """When the last of several problems ends: each begins when the programs of those before it leave SMs free."""
    ends, begun, busy = [0.0], 0.0, 0.0
    for own, wave in zip(each, waves, strict=True):
        ends.append(own + (math.floor(begun) * busy / begun if begun else 0.0))
        begun, busy = begun + wave, busy + own * wave / max(1, math.ceil(wave))
    return max(ends)


def _sharing(problem: Problem, config: Config) -> float:
    """Seconds in which a kernel has what others need: the memory, or what else a device has one of."""
    return max(_moving(problem), problem.template.author.shared_seconds(problem, config))


def _moving(problem: Problem) -> float:
    """Seconds of a kernel's memory traffic, with what does not happen during it: no other kernel's programs save these."""
    return traffic(problem) / problem.device.bandwidth * (1 + 2 * APART)


def roofline(problem: Problem) -> float:
    """The time of a kernel that reaches the device's rates."""
    return max(problem.flops / problem.rate, traffic(problem) / problem.device.bandwidth) + LAUNCH[problem.device.kind]


def vendor_seconds(problem: Problem) -> float:
    """The time of the library call, and of separate kernels for what the library does not fuse, less what templates'
    estimates may be wrong by. Of an operator's own implementation nothing is known: who registers a template for it wants
    that to run. A program has the time of its steps, one by one."""
    if problem.template.implements.operator and problem.template.implements.program is None:
        return math.inf
    total = apart_seconds(problem)
    if problem.device.kind != "cuda":
        return total
    least = DOUBT_OF_READING ** _large_reads(problem) if _is_heavy(problem) else 1.0
    if _windowed(problem) and _overlaps(problem) and not _reads_patches(problem) and not _is_narrow(problem):
        least = max(least, DOUBT_OF_WINDOWS)
    return total / max(least, 1 + (doubt(problem) - 1) * min(1.0, SHORT / total))


def doubt(problem: Problem) -> float:
    """How much faster than the library a template has to be by its estimate of a short problem: as much as these scatter. The
    library's convolutions of matrices scatter more, upwards (ResNet-50's, EfficientNet's and MobileNetV3's: .73 to 2.0)."""
    computed = any(one.load is None for member in problem.members for one in member.values())
    if _windowed(problem):
        return DOUBT["computed matrices"] if computed and not _overlaps(problem) else 1.0
    if computed:
        return DOUBT["computed"]
    few = min(_result_sizes(problem)[1]) <= FEW
    if problem.reduces_tiles:
        return DOUBT["few reduced" if few else "reduced"]
    if few:
        return DOUBT["few"]
    return DOUBT["epilogue" if _is_heavy(problem) else "plain"]


def _is_heavy(problem: Problem) -> bool:
    return vs.total_cost([root for s in problem.epilogue for root in s.roots]) > HEAVY


def _large_reads(problem: Problem) -> int:
    """How many times as many bytes as there are in the library's result an epilogue reads."""
    return max(0, problem.epilogue_bytes - problem.stored_bytes) // max(1, problem.size_of_result)


def apart_seconds(problem: Problem) -> float:
    """The library call and the separate kernels."""
    device, result, count = problem.device, problem.size_of_result, len(problem.members)
    stream = device.bandwidth * STREAM_RATE
    program = problem.template.implements.program
    if program is None:
        moved = sum(_bytes_found(problem, name) for name in problem.inputs) + result
        total = count * (_call(problem, moved / stream) + LAUNCH[device.kind])
    else:
        total = program_seconds(problem, program)
    total += CONVOLUTION if device.kind == "cuda" and _windowed(problem) and _is_reordered(problem) else 0.0
    if problem.has_fused_call:
        total += _fused_seconds(problem, stream)
    elif problem.finishing:  # the results are written, and read again, from caches where these hold them
        again = count * _past_caches(problem, result) if device.kind == "cuda" else 0
        joined = _bytes_joined(problem) if device.kind == "cuda" else 0
        total += max((again + problem.epilogue_bytes - joined) / stream, _adding(problem))
        total += 0.0 if joined else LAUNCH[device.kind]
    for name, read in problem.inputs.items():
        if _is_stored(problem, name):
            total += _storing_seconds(problem, name, stream) / max(1, read.unscaled)
        elif read.load is not None and _is_copied(problem, read) and not _is_made_by_kernel(problem, read.load.attr[0]):
            total += _storing_seconds(problem, name, stream)
    return total + sums_seconds(problem)


@memoised_at_sizes
def _bytes_joined(problem: Problem) -> int:
    """Bytes of results that separate kernels would not store, for the kernel of a reduction that reads them makes them as it
    goes: a residual's sum in front of a norm."""
    reduced = {name for node in problem.graph.nodes if isinstance(node, ir.Reduction) for name in ir.reads(node)}
    stored = {o for s in problem.epilogue for o, kept in zip(s.outs, s.stored, strict=True) if kept and s.kind != "partial"}
    found = (stored & reduced) - ir.visible(problem.graph)
    return sum(problem.sizes.bytes(problem.graph.buffers[name]) for name in sorted(found))


def _adding(problem: Problem) -> float:
    """Seconds of what a GPU's separate kernel computes of each element."""
    if problem.device.kind != "cuda":
        return 0.0
    roots = [root for s in problem.epilogue for root in s.roots]
    each = vs.total_cost(roots, FUNCTIONS)
    elements = problem.size_of_result // problem.main_dtype.itemsize
    return each * elements / (ADDITIONS * problem.device.compute_units)


def _storing_seconds(problem: Problem, name: str, stream: float) -> float:
    """The time of a kernel that reads an operand, and stores it as the library takes it."""
    return (problem.bytes_read(name) + _bytes_of(problem, name)) / stream + LAUNCH[problem.device.kind]


def _is_stored(problem: Problem, name: str) -> bool:
    """Whether a separate kernel has to make what the library reads. Padding is a library's own."""
    read = problem.inputs[name]
    if _windowed(problem) and read.bounded_load is not None:
        return False
    return read.load is None or read.unscaled > 0 or _is_looked_up(read.load) or _is_merged(problem, name)


def _bytes_found(problem: Problem, name: str) -> int:
    """Bytes of an operand that a library's call has to read from memory: a GPU's caches have what was stored just before."""
    moved = _bytes_of(problem, name)
    return _past_caches(problem, moved) if problem.device.kind == "cuda" and _is_stored(problem, name) else moved


def _is_copied(problem: Problem, read: Input) -> bool:
    """Whether a GPU's library reads a copy of an operand that a template reads where it is, in another order: of the other
    dimensions of an image, say."""
    node = problem.contraction
    if node is None or read.load is None or problem.device.kind != "cuda":
        return False
    source = problem.graph.provenance.get(read.load.attr[0])
    name = source.source if source is not None and source.role == ALIGNED_COPY else read.load.attr[0]
    return bool(node.stored) and name not in {load.attr[0] for load in vs.loads(node.stored)}


def _is_made_by_kernel(problem: Problem, name: str) -> bool:
    """Whether a kernel of the graph makes a buffer: it writes a copy in another order instead."""
    return any(name in ir.outs(node) for node in problem.graph.nodes if not isinstance(node, ir.Extern))


def _bytes_of(problem: Problem, name: str) -> int:
    """Bytes of an operand in memory: of a window those of the tensor, whose elements caches give out again."""
    read = problem.bytes_of_operand(name)
    return min(read, problem.bytes_read(name)) if _windowed(problem) else read


def _fused_seconds(problem: Problem, stream: float) -> float:
    """What else the library does in one call. A CPU's does it to results in registers, and reads what is added to these."""
    if problem.device.kind == "cpu":
        return max(0, problem.epilogue_bytes - problem.stored_bytes) / stream
    tiles = math.prod(_result_sizes(problem)[1]) / (FUSED_TILE * problem.device.compute_units)
    return FUSED_TAIL * min(FUSED_TAILS, tiles + 1)


def program_seconds(problem: Problem, program: Program) -> float:
    """The time of a program's steps: of the library's one call for all, where there is one, else of a call for each contraction
    and of a kernel for each softmax, which also computes what a slot makes of the elements. Such calls reach the rate of
    matmuls: a template is compared with the best that there may be."""
    kind = problem.device.kind
    if problem.has_library_call:
        moved = sum(problem.bytes_of_operand(name) for name in problem.inputs) + problem.size_of_result + _slot_bytes(problem)
        share = READING_SHARE if kind == "cuda" and _reads_elements(problem) else 1.0
        batches = max(_short_batches(problem, program), _longest_batch(problem, program))
        return max(_step_seconds(problem, problem.flops / share, moved), batches) + LAUNCH[kind]
    total = 0.0
    for step in program.steps:
        if isinstance(step, Softmax):
            total += _row_seconds(problem, program, step)
        elif isinstance(step, Elementwise):
            total += _elementwise_seconds(problem, step)
        else:
            moved = problem.bytes_over(step.axes) + sum(problem.bytes_over(program.axes_of(ref)) for ref in step.reads)
            flops = problem.flops_of(step) / _share_of_unaligned(problem, program, step)
            total += _step_seconds(problem, flops, int(moved / _share_of_few_rows(problem, program))) + LAUNCH[kind]
    return total + _slot_bytes(problem) / (problem.device.bandwidth * STREAM_RATE)


def _short_batches(problem: Problem, program: Program) -> float:
    """Seconds of a GPU's library's one call for a program's many batches of few rows, one after the other on each SM."""
    steps = _axes_of_softmaxes(program)
    if problem.device.kind != "cuda" or not steps or max(problem.size(axes[-2]) for axes in steps) > ROWS_OF_CALL:
        return 0.0
    return _batches(problem, steps) / problem.device.compute_units * SHORT_BATCH


def _share_of_unaligned(problem: Problem, program: Program, step: Contract) -> float:
    """What is left of the rate of a GPU's library in a contraction of a program, by the lengths of the rows of its matrices."""
    if problem.device.kind != "cuda" or problem.exact_float32:
        return 1.0
    size, matrices = problem.main_dtype.itemsize, (step.axes, *map(program.axes_of, step.reads))
    aligned = math.gcd(LOAD, *(problem.size(axes[-1]) * size for axes in matrices))
    return (ALIGNED_SHARE_OF_HALVES if size == HALF else ALIGNED_SHARE)[aligned]


def _share_of_few_rows(problem: Problem, program: Program) -> float:
    """What is left of a GPU's memory rate in the library's matmuls of a program, if it has few rows."""
    rows = [problem.size(axes[-2]) for axes in _axes_of_softmaxes(program)]
    few = problem.device.kind == "cuda" and bool(rows) and max(rows) <= FEW
    return SHARE_OF_FEW[problem.main_dtype.itemsize > HALF] if few else 1.0


def _longest_batch(problem: Problem, program: Program) -> float:
    """Seconds in which a program of a GPU's library's one call reads the columns' operands of a batch, which it does not share
    with others."""
    steps = _axes_of_softmaxes(program)
    if problem.device.kind != "cuda" or not steps:
        return 0.0
    columns = [one.name for one in problem.inputs.values() if any(axes[-1] in one.axes for axes in steps)]
    return sum(map(problem.bytes_of_operand, columns)) / max(1, _batches(problem, steps)) / READ_BY_A_PROGRAM


def _axes_of_softmaxes(program: Program) -> list[Axes]:
    """Batches, rows and columns of each."""
    return [step.axes for step in program.steps if isinstance(step, Softmax)]


def _batches(problem: Problem, steps: Sequence[Axes]) -> int:
    """The most batches that one of some steps has."""
    return max(math.prod(map(problem.size, axes[:-2])) for axes in steps)


def _reads_elements(problem: Problem) -> bool:
    """Whether the function in some slot of a program reads a number for each element."""
    for middle in problem.middles.values():
        rows, columns = (frozenset(problem.loops[axis]) for axis in middle.axes[-2:])
        loads = (load.variables() for load in vs.loads([middle.function()]))
        if any(rows & found and columns & found for found in loads):
            return True
    return False


def _step_seconds(problem: Problem, flops: float, moved: int) -> float:
    """The time of the library's contractions without their launches."""
    share = LIBRARY_RATE[problem.device.kind] * (_share_on_cpu(problem) if problem.device.kind == "cpu" else 1.0)
    return max(flops / problem.rate / share, moved / (problem.device.bandwidth * STREAM_RATE))


def _row_seconds(problem: Problem, program: Program, step: Softmax) -> float:
    """The time of a kernel that reads the elements of a step, and writes their weights. Random numbers that multiply these are
    not made meanwhile."""
    elements = problem.bytes_over(step.axes)
    moving = 2 * _past_caches(problem, elements) / (problem.device.bandwidth * STREAM_RATE)
    making = _random_seconds(problem, program, elements // problem.main_dtype.itemsize)
    return moving + making + LAUNCH[problem.device.kind]


def _random_seconds(problem: Problem, program: Program, elements: int) -> float:
    """Seconds of what a GPU's separate kernel multiplies a softmax's weights by, where that is random: with dropout it took
    1.67 to 1.85 ps an element, .9 of them to move it."""
    if problem.device.kind != "cuda":
        return 0.0
    functions = [problem.middles[step.name].function() for step in program.middles if program.multiplies(step)]
    if not any(value.op in ops.RANDOM for value in vs.topological(functions)):
        return 0.0
    return RANDOM_WEIGHTS * vs.total_cost(functions, FUNCTIONS) * elements / (ADDITIONS * problem.device.compute_units)


def _elementwise_seconds(problem: Problem, step: Elementwise) -> float:
    """The time of a kernel that reads elements of contractions, and writes what a slot makes of them. Weights are multiplied by
    the kernel that makes them."""
    program = problem.template.implements.program
    if program is None or program.multiplies(step):
        return 0.0
    moved = (len(step.of) + 1) * _past_caches(problem, problem.bytes_over(step.axes))
    return moved / (problem.device.bandwidth * STREAM_RATE) + LAUNCH[problem.device.kind]


def _past_caches(problem: Problem, moved: int) -> int:
    """Bytes of a result that no cache has any more when the next kernel reads it."""
    if problem.device.kind == "cuda":
        return int(moved * min(1.0, max(0.0, moved / L2_RESULT - 1) / 2))
    return 0 if moved <= CACHED else moved


def _slot_bytes(problem: Problem) -> int:
    """Bytes that the functions in a program's slots read."""
    read = {load.attr[0] for middle in problem.middles.values() for load in vs.loads([middle.value])}
    return sum(problem.sizes.bytes(problem.graph.buffers[name]) for name in sorted(read & problem.graph.buffers.keys()))


def _share_on_cpu(problem: Problem) -> float:
    """What is left of the library's rate for a type of numbers."""
    if not problem.main_dtype.is_floating_point:
        return 1.0
    if _is_emulated(problem):
        return EMULATED_SHARE
    return problem.device.library if problem.main_dtype.itemsize >= 4 else 1.0


def _is_emulated(problem: Problem) -> bool:
    """Whether a CPU has no instructions that multiply a type of numbers."""
    kind = problem.main_dtype
    return kind.is_floating_point and kind.itemsize == torch.bfloat16.itemsize and problem.device.narrow <= 1


def _is_merged(problem: Problem, name: str) -> bool:
    """Whether a library that multiplies matrices reads a copy of an operand, whose loops along the sum jump."""
    one = problem.inputs[name]
    return len(one.loops.get("k", ())) > 1 and problem.reads_window(one) and not _windowed(problem)


def _windowed(problem: Problem) -> bool:
    """Whether the library reads its operands as windows of tensors."""
    return problem.windowed_call is not None


def _reads_patches(problem: Problem) -> bool:
    """Whether a library's convolution reads windows that do not overlap: elements of a buffer, none of them twice."""
    windows = [name for name, one in problem.inputs.items() if problem.reads_window(one)]
    return (
        bool(windows) and _windowed(problem)
        and all(problem.bytes_of_operand(name) <= problem.bytes_read(name) for name in windows)
    )  # fmt: skip


def _overlaps(problem: Problem) -> bool:
    """Whether a library's convolution reads windows of more than one tap."""
    return any(problem.bytes_of_operand(name) > problem.bytes_read(name) for name in problem.inputs)


def _is_reordered(problem: Problem) -> bool:
    """Whether a library's convolution is more than the matmul that it is: of several taps, or of channels that are padded."""
    return _overlaps(problem) or _alignment(problem) < LOAD


def _is_narrow(problem: Problem) -> bool:
    """Whether windows of a library's operand have so few channels that its matrix units do not multiply them as they are."""
    call = problem.windowed_call
    if call is None:
        return False
    # operands may be views of buffers of fewer dimensions
    operands = [one for one in call.args[:2] if isinstance(one, ir.TensorArg)]
    channels = [one.vars[1].extent for one in operands[-1:]]
    return any(problem.sizes.of(number) * problem.main_dtype.itemsize % LOAD for number in channels)


def _is_looked_up(load: vs.Value) -> bool:
    """Whether data say which rows an operand has: the library reads a copy of these."""
    return any(isinstance(atom, ix.Indirect) for atom in ix.free_atoms(load.attr[1][0]))


def sums_seconds(problem: Problem) -> float:
    """The time of kernels of their own for the sums of operands that the matmul's kernel makes as well. On a GPU few long sums
    are made in parts, and a second kernel joins these."""
    device, total = problem.device, 0.0
    for one in problem.operand_reductions:
        operand = problem.members[one.number][one.operand]
        kept = math.prod(problem.size(axis) for axis in operand.axes if axis in problem.template.implements.results[0])
        launches = 2 if device.kind == "cuda" and kept < SUMS_OF_PROGRAM * device.compute_units else 1
        total += problem.bytes_read(one.operand) / (device.bandwidth * STREAM_RATE) + launches * LAUNCH[device.kind]
    return total


def scatter_seconds(problem: Problem) -> float:
    """The time of a kernel of its own for the updates that the matmul's kernel makes as well: what the matmul leaves, they
    find in the cache."""
    made = {o for s in problem.kernel.statements for o in s.outs}
    read = {load.attr[0] for s in problem.scatters for load in vs.loads(s.roots)} - made
    moved = sum(problem.sizes.bytes(problem.graph.buffers[name]) for name in {*read, *(s.outs[0] for s in problem.scatters)})
    streaming = moved / (problem.device.bandwidth * STREAM_RATE)
    return max(streaming, atomics_seconds(problem.kernel, problem.graph, problem.device)) + LAUNCH[problem.device.kind]


def cut_seconds(problem: Problem, parts: int, tile: int) -> float:
    """The time of a matmul whose sum is cut into parts, with square tiles of so many elements, and of the kernel that adds the
    parts up: they stay in the L2 cache, which is about twice as fast as the memory behind it."""
    device, stream = problem.device, problem.device.bandwidth * STREAM_RATE
    batch, extents = _result_sizes(problem)
    results = math.prod((*batch, *extents))
    exchanged = 4 * parts * results / (2 * stream)
    operands = sum(problem.bytes_read(name) for name in problem.inputs) / stream
    tiles_read = problem.flops * problem.main_dtype.itemsize / math.sqrt(tile) / (L2_RATE * device.compute_units)
    matmul = max(problem.flops / problem.rate / LIBRARY_RATE[device.kind], operands, tiles_read) + exchanged
    joining = exchanged + problem.epilogue_bytes / stream + LAUNCH[device.kind] + DRAIN
    return matmul + LAUNCH[device.kind] + joining + sums_seconds(problem)


def _call(problem: Problem, streaming: float) -> float:
    """The library's matmul alone."""
    device = problem.device
    share = LIBRARY_RATE[device.kind]
    call = problem.windowed_call
    if device.kind == "cuda" and call is not None and is_depthwise(problem):
        return max(depthwise_on_gpu(problem, call), streaming)
    if device.kind == "cuda":
        aligned = _alignment(problem)
        share *= NARROW_SHARE if _is_narrow(problem) else PATCH_SHARE if _reads_patches(problem) else 1.0
        shares = ALIGNED_SHARE_OF_HALVES if problem.main_dtype.itemsize == HALF and call is None else ALIGNED_SHARE
        share *= 1.0 if problem.exact_float32 and call is None else shares[aligned]
        share *= BYTE_SHARE if problem.main_dtype.itemsize == 1 else 1.0
        streaming /= STREAMED_SHARE[aligned] * (SHORT_SHARE if aligned < LOAD and _has_short_rows(problem) else 1.0)
        batch, extents = _result_sizes(problem)
        compute = problem.flops / len(problem.members) / problem.rate / share * _padded(problem, extents)
        parts, filled = _cut(problem, aligned)
        compute *= 1.0 if filled else _idle(problem, math.prod(batch), extents)
        compute = max(compute, TERM * min(_terms(problem), UNSPLIT))
        return max(compute, streaming) + APART * min(compute, streaming) + parts
    if call is not None and problem.main_dtype.is_floating_point and not _is_emulated(problem):
        return convolution_on_cpu(problem, call)
    share *= _share_on_cpu(problem)
    compute = problem.flops / len(problem.members) / problem.rate / share
    batch, extents = _result_sizes(problem)
    ordering = AMX_ORDERING if device.in_tiles(problem.main_dtype) and math.prod(batch) == 1 else 1.0
    largest = max(problem.bytes_of_operand(name) for name in problem.inputs) / math.prod(batch)
    if min(extents) == 1 or largest < CACHED:
        return max(compute, streaming) * ordering
    return (compute + streaming * PACKING) * ordering


def _terms(problem: Problem) -> float:
    """Terms of each sum."""
    batch, extents = _result_sizes(problem)
    return problem.flops / len(problem.members) / 2 / math.prod((*batch, *extents))


def _cut(problem: Problem, aligned: int) -> tuple[float, bool]:
    """Seconds for the parts of sums that a GPU's library cuts, for want of tiles, and whether these occupy all SMs."""
    (batch, extents), units = _result_sizes(problem), problem.device.compute_units
    tiles, small = (math.prod((*batch, *(math.ceil(n / side) for n in extents))) for side in (128, 64))
    halves = aligned < LOAD and problem.main_dtype.itemsize == HALF and problem.windowed_call is None
    if extents[0] > 16 and problem.flops >= 2 * LONG_SUM * math.prod((*batch, *extents)) and small < CUT_BELOW * units:
        return CUT_SUM, halves
    few = halves and _terms(problem) >= SUM_UNALIGNED and tiles <= units // 2
    return CUT_UNALIGNED if few else 0.0, False


def _idle(problem: Problem, batch: int, extents: list[int]) -> float:
    """How much longer a library's matmul takes whose tiles are fewer than SMs, of which the others are faster then; no longer
    than where it cuts sums instead."""
    shares = []
    for (rows, columns), share in LIBRARY_TILES.items():
        tiles = batch * math.ceil(extents[0] / rows) * math.ceil(extents[-1] / columns)
        shares.append(share * min(1.0, FASTER * tiles / problem.device.compute_units))
    return min(LONGEST_IDLE, 1 / max(shares))


def _padded(problem: Problem, extents: list[int]) -> float:
    """How much more a library's convolution multiplies than it has to: its tiles have full columns of channels."""
    if not _overlaps(problem) or not _windowed(problem) or _is_narrow(problem):
        return 1.0
    return math.prod(math.ceil(n / CHANNELS) * CHANNELS / n for n in extents)


def _result_sizes(problem: Problem) -> tuple[list[int], list[int]]:
    """The lengths of the result's axes that both operands have, and of the others: rows and columns, whatever their names."""
    pattern = problem.template.implements
    return [problem.size(a) for a in pattern.batch], [problem.size(a) for a in pattern.results[0] if a not in pattern.batch]


def _has_short_rows(problem: Problem) -> bool:
    """Whether both operands of a library's matmul, and its result, have short rows."""
    (_, extents), pattern = _result_sizes(problem), problem.template.implements
    reduced = math.prod(problem.size(axis) for axis in pattern.axes if axis not in pattern.results[0])
    return max(min(extents), reduced) * problem.main_dtype.itemsize < SHORT_ROW


def _alignment(problem: Problem) -> int:
    """The largest of 16, 8, 4 and 2 that the bytes of all rows, those of the result included, are a multiple of. Computed
    operands are stored for a library, row by row. What is no matmul in memory has a library of its own."""
    lengths = [problem.size(problem.template.implements.results[0][-1])]
    for name, one in problem.inputs.items():
        if one.load is None or _is_copied(problem, one):
            lengths.append(problem.size(one.axes[-1]))
            continue
        strides = [problem.stride(name, axis) for axis in one.axes]
        if None in strides:
            return 16
        source = problem.graph.provenance.get(one.load.attr[0])
        if source is not None and source.role == ALIGNED_COPY:  # for templates: a library reads what it is a copy of
            strides = list(problem.graph.buffers[source.source].strides or ())
        lengths += [problem.sizes.of(s) for s in strides if s is not None and s != 1]
    return math.gcd(16, *(length * problem.main_dtype.itemsize for length in lengths))
