"""Trials in a process of their own: a part that ends its process, or never ends, ends the trial alone."""

from __future__ import annotations

import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from kgen.bisection.copies import RandomState
from kgen.bisection.journal import pack_part
from kgen.bisection.part import Part
from kgen.bisection.trial import Trial, Wrong
from kgen.config import Config

__all__ = ["HANGS", "IsolatedTrial", "Worker", "how_it_ended"]

HANGS = "Hangs"
_LENGTH = 8


def how_it_ended(returncode: int) -> str:
    """The signal that ended a process, or its exit code."""
    if returncode < 0:
        return signal.Signals(-returncode).name
    return f"exit code {returncode}"


@dataclass
class Worker:
    """A process that tries parts, started when it is needed and again after it has died. `modules` are imported first."""

    seconds: float
    modules: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def ask(self, part: Part, config: Config, state: RandomState) -> Wrong | None:
        """What is wrong with a part; that it ends the process, too."""
        data = pickle.dumps((pack_part(part), config, state))
        process = self.process = self.process if self._is_alive() and self.process is not None else self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(len(data).to_bytes(_LENGTH, "little") + data)
            process.stdin.flush()
            if not select.select([process.stdout], [], [], self.seconds)[0]:
                self.stop()
                return Wrong(f"it has not ended after {self.seconds:.0f} seconds", HANGS)
            size = process.stdout.read(_LENGTH)
            if len(size) == _LENGTH:
                found: Wrong | None = pickle.loads(process.stdout.read(int.from_bytes(size, "little")))
                return found
        except BrokenPipeError:
            pass
        ended = how_it_ended(process.wait())
        return Wrong(f"the process dies of {ended}", ended)

    def stop(self) -> None:
        """Ends the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "kgen.bisection.worker", *self.modules]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@dataclass(frozen=True, slots=True)
class IsolatedTrial(Trial):
    """A trial by a worker."""

    worker: Worker

    def wrong(self, part: Part) -> Wrong | None:
        return self.worker.ask(part, self.config, self.state)
