"""`kgen cache`: looks at, empties and exchanges what is kept on disk."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from kgen import cache, config
from kgen.commands.exit_codes import OK
from kgen.commands.explain_text import write
from kgen.commands.tuning_table import changes, measurements
from kgen.errors import TuningFileExists, UnknownTuningDevice
from kgen.report.graph_report import bytes_text
from kgen.tuning import store
from kgen.tuning.entry import Entry, diff
from kgen.tuning.store import TuningFile

__all__ = ["clear", "difference", "export", "list_entries", "merge", "stats", "users_file"]

# The kind of entries that are not in the cache but in tuning files.
TUNING = "tuning"


def list_entries(options: argparse.Namespace) -> int:
    if options.kind == TUNING:
        for file in store.stores(config.current()).files:
            print(f"{file.path}: {len(file.entries())} entries")
            write(measurements(file.entries()), sys.stdout)
        return OK
    _note_no_such(options.kind)
    for entry in cache.list_entries(options.kind):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.modified))
        print(f"{when}  {bytes_text(entry.bytes):>8}  {entry.kind:<8} {entry.key}")
    return OK


def stats(options: argparse.Namespace) -> int:
    if options.kind != TUNING:
        _note_no_such(options.kind)
        print(f"{cache.cache_dir()}")
        table = {kind: row for kind, row in cache.stats().items() if options.kind in (None, kind)}
        for kind, row in table.items():
            print(f"  {kind:<8} {row['entries']:>6} entries  {bytes_text(row['bytes']):>8}")
        count, size = (sum(row[what] for row in table.values()) for what in ("entries", "bytes"))
        print(f"  {'all':<8} {count:>6} entries  {bytes_text(size):>8}")
    if options.kind in (None, TUNING):
        for file in store.stores(config.current()).files:
            size = file.path.stat().st_size if file.path.exists() else 0
            print(f"  {TUNING:<8} {len(file.entries()):>6} entries  {bytes_text(size):>8}  {file.path}")
    return OK


def clear(options: argparse.Namespace) -> int:
    """A tuning file is no cache: what is in it took minutes of a quiet machine, so it goes only when it is named."""
    if options.kind == TUNING:
        file = users_file()
        print(f"removed {file.remove()} entries: {file.path}")
        return OK
    _note_no_such(options.kind)
    entries = cache.list_entries(options.kind)
    freed = sum(entry.bytes for entry in entries)
    print(f"removed {cache.clear(options.kind)} entries, {bytes_text(freed)}")
    return OK


def _note_no_such(kind: str | None) -> None:
    """Says which kinds there are, where there is nothing of a kind: its name may be misspelled."""
    known = {*cache.stats(), TUNING}
    if kind is not None and kind not in known:
        print(f"kgen: there is nothing of kind {kind!r}; kinds are {', '.join(sorted(known))}", file=sys.stderr)


# ---- tuning files -----------------------------------------------------------------------------------------------------


def users_file() -> TuningFile:
    return TuningFile(store.default_path(config.current()))


def merge(options: argparse.Namespace) -> int:
    out = TuningFile(options.out)
    if out.path.exists():
        _read(out.path)  # a broken file is an error here, and not set aside
    before = out.entries()
    out.write([entry for path in options.files for entry in _read(path)])
    found = diff(before, out.entries())
    added = sum(change.before is None for change in found)
    print(f"{out.path}: {len(out.entries())} entries, {added} of them added and {len(found) - added} replaced")
    return OK


def difference(options: argparse.Namespace) -> int:
    found = diff(_read(options.before), _read(options.after))
    if not options.times:
        found = [change for change in found if change.is_choice]
    write(changes(found), sys.stdout)
    print(f"{len(found)} differences" if found else "no difference")
    return OK


def export(options: argparse.Namespace) -> int:
    entries = users_file().entries()
    devices = sorted({entry.key.device for entry in entries})
    if options.device is not None and options.device not in devices:
        raise UnknownTuningDevice(device=options.device, valid="; ".join(devices) or "(there are no measurements)")
    if options.out.exists():
        raise TuningFileExists(path=options.out)
    chosen = [entry for entry in entries if options.device in (None, entry.key.device)]
    TuningFile(options.out).write(chosen)
    print(f"{options.out}: {len(chosen)} entries")
    return OK


def _read(path: Path) -> list[Entry]:
    contents = store.read_file(path)
    for problem in contents.problems:
        print(f"kgen: {path}: left out {problem}", file=sys.stderr)
    return list(contents.entries.values())
