"""`kgen.explain`: what was compiled, as data. Compilations record themselves while a recorder is open."""

from __future__ import annotations

from typing import Any


def record(info: Any, plan: Any, units: Any, blueprint: Any, config: Any) -> None:
    """Notes one compiled graph for every open recorder and for the debug folder."""
