"""Divisions and square roots of four elements at a time: what their assembly computes, step by step in numpy."""

from __future__ import annotations

import re

import numpy as np
import pytest
from numpy.typing import NDArray

from kgen.templates.triton.codegen.table import division_by_number
from kgen.templates.triton.device import rounded

Numbers = NDArray[np.float32]
SPECIAL = [0.0, -0.0, 1.0, -3.0, 1e-38, -1e-45, 3e38, np.inf, -np.inf, np.nan, 7.1e-31, 1.3e30, 1.2e38, -1e-39, 5e-42]


def run(text: tuple[str, str], *arguments: Numbers) -> tuple[Numbers, NDArray[np.bool_]]:
    """The results of the assembly, and which elements go the short way; elements are not grouped. Reciprocals are off by up to
    a last bit, as the hardware's are."""
    inputs = [one for argument in arguments for one in [argument] * rounded.FEW]
    names = {f"${rounded.FEW + k}": one for k, one in enumerate(inputs)}
    steps = [step.strip() for step in re.sub(r"^\{|\}$", "", text[0]).split(";") if step.strip()]
    short = None
    for step in steps:
        step = step.removeprefix("done:").strip()
        if step.startswith("@p"):
            short = {k: v.copy() for k, v in names.items()}
        elif not step.startswith("."):
            op, *rest = re.split(r"[ ,]+", step)
            made, *given = rest
            names[made] = compute(op, *(value_of(one, names, inputs[0]) for one in given))
            if op.startswith(("div", "rcp.rn", "sqrt")):
                assert short is not None
    assert short is not None
    goes = short["p"]
    return np.where(goes, short["m0"], names["$0"]), goes


def value_of(text: str, names: dict[str, Numbers], like: Numbers) -> Numbers:
    if text.startswith("0f"):
        return np.full_like(like, np.array(int(text[2:], 16), np.uint32).view(np.float32))
    return np.zeros_like(like) if text == "0" else names[text]


def compute(op: str, *args: Numbers) -> Numbers:
    noise = np.random.default_rng(0).integers(-1, 2, args[0].shape).astype(np.int32)
    if op.startswith(("setp", "abs", "neg", "mov", "copysign")):
        return plain(op, *args)
    if op.startswith("fma"):
        return (np.longdouble(args[0]) * args[1] + args[2]).astype(np.float32)
    if op.startswith("mul"):
        return args[0] * args[1]
    if op == "div.rn.f32":
        return args[0] / args[1]
    exact = 1 / np.sqrt(args[0].astype(float)) if op.startswith("rsqrt") else np.sqrt(args[0].astype(float))
    exact = 1 / args[0].astype(float) if op.startswith("rcp") else exact
    found = exact.astype(np.float32)
    if not op.endswith("approx.ftz.f32"):
        return found
    flushed = np.where(np.abs(args[0]) < 2.0**-126, np.copysign(np.float32(np.inf), args[0]), found)
    near = (flushed.view(np.int32) + noise).view(np.float32)
    return np.where(np.isfinite(flushed), np.where(np.abs(flushed) < 2.0**-126, flushed * 0, near), flushed)


def plain(op: str, *args: Numbers) -> Numbers:
    if op.startswith("setp.eq"):
        return args[0] == args[1]
    if op.startswith("setp"):
        return (args[0] < args[1] if ".lt" in op else args[0] > args[1]) & args[2].astype(bool)
    if op.startswith("copysign"):
        return np.copysign(args[1], args[0])
    return np.abs(args[0]) if op.startswith("abs") else -args[0] if op.startswith("neg") else args[0]


def same(got: Numbers, want: Numbers) -> bool:
    return bool(np.all((got.view(np.int32) == want.view(np.int32)) | (np.isnan(got) & np.isnan(want))))


def numbers(seed: int, low: int, high: int) -> Numbers:
    """Random digits, exponents of two between `low` and `high`."""
    rng = np.random.default_rng(seed)
    exponents, signs = rng.integers(low, high, 200_000), rng.choice([-1, 1], 200_000)
    return np.ldexp(rng.random(200_000) + 1, exponents).astype(np.float32) * signs.astype(np.float32)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_quotients() -> None:
    a, b = numbers(1, -60, 60), numbers(2, -60, 60)
    got, short = run(rounded._DIVIDE, a, b)
    assert short.all()
    assert same(got, a / b)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_quotients_of_special_values() -> None:
    a, b = (np.array(one, np.float32).ravel() for one in np.meshgrid(SPECIAL, SPECIAL))
    got, _ = run(rounded._DIVIDE, a, b)
    wide = np.abs(a) >= 2.0**-100
    exact = wide | ~np.isfinite(a) | (a == 0)
    assert same(got[exact], (a / b)[exact])
    assert np.allclose(got[~exact], (a / b)[~exact], rtol=2e-7, atol=2e-45, equal_nan=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_zeros_go_the_short_way() -> None:
    a, b = np.array([0.0, -0.0, 0.0, -0.0], np.float32), np.array([3, 3, -3, -3], np.float32)
    got, short = run(rounded._DIVIDE, a, b)
    assert short.all()
    assert same(got, a / b)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["inverse", "root"])
def test_functions(name: str) -> None:
    text, exact = {"inverse": (rounded._INVERT, lambda x: 1 / x), "root": (rounded._TAKE_ROOT, np.sqrt)}[name]
    x = numbers(3, -90, 90)
    x = np.abs(x) if name == "root" else x
    got, short = run(text, x)
    assert short.all()
    # the noise is another one than the hardware's, of which the assembler knows that no root is off
    assert np.count_nonzero(got != exact(x)) <= (2 if name == "root" else 0)
    special = np.array(SPECIAL, np.float32)
    assert same(run(text, special)[0], exact(special))


@pytest.mark.parametrize("divisor", [3.0, 10.0, 255.0, 300001.0, 6266904.0, 0.7, 1.1, 0.1, 1e-7])
def test_division_by_a_number(divisor: float) -> None:
    text = division_by_number("x", divisor, True)
    assert text is not None
    size, reciprocal, corrections = re.findall(r"[\d.e+-]+(?=[,)])", text)[-3:]
    x = numbers(4, -60, 60)
    c, r = np.float32(size), np.float32(reciprocal)
    found = x * r
    for _ in range(int(corrections)):
        found = compute("fma", compute("fma", np.full_like(x, c), found, -x), np.full_like(x, -r), found)
    assert same(found, x / c)
