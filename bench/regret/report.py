"""What choices cost, by class, from the rows of `bench.regret`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.measure import geomean
from bench.regret.variants import CHOSEN, LIBRARY

Row = Mapping[str, Any]
# Problems in the list of the worst, and the relative error beyond which a variant's time does not count.
WORST_SHOWN, RIGHT = 20, 5e-2


@dataclass(frozen=True)
class Regret:
    """One problem's times, in seconds: as chosen, of the library with separate kernels, and of the best of all, `winner`.
    None of them is known where that variant failed."""

    row: Row
    chosen: float
    library: float
    best: float
    winner: str

    @property
    def over_best(self) -> float:
        return self.chosen / self.best

    @property
    def over_library(self) -> float:
        return self.chosen / self.library

    @property
    def over_eager(self) -> float:
        return self.chosen / (self.row.get("eager") or math.nan)

    @property
    def of_host(self) -> float:
        """A call's time by the clock on the wall, over that of its kernels: what is far above 1 waits for the host."""
        wall = variant(self.row, CHOSEN).get("wall")
        return math.nan if wall is None else wall / self.chosen


def variant(row: Row, name: str) -> Mapping[str, Any]:
    """What is known of one; of one with the same kernels as another one, that one's times."""
    found: Mapping[str, Any] = next((v for v in row["variants"] if v["name"] == name), {})
    return variant(row, found["same_as"]) if found.get("same_as") else found


def regret_of(row: Row) -> Regret | None:
    """None where nothing is known of what was chosen, or of the library."""
    chosen, library = variant(row, CHOSEN).get("seconds"), variant(row, LIBRARY).get("seconds")
    if chosen is None or library is None:
        return None
    timed = [v for v in row["variants"] if v.get("seconds") is not None and is_right(row, v)]
    best = min(timed, key=lambda v: v["seconds"], default=variant(row, CHOSEN))
    if chosen <= best["seconds"]:
        best = variant(row, CHOSEN)
    return Regret(row, chosen, library, best["seconds"], best["name"])


def is_right(row: Row, found: Mapping[str, Any]) -> bool:
    """What is farther from eager than the library with separate kernels is, by more than rounding explains, is not compared
    with: whoever finds out why looks at the row."""
    error = found.get("error")
    return error is None or error <= max(RIGHT, 2 * (variant(row, LIBRARY).get("error") or 0.0))


def wrong(rows: Iterable[Row]) -> list[str]:
    """Variants with results that are far from eager's."""
    return [
        f"{row['name']}: {v['name']} is off by {v['error']:.1e}"
        for row in rows
        for v in row["variants"]
        if not is_right(row, v)
    ]


def by_class(rows: Iterable[Row]) -> dict[str, list[Regret]]:
    found: dict[str, list[Regret]] = {}
    for row in rows:
        one = regret_of(row)
        if one is not None:
            found.setdefault(f"{row['class']}", []).append(one)
    return found


def summary(regrets: Sequence[Regret], ratio: Callable[[Regret], float]) -> tuple[float, Regret]:
    """The geomean, and the worst."""
    return geomean(map(ratio, regrets)), max(regrets, key=ratio)


def show(rows: Sequence[Row], console: Console) -> None:
    """A report for each card."""
    for card in dict.fromkeys(row.get("card", "") for row in rows):
        _show_card([row for row in rows if row.get("card", "") == card], card, console)


def _show_card(rows: Sequence[Row], card: str, console: Console) -> None:
    if card:
        dates = sorted(row["date"][:10] for row in rows)
        console.print(f"[bold]{card}[/], {' to '.join(dict.fromkeys((dates[0], dates[-1])))}", highlight=False)
    classes = by_class(rows)
    table = Table(title="chosen over the best of all variants, over the library with separate kernels, and over eager")
    for name in ("class", "problems", "over best", "worst", "over library", "worst ", "over eager", "template wins"):
        table.add_column(name, no_wrap=True)
    everything = [one for own in classes.values() for one in own]
    for name, own in [*sorted(classes.items()), *([("all", everything)] if everything else [])]:
        best, worst = summary(own, lambda r: r.over_best)
        library, slowest = summary(own, lambda r: r.over_library)
        eager = geomean(r.over_eager for r in own if not math.isnan(r.over_eager))
        wins = sum(not _is_library(r) for r in own)
        cells = [f"{best:.3f}", f"{worst.over_best:.2f}", f"{library:.3f}", f"{slowest.over_library:.2f}", f"{eager:.3f}"]
        table.add_row(name, str(len(own)), *cells, f"{wins}/{len(own)}")
    console.print(table)
    _show_worst(everything, console)
    for line in (*wrong(rows), *failures(rows)):
        console.print(line, highlight=False, markup=False)


def _is_library(one: Regret) -> bool:
    """Whether the best has no template."""
    return not variant(one.row, one.winner).get("matmuls")


def _show_worst(regrets: Sequence[Regret], console: Console) -> None:
    table = Table(title="the worst problems: microseconds, what was chosen and what was best")
    for name in (
        "problem",
        "class",
        "over best",
        "over library",
        "chosen",
        "library",
        "best",
        "eager",
        "wall/GPU",
        "took",
        "winner",
    ):
        table.add_column(name)
    ordered = sorted(regrets, key=lambda r: max(r.over_best, r.over_library), reverse=True)
    for one in ordered[:WORST_SHOWN]:
        times = [f"{t * 1e6:.1f}" for t in (one.chosen, one.library, one.best, one.row.get("eager") or math.nan)]
        took = ", ".join(p["template"].removeprefix("triton_") for p in variant(one.row, CHOSEN).get("matmuls", ()))
        cells = [one.row["name"], one.row["class"], f"{one.over_best:.2f}", f"{one.over_library:.2f}"]
        table.add_row(*cells, *times, f"{one.of_host:.1f}", took or "library", one.winner)
    console.print(table)


def failures(rows: Iterable[Row]) -> list[str]:
    return [f"{row['name']}, {name}: {why}" for row in rows for name, why in row["failed"].items()]
