"""`bench.gpu_row_patterns` measures a pattern from its arguments to its file, on a CPU as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import gpu_row_patterns
from bench.measurements import read


@pytest.mark.cpu
def test_a_pattern_is_measured_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--device", "cpu", "--shrink", "4096", "--seconds", "0.01", "--contenders", "eager", "kgen"]
    gpu_row_patterns.main([*arguments, "--only", "softmax, 1k", "--json", str(out)])
    [row] = read(out).rows
    assert row["name"] == "softmax, 1k"
    assert not row["failed"]
