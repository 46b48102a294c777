"""Notes of decisions, for a tool that asks while they are made. Without a listener a note costs one comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

__all__ = ["Listeners"]

Note = TypeVar("Note")


class Listeners(Generic[Note]):
    """Who listens to notes of one kind, in any thread: backward graphs may be compiled in one of autograd's. `heard` are the
    notes of each listener."""

    def __init__(self) -> None:
        self.heard: list[list[Note]] = []

    def note(self, make: Callable[[], Note]) -> None:
        """Gives every listener a note, which is made only where there is one."""
        if self.heard:
            note = make()
            for heard in self.heard:
                heard.append(note)

    @contextmanager
    def listening(self) -> Iterator[list[Note]]:
        """The notes of what happens inside, in order."""
        heard: list[Note] = []
        self.heard.append(heard)
        try:
            yield heard
        finally:
            self.heard = [one for one in self.heard if one is not heard]
