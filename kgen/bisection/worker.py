"""The process that tries parts for `kgen.bisection.isolated`: it imports all that it takes once, and forks for each trial.

Parts come by standard input; what is wrong with each goes to standard output. This process computes nothing itself. So its
forks begin without threads, and without a CUDA context.

    python -m kgen.bisection.worker SECONDS MODULE...      # imports the modules first
"""

from __future__ import annotations

import importlib
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import kgen.pipeline  # noqa: F401  all that a trial compiles with
from kgen.bisection.isolated import HANGS, cpu_seconds, hangs, how_it_ended, read_message, write_message
from kgen.bisection.journal import unpack_part
from kgen.bisection.trial import Trial, Wrong

__all__ = ["main"]

_POLL = 0.02  # seconds


def main(arguments: Sequence[str]) -> int:
    """Tries parts until standard input ends. Each may take so many seconds."""
    seconds, *modules = arguments
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a part that dies leaves gigabytes otherwise
    with os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(2, 1)  # what a part prints is no reply
        sys.path.insert(0, str(Path.cwd()))
        for name in modules:
            importlib.import_module(name)
        while (job := read_message(sys.stdin.buffer)) is not None:
            write_message(replies, pickle.dumps(_tried(job, float(seconds))))
    return 0


def _tried(job: bytes, seconds: float) -> Wrong | None:
    """What is wrong with a part, from a fork."""
    reading, writing = map(os.fdopen, os.pipe(), ("rb", "wb"))
    process = os.fork()
    if process == 0:
        reading.close()
        _reply(job, writing)
    writing.close()
    with reading:
        ended = _wait(process, seconds)
        if ended is None:
            return Wrong(f"it has not ended after {seconds:.0f} seconds", HANGS)
        if ended != 0:
            how = how_it_ended(ended)
            return Wrong(f"the process dies of {how}", how)
        found: Wrong | None = pickle.loads(reading.read())
        return found


def _reply(job: bytes, writing: IO[bytes]) -> None:
    """The fork's work; it does not come back."""
    data, config, state = pickle.loads(job)
    writing.write(pickle.dumps(Trial(config, state).wrong(unpack_part(data))))
    writing.close()
    os._exit(0)


def _wait(process: int, seconds: float) -> int | None:
    """The exit code of a fork, negative for a signal; None where it had to be ended."""
    started = time.monotonic()
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if hangs(time.monotonic() - started, cpu_seconds(process), seconds):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return None
        time.sleep(_POLL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
