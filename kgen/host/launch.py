"""Compiled GPU kernels as handles that the native runtime launches (kgen/host/launch.cpp)."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from kgen.build import cpp
from kgen.build.gpu_kernel import CompiledKernel
from kgen.errors import DriverNotFound, LaunchFailed

__all__ = ["GpuKernel", "launch_functions", "load_kernel"]

#: The library of the CUDA driver; tests put a stub in its place.
DRIVER = "libcuda.so.1"

# The order of the enum Kind in launch.cpp.
_KINDS = {"i32": 1, "i64": 2}
_DIVISIBLE = 128


@dataclass(frozen=True, slots=True)
class GpuKernel:
    """A kernel in the launcher. `scratch` has the bytes per block of each scratch parameter; `pointers` and `integers` count
    the kernel's own parameters."""

    handle: int
    scratch: tuple[int, ...]
    pointers: int
    integers: int


def load_kernel(kernel: CompiledKernel, devices: Iterable[int]) -> GpuKernel:
    """The kernel, loaded into `devices` now: the first call may be inside a capture, and should not be slower than others.

    Kernels stay loaded until the process ends, so equal ones are shared. Raises DriverNotFound or LaunchFailed."""
    made = _create(kernel, DRIVER)
    library = _library(DRIVER)
    for device in devices:
        if library.kgen_load_kernel(ctypes.c_void_p(made.handle), device):
            raise LaunchFailed(problem=_error(library))
    return made


def launch_functions() -> tuple[int, int]:
    """The addresses of what launches a kernel, and of what tells why that failed."""
    library = cpp.launcher_library()
    return cpp.function_address(library, "kgen_launch"), cpp.function_address(library, "kgen_launch_error")


_once = threading.RLock()


def _create(kernel: CompiledKernel, driver: str) -> GpuKernel:
    with _once:
        return _create_once(kernel, driver)


@functools.cache
def _create_once(kernel: CompiledKernel, driver: str) -> GpuKernel:
    kinds = bytes(
        (0 if what.startswith("*") else _KINDS[what]) | (_DIVISIBLE if multiple else 0)
        for what, multiple in zip(kernel.signature, kernel.divisible, strict=True)
    )
    handle = _library(driver).kgen_create_kernel(
        kernel.name.encode(), kernel.function.encode(), kernel.cubin, ctypes.c_int64(len(kernel.cubin)), kinds, len(kinds),
        kernel.warps * 32, kernel.shared, len(kernel.scratch),
    )  # fmt: skip
    pointers = sum(what.startswith("*") for what in kernel.signature)
    return GpuKernel(handle, kernel.scratch, pointers, len(kinds) - pointers)


@functools.cache
def _library(driver: str) -> ctypes.CDLL:
    library = cpp.launcher_library()
    library.kgen_launch_error.restype = ctypes.c_char_p
    library.kgen_create_kernel.restype = ctypes.c_void_p
    if library.kgen_open_driver(driver.encode()):
        raise DriverNotFound(cause=_error(library))
    return library


def _error(library: ctypes.CDLL) -> str:
    return str(library.kgen_launch_error().decode())
