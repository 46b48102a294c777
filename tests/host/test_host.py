"""The native runtime on hand-written programs: memory, views, externs, checks, errors, threads."""

from __future__ import annotations

import gc
import pickle
import sys
import threading
import warnings
import weakref
from dataclasses import replace

import pytest
import torch

from kgen.build import cpp
from kgen.errors import InputMismatch, InvalidProgram
from kgen.host import native
from kgen.host.program import (
    Alias,
    Alloc,
    ArgConst,
    ArgInt,
    ArgList,
    ArgTensor,
    BindSize,
    Compute,
    Extern,
    Free,
    InputIgnored,
    InputInt,
    InputTensor,
    Kernel,
    OutConst,
    OutInt,
    OutTensor,
    Program,
    PythonCall,
    Reuse,
    SlotSpec,
    accept_saved,
    verify,
)

pytestmark = pytest.mark.cpu

F32 = torch.float32

SOURCE = """
#include <cstdint>
extern "C" int add(void** p, const int64_t* n, int) {
  auto *x = (const float*)p[0], *y = (const float*)p[1];
  auto* out = (float*)p[2];
  for (int64_t i = 0; i < n[0]; ++i) out[i] = x[i] + y[i];
  return 0;
}
extern "C" int fill(void** p, const int64_t* n, int) {
  for (int64_t i = 0; i < n[0]; ++i) ((float*)p[0])[i] = (float)n[1];
  return 0;
}
extern "C" int threads(void** p, const int64_t*, int threads) { return *(int64_t*)p[0] = threads, 0; }
extern "C" int address(void** p, const int64_t*, int) { return *(int64_t*)p[1] = (int64_t)p[0], 0; }
extern "C" int fail(void**, const int64_t*, int) { return 1; }
"""
KERNELS = ("add", "fill", "threads", "address", "fail")
ADD, FILL, THREADS, ADDRESS, FAIL = range(5)


@pytest.fixture(scope="module")
def library():
    return cpp.load_library(cpp.build_unit("host_test", SOURCE, include_dirs=[]))


class Builder:
    """Collects registers and slots, so that a test reads as a list of instructions."""

    def __init__(self):
        self.registers: list[int] = []
        self.slots: list[SlotSpec] = []

    def reg(self, value=0):
        self.registers.append(value)
        return len(self.registers) - 1

    def regs(self, values):
        return tuple(self.reg(v) for v in values)

    def slot(self, sizes, strides=None, offset=0, dtype=F32):
        strides = strides if strides is not None else torch.empty(sizes).stride()
        self.slots.append(SlotSpec(dtype, self.regs(sizes), self.regs(strides), self.reg(offset)))
        return len(self.slots) - 1

    def tensor(self, slot):
        spec = self.slots[slot]
        return InputTensor(slot, spec.dtype, spec.sizes, spec.strides)

    def out(self, slot, of=None):
        spec = self.slots[slot if of is None else of]
        return OutTensor(slot, spec.sizes, spec.strides, spec.offset, spec.dtype)

    def arg(self, slot, of=None):
        spec = self.slots[slot if of is None else of]
        return ArgTensor(slot, spec.sizes, spec.strides, spec.offset, spec.dtype)

    def program(self, inputs, code, outputs, **more):
        return Program(tuple(inputs), tuple(self.registers), tuple(self.slots), tuple(code), tuple(outputs), KERNELS, **more)


@pytest.fixture
def b():
    return Builder()


@pytest.fixture
def load(library):
    return lambda program, **more: native.load(pickle.loads(pickle.dumps(program)), [library], **more)


def run(runner, *args):
    boxed = list(args)
    del args
    return runner(boxed)


def test_one_kernel_and_the_list_is_cleared(b, load):
    x, y, out = b.slot((3, 4)), b.slot((3, 4)), b.slot((3, 4))
    code = [Alloc(out), Kernel(ADD, (x, y, out), (b.reg(12),))]
    runner = load(b.program([b.tensor(x), b.tensor(y)], code, [b.out(out)]))
    inputs = [torch.randn(3, 4), torch.randn(3, 4)]
    expected = inputs[0] + inputs[1]
    [result] = runner(inputs)
    assert inputs == []
    assert torch.equal(result, expected)
    assert result.stride() == (4, 1)
    assert runner._boxed_call


def test_sizes_are_bound_and_computed(b, load):
    n, numel = b.reg(), b.reg()
    spec = (n, b.reg(4))
    strides = (b.reg(4), b.reg(1))
    b.slots = [SlotSpec(F32, spec, strides, b.reg(0)) for _ in range(3)]
    inputs = [InputTensor(0, F32, spec, strides, ((n, "size", 0),)), b.tensor(1)]
    code = [Alloc(2), Kernel(ADD, (0, 1, 2), (numel,))]
    program = b.program(inputs, code, [b.out(2), OutInt(numel)], computes=(Compute(numel, "mul", *spec),))
    runner = load(program)
    for rows in (0, 1, 7):
        x = torch.randn(rows, 4)
        result, count = run(runner, x, x)
        assert torch.equal(result, x + x)
        assert count == rows * 4
    with pytest.raises(InputMismatch, match=r"argument 1 .*\[2, 4\].*compiled for .*\[3, 4\]"):
        run(runner, torch.zeros(3, 4), torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("op", "a", "b_", "expected"),
    [
        ("add", 5, -7, -2), ("sub", 5, 7, -2), ("mul", -3, 4, -12), ("floordiv", -7, 2, -4), ("floordiv", 7, 0, 0),
        ("mod", -7, 4, 1), ("min", 3, -1, -1), ("max", 3, -1, 3), ("pow", 3, 4, 81), ("shl", 3, 2, 12), ("shr", 12, 2, 3),
        ("and", 6, 3, 2), ("or", 6, 3, 7), ("xor", 6, 3, 5), ("lt", 1, 2, 1), ("le", 2, 1, 0), ("eq", 2, 2, 1),
        ("select", 0, 5, 9),
    ],
)  # fmt: skip
def test_compute(b, load, op, a, b_, expected):
    dst = b.reg()
    item = Compute(dst, op, b.reg(a), b.reg(b_), b.reg(9))
    runner = load(b.program([], [item], [OutInt(dst)]))
    assert run(runner) == [expected]


def test_input_checks(b, load):
    x = b.slot((2, 3))
    runner = load(b.program([b.tensor(x), InputInt(b.reg(4), check=True), InputIgnored()], [], [b.out(x)]))
    good = torch.zeros(2, 3)
    assert run(runner, good, 4, None)[0] is good
    for bad in (
        torch.zeros(3, 2),
        torch.zeros(2, 3).double(),
        torch.zeros(3, 2).t(),
        torch.zeros(6),
        torch.zeros(2, 3, device="meta"),
        1.0,
    ):
        with pytest.raises(InputMismatch, match="argument 0"):
            run(runner, bad, 4, None)
    with pytest.raises(InputMismatch, match="argument 1 of a compiled graph has the value 5, but the graph was compiled for 4"):
        run(runner, good, 5, None)
    with pytest.raises(InputMismatch, match="a list of 1"):
        run(runner, good)
    with pytest.raises(TypeError):
        runner(good, good)


def test_strides_do_not_matter_where_no_element_is_passed(b, load):
    x = b.slot((1, 3), (3, 1))
    runner = load(b.program([b.tensor(x)], [], []))
    run(runner, torch.zeros(5, 3).as_strided((1, 3), (77, 1)))
    empty = Builder()
    x = empty.slot((0, 3), (3, 1))
    run(load(empty.program([empty.tensor(x)], [], [])), torch.zeros(3, 0).t())


def test_input_data_starts_at_the_tensors_own_offset(b, load):
    """The graph was traced with a tensor at storage offset 3, and is called with one at 7."""
    x, out = b.slot((2,), offset=3), b.slot((2,))
    before = ArgTensor(x, b.regs((1,)), b.regs((1,)), b.reg(2), F32)
    shifted = OutTensor(x, before.sizes, before.strides, before.offset, F32)
    code = [Alloc(out), Kernel(ADD, (x, x, out), (b.reg(2),))]
    runner = load(b.program([b.tensor(x)], code, [b.out(out), b.out(x), shifted]))
    base = torch.arange(20.0)
    view = base[7:9]
    doubled, same, left = run(runner, view)
    assert torch.equal(doubled, view * 2)
    assert same is view
    assert left.item() == 6
    assert left.storage_offset() == 6


def test_views_of_one_storage(b, load):
    """An allocation seen transposed, sliced and as integers: three outputs on one storage."""
    x, flat, t = b.slot((6,)), b.slot((2, 3)), b.slot((3, 2), (1, 3))
    row, bits = b.slot((3,), offset=3), b.slot((6,), dtype=torch.int32)
    code = [Alloc(flat), Kernel(ADD, (x, x, flat), (b.reg(6),)), Alias(t, flat)]
    runner = load(b.program([b.tensor(x)], code, [b.out(t), b.out(flat, of=row), b.out(flat, of=bits), b.out(flat)]))
    [transposed, last_row, as_int, whole] = run(runner, torch.arange(6.0))
    assert torch.equal(whole, torch.arange(6.0).mul(2).view(2, 3))
    assert torch.equal(transposed, whole.t())
    assert torch.equal(last_row, whole[1])
    assert torch.equal(as_int, whole.view(torch.int32).flatten())
    assert len({o.untyped_storage().data_ptr() for o in (transposed, last_row, as_int, whole)}) == 1
    assert whole.untyped_storage().nbytes() == 24


def test_mutated_input_is_returned_itself(b, load):
    x, new, y = b.slot((4,)), b.slot((4,)), b.slot((4,))
    code = [Alias(new, x), Kernel(ADD, (x, y, new), (b.reg(4),))]
    runner = load(b.program([b.tensor(x), b.tensor(y)], code, [b.out(new)]))
    target = torch.ones(4, requires_grad=True)
    [result] = run(runner, target, torch.ones(4))
    assert result is target
    assert result.tolist() == [2] * 4


def test_reuse_frees_once_and_refuses_what_is_too_small(b, load):
    x, a, c = b.slot((4,)), b.slot((4,)), b.slot((2, 2))
    code = [Alloc(a), Kernel(ADD, (x, x, a), (b.reg(4),)), Reuse(c, a), Kernel(ADD, (a, a, c), (b.reg(4),))]
    runner = load(b.program([b.tensor(x)], code, [b.out(c)]))
    assert run(runner, torch.ones(4))[0].flatten().tolist() == [4] * 4
    small = Builder()
    x, big = small.slot((2,)), small.slot((9,))
    program = small.program([], [Alloc(x), Reuse(big, x)], [])
    with pytest.raises(RuntimeError, match="needs 36 bytes"):
        run(load(program))


def test_free_of_a_base_waits_for_its_alias(b, load):
    a, alias = b.slot((4,)), b.slot((4,))
    code = [Alloc(a), Kernel(FILL, (a,), (b.reg(4), b.reg(7))), Alias(alias, a), Free(a)]
    runner = load(b.program([], code, [b.out(alias)]))
    assert run(runner)[0].tolist() == [7] * 4


def test_inputs_die_at_their_last_use(b, load):
    x, y = b.slot((4,)), b.slot((4,))
    alive: list[bool] = []
    code = [
        Extern("aten::mul", "Tensor", (b.arg(x), ArgConst(2.0)), (), (y,)),
        PythonCall(0, ()),
    ]
    runner = load(b.program([b.tensor(x)], code, [b.out(y)]), callables=[lambda: alive.append(watch() is not None)])
    boxed = [torch.ones(4)]
    watch = weakref.ref(boxed[0])
    runner(boxed)
    gc.collect()
    assert alive == [False]


@pytest.mark.parametrize("borrowed", [False, True])
def test_inputs_of_kernels_die_at_their_last_use_unless_the_caller_keeps_them(b, load, borrowed):
    x, y = b.slot((4,)), b.slot((4,))
    alive: list[bool] = []
    code = [Alloc(y), Kernel(ADD, (x, x, y), (b.reg(4),)), PythonCall(0, ())]
    runner = load(b.program([b.tensor(x)], code, [b.out(y)]), callables=[lambda: alive.append(watch() is not None)])
    boxed = [torch.ones(4)]
    watch = weakref.ref(boxed[0])
    kept = boxed[0] if borrowed else None
    [result] = runner(boxed)
    assert result.tolist() == [2] * 4
    assert alive == [borrowed]
    if borrowed:
        references = sys.getrefcount(kept)
        runner([kept])
        assert sys.getrefcount(kept) == references


def test_small_results_own_their_memory(b, load):
    """Small blocks are used again, but only when nobody has them, whichever thread set them free."""
    out, value = b.slot((4,)), b.reg()
    code = [Alloc(out), Kernel(FILL, (out,), (b.reg(4), value))]
    runner = load(b.program([InputInt(value)], code, [b.out(out), b.out(out)]))
    kept = []
    for n in range(100):
        first, again = run(runner, n)
        assert first is again
        kept.append(first)
    assert [t[0].item() for t in kept] == list(range(100))
    assert len({t.data_ptr() for t in kept}) == 100
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    small, other = run(runner, 7)[0], run(runner, 8)[0]
    small.untyped_storage().resize_(4000)
    small.resize_(1000).fill_(3)
    assert other.tolist() == [8] * 4
    assert small.sum().item() == 3000


def test_constants(b, load):
    weight, x, out = b.slot((4,)), b.slot((4,)), b.slot((4,))
    constant = torch.arange(4.0)
    code = [Alloc(out), Kernel(ADD, (weight, x, out), (b.reg(4),))]
    program = b.program(
        [b.tensor(x)], code, [b.out(out), b.out(weight), OutConst("text"), OutConst(None)], constants=((weight, 0),)
    )
    runner = load(program, constants=[constant])
    for _ in range(2):
        result, same, text, nothing = run(runner, torch.ones(4))
        assert torch.equal(result, constant + 1)
        assert same is constant
        assert (text, nothing) == ("text", None)


def test_extern_into_planned_memory_and_fresh(b, load):
    x, y, out, fresh = b.slot((3, 4)), b.slot((4, 2)), b.slot((3, 2)), b.slot((2, 3), (1, 2))
    code = [
        Alloc(out),
        Extern("aten::mm", "out", (b.arg(x), b.arg(y)), (("out", b.arg(out)),), ()),
        Extern("aten::t", "default", (b.arg(out),), (), (fresh,)),
    ]
    runner = load(b.program([b.tensor(x), b.tensor(y)], code, [b.out(out), b.out(fresh)]))
    x, y = torch.randn(3, 4), torch.randn(4, 2)
    matmul, transposed = run(runner, x, y)
    assert torch.equal(matmul, x @ y)
    assert torch.equal(transposed, matmul.t())
    assert transposed.data_ptr() == matmul.data_ptr()


def test_extern_arguments_of_every_kind(b, load):
    x, y, mask = b.slot((2, 3)), b.slot((2, 3)), b.slot((2,), dtype=torch.int64)
    cat, summed, indexed, filled, scaled = b.slot((4, 3)), b.slot((3,)), b.slot((2, 3)), b.slot((2, 5)), b.slot((2, 3))
    code = [
        Extern("aten::cat", "default", (ArgList((b.arg(x), b.arg(y))), ArgInt(b.reg(0))), (), (cat,)),
        Extern(
            "aten::sum", "dim_IntList", (b.arg(x), ArgList((ArgInt(b.reg(0)),))), (("keepdim", ArgConst(False)),), (summed,)
        ),
        Extern("aten::index", "Tensor", (b.arg(x), ArgList((b.arg(mask), ArgConst(None)))), (), (indexed,)),
        Extern(
            "aten::full",
            "",
            (ArgList((ArgConst(2), ArgConst(5))), ArgInt(b.reg(3))),
            (("dtype", ArgConst(F32)), ("device", ArgConst(torch.device("cpu")))),
            (filled,),
        ),
        Extern("aten::mul", "Tensor", (b.arg(x), ArgConst(2)), (), (scaled,)),
    ]
    inputs = [b.tensor(x), b.tensor(y), b.tensor(mask)]
    runner = load(b.program(inputs, code, [b.out(s) for s in (cat, summed, indexed, filled, scaled)]))
    x, y, rows = torch.randn(2, 3), torch.randn(2, 3), torch.tensor([1, 0])
    got = run(runner, x, y, rows)
    expected = [torch.cat([x, y]), x.sum(0), x[rows], torch.full((2, 5), 3.0), x * 2]
    for one, two in zip(got, expected, strict=True):
        assert torch.equal(one, two)
        assert one.dtype == two.dtype


def test_extern_results_list_none_and_integer(b, load):
    x, first, second = b.slot((5, 2)), b.slot((2, 2)), b.slot((3, 2), offset=0)
    item, count = b.slot((), dtype=torch.int64), b.reg()
    code = [
        Extern("aten::split_with_sizes", "", (b.arg(x), ArgList((ArgConst(2), ArgConst(3)))), (), (first, second)),
        Extern("aten::_local_scalar_dense", "", (b.arg(item),), (), (None,), ((0, count),)),
    ]
    runner = load(b.program([b.tensor(x), b.tensor(item)], code, [b.out(first), b.out(second), OutInt(count)]))
    x = torch.randn(5, 2)
    one, two, number = run(runner, x, torch.tensor(41))
    assert torch.equal(one, x[:2])
    assert torch.equal(two, x[2:])
    assert number == 41
    assert two.data_ptr() == x[2:].data_ptr()


def test_absent_result_is_none(b, load):
    x, weight = b.slot((2, 3, 4, 4)), b.slot((3, 3, 1, 1))
    grad_in, grad_weight = b.slot((2, 3, 4, 4)), b.slot((3, 3, 1, 1))

    def pair(value):
        return ArgList((ArgConst(value), ArgConst(value)))

    mask = ArgList((ArgConst(False), ArgConst(True), ArgConst(False)))
    args = (
        b.arg(x),
        b.arg(x),
        b.arg(weight),
        ArgConst(None),
        pair(1),
        pair(0),
        pair(1),
        ArgConst(False),
        pair(0),
        ArgConst(1),
        mask,
    )
    code = [Extern("aten::convolution_backward", "", args, (), (grad_in, grad_weight, None))]
    runner = load(b.program([b.tensor(x), b.tensor(weight)], code, [OutTensor(grad_in), b.out(grad_weight)]))
    absent, present = run(runner, torch.randn(2, 3, 4, 4), torch.randn(3, 3, 1, 1))
    assert absent is None
    assert present.shape == (3, 3, 1, 1)


def test_result_with_other_strides_than_promised_is_copied(b, load):
    x, made, out = b.slot((2, 3)), b.slot((3, 2)), b.slot((3, 2))
    code = [
        Extern("aten::t", "", (b.arg(x),), (), (made,)),
        Alloc(out),
        Kernel(ADD, (made, made, out), (b.reg(6),)),
    ]
    runner = load(b.program([b.tensor(x)], code, [b.out(out)]))
    x = torch.randn(2, 3)
    assert torch.equal(run(runner, x)[0], x.t() * 2)


def test_result_with_other_sizes_than_promised_is_an_error(b, load):
    """Whether a kernel reads it, or a call reads it through a view of the promised geometry."""
    x, made, out, flat = b.slot((2, 3)), b.slot((2, 2)), b.slot((2, 2)), b.slot((4,))
    call = Extern("aten::t", "", (b.arg(x),), (), (made,))
    kernel = [Alloc(out), Kernel(ADD, (made, made, out), (b.reg(4),))]
    for code in ([call, *kernel], [call, Extern("aten::neg", "", (b.arg(made, flat),), (), (out,))]):
        runner = load(b.program([b.tensor(x)], code, [b.out(out)]))
        with pytest.raises(RuntimeError, match=r"aten::t returned .*\[3, 2\].*promised .*\[2, 2\]"):
            run(runner, torch.randn(2, 3))


def test_result_with_other_sizes_than_promised_is_passed_on(b, load):
    """To other calls, to the caller, and from a forward to its backward."""
    x, made, out = b.slot((2, 3)), b.slot((2, 2)), b.slot((2, 2))
    code = [Extern("aten::t", "", (b.arg(x),), (), (made,)), Extern("aten::neg", "", (b.arg(made),), (), (out,))]
    x_ = torch.randn(2, 3)
    turned, negated = run(load(b.program([b.tensor(x)], code, [b.out(made), b.out(out)])), x_)
    assert torch.equal(turned, x_.t())
    assert torch.equal(negated, -x_.t())

    backward = b.program([b.tensor(made)], code[1:], [b.out(out)])
    with pytest.raises(InputMismatch):
        run(load(backward), turned)
    assert torch.equal(run(load(accept_saved(backward)), turned)[0], negated)


def test_result_of_another_type_than_promised_is_passed_on(b, load):
    """Attention says that its sums are of 32 bits, and gives 64 where its queries are of 64. No kernel may read them."""
    x, made, out = b.slot((2, 2), dtype=torch.float64), b.slot((2, 2)), b.slot((2, 2))
    code = [Extern("aten::neg", "", (b.arg(x),), (), (made,)), Extern("aten::neg", "", (b.arg(made),), (), (out,))]
    x_ = torch.randn(2, 2, dtype=torch.float64)
    negated, back = run(load(b.program([b.tensor(x)], code, [b.out(made), b.out(out)])), x_)
    assert torch.equal(negated, -x_)
    assert torch.equal(back, x_)
    exact = replace(b.out(made), exact=True)  # as a result whose strides eager has in dimensions of length 1
    assert torch.equal(run(load(b.program([b.tensor(x)], code[:1], [exact])), x_)[0], -x_)

    backward = b.program([b.tensor(made)], code[1:], [b.out(out)])
    with pytest.raises(InputMismatch):
        run(load(backward), negated)
    assert torch.equal(run(load(accept_saved(backward)), negated)[0], x_)

    kernel = [Alloc(out), Kernel(ADD, (made, made, out), (b.reg(4),))]
    with pytest.raises(RuntimeError, match=r"aten::neg returned double .*promised float"):
        run(load(b.program([b.tensor(x)], [code[0], *kernel], [b.out(out)])), x_)


def test_a_saved_tensor_that_is_passed_on_may_be_on_another_device(b, load):
    """Attention says that its seeds are on the GPU, and gives them on the CPU."""
    seed, out = b.slot(()), b.slot(())
    program = b.program([b.tensor(seed)], [Extern("aten::neg", "", (b.arg(seed),), (), (out,))], [b.out(out)])
    elsewhere = torch.empty((), device="meta")
    with pytest.raises(InputMismatch, match=r"on meta, but the graph was compiled for .* on cpu"):
        run(load(program), elsewhere)
    assert run(load(accept_saved(program)), elsewhere)[0].device.type == "meta"


def test_a_saved_tensor_that_a_kernel_reads_has_its_sizes(b, load):
    x, out = b.slot((2, 2)), b.slot((2, 2))
    program = b.program([b.tensor(x)], [Alloc(out), Kernel(ADD, (x, x, out), (b.reg(4),))], [b.out(out)])
    with pytest.raises(InputMismatch):
        run(load(accept_saved(program)), torch.randn(3, 2))


def test_unbacked_sizes(b, load):
    x = b.slot((6,))
    count, doubled, one, zero = b.reg(), b.reg(), b.reg(1), b.reg(0)
    b.slots += [SlotSpec(torch.int64, (count, one), (one, count), zero), SlotSpec(F32, (count,), (one,), zero)]
    code = [
        Extern("aten::nonzero", "default", (b.arg(x),), (), (1,)),
        BindSize(count, 1, 0),
        Compute(doubled, "add", count, count),
        Alloc(2),
        Kernel(FILL, (2,), (count, doubled)),
    ]
    runner = load(b.program([b.tensor(x)], code, [OutTensor(1), b.out(2), OutInt(doubled)]))
    x = torch.tensor([0.0, 1, 0, 2, 3, 0])
    found, filled, number = run(runner, x)
    assert torch.equal(found, x.nonzero())
    assert filled.tolist() == [6.0] * 3
    assert number == 6
    assert run(runner, torch.zeros(6))[1].shape == (0,)


def test_python_call(b, load):
    x, y = b.slot((3,)), b.slot((3,))
    seen = []

    def call(tensors, number, *, label):
        seen.append((number, label, torch.is_grad_enabled()))
        return tensors[0] * number, 5

    count = b.reg()
    args = (ArgList((b.arg(x), ArgConst("s"))), ArgInt(b.reg(3)))
    code = [PythonCall(0, args, (("label", ArgConst("here")),), (y,), ((1, count),))]
    runner = load(b.program([b.tensor(x)], code, [b.out(y), OutInt(count)]), callables=[call])
    result, number = run(runner, torch.ones(3))
    assert result.tolist() == [3] * 3
    assert number == 5
    assert seen[0][:2] == (3, "here")


def test_exceptions_are_pythons(b, load):
    x = b.slot((3,))

    def bad():
        raise KeyError("mine")

    failing = load(b.program([b.tensor(x)], [PythonCall(0, ())], []), callables=[bad])
    with pytest.raises(KeyError, match="mine"):
        run(failing, torch.ones(3))
    out_of_range = load(b.program([b.tensor(x)], [Extern("aten::select", "int", (b.arg(x), ArgConst(0), ArgConst(9)))], []))
    with pytest.raises(IndexError):
        run(out_of_range, torch.ones(3))
    with pytest.raises(RuntimeError, match="no_such_op"):
        load(b.program([b.tensor(x)], [Extern("aten::no_such_op", "", ())], []))
    with pytest.raises(RuntimeError, match="missing"):
        load(b.program([b.tensor(x)], [Extern("aten::mm", "", (b.arg(x),))], []))
    assert run(load(b.program([b.tensor(x)], [], [b.out(x)])), torch.ones(3))[0].tolist() == [1] * 3


def test_a_kernel_that_finds_an_index_out_of_range(b, load):
    x = b.slot((3,))
    with pytest.raises(IndexError, match="out of range in a kernel"):
        run(load(b.program([b.tensor(x)], [Kernel(FAIL, (x,))], [])), torch.ones(3))


def test_custom_operators_in_python_and_their_errors(b, load):
    with torch.library._scoped_library("kgen_host_test", "DEF") as library:
        library.define("twice(Tensor x, bool fail=False) -> Tensor")

        def doubled(x, fail=False):
            if fail:
                raise ZeroDivisionError("asked for")
            return x * 2

        library.impl("twice", doubled, "CompositeExplicitAutograd")
        x, y = b.slot((3,)), b.slot((3,))
        good = load(b.program([b.tensor(x)], [Extern("kgen_host_test::twice", "default", (b.arg(x),), (), (y,))], [b.out(y)]))
        assert run(good, torch.ones(3))[0].tolist() == [2] * 3
        args = (b.arg(x), ArgConst(True))
        bad = load(b.program([b.tensor(x)], [Extern("kgen_host_test::twice", "default", args, (), (y,))], []))
        with pytest.raises(ZeroDivisionError, match="asked for"):
            run(bad, torch.ones(3))


def test_warnings_are_pythons(b, load):
    x, y = b.slot((3,)), b.slot((3,))

    def call(tensor):
        warnings.warn("from inside", UserWarning, stacklevel=1)
        return tensor

    runner = load(b.program([b.tensor(x)], [PythonCall(0, (b.arg(x),), (), (y,))], [b.out(y)]), callables=[call])
    with pytest.warns(UserWarning, match="from inside"):
        run(runner, torch.ones(3))


def test_runs_below_autograd_and_autocast(b, load):
    x, y = b.slot((4, 4)), b.slot((4, 4))
    runner = load(b.program([b.tensor(x)], [Extern("aten::mm", "", (b.arg(x), b.arg(x)), (), (y,))], [b.out(y)]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        [result] = run(runner, torch.ones(4, 4, requires_grad=True))
    assert result.dtype == F32
    assert not result.requires_grad
    with torch.inference_mode():
        assert run(runner, torch.ones(4, 4))[0].is_inference()


def test_complex_and_zero_size_and_scalar(b, load):
    x, y = b.slot((2,), dtype=torch.complex64), b.slot((2,), dtype=torch.complex64)
    empty, scalar = b.slot((0, 3)), b.slot(())
    code = [
        Extern("aten::mul", "Tensor", (b.arg(x), ArgConst(2j)), (), (y,)),
        Alloc(empty),
        Kernel(ADD, (empty, empty, empty), (b.reg(0),)),
        Extern("aten::zero_", "", (b.arg(empty),)),
        Alloc(scalar),
        Kernel(FILL, (scalar,), (b.reg(1), b.reg(3))),
    ]
    runner = load(b.program([b.tensor(x)], code, [b.out(y), b.out(empty), b.out(scalar)]))
    x = torch.tensor([1 + 1j, 2])
    doubled, nothing, three = run(runner, x)
    assert torch.equal(doubled, x * 2j)
    assert nothing.shape == (0, 3)
    assert three.item() == 3


def test_conjugated_input_keeps_its_meaning(b, load):
    x, y = b.slot((2,), dtype=torch.complex64), b.slot((2,), dtype=torch.complex64)
    runner = load(b.program([b.tensor(x)], [Extern("aten::mul", "Tensor", (b.arg(x), ArgConst(2)), (), (y,))], [b.out(y)]))
    x = torch.tensor([1 + 1j, 2j]).conj()
    assert torch.equal(run(runner, x)[0], x * 2)


def test_allocations_are_aligned_and_threads_are_torchs(b, load):
    out, address, count = b.slot((3,)), b.slot((), dtype=torch.int64), b.slot((), dtype=torch.int64)
    code = [Alloc(out), Alloc(address), Alloc(count), Kernel(ADDRESS, (out, address)), Kernel(THREADS, (count,))]
    runner = load(b.program([], code, [b.out(address), b.out(count)]))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            place, seen = run(runner)
            assert place.item() % 64 == 0
            assert seen.item() == threads
    finally:
        torch.set_num_threads(before)


def test_many_threads_and_inside_itself(b, load):
    x, y, out = b.slot((1000,)), b.slot((1000,)), b.slot((1000,))
    holder = []

    def nested(tensor, depth):
        return holder[0]([tensor, 0])[0] if depth else tensor * 2

    depth = b.reg()
    code = [PythonCall(0, (b.arg(x), ArgInt(depth)), (), (y,)), Alloc(out), Kernel(ADD, (x, y, out), (b.reg(1000),))]
    runner = load(b.program([b.tensor(x), InputInt(depth)], code, [b.out(out)]), callables=[nested])
    holder.append(runner)
    wrong = []

    def work(seed):
        x = torch.full((1000,), float(seed))
        wrong.extend(seed for _ in range(50) if not torch.equal(run(runner, x, 1)[0], x * 4))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_memory_does_not_grow(b, load):
    """Every path that holds references: inputs, views, externs, Python results, outputs, errors."""
    x, y = b.slot((4,)), b.slot((4,))
    code = [PythonCall(0, (b.arg(x), ArgInt(b.reg(3))), (), (y,)), Extern("aten::neg", "", (b.arg(y),), (), (None,))]
    runner = load(b.program([b.tensor(x)], code, [b.out(x), b.out(y), OutConst("c")]), callables=[lambda t, n: t * n])
    tensor = torch.ones(4)

    def cycle():
        for _ in range(100):
            run(runner, tensor)
            with pytest.raises(InputMismatch):
                run(runner, tensor.double())

    def living():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    cycle()
    before = living()
    cycle()
    assert living() <= before


def test_runner_is_freed(b, load):
    stored = torch.ones(3)
    watch = weakref.ref(stored)
    weight = b.slot((3,))
    runner = load(b.program([], [], [b.out(weight)], constants=((weight, 0),)), constants=[stored])
    runner.note = "attributes are allowed"
    gone = weakref.ref(runner)
    del runner, stored
    gc.collect()
    assert gone() is None
    assert watch() is None


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ([Kernel(0, (0,))], "0 is not defined"),
        ([Alloc(0), Alloc(0)], "defines each slot once"),
        ([Alloc(0), Free(0), Kernel(0, (0,))], "0 is freed"),
        ([Alloc(0), Kernel(9, (0,))], "one of 5 kernels"),
        ([Alloc(5)], "slots below 1"),
        ([Alloc(0), Kernel(0, (0,), (99,))], "registers below"),
        ([Compute(0, "sqrt", 0, 0)], "knows the operators"),
    ],
)
def test_malformed_programs_are_refused(b, code, message):
    b.slot((2,))
    with pytest.raises(InvalidProgram, match=message):
        verify(b.program([], code, []))


def test_unknown_kernel(b, library):
    program = Program((), (), (), (), (), kernels=("no_such_kernel",))
    with pytest.raises(InvalidProgram, match="no_such_kernel"):
        native.load(program, [library])
