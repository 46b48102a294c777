"""A convolution in windows, deliberately plain: tap by tap, by pointers."""

from __future__ import annotations

import torch

import kgen
from kgen import contraction, knob, operand, result
from kgen.templates.problem import Problem

CONVOLUTION = contraction("b,h+r,w+s,c", "r,s,c,k -> b,h,w,k")


@kgen.template(implements=CONVOLUTION, device="cuda", source="convolution.py.jinja", name="plain_convolution")
class Convolution(kgen.KernelTemplate):
    """A row of positions and a block of channels for a program."""

    X, F, Y = operand("b", "h+r", "w+s", "c"), operand("r", "s", "c", "k"), result("b", "h", "w", "k")
    BLOCK_W, BLOCK_C, BLOCK_K = knob(16, 32), knob(16), knob(32, 16)

    def refuse(self, problem: Problem) -> str | None:
        return "no matrix unit multiplies float64" if problem.main_dtype is torch.float64 else None


@kgen.template(implements=CONVOLUTION, device="cpu", source="convolution.cpp.jinja", name="plain_convolution_cpp")
class ConvolutionOnCpu(kgen.KernelTemplate):
    """The same in C++."""

    X, F, Y = operand("b", "h+r", "w+s", "c"), operand("r", "s", "c", "k"), result("b", "h", "w", "k")
    BLOCK_W, BLOCK_C, BLOCK_K = knob(16, 32), knob(16), knob(32, 16)

    def refuse(self, problem: Problem) -> str | None:
        return None if problem.main_dtype.is_floating_point else "it adds up floats"
