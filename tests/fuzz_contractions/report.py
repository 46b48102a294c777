"""What a run says: a table by kind, and every failure as JSON, from which it can be run again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .check import CRASHED, HUNG, NOT_COMPILED, NOT_RUN, RIGHT, WRONG, Result
from .crew import Checked
from .problem import Problem, as_json

# Reasons for unusable candidates that are printed.
REASONS = 10
COLUMNS = (RIGHT, WRONG, CRASHED, HUNG, NOT_COMPILED, NOT_RUN)


@dataclass
class Report:
    """Outcomes by kind and by template, failures, and candidates that do not compile or launch, which are no failures."""

    by_kind: dict[str, Counter[str]] = field(default_factory=dict)
    by_template: dict[str, Counter[str]] = field(default_factory=dict)
    configs: dict[str, set[str]] = field(default_factory=dict)
    problems: Counter[str] = field(default_factory=Counter)
    checked: list[Checked] = field(default_factory=list)
    unusable: list[tuple[Problem, Result]] = field(default_factory=list)
    eager: list[tuple[Problem, Result]] = field(default_factory=list)
    untaken: int = 0

    def add(self, one: Checked) -> None:
        kind = one.problem.kind
        self.problems[kind] += 1
        candidates = [r for r in one.results if r.candidate != "eager"]
        self.eager += [(one.problem, r) for r in one.results if r.candidate == "eager" and r.text]
        self.by_kind.setdefault(kind, Counter()).update(r.outcome for r in candidates)
        for r in candidates:
            template = r.candidate.split()[0]
            self.by_template.setdefault(template, Counter())[r.outcome] += 1
            self.configs.setdefault(template, set()).update([r.candidate] if r.outcome == RIGHT else [])
        self.unusable += [(one.problem, r) for r in candidates if r.outcome in (NOT_COMPILED, NOT_RUN)]
        self.untaken += not any(r.templates for r in candidates)
        if one.failures:
            self.checked.append(one)

    @property
    def failed(self) -> bool:
        return bool(self.checked) or not self.problems

    def table(self) -> str:
        lines = [_row(("kind", "problems", *COLUMNS))]
        lines += [_row((k, self.problems[k], *(self.by_kind[k][c] for c in COLUMNS))) for k in sorted(self.by_kind)]
        total = sum(self.by_kind.values(), Counter[str]())
        lines += [_row(("all", sum(self.problems.values()), *(total[c] for c in COLUMNS))), ""]
        lines += [_row(("template", "configs", *COLUMNS))]
        for name, found in sorted(self.by_template.items()):
            lines.append(_row((name, len(self.configs[name]), *(found[c] for c in COLUMNS))))
        lines += ["", f"{self.untaken} problems are taken by no template; eager itself is farther off in {len(self.eager)}"]
        return "\n".join(lines)

    def reasons(self) -> str:
        """Why candidates do not compile or launch: the commonest reasons, each with an example."""
        groups: dict[str, list[tuple[Problem, Result]]] = {}
        for problem, result in self.unusable:
            groups.setdefault(f"{result.outcome}: {result.text.splitlines()[0][:120]}", []).append((problem, result))
        common = sorted(groups.items(), key=lambda item: -len(item[1]))[:REASONS]
        return "\n".join(f"{len(found)} x {reason}\n    {found[0][1].candidate}: {found[0][0]}" for reason, found in common)

    def as_json(self, shrunk: Sequence[tuple[Checked, Problem]] = ()) -> dict[str, Any]:
        smaller = {id(one): as_json(problem) for one, problem in shrunk}
        return {
            "problems": dict(self.problems),
            "outcomes": {kind: dict(found) for kind, found in self.by_kind.items()},
            "templates": {name: dict(found) for name, found in self.by_template.items()},
            "configs": {name: sorted(found) for name, found in self.configs.items()},
            "failures": [
                {
                    "problem": as_json(one.problem),
                    "shrunk": smaller.get(id(one)),
                    "results": [r.as_json() for r in one.failures],
                }
                for one in self.checked
            ],
            "unusable": _listed(self.unusable),
            "eager": _listed(self.eager),
        }

    def write(self, folder: Path, name: str, shrunk: Sequence[tuple[Checked, Problem]] = ()) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.json"
        path.write_text(json.dumps(self.as_json(shrunk), indent=1), encoding="utf-8")
        return path


def described(one: Checked) -> str:
    lines = [f"seed {one.problem.seed}: {one.problem}"]
    lines += [f"    {r.outcome}: {r.candidate}: {r.text}" for r in one.failures[:6]]
    more = len(one.failures) - 6
    return "\n".join(lines + ([f"    and {more} more candidates"] if more > 0 else []))


def _listed(pairs: Iterable[tuple[Problem, Result]]) -> list[dict[str, Any]]:
    return [{"problem": as_json(problem), "result": result.as_json()} for problem, result in pairs]


def _row(cells: Sequence[object]) -> str:
    first, *rest = map(str, cells)
    return f"{first:<28}" + "".join(f"{cell:>13}" for cell in rest)
