"""`kgen explain`: says what kgen makes of a script or a function."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from kgen import config
from kgen.commands.exit_codes import OK, WRONG, misused
from kgen.commands.explain import Explanation, explain, watching
from kgen.commands.script import run_script

__all__ = ["run"]


class Misused(Exception):
    """The target of the command is none."""


def run(options: argparse.Namespace) -> int:
    # with JSON, standard output belongs to the report
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        try:
            report, well = _explained(options.target, options.arguments)
        except Misused as error:
            return misused(str(error))
    if not report.graphs:
        print('kgen: nothing was compiled by kgen; call a function made with torch.compile(f, backend="kgen")', file=sys.stderr)
        return WRONG
    _show(report, options)
    return OK if well else WRONG


def _explained(target: str, arguments: Sequence[str]) -> tuple[Explanation, bool]:
    """The report, and whether the script ended well."""
    module, colon, function = target.partition(":")
    if target.endswith(".py"):
        if not Path(target).is_file():
            raise Misused(f"there is no script {target}")
        return _explain_script(Path(target), arguments)
    if colon and function and not arguments:
        return _explain_function(module, function), True
    raise Misused(f"{target!r} is neither script.py nor module:function")


def _explain_script(path: Path, arguments: Sequence[str]) -> tuple[Explanation, bool]:
    """Reports on what the script compiles. Caches of whole graphs are off: a graph that comes from one shows nothing."""
    with watching() as seen, config.override(cache=False):
        well = run_script(path, arguments)
        return seen.report(), well


def _explain_function(module: str, name: str) -> Explanation:
    """`name` takes no arguments. When it returns ``(callable, argument, ...)``, that call is explained, else the function."""
    found = _function(module, name)
    made = found()
    if isinstance(made, tuple) and made and callable(made[0]):
        return explain(made[0], *made[1:], print_report=False)
    return explain(found, print_report=False)


def _function(module: str, name: str) -> Callable[[], Any]:
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        raise Misused(f"there is no module {error.name}") from None
    except AttributeError as error:
        raise Misused(str(error)) from None
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise Misused(f"{module}:{name} is no function")
    return cast("Callable[[], Any]", found)


def _show(report: Explanation, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(report.to_dict(), indent=1))
        return
    report.print()
    if options.source:
        for kernel in report.kernels:
            print(f"\n// {kernel.graph}\n{kernel.source}", end="")
