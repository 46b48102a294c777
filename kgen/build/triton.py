"""Triton kernels to machine code, each compiled once per content and found in the cache from then on.

Compilation happens in children of a server process (kgen/build/triton_worker.py), as many at a time as there are cores,
and may begin as soon as a kernel's text is there. Neither Triton nor the server is needed where the cache has everything.
"""

from __future__ import annotations

import contextvars
import functools
import importlib.util
import itertools
import json
import os
import pickle
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import IO

from kgen import cache, config
from kgen.build import child
from kgen.counters import counters
from kgen.errors import TritonBuildFailed, TritonNotFound
from kgen.rendered.gpu_kernel import CompiledKernel, TritonKernel
from kgen.rendered.tensor_map import MapFormat

__all__ = ["begin", "compile_kernels", "prestart", "resource_usage", "version"]


def compile_kernels(kernels: Sequence[TritonKernel], arch: int) -> list[CompiledKernel]:
    """Machine code of `kernels` for compute capability `arch` (90 is 9.0), in order.

    Raises TritonNotFound, and TritonBuildFailed for the first that cannot be compiled, once all have been tried."""
    keys = [_key(kernel, arch) for kernel in kernels]
    found = {key: cache.get("triton", key) for key in dict.fromkeys(keys)}
    missing = {key: kernel for key, kernel in zip(keys, kernels, strict=True) if found[key] is None}
    if missing:
        jobs = {key: _job(key, kernel, arch) for key, kernel in missing.items()}
        wait(jobs.values())
        for key in jobs:
            _begun.pop(key, None)
        found |= {key: job.result() for key, job in jobs.items()}
    return [_restore(kernel, found[key]) for key, kernel in zip(keys, kernels, strict=True)]


def begin(kernel: TritonKernel, arch: int) -> None:
    """Compiles in the background, unless the cache has it, a kernel that `compile_kernels` will be asked for."""
    if _package() is not None:
        key = _key(kernel, arch)
        if cache.find("triton", key) is None:
            _job(key, kernel, arch)


def _job(key: str, kernel: TritonKernel, arch: int) -> Future[bytes]:
    """The kernel's compilation: the one that has begun, or a new one."""
    with _start:
        job = _begun.get(key)
        if job is None:
            # In a copy of the caller's context: it holds the caller's cache folder.
            job = _begun[key] = _threads().submit(contextvars.copy_context().run, _build, key, kernel, arch)
            job.add_done_callback(partial(_forget, key))
    return job


def _forget(key: str, job: Future[bytes]) -> None:
    """The cache has what was compiled; a failure waits for who asks."""
    if job.exception() is None:
        _begun.pop(key, None)


def prestart() -> None:
    """Start the server now: it imports Triton while the caller traces and schedules."""
    if _package() is not None:
        _server()


def version() -> str | None:
    """Of the compiler, where there is one."""
    return None if _package() is None else _version()


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of a thread of the only kernel in `cubin`."""
    printed = dumped(cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found is not None, printed
    return int(found[1]), int(found[2])


def dumped(cubin: bytes, what: str) -> str:
    """What the cuobjdump that comes with Triton prints of machine code; `what` is its option."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = _require_package() / "backends" / "nvidia" / "bin" / "cuobjdump"
        return subprocess.run([str(tool), what, file.name], capture_output=True, text=True, check=True).stdout


# ---- keys -----------------------------------------------------------------------------------------------------------


_STORED = 7  # changes with what is kept of a kernel, and with what is repaired in it


def _key(kernel: TritonKernel, arch: int) -> str:
    return cache.stable_hash(("triton", _STORED, *kernel.identity, arch, _version(), _library(), _settings()))


@functools.cache
def _package() -> Path | None:
    """Triton's folder, found without importing it."""
    spec = importlib.util.find_spec("triton")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _require_package() -> Path:
    found = _package()
    if found is None:
        raise TritonNotFound()
    return found


@functools.cache
def _version() -> str:
    """Read from the source: the name of the distribution differs from build to build."""
    text = (_require_package() / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r"""^__version__ = ['"]([^'"]+)""", text, re.MULTILINE)
    assert found is not None
    return found[1]


@functools.cache
def _library() -> tuple[str, ...]:
    """The functions that kernels import are part of every kernel: the texts of library.py and warp_groups.py, and of all that
    they import here."""
    spec = importlib.util.find_spec("kgen.templates.triton.device")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    return tuple((_with_imports(folder, "library") | _with_imports(folder, "warp_groups")).values())


def _with_imports(folder: Path, name: str) -> dict[str, str]:
    """The texts of a module of `folder` and of the modules of that folder which it imports, in a fixed order."""
    texts: dict[str, str] = {}
    pending = [name]
    while pending:
        module = pending.pop()
        path = folder / f"{module}.py"
        if module not in texts and path.exists():
            texts[module] = path.read_text(encoding="utf-8")
            pending += re.findall(r"\bkgen\.templates\.triton\.device(?:\.| import )(\w+)", texts[module])
    return texts


# Where files go, and the interpreter, which would keep kernels from being compiled at all.
_NOT_FOR_THE_COMPILER = ("TRITON_INTERPRET", "TRITON_HOME", "TRITON_CACHE_DIR")


def _settings() -> tuple[tuple[str, str], ...]:
    """What the environment tells Triton's compiler."""
    named = (item for item in os.environ.items() if item[0].startswith("TRITON_"))
    return tuple(sorted(item for item in named if item[0] not in _NOT_FOR_THE_COMPILER))


# ---- one kernel -----------------------------------------------------------------------------------------------------


def _build(key: str, kernel: TritonKernel, arch: int) -> bytes:
    with cache.lock("triton", key):
        ready = cache.get("triton", key)
        if ready is not None:
            return ready
        with cache.scratch("triton") as folder:
            _write_job(folder, kernel, arch)
            counters.add("triton.compiles")
            status = _server().submit(folder).result()
            if status != 0:
                raise _kept(kernel, key, arch, status, folder)
            facts = json.loads((folder / "result.json").read_text(encoding="utf-8"))
            cubin = (folder / "kernel.cubin").read_bytes()
        facts["registers"], facts["stack"] = resource_usage(cubin)
        made = pickle.dumps((facts, cubin))
        cache.put("triton", key, made)
        return made


def _write_job(folder: Path, kernel: TritonKernel, arch: int) -> None:
    (folder / f"{kernel.name}.py").write_text(kernel.source, encoding="utf-8")
    request = {
        "name": kernel.name,
        "signature": kernel.signature,
        "divisible": kernel.divisible,
        "num_warps": kernel.num_warps,
        "num_stages": kernel.num_stages,
        "options": kernel.options,
        "arch": arch,
        "time_limit_s": _time_limit(),
    }
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")


def _restore(kernel: TritonKernel, stored: bytes | None) -> CompiledKernel:
    assert stored is not None
    facts, cubin = pickle.loads(stored)
    return CompiledKernel(
        kernel.name, facts["function"], cubin, kernel.signature, kernel.divisible, facts["warps"], facts["shared"],
        tuple(facts["scratch"]), facts["registers"], facts["stack"],
        tuple(MapFormat(**fields, box=tuple(box)) for fields, box in facts["maps"]), facts["early"],
    )  # fmt: skip


def _kept(kernel: TritonKernel, key: str, arch: int, status: int, folder: Path) -> TritonBuildFailed:
    place = cache.path("failed", f"{kernel.name}-{key[:12]}", ".py")
    place.write_text(kernel.source, encoding="utf-8")
    log = cache.path("failed", f"{kernel.name}-{key[:12]}", ".log")
    text = (folder / "log").read_text(encoding="utf-8", errors="replace") if (folder / "log").exists() else ""
    log.write_text(text, encoding="utf-8")
    return TritonBuildFailed(kernel=kernel.name, arch=arch, how=_how(status), source=place, output=_reasons(text), log=log)


def _reasons(log: str) -> str:
    """Python's tracebacks end with the reason, but where MLIR's verifier said it before, followed by all of the program."""
    lines = log.splitlines()
    found = [line for line in lines[:-15] if re.search(r":\d+: error: ", line)]
    return "\n".join(found[:3] + lines[-15:])


def _time_limit() -> float:
    return config.current().compile_seconds


def _how(status: int) -> str:
    if status == -signal.SIGALRM:
        return f"not done after {_time_limit():g} s"
    if status == _SERVER_GONE:
        return "the compile server died"
    return f"exit {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"


# ---- the server, as its parent sees it ------------------------------------------------------------------------------

_SERVER_GONE = 256  # no exit status of a process


class _Server:
    """One running server."""

    def __init__(self) -> None:
        self.process = child.start("kgen.build.triton_worker", without=_NOT_FOR_THE_COMPILER)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.jobs: IO[bytes] = self.process.stdin
        self.lock = threading.Lock()
        self.numbers = itertools.count()
        self.pending: dict[int, Future[int]] = {}
        self.alive = True
        threading.Thread(target=self._listen, args=(self.process.stdout,), daemon=True, name="kgen-triton-replies").start()

    def submit(self, folder: Path) -> Future[int]:
        """The exit status of the process that compiles the job in `folder`."""
        done: Future[int] = Future()
        with self.lock:
            number = next(self.numbers)
            self.pending[number] = done
            try:
                self.jobs.write(f"{number} {folder}\n".encode())
                self.jobs.flush()
            except OSError:
                self.pending.pop(number, None)
                done.set_result(_SERVER_GONE)
        return done

    def _listen(self, replies: IO[bytes]) -> None:
        for line in replies:
            number, status = map(int, line.split())
            with self.lock:
                done = self.pending.pop(number)
            done.set_result(status)
        self.process.wait()
        with self.lock:
            self.alive = False
            lost = list(self.pending.values())
            self.pending.clear()
        for done in lost:
            done.set_result(_SERVER_GONE)


_running: list[_Server] = []
_start = threading.Lock()
_begun: dict[str, Future[bytes]] = {}  # by key


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Which wait for the server's answers."""
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="kgen-triton")


def _forked() -> None:
    """A fork has none of its parent's threads, and must not use its server."""
    _running.clear()
    _begun.clear()
    _threads.cache_clear()


os.register_at_fork(after_in_child=_forked)


def _server() -> _Server:
    with _start:
        if _running and _running[0].alive:
            return _running[0]
        _running[:] = [_Server()]
        return _running[0]
