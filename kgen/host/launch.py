"""Compiled GPU kernels as handles that the native runtime launches (kgen/host/launch.cpp)."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from kgen.build import cpp
from kgen.device import DRIVER
from kgen.errors import DriverNotFound, LaunchFailed
from kgen.rendered.gpu_kernel import CompiledKernel
from kgen.rendered.tensor_map import MAX_RANK, MapFormat, is_pointer, is_rounded, map_rank, map_steps

__all__ = ["GpuKernel", "launch_functions", "load_kernel"]

# The order of the enum Kind in launch.cpp.
_POINTER, _MAP = 0, 3
_KINDS = {"i32": 1, "i64": 2}
_DIVISIBLE = 128
_TF32 = 11  # CU_TENSOR_MAP_DATA_TYPE_TFLOAT32


@dataclass(frozen=True, slots=True)
class GpuKernel:
    """A kernel in a launcher, whose functions (`launch_functions`) have these addresses. `scratch` has the bytes per block of
    each scratch parameter; `pointers` and `integers` count what a launch gives for the kernel's own parameters, of which `maps`
    are TMA descriptors (kgen/rendered/tensor_map.py)."""

    handle: int
    scratch: tuple[int, ...]
    pointers: int
    integers: int
    maps: int
    functions: tuple[int, ...]


def load_kernel(kernel: CompiledKernel, devices: Iterable[int], launcher: ctypes.CDLL | None = None) -> GpuKernel:
    """The kernel, loaded into `devices` now: the first call may be inside a capture, and should not be slower than others.
    `launcher` is that of an exported program, by default the one of the cache.

    Kernels stay loaded until the process ends, so equal ones are shared. Raises DriverNotFound or LaunchFailed."""
    made = _create(kernel, DRIVER, launcher)
    library = _library(DRIVER, launcher)
    for device in devices:
        if library.kgen_load_kernel(ctypes.c_void_p(made.handle), device):
            raise LaunchFailed(problem=_error(library), kernel=kernel.name)
    return made


def launch_functions(launcher: ctypes.CDLL | None = None) -> tuple[int, ...]:
    """The addresses of what launches a kernel at a site, tells why that failed, makes a site and ends it."""
    names = ("kgen_launch", "kgen_launch_error", "kgen_create_site", "kgen_destroy_site")
    library = launcher or cpp.launcher_library()
    return tuple(cpp.function_address(library, name) for name in names)


_once = threading.RLock()


def _create(kernel: CompiledKernel, driver: str, launcher: ctypes.CDLL | None) -> GpuKernel:
    with _once:
        return _create_once(kernel, driver, launcher)


@functools.cache
def _create_once(kernel: CompiledKernel, driver: str, launcher: ctypes.CDLL | None) -> GpuKernel:
    kinds = bytes(
        _kind(what) | (_DIVISIBLE if multiple else 0) for what, multiple in zip(kernel.signature, kernel.divisible, strict=True)
    )
    descriptors = [what for what in kernel.signature if map_rank(what)]
    formats = [number for found, what in zip(kernel.maps, descriptors, strict=True) for number in _format(found, what)]
    handle = _library(driver, launcher).kgen_create_kernel(
        kernel.name.encode(), kernel.function.encode(), kernel.cubin, ctypes.c_int64(len(kernel.cubin)), kinds, len(kinds),
        (ctypes.c_int32 * len(formats))(*formats), kernel.warps * 32, kernel.shared, len(kernel.scratch),
        kernel.early,
    )  # fmt: skip
    ranks = [rank for what in kernel.signature if (rank := map_rank(what))]
    pointers = sum(map(is_pointer, kernel.signature))
    numbers = len(kinds) - pointers - len(ranks)
    integers = numbers + sum(1 + 2 * rank for rank in ranks)
    return GpuKernel(handle, kernel.scratch, pointers + len(ranks), integers, len(ranks), launch_functions(launcher))


def _kind(what: str) -> int:
    if is_pointer(what):
        return _POINTER
    return _MAP if map_rank(what) else _KINDS[what]


def _format(found: MapFormat, what: str) -> list[int]:
    """The struct Format of launch.cpp, of a parameter of type `what`."""
    unused = [0] * (MAX_RANK - len(found.box))
    box, steps = [*found.box, *unused], [*map_steps(what), *unused]
    element = _TF32 if is_rounded(what) else found.element
    return [len(found.box), element, found.element_bytes, found.swizzle, *box, *steps]


@functools.cache
def _library(driver: str, launcher: ctypes.CDLL | None = None) -> ctypes.CDLL:
    library = launcher or cpp.launcher_library()
    library.kgen_launch_error.restype = ctypes.c_char_p
    library.kgen_create_kernel.restype = ctypes.c_void_p
    if library.kgen_open_driver(driver.encode()):
        raise DriverNotFound(cause=_error(library))
    return library


def _error(library: ctypes.CDLL) -> str:
    return str(library.kgen_launch_error().decode())
