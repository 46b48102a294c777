"""The one form of benches' files: written, read, refused where it is wrong, and shown by `bench.report`."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from bench import report
from bench.measurements import MACHINE, SCHEMA, Entry, NotMeasurements, named, problems_of, read, rows_in, write

pytestmark = pytest.mark.none
ROOT = Path(__file__).resolve().parents[2]
ROWS: list[dict[str, Any]] = [
    {"name": "relu", "times": {"kgen": {"median": 1e-6, "low": 9e-7}, "eager": {"median": 3e-6}}, "floor": 5e-7},
    {"number": "7", "results": {"kgen": {"seconds": 2e-6}}, "failed": {"eager": "RuntimeError: no memory"}},
    {"name": "sum", "seconds": {"kgen": 4e-6, "eager": 4e-6}},
]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    write(tmp_path / "new" / "a.json", "host_overhead", ROWS, {"copy_rate": 3e12})
    return tmp_path / "new" / "a.json"


def test_a_file_says_where_and_how_it_was_measured(stored: Path) -> None:
    found = read(stored)
    assert (found.bench, found.schema, found.facts) == ("host_overhead", SCHEMA, {"copy_rate": 3e12})
    assert found.machine.keys() >= set(MACHINE)
    assert found.card
    assert [entry.name for entry in found.entries] == ["relu", "7", "sum"]
    assert found.entries[0].seconds == {"kgen": 1e-6, "eager": 3e-6}
    assert found.entries[1].failed == {"eager": "RuntimeError: no memory"}
    assert found.rows == ROWS
    assert list(stored.parent.iterdir()) == [stored]


def test_a_run_goes_on_with_its_file(stored: Path, tmp_path: Path) -> None:
    assert rows_in(stored) == ROWS
    assert rows_in(stored, append=False) == rows_in(None) == rows_in(tmp_path / "none.json") == []


def test_rows_by_name_are_a_list() -> None:
    assert named({"a": {"x": 1}, 3: {}}) == [{"name": "a", "x": 1}, {"name": "3"}]


WRONG: dict[str, tuple[Any, str]] = {
    "a list": ([], "it is no object"),
    "no schema": ({"rows": []}, "its schema is None, not 1"),
    "no entries": ({"entries": None}, "entries is no list"),
    "more than it may have": ({"rows": []}, "rows is unknown"),
    "no date": ({"machine": {}}, "the machine's date is missing"),
    "an entry without details": ({"entries": [{"name": "a", "seconds": {}, "failed": {}}]}, "entry 0 does not have name, "),
    "an entry without a name": ({"entries": [{"name": "", "seconds": {}, "failed": {}, "details": {}}]}, "entry 0 has no name"),
    "seconds that are text": (
        {"entries": [{"name": "a", "seconds": {"kgen": "fast"}, "failed": {}, "details": {}}]},
        "kgen of 'a' took 'fast' seconds",
    ),
    "one that failed and ran": (
        {"entries": [{"name": "a", "seconds": {"kgen": 1.0}, "failed": {"kgen": "x"}, "details": {}}]},
        "kgen of 'a' ran and failed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said(stored: Path, what: str) -> None:
    change, message = WRONG[what]
    good = json.loads(stored.read_text())
    assert problems_of(good) == []
    bad = {**good, **change} if isinstance(change, dict) and what != "no schema" else change
    assert message in problems_of(bad)[0]
    stored.write_text(json.dumps(bad))
    with pytest.raises(NotMeasurements, match="is not of the form of bench/measurements"):
        read(stored)


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(NotMeasurements, match="two entries are called 'a'"):
        write(path, "b", [Entry("a", {}), Entry("a", {})])
    with pytest.raises(NotMeasurements, match="took nan seconds"):
        write(path, "b", [Entry("a", {"kgen": float("nan")})])
    with pytest.raises(NotMeasurements, match="entry 0 has no name"):
        write(path, "b", [{"seconds": {"kgen": 1.0}}])
    assert not path.exists()
    path.write_text("{")
    with pytest.raises(NotMeasurements, match="is no JSON"):
        read(path)


def test_the_report_reads_any_bench(stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(stored), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert "## host_overhead" in text
    assert f"card {read(stored).card}" in text
    assert "| relu | 1.0 | 3.0 | 3.000 |" in text
    assert "| 7 | 2.0 | failed |  |" in text
    assert "**1.732**" in text  # of 3 and 1


def test_every_bench_writes_this_form() -> None:
    """No file of bench/ makes a JSON of measurements by itself."""
    found = []
    for path in sorted((ROOT / "bench").rglob("*.py")):
        if path.name == "measurements.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "write_text":
                text = ast.unparse(node)
                if "json" in text or "dumps" in text:
                    found.append(f"{path.name}: {text}")
    assert found == []
