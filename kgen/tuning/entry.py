"""What was measured: the problem (`Key`), and what was fastest (`Entry`).

Both check themselves when they are made, so that an entry from a file is as good as one that was measured here.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from kgen.errors import InvalidTuningEntry

__all__ = ["FACTOR", "Change", "Entry", "Key", "diff", "digest", "merge", "now"]

# Along a dynamic axis, an entry stands in for sizes up to so many times larger or smaller than its own.
FACTOR = 4.0
_MADE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def now() -> str:
    """The time for `Entry.made`. Texts of this form sort by time, whichever machines they come from."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class Key:
    """What two measurements must have in common to be one.

    `device` is the name of a GPU, or that of a CPU with its threads and instruction set. `form` is a digest of all of the
    problem but its sizes: pattern, dtypes, classes of layouts and of what is fused. `sizes` gives each axis its length, or
    its bucket where the axis is in `dynamic`. `title` is for people and takes no part in comparisons.

    Raises InvalidTuningEntry."""

    device: str
    form: str
    sizes: tuple[tuple[str, int], ...]
    dynamic: tuple[str, ...] = ()
    numerics: str = "fast"
    title: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("device", "form", "numerics", "title"):
            _require(type(getattr(self, name)) is str, name, getattr(self, name))
        _require(all(type(axis) is str and type(size) is int and size >= 0 for axis, size in self.sizes), "sizes", self.sizes)
        axes = [axis for axis, _ in self.sizes]
        _require(len({*axes}) == len(axes), "sizes", self.sizes)
        _require({*self.dynamic} <= {*axes} and len({*self.dynamic}) == len(self.dynamic), "dynamic", self.dynamic)
        # in one order, or equal problems would be unequal keys
        object.__setattr__(self, "sizes", tuple(sorted(self.sizes)))
        object.__setattr__(self, "dynamic", tuple(sorted(self.dynamic)))

    @property
    def family(self) -> tuple[Any, ...]:
        """What keys share that differ at most in lengths of dynamic axes."""
        fixed = tuple(pair for pair in self.sizes if pair[0] not in self.dynamic)
        return (self.device, self.form, self.numerics, self.dynamic, fixed)

    def distance(self, other: Key) -> float:
        """How far a key of the same family is away: factors between lengths of dynamic axes, in powers of two and added up;
        infinity where one of them is larger than FACTOR."""
        factors = [
            abs(math.log2(max(mine, 1) / max(theirs, 1)))  # an empty axis is as good as one of length 1
            for (_, mine), (_, theirs) in zip(self.sizes, other.sizes, strict=True)
        ]
        return sum(factors) if all(factor <= math.log2(FACTOR) for factor in factors) else math.inf


@dataclass(frozen=True, slots=True)
class Entry:
    """The winner of one problem: a template's configuration, or the library with separate kernels (`template` is None).

    `version` is that of the template. `config` holds knobs in the template's order. Times are in seconds; `library_seconds` is
    NaN where the library cannot compute the problem. `measured` counts the candidates that were timed. `made` is the time of
    the measurement (`now`), `by` the software that made it.

    Raises InvalidTuningEntry."""

    key: Key
    template: str | None
    version: str
    config: tuple[tuple[str, Any], ...]
    seconds: float
    library_seconds: float
    measured: int
    made: str
    by: str

    def __post_init__(self) -> None:
        _require(self.template is None or (type(self.template) is str and self.template != ""), "template", self.template)
        for name in ("version", "by"):
            _require(type(getattr(self, name)) is str, name, getattr(self, name))
        _require(all(type(knob) is str and _is_setting(value) for knob, value in self.config), "config", self.config)
        _require(len(dict(self.config)) == len(self.config), "config", self.config)
        _require(_is_time(self.seconds), "seconds", self.seconds)
        _require(_is_time(self.library_seconds) or _is_nan(self.library_seconds), "library_seconds", self.library_seconds)
        _require(type(self.measured) is int and self.measured >= 0, "measured", self.measured)
        _require(type(self.made) is str and _MADE.fullmatch(self.made) is not None, "made", self.made)
        if _is_nan(self.library_seconds):
            object.__setattr__(self, "library_seconds", math.nan)  # the one object that equals itself in a tuple

    def is_current(self, versions: Mapping[str, str]) -> bool:
        """Whether the template that won is still as it was measured. For the library, `versions` may hold under "" what stands
        for all the templates that it was compared with."""
        if self.template is None:
            return versions.get("", "") == self.version
        return versions.get(self.template) == self.version


def digest(versions: Mapping[str, str]) -> str:
    """What stands for all templates, in an entry for the library: it was compared with these."""
    return hashlib.sha256(repr(sorted(versions.items())).encode()).hexdigest()[:12]


def merge(entries: Iterable[Entry]) -> dict[Key, Entry]:
    """One entry a key: the newest one. Of two from one instant, always the same one, whatever their order."""
    merged: dict[Key, Entry] = {}
    for entry in entries:
        known = merged.get(entry.key)
        if known is None or _age(known) < _age(entry):
            merged[entry.key] = entry
    return merged


def _age(entry: Entry) -> tuple[str, float, str]:
    return entry.made, -entry.seconds, repr(entry)


@dataclass(frozen=True, slots=True)
class Change:
    """What two sets of entries say about one problem; None where one of them says nothing."""

    key: Key
    before: Entry | None
    after: Entry | None

    @property
    def is_choice(self) -> bool:
        """Whether it is about more than times, which differ between any two measurements."""
        if self.before is None or self.after is None:
            return True
        one, other = self.before, self.after
        return (one.template, one.version, one.config) != (other.template, other.version, other.config)


def diff(before: Iterable[Entry], after: Iterable[Entry]) -> list[Change]:
    """The problems about which they differ: those of `before` in their order, then new ones."""
    old, new = merge(before), merge(after)
    pairs = [Change(key, old.get(key), new.get(key)) for key in {**old, **new}]
    return [pair for pair in pairs if pair.before != pair.after]


def _require(holds: bool, name: str, value: Any) -> None:
    if not holds:
        raise InvalidTuningEntry(field=name, value=repr(value)[:200])


def _is_setting(value: Any) -> bool:
    return type(value) in (bool, int, str) or (isinstance(value, float) and math.isfinite(value))


def _is_time(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < math.inf


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
