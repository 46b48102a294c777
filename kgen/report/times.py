"""How long the kernels of a schedule take by the cost model, and how long they would at the machine's full rates."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.cost import model
from kgen.cost.atomics import atomics_seconds
from kgen.device import Device
from kgen.ir.plan import Config, Kernel, Launch, Schedule, members
from kgen.report.traffic import kernel_traffic
from kgen.scheduler.options import Options
from kgen.scheduler.selection.choose import chosen_problem

__all__ = ["Times", "kernel_times"]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: the cost model's estimate, and the `floor` at full bandwidth and at the rate of the units that multiply."""

    estimate: float
    floor: float


def kernel_times(kernel: Launch, plan: Schedule, options: Options) -> Times:
    """Of one run, at the sizes of the example inputs."""
    device = _device(kernel, plan, options)
    moving = kernel_traffic(kernel, plan).total / device.bandwidth
    launch = model.LAUNCH[device.kind]
    updating = sum(atomics_seconds(one, plan.graph, device) for one in members(kernel))
    parts = [_template_times(one, plan, device) for one in members(kernel) if one.contracts and one.choice is not None]
    if not parts:
        return Times(max(moving / model.STREAM_RATE, updating) + launch, moving)
    computing = sum(floor for _, floor in parts)
    return Times(max(sum(seconds for seconds, _ in parts), moving, updating), max(computing, moving))


def _device(kernel: Launch, plan: Schedule, options: Options) -> Device:
    return options.device(plan.graph, members(kernel)[0].statements[0].outs[0])


def _template_times(kernel: Kernel, plan: Schedule, device: Device) -> tuple[float, float]:
    """Of a contraction's kernel: the template's estimate, and its operations at the device's rate."""
    assert kernel.choice is not None
    problem = chosen_problem(kernel, plan.graph, device)
    return model.seconds(problem, Config(kernel.choice.config)), problem.flops / problem.rate
