"""Which configurations a matmul has when only the call knows how long its axes are: a few, each for a range of lengths.

The length is one number, the product of the lengths of the dynamic axes of the results (of the sum, where nothing else is
dynamic). It is cut into *buckets* by powers of two, within what is known of the sizes. Whether a template or the library
computes a matmul is decided once for all buckets, which count equally; everything else in a graph with matmuls is decided at
sizes in the middle. So it does not matter which size came first. Several sizes grow together, in the proportions of those that
came first as powers of two: rows of 8 sequences of 8 words say nothing of a softmax over 1,024.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.index import Expr, Size, Sizes, with_derived
from kgen.ir.plan import BySize, Choice
from kgen.templates.contract import Config
from kgen.templates.problem import Problem

# Lengths at which other configurations begin to be better. Below the first one no tile is smaller; from the last one on there
# are more tiles than SMs.
SHORTEST, LONGEST = 16, 4096
# Configurations of a kernel: each is compiled.
MOST = 4
# A configuration is worth compiling if all buckets together would lose more than this factor without it.
WORTH = 1.03
# How much slower than what was measured to be the best another configuration is, if the estimate says it were faster.
BEATEN = 1.05
# No kernel takes less: an author's estimate may be 0.
SHORTEST_TIME = 1e-9

Hints = Mapping[Size, int]


@dataclass(frozen=True, slots=True)
class Best:
    """The best that can be had of a matmul: the configuration of a template, its time, and the library's, in seconds. Of
    dynamic sizes these are geometric means over the buckets, and the configuration is that of the hints; `by_size` has all, if
    there are several. `measured`: its time is no estimate."""

    problem: Problem
    config: Config
    seconds_of_template: float
    seconds_of_library: float
    measured: bool = False
    by_size: BySize | None = None

    @property
    def seconds(self) -> float:
        return min(self.seconds_of_template, self.seconds_of_library)

    @property
    def is_unmeasured(self) -> bool:
        """Whether nobody has measured this, nor anything like it."""
        return self.problem.uncalibrated is not None and not self.measured

    @property
    def choice(self) -> Choice:
        return Choice(self.problem.template.name, self.config.values)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Lengths up to `limit`; in the last one, all others. `hints` are the sizes at its end, `inside` those of a length at which
    tiles fill it less evenly."""

    limit: int | None
    hints: Hints
    inside: Hints


@dataclass(frozen=True, slots=True)
class Prices:
    """How configurations are compared. `best` is the best at some sizes, by whatever means (None: no template can); `seconds`
    the estimate of any choice there, infinite where it cannot be used."""

    best: Callable[[Hints], Best | None]
    seconds: Callable[[Choice, Hints], float]


def choices_by_bucket(problems: Sequence[Problem], prices: Prices) -> Best | None:
    """The best over all lengths that a matmul may have, by the templates that see it as one of `problems`; or that several
    matmuls in one kernel may have. Where the parts of reductions on tiles are still to be chosen there is one choice, for all
    must agree on them."""
    if not problems:
        return None
    length, graph = length_of(problems), problems[0].graph
    if length is None:
        return prices.best({})
    buckets = buckets_of(length, graph)
    winners = [found for bucket in buckets if (found := prices.best(bucket.hints)) is not None]
    if len(winners) < len(buckets):
        return None
    costs = _costs(buckets, winners, prices)
    open_parts = any(s.kind == "partial" and s.block == 0 for problem in problems for s in problem.epilogue)
    choices = _few(costs, 1 if open_parts else MOST)
    means = [row[choice] for row, choice in zip(costs, choices, strict=True)]
    if math.inf in means:
        return None
    now = next(k for k, b in enumerate(buckets) if b.limit is None or Sizes(graph.size_hints).of(length) <= b.limit)
    chosen = next(one for one in winners if one.choice == choices[now])
    return replace(
        chosen,
        seconds_of_template=math.exp(sum(means) / len(means)),
        seconds_of_library=math.exp(sum(_log(one.seconds_of_library) for one in winners) / len(winners)),
        by_size=_table(length, buckets, choices),
    )


def _log(seconds: float) -> float:
    return math.log(max(seconds, SHORTEST_TIME))


Costs = Sequence[Mapping[Choice, float]]


def _costs(buckets: Sequence[Bucket], winners: Sequence[Best], prices: Prices) -> Costs:
    """The logarithm of the time of each winner in each bucket. What was measured to be the best of a bucket stays so, and
    estimates say how much longer others take."""
    choices = dict.fromkeys(one.choice for one in winners)
    rows: list[dict[Choice, float]] = []
    for bucket, winner in zip(buckets, winners, strict=True):
        row = {c: sum(_log(prices.seconds(c, h)) for h in (bucket.hints, bucket.inside)) / 2 for c in choices}
        if winner.measured:
            shift = _log(winner.seconds_of_template) - row[winner.choice]
            beaten = row[winner.choice] + math.log(BEATEN)
            row = {c: (cost if c == winner.choice else max(cost, beaten)) + shift for c, cost in row.items()}
        rows.append(row)
    return rows


def _few(costs: Costs, most: int) -> list[Choice]:
    """A choice for each bucket, at most so many different ones: those without which most time would be lost."""
    kept = list(costs[0])
    least = sum(min(row.values()) for row in costs)

    def without(choice: Choice) -> float:
        return sum(min(row[c] for c in kept if c != choice) for row in costs) - least

    while len(kept) > 1:
        worst = min(kept, key=without)
        if len(kept) <= most and without(worst) > math.log(WORTH):
            break
        kept.remove(worst)
    found: list[Choice] = []
    for row in costs:  # of equal ones that of the bucket before: no need to change
        found.append(min(kept, key=lambda c: (row[c], c not in found[-1:])))
    return found


def _table(length: Expr, buckets: Sequence[Bucket], choices: Sequence[Choice]) -> BySize | None:
    """The choices with neighbours joined that are equal; None where all are."""
    rows = list(zip((b.limit for b in buckets), choices, strict=True))
    kept = [row for row, after in zip(rows, [*rows[1:], None], strict=True) if after is None or after[1] != row[1]]
    return BySize(length, tuple(kept)) if len(kept) > 1 else None


# ---- lengths ----------------------------------------------------------------------------------------------------------


def length_of(problems: Sequence[Problem]) -> Expr | None:
    """The length that decides between choices; None where all sizes are known. Of several matmuls it is the sum of those
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
    shape = _shape(length, graph)

    def sized(own: Mapping[Size, int]) -> tuple[int, Hints]:
        hints = with_derived({**graph.size_hints, **{s: min(max(n, s.lo), s.hi) for s, n in own.items()}}, graph.derived)
        return Sizes(hints).of(length), hints

    def at(n: int) -> tuple[int, Hints]:
        return sized({s: n * size // shape.mean for s, size in shape.first.items()})

    marks = [(*at(1), at(1)[1])]
    for power in range(1, LONGEST.bit_length() + 1):
        end, hints = at(1 << power)
        if end > marks[-1][0]:
            marks.append((end, hints, at(3 << power >> 2)[1]))
    least = max(SHORTEST, marks[0][0] + 1)  # the shortest length of all needs no bucket of its own
    useful = [mark for mark in marks if mark[0] >= least] or marks[-1:]
    inside = [mark for mark in useful[:-1] if mark[0] <= LONGEST]
    last = Bucket(None, *useful[len(inside)][1:])
    first, hints = sized(shape.first)
    if len(shape.first) > 1 and first > LONGEST:
        last = Bucket(None, hints, hints)
    return (*(Bucket(*mark) for mark in inside), last)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The first sizes that a length depends on, as powers of two, and their geometric mean; of a single one, 1."""

    first: Mapping[Size, int]
    mean: int


def _shape(length: Expr, graph: ir.Graph) -> _Shape:
    symbols = _symbols(length, graph.derived)
    if len(symbols) < 2:
        return _Shape(dict.fromkeys(symbols, 1), 1)
    powers = {s: max(0, graph.seen_sizes.get(s, 1) - 1).bit_length() for s in symbols}
    return _Shape({s: 1 << power for s, power in powers.items()}, 1 << sum(powers.values()) // len(powers))


def _symbols(expr: Expr, derived: Mapping[Size, Expr]) -> list[Size]:
    """The sizes that an expression depends on and that depend on no others."""
    found = sorted((a for a in ix.free_atoms(expr) if isinstance(a, Size)), key=lambda size: size.name)
    expanded = [_symbols(derived[size], derived) if size in derived else [size] for size in found]
    return list(dict.fromkeys(size for sizes in expanded for size in sizes))


def forget_first_sizes(graph: ir.Graph, matmuls: Iterable[ir.TemplateNode]) -> None:
    """Puts sizes in the middle of what may come in the place of those that came first, where matmuls depend on one of them: all
    that is decided of the graph, matmuls or not, is then the same whatever came first. Of several, powers of two."""
    lengths = dict.fromkeys(
        length
        for node in matmuls
        for loops in (node.out_vars, node.reduced if ir.is_contraction(node) else node.inner)
        if (length := _dynamic(v.extent for v in loops)) is not None
    )
    if not lengths:
        return
    settled: Mapping[Size, int] = _shape(sum(lengths, ix.ZERO), graph).first
    if len(settled) == 1:
        buckets = buckets_of(next(iter(lengths)), graph)
        middle = buckets[len(buckets) // 2].hints
        settled = {symbol: middle[symbol] for symbol in settled}
    graph.seen = graph.seen_sizes
    within = {symbol: min(max(size, symbol.lo), symbol.hi) for symbol, size in settled.items()}
    graph.size_hints = with_derived({**graph.size_hints, **within}, graph.derived)
