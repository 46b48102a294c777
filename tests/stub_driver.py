"""A CUDA driver that runs kernels on the CPU (stub_driver.cpp), in place of the real one."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kgen.build import toolchain
from kgen.host import launch
from kgen.rendered.gpu_kernel import CompiledKernel

DRIVER_VERSION = 12030  # with everything that kgen uses


class Stub:
    """What the stub driver saw."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.stub_numbers.restype = ctypes.POINTER(ctypes.c_int64)
        library.stub_types.restype = ctypes.POINTER(ctypes.c_char)

    def __getitem__(self, name: str) -> int:
        return self.library.stub_numbers(name.encode())[0]

    def __setitem__(self, name: str, value: int) -> None:
        self.library.stub_numbers(name.encode())[0] = value

    def list(self, name: str, count: int) -> list[int]:
        return self.library.stub_numbers(name.encode())[:count]

    def expect(self, types: str) -> None:
        ctypes.memmove(self.library.stub_types(), types.encode() + b"\0", len(types) + 1)


def build(folder: Path) -> Path:
    """The driver as a shared library in `folder`."""
    source, made = Path(__file__).with_suffix(".cpp"), folder / "stub_driver.so"
    command = [*toolchain.compiler().command, "-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", str(source), "-o", str(made)]
    subprocess.run(command, check=True)
    return made


@contextmanager
def installed(path: Path) -> Iterator[Stub]:
    """kgen uses the driver at `path`, whose numbers start at 0."""
    made = Stub(ctypes.CDLL(str(path)))
    for name in ("launches", "loads", "contexts_set", "shared_limit", "fail_next", "encodes", "refuse_maps"):
        made[name] = 0
    made["driver_version"], made["most_threads"] = DRIVER_VERSION, 1024
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "DRIVER", str(path))
        forget()
        yield made
    forget()


def forget() -> None:
    """The driver is opened anew."""
    launch._library.cache_clear()
    launch._create_once.cache_clear()


def compiled(function: str, signature: tuple[str, ...], **more: object) -> CompiledKernel:
    plain = {"cubin": b"code", "divisible": (False,) * len(signature), "warps": 4, "shared": 0, "scratch": ()}
    return CompiledKernel(f"my_{function}", function, signature=signature, registers=0, stack=0, **{**plain, **more})
