"""The commands for tuning files: tune, and cache list, stats, clear, merge, diff and export."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from kgen import cache
from kgen.cli import main, parse
from kgen.commands import doctor
from kgen.commands.tuning_table import seconds_text
from kgen.tuning import text
from kgen.tuning.entry import Entry, Key, merge
from kgen.tuning.store import TuningFile, read_file

pytestmark = pytest.mark.none

# It measures as the compiler would: the options of a call, then look-up and addition.
SCRIPT = """
import sys
from kgen import config
from kgen.tuning.entry import Entry, Key, now
from kgen.tuning.store import stores

call = config.from_call("reduce-overhead", {"cache": True, "tuning_file": "elsewhere.json", "tuning_seconds": 1.0})
print("arguments", sys.argv[1:], "mode", call.mode, "cache", call.cache, "seconds", call.tuning_seconds)
files = stores(call)
for m in map(int, sys.argv[1:]):
    key = Key("GPU 1", "form", (("m", m),), title=f"mm {m}")
    if files.find(key, {"tiles": "1"}) is None:
        files.add([Entry(key, "tiles", "1", (("BLOCK_M", 64), ("WARPS", 4)), 1e-3, 1.25e-3, 11, now(), "test")])
if len(sys.argv) > 3:
    raise SystemExit(3)
"""


def entry(m: int = 1, device: str = "GPU 1", **other: Any) -> Entry:
    key = Key(device, "form", (("m", m),), **{name: other.pop(name) for name in ("title", "dynamic") if name in other})
    values = {
        "template": "tiles", "version": "1", "config": (("BLOCK_M", 64),), "seconds": 1e-3, "library_seconds": 1.25e-3,
        "measured": 11, "made": "2026-01-02T03:04:05.000Z", "by": "test",
    }  # fmt: skip
    return Entry(key, **{**values, **other})


@pytest.fixture
def mine(fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuningFile:
    """The user's file, in an empty cache folder; the working folder has the script."""
    monkeypatch.delenv("KGEN_TUNING_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    return TuningFile(fresh_cache / "tuning.json")


def out(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


# ---- tune ---------------------------------------------------------------------------------------------------------------


def test_tune_wins_over_the_scripts_options_and_says_what_is_new(mine: TuningFile, capsys: Any) -> None:
    mine.write([entry(7)])
    assert main(["tune", "--seconds", "5", "--file", "own.json", "script.py", "1", "2"]) == 0
    printed = out(capsys)
    assert "arguments ['1', '2'] mode max-autotune-no-cudagraphs cache False seconds 5.0" in printed
    assert "GPU 1" in printed
    assert "mm 1     tiles BLOCK_M=64 WARPS=4  1 ms  1.25 ms   1.25     11" in printed
    assert "new measurements: 2, uses of known ones: 0" in printed
    assert len(TuningFile("own.json").entries()) == 2
    assert mine.entries() == [entry(7)]
    assert not Path("elsewhere.json").exists()


def test_tune_again_uses_what_is_known(mine: TuningFile, capsys: Any) -> None:
    assert main(["tune", "--file", "own.json", "script.py", "1"]) == 0
    assert main(["tune", "--file", "own.json", "script.py", "1", "2"]) == 0
    printed = out(capsys)
    assert printed.endswith("new measurements: 1, uses of known ones: 1\n")
    assert printed.count("mm 1 ") == 1


def test_tune_without_a_problem(mine: TuningFile, capsys: Any) -> None:
    assert main(["tune", "--file", "own.json", "script.py"]) == 1
    assert "nothing was measured" in capsys.readouterr().err


def test_tune_without_time_says_so(mine: TuningFile, capsys: Any) -> None:
    Path("script.py").write_text("from kgen.counters import counters\ncounters.add('tuning.no_time')\n")
    assert main(["tune", "--seconds", "0", "script.py"]) == 1
    assert "give more with --seconds" in capsys.readouterr().err


def test_tune_of_a_script_that_fails_keeps_what_was_measured(mine: TuningFile, capsys: Any) -> None:
    assert main(["tune", "--file", "own.json", "script.py", "1", "2", "3"]) == 1
    printed, err = capsys.readouterr()
    assert "exit code 3" in err
    assert "new measurements: 3" in printed


def test_tune_finds_a_wrong_file_before_the_script_runs(mine: TuningFile, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "plain").write_text("")
    assert main(["tune", "missing.py"]) == 2
    assert main(["tune", "--file", str(tmp_path), "script.py", "1"]) == 1
    assert main(["tune", "--file", "plain/tuning.json", "script.py", "1"]) == 1
    assert main(["tune", "--seconds", "-1", "script.py", "1"]) == 1
    printed, err = capsys.readouterr()
    assert printed == ""
    for expected in ("no script missing.py", "is a folder", "cannot be written", "tuning_seconds"):
        assert expected in err


SUGGESTED = """
import torch

layers = [torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.GELU()) for _ in range(3)]
model = torch.nn.Sequential(*layers, torch.nn.Linear(48, 7))
compiled = torch.compile(model, backend="kgen", mode="max-autotune", options=None)
compiled(torch.randn(5, 48)).sum().backward()
"""


@pytest.mark.cpu
def test_suggest_lists_what_nobody_has_measured(mine: TuningFile, capsys: Any) -> None:
    Path("suggested.py").write_text(SUGGESTED)
    assert main(["tune", "--suggest", "suggested.py"]) == 0
    printed = out(capsys)
    rows = [" ".join(line.split()) for line in printed.splitlines()]
    [gelu] = [row for row in rows if row.startswith("addmm, gelu: ")]
    assert re.search(r"k=48 m=5 n=48 3 [\d.]+ us [\d.]+ us [\d.]+ us$", gelu)  # three equal layers, forward
    totals = [float(row.split()[-2]) for row in rows if row.endswith(" us")]
    assert totals == sorted(totals, reverse=True)
    assert re.search(r"problems that nobody has measured: \d, uses of measured ones: 0", printed)
    assert "`kgen tune suggested.py` measures them" in printed
    assert mine.entries() == []  # nothing was


def test_suggest_of_a_script_that_compiles_nothing(mine: TuningFile, capsys: Any) -> None:
    Path("nothing.py").write_text("")
    assert main(["tune", "--suggest", "nothing.py"]) == 0
    assert out(capsys).endswith("problems that nobody has measured: 0, uses of measured ones: 0\n")


# ---- cache --------------------------------------------------------------------------------------------------------------


def test_listing(mine: TuningFile, capsys: Any) -> None:
    library = entry(2, title="addmm", template=None, version="", config=(), library_seconds=1e-3)
    unmatched = entry(3, device="CPU", dynamic=("m",), library_seconds=math.nan)
    mine.write([entry(1), library, unmatched])
    assert main(["cache", "list", "--kind", "tuning"]) == 0
    lines = [" ".join(line.split()) for line in out(capsys).splitlines()]
    assert lines[0] == f"{mine.path}: 3 entries"
    assert lines.index("CPU") < lines.index("GPU 1")
    assert "form (m=1) tiles BLOCK_M=64 1 ms 1.25 ms 1.25 11 2026-01-02" in lines
    assert "addmm library 1 ms 1 ms 1.00 11 2026-01-02" in lines
    assert "form (m=~3) tiles BLOCK_M=64 1 ms - - 11 2026-01-02" in lines
    assert any(line.split(":")[0].endswith("shipped/h200.json") for line in lines)


def test_stats_and_clear_keep_measurements_unless_they_are_named(mine: TuningFile, capsys: Any) -> None:
    cache.put("graph", "one", b"x" * 5000)
    mine.write([entry(1), entry(2)])
    assert main(["cache", "stats"]) == 0
    printed = out(capsys)
    assert "all           1 entries" in printed
    assert "tuning        2 entries" in printed
    assert main(["cache", "stats", "--kind", "tuning"]) == 0
    assert "graph" not in out(capsys)
    assert main(["cache", "clear"]) == 0
    assert cache.list_entries() == []
    assert len(mine.entries()) == 2
    cache.put("graph", "one", b"x")
    assert main(["cache", "clear", "--kind", "tuning"]) == 0
    assert "removed 2 entries" in out(capsys)[-500:]
    assert mine.entries() == []
    assert len(cache.list_entries()) == 1


def test_merge(tmp_path: Path, capsys: Any) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    better = entry(2, seconds=5e-4, made="2026-02-02T03:04:05.000Z")
    TuningFile(a).write([entry(1), entry(2)])
    TuningFile(b).write([better, entry(3)])
    assert main(["cache", "merge", str(c), str(a), str(b)]) == 0
    assert "3 entries, 3 of them added and 0 replaced" in out(capsys)
    assert read_file(c).entries == merge([entry(1), better, entry(3)])
    assert main(["cache", "merge", str(a), str(b)]) == 0
    assert "3 entries, 1 of them added and 1 replaced" in out(capsys)
    assert a.read_text() == c.read_text()


def test_diff(tmp_path: Path, capsys: Any) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    TuningFile(a).write([entry(1), entry(2), entry(3)])
    TuningFile(b).write([entry(1), entry(2, template=None, version="", config=()), entry(4, device="CPU")])
    assert main(["cache", "diff", str(a), str(b)]) == 0
    lines = [" ".join(line.split()) for line in out(capsys).splitlines()]
    assert "+ form (m=4) tiles BLOCK_M=64 1 ms" in lines
    assert "~ form (m=2) tiles BLOCK_M=64 1 ms library 1 ms" in lines
    assert "- form (m=3) tiles BLOCK_M=64 1 ms" in lines
    assert lines.index("CPU") < lines.index("GPU 1")
    assert lines[-1] == "3 differences"
    assert not any("m=1" in line for line in lines)
    assert main(["cache", "diff", str(a), str(a)]) == 0
    assert out(capsys) == "no difference\n"


def test_diff_is_of_choices_unless_times_are_asked_for(tmp_path: Path, capsys: Any) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    TuningFile(a).write([entry(1), entry(2)])
    TuningFile(b).write([entry(1, seconds=2e-3, made="2026-02-02T03:04:05.000Z"), entry(2, config=(("BLOCK_M", 32),))])
    assert main(["cache", "diff", str(a), str(b)]) == 0
    printed = out(capsys)
    assert "(m=2)" in printed
    assert printed.endswith("\n1 differences\n")
    assert main(["cache", "diff", str(a), str(b), "--times"]) == 0
    assert out(capsys).endswith("\n2 differences\n")


def test_export(mine: TuningFile, tmp_path: Path, capsys: Any) -> None:
    mine.write([entry(1), entry(2, device="CPU")])
    assert main(["cache", "export", "gpu.json", "--device", "GPU 1"]) == 0
    assert main(["cache", "export", "all.json"]) == 0
    assert read_file("gpu.json").entries == merge([entry(1)])
    assert read_file("all.json").entries == merge(mine.entries())
    kept = Path("gpu.json").read_text()
    assert main(["cache", "export", "gpu.json"]) == 1
    assert main(["cache", "export", "other.json", "--device", "GPU"]) == 1
    err = capsys.readouterr().err
    assert "cache merge gpu.json" in err
    assert "use one of: CPU; GPU 1" in err
    assert Path("gpu.json").read_text() == kept
    assert not Path("other.json").exists()


@pytest.mark.parametrize("command", [["diff", "GOOD", "BAD"], ["merge", "NEW", "BAD"], ["merge", "BAD", "GOOD"]])
@pytest.mark.parametrize("data", ["nothing", None])
def test_a_file_that_is_broken_or_missing_is_an_error_and_stays(
    tmp_path: Path, capsys: Any, command: list[str], data: str | None
) -> None:
    TuningFile(tmp_path / "GOOD").write([entry(1)])
    if data is not None:
        (tmp_path / "BAD").write_text(data)
    elif command == ["merge", "BAD", "GOOD"]:
        pytest.skip("what is merged into need not exist")
    assert main(["cache", command[0], *(str(tmp_path / name) for name in command[1:])]) == 1
    assert f"the tuning file {tmp_path / 'BAD'} cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "NEW").exists()
    assert data is None or (tmp_path / "BAD").read_text() == data


def test_what_a_command_leaves_out_is_said(tmp_path: Path, capsys: Any) -> None:
    good = text.write(text.Contents(merge([entry(1)])))
    (tmp_path / "a").write_text(good.replace("null", '{"by": 1}, null'))
    assert main(["cache", "merge", str(tmp_path / "b"), str(tmp_path / "a")]) == 0
    assert f"{tmp_path / 'a'}: left out entry 2" in capsys.readouterr().err
    assert (tmp_path / "b").read_text() == good


@pytest.mark.parametrize("arguments", [[], ["grow"], ["merge", "OUT"], ["diff", "A"], ["list", "more"], ["export"]])
def test_wrong_use(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["cache", *arguments])
    assert end.value.code == 2


# ---- docs/tuning.md -----------------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "tuning.md").read_text()


def test_the_file_in_the_document_is_one() -> None:
    (shown,) = re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)
    contents = text.read(shown)
    assert contents.problems == ()
    assert len(contents.entries) == 1
    assert text.write(contents) == shown


@pytest.mark.parametrize("command", re.findall(r"python -m kgen ([^`\n]*)", DOCUMENT))
def test_the_commands_in_the_document_are_accepted(command: str) -> None:
    assert parse(shlex.split(command.replace("...", "MORE"))).run


def test_the_document_names_what_exists() -> None:
    named = re.findall(r"`((?:kgen|tests)/[\w./]+)(?::(\w+))?`", DOCUMENT)
    assert named
    for path, name in named:
        assert (ROOT / path).exists(), path
        assert not name or re.search(rf"^(class|def) {name}\b", (ROOT / path).read_text(), re.MULTILINE), name
    code = "\n".join(path.read_text() for path in sorted((ROOT / "kgen" / "tuning").glob("*.py")))
    counted = {name for line in code.splitlines() if "counters.add(" in line for name in re.findall(r'"(tuning\.\w+)"', line)}
    assert counted
    assert set(re.findall(r"`(tuning\.\w+)`", DOCUMENT)) - {"tuning.json"} == counted


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(math.nan, "-"), (3.14159, "3.14 s"), (0.99996, "1 s"), (0.0012345, "1.23 ms"), (999.7e-6, "1 ms"), (2.5e-6, "2.5 us")],
)
def test_times_as_text(seconds: float, expected: str) -> None:
    assert seconds_text(seconds) == expected


def test_what_was_measured_before_an_interruption_is_said(
    mine: TuningFile, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def interrupted(*_: Any) -> bool:
        mine.write([entry(3)])
        raise KeyboardInterrupt

    monkeypatch.setattr("kgen.commands.tune_command.run_script", interrupted)
    assert main(["tune", "script.py"]) == 130
    printed, err = capsys.readouterr()
    assert "new measurements until then: 1" in printed
    assert "interrupted" in err


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("", "note", "is not used"),
        ("{", "note", "is not JSON"),
        (None, "ok", ": 0, and"),
        ("other", "note", "of this machine: none"),
    ],
)
def test_doctor_says_whose_measurements_there_are(mine: TuningFile, text: str | None, status: str, words: str) -> None:
    if text == "other":
        mine.write([entry(3)])
    elif text is not None:
        mine.path.parent.mkdir(parents=True, exist_ok=True)
        mine.path.write_text(text)
    check = doctor._measurements("measurements")
    assert (check.status, words in check.found) == (status, True)
    assert "GPU 1" in check.advice or text != "other"
