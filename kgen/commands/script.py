"""Somebody's script, run as Python would run it."""

from __future__ import annotations

import importlib
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType

from kgen.errors import KgenError, ModuleFailed, UnknownModule, UserError

__all__ = ["imported", "print_error", "run_script"]


def imported(name: str) -> ModuleType:
    """A module that the user names, from this folder or installed. Raises UnknownModule, ModuleFailed, or what of kgen's the
    module raises."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except KgenError:
        raise
    except ModuleNotFoundError as error:
        raise UnknownModule(module=error.name or name) from error
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        raise ModuleFailed(module=name, cause=cause) from error


def run_script(path: Path, arguments: Sequence[str]) -> bool:
    """Runs the script as ``python script.py arguments`` would; whether it ended well. What it raises is printed."""
    saved_argv, saved_path = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = [str(path), *arguments], str(path.resolve().parent)
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            sys.stderr.write(f"kgen: the script ended with exit code {end.code}\n")
            return False
    except Exception as error:  # noqa: BLE001  the script's, or of what it asks of kgen
        print_error(error, path)
        return False
    finally:
        sys.argv, sys.path[:] = saved_argv, saved_path
    return True


def print_error(error: Exception, path: Path) -> None:
    """A mistake in the use of kgen in a line or two; another error as Python prints it, from the script's first frame on."""
    inner = getattr(error, "inner_exception", error)  # Dynamo wraps what a back end raises
    if isinstance(inner, UserError):
        sys.stderr.write(f"kgen: {inner}\n")
        return
    lines = traceback.format_exception(type(error), error, _from_script(error.__traceback__, path))
    sys.stderr.write("".join(lines) + "kgen: the script ended with this error\n")


def _from_script(frames: TracebackType | None, path: Path) -> TracebackType | None:
    found = frames
    while found is not None and found.tb_frame.f_code.co_filename != str(path):
        found = found.tb_next
    return found
