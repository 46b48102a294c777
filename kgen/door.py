"""`kgen.compile` and `@kgen.control_flow`."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast, overload

import torch

from kgen import config as configuration
from kgen import errors
from kgen.backend import kgen_backend
from kgen.build import cpp
from kgen.imperative.problems import FOUND, OPEN

__all__ = ["compile", "control_flow"]


# A function, a method or a module; what is compiled is called as it is, and editors know so.
Model = TypeVar("Model", bound=Callable[..., Any])


@overload
def compile(  # noqa: A001
    model: Model,
    *,
    mode: configuration.Mode | None = None,
    options: configuration.Options | None = None,
    dynamic: bool | None = None,
    fullgraph: bool | None = None,
    control_flow: bool = False,
) -> Model: ...


@overload
def compile(  # noqa: A001
    *,
    mode: configuration.Mode | None = None,
    options: configuration.Options | None = None,
    dynamic: bool | None = None,
    fullgraph: bool | None = None,
    control_flow: bool = False,
) -> Callable[[Model], Model]: ...


def compile(  # noqa: A001
    model: Callable[..., Any] | None = None,
    *,
    mode: configuration.Mode | None = None,
    options: configuration.Options | None = None,
    dynamic: bool | None = None,
    fullgraph: bool | None = None,
    control_flow: bool = False,
) -> Any:
    """torch.compile(model, backend="kgen", ...) by another door: it works without an installed entry point, takes mode and
    options together, and refuses wrong ones at once instead of at the first call. Without `model`, a decorator.

    With `control_flow`, loops and branches that tensors decide are compiled too, as by `kgen.control_flow`: `model` is then a
    function or a method whose source can be read, and `fullgraph` is on unless it is said to be off. Raises NoSource and
    NotConvertible, the latter with the source line, at once or when it is first called."""
    configuration.from_call(mode, options)
    cpp.prepare()
    given: Any = {**(options or {}), **({"mode": mode} if mode is not None else {})}
    whole = control_flow if fullgraph is None else fullgraph
    door = functools.partial(torch.compile, backend=kgen_backend, options=given, dynamic=dynamic, fullgraph=whole)
    if control_flow:
        door = functools.partial(_with_control_flow, door)
    return door if model is None else door(cast("Any", model))


@overload
def control_flow(function: Model, **options: Any) -> Model: ...


@overload
def control_flow(**options: Any) -> Callable[[Model], Model]: ...


def control_flow(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """The function, compiled with the loops and branches that its tensors decide. Without `function`, a decorator.

    `options` are those of `kgen.compile`. Inside another compiled function it is part of that one's graph.

    Raises NoSource and NotConvertible, the latter with the source line, when it is decorated or first called."""
    if function is None:
        return compile(control_flow=True, **options)
    return compile(function, control_flow=True, **options)


def _with_control_flow(compiled_by: Callable[..., Any], function: Callable[..., Any]) -> Any:
    plain = _converted(function)
    compiled = compiled_by(plain)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain(*args, **kwargs)
        return _called(compiled, args, kwargs)

    return call


def _converted(function: Callable[..., Any]) -> Callable[..., Any]:
    from kgen.imperative.convert import converted  # noqa: PLC0415  most programs have no such functions

    if isinstance(function, types.MethodType):
        return types.MethodType(converted(function.__func__), function.__self__)
    return converted(function)


def _called(compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    token, blocks = FOUND.set([]), OPEN.set([])
    try:
        return compiled(*args, **kwargs)
    except Exception as cause:
        found = FOUND.get() or _in_a_block(cause)
        if found:
            raise found[0] from cause
        raise
    finally:
        FOUND.reset(token)
        OPEN.reset(blocks)


def _in_a_block(cause: Exception) -> list[errors.NotConvertible]:
    """What Dynamo cannot trace in a block, with the source line of the block; nothing for other errors."""
    blocks = OPEN.get()
    if not blocks or not isinstance(cause, torch._dynamo.exc.TorchDynamoException):
        return []
    function, file, line = blocks[-1]
    lines = [one.strip() for one in str(cause).splitlines() if one.strip()]
    why = next(
        (one.removeprefix("Explanation: ") for one in lines if one.startswith("Explanation: ")), lines[0] if lines else ""
    )
    outside = "it changes a Python object from outside of the block, as a list that it appends to; write into a tensor instead"
    problem = outside if "from outside the scope" in str(cause) else f"torch.compile cannot trace the block: {why}"
    return [errors.NotConvertible(function=function, file=file, line=line, problem=problem)]
