"""Memory that shows what a kernel forgets to write: each array is full of NaNs, of -1 in integers, before its kernel runs."""

from __future__ import annotations

from dataclasses import replace

import torch

from kgen.host import program as hp
from kgen.host.assemble import Assembled

# In all floating-point types, 8 bits or more, a number whose bits are all set is a NaN.
POISON = 0xFF


def poisoned(made: Assembled) -> Assembled:
    """The program with every block of memory filled when it is allocated. Memory that another array leaves behind is not
    touched: the kernel that takes it over may still read it."""
    fill = hp.PythonCall(len(made.callables), ())
    code: list[hp.Instruction] = []
    for item in made.program.code:
        code.append(item)
        if isinstance(item, hp.Alloc):
            code.append(replace(fill, args=(hp.ArgTensor(item.slot),)))
    return replace(made, program=replace(made.program, code=tuple(code)), callables=[*made.callables, _fill])


def without_poison(program: hp.Program) -> hp.Program:
    """What `poisoned` made its program of: it appends one callable, whose calls, one for each block that is allocated, have the
    highest index."""
    if not any(isinstance(item, hp.Alloc) for item in program.code):
        return program
    last = max(item.index for item in program.code if isinstance(item, hp.PythonCall))
    code = (item for item in program.code if not (isinstance(item, hp.PythonCall) and item.index == last))
    return replace(program, code=tuple(code))


def _fill(array: torch.Tensor) -> tuple[()]:
    storage = array.untyped_storage()
    torch.empty(0, dtype=torch.uint8, device=array.device).set_(storage).fill_(POISON)
    return ()
