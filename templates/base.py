"""The base class of templates: what an author may declare and define, each with what holds otherwise.

Fusion asks the registered templates for what is declared here, with a `Request`, before any of them sees a problem. A problem
is asked about in detail by the methods.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from kgen.ir import index as ix
from kgen.ir import ops

if TYPE_CHECKING:
    from kgen.ir.index import Expr
    from kgen.ir.plan import Config
    from kgen.ir.program import MatrixSizes
    from kgen.templates.problem import Problem


@dataclass(frozen=True, slots=True)
class Resources:
    """What one program of a configuration needs: shared memory in bytes, 32-bit registers of a thread."""

    shared: int = 0
    registers: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """What fusion wants of one kernel with a contraction. A field that stays as it is asks for nothing. Costs are elementary
    operations for each element; `full_row` is the length of a row that one tile holds; `reduction` is how an epilogue reduces
    tiles (a key of `ops.REDUCTIONS`); `ordered` are updates that may hit one element twice and run in order."""

    family: int = 1
    grouped: int = 1
    full_row: int = 0
    reduction: str = ""
    ordered: bool = False
    prologue_cost: int = 0
    scale_cost: int = 0
    epilogue_cost: int = 0


class KernelTemplate:
    """What every template derives from. The class attributes say what its kernels can do; the methods answer for a problem.

    A subclass overrides what it wants to say otherwise. Whatever else it has of public names are operands, results, knobs,
    workspaces, host values, constants in capital letters, and what its own Jinja file asks for."""

    # The Jinja file's language on a GPU: "triton", or "gluon", the level at which layouts and shared memory are written out.
    language: ClassVar[str] = "triton"
    # How one launch can make several problems, and the name that the Jinja file uses for it: "program", each by programs of its
    # own, or "parts", all together. None: each has a launch of its own.
    joins: ClassVar[str | None] = None
    # The name of a template with another pattern, whose problems one launch makes together with this one's, with "parts"; the
    # first of them are this one's, as their configuration is. Its own Jinja file is not looked at then.
    partner: ClassVar[str] = ""
    # How long axes may be; longer ones are refused. Operands of a contraction change places for it.
    longest: ClassVar[Mapping[str, int]] = {}
    # The most contractions with a joint epilogue in one kernel, where an operand is `many`: each has accumulators of its own.
    family: ClassVar[int] = 3
    # The most contractions in one launch, where the template `joins` problems.
    grouped: ClassVar[int] = 8
    # The longest row that one tile holds, so that an epilogue may reduce the row and read it again. None: as long as the
    # longest `BLOCK_` knob of a result on a GPU, none in C++.
    full_row: ClassVar[int | None] = None
    # How an epilogue may reduce tiles.
    reductions: ClassVar[frozenset[str]] = frozenset(ops.REDUCTIONS)
    # Elementary operations of an operand's element that may run again for each tile that reads it; of a scale that may run
    # again for each element of the epilogue; and of a value that may run again to be reduced tile by tile.
    prologue_cost: ClassVar[int] = 24
    scale_cost: ClassVar[int] = 6
    epilogue_cost: ClassVar[int] = 100

    # In C++, which of the engine's loops are linked where `multiplies` says so: "matmul", "attention",
    # or "attention_backward".
    engine: ClassVar[str] = "matmul"

    def refuse(self, problem: Problem) -> str | None:
        """Why the template cannot take a problem, for people to read; None where it can."""
        return None

    def refuse_grouped(self, problems: Sequence[Problem]) -> str | None:
        """Why one launch cannot make these with `parts`; None where it can."""
        return None

    def configs(self, problem: Problem) -> Iterable[Mapping[str, int] | Config]:
        """The configurations worth trying. A knob left out has its first value."""
        return problem.template.combinations()

    def resources(self, problem: Problem, config: Config) -> Resources:
        """What one program needs. A configuration that needs more than the device has is never offered."""
        return Resources()

    def epilogue_subtile(self, problem: Problem, config: Config) -> Mapping[str, int]:
        """Points along axes that the epilogue gets at once, where that is not a whole tile, as ``{"n": config.BLOCK_N // 2}``.
        Every call of ``C.store`` begins at a multiple of it: reductions in an epilogue count on that."""
        return {}

    def tile_shapes(self, problem: Problem, config: Config) -> Mapping[str, tuple[int, ...]]:
        """In Gluon, by composite axis, how many indices of each of its loops a tile has, outermost first, as
        ``{"m": (2, 8, 8)}``: powers of two, as many together as its `BLOCK_` knob says. What slots take along such an axis are
        rows of tiles, one tile behind the other: one that reaches past an end of a loop has rows that are no index."""
        return {}

    def grid(self, problem: Problem, config: Config) -> Expr | int:
        """The number of programs: one for each tile of the first result."""
        return problem.blocks(config)

    def grid_of_parts(self, problems: Sequence[Problem], config: Config) -> Expr | int:
        """The number of programs of several problems that one launch makes with `parts`."""
        return sum((ix.as_expr(self.grid(problem, config)) for problem in problems), ix.ZERO)

    def resources_of_parts(self, problems: Sequence[Problem], config: Config) -> Resources | None:
        """What one program needs that makes several problems with `parts`; None: no more than for the neediest of them."""
        return None

    def seconds_of_parts(self, problems: Sequence[Problem], config: Config) -> float | None:
        """An estimate of the time of a kernel that makes several problems with `parts`; None: from those of each alone."""
        return None

    def shared_seconds(self, problem: Problem, config: Config) -> float:
        """Seconds of what a device has one of for all its programs, besides the memory: kernels in one launch share it."""
        return 0.0

    def facts(self, problems: Sequence[Problem], config: Config) -> object:
        """An object whose attributes the Jinja file reads as ``facts.name``: what has to be computed is computed there."""
        return None

    def multiplies(self, problem: Problem) -> tuple[torch.dtype, torch.dtype] | None:
        """In C++, the types of elements whose loops of the engine are linked; None: the kernel compiles the loops itself."""
        return None

    def order(self, problem: Problem, config: Config) -> Hashable:
        """Equal for configurations, of other templates too, whose sums are added in one order, so that their results are equal
        bit by bit (``numerics="stable"``). Each configuration has an order of its own."""
        return problem.template.name, config.values

    def seconds(self, problem: Problem, config: Config) -> float | None:
        """An estimate of the kernel's time; None: the device's roofline."""
        return None

    def uncalibrated(self, problem: Problem) -> str | None:
        """Why nobody has compared that estimate with measurements on such problems; None where somebody has. The library takes
        these problems in the default mode, until the template was measured to be faster."""
        return None

    def is_measured(self, sizes: MatrixSizes, arch: int) -> bool:
        """Whether `uncalibrated` would say nothing of a program around a matrix of such sizes, on a device of compute
        capability `arch` (90 for 9.0; 0 for a CPU). This is asked before there is a problem, where a graph is split into
        forward and backward."""
        return type(self).uncalibrated is KernelTemplate.uncalibrated


# The names that an author may override.
PUBLIC = frozenset(name for name in vars(KernelTemplate) if not name.startswith("_"))
