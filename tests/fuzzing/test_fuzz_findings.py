"""Programs that `make fuzz-programs` has found wrong, made small: each agrees with eager now."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuzz_oracle import check
from fuzz_program import DTYPES, Program

pytestmark = pytest.mark.cpu


def agrees(lines: str, *, gradients: bool = False, dynamic: bool = False, **bases: str) -> None:
    """`lines` are statements about the bases, and `out` lists the results."""
    names = tuple(bases)
    program = Program(
        0, tuple(bases.items()), tuple((n.replace("b", "x"), n) for n in names), (lines,), ("*out",), gradients, dynamic
    )
    found = check(program)
    assert found.kind == "ok", f"{found.kind}: {found.text}"


@pytest.mark.parametrize("order", [2, 3, -1, 0.5])
def test_norm_of_one_element_does_not_overflow(order: float) -> None:
    numbers = "torch.tensor([[1e30], [1e-30], [-2.0], [float('nan')], [-0.0]])"
    agrees(f"out = [torch.linalg.vector_norm(x0, {order}, 1), x0.norm({order}, 1, True), x0[0, 0].norm({order})]", b0=numbers)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_huber_loss_has_the_type_of_its_first_argument(reduction: str) -> None:
    agrees(f"out = [F.huber_loss(x0, x1, reduction='{reduction}')]", b0="randn(1, 3, 5)", b1="randn(2).to(f64)")
    assert F.huber_loss(torch.ones(2, dtype=torch.bfloat16), torch.ones(())).dtype is torch.bfloat16


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_gradient_of_a_smooth_loss_keeps_nan(dtype: str, reduction: str) -> None:
    x = torch.tensor([float("nan"), 0.3, -2.0, 5.0, 0.0, float("inf"), 0.7], dtype=DTYPES[dtype], requires_grad=True)
    target = torch.tensor([0.0, 0.0, 0.0, float("nan"), 0.0, 0.0, 0.0], dtype=DTYPES[dtype])

    def gradient(loss: Any) -> Any:
        return torch.autograd.grad(loss(x, target).sum(), x)[0]

    def loss(x: Any, target: Any) -> Any:
        return F.smooth_l1_loss(x, target, reduction=reduction, beta=0.7)

    got = gradient(torch.compile(loss, backend="kgen", options={"strict": True}))
    torch.testing.assert_close(got, gradient(loss), equal_nan=True)


def test_a_write_to_elements_that_share_places_is_refused_as_in_eager() -> None:
    """The first part of a repeated input is written, and the input is an alias of another one: torch's tracing writes all of
    its parts, of which only one may stay."""

    def f(x: Any, y: Any) -> Any:
        x[:1].mul_(-1)
        return y + 1

    base = torch.ones(1, 8, 3, dtype=torch.int8)
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.compile(f, backend="kgen", options={"strict": True})(base.expand(2, 8, 3), base.view(-1))


@pytest.mark.parametrize("view", ["y.t()", "y[1:]", "y"])
def test_a_view_made_before_a_write_to_a_clone_keeps_its_elements(view: str) -> None:
    """The write went to the storage of `y`, which nothing reads later but a result that is a view of it."""
    lines = f"y = x0.sum(-1)\n    v = {view}\n    z = y.clone()\n    z[:, torch.tensor([0], device=D)] = 7.0\n    out = [v, z]"
    agrees(lines.replace("\n    ", "\n"), b0="randn(1, 3, 3, 2)")


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_the_gradient_of_an_extreme_finds_it_again(dtype: str) -> None:
    """Backward recomputed what it compares with the maximum, from a rounded tanh: nothing was equal, and 0 / 0 a NaN."""
    lines = "y = -0.712 - torch.tanh(x0)\nout = [y / y.amax(0, keepdim=True).abs().clamp(min=0.5)]"
    agrees(lines, b0=f"randn(66835, 3, 1, 3).to({dtype})", gradients=True)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_the_gradient_of_an_extreme_of_widened_numbers_finds_it_again(dtype: str) -> None:
    """The maximum was one of unrounded numbers, and backward compared it with rounded ones."""
    lines = "y = (-0.712 - torch.tanh(x0)).float()\nout = [y / y.amax(0, keepdim=True).abs().clamp(min=0.5)]"
    agrees(lines, b0=f"randn(1, 200000, 2).to({dtype})", gradients=True)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_the_gradient_of_a_sum_of_embeddings(dtype: str) -> None:
    """torch returns one of its four results without elements, and its fake tensor has some: with bfloat16 on a CPU."""
    lines = "out = [F.embedding_bag(x1.reshape(1, -1), x0, mode='sum')]"
    agrees(lines, b0=f"randn(1, 5, 3).to({dtype})", b1="torch.tensor([1, 2, 0, 1])", gradients=True)


@pytest.mark.parametrize("function", ["exp", "softmax", "sigmoid"])
def test_a_gradient_that_needs_what_an_input_was(function: str) -> None:
    """The partitioner saved the input, from which backward would compute the function again, and autograd found it changed."""
    call = "x0.softmax(0)" if function == "softmax" else f"x0.{function}()"
    lines = f"y = {call}\nx0.sub_(x0.mean())\nout = [y * 2, torch.zeros_like(y).index_put((x1,), y[:1], accumulate=True)]"
    agrees(lines, b0="randn(1, 3)", b1="torch.tensor([0])", gradients=True)


@pytest.mark.every(3)
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 13])
def test_a_search_among_nans_ends_where_eager_does(count: int, right: bool) -> None:
    """A NaN compares with nothing: where the search ends depends on the elements that it meets."""
    row = f"torch.cat([torch.arange({count}) * 1.0, torch.tensor([float('inf'), float('nan'), float('nan'), float('nan')])])"
    agrees(
        f"out = [torch.searchsorted(x0, x1, right={right}), torch.bucketize(x1, x0.flip(0), right={right})]",
        b0=f"{row}[-{count}:]",
        b1="torch.tensor([-1, 0, 0.5, 2, 7.5, float('inf'), float('nan')])",
    )


def test_what_is_written_over_is_read_before() -> None:
    """`x + 1` took the memory of the stack, which the kernel read afterwards."""
    parts = "torch.stack([x1, *torch.zeros(15, device=D).unbind(0)])"
    agrees(f"out = [x0 + 1, x0 * {parts}]", b0="randn(1, 16)", b1="randn(2)")


@pytest.mark.parametrize("size", [1, 3])
def test_a_masked_index_into_what_is_not_stored_is_checked_where_it_is_read(size: int) -> None:
    """The count of true elements before the first is -1, which no element asks for."""
    lines = "y = torch.eye(x0.shape[0], device=D).flip(0)\nout = [y.masked_scatter(y > 0, torch.arange(9.0, device=D))]"
    agrees(lines, b0=f"randn(1, {size})")


def test_saved_elements_that_share_memory_in_eager() -> None:
    """AOTAutograd was told eager's strides, with which several elements of the saved tensor are in one place. Rows are equal
    here: eager writes two numbers into such a place, and keeps the last."""
    lines = "y = x0.unfold(0, 2, 1)\nout = [F.gelu(y.slice_scatter(y.narrow(2, 0, 1).flip(-1), 2, 19, 20), approximate='tanh')]"
    agrees(lines, b0="randn(1, 20, 1).expand(3, 20, 1).permute(0, 2, 1)", gradients=True)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_deviation_does_not_overflow_where_its_square_does(dtype: str) -> None:
    made = "x0.std(1), *torch.std_mean(x0, 0, correction=0), x0.std(), x0[:1].std(0, correction=0), x0.var(1)"
    numbers = f"(randn(1, 4, 30) * torch.tensor([[1e30], [1e-3], [1e18], [1.0]])).to({dtype})"
    agrees(f"out = [{made}]", b0=numbers)
    agrees("out = [x0.std(1)]", b0="randn(1, 3, 5)", gradients=True)


@pytest.mark.parametrize(("dtype", "seed"), [("bf16", 81612), ("f32", 31703)])
def test_a_branch_that_cancels(dtype: str, seed: int) -> None:
    """Eager's own runs vary inside of the branch as well."""
    agrees(
        "out = [torch.cond(x0.sum() > 0, lambda t: t.sin() + 1, lambda t: t * 1, (x0.clone(),))]",
        b0=f"randn({seed}, 4, 4).to({dtype})",
    )


def test_attention_of_nans_is_what_its_definition_makes() -> None:
    """Eager's fast kernel makes 0 of a row whose scores are NaN."""
    lines = "q = x0.reshape(1, 2, 2, -1)\n    out = [F.scaled_dot_product_attention(q, q.flip(2), q, is_causal=True)]"
    agrees(lines.replace("\n    ", "\n"), b0="sprinkled(79024, randn(79023, 8, 8, 1), 3e-1, -0.0, float('nan'))")


def test_a_part_of_a_pool_of_symbolic_size_is_a_view_of_it() -> None:
    """Strides of what may have no elements are made of `max(1, size)`."""
    lines = "p = F.max_pool1d(x0.reshape(1, x0.shape[0], -1), 3, 1, dilation=2)\nout = [p, p.chunk(2, 1)[-1]]"
    agrees(lines, dynamic=True, b0="randn(75435, 2, 3, 3)")
