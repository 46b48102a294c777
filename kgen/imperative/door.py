"""`@kgen.control_flow`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from kgen.backend import compile as compile_function
from kgen.imperative.convert import converted
from kgen.imperative.problems import FOUND

__all__ = ["control_flow"]


def control_flow(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """The function, compiled with the loops and branches that its tensors decide. Without `function`, a decorator.

    `options` are those of `kgen.compile`. Inside another compiled function it is part of that one's graph.

    Raises NoSource and NotConvertible, the latter with the source line, when it is decorated or first called."""
    if function is None:
        return functools.partial(control_flow, **options)
    plain = converted(function)
    compiled = compile_function(plain, **{"fullgraph": True, **options})

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain(*args, **kwargs)
        return _called(compiled, args, kwargs)

    return call


def _called(compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    token = FOUND.set([])
    try:
        return compiled(*args, **kwargs)
    except Exception as cause:
        found = FOUND.get()
        if found:
            raise found[0] from cause
        raise
    finally:
        FOUND.reset(token)
