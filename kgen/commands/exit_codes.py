"""What a command's exit code says, and the line for wrong use."""

from __future__ import annotations

import sys

__all__ = ["MISUSED", "OK", "WRONG", "misused"]

# 0 well, 1 something is wrong (or nothing to show), 2 wrong use.
OK, WRONG, MISUSED = 0, 1, 2


def misused(text: str) -> int:
    """Says what is wrong with a command; its exit code."""
    sys.stderr.write(f"kgen: {text}\n")
    return MISUSED
