"""The three targets of the C++ back end: chosen when kgen runs, kept apart on disk and in a process, each with right results.

aarch64 has no compiler here: what is checked is that the plain target compiles for the least x86-64 there is, and that nothing
of x86 is left in it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from codegen import Row, near, report, run_rows

import kgen
from kgen import backend, config
from kgen.build import cpp, toolchain
from kgen.build.unit import PRELUDE

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore::UserWarning")]


def _floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def _integers(*shape: int) -> torch.Tensor:
    return torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(7))


def _widths(x: torch.Tensor) -> list[torch.Tensor]:
    return [
        (x * 3).to(d).to(torch.float32) for d in (torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int8, torch.int64)
    ]


# One of each kind of code that has a version for a target: math, conversions, masks, division, gathers, tiles, reductions.
SLICE = {
    "math": (lambda x: (x.erf(), x.tanh(), x.sigmoid(), x.exp(), x.abs().log(), x.sin(), x.abs().sqrt()), _floats(57, 33)),
    "conversions": (_widths, _floats(57, 33)),
    "masks": (lambda x: (torch.where(x > 0, x, -1), (x > 0) & (x < 1), x.isnan().any(), (x < 9).all()), _floats(57, 33)),
    "division": (lambda x: (x // 7, x % -7, torch.gcd(x, x + 6), x.abs() ** 3, 1 << (x % 8)), _integers(57, 33)),
    "small integers": (lambda x: (x.to(torch.int8) * 3, x.to(torch.int16) // 5, x.to(torch.uint8).amax(1)), _integers(57, 33)),
    "gathers": (lambda x: (x[x[:, 0].long().abs() % 57], x.flip(1), x[:, ::3] + 1), _floats(57, 33)),
    "tiles": (lambda x: x + x.t(), _floats(70, 70)),
    "reductions": (lambda x: (x.sum(), x.sum(0), x.var(1), x.argmax(1), x.softmax(0), x.amin()), _floats(57, 33)),
    "gelu in half": (lambda x: torch.nn.functional.gelu(x.half()), _floats(57, 33)),
    "scans": (lambda x: x.cumsum(1) + x.prod(0), _floats(57, 33)),
}  # fmt: skip


@pytest.mark.parametrize("isa", toolchain.available())
def test_every_target_agrees_with_eager(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    monkeypatch.setenv("KGEN_ISA", isa)
    failures = run_rows([Row(f"{name} ({isa})", fn, [(x,)], near(fn)) for name, (fn, x) in SLICE.items()])
    assert not failures, report(failures)


def test_the_option_names_the_target() -> None:
    """Kernels for several targets in one process: each finds its own library of vector math."""
    x = _floats(1000)
    for isa in reversed(toolchain.available()):

        def f(x: torch.Tensor, isa: str = isa) -> torch.Tensor:
            return x.sin() + x.lgamma() * len(isa)

        torch._dynamo.reset()
        compiled = kgen.compile(f, options={"isa": isa, "cache": False})
        torch.testing.assert_close(compiled(x), f(x), rtol=1e-5, atol=1e-5)


def test_the_option_reaches_the_flags() -> None:
    with backend.toolchain_of(config.from_call(None, {"isa": "generic"})):
        assert toolchain.isa().name == "generic"
        assert not [flag for flag in toolchain.kernel_flags() if flag.startswith("-m")]


def test_machines_of_different_instruction_sets_may_share_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found, not only what is asked for, enters the keys of kernels and of AOTAutograd's entries."""
    monkeypatch.delenv("KGEN_ISA", raising=False)
    keys = set()
    for found in ("avx512", "avx2", "generic"):
        monkeypatch.setattr(toolchain, "_detect", lambda found=found: found)
        keys.add((backend._cache_key(config.from_call()), cpp._unit_key(cpp.Unit("a", "text"), ())))
    assert len({aot for aot, _ in keys}) == len({unit for _, unit in keys}) == 3


def _plain(*flags: str) -> str:
    """What the compiler prints for the kernel header under the plain target."""
    with config.override(isa="generic"):
        command = [*toolchain.compiler().command, *toolchain.kernel_flags(), f"-I{cpp.kernel_include_dir()}", *flags]
    return subprocess.run([*command, "-x", "c++", "-"], input=PRELUDE, capture_output=True, text=True, check=True).stdout


def test_the_plain_target_has_nothing_of_x86() -> None:
    headers = _plain("-M").split()
    assert not [h for h in headers if re.search(r"(intrin|x86intrin|cpuid)\.h$", h)]
    ours = str(cpp.kernel_include_dir())
    source, mine = _plain("-E"), False
    for line in source.splitlines():
        if line.startswith("# "):
            mine = ours in line
        assert not (mine and re.search(r"\b_mm\d*_|__builtin_ia32|__m(128|256|512)", line)), line


def test_x86_intrinsics_are_behind_their_switch() -> None:
    """Only base.h includes them, under KGEN_X86."""
    headers = Path(cpp.kernel_include_dir()).rglob("*.h")
    including = {path.name: path.read_text() for path in headers if "immintrin" in path.read_text()}
    assert list(including) == ["base.h"]
    assert "#if KGEN_X86\n#include <immintrin.h>\n#endif" in including["base.h"]
