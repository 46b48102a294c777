"""The bench of the scheduler's time sees the graphs of a training step, and reports how their times grow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import schedule_time
from bench.measurements import read
from examples.gpt import TINY


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_time, "FULL", TINY)
    torch._dynamo.reset()


def test_rows_have_the_graphs_of_a_training_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert schedule_time.main(["--blocks", "1", "2", "--device", "cpu", "--repeats", "1", "--json", str(out)]) == 0
    found = read(out)
    one, two = found.rows
    assert [entry.name for entry in found.entries] == ["1 blocks, cpu", "2 blocks, cpu"]
    assert two["nodes"] > one["nodes"] > 10
    assert min(one["forward"], one["backward"]) > 0
    assert one["total"] == pytest.approx(one["forward"] + one["backward"])
    assert isinstance(found.facts["exponents"]["cpu"], float)
    assert "growth exponent" in capsys.readouterr().out


def test_the_exponent_is_that_of_the_nodes() -> None:
    rows = {blocks: {"nodes": 10 * blocks, "total": blocks**2.0} for blocks in (1, 2, 4)}
    assert schedule_time.exponent(rows) == pytest.approx(2)
    assert schedule_time.exponent({1: rows[1]}) is None
