"""A graph that the native runtime runs: the compiled result, and how it is stored on disk."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from kgen.aot_cache import NotSerializable
from kgen.build import cpp
from kgen.host import program as hp
from kgen.host.native import load


@dataclass(slots=True)
class Blueprint:
    """Everything that makes a compiled graph, as plain data: kernel sources with their keys, the program, its constants."""

    units: list[tuple[str, str]]  # (source, key)
    program: hp.Program
    constants: list[torch.Tensor] = field(default_factory=list)
    coverage: dict[str, int] = field(default_factory=dict)


class HostGraph:
    """Calls the native runtime. Re-entrant: it holds no state between calls."""

    def __init__(self, blueprint: Blueprint, output_strides: tuple[Any, ...] = (), callables: Sequence[Any] = ()) -> None:
        self.blueprint = blueprint
        self.output_strides = output_strides
        self.coverage: Mapping[str, int] = blueprint.coverage
        self.callables = list(callables)
        units = [cpp.Unit(f"kernels{k}", source, key) for k, (source, key) in enumerate(blueprint.units)]
        libraries = [cpp.load_library(path) for path in cpp.build_units(units)]
        self.run = load(blueprint.program, libraries, blueprint.constants, self.callables)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        return self.run(args)

    def serialize(self) -> bytes:
        if self.callables:
            raise NotSerializable("the graph calls Python functions")
        out = io.BytesIO()
        try:
            pickle.dump(self.blueprint, out)
        except (pickle.PicklingError, TypeError, AttributeError) as cause:
            raise NotSerializable(str(cause)) from cause
        return out.getvalue()

    @classmethod
    def deserialize(cls, data: bytes) -> Self:
        return cls(pickle.loads(data))
