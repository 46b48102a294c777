"""A contraction problem as data: what a failure is reported as, replayed from, and shrunk to."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

# How an operand is laid out in memory.
LAYOUTS = ("contiguous", "transposed", "channels_last", "sliced", "offset", "padded")


@dataclass(frozen=True)
class Problem:
    """`kind` is a row of `kinds.KINDS`; `sizes` and `options` are its own. `layouts` are those of the two operands. `left`,
    `right`, `epilogue` and `family` are rows of `around`; the empty name is none. `tf32` lets a GPU round float32 numbers;
    a `dynamic` one is compiled for sizes that are symbols."""

    seed: int
    kind: str
    dtype: str
    sizes: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, tuple[int, ...]], ...] = ()
    layouts: tuple[str, str] = ("contiguous", "contiguous")
    left: str = ""
    right: str = ""
    epilogue: str = ""
    family: str = ""
    tf32: bool = False
    dynamic: bool = False

    def size(self, name: str) -> int:
        return dict(self.sizes)[name]

    def option(self, name: str) -> tuple[int, ...]:
        return dict(self.options)[name]

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def with_size(self, name: str, length: int) -> Problem:
        return replace(self, sizes=tuple((n, length if n == name else old) for n, old in self.sizes))

    def with_option(self, name: str, values: tuple[int, ...]) -> Problem:
        return replace(self, options=tuple((n, values if n == name else old) for n, old in self.options))

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={length}" for name, length in self.sizes)
        options = " ".join(f"{name}={'x'.join(map(str, values))}" for name, values in self.options)
        around = [f"{what} {name}" for what in ("left", "right", "epilogue", "family") if (name := getattr(self, what))]
        layouts = [] if set(self.layouts) == {"contiguous"} else [" @ ".join(self.layouts)]
        flags = [name for name in ("tf32", "dynamic") if getattr(self, name)]
        return ", ".join([f"{self.kind} {self.dtype} {sizes}", *filter(None, [options]), *layouts, *around, *flags])


def as_json(problem: Problem) -> dict[str, Any]:
    return asdict(problem)


def from_json(data: str | dict[str, Any]) -> Problem:
    found = json.loads(data) if isinstance(data, str) else dict(data)
    found["sizes"] = tuple((name, length) for name, length in found["sizes"])
    found["options"] = tuple((name, tuple(values)) for name, values in found["options"])
    found["layouts"] = tuple(found["layouts"])
    return Problem(**found)
