"""What the cost model would choose today, by times that were measured before: needs no GPU, and compiles nothing.

A plan is known by its steps: the kernels and calls in order, matmuls with their templates and configurations. A choice that
was measured as some variant has that variant's time; of one that was not, only what the model says is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from torch.utils._python_dispatch import _disable_current_modes

from bench.contenders import failure
from bench.regret.report import show, variant
from bench.regret.variants import CHOSEN, H100, H200, LIBRARY, Job, MatmulGraph, Way, settled, steps_of, traced
from kgen import config as configuration

Row = Mapping[str, Any]
# What is known of the GPU that a row was measured on, by a part of its name; others are taken for an H100.
FACTS = {"H200": H200, "H100": H100}


@dataclass(frozen=True)
class Replanned:
    """A problem under the model of today: the row with the new choice, or what it is where nobody has measured that."""

    row: Row
    choice: str = ""


def plan_job(job: Job) -> tuple[list[str], list[dict[str, Any]]]:
    """The steps of what is chosen, and what the model says of its matmuls."""
    way = Way(CHOSEN, replace(configuration.current(), measurements=False))
    with settled(job):
        graph = MatmulGraph(job, traced(job.problem, job.device))
        with _disable_current_modes():
            plan = graph.plan(way)
            return steps_of(plan), graph.estimates(plan, way.config)


def on_card(job: Job, row: Row) -> Job:
    """The job for the GPU that a row was measured on, whose bandwidth the choice depends on."""
    known = (facts for name, facts in FACTS.items() if name in row.get("card", ""))
    return job if job.facts is None else replace(job, facts=next(known, H100))


def replanned(row: Row, steps: Sequence[str], matmuls: Sequence[Any]) -> Replanned:
    """The row as if the variant with these steps had been chosen."""
    known = next((v for v in measured(row) if v["steps"] == list(steps)), None)
    if known is None:
        return Replanned(row, described(matmuls) or "; ".join(steps))
    if known["name"] == CHOSEN:
        return Replanned(row)
    kept = [v for v in row["variants"] if v["name"] != CHOSEN]
    # what had the times of the old choice is measured there
    resolved = [{**variant(row, v["name"]), "name": v["name"]} if v.get("same_as") == CHOSEN else v for v in kept]
    old = [{**v, "name": "chosen before"} for v in row["variants"] if v["name"] == CHOSEN and v.get("seconds")]
    fresh = {"name": CHOSEN, "same_as": known["name"], "steps": list(steps), "matmuls": list(matmuls)}
    return Replanned({**row, "variants": [fresh, *resolved, *old]})


def measured(row: Row) -> Iterable[Mapping[str, Any]]:
    """The variants with times of their own, the library's first: its kernels are what is left when templates take nothing."""
    timed = [v for v in row["variants"] if v.get("seconds") is not None]
    return sorted(timed, key=lambda v: v["name"] not in (CHOSEN, LIBRARY))


def described(matmuls: Sequence[Mapping[str, Any]]) -> str:
    """What took the matmuls, with the model's microseconds."""
    return "; ".join(
        f"{p['template']} {' '.join(f'{k}={v}' for k, v in p['config'].items())}: {p['estimate'] * 1e6:.1f} us, library "
        f"{p['estimate_library'] * 1e6:.1f}"
        for p in matmuls
    )


def replan(rows: Sequence[Row], jobs: Sequence[Job], console: Console) -> None:
    """The report with the choices of today, and the problems whose choice nobody has measured. Problems without matmuls keep
    their rows."""
    by_name = {job.problem.name: job for job in jobs}
    found: list[Replanned] = []
    for row in rows:
        if row["name"] not in by_name or not row["matmuls"]:
            found += [Replanned(row)]
            continue
        try:
            found.append(replanned(row, *plan_job(on_card(by_name[row["name"]], row))))
        except Exception as cause:  # one more result
            found.append(Replanned(row, failure(cause)))
    show([one.row for one in found if not one.choice], console)
    for one in found:
        if one.choice:
            console.print(f"not measured: {one.row['name']}: {one.choice}", highlight=False, markup=False, soft_wrap=True)
