"""Measurements and their differences as tables for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from kgen.commands.explain_text import Heading, Section, Table
from kgen.tuning.entry import Change, Entry, Key
from kgen.tuning.tuner import Unmeasured

__all__ = ["changes", "measurements", "seconds_text", "suggestions"]


def seconds_text(seconds: float) -> str:
    """``12.3 us``, ``1.5 ms``: three digits; ``-`` for what is not known."""
    if not math.isfinite(seconds):
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def measurements(entries: Iterable[Entry]) -> Iterator[Section]:
    """A table a device: what was fastest for each problem, and how it compares with the library and separate kernels."""
    columns = ("problem", "fastest", "time>", "library>", "ratio>", "tried>", "measured")
    for device, group in groupby(sorted(entries, key=lambda entry: _order(entry.key)), key=lambda entry: entry.key.device):
        yield Heading(device)
        yield Table(columns, tuple(_row(entry) for entry in group))


def suggestions(found: Iterable[Unmeasured]) -> Iterator[Section]:
    """A table a device: problems without a measurement, those first that take the most time by the cost model's estimates."""
    columns = ("problem", "kernels>", "template about>", "library about>", "all of them>")
    ordered = sorted(found, key=lambda one: (one.key.device, _order(one.key)))
    for device, group in groupby(ordered, key=lambda one: one.key.device):
        equal = [[*own] for _, own in groupby(group, key=lambda one: one.key)]
        equal.sort(key=lambda own: -len(own) * _at_best(own[0]))
        yield Heading(device)
        yield Table(columns, tuple(_suggested(own) for own in equal))


def _suggested(equal: Sequence[Unmeasured]) -> tuple[str, ...]:
    one = equal[0]
    times = (one.seconds, one.library_seconds, len(equal) * _at_best(one))
    return (_problem(one.key), str(len(equal)), *map(seconds_text, times))


def _at_best(one: Unmeasured) -> float:
    """The lower estimate; what has none comes last."""
    return min((s for s in (one.seconds, one.library_seconds) if math.isfinite(s)), default=0.0)


def _row(entry: Entry) -> tuple[str, ...]:
    ratio = entry.library_seconds / entry.seconds
    return (
        _problem(entry.key),
        _winner(entry),
        seconds_text(entry.seconds),
        seconds_text(entry.library_seconds),
        "-" if math.isnan(ratio) else f"{ratio:.2f}",
        str(entry.measured),
        entry.made[:10],
    )


def changes(found: Iterable[Change]) -> Iterator[Section]:
    """A table a device, with a mark as of diff: ``-`` is gone, ``+`` is new, ``~`` differs."""
    for device, group in groupby(sorted(found, key=lambda change: _order(change.key)), key=lambda change: change.key.device):
        yield Heading(device)
        yield Table(("", "problem", "before", "time>", "after", "time>"), tuple(map(_changed, group)))


def _changed(change: Change) -> tuple[str, ...]:
    mark = "+" if change.before is None else "-" if change.after is None else "~"
    return (mark, _problem(change.key), *_side(change.before), *_side(change.after))


def _side(entry: Entry | None) -> tuple[str, str]:
    return ("", "") if entry is None else (_winner(entry), seconds_text(entry.seconds))


def _problem(key: Key) -> str:
    """The title, with what it cannot say: sizes stand for others nearby, or rounding is not the usual one."""
    sizes = " ".join(f"{axis}={'~' * (axis in key.dynamic)}{size}" for axis, size in key.sizes)
    notes = [sizes] if key.dynamic or not key.title else []
    notes += [key.numerics] if key.numerics != "fast" else []
    return " ".join([key.title or key.form[:12], *(f"({note})" for note in notes)])


def _winner(entry: Entry) -> str:
    return " ".join([entry.template or "library", *(f"{knob}={value}" for knob, value in entry.config)])


def _order(key: Key) -> tuple[object, ...]:
    return key.device, key.title, key.form, key.numerics, key.dynamic, key.sizes
