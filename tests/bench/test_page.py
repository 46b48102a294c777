"""The page of a bench: two runs compared, rows flagged where eager against itself differs, no need of anything else."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bench import page
from bench.measurements import Entry, read, write

pytestmark = pytest.mark.none
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
BEFORE = [
    Entry("relu <x>", {"kgen": 4e-6, "eager": 8e-6, "inductor": 5e-6}),
    Entry("sum", {"kgen": 2e-6, "eager": 4e-6}),
    Entry("gone", {"kgen": 1e-6}),
]
AFTER = [
    Entry("relu <x>", {"kgen": 2e-6, "eager": 8.3e-6}, {"inductor": "RuntimeError"}),
    Entry("sum", {"kgen": 3e-6, "eager": 6e-6}),
    Entry("new", {"kgen": 1e-6, "eager": 2e-6, "eager-again": 2.2e-6}),
]


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "before.json", tmp_path / "after.json"
    for path, entries in zip(paths, (BEFORE, AFTER), strict=True):
        write(path, "some_bench", entries)
    return paths


def text_of(tmp_path: Path, *files: Path) -> str:
    assert page.main([*map(str, files), "--out", str(tmp_path / "new" / "page.html")]) == 0
    return (tmp_path / "new" / "page.html").read_text()


def cells(text: str) -> dict[str, list[str]]:
    """The cells of the table by their row's first."""
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr.*?</tr>", text)]
    return {row[0]: row[1:] for row in rows if row}


def test_two_runs_are_compared(runs: tuple[Path, Path], tmp_path: Path) -> None:
    text = text_of(tmp_path, *runs)
    found = cells(text)
    # kgen, eager, inductor, again in us; eager over itself; changes of the four; kgen's over eager's
    assert found["relu &lt;x&gt;"] == ["2.0", "8.3", "failed", "", "1.038", "0.500", "1.038", "", "", "0.482"]
    assert found["sum (flagged)"][4:] == ["1.500", "1.500", "1.500", "", "", "1.000"]
    assert found["gone"][:1] == ["not measured"]
    assert found["new (flagged)"][4] == "1.100"
    assert "2 of 4 rows are flagged: eager against itself differs by more than 5%." in text
    assert "without those rows: 0.482 in geomean" in text


def test_one_run_is_shown(runs: tuple[Path, Path], tmp_path: Path) -> None:
    found = cells(text_of(tmp_path, runs[1]))
    assert found["sum"] == ["3.0", "6.0", "", "", ""]
    assert found["new (flagged)"] == ["1.0", "2.0", "", "2.2", "1.100"]


def test_plots_have_names_and_values(runs: tuple[Path, Path], tmp_path: Path) -> None:
    text = text_of(tmp_path, *runs)
    plots = dict(re.findall(r'<svg role="img" aria-label="(.*?)".*?>(.*?)</svg>', text))
    assert plots.keys() == {"relu &lt;x&gt;", "sum", "new", "gone"}
    assert re.findall(r">([^<]+)</text>", plots["sum"]) == [
        "kgen, before", "2.0 us", "kgen, after", "3.0 us", "eager, before", "4.0 us", "eager, after", "6.0 us",
    ]  # fmt: skip
    widths = [float(width) for width in re.findall(r'<rect class="\w+" x="\d+" y="\d+" width="([\d.]+)"', plots["sum"])]
    assert widths == pytest.approx([page.WIDTH * n / 6 for n in (2, 3, 4, 6)], abs=0.1)


def test_the_page_is_whole(runs: tuple[Path, Path], tmp_path: Path) -> None:
    text = text_of(tmp_path, *runs)
    assert "prefers-color-scheme: dark" in text
    assert "http" not in text
    opened: list[str] = []

    class Check(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "br"):
                opened.append(tag)

        def handle_startendtag(self, tag: str, attrs: object) -> None:
            return

        def handle_endtag(self, tag: str) -> None:
            assert opened.pop() == tag

    Check().feed(text)
    assert opened == []


def test_what_cannot_be_compared(runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "other.json", "other_bench", AFTER)
    (tmp_path / "wrong.json").write_text("{}")
    assert page.main([str(runs[0]), str(tmp_path / "other.json")]) == 1
    assert "runs of two benches: some_bench and other_bench" in capsys.readouterr().err
    assert page.main([str(runs[0]), str(tmp_path / "wrong.json")]) == 1
    assert "is not of the form of bench/measurements.py" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        page.main([str(runs[0])] * 3)
    assert read(runs[0]).bench == "some_bench"


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs a Chromium")
def test_a_browser_draws_it(runs: tuple[Path, Path], tmp_path: Path) -> None:
    assert BROWSER is not None
    text_of(tmp_path, *runs)
    shot = tmp_path / "page.png"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--screenshot={shot}"]
    file = (tmp_path / "new" / "page.html").as_uri()
    done = subprocess.run([*command, file], capture_output=True, text=True, timeout=120, check=False)
    assert shot.stat().st_size > 5000, done.stderr
    assert "CONSOLE" not in done.stderr
