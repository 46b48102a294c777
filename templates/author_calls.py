"""What an author's methods raise names the template, the method and the line: else it would pass for an error of kgen's."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from kgen import errors

__all__ = ["guarded"]

Author = TypeVar("Author")


def guarded(author: Author, base: type, template: str) -> Author:
    """The author's object, whose methods of `base` raise BadTemplate in place of what they come to. Raises it now where one
    cannot be called as that of `base` is."""
    kind = type(author)
    for name, default in vars(base).items():
        if callable(default) and not name.startswith("_") and getattr(kind, name) is not default:
            method = getattr(author, name)
            if inspect.isroutine(method):  # what is none has another error
                _check_parameters(method, default, template)
            setattr(author, name, _guarded(method, template))
    return author


def _check_parameters(method: Callable[..., Any], default: Callable[..., Any], template: str) -> None:
    given = list(inspect.signature(default).parameters)[1:]
    try:
        inspect.signature(method).bind(*given)
    except TypeError as error:
        code = inspect.unwrap(method).__code__
        problem = f"{method.__name__} is called with ({', '.join(given)}): {error}"
        raise errors.BadTemplate(
            f"{code.co_filename}, line {code.co_firstlineno}", template=template, problem=problem
        ) from None


def _guarded(method: Callable[..., Any], template: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        try:
            made = method(*args, **named)
        except Exception as error:
            raise _named(error, method, template) from error
        return _each(made, method, template) if inspect.isgenerator(made) else made

    return call


def _each(made: Iterator[Any], method: Callable[..., Any], template: str) -> Iterator[Any]:
    try:
        yield from made
    except Exception as error:
        raise _named(error, method, template) from error


def _named(error: Exception, method: Callable[..., Any], template: str) -> Exception:
    """The innermost line of the file that the method is in; what kgen itself refuses stays as it is."""
    if isinstance(error, errors.KgenError):
        return error
    file = inspect.unwrap(method).__code__.co_filename
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f"{file}, line {lines[-1]}" if lines else file
    return errors.BadTemplate(where, template=template, problem=f"{method.__name__} raised {type(error).__name__}: {error}")
