"""Which configurations a product has when only the call knows how long its axes are: a few, each for a range of lengths.

The length is one number, the product of the dynamic axes of the results (of the sum, where nothing else is dynamic). It is cut
into *buckets* by powers of two, within what is known of the sizes. Whether a template or the library computes a product is
decided once for all buckets, which count alike; everything else in a graph with products is decided at sizes in the middle.
So it does not matter which size came first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kgen import index as ix
from kgen import ir
from kgen.index import Expr, Size
from kgen.plan import BySize, Choice
from kgen.sizes import Sizes, with_derived
from kgen.templates.contract import Config
from kgen.templates.problem import Problem

# Lengths at which other configurations begin to be better. Below the first one no tile is smaller; from the last one on there
# are more tiles than processors.
SHORTEST, LONGEST = 16, 4096
# Configurations of a kernel: each is compiled.
MOST = 4
# A configuration is worth compiling if all buckets together would lose more than this factor without it.
WORTH = 1.03

Hints = Mapping[Size, int]


@dataclass(frozen=True, slots=True)
class Best:
    """The best that can be had of a product: the configuration of a template, its time, and the library's, in seconds. Of
    dynamic sizes these are geometric means over the buckets, and the configuration is that of the hints; `by_size` has all, if
    there are several."""

    problem: Problem
    config: Config
    seconds_of_template: float
    seconds_of_library: float
    by_size: BySize | None = None

    @property
    def seconds(self) -> float:
        return min(self.seconds_of_template, self.seconds_of_library)

    @property
    def choice(self) -> Choice:
        return Choice(self.problem.template.name, self.config.values)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Lengths up to `limit`; in the last one, all others. `hints` are the sizes at its end."""

    limit: int | None
    hints: Hints


@dataclass(frozen=True, slots=True)
class Prices:
    """How configurations are compared. `best` is the best at some sizes, by whatever means (None: no template can); `seconds`
    the estimate of any choice there, infinite where it cannot be used."""

    best: Callable[[Hints], Best | None]
    seconds: Callable[[Choice, Hints], float]


def choices_by_bucket(problems: Sequence[Problem], prices: Prices) -> Best | None:
    """The best of a product over all lengths that it may have, as the templates see it, or of several products in one kernel.
    Where the parts of reductions on tiles are still to be chosen there is one choice, for all must agree on them."""
    if not problems:
        return None
    length, graph = length_of(problems), problems[0].graph
    if length is None:
        return prices.best({})
    buckets = buckets_of(length, graph)
    winners = [found for bucket in buckets if (found := prices.best(bucket.hints)) is not None]
    if len(winners) < len(buckets):
        return None
    open_parts = any(s.kind == "partial" and s.block == 0 for problem in problems for s in problem.epilogue)
    choices = _few(buckets, winners, prices, 1 if open_parts else MOST)
    seconds = [prices.seconds(choice, bucket.hints) for choice, bucket in zip(choices, buckets, strict=True)]
    if math.inf in seconds:
        return None
    now = next(k for k, b in enumerate(buckets) if b.limit is None or Sizes(graph.size_hints).of(length) <= b.limit)
    chosen = next(one for one in winners if one.choice == choices[now])
    return replace(
        chosen,
        seconds_of_template=_mean(seconds),
        seconds_of_library=_mean([one.seconds_of_library for one in winners]),
        by_size=_table(length, buckets, choices),
    )


def _mean(times: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, times)) / len(times))


def _few(buckets: Sequence[Bucket], winners: Sequence[Best], prices: Prices, most: int) -> list[Choice]:
    """A choice for each bucket, at most so many different ones: those without which most time would be lost."""
    kept = list(dict.fromkeys(one.choice for one in winners))
    lost = [{c: _lost(c, one.choice, b.hints, prices) for c in kept} for b, one in zip(buckets, winners, strict=True)]

    def without(choice: Choice) -> float:
        return sum(min(row[c] for c in kept if c != choice) for row in lost)

    while len(kept) > 1:
        least = min(kept, key=without)
        if len(kept) <= most and without(least) > math.log(WORTH):
            break
        kept.remove(least)
    found: list[Choice] = []
    for row in lost:  # of equal ones that of the bucket before: no need to change
        found.append(min(kept, key=lambda c: (row[c], c not in found[-1:])))
    return found


def _lost(choice: Choice, winner: Choice, hints: Hints, prices: Prices) -> float:
    """The logarithm of the factor by which a choice is slower than the best one."""
    if choice == winner:
        return 0.0
    return max(0.0, math.log(prices.seconds(choice, hints) / prices.seconds(winner, hints)))


def _table(length: Expr, buckets: Sequence[Bucket], choices: Sequence[Choice]) -> BySize | None:
    """The choices with neighbours joined that are equal; None where all are."""
    rows = list(zip((b.limit for b in buckets), choices, strict=True))
    kept = [row for row, after in zip(rows, [*rows[1:], None], strict=True) if after is None or after[1] != row[1]]
    return BySize(length, tuple(kept)) if len(kept) > 1 else None


# ---- lengths ----------------------------------------------------------------------------------------------------------


def length_of(problems: Sequence[Problem]) -> Expr | None:
    """The length that decides between choices; None where all sizes are known. Of several products it is the sum of those
    lengths that differ."""
    lengths = dict.fromkeys(_length_of(problem) for problem in problems)
    dynamic = [length for length in lengths if length is not None]
    return sum(dynamic, ix.ZERO) if dynamic else None


def _length_of(problem: Problem) -> Expr | None:
    results = problem.template.implements.results[0]
    own = _dynamic(problem.extent(axis) for axis in results)
    return own if own is not None else _dynamic(problem.extent(axis) for axis in problem.loops if axis not in results)


def _dynamic(extents: Iterable[Expr]) -> Expr | None:
    found = [extent for extent in extents if extent.as_int() is None]
    return ix.product(found) if found else None


def buckets_of(length: Expr, graph: ir.Graph) -> tuple[Bucket, ...]:
    """The buckets of a length. Where it depends on several sizes, these grow together."""
    marks: list[tuple[int, Hints]] = []
    symbols = _symbols(length, graph.derived)
    for power in range(LONGEST.bit_length() + 1):
        own = {s: min(max(1 << power, s.lo), s.hi) for s in symbols}
        hints = with_derived({**graph.size_hints, **own}, graph.derived)
        at = Sizes(hints).of(length)
        if not marks or at > marks[-1][0]:
            marks.append((at, hints))
    least = max(SHORTEST, marks[0][0] + 1)  # the shortest length of all needs no bucket of its own
    useful = [mark for mark in marks if mark[0] >= least] or marks[-1:]
    inside = [mark for mark in useful[:-1] if mark[0] <= LONGEST]
    return (*(Bucket(at, hints) for at, hints in inside), Bucket(None, useful[len(inside)][1]))


def _symbols(expr: Expr, derived: Mapping[Size, Expr]) -> list[Size]:
    """The sizes that an expression depends on and that depend on no others."""
    found = sorted((a for a in ix.free_atoms(expr) if isinstance(a, Size)), key=lambda size: size.name)
    expanded = [_symbols(derived[size], derived) if size in derived else [size] for size in found]
    return list(dict.fromkeys(size for sizes in expanded for size in sizes))


def forget_first_sizes(graph: ir.Graph, products: Iterable[ir.Product]) -> None:
    """Puts sizes in the middle of what may come in the place of those that came first, where products depend on them: all that
    is decided of the graph, products or not, is then the same whatever came first."""
    settled: dict[Size, int] = {}
    for node in products:
        for loops in (node.out_vars, node.reduced if isinstance(node, ir.Contraction) else node.inner):
            length = _dynamic(v.extent for v in loops)
            if length is not None:
                buckets = buckets_of(length, graph)
                middle = buckets[len(buckets) // 2].hints
                for symbol in _symbols(length, graph.derived):
                    settled.setdefault(symbol, middle[symbol])
    if settled:
        graph.seen = graph.seen_sizes
        graph.size_hints = with_derived({**graph.size_hints, **settled}, graph.derived)
