"""What kgen could not compile, and what the graph does instead (docs/failures.md).

A failure is data, which the next attempt at the graph reads: lowering makes library calls of its `nodes`, the scheduler works
without its `switches`, and reports show it as a verdict.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch._dynamo.exc import TorchDynamoException
from torch.fx import GraphModule

from kgen import cache, only
from kgen.errors import CacheNotWritable, FallbackWarning, KgenError, UserError
from kgen.unusable import Unusable
from kgen.verdict import Outcome, Reason, Verdict

if TYPE_CHECKING:
    from kgen.config import Config
    from kgen.ir.plan import Choice

__all__ = [
    "NOT_OURS", "Attempt", "Failure", "KernelsFailed", "is_strict", "keep_report", "keep_source", "may_replace", "reason_of",
    "verdicts", "warn",
]  # fmt: skip

# What torch raises to steer Dynamo, and what no other way of computing the graph would avoid.
NOT_OURS = (UserError, TorchDynamoException, torch.AcceleratorError, torch.OutOfMemoryError, MemoryError, OSError)
_MAX_NAMES = 6


@dataclass(frozen=True, slots=True)
class Failure:
    """`what` failed, and `why`; `instead` says what runs. `operators` and `line` are the user's, `source` is a file kept for a
    report (empty: none). `nodes` names nodes of the aten graph that become library calls, with the operator of each; `switches`
    are options that are off from now on; `choice` is a template's configuration that is not used again."""

    what: str
    why: str
    instead: str
    reason: Reason
    operators: tuple[str, ...] = ()
    line: str = ""
    source: str = ""
    nodes: frozenset[str] = frozenset()
    switches: tuple[str, ...] = ()
    choice: Choice | None = None

    def __str__(self) -> str:
        return f"{self.what} ({self.place}): {self.why}"

    @property
    def place(self) -> str:
        """The operators and the user's line."""
        more = ["..."] if len(self.operators) > _MAX_NAMES else []
        names = ", ".join([*self.operators[:_MAX_NAMES], *more])
        return "; ".join(filter(None, (names, self.line)))

    @property
    def verdict(self) -> Verdict:
        kept = f"; see {self.source}" if self.source else ""
        return Verdict(self.what, ", ".join(self.operators), Outcome.REPLACED, self.reason, detail=f"{self.why}{kept}")


class KernelsFailed(Exception):
    """Kernels that cannot be rendered, built or loaded, while something else can compute what they do. It ends an attempt at a
    graph; its cause is the error that `strict` raises."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        super().__init__("; ".join(map(str, failures)))
        self.failures = tuple(failures)


@dataclass(slots=True)
class Attempt:
    """One attempt at a graph: what earlier ones failed at, templates' configurations that are not used, whether every operator
    runs in eager; and the stage that it has come to."""

    failures: tuple[Failure, ...] = ()
    unusable: tuple[Unusable, ...] = ()
    eager: bool = False
    stage: str = "freeze"


def is_strict(config: Config) -> bool:
    """Whether errors raise. Where one template is asked for (`kgen.only`), its failures are what is asked about."""
    return config.strict or only.current() is not None


def may_replace(cause: BaseException) -> bool:
    """Whether an error is kgen's own, so that the graph can still run in another way."""
    return isinstance(cause, Exception) and not isinstance(cause, NOT_OURS)


# The beginning of a compiler's message about a template's Jinja file.
_JINJA_LINE = re.compile(r"(\S+\.jinja):(\d+):")


def reason_of(cause: BaseException) -> str:
    """An error in one line: of a compiler's, the first message in its output, with its place in an author's file."""
    details = cause.details if isinstance(cause, KgenError) else {}
    lines = str(details.get("output", "")).splitlines()
    last = next((line for line in reversed(lines) if line.strip()), "")
    place, _, message = next((line.partition("error: ") for line in lines if "error: " in line), ("", "", last))
    where = _JINJA_LINE.match(place)
    message = f"{message.strip()} ({where[1]}, line {where[2]})" if where else message
    if "how" in details:
        return f"the compiler failed ({details['how']}){': ' if message else ''}{message.strip()}"
    text = (cause.text if isinstance(cause, KgenError) else str(cause)).strip().partition("\n")[0]
    return f"{type(cause).__name__}: {text}"


def verdicts(failures: Iterable[Failure]) -> list[Verdict]:
    """Of a configuration that is not used, the scheduler has a verdict."""
    return [failure.verdict for failure in failures if failure.choice is None]


def warn(failure: Failure) -> None:
    """The one warning about a failure."""
    kept = f"\n  kept for a report: {failure.source}" if failure.source else ""
    text = f"kgen: {failure.what} failed, so {failure.instead} ({failure.place})\n  why: {failure.why}{kept}"
    hint = "\n  options={'strict': True} or KGEN_STRICT=1 raises the error instead"
    warnings.warn(text + hint, FallbackWarning, stacklevel=2)


def keep_report(name: str, cause: BaseException, gm: GraphModule) -> str:
    """Writes the error's traceback and the graph to a file in the cache folder; the file's path, empty where that fails."""
    parts = ["".join(traceback.format_exception(cause))]
    with contextlib.suppress(Exception):  # the graph may be what is wrong
        parts.append(gm.print_readable(print_output=False))
    return keep_source(name, "\n".join(parts), ".txt")


def keep_source(name: str, text: str, suffix: str) -> str:
    """Writes a text to a file in the cache folder; its path, empty where that fails."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    with contextlib.suppress(OSError, CacheNotWritable):
        place = cache.path("failed", f"{name}-{digest}", suffix)
        place.write_text(text, encoding="utf-8")
        return str(place)
    return ""
