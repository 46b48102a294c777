"""`kgen bisect`: finds what a script makes kgen compute wrongly, what ends its process, or what is slower than eager."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from kgen.bisection.calls import FoundCall, SeenCalls, WrongCall, watching_calls
from kgen.bisection.cause import Cause, cause_of, cause_of_death
from kgen.bisection.isolated import HANGS, IsolatedTrial, Worker
from kgen.bisection.journal import FileJournal
from kgen.bisection.part import Part, values_of
from kgen.bisection.script import What, Written, write_script
from kgen.bisection.search import Found, Seen, Smallest, WrongGraph, smallest, smallest_part, watching
from kgen.bisection.supervise import Died, supervised
from kgen.bisection.trial import Trial, Wrong, trial_config
from kgen.bisection.whole import pass_to_blame, smallest_call
from kgen.capture.operators import call_of, paths_in, source_line
from kgen.commands.bisect_speed import run_speed
from kgen.commands.exit_codes import OK, WRONG, misused
from kgen.commands.script import imported, run_script

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """0 where every call agrees with eager and the script ends, 1 where not."""
    if not options.target.is_file():
        return misused(f"there is no script {options.target}")
    if options.trials < 1:
        return misused("--trials takes a number from 1 on")
    if options.seconds <= 0:
        return misused("--seconds takes a number above 0")
    sys.path.insert(0, str(options.target.resolve().parent))
    for module in options.module:
        imported(module)
    if options.speed:
        return run_speed(options)
    return _in_process(options) if options.in_process else _in_child(options)


# ---- in a process of its own --------------------------------------------------------------------------------------------


def _in_child(options: argparse.Namespace) -> int:
    """The script may end its process: another one runs it."""
    ended = supervised(lambda folder, keeps: _arguments(options, folder, keeps), options.seconds)
    return _explain_death(ended, options) if isinstance(ended, Died) else ended


def _arguments(options: argparse.Namespace, folder: str, keeps: bool) -> list[str]:
    modules = [part for name in options.module for part in ("--module", name)]
    own = ["--out", str(options.out), "--trials", str(options.trials), "--journal", folder, *(["--keep"] if keeps else [])]
    return ["bisect", str(options.target), "--in-process", *own, *modules, "--", *options.arguments]


def _explain_death(died: Died, options: argparse.Namespace) -> int:
    how = "never ends" if died.ended == HANGS else f"dies of {died.ended}"
    print(f"the process {how} {died.doing or 'outside of the graphs that kgen has compiled'}")
    if not died.doing:
        return WRONG
    if died.work is None:
        print("it did not do so again while its graphs were kept, or the graph cannot be kept: no part was looked for.")
        return WRONG
    part, config, state = died.work
    with Worker(options.seconds, options.module) as worker:
        _explain_part_that_dies(part, IsolatedTrial(trial_config(config), state, worker), died, options)
    return WRONG


def _explain_part_that_dies(part: Part, trial: IsolatedTrial, died: Died, options: argparse.Namespace) -> None:
    wrong = Wrong(died.ended, died.ended)
    found = smallest(part.gm, values_of(part.gm, part.inputs), wrong, trial, options.trials, _progress)
    _end_progress()
    if found is None:
        print("no part of it does so by itself, with sizes that are numbers and in a process of its own.")
        return
    _print_part(found, {})
    _print_cause(cause_of_death(found.part, trial, died.doing.startswith("compiling")))
    what = What(f"A part of a graph that ends its process: {died.ended}.", options.module, seconds=options.seconds)
    _print_script(write_script(options.out, found.part, trial.config, trial.state, what))


# ---- wrong results ------------------------------------------------------------------------------------------------------


def _in_process(options: argparse.Namespace) -> int:
    journal = None if options.journal is None else FileJournal(options.journal, options.keep)
    try:
        with watching(journal) as seen, watching_calls(seen) as calls:
            well = run_script(options.target, options.arguments)
    except Found as found:
        return _explained(found.graph, options)
    except FoundCall as found:
        return _explained_call(found.call, options)
    return _nothing(seen, calls, well)


def _nothing(seen: Seen, calls: SeenCalls, well: bool) -> int:
    if not seen.calls and not well:
        return WRONG
    if not seen.calls:
        print('kgen: nothing was compiled by kgen; call a function made with torch.compile(f, backend="kgen")', file=sys.stderr)
        return WRONG
    print(
        f"right: {seen.calls} calls of {seen.graphs} graphs agree with their operators in eager, "
        f"and {calls.compared} calls of Dynamo's graphs with eager, gradients included."
    )
    if calls.left_out:
        print(f"{calls.left_out} calls of Dynamo's graphs were not compared: they draw random numbers, or run once only.")
    return OK if well else WRONG


def _explained(graph: WrongGraph, options: argparse.Namespace) -> int:
    print(f"{graph.info.name} is wrong: {graph.wrong.text}")
    found = smallest_part(graph, options.trials, _progress)
    _end_progress()
    if found is None:
        print(
            "no part of it is wrong by itself, with sizes that are numbers.\n"
            f"The fault needs what the whole graph has: its symbolic sizes, or its options ({_modes(graph)})."
        )
        return WRONG
    trial = Trial(trial_config(graph.config), graph.state)
    _print_part(found, paths_in(graph.gm, graph.info.paths))
    _print_cause(cause_of(found.part, found.wrong, trial))
    what = What(f"A part of {graph.info.name} that kgen computes wrongly.", options.module)
    _print_script(write_script(options.out, found.part, trial.config, trial.state, what))
    return WRONG


def _modes(graph: WrongGraph) -> str:
    return f"mode={graph.config.mode!r}, freezing={graph.config.freezing}"


def _explained_call(call: WrongCall, options: argparse.Namespace) -> int:
    print(f"a graph of Dynamo's is wrong, and the aten graphs that it becomes are right: {call.text}")
    found, trial = smallest_call(call, options.trials, _progress)
    _end_progress()
    if found is None:
        print("no part of it is wrong by itself, with sizes that are numbers. The fault needs what the whole graph has.")
        return WRONG
    _print_part(found, {})
    blame = pass_to_blame(found.part, trial)
    _print_cause(Cause(blame.stage, blame.why, (), (), blame.right_with))
    call_of_script = "rerun_with_gradients" if trial.gradients else "rerun_call"
    what = What("A part of a graph of Dynamo's that kgen computes wrongly.", options.module, call_of_script)
    _print_script(write_script(options.out, found.part, trial.config, trial.state, what))
    return WRONG


# ---- texts --------------------------------------------------------------------------------------------------------------


def _progress(number: int, size: int) -> None:
    if sys.stderr.isatty():
        print(f"\rtrial {number}: {size} operators   ", end="", file=sys.stderr, flush=True)


def _end_progress() -> None:
    if sys.stderr.isatty():
        print(file=sys.stderr)


def _print_part(found: Smallest, paths: Mapping[str, str]) -> None:
    calls = found.part.calls
    print(f"smallest part: {len(calls)} of {found.operators} operators ({found.trials} trials): {found.wrong.text}")
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
