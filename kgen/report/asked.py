"""Whether somebody wants to read what is compiled. It imports nothing of the compiler: it is asked before a cache is."""

from __future__ import annotations

import logging

from torch._logging._internal import trace_log

__all__ = ["is_asked_for", "is_traced"]

_LOGGERS = tuple(logging.getLogger(name) for name in ("kgen", "kgen.stages", "kgen.fusion", "kgen.output_code"))
_, _, FUSION, OUTPUT_CODE = _LOGGERS


def is_traced() -> bool:
    """Whether somebody keeps torch's structured trace, or listens to one of the loggers that say what it has."""
    return bool(trace_log.handlers) or FUSION.isEnabledFor(logging.INFO) or OUTPUT_CODE.isEnabledFor(logging.DEBUG)


def is_asked_for() -> bool:
    """Whether a trace is kept, or one of kgen's loggers was switched on by its name: then no graph comes from a cache, which
    would have nothing to show. A program that logs all that anybody says has not asked for graphs."""
    named = any(logging.NOTSET < one.level <= logging.INFO for one in _LOGGERS)
    return named or any(getattr(one, "root_dir", "") is not None for one in trace_log.handlers)
