"""Which of the next best configurations of a kernel cannot run either, once its own has turned out not to.

Tried one at a time, each costs an attempt at the whole graph, and a compilation that nothing else runs beside: six in a row for
a matmul with a gathered residual. Here they are compiled side by side.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from kgen.build import triton
from kgen.device import Gpu
from kgen.errors import KernelSpills, KernelTooLarge, TritonBuildFailed
from kgen.host.compiled import check_shared, check_spills
from kgen.ir.plan import Choice, Kernel
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.unusable import Unusable

__all__ = ["unfit"]

# So many are compiled at a time, a core each, and so many in all: what takes longer than these has other reasons.
AT_ONCE, MOST = 8, 32

Render = Callable[[Kernel], TritonKernel | None]


def unfit(kernel: Kernel, choices: Sequence[Choice], render: Render, gpu: Gpu) -> tuple[Unusable, ...]:
    """Those of `choices` that cannot run, up to the first that can: it comes next. What cannot be rendered or compiled ends the
    search, too, for that is an error, which the next attempt says."""
    found: list[Unusable] = []
    for choice, launch in _compiling(kernel, choices, render, gpu):
        why = None if launch is None else _why_unfit(launch, gpu)
        if why is None:
            break
        found.append(Unusable(choice, why, compiled=True))
    return tuple(found)


def _compiling(
    kernel: Kernel, choices: Sequence[Choice], render: Render, gpu: Gpu
) -> Iterator[tuple[Choice, TritonKernel | None]]:
    """The kernel by each choice, while it and those after it are being compiled."""
    width = min(AT_ONCE, len(os.sched_getaffinity(0)))
    for start in range(0, min(MOST, len(choices)), width):
        some = choices[start : start + width]
        launches = [render(replace(kernel, choice=choice)) for choice in some]
        for launch in launches:
            if launch is not None:
                triton.begin(launch, gpu.arch)
        yield from zip(some, launches, strict=True)


def _why_unfit(launch: TritonKernel, gpu: Gpu) -> str | None:
    """Why a kernel cannot run; None where it can, or does not compile."""
    try:
        compiled = triton.compile_kernels([launch], gpu.arch)
        check_spills([launch], compiled)
        check_shared(compiled, gpu.shared, "the GPU")
    except (KernelSpills, KernelTooLarge) as failure:
        return failure.text
    except TritonBuildFailed:
        return None
    return None
