"""The one form of what benches measure: a file of entries, with the machine, the versions and the command.

    {"schema": 1, "bench": "gpu_decode", "command": ["--seconds", "2"], "machine": {"date": ..., "gpu": ..., "torch": ...},
     "facts": {"copy_rate": 3.0e12}, "entries": [{"name": "relu", "seconds": {"kgen": 1.0e-6}, "failed": {}, "details": {...}}]}

An entry has the median seconds of each contender that ran, and why the others did not. `details` are the bench's own: it reads
them back, and nobody else does. `bench.report` reads the files of all benches.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from bench.measure import machine_facts

__all__ = [
    "SCHEMA",
    "Entry",
    "Measurements",
    "NotMeasurements",
    "entries_of",
    "named",
    "problems_of",
    "read",
    "rows_in",
    "write",
]

SCHEMA = 1
# What every file says of its machine.
MACHINE = ("date", "cpu", "cores", "threads", "torch", "kgen", "commit")

Row = dict[str, Any]


class NotMeasurements(ValueError):
    """A file is not of this form."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What was measured of one problem."""

    name: str
    seconds: dict[str, float]
    failed: dict[str, str] = field(default_factory=dict)
    details: Row = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measurements:
    """One file. `facts` are the bench's, of all entries: rates of the machine, exponents."""

    bench: str
    entries: tuple[Entry, ...]
    machine: dict[str, Any] = field(default_factory=machine_facts)
    facts: dict[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = field(default_factory=lambda: tuple(sys.argv[1:]))
    schema: int = SCHEMA

    @property
    def rows(self) -> list[Row]:
        """The details, as the bench wrote them."""
        return [entry.details for entry in self.entries]

    @property
    def card(self) -> str:
        """What the entries are measured on."""
        return str(self.machine.get("gpu") or self.machine.get("cpu", ""))

    @property
    def contenders(self) -> list[str]:
        """In the order in which they appear."""
        return list(dict.fromkeys(name for entry in self.entries for name in (*entry.seconds, *entry.failed)))


# ---- writing ------------------------------------------------------------------------------------------------------------


def bench_of(function: Callable[..., Any]) -> str:
    """The bench that a function is of: the name of its file."""
    return Path(inspect.getfile(function)).stem


def write(path: Path, bench: str, entries: Iterable[Entry | Row], facts: Mapping[str, Any] | None = None) -> None:
    """Writes a file in one step, whose folder is made; rows become entries by `entries_of`. Raises NotMeasurements for what
    `read` would refuse."""
    made = [entry if isinstance(entry, Entry) else entry_of(entry) for entry in entries]
    data = json.loads(json.dumps(asdict(Measurements(bench, tuple(made), facts=dict(facts or {})))))
    wrong = problems_of(data)
    if wrong:
        raise NotMeasurements(f"{path}: {wrong[0]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.part")
    fresh.write_text(json.dumps(data, indent=1), encoding="utf-8")
    fresh.replace(path)


def entries_of(rows: Iterable[Row]) -> list[Entry]:
    """Rows as benches make them: with a name or a number, and with seconds, times or results by contender."""
    return [entry_of(row) for row in rows]


def entry_of(row: Row) -> Entry:
    """A row has its times in `seconds`, in `times` or in `results`, as numbers or with other facts of the timing."""
    times = next((row[key] for key in ("results", "times", "seconds") if isinstance(row.get(key), Mapping)), {})
    name = row.get("name", row.get("number"))
    found = {who: value for who, given in times.items() if (value := _seconds(given)) is not None}
    failed = {str(who): str(why) for who, why in row.get("failed", {}).items()}
    return Entry(str(name), found, failed, row)


def _seconds(given: Any) -> float | None:
    if isinstance(given, Mapping):
        given = given.get("seconds", given.get("median"))
    return float(given) if isinstance(given, int | float) else None


def named(rows: Mapping[Any, Row]) -> list[Row]:
    """Rows by name as a list."""
    return [{"name": str(name), **row} for name, row in rows.items()]


# ---- reading ------------------------------------------------------------------------------------------------------------


def read(path: Path) -> Measurements:
    """Raises NotMeasurements, which says what is wrong, and OSError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as cause:
        raise NotMeasurements(f"{path} is no JSON: {cause}") from None
    wrong = problems_of(data)
    if wrong:
        raise NotMeasurements(f"{path} is not of the form of bench/measurements.py: {wrong[0]}")
    given = {one.name: data[one.name] for one in fields(Measurements)}
    entries = tuple(Entry(**entry) for entry in data["entries"])
    return Measurements(**{**given, "entries": entries, "command": tuple(data["command"])})


def rows_in(path: Path | None, append: bool = True) -> list[Row]:
    """The rows that a run goes on with: those of its file, if there is one and it is to be added to."""
    return read(path).rows if append and path is not None and path.exists() else []


def problems_of(data: Any) -> list[str]:
    """What is wrong with a file's contents; nothing where it is valid."""
    if not isinstance(data, dict):
        return ["it is no object"]
    if data.get("schema") != SCHEMA:
        return [f"its schema is {data.get('schema')!r}, not {SCHEMA}"]
    kinds = {"bench": str, "entries": list, "machine": dict, "facts": dict, "command": list}
    wrong = [f"{name} is no {kind.__name__}" for name, kind in kinds.items() if not isinstance(data.get(name), kind)]
    wrong += [f"{name} is unknown" for name in data if name not in kinds and name != "schema"]
    if wrong:
        return wrong
    wrong += [f"the machine's {name} is missing" for name in MACHINE if name not in data["machine"]]
    wrong += [problem for k, entry in enumerate(data["entries"]) for problem in _problems_of_entry(k, entry)]
    names = [entry["name"] for entry in data["entries"] if isinstance(entry, dict) and "name" in entry]
    return wrong + [f"two entries are called {name!r}" for name in dict.fromkeys(names) if names.count(name) > 1]


def _problems_of_entry(number: int, entry: Any) -> Sequence[str]:
    kinds = {"name": str, "seconds": dict, "failed": dict, "details": dict}
    if not isinstance(entry, dict) or entry.keys() != kinds.keys():
        return [f"entry {number} does not have {', '.join(kinds)}"]
    wrong = [
        f"{name} of entry {number} is no {kind.__name__}" for name, kind in kinds.items() if not isinstance(entry[name], kind)
    ]
    if wrong:
        return wrong
    if not entry["name"] or entry["name"] == "None":
        wrong.append(f"entry {number} has no name")
    wrong += [
        f"{who} of {entry['name']!r} took {taken!r} seconds" for who, taken in entry["seconds"].items() if not _is_time(taken)
    ]
    return wrong + [f"{who} of {entry['name']!r} ran and failed" for who in entry["seconds"].keys() & entry["failed"].keys()]


def _is_time(taken: Any) -> bool:
    return isinstance(taken, int | float) and not isinstance(taken, bool) and math.isfinite(taken) and taken >= 0
