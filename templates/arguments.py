"""The numbers, strings and flags that an operator was called with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Arguments:
    """Values by the names of the operator's schema, as attributes. A name that the call does not have is a ValueError with
    those that it has: in a Jinja file that is the author's mistake."""

    values: tuple[tuple[str, Any], ...]

    def __getattr__(self, name: str) -> Any:
        given = dict(object.__getattribute__(self, "values"))
        if name in given:
            return given[name]
        if name.startswith("_"):  # Python's own questions
            raise AttributeError(name)
        raise ValueError(f"the operator's call has no argument {name}: it has {', '.join(given) or 'tensors alone'}")
