"""What tracing finds that cannot be converted, kept until the caller hears of it: Dynamo has errors of its own."""

from __future__ import annotations

from contextvars import ContextVar

import torch

from kgen import errors

__all__ = ["FOUND", "OPEN", "begin", "end", "report"]

FOUND: ContextVar[list[errors.NotConvertible] | None] = ContextVar("kgen_control_flow_problems", default=None)

# Blocks that are being traced, the innermost last: where an error that Dynamo raises comes from.
OPEN: ContextVar[list[tuple[str, str, int]] | None] = ContextVar("kgen_control_flow_blocks", default=None)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def report(function: str, file: str, line: int, problem: str) -> bool:
    """Notes a problem. Runs while Dynamo traces."""
    found = FOUND.get()
    if found is not None:
        found.append(errors.NotConvertible(function=function, file=file, line=line, problem=problem))
    return True


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def begin(function: str, file: str, line: int) -> bool:
    """Notes that a block becomes an operator. Runs while Dynamo traces."""
    blocks = OPEN.get()
    if blocks is not None:
        blocks.append((function, file, line))
    return True


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def end(function: str, file: str, line: int) -> bool:
    """Notes that a block is an operator."""
    blocks = OPEN.get()
    while blocks and blocks.pop() != (function, file, line):
        pass  # blocks in it whose tracing was begun again
    return True
