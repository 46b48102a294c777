"""Runs a command in a process of its own, and finds out what it was doing where it dies or never ends."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kgen.bisection.copies import RandomState
from kgen.bisection.isolated import HANGS, cpu_seconds, hangs, how_it_ended
from kgen.bisection.journal import doing, forget, load_part
from kgen.bisection.part import Part
from kgen.config import Config

__all__ = ["Died", "supervised"]

_POLL = 0.05  # seconds


@dataclass(frozen=True, slots=True)
class Died:
    """A process ended by a signal, or by us for it did not end: what it was `doing` (empty: nothing of kgen's), and the graph
    that this was about, where the same happens again with a process that keeps it."""

    ended: str
    doing: str
    work: tuple[Part, Config, RandomState] | None


def supervised(command: Callable[[str, bool], Sequence[str]], seconds: float) -> int | Died:
    """The exit code of a command, or how it died. `command` gives the arguments of this program for a folder in which the
    process keeps a journal, and for whether it keeps graphs there. One step of it may take so many seconds."""
    with tempfile.TemporaryDirectory(prefix="kgen-bisect-") as name:
        folder = Path(name)
        ended, what = _run(command(name, False), folder, seconds)
        if not isinstance(ended, str):
            return ended
        again, what_again = _run(command(name, True), folder, seconds, quiet=True)
        same = again == ended and what_again == what
        return Died(ended, what, load_part(folder) if same and what else None)


def _run(arguments: Sequence[str], folder: Path, seconds: float, quiet: bool = False) -> tuple[int | str, str]:
    """The exit code, or how the process died, and what it was doing then."""
    forget(folder)
    output = subprocess.DEVNULL if quiet else None
    with subprocess.Popen([sys.executable, "-m", "kgen", *arguments], stdout=output, stderr=output) as process:
        step, before = "", 0.0
        while process.poll() is None:
            found, used = doing(folder), cpu_seconds(process.pid)
            if found is None or found[0] != step:
                step, before = "" if found is None else found[0], used
            if found is not None and hangs(found[1], used - before, seconds):
                process.kill()
                process.wait()
                return HANGS, found[0]
            time.sleep(_POLL)
        found = doing(folder)
        code = process.returncode
    return (how_it_ended(code), found[0] if found is not None else "") if code < 0 else (code, "")
