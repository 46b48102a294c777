"""The store on disk: round trips, damage, several processes, keys."""

from __future__ import annotations

import dataclasses
import enum
import errno
import os
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from kgen import cache
from kgen.counters import counters
from kgen.errors import CacheNotWritable, UnhashableKey


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path / "cache"))
    counters.reset("cache.")
    return tmp_path / "cache"


def test_round_trip():
    assert cache.get("graph", "k") is None
    cache.put("graph", "k", b"data" * 1000)
    assert cache.get("graph", "k") == b"data" * 1000
    cache.put("graph", "k", b"")
    assert cache.get("graph", "k") == b""
    assert counters.snapshot("cache.") == {"cache.hit.graph": 2, "cache.miss.graph": 1}


def test_where_it_is(monkeypatch, tmp_path, folder):
    assert cache.cache_dir().parent == folder
    monkeypatch.delenv("KGEN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_dir().parent == tmp_path / "xdg" / "kgen"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.cache_dir().parent == tmp_path / "home" / ".cache" / "kgen"


def test_unwritable_folder_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(CacheNotWritable, match="set KGEN_CACHE_DIR"):
        cache.put("graph", "k", b"")


def test_a_folder_that_may_only_be_read_serves_what_it_has(monkeypatch, folder):
    """An image with a warmed cache: nothing is written there, and what is missing is kept for the process alone."""
    place = cache.put("graph", "old", b"data")
    before = sorted(folder.rglob("*"))

    def refuse(root):
        raise CacheNotWritable(path=root, cause="Read-only file system") from OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(cache, "_require_writable", refuse)
    monkeypatch.setattr(cache, "_usable", set())
    monkeypatch.setattr(cache, "_instead", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get("graph", "old") == b"data"
        assert cache.find("graph", "old") == place
        assert cache.get("graph", "new") is None
    with pytest.warns(RuntimeWarning, match="Read-only file system"):
        cache.put("graph", "new", b"more")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put("graph", "newer", b"")
    assert cache.get("graph", "new") == b"more"
    assert cache.get("graph", "old") == b"data"
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("full", [False, True])
def test_a_full_disk_is_no_error(monkeypatch, folder, full):
    """A compilation that found no room for a header ended the program."""
    cache.put("graph", "old", b"data")
    monkeypatch.setattr(cache, "_instead", {})
    monkeypatch.setattr(cache, "free_bytes", lambda where: 5_000_000 if full and where == folder / "v1" else 1 << 40)
    before = sorted(folder.rglob("*"))
    with pytest.warns(RuntimeWarning, match=r"5 MB are free.*\n.*KGEN_CACHE_DIR") if full else nullcontext():
        cache.put("graph", "new", b"more")
    with cache.scratch("made") as made:
        assert made.is_relative_to(folder) != full
    assert (sorted(folder.rglob("*")) == before) == full
    assert (cache.get("graph", "old"), cache.get("graph", "new")) == (b"data", b"more")


@pytest.mark.parametrize("damage", ["truncate", "empty", "flip", "append"])
def test_damaged_entries_are_dropped_with_a_warning(damage):
    place = cache.put("graph", "k", b"data" * 100)
    raw = bytearray(place.read_bytes())
    if damage == "truncate":
        del raw[200:]
    elif damage == "empty":
        raw.clear()
    elif damage == "flip":
        raw[17] ^= 1
    else:
        raw += b"more"
    place.write_bytes(bytes(raw))
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert cache.get("graph", "k") is None
    assert not place.exists()
    assert counters["cache.damaged"] == 1


def test_files_are_checked_once(tmp_path):
    source = tmp_path / "made.bin"
    source.write_bytes(b"library")
    place = cache.put_file("cpp", "k", ".so", source)
    assert cache.find("cpp", "k", ".so") == place
    assert place.read_bytes().startswith(b"library")
    place.write_bytes(b"libra")
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert cache.find("cpp", "k", ".so") is None
    assert cache.find("cpp", "k", ".so") is None


def test_another_folder_gets_what_the_default_one_has(monkeypatch, tmp_path, folder):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    (tmp_path / "source").write_bytes(b"a library")
    made = cache.put_file("runtime", "k", ".so", tmp_path / "source")
    header = cache.path("header", "h")
    header.mkdir()
    (header / "kernel.h").write_text("text")
    cache.share("runtime", "k", ".so")
    cache.share("header", "h")
    cache.share("runtime", "absent")
    monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path / "other"))
    assert cache.find("runtime", "k", ".so") is None
    assert cache.adopt("runtime", "k", ".so")
    assert cache.adopt("header", "h")
    assert not cache.adopt("runtime", "absent")
    found = cache.find("runtime", "k", ".so")
    assert found != made
    assert found.read_bytes().startswith(b"a library")
    assert (cache.path("header", "h") / "kernel.h").read_text() == "text"
    found.write_bytes(b"damaged")  # a copy: the default folder's stays as it is
    assert (tmp_path / "user" / "kgen" / "v1" / "runtime" / "k.so").read_bytes().startswith(b"a library")


def test_a_default_folder_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "user").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    (tmp_path / "source").write_bytes(b"a library")
    cache.put_file("runtime", "k", ".so", tmp_path / "source")
    cache.share("runtime", "k", ".so")
    assert not cache.adopt("runtime", "other", ".so")


def test_listing_stats_and_clear(tmp_path):
    cache.put("graph", "a", b"x" * 10)
    cache.put("graph", "b", b"y" * 20)
    cache.put("autotune", "c", b"")
    header = cache.path("header", "folder")
    header.mkdir()
    (header / "big").write_bytes(bytes(1000))
    with cache.lock("graph", "a"), cache.scratch("x"):
        pass
    assert [e.key for e in cache.list_entries("graph")] == ["a", "b"]
    assert cache.stats()["graph"]["entries"] == 2
    assert cache.stats()["header"]["bytes"] == 1000
    assert cache.clear("graph") == 2
    assert cache.clear() == 2
    assert cache.list_entries() == []


def test_it_may_be_removed_while_in_use(folder):
    cache.put("graph", "a", b"x")
    for root, _, files in os.walk(folder):
        for file in files:
            (Path(root) / file).unlink()
    assert cache.get("graph", "a") is None
    cache.put("graph", "a", b"x")
    assert cache.get("graph", "a") == b"x"


_WRITER = """
import sys
from kgen import cache
seed = int(sys.argv[1])
built = 0
for round in range(20):
    for key in range(5):
        expected = bytes([key]) * 100_000
        cache.put("shared", str(key), expected)
        found = cache.get("shared", str(key))
        assert found == expected, (key, found and len(found))
    with cache.lock("once", str(round)):
        if cache.get("once", str(round)) is None:
            built += 1
            cache.put("once", str(round), b"x")
print(built)
"""


def test_several_processes_at_once():
    """No half entry is ever seen, and what is built under the lock is built once in all."""
    writers = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", _WRITER, str(seed)], stdout=subprocess.PIPE, text=True)
        for seed in range(3)
    ]
    built = [int(writer.communicate(timeout=120)[0]) for writer in writers]
    assert all(writer.returncode == 0 for writer in writers)
    assert sum(built) == 20


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Plan:
    name: str
    sizes: tuple[int, ...]


class Named:
    def __cache_key__(self):
        return ("named", 3)


DISTINCT = [
    None, True, 1, 1.0, "1", b"1", (1,), [1], {1}, {1: 2}, {1: (2,)}, (1, 2), ((1,), 2), (1, (2,)), ("a", "bc"), ("ab", "c"),
    (), "", 1j, -0.0, 0.0, float("inf"), torch.float32, torch.float16, torch.device("cpu"), torch.strided, Colour.RED,
    Plan("a", (1,)), Plan("a", (2,)), Path("/a"), "/a", Named(),
]  # fmt: skip


def test_keys_differ():
    keys = [cache.stable_hash(value) for value in DISTINCT]
    assert len(set(keys)) == len(DISTINCT)


def test_keys_do_not_depend_on_order_or_process():
    value = {"b": {3, 1, 2}, "a": Plan("x", (1, 2)), "c": frozenset({"p", "q"})}
    assert cache.stable_hash(value) == cache.stable_hash(dict(reversed(value.items())))
    code = "from kgen import cache; print(cache.stable_hash({'b': {'p', 'q', 'r'}, 'a': (1, 2.5, None)}))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": seed}, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


@pytest.mark.parametrize("value", [object(), lambda: None, torch.zeros(1), [object()], Plan])
def test_what_has_no_key_raises(value):
    with pytest.raises(UnhashableKey):
        cache.stable_hash(value)
