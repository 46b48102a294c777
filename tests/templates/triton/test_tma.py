"""TMA descriptors as kernel parameters: described, compiled, encoded by the launcher, and interpreted. No GPU is needed."""

from __future__ import annotations

import ctypes
import pickle
import re
import threading
from dataclasses import replace
from typing import Any

import launch_kernels as tk
import pytest
import tma_kernels as tma
import torch
from stub_driver import compiled
from triton_kernels import ptx_of

from kgen.build import triton
from kgen.errors import InvalidProgram, InvalidTensorMap, TensorMapRefused, TritonBuildFailed
from kgen.host import launch, native
from kgen.host import program as hp
from kgen.host.assemble import Assembled
from kgen.host.compiled import Blueprint, HostGraph
from kgen.ir.index import Expr, constant
from kgen.rendered.kernel_call import KernelCall
from kgen.rendered.tensor_map import MapFormat, TensorMap, map_block, map_rank, map_steps, plain_kind, widths
from tests.host.test_launch import call

BF16 = "tensordesc<bf16[128, 64]>"
FORMAT = MapFormat(9, 2, 3, (128, 64))  # BFLOAT16, swizzled by 128 bytes


def numbers(*values: int) -> tuple[Expr, ...]:
    return tuple(map(constant, values))


# ---- descriptions -----------------------------------------------------------------------------------------------------


@pytest.mark.none
def test_a_descriptors_type_and_numbers():
    made = TensorMap("x", "bf16", (128, 64), numbers(1000, 512), numbers(520, 1), constant(8))
    assert made.type == BF16
    assert [n.as_int() for n in made.numbers] == [8, 1000, 512, 520, 1]
    assert (map_rank(made.type), map_block(made.type)) == (2, ("bf16", (128, 64)))
    assert [map_rank(kind) for kind in ("*bf16", "i32", "tensordesc<fp32[64]>", "tensordesc<i8[4, 8, 8, 64]>")] == [0, 0, 1, 4]


@pytest.mark.none
@pytest.mark.parametrize(
    ("block", "sizes", "strides", "rule"),
    [
        ((8,), (8, 8), (8, 1), "as many in block"), ((8, 8), (8, 8), (1,), "as many in block"), ((), (), (), "1 to 5"),
        ((1,) * 6, (1,) * 6, (1,) * 6, "1 to 5"), ((8, 8), (8, 8), (1, 8), "a last stride of 1, got 8"),
    ],
)  # fmt: skip
def test_what_no_descriptor_can_be(block, sizes, strides, rule):
    with pytest.raises(InvalidTensorMap, match=rule):
        TensorMap("x", "fp32", block, numbers(*sizes), numbers(*strides))


STEPS = "tensordesc<bf16[2, 8, 64], steps [1, 2, 1]>"


@pytest.mark.none
def test_steps_are_part_of_a_descriptors_type():
    made = TensorMap("x", "bf16", (2, 8, 64), numbers(9, 30, 64), numbers(1920, 64, 1), steps=(1, 2, 1))
    assert made.type == STEPS
    assert (map_block(STEPS), map_steps(STEPS)) == (("bf16", (2, 8, 64)), (1, 2, 1))
    assert (plain_kind(STEPS), widths(STEPS)) == ("tensordesc<bf16[2, 8, 64]>", widths(plain_kind(STEPS)))
    assert replace(made, steps=(1, 1, 1)).type == replace(made, steps=()).type == plain_kind(STEPS)
    assert (map_steps(BF16), plain_kind("i32")) == ((1, 1), "i32")


@pytest.mark.none
@pytest.mark.parametrize("steps", [(1, 2), (1, 9, 1), (1, 0, 1), (1, 2, 2), (1, 8, 1)])
def test_steps_that_no_descriptor_has(steps):
    """Too few, too large, none, along the last dimension, and so large that a block spans more than 256 elements."""
    with pytest.raises(InvalidTensorMap, match="steps from 1 to 8"):
        TensorMap("x", "bf16", (2, 64, 64), numbers(9, 30, 64), numbers(1920, 64, 1), steps=steps)


@pytest.mark.none
def test_a_descriptor_is_no_multiple_of_16():
    with pytest.raises(InvalidTensorMap, match="kernel copy needs False among its `divisible`"):
        tk.kernel(tma.COPY, ("*fp32", BF16), divisible=(True, True))


# ---- compiling --------------------------------------------------------------------------------------------------------


def matmul(dtype: torch.dtype = torch.bfloat16, **options: int) -> Any:
    x, y = torch.zeros(256, 128, dtype=dtype), torch.zeros(128, 256, dtype=dtype)
    return tma.kernel_of(tma.matmul_like, lambda *a: tma.matmul_call(*a, (128, 128, 64), **options), (x, y))


def copy(dtype: torch.dtype = torch.float32) -> Any:
    return tma.kernel_of(lambda x: x.neg(), tma.copy_call, (torch.zeros(64, 64, dtype=dtype),))


def mixed() -> Any:
    made = tma.assembled(tma.added, tma.add_call, (torch.zeros(20, 40), torch.zeros(20, 40), torch.zeros(40)), dynamic=True)
    return made.launches[0]


@pytest.mark.ptx
@pytest.mark.parametrize("make", [copy, mixed, matmul])
def test_the_launcher_passes_what_the_machine_code_takes(make, tmp_path):
    kernel = make()
    ptx = ptx_of(kernel, tmp_path, 90)
    entry = re.search(r"\.entry\s+\w+\s*\(([^)]*)\)", ptx)[1]
    found = []
    for line in filter(None, map(str.strip, entry.split(","))):
        if whole := re.fullmatch(r"\.param \.align (\d+) \.b8 \w+\[(\d+)\]", line):
            found.append((int(whole[2]), int(whole[1])))
        else:
            bits = int(re.match(r"\.param \.[ub](\d+)", line)[1])
            found.append((bits // 8, bits // 8))
    passed = [(128, 64) if size == 128 else (size, size) for kind in kernel.signature for size in widths(kind)]
    assert found == [*passed, (8, 8), (8, 8)]  # the last are scratch memory
    [made] = triton.compile_kernels([kernel], 90)
    assert made.scratch == (0, 0)
    assert len(made.maps) == sum(map_rank(kind) > 0 for kind in kernel.signature)
    assert "cp.async.bulk.tensor" in ptx


@pytest.mark.ptx
def test_what_the_compiler_decides_about_descriptors(fresh_cache):
    """A row of the box is at most what swizzling knows, 128 bytes, so a box can be smaller than a block."""
    kernels = [matmul(num_warps=8), copy(), copy(torch.float16), copy(torch.int8)]
    made = triton.compile_kernels(kernels, 90)
    assert made[0].maps == (FORMAT, replace(FORMAT, box=(64, 64)), replace(FORMAT, box=(128, 64)))
    assert made[1].maps == (MapFormat(7, 4, 3, (32, 32)),) * 2
    assert made[2].maps == (MapFormat(6, 2, 3, (32, 64)),) * 2
    assert [(m.element_bytes, m.box) for m in made[3].maps] == [(1, (32, 64))] * 2
    assert triton.compile_kernels(kernels[:1], 90) == made[:1], "from the cache"


@pytest.mark.ptx
def test_a_gpu_without_tma_is_refused():
    with pytest.raises(TritonBuildFailed, match=r"need compute capability 9\.0"):
        triton.compile_kernels([copy()], 80)


@pytest.mark.ptx
def test_descriptors_made_in_a_kernel_are_no_parameters():
    [made] = triton.compile_kernels([tk.kernel(tk.COPY_BY_DESCRIPTOR, ("*fp32", "*fp32", "i32"))], 90)
    assert made.maps == ()


# ---- the launcher -----------------------------------------------------------------------------------------------------


def by_hand(*signature: str, formats: tuple[MapFormat, ...] = (FORMAT,), function: str = "record") -> launch.GpuKernel:
    return launch.load_kernel(compiled(function, signature, maps=formats), [0])


@pytest.mark.cpu
def test_what_the_driver_is_asked_for(stub):
    three = MapFormat(7, 4, 2, (2, 8, 16))
    kernel = by_hand("tensordesc<fp32[4, 8, 16]>", formats=(three,))
    assert (kernel.pointers, kernel.integers, kernel.maps) == (1, 7, 1)
    stub.expect("miiilll")
    assert call(kernel, pointers=[4096], integers=(8, 5, 6, 70, 1200, 200, 1)) is None
    address, sizes, strides, box, steps = 4096 + 8 * 4, [70, 6, 5], [200 * 4, 1200 * 4], [16, 8, 2], [1, 1, 1]
    assert stub.list("encode", 18) == [7, 3, address, *sizes, *strides, *box, *steps, 0, 2, 2, 0]
    assert stub.list("arguments", 7) == [address, 5, 6, 70, 1200, 200, 1]


@pytest.mark.cpu
def test_what_the_driver_is_asked_for_with_steps(stub):
    """A transfer's sides count what it passes over."""
    kernel = by_hand("tensordesc<bf16[2, 4, 8, 64], steps [1, 2, 3, 1]>", formats=(MapFormat(9, 2, 3, (2, 4, 8, 64)),))
    stub.expect("miiiillll")
    assert call(kernel, pointers=[4096], integers=(0, 5, 6, 7, 64, 3000, 512, 64, 1)) is None
    sizes, strides = [64, 7, 6, 5], [128, 1024, 6000]
    assert stub.list("encode", 22) == [9, 4, 4096, *sizes, *strides, 64, 24, 8, 2, 1, 3, 2, 1, 0, 3, 2, 0]


@pytest.mark.cpu
def test_descriptors_between_other_parameters(stub):
    kernel = by_hand("i32", BF16, "*fp32", "i64", BF16, formats=(FORMAT, replace(FORMAT, box=(64, 64))))
    assert (kernel.pointers, kernel.integers, kernel.maps) == (3, 2 + 2 * 5, 2)
    stub.expect("imiillplmiill")
    integers = (7, 0, 100, 64, 64, 1, 2**40, 16, 30, 20, 24, 1)
    assert call(kernel, pointers=(1024, 2048, 4096), integers=integers) is None
    assert stub.list("arguments", 13) == [7, 1024, 100, 64, 64, 1, 2048, 2**40, 4096 + 32, 30, 20, 24, 1]
    assert stub["encodes"] == 2


@pytest.mark.cpu
def test_more_descriptors_than_fit_on_the_stack(stub):
    kernel = by_hand(*[BF16] * 14, formats=(FORMAT,) * 14)
    stub.expect("miill" * 14)
    addresses = range(64, 64 * 15, 64)
    assert call(kernel, pointers=addresses, integers=(0, 8, 8, 8, 1) * 14) is None
    assert stub.list("arguments", 70)[::5] == list(addresses)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("pointer", "integers", "problem"),
    [
        (1028, (0, 8, 8, 8, 1), "its address is not a multiple of 16"),
        (1024, (1, 8, 8, 8, 1), "its address is not a multiple of 16"),
        (1024, (0, 8, 8, 12, 1), "a stride of 12 elements is not a multiple of 16 bytes"),
        (1024, (0, 2**31, 8, 8, 1), "size 2147483648 does not fit 32 bits"),
    ],
)
def test_tensors_that_no_descriptor_describes(stub, pointer, integers, problem):
    message = call(by_hand(BF16), pointers=[pointer], integers=integers)
    assert message.startswith(problem)
    assert (stub["encodes"], stub["launches"]) == (0, 0)


@pytest.mark.cpu
def test_a_tensor_without_elements_gets_no_descriptor(stub):
    stub.expect("miill")
    assert call(by_hand(BF16), pointers=[0], integers=(0, 8, 0, 0, 1)) is None
    assert stub.list("arguments", 5) == [0, 8, 0, 0, 1]
    assert stub["encodes"] == 0


@pytest.mark.cpu
def test_encoding_in_a_thread_without_a_context(stub):
    kernel = by_hand(BF16)
    stub.expect("miill")
    problems = []
    thread = threading.Thread(target=lambda: problems.append(call(kernel, pointers=[1024], integers=(0, 8, 8, 8, 1))))
    thread.start()
    thread.join()
    assert problems == [None]


# ---- programs ---------------------------------------------------------------------------------------------------------


def copy_format(dtype: torch.dtype, box: tuple[int, int] = (32, 64)) -> MapFormat:
    return {torch.float32: MapFormat(7, 4, 3, box), torch.bfloat16: MapFormat(9, 2, 3, box)}[dtype]


def loaded(made: Assembled, *formats: MapFormat) -> Any:
    [kernel] = made.launches
    machine_code = compiled("copy_blocks", kernel.signature, divisible=kernel.divisible, maps=formats)
    return native.load(pickle.loads(pickle.dumps(made.program)), launches=[launch.load_kernel(machine_code, [0])])


def copy_program(x: torch.Tensor, **more: bool) -> Any:
    return loaded(tma.assembled(tma.copied, tma.copy_call, (x,), **more), *[copy_format(x.dtype)] * 2)


@pytest.mark.cpu
def test_a_copy_of_every_size_and_stride(stub):
    run = copy_program(torch.randn(40, 72), dynamic=True)
    for shape in ((40, 72), (32, 64), (1, 4), (100, 200), (0, 8), (8, 0)):
        x = torch.randn(shape)
        [got] = run([x])
        assert torch.equal(got, x)
        assert got.shape == shape


@pytest.mark.cpu
def test_a_part_of_a_buffer(stub):
    x = torch.randn(40, 88)
    run = loaded(tma.assembled(tma.tail, tma.tail_call, (x,), dynamic=True), *[copy_format(torch.float32)] * 2)
    assert torch.equal(run([x])[0], x[:, 16:])
    x = torch.randn(3, 24)
    assert torch.equal(run([x])[0], x[:, 16:])


@pytest.mark.cpu
def test_equal_launches_encode_once(stub):
    run = copy_program(torch.randn(40, 72))
    x = torch.randn(40, 72)
    [first] = run([x])
    assert stub["encodes"] == 2
    where = first.data_ptr()
    del first
    [second] = run([x])
    assert torch.equal(second, x)
    assert stub["encodes"] == 2 + (second.data_ptr() != where)
    before, other = stub["encodes"], torch.randn(40, 72)
    [third] = run([other])
    assert torch.equal(third, other)
    assert stub["encodes"] > before, "x is elsewhere"


@pytest.mark.cpu
def test_each_launch_of_one_kernel_keeps_its_own_descriptors(stub):
    """And a change of size alone, at one address, is noticed."""
    kernel = by_hand("tensordesc<fp32[32, 64]>", "tensordesc<fp32[32, 64]>", function="copy_blocks",
                     formats=(copy_format(torch.float32),) * 2)  # fmt: skip
    spec = hp.SlotSpec(torch.float32, (0, 1), (1, 2), 3)
    launched = [
        hp.Launch(0, (0, 2), (3, 0, 1, 1, 2) * 2, (2, 2, 2), ("x", "out")),
        hp.Launch(0, (1, 3), (3, 0, 1, 1, 2) * 2, (2, 2, 2), ("y", "new")),
    ]
    inputs = tuple(hp.InputTensor(k, torch.float32, (None, None), None, ((0, "size", 0),)) for k in range(4))
    program = hp.Program(inputs, (0, 8, 1, 0), (spec,) * 4, tuple(launched), (), launches=("copy",))
    run = native.load(program, launches=[kernel])
    memory = [torch.randn(16, 8) for _ in range(2)] + [torch.zeros(16, 8) for _ in range(2)]
    for rows, encodes in ((8, 4), (8, 4), (16, 8), (16, 8)):
        run([tensor[:rows] for tensor in memory])
        assert torch.equal(memory[2][:rows], memory[0][:rows])
        assert torch.equal(memory[3][:rows], memory[1][:rows])
        assert stub["encodes"] == encodes
        assert rows == 16 or not memory[2][8:].any()


@pytest.mark.cpu
def test_threads_share_a_launch(stub):
    kernel = by_hand("tensordesc<fp32[4, 4]>", "tensordesc<fp32[4, 4]>", function="copy_blocks",
                     formats=(copy_format(torch.float32, (4, 4)),) * 2)  # fmt: skip
    run, _, create, destroy = launch.launch_functions()
    site = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(create)(kernel.handle)
    wrong = stub.library.stub_race(ctypes.c_void_p(run), ctypes.c_void_p(site), 300_000)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destroy)(site)
    assert wrong == 0


@pytest.mark.cpu
def test_inputs_behind_descriptors_are_aligned(stub):
    x = torch.randn(40 * 72 + 1)[1:].view(40, 72)
    assert x.data_ptr() % 16 == 4
    assert torch.equal(copy_program(torch.randn(40, 72))([x])[0], x)


@pytest.mark.cpu
def test_errors_name_the_kernel_and_the_buffer(stub):
    run = copy_program(torch.randn(40, 72), dynamic=True)
    with pytest.raises(TensorMapRefused, match=r"kernel copy .* of x_1: a stride of 71 elements .*sizes \[40, 71\]") as caught:
        run([torch.randn(40, 71)])
    assert caught.value.details["buffer"] == "x_1"
    assert stub["launches"] == 0
    stub["refuse_maps"] = 1
    with pytest.raises(TensorMapRefused, match=r"of x_1: CUDA_ERROR_OTHER .*blocks of \[32, 64\]"):
        run([torch.randn(40, 72)])
    stub["refuse_maps"] = 0
    x = torch.randn(40, 72)
    assert torch.equal(run([x])[0], x), "what was refused is not kept"


@pytest.mark.cpu
def test_a_program_and_its_kernel_agree_on_descriptors(stub):
    made = tma.assembled(tma.copied, tma.copy_call, (torch.randn(40, 72),))
    [item] = [item for item in made.program.code if isinstance(item, hp.Launch)]
    assert item.maps == ("x_1", item.maps[1])
    code = tuple(replace(i, maps=()) if i is item else i for i in made.program.code)
    with pytest.raises(InvalidProgram, match="2 slots and 10 registers \\(2 descriptors\\)"):
        loaded(replace(made, program=replace(made.program, code=code)), *[copy_format(torch.float32)] * 2)


@pytest.mark.cpu
def test_a_call_and_its_kernel_agree_on_descriptors():
    def wrong(change: Any) -> Any:
        return lambda *args: change(tma.copy_call(*args))

    def other_block(made: KernelCall) -> KernelCall:
        return replace(made, maps=(replace(made.maps[0], block=(64, 64)), made.maps[1]))

    x = torch.randn(40, 72)
    with pytest.raises(InvalidProgram, match=r"gets a descriptor of type tensordesc<fp32\[32, 64\]>"):
        tma.assembled(tma.copied, wrong(other_block), (x,))
    with pytest.raises(InvalidProgram, match="not None"):
        tma.assembled(tma.copied, wrong(lambda made: replace(made, maps=made.maps[:1])), (x,))
    with pytest.raises(InvalidProgram, match="has parameters for all"):
        tma.assembled(tma.copied, wrong(lambda made: replace(made, maps=(*made.maps, made.maps[0]))), (x,))


# ---- Triton's interpreter ---------------------------------------------------------------------------------------------


def interpreted(like: Any, kernel_call: Any, *args: torch.Tensor, dynamic: bool = False) -> HostGraph:
    made = tma.assembled(like, kernel_call, args, dynamic=dynamic, interpret=True)
    return HostGraph(Blueprint([], made.program, made.constants), (), made.callables)


@pytest.mark.interpret
@pytest.mark.cpu
def test_interpreted_copy():
    run = interpreted(tma.copied, tma.copy_call, torch.randn(40, 72), dynamic=True)
    for shape in ((40, 72), (32, 64), (1, 4), (0, 8), (8, 0)):
        x = torch.randn(shape)
        assert torch.equal(run([x])[0], x)
    with pytest.raises(TensorMapRefused, match=r"kernel copy .* of x_1: strides must be 16-byte aligned"):
        run([torch.randn(40, 71)])


@pytest.mark.interpret
@pytest.mark.cpu
def test_interpreted_parameters_in_any_order():
    example = (torch.randn(20, 40), torch.randn(20, 40), torch.randn(40))
    run = interpreted(tma.added, tma.add_call, *example, dynamic=True)
    for rows, columns in ((20, 40), (33, 64), (5, 68)):
        x, y, bias = torch.randn(rows, columns), torch.randn(rows, columns), torch.randn(columns)
        assert torch.equal(run([x, y, bias])[0], x + y + bias)


@pytest.mark.interpret
@pytest.mark.cpu
def test_interpreted_part_of_a_buffer():
    x = torch.randn(40, 88)
    assert torch.equal(interpreted(tma.tail, tma.tail_call, x)([x])[0], x[:, 16:])


@pytest.mark.interpret
@pytest.mark.cpu
def test_interpreted_images():
    x = torch.randn(3, 7, 10, 24)
    assert torch.equal(interpreted(tma.copied, tma.shift_call, x)([x])[0], tma.shifted(x))


@pytest.mark.interpret
@pytest.mark.cpu
def test_interpreted_matmul():
    x, y = torch.randn(70, 56).half(), torch.randn(56, 88).half()
    run = interpreted(tma.matmul_like, tma.matmul_call, x, y, dynamic=True)
    torch.testing.assert_close(run([x, y])[0], x @ y)
    for depth in (8, 0):
        x, y = torch.randn(70, depth).half(), torch.randn(depth, 88).half()
        torch.testing.assert_close(run([x, y])[0], x @ y)
