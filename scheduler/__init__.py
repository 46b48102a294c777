"""The scheduler: which loops become one kernel, in which order, and where buffers live. `schedule` is the stage."""

from kgen.device import Gpu
from kgen.scheduler.kernels.operand_packing import pack_operands
from kgen.scheduler.kernels.steps import StepChoices
from kgen.scheduler.schedule import Options, schedule
from kgen.scheduler.selection.choose import chosen_problem, contraction_of, next_best
from kgen.scheduler.tiling.loops import choose_loops
from kgen.scheduler.tiling.tiles import choose_combo_tiles, choose_tiles

__all__ = [
    "Gpu", "Options", "StepChoices", "choose_combo_tiles", "choose_loops", "choose_tiles", "chosen_problem", "pack_operands",
    "contraction_of", "next_best", "schedule",
]  # fmt: skip
