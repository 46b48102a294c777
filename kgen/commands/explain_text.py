"""The printed form of an `Explanation`: a list of headings, tables and lines, written plainly or with rich."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from kgen.report.graph_report import GraphBreak, GraphReport, KernelReport, Refusal, bytes_text, time_text
from kgen.verdict import Outcome, Verdict

try:
    import rich.console as rich_console
    import rich.table as rich_table
except ImportError:  # rich is no requirement: plain text says the same
    rich_console = rich_table = None  # type: ignore[assignment]

__all__ = ["Heading", "Lines", "Table", "plain", "sections", "summary", "write"]

# Columns of the plain form. Its lines, where nobody asks for more, are those of a screen or two.
WIDTH, MAX_LINES = 80, 59
# Refusals, and kernels of each graph, where nobody says how many.
MOST_REFUSALS, MOST_KERNELS, FEWEST_REFUSALS = 10, 12, 3
MAX_CALLS, MAX_OTHERS = 3, 30
# Kinds of decisions of each graph, of one and of several.
MOST_DECISIONS, FEW_DECISIONS = 20, 3
NAME_WIDTH, PLACE_WIDTH = 24, 18


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


def _lines(items: Iterable[str]) -> Lines:
    """Lines that fit; the second and further ones of an item are deeper."""
    return Lines(tuple(part for item in items for part in _wrapped(item)))


def _wrapped(item: str) -> list[str]:
    indent = " " * (len(item) - len(item.lstrip()))
    return textwrap.wrap(
        item.lstrip(), WIDTH - 2, initial_indent=indent, subsequent_indent=f"{indent}    ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _heading(text: str) -> Heading:
    return Heading("\n".join(_wrapped(text)))


def summary(graphs: Sequence[GraphReport], breaks: Sequence[GraphBreak]) -> str:
    """How much there is of everything, in a line."""
    kernels, calls = sum(len(g.kernels) for g in graphs), sum(e.calls for g in graphs for e in g.externs)
    counts = [_count(len(graphs), "graph"), _count(kernels, "kernel"), _count(calls, "library call")]
    moved, fewest = sum(g.bytes_moved for g in graphs), sum(g.bytes_minimal for g in graphs)
    return ", ".join([*counts, _count(len(breaks), "graph break")]) + f"; moves {bytes_text(moved)}{_ratio(moved, fewest)}"


def sections(graphs: Sequence[GraphReport], breaks: Sequence[GraphBreak], top: int | None = None) -> Iterator[Section]:
    """The report from the whole to the parts. `top` refusals and kernels of each graph are listed; without it so many that the
    plain form has `MAX_LINES` lines, where that leaves something to say."""
    kernels = top if top is not None else max(4, MOST_KERNELS // max(1, len(graphs)))
    decisions = MOST_DECISIONS if top is not None or len(graphs) == 1 else FEW_DECISIONS
    made = [_heading(summary(graphs, breaks)), *(section for graph in graphs for section in _graph(graph, kernels, decisions))]
    if breaks:
        made += [_heading("graph breaks"), _lines(map(str, breaks))]
    yield from made
    room = MAX_LINES - sum(len(_plain(section)) for section in made)
    yield from _refusals([one for g in graphs for one in g.refusals], top, room)


def _ratio(moved: int, fewest: int) -> str:
    return f" ({moved / fewest:.2f}x the fewest)" if fewest else ""


def _graph(graph: GraphReport, most: int, decisions: int) -> Iterator[Section]:
    took = f", takes about {time_text(graph.seconds)}" if graph.kernels else ""
    moved = f"moves {bytes_text(graph.bytes_moved)}{_ratio(graph.bytes_moved, graph.bytes_minimal)}"
    yield _heading(f"{graph.role} {graph.name}: {moved}, plans {bytes_text(graph.peak_memory)}{took}")
    groups = _equal_kernels(graph.kernels)
    if groups:
        yield Table(("", "kernel", "moves>", "takes>", "floor>", "in"), tuple(map(_row, groups[:most])))
        if len(groups) > most:
            rest = groups[most:]
            yield _lines(
                (f"and {sum(map(len, rest))} more, which move {bytes_text(_bytes_of(rest))} (all with --top {len(groups)})",)
            )
    picked = tuple((k.name, *row) for k in graph.kernels for row in k.by_size)
    if picked:
        yield Table(("kernel", "sizes", "configuration"), picked)
    if graph.externs:
        calls = sorted(graph.externs, key=lambda one: -one.bytes)
        lines = [
            f"{one}, moves {bytes_text(one.bytes)}{_place(one.modules, one.lines)}" for one in calls[: max(most, MAX_CALLS)]
        ]
        more = [f"and {len(calls) - len(lines)} more operators"] if len(calls) > len(lines) else []
        yield _lines(("library calls:", *(f"  {line}" for line in (*lines, *more))))
    yield from _decisions(graph.verdicts, decisions)


def _equal_kernels(kernels: Iterable[KernelReport]) -> list[list[KernelReport]]:
    """Kernels of equal layers as one group, what moves the most first."""
    groups: dict[object, list[KernelReport]] = {}
    for kernel in kernels:
        key = kernel.operators, kernel.loops, _patterns(kernel.modules), kernel.lines[:1]
        groups.setdefault(key, []).append(kernel)
    return sorted(groups.values(), key=lambda group: -sum(k.bytes for k in group))


def _row(group: Sequence[KernelReport]) -> tuple[str, ...]:
    first = group[0]
    times = (time_text(sum(k.seconds for k in group)), time_text(sum(k.floor for k in group)))
    modules = _patterns(first.modules) if len(group) > 1 else first.modules
    where = _some(modules) if modules else _first(first.lines).partition(" ")[0]
    return (
        f"{len(group)} x",
        _cut(_short(first.operators), NAME_WIDTH),
        bytes_text(_bytes_of([group])),
        *times,
        _cut(where, PLACE_WIDTH),
    )


def _bytes_of(groups: Iterable[Sequence[KernelReport]]) -> int:
    return sum(k.bytes for group in groups for k in group)


def _patterns(paths: Iterable[str]) -> tuple[str, ...]:
    """The paths with a star for the number of a layer."""
    return tuple(dict.fromkeys(".".join("*" if part.isdecimal() else part for part in path.split(".")) for path in paths))


def _place(modules: Sequence[str], lines: Sequence[str]) -> str:
    where = _some(_patterns(modules)) if modules else _first(lines)
    return f" ({where})" if where else ""


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} +{len(names) - 1}"


def _decisions(verdicts: Sequence[Verdict], most: int) -> Iterator[Section]:
    taken = Counter(map(_taken, (v for v in verdicts if v.outcome in _TAKEN)))
    if taken:
        rest = sum(taken.values()) - sum(count for _, count in taken.most_common(most))
        lines = [f"{count} x {text}" for text, count in taken.most_common(most)]
        yield _lines((*lines, *([f"{rest} x other decisions"] if rest else [])))
    replaced = [str(v) for v in verdicts if v.outcome is Outcome.REPLACED]
    if replaced:
        yield _lines(("not compiled, and computed in another way:", *(f"  {line}" for line in replaced)))
    anew = list(dict.fromkeys(str(v) for v in verdicts if v.outcome in (Outcome.NOT_FROZEN, Outcome.NOT_PACKED)))
    if anew:
        yield _lines(("at each call, though of frozen tensors:", *(f"  {line}" for line in anew[:MAX_OTHERS])))


def _taken(verdict: Verdict) -> str:
    """What was done and why; of loops and equal layers also how many."""
    detail = (
        f" ({verdict.detail})"
        if verdict.detail and verdict.outcome in (Outcome.BATCHED, Outcome.SHARED, Outcome.ROLLED)
        else ""
    )
    return f"{verdict.outcome.value} because {verdict.reason.value}{detail}"


_TAKEN = (
    Outcome.FUSED, Outcome.RECOMPUTED, Outcome.STORED, Outcome.CHOSEN, Outcome.BATCHED, Outcome.SHARED, Outcome.ROLLED,
    Outcome.FROZEN, Outcome.PACKED, Outcome.RECORDED, Outcome.FOLDED, Outcome.CHANNELS_LAST, Outcome.COPIED,
)  # fmt: skip


def _refusals(refusals: Iterable[Refusal], top: int | None, room: int) -> Iterator[Section]:
    """The refusals that cost the most, those of equal layers together."""
    groups: dict[object, list[Refusal]] = {}
    for one in refusals:
        groups.setdefault((one.verdict.outcome, one.verdict.reason, one.kinds, _patterns(one.verdict.paths)), []).append(one)
    ranked = sorted(groups.values(), key=lambda group: -sum(one.bytes_lost for one in group))
    if not ranked:
        return
    yield _heading("kept apart, the most bytes lost first")
    room -= 3  # this heading and the last line
    for number, group in enumerate(ranked):
        made = _lines(_refusal_lines(group))
        room -= len(_plain(made))
        is_full = number >= top if top is not None else number >= MOST_REFUSALS or (room < 0 and number >= FEWEST_REFUSALS)
        if is_full:
            yield _lines((f"and {sum(map(len, ranked[number:]))} more (--top {len(ranked)}; one with --why NAME)",))
            return
        yield made


def _refusal_lines(group: Sequence[Refusal]) -> Iterator[str]:
    first = group[0].verdict
    pairs = zip(group[0].kinds, first.paths, strict=True)
    names = [f"{_short([kind])} [{_some(_patterns([path]))}]" if path else _short([kind]) for kind, path in pairs if kind]
    parties = first.parties if len(group) == 1 else (f"{len(group)} x {' + '.join(names)}",)
    yield f"{bytes_text(sum(one.bytes_lost for one in group))}: {' + '.join(parties)}"
    detail = f" ({first.detail})" if first.detail and len(group) == 1 else ""
    yield f"  {first.outcome.value}: {first.reason.value}{detail}"
    if first.change:
        yield f"  to change it: {first.change}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _short(operators: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(op.split(".")[1] if op.count(".") else op for op in operators))


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _first(lines: Sequence[str]) -> str:
    return lines[0] if lines else ""


# ---- writing ----------------------------------------------------------------------------------------------------------


def write(report: Iterable[Section], file: TextIO) -> None:
    console: Any = rich_console.Console(file=file) if rich_console is not None else None
    for section in report:
        if console is not None and console.is_terminal:
            _write_rich(section, console)
        else:
            file.write("".join(f"{line}\n" for line in _plain(section)))


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


def plain(report: Iterable[Section]) -> Iterator[str]:
    """The lines of the plain form."""
    return (line for section in report for line in _plain(section))


def _plain(section: Section) -> list[str]:
    if isinstance(section, Heading):
        return ["", *section.text.splitlines()]
    if isinstance(section, Lines):
        return [f"  {line}" for line in section.items]
    rows = [tuple(name.rstrip(">") for name in section.columns), *section.rows]
    widths = [max(len(row[k]) for row in rows) for k in range(len(section.columns))]
    right = [name.endswith(">") for name in section.columns]
    aligned = (
        "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)) for row in rows
    )
    return [f"  {line}".rstrip() for line in aligned]
