"""What `python -m kgen doctor` checks: each check says what it found and, where that is bad, what to do."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from kgen import cache, config
from kgen.backend import kgen_backend
from kgen.build import cpp, toolchain
from kgen.errors import KgenError
from kgen.pipeline import machine_name
from kgen.tuning.store import stores

__all__ = ["BAD", "NOTE", "OK", "Check", "checks"]

OK, NOTE, BAD = "ok", "note", "BAD"
OLDEST_TORCH = (2, 11)
NEWEST_TESTED = (2, 13)
OLDEST_PYTHON = (3, 11)
OLDEST_GPU = (8, 0)


@dataclass(frozen=True, slots=True)
class Check:
    """`status` is ok, note (works, with a remark) or BAD; `advice` is what to do, where there is something to do."""

    name: str
    status: str
    found: str
    advice: str = ""


def checks() -> Iterator[Check]:
    """All checks, from what the others need to what needs the others. One that fails is bad, never an exception."""
    for name, check in _CHECKS.items():
        try:
            yield check(name)
        except Exception as error:  # noqa: BLE001  whatever is wrong with the machine, the other checks still help
            yield _failed(name, getattr(error, "inner_exception", error))  # Dynamo wraps what a back end raises


def _failed(name: str, error: Exception) -> Check:
    if isinstance(error, KgenError):
        text, _, hint = str(error).partition("\n  try: ")
        return Check(name, BAD, text, hint)
    return Check(name, BAD, f"{type(error).__name__}: {error}", "this check itself failed: please report it")


def _python(name: str) -> Check:
    good = sys.version_info[:2] >= OLDEST_PYTHON
    advice = "" if good else "install Python {}.{} or newer".format(*OLDEST_PYTHON)
    return Check(name, OK if good else BAD, platform.python_version(), advice)


def _torch(name: str) -> Check:
    major, minor = (int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
    if (major, minor) < OLDEST_TORCH:
        return Check(name, BAD, torch.__version__, "install torch {}.{} or newer".format(*OLDEST_TORCH))
    if (major, minor) > NEWEST_TESTED:
        tested = "kgen uses private parts of torch and was tested up to {}.{}".format(*NEWEST_TESTED)
        return Check(name, NOTE, torch.__version__, f"{tested}: run its tests before you rely on it")
    return Check(name, OK, torch.__version__)


def _triton(name: str) -> Check:
    try:
        return Check(name, OK, importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        needed = torch.cuda.is_available()
        return Check(
            name, BAD if needed else NOTE, "not installed", "run `python -m pip install 'torch-kgen[gpu]'` for kernels on a GPU"
        )


def _gpu(name: str) -> Check:
    if not torch.cuda.is_available():
        why = "this build of torch has no CUDA" if torch.version.cuda is None else "none that torch can use"
        return Check(name, NOTE, why, "kernels are made for the CPU; that is fine on a machine without an NVIDIA GPU")
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    text = "; ".join(f"{one.name}, sm_{one.major}{one.minor}, {one.total_memory / 2**30:.0f} GiB" for one in found)
    if any((one.major, one.minor) < OLDEST_GPU for one in found):
        return Check(name, NOTE, text, "kgen makes kernels for sm_80 and newer: keep tensors off the older ones")
    return Check(name, OK, text)


def _driver(name: str) -> Check:
    """The newest CUDA that the driver runs, as it says itself: torch may be built for a newer one."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Check(name, BAD if torch.cuda.is_available() else NOTE, "no CUDA driver is installed")
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)):
        return Check(
            name, NOTE, "the CUDA driver does not say its version", "check that `nvidia-smi` works in this environment"
        )
    driver = (number.value // 1000, number.value % 1000 // 10)
    built = tuple(int(n) for n in re.findall(r"\d+", torch.version.cuda or "0.0")[:2])
    text = "runs CUDA up to {}.{}".format(*driver) + (
        f"; torch is built for {torch.version.cuda}" if torch.version.cuda else ""
    )
    if built[0] > driver[0]:
        return Check(name, BAD, text, "install a newer driver, or a torch that is built for this one's CUDA")
    return Check(name, OK, text)


def _entry_point(name: str) -> Check:
    found = importlib.metadata.entry_points(group="torch_dynamo_backends", name="kgen")
    if found:
        return Check(name, OK, 'torch.compile(f, backend="kgen") finds kgen')
    return Check(
        name,
        NOTE,
        "kgen is importable but not installed",
        'run `python -m pip install --no-deps -e .` in the clone, or use kgen.compile instead of backend="kgen"',
    )


def _compiler(name: str) -> Check:
    found = toolchain.compiler()
    return Check(name, OK, f"{found.family} {'.'.join(map(str, found.version))} ({' '.join(found.command)})")


def _isa(name: str) -> Check:
    found = toolchain.isa()
    if found.name == "generic":
        advice = "kernels use 16-byte vectors; on an x86 machine with AVX2, check KGEN_ISA and that /proc/cpuinfo can be read"
        return Check(name, NOTE, "generic", advice)
    forced = " (set by KGEN_ISA)" if os.environ.get("KGEN_ISA") else ""
    return Check(name, OK, found.name + forced)


def _cache(name: str) -> Check:
    folder = cache.cache_dir()
    if not cache.has_space():
        found = f"{folder}: its disk is full, {cache.free_bytes(folder) / 1e6:.0f} MB are left"
        return Check(name, BAD, found, "make room (`kgen cache clear`), or set KGEN_CACHE_DIR to a folder on another disk")
    return Check(name, OK, str(folder))


def _header(name: str) -> Check:
    header = cpp.kernel_include_dir() / "kgen" / "kernel.h"
    made = cpp.precompiled_header(header, (*toolchain.kernel_flags(), f"-I{cpp.kernel_include_dir()}"))
    if made is None:
        return Check(
            name,
            NOTE,
            "cannot be precompiled",
            "kernels still build, but each takes longer; check that the compiler and the disk are in order",
        )
    return Check(name, OK, "builds")


def _runtime(name: str) -> Check:
    cpp.runtime_library()
    cpp.math_library()
    return Check(name, OK, "runtime and vector math build and load")


def _openmp(name: str) -> Check:
    """Two OpenMP libraries in one process are two pools of threads that fight for the cores."""
    cpp.math_library()
    found = loaded_openmp(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"))
    if not found:
        return Check(
            name,
            NOTE,
            "torch has loaded no OpenMP library",
            "kernels run in their own threads; that is fine unless torch uses others",
        )
    if len(found) == 1:
        return Check(name, OK, f"torch and kernels share {found[0]}")
    advice = "kernels and torch use different thread pools, which costs time; a torch wheel with its own libgomp avoids it"
    return Check(name, NOTE, ", ".join(found), advice)


def loaded_openmp(maps: str) -> list[str]:
    """The OpenMP runtimes among a process's mapped files (text of /proc/self/maps)."""
    files = {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
    return sorted(f for f in files if re.search(r"/lib(gomp|omp|iomp5)[^/]*\.so", f))


def _measurements(name: str) -> Check:
    """How many are of this machine's devices: those of another card are never used, and nothing else would say so."""
    file, *shipped = stores(config.current()).files
    problem = file.problem()
    if problem:
        return Check(
            name, NOTE, f"{file.path} is not used: {problem}", "move the file away, or set KGEN_TUNING_FILE to another one"
        )
    here = {machine_name(kind) for kind in ("cpu", "cuda")}
    known = [entry.key.device for one in (file, *shipped) for entry in one.entries()]
    text = f"{file.path}: {len(file.entries())}, and {len(known) - len(file.entries())} shipped"
    own = sum(device in here for device in known)
    if own or not file.entries():
        return Check(name, OK, f"{text}; of this machine: {own}")
    others = ", ".join(sorted({entry.key.device for entry in file.entries()}))
    return Check(name, NOTE, f"{text}; of this machine: none", f"the file is of {others}; measure here: kgen tune script.py")


def _end_to_end(name: str) -> Check:
    def shifted(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2 + 1, -1)

    x = torch.randn(16, 33)
    compiled = torch.compile(shifted, backend=lambda gm, inputs: kgen_backend(gm, inputs, options={"cache": False}))
    if torch.allclose(compiled(x), shifted(x), atol=1e-6):
        return Check(name, OK, "a small graph compiles, runs and is right")
    return Check(name, BAD, "a small graph gives wrong numbers", "please report this, with all lines above")


_CHECKS: dict[str, Callable[[str], Check]] = {
    "Python": _python,
    "torch": _torch,
    "triton": _triton,
    "GPU": _gpu,
    "CUDA driver": _driver,
    "entry point": _entry_point,
    "C++ compiler": _compiler,
    "instruction set": _isa,
    "cache folder": _cache,
    "kernel header": _header,
    "native libraries": _runtime,
    "OpenMP": _openmp,
    "measurements": _measurements,
    "a compilation": _end_to_end,
}
