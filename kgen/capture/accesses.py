"""Which elements of a tensor the iterations of an unrolled loop touch, and whether two iterations can touch the same one.

An access is a basic index, of integers and slices, whose numbers may differ from iteration to iteration. Along each dimension
of the tensor it is an arithmetic progression that moves by the same step from one iteration to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Access", "Offsets", "Span", "access_of", "conflicts", "offsets_of", "whole"]


@dataclass(frozen=True, slots=True)
class Span:
    """Along one dimension, iteration k touches `start + advance * k + step * t` for t in `range(length)`.

    `kept` is False where the index is an integer, which takes the dimension away."""

    start: int
    advance: int
    length: int
    step: int = 1
    kept: bool = True

    @property
    def extent(self) -> int:
        """The distance from the first element to the one behind the last."""
        return (self.length - 1) * self.step + 1 if self.length else 0

    @property
    def overlaps(self) -> bool:
        """Whether what one iteration touches reaches beyond where the next one begins."""
        return self.kept and 0 < abs(self.advance) < self.extent

    def first(self, iteration: int) -> int:
        """The first element of an iteration."""
        return self.start + self.advance * iteration

    def hull(self, count: int) -> tuple[int, int]:
        """Bounds of what `count` iterations touch together."""
        ends = self.first(0), self.first(count - 1)
        return min(ends), max(ends) + self.extent


@dataclass(frozen=True, slots=True)
class Access:
    """A part of a tensor for each iteration: one span for each of its dimensions."""

    spans: tuple[Span, ...]

    @property
    def moving(self) -> tuple[int, ...]:
        """The dimensions along which iterations differ."""
        return tuple(d for d, span in enumerate(self.spans) if span.advance)

    def at(self, index: Sequence[Sequence[Any]]) -> Access | None:
        """The access of a further index into what this one gives; None where it is no progression."""
        kept = [span for span in self.spans if span.kept]
        inner = access_of([span.length for span in kept], index)
        if inner is None:
            return None
        composed = iter(map(_composed, kept, inner.spans))
        return Access(tuple(next(composed) if span.kept else span for span in self.spans))


def _composed(outer: Span, inner: Span) -> Span:
    return Span(
        outer.start + outer.step * inner.start, outer.advance + outer.step * inner.advance, inner.length,
        outer.step * inner.step, inner.kept,
    )  # fmt: skip


def whole(sizes: Iterable[int]) -> Access:
    """All of a tensor, in each iteration."""
    return Access(tuple(Span(0, 0, size) for size in sizes))


def access_of(sizes: Sequence[int], index: Sequence[Sequence[Any]]) -> Access | None:
    """The access of an index: for each of its entries, what stands there in each iteration.

    None where an entry is no integer, slice or ellipsis, or where iterations do not differ by one step."""
    offsets = offsets_of(sizes, index)
    spans = [None] if offsets is None else list(map(_span, offsets))
    return Access(tuple(span for span in spans if span is not None)) if None not in spans else None


def _without_ellipsis(columns: list[tuple[Any, ...]], rank: int) -> list[tuple[Any, ...]] | None:
    count = len(columns[0]) if columns else 1
    full = [(slice(None),) * count]
    dots = [position for position, column in enumerate(columns) if column[0] is Ellipsis]
    at = dots[0] if dots else len(columns)
    missing = rank - len(columns) + len(dots)
    if len(dots) > 1 or missing < 0:
        return None
    return [*columns[:at], *full * missing, *columns[at + len(dots) :]]


@dataclass(frozen=True, slots=True)
class Offsets:
    """Along one dimension, iteration k touches `starts[k] + step * t` for t in `range(length)`."""

    starts: tuple[int, ...]
    length: int
    step: int = 1
    kept: bool = True

    @property
    def moves(self) -> bool:
        """Whether iterations differ."""
        return any(start != self.starts[0] for start in self.starts)


def offsets_of(sizes: Sequence[int], index: Sequence[Sequence[Any]]) -> list[Offsets] | None:
    """As `access_of`, where iterations may differ in any way but the number of elements."""
    columns = _without_ellipsis([tuple(column) for column in index], len(sizes))
    if columns is None:
        return None
    offsets = [_offsets(size, column) for size, column in zip(sizes, columns, strict=True)]
    return None if None in offsets else [one for one in offsets if one is not None]


def _offsets(size: int, column: tuple[Any, ...]) -> Offsets | None:
    if all(type(entry) is int for entry in column):
        starts = tuple(entry + size if entry < 0 else entry for entry in column)
        return Offsets(starts, 1, 1, False) if all(0 <= s < size for s in starts) else None
    if not all(isinstance(entry, slice) for entry in column):
        return None
    ranges = [range(*entry.indices(size)) for entry in column]
    shapes = {(len(r), r.step) for r in ranges}
    if len(shapes) > 1:
        return None
    ((length, step),) = shapes
    return Offsets(tuple(r.start if length else 0 for r in ranges), length, step)


def _span(offsets: Offsets) -> Span | None:
    starts = offsets.starts
    advance = starts[1] - starts[0] if len(starts) > 1 else 0
    if any(start != starts[0] + advance * k for k, start in enumerate(starts)):
        return None
    return Span(starts[0], advance, offsets.length, offsets.step, offsets.kept)


# ---- conflicts ---------------------------------------------------------------------------------------------------------


def conflicts(first: Access, second: Access, count: int) -> bool:
    """Whether an element of `first` in one iteration may be one of `second` in another iteration, of one tensor."""
    pairs = list(zip(first.spans, second.spans, strict=True))
    if any(_apart(one, other, count) for one, other in pairs):
        return False
    steady = [(one, other) for one, other in pairs if one.advance == other.advance]
    return any(all(_meet(*pair, shift) for pair in steady) for shift in _shifts(count))


def _shifts(count: int) -> Iterator[int]:
    """Distances between two iterations."""
    return (shift for shift in range(1 - count, count) if shift)


def _apart(one: Span, other: Span, count: int) -> bool:
    """Whether no iteration of one meets any of the other."""
    (a, b), (c, d) = one.hull(count), other.hull(count)
    return b <= c or d <= a


def _meet(one: Span, other: Span, shift: int) -> bool:
    """Whether progressions that advance by the same step may meet, the second one `shift` iterations later."""
    distance = other.first(shift) - one.start
    if distance >= one.extent or -distance >= other.extent:
        return False
    return distance % math.gcd(one.step, other.step) == 0
