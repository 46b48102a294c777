"""Tensors that are not what tracing takes them for: with the negative bit, of mkldnn's layout, of quantised types; and what a
kernel says of an index out of range."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from kgen.errors import InputMismatch

pytestmark = pytest.mark.cpu


def compiled(function: Callable[..., object]) -> Callable[..., object]:
    torch._dynamo.reset()
    return torch.compile(function, backend="kgen", options={"strict": True})


def numbers() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 4, dtype=torch.complex64)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2 + 1,
        lambda x: x.t().contiguous(),
        lambda x: (x.sum(0), x[1:, ::2].clone()),
        lambda x: torch.cat([x, x.flip(0)]),
        lambda x: (x @ x).relu(),
        lambda x: x.view(-1)[torch.tensor([3, 5])],
    ],
)
def test_elements_with_the_negative_bit_have_their_sign(function: Callable[[torch.Tensor], object]) -> None:
    """A view of the conjugate's imaginary part has the memory of the number's own: as an input, and made in the graph."""
    given = numbers().conj().imag
    assert given.is_neg()
    torch.testing.assert_close(compiled(function)(given), function(given))
    inside = lambda x: function(x.conj().imag)  # noqa: E731
    torch.testing.assert_close(compiled(inside)(numbers()), inside(numbers()))


def test_writes_reach_memory_with_the_other_sign() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        x[1] = 3
        return x + 1

    bases = numbers(), numbers()
    eager, got = step(bases[0].conj().imag), compiled(step)(bases[1].conj().imag)
    torch.testing.assert_close(got, eager)
    torch.testing.assert_close(bases[1], bases[0])


def test_gradients_pass_elements_with_the_negative_bit() -> None:
    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).square().sum()

    found = []
    for function in (loss, compiled(loss)):
        torch.manual_seed(1)
        w = torch.randn(4, 4, requires_grad=True)
        function(numbers().conj().imag, w).backward()  # type: ignore[attr-defined]
        found.append(w.grad)
    torch.testing.assert_close(found[1], found[0])


def test_an_input_of_an_opaque_layout_is_refused() -> None:
    """torch traces mkldnn's tensors as strided ones. They have no memory that a kernel could read."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("needs mkldnn")
    with pytest.raises(InputMismatch, match="layout Mkldnn on cpu, but the graph was compiled for float with sizes"):
        compiled(lambda x: (x + x).to_dense())(torch.randn(3, 4).to_mkldnn())


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")
def test_quantised_tensors_run_in_eager() -> None:
    """Tracing says that they hold floats."""
    x = torch.randn(4, 4)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.quantize_per_tensor(x, 0.1, 3, torch.quint8).dequantize() + 1

    torch.testing.assert_close(compiled(function)(x), function(x))


def test_dimensions_of_length_one_have_strides_as_in_eager() -> None:
    """A sum that keeps its dimension is stored without it."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(0, keepdim=True), x.amax((0, 2), keepdim=True), x.sum(-1, keepdim=True), *x.min(1, keepdim=True)

    x = torch.randn(3, 4, 5)
    assert [one.stride() for one in compiled(function)(x)] == [one.stride() for one in function(x)]  # type: ignore[attr-defined]


def test_an_index_out_of_range_names_operators_and_line() -> None:
    def function(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return table[index] + 1

    with pytest.raises(IndexError, match=r"of aten.index.Tensor, aten.add.Tensor\n.*test_unusual_tensors.py:\d+ return table"):
        compiled(function)(torch.zeros(4, 5), torch.tensor([9]))


def test_zeros_without_memory_are_read_as_zeros() -> None:
    """autograd hands on tensors that are known to be zero, and no memory is theirs."""
    x = torch.randn(4, requires_grad=True)
    given = torch._efficientzerotensor(4)
    torch.testing.assert_close(
        torch.autograd.grad(compiled(lambda x: x.sin() * x)(x), x, given), torch.autograd.grad(x.sin() * x, x, given)
    )


def test_batches_of_gradients_are_refused() -> None:
    x = torch.randn(4, requires_grad=True)
    result = compiled(lambda x: x.sin() * x)(x)
    with pytest.raises(InputMismatch, match="a tensor without memory"):
        torch.autograd.grad(result, x, torch.eye(4), is_grads_batched=True)


def test_fake_tensors_are_refused() -> None:
    function = compiled(lambda x: x.sin() * x)
    function(torch.randn(4))
    with FakeTensorMode() as mode, pytest.raises(InputMismatch, match="a tensor without memory"):
        function(mode.from_tensor(torch.randn(4)))


def test_tangents_are_refused() -> None:
    """Kernels would drop them, and nobody would know."""
    with forward_ad.dual_level(), pytest.raises(InputMismatch, match="forward-mode differentiation"):
        compiled(lambda x: x.sin() * x)(forward_ad.make_dual(torch.randn(4), torch.randn(4)))
