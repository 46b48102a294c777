"""Benches under the names that they had before."""

from __future__ import annotations

import runpy
import sys

import pytest


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_old_names_warn_and_run(device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    old = f"bench.{device}_products"
    monkeypatch.setattr(sys, "argv", [old, "--help"])
    with pytest.warns(FutureWarning, match=f"{old} is now bench.{device}_matmuls"), pytest.raises(SystemExit):
        runpy.run_module(old, run_name="__main__")
    assert "of measuring, for each matmul" in capsys.readouterr().out
