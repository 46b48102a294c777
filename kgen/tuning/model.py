"""The cost model: what a configuration of a template takes on a device, by its roofline, and what the library would take.

All times are in seconds. The model only has to order candidates: its constants come from measurements of few problems.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from kgen.templates.contract import Config
from kgen.templates.problem import Problem

# A launch, or waking the threads, with what it leaves idle at either end.
LAUNCH = {"cuda": 3e-6, "cpu": 4e-6}
# Share of the peak rate that a library reaches on large products, and of the bandwidth that separate kernels reach.
LIBRARY_RATE = 0.92
STREAM_RATE = 0.9


def feasible(problem: Problem) -> Iterator[Config]:
    """The configurations that the device can run."""
    device = problem.device
    for config in problem.template.configs(problem):
        needs = problem.template.resources(problem, config)
        if needs.shared <= device.shared and needs.registers <= device.registers and problem.admits(config):
            yield config


def seconds(problem: Problem, config: Config) -> float:
    """The time of one kernel: the template's own estimate, or the roofline's."""
    own = problem.template.method("seconds")
    joining = LAUNCH[problem.device.kind] if any(s.kind == "partial" for s in problem.epilogue) else 0.0
    return joining + (float(own(problem, config)) if own else roofline(problem))


def rate(problem: Problem) -> float:
    """Operations a second of the units that multiply the problem's operands."""
    kind = problem.main_dtype
    if kind.itemsize == 1:
        return problem.device.flops * 2
    if kind in (torch.float16, torch.bfloat16):
        return problem.device.flops
    if kind is torch.float32 and problem.device.kind == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return problem.device.flops / 2
    return problem.device.flops / (12 if problem.device.kind == "cuda" else 1)


def traffic(problem: Problem) -> int:
    """Bytes that the fused kernel has to move."""
    return sum(problem.bytes_read(name) for name in problem.inputs) + problem.epilogue_bytes


def roofline(problem: Problem) -> float:
    """The time of a kernel that reaches the device's rates."""
    return max(problem.flops / rate(problem), traffic(problem) / problem.device.bandwidth) + LAUNCH[problem.device.kind]


def vendor_seconds(problem: Problem) -> float:
    """The time of the library call, and of separate kernels for what the library does not fuse. Of an operator's own
    implementation nothing is known: who registers a template for it wants that to run."""
    if problem.template.implements.operator:
        return math.inf
    device, result = problem.device, problem.size_of_result
    alone = sum(problem.bytes_of_operand(name) for name in problem.inputs) + result
    total = max(problem.flops / rate(problem) / LIBRARY_RATE, alone / device.bandwidth / STREAM_RATE) + LAUNCH[device.kind]
    if problem.finishing:  # the result is written, and read again
        total += (result + problem.epilogue_bytes) / device.bandwidth / STREAM_RATE + LAUNCH[device.kind]
    for name, read in problem.inputs.items():
        if read.load is None:
            moved = problem.bytes_read(name) + problem.bytes_of_operand(name)
            total += moved / device.bandwidth / STREAM_RATE + LAUNCH[device.kind]
    return total
