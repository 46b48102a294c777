"""`kgen bisect`: finds what a script makes kgen compute wrongly."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kgen.bisection.cause import Cause, cause_of
from kgen.bisection.script import Written, write_script
from kgen.bisection.search import Found, Seen, Smallest, WrongGraph, smallest_part, watching
from kgen.bisection.trial import Trial, trial_config
from kgen.capture.operators import call_of, source_line
from kgen.capture.paths import paths_in
from kgen.commands.exit_codes import OK, WRONG, misused
from kgen.commands.script import imported, run_script

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """0 where every call agrees with eager, 1 where one does not."""
    if not options.target.is_file():
        return misused(f"there is no script {options.target}")
    if options.trials < 1:
        return misused("--trials takes a number from 1 on")
    sys.path.insert(0, str(options.target.resolve().parent))
    for module in options.module:
        imported(module)
    try:
        with watching() as seen:
            well = run_script(options.target, options.arguments)
    except Found as found:
        return _explained(found.graph, options)
    return _nothing(seen, well)


def _nothing(seen: Seen, well: bool) -> int:
    if not seen.calls and not well:
        return WRONG
    if not seen.calls:
        print('kgen: nothing was compiled by kgen; call a function made with torch.compile(f, backend="kgen")', file=sys.stderr)
        return WRONG
    print(
        f"right: {seen.calls} calls of {seen.graphs} graphs agree with their operators in eager.\n"
        "If the script is wrong all the same, its capture is: see options={'fallback': 'all'} and 'loop_batching'."
    )
    return OK if well else WRONG


def _explained(graph: WrongGraph, options: argparse.Namespace) -> int:
    print(f"{graph.info.name} is wrong: {graph.wrong.text}")
    found = smallest_part(graph, options.trials, _progress)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if found is None:
        print(
            "no part of it is wrong by itself, with sizes that are numbers.\n"
            f"The fault needs what the whole graph has: its symbolic sizes, or its options ({_modes(graph)})."
        )
        return WRONG
    trial = Trial(trial_config(graph.config), graph.state)
    _print_part(graph, found)
    _print_cause(cause_of(found.part, found.wrong, trial))
    title = f"A part of {graph.info.name} that kgen computes wrongly."
    _print_script(write_script(options.out, found.part, trial, title, options.module))
    return WRONG


def _modes(graph: WrongGraph) -> str:
    return f"mode={graph.config.mode!r}, freezing={graph.config.freezing}"


def _progress(number: int, size: int) -> None:
    if sys.stderr.isatty():
        print(f"\rtrial {number}: {size} operators   ", end="", file=sys.stderr, flush=True)


def _print_part(graph: WrongGraph, found: Smallest) -> None:
    calls = found.part.calls
    print(f"smallest part: {len(calls)} of {found.operators} operators ({found.trials} trials): {found.wrong.text}")
    paths = paths_in(graph.gm, graph.info.paths)
    for node in calls:
        print(f"  {_joined(call_of(node).operator, paths.get(node.name, ''), source_line(node))}")


def _joined(*parts: str) -> str:
    return "  ".join(part for part in parts if part)


def _print_cause(cause: Cause) -> None:
    print(f"stage: {cause.stage}: {cause.why}")
    _print_list("rules", cause.rules)
    _print_list("kernels", [f"{k.name} ({k.template}): {', '.join(k.operators)}" for k in cause.kernels])
    _print_list("right with", [f"options={dict(options)!r}" for options in cause.right_with])


def _print_list(title: str, lines: Sequence[str]) -> None:
    if lines:
        print(f"{title}:")
    for line in lines:
        print(f"  {line}")


def _print_script(written: Written) -> None:
    if written.path is None:
        print(f"no script: {written.text}")
        return
    does = "repeats it" if written.shows else "does not repeat it: the fault needs what the script's process has done before"
    print(f"script: {written.path} {does} ({written.text})")
