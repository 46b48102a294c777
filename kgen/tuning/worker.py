"""The process that times candidates: a kernel that crashes, hangs or breaks the GPU's context takes this process along, not the
user's.

Run by kgen/tuning/measure.py. Over stdin come paths of pickled benchmark jobs, a line each; over stdout go lines of JSON:

    {"begin": 3}                         candidate 3 is being run for the first time
    {"ready": 3}                         it ran, and its results are right
    {"failed": 3, "why": "wrong", "text": "..."}
    {"timing": 2.0}                      all that are left take turns, for about so many seconds
    {"times": {"0": [1e-3, ...], ...}}   seconds of a call; the benchmark job is over
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kgen.host.compiled import HostGraph
from kgen.host.graph_of_calls import graph_of_calls
from kgen.tuning.benchmark import Array, BenchmarkJob, undisturbed

# Sets of arguments at most, and the share of a GPU's free memory that they may take.
MAX_SETS, MEMORY_SHARE = 16, 0.5
# What is timed at once takes at least so long.
LEAST_SECONDS = {"cuda": 3e-4, "cpu": 2e-4}
MAX_CALLS = 256
# Calls, the fastest of which says how many take so long.
WARM_UP = {"cuda": 1, "cpu": 3}
# Rounds after which what is so much slower than the best is out, first and last, and rounds at most. On a CPU a round is a call
# or two, for what else runs there disturbs long ones always and short ones now and then.
ROUNDS, MAX_ROUNDS, HOPELESS = {"cuda": (2, 5), "cpu": (6, 20)}, {"cuda": 40, "cpu": 640}, 1.3
# Errors relative to the norm of the reference, beyond which a result is wrong: by the narrowest type that anything was rounded
# to, for the library rounds a matmul that a template keeps in float32. Two ways to round sums differ by less, whatever a sum
# goes through afterwards.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
TF32_TOLERANCE, NARROW_TOLERANCE = {**TOLERANCE, torch.float32: 5e-3}, 0.15
# Where sums are exact, only what comes after them is rounded.
CLOSE = {**TOLERANCE, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Of integers and truth values a few may differ where what they are computed from is nearly equal.
MISMATCHES = 5e-3
# An element is far off by so many times the tolerance, of its size and the usual one; more than this share of such is wrong: a
# row that nobody wrote is not much of a norm.
ELEMENT, WILD = 5, 1e-5

Call = Callable[[list[Any]], Sequence[Any]]
Compare = Callable[[Sequence[Any], Sequence[Any]], str]
Limits = Mapping[torch.dtype, float]


def serve() -> None:
    """Runs benchmark jobs until stdin closes."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not reach the answers

    def say(**message: Any) -> None:
        replies.write(json.dumps(message) + "\n")

    say(started=True)
    for line in sys.stdin:
        benchmark: BenchmarkJob = pickle.loads(Path(line.rstrip("\n")).read_bytes())
        with benchmark.setting.applied(), torch.no_grad():
            say(times=_Run(benchmark, say).result())
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


class _Run:
    """One benchmark job."""

    def __init__(self, benchmark: BenchmarkJob, say: Callable[..., None]) -> None:
        self.benchmark, self.say = benchmark, say
        arrays = [a for a in benchmark.arguments if isinstance(a, Array)]
        self.device = next((a.device for a in arrays if a.device.startswith("cuda")), "cpu")
        self.kind = self.device.partition(":")[0]
        self.sets = self._sets(sum(a.nbytes for a in arrays))
        self.checked = self._checked()
        self.calls: dict[int, Call] = {}

    def _sets(self, nbytes: int) -> list[list[Any]]:
        count = max(1, min(MAX_SETS, math.ceil(self.benchmark.cold / max(1, nbytes))))
        if self.kind == "cuda":
            torch.cuda.set_device(self.device)
            count = max(1, min(count, int(torch.cuda.mem_get_info()[0] * MEMORY_SHARE / max(1, nbytes))))
        return [self._arguments(self.benchmark.arguments, seed) for seed in range(count)]

    def _checked(self) -> list[tuple[list[Any], Compare]]:
        """Arguments, and how to compare what becomes of them."""
        if self.benchmark.exact:
            return [(self.sets[0], _bits)]
        setting = self.benchmark.setting
        rounded = setting.allow_tf32_windows if self.benchmark.windows else setting.allow_tf32
        limits = TF32_TOLERANCE if rounded else TOLERANCE
        compare = partial(difference, roundings=self.benchmark.roundings, limits=limits)
        found: list[tuple[list[Any], Compare]] = [(self.sets[0], compare)]
        check = self.benchmark.check
        if check is not None:
            compare = partial(difference, roundings=check.roundings, limits=CLOSE)
            found.append((self._arguments(check.arguments, 0), compare))
        return found

    def _arguments(self, given: Sequence[Array | int], seed: int) -> list[Any]:
        made: list[Any] = []
        for number, one in enumerate(given):
            if isinstance(one, Array):
                made.append(one.make(torch.Generator(one.device).manual_seed(1000 * seed + number)))
            else:
                made.append(one)
        return made

    def result(self) -> dict[int, list[float]]:
        wanted: list[Sequence[Any]] = []
        results: list[Sequence[Any]] = []
        order = sorted(self.benchmark.candidates, key=lambda k: k != self.benchmark.reference)
        for number in order:
            self.say(begin=number)
            try:
                call = HostGraph.deserialize(self.benchmark.candidates[number])
                results = [call(list(arguments)) for arguments, _ in self.checked]
                self._wait()
                problem = self._problem(results, wanted) if wanted else ""
            except Exception as cause:  # noqa: BLE001  a candidate may fail in any way
                self.say(failed=number, why="failed", text=f"{type(cause).__name__}: {cause}"[:500])
                self._wait()  # raises where the GPU's context is broken: the next candidates need another process
                continue
            if problem:
                self.say(failed=number, why="wrong", text=problem)
                continue
            if not wanted:
                wanted = results
            for got in results if wanted is not results else ():
                _spoil(got)
            self.calls[number] = call
            self.say(ready=number)
        del wanted, results, self.checked
        return self._times()

    def _problem(self, results: Sequence[Sequence[Any]], wanted: Sequence[Sequence[Any]]) -> str:
        """The first that is wrong with a candidate's results; empty where nothing is."""
        checks = (compare(got, want) for (_, compare), got, want in zip(self.checked, results, wanted, strict=True))
        return next((problem for problem in checks if problem), "")

    def _wait(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def _times(self) -> dict[int, list[float]]:
        self.say(timing=self.benchmark.seconds)
        timers = {number: _timer(call, self.sets, self.kind) for number, call in self.calls.items()}
        samples: dict[int, list[float]] = {number: [] for number in timers}
        alive, deadline, turn = list(timers), time.perf_counter() + self.benchmark.seconds, 0
        rounds = ROUNDS[self.kind]
        while turn < rounds[-1] or (turn < MAX_ROUNDS[self.kind] and time.perf_counter() < deadline):
            turn += 1
            for number in alive[turn % len(alive) :] + alive[: turn % len(alive)] if alive else []:
                samples[number].append(timers[number]())
            if turn in rounds:
                found = {number: undisturbed(samples[number]) for number in alive}
                best = min(found.values(), default=0.0)
                alive = [n for n in alive if found[n] <= best * HOPELESS or n == self.benchmark.reference]
        return samples


def _timer(call: Call, sets: list[list[Any]], kind: str) -> Callable[[], float]:
    """Seconds of a call, over as many calls as take long enough to be timed, each on the next set of arguments.

    What is recorded goes through all sets."""
    one_call = min(_seconds(lambda: call(list(sets[0])), kind) for _ in range(WARM_UP[kind]))
    count = max(1, min(MAX_CALLS, math.ceil(LEAST_SECONDS[kind] / max(one_call, 1e-7))))
    count = max(count, len(sets)) if kind == "cuda" else count
    following = itertools.cycle(sets)

    def some() -> None:
        for arguments in itertools.islice(following, count):
            call(list(arguments))

    run = _recorded(some) if kind == "cuda" else some
    return lambda: _seconds(run, kind) / count


def _recorded(run: Callable[[], None]) -> Callable[[], None]:
    """The calls as one CUDA graph, so that the host plays no part; as they are where they cannot be recorded."""
    try:
        return graph_of_calls(run)
    except RuntimeError:
        torch.cuda.synchronize()
        return run


def _seconds(run: Callable[[], Any], kind: str) -> float:
    """By the device's own clock."""
    if kind == "cpu":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3


def _bits(got: Sequence[Any], want: Sequence[Any]) -> str:
    return "" if all(map(_equal, got, want)) else "is not equal to the reference bit by bit"


def _equal(one: Any, other: Any) -> bool:
    """NaNs are equal to NaNs."""
    return one is other or bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124


def _spoil(results: Sequence[Any]) -> None:
    """The next candidate may get this memory, and must not find right results in it."""
    for one in results:
        if isinstance(one, torch.Tensor):
            one.fill_(math.nan if one.dtype.is_floating_point else 1)


def difference(
    got: Sequence[Any], want: Sequence[Any], roundings: Sequence[torch.dtype] = (), limits: Limits = TOLERANCE
) -> str:
    """What is wrong with results, compared with those of the reference; empty where nothing is. On the way to each, one of
    `roundings` was the narrowest type, if these are known."""
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        if isinstance(one, torch.Tensor) and one.numel():
            widest = limits[torch.bfloat16]  # what was rounded to 8 bits on the way was so for both
            on_the_way = [limits.get(kind, widest) for kind in roundings[number : number + 1] if kind.is_floating_point]
            problem = _different(one, other, max(limits.get(one.dtype, NARROW_TOLERANCE), *on_the_way, 0.0))
            if problem:
                return f"result {number} {problem}"
    return ""


def _different(one: torch.Tensor, other: torch.Tensor, limit: float) -> str:
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"is {one.dtype} {tuple(one.shape)}, not {other.dtype} {tuple(other.shape)}"
    if not (one.dtype.is_floating_point or one.dtype.is_complex):
        share = (one != other).float().mean().item()
        return f"differs in {share:.1%} of its elements" if share > MISMATCHES else ""
    one, other = one.double(), other.double()
    finite = torch.isfinite(other)
    apart = (torch.isnan(one) != torch.isnan(other)) | (~finite & ~torch.isnan(other) & (one != other))
    if apart.float().mean().item() > MISMATCHES:
        return "has infinities or NaNs where the reference has none, or the other way round"
    both = finite & torch.isfinite(one)
    off, size = (one - other)[both].abs(), other[both].abs()
    if not size.numel():
        return ""
    error = (off.norm() / size.norm().clamp_min(1e-30)).item()
    if error > limit:
        return f"is off by {error:.1e} (limit {limit:.1e})"
    wild = (off > ELEMENT * limit * (size + size.square().mean().sqrt())).float().mean().item()
    return f"has {wild:.1%} of its elements far off" if wild > WILD else ""
