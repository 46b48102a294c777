"""What the registered templates say about fusion around the buffers of a graph, before any kernel is there for them to see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kgen.ir.program import Axes
from kgen.templates import registry
from kgen.templates.base import Request


def _any(buffer: str) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """`kind` is the kind of device that a buffer's kernels are for, "cuda" or "cpu"; None: any."""

    kind: Callable[[str], str | None] = _any

    def why_not(self, buffer: str, request: Request) -> str | None:
        """Why no template makes such a kernel of a contraction; None where some may."""
        return registry.why_not(self.kind(buffer), request)

    def may(self, buffer: str, request: Request) -> bool:
        return self.why_not(buffer, request) is None

    def families(self, buffer: str, operator: str, axes: Axes) -> list[tuple[int, int]]:
        """Of templates of an operator, the operand of which one kernel takes several, and how many of them."""
        return registry.families(self.kind(buffer), operator, axes)

    def tile(self, buffer: str) -> int:
        """Points along a row of a tile, before a template is chosen."""
        return next((one.tile for one in registry.contractions(self.kind(buffer)) if one.tile), 1)
