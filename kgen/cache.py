"""The content-addressed store on disk under every cache of kgen: compiled libraries, precompiled headers, pickled graphs.

An entry is one file ``<folder>/v1/<kind>/<key>[suffix]``: the data, then a trailer with its length and SHA-256. Loaders of
shared libraries ignore bytes after the end, so a library and its checksum are one file and replaced in one step. Writers
write elsewhere and rename, so readers never see half an entry and take no locks; `lock` only keeps two processes
from doing the same expensive work. An entry whose trailer does not fit is dropped with a warning and counts as absent.

A folder that may only be read serves what is in it. What is missing there goes to a temporary folder of the process, with one
warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import hashlib
import os
import shutil
import struct
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kgen import config
from kgen.counters import counters
from kgen.errors import CacheNotWritable, UnhashableKey, UnsupportedPlatform

if sys.platform != "linux":  # no fcntl, no /proc, another compiler: say so before one of them is missed
    raise UnsupportedPlatform(platform=sys.platform)

import fcntl

__all__ = [
    "Entry", "adopt", "cache_dir", "clear", "drop", "find", "free_bytes", "get", "has_space", "list_entries", "lock", "locked",
    "path", "put", "put_file", "scratch", "share", "stable_hash", "stats",
]  # fmt: skip

_VERSION = "v1"
_MAGIC = b"kgen-entry-1\0"
_TRAILER = struct.Struct(f"<32sQ{len(_MAGIC)}s")
_verified: dict[Path, tuple[int, int]] = {}
_verified_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Entry:
    """One file or folder of the cache. `bytes` is its size on disk, `modified` seconds since the epoch."""

    kind: str
    key: str
    path: Path
    bytes: int
    modified: float


def cache_dir() -> Path:
    """The cache's folder, made when absent: KGEN_CACHE_DIR, else XDG_CACHE_HOME/kgen, else ~/.cache/kgen.

    Raises CacheNotWritable."""
    root = _root()
    if root not in _usable:
        _require_writable(root)
        _usable.add(root)
    return root


def _root() -> Path:
    return config.current().cache_path / _VERSION


_usable: set[Path] = set()
# Of a folder that may only be read, or whose disk is full: where new entries go.
_instead: dict[Path, tempfile.TemporaryDirectory[str]] = {}
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)
# The precompiled header has 50 MB, and compilers write beside it.
_LEAST_FREE = 64 << 20


def _folder_to_write() -> Path:
    """The cache's folder, or a temporary one in its place. Raises CacheNotWritable."""
    root = _root()
    if root not in _instead:
        try:
            root = cache_dir()
            _require_space(root)
            return root
        except CacheNotWritable as error:
            if getattr(error.__cause__, "errno", None) not in _READ_ONLY:
                raise
            with _verified_lock:  # several threads build
                if root not in _instead:
                    _instead[root] = tempfile.TemporaryDirectory(prefix="kgen-cache-", ignore_cleanup_errors=True)
                    text = f"kgen: {error}\n  until then, what is built is lost with the process"
                    warnings.warn(text, RuntimeWarning, stacklevel=3)
    return Path(_instead[root].name)


def _require_space(root: Path) -> None:
    """Raises CacheNotWritable where the folder's disk is nearly full, and the one of temporary files is not."""
    left = free_bytes(root)
    if left < _LEAST_FREE <= free_bytes(Path(tempfile.gettempdir())):
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        cause = f"{left / 1e6:.0f} MB are free, and kgen needs {_LEAST_FREE / 1e6:.0f}"
        raise CacheNotWritable(path=root.parent, cause=cause) from full


def free_bytes(folder: Path) -> int:
    """What may still be written to the folder's disk."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def has_space() -> bool:
    """Whether what kgen builds has room on the cache's disk."""
    return free_bytes(cache_dir()) >= _LEAST_FREE


def _place(kind: str, key: str, suffix: str = "") -> Path:
    """Where to look for an entry. Makes nothing."""
    root, name = _root(), f"{key}{suffix}"
    place = root / kind / name
    if root in _instead and not place.exists():
        return Path(_instead[root].name) / kind / name
    return place


def _require_writable(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise CacheNotWritable(path=root.parent, cause=error.strerror or error) from error


def path(kind: str, key: str, suffix: str = "") -> Path:
    """Where an entry is to be written; its folder exists."""
    folder = _folder_to_write() / kind
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError:  # someone removed the whole cache under a running process
        folder.mkdir(parents=True)
    return folder / f"{key}{suffix}"


def get(kind: str, key: str) -> bytes | None:
    """The data stored under `key`, or None. A damaged entry is dropped with a warning."""
    place = _place(kind, key)
    try:
        raw = place.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        counters.add(f"cache.miss.{kind}")
        return None
    data = raw[: -_TRAILER.size]
    if not _trailer_fits(raw[-_TRAILER.size :], data):
        _drop_damaged(place)
        counters.add(f"cache.miss.{kind}")
        return None
    counters.add(f"cache.hit.{kind}")
    return data


def put(kind: str, key: str, data: bytes) -> Path:
    """Store `data`; the last writer wins. Raises CacheNotWritable."""
    place = path(kind, key)
    _write(place, data)
    return place


def find(kind: str, key: str, suffix: str = "") -> Path | None:
    """The path of an entry that other programs read as a file, its checksum verified once per process and version."""
    place = _place(kind, key, suffix)
    try:
        status = place.stat()
    except (FileNotFoundError, NotADirectoryError):
        counters.add(f"cache.miss.{kind}")
        return None
    stamp = (status.st_mtime_ns, status.st_size)
    with _verified_lock:
        known = _verified.get(place) == stamp
    if not known:
        raw = place.read_bytes()
        if not _trailer_fits(raw[-_TRAILER.size :], raw[: -_TRAILER.size]):
            _drop_damaged(place)
            counters.add(f"cache.miss.{kind}")
            return None
        with _verified_lock:
            _verified[place] = stamp
    counters.add(f"cache.hit.{kind}")
    return place


def put_file(kind: str, key: str, suffix: str, source: Path) -> Path:
    """Store a copy of the file `source`, executable bits kept. Raises CacheNotWritable."""
    place = path(kind, key, suffix)
    _write(place, source.read_bytes(), mode=source.stat().st_mode & 0o777)
    return place


def adopt(kind: str, key: str, suffix: str = "") -> bool:
    """Whether the folder in use has got an entry from the folder that the user has by default. For what a machine needs once,
    whatever the program: another folder is no reason to build it again."""
    source = _default_place(kind, key, suffix)
    return source is not None and _copied(source, path(kind, key, suffix))


def share(kind: str, key: str, suffix: str = "") -> None:
    """Puts an entry into the folder that the user has by default too, for `adopt`. Where that cannot be written, nothing."""
    place = _default_place(kind, key, suffix)
    if place is not None:
        _copied(_place(kind, key, suffix), place)


def _default_place(kind: str, key: str, suffix: str) -> Path | None:
    """None where that folder is the one in use."""
    root = config.default_cache_path() / _VERSION
    return None if root == _root() else root / kind / f"{key}{suffix}"


def _copied(source: Path, place: Path) -> bool:
    """Whether `place` is there, with a copy of the file or folder `source` if that is."""
    if not source.exists() or place.exists():
        return place.exists()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".writing-") as scratch:
            made = Path(scratch) / place.name
            if source.is_dir():
                shutil.copytree(source, made)
            else:
                shutil.copy2(source, made)
            made.replace(place)
    except OSError:  # not writable, or another process was faster
        return place.exists()
    return True


def drop(place: Path) -> None:
    """Forget one entry; absent is fine."""
    with _verified_lock:
        _verified.pop(place, None)
    if place.is_dir():
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)


def _write(place: Path, data: bytes, mode: int = 0o644) -> None:
    trailer = _TRAILER.pack(hashlib.sha256(data).digest(), len(data), _MAGIC)
    try:
        descriptor, name = tempfile.mkstemp(dir=place.parent, prefix=".writing-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.write(trailer)
                os.fchmod(file.fileno(), mode)
            Path(name).replace(place)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CacheNotWritable(path=place.parent, cause=error.strerror or error) from error


def _trailer_fits(trailer: bytes, data: bytes) -> bool:
    if len(trailer) != _TRAILER.size:
        return False
    digest, length, magic = _TRAILER.unpack(trailer)
    return bool(magic == _MAGIC and length == len(data) and digest == hashlib.sha256(data).digest())


def _drop_damaged(place: Path) -> None:
    counters.add("cache.damaged")
    warnings.warn(f"kgen: the cache entry {place} is damaged and will be made again", RuntimeWarning, stacklevel=3)
    with contextlib.suppress(OSError):  # of a folder that may only be read
        drop(place)


@contextlib.contextmanager
def lock(kind: str, key: str) -> Iterator[None]:
    """Held by one process and thread at a time. Look the entry up again inside: the previous holder may have made it."""
    with locked(path("locks", f"{kind}-{key}")):
        yield


@contextlib.contextmanager
def locked(place: Path) -> Iterator[None]:
    """Locks a file for one process and thread at a time. The file stays: else two could lock two files of one name."""
    with place.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file unlocks it


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A folder on the cache's file system, so that what is made in it can be renamed into the cache; removed at the end."""
    with tempfile.TemporaryDirectory(dir=path("scratch", "."), prefix=f"{prefix}-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def list_entries(kind: str | None = None) -> list[Entry]:
    """All entries, of one kind or of every kind, oldest first."""
    found = []
    for folder in sorted(_root().iterdir()) if _root().is_dir() else ():
        if folder.name in ("locks", "scratch") or (kind is not None and folder.name != kind):
            continue
        found += [_entry(folder.name, place) for place in folder.iterdir() if not place.name.startswith(".")]
    return sorted(found, key=lambda entry: (entry.modified, entry.key))


def _entry(kind: str, place: Path) -> Entry:
    files = [p for p in place.rglob("*") if p.is_file()] if place.is_dir() else [place]
    total = sum(p.stat().st_size for p in files)
    return Entry(kind, place.name, place, total, place.stat().st_mtime)


def stats() -> dict[str, dict[str, int]]:
    """Per kind: entries and bytes on disk, hits and misses of this process."""
    table: dict[str, dict[str, int]] = {}
    for entry in list_entries():
        row = table.setdefault(entry.kind, {"entries": 0, "bytes": 0})
        row["entries"] += 1
        row["bytes"] += entry.bytes
    for what in ("hit", "miss"):
        for name, count in counters.snapshot(f"cache.{what}.").items():
            table.setdefault(name.split(".", 2)[2], {"entries": 0, "bytes": 0})[what] = count
    return table


def clear(kind: str | None = None) -> int:
    """Remove all entries, or those of one kind, and return how many. Libraries already loaded stay usable."""
    entries = list_entries(kind)
    for entry in entries:
        drop(entry.path)
    return len(entries)


# ---- keys -----------------------------------------------------------------------------------------------------------


def stable_hash(value: Any) -> str:
    """A hex digest that is equal in every process for equal values, and differs where a type or value differs.

    Takes None, bool, int, float, complex, str, bytes, paths, enums, torch dtypes, devices and layouts, tuples, lists, sets,
    mappings, dataclasses, and objects with a method `__cache_key__` that returns such a value. Anything else raises
    UnhashableKey: a key that silently leaves something out returns wrong code later."""
    digest = hashlib.sha256()
    for chunk in _chunks(value):
        digest.update(b"%d:" % len(chunk))
        digest.update(chunk)
    return digest.hexdigest()[:40]


def _chunks(value: Any) -> Iterator[bytes]:
    scalar = _scalar(value)
    if scalar is not None:
        yield scalar
        return
    name, parts = _children(value)
    yield f"{name}[{len(parts)}]".encode()
    for part in parts:
        yield from _chunks(part)


_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def _scalar(value: Any) -> bytes | None:
    if value is None or isinstance(value, bool):
        return repr(value).encode()
    if isinstance(value, enum.Enum):
        return f"{_type_name(value)}.{value.name}".encode()
    if isinstance(value, int):
        return b"i" + str(int(value)).encode()
    if isinstance(value, float):
        return b"f" + value.hex().encode()
    if isinstance(value, complex):
        return f"c{value.real.hex()}{value.imag.hex()}".encode()
    if isinstance(value, str):
        return b"s" + value.encode()
    if isinstance(value, bytes):
        return b"b" + value
    if isinstance(value, os.PathLike):
        return b"p" + os.fsencode(value)
    if isinstance(value, _TORCH):
        return f"{type(value).__name__}:{value}".encode()
    return None


def _children(value: Any) -> tuple[str, list[Any]]:
    if hasattr(value, "__cache_key__"):
        return _type_name(value), [value.__cache_key__()]
    if isinstance(value, tuple | list):
        return type(value).__name__ if type(value) in (tuple, list) else _type_name(value), list(value)
    if isinstance(value, Mapping):
        pairs = sorted(((stable_hash(k), k, v) for k, v in value.items()), key=lambda pair: pair[0])
        return "map", [part for _, k, v in pairs for part in (k, v)]
    if isinstance(value, set | frozenset):
        return "set", sorted(map(stable_hash, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _type_name(value), [part for f in dataclasses.fields(value) for part in (f.name, getattr(value, f.name))]
    raise UnhashableKey(kind=_type_name(value), value=repr(value)[:200])


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
