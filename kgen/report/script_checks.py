"""What a script of a debug folder does with its graph: compares it with what is beside the script, and times it."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kgen.capture.eager_graph import EagerGraph
from kgen.capture.seeds import drawn_on_cpu
from kgen.reference.evaluate import Policy, evaluate_graph

__all__ = ["TOLERANCE", "check", "difference", "say", "timed"]

Graph = Callable[[list[Any]], list[Any]]

# Relative to the largest magnitude of a tensor: a sum in another order differs by a few roundings of that.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def check(graph: Graph, drawn: Callable[[], list[Any]], folder: Path) -> bool:
    """Prints how the results and changed inputs compare with the reference beside the script; True when they differ. `drawn`
    gives the same inputs at each call."""
    reference, name = _reference(folder)
    if reference is None:
        say("not checked: there is no reference in this folder")
        return False
    expected_inputs = [x.cpu() if isinstance(x, torch.Tensor) else x for x in drawn()]
    with drawn_on_cpu(stay=True):
        expected = reference(expected_inputs)
    inputs = drawn()
    with drawn_on_cpu(stay=False):
        got = graph(list(inputs))
    pairs = [(f"output {k}", a, b) for k, (a, b) in enumerate(zip(got, expected, strict=True))]
    pairs += [(f"input {k} after the call", a, b) for k, (a, b) in enumerate(zip(inputs, expected_inputs, strict=True))]
    wrong = [f"{what}: {found}" for what, a, b in pairs if (found := difference(a, b))]
    for line in wrong:
        say(f"WRONG {line}")
    if not wrong:
        say(f"right: all results ({len(got)}), and the inputs after the call, agree with {name}")
    return bool(wrong)


def _reference(folder: Path) -> tuple[Callable[[list[Any]], Sequence[Any]] | None, str]:
    if (folder / "graph.pkl").exists():
        lowered = pickle.loads((folder / "graph.pkl").read_bytes())
        return (lambda inputs: evaluate_graph(lowered, inputs, policy=Policy(check_vendor=False))), "the evaluated loop IR"
    if (folder / "graph.fx").exists():
        eager = EagerGraph.deserialize((folder / "graph.fx").read_bytes())
        return (lambda inputs: eager(list(inputs))), "the FX graph in eager"
    return None, ""


def difference(got: Any, expected: Any) -> str:
    """How two results differ, or an empty text."""
    if not isinstance(got, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return "" if type(got) is type(expected) and got == expected else f"{got} instead of {expected}"
    got, expected = got.detach().cpu(), expected.detach().cpu()
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return f"{got.dtype}{list(got.shape)} instead of {expected.dtype}{list(expected.shape)}"
    if not got.dtype.is_floating_point or not got.numel():
        return "" if torch.equal(got, expected) else "other values"
    wide, other = got.double(), expected.double()
    limit = TOLERANCE.get(got.dtype, 1e-1)
    finite = other[other.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    if torch.allclose(wide, other, rtol=limit, atol=limit * scale, equal_nan=True):
        return ""
    return f"differs by up to {float((wide - other).abs().nan_to_num().max()):.3g}, values up to {scale:.3g}"


def timed(graph: Graph, inputs: list[Any], on_gpu: bool, budget: float = 0.5) -> float:
    """The median seconds of a call; on a GPU of a call's share of several, for launches are asynchronous."""
    calls, wait = (20, torch.cuda.synchronize) if on_gpu else (1, lambda: None)
    samples: list[float] = []
    end = time.perf_counter() + budget
    while len(samples) < 3 or (time.perf_counter() < end and len(samples) < 1000):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            graph(list(inputs))
        wait()
        samples.append((time.perf_counter() - start) / calls)
    return median(samples[1:])


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201  a script's output
