"""The process that tries parts for `kgen.bisection.isolated`: each comes by standard input, what is wrong with it goes to standard
output. `python -m kgen.bisection.worker MODULE...` imports the modules first."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path

from kgen.bisection.journal import unpack_part
from kgen.bisection.trial import Trial

__all__ = ["main"]

_LENGTH = 8


def main(modules: Sequence[str]) -> int:
    """Tries parts until standard input ends."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what a part prints is no answer
        sys.path.insert(0, str(Path.cwd()))
        for name in modules:
            importlib.import_module(name)
        while len(size := sys.stdin.buffer.read(_LENGTH)) == _LENGTH:
            data, config, state = pickle.loads(sys.stdin.buffer.read(int.from_bytes(size, "little")))
            found = pickle.dumps(Trial(config, state).wrong(unpack_part(data)))
            answers.write(len(found).to_bytes(_LENGTH, "little") + found)
            answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
