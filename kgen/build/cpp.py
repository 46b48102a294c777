"""C++ sources to loaded shared libraries, each compiled once per content and found in the cache from then on.

Five things are built: a graph's kernels (in units, with a precompiled header), the loops of matmuls that units link,
the native runtime that interprets host programs, the launcher of GPU kernels, and the library of vector math. All but the first
are compiled once per machine, torch and compiler.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch

from kgen import cache, config
from kgen.build import toolchain
from kgen.counters import counters
from kgen.errors import KernelBuildFailed, RuntimeBuildFailed

__all__ = [
    "Unit", "broken_units", "build_unit", "build_units", "function_address", "import_runtime", "kernel_include_dir",
    "launcher_library", "load_library", "math_library", "precompiled_header", "prepare", "runtime_library", "wait",
]  # fmt: skip

_KERNEL_HEADER = "kgen/kernel.h"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unit:
    """One translation unit. `name` is for files and messages; `key` replaces the text in the cache key when given.
    `objects` are the texts of what is compiled once a machine and linked to every unit that needs it."""

    name: str
    source: str
    key: str | None = None
    objects: tuple[str, ...] = ()


@dataclass(eq=False, slots=True)  # not frozen: a context manager that it passes through writes its traceback
class _Failure(Exception):
    how: str
    output: str
    command: str
    late: bool = False


# ---- kernels --------------------------------------------------------------------------------------------------------


def kernel_include_dir() -> Path:
    """The folder of the headers that kernels include."""
    return _templates() / "cpp" / "include"


def build_unit(
    name: str, source: str, *, include_dirs: Sequence[Path] | None = None, key: str | None = None, objects: Sequence[str] = ()
) -> Path:
    """The shared library of `source`, compiled unless the cache has it. Raises KernelBuildFailed, the source kept."""
    return build_units([Unit(name, source, key, tuple(objects))], include_dirs=include_dirs)[0]


def build_units(units: Sequence[Unit], *, include_dirs: Sequence[Path] | None = None) -> list[Path]:
    """The shared libraries of all `units`, in order; those not in the cache are compiled at once, one per core."""
    folders = (kernel_include_dir(),) if include_dirs is None else tuple(include_dirs)
    keys = [_unit_key(unit, folders) for unit in units]
    paths = {key: cache.find("cpp", key, ".so") for key in keys}
    missing = {key: unit for key, unit in zip(keys, units, strict=True) if paths[key] is None}
    if missing:
        header = _kernel_header(folders)
        needs = {key: unit.objects for key, unit in missing.items()}
        # Loops that several units link begin first; the units that wait for them are last.
        loops = dict.fromkeys(text for texts in needs.values() for text in texts)
        ordered = sorted(missing, key=lambda key: len(needs[key]))
        jobs: list[Callable[[], Path | None]] = [functools.partial(_loops, text, folders, header) for text in loops]
        jobs += [functools.partial(_build_unit, key, missing[key], needs[key], folders, header) for key in ordered]
        paths |= dict(zip(ordered, _in_parallel(jobs)[len(loops) :], strict=True))
    return [path for path in (paths[key] for key in keys) if path is not None]


def broken_units(units: Sequence[Unit]) -> dict[str, KernelBuildFailed]:
    """By name, those of `units` that do not compile; every unit is tried."""
    found = _in_parallel([functools.partial(_problem_of, unit) for unit in units])
    return {unit.name: failure for unit, failure in zip(units, found, strict=True) if failure is not None}


def _problem_of(unit: Unit) -> KernelBuildFailed | None:
    try:
        build_units([unit])
    except KernelBuildFailed as failure:
        return failure
    return None


def _in_parallel(jobs: Sequence[Callable[[], T]]) -> list[T]:
    workers = min(len(jobs), len(os.sched_getaffinity(0)))
    if workers == 1:
        return [job() for job in jobs]
    with ThreadPoolExecutor(workers, thread_name_prefix="kgen-build") as pool:
        # Each job in a copy of the caller's context: it holds the caller's configuration.
        pending = [pool.submit(contextvars.copy_context().run, job) for job in jobs]
        return [job.result() for job in pending]


def _unit_key(unit: Unit, folders: tuple[Path, ...]) -> str:
    text = unit.source if unit.key is None else unit.key
    return cache.stable_hash(
        ("unit", unit.key is None, text, unit.objects, *_kernel_setting(folders), toolchain.kernel_link_flags())
    )


def _kernel_setting(folders: tuple[Path, ...]) -> tuple[object, ...]:
    return toolchain.compiler().identity, toolchain.kernel_flags(), tuple(_contents(folder) for folder in folders)


def _build_unit(key: str, unit: Unit, needs: Sequence[str], folders: tuple[Path, ...], header: Path | None) -> Path:
    def make(folder: Path) -> Path:
        loops = [_loops(text, folders, header) for text in needs]
        source = folder / f"{_file_name(unit.name)}.cpp"
        source.write_text(_with_lines(unit, key), encoding="utf-8")
        try:
            return _compile_unit(source, folders, header, loops)
        except _Failure as failure:
            raise _kept(unit, key, failure) from None

    return _once("cpp", key, ".so", make)


def _with_lines(unit: Unit, key: str) -> str:
    """The source. Where kernels have lines for debuggers, these are lines of a file that stays when the scratch folder goes."""
    if not config.current().debug_info:
        return unit.source
    place = cache.path("source", f"{_file_name(unit.name)}-{key[:12]}", ".cpp")
    place.write_text(unit.source, encoding="utf-8")
    own = unit.source.replace(f'"{unit.name}.cpp"', f'"{place}"')  # behind lines of users' templates
    return f'#line 1 "{place}"\n{own}'


def _compile_unit(source: Path, folders: tuple[Path, ...], header: Path | None, loops: Sequence[Path | None]) -> Path:
    found = [path for path in loops if path is not None]
    if len(found) < len(loops):
        return _compile_with(source, folders, None, None)
    try:
        return _compile_with(source, folders, header, found)
    except _Failure as failure:
        if failure.late or (header is None and not found):
            raise
    # Damaged files in the cache also fail the compiler, so only a failure without them is the source's.
    made = _compile_with(source, folders, None, None)
    for path in found:
        cache.drop(path)
    if header is not None:
        cache.drop(header.parent)
        _headers.clear()
    return made


def _compile_with(source: Path, folders: tuple[Path, ...], header: Path | None, loops: Sequence[Path] | None) -> Path:
    """`loops` are the objects to link; None: the unit has them itself."""
    made = source.with_suffix(".so")
    own = ["-DKGEN_OWN_LOOPS"] if loops is None else map(str, loops)
    _run(_shared(source, made, [*own, *_flags(folders, header), *toolchain.kernel_link_flags()]), "cpp.compiles")
    return made


def _flags(folders: tuple[Path, ...], header: Path | None) -> list[str]:
    return [*toolchain.kernel_flags(), *(f"-I{folder}" for folder in folders), *([] if header is None else _use_header(header))]


def _shared(source: Path, made: Path, flags: Sequence[str]) -> list[str]:
    return [*toolchain.compiler().command, "-shared", str(source), "-o", str(made), *flags]


def _kept(unit: Unit, key: str, failure: _Failure) -> KernelBuildFailed:
    name = _file_name(unit.name)
    place = cache.path("failed", f"{name}-{key[:12]}", ".cpp")
    place.write_text(unit.source, encoding="utf-8")
    # The scratch folder is gone: the command must name the source that is kept.
    command = [str(place) if part.endswith(f"/{name}.cpp") else part for part in failure.command.split(" ")]
    return KernelBuildFailed(
        kernel=unit.name, how=failure.how, source=place, output=_head(failure.output), command=" ".join(command)
    )


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_-" else "_" for c in name)[:80] or "unit"


def _head(text: str, lines: int = 40) -> str:
    kept = text.splitlines()
    return "\n".join(kept[:lines] + ([f"... {len(kept) - lines} more lines"] if len(kept) > lines else []))


# ---- the objects that units link ------------------------------------------------------------------------------------


def _loops(text: str, folders: tuple[Path, ...], header: Path | None) -> Path | None:
    """The object of `text`; None where it cannot be compiled: a unit that has the loops itself will say why."""
    key = cache.stable_hash(("loops", text, *_kernel_setting(folders)))
    make = functools.partial(_compile_loops, text, folders, header)
    try:
        return cache.find("loops", key, ".o") or _once("loops", key, ".o", make)
    except _Failure:
        return None


def _compile_loops(text: str, folders: tuple[Path, ...], header: Path | None, place: Path) -> Path:
    source = place / "loops.cpp"
    source.write_text(f"#include <{_KERNEL_HEADER}>\n{text}\n", encoding="utf-8")
    made = source.with_suffix(".o")
    command = [*toolchain.compiler().command, "-c", str(source), "-o", str(made)]
    try:
        _run([*command, *_flags(folders, header)], "cpp.loops")
    except _Failure:
        if header is None:
            raise
        _run([*command, *_flags(folders, None)], "cpp.loops")  # the unit, too, meets the damaged header, and drops it
    return made


# ---- the precompiled header -----------------------------------------------------------------------------------------

_headers: dict[str, Path] = {}


def _kernel_header(folders: tuple[Path, ...]) -> Path | None:
    found = next((folder / _KERNEL_HEADER for folder in folders if (folder / _KERNEL_HEADER).exists()), None)
    return None if found is None else precompiled_header(found, _flags(folders, None))


def precompiled_header(header: Path, flags: Sequence[str]) -> Path | None:
    """A file to compile with `-include` in place of `header`, precompiled for `flags`; None where that fails."""
    compiler = toolchain.compiler()
    folders = tuple(Path(flag[2:]) for flag in flags if flag.startswith("-I"))
    plain = tuple(flag for flag in flags if not flag.startswith("-I"))
    contents = tuple(_contents(folder) for folder in (*folders, header.parent))
    key = cache.stable_hash(("header", header.name, contents, compiler.identity, plain))
    place = cache.path("header", key)
    made = place / header.name
    if _headers.get(key) == made and made.exists():
        return made
    if not _header_complete(place, header.name):
        with cache.lock("header", key):
            if not _header_complete(place, header.name):
                _find_or_make_header(header, flags, key)
        if not _header_complete(place, header.name):
            return None
    _headers[key] = made
    return made


def _find_or_make_header(header: Path, flags: Sequence[str], key: str) -> None:
    place = cache.path("header", key)
    cache.drop(place)
    shared = header.is_relative_to(_templates())  # the same for every program
    if not (shared and cache.adopt("header", key) and _header_complete(place, header.name)):
        cache.drop(place)
        _make_header(header, flags, place)
        if shared:
            cache.share("header", key)


def _make_header(header: Path, flags: Sequence[str], place: Path) -> None:
    with cache.scratch("header") as scratch:
        folder = scratch / "made"
        folder.mkdir()
        stub = folder / header.name
        stub.write_text(f'#include "{header}"\n', encoding="utf-8")
        compiled = folder / f"{header.name}{_header_suffix()}"
        try:
            command = [*toolchain.compiler().command, *flags, "-x", "c++-header", str(stub), "-o", str(compiled)]
            _run(command, "cpp.headers")
        except _Failure:
            return  # the kernel's own compilation reports what is wrong with the header
        (folder / "size").write_text(str(compiled.stat().st_size), encoding="ascii")
        with contextlib.suppress(OSError):  # another machine on the same cache was faster
            folder.rename(place)


def _header_complete(place: Path, name: str) -> bool:
    """Sizes only: hashing tens of megabytes costs more than the header saves, and a bad one only costs a second compile."""
    try:
        compiled = place / f"{name}{_header_suffix()}"
        return compiled.stat().st_size == int((place / "size").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return False


def _header_suffix() -> str:
    return ".gch" if toolchain.compiler().family == "gcc" else ".pch"


def _use_header(header: Path) -> list[str]:
    if toolchain.compiler().family == "gcc":
        return ["-include", str(header), "-Winvalid-pch"]
    return ["-include-pch", f"{header}.pch"]


# ---- what is built once per machine ---------------------------------------------------------------------------------


def prepare(on_cpu: bool | None = None) -> None:
    """Start building in the background what every graph needs, the runtime; for kernels on the CPU header and math, for those
    on a GPU the launcher. Where it is not known yet which (None), a torch without CUDA says that it is the CPU."""
    jobs: list[Callable[[], object]] = [runtime_library]
    if on_cpu or (on_cpu is None and torch.version.cuda is None):
        jobs += [_default_header, math_library]
    elif on_cpu is False:
        jobs.append(launcher_library)
    for job in jobs:
        run = functools.partial(contextvars.copy_context().run, _quietly, job)
        threading.Thread(target=run, daemon=True, name="kgen-prepare").start()


def wait() -> None:
    """Until what every graph loads is built. Raises RuntimeBuildFailed."""
    runtime_library()
    math_library()


def _quietly(job: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):  # the foreground asks for the same thing later and reports
        job()


def _default_header() -> Path | None:
    return _kernel_header((kernel_include_dir(),))


_once_runtime = threading.RLock()
_once_math = threading.RLock()  # not the same: `prepare` builds both at once
_once_launcher = threading.RLock()


def _unlock() -> None:
    """In a fork, which has none of the threads that build."""
    global _once_runtime, _once_math, _once_launcher
    _once_runtime, _once_math, _once_launcher = threading.RLock(), threading.RLock(), threading.RLock()


os.register_at_fork(after_in_child=_unlock)


def runtime_library() -> ModuleType:
    """The native runtime as a Python module. Raises RuntimeBuildFailed."""
    with _once_runtime:
        return _runtime(toolchain.compiler())


@functools.cache
def _runtime(_: toolchain.Compiler) -> ModuleType:
    source = Path(__file__).parents[1] / "host" / "runtime.cpp"
    path = _once_per_machine("kgen_runtime", source, _runtime_flags(), _torch_link_flags("torch_python"))
    return import_runtime(path)


def import_runtime(path: Path) -> ModuleType:
    """The native runtime at `path`."""
    return _import_extension("kgen_runtime", path)


def launcher_library() -> ctypes.CDLL:
    """What launches GPU kernels (kgen/host/launch.cpp). Raises RuntimeBuildFailed."""
    with _once_launcher:
        return _launcher(toolchain.compiler())


@functools.cache
def _launcher(_: toolchain.Compiler) -> ctypes.CDLL:
    source = Path(__file__).parents[1] / "host" / "launch.cpp"
    return ctypes.CDLL(str(_once_per_machine("kgen_launch", source, ("-O2", "-std=c++20", "-fPIC"), ("-ldl",))))


def math_library() -> ctypes.CDLL | None:
    """Vector math for kernels, loaded so that they find its symbols; None when there is no such library to build.

    Raises RuntimeBuildFailed."""
    with _once_math:
        return _math(toolchain.compiler(), toolchain.isa())


@functools.cache
def _math(_: toolchain.Compiler, __: toolchain.Isa) -> ctypes.CDLL | None:
    source = _templates() / "cpp" / "lib" / "vecmath.cpp"
    if not source.exists():
        return None
    flags = (*toolchain.kernel_flags(), "-fexceptions", f"-I{kernel_include_dir()}", *_torch_flags())  # torch's headers throw
    path = _once_per_machine("vecmath", source, flags, (*_torch_link_flags(), *toolchain.openmp_link_flags()))
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _once_per_machine(name: str, source: Path, flags: tuple[str, ...], link: tuple[str, ...]) -> Path:
    folders = (source.parent, *(Path(flag[2:]) for flag in flags if flag.startswith(f"-I{_templates()}")))
    sources = tuple(_contents(folder) for folder in folders)
    facts = (torch.__version__, sys.version, toolchain.compiler().identity, flags, link, sources)
    key = f"{name}-{cache.stable_hash(facts)}"

    def make(folder: Path) -> Path:
        made = folder / f"{name}.so"
        try:
            _run(_shared(source, made, (*flags, *link)), "cpp.runtimes")
        except _Failure as failure:
            raise RuntimeBuildFailed(how=failure.how, output=_head(failure.output), command=failure.command) from None
        return made

    found = cache.find("runtime", key, ".so")
    if found is None and cache.adopt("runtime", key, ".so"):
        found = cache.find("runtime", key, ".so")  # None where it is damaged
    if found is None:
        found = _once("runtime", key, ".so", make)
        cache.share("runtime", key, ".so")
    return found


def _runtime_flags() -> tuple[str, ...]:
    python = sysconfig.get_paths()["include"]
    # With the first macro torch's headers bring single operators instead of all 2500, with the second one an error that takes
    # the GIL brings none of pybind11's registry of types: seconds less.
    macros = ("-DAT_PER_OPERATOR_HEADERS", "-DPYBIND11_SIMPLE_GIL_MANAGEMENT")
    flags = ("-O2", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wno-psabi", *macros)
    return (*flags, f"-I{python}", *_torch_flags())


def _torch_flags() -> tuple[str, ...]:
    include = toolchain.torch_library_dir().parent / "include"
    return (f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", "-isystem", str(include))


def _torch_link_flags(*more: str) -> tuple[str, ...]:
    folder = toolchain.torch_library_dir()
    return (f"-L{folder}", *(f"-l{name}" for name in (*more, "torch_cpu", "c10")), f"-Wl,-rpath,{folder}")


def _import_extension(name: str, path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


# ---- loading --------------------------------------------------------------------------------------------------------

_loaded: dict[Path, ctypes.CDLL] = {}
_loaded_lock = threading.Lock()


def load_library(path: Path) -> ctypes.CDLL:
    """The library at `path`, loaded once per process; its symbols stay its own."""
    math_library()
    with _loaded_lock:
        found = _loaded.get(path)
        if found is None:
            found = _loaded[path] = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        return found


def function_address(library: ctypes.CDLL, name: str) -> int:
    """The address of an exported C function. Raises AttributeError when there is none."""
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address


# ---- what is compiled once ------------------------------------------------------------------------------------------


def _once(kind: str, key: str, suffix: str, make: Callable[[Path], Path]) -> Path:
    """The cache's entry; absent, the file that `make` makes in a folder, by one process and thread at a time."""
    with cache.lock(kind, key):
        ready = cache.find(kind, key, suffix)
        if ready is not None:
            return ready
        with cache.scratch(kind) as folder:
            return cache.put_file(kind, key, suffix, make(folder))


# ---- running the compiler -------------------------------------------------------------------------------------------


def _run(command: list[str], counter: str) -> None:
    counters.add(counter)
    limit = config.current().compile_seconds
    # LC_ALL: messages in a report should be in one language. A group: the driver starts compilers of its own, which must not
    # outlive the time limit, or this process' interruption. No session: `nice` counts inside of one alone.
    environment = {**os.environ, "LC_ALL": "C"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, env=environment, process_group=0, stdout=pipe, stderr=pipe) as process:
        try:
            output, errors = process.communicate(timeout=limit or None)
        except subprocess.TimeoutExpired:
            raise _Failure(f"not done after {limit:g} s", "", " ".join(command), late=True) from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        raise _Failure(_how(process.returncode), errors or output, " ".join(command))


def _how(status: int) -> str:
    return f"exit {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"


def _templates() -> Path:
    """The folder of `kgen.templates`, wherever the package is installed, without importing it."""
    spec = importlib.util.find_spec("kgen.templates")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


@functools.cache
def _contents(folder: Path) -> str:
    """A hash over the C++ files in a folder, by relative name and content."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".h", ".hpp", ".cpp", ".inl")):
        for part in (str(path.relative_to(folder)).encode(), path.read_bytes()):
            digest.update(b"%d:" % len(part) + part)
    return digest.hexdigest()
