"""What a caller of the scheduler decides: `Options`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch

from kgen.cost.tuning_query import Oracle
from kgen.device import Device, Gpu
from kgen.ir import nodes as ir
from kgen.only import Only
from kgen.templates.capabilities import Capabilities
from kgen.unusable import Memo
from kgen.verdict import FusionDemand


@dataclass(frozen=True, slots=True)
class Options:
    """Switches of the scheduler. `demands` are the user's require_fused / forbid_fused."""

    fusion: bool = True
    demands: tuple[FusionDemand, ...] = ()
    gpu: Gpu = field(default_factory=Gpu)
    gpu_everywhere: bool = False  # kernels on the CPU's tensors are made for a GPU as well, for its interpreter
    templates: bool = True
    cpu: Device = field(default_factory=lambda: Device("cpu", isa="generic"))
    only: Only | None = None  # the template that takes all contractions
    oracle: Oracle | None = None  # knows measured times
    stable: bool = False  # these never change results
    prologues: bool = True  # operands may be computed in a contraction's kernel
    scales: bool = True  # and scaled behind its sum
    horizontal_fusion: bool = True  # what needs nothing of each other may share a kernel
    grouped: bool = True  # contractions too, with an operand in common
    recompute: bool = True  # contractions may be recomputed for what needs their elements and reductions of these
    copies: bool = True  # operands may be copied into rows that begin at lines of a GPU's cache
    fused_calls: bool = True  # the library may compute a contraction and what follows in one call
    interpreted: bool = False  # kernels for a GPU are for Triton's interpreter
    programs: bool = True  # templates may compute several contractions in one kernel
    memo: Memo | None = field(default=None, compare=False)  # of schedules of the same graph before
    # what templates need to know, by device: all contractions of all attempts ask
    _devices: dict[torch.device, Device] = field(init=False, repr=False, compare=False, default_factory=dict)

    def target(self, device: str) -> str:
        """The language of the kernels on a device."""
        return "triton" if self.gpu_everywhere or device.startswith("cuda") else "cpp"

    def device(self, graph: ir.Graph, buffer: str) -> Device:
        """What templates need to know of the device that a buffer is on."""
        own = graph.buffers[buffer].device
        known = self._devices.get(own)
        if known is None:
            is_cpu = self.target(str(own)) == "cpp"
            known = self._devices[own] = self.cpu if is_cpu else _gpu_device(self.gpu, self.interpreted)
        return known

    def capabilities(self, graph: ir.Graph) -> Capabilities:
        """What the registered templates say of fusion around the buffers of a graph."""
        return Capabilities(lambda out: self.device(graph, out).kind)

    def may_fuse_calls(self, graph: ir.Graph) -> Callable[[str], bool]:
        """Of which results on: a CPU's library makes two passes of what is one call, but of convolutions."""
        on = self.fusion and self.fused_calls
        windows = ir.windowed(graph)

        def may(out: str) -> bool:
            device = graph.buffers[out].device
            is_own = (self.target(str(device)) == "triton") == (device.type == "cuda")
            return on and (is_own if out in windows else self.target(str(device)) == "triton")

        return may


@cache
def _gpu_device(gpu: Gpu, interpreted: bool) -> Device:
    return Device(
        "cuda", gpu.arch, gpu.compute_units, gpu.shared, flops=gpu.flops, bandwidth=gpu.bandwidth, interpreted=interpreted
    )
