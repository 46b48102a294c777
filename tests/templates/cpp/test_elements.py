"""Operators' templates in C++ with loops of their own: elements with prologues, stores with epilogues, and what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kgen
from examples.new_template import similarity
from examples.new_template_cpu import L1DistanceOnCpu
from kgen import errors, knob, operand, result
from kgen.commands.templates_command import ELEMENTS
from kgen.templates import registry
from kgen.testing import check_template

pytestmark = pytest.mark.cpu


@torch.library.custom_op("elements::norm", mutates_args=())
def norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], w, eps)


@norm.register_fake
def _(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("elements::largest", mutates_args=())
def largest(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, numbers = x.max(-1)
    return values, numbers


@largest.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape[0]), x.new_empty(x.shape[0], dtype=torch.int64)


# The operator that `kgen templates new --device cpu` writes, with a weight.
NORM = "\n" + ELEMENTS.replace(
    "const auto y = mul_(x, scale);",
    '{{ W.element("weight", "n", lanes="n") }}\n        const auto y = mul_(mul_(x, scale), weight);',
)

LARGEST = """
{{ kernel() }}
  for (int64_t m = 0; m < {{ m.size }}; ++m) {
    {{ X.element("top", "m", "0") }}
    auto best = top;
    int64_t at = 0;
    for (int64_t n = 1; n < {{ n.size }}; ++n) {
      {{ X.element("x", "m", "n") }}
      if (x > best) best = x, at = n;
    }
    {{ V.store_element("best at", "m") }}
  }
{{ kernel.end() }}
"""


def declare_norm(source: str = NORM) -> None:
    @kgen.template(
        implements=kgen.operator("elements::norm", "m,n", "n -> m,n", examples=[{"eps": 1e-5}]),
        device="cpu", source=source, name="elements_norm",
    )  # fmt: skip
    class Norm(kgen.KernelTemplate):
        X, W, Y = operand("m", "n"), operand("n"), result("m", "n")


def declare_largest(source: str = LARGEST, device: Any = "cpu", **more: Any) -> None:
    members = {"X": operand("m", "n"), "V": result("m"), "I": result("m"), **more}
    pattern = kgen.operator("elements::largest", "m,n -> m; m")
    declare = kgen.template(implements=pattern, device=device, source=source, name="elements_largest")
    declare(type("Largest", (kgen.KernelTemplate,), {"__module__": __name__, **members}))


@pytest.fixture(autouse=True)
def declared() -> Iterator[None]:
    declare_norm()
    yield
    registry.remove("elements_norm")
    if "elements_largest" in registry.names():
        registry.remove("elements_largest")


def one_kernel(f: Any, *args: torch.Tensor, dynamic: bool = False, **tolerances: float) -> None:
    """The function is one kernel and no call, and right."""
    torch.compiler.reset()
    report = kgen.explain(f, *args, print_report=False)
    assert (len(report.kernels), len(report.externs)) == (1, 0)
    found = torch.compile(f, backend="kgen", dynamic=dynamic, options={"strict": True})(*args)
    torch.testing.assert_close(found, f(*args), **tolerances)


def test_the_example_is_one_kernel() -> None:
    one_kernel(similarity, torch.randn(30, 21), torch.randn(20, 21), torch.randn(21), rtol=1e-4, atol=1e-4)


def test_the_kit_tries_elements() -> None:
    """Odd sizes, layouts, types, what is fused, and sizes that are symbols."""
    asked = ["size 'k=71'", "size 'n=1'", "layout 'X transposed'", "layout 'Y expanded", "float64", "epilogue 'gelu'",
             "epilogue 'transposed'", "epilogue 'several outputs'", "prologue 'of all operands'", "prologue 'gathered rows'",
             "dynamic 'all kinds of input'"]  # fmt: skip
    report = check_template(L1DistanceOnCpu, only=asked, seconds=300)
    assert len(report.passed) >= len(asked) - 2
    assert not report.failed


def test_vectors_of_neighbours() -> None:
    asked = ["size 'n=11'", "size 'n=1'", "size 'n=0'", "layout 'X transposed'", "layout 'X strided'", "bfloat16",
             "prologue 'sum of two'", "epilogue 'transposed'", "dynamic 'all kinds of input'"]  # fmt: skip
    report = check_template("elements_norm", only=asked, seconds=300)
    assert len(report.passed) >= len(asked) - 2
    assert not report.failed


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: torch.relu(norm(x * 2 + 1, w.exp(), 1e-5)),
        lambda x, w: norm(x[:, torch.arange(49, -1, -1)], w, 1e-5) * 2,
        lambda x, w: norm(F.pad(x[:, :45], (2, 3)), w, 1e-5).sigmoid(),
        lambda x, w: norm(x, w, 1e-5).view(6, 7, 5, 10).transpose(0, 2).contiguous(),
        lambda x, w: norm(x.bfloat16(), w.bfloat16(), 1e-5).float() * 3,
        lambda x, w: norm(x.view(7, 6, 50).transpose(0, 1).reshape(42, 50), w, 1e-5).neg(),
    ],
    ids=["elementwise", "gathered", "padded", "stored elsewhere", "16 bits", "two loops"],
)
def test_what_surrounds_it_is_fused(f: Any) -> None:
    x, w = torch.randn(42, 50), torch.randn(50)
    one_kernel(f, x, w, rtol=2e-2, atol=2e-2)


def test_indices_from_data_are_checked() -> None:
    f = torch.compile(lambda x, w, i: norm(x[i], w, 1e-5), backend="kgen", options={"strict": True})
    x, w = torch.randn(42, 50), torch.randn(50)
    rows = torch.tensor([3, 41, 0])
    torch.testing.assert_close(f(x, w, rows), norm(x[rows], w, 1e-5))
    with pytest.raises(IndexError):
        f(x, w, torch.tensor([3, 42, 0]))


@pytest.mark.parametrize("which", [0, 1])
def test_several_results_of_which_one_may_be_of_no_use(which: int) -> None:
    declare_largest()
    x = torch.randn(19, 30)
    one_kernel(lambda x: tuple(one + 1 for one in largest(x * 2)), x)
    one_kernel(lambda x: largest(x * 2)[which] + 1, x)


WRONG = {
    "too few indices": ('X.element("x", "m", "n")', 'X.element("x", "m")', 8, "1 indices for the axes m, n"),
    "lanes of no index": ('"m", "n") }}', '"m", "n", lanes="k") }}', 8, "lanes='k' is none of the indices m, n"),
    "a neighbour in lanes": ('"m", "n") }}', '"n", "(n - 1)", lanes="n") }}', 8, "index (n - 1) differs from lane to lane"),
    "too few names": ('"best at"', '"best"', 11, "1 names, where one call stores 2 results"),
    "a rectangle of one axis": ('V.store_element("best at", "m")', 'V.store("best at", "m")', 11, "by V.store_element(...)"),
    "a block of no matmul": ('X.element("x", "m", "n")', 'X.tile("x", "m")', 8, "read it by X.element(...)"),
    "a misspelled slot": ('X.element("x"', 'X.elements("x"', 8, "X has no elements: was element meant?"),
    "a misspelled attribute": ("n.size", "n.sizes", 7, "n has no sizes: was size meant?"),
    "a hidden name": ('"best at", "m"', '"best at", "made_best"', 11, "an index called made_best is hidden"),
    "an error in C++": ("x > best", "x > beest", 9, "'beest' was not declared"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_mistakes_name_file_and_line(what: str) -> None:
    old, new, line, text = WRONG[what]
    assert old in LARGEST
    declare_largest(LARGEST.replace(old, new))
    source = registry.find("elements_largest").source
    with pytest.raises(Exception, match=re.escape(text)) as caught:
        torch.compile(lambda x: largest(x * 2), backend="kgen", options={"strict": True, "cache": False})(torch.randn(3, 4))
    assert f"{source}, line {line}" in str(caught.value) or f"{source}:{line}" in str(caught.value)


def test_what_is_stored_by_elements_has_no_tiles() -> None:
    with pytest.raises(errors.BadTemplate, match="BLOCK_M says that it stores tiles: give the knob another name") as caught:
        declare_largest(BLOCK_M=knob(4))
    assert Path(__file__).name in str(caught.value)


def test_a_gpu_stores_tiles() -> None:
    with pytest.raises(errors.BadTemplate, match="which is for device 'cpu'"):
        declare_largest(device="cuda")


INCOMPLETE = {
    "no head": ("{{ kernel() }}\n", "never opens the kernel: {{ kernel() }} is its first line"),
    "no end": ("{{ kernel.end() }}\n", "never closes the kernel: {{ kernel.end() }} is its last line"),
    "no store": ('{{ V.store_element("best at", "m") }}', "never renders the slot V"),
    "a type alone": ('{{ V.store_element("best at", "m") }}', "never stores a result"),
}


@pytest.mark.parametrize("what", INCOMPLETE)
def test_what_every_kernel_has(what: str) -> None:
    lost, text = INCOMPLETE[what]
    assert lost in LARGEST
    with pytest.raises(errors.BadTemplate, match=re.escape(text)):
        declare_largest(LARGEST.replace(lost, "using Real = {{ V.type }};" if what == "a type alone" else ""))


def test_arguments_that_the_call_does_not_have(declared: None) -> None:
    registry.remove("elements_norm")
    declare_norm(NORM.replace("arguments.eps ", "arguments.epsilon "))
    text = re.escape("line 13): ValueError: the operator's call has no argument epsilon: it has eps")
    with pytest.raises(Exception, match=text):
        torch.compile(lambda x, w: norm(x, w, 1e-5), backend="kgen", options={"strict": True})(torch.ones(2, 3), torch.ones(3))


def test_a_replaced_kernel_names_the_line() -> None:
    """In the default mode, where the library takes over."""
    declare_largest(LARGEST.replace("x > best", "x > beest"))
    source = registry.find("elements_largest").source
    x = torch.randn(3, 4)
    with pytest.warns(RuntimeWarning, match=re.escape(f"({source}, line 9)")):
        found = torch.compile(lambda x: largest(x * 2), backend="kgen", options={"cache": False, "strict": False})(x)
    torch.testing.assert_close(found, largest(x * 2))


def test_a_reference_that_fails_is_the_authors() -> None:
    def reference(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("by mistake")

    members = {"X": operand("m", "n"), "V": result("m"), "I": result("m"), "__module__": __name__}
    pattern = kgen.operator("elements::largest", "m,n -> m; m", reference=reference)
    kgen.template(implements=pattern, device="cpu", source=LARGEST, name="elements_largest")(
        type("Largest", (kgen.KernelTemplate,), members)
    )
    report = check_template("elements_largest", only="size 'n=71'", raises=False)
    assert "its reference raises ZeroDivisionError: by mistake" in str(report)
    refused = check_template("elements_largest", only="size 'n=0'", raises=False)
    assert "the operator itself does not take it" in str(refused)
