"""What a run says: a table by kind, and every failure as JSON, from which it can be run again.

python -m tests.fuzz_contractions.report out/fuzz-gpu/*.json    one table of several shards
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
            "untaken": self.untaken,
        }

    def write(self, folder: Path, name: str, shrunk: Sequence[tuple[Checked, Problem]] = ()) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.json"
        path.write_text(json.dumps(self.as_json(shrunk), indent=1), encoding="utf-8")
        return path


def table(reports: Sequence[dict[str, Any]]) -> str:
    """The outcomes of shards together, by kind and by template."""
    problems, kinds = _added(r["problems"] for r in reports), _joined(r["outcomes"] for r in reports)
    templates = _joined(r["templates"] for r in reports)
    lines = [_row(("kind", "problems", *COLUMNS))]
    lines += [_row((kind, problems[kind], *(kinds[kind][c] for c in COLUMNS))) for kind in sorted(kinds)]
    total = _added(kinds.values())
    lines += [_row(("all", sum(problems.values()), *(total[c] for c in COLUMNS))), "", _row(("template", "configs", *COLUMNS))]
    for name in sorted(templates):
        configs = {one for r in reports for one in r["configs"].get(name, ())}
        lines.append(_row((name, len(configs), *(templates[name][c] for c in COLUMNS))))
    untaken, eager = sum(r["untaken"] for r in reports), sum(len(r["eager"]) for r in reports)
    return "\n".join([*lines, "", f"{untaken} problems are taken by no template; eager itself is farther off in {eager}"])


def _added(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    return sum(map(Counter, counts), Counter[str]())


def _joined(tables: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for one in tables:
        for name, counts in one.items():
            found[name] = found.get(name, Counter()) + Counter(counts)
    return found


def main(arguments: Sequence[str]) -> None:
    """One table of the JSON files of several shards."""
    print(table([json.loads(Path(name).read_text(encoding="utf-8")) for name in arguments]))


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


if __name__ == "__main__":
    main(sys.argv[1:])
