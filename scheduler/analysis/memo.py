"""What is computed once while one graph is scheduled: most of an attempt is equal to the attempt before."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from kgen.unusable import Memo

T = TypeVar("T")
_MISSING: Any = object()
_known: ContextVar[dict[Hashable, Any] | None] = ContextVar("kgen_memo", default=None)


@contextmanager
def memoising(memo: Memo | None = None) -> Iterator[None]:
    """While one graph is scheduled, `memoised` finds what is known already. Size hints may not change inside."""
    token = _known.set({} if memo is None else memo.known)
    try:
        yield
    finally:
        _known.reset(token)


def is_memoising() -> bool:
    """Whether a graph is being scheduled."""
    return _known.get() is not None


def memoised_for(owner: object, what: Hashable, make: Callable[[], T], beside: object = None) -> T:
    """`memoised` for what is found out about one object, or about it `beside` another one. Both stay as they are: equal ones
    are not looked for."""
    known = _known.get()
    if known is None:
        return make()
    key = (what, id(owner), id(beside))
    kept = known.get(key)
    if kept is None:
        kept = known[key] = (make(), owner, beside)  # which keeps other objects from having their addresses
    found: T = kept[0]
    return found


def memoised(key: Hashable, make: Callable[[], T]) -> T:
    """What `make` returned for an equal key before, while one graph is scheduled."""
    known = _known.get()
    if known is None:
        return make()
    found: T = known.get(key, _MISSING)
    if found is _MISSING:
        found = known[key] = make()
    return found
