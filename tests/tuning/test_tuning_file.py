"""The tuning file: what it finds, that nothing is lost between processes, and that no damage to it is fatal."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kgen import cache, config
from kgen.counters import counters
from kgen.errors import InvalidTuningEntry, TuningFileNotAFile, TuningFileNotReadable, TuningFileNotWritable
from kgen.tuning import store, text
from kgen.tuning.entry import Change, Entry, Key, diff, merge, now
from kgen.tuning.store import TuningFile, read_file, stores

pytestmark = pytest.mark.none

VERSIONS = {"tiles": "1", "row": "7"}


def key(m: int = 512, n: int = 256, dynamic: tuple[str, ...] = (), **other: Any) -> Key:
    return Key(**{"device": "GPU", "form": "ab12", "sizes": (("m", m), ("n", n)), "dynamic": dynamic, **other})


def entry(of: Key | None = None, **other: Any) -> Entry:
    values = {
        "template": "tiles", "version": "1", "config": (("WARPS", 4), ("BLOCK_M", 64), ("ORDER", "grouped")),
        "seconds": 1.25e-4, "library_seconds": 2e-4, "measured": 9, "made": "2026-01-02T03:04:05.000Z", "by": "kgen 0.1",
    }  # fmt: skip
    return Entry(of or key(), **{**values, **other})


@pytest.fixture
def file(tmp_path: Path) -> TuningFile:
    counters.reset("tuning.")
    return TuningFile(tmp_path / "tuning.json")


# ---- keys and entries ---------------------------------------------------------------------------------------------------


def test_a_title_does_not_count_and_neither_does_the_order_of_axes() -> None:
    assert key(title="mm") == key(title="addmm")
    assert hash(key(title="mm")) == hash(key(title="addmm"))
    turned = Key("GPU", "ab12", (("n", 256), ("m", 512)), ("n", "m"))
    assert turned == key(dynamic=("m", "n"))
    assert hash(turned) == hash(key(dynamic=("m", "n")))


DIFFERENT = [
    key(m=513), key(n=512, m=256), key(dynamic=("m",)), key(device="CPU"), key(form="ab13"), key(numerics="stable"),
]  # fmt: skip


def test_everything_else_counts(file: TuningFile) -> None:
    file.write([entry()])
    for other in DIFFERENT:
        assert other != key()
        assert file.find(other, VERSIONS) is None
    assert file.find(key(), VERSIONS) == entry()


@pytest.mark.parametrize(
    "wrong",
    [
        {"template": ""},
        {"template": 3},
        {"version": None},
        {"config": (("A", None),)},
        {"config": (("A", math.inf),)},
        {"config": (("A", 1), ("A", 2))},
        {"config": ((1, 2),)},
        {"seconds": 0.0},
        {"seconds": -1.0},
        {"seconds": math.nan},
        {"seconds": "1"},
        {"library_seconds": 0.0},
        {"library_seconds": math.inf},
        {"measured": 1.5},
        {"measured": True},
        {"made": "yesterday"},
        {"made": "2026-01-02T03:04:05.000+01:00"},
        {"made": "2026-01-02T03:04:05Z"},
        {"by": None},
    ],
    ids=str,
)
def test_an_entry_checks_itself(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidTuningEntry, match=next(iter(wrong))):
        entry(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": None},
        {"title": 1},
        {"sizes": (("m", 1.0),)},
        {"sizes": (("m", True),)},
        {"sizes": (("m", -1),)},
        {"sizes": (("m", 1), ("m", 2))},
        {"dynamic": ("k",)},
        {"dynamic": ("m", "m")},
    ],
    ids=str,
)
def test_a_key_checks_itself(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidTuningEntry, match=next(iter(wrong))):
        key(**wrong)


def test_times_sort_as_texts() -> None:
    first = entry(made=now()).made
    time.sleep(0.002)
    assert entry().made < first < now()


words = st.text(max_size=8)
sizes = st.dictionaries(words, st.integers(0, 1 << 40), max_size=4)
settings_of_knobs = st.one_of(st.booleans(), st.integers(), words, st.floats(allow_nan=False, allow_infinity=False))
times = st.floats(min_value=0, max_value=1e9, exclude_min=True)


@st.composite
def keys(draw: st.DrawFn) -> Key:
    axes = draw(sizes)
    dynamic = draw(st.sets(st.sampled_from(sorted(axes)))) if axes else set()
    return Key(draw(words), draw(words), tuple(axes.items()), tuple(dynamic), draw(words), draw(words))


entries = st.builds(
    Entry,
    keys(),
    st.none() | st.text(min_size=1, max_size=8),
    words,
    st.dictionaries(words, settings_of_knobs, max_size=4).map(lambda knobs: tuple(knobs.items())),
    times,
    times | st.floats(allow_infinity=False, min_value=1.0).map(lambda _: float("nan")),
    st.integers(0, 1000),
    st.datetimes().map(lambda when: f"{when:%Y}".zfill(4) + f"-{when:%m-%dT%H:%M:%S}.000Z"),
    words,
)


@given(st.lists(entries, max_size=6), words)
def test_fuzz_round_trip(made: list[Entry], comment: str) -> None:
    contents = text.Contents(merge(made), comment)
    written = text.write(contents)
    again = text.read(written)
    assert again == contents
    # as texts they show titles, and whether a knob is 1 or True
    assert sorted(map(repr, again.entries.values())) == sorted(map(repr, contents.entries.values()))
    assert text.write(again) == written
    assert written.count("\n") == len(contents.entries) + 7


few = st.lists(st.builds(entry, st.builds(key, st.integers(1, 3)), seconds=times, made=st.sampled_from([entry().made, now()])))


@given(few, few, few)
def test_fuzz_merging_has_no_order(a: list[Entry], b: list[Entry], c: list[Entry]) -> None:
    assert merge([*a, *b, *c]) == merge([*merge([*c, *b]).values(), *a])
    for made in merge([*a, *b]).values():
        assert made in a or made in b
        assert all(made.made >= other.made for other in [*a, *b] if other.key == made.key)


def test_differences() -> None:
    same, old, new, gone, more = entry(key(1)), entry(key(2)), entry(key(2), seconds=1.0), entry(key(3)), entry(key(4))
    changes = [Change(key(2), old, new), Change(key(3), gone, None), Change(key(4), None, more)]
    assert diff([same, old, gone], [more, new, same]) == changes
    assert diff([old, same], [same, old]) == []


# ---- looking up ---------------------------------------------------------------------------------------------------------


def test_a_missing_file_has_no_entries_and_is_not_made(file: TuningFile) -> None:
    assert file.find(key(), VERSIONS) is None
    assert file.entries() == []
    assert not file.path.exists()
    assert counters.snapshot("tuning.") == {"tuning.miss": 1}


def test_an_added_entry_is_found_also_by_others(file: TuningFile) -> None:
    assert file.find(key(), VERSIONS) is None
    TuningFile(file.path).add([entry()])
    assert file.find(key(), VERSIONS) == entry()
    assert file.entries() == [entry()]
    assert counters["tuning.hit"] == 1


def test_stale_entries_are_ignored_and_replaced(file: TuningFile) -> None:
    file.write([entry(version="0"), entry(key(1), template="gone")])
    assert file.find(key(), VERSIONS) is None
    assert file.find(key(1), VERSIONS) is None
    assert counters["tuning.stale"] == 2
    again = entry(made=now())
    file.write([again])
    assert file.find(key(), VERSIONS) == again
    assert len(file.entries()) == 2


def test_the_library_is_as_current_as_the_templates_it_was_compared_with(file: TuningFile) -> None:
    file.write([entry(template=None, version=""), entry(key(1), template=None, version="all1")])
    assert file.find(key(), VERSIONS) is not None
    assert file.find(key(1), VERSIONS) is None
    assert file.find(key(1), {**VERSIONS, "": "all1"}) is not None
    assert file.find(key(), {**VERSIONS, "": "all1"}) is None


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (512, 512), (600, 512), (1024, 512), (2048, 512), (2049, None), (128, 512), (127, None), (100_000, 65536), (0, None),
    ],
)  # fmt: skip
def test_the_nearest_bucket_up_to_a_factor_of_four(file: TuningFile, asked: int, found: int | None) -> None:
    file.write([entry(key(m, dynamic=("m",))) for m in (512, 65536)])
    hit = file.find(key(asked, dynamic=("m",)), VERSIONS)
    assert (dict(hit.key.sizes)["m"] if hit else None) == found
    name = "miss" if found is None else "hit" if found == asked else "near"
    assert counters.snapshot("tuning.") == {f"tuning.{name}": 1}


def test_only_along_dynamic_axes(file: TuningFile) -> None:
    file.write([entry(key(512, 256, ("m",))), entry(key(8, 8))])
    assert file.find(key(256, 256, ("m",)), VERSIONS) is not None
    assert file.find(key(512, 255, ("m",)), VERSIONS) is None
    assert file.find(key(512, 256, ("n",)), VERSIONS) is None
    assert file.find(key(512, 256, ("m", "n")), VERSIONS) is None
    assert file.find(key(512, 256), VERSIONS) is None
    assert file.find(key(9, 8), VERSIONS) is None
    assert file.find(key(256, 256, ("m",), numerics="stable"), VERSIONS) is None


def test_nearness_is_the_sum_over_axes_and_no_axis_may_be_far(file: TuningFile) -> None:
    both = ("m", "n")
    file.write([entry(key(1024, 1024, both)), entry(key(256, 64, both))])
    near = file.find(key(256, 256, both), VERSIONS)
    assert near is not None
    assert near.key == key(256, 64, both)
    assert file.find(key(1024, 16, both), VERSIONS) == near
    assert file.find(key(1025, 8, both), VERSIONS) is None


@pytest.mark.parametrize("turn", [1, -1])
def test_ties_have_one_answer(file: TuningFile, turn: int) -> None:
    """Whatever the order in the file, which `git merge` may change."""
    rows = [row(sizes={"m": m, "n": 256}, dynamic=["m"]) for m in (256, 1024)]
    file.path.write_text(whole(*rows[::turn]))
    hit = file.find(key(512, dynamic=("m",)), VERSIONS)
    assert hit is not None
    assert hit.key == key(256, dynamic=("m",))


def test_of_two_files_as_near_the_earlier_one(tmp_path: Path) -> None:
    mine, shipped = (TuningFile(tmp_path / name) for name in ("mine.json", "shipped.json"))
    mine.write([entry(key(1024, dynamic=("m",)))])
    shipped.write([entry(key(256, dynamic=("m",)))])
    hit = store.Chain((mine, shipped)).find(key(512, dynamic=("m",)), VERSIONS)
    assert hit is not None
    assert hit.key == key(1024, dynamic=("m",))


def test_an_axis_of_length_zero_is_near_to_one(file: TuningFile) -> None:
    file.write([entry(key(0, 0, ("m",)))])
    assert file.find(key(4, 0, ("m",)), VERSIONS) is not None
    assert file.find(key(5, 0, ("m",)), VERSIONS) is None


def test_a_stale_neighbour_gives_way_to_one_farther_off(file: TuningFile) -> None:
    file.write([entry(key(512, dynamic=("m",)), version="0"), entry(key(1024, dynamic=("m",)))])
    hit = file.find(key(512, dynamic=("m",)), VERSIONS)
    assert hit is not None
    assert hit.key == key(1024, dynamic=("m",))
    assert counters["tuning.stale"] == 1


def test_the_chain_asks_the_users_file_first(tmp_path: Path) -> None:
    mine, shipped = (TuningFile(tmp_path / name) for name in ("mine.json", "shipped.json"))
    asked = key(512, dynamic=("m",))
    files = store.Chain((mine, shipped))
    shipped.write([entry(asked, seconds=1.0)])
    assert files.find(asked, VERSIONS) == entry(asked, seconds=1.0)
    mine.write([entry(key(256, dynamic=("m",)))])
    assert files.find(asked, VERSIONS) == entry(asked, seconds=1.0), "exact before near"
    files.add([entry(asked, seconds=2.0)])
    assert files.find(asked, VERSIONS) == entry(asked, seconds=2.0)
    assert shipped.entries() == [entry(asked, seconds=1.0)]
    mine.write([entry(asked, version="0", made=now())])
    assert files.find(asked, VERSIONS) == entry(asked, seconds=1.0), "a stale entry hides nothing"


def test_where_the_users_file_is(tmp_path: Path) -> None:
    first = stores(config.Config(cache_dir=str(tmp_path))).files[0]
    assert first.path == tmp_path / "tuning.json"
    first = stores(config.Config(cache_dir=str(tmp_path), tuning_file=str(tmp_path / "own"))).files[0]
    assert first.path == tmp_path / "own"


def test_shipped_files_are_current_and_as_they_would_be_written() -> None:
    shipped = sorted(store.SHIPPED.glob("*.json"))
    assert [file.path for file in stores(config.current()).files[1:]] == shipped
    assert "h200.json" in [path.name for path in shipped]
    for path in shipped:
        contents = read_file(path)
        assert contents.problems == ()
        assert contents.comment
        assert text.write(contents) == path.read_text()


# ---- writing ------------------------------------------------------------------------------------------------------------


def test_the_newer_measurement_stays(file: TuningFile) -> None:
    old, new = entry(seconds=1.0), entry(made=now())
    file.write([new])
    file.write([old])
    assert file.entries() == [new]
    file.path.unlink()
    file.write([old])
    file.write([dataclasses.replace(new, key=key(title="a better title"))])
    assert file.entries() == [new]
    assert file.entries()[0].key.title == "a better title"


def test_comment_mode_and_link_survive(file: TuningFile, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "real.json"
    target.parent.mkdir()
    target.write_text(text.write(text.Contents({}, "by hand")))
    target.chmod(0o664)
    file.path.symlink_to(target)
    linked = TuningFile(file.path)
    linked.write([entry()])
    assert file.path.is_symlink()
    assert read_file(target).comment == "by hand"
    assert target.stat().st_mode & 0o777 == 0o664
    assert sorted(path.name for path in target.parent.iterdir()) == ["real.json", "real.json.lock"]


def test_a_write_of_equal_size_in_the_same_tick_is_seen(file: TuningFile) -> None:
    for warps in (4, 8):
        file.write([entry(config=(("WARPS", warps),), made=f"2026-01-02T03:04:0{warps}.000Z")])
        os.utime(file.path, (1, 1))
        assert [dict(e.config) for e in file.entries()] == [{"WARPS": warps}]


WRITER = """
import sys
from kgen.tuning.entry import Entry, Key, now
from kgen.tuning.store import TuningFile
path, writer, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
file = TuningFile(path)
print("ready", flush=True)
sys.stdin.readline()
for i in range(count):
    key = Key("GPU", "form", (("writer", writer), ("i", i)))
    shared = Key("GPU", "form", (("all", i),))
    file.write([Entry(k, "t", "1", (), 1e-3, 2e-3, 1, now(), str(writer)) for k in (key, shared)])
    assert file.find(key, {"t": "1"}) is not None
"""


@pytest.mark.every(2)
@pytest.mark.parametrize("before", [None, "no JSON"])
def test_several_processes_lose_nothing(file: TuningFile, before: str | None) -> None:
    """Also not when all of them find the file broken: one sets it aside, and the others do not do so with what is new."""
    writers, count = 8, 20
    if before is not None:
        file.path.write_text(before)
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore" if before else "error", "-c", WRITER, str(file.path), str(writer), str(count)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for writer in range(writers)
    ]  # fmt: skip
    assert all(process.stdout.readline() == "ready\n" for process in running)  # they start together
    for process in running:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in running:
        process.communicate(timeout=300)
    assert [process.returncode for process in running] == [0] * writers
    found = {e.key for e in file.entries()}
    assert found == {Key("GPU", "form", (("writer", w), ("i", i))) for w in range(writers) for i in range(count)} | {
        Key("GPU", "form", (("all", i),)) for i in range(count)
    }
    aside = ["tuning.json.broken-1"] if before else []
    assert sorted(path.name for path in file.path.parent.iterdir()) == ["tuning.json", *aside, "tuning.json.lock"]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_merges_two_files(tmp_path: Path) -> None:
    """By lines, and where both sides wrote at one place, by `merge=union`: the rest is for the reader."""
    base = [entry(key(m)) for m in (100, 200, 300)]
    ours = [*base, entry(key(150)), entry(key(400)), entry(key(200), seconds=1.0, made=now())]
    theirs = [*base, entry(key(250)), entry(key(500)), entry(key(200), seconds=2.0)]
    for name, made in (("ours", ours), ("base", base), ("theirs", theirs)):
        (tmp_path / name).write_text(text.write(text.Contents(merge(made))))
    command = ["git", "merge-file", "-p", "--union", "ours", "base", "theirs"]
    merged = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    contents = text.read(merged)
    assert contents.problems == ()
    assert contents.entries == merge([*ours, *theirs])


# ---- damage -------------------------------------------------------------------------------------------------------------


def row(**changes: Any) -> dict[str, Any]:
    return {**json.loads(text.write(text.Contents(merge([entry()]))))["entries"][0], **changes}


def whole(*rows: Any, **changes: Any) -> str:
    return json.dumps({"schema": text.SCHEMA, "comment": "", "entries": [*rows], **changes})


BROKEN = {
    "not JSON": "this is no JSON",
    "cut off": whole(row())[:-20],
    "empty": "",
    "bytes": b"\xff\xfe\x00",
    "deep": "[" * 100_000,
    "a list": "[]",
    "no schema": '{"entries": []}',
    "schema": whole(schema=text.SCHEMA + 1),
    "entries": whole(entries={}),
    "comment": whole(comment=None),
    "conflict": whole(row()).replace('"comment"', '\n<<<<<<< ours\n"comment"'),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_a_reader_leaves_a_broken_file_where_it_is(file: TuningFile, data: str | bytes) -> None:
    data = data if isinstance(data, bytes) else data.encode()
    file.path.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="tuning.json is not used") as seen:
        assert file.find(key(), VERSIONS) is None
    assert file.entries() == []
    assert len(seen) == 1
    assert [(path.name, path.read_bytes()) for path in file.path.parent.iterdir()] == [("tuning.json", data)]


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_a_writer_sets_a_broken_file_aside_with_one_warning(file: TuningFile, data: str | bytes) -> None:
    data = data if isinstance(data, bytes) else data.encode()
    for number in (1, 2):
        file.path.write_bytes(data)
        aside = file.path.with_name(f"tuning.json.broken-{number}")
        with pytest.warns(RuntimeWarning, match="tuning.json was not used") as seen:
            file.write([entry()])
        assert file.find(key(), VERSIONS) == entry()
        assert len(seen) == 1
        assert str(aside) in str(seen[0].message)
        assert str(file.path) in str(seen[0].message)
        assert aside.read_bytes() == data


def test_a_file_that_another_process_has_just_repaired_is_not_set_aside(
    file: TuningFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.path.write_text("{}")
    read = store._read

    def read_then_repaired(path: Path) -> Any:
        loaded = read(path)
        if loaded.malformed:
            path.write_text(whole(row()))
        return loaded

    monkeypatch.setattr(store, "_read", read_then_repaired)
    with pytest.warns(RuntimeWarning, match="names no schema"):
        assert file.find(key(), VERSIONS) is None
    assert file.find(key(), VERSIONS) == entry()
    assert not list(file.path.parent.glob("*broken*"))


WRONG_ENTRIES = {
    "a number": 5,
    "a field less": {"device": "GPU"},
    "a field more": row(extra=1),
    "sizes": row(sizes=[["m", 1]]),
    "a size": row(sizes={"m": "1"}),
    "dynamic": row(dynamic="m"),
    "nested": row(dynamic=[["m"]]),
    "config": row(config=None),
    "a knob": row(config={"A": [1]}),
    "seconds": row(seconds=None),
    "made": row(made=20260102),
    "template": row(template={}),
}


@pytest.mark.parametrize("wrong", WRONG_ENTRIES.values(), ids=WRONG_ENTRIES)
def test_one_wrong_entry_is_left_out(file: TuningFile, wrong: Any) -> None:
    good = row(sizes={"m": 1, "n": 1})
    file.path.write_text(whole(wrong, good))
    with pytest.warns(RuntimeWarning, match=r"entry 1: .*cannot have the") as seen:
        assert file.entries() == [entry(key(1, 1))]
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert file.find(key(1, 1), VERSIONS) is not None
        file.write([entry(key(2))])
        assert file.entries() == [entry(key(1, 1)), entry(key(2))]
    assert len(json.loads(file.path.read_text())["entries"]) == 3


AS_ROOT = os.geteuid() == 0


@pytest.mark.skipif(AS_ROOT, reason="root may read and write everything")
def test_a_file_that_may_not_be_read_is_left_alone(file: TuningFile) -> None:
    file.write([entry()])
    file.path.chmod(0)
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert file.find(key(), VERSIONS) is None
    with pytest.raises(TuningFileNotWritable):
        file.write([entry(key(1))])
    file.path.chmod(0o600)
    assert file.entries() == [entry()]


def test_an_unreadable_file_is_never_overwritten(file: TuningFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, for root too: the system's refusal is played."""
    file.write([entry()])
    kept = file.path.read_text()
    opened = Path.open

    def refuse(path: Path, mode: str = "r", *rest: Any) -> Any:
        if path == file.path:
            raise PermissionError(13, "Permission denied")
        return opened(path, mode, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        with pytest.raises(TuningFileNotWritable, match="Permission denied"):
            file.write([entry(key(1))])
        os.utime(file.path, (1, 1))
        with pytest.warns(RuntimeWarning, match="cannot be read"):
            assert file.find(key(), VERSIONS) is None
    assert file.path.read_text() == kept
    assert not list(file.path.parent.glob("*broken*"))


def test_a_file_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = TuningFile(tmp_path / "file" / "tuning.json")
    with pytest.warns(RuntimeWarning, match="KGEN_TUNING_FILE"):
        file.add([entry()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TuningFile(file.path).add([entry()])
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert file.find(key(), VERSIONS) is None
    with pytest.raises(TuningFileNotWritable, match="KGEN_TUNING_FILE"):
        file.write([entry()])


def test_without_locks_nothing_is_written_or_moved(file: TuningFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(cache.fcntl, "flock", no_locks)
    with pytest.raises(TuningFileNotWritable, match="No locks available"):
        file.write([entry()])
    assert not file.path.exists()
    file.path.write_text("{}")
    with pytest.warns(RuntimeWarning, match="names no schema$"):
        assert file.find(key(), VERSIONS) is None
    assert file.path.read_text() == "{}"


def test_a_write_that_fails_half_way_changes_nothing(file: TuningFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write([entry()])
    kept = file.path.read_text()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(TuningFileNotWritable, match="No space left"):
        file.write([entry(key(1))])
    assert file.path.read_text() == kept
    assert sorted(path.name for path in file.path.parent.iterdir()) == ["tuning.json", "tuning.json.lock"]


def test_a_folder_or_device_is_no_tuning_file(tmp_path: Path) -> None:
    with pytest.raises(TuningFileNotAFile, match="is a folder"):
        stores(config.Config(tuning_file=str(tmp_path)))
    with pytest.raises(TuningFileNotAFile, match="is a device"):
        TuningFile("/dev/null")


def test_reading_for_a_command_moves_nothing(file: TuningFile) -> None:
    with pytest.raises(TuningFileNotReadable, match="no such file"):
        read_file(file.path)
    file.path.write_text("{}")
    with pytest.raises(TuningFileNotReadable, match="names no schema"):
        read_file(file.path)
    assert file.path.read_text() == "{}"
    with pytest.raises(TuningFileNotReadable):
        read_file(file.path.parent)


def test_removing(file: TuningFile) -> None:
    file.write([entry(), entry(key(1))])
    assert file.remove() == 2
    assert not file.path.exists()
    assert file.remove() == 0
