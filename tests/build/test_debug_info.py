"""`debug_info`: what debuggers and perf see of C++ kernels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from kgen import config
from kgen.build import toolchain

pytestmark = pytest.mark.cpu


def loaded(folder: Path) -> set[Path]:
    """The libraries of this process below a folder."""
    maps = Path(f"/proc/{os.getpid()}/maps").read_text()
    return {Path(found) for found in re.findall(r"\S+\.so$", maps, re.MULTILINE) if found.startswith(str(folder))}


def kernel_lines(libraries: set[Path]) -> list[str]:
    """Where the kernels' functions begin, as addr2line has it: ``file:line``."""
    found = []
    for library in libraries:
        symbols = subprocess.run(["nm", str(library)], capture_output=True, text=True, check=True).stdout
        for address in re.findall(r"^(\w+) T k\d+_", symbols, re.MULTILINE):
            command = ["addr2line", "-e", str(library), address]
            found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    return found


def compiled(folder: Path, **options: object) -> list[str]:
    torch._dynamo.reset()

    @torch.compile(backend="kgen", options={"cache_dir": str(folder), **options})
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, -1)

    x = torch.randn(4, 8)
    torch.testing.assert_close(f(x), torch.softmax(x * 2, -1))
    return kernel_lines(loaded(folder))


def test_flags_follow_the_option() -> None:
    assert "-g" not in toolchain.kernel_flags()
    with config.override(debug_info=True):
        assert "-g" in toolchain.kernel_flags()


@pytest.mark.slow  # a precompiled header and a runtime for each of two folders
@pytest.mark.skipif(shutil.which("addr2line") is None or shutil.which("nm") is None, reason="needs binutils")
def test_kernels_have_lines_of_a_source_that_stays(tmp_path: Path) -> None:
    """The line is the kernel's, and above it stand the user's."""
    [place] = compiled(tmp_path / "with", debug_info=True)
    file, _, number = place.rpartition(":")
    lines = Path(file).read_text().splitlines()
    assert Path(file).is_relative_to(tmp_path / "with")
    assert 'extern "C" int k0_' in lines[int(number) - 1]
    assert any("test_debug_info.py" in line and "torch.softmax(x * 2, -1)" in line for line in lines[: int(number)])
    assert all(one.startswith("??") for one in compiled(tmp_path / "without"))
