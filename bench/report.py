"""One table and plots of what was measured.

python -m bench.report out/matmuls.json [more.json ...] --out out/report/

Reads the JSON of all benches (`bench/measurements.py`) and pytest-benchmark's of `bench/test_gpu_matmuls.py`; of matmuls in
several files the last one counts. Writes report.md, and ratios.png and roofline.png where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.measure import geomean
from bench.measurements import Entry, Measurements
from bench.results import OURS, PEERS, Results, Row, floor, load, ratio, seconds

MEGABYTE = 1e6


def markdown(results: Results) -> str:
    """Everything as Markdown."""
    parts = [_machine(results)]
    if results.rows:
        parts += [_times(results), _ratios(results), _regret(results), _summary(results), _memory(results), _failed(results)]
    parts.append(_compiles(results.compiles))
    parts += [_of_bench(one) for one in results.others]
    return "\n\n".join(part for part in parts if part) + "\n"


def _machine(results: Results) -> str:
    facts = ", ".join(f"{k} {results.machine[k]}" for k in ("gpu", "torch", "triton", "kgen", "date") if results.machine.get(k))
    rates = next((row["rates"] for row in results.rows if row.get("rates")), {})
    measured = ", ".join(f"{name} {rate / 1e12:.4g} T{'B' if name == 'copy' else 'FLOP'}/s" for name, rate in rates.items())
    return "\n\n".join(line for line in (facts, f"Measured rates: {measured}" if measured else "") if line)


def _times(results: Results) -> str:
    names = results.contenders
    rows = []
    for row in results.rows:
        low = floor(row)
        share = [_number(_divided(low, seconds(row, name)), 2) for name in names if name in OURS]
        cells = [_time(row, name) for name in names]
        rows.append([_title(row), *cells, "" if low is None else f"{low * 1e6:.1f}", *share])
    shares = [f"{name}: of the floor" for name in names if name in OURS]
    note = "\n\n`*`: called, not recorded as a CUDA graph. The floor is what arithmetic or memory allow at the measured rates."
    return "## Microseconds\n\n" + _table(["matmul", *names, "floor", *shares], rows) + note


def _time(row: Row, name: str) -> str:
    if name in row["failed"]:
        return "failed"
    found = seconds(row, name)
    return "" if found is None else f"{found * 1e6:.1f}{'' if row['results'][name].get('recorded', True) else '*'}"


def _ratios(results: Results) -> str:
    pairs = [(one.ours, one.peer) for one in results.comparisons()]
    again = any("eager-again" in row["results"] for row in results.rows)
    if not pairs and not again:
        return ""
    rows = []
    for row in results.rows:
        cells = [_number(ratio(row, peer, ours), 3) for ours, peer in pairs]
        rows.append([_title(row), *cells, *([_number(ratio(row, "eager", "eager-again"), 3)] if again else [])])
    means = [f"**{one.geomean:.3f}**" for one in results.comparisons()]
    rows.append(["**geomean**", *means, *([""] if again else [])])
    lowest = [f"{one.lowest[1]:.3f} ({one.lowest[0]})" for one in results.comparisons()]
    rows.append(["lowest (matmul)", *lowest, *([""] if again else [])])
    heads = [f"{peer} / {ours}" for ours, peer in pairs]
    return "## Times of the others over ours\n\n" + _table(["matmul", *heads, *(["eager / itself"] if again else [])], rows)


def _regret(results: Results) -> str:
    found = results.regret()
    if not found:
        return ""
    rows = [[_title(row), f"{found[row['number']]:.3f}", _chosen(row)] for row in results.rows if row["number"] in found]
    rows.append(["**geomean**", f"**{geomean(found.values()):.3f}**", ""])
    heads = ["matmul", "default mode / best of ours", "the cost model's choice"]
    return "## Regret: what measuring would have gained\n\n" + _table(heads, rows)


def _chosen(row: Row) -> str:
    return "; ".join(row["results"]["kgen"].get("chosen", ())).replace("|", "\\|")


def _summary(results: Results) -> str:
    lines = [str(one) for one in results.comparisons()]
    if (spread := results.spread()) is not None:
        lines.append(f"eager against itself: {spread[0]:.3f} to {spread[1]:.3f}")
    lines += [f"first calls of {name}: {total:.1f} s in total" for name, total in results.first_calls().items()]
    return "## Summary\n\n" + "\n".join(f"- {line}" for line in lines) if lines else ""


def _memory(results: Results) -> str:
    names = [n for n in results.contenders if any(_peak(row, n) is not None for row in results.rows)]
    rows = [
        [_title(row), *("" if _peak(row, n) is None else f"{_peak(row, n) / MEGABYTE:.1f}" for n in names)]  # type: ignore[operator]
        for row in results.rows
    ]
    return "## Megabytes in use above the arguments, at most\n\n" + _table(["matmul", *names], rows) if names else ""


def _peak(row: Row, name: str) -> int | None:
    found: int | None = row["results"].get(name, {}).get("peak_bytes")
    return found


def _failed(results: Results) -> str:
    lines = [f"- {name} on {_title(row)}: {why}" for row in results.rows for name, why in row["failed"].items()]
    return "## Failed\n\n" + "\n".join(lines) if lines else ""


def _compiles(compiles: dict[str, Any]) -> str:
    if not compiles:
        return ""
    runs = [(name, kind, run) for name, kinds in compiles.items() for kind, run in kinds.items()]
    finished = [set(run["seconds"]) for *_, run in runs if run.get("seconds")]
    shared = set.intersection(*finished) if finished else set()
    rows = []
    for name, kind, run in runs:
        found = {number: run["seconds"][number] for number in shared} if run.get("seconds") else {}
        failed = run.get("error") or ", ".join(run.get("errors", {}))
        rows.append([name, kind, f"{sum(found.values()):.2f}", f"{max(found.values(), default=0):.2f}", failed])
    heads = ["compiler", "process", "seconds in total", "slowest", "failed"]
    table = _table(heads, rows)
    return f"## First calls in fresh processes, over the {len(shared)} matmuls that all compile\n\n{table}"


def _of_bench(given: Measurements) -> str:
    """A section with the times of any bench, each over those of kgen."""
    machine = {"card": given.card, **{name: given.machine[name] for name in ("torch", "kgen", "commit", "date")}}
    facts = ", ".join(f"{name} {value}" for name, value in machine.items() if value)
    command = " ".join(["python -m", f"bench.{given.bench}", *given.command])
    return f"## {given.bench}\n\n{facts}\n\n`{command}`\n\n{_times_of(given)}"


def _times_of(given: Measurements) -> str:
    names = given.contenders
    peers = [name for name in names if name != "kgen" and "kgen" in names]
    rows = [
        [
            entry.name.replace("|", "\\|"), *(_cell(entry, name) for name in names),
            *(_number(_over_kgen(entry, peer), 3) for peer in peers),
        ] for entry in given.entries
    ]  # fmt: skip
    found = [[ratio for entry in given.entries if (ratio := _over_kgen(entry, peer))] for peer in peers]
    means = [f"**{geomean(ratios):.3f}**" if ratios else "" for ratios in found]
    if peers:
        rows.append(["**geomean**", *("" for _ in names), *means])
    return _table(["", *(f"{name}, us" for name in names), *(f"{peer} / kgen" for peer in peers)], rows)


def _cell(entry: Entry, name: str) -> str:
    if name in entry.failed:
        return "failed"
    return f"{entry.seconds[name] * 1e6:.1f}" if name in entry.seconds else ""


def _over_kgen(entry: Entry, peer: str) -> float | None:
    return _divided(entry.seconds.get(peer), entry.seconds.get("kgen"))


def _title(row: Row) -> str:
    return f"{row['number']} {row['title']}".replace("|", "\\|")


def _divided(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in heads[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, rule, *rows))


def plots(results: Results, folder: Path) -> list[Path]:
    """Draws what can be drawn; ImportError where matplotlib is not installed."""
    from bench.plots import ratio_bars, roofline

    ours = next((name for name in OURS if name in results.contenders), None)
    drawn = []
    compared = [one for peer in PEERS if ours and (one := results.compared(ours, peer)) is not None]
    if compared:
        drawn.append(ratio_bars(compared, folder / "ratios.png"))
    if any(floor(row) is not None for row in results.rows):
        drawn.append(roofline(results, folder / "roofline.png"))
    return drawn


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out/report"))
    options = parser.parse_args(arguments)
    try:
        results = load(options.json)
    except (OSError, ValueError, KeyError) as cause:
        print(f"cannot read that: {cause}", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    text = markdown(results)
    written = [options.out / "report.md"]
    try:
        drawn = plots(results, options.out)
        text += "".join(f"\n![{path.stem}]({path.name})\n" for path in drawn)
        written += drawn
    except ImportError as cause:
        print(f"no plots: {cause}; pip install matplotlib", file=sys.stderr)
    (options.out / "report.md").write_text(text)
    print(text)
    print("wrote", *written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
