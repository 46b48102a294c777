"""The printed form of an `Explanation`: a list of headings, tables and lines, written plainly or with rich."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from kgen.commands.graph_report import GraphBreak, GraphReport, bytes_text
from kgen.verdict import REFUSED, Outcome, Verdict

try:
    import rich.console as rich_console
    import rich.table as rich_table
except ImportError:  # rich is no requirement: plain text says the same
    rich_console = rich_table = None  # type: ignore[assignment]

__all__ = ["Heading", "Lines", "Table", "sections", "write"]

# More decisions than this are counted, not listed: `to_dict()` has them all.
MAX_VERDICTS = 30
MAX_OPERATORS = 6


@dataclass(frozen=True, slots=True)
class Heading:
    text: str


@dataclass(frozen=True, slots=True)
class Lines:
    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Columns whose name ends in ``>`` are aligned on the right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Section = Heading | Lines | Table


def sections(graphs: Sequence[GraphReport], breaks: Sequence[GraphBreak]) -> Iterator[Section]:
    """The report from the whole to the parts."""
    kernels, calls = sum(len(g.kernels) for g in graphs), sum(e.calls for g in graphs for e in g.externs)
    counts = [_count(len(graphs), "graph"), _count(kernels, "kernel"), _count(calls, "library call")]
    yield Heading(", ".join([*counts, _count(len(breaks), "graph break")]))
    for graph in graphs:
        yield from _graph(graph)
    if breaks:
        yield Heading("graph breaks")
        yield Lines(tuple(map(str, breaks)))


def _graph(graph: GraphReport) -> Iterator[Section]:
    ratio = f" ({graph.bytes_moved / graph.bytes_minimal:.2f}x the fewest)" if graph.bytes_minimal else ""
    yield Heading(
        f"{graph.role} {graph.name}: moves {bytes_text(graph.bytes_moved)}{ratio}, plans {bytes_text(graph.peak_memory)}"
    )
    if graph.kernels:
        rows = (
            (k.name, _short(k.operators), k.loops, bytes_text(k.bytes_read), bytes_text(k.bytes_written), _first(k.lines))
            for k in graph.kernels
        )
        yield Table(("kernel", "operators", "loops", "reads>", "writes>", "source"), tuple(rows))
    picked = tuple((k.name, *row) for k in graph.kernels for row in k.by_size)
    if picked:
        yield Table(("kernel", "sizes", "configuration"), picked)
    if graph.externs:
        calls = ((e.operator, str(e.calls), e.reason, bytes_text(e.bytes), _first(e.lines)) for e in graph.externs)
        yield Table(("library call", "calls>", "why", "moves>", "source"), tuple(calls))
    yield from _decisions(graph.verdicts)


def _decisions(verdicts: Sequence[Verdict]) -> Iterator[Section]:
    taken = Counter(f"{v.outcome.value} because {v.reason.value}" for v in verdicts if v.outcome in _TAKEN)
    if taken:
        yield Lines(tuple(f"{count} x {text}" for text, count in taken.most_common()))
    replaced = [str(v) for v in verdicts if v.outcome is Outcome.REPLACED]
    if replaced:
        yield Lines(("not compiled, and computed in another way:", *(f"  {line}" for line in replaced)))
    refused = list({str(v): v for v in verdicts if v.outcome in REFUSED}.values())
    if refused:
        shown = [f"{v}{f'; to change it: {v.change}' if v.change else ''}" for v in refused[:MAX_VERDICTS]]
        more = [f"... and {len(refused) - MAX_VERDICTS} more (to_dict() has all)"] if len(refused) > MAX_VERDICTS else []
        yield Lines(("kept apart:", *(f"  {line}" for line in shown + more)))
    anew = list(dict.fromkeys(str(v) for v in verdicts if v.outcome in (Outcome.NOT_FROZEN, Outcome.NOT_PACKED)))
    if anew:
        yield Lines(("at each call, though of frozen tensors:", *(f"  {line}" for line in anew[:MAX_VERDICTS])))


_TAKEN = (
    Outcome.FUSED, Outcome.RECOMPUTED, Outcome.STORED, Outcome.CHOSEN, Outcome.BATCHED, Outcome.SHARED, Outcome.FROZEN,
    Outcome.PACKED,
)  # fmt: skip


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _short(operators: Iterable[str]) -> str:
    names = list(dict.fromkeys(op.split(".")[1] if op.count(".") else op for op in operators))
    rest = len(names) - MAX_OPERATORS
    return ", ".join(names[:MAX_OPERATORS]) + (f" +{rest}" if rest > 0 else "")


def _first(lines: Sequence[str]) -> str:
    return "" if not lines else lines[0] if len(lines) == 1 else f"{lines[0]} (+{len(lines) - 1} lines)"


# ---- writing ----------------------------------------------------------------------------------------------------------


def write(report: Iterable[Section], file: TextIO) -> None:
    console: Any = rich_console.Console(file=file) if rich_console is not None else None
    for section in report:
        if console is not None and console.is_terminal:
            _write_rich(section, console)
        else:
            file.write("\n".join(_plain(section)) + "\n")


def _write_rich(section: Section, console: Any) -> None:
    if isinstance(section, Heading):
        console.print(section.text, style="bold", markup=False, highlight=False)
    elif isinstance(section, Lines):
        for line in section.items:
            console.print(f"  {line}", markup=False, highlight=False)
    else:
        table = rich_table.Table(box=None, pad_edge=True)
        for name in section.columns:
            table.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left", overflow="fold")
        for row in section.rows:
            table.add_row(*(cell.replace("[", r"\[") for cell in row))
        console.print(table)


def _plain(section: Section) -> list[str]:
    if isinstance(section, Heading):
        return ["", section.text]
    if isinstance(section, Lines):
        return [f"  {line}" for line in section.items]
    rows = [tuple(name.rstrip(">") for name in section.columns), *section.rows]
    widths = [max(len(row[k]) for row in rows) for k in range(len(section.columns))]
    right = [name.endswith(">") for name in section.columns]
    aligned = (
        "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)) for row in rows
    )
    return [f"  {line}".rstrip() for line in aligned]
