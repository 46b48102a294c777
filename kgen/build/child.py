"""Processes of kgen's own: compilers and measurements, which may crash without harm to the caller."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection

__all__ = ["start"]

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
        start_new_session=True,  # Ctrl-C is for the parent
    )
