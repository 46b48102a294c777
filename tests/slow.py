"""Long lists of parameters of which every `make test` runs the telling ones, and `make test-full` all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_but(telling: Callable[..., bool], values: Iterable[Any]) -> list[Any]:
    """The values as parameters, tuples as several, slow ones where they are not `telling`."""
    found: list[Any] = []
    for value in values:
        own = value if isinstance(value, tuple) else (value,)
        found.append(pytest.param(*own, marks=() if telling(*own) else pytest.mark.slow))
    return found
