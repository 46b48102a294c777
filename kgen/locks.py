"""Locks on files, between processes and threads; and what kgen says where there are none."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from kgen.errors import UnsupportedPlatform

if sys.platform != "linux":  # no fcntl, no /proc, another compiler: say so before one of them is missed
    raise UnsupportedPlatform(platform=sys.platform)

import fcntl

__all__ = ["locked"]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Locked by one process and thread at a time. The file stays: else two could lock two files of one name."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file unlocks it
