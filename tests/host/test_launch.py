"""The launcher, and GPU launches in a program, against a driver that runs kernels on the CPU (stub_driver.cpp)."""

from __future__ import annotations

import ctypes
import pickle
import threading

import pytest
import torch
from program_builder import Builder
from stub_driver import DRIVER_VERSION, compiled, forget

from kgen.build import cpp
from kgen.device import driver_version
from kgen.errors import DriverNotFound, InvalidProgram, LaunchFailed
from kgen.host import launch, native
from kgen.host.program import (
    Alias,
    Alloc,
    ArgTensor,
    Extern,
    Free,
    InputInt,
    Kernel,
    Launch,
    OutTensor,
    Pick,
    Program,
    PythonCall,
    Reuse,
    verify,
)

pytestmark = pytest.mark.cpu

F32 = torch.float32
POINTERS = ("*fp32", "*fp32", "*fp32")


def call(kernel, device=0, stream=0, pointers=(), integers=(), grid=(1, 1, 1), scratch=()):
    """A direct call of the launcher: None, or what it complains about."""
    library = cpp.launcher_library()
    library.kgen_create_site.restype = ctypes.c_void_p
    site = ctypes.c_void_p(library.kgen_create_site(ctypes.c_void_p(kernel.handle)))

    def array(kind, values):
        return (kind * max(1, len(values)))(*values)

    bad = library.kgen_launch(
        site, device, ctypes.c_void_p(stream), array(ctypes.c_void_p, pointers),
        array(ctypes.c_int64, integers), array(ctypes.c_int64, grid), array(ctypes.c_void_p, scratch),
    )  # fmt: skip
    library.kgen_destroy_site(site)
    return library.kgen_launch_error().decode() if bad else None


# ---- the launcher alone -----------------------------------------------------------------------------------------------


def test_parameters_of_every_kind_arrive(stub):
    signature = ("*fp32", "i32", "*i1", "i64", "*bf16", "i32")
    kernel = launch.load_kernel(compiled("record", signature, warps=8, shared=100, scratch=(0, 64)), [0])
    stub.expect("piplpipp")
    assert call(kernel, 0, 77, (1000, 2000, 3000), (-5, 2**40, 2**31 - 1), (3, 4, 5), (0, 4096)) is None
    assert stub.list("arguments", 8) == [1000, -5, 2000, 2**40, 3000, 2**31 - 1, 0, 4096]
    assert stub.list("config", 8) == [3, 4, 5, 8 * 32, 100, 77, 100, 0]
    assert (kernel.pointers, kernel.integers, kernel.scratch) == (3, 3, (0, 64))


def test_more_parameters_than_fit_on_the_stack(stub):
    kernel = launch.load_kernel(compiled("record", ("*fp32",) * 70), [0])
    stub.expect("p" * 70)
    assert call(kernel, pointers=range(16, 16 * 71, 16)) is None
    assert stub.list("arguments", 70) == list(range(16, 16 * 71, 16))


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-1, 1, 1)])
def test_a_grid_without_programs_launches_nothing(stub, grid):
    kernel = launch.load_kernel(compiled("record", ("*fp32",)), [0])
    assert call(kernel, pointers=[3], grid=grid) is None
    assert stub["launches"] == 0


def test_numbers_that_the_kernel_was_not_compiled_for_are_refused(stub):
    signature, divisible = ("*fp32", "i32", "i64"), (True, False, True)
    kernel = launch.load_kernel(compiled("record", signature, divisible=divisible), [0])
    stub.expect("pil")
    assert call(kernel, pointers=[32], integers=(7, 48)) is None
    assert "my_record: parameter 0 is 40, which is not a multiple of 16" in call(kernel, pointers=[40], integers=(7, 48))
    assert "parameter 2 is 50, which is not a multiple of 16" in call(kernel, pointers=[32], integers=(7, 50))
    assert "parameter 1 is 2147483648, which does not fit" in call(kernel, pointers=[32], integers=(2**31, 48))
    assert "parameter 1 is -2147483649, which does not fit" in call(kernel, pointers=[32], integers=(-(2**31) - 1, 48))
    assert stub["launches"] == 1


def test_loaded_once_per_device_and_shared(stub):
    kernel = compiled("record", ())
    first = launch.load_kernel(kernel, [0, 1])
    assert launch.load_kernel(kernel, [1, 0]) == first
    assert stub["loads"] == 2
    stub.expect("")
    assert call(first, 1) is None
    assert call(first, 3) is None  # loaded by its first launch
    assert stub["loads"] == 3
    assert "there is no device 64" in call(first, 64)
    assert "loading kernel my_record: CUDA_ERROR_OTHER" in call(first, 5)


def test_shared_memory_above_the_default_is_asked_for(stub):
    launch.load_kernel(compiled("record", (), shared=48 * 1024), [0])
    assert stub["shared_limit"] == 0
    launch.load_kernel(compiled("record", (), shared=200_000), [0])
    assert stub["shared_limit"] == 200_000


def test_a_kernel_that_waits_by_itself_is_launched_early(stub):
    """CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION is 6; older drivers cannot record such launches in graphs."""
    early, other = (launch.load_kernel(compiled("record", (), early=early), [0]) for early in (True, False))
    stub.expect("")
    assert call(early) is None
    assert stub.list("config", 10)[7:] == [1, 6, 1]
    assert call(other) is None
    assert stub.list("config", 10)[7:] == [0, 0, 0]
    stub["driver_version"] = 12020
    forget()
    assert call(launch.load_kernel(compiled("record", (), early=True), [0])) is None
    assert stub.list("config", 10)[7:] == [0, 0, 0]


def test_errors_name_the_kernel_and_say_what_the_driver_says(stub):
    kernel = launch.load_kernel(compiled("record", ()), [0])
    stub.expect("")
    assert call(kernel) is None
    stub["fail_next"] = 700
    message = call(kernel, grid=(9, 8, 7))
    assert message == (
        "launching kernel my_record on a grid of 9 x 8 x 7: "
        "CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)"
    )
    assert "that is too many" in call(kernel, grid=(2**31, 1, 1))
    with pytest.raises(LaunchFailed, match="loading kernel my_nothing"):
        launch.load_kernel(compiled("nothing", ()), [0])
    with pytest.raises(LaunchFailed, match="loading kernel my_record"):
        launch.load_kernel(compiled("record", (), cubin=b"damaged\0"), [0])


def test_a_block_of_too_many_threads_is_found_when_the_kernel_is_loaded(stub):
    stub["most_threads"] = 127
    with pytest.raises(
        LaunchFailed, match=r"loading kernel my_record: it is launched with 128 threads a block, .* 127"
    ) as caught:
        launch.load_kernel(compiled("record", ()), [0])
    assert caught.value.details["kernel"] == "my_record"
    stub["most_threads"] = 128
    launch.load_kernel(compiled("record", ()), [0])


def test_a_thread_without_a_context_gets_one(stub):
    kernel = launch.load_kernel(compiled("record", ()), [2])
    stub.expect("")
    problems = []
    thread = threading.Thread(target=lambda: problems.extend([call(kernel, 2), call(kernel, 2)]))
    thread.start()
    thread.join()
    assert problems == [None, None]
    assert stub["contexts_set"] == 1
    assert stub.list("config", 7)[6] == 102


def test_the_version_of_the_driver(stub):
    """Asked of the driver itself: what torch binds for it comes and goes with torch's versions."""
    assert driver_version.__wrapped__(stub.library._name) == DRIVER_VERSION
    assert driver_version.__wrapped__("libnothing.so.7") == 0


def test_no_driver(monkeypatch):
    monkeypatch.setattr(launch, "DRIVER", "libnothing.so.7")
    with pytest.raises(DriverNotFound, match="libnothing"):
        launch.load_kernel(compiled("record", ()), [0])
    library = cpp.load_library(cpp.build_unit("no_driver", 'extern "C" int cuInit(unsigned) { return 0; }', include_dirs=[]))
    monkeypatch.setattr(launch, "DRIVER", library._name)
    with pytest.raises(DriverNotFound, match="has no function cuDriverGetVersion"):
        launch.load_kernel(compiled("record", ()), [0])


# ---- launches in a program ----------------------------------------------------------------------------------------------


@pytest.fixture
def b() -> Builder:
    return Builder()


@pytest.fixture
def load(stub):
    add = compiled("add", (*POINTERS, "i64"), divisible=(True, True, True, False))
    double_it = compiled("double_it", ("*fp32", "i32"), divisible=(True, False), scratch=(256 * 4,))

    def run(program: Program, **more):
        kernels = [launch.load_kernel(kernel, []) for kernel in (add, double_it)]
        return native.load(pickle.loads(pickle.dumps(program)), launches=kernels, **more)

    return run


def misaligned(*sizes: int, by: int = 4) -> torch.Tensor:
    """Random numbers whose data begins `by` bytes after a multiple of 16."""
    count = torch.Size(sizes).numel()
    memory = torch.randn(count + 4)
    found = memory[by // 4 : by // 4 + count].view(sizes)
    assert found.data_ptr() % 16 == by
    return found


def test_launches_in_order_with_computed_sizes_and_scratch(b, load, stub):
    x, y, out = b.slot((600,)), b.slot((600,)), b.slot((600,))
    code = [
        Alloc(out), Launch(0, (x, y, out), (b.reg(600),), b.regs((3, 1, 1))), Free(x),
        Launch(1, (out,), (b.reg(600),), b.regs((3, 1, 1))),
    ]  # fmt: skip
    runner = load(b.program([b.input(x), b.input(y)], code, [b.out(out)]))
    first, second = torch.randn(600), torch.randn(600)
    [result] = runner([first, second])
    torch.testing.assert_close(result, 2 * (first + second))
    assert stub["launches"] == 2


def test_one_of_two_launches_is_picked_with_its_own_grid(b, load, stub):
    """Both take all of `x`: it is freed after the pick, whichever ran. The scratch of the second is for its own blocks."""
    x, out = b.slot((600,)), b.slot((600,))
    n, length = b.reg(600), b.reg()
    items = Launch(0, (x, x, out), (n,), b.regs((3, 1, 1))), Launch(0, (x, x, out), (n,), b.regs((2, 1, 1)))
    code = [Alloc(out), Pick(length, (16,), items), Launch(1, (out,), (n,), b.regs((3, 1, 1)))]
    runner = load(b.program([b.input(x), InputInt(length)], code, [b.out(out)]))
    given = torch.randn(600)
    for size, blocks in ((16, 3), (17, 2)):
        stub["launches"] = 0
        [result] = runner([given, size])
        whole = blocks * 256
        torch.testing.assert_close(result[:whole], 4 * given[:whole])
        assert stub["launches"] == 2


def test_an_empty_grid_is_skipped(b, load, stub):
    x, out = b.slot((0,)), b.slot((0,))
    code = [Alloc(out), Launch(0, (x, x, out), (b.reg(0),), b.regs((0, 1, 1)))]
    [result] = load(b.program([b.input(x)], code, [b.out(out)]))([torch.empty(0)])
    assert result.shape == (0,)
    assert stub["launches"] == 0


def test_a_failed_launch_raises_and_nothing_leaks(b, load, stub):
    x, out = b.slot((4,)), b.slot((4,))
    code = [Alloc(out), Launch(0, (x, x, out), (b.reg(4),), b.regs((1, 1, 1)))]
    runner = load(b.program([b.input(x)], code, [b.out(out)]))
    stub["fail_next"] = 700
    with pytest.raises(RuntimeError, match=r"launching kernel my_add .*illegal memory access"):
        runner([torch.zeros(4)])
    stub["fail_next"] = 0
    assert torch.equal(runner([torch.ones(4)])[0], torch.full((4,), 2.0))


@pytest.mark.parametrize("by", [0, 4, 8, 12])
def test_misaligned_inputs_are_copied_and_mutated_ones_copied_back(b, load, by):
    x, y, out, new = b.slot((8,)), b.slot((8,)), b.slot((8,)), b.slot((8,))
    code = [
        Alloc(out), Launch(0, (x, y, out), (b.reg(8),), b.regs((1, 1, 1))),
        Alias(new, x), Launch(1, (new,), (b.reg(8),), b.regs((1, 1, 1))),
    ]  # fmt: skip
    inputs = [b.input(x, aligned=True, mutated=True), b.input(y, aligned=True)]
    runner = load(b.program(inputs, code, [b.out(out)]))
    first, second = misaligned(8, by=by), misaligned(8, by=by)
    before = first.clone()
    [result] = runner([first, second])
    assert torch.equal(result, before + second)
    assert torch.equal(first, 2 * before)


def test_an_input_that_need_not_be_aligned_reaches_the_launcher_as_it_is(b, load):
    x, out = b.slot((8,)), b.slot((8,))
    code = [Alloc(out), Launch(0, (x, x, out), (b.reg(8),), b.regs((1, 1, 1)))]
    runner = load(b.program([b.input(x)], code, [b.out(out)]))
    with pytest.raises(RuntimeError, match="not a multiple of 16"):
        runner([misaligned(8)])


def test_results_that_are_views_of_a_misaligned_input_are_views_of_the_callers(b, load):
    x, out, new = b.slot((8,)), b.slot((8,)), b.slot((8,))
    tail = OutTensor(x, b.regs((2,)), b.regs((1,)), b.reg(6), F32)
    code = [
        Alloc(out), Launch(0, (x, x, out), (b.reg(8),), b.regs((1, 1, 1))), Alias(new, x),
        Extern("aten::neg", "", (ArgTensor(new),), (), (None,)), Launch(1, (new,), (b.reg(8),), b.regs((1, 1, 1))),
    ]  # fmt: skip
    runner = load(b.program([b.input(x, aligned=True, mutated=True)], code, [b.out(out), b.out(new), tail]))
    given = misaligned(8)
    before = given.clone()
    result, same, view = runner([given])
    assert torch.equal(result, 2 * before)
    assert same is given
    assert torch.equal(given, 2 * before)
    view.zero_()
    assert torch.equal(given[6:], torch.zeros(2))


def test_what_is_read_around_a_misaligned_input_is_copied_too(b, load):
    """An alias reaches below and above the input, inside its storage."""
    x, wide, out = b.slot((2,), offset=4), b.slot((8,)), b.slot((8,))
    code = [Alias(wide, x), Alloc(out), Launch(0, (wide, wide, out), (b.reg(8),), b.regs((1, 1, 1)))]
    program = b.program([b.input(x, aligned=True)], code, [b.out(out)])
    memory = torch.randn(16)
    for start in (0, 3):  # the input at element start + 4
        [result] = load(program)([memory[start + 4 : start + 6]])
        assert torch.equal(result, 2 * memory[start : start + 8])


def test_a_misaligned_input_with_overlapping_elements(b, load):
    x, out = b.slot((3, 4), (0, 1)), b.slot((4,))
    code = [Alloc(out), Launch(0, (x, x, out), (b.reg(4),), b.regs((1, 1, 1)))]
    given = misaligned(4).expand(3, 4)
    [result] = load(b.program([b.input(x, aligned=True)], code, [b.out(out)]))([given])
    assert torch.equal(result, 2 * given[0])


def test_a_mutated_misaligned_input_between_another_ones_elements(b, load):
    """Two inputs take turns in one memory: copying one back must not bring old elements of the other back."""
    x, y = b.slot((8,), (2,)), b.slot((8,), (2,))
    nx, ny = b.slot((16,)), b.slot((16,))
    run = Launch(1, (nx,), (b.reg(15),), b.regs((1, 1, 1)))
    code = [Alias(nx, x), Alias(ny, y), run, Launch(1, (ny,), run.registers, run.grid)]
    flags = {"aligned": True, "mutated": True}
    memory = torch.randn(40)
    first, second = memory[1:16:2], memory[2:17:2]
    before = [first.clone(), second.clone()]
    load(b.program([b.input(x, **flags), b.input(y, **flags)], code, []))([first, second])
    assert torch.equal(first, 2 * before[0])
    assert torch.equal(second, 2 * before[1])


def test_misaligned_leaves_that_require_grad_are_no_obstacle(b, load):
    x, new = b.slot((8,)), b.slot((8,))
    code = [Alias(new, x), Launch(1, (new,), (b.reg(8),), b.regs((1, 1, 1)))]
    given = misaligned(8).requires_grad_()
    before = given.detach().clone()
    load(b.program([b.input(x, aligned=True, mutated=True)], code, []))([given])
    assert torch.equal(given.detach(), 2 * before)


def test_a_misaligned_result_of_a_call_is_copied(b, load):
    x, part, out = b.slot((8,)), b.slot((4,)), b.slot((4,))
    code = [
        PythonCall(0, (ArgTensor(x),), (), (part,), (), aligned=(part,)), Alloc(out),
        Launch(0, (part, part, out), (b.reg(4),), b.regs((1, 1, 1))),
    ]  # fmt: skip
    runner = load(b.program([b.input(x)], code, [b.out(out)]), callables=[lambda x: x[1:5]])
    given = torch.randn(8)
    assert torch.equal(runner([given])[0], 2 * given[1:5])


def test_cpu_kernels_and_launches_in_one_program(b, load):
    source = (
        "#include <cstdint>\n"
        'extern "C" int negate(void** p, const int64_t* n, int) {\n'
        "  for (int64_t i = 0; i < n[0]; ++i) ((float*)p[0])[i] = -((float*)p[0])[i];\n  return 0;\n}\n"
    )
    library = cpp.load_library(cpp.build_unit("negate", source, include_dirs=[]))
    x, out, new = b.slot((8,)), b.slot((8,)), b.slot((8,))
    count, grid = (b.reg(8),), b.regs((1, 1, 1))
    code = [
        Alloc(out),
        Launch(0, (x, x, out), count, grid),
        Kernel(0, (out,), count),
        Reuse(new, out),
        Launch(1, (new,), count, grid),
    ]
    runner = load(b.program([b.input(x)], code, [b.out(new)], kernels=("negate",)), libraries=[library])
    given = torch.randn(8)
    assert torch.equal(runner([given])[0], -4 * given)


def test_the_kernel_must_take_what_the_launch_gives(b, load):
    x = b.slot((8,))
    for launched in (Launch(0, (x, x), (b.reg(8),), b.regs((1, 1, 1))), Launch(0, (x, x, x), (), b.regs((1, 1, 1)))):
        with pytest.raises(InvalidProgram, match="3 slots and 1 registers"):
            load(b.program([b.input(x)], [launched], []))


def test_verification(b):
    x, y, g = b.slot((8,)), b.slot((8,), device="cuda:0"), b.slot((8,), device="cuda:1")
    grid = b.regs((1, 1, 1))
    inputs = [b.input(x), b.input(y), b.input(g)]
    verify(b.program(inputs, [Launch(0, (y,), (0,), grid)], []))
    for code, rule in [
        (Launch(2, (y,), (0,), grid), "names one of 2 kernels"),
        (Launch(0, (y, g), (0,), grid), "all of its slots on one device"),
        (Launch(0, (), (0,), grid), "all of its slots on one device"),
        (Launch(0, (y,), (99,), grid), "uses registers below"),
        (Launch(0, (y,), (0,), (0, 0, 99)), "uses registers below"),
        (Launch(0, (y,), (0,), (0, 0)), "a grid of three"),
        (Launch(0, (7,), (0,), grid), "reads only live slots"),
        (Kernel(0, (y,)), "runs on the CPU"),
        (Alloc(b.slot((8,), device="mps")), "allocates on the CPU or on CUDA"),
    ]:
        with pytest.raises(InvalidProgram, match=rule):
            verify(b.program(inputs, [code], [], kernels=("k",)))


def test_inputs_on_another_device_are_refused(b, load):
    from kgen.errors import InputMismatch

    x = b.slot((2,), device="meta")
    runner = load(b.program([b.input(x)], [], []))
    runner([torch.zeros(2, device="meta")])
    with pytest.raises(InputMismatch, match=r"on cpu, but the graph was compiled for .* on meta"):
        runner([torch.zeros(2)])
    y = Builder()
    slot = y.slot((2,))
    load(y.program([y.input(slot)], [], []))([torch.zeros(2, device="cpu:0")])
