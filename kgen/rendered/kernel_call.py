"""A rendered step: the text of a C++ function, or the call of a GPU kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kgen.ir.index import Expr
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.rendered.tensor_map import TensorMap

__all__ = ["KernelCall", "Rendered"]


@dataclass(frozen=True, slots=True)
class Rendered:
    """One kernel's text, and what it gets: buffers, then size symbols and literals. `names` are the identifiers that the text
    made up: they do not count in its key. `general` renders the same kernel, under another symbol, with its constant offsets
    among the literals. `objects` are the texts of what it links (`kgen.build.cpp.Unit`)."""

    text: str
    buffers: tuple[str, ...]
    sizes: tuple[str | int, ...]
    names: frozenset[str]
    general: Callable[[str], Rendered] | None = None
    objects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelCall:
    """How a kernel is called: buffers in pointer order, size symbols and literals in integer order. `symbol` names a C++
    function; a GPU kernel has a `launch` instead, and a `grid` of programs along x, y and z. Its parameters may stand in any
    order; `maps` are those of its signature that are TMA descriptors."""

    symbol: str
    buffers: tuple[str, ...]
    sizes: tuple[str | int, ...]
    grid: tuple[Expr, ...] = ()
    launch: TritonKernel | None = None
    maps: tuple[TensorMap, ...] = ()
