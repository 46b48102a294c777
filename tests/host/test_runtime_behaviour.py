"""What a compiled function does when it runs, with the real back end: aliasing, mutation, layouts, threads, errors, modes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen import copied, misaligned, offset, stepped, tensors, turned
from slow import slow_but
from torch import Tensor, nn

import kgen
from kgen.build import toolchain

pytestmark = pytest.mark.cpu


def compiled(f: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    return torch.compile(f, backend="kgen", fullgraph=True, options={"cache": False}, **settings)


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def layout(t: Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1]


def aliases(values: list[Tensor]) -> list[list[bool]]:
    return [[a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for b in values] for a in values]


def check(f: Callable[..., Any], *args: Any) -> None:
    """Twice: values, layouts, changed arguments, and which results and arguments share storage."""
    run = compiled(f)
    for _ in range(2):
        with torch.no_grad():
            ours, theirs = copied(args), copied(args)
            got, want = tensors((run(*ours), ours)), tensors((f(*theirs), theirs))
        assert [layout(t) for t in got] == [layout(t) for t in want]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert aliases(got) == aliases(want)


# ---- aliasing and mutation ------------------------------------------------------------------------------------------


def test_results_alias_inputs_as_in_eager() -> None:
    check(lambda x: (x, x.t(), x[1:], x.view(-1), x.sin()), rand(3, 4))
    x = rand(3, 4)
    with torch.no_grad():
        same, view = compiled(lambda x: (x, x[1:]))(x)
    assert same is x
    assert view.data_ptr() == x[1:].data_ptr()


def test_results_do_not_alias_what_eager_copies() -> None:
    check(lambda x: (x.clone(), x.contiguous(), x + 0, x.t().contiguous()), rand(3, 4))
    check(lambda x: (x.reshape(4, 3), x.t().reshape(-1)), rand(3, 4))


def test_inputs_change_as_in_eager() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x.add_(y)
        x[0] = 7.0
        y.t().mul_(2.0)
        x[:, 1:3].copy_(y[:, 1:3].exp())
        return x * y, x[1], y.sum(0)

    check(f, rand(4, 4), rand(4, 4))
    check(f, turned(rand(4, 4)), stepped(rand(4, 4)))


def test_an_input_is_overwritten_by_a_number() -> None:
    def f(x: Tensor) -> Tensor:
        y = x + 1
        x.copy_(0.5)  # torch's tracing leaves the number as it is
        return y * x

    check(f, rand(4, 5))


def test_a_write_between_two_reads() -> None:
    """The read before a write may stand in a later loop of the same kernel; it still sees the old contents."""

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first = y.sum(0) / (x.abs() + 1)
        x.mul_(0.5)
        return first, (x - x.mean(0)).softmax(0)

    check(f, rand(40, 33), rand(20, 33))
    check(f, turned(rand(40, 33)), rand(20, 33))


def test_a_write_through_a_lazy_repetition() -> None:
    """A selection that repeats one element is no place to write to."""

    def f(x: Tensor) -> Tensor:
        wide = torch.atan2(x, x + 3)[:, torch.zeros(8, dtype=torch.int64)]
        return wide.slice_scatter(wide.narrow(1, 0, 1) * 2, 1, 0, 1)

    check(f, rand(5, 1))


def test_writes_that_read_what_they_write() -> None:
    def f(x: Tensor) -> Tensor:
        x.copy_(x.flip(0))
        x[1:].add_(x[:-1].clone())
        x.copy_(x.roll(1, 0))
        return x @ x.t()

    check(f, rand(5, 5))
    check(f, stepped(rand(5, 5)))


def test_inputs_that_share_storage() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return x + y

    for call in (f, compiled(f)):
        base = torch.arange(6.0)
        torch.testing.assert_close(call(base[:4], base[2:]), torch.tensor([4.0, 8.0, 8.0, 11.0]))


def test_a_transpose_in_place() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.clone()
        y.t_()
        y[0] += 1
        return y

    check(f, rand(3, 5))


def test_module_state() -> None:
    ours, theirs = (nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    run = compiled(ours)
    for _ in range(3):
        x = rand(4, 2, 6, 6)
        torch.testing.assert_close(run(x), theirs(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_memory_behind_a_view_that_a_call_made() -> None:
    """With symbolic sizes a result may be a view by a library call: its storage must not be given to a later kernel."""

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a = torch.minimum(x, y)
        b = a.clone()
        b[..., ::2] = 0.5
        return (x - x.mean())[0::2], b.chunk(2, 1)[0], (a * 2).softmax(0)

    run = compiled(f, dynamic=True)
    with torch.no_grad():
        for n in (4, 9):
            torch.testing.assert_close(run(rand(5, n), rand(n)), f(rand(5, n), rand(n)))


def read_before_a_write(x: Tensor) -> Tensor:
    y = x.view(torch.int32) * 2
    x[:, 2:5] = 2
    return y.view(torch.int64)


def read_before_two_writes(x: Tensor) -> tuple[Tensor, ...]:
    y = x.view(torch.int32).view(torch.int16) * 3
    x[1], x[2] = 5, 7
    return y, y.sum()


def read_between_writes(x: Tensor) -> Tensor:
    found = []
    for k in range(3):
        found.append(x.view(torch.int32)[0] * 2)
        x[0] = k
    return torch.stack(found)


def read_a_row(x: Tensor) -> Tensor:
    y = x[1].view(torch.int32)[1:] * 3
    x[1] = 5
    return y


@pytest.mark.parametrize("f", [read_before_a_write, read_before_two_writes, read_between_writes, read_a_row])
def test_a_view_that_a_call_made_is_read_before_its_memory_is_written(f: Callable[[Tensor], Any]) -> None:
    """A view as a dtype of another width is a call. Its readers waited for nothing, and saw what is written later."""
    theirs, ours = (torch.arange(-12, 12).reshape(4, 6) for _ in range(2))
    torch.testing.assert_close(compiled(f)(ours), f(theirs), rtol=0, atol=0)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16], ids=str)
def test_a_widened_integer_where_a_mask_holds(dtype: torch.dtype) -> None:
    x = (torch.arange(101) - 40).to(dtype)
    check(lambda x, m: torch.where(m, x.long(), 0), x, x % 3 == 0)
    check(lambda x: x.view(-1, 4).cumsum(-1), x[:100])


def test_a_scan_over_one_element_beside_a_reduction() -> None:
    check(lambda x: ((x + x).logsumexp((0, 1)), (x + x).tanh().cumprod(1), x.cummax(1)[1]), rand(8, 2)[..., ::2])


# ---- loops ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_division_by_one_number_is_exact(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(70, 997, dtype=dtype) * torch.exp(torch.randn(70, 997, dtype=dtype) * 15)
    x[::3, ::5], x[1::3, ::7], x[2::3, ::9] = math.inf, math.nan, 0
    by = torch.exp(torch.randn(70, 1, dtype=dtype) * 8)
    by[::7], by[1::7], by[2::7], by[3::7], by[4::7] = 0, math.inf, math.nan, -by[3::7], 1e-38
    for f in (lambda x: x / by, lambda x: x / 255, lambda x: x / -0.0, lambda x: x / 1024):
        torch.testing.assert_close(compiled(f)(x), f(x), rtol=0, atol=0, equal_nan=True)


def test_division_of_equal_numbers_along_a_row() -> None:
    check(lambda x: ((torch.zeros(67) + 1).softmax(0), x.softmax(0)), rand(67))


def test_results_on_another_device() -> None:
    """No kernel stands in for an operator that makes a tensor elsewhere."""
    run = compiled(lambda x: (torch.zeros_like(x, device="meta") + 1, torch.rand(3, device="meta"), x + 1))
    assert [t.device.type for t in run(rand(4))] == ["meta", "meta", "cpu"]


def test_pooling_to_sizes_that_overlap() -> None:
    check(lambda x: F.adaptive_avg_pool3d(x, (2, 2, 2)), rand(2, 3, 4, 4, 4))
    check(lambda x: F.interpolate(x, scale_factor=0.6, mode="area", recompute_scale_factor=True), rand(2, 3, 4, 4, 4))


@pytest.mark.every(2)
@pytest.mark.parametrize("groups", [4, 8, 32])
@pytest.mark.parametrize("images", [3, 16])
def test_group_norm_of_channels_last(groups: int, images: int) -> None:
    x = rand(images, 64, 5, 7).contiguous(memory_format=torch.channels_last)
    check(
        lambda x, w, b: (F.group_norm(x, groups, w, b), x.var((2, 3)), x.reshape(images, groups, -1).amax(2)),
        x,
        rand(64),
        rand(64),
    )


@pytest.mark.every(3)
@pytest.mark.parametrize("width", slow_but(lambda width: width in (1, 16, 31, 65), [1, 3, 16, 31, 32, 33, 63, 64, 65, 130]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
def test_short_rows(width: int, dtype: torch.dtype) -> None:
    x = (rand(40, width) * 9).to(dtype)
    check(
        lambda x: (
            x.double().softmax(1),
            x.argmax(1),
            x.amax(1),
            torch.var_mean(x.double(), 1, correction=0),
            x.double().cumsum(1),
            x.sum(1),
        ),
        x,
    )


@pytest.mark.every(3)
@pytest.mark.parametrize("stride", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_every_other_element(stride: int, dtype: torch.dtype) -> None:
    """Also at the end of a buffer: nothing beyond it may be read or written."""
    x = (rand(7, 24 * stride) * 3).to(dtype)

    def f(x: Tensor) -> tuple[Tensor, ...]:
        kept = torch.zeros_like(x)
        kept[:, 1::stride] = x[:, ::stride]
        return (
            x[:, ::stride].clone(),
            x[:, stride - 1 :: stride] ^ True if dtype is torch.bool else x[:, stride - 1 :: stride] + 1,
            kept,
        )

    check(f, x)
    check(f, x[:, : 24 * stride - stride + 1].contiguous() if stride > 8 else x)


@pytest.mark.every(2)
@pytest.mark.parametrize(("kernel", "step"), [(3, 2), (2, 2), (3, 1), (5, 4), (4, 3)])
def test_gradients_of_overlapping_windows(kernel: int, step: int) -> None:
    x = rand(2, 3, 24, 24).requires_grad_()

    def f(x: Tensor) -> Tensor:
        y = F.max_pool2d(x, kernel, step, kernel // 2).sum() + (x[..., ::step].exp() * x[..., ::step]).sum()
        return y + F.avg_pool2d(x, kernel, step).square().sum()

    ours, theirs = (torch.autograd.grad(g(x), x)[0] for g in (compiled(f), f))
    torch.testing.assert_close(ours, theirs)


def test_long_sums_stay_accurate() -> None:
    """One chain of additions would lose three more digits."""
    for shape, dim in (((200_000, 48), 0), ((3, 2_000_000), 1), ((40_000, 20, 3), (0, 2))):
        x = torch.rand(shape)
        wanted = x.double().sum(dim)
        error = (compiled(lambda x, dim=dim: x.sum(dim))(x) - wanted).abs().max() / wanted.max()
        assert error < 2e-6, (shape, error)


# ---- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [stepped, offset, turned, misaligned], ids=lambda f: f.__name__)
def test_layouts_of_inputs(change: Callable[[Tensor], Tensor]) -> None:
    check(lambda x, y: (x.relu() * y, (x + y).softmax(-1), x.sum(0), x[1:] + 1), change(rand(7, 33)), change(rand(33)))


def test_layouts_of_results() -> None:
    image = rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    check(lambda x: (x + 1, x.permute(0, 2, 3, 1).contiguous(), x.sum(1), x.mean((2, 3), keepdim=True)), image)
    check(lambda x: ((x + 1).t(), (x * 2)[:, ::2], (x.exp())[1:3], x.sum(0).expand(4, 5), (x + 1).expand(2, 4, 5)), rand(4, 5))
    check(lambda x: (x.flip(0), x.flip(0, 1).reshape(-1), x.flip(0) @ x.t()), rand(4, 5))
    check(lambda x: (x.exp().unfold(1, 2, 1), (x > 0).diagonal(0, 0, 1)), rand(4, 6))
    check(lambda x: (torch.full_like(x, 0.5).chunk(2, 1)[0], (x * 2).diagonal()), rand(4, 6))


def test_an_aligned_then_a_misaligned_input() -> None:
    """One compiled function for both: alignment is not what it was compiled for."""
    run = compiled(lambda x: x * 2 + 1)
    for x in (rand(1000), misaligned(rand(1000)), rand(1001)[1:]):
        assert torch.equal(run(x), x * 2 + 1)


def test_expanded_inputs() -> None:
    check(lambda x, y: (x + y, x.sum(0), x.softmax(-1)), rand(1, 5).expand(4, 5), rand(4, 1).expand(4, 5))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (1,), (1, 1), ()], ids=str)
def test_empty_and_tiny(shape: tuple[int, ...]) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        wide = x.reshape(-1)
        return x + 1, x.sum(), x.prod(), (x > 0).all(), wide.cumsum(0), torch.cat([wide, wide]), wide.mean(), x.flatten()[:0]

    run = compiled(f)
    with torch.no_grad():
        torch.testing.assert_close(run(rand(*shape)), f(rand(*shape)), equal_nan=True)


def test_a_reduction_of_nothing_raises_as_in_eager() -> None:
    with pytest.raises((RuntimeError, IndexError)):
        compiled(lambda x: x.amax(0))(torch.empty(0, 3))


# ---- threads --------------------------------------------------------------------------------------------------------


def work(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    h = F.layer_norm(x, x.shape[-1:]) @ w
    return h.softmax(-1), h.sum(), x.cumsum(0), x.amax(0)


def test_four_threads_on_one_function() -> None:
    run, w = compiled(work), rand(65, 65)
    inputs = [rand(200, 65) + k for k in range(4)]
    with torch.no_grad():
        expected = [run(x, w) for x in inputs]
    wrong: list[int] = []

    def differs(k: int) -> bool:
        with torch.no_grad():
            return not all(torch.equal(a, b) for a, b in zip(run(inputs[k], w), expected[k], strict=True))

    def loop(k: int) -> None:
        wrong.extend(k for _ in range(30) if differs(k))

    threads = [threading.Thread(target=loop, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


@pytest.fixture
def any_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def heavy(x: Tensor) -> tuple[Tensor, ...]:
    return x.sum(), x.softmax(-1), x.var(0), x.argmax(), x.cumsum(-1).sum(0), (x * 2).exp().mean(1)


def test_the_number_of_threads_may_change(any_threads: None) -> None:
    run, x = compiled(heavy), rand(130, 3001)
    with torch.no_grad():
        want = heavy(x)
        for count in (1, 2, 3, 1, 4):
            torch.set_num_threads(count)
            torch.testing.assert_close(run(x), want, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("count", [1, 2])
def test_results_are_the_same_each_time(any_threads: None, count: int) -> None:
    torch.set_num_threads(count)
    run, x = compiled(heavy), rand(130, 3001)
    with torch.no_grad():
        first = run(x)
        assert all(torch.equal(a, b) for _ in range(20) for a, b in zip(run(x), first, strict=True))


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "f",
    [
        lambda x, i: x[i],
        lambda x, i: x.gather(0, i[:, None]),
        lambda x, i: F.embedding(i.abs(), x) * 2,
        lambda x, i: x.index_put((i,), torch.zeros(5)),
        lambda x, i: x.index_add(0, i.abs(), torch.ones(3, 5)),
        lambda x, i: x.index_select(0, i.abs()).sum(),
    ],
    ids=["index", "gather", "embedding", "index_put", "index_add", "index_select"],
)
@pytest.mark.parametrize("bad", [4, -5])
def test_an_index_out_of_range(f: Callable[..., Any], bad: int) -> None:
    run, x = compiled(f), rand(4, 5)
    with torch.no_grad():
        good = torch.tensor([0, 3, 1])
        torch.testing.assert_close(run(x, good), f(x, good))
        with pytest.raises(IndexError):
            run(x, torch.tensor([0, bad, 1]))
        torch.testing.assert_close(run(x, good), f(x, good))  # and nothing is left broken


def test_a_masked_index_may_be_anything() -> None:
    def f(x: Tensor, i: Tensor) -> Tensor:
        return torch.where(i < 4, x[i.clamp(max=3)], 0.0)

    check(f, rand(4), torch.tensor([0, 99, 3, 7]))


def test_double_backward_says_so() -> None:
    x = rand(5).requires_grad_()
    y = compiled(lambda x: (x**3).sum())(x)
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward|does not require grad"):
        torch.autograd.grad(grad.sum(), x)


# ---- modes of autograd ----------------------------------------------------------------------------------------------


def test_grad_no_grad_and_inference_mode() -> None:
    def f(x: Tensor) -> Tensor:
        return (x.sin() * x).sum(-1)

    run, x = compiled(f), rand(3, 4).requires_grad_()
    with torch.no_grad():
        assert not run(x).requires_grad
    with torch.inference_mode():
        assert run(x).is_inference()
        assert run(torch.ones(3, 4)).is_inference()
    y = run(x)
    assert y.requires_grad
    y.sum().backward()
    expected = x.detach().cos() * x.detach() + x.detach().sin()
    torch.testing.assert_close(x.grad, expected)
    torch.testing.assert_close(y.detach(), f(x.detach()))


def test_only_some_inputs_need_gradients() -> None:
    def f(x: Tensor, w: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, w).relu()[n], n + 1, x.detach() * 2

    run, n = compiled(f), torch.tensor([0, 2])
    results = []
    for call in (f, run):
        x, w = rand(3, 4), rand(5, 4).requires_grad_()
        out = call(x, w, n)
        assert [t.requires_grad for t in out] == [True, False, False]
        out[0].sum().backward()
        results.append((*out, w.grad))
    torch.testing.assert_close(results[0], results[1])


def test_gradients_through_views_and_writes() -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        y[1:] = y[:-1].exp()
        y.t()[0].mul_(3)
        return (y.flip(0) * torch.arange(5.0)).sum()

    grads = []
    for call in (f, compiled(f)):
        x = rand(4, 5).requires_grad_()
        call(x).backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0])


# ---- dynamic sizes --------------------------------------------------------------------------------------------------


def test_one_graph_for_marked_sizes() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        h = x @ w
        signal = x.reshape(1, 1, -1)
        return h.softmax(-1), x.mean(0), torch.cat([x, x * 2]), x.cumsum(0), F.conv1d(signal, w[None, None, 0])

    run, w = compiled(f), rand(6, 6)
    kgen.coverage_reset()
    with torch.no_grad():
        for n in (5, 8, 33, 100):
            x = rand(n, 6)
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(run(x, w), f(x, w), rtol=2e-5, atol=2e-5)
    assert kgen.coverage()["graphs"] == 1


# ---- instruction sets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ["generic", "avx2"])
def test_wide_integers_on_narrow_registers(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    """16 bytes hold two int64, but no vector has fewer than four lanes."""
    if isa == "avx2" and toolchain.isa().name == "generic":
        pytest.skip("no AVX2")
    monkeypatch.setenv("KGEN_ISA", isa)
    rows = torch.tensor([3, 1, 4])
    check(lambda x, i: (x[i], i * 3, (i - 2).double()), rand(5, 7), rows)


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"gpu_interpreter": True}, marks=pytest.mark.interpret)], ids=["cpu", "gpu"]
)
def test_the_tail_of_the_normal_distribution_has_digits(options: dict[str, Any]) -> None:
    """torch takes `ndtr` apart into (1 + erf) / 2, which is 0 for -9."""
    x = torch.tensor([-12.0, -9, -5, -4, -3, -1, -0.1, 0, 0.1, 1, 9, float("inf"), -float("inf")])
    got = torch.compile(torch.special.ndtr, backend="kgen", options=options)(x)
    want = torch.tensor([math.erfc(-v / math.sqrt(2)) / 2 for v in x.tolist()])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
