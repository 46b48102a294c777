"""Checks contractions by every candidate kernel on a GPU, and says by its exit status whether all are right.

python -m tests.fuzz_contractions --out out/fuzz-gpu                          nine minutes of problems
python -m tests.fuzz_contractions --shard 2/4 --out out/fuzz-gpu              every fourth problem, from the second one on
python -m tests.fuzz_contractions --known                                     only those that once went wrong
python -m tests.fuzz_contractions --seed 17                                   one problem, all candidates, made smaller
python -m tests.fuzz_contractions --problem '{"kind": "mm", ...}'             one from the JSON of a failure
python -m tests.fuzz_contractions --device cpu --count 20                     small problems in Triton's interpreter
python -m tests.fuzz_contractions --operands --count 50                       what operand tiles read, on numpy arrays
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from .candidates import Candidate
from .check import How
from .crew import Checked, Worker, check_all
from .draw import KNOWN, draw
from .kinds import LAYERS, SMALL, Limits
from .problem import Problem, as_json, from_json
from .report import Report, described, table
from .shrink import shrunk

# Failures that are made smaller, and seconds for each.
SHRUNK, SHRINKING = 3, 60.0
# Seconds between lines of progress where there is no terminal.
QUIET = 30.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3000, help="problems of all shards together, besides the known ones")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--shard", default="1/1", metavar="K/N", help="every N-th problem, from the K-th on")
    parser.add_argument("--minutes", type=float, default=9.0, help="no problem begins afterwards")
    parser.add_argument("--configs", type=int, default=3, help="configurations of each template, others for each seed")
    parser.add_argument("--all-candidates", action="store_true", help="all configurations of each template")
    parser.add_argument("--kinds", nargs="*", default=[], help="only these kinds of contractions")
    parser.add_argument("--known", action="store_true", help="only the problems that once went wrong")
    parser.add_argument("--seed", type=int, help="only this problem, under all configurations")
    parser.add_argument("--problem", help="only this problem, as JSON")
    parser.add_argument("--device", default="cuda", help="cpu: small problems, in Triton's interpreter")
    parser.add_argument("--workers", type=int, default=cores(), help="processes")
    parser.add_argument("--operands", action="store_true", help="check what operand tiles read, without a GPU")
    parser.add_argument("--no-shrink", action="store_true", help="leave failures as large as they are")
    parser.add_argument("--out", type=Path, default=Path("out/fuzz-gpu"), help="folder of the JSON")
    return parser.parse_args(arguments)


def cores() -> int:
    """Those that this process may use: a container may have a share of more."""
    found, quota = len(os.sched_getaffinity(0)), Path("/sys/fs/cgroup/cpu.max")
    most, period = quota.read_text().split() if quota.exists() else ("max", "1")
    return found if most == "max" else max(1, min(found, int(most) // int(period)))


def problems_of(options: argparse.Namespace) -> list[Problem]:
    """Those that the options ask for. Known ones are of a GPU's size."""
    limits = LAYERS if options.operands else SMALL if options.device == "cpu" else Limits()
    if options.problem:
        return [from_json(options.problem)]
    if options.seed is not None:
        return [KNOWN[-1 - options.seed] if options.seed < 0 else draw(options.seed, limits, tuple(options.kinds))]
    known = () if options.kinds or options.operands or options.device == "cpu" else KNOWN
    number, count = map(int, options.shard.split("/"))
    seeds = range(0) if options.known else range(options.first + number - 1, options.first + options.count, count)
    return [*known[number - 1 :: count], *(draw(seed, limits, tuple(options.kinds)) for seed in seeds)]


def how_of(options: argparse.Namespace, problem: Problem) -> How:
    every = options.all_candidates or options.problem or options.seed is not None or problem.seed < 0
    return How(options.device, 0 if every else options.configs)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.operands:
        return _check_operands(options)
    if options.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; --device cpu runs small problems in Triton's interpreter")
    started = time.monotonic()
    problems, report = problems_of(options), Report()
    name = f"shard-{options.shard.replace('/', '-of-')}"
    for one in _progress(options, problems, started + 60 * options.minutes):
        report.add(one)
        if one.failures:
            tqdm.write(described(one), file=sys.stderr)
            report.write(options.out, name)  # what is known survives whatever ends the run
    path = report.write(options.out, name, [] if options.no_shrink else _smaller(report, options))
    print(table([report.as_json()]), report.reasons(), sep="\n\n")
    print(f"{time.monotonic() - started:.0f} s; {len(report.checked)} problems with wrong candidates; {path}")
    return 1 if report.failed else 0


def _check_operands(options: argparse.Namespace) -> int:
    """In this process: nothing runs that could end it."""
    from . import operands  # which needs numpy; a GPU machine may have none

    outcomes, until = Counter[str](), time.monotonic() + 60 * options.minutes
    for problem in tqdm(problems_of(options), unit="problem", mininterval=0.1 if sys.stderr.isatty() else QUIET):
        if time.monotonic() > until:
            break
        small = operands.simplified(problem)
        for one in operands.check(small, most=options.configs if not options.all_candidates else 0):
            outcomes["wrong" if one.wrong else "skipped" if one.skipped else "right"] += 1
            if one.wrong:
                print(f"seed {problem.seed}: {small}\n    {one.candidate}: {one.wrong}")
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
    return 1 if outcomes["wrong"] or not outcomes["right"] else 0


def _progress(options: argparse.Namespace, problems: Sequence[Problem], until: float) -> Iterator[Checked]:
    terminal = sys.stderr.isatty()
    bar = tqdm(total=len(problems), unit="problem", mininterval=0.1 if terminal else QUIET, file=sys.stderr, dynamic_ncols=True)
    with bar:
        for one in check_all(problems, lambda p: how_of(options, p), min(options.workers, len(problems)), until):
            bar.update()
            yield one


def _smaller(report: Report, options: argparse.Namespace) -> list[tuple[Checked, Problem]]:
    """The first failure of a few templates, made smaller under the candidate that fails."""
    found: list[tuple[Checked, Problem]] = []
    worker, seen = Worker(), set[str]()
    for one in report.checked:
        first = next((r for r in one.failures if r.templates and r.candidate != str(Candidate())), one.failures[0])
        if len(found) == SHRUNK or first.candidate.split()[0] in seen:
            continue
        seen.add(first.candidate.split()[0])
        how, until = How(options.device, those=frozenset([first.candidate])), time.monotonic() + SHRINKING

        def fails(problem: Problem, how: How = how, until: float = until) -> bool:
            return time.monotonic() < until and bool(worker.check(problem, how).failures)

        found.append((one, shrunk(one.problem, fails)))
        print(f"seed {one.problem.seed}, made smaller: {found[-1][1]}\n    {json.dumps(as_json(found[-1][1]))}")
    worker.stop()
    return found


if __name__ == "__main__":
    sys.exit(main())
