"""Repairs of PTX: without them ptxas assembles something else, and says nothing."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import kgen.only
from bench.attention_smoke import CASES
from kgen.build import triton
from kgen.build.ptx import repaired, with_scalar_adds, with_shifted_halves, with_short_descriptors
from kgen.only import Only
from kgen.scheduler import Options
from kgen.templates import registry
from tests.codegen import rendered
from tests.kernels import plans
from tests.matmuls import compiled, forced

pytestmark = pytest.mark.ptx

HALF_OF_A_SUM = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry half(.param .u64 p, .param .u64 q){
\t.reg .b64 %rd<3>; .reg .b32 %r<4>; .reg .b16 %rs<3>;
\tld.param.u64 %rd1, [p];
\tld.param.u64 %rd2, [q];
\tld.global.u16 %rs1, [%rd1];
\tmov.b32 %r1, {%rs1, %rs1};
\tmov.b32 %r2, -458755;
\tadd.s16x2 %r3, %r1, %r2;
\tmov.b32 {%rs2, _}, %r3;
\tst.global.u16 [%rd2], %rs2;
\tret;
}
"""


def _small(configs):
    return [next(c for c in configs if (c.BLOCK_M, c.BLOCK_N, c.BLOCK_K, c.STAGES) == (64, 64, 64, 4))]


def _assembled(ptx: str, folder: Path) -> str:
    source, cubin = folder / "half.ptx", folder / "half.cubin"
    source.write_text(ptx)
    ptxas = triton._require_package() / "backends" / "nvidia" / "bin" / "ptxas"
    subprocess.run([str(ptxas), "-arch=sm_90a", str(source), "-o", str(cubin)], check=True)
    return triton.dumped(cubin.read_bytes(), "-sass")


def test_half_of_a_packed_sum_keeps_its_constant(tmp_path):
    assert "0xfffffffd" in _assembled(with_scalar_adds(HALF_OF_A_SUM), tmp_path), "-3, the lower half of the constant"


def test_packed_sums_are_split_and_floats_are_not():
    made = with_scalar_adds("\tadd.s16x2 \t%r3, %r1, 65535;\n\tadd.rn.bf16x2 %r4, %r3, %r3;\n")
    assert "s16x2" not in made
    assert "mov.b32 kg_b, 65535;" in made
    assert "add.rn.bf16x2 %r4, %r3, %r3;" in made


@pytest.mark.parametrize("line", ["add.sat.s16x2 %r3, %r1, %r2;", "@!%p3 add.s16x2 %r3, %r1, %r2;"])
def test_an_unknown_form_is_refused(line):
    with pytest.raises(ValueError, match="form that is not known"):
        with_scalar_adds(f"\t{line}\n")


def test_bounds_checks_of_padded_convolutions_are_repaired():
    """Of two taps of the window in a pipelined loop LLVM packs the checks of neighbouring rows."""
    x, w = torch.randn(4, 64, 112, 112).bfloat16(), torch.randn(64, 64, 3, 3).bfloat16()
    x, w = x.to(memory_format=torch.channels_last), w.to(memory_format=torch.channels_last)
    with forced("triton_matmul_tiles", _small, runs=False) as made, torch.no_grad():
        compiled(lambda x, w: F.relu(F.conv2d(x, w, padding=1)), x, w)
    assert made.matmuls
    built = triton.compile_kernels(made.kernels, 90)
    assert not any("VIADD.16x2" in triton.dumped(kernel.cubin, "-sass") for kernel in built)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("images", "channels", "filters", "size", "stride"),
    [(4, 64, 64, 112, 1), (16, 64, 64, 56, 1), (4, 64, 128, 57, 2), (2, 32, 64, 30, 1)],
)
def test_padded_convolutions_under_every_configuration(images, channels, filters, size, stride):
    generator = torch.Generator("cuda").manual_seed(1)

    def made(*shape):
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    x = made(images, channels, size, size).to(memory_format=torch.channels_last)
    w = (made(filters, channels, 3, 3) * 0.05).to(memory_format=torch.channels_last)
    b = made(filters)

    def f(x, w, b):
        return F.relu(F.conv2d(x, w, b, stride, 1))

    want = f(x.double(), w.double(), b.double())
    wrong, tried = [], 0
    for template in registry.every("cuda"):
        number, count = 0, 1
        while number < count:
            seen = []

            def pick(configs, number=number, seen=seen):
                seen.append(configs)
                return configs[number]

            torch._dynamo.reset()
            with kgen.only.only(template.name, pick), torch.no_grad():
                got = torch.compile(f, backend="kgen")(x, w, b)
            if not seen:
                break  # the template does not take it
            count, number, tried = len(seen[0]), number + 1, tried + 1
            if not torch.allclose(got.double(), want, rtol=0.02, atol=0.05):
                wrong.append((template.name, str(seen[0][number - 1])))
    assert tried
    assert not wrong


DESCRIPTORS = """\tand.b32 \t%r2, %r1, 16383;
\tbfe.u32 \t%r4, %r3, 4, 14;
\tcvt.u64.u32 \t%rd1, %r2;
\tcvt.u64.u32 \t%rd2, %r4;
\tor.b64 \t%rd3, %rd1, 4611686293305294848;
\tadd.s64 \t%rd4, %rd2, -9223371899415822272;
\twgmma.fence.sync.aligned;
"""


def test_the_halves_of_a_descriptor_are_made_apart():
    made = with_short_descriptors(DESCRIPTORS)
    assert "or.b32 kg_lower, %r2, 0; mov.b64 %rd3, {kg_lower, 1073741888}" in made
    assert "add.s32 kg_lower, %r4, 64; mov.b64 %rd4, {kg_lower, 2147483680}" in made
    assert "64 \t%rd" not in made.split("%rd2, %r4;")[1]


@pytest.mark.parametrize(
    "change",
    [
        ("16383", "65535"),  # longer than an address
        ("4, 14", "4, 16"),
        ("-9223371899415822272", "4294967295"),  # carries
        ("\twgmma", "\tcvt.u64.u32 \t%rd2, %r1;\n\tadd.s32 \t%r2, %r2, 1;\n\twgmma"),  # written twice
    ],
)
def test_other_additions_of_64_bits_stay(change):
    text = DESCRIPTORS.replace(*change)
    made = with_short_descriptors(text)
    assert made.count("kg_lower, %r") < 2
    assert ("%rd1, 4611686293305294848" in made) or ("add.s64 \t%rd4" in made)


PAIR = """\tand.b32 \t%r186, %r185, 2097168;
\tmov.b32 \t{%rs26, %rs27}, %r186;
"""


def test_the_upper_half_of_two_indices_is_shifted():
    made = with_shifted_halves(PAIR)
    assert "mov.b32 \t{" not in made
    assert "shr.u32 kg_upper, %r186, 16; cvt.u16.u32 %rs26, %r186; cvt.u16.u32 %rs27, kg_upper;" in made
    assert repaired(made) == made


@pytest.mark.parametrize(
    "maker", ["ld.global.b32 \t%r186, [%rd1]", "cvt.rn.bf16x2.f32 \t%r186, %f1, %f2", "mov.u32 \t%r186, %r185"]
)
def test_halves_of_what_is_loaded_and_of_floats_stay(maker):
    alone = PAIR.replace("and.b32 \t%r186, %r185, 2097168", maker)
    assert with_shifted_halves(alone) == alone
    both = PAIR + f"\t{maker};\n"  # on another way to the same register
    assert with_shifted_halves(both) == both


def test_operands_of_mmas_lie_where_descriptors_say():
    """The lower half of a sum of 64 bits came out of another operand's register here."""
    case = next(case for case in CASES if case.name == "bias")
    args = [torch.empty_like(one, device="cpu") for one in case.make("meta")]
    want = {"BLOCK_M": 128, "BLOCK_N": 64, "WARPS": 8, "STAGES": 3}
    options = Options(gpu_everywhere=True, only=Only("triton_attention", lambda configs: _with(configs, want)))
    plan = plans(case.function, *args, options=options).forward
    [kernel] = plan.kernels
    launch = rendered(kernel, plan, "kernel", options).launch
    [made] = triton.compile_kernels([launch], 90)
    text = triton.dumped(made.cubin, "-sass")
    assert "HGMMA" in text
    assert not _sums_of_one_half(text)


def _with(configs, want):
    return next(c for c in configs if all(getattr(c, name) == value for name, value in want.items()))


def _sums_of_one_half(text):
    """Upper halves of uniform sums that are made of the register that the lower half is made of."""
    found, lower = [], {}
    for line in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?) ;", text):
        if match := re.match(r"UIADD3 UR\d+, (UP\d), (UR\d+),", line):
            lower[match[1]] = match[2]
        elif (match := re.match(r"UIADD3\.X UR\d+, (UR\d+), .*(UP\d), !UPT", line)) and lower.get(match[2]) == match[1]:
            found.append(line)
        elif match := re.match(r"U\w+ (UR\d+),", line):  # another number is in that register from here on
            lower = {carry: register for carry, register in lower.items() if register != match[1]}
    return found
