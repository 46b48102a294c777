"""`kgen tune`: runs a script in a max-autotune mode and says what was measured, or what would be."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kgen import config
from kgen.commands.cache_command import users_file
from kgen.commands.exit_codes import OK, WRONG, misused
from kgen.commands.explain_text import write
from kgen.commands.script import run_script
from kgen.commands.tuning_table import measurements, suggestions
from kgen.counters import counters
from kgen.tuning.entry import Entry, diff
from kgen.tuning.store import TuningFile
from kgen.tuning.tuner import UNMEASURED

__all__ = ["tune"]


def tune(options: argparse.Namespace) -> int:
    if not options.target.is_file():
        return misused(f"there is no script {options.target}")
    if options.suggest:
        return _suggest(options)
    chosen = {"tuning_file": options.file and options.file.absolute(), "tuning_seconds": options.seconds}
    given = {name: value for name, value in chosen.items() if value is not None}
    # no graph from the cache, which would measure nothing; no CUDA graphs, whose recording would only take time
    with config.insist(mode="max-autotune-no-cudagraphs", tuning="before", cache=False, **given):
        file = users_file()
        file.write([])  # raises now, not after minutes of measuring
        before, found, late = file.entries(), counters["tuning.hit"], counters["tuning.no_time"]
        try:
            well = run_script(options.target, options.arguments)
        except KeyboardInterrupt:  # what was measured is in the file
            new = _printed(before, file)
            print(f"{file.path}: new measurements until then: {len(new)}", flush=True)
            raise
        found = counters["tuning.hit"] - found
    new = _printed(before, file)
    if new or found:
        print(f"{file.path}: new measurements: {len(new)}, uses of known ones: {found}")
        return OK if well else WRONG
    if not well:
        return WRONG
    print(f"kgen: nothing was measured: {_why_nothing(counters['tuning.no_time'] > late)}", file=sys.stderr)
    return WRONG


def _why_nothing(is_late: bool) -> str:
    if is_late:
        return "the time for each graph was over before; give more with --seconds"
    return "the script compiled no problem that a template of kgen could take"


def _printed(before: Sequence[Entry], file: TuningFile) -> list[Entry]:
    """The measurements that the file did not have before, which are printed."""
    new = [change.after for change in diff(before, file.entries()) if change.after]
    write(measurements(new), sys.stdout)
    return new


def _suggest(options: argparse.Namespace) -> int:
    """Runs the script in the default mode, each compilation of it in full, and lists what is left to estimates."""
    given = {"tuning_file": options.file.absolute()} if options.file else {}
    with config.insist(mode="default", tuning="before", cache=False, **given), UNMEASURED.listening() as found:
        measured = counters["tuning.hit"]
        well = run_script(options.target, options.arguments)
        measured = counters["tuning.hit"] - measured
    write(suggestions(found), sys.stdout)
    problems = len({one.key for one in found})
    print(f"problems that nobody has measured: {problems}, uses of measured ones: {measured}")
    if problems:
        command = " ".join(["kgen tune", *([f"--file {options.file}"] if options.file else []), str(options.target)])
        print(f"`{command}` measures them, up to {config.current().tuning_seconds:g} seconds for each graph")
    return OK if well else WRONG
