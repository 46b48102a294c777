"""What tests that measure have in common."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kgen.tuning import measure


@pytest.fixture(autouse=True, scope="module")
def ends() -> Iterator[None]:
    """One process measures for all tests of a module: its start takes longer than most of them."""
    yield
    measure.stop()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The tuning file. What was compiled before is forgotten."""
    torch._dynamo.reset()
    return tmp_path / "tuning.json"
