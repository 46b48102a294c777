"""A process that checks problems: a kernel that crashes, hangs or breaks the GPU's context takes this process along, not the
run.

Run by `crew.py`. Over stdin come lines of JSON, a problem and how to check it; over stdout go

    {"begin": "running", "candidate": "triton_matmul BLOCK_M=..."}    what is being done: the time limit starts anew
    {"result": {...}}                                                 a `check.Result`
    {"done": true}                                                    the problem is over
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .check import CRASHED, NOT_RUN, THE_PROBLEM, How, Result, check
from .problem import from_json

# Cores of a process: while one of them schedules, the other one compiles.
CORES = 2


def serve() -> None:
    """Checks problems until stdin closes."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not reach the answers
    _settle()

    def say(**message: Any) -> None:
        replies.write(json.dumps(message) + "\n")

    say(started=True)
    for line in sys.stdin:
        request = json.loads(line)
        how = How(request["device"], request["most"], frozenset(request["skip"]), frozenset(request["those"]))
        _check(request["problem"], how, say)
        say(done=True)
        gc.collect()
        if how.device != "cpu":
            torch.cuda.empty_cache()


def _settle() -> None:
    """A share of the cores, which the compilers that this process starts inherit."""
    number, cores = int(os.environ.get("KGEN_FUZZ_WORKER", "0")), sorted(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):  # some containers do not let it
        os.sched_setaffinity(0, {cores[(number + k) % len(cores)] for k in range(CORES)})
    torch.set_num_threads(1)
    for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
        setattr(torch.backends.cuda.matmul, name, False)  # the library is a candidate too


def _check(data: dict[str, Any], how: How, say: Callable[..., None]) -> None:
    try:
        for result in check(from_json(data), how, lambda stage, name: say(begin=stage, candidate=name)):
            broken = result.outcome == NOT_RUN and _broken(how)
            say(result=(replace(result, outcome=CRASHED) if broken else result).as_json())
            if broken:
                os._exit(3)
    except Exception as cause:
        say(result=Result(THE_PROBLEM, NOT_RUN, f"{type(cause).__name__}: {str(cause)[:800]}").as_json())
        if _broken(how):
            os._exit(3)


def _broken(how: How) -> bool:
    """Whether nothing runs on the GPU any more."""
    try:
        if how.device != "cpu":
            torch.cuda.synchronize()
            torch.zeros(1, device=how.device).add_(1).cpu()
    except Exception:
        return True
    return False
