"""What people see of a measurement: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

__all__ = ["Say", "counting", "progress"]

Say = Callable[[str], None]


@contextlib.contextmanager
def progress(what: str, steps: int) -> Iterator[tuple[Say, Say]]:
    """Two functions: one for each step that is done, with what comes next, and one for a line that stays."""
    if not sys.stderr.isatty():
        _line(f"measuring {what}, {steps} candidates")
        yield (lambda text: None), _line
        return
    from tqdm import tqdm  # noqa: PLC0415  only where a bar is shown

    with tqdm(total=steps, desc=f"kgen: measuring {what}", unit="", leave=False, dynamic_ncols=True, file=sys.stderr) as bar:

        def step(text: str) -> None:
            bar.set_postfix_str(text[:60], refresh=False)
            bar.update()

        yield step, lambda text: tqdm.write(f"kgen: {text}", file=sys.stderr)


@contextlib.contextmanager
def counting(what: str) -> Iterator[Say]:
    """A function for what is begun next, of nobody knows how many: shown on a terminal, with the number and the time."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from tqdm import tqdm  # noqa: PLC0415  only where a bar is shown

    with tqdm(desc=f"kgen: {what}", unit="", leave=False, dynamic_ncols=True, file=sys.stderr) as bar:

        def begun(text: str) -> None:
            bar.set_postfix_str(text[:80], refresh=False)
            bar.update()

        yield begun


def _line(text: str) -> None:
    sys.stderr.write(f"kgen: {text}\n")
    sys.stderr.flush()
