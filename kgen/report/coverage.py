"""What kgen compiled: numbers for users and tests. Counted when a graph is compiled or loaded from a cache, not per call."""

from __future__ import annotations

from typing import Any

from kgen.counters import counters

__all__ = ["coverage", "coverage_reset"]

_EXTERN, _REPLACED = "extern.", "replaced."


def coverage() -> dict[str, Any]:
    """Counts since `coverage_reset()`: generated `kernels`; `externs`, operators that run in eager, by name, and their
    total `extern_calls`; `replaced`, what could not be compiled and was computed in another way, each as a text with the
    number of times, and their total `replacements`; compiled or loaded `graphs`; `aot_traces`; `cache_hits` on disk."""
    counts = counters.snapshot()
    externs = {name.removeprefix(_EXTERN): n for name, n in counts.items() if name.startswith(_EXTERN)}
    replaced = {name.removeprefix(_REPLACED): n for name, n in counts.items() if name.startswith(_REPLACED)}
    return {
        "kernels": counts.get("kernels", 0),
        "externs": externs,
        "extern_calls": sum(externs.values()),
        "replaced": replaced,
        "replacements": sum(replaced.values()),
        "graphs": counts.get("graphs", 0),
        "aot_traces": counts.get("aot_trace", 0),
        "cache_hits": sum(n for name, n in counts.items() if name == "aot_cache_hit" or name.startswith("cache.hit.")),
    }


def coverage_reset() -> None:
    """Start counting again from zero."""
    counters.reset()
