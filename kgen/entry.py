"""Where torch finds the back end (entry point group torch_dynamo_backends).

torch.compile looks it up when it is given a function, and calls it when the function has been called and traced. What every
graph loads takes longer to build on a new machine than tracing does, so that begins with the look-up.
"""

from __future__ import annotations

from typing import Any

from kgen import backend
from kgen.build import cpp

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    if name != "kgen_backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    cpp.prepare()
    return backend.kgen_backend
