"""The problem of a seed, and those that once went wrong."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from .around import EPILOGUES, FAMILIES, LEFT, RIGHT
from .computation import Computation
from .kinds import KINDS, Kind, Limits
from .problem import Problem

# The share of problems with symbolic sizes.
DYNAMIC = 0.08


def draw(seed: int, limits: Limits | None = None, kinds: tuple[str, ...] = ()) -> Problem:
    """Always the same one for a seed, limits and kinds."""
    limits = limits or Limits()
    rng = random.Random(f"contraction {seed}")
    while True:
        found = _drawn(seed, rng, limits, kinds)
        if found is not None:
            return found


def _drawn(seed: int, rng: random.Random, limits: Limits, kinds: tuple[str, ...]) -> Problem | None:
    names = kinds or tuple(KINDS)
    kind = KINDS[rng.choices(names, [KINDS[name].weight for name in names])[0]]
    sizes, options = kind.draw(rng, limits)
    dtype = rng.choice(kind.dtypes)
    layouts = (rng.choice(kind.layouts[0]), rng.choice(kind.layouts[1]))
    if not kind.plain and rng.random() < 0.5:  # as templates that move tiles by TMA want it
        layouts = (kind.layouts[0][1], rng.choice(kind.layouts[1][:3]))
    problem = Problem(seed, kind.name, dtype, tuple(sizes.items()), tuple(options.items()), layouts)
    if not _possible(problem, kind, limits):
        return None
    problem = replace(problem, tf32=dtype == "float32" and rng.random() < 0.5)
    problem = _surrounded(problem, kind, rng)
    problem = replace(problem, dynamic=_may_be_dynamic(problem) and rng.random() < DYNAMIC)
    tensors = [math.prod(spec.shape) for spec in Computation(problem).specs]
    return problem if max(tensors) <= limits.elements else None


def _may_be_dynamic(problem: Problem) -> bool:
    """Whether torch makes a symbol of the axis that changes, which it does not of a length of 1, and a template may take it:
    none takes convolutions with symbols for sizes."""
    lengths = [length for name, length in problem.sizes if name in "mn"]
    return not KINDS[problem.kind].plain and "conv" not in problem.kind and min(lengths) > 1


def _surrounded(problem: Problem, kind: Kind, rng: random.Random) -> Problem:
    if kind.plain:
        possible = (
            [e.name for e in EPILOGUES.values() if e.integers] if problem.dtype == "int8" else ["relu", "gelu", "softmax"]
        )
        return replace(problem, epilogue=rng.choice(["", *possible]))
    conv = "conv" in kind.name
    left, right = kind.shapes(problem)
    if rng.random() < 0.35:
        problem = replace(problem, left=rng.choice([p.name for p in LEFT.values() if p.fits(left, conv)]))
    if rng.random() < 0.25:
        problem = replace(problem, right=rng.choice([p.name for p in RIGHT.values() if p.fits(right, conv)]))
    if kind.families and rng.random() < 0.15:
        problem = replace(problem, family=rng.choice(list(FAMILIES)))
    if problem.family != "three projections" and rng.random() < 0.75:
        shape = Computation(problem).result_shape()
        names = [e.name for e in EPILOGUES.values() if e.fits(shape) and not e.integers]
        problem = replace(problem, epilogue=rng.choice(names))
    return problem


def is_possible(problem: Problem) -> bool:
    """Whether torch would take a problem that was made simpler."""
    groups = dict(problem.options).get("groups", (1,))[0]
    if any(problem.size(name) % groups for name in "co" if groups > 1):
        return False
    if problem.dtype == "int8" or problem.dtype.startswith("float8"):
        if problem.size("k") % 16 or problem.size("n") % 16 or problem.size("m") < 17:
            return False
        if problem.dtype != "int8" and problem.layouts[1] != "transposed":
            return False
    try:
        return _possible(problem, KINDS[problem.kind], Limits()) and all(
            min(s.shape, default=1) > 0 for s in Computation(problem).specs
        )
    except (RuntimeError, IndexError):
        return False


def _possible(problem: Problem, kind: Kind, limits: Limits) -> bool:
    """Whether there is a result, within the limits."""
    for k, taps in enumerate(dict(problem.options).get("kernel", ())):
        span = problem.option("dilation")[k] * (taps - 1) + 1
        if problem.size(f"s{k}") + 2 * problem.option("padding")[k] < span:
            return False
    try:
        shapes = (*kind.shapes(problem), kind.result(problem))
    except RuntimeError:  # what a transposed convolution is padded by can be more than its result has
        return False
    if any(0 in shape or math.prod(shape) > limits.elements for shape in shapes):
        return False
    return kind.multiplications(problem) <= limits.multiplications


def _convolution(n: int, c: int, o: int, place: int, taps: int = 3, stride: int = 1, padding: int = 1) -> Problem:
    """relu(conv2d(x, w, b)) of bfloat16 numbers, channels last."""
    sizes = (("n", n), ("c", c), ("o", o), ("s0", place), ("s1", place))
    options = {
        "kernel": (taps, taps), "stride": (stride, stride), "padding": (padding, padding), "dilation": (1, 1), "groups": (1,),
        "bias": (1,),
    }  # fmt: skip
    last = "channels_last"
    return Problem(-1, "conv2d", "bfloat16", sizes, tuple(options.items()), (last, last), epilogue="relu")


def _matrices(kind: str, **sizes: int) -> Problem:
    return Problem(-1, kind, "bfloat16", tuple(sizes.items()))


# Problems of the size of real layers, those that once were wrong first. Every candidate of these is run each time.
KNOWN: tuple[Problem, ...] = tuple(
    replace(problem, seed=-1 - number)
    for number, problem in enumerate(
        (
            _convolution(16, 64, 64, 112), _convolution(4, 64, 64, 112), _convolution(16, 64, 64, 56),
            _convolution(16, 64, 128, 57, stride=2), _convolution(16, 32, 32, 56), _convolution(8, 128, 128, 28),
            _convolution(16, 64, 64, 56, taps=5, padding=2), _convolution(16, 64, 64, 56, padding=0),
            _convolution(2, 64, 64, 30),
            replace(_convolution(16, 64, 64, 56), left="affine relu"),
            replace(_convolution(16, 64, 64, 56), epilogue="statistics"),
            replace(_matrices("linear", m=2048, k=1024, n=4096), epilogue="gelu"),
            replace(_matrices("linear", m=1031, k=2053, n=1543), family="gate and up"),
            replace(_matrices("bmm", b=3, m=96, k=128, n=61), layouts=("sliced", "transposed"), family="joined"),
            replace(_matrices("bmm", b=8, m=1024, k=64, n=1024), epilogue="softmax"),
            replace(_matrices("mm", m=16, k=4096, n=4096), right="dequant"),
        )
    )
)  # fmt: skip
