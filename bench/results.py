"""What `bench.gpu_matmuls` and `bench/test_gpu_matmuls.py` measured: read from their JSON, and compared. Of other benches,
files as they are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.measure import geomean
from bench.measurements import Measurements, read

Row = dict[str, Any]
PEERS = ("max-autotune", "inductor", "library", "cupy", "eager")
OURS = ("kgen", "kgen-tuned", "kgen-autotune")


@dataclass(frozen=True)
class Comparison:
    """A peer's times over one of ours, by matmul."""

    ours: str
    peer: str
    ratios: dict[str, float]

    @property
    def geomean(self) -> float:
        return geomean(self.ratios.values())

    @property
    def lowest(self) -> tuple[str, float]:
        """The matmul and its ratio."""
        return min(self.ratios.items(), key=lambda item: item[1])

    def __str__(self) -> str:
        number, value = self.lowest
        return (
            f"{self.peer} / {self.ours}: geomean {self.geomean:.3f}, lowest {value:.3f} (matmul {number}), "
            f"of {len(self.ratios)}"
        )


@dataclass
class Results:
    """Rows of matmuls, each with the contenders that ran (`results`) and those that did not (`failed`: why). `others` are files
    of other benches."""

    rows: list[Row]
    machine: dict[str, Any] = field(default_factory=dict)
    compiles: dict[str, Any] = field(default_factory=dict)
    others: list[Measurements] = field(default_factory=list)

    def add(self, given: Measurements) -> None:
        """Takes what a file has of matmuls."""
        if given.bench == "gpu_matmuls":
            self.rows = merged(self.rows, given.rows)
        elif given.bench == "autotune_compile":
            self.compiles |= given.facts
        else:
            self.others.append(given)
            return
        self.machine = self.machine or given.machine

    @property
    def contenders(self) -> list[str]:
        """In the order in which they competed."""
        return list(dict.fromkeys(name for row in self.rows for name in (*row["results"], *row["failed"])))

    def regret(self) -> dict[str, float]:
        """By matmul, the time of the default mode, whose cost model chooses, over the best of ours: measured choices or its
        own. Matmuls without measured choices are left out."""
        found: dict[str, float] = {}
        for row in self.rows:
            own, *measured = (seconds(row, name) for name in OURS)
            known = [s for s in measured if s is not None]
            if own is not None and known:
                found[row["number"]] = own / min(own, *known)
        return found

    def compared(self, ours: str, peer: str) -> Comparison | None:
        """Over the matmuls on which both ran; None where there are none."""
        found = {r["number"]: value for r in self.rows if (value := ratio(r, peer, ours)) is not None}
        return Comparison(ours, peer, found) if found else None

    def comparisons(self) -> list[Comparison]:
        """Of each of ours with each peer, and of our modes with each other."""
        pairs = [(ours, peer) for ours in OURS for peer in PEERS]
        pairs += [("kgen", "kgen-autotune"), ("kgen-tuned", "kgen-autotune"), ("kgen", "cublas")]
        return [one for ours, peer in pairs if (one := self.compared(ours, peer)) is not None]

    def spread(self) -> tuple[float, float] | None:
        """The lowest and the highest ratio of eager to itself: what other ratios must be read against."""
        again = self.compared("eager-again", "eager")
        return (min(again.ratios.values()), max(again.ratios.values())) if again else None

    def first_calls(self) -> dict[str, float]:
        """Seconds of all first calls, compilation and all, over the matmuls that every compiler managed."""
        names = [n for n in self.contenders if n in ("inductor", "max-autotune", *OURS)]
        shared = [row["results"] for row in self.rows if all(n in row["results"] for n in names)]
        return {name: sum(one[name]["compile_s"] for one in shared) for name in names} if shared else {}


def seconds(row: Row, name: str) -> float | None:
    found = row["results"].get(name)
    return None if found is None else float(found["seconds"])


def ratio(row: Row, peer: str, ours: str) -> float | None:
    """How many times faster ours is."""
    slow, fast = seconds(row, peer), seconds(row, ours)
    return slow / fast if slow is not None and fast else None


def floor(row: Row) -> float | None:
    """Seconds that this machine needs at least, by its rate of arithmetic or of moving bytes; None where not measured."""
    rates = row.get("rates") or {}
    if row.get("rate") not in rates or "copy" not in rates:
        return None
    return float(max(row["flops"] / rates[row["rate"]], row["bytes"] / rates["copy"]))


def merged(rows: Iterable[Row], newer: Iterable[Row]) -> list[Row]:
    """A matmul measured again replaces its row: contenders of different runs were not measured in turns."""
    both = {row["number"]: row for row in (*rows, *newer)}
    return sorted(both.values(), key=lambda row: _order(row["number"]))


def _order(number: str) -> tuple[int, str]:
    digits = "".join(c for c in number if c.isdigit())
    return int(digits or 0), number


def load(paths: Sequence[Path]) -> Results:
    """Of later files, rows replace those of earlier ones. Files of other benches are left out. Raises ValueError for a file of
    another kind; rows and compile times without a schema are of benches before they had one."""
    found = Results([])
    for path in paths:
        given = json.loads(path.read_text())
        if "schema" in given:
            found.add(read(path))
        elif "benchmarks" in given:
            found.rows = merged(found.rows, from_pytest(given))
            found.machine = found.machine or {"gpu": given["machine_info"].get("gpu", ""), "date": given.get("datetime", "")}
        elif "rows" in given and isinstance(given["rows"], list):
            found.rows = merged(found.rows, given["rows"])
            found.machine = found.machine or given.get("machine", {})
        elif "autotune_compile" in given:
            found.compiles |= given["autotune_compile"]
        else:
            raise ValueError(f"{path} is neither of a bench nor of pytest-benchmark")
    return found


def from_pytest(given: dict[str, Any]) -> list[Row]:
    """The rows that pytest-benchmark's JSON of `bench/test_gpu_matmuls.py` stands for."""
    rows: dict[str, Row] = {}
    for one in given["benchmarks"]:
        extra, stats = one["extra_info"], one["stats"]
        row = rows.setdefault(extra["matmul"]["number"], {**extra["matmul"], "results": {}, "failed": dict(extra["failed"])})
        row["results"][extra["contender"]] = {
            **extra["result"], "seconds": stats["median"], "low": stats["q1"], "high": stats["q3"], "rounds": stats["rounds"],
        }  # fmt: skip
    return list(rows.values())
