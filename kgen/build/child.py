"""Processes of kgen's own: compilers and measurements, which may crash without harm to the caller."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Collection
from typing import IO, Any

__all__ = ["Ended", "Late", "Worker", "start"]

# The same modules as here: how they were found (an editable install, a test's path) is the caller's affair.
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import serve; serve()"


def start(module: str, without: Collection[str]) -> subprocess.Popen[bytes]:
    """Runs `serve` of a module in a new process, with pipes to its input and output, and without some variables of the
    environment."""
    environment = {name: value for name, value in os.environ.items() if name not in without}
    return subprocess.Popen(
        [sys.executable, "-c", _BOOT.format(module=module), json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        process_group=0,  # Ctrl-C is for the parent; a session of its own would have a share of the cores whatever `nice` says
    )


class Ended(Exception):
    """The process is gone."""


class Late(Exception):
    """It did not answer in time."""


class Worker:
    """A process that runs `serve` of a module, which says a line of JSON when it has started, and then replies to paths of jobs
    with more of them. Raises Ended and Late, from the start on after `limit` seconds."""

    def __init__(self, module: str, limit: float) -> None:
        self.owner = os.getpid()
        self.process = start(module, without=("TRITON_INTERPRET",))
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.questions: IO[bytes] = self.process.stdin
        self.messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._listen, args=(self.process.stdout,), daemon=True, name=f"{module} replies").start()
        self.reply(limit)

    def _listen(self, replies: IO[bytes]) -> None:
        for line in replies:
            with contextlib.suppress(ValueError):  # half a line of a process that died
                self.messages.put(json.loads(line))
        self.messages.put(None)

    def ask(self, path: str) -> None:
        try:
            self.questions.write(f"{path}\n".encode())
            self.questions.flush()
        except OSError as cause:
            raise Ended(self._how()) from cause

    def reply(self, limit: float) -> dict[str, Any]:
        try:
            message = self.messages.get(timeout=limit)
        except queue.Empty:
            raise Late(f"{limit:.0f}") from None
        if message is None:
            raise Ended(self._how())
        return message

    def _how(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(timeout=5)
            return f"its process ended with {'signal' if status < 0 else 'status'} {abs(status)}"
        return "its process closed its output"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
