"""One HTML page of a run of a bench, or of two runs compared.

    python -m bench.page before.json after.json --out out/bench/compare.html
    python -m bench.page run.json --out out/bench/run.html

Reads files of `bench/measurements.py`. The page needs nothing from elsewhere: plots are SVG with names and values, in light and
dark. A row is flagged where eager against itself differs by more than 5%: between the runs, or within one where the bench timed
eager twice. What such a row says of the contenders is then the machine's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from bench.measure import geomean
from bench.measurements import Entry, Measurements, NotMeasurements, read

__all__ = ["NOISE", "Compared", "compared", "main", "page"]

NOISE = 0.05
EAGER, AGAIN, OURS = "eager", "eager-again", "kgen"
FACTS = ("torch", "triton", "kgen", "commit", "date")
# Of the plots, in units of SVG.
LABEL, BAR, WIDTH, VALUE = 190, 16, 420, 150

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --paper: #fff; --line: #c9d1dc; --a: #3f7fbf; --b: #d9822b; --flag: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9f0; --paper: #14181f; --line: #3a4452; --a: #6ba7e6; --b: #f0a45b; --flag: #ff8a80; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem; margin: 2rem auto; }
table { border-collapse: collapse; } th, td { padding: .2rem .7rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; } .flag { color: var(--flag); font-weight: 600; }
svg { display: block; max-width: 100%; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.before { fill: var(--a); } .after { fill: var(--b); } code { overflow-wrap: anywhere; }
"""


@dataclass(frozen=True, slots=True)
class Compared:
    """A row of the page: an entry of the later run (`after`), and that of the earlier one where there is one."""

    name: str
    before: Entry | None
    after: Entry | None

    @property
    def noise(self) -> float | None:
        """The largest of eager's times over the smallest: its own, before, and again; None where it was timed once."""
        runs = [one for one in (self.before, self.after) if one is not None]
        found = [one.seconds[name] for one in runs for name in (EAGER, AGAIN) if one.seconds.get(name)]
        return max(found) / min(found) if len(found) > 1 else None

    @property
    def is_flagged(self) -> bool:
        return self.noise is not None and self.noise > 1 + NOISE

    def change(self, name: str) -> float | None:
        """A contender's time after over its time before."""
        return _over(self.after, name, self.before, name)

    def against_eager(self) -> float | None:
        """The change of kgen's time over eager's: what is left where the whole machine was faster or slower."""
        ours, eager = self.change(OURS), self.change(EAGER)
        return ours / eager if ours and eager else None


def _over(one: Entry | None, name: str, other: Entry | None, of: str) -> float | None:
    if one is None or other is None or not one.seconds.get(name) or not other.seconds.get(of):
        return None
    return one.seconds[name] / other.seconds[of]


def compared(before: Measurements | None, after: Measurements) -> list[Compared]:
    """The rows of both runs, in the later one's order; what it has no more comes last."""
    old = {} if before is None else {entry.name: entry for entry in before.entries}
    new = {entry.name: entry for entry in after.entries}
    return [Compared(name, old.get(name), new.get(name)) for name in dict.fromkeys([*new, *old])]


# ---- the page -----------------------------------------------------------------------------------------------------------


def page(before: Measurements | None, after: Measurements) -> str:
    """The page as text."""
    rows = compared(before, after)
    runs = [run for run in (before, after) if run is not None]
    names = list(dict.fromkeys(name for run in runs for name in run.contenders))
    flagged = sum(one.is_flagged for one in rows)
    parts = [f"<h1>{escape(after.bench)}</h1>", *map(_facts, runs), _summary(before, rows, flagged)]
    parts += [_table(before is not None, rows, names), "<h2>Times</h2>", *(_plot(one, names) for one in rows)]
    title = f"{after.bench}, compared" if before is not None else after.bench
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    opened = f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>'
    return "\n".join([opened, *parts, "</body></html>", ""])


def _facts(run: Measurements) -> str:
    facts = ", ".join([run.card, *(f"{name} {run.machine[name]}" for name in FACTS if run.machine.get(name))])
    command = " ".join(["python -m", f"bench.{run.bench}", *run.command])
    return f"<p>{escape(facts)}<br><code>{escape(command)}</code></p>"


def _summary(before: Measurements | None, rows: Sequence[Compared], flagged: int) -> str:
    lines = [f"{flagged} of {len(rows)} rows are flagged: eager against itself differs by more than {NOISE:.0%}."]
    if before is not None:
        quiet = [found for one in rows if not one.is_flagged and (found := one.against_eager())]
        if quiet:
            lines.append(f"kgen's time over eager's, after over before, without those rows: {geomean(quiet):.3f} in geomean.")
    return f"<p>{' '.join(map(escape, lines))}</p>"


def _table(two: bool, rows: Sequence[Compared], names: Sequence[str]) -> str:
    heads = ["", *(f"{name}, us" for name in names), "eager / itself"]
    heads += [*(f"{name}: after / before" for name in names), "kgen over eager: after / before"] if two else []
    lines = [f"<tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>"]
    for one in rows:
        flag = ' class="flag"' if one.is_flagged else ""
        lines.append(f"<tr{flag}>{''.join(f'<td>{escape(cell)}</td>' for cell in _cells(two, one, names))}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _cells(two: bool, one: Compared, names: Sequence[str]) -> Iterator[str]:
    yield one.name + (" (flagged)" if one.is_flagged else "")
    for name in names:
        yield _microseconds(one.after, name)
    yield _ratio(one.noise)
    if two:
        yield from (_ratio(one.change(name)) for name in names)
        yield _ratio(one.against_eager())


def _microseconds(entry: Entry | None, name: str) -> str:
    if entry is None:
        return "not measured"
    if name in entry.failed:
        return "failed"
    return f"{entry.seconds[name] * 1e6:.1f}" if name in entry.seconds else ""


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _plot(one: Compared, names: Sequence[str]) -> str:
    """A bar for each contender of each run, with its name and its value."""
    runs = [("before", one.before), ("after", one.after)]
    bars = [(f"{name}, {when}" if one.before and one.after else name, when, entry.seconds[name])
            for name in names for when, entry in runs if entry is not None and entry.seconds.get(name)]  # fmt: skip
    longest = max((seconds for *_, seconds in bars), default=1.0)
    height = len(bars) * (BAR + 6) + 6
    drawn = [_bar(k, label, when, seconds, longest) for k, (label, when, seconds) in enumerate(bars)]
    flag = ' class="flag"' if one.is_flagged else ""
    title = f"<h3{flag}>{escape(one.name)}</h3>"
    size = f'viewBox="0 0 {LABEL + WIDTH + VALUE} {height}" width="{LABEL + WIDTH + VALUE}" height="{height}"'
    return f'{title}<svg role="img" aria-label="{escape(one.name, quote=True)}" {size}>{"".join(drawn)}</svg>'


def _bar(number: int, label: str, when: str, seconds: float, longest: float) -> str:
    top = 6 + number * (BAR + 6)
    width = max(1.0, WIDTH * seconds / longest)
    text = f'y="{top + BAR - 4}"'
    return (
        f'<text x="{LABEL - 8}" {text} text-anchor="end">{escape(label)}</text>'
        f'<rect class="{when}" x="{LABEL}" y="{top}" width="{width:.1f}" height="{BAR}"/>'
        f'<text x="{LABEL + width + 6:.1f}" {text}>{seconds * 1e6:.1f} us</text>'
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", nargs="+", type=Path, help="a run; or an earlier one and a later one")
    parser.add_argument("--out", type=Path, default=Path("out/bench/page.html"))
    options = parser.parse_args(arguments)
    if len(options.json) > 2:
        parser.error("give one file or two")
    try:
        *earlier, after = map(read, options.json)
    except (OSError, NotMeasurements) as cause:
        print(f"cannot read that: {cause}", file=sys.stderr)
        return 1
    if earlier and earlier[0].bench != after.bench:
        print(f"these are runs of two benches: {earlier[0].bench} and {after.bench}", file=sys.stderr)
        return 1
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page(earlier[0] if earlier else None, after), encoding="utf-8")
    print("wrote", options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
