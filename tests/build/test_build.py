"""Compiling and loading C++: the toolchain, the cache of libraries, the precompiled header, failures."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from kgen import backend, cache, config, entry
from kgen.build import cpp, toolchain
from kgen.counters import counters
from kgen.errors import BadOptionValue, CompilerNotFound, CompilerTooOld, KernelBuildFailed, RuntimeBuildFailed

pytestmark = pytest.mark.cpu

RETURN = 'extern "C" int forty_two() {{ return {}; }}'


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path / "cache"))
    counters.reset()
    return tmp_path / "cache"


@pytest.fixture
def headers(tmp_path):
    """An include folder with a small kgen/kernel.h."""
    folder = tmp_path / "include"
    (folder / "kgen").mkdir(parents=True)
    (folder / "kgen" / "kernel.h").write_text("#pragma once\n#define ANSWER 42\ninline int twice(int x) { return 2 * x; }\n")
    return folder


def call(path):
    return cpp.load_library(path).forty_two()


def fake_compiler(tmp_path, text):
    program = tmp_path / "fake-c++"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


# ---- toolchain


def test_the_compiler_is_found():
    found = toolchain.compiler()
    assert found.family in ("gcc", "clang")
    assert str(found.version[0]) in found.identity


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("KGEN_CXX", "/nowhere/g++")
    with pytest.raises(CompilerNotFound, match="looked for /nowhere/g"):
        toolchain.compiler()


def test_not_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("KGEN_CXX", fake_compiler(tmp_path, "exit 1"))
    with pytest.raises(CompilerNotFound):
        toolchain.compiler()


def test_too_old(monkeypatch, tmp_path):
    macros = "echo '#define __GNUC__ 9'; echo '#define __GNUC_MINOR__ 4'; echo '#define __GNUC_PATCHLEVEL__ 0'"
    monkeypatch.setenv("KGEN_CXX", fake_compiler(tmp_path, macros))
    with pytest.raises(CompilerTooOld, match=r"version 9\.4\.0; kgen needs gcc 11"):
        toolchain.compiler()


def test_isa_is_detected_and_can_be_named(monkeypatch):
    monkeypatch.delenv("KGEN_ISA", raising=False)
    best = toolchain.isa()
    assert best.name in ("avx512", "avx2", "generic")
    for name in ("avx512", "avx2", "generic"):
        monkeypatch.setenv("KGEN_ISA", name)
        assert toolchain.isa().name == name
    monkeypatch.setenv("KGEN_ISA", "sse9")
    with pytest.raises(BadOptionValue, match="avx512, avx2, generic"):
        toolchain.isa()


def test_isa_of_old_machines(monkeypatch):
    toolchain._detect.cache_clear()
    monkeypatch.delenv("KGEN_ISA", raising=False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    avx2 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "popcnt", "abm"}
    try:
        for features, expected in ((avx2, "avx2"), (avx2 - {"fma"}, "generic"), ({"avx512f", *avx2}, "avx2")):
            monkeypatch.setattr(toolchain, "cpu_features", lambda features=features: frozenset(features))
            toolchain._detect.cache_clear()
            assert toolchain.isa().name == expected
    finally:
        toolchain._detect.cache_clear()


def test_kernels_share_torchs_openmp(empty_cache):
    source = (
        '#include <omp.h>\nextern "C" int forty_two() { int n = 0;\n#pragma omp parallel reduction(+ : n)\nn += 1;\nreturn n; }'
    )
    path = cpp.build_unit("omp", source, include_dirs=[])
    assert call(path) == torch.get_num_threads()
    maps = Path("/proc/self/maps").read_text()
    libraries = {line.split()[-1] for line in maps.splitlines() if "libgomp" in line}
    assert len(libraries) == 1


# ---- units


def test_built_once_per_content(empty_cache):
    first = cpp.build_unit("a", RETURN.format(1), include_dirs=[])
    again = cpp.build_unit("other name", RETURN.format(1), include_dirs=[])
    second = cpp.build_unit("a", RETURN.format(2), include_dirs=[])
    assert first == again != second
    assert (call(first), call(second)) == (1, 2)
    assert counters["cpp.compiles"] == 2


def test_key_replaces_the_text(empty_cache):
    first = cpp.build_unit("a", RETURN.format(1), include_dirs=[], key="plan")
    assert cpp.build_unit("a", "// provenance\n" + RETURN.format(1), include_dirs=[], key="plan") == first
    assert cpp.build_unit("a", RETURN.format(1), include_dirs=[]) != first
    assert cpp.build_unit("a", RETURN.format(1), include_dirs=[], key=RETURN.format(1)) != first


def test_settings_enter_the_key(empty_cache, monkeypatch, headers):
    paths = {cpp.build_unit("a", RETURN.format(1), include_dirs=[])}
    paths.add(cpp.build_unit("a", RETURN.format(1), include_dirs=[headers]))
    other = "generic" if toolchain.isa().name != "generic" else "avx2"
    monkeypatch.setenv("KGEN_ISA", other)
    paths.add(cpp.build_unit("a", RETURN.format(1), include_dirs=[]))
    assert len(paths) == 3


def test_many_units_in_order(empty_cache):
    cpp.build_unit("one", RETURN.format(2), include_dirs=[])
    paths = cpp.build_units([cpp.Unit(f"u{i}", RETURN.format(i)) for i in (3, 2, 1, 3)], include_dirs=[])
    assert [call(path) for path in paths] == [3, 2, 1, 3]
    assert counters["cpp.compiles"] == 3


def test_kernels_whose_shares_are_the_same_code(empty_cache):
    """gcc would make one thread's function call the other one, which it then may not leave as a call."""
    share = """extern "C" int {0}(void** ptrs, const int64_t* ints, int threads) {{
      {1}* const p = static_cast<{1}*>(ptrs[0]);
      kgen::parallel_for(threads, ints[0], 1024, [&](int64_t begin, int64_t end) {{
        for (int64_t i = begin; i < end; ++i) for (int64_t k = 0; k < 0; ++k) p[k] = p[i];
      }});
      return 0;
    }}
    """
    cpp.build_unit("two", "#include <kgen/kernel.h>\n" + share.format("one", "float") + share.format("other", "double"))


def test_options_reach_the_builders_threads(tmp_path, empty_cache):
    with config.override(cache_dir=str(tmp_path / "elsewhere")):
        paths = cpp.build_units([cpp.Unit(f"u{i}", RETURN.format(i + 10)) for i in range(2)], include_dirs=[])
    assert all((tmp_path / "elsewhere") in path.parents for path in paths)


def test_threads_build_one_unit_once(empty_cache):
    paths = []
    threads = [
        threading.Thread(target=lambda: paths.append(cpp.build_unit("a", RETURN.format(5), include_dirs=[]))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1 == counters["cpp.compiles"]


def test_a_damaged_library_is_built_again(empty_cache):
    path = cpp.build_unit("a", RETURN.format(6), include_dirs=[])
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.warns(RuntimeWarning, match="damaged"):
        again = cpp.build_unit("a", RETURN.format(6), include_dirs=[])
    assert call(again) == 6
    assert counters["cpp.compiles"] == 2


def test_failure_names_the_kernel_and_keeps_the_source(empty_cache):
    source = 'extern "C" int forty_two() { return nonsense; }'
    with pytest.raises(KernelBuildFailed, match="kernel my kernel") as caught:
        cpp.build_units([cpp.Unit("good", RETURN.format(1)), cpp.Unit("my kernel", source)], include_dirs=[])
    details = caught.value.details
    assert "nonsense" in details["output"]
    assert details["source"].read_text() == source
    done = subprocess.run(details["command"].split(), capture_output=True, text=True, cwd=empty_cache, check=False)
    assert "nonsense" in done.stderr


def test_a_compiler_that_does_not_end_is_killed_with_its_children(empty_cache, tmp_path):
    """The driver waits for a compiler of its own, which would hold the pipes open, and a core."""
    slow = tmp_path / "slow"
    slow.write_text('#!/bin/sh\ncase "$*" in *-shared*) sleep 77 & echo $! > "$0.child"; wait;; esac\nexec g++ "$@"\n')
    slow.chmod(0o755)
    start = time.monotonic()
    with config.override(compiler=str(slow), compile_seconds=1):
        with pytest.raises(KernelBuildFailed, match=r"\(not done after 1 s\)"):
            cpp.build_unit("a", RETURN.format(8), include_dirs=[])
        assert time.monotonic() - start < 30
    child = Path(f"{slow}.child").read_text().strip()
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().split()[2] in "ZX"


def test_broken_units_are_all_found(empty_cache):
    units = [cpp.Unit("good", RETURN.format(1)), *(cpp.Unit(f"bad{k}", f"int wrong = not_here{k};") for k in range(2))]
    found = cpp.broken_units(units)
    assert list(found) == ["bad0", "bad1"]
    assert "not_here1" in found["bad1"].details["output"]


def test_load_and_addresses(empty_cache):
    library = cpp.load_library(cpp.build_unit("a", RETURN.format(7), include_dirs=[]))
    address = cpp.function_address(library, "forty_two")
    assert ctypes.CFUNCTYPE(ctypes.c_int)(address)() == 7
    with pytest.raises(AttributeError):
        cpp.function_address(library, "question")


# ---- the precompiled header


def test_header_is_compiled_once_and_used(empty_cache, headers):
    sources = [f'#include <kgen/kernel.h>\nextern "C" int forty_two() {{ return twice(ANSWER + {i}); }}' for i in range(3)]
    paths = cpp.build_units([cpp.Unit(f"u{i}", source) for i, source in enumerate(sources)], include_dirs=[headers])
    assert [call(path) for path in paths] == [84, 86, 88]
    assert counters["cpp.headers"] == 1
    cpp._headers.clear()
    cpp.build_unit("another", sources[0] + "//", include_dirs=[headers])
    assert counters["cpp.headers"] == 1


def test_header_content_enters_the_key(empty_cache, headers):
    source = '#include <kgen/kernel.h>\nextern "C" int forty_two() { return ANSWER; }'
    first = cpp.build_unit("a", source, include_dirs=[headers])
    header = headers / "kgen" / "kernel.h"
    header.write_text(header.read_text().replace("42", "43"))
    cpp._contents.cache_clear()  # a process reads the headers once
    second = cpp.build_unit("a", source, include_dirs=[headers])
    assert (call(first), call(second)) == (42, 43)
    assert counters["cpp.headers"] == 2


def test_damaged_headers_do_not_matter(empty_cache, headers):
    source = '#include <kgen/kernel.h>\nextern "C" int forty_two() {{ return ANSWER + {}; }}'
    cpp.build_unit("a", source.format(0), include_dirs=[headers])
    [entry] = cache.list_entries("header")
    compiled = next(p for p in entry.path.iterdir() if p.suffix in (".gch", ".pch"))
    raw = compiled.read_bytes()
    compiled.write_bytes(raw[: len(raw) // 2])  # truncated: seen by its size, made again
    cpp._headers.clear()
    assert call(cpp.build_unit("a", source.format(1), include_dirs=[headers])) == 43
    assert counters["cpp.headers"] == 2
    compiled.write_bytes(bytes(len(raw)))  # same size: the compiler cannot use it
    assert call(cpp.build_unit("a", source.format(2), include_dirs=[headers])) == 44


def test_broken_header_is_reported_with_the_kernel(empty_cache, headers):
    (headers / "kgen" / "kernel.h").write_text("#error broken on purpose\n")
    with pytest.raises(KernelBuildFailed, match="broken on purpose"):
        cpp.build_unit("a", '#include <kgen/kernel.h>\nextern "C" int forty_two() { return 1; }', include_dirs=[headers])


# ---- what is built once per machine


def test_runtime_is_loaded_once():
    assert cpp.runtime_library() is cpp.runtime_library()


def test_runtime_failure_says_what_to_do(empty_cache, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))  # which has no runtime either
    real = " ".join(toolchain.compiler().command)
    macros = subprocess.run(
        [*real.split(), "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True, check=True
    ).stdout
    (tmp_path / "macros").write_text(macros)
    script = f'case "$*" in *-dM*) cat {tmp_path}/macros;; *) echo "Python.h: No such file" >&2; exit 4;; esac'
    monkeypatch.setenv("KGEN_CXX", fake_compiler(tmp_path, script))
    with pytest.raises(RuntimeBuildFailed, match=r"exit 4[\s\S]*Python.h: No such file[\s\S]*Python headers"):
        cpp.runtime_library()


def test_another_folder_compiles_nothing_again(empty_cache, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    source = Path(cpp.__file__).parents[1] / "host" / "launch.cpp"
    parts = ("kgen_launch", source, ("-O2", "-std=c++20", "-fPIC"), ("-ldl",))
    first = cpp._once_per_machine(*parts)
    counters.reset("cpp.")
    monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path / "other"))
    assert cpp._once_per_machine(*parts).read_bytes() == first.read_bytes()
    assert counters["cpp.runtimes"] == 0


def test_a_second_process_compiles_nothing():
    code = (
        "from kgen.build import cpp; from kgen.counters import counters; cpp.runtime_library(); cpp.math_library();"
        "print(counters['cpp.runtimes'])"
    )
    counts = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert int(counts[1]) == 0


def test_looking_up_the_back_end_begins_to_build_what_every_graph_loads(monkeypatch):
    begun: list[str] = []
    monkeypatch.setattr(cpp, "prepare", lambda: begun.append("prepare"))
    assert entry.kgen_backend is backend.kgen_backend
    assert begun == ["prepare"]
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        entry.other  # noqa: B018


def test_a_fork_does_not_wait_for_what_its_parent_builds():
    code = """
import os, threading
from kgen.build import cpp
held, locks = threading.Event(), ("_once_runtime", "_once_math", "_once_launcher")
def build():
    for name in locks:
        getattr(cpp, name).acquire()
    held.set()
    threading.Event().wait()
threading.Thread(target=build, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    os._exit(0 if all(getattr(cpp, name).acquire(timeout=2) for name in locks) else 1)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
