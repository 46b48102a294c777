"""The pictures of `bench.report`. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

from bench.results import OURS, Comparison, Results, seconds

mpl.use("Agg")  # files only: no screen is needed
WIDTH = 12.0


def ratio_bars(compared: Sequence[Comparison], path: Path) -> Path:
    """The times of each peer over ours, a group of bars a matmul; above the line ours is faster."""
    numbers = list(dict.fromkeys(n for one in compared for n in one.ratios))
    figure, axes = plt.subplots(figsize=(WIDTH, 4.5))
    width = 0.8 / len(compared)
    for k, one in enumerate(compared):
        at = np.arange(len(numbers)) + (k - (len(compared) - 1) / 2) * width
        heights = [one.ratios.get(n, np.nan) for n in numbers]
        axes.bar(at, heights, width, label=f"{one.peer}: {one.geomean:.2f} in geomean")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(numbers)), numbers)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("matmul")
    axes.set_ylabel(f"time over {compared[0].ours}'s")
    axes.legend(fontsize="small")
    return _saved(figure, path)


def roofline(results: Results, path: Path) -> Path:
    """Operations a second over operations a byte, and the roofs that were measured."""
    figure, axes = plt.subplots(figsize=(WIDTH * 0.7, 5.5))
    rows = [row for row in results.rows if row.get("rates") and row["rate"] in row["rates"]]
    rates = rows[0]["rates"]
    intensity = np.geomspace(*_span([row["flops"] / row["bytes"] for row in rows]), 50)
    for kind in sorted({row["rate"] for row in rows}):
        axes.plot(intensity, np.minimum(rates[kind], intensity * rates["copy"]) / 1e12, linewidth=1, label=f"roof, {kind}")
    for name in (n for n in (*OURS, "max-autotune", "cublas") if n in results.contenders):
        points = [
            (row["flops"] / row["bytes"], row["flops"] / taken / 1e12, row["number"])
            for row in rows
            if (taken := seconds(row, name))
        ]
        axes.scatter(*zip(*[p[:2] for p in points], strict=True), s=18, label=name)
        if name == next(n for n in (*OURS, "max-autotune", "cublas") if n in results.contenders):
            for x, y, number in points:
                axes.annotate(number, (x, y), fontsize=7, xytext=(3, 3), textcoords="offset points")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations of the matmul, for each byte that must move")
    axes.set_ylabel("TFLOP/s")
    axes.legend(fontsize="small")
    return _saved(figure, path)


def _span(values: Sequence[float]) -> tuple[float, float]:
    return min(values) / 2, max(values) * 2


def _saved(figure: plt.Figure, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
