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

from kgen import cache, config
from kgen.commands import doctor
from kgen.commands.explain import Explanation, explain, watching
from kgen.commands.explain_text import write
from kgen.commands.graph_report import bytes_text
from kgen.commands.tuning_table import changes, measurements
from kgen.counters import counters
from kgen.errors import KgenError, TuningFileExists, UnknownTuningDevice
from kgen.tuning import store
from kgen.tuning.entry import Entry, diff
from kgen.tuning.store import TuningFile

__all__ = ["main"]

# Exit codes: 0 well, 1 something is wrong (or nothing to show), 2 wrong use.
OK, WRONG, MISUSED = 0, 1, 2
# The kind of entries that are not in the cache but in tuning files.
TUNING = "tuning"


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

    _cache_parser(commands.add_parser("cache", help="look at, empty and exchange what is kept on disk"))

    three = commands.add_parser("doctor", help="check that this machine can compile; says what to do where it cannot")
    three.set_defaults(run=_doctor)

    four = commands.add_parser("tune", help="run a script in a max-autotune mode and say what was measured")
    four.add_argument("target", metavar="script.py", type=Path)
    four.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    four.add_argument("--file", type=Path, help="the tuning file to add to (give it before the script)")
    four.add_argument("--seconds", type=float, help="how long to measure for one graph (give it before the script)")
    four.set_defaults(run=_tune)
    return parser


def _cache_parser(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="action")
    for name, run, text in (
        ("list", _cache_list, "every entry"),
        ("stats", _cache_stats, "how many entries there are, and their size"),
        ("clear", _cache_clear, "remove entries; measurements only with --kind tuning"),
    ):
        one = actions.add_parser(name, help=text)
        one.add_argument("--kind", help="only entries of this kind (cpp, header, runtime, ..., or tuning)")
        one.set_defaults(run=run)

    merge = actions.add_parser("merge", help="add the measurements of some tuning files to one")
    merge.add_argument("out", metavar="OUT", type=Path, help="the file to add to; it need not exist")
    merge.add_argument("files", metavar="IN", type=Path, nargs="+")
    merge.set_defaults(run=_tuning_merge)

    diff = actions.add_parser("diff", help="the measurements in which two tuning files differ")
    diff.add_argument("before", metavar="A", type=Path)
    diff.add_argument("after", metavar="B", type=Path)
    diff.set_defaults(run=_tuning_diff)

    export = actions.add_parser("export", help="write your measurements to a new file")
    export.add_argument("out", metavar="OUT", type=Path)
    export.add_argument("--device", metavar="NAME", help="only those of this device, as `cache list --kind tuning` calls it")
    export.set_defaults(run=_tuning_export)


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
    """Reports on what the script compiles. Caches of whole graphs are off: a graph that comes from one shows nothing."""
    with watching() as seen, config.override(cache=False):
        _run_script(path, arguments)
        return seen.report()


def _run_script(path: Path, arguments: Sequence[str]) -> bool:
    """Runs the script as ``python script.py arguments`` would; whether it ended well."""
    saved_argv, saved_path = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = [str(path), *arguments], str(path.resolve().parent)
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            print(f"kgen: the script ended with exit code {end.code}", file=sys.stderr)
            return False
    finally:
        sys.argv, sys.path[:] = saved_argv, saved_path
    return True


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


def _cache_list(options: argparse.Namespace) -> int:
    if options.kind == TUNING:
        for file in store.stores(config.current()).files:
            print(f"{file.path}: {len(file.entries())} entries")
            write(measurements(file.entries()), sys.stdout)
        return OK
    for entry in cache.list_entries(options.kind):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.modified))
        print(f"{when}  {bytes_text(entry.bytes):>8}  {entry.kind:<8} {entry.key}")
    return OK


def _cache_stats(options: argparse.Namespace) -> int:
    if options.kind != TUNING:
        print(f"{cache.cache_dir()}")
        table = {kind: row for kind, row in cache.stats().items() if options.kind in (None, kind)}
        for kind, row in table.items():
            print(f"  {kind:<8} {row['entries']:>6} entries  {bytes_text(row['bytes']):>8}")
        count, size = (sum(row[what] for row in table.values()) for what in ("entries", "bytes"))
        print(f"  {'all':<8} {count:>6} entries  {bytes_text(size):>8}")
    if options.kind in (None, TUNING):
        for file in store.stores(config.current()).files:
            size = file.path.stat().st_size if file.path.exists() else 0
            print(f"  {TUNING:<8} {len(file.entries()):>6} entries  {bytes_text(size):>8}  {file.path}")
    return OK


def _cache_clear(options: argparse.Namespace) -> int:
    """A tuning file is no cache: what is in it took minutes of a quiet machine, so it goes only when it is named."""
    if options.kind == TUNING:
        file = _users_file()
        print(f"removed {file.remove()} entries: {file.path}")
        return OK
    entries = cache.list_entries(options.kind)
    freed = sum(entry.bytes for entry in entries)
    print(f"removed {cache.clear(options.kind)} entries, {bytes_text(freed)}")
    return OK


# ---- tuning files -----------------------------------------------------------------------------------------------------


def _users_file() -> TuningFile:
    return TuningFile(store.default_path(config.current()))


def _tuning_merge(options: argparse.Namespace) -> int:
    out = TuningFile(options.out)
    if out.path.exists():
        _read(out.path)  # a broken file is an error here, and not set aside
    before = out.entries()
    out.write([entry for path in options.files for entry in _read(path)])
    found = diff(before, out.entries())
    added = sum(change.before is None for change in found)
    print(f"{out.path}: {len(out.entries())} entries, {added} of them added and {len(found) - added} replaced")
    return OK


def _tuning_diff(options: argparse.Namespace) -> int:
    found = diff(_read(options.before), _read(options.after))
    write(changes(found), sys.stdout)
    print(f"{len(found)} differences" if found else "no difference")
    return OK


def _tuning_export(options: argparse.Namespace) -> int:
    entries = _users_file().entries()
    devices = sorted({entry.key.device for entry in entries})
    if options.device is not None and options.device not in devices:
        raise UnknownTuningDevice(device=options.device, valid="; ".join(devices) or "(there are no measurements)")
    if options.out.exists():
        raise TuningFileExists(path=options.out)
    chosen = [entry for entry in entries if options.device in (None, entry.key.device)]
    TuningFile(options.out).write(chosen)
    print(f"{options.out}: {len(chosen)} entries")
    return OK


def _read(path: Path) -> list[Entry]:
    contents = store.read_file(path)
    for problem in contents.problems:
        print(f"kgen: {path}: left out {problem}", file=sys.stderr)
    return list(contents.entries.values())


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


def _tune(options: argparse.Namespace) -> int:
    if not options.target.is_file():
        return _misused(f"there is no script {options.target}")
    chosen = {"tuning_file": options.file and options.file.absolute(), "tuning_seconds": options.seconds}
    given = {name: value for name, value in chosen.items() if value is not None}
    # no graph from the cache, which would measure nothing; no CUDA graphs, whose recording would only take time
    with config.insist(mode="max-autotune-no-cudagraphs", cache=False, **given):
        file = _users_file()
        file.write([])  # raises now, not after minutes of measuring
        before, found = file.entries(), counters["tuning.hit"]
        well = _run_script(options.target, options.arguments)
        found = counters["tuning.hit"] - found
    new = [change.after for change in diff(before, file.entries()) if change.after]
    write(measurements(new), sys.stdout)
    if new or found:
        print(f"{file.path}: new measurements: {len(new)}, uses of known ones: {found}")
        return OK if well else WRONG
    print("kgen: nothing was measured: the script compiled no problem that a template of kgen could take", file=sys.stderr)
    return WRONG


def _misused(text: str) -> int:
    print(f"kgen: {text}", file=sys.stderr)
    return MISUSED
