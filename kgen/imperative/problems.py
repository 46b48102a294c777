"""What tracing finds that cannot be converted, kept until the caller hears of it: Dynamo has errors of its own."""

from __future__ import annotations

from contextvars import ContextVar

import torch

from kgen import errors

__all__ = ["FOUND", "report"]

FOUND: ContextVar[list[errors.NotConvertible] | None] = ContextVar("kgen_control_flow_problems", default=None)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def report(function: str, file: str, line: int, problem: str) -> bool:
    """Notes a problem. Runs while Dynamo traces."""
    found = FOUND.get()
    if found is not None:
        found.append(errors.NotConvertible(function=function, file=file, line=line, problem=problem))
    return True
