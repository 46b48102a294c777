"""Loop kernels in max-autotune: their templates' configurations are measured, kept, and used where sums may be in any order."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kgen
from kgen.build.toolchain import register_bytes
from kgen.counters import counters
from kgen.ir.plan import Kernel
from kgen.report.record import Record, recording
from kgen.templates import registry
from kgen.tuning import loop_tuner
from kgen.tuning.benchmark import BenchmarkJob
from kgen.tuning.measure import Outcome
from kgen.tuning.store import TuningFile
from kgen.verdict import Reason

pytestmark = pytest.mark.cpu
AUTOTUNE = "max-autotune-no-cudagraphs"


def rows(x: Tensor) -> Tensor:
    return (x * 2).softmax(-1)


def points(x: Tensor) -> Tensor:
    return x.relu() * 2 + x.sigmoid()


def x() -> Tensor:
    return torch.randn(700, 300, generator=torch.Generator().manual_seed(0))


def compiled(f: Callable[..., Any], *args: Any, file: Path, mode: str = AUTOTUNE, **options: Any) -> Record:
    """The record of the graph; results are right."""
    torch.compiler.reset()
    given = {"mode": mode, "tuning_file": file, "cache": False, "strict": True, **options}
    with recording() as recorder:
        found = torch.compile(f, backend="kgen", options=given)(*args)
    torch.testing.assert_close(found, f(*args))
    [record] = recorder.graphs
    assert isinstance(record, Record)
    return record


def lanes(record: Record) -> list[int]:
    """The lanes of the kernels as they are written."""
    text = "\n".join(unit.source for unit in record.units.sources)
    return [int(n) for n in re.findall(r"constexpr int L = (\d+);", text)]


@pytest.fixture
def fewest_lanes_win(monkeypatch: pytest.MonkeyPatch) -> list[BenchmarkJob]:
    """Nothing runs: of all candidates the one with the fewest lanes is the fastest. The jobs that were asked for."""
    asked: list[BenchmarkJob] = []

    def measure(job: BenchmarkJob, step: Callable[[str], None]) -> Outcome:
        asked.append(job)
        return Outcome({n: float(name.split("LANES=")[1]) * 1e-6 for n, name in job.names.items()})

    monkeypatch.setattr(loop_tuner, "measure", measure)
    return asked


@pytest.mark.parametrize("f", [rows, points])
def test_the_winner_is_kept_and_used(f: Callable[..., Any], file: Path, fewest_lanes_win: list[BenchmarkJob]) -> None:
    first = compiled(f, x(), file=file)
    [job] = fewest_lanes_win
    assert len(job.candidates) >= (3 if register_bytes() == 64 else 2)  # of 16, 8 and 4 lanes, those of one register or less
    assert job.exact == (f is points)  # points have the same bits whatever the lanes are
    [entry] = TuningFile(file).entries()
    assert (entry.template, dict(entry.config)) == ("cpp_pointwise" if f is points else "cpp_reduction", {"LANES": 4})
    assert lanes(first) == [4]
    [verdict] = [v for v in first.plan.verdicts if v.reason is Reason.LOOPS_MEASURED]
    assert "LANES=4" in verdict.detail
    assert verdict.measured[0] < verdict.measured[1]
    again = compiled(f, x(), file=file)
    assert len(fewest_lanes_win) == 1
    assert again.units.sources == first.units.sources


def test_the_default_mode_uses_what_was_measured_and_measures_nothing(file: Path, fewest_lanes_win: list[BenchmarkJob]) -> None:
    assert lanes(compiled(rows, x(), file=file, mode="default")) != [4]
    assert not file.exists()
    compiled(rows, x(), file=file)
    assert lanes(compiled(rows, x(), file=file, mode="default")) == [4]
    assert len(fewest_lanes_win) == 1


def test_candidates_really_run(file: Path) -> None:
    """Without a stub: they are built, checked against the rule's own and timed, and what wins is right."""
    before = counters["tuning.measured"]
    compiled(rows, x(), file=file)
    assert counters["tuning.measured"] >= before + 3
    [entry] = TuningFile(file).entries()
    assert entry.seconds > 0
    assert entry.measured >= 3


def test_stable_sums_keep_their_order(file: Path, fewest_lanes_win: list[BenchmarkJob]) -> None:
    compiled(rows, x(), file=file, numerics="stable")
    assert not fewest_lanes_win
    compiled(points, x(), file=file, numerics="stable")
    assert len(fewest_lanes_win) == 1


def test_what_is_no_longer_offered_is_not_used(file: Path, fewest_lanes_win: list[BenchmarkJob]) -> None:
    compiled(rows, x(), file=file)
    contents = json.loads(file.read_text())
    contents["entries"][0]["config"] = {"LANES": 5}
    file.write_text(json.dumps(contents))
    assert lanes(compiled(rows, x(), file=file, mode="default")) != [5]


def test_noise_does_not_win(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(job: BenchmarkJob, step: Callable[[str], None]) -> Outcome:
        return Outcome({n: 1e-5 if n == 0 else 0.99e-5 for n in job.names})

    monkeypatch.setattr(loop_tuner, "measure", measure)
    record = compiled(rows, x(), file=file)
    [entry] = TuningFile(file).entries()
    assert dict(entry.config)["LANES"] == lanes(record)[0] > 4
    assert not [v for v in record.plan.verdicts if v.reason is Reason.LOOPS_MEASURED]


@pytest.mark.parametrize("limit", [{"tuning_seconds": 0}, {"small": True}, {"dynamic": True}], ids=str)
def test_what_is_not_measured(limit: dict[str, Any], file: Path, fewest_lanes_win: list[BenchmarkJob]) -> None:
    given = x()[:5] if limit.pop("small", False) else x()
    f = torch.compile(rows, backend="kgen", dynamic=limit.pop("dynamic", False),
                      options={"mode": AUTOTUNE, "tuning_file": file, "cache": False, **limit})  # fmt: skip
    torch.compiler.reset()
    torch.testing.assert_close(f(given), rows(given))
    assert not fewest_lanes_win


def test_equal_kernels_are_measured_once(file: Path, fewest_lanes_win: list[BenchmarkJob]) -> None:
    def several(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return rows(a), rows(b)

    record = compiled(several, x(), x() + 1, file=file, horizontal_fusion=False)
    assert len([k for k in record.plan.kernels if isinstance(k, Kernel)]) == 2
    assert len(fewest_lanes_win) == 1
    assert lanes(record) == [4]  # of one function


NAMES = itertools.count()


def test_an_authors_template_is_tuned_by_its_own_knobs(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[BenchmarkJob] = []

    def measure(job: BenchmarkJob, step: Callable[[str], None]) -> Outcome:
        asked.append(job)
        return Outcome({n: 1e-6 if "UNROLL=4" in name else 2e-6 for n, name in job.names.items()})

    monkeypatch.setattr(loop_tuner, "measure", measure)
    text = (Path(registry.loop_templates("reduction", "cpu")[-1].source)).read_text()
    source = text.replace("{{ kernel() }}", "{{ kernel() }}\n  static_assert({{ UNROLL }} > 0);\n", 1)
    assert source != text

    class Unrolled(kgen.LoopKernel):
        UNROLL = kgen.knob(1, 2, 4)

    name = f"unrolled_{next(NAMES)}"
    kgen.template(implements=kgen.loops("reduction", replaces="cpp_reduction"), device="cpu", source=source, name=name)(
        Unrolled
    )
    try:
        record = compiled(rows, x(), file=file)
        [job] = asked
        assert len(job.candidates) == 3
        [entry] = TuningFile(file).entries()
        assert (entry.template, dict(entry.config)) == (name, {"UNROLL": 4})
        assert "static_assert(4 > 0)" in "\n".join(unit.source for unit in record.units.sources)
    finally:
        registry.remove(name)
