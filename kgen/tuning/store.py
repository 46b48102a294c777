"""Tuning files: looking measurements up in microseconds, and adding to them from several processes at once.

A reader takes no lock, for a writer puts a whole new file in the old one's place. Writers take turns by a lock on a second
file beside it, since the first one is replaced. What is wrong with a file is a warning: a compilation goes on without it.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, count
from pathlib import Path

from kgen.cache import locked
from kgen.config import Config
from kgen.counters import counters
from kgen.errors import TuningFileNotAFile, TuningFileNotReadable, TuningFileNotWritable
from kgen.tuning import text
from kgen.tuning.entry import Entry, Key, merge

__all__ = ["SHIPPED", "Chain", "TuningFile", "default_path", "read_file", "stores"]

SHIPPED = Path(__file__).resolve().parent / "shipped"


@dataclass(frozen=True, slots=True)
class _Loaded:
    """One version of a file. `stamp` is None where there is no file to see. Without contents, the file is there but either
    the system does not let us read it (`unreadable`), or it is no tuning file (`malformed`)."""

    stamp: tuple[int, int, int] | None
    contents: text.Contents = field(default_factory=lambda: text.Contents({}))
    unreadable: str = ""
    malformed: str = ""
    families: dict[tuple[object, ...], list[Entry]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for entry in sorted(self.contents.entries.values(), key=lambda entry: entry.key.sizes):
            if entry.key.dynamic:
                self.families.setdefault(entry.key.family, []).append(entry)


_loaded: dict[Path, _Loaded] = {}
_loading = threading.Lock()
_warned: set[Path] = set()


class TuningFile:
    """A file of entries, which need not exist.

    Who reads a broken one reports it and leaves it where it is; who writes sets it aside. Raises TuningFileNotAFile."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).resolve()  # a link stays one, and what it names is replaced
        if self.path.exists() and not self.path.is_file():
            raise TuningFileNotAFile(path=self.path, kind="a folder" if self.path.is_dir() else "a device, pipe or socket")

    def find(self, key: Key, versions: Mapping[str, str]) -> Entry | None:
        """The entry of `key`, else the nearest one along its dynamic axes, at most a factor of 4 away along each.

        `versions` are those of the registered templates. An entry of another version is as good as none."""
        return Chain((self,)).find(key, versions)

    def exact(self, key: Key, versions: Mapping[str, str]) -> Entry | None:
        """The entry of `key` itself."""
        entry = self._load().contents.entries.get(key)
        return entry if entry is not None and _is_current(entry, versions) else None

    def near(self, key: Key, versions: Mapping[str, str]) -> list[Entry]:
        """Entries of other keys that are near enough along the dynamic axes, smaller ones first."""
        if not key.dynamic:
            return []
        others = [entry for entry in self._load().families.get(key.family, ()) if entry.key != key]
        return [entry for entry in others if key.distance(entry.key) < math.inf and _is_current(entry, versions)]

    def entries(self) -> list[Entry]:
        return list(self._load().contents.entries.values())

    def problem(self) -> str:
        """What is wrong with the file, without a warning; empty where it is in order, or not there."""
        loaded = _read(self.path)
        return loaded.malformed or loaded.unreadable or "; ".join(loaded.contents.problems)

    def add(self, entries: Iterable[Entry]) -> None:
        """Like `write`, but where the file cannot be written, there is one warning a process: for compilations."""
        try:
            self.write(entries)
        except TuningFileNotWritable as error:
            if self.path not in _warned:
                _warned.add(self.path)
                _warn(f"{error}\n  until then, what is measured is lost")

    def write(self, entries: Iterable[Entry]) -> None:
        """Adds to what the file holds by now; of two entries of one key the newer one stays. A broken file is set aside, with a
        warning. Raises TuningFileNotWritable."""
        with self._locked():
            before = _read(self.path)
            if before.unreadable:
                raise TuningFileNotWritable(path=self.path, problem=before.unreadable)
            aside = _set_aside(self.path) if before.malformed else None
            merged = merge(chain(before.contents.entries.values(), entries))
            _replace(self.path, text.write(text.Contents(merged, before.contents.comment)))
        if aside:
            _warn(f"the tuning file {self.path} was not used: {before.malformed}; it is now {aside}")

    def remove(self) -> int:
        """Deletes the file, and says how many entries it had. Raises TuningFileNotWritable."""
        with self._locked():
            lost = len(_read(self.path).contents.entries)
            self.path.unlink(missing_ok=True)
        return lost

    def _load(self) -> _Loaded:
        known = _loaded.get(self.path)
        if known is not None and known.stamp == _stamp(self.path):
            return known
        with _loading:
            known = _loaded.get(self.path)
            if known is not None and known.stamp == _stamp(self.path):  # another thread was first, and has reported it
                return known
            loaded = _loaded[self.path] = _read(self.path)
        self._report(loaded)
        return loaded

    def _report(self, loaded: _Loaded) -> None:
        if loaded.malformed:
            _warn(f"the tuning file {self.path} is not used: {loaded.malformed}")  # a reader leaves it where it is
        elif loaded.unreadable:
            _warn(f"the tuning file {self.path} is not used: it cannot be read ({loaded.unreadable})")
        elif loaded.contents.problems:
            _warn(f"the tuning file {self.path} has entries that are not used: {'; '.join(loaded.contents.problems)}")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Held by one writer at a time. Raises TuningFileNotWritable, also for errors of the system inside."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path.with_name(self.path.name + ".lock")):
                yield
        except OSError as error:
            raise TuningFileNotWritable(path=self.path, problem=_cause(error)) from error


@dataclass(frozen=True, slots=True)
class Chain:
    """Files in the order in which they are asked. New entries go to the first one."""

    files: tuple[TuningFile, ...]

    def find(self, key: Key, versions: Mapping[str, str]) -> Entry | None:
        """The first exact entry, else the nearest one (`TuningFile.find`). Of two as near, that of the earlier file, then the
        smaller one."""
        for file in self.files:
            entry = file.exact(key, versions)
            if entry is not None:
                counters.add("tuning.hit")
                return entry
        near = [entry for file in self.files for entry in file.near(key, versions)]
        counters.add("tuning.near" if near else "tuning.miss")
        return min(near, key=lambda entry: key.distance(entry.key), default=None)

    def add(self, entries: Iterable[Entry]) -> None:
        self.files[0].add(entries)

    def fingerprint(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Another one when a file has changed: what was decided by it is to be decided anew."""
        return tuple(_stamp(file.path) for file in self.files)


def stores(config: Config) -> Chain:
    """The user's file, then those that are shipped with kgen. Raises TuningFileNotAFile."""
    return Chain((TuningFile(default_path(config)), *_shipped()))


def default_path(config: Config) -> Path:
    """The user's file: what is measured goes there."""
    return Path(config.tuning_file) if config.tuning_file else config.cache_path / "tuning.json"


def read_file(path: str | os.PathLike[str]) -> text.Contents:
    """For commands that were given this file: it stays as it is. Raises TuningFileNotReadable."""
    loaded = _read(Path(path))
    problem = loaded.unreadable or loaded.malformed or ("" if loaded.stamp else "there is no such file")
    if problem:
        raise TuningFileNotReadable(path=path, problem=problem)
    return loaded.contents


@cache
def _shipped() -> tuple[TuningFile, ...]:
    return tuple(TuningFile(path) for path in sorted(SHIPPED.glob("*.json")))


def _is_current(entry: Entry, versions: Mapping[str, str]) -> bool:
    current = entry.is_current(versions)
    if not current:
        counters.add("tuning.stale")
    return current


# ---- the file system ----------------------------------------------------------------------------------------------------


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        return _stamp_of(path.stat())
    except OSError:
        return None


def _stamp_of(status: os.stat_result) -> tuple[int, int, int]:
    """The inode as well: two writes may fall into one tick of the clock."""
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> _Loaded:
    """The file as it is, with the stamp of just this version."""
    try:
        with path.open("rb") as file:
            stamp, data = _stamp_of(os.fstat(file.fileno())), file.read()
    except FileNotFoundError:
        return _Loaded(None)
    except OSError as error:
        return _Loaded(_stamp(path), unreadable=_cause(error))
    try:
        return _Loaded(stamp, text.read(data))
    except text.Malformed as problem:
        return _Loaded(stamp, malformed=str(problem))


def _set_aside(path: Path) -> Path:
    """Under the lock: the first free name is not taken by another writer."""
    names = (path.with_name(f"{path.name}.broken-{number}") for number in count(1))
    free = next(name for name in names if not name.exists())
    path.rename(free)
    return free


def _replace(path: Path, data: str) -> None:
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())  # or a power failure leaves an empty file under the name
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _cause(error: OSError) -> str:
    return error.strerror or str(error)


def _warn(message: str) -> None:
    warnings.warn(f"kgen: {message}", RuntimeWarning, stacklevel=2)
