"""What estimates of templates have been compared with measurements on, and what not (`bench.regret`; H100, 2026-11-24).

Matrices in memory; and, of operands that are gathered tile by tile, two kinds for which a library has no good kernel:

- Each element is read once, where it is: patches that do not overlap, heads that are merged, every second pixel. Templates
  take .09 to .86 of the library's time (ViT's patches .09, ConvNeXt's stem .15, heads and projection .63 to .84, a shortcut
  .84).
- Windows of so few channels that a tap is no whole load of 16 bytes, which the library's matrix units want: .21 to .23 (the
  stems of ResNet-50, MobileNetV3 and EfficientNet).

Other windows stay with the library: 3x3 of many channels take 1.0 to 1.9 times its time, depthwise ones 3 to 20 times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Var
from kgen.ir.values import Value
from kgen.templates.problem import Input, Problem

# Bytes of a load of the matrix units' operands, and the most channels of a window that were measured.
LOAD, FEW_CHANNELS = 16, 4
# Positions of a CPU's convolutions at most, those in float32 where its library is a guest, and elements of their filters at
# least.
FEW_POSITIONS, FEW_POSITIONS_OF_GUESTS, MANY_FILTERS = 196, 256, 500_000
# Terms of the sums in a tile of full rows, at most.
LONGEST_SUM = 16_384
# Operations on float32 numbers below which a launch more takes longer than multiplying them at a tenth of the library's rate.
SHORT_EXACT = 20_000_000
# The first digit of that compute capability, and bytes of such numbers.
HOPPER, HALF = 9, 2


def of_matrices(problem: Problem) -> str | None:
    """Why estimates that were fitted to matmuls say nothing of a problem: they count no address arithmetic, no loads that do
    not coalesce, and no prologue that runs again for each tap of a window. Nor were tiles of full rows, which are low and
    wide, compared on sums over a vocabulary: the gradient of GPT-2's logits took 4.3 ms where 1.3 had been expected. Squares
    as an operand of exact float32 arithmetic took twelve times the library's time (a mel spectrogram, H100), and also in TF32
    where they are squares of every other number: Triton then takes the last axis for that along which memory is read. In TF32,
    operands computed from rows of 257 and of 201 numbers took 4.8 and 3.3 times their estimates (bench.untuned, H100, H200),
    those of 32 and 64 numbers .6 to .8 times."""
    if problem.whole and problem.size("k") > LONGEST_SUM:
        return f"no GPU has measured tiles of full rows on sums of more than {LONGEST_SUM:,} terms"
    computed = any(one.load is None for member in problem.members for one in member.values())
    if computed and problem.exact_float32 and problem.flops > SHORT_EXACT:
        return "no GPU has measured computed operands where float32 numbers are multiplied exactly"
    for member in problem.members:
        for name, one in member.items():
            if one.load is None and _has_gaps(problem, one):
                return f"operand {name} is computed from numbers that do not lie side by side along the last axis of its tiles"
            if one.load is None and problem.tf32 and _begins_between_loads(problem, one):
                return f"operand {name} is computed in TF32 from rows that begin between full loads"
    return _unknown_window(problem, lambda one: _is_read_once(problem, one) or _has_few_channels(problem, one))


def of_matrices_on_cpus(problem: Problem) -> str | None:
    """The same on a CPU, whose library is good at few channels as well: a stem of three took 8.5 times its time. Where there
    are few positions, it brings more filters into its order than it multiplies images: 3x3 convolutions of 256 channels and
    more, and their gradients, take .31 to 1.0 of its time there (docs/decisions/0029-prices-of-cpu-convolutions.md). Patches
    may be computed, as by a norm, and matrices may stand one behind the other, as of a concatenation: .79 to 1.03, and .49."""
    return _unknown_window(
        problem,
        lambda one: (
            _is_read_once(problem, one)
            or _is_computed_once(problem, one)
            or _has_few_positions(problem, one)
            or problem.joins_matrices(one)
        ),
    )


def of_half_on_hopper(problem: Problem) -> str | None:
    """Why estimates that were fitted to numbers of 16 bits on GPUs of compute capability 9.0 say nothing of a problem."""
    if all(is_half_on_hopper(one.dtype, problem.device.arch) for one in problem.inputs.values()):
        return None
    return "no GPU but one of compute capability 9.0 has measured it, on numbers of 16 bits"


def is_rounded_on_hopper(problem: Problem) -> bool:
    """Whether all operands are of float32, and a GPU of compute capability 9.0 rounds them to TF32."""
    alone = all(one.dtype is torch.float32 for one in problem.inputs.values())
    return alone and problem.tf32 and problem.device.arch // 10 == HOPPER


def is_half_on_hopper(dtype: object, arch: int) -> bool:
    """The same of a type of numbers and a compute capability (90 for 9.0)."""
    return arch // 10 == HOPPER and isinstance(dtype, torch.dtype) and dtype.itemsize == HALF


def _unknown_window(problem: Problem, known: Callable[[Input], bool]) -> str | None:
    """What is to be said of an operand that is a window, but of no `known` kind; those were measured one matmul at a time."""
    for member in problem.members:
        for name, one in member.items():
            if problem.reads_window(one) and not (len(problem.members) == 1 and known(one)):
                return f"operand {name} is no matrix in memory: its elements are gathered within bounds, tile by tile"
            if one.load is None and _is_of_entries(problem, one):
                return f"operand {name} is made of entries of a table, chosen by data for each few of its elements"
    return None


def _is_of_entries(problem: Problem, one: Input) -> bool:
    """Whether data that vary along both axes say which runs of a table the elements are, as of a codebook."""
    loops = [frozenset(one.loops[axis]) for axis in one.axes if problem.template.block(axis)]
    for load in vs.loads([one.value]):
        index = load.attr[1][0]
        chosen = [ix.free_atoms(e) for atom in ix.indirects(index) for v in vs.loads([atom.value]) for e in vs.index_exprs(v)]
        direct = any(not own.isdisjoint(ix.free_atoms(index)) for own in loops)
        if direct and any(all(own & found for own in loops) for found in chosen):
            return True
    return False


def _has_gaps(problem: Problem, one: Input) -> bool:
    """Whether a tile of the operand is made of numbers that do not lie side by side along any axis, and whose nearest ones lie
    along another axis than the last: neighbouring threads then read at the steps of the last one."""
    for _, steps in _steps_of_loads(problem, one):
        if not steps or None in steps:  # several neighbours are one number in memory, or somewhere that data says
            continue
        least = [min(filter(None, found or ()), default=0) for found in steps]
        nearest = min(filter(None, least), default=0)
        if nearest > 1 and least[-1] != nearest:
            return True
    return False


def _begins_between_loads(problem: Problem, one: Input) -> bool:
    """Whether rows of float32 that an operand is computed from do not begin at full loads."""
    for load, found in _steps_of_loads(problem, one):
        dtype, steps = load.attr[2], [step for along in found for step in along or () if step]
        if dtype is torch.float32 and len(steps) > 1 and any(step != 1 and step * dtype.itemsize % LOAD for step in steps):
            return True
    return False


def _steps_of_loads(problem: Problem, one: Input) -> Iterator[tuple[Value, list[list[int] | None]]]:
    """Each load that an operand is made of, and its steps along each axis of the operand's tiles."""
    axes = [one.loops[axis] for axis in one.axes if problem.template.block(axis)]
    for load in vs.loads([one.value]):
        yield load, [_steps(problem, load, own) for own in axes]


def _steps(problem: Problem, load: Value, loops: Sequence[Var]) -> list[int] | None:
    """How far apart neighbours along each of some loops are, in elements; None where that is no one number."""
    steps = [ix.stride_of(load.attr[1][0], v) for v in loops]
    return None if None in steps else [abs(problem.sizes.of(step)) for step in steps if step is not None]


def _is_read_once(problem: Problem, one: Input) -> bool:
    """Whether an operand is elements of a buffer, none of them twice, and none guarded by bounds."""
    if one.load is None or one.load.args:
        return False
    buffer = problem.graph.buffers[one.load.attr[0]]
    return problem.bytes_of_operand(one.name) <= problem.sizes.bytes(buffer)


def _is_computed_once(problem: Problem, one: Input) -> bool:
    """The same of an operand that is computed from elements of a buffer, and from numbers that many of them share."""
    loads = vs.loads([one.value])
    if one.load is not None or any(load.args for load in loads):
        return False
    read = max((problem.sizes.bytes(problem.graph.buffers[load.attr[0]]) for load in loads), default=0)
    return problem.bytes_of_operand(one.name) <= read


def _has_few_positions(problem: Problem, one: Input) -> bool:
    """Whether a window of images, or of their gradient, has few positions to what filters, or their gradient, have elements."""
    if problem.windowed_call is None or problem.size("b") != 1:
        return False
    positions = problem.size("m" if "m" in one.axes else "k")
    filters = problem.size("n") * problem.size("k" if "m" in one.axes else "m")
    guest = problem.device.library < 1 and problem.main_dtype.itemsize >= torch.float32.itemsize
    return positions <= (FEW_POSITIONS_OF_GUESTS if guest else FEW_POSITIONS) and filters >= MANY_FILTERS


def _has_few_channels(problem: Problem, one: Input) -> bool:
    """Whether an operand is a window of one tensor with neighbouring channels, so few that a load would go beyond them."""
    loads = vs.loads([one.value])
    if len(loads) != 1 or problem.size("b") != 1:
        return False
    [load] = loads
    index, size = load.attr[1][0], load.attr[2].itemsize
    channels = [v for v in one.loops["k"] if ix.stride_of(index, v) == 1]
    counts = [problem.sizes.of(v.extent) for v in channels]
    others = (v for axis in one.axes if axis != "k" for v in one.loops[axis])
    alone = all(ix.stride_of(index, v) != 1 for v in others)
    steps = (ix.stride_of(index, v) for axis in one.axes for v in one.loops[axis] if v not in channels)
    apart = all(step is None or step.terms == () or problem.sizes.of(step) >= counts[0] for step in steps) if counts else False
    return apart and alone and len(counts) == 1 and counts[0] <= FEW_CHANNELS and counts[0] * size % LOAD != 0
