"""The machine that graphs are compiled on: its CPU, the GPU of a graph, and the names that measurements are kept under."""

from __future__ import annotations

import torch

from kgen.build import toolchain
from kgen.capture import torch_adapter
from kgen.device import Device, Gpu, gpu_from
from kgen.ir import nodes as ir

__all__ = ["REGISTER_BYTES", "cpu_device", "gpu_of", "machine_name", "register_bytes"]

# What the cost model begins with: operations a second of a core's float32 units, how many times faster bfloat16 is multiplied
# by instructions of its own, and bytes a second that a core reads, of which so many use up the memory's bandwidth.
FLOPS = {"avx512": 140e9, "avx2": 70e9, "generic": 10e9}
NARROW = {"-mamx-bf16": 7.0, "-mavx512bf16": 2.0}
BANDWIDTH, MOST_READERS = 10e9, 8
# MKL takes other ways on CPUs of other vendors: its share, measured on an AMD EPYC with AVX-512.
MKL_VENDOR, FOREIGN_MKL = "GenuineIntel", 0.42
REGISTER_BYTES = {"avx512": 64, "avx2": 32, "generic": 16}


def gpu_of(graph: ir.Graph) -> Gpu:
    """The GPU that the graph's kernels are made for."""
    devices = (b.device for b in graph.buffers.values())
    device = next((d for d in devices if d.type == "cuda"), None)
    return Gpu() if device is None else gpu_from(torch_adapter.gpu_facts(device))


def register_bytes() -> int:
    """The length of a vector register of the CPU."""
    return REGISTER_BYTES[toolchain.isa().name]


def cpu_device() -> Device:
    """This machine's CPU as templates see it."""
    found = toolchain.isa()
    isa, threads = found.name, torch.get_num_threads()
    narrow = next((times for flag, times in NARROW.items() if flag in found.flags), 1.0)
    flops, bandwidth = FLOPS[isa] * threads * narrow, BANDWIDTH * min(threads, MOST_READERS)
    foreign = torch.backends.mkl.is_available() and toolchain.cpu_vendor() not in ("", MKL_VENDOR)
    lanes, library = REGISTER_BYTES[isa] // 4, FOREIGN_MKL if foreign else 1.0
    return Device("cpu", 0, threads, 0, 0, isa, lanes, flops, narrow, bandwidth, library)


def machine_name(kind: str) -> str:
    """The name under which measurements on this machine's devices are kept."""
    if kind == "cuda":
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{toolchain.cpu_name()}, {torch.get_num_threads()} threads, {toolchain.isa().name}"
