"""Host programs by hand."""

from __future__ import annotations

import torch

from kgen.host.program import InputTensor, Instruction, OutTensor, Program, SlotSpec

F32 = torch.float32


class Builder:
    """Collects registers and slots, so that a test reads as a list of instructions."""

    def __init__(self, device: str = "cpu", launches: tuple[str, ...] = ("add", "double_it")) -> None:
        self.device = device
        self.launches = launches
        self.registers: list[int] = []
        self.slots: list[SlotSpec] = []

    def reg(self, value: int = 0) -> int:
        self.registers.append(value)
        return len(self.registers) - 1

    def regs(self, values) -> tuple[int, ...]:
        return tuple(self.reg(v) for v in values)

    def slot(self, sizes, strides=None, offset=0, dtype=F32, device=None) -> int:
        strides = strides if strides is not None else torch.empty(sizes).stride()
        self.slots.append(SlotSpec(dtype, self.regs(sizes), self.regs(strides), self.reg(offset), device or self.device))
        return len(self.slots) - 1

    def input(self, slot: int, **flags: bool) -> InputTensor:
        spec = self.slots[slot]
        return InputTensor(slot, spec.dtype, spec.sizes, spec.strides, **flags)

    def out(self, slot: int) -> OutTensor:
        spec = self.slots[slot]
        return OutTensor(slot, spec.sizes, spec.strides, spec.offset, spec.dtype)

    def program(self, inputs, code: list[Instruction], outputs, **more) -> Program:
        return Program(
            tuple(inputs), tuple(self.registers), tuple(self.slots), tuple(code), tuple(outputs), launches=self.launches, **more
        )
