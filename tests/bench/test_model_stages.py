"""`bench.model_stages` counts what the stages make of a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from bench import model_stages
from bench.measurements import read


def test_a_tiny_model_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert model_stages.main(["dlrm", "--size", "tiny", "--device", "gpu", "--json", str(out)]) == 0
    [row] = read(out).rows
    assert row["nodes"] > 0
    assert 0 < row["kernels"] <= row["launches"]
    assert all(row[stage] >= 0 for stage in model_stages.STAGES)


@pytest.mark.slow
def test_a_training_step_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model whose weights are drawn until none is too large, which takes data."""
    assert model_stages.main(["vit", "--size", "tiny", "--train", "--layers", "1"]) == 0
    assert "vit" in capsys.readouterr().out


@pytest.mark.parametrize(("layers", "left"), [(1, 1), (2, 2), (5, 3)])
def test_equal_blocks_are_cut(layers: int, left: int) -> None:
    module = nn.ModuleDict(
        {"equal": nn.ModuleList([nn.ReLU() for _ in range(3)]), "other": nn.Sequential(nn.ReLU(), nn.GELU())}
    )
    model_stages.cut(module, layers)
    assert [len(one) for one in module.values()] == [left, 2]
