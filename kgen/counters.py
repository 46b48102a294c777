"""Process-wide counts of what kgen did: compiler runs, cache hits and misses, kernels, externs. Thread-safe."""

from __future__ import annotations

import threading
from collections import Counter

__all__ = ["Counters", "counters"]


class Counters:
    """Named counts: ``counters.add("cpp.compiles")``, ``counters["cpp.compiles"]`` (0 when never counted)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._counts[name]

    def snapshot(self, prefix: str = "") -> dict[str, int]:
        """All counts whose name starts with `prefix`, sorted by name."""
        with self._lock:
            return {name: count for name, count in sorted(self._counts.items()) if name.startswith(prefix) and count}

    def reset(self, prefix: str = "") -> None:
        with self._lock:
            for name in [n for n in self._counts if n.startswith(prefix)]:
                del self._counts[name]


counters = Counters()
