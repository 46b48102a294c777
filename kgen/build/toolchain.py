"""The C++ compiler and the machine it compiles for: found and detected, never assumed."""

from __future__ import annotations

import functools
import os
import platform
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kgen import config
from kgen.device import Device
from kgen.errors import CompilerNotFound, CompilerTooOld

__all__ = [
    "Compiler", "Isa", "available", "compiler", "cpu_device", "cpu_features", "cpu_name", "cpu_vendor", "features_of", "isa",
    "kernel_flags",
    "kernel_link_flags", "openmp_link_flags", "register_bytes", "torch_library_dir",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler that can be run. `identity` (family and full version) enters cache keys; `command` may hold arguments."""

    command: tuple[str, ...]
    family: str  # gcc | clang
    version: tuple[int, ...]
    identity: str


# gcc 11 is the first with the C++20 the headers use; clang 14 is its contemporary.
_MINIMUM = {"gcc": (11,), "clang": (14,)}
_CANDIDATES = ("g++", "c++", "clang++")


def compiler() -> Compiler:
    """The compiler that KGEN_CXX (or the option `compiler`) names, else the first of g++, c++, clang++.

    Raises CompilerNotFound or CompilerTooOld."""
    return _find(config.current().compiler)


@functools.cache
def _find(wanted: str | None) -> Compiler:
    looked_for = (wanted,) if wanted else _CANDIDATES
    for name in looked_for:
        command = shlex.split(name)
        program = shutil.which(command[0]) if command else None
        found = _identify((program, *command[1:])) if program else None
        if found is not None:
            return _new_enough(found)
    raise CompilerNotFound(looked_for=", ".join(looked_for))


def _identify(command: tuple[str, ...]) -> Compiler | None:
    query = [*command, "-dM", "-E", "-x", "c++", os.devnull]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    macros = dict(re.findall(r"^#define (\w+) (.*)$", done.stdout, re.MULTILINE))
    family = next((family for family, names in _VERSION_MACROS.items() if names[0] in macros), None)
    if family is None:
        return None
    version = tuple(int(macros[name]) for name in _VERSION_MACROS[family])
    banner = macros.get("__VERSION__", "").strip('"')
    return Compiler(command, family, version, f"{family} {'.'.join(map(str, version))} {banner}")


_VERSION_MACROS = {  # clang also claims to be gcc 4.2, so it comes first
    "clang": ("__clang_major__", "__clang_minor__", "__clang_patchlevel__"),
    "gcc": ("__GNUC__", "__GNUC_MINOR__", "__GNUC_PATCHLEVEL__"),
}


def _new_enough(found: Compiler) -> Compiler:
    minimum = _MINIMUM[found.family]
    if found.version < minimum:
        raise CompilerTooOld(
            compiler=" ".join(found.command),
            version=".".join(map(str, found.version)),
            minimum=f"{found.family} {'.'.join(map(str, minimum))}",
        )
    return found


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set to compile for: a name for people and keys, and the compiler flags that select it."""

    name: str  # avx512 | avx2 | generic
    flags: tuple[str, ...]


# Named features, not -march=native: two machines with the same features then share cache entries, and -march of
# a CPU the compiler does not know is no problem.
_AVX2 = ("avx2", "fma", "f16c", "bmi", "bmi2", "popcnt", "lzcnt")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_ISAS = {
    "avx512": Isa("avx512", (*(f"-m{feature}" for feature in _AVX512), "-mprefer-vector-width=512")),
    "avx2": Isa("avx2", tuple(f"-m{feature}" for feature in _AVX2)),
    "generic": Isa("generic", ()),
}
# Dot products of narrow types, which not every AVX-512 machine has: compiled for where they are, and nothing else depends on
# them.
_DOT = ("avx512vnni", "avx512bf16", "amx-tile", "amx-bf16")
_KERNEL_NAMES = {  # where /proc/cpuinfo says it differently
    "bmi": "bmi1",
    "lzcnt": "abm",
    "avx512vnni": "avx512_vnni",
    "avx512bf16": "avx512_bf16",
    "amx-tile": "amx_tile",
    "amx-bf16": "amx_bf16",
}


def isa() -> Isa:
    """The best instruction set that this machine has; KGEN_ISA (or the option `isa`) names another: avx512, avx2 or generic."""
    found = _ISAS[config.current().isa or _detect()]
    return replace(found, flags=found.flags + _dot_flags()) if found.name == "avx512" else found


def _dot_flags() -> tuple[str, ...]:
    features = cpu_features()
    return tuple(f"-m{feature}" for feature in _DOT if _KERNEL_NAMES[feature] in features)


def features_of(isa: Isa) -> frozenset[str]:
    """The features of a CPU that code for `isa` needs, as /proc/cpuinfo names them."""
    flags = (flag.removeprefix("-m") for flag in isa.flags if "=" not in flag)
    return frozenset(_KERNEL_NAMES.get(feature, feature) for feature in flags)


def available() -> tuple[str, ...]:
    """The instruction sets that this machine has, the best one first."""
    names = tuple(_ISAS)
    return names[names.index(_detect()) :]


@functools.cache
def _detect() -> str:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return "generic"
    features = cpu_features()
    if features:
        has = {name: all(_KERNEL_NAMES.get(f, f) in features for f in wanted) for name, wanted in _WANTED.items()}
        return next((name for name, present in has.items() if present), "generic")
    return {"AVX512": "avx512", "AVX2": "avx2"}.get(torch.backends.cpu.get_cpu_capability(), "generic")


_WANTED = {"avx512": _AVX512, "avx2": _AVX2}


def cpu_name() -> str:
    """The CPU's name as its maker gives it."""
    return _cpu_fact("model name") or platform.machine()


def cpu_vendor() -> str:
    """The CPU's maker as it names itself ("GenuineIntel"); empty where it does not."""
    return _cpu_fact("vendor_id")


def cpu_features() -> frozenset[str]:
    """What this CPU has, as /proc/cpuinfo names it."""
    return frozenset(_cpu_fact("flags").split())


@functools.cache
def _cpu_fact(name: str) -> str:
    """What /proc/cpuinfo says of the first CPU; empty where it says nothing."""
    found = re.search(rf"^{name}\s*:\s*(.*)$", _cpu_text(), re.MULTILINE)
    return found[1].strip() if found else ""


def _cpu_text() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# IEEE semantics stay: no contraction, signed zeros and NaN kept. errno and floating-point traps are nothing that
# PyTorch promises, and keeping them would stop vectorisation.
_FLOAT_FLAGS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
# Kernels throw nothing. That they say so also spares them libstdc++, whose symbols the linker takes longest over.
_KERNEL_FLAGS = ("-O3", "-std=c++20", "-fopenmp", *_FLOAT_FLAGS, "-fno-exceptions", "-fPIC", "-Wno-psabi")

# gcc looks up to 1000 stores back from each load, again in each of its passes: half the time that large straight kernels take
# (a bicubic resize: 4.8 s, with this 2.4 s). Of small kernels the code stays the same within a few instructions in 10,000.
#
# Where the threads' shares of two kernels become the same code, gcc makes one call the other. It then fails to compile, because
# what OpenMP makes of `parallel_for` says, as that does, that it is always inlined: gcc may not merge functions.
_GCC_FLAGS = ("--param=sccvn-max-alias-queries-per-access=100", "-fno-ipa-icf-functions")


# Lines for debuggers, and frames that perf can walk through.
_DEBUG_FLAGS = ("-g", "-fno-omit-frame-pointer")


def kernel_flags() -> tuple[str, ...]:
    """Compile flags of kernels and of the header precompiled for them (the two must agree)."""
    own = _GCC_FLAGS if compiler().family == "gcc" else ()
    debug = _DEBUG_FLAGS if config.current().debug_info else ()
    return (*_KERNEL_FLAGS, *own, *isa().flags, *debug)


def torch_library_dir() -> Path:
    return Path(torch.__file__).parent / "lib"


def kernel_link_flags() -> tuple[str, ...]:
    """Links of kernels what they use and no more: with a driver's default libraries, linking takes as long as optimising."""
    if compiler().family != "gcc":
        return openmp_link_flags()
    own = _torch_openmp()
    openmp = ("-lgomp",) if own is None else _from(own)
    return ("-nodefaultlibs", "-Wl,--as-needed", *openmp, "-lm", "-lc", "-lgcc")


def openmp_link_flags() -> tuple[str, ...]:
    """Links torch's own copy of libgomp where the wheel brings one: a second pool of threads would fight the first.

    It is named before -fopenmp's own -lgomp, which --as-needed then leaves out."""
    own = _torch_openmp()
    return ("-fopenmp",) if own is None else ("-Wl,--as-needed", *_from(own), "-fopenmp")


@functools.cache
def _torch_openmp() -> Path | None:
    folders = (torch_library_dir(), Path(torch.__file__).parents[1] / "torch.libs")
    return next((found for folder in folders for found in sorted(folder.glob("libgomp*.so*"))), None)


def _from(library: Path) -> tuple[str, ...]:
    return str(library), f"-Wl,-rpath,{library.parent}"


# ---- the CPU as templates see it -----------------------------------------------------------------------------------------

# What the cost model begins with: operations a second of a core's float32 units, how many times faster bfloat16 is multiplied
# by instructions of its own, and bytes a second that a core reads, of which so many use up the memory's bandwidth.
FLOPS = {"avx512": 140e9, "avx2": 70e9, "generic": 10e9}
NARROW = {"-mamx-bf16": 7.0, "-mavx512bf16": 2.0}
BANDWIDTH, MOST_READERS = 10e9, 8
# MKL takes other ways on CPUs of other vendors: its share, measured on an AMD EPYC with AVX-512.
MKL_VENDOR, FOREIGN_MKL = "GenuineIntel", 0.42
REGISTER_BYTES = {"avx512": 64, "avx2": 32, "generic": 16}


def register_bytes() -> int:
    """The length of a vector register of the CPU."""
    return REGISTER_BYTES[isa().name]


def cpu_device() -> Device:
    """This machine's CPU as templates see it."""
    found = isa()
    name, threads = found.name, torch.get_num_threads()
    narrow = next((times for flag, times in NARROW.items() if flag in found.flags), 1.0)
    flops, bandwidth = FLOPS[name] * threads * narrow, BANDWIDTH * min(threads, MOST_READERS)
    foreign = torch.backends.mkl.is_available() and cpu_vendor() not in ("", MKL_VENDOR)
    lanes, library = REGISTER_BYTES[name] // 4, FOREIGN_MKL if foreign else 1.0
    return Device("cpu", 0, threads, 0, 0, name, lanes, flops, narrow, bandwidth, library)
