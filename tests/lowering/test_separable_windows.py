"""Large windows that overlap are made one dimension after the other: few loads an element, and the same results."""

import pytest
import torch
import torch.nn.functional as F

import kgen.ir.index as ix
from kgen.lowering.separable_windows import is_separable
from kgen.lowering.windows import Windows
from tests.rendering import texts_of_a_gpu


def windows(size, stride, padding=(0, 0)):
    extents = (ix.as_expr(64),) * len(size)
    return Windows(extents, extents, size, stride, padding, (1,) * len(size))


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        ((3, 3), (1, 1), False),
        ((4, 4), (1, 1), False),
        ((5, 5), (1, 1), True),
        ((7, 7), (1, 1), True),
        ((1, 99), (1, 1), False),
        ((7, 7), (7, 7), False),  # nobody shares: each element is read one time
        ((64, 64), (64, 64), False),
        ((17, 17), (2, 2), True),
        ((5, 5, 5), (1, 1, 1), True),
    ],
)
def test_windows_are_separated_where_that_takes_fewer_loads(size, stride, expected):
    assert is_separable(windows(size, stride, (0,) * len(size))) is expected


CASES = {
    "average": (lambda x: F.avg_pool2d(x, 9, 1, 4), True),
    "average without the padding": (lambda x: F.avg_pool2d(x, (9, 7), 1, (3, 2), count_include_pad=False), True),
    "average with strides": (lambda x: F.avg_pool2d(x, (13, 9), (2, 3), (5, 4), ceil_mode=True), True),
    "average by a number": (lambda x: F.avg_pool2d(x.sin() * 2, 11, 1, 5, divisor_override=3), True),
    "average of a long window": (lambda x: F.avg_pool2d(x, (3, 37), 1, (1, 18)), True),
    "average of volumes": (lambda x: F.avg_pool3d(x[None], (1, 9, 9), 1, (0, 4, 4))[0], True),
    "maximum": (lambda x: F.max_pool2d(x, 9, 1, 4), False),
    "maximum with dilation": (lambda x: F.max_pool2d(x.sin() * 2, (7, 9), 1, 3, (3, 2), ceil_mode=True), False),
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float32) for case in CASES), ("average", torch.bfloat16), ("maximum with dilation", torch.bfloat16)],
)
@pytest.mark.every(3)
@pytest.mark.parametrize("options", [{}, {"gpu_interpreter": True}], ids=["cpu", "gpu"])
def test_separated_windows_give_the_same(case, dtype, options):
    function, training = CASES[case]
    torch.manual_seed(0)
    x = torch.randn(2, 2, 21, 38).to(dtype)
    x[0, 0, 3, 4] = float("-inf")
    x[1, 1, 7, 7] = float("nan")
    given, wanted = x.clone().requires_grad_(training), x.double().requires_grad_(training)
    result = torch.compile(function, backend="kgen", options={"strict": True, **options})(given)
    expected = function(wanted)
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(result.double(), expected, equal_nan=True, **close)
    if training:
        weights = torch.randn(expected.shape).to(dtype)
        result.backward(weights)
        expected.backward(weights.double())
        torch.testing.assert_close(given.grad.double(), wanted.grad, equal_nan=True, **close)


def test_kernels_read_a_row_of_a_window():
    made = texts_of_a_gpu(lambda x: F.avg_pool2d(x, 9, 1, 4), torch.empty(2, 8, 64, 64))
    loads = [text.count("tl.load") for text in made.kernels.values()]
    assert len(loads) == 2
    assert max(loads) <= 9


def test_positions_of_maxima_need_the_windows():
    def function(x):
        return F.max_pool2d(x, 9, 1, 4, return_indices=True)

    x = torch.randn(2, 3, 21, 30)
    result = torch.compile(function, backend="kgen", options={"strict": True})(x)
    for given, expected in zip(result, function(x), strict=True):
        torch.testing.assert_close(given, expected)
