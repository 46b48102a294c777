"""What templates are asked to render: the loops, tiles and contractions of a plan's steps, as the scheduler has decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kgen.device import Device, Gpu
from kgen.ir import nodes as ir
from kgen.ir.plan import Batch, Launch, Nest, Tiling, members
from kgen.ir.sizes import Sizes
from kgen.scheduler.selection.choose import chosen_problem, product_of
from kgen.scheduler.tiling.loops import choose_loops
from kgen.scheduler.tiling.tiles import choose_batch_tiles, choose_tiles
from kgen.templates.problem import Problem

__all__ = ["StepChoices"]


@dataclass(frozen=True, slots=True)
class StepChoices:
    """The choices for one graph. `device` tells the device of a buffer, `register_bytes` is the length of the CPU's vector
    registers; without `reorder` loops stay in the order of the program."""

    graph: ir.Graph
    device: Callable[[str], Device]
    register_bytes: int
    gpu: Gpu = Gpu()  # noqa: RUF009 -- frozen
    reorder: bool = True

    def problems(self, step: Launch) -> list[Problem]:
        """The contractions, as the chosen template sees them."""
        return [chosen_problem(kernel, self.graph, self.device(product_of(kernel))) for kernel in members(step)]

    def nests(self, step: Launch) -> tuple[Nest, ...]:
        """The loops of C++ kernels."""
        sizes = Sizes(self.graph.size_hints)
        return tuple(choose_loops(one, self.graph, sizes, self.register_bytes, self.reorder) for one in members(step))

    def tilings(self, step: Launch) -> tuple[Tiling, ...]:
        """The tiles of GPU kernels."""
        sizes = Sizes(self.graph.size_hints)
        if isinstance(step, Batch):
            return tuple(choose_batch_tiles(step, self.graph, sizes, self.gpu, self.reorder))
        return (choose_tiles(step, self.graph, sizes, self.gpu, self.reorder),)
