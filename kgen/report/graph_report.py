"""What one compiled graph became, as data: its kernels, library calls, verdicts and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.verdict import Verdict

__all__ = ["ExternReport", "GraphBreak", "GraphReport", "KernelReport", "Refusal", "StepReport", "bytes_text", "time_text"]


def bytes_text(count: int) -> str:
    """``832 B``, ``1.5 MB``: decimal units, three digits."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"


def time_text(seconds: float) -> str:
    """``3.2 us``, ``1.5 ms``: three digits."""
    value, unit = 1e6 * seconds, "us"
    for larger in ("ms", "s"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


@dataclass(frozen=True, slots=True)
class KernelReport:
    """A generated kernel. `operators` are those it fuses, `lines` the user's source lines they came from, `outer` and `inner`
    its loops as (name, extent); of a batch, the loop over its members. Bytes are at the example's sizes; `source` is the
    generated function, or all of them where a call picks one by size: `by_size` has the range of each, and what it is.
    `modules` are paths of the modules that called the operators, `calls` these calls (``aten.mm#2 in layers.0.mlp.up``, a name
    that `require_fused` takes as ``aten.mm#2``), `parameters` what the kernel reads of the module's tensors. `seconds` is the
    cost model's estimate, `floor` the time at the machine's full rates; `ir` is the kernel before it was rendered, `nodes` are
    the graph's nodes that it computes."""

    graph: str
    name: str
    operators: tuple[str, ...]
    lines: tuple[str, ...]
    outer: tuple[tuple[str, str], ...]
    inner: tuple[tuple[str, str], ...]
    sections: int
    bytes_read: int
    bytes_written: int
    source: str
    by_size: tuple[tuple[str, str], ...] = ()
    modules: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    seconds: float = 0.0
    floor: float = 0.0
    ir: str = ""
    nodes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def loops(self) -> str:
        """``x0<8 | y0<16``: independent loops, then the ones inside each point of them."""
        parts = [" ".join(f"{name}<{extent}" for name, extent in loops) for loops in (self.outer, self.inner)]
        return " | ".join(part or "-" for part in parts if part or self.inner)

    def __str__(self) -> str:
        moved = f"reads {bytes_text(self.bytes_read)}, writes {bytes_text(self.bytes_written)}"
        return f"{self.name}: {', '.join(self.operators)} over {self.loops or 'one point'}, {moved}"


@dataclass(frozen=True, slots=True)
class ExternReport:
    """Calls of one operator that run outside of generated code, for one reason. `bytes` are operands and results, `modules` the
    paths of the modules that make the calls."""

    graph: str
    operator: str
    reason: str
    calls: int
    lines: tuple[str, ...]
    bytes: int
    modules: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.operator} x {self.calls}: {self.reason}"


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Where Dynamo gave up on one graph and started the next."""

    reason: str
    line: str

    def __str__(self) -> str:
        return f"{self.reason} ({self.line})" if self.line else self.reason


@dataclass(frozen=True, slots=True)
class Refusal:
    """A verdict that keeps two apart, and the traffic that one kernel would have saved, in bytes at the example's sizes. Of
    what is no pair of kernels, it is the size of the tensor in between. `kinds` are producer and consumer without what tells
    equal layers apart: the operator of a node, else the name."""

    verdict: Verdict
    bytes_lost: int
    kinds: tuple[str, str] = ("", "")

    @property
    def change(self) -> str:
        """What would turn the verdict."""
        return self.verdict.change


@dataclass(frozen=True, slots=True)
class StepReport:
    """A kernel or a library call, in the order of execution. `after` are numbers of the steps whose results it needs, each with
    the tensor: its path in the user's modules, or its name in the graph."""

    name: str
    is_kernel: bool
    bytes: int
    after: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One compiled graph; `role` is inference, forward or backward. `peak_memory` is what intermediates and outputs occupy at
    most under the memory plan, in bytes. `refusals` are the verdicts that keep something apart, the most bytes lost first. See
    `Explanation` for `bytes_moved` and `bytes_minimal`."""

    name: str
    role: str
    kernels: tuple[KernelReport, ...]
    externs: tuple[ExternReport, ...]
    verdicts: tuple[Verdict, ...]
    bytes_moved: int
    bytes_minimal: int
    peak_memory: int
    refusals: tuple[Refusal, ...] = ()
    steps: tuple[StepReport, ...] = ()

    @property
    def seconds(self) -> float:
        """The estimate of all kernels; library calls have none."""
        return sum(k.seconds for k in self.kernels)
