"""The command line: ``python -m kgen explain|cache|doctor|tune``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kgen import cache, config, doctor
from kgen.errors import KgenError
from kgen.explain import Explanation, explain, watching
from kgen.explain_text import bytes_text

__all__ = ["main"]

# Exit codes: 0 well, 1 something is wrong (or nothing to show), 2 wrong use.
OK, WRONG, MISUSED = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except KgenError as error:
        print(f"kgen: {error}", file=sys.stderr)
        return WRONG
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kgen", description="A torch.compile backend in which every kernel is a template with slots."
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    one = commands.add_parser("explain", help="say what kgen makes of a script or a function")
    one.add_argument(
        "target", help="script.py, run with every kgen compilation reported; or module:function, see the documentation"
    )
    one.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    one.add_argument("--json", action="store_true", help="print the report as JSON (give it before the target)")
    one.add_argument("--source", action="store_true", help="also print the generated kernels (give it before the target)")
    one.set_defaults(run=_explain)

    two = commands.add_parser("cache", help="look at or empty the cache on disk")
    two.add_argument("action", choices=("list", "stats", "clear"))
    two.add_argument("--kind", help="only entries of this kind (cpp, header, runtime, ...)")
    two.set_defaults(run=_cache)

    three = commands.add_parser("doctor", help="check that this machine can compile; says what to do where it cannot")
    three.set_defaults(run=_doctor)

    four = commands.add_parser("tune", help="measure template configurations (not available yet)")
    four.add_argument("target", nargs="*")
    four.set_defaults(run=_tune)
    return parser


# ---- explain ----------------------------------------------------------------------------------------------------------


def _explain(options: argparse.Namespace) -> int:
    module, colon, function = options.target.partition(":")
    if options.target.endswith(".py"):
        path = Path(options.target)
        if not path.is_file():
            return _misused(f"there is no script {path}")
        # with JSON, standard output belongs to the report
        with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
            report = _explain_script(path, options.arguments)
    elif colon and function and not options.arguments:
        report = _explain_function(module, function)
    else:
        return _misused(f"{options.target!r} is neither script.py nor module:function")
    if not report.graphs:
        print('kgen: nothing was compiled by kgen; call a function made with torch.compile(f, backend="kgen")', file=sys.stderr)
        return WRONG
    _show(report, options)
    return OK


def _explain_script(path: Path, arguments: Sequence[str]) -> Explanation:
    """Runs the script as ``python script.py arguments`` would, and reports on what it compiles. Caches of whole graphs are off:
    a graph that comes from one shows nothing."""
    saved_argv, saved_path = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = [str(path), *arguments], str(path.resolve().parent)
    try:
        with watching() as seen, config.override(cache=False):
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as end:
                if end.code not in (None, 0):
                    print(f"kgen: the script ended with exit code {end.code}", file=sys.stderr)
            return seen.report()
    finally:
        sys.argv, sys.path[:] = saved_argv, saved_path


def _explain_function(module: str, name: str) -> Explanation:
    """`name` takes no arguments. When it returns ``(callable, argument, ...)``, that call is explained, else the function."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
    finally:
        sys.path.pop(0)
    for part in name.split("."):
        found = getattr(found, part)
    made = found()
    if isinstance(made, tuple) and made and callable(made[0]):
        return explain(made[0], *made[1:], print_report=False)
    return explain(found, print_report=False)


def _show(report: Explanation, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(report.to_dict(), indent=1))
        return
    report.print()
    if options.source:
        for kernel in report.kernels:
            print(f"\n// {kernel.graph}\n{kernel.source}", end="")


# ---- cache ------------------------------------------------------------------------------------------------------------


def _cache(options: argparse.Namespace) -> int:
    if options.action == "clear":
        entries = cache.list_entries(options.kind)
        freed = sum(entry.bytes for entry in entries)
        print(f"removed {cache.clear(options.kind)} entries, {bytes_text(freed)}")
        return OK
    if options.action == "list":
        for entry in cache.list_entries(options.kind):
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.modified))
            print(f"{when}  {bytes_text(entry.bytes):>8}  {entry.kind:<8} {entry.key}")
        return OK
    print(f"{cache.cache_dir()}")
    table = {kind: row for kind, row in cache.stats().items() if options.kind in (None, kind)}
    for kind, row in table.items():
        print(f"  {kind:<8} {row['entries']:>6} entries  {bytes_text(row['bytes']):>8}")
    count, size = (sum(row[what] for row in table.values()) for what in ("entries", "bytes"))
    print(f"  {'all':<8} {count:>6} entries  {bytes_text(size):>8}")
    return OK


# ---- doctor and tune --------------------------------------------------------------------------------------------------


def _doctor(_options: argparse.Namespace) -> int:
    bad = 0
    for check in doctor.checks():
        print(f"{check.status:<4}  {check.name}: {check.found}")
        if check.advice:
            print(f"      {check.advice}")
        bad += check.status == doctor.BAD
    print("this machine is ready" if not bad else f"{bad} of the checks failed")
    return WRONG if bad else OK


def _tune(_options: argparse.Namespace) -> int:
    return _misused(
        "tune comes with the max-autotune modes, which have nothing to measure yet: the default mode is all there is"
    )


def _misused(text: str) -> int:
    print(f"kgen: {text}", file=sys.stderr)
    return MISUSED
