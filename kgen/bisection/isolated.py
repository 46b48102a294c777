"""Trials in processes of their own: a part that ends its process, or never ends, ends the trial alone."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from kgen.bisection.journal import pack_part
from kgen.bisection.part import Part
from kgen.bisection.trial import Trial, Wrong

__all__ = [
    "HANGS", "IsolatedTrial", "Worker", "hangs", "how_it_ended", "cpu_seconds", "read_message", "write_message",
]  # fmt: skip

HANGS = "Hangs"
_LENGTH = 8
# The share of its seconds that a process which hangs has used; and the seconds that one which has not may have more.
_SHARE, _MORE = 0.25, 60.0


def how_it_ended(code: int) -> str:
    """The name of the signal that ended a process, or its exit code."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def hangs(elapsed: float, used: float, seconds: float) -> bool:
    """Whether a process does not end in its time: after so many seconds, of which it has used so many on a core. One that
    other programs keep from running, or that waits for a compiler which they do, is given a little more."""
    if elapsed <= seconds:
        return False
    return used > _SHARE * seconds or elapsed > seconds + min(3 * seconds, _MORE)


def cpu_seconds(process: int) -> float:
    """What a process, and its children that have ended, have used until now; 0 where it has ended itself."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def write_message(stream: IO[bytes], data: bytes) -> None:
    """Writes bytes after their number."""
    stream.write(len(data).to_bytes(_LENGTH, "little") + data)
    stream.flush()


def read_message(stream: IO[bytes]) -> bytes | None:
    """What `write_message` has written; None at the end."""
    length = stream.read(_LENGTH)
    return stream.read(int.from_bytes(length, "little")) if len(length) == _LENGTH else None


class Worker:
    """A process that tries parts, in forks of its own. It imports `modules` first. A trial may take so many seconds."""

    def __init__(self, seconds: float, modules: Sequence[str] = ()) -> None:
        command = [sys.executable, "-m", "kgen.bisection.worker", str(seconds), *modules]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, job: bytes) -> Wrong | None:
        """What is wrong with a part; that it ends its process, too."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            write_message(self.process.stdin, job)
            reply = read_message(self.process.stdout)
        except BrokenPipeError:
            reply = None
        if reply is None:
            ended = how_it_ended(self.process.wait())
            return Wrong(f"the process that tries parts has ended: {ended}", f"worker: {ended}")
        found: Wrong | None = pickle.loads(reply)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@dataclass(frozen=True, slots=True)
class IsolatedTrial(Trial):
    """A trial by a worker."""

    worker: Worker

    def wrong(self, part: Part) -> Wrong | None:
        return self.worker.ask(pickle.dumps((pack_part(part), self.config, self.state)))
