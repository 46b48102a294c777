"""What compiling takes does not grow faster than the number of a graph's results."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch

from kgen import backend, config
from kgen.lowering import results

pytestmark = pytest.mark.cpu


def rows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.unbind(0)


def rewriting(count: int) -> int:
    """The calls of functions while a graph of so many rows is rewritten."""
    calls = [0]

    def note(_frame: FrameType, event: str, _argument: Any) -> None:
        calls[0] += event == "call"

    def rewrite(gm: torch.fx.GraphModule, _inputs: Any) -> torch.fx.GraphModule:
        sys.setprofile(note)
        try:
            backend.rewrite(gm, config.current())
        finally:
            sys.setprofile(None)
        return gm

    torch._dynamo.reset()
    torch.compile(rows, backend=rewrite)(torch.randn(count, 2))
    return calls[0]


def test_a_tuple_of_many_rows_is_looked_at_as_a_whole_a_fixed_number_of_times() -> None:
    """All rows are read from one tuple: whoever looks through it at each of them takes the square of their number."""
    assert 0 < rewriting(1600) < 2.5 * rewriting(800)  # loops of fewer are not looked for


def test_readers_of_one_storage_are_looked_through_a_fixed_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    is_copy_of = results._is_copy_of
    monkeypatch.setattr(results, "_is_copy_of", lambda *given: asked.append(1) or is_copy_of(*given))

    def count(number: int) -> int:
        torch._dynamo.reset()
        asked.clear()
        x = torch.randn(number, 2)
        for mine, theirs in zip(torch.compile(rows, backend="kgen", options={"cache": False})(x), rows(x), strict=True):
            assert mine.data_ptr() == theirs.data_ptr()
        return len(asked)

    assert 0 < count(30) == 2 * count(15)
