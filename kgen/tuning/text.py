"""A tuning file's text: JSON with one entry a line, in a fixed order, so that git compares and merges such files by entries.

The list ends with null: then every entry's line ends with a comma, and two branches that add entries change no line of each
other. What a merge leaves behind (an entry twice, other order) is read as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kgen.errors import InvalidTuningEntry
from kgen.tuning.entry import Entry, Key, merge

__all__ = ["SCHEMA", "Contents", "Malformed", "read", "write"]

SCHEMA = 1
_KEY_FIELDS = ("title", "device", "form", "sizes", "dynamic", "numerics")
_FIELDS = ("template", "version", "config", "seconds", "library_seconds", "measured", "made", "by")


@dataclass(frozen=True, slots=True)
class Contents:
    """A file's entries by key, its comment for people, and what is wrong with entries that were left out."""

    entries: dict[Key, Entry]
    comment: str = ""
    problems: tuple[str, ...] = ()


class Malformed(ValueError):
    """The text is no tuning file of this schema; the message says why."""


def write(contents: Contents) -> str:
    entries = sorted(contents.entries.values(), key=lambda entry: (*entry.key.family[:4], entry.key.sizes))
    lines = [json.dumps(_to_json(entry), allow_nan=False) + ",\n" for entry in entries]
    head = f'{{\n"schema": {SCHEMA},\n"comment": {json.dumps(contents.comment)},\n"entries": [\n'
    return f"{head}{''.join(lines)}null\n]\n}}\n"


def read(text: str | bytes) -> Contents:
    """Raises Malformed. One wrong entry among others is a problem of the contents."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"it is not JSON: {error}") from error
    if not isinstance(found, dict) or "schema" not in found:
        raise Malformed("it names no schema")
    if found["schema"] != SCHEMA:
        raise Malformed(f"its schema is {found['schema']!r}, and this version of kgen reads {SCHEMA}")
    rows, comment = found.get("entries"), found.get("comment", "")
    if not isinstance(rows, list) or not isinstance(comment, str):
        raise Malformed("it has no list of entries" if isinstance(comment, str) else "its comment is no text")
    return _contents(rows, comment)


def _contents(rows: Iterable[Any], comment: str) -> Contents:
    entries, problems = [], []
    for number, row in enumerate(rows, 1):
        if row is None:
            continue
        try:
            entries.append(_from_json(row))
        except InvalidTuningEntry as error:
            problems.append(f"entry {number}: {error}")
    return Contents(merge(entries), comment, tuple(problems))


def _to_json(entry: Entry) -> dict[str, Any]:
    row = {name: getattr(entry.key, name) for name in _KEY_FIELDS} | {name: getattr(entry, name) for name in _FIELDS}
    row["sizes"], row["config"] = dict(entry.key.sizes), dict(entry.config)
    if math.isnan(entry.library_seconds):
        row["library_seconds"] = None
    return row


def _from_json(row: Any) -> Entry:
    if not isinstance(row, dict) or {*row} != {*_KEY_FIELDS, *_FIELDS}:
        fields = sorted({*row} ^ {*_KEY_FIELDS, *_FIELDS}) if isinstance(row, dict) else row
        raise InvalidTuningEntry(field="fields", value=repr(fields)[:200])
    for name, kind in (("sizes", dict), ("config", dict), ("dynamic", list)):
        if not isinstance(row[name], kind):
            raise InvalidTuningEntry(field=name, value=repr(row[name])[:200])
    if not all(isinstance(axis, str) for axis in row["dynamic"]):
        raise InvalidTuningEntry(field="dynamic", value=repr(row["dynamic"])[:200])
    made = row | {
        "sizes": tuple(row["sizes"].items()),
        "dynamic": tuple(row["dynamic"]),
        "config": tuple(row["config"].items()),
        "library_seconds": math.nan if row["library_seconds"] is None else row["library_seconds"],
    }
    key = Key(**{name: made[name] for name in _KEY_FIELDS})
    return Entry(key, **{name: made[name] for name in _FIELDS})
