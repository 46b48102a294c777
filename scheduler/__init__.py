"""The scheduler: which loops become one kernel, in which order, and where buffers live. `schedule` is the stage."""

from kgen.scheduler.loops import choose_loops
from kgen.scheduler.schedule import Options, schedule

__all__ = ["Options", "choose_loops", "schedule"]
