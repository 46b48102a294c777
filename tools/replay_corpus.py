"""What the replay renders: the patterns of the benches, layers of models, a training step, operators one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.calibration import SIZES, problems
from bench.cpu_patterns import DTYPES, Model
from bench.cpu_patterns import MATMULS as CPU_MATMULS
from bench.gpu_patterns import GPU_PATTERNS
from bench.matmuls import BY_NUMBER
from bench.patterns import BY_NAME, PATTERNS
from examples.gpt import FULL, GPT, TINY, random_batch
from examples.transformer import AdamW
from tests.op_table import TABLE, Maker

DEVICES = ("cpu", "gpu")
MEGABYTES = 32
SAMPLE = 60  # problems of the calibration set
Call = tuple[Callable[..., Any], Sequence[Any]]


@dataclass(frozen=True)
class Case:
    """`build` gives a function and its arguments; it runs under a `FakeTensorMode`, so tensors have no data. `trains`: the
    graphs are those of the forward and of the backward."""

    name: str
    build: Callable[[], Call]
    trains: bool = False
    dynamic: bool = False
    devices: tuple[str, ...] = DEVICES
    options: Mapping[str, Any] = field(default_factory=dict)


def corpus(whole: bool = False) -> Iterator[Case]:
    """All cases; `whole` takes every problem of the calibration set."""
    for group in (memory_bound, gpu_memory_bound, gpu_matmuls, cpu_matmuls, models, operators, dynamic_sizes):
        yield from group()
    yield from calibration(1 if whole else None)


def memory_bound() -> Iterator[Case]:
    for one in PATTERNS:
        yield Case(f"memory/{one.name}", partial(_pattern, one))
        if one.trains:
            yield Case(f"memory/{one.name}-train", partial(_pattern, one), trains=True)


def _pattern(one: Any) -> Call:
    return one.fn, one.inputs(MEGABYTES)


def gpu_memory_bound() -> Iterator[Case]:
    for one in GPU_PATTERNS:
        yield Case(f"gpu-memory/{one.name}", partial(_pattern, one))


def gpu_matmuls() -> Iterator[Case]:
    for one in BY_NUMBER.values():
        yield Case(f"matmul/{one.number}", partial(_matmul, one))


def _matmul(one: Any) -> Call:
    return one.fn, _empty(one.inputs)


def _empty(given: Sequence[Any]) -> list[Tensor]:
    return [torch.empty(one.shape, dtype=one.dtype) for one in given]


def cpu_matmuls() -> Iterator[Case]:
    for name, one in CPU_MATMULS.items():
        for kind, dtype in DTYPES.items():

            def build(one: Any = one, dtype: torch.dtype = dtype) -> Call:
                return one.fn, _empty(one.given(dtype))

            def frozen(build: Callable[[], Call] = build) -> Call:
                fn, args = build()
                return Model(fn, args), args

            yield Case(f"cpu-matmul/{name}-{kind}", build)
            yield Case(f"frozen/{name}-{kind}", frozen, devices=("cpu",), options={"freezing": True})


def calibration(step: int | None) -> Iterator[Case]:
    """Every `step`th problem; without one, so many that SAMPLE are left. GPUs and CPUs have sizes of their own."""
    for device in DEVICES:
        found = problems(SIZES[device])
        for one in found[:: step or -(-len(found) // SAMPLE)]:
            yield Case(f"calibration/{one.name}", partial(_problem, one), devices=(device,))


def _problem(one: Any) -> Call:
    return one.fn, [_ordered(arg, torch.empty(arg.shape, dtype=arg.kind(one.dtype))) for arg in one.args]


def _ordered(arg: Any, made: Tensor) -> Tensor:
    if not arg.channels_last:
        return made
    return made.to(memory_format=torch.channels_last if made.dim() == 4 else torch.channels_last_3d)


# ---- models ------------------------------------------------------------------------------------------------------------


def models() -> Iterator[Case]:
    for name, shape, dtype in (("tiny", TINY, torch.float32), ("full", FULL, torch.bfloat16)):
        build = partial(gpt, shape, dtype)
        yield Case(f"models/gpt-{name}", build)
        yield Case(f"models/gpt-{name}-train", build, trains=True)
    yield Case("models/gpt-tiny-dynamic", partial(gpt, TINY, torch.float32), dynamic=True)
    yield Case("models/adamw", _adamw)


def gpt(shape: Any, dtype: torch.dtype) -> Call:
    return _model(shape, dtype), random_batch(shape, "cpu")


def _model(shape: Any, dtype: torch.dtype) -> nn.Module:
    """Made in its type: a module whose tensors have no data cannot be converted."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return GPT(shape)
    finally:
        torch.set_default_dtype(usual)


def _adamw() -> Call:
    parameters = list(_model(TINY, torch.float32).parameters())
    return AdamW(parameters).update, [[torch.empty_like(p, requires_grad=False) for p in parameters]]


# ---- operators ---------------------------------------------------------------------------------------------------------


def operators() -> Iterator[Case]:
    """Every second entry of the op table, on its largest sample."""
    for entry in TABLE[::2]:
        yield Case(f"ops/{entry.name}", partial(_operator, entry))


def _operator(entry: Any) -> Call:
    samples = entry.inputs(Maker(entry.dtypes[0]))
    return entry.fn, max(samples, key=lambda args: sum(a.numel() for a in args if isinstance(a, Tensor)))


def dynamic_sizes() -> Iterator[Case]:
    for name in ("softmax", "layer_norm", "gelu_chain", "transposed_add", "outer_variance", "cumsum"):
        yield Case(f"dynamic/{name}", partial(_pattern, BY_NAME[name]), dynamic=True)
    for number in ("2", "9", "11", "17", "18"):
        yield Case(f"dynamic/matmul-{number}", partial(_matmul, BY_NUMBER[number]), dynamic=True)
