"""Kernels of which ptxas keeps more in memory than in registers are compiled again."""

from __future__ import annotations

import launch_kernels as tk
import pytest

from kgen.build import triton, triton_worker


def cubin(registers: int, stack: int) -> bytes:
    """The attributes of a function that say both, among others."""
    numbers = [(0x2F, registers), (0x11, 8), (0x12, stack)]
    return b"".join(bytes([4, kind, 8, 0]) + (9).to_bytes(4, "little") + n.to_bytes(4, "little") for kind, n in numbers)


@pytest.mark.parametrize(
    ("registers", "stack", "again"), [(32, 1216, True), (32, 0, False), (255, 1216, False), (32, 64, False)]
)
def test_few_registers_and_much_in_memory(registers: int, stack: int, again: bool) -> None:
    assert triton_worker.gives_up(cubin(registers, stack)) is again


@pytest.mark.parametrize(("warps", "registers"), [(1, 255), (8, 255), (16, 128), (32, 64)])
def test_registers_of_a_thread(warps: int, registers: int) -> None:
    assert triton_worker.most_registers(warps) == registers


@pytest.mark.ptx
def test_machine_code_says_both() -> None:
    """What is read of a cubin here is what cuobjdump prints."""
    [made] = triton.compile_kernels([tk.add("i32")], 90)
    registers, stack = triton.resource_usage(made.cubin)
    assert [int.from_bytes(found, "little") for found in triton_worker._REGISTERS.findall(made.cubin)] == [registers]
    assert [int.from_bytes(found, "little") for found in triton_worker._STACK.findall(made.cubin)] == [stack]
