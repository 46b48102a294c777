"""How long the kernels of compiled graphs take by the cost model, to be held against what a profile says of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from kgen import backend
from kgen.ir.plan import Launch, Schedule, members, variants
from kgen.pipeline import scheduler_options
from kgen.report.times import Times, kernel_times


@dataclass
class Estimate:
    """Of all steps that launch one function: microseconds of one run by the cost model and at the machine's full rates."""

    estimate: list[float] = field(default_factory=list)
    floor: list[float] = field(default_factory=list)
    choice: str = ""

    def add(self, times: Times, choice: str) -> None:
        self.estimate.append(times.estimate * 1e6)
        self.floor.append(times.floor * 1e6)
        self.choice = choice


@contextmanager
def estimates() -> Iterator[Mapping[str, Estimate]]:
    """Those of the graphs that are compiled inside, by the names of their functions. Graphs from a cache have none."""
    found: dict[str, Estimate] = {}

    def note(work: Any, _info: Any, config: Any) -> Any:
        plan: Schedule = work[1]
        options = scheduler_options(plan.graph, config)
        for kernel in plan.kernels:
            call = next((work[2].calls[one.name] for one in variants(kernel) if one.name in work[2].calls), None)
            if call is not None:
                found.setdefault(call.symbol, Estimate()).add(kernel_times(kernel, plan, options), _choice(kernel))
        return work

    at = next(k for k, stage in enumerate(backend.STAGES) if stage.__name__ == "build")
    with patch.object(backend, "STAGES", (*backend.STAGES[:at], note, *backend.STAGES[at:])):
        yield found


def _choice(kernel: Launch) -> str:
    """The templates of a launch, with their configurations."""
    return "; ".join(str(one.choice) for one in members(kernel) if one.choice is not None)[:200]


def missed(
    found: Mapping[str, Estimate], profile: Mapping[str, tuple[float, float]]
) -> list[tuple[float, float, float, float, str, str]]:
    """The kernels, those that take most longer than estimated first: microseconds of a step as measured, as estimated and at
    full rates, launches of a step, the function and its templates. `profile` has microseconds and launches of a step."""
    rows = []
    for name, (us, launches) in profile.items():
        if (one := found.get(name)) is not None:
            each = len(one.estimate)
            expected, floor = (sum(values) * launches / each for values in (one.estimate, one.floor))
            rows.append((round(us, 1), round(expected, 1), round(floor, 1), round(launches, 2), name, one.choice))
    return sorted(rows, key=lambda row: row[1] - row[0])
