"""`kgen explain`: says what kgen makes of a script or a function."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from kgen import config
from kgen.commands.exit_codes import OK, WRONG, misused
from kgen.commands.explain import Explanation, explain, watching
from kgen.commands.script import imported, print_error, run_script
from kgen.errors import KgenError, UnknownModule
from kgen.report.graph_report import time_text

__all__ = ["run"]


# Names that are listed where none is like the one that was given.
NAMES = 8


class Misused(Exception):
    """The target of the command is none."""


def run(options: argparse.Namespace) -> int:
    if options.why is not None and len(options.why) > 2:
        return misused("--why takes one name, or two")
    if options.top is not None and options.top < 1:
        return misused("--top takes a number from 1 on")
    if options.html is not None and (why := _why_not_written(options.html)):
        return misused(f"{options.html} cannot be written: {why}")
    mode = {} if options.mode is None else {"mode": options.mode}
    # with JSON, standard output belongs to the report
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext(), config.override(**mode):
        try:
            report, well = _explained(options.target, options.arguments)
        except Misused as error:
            return misused(str(error))
    if not report.graphs and not well:
        return WRONG
    if not report.graphs:
        print('kgen: nothing was compiled by kgen; call a function made with torch.compile(f, backend="kgen")', file=sys.stderr)
        return WRONG
    try:
        _show(report, options)
    except Misused as error:
        return misused(str(error))
    return OK if well else WRONG


def _explained(target: str, arguments: Sequence[str]) -> tuple[Explanation, bool]:
    """The report, and whether the script ended well."""
    module, colon, function = target.partition(":")
    if target.endswith(".py"):
        if not Path(target).is_file():
            raise Misused(f"there is no script {target}")
        return _explain_script(Path(target), arguments)
    if colon and function and not arguments:
        return _explain_function(module, function)
    raise Misused(f"{target!r} is neither script.py nor module:function")


def _explain_script(path: Path, arguments: Sequence[str]) -> tuple[Explanation, bool]:
    """Reports on what the script compiles. Caches of whole graphs are off: a graph that comes from one shows nothing."""
    with watching() as seen, config.override(cache=False):
        well = run_script(path, arguments)
        return seen.report(), well


def _explain_function(module: str, name: str) -> tuple[Explanation, bool]:
    """`name` takes no arguments. When it returns ``(callable, argument, ...)``, that call is explained, else the function."""
    found = _function(module, name)
    _check_takes_nothing(found, f"{module}:{name}")
    try:
        made = found()
        explained = made if isinstance(made, tuple) and made and callable(made[0]) else (found,)
        return explain(*explained, print_report=False), True
    except KgenError:
        raise
    except Exception as error:  # noqa: BLE001  the user's
        print_error(error, Path(getattr(inspect.unwrap(found), "__code__", _explain_function.__code__).co_filename))
        return Explanation(()), False


def _check_takes_nothing(function: Callable[..., Any], name: str) -> None:
    """Raises Misused where a call without arguments cannot be."""
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        hint = "let a function without arguments return (callable, argument, ...)"
        raise Misused(f"{name} is called without arguments: {error}; {hint}") from None
    except ValueError:  # a function without a signature
        return


def _function(module: str, name: str) -> Callable[[], Any]:
    try:
        found: Any = imported(module)
        for part in name.split("."):
            found = getattr(found, part)
    except UnknownModule as error:
        raise Misused(error.text) from None
    except AttributeError as error:
        raise Misused(str(error)) from None
    if not callable(found):
        raise Misused(f"{module}:{name} is no function")
    return cast("Callable[[], Any]", found)


def _show(report: Explanation, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(report.to_dict(), indent=1))
        return
    if options.html is not None:
        _write_page(report, options.html)
    if options.why is not None:
        _print_why(report, options.why)
    if options.kernel is not None:
        _print_kernel(report, options.kernel)
    if options.html is None and options.why is None and options.kernel is None:
        report.print(top=options.top)
    if options.source:
        for kernel in report.kernels:
            print(f"\n// {kernel.graph}\n{kernel.source}", end="")


def _why_not_written(file: Path) -> str:
    """Why a file cannot be written, as far as can be seen before the script runs, which may take long; empty where it can."""
    if file.is_dir():
        return "it is a folder"
    if not file.parent.is_dir():
        return f"there is no folder {file.parent}"
    return "" if os.access(file if file.exists() else file.parent, os.W_OK) else "permission denied"


def _write_page(report: Explanation, file: Path) -> None:
    try:
        file.write_text(report.to_html(), encoding="utf-8")
    except OSError as error:
        raise Misused(f"{file} cannot be written: {error.strerror}") from None
    print(f"{file}: {report!r}")


def _print_why(report: Explanation, names: Sequence[str]) -> None:
    found = report.why(*names)
    if not found:
        known = {part for v in report.verdicts for part in (v.producer, v.consumer, *v.kernels, *v.paths) if part}
        near = difflib.get_close_matches(next((name for name in names if name not in known), names[0]), known, n=5)
        first = ", ".join(sorted(known)[:NAMES])
        others = f"did you mean {', '.join(near)}?" if near else f"they are about {first}" if first else "there are none"
        raise Misused(f"no verdict is about {' and '.join(names)}; {others}")
    for verdict in dict.fromkeys(found):
        print(f"{verdict}{f'{chr(10)}    to change it: {verdict.change}' if verdict.change else ''}")


def _print_kernel(report: Explanation, name: str) -> None:
    """A kernel by its number in the report, or by its name."""
    kernels = report.kernels
    found = [k for number, k in enumerate(kernels) if name in (k.name, str(number))]
    if not found:
        raise Misused(f"there is no kernel {name!r}: numbers go from 0 to {len(kernels) - 1}, --json has the names")
    for kernel in found:
        about = [f"{kernel} ({kernel.graph})", f"in {', '.join(kernel.modules)}" if kernel.modules else ""]
        times = f"about {time_text(kernel.seconds)}, at full rates {time_text(kernel.floor)}"
        print("\n".join(filter(None, (*about, *kernel.calls, *kernel.lines, times, "", kernel.ir, kernel.source))))
