"""A report as one page of HTML that needs nothing else: no network, no files beside it.

Kernels are drawn as a graph: one box for each step, in layers by what it needs, with the bytes that it moves, and its time by
the cost model against the floor. Below are each kernel's verdicts, its IR and its code, side by side. Jinja escapes all text
that it puts into the page (`autoescape`): the names in it are the user's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

import jinja2

from kgen.report.graph_report import GraphBreak, GraphReport, KernelReport, StepReport, bytes_text, time_text
from kgen.verdict import REFUSED, Verdict

__all__ = ["framed", "page"]

# A box of the graph and the space around it, in pixels; steps in one row, at most; letters of a label.
BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y = 220, 54, 26, 40
MOST_IN_ROW, LETTERS = 6, 30


def page(graphs: Sequence[GraphReport], breaks: Sequence[GraphBreak]) -> str:
    """The page of a report."""
    drawn = [_Drawn(graph) for graph in graphs]
    return _template().render(graphs=drawn, breaks=[str(one) for one in breaks], bytes_text=bytes_text, time_text=time_text)


def framed(text: str) -> str:
    """A page inside of another one, whose styles and scripts it neither sees nor changes."""
    style = "width: 100%; height: 40em; border: 1px solid #8888"
    return f'<iframe style="{style}" sandbox="allow-scripts" srcdoc="{escape(text, quote=True)}"></iframe>'


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("page.html.jinja")


# ---- the graph of steps ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Box:
    """A step as a box: its upper left corner, and three lines of text. A `share` of the graph's bytes makes it darker."""

    number: int
    step: StepReport
    x: int
    y: int
    title: str
    where: str
    cost: str
    share: float


@dataclass(frozen=True, slots=True)
class _Edge:
    """A tensor between two steps, as a curve."""

    path: str
    tensor: str


class _Drawn:
    """A graph as the page shows it."""

    def __init__(self, graph: GraphReport) -> None:
        self.report = graph
        self.kernels = {kernel.name: kernel for kernel in graph.kernels}
        cells = _cells(graph.steps)
        largest = max((step.bytes for step in graph.steps), default=1) or 1
        self.drawn = [self._box(k, step, cells[k], largest) for k, step in enumerate(graph.steps)]
        self.edges = list(_edges(graph.steps, self.drawn))
        self.width = max((box.x for box in self.drawn), default=0) + BOX_WIDTH + GAP_X
        self.height = max((box.y for box in self.drawn), default=0) + BOX_HEIGHT + GAP_Y
        self.others = [v for v in graph.verdicts if not any(_is_about(v, kernel) for kernel in graph.kernels)]

    def _box(self, number: int, step: StepReport, cell: tuple[int, int], largest: int) -> _Box:
        kernel = self.kernels.get(step.name)
        took = "" if kernel is None else f", {time_text(kernel.seconds)} (floor {time_text(kernel.floor)})"
        where = ", ".join(kernel.modules) if kernel is not None else "library call"
        x, y = GAP_X + cell[0] * (BOX_WIDTH + GAP_X), GAP_Y + cell[1] * (BOX_HEIGHT + GAP_Y)
        cost = f"{bytes_text(step.bytes)}{took}"
        return _Box(number, step, x, y, _short(step.name), _short(where), cost, round(step.bytes / largest, 3))

    def verdicts_of(self, kernel: KernelReport) -> list[Verdict]:
        """The verdicts that name the kernel, or what it computes."""
        return [verdict for verdict in self.report.verdicts if _is_about(verdict, kernel)]

    def lost(self, verdict: Verdict) -> int:
        """The bytes that a refusal costs."""
        return next((one.bytes_lost for one in self.report.refusals if one.verdict == verdict), 0)

    def is_refusal(self, verdict: Verdict) -> bool:
        return verdict.outcome in REFUSED


def _is_about(verdict: Verdict, kernel: KernelReport) -> bool:
    return not {verdict.producer, verdict.consumer, *verdict.kernels}.isdisjoint((kernel.name, *kernel.nodes))


def _short(text: str) -> str:
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 3]}..."


def _cells(steps: Sequence[StepReport]) -> list[tuple[int, int]]:
    """Column and row of each step: below all that it needs, rows filled from the left."""
    filled: dict[int, int] = {}
    found: list[tuple[int, int]] = []
    for step in steps:
        row = max((found[before][1] + 1 for before, _ in step.after), default=0)
        while filled.get(row, 0) >= MOST_IN_ROW:
            row += 1
        found.append((filled.get(row, 0), row))
        filled[row] = filled.get(row, 0) + 1
    return found


def _edges(steps: Sequence[StepReport], drawn: Sequence[_Box]) -> Iterator[_Edge]:
    for step, box in zip(steps, drawn, strict=True):
        for before, tensor in step.after:
            source = drawn[before]
            x1, y1 = source.x + BOX_WIDTH // 2, source.y + BOX_HEIGHT
            x2, y2 = box.x + BOX_WIDTH // 2, box.y
            bend = max(GAP_Y, (y2 - y1) // 2)
            # past the steps in between, not behind their text
            out = BOX_WIDTH * 4 // 5 if x1 == x2 and y2 - y1 > GAP_Y else 0
            yield _Edge(f"M{x1},{y1} C{x1 + out},{y1 + bend} {x2 + out},{y2 - bend} {x2},{y2}", tensor)
