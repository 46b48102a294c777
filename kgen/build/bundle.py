"""The machine code of a program in a folder of its own, which another process loads without a compiler or a cache."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from kgen.build import cpp, toolchain

__all__ = ["Bundle", "Machine", "load_bundle", "missing_features", "write_bundle"]

_RUNTIME, _MATH, _LAUNCHER = "runtime.so", "math.so", "launch.so"


@dataclass(frozen=True, slots=True)
class Machine:
    """What machine code is made for: it runs where all of this is the same and the CPU has the features. `devices` are the
    indices of the GPUs that it runs on, of compute capability `arch` (90 is 9.0)."""

    torch: str
    python: str
    cpu: str
    features: tuple[str, ...]
    devices: tuple[int, ...] = ()
    arch: int = 0


@dataclass(frozen=True, slots=True)
class Bundle:
    """The native runtime, the libraries with a program's kernels, and what launches kernels on a GPU, if there are any."""

    runtime: ModuleType
    kernels: tuple[ctypes.CDLL, ...]
    launcher: ctypes.CDLL | None


def this_machine() -> Machine:
    """What code that is compiled now, for the instruction set of the current options, runs on."""
    features = tuple(sorted(toolchain.features_of(toolchain.isa())))
    return Machine(torch.__version__, str(sysconfig.get_config_var("SOABI")), platform.machine(), features)


def missing_features(machine: Machine) -> tuple[str, ...]:
    """The features that this CPU lacks."""
    return tuple(sorted(set(machine.features) - toolchain.cpu_features()))


def write_bundle(units: Sequence[cpp.Unit], folder: Path, launches: bool = False) -> Machine:
    """Copies what runs `units` into the folder, compiled unless the cache has it, and what `launches` GPU kernels, if it is to.

    Raises KernelBuildFailed or RuntimeBuildFailed."""
    for number, path in enumerate(cpp.build_units(units)):
        shutil.copyfile(path, folder / f"kernels{number}.so")
    shutil.copyfile(str(cpp.runtime_library().__file__), folder / _RUNTIME)
    math = cpp.math_library()
    if math is not None:
        shutil.copyfile(math._name, folder / _MATH)
    (folder / _LAUNCHER).unlink(missing_ok=True)
    if launches:
        shutil.copyfile(cpp.launcher_library()._name, folder / _LAUNCHER)
    return this_machine()


def load_bundle(folder: Path, count: int) -> Bundle:
    """Loads the libraries of `count` units. Raises OSError or ImportError for files that are absent or damaged."""
    if (folder / _MATH).exists():
        ctypes.CDLL(str(folder / _MATH), mode=ctypes.RTLD_GLOBAL)  # kernels find its symbols
    runtime = cpp.import_runtime(folder / _RUNTIME)
    names = [str(folder / f"kernels{number}.so") for number in range(count)]
    launcher = ctypes.CDLL(str(folder / _LAUNCHER)) if (folder / _LAUNCHER).exists() else None
    return Bundle(runtime, tuple(ctypes.CDLL(name, mode=os.RTLD_LOCAL | os.RTLD_NOW) for name in names), launcher)
